"""Measurements in a worker process, so that a candidate may crash or hang.

A job is a class of calls and its candidates. Each candidate is first checked, and dropped if it is
wrong; then the remaining ones are timed in turn. `supervise` runs the jobs in a worker process and
receives each result as soon as it is measured. A candidate that ends the worker, or that sends
nothing for too long, is dropped with that reason, and the next worker continues without it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fastformer.dispatch.measurements import Class, Entry, is_gluon

ROUNDS = 3  # each round times every candidate once, in turn
TIE = 0.02  # a candidate has to be faster than the shipped one by more than this fraction
STARTING = 300.0  # seconds that a worker may take to start
SILENCE = 180.0  # seconds without a message until a candidate hangs: compiling may take a minute

Timer = Callable[[Callable[[], Any]], float]  # returns the seconds of a call


class Candidate(NamedTuple):
    """One way to compute a class of calls.

    drop_reason: returns why the candidate may not be chosen, or None.
    context: returns a context in which `call` and `drop_reason` use this candidate.
    baseline: whether it is only timed for comparison, and never chosen.
    """

    name: str
    call: Callable[[], Any]
    drop_reason: Callable[[], str | None] = lambda: None
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    baseline: bool = False


class Job(NamedTuple):
    """A class of calls and its candidates. The first is the default, used without a measurement."""

    key: Class
    candidates: Sequence[Candidate]


Jobs = Callable[[Any, Mapping[Class, Entry]], Iterator[Job]]  # (group, results so far) -> its jobs


@dataclass
class Work:
    """The input of a worker: the groups to measure, and what is already done, failed or skipped.

    It is pickled, so its functions have to be importable from modules. failed: class -> {candidate:
    reason}. skipped: index of a group -> reason. banned: {candidate: reason}, for all classes.
    """

    groups: list[Any]
    jobs: Jobs
    timer: Timer
    done: dict[Class, Entry] = field(default_factory=dict)
    failed: dict[Class, dict[str, str]] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    banned: dict[str, str] = field(default_factory=dict)


# -------------------------------------------------------------------------------------- measuring


def measure(
    job: Job, timer: Timer, failed: Mapping[str, str], begin: Callable[[str], None]
) -> Entry:
    """Measure the candidates of a job.

    failed: the candidates that must not be tried again, with the reasons. begin: called with the
    name of a candidate before it runs.
    """
    dropped, seconds = dict(failed), {c.name: [] for c in job.candidates}  # type: ignore[var-annotated]

    def attempt(candidate: Candidate, action: Callable[[], Any]) -> Any:
        begin(candidate.name)
        try:
            with candidate.context():
                return action()
        except Exception as error:
            dropped[candidate.name] = f"it fails: {first_line(error)}"
            _require_device()
            return None

    for candidate in job.candidates:
        if candidate.name not in dropped:
            reason = attempt(candidate, candidate.drop_reason)
            if reason is not None:
                dropped[candidate.name] = reason
    for _ in range(ROUNDS):
        for candidate in job.candidates:
            if candidate.name not in dropped:
                taken = attempt(candidate, functools.partial(timer, candidate.call))
                seconds[candidate.name].append(taken)
    us = {n: round(1e6 * statistics.median(s), 3) for n, s in seconds.items() if n not in dropped}
    return _entry(job, us, dropped)


def _entry(job: Job, us: dict[str, float], dropped: dict[str, str]) -> Entry:
    """Choose the fastest candidate, or the first one if it ties with the fastest."""
    able = [c.name for c in job.candidates if c.name in us and not c.baseline]
    choice = min(able, key=us.__getitem__, default=None)
    if choice is None:
        return Entry(None, us, dropped)
    first = job.candidates[0].name
    if first in us and us[first] * (1 - TIE) <= us[choice]:
        choice = first
    for name in able:
        if name != choice and abs(us[name] - us[choice]) <= TIE * us[choice]:
            dropped[name] = f"it ties with {choice}, which is kept"
    return Entry(choice, us, dropped)


def first_line(error: BaseException) -> str:
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


LEAST, MOST, SECONDS = 5, 50, 0.1  # bounds of the timed repetitions, and their total time
CACHE_BYTES = 256 << 20  # more than the L2 cache of any GPU
CLOCK = 2e9  # cycles per second, approximately


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


# ------------------------------------------------------------------------------------- the worker


def worker() -> None:
    """Read a pickled `Work` from standard input, and write the results to standard output."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # other prints go to standard error, not into the reports

    def tell(*message: Any) -> None:
        out.write(json.dumps(message) + "\n")

    work: Work = pickle.load(sys.stdin.buffer)
    tell("ready")
    for i, group in enumerate(work.groups):
        if i in work.skipped:
            continue
        tell("group", i)
        jobs = work.jobs(group, work.done)
        while True:
            try:
                job = next(jobs, None)
            except Exception as error:
                tell("skip", i, first_line(error))
                _require_device()
                break
            if job is None:
                break
            if job.key not in work.done:
                names = {candidate.name for candidate in job.candidates}
                failed = {name: why for name, why in work.banned.items() if name in names}
                failed |= work.failed.get(job.key, {})
                entry = measure(job, work.timer, failed, functools.partial(tell, "try", *job.key))
                work.done[job.key] = entry
                tell("entry", *job.key, *entry)
    tell("end")
    out.flush()
    os._exit(0)  # skip the cleanup: a broken GPU could make it fail or hang


class _Worker:
    """A subprocess that runs `worker`."""

    def __init__(self, work: Work) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from fastformer.tuning.measuring import worker; worker()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=os.environ | {"FASTFORMER_TUNING": "off", "PYTHONPATH": paths},
        )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin as pipe:
            pipe.write(pickle.dumps(work))
        self.messages: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.messages.put(json.loads(line))
        self.messages.put(None)

    def next(self, seconds: float) -> Any:
        """Return the next message, or None at the end. Raises queue.Empty after the timeout."""
        return self.messages.get(timeout=seconds)

    def end(self) -> str:
        """End the process, and return how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1.0)
        self.process.kill()  # if it still runs
        status = self.process.wait()
        with self.errors:
            self.errors.seek(0)
            lines = self.errors.read().decode(errors="replace").strip().splitlines()
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return f"{how}: {lines[-1][:300]}" if lines else how


def supervise(
    work: Work,
    seconds: float,
    keep: Callable[[Class, Entry], None],
    step: Callable[[int], None] = lambda i: None,
    silence: float = SILENCE,
) -> bool:
    """Run the work in worker processes for at most `seconds`; return whether it is complete.

    A candidate that ends its worker, or whose worker sends nothing for `silence` seconds, is added
    to `work.failed`, and the next worker continues without it. keep: called with each result. step:
    called with the index of each group that begins.
    """
    deadline = time.monotonic() + seconds
    while True:
        report, reason = _Report(work, keep, step), ""
        one = _Worker(work)
        try:
            while True:
                left = deadline - time.monotonic()
                patience = silence if report.begun else STARTING
                if left <= 0:
                    return False
                try:
                    message = one.next(min(left, patience))
                except queue.Empty:
                    if patience < left:
                        reason = f"it hangs: nothing was heard for {patience:.0f} s"
                        break
                    continue
                if message is None:
                    break
                if message[0] == "end":
                    return True
                report.take(*message)
        finally:
            ended = one.end()
        report.blame(reason or f"it crashes: {ended}", ended)


class _Report:
    """What a worker has reported: its current group, and the candidate that runs."""

    def __init__(
        self, work: Work, keep: Callable[[Class, Entry], None], step: Callable[[int], None]
    ) -> None:
        self.work, self.keep, self.step = work, keep, step
        self.begun, self.group = False, -1
        self.running: tuple[Class, str] | None = None

    def take(self, what: str, *rest: Any) -> None:
        """Process a message of the worker."""
        self.begun = True
        if what == "group":
            self.group, self.running = rest[0], None
            self.step(self.group)
        elif what == "try":
            self.running = (rest[0], rest[1]), rest[2]
        elif what == "skip":
            self.work.skipped[rest[0]] = rest[1]
        elif what == "entry":
            key, entry = (rest[0], rest[1]), Entry(*rest[2:])
            self.work.done[key], self.running = entry, None
            self.keep(key, entry)

    def blame(self, reason: str, ended: str) -> None:
        """Record the candidate or group in which this worker ended; the next worker skips it."""
        if self.running is not None:
            key, name = self.running
            self.work.failed.setdefault(key, {})[name] = reason
            if is_gluon(name):  # the next class would most likely cost as much time
                self.work.banned[name] = f"in another class of calls {reason}"
        elif self.group >= 0:
            self.work.skipped[self.group] = reason
        else:
            raise RuntimeError(f"the process that measures does not start: {ended}")
