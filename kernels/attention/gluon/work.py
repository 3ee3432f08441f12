"""The work of a program of the forward for Hopper: the tiles of keys that it visits, its TMA
descriptors, its shared memory and its barriers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common import LOG2E
from ..bounds import Bounds, load_bounds, reads_no_mask, split_at_run, visited_tiles
from ..lists import COLUMNS, load_lists
from ..scores import first_row, keys_of_rows, locate_head, locate_keys, unmasked_tiles
from .parts import (
    barriers,
    buffer,
    has_bounds,
    has_terms,
    lanes,
    mask_of,
    rows_of,
    slot_of,
    spans_of_lists,
    tile_of_lists,
    tiles_of,
)

QUERIES = gl.constexpr(64)  # queries of a consumer: the rows of a wgmma


class Walk(NamedTuple):
    """The tiles of keys that a block of queries visits: the edge tiles t < edges, at least
    one, which the length, the band or a mask may cut, then the others, edges <= t < end. The first
    key of tile t is

        t < edges:    n = lo + t BN, or n + gap if n >= jump
        t >= edges:   begin + t BN

    With the bounds of a mask n = lo + t, or n + gap, is an entry of its lists.

    With a block mask the edge tiles are those that are partly seen: see `tile_of_lists`.
    """

    edges: Any
    end: Any
    lo: Any
    jump: Any
    gap: Any
    begin: Any
    lists: Any = 0  # `Lists` of a block mask, or a pointer to those of bounds
    listed: Any = 0  # those of bounds hold the tiles t < listed


class Work(NamedTuple):
    """The numbers that the computation of a block of queries needs."""

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
    factors: Any


class Rows(NamedTuple):
    """The results of a head that have one number for each query."""

    lse: Any
    statistics: Any
    first: Any  # the row of its query 0 in both
    queries: Any
    sink: Any


class Launched(NamedTuple):
    """The call, a sequence of it, and the results that have one number for each query."""

    call: Any
    sequence: Any
    lse: Any
    statistics: Any
    sinks: Any


class Block(NamedTuple):
    """A block of queries of a head."""

    work: Any
    rows: Any
    mask: Any  # that of `mask_of`
    b: Any  # sequence
    h: Any  # head
    g: Any  # key-value head


class Tensors(NamedTuple):
    """TMA descriptors of the rows of a head, [rows, D], and of its scores, [rows, keys]; or of all
    heads, [B, H, rows, D].
    """

    query: Any
    key: Any
    value: Any
    output: Any
    mask: Any
    bias: Any


class Buffers(NamedTuple):
    """Shared memory."""

    query: Any  # [2, 64, BD], one for each consumer
    key: Any  # [slots, BN, BD]
    value: Any  # [slots, BN, BDV]
    output: Any  # [2, 64, BDV]
    # [slots, BN], with a mask or a bias [keys]: the bias, or an upper bound of the scores of the
    # key, which is -inf for a masked key.
    bounds: Any
    mask: Any  # [slots * 2, 64, BN], of queries and keys
    bias: Any  # the same
    bits: Any  # [slots * 4, 64], of a block mask: word w of a query, for 32 keys


class Barriers(NamedTuple):
    """mbarriers; each ends a phase after a number of arrivals, given here. A `ready` says that a
    slot is full, a `free` that its readers, the two consumers, are done with it.
    """

    query_ready: Any  # 1: the copies
    key_ready: Any  # 1 for each slot: the copies
    key_free: Any  # 2
    value_ready: Any  # 1: the copies
    value_free: Any  # 2
    bounds_ready: Any  # 1: the mask
    bounds_free: Any  # 2
    value_masked: Any  # 1: the mask, once the values of masked keys are zero
    term_ready: Any  # 1: the copies, once mask and bias of queries and keys are there
    term_free: Any  # 2
    # 1: the copies, once the bits of a block mask are there. Who has released values has read bits.
    bits_ready: Any


class Place(NamedTuple):
    """The place of a tile of scores: its first query and key, its slots and phases in two rings."""

    query: Any
    key: Any
    slot: Any  # of the bounds, or of bits
    phase: Any
    term_slot: Any  # of mask and bias of queries and keys
    term_phase: Any
    part: Any  # which tile of that ring


@gluon.jit
def walk_of(i0, sequence, call, bounds, tile: gl.constexpr, has: gl.constexpr):
    """Return the `Walk` of the queries from i0 on. If there is no edge tile, the first other
    tile counts as one. If no tile is visible, the program visits one past the end, which reads as
    zeros, never as NaN.
    """
    BN: gl.constexpr = tile.columns
    length = sequence.length
    lo, hi = keys_of_rows(i0, i0 + tile.rows, length, sequence.shift, call.band, tile, has)
    begin, end = unmasked_tiles(i0, sequence, call.band, tile, has)
    past = gl.cdiv(length, BN) * BN + BN
    if has.bounds:
        edge, run = visited_tiles((lo, begin, end, hi), bounds, call, BN, has, False, lanes())
        edges, others = edge.hi - edge.lo, gl.cdiv(run.hi - run.lo, BN)
        begin = gl.where(others > 0, run.lo, past) - edges * BN
        tiles, starts = gl.maximum(edges + others, 1), call.optional.starts
        lo, jump, gap = edge.lo, edge.jump, edge.gap
        return Walk(gl.maximum(edges, 1), tiles, lo, jump, gap, begin, starts, edges)
    else:
        edge, other = split_at_run((lo, begin, end, hi), bounds, BN, has)
        lo, hi, jump, gap = edge
        begin, end, _, _ = other
        edges, others = gl.cdiv(hi - lo, BN), gl.cdiv(end - begin, BN)
        if not has.left:
            lo += gap
        none = edges == 0
        lo = gl.where(none, gl.where(others > 0, begin, past), lo)
        jump = gl.where(none, lo + BN, jump)
        begin = gl.where(none, begin, begin - edges * BN)
        tiles = gl.maximum(edges + others, 1)
        return Walk(gl.maximum(edges, 1), tiles, lo, jump, gap, begin)


@gluon.jit
def _listed_walk(i0, sequence, call, lists, tile: gl.constexpr, has: gl.constexpr):
    """Return the `Walk` of a block mask, see `tile_of_lists`: `jump` is the number of edge tiles,
    and the run begins at key `begin`. If no tile is visible, it visits one past the end.
    """
    BN: gl.constexpr = tile.columns
    length = sequence.length
    lo, hi = keys_of_rows(i0, i0 + tile.rows, length, sequence.shift, call.band, tile, has)
    begin, end = unmasked_tiles(i0, sequence, call.band, tile, has)
    tiles = lo, begin, end, hi
    lists, parts, run, whole = spans_of_lists(tiles, lists, call, i0, tile, has, False)
    run = gl.where(whole > 0, run, gl.cdiv(length, BN) * BN)
    return Walk(gl.maximum(parts, 1), gl.maximum(parts + whole, 1), 0, parts, 0, run, lists)


@gluon.jit
def listed_tile_of(walk, t, tile: gl.constexpr, EDGE: gl.constexpr, has: gl.constexpr):
    """Return what `tile_of_lists` does of the t-th tile."""
    width: gl.constexpr = tile.columns
    return tile_of_lists(walk.lists, t, walk.jump, walk.begin, width, COLUMNS, EDGE, has)


@gluon.jit
def bounds_at(place, call, tile: gl.constexpr, has: gl.constexpr):
    """Return the `Bounds` of the mask, or the `Lists` of a block mask, for the queries at `place`,
    which `locate_rows` returns.
    """
    _, i0, b, h, _ = place
    if has.lists:
        return load_lists(call.optional, call.strides, call.sizes, b, h, i0, False)
    else:
        return load_bounds(call.optional, call.strides, b, h, i0 // tile.rows, has)


@gluon.jit
def block_of(place, launched, bounds, tile: gl.constexpr, has: gl.constexpr):
    """Return the `Block` at `place`, which `locate_rows` returns."""
    batch_head, i0, b, h, g = place
    call, sequence = launched.call, launched.sequence
    sizes = call.sizes
    head = locate_head(call, sequence, batch_head, b, h, 0, tile, has)
    work = work_of(i0, head, bounds, tile, has)
    sink = 0.0
    if has.sink:
        sink = gl.load(launched.sinks + h).to(gl.float32)
    row = first_row(batch_head, h, sequence, sizes, has)
    rows = Rows(launched.lse, launched.statistics, row, sequence.queries, sink)
    return Block(work, rows, mask_of(head), b, h, g)


@gluon.jit
def work_of(i0, head, bounds, tile: gl.constexpr, has: gl.constexpr):
    """Return the `Work` for the queries of a head from i0 on."""
    sequence, call = head.sequence, head.call
    if has.lists:
        walk = _listed_walk(i0, sequence, call, bounds, tile, has)
    else:
        if not has.bounds:
            bounds = Bounds(0, 0, 0, sequence.length)
        walk = walk_of(i0, sequence, call, bounds, tile, has)
    factor = call.scale
    if has.softcap:
        factor = call.factors.softcap * LOG2E
    return Work(
        start=i0,
        walk=walk,
        last=sequence.length - 1,
        left=sequence.shift - call.band.left,
        right=sequence.shift + call.band.right,
        shift=sequence.shift,
        slope=head.slope,
        scale=call.scale,
        factor=factor,
        draws=head.draws,
        factors=call.factors,
    )


@gluon.jit
def key_of_tile(walk, t, tile: gl.constexpr, has: gl.constexpr, EDGE: gl.constexpr):
    """Return the first key of the t-th tile."""
    if has.lists:
        return listed_tile_of(walk, t, tile, EDGE, has)[0]
    elif EDGE and has.bounds:
        n = walk.lo + t
        n = gl.where(n < walk.jump, n, n + walk.gap)
        listed = t < walk.listed
        n = gl.load(walk.lists + n, mask=listed, other=0).to(gl.int32) * tile.columns
        return gl.where(listed, n, walk.begin + t * tile.columns)
    elif EDGE:
        n0 = walk.lo + t * tile.columns
        if has.left:
            n0 = gl.where(n0 < walk.jump, n0, n0 + walk.gap)
        return n0
    else:
        return walk.begin + t * tile.columns


@gluon.jit
def key_of_any_tile(walk, t, tile: gl.constexpr, has: gl.constexpr):
    """Return the first key of the t-th tile, whether it is an edge tile or not."""
    if has.lists:
        return key_of_tile(walk, t, tile, has, True)
    else:
        other = key_of_tile(walk, t, tile, has, False)
        return gl.where(t < walk.edges, key_of_tile(walk, t, tile, has, True), other)


@gluon.jit
def place_of(i0, n0, t, which, tile: gl.constexpr):
    """Return the `Place` of the tile of scores at query i0 and key n0, the t-th of a consumer."""
    slot, phase = slot_of(t, tile.slots)
    term, term_phase = slot_of(t, tile.term_slots)
    return Place(i0, n0, slot, phase, term, term_phase, term * 2 + which)


@gluon.jit
def masked_tiles(walk, has: gl.constexpr):
    """Return the first tile that is computed without the mask."""
    if reads_no_mask(has) or (has.lists and has.bias == 0):
        return walk.edges
    else:
        return walk.end


@gluon.jit
def make_shared(dtype: gl.constexpr, tensors, tile: gl.constexpr, has: gl.constexpr):
    """Make the shared memory of a program, and its barriers."""
    SLOTS: gl.constexpr = tile.slots
    q_tiles = tiles_of(dtype, 2, QUERIES, tile.dim_block)
    o_tiles = q_tiles  # the last product with the queries is over when the output is stored
    if tile.value_block != tile.dim_block:
        o_tiles = tiles_of(dtype, 2, QUERIES, tile.value_block)
    k_tiles = tiles_of(dtype, SLOTS, tile.columns, tile.dim_block)
    v_tiles = tiles_of(dtype, SLOTS, tile.columns, tile.value_block)
    bounds = k_tiles
    mask = k_tiles
    bias = k_tiles
    bits = 0
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if has_bounds(has):
        bounds = gl.allocate_shared_memory(gl.float32, [SLOTS, tile.columns], FLAT)
    if has.lists:
        bits = gl.allocate_shared_memory(gl.int32, [SLOTS * 4, QUERIES], FLAT)
    if has.mask == 2:
        mask = buffer(tensors.mask, tile.term_slots * 2)
    if has.bias == 2:
        bias = buffer(tensors.bias, tile.term_slots * 2)
    buffers = Buffers(q_tiles, k_tiles, v_tiles, o_tiles, bounds, mask, bias, bits)
    key_ready = barriers(SLOTS, 1)
    bars = Barriers(
        query_ready=barriers(1, 1).index(0),
        key_ready=key_ready,
        key_free=barriers(SLOTS, 2),
        value_ready=barriers(SLOTS, 1),
        value_free=barriers(SLOTS, 2),
        bounds_ready=barriers(SLOTS, 1) if has_bounds(has) else key_ready,
        bounds_free=barriers(SLOTS, 2) if has_bounds(has) else key_ready,
        value_masked=barriers(SLOTS, 1) if has_bounds(has) else key_ready,
        term_ready=barriers(tile.term_slots, 1) if has_terms(has) else key_ready,
        term_free=barriers(tile.term_slots, 2) if has_terms(has) else key_ready,
        bits_ready=barriers(SLOTS, 1) if has.lists else 0,
    )
    return buffers, bars


@gluon.jit
def make_tensors(inputs, O, output_strides, launched, block, tile: gl.constexpr, has: gl.constexpr):
    """Make the TMA descriptors of the head of a block."""
    BN: gl.constexpr = tile.columns
    BD: gl.constexpr = tile.dim_block
    BDV: gl.constexpr = tile.value_block
    sequence, strides = launched.sequence, launched.call.strides
    b, h, g = block.b, block.h, block.g
    o_base = O + b * output_strides.batch + h * output_strides.head
    q_base = inputs.query + b * strides.query_batch + h * strides.query_head
    k_base, v_base = locate_keys(inputs, strides, sequence, b, g)
    queries, keys = sequence.queries, gl.maximum(sequence.length, 1)  # at least one row
    key = rows_of(k_base, keys, strides.key_row, BN, tile.dim, BD)
    mask = key
    bias = key
    if has.mask == 2:
        mask = rows_of(block.mask[0], queries, strides.mask_row, QUERIES, keys, BN)
    if has.bias == 2:
        bias = rows_of(block.mask[2], queries, strides.bias_row, QUERIES, keys, BN)
    return Tensors(
        rows_of(q_base, queries, strides.query_row, QUERIES, tile.dim, BD),
        key,
        rows_of(v_base, keys, strides.value_row, BN, tile.value_dim, BDV),
        rows_of(o_base, queries, output_strides.row, QUERIES, tile.value_dim, BDV),
        mask,
        bias,
    )
