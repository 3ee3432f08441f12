"""What the processes of parallel_worker.py check: functions of a folder that they share."""

import copy
import os
import re
import shutil
import time
import warnings
from dataclasses import replace

import torch
import torch.distributed.checkpoint as dcp
from context_checks import (  # noqa: F401
    agree,
    context,
    context_edges,
    context_model,
    context_no_keys,
    context_one_row,
    context_order,
    context_refusals,
    context_seed,
    context_within,
    refused,
    trained,
)
from dtensor_checks import (  # noqa: F401
    P,
    any_strides,
    attention,
    drawn,
    embedding,
    feed_forward,
    gated_activation,
    gated_halves,
    losses,
    masks,
    no_targets,
    norms,
    one_device,
    other_attention,
    rotary,
)
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from training_checks import (  # noqa: F401
    interrupted_fit,
    optimizer_of_shards,
    resumed_fit,
    uneven_tokens,
)

import benchmarks.parallel_worker as measured
import fastformer as ff
from fastformer import numerics
from fastformer.training.copy_task import Settings
from fastformer.training.parallel_copy_task import Parallel


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


def a_model(
    batch=4, decoder=False, dtype=torch.float64, sinks=False, packed=False, rows=None, **options
):
    """The same in every process: a model, its loss, and a batch; without padding if packed. rows:
    those of the batch that it holds.
    """
    torch.manual_seed(0)
    sizes = dict(N=2, d_model=16, d_ff=64, h=4, dropout=P) | options
    model = ff.make_decoder(11, **sizes) if decoder else ff.make_model(11, 11, **sizes)
    for module in model.modules() if sinks else ():
        if isinstance(module, ff.MultiHeadedAttention):
            module.sinks = torch.nn.Parameter(torch.randn(module.h))
    torch.manual_seed(1)
    src, tgt = torch.randint(0, 11, (batch, 6)), torch.randint(0, 11, (batch, 8))
    if packed:  # the rows differ in length; three have 15 and 18 tokens, two have 11 and 13
        src, tgt = (x.clamp_min(1) for x in (src, tgt))
        for i in range(batch):
            src[i, 6 - i :], tgt[i, 8 - i :] = 0, 0
    compute = ff.SimpleLossCompute(model.generator, ff.LabelSmoothing(11, 0, 0.1))
    src, tgt = (x if rows is None else x[rows] for x in (src, tgt))
    return model.to(dtype), compute, ff.Batch(None if decoder else src, tgt, packed=packed)


def step(model, compute, batch):
    """Return the loss, and the gradient of each parameter, in full."""
    torch.manual_seed(2)
    inputs = [x for x in (batch.src, batch.tgt, batch.src_mask, batch.tgt_mask) if x is not None]
    loss = compute(model(*inputs), batch.tgt_y, batch.ntokens)
    loss.backward()
    return loss.detach(), in_full(model)


def in_full(model):
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


def tensor_parallel(folder):
    """A parallelized model has the loss and the gradients of the whole one, dropout on."""
    forms = {
        "pre-norm": {},
        "post-norm, gelu, tied": dict(
            norm_first=False, activation="gelu", tie_generator=True, tie_source=True
        ),
        "swiglu, grouped": dict(activation="swiglu", kv_heads=2, learned_positions=True, N=1),
        "a batch that does not divide": dict(batch=3, tie_generator=True),
        "rotary": dict(decoder=True, positions="rotary", qk_norm=True, N=1),
        "decoder, sinks": dict(decoder=True, norm="rms", activation="swiglu", sinks=True),
    }
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    runs = [(form, "reference") for form in forms] + [("swiglu, grouped", "triton")]
    for form, backend in runs:
        whole = step(*a_model(**forms[form]))
        dtype = torch.float64 if backend == "reference" else torch.float32
        model, compute, batch = a_model(**forms[form], dtype=dtype)
        ff.parallelize(model, mesh)
        with ff.use_backend(backend):
            all_close(f"{form}, {backend}", step(model, compute, batch), whole)


def small(steps):
    return Settings(steps=steps, batch=4, length=6, N=1, d_model=16, d_ff=64, h=4, dropout=P)


def torch_transformer(folder):
    """An accelerated nn.Transformer, parallelized, computes what it did, dropout on; with FSDP2
    over another dimension of the mesh as well.
    """
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    src, tgt = drawn(4, 6, 16), drawn(4, 5, 16, seed=1)
    hidden = torch.arange(6) >= torch.tensor([[6], [4], [1], [5]])
    causal = nn.Transformer.generate_square_subsequent_mask(5)

    def trained(way, norm_first, rows=slice(None), scale=1):
        dtype = torch.float32 if way == "triton" else torch.float64
        torch.manual_seed(0)
        model = nn.Transformer(16, 4, 1, 1, 64, dropout=P, batch_first=True, norm_first=norm_first)
        ff.accelerate(model.to(dtype))
        if way != "alone":
            ff.parallelize(model, mesh["tp"])
        if way == "fsdp":
            for layer in (*model.encoder.layers, *model.decoder.layers):
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        torch.manual_seed(2)
        x, y = (part[rows].to(dtype, copy=True).requires_grad_() for part in (src, tgt))
        padding = dict.fromkeys(("src_key_padding_mask", "memory_key_padding_mask"), hidden[rows])
        with ff.use_backend("triton" if way == "triton" else "reference"):
            out = model(x, y, tgt_mask=causal.to(dtype), **padding)
            (scale * out * drawn(4, 5, 16, seed=3)[rows]).sum().backward()
        return out.detach(), in_full(model) | {"src": x.grad / scale, "tgt": y.grad / scale}

    for norm_first in (True, False):
        out, grads = whole = trained("alone", norm_first)
        for way in ("reference", "triton"):
            all_close(f"{way}, {norm_first}", trained(way, norm_first), whole)
        first = 2 * mesh["dp"].get_local_rank()
        rows = slice(first, first + 2)
        with ff.sequences_from(first):
            ours = trained("fsdp", norm_first, rows, mesh["dp"].size())
        part = grads | {name: grads[name][rows] for name in ("src", "tgt")}
        all_close(f"fsdp, {norm_first}", ours, (out[rows], part))


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
    fully_shard(both, mesh=mesh["dp"])
    state = both.state_dict()
    dcp.load(state, checkpoint_id=str(folder / "tp"))
    both.load_state_dict(state)
    state = both.state_dict()
    plain = {name: torch.zeros_like(x) for name, x in whole.items()}
    dcp.load(plain, checkpoint_id=str(folder / "tp"))
    for name, x in whole.items():
        assert torch.equal(plain[name], x), name
        ours = state[name]
        assert torch.equal(ours.full_tensor() if isinstance(ours, DTensor) else ours, x), name


def halves(model, compute, batch, mesh):
    """Return the loss and the gradients of a batch of four, of which each of two processes has a
    half.
    """
    first = 2 * mesh.get_local_rank()
    part = copy.copy(batch)
    for name in ("src", "tgt", "src_mask", "tgt_mask", "tgt_y"):
        x = getattr(batch, name)
        setattr(part, name, None if x is None else x[first : first + 2])
    with ff.sequences_from(first):
        # DDP and FSDP2 take the mean of the gradients of two.
        loss, grads = step(model, lambda *args: 2 * compute(*args), part)
    torch.distributed.all_reduce(loss, group=mesh.get_group())
    return loss / 2, grads


def data_parallel(folder):
    """DDP and FSDP2 on halves of a batch, dropout on: the loss and the gradients of one process."""
    mesh = init_device_mesh("cpu", (2,))
    sizes = dict(N=1, h=2, d_ff=32)
    whole = step(*a_model(**sizes))
    for backend, kind in (("reference", "ddp"), ("triton", "ddp"), ("reference", "fsdp")):
        dtype = torch.float64 if backend == "reference" else torch.float32
        model, compute, batch = a_model(**sizes, dtype=dtype)
        if kind == "fsdp":
            for layer in (*model.encoder.layers, *model.decoder.layers, model):
                fully_shard(layer, mesh=mesh)
        parallel = nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model
        with ff.use_backend(backend):
            loss, _ = halves(parallel, compute, batch, mesh)
        all_close(f"{kind}, {backend}", (loss, in_full(model)), whole)


def composed(folder):
    """FSDP2 over one dimension of a mesh, tensor parallelism over the other, and checkpointing: the
    loss and the gradients of the whole batch on one process.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for options in ({}, dict(decoder=True)):
        whole = step(*a_model(**options))
        model, compute, batch = a_model(**options)
        ff.parallelize(model, mesh["tp"])
        for name in ("encoder", "decoder"):
            for layer in getattr(getattr(model, name, None), "layers", ()):
                checkpoint(layer)
                fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        ours = halves(model, compute, batch, mesh["dp"])
        all_close(f"{options}", ours, whole)


def packed_batches(folder):
    """Packed batches by tensor parallelism, dropout on, and by DDP and FSDP2, each process with
    half of the rows: the loss and the gradients of one process.
    """
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    group = mesh.get_group()
    forms = {
        "learned positions, tied": dict(batch=3, learned_positions=True, tie_generator=True),
        "rotary": dict(batch=3, decoder=True, positions="rotary", qk_norm=True),
        "swiglu, grouped": dict(batch=2, decoder=True, activation="swiglu", kv_heads=2),
    }
    for form, options in forms.items():
        options |= dict(packed=True, N=1)
        whole = step(*a_model(**options))
        model, compute, batch = a_model(**options)
        ff.parallelize(model, mesh)
        all_close(form, step(model, compute, batch), whole)
    options = dict(packed=True, decoder=True, dropout=0.0, N=1)
    *_, batch = given = a_model(**options)
    whole, first = step(*given), 2 * mesh.get_local_rank()
    for kind in ("ddp", "fsdp"):
        model, compute, part = a_model(**options, rows=slice(first, first + 2))
        part.ntokens = batch.ntokens
        parallel = model
        if kind == "ddp":
            parallel = nn.parallel.DistributedDataParallel(model, process_group=group)
        else:
            for module in (*model.decoder.layers, model):
                fully_shard(module, mesh=mesh)
        loss, _ = step(parallel, lambda *args, of=compute: 2 * of(*args), part)
        torch.distributed.all_reduce(loss, group=group)
        all_close(f"{kind}, packed", (loss / 2, in_full(model)), whole)


def refusals(folder):
    """Each rank raises the same error, which says what to change."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    own = ff.distributed.parallelize
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    square = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))

    def heads(h):
        return lambda: ff.parallelize(a_model(h=h)[0], mesh)

    def op(name, mesh=mesh, **arguments):
        given = {
            key: distribute_tensor(*value) if type(value) is tuple else value
            for key, value in arguments.items()
        }
        return lambda: getattr(ff, name)(**given)

    def differ():
        torch.manual_seed(rank)
        try:
            ff.require_same_ranks()
        finally:
            torch.manual_seed(0)

    def versions():
        known, own.__version__ = own.__version__, str(rank)
        try:
            ff.require_same_ranks()
        finally:
            own.__version__ = known

    def hidden(name, width, mesh=mesh):
        """A feed-forward with dropout whose hidden units are sharded over all of a mesh."""
        gated = name != "feed_forward"
        split = [[Shard(dim)] * mesh.ndim for dim in (0, 1)]
        w = drawn(width * (1 + gated), 8), mesh, split[0]
        first = dict(w=w, b=None) if gated else dict(w_1=w, b_1=None)
        w_2 = drawn(8, width), mesh, split[1]
        return op(name, input=drawn(4, 6, 8), **first, w_2=w_2, b_2=None, dropout_p=P)

    def part_of_a_batch(name, **arguments):
        def call():
            with ff.sequences_from(3):
                getattr(ff, name)(**arguments)

        return call

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
        r"key has placement .*shards the queries; expected Replicate": op(
            "scaled_dot_product_attention", query=keys, key=keys, value=keys
        ),
        r"is a multiple of the 4 devices of dimension 0": op(
            "layer_norm", input=(drawn(3, 8), mesh, [Shard(1)]), normalized_shape=[8]
        ),
        r"weight is a plain parameter, and input is a DTensor": op(
            "layer_norm", input=(x, mesh, [Shard(0)]), normalized_shape=[8], weight=weight
        ),
        r"weight is on the mesh": op(
            "rms_norm",
            input=(x, mesh, [Shard(0)]),
            normalized_shape=[8],
            weight=(torch.ones(8), square["tp"], [Replicate()]),
        ),
        r"attention: 24 queries .* 4 devices; with dropout, expected a multiple of 16": op(
            "scaled_dot_product_attention",
            query=(drawn(1, 2, 24, 8), mesh, [Shard(2)]),
            **dict.fromkeys(("key", "value"), drawn(1, 2, 24, 8)),
            dropout_p=P,
        ),
        r"feed_forward: 96 hidden units .* 4 devices; with dropout": hidden("feed_forward", 96),
        r"geglu: 96 hidden units .* 4 devices; with dropout, expected a multiple of 16": hidden(
            "geglu", 96
        ),
        r"feed_forward: 48 hidden units .* 2 devices; with dropout": hidden(
            "feed_forward", 96, square
        ),
        r"swiglu: w has 12 rows; expected a multiple of twice the 4": hidden("swiglu", 6),
        r"d_ff is sharded over several dimensions": hidden("swiglu", 64, square),
        r"return_argmax is given with DTensors; expected plain tensors": op(
            "linear_cross_entropy",
            input=(x, mesh, [Shard(0)]),
            linear_weight=drawn(5, 8),
            target=torch.zeros(4, 4, dtype=torch.long),
            return_argmax=True,
        ),
        r"embed: 24 features .* 4 devices; with dropout, expected a multiple of 4": op(
            "embed",
            tokens=torch.zeros(2, 3, dtype=torch.long),
            weight=(drawn(5, 24), mesh, [Shard(1)]),
            positional=None,
            dropout_p=P,
        ),
        r"dimensions 1, 2 of its input; expected the first and at most one more": op(
            "dropout_add_rms_norm",
            **dict.fromkeys(
                ("input", "residual"), (drawn(2, 2, 4, 8), square, [Shard(1), Shard(2)])
            ),
            weight=(torch.ones(8), square, [Replicate(), Replicate()]),
            dropout_p=P,
        ),
        r"rms_norm: shard is RowShard.*; expected None, because DTensors": op(
            "dropout_add_rms_norm",
            **dict.fromkeys(("input", "residual"), (x, mesh, [Shard(0)])),
            weight=torch.ones(8),
            shard=ff.RowShard(4, 0, 8),
            dropout_p=P,
        ),
        r"attention: shard is Shard.*; expected None, because sequences_from\(3\)": part_of_a_batch(
            "scaled_dot_product_attention",
            **dict.fromkeys(("query", "key", "value"), drawn(1, 2, 16, 8)),
            shard=ff.Shard(1),
            dropout_p=P,
        ),
        r"feed_forward of \[tokens, features\] within sequences_from\(3\)": part_of_a_batch(
            "feed_forward",
            input=drawn(4, 8),
            w_1=drawn(16, 8),
            b_1=None,
            w_2=drawn(8, 16),
            b_2=None,
            dropout_p=P,
        ),
        r"packed_attention within sequences_from\(3\)": part_of_a_batch(
            "packed_attention",
            **dict.fromkeys(("query", "key", "value"), drawn(6, 2, 8)),
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 6]).int()),
            **dict.fromkeys(("max_q", "max_k"), 6),
        ),
        r"method is 'ring'; expected one of ddp, fsdp": lambda: Parallel("ring", small(1)),
        r"batch is 5; expected a multiple of the 4 processes": lambda: Parallel(
            "fsdp", replace(small(1), batch=5)
        ),
        r"every is 0; expected 1 or more": lambda: Parallel("ddp", small(1), every=0),
        r"rank 1 has settings .*'batch': 5.*, and rank 0 .*'batch': 4": lambda: Parallel(
            "ddp", replace(small(1), batch=4 + rank)
        ),
        r"rank 1 has fastformer 1, and rank 0 0": versions,
    }.items():
        refused(message, call)


def dies(folder):
    """A rank dies in the middle of a run: the others end within the time-out of the group, each
    with a reason.
    """
    way = Parallel("fsdp", small(12), folder / "checkpoints", 4)
    before, note = way.end_step, folder / "died"

    def end_step(so_far, **when):
        before(so_far, **when)
        if len(so_far) == 9 and way.rank == 1:
            note.write_text(str(time.time()))
            os._exit(3)

    way.end_step = end_step
    try:
        trained(small(12), way)
    except RuntimeError as error:
        assert time.time() - float(note.read_text()) < 60
        assert re.search("Connection closed by peer|Connection reset by peer", str(error)), error
        raise SystemExit from None  # there is no group any more
    raise AssertionError("the run went on without rank 1")


def count_calls(of, name):
    """Return a list that grows by one with each call of a method."""
    calls, method = [], getattr(of, name)

    def counted(*args, **options):
        calls.append(name)
        return method(*args, **options)

    setattr(of, name, counted)
    return calls


def resumes(folder):
    """The run of `dies` goes on from its last checkpoint with the losses of an uninterrupted one:
    by another way, on another number of processes, and at last on one. Each saves its last step.
    """
    way, steps, count = {4: ("tensor", 13, 5), 2: ("context", 17, 4), 1: ("ddp", 18, 1)}[
        torch.distributed.get_world_size()
    ]
    alone = trained(small(steps))
    own = Parallel(way, small(steps), folder / "checkpoints", 4)
    ends = count_calls(own, "end_step")
    run = trained(small(steps), own)
    assert len(ends) == count + 1, f"{way} trained {len(ends) - 1} steps"  # and one of the run
    other = replace(small(steps), d_ff=128)
    refused(
        "checkpoint .* has d_ff 64; expected 128",
        lambda: trained(other, Parallel(way, other, folder / "checkpoints")),
    )
    agree(run, alone)


def damaged_checkpoints(folder):
    """The run goes on from the newest checkpoint that can be read, and says which cannot.
    Checkpoints none of which can be read are refused, and one of more steps than the run has. Other
    folders are left alone.
    """
    saved, rank = folder / "damaged", torch.distributed.get_rank()

    def resumed(steps):
        """Return the run, how many steps it trained, and which checkpoints it passed over."""
        way = Parallel("fsdp", small(steps), saved, 2)
        ends = count_calls(way, "end_step")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run = trained(small(steps), way)
        said = " ".join(str(warning.message) for warning in told)
        assert "existing checkpoint" not in said, said  # a damaged one is replaced without a word
        return run, len(ends) - 1, re.findall(r"step-(\d+) cannot be read and is passed over", said)

    def change(function, *names):
        torch.distributed.barrier()
        if rank == 0:
            for name in names:
                function(saved / name)
        torch.distributed.barrier()

    def cut(file):
        file.write_bytes(file.read_bytes()[:100])

    alone = trained(small(5))
    first, count, _ = resumed(5)
    assert count == 5 and {x.name for x in saved.iterdir()} == {"step-2", "step-4", "step-5"}
    change(lambda path: shutil.copytree(saved / "step-2", path), "step-old", "step-", "step-06")
    again, count, _ = resumed(5)
    assert count == 0 and (again.losses, again.decoded) == (first.losses, first.decoded)
    for damaged in (["step-5/__1_0.distcp"], ["step-5/.metadata", "step-4/__0_0.distcp"]):
        change(cut, *damaged)
        run, count, passed_over = resumed(5)
        assert count == {1: 1, 2: 3}[len(damaged)], count
        assert passed_over == (["5", "4"][: len(damaged)] if rank == 0 else [])
        agree(run, alone)
    for steps, message in (
        (3, "checkpoint .*step-5 has 5 steps; expected 3 or fewer"),
        (5, "no checkpoint in .*damaged can be read; expected one that can"),
    ):
        refused(message, lambda steps=steps: resumed(steps))
        change(cut, *(f"step-{n}/.metadata" for n in (2, 4, 5)))


def bytes_sent(folder):
    """No way sends more than it has to: see bench_parallel, which says what each has to send."""
    n, settings = torch.distributed.get_world_size(), measured.Settings()
    device, dtype = torch.device("cpu"), torch.float32
    for way in measured.WAYS:
        call = measured.Steps(way, settings, device, dtype)
        sent, least = measured.sent_by(call), call.least
        if way == "tensor":  # gathers over gloo what NCCL exchanges
            stream = settings.batch * settings.length * settings.d_model * dtype.itemsize
            least += 2 * (n - 1) / n * (1 - 1 / n) * stream
        assert abs(sent - least) <= 0.01 * least, f"{way} sends {sent}; expected {least}"
    for method in measured.METHODS:
        call = measured.Attention(method, settings, 256, device, dtype)
        sent = measured.sent_by(call)
        assert abs(sent - call.least) <= 0.01 * call.least, f"{method} sends {sent}; {call.least}"
