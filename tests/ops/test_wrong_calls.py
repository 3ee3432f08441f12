"""Wrong calls, in a table: every public function x each of its arguments x every way to be wrong.

A call with one wrong argument raises a ValueError, TypeError or RuntimeError whose message names
that argument, before anything runs; or it is listed below as legitimate, with the reason, and runs.
"""

import fnmatch
import functools
import inspect
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fastformer as ff
from fastformer.dispatch import backends

ERRORS = ValueError, TypeError, RuntimeError

# ---------------------------------------------------------------------------------- the right calls

B, T, S, H, D, F, V = 2, 3, 5, 2, 8, 12, 11


def floats(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def ids(*shape, high=V):
    return torch.arange(torch.Size(shape).numel()).view(shape) % (high - 1) + 1


def heads():
    return dict(query=floats(B, H, T, D), key=floats(B, H, S, D))


def scores():
    return dict(
        attn_mask=torch.ones(B, 1, T, S, dtype=torch.bool), is_causal=True, scale=0.5,
        enable_gqa=False, bias=floats(H, T, S), key_lengths=torch.tensor([S, 4]), window=(2, 2),
        causal_alignment="bottom_right", alibi_slopes=torch.ones(H), softcap=20.0, sinks=floats(H),
    )  # fmt: skip


LINEAR = {"rope_type": "linear", "factor": 2.0}
DROPOUT = dict(dropout_p=0.5, dropout_seed=3)
FORM = dict(alpha=1.5, limit=2.0, offset=1.0)  # of a gated activation
LOSS = dict(
    reduction="mean", ignore_index=0, label_smoothing=0.1, smoothing="kl",
    weight=floats(V).abs(), z_loss=0.1, softcap=5.0, temperature=0.7, return_entropy=False,
)  # fmt: skip


def norm(unbiased):
    options = {"unbiased": True} if unbiased else {}
    return dict(input=floats(B, D), normalized_shape=(D,), weight=floats(D), eps=1e-5, **options)


def gated():
    return dict(input=floats(B, D), w=floats(2 * F, D), b=floats(2 * F), w_2=floats(D, F))


OPS = {
    "scaled_dot_product_attention": lambda: dict(
        **heads(), value=floats(B, H, S, D), **scores(), **DROPOUT, return_lse=True,
    ),
    "packed_attention": lambda: dict(
        query=floats(B * T, H, D), key=floats(B * S, H, D), value=floats(B * S, H, D),
        cu_seqlens_q=torch.tensor([0, T, B * T], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, S, B * S], dtype=torch.int32),
        max_q=T, max_k=S, is_causal=True, scale=0.5, causal_alignment="bottom_right",
        window=(2, 2), bias=floats(B * S), alibi_slopes=torch.ones(B, H), softcap=20.0,
        sinks=floats(H),
        attn_mask=ff.block_mask(torch.ones(B * T, B * S) > 0), return_lse=True,
        **DROPOUT,
    ),
    "attention_weights": lambda: dict(
        **heads(), **scores(), rows=slice(0, 2), heads=torch.tensor([1])
    ),
    "layer_norm": lambda: dict(**norm(True), bias=floats(D)),
    "rms_norm": lambda: norm(False),
    "dropout_add_layer_norm": lambda: dict(
        input=floats(B, D), residual=floats(B, D), weight=floats(D), bias=floats(D), eps=1e-5,
        unbiased=True, **DROPOUT, input_bias=floats(D),
    ),
    "dropout_add_rms_norm": lambda: dict(
        input=floats(B, D), residual=floats(B, D), weight=floats(D), eps=1e-5, **DROPOUT,
        input_bias=floats(D),
    ),
    "feed_forward": lambda: dict(
        input=floats(B, D), w_1=floats(F, D), b_1=floats(F), w_2=floats(D, F), b_2=floats(D),
        activation="relu", **DROPOUT,
    ),
    "geglu": lambda: dict(**gated(), b_2=floats(D), **DROPOUT),
    "swiglu": lambda: dict(**gated(), b_2=floats(D), **DROPOUT, **FORM),
    "gated_activation": lambda: dict(
        gate=floats(B, F), value=floats(B, F), activation="silu", **FORM,
    ),
    "embed": lambda: dict(
        tokens=ids(B, S), weight=floats(V, D), positional=floats(S, D), scale=2.0, padding_idx=0,
        **DROPOUT,
    ),
    "rotary_embedding": lambda: dict(
        query=floats(B, H, T, D), key=floats(B, H, T, D), cos=floats(T, D), sin=floats(T, D),
        interleaved=True, query_norm=floats(D), key_norm=floats(D), eps=1e-6,
    ),
    "cross_entropy": lambda: dict(logits=floats(B, T, V), target=V - ids(B, T), **LOSS),
    "linear_kl_div": lambda: dict(
        input=floats(B, D), linear_weight=floats(V, D), linear_bias=floats(V),
        teacher_input=floats(B, S), teacher_weight=floats(V, S), teacher_bias=floats(V),
        mask=torch.ones(B, dtype=torch.bool), reduction="mean", reverse=True, temperature=0.7,
        softcap=5.0,
    ),
    "linear_cross_entropy": lambda: dict(
        input=floats(B, T, D), linear_weight=floats(V, D), target=ids(B, T),
        linear_bias=floats(V), **LOSS, return_argmax=False,
    ),
}  # fmt: skip


def model():
    return ff.make_model(V, V, N=1, d_model=D, d_ff=F, h=H, dropout=0.0)


def model_options():
    return dict(
        norm_first=False, activation="swiglu", norm="rms", kv_heads=1, learned_positions=True,
        max_len=S, padding_idx=0, tie_generator=True,
    )  # fmt: skip


def language_model():
    return ff.make_decoder(V, N=1, d_model=D, d_ff=F, h=H, dropout=0.0)


def packing():
    return ff.unpad(floats(B, S, D), torch.tensor([S, 3]))[1]


def batch():
    return ff.Batch(ids(B, S), ids(B, T + 1))


@functools.cache
def saved():
    folder = tempfile.TemporaryDirectory()
    saved.folder = folder  # which goes with the process
    ff.save_model(language_model(), Path(folder.name) / "model")
    return str(Path(folder.name) / "model")


def stream():
    return dict(x=floats(B, T, D), mask=torch.ones(B, 1, T, dtype=torch.bool), cache=None)


def decoded():
    return dict(
        x=floats(B, T, D), memory=floats(B, S, D), src_mask=torch.ones(B, 1, S, dtype=torch.bool),
        tgt_mask=torch.ones(1, T, T, dtype=torch.long), cache=None,
    )  # fmt: skip


def search():
    return dict(
        model=model(), src=ids(B, S), src_mask=torch.ones(B, 1, S), max_len=4, start_symbol=1,
        end_symbol=2, pad_symbol=0, cache=True,
    )  # fmt: skip


# name: the arguments of a call that is right
FUNCTIONS = {
    "attention": lambda: dict(
        **heads(), value=floats(B, H, S, D), mask=torch.ones(T, S), dropout=nn.Dropout(0.1)),
    "clones": lambda: dict(module=nn.Linear(2, 2), N=2),
    "subsequent_mask": lambda: dict(size=4),
    "make_model": lambda: dict(
        src_vocab=V, tgt_vocab=V, N=1, d_model=D, d_ff=F, h=H, dropout=0.1, tie_source=True,
        **model_options()),
    "make_decoder": lambda: dict(
        vocab=V, N=1, d_model=D, d_ff=F, h=H, dropout=0.1, positions="sinusoidal", rope_theta=None,
        qk_norm=True, **model_options()),
    "LanguageModel": lambda: dict(language_model().named_children()),
    "Embeddings": lambda: dict(d_model=D, vocab=V, padding_idx=0),
    "PositionalEncoding": lambda: dict(d_model=D, dropout=0.1, max_len=S, learned=True),
    "RotaryEmbedding": lambda: dict(dim=D, max_len=S, theta=50.0, scaling=dict(LINEAR)),
    "rotary_frequencies": lambda: dict(
        dim=D, length=S, theta=50.0, scaling=dict(LINEAR), interleaved=True, dtype=torch.float32,
        device="cpu"),
    "MultiHeadedAttention": lambda: dict(
        h=H, d_model=D, dropout=0.1, kv_heads=1, qk_norm=True, sinks=True, gate=True),
    "PositionwiseFeedForward": lambda: dict(d_model=D, d_ff=F, dropout=0.1, activation="geglu"),
    "LayerNorm": lambda: dict(features=D, eps=1e-6, unbiased=True),
    "RMSNorm": lambda: dict(features=D, eps=1e-6),
    "SublayerConnection": lambda: dict(size=D, dropout=0.1, norm_first=True, norm="rms"),
    "EncoderLayer": lambda: dict(
        size=D, self_attn=ff.MultiHeadedAttention(H, D),
        feed_forward=ff.PositionwiseFeedForward(D, F), dropout=0.1, norm_first=True, norm="rms",
        is_causal=True),
    "DecoderLayer": lambda: dict(
        size=D, self_attn=ff.MultiHeadedAttention(H, D), src_attn=ff.MultiHeadedAttention(H, D),
        feed_forward=ff.PositionwiseFeedForward(D, F), dropout=0.1, norm_first=True, norm="rms"),
    "Encoder": lambda: dict(layer=model().encoder.layers[0], N=1, norm="rms", rotary=None),
    "Decoder": lambda: dict(layer=model().decoder.layers[0], N=1, norm="rms"),
    "Generator": lambda: dict(d_model=D, vocab=V),
    "EncoderDecoder": lambda: dict(model().named_children()),
    "KVCache": lambda: dict(
        batch=B, heads=H, capacity=S, head_dim=D, value_dim=D, dtype=torch.float32, device="cpu"),
    "DecoderCache": lambda: dict(capacity=S),
    "greedy_decode": lambda: dict(**search(), repetition_penalty=1.5),
    "sample": lambda: dict(**search(), **DRAWS),
    "stream_tokens": lambda: dict(**search(), **DRAWS),
    "beam_search": lambda: dict(
        **search(), num_beams=3, length_penalty=0.5, n_best=2, repetition_penalty=1.5),
    "Batch": lambda: dict(src=ids(B, S), tgt=ids(B, T), pad=0, packed=False),
    "Checkpoints": lambda: dict(folder="checkpoints", settings={"steps": 2}, every=1),
    "LabelSmoothing": lambda: dict(size=V, padding_idx=0, smoothing=0.1, weight=torch.rand(V)),
    "SimpleLossCompute": lambda: dict(
        generator=ff.Generator(D, V), criterion=ff.LabelSmoothing(V, 0), z_loss=0.1),
    "rate": lambda: dict(step=1, model_size=D, factor=1.0, warmup=4),
    "make_optimizer": lambda: dict(
        parameters=list(nn.Linear(2, 2).parameters()), model_size=D, factor=1.0, warmup=4),
    "run_epoch": lambda: dict(
        data=[batch()], model=(m := model()),
        loss_compute=ff.SimpleLossCompute(m.generator, ff.LabelSmoothing(V, 0)),
        optimizer=(o := torch.optim.SGD(m.parameters(), 0.1)),
        scheduler=torch.optim.lr_scheduler.ConstantLR(o), report=lambda *_: None, report_every=1,
        progress=False, description="epoch", accumulation_steps=2, max_grad_norm=1.0,
        autocast=torch.bfloat16, scaler=torch.amp.GradScaler("cpu"), cuda_graph=False,
        after_update=lambda _: None),
    "token_batches": lambda: dict(
        data=[([1, 2], [3, 2]), ([4], [5, 6])], tokens=8, padding_idx=0, packed=False, shuffle=True,
        seed=3, pin_memory=False),
    "strip": lambda: dict(tokens=ids(B, T), end_symbol=2, padding_idx=0),
    "load_model": lambda: dict(folder=saved(), device="cpu"),
    "block_mask": lambda: dict(
        source=torch.ones(B, H, T, S) > 0, B=B, H=H, Sq=T, Sk=S, device="cpu"),
    "unpad": lambda: dict(x=floats(B, S, D), lengths=torch.tensor([S, 3])),
    "pad": lambda: dict(x=ids(8, 2), packing=packing(), value=7),
    "Packing": lambda: dict(vars(packing())),
    "accelerate": lambda: dict(
        model=nn.LayerNorm(D), drop_padding=True, need_weights=True, skip_logits=True),
    "restore": lambda: dict(model=nn.LayerNorm(D)),
}  # fmt: skip
# name: what is called, made anew for each test, and the same
METHODS = {
    "LanguageModel.forward": lambda: (language_model().forward, lambda: dict(
        tokens=ids(B, T), mask=torch.ones(B, 1, T, dtype=torch.bool), cache=None)),
    "Embeddings.forward": lambda: (ff.Embeddings(D, V).forward, lambda: dict(x=ids(B, S))),
    "PositionalEncoding.forward": lambda: (
        ff.PositionalEncoding(D, 0.1, 9).forward, lambda: dict(x=floats(B, S, D), start=4)),
    "RotaryEmbedding.forward": lambda: (
        ff.RotaryEmbedding(D, 9).forward, lambda: dict(x=floats(B, S, D), start=4)),
    "MultiHeadedAttention.forward": lambda: (ff.MultiHeadedAttention(H, D).forward, lambda: dict(
        query=floats(B, T, D), key=floats(B, S, D), value=floats(B, S, D),
        mask=torch.ones(B, 1, S, dtype=torch.long), bias=floats(H, T, S),
        key_lengths=torch.tensor([S, 4]), is_causal=True, window=(2, 2),
        causal_alignment="bottom_right", alibi_slopes=torch.ones(H), softcap=20.0, cache=None,
        rotary=None, query_packing=None, dropout_seed=3)),
    "MultiHeadedAttention.cached": lambda: (
        ff.MultiHeadedAttention(H, D).requires_grad_(False).forward, lambda: dict(
            query=floats(B, T, D), key=floats(B, T, D), value=floats(B, T, D),
            mask=torch.ones(B, 1, T, dtype=torch.long), bias=floats(H, T, T), window=(2, 2),
            alibi_slopes=torch.ones(H), softcap=20.0, cache=ff.KVCache(B, H, S, D // H))),
    "MultiHeadedAttention.packed": lambda: (ff.MultiHeadedAttention(H, D).forward, lambda: dict(
        query=floats(8, D), key=floats(8, D), value=floats(8, D), mask=packing(), bias=floats(8),
        alibi_slopes=torch.ones(H), softcap=20.0)),
    "PositionwiseFeedForward.forward": lambda: (
        ff.PositionwiseFeedForward(D, F).forward,
        lambda: dict(x=floats(B, T, D), dropout_seed=3)),
    "LayerNorm.forward": lambda: (ff.LayerNorm(D).forward, lambda: dict(x=floats(B, T, D))),
    "RMSNorm.forward": lambda: (ff.RMSNorm(D).forward, lambda: dict(x=floats(B, T, D))),
    "SublayerConnection.forward": lambda: (
        ff.SublayerConnection(D, 0.1).forward, lambda: dict(x=floats(B, T, D), sublayer=nn.Tanh())),
    "EncoderLayer.forward": lambda: (
        model().encoder.layers[0].forward, lambda: dict(stream(), rotary=None)),
    "DecoderLayer.forward": lambda: (model().decoder.layers[0].forward, decoded),
    "Encoder.forward": lambda: (model().encoder.forward, stream),
    "Decoder.forward": lambda: (model().decoder.forward, decoded),
    "Generator.forward": lambda: (ff.Generator(D, V).forward, lambda: dict(x=floats(B, T, D))),
    "EncoderDecoder.forward": lambda: (model().forward, lambda: dict(
        src=ids(B, S), tgt=ids(B, T), src_mask=torch.ones(B, 1, S),
        tgt_mask=ff.subsequent_mask(T))),
    "KVCache.append": lambda: (ff.KVCache(B, H, 9, D).append, lambda: dict(
        key=floats(B, H, S, D), value=floats(B, H, S, D))),
    "KVCache.crop": lambda: (
        ff.KVCache(B, H, 9, D).crop, lambda: dict(length=torch.ones(B).int())),
    "KVCache.reorder": lambda: (
        ff.KVCache(B, H, 9, D).reorder, lambda: dict(index=torch.ones(B).int())),
    "Batch.make_std_mask": lambda: (ff.Batch.make_std_mask, lambda: dict(tgt=ids(B, T), pad=0)),
    "Batch.to": lambda: (batch().to, lambda: dict(device="cpu", non_blocking=True)),
    "LabelSmoothing.forward": lambda: (ff.LabelSmoothing(V, 0, 0.1).forward, lambda: dict(
        x=floats(B, T, V).log_softmax(-1), target=ids(B, T))),
    "SimpleLossCompute.__call__": lambda: (
        ff.SimpleLossCompute(ff.Generator(D, V), ff.LabelSmoothing(V, 0)).__call__,
        lambda: dict(x=floats(B, T, D), y=ids(B, T), norm=torch.tensor(6))),
    "use_backend": lambda: (use_backend, lambda: dict(name="reference")),
    "explain": lambda: (lambda target: ff.explain(target, floats(2, D)),
        lambda: dict(target=nn.LayerNorm(D))),
    "tune": lambda: (
        lambda model, minutes, dry_run: ff.tune(
            model, floats(2, D), minutes=minutes, dry_run=dry_run),
        lambda: dict(model=ff.LayerNorm(D), minutes=1.0, dry_run=True)),
    "warm_up": lambda: (
        lambda model, processes: ff.warm_up(model, floats(2, D), processes=processes),
        lambda: dict(model=ff.LayerNorm(D), processes=1)),
}  # fmt: skip
CALLS = *FUNCTIONS, *METHODS


def call_of(name):
    """What is called, and a function that makes the arguments."""
    return METHODS[name]() if name in METHODS else (getattr(ff, name), FUNCTIONS[name])


def use_backend(name):
    with ff.use_backend(name):
        pass


DRAWS = dict(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.5, seed=1)
SEARCHES = "greedy_decode", "sample", "stream_tokens", "beam_search"
# Public names without arguments that could be wrong, by reason.
LEFT_OUT = {
    "a result": ["BlockMask", "Explanation", "Fitted", "Hypotheses", "Report", "Tuning"],
    "their own tests are in test_fit.py and test_saving.py": ["fit", "save_model"],
    "their own tests are in test_graph.py": ["InductorPass", "fusing"],
    "torch.compile calls them": ["dynamo_backend", "dynamo_backend_eager", "inductor_pass"],
    "no argument": [
        "__version__",
        "batch_invariant",
        "current_backend",
        "register_transformers",
        "sdpa_override",
    ],
}

# ------------------------------------------------------------------------- the ways to be wrong


def is_number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def other_dtype(x):
    """Of a tensor: floats for integers, integers for floats; of a number: a float, a string."""
    if isinstance(x, torch.Tensor):
        return x.cfloat() if x.is_floating_point() else x.to(torch.float64) + 0.5
    return x + 0.5 if type(x) is int else "1" if is_number(x) else SKIP


def shorter(x, dim):
    """A tensor without its first entry along a dimension."""
    return x.narrow(dim, 1, x.shape[dim] - 1) if isinstance(x, TENSOR) and dim < x.dim() else SKIP


SKIP = object()
TENSOR = torch.Tensor
WRONG = {
    "None": lambda x: None,
    "wrong type": lambda x: 7j if isinstance(x, str) else "no",
    "wrong dtype": other_dtype,
    "half": lambda x: x.half() if isinstance(x, TENSOR) and x.is_floating_point() else SKIP,
    "wrong rank": lambda x: x[None, None] if isinstance(x, TENSOR) else SKIP,
    "scalar": lambda x: x.flatten()[0] if isinstance(x, TENSOR) and x.dim() else SKIP,
    "meta": lambda x: x.to("meta") if isinstance(x, TENSOR) else SKIP,
    "sparse": lambda x: x.to_sparse() if isinstance(x, TENSOR) else SKIP,
    "empty": lambda x: x.new_empty(0) if isinstance(x, TENSOR)
    else type(x)() if isinstance(x, (str, tuple, list)) else SKIP,
    "number": lambda x: 1 if isinstance(x, bool) else SKIP,
    "NaN": lambda x: float("nan") if is_number(x) else SKIP,
    "negative": lambda x: -7 if is_number(x)
    else torch.full_like(x, -7) if isinstance(x, TENSOR) and is_ids(x) else SKIP,
    "too large": lambda x: 2**70 if is_number(x)
    else torch.full_like(x, 99) if isinstance(x, TENSOR) and is_ids(x) else SKIP,
}  # fmt: skip
SHORT = {f"short {dim}": functools.partial(shorter, dim=dim) for dim in range(4)}
# What a message says of a value, and the error that it then belongs to.
SAID = {
    TypeError: r"\w+ (is an? (?!scalar)\w+|has dtype [\w.]+);",
    ValueError: r"\w+ (has shape|is on) ",
}


def is_ids(x):
    return not x.is_floating_point() and x.dtype != torch.bool


def calls(function, right, kinds):
    """(argument, kind, arguments) for every wrong value of every argument."""
    parameters = inspect.signature(function).parameters
    for name in right():
        for kind, wrong in kinds.items():
            arguments = right()
            value = wrong(arguments[name])
            default = parameters[name].default if name in parameters else inspect.Parameter.empty
            if value is SKIP or (value is None and default is None):  # what stands there anyhow
                continue
            arguments[name] = value
            yield name, kind, arguments


def complaints(of, function, right, kinds=WRONG):
    """What is wrong about how a function takes wrong calls."""
    found = []
    for name, kind, arguments in calls(function, right, kinds):
        call = f"{of}.{name} {kind}"
        legitimate = matching(call, LEGITIMATE)
        others = arguments if kind in SHORT else matching(call, NAMED)
        names = "|".join([name, *others])  # of two sizes that differ either is named
        try:
            function(**arguments)
        except ERRORS as error:
            if legitimate:
                found.append(f"{call}: listed as legitimate ({legitimate[0]}), raised {error!r}")
            elif not re.search(rf"\b({names})\b", str(error)):
                found.append(f"{call}: not named in {error!r}")
            elif not re.search("expected|holds", str(error)):
                found.append(f"{call}: nothing is expected in {error!r}")
            for kind, words in SAID.items():
                if re.match(words, str(error)) and not isinstance(error, kind):
                    found.append(f"{call}: {error!r} is no {kind.__name__}")
        except Exception as error:
            found.append(f"{call}: raised {error!r}")
        else:
            if not legitimate:
                found.append(f"{call}: went through")
    return found


def matching(call, table):
    return [x for x, patterns in table.items() for p in patterns if fnmatch.fnmatchcase(call, p)]


# reason: the calls, as "function.argument kind"
LEGITIMATE = {
    "a bias that is left out": ["*.b None", "*.b_1 None", "*.b_2 None", "dropout_add*.bias None"],
    "an empty path is the working directory": ["Checkpoints.folder empty"],
    "a term that is left out": ["embed.positional None"],
    "a batch of a language model": ["Batch.src None"],
    "no norm follows the last layer": ["Encoder.norm None", "Decoder.norm None"],
    "nothing is masked": ["*coder*.*mask None", *[f"{of}.src_mask None" for of in SEARCHES]],
    "what is not zero takes part": [f"{of}mask {kind}" for kind in ("negative", "too large")
        for of in ("*coder*.tgt_", "MultiHeadedAttention.[fc]*.")],
    "a mask of floats may hold 0 and 1": [f"{of}mask half" for of in (
        "attention.", "EncoderDecoder.forward.src_", *(f"{of}.src_" for of in SEARCHES))],
    "a factor may be any number, and its NaN reaches the output": [
        f"{op}.scale {kind}" for op in ("*attention*", "embed")
        for kind in ("NaN", "negative", "too large")
    ],
    "any 64 bits are a seed": ["*seed negative"],
    "it broadcasts": ["*.attn_mask short 0", "[as]*.bias short 0", "*.attn_mask scalar",
        "scaled*.bias scalar", "attention_w*.bias scalar", "block_mask.source scalar",
        "*Attention.[fc]*.bias scalar", "attention.mask scalar", "attention.mask wrong rank"],
    "any leading sizes": [f"{op}.{x} short 0" for op, x in (("[rl]*_norm", "input"),
        ("feed_forward", "input"), ("*glu", "input"), ("embed", "tokens"))],
    "a size of its own": ["scaled*.value short 3", "packed*.value short 2",
        "embed.tokens short 1", "rotary*.query short 1", "rotary*.key short 1",
        "attention_weights.heads short 0"],
    "any leading dimensions": [f"{of} wrong rank" for of in (
        "layer_norm.input", "rms_norm.input", "feed_forward.input", "geglu.input", "swiglu.input",
        "embed.tokens", "attention.query", "attention.key", "attention.value",
        "PositionwiseFeedForward.forward.x", "*Norm.forward.x", "Generator.forward.x",
        "SublayerConnection.forward.x", "Embeddings.forward.x", "SimpleLossCompute.__call__.[xy]")],
    "any one number divides; less than one token counts as one": [
        f"SimpleLossCompute.__call__.norm {kind}" for kind in (
            "wrong rank", "wrong dtype", "too large", "negative")],
    "no tokens": ["embed.tokens empty", "Embeddings.forward.x empty"],
    "one token": ["Embeddings.forward.x scalar"],
    "no heads are wanted": ["attention_weights.heads empty"],
    "beside float32 parameters": ["layer_norm.input half", "rms_norm.input half",
        "*Norm.forward.x half", "SublayerConnection.forward.x half",
        "PositionalEncoding.forward.x half"],
    "any floating dtype": [f"{of} half" for of in (
        "cross_entropy.logits", "LabelSmoothing.forward.x", "*cross_entropy.weight",
        "LabelSmoothing.weight", "*.alibi_slopes")],
    "only the sizes of x matter": [
        f"RotaryEmbedding.forward.x {kind}" for kind in ("wrong dtype", "half", "wrong rank")],
    "positions in float32": ["embed.weight half"],
    "a huge number is only extreme: a theta hardly turns, a softcap caps nothing": [
        f"{of} too large" for of in (
            "*.theta", "*[nN]orm.eps", "rotary_embedding.eps", "s*.temperature",
            "*cross_entropy.temperature", "linear_kl_div.temperature", "*.repetition_penalty",
            "*.softcap", "*.factor", "*.z_loss", "run_epoch.max_grad_norm", "tune.minutes")],
    "any positive alpha and limit, and any offset": [f"*.{of} too large" for of in (
        "alpha", "limit", "offset")] + ["*.offset negative"],
    "a token may be counted from the end, as in torch": ["*mbed*.padding_idx negative",
        "make_*.padding_idx negative"],
    "a batch holds ids for any model": [f"Batch.{of} {kind}" for kind in ("negative", "too large")
        for of in ("src", "tgt", "make_std_mask.tgt")],
    "no id is padding": ["Batch*.pad negative", "strip.padding_idx None",
        "strip.padding_idx negative", "token_batches.padding_idx negative"],
    "lists of any ids": [f"strip.tokens {of}" for of in (
        "wrong rank", "empty", "negative", "too large", "short 0", "short 1")],
    "no row is ignored": [f"{of} {kind}" for kind in ("None", "negative")
        for of in ("*cross_entropy.ignore_index", "LabelSmoothing.padding_idx")],
    "shapes alone are needed": ["Batch.make_std_mask.tgt meta", "LabelSmoothing.weight meta"],
    "any dtype and number": ["pad.x wrong dtype", "pad.x negative", "pad.x too large",
        "pad.value negative", "unpad.x wrong dtype", "unpad.x half"],
    "looked at where it is used": [f"Packing.{of} {kind}" for kind in ("negative", "too large")
        for of in ("cu_seqlens", "indices")] + ["Packing.indices empty"],
    "it is only printed": ["run_epoch.description *"],
}  # fmt: skip
# another name under which the message may speak of the argument
NAMED = {
    "target": ["*cross_entropy.* wrong rank", "*cross_entropy.* empty", "SimpleLossC*__call__.y *"],
    "normalized_shape": ["dropout_add_*_norm.weight *"],
    "Device": ["block_mask.device empty"],  # of torch
    "mask": ["*.src_mask *", "*.tgt_mask *"],
    "tokens": ["EncoderDecoder.forward.??? *", *[f"{of}.src *" for of in SEARCHES]],
    "x": ["EncoderDecoder.forward.??? *", "LanguageModel.forward.tokens *"],
    "input": ["*Norm.forward.x *", "SublayerConnection.forward.x *", "SimpleLossC*__call__.x *"],
    "query": ["*coder*.x wrong rank", "*coder*.x half", "MultiHeadedAttention.packed.mask *"],
    "key": ["*Decoder*.memory *"],
    "lengths": ["unpad.x *"],
    "op": ["explain.target *"],
    "backend": ["use_backend.name *"],
    "learned": ["make_*.learned_positions *"],
}


@pytest.mark.sample
@pytest.mark.parametrize("op", OPS)
def test_ops(op, backend):
    function = getattr(ff, op)
    assert set(OPS[op]()) == set(inspect.signature(function).parameters) - {"unknown"}
    function(**OPS[op]())
    found = complaints(op, function, OPS[op], WRONG | SHORT)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", CALLS)
def test_other_calls(name):
    function, right = call_of(name)
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    parameters = inspect.signature(function).parameters.values()
    named = {x.name for x in parameters if x.name[0] != "_" and x.kind not in variable}
    assert set(right()) == named or name.endswith((".packed", ".cached"))
    function(**right())
    found = complaints(name, function, right)
    assert not found, "\n".join(found)


def test_every_public_name_is_in_the_table():
    tried = {name.split(".")[0] for name in (*OPS, *CALLS)}
    assert tried.isdisjoint(set().union(*LEFT_OUT.values()))
    assert tried.union(*LEFT_OUT.values()) == set(ff.__all__)


ATTENTION, ROTARY = "scaled_dot_product_attention", "rotary_embedding"
PACKED, LOSSES = "packed_attention", ("cross_entropy", "linear_cross_entropy")
KL, FREQUENCIES = "linear_kl_div", "rotary_frequencies"
LLAMA3 = dict(factor=8.0, low_freq_factor=5.0, high_freq_factor=4.0)
LLAMA3["original_max_position_embeddings"] = 64
ONE_HEAD = dict.fromkeys(("key", "value"), torch.zeros(B, 1, S, D))
PACKED_HEADS = dict(query=floats(B * T, H, D), key=floats(B * T, H, D), cos=floats(B, T, D))


def offsets(*ends):
    return dict(cu_seqlens_q=torch.tensor(ends, dtype=torch.int32), max_q=B * T)


def classes(n):
    few = dict(linear_weight=floats(n, D), linear_bias=floats(n), weight=None)
    return few | dict(target=ids(B, T, high=2) % n, smoothing="kl")


def scaling(kind, **options):
    return dict(scaling={"rope_type": kind, **options})


def square(*sizes):
    """Logits in torch's layout of as many classes as positions, which could be ours."""
    return dict(logits=floats(B, *sizes), target=ids(B, *sizes[1:], high=4), weight=None)


# Wrong calls of another kind: functions, what of the right call is changed, and the words.
OTHERS = [
    (ATTENTION, dict(query=floats(B, T, D)), r"key has shape .*; expected 3 dimensions"),
    (ATTENTION, dict(query=floats(D)), r"query has shape \[.*\]; expected \[.., S, D\]"),
    (
        ATTENTION,
        dict(query=floats(1, B, H, T, D), key=floats(B, 1, H, S, D), value=floats(B, 1, H, S, D)),
        "key has shape .*; expected 5 dimensions, as query .* leading ones equal",
    ),
    (ATTENTION, ONE_HEAD, "enable_gqa"),
    (ATTENTION, dict(query=floats(B, 3, T, D), enable_gqa=True), "heads that divides 3"),
    (ATTENTION, dict(attn_mask=torch.zeros(T, S + 1), bias=None), r"^attn_mask has .*3, 5\]$"),
    (ATTENTION, dict(attn_mask=torch.ones(B, S) > 0), r"sequence, attn_mask\[:, None, None\]$"),
    (ATTENTION, dict(bias=torch.zeros(B, S)), r"bias has .*\[2, 5\]; .* bias\[:, None, None\]$"),
    (ATTENTION, dict(mask=None), "^mask is no argument here; expected attn_mask$"),
    (
        ATTENTION,
        dict(key_padding_mask=torch.zeros(B, S) > 0),
        r"expected attn_mask=~key_padding_mask\[:, None, None\], True where",
    ),
    (ATTENTION, dict(dropout=0.1), "^dropout is no argument here; expected"),
    (ATTENTION, dict(attn_mask=torch.zeros(T, S).half(), bias=None), "^attn_mask has dtype"),
    (ATTENTION, dict(attn_mask=torch.zeros(T, S, device="meta"), bias=None), "^attn_mask is on"),
    (ATTENTION, dict(attn_mask=torch.zeros(T, S)), "float32 and is added"),
    (ATTENTION, dict(window=(-1, 0)), r"\(-1, 0\).*None for no bound, which is -1 in flash-attn"),
    (ATTENTION, dict(window=(1, 2, 3)), r"window is .*; expected \(left, right\)"),
    (ATTENTION, dict(window=(1.0, None)), "window is .*; expected two ints"),
    ((ATTENTION, PACKED), dict(softcap=0.0), "softcap is 0.0; expected a positive number"),
    (ATTENTION, dict(dropout_seed=torch.zeros(2).long()), "dropout_seed has shape"),
    ("attention_weights", dict(key=ONE_HEAD["key"]), "enable_gqa"),
    ("attention_weights", dict(heads=slice(9, 12)), r"slice\(9, 12, None\); .* from -2 to 2"),
    (PACKED, dict.fromkeys(("key", "value"), floats(B * S, 3, D)), "heads that divides 2"),
    (PACKED, dict(max_q=1), "max_q is 1; expected at least the longest sequence, 3"),
    (PACKED, dict(window=(-1, None)), "window is"),
    (PACKED, offsets(0, T, B * T + 1), "goes from 0 to 7; expected .* tokens of query, 6"),
    (PACKED, offsets(1, T, B * T), "goes from 1 to 6"),
    (PACKED, offsets(0), r"cu_seqlens_q has shape \[1\]; expected .* a sequence or more"),
    (PACKED, offsets(0, B * T + 1, B * T), "decreases by 1"),
    (PACKED, offsets(0, B * T), "cu_seqlens_k has shape"),
    (PACKED, dict(cu_seqlens_q=torch.tensor([0, T, B * T])), "cu_seqlens_q has dtype torch.int64"),
    ("embed", dict(tokens=ids(1, S + 1)), "tokens has 6 positions; expected"),
    ("embed", dict(padding_idx=V), f"padding_idx is {V}"),
    ("feed_forward", dict(dropout_seed=2**64), f"seed is {2**64}; expected an int of 64 bits"),
    (("geglu", "swiglu"), dict(w=floats(25, D)), r"w has .* \[25, .*; expected \[2 d_ff, d\]"),
    ("layer_norm", dict(input=floats(B, 1), weight=None, bias=None, normalized_shape=1), "two"),
    (ROTARY, dict(query=floats(B, H, T, 0)), "query has shape .* D of 1 or more"),
    (ROTARY, dict(cos=floats(B + 1, T, D)), r"cos has .* or \[B, S, R\] = \[2, 3, R\]"),
    (ROTARY, dict(cos=floats(T, 7)), "R = 7 columns; expected an even number from 2 to"),
    (ROTARY, dict(cos=floats(T, 0)), "R = 0 columns"),
    (ROTARY, dict(cos=floats(T, D + 2)), "R = 10 columns; .* the head dim of query, 8"),
    (ROTARY, dict(cos=floats(T, D).requires_grad_()), "cos requires a gradient; expected"),
    (ROTARY, dict(sin=floats(T, D - 2)), r"sin has shape \[3, 6\]; expected that of cos"),
    (ROTARY, dict.fromkeys(("query", "key"), floats(B, T, H, D)), r"query \[B, H, S, D\] is \[2,"),
    (ROTARY, PACKED_HEADS, r"cos has shape .* expected \[T, R\] = \[6, R\]"),
    (FREQUENCIES, dict(dim=7), "dim is 7; expected an even number"),
    (FREQUENCIES, dict(length=-1), "length is -1"),
    (FREQUENCIES, dict(theta=0.0), "theta is 0.0; expected a positive number"),
    (FREQUENCIES, dict(dtype=torch.int64), "dtype is torch.int64"),
    (FREQUENCIES, dict(scaling="linear"), "scaling is a str; expected a mapping"),
    (FREQUENCIES, scaling("longrope"), "the rope_type 'longrope'; expected"),
    (FREQUENCIES, scaling("linear"), "'linear' has no factor"),
    (FREQUENCIES, dict(scaling={"type": "linear", "factor": -2}), r"scaling\['factor'\] is -2"),
    (FREQUENCIES, scaling("linear", factor=2, beta=1), "key 'beta'"),
    (FREQUENCIES, scaling("default", rope_theta=5.0), "rope_theta 5.0"),
    (FREQUENCIES, scaling("llama3", **LLAMA3), "low_freq_factor 5.0 and high_freq_factor 4.0;"),
    (LOSSES, dict(target=torch.rand(B, T, V)), "cross_entropy takes class probabilities"),
    (LOSSES, dict(ignore_index=-(2**63) - 1), f"is {-(2**63) - 1}; expected an int of 64 bits"),
    (LOSSES[0], square(4, 4), r"logits .*\[N, C, \.\.\.\].*logits\.flatten\(0, -2\)"),
    (LOSSES[0], square(4, 4, 4), r"logits .*\[N, C, \.\.\.\]"),
    (LOSSES, dict(target=ids(B, T) - 101, ignore_index=None), "holds -100; .* from 0 to 10"),
    (LOSSES[1], classes(2), "2 classes; expected 3 or more"),
    (LOSSES[1], classes(1) | dict(ignore_index=-100), "there are 1 classes; expected 2 or more"),
    (KL, dict(teacher_input=floats(3, S)), r"^teacher_input has shape \[3, 5\]"),
    (KL, dict(teacher_weight=floats(5, S), teacher_bias=None), "^teacher_weight has shape.*V = 11"),
    (KL, dict(teacher_weight=floats(V, 8)), r"^teacher_weight has shape .* N = 5"),
    (KL, dict(teacher_bias=floats(5)), r"^teacher_bias has shape \[5\]"),
    (KL, dict(mask=torch.ones(B)), "^mask has dtype torch.float32; expected torch.bool"),
    (KL, dict(mask=torch.ones(3) > 0), r"^mask has shape \[3\]; expected \[2\]"),
    (KL, dict(teacher_weight=floats(V, S).half()), "^teacher_weight has dtype"),
    (KL, dict(reduction="batchmean"), "^reduction is 'batchmean'"),
]  # fmt: skip


# What the messages of TypeErrors say.
OF_TYPES = r"is an? (?!scalar)|has dtype \S+;|dtype is|is no argument|expected two ints"


@pytest.mark.all_cases
@pytest.mark.parametrize("ops, change, words", OTHERS)
def test_other_wrong_calls(backend, ops, change, words):
    for op in (ops,) if isinstance(ops, str) else ops:
        with pytest.raises(ERRORS, match=words) as found:
            getattr(ff, op)(**(OPS | FUNCTIONS)[op]() | change)
        wrong_type = re.search(OF_TYPES, str(found.value))
        assert type(found.value) is (TypeError if wrong_type else ValueError), op


def on_meta(x):
    if isinstance(x, ff.Packing):
        return ff.Packing(**{name: on_meta(y) for name, y in vars(x).items()})
    return x.to("meta") if isinstance(x, (TENSOR, ff.BlockMask)) else x


def tensors(x):
    if isinstance(x, (tuple, list)):
        return [t for y in x for t in tensors(y)]
    return [x] if isinstance(x, TENSOR) else []


@pytest.mark.parametrize("op", OPS)
def test_ops_on_meta(op):
    """Where shapes alone are needed, tensors without contents give such tensors."""
    arguments = OPS[op]()
    want = tensors(getattr(ff, op)(**arguments))
    out = tensors(getattr(ff, op)(**{name: on_meta(x) for name, x in arguments.items()}))
    assert [(x.shape, x.dtype, x.is_meta) for x in out] == [(x.shape, x.dtype, True) for x in want]


@pytest.mark.parametrize("name", [name for name in CALLS if name.endswith((".forward", ".packed"))])
def test_modules_on_meta(name):
    function, right = call_of(name)
    function.__self__.to("meta")
    arguments = {name: on_meta(x) for name, x in right().items()}
    assert all(x.is_meta for x in tensors(function(**arguments)))


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (  # a mask of the modules
            lambda: ff.scaled_dot_product_attention(
                *[floats(B, 4, 16, D)] * 3, torch.ones(B, 1, 16) > 0
            ),
            r"attn_mask has shape \[2, 1, 16\]; .* for each sequence, attn_mask\[:, None\]$",
        ),
        (  # a usual call, which torch computes
            lambda: ff.scaled_dot_product_attention(*[floats(B, H, 16, D)] * 3, enable_gqa=1),
            "enable_gqa is 1; expected True or False",
        ),
        (
            lambda: ff.layer_norm(torch.nested.nested_tensor([floats(2, D), floats(3, D)]), D),
            "input is a nested tensor",
        ),
        (
            lambda: ff.make_decoder(V, 1, D, F, H, max_len=S - 1)(ids(8), packing()),
            f"^tokens has a sequence of {S} tokens; expected at most max_len = {S - 1}",
        ),
        (
            lambda: ff.run_epoch([batch()], language_model(), max),
            r"batch 1 of data has a source.* LanguageModel.*expected Batch\(None, tgt\)",
        ),
        (
            lambda: ff.run_epoch([ff.Batch(None, ids(B, T))], model(), max),
            r"batch 1 of data has no source.* EncoderDecoder.*expected Batch\(src, tgt\)",
        ),
    ],
)
def test_calls_that_could_be_right(call, words):
    with pytest.raises(ERRORS, match=words):
        call()


def test_flags_and_seeds_of_other_types():
    """NumPy's booleans are flags; every 64 bits are a seed, with a sign or without."""
    x = OPS["scaled_dot_product_attention"]()
    want = ff.scaled_dot_product_attention(**x | {"dropout_seed": -1})[0]
    same = {"dropout_seed": 2**64 - 1, "is_causal": np.True_, "return_lse": np.True_}
    assert torch.equal(ff.scaled_dot_product_attention(**x | same)[0], want)


# A number of NumPy, and a tensor of no dimension, for a number of Python.
OTHER_NUMBERS = {
    "NumPy": lambda x: np.float16(x) if isinstance(x, float) else np.int64(x),
    "tensor": lambda x: torch.tensor(x),
}
# A tensor `start` is [B]; the sizes of a mask are ints.
NO_SCALARS = "PositionalEncoding.forward", "RotaryEmbedding.forward", "block_mask"


def with_numbers(x, kind):
    """x, and x with each number, also in a tuple, of another kind; the same values in both."""
    if isinstance(x, dict):
        pairs = [with_numbers(y, kind) for y in x.values()]
        return [dict(zip(x, values)) for values in zip(*pairs)]
    if isinstance(x, tuple) and all(map(is_number, x)):
        return [tuple(values) for values in zip(*(with_numbers(y, kind) for y in x))]
    other = OTHER_NUMBERS[kind](x) if is_number(x) else x
    return [other.item() if is_number(x) else x, other]


@pytest.mark.all_cases
@pytest.mark.parametrize("kind", OTHER_NUMBERS)
@pytest.mark.parametrize("op", OPS)
def test_numbers_of_other_types(op, kind, backend, monkeypatch):
    """As torch takes them; no backend sees them, whose caches have numbers in their keys."""
    want, given = (OPS[op]() | numbers for numbers in with_numbers(OPS[op](), kind))
    leaves, run = [], backends.run

    def recorded(name, **arguments):
        leaves.extend(torch.utils._pytree.tree_leaves(arguments))
        return run(name, **arguments)

    monkeypatch.setattr(backends, "run", recorded)
    pairs = zip(tensors(getattr(ff, op)(**want)), tensors(getattr(ff, op)(**given)), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)
    assert leaves or op == "attention_weights"
    assert not any(isinstance(x, np.generic) for x in leaves)
    assert all(x.dim() for x in leaves if isinstance(x, TENSOR))


@pytest.mark.all_cases
@pytest.mark.parametrize("kind", OTHER_NUMBERS)
def test_numbers_of_other_types_in_other_calls(kind):
    for name in CALLS:
        if kind == "tensor" and name in NO_SCALARS:
            continue
        function, right = call_of(name)
        function(**with_numbers(right(), kind)[1])


@pytest.mark.all_cases
@pytest.mark.parametrize("x", [True, np.True_, torch.tensor(True), 1j, torch.ones(1)])
def test_what_is_no_number(x):
    """Nor is a tensor of no dimension that requires a gradient, which it would not get."""
    for wrong in (x, torch.tensor(1.0, requires_grad=True)):
        for name in ("alpha", "limit", "offset"):
            with pytest.raises(TypeError, match=rf"{name} is an? .*; expected a .*number"):
                ff.gated_activation(**OPS["gated_activation"]() | {name: wrong})
        with pytest.raises(ValueError, match=r"eps is .*; expected a number"):
            ff.rms_norm(floats(B, D), D, eps=wrong)
        with pytest.raises(TypeError, match=r"ignore_index is an? .*; expected an int"):
            ff.cross_entropy(**OPS["cross_entropy"]() | {"ignore_index": wrong})


@pytest.mark.all_cases
@pytest.mark.parametrize("op", OPS)
def test_no_gradient_is_missing(op, backend):
    """A tensor that requires a gradient gets one, or the error says that the op computes none."""
    function = getattr(ff, op)
    for name, x in OPS[op]().items():
        if not isinstance(x, TENSOR) or not x.is_floating_point() or name.startswith("teacher"):
            continue
        given = OPS[op]() | {name: x.clone().requires_grad_()}
        try:
            found = tensors(function(**given))
        except (RuntimeError, ValueError) as error:
            assert re.match(f"{name} requires a gradient.*; expected ", str(error)), error
            with torch.no_grad():
                function(**given)
        else:
            sum(y.square().sum() for y in found).backward()
            assert given[name].grad is not None, name


def test_weights_of_classes_are_constants():
    """LabelSmoothing, too, refuses them if they require a gradient."""
    weight = torch.rand(V, requires_grad=True)
    with pytest.raises(RuntimeError, match="weight requires a gradient, which LabelSmoothing"):
        ff.LabelSmoothing(V, 0, weight=weight)
    with torch.no_grad():
        assert not ff.LabelSmoothing(V, 0, weight=weight).weight.requires_grad


@pytest.mark.with_all
def test_a_flag_and_a_seed_in_a_graph():
    """Of sizes that a graph leaves open."""
    w = floats(8, D)

    def call(x, seed):
        out = ff.scaled_dot_product_attention(x, x, x, is_causal=x.shape[2] > 1)
        return ff.geglu(out, w, None, w[:4].t(), None, 0.5, dropout_seed=seed)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for length, seed in ((5, 3), (6, 4)):
        x = floats(1, 1, length, D)
        torch.testing.assert_close(compiled(x, seed), call(x, seed))


def test_classes_that_are_as_many_as_the_positions_only_by_name():
    """[N, T, V] with T != V, and [M, V] with M = V, have one reading."""
    for shape in ((B, 4, 5), (4, 4), (B, 1, 1)):
        logits, target = floats(*shape), torch.zeros(shape[:-1], dtype=torch.long)
        want = torch.nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())
        torch.testing.assert_close(ff.cross_entropy(logits, target), want)
