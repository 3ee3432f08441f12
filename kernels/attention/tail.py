"""Zeros in the rows past the last sequence of a packed batch, which no other kernel writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch, processors
from .scores import clamp


class Three(NamedTuple):
    """Up to three tensors [1, H, tokens, width], or their layouts."""

    first: Any
    second: Any
    third: Any


class _Layout(NamedTuple):
    """The sizes and strides of a tensor, whose last stride is 1. No heads: there is no tensor."""

    heads: Any
    tokens: Any
    width: Any
    head: Any
    token: Any


@triton.jit
def _clear(tensors, layouts, OFFSET, BLOCK: tl.constexpr):
    """Store zeros to the rows of three tensors from the one at OFFSET on."""
    for n in tl.static_range(3):
        layout = layouts[n]
        first = clamp(tl.load(OFFSET).to(tl.int64), 0, layout.tokens)
        row = layout.heads * layout.width
        size = (layout.tokens - first) * row
        zeros = tl.zeros([BLOCK], tensors[n].dtype.element_ty)
        begin = tl.program_id(0).to(tl.int64) * BLOCK
        for start in tl.range(begin, size, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at % row
            place = (first + at // row) * layout.token
            place += inside // layout.width * layout.head + inside % layout.width
            tl.store(tensors[n] + place, zeros, mask=at < size)


@triton.jit
def clear_tail_kernel(
    of_queries, of_keys, QUERIES, KEYS, query_layouts, key_layouts, last, BLOCK: tl.constexpr
):
    """The programs share the elements of the rows past the last sequence, in tensors of queries and
    of keys. QUERIES and KEYS [last + 1] are the offsets of the sequences.
    """
    _clear(of_queries, query_layouts, QUERIES + last, BLOCK)
    _clear(of_keys, key_layouts, KEYS + last, BLOCK)


def tail_launch(
    offsets: Tensor, of_queries: Sequence[Tensor | None], of_keys: Sequence[Tensor | None] = ()
) -> Launch:
    """Return the launch that clears tensors like these, [1, H, tokens, width] or [1, H, tokens].
    offsets: those of the queries, [B + 1].
    """
    own: dict[str, Any] = dict(last=offsets.shape[0] - 1, BLOCK=1024)
    for name, tensors in (("query_layouts", of_queries), ("key_layouts", of_keys)):
        own[name] = Three(*map(_layout, (*tensors, None, None, None)[:3]))
    groups = dict(of_queries=Three, of_keys=Three)
    return Launch(clear_tail_kernel, (processors(offsets.device),), own, 4, groups=groups)


def _layout(x: Tensor | None) -> _Layout:
    if x is None or x.dim() < 3:
        return _Layout(0, 0, 1, 0, 0)
    return _Layout(*(*x.shape, 1)[1:4], *x.stride()[1:3])
