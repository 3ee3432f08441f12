"""Counts the kernels that a layer launches under torch.compile, and the bytes that they move,
forward and backward, without a GPU.

    python -m benchmarks.compiled_launches

A stack of layers of Hugging Face's transformers is traced without data, and inductor lowers its
graphs for an H100 that is not there: it fuses, and generates code that nobody runs. Of a kernel
counts what it reads and writes, each tensor once, as inductor counts it; fastformer's ops run on
the stand-in driver (benchmarks/gpu/stand_in), and of each of their launches count the tensors that
it takes. A figure is the difference between a stack of three layers and one of two.
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
PROVIDERS = {  # what fastformer's pass replaces
    "inductor": (),
    "fastformer": ("attention", "loss"),
    "all": ("attention", "norm", "feed_forward", "loss"),
}
LAUNCHES = "inductor", "products", "fastformer", "other"
BYTES = "bytes", "bytes of fastformer"
Counts = dict[str, dict[str, int]]


def count(
    layers: Sequence[str] = LAYERS, providers: Sequence[str] = ("inductor", "fastformer")
) -> Counts:
    """Return the launches and bytes for "LAYER, PROVIDER", counted in a process of its own."""
    from benchmarks.gpu import stand_in

    with tempfile.TemporaryDirectory() as folder:
        stand_in.build(Path(folder))
        command = [sys.executable, "-m", "benchmarks.compiled_launches", "--count", folder]
        settings = {"TRITON_INTERPRET": "0", "FASTFORMER_TUNING": "off", "CUDA_VISIBLE_DEVICES": ""}
        settings |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        environment = os.environ | settings
        output = subprocess.check_output([*command, *layers, *providers], cwd=ROOT, env=environment)
        return json.loads(output)


def table(counts: Counts) -> str:
    """Return the counts as a table of Markdown, the bytes in MB."""
    head = ["layer", "all", *LAUNCHES, "MB", "MB of fastformer"]
    rows = []
    for name, own in counts.items():
        launches = [own[kind] for kind in LAUNCHES]
        rows.append([name, sum(launches), *launches, *[round(own[x] / 1e6) for x in BYTES]])
    return "\n".join(markdown_table(head, rows))


def stack(
    layer: str, layers: int, width: int = D, heads: int = H, batch: int = B, length: int = S
) -> tuple[Any, dict[str, Any]]:
    """Make a stack of layers of transformers, with eager attention, and what it is called with, on
    the default device. A ViT has images of 224 x 224, or of length - 1 patches of 16 x 16.
    """
    import torch
    import transformers as hf

    d, h, f = (1024, 16, 2816) if layer == "Llama" else (width, heads, 4 * width)
    own: Any = dict(num_hidden_layers=layers, hidden_size=d, num_attention_heads=h)
    own |= dict(intermediate_size=f, attn_implementation="eager")
    if layer == "ViT":
        side = 224 if length == S else 16 * round((length - 1) ** 0.5)
        images = dict(pixel_values=torch.empty(batch, 3, side, side))
        return hf.ViTModel(hf.ViTConfig(**own, image_size=side), add_pooling_layer=False), images
    given = dict(inputs_embeds=torch.empty(batch, length, d))
    if layer == "BERT":
        given["attention_mask"] = torch.ones(batch, length, dtype=torch.bool)
        return hf.BertModel(hf.BertConfig(vocab_size=8, **own), add_pooling_layer=False), given
    kind = {"GPT-2": "GPT2", "Llama": "Llama"}[layer]
    config = getattr(hf, kind + "Config")(vocab_size=8, use_cache=False, **own)
    return getattr(hf, kind + "Model")(config), given


class _Kernel:
    """In place of a compiled kernel of Triton's: a launch counts, with the bytes of its tensors."""

    function, packed_metadata = 0, ()
    bytes: list[int]

    def launch_metadata(self, *_: Any) -> None: ...

    def run(self, *arguments: Any) -> None:
        from torch.utils._pytree import tree_leaves

        sizes: dict[int, int] = {}
        for x in tree_leaves(arguments):
            x = getattr(x, "base", x)  # a TMA descriptor's
            if hasattr(x, "data_ptr"):
                shape = [n for n, stride in zip(x.shape, x.stride()) if stride]
                size = x.element_size() * x.new_empty(shape, device="meta").numel()
                sizes[x.data_ptr()] = max(size, sizes.get(x.data_ptr(), 0))
        self.bytes.append(sum(sizes.values()))


def _appear(folder: Path) -> None:
    """From here on inductor generates code for an H100, and Triton compiles no kernel."""
    import torch
    from triton import compiler

    from benchmarks.gpu import stand_in

    stand_in.install(folder)
    facts = SimpleNamespace(
        name="H100", gcnArchName="", major=9, minor=0, warp_size=32, total_memory=80 << 30,
        multi_processor_count=stand_in.MULTIPROCESSORS, L2_cache_size=stand_in.L2_CACHE,
        max_threads_per_block=1024, max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536, shared_memory_per_block_optin=stand_in.SHARED_OF_BLOCK,
    )  # fmt: skip
    torch.cuda.get_device_properties = lambda device=None: facts
    torch.cuda.device_count, torch.cuda.current_device = lambda: 1, lambda: 0
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    from torch._inductor import scheduler  # it keeps what torch.cuda is now

    scheduler.has_triton = lambda: True
    compiler.compile = lambda *_, **__: _Kernel()
    # A torch without CUDA cannot switch to such a device. Those of "meta" need no switch.
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 20).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[1] = guards[14]  # by c10::DeviceType: CUDA and Meta


def _of_op(node: Any) -> list[int]:
    """Return the bytes of each launch of one of fastformer's ops, a node of a graph."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx import Node
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map

    import fastformer as ff

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if op.namespace == "fastformer":  # and what runs within it
                with self:
                    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
                    return op.redispatch(keys, *args, **kwargs)
            result = op(*args, **kwargs)
            if not (op.is_view or "empty" in op.name() or "_unsafe_view" in op.name()):
                _Kernel().run(args, kwargs, result)
            return result

    def on_cpu(x: Any) -> Any:
        x = x.meta["val"] if isinstance(x, Node) else x
        if isinstance(x, torch.Tensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
        return x

    _Kernel.bytes = []
    with unset_fake_temporarily(), torch.no_grad(), ff.use_backend("triton"):
        args, kwargs = tree_map(on_cpu, (node.args, node.kwargs))
        with Ops():
            node.target(*args, **kwargs)
    return _Kernel.bytes


def _count_graph(graph: Any, found: Counter[str]) -> None:
    """Count the launches of a graph that inductor has lowered."""
    from torch._inductor.ir import MultiOutput
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    targets = {node.target for node in graph.graph.nodes}
    ours = {op for op in targets if getattr(op, "namespace", "") == "fastformer"}
    code, _ = graph.codegen()
    before = found["inductor"]
    for node in graph.scheduler.nodes:
        if isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, MultiOutput):
            continue
        kind, moved = "inductor", [node.get_read_write_buffers_sizes()]
        if isinstance(node, ExternKernelSchedulerNode):
            product = (node.node.python_kernel_name or "").startswith("extern_kernels.")
            kind = "products" if product else "other"
        if getattr(node.node, "op_overload", None) in ours:
            origin = next(x for x in node.node.origins if x.target is node.node.op_overload)
            kind, moved = "fastformer", _of_op(origin)
            found["bytes of fastformer"] += sum(moved)
        found[kind] += len(moved)
        found["bytes"] += sum(moved)
        if "--show" in sys.argv:
            origins = [x for part in node.get_nodes() for x in part.node.origins]
            print(kind, moved, *dict.fromkeys(origins), file=sys.stderr)
    assert code.value.count(".run(") == found["inductor"] - before


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

    def on_gpu(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=cuda)

    def lower(gm: Any, inputs: Any, **more: Any) -> Any:
        """Move a graph to the GPU and lower it: autograd traces none there without CUDA."""
        mode = next(x.fake_mode for x in inputs if hasattr(x, "fake_mode"))
        for node in gm.graph.nodes:
            given = node.args, node.kwargs
            node.args, node.kwargs = tree_map_only(torch.device, lambda _: cuda, given)
        gm.recompile()
        with mode:
            inputs = tree_map_only(torch.Tensor, on_gpu, inputs)
        FakeTensorProp(gm, mode).propagate(*inputs)
        return compile_fx_inner(gm, inputs, **more)

    def backend(gm: Any, inputs: Any) -> Any:
        kinds = PROVIDERS[provider]
        options = {"pre_grad_custom_pass": ff.InductorPass(kinds) if kinds else None}
        with ff.use_backend("triton"):
            compile_fx(gm, inputs, inner_compile=lower, config_patches=options)
        return gm.forward

    torch._dynamo.reset()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(GraphLowering, "compile_to_module", compile_to_module),
        config.patch(force_non_lazy_backward_lowering=True),
    ):
        torch.set_default_dtype(torch.bfloat16)
        with mock.patch("transformers.PreTrainedModel.init_weights"):
            model, given = stack(layer, layers)
        torch.set_default_dtype(torch.float32)
        torch.compile(model.train(), backend=backend, fullgraph=True)(**given)
    return found


def _count(layers: Sequence[str], providers: Sequence[str]) -> Counts:
    """Count in this process, to which a GPU has appeared."""
    counts = {}
    for layer in layers:
        for provider in providers:
            two, three = (_count_stack(layer, provider, stack) for stack in (2, 3))
            own = {name: three[name] - two[name] for name in (*LAUNCHES, *BYTES)}
            counts[f"{layer}, {provider}"] = own
    return counts


if __name__ == "__main__":
    if "--count" in sys.argv:
        _appear(Path(sys.argv[2]))
        print(json.dumps(_count(*([x for x in sys.argv if x in y] for y in (LAYERS, PROVIDERS)))))
    else:
        print(table(count()))
