"""`accelerate` on whole models of Hugging Face: norms, gated feed-forwards, attention and loss."""

import copy
import importlib
import inspect

import pytest
import torch
from torch import nn

import fastformer as ff
from fastformer.drop_in.replacements import rotary

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


def parts(name):
    """The classes of a decoder that are replaced."""
    return {name + part for part in ("RMSNorm", "MLP", "Attention", "DecoderLayer")}


# By name: the model, and the classes that are replaced in it.
MODELS = {
    "Llama": (Tiny("Llama", **SIZES), parts("Llama")),
    "Qwen3": (Tiny("Qwen3", **SIZES, **GROUPED), parts("Qwen3")),
    "Gemma 3": (Tiny("Gemma3Text", **SIZES, **GROUPED, query_pre_attn_scalar=8), parts("Gemma3")),
    "Mistral": (Tiny("Mistral", **SIZES, **GROUPED), parts("Mistral")),
    "Phi 3": (Tiny("Phi3", **SIZES), parts("Phi3")),
    "T5": (
        Tiny(
            "T5", "ForConditionalGeneration", vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48,
            num_layers=1, num_heads=4, feed_forward_proj="gated-gelu", dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
        {"T5LayerNorm", "T5DenseGatedActDense"},
    ),
    "BERT": (
        Tiny("Bert", "ForMaskedLM", **SIZES, **NO_DROPOUT),
        {"LayerNorm", "BertLayer", "BertIntermediate", "BertOutput", "BertSelfOutput"},
    ),
    "ViT": (
        Tiny(
            "ViT", "ForImageClassification", hidden_size=32, num_hidden_layers=2,
            num_attention_heads=4, intermediate_size=48, image_size=8, patch_size=4, num_labels=5,
            **NO_DROPOUT,
        ),
        {"LayerNorm", "ViTLayer", "ViTMLP"},
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
    model.set_attn_implementation("fastformer")
    report = ff.accelerate(model)
    assert signatures(model) == signatures(eager)
    assert set(report.replaced.values()) - {type(model).__name__} == MODELS[name][1]
    with ff.use_backend(backend):
        have = losses(model, steps)
    torch.testing.assert_close(have, losses(eager, steps), rtol=0, atol=1e-5)
    assert not report.fallbacks
    ff.restore(model)
    assert type(model) is type(eager)


def test_a_norm_with_a_weight_of_another_dtype():
    """Gemma's returns the dtype of its input, also where its weight is wider."""
    norm = made("Gemma 3").model.norm
    plain = copy.deepcopy(norm)
    report = ff.accelerate(norm)
    for dtype, fallback in ((torch.float32, False), (torch.bfloat16, False), (torch.float64, True)):
        x = torch.randn(2, 3, 32)
        have, want = norm.to(dtype)(x), plain.to(dtype)(x)
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
        assert bool(report.fallbacks) == fallback


def test_a_feed_forward_whose_last_projection_is_float32():
    """T5 keeps it so in 16 bits, and casts its input."""
    mlp = made("T5").encoder.block[0].layer[1].DenseReluDense.to(torch.bfloat16)
    mlp.wo.float()
    plain = copy.deepcopy(mlp)
    report = ff.accelerate(mlp)
    x = torch.randn(2, 3, 32, dtype=torch.bfloat16)
    assert torch.equal(mlp(x), plain(x))
    assert report.fallbacks[""] == {"its projections have other dtypes than the input": 1}


def test_arguments_by_name():
    model, x = made("Llama"), torch.randn(2, 3, 32)
    ff.accelerate(model)
    mlp, norm = model.model.layers[0].mlp, model.model.norm
    torch.testing.assert_close(mlp(x=x), mlp(x))
    torch.testing.assert_close(norm(hidden_states=x), norm(x))


def rotations(kind):
    """The rotary function of a model's attention."""
    name = {"GptOss": "gpt_oss"}.get(kind, kind.lower())
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    (found,) = rotary.rotations(getattr(modeling, f"{kind}Attention")).values()
    return found


# By model: the columns of cos and sin that its function takes, and whether the op ran.
TABLES = {
    "Llama": {(8, 1)},
    "Glm": {(8, 1), (4, 1), (2, 0)},
    "Cohere": {(8, 1)},
    "Phi3": {(8, 1), (4, 1), (2, 0)},
    "GptOss": {(4, 1)},
}


@pytest.mark.parametrize("kind, widths", TABLES.items(), ids=list(TABLES))
def test_rotary_functions(kind, widths):
    """Halves, neighbours, and both layouts, as the models call them; anything else as before."""
    rotation = rotations(kind)
    torch.manual_seed(0)
    counts = []
    for heads in (1, 2):
        q = torch.randn(2, 5, 3, 8).transpose(1, heads)
        k = torch.randn(2, 5, 1, 8).transpose(1, heads)
        for rows, width in (((2, 5), 8), ((1, 5), 8), ((2, 5), 4), ((2, 5), 2)):
            table = torch.randn(*rows, width // 2).repeat(1, 1, 2)
            given = q, k, table.cos(), table.sin()
            named = {} if heads == 2 else {"unsqueeze_dim": 2}
            try:
                want = rotation.function(*given, **named)
            except RuntimeError:  # a function that takes tables of another width
                continue
            calls = []
            with ff.dispatch.backends.observe(on_choice=calls.append):
                have = rotation(*given, **named)
            torch.testing.assert_close(have, want)
            counts.append((width, len(calls)))
    assert set(counts) == widths


@pytest.mark.parametrize("heads", [1, 2])  # the dimension of the heads
def test_a_rotary_function_of_one_tensor(heads):
    """Gemma 3n rotates queries and keys by two calls: heads before tokens, and after them."""
    modeling = importlib.import_module("transformers.models.gemma3n.modeling_gemma3n")
    (rotation,) = rotary.rotations(modeling.Gemma3nTextAttention).values()
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, 8).transpose(1, 3 - heads).requires_grad_()
    table = torch.randn(2, 5, 4).repeat(1, 1, 2)
    found, calls = [], []
    for function in (rotation, rotation.function):
        with ff.dispatch.backends.observe(on_choice=calls.append):
            y = function(x, table.cos(), table.sin(), unsqueeze_dim=heads)
        found.append((y, *torch.autograd.grad(y.sin().sum(), x)))
    assert len(calls) == 1
    torch.testing.assert_close(*found)
    learned = table.cos().requires_grad_()  # no op: the function computes it
    named = {"unsqueeze_dim": heads}
    found = [f(x, learned, table.sin(), **named) for f in (rotation, rotation.function)]
    assert torch.equal(*found) and found[0].requires_grad


def test_compiled_rotary_positions():
    """The compiler finds the globals of the replaced forward, and not those of its file."""
    layer = made("Llama").model.layers[0].self_attn
    x, angles = torch.randn(2, 5, 32), torch.randn(2, 5, 4).repeat(1, 1, 2)
    given = dict(position_embeddings=(angles.cos(), angles.sin()), attention_mask=None)
    want = layer(x, **given)[0]
    assert ff.accelerate(layer).replaced == {"": "LlamaAttention"}
    torch.compiler.reset()
    outer = torch.compile(lambda x: layer(x, **given)[0], fullgraph=True, backend="eager")
    torch.testing.assert_close(outer(x), want)


# By class of attention: why it keeps its rotary positions.
KEPT = {
    "gptj.GPTJAttention": "its apply_rotary_pos_emb takes (tensor, sin, cos); expected",
    "deepseek_v2.DeepseekV2Attention": "its apply_rotary_emb takes (xq, xk, freqs_cis); expected",
    "glm_moe_dsa.GlmMoeDsaIndexer": "is called by a forward with a decorator",
    "roformer.RoFormerSelfAttention": "apply_rotary_position_embeddings is not a function of its",
    "deepseek_v4.DeepseekV4Attention": "its apply_rotary_pos_emb computes something else than",
}


@pytest.mark.parametrize("name, why", KEPT.items(), ids=list(KEPT))
def test_the_report_names_rotary_positions_that_stay(name, why):
    model, kind = name.split(".")
    cls = getattr(pytest.importorskip(f"transformers.models.{model}.modeling_{model}"), kind)
    module = cls.__new__(cls)  # without its parameters and submodules
    nn.Module.__init__(module)
    report = ff.accelerate(nn.ModuleList([module]))
    assert report.skipped["0"].startswith(f"{kind}: ") and why in report.skipped["0"]


class Clamped(nn.Module):
    """Has the parts of a gated feed-forward layer, and computes something else."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 48), nn.Linear(32, 48)
        self.down_proj, self.act_fn = nn.Linear(48, 32), nn.SiLU()

    def forward(self, x):
        gate = self.gate_proj(x).clamp(max=0.5)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class Shifted(nn.Module):
    """Has the parts of an RMSNorm, and adds eps to the root."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-6

    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)


@pytest.mark.parametrize("make", [Clamped, Shifted])
def test_another_formula_is_found_by_the_trial_run(make):
    report = ff.accelerate(nn.Sequential(make()))
    assert "computes something else" in report.skipped["0"]
    assert not report.replaced


def test_the_report_names_what_stays():
    model = Tiny("Mixtral", **SIZES, **GROUPED, num_local_experts=2)()
    report = ff.accelerate(model)
    stayed = report.skipped["model.layers.0.mlp.experts"]
    assert stayed.startswith("MixtralExperts: no replacement has its structure (gate_up_proj")
    assert "MixtralRMSNorm" in report.replaced.values()
