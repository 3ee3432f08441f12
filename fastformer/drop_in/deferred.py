"""Logits that are computed when something reads them, and a loss that does not read them.

A model of Hugging Face computes the logits of all tokens, [M, V], then their cross-entropy; and it
returns the logits, which a training step seldom reads. `DeferredLogits` stands for the logits: it
knows the hidden states and the weight of the projection. `F.cross_entropy` of it is
`linear_cross_entropy`, which never holds all logits. Every other function of it gets the logits.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

from fastformer.ops import functional


class DeferredLogits(Tensor):
    """Stands for F.linear(hidden, weight, bias), [..., V], until something reads it.

    hidden: [..., N]. computed: the dtype in which the projection is computed, that of autocast if
    it is active; `dtype` is the one of the logits, which may have been cast since.
    """

    _hidden: Tensor
    _weight: Tensor
    _bias: Tensor | None
    _computed: torch.dtype
    _seen: int  # the version of the weight
    _value: Tensor | None

    @staticmethod
    def __new__(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        computed: torch.dtype,
        dtype: torch.dtype,
    ) -> DeferredLogits:
        shape = (*hidden.shape[:-1], weight.shape[0])
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        made._hidden, made._weight, made._bias = hidden, weight, bias
        made._computed, made._seen, made._value = computed, weight._version, None
        _unread.add(made)
        return made

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    def _with(self, hidden: Tensor, dtype: torch.dtype) -> DeferredLogits:
        made = DeferredLogits(hidden, self._weight, self._bias, self._computed, dtype)
        made._seen = self._seen
        return made

    def _read(self) -> Tensor:
        """Return the logits; compute them at the first time."""
        if self._value is None:
            if self._weight._version != self._seen:
                raise RuntimeError(
                    "the logits of an accelerated model are computed when they are read, and the "
                    "weight of the output layer was changed since the forward: read them before "
                    "the optimizer's step"
                )
            with torch.autocast(self.device.type, enabled=False):
                self._value = F.linear(*self._operands()).to(self.dtype)
        return self._value

    def _operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return hidden, weight and bias in the dtype in which the projection is computed."""
        dtype = self._computed
        bias = None if self._bias is None else self._bias.to(dtype)
        return self._hidden.to(dtype), self._weight.to(dtype), bias

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OF_THE_SHAPE:
            return super().__torch_function__(func, types, args, kwargs)
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, DeferredLogits) and first._value is None:
            if func is F.cross_entropy:
                found = _loss(*args, **kwargs)
            else:
                found = _moved(func, *args, **kwargs)
            if found is not None:
                return found
        args, kwargs = tree_map_only(DeferredLogits, DeferredLogits._read, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(DeferredLogits, DeferredLogits._read, (args, kwargs or {}))
        return func(*args, **kwargs)


_unread: weakref.WeakSet[DeferredLogits] = weakref.WeakSet()


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Note the step of an optimizer: a fused one does not raise the version of a weight."""
    if unread := list(_unread):
        changed = {id(x) for group in optimizer.param_groups for x in group["params"]}
        for logits in unread:
            if id(logits._weight) in changed:
                logits._seen = -1


register_optimizer_step_pre_hook(_before_step)

_PROPERTIES = "shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_meta"
_OF_THE_SHAPE = {getattr(Tensor, name).__get__ for name in _PROPERTIES}
_OF_THE_SHAPE |= {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__repr__}


def _moved(func: Callable[..., Any], x: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """Return what a cast or a choice of rows makes of deferred logits, or None for any other."""
    if kwargs:
        return None
    if func is Tensor.float and not args:
        return x._with(x._hidden, torch.float32)
    if func is Tensor.to and len(args) == 1 and isinstance(args[0], torch.dtype):
        return x._with(x._hidden, args[0]) if args[0].is_floating_point else None
    if func is Tensor.contiguous and not args:
        return x
    if func in (Tensor.view, Tensor.reshape):
        sizes = args[0] if len(args) == 1 and isinstance(args[0], Sequence) else args
        if not sizes or not all(isinstance(n, int) for n in sizes):
            return None
        rows = x.shape[:-1].numel()
        lead = math.prod(n for n in sizes[:-1] if n != -1)
        if sizes[-1] != x.shape[-1] or sizes.count(-1) > 1 or lead <= 0 or rows % lead:
            return None
        return x._with(x._hidden.reshape(*sizes[:-1], x._hidden.shape[-1]), x.dtype)
    if func is Tensor.__getitem__ and len(args) == 1:
        index = args[0] if isinstance(args[0], tuple) else (args[0],)
        if not all(i is Ellipsis or type(i) in (int, slice) for i in index):
            return None
        named = len(index) - (Ellipsis in index)  # dimensions; the last one has to stay whole
        ends = index[-1] == slice(None) if Ellipsis in index[:-1] else named < x.dim()
        if ends or (named == x.dim() and index[-1] == slice(None)):
            return x._with(x._hidden[index], x.dtype)
    return None


def _loss(
    input: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return F.cross_entropy of the logits from the projection, or None if no op computes it."""
    old = size_average is not None or reduce is not None
    if old or input.dim() != 2 or target.dtype != torch.int64 or target.shape != input.shape[:1]:
        return None
    autocast = torch.is_autocast_enabled(input.device.type)
    with torch.autocast(input.device.type, enabled=False):
        hidden, linear_weight, linear_bias = input._operands()
        loss = functional.linear_cross_entropy(
            hidden,
            linear_weight,
            target,
            linear_bias=linear_bias,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            weight=weight,
        )
    return loss if autocast else loss.to(input.dtype)
