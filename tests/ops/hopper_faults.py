"""Faults to plant in the forward for Hopper: by name a function, what to replace in its text, once,
and a call of test_hopper.py that shows it. The simulator reports each, or the result is wrong.
"""

PLAIN, CAUSAL, MASKED, EMPTY = "plain", "causal", "mask", "lengths"

FAULTS = {
    # --------------------------------------------------------------------------------- waits
    "no wait for the queries": (
        "_consumer",
        "    mbarrier.wait(bars.query_ready, 0)",
        "    pass",
        PLAIN,
    ),
    "no wait for the first keys": (
        "_consumer",
        "    mbarrier.wait(bars.key_ready.index(0), 0)\n",
        "",
        PLAIN,
    ),
    "no wait for the second keys": (
        "_consumer",
        "    mbarrier.wait(bars.key_ready.index(slot), phase, pred=work.tiles > 1)\n",
        "",
        PLAIN,
    ),
    "no wait for the next keys": (
        "_consumer",
        "            mbarrier.wait(bars.key_ready.index(slot), phase, pred=t + 1 < work.tiles)\n",
        "",
        PLAIN,
    ),
    "a wait for keys past the last": ("_consumer", "pred=t + 1 < work.tiles", "pred=True", PLAIN),
    "a wait for second keys of one tile": ("_consumer", "pred=work.tiles > 1", "pred=True", EMPTY),
    "no wait for the values": (
        "_consumer",
        "            mbarrier.wait(value_ready.index(before), before_phase)\n",
        "",
        PLAIN,
    ),
    "no wait for the last values": (
        "_consumer",
        "    mbarrier.wait(value_ready.index(before), before_phase)\n    weights",
        "    weights",
        PLAIN,
    ),
    "no wait for the scores of the first tile": (
        "_consumer",
        "    s = warpgroup_mma_wait(0, [s])\n",
        "",
        PLAIN,
    ),
    "a wait that leaves the scores": (
        "_consumer",
        "warpgroup_mma_wait(1, [s, acc])",
        "warpgroup_mma_wait(2, [s, acc])",
        PLAIN,
    ),
    "no wait for the output of a tile": (
        "_consumer",
        "            acc = warpgroup_mma_wait(0, [acc])\n",
        "",
        PLAIN,
    ),
    "no wait for the output of the last tile": (
        "_consumer",
        "    acc = warpgroup_mma_wait(0, [acc])\n    output",
        "    output",
        PLAIN,
    ),
    "the copies wait for no keys": (
        "_copies",
        "        mbarrier.wait(bars.key_free.index(slot), phase ^ 1)\n",
        "",
        PLAIN,
    ),
    "the copies wait for no values": (
        "_copies",
        "        mbarrier.wait(bars.value_free.index(slot), phase ^ 1)\n",
        "",
        PLAIN,
    ),
    "no wait for the bounds": (
        "_weights",
        "        mbarrier.wait(bars.bounds_ready.index(slot), phase)\n",
        "",
        MASKED,
    ),
    "bounds over those that are read": (
        "_mask",
        "        mbarrier.wait(bars.bounds_free.index(slot), phase ^ 1)\n",
        "",
        MASKED,
    ),
    "zeros over values that are copied": (
        "_mask",
        "        mbarrier.wait(bars.value_ready.index(slot), phase)\n",
        "",
        MASKED,
    ),
    "values that nobody has masked": (
        "_consumer",
        "bars.value_masked if has.mask == 1 else bars.value_ready",
        "bars.value_ready",
        MASKED,
    ),
    "no wait for the store": ("_store", "    tma.store_wait(0)", "    pass", PLAIN),
    # -------------------------------------------------------------------------------- phases
    "phase of the free keys": (
        "_copies",
        "bars.key_free.index(slot), phase ^ 1",
        "bars.key_free.index(slot), phase",
        PLAIN,
    ),
    "phase of the free values": (
        "_copies",
        "bars.value_free.index(slot), phase ^ 1",
        "bars.value_free.index(slot), phase",
        PLAIN,
    ),
    "phase of the queries": ("_consumer", "bars.query_ready, 0", "bars.query_ready, 1", PLAIN),
    "phase of the first keys": (
        "_consumer",
        "bars.key_ready.index(0), 0",
        "bars.key_ready.index(0), 1",
        PLAIN,
    ),
    "phase of the values": (
        "_consumer",
        "            mbarrier.wait(value_ready.index(before), before_phase)\n",
        "            mbarrier.wait(value_ready.index(before), before_phase ^ 1)\n",
        PLAIN,
    ),
    "phase of the values of a slot before": (
        "_consumer",
        "            before_phase = phase\n",
        "",
        PLAIN,
    ),
    "phase after the wrap": ("_next", "phase ^ wraps.to(gl.int32)", "phase", PLAIN),
    "no wrap": ("_next", "gl.where(wraps, 0, slot)", "slot", PLAIN),
    "phase of the bounds": (
        "_weights",
        "bars.bounds_ready.index(slot), phase",
        "bars.bounds_ready.index(slot), phase ^ 1",
        MASKED,
    ),
    "phase of the free bounds": (
        "_mask",
        "bars.bounds_free.index(slot), phase ^ 1",
        "bars.bounds_free.index(slot), phase",
        MASKED,
    ),
    "both consumers wait": ("_consumer", "beat ^ (1 - which)", "beat", PLAIN),
    "the turn of one phase": ("_consumer", "            beat = beat ^ 1\n", "", PLAIN),
    # ------------------------------------------------------------------- arrivals and releases
    "one release of the keys": (
        "_shared",
        "key_free=_barriers(SLOTS, 2)",
        "key_free=_barriers(SLOTS, 1)",
        PLAIN,
    ),
    "one release of the values": (
        "_shared",
        "value_free=_barriers(SLOTS, 2)",
        "value_free=_barriers(SLOTS, 1)",
        PLAIN,
    ),
    "three releases of the values": (
        "_shared",
        "value_free=_barriers(SLOTS, 2)",
        "value_free=_barriers(SLOTS, 3)",
        PLAIN,
    ),
    "one release of the bounds": (
        "_shared",
        "bounds_free=_barriers(SLOTS, 2)",
        "bounds_free=_barriers(SLOTS, 1)",
        MASKED,
    ),
    "two arrivals of the queries": (
        "_shared",
        "query_ready=_barriers(1, 1)",
        "query_ready=_barriers(1, 2)",
        PLAIN,
    ),
    "barriers that nobody initialises": (
        "_barriers",
        "gl.static_range(count)",
        "gl.static_range(count - 1)",
        PLAIN,
    ),
    "no release of the first keys": (
        "_consumer",
        "    mbarrier.arrive(bars.key_free.index(0), count=1)",
        "    pass",
        PLAIN,
    ),
    "no release of the keys": (
        "_consumer",
        "            mbarrier.arrive(bars.key_free.index(slot), count=1)\n",
        "",
        PLAIN,
    ),
    "no release of the values": (
        "_consumer",
        "            mbarrier.arrive(bars.value_free.index(done), count=1)",
        "            pass",
        PLAIN,
    ),
    "no release of the bounds": (
        "_weights",
        "        mbarrier.arrive(bars.bounds_free.index(slot), count=1)\n",
        "",
        MASKED,
    ),
    "the first keys released too early": (
        "_consumer",
        "    s = warpgroup_mma_wait(0, [s])\n"
        "    mbarrier.arrive(bars.key_free.index(0), count=1)  # the product has read them\n",
        "    mbarrier.arrive(bars.key_free.index(0), count=1)\n"
        "    s = warpgroup_mma_wait(0, [s])\n",
        PLAIN,
    ),
    "keys released too early": (
        "_consumer",
        "            s, acc = warpgroup_mma_wait(1, [s, acc])"
        "  # the scores; the other product goes on\n"
        "            mbarrier.arrive(bars.key_free.index(slot), count=1)\n",
        "            mbarrier.arrive(bars.key_free.index(slot), count=1)\n"
        "            s, acc = warpgroup_mma_wait(1, [s, acc])\n",
        PLAIN,
    ),
    "values released too early": (
        "_consumer",
        "            acc = warpgroup_mma_wait(0, [acc])\n"
        "            mbarrier.arrive(bars.value_free.index(done), count=1)",
        "            mbarrier.arrive(bars.value_free.index(done), count=1)\n"
        "            acc = warpgroup_mma_wait(0, [acc])",
        PLAIN,
    ),
    "bounds released too early": (
        "_weights",
        "        bound = buffers.bounds.index(slot).load(gl.SliceLayout(0, S))\n"
        "        mbarrier.arrive(bars.bounds_free.index(slot), count=1)\n",
        "        mbarrier.arrive(bars.bounds_free.index(slot), count=1)\n"
        "        bound = buffers.bounds.index(slot).load(gl.SliceLayout(0, S))\n",
        MASKED,
    ),
    "bounds given too early": (
        "_mask",
        "        buffers.bounds.index(slot).store(bound)\n"
        "        mbarrier.arrive(bars.bounds_ready.index(slot), count=1)\n",
        "        mbarrier.arrive(bars.bounds_ready.index(slot), count=1)\n"
        "        buffers.bounds.index(slot).store(bound)\n",
        MASKED,
    ),
    "the other turn": (
        "_consumer",
        "arrive(bars.turn.index(1 - which)",
        "arrive(bars.turn.index(which)",
        PLAIN,
    ),
    "no turn": (
        "_consumer",
        "            mbarrier.arrive(bars.turn.index(1 - which), count=1)\n",
        "",
        PLAIN,
    ),
    # --------------------------------------------------------------------------------- slots
    "the slot of the released keys": (
        "_consumer",
        "arrive(bars.key_free.index(slot)",
        "arrive(bars.key_free.index(before)",
        PLAIN,
    ),
    "the slot of the released values": (
        "_consumer",
        "value_free.index(done)",
        "value_free.index(before)",
        PLAIN,
    ),
    "the slot of the next values": (
        "_consumer",
        "value_free.index(done)",
        "value_free.index(slot)",
        PLAIN,
    ),
    "the slot of the values": ("_consumer", "            before = slot\n", "", PLAIN),
    "keys of the tile before": (
        "_consumer",
        "buffers.key.index(slot)",
        "buffers.key.index(before)",
        PLAIN,
    ),
    "keys into the slot of the values": (
        "_copies",
        "bars.key_ready.index(slot), buffers.key",
        "bars.value_ready.index(slot), buffers.key",
        PLAIN,
    ),
    "the queries of the other consumer": (
        "_consumer",
        "buffers.query.index(which)",
        "buffers.query.index(1 - which)",
        PLAIN,
    ),
    "the output over the queries of the other": (
        "_consumer",
        "buffers.output.index(which)",
        "buffers.output.index(1 - which)",
        PLAIN,
    ),
    # --------------------------------------------------------------------------------- bytes
    "half of the bytes of the values": ("_copies", "value_block * 2", "value_block", PLAIN),
    "twice the bytes of the keys": (
        "_copies",
        "columns * tile.dim_block * 2",
        "columns * tile.dim_block * 4",
        PLAIN,
    ),
    "half of the queries": ("_copies", "gl.static_range(2)", "gl.static_range(1)", PLAIN),
    "keys that nobody expects": (
        "_copies",
        "        mbarrier.expect(bars.key_ready.index(slot), K_BYTES)\n",
        "",
        PLAIN,
    ),
    # --------------------------------------------------------------------------------- fences
    "no fence before the store": (
        "_store",
        "    fence_async_shared()  # the store to shared memory was a plain one, the copy is not\n",
        "",
        PLAIN,
    ),
    "no fence behind the zeros": (
        "_mask",
        "            fence_async_shared()"
        "  # plain stores, which wgmma and the next copy have to see\n",
        "",
        MASKED,
    ),
    "the fence behind the copy": (
        "_store",
        "    fence_async_shared()  # the store to shared memory was a plain one, the copy is not\n"
        "    _copy_out(target, [i0, 0], buffer)\n",
        "    _copy_out(target, [i0, 0], buffer)\n    fence_async_shared()\n",
        PLAIN,
    ),
    # --------------------------------------------------------------------------------- tiles
    "a tile that is not copied": ("_copies", "range(work.tiles)", "range(work.tiles - 1)", PLAIN),
    "a tile that nobody reads": ("_copies", "range(work.tiles)", "range(work.tiles + 1)", PLAIN),
    "a tile without a mask": ("_mask", "range(work.tiles)", "range(work.tiles - 1)", MASKED),
    "the first key of the copies": ("_copies", "origin + _first_key", "_first_key", EMPTY),
    "no tile at all": (
        "_tiles",
        "gl.maximum(gl.cdiv(hi, tile.columns), 1)",
        "gl.cdiv(hi, tile.columns)",
        EMPTY,
    ),
    "a descriptor of no rows": (
        "hopper_forward_kernel",
        "exists = gl.maximum(length, 1)",
        "exists = length",
        EMPTY,
    ),
    "an edge that is none": ("_tiles", "tiles - whole // tile.columns - 1", "0", CAUSAL),
    "the key past the diagonal": (
        "_weights",
        "gl.expand_dims(j, 0) <= gl",
        "gl.expand_dims(j, 0) <= 1 + gl",
        CAUSAL,
    ),
    "the length": ("_weights", "last = i * 0 + work.last", "last = i * 0 + work.last + 1", EMPTY),
    "values of masked keys stay": (
        "_mask",
        "gl.expand_dims(kept, 1), x, 0.0",
        "gl.expand_dims(kept, 1), x, x",
        MASKED,
    ),
    "no mask": (
        "_weights",
        "        s = gl.minimum(s, gl.expand_dims(bound, 0))",
        "        s = s",
        MASKED,
    ),
    # --------------------------------------------------------------------------------- softmax
    "no rescaling": (
        "_consumer",
        "            acc = acc"
        " * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, O)), 1)\n",
        "",
        PLAIN,
    ),
    "a sum that is not rescaled": ("_weights", "l = l * rescale + gl", "l = l + gl", PLAIN),
    "the rows of LSE": ("_store", "gl.store(LSE + i, lse", "gl.store(LSE + i + 1, lse", PLAIN),
    "a row without a key": ("_store", "gl.where(empty, 1.0, l)", "l", EMPTY),
}

# Faults that change nothing, and why.
HARMLESS = {
    "keys released too early": """\
The slot's next keys are copied only after the copies have waited for the release of the values of
the tile before the one that is computed (they copy the values of a tile before the keys of the
next), and a consumer releases these values after it has waited for all of its products.""",
    "the slot of the next values": """\
The copies fill the slots in order. With two slots it is the same slot. With n > 2 slots, what is
released behind tile t is the slot of tile t + 1. So the copies of the values of tiles k n and
k n + 1 wait for tiles k n - 1 and k n, which is longer than they need to. The slots of the n - 2
tiles that follow are released too early, but are filled after these, when the products of all tiles
before k n are done.""",
}
