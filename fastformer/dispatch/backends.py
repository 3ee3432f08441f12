"""The dispatch: choose the backend that runs an op. No other module chooses a backend.

    auto        the Triton kernels on a GPU if they support the call, else the reference; torch's
                own op where it computes the same and was measured to be faster: by `fastformer
                tune`, or in a committed run on a GPU of this architecture
    triton      the Triton kernels, or an error if they cannot run; on a CPU, Triton's interpreter
    reference   eager PyTorch

The environment variable FASTFORMER_BACKEND sets the default, and `use_backend` sets the backend of
a thread.
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
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from fastformer.batch_invariance import on
from fastformer.checks import require_size, seed_tensor
from fastformer.description import Attention
from fastformer.dispatch import autograd, measurements
from fastformer.dispatch.operation import OPERATIONS, Arguments, Operation
from fastformer.eager import eager, formula

BACKENDS = ("auto", "triton", "reference")
# GPU models for which benchmarks/results has a run of the full test suite.
VERIFIED_GPUS: tuple[str, ...] = ()

_HAS_TRITON = importlib.util.find_spec("triton") is not None  # does not import it
_log = logging.getLogger("fastformer")


class _State(threading.local):
    def __init__(self) -> None:  # torch.compile guards on instance attributes
        self.backend: str | None = None
        self.first: int | None = None  # the argument of `sequences_from`
        # A list within `explain`: ops do not run.
        self.explained: list[tuple[Choice, Arguments]] | None = None
        self.on_choice: Callable[[Choice], None] | None = None
        self.on_call: Callable[[str, Arguments], None] | None = None  # only with an on_choice
        self.on_unsupported: Callable[[str, str], None] | None = None
        # True in the threads of autograd, which run the backward on a GPU and recompute
        # checkpoints.
        self.not_from_python = isinstance(threading.current_thread(), threading._DummyThread)


_state = _State()
_CHOICE = "fastformer: backend"  # a key of the state that torch copies to autograd's threads
_default = os.environ.get("FASTFORMER_BACKEND") or "auto"

_TUNED = "fastformer.kernels.tuned"
_FIRST = "fastformer: first"  # a key like _CHOICE
_DTENSOR = "torch.distributed.tensor"
_DISTRIBUTED = torch.distributed.is_available()
_kernels: dict[str, ModuleType] = {}
_on_a_cpu: dict[str, Choice] = {}  # by op: the choice of "auto" for tensors on a CPU
_explicit: dict[tuple[str, str], Choice] = {}  # by op and backend
_autocasts = torch._C._is_any_autocast_enabled
_transforms = torch._C._functorch.peek_interpreter_stack  # of torch.func; None without any
_ON_A_CPU = ("auto", "reference")  # the backends that run the reference on a CPU
# The innermost `context_parallel` of the process. It knows the global positions of local rows.
_context: Any = None


def _check(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source} is {name!r}; expected one of {', '.join(BACKENDS)}")
    return name


class use_backend:
    """Set the backend of this thread at once. As a context manager, restore the old one on exit.

        use_backend("reference")
        with use_backend("triton"):
            ...

    The backward runs on the backend of its forward. But torch.utils.checkpoint computes a forward
    again in the backward: call backward() within the context, too, or dropout without a seed may
    draw another mask than before. Raises ValueError for an unknown name.
    """

    def __init__(self, name: str) -> None:
        self._name = _check(name, "backend")
        own = _state.backend
        self._previous = own, _inherited() if _state.not_from_python else own
        _set_backend(name, name)

    def __enter__(self) -> None:
        _set_backend(self._name, self._name)  # again, because an earlier `with` may have ended

    def __exit__(self, *error: object) -> None:
        _set_backend(*self._previous)


def _set_backend(name: str | None, inherited: str | None) -> None:
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
    """Return whether this thread runs ops on tensors like x by the kernels if they support it."""
    backend = current_backend()
    return backend == "triton" or (backend == "auto" and not x.is_cpu)


def _inherited() -> str | None:
    """Return, in a thread of autograd, the backend of the thread that called backward()."""
    if torch.compiler.is_compiling() or not torch._C._is_key_in_tls(_CHOICE):
        return None
    return torch._C._get_obj_in_tls(_CHOICE)


def runs_directly() -> bool:
    """Return whether an op on plain tensors of the CPU runs on the reference, and nothing else is
    to be done: nothing observes, explains, logs, shards, casts, transforms or traces the call.

    A contract may then skip the dispatch. This looks at the state of the thread once.
    """
    if torch.compiler.is_compiling() or _context is not None or _autocasts() or _transforms():
        return False
    if on():
        return False
    state = _state.__dict__
    return (
        (state["backend"] or _default) in _ON_A_CPU
        and state["first"] is state["explained"] is state["on_choice"] is None
        and not state["not_from_python"]
        and not formula.always
        and not _log.isEnabledFor(logging.INFO)
    )


def draws_by_torch(device: torch.device) -> bool:
    """Return whether dropout without a seed is torch's own here, which costs less on a CPU: with
    the backend "auto", where no other process and no shard has to draw the same mask.
    """
    return (
        device.type == "cpu"
        and current_backend() == "auto"
        and _context is None
        and _first() is None
        and not (_DISTRIBUTED and torch.distributed.is_initialized())
    )


def seed_for(
    dropout_seed: int | torch.Tensor | None, p: float, device: torch.device, shard: object = None
) -> torch.Tensor | None:
    """Return the seed of a call, as `seed_tensor` does; None also where torch draws the mask."""
    if p and dropout_seed is shard is None and draws_by_torch(device):
        return None
    return seed_tensor(dropout_seed, p, device)


class Choice(NamedTuple):
    """The backend of a call, and the reason for it."""

    op: str
    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op}: {self.backend} ({self.reason})"


def register(*records: Operation) -> None:
    """Make ops known to the dispatch, each under the name of its public function."""
    for record in records:
        op = record.contract.__name__
        OPERATIONS[op] = record
        _on_a_cpu[op] = Choice(op, "reference", "the tensors are on the CPU")
        for backend in ("triton", "reference"):
            _explicit[op, backend] = Choice(op, backend, "it was chosen")


def explain(op: str, *args: Any, **kwargs: Any) -> Choice:
    """Return the backend of `fastformer.<op>(*args, **kwargs)` and the reason, without running it.

    Returns an object with `.backend` and `.reason`. Bad arguments raise the errors of the op.
    """
    if op not in OPERATIONS:
        raise ValueError(f"op is {op!r}; expected one of {', '.join(sorted(OPERATIONS))}")
    return _described(*planned(op, *args, **kwargs))


def checked(op: str, **arguments: Any) -> Arguments:
    """Return the arguments of `run` that a public function makes of its own, without running it."""
    with use_backend("reference"):
        return planned(op, **arguments)[1]


def planned(op: str, *args: Any, **kwargs: Any) -> tuple[Choice, Arguments]:
    """Return the backend of a call and the arguments of `run`, without running it."""
    explained: list[tuple[Choice, Arguments]] = []
    _state.explained = explained
    try:
        OPERATIONS[op].contract(*args, **kwargs)
    finally:
        _state.explained = None
    return explained[0]


def _import(op: str) -> bool:
    """Import the kernels of an op, once. Dynamo calls this function instead of tracing it."""
    if op not in _kernels:
        record = OPERATIONS[op]
        module = importlib.import_module("fastformer.kernels." + record.kernel)
        autograd.pair(op, record)
        setattr(tuned(), "source", measurements.choices)  # noqa: B010
        _kernels[op] = module  # last: another thread may read it from now on
    return True


def _import_all() -> bool:
    """Import the kernels of every op. Dynamo calls this function instead of tracing it."""
    return all(map(_import, OPERATIONS))


# torch.compiler.assume_constant_result sets the same, but imports dynamo, which imports triton.
_import.__dict__["_dynamo_marked_constant"] = True
_import_all.__dict__["_dynamo_marked_constant"] = True


def _load(op: str) -> ModuleType:
    """Return the module of an op's kernels. The first call imports it, which imports triton."""
    if torch.compiler.is_compiling():  # dynamo reads `_kernels` once, at the first op of a graph
        _import_all()
    elif op not in _kernels:
        _import(op)
    return _kernels[op]


def _unsupported_reason(op: str, arguments: Arguments, device: torch.device) -> str | None:
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


def choose_backend(op: str, arguments: Arguments, backend: str) -> Choice:
    """Choose how a checked call runs. Raises RuntimeError if the backend triton cannot run it."""
    if backend == "reference":
        return _explicit[op, backend]
    first = next(iter(arguments.values()))
    if backend == "auto" and first.is_cpu:
        return _on_a_cpu[op]
    reason = _unsupported_reason(op, arguments, first.device)
    if reason is not None:
        if _state.on_unsupported is not None:
            _state.on_unsupported(op, reason)
        elif backend == "triton":
            raise RuntimeError(f"the triton backend cannot run {op}: {reason}")
        return Choice(op, "reference", reason)
    if backend == "triton":
        return _explicit[op, backend]
    if torch.compiler.is_compiling():
        return Choice(op, "triton", "the tensors are on a GPU")
    measured = None if on() else _measured(op, arguments, first)
    if measured is not None:
        return Choice(op, measured, "it was measured to be the fastest")
    return Choice(op, "triton", "the tensors are on a GPU" + _caveat(first.device))


def _measured(op: str, arguments: Arguments, first: torch.Tensor) -> str | None:
    """Return the alternative that was measured to be the fastest for this call, or None: on this
    machine, or else in a committed run.
    """
    chosen, record = measurements.choices(first.device), OPERATIONS[op]
    if not (chosen or record.faster) or not record.alternatives or not eager(first):
        return None
    signature = record.signature(arguments)
    if signature is None:
        return None
    key = op, first.device, measurements.differentiated(arguments), signature
    if key not in _alternatives:
        name = chosen.get((op, measurements.class_of(op, arguments) or "")) if chosen else None
        if name is None and record.faster is not None:
            name = record.faster(arguments)
        if len(_alternatives) >= MOST_ALTERNATIVES:
            _alternatives.clear()
        _alternatives[key] = name if name in record.alternatives else None
    return _alternatives[key]


def tuned() -> ModuleType:
    """Return the module kernels/tuned.py. The first call imports triton."""
    return importlib.import_module(_TUNED)


MOST_ALTERNATIVES = 4096
_alternatives: dict[Any, str | None] = {}


def measure_again() -> None:
    """Forget the measurements: the next call reads them again."""
    measurements.forget()
    _alternatives.clear()
    if _TUNED in sys.modules:
        sys.modules[_TUNED].plans.clear()


def _with_figures(choice: Choice, arguments: Arguments) -> Choice:
    """Replace the reason by the measured speed-up of calls like this one, if there is one."""
    first = next(iter(arguments.values()))
    known = {} if torch.compiler.is_compiling() else measurements.measurements(first.device)
    if not known or choice.backend == "reference":
        return choice
    entry = known.get((choice.op, measurements.class_of(choice.op, arguments) or ""))
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
    """Add to the reason what was measured, and what the arguments decide: dropout and kernels."""
    choice = _with_figures(choice, arguments)
    given = arguments["attention"]._asdict() if "attention" in arguments else arguments
    if given.get("dropout_p"):
        source = "torch's generator" if given["dropout_seed"] is None else "a seed"
        choice = choice._replace(reason=f"{choice.reason}; the dropout mask is from {source}")
    if choice.backend != "triton" or torch.compiler.is_compiling() or _transforms():
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
    on_call: called with (op, arguments) for each op that runs; the arguments are those of `run`, by
        name.
    on_unsupported: called with (op, reason) if the kernels cannot run an op. The op then falls back
        to the reference even for the backend "triton", which otherwise raises.

    In nested contexts, the innermost function of each kind is called.
    """

    def __init__(
        self,
        on_choice: Callable[[Choice], None] | None = None,
        on_unsupported: Callable[[str, str], None] | None = None,
        on_call: Callable[[str, Arguments], None] | None = None,
    ) -> None:
        self._functions = on_choice, on_unsupported, on_call

    def __enter__(self) -> None:
        on_choice, on_unsupported, on_call = self._functions
        before = self._previous = _state.on_choice, _state.on_unsupported, _state.on_call
        _state.on_choice = on_choice or before[0] or (_ignore if on_call else None)
        _state.on_unsupported = on_unsupported or before[1]
        _state.on_call = on_call or before[2]

    def __exit__(self, *error: object) -> None:
        _state.on_choice, _state.on_unsupported, _state.on_call = self._previous


def _ignore(choice: Choice) -> None:
    pass


def report(choice: Choice) -> None:
    """Pass a choice to the `on_choice` of `observe`, as `run` does for each op."""
    if _state.on_choice is not None:
        _state.on_choice(choice)


def _report_call(choice: Choice, arguments: Arguments) -> None:
    report(_described(choice, arguments))
    if _state.on_call is not None:
        _state.on_call(choice.op, arguments)


def run(op: str, **arguments: Any) -> Any:
    """Run an op on the backend chosen for it. torch.autocast is off: `functional` has applied it.

    The arguments have the names and the order of the reference; the first one is a tensor. If one
    of them is a DTensor, or the batch or its sequences are a shard, `sharding` runs the op.
    """
    state = _state
    if state.first is not None or state.not_from_python or _context or _DTENSOR in sys.modules:
        first = _first()
        split = _context is not None and _depends_on_positions(arguments)
        if first is not None or split or (_DTENSOR in sys.modules and _holds_dtensor(arguments)):
            return _run_shard(op, arguments, first, split)
    if _autocasts():
        kind = next(iter(arguments.values())).device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return run(op, **arguments)
    backend = current_backend()
    choice = choose_backend(op, arguments, backend)
    if state.explained is not None:
        state.explained.append((choice, arguments))
        return next(iter(arguments.values()))  # any value: `explain` drops the result
    if state.on_choice is not None:
        _report_call(choice, arguments)
    if choice.backend == "reference":
        if backend == "auto" and not torch.compiler.is_compiling():
            _log_once(choice)
        if on():
            why = f"runs on the reference: {choice.reason}"
            raise RuntimeError(f"batch_invariant() takes kernels alone, and {op} {why}")
        return OPERATIONS[op].reference(**arguments)
    return autograd.apply(op, arguments, "" if choice.backend == "triton" else choice.backend)


def may_join(x: torch.Tensor, *others: Any) -> bool:
    """Return whether `run_joint` may compute a call of parts of x and of others: with a gradient,
    by kernels, and not sharded.
    """
    differentiated = torch.is_grad_enabled() and x.requires_grad
    if not differentiated or not prefers_kernels(x) or is_sharded(x):
        return False
    return _DTENSOR not in sys.modules or not any(map(is_dtensor, others))


def run_joint(op: str, plans: Sequence[tuple[Choice, Arguments]], arguments: Arguments) -> Any:
    """Run `joint_<op>`, which computes the calls of `plans`. All of them have chosen the kernels,
    and they are reported as `run` reports them.
    """
    if _autocasts():
        with torch.autocast(next(iter(arguments.values())).device.type, enabled=False):
            return run_joint(op, plans, arguments)
    if _state.on_choice is not None:
        for choice, given in plans:
            _report_call(choice, given)
    return autograd.apply("joint_" + op, arguments)


def _attention_arguments(inputs: Sequence[torch.Tensor], attention: Attention) -> dict[str, Any]:
    named = zip(("query", "key", "value"), inputs)
    return dict(named, attention=attention, return_lse=True)


def attention_block(
    inputs: Sequence[torch.Tensor], attention: Attention
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Compute attention to a block of the keys, without gradient.

    Returns (output, peak, total, unit), with sum_j exp(score_j) = total exp(unit peak). For a row
    that sees no key, the total is 0 or the peak is -inf.

    With a bias or ALiBi, the peak is the maximum of the scores in the unit of the backend, and is
    not converted, because that would round it: the kernels have scores to base 2, so that the unit
    is log(2).
    """
    op, arguments = "scaled_dot_product_attention", _attention_arguments(inputs, attention)
    with torch.autocast(inputs[0].device.type, enabled=False):
        backend = current_backend()
        choice = choose_backend(op, arguments, backend)
        if _state.on_choice is not None:
            _report_call(choice, arguments)
        if choice.backend == "reference":
            if backend == "auto":
                _log_once(choice)
            by_reference = OPERATIONS[op].block
            assert by_reference is not None
            output, peak, log_sum = by_reference(*inputs, attention)
            return output, peak, log_sum.exp(), 1.0
        alternative = "" if choice.backend == "triton" else choice.backend
        output, lse, statistics = autograd.outputs(op, arguments, alternative)
    if statistics.dim() == 1:  # no bias and no ALiBi: lse is as precise as the scores
        return output, lse, torch.ones_like(lse), 1.0
    peak, offset = statistics.unbind(-1)
    return output, peak, torch.exp2(-offset).masked_fill(offset == -math.inf, 0.0), math.log(2)


def attention_gradients(
    grads: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    attention: Attention,
    outputs: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Compute the gradients of attention to a block of the keys, from the gradients of the output
    and the lse of attention to all keys.

    outputs: (output, lse, statistics [B, H, Sq, 2]) of attention to all keys. The
        statistics are the peak and -log(total) / unit, with the names of `attention_block`; the
        second is -inf for a row that sees no key.

    Returns the gradients of query, key, value, bias and sinks, with None for a bias or sinks that
    are None.
    """
    op, arguments = "scaled_dot_product_attention", _attention_arguments(inputs, attention)
    if choose_backend(op, arguments, current_backend()).backend == "reference":
        by_reference = OPERATIONS[op].block_gradients
        assert by_reference is not None
        return by_reference(grads, inputs, attention, outputs)
    shared = attention.bias, attention.sinks
    needs = [True, True, True, *(x is not None for x in shared)]
    found = autograd.gradients(op, arguments, grads, outputs, needs)
    return [x if need else None for x, need in zip(found, needs)]


def _holds_dtensor(arguments: Arguments) -> bool:
    """Return whether one of the arguments is a DTensor. The class must have been imported."""
    dtensor = sys.modules[_DTENSOR].DTensor
    if dtensor in map(type, arguments.values()):
        return True
    attention = arguments.get("attention")
    return attention is not None and dtensor in map(type, attention)


def _depends_on_positions(arguments: Arguments) -> bool:
    """Return whether an op depends on the global positions of its rows, and has no `shard` that
    gives them: attention, and ops with dropout on rows. False within `explain`.
    """
    if _state.explained is not None:
        return False
    attention = arguments.get("attention")
    if attention is not None:
        return attention.shard is None
    return arguments.get("dropout_p", 0) > 0 and arguments["shard"] is None


def _run_shard(op: str, arguments: Arguments, first: int | None, split: bool) -> Any:
    """Run an op on the local shard of its arguments. `split`: the sequences are sharded."""
    from fastformer.dispatch.sharding import local, placements  # imports torch.distributed.tensor

    with sequences_from(None):
        if split and "attention" in arguments:
            return _context.attention(**arguments, first=first)
        if split:
            return local.run_chunks(run, op, dict(arguments), first or 0, _context)
        return placements.run_sharded(run, op, dict(arguments), first or 0)


def _first() -> int | None:
    """Return the `first` of the innermost `sequences_from`, or None."""
    state = _state
    if not state.not_from_python or state.first is not None or torch.compiler.is_compiling():
        return state.first
    known = torch._C._is_key_in_tls(_FIRST)  # set by the thread that called backward()
    return torch._C._get_obj_in_tls(_FIRST) if known else None


class sequences_from:
    """A context in which the batches of this thread are shards of a larger batch.

    The first sequence of a batch is sequence `first` of the larger batch, and the ops use the
    dropout mask of the larger batch. In a data-parallel run, each process has such a shard: the
    processes train as one process with the full batch would, if their generators have the same
    state.

    Args:
        first: an int, 0 or more, or None for a batch that is not a shard of a larger one.

    Raises TypeError and ValueError for another `first`.
    """

    def __init__(self, first: int | None) -> None:
        if first is not None:
            [first] = require_size(0, first=first)
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
    """Set the `context_parallel` that shards sequences, or None, and return the previous one."""
    global _context
    before, _context = _context, context
    return before


def sequences_are_sharded() -> bool:
    """Return whether sequences are sharded: the process is within `context_parallel`."""
    return _context is not None


def full_length(length: int) -> int:
    """Return the length of the full sequences, of which each process has `length` rows."""
    return length if _context is None else _context.size * length


def rows_here(name: str, table: torch.Tensor, length: int) -> torch.Tensor:
    """Return the rows of a table for the `length` local tokens; the table itself without shards."""
    return table if _context is None else _context.rows_of(name, table, length)


def is_dtensor(x: torch.Tensor | None) -> bool:
    """Return whether x is a DTensor."""
    return _DTENSOR in sys.modules and type(x) is sys.modules[_DTENSOR].DTensor


def replicated_like(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return x, which is the same on all devices, as a replicated DTensor if `other` is one."""
    if not is_dtensor(other):
        return x
    from fastformer.dispatch.sharding.call import as_replicated

    return as_replicated(x, other.device_mesh)  # type: ignore[attr-defined]


def is_sharded(x: torch.Tensor) -> bool:
    """Return whether x is a DTensor, or within `sequences_from` or `context_parallel`."""
    return _first() is not None or _context is not None or is_dtensor(x)


@functools.lru_cache(256)  # a reason can name a shape
def _log_once(choice: Choice) -> None:
    _log.info("%s", choice)
