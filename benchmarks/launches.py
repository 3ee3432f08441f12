"""Counts the kernels that a layer of a stack launches, forward and backward, without a GPU.

    python -m benchmarks.launches

The layers run on the stand-in GPU (benchmarks/gpu/stand_in): Triton's kernels are compiled for an
H100 and their launches accepted, and of torch's ops each that computes counts as one launch. A
figure is the difference between a stack of three layers and one of two, in training, in bfloat16,
with dropout and a key mask, so that it is the cost of one more layer. `torch` is the layer of
torch.nn in eager mode with its memory-efficient attention.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks import table as markdown_table

B, S, D, H = 64, 128, 512, 8
DRAWS = "randint of a forward"
LAYERS = "encoder", "decoder"
PROVIDERS = "fastformer", "accelerate", "torch"
KINDS = ("Triton", "mm", "addmm", "sum", "randint", "cat", "copy", "other")
KIND = {name: name for name in ("mm", "addmm", "sum", "randint", "cat")} | {"stack": "cat"}
KIND |= dict.fromkeys(("copy_", "clone", "_to_copy"), "copy")
FREE = "_unsafe_view", "_reshape_alias", "promote_types"  # no views by their schema, and no kernel
Counts = dict[str, dict[str, int]]


def count(layers: Sequence[str] = LAYERS, providers: Sequence[str] = PROVIDERS) -> Counts:
    """Return the launches by kind for "LAYER, PROVIDER", counted in a process of its own; as
    "randint of a forward" those that draw seeds for a whole stack.
    """
    from benchmarks.gpu.stand_in import device

    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | device.environment(Path(folder))
        command = [sys.executable, "-m", "benchmarks.launches", "--count", *layers, *providers]
        return json.loads(subprocess.check_output(command, cwd=ROOT, env=environment))


def table(counts: Counts) -> str:
    """Return the counts as a table of Markdown."""
    rows = []
    for name, own in counts.items():
        figures = [own[kind] for kind in KINDS]
        rows.append([name, sum(figures), *figures, own[DRAWS]])
    return "\n".join(markdown_table(["layer", "all", *KINDS, DRAWS], rows))


def _count(layers: Sequence[str], providers: Sequence[str]) -> Counts:
    """Count on the stand-in GPU, which this process has."""
    import torch
    import torch.nn.functional as F
    import triton
    from torch import nn
    from torch.utils._python_dispatch import TorchDispatchMode

    import fastformer as ff

    launches: Counter[str] = Counter()

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if op.namespace == "fastformer":  # and what runs within it
                with self:
                    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
                    return op.redispatch(keys, *args, **kwargs)
            with self:  # below autograd, an op that is made of others arrives whole
                result = op.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            name = op._schema.name.removeprefix("aten::")
            if not (op.is_view or name in FREE or "empty" in name):
                launches[KIND.get(name, "other")] += 1
            return op(*args, **kwargs)

    F.scaled_dot_product_attention = _efficient
    triton.knobs.runtime.launch_enter_hook.add(lambda _: launches.update(["Triton"]))
    options: Any = dict(device="cuda", dtype=torch.bfloat16)
    x = torch.randn(B, S, D, **options)
    padding = torch.zeros(B, S, dtype=torch.bool, device="cuda")

    def step(kind: str, provider: str, layers: int) -> Counter[str]:
        """Return the launches of forward and backward of a stack."""
        given, names = ((x,), ("src",)) if kind == "encoder" else ((x, x), ("tgt", "memory"))
        stack: nn.Module
        if provider == "fastformer":
            stack = getattr(ff.make_model(8, 8, layers, D, 4 * D, H), kind).to(**options)
            call = lambda: stack(*given, *[~padding.unsqueeze(1)] * len(given))  # noqa: E731
        else:
            stack = _of_torch(kind, layers, **options)
            if provider == "accelerate":
                ff.accelerate(stack)
            masks = {f"{name}_key_padding_mask": padding for name in names}
            call = lambda: stack(*given, **masks)  # noqa: E731
        stack.train()
        launches.clear()
        with Ops():
            call().backward(x)
        return Counter(launches)

    counts = {}
    for kind in layers:
        for provider in providers:
            two, three = step(kind, provider, 2), step(kind, provider, 3)
            counts[f"{kind}, {provider}"] = _of_a_layer(two, three)
    return counts


def _of_a_layer(two: Counter[str], three: Counter[str]) -> dict[str, int]:
    """Return the launches of one more layer, given those of stacks of two layers and of three."""
    return {name: three[name] - two[name] for name in KINDS} | {DRAWS: three["randint"]}


def _of_torch(kind: str, layers: int, **options: Any) -> Any:
    """Make a stack of layers of torch.nn."""
    from torch import nn

    settings: Any = dict(batch_first=True, norm_first=True, **options)
    return getattr(nn.Transformer(D, H, layers, layers, 4 * D, **settings), kind)


def _efficient(
    q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any, **__: Any
) -> Any:
    """Torch's kernel with a mask and dropout; of tensors without a GPU torch takes none."""
    import torch

    if attn_mask is not None:
        attn_mask = attn_mask.expand(*q.shape[:3], k.shape[2])
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    return attend(q, k, v, attn_mask, True, dropout_p)[0]


if __name__ == "__main__":
    if "--count" in sys.argv:
        print(json.dumps(_count(*([x for x in sys.argv if x in y] for y in (LAYERS, PROVIDERS)))))
    else:
        print(table(count()))
