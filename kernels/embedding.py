"""Token embedding, its scale, the positional encoding and dropout in one pass.

Forward:  y = Z (scale * weight[token] + positional[position])     Z = keep / (1 - p)
Backward: g = Z dy      dweight = scale * sum of g over the rows of each token, by torch's own
          embedding backward      dpositional = sum of g over the rows of each position

Shapes: tokens [.., S] taken as M rows, weight [V, N], positional [at least S, N], y [.., S, N]; the
position of row m is m % S. Any dtype in and out, sums in float32 (float64 for float64). Saved: the
tokens and the parameters. Recomputed: the dropout mask, a function of (seed, row, column). Least
bytes: y once, and its rows of weight once, forward; dy and g once backward. Deterministic: the
kernels have one owner for each element.
Source: Vaswani et al. 2017, sections 3.4 and 3.5.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import INTERPRETED, dropout_arguments, row_dropout_keep
from .launch import architecture, next_power_of_2, on_device, unit_stride, unsupported_dtype
from .registration import register

__all__ = ["INTERPRETED", "supports"]


def configuration(n: int, arch: str) -> tuple[int, int]:
    """(rows, features) of a program, with 4 warps."""
    block = max(16, min(next_power_of_2(n), 1024))
    return (64 if arch == "interpreter" else max(1, 2048 // block)), block


@triton.jit
def _forward(
    T, W, P, Y, SEED, s_w, s_p, M, N, S, V, scale, threshold, inv_keep,
    BM: tl.constexpr, BLOCK: tl.constexpr, HAS_P: tl.constexpr, DROPOUT: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """One program owns BM rows and BLOCK features."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    rows = i.to(tl.int64)
    o = tl.program_id(1) * BLOCK
    c = o + tl.arange(0, BLOCK)
    ok = (i < M)[:, None] & (c < N)[None, :]
    t = tl.load(T + i, mask=i < M, other=0).to(tl.int64)
    t = tl.minimum(tl.maximum(t, 0), V - 1)  # a bad token never reads out of bounds
    y = tl.load(W + (t[:, None] * s_w + c[None, :]), mask=ok, other=0.0).to(ACC) * scale
    if HAS_P:
        position = (i % S).to(tl.int64)
        y += tl.load(P + (position[:, None] * s_p + c[None, :]), mask=ok, other=0.0).to(ACC)
    if DROPOUT:
        keep = row_dropout_keep(tl.load(SEED), rows, o, threshold, BM, BLOCK)
        y = tl.where(keep, y * inv_keep, 0.0)
    tl.store(Y + (rows[:, None] * N + c[None, :]), y.to(Y.dtype.element_ty), mask=ok)


@triton.jit
def _backward(
    DY, G, SEED, s_dy, M, N, scale, threshold, inv_keep,
    BM: tl.constexpr, BLOCK: tl.constexpr, DROPOUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """scale * Z dy. One program owns BM rows and BLOCK features."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    rows = i.to(tl.int64)
    o = tl.program_id(1) * BLOCK
    c = o + tl.arange(0, BLOCK)
    ok = (i < M)[:, None] & (c < N)[None, :]
    g = tl.load(DY + (rows[:, None] * s_dy + c[None, :]), mask=ok, other=0.0).to(ACC) * scale
    if DROPOUT:
        keep = row_dropout_keep(tl.load(SEED), rows, o, threshold, BM, BLOCK)
        g = tl.where(keep, g * inv_keep, 0.0)
    tl.store(G + (rows[:, None] * N + c[None, :]), g.to(G.dtype.element_ty), mask=ok)


# --------------------------------------------------------------------------------------- launchers


def _grid(rows: int, n: int, x: Tensor) -> tuple[tuple[int, int], dict]:
    """The grid, and what both kernels take."""
    bm, block = configuration(n, architecture(x.device))
    kind = tl.float64 if x.dtype == torch.float64 else tl.float32
    constants = dict(BM=bm, BLOCK=block, ACC=kind, num_warps=4)
    return (triton.cdiv(rows, bm), triton.cdiv(n, block)), constants


def _fake(tokens, weight, *_):
    return weight.new_empty(*tokens.shape, weight.shape[1])


_ARGUMENTS = (
    "Tensor tokens, Tensor weight, Tensor? positional, float dropout_p, float scale, "
    "SymInt? padding_idx, Tensor? dropout_seed"
)


@register(f"embed({_ARGUMENTS}) -> (Tensor output)", _fake)
def forward(tokens, weight, positional, dropout_p, scale, padding_idx, dropout_seed):
    """Launches the forward: output [.., S, N]."""
    output = _fake(tokens, weight)
    if output.numel() == 0:
        return output
    v, n = weight.shape
    flat, weight = tokens.reshape(-1).contiguous(), unit_stride(weight)
    p = weight if positional is None else unit_stride(positional)
    grid, constants = _grid(len(flat), n, weight)
    with on_device(weight):
        _forward[grid](
            flat, weight, p, output, flat if dropout_seed is None else dropout_seed,
            weight.stride(0), p.stride(0), len(flat), n, tokens.shape[-1], v, scale,
            *dropout_arguments(dropout_p), HAS_P=positional is not None, DROPOUT=dropout_p > 0,
            **constants,
        )  # fmt: skip
    return output


def _fake_backward(grad_output, tokens, weight, positional, *rest):
    needs = rest[-1]
    return (
        weight.new_empty(weight.shape if needs[0] else 0),
        positional.new_empty(positional.shape) if needs[1] else weight.new_empty(0),
    )


@register(
    f"embed_backward(Tensor grad_output, {_ARGUMENTS}, bool[] needs) "
    "-> (Tensor grad_weight, Tensor grad_positional)",
    _fake_backward,
)
def backward(
    grad_output, tokens, weight, positional, dropout_p, scale, padding_idx, dropout_seed, needs
):
    """One kernel for mask and scale, then torch's embedding backward; and a sum over the batch."""
    v, n = weight.shape
    length = tokens.shape[-1]
    dy = unit_stride(grad_output.reshape(-1, n))
    g = dy.new_empty(dy.shape)
    own = 1.0 if needs[1] else scale  # what positional's gradient does not have
    if g.numel():
        grid, constants = _grid(len(dy), n, weight)
        with on_device(weight):
            _backward[grid](
                dy, g, dy if dropout_seed is None else dropout_seed, dy.stride(0), len(dy), n, own,
                *dropout_arguments(dropout_p), DROPOUT=dropout_p > 0, **constants,
            )  # fmt: skip
    dweight, dpositional = weight.new_empty(0), weight.new_empty(0)
    if needs[0]:
        padding = -1 if padding_idx is None else padding_idx % v
        dweight = torch.ops.aten.embedding_dense_backward(
            g, tokens.reshape(-1).long(), v, padding, False
        )
        dweight = dweight.mul_(scale) if needs[1] else dweight
    if needs[1]:
        wide = torch.float64 if g.dtype == torch.float64 else torch.float32
        dpositional = positional.new_zeros(positional.shape)
        if g.numel():
            dpositional[:length] = g.view(-1, length, n).sum(0, dtype=wide)
    return dweight, dpositional


def supports(tokens, weight, *_, **__) -> str | None:
    """Why the kernels cannot run this call, or None."""
    return unsupported_dtype(weight)
