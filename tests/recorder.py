"""A stand-in for CUDA graphs, for tests on a CPU."""

import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import fastformer as ff


class Recorder(TorchDispatchMode):
    """A stand-in for a CUDA graph: it records what runs on the device, and runs it again.

    The tensors are those of the recording, and the host's part of the step does not run again.
    Whatever a step takes from the host, such as a position, is that of the recording, too.
    """

    waits = ("_local_scalar_dense", "is_nonzero", "item")

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert not any(name in str(op) for name in self.waits), f"{op} waits for the device"
        out = op(*args, **kwargs)
        # Without their part in autograd: a replay writes to tensors of the recording.
        self.calls.append(
            (op, *tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs, out)))
        )
        return out

    @torch.no_grad()
    def replay(self):
        for op, args, kwargs, out in self.calls:
            new = tree_leaves(op(*args, **kwargs))
            for old, x in zip(tree_leaves(out), new):
                if isinstance(x, torch.Tensor) and x.data_ptr() != old.data_ptr():
                    old.copy_(x)


def run_as_on_a_gpu(monkeypatch):
    """Let no module of fastformer read the values of a tensor, or leave an op to torch's own."""
    modules = [m for name, m in sys.modules.items() if name.startswith("fastformer")]
    for module in [m for m in modules if hasattr(m, "may_read")]:
        monkeypatch.setattr(module, "may_read", lambda x: False)
    for module in (ff.ops.attention.reference, ff.ops.attention.by_torch):
        monkeypatch.setattr(module, "torch_computes", lambda *_: False)
    # The plans may read values.
    monkeypatch.setattr(ff.dispatch.front, "unwatched_backend", lambda: None)
