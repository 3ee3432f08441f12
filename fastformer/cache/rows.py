"""Caches of keys and values, with which a decoder computes each token once.

    KVCache        a tensor of keys and one of values, with room for `capacity` positions a row
    PagedKVCache   keys and values in pages, which a row takes when it needs them
    MemoryCache    the projected keys and values of a memory, for cross-attention
    DecoderCache   those of each layer of a decoder

An append writes in place behind what each row holds, and never waits for the device: the host knows
a bound of the longest row. A cache keeps no gradient.

On a CPU attention reads the part of the buffers that is filled. On other devices it reads them
whole, with `key_lengths`: all steps have the same shapes, and a CUDA graph of one step can be
replayed.

Shapes: B batch (rows), H heads, G key-value heads, S capacity, n new positions, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer import functional
from fastformer.checks import (
    FLOATING,
    INTEGERS,
    may_read,
    require_device,
    require_int,
    require_size,
    require_tensor,
    shape_of,
)

__all__ = ["DecoderCache", "KVCache", "MemoryCache", "PagedKVCache"]

PAGE_SIZES = (16, 32, 64, 128, 256)


class _Attended:
    """Keys and values that queries attend to; no row has more than `longest`."""

    longest: int

    def attend(
        self, query: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0, **options: Any
    ) -> Tensor:
        """Return [B, H, n, Dv], what the queries [B, H, n, D] read; H is a multiple of G.

        mask: True keeps a key; it broadcasts to [B, H, n, longest]. dropout_p, options: those of
        `scaled_dot_product_attention` that the cache does not decide.
        """
        key, value, mask, options = self._arguments(query, mask, options)
        return functional.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, enable_gqa=True, **options
        )

    def weights(self, query: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        """Return the weights of the same attention, [B, H, n, longest]."""
        key, _, mask, options = self._arguments(query, mask, options)
        weights = functional.attention_weights(query, key, mask, enable_gqa=True, **options)
        return weights[..., : self.longest]

    def _arguments(
        self, query: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
        """Return key, value, mask and options for the op."""
        raise NotImplementedError


class _Rows(_Attended):
    """What both caches of a self-attention share: the lengths, and the order of an append.

    An append has a part on the host, which looks for room and counts, and one on the device, which
    writes. A CUDA graph of a step replays the second alone.
    """

    lengths: Tensor
    capacity: int

    def _begin(self, batch: int, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        with torch.inference_mode(False):
            self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.longest = 0
        self._even = True  # whether each row is known to be of the length `longest`
        self._advanced = 0  # positions that `longest` counts and no append has written yet
        self._fixed_shapes = self.lengths.device.type != "cpu"

    def append(self, key: Tensor, value: Tensor) -> None:
        """Write n positions behind those of each row, in place.

        Args:
            key: [B, G, n, D], in the dtype and on the device of the cache.
            value: [B, G, n, Dv], likewise.

        Raises:
            ValueError: the cache is full; another batch, number of heads, head dim or device; a
                tensor that requires a gradient while gradients are on.
            TypeError: another dtype.

        A call that raises leaves the cache as it was.
        """
        self._require_entry(key, value)
        n = key.shape[2]
        if self._advanced != n:
            self.advance(n)
        with torch.no_grad():
            self._write(key, value)
            self.lengths.add_(n)

    def advance(self, n: int) -> None:
        """Do the part of an append of n positions that the host does: look for room and count."""
        room = self.capacity - self.longest
        if n > room:
            raise ValueError(
                f"key has {n} positions; expected at most {room}: "
                f"the cache holds {self.longest} of its capacity of {self.capacity}"
            )
        self._take_room(n)
        self.longest += n

    @contextmanager
    def advanced(self, n: int) -> Iterator[None]:
        """A context for an append of n positions whose part on the host is done at its start.

        What happens inside is on the device alone, so that a CUDA graph can capture and replay it.
        After an error, such as that of a capture, the host counts no append.
        """
        self.advance(n)
        self._advanced = n
        try:
            yield
        except BaseException:
            self._give_back(n)
            raise
        finally:
            self._advanced = 0

    def _give_back(self, n: int) -> None:
        self.longest -= n

    def buffers(self) -> tuple[Tensor, ...]:
        """Return the tensors that an append writes and attention reads."""
        return (*self._form[1:], self.lengths)

    def start(self) -> int | Tensor:
        """Return the position of the next token: an int, or [B] where the host cannot know it."""
        return self.longest if self._even and not self._fixed_shapes else self.lengths

    def crop(self, length: int | Tensor) -> None:
        """Forget the positions from `length` on.

        length: an int, or [B] integers, one for each row; a row that is shorter stays as it is.

        Raises:
            ValueError: a length outside [0, capacity], another shape or device.
            TypeError: length is not of integers.
        """
        if not isinstance(length, Tensor):
            require_int("length", length)
            if not 0 <= length <= self.capacity:
                raise ValueError(
                    f"length is {length}; expected 0 to the capacity of the cache, {self.capacity}"
                )
            self.lengths.clamp_(max=length)
            self.longest = min(self.longest, length)
            self._even = self._even or length == 0
            return
        _require_lengths(length, self.lengths, self.capacity)
        torch.minimum(self.lengths, length.to(torch.int32), out=self.lengths)
        self._even = False
        self._measure()

    def reset(self) -> None:
        """Forget all positions."""
        self.crop(0)

    def _measure(self) -> None:
        """Compute `longest` from the lengths, unless that waits for the device."""
        if may_read(self.lengths):
            shortest, self.longest = map(int, self.lengths.aminmax())
            self._even = shortest == self.longest

    def _positions(self, n: int) -> Tensor:
        """Return the positions of the next n tokens of each row, [B, n] int64."""
        first = self.lengths.long().unsqueeze(1)
        return first if n == 1 else first + torch.arange(n, device=self.lengths.device)

    def _over_keys(self, mask: Tensor | None, keys: int) -> Tensor | None:
        """Return a mask or bias [.., longest] as [.., keys], the keys that attention reads."""
        if mask is None or keys == self.longest or mask.shape[-1:] != (self.longest,):
            return mask
        return F.pad(mask, (0, keys - self.longest), value=False)

    def _require_entry(self, key: Tensor, value: Tensor) -> None:
        batch = len(self.lengths)
        heads, *buffers = self._form
        for name, x, buffer in zip(("key", "value"), (key, value), buffers):
            if not isinstance(x, Tensor) or x.layout is not torch.strided:
                require_tensor(name, x)
            dim = buffer.shape[-1]
            n = key.shape[2] if key.dim() == 4 else 0
            if x.shape != (batch, heads, n, dim):
                given = "n" if name == "key" else n
                raise ValueError(
                    f"{name} has shape {shape_of(x)}; "
                    f"expected that of the cache, [{batch}, {heads}, {given}, {dim}]"
                )
            if x.dtype != buffer.dtype:
                raise TypeError(
                    f"{name} has dtype {x.dtype}; expected that of the cache, {buffer.dtype}"
                )
            if x.device != buffer.device:
                require_device(name, x, "the cache", buffer)
            if x.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"{name} requires a gradient, and a cache keeps none; "
                    "expected a call within torch.no_grad()"
                )

    @property
    def _form(self) -> tuple[int, Tensor, Tensor]:
        """Return the number of heads, and the buffers of keys and values [.., D]."""
        raise NotImplementedError

    def _take_room(self, n: int) -> None:
        """Take what n more positions of each row need, or raise ValueError."""

    def _write(self, key: Tensor, value: Tensor) -> None:
        raise NotImplementedError


class KVCache(_Rows):
    """The keys and values of B rows of up to `capacity` positions, for one attention.

    Args:
        batch: rows.
        heads: key-value heads, G.
        capacity: positions of a row.
        head_dim: features of a key, D.
        value_dim: features of a value, Dv; those of a key by default.
        dtype: float32, float16, bfloat16 or float64; torch's default dtype by default.
        device: where the buffers lie; torch's default device by default.

    Attributes:
        key, value: the buffers [B, G, capacity, D] and [B, G, capacity, Dv].
        lengths: [B] int32, on the device: row b holds positions 0 .. lengths[b] - 1.
        longest: the length of the longest row. On a GPU it is an upper bound once `crop` has been
            given a tensor, because the host does not wait to read the lengths.

    Raises:
        ValueError: a size is below 1.
        TypeError: a size is not an int, the dtype is not floating.

    Source: Shazeer 2019, "Fast Transformer Decoding: One Write-Head is All You Need", section 2.4.
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        capacity: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        require_size(batch=batch, heads=heads, capacity=capacity)
        self.key, self.value = _buffers(
            (batch, heads, capacity), (head_dim, value_dim), dtype, device
        )
        self._begin(batch, capacity, self.key.device)
        self._rows = self.lengths.new_empty(0, 1)  # the index of each row, [B, 1] int64

    def contents(self) -> tuple[Tensor, Tensor]:
        """Return the keys [B, G, longest, D] and values, undefined past the length of a row."""
        return self.key[:, :, : self.longest], self.value[:, :, : self.longest]

    def reorder(self, index: Tensor) -> None:
        """Let row i hold what row index[i] holds, as a search with beams needs it.

        index: [B'] integers in [0, B). The buffers stay the same tensors where B' is B.

        Raises:
            ValueError: another shape or device, a row that is not there.
            TypeError: index is not of integers.
        """
        rows = _require_rows(index, self.lengths)
        held = self.contents() if len(rows) == len(self.lengths) else (self.key, self.value)
        key, value = (x.index_select(0, rows) for x in held)
        lengths = self.lengths.index_select(0, rows)
        if len(rows) == len(self.lengths):
            held[0].copy_(key)
            held[1].copy_(value)
            self.lengths.copy_(lengths)
        else:
            self.key, self.value, self.lengths = key, value, lengths
        if not self._even:  # else each row has the length that the host knows
            self._measure()

    # ------------------------------------------------------------------------------------- parts

    @property
    def _form(self) -> tuple[int, Tensor, Tensor]:
        return self.key.shape[1], self.key, self.value

    def _write(self, key: Tensor, value: Tensor) -> None:
        n = key.shape[2]
        if self._even and not self._fixed_shapes:
            new = slice(self.longest - n, self.longest)
            self.key[:, :, new], self.value[:, :, new] = key, value
        else:
            if len(self._rows) != len(self.lengths):  # at first, and after a reorder
                self._rows = torch.arange(len(self.lengths), device=key.device).unsqueeze(1)
            at = self._rows, slice(None), self._positions(n)  # [B, n, G, D]
            self.key[at], self.value[at] = key.transpose(1, 2), value.transpose(1, 2)

    def _arguments(
        self, query: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
        lengths: Tensor | None = self.lengths
        if self._fixed_shapes:
            key, value = self.key, self.value
        else:
            key, value = self.contents()
            lengths = None if self._even else lengths
        options = dict(options, key_lengths=lengths, causal_alignment="bottom_right")
        options["is_causal"] = query.shape[-2] > 1
        options["bias"] = self._over_keys(options.get("bias"), key.shape[2])
        return key, value, self._over_keys(mask, key.shape[2]), options


class PagedKVCache(_Rows):
    """Keys and values of B rows in pages of `page_size` positions, for one attention.

    A row takes a page when its last one is full, so that rows of other lengths share one store. A
    page that several rows hold, as after `reorder`, is copied when one of them writes to it.

    Args:
        pages: how many there are.
        page_size: positions of a page: 16, 32, 64, 128 or 256.
        heads, head_dim, value_dim, dtype, device: as in `KVCache`.
        batch: rows.
        blocks: the most pages that one row takes; all of them by default.

    Attributes:
        key_pages, value_pages: [pages, page_size, G, D] and [pages, page_size, G, Dv].
        block_table: [B, blocks] int32: the pages of each row, in order.
        lengths, longest: as in `KVCache`; `longest` is exact on a GPU, too.

    The host finds the pages, so that `crop` and `reorder` wait for the device where they are given
    a tensor on it. `append` does not wait.

    Raises ValueError and TypeError as `KVCache` does, ValueError for another page_size.

    Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", section 4.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        batch: int,
        blocks: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        blocks = pages if blocks is None else blocks
        require_size(pages=pages, heads=heads, batch=batch, blocks=blocks)
        _require_page_size(page_size)
        dims = head_dim, head_dim if value_dim is None else value_dim
        self.key_pages, self.value_pages = _buffers((pages, page_size, heads), dims, dtype, device)
        self._begin(batch, blocks * page_size, self.key_pages.device)
        with torch.inference_mode(False):
            self.block_table = torch.zeros(
                batch, blocks, dtype=torch.int32, device=self.key_pages.device
            )
        self._free = list(reversed(range(pages)))
        self._uses = [0] * pages  # rows that hold the page
        self._tables: list[list[int]] = [[] for _ in range(batch)]
        self._held = [0] * batch  # positions

    def add_pages(self, pages: int) -> None:
        """Add pages, in buffers that are new."""
        require_size(pages=pages)
        self.key_pages, self.value_pages = (
            torch.cat([x, x.new_zeros(pages, *x.shape[1:])])
            for x in (self.key_pages, self.value_pages)
        )
        self._free[:0] = reversed(range(len(self._uses), len(self._uses) + pages))
        self._uses += [0] * pages

    @property
    def page_size(self) -> int:
        return self.key_pages.shape[1]

    def attend(
        self, query: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0, **options: Any
    ) -> Tensor:
        if dropout_p != 0:
            raise ValueError(
                f"dropout_p is {dropout_p}; expected 0 with pages (model.eval() turns dropout off)"
            )
        table = self.block_table if self._fixed_shapes else self.block_table[:, : self._blocks()]
        keys = table.shape[1] * self.page_size
        options = dict(options, attn_mask=self._over_keys(mask, keys))
        options["bias"] = self._over_keys(options.get("bias"), keys)
        options.update(is_causal=query.shape[-2] > 1, causal_alignment="bottom_right")
        pages = self.key_pages, self.value_pages
        return functional.paged_attention(query, *pages, table, self.lengths, **options)

    def contents(self) -> tuple[Tensor, Tensor]:
        """Return the keys [B, G, longest, D] and values, undefined past the length of a row."""
        pages = self.block_table[:, : self._blocks()].long()
        key, value = (
            x[pages].flatten(1, 2).transpose(1, 2)[:, :, : self.longest]
            for x in (self.key_pages, self.value_pages)
        )
        return key, value

    def reorder(self, index: Tensor) -> None:
        """Let row i hold what row index[i] holds, without copies: the rows share their pages.

        index: [B'] integers in [0, B).

        Raises:
            ValueError: another shape or device, a row that is not there.
            TypeError: index is not of integers.
        """
        rows = _require_rows(index, self.lengths)
        chosen = rows.tolist()
        tables = [list(self._tables[i]) for i in chosen]
        for page in (page for table in tables for page in table):
            self._uses[page] += 1
        for table in self._tables:
            self._release(table)
        self._tables, self._held = tables, [self._held[i] for i in chosen]
        lengths, block_table = (x.index_select(0, rows) for x in (self.lengths, self.block_table))
        if len(rows) == len(self.lengths):
            self.lengths.copy_(lengths)
            self.block_table.copy_(block_table)
        else:
            self.lengths, self.block_table = lengths, block_table
        self._count()

    def crop(self, length: int | Tensor) -> None:
        """Forget the positions from `length` on, and free the pages that no row holds any more.

        length, Raises: as in `KVCache.crop`.
        """
        super().crop(length)
        rows = len(self._held)
        most = length.tolist() if isinstance(length, Tensor) else [length] * rows
        self._hold([min(pair) for pair in zip(self._held, most)])

    def _give_back(self, n: int) -> None:
        self._hold([held - n for held in self._held])

    def _hold(self, lengths: list[int]) -> None:
        """Hold no more than these lengths, and free the pages past them."""
        self._held = lengths
        for table, held in zip(self._tables, self._held):
            pages = -(-held // self.page_size)
            self._release(table[pages:])
            del table[pages:]
        self._count()

    # ------------------------------------------------------------------------------------- parts

    def buffers(self) -> tuple[Tensor, ...]:
        return (*super().buffers(), self.block_table)

    @property
    def _form(self) -> tuple[int, Tensor, Tensor]:
        return self.key_pages.shape[2], self.key_pages, self.value_pages

    def _arguments(
        self, query: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
        options = dict(options, key_lengths=self.lengths, causal_alignment="bottom_right")
        return *self.contents(), mask, dict(options, is_causal=query.shape[-2] > 1)

    def _blocks(self) -> int:
        """Return the pages of the longest row, at least one."""
        return max(1, -(-self.longest // self.page_size))

    def _count(self) -> None:
        self.longest = max(self._held)
        self._even = min(self._held) == self.longest

    def _release(self, pages: list[int]) -> None:
        for page in pages:
            self._uses[page] -= 1
            if not self._uses[page]:
                self._free.append(page)

    def _take(self) -> int:
        page = self._free.pop()
        self._uses[page] = 1
        return page

    def _take_room(self, n: int) -> None:
        size, uses = self.page_size, list(self._uses)
        copied = []  # rows whose last page is partly filled and held by other rows
        for row, (table, held) in enumerate(zip(self._tables, self._held)):
            if n and held % size and uses[table[-1]] > 1:
                uses[table[-1]] -= 1
                copied.append(row)
        new = [-(-(held + n) // size) - len(t) for t, held in zip(self._tables, self._held)]
        needed = sum(new) + len(copied)
        if needed > len(self._free):
            raise ValueError(
                f"key has {n} positions, which need {needed} pages; "
                f"expected at most the {len(self._free)} that are free of {len(self._uses)}"
            )
        if copied:
            self._copy_last_pages(copied)
        for table, count in zip(self._tables, new):
            table.extend(self._take() for _ in range(count))
        self._held = [held + n for held in self._held]
        if needed:
            blocks = self.block_table.shape[1]
            tables = [table + [0] * (blocks - len(table)) for table in self._tables]
            self.block_table.copy_(torch.tensor(tables, dtype=torch.int32))

    def _copy_last_pages(self, rows: list[int]) -> None:
        """Give each of the rows a copy of its last page."""
        old = [self._tables[row][-1] for row in rows]
        new = [self._take() for _ in rows]
        for pages in (self.key_pages, self.value_pages):
            pages[new] = pages[old]
        for row, page in zip(rows, new):
            self._tables[row][-1] = page
        self._release(old)

    def _write(self, key: Tensor, value: Tensor) -> None:
        positions = self._positions(key.shape[2])
        pages = self.block_table.gather(1, positions // self.page_size).long()
        at = pages, positions % self.page_size  # [B, n, G, D]
        self.key_pages[at], self.value_pages[at] = key.transpose(1, 2), value.transpose(1, 2)


def _require_page_size(page_size: int) -> None:
    require_size(page_size=page_size)
    if page_size not in PAGE_SIZES:
        raise ValueError(f"page_size is {page_size}; expected 16, 32, 64, 128 or 256")


def _buffers(
    sizes: tuple[int, ...],
    dims: tuple[int, int],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> tuple[Tensor, Tensor]:
    """Return zeros [*sizes, D] and [*sizes, Dv], which may be written in inference mode and out."""
    require_size(head_dim=dims[0], value_dim=dims[1])
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in FLOATING:
        raise TypeError(f"dtype is {dtype}; expected float32, float16, bfloat16 or float64")
    try:
        device = torch.get_default_device() if device is None else torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}; expected a device of torch: {error}") from None
    with torch.inference_mode(False):
        key, value = (torch.zeros(*sizes, dim, dtype=dtype, device=device) for dim in dims)
    return key, value


def _require_rows(index: Tensor, lengths: Tensor) -> Tensor:
    """Require rows of the cache [B'], and return them as int64."""
    require_tensor("index", index, "an integer tensor")
    if index.dtype not in INTEGERS:
        raise TypeError(f"index has dtype {index.dtype}; expected integers")
    if index.dim() != 1 or not len(index):
        raise ValueError(f"index has shape {shape_of(index)}; expected [rows], at least one")
    require_device("index", index, "the cache", lengths)
    if may_read(index):
        low, high = map(int, index.aminmax())
        if low < 0 or high >= len(lengths):
            raise ValueError(
                f"index holds {low if low < 0 else high}; "
                f"expected rows of the cache, 0 to {len(lengths) - 1}"
            )
    return index.long()


def _require_lengths(length: Tensor, lengths: Tensor, capacity: int) -> None:
    require_tensor("length", length)
    if length.dtype not in INTEGERS:
        raise TypeError(f"length has dtype {length.dtype}; expected integers")
    if length.shape != lengths.shape:
        raise ValueError(f"length has shape {shape_of(length)}; expected [B] = [{len(lengths)}]")
    require_device("length", length, "the cache", lengths)
    if may_read(length):
        low, high = map(int, length.aminmax())
        if low < 0 or high > capacity:
            raise ValueError(
                f"length holds {low if low < 0 else high}; "
                f"expected 0 to the capacity of the cache, {capacity}"
            )


# ------------------------------------------------------------------------------ memory, and layers


class MemoryCache(_Attended):
    """The projected keys and values of a memory, computed at the first step and kept.

    Attributes:
        key, value: the buffers [B, G, S, D] and [B, G, S, Dv]; None before the first step.
        filled: whether they hold the keys and values of a memory.
    """

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.filled, self.longest = False, 0
        self._memory: Tensor | None = None

    def fill(self, memory: Tensor, key: Tensor, value: Tensor) -> None:
        """Keep the keys and values of `memory`, in the buffers of the last one if they fit."""
        if any(x.requires_grad for x in (key, value)) and torch.is_grad_enabled():
            raise ValueError(
                "memory requires a gradient, or its projection does, and a cache keeps none; "
                "expected a call within torch.no_grad()"
            )
        pair = self.key, self.value
        for have, want in zip(pair, (key, value)):
            if have is None or not _alike(have, want):
                with torch.inference_mode(False):
                    pair = _buffer(key), _buffer(value)
                break
        self.key, self.value = pair
        assert self.key is not None and self.value is not None
        with torch.no_grad():
            self.key.copy_(key)
            self.value.copy_(value)
        self._memory, self.filled, self.longest = memory, True, key.shape[2]

    def _arguments(
        self, query: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
        assert self.key is not None and self.value is not None
        return self.key, self.value, mask, options

    def require_memory(self, name: str, memory: Tensor | None) -> None:
        """Require the tensor whose keys are kept, or None."""
        if memory is not None and memory is not self._memory:
            raise ValueError(
                f"{name} is another tensor than at the first step, whose keys the cache keeps; "
                "expected the same one, None, or a cache after reset()"
            )

    def reorder(self, index: Tensor) -> None:
        """Let row i hold what row index[i] holds; index as in `KVCache.reorder`."""
        if not self.filled:
            return
        assert self.key is not None and self.value is not None
        rows = _require_rows(index, self.key)
        key, value = (x.index_select(0, rows) for x in (self.key, self.value))
        if key.shape == self.key.shape:
            self.key.copy_(key)
            self.value.copy_(value)
        else:
            self.key, self.value = key, value
        self._memory = None

    def reset(self) -> None:
        """Forget the memory; the next step projects one again."""
        self.filled, self.longest, self._memory = False, 0, None


def _alike(x: Tensor, y: Tensor) -> bool:
    return (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)


def _buffer(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class LayerCache:
    """The caches of one decoder layer. The first append makes one that fits its keys.

    Attributes:
        own: the cache of the layer's self-attention; None before the first append.
        memory: the MemoryCache of its cross-attention.
    """

    def __init__(self, capacity: int, page_size: int | None, pages: int | None) -> None:
        self.own: KVCache | PagedKVCache | None = None
        self.memory = MemoryCache()
        self._capacity, self._page_size, self._pages = capacity, page_size, pages

    def append(self, key: Tensor, value: Tensor) -> None:
        """Append as `KVCache.append` does."""
        own = self.own
        if own is None:
            for name, x in (("key", key), ("value", value)):
                require_tensor(name, x)
                if x.dim() != 4:
                    raise ValueError(f"{name} has shape {shape_of(x)}; expected [B, G, n, D]")
            own = self._made(key, value.shape[3])
        own.append(key, value)
        self.own = own

    def reorder(self, index: Tensor, same_memory: bool = False) -> None:
        """Reorder both as `KVCache.reorder` does; same_memory leaves that of the memory."""
        own = self.own
        if own is not None:
            rows = len(own.lengths)
            own.reorder(index)
            if isinstance(own, PagedKVCache) and self._pages is None and len(index) > rows:
                own.add_pages((len(index) - rows) * own.block_table.shape[1])
        if not same_memory:
            self.memory.reorder(index)

    def _made(self, key: Tensor, value_dim: int) -> KVCache | PagedKVCache:
        batch, heads, _, dim = key.shape
        like: dict[str, Any] = dict(dtype=key.dtype, device=key.device)
        if self._page_size is None:
            return KVCache(batch, heads, self._capacity, dim, value_dim, **like)
        blocks = -(-self._capacity // self._page_size)
        pages = batch * blocks if self._pages is None else self._pages
        form = pages, self._page_size, heads, dim, value_dim
        return PagedKVCache(*form, batch=batch, blocks=blocks, **like)

    @property
    def longest(self) -> int:
        return 0 if self.own is None else self.own.longest

    def attend(
        self, query: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0, **options: Any
    ) -> Tensor:
        """Attend as `KVCache.attend` does, after an append."""
        assert self.own is not None
        return self.own.attend(query, mask, dropout_p, **options)

    def weights(self, query: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        """Return the weights, as `KVCache.weights` does."""
        assert self.own is not None
        return self.own.weights(query, mask, **options)


class DecoderCache:
    """What a decoder keeps between its steps: a `LayerCache` for each of its layers.

    The buffers are made at the first step, to fit the batch, the heads and the dtype of its keys.

    Args:
        capacity: positions of a row, those of the prompt included.
        page_size: if given, each layer has a `PagedKVCache` with such pages, else a `KVCache`.
        pages: pages of a layer; as many as all rows can take by default.

    Attributes:
        layers: those of the layers that have run.

    Raises ValueError if a size is below 1 or page_size is not that of a `PagedKVCache`, TypeError
    if one is not an int.
    """

    def __init__(
        self, capacity: int, *, page_size: int | None = None, pages: int | None = None
    ) -> None:
        require_size(capacity=capacity)
        if page_size is not None:
            _require_page_size(page_size)
        if pages is not None:
            require_size(pages=pages)
            if page_size is None:
                raise ValueError(f"pages is {pages} and page_size None; expected both or neither")
        self.capacity = capacity
        self._pages = page_size, pages
        self.layers: list[LayerCache] = []
        self.graph: object = None  # a captured step over the buffers, kept for the next call

    def layer(self, i: int) -> LayerCache:
        """Return the caches of layer i, which are made where there are none yet."""
        while len(self.layers) <= i:
            self.layers.append(LayerCache(self.capacity, *self._pages))
        return self.layers[i]

    @property
    def longest(self) -> int:
        """Positions of the longest row, as `KVCache.longest`."""
        return max([0, *(own.longest for own in self._own())])  # dynamo knows no default=

    @property
    def lengths(self) -> Tensor | None:
        """Positions of each row, [B] int32 on the device; None before the first step."""
        return next((own.lengths for own in self._own()), None)

    def start(self) -> int | Tensor:
        """Return the position of the next token: an int, or [B] where the host cannot know it."""
        for own in self._own():
            return own.start()
        return 0

    def reorder(self, index: Tensor, same_memory: bool = False) -> None:
        """Let row i hold what row index[i] holds.

        index: as in `KVCache.reorder`. same_memory: whether both rows have one source, so that the
        keys of the memory can stay.
        """
        for layer in self.layers:
            layer.reorder(index, same_memory)

    def crop(self, length: int | Tensor) -> None:
        """Forget the positions from `length` on, as `KVCache.crop` does."""
        for own in self._own():
            own.crop(length)

    def reset(self, batch: int | None = None) -> None:
        """Forget all positions and the memory. The buffers stay, but for another batch, if given.

        Raises ValueError if batch is below 1, TypeError if it is not an int.
        """
        if batch is not None:
            require_size(batch=batch)
            if any(len(own.lengths) != batch for own in self._own()):
                self.layers = []
        for layer in self.layers:
            if layer.own is not None:
                layer.own.reset()
            layer.memory.reset()

    @contextmanager
    def advanced(self, n: int) -> Iterator[None]:
        """The context of `KVCache.advanced`, for all layers."""
        with ExitStack() as stack:
            for own in self._own():
                stack.enter_context(own.advanced(n))
            yield

    def buffers(self) -> Iterator[Tensor]:
        """Return the tensors that a step reads and writes."""
        for layer in self.layers:
            if layer.own is not None:
                yield from layer.own.buffers()
            for x in (layer.memory.key, layer.memory.value):
                if x is not None:
                    yield x

    def _own(self) -> Iterator[KVCache | PagedKVCache]:
        return (layer.own for layer in self.layers if layer.own is not None)
