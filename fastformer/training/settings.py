"""What a run of `fit` depends on, by name: a run is resumed only where this is the same."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterable
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_PLAIN = bool, int, float, str, NoneType


def unwrapped(model: Any) -> Any:
    """Return the module inside of DistributedDataParallel and torch.compile."""
    while (compiled := hasattr(model, "_orig_mod")) or isinstance(model, DistributedDataParallel):
        model = model._orig_mod if compiled else model.module
    return model


def settings_of(
    model: nn.Module, optimizer: Any, scheduler: Any, batches: Any, loss_compute: Any
) -> dict[str, Any]:
    """Return the seed, and texts of modules, optimizer, schedule, batches and loss."""
    modules = {f"model.{name}": text(x) for name, x in unwrapped(model).named_modules()}
    rates = [[x.get("initial_lr"), x.get("weight_decay")] for x in optimizer.param_groups]
    defaults = {k: v for k, v in optimizer.defaults.items() if not isinstance(v, torch.Tensor)}
    criterion = getattr(loss_compute, "criterion", None)
    weights = criterion.buffers() if isinstance(criterion, nn.Module) else ()
    return {
        "seed": torch.initial_seed(),
        **modules,
        "optimizer": f"{type(optimizer).__name__}({text(defaults)}, {text(rates)})",
        "scheduler": text(scheduler) if scheduler is None else _schedule(scheduler),
        "batches": text(batches.settings if hasattr(batches, "settings") else _length(batches)),
        "loss_compute": text(loss_compute),
        "criterion": f"{text(criterion)}, weights {checksum(weights)}",
    }


def text(x: Any) -> str:
    """Return the numbers and words that an object holds, and the shapes of a module's tensors."""
    if isinstance(x, _PLAIN):
        return repr(x)
    if isinstance(x, nn.Parameter):
        return f"{str(x.dtype)[6:]}{list(x.shape)}"
    if isinstance(x, torch.Tensor):
        return str(x.tolist())
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(map(text, x))}]"
    if isinstance(x, dict):
        return ", ".join(f"{name}={text(value)}" for name, value in x.items())
    held: dict[str, Any] = getattr(x, "__dict__", {})
    held = {k: v for k, v in held.items() if isinstance(v, _PLAIN)}
    held |= x._parameters if isinstance(x, nn.Module) else {}
    public = {k: v for k, v in held.items() if k[0] != "_" and k != "training"}
    return f"{type(x).__name__}({text(public)})"


def _schedule(scheduler: Any) -> str:
    """Return the arguments of a schedule that it keeps, and the rates of a LambdaLR."""
    names = inspect.signature(type(scheduler)).parameters.keys() - {"optimizer", "last_epoch"}
    kept = {name: getattr(scheduler, name) for name in sorted(names) if hasattr(scheduler, name)}
    kept["parts"] = [_schedule(x) for x in getattr(scheduler, "_schedulers", ())]
    rates = [f(n) for f in getattr(scheduler, "lr_lambdas", ()) for n in (0, 1)]
    return f"{type(scheduler).__name__}({text(kept | dict(rates=rates))})"


def _length(batches: Any) -> int | None:
    """Return the number of batches, where it is known and the same in each epoch."""
    try:
        return None if hasattr(batches, "load_state_dict") else len(batches)
    except TypeError:
        return None


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Return a number that other tensors hardly have."""
    found = 0
    for x in tensors:
        content = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found = zlib.crc32(content, zlib.crc32(repr(x.shape).encode(), found))
    return found
