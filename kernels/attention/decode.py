"""The kernels of few queries to many keys (Dao et al. 2023, "Flash-Decoding for long-context
inference").

One program for each head would leave most of a GPU idle. So the keys of a head are cut into parts,
with a program for each, and a second kernel merges what these have found: of each part s the
weighted sum of its values, the sum l_s of the weights, and their maximum m_s,
    l = sum_s 2^(m_s - m) l_s        o = sum_s 2^(m_s - m) o_s / l        m = max_s m_s
in one order. The query heads of a key-value head stand in one tile, so that each key is read once
for all of them: row r of the tile is query r // heads of head r % heads.

The keys may lie in pages, which are found through a table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common import LOG2E
from .forward import Work, forward_tiles
from .scores import (
    Head,
    keys_of_rows,
    load_rows,
    locate_head,
    locate_sequence,
    prepare_call,
    store_rows,
    store_sums,
)


class PagedInputs(NamedTuple):
    """Pointers to query [B, H, Sq, D], to keys and values [B, G, Sk, D] and [B, G, Sk, DV], or in
    pages [P, page, G, D] and [P, page, G, DV], and to the table [B, blocks] of their pages.
    """

    query: Any
    key: Any
    value: Any
    table: Any


class Cut(NamedTuple):
    """How the work is cut."""

    heads: Any  # query heads of one tile, which have the same keys
    parts: Any  # of the keys


class Paging(NamedTuple):
    """How the pages lie."""

    pages: Any  # how many there are
    blocks: Any  # entries of the table for a sequence
    key_page: Any  # strides
    value_page: Any


class Pages(NamedTuple):
    """The pages of one sequence."""

    table: Any  # pointer to its entries
    paging: Any


@triton.jit
def _part(lo, hi, s, parts, tile: tl.constexpr):
    """Bound part s of the keys lo <= j < hi: whole tiles, as many for each part, or one less; none
    where hi is not above lo.
    """
    tiles = tl.cdiv(hi - lo, tile.columns)
    first = s * (tiles // parts) + tl.minimum(s, tiles % parts)
    last = first + tiles // parts + (s < tiles % parts).to(tl.int32)
    return lo + first * tile.columns, lo + last * tile.columns


@triton.jit
def split_kernel(
    inputs,
    SUMS,
    WEIGHTS,
    extras,
    strides,
    sizes,
    band,
    factors,
    cut,
    paging,
    tile: tl.constexpr,
    has: tl.constexpr,
):
    """Compute SUMS [B, H, Sq, parts, DV], the weighted sums of the values of each part of the keys,
    and WEIGHTS [B, H, Sq, parts, 2], the sums of the weights and the maxima of the scores. One
    program owns BM rows of one part. Where no weight is, its sum is not written.
    """
    blocks = tl.cdiv(sizes.queries * cut.heads, tile.rows)
    start = tl.program_id(0) % blocks * tile.rows
    s = tl.program_id(0) // blocks % cut.parts
    plane = tl.program_id(0) // blocks // cut.parts
    b = (plane // (sizes.heads // cut.heads)).to(tl.int64)
    first = (plane % (sizes.heads // cut.heads) * cut.heads).to(tl.int64)
    g = first // sizes.group
    sequence = locate_sequence(extras, sizes, b, has)
    r = start + tl.arange(0, tile.rows)
    ok = r < sizes.queries * cut.heads
    r = tl.minimum(r, sizes.queries * cut.heads - 1)  # past the end: the last row
    i = r // cut.heads
    h = first + r % cut.heads

    base = inputs.query + b * strides.query_batch
    places = h * strides.query_head + i * strides.query_row.to(tl.int64)
    q = load_rows(base, places, 1, None, tile.dim, tile.dim_block, False)
    k_base = inputs.key + b * strides.key_batch + g * strides.key_head
    v_base = inputs.value + b * strides.value_batch + g * strides.value_head
    pages = Pages(inputs.table + b * paging.blocks, paging)
    call = prepare_call(extras, strides, sizes, band, factors, has)
    head = locate_head(call, sequence, plane, b, first, 0, tile, has)
    rows = locate_head(call, sequence, plane, b, h[:, None], 0, tile, has)
    mask = rows.mask if has.mask == 2 else head.mask
    bias = rows.bias if has.bias == 2 else head.bias
    head = Head(head.draws, mask, bias, rows.slope, sequence, call)
    work = Work(q, 0, i, i.to(tl.int64) if tile.wide else i, k_base, v_base, pages)

    acc = tl.zeros([tile.rows, tile.value_block], tile.acc)
    l = tl.zeros([tile.rows], tile.acc)
    m = tl.full([tile.rows], float("-inf"), tile.acc)
    end = tl.minimum(start + tile.rows - 1, sizes.queries * cut.heads - 1) // cut.heads + 1
    i0 = start // cut.heads
    lo, hi = keys_of_rows(i0, end, sequence.length, sequence.shift, band, tile, has)
    span = _part(lo, hi, s, cut.parts, tile)
    MASKED: tl.constexpr = has.mask == 1 or has.bias == 1
    acc, l, m = forward_tiles((acc, l, m), span, work, head, tile, has, True, MASKED)
    if has.fold:
        m = m * call.scale
    place = ((b * sizes.heads + h) * sizes.queries + i) * cut.parts + s
    store_rows(SUMS, place, tile.value_dim, ok & (l != 0.0), acc, tile.value_dim, tile.value_block)
    tl.store(WEIGHTS + place * 2, l, mask=ok)
    tl.store(WEIGHTS + place * 2 + 1, m, mask=ok)


@triton.jit
def merge_kernel(
    SUMS,
    WEIGHTS,
    O,
    LSE,
    STATISTICS,
    SINKS,
    output_strides,
    sizes,
    parts,
    tile: tl.constexpr,
    has: tl.constexpr,
):
    """Compute O [B, H, Sq, DV], LSE and STATISTICS, as the forward kernel does, from what
    `split_kernel` has found. One program owns a row, and reads BM parts at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    i = row % sizes.queries
    h = row // sizes.queries % sizes.heads
    b = row // sizes.queries // sizes.heads
    pairs = WEIGHTS + row * parts * 2
    s = tl.arange(0, tile.rows)
    m = tl.full([tile.rows], float("-inf"), tile.acc)
    for s0 in tl.range(0, parts, tile.rows):
        m = tl.maximum(m, tl.load(pairs + (s0 + s) * 2 + 1, s0 + s < parts, float("-inf")))
    m = tl.max(m, 0)
    sink = m
    if has.sink:
        sink = tl.load(SINKS + h).to(tile.acc) * LOG2E
        m = tl.maximum(m, sink)
    base = tl.where(m == float("-inf"), 0.0, m)
    acc = tl.zeros([tile.rows, tile.value_block], tile.acc)
    l = tl.zeros([tile.rows], tile.acc)
    for s0 in tl.range(0, parts, tile.rows):
        weight = tl.load(pairs + (s0 + s) * 2, s0 + s < parts, 0.0)
        peak = tl.load(pairs + (s0 + s) * 2 + 1, s0 + s < parts, float("-inf"))
        factor = tl.math.exp2(peak - base)
        l += factor * weight
        x = load_rows(
            SUMS + (row * parts + s0) * tile.value_dim,
            s,
            tile.value_dim,
            weight != 0.0,
            tile.value_dim,
            tile.value_block,
            True,
        )
        acc += factor[:, None] * x
    l = tl.sum(l, 0)
    if has.sink:
        l += tl.math.exp2(sink - base)
    sums = store_sums(LSE, STATISTICS, row, True, m, l, has)
    d = tl.arange(0, tile.value_block)
    O += b * output_strides.batch + h * output_strides.head + i * output_strides.row
    out = tl.sum(acc, 0) / sums
    tl.store(O + d, out.to(O.dtype.element_ty), mask=d < tile.value_dim)
