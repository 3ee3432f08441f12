"""The norms, and the residual connection around a sublayer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastformer import checks
from fastformer.nn.base import AliasedModule, make_dropout
from fastformer.nn.stream import Pair, add_dropped, is_unmodified
from fastformer.ops import functional

NORMS = ("layer", "rms")


class LayerNorm(AliasedModule):
    """weight * (x - mean) / sqrt(var + eps) + bias, over the last dimension.

    With `unbiased=True` it is weight * (x - mean) / (std + eps) + bias, where std divides by N - 1.
    The tutorials use this form, so that weights trained with their code need it.

    Args:
        features: the size of the last dimension; 2 or more with `unbiased`.
        eps: added to the variance (to std with `unbiased`).

    forward(x): x [..., features] -> [..., features], in the dtype of x.

    Raises ValueError and TypeError as `layer_norm` does.

    Source: Ba, Kiros, Hinton 2016, "Layer Normalization", section 3.
    """

    spellings: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("a_2", "a2", "gamma"), "weight"),
        **dict.fromkeys(("b_2", "b2", "beta"), "bias"),
    }

    def __init__(self, features: int, eps: float = 1e-6, unbiased: bool = False) -> None:
        super().__init__()
        least = 2 if checks.require_flag("unbiased", unbiased) else 1
        [features] = checks.require_size(least, features=features)
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.eps = checks.require_eps(eps)
        self.unbiased = unbiased

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(
            x, self.weight.shape, self.weight, self.bias, self.eps, unbiased=self.unbiased
        )

    def after_sum(self, x: Tensor, residual: Tensor, added: dict[str, Any]) -> Pair:
        """Return (self(sum), sum) of sum = residual + dropout(x + bias), from one kernel.

        added: the arguments dropout_p, dropout_seed and input_bias of `dropout_add_layer_norm`.
        """
        given = x, residual, self.weight, self.bias
        return functional.dropout_add_layer_norm(
            *given, eps=self.eps, unbiased=self.unbiased, **added
        )

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, unbiased={self.unbiased}"


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps), over the last dimension.

    Args:
        features: the size of the last dimension.
        eps: added to the mean square.

    forward(x): x [..., features] -> [..., features], in the dtype of x.

    Raises ValueError and TypeError as `rms_norm` does.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", section 3.
    """

    def __init__(self, features: int, eps: float = 1e-6) -> None:
        super().__init__()
        [features] = checks.require_size(features=features)
        self.weight = nn.Parameter(torch.ones(features))
        self.eps = checks.require_eps(eps)

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def after_sum(self, x: Tensor, residual: Tensor, added: dict[str, Any]) -> Pair:
        """Return (self(sum), sum), as `LayerNorm.after_sum` does."""
        return functional.dropout_add_rms_norm(x, residual, self.weight, eps=self.eps, **added)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def make_norm(norm: str, features: int) -> LayerNorm | RMSNorm:
    """Return a new norm by its name, one of `NORMS`."""
    checks.require_choice("norm", norm, NORMS)
    return LayerNorm(features) if norm == "layer" else RMSNorm(features)


class SublayerConnection(nn.Module):
    """x + dropout(sublayer(norm(x))); with norm_first=False norm(x + dropout(sublayer(x))).

    Args:
        size: features.
        dropout: probability that an element of the sublayer's output is dropped, in training.
        norm_first: True for pre-norm, the first form; False for post-norm, as in the paper.
        norm: "layer", a LayerNorm, or "rms", an RMSNorm.

    forward(x, sublayer): x [..., size] and a callable that keeps its shape -> [..., size].

    Raises ValueError and TypeError as `layer_norm` does, ValueError for another norm, and TypeError
    if sublayer cannot be called.

    Source: Vaswani et al. 2017, "Attention Is All You Need", sections 3.1 and 5.4; norm_first:
    Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture", section 3.
    """

    def __init__(
        self, size: int, dropout: float, norm_first: bool = True, norm: str = "layer"
    ) -> None:
        super().__init__()
        checks.require_size(size=size)
        self.norm = make_norm(norm, size)
        self.dropout = make_dropout(dropout)
        self.norm_first = checks.require_flag("norm_first", norm_first)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        checks.require_tensor("x", x)
        checks.require_callable("a function of x", sublayer=sublayer)
        if self.norm_first:
            return add_dropped(x, sublayer(self.norm(x)), self.dropout)
        return self.norm(add_dropped(x, sublayer(x), self.dropout))

    def extra_repr(self) -> str:
        return "" if self.norm_first else "norm_first=False"


def require_norm_input(name: str, x: Tensor | None, norm: nn.Module | None) -> None:
    """Require floats; with an unmodified norm of this file also its device and features."""
    checks.require_floating(**{name: x})
    assert x is not None
    if not (type(norm) is LayerNorm or type(norm) is RMSNorm) or not is_unmodified(norm):
        return
    if x.shape[-1:] != norm.weight.shape:
        raise checks.wrong_shape(name, x, f"[B, S, {norm.weight.shape[0]}]")
    checks.require_device(name, x, "the parameters", norm.weight)
