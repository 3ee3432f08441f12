"""The options that were measured to be the fastest on this GPU, and replace those of the
configuration tables.

A launcher calls `choose` when it makes a plan. fastformer sets `source` to what was measured, and
measures in the context `forced`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from fastformer.batch_invariance import on
from fastformer.plans import forget

from .launch import next_power_of_2

_log = logging.getLogger("fastformer")
_forced: tuple[Mapping[str, Any], list[TuningKey]] | None = None


class TuningKey(NamedTuple):
    """A choice that a measurement can make: the option of a kernel for a class of calls."""

    kernel: str
    case: str  # dtype, sizes rounded up to powers of two, and what the kernel is compiled for
    shipped: Any  # the option of the configuration tables: tiles, or a name
    options: Callable[[], Iterable[Any]]  # those to measure, with or without the shipped one

    @property
    def name(self) -> str:
        return f"{self.kernel}: {self.case}"


def source(device: torch.device) -> Mapping[str, str]:
    """Return the labels of the options chosen for a device, by `TuningKey.name`."""
    return {}


def label(option: Any) -> str:
    """Return the name of an option in the file of measurements: for tiles their numbers."""
    return option if isinstance(option, str) else " ".join(map(str, option))


def named(dtype: torch.dtype, precision: str = "", **sizes: int) -> str:
    """Return the name of a class of calls: dtype, precision of float32, sizes as powers of 2."""
    words = [str(dtype).removeprefix("torch."), precision if dtype == torch.float32 else ""]
    words += [f"{name}{next_power_of_2(n)}" for name, n in sizes.items()]
    return " ".join(filter(None, words))


def flags(case: NamedTuple, *without: str) -> str:
    """Return the fields of a case that are set, except `without`, with values other than True."""
    fields = ((name, x) for name, x in case._asdict().items() if x and name not in without)
    return " ".join(name if x is True else f"{name}={x}" for name, x in fields)


def choose(device: torch.device, key: TuningKey) -> Any:
    """Return the option that was measured to be the fastest, or else the shipped one, which
    `batch_invariant` always takes.
    """
    if on():
        return key.shipped
    if _forced is not None:
        _forced[1].append(key)
        return _forced[0].get(key.kernel, key.shipped)
    chosen = source(device).get(key.name)
    if chosen is not None:
        for option in (key.shipped, *key.options()):
            if label(option) == chosen:
                return option
        _log.warning("the measured choice %r of %s is ignored: no kernel has it", chosen, key.name)
    return key.shipped


@contextlib.contextmanager
def forced(options: Mapping[str, Any]) -> Iterator[list[TuningKey]]:
    """Return a context in which kernels use `options`, given by kernel, or else what is shipped. It
    yields the list of the keys that launchers ask for in it.
    """
    global _forced
    before, _forced = _forced, (options, [])
    forget()
    try:
        yield _forced[1]
    finally:
        _forced = before
        forget()
