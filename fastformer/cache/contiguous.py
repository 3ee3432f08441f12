"""KVCache: one tensor of keys and one of values; and how queries attend to a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer import checks
from fastformer.eager import may_read, refuse_vmap
from fastformer.ops import functional

Arguments = tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]  # key, value, mask, options


class AttendedCache:
    """Keys and values that queries attend to; no row has more than `longest` positions."""

    longest: int
    _arguments: Callable[[Tensor, Tensor | None, dict[str, Any]], Arguments]  # of the op

    def attend(
        self, query: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0, **options: Any
    ) -> Tensor:
        """Return the output [B, H, n, Dv] for queries [B, H, n, D]; H is a multiple of G.

        mask: True keeps a key; it broadcasts to [B, H, n, longest]. dropout_p, options: arguments
        of `scaled_dot_product_attention` that the cache does not set itself.
        """
        key, value, mask, options = self._arguments(query, mask, options)
        return functional.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, enable_gqa=True, **options
        )

    def weights(self, query: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        """Return the attention weights of the same call, [B, H, n, longest]."""
        key, _, mask, options = self._arguments(query, mask, options)
        weights = functional.attention_weights(query, key, mask, enable_gqa=True, **options)
        return weights[..., : self.longest]


class KVCache(AttendedCache):
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
        batch, heads, capacity = checks.require_size(batch=batch, heads=heads, capacity=capacity)
        checks.require_size(head_dim=head_dim, value_dim=value_dim)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in checks.FLOATING:
            raise TypeError(f"dtype is {dtype}; expected float32, float16, bfloat16 or float64")
        try:
            device = torch.get_default_device() if device is None else torch.device(device)
        except RuntimeError as error:
            wrong = f"device is {device!r}; expected a device of torch: {error}"
            raise ValueError(wrong) from None
        self.capacity = capacity
        with torch.inference_mode(False):  # writable in and outside of it
            self.key, self.value = (
                torch.zeros(batch, heads, capacity, dim, dtype=dtype, device=device)
                for dim in (head_dim, value_dim)
            )
            self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.longest = 0
        self._even = True  # whether the host knows that all rows have length `longest`
        self._advanced = 0  # positions in `longest` that no append has written yet
        self._fixed_shapes = self.lengths.device.type != "cpu"
        self._rows = self.lengths.new_empty(0, 1)  # the index of each row, [B, 1] int64

    def append(self, key: Tensor, value: Tensor) -> None:
        """Write n positions after those that each row holds, in place.

        Args:
            key: [B, G, n, D], in the dtype and on the device of the cache.
            value: [B, G, n, Dv], with the same dtype and device.

        Raises:
            ValueError: the cache is full; another batch, number of heads, head dim or device; a
                tensor that requires a gradient while gradients are enabled.
            TypeError: another dtype.

        A call that raises leaves the cache as it was.
        """
        self._require_entry(key, value)
        n = key.shape[2]
        if self._advanced != n:
            self.advance(n)
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._write(key, value)
        else:
            self._write(key, value)

    def advance(self, n: int) -> None:
        """Do the work of the host in an append of n positions: require room and count."""
        room = self.capacity - self.longest
        if n > room:
            raise ValueError(
                f"key has {n} positions; expected at most {room}: "
                f"the cache holds {self.longest} of its capacity of {self.capacity}"
            )
        self.longest += n

    @contextmanager
    def advanced(self, n: int) -> Iterator[None]:
        """Call `advance(n)` on entry, so that an append of n positions inside skips it.

        The append then works on the device only, so that a CUDA graph can capture and replay it.
        After an error inside, such as a failed capture, `advance` is undone.
        """
        self.advance(n)
        self._advanced = n
        try:
            yield
        except BaseException:
            self.longest -= n
            raise
        finally:
            self._advanced = 0

    def buffers(self) -> tuple[Tensor, ...]:
        """Return the tensors that an append writes and attention reads."""
        return self.key, self.value, self.lengths

    def start(self) -> int | Tensor:
        """Return the next token's position: an int if the host knows it for all rows, else [B]."""
        return self.longest if self._even and not self._fixed_shapes else self.lengths

    def crop(self, length: int | Tensor) -> None:
        """Forget the positions from `length` on.

        length: an int, or [B] integers, one for each row; a row that is shorter stays as it is.

        Raises:
            ValueError: a length outside [0, capacity], another shape or device.
            TypeError: length is neither an int nor an integer tensor.
        """
        expected = f"0 to the capacity of the cache, {self.capacity}"
        if not isinstance(length, Tensor):
            length = checks.require_int("length", length)
            if not 0 <= length <= self.capacity:
                raise ValueError(f"length is {length}; expected {expected}")
            self.lengths.clamp_(max=length)
            self.longest = min(self.longest, length)
            self._even = self._even or length == 0
            return
        checks.require_integers("length", length)
        if length.shape != self.lengths.shape:
            raise checks.wrong_shape("length", length, f"[B] = [{len(self.lengths)}]")
        checks.require_device("length", length, "the cache", self.lengths)
        checks.require_values("length", length, self.capacity, expected)
        torch.minimum(self.lengths, length.to(torch.int32), out=self.lengths)
        self._even = False
        self._measure()

    def reset(self) -> None:
        """Forget all positions."""
        self.crop(0)

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
        if len(rows) == len(self.lengths):
            for x in (*self.contents(), self.lengths):
                x.copy_(x.index_select(0, rows))
        else:
            self.key, self.value, self.lengths = (x.index_select(0, rows) for x in self.buffers())
        if not self._even:  # else all rows still have the length that the host knows
            self._measure()

    def _measure(self) -> None:
        """Compute `longest` from the lengths if checks may read them: on a GPU that waits."""
        if may_read(self.lengths):
            shortest, self.longest = map(int, self.lengths.aminmax())
            self._even = shortest == self.longest

    def _over_keys(self, mask: Tensor | None, keys: int) -> Tensor | None:
        """Pad a mask or bias [.., longest] to [.., keys], the keys that attention reads."""
        if mask is None or keys == self.longest or mask.shape[-1:] != (self.longest,):
            return mask
        return F.pad(mask, (0, keys - self.longest), value=False)

    def _require_entry(self, key: Tensor, value: Tensor) -> None:
        refuse_vmap("the entries of a cache, which it writes in place", key, value)
        batch, heads = self.key.shape[:2]
        if self._fits(batch, heads, key, value):
            return
        for name, x, buffer in ("key", key, self.key), ("value", value, self.value):
            checks.require_tensor(name, x)
            dim = buffer.shape[-1]
            n = key.shape[2] if key.dim() == 4 else 0
            if x.shape != (batch, heads, n, dim):
                given = "n" if name == "key" else n
                raise checks.wrong_shape(
                    name, x, f"that of the cache, [{batch}, {heads}, {given}, {dim}]"
                )
            if x.dtype != buffer.dtype:
                raise TypeError(
                    f"{name} has dtype {x.dtype}; expected that of the cache, {buffer.dtype}"
                )
            checks.require_device(name, x, "the cache", buffer)
            if x.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"{name} requires a gradient, and a cache keeps none; "
                    "expected a call within torch.no_grad()"
                )

    def _fits(self, batch: int, heads: int, key: Any, value: Any) -> bool:
        """Return whether an entry is known to be right: a faster look than that which names what
        is wrong.
        """
        if not (type(key) is type(value) is Tensor) or key.dim() != 4:
            return False
        sizes = batch, heads, key.shape[2]
        return (
            key.shape == (*sizes, self.key.shape[-1])
            and value.shape == (*sizes, self.value.shape[-1])
            and key.dtype is value.dtype is self.key.dtype
            and key.device == value.device == self.key.device
            and key.layout is value.layout is torch.strided
            and not key.requires_grad
            and not value.requires_grad
        )

    def _write(self, key: Tensor, value: Tensor) -> None:
        n = key.shape[2]
        if self._even and not self._fixed_shapes:
            first = self.longest - n
            self.key.narrow(2, first, n).copy_(key)
            self.value.narrow(2, first, n).copy_(value)
        else:
            if len(self._rows) != len(self.lengths):  # at first, and for another batch
                self._rows = torch.arange(len(self.lengths), device=key.device).unsqueeze(1)
            places = self.lengths.long().unsqueeze(1)  # [B, n], the positions of the entry
            places = places if n == 1 else places + torch.arange(n, device=key.device)
            at = self._rows, slice(None), places  # [B, n, G, D]
            self.key[at], self.value[at] = key.transpose(1, 2), value.transpose(1, 2)
        self.lengths.add_(n)

    def _arguments(self, query: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Arguments:
        key, value = (self.key, self.value) if self._fixed_shapes else self.contents()
        lengths = None if self._even and not self._fixed_shapes else self.lengths
        options = dict(options, key_lengths=lengths, causal_alignment="bottom_right")
        options["is_causal"] = query.shape[-2] > 1
        options["bias"] = self._over_keys(options.get("bias"), key.shape[2])
        return key, value, self._over_keys(mask, key.shape[2]), options


def require_rows(index: Tensor, lengths: Tensor) -> Tensor:
    """Require indices [B'] of rows of the cache, and return them as int64."""
    checks.require_integers("index", index)
    if index.dim() != 1 or not len(index):
        raise checks.wrong_shape("index", index, "[rows], at least one")
    last = len(lengths) - 1
    checks.require_device("index", index, "the cache", lengths)
    checks.require_values("index", index, last, f"rows of the cache, 0 to {last}")
    return index.long()
