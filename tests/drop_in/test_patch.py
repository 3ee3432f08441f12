"""accelerate, restore, explain and sdpa_override, on both backends: torch's modules against
themselves in float64.
"""

import contextlib
import copy
import functools
import io
import itertools
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fastformer as ff
from fastformer import use_backend
from fastformer.drop_in.replacements.base import explaining

N, L, S, E, H = 2, 5, 7, 16, 2
INF = float("-inf")
pytestmark = [
    pytest.mark.usefixtures("on_the_ops"),
    pytest.mark.filterwarnings("ignore:Support for mismatched"),  # torch's, of a float and a bool
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested"),
]


@pytest.fixture(autouse=True)
def as_torch_starts():
    """Nothing is compiled, and after the test torch's fast path is on."""
    torch._dynamo.reset()
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def randomized(module, device, dtype=torch.float32):
    """Every parameter drawn anew: torch starts biases at zero and norms at one."""
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)
    return module.to(device, dtype)


def accelerated(module, **options):
    """A copy of the module that is accelerated, and the report."""
    module = copy.deepcopy(module)
    return module, ff.accelerate(module, **options)


def own(base, **members):
    """A class of the user's."""
    return type("Own", (base,), members)


Negated = own(nn.Linear, forward=lambda self, x: -F.linear(x, self.weight, self.bias))


def same(have, want, tolerance=1e-5):
    torch.testing.assert_close(have, want, atol=tolerance, rtol=tolerance)


def padding_of(device, where="right", lengths=(24, 9, 14), length=24):
    """[B, length], True where a sequence of the length has ended, on that side or at random."""
    lengths = torch.tensor(lengths, device=device)
    if where == "scattered":
        return torch.rand(len(lengths), length, device=device) < 0.4
    padding = torch.arange(length, device=device) >= lengths[:, None]
    return padding.flip(1) if where == "left" else padding


def short_padding(device):
    """[N, S], of which the second row has 4 tokens."""
    return padding_of(device, lengths=(S, 4), length=S)


def causal_mask(length, device):
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def floating(mask):
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, INF)


def ops(model, *args, **given):
    """The names of what runs in a call, in order."""
    return [op for _, op, *_ in ff.explain(model, *args, **given).rows]


def results(module, args, kwargs, dtype, seen):
    """The outputs, the first where it is seen, and the gradients of parameters and arguments."""
    given = {**dict(enumerate(args)), **kwargs}
    leaf_of, leaves = {}, {}
    for name, x in given.items():  # one tensor given twice stays one
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            if id(x) not in leaf_of:
                leaf_of[id(x)] = leaves[name] = x.detach().to(dtype).requires_grad_()
            given[name] = leaf_of[id(x)]
    out = module(*(given[i] for i in range(len(args))), **{k: given[k] for k in kwargs})
    first, *others = out if isinstance(out, tuple) else (out,)
    first = first[seen]
    cotangent = torch.randn(first.shape, generator=torch.Generator().manual_seed(1))
    wanted = {**dict(module.named_parameters()), **leaves}
    grads = torch.autograd.grad(
        first, list(wanted.values()), cotangent.to(first), allow_unused=True, materialize_grads=True
    )
    return [first, *others], dict(zip(wanted, grads))


def relative(have, want):
    scale = max(float(want.detach().norm()), 1e-6 * want.numel() ** 0.5)
    return float((have.detach().double() - want.detach().double()).norm()) / scale


def check(original, *args, seen=slice(None), **kwargs):
    """The accelerated module against the original in float64, its first output where it is seen."""
    fast, report = accelerated(original)
    assert report.replaced
    wide = copy.deepcopy(original).double()
    have, grads = results(fast, args, kwargs, torch.float32, seen)
    want, oracle = results(wide, args, kwargs, torch.float64, seen)
    for i, (x, y) in enumerate(zip(have, want, strict=True)):
        if y is None:
            assert x is None
        else:
            assert x.shape == y.shape
            error = relative(x, y)
            assert error < 1e-5, f"output {i}: {error:.1e}"
    largest = max(g.norm() for g in oracle.values())
    for name, grad in grads.items():  # key biases have no gradient but rounding
        bound = 1e-5 * max(oracle[name].norm(), 1e-3 * largest)
        error = (grad.double() - oracle[name]).norm()
        if error >= bound and oracle[name].norm() < 1e-12 * largest:  # zero: twice torch's rounding
            _, eager = results(copy.deepcopy(original), args, kwargs, torch.float32, seen)
            bound = 2 * (eager[name].double() - oracle[name]).norm()
        assert error < bound, name
    return report


# ---------------------------------------------------------------------------------------- attention


VARIANTS = {
    "plain": {},
    "no bias": {"bias": False},
    "kdim": {"kdim": 6, "vdim": 10},
    "kdim no bias": {"kdim": 6, "vdim": 10, "bias": False},
}


def masks(device):
    """By name: key_padding_mask and attn_mask, as torch takes them."""
    padding = short_padding(device)
    causal = torch.ones(L, S, dtype=torch.bool, device=device).triu(2)
    heads = torch.rand(N * H, L, S, device=device) < 0.3
    heads[..., 0] = False
    scores = torch.randn(L, S, device=device)
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": floating(padding) + torch.randn(N, S, device=device)},
        "mask": {"attn_mask": causal},
        "float mask": {"attn_mask": scores + floating(causal)},
        "mask of heads": {"attn_mask": heads},
        "float mask of heads": {"attn_mask": torch.randn(N * H, L, S, device=device)},
        "two": {"key_padding_mask": padding, "attn_mask": causal},
        "two floats": {"key_padding_mask": floating(padding), "attn_mask": scores},
        "mixed": {"key_padding_mask": padding, "attn_mask": scores},
        "mixed again": {"key_padding_mask": floating(padding), "attn_mask": heads},
    }


@pytest.mark.sample
@pytest.mark.parametrize("variant", VARIANTS)
def test_multihead_attention(variant, backend, device):
    """Every kind of mask beside every form of the module, with and without weights."""
    options = VARIANTS[variant]
    forms = itertools.cycle([(True, None), (False, True), (False, None), (True, False)])
    for (name, given), (batch_first, weights) in zip(masks(device).items(), forms):
        module = nn.MultiheadAttention(E, H, batch_first=batch_first, **options)
        randomized(module, device)
        query = torch.randn(N, L, E, device=device)
        key = torch.randn(N, S, options.get("kdim", E), device=device)
        value = torch.randn(N, S, options.get("vdim", E), device=device)
        if not batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        given = {**given, "need_weights": weights is not None}
        if weights is not None:
            given["average_attn_weights"] = weights
        report = check(module, query, key, value, **given)
        assert weights is not None or not report.fallbacks, name


@pytest.mark.parametrize("shared", ["query is key is value", "key is value", "value is query"])
@pytest.mark.parametrize("batch_first", [True, False, None])
def test_multihead_attention_layouts(shared, batch_first, backend, device):
    """None: without a batch. One tensor given twice gets both gradients."""
    module = randomized(nn.MultiheadAttention(E, H, batch_first=bool(batch_first)), device)
    shape = (S, E) if batch_first is None else (N, S, E)
    x, y = torch.randn(2, *shape, device=device)
    args = {"query is key is value": (x, x, x), "key is value": (x, y, y)}.get(shared, (x, y, x))
    for weights in (False, True):
        check(module, *args, need_weights=weights)
    if batch_first is None:
        check(module, *args, key_padding_mask=short_padding(device)[1], need_weights=False)


def test_causal_hint(backend, device):
    module = randomized(nn.MultiheadAttention(E, H, batch_first=True), device)
    x = torch.randn(N, S, E, device=device)
    causal = nn.Transformer.generate_square_subsequent_mask(S, device=device)
    padding = short_padding(device)
    wide = copy.deepcopy(module).double()
    want = wide(*[x.double()] * 3, attn_mask=causal.double())
    ff.accelerate(module)
    for mask in (causal, causal == INF):
        for weights in (True, False):
            hint = {"attn_mask": mask, "is_causal": True, "need_weights": weights}
            have = module(x, x, x, **hint)
            assert relative(have[0], want[0]) < 1e-5
            assert not weights or relative(have[1], want[1]) < 1e-5
            both = module(x, x, x, key_padding_mask=padding, **hint)[0]
            torch.testing.assert_close(both[0], have[0][0])
    with pytest.raises(ValueError, match="is_causal is True and attn_mask None"):
        module(x, x, x, is_causal=True)


@pytest.mark.parametrize("batch_first", [True, False])
def test_outputs_are_contiguous(batch_first, backend, device):
    """Also of an input that is a transposed view."""
    x = torch.randn(3, N, E, device=device).transpose(0, 1)
    options = dict(batch_first=batch_first, norm_first=True)
    layer = nn.TransformerEncoderLayer(E, H, 24, 0.0, **options)
    for module, inputs in (
        (nn.MultiheadAttention(E, H, batch_first=batch_first), 3),
        (layer, 1),
        (nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), 1),
        (nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, 24, 0.0, **options), 1), 2),
    ):
        fast, _ = accelerated(module.to(device))
        for given, mode in itertools.product((x, x[0].contiguous()), (True, False)):
            with torch.set_grad_enabled(mode):
                out = fast.train(mode)(*[given] * inputs)
            assert all(y.is_contiguous() for y in (out if inputs == 3 else [out])), module


def test_need_weights_option(backend, device):
    """The report says at once what need_weights=True takes; need_weights=False ends it."""
    model = own(nn.Module, forward=lambda self, x: self.layer(self.attn(x, x, x)[0]))()
    model.attn = nn.MultiheadAttention(E, H, batch_first=True)
    model.layer = nn.TransformerEncoderLayer(E, H, 24, 0.0, batch_first=True)
    randomized(model, device)
    x = torch.randn(N, S, E, device=device)
    want = model(x)
    report = ff.accelerate(model)
    assert list(report.notes) == ["attn"] and not report.fallbacks  # not that of the layer
    assert "need_weights=False" in report.notes["attn"]
    assert "attn: need_weights=True, the default, runs in plain PyTorch" in str(report)
    row = ff.explain(model, x).rows[0]
    assert row[2] == "torch" and "need_weights=False" in row[3]
    ff.restore(model)
    assert list(ff.accelerate(model, x).notes) == ["attn"]  # the call shows it
    ff.restore(model)
    calls = own(nn.Module, forward=lambda self, x: self.attn(x, x, x, need_weights=False)[0])()
    calls.attn = model.attn
    assert list(ff.accelerate(calls).notes) == ["attn"]
    ff.restore(calls)
    assert not ff.accelerate(calls, x).notes
    ff.restore(calls)

    report = ff.accelerate(model, need_weights=False)
    assert not report.notes and "need_weights" not in str(report)
    assert [row[2] for row in ff.explain(model, x).rows] == [backend] * 5
    same(model(x), want)
    assert model.attn(x, x, x, need_weights=True)[1] is None and not report.fallbacks
    assert model.attn(x, x, x, attn_mask=torch.zeros(1, 2), is_causal=True)[1] is None  # torch's
    assert copy.deepcopy(model).attn(x, x, x)[1] is None
    again = ff.accelerate(model)  # it names no option, and changes none
    assert not again.notes and model.attn(x, x, x)[1] is None
    again = ff.accelerate(model, need_weights=True)
    assert list(again.notes) == ["attn"] and model.attn(x, x, x)[1] is not None
    ff.accelerate(model, need_weights=False)
    ff.restore(model)
    assert model.attn(x, x, x)[1] is not None


@pytest.mark.parametrize("variant", ["plain", "kdim", "no bias"])
def test_fully_padded_rows(variant, backend, device):
    """Zeros before the output projection, in every mode; finite gradients."""
    options = VARIANTS[variant]
    module = randomized(nn.MultiheadAttention(E, H, batch_first=True, **options), device)
    ff.accelerate(module)
    query = torch.randn(N, L, E, device=device, requires_grad=True)
    key = torch.randn(N, S, options.get("kdim", E), device=device)
    value = torch.randn(N, S, options.get("vdim", E), device=device)
    padding = padding_of(device, lengths=(S, 0), length=S)
    expected = module.out_proj(torch.zeros(L, E, device=device))
    for training, weights, grad in itertools.product((True, False), repeat=3):
        module.train(training)
        with torch.set_grad_enabled(grad):
            out, w = module(query, key, value, padding, need_weights=weights)
        torch.testing.assert_close(out[1], expected)
        assert out.isfinite().all() and (w is None or w[1].eq(0).all())
        if grad:
            (grad_query,) = torch.autograd.grad(out.sum(), query)
            assert grad_query.isfinite().all() and grad_query[1].eq(0).all()


def test_dropout_of_the_weights(backend, device):
    """The weights are returned after dropout, as torch's; both backends draw the same."""
    module = randomized(nn.MultiheadAttention(E, H, dropout=0.5, batch_first=True), device)
    x = torch.randn(N, S, E, device=device)
    want = copy.deepcopy(module).eval()(x, x, x, average_attn_weights=False)[1]
    ff.accelerate(module)
    have = module(x, x, x, average_attn_weights=False)[1]
    kept = have != 0
    assert 0.2 < kept.float().mean() < 0.8
    torch.testing.assert_close(have[kept], 2 * want[kept])
    torch.manual_seed(3)
    have = module(x, x, x, need_weights=False)[0]
    torch.manual_seed(3)
    with use_backend("reference"):
        torch.testing.assert_close(module(x, x, x, need_weights=False)[0], have)
    assert not torch.allclose(module.eval()(x, x, x, need_weights=False)[0], have, atol=1e-2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"key_padding_mask": torch.zeros(N, S + 1, dtype=torch.bool)}, ValueError, r"\[N, S\]"),
        ({"attn_mask": torch.zeros(S, L)}, ValueError, "attn_mask has shape"),
        ({"attn_mask": torch.zeros(3, L, S)}, ValueError, r"\[N H, L, S\]"),
        ({"attn_mask": torch.zeros(L, S, dtype=torch.int64)}, TypeError, "attn_mask has dtype"),
        ({"query": torch.zeros(N, L, E + 1)}, ValueError, "query has shape"),
        ({"key": torch.zeros(S, E)}, ValueError, "key has shape"),
        ({"value": torch.zeros(N, S + 1, E)}, ValueError, "as many values as keys"),
        ({"query": torch.zeros(N, 1, L, E)}, ValueError, "query has shape"),
        ({"attn_mask": torch.zeros(3, 4), "is_causal": True}, ValueError, "attn_mask has shape"),
    ],
)
def test_bad_arguments_of_attention(change, error, message):
    module = nn.MultiheadAttention(E, H, batch_first=True)
    ff.accelerate(module)
    x = torch.zeros(N, S, E)
    given = {"query": torch.zeros(N, L, E), "key": x, "value": x}
    with pytest.raises(error, match=message):
        module(**{**given, **change})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype, backend, device):
    """The error is at most twice that of torch's own layer in the dtype."""
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    randomized(layer, device, dtype)
    x = torch.randn(N, 64, E, device=device, dtype=dtype)
    padding = padding_of(device, lengths=(64, 40), length=64)
    wide = copy.deepcopy(layer).double()(x.double(), src_key_padding_mask=padding)
    torchs = layer(x, src_key_padding_mask=padding)
    ff.accelerate(layer)
    have = layer(x, src_key_padding_mask=padding)
    assert have.dtype == dtype
    peer, error = ((y.double() - wide).abs().max() for y in (torchs, have))
    assert error <= 2 * peer, f"{error:.1e}, torch {peer:.1e}"


def test_fallback_of_attention_to_torch(backend, device):
    """Call by call, under an explicit triton too, and counted."""
    x, wide = torch.randn(N, S, E, device=device), torch.randn(1, 3, 600, device=device)
    nested = torch.nested.nested_tensor([x[0], x[1, :3]])
    unread = {"attn_mask": torch.zeros(3, 4, device=device), "is_causal": True}
    takes = "torch takes what the op does not"
    for y, options, training, why in (
        (x, unread, True, f"attn_mask: {takes}"),  # of another shape, which torch does not see
        (x, {"is_causal": True, "need_weights": True}, False, f"is_causal: {takes}"),
        (wide, {}, True, "the head dim is 300; the kernels take up to 256"),
        (nested, {}, False, "an input is a nested tensor"),
    ):
        module = nn.MultiheadAttention(y.size(-1), H, batch_first=True).to(device).train(training)
        fast, report = accelerated(module)
        given = {"need_weights": False, **options}
        with torch.set_grad_enabled(training):
            have, want = (m(y, y, y, **given)[0] for m in (fast, module))
        assert have.is_nested == want.is_nested
        torch.testing.assert_close(have.unbind(), want.unbind(), msg=why)
        assert report.replaced == {"": "MultiheadAttention"} and "(the model)" in str(report)
        assert report.fallbacks == {"": {why: 1}} and why in str(report)


def test_rows_too_wide_for_the_kernels(backend, device):
    from fastformer.kernels.layer_norm.launchers import MAX_FEATURES

    norm = nn.LayerNorm(MAX_FEATURES + 1).to(device)
    x = torch.randn(2, MAX_FEATURES + 1, device=device)
    want = norm(x)
    report = ff.accelerate(norm)
    torch.testing.assert_close(norm(x), want)
    told = "layer_norm: a row has" in str(report)
    assert told == bool(report.fallbacks) == (backend == "triton")


# ------------------------------------------------------------------------------------------- layers


LAYERS = {
    "post-norm": {},
    "pre-norm": {"norm_first": True},
    "sequence first": {"batch_first": False},
    "gelu": {"activation": "gelu"},
    "gelu module": {"activation": nn.GELU(), "norm_first": True},
    "gelu by tanh": {"activation": nn.GELU("tanh")},
    "silu": {"activation": F.silu},
    "relu module": {"activation": nn.ReLU()},
    "any function": {"activation": torch.tanh},
    "no bias": {"bias": False, "norm_first": True, "batch_first": False},
    "eps": {"layer_norm_eps": 1e-2},
}


@pytest.mark.sample
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_an_encoder_and_a_decoder(name, backend, device):
    options = {"dim_feedforward": 24, "dropout": 0.0, "batch_first": True, **LAYERS[name]}
    x, y = torch.randn(N, S, E, device=device), torch.randn(N, L, E, device=device)
    if not options["batch_first"]:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    padding, causal = short_padding(device), nn.Transformer.generate_square_subsequent_mask(S)
    layer = randomized(nn.TransformerEncoderLayer(E, H, **options), device)
    check(layer, x)
    check(layer, x, src_key_padding_mask=padding)
    check(layer, x, src_mask=causal.to(device), is_causal=True)
    check(layer, torch.randn(S, E, device=device), src_mask=torch.randn(S, S, device=device))
    layer = randomized(nn.TransformerDecoderLayer(E, H, **options), device)
    given = {"tgt_mask": causal_mask(L, device), "memory_key_padding_mask": padding}
    check(layer, y, x)
    check(layer, y, x, **given, tgt_is_causal=True)
    check(layer, y, x, **given, memory_mask=torch.randn(L, S, device=device))


def encoder(device, layers=2, norm=True, heads=H, **options):
    """nn.TransformerEncoder with random weights, by options of its own and of its layers."""
    options = {"batch_first": True, **options}
    own = {k: options.pop(k) for k in ("enable_nested_tensor", "mask_check") if k in options}
    layer = nn.TransformerEncoderLayer(E, heads, 24, 0.0, **options)
    final = nn.LayerNorm(E) if norm else None
    return randomized(nn.TransformerEncoder(layer, layers, final, **own), device)


@pytest.mark.sample
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder(norm, norm_first, backend, device):
    """Also that train is eval, with and without gradients, where no padding is."""
    model = encoder(device, 1 + norm, norm, norm_first=norm_first)
    x = torch.randn(3, 24, E, device=device)
    real = ~padding_of(device)
    masked, padded = {"mask": causal_mask(24, device)}, {"src_key_padding_mask": ~real}
    for kwargs in ({}, masked, padded, {**masked, **padded}):
        check(model, x, seen=real, **kwargs)
        fast, _ = accelerated(model)
        want = fast(x, **kwargs)[real]
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                same(fast.eval()(x, **kwargs)[real], want)


DROPPED = "right", "left", "scattered", "a whole sequence", "everything", "little"


@pytest.mark.parametrize("where", DROPPED)
def test_drop_padding(where, backend, device):
    """On request: the layers return zeros there, and compute and read nothing, if that pays."""
    lengths = {"a whole sequence": (24, 0, 14), "everything": (0, 0, 0), "little": (24, 24, 23)}
    padding = padding_of(device, where, lengths.get(where, (24, 9, 14)))
    packed = where not in ("everything", "little")
    model, x = encoder(device), torch.randn(3, 24, E, device=device)
    want = copy.deepcopy(model).double()(x.double(), src_key_padding_mask=padding)
    report = ff.accelerate(model, drop_padding=True)
    if packed:
        x = x.masked_fill(padding.unsqueeze(-1), float("nan"))
    for mode, grad in itertools.product((True, False), (False, True)):
        with torch.set_grad_enabled(grad):
            ran = ops(model.train(mode), x, src_key_padding_mask=padding)
            assert ("packed_attention" in ran) == packed
            have = model(x, src_key_padding_mask=padding)
        assert where == "everything" or relative(have[~padding], want[~padding]) < 1e-5
        assert (have[padding] == model.norm.bias).all()  # of the norm after the layers
    assert not report.fallbacks
    have.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("batch_first", [True, False])
def test_drop_padding_option(batch_first, backend, device):
    """By default what torch computes there comes out, in training and with gradients."""
    x, padding = torch.randn(3, 24, E, device=device), padding_of(device)
    kept = encoder(device, batch_first=batch_first)
    dropped, _ = accelerated(kept, drop_padding=True)
    given = x if batch_first else x.transpose(0, 1)
    for mode in (True, False):
        check(kept.train(mode), given, src_key_padding_mask=padding)  # everywhere
    ff.accelerate(kept)

    def run(model):
        out = model(given, src_key_padding_mask=padding)
        assert out.is_contiguous()
        return out if batch_first else out.transpose(0, 1)

    want, have = run(kept), run(dropped.eval())
    ff.accelerate(dropped, need_weights=False)  # it does not name drop_padding, which stays
    assert torch.equal(run(dropped), have)
    same(have[~padding], want[~padding])
    assert (have[padding] == dropped.norm.bias).all() and (want[padding] != have[padding]).any()
    handle = dropped.layers[1].register_forward_hook(lambda *_: None)  # each layer by itself
    for mode in (True, False):
        out = dropped.train(mode)(given, src_key_padding_mask=padding)
        same(out if batch_first else out.transpose(0, 1), have)
    handle.remove()
    ff.accelerate(dropped, drop_padding=False)
    torch.testing.assert_close(run(dropped), want)


CONVERSIONS = {  # by name: options of the encoder, and of the padding
    "aligned": ({}, {}),
    "float": ({}, {}),
    "a whole sequence": ({}, {"lengths": (24, 0, 14)}),
    "little": ({}, {"lengths": (24, 24, 23)}),
    "scattered": ({}, {"where": "scattered"}),
    "left": ({}, {"where": "left"}),
    "unchecked": ({"mask_check": False}, {}),
    "pre-norm": ({"norm_first": True}, {}),
    "not asked for": ({"enable_nested_tensor": False}, {}),
    "with a mask": ({}, {}),
    "without fast path": ({}, {}),
    "odd heads": ({"heads": 1}, {}),
    "gelu": ({"activation": "gelu", "norm": True}, {}),
    "an old pickle": ({}, {}),
    "the first layer trains": ({}, {}),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_padding_at_inference_is_as_torch_has_it(name, device):
    """Zeros where torch converts to nested tensors, what its layers compute elsewhere."""
    options, where = CONVERSIONS[name]
    model = encoder(device, **{"norm": False, **options})
    if name == "an old pickle":
        del model.use_nested_tensor
    fast, _ = accelerated(model)
    x, padding = torch.randn(3, 24, E, device=device), padding_of(device, **where)
    given = {"src_key_padding_mask": floating(padding) if name == "float" else padding}
    if name == "with a mask":
        given["mask"] = causal_mask(24, device)
    torch.backends.mha.set_fastpath_enabled(name != "without fast path")
    for training, grad, frozen in itertools.product((True, False), repeat=3):
        for each in (model, fast):
            each.train(training).requires_grad_(not frozen)
            each.layers[0].train(training or name == "the first layer trains")
        with torch.set_grad_enabled(grad):
            want, have = model(x, **given), fast(x, **given)
            ran = ops(fast, x, **given) if name == "aligned" else ()
        seen = ~padding.all(1) if want.isnan().any() else slice(None)  # zeros are ours
        same(have[seen], want[seen], 1e-4)
        if name == "aligned":
            zeros = not training and (frozen or not grad)
            assert ("packed_attention" in ran) == zeros
            assert have[padding].eq(0).all() == zeros


APPENDS = "self_attn: it appends keys (add_bias_kv, add_zero_attn)"
FORMS = {  # by name: the options of the second layer's attention, and why torch runs the encoder
    "heads": ({"num_heads": 2 * H}, "layers.1 has another form of self_attn than layers.0"),
    "zero_attn": ({"add_zero_attn": True}, f"layers.1: {APPENDS}"),
    "bias_kv": ({"add_bias_kv": True}, f"layers.1: {APPENDS}"),
}


@pytest.mark.parametrize("name", FORMS)
def test_layers_of_several_forms(name, backend, device):
    """Torch runs the encoder, and a layer whose attention appends keys, and counts them."""
    model = encoder(device)
    options, why = FORMS[name]
    attention = nn.MultiheadAttention(E, **{"num_heads": H, **options}, batch_first=True)
    model.layers[1].self_attn = attention
    randomized(model, device)
    x = torch.randn(3, 24, E, device=device)
    report = check(model, x, src_key_padding_mask=padding_of(device))
    assert [*report.fallbacks[""]] == [why]
    assert ("layers.1" in report.fallbacks) == (name != "heads")
    check(attention, x, x, x, need_weights=False)


@pytest.mark.parametrize("mask_check", [True, False])
def test_padding_at_inference_compiled(mask_check, device):
    """As torch compiles it: with mask_check it does not convert then."""
    model = encoder(device, 1, norm=False, mask_check=mask_check).eval()
    x, padding = torch.randn(3, 24, E, device=device), padding_of(device)
    fast, _ = accelerated(model)
    with torch.no_grad():
        want = torch.compile(model, backend="eager")(x, src_key_padding_mask=padding)
        compiled = torch.compile(fast, backend="eager", fullgraph=True)
        have = compiled(x, src_key_padding_mask=padding)
    same(have, want)
    assert (have[padding] == 0).all() == (not mask_check)


MEMORY = "memory_key_padding_mask"
TRANSFORMERS = {  # by name: options of the model, and which masks it gets beside the source's
    "src padding": ({}, []),
    "both paddings": ({}, [MEMORY, "tgt_mask"]),
    "left": ({}, []),
    "src mask": ({}, ["src_mask"]),
    "sequence first": ({"batch_first": False}, []),
    "sequence first, both": ({"batch_first": False}, [MEMORY, "tgt_mask"]),
    "pre-norm": ({"norm_first": True}, [MEMORY]),
    "unbatched": ({}, []),
}


@pytest.mark.sample
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformer(name, backend, device):
    """As torch, gradients too; without the source's padding, if the decoder does not see it."""
    options, others = TRANSFORMERS[name]
    options = {"batch_first": True, **options}
    model = randomized(nn.Transformer(E, H, 1, 1, 24, 0.0, **options), device)
    src, tgt = torch.randn(3, 24, E, device=device), torch.randn(3, L, E, device=device)
    padding = padding_of(device, "left" if name == "left" else "right")
    if name == "unbatched":
        src, tgt, padding = src[0], tgt[0], padding[1]
    elif not options["batch_first"]:
        src, tgt = src.transpose(0, 1), tgt.transpose(0, 1)
    masks = {"src_mask": causal_mask(24, device), "tgt_mask": causal_mask(L, device)}
    masks |= {MEMORY: padding.clone()}
    given = {"src_key_padding_mask": padding, **{other: masks[other] for other in others}}
    for mode in (True, False):
        check(model.train(mode), src, tgt, **given)
        fast, _ = accelerated(model, drop_padding=MEMORY in given)
        assert ("packed_attention" in ops(fast, src, tgt, **given)) == (MEMORY in given)
        same(fast(src, tgt, **given), model(src, tgt, **given), 1e-4)
        with torch.no_grad():
            same(fast(src, tgt, **given), model(src, tgt, **given), 1e-4)


ON_A_CPU = 'torch runs it on a CPU with the backend "auto"'


@pytest.mark.parametrize("training", [True, False])
def test_on_a_cpu_torch_runs_its_own_layers(training):
    """With the backend "auto", in place of the ops, whole: with torch's bits and its dropout.
    `explain` has one row for all within it; a block mask, and drop_padding, want the ops.
    """
    model = randomized(nn.Transformer(E, H, 1, 1, 24, 0.3, batch_first=True), "cpu").train(training)
    original, report = copy.deepcopy(model), ff.accelerate(model)
    src, tgt, padding = torch.randn(3, 24, E), torch.randn(3, L, E), padding_of("cpu")
    calls = {
        "": ((src, tgt), dict(src_key_padding_mask=padding)),
        "encoder": ((src,), dict(src_key_padding_mask=padding)),
        "encoder.layers.0": ((src,), {}),
        "decoder.layers.0": ((tgt, src), {}),
        "decoder.layers.0.multihead_attn": ((tgt, src, src), dict(need_weights=False)),
        "encoder.norm": ((src,), {}),
    }
    for grad, (name, (args, given)) in itertools.product((True, False), calls.items()):
        ours, theirs = model.get_submodule(name), original.get_submodule(name)
        with use_backend("auto"), torch.set_grad_enabled(grad):
            torch.manual_seed(1)
            want = theirs(*args, **given)
            torch.manual_seed(1)
            torch.testing.assert_close(ours(*args, **given), want, rtol=0, atol=0)
            rows = [row[1:] for row in ff.explain(ours, *args, **given).rows]
            stacks = ["TransformerEncoder", "TransformerDecoder"]
            names = stacks if name == "" else [type(theirs).__name__]
            assert rows == [(x, "torch", ON_A_CPU) for x in names]
        with use_backend("reference"):
            assert {row[2] for row in ff.explain(ours, *args, **given).rows} == {"reference"}
    assert str(report).endswith('on a CPU: torch runs these modules with the backend "auto"')
    blocks = ff.BlockMask.window(24, 9, 0)
    with use_backend("auto"):
        assert "scaled_dot_product_attention" in ops(model.encoder, src, blocks)
        ff.accelerate(model, drop_padding=True)
        assert "packed_attention" in ops(model.encoder, src, src_key_padding_mask=padding)


def test_explain_of_what_torch_runs_on_a_cpu():
    """What runs after it has its rows, also after a forward without `__call__`; nothing is changed:
    torch's encoder returns zeros at the padding.
    """

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.LayerNorm(E), nn.LayerNorm(E)
            self.encoder = encoder("cpu", norm=False).eval()
            self.seen = []

        def forward(self, x, padding):
            x = self.second(self.first.forward(x))
            self.seen.append(self.encoder(x, src_key_padding_mask=padding))
            return self.second(self.seen[-1])

    model, x, padding = Twice(), torch.randn(3, 24, E), padding_of("cpu")
    ff.accelerate(model)
    with use_backend("auto"), torch.no_grad():
        model(x, padding)
        rows = ff.explain(model, x, padding).rows
    assert torch.equal(*model.seen) and (model.seen[0][padding] == 0).all()
    assert [row[1] for row in rows] == [*["LayerNorm"] * 2, "TransformerEncoder", "LayerNorm"]
    layer = nn.TransformerEncoderLayer(E, H, 24, 0.0, batch_first=True)
    layer.norm1 = nn.LayerNorm(E, elementwise_affine=False)
    ff.accelerate(layer)
    blocks = ff.BlockMask.window(24, 9, 0)
    with use_backend("auto"):
        names = ops(layer, x, blocks)
    assert names[0] == "scaled_dot_product_attention" and "feed_forward" in names
    whole = nn.Sequential(nn.Linear(E, E), nn.LayerNorm(E, elementwise_affine=False)).to("meta")
    whole[0].to_empty(device="cpu")
    report = ff.accelerate(whole)
    assert "on a CPU" not in str(report)


def test_within_batch_invariant_nothing_is_left_to_torch():
    norm = nn.LayerNorm(E)
    ff.accelerate(norm)
    refused = pytest.raises(RuntimeError, match="takes kernels alone")
    with use_backend("auto"), ff.batch_invariant(), refused:
        norm(torch.randn(2, E))


def test_torch_knows_no_block_mask(device):
    module = nn.MultiheadAttention(E, H, batch_first=True, add_zero_attn=True).to(device)
    ff.accelerate(module)
    x = torch.randn(3, 24, E, device=device)
    with pytest.raises(ValueError, match=r"a BlockMask is given, .*appends keys"):
        module(x, x, x, attn_mask=ff.BlockMask.window(24, 9, 0).to(device), need_weights=False)


def test_adapters_in_a_layer_are_called(device):
    """Parts of another class."""
    layer = nn.TransformerEncoderLayer(E, H, 24, 0.0, batch_first=True)
    layer.linear1, layer.norm2, layer.dropout1 = Negated(E, 24), nn.Identity(), nn.Identity()
    check(randomized(layer, device), torch.randn(N, S, E, device=device))


def test_inference_runs_hooks_and_other_dropouts(device):
    """A dropout of another class, or that draws in evaluation, or with hooks."""
    x = torch.randn(N, S, E, device=device)
    for name in ("dropout", "dropout1", "dropout2"):
        layer = randomized(nn.TransformerEncoderLayer(E, H, 24, 0.5, batch_first=True), device)
        setattr(layer, name, own(nn.Dropout, forward=lambda self, x: x / 2)(0.1))
        ff.accelerate(layer.eval())
        want, calls = layer(x), []
        with torch.no_grad():
            torch.testing.assert_close(layer(x), want)
            setattr(layer, name, nn.Dropout(0.5).train())
            assert not torch.allclose(layer(x), layer(x), atol=1e-3), name
            setattr(layer, name, nn.Dropout(0.5).eval())
            getattr(layer, name).register_forward_hook(lambda *_, calls=calls: calls.append(1))
            layer(x)
        assert calls, name


# -------------------------------------------------------------------------------------------- norms


@pytest.mark.parametrize("what", ["weight", "bias", "eps"])
def test_norms_that_the_op_refuses(what, backend, device):
    """What torch takes and the op does not: counted, by itself and after a sum in a layer."""
    layer = nn.TransformerEncoderLayer(E, H, 24, 0.0, batch_first=True).to(device)
    norm, x = layer.norm1, torch.randn(N, S, E, device=device)
    if what == "weight":
        norm.double()
    elif what == "bias":
        norm.bias.data = norm.bias.data.double()
    else:
        norm.eps = layer.norm2.eps = -1e-3
    for module in (nn.RMSNorm(E).to(device, torch.bfloat16), norm, layer):
        fast, report = accelerated(module)
        try:
            want = module(x)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                fast(x)
        else:
            torch.testing.assert_close(fast(x), want)
        assert module is layer or report.fallbacks[""]


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(E, eps=0.1),
        nn.LayerNorm(E, bias=False),
        nn.LayerNorm(E, elementwise_affine=False),
        nn.LayerNorm((S, E)),
        nn.RMSNorm(E),
        nn.RMSNorm(E, eps=0.1),
        nn.RMSNorm((S, E), elementwise_affine=False),
    ],
    ids=str,
)
def test_norms(norm, backend, device):
    check(randomized(copy.deepcopy(norm), device), torch.randn(N, S, E, device=device))


@pytest.mark.parametrize("number", [np.float16, np.float32, torch.tensor])
def test_eps_and_dropout_that_are_no_floats(number, backend, device):
    """torch takes numbers of NumPy and tensors of no dimension."""

    def outputs(eps, p):
        torch.manual_seed(0)
        x = torch.randn(N, S, E, device=device)
        modules = {
            "layer norm": nn.LayerNorm(E, eps=eps),
            "rms norm": nn.RMSNorm(E, eps=eps),
            "attention": nn.MultiheadAttention(E, H, dropout=p, batch_first=True),
            "model": nn.Transformer(E, H, 1, 1, 24, p, layer_norm_eps=eps, batch_first=True),
        }
        ff.accelerate(nn.ModuleDict(modules).to(device), need_weights=False)
        inputs = {"attention": [x, x, x], "model": [x, x]}
        return {name: module(*inputs.get(name, [x])) for name, module in modules.items()}

    have = outputs(number(1e-3), number(0.25))
    want = outputs(number(1e-3).item(), number(0.25).item())
    torch.testing.assert_close(have, want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype, device):
    """The dtypes are those of torch's modules."""
    model = encoder(device)
    x = torch.randn(N, S, E, device=device).to(dtype)
    fast, _ = accelerated(model)
    with torch.autocast(device.type, torch.bfloat16):
        have, want = fast(x), model(x)
        norm, torchs = fast.norm(x), model.norm(x)
        attention, weights = fast.layers[0].self_attn(x, x, x)
    assert have.dtype == want.dtype and norm.dtype == torchs.dtype
    assert attention.dtype == torch.bfloat16 and weights.dtype == torch.bfloat16
    assert (have.float() - want.float()).abs().max() < 0.1 * want.float().abs().max()


# -------------------------------------------------------------------- what a user's model relies on


def test_parameters_hooks_and_state_dict_stay(device):
    """Also the printed structure and what isinstance says; a checkpoint loads either way."""
    model = nn.Transformer(E, H, 1, 1, 24, 0.0, batch_first=True).to(device)
    before = [(name, id(p)) for name, p in model.named_parameters()]
    printed, keys = str(model), list(model.state_dict())
    calls = []
    model.encoder.layers[0].linear1.register_forward_hook(lambda *_: calls.append("linear1"))
    model.decoder.layers[0].self_attn.register_forward_pre_hook(lambda *_: calls.append("attn"))
    model.decoder.norm.register_full_backward_hook(lambda *_: calls.append("backward"))
    report = ff.accelerate(model)
    assert [(name, id(p)) for name, p in model.named_parameters()] == before
    assert (str(model), list(model.state_dict())) == (printed, keys)
    assert isinstance(model.encoder.layers[0].self_attn, nn.MultiheadAttention)
    src, tgt = torch.randn(N, S, E, device=device), torch.randn(N, L, E, device=device)
    model(src, tgt).sum().backward()
    assert sorted(calls) == ["attn", "backward", "linear1"]
    assert "self_attn has hooks" in str(report.fallbacks)
    plain = nn.Transformer(E, H, 1, 1, 24, 0.0, batch_first=True).to(device)
    plain.load_state_dict(model.state_dict())
    same(model(src, tgt), plain(src, tgt))
    model.load_state_dict(plain.state_dict())


def attributes(model):
    return [(type(m), list(m.__dict__.items())) for m in model.modules()]


def test_restore(device):
    """The classes and every attribute, bit for bit; twice is no error."""
    model = nn.Transformer(E, H, 1, 1, 24, batch_first=True).to(device)
    before = attributes(model)
    ff.accelerate(model)
    src, tgt = torch.randn(N, S, E, device=device), torch.randn(N, L, E, device=device)
    model(src, tgt, src_key_padding_mask=short_padding(device))
    ff.accelerate(model, need_weights=False, drop_padding=True)
    again = ff.accelerate(model)
    assert not again.replaced and "replaced before" in str(again)
    ff.restore(model)
    ff.restore(model)
    assert attributes(model) == before


TRACED = {  # by name: the module, and how many inputs it takes
    "LayerNorm": (lambda: nn.LayerNorm(E), 1),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(E, H, 0.5, batch_first=True), 3),
    "Transformer": (lambda: nn.Transformer(E, H, 1, 1, 24, 0.5, batch_first=True), 2),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", TRACED)
def test_jit_trace(name, training, backend, device):
    """A trace is that of the plain model: it can be saved, and draws new masks of dropout."""
    make, inputs = TRACED[name]
    model = randomized(make(), device).train(training)
    fast, report = accelerated(model)
    args, outs = [torch.randn(N, S, E, device=device)] * inputs, []
    for each in (fast, model):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of tracing and its deprecation
            buffer = io.BytesIO()
            torch.jit.save(torch.jit.trace(each, args, check_trace=False), buffer)
            buffer.seek(0)
            traced = torch.jit.load(buffer)
        torch.manual_seed(1)
        outs.append(traced(*args))
    torch.testing.assert_close(*outs, rtol=0, atol=0)
    reasons = {why for reasons in report.fallbacks.values() for why in reasons}
    assert reasons == {"torch.jit.trace records the operations of torch"}


def test_skipped_modules():
    def method(self, x):
        return x

    attention, layer = nn.MultiheadAttention(E, H), nn.TransformerEncoderLayer(E, H, 24)
    norm = nn.LayerNorm(E)
    for module, on_class, name, why in (
        (attention, True, "forward", "Own: it has its own forward"),
        (attention, True, "__call__", "Own: it has its own __call__"),
        (layer, True, "_ff_block", "Own: it has its own _ff_block"),
        (norm, False, "forward", "LayerNorm: its forward is replaced on the instance"),
        (
            layer,
            True,
            "_attention_sublayer",
            "it has an attribute _attention_sublayer, which",
        ),
        (attention, False, "_visibility", "it has an attribute _visibility, which"),
        (norm, True, "__init_subclass__", "a class derived from it raises TypeError"),
    ):
        module = copy.deepcopy(module)
        if on_class:
            module.__class__ = own(type(module), **{name: method})
        else:
            setattr(module, name, method)
        cls, report = type(module), ff.accelerate(module)
        assert why in report.skipped[""] and why in str(report) and type(module) is cls, why


def test_a_derived_class_keeps_its_methods():
    cls = own(nn.TransformerEncoderLayer, features=lambda self: self.linear1.in_features)
    model, x = cls(E, H, 24, 0.0), torch.randn(S, N, E)
    fast, report = accelerated(model)
    assert report.replaced[""] == "Own" and isinstance(fast, cls)
    assert fast.features() == E
    torch.testing.assert_close(fast(x), model(x))


def test_an_encoder_with_a_skipped_attention(device):
    """It runs as torch's does."""
    model = encoder(device, layers=1)
    attention = own(nn.MultiheadAttention, forward=lambda self, query, *_, **given: (query, None))
    model.layers[0].self_attn.__class__ = attention
    x = torch.randn(N, S, E, device=device)
    fast, report = accelerated(model)
    torch.testing.assert_close(fast(x), model(x))
    assert "Own that was not replaced" in str(report)


def test_accelerate_is_undone_after_an_error():
    """An error in the middle of the swap takes back what was done."""

    def fails(self, name, value):
        raise KeyError(name)

    model = nn.Transformer(E, H, 1, 1, 24)
    model.decoder.norm.__class__ = own(nn.LayerNorm, __setattr__=fails)
    before = attributes(model)
    with pytest.raises(KeyError, match="__class__"):
        ff.accelerate(model)
    assert attributes(model) == before


def test_models_on_meta_and_with_parametrizations_are_refused():
    model = nn.TransformerEncoderLayer(E, H, device="meta")
    with pytest.raises(ValueError, match=r"self_attn\.in_proj_weight is on the meta device"):
        ff.accelerate(model)
    assert type(model) is nn.TransformerEncoderLayer
    model = nn.MultiheadAttention(E, H)
    ff.accelerate(model)
    nn.utils.parametrizations.weight_norm(model, "in_proj_weight")
    with pytest.raises(ValueError, match="a parametrization"):
        ff.restore(model)


def test_copies_and_pickles(backend, device):
    model = encoder(device)
    ff.accelerate(model)
    x = torch.randn(N, S, E, device=device)
    want = model(x)
    for copied in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied.layers[0]) is type(model.layers[0])
        torch.testing.assert_close(copied(x), want)


@pytest.mark.with_all
def test_compiled(backend, device):
    """One graph, of the whole model, forward and backward."""
    model = nn.Transformer(E, H, 1, 1, 24, 0.0, batch_first=True).to(device)
    ff.accelerate(model)
    src, tgt = torch.randn(N, S, E, device=device), torch.randn(N, L, E, device=device)
    padding = short_padding(device)
    given = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    given |= {"tgt_mask": causal_mask(L, device), "tgt_is_causal": True}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    want = model(src, tgt, **given)
    have = compiled(src, tgt, **given)
    same(have, want)
    same(*(torch.autograd.grad(y.sum(), list(model.parameters())) for y in (have, want)), 1e-4)
    rows = ff.explain(compiled, src, tgt, **given).rows  # the model that was compiled
    assert {row[2] for row in rows} == {backend}


COMPILED = """
import torch, fastformer as ff
from concurrent.futures import ThreadPoolExecutor
from torch import nn
model = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True)
ff.accelerate(model)
compiled = torch.compile(model, backend="eager", fullgraph=True)
def check():
    for n in (2, 3, 4):
        x = torch.randn(n, n + 3, 16)
        torch.testing.assert_close(compiled(x), model(x))
check()
ThreadPoolExecutor().submit(check).result()
print("done")
"""


@pytest.mark.with_all
def test_compiled_before_anything_else_ran(fresh):
    """Where a thread has set nothing yet: new shapes compile again, and do not fail."""
    assert fresh(COMPILED).endswith("done")


def test_compiled_before_it_was_accelerated_and_in_part(device):
    """It is compiled again; a layer can be compiled by itself."""
    model = encoder(device, layers=1)
    x = torch.randn(N, S, E, device=device)
    compiled = torch.compile(model, backend="eager")
    want = compiled(x)
    report = ff.accelerate(compiled)
    assert "_orig_mod.layers.0" in report.replaced
    same(compiled(x), want)
    graphs = []
    model.layers[0].compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
    same(model(x), want)
    assert graphs


def test_exported(backend, device):
    """With our ops in it, and zeros where padding is."""
    model = encoder(device, layers=1, norm=False)
    ff.accelerate(model, drop_padding=True)
    x, given = torch.randn(N, S, E, device=device), {"src_key_padding_mask": short_padding(device)}
    program = torch.export.export(model, (x,), given)
    same(program.module()(x, **given), model(x, **given))
    names = {str(node.target) for node in program.graph.nodes}
    assert backend == "reference" or any("fastformer" in name for name in names)


def test_fx_keeps_the_modules_whole(device):
    model = nn.Sequential(nn.LayerNorm(E), nn.TransformerEncoderLayer(E, H, 24)).to(device).eval()
    ff.accelerate(model)
    traced = torch.fx.symbolic_trace(model)
    x = torch.randn(S, N, E, device=device)
    torch.testing.assert_close(traced(x), model(x))
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["0", "1"]


def test_torch_func(backend, device):
    """vmap of grad: torch's own forward."""
    norm = nn.LayerNorm(E).to(device)
    gradient = torch.func.vmap(torch.func.grad(lambda row: norm(row).square().sum()))
    x = torch.randn(N, S, E, device=device)
    want = gradient(x)
    report = ff.accelerate(norm)
    torch.testing.assert_close(gradient(x), want)
    assert "torch.func" in str(report)


def forward_mode_results(call, x, t):
    """The output and its tangent, by torch.func.jvp; a gradient and its own tangent; by vjp."""
    gradient = torch.func.grad(lambda x: call(x).sin().sum())
    of_gradient = torch.func.jvp(gradient, (x,), (t,))
    return *torch.func.jvp(call, (x,), (t,)), *of_gradient, *torch.func.vjp(call, x)[1](t)


def test_forward_mode(backend, device):
    """torch.func.jvp, also of a gradient, and dual numbers reach the ops, and none is torch's."""
    attention, hidden = nn.MultiheadAttention(E, H, batch_first=True), causal_mask(S, device)
    layer = nn.TransformerEncoderLayer(E, H, 24, 0.0, batch_first=True)
    for module, call in (
        (attention, lambda m, x: m(x, x, x, attn_mask=hidden, need_weights=False)[0]),
        (layer, lambda m, x: m(x)),
        (nn.LayerNorm(E), lambda m, x: m(x)),
        (nn.Identity(), lambda m, x: overridden(x, x, x)),
    ):
        x, t = (torch.randn(N, S, E, device=device) for _ in range(2))
        wide = copy.deepcopy(randomized(module, device)).double()
        with use_backend("reference"), sdpa_kernel(SDPBackend.MATH):  # torch's, if not accelerated
            want = forward_mode_results(functools.partial(call, wide), x.double(), t.double())
        report, ran = ff.accelerate(module), []
        with ff.dispatch.backends.observe(on_choice=ran.append):
            have = forward_mode_results(functools.partial(call, module), x, t)
            with forward_ad.dual_level():
                dual = forward_ad.unpack_dual(call(module, forward_ad.make_dual(x, t)))
        assert len(ran) >= 4 and {choice.backend for choice in ran} == {backend}
        assert "torch.func" not in str(report)
        for one, other in zip((*have, *dual), (*want, *want[:2]), strict=True):
            assert relative(one, other) < 1e-5, module


def test_under_ddp(process_group):
    model = nn.parallel.DistributedDataParallel(encoder("cpu"))
    report = ff.accelerate(model)
    assert "module.layers.0.self_attn" in report.replaced
    model(torch.randn(N, S, E)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    ff.restore(model)
    assert type(model.module) is nn.TransformerEncoder


def test_accelerate_leaves_the_modules_of_fastformer():
    model = ff.make_model(11, 11, N=1, d_model=E, d_ff=24, h=H)
    before = attributes(model)
    report = ff.accelerate(model)
    assert not report.replaced and not report.skipped and "nothing" in str(report)
    assert attributes(model) == before


# -------------------------------------------------------------------------------------- explanation


def test_explain_a_model(backend, device):
    """Per layer, in order, what ran; before and after. An error leaves nothing behind."""
    model = encoder(device, layers=1)
    x = torch.randn(N, S, E, device=device)
    before = ff.explain(model, x)
    assert ("norm", "LayerNorm", "torch", "accelerate(model) has not replaced it") in before.rows
    ff.accelerate(model)
    names = [row[:3] for row in ff.explain(model, x).rows]
    assert names == [
        ("layers.0.self_attn", "scaled_dot_product_attention", backend),
        ("layers.0", "dropout_add_layer_norm", backend),
        ("layers.0", "feed_forward", backend),
        ("layers.0", "dropout_add_layer_norm", backend),
        ("norm", "layer_norm", backend),
    ]
    model.layers[0].self_attn.register_forward_hook(lambda *_: None)
    rows = ff.explain(model, x).rows
    assert rows[0] == ("", "TransformerEncoder", "torch", "layers.0: self_attn has hooks")
    assert ("layers.0.self_attn", "scaled_dot_product_attention", backend) in [r[:3] for r in rows]
    text = str(ff.explain(model, x))
    assert "layers.*.self_attn" in text and "self_attn has hooks" in text
    assert str(ff.explain(nn.Linear(2, 2).to(device), x[..., :2])) == "no layer of a known kind ran"
    with pytest.raises(TypeError):
        ff.explain(nn.Linear(2, 2), None)
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks
    assert explaining.recorder is None and ff.dispatch.backends.state.on_choice is None


def test_explain_beside_other_threads(device):
    """Their modules are not in it; a module that raises and is caught is left."""

    def catches(self, x):
        with contextlib.suppress(RuntimeError, ValueError):
            self.bad(x)
        return ff.layer_norm(self.norm(x), E)

    model, other = own(nn.Module, forward=catches)(), nn.LayerNorm(E).to(device)
    model.norm, model.bad = nn.LayerNorm(E), nn.LayerNorm(3)
    ff.accelerate(model.to(device))
    x = torch.randn(2, E, device=device)

    def thirty_times():
        with use_backend("reference"):
            return [[row[:2] for row in ff.explain(model, x).rows] for _ in range(30)]

    with ThreadPoolExecutor() as pool:
        found = pool.submit(thirty_times)
        while not found.done():
            other(x)
    assert found.result() == [[("norm", "layer_norm"), ("", "layer_norm")]] * 30


class Direct(nn.Module):
    """A model's own code that calls torch's attention."""

    def forward(self, *args, **options):
        return F.scaled_dot_product_attention(*args, **options)


def explained(*args, **options):
    """What a direct call of torch's attention runs on, and why."""
    (row,) = ff.explain(Direct(), *args, **options).rows
    assert row[1] == "scaled_dot_product_attention"
    return row[2:]


def overridden(*args, **options):
    with ff.sdpa_override():
        return F.scaled_dot_product_attention(*args, **options)


def test_causal_masks_are_seen(attention_calls, device):
    """nn.TransformerEncoder and -Decoder find out that a mask is causal; then none is read."""
    model = nn.Transformer(E, H, 1, 1, 24, batch_first=True).to(device)
    ff.accelerate(model)
    x = torch.randn(N, S, E, device=device)
    causal = model.generate_square_subsequent_mask(S, device=device)
    zeros = causal * 0, torch.zeros(S, S, requires_grad=True, device=device)
    for masks, hint in ([causal] * 2, True), ([causal == INF] * 2, True), (zeros, False):
        attention_calls.clear()
        model(x, x, *masks)
        assert [call["is_causal"] for call in attention_calls] == [hint, hint, False]
        read = [not call["attn_mask"] is call["bias"] is None for call in attention_calls]
        assert read == [not hint, not hint, False]


@pytest.mark.parametrize("heads", [(), (N * H,)], ids=["one mask", "a mask of each head"])
def test_two_boolean_masks_are_one(heads, attention_calls, device):
    """Then the kernels need no bias, and skip what either of them hides."""
    module = nn.MultiheadAttention(E, H, batch_first=True).to(device)
    x = torch.randn(N, S, E, device=device)
    hidden = torch.rand(*heads, S, S, device=device) < 0.4
    padding = short_padding(device)
    hidden[..., 0] = False
    masks = dict(attn_mask=hidden, key_padding_mask=padding, need_weights=False)
    want, _ = module(x, x, x, **masks)
    ff.accelerate(module)
    torch.testing.assert_close(module(x, x, x, **masks)[0], want)
    (call,) = attention_calls
    shape = (N, H if heads else 1, S, S)
    both = (hidden.view(N, H, S, S) if heads else hidden) | padding[:, None, None]
    assert call["bias"] is None and torch.equal(call["attn_mask"], ~both.expand(shape))


# ------------------------------------------------------------------------------------ sdpa_override


def test_sdpa_override(backend, device):
    """torch's function gives what ours gives: the same numbers, and our backend."""
    q, k, v = (torch.randn(N, 4, n, d, device=device) for n, d in ((L, 8), (S, 8), (S, 12)))
    mask = torch.rand(N, 1, L, S, device=device) < 0.7
    few = torch.randn(N, 2, S, 8, device=device)
    for args, options in (
        ((q, k, v), {}),
        ((q, k, v, mask), {}),
        ((q, k, v, torch.randn(L, S, device=device)), {"scale": 0.1}),
        ((q, k, v), {"is_causal": True}),
        ((q, few, few), {"enable_gqa": True}),
        ((q[:, 0], k[:, 0], v[:, 0]), {"attn_mask": mask[:, 0]}),
        ((q, k, v), {"dropout_p": 0.5}),
        ((q[None], k[None], v[None]), {"attn_mask": mask}),
        ((q[:, None], few[:, None], few[:, None]), {"enable_gqa": True}),
        ((q[0, 0], k[0, 0], v[0, 0]), {"attn_mask": mask[0, 0]}),
    ):
        ran, why = explained(*args, **options)
        assert ran == "torch" and "sdpa_override" in why
        torch.manual_seed(0)
        want = ff.scaled_dot_product_attention(*args, **options)
        if not options.get("dropout_p"):
            torch.testing.assert_close(F.scaled_dot_product_attention(*args, **options), want)
        torch.manual_seed(0)
        torch.testing.assert_close(overridden(*args, **options), want)
        with ff.sdpa_override():
            assert explained(*args, **options)[0] == backend


def test_sdpa_override_leaves_the_ops_alone(backend, device):
    """The reference calls torch's function itself: that is no second attention."""
    module = nn.MultiheadAttention(E, H, batch_first=True).to(device)
    ff.accelerate(module, need_weights=False)
    x = torch.randn(N, S, E, device=device)
    rows = ff.explain(module, x, x, x).rows
    with ff.sdpa_override():
        assert ff.explain(module, x, x, x).rows == rows
    assert [row[2] for row in rows] == [backend]


@pytest.mark.parametrize("wide", ["bias", "query and key", "value", "all"])
def test_sdpa_override_under_autocast(backend, device, wide):
    """torch.autocast makes all dtypes one; the gradients have those of the leaves."""
    low, leaves = torch.bfloat16, {}
    for name, shape in dict(query=(L, 8), key=(S, 8), value=(S, 12), bias=(L, S)).items():
        x = torch.randn(N, 4, *shape, device=device)
        leaves[name] = x.to(torch.float32 if wide == "all" or name in wide else low)
        leaves[name].requires_grad_()
    q, k, v, bias = leaves.values()
    found = []
    for attend in (F.scaled_dot_product_attention, ff.scaled_dot_product_attention, overridden):
        with torch.autocast(device.type, low):
            out = attend(q, k, v, bias)
        grads = torch.autograd.grad(out.float().square().sum(), list(leaves.values()))
        found.append([out, *grads])
    for want, *others in zip(*found):
        for have in others:
            assert have.dtype is want.dtype
            assert (have - want).norm() <= 0.03 * want.norm()
    with torch.autocast(device.type, low), ff.sdpa_override():
        assert explained(q, k, v, bias)[0] == backend


def test_sdpa_override_nests_and_ends(device):
    q = torch.randn(N, H, L, 8, device=device)

    def ours():
        return ff.explain(Direct(), q, q, q).rows[0][2] != "torch"

    with use_backend("reference"):
        with ff.sdpa_override():
            with ff.sdpa_override():
                assert ours()
            assert ours()
            with ThreadPoolExecutor() as pool:
                assert not pool.submit(ours).result()
        assert not ours()
        with pytest.raises(KeyError), ff.sdpa_override():
            raise KeyError
        assert not ours()


def test_sdpa_override_leaves_to_torch(backend, device):
    """What the op does not take, with torch's own result or error."""
    q = torch.randn(N, 4, L, 8, device=device)
    wide, mask = torch.randn(N, 4, L, 300, device=device), torch.rand(L, L, device=device) < 0.7
    taken = {
        "wide": ((wide, wide, wide), {}),
        "batches broadcast": ((q, q[:1], q[:1]), {}),
        "three and four dimensions": ((q[0], q, q), {}),
        "no width": ((q[..., :0], q[..., :0], q), {}),
        "no value": ((q, q, q[..., :0]), {}),
        "a tensor as scale": ((q, q, q), {"scale": torch.tensor(0.5)}),
        "a tensor as probability": ((q, q, q), {"dropout_p": torch.tensor(0.0)}),
        "other heads of value": ((q, q[:, :2], q), {"enable_gqa": True}),
    }
    refused = {
        "dtype": ((q, q.double(), q), {}),
        "": ((q[0, 0], q[0, 0], q[0, 0]), {"enable_gqa": True}),
        "None": ((q, None, q), {}),
        "must be bool": ((q, q, q), {"is_causal": 1}),
        "probability": ((q, q, q), {"dropout_p": 1.5}),
        "must divide": ((q, q[:, :3], q[:, :3]), {"enable_gqa": True}),
        "size": ((q, q[..., :4], q), {}),
        "must match": ((q, q, q, mask[:3]), {}),
        "broadcast shape": ((q, q, q, mask.expand(1, N, 4, L, L)), {}),
        "range": ((q, q, q, mask[0]), {}),
        "attn_mask dtype": ((q, q, q, mask.int()), {}),
    }
    both = refused if torch.__version__ >= "2.14" else taken
    both["attn_mask"] = (q, q, q, mask, 0.0, True), {}
    for name, (args, options) in taken.items():
        want = F.scaled_dot_product_attention(*args, **options)
        torch.testing.assert_close(overridden(*args, **options), want, msg=name)
        with ff.sdpa_override():
            assert explained(*args, **options)[0] == "torch", name
    for message, (args, options) in refused.items():
        with pytest.raises((RuntimeError, TypeError, IndexError)) as torchs:
            F.scaled_dot_product_attention(*args, **options)
        with pytest.raises(torchs.type, match=message) as ours:
            overridden(*args, **options)
        assert str(ours.value) == str(torchs.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sdpa_override_without_heads(dtype, backend, device):
    """In half precision on a CPU the gradients are torch's of three dimensions: its op of four,
    which the reference calls, loses digits where the softmax is steep.
    """
    q, k, v = ((torch.randn(4, n, 8, device=device) * 5).to(dtype) for n in (L, S, S))

    def grads(attend, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(attend(*leaves).sum(), leaves)

    torchs = F.scaled_dot_product_attention
    found = grads(overridden, dtype), grads(torchs, dtype), grads(torchs, torch.float64)
    for have, theirs, want in zip(*found):
        error, peer = ((x.double() - want).abs().max() for x in (have, theirs))
        assert error <= 3 * peer + torch.finfo(dtype).eps * want.abs().max()
    on_cpu = backend == "reference" and device.type == "cpu"
    with ff.sdpa_override():
        assert explained(q, k, v)[0] == ("torch" if on_cpu else backend)


@pytest.mark.with_all
def test_sdpa_override_compiled(backend, device):
    q = torch.randn(N, H, L, 8, device=device, requires_grad=True)
    mask = torch.rand(L, L, device=device) < 0.7
    want = ff.scaled_dot_product_attention(q, q, q, mask)
    inside = torch.compile(overridden, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(inside(q, q, q, mask), want)
    around = torch.compile(Direct(), fullgraph=True, backend="aot_eager")
    with ff.sdpa_override():
        have = around(q, q, q, attn_mask=mask)
    torch.testing.assert_close(have, want)
    (a,), (b,) = (torch.autograd.grad(y.sum(), q) for y in (have, want))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_sdpa_override_and_checkpoint(use_reentrant, backend, device):
    """Inside of what is checkpointed: the second forward is ours again, with the same dropout."""
    q = torch.randn(N, H, L, 8, device=device, requires_grad=True)

    def step(run):
        torch.manual_seed(0)
        run().square().sum().backward()
        grad, q.grad = q.grad, None
        return grad

    def attend(q):
        return overridden(q, q, q, dropout_p=0.5)

    want = step(lambda: attend(q))
    have = step(lambda: checkpoint(attend, q, use_reentrant=use_reentrant))
    torch.testing.assert_close(have, want)


def test_a_traced_fallback_is_not_counted():
    attention = nn.MultiheadAttention(E, H, 0.0, batch_first=True)
    ff.accelerate(attention)
    x = torch.randn(N, L, E)
    torch.compile(lambda: attention(x, x, x), backend="eager", fullgraph=True)()
    assert not hasattr(attention, "_fallbacks")
    attention(x, x, x)
    assert sum(attention._fallbacks.values()) == 1


def test_layers_refuse_a_hint_of_none(backend):
    """As torch does: only a stack finds out whether its mask is causal."""
    x, layer = torch.randn(2, 5, 16), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    for module in (layer, attention):
        ff.accelerate(module)
    for call in (lambda: layer(x, is_causal=None), lambda: attention(x, x, x, is_causal=None)):
        with pytest.raises(TypeError, match="is_causal"):
            call()
