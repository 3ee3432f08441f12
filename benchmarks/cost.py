"""Models the cost of the main loops from their machine code. It needs no GPU.

    python -m benchmarks.cost                prints the ledger
    python -m benchmarks.cost --only TEXT    only the cases of compile_gate.py with TEXT in
                                             their name
    python -m benchmarks.cost --write        writes the ledger to tests/cost_table.md
    python -m benchmarks.cost --peers        prints the same of FlexAttention and Liger; with
                                             --write, to tests/cost_peers.md

The counts are facts, read from the machine code (benchmarks/sass.py). The times are predictions:
the number of clocks that each unit of a multiprocessor needs at its full rate (`CHIPS`). The bound
is the busiest unit. The model ignores latency, bank conflicts, clocks under load, and how well the
units overlap, so a kernel takes at least its bound.

The figures of an attention loop are for a 128 x 64 tile of S, those of the loop of few queries for
64 keys of a key-value head, which the memory bounds. Those of other kernels are for 128
elements: of a row; of the output tile, outside the main loop of a GEMM; or of the product of BM, BN
and BK over 64 in that loop.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import compile_gate

ROOT = Path(__file__).resolve().parents[1]
TILE = 128 * 64
TABLE = ROOT / "tests" / "cost_table.md"
PEERS = ROOT / "tests" / "cost_peers.md"
Place = tuple[str, str, str, int]
Slots = dict[Place, float]

# Loops of 16-bit attention that wait for all copies, and why they stay: part of a case's name, and
# the kernel.
#   The gradient of a bias loads the length of each batch in the loop, and what it copies follows
#   from it; and at D = 256 the tiles of more than one stage do not fit.
#   dK and dV at D = 256: three stages spill.
KNOWN_WAITS = (
    ("lengths", "backward_dbias"),
    ("D=256", "backward_dbias"),
    ("sm_90 attention bf16 D=256", "backward_dkdv"),
)


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
    part: str  # see `_parts`; rest: what is outside of the loops
    registers: int
    blocks: int  # that a multiprocessor holds at a time
    issue: float
    tensor: float
    special: float
    exponentials: float  # instructions of a warp
    fma: float
    alu: float
    traffic: float  # of shared memory
    memory: float  # global, of kernels without tensor instructions and of few queries
    barriers: int  # in one iteration
    outstanding: int | None  # groups of copies under way where a loop first waits; None: none
    in_flight: float | None  # KB of loads, see `_in_flight`, where there is a time of the memory

    @property
    def bound(self) -> str:
        """Name the busiest unit, and the share of its time in which the unit that does the useful
        work is busy: the tensor cores, or the memory.
        """
        units = {f: getattr(self, f) for f in UNITS}
        unit = max(units, key=lambda name: units[name])
        useful = self.memory or self.tensor
        return f"{unit}, {useful / units[unit]:.2f}" if units[unit] else "-"


UNITS = ("issue", "tensor", "special", "fma", "alu", "traffic", "memory")


def entries(name: str, records: Iterable[dict[str, Any]]) -> Iterator[Entry]:
    """Yield the entries of a case that compile_worker.py has compiled."""
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
        attention = case["op"] in ("attention", "decode")
        outer = tile.get("columns") or case["d"]
        elements = tile.get("rows", 1) * outer
        unit = TILE if attention and record["products"] else 128
        if case["op"] == "decode" and record["products"]:
            elements, unit = outer, 64
        loops = [loop for loop in record["loops"] if loop["tensor"] or not record["products"]]
        parts = _parts(case, loops, record["outstanding"])
        for i, (loop, part) in enumerate(zip(loops, parts)):
            # An unrolled loop computes more than one tile; the code of sm_100 does not say.
            times = loop["product"] / record["products"][i] if loop["product"] else 1
            inner = tile["features"] / 64 if "features" in tile else 1
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


def _parts(
    case: dict[str, Any], loops: list[dict[str, Any]], outstanding: list[int | None]
) -> list[str]:
    """Name the loops of an attention kernel: `full` walks the tiles that no edge of the band or the
    length cuts, and issues the fewest instructions; `edge`; and `again`, the last beside masked
    keys, walks a result of NaN once more, with one stage (`Tile.again`).
    """
    if case["op"] != "attention" or len(loops) == 1 or not outstanding:
        return ["loop"] * len(loops)
    fewest = min(range(len(loops)), key=lambda i: loops[i]["issue"] / (loops[i]["product"] or 1))
    names = ["edge"] * len(loops)
    names[fewest] = "full"
    if (case["mask"] + case["bias"]).startswith("key") and outstanding[-1] is None:
        names[-1] = "again"
    return names


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
    bound = not record["products"] or compile_gate.CASES[name]["op"] == "decode"
    memory = (counts["loaded"] + counts["stored"]) / chip.bandwidth if bound else 0.0
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
        in_flight=_in_flight(record, blocks, counts, chip) if bound else None,
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


def peers(compiled: Iterable[tuple[str, list[dict[str, Any]]]]) -> list[Entry]:
    """Return the entries of what benchmarks/cost_peers.py compiles."""
    return [entry for name, records in compiled for entry in entries(name, records)]


# -------------------------------------------------------------------------------------- the table

HEADER = """\
# Cost ledger

Triton {version}. Clocks of a multiprocessor for a 128 x 64 tile of S (attention), or for 128
elements, or 64 keys (decode), as the model in benchmarks/cost.py has it: predictions, not measurements. Blocks: that a
multiprocessor holds. Copies: groups under way where a loop waits for one; 0: it waits for all. KB:
of loads that a multiprocessor has under way, in kernels without products and of few queries.
Bound: the busiest unit, and the share of the time that the tensor cores are busy (the memory, in
kernels without products and of few queries) if that unit never waits.

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


def committed() -> tuple[str, Slots]:
    """Return the Triton version and the issue slots of the committed ledger."""
    text = TABLE.read_text()
    lines = [line.strip("| ").split(" | ") for line in text.split("|---|\n")[1].splitlines()]
    places = _numbered((case, kernel, part) for case, kernel, part, *_ in lines)
    slots = {place: float(line[5]) for place, line in zip(places, lines)}
    return text.split("Triton ")[1].split(". ")[0], slots


def issue_slots(found: list[Entry]) -> Slots:
    """Return the issue slots of each entry by its case, kernel, part and number among these."""
    places = _numbered((e.case, e.kernel, e.part) for e in found)
    return {place: e.issue for place, e in zip(places, found)}


def _numbered(places: Iterable[tuple[str, str, str]]) -> list[Place]:
    seen: Counter[tuple[str, str, str]] = Counter()
    numbered = []
    for place in places:
        numbered.append((*place, seen[place]))
        seen[place] += 1
    return numbered


def grown(new: Slots, old: Slots) -> list[str]:
    """Say in words where the issue slots of two ledgers differ by more than 3%, or entries do."""
    found = [
        f"{' '.join(map(str, place))}: not in {TABLE.name}" for place in new.keys() - old.keys()
    ]
    found += [
        f"{' '.join(map(str, place))}: {new[place]:.0f} issue slots, "
        f"in {TABLE.name} {old[place]:.0f}"
        for place in new.keys() & old.keys()
        if not old[place] / 1.03 - 0.5 <= new[place] <= old[place] * 1.03 + 0.5
    ]
    return sorted(found)


def waits(found: list[Entry]) -> list[str]:
    """Say in words which loops of 16-bit attention wait for all copies before they compute."""
    return [
        f"{e.case}, {e.kernel} {e.part}: waits for all copies"
        for e in found
        if e.case.split()[1:3] in (["attention", "bf16"], ["decode", "bf16"])
        if e.part in ("full", "edge", "loop") and e.tensor
        if not e.outstanding
        if not any(case in e.case and kernel == e.kernel for case, kernel in KNOWN_WAITS)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only the cases that contain TEXT"
    )
    parser.add_argument(
        "--write", action="store_true", help=f"write {TABLE.relative_to(ROOT)}, or {PEERS.name}"
    )
    parser.add_argument("--peers", action="store_true", help="kernels of other packages instead")
    options = parser.parse_args()
    if options.peers:
        from benchmarks import cost_peers

        table = written(metadata.version("triton"), peers(cost_peers.compiled()))
        PEERS.write_text(table) if options.write else print(table)
        return
    if options.write and options.only:
        parser.error("--write is for all cases")
    cases = {
        name: {**case, "loops": True}
        for name, case in compile_gate.CASES.items()
        if options.only in name and case["arch"] in CHIPS
    }
    if not cases:
        parser.error(f"no case of benchmarks/compile_gate.py has {options.only!r} in its name")

    def progress(name: str, answer: dict[str, Any]) -> None:
        print(f"{answer.get('seconds', 0):5.1f} s  {name}", file=sys.stderr)

    answers = compile_gate.compile_all(cases, progress)
    table = written(metadata.version("triton"), ledger(answers))
    if options.write:
        TABLE.write_text(table)
    else:
        print(table)
    errors = [f"{name}: {a['error']}" for name, a in answers.items() if "error" in a]
    raise SystemExit("\n".join(errors) or 0)


if __name__ == "__main__":
    main()
