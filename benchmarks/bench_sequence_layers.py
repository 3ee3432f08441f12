"""The layers that "Attention Is All You Need" tabulates, side by side over the length n: work per
layer, and how far apart two positions are (the longest path between them).

    self-attention   O(n^2 d), and the projections' O(n d^2)    path O(1)
    recurrent        O(n d^2)                                   path O(n)
    convolution      O(k n d^2), kernel of width k              path O(n / k)

The input is one sequence of d features, and a CPU uses one thread. Below the closing table stands
the power of n with which each time grows, fitted by least squares in the logarithms.

FLOPs: 2 for each weight and token and 4 n^2 d of attention, three times that (attention: 3.5 times)
with the gradients.
"""

import pytest
import torch
from torch import nn

import fastformer as ff
from benchmarks.peers import GPU

D, HEADS, K = (512, 8, 3) if GPU else (64, 4, 3)
SIZES = [256, 512, 1024, 2048, 4096, 8192, 16384] if GPU else [128, 256, 512, 1024]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = ff.MultiHeadedAttention(HEADS, D, dropout=0.0)

    def forward(self, x):
        return self.layer(x, x, x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(D, D, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv1d(D, D, K, padding=K // 2)

    def forward(self, x):
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


LAYERS = {
    "self-attention": (Attention, "O(n^2 d)"),
    "nn.GRU": (Recurrent, "O(n d^2)"),
    "nn.Conv1d": (Convolution, "O(k n d^2)"),
}


@pytest.mark.parametrize("provider", LAYERS)
@pytest.mark.parametrize("length", SIZES)
def test_sequence_layers(measure, differentiated, random, device, dtype, length, mode, provider):
    torch.set_num_threads(1)
    make, work = LAYERS[provider]
    layer = make().to(device, dtype)
    x = random(1, length, D)
    inputs = [x, *layer.parameters()]
    weights = sum(p.numel() for p in layer.parameters() if p.dim() > 1)
    products, pairs = 2 * weights * length, 4 * length**2 * D * (provider == "self-attention")
    both = mode == "forward+backward"
    measure(
        differentiated(lambda: layer(x), inputs),
        group=f"sequence layer d={D} S={length} {mode}",
        flops=3 * products + 3.5 * pairs if both else products + pairs,
        d_model=D,
        work=work,
    )
