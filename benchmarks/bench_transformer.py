"""Training steps of the base Transformer. (bench_accelerate.py has those of its encoder.)

`torch` is the same model with the same weights, whose attention, feed-forward and LayerNorm are
plain torch modules: nn.Linear, F.scaled_dot_product_attention with the mask and dropout,
nn.Dropout, nn.LayerNorm. Before the timing both are compared in evaluation. `tutorial` has the
Annotated Transformer's attention and LayerNorm, which has another formula (std + eps). On a GPU
`compile` is torch.compile of `torch`.

An epoch is `run_epoch` with Adam, also with `cuda_graph=True`, beside nn.Transformer, which on a
GPU is also compiled with mode="reduce-overhead": its forward and backward are CUDA graphs, too. The
weights of its layers are its own, so that its outputs are not compared. All have the same loss.

`packed` trains on `Batch(..., packed=True)`, the same losses without computing the padding, beside
the padded batch on the same model (`auto`). Its time includes the packing.

The goal on a CPU: `auto` is at most 5% slower than `torch`, and 1.3 times as fast as `tutorial`.

FLOPs: forward 2 for each weight and token, backward twice that; attention as in bench_attention.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastformer as ff
from benchmarks.cpu import TorchTransformer, half_padding, loss_of
from benchmarks.peers import (
    BACKENDS,
    GPU,
    available,
    backend_of,
    backend_taken,
    check_agreement,
    tutorial_attention,
    tutorial_norm,
)
from fastformer.training.copy_task import PAD, Settings
from fastformer.training.training import LabelSmoothing, SimpleLossCompute

D_MODEL, D_FF, HEADS, P = 512, 2048, 8, 0.1


class PlainAttention(nn.Module):
    attend = staticmethod(F.scaled_dot_product_attention)

    def __init__(self, like: ff.MultiHeadedAttention) -> None:
        super().__init__()
        self.h, self.p = like.h, like.dropout.p
        self.linears = like.linears

    def forward(self, query, key, value, mask, is_causal=False):
        if is_causal:
            mask = mask & ff.subsequent_mask(mask.shape[-1]).to(mask.device)
        q, k, v = (
            linear(x).unflatten(2, (self.h, -1)).transpose(1, 2)
            for linear, x in zip(self.linears, (query, key, value))
        )
        x = self.attend(q, k, v, mask.unsqueeze(1), self.p if self.training else 0.0)
        return self.linears[3](x.transpose(1, 2).flatten(2))


def _plain_feed_forward(like: ff.PositionwiseFeedForward) -> nn.Module:
    return nn.Sequential(like.w_1, nn.ReLU(), nn.Dropout(like.dropout.p), like.w_2)


def _plain_norm(like: ff.LayerNorm) -> nn.Module:
    norm = nn.LayerNorm(like.weight.shape[0], like.eps).to(like.weight)
    norm.load_state_dict(like.state_dict())
    return norm


PLAIN = {
    ff.MultiHeadedAttention: PlainAttention,
    ff.PositionwiseFeedForward: _plain_feed_forward,
    ff.LayerNorm: _plain_norm,
}


class TutorialAttention(PlainAttention):
    attend = staticmethod(tutorial_attention)


class TutorialNorm(nn.Module):
    def __init__(self, like: ff.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = like.weight, like.bias, like.eps

    def forward(self, x):
        return tutorial_norm(x, self.weight, self.bias, self.eps)


TUTORIAL = {**PLAIN, ff.MultiHeadedAttention: TutorialAttention, ff.LayerNorm: TutorialNorm}


def plain(model: nn.Module, parts: dict = PLAIN) -> nn.Module:
    """Return a copy of the model with plain torch modules in place of fastformer's."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) in parts:
                setattr(parent, name, parts[type(child)](child))
    return model


def rivals(ours: nn.Module) -> dict[str, nn.Module]:
    """Return the models to compare, by provider."""
    torchs = plain(ours)
    return {
        "torch": torchs,
        "tutorial": plain(ours, TUTORIAL),
        **({"compile": torch.compile(torchs)} if "compile" in PEERS else {}),
        **dict.fromkeys(BACKENDS, ours),
    }


PEERS = available("torch", "tutorial", "compile")


@pytest.fixture
def measure_step(measure, provider, device):
    """measure_step(models, step, inputs, ...): check that the provider's model agrees with the
    plain one, and measure step(model).
    """

    def run(models, step, inputs, agree=True, **figures):
        with torch.no_grad(), backend_of(provider):
            expected, actual = (models[name].eval()(*inputs) for name in ("torch", provider))
        if agree:
            check_agreement(provider, actual, expected, 0.1 if provider == "tutorial" else None)
        for model in models.values():
            model.train()

        def call():
            with backend_of(provider):
                step(models[provider])

        backend = backend_taken(provider, device)
        measure(call, backend=backend, dtype=expected.dtype, dropout_p=P, **figures)

    return run


SIZES = dict(d_model=D_MODEL, d_ff=D_FF, heads=HEADS)


def _batch(batch, length, vocab, device):
    """Return sentences whose lengths in the source spread evenly from half of the length to all."""
    src, tgt = (torch.randint(1, vocab, (batch, n), device=device) for n in (length, length + 1))
    lengths = torch.linspace(length / 2, length, batch, device=device).int()
    src[torch.arange(length, device=device) >= lengths[:, None]] = PAD
    return ff.Batch(src, tgt)


@pytest.mark.parametrize("provider", [*PEERS, *BACKENDS])
@pytest.mark.parametrize("length", [128, 256, 512, 1024, 2048, 4096] if GPU else [64])
def test_transformer_step(measure_step, device, dtype, batch, length):
    """The base model, forward and backward of the loss, without the optimizer."""
    N, vocab, batch = (6, 37000, batch) if GPU else (1, 2000, 4)
    ours = ff.make_model(vocab, vocab, N, D_MODEL, D_FF, HEADS, P).to(device, dtype)
    models = rivals(ours)
    data = _batch(batch, length, vocab, device)
    inputs = (data.src, data.tgt, data.src_mask, data.tgt_mask)
    criterion = LabelSmoothing(vocab, PAD, 0.1)

    def step(model):
        model.zero_grad()
        out = model(*inputs)
        SimpleLossCompute(model.generator, criterion)(out, data.tgt_y, data.ntokens).backward()

    attention, feed_forward = 4 * D_MODEL**2, 2 * D_MODEL * D_FF
    weights = N * (3 * attention + 2 * feed_forward) + D_MODEL * vocab
    flops = 3 * 2 * weights * batch * length + 3 * 3.5 * 4 * N * batch * length**2 * D_MODEL
    sizes = dict(batch=batch, vocab=vocab, layers=N, **SIZES)
    group = f"Transformer N={N} S={length}, forward and backward"
    measure_step(models, step, inputs, group=group, flops=flops, **sizes)


EPOCH = ["torch", "nn.Transformer", "auto", *(["compile", "cuda_graph"] if GPU else [])]


@pytest.mark.parametrize("provider", EPOCH)
@pytest.mark.parametrize("length", [128, 256, 512] if GPU else [64])
def test_epoch(measure_step, device, dtype, batch, length, provider):
    """Ten updates of the base model: forward, backward, Adam, and the loss read at the end."""
    N, vocab, batch, updates = (6, 37000, batch, 10) if GPU else (1, 2000, 4, 2)
    ours = ff.make_model(vocab, vocab, N, D_MODEL, D_FF, HEADS, P).to(device, dtype)
    sizes = dict(vocab=vocab, N=N, d_model=D_MODEL, d_ff=D_FF, h=HEADS, dropout=P)
    torchs = TorchTransformer(copy.deepcopy(ours), Settings(steps=1, **sizes)).to(device, dtype)
    torchs.generator = copy.deepcopy(ours.generator)
    models = {"torch": plain(ours), **dict.fromkeys(("auto", "cuda_graph"), ours)}
    models |= dict.fromkeys(("nn.Transformer", "compile"), torchs)
    if provider == "compile":
        models["compile"] = torch.compile(torchs, mode="reduce-overhead")
    data = _batch(batch, length, vocab, device)
    inputs = (data.src, data.tgt, data.src_mask, data.tgt_mask)
    optimizer = torch.optim.Adam(models[provider].parameters(), 1e-4, capturable=GPU)
    criterion = LabelSmoothing(vocab, PAD, 0.1)

    def step(model):
        ff.run_epoch(
            [data] * updates, model, SimpleLossCompute(model.generator, criterion), optimizer,
            progress=False, cuda_graph=provider == "cuda_graph",
        )  # fmt: skip

    group = f"Transformer N={N} S={length}, {updates} updates"
    agree = models[provider] is not models["compile"]
    sizes = dict(batch=batch, vocab=vocab, layers=N)
    own = "it has CUDA graphs of its own" if provider in ("compile", "cuda_graph") else None
    measure_step(models, step, inputs, agree, group=group, uncaptured=own, **sizes)


PACKED = ["torch", "auto", "packed"]


@pytest.mark.parametrize("provider", PACKED)
@pytest.mark.parametrize("length", [512, 2048] if GPU else [64])
@pytest.mark.parametrize("model", ["translation", "language model"])
def test_without_padding(measure, request, device, dtype, batch, length, model, provider):
    """Forward and backward of the loss. The lengths spread evenly between 1 and S: half of the
    tokens are padding.
    """
    if not (GPU or request.config.getoption("slow")):
        pytest.skip("takes a minute on a CPU: --slow")
    N, vocab, batch = (6, 37000, batch) if GPU else (1, 2000, 8)
    make = ff.make_model if model == "translation" else ff.make_decoder
    vocabularies = (vocab,) * (2 if model == "translation" else 1)
    ours = make(*vocabularies, N, D_MODEL, D_FF, HEADS, P).to(device, dtype)
    models = {"torch": plain(ours), "auto": ours, "packed": ours}
    src, tgt, tokens = half_padding(model == "translation", batch, length, vocab, device)

    def loss(provider):
        return loss_of(models[provider], src, tgt, vocab, packed=provider == "packed")

    def step():
        models[provider].zero_grad()
        loss(provider).backward()

    for module in models.values():
        module.eval()
    with torch.no_grad(), backend_of("auto"):
        check_agreement(provider, loss(provider), loss("torch"))
    for module in models.values():
        module.train()
    group = f"{model} N={N} S={length}, half padding, forward and backward"
    backend = None if provider == "torch" else backend_taken("auto", device)
    sizes = dict(batch=batch, tokens=tokens, vocab=vocab, layers=N, dropout_p=P)
    measure(step, group=group, backend=backend, **sizes)
