"""Imports fastformer and calls each op once, forward and backward, in a fresh process, and prints
the seconds of each step as one JSON object.

    python -m benchmarks.first_call_worker reference|triton
"""

from __future__ import annotations

import json
import os
import sys
import time


def first_calls(backend: str) -> dict[str, float]:
    """Return the seconds of the first call of each op and of its backward."""
    import torch

    import fastformer as ff
    from fastformer.ops import examples

    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    x = torch.randn(256, 512, device=device, dtype=dtype, requires_grad=True)
    (x @ x.t()).sum().backward()  # initialises the BLAS library and autograd
    ff.use_backend(backend)
    seconds: dict[str, float] = {}
    for op, given in examples.calls(torch.device(device), dtype, B=2, S=128, H=8):
        started = time.perf_counter()
        outputs = getattr(ff, op)(**given)
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        if first.requires_grad:
            first.sum().backward()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.setdefault(op, time.perf_counter() - started)
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
