"""Faults to plant in the forward for Hopper: by name a function, what to replace in its text, once,
and a call of test_hopper.py that shows it. The simulator reports each, or the result is wrong.
"""

PLAIN, CAUSAL, MASKED, EMPTY = "plain", "causal", "mask", "lengths"
WINDOW, SPANS, HOLES, BIASED, THREE = "window", "spans", "holes", "bias", "three"
WIDE_VALUES, ONE_KEY, PACKED = "mask, wide values", "mask of one key", "packed"
PERSISTENT, PERSISTENT_MASK = "persistent", "persistent, mask"

FAULTS = {
    # --------------------------------------------------------------------------------- waits
    "no wait for the queries": (
        "_consume_block",
        "    mbarrier.wait(bars.query_ready, block.phase)",
        "    pass",
        PLAIN,
    ),
    "no wait for the first keys": (
        "_consume_block",
        "    mbarrier.wait(bars.key_ready.index(slot), phase)\n",
        "",
        PLAIN,
    ),
    "no wait for the second keys": (
        "_consume_block",
        "    mbarrier.wait(bars.key_ready.index(slot), phase, pred=walk.first + 1 < walk.end)\n",
        "",
        PLAIN,
    ),
    "no wait for the next keys": (
        "_consume_block",
        "            mbarrier.wait(bars.key_ready.index(slot), phase, pred=t + 1 < walk.end)\n",
        "",
        PLAIN,
    ),
    "a wait for keys past the last": (
        "_consume_block",
        "pred=t + 1 < walk.end",
        "pred=True",
        PLAIN,
    ),
    "a wait for second keys of one tile": (
        "_consume_block",
        "pred=walk.first + 1 < walk.end",
        "pred=True",
        EMPTY,
    ),
    "no wait for the values": (
        "_consume_block",
        "            mbarrier.wait(value_ready.index(before), phase_before)\n",
        "",
        PLAIN,
    ),
    "no wait for the last values": (
        "_consume_block",
        "    mbarrier.wait(value_ready.index(slot), phase)\n    weights",
        "    weights",
        PLAIN,
    ),
    "no wait for the scores of the first tile": (
        "_consume_block",
        "    s = warpgroup_mma_wait(0, [s])\n",
        "",
        PLAIN,
    ),
    "a wait that leaves the scores": (
        "_consume_block",
        "warpgroup_mma_wait(1, [s, acc])",
        "warpgroup_mma_wait(2, [s, acc])",
        PLAIN,
    ),
    "no wait for the output of a tile": (
        "_consume_block",
        "            acc = warpgroup_mma_wait(0, [acc])\n",
        "",
        PLAIN,
    ),
    "no wait for the output of the last tile": (
        "_consume_block",
        "    acc = warpgroup_mma_wait(0, [acc])\n    if how",
        "    if how",
        PLAIN,
    ),
    "the copies wait for no keys": (
        "_copy_block",
        "        mbarrier.wait(bars.key_free.index(slot), phase ^ 1)\n",
        "",
        PLAIN,
    ),
    "the copies wait for no values": (
        "_copy_block",
        "        mbarrier.wait(bars.value_free.index(slot), phase ^ 1)\n",
        "",
        PLAIN,
    ),
    "no wait for the bounds": (
        "_scores",
        "        mbarrier.wait(bars.bounds_ready.index(place.slot), place.phase)\n",
        "",
        MASKED,
    ),
    "bounds over those that are read": (
        "_mask_block",
        "        mbarrier.wait(bars.bounds_free.index(slot), phase ^ 1)\n",
        "",
        MASKED,
    ),
    "zeros over values that are copied": (
        "_mask_block",
        "        mbarrier.wait(bars.value_ready.index(slot), phase)\n        if",
        "        if",
        MASKED,
    ),
    "values that nobody has masked": (
        "_consume_block",
        "bars.value_masked if has_bounds(has) else bars.value_ready",
        "bars.value_ready",
        MASKED,
    ),
    "no wait for the store": ("_consumer", "    tma.store_wait(0)", "    pass", PLAIN),
    # -------------------------------------------------------------------------------- phases
    "phase of the free keys": (
        "_copy_block",
        "bars.key_free.index(slot), phase ^ 1",
        "bars.key_free.index(slot), phase",
        PLAIN,
    ),
    "phase of the free values": (
        "_copy_block",
        "bars.value_free.index(slot), phase ^ 1",
        "bars.value_free.index(slot), phase",
        PLAIN,
    ),
    "phase of the queries": (
        "_consume_block",
        "bars.query_ready, block",
        "bars.query_ready, 1 ^ block",
        PLAIN,
    ),
    "phase of the first keys": (
        "_consume_block",
        "bars.key_ready.index(slot), phase)\n    k =",
        "bars.key_ready.index(slot), phase ^ 1)\n    k =",
        PLAIN,
    ),
    "phase of the values": (
        "_consume_block",
        "            mbarrier.wait(value_ready.index(before), phase_before)\n",
        "            mbarrier.wait(value_ready.index(before), phase_before ^ 1)\n",
        PLAIN,
    ),
    "phase of the values of a tile later": (
        "_consume_block",
        "value_ready.index(before), phase_before",
        "value_ready.index(before), phase",
        PLAIN,
    ),
    "phase after the wrap": ("slot_of", "t // SLOTS & 1", "0", PLAIN),
    "no wrap": ("slot_of", "t % SLOTS", "t", PLAIN),
    "phase of the bounds": (
        "_scores",
        "bars.bounds_ready.index(place.slot), place.phase",
        "bars.bounds_ready.index(place.slot), place.phase ^ 1",
        MASKED,
    ),
    "phase of the free bounds": (
        "_mask_block",
        "bars.bounds_free.index(slot), phase ^ 1",
        "bars.bounds_free.index(slot), phase",
        MASKED,
    ),
    "both consumers wait": ("_consume_block", "phase ^ (which > 0)", "phase", PLAIN),
    "the turn of one phase": (
        "_consume_block",
        "(t ^ block.phase ^ (which > 0)) & 1",
        "which == 0",
        PLAIN,
    ),
    # ------------------------------------------------------------------- arrivals and releases
    "one release of the keys": (
        "make_shared",
        "key_free=barriers(SLOTS, ALL)",
        "key_free=barriers(SLOTS, 1)",
        PLAIN,
    ),
    "one release of the values": (
        "make_shared",
        "value_free=barriers(SLOTS, ALL)",
        "value_free=barriers(SLOTS, 1)",
        PLAIN,
    ),
    "three releases of the values": (
        "make_shared",
        "value_free=barriers(SLOTS, ALL)",
        "value_free=barriers(SLOTS, 3)",
        PLAIN,
    ),
    "one release of the bounds": (
        "make_shared",
        "bounds_free=barriers(SLOTS, ALL)",
        "bounds_free=barriers(SLOTS, 1)",
        MASKED,
    ),
    "two arrivals of the queries": (
        "make_shared",
        "query_ready = barriers(1, 1)",
        "query_ready = barriers(1, 2)",
        PLAIN,
    ),
    "barriers that nobody initialises": (
        "barriers",
        "gl.static_range(count)",
        "gl.static_range(count - 1)",
        PLAIN,
    ),
    "no release of the first keys": (
        "_consume_block",
        "    mbarrier.arrive(bars.key_free.index(slot), count=1)  #",
        "    pass  #",
        PLAIN,
    ),
    "no release of the keys": (
        "_consume_block",
        "            mbarrier.arrive(bars.key_free.index(slot), count=1)\n",
        "",
        PLAIN,
    ),
    "no release of the values": (
        "_consume_block",
        "            mbarrier.arrive(bars.value_free.index(before), count=1)",
        "            pass",
        PLAIN,
    ),
    "no release of the bounds": (
        "_scores",
        "        mbarrier.arrive(bars.bounds_free.index(place.slot), count=1)\n",
        "",
        MASKED,
    ),
    "the first keys released too early": (
        "_consume_block",
        "    s = warpgroup_mma_wait(0, [s])\n"
        "    mbarrier.arrive(bars.key_free.index(slot), count=1)  # the product has read them\n",
        "    mbarrier.arrive(bars.key_free.index(slot), count=1)\n"
        "    s = warpgroup_mma_wait(0, [s])\n",
        PLAIN,
    ),
    "keys released too early": (
        "_consume_block",
        "            s, acc = warpgroup_mma_wait(1, [s, acc])"
        "  # the scores; the other product goes on\n"
        "            mbarrier.arrive(bars.key_free.index(slot), count=1)\n",
        "            mbarrier.arrive(bars.key_free.index(slot), count=1)\n"
        "            s, acc = warpgroup_mma_wait(1, [s, acc])\n",
        PLAIN,
    ),
    "values released too early": (
        "_consume_block",
        "            acc = warpgroup_mma_wait(0, [acc])\n"
        "            mbarrier.arrive(bars.value_free.index(before), count=1)",
        "            mbarrier.arrive(bars.value_free.index(before), count=1)\n"
        "            acc = warpgroup_mma_wait(0, [acc])",
        PLAIN,
    ),
    "bounds released too early": (
        "_scores",
        "        bound = buffers.bounds.index(place.slot).load(gl.SliceLayout(0, S))\n"
        "        mbarrier.arrive(bars.bounds_free.index(place.slot), count=1)\n",
        "        mbarrier.arrive(bars.bounds_free.index(place.slot), count=1)\n"
        "        bound = buffers.bounds.index(place.slot).load(gl.SliceLayout(0, S))\n",
        MASKED,
    ),
    "bounds given too early": (
        "_mask_block",
        "        buffers.bounds.index(slot).store(bound)\n"
        "        mbarrier.arrive(bars.bounds_ready.index(slot), count=1)\n",
        "        mbarrier.arrive(bars.bounds_ready.index(slot), count=1)\n"
        "        buffers.bounds.index(slot).store(bound)\n",
        MASKED,
    ),
    "the other turn": (
        "_consume_block",
        "arrive(bars.turn.index((which + 1) % how.consumers)",
        "arrive(bars.turn.index(which)",
        PLAIN,
    ),
    "no turn": (
        "_consume_block",
        "                mbarrier.arrive(bars.turn.index((which + 1) % how.consumers), count=1)\n",
        "                pass\n",
        PLAIN,
    ),
    # --------------------------------------------------------------------------------- slots
    "the slot of the released keys": (
        "_consume_block",
        "arrive(bars.key_free.index(slot), count=1)\n            place",
        "arrive(bars.key_free.index(before), count=1)\n            place",
        PLAIN,
    ),
    "the slot of the released values": (
        "_consume_block",
        "value_free.index(before)",
        "value_free.index(1 - before)",
        PLAIN,
    ),
    "the slot of the next values": (
        "_consume_block",
        "value_free.index(before)",
        "value_free.index(slot)",
        PLAIN,
    ),
    "the slot of the values": ("_consume_block", "slot_of(t - 1, how.slots)", "slot, phase", PLAIN),
    "the slot of the last values": (
        "_consume_block",
        "slot_of(walk.end - 1, how.slots)",
        "slot, phase",
        PLAIN,
    ),
    "keys of the tile before": (
        "_consume_block",
        "            k = buffers.key.index(slot)",
        "            k = buffers.key.index(1 - slot)",
        PLAIN,
    ),
    "keys into the slot of the values": (
        "_copy_block",
        "bars.key_ready.index(slot), buffers.key",
        "bars.value_ready.index(slot), buffers.key",
        PLAIN,
    ),
    "the queries of the other consumer": (
        "_consume_block",
        "buffers.query.index(which)",
        "buffers.query.index(1 - which)",
        PLAIN,
    ),
    "the output over the queries of the other": (
        "_consume_block",
        "buffers.output.index(which)",
        "buffers.output.index(1 - which)",
        PLAIN,
    ),
    # --------------------------------------------------------------------------------- bytes
    "half of the bytes of the values": ("_copy_block", "value_block * 2", "value_block", PLAIN),
    "twice the bytes of the keys": (
        "_copy_block",
        "columns * tile.dim_block * 2",
        "columns * tile.dim_block * 4",
        PLAIN,
    ),
    "half of the queries": ("_copy_block", "range(how.consumers)", "range(1)", PLAIN),
    "keys that nobody expects": (
        "_copy_block",
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
        "_mask_block",
        "            fence_async_shared()"
        "  # plain stores, which wgmma and the next copy have to see\n",
        "",
        MASKED,
    ),
    "no fence behind the barriers": (
        "hopper_forward_kernel",
        "    fence_async_shared()  # the copies have to see the barriers\n",
        "",
        PLAIN,
    ),
    "the fence behind the copy": (
        "_store",
        "    fence_async_shared()  # the store to shared memory was a plain one, the copy is not\n"
        "    copy_out(target, at_row(block.b, block.h, i0, how), tiles)\n",
        "    copy_out(target, at_row(block.b, block.h, i0, how), tiles)\n"
        "    fence_async_shared()\n",
        PLAIN,
    ),
    # --------------------------------------------------------------------------------- tiles
    "a tile that is not copied": (
        "_copy_block",
        "work.walk.end)",
        "work.walk.end - 1)",
        PLAIN,
    ),
    "a tile that nobody reads": (
        "_copy_block",
        "work.walk.end)",
        "work.walk.end + 1)",
        PLAIN,
    ),
    "a tile without a mask": (
        "_mask_block",
        "walk.first, masked):",
        "walk.first, masked - 1):",
        MASKED,
    ),
    "no tile at all": ("walk_of", "gl.maximum(edges + others, 1)", "edges + others", EMPTY),
    "a tile of a sequence without keys": (
        "walk_of",
        "gl.where(others > 0, begin, past)",
        "begin",
        EMPTY,
    ),
    "a descriptor of no rows": (
        "make_tensors",
        "gl.maximum(sequence.length, 1)",
        "sequence.length",
        EMPTY,
    ),
    "an edge that is none": (
        "walk_of",
        "Walk(0, gl.maximum(edges, 1)",
        "Walk(0, 1",
        CAUSAL,
    ),
    "the key past the diagonal": ("_cut", "j <= gl", "j <= 1 + gl", CAUSAL),
    "the length": ("_cut", "last = i * 0 + work.last", "last = i * 0 + work.last + 1", EMPTY),
    "values of masked keys stay": (
        "_mask_block",
        "gl.expand_dims(kept, 1), x, 0.0",
        "gl.expand_dims(kept, 1), x, x",
        MASKED,
    ),
    "values of one masked key of a tile stay": (
        "_mask_block",
        "seen.to(gl.int32), 0) < BN",
        "seen.to(gl.int32), 0) < BN - 1",
        ONE_KEY,
    ),
    "values of one masked key of eight stay": (
        "_mask_block",
        "0) < CHUNK",
        "0) < CHUNK - 1",
        ONE_KEY,
    ),
    "values of masked keys stay past column 64": (
        "_mask_block",
        "range(0, tile.value_block, WIDTH)",
        "range(0, min(64, tile.value_block), WIDTH)",
        WIDE_VALUES,
    ),
    "as many columns of masked values as of keys": (
        "_mask_block",
        "range(0, tile.value_block, WIDTH)",
        "range(0, tile.dim_block, WIDTH)",
        WIDE_VALUES,
    ),
    "no mask": (
        "_scores",
        "        s = gl.minimum(s, gl.expand_dims(bound, 0))",
        "        s = s",
        MASKED,
    ),
    "the bias of the first sequence": (
        "locate_head",
        "bias += sequence.first_key * strides.bias_column",
        "bias += 0",
        PACKED,
    ),
    "the bias of the keys behind a sequence": (
        "_mask_block",
        "work.last + 1, has)",
        "work.last + 99, has)",
        PACKED,
    ),
    "a bias in base e": ("bounds_of_keys", "* LOG2E", "* 1.0", PACKED),
    # ------------------------------------------------------ masks and biases of queries and keys
    "no wait for the bias": (
        "_scores",
        "        mbarrier.wait(bars.term_ready.index(place.term_slot), place.term_phase)\n",
        "",
        BIASED,
    ),
    "no wait for the mask of queries": (
        "_scores",
        "        mbarrier.wait(bars.term_ready.index(place.term_slot), place.term_phase)\n",
        "",
        SPANS,
    ),
    "a bias over one that is read": (
        "_copy_terms",
        "    mbarrier.wait(bars.term_free.index(place.term_slot), place.term_phase ^ 1,"
        " pred=needed)\n",
        "",
        BIASED,
    ),
    "phase of the bias": (
        "_scores",
        "bars.term_ready.index(place.term_slot), place.term_phase",
        "bars.term_ready.index(place.term_slot), place.term_phase ^ 1",
        BIASED,
    ),
    "phase of the free bias": (
        "_copy_terms",
        "place.term_phase ^ 1",
        "place.term_phase",
        BIASED,
    ),
    "one release of the bias": (
        "make_shared",
        "term_free=barriers(how.term_slots, ALL)",
        "term_free=barriers(how.term_slots, 1)",
        BIASED,
    ),
    "no release of the bias": (
        "_scores",
        "        mbarrier.arrive(bars.term_free.index(place.term_slot), count=1)\n",
        "",
        BIASED,
    ),
    "the bias released too early": (
        "_scores",
        "        if has.bias == 2:\n            bias =",
        "        mbarrier.arrive(bars.term_free.index(place.term_slot), count=1)\n"
        "        if has.bias == 2:\n            bias =",
        BIASED,
    ),
    "no fence behind the bias": (
        "_scores",
        "        fence_async_shared()  # the next copy must not overtake these loads\n",
        "",
        BIASED,
    ),
    "half of the bytes of the bias": (
        "_copy_terms",
        "tile.columns * how.term_bytes",
        "tile.columns * how.term_bytes // 2",
        BIASED,
    ),
    "a bias that nobody expects": (
        "_copy_terms",
        "    mbarrier.expect(ready, tile.rows * tile.columns * how.term_bytes, pred=needed)\n",
        "",
        BIASED,
    ),
    "the bias of the other consumer": (
        "place_of",
        "term * how.consumers + which",
        "term * how.consumers + 1 - which",
        BIASED,
    ),
    "the slot of the bias": ("place_of", "slot_of(t, how.term_slots)", "slot_of(0, 2)", BIASED),
    "the bias of the first queries": ("_copy_terms", "place.query + which * ROWS", "0", BIASED),
    "a mask that nobody needs": ("_copy_block", "t < masked", "t < masked + 1", SPANS),
    "a mask that is not copied": ("_copy_block", "t < masked", "t < masked - 1", SPANS),
    "a mask of tiles that need none": (
        "masked_tiles",
        "return walk.edges",
        "return walk.end",
        SPANS,
    ),
    "no mask of queries": ("_scores", "s = gl.where(seen != 0, s", "s = gl.where(True, s", SPANS),
    "values that are not passed on": (
        "_mask_block",
        "range(masked, work.walk.end)",
        "range(masked, masked)",
        HOLES,
    ),
    "values that are passed on too early": (
        "_mask_block",
        "        mbarrier.wait(bars.value_ready.index(slot), phase)\n        mbarrier.arrive",
        "        mbarrier.arrive",
        HOLES,
    ),
    "a turn that leaves out a consumer": (
        "_consume_block",
        "(which + 1) % how.consumers",
        "(which + 1) % 2",
        THREE,
    ),
    "releases of two consumers": (
        "make_shared",
        "value_free=barriers(SLOTS, ALL)",
        "value_free=barriers(SLOTS, 2)",
        THREE,
    ),
    # ------------------------------------------------------------------------------- persistence
    "queries over those that are multiplied": (
        "_copy_block",
        "        mbarrier.wait(bars.query_free, block.phase ^ 1)",
        "        pass",
        PERSISTENT,
    ),
    "phase of the free queries": (
        "_copy_block",
        "bars.query_free, block.phase ^ 1",
        "bars.query_free, block.phase",
        PERSISTENT,
    ),
    "queries of one phase": ("nth_block", "first, n & 1, tile", "first, 0, tile", PERSISTENT),
    "one release of the queries": (
        "make_shared",
        "query_free=barriers(1, ALL)",
        "query_free=barriers(1, 1)",
        PERSISTENT,
    ),
    "no release of the queries": (
        "_consume_block",
        "        mbarrier.arrive(bars.query_free, count=1)",
        "        pass",
        PERSISTENT,
    ),
    "no release of the last values": (
        "_consume_block",
        "        mbarrier.arrive(bars.value_free.index(slot), count=1)\n    out",
        "        pass\n    out",
        PERSISTENT,
    ),
    "the last values released too early": (
        "_consume_block",
        "    acc = warpgroup_mma_wait(0, [acc])\n    if how.persistent:\n"
        "        mbarrier.arrive(bars.value_free.index(slot), count=1)\n",
        "    mbarrier.arrive(bars.value_free.index(slot), count=1)\n"
        "    acc = warpgroup_mma_wait(0, [acc])\n",
        PERSISTENT,
    ),
    "no wait for the store of the block before": (
        "_store",
        "        tma.store_wait(0)",
        "        pass",
        PERSISTENT,
    ),
    "no wait for the last store": (
        "_consumer",
        "    tma.store_wait(0)",
        "    pass",
        PERSISTENT,
    ),
    "the output over queries of the next block": (
        "make_shared",
        "tile.dim_block or how.persistent",
        "tile.dim_block",
        PERSISTENT,
    ),
    "consumers that number tiles anew": (
        "_consumer",
        "first = block.work.walk.end",
        "first = 0",
        PERSISTENT,
    ),
    "copies that number tiles anew": (
        "_copies",
        "first = block.work.walk.end",
        "first = 0",
        PERSISTENT,
    ),
    "a mask that numbers tiles anew": (
        "_mask",
        "first = block.work.walk.end",
        "first = 0",
        PERSISTENT_MASK,
    ),
    "keys of the first block": ("numbered", "walk.lo - keys", "walk.lo", PERSISTENT),
    "keys of the first block, past the edges": (
        "numbered",
        "walk.begin - keys",
        "walk.begin",
        PERSISTENT,
    ),
    "a block that no program computes": (
        "_consumer",
        "rounds_of(given.order)",
        "rounds_of(given.order) - 1",
        PERSISTENT,
    ),
    "a round that has no block": (
        "rounds_of",
        "number_of_block(rounds - 1) >= blocks",
        "number_of_block(rounds - 1) < 0",
        PERSISTENT,
    ),
    "keys of the head of the queries": (
        "_copy_block",
        "at_row(b, g, n0, how)",
        "at_row(b, h, n0, how)",
        PERSISTENT,
    ),
    "rows past the end of a head": (
        "make_whole_tensors",
        "gl.maximum(sequence.length, 1)",
        "gl.maximum(sequence.length, 1) + 8",
        PERSISTENT,
    ),
    # ---------------------------------------------------------------------------------- the walk
    "edges on one side": (
        "key_of_tile",
        "gl.where(n0 < walk.jump, n0, n0 + walk.gap)",
        "n0",
        WINDOW,
    ),
    "edges of no gap": ("key_of_tile", "n0, n0 + walk.gap", "n0, n0", WINDOW),
    "the first of the others": ("walk_of", "begin - edges * BN", "begin", WINDOW),
    "the edges of a causal call": ("walk_of", "        lo += gap\n", "        pass\n", CAUSAL),
    "the left side of the band": ("_cut", "seen & (j >=", "seen & (j >", WINDOW),
    # --------------------------------------------------------------------------------- softmax
    "no rescaling": (
        "_consume_block",
        "            acc = acc"
        " * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, O)), 1)\n",
        "",
        PLAIN,
    ),
    "a sum that is not rescaled": ("_weights", "l = l * rescale + gl", "l = l + gl", PLAIN),
    "the rows of LSE": ("_store", "row = rows.first + i", "row = rows.first + i + 1", PLAIN),
    "a row without a key": ("store_sums", "tl.where(empty, 1.0, l)", "l", EMPTY),
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
