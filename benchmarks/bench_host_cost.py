"""The cost of a call on the host, where nothing is launched. Each row makes a thousand calls, so
its ms are microseconds per call.

`triton` is the time from the op's implementation to Triton's launcher in C, whose driver starts
nothing (benchmarks/gpu/stand_in); the forward of the FFN is without torch's product. Its peer
`stock` starts the same kernels with Triton's own `kernel[grid](...)` in a torch.library.custom_op.
"""

import functools

import pytest

from benchmarks.gpu import stand_in
from benchmarks.peers import GPU
from benchmarks.workers import answer

CALLS, ROUNDS = 1000, 7 if GPU else 3
OPS, PROVIDERS = ["attention", "layer_norm", "feed_forward"], ["triton", "stock"]


@functools.cache
def seconds():
    words = "-m", "benchmarks.host_cost_worker", CALLS, ROUNDS
    return answer(*words, CUDA_VISIBLE_DEVICES="")  # the stand-in is the only driver


@pytest.mark.skipif(stand_in.obstacle() is not None, reason=str(stand_in.obstacle()))
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("op", OPS)
def test_host_cost(measure, op, mode, provider):
    measure(
        samples=seconds()[f"{op} {mode} {provider}"],
        group=f"host cost of {op} {mode}, {CALLS} calls",
        dtype="bfloat16",
    )
