"""Bounds of masks: what they are, that no result changes with them, and which tiles are visited."""

import functools
import itertools
import math

import pytest
import torch
from calls import Draw, scaled_dot_product_attention
from test_attention import clean_and_poisoned
from test_fuzz import check

import fastformer as ff
from fastformer import use_backend
from fastformer.description import Attention

plan = pytest.importorskip("fastformer.kernels.attention.plan")
bounds = pytest.importorskip("fastformer.kernels.attention.bounds")

INF = float("inf")


def hard_masks(rows, keys):
    """Masks [rows, keys] by name, which are hard to bound or usual."""
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    causal = j <= i
    masks = {
        "causal": causal,
        "documents": causal & (i // 23 == j // 23),
        "prefix": causal | (j < 21),
        "window": (j - i).abs() <= 9,
        "left padding": j >= keys // 3,
        "one key": j == keys // 2,
        "the last key": j == keys - 1,
        "one row": i == rows // 2,
        "one pair": (i == rows // 2) & (j == 3),
        "one hole": (i != rows // 2) | (j != keys // 2),
        "a hole at the end": (i != rows - 1) | (j != keys - 1),
        "alternating": (i + j) % 2 == 0,
        "alternating tiles": (i // 16 + j // 16) % 2 == 0,
        "two runs": (j // 16) % 3 != 0,
        "all": i >= 0,
        "none": i < 0,
    }
    return {name: mask.expand(rows, keys) for name, mask in masks.items()}


@pytest.fixture
def bounded(monkeypatch):
    """The launches of kernels that use bounds, in calls of every size."""
    launched, launch = [], plan.Launch.__call__
    monkeypatch.setattr(plan, "bounds_pay", lambda *_: True)

    def counted(self, *pointers):
        launched.extend(self for given in self._arguments if getattr(given, "bounds", 0))
        return launch(self, *pointers)

    monkeypatch.setattr(plan.Launch, "__call__", counted)
    return launched


# ------------------------------------------------------------------------------------ the bounds


def bounds_of(kernel, blocks, scores, mask=None, bias=None):
    """(source, bounds) of a call with scores [B, H, Sq, Sk], as the kernel reads them: the numbers
    first, run_begin, run_end and last of each tile. The rest, its list, is checked here.
    """
    batch, heads, rows, keys = scores
    query, key = torch.zeros(batch, heads, rows, 8), torch.zeros(batch, heads, keys, 8)
    attention = Attention(mask, 0.0, False, 1.0, bias)
    made = plan.Plan(query, key, key, attention)
    source = bounds.bounds_source(attention, made.has, scores)
    launch = bounds.BoundedLaunch(
        kernel, plan.AttentionTiles(*blocks, 4, 1), source, made.tile.wide
    )
    given = bounds.OptionalInputs(*launch.with_bounds(plan.optional_inputs(query, attention)))
    lists, numbers = given.starts, given.bounds

    seen = ~(bias.double() < -2.3586e38) if mask is None else mask.view(torch.uint8) != 0
    seen = seen.expand(scores)[: source.sizes.batches, : source.sizes.heads, : source.sizes.queries]
    own, width = blocks if kernel == "forward" else (seen.shape[2], blocks[1])
    if kernel == "dkdv":
        seen, own, width = seen.transpose(2, 3), blocks[1], min(blocks[0], seen.shape[2])
    for t, part in enumerate(seen.split(own, 2)):
        for b, h in itertools.product(*map(range, part.shape[:2])):
            tiles = [n for n, x in enumerate(part[b, h].split(width, 1)) if x.any()]
            _, run_begin, run_end, _, begin, run, end, _ = numbers[b, h, t].tolist()
            assert lists.flatten()[begin:end].tolist() == tiles
            whole = [*range(run_begin // width, -(-min(run_end, part.shape[3]) // width))]
            assert kernel == "decode" or tiles[run - begin :][: len(whole)] == whole
    return source, numbers[..., :4]


def formula(seen, free, own, step):
    """The bounds of tiles of `own` rows of [B, H, S, S'], whose runs are made of `step` columns."""

    def of_tile(seen, free):
        places = seen.any(0).nonzero().flatten().tolist() or [0, -1]
        whole = [bool(x.all()) for x in free.split(step, 1)]
        run, begin = (0, 0), 0
        for n, tile in enumerate(whole):
            begin = begin if tile else n + 1
            run = max(run, (begin, n + 1), key=lambda x: x[1] - x[0])  # the first of the longest
        if run[0] == run[1]:
            run = 0, 0
        return [places[0], run[0] * step, run[1] * step, places[-1] + 1]

    pairs = zip(seen.split(own, 2), free.split(own, 2))
    per_head = [
        [[of_tile(s[b, h], f[b, h]) for h in range(s.shape[1])] for b in range(s.shape[0])]
        for s, f in pairs
    ]
    return torch.tensor(per_head, dtype=torch.int32).permute(1, 2, 0, 3)


def stacked(batch, heads, rows, keys):
    """A hard mask for each head of each sequence."""
    masks = [*hard_masks(rows, keys).values()]
    return torch.stack(masks[: batch * heads]).view(batch, heads, rows, keys)


def bytes_of(mask):
    """The mask with other bytes than 0 and 1."""
    kinds = torch.tensor([1, 2, 127, 128, 129, 255], dtype=torch.uint8)
    chosen = kinds[torch.arange(mask.numel()) % 6].view(mask.shape)
    return torch.where(mask, chosen, torch.zeros_like(chosen)).view(torch.bool)


def inside(mask, before, after, step=1):
    """The mask as a view of a larger one that is True around it."""
    shape = *mask.shape[:-1], before + step * mask.shape[-1] + after
    larger = torch.ones(shape, dtype=torch.bool)
    return larger[..., before : before + step * mask.shape[-1] : step].copy_(mask)


WHOLE = stacked(4, 4, 50, 84)
LAYOUTS = {  # (mask, bytes that are loaded at a time, batches, heads)
    "whole": (WHOLE, 4, 4, 4),
    "bytes": (bytes_of(WHOLE), 4, 4, 4),
    "bytes, an odd width": (bytes_of(WHOLE[..., :83].contiguous()), 1, 4, 4),
    "heads": (WHOLE[1], 4, 1, 4),
    "batches": (WHOLE[:, 3:], 4, 4, 1),
    "pairs": (WHOLE[2, 2], 4, 1, 1),
    "keys": (WHOLE[:, :1, 40:41], 4, 4, 1),
    "keys, expanded": (WHOLE[:, 1:2, 40:41].expand(4, 4, 50, 84), 4, 4, 1),
    "keys of heads": (WHOLE[2, :, 7:8], 4, 1, 4),
    "queries": (WHOLE[..., 44:45], 1, 4, 4),
    "transposed": (stacked(4, 4, 84, 50).transpose(2, 3), 1, 4, 4),
    "aligned": (inside(WHOLE, 4, 8), 4, 4, 4),
    "not aligned": (inside(WHOLE, 3, 1), 1, 4, 4),
    "rows not aligned": (inside(WHOLE, 4, 1), 1, 4, 4),
    "aligned, an odd width": (inside(WHOLE[..., :83], 4, 9), 1, 4, 4),
    "steps": (inside(WHOLE, 0, 0, 2), 1, 4, 4),
}


OF_MASKS = [(layout, (16, 32)) for layout in LAYOUTS] + [("whole", (32, 16)), ("keys", (32, 16))]


@pytest.mark.parametrize("layout, shape", OF_MASKS, ids=str)
def test_bounds_of_masks(layout, shape):
    """Every number, with the sizes of the mask itself, for tiles of queries and of keys."""
    mask, word, batches, heads = LAYOUTS[layout]
    keys = 83 if "odd width" in layout else 84
    scores = 4, 4, 50, keys
    full = mask.view(torch.uint8) != 0
    seen = full.expand(scores)[:batches, :heads]
    one_row = mask.expand(scores).stride(2) == 0
    seen = seen[:, :, :1] if one_row else seen
    source, have = bounds_of("forward", shape, scores, mask)
    assert source.word == word
    assert torch.equal(have, formula(seen, seen, shape[0], shape[1]))
    _, have = bounds_of("dkdv", shape, scores, mask)
    across = seen.transpose(2, 3)
    assert torch.equal(have, formula(across, across, shape[1], 1 if one_row else shape[0]))
    _, have = bounds_of("decode", shape, scores, mask)
    want = formula(seen, seen, 64, 1)  # of all queries, whose run nobody reads
    assert torch.equal(have[..., ::3], want[..., ::3])


@pytest.mark.parametrize("keys, step", [(512, 64), (1000, 128), (5000, 512)])
def test_a_row_is_read_in_few_steps(keys, step):
    """Longer steps make the run shorter, so a short row has short ones."""
    mask = torch.arange(keys) < torch.tensor([keys - 70, keys // 2]).view(2, 1, 1, 1)
    _, have = bounds_of("forward", (16, 32), (2, 1, 50, keys), mask)
    assert torch.equal(have, formula(mask, mask, 16, step))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # to -inf, in base 2
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(4, 1, 50, 83), (50, 83), (4, 1, 1, 83)], ids=str)
def test_bounds_of_biases(shape, kind):
    """What is -inf in base 2 hides a key, and only 0 is free."""
    blocks, scores = (16, 32), (4, 4, 50, 83)
    seen = WHOLE[:, 1:2, ..., :83] if len(shape) == 4 else WHOLE[1, 2, :, :83]
    seen = seen[:, :, 40:41] if shape[-2] == 1 else seen
    bias = torch.zeros(shape).masked_fill(~seen, -INF)
    bias[..., -1, 5], bias[..., -1, 70], bias[..., -1, 82] = 0.5, math.nan, -1e4
    bias = bias.to(kind)
    if kind != torch.float16:
        bias[..., 0, 40] = -3e38  # which is -inf in base 2
    hidden = bias.double() < -2.3586e38
    of_all = (1,) * (4 - len(shape)) + shape
    seen, free = ~hidden.view(of_all), (bias == 0).view(of_all)
    _, have = bounds_of("forward", blocks, scores, bias=bias)
    assert torch.equal(have, formula(seen, free, 16, 32))
    _, have = bounds_of("dkdv", blocks, scores, bias=bias)
    seen, free = seen.transpose(2, 3), free.transpose(2, 3)
    assert torch.equal(have, formula(seen, free, 32, 1 if shape[-2] == 1 else 16))


def test_a_tile_of_128_queries():
    """Their counts fill the bytes of a word."""
    mask = torch.ones(1, 1, 200, 40, dtype=torch.bool)
    mask[..., 3::4] = False
    mask[..., 130, :8] = False
    for seen in (mask, ~mask):
        _, have = bounds_of("forward", (128, 16), (1, 2, 200, 40), seen)
        assert torch.equal(have, formula(seen, seen, 128, 16))


@pytest.mark.parametrize("keys, bounded", [(16 * 32767, True), (16 * 32767 + 1, False)])
def test_indices_have_16_bits(keys, bounded):
    """Of as many keys as have more tiles, no bounds are read."""
    mask, key = torch.ones(1, 1, 1, keys, dtype=torch.bool), torch.zeros(1, 2, keys, 1)
    attention = Attention(mask, 0.0, False, 1.0)
    made = plan.Plan(key[:, :, :1], key, key, attention)
    source = bounds.bounds_source(attention, made.has, (1, 2, 1, keys))
    assert (source is not None) == bounded


@pytest.mark.parametrize("keys", [36, 35], ids=["words", "bytes"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_offsets_past_int32(spread, dim, keys):
    """Of a mask whose last element stands past 2^31."""
    near, scores = stacked(3, 3, 40, keys), (3, 3, 40, keys)
    far = spread(near, dim)
    for kernel in ("forward", "dkdv", "decode"):
        results = [bounds_of(kernel, (16, 16), scores, mask)[1] for mask in (near, far)]
        assert torch.equal(*results), kernel


# ------------------------------------------------------------------------------------ the results

BATCH, HEADS, GROUPS, ROWS, KEYS = 2, 2, 1, 50, 70
MASKS = hard_masks(ROWS, KEYS)


def lengths(*numbers):
    return torch.tensor(numbers)[:, None, None, None]


def of_batch(*names):
    """A mask [B, 1, Sq, Sk], of another kind for each sequence."""
    return torch.stack([MASKS[name] for name in names])[:, None]


def padded(mask, *numbers):
    return mask & (torch.arange(KEYS) < lengths(*numbers))


def biased(mask):
    """The mask as a bias."""
    return torch.zeros(mask.shape).masked_fill(~mask, -INF)


SLOPES = 0.5 ** torch.arange(1.0, HEADS + 1)
BOTTOM = dict(causal_alignment="bottom_right")
DROPOUT = dict(dropout_p=0.3, dropout_seed=-9)
COMPOSED = {  # (mask, options); a bias and sinks have a gradient
    "padding": (padded(MASKS["causal"], 70, 33), {}),
    "documents": (of_batch("documents", "one pair"), dict(window=(30, None))),
    "heads": (stacked(8, HEADS, ROWS, KEYS)[:2], {}),
    "heads of all": (stacked(8, HEADS, ROWS, KEYS)[5], dict(sinks=torch.randn(HEADS))),
    "all, causal": (MASKS["all"], dict(is_causal=True)),
    "all, lengths": (MASKS["all"], dict(key_lengths=torch.tensor([33, 70]))),
    "all, window": (of_batch("all", "one hole"), dict(window=(20, 7))),
    "none": (of_batch("none", "prefix"), dict(is_causal=True, **DROPOUT)),
    "hole, bottom right": (
        of_batch("one hole", "two runs"),
        dict(is_causal=True, key_lengths=torch.tensor([61, 40]), softcap=5.0, **BOTTOM),
    ),
    "alternating": (of_batch("alternating", "alternating tiles"), DROPOUT),
    "keys": (padded(MASKS["left padding"][:1], 70, 50), dict(is_causal=True)),
    "keys of sequences": (padded(MASKS["all"][:1], 70, 33), {}),
    "keys of heads": (
        torch.stack([MASKS[n][:1] for n in ("two runs", "the last key")]),
        dict(key_lengths=torch.tensor([70, 41]), **DROPOUT),
    ),
    "ALiBi, softcap": (
        of_batch("prefix", "causal"),
        dict(alibi_slopes=SLOPES, softcap=3.0, sinks=torch.randn(HEADS)),
    ),
    "bias of heads": (padded(MASKS["causal"], 70, 20), dict(bias=torch.randn((HEADS, ROWS, KEYS)))),
    "bias, causal": (
        of_batch("two runs", "left padding"),
        dict(
            bias=torch.randn((BATCH, HEADS, ROWS, KEYS)),
            is_causal=True,
            window=(25, None),
            **BOTTOM,
        ),
    ),
    "bias of keys": (of_batch("window", "all"), dict(bias=torch.randn((BATCH, 1, 1, KEYS)))),
    "bias of rows": (of_batch("one row", "causal"), dict(bias=torch.randn((HEADS, ROWS, 1)))),
    "a learned bias that hides": (None, dict(bias=biased(MASKS["causal"]))),
    "a bias as mask, with all": (
        None,
        dict(
            bias=biased(of_batch("two runs", "prefix")),
            is_causal=True,
            key_lengths=torch.tensor([70, 31]),
            alibi_slopes=SLOPES,
            **DROPOUT,
        ),
    ),
    "a bias of keys as mask": (None, dict(bias=biased(padded(MASKS["all"][:1], 70, 37)))),
}


def attend(**given):
    """The output and, as the last column, lse."""
    output, lse = ff.scaled_dot_product_attention(**given, enable_gqa=True, return_lse=True)
    lse = lse.masked_fill(lse == -INF, 0.0)
    return torch.cat([output, lse.unsqueeze(-1).to(output.dtype)], -1)


def call(name, rows=ROWS, dim=16):
    """(tensors, options) of a call of COMPOSED."""
    torch.manual_seed(5)
    mask, options = COMPOSED[name]
    tensors = dict(
        query=1.5 * torch.randn(BATCH, HEADS, rows, dim),
        key=torch.randn(BATCH, GROUPS, KEYS, dim),
        value=torch.randn(BATCH, GROUPS, KEYS, dim),
    )
    options = dict(options)
    learned = ("sinks",) if "as mask" in name else ("bias", "sinks")
    tensors |= {n: options.pop(n) for n in learned if n in options}
    if mask is not None:
        options["attn_mask"] = mask
    return tensors, options


@pytest.mark.parametrize("name", COMPOSED)
def test_results(against_oracle, small_tiles, bounded, name):
    """Outputs, lse and every gradient."""
    tensors, options = call(name)
    with small_tiles(16, 16), use_backend("triton"):
        against_oracle(attend, tensors, **options)
    of_bias = "bias" in tensors and tensors["bias"].shape[-2:] == (ROWS, KEYS)
    assert len(bounded) == (1 if name == "a learned bias that hides" else 3 + of_bias)


@pytest.mark.parametrize("name", ["keys", "keys of sequences", "keys of heads", "bytes of keys"])
@pytest.mark.parametrize("blocks", [(16, 16), (32, 16)], ids=str)
def test_results_of_a_row_of_words(against_oracle, small_tiles, bounded, monkeypatch, name, blocks):
    """Of whole words, which each program reads: no kernel computes bounds."""
    monkeypatch.setattr(bounds, "bounds_kernel", None)
    tensors, options = call("keys" if name == "bytes of keys" else name)
    tensors |= {n: torch.randn(BATCH, GROUPS, KEYS + 2, 16) for n in ("key", "value")}
    mask = torch.nn.functional.pad(options["attn_mask"], (0, 2))
    options["attn_mask"] = bytes_of(mask) if "bytes" in name else mask
    with small_tiles(*blocks), use_backend("triton"):
        against_oracle(attend, tensors, **options)
    assert len(bounded) == 3


@pytest.mark.parametrize("keys", [512, 516])
def test_a_row_is_read_up_to_512_keys(bounded, work, keys):
    """The last key is the only one that is seen."""
    query, value, out = torch.randn(1, 1, 32, 8), torch.randn(1, 1, keys, 8), []
    given = query, value, value, torch.arange(keys) == keys - 1
    with use_backend("triton"):
        found = work(lambda: out.append(ff.scaled_dot_product_attention(*given)))
    assert found.launches == (1 if keys == 512 else 2)
    torch.testing.assert_close(out[0], value[:, :, -1:].expand_as(query))


@pytest.mark.parametrize("name, dim", [("padding", 40), ("all, window", 130)])
@pytest.mark.parametrize("blocks", [(32, 16), (16, 32)], ids=str)
def test_other_tiles_and_heads(against_oracle, small_tiles, bounded, name, dim, blocks):
    """Heads wider than 128 have no loop of its own for the unmasked queries of a tile of keys."""
    tensors, options = call(name, dim=dim)
    with small_tiles(*blocks), use_backend("triton"):
        against_oracle(attend, tensors, **options)
    assert bounded


@pytest.mark.parametrize("name", ["two runs", "documents"])
def test_wide_heads_behind_a_run(against_oracle, small_tiles, bounded, name):
    """Queries before, in and behind the run of a tile of keys, in one loop."""
    mask = hard_masks(70, 40)["all" if name == "two runs" else "prefix"].clone()
    mask[2:5] = mask[68:] = False
    sizes = dict(query=70, key=40, value=40)
    x = {n: torch.randn(1, 1, size, 136) for n, size in sizes.items()}
    with small_tiles(16, 16), use_backend("triton"):
        against_oracle(ff.scaled_dot_product_attention, x, attn_mask=mask)
    assert bounded


@pytest.mark.parametrize("of", ["left", "right", "middle", "bias"])
def test_hidden_keys_may_hold_anything(small_tiles, bounded, of):
    """NaN in keys that no query sees, in tiles that are visited and in others."""
    j = torch.arange(KEYS)
    sees = {"left": j >= 37, "right": j < 21, "middle": (j < 5) | (j >= 60), "bias": j >= 37}[of]
    x = dict(zip(("query", "key", "value"), torch.randn(3, 1, 2, KEYS, 16)))
    options = dict(bias=biased(sees)) if of == "bias" else dict(attn_mask=sees)
    call = functools.partial(ff.scaled_dot_product_attention, **options)
    with small_tiles(16, 16), use_backend("triton"):
        # A result of NaN is computed again without a run, and so summed in another order.
        for clean, poisoned in clean_and_poisoned(call, x, ~sees[:, None]):
            assert poisoned.isfinite().all()
            torch.testing.assert_close(poisoned, clean, atol=1e-5, rtol=1e-5)
    assert len(bounded) == 2 * 4


def test_second_derivatives(small_tiles, bounded):
    mask = MASKS["documents"][:20, :30]
    x = torch.randn(3, 1, 1, 30, 4, dtype=torch.float64)

    def gradients(backend):
        leaves = [t.clone().requires_grad_() for t in (x[0][:, :, :20], *x[1:])]
        with small_tiles(16, 16), use_backend(backend):
            out = ff.scaled_dot_product_attention(*leaves, mask)
            first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
            return [*first, *torch.autograd.grad(sum(t.square().sum() for t in first), leaves)]

    for have, want in zip(gradients("triton"), gradients("reference")):
        torch.testing.assert_close(have, want, atol=1e-6, rtol=1e-6)
    assert bounded


def test_a_bias_of_more_heads_than_are_read_at_a_time(small_tiles, bounded):
    """The gradient of a bias of all of them, in tiles that few of many see."""
    batch, heads = 45, 3
    mask = torch.zeros(batch, heads, 4, 32, dtype=torch.bool)
    mask[2, 1, :, 3:5] = mask[44, 1, :, 2:4] = mask[44, 0, :, 20:] = mask[43, 2, 0, 15:18] = True
    x, bias = torch.randn(3, batch, heads, 32, 8), torch.randn(4, 32)

    def gradient(backend, dtype):
        query, key, value = x.to(dtype)
        leaf = bias.to(dtype).requires_grad_()
        with use_backend(backend):
            out = ff.scaled_dot_product_attention(query[:, :, :4], key, value, mask, bias=leaf)
            return torch.autograd.grad(out.square().sum(), leaf)[0]

    want = gradient("reference", torch.float64)
    with small_tiles(16, 16):
        have = gradient("triton", torch.float32)
    torch.testing.assert_close(have.double(), want, atol=1e-5, rtol=1e-5)
    assert len(bounded) == 2


# ------------------------------------------------------------------------------- tiles visited


@pytest.mark.parametrize("name", MASKS)
def test_tiles_that_are_visited(small_tiles, bounded, work, name):
    """Those in which a query sees a key; in those of a run no mask is read."""
    mask = MASKS[name].contiguous()[None, None]
    x = [torch.randn(1, 1, n, 16, requires_grad=True) for n in (ROWS, KEYS, KEYS)]
    bias = torch.randn(ROWS, KEYS, requires_grad=True)
    whole = mask & (torch.arange(KEYS) < 64)  # the last tile is a part of one
    of_rows = formula(mask, whole, 16, 16).view(-1, 4)
    tiles = torch.zeros(64, 80, dtype=torch.bool)
    tiles[:ROWS, :KEYS] = mask
    seen = int(tiles.view(4, 16, 5, 16).any(3).any(1).sum())
    run = int((of_rows[:, 2] - of_rows[:, 1]).sum()) // 16
    out = []
    with small_tiles(16, 16), use_backend("triton"):
        found = work(lambda: out.append(ff.scaled_dot_product_attention(*x, mask)))
        assert found.products == 2 * seen
        # Of each program seven numbers and the queries, of each tile outside of the run its index.
        assert found.unmasked == 8 * len(of_rows) + 2 * run + seen - run
        assert work(out[0].sum().backward).products == 7 * seen
        out = ff.scaled_dot_product_attention(*(t.detach() for t in x), mask, bias=bias)
        assert work(out.sum().backward).products == 2 * seen


ONE_ROW = {
    "padding": lambda j: j < 33,
    "padding of whole tiles": lambda j: j < 48,
    "left padding": lambda j: j >= 31,
    "left padding of whole tiles": lambda j: j >= 32,
    "left padding, a tile's first key": lambda j: j >= 33,
    "both": lambda j: (j >= 17) & (j < 69),
    "one key": lambda j: j == 33,
    "the first and the last key": lambda j: j % 71 == 0,
    "a hole": lambda j: j != 40,
    "a hole, padding": lambda j: (j != 5) & (j < 50),
    "all": lambda j: j >= 0,
    "none": lambda j: j < 0,
}


@pytest.mark.parametrize("keys", [72, 64, 4])
@pytest.mark.parametrize("name", ONE_ROW)
def test_tiles_of_a_mask_with_one_row(small_tiles, bounded, work, name, keys):
    """No kernel but those of attention is launched. A program visits the tiles from the first to
    the last seen key. It reads no mask in the first sequence of whole tiles.
    """
    mask = ONE_ROW[name](torch.arange(keys))
    tiles = mask.split(16)
    seen = [n for n, x in enumerate(tiles) if x.any()]
    reach = seen[-1] + 1 - seen[0] if seen else 0
    begin = int(mask.int().argmax())
    end = begin + int((~mask[begin:]).int().argmax() if not mask[begin:].all() else keys - begin)
    run = max(0, end // 16 - -(-begin // 16))  # without a tile that reaches past the last key
    out = []
    x = [torch.randn(1, 2, n, 16, requires_grad=True) for n in (ROWS, keys, keys)]
    programs = 2 * 4
    with small_tiles(16, 16), use_backend("triton"):
        found = work(lambda: out.append(ff.scaled_dot_product_attention(*x, mask)))
        assert (found.products, found.launches) == (2 * programs * reach, 1)
        assert found.unmasked == programs * (1 + 2 * run)
        found = work(out[0].sum().backward)
        assert found.products == programs * (3 * reach + 4 * len(seen))
    assert len(bounded) == 3


# ------------------------------------------------------------------------------------ few queries


FEW = {
    "keys": (torch.arange(300) >= lengths(120, 299), {}),
    "one key": ((torch.arange(300) == 217)[None, None, None], {}),
    "both ends": ((torch.arange(300) - 150).abs() > lengths(100, 147), {}),
    "both ends, causal": (
        (torch.arange(300) - 150).abs() > lengths(20, 120),
        dict(is_causal=True, key_lengths=torch.tensor([200, 299]), **BOTTOM),
    ),
    "none": ((torch.arange(300) < lengths(0, 77)), dict(sinks=torch.randn(HEADS))),
    "pairs": (
        torch.stack([hard_masks(3, 300)[n] for n in ("left padding", "window")])[:, None],
        dict(key_lengths=torch.tensor([200, 300])),
    ),
    "causal": (
        (torch.arange(300) >= lengths(31, 140)),
        dict(is_causal=True, window=(120, 0), **BOTTOM),
    ),
    "bias": (None, dict(bias=biased(torch.arange(300) >= lengths(31, 140)))),
    "bytes": (bytes_of(hard_masks(3, 300)["left padding"].contiguous()), {}),
}


@pytest.mark.parametrize("name", FEW)
def test_few_queries(against_oracle, small_tiles, bounded, work, name):
    """The kernel that cuts the keys into parts cuts what the bounds leave."""
    mask, options = FEW[name]
    options = dict(options) | (dict(attn_mask=mask) if mask is not None else {})
    tensors = dict(
        query=torch.randn(BATCH, HEADS, 3, 16), key=torch.randn(BATCH, GROUPS, 300, 16),
        value=torch.randn(BATCH, GROUPS, 300, 16),
    )  # fmt: skip
    with small_tiles(16, 16), use_backend("triton"):
        against_oracle(attend, tensors, gradients=False, **options)
        assert len(bounded) == 1
        found = work(lambda: attend(**tensors, **options)).products
    if name in ("keys", "one key", "both ends", "none", "bias"):
        sees = (options["bias"] == 0) if mask is None else mask
        sees = torch.nn.functional.pad(sees.expand(BATCH, 1, 1, 300), (0, 4))
        assert found == 2 * GROUPS * int(sees.view(-1, 16).any(1).sum())


# -------------------------------------------------------------------------------- random calls


def masked(draw):
    """A random call with a hard mask: of each sequence or of each head, or as a bias."""
    tensors, options = scaled_dot_product_attention(draw)
    batch, heads, rows, keys = *tensors["query"].shape[:3], tensors["key"].shape[2]
    kinds = [*hard_masks(rows, keys).values()]
    shape = draw.one((), (batch, 1), (batch, heads), (heads,))
    chosen = [kinds[draw.random.integers(len(kinds))] for _ in range(math.prod(shape))]
    mask = torch.stack(chosen).view(*shape, rows, keys)
    if draw.often(0.3):
        mask = mask[..., :1, :].clone()
    options.pop("attn_mask", None)
    if draw.often(0.2):
        tensors.pop("attn_mask", None)
        tensors["bias"] = draw.view(biased(mask).to(draw.dtype), math.nan)
    else:
        tensors["attn_mask"] = draw.view(mask, True)
    return tensors, options


masked.__name__ = scaled_dot_product_attention.__name__


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of -inf, in what is masked
def test_random_calls(device, small_tiles, bounded, request):
    """A case that fails names its seed."""
    for n in range(2000 if request.config.getoption("slow") else 24):
        draw = Draw([27, n], device, most=70)
        draw.tiles = draw.one((16, 16), (16, 32), (32, 16))
        try:
            with use_backend("triton"):
                check(masked, draw, "triton", small_tiles(*draw.tiles))
        except Exception as error:
            raise AssertionError(f"Draw([27, {n}]), {draw.dtype}: {error}") from error
    assert len(bounded) >= 48
