"""Models the cost of the main loops from their machine code. It needs no GPU.

    python -m benchmarks.cost                prints the ledger
    python -m benchmarks.cost --only TEXT    only the cases of tests/compile_gate.py with TEXT in
                                             their name

The counts are facts, read from the machine code (benchmarks/sass.py). The times are predictions:
the number of clocks that each unit of a multiprocessor needs at its full rate (`CHIPS`). The bound
is the busiest unit. The model ignores latency, bank conflicts, clocks under load, and how well the
units overlap, so a kernel takes at least its bound.

The figures of an attention loop are for a 128 x 64 tile of S. Those of other kernels are for 128
elements: of a row; of the output tile, outside the main loop of a GEMM; or of the product of BM, BN
and BK over 64 in that loop.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import compile_gate

TILE = 128 * 64


@dataclass(frozen=True)
class Chip:
    """The rates of a multiprocessor per clock, from NVIDIA's whitepapers and programming guide."""

    products: int  # bfloat16 multiply-adds; a float32 operand (tf32) takes twice as long
    fma: int  # lanes
    bandwidth: float  # bytes of memory that are its share: of 4.3 TB/s on an H200
    count: int  # of multiprocessors
    registers: int = 65536
    shared: int = 233472  # bytes
    alu: int = 64
    special: int = 16
    issue: int = 4  # instructions of a warp
    traffic: int = 128  # bytes of shared memory
    warps: int = 64


CHIPS = {
    # A100: 2.0 TB/s; H200; B200: 7.1 TB/s
    "sm_80": Chip(products=1024, fma=64, bandwidth=13.1, count=108, shared=167936),
    "sm_90": Chip(products=2048, fma=128, bandwidth=18.6, count=132),
    "sm_100": Chip(products=4096, fma=128, bandwidth=26.0, count=148),
}


@dataclass(frozen=True)
class Entry:
    """One loop, or the code outside of all loops. The unit is clocks of a multiprocessor, unless a
    comment names another.
    """

    case: str
    kernel: str
    part: str  # full, edge: the two loops of attention; loop; rest: what is outside
    registers: int
    blocks: int  # that a multiprocessor holds at a time
    issue: float
    tensor: float
    special: float
    exponentials: float  # instructions of a warp
    fma: float
    alu: float
    traffic: float  # of shared memory
    memory: float  # global, of kernels without tensor instructions
    barriers: int  # in one iteration
    outstanding: int | None  # groups of copies under way where a loop first waits; None: none
    in_flight: float | None  # KB of loads, see `_in_flight`; None: with tensor instructions

    @property
    def bound(self) -> str:
        """Name the busiest unit, and the share of its time in which the unit that does the useful
        work is busy: the tensor cores, or the memory.
        """
        units = {f: getattr(self, f) for f in UNITS}
        unit = max(units, key=lambda name: units[name])
        useful = self.tensor or self.memory
        return f"{unit}, {useful / units[unit]:.2f}" if units[unit] else "-"


UNITS = ("issue", "tensor", "special", "fma", "alu", "traffic", "memory")


def entries(name: str, records: Iterable[dict[str, Any]]) -> Iterator[Entry]:
    """Yield the entries of a case that tests/compile_worker.py has compiled."""
    case = compile_gate.CASES[name]
    chip = CHIPS[case["arch"]]
    for record in records:
        threads = 32 * record["warps"]
        registers = -(-record["registers"] // 8) * 8
        blocks = min(
            chip.registers // (registers * threads),
            chip.shared // (record["shared"] + 1024),
            chip.warps // record["warps"],
            32,
        )
        tile, kernel = record["blocks"], record["kernel"]
        attention = case["op"] == "attention"
        outer = tile.get("columns") or case["d"]
        elements = tile.get("rows", 1) * outer
        unit = TILE if attention and record["products"] else 128
        loops = [loop for loop in record["loops"] if loop["tensor"] or not record["products"]]
        for i, loop in enumerate(loops):
            # An unrolled loop computes more than one tile; the code of sm_100 does not say.
            times = loop["product"] / record["products"][i] if loop["product"] else 1
            inner = tile["features"] / 64 if "features" in tile else 1
            part = ("full", "edge")[i] if attention and len(loops) == 2 else "loop"
            waits = record["outstanding"][i] if record["products"] else None
            factor = unit / (elements * inner * times)
            product = record["products"][i] * times if record["products"] else 0
            yield _entry(name, kernel, part, record, blocks, loop, product, factor, waits, chip)
        if not attention or not record["products"]:
            rest = {key: n - sum(x[key] for x in loops) for key, n in record["whole"].items()}
            if not loops or record["products"]:
                yield _entry(
                    name, kernel, "rest", record, blocks, rest, 0, 128 / elements, None, chip
                )


def _in_flight(record: dict[str, Any], blocks: int, counts: dict[str, Any], chip: Chip) -> float:
    """Return how many KB of loads a multiprocessor has under way: those that a block does not wait
    for in between (benchmarks/sass.py), times the blocks that it holds, which are no more than its
    share of the grid. To keep the memory busy it takes the latency times the bandwidth: on an H200
    800 ns times 4.3 TB/s, 26 KB for each multiprocessor.
    """
    return min(blocks, record["programs"] / chip.count) * counts["in_flight"] / 1000


def _entry(
    name: str, kernel: str, part: str, record: dict[str, Any], blocks: int, counts: dict[str, Any],
    product: float, factor: float, waits: int | None, chip: Chip,
) -> Entry:  # fmt: skip
    lanes = 32 * record["warps"] * factor
    single = compile_gate.CASES[name]["dtype"] == "fp32"
    memory = 0.0 if record["products"] else (counts["loaded"] + counts["stored"]) / chip.bandwidth
    return Entry(
        name, kernel, part, record["registers"], blocks,
        issue=counts["issue"] * record["warps"] / chip.issue * factor,
        tensor=product * (1 + single) / chip.products * factor,
        special=counts["special"] * lanes / chip.special,
        exponentials=counts["exponential"] * record["warps"] / chip.issue * factor,
        fma=counts["fma"] * lanes / chip.fma,
        alu=counts["alu"] * lanes / chip.alu,
        traffic=counts["traffic"] / chip.traffic * factor,
        memory=memory * factor,
        barriers=counts["barrier"],
        outstanding=waits,
        in_flight=None if record["products"] else _in_flight(record, blocks, counts, chip),
    )  # fmt: skip


def ledger(answers: dict[str, dict[str, Any]]) -> list[Entry]:
    """Return the entries of all kernels, each under the first case that compiles it."""
    seen, found = set(), []
    for name, answer in answers.items():
        if compile_gate.CASES[name]["arch"] not in CHIPS:
            continue
        new = {r["hash"]: r for r in answer.get("records", []) if r["hash"] not in seen}
        seen.update(new)
        found += entries(name, new.values())
    return found


# -------------------------------------------------------------------------------------- the table

HEADER = """\
# Cost ledger

Triton {version}. Clocks of a multiprocessor for a 128 x 64 tile of S (attention), or for 128
elements, as the model in benchmarks/cost.py has it: predictions, not measurements. Blocks: that a
multiprocessor holds. Copies: groups under way where a loop waits for one; 0: it waits for all. KB:
of loads that a multiprocessor has under way, in kernels without products.
Bound: the busiest unit, and the share of the time that the tensor cores are busy (the memory, in
kernels without products) if that unit never waits.

| case | kernel | part | registers | blocks | issue | tensor | special | fma | alu | shared | memory | barriers | copies | KB | bound |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""  # noqa: E501


def written(version: str, found: list[Entry]) -> str:
    def cell(x: Any) -> str:
        return "-" if x is None else f"{x:.0f}" if x >= 100 else f"{x:.3g}"

    lines = []
    for e in found:
        figures = (
            e.registers, e.blocks, e.issue, e.tensor, e.special, e.fma, e.alu, e.traffic, e.memory,
            e.barriers, e.outstanding, e.in_flight,
        )  # fmt: skip
        cells = [e.case, e.kernel, e.part, *map(cell, figures), e.bound]
        lines.append("| " + " | ".join(cells) + " |\n")
    return HEADER.format(version=version) + "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only the cases that contain TEXT"
    )
    options = parser.parse_args()
    cases = {
        name: {**case, "loops": True}
        for name, case in compile_gate.CASES.items()
        if options.only in name and case["arch"] in CHIPS
    }
    if not cases:
        parser.error(f"no case of tests/compile_gate.py has {options.only!r} in its name")

    def progress(name: str, answer: dict[str, Any]) -> None:
        print(f"{answer.get('seconds', 0):5.1f} s  {name}", file=sys.stderr)

    answers = compile_gate.compile_all(cases, progress)
    print(written(metadata.version("triton"), ledger(answers)))
    errors = [f"{name}: {a['error']}" for name, a in answers.items() if "error" in a]
    raise SystemExit("\n".join(errors) or 0)


if __name__ == "__main__":
    main()
