"""The backward for Hopper, in the simulator of Gluon kernels: its results, and that planted faults
are found.
"""

import functools

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import hopper_calls
from fastformer.kernels import common
from fastformer.kernels.attention import gluon, launchers
from hopper_calls import (
    DROPOUT,
    LENGTHS,
    MASK,
    ONE_HIDDEN,
    blocks,
    drawn,
    hidden_keys,
    hiding,
    inputs,
    simulated,
    simulated_backward,
    sizes_and_options,
    spans,
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


def qkv(learned=None, dtype=torch.bfloat16, **sizes):
    """Scaled scores with a standard deviation of 2, and a bias whose gradient is asked for."""
    x = inputs(**sizes, dtype=dtype, spread=2)
    return x if learned is None else x | {"bias": learned.to(dtype)}


OF_HEADS = torch.rand(2, 2, 1, 200, generator=torch.Generator().manual_seed(1)) < 0.7
CAUSAL_DROPOUT = dict(is_causal=True, **DROPOUT)
SLOPES = torch.tensor([0.5, 0.01])
TERMS = dict(alibi_slopes=SLOPES, softcap=3.0)
TERMS_OF_FOUR = dict(alibi_slopes=drawn(4, seed=7).abs() / 9, softcap=3.0)
KEYS = drawn(2, 1, 1, 208, seed=11) < 0.5
FULL = drawn(2, 1, 130, 208, seed=2) < 0.5
FULL[1, :, :, 64:128] = FULL[0, :, 7] = False  # a whole tile, and a query that sees no key
FULL_OF_HEADS = drawn(2, 2, 130, 208, seed=3) < 0.5
# Each query sees 200 keys of 464, and the second head another 200; the first ones see no tile of
# the last keys, and no query those at the end.
SPANS = torch.stack([spans(140, 440, 200, step) for step in (240, 30)])[None]
SPANS = torch.nn.functional.pad(SPANS, (0, 24))
ONE_SPAN = spans(300, 304, 200, 60)
LONG_SPANS = torch.stack([spans(300, 464, 200, step) for step in (264, 30)])[None]
HOLES = torch.ones(2, 1, 1, 448) > 0
HOLES[0, ..., 10:20] = HOLES[0, ..., 430:436] = HOLES[0, ..., 440:] = HOLES[1, ..., 250:] = False
BLOCKS = ff.block_mask(blocks(300, 500))
WIDER_BLOCKS = ff.block_mask(blocks(300, 504)[:1])  # rows of a bias begin at multiples of 16 bytes
HIDING = drawn(1, 2, 1, 200, seed=4)
HIDING[:, 0, :, 20:90] = HIDING[:, 1, :, 60:140] = -torch.inf
CALLS = {
    **hopper_calls.CALLS,
    "window": dict(sq=200, window=(50, 20)),
    "window to the left, dropout": dict(sk=330, window=(40, None), **DROPOUT),
    "window, bottom-right, lengths": dict(
        sq=150, h=4, g=2, window=(30, 70), causal_alignment="bottom_right", key_lengths=LENGTHS + 60
    ),
    "mask of heads, causal": dict(g=2, attn_mask=OF_HEADS, is_causal=True),
    "softcap": dict(softcap=3.0, key_lengths=LENGTHS + 60),
    "softcap, mask, causal, dropout": dict(softcap=3.0, attn_mask=MASK, **CAUSAL_DROPOUT),
    "alibi, causal": dict(sq=150, alibi_slopes=SLOPES, is_causal=True),
    "alibi, mask, bottom-right, dropout": dict(
        sq=70, alibi_slopes=SLOPES, attn_mask=MASK, causal_alignment="bottom_right", **DROPOUT
    ),
    "alibi, softcap, window": dict(
        sq=150, **TERMS, window=(60, 20), causal_alignment="bottom_right"
    ),
    "dropout, mask, causal, lengths": dict(
        g=2, attn_mask=MASK, is_causal=True, key_lengths=LENGTHS + 100, **DROPOUT
    ),
    "2-D mask": dict(attn_mask=FULL),
    "2-D mask of heads, causal, lengths": dict(
        attn_mask=FULL_OF_HEADS, is_causal=True, key_lengths=LENGTHS + 100
    ),
    "2-D mask, window, softcap, dropout": dict(
        attn_mask=FULL, window=(60, 20), softcap=3.0, **DROPOUT
    ),
    "bias": dict(learned=drawn(200, seed=5), key_lengths=LENGTHS),
    "bias that hides keys, causal": dict(bias=HIDING, is_causal=True),
    "bias, mask, softcap, alibi, dropout": dict(
        h=4, g=2, learned=drawn(1, 4, 1, 200, seed=6), attn_mask=MASK, **TERMS_OF_FOUR, **DROPOUT
    ),
    "2-D bias": dict(learned=drawn(2, 130, 208, seed=8)),
    "2-D fp32 bias, 2-D mask, causal, dropout": dict(
        bias=drawn(130, 208, seed=9), attn_mask=FULL, **CAUSAL_DROPOUT
    ),
    "2-D bias, mask, alibi, softcap": dict(
        learned=drawn(2, 2, 130, 208, seed=10), attn_mask=KEYS, **TERMS
    ),
    "2-D bias of its own, causal, lengths": dict(
        learned=drawn(2, 2, 130, 208, seed=20), is_causal=True, key_lengths=torch.tensor([70, 110])
    ),
    "2-D bias, 2-D mask, window, lengths, dropout": dict(
        b=1,
        learned=drawn(2, 130, 208, seed=15),
        attn_mask=FULL[1:],
        window=(70, 9),
        key_lengths=LENGTHS[1:] + 40,
        **DROPOUT,
    ),
    "bias, 2-D mask": dict(learned=drawn(2, 1, 1, 208, seed=12), attn_mask=FULL),
    "2-D mask of heads, bounds": dict(attn_mask=SPANS),
    "2-D mask, causal, lengths, dropout, bounds": dict(
        b=1, h=1, attn_mask=ONE_SPAN, key_lengths=LENGTHS[1:] + 200, **CAUSAL_DROPOUT
    ),
    "2-D mask, window, softcap, bounds": dict(
        b=1, attn_mask=SPANS[:, :1], window=(300, 250), softcap=3.0
    ),
    "2-D mask of numbers, bounds": dict(
        b=1, bias=torch.zeros(140, 464).masked_fill(~SPANS[0, 0], -torch.inf)
    ),
    "2-D mask, bias of its own, bounds": dict(
        b=1, learned=drawn(1, 2, 140, 464, seed=18), attn_mask=SPANS[:, :1]
    ),
    "mask, dropout, bounds": dict(sq=70, attn_mask=HOLES, **DROPOUT),
    "bias of 0 and -inf, causal, bounds": dict(
        sq=300, b=1, bias=torch.zeros(448).masked_fill(~HOLES[1, 0, 0], -torch.inf), is_causal=True
    ),
    "128 wide, 2-D mask, dropout, bounds": dict(d=128, b=1, h=1, attn_mask=SPANS[0, 0], **DROPOUT),
    "block mask": dict(attn_mask=BLOCKS),
    "block mask of all heads, dropout": dict(
        b=1, h=4, g=2, d=32, attn_mask=BLOCKS[0, 0], **DROPOUT
    ),
    "block mask, bias of its own, alibi, softcap": dict(
        b=1, learned=drawn(1, 2, 300, 504, seed=22), attn_mask=WIDER_BLOCKS, **TERMS
    ),
    "block mask, causal, lengths, dropout": dict(
        d=32, attn_mask=BLOCKS, is_causal=True, key_lengths=LENGTHS + 300, **DROPOUT
    ),
    "block mask, window, softcap": dict(b=1, attn_mask=BLOCKS[0], window=(190, 130), softcap=3.0),
    "block mask, bias, dropout": dict(
        b=1, learned=drawn(500, seed=23), attn_mask=BLOCKS[0], **DROPOUT
    ),
    "128 wide, block mask, dropout": dict(
        d=128, attn_mask=ff.block_mask(blocks(140, 200)), **DROPOUT
    ),
    "other dims": dict(d=80, dv=24, h=4, g=2, b=1, is_causal=True),
    "128 wide": dict(d=128, b=1, **CAUSAL_DROPOUT),
    "128 wide, 2-D mask, 2-D bias": dict(
        d=128, b=1, learned=drawn(2, 130, 208, seed=16), attn_mask=FULL[1:], **CAUSAL_DROPOUT
    ),
    "256 wide, mask": dict(
        sq=70, d=256, dv=200, b=1, attn_mask=MASK[1:, ..., 20:160], **CAUSAL_DROPOUT
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
    sizes, options = sizes_and_options(CALLS[call])
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
    numbers = torch.zeros(MASK.shape).masked_fill(~MASK, -torch.inf)
    x = qkv(None if by == "mask" else numbers)
    hidden = ~MASK[:, 0, 0] | (torch.arange(200) >= 150)
    options = dict(attn_mask=MASK) if by == "mask" else {}
    options["key_lengths"] = torch.tensor([150, 150])
    given = torch.randn_like(x["query"])
    with simulated_backward():
        before = gradients(x, given, **options)
        after = gradients(hiding(x, hidden, bad), given, **options)
    assert all(map(torch.equal, before, after)) and all(t.isfinite().all() for t in after)
    assert not after[1].mT[hidden[:, None, None].expand(2, 1, 64, 200)].any()
    assert by == "mask" or not after[3][hidden[:, None, None]].any()


@pytest.mark.parametrize("by", ["length", "mask"])
def test_nothing_is_set_to_zero_behind_the_last_key(by):
    """As in test_hopper.py: dQ of padded keys that hold NaN, which nothing sets to zero."""
    x, lengths = qkv(sq=70), torch.tensor([150, 70])
    seen = torch.arange(200) < lengths[:, None]
    options = dict(attn_mask=seen[:, None, None])
    if by == "length":
        options = dict(attn_mask=options["attn_mask"] | True, key_lengths=lengths)
    given = torch.randn_like(x["query"])
    with use_backend("triton"):
        want = gradients(x, given, **options)
    with stores() as stored, simulated_backward(kernels=("dq",), bounds=by == "mask"):
        have = gradients(hiding(x, ~seen), given, **options)
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


# The calls that show planted faults: of five tiles of queries and six of keys, of seven with edges,
# with a mask, also of keys whose weights are exp(24) before the softmax divides them, of rows that
# are wider, and of one key alone; with one sequence without keys, with dropout, with what else
# there is, with the bounds of a mask, and with a block mask of each head.
SHOWN = {
    "plain": dict(sq=300, sk=330, b=1),
    "causal": dict(sq=400, sk=400, b=1, is_causal=True),
    "mask": dict(attn_mask=MASK),
    "mask, low scores": dict(sq=70, attn_mask=MASK),
    "mask, 128 wide": dict(sq=70, d=128, attn_mask=MASK),
    "mask, wide values": dict(sq=70, d=32, dv=128, attn_mask=MASK),
    "mask of one key": dict(sq=70, b=1, attn_mask=ONE_HIDDEN),
    "lengths": dict(key_lengths=LENGTHS),
    "dropout": dict(sq=70, sk=70, b=1, **CAUSAL_DROPOUT),
    "window": dict(sq=200, sk=330, b=1, window=(100, 40), causal_alignment="bottom_right", **TERMS),
    "2-D mask, 2-D bias": dict(learned=drawn(2, 1, 130, 208, seed=13), attn_mask=FULL_OF_HEADS),
    "bias": dict(learned=HIDING + drawn(1, 2, 1, 1, seed=14), softcap=3.0),
    "own bias": dict(b=1, learned=drawn(2, 70, 200, seed=17), softcap=3.0, window=(60, 20)),
    "own bias, causal": dict(
        learned=drawn(2, 2, 130, 200, seed=21), is_causal=True, key_lengths=torch.tensor([3, 110])
    ),
    "own bias, spans": dict(b=1, learned=drawn(2, 300, 464, seed=22), attn_mask=LONG_SPANS),
    "spans": dict(b=1, attn_mask=LONG_SPANS),
    "holes": dict(attn_mask=HOLES),
    "one loop": dict(b=1, attn_mask=LONG_SPANS, window=(300, 250)),
    "blocks": dict(b=1, h=4, g=2, attn_mask=ff.block_mask(blocks(300, 440).view(1, 4, 300, 440))),
    "blocks, window": dict(b=1, attn_mask=BLOCKS[1], window=(190, 130)),
    "blocks, causal": dict(b=1, attn_mask=BLOCKS[1], is_causal=True),
}
BOUNDED = "own bias, spans", "spans", "holes", "one loop"


@functools.cache
def shown(call):
    """The arguments of a call's backward, with NaN in what no query may see, and its gradients in
    float64.
    """
    sizes, options = sizes_and_options(SHOWN[call])
    x = qkv(**sizes, dtype=torch.float16)
    if call == "mask, low scores":
        x["query"].fill_(2.0)
        x["key"] -= 1.5
    grad_output = torch.randn(*x["query"].shape[:3], x["value"].shape[3]).half()
    with use_backend("reference"):
        wide = {name: t.double() for name, t in x.items()}
        want = gradients(wide, grad_output.double(), **options)
    if call != "mask, low scores":
        x = hiding(x, hidden_keys(x, **options))
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
    x = {name: t.requires_grad_() for name, t in qkv(sq=512, sk=768, b=1, h=1, d=16).items()}
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
