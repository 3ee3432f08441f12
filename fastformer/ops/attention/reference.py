"""Attention in eager PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastformer.description import Attention
from fastformer.eager import eager, may_read, transformed
from fastformer.ops.attention.by_torch import (
    differentiates,
    fused,
    in_order_of,
    near_zero,
    only,
    options_beyond,
    torch_computes,
    torch_op,
)
from fastformer.ops.attention.masks import (
    added_to_scores,
    band_as_mask,
    diagonal_shift,
    finite,
    hidden_rows,
    is_causal_as_torch,
    left_by,
    score_terms,
    visible_keys,
)
from fastformer.ops.attention.tiles import Part, by_tiles, computes_by_tiles
from fastformer.ops.dropout import (
    dropout,
    dropout_scale,
    dropped,
    without,
)


def _grouped(key: Tensor, heads: int) -> Tensor:
    """Repeat the key-value heads [B, G, S, D] to [B, heads, S, D], one for each query head."""
    return key if key.shape[1] == heads else key.repeat_interleave(heads // key.shape[1], 1)


def _scores(
    query: Tensor, key: Tensor, attention: Attention, added: Tensor | None, visible: Tensor | None
) -> Tensor:
    """Return the scores [B, H, Sq, Sk], with the lowest finite number where a key is masked out.

    Sinks are appended as a last column. The scores have the dtype of the query, or at least
    float32 if something is added or there are sinks.
    """
    softcap, sinks = attention.softcap, attention.sinks
    scores = (query * attention.scale) @ key.transpose(-2, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if added is not None or sinks is not None:
        scores = scores if scores.dtype == torch.float64 else scores.float()
    if added is not None:
        scores = scores + added
    if visible is not None and transformed():  # vmap cannot change unmapped scores in place
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    elif visible is not None:
        with torch.no_grad():  # a masked weight is 0, and so is its score's gradient
            scores.masked_fill_(~visible, torch.finfo(scores.dtype).min)
    if sinks is None:
        return scores
    column = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1)


def _log_sum_exp(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return (peak, log sum exp(scores - peak)), which add up to logsumexp(scores).

    peak is the maximum over the last dimension, without gradient. The gradient keeps its digits
    where logsumexp is large; the backward of torch.logsumexp, which computes exp(score - result),
    loses them.
    """
    if scores.shape[-1] == 0:
        log_sum = scores.logsumexp(-1)
        return torch.zeros_like(log_sum), log_sum
    peak = scores.detach().amax(-1, keepdim=True)
    peak = peak.masked_fill(peak.isinf(), 0.0)
    shifted = scores - peak
    if scores.shape[-1] == 1:  # the gradient of logsumexp is NaN at -inf, which a sink may be
        return peak.squeeze(-1), _constant_at_inf(shifted).squeeze(-1)
    return peak.squeeze(-1), shifted.logsumexp(-1)


def _constant_at_inf(x: Tensor) -> Tensor:
    """Return x. A sink of -inf is none, and the gradient of an lse of -inf may be NaN."""
    return x.masked_fill(x == float("-inf"), float("-inf"))


def _softmax(scores: Tensor, dtype: torch.dtype, sinks: Tensor | None) -> Tensor:
    """Return the softmax weights of the keys, without the weight of the sink."""
    if sinks is not None and scores.shape[-1] == 1:  # no keys; softmax of a sink of -inf is NaN
        return scores[..., :0].to(dtype)
    low = dtype in (torch.float16, torch.bfloat16)
    weights = scores.softmax(-1, dtype=torch.float32 if low else None).to(dtype)
    return weights if sinks is None else weights[..., :-1]


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attention: Attention, return_lse: bool = False
) -> Any:
    attend = attention_block if attention.mask_spans is None else _with_block_mask
    if not return_lse:
        return in_order_of(query, attend(query, key, value, attention, False))
    out, peak, log_sum = attend(query, key, value, attention, True)
    return in_order_of(query, out), peak + log_sum


def _with_block_mask(
    query: Tensor, key: Tensor, value: Tensor, attention: Attention, return_lse: bool
) -> Any:
    """Compute `attention_block` with a `BlockMask`."""
    if computes_by_tiles(query, attention):
        key, value = (_grouped(x, query.shape[1]) for x in (key, value))
        return by_tiles(attention_block, query, key, value, attention, return_lse)
    attention = attention.with_dense_mask(query.shape[2], key.shape[2])
    return attention_block(query, key, value, attention, return_lse)


def attention_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention: Attention,
    return_lse: bool = True,
    part: Part | None = None,
) -> Any:
    """Return (output, peak, log_sum) of attention to a part of the keys, where lse = peak +
    log_sum: their sum has no digits left for log_sum if peak is large. Without return_lse, return
    the output alone.

    part: of a larger call, the part of the dropout mask that this call is.
    """
    heads = query.shape[1]
    if attention.key_lengths is not None:
        key, value, attention = _within_lengths(key, value, attention)
    if key.shape[1] != heads:
        key, value = _grouped(key, heads), _grouped(value, heads)
    others, p = options_beyond(query, key, attention)
    out = None if return_lse else _by_torch(query, key, value, attention, others)
    if out is not None:
        return out
    fast = not return_lse and torch_computes(query, value, attention, others)
    if not others and is_causal_as_torch(attention):  # torch's op gave no result: use the formula
        fast = False
    visible, keys, added = score_terms(query, key, attention, others)
    hidden = hidden_rows(keys, key, value)
    if hidden is not None:
        key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
    mask = visible
    if fast and added is not None:
        mask = added if visible is None else added.masked_fill(~visible, float("-inf"))
        mask = torch.atleast_2d(mask)
        fast = p > 0 or not differentiates(query, key, value, attention.bias) or near_zero(mask)
    if fast:
        out = fused(query, key, value, mask, p, scale=attention.scale)
    else:
        scores = _scores(query, key, attention, added, visible)
        out = _weighted(scores, value, attention, part)
    seen = None if visible is None else visible.any(-1, keepdim=True)
    empty = None if seen is None or (may_read(seen) and seen.all()) else ~seen
    if empty is not None:
        out = out.masked_fill(empty, 0.0)
    if not return_lse:
        return out
    scores = scores if query.dtype == torch.float64 else scores.float()
    peak, log_sum = _log_sum_exp(scores)
    if empty is not None:  # a row that sees no key has only its sink
        sinks = attention.sinks
        nothing = float("-inf") if sinks is None else _constant_at_inf(sinks).view(-1, 1) - peak
        log_sum = torch.where(empty.squeeze(-1), nothing, log_sum)
    return out, peak, log_sum


def _by_torch(
    query: Tensor, key: Tensor, value: Tensor, attention: Attention, others: list[str]
) -> Tensor | None:
    """Return the output of torch's own op, if it computes this call."""
    run = torch_op(query, key, value, attention, lambda *tensors: None)
    if run is None:
        return None
    x = only(attention) if others else None
    return run(query, key, value) if x is None else run(query, key, value, x)


def _within_lengths(
    key: Tensor, value: Tensor, attention: Attention
) -> tuple[Tensor, Tensor, Attention]:
    """Leave out the keys past the longest row, and the lengths if all rows have the same."""
    lengths, columns = attention.key_lengths, key.shape[2]
    assert lengths is not None
    if not may_read(lengths) or not eager(key):
        return key, value, attention
    known = lengths.tolist()
    longest = max(known, default=0)
    if not longest:
        return key, value, attention
    mask, bias = attention.attn_mask, attention.bias
    if longest < columns:
        key, value = key[:, :, :longest], value[:, :, :longest]
        mask, bias = (
            x if x is None or x.dim() == 0 or x.shape[-1] == 1 else x[..., :longest]
            for x in (mask, bias)
        )
    same = min(known) == longest
    attention = attention._replace(key_lengths=None if same else lengths, attn_mask=mask, bias=bias)
    return key, value, attention


def _weighted(
    scores: Tensor, value: Tensor, attention: Attention, part: Part | None = None
) -> Tensor:
    """Return dropout(softmax(scores)) value, [B, H, Sq, Dv] in the dtype of the value."""
    weights = _softmax(scores, value.dtype, attention.sinks)
    if attention.dropout_seed is None:
        return dropout(weights, attention.dropout_p) @ value
    drop = _dropped_weights(weights, attention, part)
    if drop is None:
        return weights @ value
    return without(drop, weights) @ value * dropout_scale(attention.dropout_p)


def _dropped_weights(
    weights: Tensor, attention: Attention, part: Part | None = None
) -> Tensor | None:
    """Return a boolean, True where dropout removes one of the weights [B, H, Sq, Sk], or None.

    part: of a larger call, the part of its mask that is these weights.
    """
    if attention.dropout_p == 0:
        return None
    assert attention.dropout_seed is not None
    batch, heads, rows, columns = weights.shape
    given, p = (attention.dropout_seed, batch * heads, rows), attention.dropout_p
    if part is None:
        return dropped(*given, columns, p).view(weights.shape)
    drops = [dropped(*given, len(run), p, part.row, run.start) for run in part.runs]
    return torch.cat(drops, -1).view(weights.shape) if drops else weights.bool()


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, attention: Attention, return_lse: bool = False
) -> Any:
    cu_seqlens_q, cu_seqlens_k = attention.cu_seqlens_q, attention.cu_seqlens_k
    assert cu_seqlens_q is not None and cu_seqlens_k is not None
    max_q, max_k = attention.max_q, attention.max_k
    queries, keys = _lengths(cu_seqlens_q), _lengths(cu_seqlens_k)
    batch = queries.shape[0]
    bias = attention.bias
    seen = None if bias is None else left_by(bias)
    if seen is not None:  # a masked key may hold NaN, and 0 times NaN is NaN
        key, value = (x.masked_fill(~seen.view(-1, 1, 1), 0.0) for x in (key, value))
    if attention.mask_spans is not None:  # the tokens are one sequence, which the documents mask
        tail, of_keys = (
            torch.arange(x.shape[0], device=x.device) >= cu[-1]
            for x, cu in ((query, cu_seqlens_q), (key, cu_seqlens_k))
        )
        q, k, v = (
            x.masked_fill(past.view(-1, 1, 1), 0.0).transpose(0, 1).unsqueeze(0)
            for x, past in ((query, tail), (key, of_keys), (value, of_keys))
        )
        found = scaled_dot_product_attention(q, k, v, attention, return_lse)
        out, *lse = found if return_lse else (found,)
        out = out[0].transpose(0, 1).masked_fill(tail.view(-1, 1, 1), 0.0)  # and its gradient
        return (out, lse[0][0].masked_fill(tail, 0.0)) if lse else out
    slopes = attention.alibi_slopes
    if slopes is not None and slopes.dim() == 2 and torch.compiler.is_exporting():
        slopes = torch.cat([slopes, slopes[:1]])  # of the sequence that `_lengths` adds
    attention = attention._replace(cu_seqlens_q=None, cu_seqlens_k=None, alibi_slopes=slopes)
    rows, columns = (
        _places(cu, x, length, batch)
        for cu, x, length in ((cu_seqlens_q, query, max_q), (cu_seqlens_k, key, max_k))
    )
    q, k, v = (
        _padded(x, at, batch, length).transpose(1, 2)
        for x, at, length in ((query, rows, max_q), (key, columns, max_k), (value, columns, max_k))
    )
    if bias is not None:
        padded_bias = _padded(bias, columns, batch, max_k)
        attention = attention._replace(bias=padded_bias.view(batch, 1, 1, max_k))
    attention = band_as_mask(k, max_q, queries, keys, attention)
    padded = attention._replace(key_lengths=keys)
    found = scaled_dot_product_attention(q, k, v, padded, return_lse)
    if not return_lse:
        return _packed(found, rows)
    out, lse = (_packed(x, rows) for x in found)
    return out, lse.transpose(0, 1)


def _padded(x: Tensor, at: Tensor, batch: int, length: int) -> Tensor:
    """Return [batch, length, ..] with the tokens x [tokens, ..] at their places, and zeros."""
    padded = x.new_zeros(batch * length + 1, *x.shape[1:]).index_put((at,), x)
    return padded[:-1].view(batch, length, *x.shape[1:])


def _packed(x: Tensor, at: Tensor) -> Tensor:
    """Return the tokens of x [B, H, length, ..], and zeros past the last sequence."""
    rows = x.transpose(1, 2).flatten(0, 1)
    return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])[at]


def _lengths(cu_seqlens: Tensor) -> Tensor:
    """Return the number of tokens of each sequence, [B].

    An exported program gets one more sequence, which is empty: from a tensor with one element less
    than cu_seqlens, torch.export would infer that B is at least 2.
    """
    if torch.compiler.is_exporting():
        return (cu_seqlens.roll(-1) - cu_seqlens).clamp(min=0)
    return cu_seqlens.diff()


def _places(cu_seqlens: Tensor, x: Tensor, length: int, batch: int) -> Tensor:
    """Return where each token of a packed x [tokens, ..] lies in a batch that is padded to `length`
    tokens: b length + position in sequence b; batch length for tokens past the last sequence.
    """
    tokens = torch.arange(x.shape[0], dtype=cu_seqlens.dtype, device=x.device)
    b = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    place = b * length + (tokens - cu_seqlens[b])
    return torch.where(tokens < cu_seqlens[-1], place, batch * length)


def attention_weights(
    query: Tensor,
    key: Tensor,
    attention: Attention,
    rows: slice | Tensor | None = None,
    heads: slice | Tensor | None = None,
) -> Tensor:
    attention = attention.with_dense_mask(query.shape[2], key.shape[2])
    shift = diagonal_shift(query, key, attention)
    every_i = torch.arange(query.shape[2], device=query.device)
    every_h = torch.arange(query.shape[1], device=query.device)
    i = every_i if rows is None else every_i[rows]
    h = every_h if heads is None else every_h[heads]
    key = key[:, h // max(1, query.shape[1] // max(1, key.shape[1]))]
    query = query[:, h][:, :, i]
    slopes, sinks = attention.alibi_slopes, attention.sinks
    attention = attention._replace(
        attn_mask=_chosen(attention.attn_mask, h, i),
        bias=_chosen(attention.bias, h, i),
        alibi_slopes=None if slopes is None else slopes[..., h],
        sinks=None if sinks is None else sinks[h],
    )
    i = i.view(-1, 1)
    visible, keys = visible_keys(key, i, shift, attention)
    if keys is not None and not finite(key):
        key = key.masked_fill(~keys.transpose(-2, -1), 0.0)
    scores = _scores(query, key, attention, added_to_scores(attention, i, shift, key), visible)
    weights = _softmax(scores, query.dtype, attention.sinks)
    return weights if visible is None else weights.masked_fill(~visible, 0.0)


def _chosen(x: Tensor | None, heads: Tensor, rows: Tensor) -> Tensor | None:
    """Select heads and rows of a mask or bias that broadcasts to [B, H, Sq, Sk]."""
    if x is None:
        return None
    x = x.view((1,) * (4 - x.dim()) + x.shape)
    x = x if x.shape[1] == 1 else x[:, heads]
    return x if x.shape[2] == 1 else x[:, :, rows]
