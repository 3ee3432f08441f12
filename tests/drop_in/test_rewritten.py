"""`accelerate` on modules that compute by their own code: Dynamo captures their forward, and the
rewriter puts the ops into its graphs.
"""

import contextlib
import copy
import importlib.util
import inspect
import io
import pickle
import sys
import threading
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from test_graph import compare, fresh_dynamo  # noqa: F401
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import fastformer as ff
from benchmarks import ROOT
from fastformer.drop_in.replacements import rewritten
from fastformer.drop_in.replacements.rewritten import Rewritten
from fastformer.drop_in.units import units

D, H = 16, 2


class Attention(nn.Module):
    """As in vision models: one projection, and products by hand."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D // H)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / (D // H) ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, index=0):
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(D), Attention(), nn.LayerNorm(D)
        self.mlp = nn.Sequential(nn.Linear(D, 24), nn.GELU(), nn.Linear(24, D))
        self.index = index

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Indexed(Block):
    """Its graph holds a number of its own, so that no two blocks share one."""

    def forward(self, x):
        return super().forward(x) * (1 + self.index / 100)


class Model(nn.Module):
    def __init__(self, block=Block, layers=3):
        super().__init__()
        self.blocks = nn.ModuleList(block(i) for i in range(layers))
        self.norm = nn.LayerNorm(D)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


OPS = {"scaled_dot_product_attention", "layer_norm", "dropout_add_layer_norm", "feed_forward"}


def pair(model=None, **options):
    """A model, its accelerated copy and the report."""
    torch.manual_seed(0)
    plain = model or Model()
    fast = copy.deepcopy(plain)
    return plain, fast, ff.accelerate(fast, **options)


def x_of(length=5, dtype=torch.float32):
    return torch.randn(2, length, D, dtype=dtype)


def ops(report):
    return {x.op for parts in report.rewritten.values() for x in parts if x.op}


# ------------------------------------------------------------------------------- what is rewritten


class Heads(nn.Module):
    """One module for each head."""

    def __init__(self):
        super().__init__()
        self.heads, self.norm = nn.ModuleList(Attention() for _ in range(2)), nn.LayerNorm(D)

    def forward(self, x):
        return self.norm(sum(head(x) for head in self.heads))


class Cast(nn.LayerNorm):
    """A norm in float32, as in Whisper."""

    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


class Torch(nn.Module):
    """A block around torch's attention."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(D), nn.MultiheadAttention(D, H)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class Ours(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = ff.LayerNorm(D)

    def forward(self, x):
        return ff.layer_norm(self.norm(x), D)


def classes(model):
    return {name: type(module).__name__ for name, module in units(model).items()}


def test_which_modules_are_rewritten():
    assert classes(Model()) == {f"blocks.{i}": "Block" for i in range(3)}
    assert classes(Attention()) == {"": "Attention"}
    assert classes(Block()) == {"": "Block"}
    assert classes(Heads()) == {"heads.0": "Attention", "heads.1": "Attention"}
    assert classes(nn.Sequential(Cast(D), nn.Linear(D, D))) == {"0": "Cast"}
    assert classes(nn.ModuleList([Torch(), nn.Linear(D, D)])) == {"0": "Torch"}
    layers = nn.Sequential(nn.Linear(D, D), nn.Sequential(nn.ReLU(), nn.Linear(D, D)))
    assert classes(layers) == {"": "Sequential"}
    assert not classes(nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H), 1))
    assert not classes(nn.Sequential(nn.Conv1d(D, D, 1), nn.Softmax(-1), Ours()))
    alias = Model(layers=1)
    alias._modules = {"first": alias.blocks[0].attention, **alias._modules}
    assert classes(alias) == {"blocks.0": "Block"}
    assert classes(Indexed()) == {"": "Indexed"}  # by super().forward
    assert not classes(Recurrent())
    scripted = nn.Sequential(torch.jit.script(nn.ReLU()), Attention())
    assert classes(scripted) == {"1": "Attention"}
    custom = nn.TransformerEncoder(Block(), 2)
    assert classes(custom) == {"layers.0": "Block", "layers.1": "Block"}
    replaced = Model()
    replaced.blocks[1].forward = lambda x: x
    assert classes(replaced) == {
        **{"blocks.0": "Block", "blocks.1.attention": "Attention"},
        **{"blocks.1.mlp": "Sequential", "blocks.2": "Block"},
    }


class Dict(nn.Module):
    """As in minGPT."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.ModuleDict(dict(fc=nn.Linear(D, 24), act=nn.GELU(), proj=nn.Linear(24, D)))

    def forward(self, x):
        return self.mlp.proj(self.mlp.act(self.mlp.fc(x)))


class Pool(nn.Module):
    """Pools by torch's function, as in CLIP."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        biases = torch.cat([self.q.bias, self.k.bias, self.v.bias])
        weights = dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"),
                           (self.q.weight, self.k.weight, self.v.weight)))  # fmt: skip
        return F.multi_head_attention_forward(
            *(x[:1], x, x, D, H, None, biases, None, None, False, 0.0),
            *(self.out.weight, self.out.bias),
            training=self.training, need_weights=False, use_separate_proj_weight=True, **weights,
        )[0]  # fmt: skip


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(D, 24)

    def forward(self, x):
        return F.gelu(self.proj(x))


class Halves(nn.Module):
    """The first layer of it has its activation within, as in diffusers."""

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList([Half(), nn.Dropout(0.0), nn.Linear(24, D)])

    def forward(self, x):
        for module in self.net:
            x = module(x)
        return x


class Recurrent(nn.Module):
    """A loop over the tokens, which Dynamo would unroll."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = Half(), nn.Linear(24, D)

    def forward(self, x):
        for token in x.unbind(1):
            x = x + self.cell(token)[:, None, :D]
        return self.out(F.pad(x, (0, 8)))


class Conv1D(nn.Module):
    """A linear layer as in GPT-2: its weight is [in, out]; here it is square."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(D, D) / 4), nn.Parameter(torch.randn(D))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, D), self.weight).view(x.shape)


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Conv1D(), Conv1D()

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


class Made(nn.Module):
    """It makes its softmax in each call, and drops nothing before the activation."""

    def __init__(self):
        super().__init__()
        self.qkv, self.first, self.second = nn.Linear(D, 3 * D), nn.Linear(D, 24), nn.Linear(24, D)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        x = nn.Softmax(dim=-1)(q @ k.mT) @ v
        return self.second(F.gelu(F.dropout(self.first(x), 0.0, self.training)))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(D, 24, 1), nn.Conv1d(24, D, 1)

    def forward(self, x):
        return self.second(F.relu(self.first(x.mT))).mT


def test_a_feed_forward_layer_of_convolutions_is_named():
    """It stays, and the report says why."""
    plain, fast, report = pair(Convolutions())
    with ff.use_backend("reference"):
        compare(plain, fast, [x_of()])
    assert "second: feed_forward: its linear layers are convolutions" in str(report)
    options = dict(kernel_size=3, padding=1), dict(kernel_size=1, groups=2)
    for given in (*options, dict(kernel_size=1, stride=2), dict(kernel_size=1, padding=2)):
        model = Convolutions()
        model.first = nn.Conv1d(D, 24, **given)  # no linear layer
        assert "convolutions" not in str(ff.accelerate(model, x_of()))


@pytest.mark.parametrize(
    "module, op",
    [
        *((Dict, "feed_forward"), (Halves, "feed_forward"), (Pool, "multi")),
        (Products, "feed_forward"),
        (Made, "scaled_dot_product_attention feed_forward"),
    ],
)
def test_functions_and_dicts(module, op):
    plain, fast, report = pair(nn.Sequential(module()))
    assert classes(plain) == {"0": module.__name__}
    x = x_of()
    if module is Pool:
        assert ff.explain(plain, x).rows[0][:3] == ("0", "Pool", "torch")
        op = "scaled_dot_product_attention"
    with ff.use_backend("reference"):
        compare(plain, fast, [x])
    assert ops(report) == {*op.split()}


class PreNorm(nn.Module):
    """One class around layers of several kinds."""

    def __init__(self, layer):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(D), layer

    def forward(self, x):
        return x + self.layer(self.norm(x))


class TwoAttentions(Attention):
    """One of them mixes its heads."""

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D // H)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT
        first = scores.softmax(-1) @ v
        mixed = scores.softmax(-1).movedim(1, -1) @ torch.ones(H, H)
        return self.out((first + mixed.movedim(-1, 1) @ v).transpose(1, 2).flatten(2))


def test_each_module_has_its_own_ops():
    """Also those of one class; and what stays beside an op of the same kind is named."""
    layers = Attention(), nn.Sequential(nn.Linear(D, 24), nn.GELU(), nn.Linear(24, D))
    tanh = nn.Sequential(nn.Linear(D, 24), nn.Tanh(), nn.Linear(24, D))
    plain, fast, report = pair(nn.Sequential(*map(PreNorm, (*layers, tanh, TwoAttentions()))))
    with ff.use_backend("reference"):
        compare(plain, fast, [x_of()])
    found = [{x.op or x.reason for x in parts} for parts in report.rewritten.values()]
    norm = "layer_norm"
    assert found[:2] == [{norm, "scaled_dot_product_attention"}, {norm, "feed_forward"}]
    assert found[2] == {norm, "feed_forward has no activation tanh"}
    assert "scaled_dot_product_attention" in found[3] and len(found[3]) == 3
    assert "capture.py" not in str(report) + str(ff.explain(fast, x_of()))
    lazy = nn.Sequential(nn.LayerNorm(D), nn.LazyLinear(24), nn.ReLU(), nn.Linear(24, D))
    assert ff.accelerate(lazy).replaced == {"": "Sequential"}


def test_a_module_that_is_called_from_outside():
    """Its own code runs there, as explain says."""

    class Outside(Model):
        def forward(self, x):
            return super().forward(self.blocks[0].norm1(x))

    _, fast, _ = pair(Outside())
    with ff.use_backend("reference"):
        row = ff.explain(fast, x_of()).rows[0]
    assert row[:3] == ("blocks.0.norm1", "LayerNorm", "torch") and "outside" in row[3]


def test_values_and_report(backend):
    plain, fast, report = pair()
    assert str(report).startswith("replaced: 4 modules\n")
    assert "blocks.*  Block x 3: rewritten at the first call" in str(report)
    x = x_of()
    compare(plain, fast, [x], 2e-5)
    assert ops(report) == OPS and not report.fallbacks
    assert "Block x 3: feed_forward, dropout_add_layer_norm, scaled_dot_product_attention" in str(
        report
    )
    assert plain.state_dict().keys() == fast.state_dict().keys()
    ff.restore(fast)
    assert [vars(m).keys() for m in fast.modules()] == [vars(m).keys() for m in plain.modules()]
    assert [type(m) for m in fast.modules()] == [type(m) for m in plain.modules()]


@pytest.mark.parametrize("chosen", ["auto", "reference"])
def test_with_inputs_the_report_says_it_at_once(chosen):
    """On a CPU, too, where the model's own code runs with the backend auto."""
    with ff.use_backend(chosen):
        fast = Model()
        assert ops(ff.accelerate(fast, x_of())) == OPS
        again = ff.accelerate(fast)
        assert not again.replaced and len(again.already) == 4


def test_on_a_cpu_each_call_decides():
    """With the backend auto, the model's own code runs."""
    plain, fast, report = pair()
    x = x_of()
    with torch.no_grad():
        assert torch.equal(fast(x), plain(x)) and not ops(report)
    assert str(report).endswith('on a CPU: torch runs these modules with the backend "auto"')
    rows = ff.explain(fast, x).rows
    assert [row[1] for row in rows] == ["Block"] * 3 + ["LayerNorm"]
    assert {row[2] for row in rows} == {"torch"}
    with ff.use_backend("reference"):
        fast(x)
    assert ops(report) == OPS


class Seen(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_explain(backend):
    _, fast, _ = pair(Model(layers=1))
    x = x_of()
    rows = ff.explain(fast, x).rows
    names = [("blocks.0.norm1", "layer_norm"), ("blocks.0.norm2", "dropout_add_layer_norm")]
    names += [("blocks.0.attention", "scaled_dot_product_attention"), ("norm", "layer_norm")]
    found = [row[:2] for row in rows]
    assert {*names} < {*found} and len(found) == 5
    assert {row[2] for row in rows} == {backend}
    assert any("test_rewritten.py:" in row[3] for row in rows)


def test_explain_within_a_mode():
    """A mode of torch's functions that a model enters stays on."""
    seen = Seen()

    class Within(Model):
        def forward(self, x):
            with seen:
                return super().forward(x) + 1

    _, fast, _ = pair(Within())
    with ff.use_backend("reference"):
        ff.explain(fast, x_of())
    assert seen.calls > 0


def test_explain_within_a_transform():
    """One row says that the code of the module ran."""

    class Mapped(Model):
        def forward(self, x):
            return torch.func.vmap(self.blocks[0])(x)

    _, fast, _ = pair(Mapped())
    with ff.use_backend("reference"):
        (row,) = ff.explain(fast, x_of()[None]).rows
    assert row[:3] == ("blocks.0", "Block", "torch") and "transforms" in row[3]


class TalkingHeads(Attention):
    """A linear layer mixes the heads of the scores."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(H, H)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D // H)).permute(2, 0, 3, 1, 4)
        weights = self.mix((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def test_explain_names_attention_that_stays():
    (row,) = ff.explain(TalkingHeads(), x_of()).rows
    assert row[1:3] == ("TalkingHeads", "torch") and "attention" in row[3]
    router = nn.Sequential(nn.Linear(D, D), nn.Softmax(-1))  # of experts: no attention

    class Routed(nn.Module):
        def forward(self, x):
            return router((x @ x.mT) @ x).mT @ x

    for x in (x_of(), x_of()[:, None]):
        assert ff.explain(Routed(), x).rows == ()


def test_a_name_that_the_replacement_needs():
    module = Attention()
    module._captures = []
    report = ff.accelerate(module)
    assert "attribute _captures" in report.skipped[""]
    ff.restore(module)
    assert module._captures == []


# ------------------------------------------------------------------------- calls that differ


def states(model, x):
    """The results of one call in each state."""
    found = []
    for training in (True, False):
        model.train(training)
        for context in (
            torch.enable_grad(), torch.no_grad(), torch.inference_mode(),
            torch.autocast("cpu", torch.bfloat16),
        ):  # fmt: skip
            with context:
                found.append(model(x).detach().float())
    return found


@pytest.mark.parametrize("block", [Block, Indexed])
def test_states_and_lengths_lose_nothing(block):
    """Blocks that are alike share what is captured; each of the others has its own."""
    plain, fast, report = pair(Model(block, 4))
    with ff.use_backend("reference"):
        for length in (5, 7, 4):
            x = x_of(length)
            for i, (have, want) in enumerate(zip(states(fast, x), states(plain, x))):
                bound = 0.05 if i % 4 == 3 else 1e-5
                torch.testing.assert_close(have, want, rtol=bound, atol=bound)
    assert not report.fallbacks
    captures = [m._captures for m in fast.blocks]
    assert {len(x) for x in captures} == {8}
    alike = [captures[0][state] is captures[3][state] for state in captures[0]]
    assert set(alike) == {block is Block}
    assert {c.graphs for x in captures for c in x.values()} <= {2, 3, 4, 5, 6}


def test_models_of_other_widths_are_apart():
    """Their sizes are no symbols, which would keep a norm by hand."""

    class ByHand(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x):
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    with ff.use_backend("reference"):
        for width in (D, 24, 40):
            plain, fast, report = pair(ByHand(width))
            compare(plain, fast, [torch.randn(2, 5, width)])
            assert ops(report) == {"rms_norm"}


@pytest.mark.with_slow
def test_many_instances_lose_nothing():
    _, fast, report = pair(Model(Indexed, 24))
    with ff.use_backend("reference"):
        for length in (5, 7, 4):
            states(fast, x_of(length))
    assert not report.fallbacks


class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.low = base, nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.low(x)


def frozen(model):
    model.blocks[0].mlp.requires_grad_(False)


def adapted(model):
    torch.manual_seed(1)
    model.blocks[1].attention.qkv = LoRA(model.blocks[1].attention.qkv)


def rescaled(model):
    model.blocks[2].norm1.eps = 0.1


def patched(model):
    model.blocks[2].attention.forward = lambda x: x * 2


@pytest.mark.parametrize("change", [frozen, adapted, rescaled, patched])
def test_a_model_that_changes(change):
    plain, fast, report = pair()
    x = x_of()
    with ff.use_backend("reference"):
        compare(plain, fast, [x])
        for model in (plain, fast):
            change(model)
        compare(plain, fast, [x])
        plain.double(), fast.double()
        compare(plain, fast, [x.double()])
    assert not report.fallbacks


def test_the_limit_of_recompilations():
    """What Dynamo does not capture runs, and is counted; a module then has a limit of its own."""
    plain, fast, report = pair()
    with ff.use_backend("reference"), torch._dynamo.config.patch(recompile_limit=1):
        for dtype in (torch.float32, torch.float64):
            plain, fast = plain.to(dtype), fast.to(dtype)
            compare(plain, fast, [x_of(dtype=dtype)])
        assert report.fallbacks["blocks.0"] == {rewritten._MISSED: 1}
        compare(plain, fast, [x_of(dtype=dtype)])
        assert report.fallbacks["blocks.0"] == {rewritten._MISSED: 1}
        assert "limit of recompilations" in str(report)


def test_what_dynamo_cannot_compile_runs_as_it_is(monkeypatch):
    """After some calls in a row Dynamo is not asked again."""
    calls = []

    def fails(*given):
        calls.append(given)
        raise RuntimeError("not today")

    plain, fast, report = pair()
    monkeypatch.setattr("fastformer.drop_in.graph.rewriter.rewrite_all", fails)
    monkeypatch.setattr(rewritten, "_FAILURES", 1)
    with ff.use_backend("reference"):
        compare(plain, fast, [x_of()])
        asked = len(calls)
        compare(plain, fast, [x_of()])
    assert report.fallbacks["blocks.0"] == {rewritten._MISSED: 2}
    assert len(calls) == asked > 0


class Counting(Block):
    """Breaks the graph, and has side effects and an error of its own."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        torch._dynamo.graph_break()
        with contextlib.suppress(RuntimeError):
            x @ torch.ones(D + 1, 2)
        return super().forward(x)


def test_side_effects_happen_once():
    plain, fast, _ = pair(Counting())
    with ff.use_backend("reference"):
        for _ in range(3):
            compare(plain, fast, [x_of()])
    assert isinstance(fast, Rewritten) and fast.calls == plain.calls == 3


class Skipping(Block):
    def forward(self, x):
        return x if self.index else super().forward(x)


def test_a_call_that_computes_nothing_is_no_fallback():
    plain, fast, report = pair(Model(Skipping))
    with ff.use_backend("reference"):
        compare(plain, fast, [x_of()])
    assert not report.fallbacks and ops(report) >= {"feed_forward"}


def test_code_that_is_patched(monkeypatch):
    plain, fast, _ = pair()
    with ff.use_backend("reference"):
        compare(plain, fast, [x_of()])
        monkeypatch.setattr(Block, "forward", lambda self, x, scale=1: self.attention(x) * scale)
        compare(plain, fast, [x_of()])
    other = Block()
    ff.accelerate(other)
    assert [*inspect.signature(other.forward).parameters] == ["x", "scale"]


def test_hooks_of_saved_tensors_see_no_others():
    """Those of a checkpoint count them: the first call saves as many as the second one."""
    _, fast, _ = pair(Block())
    x, saved = x_of(), [[], []]
    with ff.use_backend("reference"):
        for found in saved:
            with torch.autograd.graph.saved_tensors_hooks(found.append, lambda x: x):
                fast(x)
    assert len(saved[0]) == len(saved[1]) > 0
    assert {type(x) for x in saved[0]} <= {torch.Tensor, nn.Parameter}


def test_other_threads_may_compile():
    _, fast, _ = pair()
    x, done = x_of(), threading.Event()

    def compiles():
        for n in range(3, 6):
            torch.compile(torch.sin, backend="eager")(torch.ones(n))
        done.set()

    with ff.use_backend("reference"), torch.no_grad():
        want = fast(x)
        thread = threading.Thread(target=compiles)
        thread.start()
        while not done.is_set():
            torch.testing.assert_close(fast(x), want)
        thread.join()


def test_errors_of_the_model_stay():
    plain, fast, _ = pair()
    with ff.use_backend("reference"):
        for model in (plain, fast):
            with pytest.raises(RuntimeError, match="normalized_shape"):
                model(torch.randn(2, 5, D + 1))
        compare(plain, fast, [x_of()])


def test_hooks():
    """The hooks of a module within a rewritten one are called, from the next call on, and change
    what they return something for. With a backward hook the original code runs.
    """
    plain, fast, report = pair()
    x, seen = x_of(), []
    with ff.use_backend("reference"):
        fast(x)
        for module, own in ((m.blocks[1].attention.out, m is fast) for m in (plain, fast)):

            def double(module, given, out, own=own):
                seen.extend([1] * own)
                return 2 * out

            module.register_forward_hook(double)
            module.register_forward_pre_hook(lambda _, x: (3 * x[0],))
        compare(plain, fast, [x])
        compare(plain, fast, [x])
        assert seen == [1, 1] and not report.fallbacks
        handle = fast.blocks[1].mlp[1].register_full_backward_hook(lambda *_: seen.append("grad"))
        compare(plain, fast, [x])
        handle.remove()
        assert seen == [1, 1, 1, "grad"]
        assert report.fallbacks == {"blocks.1": {rewritten._HOOKED: 1}}
        fast.blocks[1].register_forward_hook(lambda *_: seen.append("own"))
        compare(plain, fast, [x])
        assert seen[4:] == [1, "own"] and report.fallbacks == {"blocks.1": {rewritten._HOOKED: 1}}
        fast.blocks[2].norm2.register_full_backward_hook(lambda *_: None)
        rows = ff.explain(fast, x).rows
    assert ("blocks.2", "Block", "torch", rewritten._HOOKED) in rows


class Sibling(nn.Module):
    """Reads a module that it has not registered."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(D), Attention()
        self.listed = [nn.Linear(D, D)]

    def forward(self, x):
        return x + self.attention(self.norm(self.listed[0](x)))


def test_hooks_of_a_module_that_is_not_registered():
    plain, fast, _ = pair(Sibling())
    x, seen = x_of(), []
    with ff.use_backend("reference"):
        compare(plain, fast, [x])
        fast.listed[0].register_forward_hook(lambda *_: seen.append(1))
        compare(plain, fast, [x])
    assert seen == [1]


# ---------------------------------------------------------------------------- beside other features


def test_copies():
    plain, fast, _ = pair()
    x, buffer = x_of(), io.BytesIO()
    with ff.use_backend("reference"):
        fast(x)
        torch.save(fast, buffer)
        buffer.seek(0)
        copies = copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))
        for model in (*copies, torch.load(buffer, weights_only=False)):
            assert not model.blocks[0]._captures
            assert model.blocks[0]._captures.shared is model.blocks[1]._captures.shared
            compare(plain, model, [x])
            assert model.blocks[0]._captures


def flops(model):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x_of())
    return torch.tensor(counter.get_total_flops())


def test_traces_and_transforms():
    """The first call of each model is one within another tracer or a transform."""
    x = x_of()
    with ff.use_backend("reference"):
        for call in (
            lambda m: torch.jit.trace(m, x)(x),
            lambda m: torch.fx.symbolic_trace(m)(x),
            lambda m: torch.func.vmap(lambda row: m(row[None])[0])(x),
            lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (x,)),
            lambda m: torch.func.grad(lambda x: m(x).square().sum())(x),
            lambda m: torch.func.jvp(m, (x,), (x,))[1],
            lambda m: torch.export.export(m, (x,)).module()(x),
            flops,
        ):
            plain, fast, report = pair()
            torch.testing.assert_close(call(fast), call(plain), rtol=1e-4, atol=1e-5)
            compare(plain, fast, [x])
            assert ops(report) == OPS


class Exported(nn.Module):
    """torch.jit.trace compiles its second method, and reads the attributes of its modules."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 24), nn.ReLU(), nn.Linear(24, D))

    def forward(self, x):
        return self.layers(x)

    @torch.jit.export
    def infer(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * 2


def test_a_trace_with_a_method_of_its_own():
    _, fast, report = pair(Exported())
    x = x_of()
    for backend in ("auto", "reference"):  # before its first call, and after it
        with ff.use_backend(backend):
            traced = torch.jit.trace(fast, x)
            torch.testing.assert_close(traced(x), fast(x))
            torch.testing.assert_close(traced.infer(x), fast(x) * 2)
            fast.layers._run_original("a reason", x)
    assert ops(report) == {"layer_norm", "feed_forward"} and report.fallbacks


def selected(context, op, *args, **kwargs):
    return "mm" in str(op)  # what a checkpoint keeps


KEEPING = {"context_fn": partial(create_selective_checkpoint_contexts, selected)}


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "selective"])
def test_checkpoints(kind):
    """A selective one is a dispatch mode that does not see into what Dynamo captures."""
    options = {"use_reentrant": kind == "reentrant", **(KEEPING if kind == "selective" else {})}

    class Checkpointed(Model):
        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, **options)
            return self.norm(x)

    plain, fast, report = pair(Checkpointed())
    with ff.use_backend("reference"):
        compare(plain, fast, [x_of().requires_grad_()])
    assert ops(report) == OPS and not report.fallbacks


def test_under_ddp(process_group):
    plain, fast, report = pair()
    with ff.use_backend("reference"):
        compare(plain, DistributedDataParallel(fast).module, [x_of()])
    assert ops(report) == OPS


def test_an_outer_compile():
    """It takes the original code; a warning names what puts the ops into it."""
    plain, fast, _ = pair()
    with ff.use_backend("reference"):
        with pytest.warns(UserWarning, match=r"compile within fastformer.fusing\(\)"):
            compare(plain, torch.compile(fast, backend="eager"), [x_of()])
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            compare(plain, torch.compile(fast, backend=ff.dynamo_backend_eager), [x_of()])


class Storing(Attention):
    """Stores its weights, and may return them, as the Annotated Transformer does."""

    def forward(self, x, asked=False):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D // H)).permute(2, 0, 3, 1, 4)
        self.weights = (q @ k.mT).softmax(-1)
        out = self.out((self.weights @ v).transpose(1, 2).flatten(2))
        return (out, self.weights) if asked else out


def test_weights_that_are_stored():
    plain, fast, report = pair(Storing())
    x = x_of()
    with ff.use_backend("reference"):
        compare(plain, fast, [x])
        assert torch.allclose(fast.weights, plain.weights)
        assert "computed beside the op; accelerate(model, need_weights=False)" in str(report)
        ff.accelerate(fast, need_weights=False)
        torch.testing.assert_close(fast(x), plain(x))
        assert fast.weights is None
        assert fast(x, asked=True)[1] is None
        assert "beside the op" not in str(ff.accelerate(Storing(), x, need_weights=False))
        assert "beside the op" not in str(ff.explain(fast, x))
        ff.accelerate(fast, need_weights=True)
        assert torch.allclose(fast(x, asked=True)[1], plain(x, asked=True)[1])
    ff.restore(fast)
    assert type(fast) is Storing and "_returns_weights" not in vars(fast)


def test_a_block_around_torchs_attention():
    plain, fast, report = pair(nn.Sequential(Torch(), Torch()))
    with ff.use_backend("reference"):
        compare(plain, fast, [x_of()])
        plain.eval(), fast.eval()
        x = x_of()
        with torch.no_grad():
            torch.testing.assert_close(fast(x), plain(x))
    assert "scaled_dot_product_attention" in ops(report) and not report.fallbacks


# ----------------------------------------------------------------------- the Annotated Transformer


@pytest.fixture(scope="module")
def annotated():
    """The tutorial model of the examples, as a user has it."""
    path = ROOT / "examples" / "annotated_transformer.py"
    spec = importlib.util.spec_from_file_location("annotated_transformer", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where Dynamo looks for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_annotated_model(annotated, backend):
    plain, fast, report = pair(annotated.Transformer(11, N=1, d_model=D, d_ff=24, h=H, dropout=0.0))
    compare(plain, fast, annotated.batch(size=2, length=6), 2e-5)
    assert len(report.replaced) == 4 and not report.skipped
    assert ops(report) >= {"scaled_dot_product_attention", "layer_norm", "feed_forward"}


def test_classes_that_are_almost_the_tutorials(annotated):
    """They have its parts, and compute something else."""
    attend = annotated.MultiHeadedAttention.forward

    def inverted(self, query, key, value, mask=None):
        return attend(self, query, key, value, None if mask is None else mask == 0)

    def in_a_window(self, query, key, value, mask=None):
        near = torch.ones(query.size(1), key.size(1)).tril(2)
        return attend(self, query, key, value, near[None] if mask is None else mask * near)

    def biased(self, x):
        std = x.std(-1, keepdim=True, correction=0)
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (std + self.eps) + self.b_2

    heads, norm = annotated.MultiHeadedAttention(H, D).eval(), annotated.LayerNorm(D)
    fed = annotated.PositionwiseFeedForward(D, 24).eval()
    x, mask = x_of(), torch.ones(1, 5, 5).tril()
    for module, forward, inputs in (
        (heads, inverted, [x, x, x, mask]),
        (heads, in_a_window, [x, x, x, mask]),
        (norm, biased, [x]),
        (fed, lambda self, x: self.w_2(self.dropout(F.gelu(self.w_1(x)))), [x]),
        (fed, lambda self, x: self.dropout(self.w_2(self.w_1(x).relu())), [x]),
    ):
        module = copy.deepcopy(module)
        module.__class__ = type("Other", (type(module),), {"forward": forward})
        plain, fast, report = pair(module)
        with ff.use_backend("reference"):
            compare(plain, fast, inputs)
        assert isinstance(fast, Rewritten) and not report.fallbacks
