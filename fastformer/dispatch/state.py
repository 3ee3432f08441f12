"""The state of a thread: its backend, and whether something watches or changes its calls."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from fastformer import batch_invariance
from fastformer.batch_invariance import on
from fastformer.eager import formula

if TYPE_CHECKING:
    from collections.abc import Callable

BACKENDS = ("auto", "triton", "reference")
_CHOICE = "fastformer: backend"  # a key of the state that torch copies to autograd's threads
_logs = logging.getLogger("fastformer").isEnabledFor

_autocasts = torch._C._is_any_autocast_enabled
_transforms = torch._C._functorch.peek_interpreter_stack  # of torch.func; None without any
_modes = torch._C._len_torch_dispatch_stack
_functions = torch._C._len_torch_function_stack
_profiles = torch._C._autograd._profiler_enabled
_traces = torch._C._get_tracing_state


class _State(threading.local):
    def __init__(self) -> None:  # torch.compile guards on instance attributes
        self.backend: str | None = None
        # A list within `explain`: ops do not run.
        self.explained: list[tuple[Any, dict[str, Any]]] | None = None
        self.on_choice: Callable[[Any], None] | None = None
        self.on_call: Callable[[str, Any], None] | None = None  # only with an on_choice
        self.on_unsupported: Callable[[str, str], None] | None = None
        self.call: Any = None  # the `front.FirstCall` that is made
        self.watched = False  # whether explained or on_choice is set
        # True in the threads of autograd, which run the backward on a GPU and recompute
        # checkpoints.
        self.not_from_python = isinstance(threading.current_thread(), threading._DummyThread)

    def explain(self, explained: list[tuple[Any, dict[str, Any]]] | None) -> None:
        """Begin or end an `explain`."""
        self.explained = explained
        self.watched = not (explained is self.on_choice is None)

    def observe(self, on_choice: Any, on_unsupported: Any, on_call: Any) -> None:
        """Set the functions of `backends.observe`."""
        self.on_choice, self.on_unsupported, self.on_call = on_choice, on_unsupported, on_call
        self.watched = not (self.explained is on_choice is None)


class _Default:
    backend = os.environ.get("FASTFORMER_BACKEND") or "auto"


default = _Default()
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
    state.backend = name
    if not torch.compiler.is_compiling():
        torch._C._stash_obj_in_tls(_CHOICE, inherited)


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


def is_special(watched: bool = True) -> bool:
    """Return whether something transforms or changes the calls of this thread: autocast, a
    transform of torch.func, forward-mode differentiation, torch.jit.trace, `batch_invariant`, or
    the first call of another plan; or, if `watched`, whether something may watch them: a mode, a
    profiler, an observer, or a log of the choices. torch.compile is not among them.
    """
    return (
        _autocasts()
        or _transforms() is not None
        or forward_ad._current_level >= 0
        or _traces() is not None
        or state.call is not None
        or formula.always
        or (batch_invariance.entered and on())
        or (
            watched
            and (
                _modes() > 0
                or _functions() > 0
                or _profiles()
                or state.watched
                or _logs(logging.INFO)
            )
        )
    )
