"""The norms in eager PyTorch, and a differentiable backward of those after a residual sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.dispatch.state import state, use_formula
from fastformer.eager import differentiable, gradients_through
from fastformer.ops.dropout import dropout, dropout_scale, dropped_rows, without


def layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    unbiased: bool = False,
) -> Tensor:
    dtype = input.dtype
    mixed = weight is not None and weight.dtype is not dtype
    mixed = mixed or (bias is not None and bias.dtype is not dtype)
    if not unbiased and not mixed and dtype is not torch.float64:
        if dtype is torch.float16 and input.is_cpu:  # torch's op rounds 1 / std to float16: inf
            w, b = (x if x is None else x.float() for x in (weight, bias))
            return torch.layer_norm(input.float(), normalized_shape, w, b, eps).to(dtype)
        return torch.layer_norm(input, normalized_shape, weight, bias, eps)
    x = input if input.dtype == torch.float64 else input.float()
    features = tuple(range(-len(normalized_shape), 0))
    if unbiased:  # std, not var.sqrt(): its gradient is finite in a row of equal elements
        std, mean = torch.std_mean(x, features, correction=1, keepdim=True)
        y = (x - mean) / (std + eps)
    else:
        variance, mean = torch.var_mean(x, features, correction=0, keepdim=True)
        y = (x - mean) * (variance + eps).rsqrt()
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(input.dtype).contiguous()  # as F.layer_norm returns it, whatever the strides


def direct_layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    unbiased: bool,
) -> Callable[..., Tensor] | None:
    """Return torch's own op as a function of the tensors, or None where `layer_norm` computes more
    than that.
    """
    dtypes = {x.dtype for x in (input, weight, bias) if x is not None}
    if unbiased or len(dtypes) > 1 or input.dtype not in (torch.float32, torch.bfloat16):
        return None
    if weight is None and bias is not None:
        return lambda x, bias: torch.layer_norm(x, normalized_shape, None, bias, eps)
    return lambda x, weight=None, bias=None: torch.layer_norm(
        x, normalized_shape, weight, bias, eps
    )


def rms_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    mixed = weight is not None and weight.dtype != input.dtype
    if not mixed and input.dtype != torch.float64 and not state.by_formula:
        return F.rms_norm(input, normalized_shape, weight, eps)
    x = input if input.dtype == torch.float64 else input.float()
    features = tuple(range(-len(normalized_shape), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    y = x * (x.square().mean(features, keepdim=True) + eps).rsqrt()
    return (y if weight is None else y * weight).to(input.dtype).contiguous()


def dropout_add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float = 0.0,
    eps: float = 1e-5,
    *,
    unbiased: bool = False,
    dropout_seed: Tensor | None = None,
    input_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if input_bias is not None:
        input = (input + input_bias).to(input.dtype)
    total = _dropout_add(input, residual, list(weight.shape), dropout_p, dropout_seed)
    return layer_norm(total, list(weight.shape), weight, bias, eps, unbiased=unbiased), total


def dropout_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    dropout_p: float = 0.0,
    eps: float | None = None,
    *,
    dropout_seed: Tensor | None = None,
    input_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if input_bias is not None:
        input = (input + input_bias).to(input.dtype)
    total = _dropout_add(input, residual, list(weight.shape), dropout_p, dropout_seed)
    return rms_norm(total, list(weight.shape), weight, eps), total


def _dropout_add(
    input: Tensor,
    residual: Tensor,
    shape: Sequence[int],
    p: float,
    seed: Tensor | None,
) -> Tensor:
    """Return residual + dropout(input), contiguous as from the kernels. shape: that of one row."""
    if p and seed is None:
        return (residual + dropout(input, p)).contiguous()
    total = torch.add(residual, masked(input, shape, p, seed), alpha=dropout_scale(p))
    return total.contiguous()


def masked(x: Tensor, shape: Sequence[int], p: float, seed: Tensor | None) -> Tensor:
    """Return x [.., *shape] with zeros where `dropped_rows` removes an element, not scaled."""
    if p == 0:
        return x
    assert seed is not None
    columns = math.prod(shape)
    rows = x.numel() // columns if columns else 0
    return without(dropped_rows(seed, rows, columns, p), x)


def dropout_add_norm_backward(
    norm: Callable[..., Tensor],
    *,
    grad_normalized: Tensor,
    grad_residual_out: Tensor | None,
    residual_out: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float,
    unbiased: bool | None = None,
    dropout_p: float,
    dropout_seed: Tensor | None,
    input_bias: Tensor | None,
    needs: list[bool],
    **statistics: Tensor,
) -> list[Tensor | None]:
    """Return differentiable gradients of (input, residual, weight, bias, input_bias), without bias
    for `rms_norm`, those that `needs` asks for. norm: `layer_norm` or `rms_norm`.

    The gradient of residual_out is the sum of grad_residual_out and its gradient through the norm.
    """
    shape = list(weight.shape)
    wanted = zip((residual_out, weight, bias), (True, *needs[2:]))
    given = [differentiable(x) if need and x is not None else x for x, need in wanted]
    options = {} if unbiased is None else {"bias": given[2], "unbiased": unbiased}
    with use_formula():
        normalized = norm(given[0], shape, given[1], eps=eps, **options)
    grad, *rest = gradients_through([normalized], [grad_normalized], given)
    assert grad is not None  # residual_out is an output of the op
    if grad_residual_out is not None:
        grad = grad + grad_residual_out
    grad_input = masked(grad, shape, dropout_p, dropout_seed) * dropout_scale(dropout_p)
    if unbiased is None:
        rest.pop()
    if input_bias is not None:
        rest.append(grad_input.reshape(-1, *shape).sum(0, dtype=input_bias.dtype))
    grads = [grad_input, grad, *rest, None]
    return [g if need else None for g, need in zip(grads, needs)]
