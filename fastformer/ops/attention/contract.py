"""The public functions of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from fastformer.checks import (
    FLOATING,
    STRIDED,
    autocasts,
    checked_softcap,
    refuse_keywords,
    require_choice,
    require_dropout,
    require_flag,
    require_floating,
    require_instance,
    require_size,
    shape_of,
    wrong_shape,
)
from fastformer.description import Attention
from fastformer.dispatch import backends
from fastformer.dispatch.front import autocast, front_door
from fastformer.mask_tiles import BlockMask
from fastformer.ops.attention import reference
from fastformer.ops.attention.arguments import (
    ALIGNMENTS,
    NO_BLOCKS,
    as_flags,
    checked_blocks,
    checked_key_bias,
    checked_sinks,
    checked_slopes,
    checked_window,
    mask_and_bias,
    require_attention,
    require_index,
    require_lengths,
    require_offsets,
)


@front_door
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | BlockMask | None = None,
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
    **unknown: NoReturn,
) -> Any:
    """Compute softmax(scale query key^T + bias, over the keys that the query may see) value.

    Args:
        query: [B, H, Sq, D], float32, float16, bfloat16 or float64. Any strides. The kernels take
            D and Dv up to 256, or 512 in 16 bits on compute capability 8.0 and 9.0; beyond, the
            reference computes the call.
        key: [B, G, Sk, D], of the same dtype. G is H; with `enable_gqa`, H is a multiple of G, and
            query head h reads key-value head h // (H / G).
        value: [B, G, Sk, Dv]. As in torch, all three may have other leading dimensions:
            [.., H, S, D], which B then stands for; without heads [B, S, D], or [S, D].
        attn_mask: boolean, broadcastable to [B, H, Sq, Sk] (with other leading dimensions to
            [.., Sq, Sk] of these); True keeps the key. It is read through its strides, never
            expanded. Large calls skip blocks of keys before the first and past the last key that it
            keeps. None keeps all keys. A floating mask is a `bias`, as in torch. Or a `BlockMask`
            of the shape of the scores, where B and H may be 1.
        dropout_p: probability in [0, 1] that a weight is dropped, rounded to a multiple of 2^-16;
            the others are scaled by 1/(1 - dropout_p). Dropout is always on: pass 0 in evaluation.
        is_causal: query i sees keys j <= i + shift.
        scale: the factor on query key^T; 1/sqrt(D) by default.
        bias: added to the scores, float32 or the dtype of the query, broadcastable like attn_mask.
            -inf masks the key out, and so does every value below -2.3586e38 (the lowest float32
            times log 2), such as the finfo.min of float32 and bfloat16. It has a gradient, of the
            shape of the tensor that is passed; so pass a bias unexpanded.
        key_lengths: [B] integers: sequence b has the keys 0 .. key_lengths[b] - 1. Blocks of keys
            that are past this length are skipped.
        window: (left, right): query i sees keys i + shift - left <= j <= i + shift + right, both
            ends included; None for a side without a bound.
        causal_alignment: "top_left": shift = 0, as in torch. "bottom_right": shift = Sk - Sq, or
            key_lengths[b] - Sq if lengths are given: the last query is aligned with the last key.
        alibi_slopes: [H] or [B, H] floats; adds -slope |i + shift - j|. They get no gradient, and
            may require none.
        softcap: c > 0: the scores become c tanh(scale query key^T / c), before bias and masks. The
            absolute error in the kernels is about c 2^-24, so c should be at most some hundreds.
        sinks: [H], float32 or the dtype of the query: a logit of each head that is only in the
            denominator of the softmax, exp(sink_h) + sum_j exp(score_ij), like a key whose value is
            zero. Bias, ALiBi and softcap do not change it. It has a gradient. -inf is no sink, and
            its gradient is zero.
        dropout_seed: the seed of the dropout mask, an int of 64 bits or a tensor of one int64. The
            mask is a function of the seed and (b, h, i, j) alone, the same on every backend. None
            draws a seed from torch's generator; on a CPU, under the backend "auto", this generator
            draws the mask itself.
        return_lse: also returns log sum_j exp(score_ij), the sink included.

    Mask, bias, causality, window and lengths combine: a query sees a key if all of them allow it.
    Examples with four queries (down) and six keys (across), x where the query sees the key:

        is_causal      bottom_right   window=(1, 1)   window=(1, 0),   key_lengths=[5],
                                                      bottom_right     is_causal, bottom_right
        x . . . . .    x x x . . .    x x . . . .     . x x . . .      x x . . . .
        x x . . . .    x x x x . .    x x x . . .     . . x x . .      x x x . . .
        x x x . . .    x x x x x .    . x x x . .     . . . x x .      x x x x . .
        x x x x . .    x x x x x x    . . x x x .     . . . . x x      x x x x x .

    Returns:
        [B, H, Sq, Dv] in the dtype of the query. A query that sees no key gives zeros, and finite
        gradients. With `return_lse` also lse [B, H, Sq], the natural logarithm of the sum, before
        dropout, in float32 (float64 for float64). If the query sees no key, lse is the sink, or
        -inf without sinks. It has a gradient.

    NaN that a query may see - in itself, in a key, value or bias that it may see, in scale, slope
    or sink - propagates to its output, its lse and the gradients, as in torch's math path. A key
    that no query may see - past its length, or masked out for all queries by a mask or a bias of
    shape [.., 1, Sk] - may hold anything, NaN included. Under any other mask, causality included,
    every key and value has to be finite, as in torch.

    Second derivatives and forward-mode differentiation use the reference. If it calls torch's fused
    op - on a CPU, in float32 or lower precision - a backward with create_graph=True computes the
    attention again, by torch's formula.

    Raises:
        ValueError: shapes that do not fit, dropout_p outside [0, 1], a length outside [0, Sk], a
            negative side of the window, an unknown alignment, a softcap that is not positive, a
            floating attn_mask with a bias, tensors on
            several devices.
        TypeError: dtypes that differ or are not floating, a mask of integers, an unknown keyword.
        RuntimeError: alibi_slopes that require a gradient, outside of torch.no_grad().

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1; the tiled form: Dao
    2023, "FlashAttention-2", section 3.1; split-KV for few queries: Dao et al. 2023,
    "Flash-Decoding for long-context inference"; ALiBi: Press et al. 2021, "Train Short, Test Long",
    section 3; windows: Beltagy et al. 2020, "Longformer", section 3.1; softcap: Gemma Team 2024,
    "Gemma 2", section 2; sinks: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", on its
    architecture, after Xiao et al. 2023, "Efficient Streaming Language Models with Attention
    Sinks".
    """
    if unknown:
        padding = "attn_mask=~key_padding_mask[:, None, None], True where a key takes part"
        refuse_keywords(unknown, key_padding_mask=padding, mask="attn_mask")
    lead: Sequence[int] | None = None  # the dimensions before [S, D], if they are not [B, H]
    if not _are_heads(query, key, value):
        query, key, value = autocast(query, key, value)
        require_floating(query=query, key=key, value=value)
        lead, query, key, value = _folded(query, key, value)
    enable_gqa = require_flag("enable_gqa", enable_gqa)
    scale, scores = require_attention(query, key, value, scale, enable_gqa)
    blocks = NO_BLOCKS
    if isinstance(attn_mask, BlockMask) and causal_alignment == "top_left":
        band = attn_mask, is_causal, window
        attn_mask, is_causal, window = as_flags(*band, query, scores)
    if attn_mask is not None or bias is not None:
        attn_mask, bias, blocks = mask_and_bias(attn_mask, bias, query, scores, lead)
    p = require_dropout("dropout_p", dropout_p)
    if key_lengths is not None:
        require_lengths(key_lengths, query, scores[3])
        key_lengths = key_lengths.contiguous()
    seed = backends.seed_for(dropout_seed, p, query.device, blocks[0])
    attention = Attention(
        attn_mask,
        p,
        require_flag("is_causal", is_causal),
        scale,
        bias,
        key_lengths,
        None if window is None else checked_window(window),
        require_choice("causal_alignment", causal_alignment, ALIGNMENTS),
        None if alibi_slopes is None else checked_slopes(alibi_slopes, query, query.shape[0]),
        None if softcap is None else checked_softcap(softcap),
        None if sinks is None else checked_sinks(sinks, query),
        seed,
        *blocks,
    )
    return_lse = require_flag("return_lse", return_lse)
    inputs: dict[str, Any] = dict(query=query, key=key, value=value, attention=attention)
    result = backends.run("scaled_dot_product_attention", **inputs, return_lse=return_lse)
    return result if lead is None else _unfolded(result, lead)


@front_door
def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    attn_mask: BlockMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    causal_alignment: str = "top_left",
    bias: Tensor | None = None,
    window: Sequence[int | None] | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute `scaled_dot_product_attention` of each sequence of a batch without padding.

    The tokens of all sequences are concatenated; sequence b has the queries
    cu_seqlens_q[b] .. cu_seqlens_q[b+1] - 1 and sees only its own keys. `fastformer.unpad` makes
    such a batch. Rows past the last sequence are the padding of a buffer of fixed size: they may
    hold anything, and output, lse and gradients are zeros there.

        tokens         a a a b b c c c c .        cu_seqlens  0 3 5 9

    Args:
        query: [Tq, H, D], float32, float16, bfloat16 or float64.
        key: [Tk, G, D], of the same dtype; G divides H, and query head h reads key-value head
            h // (H / G).
        value: [Tk, G, Dv].
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32: the cumulative lengths of the sequences, from 0,
            not decreasing, to at most Tq and Tk.
        max_q, max_k: the length of the longest sequence, or more.
        attn_mask: a `BlockMask` [1, 1 or H, Tq, Tk] of the packed tokens, or None. A query sees a
            key of its sequence if the mask allows it; what the mask holds of other sequences does
            not matter.
        dropout_p, scale, softcap, sinks: as in `scaled_dot_product_attention`.
        is_causal, causal_alignment, window, alibi_slopes: as in `scaled_dot_product_attention`,
            with i and j counted within the sequence, and "bottom_right" aligned for each sequence.
        bias: [Tk], float32 or the dtype of the query: added to the scores of each key, for all
            queries and heads. It has a gradient. -inf masks the key out, as in
            `scaled_dot_product_attention`; the key may then hold anything, NaN included.
        dropout_seed: as in `scaled_dot_product_attention`; the mask is that of the padded batch or,
            with attn_mask, that of one sequence which holds all tokens.
        return_lse: also returns the log-sum-exp of each query, as in
            `scaled_dot_product_attention`.

    Returns:
        [Tq, H, Dv] in the dtype of the query; zeros for a query that sees no key. With `return_lse`
        also lse [H, Tq], in float32 (float64 for float64). It has a gradient.

    Raises:
        ValueError: shapes that do not fit; offsets that do not begin at 0, that decrease, or that
            end past the number of tokens; a sequence longer than max_q or max_k; a bias of
            another shape than [Tk].
        TypeError: dtypes that differ or are not floating, offsets that are not int32.

    Source: Dao 2023, "FlashAttention-2"; the packing: Krell et al. 2021, "Efficient Sequence
    Packing without Cross-contamination".
    """
    query, key, value = autocast(query, key, value)
    require_floating(query=query, key=key, value=value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 3:
            raise wrong_shape(name, x, "[tokens, heads, D]")
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    scale, scores = require_attention(
        q, k, v, scale, True, lambda x: shape_of(x[0].transpose(0, 1))
    )
    max_q, max_k = require_size(0, max_q=max_q, max_k=max_k)
    require_offsets("cu_seqlens_q", cu_seqlens_q, "query", query, max_q)
    require_offsets("cu_seqlens_k", cu_seqlens_k, "key", key, max_k)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise wrong_shape(
            "cu_seqlens_k", cu_seqlens_k, f"that of cu_seqlens_q, {shape_of(cu_seqlens_q)}"
        )
    blocks = NO_BLOCKS
    if attn_mask is not None:
        require_instance("attn_mask", attn_mask, BlockMask, "a BlockMask (fastformer.block_mask)")
        blocks = checked_blocks(attn_mask, query, scores)
    p = require_dropout("dropout_p", dropout_p)
    sequences = cu_seqlens_q.shape[0] - 1
    attention = Attention(
        None,
        p,
        require_flag("is_causal", is_causal),
        scale,
        checked_key_bias(bias, query, key),
        window=checked_window(window),
        causal_alignment=require_choice("causal_alignment", causal_alignment, ALIGNMENTS),
        alibi_slopes=checked_slopes(alibi_slopes, q, sequences),
        softcap=checked_softcap(softcap),
        sinks=checked_sinks(sinks, q),
        dropout_seed=backends.seed_for(dropout_seed, p, query.device, attn_mask),
        mask_spans=blocks[0],
        mask_lists=blocks[1],
        mask_bits=blocks[2],
        cu_seqlens_q=cu_seqlens_q.contiguous(),
        cu_seqlens_k=cu_seqlens_k.contiguous(),
        max_q=max_q,
        max_k=max_k,
    )
    return backends.run(
        "packed_attention",
        query=query,
        key=key,
        value=value,
        attention=attention,
        return_lse=require_flag("return_lse", return_lse),
    )


def attention_weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | BlockMask | None = None,
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
    """Compute the softmax weights of `scaled_dot_product_attention`, without dropout.

    Select some rows and heads to keep the result small: the attention itself never holds all
    weights. This is plain PyTorch on every backend, with gradients.

    Args:
        query, key: as in `scaled_dot_product_attention`, with heads.
        attn_mask, is_causal, scale, enable_gqa, bias: as in `scaled_dot_product_attention`.
        key_lengths, window, causal_alignment, alibi_slopes, softcap, sinks: as in
            `scaled_dot_product_attention`.
        rows: the queries to return, a slice or a tensor of int64 indices; None for all.
        heads: the heads to return, a slice or a tensor of int64 indices; None for all.

    Returns:
        [B, heads, rows, Sk] in the dtype of the query. The weights of a query that sees no key are
        zeros; those of any other query sum to 1, with sinks together with the weight of the sink.

    Raises:
        ValueError, TypeError: as `scaled_dot_product_attention`; rows or heads of another type; an
            index, or a bound of a slice, past the end.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1.
    """
    query, key = autocast(query, key)
    require_floating(query=query, key=key)
    for name, heads_of in (("query", query), ("key", key)):
        if heads_of.dim() != 4:
            raise wrong_shape(name, heads_of, "four dimensions [B, H, S, D]")
    enable_gqa = require_flag("enable_gqa", enable_gqa)
    scale, scores = require_attention(query, key, key, scale, enable_gqa)
    if key_lengths is not None:
        require_lengths(key_lengths, query, scores[3])
        key_lengths = key_lengths.contiguous()
    for name, x, n in (("rows", rows, scores[2]), ("heads", heads, scores[1])):
        require_index(name, x, n, query)
    mask, bias, blocks = mask_and_bias(attn_mask, bias, query, scores)
    attention = Attention(
        mask,
        0.0,
        require_flag("is_causal", is_causal),
        scale,
        bias,
        key_lengths,
        checked_window(window),
        require_choice("causal_alignment", causal_alignment, ALIGNMENTS),
        checked_slopes(alibi_slopes, query, query.shape[0]),
        checked_softcap(softcap),
        checked_sinks(sinks, query),
        None,
        *blocks,
    )
    return reference.attention_weights(query, key, attention, rows, heads)


def _are_heads(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether these are dense tensors [B, H, S, D] of one dtype and device, not to be cast.

    Most calls have such tensors. This test takes a third of the time of the full checks, which name
    the error.
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


def _folded(query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...]:
    """Return the dimensions before [S, D] if there are not two, and the tensors [B, H, S, D]."""
    rank = query.dim()
    if rank == key.dim() == value.dim() == 4:
        return None, query, key, value
    if rank < 2:
        raise wrong_shape("query", query, "[.., S, D], four dimensions [B, H, S, D] as a rule")
    for name, x in (("key", key), ("value", value)):
        if x.dim() != rank or x.shape[:-3] != query.shape[:-3]:
            expected = f"{rank} dimensions, as query {shape_of(query)}, the leading ones equal"
            raise wrong_shape(name, x, expected)
    inputs: Any = query, key, value
    if rank > 4:
        inputs = [x.flatten(0, -4) for x in inputs]
    else:
        inputs = [x.unsqueeze(1) if rank == 3 else x[None, None] for x in inputs]
    return query.shape[:-2], *inputs


def _unfolded(result: Any, lead: Sequence[int]) -> Any:
    """Return output, or output and lse, with the leading dimensions of the query."""
    if isinstance(result, tuple):
        return tuple(_unfolded(x, lead) for x in result)
    return result.reshape(*lead, *result.shape[2:])
