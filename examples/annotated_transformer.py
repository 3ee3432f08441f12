"""A tutorial's Transformer, trained and saved by plain PyTorch, then run on fastformer's ops.

    python examples/annotated_transformer.py

The classes are those of the Annotated Transformer: attention with four linears, h and d_k; a norm
with a_2 and b_2 and the unbiased standard deviation. `accelerate` knows them by these parts.
"""

import math
import tempfile
from pathlib import Path

import torch
from torch import nn

import fastformer


def attention(query, key, value, mask, dropout):
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    weights = dropout(scores.softmax(dim=-1))
    return weights @ value, weights


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model, dropout=0.1):
        super().__init__()
        self.h, self.d_k = h, d_model // h
        self.linears = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))
        self.attn = None
        self.dropout = nn.Dropout(dropout)

    def forward(self, query, key, value, mask=None):
        batch = query.size(0)
        if mask is not None:
            mask = mask.unsqueeze(1)  # the same for every head
        query, key, value = (
            linear(x).view(batch, -1, self.h, self.d_k).transpose(1, 2)
            for linear, x in zip(self.linears, (query, key, value))
        )
        x, self.attn = attention(query, key, value, mask, self.dropout)
        return self.linears[-1](x.transpose(1, 2).reshape(batch, -1, self.h * self.d_k))


class LayerNorm(nn.Module):
    def __init__(self, features, eps=1e-6):
        super().__init__()
        self.a_2 = nn.Parameter(torch.ones(features))
        self.b_2 = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        return self.a_2 * (x - mean) / (x.std(-1, keepdim=True) + self.eps) + self.b_2


class PositionwiseFeedForward(nn.Module):
    def __init__(self, d_model, d_ff, dropout=0.1):
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.w_2(self.dropout(self.w_1(x).relu()))


class SublayerConnection(nn.Module):
    def __init__(self, size, dropout):
        super().__init__()
        self.norm, self.dropout = LayerNorm(size), nn.Dropout(dropout)

    def forward(self, x, sublayer):
        return x + self.dropout(sublayer(self.norm(x)))


class EncoderLayer(nn.Module):
    def __init__(self, size, h, d_ff, dropout):
        super().__init__()
        self.self_attn = MultiHeadedAttention(h, size, dropout)
        self.feed_forward = PositionwiseFeedForward(size, d_ff, dropout)
        self.sublayer = nn.ModuleList(SublayerConnection(size, dropout) for _ in range(2))

    def forward(self, x, mask):
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        return self.sublayer[1](x, self.feed_forward)


class DecoderLayer(nn.Module):
    def __init__(self, size, h, d_ff, dropout):
        super().__init__()
        self.self_attn = MultiHeadedAttention(h, size, dropout)
        self.src_attn = MultiHeadedAttention(h, size, dropout)
        self.feed_forward = PositionwiseFeedForward(size, d_ff, dropout)
        self.sublayer = nn.ModuleList(SublayerConnection(size, dropout) for _ in range(3))

    def forward(self, x, memory, src_mask, tgt_mask):
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, tgt_mask))
        x = self.sublayer[1](x, lambda x: self.src_attn(x, memory, memory, src_mask))
        return self.sublayer[2](x, self.feed_forward)


class Transformer(nn.Module):
    def __init__(self, vocab, N=2, d_model=32, d_ff=64, h=4, dropout=0.1):
        super().__init__()
        self.d_model = d_model
        self.embed = nn.Embedding(vocab, d_model)
        self.position = nn.Embedding(64, d_model)
        self.encoder = nn.ModuleList(EncoderLayer(d_model, h, d_ff, dropout) for _ in range(N))
        self.decoder = nn.ModuleList(DecoderLayer(d_model, h, d_ff, dropout) for _ in range(N))
        self.norms = nn.ModuleList(LayerNorm(d_model) for _ in range(2))
        self.generator = nn.Linear(d_model, vocab)

    def embedded(self, tokens):
        positions = torch.arange(tokens.size(1), device=tokens.device)
        return self.embed(tokens) * math.sqrt(self.d_model) + self.position(positions)

    def forward(self, src, tgt, src_mask, tgt_mask):
        memory = self.embedded(src)
        for layer in self.encoder:
            memory = layer(memory, src_mask)
        memory, x = self.norms[0](memory), self.embedded(tgt)
        for layer in self.decoder:
            x = layer(x, memory, src_mask, tgt_mask)
        return self.generator(self.norms[1](x))


def batch(size=16, length=8, vocab=11):
    """Sequences to copy, of several lengths; 0 is padding, 1 begins a sequence."""
    src = torch.randint(2, vocab, (size, length))
    src[torch.arange(length) >= torch.randint(4, length + 1, (size, 1))] = 0
    tgt = torch.cat([torch.ones(size, 1, dtype=torch.long), src[:, :-1]], dim=1)
    causal = torch.ones(1, length, length, dtype=torch.bool).tril()
    return src, tgt, (src != 0).unsqueeze(1), causal


def train(model, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        src, tgt, src_mask, tgt_mask = batch()
        logits = model(src, tgt, src_mask, tgt_mask)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), src.flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    torch.manual_seed(0)
    model = Transformer(vocab=11)
    print(f"plain PyTorch: loss {train(model, 60):.3f} after 60 steps")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "model.pt"
        torch.save(model.state_dict(), checkpoint)
        fast = Transformer(vocab=11)
        report = fastformer.accelerate(fast)
        fast.load_state_dict(torch.load(checkpoint))  # the names are those of the tutorial
    print(report)

    inputs = batch()
    with torch.no_grad():
        before, after = model.eval()(*inputs), fast.eval()(*inputs)
    difference = (before - after).abs().max().item()
    print(f"largest difference of the logits: {difference:.1e}")
    assert difference < 1e-4

    print(f"fastformer: loss {train(fast.train(), 60):.3f} after 60 more")
    print(fastformer.explain(fast.eval(), *inputs))


if __name__ == "__main__":
    main()
