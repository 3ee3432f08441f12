"""The tiles of the attention kernels, by architecture, dtype and head dim."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from ..launch import next_power_of_2


class AttentionTiles(NamedTuple):
    """The configuration of a kernel, which works on BM queries x BN keys at a time."""

    BM: int
    BN: int
    warps: int
    stages: int


# By kernel, bits of an input element, architectures and padded head dim: BM, BN, warps and stages.
# Heads of 512 have none where the loops spill. "full": these replace the others if the kernel reads
# a mask or a bias over queries and keys. Those of "decode" are upper bounds: `narrowed` fits BM,
# rows of heads x queries, and BN, keys, to the call.
# benchmarks/proof/compile_gate.py prints the registers, spills and shared memory of each.
_TABLE = """
kernel        bits  architectures       to 32       64          128         256         512
forward       16    sm_90 sm_100        128 64 8 3  128 64 8 3  128 64 8 3  128 32 8 3  32 32 8 3
forward       16    sm_80               128 64 8 3  128 64 8 3  128 32 8 3  64 32 8 3   32 32 8 2
forward       16    sm_86               128 64 8 3  128 64 8 3  128 32 8 3  64 32 8 2   32 16 8 2
forward       16    other               64 32 4 2   64 32 4 2   64 32 8 1   32 16 8 1
forward       32    sm_90               64 32 8 2   64 32 4 2   16 32 4 2   16 16 8 2
forward       32    sm_80 sm_86 sm_100  32 32 4 2   32 32 4 2   16 32 4 2   16 16 8 2
forward       32    other               32 32 4 1   32 32 4 1   16 16 4 1   16 16 8 1
dkdv          16    sm_90               32 128 8 3  64 128 8 3  32 128 8 3  32 64 8 2   32 16 8 3
dkdv          16    sm_100              32 128 8 3  32 128 8 3  64 64 8 3   32 64 8 3   16 16 8 2
dkdv          16    sm_80               32 128 8 3  32 128 8 3  64 64 8 3   32 32 8 3   32 16 8 2
dkdv          16    sm_86               32 128 8 3  32 128 8 3  32 64 8 3   32 32 8 2   16 16 8 2
dkdv          16    other               32 32 4 1   32 32 4 1   32 32 4 1   16 16 4 1
dkdv          32    sm_90 sm_100        32 64 8 1   32 64 8 1   32 16 4 2   16 16 8 2
dkdv          32    sm_80               32 32 4 2   32 32 4 2   32 16 4 2   16 16 8 2
dkdv          32    sm_86               32 32 4 2   32 32 4 2   32 16 4 1   16 16 8 1
dkdv          32    other               16 32 4 1   32 32 4 1   16 16 8 1   16 16 8 1
dq            16    sm_90               128 64 8 3  128 64 8 3  128 64 8 3  128 32 8 3  32 32 8 3
dq            16    sm_100              128 64 8 3  128 64 8 3  128 64 8 3  128 32 8 2  16 32 8 2
dq            16    sm_80               64 64 4 3   64 64 4 3   64 64 8 3   64 32 8 3   32 32 8 2
dq            16    sm_86               64 64 4 3   64 64 4 3   64 32 8 3   32 32 8 2   16 16 8 2
dq            16    other               32 32 4 1   32 32 4 1   32 32 4 2   16 16 4 1
dq            32    sm_90 sm_100        64 32 8 1   64 32 8 1   16 32 4 2   16 16 8 2
dq            32    sm_80 sm_86         32 32 4 2   32 32 4 2   16 32 4 2   16 16 8 2
dq            32    other               32 16 4 1   32 16 4 1   16 16 4 1   16 16 8 1
dbias         16    sm_90 sm_100        64 64 8 3   64 64 8 3   64 64 8 3   64 64 8 1   64 64 8 1
dbias         16    sm_80               32 64 8 3   32 64 8 3   32 64 8 3   32 64 8 1   32 64 8 1
dbias         16    sm_86               32 64 8 3   32 64 8 3   32 64 8 2   32 64 8 1   16 32 8 1
dbias         16    other               32 32 4 1   32 32 4 1   16 32 4 1   16 32 4 1
dbias         32    sm_90 sm_100        64 32 8 1   64 32 4 1   16 32 4 1   16 32 4 1
dbias         32    other               16 32 4 1   16 32 4 1   16 32 4 1   16 32 4 1
decode        16    sm_90 sm_100        64 64 4 3   64 64 4 3   64 64 4 3   32 32 4 3   16 32 4 3
decode        16    sm_80               64 64 4 3   64 64 4 3   64 64 4 3   32 32 8 3   16 32 4 2
decode        16    sm_86               64 64 4 3   64 64 4 3   64 32 4 3   32 32 4 2   16 32 4 1
decode        16    other               32 32 4 2   32 32 4 2   32 32 4 1   16 16 4 1
decode        32    sm_90 sm_100        32 32 4 2   32 32 4 2   16 32 4 2   16 16 8 2
decode        32    sm_80 sm_86         32 32 4 2   32 32 4 2   16 32 4 2   16 16 8 2
decode        32    other               16 32 4 1   16 32 4 1   16 16 4 1   16 16 8 1
forward full  16    sm_86               128 64 8 2  128 64 8 2  128 32 8 3  64 32 8 2   32 16 8 2
dkdv full     32    sm_90               32 64 8 1   32 64 8 1   32 16 4 1   16 16 8 2
dkdv full     32    sm_86               32 32 8 2   32 32 8 2   32 16 4 2   16 16 8 1
dkdv full     32    sm_100              32 64 8 1   32 64 8 1   32 16 4 2   16 16 8 1
dq full       16    sm_90               128 32 8 3  128 64 8 3  128 64 8 3  64 32 8 3   32 32 8 3
dq full       16    sm_86               64 64 4 3   64 64 4 3   64 32 8 3   32 32 4 2   16 16 8 2
dq full       16    sm_100              128 64 8 3  128 64 8 3  128 64 8 2  64 32 8 3   32 32 8 3
dq full       32    sm_90               64 32 8 1   64 32 4 1   16 32 4 2   16 16 8 2
dq full       32    other               32 16 4 1   32 16 4 1   16 16 8 1   16 16 8 1
"""


def _parsed(line: str) -> dict[tuple[str, int, str], tuple[AttentionTiles, ...]]:
    """Return the tiles of a line of `_TABLE`, by kernel, bits and architecture."""
    kernel, bits, archs, *cells = re.split("  +", line)
    row = tuple(AttentionTiles(*map(int, cell.split())) for cell in cells)
    return {(kernel, int(bits), arch): row for arch in archs.split()}


CONFIGURATIONS = {
    key: row for line in _TABLE.strip().split("\n")[1:] for key, row in _parsed(line).items()
}
KERNELS = sorted({kernel for kernel, _, _ in CONFIGURATIONS if not kernel.endswith(" full")})


def widest_head(arch: str, dtype: torch.dtype) -> int:
    """Return the largest head dim that all kernels have tiles for on an architecture."""
    if arch == "interpreter":
        return 512
    return 16 << min(len(_row(kernel, dtype, arch)) for kernel in KERNELS)


def _bits(dtype: torch.dtype) -> int:
    return 32 if dtype == torch.float32 else 16


def _column(head_block: int) -> int:
    return max(0, (head_block - 1).bit_length() - 5)


def _row(
    kernel: str, dtype: torch.dtype, arch: str, full: bool = False
) -> tuple[AttentionTiles, ...]:
    bits = _bits(dtype)
    arch = arch if (kernel, bits, arch) in CONFIGURATIONS else "other"
    row = CONFIGURATIONS[kernel, bits, arch]
    return CONFIGURATIONS.get((kernel + " full", bits, arch), row) if full else row


def configuration(
    kernel: str,
    arch: str,
    dtype: torch.dtype,
    head_block: int,
    q_length: int,
    k_length: int,
    full: bool,
) -> AttentionTiles:
    """Choose the tiles of a kernel by architecture, dtype, padded head dim, lengths, and `full`:
    whether it reads a mask or a bias over queries and keys.
    """
    if arch == "interpreter":  # few programs, because each operation has a fixed cost
        BM, BN = (min(128, max(16, next_power_of_2(n))) for n in (q_length, k_length))
        return AttentionTiles(BM, BN, 4, 1)
    if kernel == "delta":  # 16 elements for each thread
        return AttentionTiles(2048 // head_block, 0, 4, 1)
    return _row(kernel, dtype, arch, full)[_column(head_block)]


# The backward in one kernel (short_backward.py), by kernel and architecture, for 16 bits: tiles for
# head dims up to 32, 64 and 128. Where a row is missing, the loops spill, as they do in float32, or
# issue more than those of the separate kernels.
SHORT = {
    (kernel, arch): tuple(AttentionTiles(*row) for row in rows)
    for kernel, archs, rows in (
        ("tiny", "sm_90", ((32, 128, 8, 3), (64, 128, 8, 3))),
        ("scratch", "sm_90", ((32, 128, 8, 3), (64, 128, 8, 3), (32, 128, 8, 2))),
        ("scratch", "sm_80 sm_86", ((32, 64, 4, 2), (32, 64, 4, 2))),
        ("scratch", "sm_100", ((32, 128, 8, 2), (64, 128, 8, 2))),
    )
    for arch in archs.split()
}
# Up to how many queries and keys they are expected to be faster. On sm_80 and sm_86 the memory
# decides about calls of 128, and the instructions, of which they issue more there, about longer
# ones. What is expected without a GPU is in benchmarks/NOTES.md.
_SHORT_PAYS = {"sm_90": 512, "sm_80": 128, "sm_86": 128}


def short_pays(
    arch: str, pairs: int, group: int, sizes: tuple[int, int], head_block: int, processors: int
) -> bool:
    """Return whether a backward in one kernel is expected to be faster, for `pairs` of a sequence
    and a key-value head, of which `group` heads each, and (queries, keys).

    A program has all of a pair, where the separate kernels share it between programs of 128 keys,
    or queries. These issue about as many instructions as each other for a tile of 128 x 128; one
    kernel issues 1.7 times as many, and at D = 128 twice as many, but reads and writes 8 tensors
    for 13.
    """
    if max(sizes) > _SHORT_PAYS.get(arch, 0):
        return False
    rows, columns = (-(-n // 128) for n in sizes)
    dkdv = -(-pairs * columns // processors) * group * rows
    dq = -(-pairs * group * rows // processors) * columns
    factor = 1.7 if head_block <= 64 else 2.0
    return -(-pairs // processors) * group * rows * columns * factor <= dkdv + dq


def in_block(
    tiles: AttentionTiles, kernel: str, biased: bool, without_wgmma: bool
) -> AttentionTiles:
    """Fit tiles to those of a block mask, 128 queries x 64 keys, of which they are a part.

    The warps of dK and dV become as few as their keys. More than 32 queries beside a bias of
    queries and keys would spill, and more than 16 `without_wgmma` in the one loop of dK and dV. The
    loop that searches a list for the gradient of a bias copies nothing ahead.
    """
    BM, BN, warps, stages = tiles
    if kernel == "dbias":
        stages = 1
    elif kernel != "forward" and biased:
        warps = 8
    elif kernel == "dkdv" and BN > 64:
        warps = max(4, warps * 64 // BN)
    if kernel == "dkdv":
        BM = min(BM, 16 if without_wgmma else 32 if biased else BM)
    return AttentionTiles(min(BM, 128), min(BN, 64), warps, stages)


def heads_of_section(heads: int, size: int, cache: int) -> int:
    """Choose how many of a number of heads start their blocks together (`locate_block`): as many as
    have what their blocks read, `size` bytes a head, in the L2 cache, in sections of equal size.
    """
    most = max(1, cache // max(1, size))
    sections = max(1, -(-heads // most))
    while heads % sections:
        sections += 1
    return heads // sections


# A call with at most this many queries and at least this many keys uses the kernels of decode.py.
MOST_QUERIES, LEAST_KEYS = 16, 256


def splits_keys(queries: int, keys: int, dropout_p: float, packed: bool) -> bool:
    """Return whether a call uses the split-KV kernels: few queries, many keys, no dropout, not
    packed.
    """
    few = queries <= MOST_QUERIES and keys >= LEAST_KEYS
    return few and dropout_p == 0 and not packed


# Few queries: from this many bytes of keys and values on, half of which take as long to read as the
# bounds of a mask to compute, 4 us at 4.3 TB/s.
DECODE_BOUNDS_PAY = 2**25


def bounds_pay(arch: str, scores: int, read: int, keys: int) -> bool:
    """Return whether to compute the bounds of a mask with `read` elements, for a call with a number
    of scores, B H Sq Sk.
    """
    if arch == "interpreter":
        return keys > 128
    return 4 * read <= scores and scores >= 2**25


def narrowed(
    tiles: AttentionTiles, rows: int, keys: int, heads: int, processors: int
) -> AttentionTiles:
    """Fit the tiles of the split-KV kernel to a call: no more rows than the call has, and few
    enough keys that each processor gets two programs, if possible. `heads` counts the heads that
    keys are loaded for.
    """
    BM, BN = min(tiles.BM, max(16, next_power_of_2(rows))), tiles.BN
    programs = heads * -(-rows // BM)
    while BN > 16 and programs * -(-keys // BN) < 2 * processors:
        BN //= 2
    return tiles._replace(BM=BM, BN=BN)


def parts_of_keys(tiles: int, programs: int, processors: int) -> int:
    """Choose into how many parts a number of tiles of keys is split, if each part takes `programs`
    programs: at least as many as give two programs to each processor, and at most twice that. Of
    these, choose the number whose last program ends first, counting time in tiles.
    """
    slots = 2 * processors
    least = min(-(-slots // max(1, programs)), max(1, tiles))
    most = min(2 * least, max(1, tiles))

    def time(parts: int) -> tuple[int, int]:
        return -(-programs * parts // slots) * -(-tiles // parts), parts

    return min(range(least, most + 1), key=time)


# Tiles that no table has: fewer passes over the queries, for more registers; and small ones for
# short sequences, of which several programs fit on a multiprocessor, also with dropout.
OTHERS = {("forward", 16): [AttentionTiles(128, 128, 8, 2), AttentionTiles(64, 64, 4, 3)]}


def rows(kernel: str, dtype: torch.dtype, head_block: int) -> list[AttentionTiles]:
    """Return the tiles that a measurement may choose: those of every architecture at this head dim
    and at its neighbours, and OTHERS, each with its own number of stages, two and three.
    """
    bits, i = _bits(dtype), _column(head_block)
    near = list(OTHERS.get((kernel, bits), ()))
    for (name, width, _), table in CONFIGURATIONS.items():
        if width == bits and name.removesuffix(" full") == kernel:
            near += table[max(0, i - 1) : i + 2]
    return list({row._replace(stages=n): None for row in near for n in (row.stages, 2, 3)})
