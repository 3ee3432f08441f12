"""nn.TransformerEncoder before and after accelerate: a training step, and inference.

The encoder is that of the base model: 6 layers, d=512, h=8, post-norm, dropout 0.1. The batch has
padding. `torch` is the encoder before `accelerate`; at inference it runs on torch's fast path, with
nested tensors. On a GPU `compile` is torch.compile of this encoder, and `accelerated and compiled`
of the other. Before the timing both are compared, in evaluation, at the tokens that are no padding.

FLOPs: forward 2 for each weight and each token that is no padding, and attention between these
tokens; backward twice that.
"""

import copy

import pytest
import torch
from torch import nn

import fastformer as ff
from benchmarks.peers import BACKENDS, GPU, available, backend_of, backend_taken, check_agreement

D_MODEL, HEADS, D_FF, P = 512, 8, 2048, 0.1
LAYERS = 6 if GPU else 2
PEERS = available("torch", "compile")
ACCELERATED = [*BACKENDS, *(["accelerated and compiled"] if GPU else [])]


def models():
    """Return the encoder before `accelerate`, and after."""
    layer = nn.TransformerEncoderLayer(D_MODEL, HEADS, D_FF, P, batch_first=True)
    before = nn.TransformerEncoder(layer, LAYERS)
    after = copy.deepcopy(before)
    ff.accelerate(after)
    return before, after


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("provider", [*PEERS, *ACCELERATED])
@pytest.mark.parametrize("padding", [0.0, 0.25])
@pytest.mark.parametrize("task", ["training", "inference"])
@pytest.mark.parametrize("length", [128, 256, 512, 1024, 2048, 4096] if GPU else [128])
def test_encoder(measure, device, dtype, batch, length, task, padding, provider):
    before, after = (model.to(device, dtype) for model in models())
    before.train(task == "training"), after.train(task == "training")
    x = torch.randn(batch, length, D_MODEL, device=device, dtype=dtype)
    lengths = torch.linspace(length * (1 - 2 * padding), length, batch, device=device).long()
    hidden = None
    if padding:
        hidden = torch.arange(length, device=device) >= lengths[:, None]
    real = torch.ones_like(x[..., 0], dtype=torch.bool) if hidden is None else ~hidden
    grad = torch.randn_like(x) * real.unsqueeze(-1)
    model = before if provider in PEERS else after
    if "compile" in provider:
        model = torch.compile(model)

    with torch.no_grad(), backend_of(provider):
        outs = [copy.deepcopy(m).eval()(x, src_key_padding_mask=hidden) for m in (before, after)]
    check_agreement("accelerated", outs[1][real], outs[0][real])

    def call():
        with backend_of(provider):
            with torch.set_grad_enabled(task == "training"):
                out = model(x, src_key_padding_mask=hidden)
            if task == "training":
                model.zero_grad()
                out.backward(grad)

    tokens = int(real.sum())
    weights = 4 * D_MODEL**2 + 2 * D_MODEL * D_FF
    passes = 3 if task == "training" else 1
    products = int((lengths**2).sum()) if padding else batch * length**2
    measure(
        call,
        backend=backend_taken(provider, device),
        group=f"nn.TransformerEncoder S={length}, padding {padding:.0%}, {task}",
        flops=LAYERS * passes * (2 * weights * tokens + 4 * products * D_MODEL),
        padding=padding,
        layers=LAYERS,
        d_model=D_MODEL,
        d_ff=D_FF,
        heads=HEADS,
        dropout_p=P if task == "training" else 0.0,
    )
