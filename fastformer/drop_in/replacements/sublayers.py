"""The parts of transformers' layers on the ops: `feed_forward` runs a linear layer, an activation,
dropout, and a linear layer; `dropout_add_layer_norm` and `dropout_add_rms_norm` run dropout, a
residual sum, and its norm. And nn.Sequential, if it holds a feed-forward layer.

Source: Vaswani et al. 2017, "Attention Is All You Need", sections 3.1 and 3.3.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.checks import autocast_dtype
from fastformer.drop_in.replacements import base
from fastformer.drop_in.replacements.layers import op_activation
from fastformer.nn.stream import is_unmodified
from fastformer.ops import functional
from fastformer.ops.feed_forward.reference import ACTIVATIONS

_NAMES = {  # of the classes of transformers.activations, in `feed_forward`
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "SiLUActivation": "silu",
    "ReLUSquaredActivation": "relu2",
}


def normalized_sum(
    layer: nn.Module, norm: Any, residual: Any, x: Any, dropout: Any = 0.0
) -> tuple[Tensor, Tensor]:
    """Return (norm(total), total) of total = residual + dropout(x); dropout: a module, or p."""
    p = _dropped(dropout)
    if p is None:
        x, p = dropout(x), 0.0
    if _can_fuse(norm, residual, x):
        with base.ops_of(layer):
            return vars(type(norm))["after_sum"](norm, x, residual, dict(dropout_p=p))
    total = residual + (F.dropout(x, p) if p else x)
    return norm(total), total


def _can_fuse(norm: Any, residual: Any, x: Any) -> bool:
    """Return whether the norm can add x to the residual in its kernel."""
    if not (isinstance(x, Tensor) and isinstance(residual, Tensor)) or x.shape != residual.shape:
        return False
    if "after_sum" not in vars(type(norm)) or not is_unmodified(norm):
        return False
    agree = x.dtype == residual.dtype or autocast_dtype(x) is not None
    return agree and x.is_floating_point() and base.unsupported_tensor(x, residual) is None


def feed_forward(
    layer: nn.Module, x: Any, first: Any, activation: Any, dropout: Any, last: Any
) -> Tensor | None:
    """Return last(dropout(activation(first(x)))), or None if the op cannot compute it. dropout: a
    module, or p.
    """
    reason = unfit(first, activation, dropout, last)
    if reason is None:
        weights = _parameters(first), _parameters(last)
        reason = base.unsupported_weight(*weights) or base.unsupported_tensor(x)
        for weight, _ in weights:
            if weight.dtype != x.dtype and autocast_dtype(x) is None:
                reason = f"the input is {x.dtype}, a weight {weight.dtype}"
    if reason is not None:
        base.record_fallback(layer, type(layer).__name__, reason)
        return None
    name, p = activation_name(activation), _dropped(dropout)
    assert name is not None and p is not None
    with base.ops_of(layer):
        return functional.feed_forward(x, *weights[0], *weights[1], name, p)


def unfit(first: Any, activation: Any, dropout: Any, last: Any) -> str | None:
    """Return why `feed_forward` cannot compute what these submodules do, or None."""
    if activation_name(activation) is None:
        return f"its activation {type(activation).__name__} is none of {', '.join(ACTIVATIONS)}"
    for linear in first, last:
        if not (type(linear) is nn.Linear or _is_conv(linear)) or not is_unmodified(linear):
            return f"a {type(linear).__name__} has hooks or is no plain linear layer"
    return None if _dropped(dropout) is not None else "its dropout has hooks or was replaced"


def activation_name(activation: Any) -> str | None:
    """Return the name in `feed_forward` of an activation of torch or transformers, or None."""
    name = op_activation(activation)
    if not isinstance(name, str) and type(activation).__module__ == "transformers.activations":
        name = is_unmodified(activation) and _NAMES.get(type(activation).__name__)  # type: ignore
    return name if isinstance(name, str) else None


def _dropped(dropout: Any) -> float | None:
    """Return the probability with which a dropout drops now, or None if only it can tell."""
    if isinstance(dropout, (int, float)):
        return float(dropout)
    if type(dropout) is not nn.Dropout or dropout.inplace or not is_unmodified(dropout):
        return None
    return dropout.p if dropout.training else 0.0


def _is_conv(linear: Any) -> bool:
    """Return whether a module is transformers' Conv1D: a linear layer, its weight transposed."""
    cls = type(linear)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def _parameters(linear: Any) -> tuple[Tensor, Tensor | None]:
    return linear.weight.t() if _is_conv(linear) else linear.weight, linear.bias


class FusedSequential(base.Accelerated, nn.Sequential):
    def forward(self, input: Any) -> Any:
        modules = list(self)
        first, parts = sequence(modules) or (0, None)
        for module in modules[:first]:
            input = module(input)
        out = None if parts is None else feed_forward(self, input, *parts)
        if out is not None and parts is not None:
            input, first = out, modules.index(parts[-1], first + 1) + 1
        for module in modules[first:]:
            input = module(input)
        return input


def sequence(modules: list[nn.Module]) -> tuple[int, list[Any]] | None:
    """Return where a feed-forward layer begins among modules that hold two linear layers, and its
    parts; or None if there is none.
    """
    linears = [i for i, x in enumerate(modules) if isinstance(x, nn.Linear) or _is_conv(x)]
    if len(linears) != 2 or linears[1] - linears[0] not in (2, 3):
        return None
    first, activation, *dropout, last = modules[linears[0] : linears[1] + 1]
    return linears[0], [first, activation, dropout[0] if dropout else 0.0, last]
