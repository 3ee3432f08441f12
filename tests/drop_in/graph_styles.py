"""Small modules that spell attention, norms, feed-forward layers and losses as models do, for the
tests of the rewriter of Dynamo's graphs: what it has to fuse, what it has to leave, and where a
careless rewriter gives a wrong result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, H, D = 2, 4, 5  # batch, heads, width of a head: all different, and no length of a sequence
WIDTH = H * D
LONGEST = 32  # sequences are at most this long
WINDOWS = 3
VOCABULARY = 11


class Style(NamedTuple):
    """A module, its inputs, and how many ops of each kind have to be fused in it."""

    make: Callable[[], nn.Module]  # a fresh module with random parameters
    inputs: Callable[[int], tuple]  # the positional inputs for a length
    attention: int = 0
    norm: int = 0  # norms alone
    sum_norm: int = 0  # a residual sum, with or without dropout, and the norm of it
    feed_forward: int = 0
    loss: int = 0  # a cross entropy after a projection whose logits nobody else reads


STYLES: dict[str, Style] = {}  # all of it has to be fused, as counted
REFUSED: dict[str, Style] = {}  # no fused op expresses them: they stay
TRAPS: dict[str, Style] = {}  # fused only as counted, and never with another result


def fresh(kind: type[nn.Module]) -> nn.Module:
    """Return a module whose ones and zeros are random numbers too."""
    module = kind()
    with torch.no_grad():
        for x in module.parameters():
            x += 0.1 * torch.randn_like(x)
    return module


# ------------------------------------------------------------------------------------------ inputs


def tokens(length: int) -> tuple:
    return (torch.randn(B, length, WIDTH),)


def two_sequences(length: int) -> tuple:
    return torch.randn(B, length, WIDTH), torch.randn(B, length + 2, WIDTH)


def with_mask(length: int) -> tuple:
    """True: the query may see the key. Every query sees itself."""
    keep = (torch.rand(B, 1, length, length) > 0.4) | torch.eye(length, dtype=torch.bool)
    return *tokens(length), keep


def with_hidden_row(length: int) -> tuple:
    """One query of each sequence sees no key."""
    x, keep = with_mask(length)
    keep[:, :, 1] = False
    return x, keep


def with_integer_mask(length: int) -> tuple:
    x, keep = with_mask(length)
    return x, keep.long()


def with_float_mask(length: int) -> tuple:
    x, keep = with_mask(length)
    return x, keep.float()


def with_additive_mask(length: int) -> tuple:
    x, keep = with_mask(length)
    return x, torch.zeros(keep.shape).masked_fill(~keep, -math.inf)


def with_tokens_kept(length: int) -> tuple:
    """True for a token, False for padding: [B, S]."""
    lengths = torch.tensor([length, length - 2])
    return *tokens(length), torch.arange(length) < lengths[:, None]


def with_left_padding(length: int) -> tuple:
    return *tokens(length), torch.arange(length) >= torch.tensor([0, 2])[:, None]


def with_lengths(length: int) -> tuple:
    return *tokens(length), torch.tensor([length - 1, length - 3])


def with_targets(length: int) -> tuple:
    target = torch.randint(VOCABULARY, (B, length))
    target[:, -1] = -100
    return *tokens(length), target


def channels_first(length: int) -> tuple:
    return (torch.randn(B, WIDTH, length),)


def image(length: int) -> tuple:
    return (torch.randn(B, WIDTH, 3, length // 3),)


def video(length: int) -> tuple:
    return (torch.randn(B, 3, length, WIDTH),)


def windows(length: int) -> tuple:
    return (torch.randn(B * WINDOWS, length, WIDTH),)


def pairs(length: int) -> tuple:
    return *tokens(length), torch.randn(B, length, length, 7)


def as_long_as_heads(length: int) -> tuple:
    return tokens(H)


def as_long_as_wide(length: int) -> tuple:
    return tokens(WIDTH)


def as_long_as_a_head_is_wide(length: int) -> tuple:
    return tokens(D)


# ---------------------------------------------------------------------------- what the styles share


def listed(
    table: dict[str, Style], inputs: Callable[[int], tuple] = tokens, **counts: int
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Enter the class below in a table, under its name."""

    def enter(kind: type[nn.Module]) -> type[nn.Module]:
        assert kind.__name__ not in table
        table[kind.__name__] = Style(lambda: fresh(kind), inputs, **counts)
        return kind

    return enter


class Projections(nn.Module):
    """Linear layers for queries, keys, values and the output; `attend` is the style."""

    kv_heads = H
    value_width = D

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, H * D)
        self.k = nn.Linear(WIDTH, self.kv_heads * D, bias=False)  # softmax would cancel a bias
        self.v = nn.Linear(WIDTH, self.kv_heads * self.value_width)
        self.out = nn.Linear(H * self.value_width, WIDTH)
        self.scale = D**-0.5

    def split(self, x: Tensor) -> Tensor:
        """[B, S, H * D] -> [B, S, H, D], with the width that the layer has."""
        width = self.value_width if x.shape[-1] == self.kv_heads * self.value_width else D
        return x.view(*x.shape[:-1], -1, width)

    def heads(self, x: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [B, H, S, D]."""
        memory = x if memory is None else memory
        q, k = self.q(x).view(*x.shape[:-1], H, D), self.k(memory)
        k, v = k.view(*k.shape[:-1], self.kv_heads, D), self.split(self.v(memory))
        return q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2)

    def join(self, x: Tensor) -> Tensor:
        """[B, H, S, D] -> [B, S, WIDTH], through the output layer."""
        return self.out(x.transpose(-3, -2).flatten(-2))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) * self.scale

    def weights(self, q: Tensor, k: Tensor, *masks: Tensor) -> Tensor:
        return self.scores(q, k).softmax(-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Any:
        return self.weights(q, k, *masks) @ v

    def forward(self, x: Tensor, *masks: Tensor) -> Any:
        return self.join(self.attend(*self.heads(x), *masks))


class Cross(Projections):
    """The keys and values are of another sequence."""

    def forward(self, x: Tensor, memory: Tensor, *masks: Tensor) -> Tensor:
        return self.join(self.attend(*self.heads(x, memory), *masks))


class WithTable(Projections):
    """A learned bias for each head, query and key."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(H, LONGEST, LONGEST))

    def bias(self, length: int) -> Tensor:
        return self.table[:, :length, :length]


class WithTemperature(Projections):
    """A learned factor for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.rand(H, 1, 1) + 0.5)


# ------------------------------------------------------------------------------------------- scale


@listed(STYLES, attention=1)
class QueryScaledFirst(Projections):
    """The queries are multiplied by the scale before the product."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        q = q * self.scale
        return (q @ k.transpose(-2, -1)).softmax(dim=-1)


@listed(STYLES, attention=1)
class KeyScaledFirst(Projections):
    """The keys are divided by the root before the product."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.softmax(q @ (k / math.sqrt(D)).transpose(-2, -1), dim=-1)


@listed(STYLES, attention=1)
class BothScaledFirst(Projections):
    """Queries and keys carry the fourth root of the width each."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scale = 1 / math.sqrt(math.sqrt(D))
        return F.softmax((q * scale) @ (k * scale).transpose(-2, -1), dim=-1)


@listed(STYLES, attention=1)
class ScoresDividedByRoot(Projections):
    """The scores are divided by math.sqrt of the last dimension."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        return F.softmax(scores, dim=-1)


@listed(STYLES, attention=1)
class ScoresTimesScale(Projections):
    """The plainest form: scores times an attribute."""


@listed(STYLES, attention=1)
class NoScale(Projections):
    """The scores are not scaled, as in T5."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1)).softmax(-1)


@listed(STYLES, attention=1)
class DividedByRootOfTensor(Projections):
    """The divisor is torch.sqrt of a tensor that forward makes."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / torch.sqrt(torch.tensor(q.shape[-1]))
        return scores.softmax(-1)


@listed(STYLES, attention=1)
class DividedByBuffer(Projections):
    """The divisor is a buffer without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("root", torch.tensor(D**0.5))

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1) / self.root).softmax(-1)


@listed(STYLES, attention=1)
class DividedByTensorOfOneElement(Projections):
    """The divisor is a plain tensor of shape [1] on self, as in tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.root = torch.sqrt(torch.FloatTensor([D]))

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        energy = torch.matmul(q, k.permute(0, 1, 3, 2)) / self.root
        return torch.softmax(energy, dim=-1)


@listed(STYLES, attention=1)
class LearnedTemperature(WithTemperature):
    """The scores are multiplied by a learned temperature of each head."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1) * self.temperature).softmax(-1)


@listed(STYLES, attention=1)
class TemperatureOfQueries(WithTemperature):
    """The learned temperature of each head multiplies the queries, beside a scale."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (q * self.temperature @ k.transpose(-2, -1) / math.sqrt(D)).softmax(-1)


@listed(STYLES, attention=1)
class CosineAttention(WithTable):
    """Normalized queries and keys, a clamped logit scale and a bias, as in Swin v2."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(H, 1, 1)))

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        scores = scores * torch.clamp(self.logit_scale, max=math.log(100.0)).exp()
        return (scores + self.bias(q.shape[-2]).unsqueeze(0)).softmax(dim=-1)


@listed(STYLES, attention=1, norm=2)
class LayerNormedQueriesAndKeys(Projections):
    """LayerNorm of the queries and keys of each head, as in ViT-22B."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(D), nn.LayerNorm(D)

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return self.scores(self.q_norm(q), self.k_norm(k)).softmax(-1)


@listed(STYLES, attention=1, norm=2)
class RmsNormedQueriesAndKeys(Projections):
    """RMSNorm of the queries and keys of each head, and torch's attention, as in Qwen3."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)


@listed(STYLES, attention=1)
class PartialRotary(Projections):
    """The first four dimensions of queries and keys are rotated, as in GPT-NeoX."""

    def rotate(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / torch.tensor([1.0, 10.0])
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        first, rest = x[..., :4], x[..., 4:]
        turned = torch.cat((-first[..., 2:], first[..., :2]), dim=-1)
        return torch.cat((first * cos + turned * sin, rest), dim=-1)

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return self.scores(self.rotate(q), self.rotate(k)).softmax(-1)


@listed(STYLES, attention=1)
class FunctionSpellings(WithTable):
    """torch.mul, torch.div, torch.add and torch.sub in the place of operators."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = torch.div(torch.matmul(q, torch.transpose(k, 2, 3)), 2.0)
        scores = torch.add(torch.mul(scores, 0.7), self.bias(q.size(2)))
        return torch.softmax(torch.sub(scores, self.table[:, :1, : q.size(2)]), -1)


# ---------------------------------------------------------------------------------------- products


@listed(STYLES, attention=1)
class MatrixTransposeOfKeys(Projections):
    """The keys are transposed by the property mT."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT / D**0.5).softmax(-1)


@listed(STYLES, attention=1)
class KeysStoredTransposed(Projections):
    """The keys are made as [B, H, D, S], as in GPT-1."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q = self.q(x).view(B, length, H, D).permute(0, 2, 1, 3)
        k = self.k(x).view(B, length, H, D).permute(0, 2, 3, 1)
        v = self.v(x).view(B, length, H, D).permute(0, 2, 1, 3)
        return self.join(torch.matmul((torch.matmul(q, k) / math.sqrt(D)).softmax(-1), v))


class Flat(Projections):
    """Batch and heads are one dimension."""

    def flat(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return x.view(B, length, H, D).transpose(1, 2).reshape(B * H, length, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.flat(self.q(x)), self.flat(self.k(x)), self.flat(self.v(x))
        x = self.attend(q, k, v).view(B, H, -1, D)
        return self.out(x.transpose(1, 2).reshape(B, -1, WIDTH))


@listed(STYLES, attention=1)
class FlatHeadsByBmm(Flat):
    """torch.bmm over [B * H, S, D], as in fairseq."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = F.softmax(torch.bmm(q * self.scale, k.transpose(1, 2)), dim=-1)
        return torch.bmm(weights, v)


@listed(STYLES, attention=1)
class FlatHeadsByBaddbmm(Flat, WithTable):
    """torch.baddbmm adds a bias to the scaled product, as in BLOOM."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = self.bias(q.shape[1]).repeat(B, 1, 1)
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=0.5, alpha=self.scale)
        return torch.bmm(scores.softmax(-1), v)


@listed(STYLES, attention=1)
class FlatHeadsByEmptyBaddbmm(Flat):
    """torch.baddbmm into an empty tensor with beta 0, as in Megatron."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
        scores = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0.0, alpha=1 / math.sqrt(D))
        scores = scores.view(B, H, q.shape[1], k.shape[1])
        weights = scores.softmax(-1).view(B * H, q.shape[1], k.shape[1])
        return torch.bmm(weights, v)


@listed(STYLES, attention=1)
class HeadsAppendedToTheBatch(Projections):
    """The heads are split off and concatenated along the batch, as in early TensorFlow ports."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.cat(f(x).split(D, dim=2), dim=0) for f in (self.q, self.k, self.v))
        weights = torch.softmax(torch.bmm(q, k.permute(0, 2, 1)) / D**0.5, dim=2)
        return self.out(torch.cat(torch.bmm(weights, v).split(B, dim=0), dim=2))


@listed(STYLES, attention=1)
class EinsumHeadsFirst(Projections):
    """einsum with the labels b h i d."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        return torch.einsum("b h i j, b h j d -> b h i d", scores.softmax(dim=-1), v)


@listed(STYLES, attention=1)
class EinsumSameLabels(Projections):
    """einsum with the labels b n q d and b n k d, as in JAX ports."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.einsum("bnqd,bnkd->bnqk", q * self.scale, k).softmax(-1)
        return torch.einsum("bnqk,bnkd->bnqd", weights, v)


@listed(STYLES, attention=1)
class EinsumEllipsis(Projections):
    """einsum with an ellipsis for batch and heads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.einsum("...qd,...kd->...qk", q, k).div(D**0.5).softmax(-1)
        return torch.einsum("...qk,...kd->...qd", weights, v)


class HeadsThird(Projections):
    """Queries, keys and values stay [B, S, H, D]."""

    def forward(self, x: Tensor, *masks: Tensor) -> Tensor:
        q, k, v = (f(x).view(B, -1, H, D) for f in (self.q, self.k, self.v))
        return self.out(self.attend(q, k, v, *masks).reshape(B, -1, WIDTH))


@listed(STYLES, attention=1)
class EinsumHeadsThird(HeadsThird):
    """einsum from [B, S, H, D] and back, as in FlashAttention's reference."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(torch.einsum("bshd,bthd->bhst", q, k * self.scale), dim=-1)
        return torch.einsum("bhst,bthd->bshd", weights, v)


@listed(STYLES, with_integer_mask, attention=1)
class EinsumHeadsThirdWithMask(HeadsThird):
    """einsum with the labels nqhd and a mask of small numbers, as in a video tutorial."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        energy = torch.einsum("nqhd,nkhd->nhqk", [q, k])
        energy = energy.masked_fill(mask == 0, float("-1e20"))
        weights = torch.softmax(energy / (WIDTH ** (1 / 2)), dim=3)
        return torch.einsum("nhql,nlhd->nqhd", [weights, v])


@listed(STYLES, attention=1)
class EinsumHeadsLast(HeadsThird):
    """The scores are [B, Sq, Sk, H], and softmax runs over dimension 2."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.einsum("bihd,bjhd->bijh", q, k).mul(self.scale).softmax(dim=2)
        return torch.einsum("bijh,bjhd->bihd", weights, v)


@listed(STYLES, attention=1)
class EinsumSequenceFirst(Projections):
    """The sequence is the first dimension, and softmax runs over dimension 1, as in XL."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        q, k, v = (f(x).view(-1, B, H, D) for f in (self.q, self.k, self.v))
        scores = torch.einsum("ibhd,jbhd->ijbh", (q, k)).mul_(self.scale)
        x = torch.einsum("ijbh,jbhd->ibhd", (F.softmax(scores, dim=1), v))
        return self.out(x.contiguous().view(-1, B, WIDTH)).transpose(0, 1)


@listed(STYLES, channels_first, attention=1)
class ValueOnTheLeft(nn.Module):
    """1x1 convolutions, and the values on the left of the product, as in SAGAN."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Conv1d(WIDTH, D, 1), nn.Conv1d(WIDTH, D, 1)
        self.v = nn.Conv1d(WIDTH, WIDTH, 1)
        self.gamma = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        energy = torch.bmm(self.q(x).permute(0, 2, 1), self.k(x))
        weights = torch.softmax(energy, dim=-1)
        return self.gamma * torch.bmm(self.v(x), weights.permute(0, 2, 1)) + x


@listed(STYLES, image, attention=1)
class ImageBlock(nn.Module):
    """Attention over the pixels of an image after a group norm, as in diffusion's VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, WIDTH)
        self.q, self.k = nn.Conv2d(WIDTH, WIDTH, 1), nn.Conv2d(WIDTH, WIDTH, 1, bias=False)
        self.v, self.out = nn.Conv2d(WIDTH, WIDTH, 1), nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        y = self.norm(x)
        q = self.q(y).reshape(b, c, h * w).permute(0, 2, 1)
        weights = torch.bmm(q, self.k(y).reshape(b, c, h * w)) * (int(c) ** (-0.5))
        weights = F.softmax(weights, dim=2).permute(0, 2, 1)
        return x + self.out(torch.bmm(self.v(y).reshape(b, c, h * w), weights).reshape(b, c, h, w))


@listed(STYLES, attention=1)
class KeysOnTheLeft(Projections):
    """Keys times queries, softmax over dimension -2, and the weights transposed."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(k @ q.transpose(-2, -1) * self.scale, dim=-2)
        return weights.transpose(-2, -1) @ v


@listed(STYLES, channels_first, attention=1)
class ChannelsFirstEinsum(nn.Module):
    """One convolution makes all heads [B, H, D, S]; einsum contracts over d, as in DDPM code."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Conv1d(WIDTH, 3 * WIDTH, 1, bias=False), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.view(B, H, D, -1) for y in self.qkv(x).chunk(3, dim=1))
        scores = torch.einsum("b h d i, b h d j -> b h i j", q * D**-0.5, k)
        scores = scores - scores.amax(dim=-1, keepdim=True).detach()
        x = torch.einsum("b h i j, b h d j -> b h i d", scores.softmax(dim=-1), v)
        return self.out(x.permute(0, 1, 3, 2).reshape(B, WIDTH, -1))


@listed(STYLES, channels_first, attention=1)
class ChannelsFirstFlat(nn.Module):
    """Both operands are scaled and the heads lie in the batch, as in ADM's QKVAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Conv1d(WIDTH, 3 * WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-1]
        q, k, v = self.qkv(x).reshape(B * H, 3 * D, length).split(D, dim=1)
        scale = 1 / math.sqrt(math.sqrt(D))
        weights = torch.einsum("bct,bcs->bts", q * scale, k * scale)
        weights = torch.softmax(weights.float(), dim=-1).type(weights.dtype)
        return x + self.out(torch.einsum("bts,bcs->bct", weights, v).reshape(B, -1, length))


# ---------------------------------------------------------------------------- reshapes and layouts


class Fused(nn.Module):
    """One linear layer for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)


@listed(STYLES, attention=1)
class FusedUnbind(Fused):
    """reshape, permute(2, 0, 3, 1, 4) and unbind, as in timm."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, H, c // H).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        weights = (q * D**-0.5 @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, c))


@listed(STYLES, attention=1)
class FusedIndexed(Fused):
    """reshape, permute and an index for each of the three, as in the first ViT ports."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, H, c // H).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        weights = ((q @ k.transpose(-2, -1)) * D**-0.5).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, c))


@listed(STYLES, attention=1)
class FusedChunk(Fused):
    """chunk along the last dimension, then the heads, as in vit-pytorch."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.reshape(B, -1, H, D).permute(0, 2, 1, 3) for y in self.qkv(x).chunk(3, dim=-1))
        weights = (torch.matmul(q, k.transpose(-1, -2)) * D**-0.5).softmax(-1)
        return self.out(torch.matmul(weights, v).permute(0, 2, 1, 3).reshape(B, -1, WIDTH))


@listed(STYLES, attention=1)
class FusedSplitAndCausal(Fused):
    """split along the last dimension and a sliced tril buffer, as in nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        ones = torch.ones(LONGEST, LONGEST)
        self.register_buffer("causal", torch.tril(ones).view(1, 1, LONGEST, LONGEST))

    def forward(self, x: Tensor) -> Tensor:
        _, t, c = x.size()
        q, k, v = self.qkv(x).split(WIDTH, dim=2)
        k = k.view(B, t, H, c // H).transpose(1, 2)
        q = q.view(B, t, H, c // H).transpose(1, 2)
        v = v.view(B, t, H, c // H).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.causal[:, :, :t, :t] == 0, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.out(y.transpose(1, 2).contiguous().view(B, t, c))


@listed(STYLES, attention=1)
class FusedByHead(Fused):
    """The joined output holds q, k and v of the first head, then of the next, as in GPT-NeoX."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(B, -1, H, 3 * D).transpose(1, 2).chunk(3, dim=-1)
        return self.out(((q @ k.mT) / D**0.5).softmax(-1).matmul(v).transpose(1, 2).flatten(2))


@listed(STYLES, attention=1)
class SingleHead(Projections):
    """One head and tensors of three dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.out(torch.softmax(q @ k.transpose(1, 2) / WIDTH**0.5, dim=2) @ v)


class Head(nn.Module):
    """One causal head of its own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(WIDTH, D, bias=False)
        self.query = nn.Linear(WIDTH, D, bias=False)
        self.value = nn.Linear(WIDTH, D, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(LONGEST, LONGEST)))

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        k, q = self.key(x), self.query(x)
        scores = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        scores = scores.masked_fill(self.tril[:t, :t] == 0, float("-inf"))
        return F.softmax(scores, dim=-1) @ self.value(x)


@listed(STYLES, attention=H)
class HeadsInModuleList(nn.Module):
    """A module for each head, whose outputs are concatenated, as in a lecture on GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head() for _ in range(H)])
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], dim=-1))


@listed(STYLES, video, attention=1)
class FiveDimensions(Projections):
    """[B, T, H, S, D]: attention over space for each frame, as in TimeSformer."""


@listed(STYLES, video, attention=1)
class FiveDimensionsOverTime(Projections):
    """[B, S, H, T, D]: attention along the other axis, by einsum."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x.transpose(1, 2))
        weights = torch.einsum("bshid,bshjd->bshij", q, k).mul(self.scale).softmax(-1)
        return self.join(torch.einsum("bshij,bshjd->bshid", weights, v)).transpose(1, 2)


@listed(STYLES, with_tokens_kept, attention=1)
class ScoresViewedForTheMask(Flat):
    """[B * H, S, S] is viewed as [B, H, S, S] for a padding mask, and back, as in fairseq."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = self.flat(self.q(x)), self.flat(self.k(x)), self.flat(self.v(x))
        scores = torch.bmm(q * self.scale, k.transpose(1, 2)).view(B, H, length, length)
        scores = scores.masked_fill(~keep.unsqueeze(1).unsqueeze(2), float("-inf"))
        weights = F.softmax(scores.view(B * H, length, length), dim=-1)
        x = torch.bmm(weights, v).view(B, H, length, D).transpose(1, 2)
        return self.out(x.reshape(B, length, WIDTH))


class RelativeTable(Projections):
    """A table of relative positions in windows of 3 x n, gathered by an index."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn((2 * 3 - 1) * (2 * LONGEST - 1), H))

    def bias(self, length: int) -> Tensor:
        rows = torch.arange(length) // (length // 3)
        columns = torch.arange(length) % (length // 3)
        down, across = rows[:, None] - rows + 2, columns[:, None] - columns + LONGEST - 1
        index = down * (2 * LONGEST - 1) + across
        return self.table[index.view(-1)].view(length, length, -1).permute(2, 0, 1).contiguous()


@listed(STYLES, windows, attention=1)
class WindowsWithTable(RelativeTable):
    """A gathered table of relative positions is added, as in Swin without shift."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = (q * self.scale) @ k.transpose(-2, -1)
        return (scores + self.bias(q.shape[2]).unsqueeze(0)).softmax(-1)


@listed(STYLES, windows, attention=1)
class ShiftedWindows(RelativeTable):
    """The scores are viewed by windows for the mask of the shift, and back, as in Swin."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        n = q.shape[2]
        region = (torch.arange(n) >= n // 2) * torch.arange(WINDOWS)[:, None]
        other = region.unsqueeze(1) != region.unsqueeze(2)
        mask = torch.zeros(WINDOWS, n, n).masked_fill(other, -100.0)
        scores = (q * self.scale) @ k.transpose(-2, -1) + self.bias(n).unsqueeze(0)
        scores = scores.view(-1, WINDOWS, H, n, n) + mask.unsqueeze(1).unsqueeze(0)
        return scores.view(-1, H, n, n).softmax(-1)


@listed(STYLES, attention=1)
class DecomposedPositions(Projections):
    """Relative positions by rows and by columns, from the queries, as in SAM and MViT v2."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(5, D))
        self.columns = nn.Parameter(torch.randn(2 * LONGEST - 1, D))

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        h, w = 3, q.shape[2] // 3
        q, k = q.reshape(B * H, h * w, D), k.reshape(B * H, h * w, D)
        down = self.rows[torch.arange(h)[:, None] - torch.arange(h) + 2]
        across = self.columns[torch.arange(w)[:, None] - torch.arange(w) + LONGEST - 1]
        grid = q.reshape(B * H, h, w, D)
        down = torch.einsum("bhwc,hkc->bhwk", grid, down)
        across = torch.einsum("bhwc,wkc->bhwk", grid, across)
        scores = ((q * self.scale) @ k.transpose(-2, -1)).view(B * H, h, w, h, w)
        scores = scores + down[:, :, :, :, None] + across[:, :, :, None, :]
        return scores.view(B * H, h * w, h * w).softmax(dim=-1).view(B, H, h * w, h * w)


@listed(STYLES, attention=1)
class MultiQuery(Projections):
    """One head of keys and values, which einsum labels without h, as in PaLM."""

    kv_heads = 1

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(B, -1, H, D).transpose(1, 2)
        scores = torch.einsum("b h i d, b j d -> b h i j", q * self.scale, self.k(x))
        return self.join(torch.einsum("b h i j, b j d -> b h i d", scores.softmax(-1), self.v(x)))


@listed(STYLES, attention=1)
class MultiQueryByBroadcast(Projections):
    """One head of keys and values, over which matmul broadcasts."""

    kv_heads = 1


class Grouped(Projections):
    """Two heads of keys and values."""

    kv_heads = 2


@listed(STYLES, attention=1)
class GroupedRepeatInterleave(Grouped):
    """The heads of keys and values are repeated by repeat_interleave."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(H // 2, dim=1), torch.repeat_interleave(v, H // 2, dim=1)
        return self.weights(q, k) @ v


@listed(STYLES, attention=1)
class GroupedExpand(Grouped):
    """The heads of keys and values are repeated by expand and reshape, as in Llama."""

    def repeated(self, x: Tensor) -> Tensor:
        b, g, s, d = x.shape
        return x[:, :, None, :, :].expand(b, g, H // g, s, d).reshape(b, H, s, d)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, self.repeated(k).transpose(2, 3)) / math.sqrt(D)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, self.repeated(v))


@listed(STYLES, attention=1)
class GroupedByView(Grouped):
    """The query heads are viewed as groups, and the keys broadcast over a group."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.reshape(B, 2, H // 2, -1, D)
        weights = (grouped @ k.unsqueeze(2).transpose(-2, -1) * self.scale).softmax(-1)
        return (weights @ v.unsqueeze(2)).reshape(q.shape)


@listed(STYLES, attention=1)
class GroupedEinsum(Grouped):
    """einsum with a label for the group and one for the head in it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.unflatten(1, (2, H // 2))
        scores = torch.einsum("bgrqd,bgkd->bgrqk", grouped, k) / math.sqrt(D)
        return torch.einsum("bgrqk,bgkd->bgrqd", scores.softmax(-1), v).flatten(1, 2)


@listed(STYLES, with_mask, attention=1)
class GroupedWithTable(GroupedExpand, WithTable):
    """Repeated heads with a mask of all heads, a bias of each head and a temperature of each."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.rand(H, 1, 1) + 0.5)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ self.repeated(k).transpose(2, 3) * self.temperature + self.bias(q.shape[2])
        return scores.masked_fill(~mask, -math.inf).softmax(-1) @ self.repeated(v)


@listed(STYLES, attention=1)
class ValuesOfAnotherWidth(Projections):
    """The values are wider than the keys."""

    value_width = 7


@listed(STYLES, two_sequences, attention=1)
class CrossAttention(Cross):
    """The keys are of a longer sequence than the queries."""


@listed(STYLES, two_sequences, attention=1)
class TiedKeysAndValues(nn.Module):
    """One layer makes the keys, which are the values too, as in memory networks."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        memory = self.kv(memory)
        return torch.matmul(torch.softmax(self.q(x) @ memory.transpose(1, 2), dim=2), memory)


@listed(STYLES, attention=1)
class LearnedQuery(Projections):
    """A learned query pools all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.attend(*self.heads(self.query.expand(B, -1, -1), x)))[:, 0]


@listed(STYLES, attention=1)
class ClassAttention(Projections):
    """The first token alone asks, as in CaiT."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.join(self.attend(*self.heads(x[:, :1], x))), x[:, 1:]), dim=1)


@listed(STYLES, two_sequences, attention=1)
class DotProductOfStates(nn.Module):
    """Luong's attention: states against states, without a linear layer for the values."""

    def __init__(self) -> None:
        super().__init__()
        self.general = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        weights = F.softmax(x.bmm(self.general(memory).transpose(1, 2)), dim=-1)
        return torch.tanh(self.out(torch.cat((weights.bmm(memory), x), dim=-1)))


# ------------------------------------------------------------------------------------------ biases


@listed(STYLES, attention=1)
class AlibiBias(Projections):
    """Slopes times distances are added under a causal mask, as in MPT."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        slopes = torch.tensor([2 ** (-8 * (i + 1) / H) for i in range(H)])
        bias = slopes.view(1, H, 1, 1) * (place[None, :] - place[:, None]).view(
            1, 1, *q.shape[2:3], -1
        )
        scores = self.scores(q, k) + bias
        return scores.masked_fill(place[None, :] > place[:, None], -math.inf).softmax(-1)


@listed(STYLES, with_hidden_row, attention=1)
class AlibiOfABuffer(Projections):
    """Slopes of a buffer times distances, and then a finite fill, as in x-transformers."""

    slopes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, H + 1).view(H, 1, 1))

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        distances = (place[None, :] - place[:, None]).abs().float()
        scores = self.scores(q, k) + F.pad(-distances * self.slopes, (0, 0))
        return scores.masked_fill(~mask, -torch.finfo(scores.dtype).max).softmax(-1)


@listed(STYLES, with_hidden_row, attention=1)
class GatheredPositions(Projections):
    """Queries times positions, gathered by distances, and then a finite fill, as in DeBERTa."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(2 * LONGEST, D))

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        distances = (place[None, :] - place[:, None] + LONGEST).expand(*q.shape[:2], -1, -1)
        scores = self.scores(q, k) + torch.gather(q @ self.positions.t(), -1, distances)
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)


@listed(STYLES, attention=1)
class BucketedBias(Projections):
    """An embedding of buckets of distances, without a scale, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.relative = nn.Embedding(8, H)

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        bucket = (place[None, :] - place[:, None]).clamp(-4, 3) + 4
        bias = self.relative(bucket).permute([2, 0, 1]).unsqueeze(0)
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += bias
        return F.softmax(scores.float(), dim=-1).type_as(scores)


@listed(STYLES, pairs, attention=1)
class BiasFromPairs(Projections):
    """A linear layer makes the bias from a representation of pairs, as in AlphaFold."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Linear(7, H, bias=False)

    def weights(self, q: Tensor, k: Tensor, pair: Tensor) -> Tensor:
        return (self.scores(q, k) + self.pair(pair).permute(0, 3, 1, 2)).softmax(-1)


@listed(STYLES, attention=1)
class RelativeKeys(Projections):
    """Queries times embeddings of distances are added to the scores, as in Shaw's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.relative = nn.Embedding(2 * LONGEST, D)

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        embedded = self.relative(place[:, None] - place[None, :] + LONGEST)
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores + torch.einsum("bhld,lrd->bhlr", q, embedded)
        return F.softmax(scores / math.sqrt(D), dim=-1)


@listed(STYLES, attention=1)
class BiasThenScale(WithTable):
    """The scale multiplies the sum of scores and bias."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return ((q @ k.transpose(-2, -1) + self.bias(q.shape[2])) * self.scale).softmax(-1)


@listed(STYLES, attention=1)
class BiasSubtracted(WithTable):
    """A bias is subtracted from the scores."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (self.scores(q, k) - self.bias(q.shape[2])).softmax(-1)


@listed(STYLES, attention=1)
class BiasOnTheLeft(WithTable):
    """bias + scores, and the scale on the left of the product."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (self.bias(q.shape[2]) + self.scale * (q @ k.transpose(-2, -1))).softmax(-1)


@listed(STYLES, attention=1)
class Softcap(Projections):
    """The scores go through a scaled tanh under a causal mask, as in Gemma 2."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = torch.tanh(self.scores(q, k) / 5.0) * 5.0
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)


class WithSinks(Projections):
    """A learned score of each head is only in the denominator of the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(H))

    def column(self, scores: Tensor) -> Tensor:
        return self.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)


@listed(STYLES, with_hidden_row, attention=1)
class SinkAfterTheKeys(WithSinks):
    """The sink comes last, and the largest score is subtracted, as in GPT-OSS."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        hidden = torch.where(mask, 0.0, torch.finfo(q.dtype).min)
        scores = self.scores(q, k) + hidden
        scores = torch.cat([scores, self.column(scores)], dim=-1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
        return F.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1]


@listed(STYLES, with_hidden_row, attention=1)
class SinkBeforeTheKeys(WithSinks):
    """The sink comes first; the keys are filled with a finite number."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        scores = self.scores(q, k).masked_fill(~mask, -1e9)
        return torch.cat((self.column(scores), scores), -1).softmax(-1)[:, :, :, 1:]


# ------------------------------------------------------------------------------------------- masks


@listed(STYLES, with_hidden_row, attention=1)
class FillOfMinusBillion(Projections):
    """masked_fill(mask == 0, -1e9), with a query that sees no key, as in many tutorials."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return self.scores(q, k).masked_fill(mask == 0, -1e9).softmax(dim=-1)


@listed(STYLES, with_integer_mask, attention=1)
class FillWhereIntegerIsZero(Projections):
    """A mask of the integers 0 and 1."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return self.scores(q, k).masked_fill(mask.eq(0), -1e10).softmax(dim=-1)


@listed(STYLES, with_mask, attention=1)
class FillOfMinusInfinity(Projections):
    """masked_fill(~mask, -inf)."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return F.softmax(self.scores(q, k).masked_fill(~mask, float("-inf")), dim=-1)


@listed(STYLES, with_hidden_row, attention=1)
class FillOfLowestNumber(Projections):
    """masked_fill with the lowest number of the dtype, and a query that sees no key."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        scores = self.scores(q, k)
        return scores.masked_fill(mask.logical_not(), -torch.finfo(scores.dtype).max).softmax(-1)


@listed(STYLES, with_hidden_row, attention=1)
class WhereTensor(Projections):
    """torch.where with a tensor of -1e9, as in GPT-2, and a query that sees no key."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        scores = self.scores(q, k)
        return torch.where(mask, scores, torch.tensor(-1e9, dtype=scores.dtype)).softmax(-1)


@listed(STYLES, with_mask, attention=1)
class WhereNumber(Projections):
    """torch.where with a number."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, self.scores(q, k), -math.inf).softmax(-1)


@listed(STYLES, with_mask, attention=1)
class WhereOtherWayRound(Projections):
    """torch.where whose first choice is a full tensor of -1e9."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        scores = self.scores(q, k)
        return torch.where(mask == 0, torch.full_like(scores, -1e9), scores).softmax(-1)


@listed(STYLES, with_additive_mask, attention=1)
class AdditiveMask(Projections):
    """A floating mask of 0 and -inf is added."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return (self.scores(q, k) + mask).softmax(-1)


@listed(STYLES, with_float_mask, attention=1)
class AdditiveFromZerosAndOnes(Projections):
    """(1 - mask) * -10000 is added, as in BERT."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(D)
        return nn.Softmax(dim=-1)(scores + (1.0 - mask) * -10000.0)


@listed(STYLES, attention=1)
class CausalTriu(Projections):
    """forward makes a boolean upper triangle."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        hidden = torch.triu(torch.ones(q.shape[2], q.shape[2]), diagonal=1).bool()
        return self.scores(q, k).masked_fill(hidden, -math.inf).softmax(-1)


@listed(STYLES, attention=1)
class CausalTriuAdded(Projections):
    """forward makes an upper triangle of -inf, and adds it, as in Llama's first code."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        mask = torch.full((q.shape[2], q.shape[2]), float("-inf")).triu(diagonal=1)
        return (self.scores(q, k) + mask).softmax(-1)


@listed(STYLES, attention=1)
class CausalByArange(Projections):
    """Positions are compared."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        later = place[None, None, None, :] > place[None, None, :, None]
        return self.scores(q, k).masked_fill(later, -math.inf).softmax(-1)


@listed(STYLES, attention=1)
class CausalBufferSubtracted(Projections):
    """1e4 * (1 - b) is subtracted, where b is a sliced buffer of 0 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.tril(torch.ones(LONGEST, LONGEST))[None, None])

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        b = self.b[:, :, : q.shape[2], : k.shape[2]]
        return (self.scores(q, k) - 1e4 * (1 - b)).softmax(-1)


@listed(STYLES, attention=1)
class SlidingWindow(Projections):
    """A causal mask and a window, combined by logical and, as in Mistral."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        back = place[:, None] - place[None, :]
        seen = (back >= 0) & (back < 3)
        return self.scores(q, k).masked_fill(~seen, -math.inf).softmax(-1)


@listed(STYLES, with_lengths, attention=1)
class PaddingByLengths(Projections):
    """Keys past the length of their sequence are hidden."""

    def weights(self, q: Tensor, k: Tensor, lengths: Tensor) -> Tensor:
        keep = torch.arange(k.shape[2])[None, :] < lengths[:, None]
        return self.scores(q, k).masked_fill(~keep[:, None, None, :], -math.inf).softmax(-1)


@listed(STYLES, with_tokens_kept, attention=1)
class OuterProductOfPadding(Projections):
    """Padding hides keys and queries: whole rows are filled with -1e9."""

    def weights(self, q: Tensor, k: Tensor, keep: Tensor) -> Tensor:
        mask = keep[:, None, :, None] * keep[:, None, None, :]
        return self.scores(q, k).masked_fill(~mask, -1e9).softmax(-1)


@listed(STYLES, with_tokens_kept, attention=1)
class TwoMasksOneFill(Projections):
    """A causal fill and a padding fill of the same number, one after the other."""

    def weights(self, q: Tensor, k: Tensor, keep: Tensor) -> Tensor:
        causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        scores = self.scores(q, k).masked_fill(~causal, -1e9)
        return scores.masked_fill(~keep[:, None, None, :], -1e9).softmax(-1)


@listed(STYLES, with_tokens_kept, attention=1)
class MasksCombinedFirst(Projections):
    """Padding and causality are one mask before the fill."""

    def weights(self, q: Tensor, k: Tensor, keep: Tensor) -> Tensor:
        causal = torch.tril(torch.ones((q.shape[2], q.shape[2]))).bool()
        mask = keep.unsqueeze(1).unsqueeze(2) & causal
        return self.scores(q, k).masked_fill(mask == 0, -math.inf).softmax(-1)


@listed(STYLES, with_mask, attention=1)
class FillThenScale(Projections):
    """The fill with -inf comes before the division."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)).masked_fill(~mask, -math.inf)
        return (scores / math.sqrt(D)).softmax(-1)


@listed(STYLES, with_mask, attention=1)
class MaskThenBias(WithTable):
    """A bias is added to scores that were filled with -inf."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        scores = self.scores(q, k).masked_fill(~mask, -math.inf)
        return (scores + self.bias(q.shape[2])).softmax(-1)


# ---------------------------------------------------------------------------------- scores in place


@listed(STYLES, with_mask, attention=1)
class FilledInPlace(Projections):
    """masked_fill_ as a statement whose value nobody reads."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        scores = self.scores(q, k)
        scores.masked_fill_(~mask, -float("inf"))
        return scores.softmax(-1)


@listed(STYLES, attention=1)
class ScaledInPlace(WithTable):
    """The scores are scaled and biased in place."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1)
        scores *= self.scale
        scores += self.bias(q.shape[2])
        return scores.softmax(-1)


@listed(STYLES, attention=1)
class DividedInPlace(Projections):
    """div_ and sub_ as statements."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-2, -1))
        scores.div_(math.sqrt(D))
        scores.sub_(torch.full((q.shape[2], q.shape[2]), 1e4).triu(1))
        return scores.softmax(-1)


@listed(STYLES, with_mask, attention=1)
class IndexAssignment(Projections):
    """The hidden scores are assigned through a boolean index."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        scores = self.scores(q, k)
        scores[(~mask).expand(-1, H, -1, -1)] = -1e6
        return scores.softmax(-1)


@listed(STYLES, with_lengths, attention=1)
class MaskedSoftmax(Flat):
    """The scores are flattened for an index assignment past each length, as in d2l.ai."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = self.flat(self.q(x)), self.flat(self.k(x)), self.flat(self.v(x))
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(D)
        shape = scores.shape
        lengths = torch.repeat_interleave(lengths.repeat_interleave(H), shape[1])
        flat = scores.reshape(-1, shape[-1])
        keep = torch.arange(shape[-1])[None, :] < lengths[:, None]
        flat[~keep] = -1e6
        x = torch.bmm(F.softmax(flat.reshape(shape), dim=-1), v).reshape(B, H, -1, D)
        return self.out(x.permute(0, 2, 1, 3).reshape(B, -1, WIDTH))


# ------------------------------------------------------------------------- softmax and what follows


@listed(STYLES, attention=1)
class SoftmaxModule(Projections):
    """nn.Softmax on self."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.Softmax(dim=-1)

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return self.softmax(self.scores(q, k))


@listed(STYLES, attention=1)
class SoftmaxInFloat(Projections):
    """Softmax in float32, and back to the dtype of the queries."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return F.softmax(self.scores(q, k), dim=-1, dtype=torch.float32).to(q.dtype)


@listed(STYLES, attention=1)
class SoftmaxByHand(Projections):
    """exp of the scores without their maximum, divided by the sum."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = self.scores(q, k)
        e = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
        return e / e.sum(dim=-1, keepdim=True)


@listed(STYLES, with_hidden_row, attention=1)
class ZerosForNan(Projections):
    """A fill of -inf, and nan_to_num for a query that sees no key: its weights become zero."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        scores = self.scores(q, k).masked_fill(~mask, -math.inf)
        return torch.nan_to_num(scores.softmax(-1), nan=0.0)


@listed(STYLES, with_hidden_row, attention=1)
class ZerosByTheSameMask(Projections):
    """The weights are filled with zero where the scores were filled, as in DeBERTa and ESPnet."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        hidden = mask.eq(0)
        scores = self.scores(q, k).masked_fill(hidden, torch.finfo(q.dtype).min)
        return torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0)


@listed(STYLES, with_hidden_row, attention=1)
class WeightsTimesTheMask(Projections):
    """The weights are multiplied by the mask as numbers where the scores were filled."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return self.scores(q, k).masked_fill(~mask, -1e9).softmax(-1) * mask.float()


@listed(STYLES, attention=1)
class DropoutModule(Projections):
    """nn.Dropout of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return self.dropout(self.scores(q, k).softmax(-1))


@listed(STYLES, attention=1)
class DropoutFunction(Projections):
    """F.dropout of the weights, which asks for self.training."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return F.dropout(self.scores(q, k).softmax(-1), p=0.1, training=self.training)


@listed(STYLES, attention=1)
class DropoutOfZero(Projections):
    """A dropout that never drops."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return nn.functional.dropout(self.scores(q, k).softmax(-1), 0.0)


@listed(STYLES, attention=1)
class WeightsIgnored(Projections):
    """The inner function returns output and weights, of which nobody reads the weights."""

    def both(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.weights(q, k)
        return weights @ v, weights

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x, _ = self.both(q, k, v)
        return x


@listed(STYLES, attention=1)
class WeightsShown(Projections):
    """The weights are returned too, detached, for a picture."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x)
        weights = self.weights(q, k)
        return self.join(weights @ v), weights.detach()


@listed(STYLES, attention=1)
class WeightsStored(Projections):
    """The weights are kept on self, as in the Annotated Transformer."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.attn = self.weights(q, k)
        return torch.matmul(self.attn, v)


# ---------------------------------------------------------------------------- torch's own attention


@listed(STYLES, with_mask, attention=1)
class TorchWithMask(Projections):
    """F.scaled_dot_product_attention with a boolean mask."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@listed(STYLES, with_additive_mask, attention=1)
class TorchWithBias(Projections):
    """F.scaled_dot_product_attention with a floating mask and a scale."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=0.3)


@listed(STYLES, attention=1)
class TorchCausal(Projections):
    """F.scaled_dot_product_attention with is_causal and a dropout that training decides."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = 0.1 if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)


@listed(STYLES, attention=1)
class TorchThreeDimensions(Flat):
    """F.scaled_dot_product_attention of tensors [B * H, S, D]."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


@listed(STYLES, video, attention=1)
class TorchFiveDimensions(Projections):
    """F.scaled_dot_product_attention of tensors [B, T, H, S, D]."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


@listed(STYLES, attention=1)
class TorchGrouped(Grouped):
    """F.scaled_dot_product_attention with fewer heads of keys and values."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class TorchModule(nn.Module):
    """nn.MultiheadAttention, which takes the batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, H, batch_first=True)


@listed(STYLES, attention=1)
class TorchModulePlain(TorchModule):
    """nn.MultiheadAttention without weights."""

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@listed(STYLES, with_tokens_kept, attention=1)
class TorchModulePadded(TorchModule):
    """nn.MultiheadAttention with key_padding_mask, whose weights nobody reads."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x, _ = self.attention(x, x, x, key_padding_mask=~keep)
        return x


@listed(STYLES, attention=1)
class TorchModuleCausal(TorchModule):
    """nn.MultiheadAttention with attn_mask and is_causal."""

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.attention(x, x, x, attn_mask=mask, need_weights=False, is_causal=True)[0]


@listed(STYLES, two_sequences, attention=1)
class TorchModuleSequenceFirst(nn.Module):
    """nn.MultiheadAttention over another sequence, with the sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, H)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
        return self.attention(x, memory, memory, need_weights=False)[0].transpose(0, 1)


@listed(STYLES, attention=1)
class TorchFunctional(Projections):
    """F.multi_head_attention_forward with three weights, as in CLIP's attention pool."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(1, 0, 2)
        x, _ = F.multi_head_attention_forward(
            query=x[:1],
            key=x,
            value=x,
            embed_dim_to_check=WIDTH,
            num_heads=H,
            q_proj_weight=self.q.weight,
            k_proj_weight=self.k.weight,
            v_proj_weight=self.v.weight,
            in_proj_weight=None,
            in_proj_bias=torch.cat([self.q.bias, torch.zeros_like(self.q.bias), self.v.bias]),
            bias_k=None,
            bias_v=None,
            add_zero_attn=False,
            dropout_p=0.0,
            out_proj_weight=self.out.weight,
            out_proj_bias=self.out.bias,
            use_separate_proj_weight=True,
            training=self.training,
            need_weights=False,
        )
        return x.squeeze(0)


# ------------------------------------------------------------------------------------------- norms


class OneNorm(nn.Module):
    """A linear layer, and `normed`, the style."""

    biased = True

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.ones(WIDTH))
        if self.biased:
            self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.eps = 1e-5

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        return self.normed(self.before(x))


class OneRmsNorm(OneNorm):
    biased = False


@listed(STYLES, norm=1)
class LayerNormModule(nn.Module):
    """nn.LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.before(x))


@listed(STYLES, norm=1)
class LayerNormWithoutBias(OneRmsNorm):
    """F.layer_norm with a weight alone, as in nanoGPT."""

    def normed(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, None, 1e-5)


@listed(STYLES, norm=1)
class LayerNormByVariance(OneNorm):
    """Mean and biased variance, with eps inside the root."""

    def normed(self, x: Tensor) -> Tensor:
        mean, var = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
        return self.weight * (x - mean) / torch.sqrt(var + self.eps) + self.shift


@listed(STYLES, image, norm=1)
class LayerNormOfChannels(nn.Module):
    """The norm of the channels of an image, as in ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, WIDTH, 1, 1))
        self.shift = nn.Parameter(torch.zeros(1, WIDTH, 1, 1))
        self.before = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        mean, var = x.mean(dim=1, keepdim=True), torch.var(x, dim=1, unbiased=False, keepdim=True)
        return (x - mean) / (var + 1e-5).sqrt() * self.weight + self.shift


@listed(STYLES, norm=1)
class LayerNormBySquares(OneNorm):
    """The mean of the squared differences, as in the first BERT ports."""

    def normed(self, x: Tensor) -> Tensor:
        u = x.mean(-1, keepdim=True)
        s = (x - u).pow(2).mean(-1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight * x + self.shift


@listed(STYLES, norm=1)
class LayerNormByStandardDeviation(OneNorm):
    """The unbiased standard deviation plus eps, as in the Annotated Transformer."""

    def normed(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)
        return self.weight * (x - mean) / (std + self.eps) + self.shift


@listed(STYLES, norm=1)
class RmsNormByRsqrt(OneRmsNorm):
    """rsqrt of the mean of the squares, in float32 and back, as in Llama."""

    def normed(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.type_as(x) * self.weight


@listed(STYLES, norm=1)
class RmsNormWithOnePlus(OneRmsNorm):
    """The weight is 1 + w and multiplies in float32, as in Gemma."""

    def normed(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).to(x.dtype)


@listed(STYLES, norm=1)
class RmsNormByRoot(OneRmsNorm):
    """The input divided by the root of mean(x * x) + eps."""

    def normed(self, x: Tensor) -> Tensor:
        return self.weight * (x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + self.eps))


@listed(STYLES, norm=1)
class RmsNormByNormalize(OneRmsNorm):
    """F.normalize times the root of the width, as in x-transformers."""

    def normed(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * WIDTH**0.5 * self.weight


@listed(STYLES, norm=1)
class RmsNormModule(nn.Module):
    """nn.RMSNorm with the eps of the dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.before(x))


# --------------------------------------------------------------------------- sums and their norms


class SumAndNorm(nn.Module):
    """A stream, a sublayer, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.sublayer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)


@listed(STYLES, sum_norm=1)
class NormOfSum(SumAndNorm):
    """norm(x + sublayer(x))."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.norm(x + self.sublayer(x))


@listed(STYLES, sum_norm=1)
class NormOfSumWithDropout(SumAndNorm):
    """norm(dropout(sublayer(x)) + x), as in BERT."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.norm(self.dropout(self.sublayer(x)) + x)


@listed(STYLES, sum_norm=1)
class SumReadLater(SumAndNorm):
    """Pre-norm: the sum is normed, and read again by the next sum."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x = x + self.dropout(self.sublayer(x))
        return x + torch.tanh(self.norm(x))


@listed(STYLES, sum_norm=1)
class SumInPlace(SumAndNorm):
    """The residual sum is an augmented assignment."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.before(x)
        y = self.sublayer(x.tanh())
        y += x
        return self.norm(y), y


@listed(STYLES, sum_norm=1)
class RmsNormOfSum(OneRmsNorm):
    """An RMSNorm by hand of a sum by torch.add."""

    def normed(self, x: Tensor) -> Tensor:
        total = torch.add(x, torch.tanh(x))
        scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + self.eps)
        return total * scale * self.weight


@listed(STYLES, sum_norm=1)
class HandmadeNormOfSum(OneNorm):
    """The Annotated Transformer's norm of a sum with dropout."""

    def normed(self, x: Tensor) -> Tensor:
        x = x + F.dropout(torch.tanh(x), 0.1, self.training)
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return self.weight * (x - mean) / (std + 1e-6) + self.shift


# --------------------------------------------------------------------------- feed-forward layers


class TwoLinears(nn.Module):
    """Two linear layers; `between` is the style."""

    bias = True

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=self.bias)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=self.bias)

    def between(self, x: Tensor) -> Tensor:
        return F.relu(x)

    def forward(self, x: Tensor) -> Any:
        return self.down(self.between(self.up(x)))


@listed(STYLES, feed_forward=1)
class FeedForwardRelu(TwoLinears):
    """F.relu."""


@listed(STYLES, feed_forward=1)
class FeedForwardReluInPlace(TwoLinears):
    """F.relu in place."""

    def between(self, x: Tensor) -> Tensor:
        return F.relu(x, inplace=True)


@listed(STYLES, feed_forward=1)
class FeedForwardGelu(TwoLinears):
    """F.gelu by erf."""

    def between(self, x: Tensor) -> Tensor:
        return F.gelu(x)


@listed(STYLES, feed_forward=1)
class FeedForwardGeluTanh(TwoLinears):
    """F.gelu with the tanh approximation."""

    def between(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


@listed(STYLES, feed_forward=1)
class FeedForwardGeluByHand(TwoLinears):
    """The tanh approximation spelled out, as in GPT-2."""

    def between(self, x: Tensor) -> Tensor:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


@listed(STYLES, feed_forward=1)
class FeedForwardErfByHand(TwoLinears):
    """The error function spelled out, as in the first BERT ports."""

    def between(self, x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


@listed(STYLES, feed_forward=1)
class FeedForwardSilu(TwoLinears):
    """F.silu, without biases."""

    bias = False

    def between(self, x: Tensor) -> Tensor:
        return F.silu(x)


@listed(STYLES, feed_forward=1)
class FeedForwardSwish(TwoLinears):
    """x times its sigmoid."""

    def between(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


@listed(STYLES, feed_forward=1)
class FeedForwardSquaredRelu(TwoLinears):
    """The square of relu, as in Primer."""

    def between(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


@listed(STYLES, feed_forward=1)
class FeedForwardDropout(TwoLinears):
    """Dropout of the hidden, as in the Annotated Transformer."""

    def between(self, x: Tensor) -> Tensor:
        return F.dropout(x.relu(), p=0.1, training=self.training)


@listed(STYLES, feed_forward=1)
class FeedForwardDropoutInPlace(TwoLinears):
    """Dropout of the hidden in place."""

    def between(self, x: Tensor) -> Tensor:
        return F.dropout(F.gelu(x), 0.1, self.training, inplace=True)


@listed(STYLES, feed_forward=1)
class FeedForwardSequential(nn.Module):
    """nn.Sequential of Linear, GELU, Dropout, Linear, Dropout, as in vit-pytorch."""

    def __init__(self) -> None:
        super().__init__()
        up, down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.net = nn.Sequential(up, nn.GELU(), nn.Dropout(0.1), down, nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + x


class Gated(TwoLinears):
    """A third linear layer makes the gate."""

    bias = False

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3 * WIDTH, bias=self.bias)


@listed(STYLES, feed_forward=1)
class SwiGlu(Gated):
    """w2(silu(w1 x) * w3 x), as in Llama."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


@listed(STYLES, feed_forward=1)
class GeGluByLayers(Gated):
    """The value on the left, and gelu of the gate with dropout after, as in T5 1.1."""

    bias = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x) * F.gelu(self.gate(x), approximate="tanh")
        return self.down(F.dropout(x, 0.1, self.training))


@listed(STYLES, feed_forward=1)
class GeGluByChunk(nn.Module):
    """One projection is chunked into value and gate, as in diffusers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.up(x).chunk(2, dim=-1)
        return self.down(x * F.gelu(gate))


# ------------------------------------------------------------------------------------------ losses


class LanguageHead(nn.Module):
    """The last projection."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.before(x))


@listed(STYLES, with_targets, loss=1)
class Loss(LanguageHead):
    """cross_entropy over flat logits; the default ignores -100."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x).view(-1, VOCABULARY), target.view(-1))


@listed(STYLES, with_targets, loss=1)
class LossOfShiftedTokens(LanguageHead):
    """The logits of all but the last token against all but the first target, as in GPT-2."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.logits(x)[..., :-1, :].contiguous()
        target = target[..., 1:].contiguous()
        return nn.CrossEntropyLoss()(logits.view(-1, logits.size(-1)), target.view(-1))


@listed(STYLES, with_targets, loss=1)
class LossWithIgnoredToken(LanguageHead):
    """Another ignore_index."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        target = target.clamp(min=0).flatten()
        return F.cross_entropy(self.logits(x).flatten(0, 1), target, ignore_index=0)


@listed(STYLES, with_targets, loss=1)
class LossWithSmoothing(LanguageHead):
    """label_smoothing and the sum over the tokens."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.logits(x).reshape(-1, VOCABULARY)
        return F.cross_entropy(logits, target.reshape(-1), label_smoothing=0.1, reduction="sum")


@listed(STYLES, with_targets, loss=1)
class LossOfTransposedLogits(LanguageHead):
    """The classes are moved to dimension 1, and the target keeps its two dimensions."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x).transpose(1, 2), target)


# ------------------------------------------------------------------------------------ whole layers


@listed(STYLES, with_mask, attention=1, sum_norm=2, feed_forward=1)
class PostNormLayer(nn.Module):
    """Attention and feed-forward, each with dropout, sum and norm, as in the first Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.ffn = FillOfMinusInfinity(), FeedForwardDropout()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm_1(x + self.dropout(self.attention(x, mask)))
        return self.norm_2(x + self.dropout(self.ffn(x)))


@listed(STYLES, attention=1, norm=1, sum_norm=1, feed_forward=1)
class PreNormLayer(nn.Module):
    """The norms stand before the sublayers, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.ffn = FusedSplitAndCausal(), FeedForwardGeluTanh()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.ffn(self.norm_2(x))


@listed(STYLES, attention=1, sum_norm=2, feed_forward=1)
class TorchLayer(nn.Module):
    """nn.TransformerEncoderLayer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, H, 2 * WIDTH, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


# ----------------------------------------------------------------------- what no fused op expresses


@listed(REFUSED)
class TalkingHeads(Projections):
    """A linear layer mixes the heads of the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(H, H, bias=False)

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return self.mix(self.scores(q, k).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1)


@listed(REFUSED)
class TalkingWeights(Projections):
    """A matrix mixes the heads of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(H, H))

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("bhij,hg->bgij", self.scores(q, k).softmax(-1), self.mix)


@listed(REFUSED)
class SparseTopK(Projections):
    """The three largest weights, renormalized."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        values, index = self.scores(q, k).softmax(-1).topk(3, dim=-1)
        values = values / values.sum(-1, keepdim=True)
        return torch.zeros_like(q @ k.mT).scatter(-1, index, values)


@listed(REFUSED)
class SlotAttention(Projections):
    """Softmax over the queries, then weights that sum to 1 over the keys."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        weights = self.scores(q, k).softmax(dim=-2) + 1e-8
        return weights / weights.sum(dim=-1, keepdim=True)


@listed(REFUSED)
class SigmoidAttention(Projections):
    """A sigmoid in the place of softmax."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.sigmoid(self.scores(q, k) - math.log(k.shape[2]))


@listed(REFUSED)
class LinearAttention(Projections):
    """Softmax of queries and keys alone; keys times values come first."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q.softmax(dim=-1) * self.scale, k.softmax(dim=-2)
        return torch.einsum("bhnd,bhde->bhne", q, torch.einsum("bhnd,bhne->bhde", k, v))


@listed(REFUSED)
class ReluAttention(Projections):
    """relu of the scores divided by the number of keys."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return F.relu(self.scores(q, k)) / k.shape[2]


@listed(REFUSED)
class WeightsTimesTable(WithTable):
    """The weights are multiplied by a table of [H, Sq, Sk]."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return self.scores(q, k).softmax(-1) * torch.sigmoid(self.bias(q.shape[2]))


@listed(REFUSED)
class ScoresTimesTable(WithTable):
    """The scores are multiplied by a table of [H, Sq, Sk]."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (self.scores(q, k) * self.bias(q.shape[2])).softmax(-1)


@listed(REFUSED)
class DifferenceOfWeights(Projections):
    """The difference of two softmaxes is normed by rows, as in a signed attention."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        weights = self.scores(q, k).softmax(-1) - 0.3 * (q @ k.mT).softmax(-1)
        return weights / weights.norm(dim=-1, keepdim=True)


@listed(REFUSED)
class FeedForwardTanh(TwoLinears):
    """An activation that the fused op does not have."""

    def between(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


# ------------------------------------------------------------------------- traps: written in place


@listed(TRAPS, attention=1)
class KeysChangeAfterTheScores(Projections):
    """The keys are doubled in place after a scaled copy of them made the scores."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ (k * self.scale).transpose(-2, -1)
        k.mul_(2)
        return scores.softmax(-1) @ v + k


@listed(TRAPS, attention=1)
class KeysChangeThroughAView(Projections):
    """The first key is zeroed through an index after the scores."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ (k / math.sqrt(D)).mT).softmax(-1)
        k[:, :, 0] = 0
        return weights @ v


@listed(TRAPS, attention=1)
class QueriesChangeThroughTheProjection(Projections):
    """The output of the layer, of which the queries are a view, changes after the scores."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.q(x)
        q = flat.view(B, -1, H, D).transpose(1, 2)
        _, k, v = self.heads(x)
        weights = ((q * self.scale) @ k.mT).softmax(-1)
        flat.add_(1)
        return self.join(weights @ v) + flat


@listed(TRAPS, attention=1)
class ValuesChangeBeforeTheProduct(Projections):
    """The values are doubled in place between softmax and product."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = self.weights(q, k)
        v.mul_(2)
        return weights @ v


@listed(TRAPS, with_mask, attention=1)
class MaskChangesAfterTheFill(Projections):
    """The mask is overwritten after its inverse filled the scores."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        mask = mask.clone()
        scores = self.scores(q, k).masked_fill(~mask, -math.inf)
        mask.fill_(True)
        return scores.softmax(-1) @ v


@listed(TRAPS)
class BiasChangesAfterTheSum(WithTable):
    """The bias is zeroed in place after it was added."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = self.bias(q.shape[2]) * 2
        weights = (self.scores(q, k) + bias).softmax(-1)
        bias.zero_()
        return weights @ v


@listed(TRAPS)
class ScoresChangeThroughAView(WithTable):
    """A bias is added to the scores of all but the first token, as in Graphormer."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = self.scores(q, k)
        scores[:, :, 1:, 1:] += self.bias(q.shape[2] - 1)
        return scores.softmax(-1)


@listed(TRAPS, attention=1)
class SliceOfTheBiasIsZeroed(WithTable):
    """A row of the bias is zeroed in place before it is added."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        bias = self.bias(q.shape[2]) * 2
        bias[:, 0] = 0
        return (self.scores(q, k) + bias).softmax(-1)


@listed(TRAPS)
class WeightsChangeThroughAView(Projections):
    """The weights of the first key are zeroed through a view before the product."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        weights = torch.nan_to_num(self.scores(q, k).softmax(-1))
        weights[..., 0].zero_()
        return weights


@listed(TRAPS)
class InputChangesBetweenTheLinears(TwoLinears):
    """The input of a frozen first layer is doubled in place before the second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.up.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        hidden = F.gelu(self.up(x))
        x.mul_(2)
        return self.down(hidden) + x


@listed(TRAPS)
class HiddenChangesThroughAView(TwoLinears):
    """A hidden unit is zeroed through a view."""

    def between(self, x: Tensor) -> Tensor:
        x = F.gelu(x)
        x[..., 0] = 0
        return x


@listed(TRAPS)
class InPlaceActivationReadAgain(TwoLinears):
    """relu works in place, and its input is read again."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        y = self.down(F.relu(hidden, inplace=True))
        return y + hidden.sum(-1, keepdim=True)


@listed(TRAPS)
class SumChangesAfterTheNorm(OneNorm):
    """The sum, which needs no gradient, is doubled in place after its norm."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(x)
        normed = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(
            x.var(-1, unbiased=False, keepdim=True) + self.eps
        )
        y = normed * self.weight + self.shift
        x.mul_(2)
        return self.before(x) + y


# ---------------------------------------------------------------------- traps: arithmetic of scores


@listed(TRAPS)
class FloorOfScores(Projections):
    """div with rounding_mode floor."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = torch.div(q @ k.mT, 0.3, rounding_mode="floor")
        return scores.softmax(-1)


@listed(TRAPS, attention=1)
class BiasTimesAlpha(WithTable):
    """add of the bias with alpha 2."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return self.scores(q, k).add(self.bias(q.shape[2]), alpha=2).softmax(-1)


@listed(TRAPS, attention=1)
class ScoresTimesAlpha(WithTable):
    """torch.sub of the scores from the bias, with alpha: the scores change their sign."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.sub(self.bias(q.shape[2]), q @ k.mT, alpha=0.3).softmax(-1)


@listed(TRAPS, attention=1)
class NumberMinusScores(Projections):
    """A number minus the scores."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (1.0 - self.scores(q, k)).softmax(-1)


@listed(TRAPS)
class NumberDividedByScores(Projections):
    """A number divided by the scores."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (0.1 / self.scores(q, k)).softmax(-1)


@listed(TRAPS)
class ScoresTimesDistances(Projections):
    """The scores are multiplied by a tensor of [Sq, Sk]."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        return (self.scores(q, k) * (place[:, None] - place).abs()).softmax(-1)


@listed(TRAPS, as_long_as_heads, attention=1)
class TemperatureWhereLengthIsHeads(HeadsThird, WithTemperature):
    """[H, 1, 1] times scores [B, H, Sq, Sk], where the sequence is as long as there are heads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.temperature
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


@listed(TRAPS, as_long_as_heads, attention=1)
class TemperatureOfTheWrongDimension(HeadsThird, WithTemperature):
    """[H, 1, 1] times scores [B, Sq, Sk, H]: it multiplies by the query, not by the head."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bqhd,bkhd->bqkh", q, k) * self.temperature
        return torch.einsum("bqkh,bkhd->bqhd", scores.softmax(2), v)


@listed(TRAPS, as_long_as_heads, attention=1)
class AttentionOverHeads(HeadsThird):
    """matmul of [B, S, H, D]: a token's heads attend to each other, where S is H."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-2, -1) * self.scale, dim=-1) @ v


@listed(TRAPS)
class SoftmaxOverQueries(Projections):
    """Softmax over the wrong dimension of square scores."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return self.scores(q, k).softmax(dim=-2)


@listed(TRAPS)
class SoftmaxOverTheBatch(Projections):
    """Softmax of three dimensions runs over the first."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.out(F.softmax(q @ k.mT * self.scale, dim=0) @ v)


@listed(TRAPS)
class WeightsTransposed(Projections):
    """The weights are transposed before the product."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.weights(q, k).transpose(-2, -1) @ v


@listed(TRAPS, as_long_as_a_head_is_wide, attention=1)
class ValuesTransposed(Projections):
    """The weights multiply transposed values, where S is D."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.weights(q, k) @ v.transpose(-2, -1)


@listed(TRAPS, as_long_as_a_head_is_wide, attention=1)
class ContractionOverTheSequence(Projections):
    """Channels attend to channels, where S is D: the product contracts over the sequence."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q.transpose(-2, -1) @ k * self.scale).softmax(-1)
        return (weights @ v.transpose(-2, -1)).transpose(-2, -1)


@listed(TRAPS, attention=1)
class CrossCovariance(WithTemperature):
    """Normalized channels attend to channels with a learned temperature, as in XCiT."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.normalize(q.mT, dim=-1), F.normalize(k.mT, dim=-1)
        return ((q @ k.transpose(-2, -1) * self.temperature).softmax(-1) @ v.mT).mT


@listed(TRAPS)
class ExtraLabelInTheScores(Projections):
    """einsum sums a label that only the keys have."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        doubled = torch.stack((k, k.square()), dim=-1)
        return torch.einsum("bhid,bhjde->bhij", q, doubled).softmax(-1)


@listed(TRAPS)
class UncontractedKeys(Projections):
    """einsum sums weights over j and values over k, which are not contracted with each other."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bhij,bhkd->bhid", self.weights(q, k), v) + q


@listed(TRAPS, with_tokens_kept, attention=1)
class CastToBfloat16(Projections):
    """Queries and keys are rounded to bfloat16 and back before the product."""

    def weights(self, q: Tensor, k: Tensor, keep: Tensor) -> Tensor:
        q, k = q.to(torch.bfloat16).to(q.dtype), k.to(torch.bfloat16).to(k.dtype)
        return self.scores(q, k).masked_fill(~keep[:, None, None], -math.inf).softmax(-1)


@listed(TRAPS)
class ProductInBfloat16(Projections):
    """The product of queries and keys is made in bfloat16, that with the values is not."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q.to(torch.bfloat16) @ k.to(torch.bfloat16).mT
        return (scores.to(q.dtype) * self.scale).softmax(-1)


# --------------------------------------------------------------------------- traps: masks and fills


@listed(TRAPS, with_hidden_row)
class FillsOfTwoSizes(Projections):
    """-1e4, then -1e9 for later keys: a query that sees no key prefers the smaller fill."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        scores = self.scores(q, k).masked_fill(~mask, -1e4)
        return scores.masked_fill(later, -1e9).softmax(-1)


@listed(TRAPS, with_left_padding, attention=1)
class LeftPaddingUnderInfinity(Projections):
    """Left padding is filled with -1e9, later keys with -inf: the first query sees a fill."""

    def weights(self, q: Tensor, k: Tensor, keep: Tensor) -> Tensor:
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        scores = self.scores(q, k).masked_fill(~keep[:, None, None], -1e9)
        return scores.masked_fill(later, -math.inf).softmax(-1)


@listed(TRAPS, with_hidden_row)
class BiasAfterTheFill(WithTable):
    """A bias comes after a finite fill, and alone decides for a query that sees no key."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        scores = self.scores(q, k).masked_fill(~mask, -1e4)
        return (scores + self.bias(q.shape[2])).softmax(-1)


@listed(TRAPS, with_hidden_row)
class DistancesFilledInPlace(Projections):
    """Distances become a mask in place, before a finite fill of other keys."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        bias = -(place[None, :] - place[:, None]).abs().float()
        scores = self.scores(q, k)
        bias.masked_fill_(place[None, :] > 1, torch.finfo(q.dtype).min)
        return (scores + bias).masked_fill(~mask, torch.finfo(q.dtype).min).softmax(-1)


@listed(TRAPS, with_mask)
class WeightsTimesAnotherMask(Projections):
    """The weights are multiplied by a mask that the softmax has not seen."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return self.scores(q, k).masked_fill(~mask, -1e9).softmax(-1) * mask.roll(1, -1).float()


@listed(TRAPS)
class SinksOfQueries(WithSinks):
    """Each query has a sink of its own, which no op takes."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = self.scores(q, k)
        return torch.cat([scores, q.sum(-1, keepdim=True)], -1).softmax(-1)[..., :-1]


@listed(TRAPS)
class SinksThatAreScaled(WithSinks):
    """Scores and sink are scaled together."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = self.scores(q, k)
        return (torch.cat([scores, self.column(scores)], -1) * 2).softmax(-1)[..., :-1]


@listed(TRAPS)
class LastKeyLeftOut(Projections):
    """The last key counts in the softmax, and its value is left out: it is no sink."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.weights(q, k)[..., :-1] @ v[:, :, :-1]


@listed(TRAPS, attention=1)
class KeysChangeAfterTheyAreRepeated(GroupedExpand):
    """The heads of the keys are copied; then the keys that were copied change."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeated = self.repeated(k)
        k.mul_(2)
        return (q @ repeated.transpose(2, 3)).softmax(-1) @ self.repeated(v)


@listed(TRAPS, with_hidden_row, attention=1)
class AddedFill(Projections):
    """A finite number is added for hidden keys: a query without keys still compares its scores."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return (self.scores(q, k) + (1.0 - mask.to(q.dtype)) * -1e4).softmax(-1)


@listed(TRAPS, with_mask)
class ZerosByAnotherMask(Projections):
    """The weights of later keys become zero after a softmax over all of them."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        weights = self.scores(q, k).masked_fill(~mask, -math.inf).softmax(-1)
        return weights.masked_fill(later, 0.0)


@listed(TRAPS, with_mask)
class FillOfZero(Projections):
    """masked_fill with 0 before softmax hides nothing."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return self.scores(q, k).masked_fill(~mask, 0.0).softmax(-1)


@listed(TRAPS, with_mask)
class SmallFill(Projections):
    """masked_fill with -5 hides little."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return self.scores(q, k).masked_fill(~mask, -5.0).softmax(-1)


@listed(TRAPS, with_mask)
class FillThenSmallScale(Projections):
    """A fill of -1e4 is divided by 1e4 before softmax, and hides little."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return ((q @ k.mT * 1e3).masked_fill(~mask, -1e4) / 1e4).softmax(-1)


@listed(TRAPS, with_mask, attention=1)
class FillWhereTrue(Projections):
    """The mask is True where the key is hidden; a double inversion makes it so."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        hidden = ~mask
        return torch.where(~hidden, self.scores(q, k), -math.inf).softmax(-1)


@listed(TRAPS, with_mask, attention=1)
class FillByRows(Projections):
    """A mask of [Sq, 1] fills whole rows with -1e9: their weights are all alike."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return self.scores(q, k).masked_fill(~mask[:, :, :, :1], -1e9).softmax(-1)


@listed(TRAPS, with_integer_mask)
class MultipliedMask(Projections):
    """The scores are multiplied by a mask of 0 and 1, which hides nothing."""

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return (self.scores(q, k) * mask).softmax(-1)


# ----------------------------------------------------------------- traps: who else reads, gradients


# In a graph, returned weights look like those of WeightsStored: an output beside the product.
@listed(TRAPS, attention=1)
class WeightsReturned(Projections):
    """The weights are returned with their gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x)
        weights = self.weights(q, k)
        return self.join(weights @ v), weights


@listed(TRAPS, attention=1)  # in evaluation
class DroppedWeightsReturned(Projections):
    """The weights are returned after their dropout."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x)
        weights = F.dropout(self.weights(q, k), 0.1, self.training)
        return self.join(weights @ v), weights


@listed(TRAPS, attention=1)
class ScoresReturned(Projections):
    """The scores are returned, for a residual of the next layer, as in RealFormer."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x)
        scores = self.scores(q, k)
        return self.join(scores.softmax(-1) @ v), scores


@listed(TRAPS)
class TorchModuleWeights(TorchModule):
    """nn.MultiheadAttention whose averaged weights are returned."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention(x, x, x)


@listed(TRAPS, attention=2)
class TwoProductsOfTheSameWeights(Projections):
    """The weights multiply the values and the keys."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = self.weights(q, k)
        return weights @ v + (weights @ k).tanh()


@listed(TRAPS, attention=1)
class WeightsTimesNumber(Projections):
    """The weights are halved."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return self.scores(q, k).softmax(-1) * 0.5


@listed(TRAPS)
class WeightsDetached(Projections):
    """The gradient reaches the values alone."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return self.scores(q, k).softmax(-1).detach()


@listed(TRAPS)
class ScoresDetached(Projections):
    """The scores are detached before softmax."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return self.scores(q, k).detach().softmax(-1)


@listed(TRAPS)
class ScoresWithoutGradient(Projections):
    """The weights are computed in a region of no_grad."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        with torch.no_grad():
            return self.scores(q, k).softmax(-1)


@listed(TRAPS, attention=1)
class QueriesDetached(Projections):
    """The queries are detached."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return self.scores(q.detach(), k).softmax(-1)


# ------------------------------------------------------------------ traps: norms, layers and losses


@listed(TRAPS, sum_norm=1)
class WeightComputedAfterTheSum(OneNorm):
    """The weight of the norm is computed between sum and norm."""

    def normed(self, x: Tensor) -> Tensor:
        total = x + x.tanh()
        weight = 1.0 + self.weight
        return F.layer_norm(total, (WIDTH,), weight, self.shift)


@listed(TRAPS, norm=1)
class WeightComputedFromTheSum(OneNorm):
    """The weight of the norm depends on the sum."""

    def normed(self, x: Tensor) -> Tensor:
        total = x + x.tanh()
        return F.layer_norm(total, (WIDTH,), self.weight + total.mean((0, 1)), self.shift)


@listed(TRAPS, norm=1)
class SumWithAlpha(OneNorm):
    """The residual sum takes half of the sublayer by alpha."""

    def normed(self, x: Tensor) -> Tensor:
        total = torch.add(x, x.tanh(), alpha=0.5)
        return F.layer_norm(total, (WIDTH,), self.weight, self.shift)


@listed(TRAPS, norm=1)
class SumThatBroadcasts(OneNorm):
    """The second term of the sum is a vector."""

    def normed(self, x: Tensor) -> Tensor:
        return F.layer_norm(x + self.shift, (WIDTH,), self.weight)


@listed(TRAPS, norm=1)
class NormOverTwoDimensions(nn.Module):
    """LayerNorm over heads and their width."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm([H, D])

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.before(x).view(B, -1, H, D))


@listed(TRAPS, norm=1)
class NormWithLargeEps(OneNorm):
    """A norm by hand with an eps of 0.1."""

    def normed(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        var = centred.square().mean(dim=-1, keepdim=True)
        return centred * torch.rsqrt(var + 0.1) * self.weight + self.shift


@listed(TRAPS)
class EpsOutsideTheRoot(OneRmsNorm):
    """eps is added to the root of the mean of the squares."""

    def normed(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 0.1)


@listed(TRAPS)
class BiasedStandardDeviation(OneNorm):
    """eps is added to the biased standard deviation."""

    def normed(self, x: Tensor) -> Tensor:
        std = x.std(-1, unbiased=False, keepdim=True)
        return self.weight * (x - x.mean(-1, keepdim=True)) / (std + 0.1) + self.shift


@listed(TRAPS)
class UnbiasedVariance(OneNorm):
    """The variance is unbiased, with eps inside the root."""

    def normed(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, dim=-1, keepdim=True)
        return self.weight * (x - mean) * torch.rsqrt(var + 1e-5) + self.shift


@listed(TRAPS, as_long_as_wide)
class NormOverTheSequence(OneNorm):
    """A norm by hand over dimension 1, which is as long as the last."""

    def normed(self, x: Tensor) -> Tensor:
        mean, var = x.mean(1, keepdim=True), x.var(1, unbiased=False, keepdim=True)
        return self.weight * (x - mean) / torch.sqrt(var + self.eps) + self.shift


@listed(TRAPS)
class HiddenReadTwice(TwoLinears):
    """The hidden is returned too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.relu(self.up(x))
        return self.down(hidden), hidden


@listed(TRAPS)
class ProjectionReadTwice(TwoLinears):
    """The output of the first layer is read before its activation."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(F.gelu(hidden)) + hidden.mean(-1, keepdim=True)


@listed(TRAPS, feed_forward=1)
class SquareLayersReadBetween(nn.Module):
    """Three layers of one width: the first hidden is returned, so only the last two are a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.relu(self.layers[0](x))
        return self.layers[2](F.relu(self.layers[1](y))), y


@listed(TRAPS, feed_forward=1)
class GateAndValueSwapped(Gated):
    """silu of the layer that is called up, times the one that is called gate."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x) * F.silu(self.up(x)))


@listed(TRAPS, feed_forward=1)
class GateOfAnotherInput(Gated):
    """The gate is computed from the tokens in reverse."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x.flip(1))) * self.up(x))


@listed(TRAPS, with_targets)
class LogitsReturned(LanguageHead):
    """The logits are returned beside the loss."""

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(x)
        return F.cross_entropy(logits.view(-1, VOCABULARY), target.view(-1)), logits


@listed(TRAPS, with_targets, loss=1)
class LossOfEachToken(LanguageHead):
    """reduction none, and a mean over all tokens, the ignored ones too."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.logits(x).view(-1, VOCABULARY)
        return F.cross_entropy(logits, target.view(-1), reduction="none").mean()


@listed(TRAPS, with_targets, loss=1)
class LossWithClassWeights(LanguageHead):
    """A weight for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("classes", torch.linspace(0.5, 2, VOCABULARY))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.logits(x).view(-1, VOCABULARY)
        return F.cross_entropy(logits, target.view(-1), weight=self.classes)


@listed(TRAPS, with_targets)
class LossOfProbabilities(LanguageHead):
    """Softmax comes between the logits and the cross entropy, which has its own."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        probabilities = self.logits(x).softmax(-1).view(-1, VOCABULARY)
        return F.cross_entropy(probabilities, target.view(-1))
