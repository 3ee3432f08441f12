"""`Call`, which describes a sharded call of an op, and helpers of the sharding modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fastformer.description import Attention
from fastformer.dispatch.operation import OPERATIONS, Arguments

Run = Callable[..., Any]  # `backends.run`
Placement = Any  # torch's Placement: only some subclasses have a `dim`


def holds_dtensor(values: Iterable[Any]) -> bool:
    """Return whether one of the arguments of an op is a DTensor."""
    return any(isinstance(x, DTensor) for x in flat(values))


def flat(values: Iterable[Any]) -> Iterable[Any]:
    """Yield the arguments of an op, with an `Attention` expanded to its fields."""
    for x in values:
        if isinstance(x, Attention):
            yield from x
        else:
            yield x


class Call(NamedTuple):
    """A call of an op, and how it is sharded.

    arguments: the local arguments by name, with an `Attention` expanded to its fields.
    letters: for each tensor argument, one letter per dimension, as in `ShardingRule`.
    ways: for each mesh dimension, the letter that is sharded over it, or "".
    sizes: for each letter, the global size.
    offsets: for each sharded letter, the first global index of this shard.
    """

    op: str
    arguments: Arguments
    letters: dict[str, str]
    mesh: DeviceMesh | None
    ways: tuple[str, ...]
    sizes: dict[str, int]
    offsets: dict[str, int]

    def groups(self, letter: str) -> list[dist.ProcessGroup]:
        """Return the process groups over which a letter is sharded."""
        assert self.mesh is not None
        return [self.mesh.get_group(i) for i, way in enumerate(self.ways) if way == letter]


def require_group(call: Call, letter: str, group: int, what: str) -> None:
    """Require that every shard of a letter begins at a multiple of `group`, the number of elements
    that share the random words of dropout. All devices raise the same error.
    """
    size, mesh = call.sizes.get(letter, 0), call.mesh
    if letter == "f" and OPERATIONS[call.op].sharding.halves:
        size //= 2
    for i, way in enumerate(call.ways):
        if way == letter and mesh is not None:
            shard = -(-size // mesh.size(i))
            if mesh.size(i) > 1 and shard % group:
                raise ValueError(
                    f"{call.op}: {size} {what} on {mesh.size(i)} devices; "
                    f"expected shards of a multiple of {group}, of which dropout draws its words"
                )
            size = shard


def exchanged(x: Tensor, group: dist.ProcessGroup, parts: int) -> Tensor:
    """Return this device's shard of each of the equal parts of a tensor, concatenated.

    x is this device's shard of the first dimension of that tensor, in which the parts follow each
    other: z and v, or q, k and v.

        two devices, of z and v    z0 z1 | v0 v1  ->  z0 v0 | z1 v1

    Each device sends its shard once, and once more in the backward.
    """
    size = dist.get_world_size(group)
    return x if size == 1 else _Exchange.apply(x, group, parts, False)


class _Exchange(torch.autograd.Function):
    """All-to-all of the parts * n chunks of the full tensor: chunk c is on device c // parts, and
    goes to device c % n.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, parts: int, back: bool) -> Tensor:
        ctx.options = group, parts, back
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        held = range(rank * parts, (rank + 1) * parts)
        wanted = range(rank, parts * size, size)
        order = sorted(held, key=lambda c: (c % size, c))  # by destination
        sent = [sum(c % size == other for c in held) for other in range(size)]
        taken = [sum(c // parts == other for c in wanted) for other in range(size)]
        chunks = x.contiguous().unflatten(0, (parts, -1))
        places = torch.tensor([c - held[0] for c in order], device=x.device)
        out = torch.empty_like(chunks)
        if not back:
            dist.all_to_all_single(out, chunks[places], taken, sent, group=group)
        else:
            received = torch.empty_like(chunks)
            dist.all_to_all_single(received, chunks, sent, taken, group=group)
            out[places] = received
        return out.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, parts, back = ctx.options
        return _Exchange.apply(grad, group, parts, not back), None, None, None


def as_replicated(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return x as a replicated DTensor. A plain tensor must be the same on all devices."""
    whole = [Replicate()] * mesh.ndim
    if isinstance(x, DTensor):
        return x.redistribute(mesh, whole)
    return DTensor.from_local(x, mesh, whole, run_check=False)
