"""The norms, the gated feed-forward layers and the loss of Hugging Face's models on the ops.

Each model of transformers has classes of its own for them. `accelerate` recognizes a class by its
attributes, and compares trial runs of both forwards before it replaces the class.

Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"; Shazeer 2020, "GLU Variants
Improve Transformer", section 2.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.checks import autocast_dtype
from fastformer.dispatch import backends
from fastformer.drop_in.deferred import DeferredLogits
from fastformer.drop_in.replacements.base import (
    Accelerated,
    AnySignature,
    Recognized,
    has_only,
    ops_of,
    unsupported_tensor,
)
from fastformer.nn.stream import is_unmodified
from fastformer.ops import functional

_EPS = "variance_epsilon", "eps", "epsilon"  # the attribute, by its names in the models


class FusedRootMeanSquareNorm(Recognized, AnySignature):
    """weight * x / sqrt(mean(x^2) + eps), as in Llama, T5 and most others."""

    _tolerance = 2e-6  # they compute in float32, whatever the dtype
    weight: nn.Parameter

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        (x,) = (*given, *named.values())
        weight = self._factor()
        reason = unsupported_tensor(x, weight)
        if reason is None and self._must_agree() and x.dtype != weight.dtype:
            reason = f"the input is {x.dtype}, the weight {weight.dtype}"
        if reason is not None:
            return self._run_original(reason, x)
        with ops_of(self):
            return functional.rms_norm(x, weight.shape, weight, _eps(self))

    def _factor(self) -> Tensor:
        return self.weight

    def _must_agree(self) -> bool:
        """Return whether the classes differ in what they return if input and weight differ."""
        return True

    @staticmethod
    def _matches(module: nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not len(weight):
            return False
        return has_only(module, "weight") and _eps(module) is not None

    def _probes(self, random: Callable[..., Tensor]) -> Iterator[tuple[Tensor | None, ...]]:
        x = random(2, 3, len(self.weight))
        yield (x,)
        yield (x * 1e-3,)  # small squares show where eps is added


class FusedCenteredRootMeanSquareNorm(FusedRootMeanSquareNorm):
    """(1 + weight) * x / sqrt(mean(x^2) + eps), as in Gemma."""

    def _factor(self) -> Tensor:
        return 1.0 + self.weight.float() if self.weight.dtype.itemsize < 4 else 1.0 + self.weight

    def _must_agree(self) -> bool:
        return self.weight.dtype == torch.float64


def _eps(module: nn.Module) -> float | None:
    for name in _EPS:
        if isinstance(value := module.__dict__.get(name), float):
            return value
    return None


# The names of a gated layer's parts: the projections of gate and value, or both in one with the
# gate first, and the projection of their product.
_SEPARATE = (
    ("gate_proj", "up_proj", "down_proj"),
    ("wi_0", "wi_1", "wo"),
    ("w1", "w3", "w2"),
)
_JOINED = (
    ("gate_up_proj", "down_proj"),
    ("input_linear", "output_linear"),
)
_ACTIVATIONS = "act_fn", "activation_fn", "activation", "act"
# By the class of the activation, which is a module, its name in `gated_activation`.
_NAMES = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "ReLU": "relu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
}


class FusedGatedFeedForward(Recognized, AnySignature):
    """down(dropout(f(gate(x)) * value(x))): the projections stay modules, with their hooks, their
    adapters and whatever else replaces them; one kernel computes what is between them.
    """

    _tolerance = 2e-6

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        (x,) = (*given, *named.values())
        names, (_, f) = _projections(self), _activation(self)
        activation = _name(f)
        reason = unsupported_tensor(x)
        if names is None or activation is None:
            reason = "its parts were replaced"
        elif isinstance(f, nn.Module) and not is_unmodified(f):
            reason = "its activation has hooks"
        elif _weight_dtype(getattr(self, names[-1])) not in (None, x.dtype):
            reason = "its projections have other dtypes than the input"
        if reason is not None or names is None or activation is None:
            return self._run_original(str(reason), x)
        if len(names) == 3:
            gate, value = getattr(self, names[0])(x), getattr(self, names[1])(x)
        else:
            gate, value = getattr(self, names[0])(x).chunk(2, -1)
        with ops_of(self):
            hidden = functional.gated_activation(gate, value, activation)
        dropout = self._modules.get("dropout")
        if dropout is not None:
            hidden = dropout(hidden)
        return getattr(self, names[-1])(hidden)

    @staticmethod
    def _matches(module: nn.Module) -> bool:
        names, (attribute, f) = _projections(module), _activation(module)
        if names is None or attribute is None:
            return False
        parts = [*names, *[n for n in (attribute, "dropout") if n in module._modules]]
        return has_only(module, *parts) and _name(f) is not None

    def _probes(self, random: Callable[..., Tensor]) -> Iterator[tuple[Tensor | None, ...]]:
        yield (random(2, 3, 8),)

    def _trial_parts(self) -> dict[str, nn.Module]:
        names = _projections(self)
        assert names is not None
        sizes = [(8, 12), (8, 12), (12, 8)] if len(names) == 3 else [(8, 24), (12, 8)]
        device = next(self.parameters()).device
        return {
            name: nn.Linear(*size, device=device, dtype=torch.float64)
            for name, size in zip(names, sizes, strict=True)
        }


def _projections(module: nn.Module) -> tuple[str, ...] | None:
    """Return the names of the projections that the module has, the last one for the product."""
    for names in (*_SEPARATE, *_JOINED):
        if all(name in module._modules for name in names):
            return names
    return None


def _activation(module: nn.Module) -> tuple[str | None, Any]:
    """Return the name of the attribute that holds the activation, and the activation."""
    for name in _ACTIVATIONS:
        f = module._modules.get(name, module.__dict__.get(name))
        if f is not None:
            return name, f
    return None, None


def _name(f: Any) -> str | None:
    """Return the name in `gated_activation` of an activation, or None."""
    if type(f) is nn.GELU:
        return "gelu" if f.approximate == "none" else "gelu_tanh"
    return _NAMES.get(type(f).__name__)


def _weight_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of the weight of an nn.Linear, or None for any other module."""
    return module.weight.dtype if type(module) is nn.Linear else None


_NAMED = re.compile(r".*(RMSNorm\w*|MLP|Mlp|FeedForward|Experts|DenseActDense)")


def unknown_structure(module: nn.Module) -> str | None:
    """Return why a norm or a feed-forward of transformers stays as it is, or None if the module is
    no such layer.
    """
    cls = type(module)
    if not cls.__module__.startswith("transformers.") or not _NAMED.fullmatch(cls.__name__):
        return None
    parts = ", ".join([*module._parameters, *module._modules]) or "nothing"
    return f"no replacement has its structure ({parts})"


class FusedOutputProjection(Accelerated, nn.Linear):
    """The output layer of a model: while the model computes a loss, its logits are deferred."""

    def forward(self, input: Tensor) -> Tensor:
        deferring = getattr(_deferring, "layers", ())
        if self not in deferring or torch.compiler.is_compiling():
            return nn.Linear.forward(self, input)
        reason = unsupported_tensor(input, self.weight, self.bias)
        if backends.is_dtensor(self.weight):
            reason = "its weight is a DTensor"
        computed = autocast_dtype(input) or input.dtype
        if reason is None and computed is input.dtype and self.weight.dtype != computed:
            reason = f"the input is {input.dtype}, the weight {self.weight.dtype}"
        if reason is not None:
            return self._run_original(reason, input)
        return DeferredLogits(input, self.weight, self.bias, computed, computed)


class FusedModelWithLoss(AnySignature):
    """A model that computes a loss if it is given labels. It does so as before, with an output
    layer whose logits are deferred.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        head = output_projection(self)
        if kwargs.get("labels") is None or not isinstance(head, FusedOutputProjection):
            return self._original.forward(self, *args, **kwargs)
        if not is_unmodified(head):
            reason = "its output layer has hooks"
            return self._run_original(reason, *args, **kwargs)
        before = getattr(_deferring, "layers", ())
        _deferring.layers = (*before, head)
        try:
            with ops_of(self):
                return self._original.forward(self, *args, **kwargs)
        finally:
            _deferring.layers = before


_deferring = threading.local()  # layers: the output layers of the models that compute a loss now


def output_projection(model: nn.Module) -> nn.Linear | None:
    """Return the output layer of a Hugging Face model that can compute a loss, or None."""
    find = getattr(model, "get_output_embeddings", None)
    if find is None or "labels" not in inspect.signature(type(model).forward).parameters:
        return None
    head = find()
    return head if type(head) is nn.Linear or isinstance(head, FusedOutputProjection) else None
