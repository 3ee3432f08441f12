"""Attention in plain PyTorch, and multi-head attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer import checks
from fastformer.cache.contiguous import AttendedCache, KVCache
from fastformer.cache.decoder import LayerCache
from fastformer.cache.memory import MemoryCache
from fastformer.description import PADDED_OPTIONS
from fastformer.eager import may_read
from fastformer.mask_tiles import BlockMask
from fastformer.nn.base import AliasedModule, make_dropout, require_linear_input
from fastformer.nn.embeddings import require_features
from fastformer.nn.norms import RMSNorm
from fastformer.nn.padding import AnyMask, Packing, pad, require_tokens, without_gaps
from fastformer.nn.stream import Pair, ResidualStream, dropout_probability, is_unmodified
from fastformer.ops import functional
from fastformer.ops.attention.joint import Projected, joint_attention


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
        checks.require_tensor(name, x)
        if x.dim() < 2:
            raise checks.wrong_shape(name, x, "[..., length, d]")
    if checks.autocast_dtype(query) is None:
        checks.require_floating(**inputs)
    if key.shape[-1] != query.shape[-1] or key.shape[-1] == 0:
        raise checks.wrong_shape("key", key, f"d_k of 1 or more, as query {checks.shape_of(query)}")
    if value.shape[-2] != key.shape[-2]:
        raise checks.wrong_shape("value", value, f"the length of key {checks.shape_of(key)}")
    for name, x in (("key", key), ("value", value)):
        leading = zip(x.shape[-3::-1], query.shape[-3::-1])
        if any(have != want and 1 not in (have, want) for have, want in leading):
            raise checks.wrong_shape(
                name, x, f"leading dimensions that fit those of query {checks.shape_of(query)}"
            )
    if dropout is not None:
        checks.require_callable("a function of the weights, or None", dropout=dropout)
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if mask is not None:
        checks.require_tensor("mask", mask)
        checks.require_device("mask", mask, "query", query)
        lowest = max(-1e9, torch.finfo(scores.dtype).min)  # float16 ends at -65504
        scores = scores.masked_fill(~_boolean_mask(mask, scores.shape), lowest)
    weights = scores.softmax(-1)
    if dropout is not None:
        weights = dropout(weights)
    return weights @ value, weights


class MultiHeadedAttention(AliasedModule):
    """`linears[3](concat(head_0 .. head_{h-1}))`, head_i = softmax(q_i k_i^T / sqrt(d_k)) v_i.

    q_i, k_i, v_i: features i d_k .. (i+1) d_k - 1 of `linears[0](query)`, `linears[1](key)` and
    `linears[2](value)`; if kv_heads is less than h, head i reads key-value head
    i // (h / kv_heads).

    Args:
        h: heads; a divisor of d_model.
        d_model: features of query, key, value and output.
        dropout: probability that an attention weight is dropped, in training.
        kv_heads: heads of keys and values, a divisor of h; h by default.
        qk_norm: if True, each head of the queries and of the keys has an RMSNorm over its d_k
            features, `query_norm` and `key_norm`.
        sinks: if True, the module has a parameter `sinks` [h], which starts as zeros: the `sinks`
            of `scaled_dot_product_attention`, with which a head may attend to nothing.
        gate: if True, the module has a linear layer `gate` of d_model features, and returns
            `linears[3](sigmoid(gate(query)) * concat(head_0 .. head_{h-1}))`.

    If `keep_attention` is True, `attn` holds the weights of the last call, [B, h, T, S], detached,
    before dropout, zeros for a query that sees no key; of a packed batch, those of the tokens of
    each sequence from 0 on. It is False by default, because the fused op does not compute them.

    Raises:
        ValueError: h does not divide d_model, or kv_heads does not divide h; the shapes do not fit;
            a mask of two dimensions could be [B, S] or [T, S]; a float mask holds other values than
            0 and 1 (pass an additive mask as `bias`); the tensors are on several devices.
        TypeError: the dtypes differ from each other or from the parameters, or are not floating.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.2; kv_heads: Ainslie et
    al. 2023, "GQA", section 2.2; sinks: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card";
    gate: Qiu et al. 2025, "Gated Attention for Large Language Models", section 2.2.
    """

    spellings: ClassVar[dict[str, str]] = {
        **{f"linear_layers.{i}": f"linears.{i}" for i in range(3)},
        "output_linear": "linears.3",
    }

    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    gate: nn.Linear | None

    @checks.refuse(head="h", embedding_dim="d_model")
    def __init__(
        self,
        h: int,
        d_model: int,
        dropout: float = 0.1,
        kv_heads: int | None = None,
        *,
        qk_norm: bool = False,
        sinks: bool = False,
        gate: bool = False,
    ) -> None:
        super().__init__()
        kv_heads = h if kv_heads is None else kv_heads
        h, d_model, kv_heads = checks.require_size(h=h, d_model=d_model, kv_heads=kv_heads)
        if d_model % h:
            raise ValueError(f"d_model is {d_model}; expected a multiple of h = {h}")
        if h % kv_heads:
            raise ValueError(f"kv_heads is {kv_heads}; expected a divisor of h = {h}")
        self.h = h
        self.kv_heads = kv_heads
        self.d_k = d_model // h
        widths = (d_model, kv_heads * self.d_k, kv_heads * self.d_k, d_model)
        self.linears = nn.ModuleList(nn.Linear(d_model, width) for width in widths)
        normed = checks.require_flag("qk_norm", qk_norm)
        self.query_norm, self.key_norm = (RMSNorm(self.d_k) if normed else None for _ in range(2))
        own = nn.Parameter(torch.zeros(h)) if checks.require_flag("sinks", sinks) else None
        self.register_parameter("sinks", own)
        gated = checks.require_flag("gate", gate)
        self.gate = nn.Linear(d_model, d_model) if gated else None
        self.dropout = make_dropout(dropout)
        self.keep_attention = False
        self.attn: Tensor | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: AnyMask = None,
        *,
        bias: Tensor | None = None,
        key_lengths: Tensor | None = None,
        is_causal: bool = False,
        window: Sequence[int | None] | None = None,
        causal_alignment: str = "top_left",
        alibi_slopes: Tensor | None = None,
        softcap: float | None = None,
        cache: KVCache | LayerCache | MemoryCache | None = None,
        rotary: Pair | None = None,
        query_packing: Packing | None = None,
        dropout_seed: int | Tensor | None = None,
        _stream: ResidualStream | None = None,
    ) -> Tensor:
        """Return the output [B, T, d_model], or [tokens, d_model] of a packed batch.

        Args:
            query: [B, T, d_model]; in a packed batch [tokens, d_model].
            key, value: [B, S, d_model]; in a packed batch [tokens, d_model].
            mask: booleans, integers, or floats that are 0 or 1; [B, 1, S], [B, T, S] or [1, T, S],
                shared by the heads; also [T, S] if B is not T (else it could be [B, S]), and four
                dimensions that broadcast to [B, h, T, S]; or a `BlockMask` of that shape. For a
                packed batch, its `Packing`, which may have a `BlockMask` of the tokens.
            bias: as in `scaled_dot_product_attention`, with h heads; in a packed batch [tokens].
            key_lengths: as in `scaled_dot_product_attention`; not for a packed batch.
            is_causal, window, causal_alignment, alibi_slopes, softcap: as in
                `scaled_dot_product_attention`.
            cache: a `KVCache`, to which the projected keys and values are appended. The queries
                then attend to all S positions of the cache, causally and with the last query
                aligned with the last key, whatever is_causal is; key_lengths must be None, as the
                cache knows them. A `MemoryCache` keeps the projected keys and values of its first
                call; later calls pass the same key and value again, or None.
            rotary: (cos, sin) of the positions of query and key, which are as long, as
                `rotary_embedding` takes them and `RotaryEmbedding` returns them. The keys in a
                cache are rotated already.
            query_packing: the `Packing` of the queries, if `mask` is that of other keys, such as
                the memory's.
            dropout_seed: as in `scaled_dot_product_attention`; not with a cache.

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
            sinks=self.sinks,
        )
        if query_packing is not None and not isinstance(mask, Packing):
            raise ValueError(
                f"query_packing is given, and mask is a {type(mask).__name__}; "
                "expected the Packing of the keys as mask"
            )
        if cache is not None:
            if dropout_seed is not None:
                raise ValueError("dropout_seed is given together with a cache; expected None")
            return self._forward_cached(inputs, mask, options, cache, rotary, _stream)
        if isinstance(mask, Packing):
            options["dropout_seed"] = dropout_seed
            out = self._forward_packed(inputs, (query_packing, mask), options, rotary)
            return self._output(query, out, _stream)
        for name, x in inputs.items():
            require_features(name, x, self.h * self.d_k)
        if checks.autocast_dtype(query) is None:
            checks.require_floating(**inputs)
        linears = list(self.linears)
        require_linear_input("query", query, linears[0])
        projected = Projected(self._projected(inputs, linears), self.h, (0, 2, 1, 3))
        q, k, v = projected.parts()  # [B, heads, T or S, d_k]
        if mask is not None and not isinstance(mask, BlockMask):
            mask = _over_heads(mask, q, k.shape[2])
        p = dropout_probability(self.dropout)
        grouped = self.kv_heads != self.h
        q, k, rotation = self._positioned(q, k, rotary)
        op, given = "scaled_dot_product_attention", (q, k, v, mask, p)
        more = dict(enable_gqa=grouped, dropout_seed=dropout_seed)
        out = joint_attention(op, projected, rotation, *given, **more, **options)
        self._keep_weights(q, k, mask, options)
        return self._output(query, out.transpose(1, 2).flatten(2), _stream)

    def _output(self, query: Tensor, heads: Tensor, stream: ResidualStream | None = None) -> Tensor:
        """Return the projection of the concatenated heads [.., d_model], after the gate, without
        its bias if the stream takes it.
        """
        if self.gate is not None:
            heads = functional.gated_activation(self.gate(query), heads, "sigmoid")
        last: Any = self.linears[3]
        if stream is not None and _is_plain_linear(last) and stream.takes(last.bias):
            return F.linear(heads, last.weight)
        return last(heads)

    def _forward_cached(
        self,
        inputs: dict[str, Tensor],
        mask: AnyMask,
        options: dict[str, Any],
        cache: KVCache | LayerCache | MemoryCache,
        rotary: Pair | None,
        stream: ResidualStream | None,
    ) -> Tensor:
        """Return the output [B, T, d_model] over the keys and values of the cache."""
        _require_cache(cache, mask, options.pop("key_lengths"), rotary)
        assert not isinstance(mask, Packing)
        mask = mask.dense() if isinstance(mask, BlockMask) else mask
        kept = isinstance(cache, MemoryCache) and cache.filled
        if isinstance(cache, MemoryCache) and kept:
            cache.require_memory("key", inputs.pop("key"))
            cache.require_memory("value", inputs.pop("value"))
        first, *others = inputs.values()
        given = {"query": first} if all(x is first for x in others) else inputs  # look once
        for name, x in given.items():
            require_features(name, x, self.h * self.d_k)
        if checks.autocast_dtype(first) is None:
            checks.require_floating(**given)
        linears = list(self.linears)
        require_linear_input("query", first, linears[0])
        # One GEMM for each: for few tokens, joining the weights takes longer than reading them.
        projected = (linear(x) for linear, x in zip(linears, inputs.values()))
        q, *new = [x.unflatten(-1, (-1, self.d_k)).transpose(1, 2) for x in projected]
        if new:
            q, new[0], _ = self._positioned(q, new[0], rotary, now=True)
        elif self.query_norm is not None:
            q = self.query_norm(q)
        if mask is not None:
            mask = _over_heads(mask, q, cache.longest + (0 if kept else new[0].shape[2]))
        if isinstance(cache, MemoryCache):
            if not kept:
                cache.fill(inputs["key"], *new)
        else:
            cache.append(*new)
        out = cache.attend(q, mask, dropout_probability(self.dropout), **options)
        if self.keep_attention:
            self.attn = cache.weights(q, mask, **options).detach()
        return self._output(first, out.transpose(1, 2).flatten(2), stream)

    def _forward_packed(
        self,
        inputs: dict[str, Tensor],
        packings: tuple[Packing | None, Packing],
        options: dict[str, Any],
        rotary: Pair | None,
    ) -> Tensor:
        """Return the heads' outputs [tokens, d_model] for inputs [tokens, d_model]. packings: that
        of the queries, None if it is that of the keys, and that of the keys.
        """
        query_packing, packing = packings
        own = packing if query_packing is None else query_packing
        checks.require_instance("query_packing", own, Packing, "a Packing or None")
        if own.batch != packing.batch:
            raise ValueError(
                f"query_packing has {own.batch} sequences; expected those of mask, {packing.batch}"
            )
        at_bottom = options["causal_alignment"] == "bottom_right"
        if query_packing is not None and self.keep_attention and at_bottom:
            raise ValueError(
                "causal_alignment is 'bottom_right' beside a query_packing and keep_attention; "
                "expected 'top_left', or keep_attention = False"
            )
        mask = packing.mask if query_packing is None else None
        for name in PADDED_OPTIONS:
            if options.pop(name, None) is not None:
                raise ValueError(f"{name} is given together with a Packing; expected None")
        linears = list(self.linears)
        for name, x in inputs.items():
            require_tokens(name, x, own if name == "query" else packing)
            if x.dim() != 2 or x.shape[1] != self.h * self.d_k:
                raise checks.wrong_shape(name, x, f"[tokens, d_model = {self.h * self.d_k}]")
            require_linear_input(name, x, linears[0])
        projected = Projected(self._projected(inputs, linears), self.h, (0, 1, 2))
        q, k, v = projected.parts()
        offsets = own.cu_seqlens, packing.cu_seqlens, own.longest, packing.longest
        p = dropout_probability(self.dropout)
        q, k, rotation = self._positioned(q, k, rotary)
        op, rows = "packed_attention", (q, k, v, *offsets)
        out = joint_attention(
            op, projected, rotation, *rows, attn_mask=mask, dropout_p=p, **options
        )
        if self.keep_attention:
            if mask is not None:
                raise ValueError(
                    "keep_attention is True, and the Packing has a mask; expected one of the two"
                )
            own, packing = without_gaps(own), without_gaps(packing)
            columns = len(packing.indices)  # later rows belong to no sequence
            q, k = pad(q.detach()[: len(own.indices)], own), pad(k.detach()[:columns], packing)
            q, k = q.transpose(1, 2), k.transpose(1, 2)
            positions = torch.arange(own.length, device=q.device)
            real = positions.view(-1, 1) < own.lengths.view(-1, 1, 1, 1)
            options |= dict(key_lengths=packing.lengths, causal_alignment="top_left")
            del options["dropout_seed"]
            if options["bias"] is not None:
                options["bias"] = pad(options["bias"].detach()[:columns], packing)[:, None, None]
            self._keep_weights(q, k, real, options)
        return out.flatten(1)

    def _projected(self, inputs: dict[str, Tensor], linears: list[Any]) -> list[Tensor]:
        """Project query, key and value [.., d_model] to [.., h or kv_heads, d_k].

        Projections of the same tensor are one GEMM with concatenated weights and one result,
        [.., h + 2 kv_heads, d_k] or [.., 2 kv_heads, d_k], if they are unmodified nn.Linear modules
        with a bias.
        """
        query, key, value = inputs.values()
        joined = 3 if query is key is value else 2 if key is value else 0
        together = linears[3 - joined : 3]
        if not all(_is_plain_linear(x) for x in together):
            joined = 0
        alone = zip(linears[: 3 - joined], inputs.values())
        out = [torch.unflatten(linear(x), -1, (-1, self.d_k)) for linear, x in alone]
        if joined:
            weight = torch.cat([x.weight for x in together])
            bias = torch.cat([x.bias for x in together])
            out.append(torch.unflatten(F.linear(value, weight, bias), -1, (-1, self.d_k)))
        return out

    def _positioned(
        self, q: Tensor, k: Tensor, rotary: Pair | None, now: bool = False
    ) -> tuple[Tensor, Tensor, dict[str, Any] | None]:
        """Return q and k, and the arguments of `rotary_embedding`, the norms and the rotation, that
        `joint_attention` has to compute first. They are None if that is done already: with now, for
        `_keep_weights`, and after norms that are modules of their own.
        """
        if rotary is not None and (not isinstance(rotary, tuple) or len(rotary) != 2):
            raise TypeError(f"rotary is a {type(rotary).__name__}; expected (cos, sin) or None")
        rotation: dict[str, Any] = {} if rotary is None else dict(zip(("cos", "sin"), rotary))
        first, second = self.query_norm, self.key_norm
        if first is not None and second is not None:
            fused = type(first) is type(second) is RMSNorm and is_unmodified(first, second)
            if rotation and fused and first.eps == second.eps:
                rotation |= dict(query_norm=first.weight, key_norm=second.weight, eps=first.eps)
            else:
                q, k, now = first(q), second(k), True
        if rotation and (now or self.keep_attention):
            q, k = functional.rotary_embedding(q, k, **rotation)
            now = True
        return q, k, None if now else rotation

    def _keep_weights(
        self, q: Tensor, k: Tensor, mask: Tensor | BlockMask | None, options: dict[str, Any]
    ) -> None:
        """Set `attn` to the weights of q [B, h, T, d_k] and k if `keep_attention`, else to None."""
        if self.keep_attention:
            self.attn = functional.attention_weights(
                q.detach(), k.detach(), mask, enable_gqa=self.kv_heads != self.h, **options
            )
        elif self.attn is not None:
            self.attn = None

    def extra_repr(self) -> str:
        grouped = "" if self.kv_heads == self.h else f", kv_heads={self.kv_heads}"
        return f"h={self.h}, d_k={self.d_k}{grouped}"


def _require_cache(
    cache: object, mask: AnyMask, key_lengths: Tensor | None, rotary: Pair | None
) -> None:
    """Require a cache, and no argument that does not go with it."""
    checks.require_instance("cache", cache, AttendedCache, "a KVCache or None")
    if isinstance(mask, Packing):
        raise ValueError("mask is a Packing together with a cache; expected a tensor or None")
    if key_lengths is not None:
        raise ValueError("key_lengths is given together with a cache; expected None")
    if isinstance(cache, MemoryCache) and rotary is not None:
        raise ValueError("rotary is given together with a MemoryCache; expected None")


def _over_heads(mask: Tensor, query: Tensor, s: int) -> Tensor:
    """Return the mask as booleans that broadcast to [B, h, T, S], for a query [B, h, T, d_k]."""
    checks.require_tensor("mask", mask)
    checks.require_device("mask", mask, "query", query)
    b, h, t, _ = query.shape
    if mask.dim() == 4:
        return _boolean_mask(mask, (b, h, t, s))
    if mask.dim() == 3:
        hint = "; of a mask [h, T, S] for each head, mask[None]"
        return _boolean_mask(mask, (b, t, s), hint).unsqueeze(1)
    if mask.dim() != 2:
        raise checks.wrong_shape("mask", mask, "[B, 1, S], [B, T, S] or [1, T, S]")
    spelled = (
        "mask[:, None] is [B, 1, S], of padding, "
        "and mask[None] [1, T, S], the same for each sequence"
    )
    if b == t > 1 and mask.shape[0] == b:
        raise ValueError(f"mask has shape {checks.shape_of(mask)}: [B, S] or [T, S]? {spelled}")
    return _boolean_mask(mask, (t, s), f"; {spelled}")


def _is_plain_linear(layer: nn.Module) -> bool:
    """Return whether the layer is an unmodified nn.Linear with a bias."""
    return type(layer) is nn.Linear and layer.bias is not None and is_unmodified(layer)


def _boolean_mask(mask: Tensor, shape: Sequence[int], hint: str = "") -> Tensor:
    """Return the mask as booleans; require that it broadcasts to `shape`, that of the weights."""
    sizes = zip(mask.shape[::-1], shape[::-1], strict=False)
    if mask.dim() > len(shape) or any(1 != have != want for have, want in sizes):
        expected = f"one that broadcasts to {list(shape)}{hint}"
        raise checks.wrong_shape("mask", mask, expected)
    if mask.dtype == torch.bool:
        return mask
    if mask.is_floating_point():
        return _boolean_from_float(mask)
    if mask.dtype not in checks.INTEGERS:
        raise TypeError(f"mask has dtype {mask.dtype}; expected booleans, integers, or 0. and 1.")
    return mask != 0


def _boolean_from_float(mask: Tensor) -> Tensor:
    """Return a float mask of 0 and 1 as booleans; raise ValueError for any other value.

    An additive mask, in which 0 keeps a key and -inf masks it out, has the opposite meaning. Where
    the host must not read the values, a wrong one fails an assertion on the device.
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
