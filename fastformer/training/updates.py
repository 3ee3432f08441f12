"""The updates of `run_epoch`: how batches change the parameters, step by step or as CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map_only

from fastformer.cuda_graphs import captured
from fastformer.eager import may_read
from fastformer.nn.padding import Packing
from fastformer.training.batches import Batch

MOST_GRAPHS = 16  # of an epoch: each keeps memory of its own for activations and gradients
PARTS = "src", "src_mask", "tgt", "tgt_mask", "tgt_y", "ntokens"  # of a batch


def shares(group: list[Batch], processes: Processes | None = None) -> list[Tensor | None]:
    """Return each batch's share of the tokens of an update; None for a batch alone. Processes
    average their gradients: it is then the share of the tokens of all, times their number.
    """
    if len(group) == 1 and processes is None:
        return [None]
    counts = [batch.ntokens for batch in group if batch.ntokens is not None]
    total, size = sum(counts, torch.zeros_like(counts[0])), 1
    if processes is not None:
        dist.all_reduce(total, group=processes.group)
        size = processes.size
    return [count * size / total.clamp(min=1) for count in counts]


class Processes(NamedTuple):
    """The processes that average the gradients of a model, each from batches of its own."""

    group: Any
    size: int

    @classmethod
    def of(cls, model: object) -> Processes | None:
        """Return those of DistributedDataParallel or FSDP; None for one process alone."""
        if not (dist.is_available() and dist.is_initialized() and isinstance(model, nn.Module)):
            return None
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                return cls(module.process_group, dist.get_world_size(module.process_group))
            if isinstance(module, (FSDPModule, FullyShardedDataParallel)):
                # Processes with the same batch, as in tensor parallelism, count it equally often.
                return cls(dist.group.WORLD, dist.get_world_size())
        return None

    def sums(self, loss: Tensor, tokens: Tensor, part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss per token, the tokens and the part of an update's loss, over all."""
        own = torch.stack([loss.double() * tokens, tokens.double(), part.double() / self.size])
        dist.all_reduce(own, group=self.group)
        return (own[0] / own[1].clamp(min=1)).to(loss), own[1], own[2].to(loss)


class Updates(NamedTuple):
    """How batches are run, and how their gradients change the parameters: see `run_epoch`."""

    model: nn.Module
    loss_compute: Callable[[Tensor, Tensor, Tensor], Tensor]
    optimizer: Optimizer | None
    scheduler: LRScheduler | None
    max_grad_norm: float | None
    autocast: torch.dtype | None
    scaler: torch.amp.GradScaler | None

    def losses(
        self, group: list[Batch], weights: list[Tensor | None]
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Yield the batches of an update and their losses; the last one after the update."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        # Of DistributedDataParallel, so that only the last batch exchanges.
        no_exchange = getattr(self.model, "no_sync", nullcontext)
        for i, (batch, share) in enumerate(zip(group, weights), 1):
            last = i == len(group)
            with nullcontext() if last else no_exchange():
                loss = self._loss(batch)
                if self.optimizer is not None:
                    scaled = loss if share is None else loss * share
                    (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
            if last and self.optimizer is not None:
                self._step(self.optimizer)
            yield batch, loss.detach()

    def _loss(self, batch: Batch) -> Tensor:
        assert batch.tgt is not None and batch.tgt_y is not None and batch.ntokens is not None
        kind = batch.tgt.device.type
        inputs: tuple[Any, ...] = batch.tgt, batch.tgt_mask  # of a language model
        if batch.src is not None:
            inputs = batch.src, batch.tgt, batch.src_mask, batch.tgt_mask
        with nullcontext() if self.autocast is None else torch.autocast(kind, self.autocast):
            return self.loss_compute(self.model(*inputs), batch.tgt_y, batch.ntokens)

    def _step(self, optimizer: Optimizer) -> None:
        """Run a step of the optimizer and one of the scheduler, with the gradients as they are."""
        if self.max_grad_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(_parameters(optimizer), self.max_grad_norm)
        skipped = False
        if self.scaler is None:
            optimizer.step()
        else:
            scale = self.scaler.get_scale()
            self.scaler.step(optimizer)
            self.scaler.update()
            skipped = self.scaler.get_scale() < scale  # the gradients were not finite
        if self.scheduler is not None and not skipped:
            self.scheduler.step()


class GraphedUpdates:
    """Updates that are captured in CUDA graphs: see `cuda_graph` of `run_epoch`.

    The first update of each shape runs as it is: it compiles the kernels and makes the state of the
    optimizer. The second one is captured, and it and the later ones are replays of the graph. A
    replay draws new dropout seeds, because a graph advances the generator of its device.
    """

    def __init__(self, updates: Updates) -> None:
        self.updates = updates
        self._on_device = updates._replace(scheduler=None)  # the host computes the learning rate
        self._graphs: dict[object, _UpdateGraph | None] = {}  # None until the second update
        self._state: object = None  # of the optimizer: load_state_dict replaces it
        self._rates: list[Tensor] = []  # the learning rates that the graphs read
        self._refused = _obstacle(updates.optimizer)

    def losses(
        self, group: list[Batch], weights: list[Tensor | None]
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Yield the batches of an update and their losses, after the update."""
        graph = self._graph(group)
        if graph is None:
            yield from self.updates.losses(group, weights)
            return
        losses = graph.replay(group)
        if self.updates.scheduler is not None:
            self.updates.scheduler.step()
        yield from zip(group, losses)

    def _graph(self, group: list[Batch]) -> _UpdateGraph | None:
        """Return the graph of the group's shapes, or None if its update is not to be replayed."""
        if self._refused is None:
            self._refused = _batch_obstacle(group)
        if self._refused is not None:
            if self._refused:
                warnings.warn(f"the steps run without a CUDA graph: {self._refused}", stacklevel=2)
                self._refused = ""  # one warning is enough
            return None
        self._prepare(self.updates.optimizer)
        key = self._key(group)
        if key not in self._graphs:
            if len(self._graphs) < MOST_GRAPHS:
                self._graphs[key] = None
            return None
        graph = self._graphs[key]
        if graph is None:
            try:
                graph = self._graphs[key] = _UpdateGraph(self._on_device, group)
            except RuntimeError as error:
                self._refused = str(error)
                return self._graph(group)
        return graph

    def _prepare(self, optimizer: Any) -> None:
        """Let the device count the steps of the optimizer and hold its learning rates."""
        if self._state is not optimizer.state:
            self._state, parameters = optimizer.state, _parameters(optimizer)
            for options in optimizer.param_groups:
                options["capturable"] = True
                options["lr"] = torch.as_tensor(options["lr"]).to(parameters[0].device, copy=True)
            for p in parameters:
                if "step" in optimizer.state.get(p, {}):
                    optimizer.state[p]["step"] = optimizer.state[p]["step"].to(p.device)
            self._rates = [options["lr"] for options in optimizer.param_groups]
            self._graphs.clear()
        for options, rate in zip(optimizer.param_groups, self._rates):
            if options["lr"] is not rate:  # somebody has assigned another one
                rate.fill_(options["lr"])
                options["lr"] = rate

    def _key(self, group: list[Batch]) -> object:
        """Return what an update depends on, but the contents of tensors and the learning rate."""
        parts = [x for batch in group for x in _parts(batch).values()]
        given = [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in parts]
        optimizer, model = self.updates.optimizer, self.updates.model
        assert optimizer is not None
        modules = model.modules() if isinstance(model, nn.Module) else ()
        modes = [m.training for m in modules], [p.requires_grad for p in _parameters(optimizer)]
        numbers = [
            (name, id(x) if isinstance(x, Tensor) else x)
            for options in optimizer.param_groups
            for name, x in options.items()
            if name not in ("params", "lr")
        ]
        return len(group), tuple(given), repr(numbers), repr(modes)


class _UpdateGraph:
    """The CUDA graph of an update, with the tensors that it reads and writes."""

    def __init__(self, updates: Updates, group: list[Batch]) -> None:
        self._group: list[Any] = [
            SimpleNamespace(**tree_map_only(Tensor, Tensor.clone, _parts(batch))) for batch in group
        ]
        self._parameters = _parameters(updates.optimizer)

        def update() -> list[Tensor]:
            return [loss for _, loss in updates.losses(self._group, shares(self._group))]

        self._replay, self._losses = captured(update)
        self._grads = [p.grad for p in self._parameters]

    def replay(self, group: list[Batch]) -> list[Tensor]:
        """Run the update on the batches; return their losses, which the next replay overwrites."""
        for own, batch in zip(self._group, group):
            for x, given in zip(tensors_of(own), tensors_of(batch)):
                x.copy_(given, non_blocking=True)
        self._replay()
        for p, grad in zip(self._parameters, self._grads):
            p.grad = grad  # another update has replaced it
        return self._losses


def tensors_of(batch: Batch) -> list[Tensor]:
    return [x for x in _parts(batch).values() if isinstance(x, Tensor)]


def _parts(batch: Batch) -> dict[str, Any]:
    return {name: getattr(batch, name, None) for name in PARTS}


def _parameters(optimizer: Any) -> list[Tensor]:
    return [p for options in optimizer.param_groups for p in options["params"]]


def _obstacle(optimizer: Any) -> str | None:
    """Return why no update can be captured, or None."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "processes exchange gradients"
    if not all("capturable" in options for options in getattr(optimizer, "param_groups", [{}])):
        return f"{type(optimizer).__name__} has no option `capturable`"
    if len({p.device for p in _parameters(optimizer)}) > 1:
        return "the parameters are on several devices"
    return None


def _batch_obstacle(group: list[Batch]) -> str | None:
    """Return why the update of these batches cannot be captured, or None."""
    for batch in group:
        if isinstance(batch.tgt_mask, Packing):
            return "the host reads the lengths of packed batches"
        for x in tensors_of(batch):
            if x.device.type != "cuda":
                return f"a batch is on {x.device}"
            if may_read(x):
                return "FASTFORMER_CHECK=1 reads values on the host"
    return None
