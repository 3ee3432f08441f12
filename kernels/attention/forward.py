"""The forward kernel of attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common import LN2, LOG2E, dropout_keep
from .scores import (
    Indices,
    Keys,
    clamp,
    first_row,
    key_row,
    keys_of_rows,
    load_rows,
    locate_head,
    locate_sequence,
    prepare_call,
    scores,
    store_rows,
)


class _Work(NamedTuple):
    """What a program of the forward works on."""

    q: Any  # [BM, BD]
    start: Any  # the first query, i0
    i: Any  # [BM]
    r: Any  # [BM], clamped, counted from i0
    key: Any  # pointers to the first key and value of the sequence
    value: Any


@triton.jit
def _whole_tiles(i0, sequence, band, tile: tl.constexpr, has: tl.constexpr):
    """Bound the key tiles inner <= n0 < full that lie inside the length and, for all of the queries
    i0 .. i0 + BM - 1, inside the band.
    """
    shift = sequence.shift
    full = sequence.length
    if has.right:
        full = clamp(i0 + shift + band.right + 1, 0, sequence.length)
    full = full // tile.columns * tile.columns
    inner = 0
    if has.left:
        inner = tl.maximum(i0 + tile.rows - 1 + shift - band.left, 0)
        inner = (inner + tile.columns - 1) // tile.columns * tile.columns
        full = tl.maximum(full, inner)
    return inner, full


@triton.jit
def _forward_tiles(
    state, lo, hi, work, head, tile: tl.constexpr, has: tl.constexpr, EDGE: tl.constexpr
):
    """Carry the online softmax over the key tiles lo, lo + BN, .. < hi. `state` is the weighted sum
    of the values [BM, BDV], the sum of the weights [BM] and the maximum of the scores [BM].
    """
    acc, l, m = state
    strides = head.call.strides
    for n0 in tl.range(lo, hi, tile.columns):
        n0 = tl.multiple_of(n0, tile.columns)
        j = n0 + tl.arange(0, tile.columns)
        rows = j
        if tile.wide:
            rows = j.to(tl.int64)
        inside = j < head.sequence.length
        key_ok, key_bias = key_row(head, rows, inside, tile, has, EDGE)
        k = load_rows(work.key, rows, strides.key_row, inside, tile.dim, tile.dim_block, EDGE)
        s = tl.dot(work.q, tl.trans(k), input_precision=tile.precision)  # [BM, BN]
        if has.bias == 1:
            key_bias = key_bias[None, :]
        at = Indices(work.i[:, None], rows[None, :], work.r[:, None])
        s, _ = scores(s, at, Keys(key_ok[None, :], key_bias), head, tile, has, EDGE)
        m_new = tl.maximum(m, tl.max(s, 1))
        base = m_new
        if EDGE or has.mask > 0 or has.bias > 0:  # rows that have seen nothing yet
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.math.exp2(s - base[:, None])
        rescale = tl.math.exp2(m - base)
        l = l * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        if has.dropout:
            threshold = head.call.factors.threshold
            seed = head.call.seed
            keep = dropout_keep(
                seed, head.plane, work.start, n0, threshold, tile.rows, tile.columns
            )
            p = tl.where(keep, p, 0.0)
        v = load_rows(
            work.value, rows, strides.value_row, inside, tile.value_dim, tile.value_block, EDGE
        )
        if has.mask == 1 or has.bias == 1:  # 0 * NaN: a masked value may hold anything
            v = tl.where(key_ok[:, None], v, 0.0).to(v.dtype)
        acc = tl.dot(p.to(v.dtype), v, acc, tile.precision, out_dtype=tile.acc)
        m = m_new
    return acc, l, m


@triton.jit
def forward_kernel(
    inputs,
    O,
    LSE,
    STATISTICS,
    SINKS,
    extras,
    output_strides,
    strides,
    sizes,
    band,
    factors,
    tile: tl.constexpr,
    has: tl.constexpr,
):
    """Compute the output O [B, H, Sq, DV], LSE [B, H, Sq] and, beside a bias or ALiBi, STATISTICS
    [B, H, Sq, 2], of which one program owns BM queries of one (batch, head). The longest causal
    rows start first. SINKS is [H].
    """
    blocks = tl.cdiv(sizes.queries, tile.rows)
    plane = tl.program_id(0) // blocks
    i0 = (blocks - 1 - tl.program_id(0) % blocks) * tile.rows
    b = (plane // sizes.heads).to(tl.int64)
    h = (plane % sizes.heads).to(tl.int64)
    g = h // sizes.group
    sequence = locate_sequence(extras, sizes, b, has)
    queries = sequence.queries
    if has.packed:
        if i0 >= queries:
            return
    first = sequence.first_query + i0

    i = i0 + tl.arange(0, tile.rows)
    r = tl.minimum(tl.arange(0, tile.rows), queries - 1 - i0)  # past the end: the last row
    if tile.wide:
        r = r.to(tl.int64)
    base = inputs.query + b * strides.query_batch + h * strides.query_head
    base += first * strides.query_row
    q = load_rows(base, r, strides.query_row, None, tile.dim, tile.dim_block, False)
    k_base = inputs.key + b * strides.key_batch + g * strides.key_head
    k_base += sequence.first_key * strides.key_row
    v_base = inputs.value + b * strides.value_batch + g * strides.value_head
    v_base += sequence.first_key * strides.value_row
    call = prepare_call(extras, strides, sizes, band, factors, has)
    head = locate_head(call, sequence, plane, b, h, first, tile, has)
    work = _Work(q, i0, i, r, k_base, v_base)
    lo, hi = keys_of_rows(i0, sequence.length, sequence.shift, band, tile, has)
    inner, full = _whole_tiles(i0, sequence, band, tile, has)

    acc = tl.zeros([tile.rows, tile.value_block], tile.acc)
    l = tl.zeros([tile.rows], tile.acc)
    m = tl.full([tile.rows], float("-inf"), tile.acc)
    if has.sink:  # as if a first key had been seen, whose value is zero
        m = tl.zeros([tile.rows], tile.acc) + tl.load(SINKS + h).to(tile.acc) * LOG2E
        l += tl.where(m == float("-inf"), 0.0, 1.0)
    state = acc, l, m
    if has.left:
        state = _forward_tiles(state, lo, tl.minimum(inner, hi), work, head, tile, has, True)
    state = _forward_tiles(state, inner, full, work, head, tile, has, False)
    acc, l, m = _forward_tiles(state, full, hi, work, head, tile, has, True)

    empty = l == 0.0
    sums = tl.where(empty, 1.0, l)
    lse = tl.where(empty, float("-inf"), (m + tl.math.log2(sums)) * LN2)
    row = first_row(plane, h, sequence, sizes, has)
    tl.store(LSE + row + i, lse, mask=i < queries)
    if has.bias > 0 or has.alibi:
        pair = STATISTICS + (row + i) * 2
        tl.store(pair, tl.where(empty, 0.0, m), mask=i < queries)
        total = tl.where(empty, float("inf"), tl.math.log2(sums))
        tl.store(pair + 1, total, mask=i < queries)
    acc = acc * (factors.inv_keep / sums)[:, None]
    base = O + b * output_strides.batch + h * output_strides.head + first * output_strides.row
    store_rows(base, r, output_strides.row, i < queries, acc, tile.value_dim, tile.value_block)
