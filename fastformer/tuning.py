"""Measure what is fastest on this GPU: `tune`, and the command `fastformer tune`.

It times calls of the public ops, each in a separate process. The candidates for a class of calls
are the options of each of its kernels (tiles, or a variant such as a kernel in Gluon), and torch's
own op instead of the kernels. A candidate is dropped if it fails, crashes, hangs, or its results
break the numerics policy, change from run to run or lose a NaN. A kernel
in Gluon places its own memory barriers, so it is also launched many times, with NaN around all
tensors, to find races and accesses out of bounds. Each finished measurement is written to the file,
and the next run continues from there.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import itertools
import json
import logging
import os
import pickle
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from fastformer import checks, environment, numerics
from fastformer.dispatch import autograd, backends, measurements
from fastformer.dispatch.measurements import Class, Entry, changed, cut, flat
from fastformer.dispatch.operation import OPERATIONS, Arguments
from fastformer.eager import use_formula

ROUNDS, TIE = 3, 0.02  # of timing; a choice is faster than what is shipped by more than this
SILENCE = 180.0  # seconds until a step of a candidate hangs: it may compile for a minute
LEAST, MOST, SECONDS = 5, 50, 0.1  # bounds of the timed repetitions, and their total time
CACHE_BYTES = 256 << 20  # more than the L2 cache of any GPU
CLOCK = 2e9  # cycles per second, approximately
# The lengths that are compared with float64: no multiples of a tile, so that its masked edge is
# compared too, but of 16, for which Triton compiles the same kernel; for Gluon, odd ones as well.
LENGTHS, ODD = (720, 720), ((1, 3), (71, 130), (200, 77), (257, 385))
REPEATS = 200  # launches of a kernel in Gluon that have to give the same bits
NEEDED = "cuda"  # the device type that can be measured
NO_GPU = "tuning measures on a GPU, and {}"

_log = logging.getLogger("fastformer")
_is_floating = measurements.is_floating
Timer = Callable[[Callable[[], Any]], float]  # returns the seconds of a call


class Call:
    """A call of an op that is measured, with its outputs and gradients."""

    def __init__(self, op: str, arguments: Arguments) -> None:
        self.op, self.arguments = op, arguments
        self.gradient = measurements.differentiated(arguments)
        self.device = next(iter(arguments.values())).device
        self.first = next(n for n, x in arguments.items() if _is_floating(x))
        self.dtype = arguments[self.first].dtype
        self._cotangents: dict[Any, list[Tensor]] = {}
        self._small: dict[tuple[int, int], tuple[Any, ...]] = {}

    def __call__(self, backend: str = "triton") -> tuple[Tensor, ...]:
        return self.results(self.arguments, backend)

    def forward(self) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return self.outputs(self.arguments, "triton")

    def outputs(self, arguments: Arguments, backend: str) -> tuple[Tensor, ...]:
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
            if key not in self._cotangents:  # equal in each call with the same shapes
                make = torch.Generator(self.device).manual_seed(2)
                random = (torch.randn(x.shape, generator=make, device=self.device) for x in outputs)
                made = [g.to(self.dtype).to(x.dtype) for g, x in zip(random, outputs)]
                self._cotangents[key] = made
            given = outputs, _leaves(arguments), self._cotangents[key]
            grads = torch.autograd.grad(*given, materialize_grads=True)
        return *(x.detach() for x in outputs), *grads

    def small(self, lengths: tuple[int, int]) -> tuple[Any, ...]:
        """Return a small call, and what the reference gives in float64 and in its dtype."""
        if lengths not in self._small:
            given = cut(self.op, self.arguments, *lengths)
            with use_formula():
                exact = self.results(changed(given, _double), "reference")
                self._small[lengths] = given, exact, self.results(given, "reference")
        return self._small[lengths]

    def disagreement(self, lengths: tuple[int, int]) -> str | None:
        """Return which result of a small call breaks the numerics policy, and how, or None."""
        given, exact, eager = self.small(lengths)
        have, grads = self.results(given, "triton"), len(_leaves(given)) * self.gradient
        return numerics.first_disagreement(have, exact, eager, len(have) - grads)

    def drop_reason(self, run: Callable[[], Any] | None = None) -> str | None:
        """Return why the candidate whose context is active may not be chosen, or None. run: of a
        kernel in Gluon, the pass that has it; such a kernel is checked for longer.
        """
        if (reason := self.disagreement(LENGTHS)) is not None:
            return reason
        if not all(map(torch.equal, self(), self())):
            return "the results of two runs differ"
        given, nans = dict(self.small(LENGTHS)[0]), []
        x = given[self.first] = given[self.first].detach().clone()
        x[(0,) * x.dim()] = float("nan")
        for backend in ("triton", "reference"):
            with torch.no_grad(), use_formula():
                nans.append([x.isnan() for x in self.outputs(given, backend)])
        if not all(map(torch.equal, *nans)):
            return "NaN reaches other elements of the output"
        return None if run is None else self._gluon_drop_reason(run)

    def _gluon_drop_reason(self, run: Callable[[], Any]) -> str | None:
        for lengths in ODD:
            self.small(lengths)  # the reference, without the fences
            with backends.tuned().fenced() as found:
                reason = self.disagreement(lengths)
            if reason := next(iter(found), reason):
                q, k = lengths
                return f"{reason} ({q} queries, {k} keys, NaN around all tensors)"
        first = [x.detach().clone().view(torch.uint8) for x in run()]
        for _ in range(REPEATS):
            again = [x.detach().view(torch.uint8) for x in run()]
            if not all(map(torch.equal, first, again)):
                return f"{REPEATS} runs give different bits"
        return None


def _leaves(arguments: Arguments) -> list[Tensor]:
    return [x for x in flat(arguments).values() if isinstance(x, Tensor) and x.requires_grad]


def _double(name: str, x: Any) -> Any:
    return x.detach().double().requires_grad_(x.requires_grad) if _is_floating(x) else x


# ------------------------------------------------------------------------------------- candidates


class Candidate(NamedTuple):
    """An implementation of a class of calls.

    `drop_reason` returns why it may not be chosen. `call` and `drop_reason` run in the `context`. A
    baseline is only timed for comparison, and never chosen.
    """

    name: str
    call: Callable[[], Any]
    drop_reason: Callable[[], str | None] = lambda: None
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    baseline: bool = False


@dataclass
class Work:
    """What is measured, and what is known. It is pickled for the measuring process.

    candidates: a regular expression that the names of candidates have to match, but for the first
        one and baselines.
    failed: {(class, candidate): reason}, where the class None stands for all.
    consan: whether kernels run under Triton's concurrency sanitizer.
    silence: the seconds that a step of a candidate may take.
    """

    timer: Timer
    candidates: str = ""
    done: dict[Class, Entry] = field(default_factory=dict)
    failed: dict[tuple[Class | None, str], str] = field(default_factory=dict)
    consan: bool = False
    silence: float = SILENCE


def jobs(work: Work, key: Class, file: str) -> Iterator[tuple[Class, list[Candidate]]]:
    """Yield the candidates of each kernel of the call in a file, then those of the op, what is
    shipped first. Each kernel is measured with the best options of the kernels before it: the
    caller puts the result of a job into `work.done` before it asks for the next one. So the choice
    between one kernel and several comes after those of the several.
    """
    tuned, op, arguments = backends.tuned(), key[0], torch.load(file, weights_only=False)
    call, chosen = Call(op, arguments), dict[str, Any]()
    if call.device.type == "cuda":
        torch.cuda.set_device(call.device)
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
            forced = {**apart, **chosen, question.kernel: option}
            context = functools.partial(tuned.forced, forced)
            run = timed if measurements.is_gluon(name) else None
            reason = functools.partial(call.drop_reason, run)
            candidates.append(Candidate(name, timed, reason, context))
        if len(candidates := _selected(candidates, work)) > 1:
            yield kernel, candidates
            chosen[question.kernel] = options.get(work.done[kernel].choice or "", question.shipped)
    kernels = functools.partial(tuned.forced, chosen)
    candidates = [Candidate("triton", call, call.drop_reason, kernels)]
    computed = OPERATIONS[op].signature(arguments) is not None  # by torch's op
    for name, other in OPERATIONS[op].alternatives.items() if computed else ():
        if other.backward is None or call.gradient:
            context = functools.partial(_instead, op, name, chosen)
            candidates.append(Candidate(name, call, call.drop_reason, context))
    candidates.append(Candidate("reference", functools.partial(call, "reference"), baseline=True))
    yield key, _selected(candidates, work)


@contextlib.contextmanager
def _instead(op: str, name: str, chosen: Mapping[str, Any]) -> Iterator[None]:
    with backends.tuned().forced(chosen), autograd.replaced(op, name):
        yield


def _selected(candidates: list[Candidate], work: Work) -> list[Candidate]:
    first, *others = candidates
    return [first, *(c for c in others if c.baseline or re.search(work.candidates, c.name))]


def measure_job(
    work: Work, key: Class, candidates: list[Candidate], begin: Callable[[str], None]
) -> Entry:
    """Check the candidates, time the remaining ones in turn, and choose the fastest one, or the
    first one if it ties with the fastest. begin: called with a candidate's name before it runs.
    """
    failed = ((c.name, work.failed.get((k, c.name))) for c in candidates for k in (None, key))
    dropped = {name: reason for name, reason in failed if reason is not None}
    seconds: dict[str, list[float]] = {c.name: [] for c in candidates}

    def attempt(candidate: Candidate, action: Callable[[], Any]) -> Any:
        begin(candidate.name)
        try:
            with candidate.context():
                return action()
        except Exception as error:
            dropped[candidate.name] = f"it fails: {_first_line(error)}"
            _require_device()

    for candidate in candidates:
        reason = dropped.get(candidate.name) or attempt(candidate, candidate.drop_reason)
        if reason is not None:
            dropped[candidate.name] = reason
    for _, candidate in itertools.product(range(ROUNDS), candidates):
        if candidate.name not in dropped:
            taken = attempt(candidate, functools.partial(work.timer, candidate.call))
            seconds[candidate.name].append(taken)
    us = {n: round(1e6 * statistics.median(s), 3) for n, s in seconds.items() if n not in dropped}
    able = [c.name for c in candidates if c.name in us and not c.baseline]
    choice, first = min(able, key=us.__getitem__, default=None), candidates[0].name
    if choice is not None and first in us and us[first] * (1 - TIE) <= us[choice]:
        choice = first
    for name in able:
        if choice is not None and name != choice and abs(us[name] - us[choice]) <= TIE * us[choice]:
            dropped[name] = f"it ties with {choice}, which is kept"
    return Entry(choice, us, dropped)


def device_seconds(call: Callable[[], Any]) -> float:
    """Return the seconds that a call takes on the GPU, the median of several repetitions.

    Before each repetition the L2 cache is overwritten. Then the GPU sleeps for longer than the host
    needs to launch the call, so that the host's time is not measured.
    """
    flush = torch.empty(CACHE_BYTES, dtype=torch.int8, device="cuda")
    call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    on_host = time.perf_counter() - started
    torch.cuda.synchronize()
    times = max(LEAST, min(MOST, int(SECONDS / (time.perf_counter() - started))))
    events = []
    for _ in range(times):
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        flush.zero_()
        torch.cuda._sleep(int(2 * on_host * CLOCK))
        pair[0].record()
        call()
        pair[1].record()
        events.append(pair)
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in events)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]


def _require_device() -> None:
    """End the process if its GPU is lost: after an illegal access every call fails."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            print("the GPU is lost to its process", file=sys.stderr, flush=True)
            os._exit(1)


# -------------------------------------------------------------------------- the measuring process


def worker() -> None:
    """Measure the call that standard input names, and write the results to standard output."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # other prints go to standard error, not into the reports

    def tell(*message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        faulthandler.dump_traceback_later(work.silence, exit=True, file=2)  # from now on

    work, key, file, make_jobs = pickle.load(sys.stdin.buffer)
    faulthandler.dump_traceback_later(work.silence, exit=True, file=2)
    try:
        for job, candidates in make_jobs(work, key, file):
            if job not in work.done:
                entry = measure_job(work, job, candidates, functools.partial(tell, "try", job))
                work.done[job] = entry
                tell("entry", job, entry)
    except Exception as error:
        tell("skip", _first_line(error))
    out.flush()
    os._exit(0)  # skip the cleanup: a broken GPU could make it fail or hang


def supervise(
    work: Work,
    key: Class,
    file: str,
    deadline: float,
    keep: Callable[[Class, Entry], None] = lambda key, entry: None,
    make_jobs: Callable[..., Any] = jobs,
) -> str | None:
    """Measure the call in a file in a process of its own until the deadline. Return why the call
    cannot be measured, or None. `keep` is called with each result.

    A candidate that ends its process, or takes longer than `work.silence`, is added to
    `work.failed`, and another process goes on without it.
    """
    paths = os.pathsep.join(path for path in sys.path if path)
    variables = {"FASTFORMER_TUNING": "off", "PYTHONPATH": paths}
    variables |= {"TRITON_INSTRUMENTATION_MODE": "consan"} if work.consan else {}
    command = [sys.executable, "-c", "from fastformer.tuning import worker; worker()"]
    while True:
        running, skipped = None, None
        given = pickle.dumps((work, key, file, make_jobs))
        with tempfile.TemporaryFile("w+b") as errors:  # a compiler may hold it past the end
            pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            process = subprocess.Popen(command, env=os.environ | variables, stderr=errors, **pipes)
            try:
                process.communicate(given, max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return None
            finally:  # after Ctrl-C, too
                process.kill()
                for what, *rest in map(json.loads, process.communicate()[0].splitlines()):
                    running = (tuple(rest[0]), rest[1]) if what == "try" else None
                    if what == "skip":
                        skipped = rest[0]
                    elif what == "entry":
                        done = tuple(rest[0])
                        work.done[done] = Entry(*rest[1])
                        keep(done, work.done[done])
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines() or [""]
        if (status := process.returncode) == 0:
            return skipped
        said = next((x for x in lines if "assert" in x.lower() or "Timeout (" in x), lines[-1])
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        why = f"it crashes: {how}: {said[:300]}"
        if said.startswith("Timeout ("):  # of faulthandler
            why = f"it hangs: it takes more than {work.silence:.0f} s"
        if running is None:
            return why
        kernel, name = running
        if measurements.is_gluon(name):  # the next class would most likely cost as much time
            work.failed[None, name] = f"in another class of calls {why}"
        work.failed[kernel, name] = why


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


Calls = dict[Class, Arguments]  # a call of each class


def add(calls: Calls, op: str, arguments: Arguments) -> None:
    """Add a checked call, without its graph, unless there is one of its class."""
    case = measurements.class_of(op, arguments)
    if case is not None and (op, case) not in calls:
        calls[op, case] = changed(arguments, measurements.leaf)


def measure(
    calls: Calls,
    file: Path | None,
    minutes: float,
    timer: Timer = device_seconds,
    candidates: str = "",
    consan: bool = False,
) -> Tuning:
    """Measure the calls, of one GPU, that are not yet in the file, and write the results to it. If
    it is None, nothing is read or written.

    candidates, consan: see `Work`.
    """
    here = measurements.machine(next(iter(next(iter(calls.values())).values())).device)
    assert here is not None
    silence = SILENCE * (5 if consan else 1)  # ptxas needs minutes for what the sanitizer adds
    done = {} if file is None else known(file, here)
    work = Work(timer, candidates, done, consan=consan, silence=silence)
    skipped: dict[Class, str | None] = {}
    deadline = time.monotonic() + 60 * minutes

    def keep(key: Class, entry: Entry) -> None:
        if file is not None:
            measurements.write(file, here, {key: entry})
        for name, reason in entry.dropped.items():
            if measurements.is_gluon(name) and name not in entry.us:
                _log.warning("%s is not taken for %s, %s: %s", name, *key, reason)

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "call")
        try:
            for key, arguments in tqdm(calls.items(), unit="call", disable=None):
                if key not in work.done and time.monotonic() < deadline:
                    torch.save(arguments, path)
                    skipped[key] = supervise(work, key, path, deadline, keep)
        finally:
            backends.measure_again()
    rows = []
    for key in calls:
        entry = work.done.get(key, Entry(None, {}, {}))
        why = skipped.get(key)
        reasons = {**entry.dropped, **({} if why is None else {"the call": why})}
        rows.append((" ".join(key), entry.choice or "", entry.us, reasons))
    is_done = all(key in work.done or skipped.get(key) is not None for key in calls)
    return Tuning(tuple(rows), file, is_done)


def known(file: Path, here: Mapping[str, Any]) -> dict[Class, Entry]:
    """Return the measurements in a file, without those of kernels in Gluon that have changed since,
    and without the choices between ops that were made with these: they are measured again.
    """
    found = measurements.measured(file, here)
    names = ((key, name) for key, x in found.items() for name in (*x.us, *x.dropped))
    gluon = [(key, name) for key, name in names if measurements.is_gluon(name)]
    old = {key for key, name in gluon if backends.tuned().has_changed(name)}
    kernels = {kind.split()[0] for kind, _ in old}  # of "attention forward": attention
    ops = {op for op, record in OPERATIONS.items() if record.kernel in kernels}
    return {k: entry for k, entry in found.items() if k not in old and k[0] not in ops}


def planned(calls: Iterable[Class], file: Path | None, device: torch.device) -> Tuning:
    """Return the calls that `measure` would measure: those that are not in the file."""
    here = measurements.machine(device)
    done = {} if here is None or file is None else known(file, here)
    left = [" ".join(key) for key in calls if key not in done]
    return Tuning(tuple((name, "", {}, {}) for name in left), file, False)


def tune(
    model: nn.Module, /, *inputs: Any, minutes: float = 30.0, dry_run: bool = False, **kwargs: Any
) -> Tuning:
    """Measure on this GPU what is fastest for the op calls that a model makes.

    It runs the model once on the inputs, in its current mode, and keeps one call of each class: an
    op with its dtype, its options, and sizes rounded up to powers of two. If gradients are enabled
    and needed, the backward is measured too. For each class it times the candidates: the tile
    configurations and variants of each kernel, and torch's own op if it computes the same. A
    candidate is dropped if it fails, crashes, hangs, disagrees with the reference by the numerics
    policy, or has results that change from run to run.

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
        A `Tuning` with a row for each class of calls. `print` it.

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
    file = measurements.path()
    if dry_run:
        plans = [planned(these, file, device) for device, these in calls.items()]
        return Tuning(sum((plan.rows for plan in plans), ()), file, False)
    if any(device.type != NEEDED for device in calls):
        raise RuntimeError(NO_GPU.format("the model is not on one"))
    file = writable()
    results = [measure(these, file, minutes) for these in calls.values() if these]
    return Tuning(sum((r.rows for r in results), ()), file, all(r.done for r in results))


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
