"""What a run of `fit` depends on, by name: a run is resumed only where this is the same."""

from __future__ import annotations

import inspect
import zlib
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastformer.training.updates import tensors_of

_UPDATES = 0, 1, 10, 100, 1000, 10_000  # at which the rates of two schedules are compared
_PLAIN = bool, int, float, str, NoneType


def unwrapped(model: Any) -> Any:
    """Return the module inside of DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def settings_of(model: nn.Module, optimizer: Any, scheduler: Any, batches: Any) -> dict[str, Any]:
    """Return the seed, and texts of the modules, the optimizer, the schedule and the batches."""
    modules = [(f"model.{name}".rstrip("."), x) for name, x in unwrapped(model).named_modules()]
    groups = [
        {name: text(x) for name, x in group.items() if name in ("initial_lr", "weight_decay")}
        for group in optimizer.param_groups
    ]
    return {
        "seed": torch.initial_seed(),
        **{name: text(x) for name, x in modules},
        "optimizer": f"{type(optimizer).__name__} {text(optimizer.defaults)} {groups}",
        "scheduler": None if scheduler is None else _schedule(scheduler),
        "batches": text(batches.settings if hasattr(batches, "settings") else _length(batches)),
    }


def text(x: Any) -> str:
    """Return the numbers and words that an object holds, and the shapes of a module's tensors."""
    if isinstance(x, _PLAIN):
        return repr(x)
    if isinstance(x, torch.Tensor):
        return repr(x.item()) if x.dim() == 0 else f"{str(x.dtype)[6:]}{list(x.shape)}"
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(map(text, x))}]"
    if isinstance(x, dict):
        return ", ".join(f"{name}={text(value)}" for name, value in x.items())
    held: dict[str, Any] = {
        k: v for k, v in getattr(x, "__dict__", {}).items() if isinstance(v, _PLAIN)
    }
    if isinstance(x, nn.Module):
        held |= dict(x.named_parameters(recurse=False))
    held = {k: v for k, v in held.items() if not k.startswith("_") and k != "training"}
    return f"{type(x).__name__}({text(held)})"


def _schedule(scheduler: Any) -> str:
    """Return the arguments of a schedule that it keeps, and the rates of a LambdaLR."""
    names = inspect.signature(type(scheduler)).parameters.keys() - {"optimizer", "last_epoch"}
    kept = {name: getattr(scheduler, name) for name in sorted(names) if hasattr(scheduler, name)}
    rates = [f(n) for f in getattr(scheduler, "lr_lambdas", ()) for n in _UPDATES]
    return f"{type(scheduler).__name__}({text(kept | dict(rates=rates))})"


def _length(batches: Any) -> str | None:
    """Return the number of batches, where it is known and the same in each epoch."""
    if hasattr(batches, "load_state_dict"):
        return None
    try:
        return f"{len(batches)} batches"
    except TypeError:
        return None


def checksum(batch: Any) -> int:
    """Return a number that another batch hardly has."""
    found = 0
    for x in tensors_of(batch):
        content = x.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        found = zlib.crc32(content, zlib.crc32(repr(x.shape).encode(), found))
    return found


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Return the first difference of two settings in words, or None."""
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            return f"{name} is {ours.get(name)}, and was {theirs.get(name)}"
    return None
