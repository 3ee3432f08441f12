"""The launchers of the attention kernels, and the ops that they are registered as."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastformer.batch_invariance import on
from fastformer.description import MAX_HEAD_DIM, PACKED_SCHEMA, SCHEMA, Attention, parts, unpack

from .. import rotary
from ..launch import (
    architecture,
    layout,
    on_device,
    plans,
    remembered,
    unit_stride,
    unsupported_dtype,
)
from ..registration import register
from .configurations import splits_keys, widest_head
from .gluon import why_not
from .plan import (
    BackwardPlan,
    DecodePlan,
    ForwardPlan,
    bias_grad,
    empty_outputs,
    heads_like,
    optional_inputs,
    signature_of,
)
from .short_backward import short_kernels


def _forward_plan(
    query: Tensor, key: Tensor, value: Tensor, attention: Attention
) -> ForwardPlan | DecodePlan:
    """Return the plan of a forward: split-KV for few queries, unless it was measured slower, or
    they have to have the bits of a prefill.
    """
    packed = attention.cu_seqlens_q is not None
    few = splits_keys(query.shape[2], key.shape[2], attention.dropout_p, packed)
    if few and not on():
        plan = DecodePlan(query, key, value, attention)
        if not plan.is_slower():
            return plan
    return ForwardPlan(query, key, value, attention)


def _run_forward(query, key, value, attention: Attention) -> Any:
    """Launch the forward. Returns (output, lse, statistics)."""
    signature = signature_of(query, key, value, attention)
    plan = plans.get(signature)
    if plan is None:
        given = query, key, value
        query, key, value = map(unit_stride, given)
        if any(x is not y for x, y in zip(given, (query, key, value))):
            return _run_forward(query, key, value, attention)
        plan = remembered(signature, _forward_plan(query, key, value, attention))
    outputs = [
        query.new_empty_strided(shape, stride, **dtype) for shape, stride, dtype in plan.outputs
    ]
    sinks = query if attention.sinks is None else attention.sinks
    with on_device(query):
        plan.forward((query, key, value), *outputs, sinks, optional_inputs(query, attention))
        offsets = attention.cu_seqlens_q
        if offsets is not None:
            plan.tail(tuple(outputs), tuple(outputs), offsets, offsets)
    return tuple(outputs)


def _run_backward(
    grads, grad_output, grad_lse, output, lse, statistics, needs, query, key, value, attention
) -> list[Tensor]:
    """Launch the backward. Returns [dq, dk, dv, dbias, dsinks]; those not needed are empty. If
    `grads` is not None, it is where dq, dk and dv are written.
    """
    tensors = grad_output, grad_lse, output, lse, statistics  # hooks may have moved what is saved
    signature = *signature_of(query, key, value, attention), *map(layout, tensors), needs
    if grads is not None:
        signature = *signature, *map(layout, grads)
    plan = plans.get(signature)
    if plan is None:
        given = grad_output, output, query, key, value, lse, statistics
        grad_output, output, query, key, value = map(unit_stride, given[:5])
        lse, statistics = lse.contiguous(), statistics.contiguous()
        now = grad_output, output, query, key, value, lse, statistics
        if any(x is not y for x, y in zip(given, now)):
            saved = output, lse, statistics
            outgoing = grads, grad_output, grad_lse, *saved
            return _run_backward(*outgoing, needs, query, key, value, attention)
        of_call = grad_output, grad_lse, output, needs, query, key, value, attention
        made = BackwardPlan(*of_call, grads)
        plan = remembered(signature, made)
    with on_device(query):
        saved = output, lse, statistics
        return plan.run(grad_output, grad_lse, *saved, query, key, value, attention, grads)


# --------------------------------------------------------------------------------------------- ops
# A schema lists the fields of `Attention` one by one; `unpack` makes the description from them.

_ARGUMENTS = "Tensor query, Tensor key, Tensor value"


def _visits(dim: int, attention: Attention) -> bool:
    """Return whether the kernels take a block mask: beside dropout or a bias, their loops spill
    for head dims above 128.
    """
    return dim <= (128 if attention.dropout_p or attention.bias is not None else 256)


def _visiting(query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> Attention:
    """Return the description with a dense mask where the kernels take no block mask: `_visits`, and
    few queries, whose keys are split over programs.
    """
    queries, keys = query.shape[2], key.shape[2]
    wide = not _visits(max(query.shape[3], value.shape[3]), attention)
    if wide or splits_keys(queries, keys, attention.dropout_p, attention.cu_seqlens_q is not None):
        return attention.with_dense_mask(queries, keys)
    return attention


def _fake(query, key, value, *rest):
    attention = unpack(rest[:-1])
    separate_max = attention.bias is not None or attention.alibi_slopes is not None
    return empty_outputs(unit_stride(query), value, separate_max)


@register(
    f"scaled_dot_product_attention({_ARGUMENTS}, {SCHEMA}, bool return_lse) "
    "-> (Tensor output, Tensor lse, Tensor statistics)",
    _fake,
)
def forward(query, key, value, *rest):
    """Launch the forward. Returns (output [B, H, Sq, DV], lse [B, H, Sq], statistics
    [B, H, Sq, 2] or [0]), whatever `return_lse` is.
    """
    attention = unpack(rest[:-1])
    if attention.mask_spans is not None:
        attention = _visiting(query, key, value, attention)
    return _run_forward(query, key, value, attention)


def _fake_backward(grad_output, grad_lse, query, key, value, *rest):
    *fields, _, _, _, needs = rest
    attention = unpack(fields)
    key_grad = bias_grad(needs[3], attention.bias, key.shape[2]) == "key"
    needs = (needs[0], *(needs[1] or needs[2] or key_grad,) * 2, *needs[3:])
    grads = [heads_like(x, x.shape[1], x.shape[3]) for x in map(unit_stride, (query, key, value))]
    others = attention.bias, attention.sinks
    grads += [query if x is None else x.new_empty(x.shape) for x in others]
    return tuple(x if need else query.new_empty(0) for x, need in zip(grads, needs))


@register(
    "scaled_dot_product_attention_backward(Tensor grad_output, Tensor? grad_lse, "
    f"{_ARGUMENTS}, {SCHEMA}, Tensor output, Tensor lse, Tensor statistics, bool[] needs) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias, "
    "Tensor grad_sinks)",
    _fake_backward,
)
def backward(*arguments):
    """Launch delta, then those of dK and dV, dQ and dBias that are needed."""
    return tuple(_gradients(None, *arguments))


def _gradients(grads, grad_output, grad_lse, query, key, value, *rest):
    *fields, output, lse, statistics, needs = rest
    saved = output, lse, statistics, tuple(needs)
    attention = unpack(fields)
    if attention.mask_spans is not None:
        attention = _visiting(query, key, value, attention)
    return _run_backward(grads, grad_output, grad_lse, *saved, query, key, value, attention)


# ------------------------------------------------------------------------------------------ packed


def _heads_first(x: Tensor) -> Tensor:
    """View [tokens, heads, width] as one batch, [1, heads, tokens, width]."""
    return unit_stride(x).transpose(0, 1).unsqueeze(0)


def _tokens_first(x: Tensor) -> Tensor:
    """View [1, heads, tokens, width] as [tokens, heads, width]."""
    return x.squeeze(0).transpose(0, 1)


def _fake_packed(query, key, value, *rest):
    attention = unpack(rest[:-1])
    separate_max = attention.bias is not None or attention.alibi_slopes is not None
    outputs = empty_outputs(_heads_first(query), _heads_first(value), separate_max)
    return _packed_outputs(*outputs)


def _packed_outputs(output: Tensor, lse: Tensor, statistics: Tensor) -> tuple[Tensor, ...]:
    """Return output [Tq, H, DV], lse [H, Tq] and statistics [H, Tq, 2] or [0]."""
    statistics = statistics.squeeze(0) if statistics.dim() == 4 else statistics
    return _tokens_first(output), lse.squeeze(0), statistics


@register(
    f"packed_attention({_ARGUMENTS}, {PACKED_SCHEMA}, bool return_lse) "
    "-> (Tensor output, Tensor lse, Tensor statistics)",
    _fake_packed,
)
def packed_forward(query, key, value, *rest):
    """Launch the forward over a packed batch. Returns (output [Tq, H, DV], lse [H, Tq], statistics
    [H, Tq, 2] or [0]), whatever `return_lse` is.
    """
    inputs = map(_heads_first, (query, key, value))
    return _packed_outputs(*_run_forward(*inputs, unpack(rest[:-1])))


def _fake_packed_backward(grad_output, grad_lse, query, key, value, *rest):
    given = map(_heads_first, (query, key, value))
    grads = _fake_backward(grad_output, grad_lse, *given, *rest)
    return tuple(_tokens_first(x) if x.dim() == 4 else x for x in grads)


@register(
    "packed_attention_backward(Tensor grad_output, Tensor? grad_lse, "
    f"{_ARGUMENTS}, {PACKED_SCHEMA}, Tensor output, Tensor lse, Tensor statistics, bool[] needs) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias, "
    "Tensor grad_sinks)",
    _fake_packed_backward,
)
def packed_backward(*arguments):
    """Launch delta, then those of dK and dV, and dQ that are needed, for a packed batch."""
    grads = _packed_gradients(None, *arguments)
    return tuple(_tokens_first(x) if x.dim() == 4 else x for x in grads)


def _packed_gradients(grads, grad_output, grad_lse, query, key, value, *rest):
    *fields, output, lse, statistics, needs = rest
    inputs = map(_heads_first, (query, key, value))
    grad_output, output, lse = _heads_first(grad_output), _heads_first(output), lse.unsqueeze(0)
    grad_lse = None if grad_lse is None else grad_lse.unsqueeze(0)
    statistics = statistics.unsqueeze(0) if statistics.dim() == 3 else statistics
    saved = output, lse, statistics, tuple(needs)
    grads = None if grads is None else tuple(map(_heads_first, grads))
    return _run_backward(grads, grad_output, grad_lse, *saved, *inputs, unpack(fields))


# ------------------------------------------------------------------------------------------- joint
# `joint_<op>` computes `<op>` of the queries, keys and values that lie side by side in a projection
# [.., H + 2 G, D], or of queries [.., H, D] and of keys and values in that of a memory
# [.., 2 G, D]; with cos and sin, after rotary_embedding. The backward makes one gradient for each
# projection, into which the kernels write dq, dk and dv through strides.

_JOINT = (
    "Tensor projected, Tensor? memory, int heads, int[] order, Tensor? cos, Tensor? sin, "
    "bool interleaved, Tensor? query_norm, Tensor? key_norm, float eps"
)
_RETURNS = "Tensor output, Tensor lse, Tensor statistics, Tensor rotated_query, Tensor rotated_key"
_GRADIENTS = (
    "Tensor grad_projected, Tensor grad_memory, Tensor grad_query_norm, Tensor grad_key_norm, "
    "Tensor grad_bias, Tensor grad_sinks"
)


def _joint_forward(rotate, attend):
    """Return the forward, given those of the rotation and of attention, or their fakes."""

    def forward(projected, memory, heads, order, cos, sin, *rest):
        rotation, rest = rest[:4], rest[4:]
        query, key, value = parts(projected, memory, heads, order)
        rotated = [projected.new_empty(0) for _ in range(2)]
        if cos is not None:
            query, key = rotated = rotate(query, key, cos, sin, *rotation)
        return (*attend(query, key, value, *rest), *rotated)

    return forward


def _fake_joint_backward(grad_output, grad_lse, projected, memory, heads, order, cos, sin, *rest):
    _, query_norm, key_norm, _, *given, needs = rest
    attention = unpack(given[:-5])
    shared = query_norm, key_norm, attention.bias, attention.sinks
    return tuple(
        projected.new_empty(0) if x is None or not need else x.new_empty(x.shape)
        for x, need in zip((projected, memory, *shared), needs)
    )


def _joint_backward(attention_gradients):
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


for _op, _schema, _attend, _fakes, _write in (
    ("scaled_dot_product_attention", SCHEMA, forward, _fake, _gradients),
    ("packed_attention", PACKED_SCHEMA, packed_forward, _fake_packed, _packed_gradients),
):
    register(
        f"joint_{_op}({_JOINT}, {_schema}, bool return_lse) -> ({_RETURNS})",
        _joint_forward(rotary.fake, _fakes),
    )(_joint_forward(rotary.forward, _attend))
    register(
        f"joint_{_op}_backward(Tensor grad_output, Tensor? grad_lse, {_JOINT}, {_schema}, "
        f"{_RETURNS}, bool[] needs) -> ({_GRADIENTS})",
        _fake_joint_backward,
    )(_joint_backward(_write))


def describe(
    query: Tensor, key: Tensor, value: Tensor, attention: Attention, **_: Any
) -> str | None:
    """Return which kernels a call takes, if its shape or a measurement decides that, or None."""
    if attention.cu_seqlens_q is not None:
        query, key, value = map(_heads_first, (query, key, value))
    if attention.mask_spans is not None:
        attention = _visiting(query, key, value, attention)
    plan = _forward_plan(query, key, value, attention)
    found = ["the keys are split over programs"] * isinstance(plan, DecodePlan)
    found += ["the mask is bounded"] * (plan.source is not None)
    found += ["only tiles that the mask shows are visited"] * (plan.has.lists > 0)
    inputs = query, key, value
    backward = None
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        tensors = *inputs, attention.bias, attention.sinks
        needs = tuple(x is not None and x.requires_grad for x in tensors)
        output = heads_like(query, query.shape[1], value.shape[3])
        backward = BackwardPlan(output, None, output, needs, *inputs, attention)
        found += _describe_short(backward)
    if isinstance(plan, ForwardPlan) and plan.arch == "sm_90":
        found += why_not(plan.gluon, backward.gluon if backward else None)
    return ", ".join(found) or None


def _describe_short(plan: BackwardPlan) -> list[str]:
    """Return whether a short call has a backward in one kernel, or why not."""
    if plan.short:
        return [f"the backward is one kernel, {plan.one_kernel}"]
    if not short_kernels(plan) or plan.arch == "interpreter":
        return []
    why = plan.short_obstacle or "separate kernels are expected or measured to be faster"
    return [f"not the backward in one kernel: {why}"]


def supports(
    query: Tensor, key: Tensor, value: Tensor, attention: Attention, **_: Any
) -> str | None:
    """Return why the kernels cannot run this call, or None."""
    dim = max(query.shape[-1], value.shape[-1])
    if attention.mask_spans is not None and attention.cu_seqlens_q is not None:
        if not _visits(dim, attention):
            return (
                "no kernel has a head dim above 128 with a BlockMask of a packed batch and dropout "
                "or a bias, nor one above 256"
            )
    if dim > MAX_HEAD_DIM:  # most calls end before this
        widest = widest_head(architecture(query.device), query.dtype)
        if dim > widest:
            return f"the head dim is {dim}; the kernels take up to {widest} in {query.dtype} here"
    return unsupported_dtype(query)
