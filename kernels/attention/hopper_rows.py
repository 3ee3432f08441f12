"""Which calls the Hopper kernels support, and their configurations, the rows that a measurement may
choose. This file does not import Gluon.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import triton
from torch import Tensor

from fastformer.description import Attention

from .configurations import Tiles

SHARED = 232448  # bytes of shared memory that a block may have
BARRIERS = 1024  # at most, of these


class Row(NamedTuple):
    """A configuration of the forward."""

    BM: int  # queries of a program
    BN: int  # keys of a tile
    warps: int  # of a consumer
    stages: int  # slots of the rings of keys and values
    turns: bool = True
    packed: bool = False
    persistent: bool = False


HOPPER = {
    "Gluon 128 128": Row(128, 128, 4, 2),
    "Gluon 128 64": Row(128, 64, 4, 2),
    "Gluon 128 128, no turns": Row(128, 128, 4, 2, turns=False),
    "Gluon 128 128, packed": Row(128, 128, 4, 2, packed=True),
    "Gluon 192 128, packed": Row(192, 128, 4, 2, packed=True),
    "Gluon 128 128, persistent": Row(128, 128, 4, 2, persistent=True),
}

# Rows that are not measured with a version of Triton, and why.
REFUSED = {
    "3.9": {
        "Gluon 192 128, packed": "its loops access local memory, and issue 6% to 17% more "
        "instructions than those of Gluon 128 128"
    }
}


def refused(version: str = triton.__version__) -> dict[str, str]:
    """Return the rows that are not measured with a version of Triton, and why."""
    return REFUSED.get(".".join(version.split(".")[:2]), {})


class How(NamedTuple):
    """Compile-time: how a program of the kernel divides its work."""

    consumers: Any  # of 64 queries each
    slots: Any  # of the rings of keys and of values
    term_slots: Any  # of the ring of masks and biases of queries and keys
    term_bytes: Any  # of mask and bias [queries, keys], for each score
    turns: Any  # whether the consumers take turns in issuing products
    packed: Any  # whether a loop carries weights as 16 bits
    persistent: Any  # whether a program computes several blocks of queries, one after the other
    mapped: Any = False  # whether the host makes the TMA descriptors, see `shares_descriptors`


class Order(NamedTuple):
    """The grid of `locate_block`. A persistent program computes several of its blocks of queries;
    other programs do not read it.
    """

    x: Any = 1
    y: Any = 1
    z: Any = 1


def in_turn(row: Row, grid: tuple[int, ...], processors: int) -> tuple[Order, tuple[int, ...]]:
    """Return the order of the blocks of a call, and the grid of the programs that compute them: for
    a persistent row one program for each multiprocessor, or fewer, so that each has two blocks
    and small calls test the second block, too.
    """
    if not row.persistent:
        return Order(), grid
    return Order(*grid), (min(processors, -(-math.prod(grid) // 2)),)


def term_bytes(plan: Any, attention: Attention) -> int:
    """Return how many bytes a mask and a bias [queries, keys] have for each score."""
    bias = attention.bias
    return (plan.has.mask == 2) + (0 if bias is None or plan.has.bias != 2 else bias.element_size())


def ways(rows: Mapping[str, Row], plan: Any, attention: Attention) -> dict[str, How]:
    """Return the rows that can compute a call, and how each does."""
    found = {name: _how(row, plan, attention) for name, row in rows.items()}
    return {name: how for name, how in found.items() if how is not None}


def _how(row: Row, plan: Any, attention: Attention) -> How | None:
    """Return how a row computes a call, or None if it takes too much shared memory or too many
    registers.
    """
    if not _fits_in_registers(row, plan) or (row.persistent and not shares_descriptors(plan)):
        return None
    if plan.has.lists and (row.persistent or row.BM > 128 or row.BN > 64):
        return None  # a tile is a part of one of the mask
    width, values = plan.tile.dim_block, plan.tile.value_block
    outputs = values * (values != width or row.persistent)
    fixed = 2 * (row.BM * (width + outputs) + row.stages * row.BN * (width + values)) + BARRIERS
    fixed += 4 * row.stages * row.BN * (1 in (plan.has.mask, plan.has.bias))
    fixed += 8 * row.stages * row.BM * (plan.has.lists > 0)
    terms = row.BM * row.BN * (size := term_bytes(plan, attention))
    for slots in (2, 1):
        if fixed + slots * terms <= SHARED:
            return How(row.BM // 64, row.stages, slots, size, *row[4:])
    return None


def shares_descriptors(plan: Any) -> bool:
    """Return whether TMA descriptors of whole tensors serve all heads of a call, so that the host
    can make them: sequences of one length, no mask or bias of queries and keys, and no head that is
    read more than once.
    """
    has = plan.has
    varies = has.lengths or has.packed or 2 in (has.mask, has.bias)
    return all(plan.steps) and not varies


def maps(kernel: str, rows: int, columns: int, dim: int, value_dim: int) -> list[tuple[Any, ...]]:
    """Return (place, rows, width) of each TMA descriptor that a kernel takes, in the order of its
    parameters: the place of its tensor among the pointers, see `MappedLaunch`, and its tiles.
    """
    query, key, value, grad_output = ((0, field) for field in range(4))
    if kernel == "forward":
        keys = (key, columns, dim), (value, columns, value_dim)
        return [(query, 64, dim), *keys, ((1, None), 64, value_dim)]
    rows, columns = (64, columns) if kernel == "dq" else (rows, 64)
    own = [(query, rows, dim), (grad_output, rows, value_dim)]
    own += [(key, columns, dim), (value, columns, value_dim)]
    if kernel == "dq":
        return [*own, ((1, None), rows, dim)]
    first, second = ((1, None), (2, None)) if kernel == "dkdv" else ((2, 1), (2, 2))
    return [*own, (first, columns, dim), (second, columns, value_dim)]


def _fits_in_registers(row: Row, plan: Any) -> bool:
    """Return whether no loop of a row accesses local memory, as the cost ledger counts it."""
    has = plan.has
    if row.BM == 192:  # 160 registers
        terms = has.mask, has.bias, has.alibi, has.softcap, has.dropout, has.left
        return plan.head_block <= 64 and not any(terms)
    if row.packed and has.dropout:  # 70 slots of local memory more than without packing
        return False
    if row.BN > 64 and plan.head_block > 128:
        return False
    needs = 2 * has.dropout + 4 * has.alibi + 2 * (has.left or has.right) + has.softcap
    needs += max(3 * (has.mask == 1), 4 * (has.bias == 1))
    needs += 5 * (has.mask == 2 or has.lists > 0) + 3 * (has.bias == 2)
    roomy = plan.head_block <= 64 or (plan.head_block <= 128 and (row.packed or row.BN == 64))
    return needs <= (15 if roomy else 5)


def obstacle(
    plan: Any, query: Tensor, key: Tensor, value: Tensor, attention: Attention
) -> str | None:
    """Return why the forward for Hopper does not compute a call, in words, or None."""
    return next(_obstacles(plan, (query, key, value), attention), None)


def _obstacles(plan: Any, inputs: tuple[Tensor, ...], attention: Attention) -> Iterator[str]:
    has, bias = plan.has, attention.bias
    if plan.arch != "sm_90":
        yield f"it is for sm_90, not {plan.arch}"
    if inputs[0].element_size() != 2:
        yield f"it takes float16 and bfloat16, not {inputs[0].dtype}"
    if not (has.fold_scale or has.softcap or has.separate_max):
        yield f"it takes no scale of {attention.scale}"
    if not all(x.numel() for x in inputs):
        yield "it takes no empty tensors"
    if has.lists > 2:
        yield "it takes no block mask of a packed batch"
    if plan.tile.wide or any(_is_uncopied(x) for x in inputs):
        yield "TMA copies rows at multiples of 16 bytes, and less than 2^31 elements of a head"
    if inputs[2].shape[3] % 8:
        yield "TMA writes rows of the output at multiples of 16 bytes"
    full = (inputs[0].shape[0], plan.heads, inputs[0].shape[2], inputs[1].shape[2])
    for name, x, kind in (("mask", attention.attn_mask, has.mask), ("bias", bias, has.bias)):
        if kind == 2 and x is not None and _is_uncopied(x.expand(full)):
            yield f"TMA copies a {name} of contiguous rows at multiples of 16 bytes"


def _is_uncopied(x: Tensor) -> bool:
    """Return whether TMA cannot copy the rows of x [batch, head, row, column]."""
    steps = [n * x.element_size() for n in x.stride()[:3]]
    return x.stride(3) != 1 or steps[2] <= 0 or any(n % 16 for n in (*steps, x.data_ptr()))


# The rows of the backward, by kernel: queries and keys of a tile, warps of a consumer, slots of the
# ring.
HOPPER_BACKWARD = {
    "dq": {
        "Gluon 128 128": Tiles(128, 128, 4, 2),
        "Gluon 128 64": Tiles(128, 64, 4, 2),
        "Gluon 128 32": Tiles(128, 32, 4, 2),
    },
    "dkdv": {
        "Gluon 64 128": Tiles(64, 128, 4, 2),
        "Gluon 32 128": Tiles(32, 128, 4, 2),
        # With a block mask: of each consumer.
        "Gluon 64 64": Tiles(64, 64, 4, 2),
        "Gluon 32 64": Tiles(32, 64, 4, 2),
    },
}


SHORT_ROW = "Gluon 64 128"  # of hopper_short.py: queries and keys of a tile
SHORT_SLOTS = 2  # of its ring of queries


def short_refused(plan: Any) -> bool:
    """Return whether hopper_short.py does not compute a call that `backward_obstacle` allows."""
    has, tile, sizes = plan.has, plan.tile, plan.arguments["sizes"]
    options = has.mask == 2, has.bias, has.alibi, has.softcap, has.left, has.packed
    sizes_fit = max(plan.q_length, plan.k_length) <= 512 and plan.head_block <= 64
    square = tile.dim_block == tile.value_block == 64 and sizes.group == 1
    return any(options) or not (sizes_fit and square and all(plan.steps))


class RingTile(NamedTuple):
    """Compile-time: `Tile` of scores.py, with more fields for the backward."""

    rows: Any
    columns: Any
    dim: Any
    dim_block: Any
    value_dim: Any
    value_block: Any
    wide: Any
    split: Any
    recompute_masked: Any
    precision: Any
    acc: Any
    slots: Any  # of the ring
    term_bytes: Any  # that the mask and the bias of queries and keys take for a score
    bias_grad: Any  # whether dQ also writes the gradient of a bias
    mapped: Any  # whether the host makes the TMA descriptors


def backward_ways(
    kernel: str, rows: Mapping[str, Tiles], plan: Any, attention: Attention
) -> list[str]:
    """Return the rows of a backward kernel that compute a call within the shared memory and the
    registers of a GPU.
    """
    return [name for name, row in rows.items() if _suits(kernel, row, plan, attention)]


def without_rows(plan: Any, attention: Attention) -> list[str]:
    """Return which part of the backward no row can compute."""
    names = {"dq": "dQ", "dkdv": "dK and dV"}
    return [
        name
        for kernel, name in names.items()
        if not backward_ways(kernel, HOPPER_BACKWARD[kernel], plan, attention)
    ]


def _suits(kernel: str, row: Tiles, plan: Any, attention: Attention) -> bool:
    own, other = (row.BM, row.BN) if kernel == "dq" else (128, 128 // row.BN * row.BM)
    if plan.has.lists > 0 if row.BN == 128 else kernel == "dkdv" and not plan.has.lists:
        return False  # a tile is a part of one of the mask
    width = plan.tile.dim_block + plan.tile.value_block
    size = 2 * (own + row.stages * other) * width + 12 * row.stages * other + BARRIERS
    size += row.stages * 128 * min(row.BM, row.BN) * term_bytes(plan, attention)
    size += 1024 * row.stages * (plan.has.lists > 0)
    return size <= SHARED and _backward_fits_in_registers(kernel, row, plan)


def _backward_fits_in_registers(kernel: str, row: Tiles, plan: Any) -> bool:
    """Return whether no loop accesses local memory, as the cost ledger counts it; with a mask of
    keys and dropout at D = 128 a few accesses cost less than smaller tiles would.
    """
    has = plan.has
    if plan.head_block > 128 or row.BN == 32:  # these tiles of dQ are for wide heads
        others = has.bias == 2, has.alibi, has.softcap
        more = any(others) or (has.bias == 1) + has.dropout + has.left + has.right > 1
        fits = not (1 in (has.mask, has.bias) and more)
        return plan.head_block > 128 and row.BN == 32 and fits
    if has.lists == 2 and kernel == "dkdv" and plan.head_block > 64:
        return False
    if (row.BN == 64 and kernel == "dq") or row.BM == 32:
        return True
    masked = has.mask == 2 or has.lists > 0
    if plan.head_block <= 64:
        options = masked, has.bias > 0, has.alibi, has.softcap, has.left
        return kernel == "dkdv" or sum(options) + 2 * plan.own_bias_grad <= 2
    cut = has.left or ((has.right or has.lists) and has.dropout and kernel == "dkdv")
    return not (has.bias or has.alibi or has.softcap or (masked and cut))


def backward_obstacle(
    plan: Any, grad_output: Tensor, inputs: tuple[Tensor, ...], attention: Attention
) -> str | None:
    """Return why the kernels of dQ and of dK and dV for Hopper do not compute a call, or None."""
    found = _obstacles(plan, (*inputs, grad_output), attention)
    return next(itertools.chain(found, _of_backward(plan, inputs, grad_output)), None)


def _of_backward(plan: Any, inputs: tuple[Tensor, ...], grad_output: Tensor) -> Iterator[str]:
    """Yield the options that the forward supports and the backward does not. dK and dV read the
    heads that share keys as one tensor, as if these heads shared a mask [keys].
    """
    has, arguments = plan.has, plan.arguments
    if plan.head_block > 256:
        yield "its backward takes head dims up to 256"
    if any(x.shape[3] % 8 for x in inputs):  # the gradients are contiguous
        yield "its backward takes head dims in multiples of 8"
    if arguments["sizes"].group > 1:
        if inputs[0].stride(1) <= 0 or grad_output.stride(1) <= 0:
            yield "its backward takes no head that is read more than once"
        if has.mask == 1 and has.bias != 1 and arguments["strides"].mask_head != 0:
            yield "heads that share keys have masks of their own"
