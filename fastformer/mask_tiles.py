"""Masks of attention that are kept in tiles: the tiles of which no key is seen are not stored, and
the kernels skip them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS, COLUMNS = 128, 64  # queries and keys of a tile
WORDS = ROWS * COLUMNS // 32  # of the elements of a tile, 32 in a word
UNSEEN, WHOLE = 0, 1  # the slots of the two tiles that every table of bits begins with
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Shape = tuple[int, int, int, int]  # [B, H, Sq, Sk]
Band = tuple[int | None, int | None]
Device = torch.device | str | None
_CHUNK = 1 << 22  # elements that `block_mask` computes at a time, if a row of tiles is not larger


class BlockMask:
    """Which keys each query sees, in tiles of 128 queries x 64 keys. `block_mask` makes it, and
    `attn_mask` takes it.

    Let R = ceil(Sq / 128) and C = ceil(Sk / 64) be the numbers of rows and of columns of tiles. In
    a whole tile, every query sees every key; keys past Sk are not seen, so that a tile which passes
    the end of the keys is never whole. Queries past Sq see what the last query sees.

    shape: (B, H, Sq, Sk); B and H are 1 if the mask is the same for all sequences or heads.
    spans: [B, H, R + C, 5] int32, contiguous in its last two dimensions. Entry t < R describes row
        t of tiles, for kernels that own queries; entry R + t describes column t, for those that own
        keys. The five numbers are

            run, run_tiles    the longest run of whole tiles: run .. run + run_tiles - 1
            begin             where the other tiles begin in `lists`
            whole, part       the numbers of whole tiles that are not in the run, and of tiles that
                              are partly seen

    lists: [3, N] int16. Of row t, lists[0, begin : begin + whole] are the indices of the whole
        tiles that are not in the run, in ascending order, and
        lists[0, begin + whole : begin + whole + part] those of the partly seen tiles, in ascending
        order. In a row they count columns of tiles, and in a column they count rows. lists[1] and
        lists[2] are the low and the high 16 bits of the slot of each tile in `bits`, which is 1 for
        a whole tile. N may be larger than the number of entries. They have 16 bits because Triton's
        pipeliner would copy a scalar of 32 bits through shared memory. Entries of `spans` may share
        parts of `lists`, in any order.
    bits: [slots, 256] int32, the elements of the different tiles: query i and key j of a tile are
        bit j % 32 of word 2 i + j // 32. Equal tiles share a slot, in rows and in columns. Slot 0
        has no bit set, and slot 1 has all of them set.

    band: (left, right) if query i sees exactly the keys i - left <= j <= i + right, None for a side
        without a bound: attention then takes `is_causal` or `window` instead of the tiles. None for
        other masks, and for those that are not known to be one.

    `mask & other` and `mask | other` combine masks of the same Sq and Sk; `mask[1:3]` selects
    sequences, and `mask[:, 0]` heads, both of which keep their dimensions; `mask == other` compares
    the elements. A mask can be pickled, and it is a node of torch's pytrees.
    """

    dtype, ndim = torch.bool, 4

    def __init__(
        self, shape: Shape, spans: Tensor, lists: Tensor, bits: Tensor, band: Band | None = None
    ) -> None:
        self.shape, self.spans, self.lists, self.bits = shape, spans, lists, bits
        self.band = band

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors of the mask: spans, lists and bits."""
        return self.spans, self.lists, self.bits

    @property
    def device(self) -> torch.device:
        return self.bits.device

    def dim(self) -> int:
        return 4

    @property
    def nbytes(self) -> int:
        """The bytes that the mask takes."""
        return sum(x.numel() * x.element_size() for x in self.tensors)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> BlockMask:
        """Return the mask on another device."""
        spans, lists, bits = (x.to(device, non_blocking=non_blocking) for x in self.tensors)
        return BlockMask(self.shape, spans, lists, bits, self.band)

    def slots(self) -> Tensor:
        """Return the slot in `bits` of every tile, [B, H, R, C] int32."""
        return tile_slots(self.spans, self.lists, *self.shape[2:])

    def dense(self, queries: slice = slice(None)) -> Tensor:
        """Return the mask as a boolean tensor [B, H, Sq, Sk], or its rows of some queries: a step
        of decoding at position t takes `dense(slice(t, t + 1))`.

        Raises ValueError for a slice with a step.
        """
        begin, end, step = queries.indices(self.shape[2])
        if step != 1:
            raise ValueError(f"queries is {queries}; expected consecutive ones")
        first = begin // ROWS
        slots = self.slots()[:, :, first : -(-end // ROWS)]
        rows = slice(begin - first * ROWS, max(begin, end) - first * ROWS)
        return tile_elements(self.bits, slots)[:, :, rows, : self.shape[3]]

    def __getitem__(self, index: Any) -> BlockMask:
        spans = self.spans
        for dim, x in enumerate(index if isinstance(index, tuple) else (index,)):
            size = self.shape[dim] if dim < 4 else 0
            if dim > 1:
                if not isinstance(x, slice) or x.indices(size) != (0, size, 1):
                    raise IndexError(f"index {x} of dimension {dim}; expected all of them")
                continue
            if isinstance(x, Integral):
                x = int(x)
                if not -size <= x < size:
                    raise IndexError(f"index {x} is out of range for dimension {dim} of {size}")
                x = slice(x % size, x % size + 1)
            spans = spans[x] if dim == 0 else spans[:, x]
        batch, heads = spans.shape[:2]
        return BlockMask((batch, heads, *self.shape[2:]), spans, self.lists, self.bits)

    def __and__(self, other: BlockMask) -> BlockMask:
        return _combined(torch.bitwise_and, self, other)

    def __or__(self, other: BlockMask) -> BlockMask:
        return _combined(torch.bitwise_or, self, other)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockMask):
            return NotImplemented
        if self.shape != other.shape or self.device != other.device:
            return False
        slots = torch.stack([self.slots().flatten(), other.slots().flatten()])
        mine, others = slots.unique(dim=1)  # the pairs of slots that occur
        return torch.equal(self.bits[mine], other.bits[others])

    __hash__ = None  # type: ignore[assignment]

    # Usual masks of S queries and S keys.

    @staticmethod
    def window(S: int, left: int | None, right: int | None, *, device: Device = None) -> BlockMask:
        """Query i sees the keys i - left <= j <= i + right; None is no bound."""
        _require_sizes(left=left, right=right)
        i = _indices(S, device)
        first = torch.zeros_like(i) if left is None else (i - left).clamp(min=0)
        end = torch.full_like(i, S) if right is None else (i + right + 1).clamp(max=S)
        mask = _between(first, end)
        mask.band = left, right
        return mask

    @staticmethod
    def causal(S: int, *, device: Device = None) -> BlockMask:
        """Query i sees the keys j <= i."""
        return BlockMask.window(S, None, 0, device=device)

    @staticmethod
    def prefix(S: int, length: int | Tensor, *, device: Device = None) -> BlockMask:
        """Query i sees the keys j <= i, and all of the first `length`: an int, or [B] integers."""
        lengths = torch.as_tensor(length, device=device).view(-1, 1)
        i = _indices(S, lengths.device)
        return _between(torch.zeros_like(i), torch.maximum(i + 1, lengths).clamp(max=S))

    @staticmethod
    def documents(ids: Tensor) -> BlockMask:
        """Query i sees the keys of its document. ids: [S] or [B, S], the document of each token;
        the tokens of a document are consecutive.
        """
        if ids.dim() not in (1, 2) or ids.is_floating_point():
            raise ValueError(f"ids has shape {list(ids.shape)}; expected integers [S] or [B, S]")
        ids = ids.view(1, -1) if ids.dim() == 1 else ids
        i, n = _indices(ids.shape[1], ids.device), ids.shape[1]
        changes = ids.diff() != 0
        first = torch.where(F.pad(changes, (1, 0), value=True), i, 0).cummax(1)[0]
        end = torch.where(F.pad(changes, (0, 1), value=True), i + 1, n).flip(1).cummin(1)[0].flip(1)
        return _between(first, end)

    @staticmethod
    def longformer(S: int, window: int, tokens: int, *, device: Device = None) -> BlockMask:
        """Query i sees the keys with |i - j| <= window; the first `tokens` see all keys, and all
        queries see them. Source: Beltagy et al. 2020, "Longformer", section 3.1.
        """
        _require_sizes(window=window, tokens=tokens)
        i = _indices(S, device)
        rows = _between(torch.zeros_like(i), torch.where(i < tokens, S, 0))
        columns = _between(torch.zeros_like(i), torch.full_like(i, min(tokens, S)))
        return BlockMask.window(S, window, window, device=device) | rows | columns

    @staticmethod
    def bigbird(
        S: int, window: int, tokens: int, blocks: int, seed: int = 0, *, device: Device = None
    ) -> BlockMask:
        """The mask of `longformer`, and for each 64 queries `blocks` random blocks of 64 keys.
        Source: Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences", section 2.
        """
        _require_sizes(S=S, blocks=blocks)
        n = -(-S // COLUMNS)
        drawn = torch.rand(n, n, generator=torch.Generator().manual_seed(seed))
        chosen = torch.zeros(n, n, dtype=torch.bool)
        chosen.scatter_(1, drawn.topk(min(blocks, n))[1], True)
        chosen = chosen.to(_indices(1, device).device)
        mod: MaskMod = lambda b, h, i, j: chosen[i // COLUMNS, j // COLUMNS]  # noqa: E731
        near = BlockMask.longformer(S, window, tokens, device=device)
        return near | block_mask(mod, Sq=S, Sk=S, device=device)

    @staticmethod
    def sinks(S: int, tokens: int, window: int, *, device: Device = None) -> BlockMask:
        """Query i sees the last `window` keys up to itself, and the first `tokens`. Source: Xiao et
        al. 2023, "Efficient Streaming Language Models with Attention Sinks", section 3.
        """
        _require_sizes(tokens=tokens, window=window)
        i = _indices(S, device)
        first = _between(torch.zeros_like(i), (i + 1).clamp(max=tokens))
        return BlockMask.window(S, max(0, window - 1), 0, device=device) | first

    @staticmethod
    def tree(parents: Tensor) -> BlockMask:
        """Token i sees itself and its ancestors. parents: [S], the parent of each token, which
        comes before it, or -1. Source: Miao et al. 2023, "SpecInfer", section 4.

        Raises ValueError for a parent that does not come before its token.
        """
        known = parents.tolist()
        if any(not -1 <= parent < i for i, parent in enumerate(known)):
            raise ValueError("parents holds a token that does not come before its child")
        sizes, enter, free = [1] * len(known), [0] * len(known), [0] * (len(known) + 1)
        for i in reversed(range(len(known))):
            if known[i] >= 0:
                sizes[known[i]] += sizes[i]
        for i, parent in enumerate(known):  # places in depth-first order; -1 is the last of `free`
            enter[i] = free[parent]
            free[parent] += sizes[i]
            free[i] = enter[i] + 1
        at, size = (torch.tensor(x, device=parents.device) for x in (enter, sizes))
        mod: MaskMod = lambda b, h, i, j: (at[j] <= at[i]) & (at[i] < at[j] + size[j])  # noqa: E731
        return block_mask(mod, Sq=len(known), Sk=len(known), device=parents.device)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TypeError(
            f"torch's {func.__name__} does not take a BlockMask; expected its dense(), or an op or "
            "layer of fastformer (sdpa_override replaces scaled_dot_product_attention)"
        )

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={n}" for name, n in zip(("B", "H", "Sq", "Sk"), self.shape))
        if self.spans.is_meta:
            return f"BlockMask({sizes})"
        slots = self.slots()
        whole, part = int((slots == WHOLE).sum()), int((slots > WHOLE).sum())
        share = (whole + part) / max(1, slots.numel())
        size = f"{self.nbytes / 1024:.1f} KiB"
        return (
            f"BlockMask({sizes}: {share:.1%} of {slots.numel()} tiles seen, {whole} whole and "
            f"{part} partly, of {len(self.bits) - 2} kinds, {size})"
        )


_FIELDS = [torch.utils._pytree.GetAttrKey(name) for name in ("spans", "lists", "bits")]
torch.utils._pytree.register_pytree_node(
    BlockMask,
    lambda mask: (list(mask.tensors), (mask.shape, mask.band)),
    lambda tensors, known: BlockMask(known[0], *tensors, known[1]),  # type: ignore[call-arg]
    serialized_type_name="fastformer.BlockMask",
    flatten_with_keys_fn=lambda mask: (list(zip(_FIELDS, mask.tensors)), (mask.shape, mask.band)),
)


# ------------------------------------------------------------------------------------ reading


def tile_slots(spans: Tensor, lists: Tensor, q_length: int, k_length: int) -> Tensor:
    """Return the slot of every tile, [B, H, R, C] int32, without reading a value on the host."""
    rows, columns = -(-q_length // ROWS), -(-k_length // COLUMNS)
    run, run_tiles, begin, whole, part = spans[:, :, :rows].unsqueeze(-1).unbind(-2)
    t = torch.arange(columns, dtype=torch.int32, device=spans.device)
    inside = (t >= run) & (t < run + run_tiles)
    slots = torch.where(inside, WHOLE, UNSEEN).to(torch.int32)
    if not lists.shape[1]:
        return slots
    place = (begin + t).clamp(max=lists.shape[1] - 1)
    index, low, high = lists[:, place].to(torch.int32).unbind(0)
    index = torch.where(t < whole + part, index, columns).long()  # past the end: to be dropped
    slots = F.pad(slots, (0, 1))
    return slots.scatter(-1, index, (low & 0xFFFF) | (high << 16))[..., :columns]


def tile_elements(bits: Tensor, slots: Tensor) -> Tensor:
    """Return the elements of tiles, a boolean [.., 128 R, 64 C], given their slots [.., R, C]."""
    powers = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    kinds = slots.numel() if slots.numel() < len(bits) else 0
    if kinds:  # fewer tiles than kinds
        bits, slots = bits[slots.flatten()], torch.arange(kinds, device=bits.device).view_as(slots)
    table = (bits.view(torch.uint8).unsqueeze(-1) & powers) != 0
    tiles = table.view(-1, ROWS, COLUMNS)[slots]  # [.., R, C, 128, 64]
    return tiles.transpose(-3, -2).flatten(-4, -3).flatten(-2)


def dense_mask(spans: Tensor, lists: Tensor, bits: Tensor, q_length: int, k_length: int) -> Tensor:
    """Return a boolean [B, H, Sq, Sk], without reading a value on the host."""
    slots = tile_slots(spans, lists, q_length, k_length)
    return tile_elements(bits, slots)[..., :q_length, :k_length]


# ------------------------------------------------------------------------------------ building


def as_device(device: torch.device | str | int) -> torch.device:
    """Return the device of a name; ValueError if there is none."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}; expected a device: {error}") from error


def block_mask(
    source: Any,
    B: int | None = None,
    H: int | None = None,
    Sq: int | None = None,
    Sk: int | None = None,
    *,
    device: Device = None,
) -> BlockMask:
    """Return a mask of attention in tiles of 128 queries x 64 keys, for `attn_mask`.

    It is built once, and serves all layers, forward and backward. Attention skips the tiles of
    which no query sees a key, and reads elements only of the tiles that are partly seen; equal
    tiles are stored once. Sq x Sk elements are never stored, unless they are given.

    Args:
        source: True keeps the key:
            - a boolean tensor that broadcasts to [B, H, Sq, Sk];
            - a function mask_mod(b, h, q_idx, kv_idx) of FlexAttention. It is called with integer
              tensors: b and h without dimensions, q_idx [rows, 1] and kv_idx [1, Sk], and returns a
              boolean that broadcasts to [rows, Sk];
            - a `torch.nn.attention.flex_attention.BlockMask`.
        B, H, Sq, Sk: the sizes. B and H are None or 1 if the mask is the same for all sequences or
            heads. Sq and Sk may be left out for a source that has them.
        device: of the mask; by default that of the source, or torch's default device.

    Returns:
        a `BlockMask`.

    Raises:
        ValueError: sizes that are missing, or that the source does not have; more than 2^15 tiles
            in a row or a column.
        TypeError: another source; elements that are not boolean.

    Source: Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized
    Attention Kernels", section 4 (block masks).
    """
    sizes = [B, H, Sq, Sk]
    _require_sizes(B=B, H=H, Sq=Sq, Sk=Sk)
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if isinstance(source, Tensor):
        if source.dtype != torch.bool:
            raise TypeError(f"source has dtype {source.dtype}; expected torch.bool")
        if source.is_meta or source.layout != torch.strided:
            raise ValueError("source has no values, or is sparse; expected a dense tensor")
        source = source.detach()
        shape = _sizes(tuple(source.shape), sizes)
        device = source.device if device is None else as_device(device)
        mask = source.expand(shape)
        mod: MaskMod = lambda b, h, i, j: mask[b, h, i.squeeze(1)]  # noqa: E731
    elif flex is not None and isinstance(source, flex.BlockMask):
        shape = _sizes(tuple(source.shape), sizes)
        mod, device = _of_flex(source), device or source.kv_indices.device
    elif callable(source):
        if Sq is None or Sk is None:
            raise ValueError("Sq and Sk are None; expected the sizes of a mask_mod")
        shape, mod = (1 if B is None else B, 1 if H is None else H, Sq, Sk), source
    else:
        raise TypeError(
            f"source is a {type(source).__name__}; expected a boolean tensor, "
            "mask_mod(b, h, q_idx, kv_idx), or a BlockMask of flex_attention"
        )
    device = torch.get_default_device() if device is None else as_device(device)
    where = source.device if isinstance(source, Tensor) else device
    for what, n, tile in (("queries", shape[2], ROWS), ("keys", shape[3], COLUMNS)):
        if -(-n // tile) > 1 << 15:
            raise ValueError(f"{n} {what}; expected at most {tile << 15}, or 2^15 tiles")
    return _built(mod, shape, device, where)


def _sizes(have: tuple[int, ...], wanted: list[int | None]) -> Shape:
    """Return the sizes [B, H, Sq, Sk] of a source of shape `have`, with B and H as it has them."""
    if len(have) > 4:
        raise ValueError(f"source has {len(have)} dimensions; expected at most 4: [B, H, Sq, Sk]")
    full = (1,) * (4 - len(have)) + have
    for n, want in zip(full, wanted):
        if want not in (None, n) and n != 1:
            raise ValueError(
                f"source has shape {list(have)}; expected one that broadcasts to "
                f"[B, H, Sq, Sk] = {wanted}"
            )
    q_length, k_length = (n if want is None else want for n, want in zip(full[2:], wanted[2:]))
    return full[0], full[1], q_length, k_length


def _of_flex(block: Any) -> MaskMod:
    """Return the mask_mod of a BlockMask of FlexAttention: which is True in its full blocks, and
    False in those that it does not list.
    """
    height, width = block.BLOCK_SIZE
    batch, heads, rows, _ = block.kv_indices.shape
    columns = -(-block.shape[-1] // width)

    def listed(counts: Tensor | None, indices: Tensor | None) -> Tensor:
        found = torch.zeros(batch, heads, rows, columns + 1, dtype=torch.bool)
        found = found.to(block.kv_indices.device)
        if counts is not None and indices is not None:
            t = torch.arange(indices.shape[-1], device=indices.device)
            places = torch.where(t < counts.unsqueeze(-1), indices, columns).long()
            found.scatter_(-1, places, True)
        return found

    part = listed(block.kv_num_blocks, block.kv_indices)
    full = listed(block.full_kv_num_blocks, block.full_kv_indices)

    def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        place = b.clamp(max=batch - 1), h.clamp(max=heads - 1), i // height, j // width
        return full[place] | (part[place] & block.mask_mod(b, h, i, j))

    return mod


def _built(mod: MaskMod, shape: Shape, device: torch.device, where: torch.device) -> BlockMask:
    """Return the mask of a mask_mod, which is evaluated on the device `where`, some rows of tiles
    at a time.
    """
    batch, heads, q_length, k_length = shape
    height, width = -(-q_length // ROWS), -(-k_length // COLUMNS)
    step = max(1, _CHUNK // max(1, ROWS * width * COLUMNS))
    slots, tables, known = [], [torch.empty(0, WORDS, dtype=torch.int32, device=device)], 0
    j = torch.arange(k_length, device=where).view(1, -1)
    for place in itertools.product(range(batch), range(heads)):
        for t in range(0, height, step):
            b, h = (torch.tensor(n, device=where) for n in place)
            end = min((t + step) * ROWS, q_length)
            i = torch.arange(t * ROWS, end, device=where).view(-1, 1)
            rows = mod(b, h, i, j)
            if not isinstance(rows, Tensor) or rows.dtype != torch.bool:
                given = f"dtype {rows.dtype}" if isinstance(rows, Tensor) else type(rows).__name__
                raise TypeError(f"mask_mod returned {given}; expected a tensor of torch.bool")
            tiles = -(-len(i) // ROWS)
            seen = torch.zeros(tiles * ROWS, width * COLUMNS, dtype=torch.bool, device=device)
            seen[: len(i), :k_length] = rows.to(device)
            seen[len(i) :] = seen[len(i) - 1]  # past the end: what the last query sees
            found, table = _shared(_words(seen, tiles, width))
            slots.append(torch.where(found > WHOLE, found + known, found).view(tiles, width))
            tables.append(table[WHOLE + 1 :])
            known += len(tables[-1])
    again, bits = _shared(torch.cat(tables))
    again = torch.cat([again.new_tensor([UNSEEN, WHOLE]), again])
    empty = torch.empty(0, width, dtype=torch.int32, device=device)
    found = again[torch.cat([empty, *slots]).long()].view(batch, heads, height, width)
    return _listed(shape, found, bits)


def _require_sizes(**sizes: object) -> None:
    for name, n in sizes.items():
        if n is not None and (not isinstance(n, Integral) or isinstance(n, bool) or n < 0):
            raise ValueError(f"{name} is {n!r}; expected an int that is not negative")


def _indices(length: int, device: Device) -> Tensor:
    _require_sizes(S=length)
    return torch.arange(length, device=device).view(1, -1)


def _between(first: Tensor, end: Tensor) -> BlockMask:
    """Return the mask in which query i of sequence b sees the keys first[b, i] <= j < end[b, i] of
    S, given [B, S] or [1, S].
    """
    first, end = torch.broadcast_tensors(first, end)
    batch, length = first.shape
    rows, columns = -(-length // ROWS), -(-length // COLUMNS)
    at = torch.arange(rows * ROWS, device=first.device).clamp(max=max(0, length - 1))
    low, high = (x[:, at].view(batch, rows, 1, ROWS) for x in (first, end))
    begin = torch.arange(columns, device=first.device).mul(COLUMNS)
    whole = (low.amax(-1) <= begin) & (high.amin(-1) >= begin + COLUMNS)
    part = (low.amin(-1) < begin + COLUMNS) & (high.amax(-1) > begin) & ~whole
    slots, places = whole.int(), part.nonzero()
    words = [torch.empty(0, WORDS, dtype=torch.int32, device=first.device)]
    for b, t, c in (x.unbind(1) for x in places.split(512)):
        j = begin[c].view(-1, 1, 1) + torch.arange(COLUMNS, device=first.device)
        seen = (j >= low[b, t, 0].unsqueeze(2)) & (j < high[b, t, 0].unsqueeze(2))
        words.append(_words(seen, len(b), 1))
    slots[part], bits = _shared(torch.cat(words))
    return _listed((batch, 1, length, length), slots.unsqueeze(1), bits)


def _words(seen: Tensor, tiles: int, columns: int) -> Tensor:
    """Return the bits of a boolean [128 tiles, 64 columns], [tiles * columns, 256] int32."""
    # Gathers bit 0 of each byte.
    eight = seen.flatten().view(torch.int64) * 0x0102040810204080 >> 56
    words = eight.to(torch.uint8).view(torch.int32)
    parts = words.view(tiles, ROWS, columns, COLUMNS // 32).transpose(1, 2)
    return parts.reshape(tiles * columns, WORDS)


def _shared(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return (slot of each tile [n] int32, the different tiles [slots, 256]), given the words of
    tiles [n, 256]. Slots are in the order of their first tile, after UNSEEN and WHOLE.
    """
    words = torch.cat([words.new_zeros(1, WORDS), words.new_full((1, WORDS), -1), words])
    factors = torch.arange(1, 2 * WORDS, 2, device=words.device) * -0x61C8864680B583EB
    values = ((words.long() ^ (words.long() << 29)) * factors).sum(-1)
    _, kinds = values.unique(return_inverse=True)
    first = _first_of(kinds)
    if not torch.equal(words[first[kinds]], words):  # different tiles with one hash
        _, kinds = words.unique(dim=0, return_inverse=True)
        first = _first_of(kinds)
    order = first.argsort()
    return order.argsort()[kinds[2:]].int(), words[first[order]]


def _first_of(kinds: Tensor) -> Tensor:
    """Return the first place of each kind 0, 1, .., of which each occurs."""
    places = torch.arange(len(kinds), device=kinds.device)
    first = torch.full_like(places, len(kinds)).scatter_reduce(0, kinds, places, "amin")
    return first[: int(kinds.max()) + 1]


def _listed(shape: Shape, slots: Tensor, bits: Tensor) -> BlockMask:
    """Return the mask, given the slot of each tile, [B, H, R, C]."""
    spans, lists, begin = [], [], 0
    for grid in (slots, slots.transpose(-1, -2)):
        t = torch.arange(grid.shape[-1], device=grid.device)
        whole = grid == WHOLE
        before = torch.where(whole, -1, t).cummax(-1)[0]  # the last tile that is not whole
        longest, end = F.pad(t - before, (1, 0)).max(-1)  # `end` counts from 1, as a length does
        run = end - longest
        inside = (t >= run.unsqueeze(-1)) & (t < end.unsqueeze(-1))
        kind = torch.where(grid == UNSEEN, 2, torch.where(whole, 0, 1)).masked_fill(inside, 2)
        counts = torch.stack([(kind == 0).sum(-1), (kind == 1).sum(-1)])
        places = kind.argsort(stable=True)
        listed = t < counts.sum(0).unsqueeze(-1)
        index, slot = places[listed], grid.gather(-1, places)[listed]
        ends = counts.sum(0).flatten().cumsum(0).view(run.shape)
        starts = ends - counts.sum(0) + begin
        begin += len(index)
        spans.append(torch.stack([run, longest, starts, *counts], -1).int())
        lists.append(torch.stack([index, slot & 0xFFFF, slot >> 16]).to(torch.int16))
    entries = torch.cat(lists, 1)  # of few lengths, so that calls of similar masks share a plan
    step = max(16, (1 << max(0, begin - 1).bit_length()) // 8)
    return BlockMask(shape, torch.cat(spans, 2), F.pad(entries, (0, -begin % step)), bits)


def _combined(combine: Callable[..., Tensor], a: BlockMask, b: BlockMask) -> BlockMask:
    """Return the mask of the elements that `combine` makes of those of two masks."""
    if not isinstance(b, BlockMask):
        return NotImplemented
    batch, heads, q_length, k_length = (x if y == 1 else y for x, y in zip(a.shape, b.shape))
    shape = batch, heads, q_length, k_length
    if a.shape[2:] != b.shape[2:] or any(
        n not in (1, full) for x in (a, b) for n, full in zip(x.shape, shape)
    ):
        raise ValueError(f"masks of {list(a.shape)} and {list(b.shape)}; expected one shape")
    given = [x.slots().expand(*shape[:2], -1, -1) for x in (a, b)]
    pairs, kinds = torch.stack([x.flatten() for x in given]).unique(dim=1, return_inverse=True)
    found, bits = _shared(combine(a.bits[pairs[0].long()], b.bits[pairs[1].long()]))
    return _listed(shape, found[kinds].view(given[0].shape), bits)
