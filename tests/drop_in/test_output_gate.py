"""`accelerate` on the sigmoid gate of attention outputs in transformers' models."""

import copy
import importlib
import inspect
import types
from pathlib import Path

import compare_models
import pytest
import torch
from hugging_face_models import build
from torch import nn

import fastformer as ff
from benchmarks import ROOT
from fastformer.drop_in.replacements import output_gate, rotary

transformers = pytest.importorskip("transformers", "5.17")
from tiny_models import edited  # noqa: E402

transformers.logging.set_verbosity_error()
ff.register_transformers()


def with_all(*names):
    return [pytest.param(name, marks=pytest.mark.with_all) for name in names]


def gates(model, given):
    """The attention layers that run `gated_activation`, by `explain`."""
    rows = ff.explain(model, **given).rows
    return {name for name, op, *_ in rows if op == "gated_activation" and "attn" in name}


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_next",
        *with_all("qwen3_5_text", "afmoe", "beam", "hrm_text", "hy_v4", "muse_glimmer_text"),
    ],
)
def test_a_model_equals_the_plain_one(kind, backend):
    """Outputs, gradients and generated tokens; the report and `explain` name the layers."""
    *_, plain, wanted = compare_models.runnable(*build(kind))
    plain, model = plain.float(), copy.deepcopy(plain).float()
    report = ff.accelerate(model)
    given = wanted[0][1]
    found = gates(model, given)
    assert found and found <= {n for n, c in report.replaced.items() if c.endswith("Attention")}
    with ff.use_backend(backend):
        for training in (False, True):
            plain.train(training), model.train(training)
            want = compare_models.results(plain, given)
            assert compare_models.error(compare_models.results(model, given), want) < 1e-5
        plain.eval(), model.eval()
        if plain.can_generate():
            have, want = (compare_models.generated(x, given) for x in (model, plain))
            assert torch.equal(have, want)
    assert not report.fallbacks
    ff.restore(model)
    assert [type(x) for x in model.modules()] == [type(x) for x in plain.modules()]
    assert not gates(model, given)


def attention():
    """The attention of a Qwen3-Next, with its arguments."""
    torch.manual_seed(0)
    *_, model, _ = compare_models.runnable(*build("qwen3_next"))
    layer = next(x for x in model.float().modules() if type(x).__name__ == "Qwen3NextAttention")
    layer.zero_grad()
    x, angles = torch.randn(2, 5, layer.q_proj.in_features), torch.randn(2, 5, 4)
    angles = torch.cat([angles] * (layer.head_dim // 4), -1)[..., : layer.head_dim]
    return layer, x, dict(position_embeddings=(angles.cos(), angles.sin()), attention_mask=None)


def check(layer, x, given, runs):
    """Outputs and gradients are those of the original forward, and the op ran, or it did not."""
    plain, found = copy.deepcopy(layer), []
    assert ff.accelerate(layer).replaced[""] == "Qwen3NextAttention"
    for one in plain, layer:
        leaf, calls = x.clone().requires_grad_(), []
        with ff.dispatch.backends.observe(on_choice=calls.append):
            out = one(leaf, **given)[0]
        out.sin().sum().backward()
        found.append((out, leaf.grad, {n: p.grad for n, p in one.named_parameters()}))
    assert ("gated_activation" in {choice.op for choice in calls}) == runs
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


# By change: what takes the place of the product in the source, and whether the op still runs.
OLD = "attn_output = attn_output * torch.sigmoid(gate)"
CHANGES = {
    "the gate first": ("torch.sigmoid(gate) * attn_output", True),
    "a gate of an expression": ("attn_output * torch.sigmoid(2 * gate + 1)", True),
    "a factor more": ("0.5 * (attn_output * torch.sigmoid(gate))", True),
    "another function": ("attn_output * torch.tanh(gate) + 0 * torch.sigmoid(gate)", False),
    "a sum": ("attn_output + torch.sigmoid(gate)", False),
    "a quotient": ("attn_output / torch.sigmoid(gate)", False),
    "a method": ("attn_output * gate.sigmoid()", False),
    "an output": ("attn_output * torch.sigmoid(gate, out=None)", False),
    "a scaled gate": ("attn_output * (2 * torch.sigmoid(gate))", False),
    "one gate for all features": ("attn_output * torch.sigmoid(gate[..., :1])", False),
    "another dtype": ("(attn_output * torch.sigmoid(gate.double())).float()", False),
    "a number": ("attn_output * torch.sigmoid(gate) if gate is None else attn_output", False),
}


@pytest.mark.parametrize("change", [None, *CHANGES])
def test_planted_changes_of_the_source(change, tmp_path, monkeypatch):
    """The product runs on the op in any form that computes the same, and nothing else does."""
    layer, x, given = attention()
    new, runs = (None, True) if change is None else CHANGES[change]
    if new is not None:
        cls = type(layer)
        forward = edited(cls.forward, OLD, f"attn_output = {new}", tmp_path)
        monkeypatch.setattr(cls, "forward", forward)
    check(layer, x, given, runs)


def test_what_the_op_does_not_compute():
    """`gated` is the product for all that torch multiplies."""
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    calls = []
    with ff.dispatch.backends.observe(on_choice=calls.append):
        for value, gate in (
            (x, y[:1]),
            (x.double(), y),
            (x.int(), y),
            (2.0, y),
            (x[0, 0], y[0, 0]),
            (x.to(torch.complex64), y.to(torch.complex64)),
        ):
            assert torch.equal(output_gate.gated(value=value, gate=gate), value * gate.sigmoid())
        with torch.autocast("cpu", torch.bfloat16):
            assert output_gate.gated(value=x, gate=y).dtype == torch.float32
    assert not calls
    torch.testing.assert_close(output_gate.gated(value=x, gate=y), x * y.sigmoid())


@pytest.mark.parametrize(
    "product, order", [("x() * torch.sigmoid(y())", "xy"), ("torch.sigmoid(y()) * x()", "yx")]
)
def test_the_order_of_the_operands(product, order, tmp_path):
    """Each is computed once, the left one first. An error shows its line of the file."""
    file, names, seen = tmp_path / "forward.py", {"torch": torch}, []
    file.write_text(f"# a line before\n\ndef forward(x, y):\n    return ({product})\n")
    exec(compile(file.read_text(), str(file), "exec", dont_inherit=True), names)
    code = output_gate.with_gates(names["forward"])
    assert code is not names["forward"].__code__
    made = types.FunctionType(code, {**names, output_gate.NAME: output_gate.gated})
    made(lambda: seen.append("x") or 2.0, lambda: seen.append("y") or torch.ones(3))
    assert "".join(seen) == order
    with pytest.raises(ZeroDivisionError) as raised:
        made(lambda: 1 / 0, lambda: torch.ones(3))
    assert (raised.traceback[1].path, raised.traceback[1].lineno) == (file, 3)


def test_forwards_that_stay():
    """Without a source, with a variable of an outer function, another torch, or a private name."""
    names = {"torch": torch}
    exec("def forward(x, y):\n    return x * torch.sigmoid(y)", names)
    scale = 2.0

    def scaled(x, y):
        return scale * (x * torch.sigmoid(y))

    def plain(x, y):
        return x * torch.sigmoid(y)

    class Private:
        def forward(self, x, y):
            return self.__twice(x * torch.sigmoid(y))

        def __twice(self, x):
            return 2 * x

    other = types.FunctionType(plain.__code__, {"torch": types.SimpleNamespace(sigmoid=torch.tanh)})
    for function in (names["forward"], scaled, other, Private.forward):
        assert output_gate.with_gates(function) is function.__code__
    assert output_gate.with_gates(plain) is not plain.__code__


def test_a_compiled_layer():
    layer, x, given = attention()
    want = layer(x, **given)[0]
    ff.accelerate(layer)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: layer(x, **given)[0], fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), want)


def test_the_page_lists_the_types():
    """docs/existing_models.md names the types whose attention has such a gate."""
    found = set()
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if "torch.sigmoid(" not in file.read_text():
            continue
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        for cls in vars(module).values():
            mine = inspect.isclass(cls) and cls.__module__ == module.__name__
            functions = rotary.rotations(cls) if mine and issubclass(cls, nn.Module) else {}
            if not functions or rotary.disagreement_of(functions):
                continue
            if output_gate.with_gates(cls.forward) is not cls.forward.__code__:
                found.add(file.parent.name)
    listed = ", ".join(sorted(found))
    assert listed in (ROOT / "docs" / "existing_models.md").read_text(), listed
