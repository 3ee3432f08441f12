"""Token embedding, its scale, the positional encoding and dropout in one pass.

Forward:  y = Z (scale * weight[token] + positional[position])     Z = keep / (1 - p)
Backward: g = Z dy      dweight = scale * sum of g over the rows of each token, by torch's own
          embedding backward      dpositional = sum of g over the rows of each position

Shapes: tokens [.., S] taken as M rows, weight [V, N], positional [at least S, N], y [.., S, N]; the
position of row m is m % S. Any dtype in and out, sums in float32 (float64 for float64). Saved: the
tokens and the parameters. Recomputed: the dropout mask, a function of (seed, row, column). Least
bytes: y once, and its rows of weight once, forward; dy and g once backward. Deterministic: one
program owns each element.
Source: Vaswani et al. 2017, sections 3.4 and 3.5.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import INTERPRETED as INTERPRETED
from .common import Draw, drop_rows, dropout_arguments
from .common import Size as GradientSize
from .launch import (
    Launch,
    accumulator,
    architecture,
    as_rows,
    constants,
    dense,
    next_power_of_2,
    on_device,
    row_stride,
    triton_dtype,
    unit_stride,
    unsupported_dtype,
)
from .registration import gradients_like, register
from .tuned import TuningKey, choose, flags, named


class EmbeddingTiles(NamedTuple):
    """The rows and columns that a program owns, and its warps."""

    rows: int
    columns: int
    warps: int = 4


def configuration(n: int, arch: str) -> EmbeddingTiles:
    """Choose the tiles for N features."""
    block = max(16, min(next_power_of_2(n), 1024))
    return EmbeddingTiles(64 if arch == "interpreter" else max(1, 2048 // block), block)


def others(n: int) -> list[EmbeddingTiles]:
    """Return the tiles that a measurement may choose for N features: 1024 to 8192 elements each."""
    widest = max(16, next_power_of_2(n))
    return [
        EmbeddingTiles(rows, block, warps)
        for block in dict.fromkeys(min(widest, most) for most in (256, 1024, 4096))
        for rows in (1, 2, 4, 8, 16, 32, 64)
        for warps in (2, 4, 8)
        if 1024 <= rows * block <= 8192
    ]


# ----------------------------------------------------------------------------------------- kernels


class EmbeddingStrides(NamedTuple):
    """The row strides of the tables."""

    weight: Any
    positional: Any


class Size(NamedTuple):
    """M tokens of N features, in sequences of S; V rows of the table."""

    M: Any
    N: Any
    S: Any
    V: Any


class EmbeddingCase(NamedTuple):
    """What a kernel is compiled for."""

    positional: Any
    dropout: Any
    acc: Any


@triton.jit
def _place(size, tile: tl.constexpr):
    """Return the tile of a program: its rows [BM], the same as int64, its first column, its columns
    [BLOCK], and which of its elements [BM, BLOCK] exist.
    """
    i = tl.program_id(0) * tile.rows + tl.arange(0, tile.rows)
    o = tl.program_id(1) * tile.columns
    c = o + tl.arange(0, tile.columns)
    return i, i.to(tl.int64), o, c, (i < size.M)[:, None] & (c < size.N)[None, :]


@triton.jit
def _forward(
    T, W, P, Y, SEED, strides, size, scale, dropout, tile: tl.constexpr, case: tl.constexpr
):
    """One program owns BM rows and BLOCK features.

    Reads the tokens T [M], the tables W [V, N] and P [at least S, N] and SEED [1]; writes Y [M, N].
    """
    i, rows, o, c, ok = _place(size, tile)
    t = tl.load(T + i, mask=i < size.M, other=0).to(tl.int64)
    t = tl.minimum(tl.maximum(t, 0), size.V - 1)  # a bad token never reads out of bounds
    y = tl.load(W + (t[:, None] * strides.weight + c[None, :]), mask=ok, other=0.0)
    y = y.to(case.acc) * scale
    if case.positional:
        position = (i % size.S).to(tl.int64)
        pointers = P + (position[:, None] * strides.positional + c[None, :])
        y += tl.load(pointers, mask=ok, other=0.0).to(case.acc)
    if case.dropout:
        y = drop_rows(y, rows, o, Draw(tl.load(SEED), dropout))
    tl.store(Y + (rows[:, None] * size.N + c[None, :]), y.to(Y.dtype.element_ty), mask=ok)


@triton.jit
def _backward(DY, G, SEED, stride, size, scale, dropout, tile: tl.constexpr, case: tl.constexpr):
    """One program owns BM rows and BLOCK features of scale * Z dy.

    Reads DY [M, N], its rows `stride` apart, and SEED [1]; writes G [M, N].
    """
    _, rows, o, c, ok = _place(size, tile)
    g = tl.load(DY + (rows[:, None] * stride + c[None, :]), mask=ok, other=0.0)
    g = g.to(case.acc) * scale
    if case.dropout:
        g = drop_rows(g, rows, o, Draw(tl.load(SEED), dropout))
    tl.store(G + (rows[:, None] * size.N + c[None, :]), g.to(G.dtype.element_ty), mask=ok)


# --------------------------------------------------------------------------------------- launchers


def _launch(kernel: Any, size: Any, x: Tensor, dropout_p: float, positional: bool, **more: Any):
    """Make the launch of either kernel."""
    case = EmbeddingCase(positional, dropout_p > 0, triton_dtype(accumulator(x)))
    name = f"{named(x.dtype, rows=size.M, features=size.N)} {flags(case, 'acc')}".strip()
    shipped = configuration(size.N, architecture(x.device))
    op, options = f"embed {kernel.fn.__name__.strip('_')}", functools.partial(others, size.N)
    tiles = choose(x.device, TuningKey(op, name, shipped, options))
    more |= dict(size=size, dropout=dropout_arguments(dropout_p))
    arguments = dict(more, tile=constants(tiles), case=constants(case))
    grid = (triton.cdiv(size.M, tiles.rows), triton.cdiv(size.N, tiles.columns))
    return Launch(kernel, grid, arguments, tiles.warps)


def _fake(tokens, weight, *_):
    return weight.new_empty(*tokens.shape, weight.shape[1])


_ARGUMENTS = (
    "Tensor tokens, Tensor weight, Tensor? positional, float dropout_p, float scale, "
    "SymInt? padding_idx, Tensor? dropout_seed"
)


def _prepare(tokens, weight, positional, *rest):
    positional = positional if positional is None else unit_stride(positional)
    return tokens.contiguous(), unit_stride(weight), positional, *rest


@register(f"embed({_ARGUMENTS}) -> (Tensor output)", _fake, _prepare)
def forward(tokens, weight, positional, dropout_p, scale, padding_idx, dropout_seed):
    """Launch the forward: output [.., S, N]."""
    if _fake(tokens, weight).numel() == 0:
        return lambda tokens, weight, *_: _fake(tokens, weight)
    table = weight if positional is None else positional
    size = Size(tokens.numel(), weight.shape[1], tokens.shape[-1], weight.shape[0])
    more = dict(strides=EmbeddingStrides(weight.stride(0), table.stride(0)), scale=scale)
    launch = _launch(_forward, size, weight, dropout_p, positional is not None, **more)
    shape = dense((*tokens.shape, weight.shape[1]))

    def run(tokens, weight, positional, seed):
        output = weight.new_empty_strided(*shape)
        p = weight if positional is None else positional
        with on_device(weight):
            launch(tokens, weight, p, output, tokens if seed is None else seed)
        return output

    return run


def _prepare_backward(grad_output, *rest):
    n = grad_output.shape[-1]
    return (as_rows(grad_output, n) if grad_output.numel() else grad_output), *rest


@register(
    f"embed_backward(Tensor grad_output, {_ARGUMENTS}, bool[] needs) "
    "-> (Tensor grad_weight, Tensor grad_positional)",
    lambda _, __, weight, positional, *rest: gradients_like(rest[-1], weight, positional),
    _prepare_backward,
)
def backward(grad_output, tokens, weight, positional, dropout_p, scale, padding_idx, seed, needs):
    """Launch the kernel of dropout and scale; torch's ops then add up dweight and dpositional."""
    (v, n), length, launch = weight.shape, tokens.shape[-1], None
    padding = -1 if padding_idx is None else padding_idx
    if grad_output.numel():
        # dpositional has no such factor
        more = dict(stride=row_stride(grad_output, n), scale=1.0 if needs[1] else scale)
        size = GradientSize(grad_output.numel() // n, n)
        launch = _launch(_backward, size, grad_output, dropout_p, False, **more)

    def run(grad_output, tokens, weight, positional, seed):
        g = grad_output.new_empty(grad_output.shape)
        if launch is not None:
            with on_device(g):
                launch(grad_output, g, g if seed is None else seed)
        g = g.view(-1, n)
        dweight, dpositional = weight.new_empty(0), weight.new_empty(0)
        if needs[0]:
            dweight = torch.ops.aten.embedding_dense_backward(
                g, tokens.reshape(-1).long(), v, padding, False
            )
            dweight = dweight.mul_(scale) if needs[1] else dweight
        if needs[1]:
            dpositional = positional.new_zeros(positional.shape)
            if launch is not None:
                dpositional[:length] = g.view(-1, length, n).sum(0, dtype=accumulator(g))
        return dweight, dpositional

    return run


def supports(tokens, weight, *_, **__) -> str | None:
    """Return why the kernels cannot run this call, or None."""
    return unsupported_dtype(weight)
