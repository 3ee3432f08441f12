"""dK and dV of attention on Hopper in Gluon: see backward.py."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..bounds import load_bounds_of_keys
from ..lists import ROWS as MASK_ROWS
from ..lists import load_lists
from ..scores import (
    Features,
    clamp,
    first_key,
    locate_block,
    locate_head,
    locate_keys,
    locate_sequence,
    prepare_call,
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
    copy_in,
    has_bounds,
    has_terms,
    mask_of,
    next_slot,
    rows_of,
    store_bits,
    tiles_of,
)

HALF = gl.constexpr(64)  # keys of a consumer


@gluon.constexpr_function
def _transposed_counter_layout(BM, BN):
    """Return the layout of dropout's counters [BM / 2, BN / 2] in which a thread computes the words
    of its own scores [BN, BM], which are transposed.
    """
    rows = [[1, 0]] + [[8 << i, 0] for i in range(8) if 8 << i < BM // 2]
    lanes, warps = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16]]
    return gl.DistributedLinearLayout(rows, lanes, warps, [], [BM // 2, BN // 2])


@gluon.constexpr_function
def _walk_of(has):
    """Return the features that decide over which queries a program loops. A mask or a bias [keys]
    does not: it hides a key from all queries or from none.
    """
    known = {name: getattr(has, name) for name in Features._fields}
    return has if 2 in (has.mask, has.bias) else Features(**{**known, "bounds": 0})


@gluon.jit
def _span_of_head(work, member, tile: gl.constexpr, has: gl.constexpr):
    """Return the `RingSpan` of a head, within the bounds of its mask."""
    span = work.span
    call, queries = work.call, work.sequence.queries
    h = work.head + member
    if has.lists:
        own = gl.minimum(work.start, call.sizes.keys - 1)  # the last consumer may own no key
        lists = load_lists(call.optional, call.strides, call.sizes, work.batch, h, own, True)
        return listed_span(span, lists, call, work.start, tile, has, True)
    elif has.bounds:
        bounds = load_bounds_of_keys(call, work.batch, h, work.start, queries, tile, has)
        if has_terms(has):
            return within_bounds(span, bounds, call, tile.rows, has, True)
        else:
            hi = gl.where(bounds.last > 0, span.hi, span.lo)
            begin = gl.minimum(span.begin, hi) if has.right else span.begin
            return RingSpan(span.lo, begin, gl.minimum(span.end, hi), hi)
    else:
        return span


@gluon.jit
def _copy_queries(work, tensors, shared, tile: gl.constexpr, has: gl.constexpr):
    """Copy keys and values. Then copy for each head that shares them, tile by tile, the queries,
    the gradients of the output, a mask and a bias [queries, keys], and bits of a block mask.
    """
    buffers, bars = shared
    HALVES: gl.constexpr = tile.columns // HALF
    Q_BYTES: gl.constexpr = tile.rows * tile.dim_block * 2
    DO_BYTES: gl.constexpr = tile.rows * tile.value_block * 2
    TERM_BYTES: gl.constexpr = tile.rows * tile.columns * tile.term_bytes
    strides = work.call.strides
    g = work.head // work.call.sizes.group
    mbarrier.expect(bars.own_ready, tile.columns * (tile.dim_block + tile.value_block) * 2)
    for half in gl.static_range(HALVES):
        rows = at_row(work.batch, g, work.start + half * HALF, tile)
        copy_in(tensors.key, rows, bars.own_ready, buffers.key.index(half))
        copy_in(tensors.value, rows, bars.own_ready, buffers.value.index(half))
    WALK: gl.constexpr = _walk_of(has)
    ONE: gl.constexpr = one_copy_loop(tile, WALK)
    slot = 0
    phase = 0
    for member in range(work.call.sizes.group):
        span = _span_of_head(work, member, tile, has)
        for PART in gl.static_range(2 * ONE, 2 + ONE):
            begin, end = loop_of(span, span.begin, PART, WALK)
            for place in range(begin, end, tile.rows):
                i0 = tile_at(place, span, tile.rows, PART, WALK, MASK_ROWS)
                if tile.mapped:
                    at = at_row(work.batch, work.head + member, i0, tile)
                else:
                    at = member, i0, 0
                q_ready, do_ready = bars.first_ready.index(slot), bars.second_ready.index(slot)
                # Both consumers have read the slot. In the first round this does not wait.
                mbarrier.wait(bars.free.index(slot), phase ^ 1)
                mbarrier.expect(q_ready, Q_BYTES)
                copy_in(tensors.query, at, q_ready, buffers.query.index(slot))
                edge = is_edge(place, span)
                expect_terms(do_ready, edge, DO_BYTES, TERM_BYTES, PART, WALK)
                copy_in(tensors.grad_output, at, do_ready, buffers.grad_output.index(slot))
                for half in gl.static_range(HALVES):
                    n0 = work.start + half * HALF
                    mask_at = [_own_or_shared(member, strides.mask_head), i0, n0]
                    bias_at = [_own_or_shared(member, strides.bias_head), i0, n0]
                    part = slot * HALVES + half
                    copy_terms(
                        tensors, buffers, part, (mask_at, bias_at), do_ready, edge, PART, WALK
                    )
                if has.lists:
                    if edge:
                        _, of_bits = slot_at(place, span, tile.rows, MASK_ROWS, True, has)
                        first = i0 % MASK_ROWS
                        store_bits(buffers.bits, slot * 2, span.lists, of_bits, first, tile.rows, 2)
                    mbarrier.arrive(do_ready, count=1)
                slot, phase = next_slot(slot, phase, tile.slots)


@gluon.jit
def _own_or_shared(x, head_stride):
    """Return x where each head has a mask or a bias of its own, and 0 where heads share it."""
    return gl.where(head_stride == 0, 0, x)


@gluon.jit
def _copy_statistics(work, shared, tile: gl.constexpr, has: gl.constexpr):
    """Load the offset and delta of each row into shared memory. A row past the end has P = 0."""
    buffers, bars = shared
    queries = work.sequence.queries
    ROWS: gl.constexpr = gl.BlockedLayout([tile.rows // 32], [32], [1], [0])
    WALK: gl.constexpr = _walk_of(has)
    ONE: gl.constexpr = one_copy_loop(tile, WALK)
    slot = 0
    phase = 0
    for member in range(work.call.sizes.group):
        row = member * work.call.sizes.query_rows
        span = _span_of_head(work, member, tile, has)
        for PART in gl.static_range(2 * ONE, 2 + ONE):
            begin, end = loop_of(span, span.begin, PART, WALK)
            for i0 in range(begin, end, tile.rows):
                i0 = tile_at(i0, span, tile.rows, PART, WALK, MASK_ROWS)
                i = i0 + gl.arange(0, tile.rows, layout=ROWS)
                places = row + i
                peak = 0.0
                if has.separate_max:
                    peak = gl.load(work.offsets + places * 2, mask=i < queries, other=0.0)
                    places = places * 2 + 1
                offset = gl.load(work.offsets + places, mask=i < queries, other=float("-inf"))
                delta = gl.load(work.deltas + row + i, mask=i < queries, other=0.0)
                # Both consumers have read the previous rows.
                mbarrier.wait(bars.rows_free.index(slot), phase ^ 1)
                if has.separate_max:
                    buffers.peak.index(slot).store(peak)
                buffers.first.index(slot).store(offset)
                buffers.second.index(slot).store(delta)
                mbarrier.arrive(bars.rows_ready.index(slot), count=1)
                slot, phase = next_slot(slot, phase, tile.slots)


@gluon.jit
def _hide_queries(s, j, i0, r, work, PART: gl.constexpr, has: gl.constexpr):
    """Return the scores [BN / 2, BM] of the keys j and the queries i0 + r, -inf where the band
    hides the key. PART is that of `RingSpan`.
    """
    # The last query before those that see the key, and the last one that sees it.
    before, last = j - (work.right + 1 + i0), j - (work.left + i0)
    if PART == 0 and has.right:
        s = gl.where(at_most(r, before), float("-inf"), s)
    elif PART == 2 and (has.left or has.right):
        if is_edge(i0, work.span):
            if has.right:
                s = gl.where(at_most(r, before), float("-inf"), s)
            if has.left:
                s = gl.where(at_most(r, last), s, float("-inf"))
    return s


@gluon.jit
def _with_signs(p, head, i0, n0, BM: gl.constexpr, S: gl.constexpr, has: gl.constexpr):
    """Return P with a negative sign where dropout removes it, so that the mask takes no registers,
    and P after dropout.
    """
    keep = kept_by_dropout(head, i0, n0, BM, HALF, _transposed_counter_layout(BM, HALF), has)
    p = gl.where(gl.convert_layout(keep.permute((1, 0)), S), p, -p)
    return p, gl.maximum(p, 0.0, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _dkdv_consumer(
    which: gl.constexpr, work, tensors, shared, DBIAS, tile: gl.constexpr, has: gl.constexpr
):
    """Compute dK and dV of 64 keys, and the gradient of a bias of keys. Tiles that an edge cuts
    come first.
    """
    buffers, bars = shared
    dtype: gl.constexpr = tensors.first.dtype
    BM: gl.constexpr = tile.rows
    HALVES: gl.constexpr = tile.columns // HALF
    S: gl.constexpr = accumulator(BM)
    K: gl.constexpr = accumulator(tile.dim_block)
    V: gl.constexpr = accumulator(tile.value_block)
    ROWS: gl.constexpr = gl.SliceLayout(0, S)
    WALK: gl.constexpr = _walk_of(has)
    n0 = work.start + which * HALF
    j = n0 + gl.arange(0, HALF, layout=gl.SliceLayout(1, S))
    r = gl.arange(0, BM, layout=ROWS)
    dk = gl.zeros([HALF, tile.dim_block], gl.float32, K)
    dv = gl.zeros([HALF, tile.value_block], gl.float32, V)
    none = gl.zeros([HALF, BM], gl.float32, S)
    call, k, v = work.call, buffers.key.index(which), buffers.value.index(which)
    mbarrier.wait(bars.own_ready, 0)
    slot = 0
    phase = 0
    for member in range(call.sizes.group):
        head, span = head_of(work, member, tile, has), _span_of_head(work, member, tile, has)
        bound = bounds_of_keys(mask_of(head), j, work.sequence.length, has)
        dbias = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, S))
        for PART in gl.static_range(2 * one_loop(tile, has), 2 + one_loop(tile, has)):
            begin, end = loop_of(span, span.begin, PART, WALK)
            for place in range(begin, end, BM):
                i0 = tile_at(place, span, tile.rows, PART, WALK, MASK_ROWS)
                q, do = buffers.query.index(slot), buffers.grad_output.index(slot)
                mbarrier.wait(bars.first_ready.index(slot), phase)
                s = warpgroup_mma(k, q.permute((1, 0)), none, use_acc=False, is_async=True)
                mbarrier.wait(bars.second_ready.index(slot), phase)
                dp = warpgroup_mma(v, do.permute((1, 0)), none, use_acc=False, is_async=True)
                mbarrier.wait(bars.rows_ready.index(slot), phase)
                peak = gl.expand_dims(buffers.peak.index(slot).load(ROWS), 0)
                offset = gl.expand_dims(buffers.first.index(slot).load(ROWS), 0)
                s, dp = warpgroup_mma_wait(1, [s, dp])  # the scores; dP continues
                at = j - (work.sequence.shift + i0)
                bias, part = gl.expand_dims(bound, 1), slot * HALVES + which
                given = load_terms(s, bias, buffers, part, S, True, read_by(PART, WALK))
                s, steepness = terms(s, at, r, head.slope, given, call, read_by(PART, WALK))
                s = masked(s, place, span, buffers, part, True, PART, WALK)
                if has.lists != 1:
                    s = _hide_queries(s, j, i0, r, work, PART, has)
                p = probabilities(s, Statistics(peak, offset, offset), call, has)
                z = p
                if has.dropout:
                    p, z = _with_signs(p, head, i0, n0, BM, S, has)
                z = gl.convert_layout(z.to(dtype), gl.DotOperandLayout(0, V, 2))
                dv = warpgroup_mma(z, do, dv, is_async=True)
                if has.softcap and not has.key_grad:
                    p = p * steepness
                delta = gl.expand_dims(buffers.second.index(slot).load(ROWS), 0)
                mbarrier.arrive(bars.rows_free.index(slot), count=1)
                dp, dv = warpgroup_mma_wait(1, [dp, dv])  # dP; dV continues
                if has.dropout:
                    dp = gl.where(p > 0.0, dp, 0.0)
                    p = gl.abs(p)
                ds = score_gradient(p, dp, delta, call.factors.inv_keep, has)
                if has.key_grad:
                    dbias += gl.sum(ds, 1)
                    if has.softcap:
                        ds = ds * steepness
                z = gl.convert_layout(ds.to(dtype), gl.DotOperandLayout(0, K, 2))
                dk = warpgroup_mma(z, q, dk, is_async=True)
                dk, dv = warpgroup_mma_wait(0, [dk, dv])
                mbarrier.arrive(bars.free.index(slot), count=1)  # the products have read the slot
                slot, phase = next_slot(slot, phase, tile.slots)
        if has.key_grad:
            _store_bias_gradient(dbias, bound, j, member, work, DBIAS, has)
    dk = _seen_keys(dk * call.factors.scale, n0, work, tile, has, K)
    at = at_row(work.batch, work.head // call.sizes.group, n0, tile)
    store_gradient(dk, at, k, tensors.first)
    if has.dropout:
        dv = dv * call.factors.inv_keep
    store_gradient(_seen_keys(dv, n0, work, tile, has, V), at, v, tensors.second)
    tma.store_wait(0)  # the program ends after the copies have read its shared memory


@gluon.jit
def _seen_keys(x, n0, work, tile: gl.constexpr, has: gl.constexpr, LAYOUT: gl.constexpr):
    """Return a gradient [BN / 2, D] of the keys at n0, zero for hidden keys, which may be NaN."""
    j = n0 + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    ok = j < work.sequence.length
    if has_bounds(has):
        seen = j < 0
        for member in range(work.call.sizes.group):
            mask = mask_of(head_of(work, member, tile, has))
            bound = bounds_of_keys(mask, j, work.sequence.length, has)
            seen = seen | (bound != float("-inf"))
        ok = ok & seen
    return gl.where(gl.expand_dims(ok, 1), x, 0.0)


@gluon.jit
def _store_bias_gradient(dbias, bound, j, member, work, DBIAS, has: gl.constexpr):
    """Store the sums of dS [BN / 2] of the keys j and one head; zero for hidden keys, where a sum
    may be NaN.
    """
    sizes = work.call.sizes
    h = work.head + member
    batch_head = work.batch * sizes.heads + h
    seen = (j < work.sequence.length) & (bound != float("-inf"))
    place = DBIAS + first_key(batch_head, h, work.sequence, sizes, has)
    gl.store(place + j, gl.where(seen, dbias, 0.0), mask=j < sizes.keys)


@gluon.jit
def _queries_of_keys(n0, sequence, band, tile: gl.constexpr, has: gl.constexpr):
    """Return the queries for the keys at n0. The length is not an edge: the gradients of
    keys past the length are set to zero at the end.
    """
    lo = 0
    begin = 0
    if has.right:
        first = n0 - sequence.shift - band.right  # the first query that sees the first key
        lo = gl.maximum(first, 0) // tile.rows * tile.rows
        begin = gl.cdiv(gl.maximum(first + tile.columns - 1, 0), tile.rows) * tile.rows
    hi = sequence.queries
    last = n0 - sequence.shift + band.left  # the last query that sees the first key
    if has.left:
        hi = gl.minimum(last + tile.columns, hi)
    hi = gl.where(n0 < sequence.length, gl.maximum(lo, hi), lo)
    begin = clamp(begin, lo, hi)
    end = hi
    if has.left:
        end = clamp(gl.maximum(last + 1, 0) // tile.rows * tile.rows, begin, hi)
    return RingSpan(lo, begin, end, hi)


@gluon.jit
def _rows_of_heads(base, shape, strides, B: gl.constexpr, D, BD: gl.constexpr):
    """Make the TMA descriptor of matrices [heads, rows, D] that are copied in tiles [1, B, BD].
    `shape` and `strides` are for heads and rows.
    """
    dtype: gl.constexpr = base.dtype.element_ty
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, B, BD], dtype)
    heads, rows = shape
    head, row = strides
    return tma.make_tensor_descriptor(base, [heads, rows, D], [head, row, 1], [1, B, BD], LAYOUT)


@gluon.jit
def _terms_of_heads(base, shape, keys, strides, BM: gl.constexpr, BN: gl.constexpr):
    """Make the same for a mask or a bias [queries, keys], which heads may share."""
    heads, rows = shape
    head, row = strides
    shape = gl.where(head == 0, 1, heads), rows
    return _rows_of_heads(base, shape, (gl.where(head == 0, row, head), row), BM, keys, BN)


@gluon.jit
def _tiles_of_heads(tensor, count: gl.constexpr):
    """Allocate `count` tiles of a tensor that has heads."""
    rows: gl.constexpr = tensor.block_shape[1]
    columns: gl.constexpr = tensor.block_shape[2]
    return gl.allocate_shared_memory(tensor.dtype, [count, 1, rows, columns], tensor.layout)


@gluon.jit
def _dkdv_tensors(
    inputs, outputs, place, all_strides, sizes, head, tile: gl.constexpr, has: gl.constexpr
):
    """Make the descriptors of a program of dK and dV. `place` is (b, g), and `head` the first one
    that shares the keys.
    """
    BM: gl.constexpr = tile.rows
    BD: gl.constexpr = tile.dim_block
    BDV: gl.constexpr = tile.value_block
    b, g = place
    h = g * sizes.group
    DK, DV = outputs
    dk_strides, dv_strides, do_strides, strides = all_strides
    sequence = head.sequence
    q_base = inputs.query + b * strides.query_batch + h * strides.query_head
    do_base = inputs.grad_output + b * do_strides.batch + h * do_strides.head
    k_base, v_base = locate_keys(inputs, strides, sequence, b, g)
    dk_base = DK + b * dk_strides.batch + g * dk_strides.head
    dv_base = DV + b * dv_strides.batch + g * dv_strides.head
    rows = sizes.group, sequence.queries
    exists = gl.maximum(sequence.length, 1)  # a descriptor has at least one row
    q_steps = strides.query_head, strides.query_row
    do_steps = do_strides.head, do_strides.row
    query = _rows_of_heads(q_base, rows, q_steps, BM, tile.dim, BD)
    mask = query
    bias = query
    if has.mask == 2:
        mask_steps = strides.mask_head, strides.mask_row
        mask = _terms_of_heads(head.mask, rows, exists, mask_steps, BM, HALF)
    if has.bias == 2:
        bias_steps = strides.bias_head, strides.bias_row
        bias = _terms_of_heads(head.bias, rows, exists, bias_steps, BM, HALF)
    return Tensors(
        query=query,
        grad_output=_rows_of_heads(do_base, rows, do_steps, BM, tile.value_dim, BDV),
        key=rows_of(k_base, exists, strides.key_row, HALF, tile.dim, BD),
        value=rows_of(v_base, exists, strides.value_row, HALF, tile.value_dim, BDV),
        first=rows_of(dk_base, sizes.keys, dk_strides.row, HALF, tile.dim, BD),
        second=rows_of(dv_base, sizes.keys, dv_strides.row, HALF, tile.value_dim, BDV),
        mask=mask,
        bias=bias,
    )


@gluon.jit
def _dkdv_shared(tensors, tile: gl.constexpr, has: gl.constexpr):
    """Make the shared memory of a program of dK and dV, and its barriers."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = tensors.key.dtype
    HALVES: gl.constexpr = tile.columns // HALF
    offsets = gl.allocate_shared_memory(gl.float32, [tile.slots, tile.rows], FLAT)
    peaks = offsets
    if has.separate_max:
        peaks = gl.allocate_shared_memory(gl.float32, [tile.slots, tile.rows], FLAT)
    buffers = Buffers(
        query=tiles_of(dtype, tile.slots, tile.rows, tile.dim_block),
        grad_output=tiles_of(dtype, tile.slots, tile.rows, tile.value_block),
        key=tiles_of(dtype, HALVES, HALF, tile.dim_block),
        value=tiles_of(dtype, HALVES, HALF, tile.value_block),
        first=offsets,
        second=gl.allocate_shared_memory(gl.float32, [tile.slots, tile.rows], FLAT),
        peak=peaks,
        mask=_tiles_of_heads(tensors.mask, tile.slots * HALVES) if has.mask == 2 else offsets,
        bias=_tiles_of_heads(tensors.bias, tile.slots * HALVES) if has.bias == 2 else offsets,
        bits=gl.allocate_shared_memory(gl.int32, [tile.slots * 2, tile.rows], FLAT)
        if has.lists
        else 0,
    )
    q_ready = barriers(tile.slots, 1)
    bars = Barriers(
        own_ready=barriers(1, 1).index(0),
        first_ready=q_ready,
        second_ready=barriers(tile.slots, 2 if has.lists else 1),
        free=barriers(tile.slots, HALVES),
        rows_ready=barriers(tile.slots, 1),
        rows_free=barriers(tile.slots, HALVES),
        first_masked=q_ready,
        second_masked=q_ready,
    )
    return buffers, bars


@gluon.jit
def hopper_dkdv_kernel(
    inputs,
    DK,
    DV,
    DBIAS,
    OFFSET,
    DELTA,
    optional,
    query_map,
    grad_output_map,
    key_map,
    value_map,
    grad_key_map,
    grad_value_map,
    dk_strides,
    dv_strides,
    do_strides,
    strides,
    sizes,
    band,
    factors,
    tile: gl.constexpr,
    has: gl.constexpr,
):
    """Compute what `backward_dkdv_kernel` does, for 128 keys of a program. With a mask [keys] and
    no bias [keys], the heads that share keys also share the mask. With a block mask, each consumer
    has lists, a ring and copies of its own.
    """
    pair, block = locate_block(gl.cdiv(sizes.keys, 2 * HALF), has, False)
    n0 = block * 2 * HALF
    groups = sizes.heads // sizes.group
    b = (pair // groups).to(gl.int64)
    g = (pair % groups).to(gl.int64)
    h = g * sizes.group
    sequence = locate_sequence(optional, sizes, b, has)
    call = prepare_call(optional, strides, sizes, band, factors, has)
    all_strides = dk_strides, dv_strides, do_strides, strides
    batch_head = (b * sizes.heads + h).to(gl.int32)
    head = locate_head(call, sequence, batch_head, b, h, 0, tile, has)
    if tile.mapped:
        own = query_map, grad_output_map, key_map, value_map, grad_key_map, grad_value_map
        tensors = Tensors(*own, key_map, key_map)
    else:
        tensors = _dkdv_tensors(inputs, (DK, DV), (b, g), all_strides, sizes, head, tile, has)
    shared = _dkdv_shared(tensors, tile, has)
    fence_async_shared()  # makes the barriers visible to the copies
    span = _queries_of_keys(n0, sequence, band, tile, has)
    work = work_of(n0, span, (b, h), (OFFSET, DELTA), band, call, sequence, has)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    if has.lists:
        span = _queries_of_keys(n0 + HALF, sequence, band, tile, has)
        other = work_of(n0 + HALF, span, (b, h), (OFFSET, DELTA), band, call, sequence, has)
        apart = _dkdv_shared(tensors, tile, has)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_dkdv_consumer, (FIRST, work, tensors, shared, DBIAS, tile, has)),
                (_dkdv_consumer, (FIRST, other, tensors, apart, DBIAS, tile, has)),
                (_copy_queries, (work, tensors, shared, tile, has)),
                (_copy_queries, (other, tensors, apart, tile, has)),
                (_copy_statistics, (work, shared, tile, has)),
                (_copy_statistics, (other, apart, tile, has)),
            ],
            [4, 1, 1, 1, 1],
            [240, 24, 24, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_dkdv_consumer, (FIRST, work, tensors, shared, DBIAS, tile, has)),
                (_dkdv_consumer, (SECOND, work, tensors, shared, DBIAS, tile, has)),
                (_copy_queries, (work, tensors, shared, tile, has)),
                (_copy_statistics, (work, shared, tile, has)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )
