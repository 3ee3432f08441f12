"""Which calls the kernels in Gluon take, and their configurations, the rows that a measurement may
choose. This file does not import Gluon.
"""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from fastformer.description import Attention

from ..scores import Tile

SHARED = 232448  # bytes of shared memory that a block may have
BARRIERS = 1024  # at most, of these


class Row(NamedTuple):
    """A configuration of a kernel."""

    BM: int  # queries of a tile; those of a program in the forward and in dQ
    BN: int  # keys of a tile
    warps: int = 4  # of a consumer
    stages: int = 2  # slots of the ring
    packed: bool = False  # whether the loop of the forward carries weights as 16 bits


ROWS = {  # by kernel and name
    "forward": {
        "Gluon 128 128": Row(128, 128),
        "Gluon 128 64": Row(128, 64),
        "Gluon 128 128, packed": Row(128, 128, packed=True),
    },
    "dq": {
        "Gluon 128 128": Row(128, 128),
        "Gluon 128 64": Row(128, 64),
        "Gluon 128 32": Row(128, 32),
    },
    "dkdv": {
        "Gluon 64 128": Row(64, 128),
        "Gluon 32 128": Row(32, 128),
        # With a block mask: of each consumer.
        "Gluon 64 64": Row(64, 64),
        "Gluon 32 64": Row(32, 64),
    },
}


# Compile-time: the tile of scores, and how a program works on it.
RingTile: Any = namedtuple(  # type: ignore[misc]  # which expects literals
    "RingTile",
    [
        *Tile._fields,
        "slots",  # of the rings
        "term_slots",  # of the forward's ring of masks and biases of queries and keys
        "term_bytes",  # of mask and bias [queries, keys], for each score
        "packed",  # whether the loop of the forward carries weights as 16 bits
        "bias_grad",  # whether dQ also writes the gradient of a bias
        "mapped",  # whether the host makes the TMA descriptors, see `shares_descriptors`
    ],
)


def ring_tile(kernel: str, row: Row, plan: Any, terms: int, mapped: bool) -> Any:
    """Return the `RingTile` of a row for a call whose masks and biases of queries and keys have
    `terms` bytes for each score.
    """
    size = row.BM * row.BN * terms
    slots = 2 if _fixed_of_forward(row, plan) + 2 * size <= SHARED else 1
    bias_grad = kernel == "dq" and plan.own_bias_grad
    tile = plan.tile._replace(rows=row.BM, columns=row.BN, recompute_masked=False)
    own = row.stages, slots, terms, row.packed, bias_grad, mapped
    return RingTile._make((*tile, *own))


def term_bytes(plan: Any, attention: Attention) -> int:
    """Return how many bytes a mask and a bias [queries, keys] have for each score."""
    bias = attention.bias
    return (plan.has.mask == 2) + (0 if bias is None or plan.has.bias != 2 else bias.element_size())


def suits(kernel: str, row: Row, plan: Any, terms: int) -> bool:
    """Return whether a row computes a call within the shared memory and the registers of a GPU."""
    if kernel != "forward":
        return _backward_suits(kernel, row, plan, terms)
    if plan.has.lists and row.BN > 64:
        return False  # a tile is a part of one of the mask
    size = _fixed_of_forward(row, plan) + row.BM * row.BN * terms
    return size <= SHARED and _forward_fits_in_registers(row, plan)


def _fixed_of_forward(row: Row, plan: Any) -> int:
    """Return the bytes of shared memory of a row without masks and biases of queries and keys."""
    width, values = plan.tile.dim_block, plan.tile.value_block
    outputs = values * (values != width)
    size = 2 * (row.BM * (width + outputs) + row.stages * row.BN * (width + values)) + BARRIERS
    size += 4 * row.stages * row.BN * (1 in (plan.has.mask, plan.has.bias))
    return size + 8 * row.stages * row.BM * (plan.has.lists > 0)


def _forward_fits_in_registers(row: Row, plan: Any) -> bool:
    """Return whether no loop of a row accesses local memory, as the cost ledger counts it."""
    has = plan.has
    if row.packed and has.dropout:  # 70 slots of local memory more than without packing
        return False
    if row.BN > 64 and plan.head_block > 128:
        return False
    needs = 2 * has.dropout + 4 * has.alibi + 2 * (has.left or has.right) + has.softcap
    needs += max(3 * (has.mask == 1), 4 * (has.bias == 1))
    needs += 5 * (has.mask == 2 or has.lists > 0) + 3 * (has.bias == 2)
    roomy = plan.head_block <= 64 or (plan.head_block <= 128 and (row.packed or row.BN == 64))
    return needs <= (15 if roomy else 5)


def _backward_suits(kernel: str, row: Row, plan: Any, terms: int) -> bool:
    own, other = (row.BM, row.BN) if kernel == "dq" else (128, 128 // row.BN * row.BM)
    if plan.has.lists > 0 if row.BN == 128 else kernel == "dkdv" and not plan.has.lists:
        return False  # a tile is a part of one of the mask
    width = plan.tile.dim_block + plan.tile.value_block
    size = 2 * (own + row.stages * other) * width + 12 * row.stages * other + BARRIERS
    size += row.stages * 128 * min(row.BM, row.BN) * terms
    size += 1024 * row.stages * (plan.has.lists > 0)
    return size <= SHARED and _backward_fits_in_registers(kernel, row, plan)


def _backward_fits_in_registers(kernel: str, row: Row, plan: Any) -> bool:
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


def shares_descriptors(plan: Any) -> bool:
    """Return whether TMA descriptors of whole tensors serve all heads of a call, so that the host
    can make them: sequences of one length, no mask or bias of queries and keys, and no head that is
    read more than once.
    """
    has = plan.has
    varies = has.lengths or 2 in (has.mask, has.bias)
    return all(plan.steps) and not varies


def maps(kernel: str, row: Row, plan: Any) -> list[tuple[Any, ...]]:
    """Return (place, rows, width) of each TMA descriptor that a kernel takes, in the order of its
    parameters: the place of its tensor among the pointers, see `MappedLaunch`, and its tiles.
    """
    rows, columns = row.BM, row.BN
    dim, value_dim = plan.tile.dim_block, plan.tile.value_block
    query, key, value, grad_output = ((0, field) for field in range(4))
    if kernel == "forward":
        keys = (key, columns, dim), (value, columns, value_dim)
        return [(query, 64, dim), *keys, ((1, None), 64, value_dim)]
    rows, columns = (64, columns) if kernel == "dq" else (rows, 64)
    own = [(query, rows, dim), (grad_output, rows, value_dim)]
    own += [(key, columns, dim), (value, columns, value_dim)]
    if kernel == "dq":
        return [*own, ((1, None), rows, dim)]
    return [*own, ((1, None), columns, dim), ((2, None), columns, value_dim)]


def obstacle(plan: Any, tensors: tuple[Tensor, ...], attention: Attention) -> str | None:
    """Return why the forward does not compute a call, in words, or None; or, of four tensors, the
    last of which is the gradient of the output, why dQ and dK and dV do not compute it.
    """
    found = _obstacles(plan, tensors, attention)
    if len(tensors) == 4:
        found = itertools.chain(found, _of_backward(plan, tensors))
    return next(found, None)


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
    if has.packed or has.lists > 2:
        yield "it takes no packed batch"
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


def _of_backward(plan: Any, tensors: tuple[Tensor, ...]) -> Iterator[str]:
    """Yield the options that the forward supports and the backward does not. dK and dV read the
    heads that share keys as one tensor, as if these heads shared a mask [keys].
    """
    has, arguments = plan.has, plan.arguments
    if plan.head_block > 256:
        yield "its backward takes head dims up to 256"
    if any(x.shape[3] % 8 for x in tensors[:3]):  # the gradients are contiguous
        yield "its backward takes head dims in multiples of 8"
    if arguments["sizes"].group > 1:
        if min(tensors[0].stride(1), tensors[3].stride(1)) <= 0:
            yield "its backward takes no head that is read more than once"
        if has.mask == 1 and has.bias != 1 and arguments["strides"].mask_head != 0:
            yield "heads that share keys have masks of their own"
