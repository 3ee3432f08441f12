"""The backward of attention for up to 512 queries and keys on Hopper (sm_90), in Gluon: dQ, dK and
dV of a head by one program, as in short_backward.py. `fastformer tune` measures it for calls with a
mask of keys or lengths, causality and dropout.

    copies       One warp copies by TMA: 128 keys and values at a time, and for each such tile the
                 queries and the gradients of the output, 64 rows at a time, into a ring of slots.
    consumers    Two groups of four warps own 64 of the keys each. A group computes dK and dV of its
                 keys in registers, and writes its dS of a tile of queries to shared memory. The
                 groups take turns to multiply the dS of both groups with the keys: one adds to dQ
                 of the even tiles, the other to dQ of the odd tiles.
    dQ           stays in shared memory, in float32, until all keys are done. Each element belongs
                 to one thread: no addition is atomic.

A program computes several heads, one after the other, with TMA descriptors that the host makes.
benchmarks/proof/gluon_simulator.py runs the kernel on a CPU and finds accesses that no barrier
orders.
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

from ..common import LOG2E
from .hopper_backward import at_most, score_gradient
from .hopper_dkdv import with_signs
from .hopper_parts import accumulator, barriers, copy_in, copy_out, like, next_slot, tiles_of
from .scores import first_row, locate_head, locate_sequence, prepare_call


class _Tensors(NamedTuple):
    """TMA descriptors of the rows of all heads, [batch, heads, rows, D]."""

    query: Any
    grad_output: Any
    key: Any
    value: Any
    grad_key: Any
    grad_value: Any


class _Buffers(NamedTuple):
    """Shared memory."""

    query: Any  # [slots, 64, BD]
    grad_output: Any  # [slots, 64, BDV]
    key: Any  # [2, 64, BD]; in the end the gradient
    value: Any  # [2, 64, BDV]; in the end the gradient
    ds: Any  # dS^T of each consumer, [2, 64 keys, 64 queries]
    dq: Any  # [tiles, 64, BD] in float32
    offset: Any  # P = 2^(s + offset), [pairs of tiles, 128]
    delta: Any  # the same


class _Barriers(NamedTuple):
    """mbarriers; each ends a phase after a number of arrivals, given here. A `ready` says that the
    buffer is full, a `free` that its readers are done with it.
    """

    keys_ready: Any  # 1: the copies of keys and values
    # 2: the consumers, before they store gradients in the place of keys, or the next head's rows.
    keys_read: Any
    keys_free: Any  # 2: the consumers, which have stored the gradients
    rows_ready: Any  # 2: the consumers, each with the offsets and deltas of every second pair
    query_ready: Any  # 1 for each slot: the copies
    grad_ready: Any  # 1 for each slot: the copies of the gradients of the output
    free: Any  # 2 for each slot: the consumers
    ds_ready: Any  # 2: the consumers
    ds_free: Any  # 1: the consumer whose turn it was


class _Work(NamedTuple):
    """What a program computes."""

    inputs: Any
    saved: Any
    grads: Any
    layouts: Any
    call: Any
    heads: Any  # of all sequences


@gluon.jit
def _rounds(work):
    """Return how many heads a program computes."""
    return gl.cdiv(work.heads - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def _locate(n, work, tile: gl.constexpr, has: gl.constexpr):
    """Return (b H + h, b, h, `Head`) of the n-th head of a program."""
    sizes = work.call.sizes
    batch_head = gl.program_id(0) + n * gl.num_programs(0)
    b = (batch_head // sizes.heads).to(gl.int64)
    h = (batch_head % sizes.heads).to(gl.int64)
    sequence = locate_sequence(work.call.optional, sizes, b, has)
    return batch_head, b, h, locate_head(work.call, sequence, batch_head, b, h, 0, tile, has)


@gluon.jit
def _pairs_of(n0, head, tile: gl.constexpr, has: gl.constexpr):
    """Return (first, end): the pairs of tiles of queries that see keys from n0 on."""
    sequence = head.sequence
    end = gl.cdiv(sequence.queries, 2 * tile.rows)
    first = 0
    if has.right:
        first = gl.maximum(n0 - sequence.shift - head.call.band.right, 0) // (2 * tile.rows)
    return gl.where(n0 < sequence.length, gl.minimum(first, end), end), end


@gluon.jit
def _copies(tensors, shared, work, tile: gl.constexpr, has: gl.constexpr):
    """Copy each tile of keys and values, and for it the queries and the gradients of the output."""
    buffers, bars = shared
    BM: gl.constexpr = tile.rows
    HALF: gl.constexpr = tile.columns // 2
    slot = 0
    phase = 0
    own = 1
    for n in range(_rounds(work)):
        _, b, h, head = _locate(n, work, tile, has)
        b, h = b.to(gl.int32), h.to(gl.int32)
        for n0 in range(0, work.call.sizes.keys, tile.columns):
            mbarrier.wait(bars.keys_free, own)  # in the first round it is
            own ^= 1
            mbarrier.expect(bars.keys_ready, tile.columns * (tile.dim_block + tile.value_block) * 2)
            for half in gl.static_range(2):
                at = [b, h, n0 + half * HALF, 0]
                copy_in(tensors.key, at, bars.keys_ready, buffers.key.index(half))
                copy_in(tensors.value, at, bars.keys_ready, buffers.value.index(half))
            first, end = _pairs_of(n0, head, tile, has)
            for part in range(2 * first, 2 * end):
                at = [b, h, part * BM, 0]
                query_ready, grad_ready = bars.query_ready.index(slot), bars.grad_ready.index(slot)
                mbarrier.wait(bars.free.index(slot), phase ^ 1)
                mbarrier.expect(query_ready, BM * tile.dim_block * 2)
                copy_in(tensors.query, at, query_ready, buffers.query.index(slot))
                mbarrier.expect(grad_ready, BM * tile.value_block * 2)
                copy_in(tensors.grad_output, at, grad_ready, buffers.grad_output.index(slot))
                slot, phase = next_slot(slot, phase, tile.slots)


@gluon.jit
def _prepare(
    which: gl.constexpr, place, buffers, work, tile: gl.constexpr, has: gl.constexpr,
    HAS_DLSE: gl.constexpr,
):  # fmt: skip
    """Compute offset and delta of every second pair of tiles, and set dQ of every second tile to
    zero.
    """
    N: gl.constexpr = 2 * tile.rows
    BLOCK: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    batch_head, b, h, head = place
    sequence, saved = head.sequence, work.saved
    layout = work.layouts.output
    output, output_row = saved.output + b * layout.batch + h * layout.head, layout.row
    layout = work.layouts.grad_output
    grad = work.inputs.grad_output + b * layout.batch + h * layout.head
    row = first_row(batch_head, h, sequence, work.call.sizes, has)
    pairs = gl.cdiv(sequence.queries, N)
    d = gl.expand_dims(gl.arange(0, tile.value_block, layout=gl.SliceLayout(0, BLOCK)), 0)
    for pair in range(which, pairs, 2):
        i = pair * N + gl.arange(0, N, layout=gl.SliceLayout(1, BLOCK))
        r, exists = gl.expand_dims(i, 1), i < sequence.queries
        ok = (r < sequence.queries) & (d < tile.value_dim)
        o = gl.load(output + (r * output_row + d), mask=ok, other=0.0)
        do = gl.load(grad + (r * layout.row + d), mask=ok, other=0.0)
        lse = gl.load(saved.lse + (row + i), mask=exists, other=0.0)
        delta = gl.sum(o.to(gl.float32) * do.to(gl.float32), 1)
        empty = lse == float("-inf")  # all scores are -inf: any finite offset gives P = 0
        if HAS_DLSE:
            dlse = gl.load(saved.grad_lse + (row + i), mask=exists, other=0.0)
            delta -= gl.where(empty, 0.0, dlse)
        buffers.offset.index(pair).store(gl.where(empty, 0.0, lse * -LOG2E))
        buffers.delta.index(pair).store(delta)
    zero = gl.zeros([tile.rows, tile.dim_block], gl.float32, accumulator(tile.dim_block))
    for part in range(which, pairs * 2, 2):
        buffers.dq.index(part).store(zero)


@gluon.jit
def _without_hidden(x, ok):
    """Set hidden rows of x, in shared memory, to zero, because they may be NaN."""
    BLOCK: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    seen = gl.expand_dims(gl.convert_layout(ok, gl.SliceLayout(1, BLOCK)), 1)
    x.store(gl.where(seen, x.load(BLOCK), 0.0))


@gluon.jit
def _hide_keys(s, keys, i0, n0, head, tile: gl.constexpr, has: gl.constexpr):
    """Return the scores [keys, queries], -inf where the key is hidden from all queries, or where
    the band hides it. `keys` is what `_own_keys` returns.
    """
    j, ok, cut = keys
    if cut:
        s = gl.where(gl.expand_dims(ok, 1), s, float("-inf"))
    if has.right:
        last = i0 + head.sequence.shift + head.call.band.right  # the last key of the first query
        if last < n0 + tile.columns - 1:
            r = gl.arange(0, tile.rows, layout=gl.SliceLayout(0, accumulator(tile.rows)))
            s = gl.where(at_most(r, j - (last + 1)), float("-inf"), s)
    return s


@gluon.jit
def _own_keys(
    which: gl.constexpr, n0, head, shared, phase, tile: gl.constexpr, has: gl.constexpr
):  # fmt: skip
    """Wait for the 64 keys that a consumer owns, and set hidden keys to zero. Return (j, ok, cut):
    the keys, which keys are visible, and whether a key is hidden.
    """
    buffers, bars = shared
    HALF: gl.constexpr = tile.columns // 2
    call = head.call
    j = n0 + which * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, accumulator(tile.rows)))
    ok = j < head.sequence.length
    if has.mask == 1:
        mask = head.mask + j * call.strides.mask_column
        ok = ok & (gl.load(mask, mask=j < call.sizes.keys, other=0) != 0)
    cut = gl.sum(gl.where(ok, 0, 1), 0) > 0
    mbarrier.wait(bars.keys_ready, phase)
    if has.mask == 1 or has.lengths:
        if cut:
            _without_hidden(buffers.key.index(which), ok)
            _without_hidden(buffers.value.index(which), ok)
            fence_async_shared()  # the other consumer reads these keys after `ds_ready`
    return j, ok, cut


@gluon.jit
def _add_to_queries(
    which: gl.constexpr, PARITY: gl.constexpr, part, ds, sums, shared, phase, K: gl.constexpr
):
    """Pass dS^T to the consumer whose turn it is: it adds dS k of both consumers to dQ of a tile.
    Wait for the products of dK and dV, `sums`, and return these.
    """
    buffers, bars = shared
    dk, dv = sums
    mbarrier.wait(bars.ds_free, phase ^ 1)
    buffers.ds.index(which).store(ds)
    fence_async_shared()
    mbarrier.arrive(bars.ds_ready, count=1)
    if which == PARITY:
        dq = buffers.dq.index(part).load(K)
        mbarrier.wait(bars.ds_ready, phase)
        for half in gl.static_range(2):
            left = buffers.ds.index(half).permute((1, 0))
            dq = warpgroup_mma(left, buffers.key.index(half), dq, is_async=True)
        dq, dk, dv = warpgroup_mma_wait(0, [dq, dk, dv])
        mbarrier.arrive(bars.ds_free, count=1)
        buffers.dq.index(part).store(dq)
    else:
        dk, dv = warpgroup_mma_wait(0, [dk, dv])
    return dk, dv


@gluon.jit
def _consumer(
    which: gl.constexpr, tensors, shared, work, tile: gl.constexpr, has: gl.constexpr,
    HAS_DLSE: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of 64 keys of each tile, and dQ of every second tile of queries."""
    buffers, bars = shared
    dtype: gl.constexpr = tensors.query.dtype
    BM: gl.constexpr = tile.rows
    HALF: gl.constexpr = tile.columns // 2
    S: gl.constexpr = accumulator(BM)
    K: gl.constexpr = accumulator(tile.dim_block)
    V: gl.constexpr = accumulator(tile.value_block)
    ROWS: gl.constexpr = gl.SliceLayout(0, S)
    none = gl.zeros([HALF, BM], gl.float32, S)
    k, v = buffers.key.index(which), buffers.value.index(which)
    call, factors = work.call, work.call.factors
    slot = 0
    phase = 0
    turn = 0
    own = 0
    for n in range(_rounds(work)):
        place = _locate(n, work, tile, has)
        _, b, h, head = place
        _prepare(which, place, buffers, work, tile, has, HAS_DLSE)
        mbarrier.arrive(bars.rows_ready, count=1)
        mbarrier.wait(bars.rows_ready, n & 1)
        for n0 in range(0, call.sizes.keys, tile.columns):
            keys = _own_keys(which, n0, head, shared, own, tile, has)
            dk = gl.zeros([HALF, tile.dim_block], gl.float32, K)
            dv = gl.zeros([HALF, tile.value_block], gl.float32, V)
            first, end = _pairs_of(n0, head, tile, has)
            for pair in range(first, end):
                for PARITY in gl.static_range(2):
                    part = pair * 2 + PARITY
                    i0 = part * BM
                    q, do = buffers.query.index(slot), buffers.grad_output.index(slot)
                    mbarrier.wait(bars.query_ready.index(slot), phase)
                    s = warpgroup_mma(k, q.permute((1, 0)), none, use_acc=False, is_async=True)
                    mbarrier.wait(bars.grad_ready.index(slot), phase)
                    dp = warpgroup_mma(v, do.permute((1, 0)), none, use_acc=False, is_async=True)
                    offset = buffers.offset.index(pair).slice(PARITY * BM, BM).load(ROWS)
                    s, dp = warpgroup_mma_wait(1, [s, dp])  # the scores; dP continues
                    s = _hide_keys(s, keys, i0, n0, head, tile, has)
                    offset = gl.broadcast(gl.expand_dims(offset, 0), s)[0]
                    p = gl.exp2(gl.fma(s, like(s, call.scale), offset))
                    z = p
                    if has.dropout:
                        p, z = with_signs(p, head, i0, n0 + which * HALF, BM, S, has)
                    z = gl.convert_layout(z.to(dtype), gl.DotOperandLayout(0, V, 2))
                    dv = warpgroup_mma(z, do, dv, is_async=True)
                    delta = buffers.delta.index(pair).slice(PARITY * BM, BM).load(ROWS)
                    dp, dv = warpgroup_mma_wait(1, [dp, dv])  # dP; dV continues
                    if has.dropout:
                        dp = gl.where(p > 0.0, dp, 0.0)
                        p = gl.abs(p)
                    delta = gl.expand_dims(delta, 0)
                    ds = score_gradient(p, dp, delta, factors.inv_keep, has).to(dtype)
                    operand = gl.convert_layout(ds, gl.DotOperandLayout(0, K, 2))
                    dk = warpgroup_mma(operand, q, dk, is_async=True)
                    sums = dk, dv
                    dk, dv = _add_to_queries(which, PARITY, part, ds, sums, shared, turn, K)
                    mbarrier.arrive(bars.free.index(slot), count=1)
                    slot, phase = next_slot(slot, phase, tile.slots)
                    turn ^= 1
            mbarrier.arrive(bars.keys_read, count=1)  # both consumers multiply with these keys
            mbarrier.wait(bars.keys_read, own)
            own ^= 1
            at = [b.to(gl.int32), h.to(gl.int32), n0 + which * HALF, 0]
            _store_keys((dk, dv), (k, v), at, tensors, factors, has)
            mbarrier.arrive(bars.keys_free, count=1)
        _store_queries(which, place, buffers, work, dtype, tile)


@gluon.jit
def _store_keys(gradients, own, at, tensors, factors, has: gl.constexpr):
    """Store dK and dV through the shared memory of the keys and values."""
    dk, dv = gradients
    k, v = own
    if has.dropout:
        dv = dv * factors.inv_keep
    k.store((dk * factors.scale).to(tensors.query.dtype))
    v.store(dv.to(tensors.query.dtype))
    fence_async_shared()  # makes the stores visible to the copies
    copy_out(tensors.grad_key, at, k)
    copy_out(tensors.grad_value, at, v)
    tma.store_wait(0)


@gluon.jit
def _store_queries(
    which: gl.constexpr, place, buffers, work, dtype: gl.constexpr, tile: gl.constexpr
):
    """Store dQ of every second tile of queries."""
    BLOCK: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    _, b, h, head = place
    queries, layout = head.sequence.queries, work.layouts.grad_query
    base = work.grads.query + b * layout.batch + h * layout.head
    d = gl.expand_dims(gl.arange(0, tile.dim_block, layout=gl.SliceLayout(0, BLOCK)), 0)
    for part in range(which, gl.cdiv(queries, 2 * tile.rows) * 2, 2):
        i = part * tile.rows + gl.arange(0, tile.rows, layout=gl.SliceLayout(1, BLOCK))
        i = gl.expand_dims(i, 1)
        dq = (buffers.dq.index(part).load(BLOCK) * work.call.factors.scale).to(dtype)
        gl.store(base + (i * layout.row + d), dq, mask=(i < queries) & (d < tile.dim))


@gluon.jit
def _make_shared(dtype: gl.constexpr, tile: gl.constexpr, PARTS: gl.constexpr):
    """Make the shared memory of a program, and its barriers."""
    HALF: gl.constexpr = tile.columns // 2
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # The lanes of four rows write 32 bytes each, in different banks.
    DQ: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    buffers = _Buffers(
        query=tiles_of(dtype, tile.slots, tile.rows, tile.dim_block),
        grad_output=tiles_of(dtype, tile.slots, tile.rows, tile.value_block),
        key=tiles_of(dtype, 2, HALF, tile.dim_block),
        value=tiles_of(dtype, 2, HALF, tile.value_block),
        ds=tiles_of(dtype, 2, HALF, tile.rows),
        dq=gl.allocate_shared_memory(gl.float32, [PARTS, tile.rows, tile.dim_block], DQ),
        offset=gl.allocate_shared_memory(gl.float32, [PARTS // 2, 2 * tile.rows], FLAT),
        delta=gl.allocate_shared_memory(gl.float32, [PARTS // 2, 2 * tile.rows], FLAT),
    )
    bars = _Barriers(
        keys_ready=barriers(1, 1).index(0),
        keys_read=barriers(1, 2).index(0),
        keys_free=barriers(1, 2).index(0),
        rows_ready=barriers(1, 2).index(0),
        query_ready=barriers(tile.slots, 1),
        grad_ready=barriers(tile.slots, 1),
        free=barriers(tile.slots, 2),
        ds_ready=barriers(1, 2).index(0),
        ds_free=barriers(1, 1).index(0),
    )
    return buffers, bars


@gluon.jit
def hopper_short_kernel(
    inputs,
    saved,
    grads,
    optional,
    query_map,
    grad_output_map,
    key_map,
    value_map,
    grad_key_map,
    grad_value_map,
    layouts,
    strides,
    sizes,
    band,
    factors,
    pairs,
    tile: gl.constexpr,
    has: gl.constexpr,
    PARTS: gl.constexpr,
    HAS_DLSE: gl.constexpr,
):
    """Compute what `tiny_backward_kernel` does, with a mask of keys, for `pairs` heads of at most
    64 PARTS queries. PARTS is even.
    """
    call = prepare_call(optional, strides, sizes, band, factors, has)
    work = _Work(inputs, saved, grads, layouts, call, pairs)
    tensors = _Tensors(query_map, grad_output_map, key_map, value_map, grad_key_map, grad_value_map)
    shared = _make_shared(tensors.query.dtype, tile, PARTS)
    fence_async_shared()  # makes the barriers visible to the copies
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consumer, (FIRST, tensors, shared, work, tile, has, HAS_DLSE)),
            (_consumer, (SECOND, tensors, shared, work, tile, has, HAS_DLSE)),
            (_copies, (tensors, shared, work, tile, has)),
        ],
        [4, 1],
        [240, 24],
    )
