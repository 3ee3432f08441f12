"""A warp-specialised forward kernel: some warps copy keys and values by TMA, the others compute.
`fastformer tune` measures it for calls without the options that it lacks.

Source: Shah et al. 2024, "FlashAttention-3", section 3.1 (the producer and its consumers).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common import LN2, LOG2E
from .configurations import Tiles
from .scores import locate_keys, locate_rows, locate_sequence

# The rows that a measurement may choose, by name. The compiler specialises the warps of a loop only
# with 4 warps and two stages.
WARP_SPECIALISED = {f"warp-specialised 128 {BN}": Tiles(128, BN, 4, 2) for BN in (64, 128)}


@triton.jit
def _matrix(base, rows, stride, B: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Make the TMA descriptor of a matrix [rows, D] that is read and written in tiles [B, BD]."""
    return tl.make_tensor_descriptor(base, [rows, D], [stride, 1], [B, BD])


@triton.jit
def warp_specialised_kernel(
    inputs,
    O,
    LSE,
    STATISTICS,
    SINKS,
    optional,
    output_strides,
    strides,
    sizes,
    band,
    factors,
    tile: tl.constexpr,
    has: tl.constexpr,
    MASK: tl.constexpr,
):
    """Compute what `forward_kernel` does in one loop without branches, for calls without a mask, a
    bias, ALiBi, a softcap, a left side of the band, dropout and packing. Without MASK every query
    sees every key, and the number of keys is a multiple of BN.

    Query, key, value and O are read and written through TMA descriptors, which need addresses and
    strides in multiples of 16 bytes.
    """
    batch_head, i0, b, h, g = locate_rows(sizes, tile, has)
    sequence = locate_sequence(optional, sizes, b, has)
    length = sequence.length
    q_base = inputs.query + b * strides.query_batch + h * strides.query_head
    k_base, v_base = locate_keys(inputs, strides, sequence, b, g)
    o_base = O + b * output_strides.batch + h * output_strides.head
    D: tl.constexpr = tile.dim
    BD: tl.constexpr = tile.dim_block
    DV: tl.constexpr = tile.value_dim
    BDV: tl.constexpr = tile.value_block
    q_rows = _matrix(q_base, sizes.queries, strides.query_row, tile.rows, D, BD)
    k_rows = _matrix(k_base, length, strides.key_row, tile.columns, D, BD)
    v_rows = _matrix(v_base, length, strides.value_row, tile.columns, DV, BDV)
    o_rows = _matrix(o_base, sizes.queries, output_strides.row, tile.rows, DV, BDV)
    scale = factors.scale * LOG2E
    i = i0 + tl.arange(0, tile.rows)
    j = tl.arange(0, tile.columns)
    hi = length
    last = i * 0 + (length - 1)  # the last key that each query sees
    if has.right:
        hi = tl.minimum(hi, i0 + tile.rows + sequence.shift + band.right)
        last = tl.minimum(i + (sequence.shift + band.right), last)
    acc = tl.zeros([tile.rows, tile.value_block], tile.acc)
    l = tl.zeros([tile.rows], tile.acc)
    m = tl.full([tile.rows], float("-inf"), tile.acc)
    if has.sink:  # as if a first key had been seen, whose value is zero; one of -inf has no weight
        m = (tl.zeros([tile.rows], tile.acc) + tl.load(SINKS + h).to(tile.acc) * LOG2E) / scale
        l += 1.0
    q = q_rows.load([i0, 0])
    for n0 in tl.range(0, hi, tile.columns, warp_specialize=True):
        k = k_rows.load([n0, 0])
        s = tl.dot(q, k.T, input_precision=tile.precision)  # [BM, BN]
        if MASK:
            s = tl.where(j[None, :] <= (last - n0)[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        base = m_new
        if MASK:  # a row without a key so far: -inf - -inf is NaN
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
        offset = base * -scale
        p = tl.math.exp2(tl.fma(s, scale, offset[:, None]))
        rescale = tl.math.exp2(tl.fma(m, scale, offset))
        l = l * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        v = v_rows.load([n0, 0])
        acc = tl.dot(p.to(v.dtype), v, acc, tile.precision, out_dtype=tile.acc)
        m = m_new

    empty = l == 0.0
    sums = tl.where(empty, 1.0, l)
    lse = tl.where(empty, float("-inf"), (m * scale + tl.math.log2(sums)) * LN2)
    row = batch_head.to(tl.int64) * sizes.query_rows
    tl.store(LSE + row + i, lse, mask=i < sizes.queries)
    o_rows.store([i0, 0], (acc / sums[:, None]).to(O.dtype.element_ty))
