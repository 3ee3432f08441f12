"""Every op of `fastformer.ops.functional` in eager PyTorch, with the same names.

It is the path on a CPU, where it calls the fastest op of torch that computes the same, and the
oracle of the tests: in float64 each op is its written-out formula. `functional` has checked the
arguments; those of attention arrive as one description.

Shapes: B batch, H heads, Sq queries, Sk keys, D head dim; N features; M rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from fastformer.description import Attention, RowShard, beyond_torch, row_shard
from fastformer.eager import eager, formula, readable, written_out

# Philox (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3") with 7 rounds: 2x32
# draws the words of tiles, 4x32 those of rows.
PHILOX_ROUNDS = 7
_WORD = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_CHUNK = 1 << 15  # counters at a time: their temporaries stay in the cache
_FEW = 1 << 12  # counters: with fewer NumPy's calls cost more than what they compute
_FACTOR_A, _FACTOR_B = np.array(_ROUND_A, np.uint64), np.array(_ROUND_B, np.uint64)
_KEY_STEPS = np.array([[[n * _KEY_A], [n * _KEY_B]] for n in range(PHILOX_ROUNDS)], np.uint64)
_EIGHT = np.arange(8, dtype=np.uint64).reshape(8, 1)
_HALF, _LOW = np.array(32, np.uint64), np.array(_WORD, np.uint64)

_ROUND = 0xD256D193
_FACTOR = np.array(_ROUND, np.uint64)
_STEPS = _KEY_STEPS[:, :1, None]  # [rounds, 1, 1, 1]
_MIX_STEP, _MIX_A, _MIX_B = (
    x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)

_BLOCK = 1 << 19  # logits at a time, likewise

Words = Any  # 32-bit words: a Tensor of int64, an array of uint64, or an int

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


# ---------------------------------------------------------------------------------------- dropout


def philox4x32(
    c0: Words, c1: Words, c2: Words, c3: Words, seed: Tensor | int, rounds: int = PHILOX_ROUNDS
) -> tuple[Words, Words, Words, Words]:
    """Return four random 32-bit words for each counter: int64 tensors, or uint64 arrays of NumPy.

    The counters broadcast against each other, and keep their shapes until a round mixes them. A
    64-bit product wraps, so that its bits 32..63 are the high word of the unsigned product. `seed`
    is the 64-bit key, a tensor of one element or an int.
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
    """Return two random words for each counter (c0, c1) and key, likewise."""
    for _ in range(rounds):
        product = c0 * _ROUND
        c0, c1 = ((product >> 32) ^ c1 ^ key) & _WORD, product & _WORD
        key = key + _KEY_A & _WORD
    return c0, c1


def splitmix(n: Any, seed: Tensor | int) -> tuple[Any, Any]:
    """Return the low and the high word of output n = 1, 2, .. of SplitMix64 (Steele et al. 2014,
    "Fast Splittable Pseudorandom Number Generators") that starts at the seed, for int64 n.
    """
    z = n * _MIX_STEP + seed
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * _MIX_A  # >> copies the sign: the mask removes it
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * _MIX_B
    z = z ^ (z >> 31 & (1 << 33) - 1)
    return z & _WORD, z >> 32 & _WORD


def dropout_threshold(p: float) -> int:
    """Return the least 16-bit word whose element is kept."""
    return round(p * 2**16)


Place = Sequence[int]  # where a shard lies in the whole


def dropped(
    seed: Tensor, planes: int, rows: int, columns: int, p: float, place: Place | None = None
) -> Tensor:
    """Return a boolean [planes, rows, columns], True where dropout removes an element.

    place: of a shard, (first plane, planes of a sequence here, planes of one in the whole, first
        row, first column), the last two multiples of 16.

    Element (plane, i, j) reads one of the four words of 16 bits that Philox2x32 gives for the
    counter (i', j' ^ shift), where x' = x//16 * 8 + x % 8: the low (j//8 % 2 = 0) or the high half
    of word i//8 % 2. So one counter serves rows i, i+8 and columns j, j+8: the four elements that
    one thread holds in a tensor-core accumulator. Key and shift of a plane are the low and the high
    word of output number plane + 1 of SplitMix64, which starts at the seed. The mask is a pure
    function of (seed, plane, i, j).
    """
    if readable(seed):
        return _dropped(seed, planes, rows, columns, p, place)
    # One node of a graph for all sizes: with the loops, other sizes would compile again.
    return torch.ops.fastformer.dropped(seed, planes, rows, columns, p, place)


def dropped_rows(
    seed: Tensor, rows: int, columns: int, p: float, row: int = 0, column: int = 0
) -> Tensor:
    """Return a boolean [rows, columns], True where dropout removes an element of a matrix.

    Element (i, j) reads the high half of word j % 4 that Philox4x32 gives for the counter (j // 4,
    i's low word, its high word, 1), in the order in which a kernel that owns whole rows holds them.

    row, column: the first ones, of a part of the matrix; column is a multiple of 4.
    """
    if readable(seed):
        return _dropped_rows(seed, rows, columns, p, row, column)
    return torch.ops.fastformer.dropped_rows(seed, rows, columns, p, row, column)


def _dropped_rows(
    seed: Tensor, rows: int, columns: int, p: float, row: int = 0, column: int = 0
) -> Tensor:
    quarter, threshold = -(-columns // 4), dropout_threshold(p) << 16
    if seed.device.type == "cpu":
        mask = _dropped_rows_by_numpy(int(seed), rows, quarter, threshold, row, column // 4)
    else:
        mask = _dropped_rows_by_torch(seed, rows, quarter, threshold, row, column // 4)
    return mask.view(rows, quarter * 4)[:, :columns]


def _dropped_rows_by_numpy(
    seed: int, rows: int, quarter: int, threshold: int, row: int = 0, column: int = 0
) -> Tensor:
    mask = np.empty((rows, quarter, 4), np.bool_)
    words, limit = mask.transpose(2, 0, 1), np.array(threshold, np.uint64)
    j = np.arange(column, column + quarter, dtype=np.uint64)
    step = max(1, _CHUNK // max(1, quarter))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        i = np.arange(row + first, row + last, dtype=np.uint64).reshape(-1, 1)
        low, high = (i, 0) if row + last <= 1 << 32 else (i & _WORD, i >> 32)
        even, odd = _philox_by_numpy(j, low, high, 1, seed, (last - first, quarter))
        np.less(even, limit, out=words[0::2, first:last])
        np.less(odd, limit, out=words[1::2, first:last])
    return torch.from_numpy(mask)


def _dropped_rows_by_torch(
    seed: Tensor, rows: int, quarter: int, threshold: int, row: int = 0, column: int = 0
) -> Tensor:
    i, j = (torch.arange(n, device=seed.device) for n in (rows, quarter))
    i, j = row + i.view(-1, 1), column + j
    words = philox4x32(j, i & _WORD, i >> 32, 1, seed)
    return torch.stack([word < threshold for word in words], -1)


def _dropped(
    seed: Tensor, planes: int, rows: int, columns: int, p: float, place: Place | None = None
) -> Tensor:
    sizes = planes, rows, columns, dropout_threshold(p), place or _WHOLE
    if seed.device.type == "cpu":
        return _dropped_by_numpy(int(seed), *sizes)
    return _dropped_by_torch(seed, *sizes)


_WHOLE = 0, 1, 1, 0, 0


def _dropped_by_torch(
    seed: Tensor, planes: int, rows: int, columns: int, threshold: int, place: Place = _WHOLE
) -> Tensor:
    first, here, whole, row, column = place
    tiles_i, tiles_j = -(-rows // 16), -(-columns // 16)
    number, i, j = (torch.arange(n, device=seed.device) for n in (planes, tiles_i * 8, tiles_j * 8))
    number, i, j = first + number // here * whole + number % here, i + row // 2, j + column // 2
    key, shift = splitmix(number.view(-1, 1, 1) + 1, seed)
    words = philox2x32(i.view(-1, 1), j ^ shift, key)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    mask = torch.stack([half < threshold for half in halves])
    mask = mask.view(2, 2, planes, tiles_i, 8, tiles_j, 8).permute(2, 3, 0, 4, 5, 1, 6)
    mask = mask.reshape(planes, tiles_i * 16, tiles_j * 16)
    return mask[:, :rows, :columns].contiguous()


def _dropped_by_numpy(
    seed: int, planes: int, rows: int, columns: int, threshold: int, place: Place = _WHOLE
) -> Tensor:
    """Compute `dropped` on a CPU.

    It takes a half to a third of the time of `_dropped_by_torch`, whose calls cost more.
    """
    first, here, whole, row, column = place
    tiles_i, tiles_j = -(-rows // 16), -(-columns // 16)
    mask = np.empty((planes, tiles_i, 2, 8, tiles_j, 2), np.uint64)  # eight booleans in each
    words, last = mask.transpose(5, 2, 0, 1, 3, 4), np.array(threshold - 1, np.int32)
    numbers = np.arange(planes, dtype=np.int64).reshape(-1, 1, 1)
    if place is not _WHOLE:
        numbers = first + numbers // here * whole + numbers % here
    key, shift = (word.view(np.uint64) for word in splitmix(numbers + 1, seed))
    keys = key + _STEPS  # `_philox2x32_by_numpy` cuts them to 32 bits
    i, j = (
        np.arange(start // 2, start // 2 + tiles * 8, dtype=np.uint64)
        for start, tiles in ((row, tiles_i), (column, tiles_j))
    )
    c0, c1 = i.reshape(-1, 1), j ^ shift
    step_i = max(1, min(tiles_i, _CHUNK // max(1, tiles_j * 64)))
    step = max(1, _CHUNK // max(1, step_i * tiles_j * 64))
    for plane in range(0, planes, step):
        own = slice(plane, plane + step)
        for t in range(0, tiles_i, step_i):
            pair = _philox2x32_by_numpy(c0[t * 8 : (t + step_i) * 8], c1[own], keys[:, own])
            halves = pair.view(np.uint16)
            for column in range(2):
                drop = (halves[..., column::4] <= last).view(np.uint64)
                target = words[column, :, own, t : t + step_i]
                target[:] = drop.reshape(target.shape)
    elements = mask.view(np.bool_).reshape(planes, tiles_i * 16, tiles_j * 16)
    return torch.from_numpy(np.ascontiguousarray(elements[:, :rows, :columns]))


def _philox2x32_by_numpy(
    c0: npt.NDArray[np.uint64], c1: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Compute `philox2x32`, [2, planes, n, m], of counters c0 [n, 1] and c1 [planes, 1, m] in as
    few calls of NumPy as possible. The high words of the second half are not zero.
    """
    odd = c0 * _FACTOR
    words = np.empty((3, len(c1), len(c0), c1.shape[2]), np.uint64)
    even = np.bitwise_xor((odd >> _HALF) ^ keys[0], c1, out=words[1])
    for n in range(1, PHILOX_ROUNDS):
        product = words[0 if n % 2 else 2]  # the last one is words[2]
        np.multiply(even, _FACTOR, out=product)
        np.right_shift(product, _HALF, out=even)
        np.bitwise_xor(even, odd, out=even)
        np.bitwise_xor(even, keys[n], out=even)
        np.bitwise_and(even, _LOW, out=even)
        odd = product
    return words[1:]


def _philox_by_numpy(
    c0: Words, c1: Words, c2: Words, c3: Words, seed: int, shape: tuple[int, ...]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Compute `philox4x32` in pairs [2, *shape]: the first and third words, the second and fourth.

    The calls of NumPy cost most of the time where the counters are few. So one call serves both
    words of a pair, and its operands are contiguous or have no dimensions, which is fastest.
    """
    narrow = 0 if math.prod(shape) <= _FEW else 2  # until then not all counters are of full shape
    if narrow:
        c0, c1, c2, c3 = philox4x32(c0, c1, c2, c3, seed, narrow)
    pairs = np.empty((3, 2, *shape), np.uint64)
    pairs[0, 0], pairs[0, 1], pairs[1, 0], pairs[1, 1] = c0, c2, c1, c3
    even, odd, product = pairs.reshape(3, 2, -1)
    even_0, even_1 = even
    start = np.array([[seed & _WORD], [(seed >> 32) & _WORD]], np.uint64)
    keys = np.bitwise_and(start + _KEY_STEPS, _LOW)  # [rounds, 2, 1]
    if not narrow:
        keys = keys.repeat(even.shape[1], 2)
    for key in keys[narrow:]:
        np.multiply(even_0, _FACTOR_A, out=product[1])
        np.multiply(even_1, _FACTOR_B, out=product[0])
        np.bitwise_xor(odd, key, out=odd)
        np.right_shift(product, _HALF, out=even)
        np.bitwise_xor(even, odd, out=even)
        np.bitwise_and(even, _LOW, out=even)
        odd, product = product, odd
    np.bitwise_and(odd, _LOW, out=odd)
    return even.reshape(2, *shape), odd.reshape(2, *shape)


_library = torch.library.Library("fastformer", "FRAGMENT")
_library.define(
    "dropped(Tensor seed, SymInt planes, SymInt rows, SymInt columns, float p, "
    "SymInt[]? place=None) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl("dropped", _dropped, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fastformer::dropped",
    lambda seed, *sizes: seed.new_empty(sizes[:3], dtype=torch.bool),
    lib=_library,
)


_library.define(
    "dropped_rows(Tensor seed, SymInt rows, SymInt columns, float p, SymInt row=0, "
    "SymInt column=0) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl(
    "dropped_rows", lambda *args: _dropped_rows(*args).contiguous(), "CompositeExplicitAutograd"
)
torch.library.register_fake(
    "fastformer::dropped_rows",
    lambda seed, *sizes: seed.new_empty(sizes[:2], dtype=torch.bool),
    lib=_library,
)


def _dropped_hidden(
    seed: Tensor, rows: int, columns: int, p: float, row: int = 0, column: int = 0
) -> Tensor:
    """Return `dropped` of a feed-forward layer's hidden elements [rows, columns], of one plane."""
    return dropped(seed, 1, rows, columns, p, (0, 1, 1, row, column))[0]


def _of_runs(
    draw: Callable[..., Tensor],
    seed: Tensor | None,
    rows: int,
    columns: int,
    p: float,
    shard: Place | None,
) -> Tensor:
    """Return what `draw` draws for [rows, columns], or for a shard, run after run of its rows."""
    given = row_shard(shard)
    if given is None:
        return draw(seed, rows, columns, p)
    runs = range(0, max(1, rows), given.run)
    first = [given.row + n * given.sequence for n in range(len(runs))]
    sizes = [min(given.run, rows - start) for start in runs]
    return torch.cat([draw(seed, n, columns, p, i, given.column) for n, i in zip(sizes, first)])


def _dropout_scale(p: float) -> float:
    return 1.0 / (1.0 - p) if p < 1 else 0.0


# -------------------------------------------------------------------------------------- attention


# What is added to a score and lies below this leaves the key out: -inf, and the finfo.min of
# float32 and bfloat16, which in base 2 is no float32 any more.
MASKED_OUT = -2.3586574359122396e38


def _visible(
    key: Tensor, i: Tensor, shift: int | Tensor, attention: Attention
) -> tuple[Tensor | None, Tensor | None]:
    """Return (which query sees which key, which keys any query may see), None for all.

    Both are booleans that broadcast to [B, H, Sq, Sk]. i: the indices of the queries, [Sq, 1].
    shift: the distance by which the diagonal of the band is moved.
    """
    k_length = key.shape[-2]
    visible, keys = None, None
    bias, key_lengths = attention.bias, attention.key_lengths
    left, right = (-1, -1) if attention.window is None else attention.window
    if attention.is_causal:
        right = 0
    if key_lengths is not None or left >= 0 or right >= 0:
        j = torch.arange(k_length, device=key.device)
    if key_lengths is not None:
        first = 0 if attention.shard is None else attention.shard.key
        visible = keys = j < key_lengths.view(-1, 1, 1, 1) - first
    for mask in (attention.attn_mask, None if bias is None else _left_by(bias)):
        if mask is None:
            continue
        mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)
        if mask.shape[-2] == 1 and mask.shape[-1] == k_length:
            keys = mask if keys is None else keys & mask
        visible = mask if visible is None else visible & mask
    if right >= 0:
        inside = j <= i + (shift + right)
        visible = inside if visible is None else visible & inside
    if left >= 0:
        inside = j >= i + (shift - left)
        visible = inside if visible is None else visible & inside
    return visible, keys


# What a bias of each dtype holds at least where it masks out no key.
_LEAST = {
    dtype: max(MASKED_OUT, torch.finfo(dtype).min)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)
}


def _left_by(bias: Tensor) -> Tensor | None:
    """Return the keys that a bias does not mask out; None where these are known to be all."""
    bias, least = bias.detach() if bias.requires_grad else bias, _LEAST[bias.dtype]
    if readable(bias) and (bias.numel() == 0 or float(bias.min()) >= least):
        return None
    return ~(bias < least)  # NaN stays


def _shift(query: Tensor, key: Tensor, attention: Attention) -> int | Tensor:
    """Return the shift of the diagonal: 0, or the one that aligns last query and last key; and for
    a shard, by how much more its queries than its keys lie behind the first of the whole.
    """
    shard, queries, keys = attention.shard, query.shape[-2], key.shape[-2]
    moved = 0
    if shard is not None:
        moved, queries, keys = shard.query - shard.key, shard.queries, shard.keys
    if attention.causal_alignment == "top_left":
        return moved
    if attention.key_lengths is None:
        return keys - queries + moved
    return (attention.key_lengths.long() - queries + moved).view(-1, 1, 1, 1)


def _added(attention: Attention, i: Tensor, shift: int | Tensor, key: Tensor) -> Tensor | None:
    """Return the term bias - slope |i + shift - j| of the scores, or None."""
    bias, slopes = attention.bias, attention.alibi_slopes
    if slopes is None:
        return bias
    distance = (i + shift - torch.arange(key.shape[-2], device=key.device)).abs()
    slopes = slopes[..., None, None].to(
        torch.float64 if key.dtype == torch.float64 else torch.float32
    )
    alibi = slopes * -distance
    return alibi if bias is None else alibi + bias


def _score_terms(
    query: Tensor, key: Tensor, attention: Attention, others: list[str]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the two masks of `_visible` and the term of `_added`, each None where it changes
    nothing. others: of `beyond_torch`.
    """
    if not attention.is_causal and _NO_TERMS.issuperset(others):
        return None, None, None
    i = torch.arange(query.shape[2], device=query.device).view(-1, 1)
    shift = _shift(query, key, attention)
    return *_visible(key, i, shift, attention), _added(attention, i, shift, key)


def _finite(x: Tensor) -> bool:
    """Say whether x is known to be finite. A sum that overflows says no, as NaN and inf do."""
    return readable(x) and math.isfinite(x.detach().sum() if x.requires_grad else x.sum())


def _hidden(keys: Tensor | None, key: Tensor, value: Tensor) -> Tensor | None:
    """Return the rows that no query may see, [.., Sk, 1], where they may hold NaN: 0 times NaN is
    NaN.
    """
    if keys is None or (_finite(key) and _finite(value)):
        return None
    return ~keys.transpose(-2, -1)


def _grouped(key: Tensor, heads: int) -> Tensor:
    """Repeat the key-value heads [B, G, S, D], so that each query head has its own."""
    return key if key.shape[1] == heads else key.repeat_interleave(heads // key.shape[1], 1)


def _scores(
    query: Tensor,
    key: Tensor,
    attention: Attention,
    added: Tensor | None,
    visible: Tensor | None,
) -> Tensor:
    """Return the scores [B, H, Sq, Sk]: the lowest finite number where a key is masked out, and the
    sinks as a last column where there are any. They have the dtype of the query, or at least
    float32 where something is added.
    """
    softcap, sinks = attention.softcap, attention.sinks
    scores = (query * attention.scale) @ key.transpose(-2, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if added is not None or sinks is not None:
        scores = scores if scores.dtype == torch.float64 else scores.float()
    if added is not None:
        scores = scores + added
    if visible is not None:
        with torch.no_grad():  # a hidden weight is 0, and so is the gradient of its score
            scores.masked_fill_(~visible, torch.finfo(scores.dtype).min)
    if sinks is None:
        return scores
    column = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1)


def _log_sum_exp(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum over the last dimension, without gradient, and the log-sum beside it: they
    add up to logsumexp. Their gradient keeps its digits where that is large: the gradient of
    torch's op takes exp(score - result).
    """
    if scores.shape[-1] == 0:
        log_sum = scores.logsumexp(-1)
        return torch.zeros_like(log_sum), log_sum
    peak = scores.detach().amax(-1, keepdim=True)
    peak = peak.masked_fill(peak.isinf(), 0.0)
    return peak.squeeze(-1), (scores - peak).logsumexp(-1)


def _softmax(scores: Tensor, dtype: torch.dtype, sinks: Tensor | None) -> Tensor:
    """Return the weights of the keys, without the weight of a sink."""
    low = dtype in (torch.float16, torch.bfloat16)
    weights = scores.softmax(-1, dtype=torch.float32 if low else None).to(dtype)
    return weights if sinks is None else weights[..., :-1]


# Options that are no mask and no term of the scores: torch's op computes none of them.
_NO_TERMS = frozenset({"dropout_p", "softcap", "sinks"})


def _torch_computes(query: Tensor, value: Tensor, attention: Attention, others: list[str]) -> bool:
    """Return whether torch's own op, the fastest one on a CPU, computes the same, given masks and
    terms of the scores. others: of `beyond_torch`.
    """
    if not query.is_cpu or query.dtype is torch.float64 or formula.always:
        return False
    if not _NO_TERMS.isdisjoint(others):
        return False
    if attention.is_causal and not attention.scale > 0.0:  # torch masks out before it multiplies
        return False
    if forward_ad._current_level >= 0 and not torch.compiler.is_compiling():
        return False
    return query.numel() > 0 and value.numel() > 0


def _is_causal_as_torch(attention: Attention) -> bool:
    """Return whether causality, if there is any, counts from the top left of these scores."""
    if not attention.is_causal:
        return True
    return attention.shard is None and attention.causal_alignment == "top_left"


def _by_torch(
    query: Tensor, key: Tensor, value: Tensor, attention: Attention, others: list[str]
) -> Tensor | None:
    """Call torch's op with causality alone, a mask alone or a bias alone; return None for any other
    description, and where key, value or result need more preparation.
    """
    is_causal, scale = attention.is_causal, attention.scale
    if not others:
        if not _is_causal_as_torch(attention):
            return None
        return _plain(query, key, value, is_causal, scale)
    if len(others) > 1 or is_causal or not eager(query):
        return None
    mask, bias = attention.attn_mask, attention.bias
    if mask is not None:
        return _masked_attention(query, key, value, mask, scale)
    return None if bias is None else _biased_attention(query, key, value, bias, scale)


def _plain(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> Tensor | None:
    """Call torch's op without a mask of ours; return None where it would spread a NaN.

    In a row shorter than a vector that op drops NaN from the maximum, but not under a mask. So such
    rows get a mask that changes nothing.
    """
    rows, columns = query.shape[2], key.shape[2]
    exported = torch.compiler.is_exporting()  # a comparison would bound the sizes of the program
    if not exported and columns >= 16 and not (is_causal and rows < 16):
        return F.scaled_dot_product_attention(query, key, value, None, 0.0, is_causal, scale=scale)
    if eager(query):
        mask = _short_mask(rows, columns, is_causal, query.dtype)
        out = F.scaled_dot_product_attention(query, key, value, mask, 0.0, scale=scale)
        return None if is_causal and not _finite(out) else out
    if is_causal and not exported:
        return None
    mask = query.new_zeros(()).expand(rows, columns)
    if is_causal:
        mask = torch.ones_like(mask, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(query, key, value, mask, 0.0, scale=scale)


_short_masks: dict[tuple[int, int, bool, torch.dtype], Tensor] = {}


def _short_mask(rows: int, columns: int, is_causal: bool, dtype: torch.dtype) -> Tensor:
    """Return a mask [rows, columns] to add to scores: -inf where causality masks out, else 0."""
    key = rows, columns, is_causal, dtype
    mask = _short_masks.get(key)
    if mask is not None:
        return mask
    with torch.inference_mode(False):
        mask = torch.zeros((), dtype=dtype, device="cpu").expand(rows, columns)
        if is_causal:
            mask = torch.full_like(mask, float("-inf"), device="cpu").triu_(1)
    if rows * columns <= 1 << 14 and eager(mask):
        if len(_short_masks) >= 256:
            _short_masks.clear()
        _short_masks[key] = mask
    return mask


def _holds_nan(x: Tensor) -> bool:
    """Say whether an eager tensor on the CPU, not an empty one, holds NaN, or -inf: in one pass."""
    return not float(x.detach().min() if x.requires_grad else x.min()) > float("-inf")


def _masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> Tensor | None:
    """Call torch's op with a mask, boolean or of -inf; return None where the result holds NaN.

    A result without NaN is right: a query that sees no key has zeros there, and no key that is
    masked out for all has a share in it, whatever it holds.
    """
    if mask.dim() < 2:
        mask = mask.view(1, -1)
    out = F.scaled_dot_product_attention(query, key, value, mask, 0.0, scale=scale)
    if out.requires_grad and mask.shape[-2] == 1 and not (_finite(key) and _finite(value)):
        return None  # the gradients would not be finite
    return None if _holds_nan(out) else out


def _biased_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float
) -> Tensor | None:
    """Call torch's op with a bias; return None where it masks out all keys of a query, and where
    the gradient of torch's op would keep too few digits.
    """
    if not readable(bias) or (_differentiates(query, key, value, bias) and not _near_zero(bias)):
        return None
    terms, least = bias.detach() if bias.requires_grad else bias, _LEAST[bias.dtype]
    if float(terms.min()) >= least:
        mask = bias if bias.dim() > 1 else bias.view(1, -1)  # torch's op takes no fewer
        return F.scaled_dot_product_attention(query, key, value, mask, 0.0, scale=scale)
    if float(terms.amax(-1).min()) >= least:  # each query sees a key
        return _masked_attention(query, key, value, bias, scale)
    return None


def _near_zero(added: Tensor) -> bool:
    """Say whether each row is known to add nothing large to some key, or to mask out all keys.

    The gradient of torch's op keeps lse alone, which a large term leaves no digits.
    """
    if not readable(added):
        return False
    peak = added.detach().amax(-1)
    low, high = map(float, peak.aminmax())
    if low > -1e3 and high < 1e3:
        return True
    return bool(((peak.abs() < 1e3) | (peak == float("-inf"))).all())


def _differentiates(*tensors: Tensor | None) -> bool:
    for x in tensors:  # a generator would take twice the time
        if x is not None and x.requires_grad:
            return torch.is_grad_enabled()
    return False


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention: Attention,
    return_lse: bool = False,
    apart: bool = False,  # return lse as the two terms of `_log_sum_exp`
) -> Any:
    heads = query.shape[1]
    if key.shape[1] != heads:
        key, value = _grouped(key, heads), _grouped(value, heads)
    others = beyond_torch(attention)
    fast = not return_lse and _torch_computes(query, value, attention, others)
    out = _by_torch(query, key, value, attention, others) if fast else None
    if out is not None:
        return out
    if not others and _is_causal_as_torch(attention):  # without a result the formula computes it
        fast = False
    visible, keys, added = _score_terms(query, key, attention, others)
    hidden = _hidden(keys, key, value)
    if hidden is not None:
        key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
    mask = visible
    if fast and added is not None:
        mask = added if visible is None else added.masked_fill(~visible, float("-inf"))
        mask = torch.atleast_2d(mask)
        fast = not _differentiates(query, key, value, attention.bias) or _near_zero(mask)
    if fast:
        scale = attention.scale
        out = F.scaled_dot_product_attention(query, key, value, mask, 0.0, scale=scale)
    else:
        scores = _scores(query, key, attention, added, visible)
        out = _weighted(scores, value, attention)
    empty = None if visible is None else ~visible.any(-1, keepdim=True)
    if empty is not None and (not readable(empty) or empty.any()):
        out = out.masked_fill(empty, 0.0)
    if not return_lse:
        return out
    scores = scores if query.dtype == torch.float64 else scores.float()
    peak, log_sum = _log_sum_exp(scores)
    if empty is not None:  # such a row has its sink alone
        sinks = attention.sinks
        nothing = float("-inf") if sinks is None else sinks.view(-1, 1) - peak
        log_sum = torch.where(empty.squeeze(-1), nothing, log_sum)
    return (out, peak, log_sum) if apart else (out, peak + log_sum)


def _weighted(scores: Tensor, value: Tensor, attention: Attention) -> Tensor:
    """Return dropout(softmax(scores)) value, [B, H, Sq, Dv] in the dtype of the value."""
    weights = _softmax(scores, value.dtype, attention.sinks)
    drop = _dropped_weights(weights, attention)
    if drop is None:
        return weights @ value
    return weights.masked_fill(drop, 0.0) @ value * _dropout_scale(attention.dropout_p)


def _dropped_weights(weights: Tensor, attention: Attention) -> Tensor | None:
    """Return which of the weights [B, H, Sq, Sk] dropout removes, None for none."""
    if attention.dropout_p == 0:
        return None
    assert attention.dropout_seed is not None
    batch, heads, rows, columns = weights.shape
    place, shard = None, attention.shard
    if shard is not None:
        first = shard.batch * shard.heads + shard.head
        place = first, heads, shard.heads, shard.query, shard.key
    drop = dropped(attention.dropout_seed, batch * heads, rows, columns, attention.dropout_p, place)
    return drop.view(weights.shape)


def attention_gradients(
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    attention: Attention,
    outputs: Sequence[Tensor],
) -> list[Tensor | None]:
    """Return the gradients of query, key, value, bias and sinks, of a part of the keys, given the
    outputs for all keys: output, lse, and [.., 2], the maximum of the scores and minus the log-sum
    beside it, or -inf for a row that sees nothing. With the scores S of the part, of which dropout
    leaves Z,

        P = exp(S - lse)   dV = (Z P)^T dO   dS = P (Z dO V^T - delta)   delta = dO . O - dlse
    """
    grad, grad_lse = grads
    (query, key, value), (output, lse, statistics) = inputs, outputs
    given = query, key, value, attention.bias, attention.sinks
    leaves = [None if x is None else x.detach().requires_grad_() for x in given]
    with torch.enable_grad():
        q, k, v, bias, sinks = leaves
        assert q is not None and k is not None and v is not None
        heads = q.shape[1]
        described = attention._replace(bias=bias, sinks=sinks)
        visible, keys, added = _score_terms(q, k, described, beyond_torch(described))
        values, hidden = _grouped(v, heads), _hidden(keys, key, value)
        if hidden is not None:
            k, values = _grouped(k, heads).masked_fill(hidden, 0.0), values.masked_fill(hidden, 0.0)
        scores = _scores(q, _grouped(k, heads), described, added, visible)
    here = scores.detach().to(lse.dtype)
    peak, offset = statistics.unsqueeze(-2).unbind(-1)
    weights = (here - peak + offset).exp()
    kept = weights[..., : key.shape[2]].to(value.dtype)  # without the sink
    moved = grad @ values.detach().mT
    drop = _dropped_weights(kept, attention)
    if drop is not None:
        scale = _dropout_scale(attention.dropout_p)
        kept, moved = (x.masked_fill(drop, 0.0) * scale for x in (kept, moved))
    delta = (grad.to(lse.dtype) * output.to(lse.dtype)).sum(-1) - grad_lse
    moved = F.pad(moved.to(lse.dtype), (0, weights.shape[-1] - key.shape[2])) - delta.unsqueeze(-1)
    wanted = [x for x in leaves if x is not None]
    found = (weights * moved).to(scores.dtype), kept.mT @ grad
    results = iter(torch.autograd.grad((scores, values), wanted, found))
    return [None if x is None else next(results) for x in leaves]


def packed_attention(query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> Tensor:
    cu_seqlens_q, cu_seqlens_k = attention.cu_seqlens_q, attention.cu_seqlens_k
    assert cu_seqlens_q is not None and cu_seqlens_k is not None
    max_q, max_k = attention.max_q, attention.max_k
    rows, columns = (_places(cu, x) for cu, x in ((cu_seqlens_q, query), (cu_seqlens_k, key)))
    queries, keys = _lengths(cu_seqlens_q), _lengths(cu_seqlens_k)
    batch = queries.shape[0]
    q, k, v = (
        x.new_zeros(batch, length, *x.shape[1:]).index_put(at, x).transpose(1, 2)
        for x, at, length in ((query, rows, max_q), (key, columns, max_k), (value, columns, max_k))
    )
    mask = None
    if attention.is_causal or attention.window is not None:  # a diagonal for each sequence
        shift: int | Tensor = 0
        if attention.causal_alignment == "bottom_right":
            shift = (keys - queries).long().view(-1, 1, 1, 1)
        i = torch.arange(max_q, device=query.device).view(-1, 1)
        mask, _ = _visible(k, i, shift, attention)
    shard = attention.shard
    if shard is not None:  # of whole sequences
        shard = shard._replace(queries=max_q, keys=max_k)
    attention = attention._replace(shard=shard)
    padded = attention._replace(attn_mask=mask, is_causal=False, window=None, key_lengths=keys)
    out = scaled_dot_product_attention(q, k, v, padded)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)[rows]


def _lengths(cu_seqlens: Tensor) -> Tensor:
    """Return the tokens of each sequence, [B].

    An exported program gets one more sequence, an empty one: torch would take a tensor with one
    element less than cu_seqlens as a sign that B is at least 2.
    """
    if torch.compiler.is_exporting():
        return (cu_seqlens.roll(-1) - cu_seqlens).clamp(min=0)
    return cu_seqlens.diff()


def _places(cu_seqlens: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sequence, position in it) of each token of a packed x [tokens, ..]."""
    tokens = torch.arange(x.shape[0], dtype=cu_seqlens.dtype, device=x.device)
    b = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    return b, (tokens - cu_seqlens[b]).long()


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    attention: Attention,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    places = block_table.clamp(0, key_pages.shape[0] - 1).long()
    key, value = (x[places].flatten(1, 2).transpose(1, 2) for x in (key_pages, value_pages))
    return scaled_dot_product_attention(query, key, value, attention, return_lse)


def attention_weights(
    query: Tensor,
    key: Tensor,
    attention: Attention,
    rows: slice | Tensor | None = None,
    heads: slice | Tensor | None = None,
) -> Tensor:
    shift = _shift(query, key, attention)
    every_i = torch.arange(query.shape[2], device=query.device)
    every_h = torch.arange(query.shape[1], device=query.device)
    i = every_i if rows is None else every_i[rows]
    h = every_h if heads is None else every_h[heads]
    key = key[:, h // max(1, query.shape[1] // max(1, key.shape[1]))]
    query = query[:, h][:, :, i]
    slopes, sinks = attention.alibi_slopes, attention.sinks
    attention = attention._replace(
        attn_mask=_chosen(attention.attn_mask, h, i),
        bias=_chosen(attention.bias, h, i),
        alibi_slopes=None if slopes is None else slopes[..., h],
        sinks=None if sinks is None else sinks[h],
    )
    i = i.view(-1, 1)
    visible, keys = _visible(key, i, shift, attention)
    if keys is not None and not _finite(key):
        key = key.masked_fill(~keys.transpose(-2, -1), 0.0)
    scores = _scores(query, key, attention, _added(attention, i, shift, key), visible)
    weights = _softmax(scores, query.dtype, attention.sinks)
    return weights if visible is None else weights.masked_fill(~visible, 0.0)


def _chosen(x: Tensor | None, heads: Tensor, rows: Tensor) -> Tensor | None:
    """Select heads and rows of a mask or bias that broadcasts to [B, H, Sq, Sk]."""
    if x is None:
        return None
    x = x.view((1,) * (4 - x.dim()) + x.shape)
    x = x if x.shape[1] == 1 else x[:, heads]
    return x if x.shape[2] == 1 else x[:, :, rows]


# -------------------------------------------------------------------------------------- LayerNorm


def layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    unbiased: bool = False,
) -> Tensor:
    mixed = any(t is not None and t.dtype != input.dtype for t in (weight, bias))
    if not unbiased and not mixed and input.dtype != torch.float64:
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    x = input if input.dtype == torch.float64 else input.float()
    features = tuple(range(-len(normalized_shape), 0))
    if unbiased:  # std, not the root of var: its gradient is finite where a row is constant
        std, mean = torch.std_mean(x, features, correction=1, keepdim=True)
        y = (x - mean) / (std + eps)
    else:
        variance, mean = torch.var_mean(x, features, correction=0, keepdim=True)
        y = (x - mean) * (variance + eps).rsqrt()
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(input.dtype)


def rms_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    mixed = weight is not None and weight.dtype != input.dtype
    if not mixed and input.dtype != torch.float64 and not formula.always:
        return F.rms_norm(input, normalized_shape, weight, eps)
    x = input if input.dtype == torch.float64 else input.float()
    features = tuple(range(-len(normalized_shape), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    y = x * (x.square().mean(features, keepdim=True) + eps).rsqrt()
    return (y if weight is None else y * weight).to(input.dtype)


def dropout_add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float = 0.0,
    eps: float = 1e-5,
    *,
    unbiased: bool = False,
    dropout_seed: Tensor | None = None,
    shard: RowShard | None = None,
) -> tuple[Tensor, Tensor]:
    total = _dropout_add(input, residual, list(weight.shape), dropout_p, dropout_seed, shard)
    return layer_norm(total, list(weight.shape), weight, bias, eps, unbiased=unbiased), total


def dropout_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    dropout_p: float = 0.0,
    eps: float | None = None,
    *,
    dropout_seed: Tensor | None = None,
    shard: RowShard | None = None,
) -> tuple[Tensor, Tensor]:
    total = _dropout_add(input, residual, list(weight.shape), dropout_p, dropout_seed, shard)
    return rms_norm(total, list(weight.shape), weight, eps), total


def _dropout_add(
    input: Tensor,
    residual: Tensor,
    shape: list[int],
    p: float,
    seed: Tensor | None,
    shard: RowShard | None,
) -> Tensor:
    """Return residual + dropout(input), for rows of a shape."""
    return torch.add(residual, _masked(input, shape, p, seed, shard), alpha=_dropout_scale(p))


def _masked(
    x: Tensor, shape: list[int], p: float, seed: Tensor | None, shard: RowShard | None
) -> Tensor:
    """Return x [.., *shape] with zeros where dropout by rows removes an element."""
    if p == 0:
        return x
    assert seed is not None
    columns = math.prod(shape)
    rows = x.numel() // columns if columns else 0
    drop = _of_runs(dropped_rows, seed, rows, columns, p, shard)
    return x.masked_fill(drop.view(x.shape), 0.0)


def dropout_add_layer_norm_backward(
    grad_normalized: Tensor,
    grad_residual_out: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    eps: float,
    unbiased: bool,
    dropout_seed: Tensor | None,
    shard: RowShard | None,
    residual_out: Tensor,
    mean: Tensor,
    reciprocal: Tensor,
    needs: list[bool],
) -> list[Tensor | None]:
    """Return differentiable gradients of (input, residual, weight, bias, seed).

    residual_out counts as an input of its own: its gradient is that through the norm and its own.
    """
    shape = list(weight.shape)

    def norm(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return layer_norm(x, shape, w, b, eps, unbiased=unbiased)

    given = [residual_out, weight] if bias is None else [residual_out, weight, bias]
    grad, *rest = _through_norm(norm, given, grad_normalized, grad_residual_out)
    kept = _masked(grad, shape, dropout_p, dropout_seed, shard)
    kept = kept * _dropout_scale(dropout_p)
    grads = [kept, grad, *rest, None]
    return [g if need else None for g, need in zip(grads, needs)]


def dropout_add_rms_norm_backward(
    grad_normalized: Tensor,
    grad_residual_out: Tensor | None,
    weight: Tensor,
    dropout_p: float,
    eps: float,
    dropout_seed: Tensor | None,
    shard: RowShard | None,
    residual_out: Tensor,
    reciprocal: Tensor,
    needs: list[bool],
) -> list[Tensor | None]:
    """Return differentiable gradients of (input, residual, weight), as that of LayerNorm does."""
    shape = list(weight.shape)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return rms_norm(x, shape, w, eps)

    given = [residual_out, weight]
    grad, *rest = _through_norm(norm, given, grad_normalized, grad_residual_out)
    kept = _masked(grad, shape, dropout_p, dropout_seed, shard)
    kept = kept * _dropout_scale(dropout_p)
    return [g if need else None for g, need in zip([kept, grad, *rest], needs)]


def _through_norm(
    norm: Callable[..., Tensor],
    given: list[Tensor],
    grad_normalized: Tensor,
    grad_sum: Tensor | None,
) -> list[Tensor]:
    """Return differentiable gradients of what a norm is given, the sum and its parameters."""
    given = [x.view_as(x) for x in given]
    with written_out():
        normalized = norm(*given)
    grad, *rest = torch.autograd.grad(normalized, given, grad_normalized, create_graph=True)
    return [grad if grad_sum is None else grad + grad_sum, *rest]


# ----------------------------------------------------------------------------------- feed-forward


def feed_forward(
    input: Tensor,
    w_1: Tensor,
    b_1: Tensor | None,
    w_2: Tensor,
    b_2: Tensor | None,
    activation: str = "relu",
    dropout_p: float = 0.0,
    *,
    dropout_seed: Tensor | None = None,
    shard: RowShard | None = None,
) -> Tensor:
    if dropout_p == 0:
        return F.linear(ACTIVATIONS[activation](F.linear(input, w_1, b_1)), w_2, b_2)
    assert dropout_seed is not None
    rows = math.prod(input.shape[:-1])  # numel() would be a constant of an exported program
    hidden = F.linear(input.reshape(rows, input.shape[-1]), w_1, b_1)
    drop = _of_runs(_dropped_hidden, dropout_seed, rows, w_1.shape[0], dropout_p, shard)
    if (
        activation == "relu"
    ):  # dropout goes first: relu's gradient is 0 there, without a second mask
        with torch.no_grad():
            hidden.masked_fill_(drop, 0.0)
        hidden = hidden.relu_()
    else:
        hidden = ACTIVATIONS[activation](hidden).masked_fill(drop, 0.0)
    out = hidden @ w_2.t()
    kept = _dropout_scale(dropout_p)  # the factor costs least here: d_out is smaller than d_ff
    out = out * kept if b_2 is None else torch.add(b_2, out, alpha=kept)
    return out.view(*input.shape[:-1], w_2.shape[0])


def _gated(
    activation: str,
    input: Tensor,
    w: Tensor,
    b: Tensor | None,
    w_2: Tensor,
    b_2: Tensor | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
    shard: RowShard | None,
) -> Tensor:
    z, v = F.linear(input, w, b).chunk(2, -1)
    hidden = ACTIVATIONS[activation](z) * v
    if dropout_p > 0:
        assert dropout_seed is not None
        rows, width = math.prod(input.shape[:-1]), w_2.shape[1]
        drop = _of_runs(_dropped_hidden, dropout_seed, rows, width, dropout_p, shard)
        hidden = hidden.masked_fill(drop.view(hidden.shape), 0.0) * _dropout_scale(dropout_p)
    return F.linear(hidden, w_2, b_2)


def geglu(
    input: Tensor,
    w: Tensor,
    b: Tensor | None,
    w_2: Tensor,
    b_2: Tensor | None,
    dropout_p: float = 0.0,
    *,
    dropout_seed: Tensor | None = None,
    shard: RowShard | None = None,
) -> Tensor:
    return _gated("gelu", input, w, b, w_2, b_2, dropout_p, dropout_seed, shard)


def swiglu(
    input: Tensor,
    w: Tensor,
    b: Tensor | None,
    w_2: Tensor,
    b_2: Tensor | None,
    dropout_p: float = 0.0,
    *,
    dropout_seed: Tensor | None = None,
    shard: RowShard | None = None,
) -> Tensor:
    return _gated("silu", input, w, b, w_2, b_2, dropout_p, dropout_seed, shard)


# -------------------------------------------------------------------------------------- embedding


def embed(
    tokens: Tensor,
    weight: Tensor,
    positional: Tensor | None,
    dropout_p: float = 0.0,
    *,
    scale: float | None = None,
    padding_idx: int | None = None,
    dropout_seed: Tensor | None = None,
    shard: RowShard | None = None,
) -> Tensor:
    scale = weight.shape[1] ** 0.5 if scale is None else scale
    out = F.embedding(tokens.long(), weight, padding_idx) * scale
    if positional is not None:
        out = out + positional[: tokens.shape[-1]].to(out.dtype)
    if dropout_p == 0:
        return out
    kept = _masked(out, [weight.shape[1]], dropout_p, dropout_seed, shard)
    return kept * _dropout_scale(dropout_p)


# ------------------------------------------------------------------------------------------- loss


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing: str = "uniform",
) -> Tensor:
    v = logits.shape[-1]
    x, flat = logits.reshape(-1, v), target.reshape(-1)
    x = x if x.dtype == torch.float64 else x.float()
    if smoothing == "uniform":
        loss = F.cross_entropy(x, flat, None, None, ignore_index, None, reduction, label_smoothing)
        return loss.view(target.shape) if reduction == "none" else loss
    logp = x.log_softmax(-1)
    off, on = label_smoothing / (v - 2), 1 - label_smoothing
    kept = flat != ignore_index
    constant = sum(n * p * math.log(p) for n, p in ((1, on), (v - 2, off)) if p > 0)
    true = logp.gather(1, flat.unsqueeze(1)).squeeze(1)
    rows = constant - on * true
    if off > 0:
        others = logp[:, :ignore_index].sum(1) + logp[:, ignore_index + 1 :].sum(1) - true
        rows = rows - off * others
    return _reduced(
        torch.where(kept, rows, 0.0).view(target.shape), target, reduction, ignore_index
    )


def _reduced(rows: Tensor, target: Tensor, reduction: str, ignore_index: int) -> Tensor:
    if reduction != "mean":
        return rows if reduction == "none" else rows.sum()
    count = (target != ignore_index).sum()
    # nan where every target is ignored, without a gradient, as in torch
    return torch.where(count > 0, rows.sum() / count.clamp(min=1), float("nan"))


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing: str = "uniform",
) -> Tensor:
    tensors = input, linear_weight, linear_bias
    labels = ignore_index, label_smoothing, smoothing
    if _saves_passes(*tensors):
        rows = _LinearLoss.apply(*tensors, target, *labels)
        return _reduced(rows, target, reduction, ignore_index)
    return cross_entropy(F.linear(*tensors), target, reduction, *labels)


def _saves_passes(*tensors: Tensor | None) -> bool:
    """Say whether `_LinearLoss` takes these: eager float32 on a CPU, to be differentiated."""
    given = [x for x in tensors if x is not None]
    if not all(x.dtype == torch.float32 and readable(x.detach()) for x in given):
        return False
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    return wanted and not formula.always and forward_ad._current_level < 0


class _LinearLoss(torch.autograd.Function):
    """linear_cross_entropy of each row. The forward writes the gradient of the logits over them,
    some rows at a time, so that all passes over these rows stay in the cache:

        loss = constant - (on - off) log p_t - off sum_{c != pad} log p_c
        dx_c = p_c - (on - off) [c = t] - off [c != pad]
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        label_smoothing: float,
        smoothing: str,
    ) -> Tensor:
        v, pad = weight.shape[0], None
        off, on, constant = label_smoothing / v, 1 - label_smoothing + label_smoothing / v, 0.0
        if smoothing == "kl":
            pad, off, on = ignore_index, label_smoothing / (v - 2), 1 - label_smoothing
            constant = sum(n * q * math.log(q) for n, q in ((1, on), (v - 2, off)) if q > 0)
        logits = F.linear(input.reshape(target.numel(), input.shape[-1]), weight, bias)
        kept = target.reshape(-1, 1) != ignore_index
        true = target.reshape(-1, 1).where(kept, 0)
        loss = torch.empty_like(true, dtype=logits.dtype)
        step = max(1, _BLOCK // v)
        for x, t, k, rows in zip(*(y.split(step) for y in (logits, true, kept, loss))):
            logp = x.log_softmax(-1)
            torch.exp(logp, out=x)
            torch.mul(logp.gather(1, t), off - on, out=rows)
            x.scatter_add_(1, t, x.new_full((), off - on).expand(t.shape))
            if off > 0:
                if pad is not None:
                    logp[:, pad], x[:, pad] = 0.0, x[:, pad] + off
                rows.sub_(logp.sum(1, keepdim=True), alpha=off)
                x.sub_(off)
            rows.add_(constant).masked_fill_(~k, 0.0)
            x[~k.squeeze(1)] *= 0.0  # which leaves NaN, as in torch
        ctx.save_for_backward(input, weight, bias, target, logits)
        ctx.labels = ignore_index, label_smoothing, smoothing
        return loss.view(target.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, target, grad_logits = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            x, w = input.view_as(input), weight.view_as(weight)
            b = None if bias is None else bias.view_as(bias)
            with written_out():
                rows = linear_cross_entropy(x, w, target, b, "none", *ctx.labels)
            wanted = [x for x, need in zip((x, w, b), needs) if x is not None and need]
            results = iter(torch.autograd.grad(rows, wanted, grad, create_graph=True))
            return *(next(results) if need else None for need in needs), *[None] * 4
        g = grad.reshape(-1, 1)
        transposed = grad_logits.t()
        dx = (grad_logits @ weight * g).view(input.shape) if needs[0] else None
        x = input.reshape(target.numel(), input.shape[-1])
        dw = transposed @ (x * g) if needs[1] else None
        db = transposed @ g.squeeze(1) if needs[2] else None
        return dx, dw, db, None, None, None, None
