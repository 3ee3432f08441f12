"""Attention by torch's own op, for the calls that it computes correctly."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from fastformer.description import Attention, beyond_torch
from fastformer.dispatch.state import state
from fastformer.eager import eager, gradients_through, may_read, transformed
from fastformer.ops.attention.masks import LEAST, NO_TERMS, finite, is_causal_as_torch


def torch_computes(query: Tensor, value: Tensor, attention: Attention, others: list[str]) -> bool:
    """Return whether torch's own op on a CPU can compute this call, once all masks and terms of the
    scores are one mask.

    others: the options that `options_beyond` returns.
    """
    if not query.is_cpu or query.dtype is torch.float64 or state.by_formula:
        return False
    if transformed():  # torch's fused op on a CPU has no rule for vmap, and no second derivative
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


_FEW = 1 << 15  # weights: for more, the formula takes less time than torch's op with dropout


def drops(query: Tensor, key: Tensor, p: float, seed: Tensor | None) -> bool:
    """Return whether dropout without a seed is left to torch's op: in small calls."""
    if not p or seed is not None:
        return False
    return query.numel() * key.shape[2] <= _FEW * query.shape[3]


def options_beyond(query: Tensor, key: Tensor, attention: Attention) -> tuple[list[str], float]:
    """Return the options that `beyond_torch` names, without a dropout_p that is left to torch's op,
    and that dropout_p or 0.
    """
    others, p = beyond_torch(attention), attention.dropout_p
    if not drops(query, key, p, attention.dropout_seed):
        return others, 0.0
    others.remove("dropout_p")
    return others, p


def torch_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention: Attention,
    by_formula: Callable[..., Any],
) -> Callable[..., Any] | None:
    """Return a function of query, key, value and x that calls torch's own op, for calls with these
    layouts and options. At most one of causality, a mask and a bias may be given, x being
    `only(attention)`; otherwise return None. by_formula: the same function by the formula, for
    values with which the result of torch's op would be wrong.
    """
    others, p = options_beyond(query, key, attention)
    is_causal, scale, bias = attention.is_causal, attention.scale, attention.bias
    if not torch_computes(query, value, attention, others):
        return None
    usual = None if scale == 1.0 / math.sqrt(query.shape[3]) else scale
    with_gradient = differentiates(query, key, value, bias)
    attend: Callable[..., Tensor | None]
    if not others and is_causal_as_torch(attention):
        if usual is None and not (p or is_causal or with_gradient) and _is_long(key):
            return F.scaled_dot_product_attention
        attend = functools.partial(_plain, is_causal=is_causal, scale=usual, p=p)
    elif len(others) != 1 or is_causal or not eager(query):
        return None
    elif attention.attn_mask is not None:
        attend = functools.partial(_masked, scale=usual, p=p, with_gradient=with_gradient)
    elif bias is not None and eager(bias):
        attend = functools.partial(_biased, scale=usual, p=p, with_gradient=with_gradient)
    else:
        return None

    mask = only(attention)
    fits = mask is None or mask.dim() in (2, 4)

    def run(*tensors: Tensor) -> Any:
        out = attend(*tensors) if fits else attend(*tensors[:3], _fitting(tensors[3]))
        return by_formula(*tensors) if out is None else out

    return run


def only(attention: Attention) -> Tensor | None:
    """Return the mask or the bias of a call that has one of them."""
    return attention.bias if attention.attn_mask is None else attention.attn_mask


def fused(*given: Any, **scale: Any) -> Tensor:
    """Call torch's op. Its fused op on a CPU has no second derivative: add that of the formula."""
    out: Any = F.scaled_dot_product_attention(*given, **scale)
    if out.requires_grad and eager(out) and "FlashAttentionForCpu" in out.grad_fn.name():
        out.grad_fn.register_hook(_with_graph)
    return out


def _with_graph(found: tuple[Any, ...], grad: tuple[Any, ...]) -> tuple[Any, ...] | None:
    node: Any = torch._C._current_autograd_node()  # a hook that held it would be a cycle
    if node is None or not torch.is_grad_enabled():  # compiled autograd, or no create_graph=True
        return None
    try:
        saved = node._saved_query, node._saved_key, node._saved_value
    except Exception:  # a checkpoint, and other hooks, give each tensor once
        return None
    views = [x.view_as(x) for x in saved]  # of one tensor, perhaps
    options = node._saved_attn_mask, 0.0, node._saved_is_causal
    attend = torch.ops.aten._scaled_dot_product_attention_math
    out, _ = attend(*views, *options, scale=node._saved_scale)
    wanted = [None if g is None else x for x, g in zip(views, found)]
    return tuple(gradients_through([out], grad, wanted))


def _is_long(key: Tensor) -> bool:
    """Return whether rows have as many scores as a SIMD vector. In shorter ones torch's op ignores
    NaN in the maximum of the row, except with a mask.
    """
    exported = torch.compiler.is_exporting()  # a comparison would bound the exported sizes
    return not exported and key.shape[2] >= 16


def _plain(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None, p: float
) -> Tensor | None:
    """Call torch's op without a mask or a bias of the caller; return None if it may spread a NaN.

    Short rows get a mask: zeros to be added, or the causal mask.
    """
    rows, columns = query.shape[2], key.shape[2]
    # With dropout torch's op takes no fused path: it keeps NaN.
    if p or (_is_long(key) and not (is_causal and rows < 16)):
        return fused(query, key, value, None, p, is_causal, scale=scale)
    if eager(query):
        mask = _short_mask(rows, columns, is_causal, query.dtype)
        out = fused(query, key, value, mask, 0.0, scale=scale)
        return None if is_causal and not finite(out) else out
    if is_causal and not torch.compiler.is_exporting():
        return None
    mask = query.new_zeros(()).expand(rows, columns)
    if is_causal:
        mask = torch.ones_like(mask, dtype=torch.bool).tril()
    return fused(query, key, value, mask, 0.0, scale=scale)


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


# The largest bias of each dtype that masks its key out.
_HIDDEN = {
    x: float(torch.nextafter(torch.tensor(LEAST[x], dtype=x), torch.tensor(-math.inf, dtype=x)))
    for x in (torch.float32, torch.bfloat16)
} | {torch.float16: -math.inf}


def _masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float | None,
    p: float,
    with_gradient: bool,
) -> Tensor | None:
    """Call torch's op with a mask, boolean or floating. Return None if the result holds NaN or
    -inf, or if the gradients may.

    A result without NaN is right: torch's op returns zeros for a query that sees no key, and a key
    that is masked out for all queries did not contribute, whatever it holds.
    """
    if with_gradient and mask.shape[-2] == 1 and not (finite(key) and finite(value)):
        return None  # the gradients might not be finite
    attend = fused if with_gradient and not p else F.scaled_dot_product_attention
    out = attend(query, key, value, mask, p, scale=scale)
    return None if _holds_nan(out) else out


def _biased(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    scale: float | None,
    p: float,
    with_gradient: bool,
) -> Tensor | None:
    """Call torch's op with a bias. Return None if the gradient of torch's op would lose too many
    digits, or as `_masked` does.
    """
    if with_gradient:
        if not near_zero(bias):  # nor is a row of finfo.min alone
            return None
    elif float(bias.min()) >= LEAST[bias.dtype]:
        return F.scaled_dot_product_attention(query, key, value, bias, p, scale=scale)
    else:  # torch's op masks out -inf only
        bias = torch.threshold(bias, _HIDDEN[bias.dtype], -math.inf)
    return _masked(query, key, value, bias, scale, p, with_gradient)


def _fitting(mask: Tensor) -> Tensor:
    """Return a view of a mask of 1 or 3 dimensions with 2 or 4, which torch's fused op takes."""
    return mask[None] if mask.dim() == 3 else mask.view(1, -1)


def keeps_order(query: Tensor, value: Tensor, attention: Attention) -> bool:
    """Return whether the output of torch's op has the order of `in_order_of`: that of its fused op
    has the order of the query, any other is contiguous.
    """
    bias, made = attention.bias, torch.empty_like(query, device="meta")
    fused = not attention.dropout_p and (bias is None or not bias.requires_grad)
    fused &= value.shape[3] == query.shape[3]
    return fused and in_order_of(query, made).stride() == made.stride()


def in_order_of(query: Tensor, x: Tensor) -> Tensor:
    """Return x [B, H, S, D] in the order of [B, S, H, D] if the query is, as the kernels do."""
    if query.shape[1] > 1 and query.stride(1) < query.stride(2):
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x.contiguous()


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
