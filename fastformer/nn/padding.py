"""Batches without their padding: the tokens of all sequences, one after the other.

    tokens, packing = unpad(x, lengths)             [B, S, ..] -> [tokens, ..]
    x = pad(encoder(tokens, packing), packing)      and back: the encoder computes no padding

A `Packing` replaces a mask: it tells an attention module which tokens form a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastformer import checks
from fastformer.mask_tiles import BlockMask


@dataclass(frozen=True)
class Packing:
    """The positions of the tokens of a packed batch in the padded batch [batch, length, ..].

    cu_seqlens: [batch + 1] int32, as `packed_attention` takes it: sequence b has the tokens
        cu_seqlens[b] .. cu_seqlens[b + 1] - 1. indices: [tokens] int64, each token's index in the
        flattened padded batch [batch * length, ..]. longest: tokens of the longest sequence.
    mask: a `BlockMask` [1, 1 or H, tokens, tokens] for the self-attention of every layer, or None;
        `packing.with_mask(mask)` adds it.

    Raises TypeError for an argument of another type or dtype, ValueError for a negative number,
    another shape or several devices.
    """

    cu_seqlens: Tensor
    indices: Tensor
    batch: int
    length: int
    longest: int
    mask: BlockMask | None = None

    def __post_init__(self) -> None:
        checks.require_size(0, batch=self.batch, length=self.length, longest=self.longest)
        for name, dtype in (("cu_seqlens", torch.int32), ("indices", torch.int64)):
            x = getattr(self, name)
            checks.require_tensor(name, x)
            if x.dtype != dtype:
                raise TypeError(f"{name} has dtype {x.dtype}; expected {dtype}")
            if x.dim() != 1 or (name == "cu_seqlens" and x.shape[0] != self.batch + 1):
                expected = "[batch + 1]" if name == "cu_seqlens" else "[tokens]"
                raise checks.wrong_shape(name, x, expected)
        checks.require_device("indices", self.indices, "cu_seqlens", self.cu_seqlens)
        if self.mask is not None:
            checks.require_instance("mask", self.mask, BlockMask, "a BlockMask or None")

    @property
    def lengths(self) -> Tensor:
        """Return the number of tokens of each sequence, [batch] int32."""
        return self.cu_seqlens.diff()

    @property
    def positions(self) -> Tensor:
        """Return the position of each token in its row of the padded batch, [tokens] int64."""
        return self.indices % max(1, self.length)

    def with_mask(self, mask: BlockMask | None) -> Packing:
        """Return the packing with a mask of its tokens, which self-attention applies beside the
        bounds of the sequences.
        """
        return replace(self, mask=mask)

    def to(self, device: torch.device, non_blocking: bool = False) -> Packing:
        """Return a copy of the packing with its tensors on the device."""
        mask = None if self.mask is None else self.mask.to(device, non_blocking)
        return self._with(lambda x: x.to(device, non_blocking=non_blocking)).with_mask(mask)

    def pin_memory(self) -> Packing:
        """Return a copy of the packing with its tensors in pinned memory."""
        return self._with(Tensor.pin_memory)

    def _with(self, f: Callable[[Tensor], Tensor]) -> Packing:
        return replace(self, cu_seqlens=f(self.cu_seqlens), indices=f(self.indices))


AnyMask = Tensor | BlockMask | Packing | None  # what the layers take as a mask


def unpad(x: Tensor, lengths: Tensor | Packing) -> tuple[Tensor, Packing]:
    """Return the tokens of a padded batch without the padding, and the `Packing` to put them back.

    Args:
        x: [B, S, ...], any dtype; sequence b has the tokens x[b, :lengths[b]].
        lengths: [B] integers from 0 to S; or the `Packing` of another tensor of the same batch.

    Returns:
        The tokens [sum(lengths), ...], through which gradients reach x, and the `Packing`. The host
        needs the number of tokens: with lengths on a GPU the call waits for the device, with a
        `Packing` it does not.

    Raises:
        ValueError: shapes that do not fit, a length outside [0, S], several devices, or the meta
            device.
        TypeError: lengths that are not integers.

    Source: Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination".
    """
    checks.require_tensor("x", x)
    if x.dim() < 2:
        raise checks.wrong_shape("x", x, "[B, S, ...]")
    packing = lengths if isinstance(lengths, Packing) else _packing(x, lengths)
    if x.shape[:2] != (packing.batch, packing.length):
        raise checks.wrong_shape(
            "x", x, f"[{packing.batch}, {packing.length}, ...], as it was packed"
        )
    return x.flatten(0, 1)[packing.indices], packing


def _packing(x: Tensor, lengths: Tensor) -> Packing:
    batch, length = x.shape[:2]
    checks.require_tensor("lengths", lengths, "an integer tensor or a Packing")
    if lengths.shape != (batch,):
        raise checks.wrong_shape(
            "lengths", lengths, f"[B] = [{batch}], as mask.sum(1) if padding is last"
        )
    checks.require_integers("lengths", lengths)
    checks.require_device("lengths", lengths, "x", x)
    if lengths.is_meta:
        raise ValueError("lengths is on meta; expected lengths that are known")
    low, high = (int(n) for n in torch.stack(lengths.aminmax())) if batch else (0, 0)
    if low < 0 or high > length:
        raise ValueError(
            f"lengths holds {low if low < 0 else high}; expected lengths from 0 to S = {length}"
        )
    return packing_of(torch.arange(length, device=x.device) < lengths.view(-1, 1), high)


def packing_of(valid: Tensor, longest: int) -> Packing:
    """Return the `Packing` of the tokens at the True positions of `valid`, a boolean [B, S]."""
    cu_seqlens = torch.zeros(len(valid) + 1, dtype=torch.int32, device=valid.device)
    cu_seqlens[1:] = valid.sum(1).cumsum(0)
    batch, length = valid.shape
    return Packing(cu_seqlens, valid.flatten().nonzero().squeeze(1), batch, length, longest)


def without_gaps(packing: Packing) -> Packing:
    """Return the packing whose sequences begin at position 0 and have no padding inside."""
    lengths, first = packing.lengths, packing.cu_seqlens[:-1]
    moved = torch.arange(packing.batch, device=first.device) * packing.length - first
    moved = moved.repeat_interleave(lengths)
    return replace(packing, indices=torch.arange(len(moved), device=first.device) + moved)


def pad(x: Tensor, packing: Packing, value: complex = 0.0) -> Tensor:
    """Put packed tokens back into their padded batch: the inverse of `unpad`.

    Args:
        x: [tokens, ...], any dtype.
        packing: what `unpad` returned.
        value: the number that fills the padding; the dtype of x has to hold it.

    Returns:
        [B, S, ...], through which gradients reach x.

    Raises:
        ValueError: another number of tokens, several devices, a value that x cannot hold.
        TypeError: packing is not a `Packing`, value is not a number.
    """
    checks.require_instance("packing", packing, Packing, "what unpad returned")
    require_tokens("x", x, packing)
    value = checks.plain_number(value)
    _require_value(x, value)
    padded = x.new_full((packing.batch * packing.length, *x.shape[1:]), value)
    return padded.index_put((packing.indices,), x).unflatten(0, (packing.batch, packing.length))


def require_tokens(name: str, x: Tensor, packing: Packing) -> None:
    checks.require_tensor(name, x)
    checks.require_device(name, x, "packing", packing.indices)
    tokens = packing.indices.shape[0]
    if x.dim() < 1 or x.shape[0] != tokens:
        raise checks.wrong_shape(name, x, f"the {tokens} tokens of the packing")


def _require_value(x: Tensor, value: complex) -> None:
    """Require a number that the dtype of x can hold: an int tensor would turn 0.5 into 0."""
    if isinstance(value, complex) and x.is_complex():
        return
    checks.require_instance("value", value, (int, float), "a number that x can hold")
    assert not isinstance(value, complex)
    if x.is_floating_point() or x.is_complex():
        return
    limits = None if x.dtype == torch.bool else torch.iinfo(x.dtype)
    low, high = (0, 1) if limits is None else (limits.min, limits.max)
    if not low <= value <= high or value != int(value):
        raise ValueError(f"value is {value}; expected one that {x.dtype}, the dtype of x, holds")
