"""The path to a GPU on a machine without one: Triton's own CUDA driver and launcher over a driver
that starts nothing (benchmarks/gpu/stand_in), each launch checked against what was compiled,
computed from the bytes that the driver got, and the results held to the float64 oracle.

gpu_path_worker.py makes the calls of gpu_path_cases.py, in a process that compiles for the GPU;
this process computes what it launches, in Triton's interpreter.
"""

import importlib
import os
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path

import gpu_path_cases as cases
import pytest
import torch

from benchmarks.gpu import stand_in
from fastformer.dispatch import backends

HAS_GPU = torch.cuda.is_available()
MARGIN = 4096  # bytes before and behind a tensor's memory, at least
# What they hold: a NaN of each type, that no arithmetic leaves as it is.
NAN = torch.frombuffer(bytearray(b"\xff\xff\xbf\x7f"), dtype=torch.uint8)


def interpret(module, kernel, grid, storages, arguments):
    """Runs a launch: what is in the storages afterwards.

    Before and behind each there is as much memory again, of NaN, that no kernel may write; what it
    reads there spoils its results.
    """
    margins = [max(MARGIN, -(-len(storage) // 64) * 64) for storage in storages]
    memory = []
    for storage, margin in zip(storages, margins):
        inside = torch.frombuffer(bytearray(storage), dtype=torch.uint8) if storage else NAN[:0]
        outside = NAN.repeat(margin // 4)
        memory.append(torch.cat([outside, inside, outside]))

    def argument(given):
        if not isinstance(given, tuple):
            return given
        if given[:1] != ("pointer",):
            items = map(argument, given)
            return type(given)(*items) if hasattr(given, "_fields") else tuple(items)
        _, which, offset, dtype = given
        rest = memory[which][margins[which] + offset :]
        return rest[: len(rest) // dtype.itemsize * dtype.itemsize].view(dtype)

    start = getattr(importlib.import_module(module), kernel)
    if type(start).__name__ == "GluonJITFunction":
        simulate(start, grid, tuple(map(argument, arguments)))
    else:
        start[grid](*map(argument, arguments))
    for x, margin in zip(memory, margins):
        outside = torch.cat([x[:margin], x[-margin:]])
        if not torch.equal(outside, NAN.repeat(margin // 2)):
            raise AssertionError("writes out of bounds")
    return [bytes(x[m:-m].numpy()) for x, m in zip(memory, margins)]


def simulate(kernel, grid, arguments):
    """Runs a launch of a kernel in Gluon, in place. The simulator makes its descriptors from what
    the driver got, as the kernel or the host does on a GPU.
    """
    import hopper_calls
    from fastformer.kernels import interpreter

    from benchmarks.proof.gluon_simulator import Descriptor, Kernel

    made = []

    def given(x):
        if isinstance(x, tuple) and x[:1] == ("map",):
            return Descriptor(given(x[1]), *x[2:], None)
        if isinstance(x, tuple):
            items = map(given, x)
            return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
        if not isinstance(x, torch.Tensor):
            return x
        pointer = hopper_calls.pointer("a kernel", "x", x)
        made.append((hopper_calls.memory(x), pointer.array, pointer.array.copy()))
        return pointer

    named = dict(zip(kernel.arg_names, map(given, arguments), strict=True))
    Kernel(kernel, interpreter.replaced).run(named, grid)
    for memory, after, before in made:
        bits = f"u{after.itemsize}"
        changed = torch.from_numpy(after.view(bits) != before.view(bits))
        memory[changed] = torch.from_numpy(after)[changed].to(memory.dtype)


class Gpu:
    """The process with the GPU."""

    def __init__(self, folder):
        self.pipe, theirs = Pipe()
        environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "triton")}
        command = [sys.executable, str(Path(__file__).with_name("gpu_path_worker.py"))]
        command += [str(theirs.fileno()), str(folder)]
        self.process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()

    def ask(self, what, *arguments, compute=True):
        """What was wrong, and how much was launched, once all of it is computed."""
        self.pipe.send((what, arguments, compute))
        while True:
            kind, told = self.pipe.recv()
            if kind == "done":
                return told
            try:
                self.pipe.send(interpret(*told))
            except Exception as error:
                self.pipe.send(f"{type(error).__name__}: {error}")

    def right(self, what, *arguments, **options):
        """How much was launched, and nothing of it was wrong."""
        problems, launches = self.ask(what, *arguments, **options)
        assert not problems, "\n".join([*map(str, arguments), *problems])
        return launches

    def close(self):
        self.pipe.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """The folder of the driver, and of what Triton compiles here."""
    if HAS_GPU:
        pytest.skip("here is a GPU, with a driver of its own")
    reason = stand_in.obstacle()
    if reason is not None:
        pytest.skip(reason)
    return stand_in.build(tmp_path_factory.mktemp("gpu")).parent


@pytest.fixture(scope="module")
def gpu(driver):
    process = Gpu(driver)
    yield process
    process.close()


@pytest.mark.with_all
@pytest.mark.parametrize("op", sorted(backends.OPERATIONS))
def test_calls_that_are_drawn(gpu, op, request):
    """One of each op, with --slow twenty."""
    assert gpu.right("drawn", op, 20 if request.config.getoption("slow") else 1)


@pytest.mark.with_all
@pytest.mark.parametrize("name", cases.CASES)
def test_calls_are_right(gpu, name):
    """Every layout launched anew and remembered, forward and backward, against the oracle."""
    assert gpu.right("case", name) >= 4


@pytest.mark.with_all
def test_a_kernel_that_makes_descriptors(gpu):
    """Each launch gets memory for them, one that is remembered too."""
    launches = gpu.right("case", "attention, Gluon, lengths and dropout", compute=False)
    assert launches == 4 * 4  # with delta, dK and dV, and dQ


def test_every_op_has_a_case():
    assert {case.op for case in cases.CASES.values()} == set(backends.OPERATIONS)


@pytest.mark.parametrize("op", ["attention, log-sum-exp", "packed", "layer_norm"])
def test_launches_after_an_error(gpu, op):
    """Triton 3.9 unloads the module of a kernel that nobody holds: a launch that is remembered must
    not start one of those, whatever has failed and whatever Triton has forgotten.
    """
    gpu.right("error", op, "attention, one head")


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_launch_hooks(gpu, hook):
    """A profiler's: a launch goes through Triton, which calls them, while there is one."""
    gpu.right("hooks", "layer_norm", hook)


def test_no_compiler_for_the_stand_in(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler" in stand_in.obstacle()
    with pytest.raises(RuntimeError, match="cannot be built: there is no C compiler"):
        stand_in.install(tmp_path)


def test_the_interpreter_is_refused(driver):
    with pytest.raises(RuntimeError, match="Triton's interpreter is on"):
        stand_in.install(driver)
