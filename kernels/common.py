"""What the kernels share on the device: constants, and the words that dropout is drawn from."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PHILOX_ROUNDS = tl.constexpr(7)


@triton.jit
def dropout_keep(seed, plane, i0, j0, threshold, BM: tl.constexpr, BN: tl.constexpr):
    """Which elements of the [BM, BN] tile at row i0, column j0 (multiples of 16) dropout keeps.

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
    """Which elements of rows [BM] and columns o .. o + BLOCK - 1 dropout keeps: word j % 4 of
    counter (j // 4, row low, row high, 1).
    """
    j = (o // 4 + tl.arange(0, BLOCK // 4))[None, :].to(tl.uint32)
    low = rows[:, None].to(tl.uint32)
    high = (rows >> 32)[:, None].to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, j, low, high, low * 0 + 1, PHILOX_ROUNDS)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BM, BLOCK)
    return words >= threshold.to(tl.uint32, bitcast=True)


INTERPRETED = not isinstance(dropout_keep, JITFunction)


def dropout_arguments(p: float) -> tuple[int, float]:
    """(threshold as the int32 that carries its 32 bits, the factor of what is kept).

    At p = 1 the threshold does not fit, and the factor 0 drops everything.
    """
    threshold = min(round(p * 2**32), 2**32 - 1)
    return threshold - 2**32 if threshold >= 2**31 else threshold, 1 / (1 - p) if p < 1 else 0.0
