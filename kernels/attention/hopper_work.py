"""What a program of the forward for Hopper works on: the tiles of keys that it walks, its TMA
descriptors, its shared memory and its barriers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common import LOG2E
from .bounds import Bounds, reads_no_mask, split_at_run
from .hopper_parts import barriers, buffer, has_bounds, has_terms, rows_of, slot_of
from .scores import keys_of_rows, locate_keys, unmasked_tiles

ROWS = gl.constexpr(64)  # queries of a consumer: the rows of a wgmma


class Walk(NamedTuple):
    """The tiles of keys that a program walks: first the edge tiles, which the length, the band or a
    mask may cut, then the others. The first key of an edge tile t is lo + t BN, and if that is not
    below `jump`, it lies `gap` further. That of another one is begin + t BN.
    """

    tiles: Any
    edges: Any  # of these, at least one
    lo: Any
    jump: Any
    gap: Any
    begin: Any


class Work(NamedTuple):
    """What a program computes."""

    start: Any  # its first query
    walk: Any
    last: Any  # the last key of the sequence
    left: Any  # query i sees no key before i + left
    right: Any  # and none past i + right
    shift: Any  # query i stands at key i + shift
    slope: Any  # of ALiBi, in base 2
    scale: Any  # of q . k, in base 2
    factor: Any  # of the scores, in base 2: the scale, or the softcap
    draws: Any  # `DropoutStream`
    draw_row: Any  # where query 0 and key 0 are in what dropout draws
    draw_column: Any
    factors: Any


class Rows(NamedTuple):
    """What a head has of each query."""

    lse: Any
    statistics: Any
    first: Any  # the row of its query 0 in both
    queries: Any
    sink: Any


class Tensors(NamedTuple):
    """TMA descriptors of the rows of a head, [rows, D], or of its scores, [rows, keys]."""

    query: Any
    key: Any
    value: Any
    output: Any
    mask: Any
    bias: Any


class Buffers(NamedTuple):
    """Shared memory."""

    query: Any  # [consumers, 64, BD]
    key: Any  # [slots, BN, BD]
    value: Any  # [slots, BN, BDV]
    output: Any  # [consumers, 64, BDV]
    # [slots, BN], with a mask or a bias of keys: the bias, or what no score of the key is above;
    # -inf for a masked key.
    bounds: Any
    mask: Any  # [slots * consumers, 64, BN], of queries and keys
    bias: Any  # the same


class Barriers(NamedTuple):
    """mbarriers; each ends a phase after a number of arrivals, given here. A `ready` says that a
    slot is full, a `free` that its readers are done with it. All: one for each consumer.
    """

    query_ready: Any  # 1: the copies
    key_ready: Any  # 1 for each slot: the copies
    key_free: Any  # all
    value_ready: Any  # 1: the copies
    value_free: Any  # all
    bounds_ready: Any  # 1: the mask
    bounds_free: Any  # all
    value_masked: Any  # 1: the mask, once the values of masked keys are zero
    term_ready: Any  # 1: the copies, once mask and bias of queries and keys are there
    term_free: Any  # all
    turn: Any  # 1 for each consumer: the one before it has issued its products


class Place(NamedTuple):
    """Where a tile of scores is: its first query and key, and slot and phase of two rings."""

    query: Any
    key: Any
    slot: Any  # of the bounds
    phase: Any
    term_slot: Any  # of mask and bias of queries and keys
    term_phase: Any
    part: Any  # which tile of that ring


@gluon.jit
def walk_of(i0, sequence, band, bounds, tile: gl.constexpr, has: gl.constexpr):
    """Return the `Walk` of the queries from i0 on. If there is no edge tile, the first of the
    others is treated as one. If no tile is seen, one is walked that is past the end: it is zero,
    and never NaN.
    """
    BN: gl.constexpr = tile.columns
    length = sequence.length
    lo, hi = keys_of_rows(i0, i0 + tile.rows, length, sequence.shift, band, tile, has)
    begin, end = unmasked_tiles(i0, sequence, band, tile, has)
    edge, other = split_at_run((lo, begin, end, hi), bounds, BN, has)
    lo, hi, jump, gap = edge
    begin, end, _, _ = other
    edges, others = gl.cdiv(hi - lo, BN), gl.cdiv(end - begin, BN)
    if not jumps(has):
        lo += gap
    past = gl.cdiv(length, BN) * BN + BN
    none = edges == 0
    lo = gl.where(none, gl.where(others > 0, begin, past), lo)
    jump = gl.where(none, lo + BN, jump)
    begin = gl.where(none, begin, begin - edges * BN)
    tiles = gl.maximum(edges + others, 1)
    return Walk(tiles, gl.maximum(edges, 1), lo, jump, gap, begin)


@gluon.jit
def work_of(i0, head, bounds, tile: gl.constexpr, has: gl.constexpr):
    """Return what a program computes for the queries of a head from i0 on."""
    sequence, call = head.sequence, head.call
    draw_row = 0
    draw_column = 0
    if has.shard:
        draw_row = call.sizes.shard.query
        draw_column = call.sizes.shard.key
    if not has.bounds:
        bounds = Bounds(0, 0, 0, sequence.length)
    factor = call.scale
    if has.softcap:
        factor = call.factors.softcap * LOG2E
    return Work(
        start=i0,
        walk=walk_of(i0, sequence, call.band, bounds, tile, has),
        last=sequence.length - 1,
        left=sequence.shift - call.band.left,
        right=sequence.shift + call.band.right,
        shift=sequence.shift,
        slope=head.slope,
        scale=call.scale,
        factor=factor,
        draws=head.draws,
        draw_row=draw_row,
        draw_column=draw_column,
        factors=call.factors,
    )


@gluon.constexpr_function
def jumps(has):
    """Return whether there may be edge tiles before the others."""
    return has.left or has.bounds


@gluon.jit
def key_of_tile(walk, t, tile: gl.constexpr, has: gl.constexpr, EDGE: gl.constexpr):
    """Return the first key of the t-th tile that is walked."""
    if EDGE:
        n0 = walk.lo + t * tile.columns
        if jumps(has):
            n0 = gl.where(n0 < walk.jump, n0, n0 + walk.gap)
        return n0
    else:
        return walk.begin + t * tile.columns


@gluon.jit
def key_of_any_tile(walk, t, tile: gl.constexpr, has: gl.constexpr):
    """Return the first key of the t-th tile, whether it is an edge tile or not."""
    other = key_of_tile(walk, t, tile, has, False)
    return gl.where(t < walk.edges, key_of_tile(walk, t, tile, has, True), other)


@gluon.jit
def place_of(i0, n0, t, which, how: gl.constexpr):
    """Return where the tile of scores at query i0 and key n0 is, the t-th of a consumer."""
    slot, phase = slot_of(t, how.slots)
    term, term_phase = slot_of(t, how.term_slots)
    return Place(i0, n0, slot, phase, term, term_phase, term * how.consumers + which)


@gluon.jit
def masked_tiles(walk, has: gl.constexpr):
    """Return how many tiles, from the first one on, are computed with the mask."""
    if reads_no_mask(has):
        return walk.edges
    else:
        return walk.tiles


@gluon.jit
def make_shared(tensors, tile: gl.constexpr, has: gl.constexpr, how: gl.constexpr):
    """Make the shared memory of a program, and its barriers."""
    ALL: gl.constexpr = how.consumers
    SLOTS: gl.constexpr = how.slots
    q_tiles = buffer(tensors.query, ALL)
    o_tiles = q_tiles  # the last product with the queries is over when the output is stored
    if tile.value_block != tile.dim_block:
        o_tiles = buffer(tensors.output, ALL)
    k_tiles = buffer(tensors.key, SLOTS)
    v_tiles = buffer(tensors.value, SLOTS)
    bounds = k_tiles
    mask = k_tiles
    bias = k_tiles
    if has_bounds(has):
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        bounds = gl.allocate_shared_memory(gl.float32, [SLOTS, tile.columns], FLAT)
    if has.mask == 2:
        mask = buffer(tensors.mask, how.term_slots * ALL)
    if has.bias == 2:
        bias = buffer(tensors.bias, how.term_slots * ALL)
    buffers = Buffers(q_tiles, k_tiles, v_tiles, o_tiles, bounds, mask, bias)
    key_ready = barriers(SLOTS, 1)
    bars = Barriers(
        query_ready=barriers(1, 1).index(0),
        key_ready=key_ready,
        key_free=barriers(SLOTS, ALL),
        value_ready=barriers(SLOTS, 1),
        value_free=barriers(SLOTS, ALL),
        bounds_ready=barriers(SLOTS, 1) if has_bounds(has) else key_ready,
        bounds_free=barriers(SLOTS, ALL) if has_bounds(has) else key_ready,
        value_masked=barriers(SLOTS, 1) if has_bounds(has) else key_ready,
        term_ready=barriers(how.term_slots, 1) if has_terms(has) else key_ready,
        term_free=barriers(how.term_slots, ALL) if has_terms(has) else key_ready,
        turn=barriers(ALL, 1),
    )
    return buffers, bars


@gluon.jit
def make_tensors(inputs, output, head, place, strides, tile: gl.constexpr, has: gl.constexpr):
    """Make the TMA descriptors of a head. `output` is a pointer to its first row and the stride of
    rows, `place` is (b, h, g).
    """
    BN: gl.constexpr = tile.columns
    BD: gl.constexpr = tile.dim_block
    BDV: gl.constexpr = tile.value_block
    sequence = head.sequence
    b, h, g = place
    o_base, o_stride = output
    q_base = inputs.query + b * strides.query_batch + h * strides.query_head
    q_base += sequence.first_query * strides.query_row
    k_base, v_base = locate_keys(inputs, strides, sequence, b, g)
    # A descriptor has at least one row.
    queries, keys = gl.maximum(sequence.queries, 1), gl.maximum(sequence.length, 1)
    key = rows_of(k_base, keys, strides.key_row, BN, tile.dim, BD)
    mask = key
    bias = key
    if has.mask == 2:
        mask = rows_of(head.mask, queries, strides.mask_row, ROWS, keys, BN)
    if has.bias == 2:
        bias = rows_of(head.bias, queries, strides.bias_row, ROWS, keys, BN)
    return Tensors(
        rows_of(q_base, queries, strides.query_row, ROWS, tile.dim, BD),
        key,
        rows_of(v_base, keys, strides.value_row, BN, tile.value_dim, BDV),
        rows_of(o_base, queries, o_stride, ROWS, tile.value_dim, BDV),
        mask,
        bias,
    )
