"""Models that are exported on a CPU: torch.export, ONNX with onnxruntime, and AOTInductor."""

from collections import Counter

import pytest
import torch
from torch import nn

import fastformer as ff

SOURCE = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(14).view(2, 7)


class Block(nn.Module):
    """A layer of modules of fastformer, with a mask."""

    def __init__(self):
        super().__init__()
        self.norm, self.attend = ff.LayerNorm(32), ff.MultiHeadedAttention(4, 32, 0.0)
        self.feed_forward = ff.PositionwiseFeedForward(32, 64, 0.0)

    def forward(self, x):
        mask = torch.ones(1, 9, 9, dtype=torch.bool).tril()
        y = self.norm(x)
        x = x + self.attend(y, y, y, mask)
        return x + self.feed_forward(self.norm(x))


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        ff.register_transformers()
        sizes = dict(vocab_size=40, hidden_size=32, num_attention_heads=4, intermediate_size=64)
        config = transformers.BertConfig(num_hidden_layers=1, **sizes)
        self.model = transformers.BertModel._from_config(config, attn_implementation="fastformer")
        ff.accelerate(self.model)

    def forward(self, ids):
        return self.model(input_ids=ids).last_hidden_state


class Accelerated(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Transformer(32, 4, 1, 1, 64, batch_first=True)
        ff.accelerate(self.model)

    def forward(self, x):
        return self.model(x, x)


# By model: its input, and how often ONNX has Attention and LayerNormalization in it.
MODELS = {Block: (SOURCE, 1, 2), Accelerated: (SOURCE, 3, 7), Bert: (IDS, 1, 3)}


@pytest.fixture(params=MODELS, ids=lambda make: make.__name__)
def case(request):
    torch.manual_seed(0)
    model = request.param().eval()
    x, *counts = MODELS[request.param]
    with torch.no_grad():
        return model, x, model(x), counts


def test_an_exported_graph_holds_torchs_ops(case):
    model, x, want, _ = case
    exported = torch.export.export(model, (x,))
    ops = {str(n.target) for n in exported.graph.nodes if n.op == "call_function"}
    assert "aten.scaled_dot_product_attention.default" in ops
    assert not any("fastformer" in op for op in ops)
    torch.testing.assert_close(exported.module()(x), want)


def test_onnx(case, tmp_path):
    """Attention and LayerNorm are one node each, of the standard domain."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, x, want, counts = case
    program = torch.onnx.export(model, (x,), dynamo=True, opset_version=23, verbose=False)
    nodes = list(program.model.graph)
    kinds = Counter(node.op_type for node in nodes)
    assert [kinds["Attention"], kinds["LayerNormalization"]] == counts
    assert {node.domain for node in nodes} == {""}
    program.save(tmp_path / "model.onnx")
    providers = ["CPUExecutionProvider"]
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=providers)
    (have,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(have), want)


@pytest.mark.with_all
def test_aot_inductor(tmp_path):
    torch.manual_seed(0)
    model = Block().eval()
    exported = torch.export.export(model, (SOURCE,))
    path = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "model.pt2")
    )
    with torch.no_grad():
        have, want = torch._inductor.aoti_load_package(path)(SOURCE), model(SOURCE)
    torch.testing.assert_close(have, want)
