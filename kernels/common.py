"""What the kernels share: dropout words, registration, the table of architectures."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import TritonError
from triton.runtime.jit import JITFunction

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PHILOX_ROUNDS = tl.constexpr(7)


# ----------------------------------------------------------------------------------------- kernels


@triton.jit
def dropout_keep(seed, plane, i0, j0, threshold, BM: tl.constexpr, BN: tl.constexpr):
    """Which elements of the [BM, BN] tile at row i0, column j0 (multiples of 16) dropout keeps.

    Counter (j', i', plane, 0) with x' = x // 16 * 8 + x % 8 serves rows i, i + 8 and columns
    j, j + 8, by word 2 * (i // 8 % 2) + (j // 8 % 2): the four elements that one thread holds in a
    tensor-core accumulator, and in its transpose, so that nothing moves between threads.
    """
    i = (i0 // 2 + tl.arange(0, BM // 2))[:, None].to(tl.uint32)
    j = (j0 // 2 + tl.arange(0, BN // 2))[None, :].to(tl.uint32)
    p = plane.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, j, i, p, p * 0, PHILOX_ROUNDS)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [BM/2, BN/2, column, row]
    words = words.reshape(BM // 16, 8, BN // 16, 8, 2, 2).permute(0, 4, 1, 2, 5, 3)
    return words.reshape(BM, BN) >= threshold.to(tl.uint32, bitcast=True)


@triton.jit
def row_dropout_keep(seed, rows, o, threshold, BM: tl.constexpr, BLOCK: tl.constexpr):
    """Which elements of rows [BM] and columns o .. o + BLOCK - 1 dropout keeps: word j % 4 of
    counter (j // 4, row low, row high, 1).
    """
    j = (o // 4 + tl.arange(0, BLOCK // 4))[None, :].to(tl.uint32)
    low = rows[:, None].to(tl.uint32)
    high = (rows >> 32)[:, None].to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, j, low, high, low * 0 + 1, PHILOX_ROUNDS)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BM, BLOCK)
    return words >= threshold.to(tl.uint32, bitcast=True)


INTERPRETED = not isinstance(dropout_keep, JITFunction)


# --------------------------------------------------------------------------------------- launchers


def dropout_arguments(p: float) -> tuple[int, float]:
    """(threshold as the int32 that carries its 32 bits, the factor of what is kept).

    At p = 1 the threshold does not fit, and the factor 0 drops everything.
    """
    threshold = min(round(p * 2**32), 2**32 - 1)
    return threshold - 2**32 if threshold >= 2**31 else threshold, 1 / (1 - p) if p < 1 else 0.0


def unit_stride(x: Tensor) -> Tensor:
    """x, or a copy of it where its last dimension is strided."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


class Launch:
    """A kernel with all its arguments but the pointers.

    The first call goes through Triton, which compiles. The others hand the compiled kernel to the
    driver and skip Triton's look at every argument, most of what a launch costs on the host: a
    `Launch` is for tensors of one dtype and one alignment each, on one device. It keeps the
    compiled kernel, without which Triton 3.9 unloads the code.
    """

    __slots__ = ("_arguments", "_blocks", "_compiled", "_kernel", "_options", "_stream")

    def __init__(
        self,
        kernel: Any,
        blocks: int,
        scalars: tuple[Any, ...],
        constants: dict[str, Any],
        warps: int,
        stages: int,
    ) -> None:
        names = kernel.arg_names
        constant = (constants[name] for name in names[len(names) - len(constants) :])
        self._kernel, self._blocks, self._arguments = kernel, blocks, (*scalars, *constant)
        self._options = dict(num_warps=warps, num_stages=stages)
        self._compiled: Any = None
        self._stream: Any = None

    def __call__(self, *pointers: Tensor) -> None:
        compiled, runtime = self._compiled, triton.knobs.runtime
        if compiled is not None and not (
            runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls
        ):
            _, run, function, metadata, device = compiled
            run(
                self._blocks, 1, 1, self._stream(device), function, metadata, None, None, None,
                *pointers, *self._arguments,
            )  # fmt: skip
        elif self._blocks:
            start = self._kernel[(self._blocks,)]
            kernel = start(*pointers, *self._arguments, **self._options)
            if kernel is not None:  # the interpreter has none
                active = triton.runtime.driver.active
                self._stream = active.get_current_stream
                device = active.get_current_device()
                handles = kernel.run, kernel.function, kernel.packed_metadata
                self._compiled = kernel, *handles, device


MOST_PLANS = 4096
plans: dict[Any, Any] = {}


def remembered(key: Any, plan: Any) -> Any:
    """Keeps what a call with this key launches, for the next one."""
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[key] = plan
    return plan


def layout(x: Tensor | None) -> Any:
    """What of a tensor a launch depends on."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() & 15)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def compute_capability(device: torch.device) -> tuple[int, int]:
    """That of a GPU, which is asked once."""
    return _capability(device)


# As torch.compiler.assume_constant_result does: dynamo calls it, where it would trace a cache.
compute_capability.__dict__["_dynamo_marked_constant"] = True


@functools.cache
def architecture(device: torch.device) -> str:
    """The row of the configuration tables: sm_80 .. sm_100, gfx942, interpreter, or other.

    sm_86 stands for the parts with 101376 bytes of shared memory a block: 8.6, 8.9 and 12.x.
    """
    if INTERPRETED:
        return "interpreter"
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        return name if name == "gfx942" else "other"
    return {
        (8, 0): "sm_80",
        (8, 6): "sm_86",
        (8, 9): "sm_86",
        (9, 0): "sm_90",
        (10, 0): "sm_100",
        (12, 0): "sm_86",
        (12, 1): "sm_86",
    }.get(compute_capability(device), "other")


def allow_tf32() -> bool:
    """Whether torch multiplies float32 by tf32 on a GPU. (`allow_tf32` raises once the setting was
    made by `fp32_precision`, which says what holds however it was made.)
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def dot_precision(arch: str) -> str:
    """How float32 is multiplied: by three tf32 products, or by one where torch allows tf32."""
    if arch == "interpreter" or torch.version.hip is not None:
        return "ieee"
    return "tf32" if allow_tf32() else "tf32x3"


# Triton's interpreter keeps the program that runs in globals: one thread at a time.
_one_thread = threading.RLock()
_here = _one_thread if INTERPRETED else contextlib.nullcontext()
if INTERPRETED and hasattr(os, "register_at_fork"):  # a child has no other thread to free it
    os.register_at_fork(
        before=_one_thread.acquire,
        after_in_parent=_one_thread.release,
        after_in_child=_one_thread.release,
    )


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Launches go to the tensor's own device, whatever the current one is."""
    if INTERPRETED or not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _here
    return torch.cuda.device(x.device)


def unsupported_dtype(x: Tensor) -> str | None:
    """Why no kernel can run on x, or None."""
    if INTERPRETED:
        from . import interpreter

        if x.dtype == torch.bfloat16 and not interpreter.repaired:
            return (
                "Triton's interpreter computes bfloat16 on bit patterns; "
                "fastformer.kernels.interpreter.repair() mends it"
            )
        return None
    if x.dtype == torch.float64:
        return "the kernels run float64 in Triton's interpreter only"
    if torch.version.hip is None and compute_capability(x.device) < (8, 0):
        return "the kernels need compute capability 8.0 or newer"
    return None


# ------------------------------------------------------------------------------------ registration


_TRITON = Path(triton.__file__).parent
_one_cache = threading.RLock()  # which directory Triton compiles into is the process's


@functools.cache
def _spare_cache() -> str:
    """A folder for compiled kernels that lasts as long as the process."""
    folder = tempfile.mkdtemp(prefix="fastformer-triton-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _of_the_cache(error: BaseException) -> bool:
    """Whether Triton raised the error where it reads or writes its cache or loads what it read.

    Not where it compiles, nor where a kernel asks for more than the GPU has.
    """
    if isinstance(error, (MemoryError, TritonError, subprocess.CalledProcessError)):
        return False
    if "out of memory" in str(error):  # torch's, Triton's
        return False
    where = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        if _TRITON in path.parents:
            where = path.relative_to(_TRITON).as_posix()
    return where in ("compiler/compiler.py", "runtime/cache.py", "runtime/build.py")


def _forget(kernel: JITFunction) -> None:
    """Drops the compiled forms that are not loaded, good or bad. The others may still be running,
    or be part of a CUDA graph.
    """
    for kernels, *_ in kernel.device_caches.values():
        for key, compiled in list(kernels.items()):
            if getattr(compiled, "module", None) is None:
                del kernels[key]


def _whatever_the_cache(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """The launcher, tried once more after an error of Triton's cache, with an empty one.

    If that helps, Triton's own is corrupt or cannot be written, and a warning says so; if not, the
    error stands.
    """
    if INTERPRETED:
        return launcher

    @functools.wraps(launcher)
    def launch(*arguments: Any) -> Any:
        try:
            return launcher(*arguments)
        except Exception as error:
            if not _of_the_cache(error):
                raise
            for kernel in launcher.__globals__.values():
                if isinstance(kernel, JITFunction):
                    _forget(kernel)
            with _one_cache:
                folder = triton.knobs.cache.dir
                with triton.knobs.cache.scope():
                    try:
                        triton.knobs.cache.dir = _spare_cache()
                        result = launcher(*arguments)
                    except Exception:
                        raise error from None
            warnings.warn(
                f"Triton's cache {folder} fails ({type(error).__name__}: {error}); this process "
                "compiles what it needs elsewhere: clear it, or set TRITON_CACHE_DIR to a "
                "directory that can be written",
                stacklevel=2,
            )
            return result

    return launch


_library = torch.library.Library("fastformer", "DEF")
_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def register(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Registers a launcher as the op `fastformer::<schema>`; `fake` makes outputs alike, empty."""
    name = schema[: schema.index("(")]

    def decorate(launcher: Callable[..., Any]) -> Callable[..., Any]:
        launcher = _whatever_the_cache(launcher)
        _library.define(schema, tags=_tags)
        _library.impl(name, launcher, "CompositeExplicitAutograd")
        torch.library.register_fake("fastformer::" + name, fake, lib=_library)
        return launcher

    return decorate
