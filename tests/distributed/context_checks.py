"""What the processes of parallel_worker.py check of `context_parallel`."""

import math
import re

import torch
import torch.distributed as dist
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import fastformer as ff
from fastformer.training.copy_task import OneProcess, train

BATCH, HEADS, GROUPS = 2, 4, 4
SEED = dict(dropout_p=0.3, dropout_seed=-11)
OPTIONS = {
    "plain": {},
    "causal, dropout": dict(is_causal=True, **SEED),
    "bottom right, lengths": dict(
        is_causal=True, causal_alignment="bottom_right", key_lengths=True, longer=True
    ),
    # Its edges see a single key of some blocks.
    "window, sinks, dropout": dict(window=(17, 1), sinks=True, **SEED),
    "rows of a mask, alibi": dict(attn_mask=True, alibi_slopes=True),
    "rows of a bias, causal, dropout": dict(bias=True, is_causal=True, **SEED),
    "bias of keys, softcap, lengths": dict(key_bias=True, softcap=3.0, key_lengths=True),
    "bias of rows, dropout": dict(row_bias=True, **SEED),
    "large biases, dropout": dict(bias=True, large=True, **SEED),
    "large slopes, dropout": dict(alibi_slopes=True, large=True, **SEED),
}
WAYS = {
    "ring": dict(method="ring"),
    "ring, in a row": dict(method="ring", balanced=False),
    "auto": {},
    "all-to-all, in a row": dict(method="all-to-all", balanced=False),
}
WITH_ROWS = (
    "rows of a mask, alibi",
    "rows of a bias, causal, dropout",
    "bias of rows, dropout",
    "large biases, dropout",
    "large slopes, dropout",
)
LARGE = (-1e4, -1e6, -1e9, torch.finfo(torch.float32).min)


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
    if options.pop("row_bias", None):
        tensors["bias"] = normal(HEADS, rows, 1)
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
    if options.pop("large", None):  # in rows whose scores are equal, which lose nothing beside it
        tensors["query"][:, :, ::2] = 0.0
        if "bias" in tensors:
            for i, value in enumerate(LARGE):
                tensors["bias"][:, 2 * i :: 2 * len(LARGE)] = value
        else:  # these rows see the keys before and after their own alone, which are as far
            options["alibi_slopes"] = torch.tensor([1.0, 30.0, 300.0, 1000.0])
            options["attn_mask"] = ~torch.eye(rows, columns, dtype=torch.bool)
            options["attn_mask"][1::2] = True
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
        twice = way == WAYS["auto"] and name.partition(";")[0] in WITH_ROWS  # which is the ring
        kernels = world == 2 and way in (WAYS["ring"], WAYS["auto"]) and "dropout" in name
        kernels = kernels and not twice
        for backend in ("reference", "triton") if kernels else ("reference",):
            exact = backend == "reference" and "large" not in name
            dtype, bound = (torch.float64, 1e-11) if exact else (torch.float32, 1e-5)
            try:
                with ff.use_backend(backend):
                    compare(own, world, options, dtype, bound)
            except AssertionError as error:
                raise AssertionError(f"{name}, {backend}: {error}") from None


def context_order(folder):
    """The ring sends before it computes, and waits after it; its backward computes no forward."""
    world = dist.get_world_size()
    own = ff.context_parallel(init_device_mesh("cpu", (world,)), method="ring", balanced=False)
    events = []

    class Works:
        def __init__(self, works):
            self.works = works

        def wait(self):
            events.append("wait")
            for work in self.works:
                work.wait()

    send, gradients = own.pass_on, ff.dispatch.backends.attention_gradients

    def pass_on(*tensors):
        events.append("send")
        received, works = send(*tensors)
        return received, [Works(works)]

    def attention_gradients(*given):
        events.append("gradients")
        return gradients(*given)

    own.pass_on, ff.dispatch.backends.attention_gradients = pass_on, attention_gradients
    q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    try:
        for backend in ("reference", "triton"):
            with (
                ff.use_backend(backend),
                ff.dispatch.backends.observe(lambda x: events.append("forward")),
            ):
                with own:
                    out = ff.scaled_dot_product_attention(q, k, v)
                assert events == ["send", "forward", "wait"] * (world - 1) + ["forward"], events
                events.clear()
                out.sum().backward()
            expected = []
            for step in range(world):
                expected += ["send"] * (step < world - 1) + ["gradients"]
                expected += ["wait"] * (step > 1) + ["send"] * (step > 0)  # the sums of the others
                expected += ["wait"] * (step < world - 1)
            assert events == [*expected, "wait"], events
            events.clear()
    finally:
        ff.dispatch.backends.attention_gradients = gradients


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
    parts = [own.shard(torch.randn(1, 2, rows, 8), 2) for _ in range(3)]
    with own:
        want = ff.scaled_dot_product_attention(*(x[:, 0:1] for x in parts))
        have = ff.scaled_dot_product_attention(*(x[:, 0] for x in parts))
    assert torch.equal(have, want[:, 0])


def context_one_row(folder):
    """A mask of one row in each process, which is not that of another, and what `explain` says."""
    world = dist.get_world_size()
    own = ff.context_parallel(init_device_mesh("cpu", (world,)), balanced=False)
    torch.manual_seed(3)
    query, key = torch.randn(1, world, world, 8), torch.randn(1, world, 4 * world, 8)
    mask = torch.rand(world, 4 * world) > 0.5
    want = ff.scaled_dot_product_attention(query, key, key, mask)
    given = *(own.shard(x, 2) for x in (query, key, key)), own.shard(mask, 0)
    with own:
        have = ff.scaled_dot_product_attention(*given)
        said = ff.explain("scaled_dot_product_attention", *given)
    torch.testing.assert_close(have, own.shard(want, 2))
    assert said.backend == "reference"


def context_no_keys(folder):
    """Where there are no keys, a query sees its sink once."""
    world = dist.get_world_size()
    query, key = torch.randn(1, 4, 4, 8), torch.randn(1, 4, 0, 8)
    for way in WAYS.values():
        sinks = torch.randn(4, requires_grad=True)
        with ff.context_parallel(init_device_mesh("cpu", (world,)), **way):
            out, lse = ff.scaled_dot_product_attention(
                query, key, key, sinks=sinks, return_lse=True
            )
        assert torch.equal(out, torch.zeros_like(query))
        assert torch.equal(lse, sinks.view(-1, 1).expand(1, 4, 4))
        weight = torch.randn_like(lse)
        (grad,) = torch.autograd.grad(lse, sinks, weight)
        torch.testing.assert_close(grad, weight.sum((0, 2)))


def context_within(folder):
    """Sequences and heads that are a part of more, whose dropout they have."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(4)
    query, key, value = (torch.randn(3, 8, 32 * world, 8, dtype=torch.float64) for _ in range(3))
    want = ff.scaled_dot_product_attention(query, key, value, **SEED)[1:, 2:6]
    for way in WAYS.values():
        own = ff.context_parallel(mesh, **way, shard=ff.Shard(1, 2, heads=8))
        given = (own.shard(x[1:, 2:6], 2) for x in (query, key, value))
        with own:
            have = ff.scaled_dot_product_attention(*given, **SEED)
        torch.testing.assert_close(have, own.shard(want, 2))


MODELS = {
    "pre-norm": {},
    "post-norm, swiglu, grouped, learned positions": dict(
        norm_first=False, activation="swiglu", kv_heads=2, learned_positions=True
    ),
    "a language model, rms": dict(norm="rms"),
    "a language model, rotary": dict(positions="rotary", qk_norm=True),
}


def of_model(name, dtype, batch, length):
    """(model, its loss by rows of targets, tokens [B, S] of source and target, targets)."""
    torch.manual_seed(0)
    sizes = dict(N=1, d_model=16, d_ff=32, h=4, dropout=0.3, max_len=length) | MODELS[name]
    if "language" in name:
        model = ff.make_decoder(11, **sizes).to(dtype)
    else:
        model = ff.make_model(11, 11, **sizes).to(dtype)
    tokens = torch.randint(1, 11, (2, batch, length + 1))
    tokens[:, 0, length - 5 :] = 0
    criterion = ff.LabelSmoothing(11, 0, 0.1)
    return model, ff.SimpleLossCompute(model.generator, criterion), tokens


def called(model, source, target, source_mask, mask):
    if isinstance(model, ff.LanguageModel):
        return model(target, mask)
    return model(source, target, source_mask, mask)


def context_model(folder):
    """A model of shards has the loss and the gradients of the whole one, dropout on, of a length
    that does not divide, of a part of a batch, and with checkpointed activations; on four processes
    also beside FSDP2.
    """
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "cp"))
    batch, first = world, 2 * mesh["dp"].get_local_rank()
    runs = [(name, "reference", balanced) for name in MODELS for balanced in (True, False)]
    runs += [("pre-norm", "triton", True)] * (world == 2)
    for name, backend, balanced in runs:
        exact = backend == "reference"
        dtype, length = (torch.float64, 77) if exact else (torch.float32, 35)
        results = []
        for sharded in (False, True):
            model, compute, (source, target) = of_model(name, dtype, batch, length)
            y, target, source = target[:, 1:], target[:, :-1], source[:, :length]
            if isinstance(model, ff.LanguageModel):
                mask = (target != 0).unsqueeze(1)
            else:
                mask = ff.Batch.make_std_mask(target, 0)
            given = source, target, (source != 0).unsqueeze(1), mask
            norm = (y != 0).sum()
            torch.manual_seed(2)
            with ff.use_backend(backend):
                if sharded:
                    context = ff.context_parallel(mesh["cp"], balanced=balanced)
                    given, y = ([x[first : first + 2] for x in given], y[first : first + 2])
                    if world == 4 and not balanced:
                        share(model, mesh["cp"])
                    elif exact and balanced:
                        for layer in layers(model):
                            checkpoint(layer)
                    with context, context.of_length(length), ff.sequences_from(first):
                        loss = compute(
                            called(model, *parts(context, *given)), *part(context, y), norm
                        )
                        loss.backward()
                else:
                    loss = compute(called(model, *given), y, norm)
                    loss.backward()
            found = {n: p.grad for n, p in model.named_parameters()} | {"loss": loss.detach()}
            if sharded:
                for n, x in found.items():
                    found[n] = x.full_tensor() if isinstance(x, DTensor) else x  # a mean of two
                    dist.all_reduce(found[n])
            results.append(found)
        for which, x in results[1].items():
            y = results[0][which]
            error = float(((x - y).abs() / (1 + y.abs())).max())
            bound = 1e-11 if exact else 1e-5
            assert error < bound, f"{name}, {backend}, {balanced}, {which}: {error:.1e}"


def layers(model):
    return [x for x in model.modules() if isinstance(x, (ff.EncoderLayer, ff.DecoderLayer))]


def share(model, mesh):
    """Share the parameters by FSDP2."""
    for one in (*layers(model), model):
        fully_shard(one, mesh=mesh)


def trained(settings, way=None, backend="reference"):
    """A run of the copy task, by default in one process."""
    return train(settings, backend, math.inf, False, way or OneProcess(timed=False))


def agree(run, alone):
    worst = max(abs(a - b) for a, b in zip(alone.losses, run.losses, strict=True))
    assert worst <= 1e-5 and run.decoded == alone.decoded, f"losses differ by {worst:.1e}"


def part(context, *tensors):
    return [context.shard(context.pad(x, 1, 0), 1) for x in tensors]


def parts(context, source, target, source_mask, mask):
    """What a model is called with in this process."""
    masks = [context.pad(x, 2, False) for x in (source_mask, mask)]
    if mask.shape[1] > 1:
        masks[1:] = part(context, masks[1])
    return *part(context, source, target), *masks


def refused(words, call):
    """One line says what is wrong, in each process, and none waits for another."""
    try:
        call()
    except (ValueError, TypeError) as error:
        assert re.search(words, str(error)) and "\n" not in str(error), f"{error}; expected {words}"
    else:
        raise AssertionError(f"nothing was refused; expected {words}")


def context_refusals(folder):
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    x = torch.zeros(1, 3, 6, 8)

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
    replicated = distribute_tensor(x, mesh, [Replicate()])
    refused("query is a DTensor", lambda: call(query=replicated))
    one = torch.ones(8)
    own = ff.context_parallel(mesh)
    with own:
        dtensors = [distribute_tensor(y, mesh, [Replicate()]) for y in (x, x, one)]
        refused("of DTensors within", lambda: ff.dropout_add_rms_norm(*dtensors, 0.5))
        refused("of one row within", lambda: ff.dropout_add_rms_norm(one, one, one, 0.5))
        refused("attention_weights within", lambda: ff.attention_weights(x, x))
        offsets = torch.tensor([0, 6], dtype=torch.int32)
        packed = x[0].transpose(0, 1)
        given = packed, packed, packed, offsets, offsets, 6, 6
        refused("packed_attention within", lambda: ff.packed_attention(*given))
        tokens, packing = ff.unpad(torch.zeros(1, 6, dtype=torch.int64), torch.tensor([6]))
        model = ff.make_decoder(5, 1, 8, 16, 1)
        refused("a Packing is given within context", lambda: model(tokens, packing))
        table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1])
        pages = torch.zeros(1, 16, 3, 8)
        given = x[:, :, :1], pages, pages, table, lengths
        refused("paged_attention within", lambda: ff.paged_attention(*given))
        layer, cache = ff.MultiHeadedAttention(1, 8), ff.KVCache(1, 1, 16, 8)
        refused("cache is given", lambda: layer(x[0], x[0], x[0], cache=cache))
        position = ff.PositionalEncoding(8, 0.0, 6 * world - 1)
        refused("start is 1 within", lambda: position(x[0], 1))
        refused(f"pe has {6 * world - 1} positions", lambda: position(x[0]))
        lut, table = torch.ones(3, 8), position.pe[0]
        tokens = torch.zeros(1, 6, dtype=torch.int64)
        refused("positional has .* positions", lambda: ff.embed(tokens, lut, table))
        with own.of_length(6 * world + 1):
            refused("have 6 tokens each", lambda: position(x[0]))
        refused("length is 0", lambda: own.of_length(0).__enter__())
        with own:
            pass
    assert not ff.dispatch.backends.sequences_are_sharded()


def context_edges(folder):
    """A window that ends at the edge of a chunk shows the key beside it; and each process takes the
    dropout seed of the first one.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    own = ff.context_parallel(init_device_mesh("cpu", (world,)), method="ring")
    torch.manual_seed(4)
    tensors = [torch.randn(1, 1, 32 * world, 4, dtype=torch.float64) for _ in range(3)]
    parts = [own.shard(x, 2) for x in tensors]
    dropout = dict(dropout_p=0.5)
    calls = [({"window": (1, 0)},) * 2, ({"window": (0, 1)},) * 2]
    calls.append(({**dropout, "dropout_seed": 0}, {**dropout, "dropout_seed": rank}))
    for whole, here in calls:
        want = ff.scaled_dot_product_attention(*tensors, **whole)
        with own:
            have = ff.scaled_dot_product_attention(*parts, **here)
        torch.testing.assert_close(have, own.shard(want, 2))
