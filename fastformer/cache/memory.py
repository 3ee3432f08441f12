"""MemoryCache: the projected keys and values of the memory, the encoder's output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastformer.cache.contiguous import Arguments, AttendedCache, require_rows
from fastformer.eager import refuse_vmap


class MemoryCache(AttendedCache):
    """The projected keys and values of a memory, computed at the first step and kept.

    Attributes:
        key, value: the buffers [B, G, S, D] and [B, G, S, Dv]; None before the first step.
        filled: whether the buffers hold the keys and values of a memory.
    """

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.filled, self.longest = False, 0
        self._memory: Tensor | None = None

    def fill(self, memory: Tensor, key: Tensor, value: Tensor) -> None:
        """Copy the keys and values of `memory` to the buffers, or new ones if they do not fit."""
        refuse_vmap("the memory of a cache, which is written in place", key, value)
        if any(x.requires_grad for x in (key, value)) and torch.is_grad_enabled():
            raise ValueError(
                "memory requires a gradient, or its projection does, and a cache keeps none; "
                "expected a call within torch.no_grad()"
            )
        fits = all(
            x is not None and (x.shape, x.dtype, x.device) == (new.shape, new.dtype, new.device)
            for x, new in zip((self.key, self.value), (key, value))
        )
        if not fits:
            with torch.inference_mode(False):
                self.key, self.value = (
                    torch.empty_like(x, memory_format=torch.contiguous_format) for x in (key, value)
                )
        assert self.key is not None and self.value is not None
        with torch.no_grad():
            self.key.copy_(key)
            self.value.copy_(value)
        self._memory, self.filled, self.longest = memory, True, key.shape[2]

    def _arguments(self, query: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Arguments:
        assert self.key is not None and self.value is not None
        return self.key, self.value, mask, options

    def require_memory(self, name: str, memory: Tensor | None) -> None:
        """Require the same tensor whose keys are kept, or None."""
        if memory is not None and memory is not self._memory:
            raise ValueError(
                f"{name} is another tensor than at the first step, whose keys the cache keeps; "
                "expected the same one, None, or a cache after reset()"
            )

    def reorder(self, index: Tensor) -> None:
        """Replace row i by row index[i], for all i at once; index as in `KVCache.reorder`. Later
        steps have to pass None as the memory.
        """
        if not self.filled:
            return
        assert self.key is not None and self.value is not None
        rows = require_rows(index, self.key)
        if len(rows) == len(self.key):
            for x in (self.key, self.value):
                x.copy_(x.index_select(0, rows))
        else:
            self.key, self.value = (x.index_select(0, rows) for x in (self.key, self.value))
        self._memory = None

    def reset(self) -> None:
        """Forget the memory; the next step projects a new one."""
        self.filled, self.longest, self._memory = False, 0, None
