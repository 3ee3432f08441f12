"""A Hugging Face Llama on fastformer's attention, its weights and its batch shared by FSDP2.

    torchrun --nproc-per-node 2 examples/parallel/llama_fsdp.py

The model is small and randomly initialised: nothing is downloaded. Each process has a part of each
weight and of the batch; the losses are those of one process.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import fastformer as ff

STEPS, BATCH, LENGTH = 5, 8, 32


def build(device):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    model.set_attn_implementation("fastformer")
    return model


def train(model, tokens, whole=lambda loss: loss):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(whole(loss.detach())))
    return losses


def mean_over_processes(loss):
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def main():
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else kind
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    ff.register_transformers()
    mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("dp",))

    model = build(device)
    tokens = torch.randint(0, 100, (BATCH, LENGTH), device=device)
    alone = train(build(device), tokens)

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ours = tokens.chunk(mesh.size())[mesh.get_local_rank()]
    losses = train(model, ours, mean_over_processes)

    difference = max(abs(a - b) for a, b in zip(losses, alone))
    if dist.get_rank() == 0:
        print(f"losses {losses[0]:.4f} .. {losses[-1]:.4f} on {mesh.size()} processes")
        print(f"largest difference from one process: {difference:.1e}")
    assert difference < 1e-4
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
