"""The state of a thread: its backend, and whether something watches or changes its calls."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from fastformer import batch_invariance
from fastformer.batch_invariance import on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BACKENDS = ("auto", "triton", "reference")
_CHOICE = "fastformer: backend"  # a key of the state that torch copies to autograd's threads
_logs = logging.getLogger("fastformer").isEnabledFor

_autocasts = torch._C._is_any_autocast_enabled
_transforms = torch._C._functorch.peek_interpreter_stack  # of torch.func; None without any
_modes = torch._C._len_torch_dispatch_stack
_functions = torch._C._len_torch_function_stack
_profiles = torch._C._autograd._profiler_enabled
_traces = torch._C._get_tracing_state


class _Default:
    backend = os.environ.get("FASTFORMER_BACKEND") or "auto"


default = _Default()


class _State(threading.local):
    def __init__(self) -> None:  # torch.compile guards on instance attributes
        self.backend: str | None = None
        # A list within `explain`: ops do not run.
        self.explained: list[tuple[Any, dict[str, Any]]] | None = None
        self.on_choice: Callable[[Any], None] | None = None
        self.on_call: Callable[[str, Any], None] | None = None  # only with an on_choice
        self.on_unsupported: Callable[[str, str], None] | None = None
        self.call: Any = None  # the `front.FirstCall` that is made
        self.by_formula = False  # within `use_formula`
        # True in the threads of autograd, which run the backward on a GPU and recompute
        # checkpoints.
        self.not_from_python = isinstance(threading.current_thread(), threading._DummyThread)
        self.set()

    def set(self, **fields: Any) -> None:
        """Set fields by their names."""
        for name, x in fields.items():  # `__dict__.update` would break graphs of torch.compile
            setattr(self, name, x)
        nothing = self.explained is self.on_choice is self.call is None
        self.watched = self.by_formula or not nothing
        known = None if self.not_from_python else default.backend
        # The backend of calls that nothing watches, None if that has to be found out.
        self.plain = None if self.watched else self.backend or known


state = _State()


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
        own = state.backend
        self._previous = own, _inherited() if state.not_from_python else own
        _set_backend(name, name)

    def __enter__(self) -> None:
        _set_backend(self._name, self._name)  # again, because an earlier `with` may have ended

    def __exit__(self, *error: object) -> None:
        _set_backend(*self._previous)


def _set_backend(name: str | None, inherited: str | None) -> None:
    state.set(backend=name)
    if not torch.compiler.is_compiling():
        torch._C._stash_obj_in_tls(_CHOICE, inherited)


@contextmanager
def use_formula() -> Iterator[None]:
    """Make ops compute their formulas from differentiable primitives: for double backwards."""
    previous = state.by_formula
    state.set(by_formula=True)
    try:
        yield
    finally:
        state.set(by_formula=previous)


def current_backend() -> str:
    """Return the backend chosen for this thread: auto, triton or reference."""
    if state.backend is not None:
        return state.backend
    inherited = _inherited() if state.not_from_python else None
    return inherited or _check(default.backend, "the environment variable FASTFORMER_BACKEND")


def _inherited() -> str | None:
    """Return, in a thread of autograd, the backend of the thread that called backward()."""
    if torch.compiler.is_compiling() or not torch._C._is_key_in_tls(_CHOICE):
        return None
    return torch._C._get_obj_in_tls(_CHOICE)


def unwatched_backend() -> str | None:
    """Return `current_backend()`, or None if something watches or changes the calls of this thread
    that the guards of a plan do not see: a function mode, a profiler, an observer, a log of the
    choices, forward-mode differentiation, `use_formula`, `batch_invariant`, or the first call of
    another plan. torch.compile is not among them.
    """
    if (
        _functions() > 0
        or _profiles()
        or forward_ad._current_level >= 0
        or (batch_invariance.entered and on())
        or _logs(logging.INFO)
    ):
        return None
    return state.plain or (None if state.watched else current_backend())


def is_transformed(by_autocast: bool = True, by_modes: bool = True) -> bool:
    """Return whether something watches or changes the calls of this thread that the guards of a
    plan see: dispatch modes and autocast, unless they do not count, a transform of torch.func, or
    torch.jit.trace.
    """
    return (
        (by_modes and _modes() > 0)
        or (by_autocast and _autocasts())
        or _transforms() is not None
        or _traces() is not None
    )
