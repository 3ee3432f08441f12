"""The model as a whole: compiled, exported, in mixed precision; its ops and what it saves."""

import collections
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastformer as ff
from fastformer import use_backend


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


def model_and_batch(device, dropout=0.0, N=1):
    model = ff.make_model(11, 13, N, d_model=16, d_ff=32, h=2, dropout=dropout).to(device)
    src = torch.randint(1, 11, (2, 7), device=device)
    src[1, 5:] = 0
    return model, ff.Batch(src, torch.randint(1, 13, (2, 6), device=device))


def step(model, batch):
    """The loss and the gradients of one training step."""
    compute = ff.SimpleLossCompute(model.generator, ff.LabelSmoothing(13, 0, 0.1))
    out = model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
    loss = compute(out, batch.tgt_y, batch.ntokens)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.with_all
def test_compiled_step(backend, device):
    """The same loss and gradients, from one seed with the same dropout."""
    model, batch = model_and_batch(device, dropout=0.3)
    found = []
    for function in (step, torch.compile(step, backend="aot_eager")):
        torch.manual_seed(3)
        found.append(function(model, batch))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


def test_autocast_over_float32_weights(backend, device):
    """bfloat16 inside, float32 weights, gradients and loss; it trains."""
    torch.manual_seed(0)
    model, batch = model_and_batch(device)
    exact = step(model, batch)
    with torch.autocast(device.type, torch.bfloat16):
        low = step(model, batch)
        assert model.encode(batch.src, batch.src_mask).dtype == torch.float32  # the residual stream
    assert low[0].dtype == torch.float32 and all(g.dtype == torch.float32 for g in low[1:])
    assert 0 < abs(low[0] - exact[0]) < 0.03 * exact[0]
    for a, b in zip(low[1:], exact[1:]):
        assert (a - b).norm() < 0.1 * b.norm() + 1e-3
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        with torch.autocast(device.type, torch.bfloat16):
            loss, *grads = step(model, batch)
        for p, g in zip(model.parameters(), grads):
            p.grad = g
        optimizer.step()
    assert loss < 0.9 * low[0]


@pytest.mark.parametrize("with_mask", [True, False])
def test_exported_encoder(backend, device, with_mask):
    """torch.export gives a program with the ops of the backend, and the same numbers."""
    model, batch = model_and_batch(device, dropout=0.1)
    encoder = model.encoder.eval()
    x = model.src_embed.eval()(batch.src).detach()
    inputs = (x, batch.src_mask if with_mask else None)
    with torch.no_grad():
        program = torch.export.export(encoder, inputs)
        torch.testing.assert_close(program.module()(*inputs), encoder(*inputs))
    ops = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    ours = {op for op in ops if op.startswith("fastformer")}
    assert bool(ours) == (backend == "triton")


# --------------------------------------------------------------------------- ops and memory

D_MODEL, D_FF, HEADS, TOKENS = 64, 256, 4, 2 * 24


class Ops(TorchDispatchMode):
    """Counts the ops that compute something: no views, no empty tensors."""

    QUIET = (
        *("view", "_unsafe_view", "t", "transpose", "permute", "squeeze", "unsqueeze", "expand"),
        *("slice", "select", "split", "split_with_sizes", "unbind", "as_strided", "alias"),
        *("detach", "empty", "empty_like", "empty_strided"),
    )

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ not in self.QUIET:
            self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))

    def forwards(self, part):
        """How many forwards of ops with this in their name have run."""
        return sum(n for op, n in self.counts.items() if part in op and "_backward" not in op)


def stacks(device):
    """Encoders of one and of two layers, and what they take: a batch with a mask."""
    x = torch.randn(2, 24, D_MODEL, device=device, requires_grad=True)
    mask = torch.ones(2, 1, 24, dtype=torch.bool, device=device)
    models = [ff.make_model(9, 9, N, D_MODEL, D_FF, HEADS).to(device) for N in (1, 2)]
    return [model.encoder for model in models], x, mask


def test_ops_of_an_encoder_layer(device):
    """What one more layer of a stack adds, in training with padding: a number that is pinned."""
    encoders, x, mask = stacks(device)
    counted = []
    for encoder in encoders:
        with use_backend("triton"), Ops() as forward:
            out = encoder(x, mask)
        with Ops() as backward:
            out.sum().backward()
        counted.append((forward.counts, backward.counts))
    forward, backward = (b - a for a, b in zip(*counted))
    # attention; two sums with norms; the FFN; the joined projection (two cats of parameters and one
    # linear) and the output's. The seeds are drawn once for the stack.
    ours = {n: c for n, c in forward.items() if n.startswith("fastformer")}
    assert ours == {
        "fastformer.joint_scaled_dot_product_attention.default": 1,
        "fastformer.dropout_add_layer_norm.default": 2,
        "fastformer.feed_forward.default": 1,
    }
    assert sum(forward.values()) == 8, forward
    assert sum(backward.values()) == 10, backward


def saved_bytes(function, parameters):
    """Memory that the graph keeps for the backward, the parameters apart."""
    ours = {p.untyped_storage().data_ptr() for p in parameters}
    kept = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in ours:
            kept[storage.data_ptr()] = storage.nbytes(), storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function()
    return sum(n for n, _ in kept.values())


def test_memory_of_an_encoder_layer(device):
    """Bytes saved per token of one more layer: at most 60% of those of torch's layer."""
    encoders, x, mask = stacks(device)
    with use_backend("triton"):
        one, two = (saved_bytes(partial(stack, x, mask), stack.parameters()) for stack in encoders)
    layer = nn.TransformerEncoderLayer(D_MODEL, HEADS, D_FF, batch_first=True, norm_first=True)
    layer.to(device)
    hidden = ~mask[:, 0]
    theirs = saved_bytes(lambda: layer(x, src_key_padding_mask=hidden), layer.parameters())
    ours = two - one
    assert ours <= 0.6 * theirs, f"{ours / TOKENS:.0f} bytes a token, eager {theirs / TOKENS:.0f}"
