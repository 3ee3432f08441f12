"""What the launchers share: cached launches, layouts, and facts about the device."""

from __future__ import annotations

import ast
import contextlib
import contextvars
import functools
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer.description import next_power_of_2 as next_power_of_2
from fastformer.plans import allow_tf32 as allow_tf32
from fastformer.plans import planned as planned

from .common import INTERPRETED

Group = TypeVar("Group", bound="tuple[Any, ...]")  # a NamedTuple


def unit_stride(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy if its last dimension is strided."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def as_rows(x: Tensor, n: int) -> Tensor:
    """Return x, or a copy if no view of x is a matrix [M, n] whose last stride is 1."""
    rows = unit_stride(x.reshape(-1, n))
    return x if rows.data_ptr() == x.data_ptr() else rows.view(x.shape)


def row_stride(x: Tensor, n: int) -> int:
    """Return the stride between the rows [n] of a tensor that `as_rows` returned."""
    return x.view(-1, n).stride(0)


def constants(group: Group) -> Group:
    """Mark each field of a NamedTuple as a compile-time constant, for a `tl.constexpr` group. The
    results are shared: thousands of launches may be remembered, but they use few kernels.
    """
    return _constants(type(group), tuple(group), tuple(map(type, group)))  # types: 1 == True


@functools.lru_cache(1024)
def _constants(kind: Callable[..., Group], fields: tuple[Any, ...], _: tuple[type, ...]) -> Group:
    return kind(*map(tl.constexpr, fields))


def _ungrouped(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace NamedTuples by plain tuples."""
    return tuple([_ungrouped(x) if isinstance(x, tuple) else x for x in arguments])


class Launch:
    """A kernel with its grid and all its arguments but the pointers.

    The first call goes through Triton, which compiles the kernel. Later calls pass the compiled
    kernel to the driver and skip Triton's inspection of every argument, which is most of what a
    launch costs on the host. So the pointers of a `Launch` must keep their dtypes and alignments,
    on one device. A `Launch` also keeps the compiled kernel alive, because Triton 3.9 unloads the
    code with it.

    Triton's launcher reads a group of arguments by position, and reads a plain tuple faster than a
    NamedTuple, above all in Triton 3.6. So only the calls through Triton, which need the names,
    pass NamedTuples.

    Args:
        kernel: A kernel whose first parameters are its pointers.
        grid: The number of programs along one to three axes; if one is 0, nothing is launched.
        arguments: The values of the kernel's other parameters, by name. A NamedTuple is a group,
            whose fields the kernel reads by name; `constants` makes them compile-time constants.
        warps: The number of warps of a program.
        stages: The stages of Triton's software pipeline; None leaves the choice to Triton.
        groups: The NamedTuple of each parameter that is a group of pointers. A call passes a plain
            tuple.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: Mapping[str, Any],
        warps: int,
        stages: int | None = None,
        groups: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        names = kernel.arg_names
        pointers = names[: len(names) - len(arguments)]
        self._arguments = tuple(arguments[name] for name in names[len(pointers) :])
        self._plain = _ungrouped(self._arguments)
        self._groups = [(groups or {}).get(name) for name in pointers]
        self.kernel, self._grid = kernel, (*grid, 1, 1)[:3]
        # By default Triton 3.10 will not fuse products with sums.
        self._options = dict(num_warps=warps, enable_fp_fusion=True)
        if stages is not None:
            self._options["num_stages"] = stages
        self._compiled: Any = None
        self._stream: Any = None

    def __call__(self, *pointers: Any) -> None:
        """Launch the kernel on the current stream. A group of pointers is a plain tuple."""
        compiled, runtime = self._compiled, triton.knobs.runtime
        if compiled is not None and not (
            runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls
        ):
            _, run, function, metadata, device = compiled
            place = *self._grid, self._stream(device)
            run(*place, function, metadata, None, None, None, *pointers, *self._plain)
        elif all(self._grid):
            kernel = self.through_triton(*pointers)
            if kernel is not None:  # the interpreter has none
                active = triton.runtime.driver.active
                self._stream = active.get_current_stream
                device = active.get_current_device()
                handles = kernel.run, kernel.function, kernel.packed_metadata
                self._compiled = kernel, *handles, device

    def through_triton(self, *pointers: Any, warmup: bool = False) -> Any:
        """Launch the kernel through Triton and return it compiled; None in the interpreter. With
        `warmup` it is not launched.
        """
        if not INTERPRETED and self.kernel.hash is None:
            hash_callees_first(self.kernel)
        named = (x if group is None else group(*x) for x, group in zip(pointers, self._groups))
        given = *named, *self._arguments
        return self.kernel.run(*given, grid=self._grid, warmup=warmup, **self._options)


def hash_callees_first(function: Any) -> None:
    """Compute the hash of a function of Triton after those of the functions that it calls.

    Before 3.9 Triton leaves out the constants that a callee reads if it has not hashed the callee
    yet. Then a process that calls ops in another order would compile kernels that are in the cache.
    """
    names = {node.id for node in ast.walk(function.parse()) if isinstance(node, ast.Name)}
    for name in sorted(names):
        callee = function.__globals__.get(name)
        if getattr(callee, "hash", "") is None:
            hash_callees_first(callee)
    function.cache_key  # noqa: B018


class TMALaunch(Launch):
    """A launch of a kernel that makes TMA descriptors. The first pointer is a group of tensors.

    Triton asks an allocator for the descriptors' memory. The allocator belongs to the caller's
    context, so each launch sets its own in a copy of that context.
    """

    def __call__(self, *pointers: Any) -> None:
        contextvars.copy_context().run(self._launch, pointers)

    def _launch(self, pointers: tuple[Any, ...]) -> None:
        def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
            return pointers[0][0].new_empty(size, dtype=torch.uint8)

        triton.set_allocator(allocate)
        super().__call__(*pointers)


class MappedLaunch(Launch):
    """A launch of a kernel that takes TMA descriptors, which the host makes of the tensors of each
    call: with them a program starts at once. They are the parameters behind the pointers.

    Args:
        maps: (place, make) for each descriptor. `place` is the index of its tensor among the
            pointers, or the indices of a group and of its field; `make` returns the descriptor of
            the tensor.
    """

    def __init__(self, maps: Iterable[tuple[Any, Callable[[Tensor], Any]]], *given: Any) -> None:
        super().__init__(*given)
        self._maps = tuple(maps)
        self._made: tuple[Any, ...] = ()

    def __call__(self, *pointers: Any) -> None:
        tensors = [pointers[i] if j is None else pointers[i][j] for (i, j), _ in self._maps]
        if not self._made:
            made = [make(x) for (_, make), x in zip(self._maps, tensors)]
            self._made = tuple([_with_base(descriptor, None) for descriptor in made])
        super().__call__(*pointers, *map(_with_base, self._made, tensors))


def _with_base(descriptor: Any, x: Tensor | None) -> Any:
    """Return a copy of a descriptor for a tensor of the same layout, without Triton's checks."""
    made = object.__new__(type(descriptor))
    made.__dict__.update(descriptor.__dict__, base=x)
    return made


MOST_PROGRAMS = 65535  # along the second and the third axis of a grid


def dense(shape: Iterable[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and strides of a contiguous tensor, for the fast `new_empty_strided`."""
    shape = tuple(shape)
    return shape, torch.empty(shape, device="meta").stride()


def accumulator(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over x: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return Triton's dtype for a torch dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; torch is asked once for each device."""
    return _capability(device)


# As torch.compiler.assume_constant_result does: dynamo calls it instead of tracing the cache.
compute_capability.__dict__["_dynamo_marked_constant"] = True


@functools.cache
def architecture(device: torch.device) -> str:
    """Return the device's row in the tables: sm_80 .. sm_100, interpreter, or other.

    sm_86 is the row of all GPUs with 101376 bytes of shared memory per block: 8.6, 8.9 and 12.x,
    and sm_100 that of those with tcgen05 and 232448 bytes: 10.x, and 11.0 (Jetson Thor).
    """
    if INTERPRETED:
        return "interpreter"
    major, minor = compute_capability(device)
    if major == 8:
        return {0: "sm_80", 6: "sm_86", 9: "sm_86"}.get(minor, "other")
    return {9: "sm_90", 10: "sm_100", 11: "sm_100", 12: "sm_86"}.get(major, "other")


@functools.cache
def processors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has. The interpreter counts as a GPU with 4."""
    return 4 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def l2_cache(device: torch.device) -> int:
    """Return the bytes of a GPU's L2 cache. The interpreter counts as an H100, with 50 MB."""
    if INTERPRETED:
        return 50 * 2**20
    return torch.cuda.get_device_properties(device).L2_cache_size


def dot_precision(arch: str) -> str:
    """Return how `tl.dot` multiplies float32: with three tf32 products, or with one if torch allows
    tf32; in the interpreter as IEEE float32.
    """
    if arch == "interpreter":
        return "ieee"
    return "tf32" if allow_tf32() else "tf32x3"


# Triton's interpreter keeps the running program in globals: only one thread at a time may use it.
_one_thread = threading.RLock()
_here = _one_thread if INTERPRETED else contextlib.nullcontext()
if INTERPRETED and hasattr(os, "register_at_fork"):  # a child has no thread to free it
    os.register_at_fork(
        before=_one_thread.acquire,
        after_in_parent=_one_thread.release,
        after_in_child=_one_thread.release,
    )


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which launches go to the device of x. In the interpreter it is a lock."""
    if INTERPRETED or not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _here
    return torch.cuda.device(x.device)


def unsupported_dtype(x: Tensor) -> str | None:
    """Return why no kernel can run on x, or None."""
    if INTERPRETED:
        if x.dtype == torch.bfloat16:
            from . import interpreter

            if not interpreter.repaired:
                return (
                    "Triton's interpreter computes bfloat16 on bit patterns; "
                    "fastformer.kernels.interpreter.repair() fixes that"
                )
        return None
    if x.dtype == torch.float64:
        return "the kernels run float64 in Triton's interpreter only"
    if compute_capability(x.device) < (8, 0):
        return "the kernels need compute capability 8.0 or newer"
    return None
