"""Calls ops whose kernels start nothing: what is left is what a call costs on the host.

    python -m benchmarks.host_cost_worker CALLS ROUNDS

Kernels are compiled for an H100, and a stand-in for the driver accepts their launches. The last
line is a JSON object: for "OP MODE PROVIDER" the seconds of processor of that many calls, by round.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import ROOT

os.environ["TRITON_INTERPRET"] = "0"
os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / ".cache" / "triton"))

import torch
from fastformer.kernels import feed_forward
from fastformer.kernels.attention import launchers as attention
from fastformer.kernels.launch import Launch
from fastformer.kernels.layer_norm import launchers as layer_norm
from torch import Tensor

from benchmarks.gpu import stand_in
from fastformer.description import Attention, pack

BATCH, HEADS, LENGTH, DIM = 8, 8, 128, 64
DROPOUT, SCALE = 0.1, DIM**-0.5


class Calls(NamedTuple):
    """The tensors of an op, a call of its forward, and one of its backward with what that saved."""

    tensors: list[Tensor]
    forward: Callable[[], Any]
    backward: Callable[[Any], Any]


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k and v as a projection leaves them, key lengths and a dropout seed."""
    q, k, v = (
        torch.randn(BATCH, LENGTH, HEADS, DIM, dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(3)
    )
    lengths = torch.full((BATCH,), LENGTH // 2, dtype=torch.int32)
    return q, k, v, lengths, torch.zeros(1, dtype=torch.int64)


def call_attention() -> Calls:
    q, k, v, lengths, seed = inputs()
    described = Attention(None, DROPOUT, False, SCALE, key_lengths=lengths, dropout_seed=seed)
    options = pack([q, k, v, described])
    gradient = torch.randn_like(attention.forward(*options, False)[0])
    needs = [True, True, True, False, False]
    return Calls(
        [q, k, v, lengths, seed],
        lambda: attention.forward(*options, False),
        lambda saved: attention.backward(gradient, None, *options, *saved, needs),
    )


def call_layer_norm() -> Calls:
    x = torch.randn(BATCH, DIM, dtype=torch.bfloat16)
    weight, bias = torch.ones(DIM, dtype=x.dtype), torch.zeros(DIM, dtype=x.dtype)
    options = x, (DIM,), weight, bias, 1e-5, False
    return Calls(
        [x, weight, bias],
        lambda: layer_norm.forward(*options),
        lambda saved: layer_norm.backward(x, *options, *saved[1:], [True] * 3),
    )


def call_feed_forward() -> Calls:
    """Make the calls of the FFN. The forward is without torch's product; the backward has five of
    them, which a CPU computes.
    """
    x = torch.randn(BATCH, DIM, dtype=torch.bfloat16)
    w_1, b_1 = torch.randn(4 * DIM, DIM, dtype=x.dtype), torch.zeros(4 * DIM, dtype=x.dtype)
    options = x, w_1, b_1, torch.randn(DIM, 4 * DIM, dtype=x.dtype), None, "gelu", 0.0, None, None
    return Calls(
        [x, w_1, b_1],
        lambda: feed_forward.forward(*options),
        lambda saved: feed_forward.backward(x, *options, saved[1], [True] * 4 + [False]),
    )


CALLS = {
    "attention": call_attention,
    "layer_norm": call_layer_norm,
    "feed_forward": call_feed_forward,
}


def ours(op: str, mode: str) -> Callable[[], Any]:
    """Make a call from the op's launcher in Python to Triton's launcher."""
    _, forward, backward = CALLS[op]()
    return forward if mode == "forward" else lambda: backward(forward())


def stock(op: str, mode: str) -> Callable[[], Any]:
    """Make the same call in a torch.library.custom_op, with each kernel started by Triton's own
    `kernel[grid](...)`.
    """
    tensors, forward, backward = CALLS[op]()
    remembered = Launch.__call__

    @torch.library.custom_op(f"host_cost::{op}_forward", mutates_args=())
    def run_forward(tensors: list[Tensor]) -> list[Tensor]:
        return list(forward())

    @torch.library.custom_op(f"host_cost::{op}_backward", mutates_args=())
    def run_backward(tensors: list[Tensor], saved: list[Tensor]) -> list[Tensor]:
        return list(backward(saved))

    def call() -> None:
        Launch.__call__ = Launch.through_triton  # type: ignore[method-assign]
        try:
            saved = run_forward(tensors)
            if mode != "forward":
                run_backward(tensors, saved)
        finally:
            Launch.__call__ = remembered  # type: ignore[method-assign]

    return call


def main() -> None:
    calls, rounds = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    torch.nn.functional.linear = lambda x, w, b: x  # a launch is measured, no product
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        stand_in.install(Path(folder))
        modes, providers = ("forward", "forward+backward"), {"triton": ours, "stock": stock}
        for op, mode, (provider, make) in itertools.product(CALLS, modes, providers.items()):
            call = make(op, mode)
            for _ in range(min(100, calls)):
                call()
            found[f"{op} {mode} {provider}"] = samples = []
            for _ in range(rounds):
                started = time.process_time()
                for _ in range(calls):
                    call()
                samples.append(time.process_time() - started)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
