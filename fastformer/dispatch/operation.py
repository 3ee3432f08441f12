"""One record of each op: all that the dispatch knows of it.

The records stand beside the ops, in `records`, and register with the dispatch by
`backends.register`. So no module below the ops names one of them to find its kernel, its reference,
how it is sharded or how it is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

Arguments = dict[str, Any]  # of an op, by name
Sizes = dict[str, int]
Options = dict[str, Any]  # those that differ from the default: True, a word or a number
Function = Callable[..., Any]

ROW_DIMS = "0123456789"  # the letters of the leading dimensions


class ShardingRule(NamedTuple):
    """How an op is split over the devices of a mesh. A letter names each dimension, as in einsum.

    dims: returns, given the arguments, the letters of those that may be tensors; "." is never
        split.
    outputs: returns, given what `dims` does, the letters of each output.
    sharded: the letters over which the op may be split, the preferred ones first.
    gathers: by letter, the arguments that are gathered for it if they are sharded otherwise.
    halves: the arguments whose first dimension has two equal parts, of which a device gets a shard
        each.
    """

    dims: Callable[[Arguments], dict[str, str]]
    outputs: Callable[[dict[str, str]], tuple[str, ...]]
    sharded: str
    gathers: Mapping[str, tuple[str, ...]] = {}
    halves: tuple[str, ...] = ()


class Workload(NamedTuple):
    """How a measurement names a call of an op, and makes one again.

    describe: returns sizes and options, given the arguments of a checked call.
    build: returns random arguments of the public function, given a `cases.Maker`, sizes and
        options.
    limits: the sizes for which the reference in float64 has the memory.
    example: sizes and options of a small call.
    """

    describe: Callable[..., tuple[Sizes, Options]]
    build: Callable[..., Arguments]
    limits: Sizes
    example: tuple[Sizes, Options]


class Alternative(NamedTuple):
    """An op of torch that computes the same as a kernel, and may be measured to be faster.

    forward takes the arguments of the registered op `fastformer::<op>` and returns its outputs, and
    backward those of `fastformer::<op>_backward`; so either goes with the kernel of the other.
    Without a backward, that is the kernel's. None may differ by more than rounding: in a query that
    sees no key, in a dropout mask, in the order of memory, from run to run.
    """

    forward: Function
    backward: Function | None = None


def _nothing(arguments: Arguments) -> None:
    return None


class Operation(NamedTuple):
    """The record of an op.

    kernel: the module of its kernels in `fastformer.kernels`.
    contract: the public function, which checks the arguments and calls `backends.run`.
    reference: the same in eager PyTorch, given checked arguments.
    tuned: what a measurement decides, by the names of `tuned.choose`, beside which op runs.
    alternatives: what may take the place of its kernels, by the name that `explain` prints.
    signature: returns what the choice among these depends on, given the arguments of a call; None
        where they do not compute it.
    reference_backward: the gradients by differentiable primitives, given what the backward of the
        kernel takes, where that is not all of the arguments.
    part_gradients: `backends.attention_gradients` by the reference.
    """

    kernel: str
    contract: Function
    reference: Function
    sharding: ShardingRule
    workload: Workload
    tuned: tuple[str, ...] = ()
    alternatives: Mapping[str, Alternative] = {}
    signature: Callable[[Arguments], Hashable | None] = _nothing
    reference_backward: Function | None = None
    part_gradients: Function | None = None


OPERATIONS: dict[str, Operation] = {}  # by the name of the contract
