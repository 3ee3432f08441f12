"""One autograd Function for every kernel: it pairs forward op, backward op and reference.

A kernel file registers `fastformer::<op>` and `fastformer::<op>_backward` with torch.library. The
names in their schemas decide how they are paired:

    layer_norm(Tensor input, ..., bool unbiased) -> (Tensor output, Tensor mean, Tensor rstd)
    layer_norm_backward(Tensor grad_output, Tensor input, ..., Tensor mean, Tensor rstd,
        bool[] needs) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)

An output `x` is differentiable if the backward has an argument `grad_x`. The caller gets the
differentiable outputs, and after them those with an argument `return_x`; with such an argument, the
caller gets x only if it is True.
The backward's other arguments are inputs and outputs of the forward by name, and are saved for it.
The record of an op may name inputs that a call does not save (`unsaved`).
An optional `grad_x` is None if nothing depends on x. `needs` has a bool for each gradient that the
backward returns; a gradient that is not needed is returned as an empty tensor. If the last argument
of the forward is `needs`, the forward gets it too.

If the last argument of a forward is `ahead` and it is True, the forward also returns, as its last
output, the gradient of its one input for grad_x = 1; if it is False, that output is empty.
`fastformer::<op>_backward_` turns this gradient in place into the one for the actual `grad_x`. This
happens only if the graph is not retained, because it works once. `ahead` is False while tracing.

With create_graph=True, the gradient is computed by the reference instead, so that it can be
differentiated again: by the `reference` of the op's record, given the saved inputs, or by its
`reference_backward`, given the arguments of the backward, if these do not include all inputs. If an
input carries a forward-mode tangent, the reference computes the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastformer.description import Attention, pack, unpack
from fastformer.dispatch.operation import Operation
from fastformer.eager import differentiable, gradients_through, use_formula


class _Pair:
    """What the schemas of an op and its backward define."""

    def __init__(self, op: str, record: Operation) -> None:
        self.op, self.record = op, record
        self.forward = getattr(torch.ops.fastformer, op).default
        self.arguments = [a.name for a in self.forward._schema.arguments]
        self.extra = self.arguments.pop() if self.arguments[-1] in ("needs", "ahead") else ""
        outputs = [r.name for r in self.forward._schema.returns]
        # The fields of `Attention`, which are separate arguments in a schema.
        described = Attention._fields[0] in self.arguments
        self.fields = [n for n in self.arguments if described and n in Attention._fields]
        self.backward: Any = getattr(torch.ops.fastformer, op + "_backward").default
        self.wanted = wanted = [a.name for a in self.backward._schema.arguments]
        grads = [r.name.removeprefix("grad_") for r in self.backward._schema.returns]

        differentiable = [i for i, name in enumerate(outputs) if "grad_" + name in wanted]
        self.n_outputs = len(differentiable)
        asked = [name for name in outputs if "return_" + name in self.arguments]
        self.outputs = [name for name in outputs if "grad_" + name in wanted or name in asked]
        assert differentiable == list(range(self.n_outputs)), f"{op}: differentiable outputs first"
        incoming = self.backward._schema.arguments[: self.n_outputs]
        self.optional = [isinstance(a.type, torch._C.OptionalType) for a in incoming]
        # The source of each argument of the backward between the incoming gradients and `needs`.
        sources = wanted[self.n_outputs : -1]
        self.unsaved = self.record.unsaved
        self.from_arguments = [self.arguments.index(n) for n in sources if n in self.arguments]
        self.from_outputs = [outputs.index(n) for n in sources if n not in self.arguments]
        expected = [self.arguments[i] for i in self.from_arguments]
        expected += [outputs[i] for i in self.from_outputs]
        assert sources == expected, f"{op}_backward: inputs in the op's order, then outputs"
        if self.extra == "ahead":
            self.in_place = getattr(torch.ops.fastformer, op + "_backward_").default
            self.from_outputs.append(len(outputs) - 1)
        self.grads = [self.arguments.index(name) for name in grads]


def _as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


_pairs: dict[str, _Pair] = {}


def pair(op: str, record: Operation) -> None:
    """Read the schemas of a registered op and of its joint form."""
    _pairs[op] = _Pair(op, record)
    if record.joint is not None:
        joint = record._replace(reference=record.joint)
        _pairs["joint_" + op] = _Pair("joint_" + op, joint)


class _Context(torch.autograd.function.FunctionCtx):
    """What the forward of `_Kernel` saves for the backward."""

    op: str
    constants: list[tuple[object] | None]  # saved values that are no tensors; None for a tensor
    shapes: list[tuple[torch.Size, torch.dtype, torch.device]]  # of the differentiable outputs
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(op: str, *args: object) -> tuple[Tensor, ...]:
        return _as_tuple(_pairs[op].forward(*args))

    @staticmethod
    def setup_context(ctx: _Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        op, *args = inputs
        pair = _pairs[op]
        ctx.op = op
        read = args
        if pair.unsaved is not None:
            without = pair.unsaved(dict(zip(pair.arguments, args)))
            read = [None if n in without else x for n, x in zip(pair.arguments, args)]
        saved = [read[i] for i in pair.from_arguments] + [output[i] for i in pair.from_outputs]
        ctx.save_for_backward(*[x for x in saved if isinstance(x, Tensor)])
        ctx.constants = [None if isinstance(x, Tensor) else (x,) for x in saved]
        ctx.mark_non_differentiable(*output[pair.n_outputs :])
        ctx.set_materialize_grads(False)
        ctx.shapes = [(x.shape, x.dtype, x.device) for x in output[: pair.n_outputs]]

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        pair = _pairs[ctx.op]
        tensors = iter(ctx.saved_tensors)
        saved = [next(tensors) if c is None else c[0] for c in ctx.constants]
        ahead: Any = saved.pop() if pair.extra == "ahead" else None
        needs = [ctx.needs_input_grad[1 + i] for i in pair.grads]
        incoming = [
            torch.zeros(shape, dtype=dtype, device=device) if g is None and not optional else g
            for g, (shape, dtype, device), optional in zip(grads, ctx.shapes, pair.optional)
        ]
        if torch.is_grad_enabled():
            results: Sequence[Tensor | None] = _through_reference(pair, saved, incoming, needs)
            # Views: what torch.func.vjp saved is wrapped by its level, which has ended.
            given = [x.view_as(x) for x in (*saved, *incoming) if isinstance(x, Tensor)]
            if not any(x.requires_grad for x in given) and not _has_tangent(given):
                results = [g if g is None else g.detach() for g in results]
        elif ahead is not None and ahead.numel() and not _is_retained():
            pair.in_place(*incoming, *saved, ahead)
            results = (ahead,)
        else:
            results = _as_tuple(pair.backward(*incoming, *saved, needs))
        gradients: list[Tensor | None] = [None] * (1 + len(pair.arguments) + bool(pair.extra))
        for i, result, need in zip(pair.grads, results, needs, strict=True):
            gradients[1 + i] = result if need else None
        return tuple(gradients)


def _is_retained() -> bool:
    """Return whether the running backward retains the graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _through_reference(
    pair: _Pair, saved: list[Any], incoming: list[Tensor | None], needs: list[bool]
) -> list[Tensor | None]:
    """Return the gradients as a differentiable function of what is saved, by the reference."""
    backward = pair.record.reference_backward
    if backward is not None:
        named = zip(pair.wanted, [*incoming, *saved, needs], strict=True)
        return list(backward(**dict(named)))
    arguments = {pair.arguments[i]: x for i, x in zip(pair.from_arguments, saved, strict=False)}
    for name, grad in zip(pair.outputs, incoming):
        if "return_" + name in pair.arguments:
            arguments["return_" + name] = grad is not None
    missing = [name for name in pair.arguments if name not in arguments]
    assert not missing, f"{pair.op}_backward does not name {missing}: it cannot be recomputed"
    # Views, so that an input that is an intermediate of the caller's graph is differentiated up to
    # here, and no further.
    names = [pair.arguments[i] for i in pair.grads]
    inputs = [differentiable(arguments[n]) if need else None for n, need in zip(names, needs)]
    arguments.update({n: x for n, x in zip(names, inputs) if x is not None})
    if pair.fields:
        arguments["attention"] = unpack([arguments.pop(name) for name in pair.fields])
    with use_formula():
        outputs = _as_tuple(pair.record.reference(**arguments))
    returned = zip(pair.outputs, incoming)
    grads = [g for name, g in returned if arguments.get("return_" + name, True)]
    return gradients_through(outputs, grads, inputs)


def _has_tangent(values: Sequence[object]) -> bool:
    """Return whether one of the tensors may carry a tangent of forward-mode differentiation."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    if any(x.key() == torch._C._functorch.TransformType.Jvp for x in levels[:-1]):
        return True  # the innermost transform hides the tangents of the outer ones
    tensors = (x for x in values if isinstance(x, Tensor))
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def apply(op: str, arguments: dict[str, Any]) -> Any:
    """Run a kernel so that it can be differentiated. The arguments have the names and the order of
    the reference, which the schema has as well.
    """
    pair = _pairs[op]
    values = pack(arguments.values()) if pair.fields else [*arguments.values()]
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and forward_ad._current_level >= 0 and _has_tangent(values):
        with use_formula():
            return pair.record.reference(**arguments)
    if is_compiling:  # dynamo refuses one tensor in two places: attention(x, x, x)
        for i, x in enumerate(values):
            if isinstance(x, Tensor) and any(x is y for y in values[:i]):
                values[i] = x.view_as(x)
    needs = [False] * len(pair.grads)
    if torch.is_grad_enabled():
        needs = [isinstance(values[i], Tensor) and values[i].requires_grad for i in pair.grads]
    if pair.extra == "needs":
        values.append(needs)
    elif pair.extra == "ahead":
        values.append(any(needs) and not is_compiling)
    outputs = _Kernel.apply(op, *values) if any(needs) else _as_tuple(pair.forward(*values))
    kept = tuple(
        x for name, x in zip(pair.outputs, outputs) if arguments.get("return_" + name, True)
    )
    return kept[0] if len(kept) == 1 else kept
