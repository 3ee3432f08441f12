"""LayerNorm over rows of N features (Ba, Kiros, Hinton 2016), with the biased variance or in the
Annotated Transformer's form (unbiased); RMSNorm (Zhang and Sennrich 2019); and residual + dropout +
either norm.

Forward, per row:
    s = x, or residual + Z x with Z = keep / (1 - p), rounded to the dtype of the residual
    mean = sum(s) / N                       rms: 0
    r = 1 / sqrt(sum((s - mean)^2) / N + eps)
        unbiased: r = 1 / (std + eps), std = sqrt(sum((s - mean)^2) / (N - 1))
    y = weight * xhat + bias, xhat = (s - mean) * r
Backward, with g = weight * dy, and ds the gradient of s, if s is an output too:
    dresidual = ds + r * (g - sum(g) / N - xhat * c)    rms: without sum(g) / N
    c = sum(g * xhat) / N
        unbiased: c = sum(g * xhat) / ((N - 1) * std * r), std * r = 1 - eps * r
    dx = Z * dresidual                                  without a residual: dresidual itself
    dweight = sum over rows of dy * xhat, dbias = sum over rows of dy

Shapes: x and residual [..., N], weight and bias [N], mean and r [M] for M rows. Any dtype in and
out, statistics and sums in float32 (float64 for float64). Saved: s, weight, mean, r. Recomputed:
xhat and the dropout mask, a function of (seed, row, column). Least bytes: x and y once forward; s,
dy and dx once backward; with a residual s and ds once more. Rows up to 8192 features stay in
registers; wider ones, up to 65536, are read in blocks. Deterministic: for the weight gradients,
each program sums a fixed range of rows, and these partial sums are added without atomics.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer.description import RowShard, row_shard

from .common import INTERPRETED, Draw, drop_rows, dropout_arguments, read_seed
from .launch import (
    Launch,
    accumulator,
    alignment,
    architecture,
    as_rows,
    constants,
    dense,
    layouts,
    next_power_of_2,
    on_device,
    plans,
    remembered,
    row_stride,
    triton_dtype,
    unsupported_dtype,
)
from .registration import register
from .tuned import TuningKey, choose, flags, named

__all__ = ["INTERPRETED", "supports"]

MAX_FEATURES = 65536
ONE_BLOCK = 8192  # features that one program holds in registers
PARTIAL_SUMS = 256  # the most ranges of rows, each with a partial weight gradient


class Tiles(NamedTuple):
    """The rows and columns that a program holds at a time, its warps, and the pipeline stages of
    the backward's loop over tiles of rows.
    """

    rows: int
    columns: int
    warps: int
    stages: int = 1


WIDE_WEIGHTS = Tiles(8, 256, 4)  # of the weight gradients, if a row is several blocks


def configuration(n: int, arch: str) -> Tiles:
    """Choose tiles of full rows if a row fits, with several rows if they are short; else blocks of
    4096 features.
    """
    block = max(16, min(next_power_of_2(n), ONE_BLOCK if n <= ONE_BLOCK else 4096))
    if arch == "interpreter":  # few programs: each interpreted operation has a fixed cost
        return Tiles(max(1, min(64, 65536 // block)), block, 4)
    warps = 4 if block <= 2048 else 8 if block <= 4096 or arch in ("gfx942", "other") else 16
    # One small tile in each of PARTIAL_SUMS programs is too few bytes to hide the memory latency.
    stages = 3 if block <= 4096 and arch.startswith("sm_") else 1
    return Tiles(max(1, 2048 // block), block, warps, stages)


def others(tiles: Tiles, backward: bool) -> list[Tiles]:
    """Return the tiles that a measurement may choose instead: other numbers of rows, warps and, for
    the backward, pipeline stages.
    """
    rows = (n for n in (1, 2, 4, 8, 16, 32, 64) if 1024 <= n * tiles.columns <= 8192)
    return [
        tiles._replace(rows=n, warps=warps, stages=stages)
        for n in {tiles.rows: None} | dict.fromkeys(rows)
        for warps in (4, 8, 16)
        for stages in ((1, 3) if backward else (tiles.stages,))
    ]


# ----------------------------------------------------------------- groups of the kernels' arguments


class Inputs(NamedTuple):
    """The input and the residual, [M, N] each."""

    x: Any
    residual: Any


class Statistics(NamedTuple):
    """The mean and r of each row, [M] each."""

    mean: Any
    reciprocal: Any


class Gradients(NamedTuple):
    """`ds`, the gradient of s as an output, is read. `dx`, the gradient of the residual (of x
    without a residual), and `dinput`, the gradient of x with a residual, are written. [M, N] each.
    """

    ds: Any
    dx: Any
    dinput: Any


class Sums(NamedTuple):
    """The partial sums of the gradients of weight and bias, [ranges of rows, N] each."""

    weight: Any
    bias: Any


class ForwardStrides(NamedTuple):
    """The row strides of the inputs."""

    x: Any
    residual: Any


class BackwardStrides(NamedTuple):
    """The row strides of s, dy and ds."""

    x: Any
    dy: Any
    ds: Any


class Size(NamedTuple):
    """M rows of N columns."""

    M: Any
    N: Any


class ForwardCase(NamedTuple):
    """What the forward is compiled for. `one`: a row fits into one tile."""

    one: Any
    unbiased: Any
    rms: Any
    residual: Any
    dropout: Any
    weight: Any
    bias: Any
    acc: Any


class BackwardCase(NamedTuple):
    """What the backward is compiled for. `ds`: s is an output too and has a gradient of its own."""

    unbiased: Any
    rms: Any
    residual: Any
    dropout: Any
    ds: Any
    weight: Any
    need_x: Any
    need_weights: Any
    need_bias: Any
    acc: Any


# ----------------------------------------------------------------------------------------- kernels


@triton.jit
def _tile(base, rows, stride, columns, size, ACC: tl.constexpr):
    """Load rows [BM] and columns [BLOCK] of a matrix [M, N], zero outside of it."""
    ok = (rows < size.M)[:, None] & (columns < size.N)[None, :]
    return tl.load(base + (rows[:, None] * stride + columns[None, :]), mask=ok, other=0.0).to(ACC)


@triton.jit
def _store_tile(base, rows, stride, columns, size, x):
    """Store x [BM, BLOCK] into rows [BM] and columns [BLOCK] of a matrix [M, N]."""
    ok = (rows < size.M)[:, None] & (columns < size.N)[None, :]
    pointers = base + (rows[:, None] * stride + columns[None, :])
    tl.store(pointers, x.to(base.dtype.element_ty), mask=ok)


@triton.jit
def _vector(base, columns, N, ACC: tl.constexpr):
    """Load columns [BLOCK] of a vector [N] as [1, BLOCK], zero outside of it."""
    return tl.load(base + columns, mask=columns < N, other=0.0).to(ACC)[None, :]


@triton.jit
def _affine(xhat, W, B, columns, N, case: tl.constexpr):
    """Return weight * xhat + bias; either may be absent."""
    y = xhat
    if case.weight:
        y = y * _vector(W, columns, N, case.acc)
    if case.bias:
        y = y + _vector(B, columns, N, case.acc)
    return y


@triton.jit
def _reciprocal(squares, N, eps, UNBIASED: tl.constexpr):
    """Return r, from the sum of the squared deviations."""
    if UNBIASED:
        return 1.0 / (tl.sqrt(squares / (N - 1)) + eps)
    else:
        return 1.0 / tl.sqrt(squares / N + eps)


@triton.jit
def _sum(inputs, strides, rows, o, size, draw, tile: tl.constexpr, case: tl.constexpr):
    """Return columns o .. o + BLOCK - 1 of s, [BM, BLOCK], rounded as s is stored: the statistics
    must be those of the s that the backward reads.
    """
    columns = o + tl.arange(0, tile.columns)
    x = _tile(inputs.x, rows, strides.x, columns, size, case.acc)
    if case.dropout:
        x = drop_rows(x, rows, o, draw)
    if case.residual:
        x = x + _tile(inputs.residual, rows, strides.residual, columns, size, case.acc)
        x = x.to(inputs.residual.dtype.element_ty).to(case.acc)
    return x


@triton.jit
def _mean(total, N, RMS: tl.constexpr):
    """Return the mean from the sum, or zero for RMSNorm."""
    if RMS:
        return tl.zeros_like(total)
    else:
        return total / N


@triton.jit
def _forward(
    inputs,  # [M, N] each
    W,  # [N]
    B,  # [N]
    Y,  # out [M, N]
    S,  # out [M, N], with a residual
    statistics,  # out [M] each
    SEED,  # [1]
    strides,
    size,
    eps,
    dropout,
    tile: tl.constexpr,
    case: tl.constexpr,
):
    """One program owns BM rows. It holds them in registers if they fit. If not, it reads them three
    times, twice from the cache: for the mean (unless RMSNorm), for the variance and for y.
    """
    N = size.N
    i = tl.program_id(0) * tile.rows + tl.arange(0, tile.rows)
    rows = i.to(tl.int64)
    c = tl.arange(0, tile.columns)
    draw = Draw(read_seed(SEED, case.dropout), dropout)
    if case.one:
        x = _sum(inputs, strides, rows, 0, size, draw, tile, case)
        if case.residual:
            _store_tile(S, rows, N, c, size, x)
        mean = _mean(tl.sum(x, 1), N, case.rms)
        # Past N, x is 0, and x - mean must not count.
        x = tl.where((c < N)[None, :], x - mean[:, None], 0.0)
        r = _reciprocal(tl.sum(x * x, 1), N, eps, case.unbiased)
        y = _affine(x * r[:, None], W, B, c, N, case)
        _store_tile(Y, rows, N, c, size, y)
    else:
        total = tl.zeros([tile.rows, tile.columns], case.acc)
        if not case.rms:
            for o in tl.range(0, N, tile.columns):
                total += _sum(inputs, strides, rows, o, size, draw, tile, case)
        mean = _mean(tl.sum(total, 1), N, case.rms)
        total = tl.zeros([tile.rows, tile.columns], case.acc)
        for o in tl.range(0, N, tile.columns):
            x = _sum(inputs, strides, rows, o, size, draw, tile, case)
            x = tl.where((o + c < N)[None, :], x - mean[:, None], 0.0)
            total += x * x
        r = _reciprocal(tl.sum(total, 1), N, eps, case.unbiased)
        for o in tl.range(0, N, tile.columns):
            x = _sum(inputs, strides, rows, o, size, draw, tile, case)
            if case.residual:
                _store_tile(S, rows, N, o + c, size, x)
            xhat = (x - mean[:, None]) * r[:, None]
            y = _affine(xhat, W, B, o + c, N, case)
            _store_tile(Y, rows, N, o + c, size, y)
    if not case.rms:
        tl.store(statistics.mean + i, mean, mask=i < size.M)
    tl.store(statistics.reciprocal + i, r, mask=i < size.M)


@triton.jit
def _coefficient(products, r, N, eps, UNBIASED: tl.constexpr):
    """Return c, from sum(g * xhat). For a constant row, std = 0 and xhat = 0 make c = 0 / 0; the
    lower bound makes it 0.
    """
    if UNBIASED:
        return products / ((N - 1) * tl.maximum(1.0 - eps * r, 1e-30))
    else:
        return products / N


@triton.jit
def _weight(W, columns, N, case: tl.constexpr):
    """Load columns [BLOCK] of the weight as [1, BLOCK], or return 1 if there is no weight."""
    if case.weight:
        return _vector(W, columns, N, case.acc)
    else:
        return 1.0


@triton.jit
def _read_statistics(statistics, rows, M, RMS: tl.constexpr):
    """Return mean and r of rows [BM], zero from row M on, as [BM, 1]. The mean of RMSNorm is 0."""
    r = tl.load(statistics.reciprocal + rows, mask=rows < M, other=0.0)[:, None]
    if RMS:
        return 0.0, r
    else:
        return tl.load(statistics.mean + rows, mask=rows < M, other=0.0)[:, None], r


@triton.jit
def _store_gradients(gradients, dx, rows, o, stride, size, draw, case: tl.constexpr):
    """Store columns o .. o + BLOCK - 1 of dx + ds, the gradient of the residual, and of Z * (dx +
    ds), the gradient of the input. Without a residual, dx + ds is the gradient of the input. dx is
    [BM, BLOCK]; `stride` is the row stride of ds.
    """
    columns = o + tl.arange(0, dx.shape[1])
    if case.ds:
        dx += _tile(gradients.ds, rows, stride, columns, size, case.acc)
    _store_tile(gradients.dx, rows, size.N, columns, size, dx)
    if case.residual:
        if case.dropout:
            dx = drop_rows(dx, rows, o, draw)
        _store_tile(gradients.dinput, rows, size.N, columns, size, dx)


@triton.jit
def _store_sums(sums, dw, db, columns, N, case: tl.constexpr):
    """Store a program's partial sums for columns [BLOCK]: dw, db [BM, BLOCK] summed over BM."""
    partial = tl.program_id(0).to(tl.int64) * N
    if case.need_weights:
        tl.store(sums.weight + partial + columns, tl.sum(dw, 0), mask=columns < N)
    if case.need_bias:
        tl.store(sums.bias + partial + columns, tl.sum(db, 0), mask=columns < N)


@triton.jit
def _backward(
    X,  # [M, N]: the input of the norm
    W,  # [N]
    DY,  # [M, N]
    gradients,  # ds [M, N]; out [M, N] each
    sums,  # out [ranges of rows, N] each
    statistics,  # [M] each
    SEED,  # [1]
    strides,
    size,
    eps,
    dropout,
    rows_per_program,
    tile: tl.constexpr,
    case: tl.constexpr,
):
    """One program owns a fixed range of rows: their dx, and the sums of dweight and dbias over
    them. It adds up tiles [BM, BLOCK], and sums over BM only at the end.
    """
    N = size.N
    first = tl.program_id(0) * rows_per_program
    end = tl.minimum(size.M, first + rows_per_program)
    own = Size(end, N)
    c = tl.arange(0, tile.columns)
    dw = tl.zeros([tile.rows, tile.columns], case.acc)
    db = tl.zeros([tile.rows, tile.columns], case.acc)
    draw = Draw(read_seed(SEED, case.dropout), dropout)
    weight = _weight(W, c, N, case)
    for o in tl.range(0, rows_per_program, tile.rows, num_stages=tile.stages):
        rows = (first + o + tl.arange(0, tile.rows)).to(tl.int64)
        dy = _tile(DY, rows, strides.dy, c, own, case.acc)
        mean, r = _read_statistics(statistics, rows, end, case.rms)
        xhat = (_tile(X, rows, strides.x, c, own, case.acc) - mean) * r
        if case.need_x:
            g = dy * weight  # zero past N, whatever xhat is there
            coefficient = _coefficient(tl.sum(g * xhat, 1)[:, None], r, N, eps, case.unbiased)
            # dx = r (g - sum(g) / N - xhat c)
            dx = (g - _mean(tl.sum(g, 1), N, case.rms)[:, None] - xhat * coefficient) * r
            _store_gradients(gradients, dx, rows, 0, strides.ds, own, draw, case)
        if case.need_weights:
            dw += dy * xhat  # dweight = sum dy xhat
        if case.need_bias:
            db += dy  # dbias = sum dy
    _store_sums(sums, dw, db, c, N, case)


@triton.jit
def _backward_wide_dx(
    X,  # [M, N]: the input of the norm
    W,  # [N]
    DY,  # [M, N]
    gradients,  # ds [M, N]; out [M, N] each
    statistics,  # [M] each
    SEED,  # [1]
    strides,
    size,
    eps,
    dropout,
    tile: tl.constexpr,
    case: tl.constexpr,
):
    """One program owns BM rows that are wider than a block: it reads them for the sums of g and g *
    xhat, and again for dx.
    """
    N = size.N
    rows = (tl.program_id(0) * tile.rows + tl.arange(0, tile.rows)).to(tl.int64)
    mean, r = _read_statistics(statistics, rows, size.M, case.rms)
    c = tl.arange(0, tile.columns)
    draw = Draw(read_seed(SEED, case.dropout), dropout)
    products = tl.zeros([tile.rows, tile.columns], case.acc)
    total = tl.zeros([tile.rows, tile.columns], case.acc)
    for o in tl.range(0, N, tile.columns):
        g = _tile(DY, rows, strides.dy, o + c, size, case.acc) * _weight(W, o + c, N, case)
        products += g * (_tile(X, rows, strides.x, o + c, size, case.acc) - mean) * r
        total += g
    coefficient = _coefficient(tl.sum(products, 1)[:, None], r, N, eps, case.unbiased)
    shift = _mean(tl.sum(total, 1), N, case.rms)[:, None]
    for o in tl.range(0, N, tile.columns):
        g = _tile(DY, rows, strides.dy, o + c, size, case.acc) * _weight(W, o + c, N, case)
        xhat = (_tile(X, rows, strides.x, o + c, size, case.acc) - mean) * r
        # dx = r (g - sum(g) / N - xhat c)
        dx = (g - shift - xhat * coefficient) * r
        _store_gradients(gradients, dx, rows, o, strides.ds, size, draw, case)


@triton.jit
def _backward_wide_weights(
    X,  # [M, N]: the input of the norm
    DY,  # [M, N]
    sums,  # out [ranges of rows, N] each
    statistics,  # [M] each
    stride_x,
    stride_dy,
    size,
    rows_per_program,
    tile: tl.constexpr,
    case: tl.constexpr,
):
    """One program owns BLOCK columns of a fixed range of rows: the sums of dweight and dbias over
    these rows.
    """
    first = tl.program_id(0) * rows_per_program
    end = tl.minimum(size.M, first + rows_per_program)
    own = Size(end, size.N)
    c = tl.program_id(1) * tile.columns + tl.arange(0, tile.columns)
    dw = tl.zeros([tile.rows, tile.columns], case.acc)
    db = tl.zeros([tile.rows, tile.columns], case.acc)
    for o in tl.range(0, rows_per_program, tile.rows):
        rows = (first + o + tl.arange(0, tile.rows)).to(tl.int64)
        mean, r = _read_statistics(statistics, rows, end, case.rms)
        dy = _tile(DY, rows, stride_dy, c, own, case.acc)
        dw += dy * (_tile(X, rows, stride_x, c, own, case.acc) - mean) * r
        if case.need_bias:
            db += dy
    _store_sums(sums, dw, db, c, size.N, case)


# --------------------------------------------------------------------------------------- launchers

GROUPS = dict(inputs=Inputs, statistics=Statistics, gradients=Gradients, sums=Sums)


class Options(NamedTuple):
    """The options of a call, all but its tensors. n: the features of a row."""

    n: int
    eps: float
    unbiased: bool = False
    rms: bool = False
    dropout_p: float = 0.0
    shard: RowShard | None = None  # of dropout


def _tiles(kernel: str, x: Tensor, n: int, case: NamedTuple) -> Tiles:
    """Return the fastest measured tiles for rows like those in x, or else the shipped tiles."""
    shipped = configuration(n, architecture(x.device))
    name = f"{named(x.dtype, rows=x.numel() // n, features=n)} {flags(case, 'one', 'acc')}"
    options = functools.partial(others, shipped, kernel == "backward")
    return choose(x.device, TuningKey(f"layer_norm {kernel}", name, shipped, options))


class _Forward:
    """The launch of a forward, and the layouts of its outputs."""

    def __init__(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        options: Options,
    ) -> None:
        n = options.n
        rows, self.dtype = x.numel() // n, accumulator(x)
        self.like, self.statistics = dense(x.shape), dense([rows])
        case = ForwardCase(
            one=True,
            unbiased=options.unbiased,
            rms=options.rms,
            residual=residual is not None,
            dropout=options.dropout_p > 0,
            weight=weight is not None,
            bias=bias is not None,
            acc=triton_dtype(self.dtype),
        )
        tiles = _tiles("forward", x, n, case)
        case = case._replace(one=n <= tiles.columns)
        arguments = dict(
            strides=ForwardStrides(
                row_stride(x, n), row_stride(x if residual is None else residual, n)
            ),
            size=Size(rows, n),
            eps=options.eps,
            dropout=dropout_arguments(options.dropout_p, options.shard),
            tile=constants(tiles),
            case=constants(case),
        )
        grid = (triton.cdiv(rows, tiles.rows),)
        self.launch = Launch(_forward, grid, arguments, tiles.warps, groups=GROUPS)


def _run_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y, s, mean [M] and r [M]. Without a residual s is x. RMSNorm has no mean and returns r
    for it.
    """
    if x.numel() == 0:  # also if n is 0
        mean = x.new_empty(0, dtype=accumulator(x))
        return x.new_empty(x.shape), x.new_empty(x.shape), mean, torch.empty_like(mean)
    tensors = layouts(x, residual, weight, bias)
    key = "layer_norm", options, x.device, tensors, alignment(seed)
    plan = plans.get(key)
    if plan is None:
        given = x, residual, weight, bias
        made: Any = (
            *(t if t is None else as_rows(t, options.n) for t in given[:2]),
            *(t if t is None else t.contiguous() for t in given[2:]),
        )
        if any(a is not b for a, b in zip(given, made)):
            x, residual, weight, bias = made
            return _run_forward(x, residual, weight, bias, seed, options)
        plan = remembered(key, _Forward(x, residual, weight, bias, options))
    y = x.new_empty_strided(*plan.like)
    s = x if residual is None else x.new_empty_strided(*plan.like)
    reciprocal = x.new_empty_strided(*plan.statistics, dtype=plan.dtype)
    mean = reciprocal if options.rms else torch.empty_like(reciprocal)
    inputs = x, x if residual is None else residual
    # x stands in for each absent tensor: a kernel compiled without it never reads it.
    w, b = x if weight is None else weight, x if bias is None else bias
    with on_device(x):
        plan.launch(inputs, w, b, y, s, (mean, reciprocal), x if seed is None else seed)
    return y, s, mean, reciprocal


class _Given(NamedTuple):
    """The tensors of a backward. x: the saved sum s. grad_sum: the gradient of s as an output, if
    it has one.
    """

    grad: Tensor
    grad_sum: Tensor | None
    x: Tensor
    weight: Tensor | None
    seed: Tensor | None
    mean: Tensor
    reciprocal: Tensor


class Needs(NamedTuple):
    """Whether there was a residual, and which gradients are wanted. weights: of weight or bias;
    bias: of the bias too.
    """

    residual: bool
    x: bool
    weights: bool
    bias: bool


class _Backward:
    """The launches of a backward: one kernel if a row fits into a tile, else one for dx and one for
    the weight gradients.
    """

    def __init__(self, given: _Given, options: Options, needs: Needs) -> None:
        x, n, acc = given.x, options.n, triton_dtype(given.mean.dtype)
        self.rows_kernel: Launch | None = None
        self.weights_kernel: Launch | None = None
        rows = x.numel() // n
        case = BackwardCase(
            unbiased=options.unbiased,
            rms=options.rms,
            residual=needs.residual,
            dropout=options.dropout_p > 0,
            ds=given.grad_sum is not None,
            weight=given.weight is not None,
            need_x=needs.x,
            need_weights=needs.weights,
            need_bias=needs.bias,
            acc=acc,
        )
        tiles = _tiles("backward", x, n, case)
        per_program = max(tiles.rows, triton.cdiv(rows, PARTIAL_SUMS))
        runs = triton.cdiv(rows, per_program)
        self.partial = (1 + needs.bias, runs if needs.weights else 0, n)
        size = Size(rows, n)
        tensors = x, given.grad, given.grad if given.grad_sum is None else given.grad_sum
        strides = BackwardStrides(*(row_stride(t, n) for t in tensors))
        arguments = dict(
            strides=strides,
            size=size,
            eps=options.eps,
            dropout=dropout_arguments(options.dropout_p, options.shard),
            tile=constants(tiles),
            case=constants(case),
        )
        self.one = n <= tiles.columns
        if self.one:
            arguments["rows_per_program"] = per_program
            self.rows_kernel = Launch(_backward, (runs,), arguments, tiles.warps, groups=GROUPS)
            return
        if needs.x:
            grid: tuple[int, ...] = (triton.cdiv(rows, tiles.rows),)
            self.rows_kernel = Launch(
                _backward_wide_dx, grid, arguments, tiles.warps, groups=GROUPS
            )
        if needs.weights:
            wide = WIDE_WEIGHTS
            case = BackwardCase(*[False] * len(case))._replace(  # the others are for dx
                rms=case.rms, need_weights=True, need_bias=case.need_bias, acc=acc
            )
            arguments = dict(
                stride_x=strides.x,
                stride_dy=strides.dy,
                size=size,
                rows_per_program=per_program,
                tile=constants(wide),
                case=constants(case),
            )
            grid = (runs, triton.cdiv(n, wide.columns))
            self.weights_kernel = Launch(
                _backward_wide_weights, grid, arguments, wide.warps, groups=GROUPS
            )


def _run_backward(given: _Given, options: Options, needs: Needs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of the residual (of x without one), the gradient of x with a residual,
    and the sums for weight and bias, [2, N], or [1, N] without the bias. What is not needed is
    empty.
    """
    grad, grad_sum, x, weight, seed, mean, reciprocal = given
    dx = x.new_empty(x.shape if needs.x else 0)
    dinput = x.new_empty(x.shape if needs.x and needs.residual else 0)
    if x.numel() == 0:
        return dx, dinput, mean.new_zeros(1 + needs.bias, options.n)
    tensors = layouts(grad, grad_sum, x, weight, mean, reciprocal)
    key = "layer_norm backward", options, needs, x.device, tensors, alignment(seed)
    plan = plans.get(key)
    if plan is None:
        made: Any = (
            *(t if t is None else as_rows(t, options.n) for t in given[:3]),
            *(t if t is None else t.contiguous() for t in given[3:]),
        )
        if any(a is not b for a, b in zip(given, made)):
            return _run_backward(_Given(*made), options, needs)
        plan = remembered(key, _Backward(given, options, needs))
    partial = mean.new_empty(plan.partial)
    parts, statistics = partial.unbind(), (mean, reciprocal)
    sums = parts[0], parts[-1]
    gradients = grad if grad_sum is None else grad_sum, dx, dinput
    read = x, x if weight is None else weight, grad
    seed = x if seed is None else seed
    with on_device(x):
        if plan.one:
            plan.rows_kernel(*read, gradients, sums, statistics, seed)
        else:
            if needs.x:
                plan.rows_kernel(*read, gradients, statistics, seed)
            if needs.weights:
                plan.weights_kernel(x, grad, sums, statistics)
    return dx, dinput, partial.sum(1)


def _or_nothing(needed: bool, like: Tensor | None, of: Tensor) -> Tensor:
    """Make an uninitialised gradient for `like`, without elements if it is not needed."""
    return of.new_empty(0) if not needed or like is None else like.new_empty(like.shape)


def _as(sums: Tensor, needed: bool, like: Tensor | None, of: Tensor) -> Tensor:
    """Return a weight's gradient from its sums [N], without elements if it is not needed."""
    if not needed or like is None:
        return of.new_empty(0)
    return sums.view(like.shape).to(like.dtype, copy=True)


def supports(input, normalized_shape=None, weight=None, **_) -> str | None:
    """Return why the kernels cannot run this call, or None."""
    n = math.prod(weight.shape if normalized_shape is None else normalized_shape)
    if n > MAX_FEATURES:
        return f"a row has {n} features; the kernels take up to {MAX_FEATURES}"
    return unsupported_dtype(input)


# --------------------------------------------------------------------------------------- LayerNorm


def _statistics(input: Tensor, normalized_shape: list[int]) -> Tensor:
    rows = math.prod(input.shape[: input.dim() - len(normalized_shape)])
    return input.new_empty(rows, dtype=accumulator(input))


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
    """Launch the forward: (output, mean [M], r [M])."""
    options = Options(math.prod(normalized_shape), eps, unbiased)
    y, _, mean, r = _run_forward(input, None, weight, bias, None, options)
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
    """Launch the kernels of dx and of the partial weight gradients, and add up the partial sums."""
    options = Options(math.prod(normalized_shape), eps, unbiased)
    dx, _, sums = _run_backward(
        _Given(grad_output, None, input, weight, None, mean, reciprocal),
        options,
        Needs(False, needs[0], needs[1] or needs[2], needs[2]),
    )
    return dx, _as(sums[0], needs[1], weight, dx), _as(sums[-1], needs[2], bias, dx)


# ----------------------------------------------------------------------------------------- RMSNorm


def _fake_rms(input, normalized_shape, *_):
    return input.new_empty(input.shape), _statistics(input, normalized_shape)


@register(
    "rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, float eps) "
    "-> (Tensor output, Tensor reciprocal)",
    _fake_rms,
)
def rms_forward(input, normalized_shape, weight, eps):
    """Launch the forward: (output, r [M])."""
    options = Options(math.prod(normalized_shape), eps, rms=True)
    y, _, _, r = _run_forward(input, None, weight, None, None, options)
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
    """Launch as `backward` does. r is passed for the mean, which no kernel reads."""
    options = Options(math.prod(normalized_shape), eps, rms=True)
    dx, _, sums = _run_backward(
        _Given(grad_output, None, input, weight, None, reciprocal, reciprocal),
        options,
        Needs(False, needs[0], needs[1], False),
    )
    return dx, _as(sums[0], needs[1], weight, dx)


# ------------------------------------------------------------------------ residual, dropout, norm

_ARGUMENTS = "float dropout_p, float eps, bool unbiased, Tensor? dropout_seed, SymInt[]? shard"


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
def add_forward(input, residual, weight, bias, dropout_p, eps, unbiased, dropout_seed, shard):
    """Launch the forward: (normalized, residual_out, mean [M], r [M])."""
    dropout = dict(dropout_p=dropout_p, shard=row_shard(shard))
    options = Options(weight.numel(), eps, unbiased, **dropout)
    return _run_forward(input, residual, weight, bias, dropout_seed, options)


def _gradients(needs, residual_out, *parameters):
    """Make uninitialised gradients of the input, the residual and the parameters."""
    x = needs[0] or needs[1]
    rest = (_or_nothing(need, p, residual_out) for need, p in zip(needs[2:], parameters))
    return *(_or_nothing(x, residual_out, residual_out) for _ in range(2)), *rest


def _fake_add_backward(grad_normalized, grad_residual_out, weight, bias, *rest):
    residual_out, _, _, needs = rest[-4:]
    return _gradients(needs, residual_out, weight, bias)


@register(
    "dropout_add_layer_norm_backward(Tensor grad_normalized, Tensor? grad_residual_out, "
    f"Tensor weight, Tensor? bias, {_ARGUMENTS}, Tensor residual_out, Tensor mean, "
    "Tensor reciprocal, bool[] needs) "
    "-> (Tensor grad_input, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias)",
    _fake_add_backward,
)
def add_backward(
    grad_normalized,
    grad_residual_out,
    weight,
    bias,
    dropout_p,
    eps,
    unbiased,
    dropout_seed,
    shard,
    residual_out,
    mean,
    reciprocal,
    needs,
):
    """Launch one pass for the gradients of input and residual and for the partial weight gradients,
    and add up the partial sums.
    """
    dropout = dict(dropout_p=dropout_p, shard=row_shard(shard))
    options = Options(weight.numel(), eps, unbiased, **dropout)
    dx, dinput, sums = _run_backward(
        _Given(
            grad_normalized, grad_residual_out, residual_out, weight, dropout_seed, mean, reciprocal
        ),
        options,
        Needs(True, needs[0] or needs[1], needs[2] or needs[3], needs[3]),
    )
    return dinput, dx, _as(sums[0], needs[2], weight, dx), _as(sums[-1], needs[3], bias, dx)


def _fake_add_rms(input, residual, weight, *_):
    statistic = _statistics(input, list(weight.shape))
    return input.new_empty(input.shape), input.new_empty(input.shape), statistic


@register(
    "dropout_add_rms_norm(Tensor input, Tensor residual, Tensor weight, float dropout_p, "
    "float eps, Tensor? dropout_seed, SymInt[]? shard) "
    "-> (Tensor normalized, Tensor residual_out, Tensor reciprocal)",
    _fake_add_rms,
)
def add_rms_forward(input, residual, weight, dropout_p, eps, dropout_seed, shard):
    """Launch the forward: (normalized, residual_out, r [M])."""
    dropout = dict(dropout_p=dropout_p, shard=row_shard(shard))
    options = Options(weight.numel(), eps, rms=True, **dropout)
    y, total, _, r = _run_forward(input, residual, weight, None, dropout_seed, options)
    return y, total, r


def _fake_add_rms_backward(grad_normalized, grad_residual_out, weight, *rest):
    residual_out, _, needs = rest[-3:]
    return _gradients(needs, residual_out, weight)


@register(
    "dropout_add_rms_norm_backward(Tensor grad_normalized, Tensor? grad_residual_out, "
    "Tensor weight, float dropout_p, float eps, Tensor? dropout_seed, SymInt[]? shard, "
    "Tensor residual_out, Tensor reciprocal, bool[] needs) "
    "-> (Tensor grad_input, Tensor grad_residual, Tensor grad_weight)",
    _fake_add_rms_backward,
)
def add_rms_backward(
    grad_normalized,
    grad_residual_out,
    weight,
    dropout_p,
    eps,
    dropout_seed,
    shard,
    residual_out,
    reciprocal,
    needs,
):
    """Launch as `add_backward` does. r is passed for the mean, which no kernel reads."""
    dropout = dict(dropout_p=dropout_p, shard=row_shard(shard))
    options = Options(weight.numel(), eps, rms=True, **dropout)
    saved = residual_out, weight, dropout_seed, reciprocal, reciprocal
    dx, dinput, sums = _run_backward(
        _Given(grad_normalized, grad_residual_out, *saved),
        options,
        Needs(True, needs[0] or needs[1], needs[2], False),
    )
    return dinput, dx, _as(sums[0], needs[2], weight, dx)
