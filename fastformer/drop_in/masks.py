"""The masks of Hugging Face models, as fastformer's attention reads them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.eager import may_read
from fastformer.mask_tiles import BlockMask

NAME = "fastformer"  # of the attention implementation
Sides = tuple[int | None, int | None]  # left and right bound of a band


class Sequences(NamedTuple):
    """The sequences of a packed batch: one row that holds them one after the other.

    offsets: [sequences + 1] int32, the cumulative lengths, from 0. longest: the largest length.
    """

    offsets: Tensor
    longest: int

    @classmethod
    def of_indices(cls, indices: Tensor) -> Sequences | None:
        """Return the sequences from the index of each token's sequence, [1, T], or None for one.

        The values are read, which waits for a GPU.
        """
        starts = [i + 1 for i in indices[0].diff().nonzero().flatten().tolist()]
        if not starts:
            return None
        ends = [*starts, indices.shape[1]]
        offsets = torch.tensor([0, *ends], dtype=torch.int32, device=indices.device)
        return cls(offsets, max(end - start for start, end in zip([0, *starts], ends)))


class _UnsupportedError(ValueError, AttributeError):
    """A ValueError, and an AttributeError so that hasattr returns False."""


@dataclass(eq=False, repr=False)
class Mask:
    """Which keys each query sees in a forward, for `attention` to read. `shape` is [B, 1, Sq, Sk].

    It is not a tensor, so that no code can mistake it for another kind of mask: integers 1 and 0,
    or floats that are added to the scores. A model may apply the operations that a boolean mask of
    PyTorch (True keeps a key) supports: index it, change its shape or device, combine it with & and
    |, invert it, concatenate several, use it as the condition of torch.where. Anything else raises
    an error that names the model.

    visible: boolean [B or 1, 1, 1 or Sq, Sk], True for a visible key, or None for all keys.
    left, right: query i sees only the keys from i - left to i + right, where positions are counted
    so that the last query has the position of the last key; None is no bound. held: [B] int32, all
    equal: the number of keys that a buffer holds at its beginning. No other key is visible, and the
    last query has the position of the last held key. None if the buffer is full. sequences: those
    of a packed batch, of which a query sees only keys of its own; None if the batch is not packed.
    """

    shape: tuple[int, ...]
    visible: Tensor | None
    left: int | None
    right: int | None
    device: torch.device | str
    owner: str
    held: Tensor | None = None
    sequences: Sequences | None = None
    # position_ids, and this mask with the sequences that they separate
    by_positions: tuple[Tensor, Mask] | None = None

    dtype = torch.bool

    def dim(self) -> int:
        return len(self.shape)

    ndim = property(dim)

    def size(self, dim: int | None = None) -> int | tuple[int, ...]:
        return self.shape if dim is None else self.shape[dim]

    def complete(self) -> Tensor:
        """Return the mask as a boolean tensor of shape `self.shape`."""
        bounds = (self.left, self.right, self.held, self.sequences)
        if self.visible is not None and all(bound is None for bound in bounds):
            return self.visible.expand(self.shape)
        q_length, k_length = self.shape[2:]
        end = k_length if self.held is None else self.held[0]
        j = torch.arange(k_length, device=self.device)
        i = torch.arange(-q_length, 0, device=self.device)[:, None] + end
        seen = (j < end).expand(q_length, k_length)
        if self.left is not None:
            seen = seen & (j >= i - self.left)
        if self.right is not None:
            seen = seen & (j <= i + self.right)
        if self.sequences is not None:
            of_token = torch.bucketize(j, self.sequences.offsets[1:], right=True)
            seen = seen & (of_token[:, None] == of_token)
        return (seen if self.visible is None else seen & self.visible).expand(self.shape)

    def of_sequences(self, sequences: Sequences) -> Mask:
        """Return the mask of a packed batch whose sequences have this band."""
        sides = self.left, self.right
        return type(self)(self.shape, None, *sides, self.device, self.owner, None, sequences)

    def _of(self, visible: Tensor) -> Mask:
        shape = tuple(visible.shape)
        return type(self)(shape, visible, None, None, visible.device, self.owner)

    def to(self, *args: Any, **kwargs: Any) -> Mask:
        """Return the mask on another device. A dtype argument is ignored."""
        device = kwargs.get("device", args[0] if args else None)
        device = device.device if isinstance(device, Tensor) else device
        if device is None or isinstance(device, torch.dtype):
            return self
        visible, held = (None if x is None else x.to(device) for x in (self.visible, self.held))
        packed, sides = self.sequences, (self.left, self.right)
        if packed is not None:
            packed = packed._replace(offsets=packed.offsets.to(device))
        return type(self)(self.shape, visible, *sides, device, self.owner, held, packed)

    def contiguous(self) -> Mask:
        return self

    clone = detach = contiguous

    def __getitem__(self, index: Any) -> Mask:
        parts = index if isinstance(index, tuple) else (index,)
        for part, n in zip(parts, self.shape):
            is_full = isinstance(part, slice) and part.start in (None, 0) and part.step in (None, 1)
            if not (is_full and (part.stop is None or part.stop >= n)):
                return self._of(self.complete()[index])
        return self

    def __and__(self, other: object) -> Mask:
        return self._of(self.complete() & _boolean(other, self))

    def __or__(self, other: object) -> Mask:
        return self._of(self.complete() | _boolean(other, self))

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Tensor:
        return ~self.complete()

    logical_not = __invert__

    def __getattr__(self, name: str) -> NoReturn:
        if name[:2] == "__":
            raise AttributeError(name)
        raise _unsupported(self.owner, name)


def _unsupported(owner: str, what: str) -> _UnsupportedError:
    return _UnsupportedError(
        f"{owner} computes with its attention mask by itself ({what}): it is not supported by "
        f"attn_implementation={NAME!r}, whose masks are read by fastformer's attention alone; take "
        "'eager' or 'sdpa' for this model"
    )


def _boolean(x: object, mask: Mask) -> Tensor:
    x = x.complete() if isinstance(x, Mask) else x
    if not isinstance(x, Tensor) or x.dtype != torch.bool:
        raise _unsupported(mask.owner, "it is joined with what is not boolean")
    return x


def _tensor_method(name: str) -> Callable[..., Mask]:
    """Return a method of Mask that applies the Tensor method `name` to the complete mask."""

    def method(self: Mask, *args: object, **kwargs: object) -> Mask:
        return self._of(getattr(self.complete(), name)(*args, **kwargs))

    return method


def _unsupported_method(name: str) -> Callable[..., NoReturn]:
    """Return a method of Mask that raises an error for the operation `name`."""

    def method(self: Mask, *args: object) -> NoReturn:
        raise _unsupported(self.owner, name)

    return method


for _name in ("expand", "flatten", "index_select", "repeat", "repeat_interleave", "reshape"):
    setattr(Mask, _name, _tensor_method(_name))
for _name in ("squeeze", "transpose", "unsqueeze", "view"):
    setattr(Mask, _name, _tensor_method(_name))
for _name in ("add", "sub", "mul", "truediv", "matmul"):
    setattr(Mask, f"__{_name}__", _unsupported_method(_name))
    setattr(Mask, f"__r{_name}__", _unsupported_method(_name))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "bool", "len", "iter", "setitem"):
    setattr(Mask, f"__{_name}__", _unsupported_method(_name))


class _FunctionMask(Mask):
    """A Mask that PyTorch's functions accept, by `__torch_function__`.

    Under torch.compile a plain Mask is used instead: the tracer would treat every call with a
    `_FunctionMask` argument, for example a checkpoint, as a PyTorch function.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Mask | Tensor | tuple[Tensor, ...]:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if func is torch.cat and args and all(isinstance(x, Mask) for x in args[0]):
            parts = [x.complete() for x in args[0]]
            return args[0][0]._of(torch.cat(parts, *args[1:], **kwargs))
        if func is torch.where and args and isinstance(args[0], Mask):
            return torch.where(args[0].complete(), *args[1:], **kwargs)
        masks = [x for x in (*args, *kwargs.values()) if isinstance(x, Mask)]
        if masks and name in _JOINS:
            return _JOINS[name](masks[0], next(x for x in args if x is not masks[0]))
        if masks and name in ("bitwise_not", "logical_not"):
            return ~masks[0]
        for sequence in args:
            if isinstance(sequence, (list, tuple)):
                masks += [x for x in sequence if isinstance(x, Mask)]
        raise _unsupported(masks[0].owner if masks else "the model", name)


_JOINS = {
    **dict.fromkeys(("__and__", "bitwise_and", "logical_and"), operator.and_),
    **dict.fromkeys(("__or__", "bitwise_or", "logical_or"), operator.or_),
}


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., object] | None = None,
    attention_mask: Mask | BlockMask | Tensor | None = None,
    allow_is_causal_skip: bool = False,
    allow_is_bidirectional_skip: bool = False,
    config: object = None,
    **kwargs: Any,
) -> Mask | BlockMask:
    """Return a `Mask` of the keys that each query sees in a forward.

    The `Mask` holds the padding, a band, both or neither, if the pattern is transformers' own
    causal, bidirectional or sliding-window pattern and the last query has the position of the last
    key. For a static cache that is not full it also holds the number of filled keys, and for a
    packed batch of one row, which transformers finds by its position_ids, the offsets of its
    sequences. For any other pattern it holds the complete mask [B, 1, Sq, Sk] of transformers'
    sdpa: chunks, patterns combined by `and` and `or`; under torch.compile, also packed sequences
    and sliding windows. Only for an eager tensor on the CPU does the function check whether there
    is padding at all: on a GPU the check would synchronize, and under torch.compile the values are
    not available.

    Args:
        batch_size, q_length, kv_length: B, Sq, Sk.
        q_offset, kv_offset: the positions of the first query and of the first key.
        mask_function: (b, h, i, j) -> whether position i sees position j; causal by default.
        attention_mask: boolean [B, n], False at padding, where n may differ from kv_offset + Sk;
            None is no padding. A `Mask` or a `BlockMask` [B, 1 or H, Sq, Sk], which is complete, is
            returned unchanged.
        allow_is_causal_skip, allow_is_bidirectional_skip: if both are False, the complete mask is
            wanted. transformers passes at most one of them as True, depending on the pattern. Both
            are False when decoding with a static cache; the number of filled keys is enough there.
        config: the model's config, for its name in error messages.
        kwargs: the other arguments of `sdpa_mask`.

    Source: `sdpa_mask` of huggingface/transformers.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if isinstance(attention_mask, (Mask, BlockMask)):
        return attention_mask
    owner = getattr(config, "model_type", None) or "the model"
    kind = Mask if torch.compiler.is_compiling() else _FunctionMask
    shape, device = (batch_size, 1, q_length, kv_length), kwargs.get("device", "cpu")
    mask_function = causal_mask_function if mask_function is None else mask_function
    keys = slice(kv_offset, kv_offset + kv_length)
    indices, of_one = _packed(mask_function)
    if indices is not None and attention_mask is None and (batch_size, q_length) == indices.shape:
        sides = _sides(of_one)
        if sides is not None and batch_size == 1 and q_length == kv_length:
            sequences = Sequences.of_indices(indices)
            band = _within(sides, q_length, kv_length)
            return kind(shape, None, *band, device, owner, None, sequences)
    sides = _sides(mask_function)
    aligned = isinstance(q_offset, int) and q_offset + q_length == keys.stop
    if sides is not None and sides[1] == 0 and kv_offset == 0 and not aligned:
        held = _held(q_offset, shape, device)
        if held is not None and _is_padding_mask(attention_mask, 0):
            visible = _padding_of_buffer(attention_mask, kv_length, held)
            return kind(shape, visible, *_within(sides, q_length, kv_length), device, owner, held)
    banded = sides == (None, None) or (sides is not None and aligned)
    skip = allow_is_causal_skip or allow_is_bidirectional_skip
    if not (banded and skip and _is_padding_mask(attention_mask, keys.stop)):
        kwargs.update(q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function)
        kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        full = sdpa_mask(batch_size, q_length, kv_length, attention_mask=attention_mask, **kwargs)
        return kind(shape, full, None, None, device, owner)
    assert sides is not None
    left, right = _within(sides, q_length, kv_length)
    return kind(shape, _padding(attention_mask, keys), left, right, device, owner)


def _within(sides: Sides, q_length: int, kv_length: int) -> Sides:
    """Return the bounds of the band, with None for a bound that excludes no key."""
    left, right = sides
    if left is not None and left >= kv_length - 1:
        left = None
    if right is not None and right >= q_length - 1:
        right = None
    return left, right


def _held(
    q_offset: int | Tensor, shape: tuple[int, ...], device: torch.device | str
) -> Tensor | None:
    """Return how many keys a buffer holds, [B] int32, if the queries are the last of these keys.

    Return None if q_offset is neither an int nor a tensor of one number, or if it is an int and
    the queries end past the buffer.
    """
    batch, _, q_length, k_length = shape
    if isinstance(q_offset, Tensor):
        if q_offset.numel() != 1:
            return None
        return (q_offset.reshape(1) + q_length).to(torch.int32).repeat(batch)
    if not isinstance(q_offset, int) or q_offset + q_length > k_length:
        return None
    return torch.full((batch,), q_offset + q_length, dtype=torch.int32, device=device)


def _padding_of_buffer(attention_mask: Tensor | None, k_length: int, held: Tensor) -> Tensor | None:
    """Return the padding mask [B, 1, 1, Sk] from boolean [B, n], as `_padding` does, for any n.

    Return None if the held keys are known to contain no padding.
    """
    if attention_mask is None:
        return None
    n = min(int(held[0]), k_length) if may_read(held) else k_length + 1
    if attention_mask.shape[1] >= n and _padding(attention_mask, slice(0, n)) is None:
        return None
    padding = attention_mask[:, None, None, :k_length]
    return F.pad(padding, (0, k_length - padding.shape[3]))


def _is_padding_mask(attention_mask: Tensor | None, positions: int) -> bool:
    """Return whether attention_mask is None or boolean [B, n] with n >= positions."""
    return attention_mask is None or (
        attention_mask.dtype == torch.bool
        and attention_mask.dim() == 2
        and attention_mask.shape[1] >= positions
    )


def _padding(attention_mask: Tensor | None, keys: slice) -> Tensor | None:
    """Return the padding mask [B, 1, 1, Sk] from boolean [B, n], or None if it has no padding.

    The values are read only where that does not wait for a device.
    """
    if attention_mask is None:
        return None
    padding = attention_mask[:, None, None, keys]
    return None if may_read(padding) and padding.all() else padding


def _sides(mask_function: Callable[..., object]) -> Sides | None:
    """Return how far a query sees to the left and to the right, or None for an unknown pattern."""
    from transformers import masking_utils

    causal = masking_utils.causal_mask_function
    bidirectional = masking_utils.bidirectional_mask_function
    if mask_function is causal:
        return None, 0
    if mask_function is bidirectional:
        return None, None
    if torch.compiler.is_compiling():  # dynamo cannot trace reads of a closure
        return None
    overlay, base = (*_captured(mask_function, "mask_functions", ()), None, None)[:2]
    window = _captured(overlay, "sliding_window", None)
    kind = getattr(overlay, "__qualname__", "").partition(".")[0]
    if kind == "sliding_window_overlay" and base is causal:
        return window - 1, 0
    if kind == "sliding_window_bidirectional_overlay" and base is bidirectional:
        return window, window
    return None


def _packed(mask_function: Callable[..., object]) -> tuple[Tensor | None, Callable[..., object]]:
    """Return (the index of each token's sequence [B, T], the pattern within a sequence) of
    transformers' pattern for packed sequences; (None, the pattern) of any other.
    """
    if not torch.compiler.is_compiling():
        parts = _captured(mask_function, "mask_functions", ())
        indices = [_captured(part, "packed_sequence_mask", None) for part in parts]
        if len(parts) == 2 and (indices[0] is None) != (indices[1] is None):
            at = int(indices[0] is None)
            inner = parts[1 - at]
            # It may be given positions within the sequence, in which a band is the same.
            return indices[at], _captured(inner, "mask_function", inner)
    return None, mask_function


def _captured(function: Any, name: str, default: Any) -> Any:
    """Return the variable `name` from the function's closure, or the default."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return function.__closure__[names.index(name)].cell_contents if name in names else default
