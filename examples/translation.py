"""A translation model from two text files, whose lines n are translations of each other.

    python examples/translation.py source.txt target.txt

The first 200 lines are for the test at the end, the next 200 for the validation, which chooses the
weights, and the rest are trained. It needs tokenizers and sacrebleu, which the extra `translation`
installs. A run that is stopped goes on from its checkpoint.
"""

import sys
from pathlib import Path

import sacrebleu
import torch
from tokenizers import ByteLevelBPETokenizer
from torch.nn.utils.rnn import pad_sequence

import fastformer as ff

BEGIN, END, HELD = 1, 2, 200  # 0 is padding


def bpe(lines):
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(lines, 8000, special_tokens=["<pad>", "<s>", "</s>"])
    return tokenizer


torch.manual_seed(0)
lines = [Path(name).read_text().splitlines() for name in sys.argv[1:3]]
source, target = tokenizers = [bpe(x[2 * HELD :]) for x in lines]
ids = [[[BEGIN, *x.ids, END] for x in t.encode_batch(y)] for t, y in zip(tokenizers, lines)]
pairs = list(zip(*ids))
model = ff.make_model(*(t.get_vocab_size() for t in tokenizers), N=2, d_model=64, d_ff=256, h=4)
optimizer, scheduler = ff.make_optimizer(model.parameters(), model_size=64, warmup=400)
parts = pairs[2 * HELD :], pairs[HELD : 2 * HELD]
batches, valid = (ff.token_batches(part, 2048) for part in parts)
ff.fit(
    model, batches, valid, optimizer=optimizer, scheduler=scheduler, epochs=20, patience=3,
    checkpoints="checkpoints", log="log",
)  # fmt: skip
held = ff.Batch(pad_sequence([torch.tensor(x) for x, _ in pairs[:HELD]], batch_first=True))
found = ff.beam_search(model, held.src, held.src_mask, 64, BEGIN, end_symbol=END)
texts = target.decode_batch(ff.strip(found.tokens[:, 0], END))
print(*map(" -> ".join, zip(lines[0][:3], texts)), sep="\n")
print(sacrebleu.corpus_bleu(texts, [lines[1][:HELD]]))
print(f"exact: {sum(map(str.__eq__, texts, lines[1])) / HELD:.1%}")
