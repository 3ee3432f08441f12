"""`accelerate` on whole models of Hugging Face: norms, gated feed-forwards, attention and loss."""

import copy
import inspect
from collections import Counter

import pytest
import torch

import fastformer as ff

transformers = pytest.importorskip("transformers", "5.17")
from tiny_models import Tiny  # noqa: E402

transformers.logging.set_verbosity_error()

VOCABULARY, LENGTH = 40, 9
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=48, max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
GROUPED = dict(num_key_value_heads=2, head_dim=8)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


DECODER = dict(
    scaled_dot_product_attention=2, gated_activation=2, rms_norm=3, dropout_add_rms_norm=2
)
ENCODER = dict(
    scaled_dot_product_attention=2, feed_forward=2, layer_norm=1, dropout_add_layer_norm=4
)
# By name: the model, and how often each op is put into its layers.
MODELS = {
    "Llama": (Tiny("Llama", **SIZES), DECODER),
    "Qwen3": (Tiny("Qwen3", **SIZES, **GROUPED), DECODER | dict(rms_norm=7)),
    "Gemma 3": (
        Tiny("Gemma3Text", **SIZES, **GROUPED, query_pre_attn_scalar=8),
        DECODER | dict(rms_norm=11),  # with the two sums, all 13 of the model
    ),
    "Mistral": (Tiny("Mistral", **SIZES, **GROUPED), DECODER),
    "Phi 3": (Tiny("Phi3", **SIZES), DECODER),
    "T5": (
        Tiny(
            "T5", "ForConditionalGeneration", vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48,
            num_layers=1, num_heads=4, feed_forward_proj="gated-gelu", dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
        dict(scaled_dot_product_attention=3, gated_activation=2, rms_norm=7),
    ),
    "BERT": (
        Tiny("Bert", "ForMaskedLM", **SIZES, **NO_DROPOUT),
        ENCODER,
    ),
    "ViT": (
        Tiny(
            "ViT", "ForImageClassification", hidden_size=32, num_hidden_layers=2,
            num_attention_heads=4, intermediate_size=48, image_size=8, patch_size=4, num_labels=5,
            **NO_DROPOUT,
        ),
        ENCODER | dict(layer_norm=2, dropout_add_layer_norm=2),
    ),
}  # fmt: skip


def made(name):
    torch.manual_seed(0)
    model = MODELS[name][0]()
    with torch.no_grad():
        for x in model.parameters():  # also the norms' weights, which begin at 1 or at 0
            x += 0.05 * torch.randn_like(x)
    return model


def batch(model, seed):
    g = torch.Generator().manual_seed(seed)
    if model.config.model_type == "vit":
        pixels = torch.randn(3, 3, 8, 8, generator=g)
        return dict(pixel_values=pixels, labels=torch.randint(0, 5, (3,), generator=g))
    tokens = torch.randint(1, VOCABULARY, (3, LENGTH), generator=g)
    labels = tokens.clone()
    labels[0, :3] = -100
    return dict(input_ids=tokens, labels=labels)


def losses(model, steps):
    """Train, and return the losses."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    found = []
    for step in range(steps):
        loss = model(**batch(model, step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found)


def signatures(model):
    """The names of the arguments of each module: Trainer reads those of a model."""
    return [[*inspect.signature(module.forward).parameters] for module in model.modules()]


@pytest.mark.parametrize("backend, steps", [("reference", 20), ("triton", 1)])
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_eager(name, backend, steps):
    ff.register_transformers()
    model = made(name)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    model.set_attn_implementation("eager")
    report = ff.accelerate(model)
    assert signatures(model) == signatures(eager)
    with ff.use_backend(backend):
        have = losses(model, steps)
    parts = [x for parts in report.rewritten.values() for x in parts]
    assert Counter(x.op for x in parts if x.op) == MODELS[name][1]
    torch.testing.assert_close(have, losses(eager, steps), rtol=0, atol=1e-5)
    assert not report.fallbacks
    ff.restore(model)
    assert type(model) is type(eager)
