"""dQ of attention on Hopper in Gluon: see backward.py."""

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

from ..bounds import load_bounds
from ..lists import COLUMNS, load_lists
from ..scores import (
    keys_of_rows,
    locate_head,
    locate_keys,
    locate_rows,
    locate_sequence,
    prepare_call,
    unmasked_tiles,
)
from .backward import (
    Barriers,
    Buffers,
    RingSpan,
    Statistics,
    Tensors,
    at_most,
    copy_terms,
    expect_terms,
    head_of,
    is_edge,
    kept_by_dropout,
    listed_span,
    load_terms,
    loop_of,
    masked,
    one_copy_loop,
    one_loop,
    probabilities,
    read_by,
    score_gradient,
    slot_at,
    store_gradient,
    terms,
    tile_at,
    within_bounds,
    work_of,
)
from .parts import (
    accumulator,
    at_row,
    barriers,
    bounds_of_keys,
    buffer,
    copy_in,
    counter_layout,
    has_bounds,
    mask_of,
    next_slot,
    rows_of,
    store_bits,
    tiles_of,
    up_to_last_seen,
)


@gluon.jit
def _copy_keys(work, tensors, shared, tile: gl.constexpr, has: gl.constexpr):
    """Copy the queries and the gradients of the output, then tile by tile keys, values, and a mask
    and a bias [queries, keys].
    """
    buffers, bars = shared
    HALF: gl.constexpr = tile.rows // 2
    K_BYTES: gl.constexpr = tile.columns * tile.dim_block * 2
    V_BYTES: gl.constexpr = tile.columns * tile.value_block * 2
    TERM_BYTES: gl.constexpr = tile.rows * tile.columns * tile.term_bytes
    ONE: gl.constexpr = one_copy_loop(tile, has)
    mbarrier.expect(bars.own_ready, tile.rows * (tile.dim_block + tile.value_block) * 2)
    for half in gl.static_range(2):
        rows = at_row(work.batch, work.head, work.start + half * HALF, tile)
        copy_in(tensors.query, rows, bars.own_ready, buffers.query.index(half))
        copy_in(tensors.grad_output, rows, bars.own_ready, buffers.grad_output.index(half))
    g = work.head // work.call.sizes.group
    slot = 0
    phase = 0
    for PART in gl.static_range(2 * ONE, 2 + ONE):
        begin, end = loop_of(work.span, work.span.end, PART, has)
        for place in range(begin, end, tile.columns):
            n0 = tile_at(place, work.span, tile.columns, PART, has)
            # Both consumers have read the slot. In the first round this does not wait.
            mbarrier.wait(bars.free.index(slot), phase ^ 1)
            mbarrier.expect(bars.first_ready.index(slot), K_BYTES)
            rows = at_row(work.batch, g, n0, tile)
            copy_in(tensors.key, rows, bars.first_ready.index(slot), buffers.key.index(slot))
            edge = is_edge(place, work.span)
            expect_terms(bars.second_ready.index(slot), edge, V_BYTES, TERM_BYTES, PART, has)
            copy_in(tensors.value, rows, bars.second_ready.index(slot), buffers.value.index(slot))
            for half in gl.static_range(2):
                at = [work.start + half * HALF, n0]
                ready = bars.second_ready.index(slot)
                copy_terms(tensors, buffers, slot * 2 + half, (at, at), ready, edge, PART, has)
            if has.lists:
                if edge:
                    _, of_bits = slot_at(place, work.span, tile.columns, COLUMNS, True, has)
                    store_bits(buffers.bits, slot * 4, work.span.lists, of_bits, 0, HALF, 4)
                mbarrier.arrive(bars.second_ready.index(slot), count=1)
            slot, phase = next_slot(slot, phase, tile.slots)


@gluon.jit
def _mask_keys(work, shared, tile: gl.constexpr, has: gl.constexpr):
    """Turn a mask or a bias [keys] into bounds, and set masked keys and their values to zero."""
    buffers, bars = shared
    BN: gl.constexpr = tile.columns
    KEYS: gl.constexpr = gl.BlockedLayout([BN // 32], [32], [1], [0])
    mask = mask_of(head_of(work, 0, tile, has))
    ONE: gl.constexpr = one_copy_loop(tile, has)
    slot = 0
    phase = 0
    for PART in gl.static_range(2 * ONE, 2 + ONE):
        begin, end = loop_of(work.span, work.span.end, PART, has)
        for n0 in range(begin, end, BN):
            some = False
            if has_bounds(read_by(PART, has)):
                n0 = tile_at(n0, work.span, BN, PART, has)
                j = n0 + gl.arange(0, BN, layout=KEYS)
                bound = bounds_of_keys(mask, j, work.sequence.length, has)
                some = gl.sum((bound != float("-inf")).to(gl.int32), 0) < BN
            # The keys have arrived, so the slot was free: the previous bounds have been read, too.
            mbarrier.wait(bars.first_ready.index(slot), phase)
            bounds = buffers.first.index(slot)
            if has_bounds(read_by(PART, has)):
                bounds.store(bound)
            if some:
                _set_to_zero(buffers.key.index(slot), bounds, BN, tile.dim_block)
            # The consumers wait for these barriers in every tile, also where nothing is masked.
            mbarrier.arrive(bars.first_masked.index(slot), count=1)
            mbarrier.wait(bars.second_ready.index(slot), phase)
            if some:
                _set_to_zero(buffers.value.index(slot), bounds, BN, tile.value_block)
            mbarrier.arrive(bars.second_masked.index(slot), count=1)
            slot, phase = next_slot(slot, phase, tile.slots)


@gluon.jit
def _set_to_zero(rows, bounds, BN: gl.constexpr, BD: gl.constexpr):
    """Set the rows [BN, BD] of masked keys to zero, 8 at a time."""
    WIDTH: gl.constexpr = min(64, BD)  # columns that a warp holds in registers
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [1, 1], [1, 0])
    for first in gl.static_range(0, BN, 8):
        kept = bounds.slice(first, 8).load(gl.SliceLayout(1, ROWS)) != float("-inf")
        if gl.sum(kept.to(gl.int32), 0) < 8:
            for column in gl.static_range(0, BD, WIDTH):
                part = rows.slice(first, 8).slice(column, WIDTH, dim=1)
                x = part.load(ROWS)
                part.store(gl.where(gl.expand_dims(kept, 1), x, 0.0))
    fence_async_shared()  # makes these stores visible to wgmma and to the next copy


@gluon.jit
def _statistics_of_rows(i, work, has: gl.constexpr):
    """Load the `Statistics` of the queries i. A row past the end has P = 0."""
    exists = i < work.sequence.queries
    peak = 0.0
    place = i
    if has.separate_max:
        peak = gl.expand_dims(gl.load(work.offsets + i * 2, mask=exists, other=0.0), 1)
        place = i * 2 + 1
    offset = gl.load(work.offsets + place, mask=exists, other=float("-inf"))
    delta = gl.load(work.deltas + i, mask=exists, other=0.0)
    return Statistics(peak, gl.expand_dims(offset, 1), gl.expand_dims(delta, 1))


@gluon.jit
def _hide_keys(s, i, n0, j, work, edge, PART: gl.constexpr, has: gl.constexpr):
    """Return the scores [BM / 2, BN] of the queries i and the keys n0 + j, -inf where length and
    band hide the key. PART is that of `RingSpan`.
    """
    last = i * 0 + work.sequence.length - 1
    if has.right:
        last = gl.minimum(i + work.right, last)
    if PART == 0:
        s = gl.where(at_most(j, last - n0), s, float("-inf"))
    elif PART == 2:
        if edge:
            s = gl.where(at_most(j, last - n0), s, float("-inf"))
            if has.left:
                s = gl.where(at_most(j, i + (work.left - 1 - n0)), float("-inf"), s)
    return s


@gluon.constexpr_function
def _part_of(LOOP, has):
    """Return the PART of a loop: without bounds, tiles at edges come last."""
    return LOOP if LOOP == 2 or has.bounds or has.lists else 1 - LOOP


@gluon.jit
def _dq_consumer(
    which: gl.constexpr, work, tensors, shared, DBIAS, tile: gl.constexpr, has: gl.constexpr
):
    """Compute dQ of 64 queries, and the gradient of a bias that is not shared."""
    buffers, bars = shared
    dtype: gl.constexpr = tensors.first.dtype
    HALF: gl.constexpr = tile.rows // 2
    BN: gl.constexpr = tile.columns
    S: gl.constexpr = accumulator(BN)
    O: gl.constexpr = accumulator(tile.dim_block)
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    ONE: gl.constexpr = one_loop(tile, has)
    span, call = work.span, work.call
    i0 = work.start + which * HALF
    i = i0 + gl.arange(0, HALF, layout=gl.SliceLayout(1, S))
    j = gl.arange(0, BN, layout=gl.SliceLayout(0, S))
    statistics = _statistics_of_rows(i, work, has)
    head = head_of(work, 0, tile, has)
    dq = gl.zeros([HALF, tile.dim_block], gl.float32, O)
    none = gl.zeros([HALF, BN], gl.float32, S)
    q, do = buffers.query.index(which), buffers.grad_output.index(which)
    key_ready = bars.first_masked if has_bounds(has) else bars.first_ready
    value_ready = bars.second_masked if has_bounds(has) else bars.second_ready
    mbarrier.wait(bars.own_ready, 0)
    mbarrier.wait(key_ready.index(0), 0, pred=span.lo < span.hi)
    slot = 0
    phase = 0
    for LOOP in gl.static_range(2 * ONE, 2 + ONE):
        begin, end = loop_of(span, span.end, LOOP, has)
        for n0 in range(begin, end, BN):
            place = n0
            n0 = tile_at(place, span, BN, LOOP, has)
            k = buffers.key.index(slot)
            v = buffers.value.index(slot)
            s = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
            mbarrier.wait(value_ready.index(slot), phase)
            dp = warpgroup_mma(do, v.permute((1, 0)), none, use_acc=False, is_async=True)
            s, dp = warpgroup_mma_wait(1, [s, dp])  # the scores; dP continues
            at = i + (work.sequence.shift - n0)
            bound = s  # stands for what the call lacks; no line reads it
            if has_bounds(read_by(LOOP, has)):
                bound = gl.expand_dims(buffers.first.index(slot).load(gl.SliceLayout(0, S)), 0)
            given = load_terms(s, bound, buffers, slot * 2 + which, S, False, read_by(LOOP, has))
            s, steepness = terms(s, at, j, head.slope, given, call, read_by(LOOP, has))
            if has.mask == 1 and has.bias != 1 and has_bounds(read_by(LOOP, has)):
                s = gl.minimum(s, bound)
            s = masked(s, place, span, buffers, slot * 2 + which, False, LOOP, has)
            if has.lists != 1:
                edge = is_edge(place, span)
                s = _hide_keys(s, i, n0, j, work, edge, _part_of(LOOP, has), has)
            p = probabilities(s, statistics, call, has)
            if has.softcap and not tile.bias_grad:
                p = p * steepness  # only dS uses P
            # Wait for the next keys before waiting for the product: this wait ends a basic block,
            # without which ptxas moves the exponentials behind the product.
            after, after_phase = next_slot(slot, phase, tile.slots)
            last = span.end if has.bounds and LOOP == 1 else span.hi
            mbarrier.wait(key_ready.index(after), after_phase, pred=place + BN < last)
            dp = warpgroup_mma_wait(0, [dp])
            if has.dropout:
                keep = kept_by_dropout(head, i0, n0, HALF, BN, counter_layout(HALF, BN), has)
                dp = gl.where(gl.convert_layout(keep, S), dp, 0.0)
            ds = score_gradient(p, dp, statistics.delta, call.factors.inv_keep, has)
            if tile.bias_grad:
                _store_bias_gradient(ds, i, n0 + j, work, DBIAS)
                if has.softcap:
                    ds = ds * steepness
            dq = warpgroup_mma(gl.convert_layout(ds.to(dtype), P), k, dq, is_async=True)
            dq = warpgroup_mma_wait(0, [dq])
            mbarrier.arrive(bars.free.index(slot), count=1)  # the products have read the slot
            slot = after
            phase = after_phase
    at = at_row(work.batch, work.head, i0, tile)
    store_gradient(dq * call.factors.scale, at, q, tensors.first)
    tma.store_wait(0)  # the program ends after the copy has read its shared memory


@gluon.jit
def _store_bias_gradient(ds, i, j, work, DBIAS):
    """Store dS [BM / 2, BN] of the queries i and the keys j."""
    sizes = work.call.sizes
    row = (work.batch * sizes.heads + work.head) * sizes.queries
    places = gl.expand_dims((row + i) * sizes.keys, 1) + gl.expand_dims(j, 0)
    ok = gl.expand_dims(i < sizes.queries, 1) & gl.expand_dims(j < sizes.keys, 0)
    gl.store(DBIAS + places, ds.to(DBIAS.dtype.element_ty), mask=ok)


@gluon.jit
def _dq_tensors(inputs, DQ, place, all_strides, head, tile: gl.constexpr, has: gl.constexpr):
    """Make the descriptors of a program of dQ. `place` is (b, h, g)."""
    HALF: gl.constexpr = tile.rows // 2
    BN: gl.constexpr = tile.columns
    BD: gl.constexpr = tile.dim_block
    BDV: gl.constexpr = tile.value_block
    b, h, g = place
    dq_strides, do_strides, strides = all_strides
    sequence = head.sequence
    queries = sequence.queries
    exists = gl.maximum(sequence.length, 1)  # a descriptor has at least one row
    q_base = inputs.query + b * strides.query_batch + h * strides.query_head
    do_base = inputs.grad_output + b * do_strides.batch + h * do_strides.head
    dq_base = DQ + b * dq_strides.batch + h * dq_strides.head
    k_base, v_base = locate_keys(inputs, strides, sequence, b, g)
    dq = rows_of(dq_base, queries, dq_strides.row, HALF, tile.dim, BD)
    mask = dq
    bias = dq
    if has.mask == 2:
        mask = rows_of(head.mask, queries, strides.mask_row, HALF, exists, BN)
    if has.bias == 2:
        bias = rows_of(head.bias, queries, strides.bias_row, HALF, exists, BN)
    return Tensors(
        query=rows_of(q_base, queries, strides.query_row, HALF, tile.dim, BD),
        grad_output=rows_of(do_base, queries, do_strides.row, HALF, tile.value_dim, BDV),
        key=rows_of(k_base, exists, strides.key_row, BN, tile.dim, BD),
        value=rows_of(v_base, exists, strides.value_row, BN, tile.value_dim, BDV),
        first=dq,
        second=dq,
        mask=mask,
        bias=bias,
    )


@gluon.jit
def _dq_shared(tensors, tile: gl.constexpr, has: gl.constexpr):
    """Make the shared memory of a program of dQ, and its barriers."""
    dtype: gl.constexpr = tensors.key.dtype
    HALF: gl.constexpr = tile.rows // 2
    k_tiles = tiles_of(dtype, tile.slots, tile.columns, tile.dim_block)
    bounds = k_tiles
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if has_bounds(has):
        bounds = gl.allocate_shared_memory(gl.float32, [tile.slots, tile.columns], FLAT)
    buffers = Buffers(
        query=tiles_of(dtype, 2, HALF, tile.dim_block),
        grad_output=tiles_of(dtype, 2, HALF, tile.value_block),
        key=k_tiles,
        value=tiles_of(dtype, tile.slots, tile.columns, tile.value_block),
        first=bounds,
        second=bounds,
        peak=bounds,
        mask=buffer(tensors.mask, tile.slots * 2) if has.mask == 2 else bounds,
        bias=buffer(tensors.bias, tile.slots * 2) if has.bias == 2 else bounds,
        bits=gl.allocate_shared_memory(gl.int32, [tile.slots * 4, 64], FLAT) if has.lists else 0,
    )
    key_ready = barriers(tile.slots, 1)
    value_ready = barriers(tile.slots, 2 if has.lists else 1)
    bars = Barriers(
        own_ready=barriers(1, 1).index(0),
        first_ready=key_ready,
        second_ready=value_ready,
        free=barriers(tile.slots, 2),
        rows_ready=key_ready,
        rows_free=key_ready,
        first_masked=barriers(tile.slots, 1) if has_bounds(has) else key_ready,
        second_masked=barriers(tile.slots, 1) if has_bounds(has) else value_ready,
    )
    return buffers, bars


@gluon.jit
def hopper_dq_kernel(
    inputs,
    DQ,
    DBIAS,
    OFFSET,
    DELTA,
    optional,
    query_map,
    grad_output_map,
    key_map,
    value_map,
    grad_query_map,
    dq_strides,
    do_strides,
    strides,
    sizes,
    band,
    factors,
    tile: gl.constexpr,
    has: gl.constexpr,
):
    """Compute what `backward_dq_kernel` does and, with `tile.bias_grad`, also DBIAS
    [B, H, Sq, Sk], which is zero where no query sees a key by length, band and the bounds of a
    mask.

    Query, key, value, the gradient of the output and DQ have 16 bits. They, and a mask and a bias
    of queries and keys, are read and written through TMA descriptors, which need addresses and
    strides in multiples of 16 bytes. With `tile.mapped` the descriptors are arguments.
    """
    batch_head, i0, b, h, g = locate_rows(sizes, tile, has)
    sequence = locate_sequence(optional, sizes, b, has)
    call = prepare_call(optional, strides, sizes, band, factors, has)
    all_strides = dq_strides, do_strides, strides
    bounds = load_bounds(optional, strides, b, h, i0 // tile.rows, has)
    sequence = up_to_last_seen(sequence, bounds, has)
    head = locate_head(call, sequence, batch_head, b, h, 0, tile, has)
    if tile.mapped:
        own = query_map, grad_output_map, key_map, value_map, grad_query_map, grad_query_map
        tensors = Tensors(*own, key_map, key_map)
    else:
        tensors = _dq_tensors(inputs, DQ, (b, h, g), all_strides, head, tile, has)
    shared = _dq_shared(tensors, tile, has)
    fence_async_shared()  # makes the barriers visible to the copies
    lo, hi = keys_of_rows(i0, i0 + tile.rows, sequence.length, sequence.shift, band, tile, has)
    begin, end = unmasked_tiles(i0, sequence, band, tile, has)
    span = within_bounds(RingSpan(lo, begin, end, hi), bounds, call, tile.columns, has, False)
    if has.lists:
        lists = load_lists(optional, strides, sizes, b, h, i0, False)
        span = listed_span(span, lists, call, i0, tile, has, False)
    work = work_of(i0, span, (b, h), (OFFSET, DELTA), band, call, sequence, has)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    if has_bounds(has):
        gl.warp_specialize(
            [
                (_dq_consumer, (FIRST, work, tensors, shared, DBIAS, tile, has)),
                (_dq_consumer, (SECOND, work, tensors, shared, DBIAS, tile, has)),
                (_copy_keys, (work, tensors, shared, tile, has)),
                (_mask_keys, (work, shared, tile, has)),
            ],
            [4, 1, 1],
            [232, 24, 48],
        )
    else:
        gl.warp_specialize(
            [
                (_dq_consumer, (FIRST, work, tensors, shared, DBIAS, tile, has)),
                (_dq_consumer, (SECOND, work, tensors, shared, DBIAS, tile, has)),
                (_copy_keys, (work, tensors, shared, tile, has)),
            ],
            [4, 1],
            [240, 24],
        )
