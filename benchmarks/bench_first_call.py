"""What stands before the first result: the imports, and each op's first call, forward and backward.

Every row is of fresh processes. `reference, eager` is the first call of the reference.
`triton, cold` and `triton, warm` are the kernels' first call on a GPU, with Triton's cache
(TRITON_CACHE_DIR) empty and as an earlier process has left it. Without a GPU `compile, cold` and
`compile, warm` are in their place: what such a call compiles for sm_90, with nothing launched. The
first op's row holds Triton's own start.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from benchmarks.first_call_worker import CASES

WORKER = Path(__file__).with_name("first_call_worker.py")
KERNELS = "triton" if torch.cuda.is_available() else "compile"
PROVIDERS = ["reference, eager", f"{KERNELS}, cold", f"{KERNELS}, warm"]
PROCESSES = 2  # of a reference or of a warm cache


@functools.cache
def processes(backend):
    """The seconds of each step, by process, the first of them with an empty cache."""
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(PROCESSES + (backend != "reference")):
            words = [sys.executable, str(WORKER), backend]
            environment = {**os.environ, "TRITON_CACHE_DIR": folder}
            done = subprocess.run(words, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            answers.append(json.loads(done.stdout))
    return answers


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
    """After the one before it; the kernels' import brings Triton's."""
    samples = seconds(provider, PROVIDERS[2])
    measure(group="imports", provider=provider, samples=samples, dtype="-")


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("op", CASES)
def test_first_call(measure, op, provider):
    samples = seconds(op, provider)
    bf16 = KERNELS == "triton" or "compile" in provider
    dtype = torch.bfloat16 if bf16 else torch.float32
    measure(group=f"first call of {op}", provider=provider, samples=samples, dtype=dtype)
