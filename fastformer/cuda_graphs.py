"""Captures what a function launches in a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def captured(function: Callable[[], T]) -> tuple[Callable[[], None], T]:
    """Capture what the function launches in a CUDA graph; return its replay and its output.

    Other threads may use the GPU meanwhile. After a failure the process is as it was before: torch
    leaves its capture stream as the current one, and its random generator in the state of a
    capture, which ends with the next capture that succeeds.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = function()
    except BaseException:
        torch.cuda.set_stream(stream)
        graph.reset()
        _failed.append(graph)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                pass
        raise
    return graph.replay, out


_failed: list[torch.cuda.CUDAGraph] = []  # torch's allocator keeps a pointer to each of them
