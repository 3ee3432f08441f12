"""The backward kernels of attention: delta, dK and dV, dQ, and the gradient of a bias."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common import LOG2E, dropout_keep
from .scores import (
    first_row,
    key_row,
    keys_of_rows,
    load_rows,
    load_slope,
    locate_sequence,
    score_scale,
    scores,
    store_rows,
)


@triton.jit
def delta_kernel(
    O, DO, DLSE, DELTA, s_ob, s_oh, s_om, s_db, s_dh, s_dm, H, Sq,
    DV: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, HAS_DLSE: tl.constexpr,
    WIDE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """delta_i = do_i . o_i - dlse_i. One program owns BM queries of one (batch, head); a packed
    batch is one batch of Tq queries.
    """
    blocks = tl.cdiv(Sq, BM)
    plane = tl.program_id(0) // blocks
    i0 = tl.program_id(0) % blocks * BM
    b = (plane // H).to(tl.int64)
    h = (plane % H).to(tl.int64)
    first = i0.to(tl.int64)
    i = i0 + tl.arange(0, BM)
    r = tl.arange(0, BM)
    if WIDE:
        r = r.to(tl.int64)
    o = load_rows(O + b * s_ob + h * s_oh + first * s_om, r, s_om, i < Sq, DV, BDV, True)
    do = load_rows(DO + b * s_db + h * s_dh + first * s_dm, r, s_dm, i < Sq, DV, BDV, True)
    delta = tl.sum(o.to(ACC) * do.to(ACC), 1)
    row = plane.to(tl.int64) * Sq
    if HAS_DLSE:
        delta -= tl.load(DLSE + row + i, mask=i < Sq, other=0.0)
    tl.store(DELTA + row + i, delta, mask=i < Sq)


@triton.jit
def _row_statistics(LSE, DELTA, row, i, ok, APART: tl.constexpr):
    """(peak, lse, delta) of the rows: P = 2^(s - peak - lse). lse is +inf, so that P is zero, for
    rows past the end and for those that see nothing.

    With APART, LSE holds pairs, the maximum and the log-sum; without, lse alone: peak is 0.
    """
    delta = tl.load(DELTA + row + i, mask=ok, other=0.0)
    if APART:
        peak = tl.load(LSE + (row + i) * 2, mask=ok, other=0.0)
        lse = tl.load(LSE + (row + i) * 2 + 1, mask=ok, other=float("inf"))
        return peak, lse, tl.where(lse == float("inf"), 0.0, delta)
    else:
        lse = tl.load(LSE + row + i, mask=ok, other=float("-inf"))
        empty = lse == float("-inf")
        lse = tl.where(empty, float("inf"), lse * LOG2E)
        return 0.0, lse, tl.where(empty, 0.0, delta)


@triton.jit
def backward_dkdv_kernel(
    Q, K, V, DO, DK, DV_, DBIAS, LSE, DELTA, MASKS, BIASES, SLOPES, LENGTHS, STARTS, SEED,
    s_dkb, s_dkg, s_dkn, s_dvb, s_dvg, s_dvn, s_db, s_dh, s_dm,
    s_qb, s_qh, s_qm, s_kb, s_kg, s_kn, s_vb, s_vg, s_vn,
    s_mb, s_mh, s_mm, s_mn, s_bb, s_bh, s_bm, s_bn, s_ab, s_ah,
    H, GROUP, Sq, Sk, q_rows, k_rows, left, right, scale, softcap, threshold, inv_keep,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BOTTOM: tl.constexpr,
    LENGTH: tl.constexpr, PACKED: tl.constexpr, DROPOUT: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr, KEY_GRAD: tl.constexpr,
):  # fmt: skip
    """One program owns BN keys of one (batch, key-value head) and walks the queries of its heads,
    in S^T = k q^T. With KEY_GRAD it also writes sum_i dS of each head, [B, H, Sk].
    """
    blocks = tl.cdiv(Sk, BN)
    pair = tl.program_id(0) // blocks
    n0 = tl.program_id(0) % blocks * BN
    groups = H // GROUP
    b = (pair // groups).to(tl.int64)
    g = (pair % groups).to(tl.int64)
    q0, k0, queries, length = locate_sequence(
        LENGTHS, STARTS, b, Sq, Sk, q_rows, k_rows, LENGTH, PACKED
    )
    keys = Sk
    if PACKED:
        keys = length
        if n0 >= length:
            return
    shift = 0
    if BOTTOM:
        shift = length - queries
    first = k0 + n0

    j = n0 + tl.arange(0, BN)
    c = tl.arange(0, BN)
    columns = j
    if WIDE:
        c = c.to(tl.int64)
        columns = j.to(tl.int64)
    inside = j < length
    k = load_rows(K + b * s_kb + g * s_kg + first * s_kn, c, s_kn, inside, D, BD, True)
    v = load_rows(V + b * s_vb + g * s_vg + first * s_vn, c, s_vn, inside, DV, BDV, True)
    qk_scale = score_scale(scale, softcap, SOFTCAP)
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)
    lo = 0  # the queries that any of these keys is seen by
    if RIGHT:
        lo = tl.maximum(n0 - shift - right, 0) // BM * BM
    hi = queries
    if LEFT:
        hi = tl.minimum(hi, n0 + BN - shift + left)
    if LENGTH:
        hi = tl.where(n0 < length, hi, 0)

    dk = tl.zeros([BN, BD], ACC)
    dv = tl.zeros([BN, BDV], ACC)
    for member in tl.range(0, GROUP):
        h = g * GROUP + member
        plane = (b * H + h).to(tl.int32)
        q_base = Q + b * s_qb + h * s_qh + q0 * s_qm
        do_base = DO + b * s_db + h * s_dh + q0 * s_dm
        mask_base = MASKS + b * s_mb + h * s_mh
        bias_base = BIASES + b * s_bb + h * s_bh
        slope = load_slope(SLOPES, s_ab, s_ah, b, h, ALIBI, ACC)
        row = first_row(plane, h, q0, q_rows, PACKED)
        key_ok, key_bias = key_row(
            mask_base, s_mn, bias_base, s_bn, columns, inside, Sk, MASK, BIAS, True, ACC
        )
        if BIAS == 1:
            key_bias = key_bias[:, None]
        dbias = tl.zeros([BN], ACC)
        for i0 in tl.range(lo, hi, BM):
            i0 = tl.multiple_of(i0, BM)
            i = i0 + tl.arange(0, BM)
            r = tl.minimum(i, queries - 1)
            if WIDE:
                r = r.to(tl.int64)
            q = load_rows(q_base, r, s_qm, i < queries, D, BD, False)
            peak, lse, delta = _row_statistics(LSE, DELTA, row, i, i < queries, BIAS > 0 or ALIBI)
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BN, BM]
            s, tanh = scores(
                s, i[None, :], columns[:, None], r[None, :], key_ok[:, None], key_bias, mask_base,
                s_mm, s_mn, bias_base, s_bm, s_bn, qk_scale, softcap, slope, length, shift, left,
                right, Sk, MASK, BIAS, ALIBI, SOFTCAP, LEFT, RIGHT, True, ACC,
            )  # fmt: skip
            if BIAS > 0 or ALIBI:
                s -= peak[None, :]
            p = tl.math.exp2(s - lse[None, :])
            do = load_rows(do_base, r, s_dm, i < queries, DV, BDV, False)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            z = p
            if DROPOUT:
                keep = tl.trans(dropout_keep(seed, plane, i0, n0, threshold, BM, BN))
                z = tl.where(keep, p, 0.0)
                dp = tl.where(keep, dp, 0.0) * inv_keep
            dv = tl.dot(z.to(do.dtype), do, dv, PRECISION, out_dtype=ACC)
            if MASK == 1 or BIAS == 1:  # 0 * NaN: a hidden key or value may hold anything
                dp = tl.where(key_ok[:, None], dp, 0.0)
            ds = p * (dp - delta[None, :])
            if KEY_GRAD:
                dbias += tl.sum(ds, 1)
            if SOFTCAP:
                ds = ds * (1.0 - tanh * tanh)
            dk = tl.dot(ds.to(q.dtype), q, dk, PRECISION, out_dtype=ACC)
        if KEY_GRAD:
            tl.store(DBIAS + plane.to(tl.int64) * Sk + j, dbias, mask=j < Sk)
    dk = dk * scale
    if DROPOUT:
        dv = dv * inv_keep
    store_rows(DK + b * s_dkb + g * s_dkg + first * s_dkn, c, s_dkn, j < keys, dk, D, BD)
    store_rows(DV_ + b * s_dvb + g * s_dvg + first * s_dvn, c, s_dvn, j < keys, dv, DV, BDV)


@triton.jit
def _probabilities(
    s, peak, lse, i, r, rows, key_ok, key_bias, mask_base, s_mm, s_mn, bias_base, s_bm, s_bn,
    qk_scale, softcap, slope, length, shift, left, right, Sk,
    MASK: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """(P, tanh of the softcap) from s = q . k: [BM, BN] each."""
    if BIAS == 1:
        key_bias = key_bias[None, :]
    s, tanh = scores(
        s, i[:, None], rows[None, :], r[:, None], key_ok[None, :], key_bias, mask_base, s_mm, s_mn,
        bias_base, s_bm, s_bn, qk_scale, softcap, slope, length, shift, left, right, Sk,
        MASK, BIAS, ALIBI, SOFTCAP, LEFT, RIGHT, True, ACC,
    )  # fmt: skip
    if BIAS > 0 or ALIBI:
        s -= peak[:, None]
    return tl.math.exp2(s - lse[:, None]), tanh


@triton.jit
def _score_gradient(
    p, dp, delta, i0, n0, key_ok, plane, seed, threshold, inv_keep, BM: tl.constexpr,
    BN: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """dS of the tile at (i0, n0) from P and dp = do . v: [BM, BN]."""
    if DROPOUT:
        keep = dropout_keep(seed, plane, i0, n0, threshold, BM, BN)
        dp = tl.where(keep, dp, 0.0) * inv_keep
    if MASK == 1 or BIAS == 1:  # 0 * NaN: a hidden key or value may hold anything
        dp = tl.where(key_ok[None, :], dp, 0.0)
    return p * (dp - delta[:, None])


@triton.jit
def backward_dq_kernel(
    Q, K, V, DO, DQ, LSE, DELTA, MASKS, BIASES, SLOPES, LENGTHS, STARTS, SEED,
    s_dqb, s_dqh, s_dqm, s_db, s_dh, s_dm,
    s_qb, s_qh, s_qm, s_kb, s_kg, s_kn, s_vb, s_vg, s_vn,
    s_mb, s_mh, s_mm, s_mn, s_bb, s_bh, s_bm, s_bn, s_ab, s_ah,
    H, GROUP, Sq, Sk, q_rows, k_rows, left, right, scale, softcap, threshold, inv_keep,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BOTTOM: tl.constexpr,
    LENGTH: tl.constexpr, PACKED: tl.constexpr, DROPOUT: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program owns BM queries of one (batch, head) and walks the keys."""
    blocks = tl.cdiv(Sq, BM)
    plane = tl.program_id(0) // blocks
    i0 = (blocks - 1 - tl.program_id(0) % blocks) * BM
    b = (plane // H).to(tl.int64)
    h = (plane % H).to(tl.int64)
    g = h // GROUP
    q0, k0, queries, length = locate_sequence(
        LENGTHS, STARTS, b, Sq, Sk, q_rows, k_rows, LENGTH, PACKED
    )
    if PACKED:
        if i0 >= queries:
            return
    shift = 0
    if BOTTOM:
        shift = length - queries
    first = q0 + i0

    i = i0 + tl.arange(0, BM)
    r = tl.minimum(tl.arange(0, BM), queries - 1 - i0)
    if WIDE:
        r = r.to(tl.int64)
    ok = i < queries
    q = load_rows(Q + b * s_qb + h * s_qh + first * s_qm, r, s_qm, ok, D, BD, False)
    do = load_rows(DO + b * s_db + h * s_dh + first * s_dm, r, s_dm, ok, DV, BDV, False)
    row = first_row(plane, h, q0, q_rows, PACKED)
    peak, lse, delta = _row_statistics(LSE, DELTA, row, i, ok, BIAS > 0 or ALIBI)
    k_base = K + b * s_kb + g * s_kg + k0 * s_kn
    v_base = V + b * s_vb + g * s_vg + k0 * s_vn
    mask_base = MASKS + b * s_mb + h * s_mh + first * s_mm
    bias_base = BIASES + b * s_bb + h * s_bh + first * s_bm
    slope = load_slope(SLOPES, s_ab, s_ah, b, h, ALIBI, ACC)
    qk_scale = score_scale(scale, softcap, SOFTCAP)
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)

    dq = tl.zeros([BM, BD], ACC)
    lo, hi = keys_of_rows(i0, BM, length, shift, left, right, BN, LEFT, RIGHT)
    for n0 in tl.range(lo, hi, BN):
        n0 = tl.multiple_of(n0, BN)
        j = n0 + tl.arange(0, BN)
        rows = j
        if WIDE:
            rows = j.to(tl.int64)
        inside = j < length
        k = load_rows(k_base, rows, s_kn, inside, D, BD, True)
        v = load_rows(v_base, rows, s_vn, inside, DV, BDV, True)
        key_ok, key_bias = key_row(
            mask_base, s_mn, bias_base, s_bn, rows, inside, Sk, MASK, BIAS, True, ACC
        )
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p, tanh = _probabilities(
            s, peak, lse, i, r, rows, key_ok, key_bias, mask_base, s_mm, s_mn, bias_base, s_bm,
            s_bn, qk_scale, softcap, slope, length, shift, left, right, Sk,
            MASK, BIAS, ALIBI, SOFTCAP, LEFT, RIGHT, ACC,
        )  # fmt: skip
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = _score_gradient(
            p, dp, delta, i0, n0, key_ok, plane, seed, threshold, inv_keep, BM, BN,
            MASK, BIAS, DROPOUT,
        )  # fmt: skip
        if SOFTCAP:
            ds = ds * (1.0 - tanh * tanh)
        if MASK == 1 or BIAS == 1:
            k = tl.where(key_ok[:, None], k, 0.0).to(k.dtype)
        dq = tl.dot(ds.to(k.dtype), k, dq, PRECISION, out_dtype=ACC)
    dq = dq * scale
    store_rows(DQ + b * s_dqb + h * s_dqh + first * s_dqm, r, s_dqm, ok, dq, D, BD)


@triton.jit
def _product(
    x_base, x_rows, s_x, x_ok, y_base, y_rows, s_y, y_ok, D: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Rows of x times rows of y, zero where `y_ok` is False; 128 elements of a row at a time, 32 in
    float32, whose tf32 parts would fill the registers.
    """
    SINGLE: tl.constexpr = x_base.dtype.element_ty == tl.float32
    WIDTH: tl.constexpr = min(BD, 32 if SINGLE else 128)
    s = tl.zeros([x_rows.shape[0], y_rows.shape[0]], ACC)
    for d in tl.static_range(0, BD, WIDTH):
        x = load_rows(x_base + d, x_rows, s_x, x_ok, min(D - d, WIDTH), WIDTH, False)
        y = load_rows(y_base + d, y_rows, s_y, y_ok, min(D - d, WIDTH), WIDTH, True)
        s = tl.dot(x, tl.trans(y), s, PRECISION, out_dtype=ACC)
    return s


@triton.jit
def backward_dbias_kernel(
    Q, K, V, DO, DBIAS, LSE, DELTA, MASKS, BIASES, SLOPES, LENGTHS, STARTS, SEED,
    s_dbb, s_dbh, s_dbm, over_b, over_h, s_db, s_dh, s_dm,
    s_qb, s_qh, s_qm, s_kb, s_kg, s_kn, s_vb, s_vg, s_vn,
    s_mb, s_mh, s_mm, s_mn, s_bb, s_bh, s_bm, s_bn, s_ab, s_ah,
    H, GROUP, Sq, Sk, q_rows, k_rows, left, right, scale, softcap, threshold, inv_keep,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BOTTOM: tl.constexpr,
    LENGTH: tl.constexpr, PACKED: tl.constexpr, DROPOUT: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program owns BM x BN of the bias gradient and walks the over_b batches and over_h heads
    that share it, 1 or all of them.
    """
    across = tl.cdiv(Sk, BN)
    blocks = across * tl.cdiv(Sq, BM)
    i0 = tl.program_id(0) % blocks // across * BM
    n0 = tl.program_id(0) % across * BN
    owner = tl.program_id(0) // blocks
    own_b = (owner // (H // over_h)).to(tl.int64)
    own_h = (owner % (H // over_h)).to(tl.int64)
    first = i0.to(tl.int64)
    column = n0.to(tl.int64)

    i = i0 + tl.arange(0, BM)
    r = tl.minimum(tl.arange(0, BM), Sq - 1 - i0)
    j = n0 + tl.arange(0, BN)
    c = tl.arange(0, BN)
    rows = j
    if WIDE:
        r = r.to(tl.int64)
        c = c.to(tl.int64)
        rows = j.to(tl.int64)
    ok = i < Sq
    qk_scale = score_scale(scale, softcap, SOFTCAP)
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)
    members = over_b * over_h
    if not BOTTOM:  # outside of the band, whatever the length: zeros
        lo, hi = keys_of_rows(i0, BM, Sk, 0, left, right, BN, LEFT, RIGHT)
        members = tl.where((n0 >= lo) & (n0 < hi), members, 0)

    dbias = tl.zeros([BM, BN], ACC)
    for member in tl.range(0, members):
        b = own_b + member // over_h
        h = own_h + member % over_h
        g = h // GROUP
        plane = (b * H + h).to(tl.int32)
        _, _, _, length = locate_sequence(LENGTHS, STARTS, b, Sq, Sk, q_rows, k_rows, LENGTH, False)
        shift = 0
        if BOTTOM:
            shift = length - Sq
        inside = j < length
        q_base = Q + b * s_qb + h * s_qh + first * s_qm
        do_base = DO + b * s_db + h * s_dh + first * s_dm
        k_base = K + b * s_kb + g * s_kg + column * s_kn
        v_base = V + b * s_vb + g * s_vg + column * s_vn
        s = _product(q_base, r, s_qm, ok, k_base, c, s_kn, inside, D, BD, PRECISION, ACC)
        dp = _product(do_base, r, s_dm, ok, v_base, c, s_vn, inside, DV, BDV, PRECISION, ACC)
        row = plane.to(tl.int64) * Sq
        peak, lse, delta = _row_statistics(LSE, DELTA, row, i, ok, BIAS > 0 or ALIBI)
        mask_base = MASKS + b * s_mb + h * s_mh + first * s_mm
        bias_base = BIASES + b * s_bb + h * s_bh + first * s_bm
        slope = load_slope(SLOPES, s_ab, s_ah, b, h, ALIBI, ACC)
        key_ok, key_bias = key_row(
            mask_base, s_mn, bias_base, s_bn, rows, inside, Sk, MASK, BIAS, True, ACC
        )
        p, _ = _probabilities(
            s, peak, lse, i, r, rows, key_ok, key_bias, mask_base, s_mm, s_mn, bias_base, s_bm,
            s_bn, qk_scale, softcap, slope, length, shift, left, right, Sk,
            MASK, BIAS, ALIBI, SOFTCAP, LEFT, RIGHT, ACC,
        )  # fmt: skip
        dbias += _score_gradient(
            p, dp, delta, i0, n0, key_ok, plane, seed, threshold, inv_keep, BM, BN,
            MASK, BIAS, DROPOUT,
        )  # fmt: skip
    base = DBIAS + own_b * s_dbb + own_h * s_dbh + first * s_dbm + column
    pointers = base + (tl.arange(0, BM)[:, None].to(tl.int64) * s_dbm + tl.arange(0, BN)[None, :])
    mask = ok[:, None] & (j < Sk)[None, :]
    tl.store(pointers, dbias.to(DBIAS.dtype.element_ty), mask=mask)
