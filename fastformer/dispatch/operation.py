"""The record of an op, `Operation`: everything that the dispatch knows about it.

The records are defined in `records` and registered by `backends.register`. So no module below the
ops has to name an op to find its kernel, its reference or its sharding rule.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

Arguments = dict[str, Any]  # the arguments of an op, by name
Function = Callable[..., Any]

ROW_DIMS = "0123456789"  # the names of the leading dimensions


class ShardingRule(NamedTuple):
    """How an op is sharded over a mesh. A letter names each tensor dimension, as in einsum.

    dims: a function of the arguments that returns, by name, the dimensions of the arguments that
        may be tensors, such as "bhqd"; "." is a dimension that is never sharded.
    outputs: a function of the result of `dims` that returns the dimensions of each output.
    sharded: the dimensions over which the op may be sharded, the preferred ones first.
    gathers: by sharded dimension, the arguments that are gathered if another one of their
        dimensions is sharded.
    halves: the arguments that stack two tensors in their first dimension; a device gets a shard of
        each of the two.
    """

    dims: Callable[[Arguments], dict[str, str]]
    outputs: Callable[[dict[str, str]], tuple[str, ...]]
    sharded: str
    gathers: Mapping[str, tuple[str, ...]] = {}
    halves: tuple[str, ...] = ()


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
    sharding: how the op is sharded over a mesh.
    unsharded: the arguments that DTensors do not take, and their defaults.
    alternatives: the ops of torch that may replace the kernels, by the name that `explain` prints.
    signature: a function of the arguments of a call that returns what the choice of an alternative
        depends on, or None if no alternative computes the call.
    faster: a function of the arguments of such a call that returns the alternative that a committed
        run shows to be faster on this architecture, or None. None where no run shows any.
    reference_backward: the gradients by differentiable primitives, given the arguments of the
        kernel's backward; for ops whose backward does not take all of the arguments.
    unsaved: a function of the arguments of a call, by their names in the schema, that returns the
        names of those that the backward of this call does not read, and takes as None.
    block: `backends.attention_block` by the reference.
    block_gradients: `backends.attention_gradients` by the reference.
    joint: the reference of the registered op `joint_<op>`, which `backends.run_joint` runs.
    """

    kernel: str
    contract: Function
    reference: Function
    sharding: ShardingRule
    unsharded: Mapping[str, Any] = {}
    alternatives: Mapping[str, Alternative] = {}
    signature: Callable[[Arguments], Hashable | None] = lambda arguments: None
    faster: Callable[[Arguments], str | None] | None = None
    reference_backward: Function | None = None
    unsaved: Callable[[Arguments], tuple[str, ...]] | None = None
    block: Function | None = None
    block_gradients: Function | None = None
    joint: Function | None = None


OPERATIONS: dict[str, Operation] = {}  # by the name of the public function
