"""The dispatch: which backend runs an op, and why. No other module chooses a backend.

    auto        Triton on a GPU where the kernel supports the call, else the reference; torch's own
                op where `fastformer tune` has measured that it is faster and computes the same
    triton      the kernels; an error where they cannot run. On a CPU: Triton's interpreter
    reference   eager PyTorch

The environment variable FASTFORMER_BACKEND sets the default, `use_backend` the choice of a thread.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

import torch

from fastformer.description import Attention
from fastformer.dispatch import autograd, cases, measurements
from fastformer.dispatch.operation import OPERATIONS, Arguments, Operation
from fastformer.eager import eager

BACKENDS = ("auto", "triton", "reference")
# GPU models on which a run of the whole suite is committed under benchmarks/results.
VERIFIED_GPUS: tuple[str, ...] = ()

_HAS_TRITON = importlib.util.find_spec("triton") is not None  # which does not import it
_log = logging.getLogger("fastformer")


class _State(threading.local):
    def __init__(self) -> None:  # on the instance, where the guards of torch.compile look
        self.backend: str | None = None
        self.first: int | None = None  # of `sequences_from`
        self.explained: list[Choice] | None = None  # a list within `explain`, which runs nothing
        self.on_choice: Callable[[Choice], None] | None = None
        self.on_call: Callable[[str, Arguments], None] | None = None  # beside an on_choice
        self.on_obstacle: Callable[[str, str], None] | None = None
        # Autograd has such threads: they run the backward of a GPU, and recompute checkpoints.
        self.not_from_python = isinstance(threading.current_thread(), threading._DummyThread)


_state = _State()
_CHOICE = "fastformer: backend"  # the key under which torch hands it to the threads of autograd
_default = os.environ.get("FASTFORMER_BACKEND") or "auto"

_TUNED = "fastformer.kernels.tuned"
_FIRST = "fastformer: first"  # likewise
_DTENSOR = "torch.distributed.tensor"
_kernels: dict[str, ModuleType] = {}
_on_a_cpu: dict[str, Choice] = {}  # what most calls there choose
_explicit: dict[tuple[str, str], Choice] = {}  # by op and backend
_autocasts = torch._C._is_any_autocast_enabled
# The innermost `context_parallel` of the process, which knows the places of the rows of sequences.
_context: Any = None


def _check(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source} is {name!r}; expected one of {', '.join(BACKENDS)}")
    return name


class use_backend:
    """Choose the backend of this thread, at once; a `with` restores the previous one.

        use_backend("reference")
        with use_backend("triton"):
            ...

    The backend of a forward decides that of its backward. Raises ValueError for an unknown name.
    """

    def __init__(self, name: str) -> None:
        self._name = _check(name, "backend")
        own = _state.backend
        self._previous = own, _inherited() if _state.not_from_python else own
        _choose(name, name)

    def __enter__(self) -> None:
        _choose(self._name, self._name)  # again: a `with` may have ended before

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _choose(*self._previous)


def _choose(name: str | None, inherited: str | None) -> None:
    _state.backend = name
    if not torch.compiler.is_compiling():
        torch._C._stash_obj_in_tls(_CHOICE, inherited)


def current_backend() -> str:
    """Return the backend chosen for this thread: auto, triton or reference."""
    if _state.backend is not None:
        return _state.backend
    inherited = _inherited() if _state.not_from_python else None
    return inherited or _check(_default, "the environment variable FASTFORMER_BACKEND")


def prefers_kernels(x: torch.Tensor) -> bool:
    """Say whether this thread runs the ops on tensors like x on the kernels, if they can."""
    backend = current_backend()
    return backend == "triton" or (backend == "auto" and not x.is_cpu)


def _inherited() -> str | None:
    """Return, in a thread of autograd, the backend of the thread that called backward()."""
    if torch.compiler.is_compiling() or not torch._C._is_key_in_tls(_CHOICE):
        return None
    return torch._C._get_obj_in_tls(_CHOICE)


class Choice(NamedTuple):
    """What a call would run on, and why."""

    op: str
    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op}: {self.backend} ({self.reason})"


def register(record: Operation) -> None:
    """Make an op known to the dispatch, under the name of its public function."""
    op = record.contract.__name__
    OPERATIONS[op] = record
    _on_a_cpu[op] = Choice(op, "reference", "the tensors are on the CPU")
    for backend in ("triton", "reference"):
        _explicit[op, backend] = Choice(op, backend, "it was chosen")


def explain(op: str, *args: Any, **kwargs: Any) -> Choice:
    """The backend that `fastformer.<op>(*args, **kwargs)` would take, and why, without running it.

    Bad arguments raise as they do in the call. Returns an object with `.backend` and `.reason`.
    """
    if op not in OPERATIONS:
        raise ValueError(f"op is {op!r}; expected one of {', '.join(sorted(OPERATIONS))}")
    explained: list[Choice] = []
    _state.explained = explained
    try:
        OPERATIONS[op].contract(*args, **kwargs)
    finally:
        _state.explained = None
    return explained[0]


def _import(op: str) -> bool:
    """Import the kernels of an op, once. Dynamo calls this function and does not trace it."""
    if op not in _kernels:
        record = OPERATIONS[op]
        module = importlib.import_module("fastformer.kernels." + record.kernel)
        autograd.pair(op, record.alternatives)
        setattr(importlib.import_module(_TUNED), "source", measurements.choices)  # noqa: B010
        _kernels[op] = module  # last: another thread may read it from now on
    return True


def _import_all() -> bool:
    """Import the kernels of every op. Dynamo calls this function as well."""
    return all(map(_import, OPERATIONS))


# torch.compiler.assume_constant_result sets this too, but it imports dynamo, and triton with it.
_import.__dict__["_dynamo_marked_constant"] = True
_import_all.__dict__["_dynamo_marked_constant"] = True


def _load(op: str) -> ModuleType:
    """Return the module of an op's kernels; its first use imports it, and triton with it."""
    if torch.compiler.is_compiling():  # dynamo reads `_kernels` as it is at the first op of a graph
        _import_all()
    else:
        _import(op)
    return _kernels[op]


def _obstacle(op: str, arguments: Arguments, device: torch.device) -> str | None:
    """Return why the kernels of `op` cannot run this call, or None."""
    if device.type not in ("cpu", "cuda"):
        return f"there is no Triton kernel for a {device.type} device"
    if not _HAS_TRITON:
        return "triton is not installed"
    kernels = _load(op)
    if device.type == "cpu" and not kernels.INTERPRETED:
        return (
            "on a CPU the Triton kernels run in Triton's interpreter only: "
            "set TRITON_INTERPRET=1 in the environment before triton is imported"
        )
    return kernels.supports(**arguments)


def choose(op: str, arguments: Arguments, backend: str) -> Choice:
    """Choose where a checked call runs, given what `current_backend` says.

    Raises RuntimeError where the kernels cannot run an explicit `triton`.
    """
    if backend == "reference":
        return _explicit[op, backend]
    first = next(iter(arguments.values()))
    if backend == "auto" and first.is_cpu:
        return _on_a_cpu[op]
    reason = _obstacle(op, arguments, first.device)
    if reason is not None:
        if _state.on_obstacle is not None:
            _state.on_obstacle(op, reason)
        elif backend == "triton":
            raise RuntimeError(f"the triton backend cannot run {op}: {reason}")
        return Choice(op, "reference", reason)
    if backend == "triton":
        return _explicit[op, backend]
    if torch.compiler.is_compiling():
        return Choice(op, "triton", "the tensors are on a GPU")
    measured = _measured(op, arguments, first)
    if measured is not None:
        return Choice(op, measured, "it was measured to be the fastest")
    return Choice(op, "triton", "the tensors are on a GPU" + _caveat(first.device))


def _measured(op: str, arguments: Arguments, first: torch.Tensor) -> str | None:
    """Return torch's own op for this call, where it was measured to be faster than the kernel."""
    chosen, record = measurements.choices(first.device), OPERATIONS[op]
    if not chosen or not record.alternatives or not eager(first):
        return None
    signature = record.signature(arguments)
    if signature is None:
        return None
    key = op, first.device, cases.differentiated(arguments), signature
    if key not in _alternatives:
        case = cases.of(op, arguments)
        name = None if case is None else chosen.get((op, case.key))
        if len(_alternatives) >= MOST_ALTERNATIVES:
            _alternatives.clear()
        _alternatives[key] = name if name in record.alternatives else None
    return _alternatives[key]


def forced(op: str, options: Mapping[str, Any]) -> Any:
    """Return a context in which the kernels of an op take these options, by the name of the kernel.
    It gives a list of the questions that are asked in it: see kernels/tuned.py.
    """
    _import(op)
    return sys.modules[_TUNED].forced(options)


def label(option: Any) -> str:
    """Return the name of an option in a file."""
    return sys.modules[_TUNED].label(option)


MOST_ALTERNATIVES = 4096
_alternatives: dict[Any, str | None] = {}


def measure_again() -> None:
    """Read the measurements again, for the calls to come."""
    measurements.forget()
    _alternatives.clear()
    if _TUNED in sys.modules:
        sys.modules[_TUNED].plans.clear()


def _with_figures(choice: Choice, arguments: Arguments) -> Choice:
    """Add to the reason what was measured of calls like this one."""
    first = next(iter(arguments.values()))
    known = {} if torch.compiler.is_compiling() else measurements.measurements(first.device)
    if not known or choice.backend == "reference":
        return choice
    case = cases.of(choice.op, arguments)
    entry = None if case is None else known.get((choice.op, case.key))
    ran = choice.backend
    if entry is None or ran not in entry.us:
        return choice
    others = {name: us for name, us in entry.us.items() if name != ran}
    others = {name: us for name, us in others.items() if name != "reference"} or others
    if not others:
        return choice
    best = min(others, key=others.__getitem__)
    name = "the kernel" if best == "triton" else "the reference" if best == "reference" else best
    return choice._replace(reason=f"measured: {others[best] / entry.us[ran]:.2f} x {name}")


def _described(choice: Choice, arguments: Arguments) -> Choice:
    """Add to the reason what was measured, and which kernels a call takes where its shape decides
    that.
    """
    choice = _with_figures(choice, arguments)
    if choice.backend != "triton" or torch.compiler.is_compiling():
        return choice
    describe = getattr(_load(choice.op), "describe", None)
    kernels = None if describe is None else describe(**arguments)
    return choice if kernels is None else choice._replace(reason=f"{choice.reason}; {kernels}")


def _caveat(device: torch.device) -> str:
    name = _gpu_name(device)
    if name in VERIFIED_GPUS:
        return ""
    return f"; no run of the kernels on a {name} is on record yet"


@functools.cache
def _gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


class observe:
    """A context in which this thread reports how its ops run.

    on_choice: called with the `Choice` of each op that runs.
    on_call: called with (op, arguments) of each op that runs, the arguments by name as `run` has
        them.
    on_obstacle: called with (op, reason) where the kernels cannot run an op. The op then falls back
        to the reference under an explicit `triton` as well, where it raises otherwise.

    Of nested contexts the innermost that has a function calls it.
    """

    def __init__(
        self,
        on_choice: Callable[[Choice], None] | None = None,
        on_obstacle: Callable[[str, str], None] | None = None,
        on_call: Callable[[str, Arguments], None] | None = None,
    ) -> None:
        self._functions = on_choice, on_obstacle, on_call

    def __enter__(self) -> None:
        on_choice, on_obstacle, on_call = self._functions
        self._previous = _state.on_choice, _state.on_obstacle, _state.on_call
        if on_choice is not None:
            _state.on_choice = on_choice
        if on_obstacle is not None:
            _state.on_obstacle = on_obstacle
        if on_call is not None:
            _state.on_call = on_call
            _state.on_choice = _state.on_choice or _ignore

    def __exit__(self, *error: object) -> None:
        _state.on_choice, _state.on_obstacle, _state.on_call = self._previous


def _ignore(choice: Choice) -> None:
    pass


def report(choice: Choice) -> None:
    """Report what runs to the function of `observe`, as `run` does for each op."""
    if _state.on_choice is not None:
        _state.on_choice(choice)


def _report_call(choice: Choice, arguments: Arguments) -> None:
    report(_described(choice, arguments))
    if _state.on_call is not None:
        _state.on_call(choice.op, arguments)


def run(op: str, **arguments: Any) -> Any:
    """Run an op on the backend chosen for it, with torch.autocast off: `functional` applied it.

    The arguments have the names and the order of the reference; the first one is a tensor. Where
    one of them is a DTensor, or the batch is a part of a larger one, `sharding` runs the shard.
    """
    state = _state
    if state.first is not None or state.not_from_python or _context or _DTENSOR in sys.modules:
        first, part = _first(), _context is not None and _is_part(arguments)
        if first is not None or part or (_DTENSOR in sys.modules and _holds_dtensor(arguments)):
            return _run_shard(op, arguments, first, part)
    if _autocasts():
        kind = next(iter(arguments.values())).device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return run(op, **arguments)
    backend = current_backend()
    choice = choose(op, arguments, backend)
    if state.explained is not None:
        state.explained.append(_described(choice, arguments))
        return next(iter(arguments.values()))  # in place of the result, which `explain` drops
    if state.on_choice is not None:
        _report_call(choice, arguments)
    if choice.backend == "reference":
        if backend == "auto" and not torch.compiler.is_compiling():
            _log_once(choice)
        return OPERATIONS[op].reference(**arguments)
    return autograd.apply(op, arguments, "" if choice.backend == "triton" else choice.backend)


def _attention_arguments(inputs: Sequence[torch.Tensor], attention: Attention) -> dict[str, Any]:
    named = zip(("query", "key", "value"), inputs)
    return dict(named, attention=attention, return_lse=True)


def attention_part(
    inputs: Sequence[torch.Tensor], attention: Attention
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Compute attention to a part of the keys, without gradient: (output, peak, total, unit), with
    sum_j exp(score_j) = total exp(unit peak). Where a row sees nothing the total is 0 or the
    peak -inf.

    Beside a bias or ALiBi the peak is the maximum of the scores, exactly as the backend has it: the
    kernels have it to base 2, and in another unit it would be rounded.
    """
    op, arguments = "scaled_dot_product_attention", _attention_arguments(inputs, attention)
    with torch.autocast(inputs[0].device.type, enabled=False):
        backend = current_backend()
        choice = choose(op, arguments, backend)
        if _state.on_choice is not None:
            _report_call(choice, arguments)
        if choice.backend == "reference":
            if backend == "auto":
                _log_once(choice)
            output, peak, log_sum = OPERATIONS[op].reference(**arguments, apart=True)
            return output, peak, log_sum.exp(), 1.0
        alternative = "" if choice.backend == "triton" else choice.backend
        output, lse, statistics = autograd.outputs(op, arguments, alternative)
    if statistics.dim() == 1:  # no bias and no ALiBi: lse has the digits that the scores have
        return output, lse, torch.ones_like(lse), 1.0
    peak, offset = statistics.unbind(-1)
    return output, peak, torch.exp2(-offset).masked_fill(offset == -math.inf, 0.0), math.log(2)


def attention_gradients(
    grads: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    attention: Attention,
    outputs: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Compute the gradients of query, key, value, bias and sinks, of attention to a part of the
    keys, from the gradients of output and lse of all keys. Of a bias or sinks that are None, it is
    None.

    outputs: for all keys (output, lse, statistics [B, H, Sq, 2]): with peak, total and unit as in
        `attention_part`, the statistics are peak and -log(total) / unit, or -inf in its place for a
        row that sees nothing.
    """
    op, arguments = "scaled_dot_product_attention", _attention_arguments(inputs, attention)
    if choose(op, arguments, current_backend()).backend == "reference":
        by_reference = OPERATIONS[op].part_gradients
        assert by_reference is not None
        return by_reference(grads, inputs, attention, outputs)
    shared = attention.bias, attention.sinks
    needs = [True, True, True, *(x is not None for x in shared)]
    found = autograd.gradients(op, arguments, grads, outputs, needs)
    return [x if need else None for x, need in zip(found, needs)]


def _holds_dtensor(arguments: Arguments) -> bool:
    """Say whether one of the arguments is a DTensor, once that class is imported."""
    dtensor = sys.modules[_DTENSOR].DTensor
    if dtensor in map(type, arguments.values()):
        return True
    attention = arguments.get("attention")
    return attention is not None and dtensor in map(type, attention)


def _is_part(arguments: Arguments) -> bool:
    """Say whether an op needs to know which rows of sequences it has, and does not: attention, and
    dropout by rows.
    """
    if _state.explained is not None:
        return False
    attention = arguments.get("attention")
    if attention is not None:
        return attention.shard is None
    return arguments.get("dropout_p", 0) > 0 and arguments["shard"] is None


def _run_shard(op: str, arguments: Arguments, first: int | None, part: bool) -> Any:
    """Run an op on the shard that this process has of its arguments; part: of its sequences."""
    from fastformer.dispatch.sharding import (
        local,  # which imports torch.distributed.tensor
        placements,
    )

    with sequences_from(None):
        if part and "attention" in arguments:
            return _context.attention(**arguments, first=first)
        if part:
            return local.run_chunks(run, op, dict(arguments), first or 0, _context)
        return placements.run(run, op, dict(arguments), first or 0)


def _first() -> int | None:
    """Return which sequence of a larger batch is the first here: see `sequences_from`."""
    state = _state
    if not state.not_from_python or state.first is not None or torch.compiler.is_compiling():
        return state.first
    known = torch._C._is_key_in_tls(_FIRST)  # as `current_backend` finds the backend
    return torch._C._get_obj_in_tls(_FIRST) if known else None


class sequences_from:
    """A context in which the batches of this thread are part of a larger one: their first sequence
    is sequence `first` of the whole, whose dropout masks the ops draw.

    Each process of a data-parallel run has such a part: it trains as one process with the whole
    batch does, if all have drawn the same random numbers before.

    Args:
        first: an int, 0 or more; None for a batch that is no part of another.

    Raises TypeError and ValueError for another `first`.
    """

    def __init__(self, first: int | None) -> None:
        if first is not None:
            if not isinstance(first, int) or isinstance(first, bool):
                raise TypeError(f"first is a {type(first).__name__}; expected an int or None")
            if not 0 <= first < 2**31:
                raise ValueError(f"first is {first}; expected 0 or more, less than 2^31")
        self._first = first

    def __enter__(self) -> None:
        self._previous = _first()
        _begin_at(self._first)

    def __exit__(self, *error: object) -> None:
        _begin_at(self._previous)


def _begin_at(first: int | None) -> None:
    _state.first = first
    if not torch.compiler.is_compiling():
        torch._C._stash_obj_in_tls(_FIRST, first)


def shard_sequences(context: Any) -> Any:
    """Let a `context_parallel` place the rows of sequences; None: they are not sharded. Return what
    placed them before.
    """
    global _context
    before, _context = _context, context
    return before


def sequences_are_sharded() -> bool:
    """Return whether each process has a shard of the sequences: it is within `context_parallel`."""
    return _context is not None


def full_length(length: int) -> int:
    """Return how many rows the sequences have of which each process has `length`."""
    return length if _context is None else _context.size * length


def rows_here(name: str, table: torch.Tensor, length: int) -> torch.Tensor:
    """Return the rows of a table of positions for the `length` tokens of this process, or the table
    itself where sequences are not sharded.
    """
    return table if _context is None else _context.rows_of(name, table, length)


def is_dtensor(x: torch.Tensor | None) -> bool:
    """Say whether x is a DTensor."""
    return _DTENSOR in sys.modules and type(x) is sys.modules[_DTENSOR].DTensor


def is_sharded(x: torch.Tensor) -> bool:
    """Say whether x is a DTensor, or a part of a larger batch or of its sequences, as
    `sequences_from` and `context_parallel` say.
    """
    return _first() is not None or _context is not None or is_dtensor(x)


@functools.lru_cache(256)  # a reason can name a shape
def _log_once(choice: Choice) -> None:
    _log.info("%s", choice)
