"""KVCache: one tensor of keys and one of values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastformer.cache.rows import SelfAttentionCache, make_buffers, require_rows
from fastformer.checks import require_size


class KVCache(SelfAttentionCache):
    """The keys and values of B rows of up to `capacity` positions, for one attention layer.

    Args:
        batch: rows.
        heads: key-value heads, G.
        capacity: positions of a row.
        head_dim: features of a key, D.
        value_dim: features of a value, Dv; head_dim by default.
        dtype: float32, float16, bfloat16 or float64; torch's default dtype by default.
        device: the device of the buffers; torch's default device by default.

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
        batch, heads, capacity = require_size(batch=batch, heads=heads, capacity=capacity)
        self.key, self.value = make_buffers(
            (batch, heads, capacity), (head_dim, value_dim), dtype, device
        )
        self._begin(batch, capacity, self.key.device)
        self._rows = self.lengths.new_empty(0, 1)  # the index of each row, [B, 1] int64

    def contents(self) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, G, longest, ..], undefined past the length of each row."""
        return self.key.narrow(2, 0, self.longest), self.value.narrow(2, 0, self.longest)

    def reorder(self, index: Tensor) -> None:
        """Replace row i by row index[i], for all i at once, as beam search does.

        index: [B'] integers in [0, B). The buffers stay the same tensors if B' is B.

        Raises:
            ValueError: index has another shape or device, or holds a row outside [0, B).
            TypeError: index is not an integer tensor.
        """
        rows = require_rows(index, self.lengths)
        held = self.contents() if len(rows) == len(self.lengths) else (self.key, self.value)
        key, value = (x.index_select(0, rows) for x in held)
        lengths = self.lengths.index_select(0, rows)
        if len(rows) == len(self.lengths):
            held[0].copy_(key)
            held[1].copy_(value)
            self.lengths.copy_(lengths)
        else:
            self.key, self.value, self.lengths = key, value, lengths
        if not self._even:  # else all rows still have the length that the host knows
            self._measure()

    @property
    def _form(self) -> tuple[int, Tensor, Tensor]:
        return self.key.shape[1], self.key, self.value

    def _write(self, key: Tensor, value: Tensor) -> None:
        n = key.shape[2]
        if self._even and not self._fixed_shapes:
            first = self.longest - n
            self.key.narrow(2, first, n).copy_(key)
            self.value.narrow(2, first, n).copy_(value)
        else:
            if len(self._rows) != len(self.lengths):  # at first, and for another batch
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
