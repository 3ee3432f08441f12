"""The backward of attention for short sequences in one kernel: dQ, dK and dV of a key-value head by
one program. Each score, its exponential and its dropout word is computed once, and five products in
place of seven; delta is computed inside, and no sum is shared between programs.

    tiny      up to 128 queries and keys, D <= 64: all keys are one tile, and the program copies its
              next head while it computes one. No shared keys, packed rows, bias or 2-D mask
    scratch   up to 512: tiles of keys, and for each of them the queries. Between tiles of keys dQ
              lies in float32 in memory that this program alone uses, small enough for the L2 cache.
              Up to 128 keys dQ is complete at once, and nothing is stored in between
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import LOG2E
from ..launch import Launch, constants, next_power_of_2, processors
from .configurations import SHORT, AttentionTiles, short_pays
from .scores import (
    BackwardInputs,
    Indices,
    OptionalInputs,
    first_row,
    in_columns,
    kept,
    key_row,
    load_rows,
    locate_head,
    locate_keys,
    locate_sequence,
    prepare_call,
    scores,
    seen_keys,
    shifted,
    store_rows,
)


class Saved(NamedTuple):
    """Pointers to the output [B, H, Sq, DV], to lse and its gradient [B, H, Sq], and to the maximum
    and minus the log-sum of each row [B, H, Sq, 2], which exist with a bias.
    """

    output: Any
    lse: Any
    grad_lse: Any
    statistics: Any


class Gradients(NamedTuple):
    """Pointers to DQ [B, H, Sq, D], DK [B, G, Sk, D] and DV [B, G, Sk, DV]."""

    query: Any
    key: Any
    value: Any


class Scratch(NamedTuple):
    """Pointers to memory of which a program reads what it has written itself."""

    offset: Any  # [B, H, Sq]
    delta: Any  # [B, H, Sq]
    sums: Any  # dQ without the scale, [programs, H / G, Sq, BD]


class RowLayouts(NamedTuple):
    """The `RowStrides` of the tensors that `AttentionStrides` lacks."""

    output: Any
    grad_output: Any
    grad_query: Any
    grad_key: Any
    grad_value: Any


class How(NamedTuple):
    """Compile-time: how a program computes."""

    ahead: Any  # stages of the loop over pairs, 1 but for `tiny`
    stages: Any  # of the loop over queries
    row_tiles: Any  # tiles of queries that a head has, for `tiny`; else 0
    one_tile: Any  # whether all keys are one tile
    transposed: Any  # whether dQ is computed as its transpose: wgmma takes no less than 64 rows
    has_dlse: Any


class _Work(NamedTuple):
    """What all pairs of a program have in common."""

    inputs: Any
    saved: Any
    grads: Any
    scratch: Any
    layouts: Any
    call: Any  # `Call` of scores.py


class _Queries(NamedTuple):
    """Pointers to the first query of a head in each tensor, its row in lse, and its sums."""

    head: Any
    query: Any
    output: Any
    grad_output: Any
    grad_query: Any
    row: Any
    sums: Any


class _Keys(NamedTuple):
    """A tile of keys."""

    k: Any  # [BN, BD]
    v: Any  # [BN, BDV]
    start: Any  # the first key
    j: Any  # [BN]
    keys: Any  # `Keys`, [BN, 1] each


class _Rows(NamedTuple):
    """A tile of queries: P = 2^(s - peak + offset) and dS = P (dP - delta)."""

    q: Any  # [BM, BD]
    do: Any  # [BM, BDV]
    start: Any  # the first query
    i: Any  # [BM]
    r: Any  # [BM], clamped to the queries that exist
    statistics: Any  # (peak, offset, delta), [BM] each; without a bias peak is 0


@triton.jit
def _first(base, layout, b, h, row):
    """Return a pointer to a row of head h of sequence b, in a tensor of this layout."""
    return base + b * layout.batch + h * layout.head + row * layout.row


@triton.jit
def _locate_queries(work, sequence, pair, member, tile: tl.constexpr, has: tl.constexpr):
    """Return where the queries of one head of a pair begin, its mask and its dropout stream."""
    sizes, strides, layouts = work.call.sizes, work.call.strides, work.layouts
    batch_head = pair * sizes.group + member
    b = (batch_head // sizes.heads).to(tl.int64)
    h = (batch_head % sizes.heads).to(tl.int64)
    first = sequence.first_query
    query = work.inputs.query + b * strides.query_batch + h * strides.query_head
    query += first * strides.query_row
    output = _first(work.saved.output, layouts.output, b, h, first)
    do = _first(work.inputs.grad_output, layouts.grad_output, b, h, first)
    dq = _first(work.grads.query, layouts.grad_query, b, h, first)
    head = locate_head(work.call, sequence, batch_head, b, h, 0, tile, has)
    row = first_row(batch_head, h, sequence, sizes, has)
    place = tl.program_id(0).to(tl.int64) * sizes.group + member
    sums = work.scratch.sums + place * sizes.queries * tile.dim_block
    return _Queries(head, query, output, do, dq, row, sums)


@triton.jit
def _statistics(work, queries, do, i, tile: tl.constexpr, has: tl.constexpr, how: tl.constexpr):
    """Return (peak, offset, delta) of the queries i, [BM] each. Past the end, where dO is zero, P
    is that of the last query, and delta is zero.

    A query that sees no key has scores of -inf, so that any finite offset gives P = 0, and a
    minimum is cheaper than a comparison with -inf.
    """
    saved, count = work.saved, queries.head.sequence.queries
    r = tl.minimum(i, count - 1)
    row = work.layouts.output.row
    o = load_rows(queries.output, r, row, None, tile.value_dim, tile.value_block, False)
    delta = tl.sum(o.to(tile.acc) * do.to(tile.acc), 1)
    peak = 0.0
    lse = tl.load(saved.lse + queries.row + r)
    if has.separate_max:
        peak = tl.load(saved.statistics + (queries.row + r) * 2)
        offset = tl.load(saved.statistics + (queries.row + r) * 2 + 1)
    else:
        offset = tl.minimum(lse * -LOG2E, 1e38, propagate_nan=tl.PropagateNan.ALL)
    if how.has_dlse:
        dlse = tl.load(saved.grad_lse + queries.row + i, mask=i < count, other=0.0)
        delta -= tl.where(lse == float("-inf"), 0.0, dlse)
    return peak, offset, delta


@triton.jit
def _prepare(work, queries, tile: tl.constexpr, has: tl.constexpr, how: tl.constexpr):
    """Write offset and delta of all queries of a head."""
    count = queries.head.sequence.queries
    row = work.layouts.grad_output.row
    for i0 in tl.range(0, count, tile.rows, num_stages=3):
        i = i0 + tl.arange(0, tile.rows)
        ok = i < count
        do = load_rows(queries.grad_output, i, row, ok, tile.value_dim, tile.value_block, True)
        _, offset, delta = _statistics(work, queries, do, i, tile, has, how)
        tl.store(work.scratch.offset + queries.row + i, offset, mask=ok)
        tl.store(work.scratch.delta + queries.row + i, delta, mask=ok)


@triton.jit
def _prepared(work, queries, i, r, has: tl.constexpr):
    """Return (peak, offset, delta) of the queries i, [BM] each, as `_statistics` does."""
    ok = i < queries.head.sequence.queries
    peak = 0.0
    if has.separate_max:
        peak = tl.load(work.saved.statistics + (queries.row + r) * 2)
    offset = tl.load(work.scratch.offset + queries.row + r)
    return peak, offset, tl.load(work.scratch.delta + queries.row + i, mask=ok, other=0.0)


@triton.jit
def _add_tile(state, own, rows, head, tile: tl.constexpr, has: tl.constexpr):
    """Add a tile of queries to dK [BN, BD] and dV [BN, BDV], of which dK lacks the scale and dV
    1 / (1 - p). Return dK, dV and dS^T [BN, BM].
    """
    dk, dv = state
    peak, offset, delta = rows.statistics
    s = tl.dot(own.k, tl.trans(rows.q), input_precision=tile.precision)
    at = Indices(rows.i[None, :], own.j[:, None], rows.r[None, :])
    s, _ = scores(s, at, own.keys, head, tile, has, True)
    if has.separate_max:
        s -= peak[None, :]
    p = tl.math.exp2(shifted(s, offset[None, :], head, has))
    dp = tl.dot(own.v, tl.trans(rows.do), input_precision=tile.precision)
    z = p
    if has.dropout:
        inv_keep = head.call.factors.inv_keep
        keep = tl.trans(kept(head, rows.start, own.start, tile, has))
        zero = 0.0
        if tile.dim_block <= 64:  # a zero that the compiler cannot know, as in backward.py
            zero = inv_keep * 0.0
        z = tl.where(keep, p, zero)
        dp = tl.where(keep, dp, 0.0) * inv_keep
    dv = tl.dot(z.to(rows.do.dtype), rows.do, dv, tile.precision, out_dtype=tile.acc)
    ds = (p * (dp - delta[None, :])).to(rows.q.dtype)
    dk = tl.dot(ds, rows.q, dk, tile.precision, out_dtype=tile.acc)
    return dk, dv, ds


@triton.jit
def _visit(state, own, queries, work, i0, tile: tl.constexpr, has: tl.constexpr, how: tl.constexpr):
    """Add the queries i0 .. i0 + BM - 1 of a head to dK and dV of the keys `own`, and these keys to
    dQ. Store dQ if it is complete, else its sum.
    """
    head, layouts = queries.head, work.layouts
    sequence, call = head.sequence, head.call
    i = i0 + tl.arange(0, tile.rows)
    ok = i < sequence.queries
    r = tl.minimum(i, sequence.queries - 1)
    q = load_rows(queries.query, r, call.strides.query_row, None, tile.dim, tile.dim_block, False)
    row = layouts.grad_output.row
    do = load_rows(queries.grad_output, r, row, ok, tile.value_dim, tile.value_block, True)
    if how.one_tile:
        statistics = _statistics(work, queries, do, i, tile, has, how)
    else:
        statistics = _prepared(work, queries, i, r, has)
    rows = _Rows(q, do, i0, i, r, statistics)
    dk, dv, ds = _add_tile(state, own, rows, head, tile, has)
    if not how.one_tile:
        place = queries.sums + (i[:, None] * tile.dim_block + tl.arange(0, tile.dim_block)[None, :])
        before = tl.load(place, mask=ok[:, None] & (own.start > 0), other=0.0)
    if how.transposed:
        dq = tl.dot(tl.trans(own.k), ds, input_precision=tile.precision, out_dtype=tile.acc)
        dq = tl.trans(dq)
    else:
        dq = tl.dot(tl.trans(ds), own.k, input_precision=tile.precision, out_dtype=tile.acc)
    if not how.one_tile:
        dq += before
        end = tl.maximum(sequence.length, 1) - 1  # the last key that one of the queries may see
        if has.right:
            seen = i0 + tile.rows - 1 + sequence.shift + call.band.right
            end = tl.minimum(end, tl.maximum(seen, 0))
        tl.store(place, dq, mask=ok[:, None] & (own.start + tile.columns <= end))
        ok = ok & (own.start + tile.columns > end)
    dq = dq * call.factors.scale
    store_rows(queries.grad_query, r, layouts.grad_query.row, ok, dq, tile.dim, tile.dim_block)
    return dk, dv


@triton.jit
def _load_keys(work, queries, n0, b, g, tile: tl.constexpr, has: tl.constexpr):
    """Load the keys n0 .. n0 + BN - 1, with zeros for what length and mask hide, which may be NaN:
    dS is zero there, but 0 * NaN is NaN.
    """
    sequence, strides = queries.head.sequence, work.call.strides
    j = n0 + tl.arange(0, tile.columns)
    inside = j < seen_keys(sequence, work.call.band, has)
    keys = key_row(queries.head, j, inside, tile, has, True)
    k_base, v_base = locate_keys(work.inputs, strides, sequence, b, g)
    k = load_rows(k_base, j, strides.key_row, keys.ok, tile.dim, tile.dim_block, True)
    v = load_rows(v_base, j, strides.value_row, keys.ok, tile.value_dim, tile.value_block, True)
    return _Keys(k, v, n0, j, in_columns(keys, has))


@triton.jit
def _store_keys(state, work, sequence, n0, b, g, tile: tl.constexpr, has: tl.constexpr):
    """Store dK and dV of the keys n0 .. n0 + BN - 1 of a key-value head."""
    dk, dv = state
    dk = dk * work.call.factors.scale
    if has.dropout:
        dv = dv * work.call.factors.inv_keep
    j = n0 + tl.arange(0, tile.columns)
    ok = j < (sequence.length if has.packed else work.call.sizes.keys)
    layout, first = work.layouts.grad_key, sequence.first_key
    base = _first(work.grads.key, layout, b, g, first)
    store_rows(base, j, layout.row, ok, dk, tile.dim, tile.dim_block)
    layout = work.layouts.grad_value
    base = _first(work.grads.value, layout, b, g, first)
    store_rows(base, j, layout.row, ok, dv, tile.value_dim, tile.value_block)


@triton.jit
def short_backward_kernel(
    inputs,
    saved,
    grads,
    scratch,
    optional,
    layouts,
    strides,
    sizes,
    band,
    factors,
    pairs,
    tile: tl.constexpr,
    has: tl.constexpr,
    how: tl.constexpr,
):
    """One program computes every so many of the `pairs` (batch, key-value head): all rows of DK,
    DV, and DQ of the heads that share the keys.

    What it reads back from SCRATCH other threads of it may have written: hence the barriers.
    """
    call = prepare_call(optional, strides, sizes, band, factors, has)
    work = _Work(inputs, saved, grads, scratch, layouts, call)
    groups = sizes.heads // sizes.group
    for n in tl.range(tl.program_id(0), pairs, tl.num_programs(0), num_stages=how.ahead):
        pair = tl.program_id(0) * 0 + n  # a tensor in the interpreter, too
        b = (pair // groups).to(tl.int64)
        g = (pair % groups).to(tl.int64)
        sequence = locate_sequence(optional, sizes, b, has)
        if how.row_tiles:
            queries = _locate_queries(work, sequence, pair, 0, tile, has)
            own = _load_keys(work, queries, 0, b, g, tile, has)
            dk = tl.zeros([tile.columns, tile.dim_block], tile.acc)
            dv = tl.zeros([tile.columns, tile.value_block], tile.acc)
            for number in tl.static_range(how.row_tiles):
                i0 = number * tile.rows
                dk, dv = _visit((dk, dv), own, queries, work, i0, tile, has, how)
            _store_keys((dk, dv), work, sequence, 0, b, g, tile, has)
        else:
            if not how.one_tile:
                for member in tl.range(0, sizes.group):
                    queries = _locate_queries(work, sequence, pair, member, tile, has)
                    _prepare(work, queries, tile, has, how)
                tl.debug_barrier()
            last = tl.maximum(sequence.length, 1) - 1
            count = last + 1 if has.packed else sizes.keys
            for n0 in tl.range(0, count, tile.columns, num_stages=1):
                n0 = tl.multiple_of(n0, tile.columns)
                dk = tl.zeros([tile.columns, tile.dim_block], tile.acc)
                dv = tl.zeros([tile.columns, tile.value_block], tile.acc)
                lo = 0
                if has.right:  # the first tile of keys is that of queries without keys, too
                    lo = tl.maximum(n0 - sequence.shift - band.right, 0) // tile.rows * tile.rows
                    lo = tl.where(n0 == 0, 0, lo)
                hi = tl.where(n0 <= last, sequence.queries, lo)
                for member in tl.range(0, sizes.group):
                    queries = _locate_queries(work, sequence, pair, member, tile, has)
                    own = _load_keys(work, queries, n0, b, g, tile, has)
                    for i0 in tl.range(lo, hi, tile.rows, num_stages=how.stages):
                        i0 = tl.multiple_of(i0, tile.rows)
                        dk, dv = _visit((dk, dv), own, queries, work, i0, tile, has, how)
                _store_keys((dk, dv), work, sequence, n0, b, g, tile, has)
                if not how.one_tile:
                    tl.debug_barrier()


# ---------------------------------------------------------------------- which calls, and the launch

SEPARATE = "separate kernels"  # delta, dK and dV, dQ
MOST = {"tiny": 128, "scratch": 512}  # queries and keys
REFUSED = {"alibi": "ALiBi", "softcap": "a softcap", "left": "a window"}
REFUSED["lists"] = "a block mask"


def tiles(kernel: str, plan: Any) -> AttentionTiles | None:
    """Return the tiles of a kernel for a call, or None if its sizes are not for this kernel."""
    longest = max(plan.q_length, plan.k_length)
    if plan.arch == "interpreter":
        BM, BN = (max(16, next_power_of_2(n)) for n in (plan.q_length, plan.k_length))
        rows: tuple[AttentionTiles, ...] = (AttentionTiles(min(64, BM), min(128, BN), 8, 1),) * 6
    else:
        rows = SHORT.get((kernel, plan.arch), ()) if plan.dtype.itemsize == 2 else ()
    i = max(0, (plan.head_block - 1).bit_length() - 5)
    has = plan.has  # what lies in shared memory, or in registers, beside the tiles
    more = plan.packed, plan.head_block > 64, has.mask == 2, has.bias > 0
    if longest > MOST[kernel] or i >= len(rows) or (kernel == "tiny" and any(more)):
        return None
    if kernel == "tiny" and plan.arguments["sizes"].group > 1:
        return None
    return rows[i]


def short_kernels(plan: Any) -> list[str]:
    """Return the kernels whose sizes are those of a call, the one that is shipped first."""
    return [kernel for kernel in MOST if tiles(kernel, plan)]


def short_obstacle(
    plan: Any, needs: tuple[bool, ...], bias_grad: str, inputs: tuple[Tensor, ...]
) -> str | None:
    """Return which option of a call these kernels do not compute, in words, or None."""
    found = [words for name, words in REFUSED.items() if getattr(plan.has, name)]
    if found:
        return f"it takes no call with {', '.join(found)}"
    if not all(needs[:3]):
        return "it computes the gradients of query, key and value, all three"
    if bias_grad == "key":
        return "it computes no gradient of a bias of keys"
    if plan.tile.wide or not all(x.numel() for x in inputs):
        return "it takes no empty tensors, and less than 2^31 elements of a head"
    return None


def pays(plan: Any) -> bool:
    """Return whether one kernel is expected to be faster. In the interpreter the tests ask for it
    by its name.
    """
    sizes = plan.q_length, plan.k_length
    pairs, group = plan.batch * plan.groups, plan.arguments["sizes"].group
    places = processors(plan.device)
    return short_pays(plan.arch, pairs, group, sizes, plan.head_block, places)


class ShortLaunch:
    """The launch of a kernel with the memory that it needs beside.

    Args:
        kernel: "tiny" or "scratch".
        plan: The plan of the call.
        layouts: The strides of output, grad_output, and the gradients.
        has_dlse: Whether lse has a gradient.
    """

    def __init__(self, kernel: str, plan: Any, layouts: RowLayouts, has_dlse: bool) -> None:
        chosen = tiles(kernel, plan)
        assert chosen is not None
        BM, BN, warps, stages = chosen
        pairs, group = plan.batch * plan.groups, plan.arguments["sizes"].group
        programs = min(pairs, processors(plan.device) * 8 // warps)  # of 255 registers a thread
        one_tile, transposed = plan.k_length <= BN, BM < 64 and plan.arch == "sm_90"
        row_tiles = triton.cdiv(plan.q_length, BM) if kernel == "tiny" else 0
        ahead = stages if row_tiles else 1
        how = How(ahead, stages, row_tiles, one_tile, transposed, has_dlse)
        self.sums = () if one_tile else (programs, group, plan.q_length, plan.tile.dim_block)
        groups: dict[str, Any] = dict(inputs=BackwardInputs, saved=Saved, grads=Gradients)
        groups |= dict(scratch=Scratch, optional=OptionalInputs)
        tile = plan.tile._replace(rows=BM, columns=BN, recompute_masked=False)
        own = dict(tile=constants(tile), has=constants(plan.has), how=constants(how))
        own |= plan.arguments | dict(layouts=layouts, pairs=pairs)
        self.launch = Launch(short_backward_kernel, (programs,), own, warps, stages, groups)

    def __call__(self, inputs, saved, grads, optional) -> None:
        """Launch the kernel; the arguments are those of the kernel, as plain tuples."""
        lse = saved[1]
        scratch = (lse.new_empty(0),) * 3
        if self.sums:
            scratch = torch.empty_like(lse), torch.empty_like(lse), lse.new_empty(self.sums)
        self.launch(inputs, saved, grads, scratch, optional)
