"""The time before the first result: the imports, and the first call of each op, forward and
backward.

Every row is measured in fresh processes. `reference, eager` is the first call of the reference, and
on a GPU `triton, cold` and `triton, warm` are that of the kernels, with an empty Triton cache
(TRITON_CACHE_DIR) and with the cache of an earlier process. The row of the first op includes the
start of Triton.
"""

import functools
import tempfile

import pytest
import torch

from benchmarks import answer
from benchmarks.peers import GPU
from fastformer.dispatch.backends import OPERATIONS

pytest.importorskip("triton")
PROVIDERS = ["reference, eager", *(["triton, cold", "triton, warm"] if GPU else [])]
PROCESSES = 2 if GPU else 1  # for the reference, and for a warm cache


@functools.cache
def processes(backend):
    """Return the seconds of each step, by process; the first process has an empty cache."""
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


@pytest.mark.parametrize("provider", IMPORTS)
def test_import(measure, provider):
    """Each import follows the previous one; that of the kernels includes that of Triton."""
    samples = seconds(provider, PROVIDERS[0])
    measure(group="imports", samples=samples, dtype="-")


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("op", OPERATIONS)
def test_first_call(measure, op, provider):
    samples = seconds(op, provider)
    dtype = torch.bfloat16 if GPU else torch.float32
    measure(group=f"first call of {op}", samples=samples, dtype=dtype)
