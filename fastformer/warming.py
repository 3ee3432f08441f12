"""Compile the kernels of a model before its first step: `warm_up`."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fastformer import checks
from fastformer.dispatch import backends

EMPTY = "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"


class _Zeros(TorchDispatchMode):
    """Sets to zero what a kernel that is not launched leaves as it was."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = op(*args, **(kwargs or {}))
        if op.namespace == "fastformer" or op.__name__.partition(".")[0] in EMPTY:
            for x in tree_leaves(output):
                x.zero_()
        return output


class _Step(nn.ModuleList):
    """The forward of a model, and the backward of its losses, or of all outputs if it has none."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        found = tree_leaves(self[0](*args, **kwargs))
        outputs = [x for x in found if isinstance(x, Tensor) and x.requires_grad]
        outputs = [x for x in outputs if x.dim() == 0] or outputs
        torch.autograd.backward(outputs, [torch.zeros_like(x) for x in outputs])

    def run_apart(self, *args: Any, **kwargs: Any) -> None:
        """Run it on other leaves of autograd and copies of the buffers, and give back the random
        generators, and the gradients, which FSDP writes nonetheless.
        """
        args, kwargs = tree_map_only(
            Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), (args, kwargs)
        )
        parameters = dict(self.named_parameters())
        given = {n: nn.Parameter(p.detach(), p.requires_grad) for n, p in parameters.items()}
        buffers = {n: x.clone() for n, x in self.named_buffers()}
        gpus = {x.get_device() for x in (given | buffers).values() if x.is_cuda}
        grads = [p.grad for p in parameters.values()]
        with torch.random.fork_rng(sorted(gpus)):
            torch.func.functional_call(self, given | buffers, args, kwargs)
        for p, grad in zip(parameters.values(), grads):
            p.grad = grad


def warm_up(
    model: nn.Module, /, *inputs: Any, processes: int = 0, **kwargs: Any
) -> tuple[int, float]:
    """Compile the kernels that the forward and the backward of a model launch.

    Otherwise the first step of each process does so, one kernel after the other. The model runs
    once on the inputs, in its current mode and on the selected backend, then the backward of its
    losses (the outputs without dimensions) or else of all outputs, unless gradients are disabled.
    fastformer launches no kernel meanwhile: what they compute is zero. Then the kernels that are
    not in Triton's cache are compiled, several at once; of the ranks of a machine one compiles, and
    the others wait. Call it for each shape of the inputs: another one may need other kernels.
    Parameters, buffers, gradients and random generators stay as they are; inputs that the model
    changes, such as a cache, do not.

    Args:
        model: an nn.Module, with its loss if fastformer computes that. Of a compiled model the
            original runs, and of a DistributedDataParallel its module.
        inputs: the positional arguments of the model.
        processes: how many compile at once; 0: one for each core.
        kwargs: the keyword arguments of the model.

    Returns:
        (kernels, seconds): how many kernels the step launches that this process had not loaded, 0
        where none runs, as on a CPU; and the time that all this took.

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
    step = _Step([model.module if isinstance(model, DistributedDataParallel) else model])
    with compiling.recording() as kernels, _Zeros():
        step.run_apart(*inputs, **kwargs)
    if kernels:
        with FileLock(f"{compiling.knobs.cache.dir}/fastformer.lock"):  # the other ranks wait
            compiling.load([*kernels.values()], processes or len(os.sched_getaffinity(0)))
    return len(kernels), time.perf_counter() - started
