"""One autograd Function for every kernel: it pairs forward op, backward op and reference.

A kernel file registers `fastformer::<op>` and `fastformer::<op>_backward` with torch.library, and
their schemas say all there is to know:

    layer_norm(Tensor input, ..., bool unbiased) -> (Tensor output, Tensor mean, Tensor rstd)
    layer_norm_backward(Tensor grad_output, Tensor input, ..., Tensor mean, Tensor rstd,
        bool[] needs) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)

An output `x` with a `grad_x` argument is differentiable and is what the caller gets; the others are
saved for the backward, as every other argument that it names is. `needs` says, in the order of the
returns, which gradients are wanted; an unwanted one comes back empty. Under create_graph=True the
gradient is taken through the reference instead, so that it can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastformer import reference


class _Pair:
    """The schemas of one op, read once."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.forward = getattr(torch.ops.fastformer, op).default
        self.backward = getattr(torch.ops.fastformer, op + "_backward").default
        self.arguments = [a.name for a in self.forward._schema.arguments]
        outputs = [r.name for r in self.forward._schema.returns]
        wanted = [a.name for a in self.backward._schema.arguments]
        grads = [r.name.removeprefix("grad_") for r in self.backward._schema.returns]

        differentiable = [i for i, name in enumerate(outputs) if "grad_" + name in wanted]
        self.n_outputs = len(differentiable)
        assert differentiable == list(range(self.n_outputs)), f"{op}: differentiable outputs first"
        # Where each argument of the backward after the gradients, `needs` apart, comes from.
        sources = wanted[self.n_outputs : -1]
        self.from_arguments = [self.arguments.index(n) for n in sources if n in self.arguments]
        self.from_outputs = [outputs.index(n) for n in sources if n not in self.arguments]
        expected = [self.arguments[i] for i in self.from_arguments]
        expected += [outputs[i] for i in self.from_outputs]
        assert sources == expected, f"{op}_backward: inputs in the op's order, then outputs"
        self.grads = [self.arguments.index(name) for name in grads]


_pairs: dict[str, _Pair] = {}


def pair(op: str) -> None:
    """Reads the schemas of an op, once it is registered."""
    _pairs[op] = _Pair(op)


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(op: str, *args: Any) -> tuple[Tensor, ...]:
        outputs = _pairs[op].forward(*args)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        op, *args = inputs
        pair = _pairs[op]
        ctx.op = op
        saved = [args[i] for i in pair.from_arguments] + [output[i] for i in pair.from_outputs]
        ctx.save_for_backward(*[x for x in saved if isinstance(x, Tensor)])
        ctx.constants = [None if isinstance(x, Tensor) else (x,) for x in saved]
        ctx.mark_non_differentiable(*output[pair.n_outputs :])
        ctx.set_materialize_grads(False)
        ctx.shapes = [(x.shape, x.dtype, x.device) for x in output[: pair.n_outputs]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        pair = _pairs[ctx.op]
        tensors = iter(ctx.saved_tensors)
        saved = [next(tensors) if c is None else c[0] for c in ctx.constants]
        needs = [ctx.needs_input_grad[1 + i] for i in pair.grads]
        incoming = [
            torch.zeros(shape, dtype=dtype, device=device) if g is None else g
            for g, (shape, dtype, device) in zip(grads, ctx.shapes, strict=False)
        ]
        if torch.is_grad_enabled():
            results: Sequence[Tensor | None] = _through_reference(pair, saved, incoming, needs)
        else:
            results = pair.backward(*incoming, *saved, needs)
            results = results if isinstance(results, tuple) else (results,)
        gradients: list[Tensor | None] = [None] * (1 + len(pair.arguments))
        for i, result, need in zip(pair.grads, results, needs, strict=True):
            gradients[1 + i] = result if need else None
        return tuple(gradients)


def _through_reference(
    pair: _Pair, saved: list[Any], incoming: list[Tensor], needs: list[bool]
) -> list[Tensor | None]:
    """The gradients as a differentiable function of the inputs: those of the reference."""
    arguments = {pair.arguments[i]: x for i, x in zip(pair.from_arguments, saved, strict=False)}
    missing = [name for name in pair.arguments if name not in arguments]
    assert not missing, f"{pair.op}_backward does not name {missing}: it cannot be recomputed"
    # Views: an input that is an intermediate of the caller's graph is differentiated here alone.
    names = [pair.arguments[i] for i in pair.grads]
    inputs = [arguments[n].view_as(arguments[n]) if need else None for n, need in zip(names, needs)]
    arguments.update({n: x for n, x in zip(names, inputs) if x is not None})
    with reference.written_out():
        outputs = getattr(reference, pair.op)(**arguments)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [x for x in inputs if x is not None]
    results = iter(torch.autograd.grad(outputs, wanted, incoming, create_graph=True))
    return [next(results) if need else None for need in needs]


def apply(op: str, arguments: dict[str, Any]) -> Any:
    """Runs a kernel with its gradient. `arguments` in the order of the op's schema."""
    pair = _pairs[op]
    values = list(arguments.values())
    if torch.compiler.is_compiling():  # dynamo refuses one tensor in two places: attention(x, x, x)
        for i, x in enumerate(values):
            if isinstance(x, Tensor) and any(x is y for y in values[:i]):
                values[i] = x.view_as(x)
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in values):
        outputs = _Kernel.apply(op, *values)
    else:
        outputs = _Kernel.forward(op, *values)
    return outputs[0] if pair.n_outputs == 1 else outputs[: pair.n_outputs]
