"""The record of an op, `Operation`: everything that the dispatch knows about it.

The records are defined in `records` and registered by `backends.register`. So no module below the
ops has to name an op to find its kernel or its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

Arguments = dict[str, Any]  # the arguments of an op, by name
Function = Callable[..., Any]


class Operation(NamedTuple):
    """The record of an op.

    kernel: the module of its kernels in `fastformer.kernels`.
    contract: the public function, which checks the arguments and calls `backends.run`.
    reference: the op in eager PyTorch, given checked arguments.
    rows: the arguments whose leading dimensions are the rows that the op computes one by one. They
        may be DTensors that are sharded over these dimensions; no argument of other ops may be one.
    batched: for torch.vmap, the arguments and outputs that have rows or sequences, which the op
        computes one by one, but for dropout and a reduction. The values are
             d: exactly d dimensions, of which the first is that of the sequences or rows;
             0: any number of leading dimensions of rows;
            -d: up to d dimensions; the first may be missing or 1, for all sequences.
        The gradients have the names of their tensors.
    by_torch: torch's own op, given checked arguments; `auto` runs it where it was measured to be
        faster. It needs the same results but for rounding, in the same memory layout.
    suits_torch: whether it computes a call, given its arguments.
    direct: a function of the checked arguments that returns torch's own op for such calls on a CPU,
        as a function of the tensors among them; None if it does not compute them.
    reference_backward: the gradients by differentiable primitives, given the arguments of the
        kernel's backward; for ops whose backward does not take all of the arguments.
    unsaved: a function of the arguments of a call, by their names in the schema, that returns the
        names of those that the backward of this call does not read, and takes as None.
    joint: the reference of the registered op `joint_<op>`, which `backends.run_joint` runs.
    """

    kernel: str
    contract: Function
    reference: Function
    rows: tuple[str, ...] = ()
    batched: Mapping[str, int] = MappingProxyType({})
    by_torch: Function | None = None
    suits_torch: Callable[[Arguments], bool] = lambda arguments: False
    direct: Callable[..., Function | None] | None = None
    reference_backward: Function | None = None
    unsaved: Callable[[Arguments], tuple[str, ...]] | None = None
    joint: Function | None = None


OPERATIONS: dict[str, Operation] = {}  # by the name of the public function


def flat(arguments: Arguments) -> Arguments:
    """Return the arguments of a checked call with the fields of `Attention` beside the others."""
    fields = dict(arguments)
    attention = fields.pop("attention", None)
    return fields if attention is None else fields | attention._asdict()


def differentiated(arguments: Arguments) -> bool:
    """Return whether a call will have a backward."""
    tensors = (x for x in flat(arguments).values() if isinstance(x, Tensor))
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


# Arguments that are not in the name of a call: they do not change what is the fastest for it.
_LEFT_OUT = ("dropout_seed", "return_lse", "eps", "scale")


def call_name(op: str, arguments: Arguments) -> str:
    """Return the name of a checked call: op, dtype, and the value of each argument, or its shape,
    its strides unless it is contiguous, and its dtype if it is another one.
    """
    fields = {name: x for name, x in flat(arguments).items() if name not in _LEFT_OUT}
    tensors = (x for x in fields.values() if isinstance(x, Tensor))
    dtype = next(x.dtype for x in tensors if x.is_floating_point())
    parts = [op, _short(dtype)]
    for name, x in fields.items():
        if isinstance(x, Tensor):
            more = "" if x.is_contiguous() else ":" + _short(x.stride())
            more += "" if x.dtype == dtype else ":" + _short(x.dtype)
            parts.append(f"{name}={_short(x.shape)}{more}")
        elif x:
            parts.append(name if isinstance(x, (bool, float)) else f"{name}={_short(x)}")
    return " ".join(parts + ["backward"] * differentiated(arguments))


def _short(x: Any) -> str:
    return "x".join(map(str, x)) if isinstance(x, (tuple, list)) else str(x).removeprefix("torch.")
