"""What the attention kernels share: the groups that their arguments come in, rows of a matrix, the
place of a sequence and of a head, the band, masks and the scores.

The groups are named tuples. Those whose fields are compile-time constants are `Tile` and `Has`;
those that a program makes for itself are `Sequence`, `Call`, `Head`, `Indices` and `Keys`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common import LN2, LOG2E, dropout_keep, dropout_plane

# ---------------------------------------------------------------------- groups of kernel arguments


class Inputs(NamedTuple):
    """Pointers to query [B, H, Sq, D], key [B, G, Sk, D] and value [B, G, Sk, DV]."""

    query: Any
    key: Any
    value: Any


class BackwardInputs(NamedTuple):
    """The same, and the pointer to the gradient of the output [B, H, Sq, DV]."""

    query: Any
    key: Any
    value: Any
    grad_output: Any


class Extras(NamedTuple):
    """Pointers to the tensors that a call may leave out. The kernels read one only where `Has` says
    that it is there.
    """

    mask: Any  # [B, H, Sq, Sk] as bytes; zero masks out
    bias: Any  # [B, H, Sq, Sk]
    slopes: Any  # [B, H]
    lengths: Any  # [B] keys of each sequence; in a packed batch the offsets of its keys, [B + 1]
    starts: Any  # [B + 1], the offsets of the queries in a packed batch
    seed: Any  # []


class RowStrides(NamedTuple):
    """The strides of a tensor [batch, head, row, feature], whose features are contiguous."""

    batch: Any
    head: Any
    row: Any


class Strides(NamedTuple):
    """The strides of the inputs and, expanded to [B, H, Sq, Sk] or [B, H], of the extras."""

    query_batch: Any
    query_head: Any
    query_row: Any
    key_batch: Any
    key_head: Any
    key_row: Any
    value_batch: Any
    value_head: Any
    value_row: Any
    mask_batch: Any
    mask_head: Any
    mask_row: Any
    mask_column: Any
    bias_batch: Any
    bias_head: Any
    bias_row: Any
    bias_column: Any
    slope_batch: Any
    slope_head: Any


class Sizes(NamedTuple):
    """How many heads, queries and keys there are."""

    heads: Any  # H
    group: Any  # query heads of one key-value head, H / G
    queries: Any  # Sq; in a packed batch the most that a sequence has
    keys: Any  # Sk, likewise
    query_rows: Any  # rows of the query tensor: Sq, or Tq in a packed batch
    key_rows: Any
    # `Shard`: where these lie in the whole. Where they are the whole 1, of which Triton makes a
    # constant (Triton 3.6 cannot put None into a group).
    shard: Any = 1


class Band(NamedTuple):
    """How many keys a query sees before and after its own place."""

    left: Any
    right: Any


class Factors(NamedTuple):
    """The factor of the scores, the softcap, and what dropout needs."""

    scale: Any
    softcap: Any
    threshold: Any  # dropout keeps an element whose word is not below it
    inv_keep: Any  # 1 / (1 - p)


class Tile(NamedTuple):
    """Compile-time: the tile of S that a program works on, and how it computes."""

    rows: Any  # BM queries
    columns: Any  # BN keys
    dim: Any  # D
    dim_block: Any  # D, padded to a power of two
    value_dim: Any  # DV
    value_block: Any
    wide: Any  # whether offsets inside a head need 64 bits
    split: Any  # whether dK and dV have a loop of their own for whole tiles
    again: Any  # whether a result that masked keys have made NaN is computed again, without them
    precision: Any  # of products of float32
    acc: Any  # the dtype of sums


class Has(NamedTuple):
    """Compile-time: which features a call uses."""

    mask: Any  # 0 none, 1 constant over the queries, 2 one of every query and key
    bias: Any  # likewise
    alibi: Any
    softcap: Any
    left: Any  # whether the band is bounded to the left
    right: Any
    bottom_right: Any
    lengths: Any
    packed: Any
    dropout: Any
    fold: Any  # whether `scores` leaves the factor of the scores to `shifted`
    sink: Any = False
    shard: Any = False  # whether the call is given a shard of the whole, `Sizes.shard`
    page: Any = 0  # keys of a page, 0 where they are not in pages
    key_grad: Any = False  # whether a bias that is constant over the queries needs its gradient


# -------------------------------------------------------------------- groups that a program makes


class Sequence(NamedTuple):
    """Where one sequence lies and how long it is."""

    first_query: Any  # the row of its first query, in a packed batch
    first_key: Any
    queries: Any
    length: Any  # keys
    shift: Any  # query i stands at key i + shift


class Call(NamedTuple):
    """What all programs of a launch have in common."""

    extras: Any
    strides: Any
    sizes: Any
    band: Any
    factors: Any
    scale: Any  # what q . k is multiplied by, in base 2
    seed: Any


class Head(NamedTuple):
    """One query head of one sequence."""

    draws: Any  # what dropout draws its words with
    mask: Any  # pointer to its mask, at the first row that the program reads, or one for each row
    bias: Any
    slope: Any  # of ALiBi, in base 2, or one for each row
    sequence: Any
    call: Any


class Indices(NamedTuple):
    """Which elements of S a tile holds: broadcast against each other, either way round."""

    i: Any  # queries
    j: Any  # keys
    r: Any  # queries, clamped to the rows that exist, counted from where `Head.mask` points to


class Keys(NamedTuple):
    """Which keys of a tile exist and are left by a mask and a bias that are constant over the
    queries, and that bias in base 2: [BN] each, or 0 where there is no such bias.
    """

    ok: Any
    bias: Any


# ------------------------------------------------------------------------------ rows of a matrix


@triton.jit
def load_rows(base, rows, stride, ok, D: tl.constexpr, BD: tl.constexpr, GUARD: tl.constexpr):
    """Load rows of a matrix [.., D] as a tile [rows, BD]: zero past D, and zero where `ok` is False
    if GUARD; `ok` may be None if not.
    """
    d = tl.arange(0, BD)
    pointers = base + (rows[:, None] * stride + d[None, :])
    if GUARD and BD != D:
        return tl.load(pointers, mask=ok[:, None] & (d < D)[None, :], other=0.0)
    elif GUARD:
        return tl.load(pointers, mask=ok[:, None], other=0.0)
    elif BD != D:
        return tl.load(pointers, mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_rows(base, rows, stride, ok, x, D: tl.constexpr, BD: tl.constexpr):
    """Store a tile x [rows, BD] to rows of a matrix [.., D], where `ok` is True."""
    d = tl.arange(0, BD)
    mask = ok[:, None]
    if BD != D:
        mask = mask & (d < D)[None, :]
    tl.store(base + (rows[:, None] * stride + d[None, :]), x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_where(pointers, ok, GUARD: tl.constexpr):
    """Load what `ok` says exists, and zero elsewhere; without GUARD everything exists."""
    if GUARD:
        return tl.load(pointers, mask=ok, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def clamp(x, low, high):
    """Limit x to low <= x <= high."""
    return tl.minimum(tl.maximum(x, low), high)


# ------------------------------------------------------------------------- sequences, heads, band


@triton.jit
def moved(sizes, has: tl.constexpr):
    """By how much more the queries of a shard than its keys lie behind the first of the whole."""
    if has.shard:
        return sizes.shard.query - sizes.shard.key
    else:
        return 0


@triton.jit
def locate_rows(sizes, tile: tl.constexpr):
    """Find the BM queries that a program owns: the number of their head among all, the first of
    them, its sequence, head and key-value head. The longest causal rows start first.
    """
    blocks = tl.cdiv(sizes.queries, tile.rows)
    plane = tl.program_id(0) // blocks
    i0 = (blocks - 1 - tl.program_id(0) % blocks) * tile.rows
    b = (plane // sizes.heads).to(tl.int64)
    h = (plane % sizes.heads).to(tl.int64)
    return plane, i0, b, h, h // sizes.group


@triton.jit
def locate_keys(inputs, strides, sequence, b, g):
    """Find the first key and value of head g of sequence b: pointers."""
    key = inputs.key + b * strides.key_batch + g * strides.key_head
    key += sequence.first_key * strides.key_row
    value = inputs.value + b * strides.value_batch + g * strides.value_head
    value += sequence.first_key * strides.value_row
    return key, value


@triton.jit
def locate_sequence(extras, sizes, b, has: tl.constexpr):
    """Find sequence b.

    `extras.lengths` holds the number of keys of each sequence, or in a packed batch the offsets of
    its keys; `extras.starts` holds the offsets of its queries. They are clamped, so that a bad one
    never makes a program read out of bounds. Of a shard the lengths are those of the whole.
    """
    if has.packed:
        q0 = clamp(tl.load(extras.starts + b).to(tl.int32), 0, sizes.query_rows)
        k0 = clamp(tl.load(extras.lengths + b).to(tl.int32), 0, sizes.key_rows)
        q1 = clamp(tl.load(extras.starts + b + 1).to(tl.int32), q0, sizes.query_rows)
        k1 = clamp(tl.load(extras.lengths + b + 1).to(tl.int32), k0, sizes.key_rows)
        first_query = q0.to(tl.int64)
        first_key = k0.to(tl.int64)
        queries = tl.minimum(q1 - q0, sizes.queries)
        length = tl.minimum(k1 - k0, sizes.keys)
    else:
        first_query = (b * 0).to(tl.int64)
        first_key = (b * 0).to(tl.int64)
        queries = sizes.queries
        length = sizes.keys
        if has.shard:
            shard = sizes.shard
            length = shard.keys
        if has.lengths:
            length = clamp(tl.load(extras.lengths + b).to(tl.int32), 0, length)
    shift = 0
    if has.bottom_right:
        shift = length - queries
    if has.shard and not has.packed:
        if has.bottom_right:
            shift += queries - shard.queries
        shift += moved(sizes, has)
        length = clamp(length - shard.key, 0, sizes.keys)
    return Sequence(first_query, first_key, queries, length, shift)


@triton.jit
def prepare_call(extras, strides, sizes, band, factors, has: tl.constexpr):
    """Compute the factor on q . k that `scores` expects, and load the seed."""
    scale = factors.scale * LOG2E
    if has.softcap:
        scale = factors.scale / factors.softcap * (2 * LOG2E)
    seed = 0
    if has.dropout:
        seed = tl.load(extras.seed)
    return Call(extras, strides, sizes, band, factors, scale, seed)


@triton.jit
def locate_head(call, sequence, plane, b, h, first, tile: tl.constexpr, has: tl.constexpr):
    """Find what the scores of head h of sequence b, number `plane` of all, need from row `first`
    on, and dropout.
    """
    strides = call.strides
    mask = call.extras.mask + b * strides.mask_batch + h * strides.mask_head
    mask += first * strides.mask_row
    bias = call.extras.bias + b * strides.bias_batch + h * strides.bias_head
    bias += first * strides.bias_row
    slope = 0.0
    if has.alibi:
        slope = tl.load(call.extras.slopes + b * strides.slope_batch + h * strides.slope_head)
        slope = slope.to(tile.acc) * LOG2E
    draws = 0
    if has.dropout:
        if has.shard:
            shard = call.sizes.shard
            plane = (shard.batch + b) * shard.heads + shard.head + h
        draws = dropout_plane(call.seed, plane)
    return Head(draws, mask, bias, slope, sequence, call)


@triton.jit
def kept(head, i0, n0, tile: tl.constexpr, has: tl.constexpr):
    """Return which elements [BM, BN] of the tile at query i0 and key n0 dropout keeps."""
    if has.shard:
        shard = head.call.sizes.shard
        i0 += shard.query
        n0 += shard.key
    return dropout_keep(head.draws, i0, n0, head.call.factors.threshold, tile.rows, tile.columns)


@triton.jit
def first_row(plane, h, sequence, sizes, has: tl.constexpr):
    """Where the rows of a head begin in lse and delta: [B, H, Sq], or [H, Tq] packed."""
    if has.packed:
        return h.to(tl.int64) * sizes.query_rows + sequence.first_query
    else:
        return plane.to(tl.int64) * sizes.query_rows


@triton.jit
def whole_tiles(i0, sequence, band, tile: tl.constexpr, has: tl.constexpr):
    """Bound the key tiles inner <= n0 < full that lie inside the length and, for all of the queries
    i0 .. i0 + BM - 1, inside the band.
    """
    shift = sequence.shift
    full = sequence.length
    if has.right:
        full = clamp(i0 + shift + band.right + 1, 0, sequence.length)
    full = full // tile.columns * tile.columns
    inner = 0
    if has.left:
        inner = tl.maximum(i0 + tile.rows - 1 + shift - band.left, 0)
        inner = (inner + tile.columns - 1) // tile.columns * tile.columns
        full = tl.maximum(full, inner)
    return inner, full


@triton.jit
def keys_of_rows(i0, i1, length, shift, band, tile: tl.constexpr, has: tl.constexpr):
    """Bound the keys lo <= j < hi that any of the queries i0 .. i1 - 1 may see by length and band;
    lo is a multiple of BN.
    """
    lo = 0
    if has.left:
        lo = tl.maximum(i0 + shift - band.left, 0) // tile.columns * tile.columns
    hi = length
    if has.right:
        hi = tl.minimum(hi, i1 + shift + band.right)
    return lo, hi


@triton.jit
def in_pages(pages, j, ok, strides, has: tl.constexpr):
    """Find the keys j [BN] of a sequence, as far as `ok`, in their pages: how far each of them, and
    its value, lies behind the first of all. A page that does not exist is clamped.
    """
    page = tl.load(pages.table + j // has.page, mask=ok, other=0)
    page = clamp(page, 0, pages.paging.pages - 1).to(tl.int64)
    place = j % has.page
    k_rows = page * pages.paging.key_page + place * strides.key_row
    return k_rows, page * pages.paging.value_page + place * strides.value_row


# --------------------------------------------------------------------------------------- the scores


@triton.jit
def in_base_2(bias, ACC: tl.constexpr):
    """Convert a bias to base 2. One that float32 then cannot hold, below -2.3586e38, becomes -inf,
    which masks out.
    """
    bias = bias.to(ACC) * LOG2E
    if bias.dtype == tl.float64:
        bias = tl.where(bias < -3.4028235677973366e38, float("-inf"), bias)
    return bias


@triton.jit
def key_row(head, j, ok, tile: tl.constexpr, has: tl.constexpr, EDGE: tl.constexpr):
    """Read a mask and a bias that are constant over the queries, at the keys j [BN].

    `ok` [BN] says which of these are below the length; without EDGE all of them are.
    """
    strides, exists = head.call.strides, j < head.call.sizes.keys
    bias = 0.0
    if has.mask == 1:
        seen = load_where(head.mask + j * strides.mask_column, exists, EDGE) != 0
        ok = ok & seen if EDGE else seen
    if has.bias == 1:
        pointers = tl.max_contiguous(head.bias + j * strides.bias_column, 1)
        bias = load_where(pointers, exists, EDGE)
        bias = in_base_2(bias, tile.acc)
        seen = bias != float("-inf")
        ok = ok & seen if EDGE or has.mask == 1 else seen
    return Keys(ok, bias)


@triton.jit
def in_rows(keys, has: tl.constexpr):
    """Broadcast keys [BN] over the rows of S."""
    return Keys(keys.ok[None, :], keys.bias[None, :] if has.bias == 1 else keys.bias)


@triton.jit
def in_columns(keys, has: tl.constexpr):
    """Broadcast keys [BN] over the columns of the transpose of S."""
    return Keys(keys.ok[:, None], keys.bias[:, None] if has.bias == 1 else keys.bias)


@triton.jit
def scores(s, at, keys, head, tile: tl.constexpr, has: tl.constexpr, EDGE: tl.constexpr):
    """Compute the scores in base 2, -inf where a query may not see a key, and the tanh of the
    softcap, from s = q . k [BM, BN], or from its transpose. With `has.fold` they still lack the
    factor, which `shifted` applies.

    `at` and `keys` are broadcast against s. Without EDGE the whole tile lies inside the length and
    the band. The summands may be large, so that a score keeps few digits: each kernel has to round
    it alike, hence the fma.
    """
    i, j, r = at
    strides, band, scale = head.call.strides, head.call.band, head.call.scale
    shift = head.sequence.shift
    # The loads are bounded by Sk, not by the length: the compiler knows the divisibility of Sk.
    exists = j < head.call.sizes.keys
    tanh = s
    if has.softcap:
        s = 1.0 - 2.0 / (tl.math.exp2(s * scale) + 1.0)
        tanh = s
        scale = head.call.factors.softcap * LOG2E
    if has.bias == 0:
        s = s if has.fold else s * scale
    elif has.bias == 1:
        s = tl.fma(s, scale, keys.bias)
    else:
        pointers = head.bias + (r * strides.bias_row + j * strides.bias_column)
        s = tl.fma(s, scale, in_base_2(load_where(pointers, exists, EDGE), tile.acc))
    if has.alibi:
        s = tl.fma(tl.abs(i + shift - j).to(tile.acc), -head.slope, s)
    if EDGE or has.mask > 0 or has.bias == 1:
        ok = keys.ok
        if has.mask == 2:
            pointers = head.mask + (r * strides.mask_row + j * strides.mask_column)
            seen = load_where(pointers, exists, EDGE) != 0
            TRANSPOSED: tl.constexpr = keys.ok.shape[1] == 1
            ok = ok & seen if EDGE or has.bias == 1 or TRANSPOSED else seen
        if EDGE and has.right:
            ok = ok & (j <= i + (shift + band.right))
        if EDGE and has.left:
            ok = ok & (j >= i + (shift - band.left))
        s = tl.where(ok, s, float("-inf"))
        if has.softcap and (has.mask == 1 or has.bias == 1):  # a masked key may hold anything
            tanh = tl.where(ok, tanh, 0.0)
    return s, tanh


@triton.jit
def store_sums(LSE, STATISTICS, rows, ok, m, l, has: tl.constexpr):
    """Store what the backward needs of rows, where `ok` is True: lse and, beside a bias or ALiBi,
    the maximum and the log-sum in base 2. m is the maximum of the scores, l the sum of the weights.
    Return what the weighted values are divided by: l, or 1 where the row sees nothing.
    """
    empty = l == 0.0
    sums = tl.where(empty, 1.0, l)
    lse = tl.where(empty, float("-inf"), (m + tl.math.log2(sums)) * LN2)
    tl.store(LSE + rows, lse, mask=ok)
    if has.bias > 0 or has.alibi:
        pair = STATISTICS + rows * 2
        tl.store(pair, tl.where(empty, 0.0, m), mask=ok)
        offset = tl.where(empty, float("-inf"), -tl.math.log2(sums))
        tl.store(pair + 1, offset, mask=ok)
    return sums


@triton.jit
def shifted(s, offset, head, has: tl.constexpr):
    """Add an offset, which is broadcast, to the scores s."""
    if has.fold:
        return tl.fma(s, head.call.scale, offset)
    else:
        return s + offset
