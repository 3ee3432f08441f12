"""Whether the values of a tensor can be read, and whether ops compute by their formulas alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class _Formula(threading.local):
    always: bool = False


formula = _Formula()


@contextmanager
def written_out() -> Iterator[None]:
    """Make every op compute its formula from differentiable primitives, within this context.

    It does so in every dtype. A double backward needs these primitives.
    """
    previous, formula.always = formula.always, True
    try:
        yield
    finally:
        formula.always = previous


def eager(x: Tensor) -> bool:
    """Return whether x holds values now: it is not traced, fake, or wrapped by a transform."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def readable(x: Tensor) -> bool:
    """Return whether the values of x can be read for free: it is an eager tensor on the CPU."""
    return x.is_cpu and eager(x)
