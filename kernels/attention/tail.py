"""Zeros in the rows past the last sequence of a packed batch, which no other kernel writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch, constants, processors
from .scores import clamp

BLOCK = 1024  # elements that a program stores at a time


class Three(NamedTuple):
    """Up to three tensors [1, H, tokens, width], or their layouts."""

    first: Any
    second: Any
    third: Any


class _Layout(NamedTuple):
    """The sizes and strides of a tensor, whose last stride is 1; no heads if there is none."""

    heads: Any
    tokens: Any
    width: Any
    head: Any
    token: Any


class _Tile(NamedTuple):
    """Compile-time: the elements that a program stores at a time."""

    columns: Any


@triton.jit
def _clear(tensors, layouts, OFFSET, tile: tl.constexpr):
    """Store zeros to the rows of three tensors from the one at OFFSET on."""
    for n in tl.static_range(3):
        layout = layouts[n]
        first = clamp(tl.load(OFFSET).to(tl.int64), 0, layout.tokens)
        row = layout.heads * layout.width
        size = (layout.tokens - first) * row
        zeros = tl.zeros([tile.columns], tensors[n].dtype.element_ty)
        begin = tl.program_id(0).to(tl.int64) * tile.columns
        for start in tl.range(begin, size, tl.num_programs(0) * tile.columns):
            at = start + tl.arange(0, tile.columns)
            inside = at % row
            place = (first + at // row) * layout.token
            place += inside // layout.width * layout.head + inside % layout.width
            tl.store(tensors[n] + place, zeros, mask=at < size)


@triton.jit
def clear_tail_kernel(
    of_queries,
    of_keys,
    QUERIES,
    KEYS,
    query_layouts,
    key_layouts,
    last,
    tile: tl.constexpr,
):
    """The programs share the elements of the rows past the last sequence, in tensors of queries and
    of keys. QUERIES and KEYS [last + 1] are the offsets of the sequences.
    """
    _clear(of_queries, query_layouts, QUERIES + last, tile)
    _clear(of_keys, key_layouts, KEYS + last, tile)


def tail_launch(
    offsets: Tensor, of_queries: Sequence[Tensor | None], of_keys: Sequence[Tensor | None] = ()
) -> Launch:
    """Return the launch that clears tensors like these, [1, H, tokens, width] or [1, H, tokens].
    offsets: those of the queries, [B + 1].
    """
    own = dict(
        query_layouts=_layouts(of_queries),
        key_layouts=_layouts(of_keys),
        last=offsets.shape[0] - 1,
        tile=constants(_Tile(BLOCK)),
    )
    groups = dict(of_queries=Three, of_keys=Three)
    return Launch(clear_tail_kernel, (processors(offsets.device),), own, 4, groups=groups)


def _layouts(tensors: Sequence[Tensor | None]) -> Three:
    found = []
    for x in (*tensors, None, None, None)[:3]:
        if x is None or x.dim() < 3:
            found.append(_Layout(0, 0, 1, 0, 0))
        else:
            found.append(_Layout(*(*x.shape, 1)[1:4], *x.stride()[1:3]))
    return Three(*found)
