"""What `batch_invariant` costs: `usual` is the same call outside of it.

A prefill, a decoding step and a training step of a language model; a linear layer by the kernel
beside torch's GEMM, for few rows and many; and attention of one query by the forward kernel beside
the kernels that split the keys.

FLOPs of a product: 2 M N K; of attention: 4 B H S D. Least bytes: the inputs and the output once.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

import fastformer as ff
from benchmarks.peers import GPU, available

PROVIDERS = available("usual", "batch_invariant")
SIZES = [(4096, 4096), (4096, 16384)] if GPU else [(512, 2048)]
ROWS = [1, 64, 8192] if GPU else [1, 256]
MODEL = dict(vocab=32768, N=4, d_model=1024, d_ff=4096, h=16, activation="swiglu", norm="rms")
SMALL = dict(vocab=1000, N=1, d_model=128, d_ff=256, h=4, activation="swiglu", norm="rms")
LENGTH = 2048 if GPU else 128


def _in_context(provider, call):
    def run():
        with ff.batch_invariant() if provider == "batch_invariant" else nullcontext():
            return call()

    return run


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    "task, batch",
    [("prefill", 4), ("decoding step", 1), ("decoding step", 64), ("training step", 4)],
    ids=lambda x: str(x).replace(" ", "-"),
)
def test_model(measure, device, dtype, task, batch, provider):
    """Prefill: all tokens into a cache. Decoding step: one token for each row, after those in the
    cache, and its logits. Training step: forward and backward of the loss, without an optimizer.
    """
    model = ff.make_decoder(**(MODEL if GPU else SMALL), dropout=0.0).to(device, dtype)
    head, vocab = model.generator.proj, model.generator.proj.out_features
    tokens = torch.randint(1, vocab, (batch, LENGTH), device=device)
    target = tokens.roll(-1, 1)
    cache = ff.DecoderCache(LENGTH)
    held = LENGTH - 1 if task == "decoding step" else 0

    def infer():
        with torch.no_grad():
            cache.crop(held)
            return head(model(tokens[:, held:], cache=cache)[:, -1:])

    def train():
        model.zero_grad()
        hidden = model(tokens)
        ff.linear_cross_entropy(hidden, head.weight, target, linear_bias=head.bias).backward()

    if held:
        with torch.no_grad():
            model(tokens[:, :held], cache=cache)
    call = _in_context(provider, train if task == "training step" else infer)
    group = f"batch-invariant {task}, B={batch} S={LENGTH}"
    measure(call, group=group, backend="triton" if GPU else None, length=LENGTH, vocab=vocab)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("k, n", SIZES, ids=lambda n: str(n))
@pytest.mark.parametrize("rows", ROWS)
def test_product(measure, device, dtype, rows, k, n, provider):
    """`usual` is torch's GEMM."""
    x = torch.randn(rows, k, device=device, dtype=dtype)
    w = torch.randn(n, k, device=device, dtype=dtype)
    measure(
        _in_context(provider, torch.no_grad()(lambda: F.linear(x, w))),
        group=f"batch-invariant linear {k}->{n} rows={rows}",
        flops=2 * rows * k * n,
        nbytes=x.nbytes + w.nbytes + rows * n * x.itemsize,
        rows=rows,
        k=k,
        n=n,
    )


@pytest.mark.parametrize("provider", available("torch", *PROVIDERS))
@pytest.mark.parametrize("batch", [1, 64] if GPU else [1])
def test_attention_of_one_query(measure, device, dtype, batch, provider):
    """32 heads in 8 groups, 8192 keys."""
    heads, groups, length, dim = 32, 8, 8192 if GPU else 512, 128
    query = torch.randn(batch, heads, 1, dim, device=device, dtype=dtype)
    shape = batch, groups, length, dim
    keys = [torch.randn(shape, device=device, dtype=dtype) for _ in range(2)]
    of_torch = provider == "torch"
    attend = F.scaled_dot_product_attention if of_torch else ff.scaled_dot_product_attention
    measure(
        _in_context(provider, torch.no_grad()(lambda: attend(query, *keys, enable_gqa=True))),
        group=f"batch-invariant attention of one query, B={batch}",
        backend="triton" if GPU and not of_torch else None,
        flops=4 * batch * heads * length * dim,
        nbytes=sum(x.nbytes for x in keys),
        heads=heads,
        groups=groups,
    )
