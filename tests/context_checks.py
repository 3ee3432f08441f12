"""What the processes of parallel_worker.py check of `context_parallel`."""

import re

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fastformer as ff

BATCH, HEADS, GROUPS = 2, 4, 4
SEED = dict(dropout_p=0.3, dropout_seed=-11)
OPTIONS = {
    "plain": {},
    "causal, dropout": dict(is_causal=True, **SEED),
    "bottom right, lengths": dict(
        is_causal=True, causal_alignment="bottom_right", key_lengths=True, longer=True
    ),
    "window, sinks, dropout": dict(window=(20, 3), sinks=True, **SEED),
    "rows of a mask, alibi": dict(attn_mask=True, alibi_slopes=True),
    "rows of a bias, causal, dropout": dict(bias=True, is_causal=True, **SEED),
    "bias of keys, softcap, lengths": dict(key_bias=True, softcap=3.0, key_lengths=True),
}
WAYS = {
    "ring": dict(method="ring"),
    "ring, in a row": dict(method="ring", balanced=False),
    "auto": {},
    "all-to-all, in a row": dict(method="all-to-all", balanced=False),
}
WITH_ROWS = ("rows of a mask, alibi", "rows of a bias, causal, dropout")


def cases():
    """(case, options, way)"""
    for name, options in OPTIONS.items():
        for way, given in WAYS.items():
            if way.startswith("all") and name in WITH_ROWS:
                continue
            yield f"{name}; {way}", options, given


def made(options, world, dtype):
    """The whole: (tensors, options)."""
    torch.manual_seed(5)
    options, rows = dict(options), 32 * world
    columns = rows * (1 + options.pop("longer", False))

    def normal(*shape):
        return torch.randn(*shape, dtype=dtype)

    tensors = dict(
        query=1.5 * normal(BATCH, HEADS, rows, 8),
        key=1.5 * normal(BATCH, GROUPS, columns, 8),
        value=normal(BATCH, GROUPS, columns, 8),
    )
    if options.pop("bias", None):
        tensors["bias"] = normal(HEADS, rows, columns)
    if options.pop("key_bias", None):
        tensors["bias"] = normal(BATCH, 1, 1, columns)
    if options.pop("sinks", None):
        tensors["sinks"] = normal(HEADS)
    if options.pop("attn_mask", None):
        options["attn_mask"] = normal(BATCH, 1, rows, columns) > 0
    if options.pop("alibi_slopes", None):
        options["alibi_slopes"] = 0.5 ** torch.arange(1.0, HEADS + 1)
    if options.pop("key_lengths", None):
        options["key_lengths"] = torch.tensor([columns - 21, 9])
    return tensors, options


def gradients(call, tensors, cotangents):
    """(output, lse, and the gradient of each tensor) of a call."""
    leaves = {n: x.detach().requires_grad_() for n, x in tensors.items()}
    out, lse = call(**leaves)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    grads = torch.autograd.grad((out, lse), list(leaves.values()), cotangents)
    return dict(output=out, lse=lse, **dict(zip(leaves, grads)))


def compare(context, world, options, dtype, bound):
    tensors, options = made(options, world, dtype)
    wide = {n: x.double() for n, x in tensors.items()}
    cotangents = torch.randn(wide["query"].shape), torch.randn(wide["query"].shape[:3])

    def whole(**inputs):
        return ff.scaled_dot_product_attention(**inputs, **options, return_lse=True)

    with ff.use_backend("reference"):
        want = gradients(whole, wide, [g.double() for g in cotangents])
    own = {n: context.shard(x, 2) for n, x in tensors.items() if x.dim() == 4 and n != "bias"}
    own |= {n: x for n, x in tensors.items() if n not in own}
    here = dict(options)
    rows = context.positions(32)
    if "bias" in own and own["bias"].shape[-2] > 1:
        own["bias"] = own["bias"][..., rows, :]
    if "attn_mask" in here:
        here["attn_mask"] = here["attn_mask"][..., rows, :]

    def part(**inputs):
        with context:
            return ff.scaled_dot_product_attention(**inputs, **here, return_lse=True)

    have = gradients(part, own, [context.shard(g, 2).to(dtype) for g in cotangents])
    for name, x in have.items():
        y = want[name]
        if name in ("output", "lse", "query", "key", "value"):
            y = context.shard(y, 2)
        elif name == "bias" and y.shape[-2] > 1:
            y = y[..., rows, :]
        else:  # the processes share it
            x = x.clone()
            dist.all_reduce(x)
        error = (x.double() - y).norm() / y.norm().clamp_min(1e-30)
        assert error < bound, f"{name}: {error:.1e}"


def context(folder):
    """Attention of shards, in each case, is that of the whole in one process."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    for name, options, way in cases():
        own = ff.context_parallel(mesh, **way)
        kernels = world == 2 and way in (WAYS["ring"], WAYS["auto"]) and "dropout" in name
        for backend in ("reference", "triton") if kernels else ("reference",):
            exact = backend == "reference"
            dtype, bound = (torch.float64, 1e-11) if exact else (torch.float32, 1e-5)
            try:
                with ff.use_backend(backend):
                    compare(own, world, options, dtype, bound)
            except AssertionError as error:
                raise AssertionError(f"{name}, {backend}: {error}") from None


def context_seed(folder):
    """Without a seed all processes draw the mask of the first one; and what is gathered is the
    whole again.
    """
    torch.manual_seed(dist.get_rank())
    world = dist.get_world_size()
    own = ff.context_parallel(init_device_mesh("cpu", (world,)))
    rows = 32 * world
    query, value = torch.zeros(1, world, rows, 8), torch.eye(rows).expand(1, world, rows, rows)
    weights = []
    for _ in range(2):
        with own:
            part = ff.scaled_dot_product_attention(
                *(own.shard(x, 2) for x in (query, query, value)), dropout_p=0.5
            )
        weights.append(own.gather(part, 2))
    first = weights[0].clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, weights[0]) and not torch.equal(*weights)
    assert torch.equal(own.gather(own.shard(value, 2), 2), value)


def context_refusals(folder):
    """One line says what is wrong, in each process, and none waits for another."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    x = torch.zeros(1, 3, 6, 8)

    def refused(words, call):
        try:
            call()
        except (ValueError, TypeError) as error:
            assert re.search(words, str(error)), error
        else:
            raise AssertionError(f"nothing was refused; expected {words}")

    def call(**options):
        given = {name: options.pop(name) for name in ("dropout_p", "query") if name in options}
        query = given.pop("query", x)
        with ff.context_parallel(mesh, **options):
            ff.scaled_dot_product_attention(query, x, x, **given)

    refused("one dimension", lambda: ff.context_parallel(init_device_mesh("cpu", (1, world))))
    refused("mesh is None", lambda: ff.context_parallel(None))
    refused("method is 'tree'; expected", lambda: ff.context_parallel(mesh, method="tree"))
    refused("balanced is", lambda: ff.context_parallel(mesh, balanced="no"))
    refused("3 heads in 3 groups", lambda: call(method="all-to-all"))
    refused("query has 6 rows .* multiple of 32", lambda: call(dropout_p=0.5))
    refused("query has 5 rows .* multiple of 2", lambda: call(query=x[:, :, :5]))
    refused("expected a multiple of", lambda: ff.context_parallel(mesh).shard(x[..., :5], 3))
    refused("query has shape", lambda: call(query=x[0]))
    assert ff.functional.in_context is None
