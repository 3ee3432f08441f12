"""The copy task on several processes; the losses equal the losses of one process.

    torchrun --nproc-per-node 2 -m fastformer copy-task --parallel tensor

    ddp       DistributedDataParallel: each process has the full model and a shard of each batch
    fsdp      fully_shard: each process has a shard of the model and a shard of each batch
    tensor    parallelize: each process has a shard of each layer and the full batch
    context   context_parallel: each process has the full model and a shard of each sequence

All processes start from the same seed and draw the same random numbers. Where batches or sequences
are sharded, the ops use the local shard of the unsharded dropout mask (see `sequences_from` and
`context_parallel`), so that the losses differ from one process only by rounding.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastformer.checks import require_size
from fastformer.distributed.context_parallel import context_parallel
from fastformer.distributed.parallelize import parallelize, require_same_ranks, sequences_from
from fastformer.nn.transformer import EncoderDecoder
from fastformer.training.batches import Batch
from fastformer.training.checkpoints import EVERY, Checkpoints
from fastformer.training.copy_task import (
    COMPARED_STEPS,
    PAD,
    OneProcess,
    Run,
    Settings,
    faults,
    train,
)

METHODS = ("ddp", "fsdp", "tensor", "context")
TOLERANCE = 1e-5  # of the loss difference from one process, in float32
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def process_group(kind: str, seconds: float) -> Iterator[torch.device]:
    """Join the processes that torchrun has started, and yield the device of this process.

    Args:
        kind: the device type, "cpu" or "cuda".
        seconds: the timeout of a collective. A process that waits for a dead process ends after it.

    Raises ValueError if torchrun has not started this process, or the node has fewer GPUs than
    processes.
    """
    missing = [name for name in _OF_TORCHRUN if name not in os.environ]
    if missing:
        raise ValueError(
            f"the environment has no {', '.join(missing)}; "
            "expected torchrun: torchrun --nproc-per-node 2 -m fastformer copy-task --parallel ddp"
        )
    device = torch.device("cpu")
    if kind == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"local rank {local} has no GPU of the {torch.cuda.device_count()} here; "
                "expected --nproc-per-node of as many at most, or --device cpu"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    try:
        yield device
    finally:
        dist.destroy_process_group()


def data_parallel(model: nn.Module) -> nn.Module:
    """Return DistributedDataParallel(model) that only communicates gradients.

    It does not synchronize buffers, so the model's buffers must not change.
    """
    DDP = nn.parallel.DistributedDataParallel
    known = "forward_sync_buffers" in inspect.signature(DDP).parameters  # from torch 2.13 on
    option: dict[str, Any] = {"forward_sync_buffers" if known else "broadcast_buffers": False}
    return DDP(model, **option)


def compare(settings: Settings, backend: str, trainer: Parallel) -> tuple[list[Run], list[str]]:
    """Train by `trainer`, train the first steps in one process, and compare the losses.

    Print the largest loss difference. Return both runs, and the faults, one sentence each: it is
    too large, or the model does not copy after the default number of steps or more.
    """
    write = trainer.rank == 0
    few = replace(settings, steps=min(settings.steps, COMPARED_STEPS))
    alone = train(few, backend, math.inf, False, OneProcess(timed=False))
    run = train(settings, backend, math.inf, write, trainer)
    pairs = zip(alone.losses, run.losses, strict=False)
    difference = max(abs(a - b) for a, b in pairs)
    found = faults(settings, [run])
    if not difference <= TOLERANCE:
        found.append(f"the losses differ by {difference:.1e}; expected at most {TOLERANCE:.0e}")
    if write:
        print(
            f"\nLargest loss difference from one process over steps 1..{len(alone.losses)}: "
            f"{difference:.1e} (at most {TOLERANCE:.0e})"
        )
    return [alone, run], found


class Parallel(OneProcess):
    """Training by several processes of the default process group.

    Args:
        method: the parallelism, one of `METHODS`.
        settings: of the copy task. For "ddp" and "fsdp", the batch has to be a multiple of the
            number of processes.
        folder, every: as in `Checkpoints`; a folder of None saves no checkpoints.

    Raises ValueError, on all ranks, if method is unknown, every is less than 1, the batch does not
    divide by the number of processes, or the settings differ between the ranks.
    """

    def __init__(
        self,
        method: str,
        settings: Settings,
        folder: Path | None = None,
        every: int = EVERY,
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"method is {method!r}; expected one of {', '.join(METHODS)}")
        self.method, self.rank, self.size = method, dist.get_rank(), dist.get_world_size()
        require_size(every=every)
        saved = None if folder is None else Checkpoints(folder, settings.plain, every)
        super().__init__(saved, timed=False)
        torch.manual_seed(settings.seed)
        require_same_ranks(settings=settings.plain, method=method)
        self.name = f", {method} on {self.size} processes"
        self._splits = method in ("ddp", "fsdp")  # the batch dimension is sharded
        if self._splits and settings.batch % self.size:
            raise ValueError(
                f"batch is {settings.batch}; expected a multiple of the {self.size} processes"
            )
        self._count = settings.batch // self.size
        self._context: context_parallel | None = None

    def place(self, model: EncoderDecoder) -> nn.Module:
        kind = next(model.parameters()).device.type
        if self.method == "ddp":
            require_same_ranks(model)
            return data_parallel(model)
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(kind, (self.size,), mesh_dim_names=(self.method,))
        if self.method == "context":
            require_same_ranks(model)
            self._context = context_parallel(mesh)
            return data_parallel(_OfShards(self._context, model))
        if self.method == "tensor":
            return parallelize(model, mesh)
        from torch.distributed.fsdp import fully_shard

        require_same_ranks(model)
        for layer in (*model.encoder.layers, *model.decoder.layers):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def local_batch(self, batch: Batch) -> Batch:
        local: Any = copy.copy(batch)
        if self._context is not None:
            local.tgt_y = self._context.shard(self._context.pad(local.tgt_y, 1, PAD), 1)
        elif self._splits:
            rows = slice(self.rank * self._count, (self.rank + 1) * self._count)
            for name in ("src", "tgt", "src_mask", "tgt_mask", "tgt_y"):
                setattr(local, name, getattr(batch, name)[rows])
        local.ntokens = (local.tgt_y != PAD).sum()
        return local

    def sequences(self) -> AbstractContextManager[Any]:
        if self._context is not None:
            return self._context
        return sequences_from(self.rank * self._count) if self._splits else nullcontext()

    def gathered(self, model: nn.Module, settings: Settings) -> EncoderDecoder:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        plain = settings.model()
        plain.load_state_dict(full)
        return plain


class _OfShards(EncoderDecoder):
    """A model that takes full sequences and masks, and returns its shard [B, T / n, d_model].

    It pads the sequences so that they can be sharded. The masks hide this padding.
    """

    def __init__(self, context: context_parallel, model: EncoderDecoder) -> None:
        embeddings = model.src_embed, model.tgt_embed
        super().__init__(model.encoder, model.decoder, *embeddings, model.generator)
        self._context = context

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Any, tgt_mask: Any) -> Tensor:  # type: ignore[override]
        context = self._context
        src_mask, tgt_mask = (context.pad(x, 2, False) for x in (src_mask, tgt_mask))
        first, second = self._seeds()
        with context.of_length(src.shape[1]):
            memory = self.encode(self._part(src, PAD), src_mask, **first)
        with context.of_length(tgt.shape[1]):
            tgt, tgt_mask = self._part(tgt, PAD), self._part(tgt_mask, False)
            return self.decode(memory, src_mask, tgt, tgt_mask, **second)

    def _part(self, x: Tensor, padding: float) -> Tensor:
        return self._context.shard(self._context.pad(x, 1, padding), 1)
