"""The loss of Hugging Face's models on the ops: the cross-entropy of their logits."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.dispatch import backends
from fastformer.drop_in.replacements import base
from fastformer.nn.stream import is_unmodified
from fastformer.ops import functional

# Functions of transformers.loss.loss_utils: the cross-entropy of the logits, in float32.
_LOSSES = "ForCausalLMLoss", "ForMaskedLMLoss"


class FusedModelWithLoss(base.Accelerated):
    """A model that computes a loss of its logits by a function of transformers: `cross_entropy`
    computes it. If the model skips its logits, `linear_cross_entropy` does, of the hidden states.
    """

    _made_of = "forward", "loss_function"
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
    if (cls := type(head)) is not nn.Linear:
        return f"its output layer is {cls.__module__}.{cls.__qualname__}, not nn.Linear"
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


def needs_logits(model: FusedModelWithLoss) -> str | None:
    """Return why a model cannot compute its loss without logits, or None.

    The model's forward runs once, in training mode, with two tokens and labels; in place of its
    base model, which computes the hidden states, a function returns zeros.
    """
    head, inner = output_layer(model), getattr(model, "base_model", model)
    if isinstance(head, str):
        return head
    if inner is model:
        return "it has no base model that computes the hidden states"
    weight = head.weight
    outputs = _Outputs([weight.new_zeros(1, 2, head.in_features)])
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=weight.device)
    named: dict[str, Any] = {"input_ids": tokens} if model.main_input_name == "input_ids" else {}
    if "output_router_logits" in inspect.signature(model._original.forward).parameters:
        named["output_router_logits"] = False  # the function returns none
    with torch.no_grad(), _state_kept(model), backends.use_backend("reference"):
        inner.__dict__["forward"] = lambda *_, **__: outputs
        model.training = model._skips_logits = True
        try:
            output = model.forward(**named, labels=tokens, return_dict=True)
            read = any(not x.isfinite().all() for x in output.values() if type(x) is Tensor)
        except ChangedLogitsError:
            return "it changes them before it computes its loss"
        except Exception as error:
            return f"a trial run raised {type(error).__name__}: {error}"
    return "by a trial run, it uses them for more than its loss" if read else None


class _Outputs(tuple[Tensor]):
    """What stands for the outputs of a base model: its hidden states, and None for all others."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


@contextmanager
def _state_kept(module: nn.Module) -> Iterator[None]:
    """A context that disables the module's hooks and restores all its attributes at the end."""
    modules = list(module.modules())
    before = [dict(m.__dict__) for m in modules]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    try:
        for m in modules:
            m.__dict__.update({name: OrderedDict() for name in hooks})
        yield
    finally:
        for m, attributes in zip(modules, before):
            m.__dict__.clear()
            m.__dict__.update(attributes)
