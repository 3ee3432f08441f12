"""The forward kernel of attention."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common import LN2, LOG2E, dropout_keep
from .scores import (
    clamp,
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
def _forward_tiles(
    acc, l, m, q, k_base, v_base, mask_base, bias_base, lo, hi, i, r, i0, length, shift, left,
    right, Sk, plane, seed, threshold, qk_scale, softcap, slope, s_kn, s_vn, s_mm, s_mn, s_bm, s_bn,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPOUT: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """The online softmax over the key tiles lo, lo + BN, .. < hi. acc [BM, BDV], l and m [BM]."""
    for n0 in tl.range(lo, hi, BN):
        n0 = tl.multiple_of(n0, BN)
        j = n0 + tl.arange(0, BN)
        rows = j
        if WIDE:
            rows = j.to(tl.int64)
        inside = j < length
        key_ok, key_bias = key_row(
            mask_base, s_mn, bias_base, s_bn, rows, inside, Sk, MASK, BIAS, EDGE, ACC
        )
        k = load_rows(k_base, rows, s_kn, inside, D, BD, EDGE)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BM, BN]
        if BIAS == 1:
            key_bias = key_bias[None, :]
        s, _ = scores(
            s, i[:, None], rows[None, :], r[:, None], key_ok[None, :], key_bias, mask_base, s_mm,
            s_mn, bias_base, s_bm, s_bn, qk_scale, softcap, slope, length, shift, left, right, Sk,
            MASK, BIAS, ALIBI, SOFTCAP, LEFT, RIGHT, EDGE, ACC,
        )  # fmt: skip
        m_new = tl.maximum(m, tl.max(s, 1))
        base = m_new
        if EDGE or MASK > 0 or BIAS > 0:  # rows that have seen nothing yet
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.math.exp2(s - base[:, None])
        rescale = tl.math.exp2(m - base)
        l = l * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        if DROPOUT:
            p = tl.where(dropout_keep(seed, plane, i0, n0, threshold, BM, BN), p, 0.0)
        v = load_rows(v_base, rows, s_vn, inside, DV, BDV, EDGE)
        if MASK == 1 or BIAS == 1:  # 0 * NaN: a hidden value may hold anything
            v = tl.where(key_ok[:, None], v, 0.0).to(v.dtype)
        acc = tl.dot(p.to(v.dtype), v, acc, PRECISION, out_dtype=ACC)
        m = m_new
    return acc, l, m


@triton.jit
def forward_kernel(
    Q, K, V, O, LSE, STATISTICS, SINKS, MASKS, BIASES, SLOPES, LENGTHS, STARTS, SEED,
    s_ob, s_oh, s_om, s_qb, s_qh, s_qm, s_kb, s_kg, s_kn, s_vb, s_vg, s_vn,
    s_mb, s_mh, s_mm, s_mn, s_bb, s_bh, s_bm, s_bn, s_ab, s_ah,
    H, GROUP, Sq, Sk, q_rows, k_rows, left, right, scale, softcap, threshold, inv_keep,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BOTTOM: tl.constexpr,
    LENGTH: tl.constexpr, PACKED: tl.constexpr, DROPOUT: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """One program owns BM queries of one (batch, head); the longest causal rows start first."""
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
    r = tl.minimum(tl.arange(0, BM), queries - 1 - i0)  # past the end: the last row, no predicate
    if WIDE:
        r = r.to(tl.int64)
    q = load_rows(Q + b * s_qb + h * s_qh + first * s_qm, r, s_qm, i < queries, D, BD, False)
    k_base = K + b * s_kb + g * s_kg + k0 * s_kn
    v_base = V + b * s_vb + g * s_vg + k0 * s_vn
    mask_base = MASKS + b * s_mb + h * s_mh + first * s_mm
    bias_base = BIASES + b * s_bb + h * s_bh + first * s_bm
    slope = load_slope(SLOPES, s_ab, s_ah, b, h, ALIBI, ACC)
    qk_scale = score_scale(scale, softcap, SOFTCAP)
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)
    lo, hi = keys_of_rows(i0, BM, length, shift, left, right, BN, LEFT, RIGHT)
    full = length  # the tiles from `inner` to `full` lie inside the band and the length
    if RIGHT:
        full = clamp(i0 + shift + right + 1, 0, length)
    full = full // BN * BN
    inner = 0
    if LEFT:
        inner = tl.maximum(i0 + BM - 1 + shift - left, 0)
        inner = (inner + BN - 1) // BN * BN
        full = tl.maximum(full, inner)

    acc = tl.zeros([BM, BDV], ACC)
    l = tl.zeros([BM], ACC)
    m = tl.full([BM], float("-inf"), ACC)
    if SINK:  # as if a first key had been seen, whose value is zero
        m = tl.zeros([BM], ACC) + tl.load(SINKS + h).to(ACC) * LOG2E
        l += tl.where(m == float("-inf"), 0.0, 1.0)
    if LEFT:
        acc, l, m = _forward_tiles(
            acc, l, m, q, k_base, v_base, mask_base, bias_base, lo, tl.minimum(inner, hi), i, r,
            i0, length, shift, left, right, Sk, plane, seed, threshold, qk_scale, softcap, slope,
            s_kn, s_vn, s_mm, s_mn, s_bm, s_bn, D, DV, BD, BDV, BM, BN,
            MASK, BIAS, ALIBI, SOFTCAP, LEFT, RIGHT, DROPOUT, WIDE, PRECISION, ACC, EDGE=True,
        )  # fmt: skip
    acc, l, m = _forward_tiles(
        acc, l, m, q, k_base, v_base, mask_base, bias_base, inner, full, i, r,
        i0, length, shift, left, right, Sk, plane, seed, threshold, qk_scale, softcap, slope,
        s_kn, s_vn, s_mm, s_mn, s_bm, s_bn, D, DV, BD, BDV, BM, BN,
        MASK, BIAS, ALIBI, SOFTCAP, LEFT, RIGHT, DROPOUT, WIDE, PRECISION, ACC, EDGE=False,
    )  # fmt: skip
    acc, l, m = _forward_tiles(
        acc, l, m, q, k_base, v_base, mask_base, bias_base, full, hi, i, r,
        i0, length, shift, left, right, Sk, plane, seed, threshold, qk_scale, softcap, slope,
        s_kn, s_vn, s_mm, s_mn, s_bm, s_bn, D, DV, BD, BDV, BM, BN,
        MASK, BIAS, ALIBI, SOFTCAP, LEFT, RIGHT, DROPOUT, WIDE, PRECISION, ACC, EDGE=True,
    )  # fmt: skip

    empty = l == 0.0
    sums = tl.where(empty, 1.0, l)
    lse = tl.where(empty, float("-inf"), (m + tl.math.log2(sums)) * LN2)
    row = first_row(plane, h, q0, q_rows, PACKED)
    tl.store(LSE + row + i, lse, mask=i < queries)
    if BIAS > 0 or ALIBI:
        pair = STATISTICS + (row + i) * 2
        tl.store(pair, tl.where(empty, 0.0, m), mask=i < queries)
        total = tl.where(empty, float("inf"), tl.math.log2(sums))
        tl.store(pair + 1, total, mask=i < queries)
    acc = acc * (inv_keep / sums)[:, None]
    o_base = O + b * s_ob + h * s_oh + first * s_om
    store_rows(o_base, r, s_om, i < queries, acc, DV, BDV)
