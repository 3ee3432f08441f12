"""Checks every access to memory of the kernels that run in Triton's interpreter.

Within `checked()` a launch raises `AccessError` unless

1. each load and store falls on an element of the tensor that its pointer comes from, by the
   sizes and strides of the tensor: not past its end, not between its rows, not in another tensor;
2. no element is stored twice, by two programs or by one;
3. no program loads an element that is stored in this launch, by another program at any time or by
   itself before. (It may load an element, and then store it.)
4. there is no atomic, as the order of additions would change the bits.

On a GPU the programs run in any order, and the first fault may corrupt memory without an error.
Rules 2 and 3 also apply where tensors share memory. Instead of them, of the tensors in a group of
arguments named `scratch`

5. each element is used by one program alone, which stores it before it loads it, with a barrier
   (`tl.debug_barrier`) in between: another thread of the program may be the one that loads.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as ti
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

Program = tuple[int, ...]

MOST_PENDING = 2**22  # offsets that are kept, 8 bytes each


class AccessError(AssertionError):
    """What a kernel does wrong, in words."""


@functools.lru_cache(4096)
def _layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, list[tuple[int, int]]]:
    """Return how many elements of memory a tensor spans, and its gaps from the widest on: of
    `stride` elements of memory, only the first `length` belong to it.
    """
    span, gaps = 1, []
    for stride, size in sorted(zip(strides, shape)):
        if size > 1 and stride > span:
            gaps.append((stride, span))
        elif size > 1 and 0 < stride < span and gaps:
            interleaved = sum(stride * (size - 1) for stride, size in zip(strides, shape))
            return 1 + interleaved, []  # no tensor of the project is: only the range is checked
        span += stride * (size - 1)
    return span if math.prod(shape) else 0, gaps[::-1]


class Memory:
    """Who has accessed which element of a memory, in one launch."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.stored: np.ndarray | None = None  # 0, or when: as many elements had been stored then
        self.stores: list[tuple[int, Program]] = []  # how many had been stored after each
        self.numbers: dict[Program, int] = {}  # from 1
        self.loaded: np.ndarray | None = None  # 0, the number of the only program, or -1
        self.pending: list[tuple[int, np.ndarray]] = []  # loads that are not in `loaded`
        self.waiting = 0

    def load(self, places: np.ndarray, program: Program) -> tuple[int, str] | None:
        """Return which of the places must not be loaded, and why."""
        if self.stored is not None and (when := self.stored[places]).any():
            at = int((when > 0).argmax())
            return at, f"which {self._storer(when[at], program)} has stored in this launch"
        number = self.numbers.setdefault(program, len(self.numbers) + 1)
        self.pending.append((number, places))
        self.waiting += places.size
        if self.waiting > MOST_PENDING:
            self._enter_loads()
        return None

    def store(self, places: np.ndarray, program: Program) -> tuple[int, str] | None:
        """Return which of the places must not be stored, and why."""
        if self.stored is None:
            self.stored = np.zeros(self.size, np.int32)
        if (when := self.stored[places]).any():
            at = int((when > 0).argmax())
            return at, f"which {self._storer(when[at], program)} has stored in this launch"
        count = self.stores[-1][0] if self.stores else 0
        when = np.arange(count + 1, count + 1 + places.size, dtype=np.int32)
        self.stored[places] = when
        if (twice := self.stored[places] != when).any():
            return int(twice.argmax()), "which the same instruction stores twice"
        self.stores.append((count + places.size, program))
        self._enter_loads()
        if self.loaded is not None:
            readers = self.loaded[places]
            number = self.numbers.setdefault(program, len(self.numbers) + 1)
            if (others := (readers != 0) & (readers != number)).any():
                return int(others.argmax()), "which another program has loaded in this launch"
        return None

    def _storer(self, when: int, program: Program) -> str:
        (_, storer) = self.stores[bisect.bisect_left(self.stores, (int(when),))]
        return "the same program" if storer == program else f"program {storer}"

    def _enter_loads(self) -> None:
        if self.pending and self.loaded is None:
            self.loaded = np.zeros(self.size, np.int32)
        for number, places in self.pending:
            known = self.loaded[places]  # type: ignore[index]
            alone = (known == 0) | (known == number)
            self.loaded[places] = np.where(alone, number, -1)  # type: ignore[index]
        self.pending, self.waiting = [], 0


class Scratch(Memory):
    """Memory of which each element belongs to one program (rule 5)."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.owners = np.zeros(size, np.int32)  # 0, or the number of the program
        self.when = np.zeros(size, np.int64)  # how many barriers came before the last store

    def load(self, places: np.ndarray, program: Program) -> tuple[int, str] | None:
        """Return which of the places must not be loaded, and why."""
        owners, number = self.owners[places], self._number(program)
        if (others := owners != number).any():
            at = int(others.argmax())
            return at, "which another program uses" if owners[at] else "which nobody has stored"
        if (early := self.when[places] == barriers()).any():
            return int(early.argmax()), "which it has stored behind the last barrier"
        return None

    def store(self, places: np.ndarray, program: Program) -> tuple[int, str] | None:
        """Return which of the places must not be stored, and why."""
        number = self._number(program)
        if (others := (self.owners[places] != 0) & (self.owners[places] != number)).any():
            return int(others.argmax()), "which another program uses"
        self.owners[places], self.when[places] = number, barriers()
        return None

    def _number(self, program: Program) -> int:
        return self.numbers.setdefault(program, len(self.numbers) + 1)


class Argument:
    """A tensor that a kernel is given.

    Args:
        name: The name of the kernel's parameter, and of the field if that is a group.
        x: The tensor.
        who: What runs, in words, for errors: a kernel, a program, a line.
    """

    def __init__(self, name: str, x: Tensor, who: Callable[[], str]) -> None:
        self.name, self.who = name, who
        self.shape, self.strides, self.dtype = tuple(x.shape), x.stride(), x.dtype
        self.item = x.element_size()
        self.start = x.data_ptr()
        self.span, self.gaps = _layout(self.shape, self.strides)
        kind = Scratch if name.startswith("scratch.") else Memory
        self.place_in(kind(self.span), self.start, self.item)

    def place_in(self, memory: Memory, start: int, unit: int) -> None:
        """Let the tensor lie in a memory that starts at an address, of elements of `unit` bytes."""
        self.memory, self.first = memory, (self.start - start) // unit
        self.units = self.item // unit

    def check_bounds(self, offsets: np.ndarray, does: str) -> None:
        """Check that the offsets, in elements from the first one, are those of elements."""
        low, high = int(offsets.min()), int(offsets.max())
        if high >= self.span:
            offset = int(offsets[offsets >= self.span].min())
            place = f"{offset + 1 - self.span} past its last element"
        elif low < 0:
            offset = int(offsets[offsets < 0].max())
            place = f"{-offset} before its first element"
        else:
            rest = offsets
            for stride, length in self.gaps:
                rest = rest % stride
                if (outside := rest >= length).any():
                    offset, place = int(offsets[outside.argmax()]), "between its elements"
                    break
            else:
                return
        raise AccessError(f"{self.who()} {does} {self._element(offset)}, {place}")

    def check_load(self, offsets: np.ndarray, program: Program) -> None:
        """Check a load of elements by a program."""
        self.check_bounds(offsets, "loads")
        self._check_conflicts(self.memory.load, "loads", offsets, program)

    def check_store(self, offsets: np.ndarray, program: Program) -> None:
        """Check a store to elements by a program."""
        self.check_bounds(offsets, "stores")
        self._check_conflicts(self.memory.store, "stores", offsets, program)

    def _check_conflicts(
        self, access: Callable[..., Any], does: str, offsets: np.ndarray, program: Program
    ) -> None:
        places = offsets * self.units + self.first
        if self.units > 1:
            places = (places[:, None] + np.arange(self.units)).reshape(-1)
        if conflict := access(places, program):
            at, why = conflict
            element = self._element(int(offsets[at // self.units]))
            raise AccessError(f"{self.who()} {does} {element}, {why}")

    def _element(self, offset: int) -> str:
        """Name an element by its index, which an offset out of bounds leaves at some dimension."""
        index, rest = [0] * len(self.shape), offset
        for stride, dim in sorted(((n, d) for d, n in enumerate(self.strides) if n), reverse=True):
            if self.shape[dim] > 1:
                index[dim], rest = divmod(rest, stride)
        after = f" + {rest}" if rest else ""
        layout = f"shape {list(self.shape)}, strides {list(self.strides)}, {self.dtype}"
        return f"{self.name}{index}{after} ({layout})"


class _Pointer(tl.pointer_type):
    """The type of pointers that come from an argument, whatever is added to them."""

    def __init__(self, element_ty: Any, argument: Argument) -> None:
        super().__init__(element_ty)
        self.argument = argument


class _Launch:
    """The launch that runs."""

    def __init__(self, kernel: Any, named: list[tuple[str, Tensor]]) -> None:
        self.kernel = kernel
        self.arguments = {id(x): Argument(name, x, self.who) for name, x in named}
        self.tensors = named  # kept, so that no other object has the id of one of them
        self.barriers = 0  # that the programs have passed
        self._share_memory()

    def _share_memory(self) -> None:
        """Let arguments whose memory overlaps share one."""
        groups: list[tuple[int, list[Argument]]] = []
        for x in sorted(self.arguments.values(), key=lambda x: x.start):
            if not x.span:
                continue
            end, group = groups[-1] if groups else (0, [])
            if x.start < end:
                groups[-1] = max(end, x.start + x.span * x.item), [*group, x]
            else:
                groups.append((x.start + x.span * x.item, [x]))
        for end, group in groups:
            if len(group) > 1:
                start, unit = group[0].start, min(x.item for x in group)
                memory = Memory((end - start) // unit)
                for x in group:
                    x.place_in(memory, start, unit)

    def who(self) -> str:
        """Name the kernel, the program, and the line that runs with those that call it."""
        of_kernels = {f.__code__ for f in ti.InterpretedFunction.rewritten_fn.values()}
        frame, lines = inspect.currentframe(), []
        while frame:
            if frame.f_code in of_kernels:
                place = "/".join(Path(frame.f_code.co_filename).parts[-2:])
                lines.append(f"{place}:{frame.f_lineno} in {frame.f_code.co_name}")
            frame = frame.f_back
        program = ti.interpreter_builder.grid_idx
        return f"{self.kernel.__name__}, program {program}, {', from '.join(lines)}:"

    def check(self, check: Callable[..., None], pointers: Any, mask: Any, *rest: Any) -> None:
        """Call `check(argument, offsets, *rest)` with what an access touches."""
        addresses, exists = pointers.data, np.asarray(mask.data, bool)
        if not exists.all():
            addresses = addresses[np.broadcast_to(exists, addresses.shape)]
            if not addresses.size:
                return
        if not isinstance(pointers.dtype, _Pointer):
            raise AccessError(f"{self.who()} uses a pointer that comes from no tensor")
        argument = pointers.dtype.argument
        size = max(1, pointers.dtype.element_ty.primitive_bitwidth // 8)
        offsets = (addresses.reshape(-1).view(np.int64) - argument.start) // argument.item
        if size > argument.item:  # a pointer that was converted to one of larger elements
            offsets = (offsets[:, None] + np.arange(size // argument.item)).reshape(-1)
        check(argument, offsets, *rest)


def _named(name: str, x: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an argument, with their names."""
    if isinstance(x, TensorDescriptor):
        yield from _named(name, x.base)
    elif isinstance(x, tuple):
        for field, part in zip(getattr(x, "_fields", range(len(x))), x):
            yield from _named(f"{name}.{field}", part)
    elif hasattr(x, "data_ptr"):
        yield name, x


_launch: _Launch | None = None  # the one that runs


def barriers() -> int:
    """Return how many barriers the programs of the launch have passed, each one in turn."""
    return 0 if _launch is None else _launch.barriers


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Return a context in which every launch in Triton's interpreter is checked."""
    before = []
    builder = ti.InterpreterBuilder
    replacements = ((builder, _of_accesses), (builder, _of_barriers), (ti, _of_arguments))
    for owner, make in ((ti.GridExecutor, _of_launches), *replacements):
        for name, function in make(owner).items():
            before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def _of_launches(executor: Any) -> dict[str, Any]:
    call, to_host = executor.__call__, executor._init_args_hst

    def run(self: Any, *given: Any, **named: Any) -> None:
        global _launch
        try:
            call(self, *given, **named)
        except ti.InterpreterError as error:
            cause: BaseException | None = error
            while cause and not isinstance(cause, AccessError):
                cause = cause.__cause__
            if cause:
                raise cause from None
            raise
        finally:
            _launch = None

    def arguments(self: Any, given: Any, named: Any) -> Any:
        global _launch
        host_given, host_named = to_host(self, given, named)
        pairs = [*zip(self.arg_names, host_given), *host_named.items()]
        _launch = _Launch(self.fn, [found for name, x in pairs for found in _named(name, x)])
        return host_given, host_named

    return dict(__call__=run, _init_args_hst=arguments)


def _of_arguments(interpreter: Any) -> dict[str, Any]:
    convert = interpreter._implicit_cvt

    def converted(x: Any) -> Any:
        value = convert(x)
        if _launch is not None and id(x) in _launch.arguments:
            value.handle.dtype = _Pointer(value.dtype.element_ty, _launch.arguments[id(x)])
        return value

    return dict(_implicit_cvt=converted)


def _of_accesses(builder: Any) -> dict[str, Any]:
    load, store, bitcast = (
        builder.create_masked_load,
        builder.create_masked_store,
        builder.create_bitcast,
    )

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        if _launch is not None:
            _launch.check(Argument.check_load, pointers, mask, self.grid_idx)
        return load(self, pointers, mask, *rest, **named)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if _launch is not None:
            _launch.check(Argument.check_store, pointers, mask, self.grid_idx)
        return store(self, pointers, value, mask, *rest)

    def atomic(self: Any, *_: Any) -> Any:
        assert _launch is not None
        raise AccessError(f"{_launch.who()} has an atomic")

    def bitcast_pointer(self: Any, source: Any, target: Any) -> Any:
        result = bitcast(self, source, target)
        if isinstance(source.dtype, _Pointer) and target.is_ptr():
            result.dtype = _Pointer(target.element_ty, source.dtype.argument)
        return result

    return dict(
        create_masked_load=checked_load,
        create_masked_store=checked_store,
        create_atomic_rmw=atomic,
        create_atomic_cas=atomic,
        create_bitcast=bitcast_pointer,
    )


def _of_barriers(builder: Any) -> dict[str, Any]:
    def barrier(self: Any) -> None:
        if _launch is not None:
            _launch.barriers += 1

    return dict(create_barrier=barrier)
