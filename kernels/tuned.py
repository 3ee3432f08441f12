"""The options that were measured to be the fastest on this GPU, and replace those of the
configuration tables.

A launcher calls `choose` when it makes a plan, once for each signature of its calls. fastformer
sets `source` to the stored measurements. The tuner runs calls in the context `forced`, which
records the keys that launchers ask for and sets the options to measure.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from .launch import next_power_of_2, plans

_log = logging.getLogger("fastformer")


class TuningKey(NamedTuple):
    """A choice that a measurement can make: the option of a kernel for a class of calls.

    kernel: its name, for example "attention forward".
    case: the class: dtype, sizes rounded up to powers of two, and what the kernel is compiled for.
    shipped: the option of the configuration tables: tiles, or a name.
    options: returns the options to measure, with or without the shipped one.
    """

    kernel: str
    case: str
    shipped: Any
    options: Callable[[], Iterable[Any]]


class GluonOption(str):
    """The name of an option whose kernel is written in Gluon.

    Such a kernel says itself which warp waits for which. So `fastformer tune` checks it for longer,
    and a measurement of it holds only for the source that was measured.
    """

    kernel: Any

    @property
    def digest(self) -> str:
        return digest(self.kernel.fn)


gluon_kernels: list[Any] = []  # all that an option may name


def gluon_options(rows: Iterable[str], kernel: Any) -> list[GluonOption]:
    """Return an option for each of these names of rows of a kernel in Gluon."""
    options = [GluonOption(name) for name in rows]
    for option in options:
        option.kernel = kernel
    return options


def _nothing(device: torch.device) -> Mapping[tuple[str, str], str]:
    return {}


# Returns the labels of the options chosen for a device, by kernel and class.
source: Callable[[torch.device], Mapping[tuple[str, str], str]] = _nothing
_forced: Mapping[str, Any] = {}
_asked: list[TuningKey] | None = None


def label(option: Any) -> str:
    """Return the name of an option in the file of measurements: for tiles their numbers, for a
    kernel in Gluon its row and a digest of its source.
    """
    if isinstance(option, GluonOption):
        return f"{option} @{option.digest}"
    return option if isinstance(option, str) else " ".join(map(str, option))


def has_changed(name: str) -> bool:
    """Return whether a name in the file of measurements holds the digest of a kernel in Gluon, and
    no kernel has this digest now.
    """
    _, mark, measured = name.rpartition(" @")
    return bool(mark) and measured not in (digest(kernel.fn) for kernel in gluon_kernels)


@functools.cache
def digest(function: Any) -> str:
    """Return a digest of the source of a function, and of the functions, classes and constants of
    this package that it names, directly or through others.
    """
    found: dict[str, str] = {}
    _read_source(function, found)
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:8]


def _read_source(function: Any, found: dict[str, str]) -> None:
    here = function.__module__
    if f"{here}.{function.__qualname__}" in found:
        return
    found[f"{here}.{function.__qualname__}"] = inspect.getsource(function)
    for name in _names(getattr(function, "__code__", None)):
        value = function.__globals__.get(name)
        value = getattr(value, "fn", value)  # what @triton.jit or @gluon.jit was given
        if isinstance(value, (type, types.FunctionType)):
            if value.__module__.partition(".")[0] == here.partition(".")[0]:
                _read_source(value, found)
        elif isinstance(value := getattr(value, "value", value), (int, float, str, tuple)):
            found[f"{here}.{name}"] = repr(value)


def _names(code: types.CodeType | None) -> Iterator[str]:
    """Yield the names that a function looks up, the functions inside of it included."""
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from _names(constant)


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
    context `forced`, record the key and return the forced option.
    """
    kernel, case, shipped, options = key
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
    if " @" in chosen:
        why = "its kernel has changed since; `fastformer tune` measures it again"
    else:
        why = "no kernel has it"
    _log.warning("the measured choice %r of %s is ignored: %s", chosen, kernel, why)


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
