"""LayerNorm over rows of N features (Ba, Kiros, Hinton 2016), in the biased form and in the
Annotated Transformer's.

Forward, per row:
    mean = sum(x) / N
    r = 1 / sqrt(sum((x - mean)^2) / N + eps)
        unbiased: r = 1 / (s + eps), s = sqrt(sum((x - mean)^2) / (N - 1))
    y = weight * xhat + bias, xhat = (x - mean) * r
Backward, with g = weight * dy:
    dx = r * (g - sum(g) / N - xhat * c)
    c = sum(g * xhat) / N
        unbiased: c = sum(g * xhat) / ((N - 1) * s * r), s * r = 1 - eps * r
    dweight = sum over rows of dy * xhat, dbias = sum over rows of dy

Shapes: input [..., N], weight and bias [N], mean and r [M] for M rows. Any dtype in and out,
statistics and sums in float32 (float64 for float64). Saved: input, weight, bias, mean, r.
Recomputed: xhat. Least bytes: x and y once forward; x, dy and dx once backward. Rows up to 8192
features stay in registers; wider ones, up to 65536, are walked in blocks. The weight gradients are
summed in two stages, each program over a fixed run of rows: no atomics, the same bits every time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import (
    INTERPRETED,
    architecture,
    next_power_of_2,
    on_device,
    register,
    unit_stride,
    unsupported_dtype,
)

__all__ = ["INTERPRETED", "supports"]

MAX_FEATURES = 65536
ONE_BLOCK = 8192  # features that one program holds in registers
PARTIAL_SUMS = 256  # runs of rows, and so partial sums, of the weight gradients


class Tiles(NamedTuple):
    """BM rows of BLOCK features at a time."""

    BM: int
    BLOCK: int
    warps: int


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
def _forward(
    X, W, B, Y, MEAN, R, s_x, M, N, eps,
    BM: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr, UNBIASED: tl.constexpr,
    HAS_W: tl.constexpr, HAS_B: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program owns BM rows: in registers if ONE, else in three walks, of which two hit the
    cache.
    """
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    rows = i.to(tl.int64)
    c = tl.arange(0, BLOCK)
    if ONE:
        x = _tile(X, rows, s_x, c, M, N, ACC)
        mean = tl.sum(x, 1) / N
        x = tl.where((c < N)[None, :], x - mean[:, None], 0.0)
        r = _reciprocal(tl.sum(x * x, 1), N, eps, UNBIASED)
        y = _affine(x * r[:, None], W, B, c, N, HAS_W, HAS_B, ACC)
        _store_tile(Y, rows, N, c, M, N, y)
    else:
        total = tl.zeros([BM, BLOCK], ACC)
        for o in tl.range(0, N, BLOCK):
            total += _tile(X, rows, s_x, o + c, M, N, ACC)
        mean = tl.sum(total, 1) / N
        total = tl.zeros([BM, BLOCK], ACC)
        for o in tl.range(0, N, BLOCK):
            x = _tile(X, rows, s_x, o + c, M, N, ACC) - mean[:, None]
            x = tl.where((o + c < N)[None, :], x, 0.0)
            total += x * x
        r = _reciprocal(tl.sum(total, 1), N, eps, UNBIASED)
        for o in tl.range(0, N, BLOCK):
            xhat = (_tile(X, rows, s_x, o + c, M, N, ACC) - mean[:, None]) * r[:, None]
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
def _backward(
    X, W, DY, DX, DW, DB, MEAN, R, s_x, s_dy, M, N, eps, rows_per_program,
    BM: tl.constexpr, BLOCK: tl.constexpr, UNBIASED: tl.constexpr, HAS_W: tl.constexpr,
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
            dx = (g - tl.sum(g, 1)[:, None] / N - xhat * coefficient) * r
            _store_tile(DX, rows, N, c, end, N, dx)
        if NEED_W:
            dw += tl.sum(dy * xhat, 0)
            db += tl.sum(dy, 0)
    if NEED_W:
        partial = tl.program_id(0).to(tl.int64) * N
        tl.store(DW + partial + c, dw, mask=c < N)
        tl.store(DB + partial + c, db, mask=c < N)


@triton.jit
def _backward_wide_dx(
    X, W, DY, DX, MEAN, R, s_x, s_dy, M, N, eps,
    BM: tl.constexpr, BLOCK: tl.constexpr, UNBIASED: tl.constexpr, HAS_W: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """One program owns BM rows wider than a block: one walk for the two sums, one for dx."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    rows = i.to(tl.int64)
    mean = tl.load(MEAN + i, mask=i < M, other=0.0)[:, None]
    r = tl.load(R + i, mask=i < M, other=0.0)[:, None]
    c = tl.arange(0, BLOCK)
    products = tl.zeros([BM, BLOCK], ACC)
    sums = tl.zeros([BM, BLOCK], ACC)
    for o in tl.range(0, N, BLOCK):
        g = _scaled(_tile(DY, rows, s_dy, o + c, M, N, ACC), W, o + c, N, HAS_W, ACC)
        products += g * (_tile(X, rows, s_x, o + c, M, N, ACC) - mean) * r
        sums += g
    coefficient = _coefficient(tl.sum(products, 1)[:, None], r, N, eps, UNBIASED)
    shift = tl.sum(sums, 1)[:, None] / N
    for o in tl.range(0, N, BLOCK):
        g = _scaled(_tile(DY, rows, s_dy, o + c, M, N, ACC), W, o + c, N, HAS_W, ACC)
        xhat = (_tile(X, rows, s_x, o + c, M, N, ACC) - mean) * r
        _store_tile(DX, rows, N, o + c, M, N, (g - shift - xhat * coefficient) * r)


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


def _fake(input, normalized_shape, weight, bias, eps, unbiased):
    rows = math.prod(input.shape[: input.dim() - len(normalized_shape)])
    statistics = input.new_empty(rows, dtype=_accumulator(input))
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
    output, mean, reciprocal = _fake(input, normalized_shape, None, None, eps, unbiased)
    if input.numel() == 0:
        return output, mean.zero_(), reciprocal.zero_()
    x = _rows(input, n)
    tiles = configuration(n, architecture(input.device))
    with on_device(input):
        _forward[(triton.cdiv(x.shape[0], tiles.BM),)](
            x, x if weight is None else weight.contiguous(),
            x if bias is None else bias.contiguous(), output, mean, reciprocal,
            x.stride(0), x.shape[0], n, eps, BM=tiles.BM, BLOCK=tiles.BLOCK,
            ONE=n <= tiles.BLOCK, UNBIASED=unbiased, HAS_W=weight is not None,
            HAS_B=bias is not None, ACC=getattr(tl, str(mean.dtype)[6:]), num_warps=tiles.warps,
        )  # fmt: skip
    return output, mean, reciprocal


def _fake_backward(
    grad_output, input, normalized_shape, weight, bias, eps, unbiased, mean, reciprocal, needs
):
    none = input.new_empty(0)
    return (
        input.new_empty(input.shape) if needs[0] else none,
        weight.new_empty(weight.shape) if needs[1] else none.clone(),
        bias.new_empty(bias.shape) if needs[2] else none.clone(),
    )


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
    n = math.prod(normalized_shape)
    dx, dw, db = _fake_backward(
        grad_output, input, normalized_shape, weight, bias, eps, unbiased, mean, reciprocal, needs
    )
    if input.numel() == 0:
        return dx, dw.zero_(), db.zero_()
    x, dy = _rows(input, n), _rows(grad_output, n)
    rows = x.shape[0]
    tiles = configuration(n, architecture(input.device))
    per_program = max(tiles.BM, triton.cdiv(rows, PARTIAL_SUMS))
    runs = triton.cdiv(rows, per_program)
    need_weights = needs[1] or needs[2]
    partial = mean.new_empty(2, runs if need_weights else 0, n)
    w = x if weight is None else weight.contiguous()
    constants = dict(ACC=getattr(tl, str(mean.dtype)[6:]), num_warps=tiles.warps)
    flags = dict(UNBIASED=unbiased, HAS_W=weight is not None)
    strides = (x.stride(0), dy.stride(0))
    with on_device(input):
        if n <= tiles.BLOCK:
            _backward[(runs,)](
                x, w, dy, dx, partial[0], partial[1], mean, reciprocal, *strides, rows, n, eps,
                per_program, BM=tiles.BM, BLOCK=tiles.BLOCK, NEED_X=needs[0], NEED_W=need_weights,
                **flags, **constants,
            )  # fmt: skip
        else:
            if needs[0]:
                _backward_wide_dx[(triton.cdiv(rows, tiles.BM),)](
                    x, w, dy, dx, mean, reciprocal, *strides, rows, n, eps, BM=tiles.BM,
                    BLOCK=tiles.BLOCK, **flags, **constants,
                )  # fmt: skip
            if need_weights:
                _backward_wide_weights[(runs, triton.cdiv(n, 256))](
                    x, dy, partial[0], partial[1], mean, reciprocal, *strides, rows, n,
                    per_program, BM=8, BLOCK=256, ACC=constants["ACC"], num_warps=4,
                )  # fmt: skip
    if needs[1]:
        dw.copy_(partial[0].sum(0).view(dw.shape))
    if needs[2]:
        db.copy_(partial[1].sum(0).view(db.shape))
    return dx, dw, db


def supports(input, normalized_shape, weight, bias, eps, unbiased) -> str | None:
    """Why the kernels cannot run this call, or None."""
    n = math.prod(normalized_shape)
    if n > MAX_FEATURES:
        return f"a row has {n} features; the kernels take up to {MAX_FEATURES}"
    return unsupported_dtype(input)
