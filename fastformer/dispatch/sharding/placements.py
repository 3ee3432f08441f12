"""Choose the placements of the DTensors that an op takes and returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fastformer.dispatch.operation import OPERATIONS, Arguments, ShardingRule
from fastformer.dispatch.sharding.call import Call, Placement, Run, exchanged
from fastformer.dispatch.sharding.local import run_local


def run(inner: Run, op: str, arguments: Arguments, first: int = 0) -> Any:
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
    given = rule.dims(flattened)
    letters = {name: x for name, x in given.items() if flattened.get(name) is not None}
    mesh = _mesh_of(op, flattened)
    if flattened.get("shard") is not None and (mesh is not None or first):
        raise ValueError(
            f"{op}: shard is {flattened['shard']} beside "
            f"{'DTensors' if mesh is not None else f'sequences_from({first})'}, which says where "
            "the shard lies; expected None"
        )
    if mesh is None:
        call = Call(op, flattened, letters, None, (), _sizes(flattened, letters), {})
        return run_local(inner, call, arguments, first)
    ways = tuple(_way(op, rule, flattened, letters, i, mesh) for i in range(mesh.ndim))
    local: Arguments = dict(flattened)
    offsets: dict[str, int] = {}
    for name, which in letters.items():
        x = flattened[name]
        placements = _wanted(which, ways)
        if not isinstance(x, DTensor):
            if not x.requires_grad and not any(way in which for way in ways if way):
                continue  # it stays a plain tensor, the same on all devices
            x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        _require(op, rule, name, x, placements, ways)
        _, start = compute_local_shape_and_global_offset(x.shape, mesh, placements)
        for letter, at in zip(which, start):
            if letter in ways and name not in rule.halves:
                offsets.setdefault(letter, at)  # the query is first: h counts query heads
        gradients = [
            Partial() if way and placed == Replicate() else placed
            for way, placed in zip(ways, placements)
        ]
        x = x.redistribute(mesh, placements)
        local[name] = x.to_local(grad_placements=gradients)
        if name in rule.halves:
            if "f" in ways and x.shape[0] % (2 * mesh.size(ways.index("f"))):
                raise ValueError(
                    f"{op}: {name} has {x.shape[0]} rows; expected a multiple of twice the "
                    f"{mesh.size(ways.index('f'))} devices that share them"
                )
            local[name] = _shards_of_halves(local[name], mesh, ways)
    call = Call(op, local, letters, mesh, ways, _sizes(flattened, letters), offsets)
    outputs = run_local(inner, call, arguments, first)
    if not isinstance(outputs, tuple):
        return _whole(outputs, call, rule.outputs(letters)[0])
    return tuple(_whole(x, call, which) for x, which in zip(outputs, rule.outputs(letters)))


def _mesh_of(op: str, arguments: Arguments) -> DeviceMesh | None:
    """Return the mesh of the DTensors, or None if there are none.

    Raises ValueError for DTensors on different meshes, and for plain parameters among DTensors.
    """
    mesh, first = None, ""
    for name, x in arguments.items():
        if isinstance(x, DTensor):
            if mesh is None:
                mesh, first = x.device_mesh, name
            elif x.device_mesh != mesh:
                raise ValueError(
                    f"{op}: {name} is on the mesh {x.device_mesh}; expected that of {first}, {mesh}"
                )
    for name, x in arguments.items():
        if mesh is not None and type(x) is torch.nn.Parameter:
            raise ValueError(
                f"{op}: {name} is a parameter that is no DTensor beside {first}, which is one; "
                "expected all parameters distributed over one mesh (fastformer.parallelize)"
            )
    return mesh


def _sizes(arguments: Arguments, letters: dict[str, str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, which in letters.items():
        for letter, size in zip(which, arguments[name].shape):
            sizes[letter] = max(size, sizes.get(letter, 0))  # h: key and value may have fewer
    return sizes


def _way(
    op: str,
    rule: ShardingRule,
    arguments: Arguments,
    letters: dict[str, str],
    i: int,
    mesh: DeviceMesh,
) -> str:
    """Return the letter that is sharded over mesh dimension i, or "" for none."""
    split: dict[str, str] = {}  # the letters sharded over i, with one such argument each
    for name, which in letters.items():
        x = arguments[name]
        placement: Placement = x.placements[i] if isinstance(x, DTensor) else Replicate()
        if not isinstance(placement, (Replicate, Partial)):
            split.setdefault(which[placement.dim], name)
    if not split:
        return ""
    known = "".join(letters.values())
    for letter in rule.sharded:
        if letter in split:
            return letter
    for letter in rule.sharded:  # else one to redistribute to, which divides evenly
        sizes = [
            size
            for name, which in letters.items()
            for way, size in zip(which, arguments[name].shape)
            if way == letter
        ]
        if letter in known and sizes and not any(size % mesh.size(i) for size in sizes):
            return letter
    name = next(iter(split.values()))
    raise ValueError(
        f"{op}: {name} has placements {arguments[name].placements}, and no other dimension divides "
        f"by the {mesh.size(i)} devices of dimension {i} of the mesh; redistribute it first"
    )


def _wanted(which: str, ways: tuple[str, ...]) -> list[Placement]:
    """Return the placements of an argument whose dimensions have the letters `which`."""
    return [Shard(which.index(way)) if way and way in which else Replicate() for way in ways]


def _shards_of_halves(x: Tensor, mesh: DeviceMesh, ways: tuple[str, ...]) -> Tensor:
    """Return the rows of z and of v for the hidden units of this device, given its shard of
    [2 d_ff, ..], in which all rows of z come before those of v.
    """
    over = [i for i, way in enumerate(ways) if way == "f"]
    if len(over) > 1:
        raise ValueError("d_ff is split over several dimensions of the mesh; expected one")
    return exchanged(x, mesh.get_group(over[0]), 2) if over else x


def _require(
    op: str,
    rule: ShardingRule,
    name: str,
    x: DTensor,
    wanted: list[Placement],
    ways: tuple[str, ...],
) -> None:
    """Require that x is gathered only if the rule allows it, and that heads divide evenly."""
    for i, (have, want, way) in enumerate(zip(x.placements, wanted, ways)):
        split = not isinstance(have, (Replicate, Partial))
        if split and want == Replicate() and name not in rule.gathers.get(way, ()):
            raise ValueError(
                f"{op}: {name} has placement {have!r} on dimension {i} of the mesh, where the op "
                f"is split over {_spelled(way)}; expected {want!r}"
            )
        devices = x.device_mesh.size(i)
        if way == "h" and want != Replicate() and x.shape[want.dim] % devices:
            raise ValueError(
                f"{op}: {name} has {x.shape[want.dim]} heads; "
                f"expected a multiple of the {devices} devices that share them"
            )


def _spelled(way: str) -> str:
    known = dict(b="the batch", h="the heads", q="the queries", f="d_ff", v="the vocabulary")
    return known.get(
        way, "the features" if way == "n" else f"dimension {way}" if way else "nothing"
    )


def _whole(x: Tensor, call: Call, which: str) -> DTensor:
    """Return the DTensor whose local shard is x; `which` has the letters of its dimensions."""
    mesh = call.mesh
    assert mesh is not None
    placements: list[Placement] = []
    for way in call.ways:
        if way in which and way:
            placements.append(Shard(which.index(way)))
        elif way == "v" and call.op != "embed":
            placements.append(Replicate())  # `_VocabularyLoss` has reduced it
        else:
            placements.append(Partial() if way else Replicate())
    if x.dim() == 0:  # a reduced loss
        placements = [Partial() if isinstance(p, Shard) else p for p in placements]
        whole = DTensor.from_local(x, mesh, placements, run_check=False)
        return whole.redistribute(mesh, [Replicate()] * mesh.ndim)
    shape = [call.sizes[w] if w in call.ways else n for w, n in zip(which, x.shape)]
    stride, count = [0] * x.dim(), 1
    order = sorted(range(x.dim()), key=lambda i: (-x.stride()[i], i))
    for i in reversed(order):
        stride[i], count = count, count * max(shape[i], 1)
    return DTensor.from_local(
        x, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )
