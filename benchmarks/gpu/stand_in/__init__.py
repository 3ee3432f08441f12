"""A stand-in for the CUDA driver: Triton's path to a GPU, on a machine without one.

`install` puts libcuda.c, a driver that starts nothing, under Triton's own `CudaDriver` and
launcher: kernels are compiled for a GPU that is not there, their cubins are loaded, and launches
are checked as far as a driver checks them, and accepted. Tensors are on the CPU. Nothing computes:
outputs keep what was in their memory, unless `see` computes it.

    os.environ["TRITON_INTERPRET"] = "0"     # before triton is imported
    gpu = stand_in.install(folder)           # an H100, where fastformer takes CPU tensors
    with fastformer.use_backend("triton"):
        fastformer.layer_norm(x, 512)        # compiles for sm_90, launches nothing
    assert gpu.launches == 1

It holds for the rest of the process. benchmarks/gpu/stand_in needs a C compiler, cuda.h, which
Triton's wheel brings, and Python.h, which Triton's launcher needs: `obstacle` says what is missing.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sysconfig
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

SOURCE = Path(__file__).with_name("libcuda.c")
LAUNCH_FAILED = 719  # CUDA_ERROR_LAUNCH_FAILED
CAPABILITY, MULTIPROCESSORS = (9, 0), 132  # of an H100
SHARED_OF_BLOCK = 232448  # bytes; libcuda.c has the same
L2_CACHE = 50 * 2**20  # bytes, of an H100


class Launch(NamedTuple):
    """A launch that the driver has accepted, and the call of Triton's launcher that made it.

    `parameters` are the bytes that the driver read, cut as the cubin of the kernel says.
    """

    function: int
    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    attributes: int  # cluster, cooperative grid and the like: how many are set
    parameters: tuple[bytes, ...]
    source: Any  # what was compiled: signature, constants, attrs
    metadata: Any  # and what came of it: hash, num_warps, shared
    arguments: tuple[Any, ...]  # of the launcher, constants too


class _Launch(ctypes.Structure):
    """libcuda.c's Launch."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("attributes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("parameters", ctypes.c_int),
        ("sizes", ctypes.POINTER(ctypes.c_int)),
        ("values", ctypes.POINTER(ctypes.c_void_p)),
    )


_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Launch))


class StandIn:
    """The device: what it is, the stream that is current, and what the driver has done."""

    def __init__(self, library: Path, see: Callable[[Launch], None] | None) -> None:
        self.stream = 0  # what launches go to, as torch.cuda.current_stream() says it
        self._see, self._call = see, threading.local()
        # Global: the extension that Triton compiles finds the driver that is loaded, by its name.
        self._driver = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        for name in ("launches", "loaded"):
            getattr(self._driver, "stand_in_" + name).restype = ctypes.c_long
        self._callback = _CALLBACK(self._launched)  # as long as the driver may call it
        if see is not None:
            self._driver.stand_in_set_callback(self._callback)

    @property
    def launches(self) -> int:
        """Launches that the driver has accepted."""
        return self._driver.stand_in_launches()

    @property
    def loaded(self) -> int:
        """Modules, one a kernel, that were ever loaded."""
        return self._driver.stand_in_loaded()

    def unload(self, module: int) -> None:
        """Unloads a module, as Triton 3.9 does when its kernel is no longer held."""
        assert self._driver.cuModuleUnload(ctypes.c_void_p(module)) == 0

    def _launched(self, pointer: Any) -> int:
        given, call = pointer.contents, self._call
        try:
            assert self._see is not None
            self._see(
                Launch(
                    given.function, given.name.decode(), tuple(given.grid), tuple(given.block),
                    given.shared, given.stream or 0, given.attributes,
                    tuple(
                        ctypes.string_at(given.values[i], given.sizes[i])
                        for i in range(given.parameters)
                    ),
                    call.launcher.source, call.launcher.metadata, call.arguments,
                )
            )  # fmt: skip
            return 0
        except BaseException as error:  # none passes through C: the launcher raises it again
            call.error = error
            return LAUNCH_FAILED

    def _start(self, launcher: Any, launch: Callable[..., None], *arguments: Any) -> None:
        """Calls Triton's launcher."""
        call = self._call
        call.launcher, call.arguments, call.error = launcher, arguments[9:], None
        try:
            launch(*arguments)
        except RuntimeError:
            if call.error is not None:
                raise call.error from None
            raise
        finally:
            call.launcher = call.arguments = call.error = None


def _compiler() -> str | None:
    """The C compiler that Triton takes."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def _headers() -> Path | None:
    """The folder of Triton's wheel that cuda.h is in."""
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "backends" / "nvidia" / "include"


def obstacle() -> str | None:
    """Why the stand-in cannot be built here, or None."""
    compiler, headers = _compiler(), _headers()
    if compiler is None or shutil.which(compiler) is None:
        return "there is no C compiler: neither gcc nor clang is on PATH, nor is CC set to one"
    if headers is None or not (headers / "cuda.h").exists():
        return "there is no Triton with NVIDIA's headers"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "there is no Python.h, which Triton's launcher needs"
    return None


def build(folder: Path) -> Path:
    """Compiles libcuda.so.1 into a folder. Raises RuntimeError with the `obstacle`."""
    reason = obstacle()
    if reason is not None:
        raise RuntimeError(f"the stand-in driver cannot be built: {reason}")
    library = folder / "libcuda.so.1"
    command = [str(_compiler()), "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, f"-I{_headers()}", "-o", str(library), str(SOURCE)], check=True)
    return library


def install(folder: Path, see: Callable[[Launch], None] | None = None) -> StandIn:
    """From here on this process has one H100, for Triton and fastformer.

    folder       where libcuda.so.1 is, or is built
    see          called with each launch that the driver accepts, before the launcher returns. What
                 it raises, the launch raises. None: launches are accepted, and that is all.

    Triton compiles into its own cache, TRITON_CACHE_DIR. fastformer's `triton` backend takes CPU
    tensors, as it does in the interpreter. torch knows the capability, the number of
    multiprocessors and the L2 cache, and nothing else: torch.cuda.is_available() stays what it was.
    Streams are numbers: set `stream` of the result.

    Raises RuntimeError where the stand-in cannot be built or Triton's interpreter is on.
    """
    library = folder / "libcuda.so.1"
    if not library.exists():
        build(folder)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)  # what the extension is linked against

    import torch
    import triton
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher

    from fastformer.dispatch import backends

    if triton.knobs.runtime.interpret:
        raise RuntimeError("Triton's interpreter is on: set TRITON_INTERPRET=0 before the start")
    gpu = StandIn(library, see)

    class Launcher(CudaLauncher):
        def __init__(self, source: Any, metadata: Any) -> None:
            super().__init__(source, metadata)
            self.source, self.metadata = source, metadata

        def __call__(self, *arguments: Any) -> None:
            gpu._start(self, super().__call__, *arguments)

    driver = CudaDriver()
    driver.launcher_cls = Launcher
    driver.get_current_device = lambda: 0
    driver.get_current_stream = lambda device: gpu.stream
    driver.get_device_capability = lambda device=None: CAPABILITY
    triton.runtime.driver.set_active(driver)
    torch.cuda.get_device_capability = lambda device=None: CAPABILITY
    if not torch.cuda.is_available():
        facts = dict(multi_processor_count=MULTIPROCESSORS, L2_cache_size=L2_CACHE)
        properties = SimpleNamespace(**facts)
        torch.cuda.get_device_properties = lambda device=None: properties
    backends._unsupported_device = lambda op, device: None
    return gpu
