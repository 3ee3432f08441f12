"""Compile the kernels of a model before its first step: `warm_up`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

from fastformer import checks
from fastformer.dispatch import backends


def _backward(outputs: Any) -> None:
    """Run the backward of a model's outputs, with zeros as their gradients. Only a reentrant
    checkpoint writes the gradients of its parameters.
    """
    found = tree_leaves(outputs)
    found += [getattr(x, f.name) for x in found if is_dataclass(x) for f in fields(x)]
    found = [x for x in found if isinstance(x, Tensor) and x.grad_fn is not None]
    nodes, left = set(), [x.grad_fn for x in found]
    while left:
        if (node := left.pop()) is not None and node not in nodes:
            nodes.add(node)
            left += [next for next, _ in node.next_functions]
    zeros = [torch.zeros_like(x) for x in found]
    if any("CheckpointFunction" in node.name() for node in nodes):  # a reentrant one
        torch.autograd.backward(found, zeros)
    elif found:  # with respect to all leaves, those that FSDP makes among them
        leaves = [node.variable for node in nodes if hasattr(node, "variable")]
        torch.autograd.grad(found, leaves, zeros, allow_unused=True)


@contextmanager
def _unchanged(model: nn.Module, inputs: Any) -> Iterator[None]:
    """Keep the buffers, the gradients of the parameters, and torch's random generators."""
    named = [(m, *pair) for m in model.modules() for pair in m.named_buffers(recurse=False)]
    buffers = [(module, name, x, x.clone()) for module, name, x in named]
    grads = [(p, p.grad) for p in model.parameters()]
    tensors = tree_leaves((inputs, [*model.parameters()], [*model.buffers()]))
    gpus = {x.get_device() for x in tensors if isinstance(x, Tensor) and x.is_cuda}
    try:
        with torch.random.fork_rng(sorted(gpus)):
            yield
    finally:
        for p, grad in grads:
            p.grad = grad
        for module, name, x, before in buffers:
            setattr(module, name, x)
            with torch.no_grad():
                x.copy_(before)


def warm_up(
    model: nn.Module, /, *inputs: Any, processes: int = 0, **kwargs: Any
) -> tuple[int, float]:
    """Compile the kernels that the forward and the backward of a model launch.

    Otherwise the first step of each process compiles them, one after the other. The model runs once
    on the inputs, in its current mode and on the selected backend, then the backward of its outputs
    if gradients are enabled. Meanwhile fastformer launches no kernel: what they compute is zero,
    which hooks see as well. Then the kernels that are not in Triton's cache are compiled, several
    at once; of the ranks of a machine one compiles, and the others wait. Inputs of other shapes may
    need other kernels: call it for each. Parameters and their gradients, buffers and torch's random
    generators are afterwards as before; whatever else the model changes, such as a cache, is not.

    Args:
        model: an nn.Module, with its loss if fastformer computes that. Of a compiled model the
            original runs, and of a DistributedDataParallel its module.
        inputs: the positional arguments of the model.
        processes: how many compile at once; 0: one for each core.
        kwargs: the keyword arguments of the model.

    Returns:
        (kernels, seconds): the number of kernels that this process has compiled or read from the
        cache, 0 on a CPU; and how long all this took.

    Raises:
        TypeError: model is not an nn.Module, or processes is no int.
        ValueError: processes is negative.
    """
    started = time.perf_counter()
    checks.require_instance("model", model, nn.Module, "an nn.Module")
    checks.require_size(least=0, processes=processes)
    if (compiling := backends.compiling()) is None:
        return 0, time.perf_counter() - started
    model = getattr(model, "_orig_mod", model)
    model = model.module if isinstance(model, DistributedDataParallel) else model
    inputs, kwargs = tree_map_only(  # what they are computed from gets no gradient
        Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), (inputs, kwargs)
    )
    with _unchanged(model, (inputs, kwargs)), compiling.recording() as kernels:
        _backward(model(*inputs, **kwargs))
    if kernels:
        with FileLock(f"{compiling.knobs.cache.dir}/fastformer.lock"):  # the other ranks wait
            compiling.load([*kernels.values()], processes or len(os.sched_getaffinity(0)))
    return len(kernels), time.perf_counter() - started
