"""What the attention kernels share: rows of a matrix, sequences, the band, masks and the scores."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common import LOG2E


@triton.jit
def load_rows(base, rows, stride, ok, D: tl.constexpr, BD: tl.constexpr, GUARD: tl.constexpr):
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
def store_rows(base, rows, stride, ok, x, D: tl.constexpr, BD: tl.constexpr):
    d = tl.arange(0, BD)
    mask = ok[:, None]
    if BD != D:
        mask = mask & (d < D)[None, :]
    tl.store(base + (rows[:, None] * stride + d[None, :]), x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def locate_sequence(
    LENGTHS, STARTS, b, Sq, Sk, q_rows, k_rows, LENGTH: tl.constexpr, PACKED: tl.constexpr
):
    """(first row of the queries, of the keys, number of queries, of keys) of sequence b.

    LENGTHS holds the number of keys of each sequence, or in a packed batch the offsets of its keys;
    STARTS the offsets of its queries. Clamped, so that a bad one never reads out of bounds.
    """
    if PACKED:
        q0 = clamp(tl.load(STARTS + b).to(tl.int32), 0, q_rows)
        k0 = clamp(tl.load(LENGTHS + b).to(tl.int32), 0, k_rows)
        q1 = clamp(tl.load(STARTS + b + 1).to(tl.int32), q0, q_rows)
        k1 = clamp(tl.load(LENGTHS + b + 1).to(tl.int32), k0, k_rows)
        return q0.to(tl.int64), k0.to(tl.int64), tl.minimum(q1 - q0, Sq), tl.minimum(k1 - k0, Sk)
    elif LENGTH:
        length = clamp(tl.load(LENGTHS + b).to(tl.int32), 0, Sk)
        return (b * 0).to(tl.int64), (b * 0).to(tl.int64), Sq, length
    else:
        return (b * 0).to(tl.int64), (b * 0).to(tl.int64), Sq, Sk


@triton.jit
def keys_of_rows(
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
def load_slope(SLOPES, s_ab, s_ah, b, h, ALIBI: tl.constexpr, ACC: tl.constexpr):
    """The ALiBi slope of a head, in base 2."""
    slope = 0.0
    if ALIBI:
        slope = tl.load(SLOPES + b * s_ab + h * s_ah).to(ACC) * LOG2E
    return slope


@triton.jit
def score_scale(scale, softcap, SOFTCAP: tl.constexpr):
    """The factor on q . k that `_scores` expects."""
    if SOFTCAP:
        return scale / softcap * (2 * LOG2E)
    else:
        return scale * LOG2E


@triton.jit
def in_base_2(bias, ACC: tl.constexpr):
    """A bias in base 2. One that is float32's then no more, below -2.3586e38, is -inf: it hides."""
    bias = bias.to(ACC) * LOG2E
    if bias.dtype == tl.float64:
        bias = tl.where(bias < -3.4028235677973366e38, float("-inf"), bias)
    return bias


@triton.jit
def key_row(
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
            bias = in_base_2(tl.load(bias_base + j * s_bn, mask=j < Sk, other=0.0), ACC)
        else:
            bias = in_base_2(tl.load(bias_base + j * s_bn), ACC)
        ok = ok & (bias != float("-inf"))
    return ok, bias


@triton.jit
def scores(
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
        s = tl.fma(s, qk_scale, in_base_2(tile, ACC))
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


@triton.jit
def first_row(plane, h, q0, q_rows, PACKED: tl.constexpr):
    """Where the rows of a (batch, head) begin in lse and delta: [B, H, Sq], or [H, Tq] packed."""
    if PACKED:
        return h.to(tl.int64) * q_rows + q0
    else:
        return plane.to(tl.int64) * q_rows
