"""The dispatch: choose the backend that runs an op. No other module chooses a backend.

    auto        the Triton kernels on a GPU if they support the call, else the reference; torch's
                own op where `fastformer tune` has measured that it is faster
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
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from fastformer.batch_invariance import on
from fastformer.checks import seed_tensor
from fastformer.description import Attention
from fastformer.dispatch import autograd, measurements
from fastformer.dispatch.operation import (
    OPERATIONS,
    Arguments,
    Operation,
    call_name,
    differentiated,
    flat,
)
from fastformer.dispatch.state import BACKENDS as BACKENDS
from fastformer.dispatch.state import current_backend, state, use_backend
from fastformer.eager import eager, transformed
from fastformer.plans import forget

# GPU models for which benchmarks/results has a run of the full test suite.
VERIFIED_GPUS: tuple[str, ...] = ()

_HAS_TRITON = importlib.util.find_spec("triton") is not None  # does not import it
_log = logging.getLogger("fastformer")


_TUNED = "fastformer.kernels.tuned"
_DTENSOR = "torch.distributed.tensor"
_kernels: dict[str, ModuleType] = {}
_on_a_cpu: dict[str, Choice] = {}  # by op: the choice of "auto" for tensors on a CPU
_explicit: dict[tuple[str, str], Choice] = {}  # by op and backend
_autocasts = torch._C._is_any_autocast_enabled


def prefers_kernels(x: torch.Tensor) -> bool:
    """Return whether this thread runs ops on tensors like x by the kernels if they support it."""
    backend = current_backend()
    return backend == "triton" or (backend == "auto" and not x.is_cpu)


def draws_by_torch(device: torch.device) -> bool:
    """Return whether dropout without a seed is torch's own here, which costs less: on a CPU, with
    the backend "auto".
    """
    return device.type == "cpu" and current_backend() == "auto"


def seed_for(
    dropout_seed: int | torch.Tensor | None, p: float, device: torch.device, blocks: object = None
) -> torch.Tensor | None:
    """Return the seed of a call, as `seed_tensor` does; None also where torch draws the mask, which
    it does not beside a block mask, `blocks`.
    """
    if p and dropout_seed is blocks is None and draws_by_torch(device):
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
        _explicit[op, "torch"] = Choice(op, "torch", "it was measured to be the fastest")


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
    state.set(explained=explained)
    try:
        OPERATIONS[op].contract(*args, **kwargs)
    finally:
        state.set(explained=None)
    return explained[0]


def _import(op: str) -> bool:
    """Import the kernels of an op, once. Dynamo calls this function instead of tracing it."""
    if op not in _kernels:
        record = OPERATIONS[op]
        module = importlib.import_module("fastformer.kernels." + record.kernel)
        registered = importlib.import_module("fastformer.kernels.registration")
        autograd.pair(op, record, registered.launchers)
        setattr(tuned(), "source", _choices)  # noqa: B010
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


def _unsupported_device(op: str, device: torch.device) -> str | None:
    """Return why no kernel runs on this device, or None."""
    if device.type not in ("cpu", "cuda"):
        return f"there is no Triton kernel for a {device.type} device"
    if device.type == "cuda" and torch.version.hip is not None:
        return "AMD GPUs (HIP) run the PyTorch reference"
    if not _HAS_TRITON:
        return "triton is not installed"
    if device.type == "cpu" and not _load(op).INTERPRETED:
        return (
            "on a CPU the Triton kernels run in Triton's interpreter only: "
            "set TRITON_INTERPRET=1 in the environment before triton is imported"
        )
    return None


def _unsupported_call(op: str, arguments: Arguments) -> str | None:
    """Return why the kernels of `op` do not take this call, or None."""
    if torch.compiler.is_compiling() and transformed():
        return (
            "torch.compile traces no kernel within vmap, grad or another transform of torch.func; "
            'it does under use_backend("reference")'
        )
    return _load(op).supports(**arguments)


def choose_backend(op: str, arguments: Arguments, backend: str) -> Choice:
    """Choose how a checked call runs. Raises RuntimeError if the backend triton cannot run it."""
    if backend == "reference":
        return _explicit[op, backend]
    first = next(iter(arguments.values()))
    if backend == "auto" and first.is_cpu:
        return _on_a_cpu[op]
    nowhere = _unsupported_device(op, first.device)
    reason = nowhere or _unsupported_call(op, arguments)
    if reason is not None:
        if backend == "triton" and (nowhere or state.on_unsupported is None):
            raise RuntimeError(f"the triton backend cannot run {op}: {reason}")
        if state.on_unsupported is not None:
            state.on_unsupported(op, reason)
        return Choice(op, "reference", reason)
    if backend == "triton":
        return _explicit[op, backend]
    if torch.compiler.is_compiling():
        return Choice(op, "triton", "the tensors are on a GPU")
    left = _left_to_torch(first.device)
    if (
        left  # the name of a call takes a while
        and not on()
        and computed_by_torch(op, arguments)
        and call_name(op, arguments) in left
    ):
        return _explicit[op, "torch"]
    return Choice(op, "triton", "the tensors are on a GPU" + _caveat(first.device))


def computed_by_torch(op: str, arguments: Arguments) -> bool:
    """Return whether torch's own op computes this call: without gradients, because torch's may
    change from run to run.
    """
    if not OPERATIONS[op].suits_torch(arguments) or differentiated(arguments):
        return False
    return eager(next(iter(arguments.values()))) and forward_ad._current_level < 0


def _choices(device: torch.device) -> dict[str, str]:
    """Return what was measured to be the fastest on this machine, for calls and for kernels."""
    known = measurements.measurements(device).items()
    return {name: entry.choice for name, entry in known if entry.choice is not None}


@functools.cache
def _left_to_torch(device: torch.device) -> frozenset[str]:
    """Return the calls for which that is torch's op."""
    return frozenset(name for name, choice in _choices(device).items() if choice == "torch")


def tuned() -> ModuleType:
    """Return the module kernels/tuned.py. The first call imports triton."""
    return importlib.import_module(_TUNED)


def compiling() -> ModuleType | None:
    """Return what compiles kernels that are not launched; None without triton."""
    return importlib.import_module("fastformer.kernels.compiling") if _HAS_TRITON else None


def measure_again() -> None:
    """Forget the measurements: the next call reads them again."""
    measurements.measurements.cache_clear()
    _left_to_torch.cache_clear()
    if _TUNED in sys.modules:
        forget()


def _with_figures(choice: Choice, arguments: Arguments) -> Choice:
    """Replace the reason by the measured speed-up of this call, if there is one."""
    if choice.backend == "reference" or torch.compiler.is_compiling():
        return choice
    known = measurements.measurements(next(iter(arguments.values())).device)
    entry = known.get(call_name(choice.op, arguments)) if known else None
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
    if choice.backend != "triton" or torch.compiler.is_compiling() or transformed():
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
        to the reference even for the backend "triton", which otherwise raises, and which raises
        where no kernel runs at all.

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
        before = self._previous = state.on_choice, state.on_unsupported, state.on_call
        chosen = on_choice or before[0] or (_ignore if on_call else None)
        _observe(chosen, on_unsupported or before[1], on_call or before[2])

    def __exit__(self, *error: object) -> None:
        _observe(*self._previous)


def _observe(on_choice: Any, on_unsupported: Any, on_call: Any) -> None:
    state.set(on_choice=on_choice, on_unsupported=on_unsupported, on_call=on_call)


def _ignore(choice: Choice) -> None:
    pass


def report(choice: Choice) -> None:
    """Pass a choice to the `on_choice` of `observe`, as `run` does for each op."""
    if state.on_choice is not None:
        state.on_choice(choice)


def _report_call(choice: Choice, arguments: Arguments) -> None:
    report(_described(choice, arguments))
    if state.on_call is not None:
        state.on_call(choice.op, arguments)


def run(op: str, finish: Callable[[Any], Any] | None = None, **arguments: Any) -> Any:
    """Run an op on the backend chosen for it. torch.autocast is off: `functional` has applied it.

    The arguments have the names and the order of the reference; the first one is a tensor. If one
    of them is a DTensor, `sharding` runs the op.

    finish: a function of the outputs of the op that returns what the caller gets; None for the
        outputs. Later calls with the plan of this call make it, too: it may keep no tensor.
    """
    if _DTENSOR in sys.modules and _holds_dtensor(arguments):
        from fastformer.dispatch.sharding import run_on_rows  # imports torch.distributed.tensor

        outputs = run_on_rows(run, op, arguments)
        return outputs if finish is None else finish(outputs)
    if _autocasts():
        kind = next(iter(arguments.values())).device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return run(op, finish, **arguments)
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
    if choice.backend == "triton":
        return _run_kernels(op, arguments, finish)
    first = _take_first_call()
    known = _on_a_cpu[op], _explicit[op, "reference"], _explicit[op, "torch"]
    # What the kernels do not support is reported, call by call.
    if first is not None and choice in known:
        named = [(name, x) for name, x in flat(arguments).items() if isinstance(x, torch.Tensor)]
        if first.run(named, lambda: (_direct(choice, arguments), None, None), finish):
            return first.result
    outputs = _function(choice)(**arguments)
    return outputs if finish is None else finish(outputs)


def _run_kernels(op: str, arguments: Arguments, finish: Callable[[Any], Any] | None = None) -> Any:
    first = _take_first_call()
    if first is not None:
        named = autograd.named_tensors(op, arguments)
        if first.run(named, lambda: autograd.plan(op, arguments), finish):
            return first.result
    outputs = autograd.apply(op, arguments)
    return outputs if finish is None else finish(outputs)


def _take_first_call() -> Any:
    """Return the first call with a key that is made; what the op calls is none."""
    first = state.call
    if first is not None:
        state.set(call=None)
    return first


def _function(choice: Choice) -> Callable[..., Any]:
    """Return the reference, or torch's own op."""
    operation = OPERATIONS[choice.op]
    if choice.backend == "reference":
        return operation.reference
    assert operation.by_torch is not None
    return operation.by_torch


def _direct(choice: Choice, arguments: Arguments) -> Callable[..., Any]:
    """Return a call of the reference, or of torch's own op, as a function of its tensors."""
    direct = OPERATIONS[choice.op].direct
    if (
        direct is not None
        and choice.backend == "reference"
        and next(iter(arguments.values())).is_cpu
    ):
        function = direct(**arguments)
        if function is not None:
            return function
    return _by_names(_function(choice), arguments)


def _by_names(function: Callable[..., Any], arguments: Arguments) -> Callable[..., Any]:
    """Return a function of the tensors among `flat(arguments)`."""
    fields = flat(arguments)
    names = [name for name, x in fields.items() if isinstance(x, torch.Tensor)]
    constants = {name: x for name, x in fields.items() if name not in names}
    attention = Attention._fields if "attention" in arguments else ()

    def run(*tensors: torch.Tensor) -> Any:
        given = constants | dict(zip(names, tensors))
        if attention:
            given["attention"] = Attention._make([given.pop(name) for name in attention])
        return function(**given)

    return run


def may_join(x: torch.Tensor, *others: Any) -> bool:
    """Return whether `run_joint` may compute a call of parts of x and of others: with a gradient,
    by kernels, and not of DTensors or within a transform of torch.func.
    """
    if not (torch.is_grad_enabled() and x.requires_grad and prefers_kernels(x)):
        return False
    return not transformed() and not any(map(is_dtensor, (x, *others)))


def run_joint(op: str, plans: Sequence[tuple[Choice, Arguments]], arguments: Arguments) -> Any:
    """Run `joint_<op>`, which computes the calls of `plans`. All of them have chosen the kernels,
    and they are reported as `run` reports them.
    """
    if _autocasts():
        with torch.autocast(next(iter(arguments.values())).device.type, enabled=False):
            return run_joint(op, plans, arguments)
    if state.on_choice is not None:
        for choice, given in plans:
            _report_call(choice, given)
    return _run_kernels("joint_" + op, arguments)


def _holds_dtensor(arguments: Arguments) -> bool:
    """Return whether one of the arguments is a DTensor. The class must have been imported."""
    dtensor = sys.modules[_DTENSOR].DTensor
    if dtensor in map(type, arguments.values()):
        return True
    attention = arguments.get("attention")
    return attention is not None and dtensor in map(type, attention)


def is_dtensor(x: torch.Tensor | None) -> bool:
    """Return whether x is a DTensor."""
    return _DTENSOR in sys.modules and type(x) is sys.modules[_DTENSOR].DTensor


@functools.lru_cache(256)  # a reason can name a shape
def _log_once(choice: Choice) -> None:
    _log.info("%s", choice)
