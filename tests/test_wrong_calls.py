"""Wrong calls, in a table: every public function x each of its arguments x every way to be wrong.

A call with one wrong argument raises a ValueError, TypeError or RuntimeError whose message names
that argument, before anything runs; or it is listed below as legitimate, with the reason, and runs.
"""

import fnmatch
import inspect
import re

import numpy as np
import pytest
import torch

import fastformer as ff

ERRORS = ValueError, TypeError, RuntimeError

# ---------------------------------------------------------------------------------- the right calls

B, T, S, H, D, F, V = 2, 3, 5, 2, 8, 12, 11


def floats(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def ids(*shape, high=V):
    return torch.arange(torch.Size(shape).numel()).view(shape) % (high - 1) + 1


def heads():
    return dict(query=floats(B, H, T, D), key=floats(B, H, S, D))


SCORES = dict(
    attn_mask=lambda: torch.ones(B, 1, T, S, dtype=torch.bool),
    is_causal=lambda: True,
    scale=lambda: 0.5,
    enable_gqa=lambda: False,
    bias=lambda: floats(H, T, S),
    key_lengths=lambda: torch.tensor([S, 4]),
    window=lambda: (2, 2),
    causal_alignment=lambda: "bottom_right",
    alibi_slopes=lambda: torch.ones(H),
    softcap=lambda: 20.0,
    sinks=lambda: floats(H),
)


def scores():
    return {name: make() for name, make in SCORES.items()}


DROPOUT = dict(dropout_p=0.5, dropout_seed=3)
LOSS = dict(reduction="mean", ignore_index=0, label_smoothing=0.1, smoothing="kl")


def norm(unbiased):
    options = {"unbiased": True} if unbiased else {}
    return dict(input=floats(B, D), normalized_shape=(D,), weight=floats(D), eps=1e-5, **options)


def gated():
    return dict(input=floats(B, D), w=floats(2 * F, D), b=floats(2 * F), w_2=floats(D, F))


OPS = {
    "scaled_dot_product_attention": lambda: dict(
        **heads(), value=floats(B, H, S, D), **scores(), **DROPOUT, return_lse=True
    ),
    "packed_attention": lambda: dict(
        query=floats(B * T, H, D), key=floats(B * S, H, D), value=floats(B * S, H, D),
        cu_seqlens_q=torch.tensor([0, T, B * T], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, S, B * S], dtype=torch.int32),
        max_q=T, max_k=S, is_causal=True, scale=0.5, causal_alignment="bottom_right",
        window=(2, 2), sinks=floats(H), **DROPOUT,
    ),
    "attention_weights": lambda: dict(
        **heads(), **scores(), rows=slice(0, 2), heads=torch.tensor([1])
    ),
    "layer_norm": lambda: dict(**norm(True), bias=floats(D)),
    "rms_norm": lambda: norm(False),
    "dropout_add_layer_norm": lambda: dict(
        input=floats(B, D), residual=floats(B, D), weight=floats(D), bias=floats(D), eps=1e-5,
        unbiased=True, **DROPOUT,
    ),
    "feed_forward": lambda: dict(
        input=floats(B, D), w_1=floats(F, D), b_1=floats(F), w_2=floats(D, F), b_2=floats(D),
        activation="relu", **DROPOUT,
    ),
    "geglu": lambda: dict(**gated(), b_2=floats(D), **DROPOUT),
    "swiglu": lambda: dict(**gated(), b_2=floats(D), **DROPOUT),
    "embed": lambda: dict(
        tokens=ids(B, S), weight=floats(V, D), positional=floats(S, D), scale=2.0, padding_idx=0,
        **DROPOUT,
    ),
    "cross_entropy": lambda: dict(logits=floats(B, T, V), target=ids(B, T), **LOSS),
    "linear_cross_entropy": lambda: dict(
        input=floats(B, T, D), linear_weight=floats(V, D), target=ids(B, T),
        linear_bias=floats(V), **LOSS,
    ),
}  # fmt: skip

# ------------------------------------------------------------------------- the ways to be wrong


def is_number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def other_dtype(x):
    """Of a tensor: floats for integers, integers for floats; of a number: a float, a string."""
    if isinstance(x, torch.Tensor):
        return x.cfloat() if x.is_floating_point() else x.to(torch.float64) + 0.5
    return x + 0.5 if type(x) is int else "1" if is_number(x) else SKIP


SKIP = object()
TENSOR, NUMBER = torch.Tensor, (int, float)
WRONG = {
    "None": lambda x: None,
    "wrong type": lambda x: 7j if isinstance(x, str) else "no",
    "wrong dtype": other_dtype,
    "wrong rank": lambda x: x[None, None] if isinstance(x, TENSOR) else SKIP,
    "scalar": lambda x: x.flatten()[0] if isinstance(x, TENSOR) else SKIP,
    "meta": lambda x: x.to("meta") if isinstance(x, TENSOR) else SKIP,
    "sparse": lambda x: x.to_sparse() if isinstance(x, TENSOR) else SKIP,
    "empty": lambda x: x.new_empty(0) if isinstance(x, TENSOR)
    else type(x)() if isinstance(x, (str, tuple, list)) else SKIP,
    "NaN": lambda x: float("nan") if is_number(x) else SKIP,
    "negative": lambda x: -7 if is_number(x)
    else torch.full_like(x, -7) if isinstance(x, TENSOR) and is_ids(x) else SKIP,
    "too large": lambda x: 2**70 if is_number(x)
    else torch.full_like(x, 99) if isinstance(x, TENSOR) and is_ids(x) else SKIP,
}  # fmt: skip


def is_ids(x):
    return not x.is_floating_point() and x.dtype != torch.bool


def calls(function, right):
    """(argument, kind, arguments) for every wrong value of every argument."""
    parameters = inspect.signature(function).parameters
    for name in right():
        for kind, wrong in WRONG.items():
            arguments = right()
            value = wrong(arguments[name])
            default = parameters[name].default if name in parameters else inspect.Parameter.empty
            if value is SKIP or (value is None and default is None):  # what stands there anyhow
                continue
            arguments[name] = value
            yield name, kind, arguments


def complaints(of, function, right):
    """What is wrong about how a function takes wrong calls."""
    found = []
    for name, kind, arguments in calls(function, right):
        call = f"{of}.{name} {kind}"
        legitimate = matching(call, LEGITIMATE)
        names = "|".join([name, *matching(call, NAMED)])
        try:
            function(**arguments)
        except ERRORS as error:
            if legitimate:
                found.append(f"{call}: listed as legitimate ({legitimate[0]}), raised {error!r}")
            elif not re.search(rf"\b({names})\b", str(error)):
                found.append(f"{call}: not named in {error!r}")
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
    "a term that is left out": ["embed.positional None"],
    "a factor may be any number, and its NaN reaches the output": [
        f"{op}.scale {kind}" for op in ("*attention*", "embed")
        for kind in ("NaN", "negative", "too large")
    ],
    "the 64 bits of a seed are read as a signed number": ["*.dropout_seed negative"],
    "one element for all scores: it broadcasts": ["*.attn_mask scalar", "*att*.bias scalar"],
    "any leading dimensions": [f"{op}.input wrong rank" for op in (
        "layer_norm", "rms_norm", "feed_forward", "geglu", "swiglu")] + ["embed.tokens wrong rank"],
    "no tokens": ["embed.tokens empty"],
    "no heads are wanted": ["attention_weights.heads empty"],
    "a huge eps only makes the output small": ["*.eps too large"],
    "a huge softcap caps nothing": ["*.softcap too large"],
    "a token may be counted from the end, as in torch": ["embed.padding_idx negative"],
}  # fmt: skip
# another name under which the message may speak of the argument
NAMED = {
    "target": ["*cross_entropy.* wrong rank", "*cross_entropy.* empty"],
    "normalized_shape": ["dropout_add_layer_norm.weight *"],
}


@pytest.mark.parametrize("op", OPS)
def test_ops(op, backend):
    function = getattr(ff, op)
    assert set(OPS[op]()) == set(inspect.signature(function).parameters)
    function(**OPS[op]())
    found = complaints(op, function, OPS[op])
    assert not found, "\n".join(found)


def on_meta(x):
    return x.to("meta") if isinstance(x, TENSOR) else x


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


@pytest.mark.parametrize(
    ("call", "words"),
    {
        "torch's layout of classes": (
            lambda: ff.cross_entropy(floats(B, 4, 4), ids(B, 4, high=4)),
            r"logits .*\[N, C, \.\.\.\].*logits\.flatten\(0, -2\)",
        ),
        "and of an image": (
            lambda: ff.cross_entropy(floats(B, 4, 4, 4), ids(B, 4, 4, high=4)),
            r"logits .*\[N, C, \.\.\.\]",
        ),
        "a seed of more than 64 bits": (
            lambda: ff.feed_forward(**OPS["feed_forward"]() | {"dropout_seed": 2**64}),
            f"dropout_seed is {2**64}; expected an int of 64 bits",
        ),
        "a slice past the heads": (
            lambda: ff.attention_weights(**heads(), heads=slice(9, 12)),
            r"heads is slice\(9, 12, None\); there are 2",
        ),
        "flash-attn's window": (
            lambda: ff.scaled_dot_product_attention(
                *heads().values(), heads()["key"], window=(-1, 0)
            ),
            r"window is \(-1, 0\).*None for no bound, which is -1 in flash-attn",
        ),
        "a nested tensor": (
            lambda: ff.layer_norm(torch.nested.nested_tensor([floats(2, D), floats(3, D)]), D),
            "input is a nested tensor",
        ),
    }.values(),
)  # fmt: skip
def test_what_went_through(call, words):
    with pytest.raises(ERRORS, match=words):
        call()


def test_flags_and_seeds_of_other_types():
    """NumPy's booleans are flags; every 64 bits are a seed, with a sign or without."""
    x = OPS["scaled_dot_product_attention"]()
    want = ff.scaled_dot_product_attention(**x | {"dropout_seed": -1})[0]
    same = {"dropout_seed": 2**64 - 1, "is_causal": np.True_, "return_lse": np.True_}
    assert torch.equal(ff.scaled_dot_product_attention(**x | same)[0], want)


def test_padding_idx_from_the_end(backend, device):
    """As in torch: -1 is the last token."""
    weight = floats(V, D).to(device).requires_grad_()
    tokens = torch.tensor([V - 1, 1], device=device)
    ff.embed(tokens, weight, None, padding_idx=-1).sum().backward()
    assert weight.grad[1].ne(0).all() and not weight.grad[V - 1].any()


def test_classes_that_are_as_many_as_the_positions_only_by_name():
    """[N, T, V] with T != V, and [M, V] with M = V, have one reading."""
    for shape in ((B, 4, 5), (4, 4), (B, 1, 1)):
        logits, target = floats(*shape), torch.zeros(shape[:-1], dtype=torch.long)
        want = torch.nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())
        torch.testing.assert_close(ff.cross_entropy(logits, target), want)
