"""Measure which options are fastest on this GPU.

The candidates for a class of calls are the tile configurations of each of its kernels, the variants
of a kernel, and instead of the kernels torch's own op. A candidate is dropped if its results break
the numerics policy, change from run to run or lose a NaN. Each finished measurement is written to
the file, and the next run continues from there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from fastformer import checks, environment, numerics
from fastformer.dispatch import autograd, backends, measurements, workloads
from fastformer.dispatch.measurements import Class, Entry
from fastformer.dispatch.operation import OPERATIONS
from fastformer.dispatch.workloads import Workload
from fastformer.eager import use_formula
from fastformer.tuning import safety
from fastformer.tuning.measuring import (
    SILENCE,
    Candidate,
    Job,
    Jobs,
    Timer,
    Work,
    device_seconds,
    supervise,
)

_log = logging.getLogger("fastformer")

# ------------------------------------------------------------------------------------- comparing


def disagreement(
    have: Sequence[Tensor], want: Sequence[Tensor], peer: Sequence[Tensor], outputs: int
) -> str | None:
    """Return which result breaks the numerics policy, and how, or None.

    have: the results to check. want: the results of the reference in float64. peer: the results of
    the reference in the dtype of the call. The first `outputs` tensors are outputs, the others are
    gradients.
    """
    for i, (x, exact, eager) in enumerate(zip(have, want, peer, strict=True)):
        name = f"output {i}" if i < outputs else f"gradient {i - outputs}"
        if x.shape != exact.shape or x.dtype != eager.dtype:
            return (
                f"{name} is {x.dtype} {list(x.shape)}; expected {eager.dtype} {list(exact.shape)}"
            )
        other = (eager.double() - exact).abs()
        error = float(other.max()) if other.numel() else 0.0
        if problem := numerics.disagreement(x, exact, error, i >= outputs):
            return f"{name} disagrees with the reference: it {problem}"
    return None


class _Small(NamedTuple):
    """A small call, with the results of the reference in float64 and in the dtype of the call."""

    given: workloads.Arguments
    exact: tuple[Tensor, ...]
    eager: tuple[Tensor, ...]
    outputs: int  # how many of the results are no gradients


class _Call:
    """The inputs of a workload: at full size for timing, and small for comparing with float64."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self.workload, self.device = workload, device
        self.given = workload.arguments(device)
        self._small: dict[Workload, _Small] = {}
        self._cotangents: dict[Any, list[Tensor]] = {}

    def __call__(self) -> tuple[Tensor, ...]:
        return self.results(self.given, "triton")

    def forward(self) -> tuple[Tensor, ...]:
        with torch.no_grad(), backends.use_backend("triton"):
            return OPERATIONS[self.workload.op].contract(**self.given)

    def by_reference(self) -> tuple[Tensor, ...]:
        return self.results(self.given, "reference")

    def results(self, given: workloads.Arguments, backend: str) -> tuple[Tensor, ...]:
        """Return the outputs, and the gradients if the workload has any, on this backend."""
        leaves = [x for x in given.values() if isinstance(x, Tensor) and x.requires_grad]
        with backends.use_backend(backend), torch.set_grad_enabled(self.workload.gradient):
            outputs = OPERATIONS[self.workload.op].contract(**given)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            if not self.workload.gradient:
                return outputs
            grads = torch.autograd.grad(outputs, leaves, self.cotangents(outputs))
            return *(x.detach() for x in outputs), *grads

    def cotangents(self, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Return random gradients of the outputs, equal in each call with the same shapes."""
        key = tuple((x.shape, x.dtype) for x in outputs)
        if key not in self._cotangents:
            generator = torch.Generator(self.device).manual_seed(2)
            dtype = getattr(torch, self.workload.dtype)
            make = functools.partial(torch.randn, generator=generator, device=self.device)
            self._cotangents[key] = [make(x.shape).to(dtype).to(x.dtype) for x in outputs]
        return self._cotangents[key]

    def small(self, workload: Workload) -> _Small:
        """Return a call of a small workload, and what the reference gives."""
        if workload not in self._small:
            given = workload.arguments(self.device, seed=1)
            wide = {n: _double(x) for n, x in given.items()}
            with use_formula():
                exact = self.results(wide, "reference")
                eager = self.results(given, "reference")
            gradients = sum(isinstance(x, Tensor) and x.requires_grad for x in given.values())
            self._small[workload] = _Small(given, exact, eager, len(exact) - gradients)
        return self._small[workload]

    def disagreement(self, workload: Workload) -> str | None:
        """Return how a small call differs from the reference by the numerics policy, or None."""
        small = self.small(workload)
        have = self.results(small.given, "triton")
        return disagreement(have, small.exact, small.eager, small.outputs)

    def drop_reason(self) -> str | None:
        """Return why the candidate whose context is active may not be chosen, or None."""
        reason = self.disagreement(self.workload.small())
        if reason is not None:
            return reason
        if not all(map(torch.equal, self(), self())):
            return "the results of two runs differ"
        return self.lost_nan()

    def gluon_drop_reason(self, run: Callable[[], Any], consan: safety.Consan | None) -> str | None:
        """Return why a candidate in Gluon may not be chosen, or None: see safety.py. `run` is the
        pass that has the kernel.
        """
        if (reason := self.drop_reason()) is not None:
            return reason
        for one in safety.odd(self.workload):
            self.small(one)  # before the fences: it is the reference
            with safety.fenced() as found:
                reason = self.disagreement(one)
            if reason := next(iter(found), reason):
                return f"{reason} ({one}, NaN around all tensors)"
        reason = safety.differing_runs(run, self.device)
        return reason if reason is not None or consan is None else consan()

    def lost_nan(self) -> str | None:
        """Return an error message if NaN spreads to other elements than in the reference."""
        given = dict(self.small(self.workload.small()).given)
        name = next(n for n, x in given.items() if isinstance(x, Tensor) and x.is_floating_point())
        given[name] = given[name].detach().clone()
        given[name][(0,) * given[name].dim()] = float("nan")
        nans = []
        for backend in ("triton", "reference"):
            with torch.no_grad(), backends.use_backend(backend), use_formula():
                outputs = OPERATIONS[self.workload.op].contract(**given)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            nans.append([x.isnan() for x in outputs])
        return None if all(map(torch.equal, *nans)) else "NaN reaches other elements of the output"


def _double(x: Any) -> Any:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.detach().double().requires_grad_(x.requires_grad)


class Selection(NamedTuple):
    """What to measure of each class of calls.

    candidates: a regular expression; only the candidates whose name it finds are measured, beside
        the first one of a job and those that are only timed for comparison.
    consan: whether each candidate in Gluon also runs once under Triton's concurrency sanitizer.
    """

    candidates: str = ""
    consan: bool = False

    def of(self, job: Job) -> Job:
        """Return the job with these candidates alone."""
        first, *others = job.candidates
        kept = [c for c in others if c.baseline or re.search(self.candidates, c.name)]
        return job._replace(candidates=[first, *kept])


def jobs_on(device: torch.device, selection: Selection = Selection()) -> Jobs:  # noqa: B008
    """Return a function that yields the jobs of a workload on this device."""
    return functools.partial(_jobs, device, selection)


def _jobs(
    device: torch.device, selection: Selection, workload: Workload, done: Mapping[Class, Entry]
) -> Iterator[Job]:
    """Yield the jobs of a workload: one for each of its kernels, then one for the op.

    Each kernel is measured with the best options of the kernels before it. The caller has to put
    the result of each yielded job into `done` before it asks for the next job.
    """
    if (workload.op, workload.key) in done:
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    call, chosen = _Call(workload, device), {}  # type: ignore[var-annotated]
    computed = False  # whether torch's op can compute the call

    def look(op: str, arguments: workloads.Arguments) -> None:
        nonlocal computed
        computed = OPERATIONS[op].signature(arguments) is not None

    with backends.forced(workload.op, {}) as asked, backends.observe(on_call=look):
        call.forward()
        early = {(q.kernel, q.case) for q in asked}
        call()
    for key, tuning_key in {(q.kernel, q.case): q for q in asked}.items():
        options = {backends.label(o): o for o in (tuning_key.shipped, *tuning_key.options())}
        timed = call.forward if key in early else call  # time only the pass that has the kernel
        candidates = []
        for name, option in options.items():
            forced = {**chosen, tuning_key.kernel: option}
            reason = call.drop_reason
            if measurements.is_gluon(name):
                sanitizer = safety.Consan(workload, forced, name) if selection.consan else None
                reason = functools.partial(call.gluon_drop_reason, timed, sanitizer)
            context = functools.partial(backends.forced, workload.op, forced)
            candidates.append(Candidate(name, timed, reason, context))
        job = selection.of(Job(key, candidates))
        if len(job.candidates) > 1:
            yield job
            chosen[tuning_key.kernel] = options.get(done[key].choice or "", tuning_key.shipped)
    kernels = functools.partial(backends.forced, workload.op, chosen)
    candidates = [Candidate("triton", call, call.drop_reason, kernels)]
    for name, other in OPERATIONS[workload.op].alternatives.items() if computed else ():
        if other.backward is not None and not workload.gradient:
            continue
        context = functools.partial(_instead, workload.op, name, chosen)
        candidates.append(Candidate(name, call, call.drop_reason, context))
    candidates.append(Candidate("reference", call.by_reference, baseline=True))
    yield selection.of(Job((workload.op, workload.key), candidates))


@contextlib.contextmanager
def _instead(op: str, name: str, chosen: Mapping[str, Any]) -> Iterator[None]:
    with backends.forced(op, chosen), autograd.replaced(op, name):
        yield


# --------------------------------------------------------------------------------- the workloads


def standard() -> list[Workload]:
    """Return the calls that `fastformer tune` measures, the most important first."""
    found: list[Workload] = []
    for dtype, gradient in (("bfloat16", True), ("bfloat16", False), ("float32", True)):
        kinds = (_attentions, _norms, _layers, _losses, _decoding, _embeds, _rotations)
        in_turn = itertools.zip_longest(*(kind(dtype, gradient) for kind in kinds))
        found += [one for group in in_turn for one in group if one is not None]
    return found


def _attentions(dtype: str, gradient: bool) -> Iterator[Workload]:
    options: list[workloads.Options] = [dict(causal=True), {}, dict(lengths=True, dropout=True)]
    options += [dict(mask="keys"), dict(mask="keys", dropout=True)]
    for length, D in itertools.product((4096, 1024, 2048, 512, 8192, 256, 16384, 128), (64, 128)):
        sizes = dict(B=max(1, 16384 // length), H=1024 // D, G=1024 // D)
        sizes |= dict(Sq=length, Sk=length, D=D, Dv=D)
        for one in options:
            op = "scaled_dot_product_attention"
            yield workloads.workload(op, dtype, sizes, gradient, heads_inside=True, **one)


def _decoding(dtype: str, gradient: bool) -> Iterator[Workload]:
    """Yield decoding calls: one or eight queries over many keys, without gradients."""
    for Sq, Sk, B in itertools.product((1, 8), (4096, 32768), (1, 16)) if not gradient else ():
        sizes = dict(B=B, H=32, G=8, Sq=Sq, Sk=Sk, D=128, Dv=128)
        options: workloads.Options = dict(lengths=True, causal=True, bottom_right=True)
        yield workloads.workload("scaled_dot_product_attention", dtype, sizes, **options)
        yield workloads.workload("paged_attention", dtype, sizes | dict(page=64), **options)


def _norms(dtype: str, gradient: bool) -> Iterator[Workload]:
    for M, N in itertools.product((16384, 4096), (512, 1024, 4096, 2048, 8192)):
        size = dict(M=M, N=N)
        for p in (True, False):
            affine = dict(weight=True, bias=True, dropout=p)
            yield workloads.workload("dropout_add_layer_norm", dtype, size, gradient, **affine)
            options: workloads.Options = dict(weight=True, dropout=p)
            yield workloads.workload("dropout_add_rms_norm", dtype, size, gradient, **options)
        yield workloads.workload("layer_norm", dtype, size, gradient, weight=True, bias=True)
        yield workloads.workload("rms_norm", dtype, size, gradient, weight=True)


def _layers(dtype: str, gradient: bool) -> Iterator[Workload]:
    for M, d in itertools.product((16384, 4096), (512, 1024, 4096)):
        sizes = dict(M=M, d=d, F=4 * d, out=d)
        for kind, p in itertools.product(("relu", "gelu"), (True, False)):
            options: workloads.Options = dict(activation=kind, b_1=True, b_2=True, dropout=p)
            yield workloads.workload("feed_forward", dtype, sizes, gradient, **options)
        yield workloads.workload("swiglu", dtype, sizes, gradient)
        gated: workloads.Options = dict(activation="silu")
        yield workloads.workload("gated_activation", dtype, dict(M=M, F=4 * d), gradient, **gated)
        yield workloads.workload("geglu", dtype, sizes, gradient, b_1=True, b_2=True, dropout=True)


def _losses(dtype: str, gradient: bool) -> Iterator[Workload]:
    for M, V in itertools.product((16384, 4096), (32768, 65536, 131072)):
        for options in (dict(reduction="mean"), dict(reduction="sum", smoothing="kl")):
            yield workloads.workload("cross_entropy", dtype, dict(M=M, V=V), gradient, **options)
            wide = dict(M=M, N=1024, V=V)
            yield workloads.workload("linear_cross_entropy", dtype, wide, gradient, **options)


def _embeds(dtype: str, gradient: bool) -> Iterator[Workload]:
    for M, N in itertools.product((16384, 4096), (512, 1024, 4096)):
        for p in (True, False):
            sizes = dict(M=M, S=512, N=N, V=32768)
            yield workloads.workload("embed", dtype, sizes, gradient, positional=True, dropout=p)


def _rotations(dtype: str, gradient: bool) -> Iterator[Workload]:
    for D, norm in itertools.product((128, 64), (False, True)):
        sizes = dict(B=4, H=4096 // D, G=1024 // D, S=4096, D=D, R=D)
        options: workloads.Options = dict(heads_inside=True, norm=norm)
        yield workloads.workload("rotary_embedding", dtype, sizes, gradient, **options)


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


def measure(
    wanted: Sequence[Workload],
    device: torch.device,
    file: Path,
    minutes: float,
    timer: Timer = device_seconds,
    progress: bool = True,
    selection: Selection = Selection(),  # noqa: B008 - a tuple
) -> Tuning:
    """Measure on a GPU the workloads that are not yet in the file, and write the results to it."""
    here = measurements.machine(device)
    assert here is not None
    work = Work(list(wanted), jobs_on(device, selection), timer, _known(file, here))
    with tqdm(total=len(wanted), unit="call", disable=None if progress else True) as bar:

        def step(i: int) -> None:
            bar.update(i - bar.n)
            bar.set_description(str(wanted[i]), refresh=True)

        def keep(key: Class, entry: Entry) -> None:
            measurements.write(file, here, {key: entry})
            for name, reason in entry.dropped.items():
                if measurements.is_gluon(name) and name not in entry.us:
                    _log.warning("%s is not taken for %s, %s: %s", name, *key, reason)

        try:
            longer = dict(silence=SILENCE + safety.CONSAN_SECONDS) if selection.consan else {}
            done = supervise(work, 60 * minutes, keep, step, **longer)
        finally:
            backends.measure_again()
        bar.update((len(wanted) if done else bar.n) - bar.n)
    rows = []
    for i, workload in enumerate(wanted):
        entry = work.done.get((workload.op, workload.key), Entry(None, {}, {}))
        reasons = dict(entry.dropped)
        if i in work.skipped:
            reasons["the call"] = work.skipped[i]
        rows.append((str(workload), entry.choice or "", entry.us, reasons))
    return Tuning(tuple(rows), file, done)


def _known(file: Path, here: Mapping[str, Any]) -> dict[Class, Entry]:
    """Return the measurements in a file, without those of kernels in Gluon that have changed since,
    and without the choices between ops that were made with these: they are measured again.
    """
    found, old = measurements.measured(file, here), set()
    for key, entry in found.items():
        if any(map(backends.has_changed, (*entry.us, *entry.dropped))):
            old.add(key)
    kinds = {kind for kind, _ in old}
    ops = {op for op, record in OPERATIONS.items() if not kinds.isdisjoint(record.tuned)}
    return {k: entry for k, entry in found.items() if k not in old and k[0] not in ops}


def planned(wanted: Sequence[Workload], file: Path | None, device: torch.device | None) -> Tuning:
    """Return a `Tuning` of the workloads that are not in the file, which `measure` would measure.
    Without a file, or on a device that is not measured, these are all workloads.
    """
    here = None if device is None else measurements.machine(device)
    known = {} if here is None or file is None else _known(file, here)
    left = (workload for workload in wanted if (workload.op, workload.key) not in known)
    return Tuning(tuple((str(workload), "", {}, {}) for workload in left), file, False)


def tune(
    model: nn.Module, /, *inputs: Any, minutes: float = 30.0, dry_run: bool = False, **kwargs: Any
) -> Tuning:
    """Measure on this GPU what is fastest for the op calls that a model makes.

    It runs the model once on the inputs, in its current mode, and records the calls of fastformer's
    ops; if gradients are enabled and needed, the backward is measured too. For each class of calls
    (an op, a dtype, sizes rounded up to powers of two, and options) it times the candidates: the
    tile configurations and variants of each kernel, and torch's own op if it computes the same. A
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
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected an nn.Module")
    checks.require_number("minutes", minutes, "a positive number")
    if not minutes > 0:
        raise ValueError(f"minutes is {minutes}; expected a positive number")
    checks.require_flag("dry_run", dry_run)
    calls: dict[torch.device, dict[Class, Workload]] = {}

    def record(op: str, arguments: workloads.Arguments) -> None:
        workload, device = workloads.of(op, arguments), next(iter(arguments.values())).device
        if workload is not None:
            calls.setdefault(device, {}).setdefault((op, workload.key), workload)

    with backends.observe(on_call=record):
        getattr(model, "_orig_mod", model)(*inputs, **kwargs)
    if not calls:
        raise ValueError(
            "the model calls no op of fastformer that is measured; accelerate(model) replaces "
            "torch's layers by ops"
        )
    file = measurements.path()
    if dry_run:
        plans = [planned([*these.values()], file, device) for device, these in calls.items()]
        return Tuning(sum((plan.rows for plan in plans), ()), file, False)
    if any(device.type != NEEDED for device in calls):
        raise RuntimeError(NO_GPU.format("the model is not on one"))
    file = writable()
    results = [measure([*these.values()], device, file, minutes) for device, these in calls.items()]
    return Tuning(sum((r.rows for r in results), ()), file, all(r.done for r in results))


NEEDED = "cuda"  # the device type that can be measured
NO_GPU = "tuning measures on a GPU, and {}"


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
