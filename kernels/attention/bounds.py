"""Bounds of a mask: which tiles of the scores the other attention kernels skip.

For each tile of queries, one program reads the mask once and writes seven numbers and a list:

    first, run_begin, run_end, last, begin, run, end

No query of the tile sees a key outside of first <= j < last. Every query of the tile sees every
key that exists in run_begin <= j < run_end: the run, the longest sequence of adjacent tiles without
a hidden key. Its last tile may reach past the last key. The entries begin <= e < end of the lists
are, in ascending order, the indices of the tiles of keys of which some query sees any. Entry `run`
is the first tile of the run; the other tiles of the run follow it, and then the tiles behind the
run. The attention kernels loop over the run, without reading the mask, and over the other entries.
The kernel that computes dK and dV uses the same numbers with queries and keys exchanged.

The bounds may also be read from a bias. It hides a key where the bias times log2(e) is -inf, and in
the run the bias is 0.

A mask that is the same for all batches, heads or queries has one set of bounds for all of them. A
mask with one row of at most MOST_IN_KERNEL keys needs no launch: each program of the other kernels
reads the row and finds `first`, `last` and a run, but makes no list. The host never reads the
bounds: the kernels can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fastformer.description import Attention

from ..launch import Launch, constants
from .configurations import AttentionTiles
from .scores import Features, OptionalInputs, in_base_2

MOST_IN_KERNEL = tl.constexpr(512)


class MaskSizes(NamedTuple):
    """The sizes of a mask; 1 in a dimension in which it is the same everywhere."""

    batches: Any
    heads: Any
    queries: Any
    keys: Any


class MaskStrides(NamedTuple):
    """The strides of a mask [batch, head, query, key]."""

    batch: Any
    head: Any
    query: Any
    key: Any


class Reading(NamedTuple):
    """Compile-time: how `bounds_kernel` reads a mask."""

    rows: Any  # queries that are read at a time, at most 128
    columns: Any  # keys
    width: Any  # keys, or queries if a program owns keys, of a tile of the list
    owns_keys: Any  # whether a program owns a tile of keys, and loops over the queries
    is_bias: Any
    word: Any  # bytes that are loaded at a time: 4 if the mask allows it, else 1
    wide: Any  # whether offsets inside a head need 64 bits


class Bounds(NamedTuple):
    """What `bounds_kernel` wrote for one tile."""

    first: Any
    run_begin: Any
    run_end: Any
    last: Any
    begin: Any = 0
    run: Any = 0
    end: Any = 0


class Span(NamedTuple):
    """The tiles that a loop visits. A loop without bounds visits the keys, or queries, n = lo,
    lo + width, .. < hi. A loop with bounds counts lo <= n < hi, and takes n + gap for n from
    n = jump on: an entry of the lists or, if there is no list, the index of a tile.
    """

    lo: Any
    hi: Any
    jump: Any = 0
    gap: Any = 0


@triton.jit
def _ones(x):
    """Return words whose bytes are 1 where those of x are not zero, and else 0. Bit 7 of
    x | (x & 127) + 127 says whether a byte is not zero.
    """
    return ((x | ((x & 0x7F7F7F7F) + 0x7F7F7F7F)) >> 7) & 0x01010101


@triton.jit
def _count(x, reading: tl.constexpr):
    """Count along the dimension that the program owns how many elements of a tile are seen, and how
    many are free (seen, and not changed by a bias). `x` is what `bounds_kernel` loaded.

    Each byte of a word counts at most 128 queries, so that one addition counts for four keys. With
    a bias, each half of a word holds one of the two counts.
    """
    if reading.is_bias:
        ACC: tl.constexpr = tl.float64 if x.dtype == tl.float64 else tl.float32
        ones = (in_base_2(x, ACC) != float("-inf")).to(tl.int32) + ((x == 0).to(tl.int32) << 16)
        count = tl.sum(ones, 1 if reading.owns_keys else 0)
        return count & 0xFFFF, count >> 16
    elif reading.word == 1:
        count = tl.sum((x != 0).to(tl.int32), 1 if reading.owns_keys else 0)
        return count, count
    else:
        ones = _ones(x)
        if reading.owns_keys:
            count = tl.sum((ones * 0x01010101) >> 24, 1)
        else:
            shifts = tl.arange(0, 4) * 8
            count = tl.reshape(
                (tl.sum(ones, 0)[:, None] >> shifts[None, :]) & 255, [reading.columns]
            )
        return count, count


@triton.jit
def bounds_kernel(MASK, BOUNDS, LISTS, sizes, strides, reading: tl.constexpr):
    """One program computes the bounds of a tile of queries, or of keys if it owns these: seven
    numbers of BOUNDS [batches, heads, tiles, 8], and LISTS [batches, heads, tiles, tiles of the
    other side]. `run_begin` and `run_end` are multiples of what is read at a time; `first` and
    `last` are exact. LISTS has 16 bits: Triton's pipeliner would copy a scalar of 32 bits through
    shared memory.

    What lies past the end of the mask sees nothing and cuts no run.
    """
    OWN: tl.constexpr = reading.columns if reading.owns_keys else reading.rows
    STEP: tl.constexpr = reading.rows if reading.owns_keys else reading.columns
    TILES: tl.constexpr = STEP // reading.width
    own_size, size = sizes.queries, sizes.keys
    if reading.owns_keys:
        own_size, size = sizes.keys, sizes.queries
    blocks = tl.cdiv(own_size, OWN)
    owner = tl.program_id(0) // blocks
    own = tl.program_id(0) % blocks * OWN
    owned = tl.minimum(own_size - own, OWN)
    base = MASK + (owner // sizes.heads).to(tl.int64) * strides.batch
    base += (owner % sizes.heads).to(tl.int64) * strides.head
    W: tl.constexpr = reading.word
    words = tl.arange(0, reading.columns // W)[None, :]
    if W == 4:
        base = base.to(tl.pointer_type(tl.int32))
    first, last = tl.full([STEP], size, tl.int32), tl.zeros([STEP], tl.int32)
    run_begin, run_end, begin = 0, 0, 0  # the current run starts at `begin`
    entries = tl.program_id(0) * tl.cdiv(size, reading.width)
    end, run, begin_entry = entries, entries, entries
    for start in tl.range(0, size, STEP, num_stages=4):
        start = tl.multiple_of(start, STEP)
        i0, n0 = start, own
        if not reading.owns_keys:
            i0, n0 = own, start
        i = i0 + tl.arange(0, reading.rows)[:, None]
        j = n0 // W + words  # in words, so that the compiler sees which words are adjacent
        ok = (i < sizes.queries) & (j < sizes.keys // W)
        if reading.wide:
            i, j = i.to(tl.int64), j.to(tl.int64)
        pointers = base + (i * (strides.query // W) + j * strides.key)
        if reading.is_bias:
            x = tl.load(pointers, mask=ok, other=float("-inf"))
        else:
            x = tl.load(pointers, mask=ok, other=0)
        seen, free = _count(x, reading)
        index = start + tl.arange(0, STEP)
        first = tl.minimum(first, tl.where(seen > 0, index, size))
        last = tl.where(seen > 0, index + 1, last)
        some = tl.max(tl.reshape((seen > 0).to(tl.int32), [TILES, reading.width]), 1)
        tile = start // reading.width + tl.arange(0, TILES)
        tl.store(LISTS + (end - 1 + tl.cumsum(some, 0)), tile.to(tl.int16), mask=some > 0)
        end += tl.sum(some, 0)
        cut = tl.max(((free < owned) & (index < size)).to(tl.int32), 0) > 0
        begin = tl.where(cut, start + STEP, begin)
        begin_entry = tl.where(cut, end, begin_entry)
        longer = start + STEP - begin > run_end - run_begin
        run_begin = tl.where(longer, begin, run_begin)
        run_end = tl.where(longer, start + STEP, run_end)
        run = tl.where(longer, begin_entry, run)
    place = BOUNDS + tl.program_id(0) * 8
    last = tl.max(last, 0)
    tl.store(place, tl.minimum(tl.min(first, 0), last))
    tl.store(place + 1, run_begin)
    tl.store(place + 2, run_end)
    tl.store(place + 3, last)
    tl.store(place + 4, entries)
    tl.store(place + 5, run)
    tl.store(place + 6, end)


@triton.jit
def _bounds_of_row(optional, strides, size, b, h, tile: tl.constexpr):
    """Return the `Bounds` of a mask with one row, which is read in words of four keys. `first` and
    `last` may lie up to three keys further out. The run is the whole tiles of the first sequence of
    adjacent seen keys.
    """
    row = optional.mask + b * strides.mask_batch + h * strides.mask_head
    j = tl.arange(0, MOST_IN_KERNEL // 4) * 4
    word = tl.load(row.to(tl.pointer_type(tl.int32)) + j // 4, mask=j < size, other=0)
    seen = _ones(word)
    hidden = ((seen & 1) == 0).to(tl.int32)  # the first key of a word
    first = tl.min(tl.where(seen != 0, j + hidden, size), 0)
    last = tl.max(tl.where(seen != 0, j + 4, 0), 0)
    begin = tl.cdiv(first, tile.columns) * tile.columns
    end = tl.min(tl.where((seen != 0x01010101) & (j >= begin), j, size), 0)
    end = tl.where(end < size, end // tile.columns, tl.cdiv(size, tile.columns)) * tile.columns
    return Bounds(tl.minimum(first, last), begin, tl.maximum(begin, end), last)


@triton.jit
def load_bounds(optional, strides, b, h, index, has: tl.constexpr):
    """Return the `Bounds` of tile number `index` of head h of sequence b."""
    if has.bounds:
        place = optional.bounds + b * strides.bounds_batch + h * strides.bounds_head
        place += index * strides.bounds_tile
        first, run_begin, run_end = tl.load(place), tl.load(place + 1), tl.load(place + 2)
        last, begin = tl.load(place + 3), tl.load(place + 4)
        run, end = tl.load(place + 5), tl.load(place + 6)
        return Bounds(first, run_begin, run_end, last, begin, run, end)
    else:
        return Bounds(0, 0, 0, 0)


@triton.jit
def find_bounds(optional, strides, sizes, b, h, i0, tile: tl.constexpr, has: tl.constexpr):
    """Return which keys the queries of the tile at i0 of head h of sequence b see: compute it from
    the one row of a mask, or load it.
    """
    if has.bounds == 3:
        return _bounds_of_row(optional, strides, sizes.keys, b, h, tile)
    else:
        return load_bounds(optional, strides, b, h, i0 // tile.rows, has)


@triton.jit
def find_bounds_of_keys(call, b, h, n0, queries, tile: tl.constexpr, has: tl.constexpr):
    """Return which queries see the keys of the tile at n0 of head h of sequence b: compute it from
    the one row of a mask, or load it.
    """
    if has.bounds == 3:
        j = n0 + tl.arange(0, tile.columns)
        row = call.optional.mask + b * call.strides.mask_batch + h * call.strides.mask_head
        seen = (tl.load(row + j, mask=j < call.sizes.keys, other=0) != 0).to(tl.int32)
        some = tl.max(seen, 0) > 0
        free = tl.min(tl.where(j < call.sizes.keys, seen, 1), 0) > 0
        return Bounds(0, 0, tl.where(free, queries, 0), tl.where(some, queries, 0))
    else:
        return load_bounds_of_keys(call, b, h, n0, queries, tile, has)


@triton.jit
def load_bounds_of_keys(call, b, h, n0, queries, tile: tl.constexpr, has: tl.constexpr):
    """Return which queries see the keys of the tile at n0 of head h of sequence b."""
    bounds = load_bounds(call.optional, call.strides, b, h, n0 // tile.columns, has)
    KIND: tl.constexpr = has.mask if has.bounds == 1 else has.bias
    if KIND == 1:  # the mask has one row, which stands for all queries
        run_end = tl.where(bounds.run_end > 0, queries, 0)
        return Bounds(0, 0, run_end, tl.where(bounds.last > 0, queries, 0))
    else:
        return bounds


@triton.constexpr_function
def reads_no_mask(has):
    """Return whether a separate loop computes the run, without the mask. There is none if the mask
    comes with a bias, which that loop would have to read.
    """
    return has.bounds == 2 or (has.bounds > 0 and has.bias == 0)


@triton.constexpr_function
def inside_run(has):
    """Return the features that a tile inside the run of bounds or of lists needs."""
    known = {name: getattr(has, name) for name in Features._fields}  # Triton 3.9 has no _replace
    known["bias" if has.bounds == 2 else "mask"] = 0
    known["alibi"] = has.alibi and has.lists < 3  # see `listed_spans`
    return Features(**{**known, "bounds": 0, "lists": 0})


@triton.jit
def split_at_run(tiles, bounds, width: tl.constexpr, has: tl.constexpr):
    """Divide the tiles within the bounds into two spans (edge, run), each (lo, hi, jump, gap): the
    tiles at n = lo, lo + width, .. < hi, which begin at n, or at n + gap if n >= jump. The tiles
    before and after the run are one span, `edge`: if two loops read the mask, the compiler
    serialises the products of the second one.

    `tiles` are (lo, unmasked_begin, unmasked_end, hi): the band reaches lo <= n < hi, and does not
    cut the tiles unmasked_begin <= n < unmasked_end.
    """
    lo, begin, end, hi = tiles
    lo = tl.maximum(lo, bounds.first // width * width)
    hi = tl.maximum(tl.minimum(hi, bounds.last), lo)
    if has.bounds or has.lists:
        begin = tl.maximum(begin, bounds.run_begin)
        end = tl.minimum(end, bounds.run_end)
    # The division tells the compiler that the loads of a loop from `begin` are aligned. It rounds
    # up because `hi` may lie inside a tile, which the band cuts if the run is empty.
    begin = tl.cdiv(tl.minimum(tl.maximum(begin, lo), hi), width) * width
    end = tl.maximum(tl.minimum(end, hi), begin)
    gap = end - begin
    return (lo, hi - gap, begin, gap), (begin, end, end, 0)


@triton.constexpr_function
def without_bounds(has):
    """Return the features of a loop over all tiles, by length and band."""
    known = {name: getattr(has, name) for name in Features._fields}
    return Features(**{**known, "bounds": 0})


@triton.constexpr_function
def has_list(has, OWNS_KEYS):
    """Return whether the bounds come with a list. A mask of one row has none over the queries, and
    bounds that the program computes have none.
    """
    return has.bounds < 3 and (not OWNS_KEYS or (has.mask if has.bounds == 1 else has.bias) == 2)


@triton.jit
def entries_within(entries, begin, end, lo, hi, lanes=None):
    """Return which of the entries begin <= e < end, whose indices ascend, have lo <= index < hi.
    `lanes` are 0 .. 127, in a layout of the caller's.
    """
    if lanes is None:
        lanes = tl.arange(0, 128)
    before, behind = 0, 0
    for start in tl.range(begin, end, 128):
        entry = start + lanes
        index = tl.load(entries + entry, mask=entry < end, other=-1).to(tl.int32)
        before += tl.sum(((index >= 0) & (index < lo)).to(tl.int32), 0)
        behind += tl.sum((index >= tl.maximum(lo, hi)).to(tl.int32), 0)
    return begin + before, end - behind


@triton.jit
def visited_tiles(
    tiles, bounds, call, width: tl.constexpr, has: tl.constexpr, OWNS_KEYS: tl.constexpr, lanes=None
):
    """Divide the tiles that the bounds and the band leave into two `Span`s (edge, run), as
    `split_at_run` does, and leave the holes of the mask out of `edge`. `lanes`: see
    `entries_within`.
    """
    edge, run = split_at_run(tiles, bounds, width, has)
    lo, hi, begin, gap = edge
    lo, hi = lo // width, tl.cdiv(hi + gap, width)
    jump, gap = begin // width, tl.cdiv(gap, width)
    if has_list(has, OWNS_KEYS):
        if has.left or has.right or has.lengths:
            lo, hi = entries_within(call.optional.starts, bounds.begin, bounds.end, lo, hi, lanes)
        else:
            lo, hi = bounds.begin, bounds.end
        jump = bounds.run + (begin - bounds.run_begin) // width
    begin, end, _, _ = run
    return Span(lo, hi - gap, jump, gap), Span(begin, end)


@triton.jit
def with_run(edge):
    """Return the `Span` of all tiles, given that without the run."""
    return Span(edge.lo, edge.hi + edge.gap)


@triton.jit
def visited_tile(n, span, call, width: tl.constexpr, has: tl.constexpr, OWNS_KEYS: tl.constexpr):
    """Return the first key, or query, of the tile number n of a loop with bounds."""
    n = tl.where(n < span.jump, n, n + span.gap)
    if has_list(has, OWNS_KEYS):
        n = tl.load(call.optional.starts + n).to(tl.int32)
    return n * width


class Shared(NamedTuple):
    """The (batch, head) pairs that share a bias: `members` of them, `heads` for each batch."""

    batch: Any  # the first
    head: Any
    heads: Any
    members: Any


@triton.jit
def members_that_see(optional, strides, shared, i0, n0, tile: tl.constexpr):
    """Return (begin, end): no member before `begin` or from `end` on sees a key of the tile at
    (i0, n0). Each is searched in its list.
    """
    begin, behind = shared.members, 0
    for start in tl.range(0, shared.members, 128):
        member = start + tl.arange(0, 128)
        place = optional.bounds + (shared.batch + member // shared.heads) * strides.bounds_batch
        place += (shared.head + member % shared.heads) * strides.bounds_head
        place += i0 // tile.rows * strides.bounds_tile
        ok = member < shared.members
        entry = tl.load(place + 4, mask=ok, other=0)
        end = tl.load(place + 6, mask=ok, other=0)
        some = entry < end
        for n in tl.range(0, 15):  # the last entry up to the tile
            later = entry + (1 << (14 - n))
            index = tl.load(optional.starts + later, mask=later < end, other=2**15 - 1)
            entry = tl.where(index.to(tl.int32) <= n0 // tile.columns, later, entry)
        index = tl.load(optional.starts + entry, mask=some, other=-1)
        seen = index.to(tl.int32) == n0 // tile.columns
        begin = tl.minimum(begin, tl.min(tl.where(seen, member, shared.members), 0))
        behind = tl.maximum(behind, tl.max(tl.where(seen, member + 1, 0), 0))
    return begin, behind


# ------------------------------------------------------------------------------------ the launcher

MOST_TOKENS = 16 * (2**15 - 1)  # the indices of tiles have 16 bits, and no tile is below 16


class Source(NamedTuple):
    """The tensor that bounds are read from."""

    name: str  # of the field of `OptionalInputs`
    sizes: MaskSizes
    strides: MaskStrides
    word: int  # as in `Reading`

    @property
    def in_kernel(self) -> bool:
        """Whether the programs of attention read the one row of a mask themselves."""
        in_words = self.name == "mask" and self.word == 4
        return in_words and self.sizes.queries == 1 and self.sizes.keys <= MOST_IN_KERNEL.value


def bounds_source(
    attention: Attention, has: Features, scores: tuple[int, int, int, int]
) -> Source | None:
    """Return the tensor that the bounds of a call with scores [B, H, Sq, Sk] can be read from: the
    mask, or else a bias that two or more heads share (most often a mask written as 0 and -inf).
    Return None if there is neither, in a packed batch, and for no or more than MOST_TOKENS tokens.
    """
    name = "mask" if has.mask else "bias"
    x = attention.attn_mask if has.mask else attention.bias
    if x is None or has.packed or not all(scores) or max(scores[2:]) > MOST_TOKENS:
        return None
    strides = MaskStrides(*x.expand(scores).stride())
    if not has.mask and (strides.head or scores[1] == 1):
        return None
    batch, heads, queries, keys = scores
    one_row = getattr(has, name) == 1
    sizes = MaskSizes(
        batch if strides.batch else 1, heads if strides.head else 1, 1 if one_row else queries, keys
    )
    words = name == "mask" and strides.key == 1
    words = words and not any(n % 4 for n in (*strides[:3], keys, x.data_ptr()))
    return Source(name, sizes, strides, 4 if words else 1)


class BoundedLaunch:
    """A launch of an attention kernel, after that of the kernel that computes its bounds.

    Args:
        kernel: its name. A program of "dkdv" owns keys, one of the others queries.
        tiles: its tiles.
        source: the tensor that the bounds are read from.
        wide: whether offsets within a head need 64 bits.
    """

    def __init__(self, kernel: str, tiles: AttentionTiles, source: Source, wide: bool) -> None:
        sizes, owns_keys = source.sizes, kernel == "dkdv"
        reading = Reading(
            rows=min(tiles.BM, triton.next_power_of_2(sizes.queries)),
            columns=tiles.BN,
            width=tiles.BN,
            owns_keys=owns_keys,
            is_bias=source.name == "bias",
            word=source.word,
            wide=wide,
        )
        if kernel == "decode":  # all queries; the kernel does not read the run
            rows = triton.next_power_of_2(sizes.queries)
            reading = reading._replace(rows=rows, columns=max(tiles.BN, 4096 // rows))
        elif sizes.queries == 1 and not owns_keys:  # one row is read in few steps
            step = min(512, triton.next_power_of_2(sizes.keys) // 8)
            reading = reading._replace(columns=max(tiles.BN, step))
        blocks, steps = triton.cdiv(sizes.queries, reading.rows), sizes.keys
        if owns_keys:
            blocks, steps = triton.cdiv(sizes.keys, reading.columns), sizes.queries
            reading = reading._replace(width=reading.rows)
        self._shape = sizes.batches, sizes.heads, blocks, 8
        self._lists = *self._shape[:3], triton.cdiv(steps, reading.width)
        self._source = OptionalInputs._fields.index(source.name)
        self._bounds = Launch(
            bounds_kernel,
            (math.prod(self._shape[:3]),),
            dict(sizes=sizes, strides=source.strides, reading=constants(reading)),
            warps=4 if kernel == "decode" else 1,
        )

    def strides(self) -> dict[str, int]:
        """Return the fields of `AttentionStrides` for the bounds: 0 along a dimension of size 1."""
        steps = torch.empty(self._shape, device="meta").stride()
        names = "bounds_batch", "bounds_head", "bounds_tile"
        return {name: step * (n > 1) for name, step, n in zip(names, steps, self._shape)}

    def then(self, launch: Launch) -> BoundedLaunch:
        """Set the launch that reads the bounds, and return self."""
        self.launch = launch
        return self

    def with_bounds(self, optional: tuple[Any, ...]) -> tuple[Any, ...]:
        """Compute bounds and lists, and return the pointers of `OptionalInputs` with them."""
        mask = optional[self._source]
        bounds = mask.new_empty(self._shape, dtype=torch.int32)
        lists = mask.new_empty(self._lists, dtype=torch.int16)
        self._bounds(mask, bounds, lists)
        return (*optional[:4], lists, optional[5], bounds, *optional[7:])

    def __call__(self, *pointers: Any) -> None:
        self.launch(*pointers[:-1], self.with_bounds(pointers[-1]))
