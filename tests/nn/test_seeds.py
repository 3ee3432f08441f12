"""The dropout seeds of a forward are one draw, and each site has its own, at a fixed place."""

import functools

import pytest
import torch
from test_whole_model import Ops
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastformer as ff
from fastformer import checks, use_backend
from fastformer.ops import dropout

P = 0.3
SIZES = dict(N=2, d_model=16, d_ff=32, h=2)
IDS = torch.arange(1, 11).view(2, 5)


def translation(p=P):
    model = ff.make_model(11, 11, dropout=p, **SIZES)
    return model, (IDS, IDS, torch.ones(2, 1, 5, dtype=torch.bool), ff.subsequent_mask(5))


def packed(p=P):
    model, _ = translation(p)
    batch = ff.Batch(src=IDS, tgt=torch.cat([IDS, IDS[:, :1]], 1), packed=True)
    return model, (batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)


def rotary(p=P):
    return ff.make_decoder(11, dropout=p, positions="rotary", norm="rms", **SIZES), (IDS,)


def stack(p=P):
    return translation(p)[0].encoder, (torch.randn(2, 5, 16), None)


def layer(p=P):
    x = torch.randn(2, 5, 16)
    return translation(p)[0].decoder.layers[0], (x, x, None, None)


def accelerated(p=P):
    model = nn.Transformer(16, 2, 2, 2, 32, p, batch_first=True)
    x = torch.randn(2, 5, 16)
    ff.accelerate(model, drop_padding=True)
    return model, (x, x)


def accelerated_with_padding(p=P):
    model, given = accelerated(p)
    hidden = torch.arange(20).expand(2, 20) > 6
    x = torch.randn(2, 20, 16)
    return model, (x, given[1], None, None, None, hidden, None, hidden)


def accelerated_layer(p=P):
    model = nn.TransformerEncoderLayer(16, 2, 32, p, batch_first=True)
    ff.accelerate(model)
    return model, (torch.randn(2, 5, 16),)


MODELS = [
    translation, packed, rotary, stack, layer, accelerated, accelerated_with_padding,
    accelerated_layer,
]  # fmt: skip
models = pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)


@models
def test_a_forward_draws_once(make, backend):
    for p, training, count in ((P, True, 1), (P, False, 0), (0.0, True, 0)):
        model, given = make(p)
        with Ops() as ops:
            model.train(training)(*given)
        stacks = 2 if isinstance(model, nn.Transformer) else 1
        assert ops.forwards("randint") == count * stacks, (p, training)


@models
def test_backends_draw_the_same_masks(make):
    """So that outputs and gradients are the same."""
    model, given = make()
    outputs, gradients = [], []
    for backend in ("reference", "triton"):
        torch.manual_seed(1)
        with use_backend(backend):
            outputs.append(model(*given))
            model.zero_grad()
            outputs[-1].sin().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
    with use_backend("reference"):
        assert not torch.allclose(outputs[0], model.eval()(*given), atol=0.1)


def seeds_of(monkeypatch, model, given):
    """The seeds of a forward, one for each mask."""
    seeds = []
    with monkeypatch.context() as patch:
        for name in ("_dropped", "_dropped_rows"):
            draw = getattr(dropout, name)
            noted = lambda seed, *x, draw=draw: seeds.append(int(seed)) or draw(seed, *x)  # noqa: E731
            patch.setattr(dropout, name, noted)
        with use_backend("reference"):
            model(*given)
    return seeds


def test_each_site_has_its_own_seed(monkeypatch):
    """22 sites of a model with two layers on each side, and others in the next forward."""
    model, given = translation()
    torch.manual_seed(2)
    first, second = (seeds_of(monkeypatch, model, given) for _ in range(2))
    assert len({*first, *second}) == 44
    torch.manual_seed(2)
    assert first == checks.draw_seeds(22).tolist()


def test_a_site_does_not_depend_on_the_others(monkeypatch):
    model, given = translation()
    torch.manual_seed(3)
    want = seeds_of(monkeypatch, model, given)
    model.encoder.layers[0].self_attn.dropout.p = 0.0  # site 1, after the embedding's
    model.decoder.layers[1].feed_forward.dropout = nn.Dropout(0.0)
    torch.manual_seed(3)
    assert seeds_of(monkeypatch, model, given) == want[:1] + want[2:20] + want[21:]


class Generator:
    """The state that torch_remat leaves to its users."""

    snapshot, restore = staticmethod(torch.get_rng_state), staticmethod(torch.set_rng_state)


def remat(call, *given):
    torch_remat = pytest.importorskip("torch_remat")
    return torch_remat.checkpoint(recompute_state_hooks=(Generator(),))(call)(*given)


def decorated(call, *given):
    if torch.__version__ < "2.14":
        pytest.skip("checkpoint is a decorator from torch 2.14 on")
    return checkpoint(use_reentrant=False)(call)(*given)


@pytest.mark.parametrize(
    "checkpointed",
    [
        pytest.param(functools.partial(checkpoint, use_reentrant=False), id="saved tensors"),
        pytest.param(functools.partial(checkpoint, use_reentrant=True), id="reentrant"),
        remat,
        pytest.param(decorated, marks=pytest.mark.with_all),
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        stack,
        layer,
        *(pytest.param(f, marks=pytest.mark.with_all) for f in (translation, accelerated)),
    ],
    ids=lambda f: f.__name__,
)
def test_under_checkpointing(make, checkpointed, backend):
    """The recomputed forward draws the dropout masks of the first one."""
    model, given = make()
    given = [x.requires_grad_() if x is not None and x.is_floating_point() else x for x in given]
    anchor = torch.zeros((), requires_grad=True)  # without it the reentrant form has no gradient

    def again():
        call = lambda _, *x: model(*x)  # noqa: E731
        return checkpointed(call, anchor, *given)

    gradients = []
    for run in (lambda: model(*given), again):
        model.zero_grad()
        torch.manual_seed(4)
        run().square().sum().backward()
        gradients.append([x.grad for x in model.parameters()])
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.with_all
@pytest.mark.parametrize("make", [accelerated_layer, translation, rotary], ids=lambda f: f.__name__)
def test_under_compile(make, backend):
    """The compiled model draws what the eager one draws, and new masks in each call."""
    model, given = make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = []
    for run in (model, compiled, compiled):
        torch.manual_seed(5)
        results.append(run(*given))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[2], results[1], rtol=0, atol=0)
    assert not torch.equal(compiled(*given), results[2])


def test_an_explicit_seed_stays():
    x = torch.randn(2, 5, 16)
    attention = ff.MultiHeadedAttention(2, 16, P)
    feed_forward = ff.PositionwiseFeedForward(16, 32, P)
    for run in (lambda s: attention(x, x, x, dropout_seed=s), lambda s: feed_forward(x, s)):
        with Ops() as ops:
            same = run(torch.tensor([7])), run(torch.tensor([7])), run(torch.tensor([8]))
        assert ops.forwards("randint") == 0
        assert torch.equal(same[0], same[1]) and not torch.equal(same[0], same[2])


def test_on_a_gpu_each_seed_has_the_alignment_of_the_first():
    """A kernel is compiled for an alignment: with another one it would be compiled again."""
    seeds = checks.draw_seeds(5, torch.device("meta"))
    assert [x.storage_offset() * 8 % 16 for x in seeds.split(1)] == [0] * 5
