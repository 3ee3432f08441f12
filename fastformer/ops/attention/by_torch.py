"""Attention by torch's own op, for the calls that it computes correctly."""

from __future__ import annotations

from typing import Any

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
    if attention.cu_seqlens_q is not None:
        return False
    if attention.is_causal and not attention.scale > 0.0:  # torch masks before it scales
        return False
    if forward_ad._current_level >= 0 and not torch.compiler.is_compiling():
        return False
    return query.numel() > 0 and value.numel() > 0


_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def usual_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    is_causal: bool,
    key_lengths: Tensor | None,
) -> Tensor | None:
    """Compute a usual call by torch's own op: tensors [B, H, S, D] of one dtype on a CPU, with the
    default scale, causality from the top left, a mask, a bias or one length of all rows, and no
    other option.

    Return None if the call may be another one, or wrong: this looks at little, so that a small call
    is fast. `by_torch` computes the same.
    """
    if not are_alike(query, key, value):
        return None
    try:
        sizes, (batch, heads, columns, dim) = query.shape, key.shape
        rows = sizes[2]
        if sizes != (batch, heads, rows, dim) or value.shape[:3] != (batch, heads, columns):
            return None
        if key_lengths is not None:
            length = _one_length(key_lengths, batch, columns)
            if length is None or mask is not None:
                return None
            if length < columns:
                columns, key, value = length, key[:, :, :length], value[:, :, :length]
        if 0 in sizes or not columns or not value.shape[3]:
            return None
        if mask is None:
            if columns < 16 or (is_causal and rows < 16):
                return None
            return F.scaled_dot_product_attention(query, key, value, None, 0.0, is_causal)
        if is_causal or not fits(mask, (batch, heads, rows, columns)) or _is_wrapped(query):
            return None
        if mask.dtype is torch.bool:
            return _masked_attention(query, key, value, mask)
        return _biased_attention(query, key, value, mask) if mask.dtype is query.dtype else None
    except (RuntimeError, ValueError, IndexError):  # no such shapes, or no dense tensors
        return None


def are_alike(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether these are tensors of one dtype on a CPU, which torch's op computes."""
    return (
        type(query) is type(key) is type(value) is Tensor
        and query.is_cpu
        and key.is_cpu
        and value.is_cpu
        and query.dtype is key.dtype is value.dtype
        and query.dtype in _DTYPES
        and forward_ad._current_level < 0
    )


def fits(mask: Any, scores: tuple[int, ...]) -> bool:
    """Return whether a mask is [Sq, Sk], or of four dimensions that broadcast to the scores."""
    if not (type(mask) is Tensor and mask.is_cpu) or _is_wrapped(mask):
        return False
    shape = mask.shape
    if shape == scores[2:]:
        return True
    return len(shape) == 4 and all(n in (1, full) for n, full in zip(shape, scores))


def _one_length(key_lengths: Tensor, batch: int, columns: int) -> int | None:
    """Return the length of all rows, or None if they differ, or if something is wrong."""
    if not (type(key_lengths) is Tensor and key_lengths.is_cpu) or _is_wrapped(key_lengths):
        return None
    if key_lengths.dtype not in (torch.int32, torch.int64) or key_lengths.shape != (batch,):
        return None
    known = key_lengths.tolist()
    length = known[0]
    return length if 0 < length <= columns and known.count(length) == batch else None


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
    if attention.key_lengths is not None and attention.shard is None:
        lengths = attention.key_lengths.view(-1, 1, 1, 1)
        mask = torch.arange(key.shape[2], device=key.device) < lengths
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
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None
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
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float | None = None
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
