"""Whether the values of a tensor may be read, and whether ops compute by their formulas alone."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_CHECK_ON_GPU = os.environ.get("FASTFORMER_CHECK", "0") == "1"


class _Formula(threading.local):
    always: bool = False


formula = _Formula()


@contextmanager
def use_formula() -> Iterator[None]:
    """Make ops compute their formulas from differentiable primitives: for double backwards."""
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


def may_read(x: Tensor) -> bool:
    """Return whether the values of x may be read on the host. They may for an eager tensor on a
    CPU, and elsewhere only with FASTFORMER_CHECK=1, because reading them waits for the GPU.
    """
    return (x.is_cpu or _CHECK_ON_GPU) and eager(x)
