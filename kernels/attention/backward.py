"""The backward kernels of attention: delta, dK and dV, dQ, and the gradient of a bias."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common import LOG2E
from .bounds import (
    Shared,
    Span,
    find_bounds,
    find_bounds_of_keys,
    inside_run,
    members_that_see,
    visited_tile,
    visited_tiles,
    with_run,
    without_bounds,
)
from .lists import (
    COLUMNS,
    ROWS,
    find_slot,
    listed_keys,
    listed_members,
    listed_spans,
    listed_tile,
    load_lists,
    with_lists,
)
from .scores import (
    Indices,
    clamp,
    first_key,
    first_row,
    in_columns,
    in_rows,
    kept,
    key_row,
    keys_of_rows,
    load_rows,
    locate_block,
    locate_head,
    locate_keys,
    locate_rows,
    locate_sequence,
    prepare_call,
    scores,
    seen_keys,
    shifted,
    store_rows,
    unmasked_tiles,
)


class _Statistics(NamedTuple):
    """What the backward knows of rows of S, [BM] each: P = 2^(s - peak + offset) and
    dS = P (dP - delta). Without a bias and ALiBi peak is 0 and the offset is -lse. The offset is
    -inf, so that P is 0, for rows that see no key.
    """

    peak: Any
    offset: Any
    delta: Any


class _OwnKeys(NamedTuple):
    """The keys that a program of dK and dV owns."""

    k: Any  # [BN, BD]
    v: Any  # [BN, BDV]
    start: Any  # the first key, n0
    columns: Any  # [BN]
    keys: Any  # `Keys`, [BN, 1] each


class _HeadRows(NamedTuple):
    """Pointers to the first query of one head, its gradient and its statistics."""

    query: Any
    grad_output: Any
    grad_stride: Any
    statistics: Any  # `_Pointers`


class _Pointers(NamedTuple):
    """Pointers to the statistics of the first row of a head."""

    offset: Any
    delta: Any


class Over(NamedTuple):
    """How many sequences and heads share a bias."""

    batches: Any
    heads: Any


class _OwnQueries(NamedTuple):
    """The queries that a program of dQ owns."""

    q: Any  # [BM, BD]
    do: Any  # [BM, BDV]
    start: Any  # the first of them, i0
    i: Any  # [BM]
    r: Any  # [BM], clamped, counted from i0
    statistics: Any
    key: Any  # pointers to the first key and value of the sequence
    value: Any


class _Rows(NamedTuple):
    """Rows of a matrix: a pointer to it, their indices, the stride, and which of them exist."""

    base: Any
    index: Any
    stride: Any
    ok: Any


# ------------------------------------------------------------------------------------------- delta


@triton.jit
def delta_kernel(
    O,
    DO,
    DLSE,
    LSE,
    DELTA,
    OFFSET,
    output_strides,
    grad_strides,
    H,
    Sq,
    tile: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    SEPARATE_MAX: tl.constexpr,
):
    """One program computes BM queries of one (batch, head); a packed batch is one sequence of Tq
    queries.

    It writes DELTA_i = do_i . o_i - dlse_i from O and DO [B, H, Sq, DV] and, unless SEPARATE_MAX,
    OFFSET = -lse in base 2. For a row that sees no key these are 0 and -inf. DLSE, LSE, DELTA and
    OFFSET are [B, H, Sq].
    """
    blocks = tl.cdiv(Sq, tile.rows)
    batch_head = tl.program_id(0) // blocks
    i0 = tl.program_id(0) % blocks * tile.rows
    b = (batch_head // H).to(tl.int64)
    h = (batch_head % H).to(tl.int64)
    first = i0.to(tl.int64)
    i = i0 + tl.arange(0, tile.rows)
    r = tl.arange(0, tile.rows)
    if tile.wide:
        r = r.to(tl.int64)
    o_base = O + b * output_strides.batch + h * output_strides.head + first * output_strides.row
    ok = i < Sq
    o = load_rows(o_base, r, output_strides.row, ok, tile.value_dim, tile.value_block, True)
    do_base = DO + b * grad_strides.batch + h * grad_strides.head + first * grad_strides.row
    do = load_rows(do_base, r, grad_strides.row, ok, tile.value_dim, tile.value_block, True)
    delta = tl.sum(o.to(tile.acc) * do.to(tile.acc), 1)
    row = batch_head.to(tl.int64) * Sq
    if HAS_DLSE:
        delta -= tl.load(DLSE + row + i, mask=ok, other=0.0)
    lse = tl.load(LSE + row + i, mask=ok, other=0.0)
    empty = lse == float("-inf")
    tl.store(DELTA + row + i, tl.where(empty, 0.0, delta), mask=ok)
    if not SEPARATE_MAX:
        tl.store(OFFSET + row + i, tl.where(empty, float("-inf"), lse * -LOG2E), mask=ok)


# --------------------------------------------------------------------------------------- dK and dV


@triton.jit
def _first_statistics(OFFSET, DELTA, row, has: tl.constexpr):
    """Return pointers to the statistics of a row. With a bias or ALiBi, OFFSET holds pairs
    (maximum, minus log-sum); else it holds -lse.
    """
    return _Pointers(OFFSET + (row * 2 if has.separate_max else row), DELTA + row)


@triton.jit
def _row_statistics(pointers, i, queries, has: tl.constexpr):
    """Load the statistics of the rows i, in base 2. A row past the end has delta 0. Its P is that
    of the last row, which needs no mask, and 0 with a bias or ALiBi, whose terms could overflow
    there.
    """
    ok = i < queries
    delta = tl.load(pointers.delta + i, mask=ok, other=0.0)
    if has.separate_max:
        peak = tl.load(pointers.offset + i * 2, mask=ok, other=0.0)
        offset = tl.load(pointers.offset + i * 2 + 1, mask=ok, other=float("-inf"))
        return _Statistics(peak, offset, delta)
    else:
        offset = tl.load(pointers.offset + tl.minimum(i, queries - 1))
        return _Statistics(0.0, offset, delta)


@triton.jit
def _queries_of_keys(n0, sequence, band, tile: tl.constexpr, has: tl.constexpr):
    """Return (lo, unmasked_begin, unmasked_end, hi), all multiples of BM or hi. By length and band
    no query outside of lo <= i < hi sees a key of n0 .. n0 + BN - 1, and each query of
    unmasked_begin <= i < unmasked_end sees all of these keys.
    """
    shift = sequence.shift
    lo = 0
    unmasked_begin = 0
    if has.right:
        lo = tl.maximum(n0 - shift - band.right, 0) // tile.rows * tile.rows
        unmasked_begin = tl.maximum(n0 + tile.columns - 1 - shift - band.right, 0)
        unmasked_begin = tl.cdiv(unmasked_begin, tile.rows) * tile.rows
    hi = sequence.queries
    if has.left:
        hi = tl.minimum(hi, n0 + tile.columns - shift + band.left)
    hi = tl.where(n0 < sequence.length, tl.maximum(lo, hi), lo)
    unmasked_begin = tl.where(
        n0 + tile.columns > sequence.length, hi, clamp(unmasked_begin, lo, hi)
    )
    unmasked_end = hi
    if has.left:
        unmasked_end = tl.maximum(n0 - shift + band.left + 1, 0) // tile.rows * tile.rows
        unmasked_end = clamp(unmasked_end, unmasked_begin, hi)
    return lo, unmasked_begin, unmasked_end, hi


@triton.jit
def _dkdv_tiles(
    state, span, own, rows, head, tile: tl.constexpr, has: tl.constexpr, EDGE: tl.constexpr
):
    """Add the queries of `span` (see `forward_tiles`) of a head to the `state`: dK [BN, BD],
    dV [BN, BDV] and sum_i dS [BN]. A row past the end adds zero, because its dO and delta are zero.
    """
    dk, dv, dbias = state
    call, queries = head.call, head.sequence.queries
    inv_keep, q_stride = call.factors.inv_keep, call.strides.query_row
    STEP: tl.constexpr = 1 if has.lists or has.bounds else tile.rows
    for i0 in tl.range(span.lo, span.hi, STEP):
        if has.bounds:
            i0 = visited_tile(i0, span, call, tile.rows, has, True)
        if has.lists:
            i0, slot = listed_tile(i0, head.lists, tile.rows, ROWS, has, EDGE)
        i0 = tl.multiple_of(i0, tile.rows)
        i = i0 + tl.arange(0, tile.rows)
        r = tl.minimum(i, queries - 1)
        if tile.wide:
            r = r.to(tl.int64)
        q = load_rows(rows.query, r, q_stride, None, tile.dim, tile.dim_block, False)
        ok = i < queries
        peak, offset, delta = _row_statistics(rows.statistics, i, queries, has)
        s = tl.dot(own.k, tl.trans(q), input_precision=tile.precision)  # [BN, BM]
        at = Indices(i[None, :], own.columns[:, None], r[None, :])
        keys = own.keys
        if has.lists and EDGE:
            keys = listed_keys(keys, slot, i0, own.start, head.lists, tile, has, True)
        s, tanh = scores(s, at, keys, head, tile, has, EDGE)
        if has.separate_max:
            s -= peak[None, :]
        p = tl.math.exp2(shifted(s, offset[None, :], head, has))
        do = load_rows(
            rows.grad_output, r, rows.grad_stride, ok, tile.value_dim, tile.value_block, True
        )
        dp = tl.dot(own.v, tl.trans(do), input_precision=tile.precision)
        z = p
        if has.dropout:
            keep = tl.trans(kept(head, i0, own.start, tile, has))
            zero = 0.0
            # A zero that the compiler cannot know, as in the forward. Elsewhere it makes it spill.
            if has.bias != 1 and tile.dim_block <= 64:
                zero = inv_keep * 0.0
            z = tl.where(keep, p, zero)
            dp = tl.where(keep, dp, 0.0) * inv_keep
        dv = tl.dot(z.to(do.dtype), do, dv, tile.precision, out_dtype=tile.acc)
        ds = p * (dp - delta[None, :])
        if has.key_grad:
            dbias += tl.sum(ds, 1)
        if has.softcap:
            ds = ds * (1.0 - tanh * tanh)
        dk = tl.dot(ds.to(q.dtype), q, dk, tile.precision, out_dtype=tile.acc)
    return dk, dv, dbias


@triton.jit
def _dkdv_of_head(state, queries, bounds, own, rows, head, tile: tl.constexpr, has: tl.constexpr):
    """Add all queries of a head to the `state`; `queries` are those of `_queries_of_keys`."""
    lo, unmasked_begin, unmasked_end, hi = queries
    if has.lists:
        lists, run, whole, edge = listed_spans(
            queries, bounds, head.call, own.start, tile, has, True
        )
        if tile.split:
            RUN: tl.constexpr = inside_run(has)
            state = _dkdv_tiles(state, run, own, rows, head, tile, RUN, False)
        head = with_lists(head, lists, own.start, tile, has, True)
        if has.lists == 1:
            state = _dkdv_tiles(state, whole, own, rows, head, tile, has, False)
        return _dkdv_tiles(state, edge, own, rows, head, tile, has, True)
    elif has.bounds:
        edge, run = visited_tiles(queries, bounds, head.call, tile.rows, has, True)
        if tile.split:
            INSIDE: tl.constexpr = inside_run(has)
            # The order with the fewest spills.
            if has.mask != 1:
                state = _dkdv_tiles(state, edge, own, rows, head, tile, has, True)
                return _dkdv_tiles(state, run, own, rows, head, tile, INSIDE, False)
            else:
                state = _dkdv_tiles(state, run, own, rows, head, tile, INSIDE, False)
                return _dkdv_tiles(state, edge, own, rows, head, tile, has, True)
        else:
            return _dkdv_tiles(state, with_run(edge), own, rows, head, tile, has, True)
    elif tile.split:
        unmasked = Span(unmasked_begin, unmasked_end)
        state = _dkdv_tiles(state, unmasked, own, rows, head, tile, has, False)
        before = Span(lo, unmasked_begin)
        state = _dkdv_tiles(state, before, own, rows, head, tile, has, True)
        if has.left:
            after = Span(unmasked_end, hi)
            state = _dkdv_tiles(state, after, own, rows, head, tile, has, True)
        return state
    else:
        return _dkdv_tiles(state, Span(lo, hi), own, rows, head, tile, has, True)


@triton.jit
def backward_dkdv_kernel(
    inputs,
    DK,
    DV,
    DBIAS,
    OFFSET,
    DELTA,
    optional,
    dk_strides,
    dv_strides,
    do_strides,
    strides,
    sizes,
    band,
    factors,
    tile: tl.constexpr,
    has: tl.constexpr,
):
    """One program computes BN keys of one (batch, key-value head): their rows of DK [B, G, Sk, D]
    and DV [B, G, Sk, DV]. It loops over the queries of the heads that share them, in the transpose
    S^T = k q^T, so that dK and dV accumulate without a transpose of P.

    DELTA is [B, H, Sq], and OFFSET is [B, H, Sq] or, with a maximum of its own, [B, H, Sq, 2]. With
    `has.key_grad` it also writes DBIAS = sum_i dS of each head, [B, H, Sk], or [H, Tk] if packed.
    """
    pair, block = locate_block(tl.cdiv(sizes.keys, tile.columns), has, False)
    n0 = block * tile.columns
    groups = sizes.heads // sizes.group
    b = (pair // groups).to(tl.int64)
    g = (pair % groups).to(tl.int64)
    sequence = locate_sequence(optional, sizes, b, has)
    length = sequence.length
    keys = sizes.keys
    if has.packed:
        keys = length
        if n0 >= length:
            return
    first = sequence.first_key + n0

    c = tl.arange(0, tile.columns)
    j = n0 + c
    columns = j
    if tile.wide:
        c, columns = c.to(tl.int64), j.to(tl.int64)
    inside = j < seen_keys(sequence, band, has)
    base = inputs.key + b * strides.key_batch + g * strides.key_head + first * strides.key_row
    k = load_rows(base, c, strides.key_row, inside, tile.dim, tile.dim_block, True)
    v_base = inputs.value + b * strides.value_batch + g * strides.value_head
    v_base += first * strides.value_row
    v = load_rows(v_base, c, strides.value_row, inside, tile.value_dim, tile.value_block, True)
    call = prepare_call(optional, strides, sizes, band, factors, has)
    queries = _queries_of_keys(n0, sequence, band, tile, has)
    dk = tl.zeros([tile.columns, tile.dim_block], tile.acc)
    dv = tl.zeros([tile.columns, tile.value_block], tile.acc)
    for member in tl.range(0, sizes.group):
        h = g * sizes.group + member
        batch_head = (b * sizes.heads + h).to(tl.int32)
        q_base = inputs.query + b * strides.query_batch + h * strides.query_head
        q_base += sequence.first_query * strides.query_row
        do_base = inputs.grad_output + b * do_strides.batch + h * do_strides.head
        do_base += sequence.first_query * do_strides.row
        head = locate_head(call, sequence, batch_head, b, h, 0, tile, has)
        own_keys = key_row(head, columns, inside, tile, has, True)
        seen = v
        if has.mask == 1 or has.bias == 1:  # a masked value may be NaN, and 0 * NaN is NaN
            ok, stride = own_keys.ok, strides.value_row
            seen = load_rows(v_base, c, stride, ok, tile.value_dim, tile.value_block, True)
        own = _OwnKeys(k, seen, n0, columns, in_columns(own_keys, has))
        row = first_row(batch_head, h, sequence, sizes, has)
        statistics = _first_statistics(OFFSET, DELTA, row, has)
        rows = _HeadRows(q_base, do_base, do_strides.row, statistics)
        state = dk, dv, tl.zeros([tile.columns], tile.acc)
        bounds = find_bounds_of_keys(call, b, h, n0, sequence.queries, tile, has)
        if has.lists:
            bounds = load_lists(optional, strides, sizes, b, h, n0, True)
        dk, dv, dbias = _dkdv_of_head(state, queries, bounds, own, rows, head, tile, has)
        if has.key_grad:
            place = DBIAS + first_key(batch_head, h, sequence, sizes, has)
            tl.store(place + j, dbias, mask=j < keys)
    dk = dk * factors.scale
    if has.dropout:
        dv = dv * factors.inv_keep
    base = DK + b * dk_strides.batch + g * dk_strides.head + first * dk_strides.row
    ok = j < keys
    store_rows(base, c, dk_strides.row, ok, dk, tile.dim, tile.dim_block)
    base = DV + b * dv_strides.batch + g * dv_strides.head + first * dv_strides.row
    store_rows(base, c, dv_strides.row, ok, dv, tile.value_dim, tile.value_block)


# ---------------------------------------------------------------------------------------------- dQ


@triton.jit
def _probabilities(
    s, at, keys, statistics, head, tile: tl.constexpr, has: tl.constexpr, EDGE: tl.constexpr
):
    """Return P and the tanh of the softcap, [BM, BN] each, from s = q . k. `keys` are [BN], or
    broadcast against these, and `statistics` are [BM].
    """
    at = Indices(at.i[:, None], at.j[None, :], at.r[:, None])
    if len(keys.ok.shape) == 1:
        s, tanh = scores(s, at, in_rows(keys, has), head, tile, has, EDGE)
    else:
        s, tanh = scores(s, at, keys, head, tile, has, EDGE)
    if has.separate_max:
        s -= statistics.peak[:, None]
    return tl.math.exp2(shifted(s, statistics.offset[:, None], head, has)), tanh


@triton.jit
def _score_gradient(p, dp, delta, corner, head, tile: tl.constexpr, has: tl.constexpr):
    """Return dS = P (dP - delta) [BM, BN] of the tile at (i0, n0) = corner, from P and do . v."""
    if has.dropout:
        i0, n0 = corner
        dp = tl.where(kept(head, i0, n0, tile, has), dp, 0.0) * head.call.factors.inv_keep
    return p * (dp - delta[:, None])


@triton.jit
def _dq_tiles(
    dq,
    span,
    own,
    head,
    tile: tl.constexpr,
    has: tl.constexpr,
    EDGE: tl.constexpr,
    SKIP: tl.constexpr,
):
    """Add the key tiles of `span` (see `forward_tiles`) to dQ [BM, BD]. With SKIP masked keys and
    values are not loaded and count as zero.
    """
    strides = head.call.strides
    STAGES: tl.constexpr = 1 if SKIP and tile.recompute_masked else None
    GUARD: tl.constexpr = EDGE or SKIP
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
        exists = keys.ok if SKIP else inside
        k = load_rows(own.key, rows, strides.key_row, exists, tile.dim, tile.dim_block, GUARD)
        v = load_rows(
            own.value, rows, strides.value_row, exists, tile.value_dim, tile.value_block, GUARD
        )
        s = tl.dot(own.q, tl.trans(k), input_precision=tile.precision)
        at = Indices(own.i, rows, own.r)
        if has.lists and EDGE:
            keys = in_rows(keys, has)
            keys = listed_keys(keys, slot, own.start, n0, head.lists, tile, has, False)
        p, tanh = _probabilities(s, at, keys, own.statistics, head, tile, has, EDGE)
        dp = tl.dot(own.do, tl.trans(v), input_precision=tile.precision)
        ds = _score_gradient(p, dp, own.statistics.delta, (own.start, n0), head, tile, has)
        if has.softcap:
            ds = ds * (1.0 - tanh * tanh)
        dq = tl.dot(ds.to(k.dtype), k, dq, tile.precision, out_dtype=tile.acc)
    return dq


@triton.jit
def _dq_listed(
    dq, tiles, lists, own, head, tile: tl.constexpr, has: tl.constexpr, SKIP: tl.constexpr
):
    """Add the tiles that a block mask leaves to dQ, see `split_at_run`."""
    lists, run, whole, edge = listed_spans(tiles, lists, head.call, own.start, tile, has, False)
    INSIDE: tl.constexpr = inside_run(has)
    dq = _dq_tiles(dq, run, own, head, tile, INSIDE, False, SKIP)
    head = with_lists(head, lists, own.start, tile, has, False)
    if has.lists == 1:
        dq = _dq_tiles(dq, whole, own, head, tile, has, False, SKIP)
    return _dq_tiles(dq, edge, own, head, tile, has, True, SKIP)


@triton.jit
def backward_dq_kernel(
    inputs,
    DQ,
    OFFSET,
    DELTA,
    optional,
    dq_strides,
    do_strides,
    strides,
    sizes,
    band,
    factors,
    tile: tl.constexpr,
    has: tl.constexpr,
):
    """One program computes BM queries of one (batch, head): their rows of DQ [B, H, Sq, D]. DELTA
    is [B, H, Sq], and OFFSET is [B, H, Sq] or, with a maximum of its own, [B, H, Sq, 2].
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
    r = tl.minimum(tl.arange(0, tile.rows), queries - 1 - i0)
    if tile.wide:
        r = r.to(tl.int64)
    ok = i < queries
    base = inputs.query + b * strides.query_batch + h * strides.query_head
    base += first * strides.query_row
    q = load_rows(base, r, strides.query_row, None, tile.dim, tile.dim_block, False)
    base = inputs.grad_output + b * do_strides.batch + h * do_strides.head + first * do_strides.row
    do = load_rows(base, r, do_strides.row, None, tile.value_dim, tile.value_block, False)
    row = first_row(batch_head, h, sequence, sizes, has)
    pointers = _first_statistics(OFFSET, DELTA, row, has)
    statistics = _row_statistics(pointers, i, queries, has)
    k_base, v_base = locate_keys(inputs, strides, sequence, b, g)
    call = prepare_call(optional, strides, sizes, band, factors, has)
    head = locate_head(call, sequence, batch_head, b, h, first, tile, has)
    own = _OwnQueries(q, do, i0, i, r, statistics, k_base, v_base)

    MASKED: tl.constexpr = has.mask == 1 or has.bias == 1
    SKIP: tl.constexpr = MASKED and not tile.recompute_masked
    start = tl.zeros([tile.rows, tile.dim_block], tile.acc)
    dq = start
    i1 = i0 + tile.rows
    lo, hi = keys_of_rows(i0, i1, sequence.length, sequence.shift, band, tile, has)
    unmasked_begin, unmasked_end = unmasked_tiles(i0, sequence, band, tile, has)
    tiles = lo, unmasked_begin, unmasked_end, hi
    if has.lists:
        dq = _dq_listed(dq, tiles, bounds, own, head, tile, has, SKIP)
    elif has.bounds:
        INSIDE: tl.constexpr = inside_run(has)
        edge, run = visited_tiles(tiles, bounds, head.call, tile.columns, has, False)
        RUN_SKIP: tl.constexpr = SKIP and INSIDE.bias == 1
        dq = _dq_tiles(dq, run, own, head, tile, INSIDE, False, RUN_SKIP)
        dq = _dq_tiles(dq, edge, own, head, tile, has, True, SKIP)
    else:
        if has.left:
            edge = Span(lo, tl.minimum(unmasked_begin, hi))
            dq = _dq_tiles(dq, edge, own, head, tile, has, True, SKIP)
        unmasked = Span(unmasked_begin, unmasked_end)
        dq = _dq_tiles(dq, unmasked, own, head, tile, has, False, SKIP)
        dq = _dq_tiles(dq, Span(unmasked_end, hi), own, head, tile, has, True, SKIP)
    if MASKED and tile.recompute_masked:  # a masked key or value may be NaN, and 0 * NaN is NaN
        total = tl.sum(dq)
        if total != total:
            if has.lists:
                dq = _dq_listed(start, tiles, bounds, own, head, tile, has, True)
            else:
                ALL: tl.constexpr = without_bounds(has)  # a list takes more registers here
                dq = _dq_tiles(start, Span(lo, hi), own, head, tile, ALL, True, True)
    dq = dq * factors.scale
    base = DQ + b * dq_strides.batch + h * dq_strides.head + first * dq_strides.row
    store_rows(base, r, dq_strides.row, ok, dq, tile.dim, tile.dim_block)


# ------------------------------------------------------------------------- the gradient of a bias


@triton.jit
def _product(x, y, D: tl.constexpr, BD: tl.constexpr, tile: tl.constexpr):
    """Return the products of the rows x and the rows y of matrices [.., D]; 0 where `y.ok` is
    False.

    It multiplies 128 elements of a row at a time, and 32 in float32, where the three tf32 parts of
    each operand would fill the registers.
    """
    SINGLE: tl.constexpr = x.base.dtype.element_ty == tl.float32
    WIDTH: tl.constexpr = min(BD, 32 if SINGLE else 128)
    s = tl.zeros([x.index.shape[0], y.index.shape[0]], tile.acc)
    for d in tl.static_range(0, BD, WIDTH):
        left = load_rows(x.base + d, x.index, x.stride, x.ok, min(D - d, WIDTH), WIDTH, False)
        right = load_rows(y.base + d, y.index, y.stride, y.ok, min(D - d, WIDTH), WIDTH, True)
        s = tl.dot(left, tl.trans(right), s, tile.precision, out_dtype=tile.acc)
    return s


@triton.jit
def _members_of_tile(call, shared, i0, n0, tile: tl.constexpr, has: tl.constexpr):
    """Return (begin, end): no other member of those that share a bias sees a key of the tile at
    (i0, n0).
    """
    sizes, begin, end = call.sizes, 0, shared.members
    if not has.bottom_right:  # a tile outside of the band, whatever the length, is zero
        lo, hi = keys_of_rows(i0, i0 + tile.rows, sizes.keys, 0, call.band, tile, has)
        end = tl.where((n0 >= lo) & (n0 < hi), end, 0)
    seen = Shared(shared.batch, shared.head, shared.heads, end)
    if has.lists:
        begin, end = listed_members(call, seen, i0, n0)
    elif has.bounds:
        begin, end = members_that_see(call.optional, call.strides, seen, i0, n0, tile)
    return begin, end


@triton.jit
def backward_dbias_kernel(
    inputs,
    DBIAS,
    OFFSET,
    DELTA,
    optional,
    dbias_strides,
    over,
    do_strides,
    strides,
    sizes,
    band,
    factors,
    tile: tl.constexpr,
    has: tl.constexpr,
):
    """One program computes a tile BM x BN of DBIAS [B or 1, H or 1, Sq, Sk]: the sum of dS over the
    `over.batches` sequences and `over.heads` heads that share it. DELTA is [B, H, Sq] and OFFSET
    [B, H, Sq, 2].
    """
    across = tl.cdiv(sizes.keys, tile.columns)
    blocks = across * tl.cdiv(sizes.queries, tile.rows)
    i0 = tl.program_id(0) % blocks // across * tile.rows
    n0 = tl.program_id(0) % across * tile.columns
    owner = tl.program_id(0) // blocks
    own_b = (owner // (sizes.heads // over.heads)).to(tl.int64)
    own_h = (owner % (sizes.heads // over.heads)).to(tl.int64)
    first = i0.to(tl.int64)
    column = n0.to(tl.int64)

    i = i0 + tl.arange(0, tile.rows)
    r = tl.minimum(tl.arange(0, tile.rows), sizes.queries - 1 - i0)
    j = n0 + tl.arange(0, tile.columns)
    c = tl.arange(0, tile.columns)
    rows = j
    if tile.wide:
        r, c, rows = r.to(tl.int64), c.to(tl.int64), j.to(tl.int64)
    ok = i < sizes.queries
    call = prepare_call(optional, strides, sizes, band, factors, has)
    shared = Shared(own_b, own_h, over.heads, over.batches * over.heads)
    begin, end = _members_of_tile(call, shared, i0, n0, tile, has)

    dbias = tl.zeros([tile.rows, tile.columns], tile.acc)
    for member in tl.range(begin, end):
        b = own_b + member // over.heads
        h = own_h + member % over.heads
        g = h // sizes.group
        batch_head = (b * sizes.heads + h).to(tl.int32)
        sequence = locate_sequence(optional, sizes, b, has)
        inside = j < sequence.length
        q_base = inputs.query + b * strides.query_batch + h * strides.query_head
        q_base += first * strides.query_row
        do_base = inputs.grad_output + b * do_strides.batch + h * do_strides.head
        do_base += first * do_strides.row
        k_base = inputs.key + b * strides.key_batch + g * strides.key_head
        k_base += column * strides.key_row
        v_base = inputs.value + b * strides.value_batch + g * strides.value_head
        v_base += column * strides.value_row
        q = _Rows(q_base, r, strides.query_row, ok)
        k = _Rows(k_base, c, strides.key_row, inside)
        s = _product(q, k, tile.dim, tile.dim_block, tile)
        do = _Rows(do_base, r, do_strides.row, ok)
        v = _Rows(v_base, c, strides.value_row, inside)
        dp = _product(do, v, tile.value_dim, tile.value_block, tile)
        row = first_row(batch_head, h, sequence, sizes, has)
        pointers = _first_statistics(OFFSET, DELTA, row, has)
        statistics = _row_statistics(pointers, i, sizes.queries, has)
        head = locate_head(call, sequence, batch_head, b, h, first, tile, has)
        keys = key_row(head, rows, inside, tile, has, True)
        if has.mask == 1:  # a masked value may be NaN, and 0 * NaN is NaN
            dp = tl.where(keys.ok[None, :], dp, 0.0)
        if has.lists:
            lists = load_lists(optional, strides, sizes, b, h, i0, False)
            keys = in_rows(keys, has)
            keys = listed_keys(keys, find_slot(lists, n0), i0, n0, lists, tile, has, False)
        p, _ = _probabilities(s, Indices(i, rows, r), keys, statistics, head, tile, has, True)
        dbias += _score_gradient(p, dp, statistics.delta, (i0, n0), head, tile, has)
    base = DBIAS + own_b * dbias_strides.batch + own_h * dbias_strides.head
    base = base + first * dbias_strides.row + column
    index = tl.arange(0, tile.rows)[:, None].to(tl.int64)
    pointers = base + (index * dbias_strides.row + tl.arange(0, tile.columns)[None, :])
    mask = ok[:, None] & (j < sizes.keys)[None, :]
    tl.store(pointers, dbias.to(DBIAS.dtype.element_ty), mask=mask)
