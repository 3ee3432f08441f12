"""embed on both backends, against the formula in float64, and the model that runs on it."""

import functools

import pytest
import torch
import torch.nn.functional as F

import fastformer as ff
from fastformer import use_backend
from fastformer.ops import dropout, functional

V, N = 23, 40


def inputs(dtype=torch.float32, device="cpu", positions=9, n=N, v=V):
    return {
        "weight": torch.randn(v, n, device=device).to(dtype),
        "positional": torch.randn(positions, n, device=device).to(dtype),
    }


def ids(*shape, device="cpu", v=V):
    return torch.randint(0, v, shape, device=device)


@pytest.mark.sample
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape, n", [((1, 1), 5), ((3, 7), 63), ((2, 9), 512), ((2, 3, 9), 40)])
def test_shapes(backend, device, against_oracle, shape, n, dtype, dropout_p):
    x = inputs(dtype, device, n=n)
    options = {"tokens": ids(*shape, device=device), "dropout_p": dropout_p, "dropout_seed": 3}
    against_oracle(functional.embed, x, **options)


@pytest.mark.parametrize("scale", [None, 0.5, 1.0])
def test_by_its_parts(backend, device, scale):
    x, tokens = inputs(device=device), ids(2, 7, device=device)
    out = ff.embed(tokens, **x, dropout_p=0.25, scale=scale, dropout_seed=5)
    drop = dropout.dropped_rows(torch.tensor([5], device=device), 14, N, 0.25).view(2, 7, N)
    want = F.embedding(tokens, x["weight"]) * (N**0.5 if scale is None else scale)
    want = torch.where(drop, 0.0, want + x["positional"][:7]) / 0.75
    torch.testing.assert_close(out, want)
    x["weight"] = x["weight"].bfloat16()
    assert ff.embed(tokens, **x).dtype == torch.bfloat16


def test_without_positions_and_in_views(backend, device, against_oracle):
    """Views of the tables, and of the tokens: transposed, of one token, and with steps."""
    pairs, weight = ids(7, 4, 2, device=device), torch.randn(N, V, device=device).t()
    tokens = pairs[:, :, 0].t()
    against_oracle(functional.embed, {"weight": weight}, tokens=tokens, positional=None)
    wide = torch.randn(9, 2 * N, device=device)
    for positional, tokens in (
        (wide[:, ::2], pairs.int()[:, 0, 1]),
        (wide[:, :N], pairs[:1, :1, 0].expand(4, 7)),
    ):
        x = {"weight": weight, "positional": positional}
        against_oracle(functional.embed, x, tokens=tokens, scale=1.0)


@pytest.mark.parametrize("far", ["weight", "positional", "gradient"])
def test_offsets_past_int32(backend, device, same_when_far, far):
    """Rows so far apart that the last one stands past 2^31 elements."""
    x, tokens = inputs(torch.bfloat16, device), torch.arange(V, device=device)[-9:].int()
    x["gradient"] = torch.randn(9, N, device=device).bfloat16()
    embed = functools.partial(functional.embed, tokens)
    fixed = ("weight", "positional") if far == "positional" else ("weight",)
    same_when_far(embed, x, far, fixed=fixed)  # a table's own gradient would fill what lies between


def test_a_token_past_the_table(device):
    """It is not checked on a GPU: clamped, it never reads out of bounds."""
    kernels = pytest.importorskip("fastformer.kernels.embedding")
    weight = torch.full((V + 2, N), float("nan"), device=device)[1:-1].normal_()
    tokens = torch.tensor([[-1, V]], device=device)
    out = kernels.forward(tokens, weight, None, 0.0, 1.0, None, None)
    assert torch.equal(out[0], weight[[0, -1]])


def test_the_padding_token_gets_no_gradient(backend, device):
    x = {n: t.requires_grad_() for n, t in inputs(device=device).items()}
    tokens = torch.tensor([[3, 4, 3], [4, 3, 5]], device=device)
    for padding_idx in (3, 3 - V):
        out = ff.embed(tokens, **x, padding_idx=padding_idx)
        grad, positions = torch.autograd.grad(out.sum(), list(x.values()))
        assert (grad[3] == 0).all()
        assert torch.allclose(grad[4], torch.full_like(grad[4], 2 * N**0.5))
        assert (positions[:3] == 2).all() and (positions[3:] == 0).all()


@pytest.mark.parametrize("needed", ["weight", "positional"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounded_once(device, rounded_once, dtype, needed):
    """One gradient: where both are wanted, they share what is rounded first."""
    x, tokens = inputs(dtype, device, positions=50, v=50), torch.randperm(50, device=device)
    options = {"dropout_p": 0.3, "dropout_seed": 5, "scale": 1.7}
    embed = functools.partial(functional.embed, tokens, **options)
    rounded_once(embed, x, fixed=x.keys() - {needed})


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_empty(backend, device, shape):
    x = {n: t.requires_grad_() for n, t in inputs(device=device).items()}
    out = ff.embed(ids(*shape, device=device), **x, dropout_p=0.1)
    assert out.shape == (*shape, N)
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), list(x.values())))


@pytest.mark.parametrize("learned", [False, True])
def test_the_model_embeds_in_one_op(device, monkeypatch, learned):
    """The Sequential alone and the model give the same, and the model does not call its parts."""
    model = ff.make_model(V, V, N=1, d_model=16, d_ff=16, h=2, dropout=0.0).to(device)
    if learned:
        model.src_embed[1] = ff.PositionalEncoding(16, 0.0, learned=True).to(device)
    tokens, calls = ids(2, 7, device=device), []
    original = functional.embed
    monkeypatch.setattr(functional, "embed", lambda *a, **k: calls.append(1) or original(*a, **k))
    memory = model.encode(tokens, None)
    torch.testing.assert_close(memory, model.encoder(model.src_embed(tokens), None))
    assert calls == [1]
    hooked = []
    model.src_embed[0].register_forward_hook(lambda *_: hooked.append(1))
    torch.testing.assert_close(model.encode(tokens, None), memory)
    assert calls == [1] and hooked == [1]


@pytest.mark.parametrize("n", [1, 17, 512, 50000])
def test_a_measurement_has_a_choice(n):
    kernels = pytest.importorskip("fastformer.kernels.embedding")
    found = kernels.others(n)
    assert len(set(found)) == len(found) >= 3
    assert all(1024 <= x.rows * x.columns <= 8192 and x.columns >= 16 for x in found)
    assert all(x.warps in (1, 2, 4, 8) for x in (*found, kernels.configuration(n, "sm_90")))


def test_dropout_in_several_tiles(device, against_oracle, monkeypatch):
    from fastformer.kernels import embedding

    monkeypatch.setattr(embedding, "configuration", lambda *_: embedding.EmbeddingTiles(4, 16))
    options = {"tokens": ids(3, 7, device=device), "dropout_p": 0.3, "dropout_seed": 3}
    x = inputs(device=device)
    with use_backend("triton"):
        against_oracle(functional.embed, x, **options)
        options["positional"] = x.pop("positional")
        against_oracle(functional.embed, x, **options)
