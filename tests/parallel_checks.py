"""What the processes of parallel_worker.py check: functions of a folder that they share."""

import itertools
import math

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fastformer as ff
from fastformer.copy_task import Settings, train
from fastformer.parallel_copy_task import WAYS, Parallel
from fastformer.sharding import halves

BACKENDS = ("reference", "triton")
SEED, P = 11, 0.0


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
    for mesh, backend in itertools.product(meshes(), BACKENDS):
        for way, (name, given) in itertools.product(ways, options.items()):
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
    for mesh, backend in itertools.product(meshes(), BACKENDS):
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
                for p in (0.0, P):
                    compare(
                        label + f"dropout_add_layer_norm {p}",
                        mesh,
                        lambda p=p, **t: ff.dropout_add_layer_norm(
                            dropout_p=p, dropout_seed=SEED, **t
                        ),
                        {"input": x, "residual": r, "weight": w, "bias": b},
                        places | {"residual": placement},
                        expected,
                    )


def feed_forward(folder):
    """Over d_ff, by columns then by rows, and over the tokens."""
    x, w_2, b_2 = drawn(4, 6, 8), drawn(8, 64, seed=3), drawn(8, seed=4)
    for mesh, backend in itertools.product(meshes(), BACKENDS):
        whole = [Replicate()] * mesh.ndim
        rest = [Replicate()] * (mesh.ndim - 1)
        for op, p in itertools.product(("feed_forward", "geglu", "swiglu"), (0.0, P)):
            gated = op != "feed_forward"
            first = ("w", "b") if gated else ("w_1", "b_1")
            rows = 128 if gated else 64
            tensors = dict(zip(first, (drawn(rows, 8, seed=1), drawn(rows, seed=2))))
            tensors |= {"input": x, "w_2": w_2, "b_2": b_2}

            def function(op=op, p=p, **given):
                return getattr(ff, op)(dropout_p=p, dropout_seed=SEED, **given)

            columns = [*rest, halves(0) if gated else Shard(0)]
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
    for mesh, backend in itertools.product(meshes(), BACKENDS):
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
    for mesh, backend in itertools.product(meshes(), BACKENDS):
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
                        lambda **t: ff.linear_cross_entropy(**t, **options),
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
                        lambda **t: ff.cross_entropy(**t, **options),
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
    for form, backend in itertools.product(forms, BACKENDS):
        with ff.use_backend(backend):
            loss, grads = step(*a_model(**forms[form]))
            model, compute, batch = a_model(**forms[form])
            ff.parallelize(model, mesh)
            ours, own = step(model, compute, batch)
        close(f"{form}, {backend}: loss", ours, loss, 1e-5)
        assert own.keys() == grads.keys()
        for name, g in own.items():
            close(f"{form}, {backend}: d{name}", g, grads[name])


def copy_task(folder):
    """The losses of the ways are those of one process, over 20 steps with dropout."""
    for backend, steps in (("reference", 20), ("triton", 2)):
        settings = Settings(
            steps=steps, batch=4, length=6, N=1, d_model=16, d_ff=64, h=4, dropout=P
        )
        alone = train(settings, backend, math.inf, False)
        assert len(alone.losses) == steps
        for way in WAYS:
            run = train(settings, backend, math.inf, False, Parallel(way, settings))
            worst = max(abs(a - b) for a, b in zip(alone.losses, run.losses, strict=True))
            assert worst <= 1e-5, f"{backend}, {way}: {worst:.1e}"
            assert run.decoded == alone.decoded
