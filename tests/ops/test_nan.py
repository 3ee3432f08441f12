"""NaN in an input reaches what it reaches in PyTorch, on both backends (docs/numerics.md). That of
attention stands in test_attention.py.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import fastformer as ff
from fastformer.ops.feed_forward import reference

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROWS, WIDTH, CLASSES = 5, 24, 11
TOKENS = [[1, 3, 0], [3, 2, 5]]
TARGET = [1, -100, 0, 10, 4]  # the second row is ignored


def feed_forward(activation):
    function = reference.ACTIVATIONS[activation]

    def theirs(x, w, b, w_2, b_2):
        return F.linear(function(F.linear(x, w, b)), w_2, b_2)

    return lambda *t: ff.feed_forward(*t, activation), theirs


def gated(op, function):
    def theirs(x, w, b, w_2, b_2):
        z, v = F.linear(x, w, b).chunk(2, -1)
        return F.linear(function(z) * v, w_2, b_2)

    return op, theirs


def add_rms_norm(x, residual, w):
    total = x + residual
    return torch.stack([F.rms_norm(total, (WIDTH,), w), total])


def add_norm(x, residual, w, b):
    total = x + residual
    return torch.stack([F.layer_norm(total, (WIDTH,), w, b), total])


def unbiased(x, w, b):
    return w * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5) + b


def embedded(weight, positional):
    tokens = torch.tensor(TOKENS, device=weight.device)
    return F.embedding(tokens, weight) * WIDTH**0.5 + positional[:3]


def loss(**options):
    def theirs(x, *w):
        x = F.linear(x, *w) if w else x
        return F.cross_entropy(x, torch.tensor(TARGET, device=x.device), **options)

    def ours(x, *w):
        target = torch.tensor(TARGET, device=x.device)
        if not w:
            return ff.cross_entropy(x, target, **options)
        return ff.linear_cross_entropy(x, w[0], target, linear_bias=w[1], **options)

    return ours, theirs


X, W = (ROWS, WIDTH), (WIDTH,)
LAYERS = [X, (30, WIDTH), (30,), (WIDTH, 30), W]
GATED = [X, (60, WIDTH), (60,), (WIDTH, 30), W]
SMOOTHED = {"reduction": "none", "label_smoothing": 0.1}
# By name: our op, torch's, the shapes of what they take.
OPS = {
    "layer_norm": (
        lambda x, w, b: ff.layer_norm(x, WIDTH, w, b),
        lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b),
        [X, W, W],
    ),
    "unbiased": (
        lambda x, w, b: ff.layer_norm(x, WIDTH, w, b, unbiased=True), unbiased, [X, W, W],
    ),
    "rms_norm": (
        lambda x, w: ff.rms_norm(x, WIDTH, w), lambda x, w: F.rms_norm(x, (WIDTH,), w), [X, W],
    ),
    "dropout_add_layer_norm": (
        lambda *t: torch.stack(ff.dropout_add_layer_norm(*t)), add_norm, [X, X, W, W],
    ),
    "dropout_add_rms_norm": (
        lambda *t: torch.stack(ff.dropout_add_rms_norm(*t)), add_rms_norm, [X, X, W],
    ),
    "embed": (
        lambda w, p: ff.embed(torch.tensor(TOKENS, device=w.device), w, p),
        embedded, [(CLASSES, WIDTH), (4, WIDTH)],
    ),
    "cross_entropy": (*loss(), [(ROWS, CLASSES)]),
    "cross_entropy smoothed": (*loss(**SMOOTHED), [(ROWS, CLASSES)]),
    "linear_cross_entropy": (*loss(), [X, (CLASSES, WIDTH), (CLASSES,)]),
    "linear_cross_entropy smoothed": (*loss(**SMOOTHED), [X, (CLASSES, WIDTH), (CLASSES,)]),
    "gated_activation": (ff.gated_activation, lambda z, v: F.silu(z) * v, [X, X]),
    "geglu": (*gated(ff.geglu, F.gelu), GATED),
    "swiglu": (*gated(ff.swiglu, F.silu), GATED),
    **{name: (*feed_forward(name), LAYERS) for name in reference.ACTIVATIONS},
}  # fmt: skip


def results(function, leaves):
    """The output and the gradients."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = function(*leaves)
    weight = torch.linspace(1, 2, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


@pytest.mark.sample
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_nan_goes_where_it_goes_in_torch(backend, device, op, dtype):
    """Through each input in turn: to the same elements of the output and of every gradient."""
    ours, theirs, shapes = OPS[op]
    for i in range(len(shapes)):
        leaves = [(torch.randn(s, device=device) * s[-1] ** -0.5).to(dtype) for s in shapes]
        leaves[i].view(-1)[2:13:10] = NAN  # of logits: in a row that counts, in one that is ignored
        want, have = results(theirs, leaves), results(ours, leaves)
        assert want[0].isnan().any()
        for k, (a, b) in enumerate(zip(have, want, strict=True)):
            assert torch.equal(a.isnan(), b.isnan()), (i, k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relu_of_what_is_no_number(backend, device, dtype):
    """As torch's, forward and backward: NaN stays NaN, and its gradient is the one that came."""
    x = torch.tensor([[NAN], [INF], [-INF], [-0.0], [-1.0], [2.0]], dtype=dtype, device=device)
    one = torch.ones(1, 1, dtype=dtype, device=device)
    have = results(lambda x: ff.feed_forward(x, one, None, one, None), [x])
    for a, b in zip(have, results(torch.relu, [x]), strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_norms_of_what_overflows(backend, device, monkeypatch, op, dtype, blocks):
    """Rows with an infinity, and whose sum of squares is one, as eager torch has them. (Of the
    latter torch's own layer_norm is 0 or NaN, by the order in which it sums.)
    """
    kernels = pytest.importorskip("fastformer.kernels.layer_norm.launchers")
    if blocks > 1:
        monkeypatch.setattr(kernels, "configuration", lambda *_: kernels.NormTiles(2, 16, 4))
    large = 6e4 if dtype == torch.float16 else 1e30
    x = torch.randn(6, 40, device=device).to(dtype)
    x[0, 3], x[1, 5], x[2, 7] = INF, -INF, NAN
    rows = 3
    if op == "rms_norm":
        x[3], x[4, ::2], rows = large, -large, 5
    eps = torch.finfo(torch.float32).eps
    ours, theirs = {
        "rms_norm": (
            lambda x: ff.rms_norm(x, 40, None, eps),
            lambda x: F.rms_norm(x, (40,), None, eps),
        ),
        "layer_norm": (lambda x: ff.layer_norm(x, 40), lambda x: F.layer_norm(x, (40,))),
    }[op]
    for a, b in zip(results(ours, [x]), results(theirs, [x]), strict=True):
        torch.testing.assert_close(a[:rows], b[:rows], equal_nan=True)
        assert torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("linear", [False, True])
def test_infinite_logits(backend, device, linear, reduction, smoothing):
    """One, all but one, all of a row; of the target, of another, of a row that is ignored."""
    rows = [[INF, 1, 2], [-INF, 1, 2], [-INF, 1, 2], [1, -INF, -INF], [-INF] * 3, [INF, 1, 2]]
    x, target = torch.tensor(rows, device=device), torch.tensor([1, 0, 1, 0, 0, -100])
    options = {"reduction": reduction, "label_smoothing": smoothing}

    def ours(x, t):
        if not linear:
            return ff.cross_entropy(x, t, **options)
        one, weight = torch.zeros(1, 1, device=x.device), torch.zeros(3, 1, device=x.device)
        return ff.linear_cross_entropy(one, weight, t, linear_bias=x[0], **options)

    for at, t in zip(x.split(1), target.to(device).split(1)):
        have = results(partial(ours, t=t), [at])
        want = results(partial(F.cross_entropy, target=t, **options), [at])
        for a, b in zip(have, want, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)
