"""What the attention kernels share: the named tuples that group their arguments, loads and stores
of rows, where a sequence and a head begin, which keys a query sees, and the scores.

The launchers fill `Tile` and `Features`, whose fields are compile-time constants. A program makes
`Sequence`, `Call`, `Head`, `Indices` and `Keys` for itself.

Letters: B sequences, H query heads, G key-value heads, Sq queries, Sk keys, D and DV head dims; a
tile has BM rows and BN columns; i is a query, j a key, b a sequence, h and g a head. A band bounds
how far before and after itself a query sees keys: causality and windows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common import LN2, LOG2E, dropout_keep, dropout_stream, load_where

# ---------------------------------------------------------------------- groups of kernel arguments


class Inputs(NamedTuple):
    """Pointers to query [B, H, Sq, D], key [B, G, Sk, D] and value [B, G, Sk, DV]."""

    query: Any
    key: Any
    value: Any


class BackwardInputs(NamedTuple):
    """Pointers to `Inputs` and to the gradient of the output [B, H, Sq, DV]."""

    query: Any
    key: Any
    value: Any
    grad_output: Any


class OptionalInputs(NamedTuple):
    """Pointers to the tensors that a call may leave out. A kernel reads one only if `Features` has
    it.
    """

    mask: Any  # [B, H, Sq, Sk] as bytes, zero masks out; or the bits of a block mask
    bias: Any  # [B, H, Sq, Sk]; in a packed batch [Tk]
    slopes: Any  # [B, H]
    lengths: Any  # [B] keys of each sequence; in a packed batch the offsets of its keys, [B + 1]
    starts: Any  # [B + 1], the offsets of the queries in a packed batch; or the lists of a mask
    seed: Any  # []
    bounds: Any  # [B or 1, H or 1, tiles or 1, 8], see bounds.py; or the spans of a block mask
    offsets: Any = 1  # [B + 1] of the queries, if a packed batch has a block mask


class RowStrides(NamedTuple):
    """The strides of a tensor [batch, head, row, feature], whose features are contiguous."""

    batch: Any
    head: Any
    row: Any


class AttentionStrides(NamedTuple):
    """The strides of the inputs and, expanded to [B, H, Sq, Sk] or [B, H], of `OptionalInputs`.
    For a block mask `bounds_tile` is the number of entries of its lists.
    """

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
    bounds_batch: Any = 0
    bounds_head: Any = 0
    bounds_tile: Any = 0


class Sizes(NamedTuple):
    """How many heads, queries and keys there are."""

    heads: Any  # H
    group: Any  # query heads of one key-value head, H / G
    queries: Any  # Sq; in a packed batch the most that a sequence has
    keys: Any  # Sk; in a packed batch the most that a sequence has
    query_rows: Any  # rows of the query tensor: Sq, or Tq in a packed batch
    key_rows: Any
    documents: Any = 1  # the sequences of a packed batch with a block mask


class Band(NamedTuple):
    """How many keys a query sees before and after its own position."""

    left: Any
    right: Any


class Factors(NamedTuple):
    """The factor of the scores, the softcap, and what dropout needs."""

    scale: Any
    softcap: Any
    threshold: Any  # dropout keeps an element whose word is not below it
    inv_keep: Any  # 1 / (1 - p)


class Tile(NamedTuple):
    """Compile-time: the tile of the scores S that a program works on, and how it computes."""

    rows: Any  # BM queries
    columns: Any  # BN keys
    dim: Any  # D
    dim_block: Any  # D, padded to a power of two
    value_dim: Any  # DV
    value_block: Any
    wide: Any  # whether offsets inside a head need 64 bits
    split: Any  # whether dK and dV have a loop of their own for tiles that need no mask
    # Whether a program that found NaN runs again with the masked keys as zeros. The loop that it
    # runs first need not guard its loads against what masked keys hold.
    recompute_masked: Any
    precision: Any  # of products of float32
    acc: Any  # the dtype of sums


class Features(NamedTuple):
    """Compile-time: which features a call uses."""

    mask: Any  # 0 none, 1 the same for all queries, 2 of every query and key
    bias: Any  # 0, 1 or 2, as for the mask
    alibi: Any
    softcap: Any
    left: Any  # whether the band is bounded to the left
    right: Any
    bottom_right: Any
    lengths: Any
    packed: Any
    dropout: Any
    fold_scale: Any  # whether `shifted` applies the scale, in one fma with its offset
    separate_max: Any = False  # whether the maximum and the log-sum of a row are two numbers
    sink: Any = False
    key_grad: Any = False  # whether a bias that is the same for all queries needs its gradient
    # Whether there are bounds: 1 of the mask, 2 of the bias, 3 those that a program computes itself
    bounds: Any = 0
    sections: Any = False  # whether the programs start section by section, see `locate_block`
    # 1 if the mask is a block mask, 2 if a band or lengths cut it, 3 documents, see lists.py
    lists: Any = 0
    invariant: Any = False  # whether the call is made within batch_invariant


# -------------------------------------------------------------------- groups that a program makes


class Sequence(NamedTuple):
    """Where one sequence begins and how long it is."""

    first_query: Any  # the row of its first query, in a packed batch
    first_key: Any
    queries: Any
    length: Any  # keys
    shift: Any  # query i stands at key i + shift


class Call(NamedTuple):
    """What all programs of a launch have in common."""

    optional: Any
    strides: Any
    sizes: Any
    band: Any
    factors: Any
    scale: Any  # the factor of q . k, with log2(e): the kernels compute powers of 2
    seed: Any


class Head(NamedTuple):
    """One query head of one sequence."""

    draws: Any  # `DropoutStream`
    mask: Any  # pointer to its mask, at the first row that the program reads, or one for each row
    bias: Any
    slope: Any  # of ALiBi, in base 2, or one for each row, or column of the transpose
    sequence: Any
    call: Any
    lists: Any = 0  # `Lists` of a block mask


class Indices(NamedTuple):
    """The indices of a tile of S, which broadcast against each other: [BM, 1] and [1, BN], or
    [1, BM] and [BN, 1] in the transpose.
    """

    i: Any  # queries
    j: Any  # keys
    r: Any  # queries, clamped to the rows that exist, counted from where `Head.mask` points to


class Keys(NamedTuple):
    """What all queries share of a tile of keys, [BN] each: whether the length, a mask and a bias
    that are the same for all queries keep a key, and that bias in base 2, or 0.
    """

    ok: Any
    bias: Any


# ------------------------------------------------------------------------------ rows of a matrix


@triton.jit
def load_rows(base, rows, stride, ok, D: tl.constexpr, BD: tl.constexpr, GUARD: tl.constexpr):
    """Load rows of a matrix [.., D] as a tile [rows, BD], with zeros past column D. With GUARD,
    rows whose `ok` is False are zeros; without it `ok` may be None.
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
def clamp(x, low, high):
    """Limit x to low <= x <= high."""
    return tl.minimum(tl.maximum(x, low), high)


# ------------------------------------------------------------------------- sequences, heads, band


@triton.jit
def locate_block(blocks, has: tl.constexpr, LAST_IS_LONGEST: tl.constexpr):
    """Return (batch_head, block): which of the `blocks` blocks of a head a program owns.

    A GPU starts programs in the order of their indices, the first axis fastest. A grid of one axis
    goes head by head. With `has.sections` the axes are the heads of a section, the blocks, and the
    sections. The longest blocks of all heads of a section start first, so that short ones are left
    to even out when multiprocessors are done, and what the blocks of a section read in common fits
    in the L2 cache.

    LAST_IS_LONGEST says where the longest block of a head is under causality. If a window is
    bounded to the left alone, it is at the other end.
    """
    if has.sections:
        batch_head = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        block = tl.program_id(1)
    else:
        batch_head = tl.program_id(0) // blocks
        block = tl.program_id(0) % blocks
    if (has.right or not has.left) == LAST_IS_LONGEST:
        block = blocks - 1 - block
    return batch_head, block


@triton.jit
def locate_rows(sizes, tile: tl.constexpr, has: tl.constexpr):
    """Return which BM queries a program owns: (batch_head, i0, b, h, g), where i0 is the first
    query.
    """
    blocks = tl.cdiv(sizes.queries, tile.rows)
    batch_head, block = locate_block(blocks, has, True)
    i0 = block * tile.rows
    b = (batch_head // sizes.heads).to(tl.int64)
    h = (batch_head % sizes.heads).to(tl.int64)
    return batch_head, i0, b, h, h // sizes.group


@triton.jit
def locate_keys(inputs, strides, sequence, b, g):
    """Return pointers to the first key and the first value of head g of sequence b."""
    key = inputs.key + b * strides.key_batch + g * strides.key_head
    key += sequence.first_key * strides.key_row
    value = inputs.value + b * strides.value_batch + g * strides.value_head
    value += sequence.first_key * strides.value_row
    return key, value


@triton.jit
def locate_sequence(optional, sizes, b, has: tl.constexpr):
    """Return where sequence b begins and how long it is.

    `optional.lengths` holds the number of keys of each sequence. In a packed batch it holds the
    offsets of the keys, and `optional.starts` the offsets of the queries; with a block mask the one
    sequence ends with the last document. All are clamped, so that a bad value never makes a program
    read out of bounds.
    """
    if has.packed:
        q0 = clamp(tl.load(optional.starts + b).to(tl.int32), 0, sizes.query_rows)
        k0 = clamp(tl.load(optional.lengths + b).to(tl.int32), 0, sizes.key_rows)
        q1 = clamp(tl.load(optional.starts + b + 1).to(tl.int32), q0, sizes.query_rows)
        k1 = clamp(tl.load(optional.lengths + b + 1).to(tl.int32), k0, sizes.key_rows)
        first_query = q0.to(tl.int64)
        first_key = k0.to(tl.int64)
        queries = tl.minimum(q1 - q0, sizes.queries)
        length = tl.minimum(k1 - k0, sizes.keys)
    else:
        first_query = (b * 0).to(tl.int64)
        first_key = (b * 0).to(tl.int64)
        queries = sizes.queries
        length = sizes.keys
        if has.lists == 3:  # later rows belong to no document
            # At least one: rows past the end read the last one.
            queries = clamp(tl.load(optional.offsets + sizes.documents).to(tl.int32), 1, queries)
            length = clamp(tl.load(optional.lengths + sizes.documents).to(tl.int32), 0, length)
        if has.lengths:
            length = clamp(tl.load(optional.lengths + b).to(tl.int32), 0, length)
    shift = 0
    if has.bottom_right:
        shift = length - queries
    return Sequence(first_query, first_key, queries, length, shift)


@triton.jit
def prepare_call(optional, strides, sizes, band, factors, has: tl.constexpr):
    """Compute the factor on q . k that `scores` expects, and load the seed."""
    scale = factors.scale * LOG2E
    if has.softcap:
        scale = factors.scale / factors.softcap * (2 * LOG2E)
    seed = 0
    if has.dropout:
        seed = tl.load(optional.seed)
    return Call(optional, strides, sizes, band, factors, scale, seed)


@triton.jit
def locate_head(call, sequence, batch_head, b, h, first, tile: tl.constexpr, has: tl.constexpr):
    """Return pointers to the mask and the bias of head h of sequence b at row `first`, the ALiBi
    slope, and the dropout stream. batch_head is b H + h.
    """
    strides = call.strides
    mask = call.optional.mask + b * strides.mask_batch + h * strides.mask_head
    mask += first * strides.mask_row
    bias = call.optional.bias + b * strides.bias_batch + h * strides.bias_head
    bias += first * strides.bias_row
    if has.packed and has.bias > 0:  # a bias of the keys
        bias += sequence.first_key * strides.bias_column
    slope = 0.0
    if has.alibi:
        slope = call.optional.slopes + b * strides.slope_batch + h * strides.slope_head
        if has.lists < 3:  # else `with_lists` loads that of each document
            slope = tl.load(slope).to(tile.acc) * LOG2E
    draws = 0
    if has.dropout:
        draws = dropout_stream(call.seed, batch_head)
    return Head(draws, mask, bias, slope, sequence, call)


@triton.jit
def kept(head, i0, n0, tile: tl.constexpr, has: tl.constexpr):
    """Return which elements [BM, BN] of the tile at query i0 and key n0 dropout keeps."""
    return dropout_keep(head.draws, i0, n0, head.call.factors.threshold, tile.rows, tile.columns)


@triton.jit
def first_row(batch_head, h, sequence, sizes, has: tl.constexpr):
    """Return where the rows of a head begin in lse and delta, [B, H, Sq], or [H, Tq] if packed."""
    if has.packed:
        return h.to(tl.int64) * sizes.query_rows + sequence.first_query
    else:
        return batch_head.to(tl.int64) * sizes.query_rows


@triton.jit
def first_key(batch_head, h, sequence, sizes, has: tl.constexpr):
    """Return where the keys of a head begin in the gradient of a bias of keys, [B, H, Sk], or
    [H, Tk] if packed.
    """
    if has.packed:
        return h.to(tl.int64) * sizes.key_rows + sequence.first_key
    else:
        return batch_head.to(tl.int64) * sizes.keys


@triton.jit
def unmasked_tiles(i0, sequence, band, tile: tl.constexpr, has: tl.constexpr):
    """Return (unmasked_begin, unmasked_end): for the queries i0 .. i0 + BM - 1, length and band
    hide no key of the tiles unmasked_begin <= n0 < unmasked_end. Both are multiples of BN.
    """
    shift = sequence.shift
    unmasked_end = sequence.length
    if has.right:
        unmasked_end = clamp(i0 + shift + band.right + 1, 0, sequence.length)
    unmasked_end = unmasked_end // tile.columns * tile.columns
    unmasked_begin = 0
    if has.left:
        unmasked_begin = tl.maximum(i0 + tile.rows - 1 + shift - band.left, 0)
        unmasked_begin = (unmasked_begin + tile.columns - 1) // tile.columns * tile.columns
        unmasked_end = tl.maximum(unmasked_end, unmasked_begin)
    return unmasked_begin, unmasked_end


@triton.jit
def keys_of_rows(i0, i1, length, shift, band, tile: tl.constexpr, has: tl.constexpr):
    """Return (lo, hi): by length and band the queries i0 .. i1 - 1 see no key outside of lo <= j <
    hi. lo is a multiple of BN.
    """
    lo = 0
    if has.left:
        lo = tl.maximum(i0 + shift - band.left, 0) // tile.columns * tile.columns
    hi = length
    if has.right:
        hi = tl.minimum(hi, i1 + shift + band.right)
    return lo, hi


@triton.jit
def seen_keys(sequence, band, has: tl.constexpr):
    """Return how many keys the queries may see, by length and band. A row past the end of the
    queries, which is a copy of the last one, may then see no more keys than that one: their scores
    would have no bound.
    """
    if has.right:
        return tl.minimum(sequence.length, sequence.queries + sequence.shift + band.right)
    else:
        return sequence.length


# --------------------------------------------------------------------------------------- the scores


@triton.jit
def in_base_2(bias, ACC: tl.constexpr):
    """Convert a bias to base 2. Below -2.3586e38 the result overflows float32 to -inf, which masks
    out; float64 does the same, so that both agree.
    """
    bias = bias.to(ACC) * LOG2E
    if bias.dtype == tl.float64:
        bias = tl.where(bias < -3.4028235677973366e38, float("-inf"), bias)
    return bias


@triton.jit
def key_row(head, j, ok, tile: tl.constexpr, has: tl.constexpr, EDGE: tl.constexpr):
    """Load a mask and a bias that are the same for all queries, at the keys j [BN].

    `ok` [BN] is True for keys below the length. Without EDGE it is True for all.
    """
    # The loads are bounded by Sk, not by the length: the compiler knows the divisibility of Sk.
    strides, exists = head.call.strides, j < head.call.sizes.keys
    if has.packed:  # the keys after those of the sequence may be the last of the batch
        exists = ok
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
    """Return the scores in base 2, -inf where a query does not see a key, and the tanh of the
    softcap, from s = q . k [BM, BN] or its transpose. With `has.fold_scale` the scores are not yet
    multiplied by the scale: `shifted` does that.

    `at` and `keys` broadcast against s. Without EDGE, length and band hide no element of the tile.
    A large bias leaves a score few digits, so forward and backward have to round it alike: hence an
    fma, which the compiler cannot round in two ways.
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
        s = s if has.fold_scale else s * scale
    elif has.bias == 1:
        s = tl.fma(s, scale, keys.bias)
    else:
        pointers = head.bias + (r * strides.bias_row + j * strides.bias_column)
        s = tl.fma(s, scale, in_base_2(load_where(pointers, exists, EDGE), tile.acc))
    if has.alibi:
        distance = i + shift - j
        if has.lists == 3:
            distance = i - head.lists.place if i.shape[0] == 1 else head.lists.place - j
        s = tl.fma(tl.abs(distance).to(tile.acc), -head.slope, s)
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
    """Store what the backward needs of rows, where `ok` is True: lse and, with a bias or ALiBi, the
    maximum m of the scores and minus the log of the sum l of the weights, in base 2. Return l, or 1
    for a row that sees no key: the divisor of the output.
    """
    empty = l == 0.0
    sums = tl.where(empty, 1.0, l)
    lse = tl.where(empty, float("-inf"), (m + tl.math.log2(sums)) * LN2)
    tl.store(LSE + rows, lse, mask=ok)
    if has.separate_max:
        pair = STATISTICS + rows * 2
        tl.store(pair, tl.where(empty, 0.0, m), mask=ok)
        offset = tl.where(empty, float("-inf"), -tl.math.log2(sums))
        tl.store(pair + 1, offset, mask=ok)
    return sums


@triton.jit
def shifted(s, offset, head, has: tl.constexpr):
    """Return scores plus offset, which broadcasts; with `has.fold_scale` also apply the scale."""
    if has.fold_scale:
        return tl.fma(s, head.call.scale, offset)
    else:
        return s + offset
