"""The forward for Hopper, in the simulator of Gluon kernels: its results, and that what the
simulator is there to find is found.
"""

import contextlib
import functools

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from fastformer.kernels import common, tuned
from fastformer.kernels.attention import plan
from hopper_calls import ROW, replaced, simulated
from hopper_faults import FAULTS, HARMLESS

from benchmarks.proof.gluon_simulator import Fault
from fastformer import current_backend, use_backend
from fastformer.description import Attention
from fastformer.ops import functional

if plan.HOPPER == {} or not common.INTERPRETED:
    pytest.skip("needs Gluon, and Triton's interpreter", allow_module_level=True)


def qkv(sq=130, sk=200, d=64, dv=64, h=2, g=1, b=2, dtype=torch.bfloat16):
    """Scaled scores with a standard deviation of 3."""
    query, key, value = (
        torch.randn(b, n, s, w) for n, s, w in ((h, sq, d), (g, sk, d), (g, sk, dv))
    )
    return {"query": (3 * query).to(dtype), "key": key.to(dtype), "value": value.to(dtype)}


LENGTHS = torch.tensor([0, 67])
MASK = torch.rand(2, 1, 1, 200, generator=torch.Generator().manual_seed(0)) < 0.7
MASK[0, ..., 64:128] = False  # a whole tile
DROPOUT = dict(dropout_p=0.25, dropout_seed=5)
CALLS = {
    "plain": (dict(), {}),
    "whole tiles": (dict(sq=128, sk=192), {}),
    "one tile": (dict(sq=1, sk=3), {}),
    "causal": (dict(sq=150, sk=200), dict(is_causal=True)),
    "causal to the last key": (dict(sq=200, sk=130), dict(is_causal=True)),
    "bottom-right": (dict(sq=70), dict(is_causal=True, causal_alignment="bottom_right")),
    "no key": (dict(sq=190, sk=40), dict(is_causal=True, causal_alignment="bottom_right")),
    "lengths": (dict(), dict(key_lengths=LENGTHS)),
    "lengths, causal": (dict(), dict(key_lengths=LENGTHS + 60, is_causal=True)),
    "a bound to the right": (dict(sq=40), dict(window=(None, 70))),
    "sinks": (dict(), dict(sinks=torch.tensor([0.5, -torch.inf]), key_lengths=LENGTHS)),
    "mask": (dict(), dict(attn_mask=MASK)),
    "mask, causal, lengths": (
        dict(),
        dict(attn_mask=MASK, is_causal=True, key_lengths=LENGTHS + 100),
    ),
    "dropout": (dict(), DROPOUT),
    "dropout, mask, causal": (dict(), dict(attn_mask=MASK, is_causal=True, **DROPOUT)),
    "other dims": (dict(d=80, dv=24), dict(is_causal=True)),
    "128 wide": (dict(d=128, dv=128, b=1), DROPOUT),
}


def attend(columns=64, slots=2, **given):
    """Output and lse in one tensor; on the backend triton in the simulator."""
    if current_backend() == "triton":
        how = simulated(columns=columns, slots=slots)
    else:
        how = contextlib.nullcontext()
    with how as launched:
        output, lse = functional.scaled_dot_product_attention(
            **given, enable_gqa=True, return_lse=True
        )
    assert launched is None or len(launched) == 1
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    return torch.cat([output, lse.to(output.dtype)[..., None]], -1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", list(CALLS))
def test_forward(against_oracle, call, dtype):
    sizes, options = CALLS[call]
    tiles = dict(columns=128, slots=3) if call in ("mask", "128 wide") else {}
    with use_backend("triton"):
        against_oracle(
            lambda **x: attend(**x, **tiles, **options), qkv(**sizes, dtype=dtype), gradients=False
        )


@pytest.mark.parametrize("options", [dict(is_causal=True), DROPOUT], ids=["causal", "dropout"])
def test_todays_backward_takes_its_rows(against_oracle, options):
    """Of inputs whose memory is [B, S, H, D]."""
    x = qkv(sq=70, sk=90, g=2)
    x = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in x.items()}
    with use_backend("triton"):
        against_oracle(lambda **given: attend(**given, **options), x)


def test_dropout_draws_what_the_other_kernels_draw():
    """Values that are the unit matrix make the output the weights, of which the dropped are 0."""
    x = qkv(sq=150, sk=128, dv=128, g=2) | {"value": torch.eye(128).bfloat16().expand(2, 2, -1, -1)}
    x["query"] = x["query"] / 10  # no weight is rounded to zero
    with use_backend("triton"):
        theirs = functional.scaled_dot_product_attention(**x, **DROPOUT)
    with simulated():
        ours = functional.scaled_dot_product_attention(**x, **DROPOUT)
    assert 0.2 < (theirs == 0).double().mean() < 0.3
    assert torch.equal(ours == 0, theirs == 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_no_query_may_see_reaches_nothing(bad):
    x = qkv()
    hidden = ~MASK[:, 0, 0] | (torch.arange(200) >= 150)
    options = dict(attn_mask=MASK, key_lengths=torch.tensor([150, 150]))
    with simulated():
        before = functional.scaled_dot_product_attention(**x, **options, enable_gqa=True)
        for name in ("key", "value"):
            x[name] = x[name].masked_fill(hidden[:, None, :, None], bad)
        after = functional.scaled_dot_product_attention(**x, **options, enable_gqa=True)
    assert torch.equal(before, after) and after.isfinite().all()


def test_nan_that_a_query_sees_is_kept():
    x = qkv(b=1)
    x["key"][:, :, 3, 0] = float("nan")
    with simulated():
        output = functional.scaled_dot_product_attention(**x, attn_mask=MASK[1:], enable_gqa=True)
    assert bool(MASK[1, 0, 0, 3]) and output.isnan().all()


def test_which_calls_a_measurement_may_choose_it_for():
    """Those that it computes, on sm_90 alone; without a measurement no call takes it."""

    def may(arch="sm_90", dtype=torch.bfloat16, d=64, shift=0, **options):
        flat = torch.empty(4 * 2 * 8 * d, dtype=dtype)[shift:]
        x = flat[: 3 * 2 * 8 * d].view(3, 2, 8, d)
        given = dict(attn_mask=None, dropout_p=0.0, is_causal=False, scale=0.1) | options
        with replaced(plan, architecture=lambda device: arch), tuned.forced({}) as asked:
            made = plan.ForwardPlan(x, x, x, Attention(**given))
        assert made.launch["forward"]._kernel is not plan.hopper_forward_kernel
        (key,) = (key for key in asked if key.kernel == "attention forward")
        assert key.case.endswith("TMA") or not made.overlaps
        assert (ROW in key.options()) == made.overlaps
        return made.overlaps

    rows, full = torch.ones(3, 1, 1, 8) > 0, torch.ones(3, 1, 8, 8) > 0
    for allowed in (
        {},
        dict(dtype=torch.float16),
        dict(is_causal=True),
        dict(window=(-1, 3)),
        dict(key_lengths=torch.ones(3)),
        dict(sinks=torch.ones(2)),
        dict(dropout_p=0.1),
        dict(attn_mask=rows),
        dict(d=128),
        dict(d=40),
    ):
        assert may(**allowed), allowed
    for refused in (
        dict(arch="sm_100"),
        dict(arch="interpreter"),
        dict(dtype=torch.float32),
        dict(attn_mask=full),
        dict(attn_mask=rows, dropout_p=0.1),
        dict(bias=torch.zeros(3, 1, 8, 8)),
        dict(alibi_slopes=torch.ones(2)),
        dict(softcap=1.0),
        dict(window=(3, -1)),
        dict(scale=-0.1),
        dict(d=20),
        dict(d=136),
        dict(shift=4),
    ):
        assert not may(**refused), refused


# The calls that show planted faults: of six tiles, of seven with edges, with a mask, and with one
# sequence without keys.
SHOWN = {
    "plain": (dict(sk=330), {}),
    "causal": (dict(sq=400, sk=400, b=1), dict(is_causal=True)),
    "mask": (dict(), dict(attn_mask=MASK)),
    "lengths": (dict(), dict(key_lengths=LENGTHS)),
}


@functools.cache
def shown(call):
    """A call, with NaN in what no query may see, and its output and lse in float64."""
    sizes, options = SHOWN[call]
    x = qkv(**sizes, dtype=torch.float16)
    with use_backend("reference"):
        wide = {name: t.double() for name, t in x.items()}
        want = functional.scaled_dot_product_attention(
            **wide, **options, enable_gqa=True, return_lse=True
        )
    hidden = {"mask": ~MASK[:, 0, 0], "lengths": torch.arange(200) >= LENGTHS[:, None]}.get(call)
    if hidden is not None:
        for name in ("key", "value"):
            x[name] = x[name].masked_fill(hidden[:, None, :, None], float("nan"))
    return x, options, want


def what_is_found(call, *edits, slots, seed):
    """What the simulator says of a call, or how wrong its result is; nothing where it is right."""
    x, options, want = shown(call)
    try:
        with simulated(*edits, slots=slots, seed=seed):
            have = functional.scaled_dot_product_attention(
                **x, **options, enable_gqa=True, return_lse=True
            )
    except Fault as fault:
        return str(fault)
    for a, b, bound in zip(have, want, (1e-2, 1e-4)):
        a, b = (t.double().masked_fill(t == -torch.inf, 0.0) for t in (a, b))
        if not (error := (a - b).abs().max()) < bound:
            return f"wrong by {error:.1e}"
    return ""


@pytest.mark.parametrize("bug", [None, *FAULTS])
def test_planted_faults(bug):
    """Whatever the schedule, a fault is found with rings of two or of three slots."""
    for seed in range(2):
        if bug is None:
            assert not any(
                what_is_found(call, slots=slots, seed=seed) for call in SHOWN for slots in (2, 3)
            )
            continue
        *edit, call = FAULTS[bug]
        found = [what_is_found(call, tuple(edit), slots=slots, seed=seed) for slots in (2, 3)]
        assert any(found) != (bug in HARMLESS), found


def test_what_the_simulator_says():
    """In words that name the memory and the line."""
    for bug, words in {
        "no wait for the values": ("race: the wgmma of consumer", "reads v_tiles[", "TMA load"),
        "no turn": ("deadlock: consumer", "waits for turn["),
        "one release of the keys": ("race: ", "k_tiles["),
        "no fence before the store": ("TMA store of consumer", "without a fence"),
        "no wait for the store": ("a TMA store may still read",),
        "no wait for the output of the last tile": (
            "uses the result of the wgmma",
            "before a wait",
        ),
    }.items():
        *edit, call = FAULTS[bug]
        said = what_is_found(call, tuple(edit), slots=2, seed=0)
        assert all(word in said for word in words), said
    with pytest.raises(ValueError, match="has 'no such text' 0 times"):
        what_is_found("plain", ("_copies", "no such text", ""), slots=2, seed=0)
    with pytest.raises(ValueError, match="no function of the kernel is named _nobody"):
        what_is_found("plain", ("_nobody", "a", "b"), slots=2, seed=0)
