"""The launchers of the attention kernels, and the ops that they are registered as."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer.batch_invariance import on
from fastformer.description import (
    MAX_HEAD_DIM,
    PACKED_SCHEMA,
    SCHEMA,
    Attention,
    pack,
    parts,
    unpack,
)

from .. import rotary
from ..launch import architecture, on_device, unit_stride, unsupported_dtype
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


class Options(NamedTuple):
    """The optional tensors of a call, in the order of the schemas."""

    attn_mask: Tensor | None
    bias: Tensor | None
    key_lengths: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    dropout_seed: Tensor | None
    mask_spans: Tensor | None
    mask_lists: Tensor | None
    mask_bits: Tensor | None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None


def _runs_forward(plan: Any) -> Any:
    """Return a function of the query, the key, the value and the tensors of `Options` that launches
    the forward. It returns (output, lse, statistics).
    """

    def run(query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor | None) -> Any:
        options = Options(*tensors)
        outputs = tuple([query.new_empty_strided(*like, **dtype) for *like, dtype in plan.outputs])
        sinks = query if options.sinks is None else options.sinks
        with on_device(query):
            plan.forward((query, key, value), *outputs, sinks, optional_inputs(query, options))
            offsets = options.cu_seqlens_q
            if offsets is not None:
                plan.tail(outputs, outputs, offsets, offsets)
        return outputs

    return run


# --------------------------------------------------------------------------------------------- ops
# A schema lists the fields of `Attention` one by one; `unpack` makes the description from them.

_INPUTS = "Tensor query, Tensor key, Tensor value"
_OUTPUTS = "Tensor output, Tensor lse, Tensor statistics"
_OPTION_GRADIENTS = "Tensor grad_bias, Tensor grad_sinks"
_GRADIENTS = "Tensor grad_query, Tensor grad_key, Tensor grad_value, " + _OPTION_GRADIENTS


def _schemas(
    op: str, options: str, given: str = _INPUTS, outputs: str = _OUTPUTS, grads: str = _GRADIENTS
) -> tuple[str, str]:
    """Return the schemas of an op and of its backward."""
    given = f"{given}, {options}"
    saved = f"Tensor grad_output, Tensor? grad_lse, {given}, {outputs}, bool[] needs"
    forward = f"{op}({given}, bool return_lse) -> ({outputs})"
    return forward, f"{op}_backward({saved}) -> ({grads})"


_FORWARD, _BACKWARD = _schemas("scaled_dot_product_attention", SCHEMA)
_PACKED_FORWARD, _PACKED_BACKWARD = _schemas("packed_attention", PACKED_SCHEMA)


def _visits(dim: int, attention: Attention) -> bool:
    """Return whether the kernels take a block mask: beside dropout or a bias, their loops spill
    for head dims above 128.
    """
    return dim <= (128 if attention.dropout_p or attention.bias is not None else 256)


def _visiting(query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> Attention:
    """Return the description with a dense mask where the kernels take no block mask: `_visits`, and
    few queries, whose keys are split over programs. Those of a packed batch take all.
    """
    if attention.cu_seqlens_q is not None:
        return attention
    queries, keys = query.shape[2], key.shape[2]
    wide = not _visits(max(query.shape[3], value.shape[3]), attention)
    if wide or splits_keys(queries, keys, attention.dropout_p, False):
        return attention.with_dense_mask(queries, keys)
    return attention


def _fake(query, key, value, *rest):
    attention = unpack(rest[:-1])
    separate_max = attention.bias is not None or attention.alibi_slopes is not None
    return empty_outputs(unit_stride(query), value, separate_max)


def _prepare(query, key, value, *rest):
    """Return the arguments as the kernels take them."""
    attention = unpack(rest[:-1])
    if attention.mask_spans is not None:
        rest = *pack([_visiting(query, key, value, attention)]), rest[-1]
    return *map(unit_stride, (query, key, value)), *rest


@register(_FORWARD, _fake, _prepare)
def forward(query, key, value, *rest):
    """Launch the forward. Returns (output [B, H, Sq, DV], lse [B, H, Sq], statistics
    [B, H, Sq, 2] or [0]), whatever `return_lse` is.
    """
    return _runs_forward(_forward_plan(query, key, value, unpack(rest[:-1])))


def _fake_backward(grad_output, grad_lse, query, key, value, *rest):
    *fields, _, _, _, needs = rest
    attention = unpack(fields)
    key_grad = bias_grad(needs[3], attention.bias, key.shape[2]) == "key"
    needs = (needs[0], *(needs[1] or needs[2] or key_grad,) * 2, *needs[3:])
    grads = [heads_like(x, x.shape[1], x.shape[3]) for x in map(unit_stride, (query, key, value))]
    others = attention.bias, attention.sinks
    grads += [query if x is None else x.new_empty(x.shape) for x in others]
    return tuple(x if need else query.new_empty(0) for x, need in zip(grads, needs))


def _prepare_saved(grad_output, grad_lse, output, lse, statistics):
    """Return the gradients, and what the forward saved, as the kernels take them."""
    grad_lse = grad_lse if grad_lse is None else grad_lse.contiguous()
    saved = unit_stride(output), lse.contiguous(), statistics.contiguous()
    return (unit_stride(grad_output), grad_lse), saved


def _prepare_backward(grad_output, grad_lse, query, key, value, *rest):
    *fields, output, lse, statistics, needs = rest
    *inputs, _ = _prepare(query, key, value, *fields, False)
    grads, saved = _prepare_saved(grad_output, grad_lse, output, lse, statistics)
    return *grads, *inputs, *saved, needs


@register(_BACKWARD, _fake_backward, _prepare_backward)
def backward(*arguments):
    """Launch delta, then those of dK and dV, dQ and dBias that are needed."""
    return _gradients(None, *arguments)


def _gradients(grads, grad_output, grad_lse, query, key, value, *rest):
    """Return the plan of a backward, which returns [dq, dk, dv, dbias, dsinks]; those not needed
    are empty. If `grads` is not None, dq, dk and dv are written into tensors like these, which the
    plan takes as `grads`.
    """
    *fields, output, _, _, needs = rest
    given = grad_output, grad_lse, output, tuple(needs), query, key, value
    plan = BackwardPlan(*given, unpack(fields), grads)

    def run(grad_output, grad_lse, query, key, value, *tensors, grads=None):
        *options, output, lse, statistics = tensors
        given = grad_output, grad_lse, output, lse, statistics, query, key, value
        with on_device(query):
            return plan.run(*given, Options(*options), grads)

    return run


# ------------------------------------------------------------------------------------------ packed


def _heads_first(x: Tensor) -> Tensor:
    """View [tokens, heads, width] as one batch, [1, heads, tokens, width]."""
    return unit_stride(x).transpose(0, 1).unsqueeze(0)


def _tokens_first(x: Tensor) -> Tensor:
    """View [1, heads, tokens, width] as [tokens, heads, width]."""
    return x.squeeze(0).transpose(0, 1)


def _fake_packed(query, key, value, *rest):
    return _packed_outputs(*_fake(*map(_heads_first, (query, key, value)), *rest))


def _packed_outputs(output: Tensor, lse: Tensor, statistics: Tensor) -> tuple[Tensor, ...]:
    """Return output [Tq, H, DV], lse [H, Tq] and statistics [H, Tq, 2] or [0]."""
    statistics = statistics.squeeze(0) if statistics.dim() == 4 else statistics
    return _tokens_first(output), lse.squeeze(0), statistics


@register(_PACKED_FORWARD, _fake_packed, _prepare)
def packed_forward(query, key, value, *rest):
    """Launch the forward over a packed batch. Returns (output [Tq, H, DV], lse [H, Tq], statistics
    [H, Tq, 2] or [0]), whatever `return_lse` is.
    """
    inputs = map(_heads_first, (query, key, value))
    forward = _runs_forward(_forward_plan(*inputs, unpack(rest[:-1])))

    def run(query, key, value, *tensors):
        return _packed_outputs(*forward(*map(_heads_first, (query, key, value)), *tensors))

    return run


def _fake_packed_backward(grad_output, grad_lse, query, key, value, *rest):
    given = map(_heads_first, (query, key, value))
    grads = _fake_backward(grad_output, grad_lse, *given, *rest)
    return tuple(_tokens_first(x) if x.dim() == 4 else x for x in grads)


@register(_PACKED_BACKWARD, _fake_packed_backward, _prepare_backward)
def packed_backward(*arguments):
    """Launch delta, then those of dK and dV, and dQ that are needed, for a packed batch."""
    plan = _packed_gradients(None, *arguments)

    def run(*tensors):
        return tuple([_tokens_first(x) if x.dim() == 4 else x for x in plan(*tensors)])

    return run


def _as_batch(grad_output, grad_lse, query, key, value, *rest):
    """Return the tensors of a packed backward as those of one sequence; the last three of the rest
    are those that the forward saved.
    """
    *others, output, lse, statistics = rest
    given = [_heads_first(x) for x in (grad_output, query, key, value, output)]
    lse = lse.unsqueeze(0)
    grad_lse = None if grad_lse is None else grad_lse.unsqueeze(0)
    statistics = statistics.unsqueeze(0) if statistics.dim() == 3 else statistics
    return given[0], grad_lse, *given[1:4], *others, given[4], lse, statistics


def _packed_gradients(grads, *arguments):
    """Return `_gradients` of a packed batch: of tensors [tokens, heads, width]."""
    *given, needs = arguments
    grads = None if grads is None else tuple(map(_heads_first, grads))
    plan = _gradients(grads, *_as_batch(*given), needs)

    def run(*tensors, grads=None):
        grads = None if grads is None else tuple(map(_heads_first, grads))
        return plan(*_as_batch(*tensors), grads=grads)

    return run


# ------------------------------------------------------------------------------------------- joint
# `joint_<op>` computes `<op>` of the queries, keys and values that lie side by side in a projection
# [.., H + 2 G, D], or of queries [.., H, D] and of keys and values in that of a memory
# [.., 2 G, D]; with cos and sin, after rotary_embedding. The backward makes one gradient for each
# projection, into which the kernels write dq, dk and dv through strides.

_JOINT = (
    "Tensor projected, Tensor? memory, int heads, int[] order, Tensor? cos, Tensor? sin, "
    "bool interleaved, Tensor? query_norm, Tensor? key_norm, float eps"
)
_ROTATED = _OUTPUTS + ", Tensor rotated_query, Tensor rotated_key"
_JOINT_GRADIENTS = (
    "Tensor grad_projected, Tensor grad_memory, Tensor grad_query_norm, Tensor grad_key_norm, "
    + _OPTION_GRADIENTS
)


def _fake_joint(attend):
    """Return the fake of a joint forward, given that of attention."""

    def fake(projected, memory, heads, order, cos, sin, *rest):
        query, key, value = parts(projected, memory, heads, order)
        rotated = [projected.new_empty(0) for _ in range(2)]
        if cos is not None:
            query, key = rotated = rotary.fake(query, key)
        return (*attend(query, key, value, *rest[4:]), *rotated)

    return fake


def _joint_forward(attend):
    """Return the forward, given that of attention."""

    def forward(projected, memory, heads, order, cos, sin, *rest):
        query, key, value = parts(projected, memory, heads, order)
        rotation = None
        if cos is not None:
            rotation = rotary.forward.plan(query, key, cos, sin, *rest[:4])
            query, key = rotary.fake(query, key)
        plan = attend.plan(query, key, value, *rest[4:])

        def run(projected, memory, cos, sin, query_norm, key_norm, *tensors):
            query, key, value = parts(projected, memory, heads, order)
            if rotation is None:
                rotated = projected.new_empty(0), projected.new_empty(0)
            else:
                query, key = rotated = rotation(query, key, cos, sin, query_norm, key_norm)
            return (*plan(query, key, value, *tensors), *rotated)

        return run

    return forward


def _fake_joint_backward(grad_output, grad_lse, projected, memory, heads, order, cos, sin, *rest):
    _, query_norm, key_norm, _, *given, needs = rest
    attention = unpack(given[:-5])
    shared = query_norm, key_norm, attention.bias, attention.sinks
    return tuple(
        projected.new_empty(0) if x is None or not need else x.new_empty(x.shape)
        for x, need in zip((projected, memory, *shared), needs)
    )


def _joint_parts(projected, memory, heads, order, weights, rotated, needs):
    """Return what the two backwards of a joint op read and write: the gradients of the projections;
    query, key and value as attention read them, and their gradients; what the rotation read, and
    its gradients. weights: those of the norms of the rotation. rotated: query and key, rotated.
    """
    joint = [x if x is None else x.new_empty(x.shape) for x in (projected, memory)]
    dq, dk, dv = parts(*joint, heads, order)
    query, key, value = parts(projected, memory, heads, order)
    norms = [
        projected.new_empty(0) if w is None or not need else torch.empty_like(w)
        for w, need in zip(weights, needs[2:4])
    ]
    own, saved = (dq, dk, *norms), [None if w is None else x for x, w in zip((query, key), weights)]
    if not rotated[0].numel():
        return joint, (query, key, value), (dq, dk, dv), saved, own
    return joint, (*rotated, value), (*map(torch.empty_like, rotated), dv), saved, own


def _joint_backward(attention_gradients):
    """Return the backward, given that of attention, whose first argument is where to write."""

    def backward(grad_output, grad_lse, projected, memory, heads, order, cos, sin, *rest):
        interleaved, *weights, eps = rest[:4]
        given, rotated, needs = rest[4:-3], rest[-3:-1], rest[-1]
        made = _joint_parts(projected, memory, heads, order, weights, rotated, needs)
        _, inputs, grads, saved, own = made
        last = needs[memory is not None]
        wanted = [needs[0], last, last, *needs[4:]]
        plan = attention_gradients(grads, grad_output, grad_lse, *inputs, *given, wanted)
        rotate = None
        if cos is not None:
            options = interleaved, *weights, eps, [True, True, *needs[2:4]]
            rotate = rotary.gradients(own, *grads[:2], *saved, cos, sin, *options)

        def run(grad_output, grad_lse, projected, memory, cos, sin, query_norm, key_norm, *rest):
            weights, given, rotated = (query_norm, key_norm), rest[:-2], rest[-2:]
            made = _joint_parts(projected, memory, heads, order, weights, rotated, needs)
            joint, inputs, grads, saved, own = made
            others = plan(grad_output, grad_lse, *inputs, *given, grads=grads)
            if rotate is not None:
                rotate(*grads[:2], *saved, cos, sin, *weights, own=own)
            found = [
                projected.new_empty(0) if x is None or not need else x
                for x, need in zip(joint, needs)
            ]
            return *found, *own[2:], *others[3:]

        return run

    return backward


def _prepare_joint_backward(grad_output, grad_lse, *rest):
    """Return the arguments as the kernels take them."""
    given = [unit_stride(x) if isinstance(x, Tensor) else x for x in rest[:10]]
    *fields, output, lse, statistics, rotated_query, rotated_key, needs = rest[10:]
    attention = unpack(fields)
    if attention.mask_spans is not None:
        fields = pack([_visiting(*parts(*given[:4]), attention)])
    grads, saved = _prepare_saved(grad_output, grad_lse, output, lse, statistics)
    rotated = map(unit_stride, (rotated_query, rotated_key))
    return *grads, *given, *fields, *saved, *rotated, needs


for _op, _schema, _attend, _fakes, _write in (
    ("scaled_dot_product_attention", SCHEMA, forward, _fake, _gradients),
    ("packed_attention", PACKED_SCHEMA, packed_forward, _fake_packed, _packed_gradients),
):
    _forward, _backward = _schemas(f"joint_{_op}", _schema, _JOINT, _ROTATED, _JOINT_GRADIENTS)
    register(_forward, _fake_joint(_fakes))(_joint_forward(_attend))
    register(_backward, _fake_joint_backward, _prepare_joint_backward)(_joint_backward(_write))


def describe(
    query: Tensor, key: Tensor, value: Tensor, attention: Attention, **_: Any
) -> str | None:
    """Return which kernels a call takes, if its shape or a measurement decides that, or None."""
    if attention.cu_seqlens_q is not None:
        query, key, value = map(_heads_first, (query, key, value))
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
