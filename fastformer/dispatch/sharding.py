"""Ops on DTensors: each device computes its own rows.

`SequenceParallel` of torch.distributed.tensor.parallel makes such calls. The ops whose record names
`rows` compute one row after the other, so that a device needs no other rows than its own. The
gradient of a parameter, which is replicated, is the sum over the devices.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fastformer.checks import seed_tensor
from fastformer.dispatch.operation import OPERATIONS, Arguments

_SEED_STEP = 0x9E3779B9  # between the seeds of two devices


def run_on_rows(run: Callable[..., Any], op: str, arguments: Arguments) -> Any:
    """Run an op on the local rows of DTensors by `run`, which is `backends.run`.

    Raises ValueError for an op that is not computed row by row, for a loss that is reduced, for
    plain tensors beside DTensors, and for rows that are not complete on each device.
    """
    rows = OPERATIONS[op].rows
    if not rows:
        raise ValueError(
            f"{op} is given a DTensor; expected plain tensors: those of ColwiseParallel and "
            "PrepareModuleInput with use_local_output=True, or x.to_local()"
        )
    if arguments.get("reduction", "none") != "none":
        raise ValueError(
            f"{op}: reduction is {arguments['reduction']!r} beside DTensors; expected 'none'"
        )
    for name, x in arguments.items():
        if isinstance(x, Tensor) and not isinstance(x, DTensor) and name != "dropout_seed":
            raise ValueError(
                f"{op}: {name} is a plain tensor beside DTensors; expected a DTensor, as "
                "SequenceParallel and distribute_tensor make it"
            )
    first = arguments[rows[0]]
    mesh, placements = first.device_mesh, first.placements
    leading = first.dim() - _features(arguments)
    for placement in placements:
        if not (placement.is_replicate() or (type(placement) is Shard and placement.dim < leading)):
            raise ValueError(
                f"{op}: {rows[0]} has placement {placement!r}; "
                f"expected Replicate() or a Shard of its first {leading} dimensions"
            )
    local, replicated = dict(arguments), [Replicate()] * mesh.ndim
    summed = [Replicate() if p.is_replicate() else Partial() for p in placements]
    for name, x in arguments.items():
        if isinstance(x, DTensor):
            wanted, gradient = (placements, placements) if name in rows else (replicated, summed)
            local[name] = x.redistribute(mesh, wanted).to_local(grad_placements=gradient)
    if arguments.get("dropout_p"):
        local["dropout_seed"] = _own_seed(arguments, first)
    found = run(op, **local)

    def whole(x: Tensor) -> DTensor:
        shape = torch.Size((*first.shape[:leading], *x.shape[leading:]))
        stride = torch.empty(shape, device="meta").stride()
        given: Any = dict(run_check=False, shape=shape, stride=stride)
        return DTensor.from_local(x.contiguous(), mesh, placements, **given)

    return tuple(map(whole, found)) if isinstance(found, tuple) else whole(found)


def _features(arguments: Arguments) -> int:
    """Return how many dimensions of the first argument are no rows."""
    shape = arguments.get("normalized_shape")
    if shape is not None:
        return len(shape)
    return arguments["weight"].dim() if "residual" in arguments else 1


def _own_seed(arguments: Arguments, first: DTensor) -> Tensor:
    """Return a seed of this device, so that the rows of two devices drop other elements."""
    seed, number, mesh = arguments["dropout_seed"], 0, first.device_mesh
    if seed is None:
        seed = seed_tensor(None, arguments["dropout_p"], first.device)
    for i, placement in enumerate(first.placements):
        if not placement.is_replicate():
            number = number * mesh.size(i) + mesh.get_local_rank(i)
    return seed + number * _SEED_STEP
