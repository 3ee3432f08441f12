"""Calls of attention whose forward is that for Hopper, which runs in the simulator."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import triton.language as tl
from fastformer.kernels import interpreter, tuned
from fastformer.kernels.attention import plan
from fastformer.kernels.attention.configurations import Tiles
from fastformer.kernels.launch import Launch
from torch import Tensor

from benchmarks.proof import gluon_simulator
from fastformer import use_backend

ROW = "Gluon 128 128"
Edit = tuple[str, str, str]  # a function of the kernel, and what to replace in its text


@functools.cache
def kernel(edits: tuple[Edit, ...]) -> gluon_simulator.Kernel:
    of = {function: [e[1:] for e in edits if e[0] == function] for function, *_ in edits}
    return gluon_simulator.Kernel(plan.hopper_forward_kernel, of, interpreter.replaced)


@contextlib.contextmanager
def simulated(
    *edits: Edit, columns: int = 64, slots: int = 2, seed: int = 0
) -> Iterator[list[Any]]:
    """Plan calls as on a GPU of sm_90 for which this kernel was measured to be the fastest, with
    tiles of that many keys, and run it in the simulator. Yield the list of what it is launched
    with. All other kernels run in Triton's interpreter.
    """
    through_triton, launched = Launch.through_triton, []

    def run(launch: Any, *pointers: Any) -> None:
        if launch._kernel is not plan.hopper_forward_kernel:
            through_triton(launch, *pointers)
            return
        groups = zip(launch._groups, pointers, strict=True)
        given = [of(*map(pointer, x)) if of else pointer(x) for of, x in groups]
        names = launch._kernel.arg_names
        arguments = dict(zip(names, (*given, *launch._arguments), strict=True))
        launched.append(arguments)
        kernel(edits).run(arguments, launch._grid, seed)
        for name, x in zip(names, pointers):
            if name in ("O", "LSE"):
                memory(x).copy_(torch.from_numpy(arguments[name].array))

    with (
        torch.no_grad() if edits else contextlib.nullcontext(),
        use_backend("triton"),
        tuned.forced({"attention forward": ROW}),
        replaced(
            plan, architecture=lambda device: "sm_90", HOPPER={ROW: Tiles(128, columns, 4, slots)}
        ),
        replaced(Launch, through_triton=run),
    ):
        yield launched


@contextlib.contextmanager
def replaced(owner: Any, **new: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in new}
    for name, value in new.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def memory(x: Tensor) -> Tensor:
    """Return all of the memory of a tensor, flat."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def pointer(x: Tensor) -> gluon_simulator.Pointer:
    """Point to the first element of a tensor, in a copy of its memory."""
    flat = memory(x.detach())
    array = (flat.float() if x.element_size() == 2 else flat).numpy().copy()
    return gluon_simulator.Pointer(array, getattr(tl, str(x.dtype)[6:]), x.storage_offset())
