"""What the kernels share on the device: constants, and dropout."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PHILOX_ROUNDS = tl.constexpr(7)


class Dropout(NamedTuple):
    """What kernels take for dropout beside the seed: see `dropout_arguments`."""

    threshold: Any
    inv_keep: Any


class Draw(NamedTuple):
    """What a kernel draws from once it has read the seed."""

    seed: Any
    threshold: Any
    inv_keep: Any


@triton.jit
def dropout_keep(seed, plane, i0, j0, threshold, BM: tl.constexpr, BN: tl.constexpr):
    """Return which elements dropout keeps of the [BM, BN] tile at row i0 and column j0, which are
    multiples of 16.

    Counter (j', i', plane, 0) with x' = x // 16 * 8 + x % 8 serves rows i, i + 8 and columns
    j, j + 8, by word 2 * (i // 8 % 2) + (j // 8 % 2): the four elements that one thread holds in a
    tensor-core accumulator, and in its transpose, so that nothing moves between threads.
    """
    i = (i0 // 2 + tl.arange(0, BM // 2))[:, None].to(tl.uint32)
    j = (j0 // 2 + tl.arange(0, BN // 2))[None, :].to(tl.uint32)
    p = plane.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, j, i, p, p * 0, PHILOX_ROUNDS)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [BM/2, BN/2, column, row]
    words = words.reshape(BM // 16, 8, BN // 16, 8, 2, 2).permute(0, 4, 1, 2, 5, 3)
    return words.reshape(BM, BN) >= threshold.to(tl.uint32, bitcast=True)


@triton.jit
def row_dropout_keep(seed, rows, o, threshold, BM: tl.constexpr, BLOCK: tl.constexpr):
    """Return which elements dropout keeps of rows [BM] and columns o .. o + BLOCK - 1. Word j % 4
    of counter (j // 4, row low, row high, 1) decides on column j.
    """
    j = (o // 4 + tl.arange(0, BLOCK // 4))[None, :].to(tl.uint32)
    low = rows[:, None].to(tl.uint32)
    high = (rows >> 32)[:, None].to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, j, low, high, low * 0 + 1, PHILOX_ROUNDS)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BM, BLOCK)
    return words >= threshold.to(tl.uint32, bitcast=True)


@triton.jit
def dropout_draw(SEED, dropout, DROPOUT: tl.constexpr):
    """Read the seed, an int64 [1], if there is dropout."""
    seed = 0
    if DROPOUT:
        seed = tl.load(SEED)
    return Draw(seed, dropout.threshold, dropout.inv_keep)


@triton.jit
def drop_rows(x, rows, o, draw):
    """Apply dropout to a tile x [BM, BLOCK] of rows [BM] and columns o .. o + BLOCK - 1."""
    keep = row_dropout_keep(draw.seed, rows, o, draw.threshold, x.shape[0], x.shape[1])
    return tl.where(keep, x * draw.inv_keep, 0.0)


INTERPRETED = not isinstance(dropout_keep, JITFunction)


def dropout_arguments(p: float) -> Dropout:
    """Return the int32 with the 32 bits of the threshold, and the factor on what is kept.

    At p = 1 the threshold does not fit, and the factor 0 drops everything.
    """
    threshold = min(round(p * 2**32), 2**32 - 1)
    signed = threshold - 2**32 if threshold >= 2**31 else threshold
    return Dropout(signed, 1 / (1 - p) if p < 1 else 0.0)
