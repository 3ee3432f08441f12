"""The backward of short sequences for Hopper, in the simulator of Gluon kernels: its results, and
that planted faults are found.
"""

import functools

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from fastformer.kernels import common
from fastformer.kernels.attention import plan
from hopper_calls import simulated_short

from benchmarks.proof.gluon_simulator import Fault
from fastformer import use_backend
from fastformer.ops import functional

if plan.HOPPER_BACKWARD == {} or not common.INTERPRETED:
    pytest.skip("needs Gluon, and Triton's interpreter", allow_module_level=True)


def qkv(sq=130, sk=200, h=2, b=3, d=64, dtype=torch.bfloat16):
    """Scaled scores with a standard deviation of 2; six heads for four programs."""
    q, k, v = (torch.randn(b, h, s, d) for s in (sq, sk, sk))
    return {"query": (2 * q).to(dtype), "key": k.to(dtype), "value": v.to(dtype)}


def drawn(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


MASK = drawn(3, 1, 1, 200) < 0.7
MASK[0, ..., 64:128] = False
MASK[1] = False  # a sequence that sees no key
OF_HEADS = drawn(3, 2, 1, 200, seed=1) < 0.7
LENGTHS = torch.tensor([0, 67, 180])
DROPOUT = dict(dropout_p=0.25, dropout_seed=5)
CALLS = {
    "plain": ({}, {}),
    "whole tiles": (dict(sq=128, sk=128), {}),
    "one tile": (dict(sq=1, sk=3), {}),
    "512": (dict(sq=512, sk=512, b=1, h=1), dict(is_causal=True, **DROPOUT)),
    "causal": ({}, dict(is_causal=True)),
    "bottom-right, queries without keys": (
        dict(sk=40),
        dict(is_causal=True, causal_alignment="bottom_right"),
    ),
    "lengths, causal": ({}, dict(key_lengths=LENGTHS, is_causal=True)),
    "mask": ({}, dict(attn_mask=MASK)),
    "mask of heads, lengths, dropout": (
        {},
        dict(attn_mask=OF_HEADS, key_lengths=LENGTHS, **DROPOUT),
    ),
    "dropout": ({}, DROPOUT),
    "sinks": ({}, dict(sinks=torch.tensor([0.5, -torch.inf]), key_lengths=LENGTHS)),
}


def attend_and_lse(**given):
    out, lse = functional.scaled_dot_product_attention(**given, return_lse=True)
    lse = torch.where(lse == -torch.inf, 0.0, lse)
    return out + lse.unsqueeze(3).to(out.dtype)


@pytest.mark.parametrize("call", CALLS)
def test_gradients(against_oracle, call):
    """In float16 and bfloat16 by turns, with the gradient of lse in every other call."""
    sizes, options = CALLS[call]
    number = list(CALLS).index(call)
    function = attend_and_lse if number % 2 else functional.scaled_dot_product_attention
    x = qkv(**sizes, dtype=(torch.float16, torch.bfloat16)[number % 3 > 0])
    small = max(x["query"].shape[2], x["key"].shape[2]) < 64
    with simulated_short() as launched:
        against_oracle(lambda **given: function(**given, **options), x, small=small)
    assert len(launched) == 1


def gradients(x, grad_output, **options):
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    output = functional.scaled_dot_product_attention(**leaves, **options)
    return torch.autograd.grad(output, list(leaves.values()), grad_output)


def test_the_same_bits_from_run_to_run():
    x = qkv(b=1)
    given, found = (x, torch.randn_like(x["query"])), []
    for seed in range(2):  # of the schedule
        with simulated_short(seed=seed):
            found.append(gradients(*given, is_causal=True, **DROPOUT))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_no_query_may_see_reaches_nothing(bad):
    x, options = qkv(), dict(attn_mask=OF_HEADS, key_lengths=torch.tensor([150, 150, 40]))
    hidden = ~OF_HEADS[:, :, 0] | (torch.arange(200) >= options["key_lengths"].view(3, 1, 1))
    given = torch.randn_like(x["query"])
    with simulated_short():
        before = gradients(x, given, **options)
        for name in ("key", "value"):
            x[name] = x[name].masked_fill(hidden[..., None], bad)
        after = gradients(x, given, **options)
    assert all(map(torch.equal, before, after)) and all(t.isfinite().all() for t in after)


def test_what_it_does_not_compute_is_left_to_others():
    with simulated_short() as launched:
        for options in (
            dict(attn_mask=drawn(1, 1, 130, 200) < 0.5),
            dict(bias=drawn(200)),
            dict(softcap=3.0),
            dict(window=(9, 9)),
        ):
            gradients(qkv(b=1), torch.ones(1, 2, 130, 64).bfloat16(), **options)
        gradients(qkv(b=1, d=32), torch.ones(1, 2, 130, 32).bfloat16())
        gradients(qkv(sk=513, b=1), torch.ones(1, 2, 130, 64).bfloat16())
    assert launched == []


# Five tiles of queries and four of keys, of six heads for four programs, with NaN in what no query
# may see.
SHOWN = {
    "plain": (dict(sq=300, sk=330), {}),
    "causal": (dict(sq=300, sk=330), dict(is_causal=True)),
    "mask": ({}, dict(attn_mask=OF_HEADS)),
    "dropout": ({}, DROPOUT),
}


@functools.cache
def shown(call):
    """The arguments of a call, and its gradients in float64."""
    sizes, options = SHOWN[call]
    x = qkv(**sizes, dtype=torch.float16)
    given = torch.randn_like(x["query"])
    with use_backend("reference"):
        want = gradients({n: t.double() for n, t in x.items()}, given.double(), **options)
    if call == "mask":
        for name in ("key", "value"):
            x[name] = x[name].masked_fill(~OF_HEADS.mT, float("nan"))
    return x, given, want


def what_is_found(call, seed):
    """What the simulator says of a call, or how wrong its result is; nothing where it is right."""
    x, given, want = shown(call)
    try:
        with simulated_short(seed=seed):
            have = gradients(x, given, **SHOWN[call][1])
    except Fault as fault:
        return str(fault)
    for a, b in zip(have, want):
        if not (error := (a.double() - b).abs().max() / b.abs().max()) < 1e-2:
            return f"wrong by {error:.1e}"
    return ""


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(x, marks=pytest.mark.with_all) for x in (1, 2))]
)
@pytest.mark.parametrize("call", SHOWN)
def test_schedules(call, seed):
    assert what_is_found(call, seed) == ""
