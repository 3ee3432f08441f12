"""Calls of attention whose kernels are those for Hopper, which run in the simulator."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import triton.language as tl
from fastformer.kernels import interpreter, tuned
from fastformer.kernels.attention import gluon, plan
from fastformer.kernels.attention.gluon.rows import ROWS, Row
from fastformer.kernels.launch import Launch
from torch import Tensor

from benchmarks.proof import gluon_simulator
from fastformer import use_backend

ROW = "Gluon 128 128"
OUTPUTS = ("O", "LSE", "STATISTICS", "DQ", "DK", "DV", "DBIAS")


LENGTHS = torch.tensor([0, 67])
MASK = torch.rand(2, 1, 1, 200, generator=torch.Generator().manual_seed(0)) < 0.7
MASK[0, ..., 64:128] = False  # a whole tile
ONE_HIDDEN = torch.arange(128).expand(1, 1, 1, -1) != 70
DROPOUT: dict[str, Any] = dict(dropout_p=0.25, dropout_seed=5)
BOTTOM_RIGHT: dict[str, Any] = dict(is_causal=True, causal_alignment="bottom_right")
CALLS: dict[str, dict[str, Any]] = {  # sizes and options, by name
    "plain": {},
    "whole tiles": dict(sq=128, sk=256),
    "one tile": dict(sq=1, sk=3),
    "causal": dict(sq=150, sk=200, is_causal=True),
    "causal to the last key": dict(sq=200, sk=130, is_causal=True),
    "bottom-right": dict(sq=70, **BOTTOM_RIGHT),
    "no key": dict(sq=190, sk=40, **BOTTOM_RIGHT),
    "lengths": dict(key_lengths=LENGTHS),
    "lengths, causal": dict(key_lengths=LENGTHS + 60, is_causal=True),
    "a bound to the right": dict(sq=40, window=(None, 70)),
    "sinks": dict(sinks=torch.tensor([0.5, -torch.inf]), key_lengths=LENGTHS),
    "mask": dict(attn_mask=MASK),
    "dropout": DROPOUT,
}
SIZES = "sq", "sk", "d", "dv", "h", "g", "b", "learned"


def sizes_and_options(call: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what `inputs` takes, and the options. The numbers of queries and keys are those of the
    mask and of the bias. learned: a bias whose gradient is asked for.
    """
    sizes = {name: x for name, x in call.items() if name in SIZES}
    for name in call.keys() & {"attn_mask", "bias", "learned"}:
        *_, rows, sizes["sk"] = 1, *call[name].shape
        if rows > 1:
            sizes["sq"] = rows
    return sizes, {name: x for name, x in call.items() if name not in SIZES}


def blocks(sq: int, sk: int) -> Tensor:
    """Return a mask [2, 2, sq, sk] of runs of whole tiles, others, and partly seen ones. One tile
    of queries of the second head sees nothing, and one of keys is not seen.
    """
    i, j = torch.arange(sq)[:, None], torch.arange(sk)
    near = ((i - j).abs() < 40) | (j < 9) | (i == 5)
    one = near | (j // 64 == 3) | ((j // 64 > 4) & (j // 64 < 7))
    other = (i // 128 != 1) & (j // 64 != 3) & ((j // 64 % 2 == 0) | near)
    drawn = torch.rand(sq, sk, generator=torch.Generator().manual_seed(2)) < 0.3
    whole = (j >= 0) & (i >= 0)
    return torch.stack([one, other, drawn, whole]).view(2, 2, sq, sk)


def inputs(
    sq: int = 130, sk: int = 200, d: int = 64, dv: int | None = None, h: int = 2, g: int = 1,
    b: int = 2, dtype: torch.dtype = torch.bfloat16, spread: float = 3,
) -> dict[str, Tensor]:  # fmt: skip
    """Tensors whose scaled scores have the standard deviation `spread`."""
    shapes = (h, sq, d), (g, sk, d), (g, sk, dv or d)
    query, key, value = (torch.randn(b, *shape) for shape in shapes)
    return {"query": (spread * query).to(dtype), "key": key.to(dtype), "value": value.to(dtype)}


def spans(sq: int, sk: int, width: int, step: int) -> Tensor:
    """Return a mask of queries and keys: each query sees `width` keys, the last one `step` further
    than the first one.
    """
    begin = torch.linspace(0, step, sq).long()[:, None]
    return (torch.arange(sk) >= begin) & (torch.arange(sk) < begin + width)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def hidden_keys(
    x: dict[str, Tensor], attn_mask: Any = None, key_lengths: Tensor | None = None, **_: Any
) -> Tensor | None:
    """Return which keys [B, Sk] the lengths hide, or a mask or a bias of keys from all heads."""
    if key_lengths is not None:
        return torch.arange(x["key"].shape[2]) >= key_lengths[:, None]
    if "bias" in x and x["bias"].shape[-2] == 1:
        return x["bias"].isneginf().all(1)[:, 0]
    if isinstance(attn_mask, Tensor) and attn_mask.shape[-2] == 1:
        return ~attn_mask[:, 0, 0]
    return None


def hiding(
    x: dict[str, Tensor], hidden: Tensor | None, value: float = float("nan")
) -> dict[str, Tensor]:
    """Return x with what no query may see: a value in the hidden keys [B, Sk] and their values."""
    if hidden is None:
        return x
    return x | {n: x[n].masked_fill(hidden[:, None, :, None], value) for n in ("key", "value")}


@functools.cache
def kernel(name: str) -> gluon_simulator.Kernel:
    # The simulator has no 16-bit registers that two values could share.
    packing = dict(pack=lambda p, dtype: p.to(dtype), unpack=lambda p, dtype, layout: p)
    others = interpreter.replaced | packing
    return gluon_simulator.Kernel(gluon.KERNELS[name], others)


@contextlib.contextmanager
def simulated(seed: int = 0, bounds: bool = False, **row: Any) -> Iterator[list[Any]]:
    """Plan calls as on a GPU of sm_90 for which this kernel was measured to be the fastest, by a
    row of 128 x 64, or another one, and with bounds of masks or without, and run it in the
    simulator. Yield the list of what it is launched with. All other kernels run in Triton's
    interpreter.
    """
    rows = dict(forward={ROW: Row(128, 64)._replace(**row)})
    ways = {"attention forward": ROW}
    ways["attention forward bounds"] = "bounds" if bounds else "all tiles"
    with chosen(ways, rows, seed) as launched:
        yield launched


@contextlib.contextmanager
def simulated_backward(
    kernels: tuple[str, ...] = ("dq", "dkdv"),
    rows: int = 64,
    columns: int = 64,
    keys: int = 128,
    slots: int = 2,
    seed: int = 0,
    bounds: bool = False,
) -> Iterator[list[Any]]:
    """The same for the kernels of the backward: tiles of `rows` queries and `keys` keys for dK and
    dV, and of `columns` keys for dQ.
    """
    tiles = dict(dq=Row(128, columns, 4, slots), dkdv=Row(rows, keys, 4, slots))
    known = {n: {ROW: tiles[n]} if n in kernels else {} for n in tiles}
    ways = {f"attention {n}": ROW for n in kernels}
    ways["attention backward bounds"] = "bounds" if bounds else "all tiles"
    with chosen(ways, known, seed) as launched:
        yield launched


@contextlib.contextmanager
def chosen(ways: dict[str, str], rows: dict[str, Any], seed: int) -> Iterator[list[Any]]:
    through_triton, launched = Launch.through_triton, []

    def run(launch: Any, *pointers: Any) -> None:
        name = launch.kernel.fn.__name__
        if not name.startswith("hopper_"):
            through_triton(launch, *pointers)
            return
        names = launch.kernel.arg_names
        made: dict[int, Any] = {}  # by tensor; a descriptor comes behind the pointer of its tensor

        def given_as(group: str, x: Any) -> Any:
            if hasattr(x, "block_shape"):
                form = x.shape, x.strides, x.block_shape, x.layout
                return gluon_simulator.Descriptor(made[id(x.base)], *form)
            if isinstance(x, Tensor):
                return made.setdefault(id(x), pointer(name, group, x))
            return x

        given = [
            of(*(given_as(f"{group}.{field}", y) for field, y in zip(of._fields, x)))
            if of
            else given_as(group, x)
            for group, of, x in zip(names, launch._groups, pointers)
        ]
        arguments = dict(zip(names, (*given, *launch._arguments), strict=True))
        launched.append(arguments)
        kernel(name.split("_")[1]).run(arguments, launch._grid, seed)
        for name, x in zip(names, pointers):
            if name in OUTPUTS and x.numel():
                memory(x).copy_(torch.from_numpy(arguments[name].array))

    with (
        use_backend("triton"),
        tuned.forced({plan.SHORT_KEY: plan.SEPARATE} | ways),
        replaced(plan, architecture=lambda device: "sm_90"),
        replaced(gluon.rows, ROWS=ROWS | rows),
        replaced(Launch, through_triton=run),
    ):
        yield launched


@contextlib.contextmanager
def stores() -> Iterator[set[str]]:
    """Yield the names of the shared memory that the kernels store to, other than by TMA."""
    shared, names = gluon_simulator.Shared, set()

    def store(self: Any, value: Any, former: Any = shared.store) -> None:
        names.add(self.cells[0].name.partition("[")[0])
        former(self, value)

    with replaced(shared, store=store):
        yield names


@contextlib.contextmanager
def replaced(owner: Any, **new: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in new}
    for name, value in new.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def memory(x: Tensor) -> Tensor:
    """Return all of the memory of a tensor, flat."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def pointer(kernel: str, name: str, x: Tensor) -> gluon_simulator.Pointer:
    """Point to the first element of a tensor, in a copy of its memory."""
    flat = memory(x.detach())
    half = x.dtype.is_floating_point and x.element_size() == 2
    array = (flat.float() if half else flat).numpy().copy()
    tensor = gluon_simulator.argument(kernel, name, x)
    dtype = getattr(tl, str(x.dtype)[6:])
    return gluon_simulator.Pointer(array, dtype, x.storage_offset(), tensor)
