"""Shared parts of the attention backward for Hopper GPUs (sm_90), in Gluon, with kernels similar to
the forward in forward.py. `fastformer tune` measures them for the calls that they support.

    dQ           A program owns 128 queries, and each of its two groups of four warps owns 64 of
                 these. One warp copies keys and values by TMA into a ring of slots. A group issues
                 S = q k^T and dP = do v^T, computes P while dP is being computed, and adds dS k.
    dK and dV    A program owns 128 keys, and each group owns 64 of these. The ring holds queries
                 and gradients of the output, for all heads that share the keys, and one more warp
                 loads the statistics of the queries. A group computes the transposes S^T and dP^T,
                 so that P^T and dS^T are register operands of the next products. dK and dV stay in
                 registers until the end: no addition is atomic, and the bits do not change between
                 runs.
    mask         With a mask [keys], one warp of dQ turns the mask into bounds of the scores, and
                 sets masked keys and values to zero, because 0 * NaN is NaN. A row of dK or dV
                 depends only on its own key: the rows of masked keys are set to zero at the end.
                 With the bounds of bounds.py, masked tiles are skipped, and a second loop computes
                 the completely unmasked tiles without reading the mask. With a block mask, the
                 first loop computes the partly seen tiles of a list, whose bits are copied, and the
                 second loop computes the whole tiles.

docs/kernels.md draws which warps wait for which. benchmarks/proof/gluon_simulator.py runs the
kernels on a CPU and finds accesses that no barrier orders.

Source: Shah et al. 2024, "FlashAttention-3", section 3; Dao 2023, "FlashAttention-2", section 3.1.2
(the backward).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...common import LOG2E, dropout_words
from ..bounds import has_list, visited_tiles
from ..lists import COLUMNS
from ..scores import Features, first_row, locate_head
from .parts import (
    accumulator,
    copy_in,
    copy_out,
    has_terms,
    lanes,
    like,
    seen_by_bits,
    spans_of_lists,
    tile_of_lists,
)


class RingSpan(NamedTuple):
    """The tiles that a program computes, lo <= n < hi, where n is the first key of a tile, or its
    first query for dK and dV. No edge cuts a tile of begin <= n < end.

    Two loops compute the tiles: PART 0 those that an edge may cut, PART 1 the others. Or one loop
    computes all of them, PART 2.

    With a block mask n is the number of a tile, see `tile_of_lists`, times the size of a tile. With
    the bounds of a mask n counts the entries of its lists, times that size.
    """

    lo: Any
    begin: Any
    end: Any
    hi: Any
    lists: Any = 0  # `Lists` of a block mask, or a pointer to those of bounds
    run: Any = 0  # where its run begins


class Work(NamedTuple):
    """What a program computes."""

    start: Any  # its first query, or its first key
    span: Any  # `RingSpan`
    batch: Any
    head: Any  # for dK and dV the first one that shares the keys
    left: Any  # query i sees no key before i + left, and none past i + right
    right: Any
    offsets: Any  # pointer to the first row of the first head; see `_Statistics` in backward.py
    deltas: Any
    sequence: Any
    call: Any


class Statistics(NamedTuple):
    """`_Statistics` of backward.py, in shapes that broadcast against a tile of scores."""

    peak: Any
    offset: Any
    delta: Any


class Tensors(NamedTuple):
    """TMA descriptors. Those that a program makes are [rows, D] of one head, or, for the queries
    and the gradients of the output in dK and dV, [heads, rows, D] of the heads that share the keys.
    Those that the host makes are [B, H, rows, D].
    """

    query: Any
    grad_output: Any
    key: Any
    value: Any
    first: Any  # the gradient of the queries, or of the keys
    second: Any  # the gradient of the values
    mask: Any  # of queries and keys, [rows, keys], or [heads, rows, keys]
    bias: Any  # the same


class Buffers(NamedTuple):
    """Shared memory. The tiles that a program owns have two halves, one for each consumer, which
    stores its gradient there in the end. The other tiles are in slots.
    """

    query: Any  # [2, BM / 2, BD], or [slots, BM, BD]
    grad_output: Any  # [2, BM / 2, BDV], or [slots, BM, BDV]
    key: Any  # [slots, BN, BD], or [2, BN / 2, BD]
    value: Any  # [slots, BN, BDV], or [2, BN / 2, BDV]
    first: Any  # dQ with a mask: bounds [slots, BN]. dK and dV: the offsets of rows [slots, BM]
    second: Any  # dK and dV: delta [slots, BM]
    peak: Any  # dK and dV, if P has two statistics: the maximum [slots, BM]
    mask: Any  # of queries and keys, [slots * 2, BM / 2, BN], or [slots * 2, 1, BM, BN / 2]
    bias: Any  # the same
    bits: Any = 0  # of a block mask, [slots * 4, 64]: word w of a query, for 32 keys


class Barriers(NamedTuple):
    """mbarriers; each ends a phase after a number of arrivals, given here. A `ready` says that a
    slot is full, a `free` that its readers are done with it. `first` and `second` are the keys and
    the values that dQ reads, or the queries and the gradients of the output that dK and dV read.
    """

    own_ready: Any  # 1: the copies of what the program owns
    first_ready: Any  # 1 for each slot: the copies
    # 1: the copies, those of mask and bias of queries and keys among them; 2 with a block mask: the
    # second one once its bits are there
    second_ready: Any
    free: Any  # 2: the consumers, which have read all of these
    rows_ready: Any  # dK and dV, 1: the statistics of rows
    rows_free: Any  # dK and dV, 2: the consumers
    first_masked: Any  # dQ, 1: the mask, once it has stored the bounds and set keys to zero
    second_masked: Any  # dQ, 1: the mask, once it has set values to zero


@gluon.constexpr_function
def one_loop(tile, has):
    """Return 1 if one loop computes all tiles, 0 if edge tiles have a separate loop. With dropout
    and D = 128, two loops would need too many registers.
    """
    return int(has.left or (has.dropout and tile.dim_block > 64))


@gluon.constexpr_function
def one_copy_loop(tile, has):
    """Return the same for a loop that copies: it needs two loops only with bounds."""
    return int(not has.bounds or has.left or (has.dropout and tile.dim_block > 64))


@gluon.constexpr_function
def masks_edges(PART, has):
    """Return whether a loop over all tiles reads the mask [queries, keys] only at edges."""
    return PART == 2 and has.bounds == 1 and has.mask == 2 and has.bias == 0


@gluon.constexpr_function
def read_by(PART, has):
    """Return the features that a loop reads: not the mask inside the run. PART: see `RingSpan`.
    (This repeats the rules of `reads_no_mask` and `inside_run`, because Triton 3.6 loses the field
    names of a tuple that one constexpr function passes to another.)
    """
    bounded = has.bounds == 2 or (has.bounds == 1 and has.bias == 0)
    apart = PART == 2 and has.bounds == 1 and has.mask == 2
    if bounded and (PART == 1 or apart):
        known = {name: getattr(has, name) for name in Features._fields}
        return Features(**{**known, "mask": 0, "bias": 0, "bounds": 0})
    return has


@gluon.jit
def listed_span(
    span, lists, call, own, tile: gl.constexpr, has: gl.constexpr, OWNS_KEYS: gl.constexpr
):
    """Return the `RingSpan` of a block mask, given that without one."""
    width: gl.constexpr = tile.rows if OWNS_KEYS else tile.columns
    tiles = span.lo, span.begin, span.end, span.hi
    lists, parts, run, whole = spans_of_lists(tiles, lists, call, own, tile, has, OWNS_KEYS)
    end = (parts + whole) * width
    return RingSpan(0, parts * width, end, end, lists, run)


@gluon.jit
def is_edge(n, span):
    """Return whether an edge may cut a tile."""
    return (n < span.begin) | (n >= span.end)


@gluon.jit
def within_bounds(
    span, bounds, call, width: gl.constexpr, has: gl.constexpr, OWNS_KEYS: gl.constexpr
):
    """Return the part of a `RingSpan` within the bounds of a mask, without its holes. If
    `reads_no_mask`, the mask cuts no tile from `begin` to `end`, either.
    """
    if has.bounds:
        tiles = span.lo, span.begin, span.end, span.hi
        edge, run = visited_tiles(tiles, bounds, call, width, has, OWNS_KEYS, lanes())
        lo, begin, gap = edge.lo * width, edge.jump * width, edge.gap * width
        hi = edge.hi * width + gap
        return RingSpan(lo, begin, begin + gap, hi, call.optional.starts, run.lo)
    else:
        return span


@gluon.jit
def loop_of(span, middle, LOOP: gl.constexpr, has: gl.constexpr):
    """Return (begin, end) of a loop: LOOP 0 is the first of two loops, 1 the second, and 2 the only
    one. Without bounds the second begins at `middle`. With bounds it computes the run, and the
    first one jumps over it, see `tile_at`.
    """
    SPLIT: gl.constexpr = has.bounds or has.lists
    if SPLIT and LOOP == 0:
        return span.lo, span.hi - (span.end - span.begin)
    elif SPLIT and LOOP == 1:
        return span.begin, span.end
    else:
        return middle if LOOP == 1 else span.lo, middle if LOOP == 0 else span.hi


@gluon.jit
def tile_at(
    n,
    span,
    WIDTH: gl.constexpr,
    LOOP: gl.constexpr,
    has: gl.constexpr,
    SIZE: gl.constexpr = COLUMNS,
):
    """Return the first key, or query, of the tile at n of a loop, which may jump over the run. It
    is a multiple of the width of a tile. SIZE is that of the tiles of a block mask.
    """
    if has.lists:
        return slot_at(n, span, WIDTH, SIZE, LOOP != 1, has)[0]
    elif has.bounds and LOOP == 1:
        return gl.multiple_of(span.run + (n - span.begin), WIDTH)
    elif has.bounds:
        if LOOP == 0:
            n = gl.where(n < span.begin, n, n + (span.end - span.begin))
        if has_list(has, SIZE != COLUMNS):
            n = gl.load(span.lists + n // WIDTH).to(gl.int32) * WIDTH
        return gl.multiple_of(n, WIDTH)
    else:
        return n


@gluon.jit
def slot_at(
    n, span, WIDTH: gl.constexpr, SIZE: gl.constexpr, EDGE: gl.constexpr, has: gl.constexpr
):
    """Return what `tile_of_lists` does of the tile at n of a loop."""
    t, parts = n // WIDTH, span.begin // WIDTH
    n, slot = tile_of_lists(span.lists, t, parts, span.run, WIDTH, SIZE, EDGE, has)
    return gl.multiple_of(n, WIDTH), slot


@gluon.jit
def kept_by_dropout(
    head, i0, n0, BM: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr, has: gl.constexpr
):
    """Return which elements [BM, BN] of the tile at query i0 and key n0 dropout keeps: the bits of
    `kept` of scores.py. LAYOUT is that of the counters.
    """
    i = i0 // 2 + gl.arange(0, BM // 2, layout=gl.SliceLayout(1, LAYOUT))
    j = n0 // 2 + gl.arange(0, BN // 2, layout=gl.SliceLayout(0, LAYOUT))
    i, j = gl.expand_dims(i, 1).to(gl.uint32), gl.expand_dims(j, 0).to(gl.uint32)
    words = dropout_words(head.draws, i, j, BM, BN)
    return words >= head.call.factors.threshold.to(gl.uint32, bitcast=True)


@gluon.jit
def at_most(columns, bound):
    """Return which columns [N] of a tile of scores are at most the bound [rows] of their row.

    Only bits 1 and 2 of a column depend on the lane of a thread. If they are compared separately,
    the other bits are constants in the code; otherwise each column takes a register.
    """
    of_lane, others = columns & 6, columns & (columns.shape[0] - 7)
    return gl.expand_dims(others, 0) <= gl.expand_dims(bound, 1) - gl.expand_dims(of_lane, 0)


@gluon.jit
def _distance(rows, columns):
    """Return |rows - columns| as float32, for rows [rows] and columns [N]. See `at_most`."""
    of_lane, others = columns & 6, columns & (columns.shape[0] - 7)
    near = (gl.expand_dims(rows, 1) - gl.expand_dims(of_lane, 0)).to(gl.float32)
    return gl.abs(near - gl.expand_dims(others, 0).to(gl.float32))


@gluon.jit
def _factor(call, has: gl.constexpr):
    """Return the factor that turns q . k, or its tanh, into scores in base 2."""
    if has.softcap:
        return call.factors.softcap * LOG2E
    else:
        return call.scale


@gluon.jit
def expect_terms(
    ready, edge, BYTES: gl.constexpr, TERMS: gl.constexpr, PART: gl.constexpr, has: gl.constexpr
):
    """Let a barrier expect BYTES, and the bytes of mask and bias if `copy_terms` copies these."""
    if masks_edges(PART, has):
        mbarrier.expect(ready, BYTES + TERMS, pred=edge)
        mbarrier.expect(ready, BYTES, pred=edge == 0)
    else:
        mbarrier.expect(ready, BYTES + TERMS * has_terms(read_by(PART, has)))


@gluon.jit
def copy_terms(tensors, buffers, part, places, ready, edge, PART: gl.constexpr, has: gl.constexpr):
    """Copy a tile of the mask and the bias [queries, keys], if the loop reads it. `places` are the
    first elements of both.
    """
    mask_at, bias_at = places
    if masks_edges(PART, has):
        copy_in(tensors.mask, mask_at, ready, buffers.mask.index(part), pred=edge)
    elif read_by(PART, has).mask == 2:
        copy_in(tensors.mask, mask_at, ready, buffers.mask.index(part))
    if read_by(PART, has).bias == 2:
        copy_in(tensors.bias, bias_at, ready, buffers.bias.index(part))


@gluon.jit
def load_terms(
    s, bound, buffers, part, LAYOUT: gl.constexpr, TRANSPOSED: gl.constexpr, has: gl.constexpr
):
    """Return the bias in base 2 and the mask of a tile of scores s. `bound` is a bias [keys]. What
    the call lacks is not read.
    """
    bias = bound
    seen = s
    if has.bias == 2:
        bias = _tile_of(buffers.bias, part, s, TRANSPOSED).load(LAYOUT).to(gl.float32) * LOG2E
    if has.mask == 2:
        seen = _tile_of(buffers.mask, part, s, TRANSPOSED).load(LAYOUT)
    if has_terms(has):
        fence_async_shared()  # the next copy waits for these loads
    return bias, seen


@gluon.jit
def masked(
    s, n, span, buffers, part, TRANSPOSED: gl.constexpr, PART: gl.constexpr, has: gl.constexpr
):
    """Return the scores of the tile at n, -inf where the mask hides a key."""
    if has.lists and PART == 0:
        s = _masked_by_bits(s, buffers, part, TRANSPOSED)
    elif has.lists and PART == 2:
        if is_edge(n, span):
            s = _masked_by_bits(s, buffers, part, TRANSPOSED)
    elif masks_edges(PART, has):
        if is_edge(n, span):
            _, seen = load_terms(s, s, buffers, part, accumulator(s.shape[1]), TRANSPOSED, has)
            s = gl.where(seen != 0, s, float("-inf"))
    return s


@gluon.jit
def _masked_by_bits(s, buffers, part, TRANSPOSED: gl.constexpr):
    """Return the scores of a tile, -inf where its bits hide a key."""
    S: gl.constexpr = accumulator(s.shape[1])
    j = gl.arange(0, 64, layout=gl.SliceLayout(1 if TRANSPOSED else 0, S))
    return gl.where(seen_by_bits(buffers.bits, part * 2, j, S, TRANSPOSED), s, float("-inf"))


@gluon.jit
def _tile_of(tiles, part, s, TRANSPOSED: gl.constexpr):
    """Return a tile of mask or bias in the layout of the scores s."""
    tile = tiles.index(part)
    if TRANSPOSED:
        tile = tile.reshape([s.shape[1], s.shape[0]]).permute((1, 0))
    return tile


@gluon.jit
def terms(s, rows, columns, slope, given, call, has: gl.constexpr):
    """Apply softcap, bias, ALiBi and mask to s = q . k, where the distance is |rows - columns|.
    Return the scores, in base 2 with a bias or ALiBi, and the derivative of the softcap. `given` is
    what `load_terms` returns.
    """
    bias, seen = given
    steepness = s
    if has.softcap:
        s = 1.0 - 2.0 / (gl.exp2(s * call.scale) + 1.0)
        steepness = 1.0 - s * s
    if has.bias > 0:
        s = gl.fma(s, like(s, _factor(call, has)), gl.broadcast(bias, s)[0])
    elif has.separate_max:
        s = s * _factor(call, has)
    if has.alibi:
        s = gl.fma(_distance(rows, columns), like(s, -slope), s)
    if has.mask == 2:
        s = gl.where(seen != 0, s, float("-inf"))
    return s, steepness


@gluon.jit
def probabilities(s, statistics, call, has: gl.constexpr):
    """Return P, given the scores of `terms`, which are -inf for a hidden key."""
    if has.separate_max:
        return gl.exp2((s - statistics.peak) + statistics.offset)
    else:
        offset = gl.broadcast(statistics.offset, s)[0]
        return gl.exp2(gl.fma(s, like(s, _factor(call, has)), offset))


@gluon.jit
def score_gradient(p, dp, delta, inv_keep, has: gl.constexpr):
    """Return dS = P (dP - delta), where dP is zero if dropout removed P."""
    if has.dropout:
        return p * gl.fma(dp, like(dp, inv_keep), gl.broadcast(-delta, dp)[0])
    else:
        return p * (dp - delta)


@gluon.jit
def head_of(work, member, tile: gl.constexpr, has: gl.constexpr):
    """Return the `Head` number `member` of those that share the keys of a program."""
    h = work.head + member
    batch_head = work.batch * work.call.sizes.heads + h
    return locate_head(work.call, work.sequence, batch_head, work.batch, h, 0, tile, has)


@gluon.jit
def work_of(start, span, place, statistics, band, call, sequence, has: gl.constexpr):
    """Return the `Work` of a program. `place` is its sequence and its first head; `statistics` are
    pointers to the statistics of all rows.
    """
    b, h = place
    OFFSET, DELTA = statistics
    row = first_row(b * call.sizes.heads + h, h, sequence, call.sizes, has)
    offsets = OFFSET + (row * 2 if has.separate_max else row)
    left, right = sequence.shift - band.left, sequence.shift + band.right
    return Work(start, span, b, h, left, right, offsets, DELTA + row, sequence, call)


@gluon.jit
def store_gradient(x, at, own, target):
    """Store a gradient [rows, D] through shared memory. `at` are the coordinates of its tile."""
    own.store(x.to(target.dtype))
    fence_async_shared()  # makes the store visible to the copy
    copy_out(target, at, own)
