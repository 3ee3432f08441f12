"""`Call`, which describes a sharded call of an op, and what the sharding modules share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fastformer.dispatch.operation import OPERATIONS, Arguments

Run = Callable[..., Any]  # `backends.run`
Placement = Any  # torch's Placement: only some subclasses have a `dim`


class Call(NamedTuple):
    """A call of an op, and how it is sharded.

    arguments: the local arguments by name, with an `Attention` expanded to its fields.
    dims: the dimensions of each tensor argument, as in `ShardingRule`.
    sharded_dims: for each dimension of the mesh, the dimension that is sharded over it, or "".
    sizes: the global size of each dimension.
    offsets: for each sharded dimension, the global index of the first local element.
    """

    op: str
    arguments: Arguments
    dims: dict[str, str]
    mesh: DeviceMesh | None
    sharded_dims: tuple[str, ...]
    sizes: dict[str, int]
    offsets: dict[str, int]

    def groups(self, dim: str) -> list[dist.ProcessGroup]:
        """Return the process groups over which a dimension is sharded."""
        assert self.mesh is not None
        return [
            self.mesh.get_group(i) for i, sharded in enumerate(self.sharded_dims) if sharded == dim
        ]


def require_group(call: Call, dim: str, group: int, what: str) -> None:
    """Require that every shard of a dimension begins at a multiple of `group`.

    Dropout draws one set of random words for `group` consecutive elements. All devices raise the
    same error.

    what: the plural name of the elements, for the error message.
    """
    size, mesh = call.sizes.get(dim, 0), call.mesh
    if dim == "f" and OPERATIONS[call.op].sharding.halves:
        size //= 2
    for i, sharded in enumerate(call.sharded_dims):
        if sharded == dim and mesh is not None:
            shard = -(-size // mesh.size(i))
            if mesh.size(i) > 1 and shard % group:
                raise ValueError(
                    f"{call.op}: {size} {what} are sharded over {mesh.size(i)} devices; with "
                    f"dropout, expected a multiple of {group} {what} on each device"
                )
            size = shard


def exchanged(x: Tensor, group: dist.ProcessGroup, parts: int) -> Tensor:
    """Exchange the shards of stacked tensors: return this device's shard of each of them, stacked.

    x: this device's shard of `parts` tensors of equal size that are stacked in the first dimension,
        such as q, k and v. For z and v on two devices (the bar separates the devices):

            z0 z1 | v0 v1  ->  z0 v0 | z1 v1

    Each device sends its shard once, and once more in the backward.
    """
    size = dist.get_world_size(group)
    return x if size == 1 else _Exchange.apply(x, group, parts, False)


class _Exchange(torch.autograd.Function):
    """All-to-all of parts * n chunks of a tensor: chunk c goes from device c // parts to c % n."""

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
    replicated = [Replicate()] * mesh.ndim
    if isinstance(x, DTensor):
        return x.redistribute(mesh, replicated)
    return DTensor.from_local(x, mesh, replicated, run_check=False)
