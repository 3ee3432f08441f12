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
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer.batch_invariance import on

from .launch import Launch, next_power_of_2, plans

_log = logging.getLogger("fastformer")
MARGIN = 4096  # bytes of NaN before and behind each tensor
NAN = (0xFF, 0xFF, 0xBF, 0x7F)  # in every floating dtype; no arithmetic leaves it as it is


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
    """The name of an option whose kernel is written in Gluon.

    In Gluon the author writes the barriers. So `fastformer tune` checks such a kernel for longer,
    and a measurement of it holds only for the sources that were measured.
    """


def _nothing(device: torch.device) -> Mapping[tuple[str, str], str]:
    return {}


# Returns the labels of the options chosen for a device, by kernel and class.
source: Callable[[torch.device], Mapping[tuple[str, str], str]] = _nothing
_forced: Mapping[str, Any] = {}
_asked: list[TuningKey] | None = None


def label(option: Any) -> str:
    """Return the name of an option in the file of measurements: for tiles their numbers, for a
    kernel in Gluon its row and a digest of the sources.
    """
    if isinstance(option, GluonOption):
        return f"{option} @{digest()}"
    return option if isinstance(option, str) else " ".join(map(str, option))


def has_changed(name: str) -> bool:
    """Return whether a name in the file of measurements holds the digest of other sources."""
    _, mark, measured = name.rpartition(" @")
    return bool(mark) and measured != digest()


@functools.cache
def digest() -> str:
    """Return a digest of the sources of attention, to which all kernels in Gluon belong."""
    here = Path(__file__).parent
    files = [here / "common.py", *sorted((here / "attention").glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


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


# ----------------------------------------------------------------------------- NaN around tensors


class _Fence:
    """A copy of a tensor, with the same strides and alignment, in memory full of NaN."""

    def __init__(self, x: Tensor) -> None:
        shape = [1 if step == 0 else n for n, step in zip(x.shape, x.stride())]
        self.x = x.data.as_strided(shape, x.stride())
        size = x.element_size() * (1 + sum((n - 1) * s for n, s in zip(shape, x.stride())))
        first = MARGIN + x.data_ptr() % 16
        pattern = torch.tensor(NAN, dtype=torch.uint8, device=x.device)
        self.outside = pattern.repeat(-(-(first + size + MARGIN) // len(NAN)))
        self.memory, self.place = self.outside.clone(), slice(first, first + size)
        self.inside = self._view(self.memory)
        self.inside.copy_(self.x)

    def _view(self, memory: Tensor) -> Tensor:
        return memory[self.place].view(self.x.dtype).as_strided(self.x.shape, self.x.stride())

    def close(self) -> bool:
        """Copy back what was written. Return whether all outside of the tensor is as it was."""
        self._view(self.outside).copy_(self.inside)
        self.x.copy_(self.inside)
        return torch.equal(self.outside, self.memory)


@contextlib.contextmanager
def fenced() -> Iterator[list[str]]:
    """Return a context in which each tensor that a kernel gets is a copy with NaN around it, and
    between its rows if they are apart, in all threads. It yields a list that is filled with what
    was wrong.
    """
    found: list[str] = []
    start = Launch.__call__
    former = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()

    def call(launch: Launch, *pointers: Any) -> None:
        fences: dict[Any, _Fence] = {}  # one for each tensor, which may be passed twice

        def moved(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(moved, x))
            if not isinstance(x, Tensor) or not x.numel():
                return x
            key = x.data_ptr(), x.dtype, x.shape, x.stride()
            fences[key] = fences.get(key) or _Fence(x)
            return fences[key].inside

        start(launch, *map(moved, pointers))
        if not all([fence.close() for fence in fences.values()]):
            found.append("it writes outside of a tensor")

    Launch.__call__ = call  # type: ignore
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    try:
        yield found
    finally:
        Launch.__call__ = start  # type: ignore
        torch.use_deterministic_algorithms(former, warn_only=warns)
