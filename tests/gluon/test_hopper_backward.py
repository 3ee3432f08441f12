"""The backward for Hopper, in the simulator of Gluon kernels: its results, and that planted faults
are found.
"""

import functools

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import hopper_calls
from fastformer.kernels import common, tuned
from fastformer.kernels.attention import gluon, launchers, plan
from fastformer.kernels.attention.gluon.rows import ROWS
from hopper_calls import (
    DROPOUT,
    LENGTHS,
    MASK,
    ONE_HIDDEN,
    blocks,
    inputs,
    replaced,
    simulated,
    simulated_backward,
    stores,
)

import fastformer as ff
from benchmarks.proof import gluon_simulator
from benchmarks.proof.gluon_simulator import Fault
from fastformer import use_backend
from fastformer.description import Attention, pack
from fastformer.ops import functional

if not gluon.KERNELS or not common.INTERPRETED:
    pytest.skip("needs Gluon, and Triton's interpreter", allow_module_level=True)


def qkv(bias=None, dtype=torch.bfloat16, **sizes):
    """Scaled scores with a standard deviation of 2, and a bias whose gradient is asked for."""
    x = inputs(**sizes, dtype=dtype, spread=2)
    return x if bias is None else x | {"bias": bias.to(dtype)}


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spans(sq, sk, width, step):
    """A mask of queries and keys: each query sees `width` keys, the last one `step` further."""
    begin = torch.linspace(0, step, sq).long()[:, None]
    return (torch.arange(sk) >= begin) & (torch.arange(sk) < begin + width)


OF_HEADS = torch.rand(2, 2, 1, 200, generator=torch.Generator().manual_seed(1)) < 0.7
SLOPES = torch.tensor([0.5, 0.01])
FULL = drawn(2, 1, 130, 208, seed=2) < 0.5
FULL[1, :, :, 64:128] = FULL[0, :, 7] = False  # a whole tile, and a query that sees no key
FULL_OF_HEADS = drawn(2, 2, 130, 208, seed=3) < 0.5
# Each query sees 200 keys of 464, and the second head another 200; the first ones see no tile of
# the last keys, and no query those at the end.
SPANS = torch.stack([spans(140, 440, 200, step) for step in (240, 30)])[None]
SPANS = torch.nn.functional.pad(SPANS, (0, 24))
LONG_SPANS = torch.stack([spans(300, 464, 200, step) for step in (264, 30)])[None]
HOLES = torch.ones(2, 1, 1, 448) > 0
HOLES[0, ..., 10:20] = HOLES[0, ..., 430:436] = HOLES[0, ..., 440:] = HOLES[1, ..., 250:] = False
BLOCKS = ff.block_mask(blocks(300, 500))
HIDING = drawn(1, 2, 1, 200, seed=4)
HIDING[:, 0, :, 20:90] = HIDING[:, 1, :, 60:140] = -torch.inf
CALLS = {
    **hopper_calls.CALLS,
    "window": (dict(sq=200), dict(window=(50, 20))),
    "window to the left, dropout": (dict(sk=330), dict(window=(40, None), **DROPOUT)),
    "window, bottom-right, lengths": (
        dict(sq=150, h=4, g=2),
        dict(window=(30, 70), causal_alignment="bottom_right", key_lengths=LENGTHS + 60),
    ),
    "mask of heads, causal": (dict(g=2), dict(attn_mask=OF_HEADS, is_causal=True)),
    "softcap": (dict(), dict(softcap=3.0, key_lengths=LENGTHS + 60)),
    "softcap, mask, causal, dropout": (
        dict(),
        dict(softcap=3.0, attn_mask=MASK, is_causal=True, **DROPOUT),
    ),
    "alibi, causal": (dict(sq=150), dict(alibi_slopes=SLOPES, is_causal=True)),
    "alibi, mask, bottom-right, dropout": (
        dict(sq=70),
        dict(alibi_slopes=SLOPES, attn_mask=MASK, causal_alignment="bottom_right", **DROPOUT),
    ),
    "alibi, softcap, window": (
        dict(sq=150),
        dict(alibi_slopes=SLOPES, softcap=3.0, window=(60, 20), causal_alignment="bottom_right"),
    ),
    "dropout, mask, causal, lengths": (
        dict(g=2),
        dict(attn_mask=MASK, is_causal=True, key_lengths=LENGTHS + 100, **DROPOUT),
    ),
    "2-D mask": (dict(sk=208), dict(attn_mask=FULL)),
    "2-D mask of heads, causal, lengths": (
        dict(sk=208),
        dict(attn_mask=FULL_OF_HEADS, is_causal=True, key_lengths=LENGTHS + 100),
    ),
    "2-D mask, window, softcap, dropout": (
        dict(sk=208),
        dict(attn_mask=FULL, window=(60, 20), softcap=3.0, **DROPOUT),
    ),
    "bias": (dict(bias=drawn(200, seed=5)), dict(key_lengths=LENGTHS)),
    "bias that hides keys, causal": (dict(), dict(bias=HIDING, is_causal=True)),
    "bias, mask, softcap, alibi, dropout": (
        dict(h=4, g=2, bias=drawn(1, 4, 1, 200, seed=6)),
        dict(attn_mask=MASK, softcap=3.0, alibi_slopes=drawn(4, seed=7).abs() / 9, **DROPOUT),
    ),
    "2-D bias": (dict(sk=208, bias=drawn(2, 130, 208, seed=8)), {}),
    "2-D fp32 bias, 2-D mask, causal, dropout": (
        dict(sk=208),
        dict(bias=drawn(130, 208, seed=9), attn_mask=FULL, is_causal=True, **DROPOUT),
    ),
    "2-D bias, mask, alibi, softcap": (
        dict(sk=208, bias=drawn(2, 2, 130, 208, seed=10)),
        dict(attn_mask=drawn(2, 1, 1, 208, seed=11) < 0.5, alibi_slopes=SLOPES, softcap=3.0),
    ),
    "2-D bias of its own, causal, lengths": (
        dict(sk=208, bias=drawn(2, 2, 130, 208, seed=20)),
        dict(is_causal=True, key_lengths=torch.tensor([70, 110])),
    ),
    "2-D bias, 2-D mask, window, lengths, dropout": (
        dict(sk=208, b=1, bias=drawn(2, 130, 208, seed=15)),
        dict(attn_mask=FULL[1:], window=(70, 9), key_lengths=LENGTHS[1:] + 40, **DROPOUT),
    ),
    "bias, 2-D mask": (dict(sk=208, bias=drawn(2, 1, 1, 208, seed=12)), dict(attn_mask=FULL)),
    "2-D mask of heads, bounds": (dict(sq=140, sk=464), dict(attn_mask=SPANS)),
    "2-D mask, causal, lengths, dropout, bounds": (
        dict(sq=300, sk=304, b=1, h=1),
        dict(
            attn_mask=spans(300, 304, 200, 60),
            is_causal=True,
            key_lengths=LENGTHS[1:] + 200,
            **DROPOUT,
        ),
    ),
    "2-D mask, window, softcap, bounds": (
        dict(sq=140, sk=464, b=1),
        dict(attn_mask=SPANS[:, :1], window=(300, 250), softcap=3.0),
    ),
    "2-D mask of numbers, bounds": (
        dict(sq=140, sk=464, b=1),
        dict(bias=torch.zeros(140, 464).masked_fill(~SPANS[0, 0], -torch.inf)),
    ),
    "2-D mask, bias of its own, bounds": (
        dict(sq=140, sk=464, b=1, bias=drawn(1, 2, 140, 464, seed=18)),
        dict(attn_mask=SPANS[:, :1]),
    ),
    "mask, dropout, bounds": (dict(sq=70, sk=448), dict(attn_mask=HOLES, **DROPOUT)),
    "bias of 0 and -inf, causal, bounds": (
        dict(sk=448, sq=300, b=1),
        dict(bias=torch.zeros(448).masked_fill(~HOLES[1, 0, 0], -torch.inf), is_causal=True),
    ),
    "128 wide, 2-D mask, dropout, bounds": (
        dict(d=128, dv=128, b=1, h=1, sq=140, sk=464),
        dict(attn_mask=SPANS[0, 0], **DROPOUT),
    ),
    "block mask": (dict(sq=300, sk=500), dict(attn_mask=BLOCKS)),
    "block mask of all heads, dropout": (
        dict(sq=300, sk=500, b=1, h=4, g=2, d=32, dv=32),
        dict(attn_mask=BLOCKS[0, 0], **DROPOUT),
    ),
    "block mask, bias of its own, alibi, softcap": (
        dict(sq=300, sk=504, b=1, bias=drawn(1, 2, 300, 504, seed=22)),
        dict(
            attn_mask=ff.block_mask(blocks(300, 504)[:1]),
            alibi_slopes=SLOPES,
            softcap=5.0,
        ),
    ),
    "block mask, causal, lengths, dropout": (
        dict(sq=300, sk=500, d=32, dv=32),
        dict(attn_mask=BLOCKS, is_causal=True, key_lengths=LENGTHS + 300, **DROPOUT),
    ),
    "block mask, window, softcap": (
        dict(sq=300, sk=500, b=1),
        dict(attn_mask=BLOCKS[0], window=(190, 130), softcap=3.0),
    ),
    "block mask, bias, dropout": (
        dict(sq=300, sk=500, b=1, bias=drawn(500, seed=23)),
        dict(attn_mask=BLOCKS[0], **DROPOUT),
    ),
    "128 wide, block mask, dropout": (
        dict(sq=140, sk=200, d=128, dv=128),
        dict(attn_mask=ff.block_mask(blocks(140, 200)), **DROPOUT),
    ),
    "other dims": (dict(d=80, dv=24, h=4, g=2, b=1), dict(is_causal=True)),
    "128 wide": (dict(d=128, dv=128, b=1), dict(is_causal=True, **DROPOUT)),
    "128 wide, 2-D mask, 2-D bias": (
        dict(d=128, dv=128, b=1, sk=208, bias=drawn(2, 130, 208, seed=16)),
        dict(attn_mask=FULL[1:], is_causal=True, **DROPOUT),
    ),
    "256 wide, mask": (
        dict(d=256, dv=200, b=1, sq=70, sk=140),
        dict(attn_mask=MASK[1:, ..., 20:160], is_causal=True, **DROPOUT),
    ),
}


def attend(**given):
    return functional.scaled_dot_product_attention(**given, enable_gqa=True)


@pytest.fixture
def memory_of_nan():
    """Let memory that nobody has written hold NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.sample
@pytest.mark.parametrize("call", list(CALLS))
def test_backward(against_oracle, memory_of_nan, call):
    """In float16 and bfloat16 by turns, and of memory [B, S, H, D]."""
    sizes, options = CALLS[call]
    number = list(CALLS).index(call)
    x = qkv(**sizes, dtype=(torch.float16, torch.bfloat16)[number % 2])
    if number % 3 == 0:
        for name in ("query", "key", "value"):
            x[name] = x[name].transpose(1, 2).contiguous().transpose(1, 2)
    tiles = dict(columns=128, slots=3) if call in ("mask", "2-D bias") else {}
    tiles |= {
        "128 wide": dict(columns=128),
        "128 wide, 2-D mask, 2-D bias": dict(rows=32),
        "256 wide, mask": dict(columns=32, kernels=("dq",)),
    }.get(call, {})
    if "block mask" in call:
        tiles |= dict(keys=64, rows=32 if "128 wide" in call else 64)
    with simulated_backward(**tiles, bounds="bounds" in call) as launched:
        against_oracle(lambda **given: attend(**given, **options), x)
    assert len(launched) == 2 - ("256 wide" in call)
    assert {bool(x["has"].bounds.value) for x in launched} == {"bounds" in call}


def gradients(x, grad_output, **options):
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    output = attend(**leaves, **options)
    return torch.autograd.grad(output, list(leaves.values()), grad_output)


@pytest.mark.parametrize("options", [{}, dict(is_causal=True, **DROPOUT)], ids=["plain", "dropout"])
def test_the_same_bits_from_run_to_run(options):
    x = qkv(b=1)
    given = x, torch.randn_like(x["query"])
    found = []
    for seed in range(2):  # of the schedule
        with simulated_backward(seed=seed):
            found.append(gradients(*given, **options))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("by", ["mask", "bias"])
def test_what_no_query_may_see_reaches_nothing(by, bad):
    x = qkv(bias=None if by == "mask" else torch.zeros(MASK.shape).masked_fill(~MASK, -torch.inf))
    hidden = ~MASK[:, 0, 0] | (torch.arange(200) >= 150)
    options = dict(attn_mask=MASK) if by == "mask" else {}
    options["key_lengths"] = torch.tensor([150, 150])
    given = torch.randn_like(x["query"])
    with simulated_backward():
        before = gradients(x, given, **options)
        for name in ("key", "value"):
            x[name] = x[name].masked_fill(hidden[:, None, :, None], bad)
        after = gradients(x, given, **options)
    assert all(map(torch.equal, before, after)) and all(t.isfinite().all() for t in after)
    assert not after[1].mT[hidden[:, None, None].expand(2, 1, 64, 200)].any()
    assert by == "mask" or not after[3][hidden[:, None, None]].any()


@pytest.mark.parametrize("by", ["length", "mask"])
def test_nothing_is_set_to_zero_behind_the_last_key(by):
    """As in test_hopper.py: dQ of padded keys that hold NaN, which nothing sets to zero."""
    x, lengths = qkv(sq=70), torch.tensor([150, 70])
    seen = (torch.arange(200) < lengths[:, None])[:, None, None]
    options = dict(attn_mask=seen)
    if by == "length":
        options = dict(attn_mask=torch.ones_like(seen), key_lengths=lengths)
    given = torch.randn_like(x["query"])
    with use_backend("triton"):
        want = gradients(x, given, **options)
    for name in ("key", "value"):
        x[name] = x[name].masked_fill(~seen.mT, float("nan"))
    arguments = {name: t.detach().requires_grad_() for name, t in x.items()}
    with stores() as stored, simulated_backward(kernels=("dq",), bounds=by == "mask"):
        output = attend(**arguments, **options)
        have = torch.autograd.grad(output, list(arguments.values()), given)
    assert not {"k_tiles", "value"} & stored
    with stores() as zeroed:
        what_is_found("dq", "mask", slots=2)  # which hides keys before the last one
    assert {"k_tiles", "value"} <= zeroed
    for a, b in zip(have, want):
        assert (a - b).abs().max() < 2e-2 * b.abs().max()


@pytest.mark.parametrize("options", [dict(attn_mask=MASK[1:]), DROPOUT], ids=["mask", "dropout"])
@pytest.mark.parametrize("where", ["key", "value", "gradient"])
def test_nan_that_a_query_sees_is_kept(options, where):
    """It reaches what it reaches in the other kernels. The gradients of masked keys stay zero."""
    x = qkv(sq=70, sk=200, b=1)
    given = torch.randn_like(x["query"])
    {**x, "gradient": given}[where][:, :, 3, 5] = float("nan")
    assert bool(MASK[1, 0, 0, 3])
    with use_backend("triton"):
        theirs = gradients(x, given, **options)
    with simulated_backward():
        ours = gradients(x, given, **options)
    seen = MASK[1, 0, 0] if "attn_mask" in options else slice(None)
    ours, theirs = ([dq, dk[:, :, seen], dv[:, :, seen]] for dq, dk, dv in (ours, theirs))
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(ours, theirs))
    assert any(t.isnan().any() for t in ours)


def test_explain_says_why_a_call_does_not_take_it():
    x = torch.empty(1, 2, 640, 64).half()
    given = dict(attn_mask=None, dropout_p=0.0, is_causal=False, scale=0.1)
    why = "not the backward for Hopper: heads that share keys have masks of their own"
    masks = dict(attn_mask=torch.ones(1, 2, 1, 640) > 0)
    for arch, options, gradient, words in (
        ("sm_90", {}, True, None),
        ("sm_90", masks, True, why),
        ("sm_90", masks | dict(bias=torch.zeros(640)), True, None),
        ("sm_90", masks, False, None),
        ("sm_80", masks, True, None),
    ):
        call, query = Attention(**given | options), x.clone().requires_grad_(gradient)
        with replaced(plan, architecture=lambda device, arch=arch: arch):
            found = launchers.describe(query, x[:, :1], x[:, :1], call)
            assert (found or "").removeprefix("the mask is bounded, ") == (words or "")
    wide = torch.empty(1, 2, 640, 256).half().requires_grad_()
    with replaced(plan, architecture=lambda device: "sm_90"):
        for options, name in ({}, "dK and dV"), (dict(softcap=1.0, **masks), "dQ and dK and dV"):
            found = launchers.describe(wide, wide, wide, Attention(**given | options))
            why = "head dim and options take more registers or shared memory than there are"
            assert found == f"not {name} for Hopper: {why}"


def test_which_calls_a_measurement_may_choose_it_for():
    """Those that it computes, on sm_90 alone; without a measurement no call takes it."""

    def may(arch="sm_90", dtype=torch.bfloat16, d=64, shift=0, g=2, expanded=False, **options):
        flat = torch.empty(4 * 2 * 8 * d, dtype=dtype)[shift:]
        x = flat[: 3 * 2 * 8 * d].view(3, 2, 8, d)
        query = x[:, :1].expand(3, 2, 8, d) if expanded else x
        given = dict(attn_mask=None, dropout_p=0.0, is_causal=False, scale=0.1) | options
        needs = True, True, True, False, False
        ways = {plan.SHORT_KEY: plan.SEPARATE}
        with replaced(plan, architecture=lambda device: arch), tuned.forced(ways) as asked:
            described = Attention(**given)
            made = plan.BackwardPlan(x, None, x, needs, query, x[:, :g], x[:, :g], described)
        taken = made.gluon.obstacle is None
        for name in ("dq", "dkdv"):
            assert made.launch[name]._kernel is not gluon.KERNELS[name]
            (key,) = (key for key in asked if key.kernel == f"attention {name}")
            assert key.case.endswith("TMA") == taken
            found = ROWS[name].keys() & {*key.options()}
            assert bool(found) == (taken and (name == "dq" or d <= 128))
            assert (found == {"Gluon 128 32"}) == (taken and name == "dq" and d > 128)
        return taken

    rows, full = torch.ones(3, 1, 1, 8) > 0, (torch.ones(3, 1, 8, 16) > 0)[..., :8]
    of_heads = torch.ones(3, 2, 1, 8) > 0
    for allowed in (
        {},
        dict(dtype=torch.float16),
        dict(is_causal=True),
        dict(window=(-1, 3)),
        dict(window=(3, -1)),
        dict(key_lengths=torch.ones(3)),
        dict(sinks=torch.ones(2)),
        dict(alibi_slopes=torch.ones(2), scale=-0.1),
        dict(softcap=1.0),
        dict(dropout_p=0.1),
        dict(attn_mask=rows, dropout_p=0.1),
        dict(attn_mask=rows, g=1),
        dict(attn_mask=of_heads),
        dict(attn_mask=of_heads, bias=torch.zeros(8), g=1),
        dict(attn_mask=full, bias=torch.zeros(3, 2, 8, 8), dropout_p=0.1, d=128),
        dict(bias=torch.zeros(8, 8), is_causal=True),
        dict(alibi_slopes=torch.ones(2), softcap=1.0, d=72),
        dict(expanded=True),
        dict(d=128),
        dict(d=40),
        dict(d=136, dropout_p=0.1),
        dict(d=256, is_causal=True),
    ):
        assert may(**allowed), allowed
    for refused in (
        dict(arch="sm_100"),
        dict(arch="interpreter"),
        dict(dtype=torch.float32),
        dict(attn_mask=full.contiguous()),
        dict(attn_mask=of_heads, g=1),
        dict(expanded=True, g=1),
        dict(bias=torch.zeros(8, 10)[:, :8]),
        dict(scale=-0.1),
        dict(d=20),
        dict(d=264),
        dict(shift=4),
    ):
        assert not may(**refused), refused


# The calls that show planted faults: of five tiles of queries and six of keys, of seven with edges,
# with a mask, also of keys whose weights are exp(24) before the softmax divides them, of rows that
# are wider, and of one key alone; with one sequence without keys, with dropout, with what else
# there is, with the bounds of a mask, and with a block mask of each head.
SHOWN = {
    "plain": (dict(sq=300, sk=330, b=1), {}),
    "causal": (dict(sq=400, sk=400, b=1), dict(is_causal=True)),
    "mask": (dict(), dict(attn_mask=MASK)),
    "mask, low scores": (dict(sq=70), dict(attn_mask=MASK)),
    "mask, 128 wide": (dict(sq=70, d=128, dv=128), dict(attn_mask=MASK)),
    "mask, wide values": (dict(sq=70, d=32, dv=128), dict(attn_mask=MASK)),
    "mask of one key": (dict(sq=70, sk=128, b=1), dict(attn_mask=ONE_HIDDEN)),
    "lengths": (dict(), dict(key_lengths=LENGTHS)),
    "dropout": (dict(sq=70, sk=70, b=1), dict(is_causal=True, **DROPOUT)),
    "window": (
        dict(sq=200, sk=330, b=1),
        dict(
            window=(100, 40),
            causal_alignment="bottom_right",
            alibi_slopes=SLOPES,
            softcap=3.0,
        ),
    ),
    "2-D mask, 2-D bias": (
        dict(sk=208, bias=drawn(2, 1, 130, 208, seed=13)),
        dict(attn_mask=FULL_OF_HEADS),
    ),
    "bias": (dict(bias=HIDING + drawn(1, 2, 1, 1, seed=14)), dict(softcap=3.0)),
    "own bias": (
        dict(sq=70, sk=200, b=1, bias=drawn(2, 70, 200, seed=17)),
        dict(softcap=3.0, window=(60, 20)),
    ),
    "own bias, causal": (
        dict(sq=130, sk=200, bias=drawn(2, 2, 130, 200, seed=21)),
        dict(is_causal=True, key_lengths=torch.tensor([3, 110])),
    ),
    "own bias, spans": (
        dict(sq=300, sk=464, b=1, bias=drawn(2, 300, 464, seed=22)),
        dict(attn_mask=LONG_SPANS),
    ),
    "spans": (dict(sq=300, sk=464, b=1), dict(attn_mask=LONG_SPANS)),
    "holes": (dict(sk=448), dict(attn_mask=HOLES)),
    "one loop": (
        dict(sq=300, sk=464, b=1),
        dict(attn_mask=LONG_SPANS, window=(300, 250)),
    ),
    "blocks": (
        dict(sq=300, sk=440, b=1, h=4, g=2),
        dict(attn_mask=ff.block_mask(blocks(300, 440).view(1, 4, 300, 440))),
    ),
    "blocks, window": (dict(sq=300, sk=500, b=1), dict(attn_mask=BLOCKS[1], window=(190, 130))),
    "blocks, causal": (dict(sq=300, sk=500, b=1), dict(attn_mask=BLOCKS[1], is_causal=True)),
}
BOUNDED = "own bias, spans", "spans", "holes", "one loop"


@functools.cache
def shown(call):
    """The arguments of a call's backward, with NaN in what no query may see, and its gradients in
    float64.
    """
    sizes, options = SHOWN[call]
    x = qkv(**sizes, dtype=torch.float16)
    if call == "mask, low scores":
        x["query"].fill_(2.0)
        x["key"] -= 1.5
    grad_output = torch.randn(*x["query"].shape[:3], x["value"].shape[3]).half()
    with use_backend("reference"):
        wide = {name: t.double() for name, t in x.items()}
        want = gradients(wide, grad_output.double(), **options)
    hidden = {
        "mask": ~MASK[:, 0, 0],
        "mask, 128 wide": ~MASK[:, 0, 0],
        "mask, wide values": ~MASK[:, 0, 0],
        "mask of one key": ~ONE_HIDDEN[:, 0, 0],
        "holes": ~HOLES[:, 0, 0],
        "lengths": torch.arange(200) >= LENGTHS[:, None],
        "bias": HIDING.isneginf().all(1)[:, 0],
    }.get(call)
    if hidden is not None:
        for name in ("key", "value"):
            x[name] = x[name].masked_fill(hidden[:, None, :, None], float("nan"))
    *inputs, bias = x["query"], x["key"], x["value"], x.get("bias")
    seed = options.get("dropout_seed")
    scale = x["query"].shape[3] ** -0.5
    given = dict(attn_mask=None, dropout_p=0.0, is_causal=False, scale=scale) | options
    given["dropout_seed"] = None if seed is None else torch.tensor([seed])
    if isinstance(mask := given["attn_mask"], ff.BlockMask):
        names = "attn_mask", "mask_spans", "mask_lists", "mask_bits"
        given |= dict(zip(names, (None, *mask.tensors)))
    arguments = pack([*inputs, Attention(**given, bias=bias)])
    saved = launchers.forward(*arguments, False)
    return (grad_output, None, *arguments, *saved), want


def what_is_found(kernel, call, slots):
    """What the simulator says of a kernel in a call, or how wrong its result is; nothing where it
    is right.
    """
    arguments, want = shown(call)
    learned = "own bias" in call if kernel == "dq" else call == "bias"
    needs = (True, False, False, learned) if kernel == "dq" else (False, True, True, learned)
    try:
        how = dict(slots=slots, bounds=call in BOUNDED)
        how |= dict(keys=64) if "blocks" in call else {}
        with torch.no_grad(), simulated_backward(kernels=(kernel,), **how):
            have = launchers.backward(*arguments, [*needs, False])
    except Fault as fault:
        return str(fault)
    for a, b, needed in zip(have, want, needs):
        if needed and not (error := (a.double() - b).abs().max() / b.abs().max()) < 1e-2:
            return f"wrong by {error:.1e}"
    return ""


@pytest.mark.all_cases
@pytest.mark.parametrize("slots", [pytest.param(2, marks=pytest.mark.with_all), 3])
@pytest.mark.parametrize("kernel", ["dq", "dkdv"])
@pytest.mark.parametrize("call", SHOWN)
def test_rings_of_slots(call, kernel, slots):
    assert what_is_found(kernel, call, slots) == ""


@pytest.mark.parametrize("kind", ["tensor", "block mask"])
def test_holes_are_skipped(kind, monkeypatch):
    """The tiles that are copied are those that hold a seen key, in the forward and the backward."""
    tiles = torch.rand(4, 12, generator=torch.Generator().manual_seed(3)) < 0.4
    mask = tiles.repeat_interleave(128, 0).repeat_interleave(64, 1)
    mask[:, 130] = mask[3, 64:256] = False
    copied, load = [], gluon_simulator.Load.__init__

    def count(self, source, at, bar, target):
        copied.append(target.cells[0].name.partition("[")[0])
        load(self, source, at, bar, target)

    def seen(rows, columns):
        return int(mask.view(512 // rows, rows, 768 // columns, columns).any(3).any(1).sum())

    monkeypatch.setattr(gluon_simulator.Load, "__init__", count)
    x = {name: t.requires_grad_() for name, t in qkv(sq=512, sk=768, b=1, h=1, d=16, dv=16).items()}
    given, how = dict(attn_mask=mask), dict(bounds=True)
    with simulated(**how if kind == "tensor" else {}):
        if kind == "block mask":
            given, how = dict(attn_mask=ff.block_mask(mask)), dict(keys=64)
        attend(**x, **given)
        assert copied.count("k_tiles") == seen(128, 64)
    for kernels, name, expected in (
        (("dq",), "k_tiles", seen(128, 64)),
        (("dkdv",), "query", seen(64, 128) if kind == "tensor" else 2 * seen(128, 64)),
    ):
        with simulated_backward(kernels=kernels, **how):
            output = attend(**x, **given)
            copied.clear()
            torch.autograd.grad(output.sum(), x["query"] if "dq" in kernels else x["key"])
        assert copied.count(name) == expected, kernels
