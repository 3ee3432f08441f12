"""The layers of the standard Transformer, named as in the Annotated Transformer and the tutorials.

A layer that an op of `fastformer.functional` computes holds the parameters and calls that op. The
op chooses the backend, and its docstring lists the errors.

Masks are boolean or integer, where a value that is not zero keeps the key, or they are floats that
are 0 or 1. Any other float raises a ValueError; on a GPU and in a compiled graph it fails an
assertion on the device, which the call does not wait for. A mask that is added to the scores, of 0
and -inf, would mean the opposite: pass it as `bias`.

Shapes: B batch, T queries (target length), S keys (source length), d d_model, h heads, d_k = d / h.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer import backends, functional
from fastformer.cache.rows import KVCache, LayerCache, MemoryCache, PagedKVCache
from fastformer.checks import (
    INTEGERS,
    autocast_dtype,
    may_read,
    require_callable,
    require_choice,
    require_device,
    require_eps,
    require_flag,
    require_floating,
    require_ids,
    require_probability,
    require_size,
    require_tensor,
    require_token,
    shape_of,
)
from fastformer.description import PADDED_OPTIONS
from fastformer.nn.padding import Packing, pad, require_tokens
from fastformer.nn.stream import (
    GATED,
    add_dropped,
    apply_feed_forward,
    dropout_probability,
    is_unmodified,
)

__all__ = [
    "Embeddings",
    "LayerNorm",
    "MultiHeadedAttention",
    "PositionalEncoding",
    "PositionwiseFeedForward",
    "RMSNorm",
    "SublayerConnection",
    "attention",
    "clones",
]


# ----------------------------------------------------------------------------------- shared parts


class AliasedModule(nn.Module):
    """A module that loads state dicts with other names for its parts, and saves them under its own.

    `spellings` maps each other name to the module's own.
    """

    spellings: ClassVar[dict[str, str]] = {}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # torch passes a copy of the caller's dict, and reads the children's part of it afterwards.
        for key in list(state_dict):
            for other, ours in self.spellings.items():
                if (key + ".").startswith(prefix + other + "."):
                    name = prefix + ours + key[len(prefix + other) :]
                    if name not in state_dict:  # else the other name stays, and is reported
                        state_dict[name] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _dropout(p: float) -> nn.Dropout:
    return nn.Dropout(require_probability("dropout", p))


def clones(module: nn.Module, N: int) -> nn.ModuleList:
    """Return a ModuleList of N independent deep copies.

    Raises ValueError if N is negative, TypeError if `module` is not a module.
    """
    require_size(0, N=N)
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; expected an nn.Module")
    return nn.ModuleList(copy.deepcopy(module) for _ in range(N))


# ------------------------------------------------------------------------------------- embeddings


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
        require_size(d_model=d_model, vocab=vocab)
        if padding_idx is not None:
            padding_idx = require_token("padding_idx", padding_idx, vocab)
        self.lut = nn.Embedding(vocab, d_model, padding_idx)
        self.d_model = d_model

    def forward(self, x: Tensor) -> Tensor:
        require_ids("x", x, self.lut.weight)
        return self.lut(x.long()) * math.sqrt(self.d_model)


def _sinusoid(max_len: int, d_model: int) -> Tensor:
    """Return pe [1, max_len, d_model] in float64: in float32 angles near 5000 are off by 2e-4."""
    position = torch.arange(max_len, dtype=torch.float64).unsqueeze(1)
    even = torch.arange(0, d_model, 2, dtype=torch.float64)
    angle = position * 10000.0 ** (-even / d_model)  # [max_len, ceil(d / 2)]
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[None, :, :d_model]


class PositionalEncoding(nn.Module):
    """dropout(x + pe[:, :S]), pe[p, 2i] = sin(p / 10000^(2i/d)), pe[p, 2i+1] = cos of the same.

    pe[p + k] is pe[p] rotated by angles that depend on k alone: an offset is a linear map.

    Args:
        d_model: features, even or odd.
        dropout: probability that an element of the sum is dropped, in training.
        max_len: the longest input.
        learned: if True, pe is a parameter that starts as the sinusoid; if False, a buffer.

    forward(x, start=0): x [B, S, d_model] -> [B, S, d_model], in the dtype of x. start: the
    position of the first token, an int, or [B] integers where the rows differ, as in a cache. The
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
        require_size(d_model=d_model, max_len=max_len)
        self.dropout = _dropout(dropout)
        pe = _sinusoid(max_len, d_model).to(torch.get_default_dtype())
        if require_flag("learned", learned):
            self.pe = nn.Parameter(pe)
        else:
            self.register_buffer("pe", pe)

    def forward(self, x: Tensor, start: int | Tensor = 0) -> Tensor:
        _require_features("x", x, self.pe.shape[2])
        require_floating(x=x)
        require_device("x", x, "pe", self.pe)
        x = x + self.rows("x", x, start).to(x.dtype)
        if backends.is_sharded(x):
            return add_dropped(torch.zeros_like(x), x, self.dropout)
        return self.dropout(x)

    def rows(self, name: str, x: Tensor, start: int | Tensor = 0) -> Tensor:
        """Return pe at the positions of x [B, S, ..]: [1, S, d_model], or [B, S, d_model] where
        start is a tensor.
        """
        length, max_len = x.shape[1], self.pe.shape[1]
        if backends.sequences_are_sharded():
            if isinstance(start, Tensor) or start:
                raise ValueError(f"start is {start} within context_parallel; expected 0")
            return backends.rows_here("pe", self.pe[0], length).unsqueeze(0)
        if not isinstance(start, Tensor):
            require_size(0, start=start)
            if start + length > max_len:
                after = f" after the first {start}" if start else ""
                raise ValueError(
                    f"{name} has {length} positions{after}; expected at most max_len = {max_len}"
                )
            return self.pe[:, start : start + length]
        require_tensor("start", start)
        if start.dtype not in INTEGERS:
            raise TypeError(f"start has dtype {start.dtype}; expected integers")
        if start.shape != x.shape[:1]:
            raise ValueError(f"start has shape {shape_of(start)}; expected [B] = [{x.shape[0]}]")
        require_device("start", start, "pe", self.pe)
        if may_read(start) and start.numel() and length:
            low, high = map(int, start.aminmax())
            if low < 0 or high + length > max_len:
                raise ValueError(
                    f"start holds {low if low < 0 else high}, and {name} has {length} positions; "
                    f"expected positions from 0 to max_len - 1 = {max_len - 1}"
                )
        at = start.long().unsqueeze(1) + torch.arange(length, device=start.device)
        return F.embedding(at, self.pe[0])

    def extra_repr(self) -> str:
        return f"max_len={self.pe.shape[1]}, learned={isinstance(self.pe, nn.Parameter)}"


# -------------------------------------------------------------------------------------- attention


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(query key^T / sqrt(d_k)) value in plain PyTorch, with the weights.

    `scaled_dot_product_attention` is the fast form, which never stores the weights.

    Args:
        query: [..., T, d_k], a floating dtype, any leading dimensions.
        key: [..., S, d_k].
        value: [..., S, d_v].
        mask: booleans, integers, or floats that are 0 or 1, that broadcast to [..., T, S]; where it
            is zero, the score is set to -1e9.
        dropout: a function that is applied to the weights, for example an nn.Dropout.

    Returns:
        The output [..., T, d_v], and the weights [..., T, S], after dropout. A query whose keys are
        all masked out gives all keys the same weight.

    Raises:
        ValueError: the shapes do not fit, the mask does not broadcast to the weights, a float mask
            holds other values than 0 and 1, the tensors are on several devices.
        TypeError: the dtypes differ or are not floating, dropout cannot be called.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1; the -1e9:
    harvardnlp/annotated-transformer.
    """
    inputs = {"query": query, "key": key, "value": value}
    for name, x in inputs.items():
        require_tensor(name, x)
        if x.dim() < 2:
            raise ValueError(f"{name} has shape {shape_of(x)}; expected [..., length, d]")
    if autocast_dtype(query) is None:
        require_floating(**inputs)
    if key.shape[-1] != query.shape[-1] or key.shape[-1] == 0:
        raise ValueError(
            f"key has shape {shape_of(key)}; expected d_k of 1 or more, as query {shape_of(query)}"
        )
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"value has shape {shape_of(value)}; expected the length of key {shape_of(key)}"
        )
    for name, x in (("key", key), ("value", value)):
        leading = zip(x.shape[-3::-1], query.shape[-3::-1])
        if any(have != want and 1 not in (have, want) for have, want in leading):
            raise ValueError(
                f"{name} has shape {shape_of(x)}; "
                f"expected leading dimensions that fit those of query {shape_of(query)}"
            )
    if dropout is not None:
        require_callable("a function of the weights, or None", dropout=dropout)
    weights = _weights(query, key, mask)
    if dropout is not None:
        weights = dropout(weights)
    return weights @ value, weights


class MultiHeadedAttention(AliasedModule):
    """`linears[3](concat(head_0 .. head_{h-1}))`, head_i = softmax(q_i k_i^T / sqrt(d_k)) v_i.

    q_i, k_i, v_i: features i d_k .. (i+1) d_k - 1 of `linears[0](query)`, `linears[1](key)` and
    `linears[2](value)`; with fewer heads of keys and values, head i reads their head
    i // (h / kv_heads).

    Args:
        h: heads; a divisor of d_model.
        d_model: features of query, key, value and output.
        dropout: probability that an attention weight is dropped, in training.
        kv_heads: heads of keys and values, a divisor of h; h by default.

    If `keep_attention` is True, `attn` holds the weights of the last call, [B, h, T, S], detached,
    without dropout, zeros for a query that sees no key. It is False by default: the fused op never
    forms the weights.

    Raises:
        ValueError: h does not divide d_model, or kv_heads not h; the shapes do not fit; a mask of
            two dimensions could be [B, S] or [T, S]; a float mask holds other values than 0 and 1
            (what is added to the scores is `bias`); the tensors are on several devices.
        TypeError: the dtypes differ, are not floating, or are not that of the parameters.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.2; kv_heads: Ainslie et
    al. 2023, "GQA", section 2.2.
    """

    spellings: ClassVar[dict[str, str]] = {
        "linear_layers.0": "linears.0",
        "linear_layers.1": "linears.1",
        "linear_layers.2": "linears.2",
        "output_linear": "linears.3",
    }

    def __init__(
        self, h: int, d_model: int, dropout: float = 0.1, kv_heads: int | None = None
    ) -> None:
        super().__init__()
        kv_heads = h if kv_heads is None else kv_heads
        require_size(h=h, d_model=d_model, kv_heads=kv_heads)
        if d_model % h:
            raise ValueError(f"d_model is {d_model}; expected a multiple of h = {h}")
        if h % kv_heads:
            raise ValueError(f"kv_heads is {kv_heads}; expected a divisor of h = {h}")
        self.h = h
        self.kv_heads = kv_heads
        self.d_k = d_model // h
        widths = (d_model, kv_heads * self.d_k, kv_heads * self.d_k, d_model)
        self.linears = nn.ModuleList(nn.Linear(d_model, width) for width in widths)
        self.dropout = _dropout(dropout)
        self.keep_attention = False
        self.attn: Tensor | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | Packing | None = None,
        *,
        bias: Tensor | None = None,
        key_lengths: Tensor | None = None,
        is_causal: bool = False,
        window: Sequence[int | None] | None = None,
        causal_alignment: str = "top_left",
        alibi_slopes: Tensor | None = None,
        softcap: float | None = None,
        cache: KVCache | PagedKVCache | LayerCache | MemoryCache | None = None,
    ) -> Tensor:
        """Return the output [B, T, d_model], or [tokens, d_model] of a packed batch.

        Args:
            query: [B, T, d_model]; in a packed batch [tokens, d_model].
            key, value: [B, S, d_model]; in a packed batch [tokens, d_model].
            mask: booleans, integers, or floats that are 0 or 1; [B, 1, S], [B, T, S] or [1, T, S],
                shared by the heads; also [T, S] if B is not T (else it could be [B, S]), and four
                dimensions that broadcast to [B, h, T, S]. Of a packed batch, its `Packing`.
            bias, key_lengths, alibi_slopes, softcap: as in `scaled_dot_product_attention`, with h
                heads; not in a packed batch.
            is_causal, window, causal_alignment: as there.
            cache: a `KVCache` or `PagedKVCache`, to which the projected keys and values are
                appended. The queries then attend to all that it holds, S positions, causally and
                with the last query aligned with the last key, whatever is_causal says; key_lengths
                are the cache's. A `MemoryCache` keeps the keys and values of its first call.

        A query that sees no key gives `linears[3].bias`.
        """
        inputs = {"query": query, "key": key, "value": value}
        options: dict[str, Any] = dict(  # of `scaled_dot_product_attention`
            bias=bias,
            key_lengths=key_lengths,
            is_causal=is_causal,
            window=window,
            causal_alignment=causal_alignment,
            alibi_slopes=alibi_slopes,
            softcap=softcap,
        )
        if cache is not None:
            return self._forward_cached(inputs, mask, options, cache)
        if isinstance(mask, Packing):
            return self._forward_packed(inputs, mask, options)
        for name, x in inputs.items():
            _require_features(name, x, self.h * self.d_k)
        if autocast_dtype(query) is None:
            require_floating(**inputs)
        linears = list(self.linears)
        require_linear_input("query", query, linears[0])
        projected = self._projected(inputs, linears)
        q, k, v = [x.transpose(1, 2) for x in projected]  # [B, heads, T or S, d_k], views
        if mask is not None:
            require_tensor("mask", mask)
            require_device("mask", mask, "query", query)
            mask = self._over_heads(mask, (*q.shape[:3], backends.full_length(k.shape[2])))
        p = dropout_probability(self.dropout)
        grouped = self.kv_heads != self.h
        out = functional.scaled_dot_product_attention(
            q, k, v, mask, p, enable_gqa=grouped, **options
        )
        self._keep_weights(q, k, mask, options)
        return linears[3](out.transpose(1, 2).flatten(2))

    def _forward_cached(
        self,
        inputs: dict[str, Tensor],
        mask: Tensor | Packing | None,
        options: dict[str, Any],
        cache: KVCache | PagedKVCache | LayerCache | MemoryCache,
    ) -> Tensor:
        """Return the output [B, T, d_model] over the keys and values of the cache."""
        if not isinstance(cache, (KVCache, PagedKVCache, LayerCache, MemoryCache)):
            raise TypeError(f"cache is a {type(cache).__name__}; expected a KVCache or None")
        if isinstance(mask, Packing):
            raise ValueError("mask is a Packing together with a cache; expected a tensor or None")
        if backends.sequences_are_sharded():
            raise ValueError("cache is given within context_parallel; expected None")
        if options.pop("key_lengths") is not None:
            raise ValueError("key_lengths is given together with a cache; expected None")
        kept = isinstance(cache, MemoryCache) and cache.filled
        if isinstance(cache, MemoryCache) and kept:
            cache.require_memory("key", inputs.pop("key"))
            cache.require_memory("value", inputs.pop("value"))
        for name, x in inputs.items():
            _require_features(name, x, self.h * self.d_k)
        if autocast_dtype(inputs["query"]) is None:
            require_floating(**inputs)
        linears = list(self.linears)
        require_linear_input("query", inputs["query"], linears[0])
        # One by one: for a few tokens it takes longer to concatenate the weights than to read them.
        q, *new = [
            linear(x).unflatten(-1, (-1, self.d_k)).transpose(1, 2)
            for linear, x in zip(linears, inputs.values())
        ]  # [B, h, T or S, d_k], views
        if mask is not None:
            require_tensor("mask", mask)
            require_device("mask", mask, "query", q)
            length = cache.longest + (0 if kept else new[0].shape[2])
            mask = self._over_heads(mask, (*q.shape[:3], length))
        if isinstance(cache, MemoryCache):
            if not kept:
                cache.fill(inputs["key"], *new)
        else:
            cache.append(*new)
        out = cache.attend(q, mask, dropout_probability(self.dropout), **options)
        if self.keep_attention:
            self.attn = cache.weights(q, mask, **options).detach()
        return linears[3](out.transpose(1, 2).flatten(2))

    def _forward_packed(
        self, inputs: dict[str, Tensor], packing: Packing, options: dict[str, Any]
    ) -> Tensor:
        """Return the output [tokens, d_model] of inputs [tokens, d_model]."""
        for name in PADDED_OPTIONS:
            if options.pop(name, None) is not None:
                raise ValueError(f"{name} is given together with a Packing; expected None")
        linears = list(self.linears)
        for name, x in inputs.items():
            require_tokens(name, x, packing)
            if x.dim() != 2 or x.shape[1] != self.h * self.d_k:
                given = shape_of(x)
                raise ValueError(
                    f"{name} has shape {given}; expected [tokens, d_model = {self.h * self.d_k}]"
                )
            require_linear_input(name, x, linears[0])
        q, k, v = self._projected(inputs, linears)
        offsets, longest = packing.cu_seqlens, packing.longest
        p = dropout_probability(self.dropout)
        out = functional.packed_attention(
            q, k, v, offsets, offsets, longest, longest, dropout_p=p, **options
        )
        if self.keep_attention:
            q, k = (pad(x.detach(), packing).transpose(1, 2) for x in (q, k))
            positions = torch.arange(packing.length, device=q.device)
            real = positions.view(-1, 1) < packing.lengths.view(-1, 1, 1, 1)
            self._keep_weights(q, k, real, {**options, "key_lengths": packing.lengths})
        return linears[3](out.flatten(1))

    def _projected(self, inputs: dict[str, Tensor], linears: list[Any]) -> list[Tensor]:
        """Project query, key and value [.., d_model] to [.., h or kv_heads, d_k].

        The projections of one input are one GEMM, with their weights concatenated.
        """
        query, key, value = inputs.values()
        joined = 3 if query is key is value else 2 if key is value else 0
        together = linears[3 - joined : 3]
        if not all(
            type(x) is nn.Linear and is_unmodified(x) and x.bias is not None for x in together
        ):
            joined = 0
        alone = zip(linears[: 3 - joined], inputs.values())
        out = [torch.unflatten(linear(x), -1, (-1, self.d_k)) for linear, x in alone]
        if joined:
            weight = torch.cat([x.weight for x in together])
            bias = torch.cat([x.bias for x in together])
            heads = torch.unflatten(F.linear(value, weight, bias), -1, (-1, self.d_k))
            out += heads.split([self.h, self.kv_heads, self.kv_heads][3 - joined :], -2)
        return out

    def _keep_weights(
        self, q: Tensor, k: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> None:
        """Set `attn` if `keep_attention` asks for it; q: [B, h, T, d_k], k: [B, heads, S, d_k]."""
        if self.keep_attention:
            grouped = self.kv_heads != self.h
            self.attn = functional.attention_weights(
                q.detach(), k.detach(), mask, enable_gqa=grouped, **options
            )
        elif self.attn is not None:
            self.attn = None

    @staticmethod
    def _over_heads(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
        """Return the mask as booleans that broadcast to `shape`, [B, h, T, S]."""
        b, _, t, s = shape
        if mask.dim() == 3:
            return _boolean_mask(mask, (b, t, s)).unsqueeze(1)
        if mask.dim() == 2:
            spelled = (
                "mask[:, None] is [B, 1, S], of padding, "
                "and mask[None] [1, T, S], the same for each sequence"
            )
            if b == t > 1 and mask.shape[0] == b:
                raise ValueError(f"mask has shape {shape_of(mask)}: [B, S] or [T, S]? {spelled}")
            return _boolean_mask(mask, (t, s), f"; {spelled}")
        if mask.dim() != 4:
            given = shape_of(mask)
            raise ValueError(f"mask has shape {given}; expected [B, 1, S], [B, T, S] or [1, T, S]")
        return _boolean_mask(mask, shape)

    def extra_repr(self) -> str:
        grouped = "" if self.kv_heads == self.h else f", kv_heads={self.kv_heads}"
        return f"h={self.h}, d_k={self.d_k}{grouped}"


def _boolean_mask(mask: Tensor, shape: Sequence[int], hint: str = "") -> Tensor:
    """Return the mask as booleans, and require that it broadcasts to `shape`, the weights'."""
    sizes = zip(mask.shape[::-1], shape[::-1], strict=False)
    if mask.dim() > len(shape) or any(have not in (1, want) for have, want in sizes):
        given = shape_of(mask)
        raise ValueError(
            f"mask has shape {given}; expected one that broadcasts to {list(shape)}{hint}"
        )
    if mask.dtype == torch.bool:
        return mask
    if mask.is_floating_point():
        return _boolean_from_float(mask)
    if mask.dtype not in INTEGERS:
        raise TypeError(f"mask has dtype {mask.dtype}; expected booleans, integers, or 0. and 1.")
    return mask != 0


def _boolean_from_float(mask: Tensor) -> Tensor:
    """Return a float mask of 0 and 1 as booleans, and refuse any other.

    A mask that is added to the scores, in which 0 keeps a key and -inf masks it out, would mean the
    opposite.
    """
    kept = mask == 1
    known = kept | (mask == 0)
    expected = (
        f"expected 0 and 1 as the only values in a mask of dtype {mask.dtype}; pass a mask that is "
        "added to the scores as bias= (of MultiHeadedAttention and "
        "scaled_dot_product_attention), or make it boolean: mask == 0"
    )
    if may_read(mask):
        if not known.all():
            raise ValueError(f"mask holds {float(mask[~known][0])}; {expected}")
    elif torch.compiler.is_compiling() or not torch._C._functorch.is_functorch_wrapped_tensor(mask):
        torch._assert_async(known.all(), f"mask: {expected}")
    return kept


def _weights(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Return softmax(query key^T / sqrt(d_k)), [..., T, S], with masked scores set to -1e9.

    The weights of a query whose keys are all masked out are uniform.
    """
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if mask is not None:
        require_tensor("mask", mask)
        require_device("mask", mask, "query", query)
        lowest = max(-1e9, torch.finfo(scores.dtype).min)  # float16 ends at -65504
        scores = scores.masked_fill(~_boolean_mask(mask, scores.shape), lowest)
    return scores.softmax(-1)


# ------------------------------------------------------ feed-forward, norms and residual connection

ACTIVATIONS = (*functional.ACTIVATIONS, *GATED)  # of the feed-forward layer
NORMS = ("layer", "rms")


class PositionwiseFeedForward(AliasedModule):
    """w_2(dropout(activation(w_1(x)))); gated, w_2(dropout(activation(z) * v)), [z, v] = w_1(x).

    Args:
        d_model: features in and out.
        d_ff: hidden features. The gated forms have 3 d_model d_ff weights instead of 2, and as many
            as the others at two thirds of their d_ff.
        dropout: probability that a hidden element is dropped, in training.
        activation: "relu", "gelu" (by erf), "gelu_tanh" or "silu"; or gated, "geglu" or "swiglu",
            whose w_1 has the rows of z, then those of v.

    forward(x): x [..., d_model] -> [..., d_model].

    Raises:
        ValueError: an unknown activation; x has another width, or is on another device than the
            parameters.
        TypeError: the dtype of x is not that of the parameters.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.3; the gated forms: Shazeer
    2020, "GLU Variants Improve Transformer", section 2.
    """

    spellings: ClassVar[dict[str, str]] = {"w1": "w_1", "w2": "w_2"}

    def __init__(
        self, d_model: int, d_ff: int, dropout: float = 0.1, activation: str = "relu"
    ) -> None:
        super().__init__()
        require_size(d_model=d_model, d_ff=d_ff)
        self.activation = require_choice("activation", activation, ACTIVATIONS)
        self.w_1 = nn.Linear(d_model, 2 * d_ff if activation in GATED else d_ff)
        self.w_2 = nn.Linear(d_ff, d_model)
        self.dropout = _dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        require_linear_input("x", x, self.w_1)
        return apply_feed_forward(x, self.w_1, self.activation, self.dropout, self.w_2)

    def extra_repr(self) -> str:
        return "" if self.activation == "relu" else f"activation={self.activation}"


class LayerNorm(AliasedModule):
    """weight * (x - mean) / sqrt(var + eps) + bias, over the last dimension.

    With `unbiased=True` it is weight * (x - mean) / (std + eps) + bias, with N - 1 in std, as in
    the tutorials: weights that were trained there expect this form.

    Args:
        features: the size of the last dimension; 2 or more with `unbiased`.
        eps: added to the variance (to std with `unbiased`).

    forward(x): x [..., features] -> [..., features], in the dtype of x.

    Raises ValueError and TypeError as `layer_norm` does.

    Source: Ba, Kiros, Hinton 2016, "Layer Normalization", section 3.
    """

    spellings: ClassVar[dict[str, str]] = {
        "a_2": "weight",
        "a2": "weight",
        "gamma": "weight",
        "b_2": "bias",
        "b2": "bias",
        "beta": "bias",
    }

    def __init__(self, features: int, eps: float = 1e-6, unbiased: bool = False) -> None:
        super().__init__()
        require_size(2 if require_flag("unbiased", unbiased) else 1, features=features)
        require_eps(eps)
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.eps = eps
        self.unbiased = unbiased

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(
            x, self.weight.shape, self.weight, self.bias, self.eps, unbiased=self.unbiased
        )

    def after_sum(self, x: Tensor, residual: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
        """Return (self(sum), sum), where sum = residual + dropout(x), from one kernel.

        x and residual: [..., features].
        """
        return functional.dropout_add_layer_norm(
            x, residual, self.weight, self.bias, dropout_p, self.eps, unbiased=self.unbiased
        )

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, unbiased={self.unbiased}"


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps), over the last dimension.

    Args:
        features: the size of the last dimension.
        eps: added to the mean square.

    forward(x): x [..., features] -> [..., features], in the dtype of x.

    Raises ValueError and TypeError as `rms_norm` does.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", section 3.
    """

    def __init__(self, features: int, eps: float = 1e-6) -> None:
        super().__init__()
        require_size(features=features)
        require_eps(eps)
        self.weight = nn.Parameter(torch.ones(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def after_sum(self, x: Tensor, residual: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
        """Return (self(sum), sum), as `LayerNorm` does."""
        return functional.dropout_add_rms_norm(x, residual, self.weight, dropout_p, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def make_norm(norm: str, features: int) -> LayerNorm | RMSNorm:
    """Return the norm of that name, one of `NORMS`."""
    require_choice("norm", norm, NORMS)
    return LayerNorm(features) if norm == "layer" else RMSNorm(features)


class SublayerConnection(nn.Module):
    """x + dropout(sublayer(norm(x))); with norm_first=False norm(x + dropout(sublayer(x))).

    Args:
        size: features.
        dropout: probability that an element of the sublayer's output is dropped, in training.
        norm_first: which of the two forms; the paper has False.
        norm: "layer", a LayerNorm, or "rms", an RMSNorm.

    forward(x, sublayer): x [..., size] and a callable that keeps its shape -> [..., size].

    Raises ValueError and TypeError as `layer_norm` does, ValueError for another norm, and TypeError
    if sublayer cannot be called.

    Source: Vaswani et al. 2017, "Attention Is All You Need", sections 3.1 and 5.4; norm_first:
    Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture", section 3.
    """

    def __init__(
        self, size: int, dropout: float, norm_first: bool = True, norm: str = "layer"
    ) -> None:
        super().__init__()
        require_size(size=size)
        self.norm = make_norm(norm, size)
        self.dropout = _dropout(dropout)
        self.norm_first = require_flag("norm_first", norm_first)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        require_tensor("x", x)
        require_callable("a function of x", sublayer=sublayer)
        if self.norm_first:
            return add_dropped(x, sublayer(self.norm(x)), self.dropout)
        return self.norm(add_dropped(x, sublayer(x), self.dropout))

    def extra_repr(self) -> str:
        return "" if self.norm_first else "norm_first=False"


# ----------------------------------------------------------------------------------------- checks


def require_linear_input(name: str, x: Tensor, layer: nn.Module) -> None:
    """Require of x [..., features] what the layer takes, if it is an unmodified nn.Linear."""
    require_tensor(name, x)
    if type(layer) is not nn.Linear or not is_unmodified(layer):
        return
    if x.shape[-1:] != layer.weight.shape[1:]:
        raise ValueError(f"{name} has shape {shape_of(x)}; expected [..., {layer.in_features}]")
    require_device(name, x, "the parameters", layer.weight)
    if x.dtype != layer.weight.dtype and autocast_dtype(x) is None:
        raise TypeError(
            f"{name} has dtype {x.dtype}; expected that of the parameters, {layer.weight.dtype}, "
            "or torch.autocast"
        )


def _require_features(name: str, x: Tensor, features: int) -> None:
    require_tensor(name, x)
    if x.dim() != 3 or x.shape[2] != features:
        raise ValueError(f"{name} has shape {shape_of(x)}; expected [B, S, d_model = {features}]")


def require_norm_input(name: str, x: Tensor | None, norm: nn.Module | None) -> None:
    """Require floats, on the device and with the features of the norm if it is one of ours."""
    require_floating(**{name: x})
    assert x is not None
    if not (type(norm) is LayerNorm or type(norm) is RMSNorm) or not is_unmodified(norm):
        return
    if x.shape[-1:] != norm.weight.shape:
        raise ValueError(f"{name} has shape {shape_of(x)}; expected [B, S, {norm.weight.shape[0]}]")
    require_device(name, x, "the parameters", norm.weight)
