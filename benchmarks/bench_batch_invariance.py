"""What `batch_invariant` costs: a linear layer by its kernel beside torch's GEMM, for few rows and
many, and attention of one query by the forward kernel beside the kernels that split the keys.

FLOPs: 2 M N K; 4 B H S D. Least bytes: the inputs and the output once.
"""

import pytest
import torch
import torch.nn.functional as F

import fastformer as ff
from benchmarks.peers import GPU, available

SIZES = [(4096, 4096), (4096, 16384)] if GPU else [(512, 2048)]
ROWS = [1, 64, 8192] if GPU else [1, 256]


@pytest.mark.parametrize("provider", available("torch", "triton"))
@pytest.mark.parametrize("k, n", SIZES, ids=lambda n: str(n))
@pytest.mark.parametrize("rows", ROWS)
def test_product(measure, device, dtype, rows, k, n, provider):
    x = torch.randn(rows, k, device=device, dtype=dtype)
    w = torch.randn(n, k, device=device, dtype=dtype)

    @torch.no_grad()
    def call():
        if provider == "torch":
            return F.linear(x, w)
        with ff.batch_invariant():
            return F.linear(x, w)

    group = f"batch-invariant linear {k}->{n} rows={rows}"
    nbytes = x.nbytes + w.nbytes + rows * n * x.itemsize
    measure(call, group=group, flops=2 * rows * k * n, nbytes=nbytes, rows=rows, k=k, n=n)


@pytest.mark.parametrize("provider", available("torch", "split", "triton"))
@pytest.mark.parametrize("batch", [1, 64] if GPU else [1])
def test_attention_of_one_query(measure, device, dtype, batch, provider):
    """32 heads in 8 groups, 8192 keys."""
    heads, groups, length, dim = 32, 8, 8192 if GPU else 512, 128
    query = torch.randn(batch, heads, 1, dim, device=device, dtype=dtype)
    shape = batch, groups, length, dim
    keys = [torch.randn(shape, device=device, dtype=dtype) for _ in range(2)]

    @torch.no_grad()
    def call():
        if provider == "torch":
            return F.scaled_dot_product_attention(query, *keys, enable_gqa=True)
        with ff.use_backend("triton"):
            if provider == "split":
                return ff.scaled_dot_product_attention(query, *keys, enable_gqa=True)
            with ff.batch_invariant():
                return ff.scaled_dot_product_attention(query, *keys, enable_gqa=True)

    measure(
        call,
        group=f"batch-invariant attention of one query, B={batch}",
        flops=4 * batch * heads * length * dim,
        nbytes=sum(x.nbytes for x in keys),
        heads=heads,
        groups=groups,
    )
