"""Which keys a query sees, and what is added to their scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastformer.description import Attention
from fastformer.eager import may_read

# A bias below this, the lowest float32 times log 2, masks its key out: -inf, and the finfo.min of
# float32 and bfloat16, which overflow float32 when they are converted to base 2.
MASKED_OUT = -2.3586574359122396e38

# Options that are neither a mask nor a term of the scores: torch's op cannot compute any of them.
NO_TERMS = frozenset({"dropout_p", "softcap", "sinks"})


def visible_keys(
    key: Tensor, i: Tensor, shift: int | Tensor, attention: Attention
) -> tuple[Tensor | None, Tensor | None]:
    """Return (which query sees which key, which keys any query may see), each None for "all".

    Both are booleans that broadcast to [B, H, Sq, Sk].
    i: the indices of the queries, [Sq, 1].
    shift: the offset of the diagonal of the band, as `diagonal_shift` returns it.
    """
    k_length = key.shape[-2]
    visible, keys = None, None
    if attention.cu_seqlens_q is not None:
        begin, end, shift, _ = documents(i, attention)
        j = torch.arange(k_length, device=key.device)
        visible = (j >= begin) & (j < end)
    bias, key_lengths = attention.bias, attention.key_lengths
    left, right = (-1, -1) if attention.window is None else attention.window
    if attention.is_causal:
        right = 0
    if key_lengths is not None or left >= 0 or right >= 0:
        j = torch.arange(k_length, device=key.device)
    if key_lengths is not None:
        visible = keys = j < key_lengths.view(-1, 1, 1, 1)
    for mask in (attention.attn_mask, None if bias is None else left_by(bias)):
        if mask is None:
            continue
        mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)
        if mask.shape[-2] == 1 and mask.shape[-1] == k_length:
            keys = mask if keys is None else keys & mask
        visible = mask if visible is None else visible & mask
    if right >= 0:
        inside = j <= i + (shift + right)
        visible = inside if visible is None else visible & inside
    if left >= 0:
        inside = j >= i + (shift - left)
        visible = inside if visible is None else visible & inside
    return visible, keys


def documents(i: Tensor, attention: Attention) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (first key, end of the keys, shift of the diagonal, number) of the sequences that hold
    the queries i [Sq, 1] of a packed batch, [Sq, 1] each.
    """
    of_queries, of_keys = attention.cu_seqlens_q, attention.cu_seqlens_k
    assert of_queries is not None and of_keys is not None
    b = torch.searchsorted(of_queries[1:-1], i.to(of_queries.dtype), right=True)
    first, end = of_keys[b], of_keys[b + 1]
    if attention.causal_alignment == "bottom_right":
        return first, end, end - of_queries[b + 1], b
    return first, end, first - of_queries[b], b


def band_as_mask(
    key: Tensor, length: int, queries: Tensor, keys: Tensor, attention: Attention
) -> Attention:
    """Return the description of a packed batch, padded to `length` queries, with causality and
    window as a mask, and ALiBi as a part of the bias, because each sequence has its own diagonal.

    queries, keys: [B], the number of queries and keys of each sequence.
    """
    if not attention.is_causal and attention.window is None and attention.alibi_slopes is None:
        return attention
    shift: int | Tensor = 0
    if attention.causal_alignment == "bottom_right":
        shift = (keys - queries).long().view(-1, 1, 1, 1)
    i = torch.arange(length, device=key.device).view(-1, 1)
    mask, _ = visible_keys(key, i, shift, attention)
    added = added_to_scores(attention, i, shift, key)
    return attention._replace(
        attn_mask=mask, is_causal=False, window=None, bias=added, alibi_slopes=None
    )


# The smallest bias of each dtype that does not mask its key out.
LEAST = {
    dtype: max(MASKED_OUT, torch.finfo(dtype).min)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)
}


def left_by(bias: Tensor) -> Tensor | None:
    """Return the keys that a bias does not mask out, or None if it is known to mask out none."""
    bias, least = bias.detach() if bias.requires_grad else bias, LEAST[bias.dtype]
    if may_read(bias) and (bias.numel() == 0 or float(bias.min()) >= least):
        return None
    return ~(bias < least)  # NaN stays


def diagonal_shift(query: Tensor, key: Tensor, attention: Attention) -> int | Tensor:
    """Return the shift of the diagonal: 0, or with "bottom_right" the shift that aligns the last
    query with the last key.
    """
    if attention.causal_alignment == "top_left":
        return 0
    if attention.key_lengths is None:
        return key.shape[-2] - query.shape[-2]
    return (attention.key_lengths.long() - query.shape[-2]).view(-1, 1, 1, 1)


def added_to_scores(
    attention: Attention, i: Tensor, shift: int | Tensor, key: Tensor
) -> Tensor | None:
    """Return the term bias - slope |i + shift - j| of the scores, or None."""
    bias, slopes = attention.bias, attention.alibi_slopes
    if slopes is None:
        return bias
    slopes = slopes[..., None, None]
    if attention.cu_seqlens_q is not None:
        *_, shift, b = documents(i, attention)
        if slopes.dim() == 4:
            slopes = slopes[b, :, 0, 0].permute(2, 0, 1)  # [H, Sq, 1]
    distance = (i + shift - torch.arange(key.shape[-2], device=key.device)).abs()
    slopes = slopes.to(torch.float64 if key.dtype == torch.float64 else torch.float32)
    alibi = slopes * -distance
    return alibi if bias is None else alibi + bias


def score_terms(
    query: Tensor, key: Tensor, attention: Attention, others: list[str]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return `visible_keys` and `added_to_scores`, None for no change; others: `beyond_torch`."""
    if not attention.is_causal and NO_TERMS.issuperset(others):
        return None, None, None
    i = torch.arange(query.shape[2], device=query.device).view(-1, 1)
    shift = diagonal_shift(query, key, attention)
    return *visible_keys(key, i, shift, attention), added_to_scores(attention, i, shift, key)


def finite(x: Tensor) -> bool:
    """Return whether x is known to be finite: its sum is. So a sum that overflows gives False."""
    return may_read(x) and math.isfinite(x.detach().sum() if x.requires_grad else x.sum())


def hidden_rows(keys: Tensor | None, key: Tensor, value: Tensor) -> Tensor | None:
    """Return a boolean [.., Sk, 1], True for the keys that no query may see.

    The caller zeroes these rows of key and value: they may hold NaN, and 0 times NaN is NaN. Return
    None if every key may be seen, or if key and value are known to be finite.
    """
    if keys is None or (finite(key) and finite(value)):
        return None
    return ~keys.transpose(-2, -1)


def is_causal_as_torch(attention: Attention) -> bool:
    """Return whether the call is not causal, or causal from the top left, as in torch's op."""
    return not attention.is_causal or attention.causal_alignment == "top_left"
