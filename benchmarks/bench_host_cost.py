"""The cost of a call on the host. Each row makes a thousand calls, so its ms are microseconds per
call. In `host cost` nothing is launched:

`triton` is the time from the op's implementation to Triton's launcher in C, whose driver starts
nothing (benchmarks/gpu/stand_in); the forward of the FFN is without torch's product. Its peer
`stock` starts the same kernels with Triton's own `kernel[grid](...)` in a torch.library.custom_op.

`public call`, on a GPU, is the whole call of the public function beside torch's own, with operands
so small that the device keeps up: the time until the host has handed over all calls.
"""

import functools
import time

import pytest
import torch
import torch.nn.functional as F

import fastformer as ff
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


def _attentions(random, device):
    q, k, v = (random(2, 128, 8, 64).transpose(1, 2) for _ in range(3))
    mask = torch.rand(2, 1, 1, 128, device=device) < 0.8
    return {
        "attention": (ff.scaled_dot_product_attention, F.scaled_dot_product_attention, (q, k, v)),
        "attention, mask and dropout": (
            ff.scaled_dot_product_attention, F.scaled_dot_product_attention, (q, k, v, mask, 0.1),
        ),
    }  # fmt: skip


def _rows(random, device):
    x, residual, w, b = random(256, 512), random(256, 512), random(512), random(512)
    w_1, b_1, w_2 = random(1024, 512), random(1024), random(512, 1024)
    target = torch.randint(0, 512, (256,), device=device)
    return {
        "layer_norm": (ff.layer_norm, F.layer_norm, (x, (512,), w, b)),
        "dropout_add_layer_norm": (
            lambda *given: ff.dropout_add_layer_norm(*given, 0.1)[0],
            lambda x, r, w, b: F.layer_norm(r + F.dropout(x, 0.1), (512,), w, b),
            (x, residual, w, b),
        ),
        "feed_forward": (
            lambda *given: ff.feed_forward(*given, "relu", 0.1),
            lambda x, w_1, b_1, w_2, b: F.linear(
                F.dropout(F.linear(x, w_1, b_1).relu(), 0.1), w_2, b
            ),
            (x, w_1, b_1, w_2, b),
        ),
        "cross_entropy": (ff.cross_entropy, F.cross_entropy, (x, target)),
    }


PUBLIC = ["attention", "attention, mask and dropout", "layer_norm", "dropout_add_layer_norm"]
PUBLIC += ["feed_forward", "cross_entropy"]


@pytest.mark.gpu
@pytest.mark.parametrize("provider", ["torch", "auto"])
@pytest.mark.parametrize("op", PUBLIC)
def test_public_call(measure, benchmark, differentiated, random, device, op, mode, provider):
    ours, torchs, given = (_attentions(random, device) | _rows(random, device))[op]
    leaves = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
    function = torchs if provider == "torch" else ours
    call = differentiated(lambda: function(*given), leaves)
    call()
    samples = []
    for _ in range(0 if benchmark.disabled else ROUNDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(CALLS // 10):  # fewer than what waits for the device at a time
            call()
        samples.append(10 * (time.perf_counter() - started))
    backend = None if provider == "torch" else "triton"
    group = f"public call of {op} {mode}, host"
    measure(samples=samples, group=group, backend=backend, dtype="bfloat16")
