"""Your own nn.Transformer on fastformer's ops: one line, what it did, and the way back.

python examples/torch_transformer.py
"""

import torch
from torch import nn

import fastformer

VOCAB, D_MODEL, PAD = 20, 32, 0


class Model(nn.Module):
    """Learns to reverse a sequence."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D_MODEL, padding_idx=PAD)
        self.position = nn.Embedding(32, D_MODEL)
        self.transformer = nn.Transformer(
            D_MODEL, nhead=4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=64,
            dropout=0.1, batch_first=True,
        )  # fmt: skip
        self.head = nn.Linear(D_MODEL, VOCAB)

    def embedded(self, tokens):
        return self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))

    def forward(self, src, tgt):
        padding = src == PAD
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        x = self.transformer(
            self.embedded(src),
            self.embedded(tgt),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.head(x)


def batch(size=16, length=8):
    lengths = torch.randint(4, length + 1, (size, 1))
    src = torch.randint(2, VOCAB, (size, length))
    src[torch.arange(length) >= lengths] = PAD
    out = src.flip(1)
    return src, torch.cat([torch.ones_like(out[:, :1]), out[:, :-1]], dim=1), out


def train(model, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(steps):
        src, tgt, out = batch()
        logits = model(src, tgt)
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), out, ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    torch.manual_seed(0)
    model = Model()
    src, tgt, _ = batch()
    before = model.eval()(src, tgt)

    report = fastformer.accelerate(model)  # the one line
    print(report)

    after = model(src, tgt)
    difference = (before - after).abs().max().item()
    print(f"largest difference of the logits: {difference:.1e}")
    assert difference < 1e-4

    first = train(model, 1)
    last = train(model, 150)
    print(f"trained on fastformer's ops: loss {first:.2f}, then {last:.2f}")
    assert last < first
    print(fastformer.explain(model, src, tgt))

    trained = model.eval()(src, tgt)
    fastformer.restore(model)  # and back
    assert type(model.transformer.encoder) is nn.TransformerEncoder
    difference = (trained - model(src, tgt)).abs().max().item()
    print(f"restored; largest difference of the logits: {difference:.1e}")
    assert difference < 1e-4


if __name__ == "__main__":
    with fastformer.use_backend("reference"):  # "auto" leaves the layers to torch on a CPU
        main()
