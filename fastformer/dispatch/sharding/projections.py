"""The projections of attention, sharded by heads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from fastformer.dispatch.sharding.call import as_replicated, exchanged


def projected(
    inputs: tuple[Tensor, Tensor, Tensor], weights: Sequence[Any], bias: Any, dim: int
) -> list[Tensor]:
    """Project query, key and value [.., d] to DTensors [.., H, dim] that are sharded by heads.

    inputs: query, key and value. Adjacent inputs that are the same tensor share one GEMM.
    weights: DTensors; one with the rows for query, key and value, or one for each of them.
    bias: one DTensor with the rows for query, key and value, or None.
    """
    mesh = weights[0].device_mesh
    rows = [_share(w, 3 // len(weights)) for w in weights]
    if len(rows) == 1:
        rows = list(rows[0].chunk(3))
    shifts = None if bias is None else _share(bias, 3).chunk(3)
    local: dict[int, Tensor] = {}  # each distinct input once
    for x in inputs:
        if id(x) not in local:
            local[id(x)] = as_replicated(x, mesh).to_local(grad_placements=[Partial()])
    out: list[Tensor] = []
    for _, group in itertools.groupby(range(3), key=lambda i: id(inputs[i])):
        of = list(group)
        weight = torch.cat([rows[i] for i in of])
        shift = None if shifts is None else torch.cat([shifts[i] for i in of])
        heads = F.linear(local[id(inputs[of[0]])], weight, shift)
        heads = heads.unflatten(-1, (len(of), -1, dim))
        placement = [Shard(heads.dim() - 2 - 1)]
        out += [DTensor.from_local(x, mesh, placement, run_check=False) for x in heads.unbind(-3)]
    return out


def _share(x: DTensor, parts: int) -> Tensor:
    """Return this device's shard of each of the equal `parts` of a parameter, concatenated."""
    mesh = x.device_mesh
    local = x.redistribute(mesh, [Shard(0)]).to_local(grad_placements=[Shard(0)])
    return exchanged(local, mesh.get_group(), parts) if parts > 1 else local
