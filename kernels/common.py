"""What the kernels share on the device: constants and dropout."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PHILOX_ROUNDS = tl.constexpr(7)
PHILOX_FACTOR = tl.constexpr(0xD256D193)
PHILOX_STEP = tl.constexpr(0x9E3779B9)
SPLITMIX_STEP = tl.constexpr(0x9E3779B97F4A7C15)
SPLITMIX_A = tl.constexpr(0xBF58476D1CE4E5B9)
SPLITMIX_B = tl.constexpr(0x94D049BB133111EB)


class Dropout(NamedTuple):
    """What kernels take for dropout beside the seed: see `dropout_arguments`."""

    threshold: Any
    inv_keep: Any


class DropoutStream(NamedTuple):
    """The dropout words of one (batch, head): a Philox key, and a word to XOR counters with."""

    key: Any
    shift: Any


class Size(NamedTuple):
    """M rows of N columns."""

    M: Any
    N: Any


class Draw(NamedTuple):
    """What a kernel that owns rows needs for dropout: the seed, and `Dropout`."""

    seed: Any
    dropout: Any


@triton.jit
def load_where(pointers, ok, GUARD: tl.constexpr):
    """Load where `ok` is True, and return zero elsewhere. Without GUARD load everything."""
    if GUARD:
        return tl.load(pointers, mask=ok, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def tile_in_turn(M, N, tile: tl.constexpr, group: tl.constexpr):
    """Return the first row and column of this program's tile of an [M, N] result. Consecutive
    programs take the row blocks of a group of them with the same columns.
    """
    across = tl.cdiv(N, tile.columns)
    down = tl.cdiv(M, tile.rows)
    first = tl.program_id(0) // (group * across) * group
    members = tl.minimum(down - first, group)
    turn = tl.program_id(0) % (group * across)
    return (first + turn % members) * tile.rows, turn // members * tile.columns


@triton.jit
def philox(key, c0, c1):
    """Return the two words of Philox2x32 for a key and a counter (c0, c1) (Salmon et al. 2011,
    "Parallel Random Numbers: As Easy as 1, 2, 3").
    """
    for _ in tl.static_range(PHILOX_ROUNDS):
        high = tl.umulhi(c0, PHILOX_FACTOR)
        c0, c1 = high ^ key ^ c1, tl.mul(c0, PHILOX_FACTOR, sanitize_overflow=False)
        key = tl.add(key, PHILOX_STEP, sanitize_overflow=False)
    return c0, c1


@triton.jit
def dropout_stream(seed, batch_head):
    """Return the stream of (batch, head) number `batch_head`: the two words of that output of
    SplitMix64 from the seed (Steele et al. 2014, "Fast Splittable Pseudorandom Number Generators").
    """
    steps = tl.mul(batch_head.to(tl.uint64) + 1, SPLITMIX_STEP, sanitize_overflow=False)
    z = tl.add(seed.to(tl.uint64, bitcast=True), steps, sanitize_overflow=False)
    z = tl.mul(z ^ (z >> 30), SPLITMIX_A, sanitize_overflow=False)
    z = tl.mul(z ^ (z >> 27), SPLITMIX_B, sanitize_overflow=False)
    z = z ^ (z >> 31)
    return DropoutStream(z.to(tl.uint32), (z >> 32).to(tl.uint32))


@triton.jit
def dropout_words(stream, i, j, BM: tl.constexpr, BN: tl.constexpr):
    """Return the words [BM, BN] whose 16 high bits decide on the elements of a tile, from the
    counters i [BM / 2, 1] and j [1, BN / 2] of `dropout_keep`.
    """
    w0, w1 = philox(stream.key, i, j ^ stream.shift)
    words = tl.join(tl.join(w0 << 16, w1 << 16), tl.join(w0, w1))  # [BM/2, BN/2, row, column]
    words = words.reshape(BM // 16, 8, BN // 16, 8, 2, 2).permute(0, 4, 1, 2, 5, 3)
    return words.reshape(BM, BN)


@triton.jit
def dropout_keep(stream, i0, j0, threshold, BM: tl.constexpr, BN: tl.constexpr):
    """Return which elements dropout keeps in the [BM, BN] tile at row i0 and column j0, which
    are multiples of 16.

    Counter (i', j' ^ shift), where x' = x // 16 * 8 + x % 8, gives two words: the first one for row
    i, the second one for row i + 8; the low half of a word for column j, the high half for column
    j + 8. One thread holds these four elements in a tensor-core accumulator, and in its transpose,
    so that no word moves between threads. The low 16 bits of the threshold are zero.
    """
    i = i0 // 2 + tl.arange(0, BM // 2)
    i = i[:, None].to(tl.uint32)
    j = (j0 // 2 + tl.arange(0, BN // 2))[None, :].to(tl.uint32)
    words = dropout_words(stream, i, j, BM, BN)
    return words >= threshold.to(tl.uint32, bitcast=True)


@triton.jit
def row_dropout_keep(seed, rows, o, threshold, BM: tl.constexpr, BLOCK: tl.constexpr):
    """Return which elements dropout keeps of rows [BM] and columns o .. o + BLOCK - 1. Word j % 4
    of counter (j // 4, low word of the row, high word of the row, 1) decides on column j.
    """
    j = (o // 4 + tl.arange(0, BLOCK // 4))[None, :].to(tl.uint32)
    low = rows[:, None].to(tl.uint32)
    high = (rows >> 32)[:, None].to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, j, low, high, low * 0 + 1, PHILOX_ROUNDS)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BM, BLOCK)
    return words >= threshold.to(tl.uint32, bitcast=True)


@triton.jit
def read_seed(SEED, DROPOUT: tl.constexpr):
    """Load the seed, an int64 [1], if there is dropout. Each kernel makes its own `Draw`, because a
    function of Triton 3.6 cannot return a named tuple that holds None.
    """
    if DROPOUT:
        return tl.load(SEED)
    else:
        return 0


@triton.jit
def drop_rows(x, rows, o, draw):
    """Apply dropout to a tile x [BM, BLOCK] of rows [BM] and columns o .. o + BLOCK - 1."""
    threshold, inv_keep = draw.dropout
    keep = row_dropout_keep(draw.seed, rows, o, threshold, x.shape[0], x.shape[1])
    return tl.where(keep, x * inv_keep, 0.0)


INTERPRETED = not isinstance(dropout_keep, JITFunction)


def dropout_arguments(p: float) -> Dropout:
    """Return `Dropout` for p, a multiple of 2^-16: the threshold p 2^32 as the int32 with its bits,
    below which a word drops its element, and the factor of the kept elements.

    At p = 1 the threshold does not fit into 32 bits, and the factor 0 drops everything.
    """
    threshold = min(round(p * 2**16) << 16, 2**32 - 1)
    signed = threshold - 2**32 if threshold >= 2**31 else threshold
    return Dropout(signed, 1 / (1 - p) if p < 1 else 0.0)
