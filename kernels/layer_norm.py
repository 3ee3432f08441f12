"""LayerNorm over rows of N features (Ba, Kiros, Hinton 2016), in the biased form and in the
Annotated Transformer's; RMSNorm (Zhang and Sennrich 2019); and residual + dropout + LayerNorm.

Forward, per row:
    s = x, or residual + Z x with Z = keep / (1 - p), rounded to the dtype of the residual
    mean = sum(s) / N                       rms: 0
    r = 1 / sqrt(sum((s - mean)^2) / N + eps)
        unbiased: r = 1 / (std + eps), std = sqrt(sum((s - mean)^2) / (N - 1))
    y = weight * xhat + bias, xhat = (s - mean) * r
Backward, with g = weight * dy, and ds the gradient of s itself:
    ds + r * (g - sum(g) / N - xhat * c)    rms: without sum(g) / N
    c = sum(g * xhat) / N
        unbiased: c = sum(g * xhat) / ((N - 1) * std * r), std * r = 1 - eps * r
    is the gradient of x, or of the residual, and times Z that of x
    dweight = sum over rows of dy * xhat, dbias = sum over rows of dy

Shapes: x and residual [..., N], weight and bias [N], mean and r [M] for M rows. Any dtype in and
out, statistics and sums in float32 (float64 for float64). Saved: s, weight, mean, r. Recomputed:
xhat and the dropout mask, a function of (seed, row, column). Least bytes: x and y once forward; s,
dy and dx once backward; with a residual its s and its ds once more. Rows up to 8192 features stay
in registers; wider ones, up to 65536, are walked in blocks. The weight gradients are summed in two
stages, each program over a fixed run of rows: no atomics, the same bits every time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import INTERPRETED, dropout_arguments, row_dropout_keep
from .launch import architecture, next_power_of_2, on_device, unit_stride, unsupported_dtype
from .registration import register

__all__ = ["INTERPRETED", "supports"]

MAX_FEATURES = 65536
ONE_BLOCK = 8192  # features that one program holds in registers
PARTIAL_SUMS = 256  # runs of rows, and so partial sums, of the weight gradients


class Tiles(NamedTuple):
    """BM rows of BLOCK features at a time."""

    BM: int
    BLOCK: int
    warps: int


WIDE_WEIGHTS = Tiles(8, 256, 4)  # of the weight gradients, where a row is several blocks


def configuration(n: int, arch: str) -> Tiles:
    """Whole rows where they fit, several of them where they are short; else blocks of 4096
    features.
    """
    block = max(16, min(next_power_of_2(n), ONE_BLOCK if n <= ONE_BLOCK else 4096))
    if arch == "interpreter":  # few programs: each operation has a fixed cost
        return Tiles(max(1, min(64, 65536 // block)), block, 4)
    warps = 4 if block <= 2048 else 8 if block <= 4096 or arch in ("gfx942", "other") else 16
    return Tiles(max(1, 2048 // block), block, warps)


# ----------------------------------------------------------------------------------------- kernels


@triton.jit
def _tile(base, rows, s_row, columns, M, N, ACC: tl.constexpr):
    """[BM, BLOCK] of a matrix, zero outside of it."""
    ok = (rows < M)[:, None] & (columns < N)[None, :]
    return tl.load(base + (rows[:, None] * s_row + columns[None, :]), mask=ok, other=0.0).to(ACC)


@triton.jit
def _store_tile(base, rows, s_row, columns, M, N, x):
    ok = (rows < M)[:, None] & (columns < N)[None, :]
    pointers = base + (rows[:, None] * s_row + columns[None, :])
    tl.store(pointers, x.to(base.dtype.element_ty), mask=ok)


@triton.jit
def _vector(base, columns, N, ACC: tl.constexpr):
    return tl.load(base + columns, mask=columns < N, other=0.0).to(ACC)[None, :]


@triton.jit
def _affine(xhat, W, B, columns, N, HAS_W: tl.constexpr, HAS_B: tl.constexpr, ACC: tl.constexpr):
    y = xhat
    if HAS_W:
        y = y * _vector(W, columns, N, ACC)
    if HAS_B:
        y = y + _vector(B, columns, N, ACC)
    return y


@triton.jit
def _reciprocal(squares, N, eps, UNBIASED: tl.constexpr):
    """r, from the sum of the squared deviations."""
    if UNBIASED:
        return 1.0 / (tl.sqrt(squares / (N - 1)) + eps)
    else:
        return 1.0 / tl.sqrt(squares / N + eps)


@triton.jit
def _sum(
    X, RES, rows, s_x, s_res, columns, o, M, N, seed, threshold, inv_keep,
    BM: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, DROPOUT: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """s, as it is stored: [BM, BLOCK]."""
    x = _tile(X, rows, s_x, columns, M, N, ACC)
    if DROPOUT:
        x = tl.where(row_dropout_keep(seed, rows, o, threshold, BM, BLOCK), x * inv_keep, 0.0)
    if RESIDUAL:
        x = x + _tile(RES, rows, s_res, columns, M, N, ACC)
        x = x.to(RES.dtype.element_ty).to(ACC)
    return x


@triton.jit
def _mean(total, N, RMS: tl.constexpr):
    if RMS:
        return tl.zeros_like(total)
    else:
        return total / N


@triton.jit
def _forward(
    X, RES, W, B, Y, S, MEAN, R, SEED, s_x, s_res, M, N, eps, threshold, inv_keep,
    BM: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr, UNBIASED: tl.constexpr,
    RMS: tl.constexpr, RESIDUAL: tl.constexpr, DROPOUT: tl.constexpr, HAS_W: tl.constexpr,
    HAS_B: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program owns BM rows: in registers if ONE, else in three walks, of which two hit the
    cache.
    """
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    rows = i.to(tl.int64)
    c = tl.arange(0, BLOCK)
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)
    if ONE:
        x = _sum(
            X, RES, rows, s_x, s_res, c, 0, M, N, seed, threshold, inv_keep, BM, BLOCK, RESIDUAL,
            DROPOUT, ACC,
        )  # fmt: skip
        if RESIDUAL:
            _store_tile(S, rows, N, c, M, N, x)
        mean = _mean(tl.sum(x, 1), N, RMS)
        x = tl.where((c < N)[None, :], x - mean[:, None], 0.0)
        r = _reciprocal(tl.sum(x * x, 1), N, eps, UNBIASED)
        y = _affine(x * r[:, None], W, B, c, N, HAS_W, HAS_B, ACC)
        _store_tile(Y, rows, N, c, M, N, y)
    else:
        total = tl.zeros([BM, BLOCK], ACC)
        if not RMS:
            for o in tl.range(0, N, BLOCK):
                total += _sum(
                    X, RES, rows, s_x, s_res, o + c, o, M, N, seed, threshold, inv_keep, BM, BLOCK,
                    RESIDUAL, DROPOUT, ACC,
                )  # fmt: skip
        mean = _mean(tl.sum(total, 1), N, RMS)
        total = tl.zeros([BM, BLOCK], ACC)
        for o in tl.range(0, N, BLOCK):
            x = _sum(
                X, RES, rows, s_x, s_res, o + c, o, M, N, seed, threshold, inv_keep, BM, BLOCK,
                RESIDUAL, DROPOUT, ACC,
            )  # fmt: skip
            x = tl.where((o + c < N)[None, :], x - mean[:, None], 0.0)
            total += x * x
        r = _reciprocal(tl.sum(total, 1), N, eps, UNBIASED)
        for o in tl.range(0, N, BLOCK):
            x = _sum(
                X, RES, rows, s_x, s_res, o + c, o, M, N, seed, threshold, inv_keep, BM, BLOCK,
                RESIDUAL, DROPOUT, ACC,
            )  # fmt: skip
            if RESIDUAL:
                _store_tile(S, rows, N, o + c, M, N, x)
            xhat = (x - mean[:, None]) * r[:, None]
            y = _affine(xhat, W, B, o + c, N, HAS_W, HAS_B, ACC)
            _store_tile(Y, rows, N, o + c, M, N, y)
    tl.store(MEAN + i, mean, mask=i < M)
    tl.store(R + i, r, mask=i < M)


@triton.jit
def _coefficient(products, r, N, eps, UNBIASED: tl.constexpr):
    """c, from sum(g * xhat). A constant row has s = 0 and xhat = 0: its c is 0."""
    if UNBIASED:
        return products / ((N - 1) * tl.maximum(1.0 - eps * r, 1e-30))
    else:
        return products / N


@triton.jit
def _scaled(dy, W, columns, N, HAS_W: tl.constexpr, ACC: tl.constexpr):
    """g = weight * dy"""
    if HAS_W:
        dy = dy * _vector(W, columns, N, ACC)
    return dy


@triton.jit
def _store_gradients(
    DX, DIN, DS, dx, rows, s_ds, columns, o, M, N, seed, threshold, inv_keep,
    BM: tl.constexpr, BLOCK: tl.constexpr, HAS_DS: tl.constexpr, RESIDUAL: tl.constexpr,
    DROPOUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dx + ds, which is the residual's gradient, and times Z the input's."""
    if HAS_DS:
        dx += _tile(DS, rows, s_ds, columns, M, N, ACC)
    _store_tile(DX, rows, N, columns, M, N, dx)
    if RESIDUAL:
        if DROPOUT:
            dx = tl.where(row_dropout_keep(seed, rows, o, threshold, BM, BLOCK), dx * inv_keep, 0.0)
        _store_tile(DIN, rows, N, columns, M, N, dx)


@triton.jit
def _backward(
    X, W, DY, DS, DX, DIN, DW, DB, MEAN, R, SEED, s_x, s_dy, s_ds, M, N, eps, threshold, inv_keep,
    rows_per_program,
    BM: tl.constexpr, BLOCK: tl.constexpr, UNBIASED: tl.constexpr, RMS: tl.constexpr,
    RESIDUAL: tl.constexpr, DROPOUT: tl.constexpr, HAS_DS: tl.constexpr, HAS_W: tl.constexpr,
    NEED_X: tl.constexpr, NEED_W: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program owns a fixed run of rows, dx of each and the sums of dweight and dbias over all
    of them.
    """
    first = tl.program_id(0) * rows_per_program
    end = tl.minimum(M, first + rows_per_program)
    c = tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK], ACC)
    db = tl.zeros([BLOCK], ACC)
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)
    for o in tl.range(0, rows_per_program, BM):
        i = first + o + tl.arange(0, BM)
        rows = i.to(tl.int64)
        dy = _tile(DY, rows, s_dy, c, end, N, ACC)
        mean = tl.load(MEAN + i, mask=i < end, other=0.0)
        r = tl.load(R + i, mask=i < end, other=0.0)[:, None]
        xhat = (_tile(X, rows, s_x, c, end, N, ACC) - mean[:, None]) * r
        if NEED_X:
            g = _scaled(dy, W, c, N, HAS_W, ACC)  # zero past N, whatever xhat is there
            coefficient = _coefficient(tl.sum(g * xhat, 1)[:, None], r, N, eps, UNBIASED)
            dx = (g - _mean(tl.sum(g, 1), N, RMS)[:, None] - xhat * coefficient) * r
            _store_gradients(
                DX, DIN, DS, dx, rows, s_ds, c, 0, end, N, seed, threshold, inv_keep, BM, BLOCK,
                HAS_DS, RESIDUAL, DROPOUT, ACC,
            )  # fmt: skip
        if NEED_W:
            dw += tl.sum(dy * xhat, 0)
            db += tl.sum(dy, 0)
    if NEED_W:
        partial = tl.program_id(0).to(tl.int64) * N
        tl.store(DW + partial + c, dw, mask=c < N)
        tl.store(DB + partial + c, db, mask=c < N)


@triton.jit
def _backward_wide_dx(
    X, W, DY, DS, DX, DIN, MEAN, R, SEED, s_x, s_dy, s_ds, M, N, eps, threshold, inv_keep,
    BM: tl.constexpr, BLOCK: tl.constexpr, UNBIASED: tl.constexpr, RMS: tl.constexpr,
    RESIDUAL: tl.constexpr, DROPOUT: tl.constexpr, HAS_DS: tl.constexpr, HAS_W: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """One program owns BM rows wider than a block: one walk for the two sums, one for dx."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    rows = i.to(tl.int64)
    mean = tl.load(MEAN + i, mask=i < M, other=0.0)[:, None]
    r = tl.load(R + i, mask=i < M, other=0.0)[:, None]
    c = tl.arange(0, BLOCK)
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)
    products = tl.zeros([BM, BLOCK], ACC)
    sums = tl.zeros([BM, BLOCK], ACC)
    for o in tl.range(0, N, BLOCK):
        g = _scaled(_tile(DY, rows, s_dy, o + c, M, N, ACC), W, o + c, N, HAS_W, ACC)
        products += g * (_tile(X, rows, s_x, o + c, M, N, ACC) - mean) * r
        sums += g
    coefficient = _coefficient(tl.sum(products, 1)[:, None], r, N, eps, UNBIASED)
    shift = _mean(tl.sum(sums, 1), N, RMS)[:, None]
    for o in tl.range(0, N, BLOCK):
        g = _scaled(_tile(DY, rows, s_dy, o + c, M, N, ACC), W, o + c, N, HAS_W, ACC)
        xhat = (_tile(X, rows, s_x, o + c, M, N, ACC) - mean) * r
        _store_gradients(
            DX, DIN, DS, (g - shift - xhat * coefficient) * r, rows, s_ds, o + c, o, M, N, seed,
            threshold, inv_keep, BM, BLOCK, HAS_DS, RESIDUAL, DROPOUT, ACC,
        )  # fmt: skip


@triton.jit
def _backward_wide_weights(
    X, DY, DW, DB, MEAN, R, s_x, s_dy, M, N, rows_per_program,
    BM: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK columns of a fixed run of rows: their sums of dweight and dbias."""
    first = tl.program_id(0) * rows_per_program
    end = tl.minimum(M, first + rows_per_program)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BM, BLOCK], ACC)
    db = tl.zeros([BM, BLOCK], ACC)
    for o in tl.range(0, rows_per_program, BM):
        i = first + o + tl.arange(0, BM)
        rows = i.to(tl.int64)
        mean = tl.load(MEAN + i, mask=i < end, other=0.0)[:, None]
        r = tl.load(R + i, mask=i < end, other=0.0)[:, None]
        dy = _tile(DY, rows, s_dy, c, end, N, ACC)
        dw += dy * (_tile(X, rows, s_x, c, end, N, ACC) - mean) * r
        db += dy
    partial = tl.program_id(0).to(tl.int64) * N
    tl.store(DW + partial + c, tl.sum(dw, 0), mask=c < N)
    tl.store(DB + partial + c, tl.sum(db, 0), mask=c < N)


# --------------------------------------------------------------------------------------- launchers


def _rows(x: Tensor, n: int) -> Tensor:
    """x as [M, N] with a unit last stride, without a copy where its strides allow it."""
    return unit_stride(x.reshape(-1, n))


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _run_forward(
    x: Tensor, residual: Tensor | None, n: int, weight: Tensor | None, bias: Tensor | None,
    eps: float, unbiased: bool, rms: bool, dropout_p: float, seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, s, mean [M], r [M]); s is empty where there is no residual."""
    y, s = x.new_empty(x.shape), x.new_empty(0 if residual is None else x.shape)
    mean = x.new_empty(x.numel() // n if n else 0, dtype=_accumulator(x))
    reciprocal = torch.empty_like(mean)
    if x.numel() == 0:
        return y, s, mean, reciprocal
    rows = _rows(x, n)
    other = rows if residual is None else _rows(residual, n)
    tiles = configuration(n, architecture(x.device))
    with on_device(x):
        _forward[(triton.cdiv(rows.shape[0], tiles.BM),)](
            rows, other, x if weight is None else weight.contiguous(),
            x if bias is None else bias.contiguous(), y, s, mean, reciprocal,
            x if seed is None else seed, rows.stride(0), other.stride(0), rows.shape[0], n, eps,
            *dropout_arguments(dropout_p), BM=tiles.BM, BLOCK=tiles.BLOCK, ONE=n <= tiles.BLOCK,
            UNBIASED=unbiased, RMS=rms, RESIDUAL=residual is not None, DROPOUT=dropout_p > 0,
            HAS_W=weight is not None, HAS_B=bias is not None,
            ACC=getattr(tl, str(mean.dtype)[6:]), num_warps=tiles.warps,
        )  # fmt: skip
    return y, s, mean, reciprocal


def _run_backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, n: int, weight: Tensor | None, eps: float,
    unbiased: bool, rms: bool, residual: bool, dropout_p: float, seed: Tensor | None,
    mean: Tensor, reciprocal: Tensor, need_x: bool, need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(the gradient of x or of the residual, that of the input beside a residual, the sums for
    weight and bias [2, N]); what is not needed is empty.
    """
    dx = x.new_empty(x.shape if need_x else 0)
    din = x.new_empty(x.shape if need_x and residual else 0)
    if x.numel() == 0:
        return dx, din, mean.new_zeros(2, n)
    rows, dy = _rows(x, n), _rows(grad, n)
    ds = dy if grad_sum is None else _rows(grad_sum, n)
    tiles = configuration(n, architecture(x.device))
    per_program = max(tiles.BM, triton.cdiv(rows.shape[0], PARTIAL_SUMS))
    runs = triton.cdiv(rows.shape[0], per_program)
    partial = mean.new_empty(2, runs if need_weights else 0, n)
    w = x if weight is None else weight.contiguous()
    constants = dict(ACC=getattr(tl, str(mean.dtype)[6:]), num_warps=tiles.warps)
    flags = dict(
        UNBIASED=unbiased, RMS=rms, RESIDUAL=residual, DROPOUT=dropout_p > 0,
        HAS_DS=grad_sum is not None, HAS_W=weight is not None,
    )  # fmt: skip
    strides = rows.stride(0), dy.stride(0), ds.stride(0)
    dropout = dropout_arguments(dropout_p)
    statistics = mean, reciprocal, x if seed is None else seed
    with on_device(x):
        if n <= tiles.BLOCK:
            _backward[(runs,)](
                rows, w, dy, ds, dx, din, partial[0], partial[1], *statistics, *strides,
                rows.shape[0], n, eps, *dropout, per_program, BM=tiles.BM, BLOCK=tiles.BLOCK,
                NEED_X=need_x, NEED_W=need_weights, **flags, **constants,
            )  # fmt: skip
        else:
            if need_x:
                _backward_wide_dx[(triton.cdiv(rows.shape[0], tiles.BM),)](
                    rows, w, dy, ds, dx, din, *statistics, *strides, rows.shape[0], n, eps,
                    *dropout, BM=tiles.BM, BLOCK=tiles.BLOCK, **flags, **constants,
                )  # fmt: skip
            if need_weights:
                _backward_wide_weights[(runs, triton.cdiv(n, WIDE_WEIGHTS.BLOCK))](
                    rows, dy, partial[0], partial[1], mean, reciprocal, *strides[:2],
                    rows.shape[0], n, per_program, BM=WIDE_WEIGHTS.BM, BLOCK=WIDE_WEIGHTS.BLOCK,
                    ACC=constants["ACC"], num_warps=WIDE_WEIGHTS.warps,
                )  # fmt: skip
    return dx, din, partial.sum(1)


def _or_nothing(needed: bool, like: Tensor | None, of: Tensor) -> Tensor:
    """An empty gradient of `like`, in its dtype, or nothing."""
    return of.new_empty(0) if not needed or like is None else like.new_empty(like.shape)


def _as(sums: Tensor, needed: bool, like: Tensor | None, of: Tensor) -> Tensor:
    """A weight's gradient from its sums [N], or nothing, as in `_or_nothing`."""
    if not needed or like is None:
        return of.new_empty(0)
    return sums.view(like.shape).to(like.dtype, copy=True)


def supports(input, normalized_shape=None, weight=None, **_) -> str | None:
    """Why the kernels cannot run this call, or None."""
    n = math.prod(weight.shape if normalized_shape is None else normalized_shape)
    if n > MAX_FEATURES:
        return f"a row has {n} features; the kernels take up to {MAX_FEATURES}"
    return unsupported_dtype(input)


# --------------------------------------------------------------------------------------- LayerNorm


def _statistics(input: Tensor, normalized_shape: list[int]) -> Tensor:
    rows = math.prod(input.shape[: input.dim() - len(normalized_shape)])
    return input.new_empty(rows, dtype=_accumulator(input))


def _fake(input, normalized_shape, *_):
    statistics = _statistics(input, normalized_shape)
    return input.new_empty(input.shape), statistics, torch.empty_like(statistics)


@register(
    "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps, "
    "bool unbiased) "
    "-> (Tensor output, Tensor mean, Tensor reciprocal)",
    _fake,
)
def forward(input, normalized_shape, weight, bias, eps, unbiased):
    """Launches the forward: (output, mean [M], r [M])."""
    n = math.prod(normalized_shape)
    y, _, mean, r = _run_forward(input, None, n, weight, bias, eps, unbiased, False, 0.0, None)
    return y, mean, r


def _fake_backward(
    grad_output, input, normalized_shape, weight, bias, eps, unbiased, mean, reciprocal, needs
):
    likes = zip(needs, (input, weight, bias))
    return tuple(_or_nothing(need, like, input) for need, like in likes)


@register(
    "layer_norm_backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, "
    "Tensor? weight, Tensor? bias, float eps, bool unbiased, Tensor mean, Tensor reciprocal, "
    "bool[] needs) "
    "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
    _fake_backward,
)
def backward(
    grad_output, input, normalized_shape, weight, bias, eps, unbiased, mean, reciprocal, needs
):
    """Launches dx and the first stage of the weight gradients, and sums their partial sums."""
    dx, _, sums = _run_backward(
        grad_output, None, input, math.prod(normalized_shape), weight, eps, unbiased, False, False,
        0.0, None, mean, reciprocal, needs[0], needs[1] or needs[2],
    )  # fmt: skip
    return dx, _as(sums[0], needs[1], weight, dx), _as(sums[1], needs[2], bias, dx)


# ----------------------------------------------------------------------------------------- RMSNorm


def _fake_rms(input, normalized_shape, *_):
    return input.new_empty(input.shape), _statistics(input, normalized_shape)


@register(
    "rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, float eps) "
    "-> (Tensor output, Tensor reciprocal)",
    _fake_rms,
)
def rms_forward(input, normalized_shape, weight, eps):
    """Launches the forward: (output, r [M])."""
    n = math.prod(normalized_shape)
    y, _, _, r = _run_forward(input, None, n, weight, None, eps, False, True, 0.0, None)
    return y, r


def _fake_rms_backward(grad_output, input, normalized_shape, weight, eps, reciprocal, needs):
    return _or_nothing(needs[0], input, input), _or_nothing(needs[1], weight, input)


@register(
    "rms_norm_backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, "
    "Tensor? weight, float eps, Tensor reciprocal, bool[] needs) "
    "-> (Tensor grad_input, Tensor grad_weight)",
    _fake_rms_backward,
)
def rms_backward(grad_output, input, normalized_shape, weight, eps, reciprocal, needs):
    """As `backward`, with a mean of zero."""
    dx, _, sums = _run_backward(
        grad_output, None, input, math.prod(normalized_shape), weight, eps, False, True, False,
        0.0, None, torch.zeros_like(reciprocal), reciprocal, needs[0], needs[1],
    )  # fmt: skip
    return dx, _as(sums[0], needs[1], weight, dx)


# ------------------------------------------------------------------- residual, dropout, LayerNorm

_ARGUMENTS = "float dropout_p, float eps, bool unbiased, Tensor? dropout_seed"


def _fake_add(input, residual, weight, *_):
    statistics = _statistics(input, list(weight.shape))
    return (
        input.new_empty(input.shape),
        input.new_empty(input.shape),
        statistics,
        torch.empty_like(statistics),
    )


@register(
    "dropout_add_layer_norm(Tensor input, Tensor residual, Tensor weight, Tensor? bias, "
    f"{_ARGUMENTS}) "
    "-> (Tensor normalized, Tensor residual_out, Tensor mean, Tensor reciprocal)",
    _fake_add,
)
def add_forward(input, residual, weight, bias, dropout_p, eps, unbiased, dropout_seed):
    """Launches the forward: (normalized, residual_out, mean [M], r [M])."""
    return _run_forward(
        input, residual, weight.numel(), weight, bias, eps, unbiased, False, dropout_p,
        dropout_seed,
    )  # fmt: skip


def _fake_add_backward(
    grad_normalized, grad_residual_out, weight, bias, dropout_p, eps, unbiased, dropout_seed,
    residual_out, mean, reciprocal, needs,
):  # fmt: skip
    likes = zip(needs, (residual_out, residual_out, weight, bias))
    x = needs[0] or needs[1]
    return tuple(
        _or_nothing(x if like is residual_out else need, like, residual_out) for need, like in likes
    )


@register(
    "dropout_add_layer_norm_backward(Tensor grad_normalized, Tensor? grad_residual_out, "
    f"Tensor weight, Tensor? bias, {_ARGUMENTS}, Tensor residual_out, Tensor mean, "
    "Tensor reciprocal, bool[] needs) "
    "-> (Tensor grad_input, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias)",
    _fake_add_backward,
)
def add_backward(
    grad_normalized, grad_residual_out, weight, bias, dropout_p, eps, unbiased, dropout_seed,
    residual_out, mean, reciprocal, needs,
):  # fmt: skip
    """One pass for both gradients and the first stage of the weights', as in `backward`."""
    dx, din, sums = _run_backward(
        grad_normalized, grad_residual_out, residual_out, weight.numel(), weight, eps, unbiased,
        False, True, dropout_p, dropout_seed, mean, reciprocal, needs[0] or needs[1],
        needs[2] or needs[3],
    )  # fmt: skip
    return din, dx, _as(sums[0], needs[2], weight, dx), _as(sums[1], needs[3], bias, dx)
