"""More checks of candidates whose kernel is written in Gluon.

Such a kernel orders its accesses to memory by barriers of its own. If one is missing, it may hang,
or give other bits in one launch of a thousand, and its copies may reach past a tensor. So beside
the comparison with the reference it is launched at odd lengths with NaN around each tensor, and
many times at full size, also while another kernel keeps the memory busy.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer.dispatch import backends
from fastformer.dispatch.operation import OPERATIONS
from fastformer.dispatch.workloads import Workload

LENGTHS = ((1, 3), (71, 130), (200, 77), (257, 385))  # of queries and keys
REPEATS = 200  # launches that have to give the same bits
COPIED = 256 << 20  # bytes that the other kernel copies beside each launch
MARGIN = 4096  # bytes before and behind each tensor
PATTERN = (0xFF, 0xFF, 0xBF, 0x7F)  # NaN in every dtype; no arithmetic leaves it as it is
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def odd(workload: Workload) -> list[Workload]:
    """Return the workload at lengths that are no multiples of a tile."""
    sizes = dict(workload.small().sizes)
    found = (sizes | {"Sq": q, "Sk": k} for q, k in LENGTHS if sizes.keys() >= {"Sq", "Sk"})
    return [workload._replace(sizes=tuple(one.items())) for one in found]


def _bits(x: Tensor) -> Tensor:
    return x.view(_BITS[x.element_size()])


# ----------------------------------------------------------------------------- NaN around tensors


@contextlib.contextmanager
def fenced() -> Iterator[list[str]]:
    """Return a context in which each tensor that a kernel gets is a copy with NaN around it, and
    between its rows if they are apart. Memory that nobody has written is NaN, too. It yields a list
    of what was wrong, which is filled at the end.
    """
    found: list[str] = []
    intact: list[Tensor] = []
    former = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()

    def launch(start: Callable[..., None], *pointers: Any) -> None:
        fences: dict[Any, _Fence] = {}

        def moved(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(moved, x))
            if not isinstance(x, Tensor) or not x.numel():
                return x
            key = x.data_ptr(), x.dtype, x.shape, x.stride()
            if key not in fences:
                fences[key] = _Fence(x)
            return fences[key].inside

        start(*map(moved, pointers))
        intact.extend(fence.close() for fence in fences.values())

    with backends.replaced_launches(launch):
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
        try:
            yield found
        finally:
            torch.use_deterministic_algorithms(former, warn_only=warns)
    if not all(map(bool, intact)):
        found.append("it writes outside of a tensor")


class _Fence:
    """A copy of a tensor, with the same strides and alignment, in memory full of NaN."""

    def __init__(self, x: Tensor) -> None:
        shape = [1 if step == 0 else n for n, step in zip(x.shape, x.stride())]
        self.x = x.data.as_strided(shape, x.stride())
        extent = 1 + sum((n - 1) * step for n, step in zip(shape, x.stride()))
        first = MARGIN + x.data_ptr() % 16
        bytes_of_x = extent * x.element_size()
        words = -(-(first + bytes_of_x + MARGIN) // len(PATTERN))
        self.outside = torch.tensor(PATTERN, dtype=torch.uint8, device=x.device).repeat(words)
        self.place = slice(first, first + bytes_of_x)
        self.memory = self.outside.clone()
        self.inside = self._of(self.memory)
        self.inside.copy_(self.x)

    def _of(self, memory: Tensor) -> Tensor:
        flat = memory[self.place].view(self.x.dtype)
        return flat.as_strided(self.x.shape, self.x.stride())

    def close(self) -> Tensor:
        """Copy back what was written. Return whether all outside of the tensor is as it was."""
        self._of(self.outside).copy_(self.inside)
        self.x.copy_(self.inside)
        return (self.outside == self.memory).all()


# ------------------------------------------------------------------------------ the same bits again


def differing_runs(run: Callable[[], Any], device: torch.device) -> str | None:
    """Return an error message if a run gives other bits than the first one, or None."""
    first = [x.detach().clone() for x in _tensors(run())]
    for beside in ("", " beside a kernel that copies"):
        same = torch.ones((), dtype=torch.bool, device=device)
        with _copying(device) if beside else contextlib.nullcontext(lambda: None) as copy:
            for _ in range(REPEATS):
                copy()
                for x, y in zip(_tensors(run()), first, strict=True):
                    same &= (_bits(x.detach()) == _bits(y)).all()
            if not same:
                return f"{REPEATS} runs{beside} give different bits"
    return None


def _tensors(outputs: Any) -> Sequence[Tensor]:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return outputs


@contextlib.contextmanager
def _copying(device: torch.device) -> Iterator[Callable[[], None]]:
    """Yield a function that starts a kernel on a second stream, which copies a large buffer."""
    if device.type != "cuda":
        yield lambda: None
        return
    source, target = (torch.zeros(COPIED, dtype=torch.int8, device=device) for _ in range(2))
    here, beside = torch.cuda.current_stream(device), torch.cuda.Stream(device)

    def copy() -> None:
        with torch.cuda.stream(beside):
            torch.add(source, 1, out=target)

    beside.wait_stream(here)
    try:
        yield copy
    finally:
        here.wait_stream(beside)


# ------------------------------------------------------------------------------------------ ConSan

CONSAN_SECONDS = 900.0  # most of them for ptxas, which needs minutes for what ConSan adds


class Consan(NamedTuple):
    """A call of a candidate under ConSan, Triton's concurrency sanitizer, in a process of its own:
    ConSan ends the process of a kernel in which it finds a race or a deadlock.
    """

    workload: Workload
    options: Mapping[str, Any]  # by the name of the kernel, as `backends.forced` takes them
    name: str

    def __call__(self) -> str | None:
        """Return what ConSan finds, or None. A candidate is run once, for the first class."""
        if not self.exists() or self.name in _ran:
            return None
        _ran.add(self.name)
        plain = {k: str(x) if isinstance(x, str) else x for k, x in self.options.items()}
        paths = os.pathsep.join(path for path in sys.path if path)
        process = subprocess.Popen(
            [sys.executable, "-c", "from fastformer.tuning import safety; safety.run_once()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TRITON_INSTRUMENTATION_MODE": "consan", "PYTHONPATH": paths},
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(pickle.dumps((self.workload, plain)), CONSAN_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # ptxas, too
            process.wait()
            return f"under ConSan it takes more than {CONSAN_SECONDS:.0f} s"
        lines = said.decode(errors="replace").strip().splitlines() or [""]
        found = next((line for line in lines if "assert" in line.lower()), lines[-1])
        return None if process.returncode == 0 else f"under ConSan it fails: {found[:300]}"

    @staticmethod
    @functools.cache
    def exists() -> bool:
        """Return whether this Triton has ConSan."""
        import triton

        return hasattr(getattr(triton.knobs, "compilation", None), "instrumentation_mode")


_ran: set[str] = set()  # the names of the candidates that have run under ConSan


def run_once() -> None:
    """Run the call that standard input describes, with its backward if it has one."""
    workload, options = pickle.load(sys.stdin.buffer)
    given = odd(workload)[-1].arguments(torch.device("cuda", torch.cuda.current_device()))
    with backends.forced(workload.op, options), backends.use_backend("triton"):
        output = _tensors(OPERATIONS[workload.op].contract(**given))[0]
        if workload.gradient:
            output.backward(torch.ones_like(output))
    torch.cuda.synchronize()
