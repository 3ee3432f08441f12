"""A forward kernel for Hopper GPUs (sm_90) in Gluon, whose exponentials run beside the products of
the same warps. `fastformer tune` measures it for the calls that it computes.

A program owns 128 queries of a head. Its warps have parts:

    copies       one warp copies queries, keys and values to shared memory by TMA, and also a mask
                 and a bias [queries, keys]. Keys have one ring of slots, values another: the warp
                 fills a slot while the consumers still read other slots. With a block mask, it
                 reads from the lists which tiles to copy, and copies the bits of a partly seen one.
    consumers    groups of four warps compute 64 queries each. A group issues two products: its
                 queries times the keys of tile t, then the weights of tile t - 1 times its values.
                 When the first product is done, the group computes the weights of tile t while the
                 second product runs.
    mask         if the mask or the bias is the same for all queries, one warp turns it into bounds
                 of the scores, and sets the values of masked keys to zero, because 0 * NaN is NaN.

The tiles that the length, the band or a mask may cut come first, the others after them.
docs/kernels.md draws which warps wait for which. benchmarks/proof/gluon_simulator.py runs the
kernel on a CPU and finds accesses that no barrier orders; Triton's interpreter cannot run it.

Source: Shah et al. 2024, "FlashAttention-3", section 3.2 (overlap in a group).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...common import LOG2E, dropout_words
from ..bounds import inside_run, reads_no_mask
from ..scores import locate_rows, locate_sequence, prepare_call, store_sums
from .parts import (
    accumulator,
    at_row,
    bounds_of_keys,
    copy_in,
    copy_out,
    counter_layout,
    has_bounds,
    has_terms,
    like,
    pack,
    seen_by_bits,
    slot_of,
    spread,
    store_bits,
    unpack,
    up_to_last_seen,
)
from .work import (
    QUERIES,
    Launched,
    Tensors,
    block_of,
    bounds_at,
    key_of_any_tile,
    key_of_tile,
    listed_tile_of,
    make_shared,
    make_tensors,
    masked_tiles,
    place_of,
)


@gluon.constexpr_function
def _folds(has):
    """Return whether scale and maximum of a row are applied in one multiply-add."""
    return has.fold_scale or (has.softcap and not has.separate_max)


@gluon.jit
def _copies(block, tensors, shared, tile: gl.constexpr, has: gl.constexpr):
    """Copy the queries, and then tile by tile keys, mask and bias, and values."""
    work, b, h, g = block.work, block.b, block.h, block.g
    buffers, bars = shared
    K_BYTES: gl.constexpr = tile.columns * tile.dim_block * 2
    V_BYTES: gl.constexpr = tile.columns * tile.value_block * 2
    mbarrier.expect(bars.query_ready, tile.rows * tile.dim_block * 2)
    for which in gl.static_range(2):
        rows = at_row(b, h, work.start + which * QUERIES, tile)
        copy_in(tensors.query, rows, bars.query_ready, buffers.query.index(which))
    masked = masked_tiles(work.walk, has)
    for t in range(0, work.walk.end):
        slot, phase = slot_of(t, tile.slots)
        n0 = key_of_any_tile(work.walk, t, tile, has)
        # Both consumers have read the slot. In the first round this does not wait.
        mbarrier.wait(bars.key_free.index(slot), phase ^ 1)
        mbarrier.expect(bars.key_ready.index(slot), K_BYTES)
        rows = at_row(b, g, n0, tile)
        copy_in(tensors.key, rows, bars.key_ready.index(slot), buffers.key.index(slot))
        if has_terms(has):
            place = place_of(work.start, n0, t, 0, tile)
            _copy_terms(place, tensors, shared, t < masked, tile, has)
        mbarrier.wait(bars.value_free.index(slot), phase ^ 1)
        mbarrier.expect(bars.value_ready.index(slot), V_BYTES)
        copy_in(tensors.value, rows, bars.value_ready.index(slot), buffers.value.index(slot))
        if has.lists:
            if t < work.walk.edges:
                _copy_bits(work.walk, t, shared, tile, has)


@gluon.jit
def _copy_terms(place, tensors, shared, needed, tile: gl.constexpr, has: gl.constexpr):
    """Copy the mask and the bias of a tile of scores, if they are needed."""
    buffers, bars = shared
    ready = bars.term_ready.index(place.term_slot)
    # Both consumers have read the slot.
    mbarrier.wait(bars.term_free.index(place.term_slot), place.term_phase ^ 1, pred=needed)
    mbarrier.expect(ready, tile.rows * tile.columns * tile.term_bytes, pred=needed)
    for which in gl.static_range(2):
        rows, part = place.query + which * QUERIES, place.part + which
        if has.mask == 2:
            copy_in(tensors.mask, [rows, place.key], ready, buffers.mask.index(part), pred=needed)
        if has.bias == 2:
            copy_in(tensors.bias, [rows, place.key], ready, buffers.bias.index(part), pred=needed)


@gluon.jit
def _copy_bits(walk, t, shared, tile: gl.constexpr, has: gl.constexpr):
    """Copy the bits of the t-th tile."""
    buffers, bars = shared
    WORDS: gl.constexpr = 4  # two for each consumer
    slot, _ = slot_of(t, tile.slots)
    _, of_bits = listed_tile_of(walk, t, tile, True, has)
    store_bits(buffers.bits, slot * WORDS, walk.lists, of_bits, 0, QUERIES, WORDS)
    mbarrier.arrive(bars.bits_ready.index(slot), count=1)


@gluon.jit
def _mask(block, shared, tile: gl.constexpr, has: gl.constexpr):
    """Turn a mask or a bias of keys into bounds, and set the values of masked keys to zero."""
    work = block.work
    buffers, bars = shared
    BN: gl.constexpr = tile.columns
    CHUNK: gl.constexpr = 8  # rows of values, WIDTH columns of which a warp holds in registers
    WIDTH: gl.constexpr = min(32, tile.value_block)
    KEYS: gl.constexpr = gl.BlockedLayout([BN // 32], [32], [1], [0])
    SMALL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [1, 1], [1, 0])
    j = gl.arange(0, BN, layout=KEYS)
    masked = masked_tiles(work.walk, has)
    for t in range(0, masked):
        slot, phase = slot_of(t, tile.slots)
        n0 = key_of_any_tile(work.walk, t, tile, has)
        bound = bounds_of_keys(block.mask, n0 + j, work.last + 1, has)
        seen = bound != float("-inf")
        # Both consumers have read the previous bounds.
        mbarrier.wait(bars.bounds_free.index(slot), phase ^ 1)
        buffers.bounds.index(slot).store(bound)
        mbarrier.arrive(bars.bounds_ready.index(slot), count=1)
        # The values have arrived, so their slot was free: no consumer misses a phase.
        mbarrier.wait(bars.value_ready.index(slot), phase)
        if gl.sum(seen.to(gl.int32), 0) < BN:
            for chunk in gl.static_range(BN // CHUNK):
                part = buffers.bounds.index(slot).slice(chunk * CHUNK, CHUNK)
                kept = part.load(gl.SliceLayout(1, SMALL)) != float("-inf")
                if gl.sum(kept.to(gl.int32), 0) < CHUNK:
                    rows = buffers.value.index(slot).slice(chunk * CHUNK, CHUNK)
                    for column in gl.static_range(0, tile.value_block, WIDTH):
                        values = rows.slice(column, WIDTH, dim=1)
                        x = values.load(SMALL)
                        values.store(gl.where(gl.expand_dims(kept, 1), x, 0.0))
            fence_async_shared()  # makes these stores visible to wgmma and to the next copy
        mbarrier.arrive(bars.value_masked.index(slot), count=1)
    for t in range(masked, work.walk.end):  # the consumers wait for the same barrier in every tile
        slot, phase = slot_of(t, tile.slots)
        mbarrier.wait(bars.value_ready.index(slot), phase)
        mbarrier.arrive(bars.value_masked.index(slot), count=1)


@gluon.jit
def _scores(s, place, shared, work, tile: gl.constexpr, has: gl.constexpr, EDGE: gl.constexpr):
    """Return the scores in base 2 from s = q . k [64, BN], -inf where a query does not see a key.
    If `_folds`, they are not yet multiplied by the factor. See `scores` of scores.py.
    """
    buffers, bars = shared
    BN: gl.constexpr = tile.columns
    S: gl.constexpr = accumulator(BN)
    i = place.query + gl.arange(0, QUERIES, layout=gl.SliceLayout(1, S))
    j = gl.arange(0, BN, layout=gl.SliceLayout(0, S))
    bias = s  # stands for what the call lacks; no line reads it
    bound = s
    if has_bounds(has):
        mbarrier.wait(bars.bounds_ready.index(place.slot), place.phase)
        bound = buffers.bounds.index(place.slot).load(gl.SliceLayout(0, S))
        mbarrier.arrive(bars.bounds_free.index(place.slot), count=1)
    if has_terms(has):
        mbarrier.wait(bars.term_ready.index(place.term_slot), place.term_phase)
        if has.bias == 2:
            bias = buffers.bias.index(place.part).load(S)
        if has.mask == 2:
            seen = buffers.mask.index(place.part).load(S)
        fence_async_shared()  # the next copy must not overtake these loads
        mbarrier.arrive(bars.term_free.index(place.term_slot), count=1)
    if has.lists:
        mbarrier.wait(bars.bits_ready.index(place.slot), place.phase)
        part = (place.slot * (tile.rows // QUERIES) + (place.query - work.start) // QUERIES) * 2
        shown = seen_by_bits(buffers.bits, part, j, S, False)
    if has.softcap:
        s = 1.0 - 2.0 / (gl.exp2(s * work.scale) + 1.0)
    s = _biased(s, bias, bound, work, has)
    if has.alibi:
        ahead = gl.expand_dims(i + (work.shift - place.key), 1) - gl.expand_dims(j, 0)
        s = gl.fma(gl.abs(ahead).to(gl.float32), like(s, -work.slope), s)
    if has.mask == 1 and has.bias != 1:
        s = gl.minimum(s, gl.expand_dims(bound, 0))  # -inf also for a key that holds NaN
    if has.mask == 2:
        s = gl.where(seen != 0, s, float("-inf"))
    if has.lists:
        s = gl.where(shown, s, float("-inf"))
    if EDGE and has.lists != 1:
        s = _cut(s, i, j, place.key, work, has)
    return s


@gluon.jit
def _biased(s, bias, bound, work, has: gl.constexpr):
    """Return the scores plus a bias [64, BN] or [BN], in base 2."""
    if has.bias == 2:
        return gl.fma(s, like(s, work.factor), bias.to(gl.float32) * LOG2E)
    elif has.bias == 1:
        bound = gl.broadcast(gl.expand_dims(bound, 0), s)[0]
        s = gl.fma(s, like(s, work.factor), bound)
        return gl.where(bound == float("-inf"), bound, s)  # also for a key that holds NaN
    elif _folds(has):
        return s
    else:
        return s * work.factor


@gluon.jit
def _cut(s, i, j, n0, work, has: gl.constexpr):
    """Return the scores of the queries i [64] and the keys n0 + j [BN], -inf where the length or
    the band hides a key.
    """
    j = gl.expand_dims(j, 0)
    last = i * 0 + work.last
    if has.right:
        last = gl.minimum(i + work.right, last)
    seen = j <= gl.expand_dims(last - n0, 1)
    if has.left:
        seen = seen & (j >= gl.expand_dims(i + (work.left - n0), 1))
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _weights(
    s, state, place, shared, work, tile: gl.constexpr, has: gl.constexpr, EDGE: gl.constexpr
):
    """One step of the online softmax, over s = q . k [64, BN] of a tile. Return its weights, the
    factor by which earlier sums are rescaled, and the new state: (maximum, sum of the weights).
    """
    m, l = state
    BN: gl.constexpr = tile.columns
    ALL: gl.constexpr = EDGE or not (reads_no_mask(has) or has.lists)
    read: gl.constexpr = has if ALL else inside_run(has)
    s = _scores(s, place, shared, work, tile, read, EDGE)
    m_new = gl.maximum(m, gl.max(s, 1))
    base = m_new
    if EDGE or read.mask > 0 or read.bias > 0:  # a row that has seen no key yet: -inf - -inf is NaN
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
    if _folds(has):
        offset = base * -work.factor
        p = gl.exp2(gl.fma(s, like(s, work.factor), spread(offset, s)))
        rescale = gl.exp2(gl.fma(m, like(m, work.factor), offset))
    else:
        p = gl.exp2(s - gl.expand_dims(base, 1))
        rescale = gl.exp2(m - base)
    l = l * rescale + gl.sum(p, 1)
    if has.dropout:
        COUNTERS: gl.constexpr = counter_layout(QUERIES, BN)
        I: gl.constexpr = gl.SliceLayout(1, COUNTERS)
        J: gl.constexpr = gl.SliceLayout(0, COUNTERS)
        i = place.query // 2 + gl.arange(0, QUERIES // 2, layout=I)
        j = place.key // 2 + gl.arange(0, BN // 2, layout=J)
        i, j = gl.expand_dims(i, 1).to(gl.uint32), gl.expand_dims(j, 0).to(gl.uint32)
        words = dropout_words(work.draws, i, j, QUERIES, BN)
        words = gl.convert_layout(words, accumulator(BN))
        keep = words >= work.factors.threshold.to(gl.uint32, bitcast=True)
        p = gl.where(keep, p, work.factors.inv_keep * 0.0)  # not a constant zero: see forward.py
    return p, rescale, (m_new, l)


@gluon.jit
def _carried(p, dtype: gl.constexpr, tile: gl.constexpr):
    """Return the weights in the form that the loop carries: packed, or as float32, because 16-bit
    values would take half a register each.
    """
    if tile.packed:
        return pack(p, dtype)
    else:
        return p


@gluon.jit
def _operand(p, dtype: gl.constexpr, tile: gl.constexpr):
    """Return the weights that the loop carried, as an operand of the product with the values."""
    if tile.packed:
        p = unpack(p, dtype, accumulator(tile.columns))
    layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(tile.value_block), 2)
    return gl.convert_layout(p.to(dtype), layout)


@gluon.jit
def _store(acc, state, i0, block, out, tile: gl.constexpr, has: gl.constexpr):
    """Store the output of the queries at i0, through shared memory, and their statistics for the
    backward. `out` is the buffer and the descriptor of the output.
    """
    work, rows = block.work, block.rows
    m, l = state
    tiles, target = out
    O: gl.constexpr = accumulator(tile.value_block)
    if _folds(has):
        m = m * work.factor
    i = i0 + gl.arange(0, QUERIES, layout=gl.SliceLayout(1, accumulator(tile.columns)))
    row = rows.first + i
    sums = store_sums(rows.lse, rows.statistics, row, i < rows.queries, m, l, has)
    factor = gl.convert_layout(work.factors.inv_keep / sums, gl.SliceLayout(1, O))
    tiles.store((acc * gl.expand_dims(factor, 1)).to(target.dtype))
    fence_async_shared()  # makes the store visible to the copy
    copy_out(target, at_row(block.b, block.h, i0, tile), tiles)


@gluon.jit
def _consumer(which: gl.constexpr, block, tensors, shared, tile: gl.constexpr, has: gl.constexpr):
    """Compute 64 queries: their rows of the output, LSE and STATISTICS."""
    buffers, bars = shared
    work, walk = block.work, block.work.walk
    BN: gl.constexpr = tile.columns
    S: gl.constexpr = accumulator(BN)
    O: gl.constexpr = accumulator(tile.value_block)
    I: gl.constexpr = gl.SliceLayout(1, S)
    value_ready = bars.value_masked if has_bounds(has) else bars.value_ready
    i0 = work.start + which * QUERIES
    acc = gl.zeros([QUERIES, tile.value_block], gl.float32, O)
    m = gl.full([QUERIES], float("-inf"), gl.float32, I)
    l = gl.zeros([QUERIES], gl.float32, I)
    if has.sink:  # acts as a first key whose value is zero
        m = gl.zeros([QUERIES], gl.float32, I) + block.rows.sink * LOG2E
        if _folds(has):
            m = m / work.factor
        l += 1.0
    state = m, l
    q = buffers.query.index(which)
    none = gl.zeros([QUERIES, BN], gl.float32, S)
    mbarrier.wait(bars.query_ready, 0)  # the queries of both consumers
    mbarrier.wait(bars.key_ready.index(0), 0)
    k = buffers.key.index(0).permute((1, 0))
    s = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(bars.key_free.index(0), count=1)  # the product has read them
    n0 = key_of_tile(walk, 0, tile, has, True)
    place = place_of(i0, n0, 0, which, tile)
    p, rescale, state = _weights(s, state, place, shared, work, tile, has, True)
    p = _carried(p, tensors.output.dtype, tile)
    slot, phase = slot_of(1, tile.slots)
    mbarrier.wait(bars.key_ready.index(slot), phase, pred=walk.end > 1)
    for EDGE in gl.static_range(2):
        begin = 1 if EDGE == 0 else walk.edges
        end = walk.edges if EDGE == 0 else walk.end
        for t in range(begin, end):
            weights = _operand(p, tensors.output.dtype, tile)
            slot, phase = slot_of(t, tile.slots)
            k = buffers.key.index(slot).permute((1, 0))
            s = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
            before, phase_before = slot_of(t - 1, tile.slots)
            mbarrier.wait(value_ready.index(before), phase_before)
            acc = warpgroup_mma(weights, buffers.value.index(before), acc, is_async=True)
            s, acc = warpgroup_mma_wait(1, [s, acc])  # the scores; the other product continues
            mbarrier.arrive(bars.key_free.index(slot), count=1)
            place = place_of(i0, key_of_tile(walk, t, tile, has, EDGE == 0), t, which, tile)
            p, rescale, state = _weights(s, state, place, shared, work, tile, has, EDGE == 0)
            # Wait for the next keys before waiting for the product: this wait ends a basic block,
            # without which ptxas moves the exponentials behind the product.
            slot, phase = slot_of(t + 1, tile.slots)
            mbarrier.wait(bars.key_ready.index(slot), phase, pred=t + 1 < walk.end)
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(bars.value_free.index(before), count=1)  # the product has read them
            p = _carried(p, tensors.output.dtype, tile)
            acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, O)), 1)
    slot, phase = slot_of(walk.end - 1, tile.slots)
    mbarrier.wait(value_ready.index(slot), phase)
    weights = _operand(p, tensors.output.dtype, tile)
    acc = warpgroup_mma(weights, buffers.value.index(slot), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    out = buffers.output.index(which), tensors.output
    _store(acc, state, i0, block, out, tile, has)
    tma.store_wait(0)  # the program ends after the copy has read its shared memory


@gluon.jit
def hopper_forward_kernel(
    inputs,
    O,
    LSE,
    STATISTICS,
    SINKS,
    optional,
    query_map,
    key_map,
    value_map,
    output_map,
    output_strides,
    strides,
    sizes,
    band,
    factors,
    tile: gl.constexpr,
    has: gl.constexpr,
):
    """Compute what `forward_kernel` does.

    Query, key, value and O have 16 bits. They, and a mask and a bias of queries and keys, are read
    and written through TMA descriptors, which need addresses and strides in multiples of 16 bytes.
    With `tile.mapped` the descriptors are arguments: those of `map_of`.
    """
    place = locate_rows(sizes, tile, has)
    _, _, b, _, _ = place
    sequence = locate_sequence(optional, sizes, b, has)
    call = prepare_call(optional, strides, sizes, band, factors, has)
    bounds = bounds_at(place, call, tile, has)
    sequence = up_to_last_seen(sequence, bounds, has)
    launched = Launched(call, sequence, LSE, STATISTICS, SINKS)
    block = block_of(place, launched, bounds, tile, has)
    if tile.mapped:
        tensors = Tensors(query_map, key_map, value_map, output_map, key_map, key_map)
    else:
        tensors = make_tensors(inputs, O, output_strides, launched, block, tile, has)
    shared = make_shared(inputs.query.dtype.element_ty, tensors, tile, has)
    fence_async_shared()  # makes the barriers visible to the copies
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    # The requested registers give both consumers the same number of registers a thread.
    if has_bounds(has):
        gl.warp_specialize(
            [
                (_consumer, (FIRST, block, tensors, shared, tile, has)),
                (_consumer, (SECOND, block, tensors, shared, tile, has)),
                (_copies, (block, tensors, shared, tile, has)),
                (_mask, (block, shared, tile, has)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (FIRST, block, tensors, shared, tile, has)),
                (_consumer, (SECOND, block, tensors, shared, tile, has)),
                (_copies, (block, tensors, shared, tile, has)),
            ],
            [4, 1],
            [240, 24],
        )
