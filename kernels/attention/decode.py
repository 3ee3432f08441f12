"""Split-KV attention: few queries to many keys (Dao et al. 2023, "Flash-Decoding for long-context
inference").

With few queries, one program for each head would leave most of a GPU idle. So `split_kernel`
divides the keys of a head into parts, with one program each, which writes for its part s the
weighted sum o_s of the values, the sum l_s of the weights and the maximum m_s of the scores.
`merge_kernel` then computes
    m = max_s m_s        l = sum_s 2^(m_s - m) l_s        o = sum_s 2^(m_s - m) o_s / l
always in the same order, so that the result is deterministic. The query heads that share a
key-value head share a tile, so that each key is read once: row r of the tile is query r // heads of
head r % heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common import LOG2E
from .bounds import Span, entries_within, load_bounds
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


class Split(NamedTuple):
    """How the work is divided among programs."""

    heads: Any  # query heads of one tile, which share their keys
    parts: Any  # parts of the keys, with one program each


@triton.jit
def _part(lo, hi, s, parts, WIDTH: tl.constexpr):
    """Return (begin, end) of part s of the keys lo <= j < hi. A part holds complete tiles of WIDTH
    keys, and the numbers of tiles of two parts differ by at most one. If hi <= lo all parts are
    empty.
    """
    tiles = tl.cdiv(hi - lo, WIDTH)
    first = s * (tiles // parts) + tl.minimum(s, tiles % parts)
    last = first + tiles // parts + (s < tiles % parts).to(tl.int32)
    return lo + first * WIDTH, lo + last * WIDTH


@triton.jit
def split_kernel(
    inputs,
    SUMS,
    WEIGHTS,
    optional,
    strides,
    sizes,
    band,
    factors,
    split,
    tile: tl.constexpr,
    has: tl.constexpr,
):
    """One program computes BM rows of one part of the keys: SUMS [B, H, Sq, parts, DV], the
    weighted sums of the values, and WEIGHTS [B, H, Sq, parts, 2], the sums of the weights and the
    maxima of the scores. A row that sees no key of the part leaves its SUMS unwritten.
    """
    blocks = tl.cdiv(sizes.queries * split.heads, tile.rows)
    start = tl.program_id(0) % blocks * tile.rows
    s = tl.program_id(0) // blocks % split.parts
    batch_head = tl.program_id(0) // blocks // split.parts
    b = (batch_head // (sizes.heads // split.heads)).to(tl.int64)
    first = (batch_head % (sizes.heads // split.heads) * split.heads).to(tl.int64)
    g = first // sizes.group
    sequence = locate_sequence(optional, sizes, b, has)
    r = start + tl.arange(0, tile.rows)
    ok = r < sizes.queries * split.heads
    r = tl.minimum(r, sizes.queries * split.heads - 1)  # past the end: the last row
    i = r // split.heads
    h = first + r % split.heads

    base = inputs.query + b * strides.query_batch
    places = h * strides.query_head + i * strides.query_row.to(tl.int64)
    q = load_rows(base, places, 1, None, tile.dim, tile.dim_block, False)
    k_base = inputs.key + b * strides.key_batch + g * strides.key_head
    v_base = inputs.value + b * strides.value_batch + g * strides.value_head
    call = prepare_call(optional, strides, sizes, band, factors, has)
    head = locate_head(call, sequence, batch_head, b, first, 0, tile, has)
    rows = locate_head(call, sequence, batch_head, b, h[:, None], 0, tile, has)
    mask = rows.mask if has.mask == 2 else head.mask
    bias = rows.bias if has.bias == 2 else head.bias
    head = Head(head.draws, mask, bias, rows.slope, sequence, call)
    work = Work(q, 0, i, i.to(tl.int64) if tile.wide else i, k_base, v_base)

    acc = tl.zeros([tile.rows, tile.value_block], tile.acc)
    l = tl.zeros([tile.rows], tile.acc)
    m = tl.full([tile.rows], float("-inf"), tile.acc)
    end = tl.minimum(start + tile.rows - 1, sizes.queries * split.heads - 1) // split.heads + 1
    i0 = start // split.heads
    lo, hi = keys_of_rows(i0, end, sequence.length, sequence.shift, band, tile, has)
    WIDTH: tl.constexpr = 1 if has.bounds else tile.columns
    if has.bounds:
        bounds = load_bounds(optional, strides, b, first, 0, has)
        lo, hi = lo // tile.columns, tl.cdiv(hi, tile.columns)
        lo, hi = entries_within(optional.starts, bounds.begin, bounds.end, lo, hi)
    begin, last = _part(lo, hi, s, split.parts, WIDTH)
    span = Span(begin, last)
    MASKED: tl.constexpr = has.mask == 1 or has.bias == 1
    acc, l, m = forward_tiles((acc, l, m), span, work, head, tile, has, True, MASKED)
    if has.fold_scale:
        m = m * call.scale
    place = ((b * sizes.heads + h) * sizes.queries + i) * split.parts + s
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
    """One program merges the parts of one row, BM parts at a time: it computes the row of O
    [B, H, Sq, DV], LSE and STATISTICS that the forward kernel would.
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
