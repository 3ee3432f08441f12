"""The public function of rotary positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastformer.checks import (
    autocast_dtype,
    require_device,
    require_eps,
    require_flag,
    require_floating,
    require_tensor,
    shape_of,
    wrong_shape,
)
from fastformer.dispatch import backends
from fastformer.dispatch.front import cast_to, front_door
from fastformer.dispatch.operation import Operation
from fastformer.eager import requires_gradient
from fastformer.ops.rotary import reference


@front_door
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
    """Rotate pairs of features of queries and keys by angles of their positions, in one kernel.

        y[..., :R] = x[..., :R] * cos + turned(x[..., :R]) * sin        y[..., R:] = x[..., R:]

    turned([a, b]) = [-b, a] for the two halves a and b of the R features; with `interleaved`, for
    each two neighbours a and b. With `query_norm`, x is the RMSNorm of each head of the query,
    query_norm * query / sqrt(mean(query^2) + eps) over the D features; `key_norm` does the same for
    the key.

    Args:
        query: [B, H, S, D] or, of a packed batch, [T, H, D]; float32, float16, bfloat16 or float64,
            any strides.
        key: [B, G, S, D] or [T, G, D], in the dtype of query; G need not be H.
        cos, sin: [S, R] or [B, S, R], of a packed batch [T, R], in the dtype of query or float32,
            without gradient: row s has the position of token s, column r the factor of feature r. R
            is even and at most D. transformers' cos and sin have this form, in which a pair has its
            angle twice, and so has what `rotary_frequencies` returns.
        interleaved: whether the pairs are neighbours, as in GPT-J, or from two halves, as in Llama.
        query_norm, key_norm: [D], in the dtype of query or float32; None omits the norm.
        eps: added to the mean of the squares.

    Returns:
        (query, key), rotated, with their shapes and dtypes. Norm and rotation are computed in
        float32 (float64 for float64), and the results are rounded once.

    Raises:
        ValueError: shapes that do not fit, an R that is odd or larger than D, cos or sin that
            require a gradient, a negative eps, tensors on several devices.
        TypeError: a dtype that is not floating, or another one than expected.

    Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding",
    section 3.2.2; the halves: Black et al. 2022, "GPT-NeoX-20B"; the norms: Dehghani et al. 2023,
    "Scaling Vision Transformers to 22 Billion Parameters", section 2, here with RMSNorm, as in
    Qwen3.
    """
    if isinstance(query, Tensor) and autocast_dtype(query) is not None:
        require_tensor("key", key)
        wide = torch.promote_types(query.dtype, key.dtype)
        query, key = cast_to(query, wide), cast_to(key, wide)
    require_floating(query=query, key=key)
    _require_heads(query, key)
    for name, x in (("cos", cos), ("sin", sin)):
        _require_table(name, x, query)
    if cos.shape != sin.shape:
        raise wrong_shape("sin", sin, f"that of cos, {shape_of(cos)}")
    for name, weight in (("query_norm", query_norm), ("key_norm", key_norm)):
        if weight is not None:
            _require_like(name, weight, query)
            if weight.shape != query.shape[-1:]:
                raise wrong_shape(name, weight, f"[D] = [{query.shape[-1]}]")
    return backends.run(
        "rotary_embedding",
        query=query,
        key=key,
        cos=cos,
        sin=sin,
        interleaved=require_flag("interleaved", interleaved),
        query_norm=query_norm,
        key_norm=key_norm,
        eps=require_eps(eps),
    )


def _require_heads(query: Tensor, key: Tensor) -> None:
    """Require [B, H, S, D] and [B, G, S, D], or [T, H, D] and [T, G, D]."""
    if query.dim() not in (3, 4) or query.shape[-1] == 0:
        raise wrong_shape(
            "query", query, "[B, H, S, D], or [T, H, D] of a packed batch, with D of 1 or more"
        )
    heads = 1  # of [B, H, S, D] and of [T, H, D]
    fits = key.dim() == query.dim()
    if not fits or any(
        n != m for i, (n, m) in enumerate(zip(key.shape, query.shape)) if i != heads
    ):
        expected = "[B, G, S, D]" if query.dim() == 4 else "[T, G, D]"
        raise wrong_shape(
            "key", key, f"{expected} with the sizes of query, {shape_of(query)}, but for the heads"
        )


def _require_table(name: str, x: Tensor, query: Tensor) -> None:
    """Require cos or sin: [S, R], [B, S, R], or [T, R] for a packed query."""
    _require_like(name, x, query)
    if requires_gradient(x) and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient; expected a table without one: detach it")
    packed = query.dim() == 3
    length, dim = query.shape[0 if packed else 2], query.shape[-1]
    rows = [length] if packed or x.dim() == 2 else [query.shape[0], length]
    if x.dim() != len(rows) + 1 or list(x.shape[:-1]) != rows:
        expected, layout = f"[T, R] = [{length}, R]", "[T, H, D]"
        if not packed:
            expected = f"[S, R] = [{length}, R] or [B, S, R] = [{query.shape[0]}, {length}, R]"
            layout = "[B, H, S, D]"
        raise wrong_shape(name, x, f"{expected}, as query {layout} is {shape_of(query)}")
    if x.shape[-1] % 2 or not 2 <= x.shape[-1] <= dim:
        raise ValueError(
            f"{name} has shape {shape_of(x)}, with R = {x.shape[-1]} columns; expected an even "
            f"number from 2 to the head dim of query, {dim}"
        )


def _require_like(name: str, x: Tensor, query: Tensor) -> None:
    """Require a tensor of the query's dtype or float32, on its device."""
    require_tensor(name, x)
    if x.dtype != query.dtype and x.dtype != torch.float32:
        raise TypeError(
            f"{name} has dtype {x.dtype}; expected the query's {query.dtype}, or float32"
        )
    require_device(name, x, "query", query)


# ----------------------------------------------------------------------- the record of the dispatch


def _unsaved(arguments: dict[str, Any]) -> tuple[str, ...]:
    """Return what the backward does not read: without a norm, the rotation is linear."""
    pairs = (("query", "query_norm"), ("key", "key_norm"))
    return tuple(x for x, norm in pairs if arguments[norm] is None)


backends.register(
    Operation(
        "rotary",
        rotary_embedding,
        reference.rotary_embedding,
        batched=dict(query=4, key=4, cos=-3, sin=-3, rotated_query=4, rotated_key=4),
        reference_backward=reference.rotary_embedding_backward,
        unsaved=_unsaved,
    )
)
