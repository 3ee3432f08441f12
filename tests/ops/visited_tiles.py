"""Counts the tiles of the scores that the kernels of attention visit under a mask, in Triton's
interpreter, and what the mask itself gives: for each tile of queries (of dK and dV: of keys) the
tiles from the first to the last that it sees, less those of the longest run in which it sees
everything, which read no mask.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import fastformer as ff

BATCH, LENGTH, TILE = 2, 150, 32
PRODUCTS = {  # of a kernel, for each tile that it visits
    "forward_kernel": 2,
    "backward_dq_kernel": 3,
    "backward_dkdv_kernel": 4,
    "backward_dbias_kernel": 2,
}
KERNELS = dict(zip(("forward", "dQ", "dK, dV", "dBias"), PRODUCTS))
Row = dict[str, Any]


def masks() -> dict[str, tuple[Tensor, dict[str, Any] | None]]:
    """Return masks by name, and the options that hide the same, if any do."""
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    causal, lengths = ff.subsequent_mask(LENGTH), torch.tensor([LENGTH, 90])
    documents = torch.tensor([100, 50])
    document = torch.repeat_interleave(torch.arange(2), documents)
    padding = (j < lengths[:, None])[:, None, None]
    left = (j >= LENGTH - lengths[:, None])[:, None, None]
    return {
        "subsequent_mask": (causal, dict(is_causal=True)),
        "subsequent_mask and padding": (
            causal & padding,
            dict(is_causal=True, key_lengths=lengths),
        ),
        "documents of a packed row": (causal & (document[:, None] == document), None),
        "prefix of 40, then causal": (causal | (j < 40), None),
        "window of 60 and 40": ((j >= i - 60) & (j <= i + 40), dict(window=(60, 40))),
        "padding": (padding, dict(key_lengths=lengths)),
        "left padding": (left, None),
        "left padding and causal": (causal & left, None),
    }


@contextlib.contextmanager
def counting() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Count the products of tiles, and the loads from a mask, of each kernel."""
    from fastformer.kernels import launch
    from fastformer.kernels.attention import plan
    from triton.runtime import interpreter

    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    launched, multiply, load = executor.__call__, builder.create_dot, builder.create_masked_load
    products: Counter[str] = Counter()
    loads: Counter[str] = Counter()
    running = ""

    def launch_one(self: Any, *given: Any, **named: Any) -> None:
        nonlocal running
        running = self.fn.__name__
        launched(self, *given, **named)

    def multiply_one(self: Any, *operands: Any) -> Any:
        products[running] += 1
        return multiply(self, *operands)

    def load_one(self: Any, pointers: Any, *rest: Any) -> Any:
        loads[running] += pointers.get_element_ty().primitive_bitwidth == 8
        return load(self, pointers, *rest)

    tiles = plan.Tiles(TILE, TILE, 4, 1)
    launch.plans.clear()
    with (
        patch.object(plan, "configuration", lambda *_: tiles),
        patch.object(plan, "bounds_pay", lambda *_: True),
        patch.object(executor, "__call__", launch_one),
        patch.object(builder, "create_dot", multiply_one),
        patch.object(builder, "create_masked_load", load_one),
    ):
        yield products, loads
    launch.plans.clear()


def count(**options: Any) -> Row:
    """Return how many tiles each kernel visits in a call, and how often it reads the mask."""
    query, key, value, bias = (
        torch.randn(*shape, 16 if n < 3 else LENGTH, requires_grad=True)
        for n, shape in enumerate([(BATCH, 1, LENGTH)] * 3 + [(LENGTH,)])
    )
    with counting() as (products, loads), ff.use_backend("triton"):
        ff.scaled_dot_product_attention(query, key, value, **options).sum().backward()
        seen = dict(products), dict(loads)
        out = ff.scaled_dot_product_attention(query, key, value, bias=bias, **options)
        torch.autograd.grad(out.sum(), bias)
    name = KERNELS["dBias"]
    visited = {**seen[0], name: products[name]}
    row: Row = {of: visited.get(k, 0) // PRODUCTS[k] for of, k in KERNELS.items()}
    reads = {of: seen[1].get(k, 0) for of, k in KERNELS.items() if k != name}
    return row | {"reads of the mask": reads}


def expected(mask: Tensor) -> Row:
    """Return what `count` should find for a mask that broadcasts to [B, 1, S, S]. The last tile of
    keys is a part of one, and always reads the mask. dK and dV read a mask of keys alone once.
    """
    shape = BATCH, 1, LENGTH, LENGTH
    seen = mask.expand(shape).flatten(0, 1)
    free = seen & (torch.arange(LENGTH) < LENGTH // TILE * TILE)
    one_row = mask.expand(shape).stride(2) == 0
    of_rows = of_tiles(seen, free)
    of_keys = of_tiles(seen.transpose(1, 2), free.transpose(1, 2))
    if one_row:
        of_keys = of_keys[0], BATCH * -(-LENGTH // TILE)
    visited, reads = (
        {"forward": rows, "dQ": rows, "dK, dV": keys} for rows, keys in zip(of_rows, of_keys)
    )
    return {**visited, "dBias": of_rows[0], "reads of the mask": reads}


def of_tiles(seen: Tensor, free: Tensor) -> tuple[int, int]:
    """Return the tiles that the rows of [B, S, S'] visit, and those outside of the longest run."""
    visited = edges = 0
    for pair in (pair for b in zip(seen, free) for pair in zip(*(x.split(TILE) for x in b))):
        sees, frees = (rows.split(TILE, 1) for rows in pair)
        some = [n for n, tile in enumerate(sees) if tile.any()]
        hull = some[-1] + 1 - some[0] if some else 0
        runs = "".join("x" if tile.all() else " " for tile in frees).split()
        visited += hull
        edges += hull - max(map(len, runs), default=0)
    return visited, edges
