"""Calls ops on a GPU that is not there, and checks each launch: the driver is
benchmarks/gpu/stand_in.

    python gpu_path_worker.py FD FOLDER

test_gpu_path.py starts it, and talks to it over a pipe:

    (what, arguments, compute)   in: a method of `Worker`. With `compute` what is launched is
                                 computed and held to the oracle; else the launches alone are
                                 looked at.
    ("launch", job)              out: to be computed; what is in its memory afterwards comes back
    ("done", report)             out: what was wrong, and how much was launched

A process of its own, because Triton's interpreter, once chosen, holds for the whole process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import struct
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
os.environ["TRITON_INTERPRET"] = "0"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "ops"), str(ROOT)]

import calls
import gpu_path_cases as cases
import test_fuzz
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

import conftest
import fastformer as ff
from benchmarks.gpu import stand_in

SCALARS = {
    "i1": "b", "u1": "B", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I",
    "i64": "q", "u64": "Q", "fp16": "e", "fp32": "f", "fp64": "d",
}  # fmt: skip
ELEMENTS = {
    "i1": torch.bool, "u1": torch.bool, "u8": torch.uint8, "i8": torch.int8, "i16": torch.int16,
    "i32": torch.int32, "i64": torch.int64, "fp16": torch.float16, "bf16": torch.bfloat16,
    "fp32": torch.float32,
}  # fmt: skip

# ------------------------------------------------------------------------------ reading a launch


def leaves(
    names: Sequence[str],
    kinds: tuple[Any, ...],
    given: tuple[Any, ...],
    path: tuple[int, ...] = (),
    before: str = "",
) -> Iterator[tuple[tuple[int, ...], str, str, Any]]:
    """(path, name, type, argument) of each argument, of a group's fields one by one: in the order
    in which the driver gets them. The names of the fields are those that were compiled: what is
    given may be a plain tuple.
    """
    assert len(kinds) == len(given), f"{len(given)} arguments at {path}; {len(kinds)} are compiled"
    for i, (name, kind, argument) in enumerate(zip(names, kinds, given)):
        if isinstance(kind, tuple):
            yield from leaves(kind._fields, kind, argument, (*path, i), f"{before}{name}.")
        else:
            yield (*path, i), before + name, kind, argument


def plain(constant: Any) -> Any:
    """A constant without Triton's wrapper; of a group, a tuple of its fields'."""
    if isinstance(constant, tuple):
        return tuple(map(plain, constant))
    return constant.value if isinstance(constant, tl.constexpr) else constant


class Memory:
    """The storages of a launch's tensors, as bytes."""

    def __init__(self) -> None:
        self.index: dict[int, int] = {}  # by address
        self.storages: list[bytes] = []

    def place(self, x: Tensor) -> tuple[str, int, int, torch.dtype]:
        """How a job names a pointer: ("pointer", which storage, byte in it, type of what it
        points to).
        """
        storage = x.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        if start not in self.index:
            self.index[start] = len(self.storages)
            self.storages.append(ctypes.string_at(start, size) if size else b"")
        return "pointer", self.index[start], x.data_ptr() - start, x.dtype

    def write(self, storages: list[bytes]) -> None:
        for (start, i), old in zip(self.index.items(), self.storages):
            assert len(storages[i]) == len(old)
            ctypes.memmove(start, storages[i], len(old))


def check_map(given: Any, name: str, parameters: Iterator[bytes], check: Any) -> None:
    """A TMA descriptor that the host has made is that of its tensor, as libcuda.c writes it down.
    Sizes and strides follow as numbers.
    """
    shape, strides, size = [*given.shape], [*given.strides], given.base.element_size()
    rank = len(shape)
    words = struct.unpack("<16Q", next(parameters, b"").ljust(128))
    found = words[:2], [*words[2 : 2 + rank]], [*words[8 : 7 + rank]]
    steps = [n * size for n in strides[-2::-1]]
    expected = (given.base.data_ptr(), rank), shape[::-1], steps
    check(found == expected, f"the descriptor {name} is {found}, given {expected}")
    rest = [next(parameters, b"") for _ in range(2 * rank)]
    check(b"".join(rest) == struct.pack(f"<{rank}i{rank}q", *shape, *strides), f"sizes of {name}")


class Launches:
    """Looks at each launch and has it computed."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.compute = True
        self.problems: list[str] = []
        self.stream = 0  # what the launches are to go to
        self.failing = False  # whether launches are to fail
        self.kernels: dict[int, str] = {}  # by function: the hash of what was compiled
        self.allocated: Any = None  # the last scratch memory, its size and its stream
        set_allocator = triton.set_allocator

        def watched(allocate: Callable[..., Tensor]) -> None:
            def allocated(size: int, alignment: int, stream: int) -> Tensor:
                assert alignment <= 512, "torch aligns memory of a GPU to 512 bytes"
                self.allocated = allocate(size, alignment, stream), size, stream
                return self.allocated[0]

            set_allocator(allocated)

        triton.set_allocator = watched

    def load(self, module: int, function: int, name: str, files: Any, hash: str) -> None:
        self.kernels[function] = hash

    def see(self, launch: stand_in.Launch) -> None:
        if self.failing:
            raise RuntimeError("this launch was to fail")
        before = len(self.problems)
        values = self.read(launch)
        if self.compute and len(self.problems) == before:
            self.run(launch, values)

    def read(self, launch: stand_in.Launch) -> dict[tuple[int, ...], Any]:
        """What the driver was given for each argument, checked against what was compiled."""

        def check(right: bool, problem: str) -> None:
            if not right:
                self.problems.append(f"{launch.name}: {problem}")

        source, metadata = launch.source, launch.metadata
        warps, shared = metadata.num_warps, metadata.shared
        check(self.kernels[launch.function] == metadata.hash, "another kernel's function")
        check(launch.block == (32 * warps, 1, 1), f"block {launch.block}, of {warps} warps")
        check(launch.shared == shared, f"shared memory {launch.shared}, compiled for {shared}")
        check(launch.stream == self.stream, f"stream {launch.stream}, expected {self.stream}")
        check(launch.attributes == 0, f"{launch.attributes} attributes, expected none")

        values: dict[tuple[int, ...], Any] = {}
        parameters = iter(launch.parameters)
        kinds = tuple(source.signature.values())
        for path, name, kind, given in leaves(source.fn.arg_names, kinds, launch.arguments):
            if kind == "constexpr":
                values[path] = source.constants[path]
                value, given = plain(values[path]), plain(given)
                check(value == given, f"{name} is compiled as {value}, given {given}")
                continue
            if kind.startswith("tensordesc"):
                check_map(given, name, parameters, check)
                continue
            pointer, raw = kind[0] == "*", next(parameters, b"")
            form = "<Q" if pointer else "<" + SCALARS[kind]
            if len(raw) != struct.calcsize(form):
                check(False, f"{name}, {kind}: {len(raw)} bytes are read")
                break
            (value,) = struct.unpack(form, raw)
            if pointer:
                expected, dtype = given.data_ptr(), ELEMENTS[kind[1:]]
                check(given.dtype == dtype, f"{name} is compiled for {dtype}, given {given.dtype}")
            else:
                expected = given
                with contextlib.suppress(struct.error):  # it does not fit, and is not what arrived
                    (expected,) = struct.unpack(form, struct.pack(form, given))
            check(value == expected, f"{name} is {value}, given {expected}")
            for attribute, n in source.attrs.get(path, ()):
                check(attribute == "tt.divisibility", f"{name}: what is {attribute}?")
                check(value % n == 0, f"{name} = {value} is compiled as a multiple of {n}")
            values[path] = value
        rest = tuple(parameters)  # scratch memory, global and the profiler's
        scratch = [any(pointer) for pointer in rest]
        expected = [metadata.global_scratch_size > 0, False]
        check(scratch == expected, f"scratch memory is given: {scratch}, expected {expected}")
        if any(scratch):
            self.check_scratch(launch, int.from_bytes(rest[0], "little"), check)
        return values

    def check_scratch(self, launch: stand_in.Launch, address: int, check: Any) -> None:
        """The memory where the programs make their descriptors is there until the launch, has room
        for all, and is a stream's own.
        """
        given, size, stream = self.allocated
        programs = launch.grid[0] * launch.grid[1] * launch.grid[2]
        needed = programs * launch.metadata.global_scratch_size
        check(address == given.data_ptr(), "scratch memory that nobody has allocated")
        check(
            size == needed == given.nbytes,
            f"{given.nbytes} bytes of scratch memory, {needed} needed",
        )
        check(stream == launch.stream, f"scratch memory of stream {stream}")
        self.allocated = None

    def run(self, launch: stand_in.Launch, values: dict[tuple[int, ...], Any]) -> None:
        """Has it computed, from the values that the driver got."""
        memory = Memory()

        def rebuilt(kinds: tuple[Any, ...], given: tuple[Any, ...], path: tuple[int, ...]) -> Any:
            items = []
            for i, (kind, argument) in enumerate(zip(kinds, given)):
                here = (*path, i)
                if isinstance(argument, TensorDescriptor):
                    form = tuple(argument.shape), tuple(argument.strides), argument.block_shape
                    items.append(("map", memory.place(argument.base), *form))
                elif isinstance(kind, tuple):
                    items.append(type(kind)(*rebuilt(kind, argument, here)))
                else:
                    value = values[here]
                    items.append(memory.place(argument) if kind[0] == "*" else value)
            return tuple(items)

        function = launch.source.fn.fn
        arguments = rebuilt(tuple(launch.source.signature.values()), launch.arguments, ())
        job = function.__module__, function.__name__, launch.grid, memory.storages, arguments
        self.pipe.send(("launch", job))
        storages = self.pipe.recv()
        if isinstance(storages, str):
            self.problems.append(f"{launch.name}: {storages}")
        else:
            memory.write(storages)


# --------------------------------------------------------------------------------------- the calls


class Worker:
    def __init__(self, pipe: Connection, folder: Path) -> None:
        self.launches = Launches(pipe)
        self.gpu = stand_in.install(folder, self.launches.see)
        triton.knobs.runtime.kernel_load_end_hook.add(self.launches.load)
        if not hasattr(CompiledKernel, "__del__"):  # Triton 3.9's unloads its module
            CompiledKernel.__del__ = lambda kernel: self.unload(kernel)
        self.streams = itertools.count(0x5EED)
        self.through_triton = 0
        self.kernels: set[Any] = set()
        run = JITFunction.run

        def counted(function: Any, *arguments: Any, **options: Any) -> Any:
            self.through_triton += 1
            self.kernels.add(function)
            return run(function, *arguments, **options)

        JITFunction.run = counted

    def unload(self, kernel: Any) -> None:
        if kernel.module is not None:
            self.gpu.unload(kernel.module)

    def check(self, call: Callable[..., Tensor], tensors: cases.Tensors, **options: Any) -> None:
        """The call, forward and backward, against the oracle."""
        if self.launches.compute:
            conftest.check_against_oracle(call, tensors, small=True, **options)
            return
        leaves = {n: x.requires_grad_() for n, x in tensors.items() if x.is_floating_point()}
        output = call(**{**tensors, **leaves}, **options)
        torch.autograd.grad(output, list(leaves.values()), torch.randn_like(output))

    @contextlib.contextmanager
    def nothing_new(self) -> Iterator[None]:
        """Nothing is compiled or loaded within, nor does a launch go through Triton."""
        loaded, through_triton = self.gpu.loaded, self.through_triton
        yield
        assert self.gpu.loaded == loaded, f"{self.gpu.loaded - loaded} kernels are loaded again"
        again = self.through_triton - through_triton
        assert again == 0, f"{again} launches that are known go through Triton"

    def call(self, case: cases.Case, layout: str, seed: int) -> None:
        """Forward and backward, on a stream of its own."""
        self.gpu.stream = self.launches.stream = next(self.streams)
        torch.manual_seed(seed)
        given = cases.laid_out(case.make() | case.fixed(), layout)
        fixed = {n: given.pop(n) for n in case.fixed()}
        torch.manual_seed(len(layout))  # the layout of the gradient follows that of the tensors
        self.check(cases.watched(case.call, layout), given, **fixed, **case.options)

    def case(self, name: str) -> None:
        """Each layout, and then each once more, when all of them are known."""
        case = cases.CASES[name]
        for known in (False, True):
            with self.nothing_new() if known else contextlib.nullcontext():
                for i, layout in enumerate(case.layouts):
                    self.call(case, layout, seed=2 * i + known)

    def drawn(self, op: str, count: int) -> None:
        """Calls as test_fuzz.py draws and checks them, without float64, which a GPU's kernels do
        not take.
        """
        self.gpu.stream = self.launches.stream = next(self.streams)
        for seed in range(count):
            draw = calls.Draw(seed, "cpu")
            if draw.dtype == torch.float64:
                draw.dtype = torch.float32
            test_fuzz.check(getattr(calls, op), draw, "triton", contextlib.nullcontext())

    def error(self, name: str, other: str) -> None:
        """What is known still runs after a launch of another call has failed, and when Triton has
        forgotten its kernels.
        """
        case, failing = cases.CASES[name], cases.CASES[other]
        for seed in range(2):
            self.call(case, "dense", seed)
        self.launches.failing = True
        try:
            failing.call(**failing.make(), **failing.options)
        except RuntimeError as error:
            assert "this launch was to fail" in str(error), error
        else:
            raise AssertionError(f"{other}: the error of a launch is lost")
        finally:
            self.launches.failing = False
        with self.nothing_new():
            self.call(case, "dense", seed=2)
        for kernel in self.kernels:
            kernel.device_caches.clear()
        gc.collect()  # those that nothing else holds are unloaded
        with self.nothing_new():
            self.call(case, "dense", seed=3)

    def hooks(self, name: str, which: str) -> None:
        """A launch hook, as a profiler adds it, is told of launches that are known too."""
        case, hook = cases.CASES[name], getattr(triton.knobs.runtime, which)
        for seed in range(2):
            self.call(case, "dense", seed)
        before, told = self.gpu.launches, []
        hook.add(told.append)
        try:
            self.call(case, "dense", seed=2)
        finally:
            hook.remove(told.append)
        assert len(told) == self.gpu.launches - before, f"{len(told)} launches are told"
        with self.nothing_new():
            self.call(case, "dense", seed=3)

    def report(self, call: Callable[..., None], *arguments: Any) -> tuple[list[str], int]:
        """What was wrong, and how much was launched."""
        problems = self.launches.problems = []
        launches = self.gpu.launches
        try:
            call(*arguments)
        except BaseException:
            problems.append(traceback.format_exc())
        return list(dict.fromkeys(problems)), self.gpu.launches - launches


def main() -> None:
    pipe, folder = Connection(int(sys.argv[1])), Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # uninitialised memory is NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    worker = Worker(pipe, folder)
    ff.use_backend("triton")
    while True:
        try:
            what, arguments, worker.launches.compute = pipe.recv()
        except EOFError:
            return
        pipe.send(("done", worker.report(getattr(worker, what), *arguments)))


if __name__ == "__main__":
    main()
