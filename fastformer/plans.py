"""Tables of plans: what a call launches, by the layouts of its tensors and its other arguments.

A key holds no tensor. Python's 1, 1.0 and True are equal, so that a key holds the types of values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from fastformer.batch_invariance import on

Plan = TypeVar("Plan")
MOST_PLANS = 4096  # in a table


class Plans(dict[Any, Any]):
    """A table of plans by key, emptied when it is full: shapes may change with every call."""

    def remember(self, key: Any, plan: Plan) -> Plan:
        """Add a plan, and return it."""
        if len(self) >= MOST_PLANS:
            self.clear()
        self[key] = plan
        return plan


front = Plans()  # of the calls of public functions
recent: dict[str, Any] = {}  # by function: those of its last calls
launches = Plans()  # of kernels and of the registered ops
TENSORS = frozenset({Tensor, Parameter})
SEQUENCES = frozenset({tuple, list, torch.Size})
# What torch.compile guards its code with: one call of C++ for all tensors of a call.
_Guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)


def forget() -> None:
    """Forget all plans, as the choice of kernels or tiles has changed."""
    front.clear()
    recent.clear()
    launches.clear()


def getter(places: Sequence[int]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that returns the elements at these places of a sequence, as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda x: tuple([x[i] for i in places])


def layout(x: Tensor) -> tuple[Any, ...]:
    """Return what a launch depends on in a tensor."""
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15


def guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function that tells whether tensors have the types, layouts and requires_grad of
    these, while the dispatcher's keys are the same: autocast, modes, transforms and tracing are
    among them. It takes a quarter of the time of a key, but does not see the grad mode nor the
    alignment, and ends the process for a nested tensor. It says no where torch has no such guards.
    """
    if _Guards is None:
        return lambda *tensors: False
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    return _Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def alignment(x: Tensor) -> int:
    """Return the bytes by which the memory of x is off a multiple of 16, -1 without memory."""
    place = x.data_ptr()
    return place & 15 if place else -1


def _as_key(x: Any) -> Any:
    if isinstance(x, Tensor):
        return layout(x)
    return tuple(map(_as_key, x)) if isinstance(x, (list, tuple)) else (type(x), x)


def allow_tf32() -> bool:
    """Return whether torch multiplies float32 in tf32 on a GPU. `fp32_precision` is right however
    the setting was made; torch's `allow_tf32` raises once it was made by `fp32_precision`.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def planned(
    make: Callable[..., Plan], name: str = "", unread: Sequence[int] = ()
) -> Callable[..., Plan]:
    """Decorate a function that makes a plan of its arguments: calls whose tensors have the same
    layouts, and whose other arguments are equal, share the plan, within `batch_invariant` or not.

    unread: places of arguments that no plan depends on.
    """
    name = name or f"{make.__module__}.{make.__qualname__}"

    @functools.wraps(make)
    def plan(*arguments: Any) -> Plan:
        values = tuple([_as_key(x) for i, x in enumerate(arguments) if i not in unread])
        key = name, on(), allow_tf32(), values
        found = launches.get(key)
        return launches.remember(key, make(*arguments)) if found is None else found

    return plan
