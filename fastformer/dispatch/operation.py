"""The record of an op, `Operation`: everything that the dispatch knows about it.

The records are defined in `records` and registered by `backends.register`. So no module below the
ops has to name an op to find its kernel or its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

Arguments = dict[str, Any]  # the arguments of an op, by name
Function = Callable[..., Any]


class Alternative(NamedTuple):
    """An op of torch that computes the same as a kernel, and may be measured to be faster.

    `forward` has the arguments and outputs of the registered op `fastformer::<op>`, and `backward`
    those of `fastformer::<op>_backward`: each works with the other's kernel. If `backward` is None,
    the backward kernel is used. An alternative may differ from the kernel by rounding alone: it
    needs the same result for a query that sees no key, the same dropout mask and the same memory
    layout, and it must be deterministic.
    """

    forward: Function
    backward: Function | None = None


class Operation(NamedTuple):
    """The record of an op.

    kernel: the module of its kernels in `fastformer.kernels`.
    contract: the public function, which checks the arguments and calls `backends.run`.
    reference: the op in eager PyTorch, given checked arguments.
    rows: the arguments whose leading dimensions are the rows that the op computes one by one. They
        may be DTensors that are sharded over these dimensions; no argument of other ops may be one.
    alternatives: the ops of torch that may replace the kernels, by the name that `explain` prints.
    signature: a function of the arguments of a call that returns what the choice of an alternative
        depends on, or None if no alternative computes the call.
    faster: a function of the arguments of such a call that returns the alternative that a committed
        run shows to be faster on this architecture, or None. None where no run shows any.
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
    alternatives: Mapping[str, Alternative] = {}
    signature: Callable[[Arguments], Hashable | None] = lambda arguments: None
    faster: Callable[[Arguments], str | None] | None = None
    reference_backward: Function | None = None
    unsaved: Callable[[Arguments], tuple[str, ...]] | None = None
    joint: Function | None = None


OPERATIONS: dict[str, Operation] = {}  # by the name of the public function
