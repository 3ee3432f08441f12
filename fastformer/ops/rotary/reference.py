"""Rotary positions in eager PyTorch, and a differentiable backward."""

from __future__ import annotations

import torch
from torch import Tensor

from fastformer.eager import differentiable, gradients_through


def rotary_embedding(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    if query.dim() == 3 or cos.dim() == 3:  # [T, 1, R] or [B, 1, S, R]: the same for all heads
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (
        _rotated(_normalized(query, query_norm, eps), cos, sin, interleaved).to(query.dtype),
        _rotated(_normalized(key, key_norm, eps), cos, sin, interleaved).to(key.dtype),
    )


def _normalized(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return the RMSNorm of x over its last dimension, or x, in float32 or float64."""
    x = x if x.dtype == torch.float64 else x.float()
    if weight is None:
        return x
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return x with its first R features rotated; cos and sin [.., R] broadcast to them."""
    r = cos.shape[-1]
    rotary, rest = x[..., :r], x[..., r:]
    if interleaved:
        turned = torch.stack((-rotary[..., 1::2], rotary[..., ::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-rotary[..., r // 2 :], rotary[..., : r // 2]), -1)
    rotary = rotary * cos + turned * sin
    return torch.cat((rotary, rest), -1) if rest.shape[-1] else rotary


def rotary_embedding_backward(
    *,
    grad_rotated_query: Tensor,
    grad_rotated_key: Tensor,
    query: Tensor | None,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    needs: list[bool],
) -> list[Tensor | None]:
    """Return differentiable gradients of (query, key, query_norm, key_norm), those that `needs`
    asks for. A query or key without a norm is not saved: its rotation is linear.
    """
    grads = grad_rotated_query, grad_rotated_key
    given: list[Tensor | None] = [  # no zeros_like: a gradient may be batched, by torch.func.jacrev
        torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device) if x is None else x
        for x, grad in zip((query, key), grads)
    ]
    given = [x if x is None else differentiable(x) for x in (*given, query_norm, key_norm)]
    q, k, *norms = given
    options = dict(interleaved=interleaved, query_norm=norms[0], key_norm=norms[1], eps=eps)
    with torch.enable_grad():
        outputs = rotary_embedding(q, k, cos, sin, **options)  # type: ignore[arg-type]
    found = gradients_through(outputs, grads, [x if n else None for x, n in zip(given, needs)])
    return [x if need else None for x, need in zip(found, needs)]
