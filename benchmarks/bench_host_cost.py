"""What a whole call of a public function costs the host, beside torch's own. Each row makes a
thousand calls, so its ms are microseconds per call.

On a GPU the operands are so small that the device keeps up: it is the time until the host has
handed over the calls. Without one, `triton` is the time of the processor over a stand-in for the
driver, which starts nothing, in a process of its own:

    python -m benchmarks.bench_host_cost CALLS ROUNDS

whose last line is a JSON object, for "OP MODE" the seconds of that many calls, by round.
"""

import functools
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fastformer as ff
from benchmarks import ROOT, answer
from benchmarks.gpu import stand_in
from benchmarks.peers import GPU

CALLS, ROUNDS = 1000, 7 if GPU else 3
AT_ONCE = 100  # calls: fewer than what may wait for the device at a time
MODES, P = ["forward", "forward+backward"], 0.1
OPS = ["attention", "attention, mask and dropout", "layer_norm", "dropout_add_layer_norm"]
OPS += ["feed_forward", "cross_entropy"]


def _torch_add(x, residual, w, b):
    return F.layer_norm(residual + F.dropout(x, P), w.shape, w, b)


def _torch_feed_forward(x, w_1, b_1, w_2, b_2):
    return F.linear(F.dropout(F.linear(x, w_1, b_1).relu(), P), w_2, b_2)


def public_call(op, mode, ours, device):
    """Return a call of a public function, or of torch's own, on small operands."""

    def random(*shape):
        return torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_()

    attention = ff.scaled_dot_product_attention, F.scaled_dot_product_attention
    q, k, v = (random(2, 128, 8, 64).transpose(1, 2) for _ in range(3))
    x, residual, w, b = random(16, 64), random(16, 64), random(64), random(64)
    w_1, w_2, b_1 = random(128, 64), random(64, 128), random(128)
    mask = torch.ones(2, 1, 1, 128, dtype=torch.bool, device=device)
    *functions, given = {
        "attention": (*attention, (q, k, v)),
        "attention, mask and dropout": (*attention, (q, k, v, mask, P)),
        "layer_norm": (ff.layer_norm, F.layer_norm, (x, (64,), w, b)),
        "dropout_add_layer_norm": (
            lambda *given: ff.dropout_add_layer_norm(*given, P)[0], _torch_add, (x, residual, w, b),
        ),
        "feed_forward": (
            lambda *given: ff.feed_forward(*given, "relu", P), _torch_feed_forward,
            (x, w_1, b_1, w_2, b),
        ),
        "cross_entropy": (
            ff.cross_entropy, F.cross_entropy,
            (x, torch.zeros(16, dtype=torch.int64, device=device)),
        ),
    }[op]  # fmt: skip
    function = functions[not ours]
    if mode == "forward":
        return torch.no_grad()(lambda: function(*given))
    leaves = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
    grad = torch.ones_like(function(*given))
    return lambda: torch.autograd.grad(function(*given), leaves, grad)


@functools.cache
def over_the_stand_in():
    return answer("-m", "benchmarks.bench_host_cost", CALLS, ROUNDS)


@pytest.mark.skipif(not GPU and stand_in.obstacle() is not None, reason=str(stand_in.obstacle()))
@pytest.mark.parametrize("provider", ["torch", "auto"] if GPU else ["triton"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", OPS)
def test_public_call(measure, benchmark, device, op, mode, provider):
    samples = [] if GPU or benchmark.disabled else over_the_stand_in()[f"{op} {mode}"]
    if GPU:
        call = public_call(op, mode, provider == "auto", device)
        call()
        for _ in range(0 if benchmark.disabled else ROUNDS):
            torch.cuda.synchronize()
            samples.append(_seconds(call, AT_ONCE, time.perf_counter) * CALLS / AT_ONCE)
    group = f"public call of {op} {mode}, host, {CALLS} calls"
    backend = None if provider == "torch" else "triton"
    measure(samples=samples, group=group, backend=backend, dtype="bfloat16")


def _seconds(call, times, clock):
    started = clock()
    for _ in range(times):
        call()
    return clock() - started


def main():
    calls, rounds = map(int, sys.argv[1:])
    os.environ["TRITON_INTERPRET"] = "0"
    os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / ".cache" / "triton"))
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as folder, ff.use_backend("triton"):
        stand_in.install(Path(folder))
        for op, mode in itertools.product(OPS, MODES):
            call = public_call(op, mode, True, torch.device("cpu"))
            _seconds(call, min(100, calls), time.process_time)
            found[f"{op} {mode}"] = [
                _seconds(call, calls, time.process_time) for _ in range(rounds)
            ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
