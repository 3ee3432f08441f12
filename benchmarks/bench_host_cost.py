"""What a whole call of a public function costs the host, beside torch's own. Each row makes a
thousand calls, so its ms are microseconds per call.

On a GPU the operands are so small that the device keeps up: it is the time until the host has
handed over the calls. Without one, `triton` is the time of the processor over a stand-in for the
driver (benchmarks/gpu/stand_in), which starts nothing; torch's own ops would compute there.
"""

import functools
import time

import pytest
import torch

from benchmarks.gpu import stand_in
from benchmarks.host_cost_worker import MODES, OPS, call
from benchmarks.peers import GPU
from benchmarks.workers import answer

CALLS, ROUNDS = 1000, 7 if GPU else 3
AT_ONCE = 100  # calls: fewer than what may wait for the device at a time


@functools.cache
def over_the_stand_in():
    return answer("-m", "benchmarks.host_cost_worker", CALLS, ROUNDS)


@pytest.mark.skipif(not GPU and stand_in.obstacle() is not None, reason=str(stand_in.obstacle()))
@pytest.mark.parametrize("provider", ["torch", "auto"] if GPU else ["triton"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", OPS)
def test_public_call(measure, benchmark, device, op, mode, provider):
    samples = [] if GPU or benchmark.disabled else over_the_stand_in()[f"{op} {mode}"]
    if GPU:
        run = call(op, mode, provider == "auto", device)
        run()
        for _ in range(0 if benchmark.disabled else ROUNDS):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(AT_ONCE):
                run()
            samples.append((time.perf_counter() - started) * CALLS / AT_ONCE)
    group = f"public call of {op} {mode}, host, {CALLS} calls"
    backend = None if provider == "torch" else "triton"
    measure(samples=samples, group=group, backend=backend, dtype="bfloat16")
