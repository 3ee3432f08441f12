"""The random words of dropout: which elements a seed drops, the same on every device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.eager import eager, may_read

# Philox (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3") with 7 rounds:
# Philox2x32 draws the words of tiles (`dropped`), Philox4x32 those of rows (`dropped_rows`).
PHILOX_ROUNDS = 7
_WORD = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_CHUNK = 1 << 15  # counters processed at a time: their temporaries stay in the cache
_FEW = 1 << 14  # elements: for more, F.dropout takes longer than `dropout_factors`
_ROUND = 0xD256D193
_MIX_STEP, _MIX_A, _MIX_B = (
    x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
Words = Any  # 32-bit words: a Tensor of int64, an array of uint64, or an int


def philox4x32(
    c0: Words, c1: Words, c2: Words, c3: Words, seed: Words, rounds: int = PHILOX_ROUNDS
) -> tuple[Words, Words, Words, Words]:
    """Return four random 32-bit words for each counter: int64 tensors, or uint64 arrays of NumPy.

    The counters broadcast against each other, and keep their shapes until a round mixes them. A
    64-bit product wraps around, so its bits 32..63 are the high word of the unsigned product.
    `seed` is the 64-bit key, a tensor of one element, an int or an array that broadcasts.
    """
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(rounds):
        b, a = c2 * _ROUND_B, c0 * _ROUND_A
        c0, c2 = ((b >> 32) ^ (c1 ^ k0)) & _WORD, ((a >> 32) ^ (c3 ^ k1)) & _WORD
        c1, c3 = b, a
        k0, k1 = (k0 + _KEY_A) & _WORD, (k1 + _KEY_B) & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD


def philox2x32(
    c0: Words, c1: Words, key: Words, rounds: int = PHILOX_ROUNDS
) -> tuple[Words, Words]:
    """Return two random words for each counter (c0, c1) and 32-bit key, as `philox4x32` does."""
    for _ in range(rounds):
        product = c0 * _ROUND
        c0, c1 = ((product >> 32) ^ c1 ^ key) & _WORD, product & _WORD
        key = key + _KEY_A & _WORD
    return c0, c1


def splitmix(n: Any, seed: Words) -> tuple[Any, Any]:
    """Return the low and the high word of output n = 1, 2, .. of SplitMix64, started at the seed. n
    is an int64. Source: Steele et al. 2014, "Fast Splittable Pseudorandom Number Generators".
    """
    z = n * _MIX_STEP + seed
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * _MIX_A  # >> extends the sign: the mask clears it
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * _MIX_B
    z = z ^ (z >> 31 & (1 << 33) - 1)
    return z & _WORD, z >> 32 & _WORD


def dropout_threshold(p: float) -> int:
    """Return the smallest 16-bit word whose element is kept."""
    return round(p * 2**16)


def dropped(
    seed: Tensor, batch_heads: int, rows: int, columns: int, p: float, row: int = 0, column: int = 0
) -> Tensor:
    """Return a boolean [batch_heads, rows, columns], True where dropout removes an element.

    In attention, batch_head b * H + h is head h of sequence b.

    row, column: for a part of the matrix, its first row and column; multiples of 16.

    Element (batch_head, i, j) reads one of the four 16-bit words that Philox2x32 returns for the
    counter (i', j' ^ shift), where x' = x//16 * 8 + x % 8: the low (j//8 % 2 = 0) or the high half
    of word i//8 % 2. So one counter serves rows i, i+8 and columns j, j+8: the four elements that
    one thread holds in a tensor-core accumulator. Key and shift of a batch_head are the low and the
    high word of output batch_head + 1 of SplitMix64, started at the seed. The mask depends on
    (seed, batch_head, i, j) alone.
    """
    if may_read(seed):
        return _dropped(seed, batch_heads, rows, columns, p, row, column)
    # A single node in a graph: tracing the loops instead would recompile for each new size.
    return torch.ops.fastformer.dropped(seed, batch_heads, rows, columns, p, row, column)


def dropped_rows(seed: Tensor, rows: int, columns: int, p: float) -> Tensor:
    """Return a boolean [rows, columns], True where dropout removes an element of a matrix.

    Element (i, j) reads the high half of word j % 4 that Philox4x32 returns for the counter
    (j // 4, low word of i, high word of i, 1). This is the order in which a kernel that owns full
    rows holds them.
    """
    if may_read(seed):
        return _dropped_rows(seed, rows, columns, p)
    return torch.ops.fastformer.dropped_rows(seed, rows, columns, p)


def _dropped_rows(seed: Tensor, rows: int, columns: int, p: float) -> Tensor:
    """Return the masks of the seeds, one after the other; on a GPU there is one seed."""
    quarter, threshold = -(-columns // 4), dropout_threshold(p) << 16
    if seed.device.type == "cpu":
        mask = _dropped_rows_by_numpy(seed.numpy(), rows, quarter, threshold)
    else:
        mask = _dropped_rows_by_torch(seed, rows, quarter, threshold)
    return mask.view(seed.numel() * rows, quarter * 4)[:, :columns]


def _dropped_rows_by_numpy(
    seeds: npt.NDArray[np.int64], rows: int, quarter: int, threshold: int
) -> Tensor:
    n = len(seeds)
    mask = np.empty((n, rows, quarter, 4), np.bool_)
    j, keys = np.arange(quarter, dtype=np.uint64), seeds.view(np.uint64).reshape(-1, 1, 1)
    step = max(1, _CHUNK // max(1, n * quarter))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        i = np.arange(first, last, dtype=np.uint64).reshape(-1, 1)
        for k, word in enumerate(philox4x32(j, i & _WORD, i >> 32, 1, keys)):
            mask[:, first:last, :, k] = word < threshold
    return torch.from_numpy(mask)


def _dropped_rows_by_torch(seed: Tensor, rows: int, quarter: int, threshold: int) -> Tensor:
    i, j = (torch.arange(n, device=seed.device) for n in (rows, quarter))
    i = i.view(-1, 1)
    words = philox4x32(j, i & _WORD, i >> 32, 1, seed)
    return torch.stack([word < threshold for word in words], -1)


def _dropped(
    seed: Tensor, batch_heads: int, rows: int, columns: int, p: float, row: int = 0, column: int = 0
) -> Tensor:
    """Return the masks of the seeds, one after the other; on a GPU there is one seed."""
    sizes = batch_heads, rows, columns, dropout_threshold(p), row, column
    if seed.device.type == "cpu":
        return _dropped_by_numpy(seed.numpy(), *sizes)
    return _dropped_by_torch(seed, *sizes)


def _dropped_by_torch(
    seed: Tensor, BH: int, rows: int, columns: int, threshold: int, row: int = 0, column: int = 0
) -> Tensor:
    tiles_i, tiles_j = -(-rows // 16), -(-columns // 16)
    n, i, j = (torch.arange(n, device=seed.device) for n in (BH, tiles_i * 8, tiles_j * 8))
    i, j = i + row // 2, j + column // 2
    key, shift = splitmix(n.view(-1, 1, 1) + 1, seed)
    words = philox2x32(i.view(-1, 1), j ^ shift, key)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    mask = torch.stack([half < threshold for half in halves])
    mask = mask.view(2, 2, BH, tiles_i, 8, tiles_j, 8).permute(2, 3, 0, 4, 5, 1, 6)
    mask = mask.reshape(BH, tiles_i * 16, tiles_j * 16)
    return mask[:, :rows, :columns].contiguous()


def _dropped_by_numpy(
    seeds: npt.NDArray[np.int64],
    BH: int,
    rows: int,
    columns: int,
    threshold: int,
    row: int = 0,
    column: int = 0,
) -> Tensor:
    """Compute `dropped` on a CPU in half the time: a call of NumPy has less overhead."""
    tiles_i, tiles_j = -(-rows // 16), -(-columns // 16)
    mixed = splitmix(np.arange(1, BH + 1, dtype=np.int64), seeds[:, None])
    key, shift = (word.view(np.uint64).reshape(-1, 1, 1) for word in mixed)
    BH = len(key)  # of all seeds
    mask = np.empty((BH, tiles_i, 2, 8, tiles_j, 2), np.uint64)  # 8 booleans in each element
    halves, last = mask.transpose(2, 5, 0, 1, 3, 4), np.array(threshold - 1, np.int32)
    i, j = (
        np.arange(start // 2, start // 2 + tiles * 8, dtype=np.uint64)
        for start, tiles in ((row, tiles_i), (column, tiles_j))
    )
    c0, c1 = i.reshape(-1, 1), j ^ shift
    step_i = max(1, min(tiles_i, _CHUNK // max(1, tiles_j * 64)))
    step = max(1, _CHUNK // max(1, step_i * tiles_j * 64))
    for begin in range(0, BH, step):
        own = slice(begin, begin + step)
        for t in range(0, tiles_i, step_i):
            words = philox2x32(c0[t * 8 : (t + step_i) * 8], c1[own], key[own])
            for word, of_word in zip(words, halves):
                for k, target in enumerate(of_word[:, own, t : t + step_i]):
                    drop = (word.view(np.uint16)[..., k::4] <= last).view(np.uint64)
                    target[:] = drop.reshape(target.shape)
    elements = mask.view(np.bool_).reshape(BH, tiles_i * 16, tiles_j * 16)
    return torch.from_numpy(np.ascontiguousarray(elements[:, :rows, :columns]))


_library = torch.library.Library("fastformer", "FRAGMENT")


def _define(name: str, sizes: str, draw: Callable[..., Tensor], dims: int) -> None:
    """Register `draw` as an op, whose mask has the first `dims` of its sizes."""
    _library.define(f"{name}(Tensor seed, {sizes}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
    _library.impl(name, lambda *given: draw(*given).contiguous(), "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"fastformer::{name}",
        lambda seed, *given: seed.new_empty(given[:dims], dtype=torch.bool),
        lib=_library,
    )

    def of_examples(info: Any, dims: Any, seed: Tensor, *sizes: Any) -> tuple[Tensor, int]:
        op, seeds = getattr(torch.ops.fastformer, name), seed.movedim(dims[0], 0)
        seeds = seeds if len(seeds) else seeds.new_zeros(1, *seeds.shape[1:])
        return torch.stack([op(x, *sizes) for x in seeds.unbind(0)])[: info.batch_size], 0

    torch.library.register_vmap(f"fastformer::{name}", of_examples, lib=_library)


_MATRIX = "SymInt rows, SymInt columns, float p"
_define("dropped", f"SymInt batch_heads, {_MATRIX}, SymInt row=0, SymInt column=0", _dropped, 3)
_define("dropped_rows", _MATRIX, _dropped_rows, 2)


def without(drop: Tensor, x: Tensor) -> Tensor:
    """Return x, and 0 where `drop` removes an element, whatever it was."""
    # On a CPU a product takes a fifth of the time of masked_fill.
    if x.is_cpu and eager(x) and may_read(x):
        kept = x * drop.logical_not().view(torch.uint8).to(x.dtype).view(x.shape)
        if math.isfinite(kept.detach().sum()):  # no 0 * NaN
            return kept
    return x.masked_fill(drop.view(x.shape), 0.0)


def dropout_scale(p: float) -> float:
    return 1.0 / (1.0 - p) if p < 1 else 0.0


def dropout(x: Tensor, p: float) -> Tensor:
    """Return dropout(x) by a mask of torch's generator: for a call without a seed."""
    if not p:
        return x
    if x.numel() <= _FEW or x.dtype is not torch.float32 or not eager(x.detach()):
        return F.dropout(x, p)
    return x * dropout_factors(x, p)


def dropout_factors(x: Tensor, p: float) -> Tensor:
    """Return what dropout multiplies the elements of x with, by a mask of torch's generator.

    A number of 64 bits serves four elements. F.dropout takes one for each, and twice the time.
    """
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device)
    words = words.random_(-(2**63), None)
    kept = words.view(torch.int16)[: x.numel()] >= min(dropout_threshold(p), _WORD >> 16) - 2**15
    return kept.view(x.shape).to(x.dtype).mul_(dropout_scale(p))
