"""Sequences that are sharded across processes: the ring, all-to-all, and the rows of models."""

import itertools

import pytest
import torch
from context_checks import LARGE
from test_parallel import run

import fastformer as ff
from fastformer.description import Attention
from fastformer.dispatch import backends
from fastformer.distributed.context_parallel import Merged

HEADS, ROWS, CUTS = 2, 24, (0, 7, 16, 24)


@pytest.mark.with_slow
def test_context_parallel_attention(tmp_path):
    """On two processes, which also run the kernels; test_parallel.py has four."""
    run(tmp_path, 2, "context")


@pytest.mark.with_all
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.with_slow), 4])
def test_context_parallel_models(tmp_path, world):
    """Losses and gradients of models whose sequences are sharded."""
    run(tmp_path, world, "context_model")


def of_the_whole(inputs, described, grads):
    """Output, lse, and the gradients of query, key, value, bias and sinks."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    query, key, value, bias, sinks = leaves
    arguments = dict(query=query, key=key, value=value, return_lse=True)
    attention = described._replace(bias=bias, sinks=sinks)
    out, lse = backends.run("scaled_dot_product_attention", **arguments, attention=attention)
    seen = lse.masked_fill(lse == -torch.inf, 0.0)
    return [out, lse, *torch.autograd.grad((out, seen), leaves, grads)]


def of_parts(inputs, described, grads):
    """The same, of parts of the keys that are merged."""
    query, key, value, bias, sinks = inputs
    merged, parts = Merged(query, value.shape[3]), []
    for first, last in itertools.pairwise(CUTS):
        attention = described._replace(
            bias=bias[..., first:last],
            sinks=sinks if first == 0 else None,
            attn_mask=described.attn_mask[..., first:last],
            shard=ff.Shard(0, 0, 0, first, HEADS, ROWS, ROWS),
        )
        parts.append(((query, key[:, :, first:last], value[:, :, first:last]), attention))
    for rows in (slice(0, 9), slice(9, ROWS)):
        for part, attention in parts:
            of_rows = (
                (query[:, :, rows], *part[1:]),
                attention._replace(
                    bias=attention.bias[:, rows],
                    attn_mask=attention.attn_mask[rows],
                    shard=attention.shard._replace(query=rows.start),
                ),
            )
            merged.add(rows, *backends.attention_block(*of_rows))
    outputs = merged.outputs()
    found = [backends.attention_gradients(grads, *part, outputs) for part in parts]
    dq, dk, dv, dbias, dsinks = zip(*found)
    assert dsinks[1:] == (None, None)
    joined = [torch.cat(x, dim) for x, dim in ((dk, 2), (dv, 2), (dbias, -1))]
    return [*outputs[:2], sum(dq), *joined, dsinks[0]]


BIASES = [("bias", x) for x in (*LARGE, -1e30, 1e9)]


@pytest.mark.parametrize("name, large", [*BIASES, ("slope", 300.0), ("slope", 1000.0)])
def test_parts_of_the_keys_are_merged(backend, name, large):
    """Where a large bias or slope leaves lse no digits for the number of keys. The scores of such
    rows are equal: they lose nothing beside it either.
    """
    query, key, value = (1.5 * torch.randn(2, HEADS, ROWS, 8) for _ in range(3))
    bias, mask = torch.randn(HEADS, ROWS, ROWS), torch.ones(ROWS, ROWS, dtype=torch.bool)
    sinks, slopes, weights = torch.tensor([0.3, -torch.inf]), None, torch.randn(2, HEADS, ROWS, 9)
    query[:, :, ::2] = 0.0
    mask[3] = mask[4, :7] = mask[6, 16:] = False
    if name == "slope":  # these rows see the keys before and after their own alone
        bias[:, ::2], sinks[0], slopes = 0.0, -large, torch.full((HEADS,), large)
        mask[::2] &= ~torch.eye(ROWS, dtype=torch.bool)[::2]
    else:
        bias[:, ::4] = large
        sinks[0] = large if abs(large) <= 1e30 else 0.3
    inputs, grads = (query, key, value, bias, sinks), (weights[..., :8], weights[..., 8])
    described = Attention(mask, 0.0, False, 8**-0.5, alibi_slopes=slopes)
    with ff.use_backend("reference"):
        want = of_the_whole([x.double() for x in inputs], described, [x.double() for x in grads])
    for x, y in zip(of_parts(inputs, described, grads), want, strict=True):
        hidden = y == -torch.inf
        assert torch.equal(x == -torch.inf, hidden)
        x, y = (z.double().masked_fill(hidden, 0.0) for z in (x, y))
        assert (x - y).norm() <= 1e-5 * y.norm()


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match=r"no process group; .*init_process_group"):
        ff.context_parallel(None)
