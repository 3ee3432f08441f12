"""Attention to the parts of a projection, with one gradient for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fastformer.description import Attention, parts
from fastformer.dispatch import backends
from fastformer.dispatch.operation import OPERATIONS, Arguments
from fastformer.ops import functional
from fastformer.ops.attention import reference

_ROTATION = "rotary_embedding"
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
    query, key, *others = inputs
    joined = rotation is not None and len(projected.tensors) + bool(rotation) <= 2
    joined = joined and backends.may_join(projected.tensors[-1], *inputs, *options.values())
    plans: list[tuple[backends.Choice, Arguments]] = []
    if joined and rotation:
        plans.append(backends.planned(_ROTATION, query, key, **rotation))
    if joined:
        plans.append(backends.planned(op, *inputs, **options))
    if not joined or any(choice.backend != "triton" for choice, _ in plans):
        if rotation:
            query, key = functional.rotary_embedding(query, key, **rotation)
        if joined:  # the arguments are checked, and a seed was drawn
            return backends.run(op, **plans[-1][1] | dict(query=query, key=key))
        return getattr(functional, op)(query, key, *others, **options)
    arguments = plans[-1][1]
    turned = plans[0][1] if rotation else _UNTURNED
    given = dict(
        **dict(zip(("projected", "memory"), projected.sources())),
        heads=projected.heads,
        order=projected.order,
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
