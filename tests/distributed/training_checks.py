"""What parallel_worker.py checks of run_epoch, fit and Checkpoints in two processes."""

import os
import random
import re
import shutil
import signal
import time
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


def looped(folder, steps, every=2, d_ff=16, until=None):
    """A run of Checkpoints and a loop, by FSDP2 if there are several processes, all with the same
    data: its losses, and how many steps it trained. Process 1 dies after step `until`.
    """
    torch.manual_seed(0)
    model = ff.make_decoder(11, N=1, d_model=16, d_ff=d_ff, h=4, dropout=0.0)
    world = dist.get_world_size()
    if folder is not None and world > 1:
        for module in (*model.decoder.layers, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    compute = ff.SimpleLossCompute(model.generator, ff.LabelSmoothing(11, 0, 0.1))
    optimizer, scheduler = ff.make_optimizer(model.parameters(), 16, warmup=5)
    done, losses = 0, []
    if folder is not None:
        checkpoints = ff.Checkpoints(folder, {"steps": steps, "d_ff": d_ff}, every)
        done, losses = checkpoints.begin(model, optimizer, scheduler)
    for step in range(done, steps):
        generator = torch.Generator().manual_seed(step)
        batch = ff.Batch(None, torch.randint(1, 11, (4, 7), generator=generator))
        loss = compute(model(batch.tgt, batch.tgt_mask), batch.tgt_y, batch.ntokens)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if folder is not None:
            checkpoints.end_step(losses)
        if step + 1 == until and dist.get_rank() == 1:
            (folder / "died").write_text(str(time.time()))
            os._exit(3)
    return torch.stack(losses), steps - done


def dies(folder):
    """A rank dies in the middle of a run: the others end within the time-out of the group, each
    with a reason.
    """
    (folder / "dies").mkdir(exist_ok=True)
    try:
        looped(folder / "dies", 12, 4, until=9)
    except RuntimeError as error:
        assert time.time() - float((folder / "dies" / "died").read_text()) < 60
        assert re.search("Connection closed by peer|Connection reset by peer", str(error)), error
        raise SystemExit from None  # there is no group any more
    raise AssertionError("the run went on without rank 1")


def resumes(folder):
    """The run of `dies` goes on from its last checkpoint with the losses of an uninterrupted one,
    on another number of processes, and at last on one. Each saves its last step.
    """
    steps, count = {4: (13, 5), 1: (18, 5)}[dist.get_world_size()]
    losses, trained = looped(folder / "dies", steps, 4)
    assert trained == count
    torch.testing.assert_close(losses, looped(None, steps)[0], rtol=0, atol=1e-5)
    message = "checkpoint .* has d_ff 16; expected 128"
    refused(message, lambda: looped(folder / "dies", steps, d_ff=128))


def damaged_checkpoints(folder):
    """The run goes on from the newest checkpoint that can be read, and says which cannot.
    Checkpoints none of which can be read are refused, and one of more steps than the run has. Other
    folders are left alone.
    """
    saved, rank = folder / "damaged", dist.get_rank()

    def resumed(steps):
        """The losses, how many steps were trained, and which checkpoints were passed over."""
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            losses, trained = looped(saved, steps)
        said = " ".join(str(warning.message) for warning in told)
        assert "existing checkpoint" not in said, said  # a damaged one is replaced without a word
        passed = re.findall(r"step-(\d+) cannot be read and is passed over", said)
        return losses, trained, passed

    def change(function, *names):
        dist.barrier()
        if rank == 0:
            for name in names:
                function(saved / name)
        dist.barrier()

    def cut(file):
        file.write_bytes(file.read_bytes()[:100])

    alone, _ = looped(None, 5)
    first, count, _ = resumed(5)
    assert count == 5 and {x.name for x in saved.iterdir()} == {"step-2", "step-4", "step-5"}
    change(lambda path: shutil.copytree(saved / "step-2", path), "step-old", "step-", "step-06")
    again, count, _ = resumed(5)
    assert count == 0 and torch.equal(again, first)
    for damaged in (["step-5/__1_0.distcp"], ["step-5/.metadata", "step-4/__0_0.distcp"]):
        change(cut, *damaged)
        losses, count, passed_over = resumed(5)
        assert count == {1: 1, 2: 3}[len(damaged)], count
        assert passed_over == (["5", "4"][: len(damaged)] if rank == 0 else [])
        torch.testing.assert_close(losses, alone, rtol=0, atol=1e-5)
    for steps, message in (
        (3, "checkpoint .*step-5 has 5 steps; expected 3 or fewer"),
        (5, "no checkpoint in .*damaged can be read; expected one that can"),
    ):
        refused(message, lambda steps=steps: resumed(steps))
        change(cut, *(f"step-{n}/.metadata" for n in (2, 4, 5)))


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
