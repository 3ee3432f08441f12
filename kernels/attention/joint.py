"""Attention to the parts of one projection, whose gradient is written as one tensor.

`joint_<op>` computes `<op>` of the queries, keys and values that lie side by side in a projection
[.., H + 2 G, D], or of queries [.., H, D] and of the keys and values in the projection of a memory
[.., 2 G, D]. With cos and sin, it rotates queries and keys first, after their norms if these have
weights. The backward makes one gradient for each projection, and the kernels write dq, dk and dv
into it through strides: nothing is concatenated or copied.
"""

from __future__ import annotations

import torch

from fastformer.description import PACKED_SCHEMA, SCHEMA, parts

from .. import rotary
from ..registration import register
from . import launchers

_ARGUMENTS = (
    "Tensor projected, Tensor? memory, int heads, int[] order, Tensor? cos, Tensor? sin, "
    "bool interleaved, Tensor? query_norm, Tensor? key_norm, float eps"
)
_RETURNS = "Tensor output, Tensor lse, Tensor statistics, Tensor rotated_query, Tensor rotated_key"
_GRADIENTS = (
    "Tensor grad_projected, Tensor grad_memory, Tensor grad_query_norm, Tensor grad_key_norm, "
    "Tensor grad_bias, Tensor grad_sinks"
)


def _forward(rotate, attend):
    """Return the forward, given those of the rotation and of attention, or their fakes."""

    def forward(projected, memory, heads, order, cos, sin, *rest):
        rotation, rest = rest[:4], rest[4:]
        query, key, value = parts(projected, memory, heads, order)
        rotated = [projected.new_empty(0) for _ in range(2)]
        if cos is not None:
            query, key = rotated = rotate(query, key, cos, sin, *rotation)
        return (*attend(query, key, value, *rest), *rotated)

    return forward


def _fake_backward(grad_output, grad_lse, projected, memory, heads, order, cos, sin, *rest):
    _, query_norm, key_norm, _, *given, needs = rest
    attention = launchers.unpack(given[:-5])
    shared = query_norm, key_norm, attention.bias, attention.sinks
    return tuple(
        projected.new_empty(0) if x is None or not need else x.new_empty(x.shape)
        for x, need in zip((projected, memory, *shared), needs)
    )


def _backward(attention_gradients):
    """Return the backward, given that of attention, whose first argument is where to write."""

    def backward(grad_output, grad_lse, projected, memory, heads, order, cos, sin, *rest):
        rotation, rest = rest[:4], rest[4:]
        *given, rotated_query, rotated_key, needs = rest
        sources = projected, memory
        joint = [x if x is None else x.new_empty(x.shape) for x in sources]
        grads = dq, dk, dv = parts(*joint, heads, order)
        query, key, value = parts(*sources, heads, order)
        inputs, norms = (query, key), [projected.new_empty(0) for _ in range(2)]
        if cos is not None:
            inputs = rotated_query, rotated_key
            grads = [torch.empty_like(rotated_query), torch.empty_like(rotated_key), dv]
        last = needs[memory is not None]
        wanted = [needs[0], last, last, *needs[4:]]
        others = attention_gradients(grads, grad_output, grad_lse, *inputs, value, *given, wanted)
        if cos is not None:
            interleaved, *weights, eps = rotation
            saved = [x if w is not None else None for x, w in zip((query, key), weights)]
            norms = [
                projected.new_empty(0) if w is None or not need else torch.empty_like(w)
                for w, need in zip(weights, needs[2:4])
            ]
            rotation = interleaved, *weights, eps, [True, True, *needs[2:4]]
            rotary.gradients((dq, dk, *norms), *grads[:2], *saved, cos, sin, *rotation)
        found = [
            projected.new_empty(0) if x is None or not need else x for x, need in zip(joint, needs)
        ]
        return *found, *norms, *others[3:]

    return backward


for _op, _schema, _kernels in (
    ("scaled_dot_product_attention", SCHEMA, launchers.PADDED),
    ("packed_attention", PACKED_SCHEMA, launchers.PACKED),
):
    register(
        f"joint_{_op}({_ARGUMENTS}, {_schema}, bool return_lse) -> ({_RETURNS})",
        _forward(rotary.fake, _kernels.fake),
    )(_forward(rotary.forward, _kernels.forward))
    register(
        f"joint_{_op}_backward(Tensor grad_output, Tensor? grad_lse, {_ARGUMENTS}, {_schema}, "
        f"{_RETURNS}, bool[] needs) -> ({_GRADIENTS})",
        _fake_backward,
    )(_backward(_kernels.gradients))
