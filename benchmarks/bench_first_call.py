"""What stands before the first result: the imports, and each op's first call, forward and backward.

Every row is of fresh processes. `reference` is the first call of the reference. `triton, cold`
and `triton, warm` are the kernels' first call on a GPU, with Triton's cache (TRITON_CACHE_DIR)
empty and as an earlier process has left it. Without a GPU `compile, cold` and `compile, warm` are
in their place: what such a call compiles for sm_90, with nothing launched; the first op's warm row
holds Triton's own start.
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
PROVIDERS = ["reference", f"{KERNELS}, cold", f"{KERNELS}, warm"]
PROCESSES = {"cold": 1, "warm": 2, "reference": 2}


@functools.cache
def processes(provider):
    """The seconds of each step, by process."""
    backend, _, cache = provider.partition(", ")
    with tempfile.TemporaryDirectory() as folder:
        answers = []
        for _ in range(PROCESSES[cache or backend] + (cache == "warm")):
            words = [sys.executable, str(WORKER), backend]
            environment = {**os.environ, "TRITON_CACHE_DIR": folder}
            done = subprocess.run(words, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            answers.append(json.loads(done.stdout))
    return answers[1:] if cache == "warm" else answers


IMPORTS = ["import torch", "import fastformer", "import fastformer.kernels.attention"]


@pytest.fixture(autouse=True)
def needs_triton():
    pytest.importorskip("triton")


@pytest.mark.parametrize("provider", IMPORTS)
def test_import(measure, provider):
    """After the one before it; the kernels' import brings Triton's."""
    samples = [seconds[provider] for seconds in processes(PROVIDERS[2])]
    measure(group="imports", provider=provider, samples=samples, dtype="-")


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("op", CASES)
def test_first_call(measure, op, provider):
    samples = [seconds[op] for seconds in processes(provider)]
    bf16 = KERNELS == "triton" or "compile" in provider
    dtype = torch.bfloat16 if bf16 else torch.float32
    measure(group=f"first call of {op}", provider=provider, samples=samples, dtype=dtype)
