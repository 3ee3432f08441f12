"""What a module computes by itself, though fastformer has an op for it, in the words that `explain`
and the report of `accelerate` share.

It reads the code of a class. `explain` also sees what a run computes.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch.nn.functional as F
from torch import nn

OWN_ATTENTION = "attention of its own; replace its three lines by ff.scaled_dot_product_attention"
OWN_NORM = "a norm of its own; replace its lines by ff.layer_norm or ff.rms_norm"
OWN_FEED_FORWARD = "a feed-forward layer of its own; replace its lines by ff.feed_forward"
DIRECT_CALL = "it calls F.scaled_dot_product_attention; sdpa_override reaches it"
NO_OP = "no op of fastformer computes this norm"
SUGGESTION = (
    "attn_implementation is {!r}; after register_transformers() "
    "model.set_attn_implementation('fastformer') replaces it"
)
ATTENTION_WORDS = "attention of its own", "it calls F.", "attn_implementation is"  # they begin so

_OTHER_NORMS = nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.LocalResponseNorm
PRODUCTS = "matmul", "__matmul__", "bmm", "baddbmm", "einsum", "@"
SOFTMAX = "softmax", "_softmax"
_CALLED_NORMS = {F.layer_norm: "layer_norm", F.rms_norm: "rms_norm"}
_ROOTS = {"rsqrt", "sqrt", "std", "norm"}
_MEANS = {"mean", "var", "std", "var_mean", "norm"}
_ACTIVATIONS = {"relu", "gelu", "silu", "mish", "elu", "leaky_relu", "relu6", "hardswish"}


def remaining(module: nn.Module) -> str | None:
    """Return what the code of a module computes by itself, and what to do, or None."""
    if isinstance(module, _OTHER_NORMS):
        return NO_OP
    if type(module).__module__.partition(".")[0] in ("torch", "fastformer"):
        return None
    reason = remaining_attention(module)
    names, functions = _used(type(module))  # type: ignore[arg-type]
    if reason is not None or any(names[x] for x in SOFTMAX):
        return reason
    for function in functions:
        if function in _CALLED_NORMS:
            name = _CALLED_NORMS[function]
            return f"it calls F.{name}; ff.{name} computes the same"
    if not module._modules and module._parameters and _ROOTS & {*names} and _MEANS & {*names}:
        return OWN_NORM
    linears = sum(isinstance(x, nn.Linear) for x in module.children())
    kinds = {type(x).__name__.lower() for x in module.children()}
    return OWN_FEED_FORWARD if linears > 1 and _ACTIVATIONS & ({*names} | kinds) else None


def remaining_attention(module: nn.Module) -> str | None:
    """Return how a module computes its attention by itself, or None."""
    names, functions = _used(type(module))  # type: ignore[arg-type]
    if names["ALL_ATTENTION_FUNCTIONS"]:
        return _of_transformers(module)
    if F.scaled_dot_product_attention in functions:
        return DIRECT_CALL
    products = sum(names[x] for x in PRODUCTS)
    if any(names[x] for x in SOFTMAX) and products > 1:
        return own_attention(module)
    return None


def own_attention(module: nn.Module) -> str:
    """Return what to do about a module whose attention is its own."""
    if not type(module).__module__.startswith("transformers."):
        return OWN_ATTENTION
    return _of_transformers(module) or "attention of its own, whatever attn_implementation is"


def _of_transformers(module: nn.Module) -> str | None:
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    asks = hasattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS")
    return SUGGESTION.format(name) if asks and name not in (None, "fastformer") else None


@functools.cache
def _used(cls: type) -> tuple[Counter[str], list[Any]]:
    """Return how often the code of a module names what, and the functions that it finds by name: in
    the forward, and in the methods and the functions of its file that this calls.
    """
    names: Counter[str] = Counter()
    functions: list[Any] = []
    todo, seen = [inspect.getattr_static(cls, "forward", None)], set()
    while todo:
        function = inspect.unwrap(todo.pop())
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        for name, found in _named(function.__code__, function.__globals__):
            own = getattr(found, "__module__", None) or ""
            if not own.startswith("fastformer."):
                names[name] += 1
                functions += [found] if inspect.isroutine(found) else []
            if own == function.__module__:
                todo.append(found)
            todo.append(inspect.getattr_static(cls, name, None))
    return names, functions


def _named(code: CodeType, variables: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each name that the code uses, with the global object that it stands for, or None."""
    found: Any = None
    for x in dis.get_instructions(code):
        if x.opname == "LOAD_GLOBAL":
            found = variables.get(x.argval)
        elif x.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            found = getattr(found, x.argval, None) if isinstance(found, ModuleType) else None
        elif x.opname == "BINARY_OP" and x.argrepr == "@":
            yield "@", None
            continue
        else:
            found = None
            continue
        yield x.argval, found
