"""One of two processes that train a small model on halves of a batch, by DDP or FSDP2 over gloo.

    python distributed_worker.py ddp|fsdp RANK FILE BACKEND

test_whole_model.py starts them and compares what rank 0 prints, the loss and the norm of the
gradients, with a single process.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn

WORLD = 2


def model_and_batch():
    """The same in every process: the model, its loss, and a batch of four."""
    import fastformer as ff

    torch.manual_seed(0)
    model = ff.make_model(11, 11, N=1, d_model=16, d_ff=32, h=2, dropout=0.0)
    torch.manual_seed(1)
    src, tgt = torch.randint(1, 11, (4, 6)), torch.randint(1, 11, (4, 7))
    return model, ff.Batch(src, tgt)


class Loss(nn.Module):
    """Model and loss in one module, which is what is wrapped: the mean over the tokens."""

    def __init__(self, model):
        super().__init__()
        import fastformer as ff

        self.model = model
        self.compute = ff.SimpleLossCompute(model.generator, ff.LabelSmoothing(11, 0, 0.1))

    def forward(self, src, tgt, src_mask, tgt_mask, tgt_y):
        out = self.model(src, tgt, src_mask, tgt_mask)
        return self.compute(out, tgt_y, tgt_y.numel())


def half(batch, rank):
    part = slice(2 * rank, 2 * rank + 2)
    names = ("src", "tgt", "src_mask", "tgt_mask", "tgt_y")
    return [getattr(batch, name)[part] for name in names]


def main():
    kind, rank, file, backend = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    from fastformer.kernels import interpreter

    import fastformer as ff

    interpreter.repair()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD)
    model, batch = model_and_batch()
    loss = Loss(model)
    if kind == "ddp":
        loss = nn.parallel.DistributedDataParallel(loss)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in (*model.encoder.layers, *model.decoder.layers):
            fully_shard(layer, mesh=mesh)
        fully_shard(loss, mesh=mesh)
    with ff.use_backend(backend):
        value = loss(*half(batch, rank))
        value.backward()
    squares = torch.zeros(())
    for p in loss.parameters():
        g = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        squares += g.square().sum()
    total = value.detach() / WORLD
    dist.all_reduce(total)
    if rank == 0:
        print(json.dumps({"loss": total.item(), "norm": squares.sqrt().item()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Past this point only torch's own threads are left, and their end is a race: DDP's has been
    # seen to abort a process that had done all its work.
    os._exit(0)
