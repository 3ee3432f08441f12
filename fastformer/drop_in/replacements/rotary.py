"""The rotary positions of Hugging Face's attention layers on the op `rotary_embedding`.

A model of transformers has a function in its file, such as apply_rotary_pos_emb(q, k, cos, sin),
which its attention layers call in their forward. `accelerate` gives such a layer the same forward,
in which that name is bound to `Rotation`. It does so if trial runs of function and op agree.

Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.dispatch import backends
from fastformer.drop_in.replacements.base import AnySignature, unsupported_tensor
from fastformer.ops import functional

Pair = tuple[Tensor, Tensor]
_NAME = re.compile(r"apply_(\w+_)?rot\w*")
_ARGUMENTS = ["q", "k", "cos", "sin"]


class Rotation:
    """Computes what a function (q, k, cos, sin, ..., unsqueeze_dim=1) of a model computes, by the
    op where trial runs have shown that it is the same, and by the function elsewhere.
    """

    def __init__(self, function: Callable[..., Pair]) -> None:
        self.function = function
        functools.update_wrapper(self, function)
        forms = [(name, columns) for name in _SHAPES for columns in (_DIM, _DIM // 2)]
        self.forms = {form: how for form in forms if (how := self._agreement(*form)) is not None}

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **named: Any
    ) -> Pair:
        form = None if args or named.keys() - {"unsqueeze_dim"} else _form(q, cos, **named)
        if form is not None and form in self.forms and _supported(q, k, cos, sin):
            return _rotate(q, k, cos, sin, form[0], self.forms[form])
        return self.function(q, k, cos, sin, *args, **named)

    def _agreement(self, form: str, columns: int) -> str | None:
        """Return what pairs of features are, one of _PAIRS, or None if no trial run agrees."""
        generator = torch.Generator("cpu").manual_seed(0)
        q_shape, k_shape, rows = _SHAPES[form]
        random = functools.partial(
            torch.randn, generator=generator, dtype=torch.float64, device="cpu"
        )
        q, k = random(q_shape), random(k_shape)
        angles = random(*rows, columns // 2).repeat((1,) * len(rows) + (2,))  # as most models do
        named = {"unsqueeze_dim": 2} if form == "rows" else {}
        try:
            want = self.function(q, k, angles.cos(), angles.sin(), **named)
        except Exception:  # whatever the model's code raises, this form is not for it
            return None
        with backends.use_backend("reference"):
            for pairs in _PAIRS:
                try:
                    have = _rotate(q, k, angles.cos(), angles.sin(), form, pairs)
                except ValueError:  # the op has no such table
                    continue
                if all(map(_equal, have, want)):
                    return pairs
        return None


# What a pair of features is, and its angle. The angles of neighbours may come from a table for
# halves, and a table may hold each angle once.
_PAIRS = "halves", "neighbours", "neighbours of halves", "halves, each angle once"
_DIM = 8  # of the heads of a trial run; cos and sin have as many columns, or half as many
# By form: the shapes of queries and keys, and the rows of cos and sin, in a trial run.
_SHAPES = {
    "heads": ((2, 3, 5, _DIM), (2, 1, 5, _DIM), (2, 5)),
    "rows": ((2, 5, 3, _DIM), (2, 5, 1, _DIM), (2, 5)),
    "packed": ((5, 3, _DIM), (5, 1, _DIM), (5,)),
}


def _equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.allclose(x.double(), y.double(), 1e-6, 1e-6)


def _form(q: Tensor, cos: Tensor, unsqueeze_dim: int = 1) -> tuple[str, int] | None:
    """Return how the tensors of a call are laid out, by its name in _SHAPES, and the columns of the
    trial run that is like it, or None.
    """
    name = "packed" if q.dim() == 3 and cos.dim() == 2 else None
    if q.dim() == 4 and cos.dim() == 3:
        name = {1: "heads", 2: "rows"}.get(unsqueeze_dim)
    columns, dim = cos.shape[-1], q.shape[-1]
    if name is None or columns not in (dim, dim / 2):
        return None
    return name, _DIM * columns // dim


def _supported(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    if cos.requires_grad or sin.requires_grad:
        return False
    same = q.dtype == k.dtype and cos.dtype == sin.dtype and cos.dtype in (q.dtype, torch.float32)
    return same and unsupported_tensor(q, k, cos, sin) is None


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, form: str, pairs: str) -> Pair:
    if pairs == "neighbours of halves":
        half = cos.shape[-1] // 2
        cos, sin = (x[..., :half].repeat_interleave(2, -1) for x in (cos, sin))
    elif pairs == "halves, each angle once":
        cos, sin = (torch.cat((x, x), -1) for x in (cos, sin))
    if cos.dim() == 3 and cos.shape[0] == 1:  # cos and sin are [1, S, R]
        cos, sin = cos[0], sin[0]
    if form == "rows":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    q, k = functional.rotary_embedding(q, k, cos, sin, interleaved=pairs.startswith("neighbours"))
    return (q.transpose(1, 2), k.transpose(1, 2)) if form == "rows" else (q, k)


@functools.cache
def _rotation(function: Callable[..., Pair]) -> Rotation:
    return Rotation(function)


def rotations(original: type[nn.Module]) -> dict[str, Rotation]:
    """Return, by name, the rotary functions that the forward of a class calls, as `Rotation`."""
    forward = original.forward
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return {}
    found = {}
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if not _NAME.fullmatch(name) or not isinstance(function, FunctionType):
            continue
        if [*inspect.signature(function).parameters][:4] == _ARGUMENTS:
            found[name] = _rotation(function)
    return found


def disagreement_of(functions: dict[str, Rotation]) -> str | None:
    """Return why the op cannot replace one of the functions, or None."""
    for name, rotation in functions.items():
        if not rotation.forms:
            return f"its {name} computes something else than rotary_embedding, by a trial run"
    return None


class FusedRotaryAttention(AnySignature):
    """An attention layer of Hugging Face: its own forward, with rotary positions by the op."""

    @classmethod
    def _forward_for(cls, original: type[nn.Module]) -> Callable[..., Any]:
        own = original.forward
        assert isinstance(own, FunctionType)
        names = {**own.__globals__, **rotations(original)}
        names.pop("__name__", None)  # by which Dynamo would look for the names in the module
        made = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
        made.__kwdefaults__ = own.__kwdefaults__
        return functools.update_wrapper(made, own)
