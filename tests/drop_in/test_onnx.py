"""Models that are exported on a CPU: torch.export, ONNX with onnxruntime, and AOTInductor."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import fastformer as ff

SOURCE = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))


def layer():
    """A layer of fastformer, with a mask."""
    parts = ff.MultiHeadedAttention(4, 32, 0.0), ff.PositionwiseFeedForward(32, 64, 0.0)
    return ff.EncoderLayer(32, *parts, 0.0), (SOURCE, torch.ones(1, 9, 9, dtype=torch.bool).tril())


def transformer():
    model = nn.Transformer(32, 4, 1, 1, 64, batch_first=True)
    ff.accelerate(model)
    return model, (SOURCE, SOURCE)


def bert():
    transformers = pytest.importorskip("transformers")
    ff.register_transformers()
    sizes = dict(vocab_size=40, hidden_size=32, num_attention_heads=4, intermediate_size=64)
    config = transformers.BertConfig(num_hidden_layers=1, **sizes)
    options = dict(attn_implementation="fastformer", add_pooling_layer=False)
    model = transformers.BertModel._from_config(config, **options)
    ff.accelerate(model)
    return model, (torch.arange(14).view(2, 7),)


# By model, how often ONNX has Attention and LayerNormalization in it.
MODELS = {layer: [1, 2], transformer: [3, 7], bert: [1, 3]}


@pytest.fixture(params=MODELS, ids=lambda make: make.__name__)
def case(request):
    torch.manual_seed(0)
    model, inputs = request.param()
    with torch.no_grad():
        [want] = tree_leaves(model.eval()(*inputs))
    return model, inputs, want, MODELS[request.param]


def test_an_exported_graph_holds_torchs_ops(case):
    model, inputs, want, _ = case
    exported = torch.export.export(model, inputs)
    ops = {str(n.target) for n in exported.graph.nodes if n.op == "call_function"}
    assert "aten.scaled_dot_product_attention.default" in ops
    assert not any("fastformer" in op for op in ops)
    torch.testing.assert_close(tree_leaves(exported.module()(*inputs)), [want])


def test_onnx(case, tmp_path):
    """Attention and LayerNorm are one node each, of the standard domain."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, inputs, want, counts = case
    program = torch.onnx.export(model, inputs, dynamo=True, opset_version=23, verbose=False)
    nodes = list(program.model.graph)
    kinds = Counter(node.op_type for node in nodes)
    assert [kinds["Attention"], kinds["LayerNormalization"]] == counts
    assert {node.domain for node in nodes} == {""}
    program.save(tmp_path / "model.onnx")
    providers = ["CPUExecutionProvider"]
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=providers)
    given = {x.name: tensor.numpy() for x, tensor in zip(session.get_inputs(), inputs)}
    (have,) = session.run(None, given)
    torch.testing.assert_close(torch.from_numpy(have), want)


@pytest.mark.with_all
def test_aot_inductor(tmp_path):
    torch.manual_seed(0)
    model, inputs = layer()
    exported = torch.export.export(model.eval(), inputs)
    file = str(tmp_path / "model.pt2")
    path = torch._inductor.aoti_compile_and_package(exported, package_path=file)
    with torch.no_grad():
        have, want = torch._inductor.aoti_load_package(path)(*inputs), model(*inputs)
    torch.testing.assert_close(have, want)
