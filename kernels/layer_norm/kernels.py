"""The kernels of the norms, and the groups that their arguments come in."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common import Draw, Size, drop_rows, read_seed

# ----------------------------------------------------------------- groups of the kernels' arguments


class Inputs(NamedTuple):
    """The input and the residual, [M, N] each, and the bias of the input, [N]."""

    x: Any
    residual: Any
    bias: Any


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
    """The partial sums of the gradients of weight, bias and the input's bias, [ranges of rows, N]
    each.
    """

    weight: Any
    bias: Any
    input_bias: Any


class ForwardStrides(NamedTuple):
    """The row strides of the inputs."""

    x: Any
    residual: Any


class BackwardStrides(NamedTuple):
    """The row strides of s, dy and ds."""

    x: Any
    dy: Any
    ds: Any


class ForwardCase(NamedTuple):
    """What the forward is compiled for. `one`: a row fits into one tile."""

    one: Any
    unbiased: Any
    rms: Any
    residual: Any
    dropout: Any
    weight: Any
    bias: Any
    input_bias: Any
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
    need_weight: Any
    need_bias: Any
    need_input_bias: Any
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
    if case.input_bias:
        x = x + _vector(inputs.bias, columns, size.N, case.acc)
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
def forward_kernel(
    inputs,  # [M, N] each, and [N]
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
    ds), the gradient of the input, and return the latter. Without a residual, dx + ds is the
    gradient of the input. dx is [BM, BLOCK]; `stride` is the row stride of ds.
    """
    columns = o + tl.arange(0, dx.shape[1])
    if case.ds:
        dx += _tile(gradients.ds, rows, stride, columns, size, case.acc)
    _store_tile(gradients.dx, rows, size.N, columns, size, dx)
    if case.residual:
        if case.dropout:
            dx = drop_rows(dx, rows, o, draw)
        _store_tile(gradients.dinput, rows, size.N, columns, size, dx)
    return dx


@triton.jit
def _store_sums(sums, dw, db, dinput, columns, N, case: tl.constexpr):
    """Store a program's partial sums for columns [BLOCK]: dw, db and dinput [BM, BLOCK], summed
    over BM.
    """
    partial = tl.program_id(0).to(tl.int64) * N
    if case.need_weight:
        tl.store(sums.weight + partial + columns, tl.sum(dw, 0), mask=columns < N)
    if case.need_bias:
        tl.store(sums.bias + partial + columns, tl.sum(db, 0), mask=columns < N)
    if case.need_input_bias:
        tl.store(sums.input_bias + partial + columns, tl.sum(dinput, 0), mask=columns < N)


@triton.jit
def backward_kernel(
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
    """One program owns a fixed range of rows: their dx, and the sums of the parameters' gradients
    over them. It adds up tiles [BM, BLOCK], and sums over BM only at the end.
    """
    N = size.N
    first = tl.program_id(0) * rows_per_program
    end = tl.minimum(size.M, first + rows_per_program)
    own = Size(end, N)
    c = tl.arange(0, tile.columns)
    dw = tl.zeros([tile.rows, tile.columns], case.acc)
    db = tl.zeros([tile.rows, tile.columns], case.acc)
    dinput = tl.zeros([tile.rows, tile.columns], case.acc)
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
            dx = _store_gradients(gradients, dx, rows, 0, strides.ds, own, draw, case)
            if case.need_input_bias:
                dinput += dx
        if case.need_weight:
            dw += dy * xhat  # dweight = sum dy xhat
        if case.need_bias:
            db += dy  # dbias = sum dy
    _store_sums(sums, dw, db, dinput, c, N, case)


@triton.jit
def backward_wide_dx_kernel(
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
def backward_wide_weights_kernel(
    X,  # [M, N]: the input of the norm
    DY,  # [M, N]
    DINPUT,  # [M, N]: the gradient of the input, if that of its bias is wanted
    sums,  # out [ranges of rows, N] each
    statistics,  # [M] each
    stride_x,
    stride_dy,
    size,
    rows_per_program,
    tile: tl.constexpr,
    case: tl.constexpr,
):
    """One program owns BLOCK columns of a fixed range of rows: the sums of the parameters'
    gradients over these rows.
    """
    first = tl.program_id(0) * rows_per_program
    end = tl.minimum(size.M, first + rows_per_program)
    own = Size(end, size.N)
    c = tl.program_id(1) * tile.columns + tl.arange(0, tile.columns)
    dw = tl.zeros([tile.rows, tile.columns], case.acc)
    db = tl.zeros([tile.rows, tile.columns], case.acc)
    dinput = tl.zeros([tile.rows, tile.columns], case.acc)
    for o in tl.range(0, rows_per_program, tile.rows):
        rows = (first + o + tl.arange(0, tile.rows)).to(tl.int64)
        mean, r = _read_statistics(statistics, rows, end, case.rms)
        dy = _tile(DY, rows, stride_dy, c, own, case.acc)
        if case.need_weight:
            dw += dy * (_tile(X, rows, stride_x, c, own, case.acc) - mean) * r
        if case.need_bias:
            db += dy
        if case.need_input_bias:
            dinput += _tile(DINPUT, rows, size.N, c, own, case.acc)
    _store_sums(sums, dw, db, dinput, c, size.N, case)
