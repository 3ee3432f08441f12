"""embed, the first layer of a Transformer, beside torch's embedding, addition and dropout, eager
and compiled.

Least bytes: forward the output and its rows of the table once; backward the output's gradient and
the table's.
"""

import pytest
import torch
import torch.nn.functional as F

import fastformer as ff
from benchmarks.peers import GPU, available, with_torch

VOCAB, WIDTH = 37000 if GPU else 4096, 512
PROVIDERS = available("torch", "compile", "reference", "triton")


@pytest.mark.parametrize("provider", PROVIDERS)
def test_embed(compare, random, device, dtype, batch, length, mode):
    weight = random(VOCAB, WIDTH)
    positional = torch.randn(length, WIDTH, device=device, dtype=dtype)
    tokens = torch.randint(0, VOCAB, (batch, length), device=device)
    nbytes = 2 * batch * length * WIDTH * dtype.itemsize
    if mode == "forward+backward":
        nbytes += nbytes // 2 + weight.nbytes
    inputs = (tokens, weight, positional)
    compare(f"embed S={length}", PEERS, _ours, inputs, nbytes=nbytes, width=WIDTH)


def _ours(tokens, weight, positional):
    return ff.embed(tokens, weight, positional, 0.1)


def _torch(tokens, weight, positional):
    return F.dropout(F.embedding(tokens, weight) * WIDTH**0.5 + positional, 0.1)


PEERS = with_torch(_torch)
