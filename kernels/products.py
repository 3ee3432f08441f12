"""Matrix products, y = x w + b, with the same bits for a row of x in any matrix: the tiles and the
order of the sum over K depend on the architecture and the dtype alone.

Shapes: x [M, K], w [K, N], or batches of them, [B, M, K] and [B, K, N]; b [N]. Any dtype in and
out, sums in float32 (float64 for float64). Nothing is split over K, so that small M leave
multiprocessors idle: the price of the fixed tiles. FLOPs: 2 M N K. Least bytes: x, w and y once.
`linear` and `matmul` are torch's, except within `batch_invariant`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer.batch_invariance import on

from .common import INTERPRETED, load_where, tile_in_turn
from .launch import (
    MOST_PROGRAMS,
    Launch,
    accumulator,
    architecture,
    constants,
    dot_precision,
    on_device,
    planned,
    triton_dtype,
    unsupported_dtype,
)


class ProductTiles(NamedTuple):
    """The rows, columns and features of a tile, its warps, and its stages."""

    rows: int
    columns: int
    features: int
    warps: int
    stages: int


# By architecture: tiles for 16-bit inputs and for float32. benchmarks/proof/compile_gate.py prints
# the registers and spills of each.
CONFIGURATIONS: dict[str, tuple[ProductTiles, ProductTiles]] = {
    "sm_90": (ProductTiles(128, 128, 64, 8, 3), ProductTiles(64, 64, 32, 4, 3)),
    "sm_100": (ProductTiles(128, 128, 64, 8, 3), ProductTiles(64, 64, 32, 4, 3)),
    "sm_80": (ProductTiles(128, 128, 32, 8, 3), ProductTiles(64, 64, 32, 4, 3)),
    "sm_86": (ProductTiles(128, 128, 32, 8, 3), ProductTiles(64, 64, 32, 4, 2)),
    "interpreter": (ProductTiles(256, 256, 256, 4, 1), ProductTiles(256, 256, 256, 4, 1)),
    "other": (ProductTiles(64, 64, 32, 4, 2), ProductTiles(64, 64, 16, 4, 1)),
}
GROUP_ROWS = 8  # row blocks that share the columns of w in the L2 cache


def configuration(arch: str, dtype: torch.dtype) -> ProductTiles:
    """Choose the tiles of a GEMM by architecture and dtype."""
    return CONFIGURATIONS[arch][dtype == torch.float32]


class Sizes(NamedTuple):
    """M rows of N columns, from K features."""

    M: Any
    N: Any
    K: Any


class ProductStrides(NamedTuple):
    """The strides of x [B, M, K] and of w [B, K, N]."""

    x_batch: Any
    x_row: Any
    x_feature: Any
    w_batch: Any
    w_feature: Any
    w_column: Any


class ProductCase(NamedTuple):
    """What the kernel is compiled for. `even`: the features are a multiple of the tile's; `wide`:
    a tile may span more than 2^31 elements; `group`: how many row blocks share columns.
    """

    group: Any
    bias: Any
    even: Any
    precision: Any
    wide: Any
    acc: Any


@triton.jit
def product_tile(X, W, i0, j0, strides, size, tile: tl.constexpr, case: tl.constexpr):
    """Return the tile [BM, BN] of x w at row i0 and column j0, in the dtype of sums."""
    # Past the end, the last row and column are read again, so that their loads need no mask.
    r = tl.minimum(tl.arange(0, tile.rows), size.M - 1 - i0)
    c = tl.minimum(tl.arange(0, tile.columns), size.N - 1 - j0)
    k = tl.arange(0, tile.features)
    if case.wide:
        r, c, k = r.to(tl.int64), c.to(tl.int64), k.to(tl.int64)
    x_base = X + i0.to(tl.int64) * strides.x_row
    w_base = W + j0.to(tl.int64) * strides.w_column
    acc = tl.zeros([tile.rows, tile.columns], case.acc)
    for k0 in tl.range(0, size.K, tile.features):
        f = k0 + k
        x_pointers = x_base + (r[:, None] * strides.x_row + f[None, :] * strides.x_feature)
        w_pointers = w_base + (f[:, None] * strides.w_feature + c[None, :] * strides.w_column)
        x = load_where(x_pointers, (f < size.K)[None, :], not case.even)
        w = load_where(w_pointers, (f < size.K)[:, None], not case.even)
        acc = tl.dot(x, w, acc, case.precision, out_dtype=case.acc)
    return acc


@triton.jit
def product_kernel(X, W, B, Y, strides, size, tile: tl.constexpr, case: tl.constexpr):
    """One program owns a [BM, BN] tile of a Y [M, N]. Consecutive programs take the row blocks of a
    group with the same columns, and so share these columns of W in the cache.
    """
    i0, j0 = tile_in_turn(size.M, size.N, tile, case.group)
    b = tl.program_id(1).to(tl.int64)
    x, w = X + b * strides.x_batch, W + b * strides.w_batch
    acc = product_tile(x, w, i0, j0, strides, size, tile, case)
    j = j0 + tl.arange(0, tile.columns)
    i = i0 + tl.arange(0, tile.rows)
    if case.bias:
        acc += tl.load(B + j, mask=j < size.N, other=0.0).to(case.acc)[None, :]
    place = (b * size.M + i)[:, None] * size.N + j[None, :]
    ok = (i < size.M)[:, None] & (j < size.N)[None, :]
    tl.store(Y + place, acc.to(Y.dtype.element_ty), mask=ok)


def unsupported(x: Tensor) -> str | None:
    """Return why the kernel cannot multiply x, or None."""
    if not x.is_cuda and not (x.is_cpu and INTERPRETED):
        return f"the tensors are on a {x.device.type} device, and there is no interpreter"
    if x.is_cuda and torch.version.hip is not None:
        return "the kernels do not run on AMD GPUs (HIP)"
    if not x.is_floating_point():
        return f"the tensors have dtype {x.dtype}"
    return unsupported_dtype(x)


@planned
def _launch(x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> Launch:
    """Return the launch of y = x w + bias, where bias and y are contiguous."""
    arch = architecture(x.device)
    tiles, size = configuration(arch, x.dtype), Sizes(x.shape[-2], w.shape[-1], x.shape[-1])
    strides = ProductStrides(*(0, *x.stride())[-3:], *(0, *w.stride())[-3:])
    reach = max(strides.x_feature, strides.w_feature) * size.K
    reach += max(tiles.rows * strides.x_row, tiles.columns * strides.w_column)
    case = ProductCase(
        group=GROUP_ROWS,
        bias=bias is not None,
        even=size.K % tiles.features == 0,
        precision=dot_precision(arch),
        wide=reach >= 2**31,
        acc=triton_dtype(accumulator(x)),
    )
    blocks = triton.cdiv(size.M, tiles.rows) * triton.cdiv(size.N, tiles.columns)
    grid = (blocks, x.shape[0] if x.dim() == 3 else 1)
    arguments: dict[str, Any] = dict(
        strides=strides, size=size, tile=constants(tiles), case=constants(case)
    )
    return Launch(product_kernel, grid, arguments, tiles.warps, tiles.stages)


def product(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x w + bias, in `out` if it is given, else in the dtype, by default that of x."""
    if out is None or not out.is_contiguous():
        shape = (*x.shape[:-1], w.shape[-1])
        y = x.new_empty(shape, dtype=dtype if out is None else out.dtype)
    else:
        y = out
    bias = None if bias is None else bias.contiguous()
    if x.dim() == 3 and len(x) > MOST_PROGRAMS:
        for part in zip(*(t.split(MOST_PROGRAMS) for t in (x, w, y))):
            product(part[0], part[1], bias, part[2])
    else:
        launch = _launch(x, w, bias, y)
        with on_device(x):
            launch(x, w, x if bias is None else bias, y)
    return y if out is None or y is out else out.copy_(y)


def linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """Return x w^T + b, for x [M, K] and w [N, K]."""
    return product(x, w.t(), b) if on() else torch.nn.functional.linear(x, w, b)


def matmul(x: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    """Return x w, for x [M, K] and w [K, N], in `out` if it is given."""
    return product(x, w, out=out) if on() else torch.mm(x, w, out=out)
