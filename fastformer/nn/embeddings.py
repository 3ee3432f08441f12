"""Embeddings and positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer import checks
from fastformer.eager import may_read
from fastformer.nn.base import make_dropout
from fastformer.nn.padding import Packing
from fastformer.ops.rotary.frequencies import THETA, rotary_frequencies


class Embeddings(nn.Module):
    """lut(x) * sqrt(d_model).

    Args:
        d_model: features of a token.
        vocab: number of tokens.
        padding_idx: the token whose row is zero and gets no gradient.

    forward(x): x [B, S] integers (any shape) -> [B, S, d_model].

    Raises:
        TypeError: the ids are not integers.
        ValueError: an id is outside [0, vocab) (checked on a CPU; on a GPU with
            FASTFORMER_CHECK=1).

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.4.
    """

    def __init__(self, d_model: int, vocab: int, padding_idx: int | None = None) -> None:
        super().__init__()
        d_model, vocab = checks.require_size(d_model=d_model, vocab=vocab)
        if padding_idx is not None:
            padding_idx = checks.require_token("padding_idx", padding_idx, vocab)
        self.lut = nn.Embedding(vocab, d_model, padding_idx)
        self.d_model = d_model

    def forward(self, x: Tensor) -> Tensor:
        checks.require_integers("x", x)
        checks.require_device("x", x, "weight", self.lut.weight)
        last = self.lut.weight.shape[0] - 1
        checks.require_values("x", x, last, f"ids from 0 to {last}", "the token id ")
        return self.lut(x.long()) * math.sqrt(self.d_model)


class PositionalEncoding(nn.Module):
    """dropout(x + pe[:, :S]), pe[p, 2i] = sin(p / 10000^(2i/d)), pe[p, 2i+1] = cos of the same.

    pe[p + k] is pe[p] rotated by angles that depend on k alone: an offset is a linear map.

    Args:
        d_model: features, even or odd.
        dropout: probability that an element of the sum is dropped, in training.
        max_len: the longest input.
        learned: if True, pe is a parameter that starts as the sinusoid; if False, a buffer.

    forward(x, start=0): x [B, S, d_model] -> [B, S, d_model], in the dtype of x. start: the
    position of the first token, an int, or [B] integers if the rows differ, as with a cache. The
    state dict holds pe, [1, max_len, d_model].

    Raises:
        ValueError: a position is not below max_len, or x has another shape.
        TypeError: x is not floating, start is not an integer.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.5; learned: table 3, row E.
    """

    pe: Tensor

    def __init__(
        self, d_model: int, dropout: float, max_len: int = 5000, learned: bool = False
    ) -> None:
        super().__init__()
        d_model, max_len = checks.require_size(d_model=d_model, max_len=max_len)
        self.dropout = make_dropout(dropout)
        # In float64: in float32, angles near 5000 are off by 2e-4.
        position = torch.arange(max_len, dtype=torch.float64).unsqueeze(1)
        even = torch.arange(0, d_model, 2, dtype=torch.float64)
        angle = position * 10000.0 ** (-even / d_model)  # [max_len, ceil(d / 2)]
        pe = torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[None, :, :d_model]
        pe = pe.to(torch.get_default_dtype())
        if checks.require_flag("learned", learned):
            self.pe = nn.Parameter(pe)
        else:
            self.register_buffer("pe", pe)

    def forward(self, x: Tensor, start: int | Tensor = 0) -> Tensor:
        require_features("x", x, self.pe.shape[2])
        checks.require_floating(x=x)
        checks.require_device("x", x, "pe", self.pe)
        return self.dropout(x + self.rows("x", x, start).to(x.dtype))

    def rows(self, name: str, x: Tensor, start: int | Tensor = 0) -> Tensor:
        """Return pe at the positions of x: [1, S, d_model]; [B, S, d_model] for a tensor."""
        return _rows("pe", self.pe[0], name, x, start)

    def extra_repr(self) -> str:
        return f"max_len={self.pe.shape[1]}, learned={isinstance(self.pe, nn.Parameter)}"


def _rows(table_name: str, table: Tensor, name: str, x: Tensor, start: int | Tensor = 0) -> Tensor:
    """Return the rows of a table [max_len, n] at the positions of x [B, S, ..], from `start` on:
    [1, S, n], or [B, S, n] if start is a tensor [B].
    """
    length, max_len = x.shape[1], table.shape[0]
    if not isinstance(start, Tensor):
        [start] = checks.require_size(0, start=start)
        if start + length > max_len:
            after = f" after the first {start}" if start else ""
            raise ValueError(
                f"{name} has {length} positions{after}; expected at most max_len = {max_len}"
            )
        return table[start : start + length].unsqueeze(0)
    checks.require_integers("start", start)
    if start.shape != x.shape[:1]:
        raise checks.wrong_shape("start", start, f"[B] = [{x.shape[0]}]")
    checks.require_device("start", start, table_name, table)
    if may_read(start) and start.numel() and length:
        low, high = map(int, start.aminmax())
        if low < 0 or high + length > max_len:
            raise ValueError(
                f"start holds {low if low < 0 else high}, and {name} has {length} positions; "
                f"expected positions from 0 to max_len - 1 = {max_len - 1}"
            )
    at = start.long().unsqueeze(1) + torch.arange(length, device=start.device)
    return F.embedding(at, table)


class RotaryEmbedding(nn.Module):
    """cos and sin of the positions of tokens, for `rotary_embedding` and `MultiHeadedAttention`.

    Args:
        dim: features that are rotated, an even number: the head dim, or a part of it.
        max_len: the longest input.
        theta, scaling: as in `rotary_frequencies`.

    forward(x, start=0): x [B, S, ...] -> (cos, sin), [S, dim] each. start: the position of the
    first token, an int, or [B] integers if the rows differ, as with a cache: [B, S, dim] each. For
    a packed batch, start is its `Packing` and x is [tokens, ...]: [tokens, dim] each, and positions
    begin again with each sequence.

    The table is no part of the state dict, and stays in float32 if the module is cast to 16 bits.

    Raises:
        ValueError: dim is odd, a position is not below max_len.
        TypeError: start is not an integer.

    Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding",
    section 3.2.2.
    """

    table: Tensor

    def __init__(
        self,
        dim: int,
        max_len: int = 5000,
        theta: float = THETA,
        scaling: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        dim, max_len = checks.require_size(dim=dim, max_len=max_len)
        self.dim, self.max_len, self.theta, self.scaling = dim, max_len, theta, scaling
        self.register_buffer("table", self._made(None, torch.float32), persistent=False)

    def _made(self, device: torch.device | None, dtype: torch.dtype) -> Tensor:
        """Return [max_len, 2 dim]: in each row cos, then sin."""
        tables = rotary_frequencies(
            self.dim, self.max_len, self.theta, scaling=self.scaling, dtype=dtype, device=device
        )
        return torch.cat(tables, -1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        """Move the table as nn.Module does, but compute it again instead of rounding it."""
        super()._apply(fn, recurse)
        wide = torch.float64 if self.table.dtype == torch.float64 else torch.float32
        self.table = self._made(self.table.device, wide)
        return self

    def forward(self, x: Tensor, start: int | Tensor | Packing = 0) -> tuple[Tensor, Tensor]:
        checks.require_tensor("x", x)
        if x.dim() < 2:
            raise checks.wrong_shape("x", x, "[B, S, ...]")
        checks.require_device("x", x, "the table of RotaryEmbedding", self.table)
        if isinstance(start, Packing):
            require_longest("x", start, self.max_len)
            sequence = start.indices // max(1, start.length)
            tokens = torch.arange(len(sequence), device=sequence.device)
            rows = F.embedding(tokens - start.cu_seqlens[sequence], self.table)
        else:
            rows = _rows("the table of RotaryEmbedding", self.table, "x", x, start)
            rows = rows if isinstance(start, Tensor) else rows[0]
        cos, sin = rows.chunk(2, -1)
        return cos, sin

    def extra_repr(self) -> str:
        return f"dim={self.dim}, max_len={self.max_len}, theta={self.theta}"


def require_longest(name: str, packing: Packing, max_len: int) -> None:
    """Require that no sequence of a packed batch has more than max_len tokens."""
    if packing.longest > max_len:
        raise ValueError(
            f"{name} has a sequence of {packing.longest} tokens; "
            f"expected at most max_len = {max_len}"
        )


def require_features(name: str, x: Tensor, features: int) -> None:
    checks.require_tensor(name, x)
    if x.dim() != 3 or x.shape[2] != features:
        raise checks.wrong_shape(name, x, f"[B, S, d_model = {features}]")
