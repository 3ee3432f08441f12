"""The public function of the embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastformer.checks import (
    require_device,
    require_dropout,
    require_floating,
    require_integers,
    require_number,
    require_token,
    require_values,
    wrong_shape,
)
from fastformer.dispatch import backends
from fastformer.dispatch.front import check_values, front_door
from fastformer.dispatch.operation import Operation
from fastformer.ops.embedding import reference


@front_door
def embed(
    tokens: Tensor,
    weight: Tensor,
    positional: Tensor | None,
    dropout_p: float = 0.0,
    *,
    scale: float | None = None,
    padding_idx: int | None = None,
    dropout_seed: int | Tensor | None = None,
) -> Tensor:
    """Compute dropout(scale * weight[tokens] + positional[0 .. S-1]).

    Args:
        tokens: [..., S] integers, indices of rows of weight.
        weight: [V, N], float32, float16, bfloat16 or float64, as nn.Embedding stores it.
        positional: [at least S, N], of weight's dtype or float32, shared by all sequences; None
            omits the term.
        dropout_p: probability in [0, 1] that an element is dropped, as in
            `scaled_dot_product_attention`.
        scale: the factor on the embedding; sqrt(N) by default.
        padding_idx: the token whose row gets no gradient; -1 is the last token, as in torch.
        dropout_seed: as in `dropout_add_layer_norm`.

    Returns:
        [..., S, N] in the dtype of weight.

    Raises:
        ValueError: shapes that do not fit, S larger than the rows of positional, a token outside
            [0, V), a padding_idx outside [-V, V), dropout_p outside [0, 1], tensors on several
            devices.
        TypeError: tokens that are not integers, parameters that are not floating.

    Source: Vaswani et al. 2017, "Attention Is All You Need", sections 3.4, 3.5 and 5.4.
    """
    require_floating(weight=weight)
    if weight.dim() != 2 or 0 in weight.shape:
        raise wrong_shape("weight", weight, "[V, N]")
    require_integers("tokens", tokens)
    require_device("tokens", tokens, "weight", weight)
    last = weight.shape[0] - 1
    ids = f"ids from 0 to {last}", "the token id "
    check_values(require_values, "tokens", tokens, last, *ids)
    if tokens.dim() < 1:
        raise ValueError("tokens is a scalar; expected [..., S]")
    classes, width = weight.shape
    if positional is not None:
        require_floating(positional=positional)
        if positional.dtype not in (weight.dtype, torch.float32):
            raise TypeError(
                f"positional has dtype {positional.dtype}; "
                f"expected the dtype of weight, {weight.dtype}, or float32"
            )
        if positional.dim() != 2 or positional.shape[1] != width:
            raise wrong_shape("positional", positional, f"[positions, {width}]")
        if tokens.shape[-1] > positional.shape[0]:
            raise ValueError(
                f"tokens has {tokens.shape[-1]} positions; "
                f"expected at most the {positional.shape[0]} of positional"
            )
        require_device("positional", positional, "weight", weight)
    if padding_idx is not None:
        padding_idx = require_token("padding_idx", padding_idx, classes)
    if scale is not None:
        scale = require_number("scale", scale, "a number or None")
    p = require_dropout("dropout_p", dropout_p)
    return backends.run(
        "embed",
        tokens=tokens,
        weight=weight,
        positional=positional,
        dropout_p=p,
        scale=math.sqrt(width) if scale is None else scale,
        padding_idx=padding_idx,
        dropout_seed=backends.seed_for(dropout_seed, p, weight.device),
    )


backends.register(Operation("embedding", embed, reference.embed, batched=dict(tokens=0, output=0)))
