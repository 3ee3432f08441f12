"""The forward kernel of attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common import LOG2E
from .bounds import (
    Span,
    find_bounds,
    inside_run,
    visited_tile,
    visited_tiles,
    with_run,
)
from .lists import COLUMNS, listed_keys, listed_spans, listed_tile, load_lists, with_lists
from .scores import (
    Indices,
    first_row,
    in_rows,
    kept,
    key_row,
    keys_of_rows,
    load_rows,
    locate_head,
    locate_keys,
    locate_rows,
    locate_sequence,
    prepare_call,
    scores,
    shifted,
    store_rows,
    store_sums,
    unmasked_tiles,
)


class Work(NamedTuple):
    """The queries of a program, and where its keys begin."""

    q: Any  # [BM, BD]
    start: Any  # the first query, i0
    i: Any  # [BM]
    r: Any  # [BM], clamped, counted from i0
    key: Any  # pointers to the first key and value of the sequence
    value: Any


@triton.jit
def forward_tiles(
    state,
    span,
    work,
    head,
    tile: tl.constexpr,
    has: tl.constexpr,
    EDGE: tl.constexpr,
    SKIP: tl.constexpr,
):
    """Update the online softmax with the tiles of keys of a `Span`, see bounds.py, or of the lists
    of a block mask, see lists.py.
    `state` is the weighted sum of the values [BM, BDV], the sum of the weights [BM] and the running
    maximum of the scores [BM]. With SKIP the values of masked keys are not loaded and count as
    zero.
    """
    acc, l, m = state
    strides = head.call.strides
    STAGES: tl.constexpr = 1 if SKIP and tile.recompute_masked else None
    STEP: tl.constexpr = 1 if has.lists or has.bounds else tile.columns
    for n0 in tl.range(span.lo, span.hi, STEP, num_stages=STAGES):
        if has.bounds:
            n0 = visited_tile(n0, span, head.call, tile.columns, has, False)
        if has.lists:
            n0, slot = listed_tile(n0, head.lists, tile.columns, COLUMNS, has, EDGE)
        n0 = tl.multiple_of(n0, tile.columns)
        j = n0 + tl.arange(0, tile.columns)
        rows = j
        if tile.wide:
            rows = j.to(tl.int64)
        inside = j < head.sequence.length
        keys = key_row(head, rows, inside, tile, has, EDGE)
        k = load_rows(work.key, rows, strides.key_row, inside, tile.dim, tile.dim_block, EDGE)
        s = tl.dot(work.q, tl.trans(k), input_precision=tile.precision)  # [BM, BN]
        at = Indices(work.i[:, None], rows[None, :], work.r[:, None])
        if has.lists and EDGE:
            shown = in_rows(keys, has)
            shown = listed_keys(shown, slot, work.start, n0, head.lists, tile, has, False)
            s, _ = scores(s, at, shown, head, tile, has, EDGE)
        else:
            s, _ = scores(s, at, in_rows(keys, has), head, tile, has, EDGE)
        m_new = tl.maximum(m, tl.max(s, 1))
        base = m_new
        if EDGE or has.mask > 0 or has.bias > 0:  # a row without a key so far: -inf - -inf is NaN
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
        offset = base * -head.call.scale if has.fold_scale else -base
        p = tl.math.exp2(shifted(s, offset[:, None], head, has))
        rescale = tl.math.exp2(shifted(m, offset, head, has))
        if has.invariant:  # to any number of hidden tiles; a folded scale leaves a rounding error
            rescale = tl.where(m == m_new, 1.0, rescale)
        l = l * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        if has.dropout:
            keep = kept(head, work.start, n0, tile, has)
            # A zero that the compiler cannot know: with a constant it selects among 16-bit
            # elements, two of which share a register, and unpacks them first.
            p = tl.where(keep, p, head.call.factors.inv_keep * 0.0)
        exists = keys.ok if SKIP else inside
        GUARD: tl.constexpr = EDGE or SKIP
        v = load_rows(
            work.value, rows, strides.value_row, exists, tile.value_dim, tile.value_block, GUARD
        )
        acc = tl.dot(p.to(v.dtype), v, acc, tile.precision, out_dtype=tile.acc)
        m = m_new
    return acc, l, m


@triton.jit
def _listed_tiles(
    state, tiles, lists, work, head, tile: tl.constexpr, has: tl.constexpr, SKIP: tl.constexpr
):
    """Update the online softmax with the tiles that a block mask leaves, see `split_at_run`."""
    lists, run, whole, edge = listed_spans(tiles, lists, head.call, work.start, tile, has, False)
    INSIDE: tl.constexpr = inside_run(has)
    state = forward_tiles(state, run, work, head, tile, INSIDE, False, SKIP)
    head = with_lists(head, lists, work.start, tile, has, False)
    if has.lists == 1:
        state = forward_tiles(state, whole, work, head, tile, has, False, SKIP)
    return forward_tiles(state, edge, work, head, tile, has, True, SKIP)


@triton.jit
def _forward_keys(start, work, head, bounds, tile: tl.constexpr, has: tl.constexpr):
    """Update the online softmax `start` with all keys that the queries may see: first those that
    the left side of the band cuts, then the tiles that need no mask, then the rest.
    """
    sequence, band = head.sequence, head.call.band
    end = work.start + tile.rows
    lo, hi = keys_of_rows(work.start, end, sequence.length, sequence.shift, band, tile, has)
    unmasked_begin, unmasked_end = unmasked_tiles(work.start, sequence, band, tile, has)
    MASKED: tl.constexpr = has.mask == 1 or has.bias == 1
    SKIP: tl.constexpr = MASKED and not tile.recompute_masked
    state = start
    tiles = lo, unmasked_begin, unmasked_end, hi
    if has.lists:
        state = _listed_tiles(state, tiles, bounds, work, head, tile, has, SKIP)
    elif has.bounds:
        INSIDE: tl.constexpr = inside_run(has)
        edge, run = visited_tiles(tiles, bounds, head.call, tile.columns, has, False)
        RUN_SKIP: tl.constexpr = SKIP and INSIDE.bias == 1
        state = forward_tiles(state, run, work, head, tile, INSIDE, False, RUN_SKIP)
        state = forward_tiles(state, edge, work, head, tile, has, True, SKIP)
    else:
        if has.left:
            edge = Span(lo, tl.minimum(unmasked_begin, hi))
            state = forward_tiles(state, edge, work, head, tile, has, True, SKIP)
        unmasked = Span(unmasked_begin, unmasked_end)
        state = forward_tiles(state, unmasked, work, head, tile, has, False, SKIP)
        state = forward_tiles(state, Span(unmasked_end, hi), work, head, tile, has, True, SKIP)
    if MASKED and tile.recompute_masked:  # a masked value may be NaN, and 0 * NaN is NaN
        total = tl.sum(state[0])
        if total != total:
            if has.lists:
                state = _listed_tiles(start, tiles, bounds, work, head, tile, has, True)
            else:
                every = with_run(edge) if has.bounds else Span(lo, hi)
                state = forward_tiles(start, every, work, head, tile, has, True, True)
    return state


@triton.jit
def forward_kernel(
    inputs,
    O,
    LSE,
    STATISTICS,
    SINKS,
    optional,
    output_strides,
    strides,
    sizes,
    band,
    factors,
    tile: tl.constexpr,
    has: tl.constexpr,
):
    """One program computes BM queries of one (batch, head): their rows of the output O [B, H, Sq,
    DV], of LSE [B, H, Sq] and, with a bias or ALiBi, of STATISTICS [B, H, Sq, 2]. SINKS is [H].
    """
    batch_head, i0, b, h, g = locate_rows(sizes, tile, has)
    sequence = locate_sequence(optional, sizes, b, has)
    queries = sequence.queries
    if has.packed:
        if i0 >= queries:
            return
    first = sequence.first_query + i0
    bounds = find_bounds(optional, strides, sizes, b, h, i0, tile, has)
    if has.lists:
        bounds = load_lists(optional, strides, sizes, b, h, i0, False)

    i = i0 + tl.arange(0, tile.rows)
    r = tl.minimum(tl.arange(0, tile.rows), queries - 1 - i0)  # past the end: the last row
    if tile.wide:
        r = r.to(tl.int64)
    base = inputs.query + b * strides.query_batch + h * strides.query_head
    base += first * strides.query_row
    q = load_rows(base, r, strides.query_row, None, tile.dim, tile.dim_block, False)
    k_base, v_base = locate_keys(inputs, strides, sequence, b, g)
    call = prepare_call(optional, strides, sizes, band, factors, has)
    head = locate_head(call, sequence, batch_head, b, h, first, tile, has)
    work = Work(q, i0, i, r, k_base, v_base)
    acc = tl.zeros([tile.rows, tile.value_block], tile.acc)
    l = tl.zeros([tile.rows], tile.acc)
    m = tl.full([tile.rows], float("-inf"), tile.acc)
    if has.sink:  # a sink is a first key whose value is zero
        m = tl.zeros([tile.rows], tile.acc) + tl.load(SINKS + h).to(tile.acc) * LOG2E
        if has.fold_scale:
            m = m / call.scale
        l += tl.where(m == float("-inf"), 0.0, 1.0)
    acc, l, m = _forward_keys((acc, l, m), work, head, bounds, tile, has)
    if has.fold_scale:
        m = m * call.scale

    row = first_row(batch_head, h, sequence, sizes, has)
    sums = store_sums(LSE, STATISTICS, row + i, i < queries, m, l, has)
    acc = acc * (factors.inv_keep / sums)[:, None]
    base = O + b * output_strides.batch + h * output_strides.head + first * output_strides.row
    store_rows(base, r, output_strides.row, i < queries, acc, tile.value_dim, tile.value_block)
