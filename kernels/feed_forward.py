"""The position-wise feed-forward network (Vaswani et al. 2017, section 3.3), with the first GEMM's
epilogue fused.

Forward:  z = x w_1^T + b_1     h = dropout(f(z))     y = h w_2^T + b_2
Backward: dh = dy w_2           dz = dh * Z * f'(z)   Z = keep / (1 - p)
          dx = dz w_1   dw_1 = dz^T x   db_1 = sum dz   dw_2 = dy^T h   db_2 = sum dy

Shapes: x [..., d] taken as M rows, w_1 [F, d], w_2 [d_out, F]. Any dtype in and out, sums in
float32 (float64 for float64). One kernel computes h from x: the GEMM, then bias, activation and
dropout on the accumulator. One elementwise kernel computes dz. The other five GEMMs have nothing to
fuse and are torch's own. Saved: x, the weights, and h for relu - h > 0 exactly where z > 0 and the
element is kept, so that neither z nor the dropout mask is needed - or z for the other activations,
from which h and dz are recomputed together. FLOPs: 4 M d F forward, twice that backward; least
bytes of the epilogue: h (and z) once.

Gated (Shazeer 2020, "GLU Variants Improve Transformer"), with w [2 F, d] that holds both halves:
    [z, v] = x w^T + b    h = dropout(f(z) v)    y = h w_2^T + b_2
    dz = dh * Z * v * f'(z)    dv = dh * Z * f(z)
All GEMMs are torch's own; one kernel makes h from [z, v], which is saved, and one h, dz and dv.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import INTERPRETED, dropout_arguments, dropout_keep
from .launch import architecture, dot_precision, on_device, unit_stride, unsupported_dtype
from .registration import register

__all__ = ["INTERPRETED", "supports"]

RELU = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)
SILU = tl.constexpr(3)
_KINDS = {"relu": RELU, "gelu": GELU, "gelu_tanh": GELU_TANH, "silu": SILU}


class Tiles(NamedTuple):
    """BM rows x BN hidden units, BK features at a time."""

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int


# By architecture: for 16-bit inputs, for float32. Registers and spills of each stand in
# tests/compile_table.md.
CONFIGURATIONS: dict[str, tuple[Tiles, Tiles]] = {
    "sm_90": (Tiles(128, 128, 64, 8, 3), Tiles(64, 64, 32, 4, 3)),
    "sm_100": (Tiles(128, 128, 64, 8, 3), Tiles(64, 64, 32, 4, 3)),
    "sm_80": (Tiles(128, 128, 32, 8, 3), Tiles(64, 64, 32, 4, 3)),
    "sm_86": (Tiles(128, 128, 32, 8, 3), Tiles(64, 64, 32, 4, 2)),
    "gfx942": (Tiles(128, 128, 32, 8, 2), Tiles(64, 64, 32, 4, 2)),
    "interpreter": (Tiles(256, 256, 256, 4, 1), Tiles(256, 256, 256, 4, 1)),
    "other": (Tiles(64, 64, 32, 4, 2), Tiles(64, 64, 16, 4, 1)),
}
GROUP_ROWS = 8  # row blocks that share the columns of w_1 in the second-level cache
ELEMENTWISE = (256, 256) if INTERPRETED else (32, 128)  # the tiles of the other kernels


def configuration(arch: str, dtype: torch.dtype) -> Tiles:
    """The tiles of the GEMM, a pure function of architecture and dtype."""
    return CONFIGURATIONS.get(arch, CONFIGURATIONS["other"])[dtype == torch.float32]


# ----------------------------------------------------------------------------------------- kernels


@triton.jit
def _activate(z, KIND: tl.constexpr):
    if KIND == RELU:
        return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == GELU:  # z Phi(z)
        return 0.5 * z * (1.0 + tl.math.erf(z * 0.7071067811865476))
    elif KIND == GELU_TANH:  # the same with tanh(u) = 2 sigmoid(2u) - 1
        return z * tl.sigmoid(1.5957691216057308 * z * (1.0 + 0.044715 * z * z))
    else:
        return z * tl.sigmoid(z)


@triton.jit
def _derivative(z, KIND: tl.constexpr):
    """f'(z) of the activations that save z."""
    if KIND == GELU:  # Phi(z) + z phi(z)
        density = 0.3989422804014327 * tl.exp(-0.5 * z * z)
        return 0.5 * (1.0 + tl.math.erf(z * 0.7071067811865476)) + z * density
    elif KIND == GELU_TANH:  # s + z s (1 - s) u', u = 1.596 (z + 0.0447 z^3)
        s = tl.sigmoid(1.5957691216057308 * z * (1.0 + 0.044715 * z * z))
        return s + z * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * z * z)
    else:
        s = tl.sigmoid(z)
        return s * (1.0 + z * (1.0 - s))


@triton.jit
def _hidden(
    X, W, B, HIDDEN, Z, SEED, threshold, inv_keep, s_xm, s_wn, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    HAS_B: tl.constexpr, SAVE_Z: tl.constexpr, DROPOUT: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program owns a [BM, BN] tile of h; GROUP row blocks walk the columns together, to share
    w_1 in the cache. WIDE: the rows of a tile may span more than 2^31 elements.
    """
    across = tl.cdiv(N, BN)
    down = tl.cdiv(M, BM)
    group = tl.program_id(0) // (GROUP * across)
    members = tl.minimum(down - group * GROUP, GROUP)
    place = tl.program_id(0) % (GROUP * across)
    i0 = (group * GROUP + place % members) * BM
    j0 = place // members * BN

    r = tl.minimum(tl.arange(0, BM), M - 1 - i0)  # past the end: the last row again, no predicate
    c = tl.minimum(tl.arange(0, BN), N - 1 - j0)
    own = tl.arange(0, BM)
    if WIDE:
        r, c, own = r.to(tl.int64), c.to(tl.int64), own.to(tl.int64)
    x_base = X + i0.to(tl.int64) * s_xm
    w_base = W + j0.to(tl.int64) * s_wn
    acc = tl.zeros([BM, BN], ACC)
    for k0 in tl.range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        x_pointers = x_base + (r[:, None] * s_xm + k[None, :])
        w_pointers = w_base + (c[:, None] * s_wn + k[None, :])
        if EVEN_K:
            x = tl.load(x_pointers)
            w = tl.load(w_pointers)
        else:
            x = tl.load(x_pointers, mask=(k < K)[None, :], other=0.0)
            w = tl.load(w_pointers, mask=(k < K)[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, PRECISION, out_dtype=ACC)

    i = i0 + tl.arange(0, BM)
    j = j0 + tl.arange(0, BN)
    ok = (i < M)[:, None] & (j < N)[None, :]
    place_out = i0.to(tl.int64) * N + (own[:, None] * N + j[None, :])
    if HAS_B:
        acc += tl.load(B + j, mask=j < N, other=0.0).to(ACC)[None, :]
    if SAVE_Z:
        tl.store(Z + place_out, acc.to(Z.dtype.element_ty), mask=ok)
    h = _activate(acc, KIND)
    if DROPOUT:
        keep = dropout_keep(tl.load(SEED), tl.program_id(0) * 0, i0, j0, threshold, BM, BN)
        h = tl.where(keep, h * inv_keep, 0.0)
    tl.store(HIDDEN + place_out, h.to(HIDDEN.dtype.element_ty), mask=ok)


@triton.jit
def _hidden_backward(
    DH, SAVED, DZ, HIDDEN, SEED, threshold, inv_keep, M, N,
    BM: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, DROPOUT: tl.constexpr,
    WIDE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program owns a [BM, BN] tile of dz, and of h where z was saved."""
    i0 = tl.program_id(0) * BM
    j0 = tl.program_id(1) * BN
    i = tl.arange(0, BM)
    j = j0 + tl.arange(0, BN)
    ok = (i0 + i < M)[:, None] & (j < N)[None, :]
    if WIDE:
        i = i.to(tl.int64)
    place = i0.to(tl.int64) * N + (i[:, None] * N + j[None, :])
    dh = tl.load(DH + place, mask=ok, other=0.0).to(ACC)
    saved = tl.load(SAVED + place, mask=ok, other=0.0).to(ACC)
    if KIND == RELU:  # h > 0 where z > 0 and the element is kept; NaN passes, as in torch
        dz = tl.where(saved <= 0.0, 0.0, dh * inv_keep)
    else:
        h = _activate(saved, KIND)
        dz = dh * _derivative(saved, KIND)
        if DROPOUT:
            keep = dropout_keep(tl.load(SEED), tl.program_id(0) * 0, i0, j0, threshold, BM, BN)
            h = tl.where(keep, h * inv_keep, 0.0)
            dz = tl.where(keep, dz * inv_keep, 0.0)
        tl.store(HIDDEN + place, h.to(HIDDEN.dtype.element_ty), mask=ok)
    tl.store(DZ + place, dz.to(DZ.dtype.element_ty), mask=ok)


@triton.jit
def _gated(
    Z, HIDDEN, SEED, threshold, inv_keep, M, N,
    BM: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, DROPOUT: tl.constexpr,
    WIDE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program owns a [BM, BN] tile of h = dropout(f(z) v), from rows that hold z, then v."""
    i0 = tl.program_id(0) * BM
    j0 = tl.program_id(1) * BN
    i = tl.arange(0, BM)
    j = j0 + tl.arange(0, BN)
    ok = (i0 + i < M)[:, None] & (j < N)[None, :]
    if WIDE:
        i = i.to(tl.int64)
    both = i0.to(tl.int64) * (2 * N) + (i[:, None] * (2 * N) + j[None, :])
    z = tl.load(Z + both, mask=ok, other=0.0).to(ACC)
    v = tl.load(Z + both + N, mask=ok, other=0.0).to(ACC)
    h = _activate(z, KIND) * v
    if DROPOUT:
        keep = dropout_keep(tl.load(SEED), tl.program_id(0) * 0, i0, j0, threshold, BM, BN)
        h = tl.where(keep, h * inv_keep, 0.0)
    place = i0.to(tl.int64) * N + (i[:, None] * N + j[None, :])
    tl.store(HIDDEN + place, h.to(HIDDEN.dtype.element_ty), mask=ok)


@triton.jit
def _gated_backward(
    DH, Z, DZ, HIDDEN, SEED, threshold, inv_keep, M, N,
    BM: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, DROPOUT: tl.constexpr,
    WIDE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program owns a [BM, BN] tile of dz, of dv beside it, and of h."""
    i0 = tl.program_id(0) * BM
    j0 = tl.program_id(1) * BN
    i = tl.arange(0, BM)
    j = j0 + tl.arange(0, BN)
    ok = (i0 + i < M)[:, None] & (j < N)[None, :]
    if WIDE:
        i = i.to(tl.int64)
    place = i0.to(tl.int64) * N + (i[:, None] * N + j[None, :])
    both = i0.to(tl.int64) * (2 * N) + (i[:, None] * (2 * N) + j[None, :])
    dh = tl.load(DH + place, mask=ok, other=0.0).to(ACC)
    z = tl.load(Z + both, mask=ok, other=0.0).to(ACC)
    v = tl.load(Z + both + N, mask=ok, other=0.0).to(ACC)
    f = _activate(z, KIND)
    h = f * v
    if DROPOUT:
        keep = dropout_keep(tl.load(SEED), tl.program_id(0) * 0, i0, j0, threshold, BM, BN)
        h = tl.where(keep, h * inv_keep, 0.0)
        dh = tl.where(keep, dh * inv_keep, 0.0)
    dz = dh * v * _derivative(z, KIND)
    dv = dh * f
    tl.store(HIDDEN + place, h.to(HIDDEN.dtype.element_ty), mask=ok)
    tl.store(DZ + both, dz.to(DZ.dtype.element_ty), mask=ok)
    tl.store(DZ + both + N, dv.to(DZ.dtype.element_ty), mask=ok)


# --------------------------------------------------------------------------------------- launchers


def _accumulator(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _elementwise(
    kernel, rows: int, width: int, x: Tensor, tensors: tuple[Tensor, ...], kind: str, p: float, seed
) -> None:
    """Launches a kernel over tiles of [rows, width]."""
    BM, BN = ELEMENTWISE
    grid = (triton.cdiv(rows, BM), triton.cdiv(width, BN))
    if grid[0] and grid[1]:
        threshold, inv_keep = dropout_arguments(p)
        with on_device(x):
            kernel[grid](
                *tensors, x if seed is None else seed, threshold, inv_keep, rows, width,
                BM=BM, BN=BN, KIND=_KINDS[kind], DROPOUT=p > 0, WIDE=2 * BM * width >= 2**31,
                ACC=_accumulator(x), num_warps=4,
            )  # fmt: skip


def _fake(input, w_1, b_1, w_2, b_2, activation, dropout_p, dropout_seed):
    output = input.new_empty(*input.shape[:-1], w_2.shape[0])
    return output, input.new_empty(*input.shape[:-1], w_1.shape[0])


@register(
    "feed_forward(Tensor input, Tensor w_1, Tensor? b_1, Tensor w_2, Tensor? b_2, "
    "str activation, float dropout_p, Tensor? dropout_seed) -> (Tensor output, Tensor saved)",
    _fake,
)
def forward(input, w_1, b_1, w_2, b_2, activation, dropout_p, dropout_seed):
    """Launches the first GEMM and calls torch's second: (output, h for relu, else z)."""
    rows, width = input.shape[:-1].numel(), w_1.shape[0]
    x, w = unit_stride(input.reshape(rows, input.shape[-1])), unit_stride(w_1)
    hidden = x.new_empty(rows, width)
    z = hidden if activation == "relu" else torch.empty_like(hidden)
    threshold, inv_keep = dropout_arguments(dropout_p)
    arch = architecture(x.device)
    tiles = configuration(arch, x.dtype)
    blocks = triton.cdiv(rows, tiles.BM) * triton.cdiv(width, tiles.BN)
    span = max(tiles.BM * x.stride(0), tiles.BN * w.stride(0)) + x.shape[1]  # of a tile's elements
    if blocks:
        with on_device(x):
            _hidden[(blocks,)](
                x, w, x if b_1 is None else b_1.contiguous(), hidden, z,
                x if dropout_seed is None else dropout_seed, threshold, inv_keep,
                x.stride(0), w.stride(0), rows, width, x.shape[1],
                BM=tiles.BM, BN=tiles.BN, BK=tiles.BK, GROUP=GROUP_ROWS, KIND=_KINDS[activation],
                HAS_B=b_1 is not None, SAVE_Z=z is not hidden, DROPOUT=dropout_p > 0,
                EVEN_K=x.shape[1] % tiles.BK == 0, PRECISION=dot_precision(arch),
                WIDE=max(span, tiles.BM * width) >= 2**31, ACC=_accumulator(x),
                num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip
    output = torch.mm(hidden, w_2.t()) if b_2 is None else torch.addmm(b_2, hidden, w_2.t())
    return output.view(*input.shape[:-1], w_2.shape[0]), z.view(*input.shape[:-1], width)


def _fake_backward(
    grad_output, input, w_1, b_1, w_2, b_2, activation, dropout_p, dropout_seed, saved, needs
):
    operands = (input, w_1, b_1, w_2, b_2)
    return tuple(
        input.new_empty(x.shape if need and x is not None else 0)
        for x, need in zip(operands, needs, strict=True)
    )


@register(
    "feed_forward_backward(Tensor grad_output, Tensor input, Tensor w_1, Tensor? b_1, Tensor w_2, "
    "Tensor? b_2, "
    "str activation, float dropout_p, Tensor? dropout_seed, Tensor saved, bool[] needs) "
    "-> (Tensor grad_input, Tensor grad_w_1, Tensor grad_b_1, Tensor grad_w_2, Tensor grad_b_2)",
    _fake_backward,
)
def backward(
    grad_output, input, w_1, b_1, w_2, b_2, activation, dropout_p, dropout_seed, saved, needs
):
    """One launch for dz (and h), torch's GEMMs for the rest, as far as they are needed."""
    rows, width = input.shape[:-1].numel(), w_1.shape[0]
    dy = grad_output.reshape(rows, -1) if rows else grad_output.reshape(0, w_2.shape[0])
    x, saved = input.reshape(rows, input.shape[-1]), saved.reshape(rows, width)
    hidden, dz = saved, saved
    if needs[0] or needs[1] or needs[2] or (needs[3] and activation != "relu"):
        dh = dy @ w_2
        dz = torch.empty_like(dh)
        hidden = saved if activation == "relu" else torch.empty_like(dh)
        _elementwise(
            _hidden_backward, rows, width, x, (dh, saved, dz, hidden), activation, dropout_p,
            dropout_seed,
        )  # fmt: skip
    none = x.new_empty(0)
    return (
        (dz @ w_1).view(input.shape) if needs[0] else none,
        dz.t() @ x if needs[1] else none.clone(),
        dz.sum(0) if needs[2] else none.clone(),
        dy.t() @ hidden if needs[3] else none.clone(),
        dy.sum(0) if needs[4] else none.clone(),
    )


# ------------------------------------------------------------------------------------------- gated


def _register_gated(op: str, kind: str) -> tuple:
    """The op and its backward, for one activation."""

    def fake(input, w, b, w_2, b_2, dropout_p, dropout_seed):
        return (
            input.new_empty(*input.shape[:-1], w_2.shape[0]),
            input.new_empty(*input.shape[:-1], w.shape[0]),
        )

    @register(
        f"{op}(Tensor input, Tensor w, Tensor? b, Tensor w_2, Tensor? b_2, float dropout_p, "
        "Tensor? dropout_seed) -> (Tensor output, Tensor saved)",
        fake,
    )
    def forward(input, w, b, w_2, b_2, dropout_p, dropout_seed):
        rows, width = input.shape[:-1].numel(), w.shape[0] // 2
        x = input.reshape(rows, input.shape[-1])
        z = torch.nn.functional.linear(x, w, b)
        hidden = x.new_empty(rows, width)
        _elementwise(_gated, rows, width, x, (z, hidden), kind, dropout_p, dropout_seed)
        output = torch.nn.functional.linear(hidden, w_2, b_2)
        lead = input.shape[:-1]
        return output.view(*lead, w_2.shape[0]), z.view(*lead, 2 * width)

    def fake_backward(grad_output, input, w, b, w_2, b_2, dropout_p, dropout_seed, saved, needs):
        return tuple(
            input.new_empty(x.shape if need and x is not None else 0)
            for x, need in zip((input, w, b, w_2, b_2), needs, strict=True)
        )

    @register(
        f"{op}_backward(Tensor grad_output, Tensor input, Tensor w, Tensor? b, Tensor w_2, "
        "Tensor? b_2, float dropout_p, Tensor? dropout_seed, Tensor saved, bool[] needs) "
        "-> (Tensor grad_input, Tensor grad_w, Tensor grad_b, Tensor grad_w_2, Tensor grad_b_2)",
        fake_backward,
    )
    def backward(grad_output, input, w, b, w_2, b_2, dropout_p, dropout_seed, saved, needs):
        rows, width = input.shape[:-1].numel(), w.shape[0] // 2
        dy, x = grad_output.reshape(rows, w_2.shape[0]), input.reshape(rows, input.shape[-1])
        z = saved.reshape(rows, 2 * width)
        dh, dz = dy @ w_2, torch.empty_like(z)
        hidden = torch.empty_like(dh)
        tensors = dh, z, dz, hidden
        _elementwise(_gated_backward, rows, width, x, tensors, kind, dropout_p, dropout_seed)
        none = x.new_empty(0)
        return (
            (dz @ w).view(input.shape) if needs[0] else none,
            dz.t() @ x if needs[1] else none.clone(),
            dz.sum(0) if needs[2] else none.clone(),
            dy.t() @ hidden if needs[3] else none.clone(),
            dy.sum(0) if needs[4] else none.clone(),
        )

    return forward, backward


geglu_forward, geglu_backward = _register_gated("geglu", "gelu")
swiglu_forward, swiglu_backward = _register_gated("swiglu", "silu")


def supports(input: Tensor, *_, **__) -> str | None:
    """Why the kernels cannot run this call, or None."""
    return unsupported_dtype(input)
