"""Attention by torch's op, where that computes the same."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from fastformer.description import Attention
from fastformer.eager import eager, formula, readable
from fastformer.ops.attention.masks import LEAST, NO_TERMS, finite, is_causal_as_torch


def torch_computes(query: Tensor, value: Tensor, attention: Attention, others: list[str]) -> bool:
    """Return whether torch's own op, the fastest one on a CPU, computes the same, given masks and
    terms of the scores. others: of `beyond_torch`.
    """
    if not query.is_cpu or query.dtype is torch.float64 or formula.always:
        return False
    if not NO_TERMS.isdisjoint(others):
        return False
    if attention.is_causal and not attention.scale > 0.0:  # torch masks out before it multiplies
        return False
    if forward_ad._current_level >= 0 and not torch.compiler.is_compiling():
        return False
    return query.numel() > 0 and value.numel() > 0


def by_torch(
    query: Tensor, key: Tensor, value: Tensor, attention: Attention, others: list[str]
) -> Tensor | None:
    """Call torch's op with causality alone, a mask alone or a bias alone; return None for any other
    description, and where key, value or result need more preparation.
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
    """Call torch's op without a mask of ours; return None where it would spread a NaN.

    In a row shorter than a vector that op drops NaN from the maximum, but not under a mask. So such
    rows get a mask that changes nothing.
    """
    rows, columns = query.shape[2], key.shape[2]
    exported = torch.compiler.is_exporting()  # a comparison would bound the sizes of the program
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
    """Return a mask [rows, columns] to add to scores: -inf where causality masks out, else 0."""
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
    """Say whether an eager tensor on the CPU, not an empty one, holds NaN, or -inf: in one pass."""
    return not float(x.detach().min() if x.requires_grad else x.min()) > float("-inf")


def _masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> Tensor | None:
    """Call torch's op with a mask, boolean or of -inf; return None where the result holds NaN.

    A result without NaN is right: a query that sees no key has zeros there, and no key that is
    masked out for all has a share in it, whatever it holds.
    """
    if mask.dim() < 2:
        mask = mask.view(1, -1)
    out = F.scaled_dot_product_attention(query, key, value, mask, 0.0, scale=scale)
    if out.requires_grad and mask.shape[-2] == 1 and not (finite(key) and finite(value)):
        return None  # the gradients would not be finite
    return None if _holds_nan(out) else out


def _biased_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float
) -> Tensor | None:
    """Call torch's op with a bias; return None where it masks out all keys of a query, and where
    the gradient of torch's op would keep too few digits.
    """
    if not readable(bias) or (differentiates(query, key, value, bias) and not near_zero(bias)):
        return None
    terms, least = bias.detach() if bias.requires_grad else bias, LEAST[bias.dtype]
    if float(terms.min()) >= least:
        mask = bias if bias.dim() > 1 else bias.view(1, -1)  # torch's op takes no fewer
        return F.scaled_dot_product_attention(query, key, value, mask, 0.0, scale=scale)
    if float(terms.amax(-1).min()) >= least:  # each query sees a key
        return _masked_attention(query, key, value, bias, scale)
    return None


def near_zero(added: Tensor) -> bool:
    """Say whether each row is known to add nothing large to some key, or to mask out all keys.

    The gradient of torch's op keeps lse alone, which a large term leaves no digits.
    """
    if not readable(added):
        return False
    peak = added.detach().amax(-1)
    low, high = map(float, peak.aminmax())
    if low > -1e3 and high < 1e3:
        return True
    return bool(((peak.abs() < 1e3) | (peak == float("-inf"))).all())


def differentiates(*tensors: Tensor | None) -> bool:
    for x in tensors:  # a generator would take twice the time
        if x is not None and x.requires_grad:
            return torch.is_grad_enabled()
    return False
