"""LayerNorm over rows of N features (Ba, Kiros, Hinton 2016), in the biased form and in the Annotated Transformer's.

Forward, per row:
    mean = sum(x) / N
    r = 1 / sqrt(sum((x - mean)^2) / N + eps)              unbiased: r = 1 / (s + eps), s = sqrt(sum((x - mean)^2) / (N - 1))
    y = weight * xhat + bias        xhat = (x - mean) * r
Backward, with g = weight * dy:
    dx = r * (g - sum(g) / N - xhat * c)
    c = sum(g * xhat) / N                                  unbiased: c = sum(g * xhat) / ((N - 1) * s * r), s * r = 1 - eps * r
    dweight = sum over rows of dy * xhat                   dbias = sum over rows of dy

Shapes: input [..., N], weight and bias [N], mean and r [M] for M rows. Any dtype in and out, statistics and sums in float32
(float64 for float64). Saved: input, weight, bias, mean, r. Recomputed: xhat.
Least bytes: x and y once forward; x, dy and dx once backward. Rows up to 8192 features stay in registers; wider ones, up to
65536, are walked in blocks. The weight gradients are summed in two stages, each program over a fixed run of rows: no
atomics, the same bits every time.
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
    """BLOCK features at a time."""

    BLOCK: int
    warps: int


def configuration(n: int, arch: str) -> Tiles:
    """A row whole where it fits, else in blocks of 4096."""
    block = min(next_power_of_2(n), ONE_BLOCK if n <= ONE_BLOCK else 4096)
    if arch == "interpreter":
        return Tiles(max(16, block), 4)
    warps = 4 if block <= 1024 else 8 if block <= 4096 else 16
    return Tiles(max(128, block), min(warps, 8) if arch in ("gfx942", "other") else warps)


# ----------------------------------------------------------------------------------------- kernels


@triton.jit
def _load(base, columns, N, ACC: tl.constexpr):
    return tl.load(base + columns, mask=columns < N, other=0.0).to(ACC)


@triton.jit
def _affine(xhat, W, B, columns, N, HAS_W: tl.constexpr, HAS_B: tl.constexpr, ACC: tl.constexpr):
    y = xhat
    if HAS_W:
        y = y * _load(W, columns, N, ACC)
    if HAS_B:
        y = y + _load(B, columns, N, ACC)
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
    X, W, B, Y, MEAN, R, s_x, N, eps,
    BLOCK: tl.constexpr, ONE: tl.constexpr, UNBIASED: tl.constexpr, HAS_W: tl.constexpr,
    HAS_B: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program owns one row: in registers if ONE, else in three walks, of which two hit the cache."""
    row = tl.program_id(0).to(tl.int64)
    x_base = X + row * s_x
    y_base = Y + row * N
    c = tl.arange(0, BLOCK)
    if ONE:
        x = _load(x_base, c, N, ACC)
        mean = tl.sum(x, 0) / N
        x = tl.where(c < N, x - mean, 0.0)
        r = _reciprocal(tl.sum(x * x, 0), N, eps, UNBIASED)
        y = _affine(x * r, W, B, c, N, HAS_W, HAS_B, ACC)
        tl.store(y_base + c, y.to(Y.dtype.element_ty), mask=c < N)
    else:
        total = tl.zeros([BLOCK], ACC)
        for o in tl.range(0, N, BLOCK):
            total += _load(x_base, o + c, N, ACC)
        mean = tl.sum(total, 0) / N
        total = tl.zeros([BLOCK], ACC)
        for o in tl.range(0, N, BLOCK):
            x = tl.where(o + c < N, _load(x_base, o + c, N, ACC) - mean, 0.0)
            total += x * x
        r = _reciprocal(tl.sum(total, 0), N, eps, UNBIASED)
        for o in tl.range(0, N, BLOCK):
            xhat = (_load(x_base, o + c, N, ACC) - mean) * r
            y = _affine(xhat, W, B, o + c, N, HAS_W, HAS_B, ACC)
            tl.store(y_base + o + c, y.to(Y.dtype.element_ty), mask=o + c < N)
    tl.store(MEAN + row, mean)
    tl.store(R + row, r)


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
        dy = dy * _load(W, columns, N, ACC)
    return dy


@triton.jit
def _backward(
    X, W, DY, DX, DW, DB, MEAN, R, s_x, s_dy, M, N, eps, rows_per_program,
    BLOCK: tl.constexpr, UNBIASED: tl.constexpr, HAS_W: tl.constexpr, NEED_X: tl.constexpr,
    NEED_W: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program owns a fixed run of rows, dx of each and the sums of dweight and dbias over all of them."""
    run = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK], ACC)
    db = tl.zeros([BLOCK], ACC)
    first = run.to(tl.int64) * rows_per_program
    for i in tl.range(0, tl.minimum(rows_per_program, M - first)):
        row = first + i
        dy = _load(DY + row * s_dy, c, N, ACC)
        r = tl.load(R + row)
        xhat = tl.where(c < N, (_load(X + row * s_x, c, N, ACC) - tl.load(MEAN + row)) * r, 0.0)
        if NEED_X:
            g = _scaled(dy, W, c, N, HAS_W, ACC)
            coefficient = _coefficient(tl.sum(g * xhat, 0), r, N, eps, UNBIASED)
            dx = (g - tl.sum(g, 0) / N - xhat * coefficient) * r
            tl.store(DX + row * N + c, dx.to(DX.dtype.element_ty), mask=c < N)
        if NEED_W:
            dw += dy * xhat
            db += dy
    if NEED_W:
        partial = run.to(tl.int64) * N
        tl.store(DW + partial + c, dw, mask=c < N)
        tl.store(DB + partial + c, db, mask=c < N)


@triton.jit
def _backward_wide_dx(
    X, W, DY, DX, MEAN, R, s_x, s_dy, N, eps,
    BLOCK: tl.constexpr, UNBIASED: tl.constexpr, HAS_W: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program owns one row wider than a block: one walk for the two sums, one for dx."""
    row = tl.program_id(0).to(tl.int64)
    x_base = X + row * s_x
    dy_base = DY + row * s_dy
    mean = tl.load(MEAN + row)
    r = tl.load(R + row)
    c = tl.arange(0, BLOCK)
    products = tl.zeros([BLOCK], ACC)
    sums = tl.zeros([BLOCK], ACC)
    for o in tl.range(0, N, BLOCK):
        g = _scaled(_load(dy_base, o + c, N, ACC), W, o + c, N, HAS_W, ACC)  # zero past N
        products += g * (_load(x_base, o + c, N, ACC) - mean) * r
        sums += g
    coefficient = _coefficient(tl.sum(products, 0), r, N, eps, UNBIASED)
    shift = tl.sum(sums, 0) / N
    for o in tl.range(0, N, BLOCK):
        g = _scaled(_load(dy_base, o + c, N, ACC), W, o + c, N, HAS_W, ACC)
        xhat = (_load(x_base, o + c, N, ACC) - mean) * r
        dx = (g - shift - xhat * coefficient) * r
        tl.store(DX + row * N + o + c, dx.to(DX.dtype.element_ty), mask=o + c < N)


@triton.jit
def _backward_wide_weights(
    X, DY, DW, DB, MEAN, R, s_x, s_dy, M, N, rows_per_program,
    BM: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK columns of a fixed run of rows: their sums of dweight and dbias."""
    run = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BM, BLOCK], ACC)
    db = tl.zeros([BM, BLOCK], ACC)
    for o in tl.range(0, rows_per_program, BM):
        i = o + tl.arange(0, BM)
        row = (run * rows_per_program + i).to(tl.int64)
        live = (i < rows_per_program) & (row < M)
        ok = live[:, None] & (c < N)[None, :]
        x = tl.load(X + row[:, None] * s_x + c[None, :], mask=ok, other=0.0).to(ACC)
        dy = tl.load(DY + row[:, None] * s_dy + c[None, :], mask=ok, other=0.0).to(ACC)
        mean = tl.load(MEAN + row, mask=live, other=0.0)
        r = tl.load(R + row, mask=live, other=0.0)
        dw += dy * (x - mean[:, None]) * r[:, None]
        db += dy
    partial = run.to(tl.int64) * N
    tl.store(DW + partial + c, tl.sum(dw, 0), mask=c < N)
    tl.store(DB + partial + c, tl.sum(db, 0), mask=c < N)


# --------------------------------------------------------------------------------------- launchers


def _rows(x: Tensor, n: int) -> Tensor:
    """x as [M, N] with a unit last stride, without a copy where its strides allow it."""
    return unit_stride(x.reshape(-1, n))


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _fake(input, normalized_shape, weight, bias, eps, unbiased):
    rows = input.shape[: input.dim() - len(normalized_shape)].numel()
    statistics = input.new_empty(rows, dtype=_accumulator(input))
    return input.new_empty(input.shape), statistics, torch.empty_like(statistics)


@register(
    "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps, bool unbiased) "
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
        _forward[(x.shape[0],)](
            x, x if weight is None else weight.contiguous(), x if bias is None else bias.contiguous(),
            output, mean, reciprocal, x.stride(0), n, eps,
            BLOCK=tiles.BLOCK, ONE=n <= tiles.BLOCK, UNBIASED=unbiased, HAS_W=weight is not None,
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
    "layer_norm_backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, "
    "float eps, bool unbiased, Tensor mean, Tensor reciprocal, bool[] needs) "
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
    per_program = triton.cdiv(rows, PARTIAL_SUMS)
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
                per_program, BLOCK=tiles.BLOCK, NEED_X=needs[0], NEED_W=need_weights, **flags,
                **constants,
            )  # fmt: skip
        else:
            if needs[0]:
                _backward_wide_dx[(rows,)](
                    x, w, dy, dx, mean, reciprocal, *strides, n, eps, BLOCK=tiles.BLOCK, **flags,
                    **constants,
                )  # fmt: skip
            if need_weights:
                _backward_wide_weights[(runs, triton.cdiv(n, 256))](
                    x, dy, partial[0], partial[1], mean, reciprocal, *strides, rows, n,
                    per_program, BM=8, BLOCK=256, **constants,
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
