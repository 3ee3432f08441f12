"""The copy task by hand, in the steps of the Annotated Transformer: `python examples/copy_task.py`.

`fastformer copy-task` is the same with both backends compared.
"""

import sys

import torch

import fastformer as ff

VOCAB, LENGTH, PAD, START = 11, 10, 0, 1


def batches(number, size=16):
    for _ in range(number):
        symbols = torch.randint(1, VOCAB, (size, LENGTH))
        symbols[:, 0] = START
        yield ff.Batch(symbols, symbols, PAD)


def main(steps):
    torch.manual_seed(0)
    model = ff.make_model(VOCAB, VOCAB, N=2, d_model=64, d_ff=256, h=4)
    criterion = ff.LabelSmoothing(VOCAB, PAD, smoothing=0.1)
    optimizer, scheduler = ff.make_optimizer(model.parameters(), model_size=64, warmup=200)
    loss = ff.SimpleLossCompute(model.generator, criterion)
    ff.run_epoch(batches(steps), model.train(), loss, optimizer, scheduler)

    src = torch.tensor([[1, 3, 2, 5, 4, 6, 7, 8, 9, 10]])
    mask = torch.ones(1, 1, LENGTH, dtype=torch.bool)
    print(ff.greedy_decode(model.eval(), src, mask, LENGTH, START)[0].tolist())


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
