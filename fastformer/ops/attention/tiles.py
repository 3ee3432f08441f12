"""Attention with a `BlockMask` in eager PyTorch: one row of tiles after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastformer.description import Attention
from fastformer.dispatch.state import state, use_formula
from fastformer.eager import batched, eager, gradients_through, may_read
from fastformer.mask_tiles import COLUMNS, ROWS, UNSEEN, tile_elements, tile_slots
from fastformer.ops.attention.masks import (
    added_to_scores,
    diagonal_shift,
    documents,
    hidden_rows,
    visible_keys,
)

Attend = Callable[..., Any]  # `reference.attention_block`


def computes_by_tiles(query: Tensor, attention: Attention) -> bool:
    """Return whether `by_tiles` computes a call: it reads the mask on the host."""
    spans = attention.mask_spans
    if state.by_formula or not eager(query) or spans is None or not may_read(spans):
        return False
    return forward_ad._current_level < 0 and query.numel() > 0


def by_tiles(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention: Attention,
    return_lse: bool,
) -> Any:
    """Compute `attend(query, key, value, attention, return_lse)` with a block mask, of as many
    heads of keys as of queries.
    """
    shift = diagonal_shift(query, key, attention)
    first = torch.zeros(1, 1, dtype=torch.int64)
    hidden = hidden_rows(visible_keys(key, first, shift, attention)[1], key, value)
    if hidden is not None:
        key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
    call = _Call(attend, attention, shift, return_lse)
    found = _TiledAttention.apply(call, query, key, value, attention.bias, attention.sinks)
    return found if return_lse else found[0]


class _Call(NamedTuple):
    """A call of `by_tiles`, apart from the tensors that may require a gradient."""

    attend: Attend
    attention: Attention
    shift: int | Tensor
    return_lse: bool

    def on(self, inputs: Sequence[Any], attention: Attention, **options: Any) -> tuple[Tensor, ...]:
        """Return (output, peak, log_sum), or (output,) without `return_lse`."""
        query, key, value, bias, sinks = inputs
        attention = attention._replace(bias=bias, sinks=sinks)
        found = self.attend(query, key, value, attention, self.return_lse, **options)
        return found if self.return_lse else (found,)


class Part(NamedTuple):
    """A part of a call: the index of its first query, and those of its keys as ranges."""

    row: int
    runs: list[range]


class _Block(NamedTuple):
    """A row of tiles, with the keys that one of its queries may see.

    rows: the queries. i: [rows, 1], their indices. columns: [n], the indices of the keys. part: the
    same for dropout. attention: the options, with all masks in `attn_mask`.
    """

    rows: slice
    i: Tensor
    columns: Tensor
    part: Part
    attention: Attention

    def of_rows(self, bias: Any) -> Any:
        """Return a view of the queries of a tensor that broadcasts to [.., Sq, Sk]."""
        whole = bias is None or bias.dim() < 2 or bias.shape[-2] == 1
        return bias if whole else bias[..., self.rows, :]

    def of_columns(self, x: Any) -> Any:
        """Return the keys of a tensor that broadcasts to [.., Sk]."""
        return x if x is None or x.dim() == 0 or x.shape[-1] == 1 else x[..., self.columns]

    def inputs(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the parts of query, key, value, bias and sinks."""
        query, key, value, bias, sinks = tensors
        at = self.columns
        return [query[:, :, self.rows], key[:, :, at], value[:, :, at], self.of_rows(bias), sinks]

    def compute(self, call: _Call, inputs: Sequence[Any], key: Tensor) -> tuple[Tensor, ...]:
        """Call attention on the block, given its parts of the inputs and the key of all blocks."""
        *others, bias, sinks = inputs
        terms = call.attention._replace(bias=bias)
        added = self.of_columns(added_to_scores(terms, self.i, call.shift, key))
        return call.on([*others, added, sinks], self.attention, part=self.part)


_OF_BLOCKS = (  # what a block has in its mask
    *("key_lengths", "window", "alibi_slopes", "mask_spans", "mask_lists", "mask_bits"),
    *("cu_seqlens_q", "cu_seqlens_k"),
)


def _blocks(call: _Call, query: Tensor, key: Tensor, bias: Tensor | None) -> Iterator[_Block]:
    attention, (q_length, k_length) = call.attention, (query.shape[2], key.shape[2])
    spans, lists, bits = attention.mask_spans, attention.mask_lists, attention.mask_bits
    assert spans is not None and lists is not None and bits is not None
    slots = tile_slots(spans, lists, q_length, k_length)
    none: dict[str, Any] = dict.fromkeys(_OF_BLOCKS)
    own = attention._replace(is_causal=False, causal_alignment="top_left", **none)
    for t, visited in enumerate((slots != UNSEEN).flatten(0, 1).any(0)):
        rows = slice(t * ROWS, min(q_length, (t + 1) * ROWS))
        i = torch.arange(rows.start, rows.stop).view(-1, 1)
        if attention.cu_seqlens_q is not None:
            first, end, *_ = documents(i, attention)
            visited[: int(first.min()) // COLUMNS] = False
            visited[-(-int(end.max()) // COLUMNS) :] = False
        runs: list[range] = []
        for first in (visited.nonzero().flatten() * COLUMNS).tolist():
            start = runs.pop().start if runs and runs[-1].stop == first else first
            runs.append(range(start, min(first + COLUMNS, k_length)))
        columns = torch.tensor([j for run in runs for j in run], dtype=torch.int64)
        block = _Block(rows, i, columns, Part(rows.start, runs), own)
        elements = tile_elements(bits, slots[:, :, t : t + 1, visited])
        mask = elements[..., : len(i), : len(columns)]
        seen, _ = visible_keys(key, i, call.shift, attention._replace(bias=block.of_rows(bias)))
        if seen is not None:
            mask = mask & block.of_columns(seen)
        yield block._replace(attention=own._replace(attn_mask=mask))


class _TiledAttention(torch.autograd.Function):
    """Compute a call in memory of 128 queries x the keys that they see. The backward computes each
    block again. Returns (output, peak, log_sum), the last two empty without `return_lse`.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: Any) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*inputs)
        query, key, _, bias, _ = inputs
        blocks = _blocks(call, query, key, bias)
        found = [block.compute(call, block.inputs(inputs), key) for block in blocks]
        output, *others = (torch.cat(parts, 2) for parts in zip(*found))
        peak, log_sum = others or (output.new_empty(0), output.new_empty(0))
        ctx.mark_non_differentiable(*[peak, log_sum][: 2 - call.return_lse])
        return output, peak, log_sum

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor, grad_log: Tensor) -> tuple[Any, ...]:
        call, inputs, needs = ctx.call, ctx.saved_tensors, ctx.needs_input_grad[1:]
        query, key, _, bias, _ = inputs
        again = torch.is_grad_enabled()
        if again or batched(grad, grad_log):  # by the formula, also to be differentiated again
            dense = call.attention.with_dense_mask(query.shape[2], key.shape[2])
            with use_formula(), torch.enable_grad():
                views = [None if x is None else x.view_as(x) for x in inputs]
                found = call.on(views, dense)
            return None, *gradients_through((found[0], *found[2:]), (grad, grad_log), views, again)
        grads: list[Any] = [torch.zeros_like(x) if need else None for x, need in zip(inputs, needs)]
        for block in _blocks(call, query, key, bias):
            leaves = [
                x if x is None else x.detach().requires_grad_(need)
                for x, need in zip(block.inputs(inputs), needs)
            ]
            with torch.enable_grad():
                found = block.compute(call, leaves, key)
            incoming = [x[:, :, block.rows] for x in (grad, grad_log)[: 1 + call.return_lse]]
            parts = gradients_through((found[0], *found[2:]), incoming, leaves, create_graph=False)
            for n, (whole, part) in enumerate(zip(grads, parts)):
                if part is None:
                    continue
                if n == 0:
                    whole[:, :, block.rows] = part
                elif n <= 2:
                    whole.index_add_(2, block.columns, part)
                else:
                    (block.of_rows(whole) if n == 3 else whole).add_(part)
        return None, *grads
