"""The backward kernels of attention: delta, dK and dV, dQ, and the gradient of a bias."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common import LOG2E, dropout_keep
from .scores import (
    Indices,
    Keys,
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


class _Statistics(NamedTuple):
    """Of rows of S: P = 2^(s - peak - lse), and dS = P (dP - delta). [BM] each; peak may be 0."""

    peak: Any
    lse: Any
    delta: Any


class _OwnKeys(NamedTuple):
    """The keys that a program of dK and dV owns."""

    k: Any  # [BN, BD]
    v: Any  # [BN, BDV]
    start: Any  # the first of them, n0
    columns: Any  # [BN]
    ok: Any  # [BN], as in `Keys`
    bias: Any  # [BN, 1]


class _HeadRows(NamedTuple):
    """Pointers to what a program of dK and dV reads of the queries of one head."""

    query: Any
    grad_output: Any
    grad_stride: Any
    lse: Any
    delta: Any
    first: Any  # where the rows of the head begin in lse and delta


class Over(NamedTuple):
    """How many batches and heads share a bias."""

    batches: Any
    heads: Any


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
    DELTA,
    output_strides,
    grad_strides,
    H,
    Sq,
    tile: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):
    """Compute delta_i = do_i . o_i - dlse_i, [B, H, Sq] as DLSE, from O and DO [B, H, Sq, DV].

    One program owns BM queries of one (batch, head); a packed batch is one batch of Tq queries.
    """
    blocks = tl.cdiv(Sq, tile.rows)
    plane = tl.program_id(0) // blocks
    i0 = tl.program_id(0) % blocks * tile.rows
    b = (plane // H).to(tl.int64)
    h = (plane % H).to(tl.int64)
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
    row = plane.to(tl.int64) * Sq
    if HAS_DLSE:
        delta -= tl.load(DLSE + row + i, mask=ok, other=0.0)
    tl.store(DELTA + row + i, delta, mask=ok)


# --------------------------------------------------------------------------------------- dK and dV


@triton.jit
def _row_statistics(LSE, DELTA, row, i, ok, has: tl.constexpr):
    """Load the statistics of the rows. lse is +inf, so that P is zero, for rows past the end and
    for those that see nothing.

    Beside a bias or ALiBi, LSE holds pairs, the maximum and the log-sum; else lse alone, and the
    peak is 0.
    """
    delta = tl.load(DELTA + row + i, mask=ok, other=0.0)
    if has.bias > 0 or has.alibi:
        peak = tl.load(LSE + (row + i) * 2, mask=ok, other=0.0)
        lse = tl.load(LSE + (row + i) * 2 + 1, mask=ok, other=float("inf"))
        return _Statistics(peak, lse, tl.where(lse == float("inf"), 0.0, delta))
    else:
        lse = tl.load(LSE + row + i, mask=ok, other=float("-inf"))
        empty = lse == float("-inf")
        lse = tl.where(empty, float("inf"), lse * LOG2E)
        return _Statistics(0.0, lse, tl.where(empty, 0.0, delta))


@triton.jit
def _queries_of_keys(n0, sequence, band, tile: tl.constexpr, has: tl.constexpr):
    """Bound the queries lo <= i < hi that may see any of the keys n0 .. n0 + BN - 1 by length and
    band; lo is a multiple of BM.
    """
    shift = sequence.shift
    lo = 0
    if has.right:
        lo = tl.maximum(n0 - shift - band.right, 0) // tile.rows * tile.rows
    hi = sequence.queries
    if has.left:
        hi = tl.minimum(hi, n0 + tile.columns - shift + band.left)
    if has.lengths:
        hi = tl.where(n0 < sequence.length, hi, 0)
    return lo, hi


@triton.jit
def _dkdv_of_head(state, lo, hi, own, rows, head, tile: tl.constexpr, has: tl.constexpr):
    """Add what the queries lo <= i < hi of a head give to dK [BN, BD], dV [BN, BDV] and sum_i dS
    [BN], the `state`.
    """
    dk, dv, dbias = state
    call, queries = head.call, head.sequence.queries
    inv_keep, q_stride = call.factors.inv_keep, call.strides.query_row
    for i0 in tl.range(lo, hi, tile.rows):
        i0 = tl.multiple_of(i0, tile.rows)
        i = i0 + tl.arange(0, tile.rows)
        r = tl.minimum(i, queries - 1)
        if tile.wide:
            r = r.to(tl.int64)
        q = load_rows(rows.query, r, q_stride, None, tile.dim, tile.dim_block, False)
        peak, lse, delta = _row_statistics(rows.lse, rows.delta, rows.first, i, i < queries, has)
        s = tl.dot(own.k, tl.trans(q), input_precision=tile.precision)  # [BN, BM]
        at = Indices(i[None, :], own.columns[:, None], r[None, :])
        s, tanh = scores(s, at, Keys(own.ok[:, None], own.bias), head, tile, has, True)
        if has.bias > 0 or has.alibi:
            s -= peak[None, :]
        p = tl.math.exp2(s - lse[None, :])
        do = load_rows(
            rows.grad_output, r, rows.grad_stride, None, tile.value_dim, tile.value_block, False
        )
        dp = tl.dot(own.v, tl.trans(do), input_precision=tile.precision)
        z = p
        if has.dropout:
            threshold = call.factors.threshold
            keep = dropout_keep(
                call.seed, head.plane, i0, own.start, threshold, tile.rows, tile.columns
            )
            keep = tl.trans(keep)
            z = tl.where(keep, p, 0.0)
            dp = tl.where(keep, dp, 0.0) * inv_keep
        dv = tl.dot(z.to(do.dtype), do, dv, tile.precision, out_dtype=tile.acc)
        if has.mask == 1 or has.bias == 1:  # 0 * NaN: a masked key or value may hold anything
            dp = tl.where(own.ok[:, None], dp, 0.0)
        ds = p * (dp - delta[None, :])
        if has.key_grad:
            dbias += tl.sum(ds, 1)
        if has.softcap:
            ds = ds * (1.0 - tanh * tanh)
        dk = tl.dot(ds.to(q.dtype), q, dk, tile.precision, out_dtype=tile.acc)
    return dk, dv, dbias


@triton.jit
def backward_dkdv_kernel(
    inputs,
    DK,
    DV,
    DBIAS,
    LSE,
    DELTA,
    extras,
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
    """Compute DK [B, G, Sk, D] and DV [B, G, Sk, DV] from DELTA [B, H, Sq] and LSE, [B, H, Sq], or
    [B, H, Sq, 2] with the maximum apart.

    One program owns BN keys of one (batch, key-value head) and walks the queries of its heads, in
    S^T = k q^T. With `has.key_grad` it also writes DBIAS, sum_i dS of each head, [B, H, Sk].
    """
    blocks = tl.cdiv(sizes.keys, tile.columns)
    pair = tl.program_id(0) // blocks
    n0 = tl.program_id(0) % blocks * tile.columns
    groups = sizes.heads // sizes.group
    b = (pair // groups).to(tl.int64)
    g = (pair % groups).to(tl.int64)
    sequence = locate_sequence(extras, sizes, b, has)
    length = sequence.length
    keys = sizes.keys
    if has.packed:
        keys = length
        if n0 >= length:
            return
    first = sequence.first_key + n0

    j = n0 + tl.arange(0, tile.columns)
    c = tl.arange(0, tile.columns)
    columns = j
    if tile.wide:
        c = c.to(tl.int64)
        columns = j.to(tl.int64)
    inside = j < length
    base = inputs.key + b * strides.key_batch + g * strides.key_head + first * strides.key_row
    k = load_rows(base, c, strides.key_row, inside, tile.dim, tile.dim_block, True)
    base = inputs.value + b * strides.value_batch + g * strides.value_head
    base += first * strides.value_row
    v = load_rows(base, c, strides.value_row, inside, tile.value_dim, tile.value_block, True)
    call = prepare_call(extras, strides, sizes, band, factors, has)
    lo, hi = _queries_of_keys(n0, sequence, band, tile, has)

    dk = tl.zeros([tile.columns, tile.dim_block], tile.acc)
    dv = tl.zeros([tile.columns, tile.value_block], tile.acc)
    for member in tl.range(0, sizes.group):
        h = g * sizes.group + member
        plane = (b * sizes.heads + h).to(tl.int32)
        q_base = inputs.query + b * strides.query_batch + h * strides.query_head
        q_base += sequence.first_query * strides.query_row
        do_base = inputs.grad_output + b * do_strides.batch + h * do_strides.head
        do_base += sequence.first_query * do_strides.row
        head = locate_head(call, sequence, plane, b, h, 0, tile, has)
        row = first_row(plane, h, sequence, sizes, has)
        key_ok, key_bias = key_row(head, columns, inside, tile, has, True)
        if has.bias == 1:
            key_bias = key_bias[:, None]
        own = _OwnKeys(k, v, n0, columns, key_ok, key_bias)
        rows = _HeadRows(q_base, do_base, do_strides.row, LSE, DELTA, row)
        state = dk, dv, tl.zeros([tile.columns], tile.acc)
        dk, dv, dbias = _dkdv_of_head(state, lo, hi, own, rows, head, tile, has)
        if has.key_grad:
            tl.store(DBIAS + plane.to(tl.int64) * sizes.keys + j, dbias, mask=j < sizes.keys)
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
def _probabilities(s, at, keys, statistics, head, tile: tl.constexpr, has: tl.constexpr):
    """Compute P and the tanh of the softcap, [BM, BN] each, from s = q . k. `keys` are [BN] and
    `statistics` [BM].
    """
    key_ok, key_bias = keys
    if has.bias == 1:
        key_bias = key_bias[None, :]
    at = Indices(at.i[:, None], at.j[None, :], at.r[:, None])
    s, tanh = scores(s, at, Keys(key_ok[None, :], key_bias), head, tile, has, True)
    if has.bias > 0 or has.alibi:
        s -= statistics.peak[:, None]
    return tl.math.exp2(s - statistics.lse[:, None]), tanh


@triton.jit
def _score_gradient(p, dp, delta, key_ok, corner, head, tile: tl.constexpr, has: tl.constexpr):
    """Compute dS of the tile at (i0, n0) = corner from P and dp = do . v: [BM, BN]."""
    factors = head.call.factors
    if has.dropout:
        i0, n0 = corner
        keep = dropout_keep(
            head.call.seed, head.plane, i0, n0, factors.threshold, tile.rows, tile.columns
        )
        dp = tl.where(keep, dp, 0.0) * factors.inv_keep
    if has.mask == 1 or has.bias == 1:  # 0 * NaN: a masked key or value may hold anything
        dp = tl.where(key_ok[None, :], dp, 0.0)
    return p * (dp - delta[:, None])


@triton.jit
def backward_dq_kernel(
    inputs,
    DQ,
    LSE,
    DELTA,
    extras,
    dq_strides,
    do_strides,
    strides,
    sizes,
    band,
    factors,
    tile: tl.constexpr,
    has: tl.constexpr,
):
    """Compute DQ [B, H, Sq, D] from DELTA [B, H, Sq] and LSE, [B, H, Sq], or [B, H, Sq, 2] with the
    maximum apart. One program owns BM queries of one (batch, head) and walks the keys.
    """
    blocks = tl.cdiv(sizes.queries, tile.rows)
    plane = tl.program_id(0) // blocks
    i0 = (blocks - 1 - tl.program_id(0) % blocks) * tile.rows
    b = (plane // sizes.heads).to(tl.int64)
    h = (plane % sizes.heads).to(tl.int64)
    g = h // sizes.group
    sequence = locate_sequence(extras, sizes, b, has)
    queries, length = sequence.queries, sequence.length
    if has.packed:
        if i0 >= queries:
            return
    first = sequence.first_query + i0

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
    row = first_row(plane, h, sequence, sizes, has)
    statistics = _row_statistics(LSE, DELTA, row, i, ok, has)
    k_base = inputs.key + b * strides.key_batch + g * strides.key_head
    k_base += sequence.first_key * strides.key_row
    v_base = inputs.value + b * strides.value_batch + g * strides.value_head
    v_base += sequence.first_key * strides.value_row
    call = prepare_call(extras, strides, sizes, band, factors, has)
    head = locate_head(call, sequence, plane, b, h, first, tile, has)

    dq = tl.zeros([tile.rows, tile.dim_block], tile.acc)
    lo, hi = keys_of_rows(i0, length, sequence.shift, band, tile, has)
    for n0 in tl.range(lo, hi, tile.columns):
        n0 = tl.multiple_of(n0, tile.columns)
        j = n0 + tl.arange(0, tile.columns)
        rows = j
        if tile.wide:
            rows = j.to(tl.int64)
        inside = j < length
        k = load_rows(k_base, rows, strides.key_row, inside, tile.dim, tile.dim_block, True)
        v = load_rows(
            v_base, rows, strides.value_row, inside, tile.value_dim, tile.value_block, True
        )
        keys = key_row(head, rows, inside, tile, has, True)
        s = tl.dot(q, tl.trans(k), input_precision=tile.precision)
        p, tanh = _probabilities(s, Indices(i, rows, r), keys, statistics, head, tile, has)
        dp = tl.dot(do, tl.trans(v), input_precision=tile.precision)
        ds = _score_gradient(p, dp, statistics.delta, keys.ok, (i0, n0), head, tile, has)
        if has.softcap:
            ds = ds * (1.0 - tanh * tanh)
        if has.mask == 1 or has.bias == 1:
            k = tl.where(keys.ok[:, None], k, 0.0).to(k.dtype)
        dq = tl.dot(ds.to(k.dtype), k, dq, tile.precision, out_dtype=tile.acc)
    dq = dq * factors.scale
    base = DQ + b * dq_strides.batch + h * dq_strides.head + first * dq_strides.row
    store_rows(base, r, dq_strides.row, ok, dq, tile.dim, tile.dim_block)


# ------------------------------------------------------------------------- the gradient of a bias


@triton.jit
def _product(x, y, D: tl.constexpr, BD: tl.constexpr, tile: tl.constexpr):
    """Multiply rows x by rows y of matrices [.., D]; zero where `y.ok` is False.

    128 elements of a row are multiplied at a time, 32 in float32, whose tf32 parts would fill the
    registers.
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
def backward_dbias_kernel(
    inputs,
    DBIAS,
    LSE,
    DELTA,
    extras,
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
    """Compute DBIAS, [B or 1, H or 1, Sq, Sk], from DELTA [B, H, Sq] and LSE [B, H, Sq, 2].

    One program owns BM x BN of it and walks the `over.batches` batches and `over.heads` heads that
    share it, 1 or all of them.
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
        r = r.to(tl.int64)
        c = c.to(tl.int64)
        rows = j.to(tl.int64)
    ok = i < sizes.queries
    call = prepare_call(extras, strides, sizes, band, factors, has)
    members = over.batches * over.heads
    if not has.bottom_right:  # outside of the band, whatever the length: zeros
        lo, hi = keys_of_rows(i0, sizes.keys, 0, band, tile, has)
        members = tl.where((n0 >= lo) & (n0 < hi), members, 0)

    dbias = tl.zeros([tile.rows, tile.columns], tile.acc)
    for member in tl.range(0, members):
        b = own_b + member // over.heads
        h = own_h + member % over.heads
        g = h // sizes.group
        plane = (b * sizes.heads + h).to(tl.int32)
        sequence = locate_sequence(extras, sizes, b, has)
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
        statistics = _row_statistics(LSE, DELTA, plane.to(tl.int64) * sizes.queries, i, ok, has)
        head = locate_head(call, sequence, plane, b, h, first, tile, has)
        keys = key_row(head, rows, inside, tile, has, True)
        p, _ = _probabilities(s, Indices(i, rows, r), keys, statistics, head, tile, has)
        dbias += _score_gradient(p, dp, statistics.delta, keys.ok, (i0, n0), head, tile, has)
    base = DBIAS + own_b * dbias_strides.batch + own_h * dbias_strides.head
    base = base + first * dbias_strides.row + column
    index = tl.arange(0, tile.rows)[:, None].to(tl.int64)
    pointers = base + (index * dbias_strides.row + tl.arange(0, tile.columns)[None, :])
    mask = ok[:, None] & (j < sizes.keys)[None, :]
    tl.store(pointers, dbias.to(DBIAS.dtype.element_ty), mask=mask)
