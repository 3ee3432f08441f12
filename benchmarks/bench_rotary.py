"""rotary_embedding, with and without the norms of queries and keys, beside transformers' functions,
eager and compiled, and Liger's kernel.

Least bytes: forward the query and the key once in and once out; backward their gradients once in
and once out, and with norms the query and the key once more. cos and sin add less than 1 / (H + G).
"""

import pytest
import torch

import fastformer as ff
from benchmarks.peers import GPU, available, compiled

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
    sizes = dict(batch=batch, length=length, heads=HEADS, groups=GROUPS, dim=DIM)
    compare(group, PEERS, _ours, inputs, nbytes=nbytes, **sizes)


def _ours(query, key, cos, sin, query_norm, key_norm):
    norms = dict(query_norm=query_norm, key_norm=key_norm)
    return ff.rotary_embedding(query, key, cos, sin, **norms)


def _torch(query, key, cos, sin, query_norm, key_norm):
    """As Llama and Qwen3 of transformers do."""

    def normalized(x, weight):
        if weight is None:
            return x
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * wide.to(x.dtype)

    def rotated(x):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    cos, sin = cos.to(query.dtype), sin.to(query.dtype)
    query, key = normalized(query, query_norm), normalized(key, key_norm)
    return rotated(query), rotated(key)


def _liger(query, key, cos, sin, *_):
    from liger_kernel.ops.rope import LigerRopeFunction

    cos, sin = (x.to(query.dtype).unsqueeze(0) for x in (cos, sin))
    return LigerRopeFunction.apply(query, key, cos, sin)


PEERS = {"torch": _torch, "compile": compiled(_torch), "liger": _liger}
