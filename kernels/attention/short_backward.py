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
from .configurations import SHORT, Tiles, short_pays
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
    """The `RowStrides` of the tensors that `Strides` lacks."""

    output: Any
    grad_output: Any
    grad_query: Any
    grad_key: Any
    grad_value: Any


class How(NamedTuple):
    """Compile-time: how a program computes."""

    stages: Any  # of the loop that copies ahead
    row_tiles: Any  # tiles of queries that a head has, for `tiny`; else 0
    one_tile: Any  # whether all keys are one tile
    transposed: Any  # whether dQ is computed as its transpose: wgmma takes no less than 64 rows
    has_dlse: Any


class _Tensors(NamedTuple):
    """The pointers of a kernel."""

    inputs: Any
    saved: Any
    grads: Any


class _Queries(NamedTuple):
    """Pointers to the first query of a head in each tensor, and its row in lse."""

    head: Any
    query: Any
    output: Any
    grad_output: Any
    grad_query: Any
    row: Any


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
    peak: Any  # [BM], or 0 without a bias
    offset: Any  # [BM]
    delta: Any  # [BM]


@triton.jit
def _locate_queries(
    tensors, layouts, call, sequence, batch_head, tile: tl.constexpr, has: tl.constexpr
):
    """Return where the queries of a head begin, its mask and its dropout stream."""
    sizes, strides, first = call.sizes, call.strides, sequence.first_query
    b = (batch_head // sizes.heads).to(tl.int64)
    h = (batch_head % sizes.heads).to(tl.int64)
    query = tensors.inputs.query + b * strides.query_batch + h * strides.query_head
    layout = layouts.output
    output = tensors.saved.output + b * layout.batch + h * layout.head + first * layout.row
    layout = layouts.grad_output
    do = tensors.inputs.grad_output + b * layout.batch + h * layout.head + first * layout.row
    layout = layouts.grad_query
    dq = tensors.grads.query + b * layout.batch + h * layout.head + first * layout.row
    head = locate_head(call, sequence, batch_head, b, h, 0, tile, has)
    row = first_row(batch_head, h, sequence, sizes, has)
    return _Queries(head, query + first * strides.query_row, output, do, dq, row)


@triton.jit
def _statistics(
    saved, layouts, queries, do, i, tile: tl.constexpr, has: tl.constexpr, how: tl.constexpr
):
    """Return (peak, offset, delta) of the queries i, [BM] each. Past the end, where dO is zero, P
    is that of the last query, and delta is zero.

    A query that sees no key has scores of -inf, so that any finite offset gives P = 0, and a
    minimum is cheaper than a comparison with -inf.
    """
    count = queries.head.sequence.queries
    ok = i < count
    r = tl.minimum(i, count - 1)
    row = layouts.output.row
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
        dlse = tl.load(saved.grad_lse + queries.row + i, mask=ok, other=0.0)
        delta -= tl.where(lse == float("-inf"), 0.0, dlse)
    return peak, offset, delta


@triton.jit
def _add_tile(state, own, rows, head, tile: tl.constexpr, has: tl.constexpr):
    """Add a tile of queries to dK [BN, BD] and dV [BN, BDV], of which dK lacks the scale and dV
    1 / (1 - p). Return (dK, dV) and dS^T [BN, BM].
    """
    dk, dv = state
    s = tl.dot(own.k, tl.trans(rows.q), input_precision=tile.precision)
    at = Indices(rows.i[None, :], own.j[:, None], rows.r[None, :])
    s, _ = scores(s, at, own.keys, head, tile, has, True)
    if has.separate_max:
        s -= rows.peak[None, :]
    p = tl.math.exp2(shifted(s, rows.offset[None, :], head, has))
    dp = tl.dot(own.v, tl.trans(rows.do), input_precision=tile.precision)
    z = p
    if has.dropout:
        inv_keep = head.call.factors.inv_keep
        keep = tl.trans(kept(head, rows.start, own.start, tile, has))
        zero = 0.0
        if tile.dim_block <= 64:  # a zero that the compiler cannot know, as for today's dK and dV
            zero = inv_keep * 0.0
        z = tl.where(keep, p, zero)
        dp = tl.where(keep, dp, 0.0) * inv_keep
    dv = tl.dot(z.to(rows.do.dtype), rows.do, dv, tile.precision, out_dtype=tile.acc)
    ds = (p * (dp - rows.delta[None, :])).to(rows.q.dtype)
    dk = tl.dot(ds, rows.q, dk, tile.precision, out_dtype=tile.acc)
    return dk, dv, ds


@triton.jit
def _query_gradient(ds, k, tile: tl.constexpr, how: tl.constexpr):
    """Return dQ [BM, BD] without the scale, from dS^T [BN, BM] and the keys."""
    if how.transposed:
        dq = tl.dot(tl.trans(k), ds, input_precision=tile.precision, out_dtype=tile.acc)
        return tl.trans(dq)
    else:
        return tl.dot(tl.trans(ds), k, input_precision=tile.precision, out_dtype=tile.acc)


@triton.jit
def _load_keys(bases, strides, n0, keys, tile: tl.constexpr, has: tl.constexpr):
    """Load the keys n0 .. n0 + BN - 1, with zeros for what length and mask hide, which may be NaN:
    dS is zero there, but 0 * NaN is NaN.
    """
    j = n0 + tl.arange(0, tile.columns)
    k = load_rows(bases[0], j, strides.key_row, keys.ok, tile.dim, tile.dim_block, True)
    v = load_rows(bases[1], j, strides.value_row, keys.ok, tile.value_dim, tile.value_block, True)
    return _Keys(k, v, n0, j, in_columns(keys, has))


@triton.jit
def _store_keys(state, outputs, layouts, j, count, factors, tile: tl.constexpr, has: tl.constexpr):
    """Store dK and dV of the keys j of `count`; `outputs` point to the first key of the head."""
    dk, dv = state
    dk = dk * factors.scale
    if has.dropout:
        dv = dv * factors.inv_keep
    ok = j < count
    store_rows(outputs[0], j, layouts.grad_key.row, ok, dk, tile.dim, tile.dim_block)
    store_rows(outputs[1], j, layouts.grad_value.row, ok, dv, tile.value_dim, tile.value_block)


@triton.jit
def _outputs_of_keys(grads, layouts, sequence, b, g):
    """Return pointers to dK and dV of the first key of head g of sequence b."""
    layout = layouts.grad_key
    dk = grads.key + b * layout.batch + g * layout.head + sequence.first_key * layout.row
    layout = layouts.grad_value
    dv = grads.value + b * layout.batch + g * layout.head + sequence.first_key * layout.row
    return dk, dv


# -------------------------------------------------------------------------------------------- tiny


@triton.jit
def tiny_backward_kernel(
    inputs,
    saved,
    grads,
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
    """One program computes every so many of the `pairs` (batch, head): all rows of DQ, DK and DV,
    from at most BN keys and `how.row_tiles` BM queries.

    Its copies run one pair ahead.
    """
    call = prepare_call(optional, strides, sizes, band, factors, has)
    tensors = _Tensors(inputs, saved, grads)
    j = tl.arange(0, tile.columns)
    for n in tl.range(tl.program_id(0), pairs, tl.num_programs(0), num_stages=how.stages):
        batch_head = tl.program_id(0) * 0 + n  # a tensor in the interpreter, too
        b = (batch_head // sizes.heads).to(tl.int64)
        h = (batch_head % sizes.heads).to(tl.int64)
        sequence = locate_sequence(optional, sizes, b, has)
        queries = _locate_queries(tensors, layouts, call, sequence, batch_head, tile, has)
        keys = key_row(queries.head, j, j < sequence.length, tile, has, True)
        bases = locate_keys(inputs, strides, sequence, b, h)
        own = _load_keys(bases, strides, 0, keys, tile, has)
        dk = tl.zeros([tile.columns, tile.dim_block], tile.acc)
        dv = tl.zeros([tile.columns, tile.value_block], tile.acc)
        for number in tl.static_range(how.row_tiles):
            i0 = number * tile.rows
            i = i0 + tl.arange(0, tile.rows)
            ok = i < sizes.queries
            r = tl.minimum(i, sizes.queries - 1)
            q = load_rows(
                queries.query, r, strides.query_row, None, tile.dim, tile.dim_block, False
            )
            row = layouts.grad_output.row
            do = load_rows(queries.grad_output, r, row, ok, tile.value_dim, tile.value_block, True)
            peak, offset, delta = _statistics(saved, layouts, queries, do, i, tile, has, how)
            rows = _Rows(q, do, i0, i, r, peak, offset, delta)
            dk, dv, ds = _add_tile((dk, dv), own, rows, queries.head, tile, has)
            dq = _query_gradient(ds, own.k, tile, how) * factors.scale
            row = layouts.grad_query.row
            store_rows(queries.grad_query, r, row, ok, dq, tile.dim, tile.dim_block)
        outputs = _outputs_of_keys(grads, layouts, sequence, b, h)
        _store_keys((dk, dv), outputs, layouts, j, sizes.keys, factors, tile, has)


# ----------------------------------------------------------------------------------------- scratch


@triton.jit
def _prepare(
    saved, scratch, layouts, queries, tile: tl.constexpr, has: tl.constexpr, how: tl.constexpr
):
    """Write offset and delta of all queries of a head."""
    count = queries.head.sequence.queries
    row = layouts.grad_output.row
    for i0 in tl.range(0, count, tile.rows, num_stages=3):
        i = i0 + tl.arange(0, tile.rows)
        ok = i < count
        do = load_rows(queries.grad_output, i, row, ok, tile.value_dim, tile.value_block, True)
        _, offset, delta = _statistics(saved, layouts, queries, do, i, tile, has, how)
        if not has.separate_max:
            tl.store(scratch.offset + queries.row + i, offset, mask=ok)
        tl.store(scratch.delta + queries.row + i, delta, mask=ok)


@triton.jit
def _prepared(saved, scratch, queries, i, r, ok, has: tl.constexpr):
    """Return (peak, offset, delta) of the queries i, [BM] each, as `_statistics` does."""
    delta = tl.load(scratch.delta + queries.row + i, mask=ok, other=0.0)
    if has.separate_max:
        pair = saved.statistics + (queries.row + r) * 2
        return tl.load(pair), tl.load(pair + 1), delta
    else:
        return 0.0, tl.load(scratch.offset + queries.row + r), delta


@triton.jit
def _walk_queries(
    state, own, queries, pointers, layouts, tile: tl.constexpr, has: tl.constexpr, how: tl.constexpr
):
    """Add the queries of a head to dK and dV of the keys `own`, and these keys to dQ; `pointers`
    are those of the kernel, with the sums of this head. Store what is complete of dQ.
    """
    saved, scratch = pointers
    dk, dv = state
    head = queries.head
    sequence, band, n0 = head.sequence, head.call.band, own.start
    last_key = tl.maximum(sequence.length, 1) - 1
    lo = 0
    if has.right:  # the first tile of keys is that of queries that see no key, too
        lo = tl.maximum(n0 - sequence.shift - band.right, 0) // tile.rows * tile.rows
        lo = tl.where(n0 == 0, 0, lo)
    hi = tl.where(n0 <= last_key, sequence.queries, lo)
    for i0 in tl.range(lo, hi, tile.rows, num_stages=how.stages):
        i0 = tl.multiple_of(i0, tile.rows)
        i = i0 + tl.arange(0, tile.rows)
        ok = i < sequence.queries
        r = tl.minimum(i, sequence.queries - 1)
        row = head.call.strides.query_row
        q = load_rows(queries.query, r, row, None, tile.dim, tile.dim_block, False)
        row = layouts.grad_output.row
        do = load_rows(queries.grad_output, r, row, ok, tile.value_dim, tile.value_block, True)
        if how.one_tile:
            peak, offset, delta = _statistics(saved, layouts, queries, do, i, tile, has, how)
        else:
            peak, offset, delta = _prepared(saved, scratch, queries, i, r, ok, has)
        rows = _Rows(q, do, i0, i, r, peak, offset, delta)
        dk, dv, ds = _add_tile((dk, dv), own, rows, head, tile, has)
        is_last = ok
        if how.one_tile:
            dq = _query_gradient(ds, own.k, tile, how)
        else:
            d = tl.arange(0, tile.dim_block)
            place = scratch.sums + (i[:, None] * tile.dim_block + d[None, :])
            before = tl.load(place, mask=ok[:, None] & (n0 > 0), other=0.0)
            end = last_key  # the last key that a query of this tile may see
            if has.right:
                seen = i0 + tile.rows - 1 + sequence.shift + band.right
                end = tl.minimum(end, tl.maximum(seen, 0))
            dq = _query_gradient(ds, own.k, tile, how) + before
            is_last = ok & (n0 + tile.columns > end)
            tl.store(place, dq, mask=ok[:, None] & (n0 + tile.columns <= end))
        dq = dq * head.call.factors.scale
        row = layouts.grad_query.row
        store_rows(queries.grad_query, r, row, is_last, dq, tile.dim, tile.dim_block)
    return dk, dv


@triton.jit
def scratch_backward_kernel(
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
    tensors = _Tensors(inputs, saved, grads)
    groups = sizes.heads // sizes.group
    head_sums = sizes.queries * tile.dim_block
    own_sums = scratch.sums + tl.program_id(0).to(tl.int64) * sizes.group * head_sums
    for n in tl.range(tl.program_id(0), pairs, tl.num_programs(0), num_stages=1):
        pair = tl.program_id(0) * 0 + n  # a tensor in the interpreter, too
        b = (pair // groups).to(tl.int64)
        g = (pair % groups).to(tl.int64)
        sequence = locate_sequence(optional, sizes, b, has)
        if not how.one_tile:
            for member in tl.range(0, sizes.group):
                h = pair * sizes.group + member
                queries = _locate_queries(tensors, layouts, call, sequence, h, tile, has)
                _prepare(saved, scratch, layouts, queries, tile, has, how)
            tl.debug_barrier()
        bases = locate_keys(inputs, strides, sequence, b, g)
        outputs = _outputs_of_keys(grads, layouts, sequence, b, g)
        count = sequence.length if has.packed else sizes.keys
        for n0 in tl.range(0, tl.maximum(count, 1), tile.columns, num_stages=1):
            n0 = tl.multiple_of(n0, tile.columns)
            j = n0 + tl.arange(0, tile.columns)
            dk = tl.zeros([tile.columns, tile.dim_block], tile.acc)
            dv = tl.zeros([tile.columns, tile.value_block], tile.acc)
            for member in tl.range(0, sizes.group):
                h = pair * sizes.group + member
                queries = _locate_queries(tensors, layouts, call, sequence, h, tile, has)
                keys = key_row(queries.head, j, j < sequence.length, tile, has, True)
                own = _load_keys(bases, strides, n0, keys, tile, has)
                sums = own_sums + member * head_sums
                pointers = saved, Scratch(scratch.offset, scratch.delta, sums)
                dk, dv = _walk_queries((dk, dv), own, queries, pointers, layouts, tile, has, how)
            _store_keys((dk, dv), outputs, layouts, j, count, factors, tile, has)
            if not how.one_tile:
                tl.debug_barrier()


# ---------------------------------------------------------------------- which calls, and the launch

SEPARATE = "separate kernels"  # delta, dK and dV, dQ
MOST = {"tiny": 128, "scratch": 512}  # queries and keys
REFUSED = {"alibi": "ALiBi", "softcap": "a softcap", "left": "a window", "shard": "a shard"}


def tiles(kernel: str, plan: Any) -> Tiles | None:
    """Return the tiles of a kernel for a call, or None if its sizes are not for this kernel."""
    longest = max(plan.q_length, plan.k_length)
    if plan.arch == "interpreter":
        BM, BN = (max(16, next_power_of_2(n)) for n in (plan.q_length, plan.k_length))
        rows: tuple[Tiles, ...] = (Tiles(min(64, BM), min(128, BN), 4, 1),) * 6
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
        how = How(stages, row_tiles, one_tile, transposed, has_dlse)
        self.sums = () if one_tile else (programs, group, plan.q_length, plan.tile.dim_block)
        groups: dict[str, Any] = dict(inputs=BackwardInputs, saved=Saved, grads=Gradients)
        groups |= dict(scratch=Scratch, optional=OptionalInputs)
        tile = plan.tile._replace(rows=BM, columns=BN, recompute_masked=False)
        own = dict(tile=constants(tile), has=constants(plan.has), how=constants(how))
        own |= plan.arguments | dict(layouts=layouts, pairs=pairs)
        self.tiny = kernel == "tiny"
        function: Any = tiny_backward_kernel if self.tiny else scratch_backward_kernel
        self.launch = Launch(function, (programs,), own, warps, stages, groups)

    def __call__(self, inputs, saved, grads, optional) -> None:
        """Launch the kernel; the arguments are those of the kernel, as plain tuples."""
        if self.tiny:
            self.launch(inputs, saved, grads, optional)
            return
        lse = saved[1]
        scratch = (lse.new_empty(0),) * 3
        if self.sums:
            scratch = torch.empty_like(lse), torch.empty_like(lse), lse.new_empty(self.sums)
        self.launch(inputs, saved, grads, scratch, optional)
