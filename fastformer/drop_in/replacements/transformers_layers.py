"""The norms, the gated feed-forward layers and the loss of Hugging Face's models on the ops.

Each model of transformers has classes of its own for them. `accelerate` recognizes a class by its
attributes, and compares trial runs of both forwards before it replaces the class.

Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"; Shazeer 2020, "GLU Variants
Improve Transformer", section 2.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.drop_in.replacements import base
from fastformer.nn.stream import Pair, is_unmodified
from fastformer.ops import functional

_EPS = "variance_epsilon", "eps", "epsilon"  # the attribute, by its names in the models


class FusedRootMeanSquareNorm(base.Recognized, base.AnySignature):
    """weight * x / sqrt(mean(x^2) + eps), as in Llama, T5 and most others."""

    _tolerance = 2e-6  # they compute in float32, whatever the dtype
    weight: nn.Parameter

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        (x,) = (*given, *named.values())
        weight = self._factor()
        reason = self._unsupported_reason(x, weight)
        if reason is not None:
            return self._run_original(reason, x)
        with base.ops_of(self):
            return functional.rms_norm(x, weight.shape, weight, _eps(self))

    def after_sum(self, x: Tensor, residual: Tensor, added: dict[str, Any]) -> Pair:
        """Return (self(sum), sum) as `LayerNorm.after_sum` of nn/ does."""
        weight = self._factor()
        if x.dtype != residual.dtype or self._unsupported_reason(x, weight) is not None:
            return base.sum_then_norm(self, x, residual, added)
        return functional.dropout_add_rms_norm(x, residual, weight, eps=_eps(self), **added)

    def _unsupported_reason(self, x: Tensor, weight: Tensor) -> str | None:
        reason = base.unsupported_tensor(x, weight)
        if reason is None and self._must_agree() and x.dtype != weight.dtype:
            reason = f"the input is {x.dtype}, the weight {weight.dtype}"
        return reason

    def _factor(self) -> Tensor:
        return self.weight

    def _must_agree(self) -> bool:
        """Return whether the classes differ in what they return if input and weight differ."""
        return True

    @staticmethod
    def _matches(module: Any) -> bool:
        if not base.has_only(module, weight=nn.Parameter) or _eps(module) is None:
            return False
        return module.weight.dim() == 1 and len(module.weight) > 0

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
_PROJECTIONS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("wi_0", "wi_1", "wo"),
    ("w1", "w3", "w2"),
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


class FusedGatedFeedForward(base.Recognized, base.AnySignature):
    """down(dropout(f(gate(x)) * value(x))): the projections stay modules, with their hooks, their
    adapters and whatever else replaces them; one kernel computes what is between them.
    """

    _tolerance = 2e-6

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        (x,) = (*given, *named.values())
        names, (_, f) = _projections(self), _activation(self)
        activation = _name(f)
        if names is None or activation is None:
            return self._run_original("its parts were replaced", x)
        *projections, last = (getattr(self, name) for name in names)
        reason = base.unsupported_tensor(x)
        if isinstance(f, nn.Module) and not is_unmodified(f):
            reason = "its activation has hooks"
        elif type(last) is nn.Linear and last.weight.dtype != x.dtype:
            reason = "its projections have other dtypes than the input"
        if reason is not None:
            return self._run_original(reason, x)
        projected = [layer(x) for layer in projections]
        gate, value = projected if len(projected) == 2 else projected[0].chunk(2, -1)
        with base.ops_of(self):
            hidden = functional.gated_activation(gate, value, activation)
        dropout = self._modules.get("dropout")
        if dropout is not None:
            hidden = dropout(hidden)
        return last(hidden)

    @staticmethod
    def _matches(module: nn.Module) -> bool:
        names, (attribute, f) = _projections(module), _activation(module)
        if names is None or attribute is None:
            return False
        parts = [*names, *[n for n in (attribute, "dropout") if n in module._modules]]
        return base.has_only(module, **dict.fromkeys(parts, object)) and _name(f) is not None

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
    for names in _PROJECTIONS:
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


# Functions of transformers.loss.loss_utils: the cross-entropy of the logits, in float32.
_LOSSES = "ForCausalLMLoss", "ForMaskedLMLoss"


class FusedModelWithLoss(base.AnySignature):
    """A model that computes a loss of its logits by a function of transformers: `cross_entropy`
    computes it. If the model skips its logits, `linear_cross_entropy` does, of the hidden states.
    """

    _read = "forward", "loss_function"
    _skips_logits = False  # set by `accelerate`
    _skipped: _SkippedLogits | None = None  # set while a forward runs that skips its logits
    _theirs: ClassVar[Callable[[Any], Any]]  # the getter of the original's loss_function

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._theirs = cls._original.loss_function.fget  # type: ignore[attr-defined]

    @property
    def loss_function(self) -> Callable[..., Any]:
        """The function that the forward calls with (logits, labels, vocab_size, **options)."""
        theirs = self._theirs()
        return functools.partial(self._loss, theirs) if _is_known(theirs) else theirs

    @loss_function.setter
    def loss_function(self, value: Callable[..., Any]) -> None:
        self._original.loss_function.fset(self, value)  # type: ignore[attr-defined]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        skips = self._skips_logits and self.training and not torch.compiler.is_compiling()
        names = list(inspect.signature(self._original.forward).parameters)[1:] if skips else []
        if not skips or {**dict(zip(names, args)), **kwargs}.get("labels") is None:
            return self._original.forward(self, *args, **kwargs)
        head = output_layer(self)
        if isinstance(head, str):
            return self._run_original(f"its logits are computed: {head}", *args, **kwargs)
        skipped = self._skipped = _SkippedLogits(head)
        head.__dict__["forward"] = skipped.project
        try:
            output = self._original.forward(self, *args, **kwargs)
        finally:
            del head.__dict__["forward"], self._skipped
        if isinstance(output, tuple):  # as transformers makes it, without what is None
            return tuple(x for x in output if x is not skipped.logits)
        absent = {name: None for name, x in output.items() if x is skipped.logits}
        return dataclasses.replace(output, **absent)

    def _loss(
        self,
        theirs: Callable[..., Tensor],
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **ignored: Any,
    ) -> Tensor:
        """Compute the loss that `theirs` computes, in float32."""
        skipped = self._skipped
        if skipped is not None and skipped.changed(logits):
            raise ChangedLogitsError(
                f"{type(self).__name__} changes its logits before it computes its loss; expected a "
                "model that does not, for accelerate(model, skip_logits=True)"
            )
        reason = base.unsupported_tensor(logits, labels, shift_labels)
        if logits.shape[-1] != vocab_size:
            reason = f"vocab_size is {vocab_size}, and there are {logits.shape[-1]} logits"
        if reason is not None:
            base.record_fallback(self, type(self).__name__, reason)
            more = num_items_in_batch, ignore_index
            return theirs(logits, labels, vocab_size, *more, shift_labels=shift_labels, **ignored)
        target: Any = labels
        if theirs.__name__ == "ForCausalLMLoss":  # token i predicts token i + 1
            target = shift_labels
            if target is None:
                target = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]  # type: ignore[arg-type]
        target = target.to(logits.device).flatten()
        reduction = "mean" if num_items_in_batch is None else "sum"
        with base.ops_of(self):
            if skipped is not None:
                loss = skipped.loss(target, reduction=reduction, ignore_index=ignore_index)
            else:
                device, dtype = logits.device.type, logits.dtype
                # Of logits in 16 bits, the op returns float32 under autocast only.
                with torch.autocast(device, dtype) if dtype.itemsize < 4 else nullcontext():
                    given = logits.flatten(0, -2), target, reduction, ignore_index
                    loss = functional.cross_entropy(*given).float()
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


class ChangedLogitsError(RuntimeError):
    """A model that skips its logits computes its loss of something else than these."""


class _SkippedLogits:
    """Keeps the input of a model's output layer while a forward runs that skips the logits.

    logits: what the output layer returns: NaN, expanded to the shape of the logits, so that it
    takes no memory, and all that is computed from it is NaN. Its dtype is bfloat16 in every model,
    so that a model that casts its logits is always found.
    """

    def __init__(self, head: nn.Linear) -> None:
        self._head = head
        self._hidden: Tensor | None = None
        self.logits: Tensor | None = None

    def project(self, hidden: Tensor) -> Tensor:
        self._hidden = hidden
        with torch.inference_mode(False):  # inference tensors count no changes
            nan = torch.full((), math.nan, dtype=torch.bfloat16, device=hidden.device)
        self.logits = nan.expand(*hidden.shape[:-1], self._head.out_features)
        return self.logits

    def changed(self, logits: Tensor) -> bool:
        return logits is not self.logits or logits._version > 0

    def loss(self, target: Tensor, **options: Any) -> Tensor:
        assert self._hidden is not None
        given = self._hidden.flatten(0, -2), self._head.weight, target
        options |= {"linear_bias": self._head.bias}
        return functional.linear_cross_entropy(*given, **options).float()


def output_layer(model: nn.Module) -> nn.Linear | str:
    """Return the output layer of a Hugging Face model, or why the model cannot skip its logits."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        return "it has no output layer"
    if type(head) is not nn.Linear:
        return f"its output layer is {type(head).__name__}, not Linear"
    if not is_unmodified(head):
        return "its output layer has hooks"
    return base.unsupported_tensor(head.weight, head.bias) or head


def has_loss(module: nn.Module) -> bool:
    """Return whether the module is a model of transformers that takes labels."""
    if not isinstance(getattr(type(module), "loss_function", None), property):
        return False
    return "labels" in inspect.signature(type(module).forward).parameters


def unknown_loss(model: nn.Module) -> str | None:
    """Return why a model that has a loss keeps it, or None."""
    forwards = (vars(cls).get("forward") for cls in type(model).__mro__)
    code = (getattr(inspect.unwrap(f), "__code__", None) for f in forwards if f is not None)
    if not any("loss_function" in c.co_names for c in code if c is not None):
        return "its forward does not compute its loss by loss_function"
    loss = model.loss_function
    return None if _is_known(loss) else f"its loss is {getattr(loss, '__name__', loss)}"


def _is_known(loss: Any) -> bool:
    module, name = (getattr(loss, key, None) for key in ("__module__", "__name__"))
    return module == "transformers.loss.loss_utils" and name in _LOSSES
