"""Attention by torch's own op, for the calls that it computes correctly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from fastformer.description import Attention
from fastformer.eager import eager, formula, may_read
from fastformer.ops.attention.masks import LEAST, NO_TERMS, finite, is_causal_as_torch


def torch_computes(query: Tensor, value: Tensor, attention: Attention, others: list[str]) -> bool:
    """Return whether torch's own op, the fastest on a CPU, can compute this call, given the masks
    and the terms of the scores.

    others: the options that `beyond_torch` returns.
    """
    if not query.is_cpu or query.dtype is torch.float64 or formula.always:
        return False
    if others and not NO_TERMS.isdisjoint(others):
        return False
    if attention.is_causal and not attention.scale > 0.0:  # torch masks before it scales
        return False
    if forward_ad._current_level >= 0 and not torch.compiler.is_compiling():
        return False
    return query.numel() > 0 and value.numel() > 0


def by_torch(
    query: Tensor, key: Tensor, value: Tensor, attention: Attention, others: list[str]
) -> Tensor | None:
    """Call torch's op with only causality, only a mask or only a bias.

    Return None for any other description, and if key, value or result need more preparation.
    others: the options that `beyond_torch` returns.
    """
    is_causal, scale = attention.is_causal, attention.scale
    if not others:
        if not is_causal_as_torch(attention):
            return None
        return _plain(query, key, value, is_causal, scale)
    if len(others) > 1 or is_causal or not eager(query):
        return None
    mask, bias = attention.attn_mask, attention.bias
    if mask is not None:
        return _masked_attention(query, key, value, mask, scale)
    return None if bias is None else _biased_attention(query, key, value, bias, scale)


def _plain(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> Tensor | None:
    """Call torch's op without a mask or a bias of the caller; return None if it may spread a NaN.

    If a row is shorter than a SIMD vector, torch's op ignores NaN in the maximum of the row, except
    with a mask. So short rows get a mask that changes nothing.
    """
    rows, columns = query.shape[2], key.shape[2]
    exported = torch.compiler.is_exporting()  # a comparison would bound the exported sizes
    if not exported and columns >= 16 and not (is_causal and rows < 16):
        return F.scaled_dot_product_attention(query, key, value, None, 0.0, is_causal, scale=scale)
    if eager(query):
        mask = _short_mask(rows, columns, is_causal, query.dtype)
        out = F.scaled_dot_product_attention(query, key, value, mask, 0.0, scale=scale)
        return None if is_causal and not finite(out) else out
    if is_causal and not exported:
        return None
    mask = query.new_zeros(()).expand(rows, columns)
    if is_causal:
        mask = torch.ones_like(mask, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(query, key, value, mask, 0.0, scale=scale)


_short_masks: dict[tuple[int, int, bool, torch.dtype], Tensor] = {}


def _short_mask(rows: int, columns: int, is_causal: bool, dtype: torch.dtype) -> Tensor:
    """Return zeros [rows, columns] to add to the scores, with -inf for future keys if causal."""
    key = rows, columns, is_causal, dtype
    mask = _short_masks.get(key)
    if mask is not None:
        return mask
    with torch.inference_mode(False):
        mask = torch.zeros((), dtype=dtype, device="cpu").expand(rows, columns)
        if is_causal:
            mask = torch.full_like(mask, float("-inf"), device="cpu").triu_(1)
    if rows * columns <= 1 << 14 and eager(mask):
        if len(_short_masks) >= 256:
            _short_masks.clear()
        _short_masks[key] = mask
    return mask


def _holds_nan(x: Tensor) -> bool:
    """Return whether a non-empty eager tensor on the CPU holds NaN or -inf, in one pass."""
    return not float(x.detach().min() if x.requires_grad else x.min()) > float("-inf")


def _masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> Tensor | None:
    """Call torch's op with a mask, boolean or of -inf; return None if the result holds NaN.

    A result without NaN is right: torch's op returns zeros for a query that sees no key, and a key
    that is masked out for all queries did not contribute, whatever it holds.
    """
    if mask.dim() < 2:
        mask = mask.view(1, -1)
    out = F.scaled_dot_product_attention(query, key, value, mask, 0.0, scale=scale)
    if out.requires_grad and mask.shape[-2] == 1 and not (finite(key) and finite(value)):
        return None  # the gradients might not be finite
    return None if _holds_nan(out) else out


def _biased_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float
) -> Tensor | None:
    """Call torch's op with a bias. Return None if the bias masks out all keys of a query, or if the
    gradient of torch's op would lose too many digits.
    """
    if not may_read(bias) or (differentiates(query, key, value, bias) and not near_zero(bias)):
        return None
    terms, least = bias.detach() if bias.requires_grad else bias, LEAST[bias.dtype]
    if float(terms.min()) >= least:
        mask = bias if bias.dim() > 1 else bias.view(1, -1)  # torch's op needs 2 dimensions
        return F.scaled_dot_product_attention(query, key, value, mask, 0.0, scale=scale)
    if float(terms.amax(-1).min()) >= least:  # each query sees a key
        return _masked_attention(query, key, value, bias, scale)
    return None


def near_zero(added: Tensor) -> bool:
    """Return whether the maximum of every row is known to be near zero, or -inf (no key is seen).
    The backward of torch's op keeps only lse. A large term leaves no digits for the scores in it.
    """
    if not may_read(added):
        return False
    peak = added.detach().amax(-1)
    low, high = map(float, peak.aminmax())
    if low > -1e3 and high < 1e3:
        return True
    return bool(((peak.abs() < 1e3) | (peak == float("-inf"))).all())


def differentiates(*tensors: Tensor | None) -> bool:
    for x in tensors:  # any() with a generator would take twice the time
        if x is not None and x.requires_grad:
            return torch.is_grad_enabled()
    return False
