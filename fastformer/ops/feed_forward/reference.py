"""The feed-forward layer in eager PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.ops.dropout import dropout, dropout_scale, dropped, without

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "relu2": lambda x: F.relu(x).square(),
}


def feed_forward(
    input: Tensor,
    w_1: Tensor,
    b_1: Tensor | None,
    w_2: Tensor,
    b_2: Tensor | None,
    activation: str = "relu",
    dropout_p: float = 0.0,
    *,
    dropout_seed: Tensor | None = None,
) -> Tensor:
    hidden = ACTIVATIONS[activation](F.linear(input, w_1, b_1))
    return F.linear(_dropped(hidden, dropout_p, dropout_seed), w_2, b_2)


def geglu(
    input: Tensor,
    w: Tensor,
    b: Tensor | None,
    w_2: Tensor,
    b_2: Tensor | None,
    dropout_p: float = 0.0,
    *,
    dropout_seed: Tensor | None = None,
) -> Tensor:
    z, v = F.linear(input, w, b).chunk(2, -1)
    hidden = gated_activation(z, v, "gelu")
    return F.linear(_dropped(hidden, dropout_p, dropout_seed), w_2, b_2)


def swiglu(
    input: Tensor,
    w: Tensor,
    b: Tensor | None,
    w_2: Tensor,
    b_2: Tensor | None,
    dropout_p: float = 0.0,
    *,
    dropout_seed: Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
) -> Tensor:
    form: Any = dict(alpha=alpha, limit=limit, offset=offset)
    z, v = F.linear(input, w, b).chunk(2, -1)
    hidden = gated_activation(z, v, **form)
    return F.linear(_dropped(hidden, dropout_p, dropout_seed), w_2, b_2)


def _dropped(hidden: Tensor, p: float, dropout_seed: Tensor | None) -> Tensor:
    if dropout_seed is None:
        return dropout(hidden, p)
    # numel() would become a constant in an export.
    rows, width = math.prod(hidden.shape[:-1]), hidden.shape[-1]
    drop = dropped(dropout_seed, 1, rows, width, p)[0]
    return without(drop, hidden) * dropout_scale(p)


def gated_activation(
    gate: Tensor,
    value: Tensor,
    activation: str = "silu",
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
) -> Tensor:
    if limit is not None:
        gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
    activated = ACTIVATIONS[activation](gate) if alpha == 1 else gate * (alpha * gate).sigmoid()
    return activated * (value + offset if offset else value)
