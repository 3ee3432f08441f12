"""Counts what the main loops cost in their machine code. It needs no GPU.

    python -m benchmarks.proof.cost              prints the ledger from benchmarks/results/
                                                 compile.json, which compile_gate.py writes
    python -m benchmarks.proof.cost --only TEXT  only the cases with TEXT in their name
    python -m benchmarks.proof.cost --docs       writes the tables of docs/machine_code.md

The counts are facts, read from the machine code (sass.py); no time is modelled.

The figures of an attention loop are for a 128 x 64 tile of S, those of the loop of few queries for
64 keys of a key-value head. Those of other kernels are for 128
elements: of a row; of the output tile, outside the main loop of a GEMM; or of the product of BM, BN
and BK over 64 in that loop.
"""

from __future__ import annotations

import argparse
import csv
import functools
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import ROOT
from benchmarks import table as markdown_table
from benchmarks.proof.cases import CASES, DATA, Table

TILE = 128 * 64
PAGE = ROOT / "docs" / "machine_code.md"
TRITON = metadata.version("triton")
KNOWN = Path(__file__).with_name("known.tsv")

# Kernels that run all exponentials of whole tiles beside a product.
OVERLAPPED = ("hopper_forward", "hopper_dkdv", "hopper_dq")


@functools.cache
def _known_lines() -> list[dict[str, str]]:
    lines = [line for line in KNOWN.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines, delimiter="\t"))


def known(kind: str, case: str, kernel: str) -> list[float]:
    """Return what known.tsv allows a kernel of a case on this Triton; 0 if it names no figure."""
    loops = kind in ("local", "waits", "apart")
    return [
        float(line["most"] or 0)
        for line in _known_lines()
        if line["kind"] == kind and line["triton"] in ("", TRITON.rpartition(".")[0])
        if line["case"] in case
        if (line["kernel"] == kernel if loops else line["kernel"] in kernel)
    ]


class Chip(NamedTuple):
    """How many multiprocessors there are, and the bytes of shared memory that one holds."""

    count: int
    shared: int = 233472


# From NVIDIA's whitepapers. A scheduler issues an instruction of a warp in a clock.
CHIPS = {"sm_80": Chip(108, shared=167936), "sm_90": Chip(132), "sm_100": Chip(148)}
REGISTERS, WARPS, SCHEDULERS = 65536, 64, 4  # of a multiprocessor


@dataclass(frozen=True)
class Entry:
    """One loop, or other code of a kernel.

    part: see `_parts`; `rest` is what is outside of the loops. For attention of a few tokens with a
    mask of keys and dropout also `start` and `end`, which a program issues once, and `copy` and
    `mask`, which one warp issues for a tile: see `beside_loops` of sass.py.
    """

    case: str
    kernel: str
    part: str
    registers: int
    blocks: int  # that a multiprocessor holds at a time
    issue: float  # issue slots of a scheduler
    exponentials: float = 0.0  # instructions of a warp
    products: float = 0.0  # of 128 x 64 x 64 elements
    moved: float = 0.0  # bytes of global memory, of kernels without products and of few queries
    outstanding: int | None = None  # groups of copies under way where a loop first waits
    # KB of loads that a multiprocessor has under way, where bytes are counted: those that a block
    # does not wait for in between (sass.py), times the blocks that it holds, which are no more than
    # its share of the grid. To keep the memory busy it takes the latency times the bandwidth: on an
    # H200 800 ns times 4.3 TB/s, 26 KB for each multiprocessor.
    in_flight: float | None = None
    # The share of a loop's exponentials that are issued while a wgmma of the same warps is under
    # way; None: the loop has no wgmma or no exponential.
    overlap: float | None = None
    local: float = 0.0  # accesses of a warp to local memory, where spilled registers lie


def _is_standard(case: dict[str, Any]) -> bool:
    """Return whether a call is like those of the standard Transformer, on Hopper."""
    facts = case["arch"], case["op"], case.get("mask"), case.get("dropout")
    return facts == ("sm_90", "attention", "key", True) and case["length"] <= 512


def _parts(
    case: dict[str, Any], loops: list[dict[str, Any]], outstanding: list[int | None]
) -> list[str]:
    """Name the loops of an attention kernel: `full` walks the tiles that no edge of the band or the
    length cuts, and issues the fewest instructions; `edge`; and `again`, the last beside masked
    keys, walks a result of NaN once more, with one stage (`Tile.recompute_masked`).
    """
    if case["op"] != "attention" or len(loops) < 2 or not outstanding:
        return ["loop"] * len(loops)
    fewest = min(range(len(loops)), key=lambda i: loops[i]["issue"] / (loops[i]["product"] or 1))
    names = ["edge"] * len(loops)
    names[fewest] = "full"
    if (case["mask"] + case["bias"]).startswith("key") and outstanding[-1] is None:
        names[-1] = "again"
    return names


def ledger(name: str, answer: dict[str, Any]) -> list[Entry]:
    """Return the entries of a case that compile_worker.py has compiled, of each kernel once."""
    if CASES[name]["arch"] not in CHIPS:
        return []
    records = {record["hash"]: record for record in answer["records"]}
    return [entry for record in records.values() for entry in _of_kernel(name, record)]


def _of_kernel(name: str, record: dict[str, Any]) -> Iterator[Entry]:
    case, kernel, tile, warps = CASES[name], record["kernel"], record["blocks"], record["warps"]
    chip = CHIPS[case["arch"]]
    registers = -(-record["registers"] // 8) * 8
    blocks = min(
        REGISTERS // (registers * 32 * warps),
        chip.shared // (record["shared"] + 1024),
        WARPS // warps,
        32,
    )
    multiplies, attention = bool(record["products"]), case["op"] in ("attention", "decode")
    of_memory = not multiplies or case["op"] == "decode"

    def entry(
        part: str, counts: dict[str, Any], factor: float, product: int = 0, waits: int | None = None
    ) -> Entry:
        slots = warps / SCHEDULERS * factor
        overlaps = part != "rest" and counts["wgmma"] and counts["exponential"]
        return Entry(
            name, kernel, part, record["registers"], blocks,
            issue=counts["issue"] * slots,
            exponentials=counts["exponential"] * slots,
            products=product / (TILE * 64) * factor,
            moved=(counts["loaded"] + counts["stored"]) * factor if of_memory else 0.0,
            outstanding=waits,
            in_flight=min(blocks, record["programs"] / chip.count) * counts["in_flight"] / 1000
            if of_memory else None,
            overlap=counts["beside"] / counts["exponential"] if overlaps else None,
            local=counts["local"] * slots,
        )  # fmt: skip

    outer = tile.get("columns") or case["d"]
    tiles = tile.get("row_tiles", 1)  # in a pass of the loop
    if kernel == "hopper_dkdv" and tile["columns"] == 64:
        tiles = 2
    elements = tile.get("rows", 1) * outer * tiles
    unit = TILE if attention and multiplies else 128
    if case["op"] == "decode" and multiplies:
        # Within `batch_invariant` each of the 4 heads of a group is a program of its own.
        elements, unit = outer / (4 if kernel == "forward" else 1), 64
    loops = [loop for loop in record["loops"] if loop["tensor"] or not multiplies]
    for i, (loop, part) in enumerate(zip(loops, _parts(case, loops, record["outstanding"]))):
        if not multiplies:
            yield entry(part, loop, unit / elements)
            continue
        of_a_tile, inner = record["products"][i], tile.get("features", 64) / 64
        # An unrolled loop computes more than one tile; the code of sm_100 does not say.
        product = loop["product"] or of_a_tile
        factor = unit / (elements * inner * product / of_a_tile)
        yield entry(part, loop, factor, product, record["outstanding"][i])
    if _is_standard(case):
        for part, issued in record["beside"].items():
            yield Entry(name, kernel, part, record["registers"], blocks, float(issued))
    if (multiplies and not attention) or not (multiplies or loops):
        rest = {key: n - sum(x[key] for x in loops) for key, n in record["whole"].items()}
        yield entry("rest", rest, 128 / elements)


# -------------------------------------------------------------------------------------- the table

HEADER = """\
# Cost ledger

Triton {version}. Counts for a 128 x 64 tile of S (attention), for 128 elements, or for 64 keys (decode). Blocks: that a
multiprocessor holds. Issue: slots of a scheduler. Products: of 128 x 64 x 64 elements. Bytes: of global memory, in kernels
without products and of few queries. Copies: groups under way where a loop waits for one; 0: it waits for all. KB:
of loads that a multiprocessor has under way, in kernels without products and of few queries.
Overlap: the share of a loop's exponentials beside a wgmma of the same warps. Local: accesses to
local memory, where spilled registers lie.
"""  # noqa: E501
COLUMNS = (
    "case", "kernel", "part", "registers", "blocks", "issue", "exponentials", "products", "bytes",
    "copies", "KB", "overlap", "local",
)  # fmt: skip


def written(entry: Entry) -> list[str]:
    def cell(x: Any) -> str:
        return "-" if x is None else f"{x:.0f}" if x >= 100 else f"{x:.3g}"

    return [entry.case, entry.kernel, entry.part, *map(cell, astuple(entry)[3:])]


# The rows of the first table in docs/machine_code.md: a name, the call, and the kernels.
LOOPS = (
    ("forward", "causal", ("forward",)),
    ("forward in Gluon", "causal, Gluon", ("hopper_forward",)),
    ("backward", "causal", ("backward_dkdv", "backward_dq")),
    ("backward in Gluon", "causal, Gluon backward", ("hopper_dkdv", "hopper_dq")),
)
LOOPS_HEADER = (
    "causal, bfloat16, sm_90; D = 64 / 128", "whole tile", "edge tile",
    "exponentials beside a wgmma", "registers", "local",
)  # fmt: skip


def attention_loops(own: dict[str, list[Entry]]) -> list[str]:
    """Return the table of attention's loops, in Markdown."""
    rows = []
    for label, call, kernels in LOOPS:
        found = [
            [e for e in own[f"sm_90 attention bf16 D={d} {call}"] if e.kernel in kernels]
            for d in (64, 128)
        ]
        cells = [" / ".join(x) for x in zip(*map(_loop_cells, found))]
        rows.append([label, *cells])
    return markdown_table(LOOPS_HEADER, rows)


def _loop_cells(found: list[Entry]) -> list[str]:
    """Return the sums over the kernels of a row, where a kernel's one loop is both tiles; the share
    of exponentials in whole tiles; and the most registers and accesses to local memory.
    """
    whole = [e for e in found if e.part in ("full", "loop")]
    edge = [e for e in found if e.part in ("edge", "loop")]
    beside = sum((e.overlap or 0) * e.exponentials for e in whole)
    return [
        *(f"{sum(e.issue for e in part):.0f}" for part in (whole, edge)),
        f"{beside / sum(e.exponentials for e in whole):.0%}",
        str(max(e.registers for e in found)),
        f"{max(e.local for e in found):.3g}",
    ]


# The rows of the second table: a name, the choice of kernels, and the kernel.
STARTS = (
    ("forward", "scratch", "forward"),
    ("backward in one kernel", "scratch", "short_backward"),
    ("forward in Gluon", "Gluon", "hopper_forward"),
    ("dK and dV in Gluon", "Gluon", "hopper_dkdv"),
    ("dQ in Gluon", "Gluon", "hopper_dq"),
)
STARTS_HEADER = "key mask, dropout, D = 64, sm_90; S = 128 / 512", "start", "end", "copies", "mask"


def starts(own: dict[str, list[Entry]]) -> list[str]:
    """Return the table of what is issued beside the loops of products, in Markdown."""
    rows = []
    for label, choice, kernel in STARTS:
        call = "sm_90 attention bf16 D=64 S={} key mask, dropout, " + choice
        found = [own[call.format(s)] for s in (128, 512)]
        issued = [{e.part: f"{e.issue:.0f}" for e in x if e.kernel == kernel} for x in found]
        cells = [[x.get(part, "-") for x in issued] for part in ("start", "end", "copy", "mask")]
        rows.append([label, *map(" / ".join, cells)])
    return markdown_table(STARTS_HEADER, rows)


TABLES = {"loops": attention_loops, "starts": starts}


def with_tables(page: str) -> str:
    """Return the text of docs/machine_code.md with the tables of the committed data."""
    for name, table in TABLES.items():
        start = f"<!-- {name}: python -m benchmarks.proof.cost --docs -->"
        end = f"<!-- end of {name} -->"
        before, rest = page.split(start)
        lines = "\n".join(table(read(Table.read())))
        page = f"{before}{start}\n{lines}\n{end}{rest.split(end)[1]}"
    return page


def rows(found: Iterable[Entry]) -> list[list[Any]]:
    """Return the entries of a case as the data hold them: with four digits, without its name."""

    def short(x: Any) -> Any:
        return float(f"{x:.4g}") if isinstance(x, float) else x

    return [[short(x) for x in astuple(entry)[1:]] for entry in found]


def read(table: Table) -> dict[str, list[Entry]]:
    """Return the entries that stand in the data."""
    return {name: read_case(name, case) for name, case in table.cases.items()}


def read_case(name: str, case: dict[str, Any]) -> list[Entry]:
    return [Entry(name, *row) for row in case["costs"]]


def grown(new: Iterable[Entry], old: Iterable[Entry]) -> list[str]:
    """Say in words where the issue slots of a case's kernels differ by more than 3% from those in
    the data, or their loops do.
    """
    now, then = _by_kernel(new), _by_kernel(old)
    found = []
    for kernel, before in then.items():
        after = now.get(kernel, [])
        parts, known = ([e.part for e in loops] for loops in (after, before))
        if parts != known:
            found.append(f"{kernel}: loops {', '.join(parts)}; in {DATA.name} {', '.join(known)}")
            continue
        found += [
            f"{kernel} {e.part}: {e.issue:.0f} issue slots, in {DATA.name} {was.issue:.0f}"
            for e, was in zip(after, before)
            if not was.issue / 1.03 - 0.5 <= e.issue <= was.issue * 1.03 + 0.5
        ]
    return found


def _by_kernel(found: Iterable[Entry]) -> dict[str, list[Entry]]:
    kernels: dict[str, list[Entry]] = {}
    for entry in found:
        kernels.setdefault(entry.kernel, []).append(entry)
    return kernels


def waits(found: Iterable[Entry]) -> list[str]:
    """Say in words which loops of 16-bit attention wait for all copies before they compute."""
    return [
        f"{e.case}, {e.kernel} {e.part}: waits for all copies"
        for e in found
        if e.case.split()[1:3] in (["attention", "bf16"], ["decode", "bf16"])
        if e.part in ("full", "edge", "loop") and e.products
        if not e.outstanding
        if not known("waits", e.case, e.kernel)
    ]


def misused_registers(found: Iterable[Entry]) -> list[str]:
    """Say in words which loops keep registers in local memory that are not known to, and which of
    Gluon's leave exponentials alone.
    """
    problems = []
    for e in found:
        loop = f"{e.case}, {e.kernel} {e.part}"
        if e.part != "rest" and e.local > max(known("local", e.case, e.kernel), default=0):
            problems.append(f"{loop}: {e.local:.3g} accesses to local memory")
        apart = known("apart", e.case, e.kernel)
        if e.kernel in OVERLAPPED and e.part in ("full", "loop") and e.overlap != 1 and not apart:
            problems.append(f"{loop}: {e.overlap:.0%} of its exponentials run beside a product")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--only", default="", metavar="TEXT", help="only the cases that contain TEXT")
    add("--docs", action="store_true", help=f"write the tables of {PAGE.name}")
    options = parser.parse_args()
    if options.docs:
        PAGE.write_text(with_tables(PAGE.read_text()))
        return
    table = Table.read()
    known = [found for name, found in read(table).items() if options.only in name]
    if not known:
        parser.error(f"no case has {options.only!r} in its name")
    lines = markdown_table(COLUMNS, (written(entry) for found in known for entry in found))
    print(HEADER.format(version=table.triton), *lines, sep="\n")


if __name__ == "__main__":
    main()
