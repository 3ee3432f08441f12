"""Which calls the kernels for Hopper may take. The forward in the simulator of Gluon kernels: its
results, and that what the simulator is there to find is found.
"""

import contextlib
import functools
import weakref
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import hopper_calls
from fastformer.kernels import common, tuned
from fastformer.kernels.attention import gluon, launchers, plan
from fastformer.kernels.attention.gluon.rows import ROWS, ring_tile
from fastformer.kernels.launch import MappedLaunch
from hopper_calls import (
    DROPOUT,
    LENGTHS,
    MASK,
    ONE_HIDDEN,
    blocks,
    drawn,
    hidden_keys,
    hiding,
    replaced,
    simulated,
    sizes_and_options,
    spans,
    stores,
)
from hopper_calls import inputs as qkv

import fastformer as ff
from benchmarks.proof.gluon_simulator import Fault
from fastformer import current_backend, use_backend
from fastformer.description import Attention
from fastformer.ops import functional

if not gluon.KERNELS or not common.INTERPRETED:
    pytest.skip("needs Gluon, and Triton's interpreter", allow_module_level=True)


def ragged(*shape):
    """A mask that hides 30% of the keys, and of the first sequence a whole tile."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(0)) < 0.7
    mask[0, ..., 64:128] = False
    return mask


HOLES = torch.ones(2, 1, 1, 448) > 0
HOLES[0, ..., 10:20] = HOLES[0, ..., 430:436] = HOLES[0, ..., 440:] = HOLES[1, ..., 400:] = False
HIDING = drawn(2, 1, 1, 200).masked_fill(~MASK, -torch.inf)
WINDOW = dict(window=(190, 30), causal_alignment="bottom_right")  # cuts tiles on both sides
SLOPES = torch.tensor([0.5, 0.03])
TERMS = dict(alibi_slopes=SLOPES, softcap=5.0)
SINKS = torch.tensor([0.5, -2.0])
FULL = ragged(2, 1, 130, 208)
SPANS = spans(140, 464, 240, 224)[None]  # the ends of the tiles are cut


SEVENTHS = drawn(500).masked_fill(torch.arange(500) % 7 == 0, -torch.inf)
BLOCKS = ff.block_mask(blocks(300, 500))
WIDER_BLOCKS = ff.block_mask(blocks(300, 504)[:1])  # rows of a bias begin at multiples of 16 bytes
ONLY_FEW = torch.cat([torch.zeros(1, 140, 464), torch.ones(1, 140, 464).tril(-130)]) > 0
CALLS = {
    **hopper_calls.CALLS,
    "mask, causal, lengths": dict(attn_mask=MASK, is_causal=True, key_lengths=LENGTHS + 100),
    "dropout, mask, causal": dict(attn_mask=MASK, is_causal=True, **DROPOUT),
    "a window": dict(sq=140, sk=450, **WINDOW),
    "a bound to the left": dict(sq=140, sk=450, window=(70, None)),
    "a window, bottom-right, lengths": dict(
        sq=140, sk=450, window=(150, 0), causal_alignment="bottom_right", key_lengths=LENGTHS + 250
    ),
    "a window without keys": dict(sq=200, sk=40, window=(20, 5)),
    "a window, dropout": dict(sq=140, sk=450, **WINDOW, **DROPOUT),
    "softcap": dict(softcap=5.0, sinks=SINKS),
    "softcap, causal, mask": dict(softcap=5.0, is_causal=True, attn_mask=MASK),
    "softcap of a negative scale": dict(softcap=5.0, scale=-0.1),
    "alibi": dict(alibi_slopes=SLOPES, key_lengths=LENGTHS),
    "alibi, window, sinks": dict(
        sq=140, sk=450, alibi_slopes=SLOPES, **WINDOW, sinks=torch.tensor([0.5, -torch.inf])
    ),
    "alibi, softcap, mask of a negative scale": dict(attn_mask=MASK, scale=-0.1, **TERMS),
    "mask, dropout, bounds": dict(attn_mask=MASK, **DROPOUT),
    "mask, lengths, bounds": dict(attn_mask=ragged(2, 1, 1, 448), key_lengths=LENGTHS + 250),
    "2-D mask": dict(attn_mask=FULL),
    "2-D mask, causal, lengths": dict(attn_mask=FULL, is_causal=True, key_lengths=LENGTHS + 100),
    "2-D mask, dropout, bounds": dict(attn_mask=FULL, **DROPOUT),
    "2-D mask with a run, bounds": dict(attn_mask=SPANS),
    "2-D mask with a run, window, lengths, bounds": dict(
        attn_mask=SPANS, window=(300, 250), key_lengths=LENGTHS + 380
    ),
    "2-D mask that hides all, bounds": dict(attn_mask=ONLY_FEW[:, None], softcap=7.0),
    "2-D bias": dict(bias=drawn(2, 130, 208)),
    "2-D bias of float32, causal, softcap": dict(bias=drawn(130, 208), is_causal=True, softcap=5.0),
    "2-D bias, lengths, dropout, alibi": dict(
        bias=drawn(2, 1, 130, 208), key_lengths=LENGTHS, alibi_slopes=SLOPES, **DROPOUT
    ),
    "2-D bias, 2-D mask, bounds": dict(bias=drawn(2, 140, 464), attn_mask=SPANS),
    "2-D bias, mask": dict(bias=drawn(130, 208), attn_mask=ragged(2, 1, 1, 208)),
    "2-D mask of numbers, bounds": dict(
        bias=torch.zeros(140, 464).masked_fill(~SPANS[0], -torch.inf)
    ),
    "key bias": dict(bias=HIDING),
    "key bias of float32, lengths, softcap, a negative scale": dict(
        bias=HIDING[..., ::2].repeat(1, 1, 1, 2), key_lengths=LENGTHS, softcap=5.0, scale=-0.1
    ),
    "key bias, mask, alibi, dropout": dict(
        bias=HIDING, attn_mask=MASK, alibi_slopes=SLOPES, **DROPOUT
    ),
    "key bias, 2-D mask, bounds": dict(bias=drawn(1, 2, 1, 464), attn_mask=SPANS),
    "key bias of 0 and -inf, bounds": dict(
        bias=torch.zeros(2, 1, 1, 448).masked_fill(~HOLES, -torch.inf)
    ),
    "block mask": dict(d=32, attn_mask=BLOCKS),
    "block mask of all heads, dropout": dict(b=1, h=4, g=2, attn_mask=BLOCKS[0, 0], **DROPOUT),
    "block mask, bias, alibi, softcap": dict(
        b=1, attn_mask=WIDER_BLOCKS, bias=drawn(300, 504), **TERMS
    ),
    "block mask, causal, lengths": dict(
        attn_mask=BLOCKS, is_causal=True, key_lengths=LENGTHS + 300
    ),
    "block mask, window, lengths, dropout": dict(
        attn_mask=BLOCKS, window=(190, 130), key_lengths=LENGTHS + 400, **DROPOUT
    ),
    "block mask, key bias, sinks, dropout": dict(
        b=1, attn_mask=BLOCKS[0], bias=SEVENTHS, sinks=SINKS, **DROPOUT
    ),
    "block mask, 128 wide": dict(d=128, attn_mask=ff.block_mask(blocks(130, 70))),
    "256 wide": dict(d=256, b=1, is_causal=True),
    "other dims": dict(d=80, dv=24, is_causal=True),
    "128 wide": dict(d=128, b=1, **DROPOUT),
}


def attend(row=(), bounds=False, **given):
    """Output and lse in one tensor; on the backend triton in the simulator."""
    ours = current_backend() == "triton"
    with simulated(bounds=bounds, **dict(row)) if ours else contextlib.nullcontext([]) as launched:
        output, lse = functional.scaled_dot_product_attention(
            **given, enable_gqa=True, return_lse=True
        )
    assert [bool(x["has"].bounds.value) for x in launched] == [bounds] * ours
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    return torch.cat([output, lse.to(output.dtype)[..., None]], -1)


@pytest.mark.sample
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", list(CALLS))
def test_forward(against_oracle, call, dtype):
    sizes, options = sizes_and_options(CALLS[call])
    how = dict(bounds="bounds" in call)
    if call in ("mask", "128 wide"):
        how["row"] = dict(BN=128, stages=3)
    x = qkv(**sizes, dtype=dtype)
    if "bias" in options and "float32" not in call:
        x["bias"] = options["bias"].to(dtype)
        del options["bias"]
    with use_backend("triton"):
        against_oracle(lambda **x: attend(**x, **how, **options), x, gradients=False)


@pytest.mark.parametrize("call", ["one tile", "causal", "2-D mask with a run, bounds"])
@pytest.mark.parametrize("row", list(ROWS["forward"]))
def test_rows(against_oracle, row, call):
    (sizes, options), bounds = sizes_and_options(CALLS[call]), "bounds" in call
    x = qkv(**sizes, dtype=torch.float16)
    with use_backend("triton"):
        against_oracle(
            lambda **given: attend(ROWS["forward"][row]._asdict(), bounds, **given, **options),
            x,
            gradients=False,
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
@pytest.mark.parametrize("by", ["mask", "bias"])
def test_what_no_query_may_see_reaches_nothing(bad, by):
    x = qkv()
    hidden = ~MASK[:, 0, 0] | (torch.arange(200) >= 150)
    options = dict(attn_mask=MASK) if by == "mask" else dict(bias=HIDING)
    options["key_lengths"] = torch.tensor([150, 150])
    with simulated():
        before = functional.scaled_dot_product_attention(**x, **options, enable_gqa=True)
        x = hiding(x, hidden, bad)
        after = functional.scaled_dot_product_attention(**x, **options, enable_gqa=True)
    assert torch.equal(before, after) and after.isfinite().all()


def test_nan_that_a_query_sees_is_kept():
    x = qkv(b=1)
    x["key"][:, :, 3, 0] = float("nan")
    with simulated():
        output = functional.scaled_dot_product_attention(**x, attn_mask=MASK[1:], enable_gqa=True)
    assert bool(MASK[1, 0, 0, 3]) and output.isnan().all()


def test_which_calls_a_measurement_may_choose_it_for():
    """Those that the kernels compute, on sm_90 alone; without a measurement no call takes them."""

    def obstacles(
        arch="sm_90", dtype=torch.bfloat16, d=64, shift=0, g=2, expanded=False, **options
    ):
        """Why the forward and the backward do not take a call, or None where they do."""
        flat = torch.empty(4 * 2 * 8 * d, dtype=dtype)[shift:]
        x = flat[: 3 * 2 * 8 * d].view(3, 2, 8, d)
        query = x[:, :1].expand(3, 2, 8, d) if expanded else x
        given = dict(attn_mask=None, dropout_p=0.0, is_causal=False, scale=0.1) | options
        call = query, x[:, :g], x[:, :g], Attention(**given)
        needs, ways = (True, True, True, False, False), {plan.SHORT_KEY: plan.SEPARATE}
        with replaced(plan, architecture=lambda device: arch), tuned.forced(ways) as asked:
            plans = plan.ForwardPlan(*call), plan.BackwardPlan(x, None, x, needs, *call)
        for name, made in zip(("forward", "dq", "dkdv"), (plans[0], *plans[1:] * 2)):
            taken = made.gluon.obstacle is None
            assert made.launch[name].kernel is not gluon.KERNELS[name]
            (key,) = (key for key in asked if key.kernel == f"attention {name}")
            assert key.case.endswith("TMA") == taken
            found = ROWS[name].keys() & {*key.options()}
            assert bool(found) == (taken and (name != "dkdv" or d <= 128))
            assert (found == {"Gluon 128 32"}) == (taken and name == "dq" and d > 128)
        return [made.gluon.obstacle for made in plans]

    keys, of_heads = torch.ones(3, 1, 1, 8) > 0, torch.ones(3, 2, 1, 8) > 0
    full = (torch.ones(3, 1, 8, 16) > 0)[..., :8]
    for allowed in (
        {},
        dict(dtype=torch.float16, is_causal=True, key_lengths=torch.ones(3), sinks=torch.ones(2)),
        dict(window=(3, 3), d=40),
        dict(window=(-1, 3)),
        dict(window=(3, -1)),
        dict(alibi_slopes=torch.ones(2), scale=-0.1),
        dict(softcap=1.0, scale=-0.1),
        dict(attn_mask=keys, dropout_p=0.1),
        dict(attn_mask=keys, g=1),
        dict(attn_mask=of_heads),
        dict(attn_mask=of_heads, bias=torch.zeros(8), g=1),
        dict(attn_mask=full, bias=torch.zeros(3, 2, 8, 8), dropout_p=0.1, d=128),
        dict(bias=torch.ones(3, 1, 8, 8).bfloat16()),
        dict(bias=torch.zeros(8, 8), is_causal=True),
        dict(bias=torch.ones(3, 1, 1, 8)),
        dict(alibi_slopes=torch.ones(2), softcap=1.0, d=72),
        dict(expanded=True),
        dict(d=136, dropout_p=0.1),
        dict(d=256, is_causal=True),
    ):
        assert obstacles(**allowed) == [None, None], allowed
    for words, refused in (
        ("it is for sm_90", dict(arch="sm_100")),
        ("it is for sm_90", dict(arch="interpreter")),
        ("float16 and bfloat16", dict(dtype=torch.float32)),
        ("a mask of contiguous rows", dict(attn_mask=full.contiguous())),
        ("a bias of contiguous rows", dict(bias=torch.zeros(3, 1, 8, 9)[..., :8])),
        ("a bias of contiguous rows", dict(bias=torch.zeros(8, 10)[:, :8])),
        ("no scale of -0.1", dict(scale=-0.1)),
        ("multiples of 16 bytes", dict(d=20)),
        ("multiples of 16 bytes", dict(shift=4)),
        ("more registers than there are", dict(d=264)),
    ):
        forward, backward = obstacles(**refused)
        assert words in forward and backward, refused
    for by_the_backward in (dict(attn_mask=of_heads, g=1), dict(expanded=True, g=1)):
        forward, backward = obstacles(**by_the_backward)
        assert forward is None and backward, by_the_backward


def test_explain_says_why_a_call_does_not_take_it():
    x = torch.empty(1, 2, 640, 64).half()
    given = dict(attn_mask=None, dropout_p=0.0, is_causal=False, scale=0.1)
    masks, negative = dict(attn_mask=torch.ones(1, 2, 1, 640) > 0), dict(scale=-0.1)
    why = "not the backward for Hopper: heads that share keys have masks of their own"
    for arch, options, gradient, words in (
        ("sm_90", {}, True, None),
        ("sm_90", negative, False, "not the forward for Hopper: it takes no scale of -0.1"),
        ("sm_80", negative, False, None),
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


def test_which_rows_a_call_may_take():
    """Those that need no local memory in a loop, and fit into shared memory."""

    def rows(d=64, **options):
        x = torch.empty(2, 2, 64, d).half()
        given = dict(attn_mask=None, dropout_p=0.0, is_causal=True, scale=0.1) | options
        with replaced(plan, architecture=lambda device: "sm_90"):
            found = plan.ForwardPlan(x, x, x, Attention(**given)).gluon.options
        return {row.removeprefix("Gluon ") for row in found.get("forward", [])}

    mask = torch.ones(2, 1, 64, 64) > 0
    unpacked = {"128 128", "128 64"}
    assert rows() == rows(window=(9, 9)) == rows(128) == unpacked | {"128 128, packed"}
    assert rows(dropout_p=0.1) == unpacked == rows(128, dropout_p=0.1)
    assert rows(128, attn_mask=mask) == {"128 64", "128 128, packed"}
    assert rows(128, bias=torch.ones(64).half(), dropout_p=0.1) == {"128 64"}
    assert rows(256) == rows(128, attn_mask=mask, dropout_p=0.1) == {"128 64"}
    assert rows(256, attn_mask=mask) == set()


@pytest.mark.parametrize("call", ["plain", "mask", "lengths", "mask, dropout, bounds", "2-D mask"])
def test_who_makes_the_descriptors(call):
    """The host, if they serve all heads and do not end at the last key within bounds."""
    (sizes, options), bounds = sizes_and_options(CALLS[call]), "bounds" in call
    x = qkv(**sizes, dtype=torch.float16)
    with simulated(bounds=bounds) as launched:
        functional.scaled_dot_product_attention(**x, **options, enable_gqa=True)
    names = [name for name in launched[0] if name.endswith("_map")]
    made = [launched[0][name] for name in names]
    if call not in ("plain", "mask"):
        assert made == [None] * 4
        return
    assert names == ["query_map", "key_map", "value_map", "output_map"]
    for tensor, found in zip((*x.values(), x["query"]), made):
        assert (found.shape, found.strides) == ([*tensor.shape], [*tensor.stride()])


def test_a_launch_with_descriptors_keeps_no_tensor():
    """It would be that of the first call."""
    maps = [((0, None), functools.partial(gluon.map_of, rows=64, width=64))]
    launch = MappedLaunch(maps, SimpleNamespace(arg_names=["X", "x_map"]), (0,), {}, 4)
    x = torch.zeros(1, 1, 64, 64).half()
    alive = weakref.ref(x)
    launch(x)
    assert len(launch._made) == 1
    del x
    assert alive() is None


def test_how_much_shared_memory_a_row_takes():
    """The output has room of its own if it is not as wide as the queries. What is left holds one or
    two tiles of a mask and a bias of queries and keys.
    """
    bias, mask = torch.zeros(1, 2, 64, 64).half(), torch.ones(1, 2, 64, 64) > 0
    given = dict(dropout_p=0.0, is_causal=False, scale=0.1, bias=bias)
    for width, values, attn_mask, slots in (
        (64, 64, mask, 2),
        (128, 128, None, 2),
        (128, 128, mask, 1),
        (128, 64, mask, 1),
    ):
        query, value = (torch.empty(1, 2, 64, d).half() for d in (width, values))
        with replaced(plan, architecture=lambda device: "sm_90"):
            made = plan.ForwardPlan(query, query, value, Attention(attn_mask, **given))
        row = ROWS["forward"]["Gluon 128 128, packed"]
        assert ring_tile("forward", row, made, made.gluon.terms, False).term_slots == slots


@pytest.mark.parametrize("by", ["length", "mask"])
def test_nothing_is_set_to_zero_behind_the_last_key(by):
    """TMA reads as zeros the keys behind the length and, with the bounds of a mask, behind the last
    one that it leaves. So nothing sets values to zero.
    """
    x, lengths = qkv(sq=70, dtype=torch.float16), torch.tensor([150, 70])
    seen = torch.arange(200) < lengths[:, None]
    options = dict(attn_mask=seen[:, None, None])
    if by == "length":
        options = dict(attn_mask=options["attn_mask"] | True, bias=drawn(200), key_lengths=lengths)
    with use_backend("reference"):
        want = output_and_lse({name: t.double() for name, t in x.items()}, options)
    with stores() as stored, simulated(bounds=by == "mask"):
        have = output_and_lse(hiding(x, ~seen), options)
    assert "v_tiles" not in stored
    with stores() as stored:
        what_is_found("mask")  # which hides keys before the last one
    assert "v_tiles" in stored
    for a, b, bound in zip(have, want, (1e-2, 1e-4)):
        assert (a.double() - b).abs().max() < bound


# Calls that use all of the kernel, and how they are computed: of six tiles; of seven with edges;
# with a mask, also of wide rows, and of one key alone; with one sequence without keys; with edges
# on both sides; with masks of which only the edges are read; with a bias; and with a block mask of
# each head.
SHOWN = {
    "plain": dict(sk=330),
    "causal": dict(sq=400, sk=400, b=1, is_causal=True),
    "mask": dict(attn_mask=MASK),
    "mask, wide values": dict(sq=70, d=32, dv=128, attn_mask=MASK),
    "mask of one key": dict(sq=70, b=1, attn_mask=ONE_HIDDEN),
    "lengths": dict(key_lengths=LENGTHS),
    "window": dict(sq=140, sk=450, b=1, **WINDOW),
    "spans": dict(b=1, attn_mask=SPANS),
    "holes": dict(attn_mask=HOLES),
    "bias": dict(bias=drawn(130, 208)),
    "blocks": dict(b=1, h=4, g=2, attn_mask=ff.block_mask(blocks(300, 512).view(1, 4, 300, 512))),
    "blocks, window": dict(
        b=1, attn_mask=BLOCKS[1], window=(190, 130), key_lengths=torch.tensor([460])
    ),
}
BOUNDED = "spans", "holes"


def output_and_lse(x, options):
    return functional.scaled_dot_product_attention(**x, **options, enable_gqa=True, return_lse=True)


@functools.cache
def shown(call):
    """A call, with NaN in what no query may see, and its output and lse in float64."""
    sizes, options = sizes_and_options(SHOWN[call])
    x = qkv(**sizes, dtype=torch.float16)
    with use_backend("reference"):
        want = output_and_lse({name: t.double() for name, t in x.items()}, options)
    return hiding(x, hidden_keys(x, **options)), options, want


@pytest.mark.all_cases
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.with_slow)])
@pytest.mark.parametrize("slots", [pytest.param(2, marks=pytest.mark.with_all), 3])
@pytest.mark.parametrize("call", SHOWN)
def test_rings_of_slots(call, slots, seed):
    assert what_is_found(call, stages=slots, seed=seed) == ""


def what_is_found(call, **how):
    """What the simulator says of a call, or how wrong its result is; nothing where it is right."""
    x, options, want = shown(call)
    try:
        with torch.no_grad(), simulated(bounds=call in BOUNDED, **how):
            have = output_and_lse(x, options)
    except Fault as fault:
        return str(fault)
    for a, b, bound in zip(have, want, (1e-2, 1e-4)):
        a, b = (t.double().masked_fill(t == -torch.inf, 0.0) for t in (a, b))
        if not (error := (a - b).abs().max()) < bound:
            return f"wrong by {error:.1e}"
    return ""
