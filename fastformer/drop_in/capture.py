"""Captures a function by Dynamo, for one backend, without the limits of torch.compile."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn

_numbers = itertools.count()
WEIGHTS = "its weights are returned or stored, and computed beside the op"


def at_line(text: str, line: str) -> str:
    """Return a text with the line of code that it is about, which may not be known."""
    return f"{text} ({line})" if line else text


def captured(
    function: Callable[..., Any], backend: Any, attempt: Callable[[], None] = lambda: None
) -> Callable[..., Any]:
    """Return a function that Dynamo captures. What it cannot capture runs as it is, and a hook that
    is added later is seen. attempt: called whenever a frame is captured.
    """
    import torch._dynamo

    context: Any = torch._dynamo.optimize(backend)
    inner = getattr(context, "callback", None)
    if inner is None:  # TORCHDYNAMO_DISABLE
        return function

    def callback(*frame: Any) -> Any:
        attempt()
        with torch._dynamo.config.patch(suppress_errors=True, skip_nnmodule_hook_guards=False):
            return inner(*frame)

    callback.__dict__["_torchdynamo_orig_backend"] = inner
    context.callback = callback
    return context(function)


def own_code(forward: Any) -> Callable[..., Any]:
    """Return a function that computes the same, with a code object and a name of its own: Dynamo
    limits the recompilations of one, and makes sizes symbolic that differ under one name.
    """

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    # Dynamo captures no frame of torch's own files.
    of_torch = (getattr(forward, "__module__", None) or "").startswith("torch.")
    plain = isinstance(forward, FunctionType) and not of_torch
    f = forward if plain else call
    code = f.__code__.replace(co_name=f"{f.__name__}_{next(_numbers)}")
    made = FunctionType(code, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    made.__kwdefaults__ = f.__kwdefaults__
    return made
