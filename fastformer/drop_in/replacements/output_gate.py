"""The sigmoid gate of attention outputs in Hugging Face's layers, on the op `gated_activation`.

The attention of Qwen3-Next, and of other models of transformers, multiplies its output by a gate,
x * torch.sigmoid(y), within its forward. `with_gates` returns the code of such a forward in which
`gated` computes these products. Nothing else of the code changes.

Source: Qiu et al. 2025, "Gated Attention for Large Language Models".
"""

from __future__ import annotations

import ast
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from fastformer.checks import autocast_dtype
from fastformer.drop_in.replacements.base import unsupported_tensor
from fastformer.drop_in.replacements.known_methods import definition_of
from fastformer.ops import functional

NAME = "_fastformer_gated"  # of `gated` among the globals of the code


def gated(*, value: Any, gate: Any) -> Any:
    """Return value * torch.sigmoid(gate), by the op if the tensors have one shape and dtype."""
    if _fits(value, gate):
        return functional.gated_activation(gate, value, "sigmoid")
    return value * torch.sigmoid(gate)


def _fits(value: Any, gate: Any) -> bool:
    if not (isinstance(value, Tensor) and isinstance(gate, Tensor)) or value.dim() == 0:
        return False
    if (value.shape, value.dtype, value.device) != (gate.shape, gate.dtype, gate.device):
        return False
    if not value.is_floating_point() or autocast_dtype(value) not in (None, value.dtype):
        return False
    return unsupported_tensor(value, gate) is None


class _Products(ast.NodeTransformer):
    """Replaces x * torch.sigmoid(y) and torch.sigmoid(y) * x, with x and y in the same order."""

    found = 0

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        left, right = _argument(node.left), _argument(node.right)
        if not isinstance(node.op, ast.Mult):
            return node
        if right is not None:
            given = [ast.keyword("value", node.left), ast.keyword("gate", right)]
        elif left is not None:
            given = [ast.keyword("gate", left), ast.keyword("value", node.right)]
        else:
            return node
        self.found += 1
        return ast.Call(ast.Name(NAME, ast.Load()), [], given)


def _argument(node: ast.expr) -> ast.expr | None:
    """Return y if the expression is torch.sigmoid(y), or None."""
    match node:
        case ast.Call(ast.Attribute(ast.Name("torch"), "sigmoid"), [y], []):
            return y
    return None


def with_gates(forward: FunctionType) -> CodeType:
    """Return the code of a forward whose products x * torch.sigmoid(y) are calls of `NAME`."""
    code, products = forward.__code__, _Products()
    definition = definition_of(code) if "sigmoid" in code.co_names else None
    if definition is None or forward.__globals__.get("torch") is not torch:
        return code
    products.visit(ast.increment_lineno(definition, code.co_firstlineno - 1))
    if not products.found or code.co_freevars:
        return code
    module = ast.fix_missing_locations(ast.Module([definition], []))
    codes = compile(module, code.co_filename, "exec", dont_inherit=True).co_consts
    made = next(x for x in codes if isinstance(x, CodeType) and x.co_name == code.co_name)
    # A private name (self.__x) holds that of its class, which is not compiled here.
    return made if {*made.co_names} <= {*code.co_names, NAME} else code
