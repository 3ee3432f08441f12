"""Bounds of a mask: which tiles of the scores the other attention kernels skip.

For each tile of queries, one program reads the mask once and writes four numbers:

    first, run_begin, run_end, last

No query of the tile sees a key outside of first <= j < last. Every query of the tile sees all keys
run_begin <= j < run_end: the run, the longest sequence of complete tiles that the mask leaves
unmasked. The attention kernels loop over the keys from `first` to `last`, and do not read the mask
within the run. The kernel that computes dK and dV uses the same numbers with the roles of queries
and keys exchanged.

The bounds may also be read from a bias: -inf in base 2 hides a key, and in the run the bias is 0.

A mask that is the same for all batches, heads or queries has one set of bounds for all of them. The
host never reads the bounds: the kernels can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fastformer.description import Attention

from ..launch import Launch, constants
from .configurations import Tiles
from .scores import Features, OptionalInputs, in_base_2


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

    rows: Any  # queries of a tile, at most 128
    columns: Any  # keys
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
        # Bit 7 of x | (x & 127) + 127 says whether a byte is not zero.
        ones = ((x | ((x & 0x7F7F7F7F) + 0x7F7F7F7F)) >> 7) & 0x01010101
        if reading.owns_keys:
            count = tl.sum((ones * 0x01010101) >> 24, 1)
        else:
            shifts = tl.arange(0, 4) * 8
            count = tl.reshape(
                (tl.sum(ones, 0)[:, None] >> shifts[None, :]) & 255, [reading.columns]
            )
        return count, count


@triton.jit
def bounds_kernel(MASK, BOUNDS, sizes, strides, reading: tl.constexpr):
    """One program computes the bounds of a tile of queries, or of keys if it owns these: four
    numbers of BOUNDS [batches, heads, tiles, 4]. `run_begin` and `run_end` are multiples of the
    other side of the tile; `first` and `last` are exact.

    What lies past the end of the mask sees nothing and cuts no run.
    """
    OWN: tl.constexpr = reading.columns if reading.owns_keys else reading.rows
    STEP: tl.constexpr = reading.rows if reading.owns_keys else reading.columns
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
        cut = tl.max(((free < owned) & (index < size)).to(tl.int32), 0) > 0
        begin = tl.where(cut, start + STEP, begin)
        longer = start + STEP - begin > run_end - run_begin
        run_begin = tl.where(longer, begin, run_begin)
        run_end = tl.where(longer, start + STEP, run_end)
    place = BOUNDS + tl.program_id(0) * 4
    last = tl.max(last, 0)
    tl.store(place, tl.minimum(tl.min(first, 0), last))
    tl.store(place + 1, run_begin)
    tl.store(place + 2, run_end)
    tl.store(place + 3, last)


@triton.jit
def load_bounds(optional, strides, b, h, index, has: tl.constexpr):
    """Return the `Bounds` of tile number `index` of head h of sequence b."""
    if has.bounds:
        place = optional.bounds + b * strides.bounds_batch + h * strides.bounds_head
        place += index * strides.bounds_tile
        return Bounds(tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3))
    else:
        return Bounds(0, 0, 0, 0)


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
    return has.bounds == 2 or (has.bounds == 1 and has.bias == 0)


@triton.constexpr_function
def inside_run(has):
    """Return the features that a tile inside the run of bounds or of lists needs."""
    known = {name: getattr(has, name) for name in Features._fields}  # Triton 3.9 has no _replace
    if has.bounds == 2:
        known["bias"] = 0
    elif has.bias == 0:
        known["mask"] = 0
    return Features(**{**known, "bounds": 0, "lists": 0})


@triton.jit
def split_at_run(tiles, bounds, width: tl.constexpr, has: tl.constexpr):
    """Divide the tiles within the bounds into two spans (edge, run), each (lo, hi, jump, gap): the
    tiles at n = lo, lo + width, .. < hi, which begin at n, or at n + gap if n >= jump. The tiles
    before and after the run are one span, `edge`: if two loops read the mask, the compiler
    serialises the products of the second one.

    `tiles` are (lo, unmasked_begin, unmasked_end, hi): the band reaches lo <= n < hi, and does not
    cut the tiles unmasked_begin <= n < unmasked_end. With a bias these are the run, and every tile
    reads the mask.
    """
    lo, begin, end, hi = tiles
    lo = tl.maximum(lo, bounds.first // width * width)
    hi = tl.maximum(tl.minimum(hi, bounds.last), lo)
    if reads_no_mask(has) or has.lists:
        begin = tl.maximum(begin, bounds.run_begin)
        end = tl.minimum(end, bounds.run_end)
    # The division tells the compiler that the loads of a loop from `begin` are aligned. It rounds
    # up because `hi` may lie inside a tile, which the band cuts if the run is empty.
    begin = tl.cdiv(tl.minimum(tl.maximum(begin, lo), hi), width) * width
    end = tl.maximum(tl.minimum(end, hi), begin)
    gap = end - begin
    return (lo, hi - gap, begin, gap), (begin, end, end, 0)


class Shared(NamedTuple):
    """The (batch, head) pairs that share a bias: `members` of them, `heads` for each batch."""

    batch: Any  # the first
    head: Any
    heads: Any
    members: Any


@triton.jit
def members_that_see(optional, strides, shared, i0, n0, tile: tl.constexpr):
    """Return (begin, end): no member before `begin` or from `end` on sees a key of the tile at
    (i0, n0).
    """
    begin, end = shared.members, 0
    for start in tl.range(0, shared.members, 128):
        member = start + tl.arange(0, 128)
        place = optional.bounds + (shared.batch + member // shared.heads) * strides.bounds_batch
        place += (shared.head + member % shared.heads) * strides.bounds_head
        place += i0 // tile.rows * strides.bounds_tile
        ok = member < shared.members
        seen = n0 < tl.load(place + 3, mask=ok, other=0)
        seen = seen & (n0 + tile.columns > tl.load(place, mask=ok, other=0)) & ok
        begin = tl.minimum(begin, tl.min(tl.where(seen, member, shared.members), 0))
        end = tl.maximum(end, tl.max(tl.where(seen, member + 1, 0), 0))
    return begin, end


# ------------------------------------------------------------------------------------ the launcher


class Source(NamedTuple):
    """The tensor that bounds are read from."""

    name: str  # of the field of `OptionalInputs`
    sizes: MaskSizes
    strides: MaskStrides
    word: int  # as in `Reading`


def bounds_source(
    attention: Attention, has: Features, scores: tuple[int, int, int, int]
) -> Source | None:
    """Return the tensor that the bounds of a call with scores [B, H, Sq, Sk] can be read from: the
    mask, or else a bias that all heads share (most often a mask written as 0 and -inf). Return None
    if the call has neither.
    """
    name = "mask" if has.mask else "bias"
    x = attention.attn_mask if has.mask else attention.bias
    if x is None or has.packed:
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

    def __init__(self, kernel: str, tiles: Tiles, source: Source, wide: bool) -> None:
        sizes, owns_keys = source.sizes, kernel == "dkdv"
        reading = Reading(
            rows=min(tiles.BM, triton.next_power_of_2(sizes.queries)),
            columns=tiles.BN,
            owns_keys=owns_keys,
            is_bias=source.name == "bias",
            word=source.word,
            wide=wide,
        )
        if kernel == "decode":  # all queries, and no run
            rows = triton.next_power_of_2(sizes.queries)
            reading = reading._replace(rows=rows, columns=4096 // rows)
        elif sizes.queries == 1 and not owns_keys:  # one row is read in few steps
            step = min(512, triton.next_power_of_2(sizes.keys) // 8)
            reading = reading._replace(columns=max(tiles.BN, step))
        blocks = triton.cdiv(sizes.queries, reading.rows)
        if owns_keys:
            blocks = triton.cdiv(sizes.keys, reading.columns)
        self._shape = sizes.batches, sizes.heads, blocks, 4
        self._source = OptionalInputs._fields.index(source.name)
        self._bounds = Launch(
            bounds_kernel,
            (math.prod(self._shape[:3]),),
            dict(sizes=sizes, strides=source.strides, reading=constants(reading)),
            warps=4 if kernel == "decode" else 1,
        )

    def strides(self) -> dict[str, int]:
        """Return the fields of `Strides` for the bounds: 0 along a dimension of size 1."""
        steps = torch.empty(self._shape, device="meta").stride()
        names = "bounds_batch", "bounds_head", "bounds_tile"
        return {name: step * (n > 1) for name, step, n in zip(names, steps, self._shape)}

    def then(self, launch: Launch) -> BoundedLaunch:
        """Set the launch that reads the bounds, and return self."""
        self.launch = launch
        return self

    def with_bounds(self, optional: tuple[Any, ...]) -> tuple[Any, ...]:
        """Compute the bounds, and return the pointers of `OptionalInputs` with them."""
        mask = optional[self._source]
        bounds = mask.new_empty(self._shape, dtype=torch.int32)
        self._bounds(mask, bounds)
        return (*optional[:-1], bounds)

    def __call__(self, *pointers: Any) -> None:
        self.launch(*pointers[:-1], self.with_bounds(pointers[-1]))
