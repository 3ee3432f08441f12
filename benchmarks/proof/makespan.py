"""Models how evenly the programs of causal attention fill a GPU, by the order in which they start.

    python -m benchmarks.proof.makespan            prints the table of the committed data
    python -m benchmarks.proof.makespan --write    computes it, and writes
                                                   benchmarks/results/makespan.json

A GPU starts programs in the order of their indices, each in the place that is free first. An H100
has 132 multiprocessors with one or two places each, by benchmarks/results/compile.json. A program
takes the time of its tiles of 128 x 64 scores, and `OVERHEAD`. The makespan is when the last
program ends. The ideal is what no order beats: the mean time of all places, or the time of the
longest program. The model knows neither caches nor how two places share a multiprocessor.

Before: head by head, the longest block of each first. After: by sections, see `locate_block` of
kernels/attention/scores.py. tests/ops/test_launch_order.py compares `order` with the kernels.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import json
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.proof import cost
from benchmarks.proof.cases import Table

DATA = ROOT / "benchmarks" / "results" / "makespan.json"
KERNELS = {"forward": "forward", "dq": "backward_dq", "dkdv": "backward_dkdv"}
DIMS, LENGTHS, HEADS = (64, 128), [2**n for n in range(9, 15)], (8, 16, 32, 64, 128)
L2_CACHE = 50 * 2**20
# In tiles. A program waits for its first loads and for its last stores, 800 ns of latency each
# (cost.py) or about 1400 clocks; a tile takes 500 to 1300 clocks of a multiprocessor.
OVERHEAD = 3


def order(kernel: str, heads: int, blocks: int, section: int) -> Iterator[tuple[int, int]]:
    """Yield the (head, block) of each program in the order in which they start."""
    longest_first = range(blocks) if kernel == "dkdv" else range(blocks - 1, -1, -1)
    for first in range(0, heads, section):
        for block in longest_first:
            yield from ((head, block) for head in range(first, first + section))


def tiles(kernel: str, length: int, rows: int, columns: int) -> list[int]:
    """Return how many tiles of `rows` x `columns` scores each block of a causal call has."""
    if kernel == "dkdv":
        return [-(-length // rows) - n0 // rows for n0 in range(0, length, columns)]
    return [-(-min(i0 + rows, length) // columns) for i0 in range(0, length, rows)]


@functools.cache
def places(kernel: str, dim: int) -> int:
    """Return how many programs run at a time."""
    known = cost.read(Table.read())[f"sm_90 attention bf16 D={dim} causal"]
    blocks = next(entry.blocks for entry in known if entry.kernel == KERNELS[kernel])
    return cost.CHIPS["sm_90"].count * blocks


def makespan(times: list[float], places: int) -> float:
    """Return when the last of the programs ends that start in this order."""
    free = [0.0] * places
    for time in times:
        heapq.heapreplace(free, free[0] + time)
    return max(free)


def row(kernel: str, dim: int, length: int, heads: int) -> list[Any]:
    """Return a row of the table: the arguments, the heads of a section, and the makespan over the
    ideal before and after.
    """
    from fastformer.kernels.attention.configurations import configuration, heads_of_section

    given = kernel, "sm_90", torch.bfloat16, dim, length, length, False
    rows, columns, *_ = configuration(*given)
    found = tiles(kernel, length, rows, columns)
    times = [n * rows * columns / cost.TILE + OVERHEAD for n in found]
    section = heads_of_section(heads, length * 2 * dim * 2, L2_CACHE)
    here = places(kernel, dim)
    ideal = max(heads * sum(times) / here, max(times))
    ratios = (
        makespan([times[block] for _, block in order(kernel, heads, len(times), n)], here) / ideal
        for n in (1, section)
    )
    return [kernel, dim, length, heads, section, *(round(x, 3) for x in ratios)]


def table() -> list[list[Any]]:
    """Return all rows."""
    return [
        row(kernel, dim, length, heads)
        for kernel in KERNELS
        for dim in DIMS
        for length in LENGTHS
        for heads in HEADS
    ]


def markdown(rows: list[list[Any]]) -> str:
    """Return the table for a reader."""
    known = {tuple(given): f"{before:.2f} -> {after:.2f}" for *given, _, before, after in rows}
    lines = [
        "Makespan over the ideal, head by head -> by sections; causal, bf16, B x H heads.",
        "",
        "| kernel | D | S | " + " | ".join(map(str, HEADS)) + " |",
        "|" + "---|" * (3 + len(HEADS)),
    ]
    for kernel in KERNELS:
        for dim in DIMS:
            for length in LENGTHS:
                cells = (known[kernel, dim, length, heads] for heads in HEADS)
                lines.append(" | ".join((f"| {kernel} | {dim} | {length}", *cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.proof.makespan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true", help="compute, and write the data")
    if parser.parse_args().write:
        DATA.write_text("[\n" + ",\n".join(map(json.dumps, table())) + "\n]\n")
    print(markdown(json.loads(DATA.read_text())))


if __name__ == "__main__":
    main()
