"""Hugging Face models, randomly initialised: attn_implementation="fastformer" against their own
eager attention.
"""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastformer as ff
from fastformer import functional, integrations

transformers = pytest.importorskip("transformers")
from transformers import masking_utils  # noqa: E402

ff.register_transformers()

ROOT = Path(__file__).resolve().parents[1]
B, S, V = 2, 7, 23
# Large enough that no softmax is flat.
WIDE = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
HEADS = {"num_attention_heads": 4, "intermediate_size": 48}
DECODER = {**WIDE, **HEADS, "num_key_value_heads": 2, "pad_token_id": 0}
BART = {
    "vocab_size": V,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 40,
    "init_std": 0.3,
    "dropout": 0.0,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
}


def bert(**changes):
    config = {**WIDE, **HEADS, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**{**config, **changes}))


def gpt2(**changes):
    config = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
    config |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_positions": 40}
    config |= {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**config, **changes}))


def t5(**changes):
    config = {"vocab_size": V, "d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8}
    config |= {"d_ff": 48, "initializer_factor": 1.5, "decoder_start_token_id": 0}
    config |= {"dropout_rate": 0.0, "relative_attention_num_buckets": 8}
    config |= {"relative_attention_max_distance": 6}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**{**config, **changes}))


def llama(**changes):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**DECODER, **changes}))


def mistral(**changes):
    config = {**DECODER, "sliding_window": 3, **changes}
    return transformers.MistralForCausalLM(transformers.MistralConfig(**config))


def gemma2(**changes):
    config = {**DECODER, "head_dim": 8, "attn_logit_softcapping": 2.0, "sliding_window": 3}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**{**config, **changes}))


def bart(**changes):
    config = transformers.BartConfig(**{**BART, "forced_eos_token_id": None, **changes})
    return transformers.BartForConditionalGeneration(config)


def whisper(**changes):
    config = {**BART, "num_mel_bins": 4, "max_source_positions": 5, "max_target_positions": 40}
    config |= {"bos_token_id": 1, "eos_token_id": 3, "begin_suppress_tokens": None}
    config = transformers.WhisperConfig(**{**config, **changes})
    return transformers.WhisperForConditionalGeneration(config)


def vit(**changes):
    config = {**WIDE, **HEADS, "image_size": 8, "patch_size": 4, "num_channels": 1}
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 5}
    del config["vocab_size"]
    return transformers.ViTForImageClassification(transformers.ViTConfig(**{**config, **changes}))


MODELS = [bert, gpt2, t5, llama, mistral, bart, whisper, vit]
DECODERS = [gpt2, llama, mistral, gemma2]


def inputs(make, padding, device):
    """Keyword arguments of the model, with labels where a real token predicts a real one."""
    if make is vit:
        return {
            "pixel_values": torch.randn(B, 1, 8, 8, device=device),
            "labels": torch.arange(B, device=device),
        }
    ids = torch.randint(4, V, (B, S), device=device)
    mask = torch.ones_like(ids)
    if padding == "right":
        mask[1, 4:] = 0
    elif padding == "left":
        mask[1, :3] = 0
    labels = ids.masked_fill(mask == 0, -100)
    if make is whisper:
        features = torch.randn(B, 4, 10, device=device)
        given = {"input_features": features, "decoder_input_ids": ids, "labels": labels}
        return given if padding == "none" else {**given, "decoder_attention_mask": mask}
    if make in DECODERS:  # the first real token is predicted by what stands before it
        labels[1, mask[1].argmax()] = -100
    given = {"input_ids": ids, "labels": labels}
    return given if padding == "none" else {**given, "attention_mask": mask}


@pytest.fixture(autouse=True)
def finite_masks(monkeypatch):
    """Eager masks in float64 that stay finite where a model takes its softmax in float32."""

    def mask(dtype=torch.float32, **given):
        dtype = torch.float32 if dtype == torch.float64 else dtype
        return masking_utils.eager_mask(dtype=dtype, **given)

    masks = masking_utils.AttentionMaskInterface._global_mapping
    monkeypatch.setitem(masks, "eager", mask)


def outcome(model, implementation, given):
    """Logits where tokens are real, the loss, and the gradient of each parameter."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    given = {n: x.to(dtype) if x.is_floating_point() else x for n, x in given.items()}
    out = model(**given)
    out.loss.backward()
    grads = {f"grad of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    decoders = model.config.is_encoder_decoder
    mask = given.get("decoder_attention_mask" if decoders else "attention_mask")
    logits = out.logits if mask is None else out.logits[mask.bool()]
    return {"logits": logits.detach(), "loss": out.loss.detach(), **grads}


def check(model, given):
    """The numerics policy: fastformer in float32 against eager in float64, logits, loss and the
    gradient of every parameter (of one that is nothing but rounding, as that of a key's bias,
    against a hundredth of the largest).
    """
    have = outcome(model, "fastformer", given)
    want = outcome(copy.deepcopy(model).double(), "eager", given)
    largest = max(x.norm() for name, x in want.items() if "grad" in name)
    assert have.keys() == want.keys()
    for name, x in want.items():
        scale = x.norm().clamp_min(1e-2 * largest) if "grad" in name else x.norm()
        error = (have[name].double() - x).norm() / scale
        assert error < 1e-5, f"{name}: {error:.1e}"


# ----------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("make", [*MODELS, gemma2], ids=lambda make: make.__name__)
def test_against_eager(make, padding, device):
    if make is vit and padding != "none":
        pytest.skip("images have no padding")
    with ff.use_backend("reference"):
        check(make().to(device), inputs(make, padding, device))


@pytest.mark.parametrize("make", [*MODELS, gemma2], ids=lambda make: make.__name__)
def test_on_the_kernels(make, device):
    with ff.use_backend("triton"):
        check(make().to(device), inputs(make, "left" if make in DECODERS else "right", device))
