"""PagedKVCache: keys and values in pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastformer.cache.rows import SelfAttentionCache, make_buffers, require_rows
from fastformer.checks import require_size
from fastformer.dispatch.backends import prefers_kernels
from fastformer.ops import functional
from fastformer.ops.attention.arguments import PAGE_SIZES


class PagedKVCache(SelfAttentionCache):
    """Keys and values of B rows in pages of `page_size` positions, for one attention layer.

    A row takes another page when its last page is full, so that short rows do not reserve the space
    of long ones. A page that several rows hold, as after `reorder`, is copied when one of them
    writes to it.

    Args:
        pages: number of pages, which all rows share.
        page_size: positions of a page: 16, 32, 64, 128 or 256.
        heads, head_dim, value_dim, dtype, device: as in `KVCache`.
        batch: rows.
        blocks: the most pages that one row can take; `pages` by default.

    Attributes:
        key_pages, value_pages: [pages, page_size, G, D] and [pages, page_size, G, Dv].
        block_table: [B, blocks] int32: the pages of each row, in order.
        lengths, longest: as in `KVCache`; `longest` is exact on a GPU as well.

    The host assigns the pages, so that `crop` and `reorder` wait for the device if their argument
    is a tensor on it. `append` does not wait.

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
        sizes = dict(pages=pages, heads=heads, batch=batch, blocks=blocks)
        pages, heads, batch, blocks = require_size(**sizes)
        page_size = require_page_size(page_size)
        dims = head_dim, head_dim if value_dim is None else value_dim
        self.key_pages, self.value_pages = make_buffers(
            (pages, page_size, heads), dims, dtype, device
        )
        self._begin(batch, blocks * page_size, self.key_pages.device)
        with torch.inference_mode(False):
            self.block_table = torch.zeros(
                batch, blocks, dtype=torch.int32, device=self.key_pages.device
            )
        self._free = list(reversed(range(pages)))
        self._uses = [0] * pages  # the number of rows that hold each page
        self._tables: list[list[int]] = [[] for _ in range(batch)]
        self._held = [0] * batch  # the length of each row

    def add_pages(self, pages: int) -> None:
        """Add pages; this copies the buffers to larger ones."""
        [pages] = require_size(pages=pages)
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
        if not (self._fixed_shapes or prefers_kernels(query)):
            return super().attend(query, mask, **options)
        table = self.block_table if self._fixed_shapes else self.block_table[:, : self._blocks()]
        keys = table.shape[1] * self.page_size
        options = dict(options, attn_mask=self._over_keys(mask, keys))
        options["bias"] = self._over_keys(options.get("bias"), keys)
        options.update(is_causal=query.shape[-2] > 1, causal_alignment="bottom_right")
        pages = self.key_pages, self.value_pages
        return functional.paged_attention(query, *pages, table, self.lengths, **options)

    def contents(self) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, G, longest, ..], undefined past the length of each row."""
        table = self._tables[0]
        if (
            len(self._tables) == 1
            and table
            and table == list(range(table[0], table[0] + len(table)))
        ):
            key, value = (  # the pages follow one another
                x.narrow(0, table[0], len(table)).view(1, -1, *x.shape[2:]).transpose(1, 2)
                for x in (self.key_pages, self.value_pages)
            )
            return key.narrow(2, 0, self.longest), value.narrow(2, 0, self.longest)
        pages = self.block_table[:, : self._blocks()].long()
        key, value = (
            x[pages].flatten(1, 2).transpose(1, 2)[:, :, : self.longest]
            for x in (self.key_pages, self.value_pages)
        )
        return key, value

    def reorder(self, index: Tensor) -> None:
        """Replace row i by row index[i], for all i at once, without copies: rows share pages.

        index, Raises: as in `KVCache.reorder`.
        """
        rows = require_rows(index, self.lengths)
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
        """Shorten the rows to these lengths, and free the pages past them."""
        self._held = lengths
        for table, held in zip(self._tables, self._held):
            pages = -(-held // self.page_size)
            self._release(table[pages:])
            del table[pages:]
        self._count()

    def buffers(self) -> tuple[Tensor, ...]:
        return (*super().buffers(), self.block_table)

    @property
    def _form(self) -> tuple[int, Tensor, Tensor]:
        return self.key_pages.shape[2], self.key_pages, self.value_pages

    def _arguments(
        self, query: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
        lengths = None if self._even and not self._fixed_shapes else self.lengths
        options = dict(options, key_lengths=lengths, causal_alignment="bottom_right")
        return *self.contents(), mask, dict(options, is_causal=query.shape[-2] > 1)

    def _blocks(self) -> int:
        """Return the number of pages of the longest row, at least 1."""
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
        copied = []  # rows whose last page is partly filled and shared with others
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
        if key.shape[2] == 1 == len(self._tables) and not self._fixed_shapes:
            block, place = divmod(self._held[0] - 1, self.page_size)
            page = self._tables[0][block]
            self.key_pages[page, place].copy_(key[0, :, 0])
            self.value_pages[page, place].copy_(value[0, :, 0])
            return
        positions = self._positions(key.shape[2])
        pages = self.block_table.gather(1, positions // self.page_size).long()
        at = pages, positions % self.page_size  # [B, n, G, D]
        self.key_pages[at], self.value_pages[at] = key.transpose(1, 2), value.transpose(1, 2)


def require_page_size(page_size: int) -> int:
    [page_size] = require_size(page_size=page_size)
    if page_size not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        raise ValueError(f"page_size is {page_size}; expected {sizes}")
    return page_size
