"""Register launchers as ops of PyTorch, and retry them if Triton's cache is corrupt or cannot be
written.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.errors import TritonError
from triton.runtime.jit import JITFunction

from .common import INTERPRETED

_TRITON = Path(triton.__file__).parent
_one_cache = threading.RLock()  # Triton's cache directory is set for the process


@functools.cache
def _spare_cache() -> str:
    """Return a folder for compiled kernels that lasts as long as the process."""
    folder = tempfile.mkdtemp(prefix="fastformer-triton-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _of_the_cache(error: BaseException) -> bool:
    """Return whether Triton raised the error while it read or wrote its cache or loaded what it
    read, not while it compiled, and not because a kernel needs more than the GPU has.
    """
    if isinstance(error, (MemoryError, TritonError, subprocess.CalledProcessError)):
        return False
    if "out of memory" in str(error):  # raised by torch or by Triton
        return False
    where = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        if _TRITON in path.parents:
            where = path.relative_to(_TRITON).as_posix()
    return where in ("compiler/compiler.py", "runtime/cache.py", "runtime/build.py")


def _forget(kernel: JITFunction) -> None:
    """Drop the compiled forms of a kernel that are not loaded, corrupt or not. The loaded ones may
    still be running, or be part of a CUDA graph.
    """
    for kernels, *_ in kernel.device_caches.values():
        for key, compiled in list(kernels.items()):
            if getattr(compiled, "module", None) is None:
                del kernels[key]


def _kernels() -> Iterator[JITFunction]:
    """Yield every kernel in the imported modules of this package."""
    for name, module in list(sys.modules.items()):
        if name.startswith(__package__ + "."):
            yield from (x for x in vars(module).values() if isinstance(x, JITFunction))


def retried_with_an_empty_cache(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a launcher so that it runs once more, with an empty cache, after an error of Triton's
    cache.

    If the second run succeeds, Triton's own cache is corrupt or cannot be written, and a warning
    says so; otherwise the first error is raised.
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
            for kernel in _kernels():
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
    """Register a launcher as the op `fastformer::<schema>`. Its meta implementation is `fake`,
    which makes empty outputs of the same shapes, strides and dtypes.
    """
    name = schema[: schema.index("(")]

    def decorate(launcher: Callable[..., Any]) -> Callable[..., Any]:
        launcher = retried_with_an_empty_cache(launcher)
        _library.define(schema, tags=_tags)
        _library.impl(name, launcher, "CompositeExplicitAutograd")
        torch.library.register_fake("fastformer::" + name, fake, lib=_library)
        return launcher

    return decorate
