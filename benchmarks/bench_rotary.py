"""rotary_embedding, with and without the norms of queries and keys, beside transformers' functions,
eager and compiled, and Liger's kernel.

Least bytes: forward the query and the key once in and once out; backward their gradients once in
and once out, and with norms the query and the key once more. cos and sin add less than 1 / (H + G).
"""

import pytest

import fastformer as ff
from benchmarks.peers import GPU, available, rotary_embedding, with_torch

HEADS, GROUPS, DIM = (32, 8, 128) if GPU else (8, 2, 64)
PROVIDERS = available("torch", "compile", "liger", "reference", "triton")


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_rotary_embedding(compare, random, device, batch, length, mode, norm, provider):
    if norm and provider == "liger":
        pytest.skip("Liger's kernel has no norm")
    query = random(batch, length, HEADS, DIM).transpose(1, 2).detach().requires_grad_()
    key = random(batch, length, GROUPS, DIM).transpose(1, 2).detach().requires_grad_()
    weights = (random(DIM), random(DIM)) if norm else (None, None)
    inputs = (query, key, *ff.rotary_frequencies(DIM, length, device=device), *weights)
    nbytes = 2 * (query.nbytes + key.nbytes)
    if mode == "forward+backward":
        nbytes += nbytes + (nbytes // 2 if norm else 0)
    group = f"rotary_embedding{' norm' * norm} S={length}"
    sizes = dict(heads=HEADS, groups=GROUPS, dim=DIM)
    compare(group, PEERS, _ours, inputs, nbytes=nbytes, **sizes)


def _ours(query, key, cos, sin, query_norm, key_norm):
    norms = dict(query_norm=query_norm, key_norm=key_norm)
    return ff.rotary_embedding(query, key, cos, sin, **norms)


def _liger(query, key, cos, sin, *_):
    from liger_kernel.ops.rope import LigerRopeFunction

    cos, sin = (x.to(query.dtype).unsqueeze(0) for x in (cos, sin))
    return LigerRopeFunction.apply(query, key, cos, sin)


PEERS = with_torch(rotary_embedding, liger=_liger)
