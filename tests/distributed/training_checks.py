"""What parallel_worker.py checks of run_epoch, fit and Checkpoints in two processes."""

import os
import random
import re
import signal
import warnings

import numpy
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fastformer as ff


def refused(words, call):
    """One line says what is wrong, in each process, and none waits for another."""
    try:
        call()
    except (ValueError, TypeError) as error:
        assert re.search(words, str(error)) and "\n" not in str(error), f"{error}; expected {words}"
    else:
        raise AssertionError(f"nothing was refused; expected {words}")


def in_full(model):
    shards = [p.detach() for p in model.parameters()]
    return [p.full_tensor() if isinstance(p, DTensor) else p.clone() for p in shards]


def optimizer_of_shards(folder):
    """No warning of an optimizer of another model, also where an evaluation has left a whole model
    of FSDP unsharded; and one of an optimizer that was made before the shards.
    """
    batch = ff.Batch(None, torch.tensor([[1, 5, 3]]))
    model = ff.make_decoder(11, N=1, d_model=16, d_ff=16, h=2)
    before = torch.optim.SGD(model.parameters(), 0.5)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    compute = ff.SimpleLossCompute(model.generator, ff.LabelSmoothing(11, 0))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for given, warned in ((None, 0), (optimizer, 0), (None, 0), (optimizer, 0), (before, 1)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            ff.run_epoch([batch], model, compute, given, progress=False)
        assert sum("optimizer holds no" in str(x.message) for x in seen) == warned
        assert given is not None or not any(isinstance(p, DTensor) for p in model.parameters())


def uneven_tokens(folder):
    """Step for step, the processes take the updates of one process with the batches of both,
    however many tokens each has: 16 and 76 in the first update, 9 and 0 in the last one.
    """
    counts = [(16, 76), (30, 5), (5, 5), (9, 0)]  # of tokens to predict, in rows of up to 9

    def batch(ids, numbers):
        rows = [list(x) for n in numbers for x in ids[:n].split(9)] or [[]]
        width = 1 + max(map(len, rows))
        full = [[1, *map(int, x), *[0] * (width - 1 - len(x))] for x in rows]
        return ff.Batch(None, torch.tensor(full) if width > 1 else torch.tensor([[1, 0]]))

    ids = torch.randint(3, 11, (99,), generator=torch.Generator().manual_seed(0))
    rank = dist.get_rank()
    own, both = [batch(ids, [n[rank]]) for n in counts], [batch(ids, n) for n in counts]
    assert [int(x.ntokens) for x in own] == [n[rank] for n in counts]

    def trained(kind, batches, **options):
        torch.manual_seed(0)
        model = ff.make_decoder(11, N=1, d_model=16, d_ff=16, h=2, dropout=0.0).double()
        compute, losses, steps = ff.SimpleLossCompute(model.generator, criterion), [], []
        if kind == "fsdp":
            for module in (*model.decoder.layers, model):
                fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        placed = nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model
        optimizer = torch.optim.SGD(model.parameters(), 0.5)

        def after_update(loss):
            losses.append(float(loss))
            steps.append(in_full(model))

        mean = ff.run_epoch(
            batches, placed.train(), compute, optimizer, after_update=after_update,
            progress=False, max_grad_norm=0.3, **options,
        )  # fmt: skip
        fitted = ff.fit(
            placed, batches, optimizer=optimizer, loss_compute=compute, steps=2, progress=False
        )
        numbers = torch.tensor([mean, *losses, *fitted.losses], dtype=torch.float64)
        return numbers, [*steps, in_full(model)]

    criterion = ff.LabelSmoothing(11, 0, 0.1)
    for options in ({}, dict(accumulation_steps=3)):
        want = trained("one", both, **options)
        for kind in ("ddp", "fsdp"):
            torch.testing.assert_close(trained(kind, own, **options), want, rtol=1e-6, atol=1e-9)


class Stopped(Exception):
    """Stands in for the death of the processes."""


def run(folder, until=None, steps=8, uneven=False, rows=(), sent=None):
    """The losses, weights and generators of a run with dropout, each process with rows and a seed
    of its own: under DDP, or under FSDP2 where the numbers of rows are uneven. It dies after update
    `until`, or sends itself the signal `sent` in update 3.
    """
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = ff.make_decoder(11, N=1, d_model=16, d_ff=16, h=2, dropout=0.3)
    if uneven:
        for module in (*model.decoder.layers, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    placed = model if uneven else nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(1 + rank)
    numpy.random.seed(1 + rank)
    draw = random.Random(0)
    data = [[1, *(draw.randint(3, 10) for _ in range(draw.randint(2, 9))), 2] for _ in range(24)]
    own = data[rank::2] if not uneven else data[:6] if rank == 0 else data[6:20]
    optimizer, scheduler = ff.make_optimizer(model.parameters(), 16, warmup=5)

    def report(row):
        if row["step"] == until:
            raise Stopped
        if sent is not None and row["step"] == 3:
            os.kill(os.getpid(), sent)

    result = ff.fit(
        placed, ff.token_batches([*own, *rows], tokens=30), optimizer=optimizer,
        scheduler=scheduler, steps=steps, report=report, report_every=1, progress=False,
        checkpoints=ff.Checkpoints(folder, {"steps": 100}, every=2 if sent is None else 100),
    )  # fmt: skip
    return result.losses, in_full(model), [torch.get_rng_state(), numpy.random.get_state()[1]]


def resumed_fit(folder):
    """Two processes that died go on to the same bits, each with its own generators and position in
    its own data, in epochs of different lengths as well; the losses are those of both.
    """
    for uneven in (False, True):
        want = run(folder / f"whole-{uneven}", uneven=uneven)
        parts = folder / f"parts-{uneven}"
        for until in (3, 6):
            try:
                run(parts, until, uneven=uneven)
            except Stopped:
                continue
            raise AssertionError("the run did not die")
        assert {x.name for x in parts.iterdir()} == {"step-2", "step-4"}
        torch.testing.assert_close(run(parts, uneven=uneven), want, rtol=0, atol=0)
        gathered = [None, None]
        dist.all_gather_object(gathered, want)
        (losses, weights, states), (others, other_weights, other_states) = gathered
        torch.testing.assert_close((losses, weights), (others, other_weights), rtol=0, atol=0)
        assert not torch.equal(states[0], other_states[0])  # each drops elements of its own
    own = [[1, 3, 2]] if dist.get_rank() == 1 else []
    message = "step-8 has batches rows=1[0-9], .*; expected rows=1"
    refused(message, lambda: run(parts, uneven=True, rows=own))


def interrupted_fit(folder):
    """Ctrl-C in one process ends all of them, after the same checkpoint, which is resumed."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    want = run(folder / "whole-run", steps=12)
    try:
        run(folder / "stopped", steps=12, sent=signal.SIGINT if dist.get_rank() == 1 else 0)
    except KeyboardInterrupt:
        assert [x.name for x in (folder / "stopped").iterdir()] == ["step-10"]
    else:
        raise AssertionError("the run was not interrupted")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    torch.testing.assert_close(run(folder / "stopped", steps=12), want, rtol=0, atol=0)
    signal.signal(signal.SIGINT, usual)
