"""Choose the placements of the DTensors that an op takes and returns."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fastformer.dispatch.operation import OPERATIONS, Arguments, ShardingRule
from fastformer.dispatch.sharding.call import Call, Placement, Run, exchanged
from fastformer.dispatch.sharding.local import run_local


def run_sharded(inner: Run, op: str, arguments: Arguments, first: int = 0) -> Any:
    """Run an op on DTensors, or on a batch whose first sequence is sequence `first` of a larger
    batch. `inner` runs the op on the local shard.

    Raises ValueError for arguments on different meshes, and for a placement that the op does not
    support.
    """
    flattened = dict(arguments)
    described = flattened.pop("attention", None)
    if described is not None:
        flattened |= described._asdict()
    rule = OPERATIONS[op].sharding
    dims = {n: own for n, own in rule.dims(flattened).items() if flattened.get(n) is not None}
    mesh = _mesh_of(op, flattened)
    if flattened.get("shard") is not None and (mesh is not None or first):
        given = "DTensors" if mesh is not None else f"sequences_from({first})"
        raise ValueError(
            f"{op}: shard is {flattened['shard']}; expected None, because {given} already "
            "determine which shard the call computes"
        )
    if mesh is None:
        call = Call(op, flattened, dims, None, (), _sizes(flattened, dims), {})
        return run_local(inner, call, arguments, first)
    sharded_dims = tuple(_sharded_dim(op, rule, flattened, dims, mesh, i) for i in range(mesh.ndim))
    local: Arguments = dict(flattened)
    offsets: dict[str, int] = {}
    for name, own_dims in dims.items():
        x = flattened[name]
        placements = _placements(own_dims, sharded_dims)
        if not isinstance(x, DTensor):
            if not x.requires_grad and not any(dim in own_dims for dim in sharded_dims if dim):
                continue  # it stays a plain tensor, the same on all devices
            x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        _require(op, rule, name, x, placements, sharded_dims)
        _, starts = compute_local_shape_and_global_offset(x.shape, mesh, placements)
        for dim, start in zip(own_dims, starts):
            if dim in sharded_dims and name not in rule.halves:
                offsets.setdefault(dim, start)  # the query is first: h counts query heads
        gradients = [
            Partial() if dim and placement == Replicate() else placement
            for dim, placement in zip(sharded_dims, placements)
        ]
        x = x.redistribute(mesh, placements)
        local[name] = x.to_local(grad_placements=gradients)
        if name in rule.halves:
            if "f" in sharded_dims and x.shape[0] % (2 * mesh.size(sharded_dims.index("f"))):
                raise ValueError(
                    f"{op}: {name} has {x.shape[0]} rows; expected a multiple of twice the "
                    f"{mesh.size(sharded_dims.index('f'))} devices that share them"
                )
            local[name] = _shards_of_halves(local[name], mesh, sharded_dims)
    call = Call(op, local, dims, mesh, sharded_dims, _sizes(flattened, dims), offsets)
    outputs = run_local(inner, call, arguments, first)
    if not isinstance(outputs, tuple):
        return _global(outputs, call, rule.outputs(dims)[0])
    return tuple(_global(x, call, own_dims) for x, own_dims in zip(outputs, rule.outputs(dims)))


def _mesh_of(op: str, arguments: Arguments) -> DeviceMesh | None:
    """Return the mesh of the DTensors or None; refuse several meshes and plain parameters."""
    mesh, first = None, ""
    for name, x in arguments.items():
        if isinstance(x, DTensor):
            if mesh is None:
                mesh, first = x.device_mesh, name
            elif x.device_mesh != mesh:
                raise ValueError(
                    f"{op}: {name} is on the mesh {x.device_mesh}; expected the mesh of {first}, "
                    f"{mesh}"
                )
    for name, x in arguments.items():
        if mesh is not None and type(x) is torch.nn.Parameter:
            raise ValueError(
                f"{op}: {name} is a plain parameter, and {first} is a DTensor; expected all "
                "parameters distributed over one mesh (fastformer.parallelize)"
            )
    return mesh


def _sizes(arguments: Arguments, dims: dict[str, str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, own_dims in dims.items():
        for dim, size in zip(own_dims, arguments[name].shape):
            sizes[dim] = max(size, sizes.get(dim, 0))  # h: key and value may have fewer
    return sizes


def _sharded_dim(
    op: str,
    rule: ShardingRule,
    arguments: Arguments,
    dims: dict[str, str],
    mesh: DeviceMesh,
    i: int,
) -> str:
    """Return the dimension that the call shards over dimension i of the mesh, or "" for none."""
    given: dict[str, str] = {}  # the dimensions sharded over i, each with one such argument
    for name, own_dims in dims.items():
        x = arguments[name]
        placement: Placement = x.placements[i] if isinstance(x, DTensor) else Replicate()
        if not isinstance(placement, (Replicate, Partial)):
            given.setdefault(own_dims[placement.dim], name)
    if not given:
        return ""
    for dim in rule.sharded:
        if dim in given:
            return dim
    for dim in rule.sharded:  # otherwise, redistribute to one that divides evenly
        sizes = [
            size
            for name, own_dims in dims.items()
            for own, size in zip(own_dims, arguments[name].shape)
            if own == dim
        ]
        if sizes and not any(size % mesh.size(i) for size in sizes):
            return dim
    name = next(iter(given.values()))
    raise ValueError(
        f"{op}: {name} has placements {arguments[name].placements}, and no dimension that the op "
        f"can shard is a multiple of the {mesh.size(i)} devices of dimension {i} of the mesh; "
        "expected other placements"
    )


def _placements(own_dims: str, sharded_dims: tuple[str, ...]) -> list[Placement]:
    """Return the placements of a tensor with these dimensions."""
    return [
        Shard(own_dims.index(dim)) if dim and dim in own_dims else Replicate()
        for dim in sharded_dims
    ]


def _shards_of_halves(x: Tensor, mesh: DeviceMesh, sharded_dims: tuple[str, ...]) -> Tensor:
    """Return the rows of z and of v for the hidden units of this device, given its shard of
    [2 d_ff, ..], in which all rows of z come before those of v.
    """
    over = [i for i, dim in enumerate(sharded_dims) if dim == "f"]
    if len(over) > 1:
        raise ValueError("d_ff is sharded over several dimensions of the mesh; expected one")
    return exchanged(x, mesh.get_group(over[0]), 2) if over else x


def _require(
    op: str,
    rule: ShardingRule,
    name: str,
    x: DTensor,
    wanted: list[Placement],
    sharded_dims: tuple[str, ...],
) -> None:
    """Require that x is gathered only if the rule allows it, and that heads divide evenly."""
    for i, (have, want, dim) in enumerate(zip(x.placements, wanted, sharded_dims)):
        sharded = not isinstance(have, (Replicate, Partial))
        if sharded and want == Replicate() and name not in rule.gathers.get(dim, ()):
            raise ValueError(
                f"{op}: {name} has placement {have!r} on dimension {i} of the mesh, over which the "
                f"op shards {_spelled(dim)}; expected {want!r}"
            )
        devices = x.device_mesh.size(i)
        if dim == "h" and want != Replicate() and x.shape[want.dim] % devices:
            raise ValueError(
                f"{op}: {name} has {x.shape[want.dim]} heads; "
                f"expected a multiple of the {devices} devices that share them"
            )


def _spelled(dim: str) -> str:
    known = dict(b="the batch", h="the heads", q="the queries", f="d_ff", v="the vocabulary")
    known["n"] = "the features"
    return known.get(dim, f"dimension {dim}" if dim else "nothing")


def _global_size(call: Call, dim: str, n: int) -> int:
    """Return the global size of a dimension of an output, given its local size n."""
    if dim not in call.sharded_dims:
        return n
    if dim == "h":  # a key may have fewer heads than the query; both divide evenly
        assert call.mesh is not None
        sizes = (call.mesh.size(i) for i, sharded in enumerate(call.sharded_dims) if sharded == dim)
        return n * math.prod(sizes)
    return call.sizes[dim]


def _global(x: Tensor, call: Call, own_dims: str) -> DTensor:
    """Return the DTensor whose local shard is x, a tensor with these dimensions."""
    mesh = call.mesh
    assert mesh is not None
    placements: list[Placement] = []
    for dim in call.sharded_dims:
        if dim in own_dims and dim:
            placements.append(Shard(own_dims.index(dim)))
        elif dim == "v" and call.op != "embed":
            placements.append(Replicate())  # `_VocabularyLoss` has reduced it
        else:
            placements.append(Partial() if dim else Replicate())
    if x.dim() == 0:  # a reduced loss
        placements = [Partial() if isinstance(p, Shard) else p for p in placements]
        partial = DTensor.from_local(x, mesh, placements, run_check=False)
        return partial.redistribute(mesh, [Replicate()] * mesh.ndim)
    shape = [_global_size(call, d, n) for d, n in zip(own_dims, x.shape)]
    stride, count = [0] * x.dim(), 1
    order = sorted(range(x.dim()), key=lambda i: (-x.stride()[i], i))
    for i in reversed(order):
        stride[i], count = count, count * max(shape[i], 1)
    return DTensor.from_local(
        x, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )
