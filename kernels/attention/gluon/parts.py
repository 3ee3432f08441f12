"""Parts of the Gluon kernels for Hopper: layouts, barriers, tiles in shared memory and their TMA
descriptors, and rings of slots.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...common import LOG2E
from ...launch import triton_dtype
from ..lists import COLUMNS as MASK_COLUMNS
from ..lists import ROWS as MASK_ROWS
from ..lists import WHOLE, WORDS, listed_spans, listed_tile, slot_of_entry
from ..scores import Sequence

copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.9, 3.6
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.constexpr_function
def has_bounds(has):
    """Return whether a mask or a bias is the same for all queries: [keys]."""
    return has.mask == 1 or has.bias == 1


@gluon.constexpr_function
def has_terms(has):
    """Return whether a mask or a bias differs between queries: [queries, keys]."""
    return has.mask == 2 or has.bias == 2


@gluon.constexpr_function
def accumulator(columns):
    """Return the layout of a product [64, columns] of four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def counter_layout(BM, BN):
    """Return the layout of dropout's counters [BM / 2, BN / 2]: that of the scores without bit 3 of
    row and column, so that a thread computes the words of its own scores.
    """
    columns = [[0, 1]] + [[0, 8 << i] for i in range(8) if 8 << i < BN // 2]
    lanes, warps = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]]
    return gl.DistributedLinearLayout(columns, lanes, warps, [], [BM // 2, BN // 2])


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """Return the next slot of a ring and its phase, which changes when the ring starts again."""
    slot += 1
    wraps = slot == SLOTS
    return gl.where(wraps, 0, slot), phase ^ wraps.to(gl.int32)


@gluon.jit
def slot_of(t, SLOTS: gl.constexpr):
    """Return the slot of a ring that the t-th tile is in, and its phase."""
    return t % SLOTS, t // SLOTS & 1


@gluon.jit
def like(x, value):
    """Return a tensor like x that holds one value."""
    return gl.full_like(x, 1.0) * value


@gluon.jit
def spread(rows, x):
    """Return rows [BM] for each column of x [BM, BN]."""
    return gl.broadcast(gl.expand_dims(rows, 1), x)[0]


@gluon.constexpr_function
def _packing(dtype):
    """Return the instruction that rounds two float32 to an int32."""
    return f"cvt.rn.{'bf16x2' if dtype == gl.bfloat16 else 'f16x2'}.f32 $0, $2, $1;"


@gluon.jit
def pack(p, dtype: gl.constexpr):
    """Round float32 [BM, BN] to 16 bits, and put two of a row into an int32 [BM, BN / 2]."""
    low, high = gl.split(p.reshape([p.shape[0], p.shape[1] // 2, 2]))
    # If it were pure, the loop would compute it again for each use.
    return gl.inline_asm_elementwise(
        _packing(dtype), "=r,f,f", [low, high], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def unpack(words, dtype: gl.constexpr, layout: gl.constexpr):
    """Return the 16-bit values that `pack` put into words."""
    low = words.to(gl.int16).to(dtype, bitcast=True)
    high = (words >> 16).to(gl.int16).to(dtype, bitcast=True)
    x = gl.join(low, high).reshape([words.shape[0], words.shape[1] * 2])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def rows_of(base, rows, stride, B: gl.constexpr, D: gl.constexpr, BD: gl.constexpr):
    """Make the TMA descriptor of a matrix [rows, D] that is copied in tiles [B, BD]. Elements
    past its end read as zeros and are not written.
    """
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([B, BD], base.dtype.element_ty)
    return tma.make_tensor_descriptor(base, [rows, D], [stride, 1], [B, BD], LAYOUT)


def map_of(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Make the TMA descriptor of a tensor [B, H, S, D] that is copied in tiles [rows, width] of a
    head, on the host. Elements past its end read as zeros and are not written.
    """
    block = [1, 1, rows, width]
    layout = gl.NVMMASharedLayout.get_default_for(block, triton_dtype(x.dtype))
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


@gluon.jit
def at_row(b, head, row, tile: gl.constexpr):
    """Return the coordinates of the tile at a row of a head, for its TMA descriptor: that of
    `map_of` if `tile.mapped`, or of `rows_of`.
    """
    if tile.mapped:
        return b.to(gl.int32), head.to(gl.int32), row, 0
    else:
        return row, 0


@gluon.jit
def tiles_of(dtype: gl.constexpr, count: gl.constexpr, B: gl.constexpr, BD: gl.constexpr):
    """Allocate `count` tiles [B, BD]."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([B, BD], dtype)
    return gl.allocate_shared_memory(dtype, [count, B, BD], LAYOUT)


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """Make `count` barriers that end a phase after `arrivals` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(count):
        mbarrier.init(bars.index(n), count=arrivals)
    return bars


@gluon.jit
def buffer(tensor, count: gl.constexpr):
    """Allocate `count` tiles of a tensor."""
    shape: gl.constexpr = [count, tensor.block_shape[0], tensor.block_shape[1]]
    return gl.allocate_shared_memory(tensor.dtype, shape, tensor.layout)


@gluon.jit
def up_to_last_seen(sequence, bounds, has: gl.constexpr):
    """Return a sequence that ends at the last key within the bounds of the mask, so that TMA reads
    later keys as zeros.
    """
    if has.bounds:
        return Sequence(
            first_query=sequence.first_query,
            first_key=sequence.first_key,
            queries=sequence.queries,
            length=gl.minimum(sequence.length, bounds.last),
            shift=sequence.shift,
        )
    else:
        return sequence


@gluon.constexpr_function
def _layout_of_lanes(WARPS):
    """Return the layout of 128 numbers of which each of 1 or 4 warps has all."""
    warps = [[0]] * (WARPS // 2)
    return gl.DistributedLinearLayout([[32], [64]], [[1], [2], [4], [8], [16]], warps, [], [128])


@gluon.jit
def lanes():
    """Return 0 .. 127, for `entries_within`."""
    return gl.arange(0, 128, layout=_layout_of_lanes(gl.num_warps()))


@gluon.jit
def spans_of_lists(
    tiles, lists, call, own, tile: gl.constexpr, has: gl.constexpr, OWNS_KEYS: gl.constexpr
):
    """Return (lists, parts, run, whole) of the program that owns the queries or keys from `own` on:
    the number of tiles that are partly seen, or that the band or the length cut; where the run
    begins, in keys or queries; and how many whole tiles there are, with those of the run. `tiles`
    are those of `listed_spans`.
    """
    width: gl.constexpr = tile.rows if OWNS_KEYS else tile.columns
    PARTS: gl.constexpr = (MASK_ROWS if OWNS_KEYS else MASK_COLUMNS) // width
    if has.lists == 1:
        whole = (lists.run_end - lists.run_begin) // width + (lists.part - lists.begin) * PARTS
        return lists, (lists.end - lists.part) * PARTS, lists.run_begin, whole
    else:
        edges = listed_spans(tiles, lists, call, own, tile, has, OWNS_KEYS, lanes())
        lists, run, _, edge = edges
        return lists, edge.hi, run.lo, gl.cdiv(run.hi - run.lo, width)


@gluon.jit
def tile_of_lists(
    lists,
    t,
    parts,
    run_begin,
    width: gl.constexpr,
    SIZE: gl.constexpr,
    EDGE: gl.constexpr,
    has: gl.constexpr,
):
    """Return the first key, or query, of the t-th tile that a block mask shows and, with EDGE, the
    slot of its bits. First come `parts` tiles that are partly seen, then those of the run, which
    begins at `run_begin`, then the other whole tiles. Without EDGE the tile is whole.

    A tile of the mask has the size SIZE, and those of the kernel are parts of it.
    """
    PARTS: gl.constexpr = SIZE // width
    whole = t - parts  # the number among whole tiles
    n, slot = run_begin + whole * width, 0
    if has.lists == 1:
        run = gl.maximum((lists.run_end - lists.run_begin) // width, 1)
        listed = whole >= run
        first = lists.begin
        number = whole - run
        if EDGE:
            listed = listed | (whole < 0)
            first = gl.where(whole < 0, lists.part, first)
            number = gl.where(whole < 0, t, number)
        entry = first + number // PARTS
        index = gl.load(lists.tiles + entry, mask=listed, other=0).to(gl.int32)
        n = gl.where(listed, index * SIZE + number % PARTS * width, n)
        if EDGE:
            exists = (lists.run_end > lists.run_begin).to(gl.int32)
            slot = gl.where(listed, slot_of_entry(lists, entry, listed), exists)
    elif EDGE:
        at, of_bits = listed_tile(gl.minimum(t, parts - 1), lists, width, SIZE, has, True)
        n, slot = gl.where(whole < 0, at, n), gl.where(whole < 0, of_bits, WHOLE)
    return n, slot


@gluon.jit
def store_bits(bits, part, lists, slot, i0, N: gl.constexpr, COUNT: gl.constexpr):
    """Store bits of a tile of a block mask to COUNT rows of `bits` [.., N], from `part` on: for the
    queries i0 .. i0 + N - 1 of the tile the words of the first 32 keys, then those of the others,
    then the same for the next N queries.
    """
    i = i0 + gl.arange(0, N, layout=gl.BlockedLayout([N // 32], [32], [1], [0]))
    words = lists.bits + slot.to(gl.int64) * WORDS
    for n in gl.static_range(COUNT):
        bits.index(part + n).store(gl.load(words + i * 2 + (n // 2 * N * 2 + n % 2)))


@gluon.jit
def seen_by_bits(bits, part, j, S: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Return which keys j [64] of a tile each query sees, by two rows of `bits`, for scores
    [queries, 64] or, if TRANSPOSED, [64, queries].
    """
    AXIS: gl.constexpr = 0 if TRANSPOSED else 1
    OF_LANE: gl.constexpr = 23 if TRANSPOSED else 6  # the bits of j that depend on the thread
    low = gl.expand_dims(bits.index(part).load(gl.SliceLayout(AXIS, S)), AXIS)
    high = gl.expand_dims(bits.index(part + 1).load(gl.SliceLayout(AXIS, S)), AXIS)
    j = gl.expand_dims(j, 1 - AXIS)
    words = gl.where(j < 32, low, high)
    return ((words >> (j & OF_LANE)) & (1 << (j & (31 - OF_LANE)))) != 0


@gluon.jit
def mask_of(head):
    """Return pointers to the mask and the bias of the first key of a head, and their strides."""
    strides = head.call.strides
    return head.mask, strides.mask_column, head.bias, strides.bias_column


@gluon.jit
def bounds_of_keys(mask, j, keys, has: gl.constexpr):
    """Return the bias of the keys j in base 2, or inf without a bias; -inf for a masked key. Keys
    past the end are not masked. `mask` is what `mask_of` returns.
    """
    MASK, mask_stride, BIAS, bias_stride = mask
    bound = gl.full_like(j.to(gl.float32), float("inf"))
    if has.bias == 1:
        bias = gl.load(BIAS + j * bias_stride, mask=j < keys, other=0)
        bound = bias.to(gl.float32) * LOG2E
    if has.mask == 1:
        byte = gl.load(MASK + j * mask_stride, mask=j < keys, other=1)
        bound = gl.where(byte != 0, bound, float("-inf"))
    return bound
