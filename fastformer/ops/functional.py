"""The ops. Each docstring is the contract: formula, shapes, dtypes, errors, source.

Every function checks its arguments before any kernel starts, and hands them to `backends.run`,
which picks the Triton kernel or the PyTorch reference. An argument of another type - a flag that is
no bool, a sparse or a nested tensor - raises a TypeError, a value that cannot be raises a
ValueError; each error names the argument, and says what was given and what is expected. Shapes,
dtypes, devices and numbers are always checked. The values of a tensor (lengths, token ids) are
checked on a CPU, and on a GPU only where FASTFORMER_CHECK=1 is set, because reading them waits for
the device.

Shapes: B batch, H heads, G key-value heads, Sq queries, Sk keys, D and Dv head dims, N features.

Under torch.autocast the floating arguments of attention and of feed_forward are cast to its dtype,
as torch does for its own attention and linear ops; layer_norm keeps the dtype of its input, with
statistics in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastformer.checks import (
    FLOATING,
    INTEGERS,
    INTS,
    STRIDED,
    autocast,
    autocast_dtype,
    autocasts,
    may_read,
    require_choice,
    require_device,
    require_dropout,
    require_eps,
    require_flag,
    require_floating,
    require_ids,
    require_int,
    require_number,
    require_probability,
    require_size,
    require_tensor,
    require_token,
    seed_tensor,
    shape_of,
)
from fastformer.description import Attention, RowShard, Shard
from fastformer.dispatch import backends
from fastformer.ops import reference
from fastformer.ops.feed_forward.reference import ACTIVATIONS

MAX_HEAD_DIM = 256
PAGE_SIZES = (16, 32, 64, 128, 256)

__all__ = [
    "attention_weights",
    "cross_entropy",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "embed",
    "feed_forward",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "packed_attention",
    "paged_attention",
    "rms_norm",
    "scaled_dot_product_attention",
    "swiglu",
]


# -------------------------------------------------------------------------------------- attention


ALIGNMENTS = ("top_left", "bottom_right")
Scores = tuple[int, int, int, int]  # their shape, [B, H, Sq, Sk]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    window: Sequence[int | None] | None = None,
    causal_alignment: str = "top_left",
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    shard: Sequence[int] | None = None,
) -> Any:
    """Compute softmax(scale query key^T + bias, over the keys that the query may see) value.

    Args:
        query: [B, H, Sq, D], float32, float16, bfloat16 or float64. D is at most 256. Any strides.
        key: [B, G, Sk, D], of the same dtype. G is H; with `enable_gqa` H is a multiple of G, and
            query head h reads key-value head h // (H / G).
        value: [B, G, Sk, Dv]. All three may come without their heads, [B, S, D].
        attn_mask: boolean, anything that broadcasts to [B, H, Sq, Sk] (without heads: to
            [B, Sq, Sk]); True keeps the key. It is read through its strides, never expanded. None
            keeps all keys. A floating mask is a `bias`, as in torch.
        dropout_p: probability in [0, 1] that a weight is dropped, rounded to a multiple of 2^-16;
            the others are scaled by 1/(1 - dropout_p). It always applies: pass 0 in evaluation.
        is_causal: query i sees keys j <= i + shift.
        scale: the factor on query key^T; 1/sqrt(D) by default.
        bias: added to the scores, float32 or the dtype of the query, anything that broadcasts as
            attn_mask does. -inf masks the key out, and so does everything below -2.3586e38, the
            lowest float32 times log 2, such as the finfo.min of float32 and bfloat16. It has a
            gradient, of the shape of what is passed; so pass a bias unexpanded.
        key_lengths: [B] integers: sequence b has the keys 0 .. key_lengths[b] - 1. Whole blocks
            past it are skipped.
        window: (left, right): query i sees keys i + shift - left <= j <= i + shift + right, both
            ends included; None for a side without a bound.
        causal_alignment: "top_left", shift = 0, as in torch, or "bottom_right", shift = Sk - Sq, Sk
            being the key length of the sequence where one is given: the last query is aligned
            with the last key.
        alibi_slopes: [H] or [B, H] floats; adds -slope |i + shift - j|. No gradient.
        softcap: c > 0: the scores become c tanh(scale query key^T / c), before bias and masks, with
            an absolute error of some c 2^-24 in the kernels: it is meant for caps up to hundreds.
        sinks: [H], float32 or the dtype of the query: a logit of each head that takes part in the
            denominator of the softmax alone, exp(sink_h) + sum_j exp(score_ij), as a key whose
            value is zero. Bias, ALiBi and softcap do not touch it; -inf is none. It has a gradient.
        dropout_seed: the key of the dropout mask, an int of 64 bits or a tensor of one int64: the
            mask is a function of it and of (b, h, i, j) alone, the same on every backend. None
            draws one from torch's generator.
        return_lse: also returns log sum_j exp(score_ij), the sink included.
        shard: where in a larger call, the whole, this one lies: `Shard(batch, head, query, key,
            heads, queries, keys)`, the index in the whole of its first sequence, head, query and
            key, and the H, Sq and Sk of the whole, 0 for those of this call. Causality, window,
            alignment, ALiBi and dropout are then those of the whole, and `key_lengths` has its
            lengths; the other tensors have the part of the shard. Beside dropout, query and key
            are multiples of 16. The sinks belong to one shard of the keys alone. Outputs of shards
            of the keys are merged by their lse; its rounding, up to 2^-24 |lse| in float32, is then
            the relative error of their weights, 6% for |lse| = 1e6. `context_parallel` has no such
            error.

    Mask, bias, causality, window and lengths combine: a query sees a key where all allow it.
    Four queries (down) and six keys (across), x where the query sees the key:

        is_causal      bottom_right   window=(1, 1)   window=(1, 0),   key_lengths=[5],
                                                      bottom_right     is_causal, bottom_right
        x . . . . .    x x x . . .    x x . . . .     . x x . . .      x x . . . .
        x x . . . .    x x x x . .    x x x . . .     . . x x . .      x x x . . .
        x x x . . .    x x x x x .    . x x x . .     . . . x x .      x x x x . .
        x x x x . .    x x x x x x    . . x x x .     . . . . x x      x x x x x .

    Returns:
        [B, H, Sq, Dv] in the dtype of the query. A query that sees no key gives zeros, and finite
        gradients. With `return_lse` also the natural logarithm [B, H, Sq] of the sum, float32
        (float64 for float64), before dropout; where no key is seen the sink, or -inf. It has a
        gradient.

    NaN that a query may see - in itself, in a key, value or bias that it may see, in scale, slope
    or sink - reaches its output, its logarithm and the gradients, as in torch's math path. A key
    that no query may see - past its length, or masked out for all queries by a mask or a bias of
    shape [.., 1, Sk] - may hold anything, NaN included. Under any other mask, causality included,
    every key and value has to be finite, as in torch.

    A second derivative, and forward-mode differentiation, go through the reference. (Where that is
    torch's own op, on a CPU in float32 and below without dropout or softcap, a second derivative is
    not implemented; in float64 it is.)

    Raises:
        ValueError: shapes that do not fit, dropout_p outside [0, 1], a length outside [0, Sk], a
            negative side of the window, an unknown alignment, a softcap that is not positive, a
            floating attn_mask beside a bias, a shard that does not lie inside of the whole, several
            devices.
        TypeError: dtypes that differ or are not floating, a mask of integers.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1; the tiled form: Dao
    2023, "FlashAttention-2", section 3.1; of few queries: Dao et al. 2023, "Flash-Decoding for
    long-context inference"; ALiBi: Press et al. 2021, "Train Short, Test Long", section 3; windows:
    Beltagy et al. 2020, "Longformer", section 3.1; softcap: Gemma Team 2024, "Gemma 2", section 2;
    sinks: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", on its architecture, after Xiao et
    al. 2023, "Efficient Streaming Language Models with Attention Sinks".
    """
    three = False
    if not _are_heads(query, key, value):
        query, key, value = autocast(query, key, value)
        require_floating(query=query, key=key, value=value)
        three = query.dim() == 3
        query, key, value = _with_heads(three, query=query, key=key, value=value)
    enable_gqa = require_flag("enable_gqa", enable_gqa)
    scale, scores = _require_attention(query, key, value, scale, enable_gqa)
    if shard is None and backends.sequences_are_sharded():
        scores = (*scores[:3], backends.full_length(scores[3]))  # of all keys
    if attn_mask is not None or bias is not None:
        attn_mask, bias = _mask_and_bias(attn_mask, bias, query, scores, three)
    p = require_dropout("dropout_p", dropout_p)
    if shard is not None:
        shard = _shard(shard, scores, p)
    if key_lengths is not None:
        _require_lengths(key_lengths, query, scores[3] if shard is None else shard.keys)
        key_lengths = key_lengths.contiguous()
    attention = Attention(
        attn_mask,
        p,
        require_flag("is_causal", is_causal),
        scale,
        bias,
        key_lengths,
        None if window is None else _window(window),
        require_choice("causal_alignment", causal_alignment, ALIGNMENTS),
        None if alibi_slopes is None else _slopes(alibi_slopes, query),
        None if softcap is None else _softcap(softcap),
        None if sinks is None else _sinks(sinks, query),
        None if p == 0 and dropout_seed is None else seed_tensor(dropout_seed, p, query.device),
        shard,
    )
    result = backends.run(
        "scaled_dot_product_attention",
        query=query,
        key=key,
        value=value,
        attention=attention,
        return_lse=require_flag("return_lse", return_lse),
    )
    if not three:
        return result
    return tuple(x.squeeze(1) for x in result) if return_lse else result.squeeze(1)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    causal_alignment: str = "top_left",
    window: Sequence[int | None] | None = None,
    sinks: Tensor | None = None,
    dropout_seed: int | Tensor | None = None,
    shard: Sequence[int] | None = None,
) -> Tensor:
    """Compute `scaled_dot_product_attention` of each sequence of a batch without padding.

    The tokens of all sequences stand one after the other; sequence b has the queries
    cu_seqlens_q[b] .. cu_seqlens_q[b+1] - 1 and sees its own keys alone. `fastformer.unpad` makes
    such a batch.

        tokens         a a a b b c c c c          cu_seqlens  0 3 5 9

    Args:
        query: [Tq, H, D], float32, float16, bfloat16 or float64. D is at most 256.
        key: [Tk, G, D], of the same dtype; G divides H, and query head h reads key-value head
            h // (H / G).
        value: [Tk, G, Dv].
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32: from 0, not decreasing, to Tq and to Tk.
        max_q, max_k: the longest sequence, or more.
        dropout_p, scale, sinks: as in `scaled_dot_product_attention`.
        is_causal, causal_alignment, window: likewise, with i and j counted inside of the sequence,
            and the bottom right its own.
        dropout_seed: likewise; the mask is that of the padded batch.
        shard: likewise, of whole sequences: with its batch, head and heads alone.

    Returns:
        [Tq, H, Dv] in the dtype of the query; zeros for the queries of a sequence without keys.

    Raises:
        ValueError: shapes that do not fit; offsets that do not begin at 0, that decrease or do not
            end at the number of tokens; a sequence longer than max_q or max_k; a shard of queries
            or keys.
        TypeError: dtypes that differ or are not floating, offsets that are not int32.

    Source: Dao 2023, "FlashAttention-2"; the packing: Krell et al. 2021, "Efficient Sequence
    Packing without Cross-contamination".
    """
    query, key, value = autocast(query, key, value)
    require_floating(query=query, key=key, value=value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 3:
            raise ValueError(f"{name} has shape {shape_of(x)}; expected [tokens, heads, D]")
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    scale, _ = _require_attention(q, k, v, scale, True)
    for name, cu, x_name, x, longest in (
        ("cu_seqlens_q", cu_seqlens_q, "query", query, max_q),
        ("cu_seqlens_k", cu_seqlens_k, "key", key, max_k),
    ):
        _require_offsets(name, cu, x_name, x, longest)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k has shape {shape_of(cu_seqlens_k)}; "
            f"expected that of cu_seqlens_q, {shape_of(cu_seqlens_q)}"
        )
    p = require_dropout("dropout_p", dropout_p)
    if shard is None:
        _refuse_context("packed_attention")
    attention = Attention(
        None,
        p,
        require_flag("is_causal", is_causal),
        scale,
        window=_window(window),
        causal_alignment=require_choice("causal_alignment", causal_alignment, ALIGNMENTS),
        sinks=_sinks(sinks, q),
        dropout_seed=seed_tensor(dropout_seed, p, query.device),
        shard=None if shard is None else _packed_shard(shard, query.shape[1], p),
        cu_seqlens_q=cu_seqlens_q.contiguous(),
        cu_seqlens_k=cu_seqlens_k.contiguous(),
        max_q=max_q,
        max_k=max_k,
    )
    return backends.run("packed_attention", query=query, key=key, value=value, attention=attention)


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    key_lengths: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    bias: Tensor | None = None,
    window: Sequence[int | None] | None = None,
    causal_alignment: str = "top_left",
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute `scaled_dot_product_attention` over keys and values that lie in pages.

    Key j of sequence b stands in page block_table[b, j // page], at place j % page.

    Args:
        query: [B, H, Sq, D], float32, float16, bfloat16 or float64. D is at most 256.
        key_pages: [P, page, G, D], of the same dtype, any strides. A page has 16, 32, 64, 128 or
            256 keys. G divides H, and query head h reads key-value head h // (H / G).
        value_pages: [P, page, G, Dv].
        block_table: [B, blocks] int32: the pages of each sequence, in order. Sk below is
            blocks * page. Only entries that hold keys are read.
        key_lengths: [B] integers: sequence b has the keys 0 .. key_lengths[b] - 1.
        attn_mask, bias: as in `scaled_dot_product_attention`, without gradient.
        is_causal, scale, window, causal_alignment, alibi_slopes, softcap, sinks: as there.
        return_lse: likewise.

    Returns:
        [B, H, Sq, Dv] in the dtype of the query, and with `return_lse` the logarithm [B, H, Sq] of
        the sum, as in `scaled_dot_product_attention`. They have no gradient.

    Raises:
        ValueError: what `scaled_dot_product_attention` raises; a page of another size; a length
            outside [0, Sk]; a page outside [0, P) among the entries that hold keys. On a GPU, where
            the table is not looked at, such a page is clamped.
        TypeError: dtypes that differ or are not floating, a table that is not int32.
        RuntimeError: a tensor requires a gradient, outside of torch.no_grad().

    Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", section 4.1.
    """
    query, key_pages, value_pages = autocast(query, key_pages, value_pages)
    require_floating(query=query, key_pages=key_pages, value_pages=value_pages)
    _with_heads(False, query=query)
    k_length = _require_pages(query, key_pages, value_pages, block_table)
    _require_lengths(key_lengths, query, k_length)
    if may_read(block_table) and may_read(key_lengths):
        _require_table(block_table, key_lengths, key_pages)
    scale, scores = _default_scale(scale, query.shape[3]), (*query.shape[:3], k_length)
    band = is_causal, window, causal_alignment
    others = attn_mask, bias, key_lengths, alibi_slopes, softcap, sinks
    attention = _described(query, scores, scale, band, *others)
    _refuse_context("paged_attention")
    if torch.is_grad_enabled():
        given = dict(query=query, key_pages=key_pages, value_pages=value_pages)
        _refuse_gradients(**given, bias=attention.bias, sinks=attention.sinks)
    return backends.run(
        "paged_attention",
        query=query,
        key_pages=key_pages,
        value_pages=value_pages,
        block_table=block_table.contiguous(),
        attention=attention,
        return_lse=require_flag("return_lse", return_lse),
    )


def attention_weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    window: Sequence[int | None] | None = None,
    causal_alignment: str = "top_left",
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    rows: slice | Tensor | None = None,
    heads: slice | Tensor | None = None,
) -> Tensor:
    """Compute the weights of the values in `scaled_dot_product_attention`, without dropout.

    It computes some rows and heads at a time, because the attention itself never holds all
    weights. It is plain PyTorch on every backend, with gradients.

    Args:
        query, key: as in `scaled_dot_product_attention`, with their heads.
        attn_mask, is_causal, scale, enable_gqa, bias: as there.
        key_lengths, window, causal_alignment, alibi_slopes, softcap, sinks: as there.
        rows: the queries wanted, a slice within them or a tensor of int64 indices; None for all.
        heads: the heads wanted, likewise.

    Returns:
        [B, heads, rows, Sk] in the dtype of the query. The weights of a query that sees no key are
        zeros; the others sum to 1, or with the weight of the sink to 1.

    Raises:
        ValueError, TypeError: as `scaled_dot_product_attention`; rows or heads that are neither;
            an index, or a bound of a slice, past the end.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1.
    """
    _refuse_context("attention_weights")
    query, key = autocast(query, key)
    require_floating(query=query, key=key)
    query, key = _with_heads(False, query=query, key=key)
    enable_gqa = require_flag("enable_gqa", enable_gqa)
    scale, scores = _require_attention(query, key, key, scale, enable_gqa)
    if key_lengths is not None:
        _require_lengths(key_lengths, query, scores[3])
    for name, x, n in (("rows", rows, scores[2]), ("heads", heads, scores[1])):
        _require_index(name, x, n, query)
    band = is_causal, window, causal_alignment
    others = attn_mask, bias, key_lengths, alibi_slopes, softcap, sinks
    attention = _described(query, scores, scale, band, *others)
    return reference.attention_weights(query, key, attention, rows, heads)


def _described(
    query: Tensor,
    scores: Scores,
    scale: float,
    band: tuple[bool, Sequence[int | None] | None, str],
    attn_mask: Tensor | None,
    bias: Tensor | None,
    key_lengths: Tensor | None,
    alibi_slopes: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Attention:
    """Return the description of attention with heads and without dropout, after the checks of all
    but scale and lengths. (`scaled_dot_product_attention` writes it out, where a call is faster.)
    """
    is_causal, window, alignment = band
    attn_mask, bias = _mask_and_bias(attn_mask, bias, query, scores, False)
    return Attention(
        attn_mask,
        0.0,
        require_flag("is_causal", is_causal),
        scale,
        bias,
        None if key_lengths is None else key_lengths.contiguous(),
        _window(window),
        require_choice("causal_alignment", alignment, ALIGNMENTS),
        _slopes(alibi_slopes, query),
        _softcap(softcap),
        _sinks(sinks, query),
    )


def _are_heads(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Say whether these are dense tensors [B, H, S, D] of one dtype and device, and not to be cast.

    Most calls have such; one look at each costs a third of the checks that name what is wrong.
    """
    return (
        type(query) is type(key) is type(value) is Tensor
        and query.dtype is key.dtype is value.dtype
        and query.dtype in FLOATING
        and query.device == key.device == value.device
        and query.layout is key.layout is value.layout is STRIDED
        and query.dim() == key.dim() == value.dim() == 4
        and not (query.is_nested or key.is_nested or value.is_nested or autocasts())
    )


def _with_heads(three: bool, **tensors: Tensor) -> list[Tensor]:
    """Return each as [B, H, S, D]; one head is added where the query has three dimensions."""
    for name, x in tensors.items():
        if x.dim() != 4 - three:
            known = "three dimensions [B, S, D], as query" if three else "four [B, H, S, D]"
            if name == "query":
                known = "four dimensions [B, H, S, D], or three [B, S, D]"
            raise ValueError(f"{name} has shape {shape_of(x)}; expected {known}")
    return [x.unsqueeze(1) if three else x for x in tensors.values()]


def _require_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, enable_gqa: bool
) -> tuple[float, Scores]:
    """Check the shapes [B, H, S, D] against each other. Return the scale or its default, and the
    shape of the scores.
    """
    batch, heads, q_length, dim = query.shape
    key_batch, key_heads, k_length, key_dim = key.shape
    value_batch, value_heads, value_length, value_dim = value.shape
    if key_batch != batch or value_batch != batch:
        raise ValueError(
            f"key {shape_of(key)} and value {shape_of(value)}; "
            f"expected the batch of query {shape_of(query)}, {batch}"
        )
    if key_dim != dim:
        raise ValueError(
            f"key {shape_of(key)}; expected the head dim of query {shape_of(query)}, {dim}"
        )
    if value_heads != key_heads or value_length != k_length:
        raise ValueError(
            f"value {shape_of(value)}; expected the heads and the length of key {shape_of(key)}"
        )
    if not enable_gqa and key_heads != heads:
        raise ValueError(
            f"key {shape_of(key)}; "
            f"expected the {heads} heads of query {shape_of(query)} (or enable_gqa=True)"
        )
    if enable_gqa and (heads % key_heads if key_heads else heads):
        raise ValueError(f"key {shape_of(key)}; expected a number of heads that divides {heads}")
    if dim > MAX_HEAD_DIM or value_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"query {shape_of(query)}, value {shape_of(value)}; "
            f"expected head dims of at most {MAX_HEAD_DIM}"
        )
    return _default_scale(scale, dim), (batch, heads, q_length, k_length)


def _default_scale(scale: float | None, dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(max(1, dim))
    return require_number("scale", scale, "a number or None")


def _require_pages(query: Tensor, keys: Tensor, values: Tensor, table: Tensor) -> int:
    """Check pages and table against the query, and return how many keys a sequence may have."""
    batch, heads, _, dim = query.shape
    for name, x in (("key_pages", keys), ("value_pages", values)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {shape_of(x)}; expected [P, page, G, D]")
    if keys.shape[1] not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        raise ValueError(f"key_pages has shape {shape_of(keys)}; expected pages of {sizes} keys")
    if keys.shape[0] < 1:
        raise ValueError(f"key_pages has shape {shape_of(keys)}; expected one page or more")
    if values.shape[:3] != keys.shape[:3]:
        raise ValueError(
            f"value_pages has shape {shape_of(values)}; "
            f"expected the pages and the heads of key_pages {shape_of(keys)}"
        )
    if keys.shape[3] != dim:
        raise ValueError(
            f"key_pages {shape_of(keys)}; expected the head dim of query {shape_of(query)}, {dim}"
        )
    if heads % keys.shape[2] if keys.shape[2] else heads:
        raise ValueError(
            f"key_pages {shape_of(keys)}; expected a number of heads that divides {heads}"
        )
    if dim > MAX_HEAD_DIM or values.shape[3] > MAX_HEAD_DIM:
        raise ValueError(
            f"query {shape_of(query)}, value_pages {shape_of(values)}; "
            f"expected head dims of at most {MAX_HEAD_DIM}"
        )
    require_tensor("block_table", table, "an int32 tensor")
    if table.dtype != torch.int32:
        raise TypeError(f"block_table has dtype {table.dtype}; expected torch.int32")
    if table.dim() != 2 or table.shape[0] != batch:
        raise ValueError(
            f"block_table has shape {shape_of(table)}; expected [B, blocks] with B = {batch}"
        )
    require_device("block_table", table, "query", query)
    return table.shape[1] * keys.shape[1]


def _require_table(table: Tensor, key_lengths: Tensor, keys: Tensor) -> None:
    """Require that the entries which hold keys are pages."""
    pages, page = keys.shape[:2]
    first = torch.arange(table.shape[1], device=table.device) * page
    used = table[first < key_lengths.view(-1, 1)]
    if used.numel():
        low, high = map(int, used.aminmax())
        if low < 0 or high >= pages:
            raise ValueError(
                f"block_table holds page {low if low < 0 else high}; "
                f"expected pages from 0 to {pages - 1}"
            )


def _refuse_context(name: str) -> None:
    if backends.sequences_are_sharded():
        raise ValueError(
            f"{name} within context_parallel, which shards scaled_dot_product_attention alone; "
            f"expected it, or {name} outside of the context"
        )


def _refuse_gradients(**tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and x.requires_grad:
            raise RuntimeError(
                f"{name} requires a gradient, which paged_attention does not compute; "
                "expected tensors without, or a call under torch.no_grad()"
            )


def _mask_and_bias(
    attn_mask: Tensor | None, bias: Tensor | None, query: Tensor, scores: Scores, three: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask and the bias, checked; a floating mask is the bias, and a mask or a bias
    [B, Sq, Sk] gets one head where the query has none.
    """
    bias_name = "bias"
    if attn_mask is not None:
        require_tensor("attn_mask", attn_mask)
        if attn_mask.dtype is torch.bool:
            attn_mask = _broadcast("attn_mask", attn_mask, query, scores, three)
        elif not attn_mask.is_floating_point():
            raise TypeError(
                f"attn_mask has dtype {attn_mask.dtype}; expected torch.bool, True where a key "
                "takes part, or a floating dtype, to be added to the scores"
            )
        elif bias is not None:
            raise ValueError(
                f"attn_mask has dtype {attn_mask.dtype} and is added as bias is; "
                "expected one of the two, or a boolean mask"
            )
        else:
            attn_mask, bias, bias_name = None, attn_mask, "attn_mask"
    if bias is not None:
        _require_bias(bias_name, bias, query)
        if bias.dtype is not torch.float32 and autocast_dtype(query) is not None:
            bias = bias.to(query.dtype)
        bias = _broadcast("bias", bias, query, scores, three)
    return attn_mask, bias


def _require_bias(name: str, bias: Tensor, query: Tensor) -> None:
    require_tensor(name, bias)
    if bias.dtype in (torch.float32, query.dtype):
        return
    if autocast_dtype(query) is None or not bias.is_floating_point():
        raise TypeError(
            f"{name} has dtype {bias.dtype}; expected the dtype of query, {query.dtype}, or float32"
        )


def _broadcast(name: str, x: Tensor, query: Tensor, scores: Scores, three: bool) -> Tensor:
    if x.device != query.device:
        require_device(name, x, "query", query)
    shape, full = x.shape, scores[:1] + scores[2:] if three else scores
    fits = len(shape) <= len(full)
    for have, want in zip(reversed(shape), reversed(full)):
        fits = fits and (have == want or have == 1)
    if not fits:
        raise ValueError(
            f"{name} has shape {shape_of(x)}; expected one that broadcasts to {list(full)}"
        )
    return x.unsqueeze(1) if three and len(shape) == 3 else x


def _require_lengths(key_lengths: Tensor, query: Tensor, k_length: int) -> None:
    require_tensor("key_lengths", key_lengths, "an integer tensor")
    if key_lengths.dtype not in INTEGERS:
        raise TypeError(f"key_lengths has dtype {key_lengths.dtype}; expected integers")
    if key_lengths.shape != (query.shape[0],):
        raise ValueError(
            f"key_lengths has shape {shape_of(key_lengths)}; expected [B] = [{query.shape[0]}]"
        )
    require_device("key_lengths", key_lengths, "query", query)
    if may_read(key_lengths) and key_lengths.numel():
        lengths = key_lengths.tolist()  # of a few numbers Python finds the range in less time
        low, high = min(lengths), max(lengths)
        if low < 0 or high > k_length:
            raise ValueError(
                f"key_lengths holds {low if low < 0 else high}; "
                f"expected lengths from 0 to Sk = {k_length}"
            )


def _require_offsets(name: str, cu: Tensor, x_name: str, x: Tensor, longest: int) -> None:
    require_tensor(name, cu, "an int32 tensor")
    if cu.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {cu.dtype}; expected torch.int32")
    if cu.dim() != 1 or cu.shape[0] < 1:
        raise ValueError(f"{name} has shape {shape_of(cu)}; expected [B + 1]")
    require_device(name, cu, x_name, x)
    length_name = "max" + name[-2:]
    require_int(length_name, longest)
    if not 0 <= longest < 2**31:
        raise ValueError(f"{length_name} is {longest}; expected 0 or more, of 32 bits")
    if not may_read(cu):
        return
    first, last, steps = int(cu[0]), int(cu[-1]), cu.diff()
    if first != 0 or last != x.shape[0]:
        raise ValueError(
            f"{name} goes from {first} to {last}; "
            f"expected from 0 to the tokens of {x_name}, {x.shape[0]}"
        )
    if steps.numel() and int(steps.min()) < 0:
        raise ValueError(f"{name} decreases by {-int(steps.min())}; expected offsets in order")
    if steps.numel() and int(steps.max()) > longest:
        raise ValueError(
            f"{length_name} is {longest}; expected at least the longest sequence, "
            f"{int(steps.max())}"
        )


def _require_index(name: str, x: slice | Tensor | None, n: int, query: Tensor) -> None:
    if x is None:
        return
    if isinstance(x, slice):
        for bound in (x.start, x.stop):
            if bound is not None:
                require_int(name, bound)
                if not -n <= bound <= n:
                    raise ValueError(f"{name} is {x}; there are {n}")
        if x.step is not None:
            require_int(name, x.step)
            if x.step < 1:
                raise ValueError(f"{name} is {x}; expected a step of 1 or more")
        return
    require_tensor(name, x, "a slice or a tensor of indices")
    if x.dtype != torch.int64 or x.dim() != 1:
        raise ValueError(
            f"{name} has shape {shape_of(x)} and dtype {x.dtype}; expected one dimension of int64"
        )
    require_device(name, x, "query", query)
    if may_read(x) and x.numel() and not (-n <= int(x.min()) and int(x.max()) < n):
        raise ValueError(f"{name} holds {int(x.min())} .. {int(x.max())}; there are {n}")


def _window(window: Sequence[int | None] | None) -> tuple[int, int] | None:
    """Return (left, right), -1 for a side without a bound; None where neither side has one."""
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window is {window!r}; expected (left, right)")
    for side in window:
        if side is None:
            continue
        if not isinstance(side, int) or isinstance(side, bool):
            raise TypeError(f"window is {window!r}; expected two ints, or None for no bound")
        if side < 0:
            hint = " (None for no bound, which is -1 in flash-attn)" if side == -1 else ""
            raise ValueError(f"window is {window!r}; expected sides that are not negative{hint}")
    left, right = (-1 if side is None else min(side, 2**30) for side in window)
    return None if left == right == -1 else (left, right)


def _slopes(alibi_slopes: Tensor | None, query: Tensor) -> Tensor | None:
    if alibi_slopes is None:
        return None
    require_tensor("alibi_slopes", alibi_slopes)
    if not alibi_slopes.is_floating_point():
        raise TypeError(f"alibi_slopes has dtype {alibi_slopes.dtype}; expected a floating dtype")
    batch, heads = query.shape[:2]
    if alibi_slopes.shape not in ((heads,), (batch, heads)):
        raise ValueError(
            f"alibi_slopes has shape {shape_of(alibi_slopes)}; "
            f"expected [H] = [{heads}] or [B, H] = [{batch}, {heads}]"
        )
    require_device("alibi_slopes", alibi_slopes, "query", query)
    return alibi_slopes.detach()


def _sinks(sinks: Tensor | None, query: Tensor) -> Tensor | None:
    if sinks is None:
        return None
    _require_bias("sinks", sinks, query)
    heads = query.shape[1]
    if sinks.shape != (heads,):
        raise ValueError(f"sinks has shape {shape_of(sinks)}; expected [H] = [{heads}]")
    require_device("sinks", sinks, "query", query)
    if sinks.dtype not in (torch.float32, query.dtype):  # under autocast
        sinks = sinks.to(query.dtype)
    return sinks.contiguous()


def _shard(shard: Sequence[int], scores: Scores, p: float) -> Shard | None:
    """Return the shard with the sizes of the whole; None where it is the whole, and where the
    sequence and the head of a shard of these make no difference.
    """
    if not isinstance(shard, (tuple, list)) or len(shard) != len(Shard._fields):
        fields = ", ".join(Shard._fields)
        raise TypeError(f"shard is {shard!r}; expected Shard({fields}), which has ints")
    for name, n in zip(Shard._fields, shard):
        require_size(0, **{f"shard.{name}": n})
    given = Shard(*shard)
    _, *here = scores
    firsts, wholes = given[1:4], tuple(n or own for n, own in zip(given[4:], here))
    for name, first, own, whole in zip(Shard._fields[4:], firsts, here, wholes):
        if first + own > whole:
            raise ValueError(
                f"shard has {name} {first} .. {first + own - 1} of {whole}; "
                f"expected all of its {own} {name} in the whole"
            )
    if p == 0:
        given, wholes = given._replace(batch=0, head=0), (here[0], *wholes[1:])
    elif given.query % 16 or given.key % 16:
        raise ValueError(
            f"shard begins at query {given.query} and key {given.key}; "
            "expected multiples of 16, of which dropout draws its words"
        )
    is_whole = given[:4] == (0,) * 4 and wholes == tuple(here)
    if is_whole and not backends.sequences_are_sharded():
        return None
    return Shard(*given[:4], *wholes)


def _packed_shard(shard: Sequence[int], heads: int, p: float) -> Shard | None:
    if isinstance(shard, (tuple, list)) and any((*shard[2:4], *shard[5:])):
        raise ValueError(
            f"shard is {tuple(shard)}; expected one of whole sequences, whose query, key, queries "
            "and keys are 0"
        )
    return _shard(shard, (0, heads, 0, 0), p)


def _softcap(softcap: float | None) -> float | None:
    if softcap is None:
        return None
    softcap = require_number("softcap", softcap, "a number or None")
    if not 0 < softcap < math.inf:
        raise ValueError(f"softcap is {softcap}; expected a positive number")
    return softcap


# -------------------------------------------------------------------------------------- LayerNorm


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    unbiased: bool = False,
) -> Tensor:
    """Compute weight * (x - mean) / sqrt(var + eps) + bias, over the trailing dimensions.

    var is the mean of (x - mean)^2. With `unbiased=True` the formula is the one that the Annotated
    Transformer computes, weight * (x - mean) / (std + eps) + bias, std with N - 1 in its
    denominator and eps outside of the root.

    Args:
        input: [..., *normalized_shape], float32, float16, bfloat16 or float64, any strides.
        normalized_shape: an int or a sequence of ints, N elements in all.
        weight, bias: `normalized_shape`, of the input's dtype or float32; None leaves the factor or
            the term out.
        eps: added to the variance (to the standard deviation with `unbiased`).

    Returns:
        The shape and the dtype of the input. Mean and variance are taken in float32 (float64 for
        float64).

    Raises:
        ValueError: shapes that do not fit, unbiased=True over a single feature, several devices.
        TypeError: a dtype that is not floating, or a weight of another dtype.

    Source: Ba, Kiros, Hinton 2016, "Layer Normalization", section 3; the unbiased form:
    harvardnlp/annotated-transformer.
    """
    require_floating(input=input)
    shape = _require_rows(input, normalized_shape, weight, bias)
    return backends.run(
        "layer_norm",
        input=input,
        normalized_shape=shape,
        weight=weight,
        bias=bias,
        eps=require_eps(eps),
        unbiased=_require_spread(unbiased, shape),
    )


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Compute weight * x / sqrt(mean(x^2) + eps), over the trailing dimensions.

    Args:
        input: [..., *normalized_shape], float32, float16, bfloat16 or float64, any strides.
        normalized_shape: an int or a sequence of ints.
        weight: `normalized_shape`, of the input's dtype or float32; None leaves the factor out.
        eps: added to the mean of the squares; None for the machine epsilon of float32 (of float64
            for float64), in which the mean is taken, as in torch.

    Returns:
        The shape and the dtype of the input.

    Raises:
        ValueError: shapes that do not fit, a negative eps, several devices.
        TypeError: a dtype that is not floating, or a weight of another dtype.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", section 3.
    """
    require_floating(input=input)
    shape = _require_rows(input, normalized_shape, weight, None)
    eps = _rms_eps(eps, input)
    return backends.run("rms_norm", input=input, normalized_shape=shape, weight=weight, eps=eps)


def dropout_add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float = 0.0,
    eps: float = 1e-5,
    *,
    unbiased: bool = False,
    dropout_seed: int | Tensor | None = None,
    shard: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute residual_out = residual + dropout(input) and layer_norm(residual_out), in one pass.

    A Transformer computes them between two sublayers: the end of one and the norm of the next.

    Args:
        input: [..., *weight.shape], float32, float16, bfloat16 or float64: a sublayer's output.
        residual: of the shape and the dtype of input.
        weight: of the norm; its shape is what is normalized over. bias: the same, or None. Of the
            input's dtype or float32.
        dropout_p: probability in [0, 1] that an element of input is dropped, as in
            `scaled_dot_product_attention`.
        eps, unbiased: as in `layer_norm`.
        dropout_seed: as in `scaled_dot_product_attention`; the mask is a function of it and of
            (row, column).
        shard: `RowShard(row, column, columns, run, sequence)`: which rows of a larger call, the
            whole, these are, so that dropout is that of the whole: its index of the first, and for
            sequences that are cut how many rows of each are here, and how many it has: row i here
            is row + i // run * sequence + i % run there. column is 0: a norm has whole rows.

    Returns:
        normalized and residual_out, each with the shape and the dtype of the input, and with a
        gradient each. The sum is rounded to that dtype before it is normalized.

    Raises:
        ValueError: shapes that do not fit, dropout_p outside [0, 1], unbiased=True over a single
            feature, several devices.
        TypeError: dtypes that differ or are not floating.

    Source: Vaswani et al. 2017, "Attention Is All You Need", sections 3.1 and 5.4.
    """
    input, residual, shape = _require_sum(input, residual, weight, bias)
    p = require_dropout("dropout_p", dropout_p)
    return backends.run(
        "dropout_add_layer_norm",
        input=input,
        residual=residual,
        weight=weight,
        bias=bias,
        dropout_p=p,
        eps=require_eps(eps),
        unbiased=_require_spread(unbiased, shape),
        dropout_seed=seed_tensor(dropout_seed, p, input.device),
        shard=None if shard is None else _norm_shard(shard, input, shape, p),
    )


def dropout_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    dropout_p: float = 0.0,
    eps: float | None = None,
    *,
    dropout_seed: int | Tensor | None = None,
    shard: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute residual_out = residual + dropout(input) and rms_norm(residual_out), in one pass.

    Args:
        input, residual, weight: as in `dropout_add_layer_norm`.
        dropout_p, dropout_seed, shard: as there; the mask is the same.
        eps: as in `rms_norm`.

    Returns:
        normalized and residual_out, as `dropout_add_layer_norm`.

    Raises:
        ValueError: shapes that do not fit, dropout_p outside [0, 1], a negative eps, several
            devices.
        TypeError: dtypes that differ or are not floating.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", section 3.
    """
    input, residual, shape = _require_sum(input, residual, weight, None)
    p = require_dropout("dropout_p", dropout_p)
    return backends.run(
        "dropout_add_rms_norm",
        input=input,
        residual=residual,
        weight=weight,
        dropout_p=p,
        eps=_rms_eps(eps, input),
        dropout_seed=seed_tensor(dropout_seed, p, input.device),
        shard=None if shard is None else _norm_shard(shard, input, shape, p),
    )


def _norm_shard(
    shard: Sequence[int], input: Tensor, shape: Sequence[int], p: float
) -> RowShard | None:
    """Return the shard of rows that a norm reads, of which each is whole."""
    features = math.prod(shape)
    rows = _row_shard(shard, input.numel() // max(1, features), features, p, (1, 4))
    if rows is not None and rows.columns != features:
        raise ValueError(f"shard has rows of {rows.columns}; expected all {features} features")
    return rows


def _rms_eps(eps: float | None, x: Tensor) -> float:
    """Return eps, by default that of the dtype in which the mean of x is taken."""
    if eps is None:
        return torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    return require_eps(eps)


def _require_sum(
    input: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, list[int]]:
    """Check what a sum and its norm take. Return input and residual, under autocast in the dtype in
    which the sum is taken, and the shape of a row.
    """
    if isinstance(input, Tensor) and autocast_dtype(input) is not None:
        require_tensor("residual", residual)
        wide = torch.promote_types(input.dtype, residual.dtype)
        input, residual = input.to(wide), residual.to(wide)
    require_floating(input=input, residual=residual)
    require_tensor("weight", weight)
    shape = _require_rows(input, weight.shape, weight, bias)
    if residual.shape != input.shape:
        raise ValueError(
            f"residual has shape {shape_of(residual)}; expected that of input, {shape_of(input)}"
        )
    return input, residual, shape


def _require_rows(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
) -> list[int]:
    """Check what a norm takes beside its input, and return normalized_shape as a list."""
    if isinstance(normalized_shape, (tuple, list, Sequence)):
        shape = list(normalized_shape)
    elif isinstance(normalized_shape, INTS):
        shape = [normalized_shape]
    else:
        kind = type(normalized_shape).__name__
        raise TypeError(f"normalized_shape is a {kind}; expected an int or a sequence of ints")
    if not shape or list(input.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"input has shape {shape_of(input)}; expected it to end with normalized_shape {shape}"
        )
    for name, x in (("weight", weight), ("bias", bias)):
        if x is None:
            continue
        require_tensor(name, x)
        if x.dtype != input.dtype and x.dtype != torch.float32:
            raise TypeError(
                f"{name} has dtype {x.dtype}; expected the input's {input.dtype}, or float32"
            )
        if list(x.shape) != shape:
            raise ValueError(f"{name} has shape {shape_of(x)}; expected normalized_shape {shape}")
        require_device(name, x, "input", input)
    return shape


def _require_spread(unbiased: bool, shape: list[int]) -> bool:
    if require_flag("unbiased", unbiased) and math.prod(shape) < 2:
        raise ValueError(f"normalized_shape is {shape}; unbiased=True needs two features or more")
    return bool(unbiased)


# ----------------------------------------------------------------------------------- feed-forward


def feed_forward(
    input: Tensor,
    w_1: Tensor,
    b_1: Tensor | None,
    w_2: Tensor,
    b_2: Tensor | None,
    activation: str = "relu",
    dropout_p: float = 0.0,
    *,
    dropout_seed: int | Tensor | None = None,
    shard: Sequence[int] | None = None,
) -> Tensor:
    """Compute dropout(activation(input w_1^T + b_1)) w_2^T + b_2.

    Bias, activation and dropout are the epilogue of the first GEMM; the second is torch's own,
    where nothing is left to fuse.

    Args:
        input: [..., d], float32, float16, bfloat16 or float64.
        w_1: [d_ff, d], b_1: [d_ff] or None, as nn.Linear stores them.
        w_2: [d_out, d_ff], b_2: [d_out] or None.
        activation: "relu", "gelu" (by erf), "gelu_tanh" or "silu".
        dropout_p: probability in [0, 1] that a hidden element is dropped, as in
            `scaled_dot_product_attention`.
        dropout_seed: as in `scaled_dot_product_attention`; the mask is a function of it and of
            (token, hidden unit).
        shard: `RowShard(row, column, columns, run, sequence)`, as in `dropout_add_layer_norm`:
            which tokens of the whole these are, and which of its d_ff = columns hidden units, for
            the mask of the whole. row, column, run and sequence are multiples of 16.

    Returns:
        [..., d_out] in the dtype of the input.

    Raises:
        ValueError: shapes that do not fit, an unknown activation, dropout_p outside [0, 1], several
            devices.
        TypeError: dtypes that differ or are not floating.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.3; GELU: Hendrycks and
    Gimpel 2016; SiLU: Elfwing et al. 2017.
    """
    input, w_1, b_1, w_2, b_2 = autocast(input, w_1, b_1, w_2, b_2)
    _require_layers(("w_1", "b_1", "d_ff"), input, w_1, b_1, w_2, b_2, 1)
    require_choice("activation", activation, ACTIVATIONS)
    p = require_dropout("dropout_p", dropout_p)
    return backends.run(
        "feed_forward",
        input=input,
        w_1=w_1,
        b_1=b_1,
        w_2=w_2,
        b_2=b_2,
        activation=activation,
        dropout_p=p,
        dropout_seed=seed_tensor(dropout_seed, p, input.device),
        shard=None if shard is None else _hidden_shard(shard, input, w_1.shape[0], p),
    )


def geglu(
    input: Tensor,
    w: Tensor,
    b: Tensor | None,
    w_2: Tensor,
    b_2: Tensor | None,
    dropout_p: float = 0.0,
    *,
    dropout_seed: int | Tensor | None = None,
    shard: Sequence[int] | None = None,
) -> Tensor:
    """Compute dropout(gelu(z) v) w_2^T + b_2, with [z, v] = input w^T + b.

    The GEMMs are torch's own; one kernel takes activation, product and dropout together, and one
    their backward.

    Args:
        input: [..., d], float32, float16, bfloat16 or float64.
        w: [2 d_ff, d]: the rows of z, then those of v. b: [2 d_ff] or None.
        w_2: [d_out, d_ff], b_2: [d_out] or None.
        dropout_p, dropout_seed, shard: as in `feed_forward`.

    Returns:
        [..., d_out] in the dtype of the input.

    Raises:
        ValueError: shapes that do not fit, an odd number of rows of w, dropout_p outside [0, 1],
            several devices.
        TypeError: dtypes that differ or are not floating.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", section 2.
    """
    return backends.run("geglu", **_gated(input, w, b, w_2, b_2, dropout_p, dropout_seed, shard))


def swiglu(
    input: Tensor,
    w: Tensor,
    b: Tensor | None,
    w_2: Tensor,
    b_2: Tensor | None,
    dropout_p: float = 0.0,
    *,
    dropout_seed: int | Tensor | None = None,
    shard: Sequence[int] | None = None,
) -> Tensor:
    """Compute dropout(silu(z) v) w_2^T + b_2, with [z, v] = input w^T + b: `geglu` with silu.

    Args:
        input, w, b, w_2, b_2: [..., d], [2 d_ff, d], [2 d_ff], [d_out, d_ff] and [d_out], as in
            `geglu`.
        dropout_p, dropout_seed, shard: as in `feed_forward`.

    Returns:
        [..., d_out] in the dtype of the input.

    Raises:
        ValueError, TypeError: what `geglu` raises.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", section 2.
    """
    return backends.run("swiglu", **_gated(input, w, b, w_2, b_2, dropout_p, dropout_seed, shard))


def _gated(
    input: Tensor,
    w: Tensor,
    b: Tensor | None,
    w_2: Tensor,
    b_2: Tensor | None,
    dropout_p: float,
    dropout_seed: int | Tensor | None,
    shard: Sequence[int] | None,
) -> dict[str, Any]:
    """Check the arguments of a gated feed-forward layer, and return them by name."""
    input, w, b, w_2, b_2 = autocast(input, w, b, w_2, b_2)
    _require_layers(("w", "b", "2 d_ff"), input, w, b, w_2, b_2, 2)
    p = require_dropout("dropout_p", dropout_p)
    seed = seed_tensor(dropout_seed, p, input.device)
    if shard is not None:
        shard = _hidden_shard(shard, input, w_2.shape[1], p)
    tensors = dict(input=input, w=w, b=b, w_2=w_2, b_2=b_2)
    return dict(**tensors, dropout_p=p, dropout_seed=seed, shard=shard)


def _hidden_shard(shard: Sequence[int], x: Tensor, columns: int, p: float) -> RowShard | None:
    return _row_shard(shard, x.shape[:-1].numel(), columns, p, (16, 16))


def _row_shard(
    shard: Sequence[int], rows: int, columns: int, p: float, steps: tuple[int, int]
) -> RowShard | None:
    """Return the shard of [rows, columns], with the length of its runs; None where it makes no
    difference. `steps`: of which numbers of rows and columns dropout draws its words.
    """
    if not isinstance(shard, (tuple, list)) or not 3 <= len(shard) <= 5:
        fields = ", ".join(RowShard._fields)
        raise TypeError(f"shard is {shard!r}; expected RowShard({fields}), which has ints")
    given = RowShard(*shard)
    require_size(0, **{f"shard.{name}": n for name, n in given._asdict().items()})
    row, column, whole, run, sequence = given
    whole = whole or columns
    if column + columns > whole:
        raise ValueError(
            f"shard has columns {column} .. {column + columns - 1} of {whole}; "
            f"expected all of its {columns} columns in the whole"
        )
    if run > sequence or (rows % run if run else sequence):
        raise ValueError(
            f"shard has runs of {run} rows in sequences of {sequence}; expected runs that are no "
            f"longer than a sequence, and that divide its {rows} rows"
        )
    if p == 0 or (given[:2] == (0, 0) and not run and not backends.sequences_are_sharded()):
        return None
    if row % steps[0] or column % steps[1] or run % steps[0] or sequence % steps[0]:
        raise ValueError(
            f"shard begins at row {row} and column {column}, with runs of {run} rows in sequences "
            f"of {sequence}; expected multiples of {steps[0]} rows and {steps[1]} columns, of "
            "which dropout draws its words"
        )
    return RowShard(row, column, whole, run, sequence)


def _require_layers(
    names: tuple[str, str, str],
    input: Tensor,
    w: Tensor,
    b: Tensor | None,
    w_2: Tensor,
    b_2: Tensor | None,
    halves: int,
) -> None:
    """Check two linear layers, the first of which returns `halves` hidden vectors."""
    w_name, b_name, rows = names
    tensors = {"input": input, w_name: w, b_name: b, "w_2": w_2, "b_2": b_2}
    require_floating((b_name, "b_2"), **tensors)
    if input.dim() < 1:
        raise ValueError("input is a scalar; expected [..., d]")
    if w.dim() != 2 or w.shape[1] != input.shape[-1] or w.shape[0] % halves:
        raise ValueError(
            f"{w_name} has shape {shape_of(w)}; "
            f"expected [{rows}, d] with d = {input.shape[-1]}, as input {shape_of(input)}"
        )
    width = w.shape[0] // halves
    if w_2.dim() != 2 or w_2.shape[1] != width:
        raise ValueError(
            f"w_2 has shape {shape_of(w_2)}; expected [d_out, d_ff] with d_ff = {width}"
        )
    for name, bias, like, weight in ((b_name, b, w_name, w), ("b_2", b_2, "w_2", w_2)):
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(
                f"{name} has shape {shape_of(bias)}; "
                f"expected [{weight.shape[0]}], the rows of {like}"
            )


# -------------------------------------------------------------------------------------- embedding


def embed(
    tokens: Tensor,
    weight: Tensor,
    positional: Tensor | None,
    dropout_p: float = 0.0,
    *,
    scale: float | None = None,
    padding_idx: int | None = None,
    dropout_seed: int | Tensor | None = None,
    shard: Sequence[int] | None = None,
) -> Tensor:
    """Compute dropout(scale * weight[tokens] + positional[0 .. S-1]).

    Args:
        tokens: [..., S] integers, the rows of weight.
        weight: [V, N], float32, float16, bfloat16 or float64, as nn.Embedding stores it.
        positional: [at least S, N], of weight's dtype or float32, shared by all sequences; None
            leaves the term out.
        dropout_p: probability in [0, 1] that an element is dropped, as in
            `scaled_dot_product_attention`.
        scale: the factor on the embedding; sqrt(N) by default.
        padding_idx: the token whose row gets no gradient; -1 is the last one, as in torch.
        dropout_seed: as in `dropout_add_layer_norm`.
        shard: `RowShard(row, column, columns, run, sequence)`, as in `dropout_add_layer_norm`:
            which tokens of the whole these are, and which of its N = columns features, from a
            multiple of 4 on. `positional` has the part of the shard.

    Returns:
        [..., S, N] in the dtype of weight.

    Raises:
        ValueError: shapes that do not fit, more than the positions there are, a token outside of
            [0, V), a padding_idx outside [-V, V), dropout_p outside [0, 1], several devices.
        TypeError: tokens that are not integers, parameters that are not floating.

    Source: Vaswani et al. 2017, "Attention Is All You Need", sections 3.4, 3.5 and 5.4.
    """
    require_floating(weight=weight)
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"weight has shape {shape_of(weight)}; expected [V, N]")
    require_ids("tokens", tokens, weight)
    if tokens.dim() < 1:
        raise ValueError("tokens is a scalar; expected [..., S]")
    classes, width = weight.shape
    if positional is not None and shard is None:
        positional = backends.rows_here("positional", positional, tokens.shape[-1])
    if positional is not None:
        require_floating(positional=positional)
        if positional.dtype not in (weight.dtype, torch.float32):
            raise TypeError(
                f"positional has dtype {positional.dtype}; "
                f"expected the dtype of weight, {weight.dtype}, or float32"
            )
        if positional.dim() != 2 or positional.shape[1] != width:
            raise ValueError(
                f"positional has shape {shape_of(positional)}; expected [positions, {width}]"
            )
        if tokens.shape[-1] > positional.shape[0]:
            raise ValueError(
                f"tokens has {tokens.shape[-1]} positions; "
                f"expected at most the {positional.shape[0]} of positional"
            )
        require_device("positional", positional, "weight", weight)
    if padding_idx is not None:
        padding_idx = require_token("padding_idx", padding_idx, classes)
    if scale is not None:
        scale = require_number("scale", scale, "a number or None")
    p = require_dropout("dropout_p", dropout_p)
    features = width
    if shard is not None:
        given, shard = shard, _row_shard(shard, tokens.numel(), width, p, (1, 4))
        features = given[2] or width
    return backends.run(
        "embed",
        tokens=tokens,
        weight=weight,
        positional=positional,
        dropout_p=p,
        scale=math.sqrt(features) if scale is None else scale,
        padding_idx=padding_idx,
        dropout_seed=seed_tensor(dropout_seed, p, weight.device),
        shard=shard,
    )


# ------------------------------------------------------------------------------------------- loss

REDUCTIONS = ("mean", "sum", "none")
SMOOTHINGS = ("uniform", "kl")


def _is_ambiguous(logits: Tensor) -> bool:
    """Say whether the classes could be the second dimension as well, where torch has them.

    An exported program takes every length, and is not asked.
    """
    if torch.compiler.is_exporting():
        return False
    return logits.shape[1:-1] == logits.shape[2:] and logits.shape[-1] > 1


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing: str = "uniform",
) -> Tensor:
    """Compute -sum_c q_c log softmax(logits)_c, with a smoothed target distribution q.

    `linear_cross_entropy` computes the logits as well, and never holds them all. Class weights and
    class probabilities as the target are those of torch.nn.functional.cross_entropy alone.

    In eager mode the kernel of a "mean" writes the gradient of the logits with the loss, except in
    float16, whose losses are scaled. The backward returns that memory, and reads the logits again
    only if the gradient of the loss is not 1 or the graph is retained.

    Args:
        logits: [..., V], float32, float16, bfloat16 or float64, any strides.
        target: [...] int64, the class of each row, 0 .. V - 1, or ignore_index.
        reduction: "mean" over the rows whose target is not ignore_index, "sum", or "none".
        ignore_index: rows with this target have loss 0, and gradient 0 where their logits are
            finite. It may be a class.
        label_smoothing: e in [0, 1].
        smoothing: "uniform", torch's: q_c = e/V, and 1 - e more at the target. "kl", the loss of
            the Annotated Transformer's LabelSmoothing: q_c = e/(V-2) at every class but the target,
            where it is 1 - e, and the padding class ignore_index, where it is 0; the loss is the
            Kullback-Leibler divergence, which is the above less the entropy of q.

    Returns:
        A scalar, or [...] for "none", in the dtype of the logits, summed in float32 (float64 for
        float64); in float32 under torch.autocast. The mean is nan where every target is ignored. As
        in torch.

    Raises:
        ValueError: shapes that do not fit; logits [N, V, V], whose classes could be the second
            dimension, as in torch (flatten them to [M, V]); a target outside of the classes;
            label_smoothing outside [0, 1]; an unknown reduction or smoothing; "kl" with V < 3, or
            with an ignore_index that is no class.
        TypeError: logits that are not floating, a target that is not int64.

    Source: Szegedy et al. 2016, "Rethinking the Inception Architecture for Computer Vision",
    section 7; "kl": harvardnlp/annotated-transformer.
    """
    require_floating(logits=logits)
    if logits.dim() < 1:
        raise ValueError("logits is a scalar; expected [..., V]")
    if logits.dim() > 2 and _is_ambiguous(logits):
        raise ValueError(
            f"logits has shape {shape_of(logits)}, which could be torch's [N, C, ...] as well; "
            "expected logits.flatten(0, -2) and target.flatten(), the classes in the last dimension"
        )
    rows, classes = ("logits", logits), logits.shape[-1]
    options = _loss_options(
        target, rows, classes, reduction, ignore_index, label_smoothing, smoothing
    )
    loss = backends.run("cross_entropy", logits=logits, target=target, **options)
    return loss if autocast_dtype(logits) else loss.to(logits.dtype)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing: str = "uniform",
) -> Tensor:
    """Compute cross_entropy(input linear_weight^T + linear_bias, target), chunk by chunk.

    It never holds all the logits: torch's own GEMM makes those of a chunk of tokens, and one kernel
    their losses. For "mean" and "sum", where gradients are wanted, that kernel writes the gradient
    of the logits in their place, from which two GEMMs take those of input and weight; the backward
    then only multiplies. For "none" the backward computes the logits again.

    Args:
        input: [..., N], float32, float16, bfloat16 or float64.
        linear_weight: [V, N], as nn.Linear stores it. linear_bias: [V] or None.
        target: [...] int64, 0 .. V - 1, or ignore_index.
        reduction, ignore_index, label_smoothing, smoothing: as in `cross_entropy`.

    Returns:
        A scalar, or [...] for "none", in float32 (float64 for float64), summed in it, as the
        gradients of weight and bias are.

    Raises:
        ValueError: as `cross_entropy`; a weight of another width.
        TypeError: dtypes that differ or are not floating, a target that is not int64.

    Source: as `cross_entropy`; the chunks: Hsu et al. 2024, "Liger Kernel", section 3.2.
    """
    input, linear_weight, linear_bias = autocast(input, linear_weight, linear_bias)
    tensors = {"input": input, "linear_weight": linear_weight, "linear_bias": linear_bias}
    require_floating(("linear_bias",), **tensors)
    if input.dim() < 1:
        raise ValueError("input is a scalar; expected [..., N]")
    if linear_weight.dim() != 2 or linear_weight.shape[1] != input.shape[-1]:
        raise ValueError(
            f"linear_weight has shape {shape_of(linear_weight)}; "
            f"expected [V, N] with N = {input.shape[-1]}, as input {shape_of(input)}"
        )
    classes = linear_weight.shape[0]
    if linear_bias is not None and linear_bias.shape != (classes,):
        raise ValueError(
            f"linear_bias has shape {shape_of(linear_bias)}; expected [V] = [{classes}]"
        )
    rows = "input", input
    options = _loss_options(
        target, rows, classes, reduction, ignore_index, label_smoothing, smoothing
    )
    return backends.run(
        "linear_cross_entropy",
        input=input,
        linear_weight=linear_weight,
        target=target,
        linear_bias=linear_bias,
        **options,
    )


def _loss_options(
    target: Tensor,
    rows: tuple[str, Tensor],
    classes: int,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    smoothing: str,
) -> dict[str, Any]:
    """Check what both losses take, and return the options by name, in their order."""
    require_tensor("target", target, "an int64 tensor")
    if target.dtype != torch.int64:
        raise TypeError(
            f"target has dtype {target.dtype}; expected torch.int64, the class of each row "
            "(torch.nn.functional.cross_entropy takes class probabilities)"
        )
    name, x = rows
    if target.shape != x.shape[:-1]:
        raise ValueError(
            f"target has shape {shape_of(target)}; "
            f"expected {list(x.shape[:-1])}, one class for each row of {name} {shape_of(x)}"
        )
    require_device("target", target, name, x)
    require_choice("reduction", reduction, REDUCTIONS)
    require_choice("smoothing", smoothing, SMOOTHINGS)
    require_int("ignore_index", ignore_index)
    e = require_probability("label_smoothing", label_smoothing)
    if classes < 1:
        raise ValueError("there are no classes; expected V of 1 or more")
    if smoothing == "kl" and classes < 3:
        raise ValueError(f"there are {classes} classes; expected 3 or more with smoothing='kl'")
    if smoothing == "kl" and not 0 <= ignore_index < classes:
        raise ValueError(
            f"ignore_index is {ignore_index}; "
            f"expected the padding class, 0 .. {classes - 1}, with smoothing='kl'"
        )
    if may_read(target):
        kept = target[target != ignore_index]
        if kept.numel() and (int(kept.min()) < 0 or int(kept.max()) >= classes):
            bad = int(kept.min()) if int(kept.min()) < 0 else int(kept.max())
            raise ValueError(f"target holds {bad}; expected classes from 0 to {classes - 1}")
    return {
        "reduction": reduction,
        "ignore_index": ignore_index,
        "label_smoothing": e,
        "smoothing": smoothing,
    }
