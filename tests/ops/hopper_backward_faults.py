"""Faults to plant in the backward for Hopper: by name the kernel, a function, what to replace in
its text, once, and a call of test_hopper_backward.py that shows it. The simulator reports each, or
the result is wrong.
"""

PLAIN, CAUSAL, MASKED, EMPTY, DROPPED = "plain", "causal", "mask", "lengths", "dropout"
LOW, WINDOW = "mask, low scores", "window"
DQ, DKDV = "dq", "dkdv"


def without(line):
    return line, line[: len(line) - len(line.lstrip())] + "pass\n"


FAULTS = {
    # ------------------------------------------------------------------------------ dQ: waits
    "dQ: no wait for the queries": (
        DQ,
        "_dq_consumer",
        *without("    mbarrier.wait(bars.own_ready, 0)\n"),
        PLAIN,
    ),
    "dQ: no wait for the first keys": (
        DQ,
        "_dq_consumer",
        *without("    mbarrier.wait(key_ready.index(0), 0, pred=span.lo < span.hi)\n"),
        PLAIN,
    ),
    "dQ: a wait for first keys of no tile": (
        DQ,
        "_dq_consumer",
        "span.lo < span.hi",
        "True",
        EMPTY,
    ),
    "dQ: no wait for the next keys": (
        DQ,
        "_dq_consumer",
        *without(
            "            mbarrier.wait("
            "key_ready.index(after), after_phase, pred=n0 + BN < span.hi)\n"
        ),
        PLAIN,
    ),
    "dQ: a wait for keys past the last": (
        DQ,
        "_dq_consumer",
        "pred=n0 + BN < span.hi",
        "pred=True",
        PLAIN,
    ),
    "dQ: no wait for the values": (
        DQ,
        "_dq_consumer",
        *without("            mbarrier.wait(value_ready.index(slot), phase)\n"),
        PLAIN,
    ),
    "dQ: a wait that leaves the scores": (
        DQ,
        "_dq_consumer",
        "warpgroup_mma_wait(1, [s, dp])",
        "warpgroup_mma_wait(2, [s, dp])",
        PLAIN,
    ),
    "dQ: no wait for dP": (
        DQ,
        "_dq_consumer",
        *without("            dp = warpgroup_mma_wait(0, [dp])\n"),
        PLAIN,
    ),
    "dQ: no wait for the sum": (
        DQ,
        "_dq_consumer",
        *without("            dq = warpgroup_mma_wait(0, [dq])\n"),
        PLAIN,
    ),
    "dQ: the copies wait for no keys": (
        DQ,
        "_copy_keys",
        *without("        mbarrier.wait(bars.free.index(slot), phase ^ 1)\n"),
        PLAIN,
    ),
    "dQ: no wait for the store": (
        DQ,
        "_dq_consumer",
        "    tma.store_wait(0)",
        "    pass",
        PLAIN,
    ),
    # --------------------------------------------------------- dQ: phases, releases and slots
    "dQ: phase of the queries": (
        DQ,
        "_dq_consumer",
        "bars.own_ready, 0",
        "bars.own_ready, 1",
        PLAIN,
    ),
    "dQ: phase of the values": (
        DQ,
        "_dq_consumer",
        "value_ready.index(slot), phase",
        "value_ready.index(slot), phase ^ 1",
        PLAIN,
    ),
    "dQ: phase of the next keys": (
        DQ,
        "_dq_consumer",
        "key_ready.index(after), after_phase",
        "key_ready.index(after), phase",
        PLAIN,
    ),
    "dQ: phase of the free keys": (
        DQ,
        "_copy_keys",
        "bars.free.index(slot), phase ^ 1",
        "bars.free.index(slot), phase",
        PLAIN,
    ),
    "dQ: phase after the wrap": (
        DQ,
        "_dq_consumer",
        *without("            phase = after_phase\n"),
        PLAIN,
    ),
    "dQ: one release of the keys": (
        DQ,
        "_dq_shared",
        "        free=barriers(tile.slots, 2)",
        "        free=barriers(tile.slots, 1)",
        PLAIN,
    ),
    "dQ: keys released too early": (
        DQ,
        "_dq_consumer",
        "            dq = warpgroup_mma_wait(0, [dq])\n"
        "            mbarrier.arrive(bars.free.index(slot), count=1)",
        "            mbarrier.arrive(bars.free.index(slot), count=1)\n"
        "            dq = warpgroup_mma_wait(0, [dq])",
        PLAIN,
    ),
    "dQ: the slot of the released keys": (
        DQ,
        "_dq_consumer",
        "bars.free.index(slot)",
        "bars.free.index(after)",
        PLAIN,
    ),
    "dQ: the queries of the other consumer": (
        DQ,
        "_dq_consumer",
        "buffers.query.index(which)",
        "buffers.query.index(1 - which)",
        PLAIN,
    ),
    "dQ: half of the bytes of the values": (
        DQ,
        "_copy_keys",
        "V_BYTES: gl.constexpr = tile.columns * tile.value_block * 2",
        "V_BYTES: gl.constexpr = tile.columns * tile.value_block",
        PLAIN,
    ),
    "dQ: no fence before the store": (
        DQ,
        "store_gradient",
        "    fence_async_shared()",
        "    pass",
        PLAIN,
    ),
    # --------------------------------------------------------------------------- dQ: the mask
    "dQ: zeros over keys that are copied": (
        DQ,
        "_mask_keys",
        *without("        mbarrier.wait(bars.first_ready.index(slot), phase)\n"),
        MASKED,
    ),
    "dQ: zeros over values that are copied": (
        DQ,
        "_mask_keys",
        *without("        mbarrier.wait(bars.second_ready.index(slot), phase)\n"),
        MASKED,
    ),
    "dQ: keys that nobody has masked": (
        DQ,
        "_dq_consumer",
        "bars.first_masked if has.mask == 1 else bars.first_ready",
        "bars.first_ready",
        MASKED,
    ),
    "dQ: values that nobody has masked": (
        DQ,
        "_dq_consumer",
        "bars.second_masked if has.mask == 1 else bars.second_ready",
        "bars.second_ready",
        MASKED,
    ),
    "dQ: no fence behind the zeros": (
        DQ,
        "_set_to_zero",
        "    fence_async_shared()",
        "    pass",
        MASKED,
    ),
    "dQ: bounds behind what waits for them": (
        DQ,
        "_mask_keys",
        '        bounds.store(gl.where(seen, float("inf"), float("-inf")))\n',
        "",
        MASKED,
    ),
    "dQ: bounds over those that are read": (
        DQ,
        "_mask_keys",
        "        mbarrier.wait(bars.first_ready.index(slot), phase)\n"
        "        bounds = buffers.first.index(slot)\n"
        '        bounds.store(gl.where(seen, float("inf"), float("-inf")))\n',
        "        bounds = buffers.first.index(slot)\n"
        '        bounds.store(gl.where(seen, float("inf"), float("-inf")))\n'
        "        mbarrier.wait(bars.first_ready.index(slot), phase)\n",
        MASKED,
    ),
    "dQ: keys given before their bounds": (
        DQ,
        "_mask_keys",
        '        bounds.store(gl.where(seen, float("inf"), float("-inf")))\n',
        "        mbarrier.arrive(bars.first_masked.index(slot), count=1)\n"
        '        bounds.store(gl.where(seen, float("inf"), float("-inf")))\n',
        MASKED,
    ),
    "dQ: two arrivals of the mask": (
        DQ,
        "_dq_shared",
        "first_masked=barriers(tile.slots, 1)",
        "first_masked=barriers(tile.slots, 2)",
        MASKED,
    ),
    "dQ: a tile without a mask": (
        DQ,
        "_mask_keys",
        "range(work.span.lo, work.span.hi, BN)",
        "range(work.span.lo, work.span.hi - BN, BN)",
        MASKED,
    ),
    "dQ: a tile that is not copied": (
        DQ,
        "_copy_keys",
        "range(work.span.lo, work.span.hi, tile.columns)",
        "range(work.span.lo, work.span.hi - tile.columns, tile.columns)",
        PLAIN,
    ),
    "dQ: no mask": (
        DQ,
        "_dq_consumer",
        "s = gl.minimum(s, gl.expand_dims(bound, 0))",
        "s = s",
        LOW,
    ),
    "dQ: masked keys stay": (
        DQ,
        "_mask_keys",
        *without("            _set_to_zero(buffers.key.index(slot), bounds, BN, tile.dim_block)\n"),
        MASKED,
    ),
    # -------------------------------------------------------------------------- dQ: numbers
    "dQ: a descriptor of no rows": (
        DQ,
        "_dq_tensors",
        "exists = gl.maximum(sequence.length, 1)",
        "exists = sequence.length",
        EMPTY,
    ),
    "dQ: the key past the diagonal": (
        DQ,
        "_hide_keys",
        "last = gl.minimum(i + work.right, last)",
        "last = gl.minimum(i + work.right + 1, last)",
        CAUSAL,
    ),
    "dQ: the bits of a lane": (DQ, "at_most", "columns & 6,", "columns & 2,", CAUSAL),
    "dQ: dP is not rescaled": (
        DQ,
        "score_gradient",
        "like(dp, inv_keep)",
        "like(dp, 1.0)",
        DROPPED,
    ),
    "dQ: other words": (
        DQ,
        "kept_by_dropout",
        "i = i0 // 2 + gl",
        "i = i0 // 2 + 8 + gl",
        DROPPED,
    ),
    # ------------------------------------------------------------------- dK and dV: waits
    "dK, dV: no wait for the keys": (
        DKDV,
        "_dkdv_consumer",
        *without("    mbarrier.wait(bars.own_ready, 0)\n"),
        PLAIN,
    ),
    "dK, dV: no wait for the queries": (
        DKDV,
        "_dkdv_consumer",
        *without("                mbarrier.wait(bars.first_ready.index(slot), phase)\n"),
        PLAIN,
    ),
    "dK, dV: no wait for dO": (
        DKDV,
        "_dkdv_consumer",
        *without("                mbarrier.wait(bars.second_ready.index(slot), phase)\n"),
        PLAIN,
    ),
    "dK, dV: no wait for the statistics": (
        DKDV,
        "_dkdv_consumer",
        *without("                mbarrier.wait(bars.rows_ready.index(slot), phase)\n"),
        PLAIN,
    ),
    "dK, dV: dP used while it runs": (
        DKDV,
        "_dkdv_consumer",
        "warpgroup_mma_wait(1, [dp, dv])",
        "warpgroup_mma_wait(2, [dp, dv])",
        PLAIN,
    ),
    "dK, dV: no wait for the sums": (
        DKDV,
        "_dkdv_consumer",
        *without("                dk, dv = warpgroup_mma_wait(0, [dk, dv])\n"),
        PLAIN,
    ),
    "dK, dV: a wait that leaves dK": (
        DKDV,
        "_dkdv_consumer",
        "warpgroup_mma_wait(0, [dk, dv])",
        "warpgroup_mma_wait(1, [dk, dv])",
        PLAIN,
    ),
    "dK, dV: the copies wait for nobody": (
        DKDV,
        "_copy_queries",
        *without("            mbarrier.wait(bars.free.index(slot), phase ^ 1)\n"),
        PLAIN,
    ),
    "dK, dV: statistics over those that are read": (
        DKDV,
        "_copy_statistics",
        *without("            mbarrier.wait(bars.rows_free.index(slot), phase ^ 1)\n"),
        PLAIN,
    ),
    "dK, dV: no wait for the stores": (
        DKDV,
        "_dkdv_consumer",
        "    tma.store_wait(0)",
        "    pass",
        PLAIN,
    ),
    # ------------------------------------------------- dK and dV: phases, releases and slots
    "dK, dV: phase of the queries": (
        DKDV,
        "_dkdv_consumer",
        "bars.first_ready.index(slot), phase",
        "bars.first_ready.index(slot), phase ^ 1",
        PLAIN,
    ),
    "dK, dV: phase of the free slots": (
        DKDV,
        "_copy_queries",
        "bars.free.index(slot), phase ^ 1",
        "bars.free.index(slot), phase",
        PLAIN,
    ),
    "dK, dV: a ring that begins again with each head": (
        DKDV,
        "_copy_queries",
        "            at = [member, i0, 0]",
        "            slot = slot * 1 if i0 > 0 else 0\n            at = [member, i0, 0]",
        PLAIN,
    ),
    "dK, dV: phase after the wrap": (
        DKDV,
        "next_slot",
        "phase ^ wraps.to(gl.int32)",
        "phase",
        PLAIN,
    ),
    "dK, dV: no wrap": (DKDV, "next_slot", "gl.where(wraps, 0, slot)", "slot", PLAIN),
    "dK, dV: one release": (
        DKDV,
        "_dkdv_shared",
        "        free=barriers(tile.slots, 2)",
        "        free=barriers(tile.slots, 1)",
        PLAIN,
    ),
    "dK, dV: one release of the statistics": (
        DKDV,
        "_dkdv_shared",
        "rows_free=barriers(tile.slots, 2)",
        "rows_free=barriers(tile.slots, 1)",
        PLAIN,
    ),
    "dK, dV: two arrivals of the statistics": (
        DKDV,
        "_dkdv_shared",
        "rows_ready=barriers(tile.slots, 1)",
        "rows_ready=barriers(tile.slots, 2)",
        PLAIN,
    ),
    "dK, dV: no release of the statistics": (
        DKDV,
        "_dkdv_consumer",
        *without("                mbarrier.arrive(bars.rows_free.index(slot), count=1)\n"),
        PLAIN,
    ),
    "dK, dV: queries released too early": (
        DKDV,
        "_dkdv_consumer",
        "                dk, dv = warpgroup_mma_wait(0, [dk, dv])\n"
        "                mbarrier.arrive(bars.free.index(slot), count=1)",
        "                mbarrier.arrive(bars.free.index(slot), count=1)\n"
        "                dk, dv = warpgroup_mma_wait(0, [dk, dv])",
        PLAIN,
    ),
    "dK, dV: statistics released before delta is read": (
        DKDV,
        "_dkdv_consumer",
        "                delta = gl.expand_dims(buffers.second.index(slot).load(ROWS), 0)\n"
        "                mbarrier.arrive(bars.rows_free.index(slot), count=1)\n",
        "                mbarrier.arrive(bars.rows_free.index(slot), count=1)\n"
        "                delta = gl.expand_dims(buffers.second.index(slot).load(ROWS), 0)\n",
        PLAIN,
    ),
    "dK, dV: statistics given too early": (
        DKDV,
        "_copy_statistics",
        "            buffers.second.index(slot).store(delta)\n"
        "            mbarrier.arrive(bars.rows_ready.index(slot), count=1)\n",
        "            mbarrier.arrive(bars.rows_ready.index(slot), count=1)\n"
        "            buffers.second.index(slot).store(delta)\n",
        PLAIN,
    ),
    "dK, dV: the values of the other consumer": (
        DKDV,
        "_dkdv_consumer",
        "buffers.value.index(which)",
        "buffers.value.index(1 - which)",
        PLAIN,
    ),
    "dK, dV: queries that count as dO": (
        DKDV,
        "_copy_queries",
        "tensors.query, at, q_ready",
        "tensors.query, at, do_ready",
        PLAIN,
    ),
    "dK, dV: queries that nobody expects": (
        DKDV,
        "_copy_queries",
        *without("            mbarrier.expect(q_ready, Q_BYTES)\n"),
        PLAIN,
    ),
    "dK, dV: no fence before the stores": (
        DKDV,
        "store_gradient",
        "    fence_async_shared()",
        "    pass",
        PLAIN,
    ),
    "dK, dV: dK over the values": (
        DKDV,
        "_dkdv_consumer",
        "store_gradient(dk, n0, k, tensors.first)",
        "store_gradient(dk, n0, v, tensors.first)",
        PLAIN,
    ),
    # ------------------------------------------------------------------ dK and dV: numbers
    "dK, dV: the rows of one head": (
        DKDV,
        "_copy_statistics",
        "row = member * work.call.sizes.query_rows",
        "row = 0",
        PLAIN,
    ),
    "dK, dV: the query before the diagonal": (
        DKDV,
        "_hide_queries",
        "j - (work.right + 1 + i0)",
        "j - (work.right + 2 + i0)",
        CAUSAL,
    ),
    "dK, dV: an edge that is none": (
        DKDV,
        "_queries_of_keys",
        "first + tile.columns - 1",
        "first",
        CAUSAL,
    ),
    "dK, dV: gradients of hidden keys": (
        DKDV,
        "_seen_keys",
        "gl.where(gl.expand_dims(ok, 1), x, 0.0)",
        "x",
        MASKED,
    ),
    "dK, dV: gradients past the length": (
        DKDV,
        "_seen_keys",
        "ok = j < work.sequence.length",
        "ok = j <= work.sequence.length",
        EMPTY,
    ),
    "dK, dV: a mask that is not read": (DKDV, "_seen_keys", "has.mask == 1", "False", MASKED),
    "dK, dV: what is removed stays in dV": (
        DKDV,
        "_with_signs",
        "gl.maximum(p, 0.0, propagate_nan=tl.PropagateNan.ALL)",
        "gl.abs(p)",
        DROPPED,
    ),
    "dK, dV: what is removed stays in dK": (
        DKDV,
        "_dkdv_consumer",
        "dp = gl.where(p > 0.0, dp, 0.0)",
        "dp = dp",
        DROPPED,
    ),
    "dK, dV: the sign stays in dK": (
        DKDV,
        "_dkdv_consumer",
        "p = gl.abs(p)",
        "p = p",
        DROPPED,
    ),
    "dK, dV: words that are not turned": (
        DKDV,
        "_with_signs",
        "keep.permute((1, 0))",
        "keep",
        DROPPED,
    ),
    "dK, dV: the words of another head": (
        DKDV,
        "head_of",
        "h = work.head + member",
        "h = work.head + 1 - member",
        DROPPED,
    ),
    # ------------------------------------------------- windows, ALiBi and the softcap, packed
    "dQ: the key before the window": (
        DQ,
        "_hide_keys",
        "i + (work.left - 1 - n0)",
        "i + (work.left - 2 - n0)",
        WINDOW,
    ),
    "dK, dV: the query behind the window": (
        DKDV,
        "_hide_queries",
        "j - (work.left + i0)",
        "j - (work.left - 1 + i0)",
        WINDOW,
    ),
    "dK, dV: tiles behind the window": (
        DKDV,
        "_queries_of_keys",
        "hi = gl.minimum(last + tile.columns, hi)",
        "hi = gl.minimum(last + 1, hi)",
        WINDOW,
    ),
    "dK, dV: an edge of the window that is none": (
        DKDV,
        "_queries_of_keys",
        "gl.maximum(last + 1, 0)",
        "gl.maximum(last + tile.columns, 0)",
        WINDOW,
    ),
    "dQ: the derivative of the softcap": (
        DQ,
        "_dq_consumer",
        "p = p * steepness",
        "p = p",
        WINDOW,
    ),
    "dK, dV: the derivative of the softcap": (
        DKDV,
        "_dkdv_consumer",
        "p = p * steepness",
        "p = p",
        WINDOW,
    ),
    "dQ: the distance": (
        DQ,
        "_dq_consumer",
        "at = i + (work.sequence.shift - n0)",
        "at = i - n0",
        WINDOW,
    ),
    "dK, dV: the distance": (
        DKDV,
        "_dkdv_consumer",
        "at = j - (work.sequence.shift + i0)",
        "at = j - i0",
        WINDOW,
    ),
    "dK, dV: no maximum of its own": (
        DKDV,
        "_copy_statistics",
        *without("                buffers.peak.index(slot).store(peak)\n"),
        WINDOW,
    ),
}
