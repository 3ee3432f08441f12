"""Block masks in the kernels of attention: which tiles a program visits, and what it sees of them.

A mask is kept in tiles of 128 queries x 64 keys; `fastformer.BlockMask` describes its tensors
`spans`, `lists` and `bits`. A program owns queries or keys of one row or column of tiles. It visits

    the longest run of whole tiles, as without a mask
    the other whole tiles, whose places it reads from the list, without a mask
    the partly seen tiles, of which it reads one bit for each element

If a band or the lengths of the keys also hide keys (`has.lists` is 2), the second loop is left out:
the third one computes its tiles, and those of the run that the band or the length cut. Their bits
are all set. In a packed batch (`has.lists` is 3), whose mask is that of all tokens, documents and
the band inside of them leave each query one range of keys, and each key one of queries.

The tile of a kernel may be smaller than that of the mask, of which it then is a part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common import LOG2E
from .bounds import Bounds, Span, entries_within, split_at_run
from .scores import Head, Keys, clamp

ROWS, COLUMNS = tl.constexpr(128), tl.constexpr(64)  # queries and keys of a tile of a mask
WORDS = tl.constexpr(256)  # of the bits of a tile
WHOLE = tl.constexpr(1)  # the slot of the tile whose bits are all set


class Lists(NamedTuple):
    """The tiles of a row or a column of tiles.

    The run is run_begin <= n < run_end, where n counts keys, or queries if the program owns keys.
    The other whole tiles are the entries begin <= e < part of the list, and the partly seen tiles
    are the entries part <= e < end.

    Where a band or lengths cut them (see `listed_spans`), the last loop first visits `cut` tiles of
    the run, from key or query `first` on, where those from `jump` on lie `gap` further. Then it
    visits the entries from `begin` on, where those from `part` on lie `skip` further.
    """

    run_begin: Any
    run_end: Any
    begin: Any
    part: Any
    end: Any
    tiles: Any  # pointer to the index of each entry; its slot follows in two halves
    size: Any  # how many entries there are in all
    bits: Any
    cut: Any = 0
    first: Any = 0
    jump: Any = 0
    gap: Any = 0
    skip: Any = 0
    # In a packed batch, of each query that a program owns, [BM], or each key, [BN]: the range
    # low <= n < high of what it sees, and where it stands among them, [BM, 1] or [BN, 1].
    low: Any = 0
    high: Any = 0
    place: Any = 0


@triton.jit
def load_lists(optional, strides, sizes, b, h, own, OWNS_KEYS: tl.constexpr):
    """Return the `Lists` of the query, or the key if the program owns keys, number `own` of head h
    of sequence b.
    """
    STEP: tl.constexpr = ROWS if OWNS_KEYS else COLUMNS
    index = own // ROWS
    if OWNS_KEYS:
        index = tl.cdiv(sizes.queries, ROWS) + own // COLUMNS
    place = optional.bounds + b * strides.bounds_batch + h * strides.bounds_head + index * 5
    run, begin = tl.load(place), tl.load(place + 2)
    run_end = run + tl.load(place + 1)
    part = begin + tl.load(place + 3)
    end = part + tl.load(place + 4)
    size = strides.bounds_tile
    return Lists(run * STEP, run_end * STEP, begin, part, end, optional.starts, size, optional.mask)


@triton.jit
def _range(call, t, has: tl.constexpr, OWNS_KEYS: tl.constexpr):
    """Return (first, end, place, document): the keys that query t sees by documents and band, or
    the queries that see key t if the program owns keys, and where t stands among these. t is a
    number or [WIDTH]; one past the end has the range of the last one. None of them decreases with
    t.
    """
    mine, other, size = call.optional.offsets, call.optional.lengths, call.sizes.queries
    left, right = call.band.left, call.band.right
    if OWNS_KEYS:
        mine, other, size = other, mine, call.sizes.keys
        left, right = right, left
    documents = call.sizes.documents
    t = tl.minimum(t, size - 1)
    d = t * 0
    for n in tl.range(0, 21):  # the last document that begins at or before t
        later = d + (1 << (20 - n))
        offset = tl.load(mine + later, mask=later < documents, other=2**31 - 1)
        d = tl.where(offset <= t, later, d)
    first, end = tl.load(other + d), tl.load(other + d + 1)
    if has.bottom_right:
        place = t + (end - tl.load(mine + d + 1))
    else:
        place = t + (first - tl.load(mine + d))
    return clamp(place - left, first, end), clamp(place + right + 1, first, end), place, d


@triton.jit
def with_lists(head, lists, own, tile: tl.constexpr, has: tl.constexpr, OWNS_KEYS: tl.constexpr):
    """Return the head with the lists that its loops read and, in a packed batch, the ranges and
    slopes of the queries or keys that the program owns.
    """
    slope = head.slope
    if has.lists == 3:
        WIDTH: tl.constexpr = tile.columns if OWNS_KEYS else tile.rows
        low, high, place, d = _range(head.call, own + tl.arange(0, WIDTH), has, OWNS_KEYS)
        if has.alibi:
            slope = tl.load(slope + d * head.call.strides.slope_batch)
            slope = (slope.to(tile.acc) * LOG2E)[:, None]
        lists = Lists(
            lists.run_begin, lists.run_end, lists.begin, lists.part, lists.end, lists.tiles,
            lists.size, lists.bits, lists.cut, lists.first, lists.jump, lists.gap, lists.skip,
            low, high, place[:, None],
        )  # fmt: skip
    return Head(head.draws, head.mask, head.bias, slope, head.sequence, head.call, lists)


@triton.jit
def listed_spans(
    tiles, lists, call, own, tile: tl.constexpr, has: tl.constexpr, OWNS_KEYS: tl.constexpr,
    lanes=None,
):  # fmt: skip
    """Return (lists, run, whole, edge) of the program that owns the queries or keys from `own` on.
    `run` is a span of keys or queries, see `split_at_run`, whose argument `tiles` is. `whole` and
    `edge` are spans of the numbers that `listed_tile` takes. `lanes`: see `entries_within`.
    """
    width: tl.constexpr = tile.rows if OWNS_KEYS else tile.columns
    SIZE: tl.constexpr = ROWS if OWNS_KEYS else COLUMNS
    PARTS: tl.constexpr = SIZE // width
    if has.lists == 3:
        lo, hi, _, _ = _range(call, own, has, OWNS_KEYS)
        end = own + (tile.columns if OWNS_KEYS else tile.rows)
        begin, last, _, _ = _range(call, end - 1, has, OWNS_KEYS)
        begin = tl.cdiv(begin, width) * width
        hi = begin if has.alibi else hi // width * width  # ALiBi: only the last loop has places
        tiles = lo // width * width, begin, tl.maximum(begin, hi), last
    if OWNS_KEYS and not tile.split:  # one loop
        tiles = tiles[0], tiles[0], tiles[0], tiles[3]
    if has.lists >= 2:
        bounds = Bounds(lists.run_begin, lists.run_begin, lists.run_end, lists.run_end)
        cut, run = split_at_run(tiles, bounds, width, has)
        first, last, jump, gap = cut
        cut = tl.cdiv(last - first, width)
        lo, hi = tiles[0] // SIZE, tl.cdiv(tiles[3], SIZE)
        begin, whole = entries_within(lists.tiles, lists.begin, lists.part, lo, hi, lanes)
        part, end = entries_within(lists.tiles, lists.part, lists.end, lo, hi, lanes)
        edge = Span(0, cut + (whole - begin + end - part) * PARTS)
        lists = Lists(
            lists.run_begin, lists.run_end, begin, whole, end, lists.tiles, lists.size, lists.bits,
            cut, first, jump, gap, part - whole,
        )  # fmt: skip
        return lists, Span(run[0], run[1]), Span(0, 0), edge
    else:
        run = Span(lists.run_begin, tl.minimum(lists.run_end, tiles[3]))
        whole = Span(lists.begin * PARTS, lists.part * PARTS)
        return lists, run, whole, Span(lists.part * PARTS, lists.end * PARTS)


@triton.jit
def slot_of_entry(lists, entry, ok):
    """Return the slot of an entry, or 0 if `ok` is False. It is stored in halves, because the
    compiler would copy a scalar of 32 bits through shared memory, and then no keys ahead.
    """
    low = tl.load(lists.tiles + lists.size + entry, mask=ok, other=0).to(tl.int32) & 0xFFFF
    return low | (
        tl.load(lists.tiles + 2 * lists.size + entry, mask=ok, other=0).to(tl.int32) << 16
    )


@triton.jit
def listed_tile(
    p, lists, width: tl.constexpr, SIZE: tl.constexpr, has: tl.constexpr, EDGE: tl.constexpr
):
    """Return the first key, or query, of tile number p of a span of `listed_spans`, and with EDGE
    its slot.
    """
    PARTS: tl.constexpr = SIZE // width
    listed = p >= 0
    if has.lists >= 2:
        n0 = lists.first + p * width
        n0 = tl.where(n0 < lists.jump, n0, n0 + lists.gap)
        p = p - lists.cut
        listed = p >= 0
        p = lists.begin * PARTS + p
    entry = p // PARTS if PARTS > 1 else p
    within = (p - entry * PARTS) * width
    if has.lists >= 2:
        entry = tl.where(entry < lists.part, entry, entry + lists.skip)
        index = tl.load(lists.tiles + entry, mask=listed, other=0).to(tl.int32)
    else:
        index = tl.load(lists.tiles + entry).to(tl.int32)
    start = index * SIZE
    if PARTS > 1:
        start += within
    slot = 0
    if EDGE:
        slot = slot_of_entry(lists, entry, listed)
    if has.lists >= 2:
        start = tl.where(listed, start, n0)
        slot = tl.where(listed, slot, WHOLE)
    return start, slot


@triton.jit
def listed_keys(
    keys, slot, i0, n0, lists, tile: tl.constexpr, has: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Return `keys` of the tile at (i0, n0), of whose elements the bits of a slot say which of them
    are seen: `keys.ok` is [BM, BN], or [BN, BM] if TRANSPOSED.

    Bit j of a word is shifted in two steps, of which the first is the same for all elements that a
    thread has in a product.
    """
    i = i0 % ROWS + tl.arange(0, tile.rows)
    j = tl.arange(0, tile.columns)
    if tile.columns < 32:
        j += n0 % 32
    base = lists.bits + slot.to(tl.int64) * WORDS + n0 % COLUMNS // 32
    if TRANSPOSED:
        i, j = i[None, :], j[:, None]
    else:
        i, j = i[:, None], j[None, :]
    if tile.columns == COLUMNS and TRANSPOSED:  # a thread has few keys of many queries
        pairs = tl.load(base.to(tl.pointer_type(tl.int64)) + i)
        seen = ((pairs >> (j & 38)).to(tl.int32) & (1 << (j & 25))) != 0
    else:
        words = tl.load(base + i * 2)
        if tile.columns == COLUMNS:
            words = tl.where(j < 32, words, tl.load(base + i * 2 + 1))
        seen = ((words >> (j & 6)) & (1 << (j & 25))) != 0
    if has.lists == 2 or has.bias == 1:
        seen = keys.ok & seen
    if has.lists == 3:
        n = n0 + tl.arange(0, tile.columns)
        if TRANSPOSED:
            n = i0 + tl.arange(0, tile.rows)
        seen = seen & (n[None, :] >= lists.low[:, None]) & (n[None, :] < lists.high[:, None])
    return Keys(seen, keys.bias)  # no bit is set past the last key


@triton.jit
def find_slot(lists, n0):
    """Return the slot of the tile of the mask that holds key n0, or 0 if no query sees it."""
    found = -1
    for start in tl.range(lists.begin, lists.end, 128):
        entry = start + tl.arange(0, 128)
        index = tl.load(lists.tiles + entry, mask=entry < lists.end, other=-1).to(tl.int32)
        found = tl.maximum(found, tl.max(tl.where(index == n0 // COLUMNS, entry, -1), 0))
    slot = slot_of_entry(lists, found, found >= 0)
    return tl.where((n0 >= lists.run_begin) & (n0 < lists.run_end), WHOLE, slot)


@triton.jit
def listed_members(call, shared, i0, n0):
    """Return (begin, end) as `members_that_see` does, read from lists. If all members have the same
    mask, only the first one is looked up.
    """
    strides = call.strides
    one = strides.bounds_batch + strides.bounds_head == 0
    begin, end = shared.members, 0
    for member in tl.range(0, tl.where(one, tl.minimum(shared.members, 1), shared.members)):
        b = shared.batch + member // shared.heads
        h = shared.head + member % shared.heads
        lists = load_lists(call.optional, strides, call.sizes, b, h, i0, False)
        seen = find_slot(lists, n0) > 0
        begin = tl.where(seen, tl.minimum(begin, member), begin)
        end = tl.where(seen, tl.where(one, shared.members, member + 1), end)
    return begin, end
