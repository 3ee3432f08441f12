"""Measure what is fastest on this GPU: `tune`, and the command `fastformer tune`.

Each call of an op is measured in a process of its own, with a deadline. The candidates are the
options of each of its kernels (tiles, or a variant such as a kernel in Gluon), and then torch's op
if it computes the call. A candidate that fails, takes too long, disagrees with the reference in
float64 or changes from run to run is dropped.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from fastformer import checks, environment, numerics
from fastformer.description import Attention
from fastformer.dispatch import backends, measurements
from fastformer.dispatch.measurements import Entries, Entry, Key, flat, is_floating
from fastformer.dispatch.operation import OPERATIONS, Arguments
from fastformer.eager import use_formula

ROUNDS, TIE = 3, 0.02  # of timing; a choice is faster than what is shipped by more than this
LIMIT = 600.0  # seconds of a call
REPEATS, OF_GLUON = 2, 200  # runs that have to give the same bits; in Gluon a race may be rare
NEEDED = "cuda"  # the device type that can be measured
NO_GPU = "tuning measures on a GPU, and {}"

Timer = Callable[[Callable[[], Any]], float]  # returns the seconds of a call


class Call:
    """A call of an op that is measured, with its outputs and gradients."""

    def __init__(self, op: str, arguments: Arguments) -> None:
        self.op, self.arguments = op, arguments
        self.gradient = measurements.differentiated(arguments)
        self._incoming: dict[Any, list[Tensor]] = {}
        self._checked: Any = None

    def __call__(self, backend: str = "triton") -> tuple[Tensor, ...]:
        return self.results(self.arguments, backend)

    def forward(self, backend: str = "triton") -> tuple[Tensor, ...]:
        with torch.no_grad():
            return self.outputs(self.arguments, backend)

    def outputs(self, arguments: Arguments, backend: str) -> tuple[Tensor, ...]:
        by_torch = OPERATIONS[self.op].by_torch
        if backend == "torch" and by_torch is not None:
            found: Any = by_torch(**arguments)
        else:
            with backends.use_backend(backend):
                found = backends.run(self.op, **arguments)
        return found if isinstance(found, tuple) else (found,)

    def results(self, arguments: Arguments, backend: str) -> tuple[Tensor, ...]:
        """Return the outputs, and the gradients if the call has any, on this backend."""
        with torch.set_grad_enabled(self.gradient):
            outputs = self.outputs(arguments, backend)
            if not self.gradient:
                return outputs
            key = tuple((x.shape, x.dtype) for x in outputs)
            if key not in self._incoming:  # equal in each call with the same shapes
                make = torch.Generator(outputs[0].device).manual_seed(2)
                random = [torch.randn(s, generator=make, device=make.device) for s, _ in key]
                dtype = next(x.dtype for x in self.arguments.values() if is_floating(x))
                self._incoming[key] = [g.to(dtype).to(x.dtype) for g, x in zip(random, outputs)]
            given = outputs, _leaves(arguments), self._incoming[key]
            found = torch.autograd.grad(*given, materialize_grads=True)
        return *(x.detach() for x in outputs), *found

    def drop_reason(self, backend: str = "triton", repeats: int = REPEATS) -> str | None:
        """Return why the candidate whose context is active may not be chosen, or None."""
        if self._checked is None:
            given = part(self.arguments)
            with use_formula():
                exact = self.results(changed(given, _double), "reference")
                self._checked = given, exact, self.results(given, "reference")
        given, exact, eager = self._checked
        have, grads = self.results(given, backend), len(_leaves(given)) * self.gradient
        reason = numerics.first_disagreement(have, exact, eager, len(have) - grads)
        if reason is None:
            first = [x.clone() for x in self(backend)]
            if not all(all(map(torch.equal, first, self(backend))) for _ in range(repeats - 1)):
                return f"{repeats} runs give different bits"
        return reason


def _leaves(arguments: Arguments) -> list[Tensor]:
    return [x for x in flat(arguments).values() if isinstance(x, Tensor) and x.requires_grad]


def _double(name: str, x: Any) -> Any:
    return x.detach().double().requires_grad_(x.requires_grad) if is_floating(x) else x


def _leaf(name: str, x: Any) -> Any:
    """Return a tensor without its graph, which requires a gradient if x will get one."""
    if not isinstance(x, Tensor):
        return x
    return x.detach().requires_grad_(x.requires_grad and torch.is_grad_enabled())


def changed(arguments: Arguments, change: Callable[[str, Any], Any]) -> Arguments:
    """Return the arguments with each one, and each field of `Attention`, replaced."""
    return {
        name: Attention(*map(change, x._fields, x)) if isinstance(x, Attention) else change(name, x)
        for name, x in arguments.items()
    }


def part(arguments: Arguments) -> Arguments:
    """Return a part of a call of attention for which the scores fit in memory in float64: the first
    head of keys and values of the first sequence, with its heads of queries.
    """
    attention = arguments.get("attention")
    if attention is None or attention.cu_seqlens_q is not None or attention.mask_spans is not None:
        return changed(arguments, _leaf)
    share = arguments["query"].shape[1] // arguments["key"].shape[1]

    def smaller(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor) or name == "dropout_seed":
            return x
        heads = 1 if name in ("key", "value") else share
        if x.dim() == 4 or name == "key_lengths":
            x = x[:1]
        if x.dim() > 2:
            x = x[..., :heads, :, :]
        return _leaf(name, x[..., :heads] if name in ("sinks", "alibi_slopes") else x)

    return changed(arguments, smaller)


# ------------------------------------------------------------------------------------- candidates


class Candidate(NamedTuple):
    """`drop_reason` returns why it may not be chosen. `call` and it run in the `context`."""

    name: str
    call: Callable[[], Any]
    drop_reason: Callable[[], str | None] = lambda: None
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def jobs(op: str, arguments: Arguments, found: Entries) -> Iterator[tuple[Key, list[Candidate]]]:
    """Yield the candidates of each kernel of a call, then those of the op, what is shipped first.
    Each kernel is measured with the best options of the kernels before it: the caller puts the
    result of a job into `found` before it asks for the next one.
    """
    tuned, call, chosen = backends.tuned(), Call(op, arguments), dict[str, Any]()
    with tuned.forced({}) as asked:
        call()
    apart = {q.kernel: q.apart for q in asked if q.apart is not None}
    with tuned.forced(apart) as asked:
        call.forward()
        early = {(q.kernel, q.case) for q in asked}
        call()
    ordered = sorted(asked, key=lambda question: question.kernel in apart)
    for kernel, question in {(q.kernel, q.case): q for q in ordered}.items():
        options = {tuned.label(o): o for o in (question.shipped, *question.options())}
        timed = call.forward if kernel in early else call  # time only the pass that has the kernel
        candidates = []
        for name, option in options.items():
            repeats = OF_GLUON if isinstance(option, tuned.GluonOption) else REPEATS
            reason = functools.partial(call.drop_reason, "triton", repeats)
            forced = {**apart, **chosen, question.kernel: option}
            context = functools.partial(tuned.forced, forced)
            candidates.append(Candidate(name, timed, reason, context))
        if len(candidates) > 1:
            yield kernel, candidates
            chosen[question.kernel] = options.get(found[kernel].choice or "", question.shipped)
    kernels = functools.partial(tuned.forced, chosen)
    candidates = [Candidate("triton", call, call.drop_reason, kernels)]
    if backends.computed_by_torch(op, arguments):
        by_torch = functools.partial(call, "torch"), functools.partial(call.drop_reason, "torch")
        candidates.append(Candidate("torch", *by_torch))
    candidates.append(Candidate("reference", functools.partial(call, "reference")))
    yield (op, measurements.call_name(arguments)), candidates


def measure_job(
    candidates: list[Candidate],
    timer: Timer,
    dropped: dict[str, str],
    begin: Callable[[str], None] = lambda name: None,
) -> Entry:
    """Check the candidates, time in turn those that are not dropped, and choose the fastest one, or
    the first one if it ties with the fastest. The reference is only timed.
    """
    seconds: dict[str, list[float]] = {}

    def attempt(candidate: Candidate, action: Callable[[], Any]) -> Any:
        begin(candidate.name)
        try:
            with candidate.context():
                return action()
        except Exception as error:
            dropped[candidate.name] = f"it fails: {type(error).__name__}: {error}".splitlines()[0]
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # ends the process if it has lost its GPU

    for candidate in candidates:
        if candidate.name not in dropped:
            reason = attempt(candidate, candidate.drop_reason)
            dropped |= {} if reason is None else {candidate.name: reason}
    for candidate in ROUNDS * candidates:
        if candidate.name not in dropped:
            taken = attempt(candidate, functools.partial(timer, candidate.call))
            seconds.setdefault(candidate.name, []).append(taken)
    us = {n: round(1e6 * statistics.median(s), 3) for n, s in seconds.items() if n not in dropped}
    choice = min((n for n in us if n != "reference"), key=us.__getitem__, default=None)
    first = candidates[0].name
    if choice is not None and first in us and us[first] * (1 - TIE) <= us[choice]:
        choice = first
    return Entry(choice, us, dropped)


def device_seconds(call: Callable[[], Any]) -> float:
    """Return the seconds that a call takes on the GPU with a cold cache: the median of several."""
    from triton.testing import do_bench

    return do_bench(call, return_mode="median") / 1e3


def worker(folder: str) -> None:
    """Measure the call in a folder, and write there what was found, and what runs now."""
    op, arguments, timer, pattern, found = torch.load(Path(folder, "call"), weights_only=False)
    device = next(iter(arguments.values())).device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for key, (first, *others) in jobs(op, arguments, found):
        known = found.get(key, Entry(None, {}, {}))  # without times, if its process has ended
        if not known.us:
            kept = [c for c in others if c.name == "reference" or re.search(pattern, c.name)]
            begin = functools.partial(_note, folder, found, key)
            found[key] = measure_job([first, *kept], timer, dict(known.dropped), begin)
            _note(folder, found)


def _note(folder: str, found: Entries, *running: Any) -> None:
    Path(folder, "new").write_text(json.dumps([list(found.items()), running]))
    os.replace(Path(folder, "new"), Path(folder, "state"))


def measure_apart(seconds: float, *given: Any) -> tuple[Entries, str | None]:
    """Measure a call in a process of its own. Return what was found, and why that is not all.
    A candidate that ends the process, or runs after LIMIT, is dropped: the next run goes on
    without it. given: what `worker` reads.
    """
    paths = os.pathsep.join(path for path in sys.path if path)
    environ = os.environ | {"FASTFORMER_TUNING": "off", "PYTHONPATH": paths}
    code = "import sys; from fastformer.tuning import worker; worker(sys.argv[1])"
    with tempfile.TemporaryDirectory() as folder:
        torch.save(given, Path(folder, "call"))
        command, why = [sys.executable, "-c", code, folder], None
        output: dict[str, Any] = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            done = subprocess.run(command, env=environ, timeout=min(seconds, LIMIT), **output)
            if done.returncode:
                said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:300]
                why = f"it ends its process: exit status {done.returncode}: {said}"
        except subprocess.TimeoutExpired:
            why = f"it takes more than {LIMIT:.0f} s" if seconds >= LIMIT else None
        if not (state := Path(folder, "state")).exists():
            return {}, why
        entries, running = json.loads(state.read_text())
    found = {tuple(key): Entry(*entry) for key, entry in entries}
    if why is not None and running:
        key, name = tuple(running[0]), running[1]
        dropped = found.get(key, Entry(None, {}, {})).dropped
        found[key] = Entry(None, {}, {**dropped, name: why})
        why = f"{why} ({key[0]}, {name})"
    return found, why


# -------------------------------------------------------------------------------------- in public


@dataclass(frozen=True)
class Tuning:
    """What was measured, or with dry_run what would be measured. `print` it.

    rows: for each call (call, chosen candidate, {candidate: microseconds}, {dropped candidate:
        reason}). The last three are empty for a call that was not measured.
    file: the file of the results.
    done: whether all calls were measured before the time was up.
    """

    rows: tuple[tuple[str, str, Mapping[str, float], Mapping[str, str]], ...]
    file: Path | None
    done: bool

    def __str__(self) -> str:
        lines = []
        for name, choice, us, dropped in self.rows:
            times = ", ".join(f"{other} {time:.1f} us" for other, time in us.items())
            taken = f": {choice or 'nothing'} ({times})" if us or dropped else ""
            lines.append(name + taken)
            lines += [f"    not {other}: {reason}" for other, reason in dropped.items()]
        return "\n".join(lines)


Calls = dict[Key, Arguments]


def add(calls: Calls, op: str, arguments: Arguments) -> None:
    """Add a checked call, without its graph, unless it is in float64 or has an empty tensor."""
    tensors = [x for x in flat(arguments).values() if isinstance(x, Tensor)]
    if all(x.numel() and x.dtype != torch.float64 for x in tensors):
        key = op, measurements.call_name(arguments)
        calls.setdefault(key, changed(arguments, _leaf))


def measure(
    calls: Calls,
    file: Path,
    minutes: float,
    timer: Timer = device_seconds,
    candidates: str = "",
) -> Tuning:
    """Measure the calls, of one GPU, that are not yet in the file, and write the results to it.

    candidates: a regular expression that the names of candidates have to match, but for what is
        shipped and the reference.
    """
    here = measurements.machine(next(iter(next(iter(calls.values())).values())).device)
    assert here is not None
    known, skipped = measurements.read(file, here), dict[Key, str | None]()
    deadline = time.monotonic() + 60 * minutes
    try:
        for key, arguments in tqdm(calls.items(), unit="call", disable=None):
            seconds = deadline - time.monotonic()
            if not _is_done(known, key) and seconds > 0:
                given = key[0], arguments, timer, candidates, known
                found, skipped[key] = measure_apart(seconds, *given)
                measurements.write(file, here, found)
                known |= found
    finally:
        backends.measure_again()
    rows = []
    for key in calls:
        entry, why = known.get(key, Entry(None, {}, {})), skipped.get(key)
        reasons = {**entry.dropped, **({} if why is None else {"the call": why})}
        rows.append((" ".join(key), entry.choice or "", entry.us, reasons))
    is_done = all(_is_done(known, key) or skipped.get(key) for key in calls)
    return Tuning(tuple(rows), file, is_done)


def _is_done(known: Entries, key: Key) -> bool:
    return key in known and bool(known[key].us)


def planned(calls: Iterable[Key], file: Path | None, device: torch.device) -> Tuning:
    """Return the calls that `measure` would measure: those that are not in the file."""
    known = measurements.read(file, measurements.machine(device))
    left = [" ".join(key) for key in calls if not _is_done(known, key)]
    return Tuning(tuple((name, "", {}, {}) for name in left), file, False)


def tune(
    model: nn.Module, /, *inputs: Any, minutes: float = 30.0, dry_run: bool = False, **kwargs: Any
) -> Tuning:
    """Measure on this GPU what is fastest for the op calls that a model makes.

    It runs the model once on the inputs, in its current mode, and measures each of its op calls,
    with the backward if gradients are enabled and needed. It times the tile configurations and
    variants of each kernel; for a call without gradients also torch's own op, if it computes the
    same. A candidate is dropped if it fails, crashes, takes too long, disagrees with the reference
    by the numerics policy, or has results that change from run to run.

    The results are written to the file that the backend `auto` reads: `tuning.json` in the user's
    cache directory, or the file that the environment variable FASTFORMER_TUNING names. What the
    file already holds is not measured again. Later calls use the results, also in this process.

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
    calls: dict[torch.device, Calls] = {}

    def keep(op: str, arguments: Arguments) -> None:
        add(calls.setdefault(next(iter(arguments.values())).device, {}), op, arguments)

    with backends.observe(on_call=keep):
        getattr(model, "_orig_mod", model)(*inputs, **kwargs)
    if not any(calls.values()):
        raise ValueError(
            "the model calls no op of fastformer that is measured; accelerate(model) replaces "
            "torch's layers by ops"
        )
    if dry_run:
        results = [planned(these, measurements.path(), x) for x, these in calls.items()]
    elif any(device.type != NEEDED for device in calls):
        raise RuntimeError(NO_GPU.format("the model is not on one"))
    else:
        file = writable()
        results = [measure(these, file, minutes) for these in calls.values() if these]
    rows = sum((r.rows for r in results), ())
    return Tuning(rows, measurements.path(), all(r.done for r in results))


def writable() -> Path:
    """Return the file to write. Raises RuntimeError if FASTFORMER_TUNING is off."""
    file = measurements.path()
    if file is None:
        raise RuntimeError("the environment variable FASTFORMER_TUNING is off: nothing is written")
    return file


def gpu() -> torch.device:
    """Return the current GPU. Raises RuntimeError if there is none."""
    if environment.devices()[-1].type != NEEDED:
        raise RuntimeError(NO_GPU.format("there is none on this machine"))
    return torch.device("cuda", torch.cuda.current_device())
