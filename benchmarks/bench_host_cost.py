"""The cost of a call on the host. Each row makes a thousand calls, so its ms are microseconds per
call.

Dispatch of an op, with almost no data: `reference` is the time of fastformer's op, which includes
the few torch ops of the reference, beside torch's op alone. On a GPU `triton` is the time to hand
over the kernel.

Launch of an op, without a GPU and with nothing launched: `triton` is the time from the op's
implementation to the launcher; the forward of the FFN is without torch's product. Its peer `stock`
starts the same kernels with Triton's own `kernel[grid](...)` in a torch.library.custom_op.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fastformer as ff
from benchmarks.peers import available

CALLS, ROUNDS = 1000, 7 if torch.cuda.is_available() else 3
LAUNCHED, LAUNCHERS = ["attention", "layer_norm", "feed_forward"], ["triton", "stock"]


def _given(op, x):
    """Return the arguments of the op, [1, 1, 16, 16] and what goes with it."""
    name, _, feature = op.partition(" with ")
    if name == "layer_norm":
        return name, (x, (16,), *(x[0, 0, 0],) * 2) if feature else (x, (16,))
    mask = torch.ones(16, 16, dtype=torch.bool, device=x.device).tril()
    hidden = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, float("-inf"))
    bias = torch.zeros_like(hidden)
    extra = {
        "": (), "a mask": (mask,), "a bias": (bias,), "a bias of -inf": (hidden,),
        "dropout": (None, 0.1),
    }[feature]  # fmt: skip
    return name, (x, x, x, *extra)


@pytest.mark.parametrize("provider", available("torch", "reference", "triton"))
@pytest.mark.parametrize(
    "op",
    [
        "layer_norm",
        "layer_norm with weight and bias",
        "scaled_dot_product_attention",
        "scaled_dot_product_attention with a mask",
        "scaled_dot_product_attention with a bias",
        "scaled_dot_product_attention with a bias of -inf",
        "scaled_dot_product_attention with dropout",
    ],
)
def test_dispatch(measure, device, dtype, op, provider):
    torch.set_num_threads(1)
    x = torch.randn(1, 1, 16, 16, device=device, dtype=dtype)
    name, given = _given(op, x)
    call = getattr(F if provider == "torch" else ff, name)

    def calls():
        with ff.use_backend("auto" if provider == "torch" else provider):
            for _ in range(CALLS):
                call(*given)

    group = f"host cost of {op}, {CALLS} calls"
    measure(calls, group=group, on_host=True)


@pytest.fixture(scope="module")
def worker():
    """Yield a function (op, mode, provider, calls) -> seconds, which asks a worker process."""
    pytest.importorskip("triton")
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("host_cost_worker.py"))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

    def ask(op, mode, provider, calls=CALLS):
        request = {"op": op, "mode": mode, "provider": provider, "calls": calls}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    yield ask
    process.communicate()


@pytest.mark.parametrize("provider", LAUNCHERS)
@pytest.mark.parametrize("op", LAUNCHED)
def test_host_cost(worker, measure, op, mode, provider):
    worker(op, mode, provider, 1)  # compiles
    measure(
        samples=[worker(op, mode, provider) for _ in range(ROUNDS)],
        group=f"host cost of {op} {mode}, {CALLS} calls",
        dtype="bfloat16",
    )
