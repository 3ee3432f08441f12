"""Scaled dot-product attention, tiled (Dao 2023, "FlashAttention-2"), with masks, bias, lengths, a
band (causality, windows), ALiBi, softcap and dropout in one family of kernels; padded or packed.

Forward, for query i of one (batch, head):
    x_ij = scale q_i . k_j                          or softcap tanh(scale q_i . k_j / softcap)
    s_ij = x_ij + bias_ij - slope |i + shift - j|   where i may see j, else -inf
    lse_i = log(exp(sink_h) + sum_j exp(s_ij)), the sink of its head where there is one
    P_ij = exp(s_ij - lse_i)
    o_i = sum_j P_ij Z_ij v_j        Z_ij = keep_ij / (1 - p)
Backward, from do and dlse:
    delta_i = do_i . o_i - dlse_i    dP_ij = Z_ij do_i . v_j         dS_ij = P_ij (dP_ij - delta_i)
    dX_ij = dS_ij dx_ij/d(scale q_i . k_j), which is 1, or 1 - tanh^2
    dq_i = scale sum_j dX_ij k_j     dk_j = scale sum_i dX_ij q_i    dv_j = sum_i P_ij Z_ij do_i
    dsink_h = - sum_i exp(sink_h - lse_i) delta_i: the sink is a key whose value is zero
    dbias: dS, summed over what the bias is broadcast over. A bias that is constant over the keys
    shifts a whole row: its softmax does not change, lse does, and its gradient is sum dlse exactly;
    beside a sink, sum_i (dlse_i + exp(sink_h - lse_i) delta_i).
    Under a bias or ALiBi the scores of a row may all be large (-1e9 is a usual mask), and lse then
    has no digits left for the sum: P_ij = exp((s_ij - max_j s_ij) - log sum_j exp(s_ij - max)).
Query i sees key j where j is below the length, mask and bias allow it, and the band does:
    i + shift - left <= j <= i + shift + right; causal is right = 0; shift is 0, or under
    bottom-right alignment the keys of the sequence minus its queries.

Shapes: query [B,H,Sq,D], key [B,G,Sk,D], value [B,G,Sk,DV], output [B,H,Sq,DV]; head h reads
key-value head h // (H/G). Packed: query [Tq,H,D], key [Tk,G,D], value [Tk,G,DV], and the offsets of
the B sequences. Any dtype in and out, products and sums in float32 (float64 for float64).
Saved: the inputs, the output, lse (natural logarithm, -inf for a row that sees nothing, not even a
sink), [B,H,Sq] or [H,Tq], or in its place, where P needs them, maximum and log-sum in base 2,
[B,H,Sq,2]. Recomputed: S, P and the dropout mask, a function of (seed, b, h, i, j). Nothing of size
Sq x Sk is stored but a bias gradient of that size. FLOPs: 4 B H Sq Sk D forward, 2.5 times that
backward, and 4 more for a bias gradient over queries and keys, whose kernel recomputes dS; least
bytes: q, k, v, o once forward. Tiles outside of the band or the length are skipped.
A row that sees nothing gives zeros. Deterministic: each gradient tile has one owner, no atomics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import INTERPRETED, LN2, LOG2E, dropout_arguments, dropout_keep
from .launch import (
    Launch,
    allow_tf32,
    architecture,
    dot_precision,
    layout,
    next_power_of_2,
    on_device,
    plans,
    remembered,
    unit_stride,
    unsupported_dtype,
)
from .registration import register

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
        "sm_90 sm_100": ((128, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2)),
        "sm_80 sm_86": ((128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2)),
        "gfx942": ((128, 64, 4, 1), (128, 32, 4, 1), (128, 32, 4, 1), (64, 32, 4, 1)),
        "other": ((64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 8, 1), (32, 16, 8, 1)),
    },
    ("forward", 32): {
        "sm_90": ((64, 32, 8, 2), (64, 32, 4, 2), (16, 32, 4, 2), (16, 16, 8, 2)),
        "sm_80 sm_86 sm_100": ((32, 32, 4, 2), (32, 32, 4, 2), (16, 32, 4, 2), (16, 16, 8, 2)),
        "gfx942": ((64, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
        "other": ((32, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 8, 1)),
    },
    ("dkdv", 16): {
        "sm_90": ((32, 128, 8, 2), (64, 128, 8, 2), (32, 128, 8, 2), (32, 64, 8, 2)),
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
        "other": ((16, 32, 4, 1), (32, 32, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    },
    ("dq", 16): {
        "sm_90": ((128, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
        "sm_100": ((128, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2)),
        "sm_80": ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 8, 2)),
        "sm_86": ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (32, 32, 8, 2)),
        "gfx942": ((64, 32, 4, 1), (64, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
        "other": ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 2), (16, 16, 4, 1)),
    },
    ("dq", 32): {
        "sm_90 sm_100": ((64, 32, 8, 1), (64, 32, 8, 1), (16, 32, 4, 2), (16, 16, 8, 2)),
        "sm_80 sm_86": ((32, 32, 4, 2), (32, 32, 4, 2), (16, 32, 4, 2), (16, 16, 8, 2)),
        "gfx942": ((32, 32, 4, 1), (32, 32, 4, 1), (32, 16, 4, 1), (32, 16, 4, 1)),
        "other": ((32, 16, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1), (16, 16, 8, 1)),
    },
    ("dbias", 16): {
        "sm_90 sm_100": ((64, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 1)),
        "sm_80 sm_86": ((32, 64, 8, 2), (32, 64, 8, 2), (32, 64, 8, 2), (32, 64, 8, 1)),
        "gfx942": ((64, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
        "other": ((32, 32, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1), (16, 32, 4, 1)),
    },
    ("dbias", 32): {
        "sm_90 sm_100": ((64, 32, 8, 1), (64, 32, 4, 1), (16, 32, 4, 1), (16, 32, 4, 1)),
        "gfx942": ((32, 32, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1), (16, 32, 4, 1)),
        "other": ((16, 32, 4, 1), (16, 32, 4, 1), (16, 32, 4, 1), (16, 32, 4, 1)),
    },
    # In the place of those above where a mask or a bias of queries and keys is read.
    ("forward full", 16): {
        "gfx942": ((128, 64, 4, 1), (128, 32, 4, 1), (128, 32, 8, 1), (64, 32, 4, 1)),
    },
    ("dkdv full", 32): {
        "sm_90": ((32, 64, 8, 1), (32, 32, 8, 1), (16, 16, 8, 2), (16, 16, 8, 2)),
        "sm_86": ((32, 32, 8, 2), (32, 32, 8, 2), (16, 16, 4, 2), (16, 16, 8, 2)),
        "sm_100": ((32, 64, 8, 1), (32, 64, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    },
    ("dq full", 16): {
        "sm_90": ((128, 32, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
        "sm_86": ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (32, 32, 4, 2)),
        "sm_100": ((128, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
    },
    ("dq full", 32): {
        "sm_90": ((64, 32, 8, 1), (64, 32, 4, 1), (16, 32, 4, 2), (16, 16, 8, 2)),
        "other": ((32, 16, 4, 1), (32, 16, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    },
}
CONFIGURATIONS = {
    (*key, arch): tuple(Tiles(*row) for row in rows)
    for key, table in _TABLES.items()
    for names, rows in table.items()
    for arch in names.split()
}


def configuration(
    kernel: str,
    arch: str,
    dtype: torch.dtype,
    head_block: int,
    q_length: int,
    k_length: int,
    full: bool,
) -> Tiles:
    """The tiles of a kernel: a function of architecture, dtype, padded head dim, lengths, and
    whether a mask or a bias of queries and keys is read.
    """
    if arch == "interpreter":  # few programs, no larger than the work: an operation's cost is fixed
        BM, BN = (min(128, max(16, next_power_of_2(n))) for n in (q_length, k_length))
        return Tiles(BM, BN, 4, 1)
    if kernel == "delta":  # 16 elements a thread
        return Tiles(2048 // head_block, 0, 4, 1)
    bits = 32 if dtype == torch.float32 else 16
    arch = arch if (kernel, bits, arch) in CONFIGURATIONS else "other"
    row = CONFIGURATIONS[kernel, bits, arch]
    if full:
        row = CONFIGURATIONS.get((kernel + " full", bits, arch), row)
    return row[max(0, (head_block - 1).bit_length() - 5)]


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
def _clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def _sequence(
    LENGTHS, STARTS, b, Sq, Sk, q_rows, k_rows, LENGTH: tl.constexpr, PACKED: tl.constexpr
):
    """(first row of the queries, of the keys, number of queries, of keys) of sequence b.

    LENGTHS holds the number of keys of each sequence, or in a packed batch the offsets of its keys;
    STARTS the offsets of its queries. Clamped, so that a bad one never reads out of bounds.
    """
    if PACKED:
        q0 = _clamp(tl.load(STARTS + b).to(tl.int32), 0, q_rows)
        k0 = _clamp(tl.load(LENGTHS + b).to(tl.int32), 0, k_rows)
        q1 = _clamp(tl.load(STARTS + b + 1).to(tl.int32), q0, q_rows)
        k1 = _clamp(tl.load(LENGTHS + b + 1).to(tl.int32), k0, k_rows)
        return q0.to(tl.int64), k0.to(tl.int64), tl.minimum(q1 - q0, Sq), tl.minimum(k1 - k0, Sk)
    elif LENGTH:
        length = _clamp(tl.load(LENGTHS + b).to(tl.int32), 0, Sk)
        return (b * 0).to(tl.int64), (b * 0).to(tl.int64), Sq, length
    else:
        return (b * 0).to(tl.int64), (b * 0).to(tl.int64), Sq, Sk


@triton.jit
def _keys_of_rows(
    i0, BM: tl.constexpr, length, shift, left, right, BN: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):  # fmt: skip
    """The keys lo <= j < hi that any of the queries i0 .. i0 + BM - 1 may see by length and band;
    lo is a multiple of BN.
    """
    lo = 0
    if LEFT:
        lo = tl.maximum(i0 + shift - left, 0) // BN * BN
    hi = length
    if RIGHT:
        hi = tl.minimum(hi, i0 + BM + shift + right)
    return lo, hi


@triton.jit
def _slope(SLOPES, s_ab, s_ah, b, h, ALIBI: tl.constexpr, ACC: tl.constexpr):
    """The ALiBi slope of a head, in base 2."""
    slope = 0.0
    if ALIBI:
        slope = tl.load(SLOPES + b * s_ab + h * s_ah).to(ACC) * LOG2E
    return slope


@triton.jit
def _score_scale(scale, softcap, SOFTCAP: tl.constexpr):
    """The factor on q . k that `_scores` expects."""
    if SOFTCAP:
        return scale / softcap * (2 * LOG2E)
    else:
        return scale * LOG2E


@triton.jit
def _base_2(bias, ACC: tl.constexpr):
    """A bias in base 2. One that is float32's then no more, below -2.3586e38, is -inf: it hides."""
    bias = bias.to(ACC) * LOG2E
    if bias.dtype == tl.float64:
        bias = tl.where(bias < -3.4028235677973366e38, float("-inf"), bias)
    return bias


@triton.jit
def _key_row(
    mask_base, s_mn, bias_base, s_bn, j, ok, Sk,
    MASK: tl.constexpr, BIAS: tl.constexpr, EDGE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """(which keys j a mask and a bias that are constant over the queries leave, that bias in base
    2): [BN] each.
    """
    bias = 0.0
    if MASK == 1:
        if EDGE:
            ok = ok & (tl.load(mask_base + j * s_mn, mask=j < Sk, other=0) != 0)
        else:
            ok = ok & (tl.load(mask_base + j * s_mn) != 0)
    if BIAS == 1:
        if EDGE:
            bias = _base_2(tl.load(bias_base + j * s_bn, mask=j < Sk, other=0.0), ACC)
        else:
            bias = _base_2(tl.load(bias_base + j * s_bn), ACC)
        ok = ok & (bias != float("-inf"))
    return ok, bias


@triton.jit
def _scores(
    s, i, j, r, key_ok, key_bias, mask_base, s_mm, s_mn, bias_base, s_bm, s_bn, qk_scale, softcap,
    slope, length, shift, left, right, Sk,
    MASK: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, EDGE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """(the scores in base 2, -inf where i may not see j, tanh of the softcap) from s = q . k, on
    indices that are already broadcast against each other, either way round.

    r is i, clamped to the rows there are and counted from the row that mask_base and bias_base
    point to. Without EDGE the whole tile lies inside the length and the band. What is added may be
    large, so that a score keeps few digits: each kernel has to round it alike, hence the fma.
    """
    tanh = s
    if SOFTCAP:
        s = 1.0 - 2.0 / (tl.math.exp2(s * qk_scale) + 1.0)
        tanh = s
        qk_scale = softcap * LOG2E
    if BIAS == 0:
        s = s * qk_scale
    elif BIAS == 1:
        s = tl.fma(s, qk_scale, key_bias)
    else:  # bounded by Sk, not by the length: the compiler knows Sk's divisibility
        if EDGE:
            tile = tl.load(bias_base + (r * s_bm + j * s_bn), mask=j < Sk, other=0.0)
        else:
            tile = tl.load(bias_base + (r * s_bm + j * s_bn))
        s = tl.fma(s, qk_scale, _base_2(tile, ACC))
    if ALIBI:
        s = tl.fma(tl.abs(i + shift - j).to(ACC), -slope, s)
    if EDGE or MASK > 0 or BIAS == 1:
        ok = j < length
        if MASK == 1 or BIAS == 1:
            ok = ok & key_ok
        if MASK == 2:
            if EDGE:
                ok = ok & (tl.load(mask_base + (r * s_mm + j * s_mn), mask=j < Sk, other=0) != 0)
            else:
                ok = tl.load(mask_base + (r * s_mm + j * s_mn)) != 0
                if BIAS == 1:
                    ok = ok & key_ok
        if EDGE and RIGHT:
            ok = ok & (j <= i + (shift + right))
        if EDGE and LEFT:
            ok = ok & (j >= i + (shift - left))
        s = tl.where(ok, s, float("-inf"))
        if SOFTCAP and (MASK == 1 or BIAS == 1):  # of a hidden key, which may hold anything
            tanh = tl.where(ok, tanh, 0.0)
    return s, tanh


# ----------------------------------------------------------------------------------------- forward


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
        key_ok, key_bias = _key_row(
            mask_base, s_mn, bias_base, s_bn, rows, inside, Sk, MASK, BIAS, EDGE, ACC
        )
        k = _load_rows(k_base, rows, s_kn, inside, D, BD, EDGE)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BM, BN]
        if BIAS == 1:
            key_bias = key_bias[None, :]
        s, _ = _scores(
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
        v = _load_rows(v_base, rows, s_vn, inside, DV, BDV, EDGE)
        if MASK == 1 or BIAS == 1:  # 0 * NaN: a hidden value may hold anything
            v = tl.where(key_ok[:, None], v, 0.0).to(v.dtype)
        acc = tl.dot(p.to(v.dtype), v, acc, PRECISION, out_dtype=ACC)
        m = m_new
    return acc, l, m


@triton.jit
def _forward(
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
    q0, k0, queries, length = _sequence(LENGTHS, STARTS, b, Sq, Sk, q_rows, k_rows, LENGTH, PACKED)
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
    q = _load_rows(Q + b * s_qb + h * s_qh + first * s_qm, r, s_qm, i < queries, D, BD, False)
    k_base = K + b * s_kb + g * s_kg + k0 * s_kn
    v_base = V + b * s_vb + g * s_vg + k0 * s_vn
    mask_base = MASKS + b * s_mb + h * s_mh + first * s_mm
    bias_base = BIASES + b * s_bb + h * s_bh + first * s_bm
    slope = _slope(SLOPES, s_ab, s_ah, b, h, ALIBI, ACC)
    qk_scale = _score_scale(scale, softcap, SOFTCAP)
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)
    lo, hi = _keys_of_rows(i0, BM, length, shift, left, right, BN, LEFT, RIGHT)
    full = length  # the tiles from `inner` to `full` lie inside the band and the length
    if RIGHT:
        full = _clamp(i0 + shift + right + 1, 0, length)
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
    row = _row(plane, h, q0, q_rows, PACKED)
    tl.store(LSE + row + i, lse, mask=i < queries)
    if BIAS > 0 or ALIBI:
        pair = STATISTICS + (row + i) * 2
        tl.store(pair, tl.where(empty, 0.0, m), mask=i < queries)
        total = tl.where(empty, float("inf"), tl.math.log2(sums))
        tl.store(pair + 1, total, mask=i < queries)
    acc = acc * (inv_keep / sums)[:, None]
    o_base = O + b * s_ob + h * s_oh + first * s_om
    _store_rows(o_base, r, s_om, i < queries, acc, DV, BDV)


# ---------------------------------------------------------------------------------------- backward


@triton.jit
def _row(plane, h, q0, q_rows, PACKED: tl.constexpr):
    """Where the rows of a (batch, head) begin in lse and delta: [B, H, Sq], or [H, Tq] packed."""
    if PACKED:
        return h.to(tl.int64) * q_rows + q0
    else:
        return plane.to(tl.int64) * q_rows


@triton.jit
def _delta(
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
    o = _load_rows(O + b * s_ob + h * s_oh + first * s_om, r, s_om, i < Sq, DV, BDV, True)
    do = _load_rows(DO + b * s_db + h * s_dh + first * s_dm, r, s_dm, i < Sq, DV, BDV, True)
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
def _backward_dkdv(
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
    q0, k0, queries, length = _sequence(LENGTHS, STARTS, b, Sq, Sk, q_rows, k_rows, LENGTH, PACKED)
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
    k = _load_rows(K + b * s_kb + g * s_kg + first * s_kn, c, s_kn, inside, D, BD, True)
    v = _load_rows(V + b * s_vb + g * s_vg + first * s_vn, c, s_vn, inside, DV, BDV, True)
    qk_scale = _score_scale(scale, softcap, SOFTCAP)
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
        slope = _slope(SLOPES, s_ab, s_ah, b, h, ALIBI, ACC)
        row = _row(plane, h, q0, q_rows, PACKED)
        key_ok, key_bias = _key_row(
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
            q = _load_rows(q_base, r, s_qm, i < queries, D, BD, False)
            peak, lse, delta = _row_statistics(LSE, DELTA, row, i, i < queries, BIAS > 0 or ALIBI)
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BN, BM]
            s, tanh = _scores(
                s, i[None, :], columns[:, None], r[None, :], key_ok[:, None], key_bias, mask_base,
                s_mm, s_mn, bias_base, s_bm, s_bn, qk_scale, softcap, slope, length, shift, left,
                right, Sk, MASK, BIAS, ALIBI, SOFTCAP, LEFT, RIGHT, True, ACC,
            )  # fmt: skip
            if BIAS > 0 or ALIBI:
                s -= peak[None, :]
            p = tl.math.exp2(s - lse[None, :])
            do = _load_rows(do_base, r, s_dm, i < queries, DV, BDV, False)
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
    _store_rows(DK + b * s_dkb + g * s_dkg + first * s_dkn, c, s_dkn, j < keys, dk, D, BD)
    _store_rows(DV_ + b * s_dvb + g * s_dvg + first * s_dvn, c, s_dvn, j < keys, dv, DV, BDV)


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
    s, tanh = _scores(
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
def _backward_dq(
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
    q0, k0, queries, length = _sequence(LENGTHS, STARTS, b, Sq, Sk, q_rows, k_rows, LENGTH, PACKED)
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
    q = _load_rows(Q + b * s_qb + h * s_qh + first * s_qm, r, s_qm, ok, D, BD, False)
    do = _load_rows(DO + b * s_db + h * s_dh + first * s_dm, r, s_dm, ok, DV, BDV, False)
    row = _row(plane, h, q0, q_rows, PACKED)
    peak, lse, delta = _row_statistics(LSE, DELTA, row, i, ok, BIAS > 0 or ALIBI)
    k_base = K + b * s_kb + g * s_kg + k0 * s_kn
    v_base = V + b * s_vb + g * s_vg + k0 * s_vn
    mask_base = MASKS + b * s_mb + h * s_mh + first * s_mm
    bias_base = BIASES + b * s_bb + h * s_bh + first * s_bm
    slope = _slope(SLOPES, s_ab, s_ah, b, h, ALIBI, ACC)
    qk_scale = _score_scale(scale, softcap, SOFTCAP)
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)

    dq = tl.zeros([BM, BD], ACC)
    lo, hi = _keys_of_rows(i0, BM, length, shift, left, right, BN, LEFT, RIGHT)
    for n0 in tl.range(lo, hi, BN):
        n0 = tl.multiple_of(n0, BN)
        j = n0 + tl.arange(0, BN)
        rows = j
        if WIDE:
            rows = j.to(tl.int64)
        inside = j < length
        k = _load_rows(k_base, rows, s_kn, inside, D, BD, True)
        v = _load_rows(v_base, rows, s_vn, inside, DV, BDV, True)
        key_ok, key_bias = _key_row(
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
    _store_rows(DQ + b * s_dqb + h * s_dqh + first * s_dqm, r, s_dqm, ok, dq, D, BD)


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
        x = _load_rows(x_base + d, x_rows, s_x, x_ok, min(D - d, WIDTH), WIDTH, False)
        y = _load_rows(y_base + d, y_rows, s_y, y_ok, min(D - d, WIDTH), WIDTH, True)
        s = tl.dot(x, tl.trans(y), s, PRECISION, out_dtype=ACC)
    return s


@triton.jit
def _backward_dbias(
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
    qk_scale = _score_scale(scale, softcap, SOFTCAP)
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)
    members = over_b * over_h
    if not BOTTOM:  # outside of the band, whatever the length: zeros
        lo, hi = _keys_of_rows(i0, BM, Sk, 0, left, right, BN, LEFT, RIGHT)
        members = tl.where((n0 >= lo) & (n0 < hi), members, 0)

    dbias = tl.zeros([BM, BN], ACC)
    for member in tl.range(0, members):
        b = own_b + member // over_h
        h = own_h + member % over_h
        g = h // GROUP
        plane = (b * H + h).to(tl.int32)
        _, _, _, length = _sequence(LENGTHS, STARTS, b, Sq, Sk, q_rows, k_rows, LENGTH, False)
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
        slope = _slope(SLOPES, s_ab, s_ah, b, h, ALIBI, ACC)
        key_ok, key_bias = _key_row(
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


# --------------------------------------------------------------------------------------- launchers

UNBOUNDED = 2**30  # a side of the band that has no bound, and more than any length


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
    return any(
        sum((n - 1) * abs(s) for n, s in zip(x.shape[-2:], x.stride()[-2:])) >= 2**31
        for x in tensors
    )


class _Plan:
    """What a call's shapes, strides, dtypes and options fix: everything but where its tensors lie.

    `tensors` are what else the kernels read, each or None: attn_mask, bias, alibi_slopes, lengths,
    starts, dropout_seed, sinks. `options`: dropout_p, is_causal, scale, window, causal_alignment,
    softcap, max_q, max_k. A packed batch comes as one batch of Tq queries and Tk keys, with the
    offsets of both, `starts` and `lengths`. `launch` holds the kernels of the call by name, each
    with all its arguments but the pointers. `apart`: the maximum and the log-sum of the scores are
    kept apart.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tensors: tuple[Tensor | None, ...],
        options: tuple[Any, ...],
    ) -> None:
        attn_mask, bias, alibi_slopes, lengths, starts, _, _ = tensors
        dropout_p, is_causal, scale, window, causal_alignment, softcap, max_q, max_k = options
        self.launch: dict[str, Launch] = {}
        batch, self.heads, q_rows, dim = query.shape
        self.groups, k_rows, width = key.shape[1], key.shape[2], value.shape[3]
        self.batch, self.q_length, self.k_length = batch, q_rows, k_rows
        if starts is not None:
            self.batch, self.q_length, self.k_length = starts.shape[0] - 1, max_q, max_k
        self.arch = architecture(query.device)
        self.dtype = query.dtype
        self.apart = bias is not None or alibi_slopes is not None
        self.head_block = max(16, next_power_of_2(max(dim, width)))
        full = (batch, self.heads, q_rows, k_rows)
        kinds, strides, wide = [], [], _spans_int32(query, key, value)
        for x in (attn_mask, bias):  # 0 none, 1 constant over the queries, 2 one of every pair
            x = None if x is None else x.expand(full)
            kinds.append(0 if x is None else 1 if x.stride(2) == 0 or q_rows == 1 else 2)
            strides.append((0, 0, 0, 0) if x is None else x.stride())
            wide = wide or (x is not None and _spans_int32(x))
        slopes: tuple[int, ...] = (0, 0)
        if alibi_slopes is not None:
            slopes = alibi_slopes.expand(batch, self.heads).stride()
        left, right = (UNBOUNDED if n < 0 else min(n, UNBOUNDED) for n in window or (-1, -1))
        if is_causal:
            right = 0
        threshold, inv_keep = dropout_arguments(dropout_p)
        self.constants = dict(
            D=dim,
            DV=width,
            BD=max(16, next_power_of_2(dim)),
            BDV=max(16, next_power_of_2(width)),
            MASK=kinds[0],
            BIAS=kinds[1],
            ALIBI=alibi_slopes is not None,
            SOFTCAP=softcap is not None,
            LEFT=left < UNBOUNDED,
            RIGHT=right < UNBOUNDED,
            BOTTOM=causal_alignment == "bottom_right",
            LENGTH=lengths is not None and starts is None,
            PACKED=starts is not None,
            DROPOUT=dropout_p > 0,
            WIDE=wide,
            PRECISION=dot_precision(self.arch),
            ACC=tl.float64 if query.dtype == torch.float64 else tl.float32,
        )
        self.scalars = (
            *self.strides(query), *self.strides(key), *self.strides(value), *strides[0],
            *strides[1], *slopes,
            self.heads, self.heads // max(1, self.groups), self.q_length, self.k_length,
            q_rows, k_rows, left, right, scale, 1.0 if softcap is None else softcap,
            threshold, inv_keep,
        )  # fmt: skip

    def add(
        self, name: str, kernel: Any, blocks: Any, strides: tuple[int, ...], **constants: Any
    ) -> None:
        """Adds a launch; `blocks` gives the number of programs for its tiles."""
        tiles = self.tiles(name)
        constants = self.constants | dict(BM=tiles.BM, BN=tiles.BN) | constants
        scalars = (*strides, *self.scalars)
        self.launch[name] = Launch(
            kernel, blocks(tiles), scalars, constants, tiles.warps, tiles.stages
        )

    def strides(self, x: Tensor) -> tuple[int, int, int]:
        """Of batch, head and row; a packed tensor has rows only, for the kernels."""
        batch, head, row, _ = x.stride()
        return 0 if self.constants["PACKED"] else batch, head, row

    def tiles(self, kernel: str) -> Tiles:
        lengths = self.q_length, self.k_length
        full = 2 in (self.constants["MASK"], self.constants["BIAS"])
        return configuration(kernel, self.arch, self.dtype, self.head_block, *lengths, full)

    def rows(self, tiles: Tiles) -> int:
        """Programs that own the queries of a head."""
        return triton.cdiv(self.q_length, tiles.BM) * self.batch * self.heads

    def columns(self, tiles: Tiles) -> int:
        """Programs that own the keys of a key-value head."""
        return triton.cdiv(self.k_length, tiles.BN) * self.batch * self.groups


def _outputs(query: Tensor, value: Tensor, apart: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(output, lse, statistics), empty; the last without elements where lse is all that P needs."""
    output = _heads_like(query, query.shape[1], value.shape[3])
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = query.shape[:3]
    pairs = (*rows, 2) if apart else (0,)
    return output, query.new_empty(rows, dtype=dtype), query.new_empty(pairs, dtype=dtype)


class _Forward(_Plan):
    """The forward, and what its outputs look like."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tensors: tuple[Tensor | None, ...],
        options: tuple[Any, ...],
    ) -> None:
        super().__init__(query, key, value, tensors, options)
        outputs = _outputs(query, value, self.apart)
        self.outputs = [(x.shape, x.stride(), x.dtype) for x in outputs]
        sink = tensors[-1] is not None
        self.add("forward", _forward, self.rows, self.strides(outputs[0]), SINK=sink)
        self.forward = self.launch["forward"]


class _Backward(_Plan):
    """The kernels of the backward that are needed.

    `bias_grad` is how the bias's gradient comes about: "tile" by a kernel of its own, "key", for a
    bias constant over the queries, beside dK and dV, "row", for one constant over the keys, from
    dlse and the weight of the sink; "" where it is not wanted. The sinks' gradient comes about
    likewise.
    """

    def __init__(
        self,
        grad_output: Tensor,
        grad_lse: Tensor | None,
        output: Tensor,
        needs: tuple[bool, ...],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tensors: tuple[Tensor | None, ...],
        options: tuple[Any, ...],
    ) -> None:
        super().__init__(query, key, value, tensors, options)
        bias = tensors[1]
        batch, heads, rows, _ = query.shape
        self.constants["WIDE"] = self.constants["WIDE"] or _spans_int32(grad_output, output)
        self.bias_grad = _bias_grad(needs[3], bias, self.k_length)
        like = [_heads_like(x, x.shape[1], x.shape[3]) for x in (query, key, value)]
        self.grads = [(x.shape, x.stride()) for x in like]
        dq, dk, dv = (self.strides(x) for x in like)
        do = self.strides(grad_output)
        tiles = self.tiles("delta")
        delta = {name: self.constants[name] for name in ("DV", "BDV", "WIDE", "ACC")}
        self.launch["delta"] = Launch(
            _delta,
            triton.cdiv(rows, tiles.BM) * batch * heads,
            (*output.stride()[:3], *grad_output.stride()[:3], heads, rows),
            delta | dict(BM=tiles.BM, HAS_DLSE=grad_lse is not None),
            tiles.warps,
            tiles.stages,
        )
        key_grad = self.bias_grad == "key"
        sink = tensors[-1] is not None
        self.sink_grad, self.sink_weight = needs[4], sink and (needs[4] or self.bias_grad == "row")
        self.needs = (needs[0], *(needs[1] or needs[2] or key_grad,) * 2)
        if self.needs[1]:
            self.add("dkdv", _backward_dkdv, self.columns, (*dk, *dv, *do), KEY_GRAD=key_grad)
        if self.needs[0]:
            self.add("dq", _backward_dq, self.rows, (*dq, *do))
        if self.bias_grad == "tile":
            assert bias is not None
            b, h, q, k = self.bias_shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
            strides = (h * q * k * (b > 1), q * k * (h > 1), k)
            over = (batch // max(1, b), heads // max(1, h))

            def blocks(tiles: Tiles) -> int:
                return b * h * triton.cdiv(q, tiles.BM) * triton.cdiv(k, tiles.BN) * all(over)

            self.add("dbias", _backward_dbias, blocks, (*strides, *over, *do))

    def run(
        self, grad_output, grad_lse, output, lse, statistics, query, key, value, tensors
    ) -> list[Tensor]:
        """Launches what is needed: [dq, dk, dv, dbias, dsinks], an unwanted one empty."""
        bias, sinks, pointers = tensors[1], tensors[-1], _pointers(query, tensors)
        dq, dk, dv = (
            query.new_empty_strided(*grad) if needed else query.new_empty(0)
            for grad, needed in zip(self.grads, self.needs)
        )
        delta = torch.empty_like(lse)
        inputs = query, key, value, grad_output
        launch = self.launch
        if len(launch) > 1 or self.sink_weight:
            dlse = lse if grad_lse is None else grad_lse.contiguous()
            launch["delta"](output, grad_output, dlse, delta)
        dbias = query.new_empty(0)
        if self.bias_grad == "key":
            dbias = lse.new_empty(self.batch, self.heads, 1, self.k_length)
        rows = (statistics if self.apart else lse), delta
        if "dkdv" in launch:
            launch["dkdv"](*inputs, dk, dv, dbias, *rows, *pointers)
        if "dq" in launch:
            launch["dq"](*inputs, dq, *rows, *pointers)
        if "dbias" in launch:
            dbias = bias.new_empty(bias.shape) if query.numel() else bias.new_zeros(bias.shape)
            launch["dbias"](*inputs, dbias, *rows, *pointers)
        dsinks, moved = query.new_empty(0), None
        if self.sink_weight:  # what a row's gradient moves to its sink
            sink = sinks.view(-1, 1).to(lse.dtype)
            if self.apart:
                peak, total = statistics.unbind(-1)
                moved = torch.exp2(sink * LOG2E.value - peak - total) * delta
            else:  # -inf for both: no weight
                moved = torch.exp(sink - lse.clamp_min(torch.finfo(lse.dtype).min)) * delta
            if self.sink_grad:
                dsinks = -moved.sum((0, 2)).to(sinks.dtype)
        if self.bias_grad == "row":  # exactly dlse and that, where the row sees a key
            dbias = torch.zeros_like(lse) if grad_lse is None else grad_lse
            dbias = dbias if moved is None else dbias + moved
            dbias = dbias.masked_fill(lse == float("-inf"), 0.0).unsqueeze(3)
        if self.bias_grad in ("key", "row"):
            dbias = dbias.sum_to_size(bias.shape).to(bias.dtype)
        return [dq, dk, dv, dbias, dsinks]


def _bias_grad(needed: bool, bias: Tensor | None, k_length: int) -> str:
    if not needed or bias is None:
        return ""
    if (bias.dim() == 0 or bias.shape[-1] == 1) and k_length != 1:
        return "row"
    return "key" if bias.dim() < 2 or bias.shape[-2] == 1 else "tile"


def _pointers(query: Tensor, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """What all kernels read, as `_Plan` names it; for one that is not there, the query."""
    attn_mask, bias, alibi_slopes, lengths, starts, seed, _ = tensors
    return (
        query if attn_mask is None else attn_mask.view(torch.uint8),
        query if bias is None else bias,
        query if alibi_slopes is None else alibi_slopes,
        query if lengths is None else lengths,
        query if starts is None else starts,
        query if seed is None else seed,
    )


def _signature(query, key, value, tensors, options) -> tuple[Any, ...]:
    """All that a `_Plan` is made from, as a key: its tensors by their layout. (Written out: it is
    most of what a call costs on the host.)
    """
    attn_mask, bias, alibi_slopes, lengths, starts, seed, sinks = tensors
    dtype = query.dtype
    return (
        query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride(),
        query.data_ptr() & 15, key.data_ptr() & 15, value.data_ptr() & 15, dtype, query.device,
        options,
        dtype is torch.float32 and allow_tf32(),
        None if attn_mask is None else layout(attn_mask), None if bias is None else layout(bias),
        None if alibi_slopes is None else layout(alibi_slopes),
        None if lengths is None else (lengths.dtype, lengths.data_ptr() & 15),
        None if starts is None else (starts.shape, starts.dtype, starts.data_ptr() & 15),
        None if seed is None else seed.data_ptr() & 15,
        None if sinks is None else (sinks.dtype, sinks.data_ptr() & 15),
    )  # fmt: skip


def _run_forward(query, key, value, tensors, options) -> tuple[Tensor, Tensor, Tensor]:
    """(output, lse, statistics); `tensors` and `options` as in `_Plan`."""
    signature = _signature(query, key, value, tensors, options)
    plan = plans.get(signature)
    if plan is None:
        given = query, key, value
        query, key, value = map(unit_stride, given)
        if any(x is not y for x, y in zip(given, (query, key, value))):
            return _run_forward(query, key, value, tensors, options)
        plan = remembered(signature, _Forward(query, key, value, tensors, options))
    outputs = [
        query.new_empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in plan.outputs
    ]
    sinks = query if tensors[-1] is None else tensors[-1]
    with on_device(query):
        plan.forward(query, key, value, *outputs, sinks, *_pointers(query, tensors))
    return tuple(outputs)


def _run_backward(
    grad_output, grad_lse, output, lse, statistics, needs, query, key, value, tensors, options
) -> list[Tensor]:
    """[dq, dk, dv, dbias, dsinks], an unwanted one empty."""
    signature = (
        *_signature(query, key, value, tensors, options), layout(grad_output), layout(grad_lse),
        layout(output), layout(lse), layout(statistics), needs,  # hooks may have moved them
    )  # fmt: skip
    plan = plans.get(signature)
    if plan is None:
        given = grad_output, output, query, key, value, lse, statistics
        grad_output, output, query, key, value = map(unit_stride, given[:5])
        lse, statistics = lse.contiguous(), statistics.contiguous()
        now = grad_output, output, query, key, value, lse, statistics
        if any(x is not y for x, y in zip(given, now)):
            return _run_backward(
                grad_output, grad_lse, output, lse, statistics, needs, query, key, value, tensors,
                options,
            )  # fmt: skip
        made = _Backward(grad_output, grad_lse, output, needs, query, key, value, tensors, options)
        plan = remembered(signature, made)
    with on_device(query):
        return plan.run(grad_output, grad_lse, output, lse, statistics, query, key, value, tensors)


_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, bool is_causal, "
    "float scale, bool enable_gqa, Tensor? bias, Tensor? key_lengths, int[]? window, "
    "str causal_alignment, Tensor? alibi_slopes, float? softcap, Tensor? sinks, "
    "Tensor? dropout_seed"
)


def _fake(query, key, value, *rest):
    bias, alibi_slopes = rest[5], rest[9]
    apart = bias is not None or alibi_slopes is not None
    return _outputs(unit_stride(query), value, apart)


@register(
    f"scaled_dot_product_attention({_ARGUMENTS}, bool return_lse) "
    "-> (Tensor output, Tensor lse, Tensor statistics)",
    _fake,
)
def forward(
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, bias, key_lengths,
    window, causal_alignment, alibi_slopes, softcap, sinks, dropout_seed, return_lse,
):  # fmt: skip
    """Launches the forward: (output [B,H,Sq,DV], lse [B,H,Sq], statistics [B,H,Sq,2] or [0])."""
    return _run_forward(
        query, key, value,
        (attn_mask, bias, alibi_slopes, key_lengths, None, dropout_seed, sinks),
        (dropout_p, is_causal, scale, window and tuple(window), causal_alignment, softcap, 0, 0),
    )  # fmt: skip


def _fake_backward(grad_output, grad_lse, query, key, value, *rest):
    bias, sinks, needs = rest[5], rest[11], rest[-1]
    key_grad = _bias_grad(needs[3], bias, key.shape[2]) == "key"
    needs = (needs[0], *(needs[1] or needs[2] or key_grad,) * 2, *needs[3:])
    grads = [_heads_like(x, x.shape[1], x.shape[3]) for x in map(unit_stride, (query, key, value))]
    grads += [query if x is None else x.new_empty(x.shape) for x in (bias, sinks)]
    return tuple(x if need else query.new_empty(0) for x, need in zip(grads, needs))


@register(
    "scaled_dot_product_attention_backward(Tensor grad_output, Tensor? grad_lse, "
    f"{_ARGUMENTS}, Tensor output, Tensor lse, Tensor statistics, bool[] needs) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias, "
    "Tensor grad_sinks)",
    _fake_backward,
)
def backward(
    grad_output, grad_lse, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
    bias, key_lengths, window, causal_alignment, alibi_slopes, softcap, sinks, dropout_seed, output,
    lse, statistics, needs,
):  # fmt: skip
    """Launches delta, then dK/dV, dQ and dBias as far as they are needed."""
    grads = _run_backward(
        grad_output, grad_lse, output, lse, statistics, tuple(needs), query, key, value,
        (attn_mask, bias, alibi_slopes, key_lengths, None, dropout_seed, sinks),
        (dropout_p, is_causal, scale, window and tuple(window), causal_alignment, softcap, 0, 0),
    )  # fmt: skip
    return tuple(grads)


# ------------------------------------------------------------------------------------------ packed

_PACKED_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, float scale, "
    "str causal_alignment, int[]? window, Tensor? sinks, Tensor? dropout_seed"
)


def _heads_first(x: Tensor) -> Tensor:
    """[tokens, heads, width] as one batch, [1, heads, tokens, width]."""
    return unit_stride(x).transpose(0, 1).unsqueeze(0)


def _tokens_first(x: Tensor) -> Tensor:
    return x.squeeze(0).transpose(0, 1)


def _fake_packed(query, key, value, *_):
    output, lse, _ = _outputs(_heads_first(query), _heads_first(value), False)
    return _tokens_first(output), lse.squeeze(0)


@register(
    f"packed_attention({_PACKED_ARGUMENTS}) -> (Tensor output, Tensor lse)",
    _fake_packed,
)
def packed_forward(
    query, key, value, cu_seqlens_q, cu_seqlens_k, max_q, max_k, dropout_p, is_causal, scale,
    causal_alignment, window, sinks, dropout_seed,
):  # fmt: skip
    """Launches the forward over a packed batch: (output [Tq,H,DV], lse [H,Tq])."""
    query, key, value = _heads_first(query), _heads_first(key), _heads_first(value)
    output, lse, _ = _run_forward(
        query, key, value,
        (None, None, None, cu_seqlens_k, cu_seqlens_q, dropout_seed, sinks),
        (dropout_p, is_causal, scale, window and tuple(window), causal_alignment, None, max_q,
         max_k),
    )  # fmt: skip
    return _tokens_first(output), lse.squeeze(0)


def _fake_packed_backward(grad_output, query, key, value, *rest):
    sinks, needs = rest[9], rest[-1]
    needs = (needs[0], *(needs[1] or needs[2],) * 2, needs[3])
    grads = [
        _tokens_first(_heads_like(x, x.shape[1], x.shape[3]))
        for x in map(_heads_first, (query, key, value))
    ]
    grads.append(query if sinks is None else sinks.new_empty(sinks.shape))
    return tuple(x if need else query.new_empty(0) for x, need in zip(grads, needs))


@register(
    f"packed_attention_backward(Tensor grad_output, {_PACKED_ARGUMENTS}, Tensor output, "
    "Tensor lse, bool[] needs) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_sinks)",
    _fake_packed_backward,
)
def packed_backward(
    grad_output, query, key, value, cu_seqlens_q, cu_seqlens_k, max_q, max_k, dropout_p, is_causal,
    scale, causal_alignment, window, sinks, dropout_seed, output, lse, needs,
):  # fmt: skip
    """Launches delta, then dK/dV and dQ as far as they are needed, over a packed batch."""
    query, key, value = _heads_first(query), _heads_first(key), _heads_first(value)
    grad_output, output, lse = _heads_first(grad_output), _heads_first(output), lse.unsqueeze(0)
    grads = _run_backward(
        grad_output, None, output, lse, lse, (*needs[:3], False, needs[3]), query, key, value,
        (None, None, None, cu_seqlens_k, cu_seqlens_q, dropout_seed, sinks),
        (dropout_p, is_causal, scale, window and tuple(window), causal_alignment, None, max_q,
         max_k),
    )  # fmt: skip
    dq, dk, dv, _, dsinks = grads
    return *(_tokens_first(x) if x.dim() == 4 else x for x in (dq, dk, dv)), dsinks


def supports(query: Tensor, *_: Any, **__: Any) -> str | None:
    """Why the kernels cannot run this call, or None."""
    return unsupported_dtype(query)
