"""Batches without their padding: the tokens of all sequences, one after the other.

    tokens, packing = unpad(x, lengths)             [B, S, ..] -> [tokens, ..]
    x = pad(encoder(tokens, packing), packing)      and back: the encoder computes no padding

A `Packing` stands where a mask does: a module that attends sees by it which tokens belong together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastformer import functional

__all__ = ["Packing", "pad", "unpad"]


@dataclass(frozen=True)
class Packing:
    """Where the tokens of a packed batch stand in the padded one [batch, length, ..].

    cu_seqlens: [batch + 1] int32, where each sequence begins and ends among the tokens, as
        `packed_attention` takes it. indices: [tokens] int64, each token's place in
        [batch * length, ..]. longest: tokens of the longest sequence.
    """

    cu_seqlens: Tensor
    indices: Tensor
    batch: int
    length: int
    longest: int

    @property
    def lengths(self) -> Tensor:
        """[batch] int32: the tokens of each sequence."""
        return self.cu_seqlens.diff()


def unpad(x: Tensor, lengths: Tensor | Packing) -> tuple[Tensor, Packing]:
    """The tokens of a padded batch, and how to put them back.

    Args:
        x: [B, S, ...], any dtype; sequence b has the tokens x[b, :lengths[b]].
        lengths: [B] integers from 0 to S; or the `Packing` of another tensor of the same batch.

    Returns:
        The tokens [sum(lengths), ...], with the gradient of x, and the `Packing`. Their number has
        to be known here: on a GPU this waits for the device, once a batch.

    Raises:
        ValueError: shapes that do not fit, a length outside [0, S], several devices.
        TypeError: lengths that are not integers.

    Source: Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination".
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}; expected a tensor")
    if x.dim() < 2:
        raise ValueError(f"x has shape {functional._shape(x)}; expected [B, S, ...]")
    packing = lengths if isinstance(lengths, Packing) else _packing(x, lengths)
    if x.shape[:2] != (packing.batch, packing.length):
        raise ValueError(
            f"x has shape {functional._shape(x)}; "
            f"expected [{packing.batch}, {packing.length}, ...], as it was packed"
        )
    return x.flatten(0, 1)[packing.indices], packing


def _packing(x: Tensor, lengths: Tensor) -> Packing:
    batch, length = x.shape[:2]
    if not isinstance(lengths, Tensor):
        kind = type(lengths).__name__
        raise TypeError(f"lengths is a {kind}; expected an integer tensor or a Packing")
    if lengths.dtype not in functional._INTEGERS:
        raise TypeError(f"lengths has dtype {lengths.dtype}; expected integers")
    if lengths.shape != (batch,):
        raise ValueError(
            f"lengths has shape {functional._shape(lengths)}; expected [B] = [{batch}]"
        )
    functional._require_device("lengths", lengths, "x", x)
    low, high = (int(n) for n in torch.stack(lengths.aminmax())) if batch else (0, 0)
    if low < 0 or high > length:
        raise ValueError(
            f"lengths holds {low if low < 0 else high}; expected lengths from 0 to S = {length}"
        )
    return _packing_of(torch.arange(length, device=x.device) < lengths.view(-1, 1), high)


def _packing_of(valid: Tensor, longest: int) -> Packing:
    """Of the tokens that are True in a boolean [B, S], wherever they stand."""
    cu_seqlens = torch.zeros(len(valid) + 1, dtype=torch.int32, device=valid.device)
    cu_seqlens[1:] = valid.sum(1).cumsum(0)
    batch, length = valid.shape
    return Packing(cu_seqlens, valid.flatten().nonzero().squeeze(1), batch, length, longest)


def pad(x: Tensor, packing: Packing, value: Any = 0.0) -> Tensor:
    """The padded batch of packed tokens: what `unpad` took apart.

    Args:
        x: [tokens, ...], any dtype.
        packing: what `unpad` returned.
        value: stands where the padding is.

    Returns:
        [B, S, ...], with the gradient of x.

    Raises:
        ValueError: another number of tokens.
        TypeError: a packing that is none.
    """
    if not isinstance(packing, Packing):
        raise TypeError(f"packing is a {type(packing).__name__}; expected what unpad returned")
    _require_tokens("x", x, packing)
    padded = x.new_full((packing.batch * packing.length, *x.shape[1:]), value)
    return padded.index_put((packing.indices,), x).unflatten(0, (packing.batch, packing.length))


def _require_tokens(name: str, x: Tensor, packing: Packing) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; expected a tensor")
    tokens = packing.indices.shape[0]
    if x.dim() < 1 or x.shape[0] != tokens:
        raise ValueError(
            f"{name} has shape {functional._shape(x)}; expected the {tokens} tokens of the packing"
        )
