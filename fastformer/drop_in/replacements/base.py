"""What all replacements share: the base class, fallbacks, and the records for `explain`.

Functions named `unsupported_..` return why the ops cannot run a call, or None if they can.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import Counter
from typing import Any, ClassVar, SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fastformer.batch_invariance import on
from fastformer.dispatch import backends
from fastformer.dispatch.state import current_backend, state
from fastformer.mask_tiles import BlockMask
from fastformer.nn.stream import Pair


class Accelerated(nn.Module):
    """Base class of the modules whose class `accelerate` has changed.

    A kind derives from this class and overrides `forward`. The class of a replaced module derives
    from the kind and from the module's original class, so that `isinstance` and the other methods
    of the original class keep working.
    """

    _kind: ClassVar[type[Accelerated]]
    _original: ClassVar[type[nn.Module]]
    _internal: ClassVar[tuple[str, ...]] = ("forward",)  # the original's methods that are bypassed
    _made_of: ClassVar[tuple[str, ...]] = ()  # attributes of the original that the class depends on
    _fallbacks: Counter[str]  # set on the instance at its first fallback

    def _run_original(self, reason: str, *args: Any, **kwargs: Any) -> Any:
        """Count a fallback with this reason, and call the forward of the original class."""
        if any(isinstance(x, BlockMask) for x in args):
            raise ValueError(f"a BlockMask is given, which torch does not know, and {reason}")
        record_fallback(self, type(self).__name__, reason)
        return self._original.forward(self, *args, **kwargs)

    def _run_whole(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward of the original class, without the mode of `explain`: torch has no fast
        path in a mode, and that returns zeros at the padding.
        """
        if explaining.recorder is None:
            return self._original.forward(self, *args, **kwargs)
        with explaining.recorder.off():
            return self._original.forward(self, *args, **kwargs)

    def _run_original_or(self, refusal: Exception, *args: Any) -> Any:
        """Call the original forward with arguments that the replacement rejected by `refusal`. If
        the original raises too, raise `refusal`, whose message names the argument.
        """
        name = str(refusal).split(" ", 1)[0]
        try:
            return self._run_original(f"{name}: torch takes what the op does not", *args)
        except Exception:
            raise refusal from None

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Copy and pickle by (kind, original): the class made from them cannot be imported."""
        made = super().__reduce_ex__(protocol)
        if not isinstance(made, tuple) or made[1] != (type(self),):
            return made
        return _new_instance, (self._kind, self._original), *made[2:]


# What the replacements set on an instance.
STATE = "_fallbacks", "_drops_padding", "_returns_weights", "_skips_logits", "_captures"
_IGNORED = "__jit_ignored_attributes__"
_classes: dict[tuple[Any, ...], type[Accelerated]] = {}


def class_for(kind: type[Accelerated], original: type[nn.Module]) -> type[Accelerated]:
    """Return the new class of modules of class `original` that `kind` replaces."""
    key = kind, original, *(getattr(original, name, None) for name in kind._made_of)
    if key in _classes:
        return _classes[key]
    # The class keeps the name of the original, because tools recognize torch's modules by it.
    names: dict[str, Any] = dict(_kind=kind, _original=original, __module__=original.__module__)
    # What torch.jit.trace leaves out where it compiles a method (@torch.jit.export).
    names[_IGNORED] = [*getattr(original, _IGNORED, ()), *STATE]
    if hasattr(kind, "after_sum"):  # the residual stream looks it up in vars(type(norm))
        names["after_sum"] = kind.after_sum
    if "forward" in kind._made_of:  # then it keeps the signature, which tools like Trainer read
        names["forward"] = _with_signature(kind, original.forward)
    made = type(original.__name__, (kind, original), names)
    return _classes.setdefault(key, made)


def _with_signature(kind: type[Accelerated], original: Any) -> Any:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(self, *args, **kwargs)

    return forward


def _new_instance(kind: type[Accelerated], original: type[nn.Module]) -> nn.Module:
    cls = class_for(kind, original)
    return cls.__new__(cls)


class _Explaining(threading.local):
    recorder: Any = None  # that of `explain`, in the thread in which it runs


explaining = _Explaining()


class ops_of(backends.observe):
    """A context that attributes the ops that run in it, and their fallbacks, to `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(
            on_unsupported=lambda op, reason: count_fallback(module, f"{op}: {reason}")
        )
        self._module = module

    def __enter__(self) -> None:
        super().__enter__()
        if explaining.recorder is not None:
            explaining.recorder.running.append(self._module)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if explaining.recorder is not None:
            explaining.recorder.running.pop()


def count_fallback(module: nn.Module, reason: str) -> None:
    """Count a call that does not run on the fused ops, unless it is being traced."""
    if not torch.compiler.is_compiling():
        module.__dict__.setdefault("_fallbacks", Counter())[reason] += 1


def record_fallback(module: nn.Module, op: str, reason: str) -> None:
    """Count a fallback of the module, and let `explain` record that torch ran."""
    count_fallback(module, reason)
    record_torch(op, reason)


def record_torch(op: str, reason: str) -> None:
    """Let `explain` record that torch ran `op` itself, and why."""
    backends.report(backends.Choice(op, "torch", reason))


def record_whole(module: nn.Module, reason: str) -> None:
    """Let `explain` record that torch ran a module, with all that is in it, and why."""
    record_torch(type(module).__name__, reason)
    recorder = explaining.recorder
    if recorder is not None and recorder.running[-1:] == [module]:
        recorder.whole.append(module)


ON_A_CPU = 'torch runs it on a CPU with the backend "auto"'


def is_left_to_torch(module: nn.Module, *given: Any) -> bool:
    """Return whether the original forward of a module runs for these arguments: on a CPU with the
    backend "auto"; not within `batch_invariant`, whose ops are kernels, nor with a block mask.
    """
    left = current_backend() == "auto" and is_on_a_cpu(module, *given) and not on()
    if not left or torch.compiler.is_compiling() or BlockMask in map(type, given):
        return False
    if state.on_choice is not None:
        record_whole(module, ON_A_CPU)
    return True


def is_on_a_cpu(module: nn.Module, *given: Any) -> bool:
    """Return whether the first tensor of the arguments is on a CPU, or without one a parameter."""
    for x in given:  # a hot path
        if isinstance(x, Tensor):
            return x.is_cpu
    return all(x.is_cpu for x in itertools.islice(module.parameters(), 1))


def sum_then_norm(norm: nn.Module, x: Tensor, residual: Tensor, added: dict[str, Any]) -> Pair:
    """Return what `after_sum` of the norm returns, computed by torch."""
    bias = added.get("input_bias")
    x = x if bias is None else (x + bias).to(x.dtype)
    total = residual + F.dropout(x, added["dropout_p"])
    return norm.forward(total), total


_PLAIN = Tensor, nn.Parameter
_DIFFERENTIATE = torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp


def unsupported_tensor(*tensors: Tensor | BlockMask | None) -> str | None:
    """Return why a kernel cannot read one of the tensors, or None; entries of None and block masks
    are skipped.
    """
    tracing = torch.compiler.is_compiling()
    if not tracing and torch._C._is_tracing():  # a trace holds neither the kernels nor new dropout
        return "torch.jit.trace records the operations of torch"
    levels = None if tracing else torch._C._functorch.get_interpreter_stack()
    transformed = levels is not None and any(x.key() not in _DIFFERENTIATE for x in levels)
    for x in tensors:
        if x is None or isinstance(x, BlockMask):
            continue
        if type(x) not in _PLAIN and not (tracing or isinstance(x, FakeTensor)):
            return f"an input or a parameter is a {type(x).__name__}"
        if x.is_nested:
            return "an input is a nested tensor"
        if transformed and torch._C._functorch.is_functorch_wrapped_tensor(x):
            return "torch.func.vmap or functionalize is active"
    return None


def unsupported_weight(*pairs: tuple[Tensor | None, Tensor | None]) -> str | None:
    """Return why the ops cannot read one of the (weight, bias) pairs, or None."""
    for weight, bias in pairs:
        if weight is not None and bias is not None and weight.dtype != bias.dtype:
            return f"a weight is {weight.dtype}, its bias {bias.dtype}"
    return unsupported_tensor(*itertools.chain(*pairs))


def unsupported_parameter(*modules: nn.Module) -> str | None:
    """Return why the ops cannot read the weight or bias of one of the modules, or None."""
    return unsupported_weight(
        *((getattr(m, "weight", None), getattr(m, "bias", None)) for m in modules)
    )
