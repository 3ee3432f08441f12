"""Runs Gluon kernels for Hopper on a CPU, and finds what no barrier orders. It needs no GPU.

It executes the text of the kernel in Python, with `gl`, `tl`, `mbarrier`, `tma` and the functions
of wgmma replaced. Each partition of `warp_specialize` is a thread. One thread runs at a time; a
seeded scheduler chooses the next one at every operation on memory or barriers, and makes some far
slower than others. What is asynchronous is as late as the program allows:

* A TMA load fills its destination with NaN when it is issued. Its data arrive later: at a moment
  that the scheduler chooses, or when no thread can run.
* A wgmma reads its operands at the wait that ends it. Its result cannot be used before.
* A TMA store reads shared memory at `store_wait`, or never.

Beside the values, vector clocks order the accesses to shared memory (Lamport 1978; Mattern 1988):
each access must have happened after those that conflict with it, by barriers, waits, and the start
of the partitions. So a race is found whatever the schedule, even if the values come out right. Also
found are: a plain access and an asynchronous one to the same memory without a proxy fence between
them, such as the initialisation of a barrier and a copy that arrives there; more arrivals in a
phase than a barrier's count; bytes that do not add up; a deadlock; copies, stores and wgmma that
are under way when a partition ends; slices past the end of shared memory; and in global memory all
that memory_check.py finds.

What it does not see: layouts, and so bank conflicts and wgmma that Triton refuses; registers; the
order that ptxas gives the instructions of one partition; how threads of a partition differ, because
a partition is one thread; integer overflow and the rounding of float32 as a GPU does it; time.
Values of 16 bits are float32 that are rounded where the kernel converts them.
"""

from __future__ import annotations

import ast
import functools
import inspect
import operator
import random
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.runtime.jit import JITFunction

from benchmarks.proof.memory_check import AccessError, Argument


class Fault(Exception):
    """What a kernel does wrong, in words."""


# ------------------------------------------------------------------------------------------ values

_NUMPY = {"bf16": np.float32, "fp16": np.float32, "fp32": np.float32, "int1": np.bool_} | {
    f"{sign}int{bits}": np.dtype(f"{sign}int{bits}").type
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}


def rounded(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Round float32 to a dtype of 16 bits, to nearest even."""
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype.name)
    return torch.from_numpy(x).to(kind).float().numpy() if kind else x


def _raw(x: Any) -> Any:
    """Return the numbers of a value; anything else as it is."""
    if isinstance(x, Product):
        x.used()
    return x.data if isinstance(x, Value) else x


class Value:
    """A tensor or a scalar of the kernel."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: Any) -> None:
        self.data = np.asarray(data)

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        kind = _NUMPY[dtype.name]
        return Value(self.data.view(kind) if bitcast else rounded(self.data.astype(kind), dtype))

    def reshape(self, *shape: Any) -> Value:
        return Value(self.data.reshape(shape))

    def permute(self, *order: Any) -> Value:
        return Value(self.data.transpose(*order))

    def __neg__(self) -> Value:
        return Value(-self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)


def _truncated(a: Any, b: Any) -> Any:
    """Integer division as in C."""
    return np.trunc(np.true_divide(a, b)).astype(np.result_type(a, b))


def _define(name: str, function: Callable[..., Any]) -> None:
    def forward(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        return Value(function(self.data, _raw(other)))

    def backward(self: Value, other: Any) -> Value:
        return Value(function(_raw(other), self.data))

    setattr(Value, f"__{name}__", forward)
    setattr(Value, f"__r{name}__", backward)


for _name in ("add", "sub", "mul", "truediv", "xor", "and_", "or_", "lshift", "rshift"):
    _define(_name.strip("_"), getattr(operator, _name))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _define(_name, getattr(operator, _name))
_define("floordiv", _truncated)
_define("mod", np.fmod)


class Pointer:
    """Pointers to elements of a tensor in global memory: places in `array`, its storage, flat."""

    def __init__(
        self, array: np.ndarray, dtype: Any, first: int, tensor: Argument, offset: Any = 0
    ) -> None:
        self.array, self.element_ty, self.first, self.tensor = array, dtype, first, tensor
        self.offset = np.asarray(offset, np.int64)

    @property
    def dtype(self) -> Pointer:
        return self

    def check(self, exists: np.ndarray, access: Callable[..., None]) -> None:
        """Check a load (`Argument.check_load`) or a store of the elements that exist."""
        if (offsets := self.offset[exists]).size:
            try:
                access(self.tensor, offsets, _now.program)
            except AccessError as error:
                raise Fault(str(error)) from None

    def load(self, exists: np.ndarray) -> np.ndarray:
        """Return the elements that exist, and 0 for the others."""
        found = self.array[np.where(exists, self.first + self.offset, 0)]
        return np.where(exists, found, np.zeros((), found.dtype))

    def store(self, exists: np.ndarray, values: np.ndarray) -> None:
        self.array[self.first + self.offset[exists]] = values[exists]

    def __add__(self, n: Any) -> Pointer:
        offset = self.offset + np.asarray(_raw(n), np.int64)
        return Pointer(self.array, self.element_ty, self.first, self.tensor, offset)

    __radd__ = __add__


def argument(kernel: str, name: str, x: Tensor) -> Argument:
    """Return the record of a tensor that a kernel is given, for its pointers."""
    return Argument(name, x, lambda: f"{kernel}, program {_now.program}, {_now.where()}:")


# ------------------------------------------------------------------------ threads and their clocks

Event = tuple[int, int]  # the number of a thread or of an asynchronous copy, and its time
Clock = dict[int, int]  # of each, the latest event that is known to have happened


def _joined(a: Clock, b: Clock) -> Clock:
    return {n: max(a.get(n, 0), b.get(n, 0)) for n in a.keys() | b.keys()}


def _happened(event: Event | None, clock: Clock) -> bool:
    return event is not None and clock.get(event[0], 0) >= event[1]


class Thread:
    """A partition."""

    def __init__(self, number: int, name: str, clock: Clock) -> None:
        self.number, self.name, self.clock = number, name, clock
        self.turn = threading.Event()
        self.waits: tuple[Barrier, int] | None = None
        self.place, self.speed = "", 1.0
        self.done = False
        self.products: list[Product] = []  # under way
        self.stores: list[tuple[Pointer, np.ndarray, Shared]] = []

    def tick(self) -> Event:
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.number, self.clock[self.number]

    def ready(self) -> bool:
        return not self.done and (self.waits is None or self.waits[0].passed(self.waits[1]))


def _frames() -> Iterator[FrameType]:
    """Yield what runs of the kernel and of the functions that it calls, the kernel last."""
    frame = inspect.currentframe()
    while frame:
        if "_line" in frame.f_globals:
            yield frame
        frame = frame.f_back


class Simulation:
    """One program of a kernel: its index along each axis of the grid."""

    def __init__(self, program: tuple[int, ...], grid: tuple[int, ...], seed: int) -> None:
        self.program, self.grid = program, grid
        self.random = random.Random(f"{seed} {program}")
        self.now = Thread(0, "the kernel", {})
        self.threads: list[Thread] = []
        self.loads: list[Load] = []
        self.copies: list[Load] = []  # those of the loads that have not arrived
        self.cells: list[Cell] = []
        self.copied = 10**6  # the number of the last copy, as far as events are concerned
        self.fault: Exception | None = None
        self.over = threading.Event()

    def where(self) -> str:
        """Say which line of the kernel runs."""
        frame = next(_frames(), None)
        line = f", {frame.f_code.co_name} line {frame.f_lineno}" if frame else ""
        return self.now.name + line

    def step(self) -> None:
        """Let another thread run, or a copy arrive."""
        if self.threads:
            if self.copies and self.random.random() < 0.1:
                self._arrive()
            self._hand_over()

    def wait(self, barrier: Barrier, phase: int) -> None:
        me = self.now
        me.waits, me.place = (barrier, phase), self.where()
        if self.threads:
            self._hand_over()
        elif not barrier.passed(phase):
            raise Fault(f"deadlock: {me.place} waits for {barrier.name}")
        me.waits = None
        me.clock = _joined(me.clock, barrier.complete)

    def _arrive(self) -> None:
        self.copies.pop(self.random.randrange(len(self.copies))).arrive()

    def _hand_over(self) -> None:
        me, self.now = self.now, self._next()
        if self.now is not me:
            self.now.turn.set()
            me.turn.wait()
            me.turn.clear()
            if self.fault:
                raise Fault("stopped")

    def _next(self) -> Thread:
        while True:
            if ready := [t for t in self.threads if t.ready()]:
                return self.random.choices(ready, [t.speed for t in ready])[0]
            if not self.copies:
                waiting = [t for t in self.threads if not t.done]
                words = [f"{t.place} waits for {t.waits[0].name}" for t in waiting if t.waits]
                raise Fault(f"deadlock: {'; '.join(words)}")
            self._arrive()

    def fork(self, parts: list[tuple[str, Callable[[], None]]]) -> None:
        """Run each part as a thread, until all have returned."""
        parent = self.now
        parent.tick()
        self.threads = [
            Thread(n + 1, name, dict(parent.clock)) for n, (name, _) in enumerate(parts)
        ]
        for thread in self.threads:  # some are far slower than others
            thread.speed = 10 ** self.random.uniform(-3, 0)
        for thread, (_, part) in zip(self.threads, parts):
            threading.Thread(target=self._run, args=(thread, part), daemon=True).start()
        self.now = self.random.choice(self.threads)
        self.now.turn.set()
        self.over.wait()
        if self.fault:
            raise self.fault
        known = functools.reduce(_joined, [thread.clock for thread in self.threads])
        for load in self.loads:
            if not _happened(load.event, known):
                raise Fault(f"nobody waits for {load.who}, which may be under way at the end")

    def _run(self, thread: Thread, part: Callable[[], None]) -> None:
        thread.turn.wait()
        thread.turn.clear()
        try:
            if not self.fault:
                with np.errstate(all="ignore"):
                    part()
                self._end(thread)
        except Exception as fault:
            self.fault = self.fault or fault
        if self.fault or all(t.done for t in self.threads):
            self.over.set()
            for other in self.threads:
                other.turn.set()

    def _end(self, thread: Thread) -> None:
        if thread.products:
            raise Fault(f"{thread.name} ends while {thread.products[0].who} is under way")
        if thread.stores:
            raise Fault(f"{thread.name} ends while a TMA store may still read shared memory")
        thread.done = True
        if not all(t.done for t in self.threads):
            self.now = self._next()
            self.now.turn.set()


_now: Simulation  # the one that runs: `gl` and the others are module-level names in a kernel, too


# ------------------------------------------------------------------------------------ shared memory


class Cell:
    """The accesses to one buffer, the smallest part of shared memory that is indexed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.written: Event | None = None  # the last write, once it is complete
        self.writer = ""
        self.reads: list[tuple[Event | Product, str]] = []
        self.plain: list[Event] = []  # plain accesses that no proxy fence has followed
        _now.cells.append(self)

    def read(self, who: str, by: Event | Product, asynchronous: bool) -> None:
        if not self.writer:
            raise Fault(f"{who} reads {self.name}, which nobody has written")
        if not _happened(self.written, _now.now.clock):
            raise Fault(f"race: {who} reads {self.name}, which {self.writer} may still write")
        self._through_one_proxy(who, asynchronous, by)
        self.reads.append((by, who))

    def write(self, who: str, by: Event, asynchronous: bool) -> None:
        clock = _now.now.clock
        if self.writer and not _happened(self.written, clock):
            raise Fault(f"race: {who} writes {self.name}, which {self.writer} may still write")
        for event, reader in self.reads:
            event = event.done if isinstance(event, Product) else event
            if not _happened(event, clock):
                raise Fault(f"race: {who} writes {self.name}, which {reader} may still read")
        self._through_one_proxy(who, asynchronous, by)
        self.written, self.writer, self.reads = by, who, []

    def _through_one_proxy(self, who: str, asynchronous: bool, by: Any) -> None:
        if not asynchronous:
            self.plain.append(by)
        elif self.plain:
            raise Fault(f"{who} uses {self.name} without a fence after a plain access")


def _part(i: Any, size: int, name: str) -> int:
    if not 0 <= (i := int(i)) < size:
        raise Fault(f"{_now.where()}: {name} is followed by {size - 1}, not {i}")
    return i


class Shared:
    """A view of shared memory."""

    def __init__(self, data: np.ndarray, cells: list[Cell], dtype: Any) -> None:
        self.data, self.cells, self.dtype = data, cells, dtype

    def index(self, i: Any) -> Shared:
        i = _part(i, min(len(self.cells), len(self.data)), self.cells[0].name)
        return Shared(self.data[i], [self.cells[i]], self.dtype)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        if not 0 <= start <= start + length <= (size := self.data.shape[dim]):
            name, end = self.cells[0].name, start + length
            raise Fault(f"{_now.where()}: {start}:{end} of the {size} in dimension {dim} of {name}")
        part = np.moveaxis(self.data, dim, 0)[start : start + length]
        return Shared(np.moveaxis(part, 0, dim), self.cells, self.dtype)

    def reshape(self, shape: Any) -> Shared:
        return Shared(self.data.reshape([int(n) for n in shape]), self.cells, self.dtype)

    def permute(self, order: Any) -> Shared:
        return Shared(self.data.transpose(order), self.cells, self.dtype)

    def load(self, layout: Any = None) -> Value:
        _now.step()
        for cell in self.cells:
            cell.read(_now.where(), _now.now.tick(), False)
        return Value(self.data.copy())

    def store(self, value: Any) -> None:
        _now.step()
        for cell in self.cells:
            cell.write(_now.where(), _now.now.tick(), False)
        if (shape := _raw(value).shape) != self.data.shape:  # which NumPy would broadcast
            raise Fault(f"{_now.where()}: {shape} into {self.data.shape} of {self.cells[0].name}")
        self.data[...] = _raw(value)


class Barrier:
    """An mbarrier: a phase ends when its arrivals and the bytes that it expects have come."""

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0
        self.clock: Clock = {}  # what arrived in this phase
        self.complete: Clock = {}  # what had arrived when the last phase ended
        self.cell = Cell(name)

    def init(self, count: int) -> None:
        self.count = self.left = count
        self.bytes = self.phase = 0
        self.cell.write(_now.where(), _now.now.tick(), False)

    def passed(self, phase: int) -> bool:
        if not self.count:
            raise Fault(f"{_now.where()} uses {self.name}, which is not initialised")
        return self.phase != phase

    def arrive(self, clock: Clock, count: int, bytes: int) -> None:
        self.passed(0)
        self.clock = _joined(self.clock, clock)
        self.left -= count
        self.bytes += bytes
        if self.left < 0:
            raise Fault(f"{_now.where()}: {self.name} has more than its {self.count} arrivals")
        if self.left == 0 and self.bytes == 0:
            self.phase ^= 1
            self.left = self.count
            self.complete, self.clock = self.clock, {}


class Several(list[Barrier]):
    """Barriers side by side."""

    def index(self, i: Any) -> Barrier:  # type: ignore[override]
        return self[_part(i, len(self), self[0].name)]


class Descriptor:
    """A TMA descriptor: what is past the end of a dimension reads as zero, and is not written."""

    def __init__(self, base: Pointer, shape: Any, strides: Any, block: Any, layout: Any) -> None:
        self.base, self.layout, self.dtype = base, layout, base.element_ty
        self.shape, self.strides = [int(n) for n in shape], [int(n) for n in strides]
        self.block_shape = [int(n) for n in block]
        if min(self.shape) < 1:
            raise Fault(f"{_now.where()}: a TMA descriptor of {self.shape}")

    @property
    def bytes(self) -> int:
        return int(np.prod(self.block_shape)) * self.dtype.primitive_bitwidth // 8

    def block(self, at: Any) -> tuple[Pointer, np.ndarray]:
        """Return the pointers to a block's elements, and whether they are in the matrix."""
        inside, places = np.asarray(True), np.asarray(0)
        for first, block, size, stride in zip(at, self.block_shape, self.shape, self.strides):
            index = int(first) + np.arange(block)
            inside = inside[..., None] & (index >= 0) & (index < size)
            places = places[..., None] + index * stride
        return self.base + places, inside


class Load:
    """A TMA load that is under way."""

    def __init__(self, source: Descriptor, at: Any, bar: Barrier, target: Shared) -> None:
        self.bytes, self.bar, self.target = source.bytes, bar, target
        self.pointers, self.inside = source.block(at)
        self.pointers.check(self.inside, Argument.check_load)
        self.who = f"the TMA load of {_now.where()}"
        _now.copied += 1
        self.event = (_now.copied, 1)
        self.clock = _joined(_now.now.clock, dict([self.event]))
        bar.cell.read(self.who, self.event, True)
        for cell in target.cells:
            cell.write(self.who, self.event, True)
        target.data[...] = np.nan

    def arrive(self) -> None:
        data = self.target.data
        data[...] = self.pointers.load(self.inside).reshape(data.shape)
        self.bar.arrive(self.clock, 0, -self.bytes)


class Product:
    """A wgmma that is under way, and its result, which a wait turns into a value."""

    def __init__(self, a: Any, b: Shared, sums: Any, adds: bool) -> None:
        self.operands, self.sums, self.adds = (a, b), sums, adds
        self.who = f"the wgmma of {_now.where()}"
        self.done: Event | None = None
        for x in self.operands:
            for cell in x.cells if isinstance(x, Shared) else ():
                cell.read(self.who, self, True)

    def finish(self) -> None:
        a, b = (x.data.astype(np.float32) for x in self.operands)
        self.value = a @ b
        if self.adds:
            sums = self.sums
            self.value = self.value + (sums.value if isinstance(sums, Product) else sums.data)
        self.done = _now.now.tick()

    def used(self, *_: Any) -> Any:
        raise Fault(f"{_now.where()} uses the result of {self.who} before a wait")

    __add__ = __sub__ = __mul__ = __rmul__ = __neg__ = used
    to = used


# ------------------------------------------------------------------------------------ the language


def _same(a: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
    """Convert two operands to one dtype; a Python number takes that of the other one."""
    a, b = _raw(a), _raw(b)
    number = b if isinstance(a, np.ndarray) else a
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        kind = np.float32 if np.float32 in (a.dtype, b.dtype) else np.result_type(a, b)
    else:
        kind = next((x.dtype for x in (a, b) if isinstance(x, np.ndarray)), None)
        if kind is None or (kind.kind in "iu" and isinstance(number, float)):
            kind = np.float32 if isinstance(number, float) else np.int32
    return np.asarray(a, kind), np.asarray(b, kind)


def _fma(a: Any, b: Any, c: Any) -> Value:
    exact = _raw(a).astype(np.float64) * _raw(b).astype(np.float64) + _raw(c)
    return Value(exact.astype(np.float32))


def _high(a: Any, b: Any) -> Value:
    product = np.asarray(_raw(a)).astype(np.uint64) * np.uint64(_raw(b))
    return Value((product >> np.uint64(32)).astype(np.uint32))


def _by_numpy(function: Callable[..., Any]) -> Any:
    return staticmethod(lambda *args, **_: Value(function(*map(_raw, args))))


def _layout(*_: Any, **__: Any) -> None:
    """Stands for every layout: the simulator has none."""


_layout.get_default_for = _layout  # type: ignore[attr-defined]


class Language:
    """What stands for `gl` and `tl`."""

    constexpr = staticmethod(lambda x: x)
    SliceLayout = DotOperandLayout = BlockedLayout = staticmethod(_layout)
    SwizzledSharedLayout = NVMMASharedLayout = staticmethod(_layout)
    range = staticmethod(lambda *n: range(*map(int, n)))
    static_range = staticmethod(lambda *n: range(*map(int, n)))
    program_id = staticmethod(lambda axis: Value(np.int32(_now.program[axis])))
    num_warps = staticmethod(lambda: 4)
    num_programs = staticmethod(lambda axis: Value(np.int32(_now.grid[axis])))
    cdiv = staticmethod(lambda a, b: (a + (b - 1)) // b)
    arange = staticmethod(lambda a, b, layout=None: Value(np.arange(a, b, dtype=np.int32)))
    zeros = staticmethod(lambda shape, dtype, layout: Language.full(shape, 0, dtype, layout))
    full_like = staticmethod(lambda x, value: Value(np.full_like(_raw(x), value)))
    expand_dims = staticmethod(lambda x, axis: Value(np.expand_dims(_raw(x), axis)))
    convert_layout = staticmethod(lambda x, layout: Value(_raw(x)))
    broadcast = staticmethod(lambda a, b: [*map(Value, np.broadcast_arrays(_raw(a), _raw(b)))])
    where = staticmethod(lambda c, a, b: Value(np.where(_raw(c), *_same(a, b))))
    # As on a GPU, the minimum and the maximum of NaN and a number are the number.
    minimum = staticmethod(lambda a, b: Value(np.fmin(*_same(a, b))))
    max = staticmethod(lambda x, axis: Value(np.fmax.reduce(_raw(x), axis)))
    sum = staticmethod(lambda x, axis: Value(np.sum(_raw(x), axis, dtype=_raw(x).dtype)))
    join = staticmethod(lambda a, b: Value(np.stack(np.broadcast_arrays(_raw(a), _raw(b)), -1)))
    exp2, log2, abs = map(_by_numpy, (np.exp2, np.log2, np.abs))
    mul, add = map(_by_numpy, (np.multiply, np.add))
    fma, umulhi = staticmethod(_fma), staticmethod(_high)

    PropagateNan = tl.PropagateNan

    @staticmethod
    def multiple_of(x: Value, n: int) -> Value:
        if np.any(x.data % n):
            raise Fault(f"{_now.where()}: {x.data} is no multiple of {n}")
        return x

    @staticmethod
    def maximum(a: Any, b: Any, propagate_nan: Any = tl.PropagateNan.NONE) -> Value:
        keeps_nan = propagate_nan == tl.PropagateNan.ALL
        return Value((np.maximum if keeps_nan else np.fmax)(*_same(a, b)))

    @staticmethod
    def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Value:
        return Value(np.full(shape, _raw(value), _NUMPY[dtype.name]))

    @staticmethod
    def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Value:
        _now.step()
        exists = np.broadcast_to(True if mask is None else _raw(mask), pointer.offset.shape)
        pointer.check(exists, Argument.check_load)
        found = pointer.load(exists)
        return Value(np.where(exists, found, np.asarray(other, found.dtype)))

    @staticmethod
    def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
        _now.step()
        exists = np.broadcast_to(True if mask is None else _raw(mask), pointer.offset.shape)
        pointer.check(exists, Argument.check_store)
        pointer.store(exists, np.broadcast_to(_raw(value), pointer.offset.shape))

    @staticmethod
    def allocate_shared_memory(dtype: Any, shape: Any, layout: Any) -> Shared | Several:
        """Make shared memory. Its name is how the line begins that asks for it, in the kernel or in
        a function that the kernel calls.
        """
        lines = [frame.f_globals["_line"](frame) for frame in _frames()]
        name = lines[-2:][0].split("=")[0].strip()
        names = [f"{name}[{i}]" for i in range(shape[0])]
        if dtype.name == "int64":
            return Several([Barrier(n) for n in names])
        kind = np.int32 if dtype.name == "int32" else np.float32
        data = np.full([int(n) for n in shape], np.nan if kind == np.float32 else -1, kind)
        return Shared(data, [Cell(n) for n in names], dtype)

    @staticmethod
    def warp_specialize(work: Any, warps: Any = None, registers: Any = None) -> None:
        """The parts are numbered if a function has more than one."""
        names = [function.__name__.strip("_") for function, _ in work]
        seen = [
            f"{n} {names[:i].count(n)}" * (names.count(n) > 1) or n for i, n in enumerate(names)
        ]
        parts = zip(seen, work)
        _now.fork([(name, lambda f=f, args=args: f(*args)) for name, (f, args) in parts])


Language.math = Language  # type: ignore[attr-defined]
for _dtype in [n for n in _NUMPY if "int" in n] + ["float32", "bfloat16", "float16"]:
    setattr(Language, _dtype, getattr(gl, _dtype))


class Mbarrier:
    """What stands for `mbarrier`."""

    MBarrierLayout = staticmethod(_layout)
    init = staticmethod(lambda bar, count: bar.init(int(count)))

    @staticmethod
    def expect(bar: Barrier, bytes: Any, pred: Any = True) -> None:
        Mbarrier.arrive(bar, 1, pred, int(bytes))

    @staticmethod
    def arrive(bar: Barrier, count: int = 1, pred: Any = True, bytes: int = 0) -> None:
        _now.step()
        if pred:
            _now.now.tick()
            bar.arrive(dict(_now.now.clock), count, bytes)

    @staticmethod
    def wait(bar: Barrier, phase: Any, pred: Any = True) -> None:
        if pred:
            _now.wait(bar, int(phase))


class Tma:
    """What stands for `tma`."""

    make_tensor_descriptor = staticmethod(Descriptor)

    @staticmethod
    def store_wait(pendings: int) -> None:
        _now.step()
        stores = _now.now.stores
        while len(stores) > pendings:
            pointers, inside, source = stores.pop(0)
            pointers.store(inside, source.data.reshape(inside.shape))


def copy_in(source: Descriptor, at: Any, bar: Barrier, target: Shared, pred: Any = True) -> None:
    _now.step()
    if pred:
        load = Load(source, at, bar, target)
        _now.loads.append(load)
        _now.copies.append(load)


def copy_out(target: Descriptor, at: Any, source: Shared) -> None:
    _now.step()
    for cell in source.cells:
        cell.read(f"the TMA store of {_now.where()}", _now.now.tick(), True)
    pointers, inside = target.block(at)
    pointers.check(inside, Argument.check_store)
    _now.now.stores.append((pointers, inside, source))


def multiply(a: Any, b: Shared, acc: Any, use_acc: Any = True, is_async: bool = False) -> Any:
    _now.step()
    product = Product(a, b, acc, bool(use_acc))
    _now.now.products.append(product)
    return product if is_async else multiply_wait(0, [product])


def multiply_wait(num_outstanding: int, deps: Any) -> Any:
    _now.step()
    products = _now.now.products
    while len(products) > num_outstanding:
        products.pop(0).finish()
    found = [Value(x.value) if isinstance(x, Product) and x.done else x for x in deps]
    return found[0] if len(found) == 1 else tuple(found)


def fence(cluster: bool = False) -> None:
    """What this thread knows to have happened is now seen by asynchronous accesses."""
    _now.step()
    for cell in _now.cells:
        cell.plain = [event for event in cell.plain if not _happened(event, _now.now.clock)]


_REPLACED: dict[int, Any] = {
    id(gl): Language,
    id(tl): Language,
    id(hopper.mbarrier): Mbarrier,
    id(hopper.tma): Tma,
    id(hopper.warpgroup_mma): multiply,
    id(hopper.warpgroup_mma_wait): multiply_wait,
    id(hopper.fence_async_shared): fence,
}
for _names, _stand_in in (
    (("async_load", "async_copy_global_to_shared"), copy_in),
    (("async_store", "async_copy_shared_to_global"), copy_out),
):
    _REPLACED |= {id(getattr(hopper.tma, n)): _stand_in for n in _names if hasattr(hopper.tma, n)}


# ------------------------------------------------------------------------------------- the kernel


def _assigned(x: Any) -> Any:
    """Return what Gluon makes of a Python number that is assigned: a scalar of the GPU."""
    kinds = {bool: np.bool_, int: np.int32, float: np.float32}
    return Value(kinds[type(x)](x)) if type(x) in kinds else x


def _in_groups(change: Callable[[Any], Any], x: Any) -> Any:
    """Apply `change` to x, or to each field of a group."""
    if not isinstance(x, tuple):
        return change(x)
    fields = [_in_groups(change, field) for field in x]
    return type(x)(*fields) if hasattr(x, "_fields") else tuple(fields)


def _plain(x: Any) -> Any:
    return _in_groups(lambda field: getattr(field, "value", field), x)


class _Rewrite(ast.NodeTransformer):
    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        if isinstance(node.targets[0], ast.Name):
            node.value = ast.Call(ast.Name("_assigned", ast.Load()), [node.value], [])
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = []
        for argument in node.args.args:
            argument.annotation = None
        return self.generic_visit(node)


class Kernel:
    """A @gluon.jit function and those that it calls, made to run here. `others` take the place of
    functions of that name.
    """

    def __init__(self, kernel: Any, others: Mapping[str, Any] | None = None) -> None:
        self.others = others or {}
        self.made: dict[Any, Callable[..., Any]] = {}
        self.constants = {p.name for p in kernel.params if p.is_constexpr}
        self.kernel = self._function(kernel.fn)

    def run(self, arguments: Mapping[str, Any], grid: tuple[int, ...], seed: int = 0) -> None:
        """Run the programs of a grid of up to three axes one after the other, each with a schedule
        that follows from the seed. Tensors are given as `Pointer`, in groups as a launch has them.
        """
        global _now
        given = {
            n: _plain(x) if n in self.constants else _in_groups(_assigned, x)
            for n, x in arguments.items()
        }
        grid = (*grid, 1, 1)[:3]
        for program in np.ndindex(grid):
            _now = Simulation(program, grid, seed)
            with np.errstate(all="ignore"):
                self.kernel(**given)

    def _function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if function in self.made:
            return self.made[function]
        name = function.__name__
        lines, first = inspect.getsourcelines(function)
        text = textwrap.dedent("".join(lines))
        lines = text.splitlines()
        scope: dict[str, Any] = {}
        # Calls go through the scope, so that functions may call each other.
        self.made[function] = lambda *args, **named: scope[name](*args, **named)
        self.made[function].__name__ = name
        names = {**function.__globals__, **self.others}
        scope |= {key: self._replaced(names[key]) for key in function.__globals__}
        scope |= {"_assigned": _assigned, "_line": lambda frame: lines[frame.f_lineno - first]}
        tree = ast.fix_missing_locations(_Rewrite().visit(ast.parse(text)))
        ast.increment_lineno(tree, first - 1)  # a line is that of the file, as coverage has it
        exec(compile(tree, str(inspect.getsourcefile(function)), "exec"), scope)
        return self.made[function]

    def _replaced(self, value: Any) -> Any:
        if id(value) in _REPLACED:
            return _REPLACED[id(value)]
        kind = type(value).__name__
        if isinstance(value, JITFunction) or kind == "InterpretedFunction":
            return self._function(value.fn)
        if kind == "ConstexprFunction":
            return lambda *args: value.fn(*map(_plain, args))
        return value.value if kind == "constexpr" else value
