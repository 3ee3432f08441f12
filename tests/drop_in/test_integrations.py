"""Hugging Face models, randomly initialised: attn_implementation="fastformer" against their own
eager attention.
"""

import contextlib
import copy
import itertools
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import compare_models
import hugging_face_models
import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensor

import fastformer as ff
from benchmarks import ROOT
from fastformer import numerics
from fastformer.drop_in import masks, transformers_attention
from fastformer.ops import functional

transformers = pytest.importorskip("transformers")
from tiny_models import Tiny  # noqa: E402
from transformers import masking_utils  # noqa: E402

ff.register_transformers()

OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 20)
B, S, V = 2, 7, 23
# Large enough that no softmax is flat.
WIDE = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
HEADS = {"num_attention_heads": 4, "intermediate_size": 48}
DECODER = {**WIDE, **HEADS, "num_key_value_heads": 2, "pad_token_id": 0}
BART = dict(
    vocab_size=V, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=40,
    init_std=0.3, dropout=0.0, pad_token_id=0, decoder_start_token_id=2,
)  # fmt: skip
GPT = dict(
    vocab_size=V, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, n_positions=40,
    pad_token_id=0,
)  # fmt: skip
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
WINDOW = dict(sliding_window=3, head_dim=8)

bert = Tiny("Bert", "ForMaskedLM", **WIDE, **HEADS, **NO_DROPOUT)
gpt2 = Tiny(
    "GPT2", "LMHeadModel", **GPT, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1,
    eos_token_id=None,
)  # fmt: skip
gpt_bigcode = Tiny("GPTBigCode", **GPT)
t5 = Tiny(
    "T5", "ForConditionalGeneration", vocab_size=V, d_model=32, num_layers=2, num_heads=4, d_kv=8,
    d_ff=48, initializer_factor=1.5, decoder_start_token_id=0, dropout_rate=0.0,
    relative_attention_num_buckets=8, relative_attention_max_distance=6,
)  # fmt: skip
llama = Tiny("Llama", **DECODER)
mistral = Tiny("Mistral", **DECODER, sliding_window=3)
gemma2 = Tiny(
    "Gemma2", **DECODER, **WINDOW, attn_logit_softcapping=2.0, final_logit_softcapping=None,
    tie_word_embeddings=False,
)  # fmt: skip
gpt_oss = Tiny(  # the implementation of the experts that is its default has no float64
    "GptOss", **DECODER, **WINDOW, num_local_experts=2, num_experts_per_tok=1, eos_token_id=None,
    experts_implementation="eager",
)  # fmt: skip
bart = Tiny("Bart", "ForConditionalGeneration", **BART, forced_eos_token_id=None)
whisper = Tiny(
    "Whisper", "ForConditionalGeneration", **BART, num_mel_bins=4, max_source_positions=5,
    max_target_positions=40, bos_token_id=1, eos_token_id=3, begin_suppress_tokens=None,
)  # fmt: skip
vit = Tiny(
    "ViT", "ForImageClassification", **{**WIDE, "vocab_size": None}, **HEADS, **NO_DROPOUT,
    image_size=8, patch_size=4, num_channels=1, num_labels=5,
)  # fmt: skip

opt = Tiny(
    "OPT", **WIDE, num_attention_heads=4, ffn_dim=48, word_embed_proj_dim=32, pad_token_id=0,
    max_position_embeddings=40, init_std=0.3,
)  # fmt: skip

MODELS = [bert, gpt2, t5, llama, mistral, bart, whisper, vit, gemma2, gpt_oss]
DECODERS = [gpt2, llama, mistral, gemma2, gpt_oss]


def inputs(make, padding, device, length=S):
    """Keyword arguments of the model, with labels where a real token predicts a real one."""
    if make is vit:
        return {
            "pixel_values": torch.randn(B, 1, 8, 8, device=device),
            "labels": torch.arange(B, device=device),
        }
    ids = torch.randint(4, V, (B, length), device=device)
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
    masks = masking_utils.AttentionMaskInterface._global_mapping
    monkeypatch.setitem(masks, "eager", compare_models.finite_eager_mask)


def use(model, implementation):
    """Sets it, and sees that every part of the model has it."""
    model.set_attn_implementation(implementation)
    configs = [part.config for part in model.modules() if hasattr(part, "config")]
    if OLD:  # T5's stacks have copies of the configuration, which it does not reach
        for config in configs:
            config._attn_implementation_internal = implementation
    assert {config._attn_implementation for config in configs} == {implementation}


def outcome(model, implementation, given):
    """Logits where tokens are real, the loss, and the gradient of each parameter."""
    use(model, implementation)
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
        error = (have[name].double() - x).norm()
        error /= x.norm().clamp_min(1e-2 * largest if "grad" in name else 0)
        assert error <= numerics.RELATIVE[torch.float32], f"{name}: {error:.1e}"


# ----------------------------------------------------------------------------------------- models


@pytest.mark.parametrize(
    "backend, padding",
    [("reference", "none"), *itertools.product(["reference", "triton"], ["right", "left"])],
)
@pytest.mark.parametrize("make", MODELS)
def test_against_eager(make, backend, padding, device):
    with ff.use_backend(backend):
        check(make().to(device), inputs(make, padding, device))


@pytest.mark.parametrize("make", [bert, llama])
def test_in_bfloat16(make, device):
    """At most twice the error of eager in bfloat16, three times for a gradient."""
    model, given = make().to(device).bfloat16(), inputs(make, "left", device)
    have, eager = (outcome(model, name, given) for name in ("fastformer", "eager"))
    want = outcome(copy.deepcopy(model).double(), "eager", given)
    floor = max(x.abs().max() for name, x in want.items() if "grad" in name)
    for name, x in want.items():
        error, peer = ((y[name].double() - x).abs().max() for y in (have, eager))
        factor, largest = (3, floor) if "grad" in name else (2, x.abs().max())
        assert error <= factor * peer + torch.finfo(torch.bfloat16).eps / 2 * largest, name


def test_gpt2_with_scaled_scores(device):
    changes = {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}
    check(gpt2(**changes).to(device), inputs(gpt2, "left", device))


def test_gpt2_with_cross_attention(device):
    given = inputs(gpt2, "left", device)
    given["encoder_hidden_states"] = torch.randn(B, 5, 32, device=device)
    given["encoder_attention_mask"] = torch.tensor([[1] * 5, [1, 1, 0, 0, 0]], device=device)
    check(gpt2(add_cross_attention=True).to(device), given)


@pytest.mark.parametrize("padding", ["none", "left"])
def test_is_causal_of_a_decoder(padding, device):
    """That of the configuration counts, in its masks and where it has none. Those of the layers do
    not: some are False, and the masks are causal.
    """
    given = inputs(llama, padding, device)
    check(llama(is_causal=False).to(device), given)
    model = llama().to(device)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    check(model, given)


def test_is_causal_of_a_layer():
    """An argument counts if there is no mask. BridgeTower's layers have is_causal = True, and see
    everything.
    """
    module, x = torch.nn.Module(), torch.randn(1, 2, 3, 4)
    everything = ff.scaled_dot_product_attention(x, x, x).transpose(1, 2)
    triangle = ff.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2)
    full = transformers_attention.mask(
        1, 3, 3, mask_function=masking_utils.bidirectional_mask_function,
        allow_is_bidirectional_skip=True,
    )  # fmt: skip
    for own, mask, given, want in (
        (None, None, None, everything),
        (False, None, None, everything),
        (True, None, None, everything),
        (True, full, None, everything),
        (True, None, False, everything),
        (False, None, True, triangle),
    ):
        if own is not None:
            module.is_causal = own
        have, weights = transformers_attention.attention(module, x, x, x, mask, is_causal=given)
        torch.testing.assert_close(have, want)
        assert weights is None


DOCUMENTS = [[5, 3, 8], [7], [2, 9, 4, 11, 6]]


def flattened(device, **options):
    """A batch of one row that holds the documents one after the other."""
    collator = transformers.DataCollatorWithFlattening(return_tensors="pt", **options)
    batch = collator([{"input_ids": document} for document in DOCUMENTS])
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("told_by", ["position_ids", "cu_seq_lens", "seq_idx"])
@pytest.mark.parametrize("make", [llama, mistral, gemma2, gpt_oss])
def test_packed_sequences(make, told_by, use_cache, attention_calls, device):
    """Each document is computed as if it were alone, by packed_attention."""
    options = {"cu_seq_lens": "return_flash_attn_kwargs", "seq_idx": "return_seq_idx"}
    given = flattened(device, **{name: True for k, name in options.items() if k == told_by})
    model = make(attn_implementation="fastformer").to(device).eval()
    have = model(**given, use_cache=use_cache)
    assert attention_calls == []
    gradients = torch.autograd.grad(have.logits.square().sum(), list(model.parameters()))
    alone = copy.deepcopy(model).double()
    use(alone, "eager")
    documents = [torch.tensor([document], device=device) for document in DOCUMENTS]
    want = torch.cat([alone(document, use_cache=False).logits for document in documents], 1)
    assert (have.logits - want).norm() <= numerics.RELATIVE[torch.float32] * want.norm()
    wanted = torch.autograd.grad(want.square().sum(), list(alone.parameters()))
    for x, y in zip(gradients, wanted):
        assert (x - y).norm() <= 10 * numerics.RELATIVE[torch.float32] * max(y.norm(), 1e-2)


def test_sequences_of_other_positions():
    """The same mask in two calls: each finds its sequences in its own position_ids."""
    x, i = torch.randn(1, 2, 6, 4), torch.arange(6)
    mask = masks.Mask((1, 1, 6, 6), None, None, 0, "cpu", "the model")
    for n in (2, 4):
        given = dict(position_ids=torch.cat([i[:n], i[: 6 - n]])[None])
        have, _ = transformers_attention.attention(torch.nn.Module(), x, x, x, mask, **given)
        seen = ((i[:, None] < n) == (i < n)).tril()
        want = ff.scaled_dot_product_attention(x, x, x, seen).transpose(1, 2)
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("head_dim", [128, 512, 520])
def test_head_dims_that_the_docs_name(head_dim, device):
    """Above 512 the reference computes the layers."""
    check(llama(head_dim=head_dim).to(device), inputs(llama, "left", device))


@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="it has no Gemma 4")
def test_the_head_dims_of_gemma_4(device):
    """Layers with a window have 256, the others 512: the attention and the accelerated model. In
    float64, as in the sweep: its scores are large, and not scaled down.
    """
    gemma4 = Tiny(
        "Gemma4Text", **{**DECODER, "num_attention_heads": 2, "num_key_value_heads": 1},
        head_dim=256, global_head_dim=512, hidden_size_per_layer_input=0, sliding_window=3,
        layer_types=["sliding_attention", "full_attention"], num_kv_shared_layers=0,
    )  # fmt: skip
    model, given = gemma4().to(device).double(), inputs(llama, "left", device)
    assert [layer.self_attn.head_dim for layer in model.model.layers] == [256, 512]
    use(model, "eager")
    want = compare_models.results(model, given)
    use(model, "fastformer")
    with compare_models.counted() as calls:
        have = compare_models.results(model, given)
    assert compare_models.error(have, want) < compare_models.BOUND
    assert len(calls) == 2
    wanted = [("left", given, want)]
    fault, (reached, stays, _) = compare_models.check_accelerated(
        model.config, type(model), model, "fastformer", wanted, None
    )
    assert (fault, stays, reached[2]) == ("", "", 2) and reached[1] >= 6


@pytest.mark.parametrize("make", [t5, llama])
def test_accelerated_models_with_masks_of_several_lengths(make, device):
    """Dynamo captures the layers for any length: no call falls back."""
    model = make(attn_implementation="fastformer").to(device).eval()
    report = ff.accelerate(model)
    with ff.use_backend("reference"), torch.no_grad():
        for padding, length in (("none", S), ("right", S + 2), ("left", S + 3)):
            given = inputs(make, padding, device, length)
            model(**given)
    assert not report.fallbacks and all(report.rewritten.values())


def test_batches_that_are_not_packed(attention_calls, device):
    """Positions that count on, one sequence, a step after a prompt, two rows."""
    model = llama(attn_implementation="fastformer").to(device).eval()
    tokens = torch.tensor([[5, 3, 8, 7]], device=device)
    positions = torch.arange(2, 6, device=device)[None]
    for given in (
        {"input_ids": tokens, "position_ids": positions},
        {"input_ids": tokens, "cu_seq_lens_q": None},
        {"input_ids": tokens.repeat(2, 1)},
    ):
        attention_calls.clear()
        cache = model(**given, use_cache=True).past_key_values
        assert attention_calls and all(call["attn_mask"] is None for call in attention_calls)
    attention_calls.clear()
    model(tokens[:, :1].repeat(2, 1), past_key_values=cache)
    assert attention_calls


def test_sequences_that_do_not_fit(device):
    model = llama(attn_implementation="fastformer").to(device)
    given = flattened(device, return_flash_attn_kwargs=True)
    with pytest.raises(ValueError, match=r"^tomorrows_keyword .*not supported"):
        model(**given, tomorrows_keyword=torch.ones(2))
    with pytest.raises(ValueError, match=r"^cu_seq_lens_k differs from cu_seq_lens_q"):
        model(**{**given, "cu_seq_lens_k": given["cu_seq_lens_q"] + 1})
    with pytest.raises(ValueError, match=r"^cu_seqlens_q goes from 0 to 9; expected .* query, 8"):
        model(**{**given, "input_ids": given["input_ids"][:, 1:],
                 "position_ids": given["position_ids"][:, 1:], "labels": None})  # fmt: skip


@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
def test_masks_of_the_user(kind, device):
    """Of four dimensions they reach the layers as they are, and are complete: no causality."""
    given = inputs(llama, "none", device)
    seen = torch.rand(B, 1, S, S, device=device) < 0.5
    seen |= torch.eye(S, device=device, dtype=torch.bool)
    additive = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    model = llama().to(device)
    mine = seen if kind == torch.bool else additive
    use(model, "fastformer")
    have = model(**given, attention_mask=mine).logits
    use(model, "eager")
    torch.testing.assert_close(have, model(**given, attention_mask=additive).logits)


def test_float_mask_beside_a_position_bias(device):
    q, k, v = (torch.randn(B, 4, S, 8, device=device) for _ in range(3))
    mask, bias = torch.randn(B, 1, S, S, device=device), torch.randn(1, 4, S, S, device=device)
    have, _ = transformers_attention.attention(torch.nn.Module(), q, k, v, mask, position_bias=bias)
    want = ff.scaled_dot_product_attention(q, k, v, mask + bias)
    torch.testing.assert_close(have, want.transpose(1, 2))


@pytest.mark.parametrize("make", [bert, mistral, t5, gpt2, gpt_bigcode, opt])
def test_output_attentions(make, device):
    """The layers of the last three do not hand `output_attentions` to the attention function."""
    model, given = make().to(device).eval(), inputs(make, "right", device)
    use(model, "fastformer")
    have = model(**given, output_attentions=True)
    assert not any("attentions" in name for name in model(**given))
    use(model, "eager")
    want = model(**given, output_attentions=True)
    names = [name for name in want if "attentions" in name and want[name]]
    assert names
    rows = given["attention_mask"].bool()
    for name in names:
        assert len(have[name]) == len(want[name]) == 2
        for x, y in zip(have[name], want[name]):
            if name in ("attentions", "encoder_attentions"):
                x, y = (w.transpose(1, 2)[rows] for w in (x, y))
            torch.testing.assert_close(x, y, atol=2e-6, rtol=1e-5)


@pytest.mark.with_all
def test_output_attentions_of_compiled_layers():
    """Without attentions their graph does not break; with them, they are there."""
    model, tokens = opt(attn_implementation="fastformer").eval(), torch.randint(4, V, (B, S))
    want = model(tokens, use_cache=False).logits
    for layer in model.model.decoder.layers:
        layer.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(model(tokens, use_cache=False).logits, want)
    for layer in model.model.decoder.layers:
        layer.compile(backend="eager")
    attentions = model(tokens, use_cache=False, output_attentions=True).attentions
    assert [x.shape[2:] for x in attentions] == [(S, S)] * 2


@pytest.mark.parametrize("make", [llama, mistral, bert, bart])
def test_a_padding_mask_has_one_row(make, device, attention_calls):
    """So its bounds are those of all queries; padding in the middle is masked as well. Heads are
    not repeated.
    """
    model, given = make().to(device).eval(), inputs(make, "right", device)
    given["attention_mask"][0, 2] = 0
    want = outcome(model, "eager", given)
    with ff.use_backend("triton"):
        have = outcome(model, "fastformer", given)
    torch.testing.assert_close(have, want, rtol=1e-3, atol=1e-4)
    seen = [call for call in attention_calls if call["attn_mask"] is not None]
    assert seen and all(call["attn_mask"].shape == (B, 1, 1, S) for call in seen)
    assert all(call["key_lengths"] is None for call in seen)
    heads = 2 if make in (llama, mistral) else 4
    assert all(call["key"].shape == (B, heads, S, 8) for call in attention_calls)
    assert make is not llama or all(call["is_causal"] for call in attention_calls)


def test_no_mask_is_made_without_padding(device, attention_calls):
    """Without padding there is no mask, of causality and window neither; the one query of a step of
    decoding has no diagonal.
    """
    model = mistral(attn_implementation="fastformer").to(device).eval()
    model.generate(torch.randint(4, V, (B, 5), device=device), max_new_tokens=2, do_sample=False)
    prompt, step = attention_calls[0], attention_calls[-1]
    assert prompt["attn_mask"] is step["attn_mask"] is None
    assert prompt["window"] == (2, 0) and step["window"] == (None, None)
    assert step["key"].shape == (B, 2, 3, 8) and not step["is_causal"]  # all of the cache


def test_one_query_for_all_sequences(device):
    """As learned queries are; and the layout is that of eager, [B, S, H, D] without gaps."""
    q, k = torch.randn(1, 2, 3, 4, device=device), torch.randn(B, 2, 5, 4, device=device)
    have, _ = transformers_attention.attention(torch.nn.Module(), q, k, k, None)
    want = ff.scaled_dot_product_attention(q.expand(B, -1, -1, -1), k, k).transpose(1, 2)
    torch.testing.assert_close(have, want)
    assert have.is_contiguous()


@pytest.mark.parametrize("make", [llama, t5])
def test_gradient_checkpointing(make, device):
    """Recomputed in the backward, with the dropout of the forward."""
    dropout = {"attention_dropout": 0.2} if make is llama else {"dropout_rate": 0.2}
    model, given = make(**dropout, use_cache=False).to(device).train(), inputs(make, "left", device)
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(1)
        results.append(outcome(model, "fastformer", given))
    torch.testing.assert_close(*results)


def test_dropout_is_the_same_on_both_backends(device):
    model = bert(attention_probs_dropout_prob=0.3).to(device).train()
    given, losses = inputs(bert, "right", device), {}
    for name in ("reference", "triton"):
        with ff.use_backend(name):
            torch.manual_seed(1)
            losses[name] = outcome(model, "fastformer", given)["loss"]
    torch.testing.assert_close(losses["triton"], losses["reference"], rtol=1e-5, atol=0)
    torch.manual_seed(2)
    assert (outcome(model, "fastformer", given)["loss"] - losses["reference"]).abs() > 1e-3
    model.eval()
    assert torch.equal(*(outcome(model, "fastformer", given)["loss"] for _ in range(2)))


# ---------------------------------------------------------------------------------------- explain


def rows_of(model, what):
    explanation = ff.explain(model, torch.randint(4, V, (B, S)))
    return [row[1:] for row in explanation.rows if what in row[0]]


def test_explain(device):
    """An untouched model is told what to do; the layers of one with an attention of its own are
    listed as such.
    """
    model = bert().to(device).eval()
    reasons = {}
    for name in ("eager", "sdpa", "fastformer"):
        model.set_attn_implementation(name)
        reasons[name] = rows_of(model, "attention.self")
    assert [row[:2] for row in reasons["eager"]] == [("BertSelfAttention", "torch")] * 2
    assert [row[:2] for row in reasons["sdpa"]] == [("scaled_dot_product_attention", "torch")] * 2
    for name in ("eager", "sdpa"):
        suggestion = f"attn_implementation is {name!r}; .*set_attn_implementation.'fastformer'."
        assert all(re.search(suggestion, row[2]) for row in reasons[name])
    assert {row[:2] for row in reasons["fastformer"]} == {
        ("scaled_dot_product_attention", "reference")
    }
    assert ("LayerNorm", "torch", "accelerate(model) has not replaced it") in rows_of(model, "Norm")

    config = transformers.DebertaV2Config(**WIDE, **HEADS)
    model = transformers.DebertaV2Model._from_config(config, attn_implementation="fastformer")
    own = "attention of its own; accelerate(model) rewrites what the ops compute"
    assert rows_of(model, "attention.self") == [("DisentangledSelfAttention", "torch", own)] * 2


# --------------------------------------------------------------------------------------- generate


def generated(model, implementation, given, **options):
    use(model, implementation)
    given = {name: x for name, x in given.items() if name != "labels"}
    torch.manual_seed(1)
    return model.generate(**given, max_new_tokens=8, **{"do_sample": False, **options})


SEARCHES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 5, "temperature": 0.7},
}
GENERATED = [
    *itertools.product(DECODERS, ["greedy"], ["dynamic", "static", None]),
    *itertools.product([llama, mistral], ["beams", "sampling"], ["dynamic", "static"]),
    *itertools.product([llama, gemma2], ["greedy"], ["offloaded", "offloaded_static"]),
    (llama, "greedy", "fp8"),
]


@pytest.mark.parametrize(("make", "search", "cache"), GENERATED)
def test_generate(make, search, cache, device, monkeypatch):
    """Token for token, left-padded; the windows of Mistral and Gemma 2 are of 3 tokens. With a
    quantized cache in float64, so that no rounding of ours turns one of the quantization.
    """
    model, given = make().to(device).eval(), inputs(make, "left", device)
    options = {"use_cache": False} if cache is None else {"cache_implementation": cache}
    if cache == "fp8":
        if not hasattr(transformers.cache_utils, "Fp8QuantizedLayer"):
            pytest.skip(f"transformers {transformers.__version__} has no fp8 cache")
        model, options = model.double(), {"cache_implementation": "quantized"}
        options["cache_config"] = {"backend": cache}
    elif cache and cache.startswith("offloaded") and device.type == "cpu":

        class Stream(contextlib.nullcontext):  # the copies wait for nothing
            def wait_stream(self, other):
                pass

        monkeypatch.setattr(torch, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: Stream())
    options |= SEARCHES[search]
    have, want = (generated(model, name, given, **options) for name in ("fastformer", "eager"))
    assert torch.equal(have, want)
    if search == "greedy":  # and not the same token over and over
        assert have.shape == (B, S + 8) and len(want[:, S:].unique()) > 3


def in_pieces(model, given, cache, *ends):
    """Run a prompt in pieces, and yield each end; the logits are those of the whole prompt."""
    ids, mask = given["input_ids"], given.get("attention_mask")
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp_min(0)
    whole = model(ids, attention_mask=mask, position_ids=positions).logits
    for start, end in itertools.pairwise((0, *ends)):
        more = {"past_key_values": cache}
        rows = slice(None)
        if mask is not None:
            more |= {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
            rows = mask[:, start:end].bool()
        have = model(ids[:, start:end], **more).logits
        torch.testing.assert_close(have[rows], whole[:, start:end][rows], atol=1e-4, rtol=1e-4)
        yield end


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("make", [llama, mistral])
def test_a_static_cache_is_read_where_it_is(make, backend, device, attention_calls):
    """The op gets the buffers of all positions, and the number of those in use. Nothing is copied,
    and no mask is of queries times keys.
    """
    model, given = make().to(device).eval(), inputs(make, "left", device)
    use(model, "fastformer")
    cache = transformers.StaticCache(config=model.config, max_cache_len=S + 3)
    with ff.use_backend(backend), torch.no_grad():
        for end in in_pieces(model, given, cache, 2, 3, 6, 7):
            if make is mistral:
                continue  # a window of 3 positions, which transformers rolls
            for layer, call in zip(cache.layers, attention_calls[-2:]):
                assert call["key"].shape == layer.keys.shape == (B, 2, S + 3, 8)
                assert call["key"].data_ptr() == layer.keys.data_ptr()
                assert call["value"].data_ptr() == layer.values.data_ptr()
                assert call["key_lengths"].tolist() == [end] * B
                assert call["attn_mask"].shape == (B, 1, 1, S + 3)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("make", [gpt2, mistral])
def test_prompt_in_pieces(make, padding, backend, device, monkeypatch):
    """Several queries on a cache that holds something: the last stands at the last key. No mask of
    Sq x Sk is made, but for a padded batch that of its padding.
    """
    monkeypatch.setattr(masking_utils, "sdpa_mask", None)
    model, given = make().to(device).eval(), inputs(make, padding, device)
    use(model, "fastformer")
    cache = transformers.DynamicCache(config=model.config)
    with ff.use_backend(backend):
        assert [*in_pieces(model, given, cache, 2, 5, 6, 7)] == [2, 5, 6, 7]


@pytest.mark.parametrize("make", [t5, bart, whisper])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"use_cache": False}], ids=str)
def test_generate_from_an_encoder(make, options, device):
    model, given = make().to(device).eval(), inputs(make, "right", device)
    given = {n: x for n, x in given.items() if n in ("input_ids", "attention_mask")} or {
        "input_features": given["input_features"]
    }
    have, want = (generated(model, name, given, **options) for name in ("fastformer", "eager"))
    assert torch.equal(have, want)


# ------------------------------------------------------------------------------------------ masks


PATTERNS = {
    "causal": masking_utils.causal_mask_function,
    "bidirectional": masking_utils.bidirectional_mask_function,
    "window of 1": masking_utils.sliding_window_causal_mask_function(1),
    "window of 3": masking_utils.sliding_window_causal_mask_function(3),
    "window of 99": masking_utils.sliding_window_causal_mask_function(99),
    "window of 0 both ways": masking_utils.sliding_window_bidirectional_mask_function(0),
    "window of 2 both ways": masking_utils.sliding_window_bidirectional_mask_function(2),
}


def seen(mask, q_length, k_length):
    """[B, 1, Sq, Sk]: the keys that a layer gives a weight, under a mask and nothing else."""
    module = torch.nn.Module()
    q, k = (torch.zeros(B, 1, n, 4) for n in (q_length, k_length))
    out, weights = transformers_attention.attention(
        module, q, k, k + 1, mask, output_attentions=True
    )
    torch.testing.assert_close(out[:, :, :, 0], weights.sum(-1).transpose(1, 2))
    return weights > 0


@pytest.mark.sample
@pytest.mark.parametrize("padding", ["none", "ones", "left", "right"])
@pytest.mark.parametrize("offsets", [(0, 0), (4, 0), (4, 3)], ids=str)
@pytest.mark.parametrize("q_length", [1, 2, 5])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks(pattern, q_length, offsets, padding, monkeypatch):
    """What a layer makes of ours is what transformers writes out; ours takes a byte for a key."""
    q_offset, kv_offset = offsets
    k_length = q_offset + q_length - kv_offset
    both = "both" in pattern or pattern == "bidirectional"
    tokens = None
    if padding != "none":
        tokens = torch.ones(B, kv_offset + k_length, dtype=torch.bool)
        if padding == "left":
            tokens[1, : kv_offset + 1] = False
        elif padding == "right":
            tokens[1, -1:] = False
    sizes = {"batch_size": B, "q_length": q_length, "kv_length": k_length}
    sizes |= {"q_offset": q_offset, "kv_offset": kv_offset}
    sizes |= {"mask_function": PATTERNS[pattern], "attention_mask": tokens}
    want = masking_utils.sdpa_mask(**sizes, allow_is_causal_skip=False)
    monkeypatch.setattr(masking_utils, "sdpa_mask", None)
    mask = transformers_attention.mask(
        **sizes, allow_is_causal_skip=not both, allow_is_bidirectional_skip=both
    )
    assert torch.equal(seen(mask, q_length, k_length), want.expand(B, -1, -1, -1))
    assert mask.shape == (B, 1, q_length, k_length)
    assert torch.equal(mask.complete(), want.expand(B, -1, -1, -1))
    if mask.visible is not None:
        assert padding != "ones"  # seen on a CPU, and left out
        assert mask.visible.untyped_storage().nbytes() <= B * (kv_offset + k_length)


@pytest.mark.sample
@pytest.mark.parametrize("padding", ["none", "ones", "left", "short", "long"])
@pytest.mark.parametrize("kind", [int, torch.tensor], ids=["int", "tensor"])
@pytest.mark.parametrize("pattern", ["causal", "window of 1", "window of 3", "window of 99"])
@pytest.mark.parametrize("q_length", [1, 3])
def test_masks_of_a_buffer(pattern, q_length, kind, padding, monkeypatch):
    """What a layer makes of ours is what transformers writes out, of a buffer of 12 of whose keys 4
    were there before; ours holds the number of keys.
    """
    lengths = {"none": 0, "ones": 4 + q_length, "left": 4 + q_length, "short": 3, "long": 15}
    tokens = torch.ones(B, lengths[padding], dtype=torch.bool)
    tokens[1, : 2 if padding in ("left", "short", "long") else 0] = False
    sizes = {"batch_size": B, "q_length": q_length, "kv_length": 12, "q_offset": kind(4)}
    sizes |= {"mask_function": PATTERNS[pattern]}
    sizes |= {"attention_mask": None if padding == "none" else tokens}
    want = masking_utils.sdpa_mask(**sizes, allow_is_causal_skip=False).expand(B, -1, -1, -1)
    monkeypatch.setattr(masking_utils, "sdpa_mask", None)
    for skip in (False, True):
        mask = transformers_attention.mask(**sizes, allow_is_causal_skip=skip)
        assert mask.held.tolist() == [4 + q_length] * B
        assert (mask.visible is None) == (padding in ("none", "ones"))
        assert torch.equal(seen(mask, q_length, 12), want)
        with ff.use_backend("triton"):
            assert torch.equal(seen(mask, q_length, 12), want)
        assert mask.shape == (B, 1, q_length, 12) and torch.equal(mask.complete(), want)
        assert torch.equal(mask.to("cpu").complete(), want)


def check_complete(mask_function, **more):
    """Our mask, which written out is that of transformers."""
    given = {"batch_size": B, "q_length": 5, "kv_length": 5, "mask_function": mask_function, **more}
    have = transformers_attention.mask(**given)
    want = masking_utils.sdpa_mask(**{**given, "allow_is_causal_skip": False})
    assert torch.equal(have.to("cpu").complete(), want.cpu())
    return have


def test_other_masks_are_complete():
    """Whatever is not one of the plain patterns is written out by transformers."""
    utils, ids = masking_utils, torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]])
    causal, window = utils.causal_mask_function, utils.sliding_window_causal_mask_function(2)
    skips = {"allow_is_causal_skip": True}
    for function in (
        utils.chunked_causal_mask_function(2, torch.zeros(B, dtype=torch.long)),
        utils.and_masks(causal, utils.packed_sequence_mask_function(ids)),
        utils.and_masks(utils.packed_sequence_mask_function(ids), causal),
        utils.and_masks(utils.sliding_window_overlay(2), lambda b, h, i, j: j >= 0),
        utils.or_masks(window, utils.blockwise_overlay(ids)),
        lambda b, h, i, j: j != i,
    ):
        assert check_complete(function, **skips).visible.dtype == torch.bool
    for function in (causal, window, utils.bidirectional_mask_function):  # not to be left out
        check_complete(function)
    # A static cache of 8: what is not filled yet lies behind the last query.
    for offset in (0, torch.tensor(2)):
        check_complete(window, **skips, kv_length=8, q_offset=offset)
    # An offset that only the device knows; a padding that ends before the keys do.
    check_complete(causal, **skips, q_offset=torch.tensor(0))
    check_complete(causal, **skips, attention_mask=torch.ones(B, 3, dtype=torch.bool))


def test_the_mask_of_a_packed_batch(device):
    """It is transformers' own where a model reads it, whichever part of the pattern is first."""
    utils, sizes = masking_utils, {"batch_size": 1, "device": device}
    packed = utils.packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1, 1]], device=device))
    for band in (utils.causal_mask_function, utils.bidirectional_mask_function,
                 utils.sliding_window_causal_mask_function(2)):  # fmt: skip
        for parts in ((packed, band), (band, packed)):
            have = check_complete(utils.and_masks(*parts), **sizes)
            assert have.visible is None and have.sequences.offsets.tolist() == [0, 2, 5]
            assert have.sequences.longest == 3
    other = utils.and_masks(packed, lambda b, h, i, j: j != i)
    assert check_complete(other, **sizes).sequences is None


def made(left=None, right=0, padding=None):
    """A Mask of 3 queries and 4 keys."""
    return masks._FunctionMask((B, 1, 3, 4), padding, left, right, "cpu", "some_model")


PADDING = torch.tensor([[True] * 4, [False] + [True] * 3])[:, None, None]


def test_operations_of_a_mask():
    """What means the same by PyTorch's boolean masks; the result is a Mask again, or a selection by
    it."""
    mask = made(1, 0, PADDING)
    full = mask.complete()
    assert full.shape == mask.shape == mask.size() and mask.size(-1) == 4
    assert full[0, 0].tolist() == [[b in (i, i + 1) for b in range(4)] for i in range(3)]
    assert mask.ndim == mask.dim() == 4 and mask.dtype == torch.bool and mask.device == "cpu"
    assert mask[:, :, :, :4] is mask and mask[:, :, 0:] is mask  # in whole: still a band
    assert mask.to(torch.float16) is mask and mask.contiguous() is mask and mask.detach() is mask
    assert mask.to("cpu", non_blocking=True).visible is PADDING
    moved = mask.to("meta", torch.bool)
    assert moved.visible.is_meta and moved.device == "meta"
    other = torch.rand(B, 1, 3, 4) < 0.5
    for have, want in (
        (mask[:, :, -1:], full[:, :, -1:]),
        (mask[:, :, torch.tensor([2, 0]), :], full[:, :, [2, 0]]),
        (mask[..., 1:], full[..., 1:]),
        (mask[:, 0], full[:, 0]),
        (mask.expand(B, 5, 3, 4), full.expand(B, 5, 3, 4)),
        (mask.repeat_interleave(2, dim=0), full.repeat_interleave(2, dim=0)),
        (mask & other, full & other),
        (other & mask, full & other),
        (mask | other, full | other),
        (torch.logical_and(other, mask), full & other),
        (torch.cat([mask, made()], -1), torch.cat([full, made().complete()], -1)),
        (mask & made(None, 0), full & made(None, 0).complete()),
    ):
        assert isinstance(have, transformers_attention.Mask) and torch.equal(have.complete(), want)
    assert torch.equal(~mask, ~full) and torch.equal(mask.logical_not(), ~full)
    scores = torch.randn(B, 1, 3, 4)
    assert torch.equal(torch.where(mask, scores, -1.0), torch.where(full, scores, -1.0))


@pytest.mark.parametrize(
    "use",
    [
        lambda x, mask: x + mask,
        lambda x, mask: mask + x,
        lambda x, mask: x * mask,
        lambda x, mask: 1.0 - mask,
        lambda x, mask: mask == 0,
        lambda x, mask: mask * -1e9,
        lambda x, mask: x & mask,
        lambda x, mask: mask.bool(),
        lambda x, mask: mask.sum(),
        lambda x, mask: -mask,
        lambda x, mask: "yes" if mask else "no",
        lambda x, mask: [row for row in mask],
        lambda x, mask: len(mask),
        lambda x, mask: mask.__setitem__(0, 1.0),
        lambda x, mask: x.masked_fill(mask, 0),
        lambda x, mask: torch.cat([x, mask], -1),
        lambda x, mask: torch.zeros_like(mask),
        lambda x, mask: torch.nn.functional.pad(mask, (0, 1)),
        lambda x, mask: torch.nn.functional.scaled_dot_product_attention(x, x, x, mask),
    ],
)
@pytest.mark.parametrize("padding", [None, PADDING], ids=["band", "padding"])
def test_operations_that_a_mask_refuses(use, padding):
    """It would take the mask for integers, or for what is added to the scores."""
    own = "some_model computes with its attention mask by itself .*attn_implementation='fastformer'"
    with pytest.raises(ValueError, match=own):
        use(torch.randn(B, 1, 3, 4), made(1, 0, padding))
    assert not hasattr(made(), "sum") and hasattr(made(), "to")


# ------------------------------------------------------------------------------------- compilation


@pytest.mark.with_all
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("make", [bert, llama, mistral])
def test_compile(make, padding, checkpointing, device):
    """The mask of BERT goes into a checkpoint by position, that of a decoder by name."""
    torch.compiler.reset()
    model, given = make(use_cache=False).to(device).train(), inputs(make, padding, device)
    want = outcome(model, "fastformer", given)
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.zero_grad()
    out = torch.compile(model, fullgraph=True, backend="aot_eager")(**given)
    out.loss.backward()
    torch.testing.assert_close(out.loss, want["loss"])
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[f"grad of {name}"], atol=1e-5, rtol=1e-4)


@pytest.mark.with_all
def test_compile_with_a_static_cache(device):
    """Its masks go into the graph from outside: two graphs, of the prompt and of a step."""
    torch.compiler.reset()
    model, given = llama().to(device).eval(), inputs(llama, "left", device)
    want = generated(model, "eager", given, cache_implementation="static")
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model.forward = torch.compile(model.forward, fullgraph=True, backend=graphs)
    have = generated(model, "fastformer", given, cache_implementation="static")
    assert torch.equal(have, want) and graphs.frame_count == 2


def test_export(device):
    model = bert(attn_implementation="fastformer").to(device).eval()
    given = inputs(bert, "right", device)
    program = torch.export.export(model, (), given, strict=False)
    torch.testing.assert_close(program.module()(**given), model(**given))


# --------------------------------------------------------------------------------------- bad input


def layer(**changes):
    arguments = {"query": torch.randn(1, 2, 3, 4), "attention_mask": None, **changes}
    arguments.setdefault("key", arguments["query"])
    arguments.setdefault("value", arguments["key"])
    return transformers_attention.attention(torch.nn.Module(), **arguments)


@pytest.mark.parametrize("name", [*transformers_attention.REFUSED, "tomorrows_keyword"])
def test_refused_arguments(name):
    for nothing in (None, False):
        layer(**{name: nothing})
    with pytest.raises(ValueError, match=f"^{name} .*not supported by .*'fastformer'.* to Module"):
        layer(**{name: torch.ones(2)})


@pytest.mark.parametrize("name", sorted(transformers_attention.KNOWN))
def test_known_arguments(name):
    x = torch.randn(1, 2, 3, 4)
    assert torch.equal(layer(query=x)[0], layer(query=x, **{name: 3})[0])


@pytest.mark.parametrize("name", transformers_attention.PACKED)
def test_packed_sequences_that_the_mask_does_not_hold(name):
    bounds, x = torch.tensor([0, 1, 3]), torch.randn(B, 2, 3, 4)
    band = transformers_attention.Mask((B, 1, 3, 3), None, None, 0, "cpu", "some_model")
    for mask in (None, band, torch.ones(1, 1, 1, 3, dtype=torch.bool)):
        with pytest.raises(
            ValueError, match=rf"^{name} \(packed sequences\).*one row.*give .* position_ids"
        ):
            layer(query=x, attention_mask=mask, **{name: bounds})
    complete = torch.eye(3, dtype=torch.bool)[None, None]
    layer(query=x, attention_mask=complete, **{name: bounds})


def test_refused_masks():
    from torch.nn.attention.flex_attention import create_block_mask

    block = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 128, 128, device="cpu")
    with pytest.raises(TypeError, match="attention_mask is a BlockMask; expected a tensor"):
        layer(attention_mask=block)
    with pytest.raises(TypeError, match="a Tensor of 2 dimensions"):
        layer(attention_mask=torch.ones(1, 3))
    for dtype in (torch.int8, torch.uint8, torch.int64):
        with pytest.raises(TypeError, match=f"attention_mask has dtype {dtype}; expected torch.b"):
            layer(attention_mask=torch.ones(1, 1, 3, 3, dtype=dtype))
    for dtype in (torch.bool, torch.float32):
        with pytest.raises(ValueError, match=r"^attention_mask has shape \(1, 1, 3, 5\); expected"):
            layer(attention_mask=torch.ones(1, 1, 3, 5, dtype=dtype))
    for other in (made(), made()[:, 0], made()[:, :, :2, :3]):
        with pytest.raises(ValueError, match=r"attention_mask has shape .*expected \[B, 1, 3, 3\]"):
            layer(attention_mask=other)
    x, y = torch.randn(B, 2, 5, 4), torch.randn(B, 2, 4, 4)
    layer(query=x, key=y, attention_mask=made(None, None, PADDING))  # the same for each query
    with pytest.raises(ValueError, match=r"expected \[B, 1, 5, 4\]"):
        layer(query=x, key=y, attention_mask=made(None, 0, PADDING))


def test_a_model_with_attention_of_its_own_is_refused(device):
    """It would add the boolean masks to its scores."""
    config = {"vocab_size": V, "hidden_size": 32, "n_layer": 1, "n_head": 4}
    config = transformers.BloomConfig(**config, attn_implementation="fastformer")
    model = transformers.BloomForCausalLM(config).to(device)
    given = inputs(gpt2, "left", device)
    with pytest.raises(ValueError, match=r"^bloom computes with its attention mask by itself .add"):
        model(**given)
    with pytest.raises(Exception, match="Mask"):
        torch.compile(model, fullgraph=True, backend="eager")(**given)


IMAGES = {**WIDE, "num_attention_heads": 4, "image_size": 16, "patch_size": 4, "num_channels": 1}
# Models that choose the class of their attention by the name.
OF_CLASSES = {
    "sam": Tiny(
        "SamVision", "Model", **IMAGES, output_channels=8, window_size=2, mlp_dim=48,
        global_attn_indexes=[1],
    ),
    "data2vec": Tiny(
        "Data2VecVision", "Model", **IMAGES, intermediate_size=48, use_relative_position_bias=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_CLASSES)
def test_models_with_a_class_for_sdpa(name, attention_calls):
    """They run that class on fastformer's attention; SAM's relative positions are a bias."""
    model, eager = (
        OF_CLASSES[name](attn_implementation=x).double().eval() for x in ("fastformer", "eager")
    )
    for p in model.parameters():
        p.data.normal_(std=0.3)
    eager.load_state_dict(model.state_dict())
    x = torch.randn(B, 1, 16, 16).double()
    want, have = (compare_models.results(m, {"pixel_values": x}) for m in (eager, model))
    assert compare_models.error(have, want) < compare_models.BOUND
    assert len(attention_calls) == 2
    assert all(call["attn_mask"] is not None for call in attention_calls)
    if name == "data2vec":  # the sdpa class computes no weights; its base class does
        have, want = (m(x, output_attentions=True).attentions for m in (model, eager))
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("kind", ["falcon", "gptj", "gpt_neo", "git", "bark"])
def test_models_without_a_class_for_it_are_refused(kind):
    """Not by a bare KeyError."""
    if kind == "bark":
        config, cls = transformers.BarkSemanticConfig(num_layers=1), transformers.BarkSemanticModel
    else:
        config, cls = hugging_face_models.build(kind)
    message = r"Attention computes its attention by itself: attn_implementation='fastformer' is not"
    with pytest.raises(ValueError, match=message + ".*; take one of 'eager'"):
        cls._from_config(config, attn_implementation="fastformer")


def test_falcon_within_the_override(attention_calls):
    """As the error says."""
    models = []
    for name in ("sdpa", "eager"):
        config, cls = hugging_face_models.build("falcon")
        models.append(cls._from_config(config, attn_implementation=name).eval())
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.randint(4, V, (B, S))
    with ff.sdpa_override():
        have = models[0](ids).logits
    assert len(attention_calls) == config.num_hidden_layers
    torch.testing.assert_close(have, models[1](ids).logits)


@pytest.mark.skipif(OLD, reason="before 5.20 it denies nothing")
def test_parts_that_deny_every_implementation(device):
    """Run eager, as under transformers' default: what asks for a mask there reads it by itself."""
    config = hugging_face_models.build("gemma4")[0]
    assert isinstance(config, transformers.Gemma4Config)
    audio = {**hugging_face_models.small(transformers.Gemma4AudioConfig), "output_proj_dims": 64}
    config.audio_config = transformers.Gemma4AudioConfig(**audio)
    model = transformers.Gemma4Model._from_config(config, attn_implementation="fastformer").eval()
    assert model.audio_tower.config._attn_implementation == "eager"
    assert model.language_model.config._attn_implementation == "fastformer"
    x, real = torch.randn(B, 32, 128), torch.ones(B, 32, dtype=torch.bool)
    real[1, 20:] = False
    have = model.audio_tower(x, real).last_hidden_state
    assert have.isfinite().all()
    model.set_attn_implementation("eager")
    assert torch.equal(model.audio_tower(x, real).last_hidden_state, have)
    model.set_attn_implementation("fastformer")
    assert model.audio_tower.config._attn_implementation == "eager"


def test_masks_that_are_not_registered(device, monkeypatch):
    """transformers then makes none, silently: a padded batch would be attended as a full one."""
    model = bert(attn_implementation="fastformer").to(device)
    given = inputs(bert, "right", device)
    masks = masking_utils.AttentionMaskInterface._global_mapping
    monkeypatch.delitem(masks, "fastformer")
    with pytest.raises(RuntimeError, match=r"mask function is not registered.*'fastformer'"):
        model(**given)
    monkeypatch.setitem(masks, "fastformer", masking_utils.sdpa_mask)
    with pytest.raises(RuntimeError, match="mask function is not registered"):
        model(**given)
    ff.register_transformers()
    model(**given)

    functions = transformers.AttentionInterface._global_mapping
    monkeypatch.setitem(functions, "mine", transformers_attention.attention)
    model.set_attn_implementation("mine")
    with pytest.raises(RuntimeError, match="attn_implementation='mine'"):
        model(**given)


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"not installed: .* in a checkout .* '\.\[hf\]'"):
        ff.register_transformers()


@pytest.mark.parametrize("missing", ["AttentionInterface", "tokenizers"])
def test_transformers_whose_import_fails(missing, monkeypatch):
    """It is too old, or a package of its own is missing: the reason is passed on."""
    stub = types.ModuleType("transformers")
    if missing == "tokenizers":

        def fails(name):
            raise ModuleNotFoundError("No module named 'tokenizers'", name="tokenizers")

        stub.__getattr__ = fails
    monkeypatch.setitem(sys.modules, "transformers", stub)
    with pytest.raises(ImportError, match=f"5.17 or newer, and its import fails: .*{missing}"):
        ff.register_transformers()


@pytest.mark.with_all
def test_imports(tmp_path):
    """fastformer imports no transformers, and puts nothing on sys.path that would give transformers
    kernels/ in place of the package `kernels`.
    """
    (tmp_path / "fastformer").symlink_to(ROOT / "fastformer")
    code = (
        "import sys, fastformer as ff, importlib.util;"
        "assert 'transformers' not in sys.modules;"
        "ff.register_transformers(); ff.register_transformers();"
        "from transformers import AttentionInterface;"
        "print(AttentionInterface().valid_keys().count('fastformer'));"
        "print(getattr(importlib.util.find_spec('kernels'), 'origin', None))"
    )
    clean = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    count, kernels = result.stdout.split()[-2:]
    assert count == "1" and not Path(kernels).is_relative_to(ROOT)


# ------------------------------------------------------------------------------ every type of model

# Of each kind of answer some, and those that were once wrong without a word.
SAMPLE = [
    *("albert", "modernbert", "clip", "gemma3_text", "qwen2_vl", "deepseek_v3", "gpt_oss"),
    *("deepseek_v32", "glm_moe_dsa", "axk2", "nllb-moe", "bigbird_pegasus", "informer"),
    *("swinv2", "bridgetower"),
]


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_type_is_no_worse_than_the_table(kind):
    """`--slow` runs all of them."""
    status, note, reached = compare_models.check(kind, ["eager"])
    reason = f"{status}: {note}; {reached}"
    before = next(row for row in compare_models.read_rows() if row[0] == kind)
    assert not compare_models.worse(status, before[1]), reason
    assert not compare_models.lost(reached, before[3]), reason


def broken(*args, **given):
    raise RuntimeError("somewhere else")


def test_the_sweep_sees_what_is_wrong(monkeypatch):
    """An attention that forgets its mask, and one that crashes."""
    real = transformers_attention.attention

    def forgetful(module, q, k, v, mask, **given):
        return real(module, q, k, v, None, **given)

    functions = transformers.AttentionInterface._global_mapping
    monkeypatch.setitem(functions, "fastformer", real)  # after the test, too
    monkeypatch.setattr(transformers_attention, "attention", forgetful)
    assert compare_models.check("bert")[0] == "differs"
    assert compare_models.check("llama")[0] == "differs"
    monkeypatch.setattr(transformers_attention, "attention", broken)
    assert compare_models.check("bert") == ("fails", "RuntimeError: somewhere else", {})


def test_the_sweep_sees_what_is_wrong_in_accelerated_models(monkeypatch):
    """A norm that forgets its weight, and one that crashes."""
    norm = functional.rms_norm
    monkeypatch.setattr(functional, "rms_norm", lambda x, shape, _, eps: norm(x, shape, None, eps))
    status, note, _ = compare_models.check("llama", ["eager"])
    assert status == "differs" and note.startswith("accelerated, eager: none")

    def breaks(x, *given):
        return norm(x, *given) if isinstance(x, FakeTensor) else broken()  # the graph is made

    monkeypatch.setattr(functional, "rms_norm", breaks)
    status, note, _ = compare_models.check("llama", ["eager"])
    assert (status, note) == ("fails", "accelerated, eager: RuntimeError: somewhere else")


class Mixed(torch.nn.Linear):
    """It computes in float32, too."""

    def forward(self, x):
        return super().forward((x.float() @ torch.ones(4, 4)).to(x.dtype))


def test_the_bounds_of_the_sweep(monkeypatch):
    """Where float64 meets numbers in float32; and a model whose float32 is far from its float64."""
    model = Mixed(4, 4).double()
    given = {"x": torch.randn(2, 4)}
    ((outputs, _),) = compare_models.exactly(model, [("", given, None)])
    assert outputs[0].dtype == torch.float64 and outputs[0].isfinite().all()
    monkeypatch.setattr(compare_models, "exactly", lambda model, wanted: [([], [])] * len(wanted))
    _, _, found = compare_models.check("bert", ["eager"])
    assert found["eager"][2] == compare_models.WIDEST
    assert compare_models.lost({"eager": "an error"}, found) == ["eager"]
    assert compare_models.lost({"eager": ([9, 0, 9], "", 1.0)}, found) == ["eager"]
    assert not compare_models.lost(found, found)


def test_the_table_is_that_of_the_types():
    """None of transformers' types is left out, none of ours is wrong or fails."""
    table = compare_models.committed()
    assert not set(table.values()) & {"fails", "differs"}
    version = json.loads(compare_models.DATA.read_text())["transformers"]
    page = compare_models.page(compare_models.read_rows(), version)
    assert compare_models.PAGE.read_text() == page
    if transformers.__version__ == version:
        assert sorted(table) == compare_models.types()


@pytest.mark.with_slow
def test_every_type_of_model():
    """Takes half an hour."""
    before = compare_models.committed()
    rows = compare_models.sweep(sorted(before))
    worse = [row for row in rows if compare_models.worse(row[1], before[row[0]])]
    assert not worse, worse
