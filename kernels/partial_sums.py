"""Adds up the partial sums that the programs of another kernel have left, without atomics."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .common import INTERPRETED
from .launch import Launch, constants


class Tile(NamedTuple):
    """The partial sums that a program adds up at a time, and its columns."""

    rows: int
    columns: int


TILE = Tile(256, 1024) if INTERPRETED else Tile(128, 32)


class Results(NamedTuple):
    """Up to three results, [N] each; the first stands in for those that there are not."""

    first: Any
    second: Any
    third: Any


@triton.jit
def add_up_kernel(
    PARTIAL,  # [K, parts, N]
    results,  # out [N] each
    parts,
    N,
    tile: tl.constexpr,
):
    """One program owns columns of one result. The order of its sum depends on the sizes alone."""
    k = tl.program_id(1)
    c = tl.program_id(0) * tile.columns + tl.arange(0, tile.columns)
    base = PARTIAL + k.to(tl.int64) * parts * N
    total = tl.zeros([tile.rows, tile.columns], PARTIAL.dtype.element_ty)
    for o in tl.range(0, parts, tile.rows):
        rows = o + tl.arange(0, tile.rows)
        ok = (rows < parts)[:, None] & (c < N)[None, :]
        total += tl.load(base + rows.to(tl.int64)[:, None] * N + c[None, :], mask=ok, other=0.0)
    total = tl.sum(total, 0)
    if k == 0:
        tl.store(results.first + c, total.to(results.first.dtype.element_ty), mask=c < N)
    elif k == 1:
        tl.store(results.second + c, total.to(results.second.dtype.element_ty), mask=c < N)
    else:
        tl.store(results.third + c, total.to(results.third.dtype.element_ty), mask=c < N)


def sums_launch(count: int, parts: int, n: int) -> Launch:
    """Make a launch that stores the sums over `parts` of partial [K, parts, N] into K <= 3
    contiguous tensors of N elements, in their dtypes. It takes partial, and three results: if there
    are fewer, any tensor stands in.
    """
    arguments = dict(parts=parts, N=n, tile=constants(TILE))
    grid = triton.cdiv(n, TILE.columns), count
    return Launch(add_up_kernel, grid, arguments, 4, groups=dict(results=Results))
