"""Counts the kernels that torch.compile makes of a layer, and the bytes that they move, without a
GPU.

    python -m benchmarks.compiled_launches

A stack of layers of Hugging Face's transformers is traced with tensors of no data; then its graphs,
forward and backward, go to an H100 that is not there, and inductor lowers them as it does for one:
it decomposes, fuses, and generates the code, which nobody runs. Each of its kernels, and each of
the products that it leaves to cuBLAS, counts as one launch, with the bytes by inductor's own count:
a kernel reads its inputs and writes its outputs once. The ops of fastformer run on the stand-in
driver (benchmarks/gpu/stand_in): each launch of theirs counts, with the tensors that it takes. A
figure is the difference between a stack of three layers and one of two.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks import ROOT
from benchmarks import table as markdown_table

B, S, D, H = 8, 512, 768, 12
LAYERS = "BERT", "ViT", "GPT-2", "Llama"
KINDS = {  # what fastformer's pass replaces
    "inductor": (),
    "fastformer": ("attention", "loss"),
    "all": ("attention", "norm", "feed_forward", "loss"),
}
Counts = dict[str, dict[str, int]]


def count(layers: Sequence[str] = LAYERS, providers: Sequence[str] = tuple(KINDS)) -> Counts:
    """Return the launches and bytes for "LAYER, PROVIDER", counted in a process of its own."""
    from benchmarks.gpu import stand_in

    with tempfile.TemporaryDirectory() as folder:
        stand_in.build(Path(folder))
        environment = os.environ | {
            "TRITON_INTERPRET": "0",
            "FASTFORMER_TUNING": "off",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        }
        module = [sys.executable, "-m", "benchmarks.compiled_launches"]
        command = [*module, "--count", folder, *layers, *providers]
        return json.loads(subprocess.check_output(command, cwd=ROOT, env=environment))


def table(counts: Counts) -> str:
    """Return the counts as a table of Markdown."""
    head = ["layer", "launches", "Triton", "products", "fastformer", "other", "MB", "MB of fastformer"]
    rows = [
        [name, *[own[x] for x in head[1:6]], *[round(own[x] / 1e6) for x in ("bytes", "own bytes")]]
        for name, own in counts.items()
    ]
    return "\n".join(markdown_table(head, rows))


def _model(layer: str, layers: int) -> tuple[Any, dict[str, Any]]:
    """Make a stack of layers, and what it is called with."""
    import torch
    import transformers as hf

    same: Any = dict(num_hidden_layers=layers, hidden_size=D, attn_implementation="eager")
    same |= dict(num_attention_heads=H, intermediate_size=4 * D)
    embeds = dict(inputs_embeds=torch.empty(B, S, D, requires_grad=True))
    if layer == "BERT":
        mask = torch.ones(B, S, dtype=torch.bool)
        model = hf.BertModel(hf.BertConfig(vocab_size=8, **same), add_pooling_layer=False)
        return model, dict(attention_mask=mask, **embeds)
    if layer == "ViT":
        images = torch.empty(B, 3, 224, 224)
        return hf.ViTModel(hf.ViTConfig(**same), add_pooling_layer=False), dict(pixel_values=images)
    if layer == "GPT-2":
        sizes: Any = dict(n_layer=layers, n_embd=D, n_head=H, vocab_size=8, use_cache=False)
        return hf.GPT2Model(hf.GPT2Config(attn_implementation="eager", **sizes)), embeds
    same |= dict(hidden_size=1024, num_attention_heads=16, intermediate_size=2816)
    embeds = dict(inputs_embeds=torch.empty(B, S, 1024, requires_grad=True))
    return hf.LlamaModel(hf.LlamaConfig(vocab_size=8, use_cache=False, **same)), embeds


def _appear(folder: Path) -> None:
    """From here on inductor generates code for an H100, and Triton's kernels are not compiled."""
    import torch
    from triton import compiler

    from benchmarks.gpu import stand_in

    stand_in.install(folder)
    facts = SimpleNamespace(
        name="H100", gcnArchName="", major=9, minor=0, multi_processor_count=stand_in.MULTIPROCESSORS,
        L2_cache_size=stand_in.L2_CACHE, warp_size=32, total_memory=80 << 30,
        max_threads_per_block=1024, max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536, shared_memory_per_block_optin=stand_in.SHARED_OF_BLOCK,
    )  # fmt: skip
    torch.cuda.get_device_properties = lambda device=None: facts
    torch.cuda.device_count, torch.cuda.current_device = lambda: 1, lambda: 0
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    from torch._inductor import scheduler  # it reads what torch.cuda is

    scheduler.has_triton = lambda: True
    compiler.compile = lambda *_, **__: _Kernel()
    # torch without CUDA has nothing to switch to such a device with; that of "meta" does nothing.
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 20).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[1] = guards[14]  # by c10::DeviceType: CUDA, Meta


class _Kernel:
    """In place of a compiled kernel: a launch counts, with the bytes of its tensors."""

    function, packed_metadata = 0, ()
    launches: list[int] = []  # noqa: RUF012

    def launch_metadata(self, *_: Any) -> None: ...

    def run(self, *arguments: Any) -> None:
        given = [getattr(x, "base", x) for x in arguments]
        self.launches.append(_bytes([x for x in given if hasattr(x, "data_ptr")]))


def _bytes(tensors: Sequence[Any]) -> int:
    """Return the bytes of tensors, each that is given twice or expanded counted once."""
    sizes = {}
    for x in tensors:
        size = x.element_size()
        for n, stride in zip(x.shape, x.stride()):
            size *= n if stride else 1
        sizes[x.data_ptr()] = max(size, sizes.get(x.data_ptr(), 0))
    return sum(sizes.values())


def _of_op(node: Any) -> list[int]:
    """Return the bytes of each launch of one of fastformer's ops in a graph."""
    import torch
    from torch import fx
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map

    import fastformer as ff

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if op.namespace == "fastformer":
                with self:
                    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
                    return op.redispatch(keys, *args, **(kwargs or {}))
            result = op(*args, **(kwargs or {}))
            if not (op.is_view or "empty" in op.name() or "_unsafe_view" in op.name()):
                leaves = tree_leaves((args, kwargs, result))
                _Kernel.launches.append(_bytes([x for x in leaves if isinstance(x, torch.Tensor)]))
            return result

    def on_cpu(x: Any) -> Any:
        x = x.meta["val"] if isinstance(x, fx.Node) else x
        if isinstance(x, torch.device):
            return torch.device("cpu")
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")

    from torch._subclasses.fake_tensor import unset_fake_temporarily

    _Kernel.launches.clear()
    with unset_fake_temporarily(), torch.no_grad(), ff.use_backend("triton"):
        args, kwargs = tree_map(on_cpu, (node.args, node.kwargs))
        with Ops():
            node.target(*args, **kwargs)
    return list(_Kernel.launches)


def _count_graph(graph: Any, found: Counter[str]) -> None:
    """Count the launches of a graph that inductor has lowered."""
    from torch._inductor import ir
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    code, _ = graph.codegen()
    before = found["Triton"]
    for node in graph.scheduler.nodes:
        extern = isinstance(node, ExternKernelSchedulerNode)
        if isinstance(node, NopKernelSchedulerNode) or (
            extern and isinstance(node.node, ir.MultiOutput)
        ):
            continue
        moved, launches, kind = node.get_read_write_buffers_sizes(), 1, "Triton"
        if extern:
            op = str(getattr(node.node, "op_overload", ""))
            kind = "products" if isinstance(node.node, ir.ExternKernelOut) else "other"
            if isinstance(node.node, ir.RandomSeeds): kind = "other"
            if op.startswith("fastformer"):
                own = _of_op(next(x for x in node.node.origins if x.target is node.node.op_overload))
                moved, launches, kind = sum(own), len(own), "fastformer"
                found["own bytes"] += moved
        if os.environ.get("SHOW"):
            print(kind, launches, moved / 1e6, node.get_name()[:50], getattr(node.node, "python_kernel_name", ""), getattr(node.node, "op_overload", ""), [str(x.target) for x in (node.node.origins if node.node else [])][-3:], file=sys.stderr)
        found["launches"] += launches
        found[kind] += launches
        found["bytes"] += moved
    assert code.value.count(".run(") == found["Triton"] - before, (code.value.count(".run("), found["Triton"] - before)


def _count_stack(layer: str, provider: str, layers: int) -> Counter[str]:
    """Return the launches and bytes of a stack."""
    import torch
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.graph import GraphLowering
    from torch._subclasses import FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp
    from torch.utils._pytree import tree_map_only

    import fastformer as ff

    found: Counter[str] = Counter()
    cuda = torch.device("cuda", 0)

    def compile_to_module(graph: Any) -> Any:
        _count_graph(graph, found)
        return SimpleNamespace(call=None, __file__="")

    def inner(gm: Any, inputs: Any, **more: Any) -> Any:
        """Move a graph to the GPU: autograd traces none without one."""
        mode = next(x.fake_mode for x in inputs if hasattr(x, "fake_mode"))
        for node in gm.graph.nodes:
            node.args, node.kwargs = tree_map_only(
                torch.device, lambda _: cuda, (node.args, node.kwargs)
            )
        gm.recompile()
        with mode:
            inputs = tree_map_only(torch.Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=cuda), inputs)
        FakeTensorProp(gm, mode).propagate(*inputs)
        return compile_fx_inner(gm, inputs, **more)

    def backend(gm: Any, inputs: Any) -> Any:
        options = {"compile_threads": 1}
        if KINDS[provider]:
            options["pre_grad_custom_pass"] = ff.InductorPass(KINDS[provider])
        with ff.use_backend("triton"):
            compile_fx(gm, inputs, inner_compile=inner, config_patches=options)
        return gm.forward  # nothing to run

    torch._dynamo.reset()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(GraphLowering, "compile_to_module", compile_to_module),
        config.patch(force_non_lazy_backward_lowering=True),
    ):
        torch.set_default_dtype(torch.bfloat16)
        model, given = _model(layer, layers)
        torch.set_default_dtype(torch.float32)
        torch.compile(model.train(), backend=backend, fullgraph=True)(**given)
    return found


def _count(layers: Sequence[str], providers: Sequence[str]) -> Counts:
    counts = {}
    for layer in layers:
        for provider in providers:
            import time; t = time.time()
            two, three = (_count_stack(layer, provider, n) for n in (2, 3))
            counts[f"{layer}, {provider}"] = {x: three[x] - two[x] for x in ("launches", "Triton", "products", "fastformer", "other", "bytes", "own bytes")}
            print(layer, provider, counts[f"{layer}, {provider}"], time.time() - t, file=sys.stderr, flush=True)
    return counts


if __name__ == "__main__":
    if "--count" in sys.argv:
        _appear(Path(sys.argv[2]))
        chosen = ([x for x in sys.argv if x in y] for y in (LAYERS, KINDS))
        print(json.dumps(_count(*chosen)))
    else:
        print(table(count()))
