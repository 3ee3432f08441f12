"""An nn.Transformer whose heads and hidden units are shared by several processes.

    torchrun --nproc-per-node 2 examples/parallel/transformer_tensor.py

`accelerate` puts fastformer's ops into the model, and `parallelize` splits its weights over a mesh.
Dropout is on, and the losses are those of one process.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fastformer as ff

VOCAB, D_MODEL, STEPS = 20, 32, 5


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D_MODEL)
        self.transformer = nn.Transformer(
            D_MODEL, nhead=4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=64,
            dropout=0.1, batch_first=True,
        )  # fmt: skip
        self.head = nn.Linear(D_MODEL, VOCAB)

    def forward(self, src, tgt):
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], device=tgt.device)
        return self.head(self.transformer(self.embed(src), self.embed(tgt), tgt_mask=causal))


def build(device):
    torch.manual_seed(0)
    model = Model().to(device)
    ff.accelerate(model)
    return model


def train(model, tokens):
    torch.manual_seed(1)  # of dropout: the same on all ranks
    # The parameters around the Transformer are plain tensors, in a group of their own.
    inside = list(model.transformer.parameters())
    outside = [*model.embed.parameters(), *model.head.parameters()]
    optimizer = torch.optim.Adam([{"params": inside}, {"params": outside}], lr=1e-3)
    losses = []
    for _ in range(STEPS):
        logits = model(tokens, tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else kind
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("tp",))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (8, 12), generator=generator).to(device)

    alone = train(build(device), tokens)
    model = build(device)
    ff.parallelize(model, mesh)
    losses = train(model, tokens)

    here = sum(p.to_local().numel() for p in model.transformer.parameters())
    whole = sum(p.numel() for p in model.transformer.parameters())
    difference = max(abs(a - b) for a, b in zip(losses, alone))
    if dist.get_rank() == 0:
        print(f"{here:,} of {whole:,} parameters of the Transformer are on each process")
        print(f"losses {losses[0]:.4f} .. {losses[-1]:.4f}")
        print(f"largest difference from one process: {difference:.1e}")
    assert difference < 1e-4
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
