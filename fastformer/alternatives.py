"""torch's own ops where they compute what a kernel computes: candidates of a measurement.

A forward takes the arguments of the registered op `fastformer::<op>` and returns its outputs, and a
backward those of `fastformer::<op>_backward`; so either goes with the kernel of the other. There is
none where torch's result differs by more than rounding: a query that sees no key, a dropout mask
that is not ours, an order of memory that the caller does not expect; nor for the backward of
attention, where torch's own add in an order that changes from run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer.description import Attention, beyond_torch, unpack

Function = Callable[..., tuple[Any, ...]]
_aten = torch.ops.aten


def _ordered(x: Tensor, like: Tensor) -> Tensor:
    """Return x [B, H, S, D] in the order of memory that the kernel gives its output."""
    if like.shape[1] > 1 and like.stride(1) < like.stride(2):
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x.contiguous()


def _attention(op: Callable[..., Any]) -> Function:
    def forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        attention = unpack(rest[:-1])
        output, lse, *_ = op(query, key, value, attention.is_causal, attention.scale)
        rows = lse.reshape(*query.shape[:2], -1)[..., : query.shape[2]]  # some pad the queries
        return _ordered(output, query), rows.contiguous(), query.new_empty(0)

    return forward


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
    return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
    op = _aten._scaled_dot_product_cudnn_attention
    return op(q, k, v, None, True, 0.0, causal, False, scale=scale)


def _efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
    op = _aten._scaled_dot_product_efficient_attention
    return op(q, k, v, None, True, 0.0, causal, scale=scale)


def _layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    unbiased: bool,
) -> tuple[Tensor, ...]:
    y, mean, r = torch.native_layer_norm(input, normalized_shape, weight, bias, eps)
    return y, mean.view(-1), r.view(-1)


def _rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    y, r = _aten._fused_rms_norm(input, normalized_shape, weight, eps)
    return y, r.view(-1)


def _layer_norm_backward(
    grad: Tensor,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    unbiased: bool,
    mean: Tensor,
    r: Tensor,
    needs: list[bool],
) -> tuple[Any, ...]:
    n = len(normalized_shape)
    shape = [*input.shape[: input.dim() - n], *[1] * n]  # torch's, of a number for each row
    statistics = mean.view(shape), r.view(shape)
    op = _aten.native_layer_norm_backward
    return op(grad, input, normalized_shape, *statistics, weight, bias, needs)


def _sum_and_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    eps: float,
    unbiased: bool,
    dropout_seed: Tensor | None,
    shard: Sequence[int] | None,
) -> tuple[Tensor, ...]:
    total = residual + input
    y, mean, r = torch.native_layer_norm(total, weight.shape, weight, bias, eps)
    return y, total, mean.view(-1), r.view(-1)


def _sum_and_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    dropout_p: float,
    eps: float,
    dropout_seed: Tensor | None,
    shard: Sequence[int] | None,
) -> tuple[Tensor, ...]:
    total = residual + input
    y, r = _aten._fused_rms_norm(total, weight.shape, weight, eps)
    return y, total, r.view(-1)


class Alternative(NamedTuple):
    """What takes the place of a kernel; where it has no backward, that is the kernel's."""

    forward: Function
    backward: Function | None = None


# The candidates of each op, by the name that `explain` prints.
ALTERNATIVES: dict[str, dict[str, Alternative]] = {
    "scaled_dot_product_attention": {
        "torch (cuDNN)": Alternative(_attention(_cudnn)),
        "torch (flash)": Alternative(_attention(_flash)),
        "torch (efficient)": Alternative(_attention(_efficient)),
    },
    "layer_norm": {
        "torch (layer_norm)": Alternative(_layer_norm),
        "torch (layer_norm, backward)": Alternative(_layer_norm, _layer_norm_backward),
    },
    "rms_norm": {"torch (rms_norm)": Alternative(_rms_norm)},
    "dropout_add_layer_norm": {"torch (add, layer_norm)": Alternative(_sum_and_norm)},
    "dropout_add_rms_norm": {"torch (add, rms_norm)": Alternative(_sum_and_rms_norm)},
}


def signature(op: str, arguments: Mapping[str, Any]) -> Hashable | None:
    """Return what the choice depends on, for a call that torch's op computes; None for others."""
    if op == "scaled_dot_product_attention":
        return _of_attention(*list(arguments.values())[:4])
    if op not in ALTERNATIVES or arguments.get("dropout_p") or arguments.get("unbiased"):
        return None
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    dtype = tensors[0].dtype
    if any(x.dtype != dtype or not x.numel() or not x.is_contiguous() for x in tensors):
        return None
    rows = tuple(arguments.get("normalized_shape", ()))
    return op, dtype, tensors[0].shape, rows, len(tensors)


def _of_attention(query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> Any:
    if beyond_torch(attention):
        return None
    causal = attention.is_causal
    sizes = query.shape, key.shape, value.shape
    if causal and attention.shard is not None:
        return None
    if (causal and sizes[0][2] != sizes[1][2]) or any(0 in size for size in sizes):
        return None
    return causal, query.dtype, query.stride(), *sizes
