"""What the processes of parallel_worker.py check: functions of a folder that they share."""

import copy
import itertools
import math
import os
import re

import torch
import torch.distributed.checkpoint as dcp
from context_checks import context, context_refusals, context_seed  # noqa: F401
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fastformer as ff
from fastformer.copy_task import Settings, train
from fastformer.parallel_copy_task import WAYS, Alone, Parallel

BACKENDS = ("reference", "triton")
SEED, P = 11, 0.4


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(name, ours, whole, bound=2e-5):
    """Require |ours - whole| <= bound * (1 + |whole|), and the same infinities."""
    assert ours.shape == whole.shape, f"{name}: {ours.shape} instead of {whole.shape}"
    assert ours.dtype == whole.dtype, f"{name}: {ours.dtype} instead of {whole.dtype}"
    error = ((ours - whole).abs() / (1 + whole.abs())).nan_to_num(0.0, posinf=1e9)
    same = torch.equal(ours.isfinite(), whole.isfinite())
    assert same and (error.numel() == 0 or float(error.detach().max()) <= bound), (
        f"{name}: differs by {error}"
    )


def compare(label, mesh, function, tensors, placements, outputs=None):
    """Compare a function of whole tensors with that of DTensors, and the gradients of both.

    tensors: by name. placements: by name, for those that are distributed; others stay plain.
    outputs: the placements expected of the first output.
    """
    results = []
    for sharded in (False, True):
        leaves, given = {}, {}
        for name, x in tensors.items():
            x = x.clone()
            if sharded and name in placements:
                x = distribute_tensor(x, mesh, placements[name])
            if x.is_floating_point() and (not sharded or name in placements):
                leaves[name] = x.requires_grad_()
            given[name] = x
        out = function(**given)
        out = out if isinstance(out, tuple) else (out,)
        if sharded and outputs is not None:
            assert out[0].placements == tuple(outputs), f"{label}: {out[0].placements}"
        full = [x.full_tensor() if isinstance(x, DTensor) else x for x in out]
        weighted = (x * drawn(*x.shape, seed=5 + i) for i, x in enumerate(full))
        loss = sum(x.nan_to_num().sum() for x in weighted)
        loss.backward()
        results.append((full, {name: x.grad for name, x in leaves.items()}))
    (whole, grads), (ours, own) = results
    for i, (x, y) in enumerate(zip(ours, whole)):
        close(f"{label}: output {i}", x, y)
    for name, g in own.items():
        assert g is not None, f"{label}: {name} has no gradient"
        assert g.placements == tuple(placements[name]), f"{label}: d{name} {g.placements}"
        close(f"{label}: d{name}", g.full_tensor(), grads[name])


def meshes():
    """Yield each mesh of one dimension, and one of two."""
    world = torch.distributed.get_world_size()
    yield init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    if world == 4:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def settings():
    """Yield each mesh with a backend: the interpreted kernels on the last one alone, as the rules
    stand in front of both backends.
    """
    *others, last = meshes()
    yield from ((mesh, "reference") for mesh in (*others, last))
    yield last, "triton"


def placed(mesh, *placements):
    """Return the placements, the last of them for the other dimensions of the mesh as well."""
    return [*placements[: mesh.ndim], *[placements[-1]] * (mesh.ndim - len(placements))]


def attention(folder):
    """Over batch, heads and queries, and over two of them on a mesh of two dimensions."""
    q, k, v = drawn(4, 8, 64, 8), drawn(4, 4, 20, 8, seed=1), drawn(4, 4, 20, 8, seed=2)
    options = {
        "plain": {},
        "causal, window, alibi": dict(
            is_causal=True, window=(9, None), alibi_slopes=drawn(8, seed=3).abs()
        ),
        "mask, lengths, bottom right": dict(
            attn_mask=drawn(4, 1, 64, 20, seed=4) > -1,
            key_lengths=torch.tensor([20, 3, 0, 17]),
            is_causal=True,
            causal_alignment="bottom_right",
        ),
        "bias, softcap": dict(bias=drawn(8, 64, 20, seed=6), softcap=2.0),
        "sinks, dropout": dict(sinks=drawn(8, seed=7), dropout_p=P, dropout_seed=SEED),
    }
    ways = {
        "b": Shard(0),
        "h": Shard(1),
    }
    for mesh, backend in settings():
        few = {n: options[n] for n in ("sinks, dropout", "mask, lengths, bottom right")}
        chosen = options if backend == "reference" else few
        for way, (name, given) in itertools.product(ways, chosen.items()):
            placement = placed(mesh, ways[way], Shard(1 if way != "h" else 0))
            keys = [p if p.dim != 2 else Replicate() for p in placement]
            tensors = {"query": q, "key": k, "value": v}
            places = {"query": placement, "key": keys, "value": keys}
            for option in ("bias", "sinks"):
                if option in given:
                    tensors[option] = given[option]
                    places[option] = [Replicate()] * mesh.ndim
            rest = {n: x for n, x in given.items() if n not in tensors}

            def function(rest=rest, **tensors):
                return ff.scaled_dot_product_attention(
                    **tensors, **rest, enable_gqa=True, return_lse=True
                )

            with ff.use_backend(backend):
                compare(
                    f"{backend}, {mesh.shape}, {way}: {name}",
                    mesh,
                    function,
                    tensors,
                    places,
                    placement,
                )


def norms(folder):
    """Over the rows, of each norm; features that are sharded are exchanged for rows."""
    x, r = drawn(4, 6, 8), drawn(4, 6, 8, seed=1)
    w, b = drawn(8, seed=2), drawn(8, seed=3)
    for mesh, backend in settings():
        whole = [Replicate()] * mesh.ndim
        for first in (Shard(0), Shard(1), Shard(2)):
            placement = placed(mesh, first, Shard(1) if first.dim == 0 else Shard(0))
            expected = [Shard(0) if p.dim == 2 else p for p in placement]
            places = {"input": placement, "weight": whole, "bias": whole}
            label = f"{backend}, {mesh.shape}, {placement}: "
            with ff.use_backend(backend):
                compare(
                    label + "layer_norm",
                    mesh,
                    lambda **t: ff.layer_norm(normalized_shape=[8], **t),
                    {"input": x, "weight": w, "bias": b},
                    places,
                    expected,
                )
                compare(
                    label + "rms_norm",
                    mesh,
                    lambda **t: ff.rms_norm(normalized_shape=[8], **t),
                    {"input": x, "weight": w},
                    {"input": placement, "weight": whole},
                    expected,
                )
                affine = {"weight": w, "bias": b}
                for op, parameters in (
                    (ff.dropout_add_layer_norm, affine),
                    (ff.dropout_add_rms_norm, {"weight": w}),
                ):
                    tensors = {"input": x, "residual": r, **parameters}
                    for p in (0.0, P):
                        compare(
                            label + f"{op.__name__} {p}",
                            mesh,
                            lambda op=op, p=p, **t: op(dropout_p=p, dropout_seed=SEED, **t),
                            tensors,
                            {n: places.get(n, placement) for n in tensors},
                            expected,
                        )


def feed_forward(folder):
    """Over d_ff, by columns then by rows, and over the tokens."""
    x, w_2, b_2 = drawn(4, 6, 8), drawn(8, 64, seed=3), drawn(8, seed=4)
    for mesh, backend in settings():
        whole = [Replicate()] * mesh.ndim
        rest = [Replicate()] * (mesh.ndim - 1)
        for op, p in (("feed_forward", 0.0), ("feed_forward", P), ("geglu", P), ("swiglu", P)):
            gated = op != "feed_forward"
            first = ("w", "b") if gated else ("w_1", "b_1")
            rows = 128 if gated else 64
            tensors = dict(zip(first, (drawn(rows, 8, seed=1), drawn(rows, seed=2))))
            tensors |= {"input": x, "w_2": w_2, "b_2": b_2}

            def function(op=op, p=p, **given):
                return getattr(ff, op)(dropout_p=p, dropout_seed=SEED, **given)

            columns = [*rest, Shard(0)]
            places = {"w_2": [*rest, Shard(1)], "b_2": whole}
            places |= {name: columns for name in first}
            tokens = placed(mesh, Shard(0), Shard(1))
            with ff.use_backend(backend):
                for given in (whole, [*rest, Shard(0)], tokens):
                    kept = [*given[:-1], Partial()]
                    compare(
                        f"{backend}, {mesh.shape}, {op} {p} over d_ff of {given}",
                        mesh,
                        function,
                        tensors,
                        places | {"input": given},
                        kept,
                    )
                everywhere = {name: whole for name in tensors}
                compare(
                    f"{backend}, {mesh.shape}, {op} {p} over tokens",
                    mesh,
                    function,
                    tensors,
                    everywhere | {"input": tokens},
                    tokens,
                )


def embedding(folder):
    """Over the vocabulary, the features, and the tokens."""
    tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(0))
    weight, positional = drawn(11, 16, seed=1), drawn(7, 16, seed=2)
    for mesh, backend in settings():
        whole = [Replicate()] * mesh.ndim
        rest = [Replicate()] * (mesh.ndim - 1)
        ways = {
            "the vocabulary": ({"weight": [*rest, Shard(0)]}, [*rest, Partial()]),
            "the features": ({"weight": [*rest, Shard(1)]}, [*rest, Shard(2)]),
            "the batch": ({"tokens": [*rest, Shard(0)]}, [*rest, Shard(0)]),
            "the positions": ({"tokens": [*rest, Shard(1)]}, [*rest, Shard(1)]),
        }
        for (way, (places, expected)), p in itertools.product(ways.items(), (0.0, P)):
            with ff.use_backend(backend):
                compare(
                    f"{backend}, {mesh.shape}, embed {p} over {way}",
                    mesh,
                    lambda p=p, **t: ff.embed(**t, dropout_p=p, dropout_seed=SEED, padding_idx=3),
                    {"tokens": tokens, "weight": weight, "positional": positional},
                    {"weight": whole, "positional": whole} | places,
                    expected,
                )


def losses(folder):
    """Over the vocabulary, whose lse is merged, and over the tokens."""
    x, w, b = drawn(4, 6, 8), drawn(11, 8, seed=1), drawn(11, seed=2)
    target = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(0))
    target[1] = 5
    for mesh, backend in settings():
        whole = [Replicate()] * mesh.ndim
        rest = [Replicate()] * (mesh.ndim - 1)
        for reduction, smoothing in itertools.product(("mean", "sum", "none"), ("uniform", "kl")):
            options = dict(
                reduction=reduction, ignore_index=5, label_smoothing=0.2, smoothing=smoothing
            )
            label = f"{backend}, {mesh.shape}, {reduction}, {smoothing} over "
            with ff.use_backend(backend):
                for way, split in (("the vocabulary", Shard(0)), ("tokens", Replicate())):
                    tokens = placed(mesh, Shard(0), Shard(1))
                    compare(
                        label + way,
                        mesh,
                        lambda options=options, **t: ff.linear_cross_entropy(**t, **options),
                        {"input": x, "linear_weight": w, "linear_bias": b, "target": target},
                        {
                            "input": tokens,
                            "linear_weight": [*rest, split],
                            "linear_bias": [*rest, split],
                        },
                    )
                for way, split in (("the vocabulary", Shard(2)), ("tokens", Shard(1))):
                    compare(
                        label + "logits over " + way,
                        mesh,
                        lambda options=options, **t: ff.cross_entropy(**t, **options),
                        {"logits": drawn(4, 6, 11, seed=3), "target": target},
                        {"logits": [*whole[:-1], split]},
                    )


def a_model(**options):
    """The same in every process: a model, its loss, and a batch."""
    torch.manual_seed(0)
    sizes = dict(N=2, d_model=16, d_ff=64, h=4, dropout=P) | options
    model = ff.make_model(11, 11, **sizes)
    torch.manual_seed(1)
    src, tgt = torch.randint(0, 11, (4, 6)), torch.randint(0, 11, (4, 8))
    compute = ff.SimpleLossCompute(model.generator, ff.LabelSmoothing(11, 0, 0.1))
    return model, compute, ff.Batch(src, tgt)


def step(model, compute, batch):
    """Return the loss, and the gradient of each parameter, in full."""
    torch.manual_seed(2)
    out = model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
    loss = compute(out, batch.tgt_y, batch.ntokens)
    loss.backward()
    grads = {}
    for name, p in model.named_parameters():
        grads[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return loss.detach(), grads


def tensor_parallel(folder):
    """A parallelized model has the loss and the gradients of the whole one, dropout on."""
    forms = {
        "pre-norm": {},
        "post-norm, gelu, tied": dict(
            norm_first=False, activation="gelu", tie_generator=True, tie_source=True
        ),
        "swiglu, grouped": dict(activation="swiglu", kv_heads=2, learned_positions=True),
    }
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    runs = [(form, "reference") for form in forms] + [("swiglu, grouped", "triton")]
    for form, backend in runs:
        with ff.use_backend(backend):
            loss, grads = step(*a_model(**forms[form]))
            model, compute, batch = a_model(**forms[form])
            ff.parallelize(model, mesh)
            ours, own = step(model, compute, batch)
        close(f"{form}, {backend}: loss", ours, loss, 1e-5)
        assert own.keys() == grads.keys()
        for name, g in own.items():
            close(f"{form}, {backend}: d{name}", g, grads[name])


def small(steps):
    return Settings(steps=steps, batch=4, length=6, N=1, d_model=16, d_ff=64, h=4, dropout=P)


def copy_task(folder):
    """The losses of the ways are those of one process, over 20 steps with dropout."""
    for backend, steps in (("reference", 20), ("triton", 2)):
        settings = Settings(
            steps=steps, batch=4, length=6, N=1, d_model=16, d_ff=64, h=4, dropout=P
        )
        alone = train(settings, backend, math.inf, False, Alone())
        assert len(alone.losses) == steps
        for way in WAYS:
            run = train(settings, backend, math.inf, False, Parallel(way, settings))
            worst = max(abs(a - b) for a, b in zip(alone.losses, run.losses, strict=True))
            assert worst <= 1e-5, f"{backend}, {way}: {worst:.1e}"
            assert run.decoded == alone.decoded


def torch_transformer(folder):
    """An accelerated nn.Transformer, parallelized, computes what it did, dropout on."""
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    src, tgt = drawn(4, 6, 16), drawn(4, 5, 16, seed=1)
    hidden = torch.arange(6) >= torch.tensor([[6], [4], [1], [5]])
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    for backend, first in itertools.product(BACKENDS, (True, False)):
        results = []
        for sharded in (False, True):
            torch.manual_seed(0)
            model = nn.Transformer(16, 4, 1, 1, 64, dropout=P, batch_first=True, norm_first=first)
            ff.accelerate(model)
            if sharded:
                ff.parallelize(model, mesh)
            torch.manual_seed(2)
            with ff.use_backend(backend):
                x = src.clone().requires_grad_()
                out = model(
                    x,
                    tgt,
                    tgt_mask=causal,
                    src_key_padding_mask=hidden,
                    memory_key_padding_mask=hidden,
                )
                (out * drawn(*out.shape, seed=3)).sum().backward()
            grads = {"src": x.grad} | {n: p.grad for n, p in model.named_parameters()}
            results.append((out, grads))
        (whole, grads), (ours, own) = results
        close(f"{backend}: output", ours, whole)
        for name, g in own.items():
            g = g.full_tensor() if isinstance(g, DTensor) else g
            close(f"{backend}: d{name}", g, grads[name])


def layouts(folder):
    """torch.distributed.checkpoint takes a model from one layout to another: of tensor parallelism,
    of both that and FSDP2, and of one process.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    options = dict(activation="swiglu", tie_generator=True)
    whole = a_model(**options)[0].state_dict()
    model, *_ = a_model(**options)
    ff.parallelize(model, mesh["tp"])
    dcp.save(model.state_dict(), checkpoint_id=str(folder / "tp"))
    both = a_model(**options)[0]
    with torch.no_grad():
        for p in both.parameters():
            p.zero_()
    ff.parallelize(both, mesh["tp"])
    state = both.state_dict()
    dcp.load(state, checkpoint_id=str(folder / "tp"))
    both.load_state_dict(state)
    plain = {name: torch.zeros_like(x) for name, x in whole.items()}
    dcp.load(plain, checkpoint_id=str(folder / "tp"))
    for name, x in whole.items():
        assert torch.equal(plain[name], x), name
        ours = state[name]
        assert torch.equal(ours.full_tensor() if isinstance(ours, DTensor) else ours, x), name


def composed(folder):
    """FSDP2 over one dimension of a mesh, tensor parallelism over the other, and checkpointing: the
    loss and the gradients of the whole batch on one process.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    loss, grads = step(*a_model())
    model, compute, batch = a_model()
    ff.parallelize(model, mesh["tp"])
    for layer in (*model.encoder.layers, *model.decoder.layers):
        checkpoint(layer)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    rank = mesh["dp"].get_local_rank()
    part = copy.copy(batch)
    for name in ("src", "tgt", "src_mask", "tgt_mask", "tgt_y"):
        setattr(part, name, getattr(batch, name)[2 * rank : 2 * rank + 2])
    with ff.sequences_from(2 * rank):
        ours, own = step(model, lambda *args: 2 * compute(*args), part)
    torch.distributed.all_reduce(ours, group=mesh["dp"].get_group())
    close("loss", ours / 2, loss, 1e-5)
    for name, g in own.items():
        close(f"d{name}", g, grads[name])


def refusals(folder):
    """Each rank raises the same error, which says what to change."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    square = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))

    def heads(h):
        return lambda: ff.parallelize(a_model(h=h)[0], mesh)

    def op(name, mesh=mesh, **arguments):
        given = {
            key: distribute_tensor(*value) if isinstance(value, tuple) else value
            for key, value in arguments.items()
        }
        return lambda: getattr(ff, name)(**given)

    def differ():
        torch.manual_seed(rank)
        try:
            ff.require_same_ranks()
        finally:
            torch.manual_seed(0)

    x = drawn(4, 4, 8)
    q = drawn(4, 6, 16, 8)
    keys = (q, mesh, [Shard(2)])
    weight = nn.Parameter(torch.ones(8))
    other = nn.Linear(2, 2 + rank)
    torch.manual_seed(0)
    for message, call in {
        r"h is 1; expected a multiple of 4": heads(1),
        r"d_ff is 36; expected a multiple of 64": lambda: ff.parallelize(
            a_model(d_ff=36, dropout=0.1)[0], mesh
        ),
        r"dimensions dp, tp; expected one, such as mesh\['tp'\]": lambda: ff.parallelize(
            a_model()[0], square
        ),
        r"rank 1 has the seed of torch.manual_seed 1, and rank 0 0": differ,
        r"rank 1 has the model's parameters": lambda: ff.require_same_ranks(other),
        r"plan names 'nothing'": lambda: ff.parallelize(a_model()[0], mesh, {"nothing": None}),
        r"query has 6 heads; expected a multiple of the 4": op(
            "scaled_dot_product_attention", query=(q, mesh, [Shard(1)]), key=q, value=q
        ),
        r"key has placement .*split over the queries; expected Replicate": op(
            "scaled_dot_product_attention", query=keys, key=keys, value=keys
        ),
        r"no other dimension divides by the 4": op(
            "layer_norm", input=(drawn(3, 8), mesh, [Shard(1)]), normalized_shape=[8]
        ),
        r"weight is a parameter that is no DTensor beside input": op(
            "layer_norm", input=(x, mesh, [Shard(0)]), normalized_shape=[8], weight=weight
        ),
        r"weight is on the mesh": op(
            "rms_norm",
            input=(x, mesh, [Shard(0)]),
            normalized_shape=[8],
            weight=(torch.ones(8), square["tp"], [Replicate()]),
        ),
    }.items():
        try:
            call()
        except ValueError as error:
            found = str(error)
        else:
            found = "no error"
        assert re.search(message, found), f"{found!r} instead of {message!r}"
        assert "\n" not in found


def dies(folder):
    """A rank dies in the middle of a run: the others end with a reason, and do not hang."""
    settings = small(12)
    way = Parallel("fsdp", settings, folder / "checkpoints", 4)
    before = way.end_step

    def end_step(losses):
        before(losses)
        if len(losses) == 9 and way.rank == 1:
            os._exit(3)

    way.end_step = end_step
    try:
        train(settings, "reference", math.inf, False, way)
    except RuntimeError:
        raise SystemExit from None  # there is no group any more
    raise AssertionError("the run went on without rank 1")


def count_calls(of, name):
    """Return a list that grows by one with each call of a method."""
    calls, method = [], getattr(of, name)

    def counted(*args):
        calls.append(name)
        return method(*args)

    setattr(of, name, counted)
    return calls


def resumes(folder):
    """The run of `dies` goes on from its last checkpoint, with the losses of an uninterrupted one,
    and by another way as well.
    """
    settings = small(12)
    alone = train(settings, "reference", math.inf, False, Alone())
    for way in ("tensor", "fsdp"):
        own = Parallel(way, settings, folder / "checkpoints", 100)
        trained = count_calls(own, "part")
        run = train(settings, "reference", math.inf, False, own)
        assert len(trained) == 4, f"{way} trained {len(trained)} steps"
        worst = max(abs(a - b) for a, b in zip(alone.losses, run.losses, strict=True))
        assert worst <= 1e-5, f"{way}: {worst:.1e}"
