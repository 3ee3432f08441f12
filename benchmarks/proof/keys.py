"""The key of a compiled case: a digest of what it launches and of the code that is compiled for it.

A launch is its kernel, the types, constants and alignment of the arguments, the options and the
grid. The code is that of the kernel and of all that it reaches: functions under `jit`, functions
of constants, groups of arguments, and global constants. Comments, docstrings, line numbers and the
code of the host are no part of it. Triton's own functions follow from its version, which
compile.json names.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import textwrap
from types import FunctionType, ModuleType
from typing import Any

import torch
import triton.language as tl
from triton.runtime.jit import JITCallable


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def describe(value: Any) -> Any:
    """Return what identifies a value that a kernel uses, as something that `repr` writes: for code
    of this package a digest.
    """
    if isinstance(value, tl.constexpr):
        return describe(value.value)
    if isinstance(value, (list, tuple)):
        return [describe(x) for x in value]
    if isinstance(value, dict):
        return [(describe(k), describe(x)) for k, x in value.items()]
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, tl.dtype)):
        return f"{type(value).__name__} {value}"
    value = value.fn if isinstance(value, JITCallable) else value
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    if module.split(".")[0] == "fastformer" and isinstance(value, (type, FunctionType)):
        return of_code(value)
    if not isinstance(value, (type, ModuleType)) and not callable(value):
        raise TypeError(f"a kernel uses {value!r}, of which no key is known")
    return f"{module}.{getattr(value, '__qualname__', '')}"


@functools.cache
def of_code(value: Any) -> str:
    """Return the digest of a function or a class, and of the globals that it uses."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    own: set[str] = set()
    if isinstance(value, FunctionType):
        own = {*value.__code__.co_varnames, *value.__code__.co_cellvars}
    known, used = vars(sys.modules[value.__module__]), {}
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [x for x in body if not _is_string(x)] or [ast.Pass()]  # type: ignore
        name = node.value if isinstance(node, ast.Attribute) else node
        if not isinstance(name, ast.Name) or name.id in own or name.id not in known:
            continue
        found = known[name.id]
        if isinstance(node, ast.Attribute) and isinstance(found, ModuleType):
            used[ast.unparse(node)] = describe(getattr(found, node.attr))
        elif not isinstance(found, ModuleType) and found is not value:
            used[name.id] = describe(found)
    return digest((ast.unparse(tree), sorted(used.items())))


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
