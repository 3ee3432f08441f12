"""The time before the first result: the imports, and the first call of each op, forward and
backward.

Every row is measured in fresh processes. `reference, eager` is the first call of the reference.
`triton, cold` and `triton, warm` are the first call of the kernels on a GPU, with an empty Triton
cache (TRITON_CACHE_DIR) and with the cache of an earlier process. Without a GPU they are replaced
by `compile, cold` and `compile, warm`, which compile the same kernels for sm_90 and launch nothing.
The row of the first op includes the start of Triton.
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
PROCESSES = 2 if torch.cuda.is_available() else 1  # for the reference, and for a warm cache


@functools.cache
def processes(backend):
    """Return the seconds of each step, by process; the first process has an empty cache."""
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
    """Each import follows the previous one; that of the kernels includes that of Triton."""
    samples = seconds(provider, PROVIDERS[2])
    measure(group="imports", samples=samples, dtype="-")


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("op", CASES)
def test_first_call(measure, op, provider):
    samples = seconds(op, provider)
    bf16 = KERNELS == "triton" or "compile" in provider
    dtype = torch.bfloat16 if bf16 else torch.float32
    measure(group=f"first call of {op}", samples=samples, dtype=dtype)
