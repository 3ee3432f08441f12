"""The options that were measured to be the fastest on this GPU, and replace those of the
configuration tables.

A launcher calls `choose` when it makes a plan, once for each signature of its calls. fastformer
sets `source` to what was measured. The tuner runs calls in the context `forced`, which records the
keys that launchers ask for and sets the options to measure.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from fastformer.batch_invariance import on

from .launch import next_power_of_2, plans

_log = logging.getLogger("fastformer")


class TuningKey(NamedTuple):
    """A choice that a measurement can make: the option of a kernel for a class of calls.

    kernel: its name, for example "attention forward".
    case: the class: dtype, sizes rounded up to powers of two, and what the kernel is compiled for.
    shipped: the option of the configuration tables: tiles, or a name.
    options: returns the options to measure, with or without the shipped one.
    apart: the option, if any, for which further kernels are launched that have options of their
        own: these are measured first.
    """

    kernel: str
    case: str
    shipped: Any
    options: Callable[[], Iterable[Any]]
    apart: Any = None


class GluonOption(str):
    """The name of an option whose kernel is written in Gluon."""


def source(device: torch.device) -> Mapping[tuple[str, str], str]:
    """Return the labels of the options chosen for a device, by kernel and class."""
    return {}


_forced: Mapping[str, Any] = {}
_asked: list[TuningKey] | None = None


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
    """Return the option that was measured to be the fastest, or else the shipped one. In the
    context `forced`, record the key and return the forced option; within `batch_invariant`, return
    the shipped one.
    """
    kernel, case, shipped, options, _ = key
    if on():
        return shipped
    if _asked is not None:
        _asked.append(key)
        return _forced.get(kernel, shipped)
    chosen = source(device).get((kernel, case), label(shipped))
    if chosen == label(shipped):
        return shipped
    for option in options():
        if label(option) == chosen:
            return option
    _ignore(chosen, kernel)
    return shipped


@functools.cache
def _ignore(chosen: str, kernel: str) -> None:
    _log.warning("the measured choice %r of %s is ignored: no kernel has it", chosen, kernel)


@contextlib.contextmanager
def forced(options: Mapping[str, Any]) -> Iterator[list[TuningKey]]:
    """Return a context without measurements, in which kernels use `options`, given by kernel name,
    or else their shipped options. It yields the list of the keys that launchers ask for in it.
    """
    global _asked, _forced
    before = _asked, _forced
    asked: list[TuningKey] = []
    _asked, _forced = asked, options
    plans.clear()
    try:
        yield asked
    finally:
        _asked, _forced = before
        plans.clear()
