"""The rotary positions of Hugging Face's attention layers on the op `rotary_embedding`.

A model of transformers has a function in its file, such as apply_rotary_pos_emb(q, k, cos, sin) or
apply_rotary_pos_emb(x, cos, sin), which its attention layers call in their forward. `accelerate`
gives such a layer the same forward, in which that name is bound to `Rotation` or `RotationOfOne`.
It does so if trial runs of function and op agree.

Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastformer.dispatch import backends
from fastformer.drop_in.replacements.base import AnySignature, unsupported_tensor
from fastformer.ops import functional

Pair = tuple[Tensor, Tensor]
_NAME = re.compile(r"apply_(\w+_)?(rot|rope)\w*")


class Rotation:
    """Computes what a function (q, k, cos, sin, ..., unsqueeze_dim=1) of a model computes, by the
    op where trial runs have shown that it is the same, and by the function elsewhere.
    """

    # The first arguments of the function.
    arguments: ClassVar[tuple[str, ...]] = ("q", "k", "cos", "sin")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        functools.update_wrapper(self, function)
        forms = [(name, columns) for name in _SHAPES for columns in (_DIM, _DIM // 2)]
        self.forms = {form: how for form in forms if (how := self._agreement(*form)) is not None}

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **named: Any
    ) -> Pair:
        how = self._how(q, k, cos, sin, args, named)
        if how is None:
            return self.function(q, k, cos, sin, *args, **named)
        return _rotate(q, k, cos, sin, *how)

    def _how(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, args: Any, named: Any
    ) -> tuple[str, str] | None:
        """Return how the tensors of a call are laid out, and what its pairs are, for `_rotate`; or
        None if the function must compute the call.
        """
        form = None if args or named.keys() - {"unsqueeze_dim"} else _form(q, cos, **named)
        if form is None or form not in self.forms or cos.requires_grad or sin.requires_grad:
            return None
        same = q.dtype == k.dtype and cos.dtype == sin.dtype in (q.dtype, torch.float32)
        if not same or unsupported_tensor(q, k, cos, sin) is not None:
            return None
        return form[0], self.forms[form]

    def _original(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **named: Any) -> Any:
        return self.function(q, k, cos, sin, **named)

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
            want = self._original(q, k, angles.cos(), angles.sin(), **named)
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


class RotationOfOne(Rotation):
    """The same of a function (x, cos, sin, ..., unsqueeze_dim=1), which rotates queries or keys."""

    arguments = ("x", "cos", "sin")

    def __call__(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, *args: Any, **named: Any
    ) -> Tensor:
        how = self._how(x, x, cos, sin, args, named)
        if how is None:
            return self.function(x, cos, sin, *args, **named)
        no_heads = x.narrow(2 if how[0] == "rows" else 1, 0, 0)
        return _rotate(x, no_heads, cos, sin, *how)[0]

    def _original(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **named: Any) -> Any:
        return tuple(self.function(x, cos, sin, **named) for x in (q, k))


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
def _rotation(function: FunctionType) -> Rotation | None:
    given = (*inspect.signature(function).parameters,)
    for kind in (Rotation, RotationOfOne):
        if given[: len(kind.arguments)] == kind.arguments:
            return kind(function)
    return None


def _called(forward: FunctionType) -> Iterator[tuple[str, FunctionType | None]]:
    """Yield the names of the rotary functions that a forward calls, with the functions: None for a
    method.
    """
    for name in filter(_NAME.fullmatch, forward.__code__.co_names):
        function = forward.__globals__.get(name)
        yield name, function if isinstance(function, FunctionType) else None


def rotations(original: type[nn.Module]) -> dict[str, Rotation]:
    """Return, by name, the rotary functions that the forward of a class calls, as `Rotation`."""
    forward = original.forward
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return {}
    found = ((name, function and _rotation(function)) for name, function in _called(forward))
    return {name: rotation for name, rotation in found if rotation is not None}


def unknown_rotation(original: type[nn.Module]) -> str | None:
    """Return why a class without `rotations` keeps its rotary positions, or None if it has none."""
    forward = inspect.unwrap(original.forward)
    for name, function in _called(forward) if isinstance(forward, FunctionType) else ():
        if function is None:
            return f"its {name} is not a function of its file"
        if _rotation(function) is not None:
            return f"its {name} is called by a forward with a decorator"
        given = ", ".join(inspect.signature(function).parameters)
        wanted = " or ".join(f"({', '.join(x.arguments)})" for x in (Rotation, RotationOfOne))
        return f"its {name} takes ({given}); expected {wanted}"
    return None


def disagreement_of(functions: dict[str, Rotation]) -> str | None:
    """Return why the op cannot replace one of the functions, or None."""
    for name, rotation in functions.items():
        if not rotation.forms:
            return f"its {name} computes something else than rotary_embedding, by a trial run"
    return None


class FusedRotaryAttention(AnySignature):
    """An attention layer of Hugging Face: its own forward, with the rotary positions by the op."""

    @classmethod
    def _source(cls, original: type[nn.Module]) -> tuple[Any, ...]:
        return original.forward, *rotations(original).values()

    @classmethod
    def _members_for(cls, original: type[nn.Module]) -> dict[str, Any]:
        own = original.forward
        assert isinstance(own, FunctionType)
        names = {**own.__globals__, **rotations(original)}
        names.pop("__name__", None)  # by it torch.compile would find the module's own globals
        made = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
        made.__kwdefaults__ = own.__kwdefaults__
        return {"forward": functools.update_wrapper(made, own)}
