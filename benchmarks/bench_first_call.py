"""The time before the first result: the imports, and the first call of each op, forward and
backward.

Every row is measured in fresh processes. `reference, eager` is the first call of the reference.
`triton, cold` and `triton, warm` are the first call of the kernels on a GPU, with an empty Triton
cache (TRITON_CACHE_DIR) and with the cache of an earlier process. Without a GPU they are replaced
by `compile, cold` and `compile, warm`, which compile the same kernels for sm_90 and launch nothing.
The row of the first op includes the start of Triton.
"""

import functools
import tempfile

import pytest
import torch

from benchmarks.first_call_worker import OPS
from benchmarks.gpu import stand_in
from benchmarks.peers import GPU
from benchmarks.workers import answer

KERNELS = "triton" if GPU else "compile"
PROVIDERS = ["reference, eager", f"{KERNELS}, cold", f"{KERNELS}, warm"]
PROCESSES = 2 if GPU else 1  # for the reference, and for a warm cache


@functools.cache
def processes(backend):
    """Return the seconds of each step, by process; the first process has an empty cache."""
    if backend == "compile" and (reason := stand_in.obstacle()):
        pytest.skip(reason)
    with tempfile.TemporaryDirectory() as folder:
        return [
            answer("-m", "benchmarks.first_call_worker", backend, TRITON_CACHE_DIR=folder)
            for _ in range(PROCESSES + (backend != "reference"))
        ]


def seconds(what, provider):
    backend, _, cache = provider.partition(", ")
    part = {"eager": slice(None), "cold": slice(1), "warm": slice(1, None)}[cache]
    return [answer[what] for answer in processes(backend)[part]]


IMPORTS = ["import torch", "import fastformer", "import fastformer.kernels.attention"]


@pytest.fixture(autouse=True)
def needs_triton():
    pytest.importorskip("triton")


@pytest.mark.parametrize("provider", IMPORTS)
def test_import(measure, provider):
    """Each import follows the previous one; that of the kernels includes that of Triton."""
    samples = seconds(provider, PROVIDERS[0])
    measure(group="imports", samples=samples, dtype="-")


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("op", OPS)
def test_first_call(measure, op, provider):
    samples = seconds(op, provider)
    bf16 = KERNELS == "triton" or "compile" in provider
    dtype = torch.bfloat16 if bf16 else torch.float32
    measure(group=f"first call of {op}", samples=samples, dtype=dtype)
