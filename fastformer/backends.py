"""The only dispatch: which backend runs an op, and why.

    auto        Triton on a GPU where the kernel supports the call, else the reference
    triton      the kernels; an error where they cannot run. On a CPU: Triton's interpreter
    reference   eager PyTorch

The environment variable FASTFORMER_BACKEND sets the default, `use_backend` the choice of a thread.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor

from fastformer import autograd, reference

BACKENDS = ("auto", "triton", "reference")
# GPU models on which a run of the whole suite is committed under benchmarks/results.
VERIFIED_GPUS: tuple[str, ...] = ()

_HAS_TRITON = importlib.util.find_spec("triton") is not None  # which does not import it
_log = logging.getLogger("fastformer")


class _State(threading.local):
    def __init__(self) -> None:  # of the instance: torch.compile looks whether they are there
        self.backend: str | None = None
        self.explaining = False
        # Told why an op cannot run on the kernels, which then is no error under `triton` either.
        self.obstacle: Callable[[str, str], None] | None = None
        self.watch: Callable[[Choice], None] | None = None  # told of each op that runs
        # As autograd's are, that run a GPU's backward and compute its checkpoints again.
        self.foreign = isinstance(threading.current_thread(), threading._DummyThread)


_state = _State()
_CHOICE = "fastformer: backend"  # the key of what torch takes along into autograd's own threads
_default = os.environ.get("FASTFORMER_BACKEND") or "auto"

# Public ops by name, and the kernel file of each; `operation` fills both.
OPERATIONS: dict[str, Callable[..., Any]] = {}
_kernel_files: dict[str, str] = {}
_kernels: dict[str, ModuleType] = {}


def _check(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source} is {name!r}; expected one of {', '.join(BACKENDS)}")
    return name


class use_backend:
    """Chooses the backend of this thread, at once; a `with` restores the former one.

        use_backend("reference")
        with use_backend("triton"):
            ...

    The backend of a forward decides that of its backward. Raises ValueError for an unknown name.
    """

    def __init__(self, name: str) -> None:
        self._name = _check(name, "backend")
        own = _state.backend
        self._former = own, _inherited() if _state.foreign else own
        _choose(name, name)

    def __enter__(self) -> None:
        _choose(self._name, self._name)  # again: it may have been left before

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _choose(*self._former)


def _choose(name: str | None, inherited: str | None) -> None:
    _state.backend = name
    if not torch.compiler.is_compiling():
        torch._C._stash_obj_in_tls(_CHOICE, inherited)


def current_backend() -> str:
    """The backend chosen for this thread: auto, triton or reference."""
    return (
        _state.backend
        or (_inherited() if _state.foreign else None)
        or _check(_default, "the environment variable FASTFORMER_BACKEND")
    )


def _inherited() -> str | None:
    """In a thread of autograd's own: the choice of the thread that called backward()."""
    if torch.compiler.is_compiling() or not torch._C._is_key_in_tls(_CHOICE):
        return None
    return torch._C._get_obj_in_tls(_CHOICE)


@dataclass(frozen=True)
class Choice:
    """What a call would run on, and why."""

    op: str
    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op}: {self.backend} ({self.reason})"


class _Explained(Exception):
    def __init__(self, choice: Choice) -> None:
        self.choice = choice


def operation(kernel: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks a function of `functional` as an op; its kernels are in kernels/<kernel>.py."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATIONS[function.__name__] = function
        _kernel_files[function.__name__] = kernel
        return function

    return register


def explain(op: str, *args: Any, **kwargs: Any) -> Choice:
    """The backend that `fastformer.<op>(*args, **kwargs)` would take, and why, without running it.

    Bad arguments raise as they do in the call. Returns an object with `.backend` and `.reason`.
    """
    if op not in OPERATIONS:
        raise ValueError(f"op is {op!r}; expected one of {', '.join(sorted(OPERATIONS))}")
    _state.explaining = True
    try:
        OPERATIONS[op](*args, **kwargs)
    except _Explained as explained:
        return explained.choice
    finally:
        _state.explaining = False
    raise AssertionError(f"{op} returned without a dispatch")


def _import(op: str) -> bool:
    """Imports the kernel file of an op, once; dynamo calls it, and does not trace it."""
    if op not in _kernels:
        module = importlib.import_module("fastformer.kernels." + _kernel_files[op])
        autograd.pair(op)
        _kernels[op] = module  # last: another thread may look now
    return True


# What torch.compiler.assume_constant_result sets; calling that imports dynamo, and triton with it.
_import.__dict__["_dynamo_marked_constant"] = True


def _load(op: str) -> ModuleType:
    """The kernel file of an op, imported at its first use and triton with it."""
    _import(op)
    return _kernels[op]


def _obstacle(op: str, arguments: dict[str, Any], device: torch.device) -> str | None:
    """Why the Triton kernel of `op` cannot run this call, or None."""
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


def choose(op: str, arguments: dict[str, Any]) -> Choice:
    """The backend for a checked call. Raises RuntimeError where an explicit `triton` cannot run."""
    backend = current_backend()
    device = next(a for a in arguments.values() if isinstance(a, Tensor)).device
    if backend == "reference":
        return Choice(op, "reference", "it was chosen")
    if backend == "auto" and device.type == "cpu":
        return Choice(op, "reference", "the tensors are on the CPU")
    reason = _obstacle(op, arguments, device)
    if reason is not None:
        if backend == "triton" and _state.obstacle is None:
            raise RuntimeError(f"the triton backend cannot run {op}: {reason}")
        if _state.obstacle is not None:
            _state.obstacle(op, reason)
        return Choice(op, "reference", reason)
    if backend == "triton":
        return Choice(op, "triton", "it was chosen")
    return Choice(op, "triton", "the tensors are on a GPU" + _caveat(device))


def _caveat(device: torch.device) -> str:
    if torch.compiler.is_compiling():
        return ""
    name = _gpu_name(device)
    if name in VERIFIED_GPUS:
        return ""
    return f"; no run of the kernels on a {name} is on record yet"


@functools.cache
def _gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


class telling:
    """Within it this thread says what it runs: `watch(choice)` for each op, and `obstacle(op,
    reason)` where the kernels cannot run one, which then is no error under an explicit `triton`
    but goes to the reference.
    """

    def __init__(
        self,
        obstacle: Callable[[str, str], None] | None = None,
        watch: Callable[[Choice], None] | None = None,
    ) -> None:
        self._own = obstacle, watch

    def __enter__(self) -> None:
        obstacle, watch = self._own
        self._former = _state.obstacle, _state.watch
        if obstacle is not None:
            _state.obstacle = obstacle
        if watch is not None:
            _state.watch = watch

    def __exit__(self, *error: object) -> None:
        _state.obstacle, _state.watch = self._former


def run(op: str, **arguments: Any) -> Any:
    """Runs an op on the backend chosen for it. The names and their order are the op's own."""
    choice = choose(op, arguments)
    if _state.explaining:
        raise _Explained(choice)
    if _state.watch is not None:
        _state.watch(choice)
    if choice.backend == "triton":
        return autograd.apply(op, arguments)
    if current_backend() == "auto" and not torch.compiler.is_compiling():
        _log_once(choice)
    return getattr(reference, op)(**arguments)


@functools.lru_cache(256)  # a reason can name a shape
def _log_once(choice: Choice) -> None:
    _log.info("%s", choice)
