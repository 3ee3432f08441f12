"""The position-wise feed-forward network (Vaswani et al. 2017, section 3.3), with the first GEMM's
epilogue fused.

Forward:  z = x w_1^T + b_1     h = dropout(f(z))     y = h w_2^T + b_2
Backward: dh = dy w_2           dz = dh * Z * f'(z)   Z = keep / (1 - p)
          dx = dz w_1   dw_1 = dz^T x   db_1 = sum dz   dw_2 = dy^T h   db_2 = sum dy

Shapes: x [..., d] taken as M rows, w_1 [F, d], w_2 [d_out, F]. Any dtype in and out, sums in
float32 (float64 for float64). One kernel computes h from x: the GEMM, then bias, activation and
dropout on the accumulator. One elementwise kernel computes dz. The other five GEMMs have nothing to
fuse and are torch's own. Saved: x, the weights, and for relu h, for other activations z. h > 0
exactly where z > 0 and the element is kept, so relu needs neither z nor the dropout mask; from z, h
and dz are recomputed together. FLOPs: 4 M d F forward, twice that backward; least bytes of the
epilogue: h (and z) once. If a measurement found it to be faster, the first GEMM is torch's own as
well, followed by one elementwise kernel for h, or by nothing if torch's epilogue computes h.

Gated (Shazeer 2020, "GLU Variants Improve Transformer"), with w [2 F, d] that holds both halves:
    [z, v] = x w^T + b    h = dropout(f(z) v)    y = h w_2^T + b_2
    dz = dh * Z * v * f'(z)    dv = dh * Z * f(z)
With a limit, z is min(z, limit) and v is clamped to [-limit, limit] first, and the gradient of what
lies outside is 0; with an offset, v + offset takes the place of v.
All GEMMs are torch's own. In the forward one kernel computes h from [z, v], which is saved; in the
backward one kernel computes h, dz and dv. The op `gated_activation` is that h of a z and a v that
lie anywhere, without dropout; its backward computes dz and dv.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer.batch_invariance import on

from .common import INTERPRETED, Size, dropout_arguments, dropout_keep, dropout_stream, tile_in_turn
from .launch import (
    Launch,
    accumulator,
    architecture,
    as_rows,
    constants,
    dense,
    dot_precision,
    on_device,
    row_stride,
    triton_dtype,
    unit_stride,
    unsupported_dtype,
)
from .products import (
    CONFIGURATIONS,
    GROUP_ROWS,
    ProductStrides,
    ProductTiles,
    Sizes,
    configuration,
    linear,
    matmul,
    product,
    product_tile,
)
from .registration import register
from .tuned import TuningKey, choose, named

RELU = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)
SILU = tl.constexpr(3)
SIGMOID = tl.constexpr(4)
RELU2 = tl.constexpr(5)
_KINDS = dict(relu=RELU, gelu=GELU, gelu_tanh=GELU_TANH, silu=SILU, sigmoid=SIGMOID, relu2=RELU2)


# Other ways to compute h: torch's GEMM, then one elementwise kernel; torch's GEMM with relu.
GEMM, GEMM_RELU = "torch's GEMM", "torch's GEMM with relu"


class Tile(NamedTuple):
    """The rows and columns that a program of an elementwise kernel owns."""

    rows: int
    columns: int


ELEMENTWISE = Tile(256, 256) if INTERPRETED else Tile(32, 128)
ELEMENTWISE_OPTIONS = [Tile(*x) for x in ((16, 128), (32, 128), (64, 128), (16, 256), (32, 256))]


def ways(dtype: torch.dtype, relu_alone: bool) -> list[ProductTiles | str]:
    """Return what a measurement may choose: the tiles of every architecture, with their own number
    of stages, three and four; and the ways without the kernel. `relu_alone`: h is relu(z).
    """
    found: dict[ProductTiles | str, None] = {}
    for rows in CONFIGURATIONS.values():
        row = rows[dtype == torch.float32]
        found.update((row._replace(stages=n), None) for n in (row.stages, 3, 4))
    return [*found, GEMM, *[GEMM_RELU] * relu_alone]


# ----------------------------------------------------------------------------------------- kernels


@triton.jit
def _activate(z, KIND: tl.constexpr, ALPHA: tl.constexpr = 1.0):
    """Return f(z). ALPHA: silu is z sigmoid(ALPHA z)."""
    if KIND == RELU:
        return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == RELU2:
        positive = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return positive * positive
    elif KIND == SIGMOID:
        return tl.sigmoid(z)
    elif KIND == GELU:  # z Phi(z)
        return 0.5 * z * (1.0 + tl.math.erf(z * 0.7071067811865476))
    elif KIND == GELU_TANH:  # 0.5 z (1 + tanh(u)), tanh(u) = 2 sigmoid(2u) - 1
        return z * tl.sigmoid(1.5957691216057308 * z * (1.0 + 0.044715 * z * z))
    else:
        return z * tl.sigmoid(z * ALPHA)


@triton.jit
def _derivative(z, KIND: tl.constexpr, ALPHA: tl.constexpr = 1.0):
    """Return f'(z)."""
    if KIND == RELU:
        return tl.where(z <= 0.0, 0.0, 1.0)
    elif KIND == RELU2:
        return 2.0 * tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == SIGMOID:
        s = tl.sigmoid(z)
        return s * (1.0 - s)
    elif KIND == GELU:  # Phi(z) + z phi(z)
        density = 0.3989422804014327 * tl.exp(-0.5 * z * z)
        return 0.5 * (1.0 + tl.math.erf(z * 0.7071067811865476)) + z * density
    elif KIND == GELU_TANH:  # s + z s (1 - s) u', u = 1.596 (z + 0.0447 z^3)
        s = tl.sigmoid(1.5957691216057308 * z * (1.0 + 0.044715 * z * z))
        return s + z * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * z * z)
    else:
        s = tl.sigmoid(z * ALPHA)
        return s * (1.0 + z * ALPHA * (1.0 - s))


class GateStrides(NamedTuple):
    """The row strides of z and v, and of their gradients dz and dv."""

    z: Any
    v: Any
    gradient: Any


class HiddenCase(NamedTuple):
    """What `_hidden` is compiled for. `even`: the features are a multiple of the tile's; `wide`:
    the rows of a tile may span more than 2^31 elements; `group`: how many row blocks share columns.
    """

    group: Any
    kind: Any
    bias: Any
    save_z: Any
    dropout: Any
    even: Any
    precision: Any
    wide: Any
    acc: Any


class ElementwiseCase(NamedTuple):
    """What an elementwise kernel is compiled for, with fields of `HiddenCase`. `hidden`: the
    backward of a gated layer computes h as well. The last three are the numbers of a gated form:
    those of `gated_activation`, with a limit of 0 for none.
    """

    kind: Any
    dropout: Any
    wide: Any
    acc: Any
    hidden: Any
    alpha: Any
    limit: Any
    offset: Any


@triton.jit
def _extent(i0, j0, size, tile: tl.constexpr, WIDE: tl.constexpr):
    """Return, for the tile at row i0 and column j0: the rows [BM], counted from i0; the columns
    [BN]; and which elements [BM, BN] exist.
    """
    i = tl.arange(0, tile.rows)
    j = j0 + tl.arange(0, tile.columns)
    ok = (i0 + i < size.M)[:, None] & (j < size.N)[None, :]
    if WIDE:
        i = i.to(tl.int64)
    return i, j, ok


@triton.jit
def _offsets(i0, i, j, width):
    """Return the offsets of the elements [BM, BN] in a contiguous matrix [M, width]."""
    return i0.to(tl.int64) * width + (i[:, None] * width + j[None, :])


@triton.jit
def _load(pointers, ok, ACC: tl.constexpr):
    """Load a tile [BM, BN], zero where `ok` is False."""
    return tl.load(pointers, mask=ok, other=0.0).to(ACC)


@triton.jit
def _store(pointers, ok, x):
    """Store a tile x [BM, BN] where `ok` is True."""
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=ok)


@triton.jit
def _keep(SEED, i0, j0, dropout, tile: tl.constexpr):
    """Return which elements [BM, BN] of a tile dropout keeps."""
    # All rows are one (batch, head), number 0, which must be a tensor.
    stream = dropout_stream(tl.load(SEED), tl.program_id(0) * 0)
    threshold = dropout.threshold
    return dropout_keep(stream, i0, j0, threshold, tile.rows, tile.columns)


@triton.jit
def _hidden(
    X, W, B, HIDDEN, Z, SEED, dropout, strides, size, tile: tl.constexpr, case: tl.constexpr
):
    """One program owns a [BM, BN] tile of h. Consecutive programs take the row blocks of a group
    with the same columns, and so share these rows of w_1 in the cache.

    Reads X [M, K], W [N, K], B [N] and SEED [1]; writes HIDDEN and Z, [M, N] each.
    """
    i0, j0 = tile_in_turn(size.M, size.N, tile, case.group)
    acc = product_tile(X, W, i0, j0, strides, size, tile, case)
    i, j, ok = _extent(i0, j0, size, tile, case.wide)
    place = _offsets(i0, i, j, size.N)
    if case.bias:
        acc += tl.load(B + j, mask=j < size.N, other=0.0).to(case.acc)[None, :]
    if case.save_z:
        _store(Z + place, ok, acc)
    h = _activate(acc, case.kind)
    if case.dropout:
        h = tl.where(_keep(SEED, i0, j0, dropout, tile), h, 0.0) * dropout.inv_keep
    _store(HIDDEN + place, ok, h)


@triton.jit
def _hidden_backward(
    DH, SAVED, DZ, HIDDEN, SEED, dropout, size, tile: tl.constexpr, case: tl.constexpr
):
    """One program owns a [BM, BN] tile of dz, and of h if z was saved.

    Reads DH and SAVED [M, N] and SEED [1]; writes DZ and HIDDEN [M, N].
    """
    i0 = tl.program_id(0) * tile.rows
    j0 = tl.program_id(1) * tile.columns
    i, j, ok = _extent(i0, j0, size, tile, case.wide)
    place = _offsets(i0, i, j, size.N)
    dh = _load(DH + place, ok, case.acc)
    saved = _load(SAVED + place, ok, case.acc)
    if case.kind == RELU:  # h > 0 where z > 0 and the element is kept; NaN passes, as in torch
        dz = tl.where(saved <= 0.0, 0.0, dh * dropout.inv_keep)
    else:
        h = _activate(saved, case.kind)
        dz = dh * _derivative(saved, case.kind)  # dz = dh Z f'(z), with Z below
        if case.dropout:
            keep = _keep(SEED, i0, j0, dropout, tile)
            h = tl.where(keep, h, 0.0) * dropout.inv_keep
            dz = tl.where(keep, dz, 0.0) * dropout.inv_keep
        _store(HIDDEN + place, ok, h)
    _store(DZ + place, ok, dz)


@triton.jit
def _activated(Z, HIDDEN, SEED, dropout, size, tile: tl.constexpr, case: tl.constexpr):
    """One program owns a [BM, BN] tile of h = dropout(f(z)).

    Reads Z [M, N] and SEED [1]; writes HIDDEN [M, N], which may be Z.
    """
    i0 = tl.program_id(0) * tile.rows
    j0 = tl.program_id(1) * tile.columns
    i, j, ok = _extent(i0, j0, size, tile, case.wide)
    place = _offsets(i0, i, j, size.N)
    h = _activate(_load(Z + place, ok, case.acc), case.kind)
    if case.dropout:
        h = tl.where(_keep(SEED, i0, j0, dropout, tile), h, 0.0) * dropout.inv_keep
    _store(HIDDEN + place, ok, h)


@triton.jit
def _clamped(z, v, case: tl.constexpr):
    """Return z and v within the limit, and v + offset in the place of v."""
    if case.limit > 0:
        z = tl.minimum(z, case.limit, propagate_nan=tl.PropagateNan.ALL)
        v = tl.clamp(v, -case.limit, case.limit, propagate_nan=tl.PropagateNan.ALL)
    return z, v + case.offset


@triton.jit
def _gated(Z, V, HIDDEN, SEED, dropout, strides, size, tile: tl.constexpr, case: tl.constexpr):
    """One program owns a [BM, BN] tile of h = dropout(f(z) v).

    Reads Z and V, [M, N] each, and SEED [1]; writes HIDDEN [M, N].
    """
    i0 = tl.program_id(0) * tile.rows
    j0 = tl.program_id(1) * tile.columns
    i, j, ok = _extent(i0, j0, size, tile, case.wide)
    z = _load(Z + _offsets(i0, i, j, strides.z), ok, case.acc)
    v = _load(V + _offsets(i0, i, j, strides.v), ok, case.acc)
    z, v = _clamped(z, v, case)
    h = _activate(z, case.kind, case.alpha) * v
    if case.dropout:
        h = tl.where(_keep(SEED, i0, j0, dropout, tile), h, 0.0) * dropout.inv_keep
    _store(HIDDEN + _offsets(i0, i, j, size.N), ok, h)


@triton.jit
def _gated_backward(
    DH, Z, V, DZ, DV, HIDDEN, SEED, dropout, strides, size, tile: tl.constexpr, case: tl.constexpr
):
    """One program owns a [BM, BN] tile of dz, the same tile of dv, and of h if it is wanted.

    Reads DH, Z and V, [M, N] each, and SEED [1]; writes DZ, DV and HIDDEN, [M, N] each.
    """
    i0 = tl.program_id(0) * tile.rows
    j0 = tl.program_id(1) * tile.columns
    i, j, ok = _extent(i0, j0, size, tile, case.wide)
    place = _offsets(i0, i, j, size.N)
    gradient = _offsets(i0, i, j, strides.gradient)
    dh = _load(DH + place, ok, case.acc)
    z_given = _load(Z + _offsets(i0, i, j, strides.z), ok, case.acc)
    v_given = _load(V + _offsets(i0, i, j, strides.v), ok, case.acc)
    z, v = _clamped(z_given, v_given, case)
    f = _activate(z, case.kind, case.alpha)
    h = f * v
    if case.dropout:
        keep = _keep(SEED, i0, j0, dropout, tile)
        h = tl.where(keep, h, 0.0) * dropout.inv_keep
        dh = tl.where(keep, dh, 0.0) * dropout.inv_keep
    dz = dh * v * _derivative(z, case.kind, case.alpha)  # dz = dh Z v f'(z)
    dv = dh * f  # dv = dh Z f(z)
    if case.limit > 0:
        dz = tl.where(z_given <= case.limit, dz, 0.0)
        dv = tl.where(tl.abs(v_given) <= case.limit, dv, 0.0)
    if case.hidden:
        _store(HIDDEN + place, ok, h)
    _store(DZ + gradient, ok, dz)
    _store(DV + gradient, ok, dv)


# --------------------------------------------------------------------------------------- launchers


def _elementwise(
    kernel: Any,
    size: Size,
    x: Tensor,
    kind: str,
    p: float,
    strides: GateStrides | None = None,
    hidden: bool = True,
    form: Sequence[Any] = (),
) -> Launch:
    """Return the launch of a kernel over the tiles of [M, N], for tensors of the dtype and on the
    device of x, which are contiguous but for those of `strides`. Any tensor stands in for the seed
    without dropout.
    """
    of_call = f"{named(x.dtype, rows=size.M, columns=size.N)} {kind}" + " dropout" * (p > 0)
    name = "feed_forward " + kernel.fn.__name__.strip("_")
    tile = choose(x.device, TuningKey(name, of_call, ELEMENTWISE, ELEMENTWISE_OPTIONS.copy))
    wide = tile.rows * max(size.N, *(strides or (0,))) >= 2**31
    sums = triton_dtype(accumulator(x))
    alpha, limit, offset = form or (1.0, None, 0.0)
    numbers = alpha, limit or 0.0, offset
    case = ElementwiseCase(_KINDS[kind], p > 0, wide, sums, hidden, *numbers)
    arguments: dict[str, Any] = {} if strides is None else dict(strides=strides)
    arguments |= dict(dropout=dropout_arguments(p), size=size)
    arguments |= dict(tile=constants(tile), case=constants(case))
    grid = (triton.cdiv(size.M, tile.rows), triton.cdiv(size.N, tile.columns))
    return Launch(kernel, grid, arguments, warps=4)


class _First:
    """How calls compute h, and its layout. launch: the first GEMM, or what follows torch's."""

    def __init__(
        self, input: Tensor, w_1: Tensor, b_1: Tensor | None, activation: str, p: float
    ) -> None:
        width, features = w_1.shape
        rows = self.rows = input.shape[:-1].numel()
        self.hidden = dense((*input.shape[:-1], width))
        self.save_z = activation != "relu"
        size = Sizes(rows, width, features)
        tiles = self.way = self.choose(input, size, activation, b_1 is not None, p > 0)
        if isinstance(tiles, str):
            self.launch = _elementwise(_activated, Size(rows, width), input, activation, p)
            return
        strides = ProductStrides(0, input.view(rows, features).stride(0), 1, 0, 1, w_1.stride(0))
        span = max(tiles.rows * strides.x_row, tiles.columns * strides.w_column) + features
        case = HiddenCase(
            group=GROUP_ROWS,
            kind=_KINDS[activation],
            bias=b_1 is not None,
            save_z=self.save_z,
            dropout=p > 0,
            even=features % tiles.features == 0,
            precision=dot_precision(architecture(input.device)),
            wide=max(span, tiles.rows * width) >= 2**31,
            acc=triton_dtype(accumulator(input)),
        )
        arguments = dict(dropout=dropout_arguments(p), strides=strides, size=size)
        arguments |= dict(tile=constants(tiles), case=constants(case))
        grid = (triton.cdiv(rows, tiles.rows) * triton.cdiv(width, tiles.columns),)
        self.launch = Launch(_hidden, grid, arguments, tiles.warps, tiles.stages)

    def choose(self, x: Tensor, size: Sizes, activation: str, bias: bool, dropout: bool) -> Any:
        """Return the tiles of the kernel, or the name of a way without it."""
        arch, relu_alone = architecture(x.device), activation == "relu" and bias and not dropout
        sizes = dict(rows=size.M, width=size.N, features=size.K)
        fused = " ".join(["bias"] * bias + ["dropout"] * dropout)
        name = f"{named(x.dtype, dot_precision(arch), **sizes)} {activation} {fused}"
        options = functools.partial(ways, x.dtype, relu_alone)
        key = TuningKey("feed_forward first", name, configuration(arch, x.dtype), options)
        return choose(x.device, key)

    def __call__(
        self, input: Tensor, w_1: Tensor, b_1: Tensor | None, seed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return h and the tensor to save: h itself for relu, else z."""
        if b_1 is not None and self.way == GEMM_RELU:
            x = input.view(self.rows, w_1.shape[1])
            hidden = torch._addmm_activation(b_1, x, w_1.t()).view(self.hidden[0])
            return hidden, hidden
        if isinstance(self.way, str):
            z = torch.nn.functional.linear(input, w_1, b_1)
            hidden = torch.empty_like(z) if self.save_z else z
            with on_device(input):
                self.launch(z, hidden, z if seed is None else seed)
            return hidden, z
        hidden = input.new_empty_strided(*self.hidden)
        z = torch.empty_like(hidden) if self.save_z else hidden
        with on_device(input):
            given = input if b_1 is None else b_1, hidden, z, input if seed is None else seed
            self.launch(input, w_1, *given)
        return hidden, z


def _output(hidden: Tensor, w: Tensor, b: Tensor | None, layout: tuple[Any, Any]) -> Tensor:
    """Return h w^T + b, for h [M, F], as a tensor [..., d_out] of this layout. It is no view, so
    that its caller may change it in place.
    """
    if torch.is_grad_enabled():  # a program of torch.export calls the op itself
        with torch.no_grad():
            return _output(hidden, w, b, layout)
    output = hidden.new_empty_strided(*layout)
    flat = output.view(len(hidden), len(w))
    if on():
        product(hidden, w.t(), b, flat)
    elif b is None:
        torch.mm(hidden, w.t(), out=flat)
    else:
        torch.addmm(b, hidden, w.t(), out=flat)
    return output


def _fake(input, w_1, b_1, w_2, *_):
    output = input.new_empty(*input.shape[:-1], w_2.shape[0])
    return output, input.new_empty(*input.shape[:-1], w_1.shape[0])


def _prepare(input, w_1, b_1, *rest):
    """Return the arguments with matrices whose rows are contiguous."""
    x = as_rows(input, input.shape[-1]) if input.numel() else input
    return x, unit_stride(w_1), None if b_1 is None else b_1.contiguous(), *rest


_DROPOUT = "float dropout_p, Tensor? dropout_seed"


def _schemas(op: str, w: str, b: str, options: str) -> tuple[str, str]:
    """Return the schemas of an op, with the names of its first weight and bias, and of its
    backward.
    """
    given = f"Tensor input, Tensor {w}, Tensor? {b}, Tensor w_2, Tensor? b_2, {options}"
    saved = f"Tensor grad_output, {given}, Tensor saved, bool[] needs"
    grads = f"Tensor grad_input, Tensor grad_{w}, Tensor grad_{b}, Tensor grad_w_2, Tensor grad_b_2"
    return f"{op}({given}) -> (Tensor output, Tensor saved)", f"{op}_backward({saved}) -> ({grads})"


_FORWARD, _BACKWARD = _schemas("feed_forward", "w_1", "b_1", f"str activation, {_DROPOUT}")


@register(_FORWARD, _fake, _prepare)
def forward(input, w_1, b_1, w_2, b_2, activation, dropout_p, dropout_seed):
    """Launch the first GEMM and call torch's second: (output, h for relu, else z)."""
    lead, width = input.shape[:-1], len(w_1)
    rows, layout = lead.numel(), dense((*lead, len(w_2)))
    first = _First(input, w_1, b_1, activation, dropout_p)

    def run(input, w_1, b_1, w_2, b_2, seed):
        hidden, saved = first(input, w_1, b_1, seed)
        return _output(hidden.view(rows, width), w_2, b_2, layout), saved

    return run


def _fake_backward(grad_output, input, *rest):
    operands, needs = (input, *rest[:4]), rest[-1]
    return tuple(
        input.new_empty(x.shape if need and x is not None else 0)
        for x, need in zip(operands, needs, strict=True)
    )


def _gradients(dy, hidden, dz, input, w_1, needs) -> tuple[Tensor, ...]:
    """Return the wanted gradients of input, w_1, b_1, w_2 and b_2, by torch's GEMMs and sums, from
    dy [M, d_out], h [M, F] and dz [M, rows of w_1]; the others have no elements.
    """
    nothing = input.new_empty_strided((0,), (1,))
    return (
        matmul(dz, w_1).view(input.shape) if needs[0] else nothing,
        dz.t() @ input.reshape(len(dy), w_1.shape[1]) if needs[1] else nothing,
        dz.sum(0) if needs[2] else nothing,
        dy.t() @ hidden if needs[3] else nothing,
        dy.sum(0) if needs[4] else nothing,
    )


def _prepare_backward(*arguments):
    *rest, saved, needs = arguments
    return *rest, saved.contiguous(), needs


@register(_BACKWARD, _fake_backward, _prepare_backward)
def backward(grad_output, input, w_1, b_1, w_2, b_2, activation, dropout_p, seed, saved, needs):
    """Launch the kernel of dz (and h) and call torch's GEMMs, for the gradients that are needed."""
    size, outputs = Size(input.shape[:-1].numel(), len(w_1)), len(w_2)
    launch, of_relu = None, activation == "relu"
    if needs[0] or needs[1] or needs[2] or (needs[3] and not of_relu):
        launch = _elementwise(_hidden_backward, size, input, activation, dropout_p)

    def run(grad_output, input, w_1, b_1, w_2, b_2, seed, saved):
        dy = grad_output.reshape(size.M, outputs)
        hidden = dz = saved = saved.view(size)
        if launch is not None:
            dh = matmul(dy, w_2)
            dz = torch.empty_like(dh)
            hidden = saved if of_relu else torch.empty_like(dh)
            with on_device(dh):
                launch(dh, saved, dz, hidden, dh if seed is None else seed)
        return _gradients(dy, hidden, dz, input, w_1, needs)

    return run


# ------------------------------------------------------------------------------------------- gated


_FORM = ", float alpha, float? limit, float offset"


def _register_gated(op: str, kind: str, form: str = "") -> tuple:
    """Register the op and its backward for one activation, and return their launchers. form: the
    numbers of its form in its schema.
    """

    of_forward, of_backward = _schemas(op, "w", "b", _DROPOUT + form)

    @register(of_forward, _fake)
    def forward(input, w, b, w_2, b_2, dropout_p, dropout_seed, *numbers):
        *lead, features = input.shape
        size = Size(input.shape[:-1].numel(), len(w) // 2)
        layout, of_hidden = dense((*lead, len(w_2))), dense(size)
        strides = GateStrides(*[2 * size.N] * 3)
        launch = _elementwise(_gated, size, input, kind, dropout_p, strides, form=numbers)

        def run(input, w, b, w_2, b_2, seed):
            z = linear(input.reshape(size.M, features), w, b)
            hidden = z.new_empty_strided(*of_hidden)
            with on_device(z):
                launch(*z.chunk(2, 1), hidden, z if seed is None else seed)
            return _output(hidden, w_2, b_2, layout), z.view(*lead, 2 * size.N)

        return run

    @register(of_backward, _fake_backward, _prepare_backward)
    def backward(grad_output, input, w, b, w_2, b_2, dropout_p, dropout_seed, *rest):
        *numbers, _, needs = rest
        size, outputs = Size(input.shape[:-1].numel(), len(w) // 2), len(w_2)
        strides = GateStrides(*[2 * size.N] * 3)
        launch = _elementwise(_gated_backward, size, input, kind, dropout_p, strides, form=numbers)

        def run(grad_output, input, w, b, w_2, b_2, seed, saved):
            dy = grad_output.reshape(size.M, outputs)
            z = saved.view(size.M, 2 * size.N)
            dh, dz = matmul(dy, w_2), torch.empty_like(z)
            hidden = torch.empty_like(dh)
            pairs = *z.chunk(2, 1), *dz.chunk(2, 1)
            with on_device(dh):
                launch(dh, *pairs, hidden, dh if seed is None else seed)
            return _gradients(dy, hidden, dz, input, w, needs)

        return run

    return forward, backward


geglu_forward, geglu_backward = _register_gated("geglu", "gelu")
swiglu_forward, swiglu_backward = _register_gated("swiglu", "silu", _FORM)


def _fake_activation(gate, *_):
    return gate.new_empty(gate.shape)


def _strides(gate: Tensor, value: Tensor) -> GateStrides:
    n = gate.shape[-1]
    return GateStrides(row_stride(gate, n), row_stride(value, n), n)


def _prepare_activation(gate, value, *rest):
    """Return the arguments with copies of tensors whose rows have no common stride."""
    if gate.numel():
        gate, value = (as_rows(x, gate.shape[-1]) for x in (gate, value))
    return gate, value, *rest


@register(
    f"gated_activation(Tensor gate, Tensor value, str activation{_FORM}) -> Tensor output",
    _fake_activation,
    _prepare_activation,
)
def activation_forward(gate, value, activation, alpha, limit, offset):
    """Launch the kernel of f(gate) value."""
    if gate.numel() == 0:
        return _fake_activation
    size, layout = Size(gate.shape[:-1].numel(), gate.shape[-1]), dense(gate.shape)
    strides, form = _strides(gate, value), (alpha, limit, offset)
    launch = _elementwise(_gated, size, gate, activation, 0.0, strides, form=form)

    def run(gate, value):
        output = gate.new_empty_strided(*layout)
        with on_device(gate):
            launch(gate, value, output, gate)
        return output

    return run


def _fake_activation_backward(_, gate, value, *__):
    return gate.new_empty(gate.shape), value.new_empty(value.shape)


@register(
    f"gated_activation_backward(Tensor grad_output, Tensor gate, Tensor value, str activation"
    f"{_FORM}, bool[] needs) -> (Tensor grad_gate, Tensor grad_value)",
    _fake_activation_backward,
    lambda grad, *rest: (grad.contiguous(), *_prepare_activation(*rest)),
)
def activation_backward(grad_output, gate, value, activation, alpha, limit, offset, needs):
    """Launch the kernel of both gradients."""
    if gate.numel() == 0:
        return _fake_activation_backward
    size, layout = Size(gate.shape[:-1].numel(), gate.shape[-1]), dense(gate.shape)
    options = 0.0, _strides(gate, value), False, (alpha, limit, offset)
    launch = _elementwise(_gated_backward, size, gate, activation, *options)

    def run(dh, gate, value):
        dz = dh.new_empty_strided(*layout)
        dv = torch.empty_like(dz)
        with on_device(dh):
            launch(dh, gate, value, dz, dv, dz, dh)  # h is not computed
        return dz, dv

    return run


def supports(input: Tensor | None = None, gate: Tensor | None = None, **_) -> str | None:
    """Return why the kernels cannot run this call, or None."""
    x = gate if input is None else input
    assert x is not None
    return unsupported_dtype(x)
