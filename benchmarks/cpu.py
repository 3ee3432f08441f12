"""Times on one CPU thread beside what fastformer replaces.

    python -m benchmarks.cpu                 measures, and prints a line for each case
    python -m benchmarks.cpu decoding -r 10  only cases with this word, in 10 rounds
    python -m benchmarks.cpu --write         also writes benchmarks/results/cpu.json

In each round the peer and fastformer run in turn, in the same process, and the order changes with
the round. A ratio is the median over the rounds of the peer's time divided by fastformer's: above
1, fastformer is faster. The times are those of the processor. The result is compared once, before
the timing.

`python -m benchmarks.report --evidence` tabulates the file in docs/evidence.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cpuinfo
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention

import fastformer as ff
from benchmarks import ROOT, table
from fastformer.environment import describe
from fastformer.training.copy_task import PAD, SMOOTHING, Settings, copy_batches

RESULT = ROOT / "benchmarks" / "results" / "cpu.json"
ROUNDS, SECONDS = 40, 4e-3  # rounds of a case; of one provider in a round, at least
Call = Callable[[], Any]


class Case(NamedTuple):
    """Work that fastformer and a peer both do.

    name: what is computed. peer: what fastformer is compared with. make: a function that returns
    the calls (of fastformer, of the peer). agree: whether both return the same numbers.
    """

    name: str
    peer: str
    make: Callable[[], tuple[Call, Call]]
    agree: bool = True


# -------------------------------------------------------------------------------------- training


class TorchTransformer(nn.Module):
    """nn.Transformer with the embeddings and the positions of `like`, and the forward of
    `ff.EncoderDecoder`. The masks are those of padding and of later tokens.
    """

    def __init__(self, like: ff.EncoderDecoder, settings: Settings) -> None:
        super().__init__()
        self.src_embed, self.tgt_embed = like.src_embed, like.tgt_embed
        self.generator = nn.Linear(settings.d_model, settings.vocab)
        layers = dict(num_encoder_layers=settings.N, num_decoder_layers=settings.N)
        self.layers = nn.Transformer(
            settings.d_model, settings.h, **layers, dim_feedforward=settings.d_ff,
            dropout=settings.dropout, batch_first=True, norm_first=True,
        )  # fmt: skip

    def forward(self, src: Tensor, tgt: Tensor, *_: Tensor) -> Tensor:
        source, target = src == PAD, tgt == PAD
        causal = torch.ones(2 * tgt.shape[1:], dtype=torch.bool, device=tgt.device).triu(1)
        x, y = (
            position(embed[0](tokens))
            for embed, position, tokens in (
                (self.src_embed, self.src_embed[1], src),
                (self.tgt_embed, self.tgt_embed[1], tgt),
            )
        )
        return self.layers(
            x, y, tgt_mask=causal, src_key_padding_mask=source, tgt_key_padding_mask=target,
            memory_key_padding_mask=source,
        )  # fmt: skip


def copy_task() -> tuple[Call, Call]:
    """A training step of the copy task: forward, loss, backward and optimizer."""
    settings = Settings(steps=1)
    batch = next(copy_batches(settings))
    ours, theirs = settings.model().train(), TorchTransformer(settings.model(), settings).train()
    adam, their_adam = (
        ff.make_optimizer(model.parameters(), settings.d_model)[0] for model in (ours, theirs)
    )
    criterion = ff.LabelSmoothing(settings.vocab, PAD, SMOOTHING)
    loss_compute = ff.SimpleLossCompute(ours.generator, criterion)

    def step() -> None:
        out = ours(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
        loss = loss_compute(out, batch.tgt_y, batch.ntokens)
        adam.zero_grad()
        loss.backward()
        adam.step()

    def their_step() -> None:
        logits = theirs.generator(theirs(batch.src, batch.tgt))
        loss = F.cross_entropy(
            logits.flatten(0, 1), batch.tgt_y.flatten(), ignore_index=PAD,
            label_smoothing=SMOOTHING,
        )  # fmt: skip
        their_adam.zero_grad()
        loss.backward()
        their_adam.step()

    return step, their_step


def encoder_layer() -> tuple[Call, Call]:
    """Forward and backward of a layer of the base model, with padding and dropout."""
    heads, d_model, d_ff, p = 8, 512, 2048, 0.1
    attention = ff.MultiHeadedAttention(heads, d_model, p)
    layer = ff.EncoderLayer(d_model, attention, ff.PositionwiseFeedForward(d_model, d_ff, p), p)
    theirs = nn.TransformerEncoderLayer(d_model, heads, d_ff, p, batch_first=True, norm_first=True)
    x = torch.randn(4, 128, d_model, requires_grad=True)
    kept = torch.arange(128) < torch.tensor([64, 85, 106, 128]).unsqueeze(1)
    grad = torch.randn(4, 128, d_model)
    return (
        lambda: layer(x, kept.unsqueeze(1)).backward(grad),
        lambda: theirs(x, src_key_padding_mask=~kept).backward(grad),
    )


def half_padding(
    translates: bool, batch: int, length: int, vocab: int, device: Any = None
) -> tuple[Tensor | None, Tensor, int]:
    """Return sources and targets whose lengths spread evenly from 1 to `length`, and how many
    tokens are no padding. A language model has no sources.
    """
    src, tgt = (torch.randint(1, vocab, (batch, n), device=device) for n in (length, length + 1))
    lengths = torch.linspace(1, length, batch, device=device).int().unsqueeze(1)
    src[torch.arange(length, device=device) >= lengths] = PAD
    tgt[torch.arange(length + 1, device=device) > lengths] = PAD
    return src if translates else None, tgt, int(lengths.sum())


def loss_of(model: Any, src: Tensor | None, tgt: Tensor, vocab: int, packed: bool) -> Tensor:
    """Return the loss of a batch, which is made anew, with its padding or without."""
    data = ff.Batch(src, tgt, PAD, packed=packed)
    inputs = (data.src, data.tgt, data.src_mask, data.tgt_mask)
    out = model(*(inputs[1::2] if src is None else inputs))
    criterion = ff.LabelSmoothing(vocab, PAD, 0.1)
    return ff.SimpleLossCompute(model.generator, criterion)(out, data.tgt_y, data.ntokens)


def without_padding(translates: bool) -> tuple[Call, Call]:
    """Forward and backward of a batch without its padding, and with it: half of the tokens."""
    vocab = 2000
    make = ff.make_model if translates else ff.make_decoder
    model = make(*(vocab,) * (1 + translates), N=1, dropout=0.1)
    src, tgt, _ = half_padding(translates, 8, 64, vocab)

    def step(packed: bool) -> None:
        model.zero_grad()
        loss_of(model, src, tgt, vocab, packed).backward()

    return lambda: step(True), lambda: step(False)


# ------------------------------------------------------------------------------- existing models


def _pass(model: nn.Module, *inputs: Tensor, trains: bool) -> Call:
    """Return a call of the model, with a backward if it trains."""
    model.train(trains)

    def step() -> None:
        with torch.set_grad_enabled(trains):
            out = model(*inputs)
        if trains:
            model.zero_grad()
            out.sum().backward()

    return step


def _accelerated(model: nn.Module, *inputs: Tensor, trains: bool) -> tuple[Call, Call]:
    """Return a pass of the model after `accelerate`, and of the model as it was."""
    before = copy.deepcopy(model)
    ff.accelerate(model)
    return _pass(model, *inputs, trains=trains), _pass(before, *inputs, trains=trains)


def torch_transformer(d_model: int, heads: int, batch: int, length: int) -> tuple[Call, Call]:
    """A training pass of nn.Transformer with two layers on each side and dropout 0.1."""
    model = nn.Transformer(d_model, heads, 2, 2, 4 * d_model, batch_first=True)
    inputs = (torch.randn(batch, length, d_model) for _ in range(2))
    return _accelerated(model, *inputs, trains=True)


class RelativeGPT(nn.Module):
    """Two layers in plain PyTorch, with a learnt bias for each distance of two tokens."""

    def __init__(self, heads: int = 4, d_model: int = 64, length: int = 32) -> None:
        super().__init__()
        self.heads = heads
        layer = nn.TransformerEncoderLayer(d_model, heads, 4 * d_model, 0.0, batch_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        self.distances = nn.Parameter(torch.randn(heads, 2 * length - 1) / 10)
        i = torch.arange(length)
        self.register_buffer("index", i.view(-1, 1) - i + length - 1)
        self.register_buffer("future", torch.full((length, length), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        bias = (self.distances[:, self.index] + self.future).unsqueeze(0)
        for layer in self.layers:
            own = layer.self_attn
            projected = F.linear(layer.norm1(x), own.in_proj_weight, own.in_proj_bias)
            heads = projected.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(*heads.unbind(0), bias)
            x = x + own.out_proj(out.transpose(1, 2).flatten(2))
            x = x + layer.linear2(F.gelu(layer.linear1(layer.norm2(x))))
        return x


def relative_gpt(trains: bool) -> tuple[Call, Call]:
    """A pass within sdpa_override, and outside."""
    run = _pass(RelativeGPT(), torch.randn(4, 32, 64), trains=trains)

    def overridden() -> None:
        with ff.sdpa_override():
            run()

    return overridden, run


def vit(trains: bool) -> tuple[Call, Call]:
    """ViT of transformers with two layers of width 64 on 17 patches, dropout 0.1."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
        image_size=32, patch_size=8, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip

    class Logits(ViTForImageClassification):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).logits

    return _accelerated(Logits(config), torch.randn(4, 3, 32, 32), trains=trains)


# -------------------------------------------------------------------------------------- decoding

D_MODEL, LAYERS, HEADS, VOCAB, PROMPT, LENGTH = 256, 4, 4, 1000, 16, 80


def decoding() -> tuple[Call, Call]:
    """Greedy decoding of one sequence, by models of the same size with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = ff.make_decoder(
        VOCAB, LAYERS, D_MODEL, 4 * D_MODEL, HEADS, activation="gelu_tanh", max_len=LENGTH
    ).eval()
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=D_MODEL, n_layer=LAYERS, n_head=HEADS,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    theirs = GPT2LMHeadModel(config).eval()
    prompt = torch.randint(1, VOCAB, (1, PROMPT))
    kept = torch.ones_like(prompt)
    cache = ff.DecoderCache(LENGTH)
    return (
        lambda: ff.greedy_decode(model, prompt, None, LENGTH, cache=cache),
        lambda: theirs.generate(
            prompt, attention_mask=kept, max_length=LENGTH, do_sample=False, use_cache=True
        ),
    )


def one_query() -> tuple[Call, Call]:
    """Attention of one query to a full cache of 1 MB, whose lengths are given."""
    heads, dim, length = 8, 128, 128
    query = torch.randn(1, heads, 1, dim)
    key, value = (torch.randn(1, heads, length, dim) for _ in range(2))
    lengths = torch.full((1,), length, dtype=torch.int32)
    return (
        lambda: ff.scaled_dot_product_attention(
            query, key, value, key_lengths=lengths, causal_alignment="bottom_right"
        ),
        lambda: F.scaled_dot_product_attention(query, key, value),
    )


# ------------------------------------------------------------------------------------------- ops


def attention(extra: str = "") -> tuple[Call, Call]:
    """Attention of 16 queries to 16 keys."""
    x = torch.randn(1, 1, 16, 16)
    mask = torch.ones(16, 16, dtype=torch.bool).tril()
    given = {"": (), "mask": (mask,), "bias": (torch.zeros(16, 16),)}[extra]
    return (
        lambda: ff.scaled_dot_product_attention(x, x, x, *given),
        lambda: F.scaled_dot_product_attention(x, x, x, *given),
    )


def windowed(peer: str) -> tuple[Call, Call]:
    """Attention of 4096 tokens with a window of 129 keys, as a block mask, beside a boolean tensor
    with gradients, or flex_attention, which has none on a CPU.
    """
    n, x = 4096, torch.randn(3, 1, 2, 4096, 64)
    window = lambda b, h, i, j: (i - j).abs() <= 64  # noqa: E731
    mask = ff.block_mask(window, Sq=n, Sk=n)
    if peer == "flex":
        blocks = flex_attention.create_block_mask(window, None, None, n, n, device="cpu")
        attend = torch.compile(flex_attention.flex_attention)
        return lambda: ff.scaled_dot_product_attention(*x, mask), lambda: attend(
            *x, block_mask=blocks
        )
    leaves, dense = [t.requires_grad_() for t in x.unbind(0)], mask.dense()

    def differentiated(op: Callable[..., Tensor], mask: Any) -> Call:
        return lambda: torch.autograd.grad(op(*leaves, mask).square().sum(), leaves)

    return (
        differentiated(ff.scaled_dot_product_attention, mask),
        differentiated(F.scaled_dot_product_attention, dense),
    )


def layer_norm(rows: int, features: int) -> tuple[Call, Call]:
    x = torch.randn(rows, features)
    weight, bias = torch.randn(features), torch.randn(features)
    return (
        lambda: ff.layer_norm(x, features, weight, bias),
        lambda: F.layer_norm(x, (features,), weight, bias),
    )


def cross_entropy(classes: int) -> tuple[Call, Call]:
    logits = torch.randn(256, classes, requires_grad=True)
    target = torch.randint(0, classes, (256,))

    def differentiated(loss: Callable[..., Tensor]) -> Call:
        return lambda: torch.autograd.grad(loss(logits, target, label_smoothing=0.1), logits)

    return differentiated(ff.cross_entropy), differentiated(F.cross_entropy)


def linear_cross_entropy(classes: int) -> tuple[Call, Call]:
    x = torch.randn(256, 512, requires_grad=True)
    weight = (torch.randn(classes, 512) / 512**0.5).requires_grad_()
    target = torch.randint(0, classes, (256,))

    def plain(x: Tensor, weight: Tensor, target: Tensor, **options: float) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), target, **options)

    def differentiated(loss: Callable[..., Tensor]) -> Call:
        return lambda: torch.autograd.grad(
            loss(x, weight, target, label_smoothing=0.1), (x, weight)
        )

    return differentiated(ff.linear_cross_entropy), differentiated(plain)


GPT_2, BEFORE = "GPT-2 of transformers, `generate`", "the model before `accelerate`"
EXISTING = [
    Case(
        "nn.Transformer, d=64, 4 x 12 tokens, training, dropout 0.1",
        BEFORE, lambda: torch_transformer(64, 4, 4, 12), False,
    ),
    Case(
        "nn.Transformer, d=256, 8 x 64 tokens, training, dropout 0.1",
        BEFORE, lambda: torch_transformer(256, 8, 8, 64), False,
    ),
    Case(
        "GPT with a relative bias, d=64, 4 x 32 tokens, by `sdpa_override`, training",
        "the model outside of it", lambda: relative_gpt(True), False,
    ),
    Case(
        "GPT with the relative bias, evaluation",
        "the model outside of it", lambda: relative_gpt(False), False,
    ),
    Case("ViT, d=64, 4 x 17 patches, training, dropout 0.1", BEFORE, lambda: vit(True), False),
    Case("ViT, evaluation", BEFORE, lambda: vit(False), False),
]  # fmt: skip
CASES = [
    Case("training step of the copy task, d=64, dropout 0.1", "nn.Transformer", copy_task, False),
    *EXISTING,
    Case(
        "encoder layer, d=512, 4 x 128 tokens, forward and backward",
        "nn.TransformerEncoderLayer", encoder_layer, False,
    ),
    Case(
        "encoder and decoder, d=512, 8 x 64 tokens, packed, forward and backward",
        "fastformer, half of the tokens padding", lambda: without_padding(True), False,
    ),
    Case(
        "language model, d=512, 8 x 64 tokens, packed, forward and backward",
        "fastformer, half of the tokens padding", lambda: without_padding(False), False,
    ),
    Case("decoding 64 tokens, batch 1, d=256, 4 layers", GPT_2, decoding, False),
    Case("attention of one query to 1 MB of cache, with lengths", "torch's op", one_query),
    Case("attention, 16 x 16", "torch's op", attention),
    Case("attention, 16 x 16, boolean mask", "torch's op", lambda: attention("mask")),
    Case("attention, 16 x 16, floating mask", "torch's op", lambda: attention("bias")),
    Case(
        "attention, block mask of a window at 4096 tokens, with gradients",
        "torch's op and a tensor", lambda: windowed("tensor"),
    ),
    Case(
        "attention, block mask of a window at 4096 tokens",
        "flex_attention, compiled", lambda: windowed("flex"),
    ),
    Case("layer_norm, 16 x 16", "torch's op", lambda: layer_norm(16, 16)),
    Case("layer_norm, 128 x 512", "torch's op", lambda: layer_norm(128, 512)),
    Case(
        "cross_entropy, 256 x 1024, with gradient", "torch's op", lambda: cross_entropy(1024)
    ),
    Case(
        "linear_cross_entropy, 256 x 512 x 8192, with gradients",
        "torch's linear and cross_entropy", lambda: linear_cross_entropy(8192),
    ),
]  # fmt: skip


# ----------------------------------------------------------------------------------- measurement


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Return the row of a case: name, peer, microseconds of both, and ratio with its quartiles."""
    torch.manual_seed(0)
    calls = case.make()
    if case.agree:
        torch.testing.assert_close(*(call() for call in calls), rtol=1e-3, atol=1e-4)
    times = [_seconds(call, 1) for call in calls for _ in range(3)]
    repetitions = max(1, round(SECONDS / max(min(times), 1e-6)))
    samples: tuple[list[float], list[float]] = [], []
    for i in range(rounds):
        for which in (0, 1) if i % 2 else (1, 0):
            samples[which].append(_seconds(calls[which], repetitions))
    ours, peers = samples
    ratios = sorted(peer / own for own, peer in zip(ours, peers))
    above = statistics.median(own - peer for own, peer in zip(ours, peers))
    return {
        "name": case.name,
        "peer": case.peer,
        "us": _rounded(1e6 * statistics.median(ours)),
        "peer_us": _rounded(1e6 * statistics.median(peers)),
        "above_us": _rounded(1e6 * above),
        "ratio": _rounded(statistics.median(ratios)),
        "quartiles": [_rounded(ratios[len(ratios) * n // 4]) for n in (1, 3)],
    }


def _seconds(call: Call, repetitions: int) -> float:
    """Return the processor's time of a call."""
    started = time.process_time()
    for _ in range(repetitions):
        call()
    return (time.process_time() - started) / repetitions


def _rounded(x: float) -> float:
    return float(f"{x:.3g}")


def lines(data: dict[str, Any]) -> list[str]:
    """Return the lines of a Markdown table."""
    header = ["on one CPU thread", "compared with", "fastformer", "peer", "ratio (quartiles)"]
    cells = []
    for row in data["rows"]:
        ratio = "{:.2f} ({:.2f} to {:.2f})".format(row["ratio"], *row["quartiles"])
        cells.append([row["name"], row["peer"], _time(row["us"]), _time(row["peer_us"]), ratio])
    return table(header, cells)


def _time(us: float) -> str:
    return f"{us:.3g} µs" if us < 1000 else f"{us / 1000:.3g} ms"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("word", nargs="?", default="", help="measure only cases whose name has this word")
    add("-r", "--rounds", type=int, default=ROUNDS, help=f"rounds of a case (default {ROUNDS})")
    add("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    options = parser.parse_args(argv)
    chosen = [case for case in CASES if options.word in case.name]
    if not chosen or (options.write and len(chosen) < len(CASES)):
        parser.error("no case has this word" if not chosen else "--write measures all cases")
    torch.set_num_threads(1)
    machine = describe(torch.device("cpu")) | {"processor": cpuinfo.get_cpu_info()["brand_raw"]}
    data: dict[str, Any] = {"machine": machine, "rounds": options.rounds, "rows": []}
    for case in chosen:
        row = measure(case, options.rounds)
        data["rows"].append(row)
        print(
            f"{row['ratio']:5.2f}  {row['us']:8.3g} us, peer {row['peer_us']:8.3g}, "
            f"above {row['above_us']:6.3g}  {row['name']}",
            flush=True,
        )
    if options.write:
        RESULT.write_text(json.dumps(data, indent=1) + "\n")
        print(f"Wrote {RESULT}")


if __name__ == "__main__":
    main()
