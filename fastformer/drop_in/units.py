"""Which modules of a model compute attention, norms or feed-forward layers by their own code.

It reads the names in the code of their classes, and runs nothing. It may find too much: what a
module computes is seen at its first call, and stays if the rewriter does not know it.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import nn

from fastformer.dispatch.operation import OPERATIONS
from fastformer.drop_in.replacements.base import Accelerated

_ATTENTION = {
    *("scaled_dot_product_attention", "multi_head_attention_forward", "ALL_ATTENTION_FUNCTIONS"),
}
_SOFTMAX = {"softmax", "_softmax", "Softmax"}
_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum", "@"}
_SIGNS = {"BINARY_ADD": "+", "INPLACE_ADD": "+", "BINARY_MATRIX_MULTIPLY": "@"}  # Python 3.10
_NORMS = {"layer_norm", "rms_norm", "normalize"}
_ROOTS = {"rsqrt", "sqrt", "std", "norm"}
_MEANS = {"mean", "var", "std", "var_mean", "norm"}
_ACTIVATIONS = {"relu", "gelu", "silu", "sigmoid", "tanh", "elu", "mish", "glu", "hardswish"}
_NORM = nn.LayerNorm, nn.RMSNorm
_LISTS = nn.ModuleList, nn.ModuleDict, nn.Sequential
_STACKS = (
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.TransformerEncoder),
    *(nn.TransformerDecoder, nn.Transformer),
)


@dataclass
class _Found:
    """What is in a module. units: those to rewrite; core: it has attention or a feed-forward layer;
    norm: it has a norm; layer: it has a layer; stack: it has one in a list, so that it is no layer
    itself.
    """

    units: list[tuple[str, nn.Module]] = field(default_factory=list)
    core: bool = False
    norm: bool = False
    layer: bool = False
    stack: bool = False


def units(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules to rewrite, by name: the smallest that compute something by their own
    code. But a layer of a stack is one as a whole, if it holds a norm too: a residual sum and its
    norm, or the halves of a feed-forward layer, may stand in several modules of it.
    """
    found = _find("", model, False).units
    inside = {x for _, unit in found for x in unit.modules() if x is not unit}
    return {name: unit for name, unit in found if unit not in inside}


def _find(name: str, module: nn.Module, in_list: bool) -> _Found:
    if isinstance(module, Accelerated) or _package(type(module)) == "fastformer":
        return _Found(layer=True, stack=True)
    found = _Found()
    for key, child in module.named_children():
        inner = _find(f"{name}.{key}".lstrip("."), child, isinstance(module, _LISTS))
        found.units += inner.units
        found.core, found.norm = found.core or inner.core, found.norm or inner.norm
        found.layer, found.stack = found.layer or inner.layer, found.stack or inner.stack
    if _is_of_torch(module):
        found.core = found.core or isinstance(module, nn.MultiheadAttention)
        found.norm = found.norm or isinstance(module, _NORM)
        found.stack = found.stack or isinstance(module, _STACKS)
        names: frozenset[str] = frozenset()
    else:
        names = _names(type(module))  # type: ignore[arg-type]
    core, norm = _computes_core(module, names), _computes_norm(module, names)
    found.core, found.norm = found.core or core, found.norm or norm
    if found.stack or "forward" in module.__dict__:
        return found
    adds = "+" in names and any(isinstance(x, _NORM) for x in module.children())
    whole = found.core and found.norm and not isinstance(module, _LISTS)
    if whole and (in_list or (adds and not found.layer)):
        return _Found([(name, module)], True, True, layer=True, stack=in_list)
    if not found.layer and (core or norm or adds):
        found.units = [(name, module)]
    return found


def _is_of_torch(module: nn.Module) -> bool:
    """Return whether the forward of a module is torch's."""
    return _package(inspect.getattr_static(type(module), "forward", None)) == "torch"


def _package(x: Any) -> str:
    return (getattr(x, "__module__", None) or "").partition(".")[0]


def _computes_core(module: nn.Module, names: frozenset[str]) -> bool:
    """Return whether a module computes attention or a feed-forward layer."""
    if not names and not isinstance(module, nn.Sequential):
        return False
    kinds = [type(x).__name__.lower() for x in _parts(module)]
    if names & _ATTENTION or (names & _PRODUCTS and (names & _SOFTMAX or "softmax" in kinds)):
        return True
    used = {*names, *module._modules, *kinds}
    if sum("linear" in x or x == "conv1d" for x in kinds) > 1 and _activates(used):
        return True
    lists = [
        x for x in (module, *module.children()) if isinstance(x, (nn.Sequential, nn.ModuleList))
    ]
    return any(nn.Linear in map(type, x) and any(map(_is_half, x)) for x in lists)


def _activates(names: Iterable[str]) -> bool:
    return any(part in x for x in names for part in ("act", *_ACTIVATIONS))


def _is_half(module: nn.Module) -> bool:
    """Return whether a module is a linear layer with its activation, as in diffusers."""
    if _is_of_torch(module) or [type(x) for x in module.children()] != [nn.Linear]:
        return False
    return _activates(_names(type(module)))  # type: ignore[arg-type]


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module, those of a list or a dict in its place, and within an
    nn.Sequential those of another one.
    """
    lists = _LISTS if isinstance(module, nn.Sequential) else _LISTS[:2]
    for child in module.children():
        if isinstance(child, lists):
            yield from _parts(child)
        else:
            yield child


def _computes_norm(module: nn.Module, names: frozenset[str]) -> bool:
    by_hand = not module._modules and names & _ROOTS and names & _MEANS
    return bool(names & _NORMS or by_hand or (names and isinstance(module, _NORM)))


@functools.cache
def _names(cls: Any) -> frozenset[str]:
    """Return the names in the forward of a class, and in what this calls: methods of the class, and
    functions of the same package. Among them are + and @, if it computes sums and products so.
    """
    names: set[str] = set()
    bases = [x for x in cls.__mro__ if _package(x) not in ("torch", "builtins")]
    seen, ours = set(), False  # whether it calls fastformer's ops
    todo = [inspect.getattr_static(cls, "forward", None)]
    while todo:
        function = inspect.unwrap(todo.pop())
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        todo += [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
        for code in _codes(function.__code__):
            names |= {*code.co_names, *_signs(code)}
            for name in code.co_names:
                found = function.__globals__.get(name)
                ours = ours or getattr(found, "__name__", None) == "fastformer"
                todo += [found] if _package(found) == _package(function) else []
                todo += [vars(base).get(name) for base in bases]
    return frozenset(names - OPERATIONS.keys() if ours else names)


def _is_full(cell: CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, FunctionType)
    except ValueError:  # a variable that has no value yet
        return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from _codes(x)


def _signs(code: CodeType) -> Iterator[str]:
    for x in dis.get_instructions(code):
        if x.opname == "BINARY_OP":
            yield x.argrepr.removesuffix("=")
        elif x.opname in _SIGNS:
            yield _SIGNS[x.opname]
