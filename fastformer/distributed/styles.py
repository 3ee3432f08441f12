"""Parallel styles: how the parameters, inputs and outputs of a module are placed on a mesh."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from fastformer.dispatch.sharding.call import Placement, as_replicated


class Placed(ParallelStyle):
    """Distribute the parameters of a module, given a placement for each name, and add no hooks.

    It needs no hooks, because the ops take DTensors; and a module without hooks can be fused with
    others. made: DTensors by the id of the parameter that they replace, so that modules which share
    a parameter share its DTensor.
    """

    def __init__(self, made: dict[int, tuple[Any, Any]], **placements: Placement) -> None:
        self._made, self._placements = made, placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placement in self._placements.items():
            old = module._parameters.get(name)
            if old is None:
                continue
            if id(old) not in self._made:  # keep the old one, so that its id is not reused
                data = distribute_tensor(old.data, device_mesh, [placement])
                self._made[id(old)] = old, nn.Parameter(data, old.requires_grad)
            module._parameters[name] = self._made[id(old)][1]
        return module


def replicate_others(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate the parameters that are not DTensors yet."""
    made: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():
        own = module._parameters.items()
        names = [name for name, p in own if p is not None and not isinstance(p, DTensor)]
        Placed(made, **dict.fromkeys(names, Replicate()))._apply(module, mesh)


class Gathered(Placed):
    """Distribute the parameters of a module, and gather the DTensors that it is called with, each
    of them once.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        module.register_forward_pre_hook(self._gather, with_kwargs=True)
        return module

    @staticmethod
    def _gather(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gathered: dict[int, Any] = {}
        for x in (*args, *kwargs.values()):
            if isinstance(x, DTensor) and id(x) not in gathered:
                gathered[id(x)] = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)
        own = {name: gathered.get(id(x), x) for name, x in kwargs.items()}
        return tuple(gathered.get(id(x), x) for x in args), own


class Rows(ParallelStyle):
    """Shard the first input [B, S, d] of a module, the start of its residual stream, and replicate
    the second, the memory.

    The first is sharded by sequences, or by tokens if the mesh size does not divide the batch; that
    of a packed batch, [tokens, d], by tokens.
    Plain tensors must be the same on all devices. plain: whether to return a plain, full tensor.
    """

    def __init__(self, plain: bool = False) -> None:
        self._plain = plain

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def split(module: nn.Module, args: tuple[Any, ...]) -> Any:
            own = list(args)
            for i, x in enumerate(args[:2]):
                if not isinstance(x, Tensor) or not x.is_floating_point():
                    continue
                if i or not isinstance(x, DTensor):
                    own[i] = x = as_replicated(x, device_mesh)
                if i == 0:
                    by_tokens = x.dim() > 2 and x.shape[0] % device_mesh.size()
                    rows = Shard(1 if by_tokens else 0)
                    own[i] = x.redistribute(placements=[rows])
            return tuple(own)

        module.register_forward_pre_hook(split)
        if self._plain:
            module.register_forward_hook(lambda module, args, out: out.full_tensor())
        return module
