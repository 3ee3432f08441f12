"""Whether the values of a tensor may be read, and gradients of a gradient."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._functorch.eager_transforms import enable_inplace_requires_grad

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_transforms = torch._C._functorch.peek_interpreter_stack  # of torch.func; None without any
_CHECK_ON_GPU = os.environ.get("FASTFORMER_CHECK", "0") == "1"


class _Readings(threading.local):
    count: int = 0  # how often this thread asked to read values, and may


readings = _Readings()


def gradients_through(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    inputs: Sequence[Tensor | None],
    create_graph: bool = True,
) -> list[Tensor | None]:
    """Return the gradients of the inputs, None for those that require none. An output may depend on
    none of them, and its incoming gradient may be None.
    """
    used = [(x, g) for x, g in zip(outputs, grads) if g is not None and x.requires_grad]
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    found: Iterator[Tensor] = map(torch.zeros_like, wanted)
    if used and wanted:
        results, incoming = zip(*used)
        options = dict(create_graph=create_graph, materialize_grads=True)
        found = iter(torch.autograd.grad(results, wanted, incoming, **options))
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]


def differentiable(x: Tensor) -> Tensor:
    """Return a view of x that requires a gradient, as what torch.func.vjp saved no longer does."""
    view = x.view_as(x)
    if view.requires_grad:
        return view
    with enable_inplace_requires_grad(True):
        return view.requires_grad_()


def requires_gradient(x: Tensor) -> bool:
    """Return whether x requires a gradient, also at an outer level of torch.func. What vmap wraps
    has requires_grad=False even if the tensor in it requires a gradient.
    """
    if torch.compiler.is_compiling() or x.requires_grad:
        return x.requires_grad
    return any(inner.requires_grad for inner in wrapped_in(x))


def wrapped_in(x: Tensor) -> Iterator[Tensor]:
    """Yield the tensors inside of x that the transforms of torch.func have wrapped, the innermost
    last.
    """
    while _is_wrapped(x):
        x = torch._C._functorch.get_unwrapped(x)
        yield x


def batched(*tensors: Tensor | None) -> bool:
    """Return whether the tensors may hold several at once: within any transform of torch.func, or
    by is_grads_batched of torch.autograd.grad.
    """
    given = [x for x in tensors if x is not None]
    return transformed() or any(map(torch._C._functorch.is_legacy_batchedtensor, given))


def refuse_vmap(what: str, *tensors: Tensor) -> None:
    """Raise a RuntimeError if torch.vmap maps one of the tensors. what: what cannot be mapped."""
    if torch.compiler.is_compiling() or not transformed():
        return
    for x in tensors:
        if any(map(torch._C._functorch.is_batchedtensor, (x, *wrapped_in(x)))):
            raise RuntimeError(
                f"torch.vmap cannot map {what}; expected a call outside of vmap, with the examples "
                "as the sequences of its batch"
            )


def transformed() -> bool:
    """Return whether a transform of torch.func is active: some tensors may be wrapped by it. Dynamo
    calls this function instead of tracing it.
    """
    return _transforms() is not None


transformed.__dict__["_dynamo_marked_constant"] = True


def eager(x: Tensor) -> bool:
    """Return whether a call with x runs at once on real values: x is not traced or fake, and no
    transform of torch.func is active.
    """
    return _holds_values(x) and not transformed()


def _holds_values(x: Tensor) -> bool:
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return False
    return not _is_wrapped(x)


def may_read(x: Tensor) -> bool:
    """Return whether the values of x may be read on the host. They may on a CPU, and elsewhere only
    with FASTFORMER_CHECK=1, because reading them waits for the GPU.
    """
    if not ((x.is_cpu or _CHECK_ON_GPU) and _holds_values(x)):
        return False
    readings.count += 1
    return True


def may_decide(x: Tensor) -> bool:
    """Return whether the values of x may be read to decide what runs, also of a GPU."""
    if torch.jit.is_tracing() or not eager(x):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())
