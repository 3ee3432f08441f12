"""One of the processes that bench_parallel measures.

    torchrun --nproc-per-node 2 -m benchmarks.parallel_worker SETTINGS

SETTINGS is the JSON of `Settings`. Rank 0 prints the JSON of a list of figures, one for each way
and each length of a sequence; bench_parallel says what they are.
"""

import dataclasses
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastformer as ff
from benchmarks.memory import peak_bytes
from fastformer.training.parallel_copy_task import data_parallel

WAYS = ("ddp", "fsdp", "tensor")
METHODS = ("ring", "all-to-all")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of the decoder and its batch, and of attention over sharded sequences [1, heads, S, dim]."""

    layers: int = 2
    d_model: int = 128
    heads: int = 8
    batch: int = 8
    length: int = 64
    vocab: int = 512
    dim: int = 64
    lengths: tuple[int, ...] = (256, 512, 1024)
    rounds: int = 3
    dropout: float = 0.1


GATHER, PART, TWICE, ONCE = range(4)
# By collective: what it sends, of which of its arguments.
COLLECTIVES = {
    "_allgather_base_": (GATHER, 1),
    "allgather_": (GATHER, 1),
    "all_gather_into_tensor": (GATHER, 0),
    "_reduce_scatter_base_": (PART, 1),
    "reduce_scatter_tensor": (PART, 0),
    "alltoall_base_": (PART, 1),
    "all_to_all_single": (PART, 0),
    "shard_dim_alltoall": (PART, 0),
    "allreduce_": (TWICE, 0),
    "all_reduce": (TWICE, 0),
    "all_reduce_": (TWICE, 0),
    "broadcast_": (ONCE, 0),
    "send": (ONCE, 0),
    "recv_": (ONCE, None),
    "wait_tensor": (ONCE, None),
    "_wrap_tensor_autograd": (ONCE, None),
    "barrier": (ONCE, None),
    "monitored_barrier_": (ONCE, None),
}


class Sent(TorchDispatchMode):
    """Counts the bytes that this process sends in the collectives within, each by the algorithm
    that sends the fewest: of n processes an all-gather sends n - 1 times what a process has, a
    reduce-scatter and an all-to-all (n - 1) / n of it, an all-reduce twice that.
    """

    def __init__(self, processes):
        super().__init__()
        n = processes
        self.shares, self.bytes = (n - 1, (n - 1) / n, 2 * (n - 1) / n, 1), 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional", "_dtensor"):
            kind, position = COLLECTIVES[name]
            if position is not None:
                given = tree_leaves(args[position])
                size = sum(x.nbytes for x in given if isinstance(x, torch.Tensor))
                self.bytes += self.shares[kind] * size
        return func(*args, **(kwargs or {}))


def least_of_a_step(way, n, settings, model):
    """The bytes that a process has to send in a training step: see bench_parallel."""
    size = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    every, of_layers = sum(size.values()), sum(b for name, b in size.items() if ".layers." in name)
    share, layers = (n - 1) / n, settings.layers
    if way == "ddp":
        return 2 * share * every
    if way == "fsdp":
        return share * (2 * every + of_layers)
    element = next(model.parameters()).element_size()
    tokens = settings.batch * settings.length
    stream = tokens * settings.d_model * element
    whole = 4 * layers + 2 + layers * 2  # vectors of d_model: of norms, and biases of row sums
    vectors = whole * settings.d_model * element
    return share * (8 * layers + 2 + 2 / n) * stream + 2 * share * (vectors + 3 * tokens * 4)


def least_of_attention(method, n, settings, length, element):
    """The same, of attention forward and backward over a sequence of that length."""
    rows = settings.heads * length * settings.dim
    if method == "all-to-all":
        return (n - 1) / n**2 * 8 * rows * element
    return (n - 1) / n * 2 * rows * (2 * element + max(element, 4))


class Steps:
    """Training steps of a decoder, by one of WAYS or "alone"."""

    def __init__(self, way, settings, device, dtype):
        rank, n = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        s = settings
        model = ff.make_decoder(
            s.vocab, s.layers, s.d_model, 4 * s.d_model, s.heads, s.dropout, max_len=s.length
        ).to(device, dtype)
        self.generator, self.scale, self.norm = model.generator, 1.0, s.batch * s.length
        self.least = 0.0 if n == 1 else least_of_a_step(way, n, s, model)
        tokens = torch.randint(1, s.vocab, (s.batch, s.length + 1), device=device)
        self.first = None
        if way in ("ddp", "fsdp"):
            part = s.batch // n
            tokens, self.first = tokens[rank * part :][:part], rank * part
            self.scale = float(n)
        self.tokens, self.targets = tokens[:, :-1], tokens[:, 1:]
        self.mask = (self.tokens != 0).unsqueeze(1)
        mesh = init_device_mesh(device.type, (n,), mesh_dim_names=("all",))
        if way == "ddp":
            model = data_parallel(model)
        elif way == "fsdp":
            for layer in model.decoder.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        elif way == "tensor":
            ff.parallelize(model, mesh)
        self.model = model
        criterion = ff.LabelSmoothing(s.vocab, 0, 0.1)
        self.loss = ff.SimpleLossCompute(self.generator, criterion)

    def __call__(self):
        with ff.sequences_from(self.first):
            out = self.model(self.tokens, self.mask)
            loss = self.loss(out, self.targets, self.norm)
            (self.scale * loss).backward()
        self.model.zero_grad(set_to_none=True)


class Attention:
    """Causal attention over a sequence that the processes share, forward and backward."""

    def __init__(self, method, settings, length, device, dtype):
        n = dist.get_world_size()
        torch.manual_seed(0)
        shape = 1, settings.heads, length // n, settings.dim
        self.tensors = [
            torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3)
        ]
        self.grad = torch.randn(shape, device=device, dtype=dtype)
        mesh = init_device_mesh(device.type, (n,))
        self.context = ff.context_parallel(mesh, method="auto" if n == 1 else method)
        element = self.grad.element_size()
        self.least = 0.0 if n == 1 else least_of_attention(method, n, settings, length, element)

    def __call__(self):
        with self.context:
            out = ff.scaled_dot_product_attention(*self.tensors, is_causal=True)
        torch.autograd.grad(out, self.tensors, self.grad)


def sent_by(call):
    """The bytes that a call sends, once two have settled what DDP sends together."""
    call()
    call()
    with Sent(dist.get_world_size()) as sent:
        call()
    return sent.bytes


def figures(call, settings, device):
    """What the call sends, the memory that it takes above what is held, and the seconds."""
    sent, samples = sent_by(call), []
    for _ in range(settings.rounds):
        dist.barrier()
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        samples.append(time.perf_counter() - started)
    return dict(samples=samples, sent=sent, least=call.least, peak=peak_bytes(call, device))


def main():
    settings = Settings(**json.loads(sys.argv[1]))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    dtype = torch.bfloat16 if cuda else torch.float32
    alone = dist.get_world_size() == 1
    found = []
    for way in ("alone",) if alone else WAYS:
        call = Steps(way, settings, device, dtype)
        one = figures(call, settings, device)
        found.append(dict(what="step", way=way, length=settings.length, **one))
    for length in settings.lengths:
        for method in ("alone",) if alone else METHODS:
            call = Attention(method, settings, length, device, dtype)
            one = figures(call, settings, device)
            found.append(dict(what="attention", way=method, length=length, **one))
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # torch's own threads are left, whose end is a race
