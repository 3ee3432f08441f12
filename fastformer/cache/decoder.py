"""DecoderCache: the caches of all layers of a decoder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from fastformer.cache.contiguous import KVCache
from fastformer.cache.memory import MemoryCache
from fastformer.cache.paged import PagedKVCache, require_page_size
from fastformer.checks import require_size, require_tensor, shape_of

__all__ = ["DecoderCache"]


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
            require_page_size(page_size)
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
