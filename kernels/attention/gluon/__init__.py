"""Attention for Hopper (sm_90) in Gluon: the forward, dQ, and dK and dV, whose exponentials run
beside the products of the same warps. `fastformer tune` measures them for the calls that they take.

    rows.py       which calls they take, and the rows that a measurement may choose
    forward.py    the forward
    work.py       the tiles that its programs walk, and their shared memory
    backward.py   what dQ and dK and dV share
    dq.py         dQ
    dkdv.py       dK and dV
    parts.py      layouts, barriers and descriptors of all of them

plan.py asks `gluon_for` for the rows of a call, and `launch_of` for the launch of one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from fastformer.description import Attention

from ...launch import MappedLaunch, TMALaunch
from . import rows

try:  # Triton before 3.6 has no Gluon, and a later one may change it
    from .dkdv import hopper_dkdv_kernel
    from .dq import hopper_dq_kernel
    from .forward import hopper_forward_kernel
    from .parts import map_of

    KERNELS = dict(forward=hopper_forward_kernel, dq=hopper_dq_kernel, dkdv=hopper_dkdv_kernel)
except Exception:
    KERNELS = {}


class GluonRows(NamedTuple):
    """The rows that can compute the kernels of a call."""

    obstacle: str | None = "no kernel in Gluon computes it"  # in words; None if there is none
    options: Mapping[str, list[str]] = MappingProxyType({})  # by kernel
    terms: int = 0  # bytes of mask and bias [queries, keys] for each score


def gluon_for(
    plan: Any, kernels: Iterable[str], tensors: tuple[Tensor, ...], attention: Attention
) -> GluonRows:
    """Return the rows that can compute a call: for the forward of (query, key, value), and for the
    backward of these and the gradient of the output.
    """
    if not KERNELS:
        return GluonRows("this Triton has no Gluon")
    why, terms = rows.obstacle(plan, tensors, attention), rows.term_bytes(plan, attention)
    if why is not None:
        return GluonRows(why, terms=terms)  # a test may force a row
    found = {
        kernel: [
            name for name, row in rows.ROWS[kernel].items() if rows.suits(kernel, row, plan, terms)
        ]
        for kernel in kernels
    }
    if found.get("forward") == []:
        why = "these options together take more registers than there are"
    return GluonRows(why, found, terms)


def is_row(kernel: str, tiles: Any) -> bool:
    """Return whether the tiles of a kernel are the name of a row."""
    return tiles in rows.ROWS.get(kernel, {})


def launch_of(
    plan: Any, kernel: str, name: str
) -> tuple[Any, rows.Row, Callable[..., Any], Any, dict[str, Any]]:
    """Return the kernel of a row, the row, its launch, its tile, and the arguments that the kernel
    alone takes.
    """
    made, row = KERNELS[kernel], rows.ROWS[kernel][name]
    # Descriptors that end at the last key within the bounds of a mask are made by a program.
    mapped = rows.shares_descriptors(plan) and (plan.source is None or kernel == "dkdv")
    tile = rows.ring_tile(kernel, row, plan, plan.gluon.terms, mapped)
    if not mapped:
        none = {name: None for name in made.arg_names if name.endswith("_map")}
        return made, row, TMALaunch, tile, none
    maps = [
        (place, functools.partial(map_of, rows=height, width=width))
        for place, height, width in rows.maps(kernel, row, plan)
    ]
    return made, row, functools.partial(MappedLaunch, maps), tile, {}


def why_not(forward: GluonRows, backward: GluonRows | None) -> list[str]:
    """Return why a call on sm_90 cannot take the kernels; None for a backward that it lacks."""
    found = []
    if forward.obstacle is not None:
        found.append(f"not the forward for Hopper: {forward.obstacle}")
    if backward is None:
        return found
    if backward.obstacle not in (None, forward.obstacle):
        found.append(f"not the backward for Hopper: {backward.obstacle}")
    words = dict(dq="dQ", dkdv="dK and dV")
    names = [word for kernel, word in words.items() if not backward.options.get(kernel)]
    if backward.obstacle is None and names:
        why = "head dim and options take more registers or shared memory than there are"
        found.append(f"not {' and '.join(names)} for Hopper: {why}")
    return found
