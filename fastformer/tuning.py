"""Measure what is fastest on this GPU: `tune`, and the command `fastformer tune`.

Each call of an op is measured in a process of its own, with a deadline: the options of each of its
kernels (tiles, or a variant such as a kernel in Gluon), then torch's op if it computes the call.
"""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from tqdm.auto import tqdm

from fastformer import checks, environment, numerics
from fastformer.dispatch import backends, measurements
from fastformer.dispatch.measurements import Entry
from fastformer.dispatch.operation import OPERATIONS, Arguments, call_name
from fastformer.dispatch.state import current_backend, use_backend, use_formula
from fastformer.eager import gradients_through
from fastformer.ops.examples import copied, part

LIMIT = 600.0  # seconds of a call
REPEATS = 20  # runs that have to give the same bits
TIE = 0.02  # a choice is faster than what is shipped by more than this
WORKER = "import pickle, sys, fastformer.tuning as t; t.worker(*pickle.load(sys.stdin.buffer))"

Calls = dict[str, tuple[str, Arguments]]  # by name
Ways = dict[str, tuple[str, dict[str, Any]]]  # by name: a backend, and the options of its kernels


def results(op: str, arguments: Arguments, backend: str) -> list[Tensor]:
    """Return the outputs of a call, and the gradients of what requires one."""
    by_torch = OPERATIONS[op].by_torch
    if backend == "torch" and by_torch is not None:
        found = by_torch(**arguments)
    else:
        with backends.use_backend(backend):
            found = backends.run(op, **arguments)
    outputs = found if isinstance(found, tuple) else (found,)
    incoming = [_incoming(x.shape, x.dtype, x.device) for x in outputs]
    tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
    grads = gradients_through(outputs, incoming, tensors, create_graph=False)
    return [x.detach() for x in (*outputs, *grads) if x is not None]


@functools.cache
def _incoming(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the gradient of an output: numbers that each dtype holds, without 0."""
    return (torch.arange(shape.numel(), device=device) % 7 - 3.5).to(dtype).view(shape)


def compare(op: str, arguments: Arguments, ways: Ways) -> Entry:
    """Check the ways to run a call, time those that are right, and choose the fastest one, or the
    first one if it ties with the fastest. The time is that of the GPU with a cold cache. The
    reference is only timed.
    """
    from triton.testing import do_bench

    call, given = functools.partial(results, op, arguments), copied(part(arguments))
    with use_formula():
        wide = copied(given, lambda x: x.double() if x.is_floating_point() else x)
        exact = results(op, wide, "reference")
    eager, us, dropped = results(op, given, "reference"), dict[str, float](), dict[str, str]()
    grads = sum(getattr(x, "requires_grad", False) for x in tree_leaves(given))

    def drop_reason(backend: str) -> str | None:
        have, first = results(op, given, backend), [x.clone() for x in call(backend)]
        same = all(all(map(torch.equal, first, call(backend))) for _ in range(REPEATS - 1))
        reason = numerics.first_disagreement(have, exact, eager, len(exact) - grads)
        return reason or (None if same else f"{REPEATS} runs give different bits")

    for name, (backend, options) in ways.items():
        print(name, file=sys.stderr, flush=True)  # says what was running if the process ends
        try:
            with backends.tuned().forced(options):
                reason = None if backend == "reference" else drop_reason(backend)
                if reason is None:
                    ms = do_bench(functools.partial(call, backend), return_mode="median")
                    us[name] = round(1e3 * ms, 3)
        except Exception as error:
            reason = f"it fails: {type(error).__name__}: {error}".splitlines()[0]
        if reason is not None:
            dropped[name] = reason
    rated = {n: x * (1 - TIE * (n == next(iter(ways)))) for n, x in us.items() if n != "reference"}
    return Entry(min(rated, key=rated.__getitem__, default=None), us, dropped)


def worker(name: str, op: str, arguments: Arguments, file: Path, here: str) -> None:
    """Measure a call, each kernel with the best options of those before it; write the results."""
    if (first := next(iter(arguments.values()))).is_cuda:
        torch.cuda.set_device(first.device)
    tuned, chosen, done = backends.tuned(), dict[str, Any](), set[str]()
    while True:
        with tuned.forced(chosen) as asked:
            results(op, arguments, "triton")
        key = next((key for key in asked if key.name not in done), None)
        if key is None:
            break
        options = {tuned.label(o): o for o in (key.shipped, *key.options())}
        entry = measurements.read(file, here).get(key.name)
        if entry is None:
            ways: Ways = {n: ("triton", chosen | {key.kernel: o}) for n, o in options.items()}
            entry = compare(op, arguments, ways)
            measurements.write(file, here, {key.name: entry})
        chosen[key.kernel] = options.get(entry.choice or "", key.shipped)
        done.add(key.name)
    ways = {"triton": ("triton", chosen), "torch": ("torch", {}), "reference": ("reference", {})}
    if not backends.computed_by_torch(op, arguments):
        del ways["torch"]
    measurements.write(file, here, {name: compare(op, arguments, ways)})


def measure_apart(seconds: float, *given: Any) -> str | None:
    """Run `worker` in a process of its own. Return why the call is not measured, or None."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = functools.partial(subprocess.run, [sys.executable, "-c", WORKER], env=environ)
    done: Any
    try:
        done = run(input=pickle.dumps(given), stderr=subprocess.PIPE, timeout=seconds)
        why = f"it ends its process: exit status {done.returncode}" if done.returncode else None
    except subprocess.TimeoutExpired as error:
        done, why = error, f"it takes more than {LIMIT:.0f} s" if seconds >= LIMIT else None
    said = (done.stderr or b"").decode(errors="replace").strip().rpartition("\n")[2][:300]
    return why and f"{why}: {said}"


class Tuning(NamedTuple):
    """What was measured, or with dry_run what would be measured. `print` it.

    rows: for each call (call, chosen candidate, {candidate: microseconds}, {dropped candidate:
        reason}). The last three are empty for a call that was not measured.
    file: the file of the results.
    done: whether all calls were measured before the time was up.
    """

    rows: tuple[tuple[str, str | None, Mapping[str, float], Mapping[str, str]], ...]
    file: Path | None
    done: bool

    def __str__(self) -> str:
        lines = []
        for name, choice, us, dropped in self.rows:
            times = ", ".join(f"{other} {time:.1f} us" for other, time in us.items())
            lines.append(name + (f": {choice or 'nothing'} ({times})" if us or dropped else ""))
            lines += [f"    not {other}: {reason}" for other, reason in dropped.items()]
        return "\n".join(lines)


def add(calls: Calls, op: str, arguments: Arguments) -> None:
    """Add a checked call, without its graph."""
    calls.setdefault(call_name(op, arguments), (op, copied(arguments)))


def measure(calls: Calls, file: Path | None, minutes: float, dry_run: bool = False) -> Tuning:
    """Measure the calls that are not yet in the file, and write the results to it."""
    _, arguments = next(iter(calls.values()))
    here = environment.machine(next(iter(arguments.values())).device)
    known, unknown = measurements.read(file, here), Entry("", {}, {})
    if dry_run:
        return Tuning(tuple((n, *unknown) for n in calls if n not in known), file, False)
    if here is None:
        raise RuntimeError("tuning measures on a GPU, and the model is not on one")
    if file is None:
        raise RuntimeError("the environment variable FASTFORMER_TUNING is off: nothing is written")
    deadline = time.monotonic() + 60 * minutes
    for name, call in tqdm(calls.items(), unit="call", disable=None):
        seconds = min(deadline - time.monotonic(), LIMIT)
        if name not in known and seconds > 0:
            why = measure_apart(seconds, name, *call, file, here)
            if why is not None:
                measurements.write(file, here, {name: Entry(None, {}, {"the call": why})})
    backends.measure_again()
    known = measurements.read(file, here)
    rows = tuple((name, *known.get(name, unknown)) for name in calls)
    return Tuning(rows, file, calls.keys() <= known.keys())


def tune(
    model: nn.Module, /, *inputs: Any, minutes: float = 30.0, dry_run: bool = False, **kwargs: Any
) -> Tuning:
    """Measure on this GPU what is fastest for the op calls that a model makes.

    It runs the model once on the inputs, in its current mode, and measures each of its op calls,
    with the backward if gradients are enabled and needed: the tiles and variants of each kernel
    and, without gradients, torch's own op if it computes the same. A candidate is dropped if it
    fails, disagrees with the reference by the numerics policy, or has results that change from run
    to run; a call, if it crashes or takes too long. The backend `auto` reads the results from a
    file: `tuning.json` in the user's cache directory, or the one that the environment variable
    FASTFORMER_TUNING names. What it already holds is not measured again.

    Args:
        model: an nn.Module on a GPU.
        inputs: the positional arguments of the model.
        minutes: the time limit. The next call of `tune` continues with what is left.
        dry_run: if True, run the model but measure nothing. This needs no GPU.
        kwargs: the keyword arguments of the model.

    Returns:
        A `Tuning` with a row for each call. `print` it.

    Raises:
        TypeError: model is not an nn.Module.
        ValueError: minutes is not positive; the model calls no op that is measured.
        RuntimeError: the model is not on a GPU; FASTFORMER_TUNING is off.
        OSError: the file cannot be written.
    """
    checks.require_instance("model", model, nn.Module, "an nn.Module")
    checks.require_number("minutes", minutes, "a positive number")
    if not minutes > 0:
        raise ValueError(f"minutes is {minutes}; expected a positive number")
    checks.require_flag("dry_run", dry_run)
    calls: Calls = {}
    backend = current_backend()
    if backend == "auto" and not torch.cuda.is_available():  # where torch runs accelerated modules
        backend = "reference"
    with backends.observe(on_call=functools.partial(add, calls)), use_backend(backend):
        getattr(model, "_orig_mod", model)(*inputs, **kwargs)
    if not calls:
        raise ValueError(
            "the model calls no op of fastformer that is measured; accelerate(model) replaces "
            "torch's layers by ops"
        )
    return measure(calls, measurements.path(), minutes, dry_run)
