"""Calls ops whose kernels start nothing: what is left is what a call costs on the host.

A stand-in driver names a GPU, Triton compiles for it, and the launcher does nothing. One JSON line
each: {"op", "mode", "provider", "calls"} in, the seconds of processor that they took out. This is a
process of its own, because Triton's interpreter, once chosen, holds for the whole process.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
os.environ["TRITON_INTERPRET"] = "0"
os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / ".cache" / "triton"))
sys.path.insert(0, str(ROOT))

import torch
from fastformer.kernels import feed_forward
from fastformer.kernels.attention import launchers as attention
from fastformer.kernels.launch import Launch
from fastformer.kernels.layer_norm import launchers as layer_norm
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fastformer.description import Attention, pack

BATCH, HEADS, LENGTH, DIM = 8, 8, 128, 64
DROPOUT, SCALE = 0.1, DIM**-0.5


class Driver:
    """What Triton asks of a driver, of an H100 that is not there."""

    utils: Any

    def __init__(self) -> None:
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, *_: Any) -> tuple[None, int, int, int, int]:
        return None, 1, 32, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *_: None


# -------------------------------------------------------------------------------------- the calls


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


FACTS = {"architecture": "sm_90", "processors": 132}  # of an H100
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
    torch.set_num_threads(1)
    driver.set_active(Driver())
    modules = [x for name, x in sys.modules.items() if name.startswith("fastformer.kernels.")]
    for module, (name, fact) in itertools.product(modules, FACTS.items()):
        if hasattr(module, name):
            setattr(module, name, lambda device, fact=fact: fact)
    torch.nn.functional.linear = lambda x, w, b: x  # a launch is measured, no product
    replies, sys.stdout = sys.stdout, sys.stderr  # what Triton prints is no reply
    made: dict[tuple[str, str, str], Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        what = request["op"], request["mode"], request["provider"]
        if what not in made:
            made[what] = {"triton": ours, "stock": stock}[what[2]](*what[:2])
            for _ in range(100):
                made[what]()
        call, started = made[what], time.process_time()
        for _ in range(request["calls"]):
            call()
        print(time.process_time() - started, file=replies, flush=True)


if __name__ == "__main__":
    main()
