"""Compile kernels without launching them, in several processes: for `warm_up`."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import knobs as knobs

from .launch import Launch


@contextmanager
def recording() -> Iterator[dict[Any, Any]]:
    """In this context no kernel is launched, by any thread. Yields those that would be and that
    this process has not loaded: by its key, each with the arguments of its `_do_compile`.
    """
    kernels: dict[Any, Any] = {}
    call, one_at_a_time = Launch.__call__, threading.Lock()

    def record(launch: Launch, *pointers: Any) -> None:
        kernel = launch.kernel

        def note(key: Any, signature: Any, device: Any, *rest: Any) -> None:  # and do not compile
            kernels[kernel, key, device] = kernel, (key, signature, device, *rest)

        with one_at_a_time:
            kernel._do_compile = note  # knobs.runtime.jit_cache_hook takes no groups of constants
            try:
                launch.through_triton(*pointers, warmup=True)
            finally:
                del kernel._do_compile

    Launch.__call__ = record  # type: ignore[method-assign, assignment]
    try:
        yield kernels
    finally:
        Launch.__call__ = call  # type: ignore[method-assign]


def load(kernels: list[Any], processes: int) -> None:
    """Load kernels. Before, those that are not in Triton's cache are compiled, in processes that
    are forked, as a DataLoader's are, and do not use the GPU.
    """
    if processes > 1 and len(kernels) > 1:
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(processes, fork, _forked.extend, (kernels,)) as pool:
            list(pool.map(_compile, range(len(kernels))))
    for kernel, given in kernels:
        kernel._do_compile(*given)


_forked: list[Any] = []  # in a forked process: the kernels


def _compile(n: int) -> None:
    kernel, given = _forked[n]
    kernel._do_compile(*given)
