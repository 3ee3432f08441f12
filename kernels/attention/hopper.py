"""A forward kernel for Hopper GPUs (sm_90) in Gluon, whose exponentials run beside the products of
the same warps. `fastformer tune` measures it for calls without the options that it lacks.

A program owns 128 queries of a head. Its warps have parts:

    copies       one warp copies queries, keys and values to shared memory by TMA. The tiles of keys
                 and of values go round a ring of slots each: the warp fills a slot while the
                 consumers still read the others.
    consumers    two groups of four warps compute 64 queries each. A group issues the product of its
                 queries with the keys of a tile and, behind it, that of the weights of the tile
                 before with their values. As soon as the first is done, it computes the weights of
                 the tile while the second runs. The groups take turns in issuing products, so that
                 one computes exponentials while the other has the tensor cores.
    mask         with a mask of keys, one warp turns its bytes into bounds of the scores, and sets
                 the values of masked keys to zero, because 0 * NaN is NaN.

docs/kernels.md draws who waits for whom. benchmarks/proof/gluon_simulator.py runs the kernel on a
CPU and finds accesses that no barrier orders; Triton's interpreter cannot run it.

Source: Shah et al. 2024, "FlashAttention-3", sections 3.1 (turns) and 3.2 (overlap in a group).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common import LN2, LOG2E, dropout_words
from .configurations import Tiles
from .scores import clamp, locate_head, locate_keys, locate_rows, locate_sequence, prepare_call

# The rows that a measurement may choose, by name: queries of a program, keys of a tile, warps of a
# consumer, slots of a ring.
HOPPER = {"Gluon 128 128": Tiles(128, 128, 4, 2)}


class Work(NamedTuple):
    """What a program computes."""

    start: Any  # its first query
    tiles: Any  # of keys that it walks, the last one first
    edges: Any  # of these, behind the first tile, those that the length or the band may cut
    last: Any  # the last key of the sequence
    band: Any  # query i sees no key past i + band
    scale: Any  # of the scores, in base 2
    draws: Any  # `DropoutStream`
    draw_row: Any  # where the tile of `start` and key 0 lies in what dropout draws
    draw_column: Any
    factors: Any


class Tensors(NamedTuple):
    """TMA descriptors of the rows of a head, [rows, D]."""

    query: Any
    key: Any
    value: Any
    output: Any


class Buffers(NamedTuple):
    """Shared memory."""

    query: Any  # [2, BM / 2, BD]: a half for each consumer
    key: Any  # [slots, BN, BD]
    value: Any  # [slots, BN, BDV]
    output: Any  # [2, BM / 2, BDV]
    bounds: Any  # [slots, BN]: with a mask, no score of a key is above its bound


class Barriers(NamedTuple):
    """mbarriers; each ends a phase after a number of arrivals, given here. A `ready` says that a
    slot is full, a `free` that its readers are done with it.
    """

    query_ready: Any  # 1: the copies
    key_ready: Any  # 1 for each slot: the copies
    key_free: Any  # 2: the consumers
    value_ready: Any  # 1: the copies
    value_free: Any  # 2: the consumers
    bounds_ready: Any  # 1: the mask
    bounds_free: Any  # 2: the consumers
    value_masked: Any  # 1: the mask, once the values of masked keys are zero
    turn: Any  # 1 for each consumer: the other one has issued its products


_copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.9, 3.6
_copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.constexpr_function
def _counter_layout(BM, BN):
    """Return the layout of dropout's counters [BM / 2, BN / 2]: that of the scores without bit 3 of
    row and column, so that a thread holds the words of its own scores.
    """
    columns = [[0, 1]] + [[0, 8 << i] for i in range(8) if 8 << i < BN // 2]
    lanes, warps = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]]
    return gl.DistributedLinearLayout(columns, lanes, warps, [], [BM // 2, BN // 2])


@gluon.constexpr_function
def _accumulator(columns):
    """Return the layout of a product [64, columns] of four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _next(slot, phase, SLOTS: gl.constexpr):
    """Return the slot of a ring after this one, and its phase, which changes at the wrap."""
    slot += 1
    wraps = slot == SLOTS
    return gl.where(wraps, 0, slot), phase ^ wraps.to(gl.int32)


@gluon.jit
def _first_key(work, t, tile: gl.constexpr):
    """Return the first key of the t-th tile that is walked."""
    return (work.tiles - 1 - t) * tile.columns


@gluon.jit
def _copies(work, tensors, shared, SLOTS: gl.constexpr, tile: gl.constexpr):
    """Copy the queries, and then tile by tile keys and values."""
    buffers, bars = shared
    HALF: gl.constexpr = tile.rows // 2
    K_BYTES: gl.constexpr = tile.columns * tile.dim_block * 2
    V_BYTES: gl.constexpr = tile.columns * tile.value_block * 2
    mbarrier.expect(bars.query_ready, tile.rows * tile.dim_block * 2)
    for half in gl.static_range(2):
        rows = work.start + half * HALF
        _copy_in(tensors.query, [rows, 0], bars.query_ready, buffers.query.index(half))
    # In a sequence without keys, the one tile is read past its end: it is zero, and never NaN.
    origin = gl.where(work.last < 0, tile.columns, 0)
    slot = 0
    phase = 0
    for t in range(work.tiles):
        n0 = origin + _first_key(work, t, tile)
        # Both consumers have read what was in the slot; in the first round nobody has to.
        mbarrier.wait(bars.key_free.index(slot), phase ^ 1)
        mbarrier.expect(bars.key_ready.index(slot), K_BYTES)
        _copy_in(tensors.key, [n0, 0], bars.key_ready.index(slot), buffers.key.index(slot))
        mbarrier.wait(bars.value_free.index(slot), phase ^ 1)
        mbarrier.expect(bars.value_ready.index(slot), V_BYTES)
        _copy_in(tensors.value, [n0, 0], bars.value_ready.index(slot), buffers.value.index(slot))
        slot, phase = _next(slot, phase, SLOTS)


@gluon.jit
def _mask(work, mask, shared, SLOTS: gl.constexpr, tile: gl.constexpr):
    """Turn the mask of keys into bounds, and set the values of masked keys to zero. `mask` is a
    pointer to the first key's byte, the stride, and the number of keys.
    """
    MASK, stride, keys = mask
    buffers, bars = shared
    BN: gl.constexpr = tile.columns
    CHUNK: gl.constexpr = 8  # rows of values, WIDTH columns of which a warp holds in registers
    WIDTH: gl.constexpr = min(64, tile.value_block)
    KEYS: gl.constexpr = gl.BlockedLayout([BN // 32], [32], [1], [0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [1, 1], [1, 0])
    j = gl.arange(0, BN, layout=KEYS)
    slot = 0
    phase = 0
    for t in range(work.tiles):
        n0 = _first_key(work, t, tile)
        seen = gl.load(MASK + (n0 + j) * stride, mask=n0 + j < keys, other=0) != 0
        bound = gl.where(seen, float("inf"), float("-inf"))
        # Both consumers have read the bounds before.
        mbarrier.wait(bars.bounds_free.index(slot), phase ^ 1)
        buffers.bounds.index(slot).store(bound)
        mbarrier.arrive(bars.bounds_ready.index(slot), count=1)
        # The values have arrived; also, their slot was free, so that nobody misses a phase.
        mbarrier.wait(bars.value_ready.index(slot), phase)
        if gl.sum(seen.to(gl.int32), 0) < BN:
            for chunk in gl.static_range(BN // CHUNK):
                part = buffers.bounds.index(slot).slice(chunk * CHUNK, CHUNK)
                kept = part.load(gl.SliceLayout(1, ROWS)) > 0
                if gl.sum(kept.to(gl.int32), 0) < CHUNK:
                    rows = buffers.value.index(slot).slice(chunk * CHUNK, CHUNK)
                    for column in gl.static_range(0, tile.value_block, WIDTH):
                        values = rows.slice(column, WIDTH, dim=1)
                        x = values.load(ROWS)
                        values.store(gl.where(gl.expand_dims(kept, 1), x, 0.0))
            fence_async_shared()  # plain stores, which wgmma and the next copy have to see
        mbarrier.arrive(bars.value_masked.index(slot), count=1)
        slot, phase = _next(slot, phase, SLOTS)


@gluon.jit
def _weights(s, state, at, shared, work, tile: gl.constexpr, has: gl.constexpr, EDGE: gl.constexpr):
    """One step of the online softmax, over the scores s [BM / 2, BN] of a tile. Return its weights,
    the factor of what was summed before, and the new state: (maximum, sum of the weights).
    """
    m, l = state
    i0, n0, slot, phase = at
    buffers, bars = shared
    HALF: gl.constexpr = tile.rows // 2
    BN: gl.constexpr = tile.columns
    S: gl.constexpr = _accumulator(BN)
    if has.mask == 1:
        mbarrier.wait(bars.bounds_ready.index(slot), phase)
        bound = buffers.bounds.index(slot).load(gl.SliceLayout(0, S))
        mbarrier.arrive(bars.bounds_free.index(slot), count=1)
        s = gl.minimum(s, gl.expand_dims(bound, 0))  # -inf also for a key that holds NaN
    if EDGE:
        i = i0 + gl.arange(0, HALF, layout=gl.SliceLayout(1, S))
        j = gl.arange(0, BN, layout=gl.SliceLayout(0, S))
        last = i * 0 + work.last
        if has.right:
            last = gl.minimum(i + work.band, last)
        seen = gl.expand_dims(j, 0) <= gl.expand_dims(last - n0, 1)
        s = gl.where(seen, s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1))
    base = m_new
    if EDGE or has.mask == 1:  # a row without a key so far: -inf - -inf is NaN
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
    offset = base * -work.scale
    p = gl.exp2(gl.fma(s, _like(s, work.scale), _spread(offset, s)))
    rescale = gl.exp2(gl.fma(m, _like(m, work.scale), offset))
    l = l * rescale + gl.sum(p, 1)
    if has.dropout:
        COUNTERS: gl.constexpr = _counter_layout(HALF, BN)
        ROWS: gl.constexpr = gl.SliceLayout(1, COUNTERS)
        COLUMNS: gl.constexpr = gl.SliceLayout(0, COUNTERS)
        i = (work.draw_row + i0) // 2 + gl.arange(0, HALF // 2, layout=ROWS)
        j = (work.draw_column + n0) // 2 + gl.arange(0, BN // 2, layout=COLUMNS)
        i, j = gl.expand_dims(i, 1).to(gl.uint32), gl.expand_dims(j, 0).to(gl.uint32)
        words = gl.convert_layout(dropout_words(work.draws, i, j, HALF, BN), S)
        keep = words >= work.factors.threshold.to(gl.uint32, bitcast=True)
        p = gl.where(keep, p, work.factors.inv_keep * 0.0)  # a zero that is no constant: forward.py
    return p, rescale, (m_new, l)


@gluon.jit
def _like(x, value):
    """Return a tensor like x that holds one value."""
    return gl.full_like(x, 1.0) * value


@gluon.jit
def _spread(rows, x):
    """Return rows [BM / 2] for each column of x."""
    return gl.broadcast(gl.expand_dims(rows, 1), x)[0]


@gluon.jit
def _store(acc, state, i0, work, rows, buffer, target, tile: gl.constexpr):
    """Store the output of the queries at i0, through shared memory, and their rows of LSE."""
    m, l = state
    LSE, queries, _ = rows
    HALF: gl.constexpr = tile.rows // 2
    ROWS: gl.constexpr = gl.SliceLayout(1, _accumulator(tile.columns))
    O: gl.constexpr = _accumulator(tile.value_block)
    empty = l == 0.0
    sums = gl.where(empty, 1.0, l)
    lse = gl.where(empty, float("-inf"), (m * work.scale + gl.log2(sums)) * LN2)
    i = i0 + gl.arange(0, HALF, layout=ROWS)
    gl.store(LSE + i, lse, mask=i < queries)
    factor = gl.convert_layout(work.factors.inv_keep / sums, gl.SliceLayout(1, O))
    buffer.store((acc * gl.expand_dims(factor, 1)).to(target.dtype))
    fence_async_shared()  # the store to shared memory was a plain one, the copy is not
    _copy_out(target, [i0, 0], buffer)
    tma.store_wait(0)  # shared memory must not end before the copy has read it


@gluon.jit
def _consumer(
    which: gl.constexpr,
    work,
    tensors,
    rows,
    shared,
    SLOTS: gl.constexpr,
    tile: gl.constexpr,
    has: gl.constexpr,
):
    """Compute 64 queries: their output, and their rows of LSE. `rows` is a pointer to the first row
    of the head in LSE, the number of its queries, and the sink.
    """
    buffers, bars = shared
    dtype: gl.constexpr = tensors.output.dtype
    HALF: gl.constexpr = tile.rows // 2
    BN: gl.constexpr = tile.columns
    S: gl.constexpr = _accumulator(BN)
    O: gl.constexpr = _accumulator(tile.value_block)
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S)
    value_ready = bars.value_masked if has.mask == 1 else bars.value_ready
    i0 = work.start + which * HALF
    acc = gl.zeros([HALF, tile.value_block], gl.float32, O)
    m = gl.full([HALF], float("-inf"), gl.float32, ROWS)
    l = gl.zeros([HALF], gl.float32, ROWS)
    if has.sink:  # as if a first key had been seen, whose value is zero
        m = gl.zeros([HALF], gl.float32, ROWS) + rows[2] * LOG2E / work.scale
        l += 1.0
    state = m, l
    q = buffers.query.index(which)
    none = gl.zeros([HALF, BN], gl.float32, S)
    mbarrier.wait(bars.query_ready, 0)  # the queries of both consumers
    mbarrier.wait(bars.key_ready.index(0), 0)
    k = buffers.key.index(0).permute((1, 0))
    s = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(bars.key_free.index(0), count=1)  # the product has read them
    at = i0, _first_key(work, 0, tile), 0, 0
    p, rescale, state = _weights(s, state, at, shared, work, tile, has, True)
    before = 0  # slot and phase of the tile whose values come next
    before_phase = 0
    slot, phase = _next(0, 0, SLOTS)
    mbarrier.wait(bars.key_ready.index(slot), phase, pred=work.tiles > 1)
    beat = 0
    for EDGE in gl.static_range(2):
        begin = 1 if EDGE == 0 else work.edges + 1
        end = work.edges + 1 if EDGE == 0 else work.tiles
        for t in range(begin, end):
            # The other consumer has issued its products; consumer 0 begins.
            mbarrier.wait(bars.turn.index(which), beat ^ (1 - which))
            # The weights are carried as float32: of 16 bits the loop would carry half registers.
            weights = gl.convert_layout(p.to(dtype), P)
            k = buffers.key.index(slot).permute((1, 0))
            s = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
            mbarrier.wait(value_ready.index(before), before_phase)
            acc = warpgroup_mma(weights, buffers.value.index(before), acc, is_async=True)
            mbarrier.arrive(bars.turn.index(1 - which), count=1)
            beat = beat ^ 1
            s, acc = warpgroup_mma_wait(1, [s, acc])  # the scores; the other product goes on
            mbarrier.arrive(bars.key_free.index(slot), count=1)
            at = i0, _first_key(work, t, tile), slot, phase
            p, rescale, state = _weights(s, state, at, shared, work, tile, has, EDGE == 0)
            # The wait for the next keys stands before that for the product, because it ends a basic
            # block: otherwise ptxas moves the exponentials behind the product.
            done = before
            before = slot
            before_phase = phase
            slot, phase = _next(slot, phase, SLOTS)
            mbarrier.wait(bars.key_ready.index(slot), phase, pred=t + 1 < work.tiles)
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(bars.value_free.index(done), count=1)  # the product has read them
            acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, O)), 1)
    mbarrier.wait(value_ready.index(before), before_phase)
    weights = gl.convert_layout(p.to(dtype), P)
    acc = warpgroup_mma(weights, buffers.value.index(before), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    output = buffers.output.index(which)
    _store(acc, state, i0, work, rows, output, tensors.output, tile)


@gluon.jit
def _rows_of(base, rows, stride, B: gl.constexpr, D: gl.constexpr, BD: gl.constexpr):
    """Make the TMA descriptor of a matrix [rows, D] that is copied in tiles [B, BD]: what is past
    its end reads as zero and is not written.
    """
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([B, BD], base.dtype.element_ty)
    return tma.make_tensor_descriptor(base, [rows, D], [stride, 1], [B, BD], LAYOUT)


@gluon.jit
def _barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """Make barriers that end a phase after that many arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(count):
        mbarrier.init(bars.index(n), count=arrivals)
    return bars


@gluon.jit
def _buffer(tensor, count: gl.constexpr):
    """Make room for that many tiles of a tensor."""
    shape: gl.constexpr = [count, tensor.block_shape[0], tensor.block_shape[1]]
    return gl.allocate_shared_memory(tensor.dtype, shape, tensor.layout)


@gluon.jit
def _shared(tensors, SLOTS: gl.constexpr, tile: gl.constexpr, has: gl.constexpr):
    """Make the shared memory of a program, and its barriers."""
    q_tiles = _buffer(tensors.query, 2)
    o_tiles = q_tiles  # the last product with the queries is over when the output is stored
    if tile.value_block != tile.dim_block:
        o_tiles = _buffer(tensors.output, 2)
    k_tiles = _buffer(tensors.key, SLOTS)
    v_tiles = _buffer(tensors.value, SLOTS)
    bounds = k_tiles
    if has.mask == 1:
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        bounds = gl.allocate_shared_memory(gl.float32, [SLOTS, tile.columns], FLAT)
    buffers = Buffers(q_tiles, k_tiles, v_tiles, o_tiles, bounds)
    key_ready = _barriers(SLOTS, 1)
    bars = Barriers(
        query_ready=_barriers(1, 1).index(0),
        key_ready=key_ready,
        key_free=_barriers(SLOTS, 2),
        value_ready=_barriers(SLOTS, 1),
        value_free=_barriers(SLOTS, 2),
        bounds_ready=_barriers(SLOTS, 1) if has.mask == 1 else key_ready,
        bounds_free=_barriers(SLOTS, 2) if has.mask == 1 else key_ready,
        value_masked=_barriers(SLOTS, 1) if has.mask == 1 else key_ready,
        turn=_barriers(2, 1),
    )
    return buffers, bars


@gluon.jit
def _tiles(i0, sequence, band, tile: gl.constexpr, has: gl.constexpr):
    """Return how many tiles of keys a program walks, at least one, and how many of those behind the
    first one the length or the band may cut.
    """
    hi = sequence.length
    whole = sequence.length
    if has.right:
        right = i0 + sequence.shift + band.right
        hi = clamp(right + tile.rows, 0, hi)
        whole = clamp(right + 1, 0, whole)
    tiles = gl.maximum(gl.cdiv(hi, tile.columns), 1)
    return tiles, gl.maximum(tiles - whole // tile.columns - 1, 0)


@gluon.jit
def hopper_forward_kernel(
    inputs,
    O,
    LSE,
    STATISTICS,
    SINKS,
    optional,
    output_strides,
    strides,
    sizes,
    band,
    factors,
    tile: gl.constexpr,
    has: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Compute what `forward_kernel` does, for calls without a bias, ALiBi, a softcap, a left side
    of the band, packing, and a mask of queries and keys.

    Query, key, value and O have 16 bits, and are read and written through TMA descriptors, which
    need addresses and strides in multiples of 16 bytes.
    """
    batch_head, i0, b, h, g = locate_rows(sizes, tile, has)
    sequence = locate_sequence(optional, sizes, b, has)
    length = sequence.length
    call = prepare_call(optional, strides, sizes, band, factors, has)
    head = locate_head(call, sequence, batch_head, b, h, 0, tile, has)
    q_base = inputs.query + b * strides.query_batch + h * strides.query_head
    k_base, v_base = locate_keys(inputs, strides, sequence, b, g)
    o_base = O + b * output_strides.batch + h * output_strides.head
    HALF: gl.constexpr = tile.rows // 2
    BN: gl.constexpr = tile.columns
    BD: gl.constexpr = tile.dim_block
    BDV: gl.constexpr = tile.value_block
    exists = gl.maximum(length, 1)  # a descriptor has at least one row
    tensors = Tensors(
        _rows_of(q_base, sizes.queries, strides.query_row, HALF, tile.dim, BD),
        _rows_of(k_base, exists, strides.key_row, BN, tile.dim, BD),
        _rows_of(v_base, exists, strides.value_row, BN, tile.value_dim, BDV),
        _rows_of(o_base, sizes.queries, output_strides.row, HALF, tile.value_dim, BDV),
    )
    shared = _shared(tensors, SLOTS, tile, has)
    draw_row = 0
    draw_column = 0
    if has.shard:
        draw_row = sizes.shard.query
        draw_column = sizes.shard.key
    tiles, edges = _tiles(i0, sequence, band, tile, has)
    right = sequence.shift + band.right
    place = i0, tiles, edges, length - 1, right
    work = Work(*place, call.scale, head.draws, draw_row, draw_column, factors)
    sink = 0.0
    if has.sink:
        sink = gl.load(SINKS + h).to(gl.float32)
    row = LSE + batch_head.to(gl.int64) * sizes.query_rows
    rows = row, sizes.queries, sink
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    if has.mask == 1:
        mask = head.mask, strides.mask_column, sizes.keys
        gl.warp_specialize(
            [
                (_consumer, (FIRST, work, tensors, rows, shared, SLOTS, tile, has)),
                (_consumer, (SECOND, work, tensors, rows, shared, SLOTS, tile, has)),
                (_copies, (work, tensors, shared, SLOTS, tile)),
                (_mask, (work, mask, shared, SLOTS, tile)),
            ],
            [4, 1, 1],
            [240, 32, 32],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (FIRST, work, tensors, rows, shared, SLOTS, tile, has)),
                (_consumer, (SECOND, work, tensors, rows, shared, SLOTS, tile, has)),
                (_copies, (work, tensors, shared, SLOTS, tile)),
            ],
            [4, 1],
            [240, 24],
        )
