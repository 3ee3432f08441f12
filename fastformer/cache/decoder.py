"""DecoderCache: the caches of all layers of a decoder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from fastformer.cache.contiguous import Arguments, AttendedCache, KVCache
from fastformer.cache.memory import MemoryCache
from fastformer.checks import require_size, require_tensor, wrong_shape


class LayerCache(AttendedCache):
    """The caches of one decoder layer. The first append creates `own`, to fit its keys.

    Attributes:
        own: the cache of the layer's self-attention; None before the first append.
        memory: the MemoryCache of the layer's cross-attention.
    """

    def __init__(self, capacity: int) -> None:
        self.own: KVCache | None = None
        self.memory = MemoryCache()
        self._capacity = capacity

    def append(self, key: Tensor, value: Tensor) -> None:
        """Append to `own` as `KVCache.append` does."""
        own = self.own
        if own is None:
            for name, x in (("key", key), ("value", value)):
                require_tensor(name, x)
                if x.dim() != 4:
                    raise wrong_shape(name, x, "[B, G, n, D]")
            batch, heads, _, dim = key.shape
            sizes = batch, heads, self._capacity, dim, value.shape[3]
            own = KVCache(*sizes, dtype=key.dtype, device=key.device)
        own.append(key, value)
        self.own = own

    def reorder(self, index: Tensor, same_memory: bool = False) -> None:
        """Reorder both as `KVCache.reorder` does; same_memory=True leaves `memory` as it is."""
        if self.own is not None:
            self.own.reorder(index)
        if not same_memory:
            self.memory.reorder(index)

    @property
    def longest(self) -> int:  # type: ignore[override]
        return 0 if self.own is None else self.own.longest

    def _arguments(self, *given: Any) -> Arguments:
        assert self.own is not None, "an append has to come first"
        return self.own._arguments(*given)


class DecoderCache:
    """The keys and values that a decoder keeps between steps: a `LayerCache` for each layer.

    The first step allocates the buffers, to fit the batch, the heads and the dtype of its keys.

    Args:
        capacity: positions of a row, including the prompt.

    Attributes:
        layers: the `LayerCache` of each layer that has run.

    Raises ValueError if capacity is below 1, TypeError if it is not an int.
    """

    def __init__(self, capacity: int) -> None:
        [capacity] = require_size(capacity=capacity)
        self.capacity = capacity
        self.layers: list[LayerCache] = []
        self.graph: object = None  # the CUDA graph of a step, kept for the next call

    def layer(self, i: int) -> LayerCache:
        """Return the caches of layer i, created on first use."""
        while len(self.layers) <= i:
            self.layers.append(LayerCache(self.capacity))
        return self.layers[i]

    @property
    def longest(self) -> int:
        """Return the length of the longest row, as `KVCache.longest` gives it."""
        return max([0, *(own.longest for own in self._own())])  # dynamo has no max(default=)

    @property
    def lengths(self) -> Tensor | None:
        """Return the length of each row, [B] int32 on the device; None before the first step."""
        return next((own.lengths for own in self._own()), None)

    def start(self) -> int | Tensor:
        """Return the position of the next token: an int, or a tensor [B] as in `KVCache.start`."""
        return next((own.start() for own in self._own()), 0)

    def reorder(self, index: Tensor, same_memory: bool = False) -> None:
        """Replace row i by row index[i], for all i at once.

        index: as in `KVCache.reorder`. same_memory: True if rows i and index[i] have the same
        source; the keys and values of the memory then stay as they are.
        """
        for layer in self.layers:
            layer.reorder(index, same_memory)

    def crop(self, length: int | Tensor) -> None:
        """Forget the positions from `length` on, as `KVCache.crop` does."""
        for own in self._own():
            own.crop(length)

    def reset(self, batch: int | None = None) -> None:
        """Forget all positions and the memory.

        batch: rows of the next call, None for as many as before. The buffers are kept unless their
            number of rows differs from it.

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
        """Enter `KVCache.advanced` for all layers."""
        with ExitStack() as stack:
            for own in self._own():
                stack.enter_context(own.advanced(n))
            yield

    def buffers(self) -> Iterator[Tensor]:
        """Yield the tensors that a step reads and writes."""
        for layer in self.layers:
            if layer.own is not None:
                yield from layer.own.buffers()
            for x in (layer.memory.key, layer.memory.value):
                if x is not None:
                    yield x

    def _own(self) -> Iterator[KVCache]:
        return (layer.own for layer in self.layers if layer.own is not None)
