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

The derivatives of a gradient are those of the reference: of the `reference` of the op's record,
given the saved inputs, or of its `reference_backward`, given the arguments of the backward, if
these do not include all inputs. If an input carries a forward-mode tangent, the reference computes
the call.

Both Functions have a rule for torch.vmap: see vmap.py.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastformer.description import Attention, pack, unpack
from fastformer.dispatch.hits import NO_OPTIONS, Plan, as_key, is_known, with_hit
from fastformer.dispatch.operation import Operation
from fastformer.dispatch.state import is_transformed, unwatched_backend, use_formula
from fastformer.dispatch.vmap import Call
from fastformer.eager import (
    batched,
    differentiable,
    gradients_through,
    requires_gradient,
    transformed,
    wrapped_in,
)
from fastformer.plans import Plans, allow_tf32, getter


class _Pair:
    """What the schemas of an op and its backward define."""

    def __init__(self, op: str, record: Operation, launchers: dict[str, Any]) -> None:
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
        self.results = outputs
        self.backward_results = [r.name for r in self.backward._schema.returns]
        grads = [name.removeprefix("grad_") for name in self.backward_results]

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
        given = self.forward._schema.arguments
        self.tensors = [i for i, a in enumerate(given) if "Tensor" in str(a.type)]
        self.launchers = launchers

    def values(self, arguments: Sequence[Any], ahead: bool) -> tuple[list[Any], list[bool]]:
        """Return the arguments of the op, and which gradients are needed. ahead: whether the
        forward may compute a gradient.
        """
        values, needs = pack(arguments), [False] * len(self.grads)
        if torch.is_grad_enabled():
            inputs = [values[i] for i in self.grads]
            needs = [isinstance(x, Tensor) and requires_gradient(x) for x in inputs]
        if self.extra:
            values.append(needs if self.extra == "needs" else any(needs) and ahead)
        return values, needs

    def read(self, values: Sequence[Any]) -> list[Any]:
        """Return the arguments of the op with None in place of those that the backward does not
        read.
        """
        if self.unsaved is None:
            return list(values)
        without = self.unsaved(dict(zip(self.arguments, values)))
        return [None if n in without else x for n, x in zip(self.arguments, values)]

    def kept(self, arguments: dict[str, Any]) -> list[int]:
        """Return the outputs that the caller gets, by their places."""
        names = enumerate(self.outputs)
        return [i for i, name in names if arguments.get("return_" + name, True)]


def _as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


_pairs: dict[str, _Pair] = {}


def pair(op: str, record: Operation, launchers: dict[str, Any]) -> None:
    """Read the schemas of a registered op and of its joint form. launchers: those of all registered
    ops, by name.
    """
    _pairs[op] = _Pair(op, record, launchers)
    if record.joint is not None:
        joint = record._replace(reference=record.joint)
        _pairs["joint_" + op] = _Pair("joint_" + op, joint, launchers)


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
        read = pair.read(args)
        saved = [read[i] for i in pair.from_arguments] + [output[i] for i in pair.from_outputs]
        ctx.save_for_backward(*[x for x in saved if isinstance(x, Tensor)])
        ctx.constants = [None if isinstance(x, Tensor) else (x,) for x in saved]
        ctx.mark_non_differentiable(*output[pair.n_outputs :])
        ctx.set_materialize_grads(False)
        ctx.shapes = _shapes(output[: pair.n_outputs])

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], op: str, *args: object) -> Any:
        pair = _pairs[op]
        names = [*pair.arguments, *[pair.extra] * bool(pair.extra)]
        call = Call(info.batch_size, dict(zip(names, args)), dims[1:], pair.record.batched)
        apply = _Kernel.apply if transformed() else _apply
        return call.run(functools.partial(apply, op), pair.results)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        pair = _pairs[ctx.op]
        tensors = iter(ctx.saved_tensors)
        saved = [next(tensors) if c is None else c[0] for c in ctx.constants]
        needs = [ctx.needs_input_grad[1 + i] for i in pair.grads]
        results = _gradients(pair, saved, grads, ctx.shapes, needs)
        gradients: list[Tensor | None] = [None] * (1 + len(pair.arguments) + bool(pair.extra))
        for i, result in zip(pair.grads, results, strict=True):
            gradients[1 + i] = result
        return tuple(gradients)


class _Backward(torch.autograd.Function):
    """The backward of a kernel, which can be differentiated: by the reference."""

    @staticmethod
    def forward(op: str, *args: Any) -> tuple[Tensor, ...]:
        return _as_tuple(_pairs[op].backward(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.op, *args = inputs
        ctx.save_for_backward(*[x for x in args if isinstance(x, Tensor)])
        ctx.constants = [None if isinstance(x, Tensor) else (x,) for x in args]
        ctx.set_materialize_grads(False)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], op: str, *args: Any) -> Any:
        pair = _pairs[op]
        call = Call(info.batch_size, dict(zip(pair.wanted, args)), dims[1:], pair.record.batched)
        wanted = [pair.arguments[i] for i, need in zip(pair.grads, args[-1]) if need]
        return call.run(functools.partial(_Backward.apply, op), pair.backward_results, wanted)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        pair, tensors = _pairs[ctx.op], iter(ctx.saved_tensors)
        *args, needs = [next(tensors) if c is None else c[0] for c in ctx.constants]
        again, needed = torch.is_grad_enabled(), ctx.needs_input_grad[1:-1]
        with torch.enable_grad():
            inputs = [differentiable(x) if need else None for x, need in zip(args, needed)]
            values = [x if y is None else y for x, y in zip(args, inputs)]
            incoming, saved = values[: pair.n_outputs], values[pair.n_outputs :]
            outputs = _through_reference(pair, saved, incoming, needs)
        made = [(x, g) for x, g in zip(outputs, grads) if x is not None]
        given = [x for x, _ in made], [g for _, g in made]
        return None, *gradients_through(*given, inputs, create_graph=again), None


def _shapes(outputs: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
    return [(x.shape, x.dtype, x.device) for x in outputs]


def _gradients(
    pair: _Pair, saved: list[Any], grads: Sequence[Tensor | None], shapes: Any, needs: list[bool]
) -> list[Tensor | None]:
    """Return the gradients by PyTorch's dispatcher; None for those that are not needed."""
    ahead: Any = saved.pop() if pair.extra == "ahead" else None
    incoming = [
        torch.zeros(shape, dtype=dtype, device=device) if g is None and not optional else g
        for g, (shape, dtype, device), optional in zip(grads, shapes, pair.optional)
    ]
    if forward_ad._current_level >= 0 and _has_tangent([*saved, *incoming]):
        results: Sequence[Tensor | None] = _through_reference(pair, saved, incoming, needs)
    elif torch.is_grad_enabled() or transformed():
        results = _Backward.apply(pair.op, *incoming, *saved, needs)
    elif _is_made(ahead) and not _is_retained() and not batched(*incoming):
        pair.in_place(*incoming, *saved, ahead)
        results = (ahead,)
    else:
        results = _as_tuple(pair.backward(*incoming, *saved, needs))
    return [result if need else None for result, need in zip(results, needs, strict=True)]


def _is_made(ahead: Tensor | None) -> bool:
    """Return whether the forward has made a gradient, which hooks have not moved to other memory
    than the op that completes it takes.
    """
    return ahead is not None and ahead.numel() > 0 and ahead.is_contiguous()


class Differentiated:
    """A call of a kernel with a gradient, for all tensors of the same layouts.

    values: the arguments of the op. run: its plan, a function of the tensors of the schema. given:
    which of these are no None; the others do not pass autograd, nor do outputs behind the first
    `returned`.
    """

    def __init__(
        self, pair: _Pair, run: Callable[..., Any], values: list[Any], returned: int
    ) -> None:
        self.pair, self.run, self.n_outputs, self.returned = pair, run, pair.n_outputs, returned
        self.missing = (None,) * (pair.n_outputs - returned)  # gradients
        self.given = [k for k, i in enumerate(pair.tensors) if values[i] is not None]
        n = len(self.given)
        places = {pair.tensors[k]: place for place, k in enumerate(self.given)}
        # Functions of (*tensors, None), of (*tensors, *outputs) and of (None, *gradients).
        self.arguments = getter([places.get(i, n) for i in pair.tensors])
        read = pair.read(values)
        of_backward = [read[i] for i in pair.from_arguments]
        saved = [places[i] for i in pair.from_arguments if isinstance(read[i], Tensor)]
        self.saved = getter([*saved, *(n + i for i in pair.from_outputs)])
        self.inputs = [1 + places[i] if i in places else None for i in pair.grads]
        order = [0] * (1 + n)
        for k, i in enumerate(self.inputs, 1):
            if i is not None:
                order[i] = k
        self.places, self.order = order, getter(order)
        self.constants = [None if isinstance(x, Tensor) else (x,) for x in of_backward]
        self.constants += [None] * len(pair.from_outputs)
        self.required = [i for i, optional in enumerate(pair.optional) if not optional]
        self.shapes: Any = None
        # By the layouts of the incoming gradients and of what was saved, which hooks may move.
        self.backwards, self.recent = Plans(), tuple[Plan, ...]()

    def needs(self, ctx: Any) -> list[bool]:
        """Return which gradients of the op are needed."""
        needed = ctx.needs_input_grad
        return [i is not None and needed[i] for i in self.inputs]

    def fill(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Return all that the backward reads, given the saved tensors."""
        each = iter(tensors)
        return [next(each) if c is None else c[0] for c in self.constants]

    def backward_plan(self, tensors: Sequence[Any], needs: list[bool], retained: bool) -> Any:
        """Return a function of the incoming gradients and the saved tensors that returns the
        gradients of the inputs.
        """
        pair, grads = self.pair, tensors[: self.n_outputs]
        saved = self.fill(tensors[self.n_outputs :])
        op = pair.op + "_backward"
        ahead = saved.pop() if pair.extra == "ahead" else None
        in_place = _is_made(ahead) and not retained
        values = [*grads, *saved, ahead if in_place else needs]
        launcher = pair.launchers[op + "_" if in_place else op]
        number, last = itertools.count(1), len(tensors)
        given = [next(number) * (x is not None) for x in grads]
        given += [next(number) if c is None else 0 for c in self.constants]
        given = [*given[: len(values) - 1], last * in_place]
        run, pick = launcher.plan(*values), getter([given[i] for i in launcher.places])
        # Of (None, *results): the gradient of each input, or None.
        order = getter([k if k and needs[k - 1] else 0 for k in self.places])

        def plan(*tensors: Any) -> tuple[Tensor | None, ...]:
            found = run(*pick((None, *tensors)))
            if in_place:
                found = tensors[-1]
            return order((None, *found) if type(found) is tuple else (None, found))

        return plan


class _Planned(torch.autograd.Function):
    """`_Kernel` by the plans of a `Differentiated`. It is called past torch's `apply` in Python,
    which binds default arguments and serves the transforms of torch.func.
    """

    @staticmethod
    def forward(ctx: Any, call: Differentiated, *tensors: Tensor | None) -> Any:
        outputs = call.run(*call.arguments((*tensors, None)))
        if type(outputs) is not tuple:
            outputs = (outputs,)
        ctx.call = call
        ctx.save_for_backward(*call.saved((*tensors, *outputs)))
        ctx.set_materialize_grads(False)
        if call.shapes is None:
            call.shapes = _shapes(outputs[: call.n_outputs])
        n = call.returned
        if n > call.n_outputs:
            ctx.mark_non_differentiable(*outputs[call.n_outputs : n])
        return outputs[:n] if n > 1 else outputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call, saved = ctx.call, ctx.saved_tensors
        tensors = *grads[: call.n_outputs], *call.missing, *saved
        retained = call.pair.extra == "ahead" and _is_retained()
        values = *tensors, retained, *ctx.needs_input_grad
        unwatched = unwatched_backend() is not None
        for plan in call.recent if unwatched else ():
            results = plan.hit("", NO_OPTIONS, values)
            if results is not NotImplemented:
                return results
        special = not unwatched or torch.is_grad_enabled() or is_transformed()
        lacks = any([tensors[i] is None for i in call.required])
        if special or lacks or not all(map(is_known, tensors)):
            incoming = tensors[: call.n_outputs]
            needs = call.needs(ctx)
            results = _gradients(call.pair, call.fill(saved), incoming, call.shapes, needs)
            return call.order([None, *results])
        key = allow_tf32(), *map(as_key, values)
        plan = call.backwards.get(key)
        if plan is None:
            run = call.backward_plan(tensors, call.needs(ctx), retained)
            plan = Plan(run, None, [*range(len(tensors))], len(values))
            call.backwards.remember(key, plan)
        else:
            call.recent = with_hit(plan, call.recent, "", NO_OPTIONS, values)
        return plan(values)


# Of torch's classes the one whose `apply` is that of C.
_apply_planned = super(torch.autograd.Function, _Planned).apply
_apply = super(torch.autograd.Function, _Kernel).apply


def plan(op: str, arguments: dict[str, Any]) -> tuple[Callable[..., Any], Any, Any]:
    """Return a call of a kernel as a function of tensors of its schema, a function that returns
    those of its outputs that the caller gets, or None, and which of the tensors it takes, None for
    all.
    """
    pair = _pairs[op]
    values, needs = pair.values([*arguments.values()], True)
    run = pair.launchers[op].plan(*values)
    places = pair.kept(arguments)
    kept = itemgetter(*places)
    if any(needs):
        call = Differentiated(pair, run, values, 1 + max(places))
        return functools.partial(_apply_planned, call), kept if max(places) else None, call.given
    return run, None if len(pair.forward._schema.returns) == 1 else kept, None


def named_tensors(op: str, arguments: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the tensors of the schema of an op by their names, None for those left out."""
    pair = _pairs[op]
    values = pack(arguments.values())
    return [(pair.arguments[i], values[i]) for i in pair.tensors]


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
    levels = [x.key() for x in torch._C._functorch.get_interpreter_stack() or ()]
    jvp = torch._C._functorch.TransformType.Jvp
    if jvp in levels[:-1]:
        return True  # the innermost transform hides the tangents of the outer ones
    tensors = [x for x in values if isinstance(x, Tensor)]
    if jvp not in levels:  # vmap cannot unpack what it has wrapped
        tensors = [[x, *wrapped_in(x)][-1] for x in tensors]
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def apply(op: str, arguments: dict[str, Any]) -> Any:
    """Run a kernel so that it can be differentiated. The arguments have the names and the order of
    the reference, which the schema has as well.
    """
    pair = _pairs[op]
    is_compiling = torch.compiler.is_compiling()
    within = transformed()
    values, needs = pair.values([*arguments.values()], not (is_compiling or within))
    if not is_compiling and forward_ad._current_level >= 0 and _has_tangent(values):
        with use_formula():
            return pair.record.reference(**arguments)
    if is_compiling:  # dynamo refuses one tensor in two places: attention(x, x, x)
        for i, x in enumerate(values):
            if isinstance(x, Tensor) and any(x is y for y in values[:i]):
                values[i] = x.view_as(x)
    if within and not torch.is_grad_enabled():  # a constant of the outer levels, too
        values = [x.detach() if isinstance(x, Tensor) else x for x in values]
    if not any(needs) and not within:
        outputs = _as_tuple(pair.forward(*values))
    elif is_compiling or within:
        outputs = _Kernel.apply(op, *values)
    else:
        outputs = _apply(op, *values)
    kept = tuple([outputs[i] for i in pair.kept(arguments)])
    return kept[0] if len(kept) == 1 else kept
