"""Imports fastformer and calls each op once, forward and backward, in a fresh process, and prints
the seconds of each step as one JSON object.

    python -m benchmarks.first_call_worker reference|triton
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

OPS = (
    "scaled_dot_product_attention", "layer_norm", "dropout_add_layer_norm", "feed_forward", "embed",
    "cross_entropy",
)  # fmt: skip


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


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "0"
    seconds = {}
    for what in ("torch", "fastformer", "fastformer.kernels.attention"):
        started = time.perf_counter()
        __import__(what)
        seconds["import " + what] = time.perf_counter() - started
    seconds |= first_calls(sys.argv[1])
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
