"""Attention to the parts of a projection, with one gradient for all of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fastformer.description import Attention, parts
from fastformer.dispatch import backends
from fastformer.dispatch.front import front_door
from fastformer.dispatch.operation import OPERATIONS, Arguments
from fastformer.ops import functional
from fastformer.ops.attention import reference

_ROTATION = "rotary_embedding"
_NAMES = {  # of the arguments behind query, key and value
    op.__name__: [*inspect.signature(op).parameters][3:]
    for op in (functional.scaled_dot_product_attention, functional.packed_attention)
}
_UNTURNED = dict(cos=None, sin=None, interleaved=False, query_norm=None, key_norm=None, eps=0.0)


class Projected(NamedTuple):
    """What query, key and value are parts of.

    tensors: one projection [.., H + 2 G, D]; one [.., H, D] of the query and one [.., 2 G, D] of
        key and value; or one for each.
    heads: H. order: the dimensions of a projection in the order of the op.
    """

    tensors: list[Tensor]
    heads: int
    order: tuple[int, ...]

    def parts(self) -> list[Tensor]:
        """Return query, key and value, which are views."""
        if len(self.tensors) == 3:
            return [x.permute(self.order) for x in self.tensors]
        return parts(*self.sources(), self.heads, self.order)

    def sources(self) -> tuple[Tensor, Tensor | None]:
        """Return the projection, and that of a memory or None."""
        return self.tensors[0], self.tensors[1] if len(self.tensors) == 2 else None


def joint_attention(
    op: str,
    projected: Projected,
    rotation: Mapping[str, Any] | None,
    *inputs: Any,
    **options: Any,
) -> Any:
    """Call the op with `inputs`, of which the first three are `projected.parts()`, and `options`,
    after `rotary_embedding(query, key, **rotation)` if rotation is not empty. It is None if an
    input is not a part of the projection.

    With a gradient and by the kernels, dq, dk and dv are parts of one tensor, the gradient of the
    projection. Else autograd concatenates them.
    """
    joined = rotation is not None and len(projected.tensors) + bool(rotation) <= 2
    if joined and backends.may_join(projected.tensors[-1], *inputs, *options.values()):
        options |= zip(_NAMES[op], inputs[3:])
        rotation = rotation or {}
        sources = *projected.sources(), projected.heads, projected.order
        more: dict[str, Any] = {**rotation, **options}
        return _joint(*sources, op, tuple(rotation), **more)
    query, key, *others = inputs
    if rotation:
        query, key = functional.rotary_embedding(query, key, **rotation)
    return getattr(functional, op)(query, key, *others, **options)


@front_door
def _joint(
    projected: Tensor,
    memory: Tensor | None,
    heads: int,
    order: tuple[int, ...],
    op: str,
    names: tuple[str, ...],
    **options: Any,
) -> Any:
    """Compute `joint_attention` by one op if it takes the kernels. names: the options of the
    rotation.
    """
    query, key, value = parts(projected, memory, heads, order)
    rotation = {name: options.pop(name) for name in names}
    plans: list[tuple[backends.Choice, Arguments]] = []
    if rotation:
        plans.append(backends.planned(_ROTATION, query, key, **rotation))
    plans.append(backends.planned(op, query, key, value, **options))
    arguments = plans[-1][1]
    if any(choice.backend != "triton" for choice, _ in plans):
        if rotation:
            query, key = functional.rotary_embedding(query, key, **rotation)
        # the arguments are checked, and a seed was drawn
        return backends.run(op, **arguments | dict(query=query, key=key))
    turned = plans[0][1] if rotation else _UNTURNED
    given = dict(
        projected=projected,
        memory=memory,
        heads=heads,
        order=order,
        **{name: turned[name] for name in _UNTURNED},
        attention=arguments["attention"],
        return_lse=arguments["return_lse"],
    )
    return backends.run_joint(op, plans, given)


def joint_reference(
    projected: Tensor,
    memory: Tensor | None,
    heads: int,
    order: Sequence[int],
    *,
    attention: Attention,
    return_lse: bool,
    **rotation: Any,
) -> Any:
    """Compute `joint_<op>` of kernels/attention/launchers.py in eager PyTorch."""
    query, key, value = parts(projected, memory, heads, order)
    if rotation["cos"] is not None:
        query, key = OPERATIONS[_ROTATION].reference(query, key, **rotation)
    packed = attention.cu_seqlens_q is not None
    attend = reference.packed_attention if packed else reference.scaled_dot_product_attention
    return attend(query, key, value, attention, return_lse)
