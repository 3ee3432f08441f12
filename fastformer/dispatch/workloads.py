"""The calls that measurements distinguish.

A `Workload` describes a call by its op, dtype, sizes and options. `of` makes it from the arguments
of a call and keeps no tensor; `Workload.arguments` makes random arguments from it. Workloads with
the same key share a measurement; in a key each size is rounded up to a power of two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer.description import next_power_of_2
from fastformer.dispatch.operation import OPERATIONS, Arguments, Options, Sizes

DROPOUT, SEED = 0.1, 7


class Workload(NamedTuple):
    """An op, and the dtype, sizes and options of a call. `gradient`: measure the backward too."""

    op: str
    dtype: str
    sizes: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, Any], ...]
    gradient: bool = False

    @property
    def key(self) -> str:
        """Return the name that workloads share if they share a measurement."""
        words = [self.dtype, *(f"{name}{next_power_of_2(n)}" for name, n in self.sizes)]
        return " ".join([*words, *_words(self.options), *["backward"] * self.gradient])

    def __str__(self) -> str:
        sizes = (f"{name}={n}" for name, n in self.sizes)
        direction = "forward + backward" if self.gradient else "forward"
        return " ".join([self.op, self.dtype, *sizes, *_words(self.options)]) + f", {direction}"

    def small(self) -> Workload:
        """Return this workload with sizes for which the float64 reference fits in memory."""
        limits = OPERATIONS[self.op].workloads.limits
        sizes = ((name, min(n, limits.get(name, n))) for name, n in self.sizes)
        return self._replace(sizes=tuple(sizes))

    def arguments(self, device: torch.device, seed: int = 0) -> Arguments:
        """Return random arguments of the public function; `gradient`: they require gradients."""
        make = Maker(device, getattr(torch, self.dtype), seed, self.gradient)
        return OPERATIONS[self.op].workloads.build(make, dict(self.sizes), dict(self.options))


def _words(options: Iterable[tuple[str, Any]]) -> list[str]:
    return [name if value is True else f"{name}={value}" for name, value in options]


def of(op: str, arguments: Arguments) -> Workload | None:
    """Return the workload of a checked call; None if it is float64 or has an empty tensor."""
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    floating = next(x for x in tensors if x.is_floating_point())
    if any(0 in x.shape for x in tensors) or floating.dtype == torch.float64:
        return None
    sizes, options = OPERATIONS[op].workloads.describe(**arguments)
    dtype = str(floating.dtype).removeprefix("torch.")
    return workload(op, dtype, sizes, differentiated(arguments), **options)


def workload(op: str, dtype: str, sizes: Sizes, gradient: bool = False, **options: Any) -> Workload:
    """Return a workload without the options that are False."""
    given = tuple(sorted((name, value) for name, value in options.items() if value))
    return Workload(op, dtype, tuple(sizes.items()), given, gradient)


def example(op: str, gradient: bool = False) -> Workload:
    """Return the workload of a small call of an op in float32."""
    sizes, options = OPERATIONS[op].workloads.example
    return workload(op, "float32", sizes, gradient, **options)


def differentiated(arguments: Arguments) -> bool:
    """Return whether a call will have a backward."""
    tensors = (x for x in arguments.values() if isinstance(x, Tensor))
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


class Maker:
    """Makes random tensors on a device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int, gradient: bool) -> None:
        self.device, self.dtype, self.gradient = device, dtype, gradient
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, gradient: bool = True) -> Tensor:
        """Return normal numbers, which require gradients if `gradient` and `self.gradient`."""
        x = torch.randn(*shape, device=self.device, generator=self.generator) * scale
        return x.to(self.dtype).requires_grad_(gradient and self.gradient)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Return integers from low to high - 1."""
        return torch.randint(low, high, shape, device=self.device, generator=self.generator)


def dropout(options: Options) -> Arguments:
    """Return the arguments of dropout, or none if the options are without dropout."""
    return dict(dropout_p=DROPOUT, dropout_seed=SEED) if "dropout" in options else {}
