"""Calls ops whose kernels start nothing: what is left is what a call costs on the host.

A stand-in driver names a GPU, Triton compiles for it, and the launcher does nothing. One JSON line
each: {"mode", "provider", "calls"} in, the seconds of processor that they took out. A process of
its own, because Triton's interpreter, once chosen, holds for the whole process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
os.environ["TRITON_INTERPRET"] = "0"
os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / ".cache" / "triton"))
sys.path.insert(0, str(ROOT))

import torch
from fastformer.kernels.attention import launchers as attention
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


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k and v as a projection leaves them, key lengths and a dropout seed."""
    q, k, v = (
        torch.randn(BATCH, LENGTH, HEADS, DIM, dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(3)
    )
    lengths = torch.full((BATCH,), LENGTH // 2, dtype=torch.int32)
    return q, k, v, lengths, torch.zeros(1, dtype=torch.int64)


def ours(mode: str) -> Any:
    """From the implementation of the op to the launcher."""
    q, k, v, lengths, seed = inputs()
    described = Attention(None, DROPOUT, False, SCALE, key_lengths=lengths, dropout_seed=seed)
    options = pack([q, k, v, described])
    gradient = torch.randn_like(attention.forward(*options, False)[0])
    needs = [True, True, True, False, False]
    if mode == "forward":
        return lambda: attention.forward(*options, False)

    def both() -> None:
        saved = attention.forward(*options, False)
        attention.backward(gradient, None, *options, *saved, needs)

    return both


def stock(mode: str) -> Any:
    """The same kernels with the same arguments, each started by `kernel[grid](...)`, and the
    outputs made, inside of a torch.library.custom_op.
    """
    q, k, v, lengths, seed = inputs()
    tensors = (None, None, None, lengths, None, seed)
    options = (DROPOUT, False, SCALE, None, "top_left", None, 0, 0)
    pointers = attention._pointers(q, tensors)
    plan = attention._Forward(q, k, v, tensors, options)
    output = attention._outputs(q, v)[0]
    gradient = torch.randn_like(output)
    needs = (True, True, True, False)
    backward = attention._Backward(gradient, None, output, needs, q, k, v, tensors, options)

    @torch.library.custom_op("host_cost::forward", mutates_args=())
    def run_forward(
        q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, seed: Tensor
    ) -> tuple[Tensor, Tensor]:
        output, lse = attention._outputs(q, v)
        plan.forward.through_triton(q, k, v, output, lse, *pointers)
        return output, lse

    @torch.library.custom_op("host_cost::backward", mutates_args=())
    def run_backward(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (attention._heads_like(x, HEADS, DIM) for x in (q, k, v))
        delta = torch.empty_like(lse)
        backward.launch["delta"].through_triton(output, gradient, lse, delta)
        rest = lse, delta, *pointers
        backward.launch["dkdv"].through_triton(q, k, v, gradient, dk, dv, delta, *rest)
        backward.launch["dq"].through_triton(q, k, v, gradient, dq, *rest)
        return dq, dk, dv

    if mode == "forward":
        return lambda: run_forward(q, k, v, lengths, seed)

    def both() -> None:
        output, lse = run_forward(q, k, v, lengths, seed)
        run_backward(gradient, q, k, v, output, lse)

    return both


def main() -> None:
    torch.set_num_threads(1)
    driver.set_active(Driver())
    attention.architecture = lambda device: "sm_90"
    replies, sys.stdout = sys.stdout, sys.stderr  # what Triton prints is no reply
    made: dict[tuple[str, str], Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        what = request["mode"], request["provider"]
        if what not in made:
            made[what] = {"triton": ours, "stock": stock}[what[1]](what[0])
            for _ in range(100):
                made[what]()
        call, started = made[what], time.process_time()
        for _ in range(request["calls"]):
            call()
        print(time.process_time() - started, file=replies, flush=True)


if __name__ == "__main__":
    main()
