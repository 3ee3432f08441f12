"""What the processes of parallel_worker.py check: functions of a folder that they share."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from training_checks import (  # noqa: F401
    damaged_checkpoints,
    dies,
    interrupted_fit,
    optimizer_of_shards,
    refused,
    resumed_fit,
    resumes,
    uneven_tokens,
)

import fastformer as ff
from fastformer import numerics
from fastformer.dispatch import backends


def close(name, ours, whole, size=0.0):
    """The numerics policy, against the whole in float64; size: the norm below which a gradient is
    the small difference of large terms.
    """
    assert ours.shape == whole.shape and whole.dtype == torch.float64, name
    bound = 1e-10 if ours.dtype == torch.float64 else numerics.RELATIVE[ours.dtype]
    error = float((ours.double() - whole).norm())
    assert error <= bound * max(float(whole.norm()), size), f"{name} differs by {error:.1e}"


def all_close(label, ours, whole):
    """Compare (loss or output, gradients by name)."""
    (out, grads), (want, want_grads) = ours, whole
    close(f"{label}: the output", out, want)
    assert grads.keys() == want_grads.keys()
    size = max(float(g.norm()) for g in want_grads.values()) / 10
    for name, g in grads.items():
        close(f"{label}: d{name}", g, want_grads[name], size)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def gradients(model):
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


RUNS = (("reference", torch.float64), ("triton", torch.float32))


# ---------------------------------------------------------------------------------- data parallel


def a_model(dtype, rows=slice(None), packed=False, **options):
    """The same in every process: a model, its loss, and these rows of a batch of four."""
    torch.manual_seed(0)
    sizes = dict(N=1, d_model=16, d_ff=32, h=4, dropout=0.0) | options
    model = ff.make_model(11, 11, **sizes)
    torch.manual_seed(1)
    src, tgt = torch.randint(1, 11, (4, 6)), torch.randint(1, 11, (4, 8))
    for i in range(4):
        src[i, 6 - i :], tgt[i, 8 - i :] = 0, 0
    compute = ff.SimpleLossCompute(model.generator, ff.LabelSmoothing(11, 0, 0.1))
    return model.to(dtype), compute, ff.Batch(src[rows], tgt[rows], packed=packed)


class WithLoss(nn.Module):
    """The loss as the forward of a module, which find_unused_parameters of DDP needs."""

    def __init__(self, model, compute):
        super().__init__()
        self.model, self.compute = model, compute

    def forward(self, inputs, *rest):
        return self.compute(self.model(*inputs), *rest)


def step(model, compute, batch, ntokens=None):
    """Return the loss. compute: the function of the model's output; None for a `WithLoss`."""
    inputs = [x for x in (batch.src, batch.tgt, batch.src_mask, batch.tgt_mask) if x is not None]
    rest = batch.tgt_y, ntokens or batch.ntokens
    loss = model(inputs, *rest) if compute is None else compute(model(*inputs), *rest)
    loss.backward()
    return loss.detach()


def twice(compute):
    return lambda *given: 2 * compute(*given)


def own_rows(mesh):
    first = 2 * mesh.get_local_rank()
    return slice(first, first + 2)


def wrapped(kind, model, mesh, layers, options):
    """The model under DDP or FSDP2."""
    if kind == "fsdp":
        for module in (*layers, model):
            fully_shard(module, mesh=mesh)
        return model
    return nn.parallel.DistributedDataParallel(model, **options)


def ways():
    yield "fsdp", {}
    for option in (None, "static_graph", "find_unused_parameters"):
        yield "ddp", {option: True} if option else {}


def data_parallel(folder):
    """DDP and FSDP2 on halves of a batch, padded and packed: the loss and the gradients of one
    process with all of it.
    """
    mesh = init_device_mesh("cpu", (2,))
    for packed in (False, True):
        model, compute, batch = a_model(torch.float64, packed=packed)
        expected = step(model, compute, batch), gradients(model)
        for backend, dtype in RUNS:
            for kind, options in ways():
                model, compute, part = a_model(dtype, own_rows(mesh), packed)
                layers = (*model.encoder.layers, *model.decoder.layers)
                doubled = twice(compute)
                if "find_unused_parameters" in options:
                    model, doubled = WithLoss(model, doubled), None
                placed = wrapped(kind, model, mesh, layers, options)
                with ff.use_backend(backend):  # DDP and FSDP2 take the mean of two gradients
                    loss = step(placed, doubled, part, batch.ntokens)
                torch.distributed.all_reduce(loss)
                label = f"{kind}, {options}, {backend}, packed {packed}"
                found = {k.removeprefix("model."): g for k, g in gradients(model).items()}
                all_close(label, (loss / 2, found), expected)


def accumulated(folder):
    """Two halves of the rows of a process, the first of them within `no_sync` of DDP."""
    first = own_rows(init_device_mesh("cpu", (2,))).start
    model, compute, batch = a_model(torch.float64)
    expected = step(model, compute, batch), gradients(model)
    model, compute, one = a_model(torch.float64, slice(first, first + 1))
    _, _, other = a_model(torch.float64, slice(first + 1, first + 2))
    placed, doubled = nn.parallel.DistributedDataParallel(model), twice(compute)
    with ff.use_backend("reference"):
        with placed.no_sync():
            loss = step(placed, doubled, one, batch.ntokens)
        loss += step(placed, doubled, other, batch.ntokens)
    torch.distributed.all_reduce(loss)
    all_close("no_sync", (loss / 2, gradients(model)), expected)


def torch_transformer(folder):
    """An accelerated nn.Transformer under DDP and FSDP2."""
    mesh = init_device_mesh("cpu", (2,))
    src, tgt = drawn(4, 6, 16), drawn(4, 5, 16, seed=1)
    hidden = torch.arange(6) >= torch.tensor([[6], [4], [3], [5]])
    causal = nn.Transformer.generate_square_subsequent_mask(5)

    def trained(kind, dtype, backend, rows=slice(None), options=None):
        torch.manual_seed(0)
        model = nn.Transformer(16, 4, 1, 1, 32, dropout=0.0, batch_first=True).to(dtype)
        ff.accelerate(model, drop_padding=True)
        layers = (*model.encoder.layers, *model.decoder.layers)
        placed = wrapped(kind, model, mesh, layers, options or {}) if kind else model
        padding = dict.fromkeys(("src_key_padding_mask", "memory_key_padding_mask"), hidden[rows])
        with ff.use_backend(backend):
            out = placed(
                src[rows].to(dtype), tgt[rows].to(dtype), tgt_mask=causal.to(dtype), **padding
            )
            (out * drawn(4, 5, 16, seed=3)[rows]).sum().mul(2 if kind else 1).backward()
        return out.detach(), gradients(model)

    out, grads = trained("", torch.float64, "reference")
    rows = own_rows(mesh)
    for backend, dtype in RUNS:
        for kind, options in ways():
            ours = trained(kind, dtype, backend, rows, options)
            all_close(f"{kind}, {options}, {backend}", ours, (out[rows], grads))


# ------------------------------------------------------------------------------- tensor parallel


FORMS = {
    "gelu, grouped": (dict(activation="gelu", kv_heads=2), False),
    "pre-norm": (dict(norm_first=True), False),
    "post-norm, sequences": (dict(norm_first=False), True),
    "pre-norm, rms, sequences": (dict(norm_first=True, norm="rms"), True),
}


def split(model, mesh, sequences):
    """The styles of torch on a model of make_decoder; with `sequences` the residual stream is
    sharded along them.
    """
    over = Shard(1) if sequences else Replicate()
    rowwise = RowwiseParallel(output_layouts=over, use_local_output=not sequences)
    colwise = ColwiseParallel(input_layouts=over)
    styles = {f"self_attn.linears.{i}": colwise for i in range(3)} | {
        "self_attn.linears.3": rowwise
    }
    styles |= {"feed_forward.w_1": colwise, "feed_forward.w_2": rowwise}
    if sequences:
        styles |= {f"sublayer.{i}.norm": SequenceParallel() for i in range(2)}
    for layer in model.decoder.layers:
        parallelize_module(layer, mesh, styles)
    if sequences:
        if isinstance(model.decoder.norm, (ff.LayerNorm, ff.RMSNorm)):
            parallelize_module(model.decoder.norm, mesh, SequenceParallel())
        nothing = None, None  # the mask and the cache
        into = dict(input_layouts=(Replicate(), *nothing), desired_input_layouts=(over, *nothing))
        parallelize_module(model.decoder, mesh, PrepareModuleInput(**into, use_local_output=False))
        out = dict(output_layouts=over, desired_output_layouts=Replicate())
        parallelize_module(model.decoder, mesh, PrepareModuleOutput(**out))


def tensor_parallel(folder):
    """torch's own styles on the layers of a model: attention gets the heads of the process, as
    plain tensors. With sequence parallelism the norms get DTensors.
    """
    mesh = init_device_mesh("cpu", (2,))
    tokens = torch.randint(1, 11, (3, 9), generator=torch.Generator().manual_seed(1))

    def trained(options, dtype, sequences=None):
        torch.manual_seed(0)
        sizes = dict(N=2, d_model=16, d_ff=32, h=4, dropout=0.0) | options
        model = ff.make_decoder(11, **sizes).to(dtype)
        if sequences is not None:
            split(model, mesh, sequences)
        compute = ff.SimpleLossCompute(model.generator, ff.LabelSmoothing(11, 0, 0.1))
        loss = step(model, compute, ff.Batch(None, tokens))
        return loss, gradients(model)

    for name, (options, sequences) in FORMS.items():
        expected = trained(options, torch.float64)
        for backend, dtype in RUNS:
            calls = []
            seen = backends.observe(
                on_call=lambda op, given, calls=calls: calls.append((op, given))
            )
            with ff.use_backend(backend), seen:
                ours = trained(options, dtype, sequences)
            all_close(f"{name}, {backend}", ours, expected)
            heads = [given["query"].shape[1] for op, given in calls if "attention" in op]
            assert heads == [2, 2], heads  # of four, in each of two layers
            norms = [given["input"].shape for op, given in calls if "norm" in op]
            assert len(norms) == 5 - (not options.get("norm_first", True)), norms
            assert all(x == (3, 4 if sequences else 8, 16) for x in norms), norms


def rows_of_dtensors(folder):
    """The ops on rows, split over the batch, over the sequence, of which no two parts are equal, or
    over both: outputs, their placements and gradients.
    """
    line = init_device_mesh("cpu", (2,))
    square = init_device_mesh("cpu", (2, 1))
    x, y, w, w_2 = drawn(3, 5, 8), drawn(3, 5, 8, seed=1), drawn(8), drawn(8, 16)
    gate, labels = drawn(3, 5, 16), torch.arange(15).view(3, 5) % 7
    table, n = drawn(7, 8), dict(reduction="none")
    wide = drawn(3, 5, 2, 4)
    calls = {
        "layer_norm": (dict(input=x, weight=w, bias=w), dict(normalized_shape=8)),
        "rms_norm": (dict(input=wide, weight=wide[0, 0]), dict(normalized_shape=(2, 4))),
        "dropout_add_layer_norm": (dict(input=x, residual=y, weight=w, bias=w, input_bias=w), {}),
        "dropout_add_rms_norm": (dict(input=x, residual=y, weight=w), {}),
        "feed_forward": (dict(input=x, w_1=w_2.T, b_1=gate[0, 0], w_2=w_2, b_2=w), {}),
        "swiglu": (dict(input=x, w=torch.cat([w_2.T, -w_2.T]), b=None, w_2=w_2, b_2=w), {}),
        "gated_activation": (dict(gate=gate, value=gate.flip(0)), {}),
        "cross_entropy": (dict(logits=drawn(3, 5, 7), target=labels), n),
        "linear_cross_entropy": (dict(input=x, linear_weight=table, target=labels), n),
    }
    ways = [(line, [Shard(0)]), (line, [Shard(1)]), (line, [Replicate()])]
    ways += [(square, [Shard(1), Shard(0)])]

    def run(op, tensors, options):
        leaves = {k: t for k, t in tensors.items() if t is not None and t.is_floating_point()}
        for t in leaves.values():
            t.requires_grad_()
        out = getattr(ff, op)(**tensors, **options)
        out = out if isinstance(out, tuple) else (out,)
        sum((whole(o) * drawn(*o.shape, seed=9).to(o.dtype)).sum() for o in out).backward()
        return out, {k: t.grad for k, t in leaves.items()}

    for op, (tensors, options) in calls.items():
        rows = backends.OPERATIONS[op].rows

        def made(dtype, tensors=tensors):
            return {
                k: t if t is None or not t.is_floating_point() else t.detach().to(dtype, copy=True)
                for k, t in tensors.items()
            }

        want, grads = run(op, made(torch.float64), options)
        for backend, dtype in RUNS:
            for mesh, places in ways:
                given = {
                    k: t if t is None else distribute_tensor(
                        t, mesh, places if k in rows else [Replicate()] * mesh.ndim
                    )
                    for k, t in made(dtype).items()
                }  # fmt: skip
                with ff.use_backend(backend):
                    out, found = run(op, given, options)
                label = f"{op}, {backend}, {places}"
                for one, other in zip(out, want, strict=True):
                    assert list(one.placements) == places, label
                    close(label, whole(one).detach(), other.detach())
                for k, g in found.items():
                    assert g.placements == given[k].placements, f"{label}: d{k} {g.placements}"
                    close(f"{label}: d{k}", whole(g), grads[k])


def dropout_of_dtensors(folder):
    """Each device drops elements of its own rows, from a seed or without, the same as its backward
    does; replicated rows drop the same everywhere.
    """
    mesh, zero = init_device_mesh("cpu", (2,)), torch.zeros(4, 64)
    for backend in ("auto", "triton"):
        for seed in (None, 3):
            kept = {}
            for place in (Shard(0), Replicate()):
                torch.manual_seed(0)
                x = distribute_tensor(torch.ones(4, 64), mesh, [place]).requires_grad_()
                residual = distribute_tensor(zero, mesh, [place])
                weight = distribute_tensor(torch.ones(64), mesh, [Replicate()])
                with ff.use_backend(backend):
                    _, out = ff.dropout_add_rms_norm(x, residual, weight, 0.5, dropout_seed=seed)
                    out.full_tensor().sum().backward()
                kept[place] = out.full_tensor() != 0
                assert torch.equal(x.grad.full_tensor() != 0, kept[place]), (backend, seed)
                assert 64 < int(kept[place].sum()) < 192
            halves = kept[Shard(0)].chunk(2)
            assert not torch.equal(*halves), (backend, seed)


def refusals(folder):
    """Each process raises the same error, which says what to change."""
    mesh = init_device_mesh("cpu", (2,))

    def placed(x, place):
        return distribute_tensor(x, mesh, [place])

    q, x, w = drawn(2, 2, 4, 8), drawn(4, 4, 8), torch.ones(8)
    heads, rows, of_all = placed(q, Shard(1)), placed(x, Shard(0)), placed(w, Replicate())
    gated = ff.PositionwiseFeedForward(8, 16, activation="swiglu")
    parallelize_module(gated, mesh, {"w_1": ColwiseParallel(), "w_2": RowwiseParallel()})
    labels = placed(torch.zeros(4, 4, dtype=torch.long), Shard(0))
    for message, call in {
        r"scaled_dot_product_attention is given a DTensor; expected .* use_local_output=True": (
            lambda: ff.scaled_dot_product_attention(heads, heads, heads)
        ),
        r"rotary_embedding is given a DTensor": lambda: ff.rotary_embedding(
            heads, heads, torch.ones(4, 8), torch.ones(4, 8)
        ),
        r"layer_norm: weight is a plain tensor beside DTensors": lambda: ff.layer_norm(rows, 8, w),
        r"layer_norm: input has placement Shard\(dim=2\).*; expected .* its first 2 dim": lambda: (
            ff.layer_norm(placed(x, Shard(2)), 8, of_all)
        ),
        r"rms_norm: input has placement Shard.dim=2.*; expected .* its first 2 dim": lambda: (
            ff.rms_norm(placed(drawn(2, 3, 4, 8), Shard(2)), (4, 8))
        ),
        r"cross_entropy: reduction is 'mean' beside DTensors; expected 'none'": lambda: (
            ff.cross_entropy(rows, labels)
        ),
        r"activation is 'swiglu' and w_1 returns 16 of 32 features": lambda: gated(x),
    }.items():
        refused(message, call)
    gated = ff.PositionwiseFeedForward(8, 16, dropout=0.0, activation="swiglu")
    expected = gated(x)
    for module in (gated.w_1, gated):  # whose weights are complete in its forward
        fully_shard(module, mesh=mesh)
    torch.testing.assert_close(gated(x), expected)
