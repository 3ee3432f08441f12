"""The rewriter of graphs: what it finds in models of every style, and that results stay."""

import copy
import subprocess
import sys
import zlib

import pytest
import torch
import torch.nn.functional as F
from graph_styles import REFUSED, STYLES, TRAPS
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastformer as ff
from fastformer.drop_in.graph import rewriter

ALL = STYLES | REFUSED | TRAPS
KINDS = {
    "attention": ("scaled_dot_product_attention",),
    "norm": ("layer_norm", "rms_norm"),
    "sum_norm": ("dropout_add_layer_norm", "dropout_add_rms_norm"),
    "feed_forward": ("feed_forward", "gated_activation"),
    "loss": ("linear_cross_entropy",),
}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tensors(result):
    if isinstance(result, torch.Tensor):
        return [result]
    return (
        [x for part in result for x in tensors(part)] if isinstance(result, (list, tuple)) else []
    )


def run(model, call, inputs):
    """The outputs of a call and the gradients of all parameters, by name."""
    model.zero_grad()
    outputs = tensors(call(*[x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]))
    losses = [
        (x.float() * torch.linspace(-1, 1, x.numel()).view(x.shape)).mean()
        for x in outputs
        if x.requires_grad
    ]
    if losses:
        sum(losses).backward()
    named = ((n.removeprefix("_orig_mod."), p.grad) for n, p in model.named_parameters())
    gradients = {n: grad for n, grad in named if grad is not None}
    return {f"output {i}": x.detach() for i, x in enumerate(outputs)} | gradients


def largest(x):
    return float(x.abs().max()) if x.numel() else 0.0


def errors(have, want):
    """The largest error of each result, relative to its scale. A gradient that is small beside the
    others, as that of a bias of keys, may be rounding alone.
    """
    most = max((largest(x) for n, x in want.items() if not n.startswith("output")), default=0.0)
    for name, x in want.items():
        floor = 0.0 if name.startswith("output") else 1e-2 * most
        have_x = have.get(name, torch.zeros_like(x))
        assert have_x.dtype == x.dtype and have_x.shape == x.shape, name
        if x.is_floating_point():
            yield name, largest(have_x.float() - x.float()) / (max(largest(x), floor) + 1e-9)
        else:
            assert torch.equal(have_x, x), name


def compare(model, compiled, inputs, bound=1e-5):
    want, have = run(model, model, inputs), run(compiled, compiled, inputs)
    assert len(have) <= len(want)
    for name, error in errors(have, want):
        assert error <= bound, f"{name}: {error:.1e}"


def pair(model):
    """A model, and a copy of it that runs as a rewritten graph."""
    compiled = copy.deepcopy(model)
    return model, torch.compile(compiled, backend=ff.dynamo_backend_eager)


def found(rewriting):
    counts = rewriting.fused()
    return {kind: sum(counts[op] for op in ops) for kind, ops in KINDS.items()}


@pytest.mark.parametrize("name", ALL)
def test_styles(name):
    """Everything is found that is listed, and nothing else; outputs and gradients stay, at every
    third style for a second length, too.
    """
    torch.manual_seed(0)
    style = ALL[name]
    model, compiled = pair(style.make().eval())
    with ff.use_backend("reference"), rewriter.recording() as rewriting:
        compare(model, compiled, style.inputs(6))
        assert found(rewriting) == {kind: getattr(style, kind) for kind in KINDS}
        if zlib.crc32(name.encode()) % 3 == 0:
            compare(model, compiled, style.inputs(9))


@pytest.mark.parametrize("name", [n for n in STYLES if zlib.crc32(n.encode()) % 3 == 1])
def test_styles_on_kernels(name):
    torch.manual_seed(0)
    style = ALL[name]
    model, compiled = pair(style.make().eval())
    with ff.use_backend("triton"):
        compare(model, compiled, style.inputs(6), 2e-5)


@pytest.mark.parametrize("name", [n for n in ALL if zlib.crc32(n.encode()) % 3 == 2])
def test_styles_in_bfloat16(name):
    """Under autocast, the error against float32 is at most twice that of the plain model."""
    torch.manual_seed(0)
    style = ALL[name]
    model, compiled = pair(style.make().eval())
    inputs = style.inputs(6)
    wide = run(model, model, inputs)
    with ff.use_backend("reference"), torch.autocast("cpu", torch.bfloat16):
        plain, have = run(model, model, inputs), run(compiled, compiled, inputs)
    names = [n for n in wide if wide[n].is_floating_point()]
    to = [{n: x[n].float() for n in names if n in x} for x in (wide, plain, have)]
    peers = dict(errors(to[1], to[0]))
    for name, error in errors(to[2], to[0]):
        assert error <= 2 * max(peers.values()) + 1e-2, f"{name}: {error:.1e}"


class Block(nn.Module):
    """A layer of the Annotated Transformer: masked attention, sums with norms, feed-forward."""

    def __init__(self, p=0.0):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down, self.norms = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)
        self.p, self.checkpoints, self.stores = p, False, p > 0

    def attend(self, x, mask):
        q, k, v = (f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-2, -1) / 8**0.5).masked_fill(mask == 0, -1e9)
        attn = F.dropout(scores.softmax(-1), self.p, self.training)
        if self.stores:
            self.attn = attn
        return self.out((attn @ v).transpose(1, 2).flatten(2))

    def forward(self, x, mask):
        y = checkpoint(self.attend, x, mask, use_reentrant=False) if self.checkpoints else None
        x = self.norms(x + (self.attend(x, mask) if y is None else y))
        return x + self.down(F.relu(self.up(x)))


def batch(length=7):
    torch.manual_seed(1)
    mask = torch.ones(2, 1, 1, length)
    mask[0, ..., :3] = 0
    return torch.randn(2, length, 16), mask


def test_stored_weights_are_those_that_the_op_has_dropped():
    model = Block(p=0.5).train()
    x, mask = batch()
    compiled = torch.compile(model.attend, backend=ff.dynamo_backend_eager)
    with rewriter.recording() as rewriting:
        out = compiled(x, mask)
    assert rewriting.fused()["scaled_dot_product_attention"] == 1
    assert 0.2 < (model.attn == 0).float().mean() < 0.9
    v = model.v(x).unflatten(-1, (2, 8)).transpose(1, 2)
    torch.testing.assert_close(out, model.out((model.attn @ v).transpose(1, 2).flatten(2)))


def test_rows_without_keys_drop_as_the_model_does():
    """A row whose scores are all filled with -1e9 has equal weights, and these are dropped."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 1, 512, 8)

    def attend(mask):
        weights = F.dropout((q @ k.transpose(-2, -1)).masked_fill(mask, -1e9).softmax(-1), 0.5)
        return weights @ torch.ones_like(v)

    out = torch.compile(attend, backend=ff.dynamo_backend_eager)(
        torch.ones(1, 512, dtype=torch.bool)
    )
    assert out.mean() == pytest.approx(1, abs=0.01) and out.std() == pytest.approx(
        512**-0.5, rel=0.2
    )


HOW = {
    "options": dict(options=True),
    "backend": dict(backend="dynamo_backend"),
    "dynamic": dict(backend="dynamo_backend", dynamic=True, fullgraph=True),
    "eager, dynamic": dict(backend="dynamo_backend_eager", dynamic=True, fullgraph=True),
    "reduce-overhead": dict(backend="dynamo_backend", mode="reduce-overhead"),
}


@pytest.mark.parametrize("how", HOW)
def test_torch_compile(how):
    options = dict(HOW[how])
    if "backend" in options:
        options["backend"] = getattr(ff, options["backend"])
    else:
        options["options"] = {"pre_grad_custom_pass": ff.inductor_pass}
    model = Block().eval()
    compiled = torch.compile(copy.deepcopy(model), **options)
    with torch._inductor.config.patch(force_disable_caches=True), rewriter.recording() as rewriting:
        for length in (7, 9):
            x, mask = batch(length)
            compare(model, compiled, (x, mask))
    assert rewriting.fused()["scaled_dot_product_attention"] >= 1


@pytest.mark.parametrize("backend", ["dynamo_backend", "dynamo_backend_eager"])
def test_checkpoints(backend):
    model = Block().train()
    model.checkpoints = True
    compiled = torch.compile(copy.deepcopy(model), backend=getattr(ff, backend))
    with torch._inductor.config.patch(force_disable_caches=True), rewriter.recording() as rewriting:
        compare(model, compiled, batch())
    assert rewriting.fused()["scaled_dot_product_attention"] == 1


def test_fusing():
    """It takes the kinds, and runs after a pass that inductor has; afterwards that one is back."""
    config, calls = torch._inductor.config, []
    model = Block().eval()
    compiled = torch.compile(copy.deepcopy(model))
    with config.patch(pre_grad_custom_pass=calls.append, force_disable_caches=True):
        with ff.fusing("norm", "attention"), rewriter.recording() as rewriting:
            assert config.pre_grad_custom_pass.uuid() is None
            with ff.use_backend("reference"):
                compare(model, compiled, batch())
        assert config.pre_grad_custom_pass == calls.append
    assert len(calls) == 1
    assert rewriting.fused() == {"scaled_dot_product_attention": 1, "dropout_add_layer_norm": 1}
    with pytest.raises(ValueError, match="kind is 'softmax'; expected"), ff.fusing("softmax"):
        pass


def test_the_key_of_the_caches():
    keys = [ff.inductor_pass.uuid(), ff.InductorPass(("norm",)).uuid()]
    with ff.use_backend("reference"):
        keys.append(ff.inductor_pass.uuid())
    assert len({*keys}) == 3


def test_torchs_own_functions_stay_on_a_cpu():
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    with rewriter.recording() as rewriting:
        torch.compile(layer, backend=ff.dynamo_backend_eager)(torch.randn(2, 5, 16))
    assert not rewriting.places


class Two(nn.Module):
    """An attention whose heads are mixed, and one that is fused after a break of the graph."""

    def __init__(self):
        super().__init__()
        self.mixed, self.block = TRAPS_AND_MORE["TalkingHeads"].make(), Block()

    def forward(self, x, y, mask):
        x = self.mixed(x)
        torch._dynamo.graph_break()
        return x.sum() + self.block(y, mask).sum()


TRAPS_AND_MORE = REFUSED | TRAPS


def test_explain_of_a_compiled_model():
    x, mask = batch()
    inputs = (*TRAPS_AND_MORE["TalkingHeads"].inputs(6), x, mask)
    for backend in (ff.dynamo_backend, ff.dynamo_backend_eager):
        torch._dynamo.reset()
        explained = ff.explain(torch.compile(Two(), backend=backend), *inputs)
        rows = {(name, op): (ran, why) for name, op, ran, why in explained.rows}
        assert rows["", "graph break"][1].startswith("Call to `torch._dynamo.graph_break()`: ")
        ran, why = rows["block", "scaled_dot_product_attention"]
        assert ran == "reference" and "test_graph.py:" in why
        ran, why = rows["mixed", "attention"]
        assert ran == "torch" and "its scores pass linear" in why and "graph_styles.py:" in why


def test_explain_of_a_plain_compiled_model_runs_the_original():
    x, mask = batch()
    (row,) = ff.explain(torch.compile(Block()), x, mask).rows[:1]
    assert row[1:3] == ("Block", "torch")


def test_importing_fastformer_imports_no_dynamo():
    code = "import sys, {}; print(*[m for m in sys.modules if 'dynamo' in m or 'inductor' in m])"
    ours, theirs = (
        subprocess.run([sys.executable, "-c", code.format(x)], capture_output=True, check=True)
        for x in ("fastformer", "torch")
    )
    assert ours.stdout == theirs.stdout
