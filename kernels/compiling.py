"""Compile kernels without launching them, in several processes: for `warm_up`."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton import knobs as knobs

from .launch import Launch

_EMPTY = "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"
_one_at_a_time = threading.Lock()
_thread = threading.local()  # `records`: whether it runs an op of the model that is recorded


class _Zeros(TorchDispatchMode):
    """Sets to zero what the kernels of a forward and of its backward would compute."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:  # the graphs of rewritten modules run in it
        return True

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = _thread.records = op.namespace == "fastformer"
        try:
            output = op(*args, **(kwargs or {}))
        finally:
            _thread.records = False
        if ours or op.__name__.partition(".")[0] in _EMPTY:
            for x in tree_leaves(output):
                x.zero_()
        return output


@contextmanager
def recording() -> Iterator[dict[Any, Any]]:
    """In this context this thread and its backward launch no kernel. Yields those that would be and
    that this process has not loaded: by its key, each with the arguments of its `_do_compile`.
    """
    kernels: dict[Any, Any] = {}

    def call_or_record(launch: Launch, *pointers: Any) -> None:
        if not getattr(_thread, "records", False):
            return call(launch, *pointers)
        kernel = launch.kernel

        def note(key: Any, signature: Any, device: Any, *rest: Any) -> None:  # and do not compile
            kernels[kernel, key, device] = kernel, (key, signature, device, *rest)

        kernel._do_compile = note  # knobs.runtime.jit_cache_hook takes no groups of constants
        try:
            launch.through_triton(*pointers, warmup=True)
        finally:
            del kernel._do_compile

    with _one_at_a_time:
        call = Launch.__call__
        Launch.__call__ = call_or_record  # type: ignore[method-assign, assignment]
        try:
            with _Zeros():
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
