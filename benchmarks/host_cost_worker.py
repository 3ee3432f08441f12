"""Public calls whose kernels take no time: what is left is what a whole call costs on the host.

    python -m benchmarks.host_cost_worker CALLS ROUNDS

Kernels are compiled for an H100, and a stand-in for the driver accepts their launches and starts
nothing. The last line is a JSON object: for "OP MODE" the seconds of processor of that many calls,
by round.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastformer as ff
from benchmarks import ROOT

OPS = ["attention", "attention, mask and dropout", "layer_norm", "dropout_add_layer_norm"]
OPS += ["feed_forward", "cross_entropy"]
MODES, P = ["forward", "forward+backward"], 0.1


def _torch_add(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(residual + F.dropout(x, P), w.shape, w, b)


def _torch_feed_forward(x: Tensor, w_1: Tensor, b_1: Tensor, w_2: Tensor, b_2: Tensor) -> Tensor:
    return F.linear(F.dropout(F.linear(x, w_1, b_1).relu(), P), w_2, b_2)


def call(op: str, mode: str, ours: bool, device: torch.device) -> Callable[[], Any]:
    """Return a call of a public function, or of torch's own, on operands that are small."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_()

    q, k, v = (random(2, 128, 8, 64).transpose(1, 2) for _ in range(3))
    x, residual, w, b, b_2 = random(16, 64), random(16, 64), random(64), random(64), random(64)
    mask = torch.ones(2, 1, 1, 128, dtype=torch.bool, device=device)
    target, attention = (
        torch.zeros(16, dtype=torch.int64, device=device),
        F.scaled_dot_product_attention,
    )
    own, others, given = {
        "attention": (ff.scaled_dot_product_attention, attention, (q, k, v)),
        "attention, mask and dropout": (
            ff.scaled_dot_product_attention, attention, (q, k, v, mask, P),
        ),
        "layer_norm": (ff.layer_norm, F.layer_norm, (x, (64,), w, b)),
        "dropout_add_layer_norm": (
            lambda *given: ff.dropout_add_layer_norm(*given, P)[0], _torch_add, (x, residual, w, b),
        ),
        "feed_forward": (
            lambda *given: ff.feed_forward(*given, "relu", P), _torch_feed_forward,
            (x, random(64, 64), b, random(64, 64), b_2),
        ),
        "cross_entropy": (ff.cross_entropy, F.cross_entropy, (x, target)),
    }[op]  # fmt: skip
    function: Callable[..., Tensor] = own if ours else others
    if mode == "forward":
        return torch.no_grad()(lambda: function(*given))
    leaves = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
    grad = torch.ones_like(function(*given))
    return lambda: torch.autograd.grad(function(*given), leaves, grad)


def main() -> None:
    calls, rounds = map(int, sys.argv[1:])
    os.environ["TRITON_INTERPRET"] = "0"
    os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / ".cache" / "triton"))
    torch.set_num_threads(1)
    from benchmarks.gpu import stand_in

    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, ff.use_backend("triton"):
        stand_in.install(Path(folder))
        for op, mode in ((op, mode) for op in OPS for mode in MODES):
            run = call(op, mode, True, torch.device("cpu"))
            for _ in range(min(100, calls)):
                run()
            samples = found[f"{op} {mode}"] = []
            for _ in range(rounds):
                started = time.process_time()
                for _ in range(calls):
                    run()
                samples.append(time.process_time() - started)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
