"""nn.TransformerEncoder and any model before and after accelerate: a training step, and inference.

Any model: layers of Hugging Face's BERT, ViT and GPT-2 with eager attention, of d=768, and on a CPU
of d=64. `torch` is the model as it is, `accelerate` the same after `accelerate`, `compile` after
torch.compile, and `fusing` after torch.compile within `fusing`, whose pass puts the ops into
inductor's graphs; a CPU compiles with --slow. On a CPU an accelerated model runs its own code.

The encoder is that of the base model: 6 layers, d=512, h=8, post-norm, dropout 0.1. The batch has
padding. `torch` is the encoder before `accelerate`; at inference it runs on torch's fast path, with
nested tensors. On a GPU `compile` is torch.compile of this encoder, `reduce-overhead` the same with
CUDA graphs of its own, and `accelerated and compiled` is torch.compile of the other. Before the
timing both are compared, in evaluation, at the tokens that are no padding. `fastformer` is an
encoder of that size from our own layers, whose weights are others.

FLOPs: forward 2 for each weight and each token that is no padding, and attention between these
tokens; backward twice that.
"""

import contextlib
import copy

import pytest
import torch
from torch import nn

import fastformer as ff
from benchmarks.compiled_launches import stack
from benchmarks.peers import BACKENDS, GPU, available, backend_of, backend_taken, check_agreement

D_MODEL, HEADS, D_FF, P = 512, 8, 2048, 0.1
LAYERS = 6 if GPU else 2
PEERS = available("torch", "compile")
ACCELERATED = [*BACKENDS, "accelerated and compiled", "fastformer"] if GPU else ["reference"]
if "compile" in PEERS:
    PEERS.append("reduce-overhead")


def models():
    """Return the encoder before `accelerate`, and after."""
    layer = nn.TransformerEncoderLayer(D_MODEL, HEADS, D_FF, P, batch_first=True)
    before = nn.TransformerEncoder(layer, LAYERS)
    after = copy.deepcopy(before)
    ff.accelerate(after)
    return before, after


class Ours(nn.Module):
    """Our own encoder, called as torch's."""

    def __init__(self):
        super().__init__()
        attention = ff.MultiHeadedAttention(HEADS, D_MODEL, P)
        feed_forward = ff.PositionwiseFeedForward(D_MODEL, D_FF, P)
        self.encoder = ff.Encoder(ff.EncoderLayer(D_MODEL, attention, feed_forward, P), LAYERS)

    def forward(self, x, src_key_padding_mask):
        hidden = src_key_padding_mask
        return self.encoder(x, None if hidden is None else ~hidden.unsqueeze(1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("provider", [*PEERS, *ACCELERATED])
@pytest.mark.parametrize("padding", [0.0, 0.25])
@pytest.mark.parametrize("task", ["training", "inference"])
@pytest.mark.parametrize("length", [128, 256, 512, 1024, 2048, 4096] if GPU else [128])
def test_encoder(measure, device, dtype, batch, length, task, padding, provider):
    before, after = (model.to(device, dtype) for model in models())
    ours = Ours().to(device, dtype) if provider == "fastformer" else None
    for model in filter(None, (before, after, ours)):
        model.train(task == "training")
    x = torch.randn(batch, length, D_MODEL, device=device, dtype=dtype)
    lengths = torch.linspace(length * (1 - 2 * padding), length, batch, device=device).long()
    hidden = None
    if padding:
        hidden = torch.arange(length, device=device) >= lengths[:, None]
    real = torch.ones_like(x[..., 0], dtype=torch.bool) if hidden is None else ~hidden
    grad = torch.randn_like(x) * real.unsqueeze(-1)
    model = before if provider in PEERS else ours or after
    if provider == "reduce-overhead":
        model = torch.compile(model, mode="reduce-overhead")
    elif "compile" in provider:
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
        backend=backend_taken("auto" if ours else provider, device),
        uncaptured="it has CUDA graphs of its own" if provider == "reduce-overhead" else None,
        group=f"nn.TransformerEncoder S={length}, padding {padding:.0%}, {task}",
        flops=LAYERS * passes * (2 * weights * tokens + 4 * products * D_MODEL),
        padding=padding,
        layers=LAYERS,
        d_model=D_MODEL,
        d_ff=D_FF,
        heads=HEADS,
        dropout_p=P if task == "training" else 0.0,
    )


@pytest.mark.parametrize("provider", ["torch", "accelerate", "compile", "fusing"])
@pytest.mark.parametrize("task", ["training", "inference"])
@pytest.mark.parametrize("name", ["BERT", "ViT", "GPT-2"])
def test_any_model(measure, device, dtype, name, task, provider, request):
    pytest.importorskip("transformers")
    if provider in ("compile", "fusing") and not (GPU or request.config.getoption("slow")):
        pytest.skip("a CPU compiles with --slow")
    sizes = (12, 768, 12, 8, 512) if GPU else (2, 64, 4, 8, 50)
    torch.manual_seed(0)
    model, given = stack(name, *sizes)
    model = model.to(device).train(task == "training")
    given = {n: torch.ones_like(x) if x.dtype == torch.bool else torch.randn_like(x)
             for n, x in given.items()}  # fmt: skip
    given = {n: x.to(device) for n, x in given.items()}
    changed = copy.deepcopy(model)
    if provider == "accelerate":
        ff.accelerate(changed)
    elif provider != "torch":
        changed = torch.compile(changed, dynamic=False)

    def run(called):
        pass_of_ours = ff.fusing() if provider == "fusing" else contextlib.nullcontext()
        with pass_of_ours, torch.autocast(device.type, dtype, enabled=GPU):
            return called(**given).last_hidden_state

    model.eval(), changed.eval()
    with torch.no_grad():
        check_agreement(provider, run(changed), run(model), 50 * torch.finfo(dtype).eps)
    changed.train(task == "training")

    def call():
        with torch.set_grad_enabled(task == "training"):
            out = run(changed)
        if task == "training":
            changed.zero_grad()
            out.mean().backward()

    layers, width, heads, batch, length = sizes
    ours = GPU and provider in ("accelerate", "fusing")  # on a CPU its own code runs
    backend = backend_taken("auto", device) if ours else None
    facts = dict(layers=layers, d_model=width, heads=heads, batch=batch, length=length)
    measure(call, group=f"{name}, any model, {layers} layers, {task}", backend=backend, **facts)
