"""Imports fastformer and calls each op once, forward and backward, in a fresh process, and prints
the seconds of each step as one JSON object.

    python first_call_worker.py reference|triton|compile

`compile` compiles the kernels of a first call for sm_90 without a GPU, and launches nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# The cases of proof/cases.py that represent a first call.
CASES = {
    "scaled_dot_product_attention": "sm_90 attention bf16 D=64 lengths, dropout",
    "layer_norm": "sm_90 layer_norm bf16 N=512",
    "dropout_add_layer_norm": "sm_90 dropout_add_layer_norm bf16 N=512",
    "feed_forward": "sm_90 feed_forward bf16 relu, dropout",
    "embed": "sm_90 embed bf16 N=512",
    "cross_entropy": "sm_90 cross_entropy bf16 V=32768",
}


def calls(device: Any, dtype: Any) -> dict[str, Callable[[], Any]]:
    """Return a call of each public op, whose result is summed and differentiated."""
    import torch
    import torch.nn.functional as F

    import fastformer as ff

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)

    q, x, w_1, w_2 = random(2, 8, 128, 64), random(256, 512), random(2048, 512), random(512, 2048)
    b_1, b_2, logits = random(2048), random(512), random(256, 32768)
    tokens = torch.randint(0, 256, (2, 128), device=device)
    lengths = torch.tensor([100, 128], device=device)
    attention = ff.scaled_dot_product_attention
    F.linear(x, w_1).sum().backward()  # initialises the BLAS library and autograd
    return {
        "scaled_dot_product_attention": lambda: attention(q, q, q, None, 0.1, key_lengths=lengths),
        "layer_norm": lambda: ff.layer_norm(x, 512, b_2, b_2),
        "dropout_add_layer_norm": lambda: ff.dropout_add_layer_norm(x, x, b_2, b_2, 0.1)[0],
        "feed_forward": lambda: ff.feed_forward(x, w_1, b_1, w_2, b_2, "relu", 0.1),
        "embed": lambda: ff.embed(tokens, x, x[:128].detach(), 0.1),
        "cross_entropy": lambda: ff.cross_entropy(logits, tokens.flatten(), label_smoothing=0.1),
    }


def first_calls(backend: str) -> dict[str, float]:
    import torch

    import fastformer as ff

    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    ff.use_backend(backend)
    seconds = {}
    for op, call in calls(device, dtype).items():
        started = time.perf_counter()
        call().sum().backward()
        if on_gpu:
            torch.cuda.synchronize()
        seconds[op] = time.perf_counter() - started
    return seconds


def compilations() -> dict[str, float]:
    import torch
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from benchmarks.proof import cases, compile_worker

    stand_in, run = compile_worker.Driver(), JITFunction.run
    stand_in.target, row, _ = compile_worker.TARGETS["sm_90"]
    driver.set_active(stand_in)
    JITFunction.run = lambda *a, warmup, **options: run(*a, warmup=True, **options) and None
    del os.environ["TRITON_DUMP_PTXAS_LOG"]
    for x in (torch.empty(2, 2, device="meta"), torch.empty(2, 2, 2, device="meta")):
        torch.nn.functional.linear(
            x, x.view(-1, 2), x.view(-1, 2)[:, 0]
        )  # initialises meta tensors
    compile_worker.choose_as_on(row)
    seconds = {}
    for op, name in CASES.items():
        case = cases.CASES[name]
        started = time.perf_counter()
        compile_worker.CALLS[case["op"]](case, SimpleNamespace())
        seconds[op] = time.perf_counter() - started
    return seconds


def main() -> None:
    backend = sys.argv[1]
    if backend != "reference":
        os.environ["TRITON_INTERPRET"] = "0"
    replies, sys.stdout = sys.stdout, sys.stderr  # keeps what Triton prints out of the reply
    seconds = {}
    for what in ("torch", "fastformer", "fastformer.kernels.attention"):
        if what.startswith("fastformer.kernels") and backend == "reference":
            continue
        started = time.perf_counter()
        __import__(what)
        seconds["import " + what] = time.perf_counter() - started
    seconds |= compilations() if backend == "compile" else first_calls(backend)
    print(json.dumps(seconds), file=replies)


if __name__ == "__main__":
    main()
