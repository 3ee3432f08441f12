"""Scaled dot-product attention, tiled (Dao 2023, "FlashAttention-2"), with masks, key lengths,
causality and dropout.

Forward, for query i of one (batch, head):
    s_ij = scale * q_i . k_j      where i may see j, else -inf
    lse_i = log sum_j exp(s_ij)   P_ij = exp(s_ij - lse_i)
    o_i = sum_j P_ij Z_ij v_j     Z_ij = keep_ij / (1 - p)
Backward, from do:
    delta_i = do_i . o_i          dP_ij = Z_ij do_i . v_j        dS_ij = P_ij (dP_ij - delta_i)
    dq_i = scale sum_j dS_ij k_j  dk_j = scale sum_i dS_ij q_i   dv_j = sum_i P_ij Z_ij do_i

Shapes: query [B,H,Sq,D], key [B,G,Sk,D], value [B,G,Sk,DV], output [B,H,Sq,DV]; head h reads
key-value head h // (H/G). Any dtype in and out, products and sums in float32 (float64 for float64).
Saved: the inputs, the output, lse [B,H,Sq] (natural logarithm, -inf for a row that sees nothing).
Recomputed: S, P and the dropout mask, a function of (seed, b, h, i, j). Nothing of size Sq x Sk is
stored. FLOPs: 4 B H Sq Sk D forward, 2.5 times that backward; least bytes: q, k, v, o once forward.
A row that sees nothing gives zeros. Deterministic: each gradient tile has one owner, no atomics.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import (
    INTERPRETED,
    LN2,
    LOG2E,
    architecture,
    dot_precision,
    dropout_arguments,
    dropout_keep,
    next_power_of_2,
    on_device,
    register,
    unit_stride,
    unsupported_dtype,
)

__all__ = ["INTERPRETED", "supports"]

# ---------------------------------------------------------------------------------- configurations


class Tiles(NamedTuple):
    """One kernel's configuration: BM queries x BN keys."""

    BM: int
    BN: int
    warps: int
    stages: int


# Kernel and bits of an input element: architectures, (BM, BN, warps, stages) for head dims up to
# 32, 64, 128 and 256. Registers, spills and shared memory of each stand in tests/compile_table.md.
_Row = tuple[int, int, int, int]
_TABLES: dict[tuple[str, int], dict[str, tuple[_Row, _Row, _Row, _Row]]] = {
    ("forward", 16): {
        "sm_90 sm_100": ((128, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2)),
        "sm_80 sm_86": ((128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2)),
        "gfx942": ((128, 64, 4, 1), (128, 32, 4, 1), (128, 32, 4, 1), (64, 32, 4, 1)),
        "other": ((64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1), (32, 16, 4, 1)),
    },
    ("forward", 32): {
        "sm_90": ((64, 32, 4, 2), (64, 32, 4, 2), (16, 32, 4, 2), (16, 16, 8, 2)),
        "sm_80 sm_86 sm_100": ((32, 32, 4, 2), (32, 32, 4, 2), (16, 32, 4, 2), (16, 16, 8, 2)),
        "gfx942": ((64, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
        "other": ((32, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 8, 1)),
    },
    ("dkdv", 16): {
        "sm_90": ((64, 64, 4, 2), (64, 128, 8, 2), (32, 128, 8, 2), (32, 64, 8, 2)),
        "sm_100": ((32, 128, 8, 2), (32, 128, 8, 2), (64, 64, 8, 2), (32, 64, 8, 2)),
        "sm_80": ((32, 128, 8, 2), (32, 128, 8, 2), (64, 64, 8, 2), (32, 32, 8, 2)),
        "sm_86": ((32, 128, 8, 2), (32, 128, 8, 2), (32, 64, 8, 2), (32, 32, 8, 2)),
        "gfx942": ((32, 64, 4, 1), (32, 64, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
        "other": ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
    },
    ("dkdv", 32): {
        "sm_90 sm_100": ((32, 64, 8, 1), (32, 64, 8, 1), (16, 16, 4, 2), (16, 16, 8, 2)),
        "sm_80 sm_86": ((32, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 2), (16, 16, 8, 2)),
        "gfx942": ((32, 32, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1), (16, 32, 4, 1)),
        "other": ((16, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1), (16, 16, 8, 1)),
    },
    ("dq", 16): {
        "sm_90": ((128, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
        "sm_100": ((128, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2)),
        "sm_80": ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 8, 2)),
        "sm_86": ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (32, 32, 8, 2)),
        "gfx942": ((64, 32, 4, 1), (64, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
        "other": ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)),
    },
    ("dq", 32): {
        "sm_90 sm_100": ((64, 32, 8, 1), (64, 32, 8, 1), (16, 32, 4, 2), (16, 16, 8, 2)),
        "sm_80 sm_86": ((32, 32, 4, 2), (32, 32, 4, 2), (16, 32, 4, 2), (16, 16, 8, 2)),
        "gfx942": ((32, 32, 4, 1), (32, 32, 4, 1), (32, 16, 4, 1), (32, 16, 4, 1)),
        "other": ((32, 16, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1), (16, 16, 8, 1)),
    },
}
CONFIGURATIONS = {
    (*key, arch): tuple(Tiles(*row) for row in rows)
    for key, table in _TABLES.items()
    for names, rows in table.items()
    for arch in names.split()
}


def configuration(
    kernel: str, arch: str, dtype: torch.dtype, head_block: int, q_length: int, k_length: int
) -> Tiles:
    """The tiles of a kernel: a function of architecture, dtype, padded head dim and lengths."""
    if arch == "interpreter":  # few programs, no larger than the work: an operation's cost is fixed
        BM, BN = (min(128, max(16, next_power_of_2(n))) for n in (q_length, k_length))
        return Tiles(BM, BN, 4, 1)
    if kernel == "delta":  # 16 elements a thread
        return Tiles(2048 // head_block, 0, 4, 1)
    bits = 32 if dtype == torch.float32 else 16
    tiles = CONFIGURATIONS.get((kernel, bits, arch)) or CONFIGURATIONS[kernel, bits, "other"]
    return tiles[max(0, (head_block - 1).bit_length() - 5)]


# ----------------------------------------------------------------------------------------- helpers


@triton.jit
def _load_rows(base, rows, stride, ok, D: tl.constexpr, BD: tl.constexpr, GUARD: tl.constexpr):
    """Rows of a matrix [.., D] as a tile [rows, BD], zero past D, and where `ok` is False if
    GUARD.
    """
    d = tl.arange(0, BD)
    pointers = base + (rows[:, None] * stride + d[None, :])
    if GUARD and BD != D:
        return tl.load(pointers, mask=ok[:, None] & (d < D)[None, :], other=0.0)
    elif GUARD:
        return tl.load(pointers, mask=ok[:, None], other=0.0)
    elif BD != D:
        return tl.load(pointers, mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _store_rows(base, rows, stride, ok, x, D: tl.constexpr, BD: tl.constexpr):
    d = tl.arange(0, BD)
    mask = ok[:, None]
    if BD != D:
        mask = mask & (d < D)[None, :]
    tl.store(base + (rows[:, None] * stride + d[None, :]), x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _key_mask(mask_base, j, s_mn, Sk, EDGE: tl.constexpr):
    """A mask that is constant over the queries, for keys j: [BN]."""
    if EDGE:
        return tl.load(mask_base + j * s_mn, mask=j < Sk, other=0) != 0
    else:
        return tl.load(mask_base + j * s_mn) != 0


@triton.jit
def _visible(
    i, j, r, key_mask, mask_base, s_mm, s_mn, length, Sk,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Whether query i may see key j, on indices that are already broadcast against each other
    (either way round).

    r is i, clamped to the rows there are and counted from the row that mask_base points to. Without
    EDGE the whole tile lies inside the length and below the diagonal.
    """
    ok = j < length
    if MASK == 1:
        ok = ok & key_mask
    if MASK == 2:  # bounded by Sk, not by the loaded length: the compiler knows Sk's divisibility
        if EDGE:
            ok = ok & (tl.load(mask_base + (r * s_mm + j * s_mn), mask=j < Sk, other=0) != 0)
        else:
            ok = tl.load(mask_base + (r * s_mm + j * s_mn)) != 0
    if CAUSAL and EDGE:
        ok = ok & (j <= i)
    return ok


@triton.jit
def _length(LENGTHS, b, Sk, HAS_LENGTHS: tl.constexpr):
    """The keys of sequence b, clamped, so that a bad length never reads out of bounds."""
    length = Sk
    if HAS_LENGTHS:
        length = tl.minimum(tl.maximum(tl.load(LENGTHS + b).to(tl.int32), 0), Sk)
    return length


# ----------------------------------------------------------------------------------------- forward


@triton.jit
def _forward_tiles(
    acc, l, m, q, k_base, v_base, mask_base, lo, hi, i, r, i0, length, Sk, plane, seed, threshold,
    qk_scale, s_kn, s_vn, s_mm, s_mn,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
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
        key_mask = inside
        if MASK == 1:
            key_mask = _key_mask(mask_base, rows, s_mn, Sk, EDGE)
        k = _load_rows(k_base, rows, s_kn, inside, D, BD, EDGE)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale  # [BM, BN], base 2
        if EDGE or MASK > 0:
            ok = _visible(
                i[:, None], rows[None, :], r[:, None], key_mask[None, :], mask_base, s_mm, s_mn,
                length, Sk, MASK, CAUSAL, EDGE,
            )  # fmt: skip
            s = tl.where(ok, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        shift = m_new
        if EDGE or MASK > 0:  # rows that have seen nothing yet
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.math.exp2(s - shift[:, None])
        rescale = tl.math.exp2(m - shift)
        l = l * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        if DROPOUT:
            p = tl.where(dropout_keep(seed, plane, i0, n0, threshold, BM, BN), p, 0.0)
        v = _load_rows(v_base, rows, s_vn, inside, DV, BDV, EDGE)
        if MASK == 1:  # 0 * NaN: a hidden value may hold anything
            v = tl.where(key_mask[:, None], v, 0.0).to(v.dtype)
        acc = tl.dot(p.to(v.dtype), v, acc, PRECISION, out_dtype=ACC)
        m = m_new
    return acc, l, m


@triton.jit
def _forward(
    Q, K, V, O, LSE, MASKS, LENGTHS, SEED, scale, threshold, inv_keep,
    s_qb, s_qh, s_qm, s_kb, s_kg, s_kn, s_vb, s_vg, s_vn, s_ob, s_oh, s_om,
    s_mb, s_mh, s_mm, s_mn, H, GROUP, Sq, Sk,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    DROPOUT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program owns BM queries of one (batch, head); the longest causal rows start first."""
    blocks = tl.cdiv(Sq, BM)
    plane = tl.program_id(0) // blocks
    i0 = (blocks - 1 - tl.program_id(0) % blocks) * BM
    b = (plane // H).to(tl.int64)
    h = (plane % H).to(tl.int64)
    g = h // GROUP
    first = i0.to(tl.int64)

    i = i0 + tl.arange(0, BM)
    r = tl.minimum(tl.arange(0, BM), Sq - 1 - i0)  # past the end: the last row again, no predicate
    if WIDE:
        r = r.to(tl.int64)
    q = _load_rows(Q + b * s_qb + h * s_qh + first * s_qm, r, s_qm, i < Sq, D, BD, False)
    k_base = K + b * s_kb + g * s_kg
    v_base = V + b * s_vb + g * s_vg
    mask_base = MASKS + b * s_mb + h * s_mh + first * s_mm
    length = _length(LENGTHS, b, Sk, HAS_LENGTHS)
    hi = length
    full = length // BN * BN
    if CAUSAL:
        hi = tl.minimum(hi, i0 + BM)
        full = tl.minimum(length, i0) // BN * BN
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)

    acc = tl.zeros([BM, BDV], ACC)
    l = tl.zeros([BM], ACC)
    m = tl.full([BM], float("-inf"), ACC)
    qk_scale = scale * LOG2E
    acc, l, m = _forward_tiles(
        acc, l, m, q, k_base, v_base, mask_base, 0, full, i, r, i0, length, Sk, plane, seed,
        threshold, qk_scale, s_kn, s_vn, s_mm, s_mn,
        D, DV, BD, BDV, BM, BN, MASK, CAUSAL, DROPOUT, WIDE, PRECISION, ACC, EDGE=False,
    )  # fmt: skip
    acc, l, m = _forward_tiles(
        acc, l, m, q, k_base, v_base, mask_base, full, hi, i, r, i0, length, Sk, plane, seed,
        threshold, qk_scale, s_kn, s_vn, s_mm, s_mn,
        D, DV, BD, BDV, BM, BN, MASK, CAUSAL, DROPOUT, WIDE, PRECISION, ACC, EDGE=True,
    )  # fmt: skip

    empty = l == 0.0
    sums = tl.where(empty, 1.0, l)
    lse = tl.where(empty, float("-inf"), (m + tl.math.log2(sums)) * LN2)
    tl.store(LSE + plane.to(tl.int64) * Sq + i, lse, mask=i < Sq)
    acc = acc * (inv_keep / sums)[:, None]
    _store_rows(O + b * s_ob + h * s_oh + first * s_om, r, s_om, i < Sq, acc, DV, BDV)


# ---------------------------------------------------------------------------------------- backward


@triton.jit
def _delta(
    O, DO, DELTA, s_ob, s_oh, s_om, s_db, s_dh, s_dm, H, Sq,
    DV: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """delta_i = do_i . o_i. One program owns BM queries of one (batch, head)."""
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
    o = _load_rows(O + b * s_ob + h * s_oh + first * s_om, r, s_om, i < Sq, DV, BDV, True)
    do = _load_rows(DO + b * s_db + h * s_dh + first * s_dm, r, s_dm, i < Sq, DV, BDV, True)
    delta = tl.sum(o.to(ACC) * do.to(ACC), 1)
    tl.store(DELTA + plane.to(tl.int64) * Sq + i, delta, mask=i < Sq)


@triton.jit
def _row_statistics(LSE, DELTA, plane_start, i, ok):
    """(lse in base 2, delta) of the rows; +inf, whose P is zero, for rows past the end and for
    those that see nothing.
    """
    lse = tl.load(LSE + plane_start + i, mask=ok, other=float("-inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    return lse, tl.load(DELTA + plane_start + i, mask=ok, other=0.0)


@triton.jit
def _backward_dkdv(
    Q, K, V, DO, DK, DV_, LSE, DELTA, MASKS, LENGTHS, SEED, scale, threshold, inv_keep,
    s_qb, s_qh, s_qm, s_kb, s_kg, s_kn, s_vb, s_vg, s_vn, s_db, s_dh, s_dm,
    s_dkb, s_dkg, s_dkn, s_dvb, s_dvg, s_dvn, s_mb, s_mh, s_mm, s_mn, H, GROUP, Sq, Sk,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    DROPOUT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program owns BN keys of one (batch, key-value head) and walks the queries of its heads,
    in S^T = k q^T.
    """
    blocks = tl.cdiv(Sk, BN)
    pair = tl.program_id(0) // blocks
    n0 = tl.program_id(0) % blocks * BN
    groups = H // GROUP
    b = (pair // groups).to(tl.int64)
    g = (pair % groups).to(tl.int64)
    first = n0.to(tl.int64)

    j = n0 + tl.arange(0, BN)
    c = tl.arange(0, BN)
    columns = j
    if WIDE:
        c = c.to(tl.int64)
        columns = j.to(tl.int64)
    length = _length(LENGTHS, b, Sk, HAS_LENGTHS)
    inside = j < length
    k = _load_rows(K + b * s_kb + g * s_kg + first * s_kn, c, s_kn, inside, D, BD, True)
    v = _load_rows(V + b * s_vb + g * s_vg + first * s_vn, c, s_vn, inside, DV, BDV, True)
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)
    lo = 0
    if CAUSAL:
        lo = n0 // BM * BM
    hi = Sq
    if HAS_LENGTHS:  # keys past the length: no query sees them
        hi = tl.where(n0 < length, Sq, 0)

    dk = tl.zeros([BN, BD], ACC)
    dv = tl.zeros([BN, BDV], ACC)
    qk_scale = scale * LOG2E
    for member in tl.range(0, GROUP):
        h = g * GROUP + member
        plane = (b * H + h).to(tl.int32)
        q_base = Q + b * s_qb + h * s_qh
        do_base = DO + b * s_db + h * s_dh
        mask_base = MASKS + b * s_mb + h * s_mh
        key_mask = inside
        if MASK == 1:
            key_mask = _key_mask(mask_base, columns, s_mn, Sk, True)
        for i0 in tl.range(lo, hi, BM):
            i0 = tl.multiple_of(i0, BM)
            i = i0 + tl.arange(0, BM)
            r = tl.minimum(i, Sq - 1)
            if WIDE:
                r = r.to(tl.int64)
            q = _load_rows(q_base, r, s_qm, i < Sq, D, BD, False)
            lse, delta = _row_statistics(LSE, DELTA, plane.to(tl.int64) * Sq, i, i < Sq)
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * qk_scale  # [BN, BM], base 2
            ok = _visible(
                i[None, :], columns[:, None], r[None, :], key_mask[:, None], mask_base, s_mm, s_mn,
                length, Sk, MASK, CAUSAL, True,
            )  # fmt: skip
            p = tl.where(ok, tl.math.exp2(s - lse[None, :]), 0.0)
            do = _load_rows(do_base, r, s_dm, i < Sq, DV, BDV, False)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            z = p
            if DROPOUT:
                keep = tl.trans(dropout_keep(seed, plane, i0, n0, threshold, BM, BN))
                z = tl.where(keep, p, 0.0)
                dp = tl.where(keep, dp, 0.0) * inv_keep
            dv = tl.dot(z.to(do.dtype), do, dv, PRECISION, out_dtype=ACC)
            if MASK == 1:  # 0 * NaN: a hidden key or value may hold anything
                dp = tl.where(key_mask[:, None], dp, 0.0)
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, PRECISION, out_dtype=ACC)
    dk = dk * scale
    if DROPOUT:
        dv = dv * inv_keep
    _store_rows(DK + b * s_dkb + g * s_dkg + first * s_dkn, c, s_dkn, j < Sk, dk, D, BD)
    _store_rows(DV_ + b * s_dvb + g * s_dvg + first * s_dvn, c, s_dvn, j < Sk, dv, DV, BDV)


@triton.jit
def _backward_dq(
    Q, K, V, DO, DQ, LSE, DELTA, MASKS, LENGTHS, SEED, scale, threshold, inv_keep,
    s_qb, s_qh, s_qm, s_kb, s_kg, s_kn, s_vb, s_vg, s_vn, s_db, s_dh, s_dm,
    s_dqb, s_dqh, s_dqm, s_mb, s_mh, s_mm, s_mn, H, GROUP, Sq, Sk,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    DROPOUT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program owns BM queries of one (batch, head) and walks the keys."""
    blocks = tl.cdiv(Sq, BM)
    plane = tl.program_id(0) // blocks
    i0 = (blocks - 1 - tl.program_id(0) % blocks) * BM
    b = (plane // H).to(tl.int64)
    h = (plane % H).to(tl.int64)
    g = h // GROUP
    first = i0.to(tl.int64)

    i = i0 + tl.arange(0, BM)
    r = tl.minimum(tl.arange(0, BM), Sq - 1 - i0)
    if WIDE:
        r = r.to(tl.int64)
    q = _load_rows(Q + b * s_qb + h * s_qh + first * s_qm, r, s_qm, i < Sq, D, BD, False)
    do = _load_rows(DO + b * s_db + h * s_dh + first * s_dm, r, s_dm, i < Sq, DV, BDV, False)
    lse, delta = _row_statistics(LSE, DELTA, plane.to(tl.int64) * Sq, i, i < Sq)
    k_base = K + b * s_kb + g * s_kg
    v_base = V + b * s_vb + g * s_vg
    mask_base = MASKS + b * s_mb + h * s_mh + first * s_mm
    length = _length(LENGTHS, b, Sk, HAS_LENGTHS)
    hi = length
    if CAUSAL:
        hi = tl.minimum(hi, i0 + BM)
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)

    dq = tl.zeros([BM, BD], ACC)
    qk_scale = scale * LOG2E
    for n0 in tl.range(0, hi, BN):
        n0 = tl.multiple_of(n0, BN)
        j = n0 + tl.arange(0, BN)
        rows = j
        if WIDE:
            rows = j.to(tl.int64)
        inside = j < length
        key_mask = inside
        k = _load_rows(k_base, rows, s_kn, inside, D, BD, True)
        v = _load_rows(v_base, rows, s_vn, inside, DV, BDV, True)
        if MASK == 1:  # 0 * NaN: a hidden key or value may hold anything
            key_mask = _key_mask(mask_base, rows, s_mn, Sk, True)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale
        ok = _visible(
            i[:, None], rows[None, :], r[:, None], key_mask[None, :], mask_base, s_mm, s_mn,
            length, Sk, MASK, CAUSAL, True,
        )  # fmt: skip
        p = tl.where(ok, tl.math.exp2(s - lse[:, None]), 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if DROPOUT:
            keep = dropout_keep(seed, plane, i0, n0, threshold, BM, BN)
            dp = tl.where(keep, dp, 0.0) * inv_keep
        if MASK == 1:
            dp = tl.where(key_mask[None, :], dp, 0.0)
            k = tl.where(key_mask[:, None], k, 0.0).to(k.dtype)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, PRECISION, out_dtype=ACC)
    dq = dq * scale
    _store_rows(DQ + b * s_dqb + h * s_dqh + first * s_dqm, r, s_dqm, i < Sq, dq, D, BD)


# --------------------------------------------------------------------------------------- launchers


def _heads_like(x: Tensor, heads: int, width: int) -> Tensor:
    """An empty [B, heads, S, width] with the memory order of x, so that [B, S, H, D] behind a
    transpose stays one.
    """
    batch, _, length, _ = x.shape
    if x.shape[1] > 1 and x.stride(1) < x.stride(2):
        return x.new_empty(batch, length, heads, width).transpose(1, 2)
    return x.new_empty(batch, heads, length, width)


def _spans_int32(*tensors: Tensor) -> bool:
    """Whether an offset inside one (batch, head) can pass 2^31 elements."""
    return any(x.shape[2] * abs(x.stride(2)) + x.shape[3] >= 2**31 for x in tensors)


class _Call:
    """What the launchers of one call share: the mask as strides and kind, the constants of the
    kernels.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        key_lengths: Tensor | None,
        dropout_seed: Tensor | None,
    ) -> None:
        self.batch, self.heads, self.q_length, dim = query.shape
        self.groups, self.k_length, width = key.shape[1], key.shape[2], value.shape[3]
        self.arch = architecture(query.device)
        self.dtype = query.dtype
        self.head_block = max(16, next_power_of_2(max(dim, width)))
        kind, mask, mask_strides = 0, query, [0, 0, 0, 0]
        if attn_mask is not None:
            full = attn_mask.expand(self.batch, self.heads, self.q_length, self.k_length)
            mask, mask_strides = full.view(torch.uint8), list(full.stride())
            kind = 1 if full.stride(2) == 0 or self.q_length == 1 else 2
        threshold, inv_keep = dropout_arguments(dropout_p)
        wide = _spans_int32(query, key, value)
        wide = wide or mask_strides[2] * self.q_length + mask_strides[3] * self.k_length >= 2**31
        self.pointers = (
            mask,
            query if key_lengths is None else key_lengths,
            query if dropout_seed is None else dropout_seed,
        )
        self.dropout = (threshold, inv_keep)
        group = self.heads // max(1, self.groups)
        self.sizes = (*mask_strides, self.heads, group, self.q_length, self.k_length)
        self.dims = dict(
            D=dim,
            DV=width,
            BD=max(16, next_power_of_2(dim)),
            BDV=max(16, next_power_of_2(width)),
            WIDE=wide,
            ACC=tl.float64 if query.dtype == torch.float64 else tl.float32,
        )
        self.flags = dict(
            MASK=kind,
            CAUSAL=is_causal,
            HAS_LENGTHS=key_lengths is not None,
            DROPOUT=dropout_p > 0,
            PRECISION=dot_precision(self.arch),
        )

    def tiles(self, kernel: str) -> Tiles:
        lengths = self.q_length, self.k_length
        return configuration(kernel, self.arch, self.dtype, self.head_block, *lengths)

    def launch(self, kernel: str, function: object, rows: bool, *arguments: object) -> None:
        """Starts a kernel over the query blocks of every head, or over the key blocks of every
        key-value head.
        """
        tiles = self.tiles(kernel)
        blocks = (
            triton.cdiv(self.q_length, tiles.BM) * self.batch * self.heads
            if rows
            else triton.cdiv(self.k_length, tiles.BN) * self.batch * self.groups
        )
        if blocks:
            function[(blocks,)](  # type: ignore[index]
                *arguments, *self.sizes, **self.dims, **self.flags, BM=tiles.BM, BN=tiles.BN,
                num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip


def _fake(
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, key_lengths, dropout_seed
):
    output = _heads_like(query, query.shape[1], value.shape[3])
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return output, query.new_empty(query.shape[:3], dtype=dtype)


@register(
    "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, "
    "float dropout_p, bool is_causal, float scale, bool enable_gqa, Tensor? key_lengths, "
    "Tensor? dropout_seed) "
    "-> (Tensor output, Tensor lse)",
    _fake,
)
def forward(
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, key_lengths, dropout_seed
):
    """Launches the forward: (output [B,H,Sq,DV], lse [B,H,Sq])."""
    query, key, value = unit_stride(query), unit_stride(key), unit_stride(value)
    output, lse = _fake(query, key, value, None, 0.0, False, 1.0, False, None, None)
    call = _Call(query, key, value, attn_mask, dropout_p, is_causal, key_lengths, dropout_seed)
    with on_device(query):
        call.launch(
            "forward", _forward, True, query, key, value, output, lse, *call.pointers,
            scale, *call.dropout, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            *output.stride()[:3],
        )  # fmt: skip
    return output, lse


def _fake_backward(
    grad_output, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
    key_lengths, dropout_seed, output, lse, needs,
):  # fmt: skip
    return (
        _heads_like(query, query.shape[1], query.shape[3]) if needs[0] else query.new_empty(0),
        _heads_like(key, key.shape[1], key.shape[3]) if needs[1] or needs[2] else key.new_empty(0),
        _heads_like(value, value.shape[1], value.shape[3])
        if needs[1] or needs[2]
        else value.new_empty(0),
    )


@register(
    "scaled_dot_product_attention_backward(Tensor grad_output, Tensor query, Tensor key, "
    "Tensor value, Tensor? attn_mask, float dropout_p, bool is_causal, float scale, "
    "bool enable_gqa, Tensor? key_lengths, Tensor? dropout_seed, Tensor output, Tensor lse, "
    "bool[] needs) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    _fake_backward,
)
def backward(
    grad_output, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
    key_lengths, dropout_seed, output, lse, needs,
):  # fmt: skip
    """Launches delta, then dK/dV and dQ as far as they are needed."""
    query, key, value = unit_stride(query), unit_stride(key), unit_stride(value)
    grad_output = unit_stride(grad_output)
    dq, dk, dv = _fake_backward(
        grad_output, query, key, value, None, 0.0, False, 1.0, False, None, None, output, lse, needs
    )
    call = _Call(query, key, value, attn_mask, dropout_p, is_causal, key_lengths, dropout_seed)
    call.dims["WIDE"] = call.dims["WIDE"] or _spans_int32(grad_output, output)
    delta = torch.empty_like(lse)
    inputs = (
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *grad_output.stride()[:3],
    )
    with on_device(query):
        rows = call.tiles("delta").BM
        blocks = triton.cdiv(call.q_length, rows) * call.batch * call.heads
        if blocks:
            _delta[(blocks,)](
                output, grad_output, delta, *output.stride()[:3], *grad_output.stride()[:3],
                call.heads, call.q_length, DV=call.dims["DV"], BDV=call.dims["BDV"], BM=rows,
                WIDE=call.dims["WIDE"], ACC=call.dims["ACC"],
            )  # fmt: skip
        if needs[1] or needs[2]:
            call.launch(
                "dkdv", _backward_dkdv, False, query, key, value, grad_output, dk, dv, lse, delta,
                *call.pointers, scale, *call.dropout, *inputs, *dk.stride()[:3], *dv.stride()[:3],
            )  # fmt: skip
        if needs[0]:
            call.launch(
                "dq", _backward_dq, True, query, key, value, grad_output, dq, lse, delta,
                *call.pointers, scale, *call.dropout, *inputs, *dq.stride()[:3],
            )  # fmt: skip
    return dq, dk, dv


def supports(
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, key_lengths, dropout_seed
) -> str | None:
    """Why the kernels cannot run this call, or None."""
    return unsupported_dtype(query)
