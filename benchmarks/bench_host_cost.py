"""What a call of attention costs on the host, for a GPU that is not there: nothing is launched.

`triton` is from the op's implementation to the launcher; its peer `stock` starts the same kernels
with Triton's own `kernel[grid](...)` inside of a torch.library.custom_op. A thousand calls each:
ms stand for microseconds a call.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CALLS = 1000


@pytest.fixture(scope="module")
def worker():
    """A process that answers (mode, provider, calls) with seconds."""
    pytest.importorskip("triton")
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("host_cost_worker.py"))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

    def ask(mode, provider, calls=CALLS):
        request = {"mode": mode, "provider": provider, "calls": calls}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    yield ask
    process.communicate()


@pytest.mark.parametrize("provider", ["triton", "stock"])
def test_host_cost(worker, measure, mode, provider):
    worker(mode, provider, 1)  # compiles
    measure(
        lambda: worker(mode, provider),
        group=f"host cost of attention {mode}, {CALLS} calls",
        provider=provider,
        dtype="bfloat16",
    )
