"""The compile gate: every shipped configuration, compiled for GPUs that need not be there.

    python -m benchmarks.proof.compile_gate            prints the table of the data
    python -m benchmarks.proof.compile_gate --check    names the stale cases, and fails if there is
                                                       one
    python -m benchmarks.proof.compile_gate --mend     compiles the stale cases, two at a time, and
                                                       writes benchmarks/results/compile.json after
                                                       each; what is interrupted goes on from there
    python -m benchmarks.proof.compile_gate --all      compiles all cases; writes with --mend
    python -m benchmarks.proof.compile_gate --only "Gluon|rotary"
                                                       only the cases whose name matches

A case is stale if what it launches has changed, or the code that is compiled for it (keys.py). If
the same Triton translates it to the same GPU IR as before, it is not compiled further.
tests/proof/test_compile.py asserts on the same facts. Speed is not among them.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, NamedTuple

from benchmarks import ROOT
from benchmarks import table as markdown_table
from benchmarks.proof import cost
from benchmarks.proof.cases import CASES, DATA, Table, compile_all, keys, translation

MEND = "to compile them: python -m benchmarks.proof.compile_gate --mend"


def _unaligned(case: dict[str, Any]) -> bool:
    """Say whether rows of a mask or a bias are not 16-aligned: the table alone shows their cost."""
    return case["op"] == "attention" and case["length"] % 16 > 0


def spills(name: str, kernels: list[Kernel]) -> list[str]:
    """Return which kernels of a case spill or are serialised and are not known to, in words."""
    found = []
    for kernel in kernels if not _unaligned(CASES[name]) else ():
        if kernel.spill > max(cost.known("spill", name, kernel.name), default=0):
            found.append(f"{kernel.name}: {kernel.spill} bytes of spill")
        if kernel.serialised != "-" and not cost.known("serialised", name, kernel.name):
            found.append(f"{kernel.name}: wgmma is serialised, {kernel.serialised}")
    return found


def problems(name: str, answer: dict[str, Any]) -> list[str]:
    """Return what is wrong with a compiled case beside what the data show, in words."""
    return [
        f"{record['kernel']}: {problem}"
        for record in answer["records"]
        for problem in _problems(CASES[name], record, answer["limit"])
    ]


def _problems(case: dict[str, Any], record: dict[str, Any], limit: int) -> Iterator[str]:
    kernel, single = record["kernel"], case["dtype"] == "fp32"
    if record["shared"] > limit:
        yield f"{record['shared']} bytes of shared memory, the limit is {limit}"
    if record["tensor_memory"] > 512:
        yield f"{record['tensor_memory']} columns of tensor memory, there are 512"
    if record["f64"]:
        yield "float64 arithmetic"
    if case.get("activation") == "relu" and kernel.startswith("hidden") and record["drops_nan"]:
        yield "NaN is dropped, by a maximum or a comparison"
    # A small tile of a mask, or bytes one by one: not 16 bytes for each thread.
    small = record["blocks"].get("rows", 1) * record["blocks"].get("columns", 1) < 1024
    few = kernel == "bounds" and (small or _unaligned(case))
    few |= kernel == "clear_tail"  # it loads two numbers
    if not record["vectors"] and not few:
        yield "no load of 16 bytes"
    # A program of a sequence that is shorter than others, but if it owns all of the sequence.
    # With a block mask, all are one.
    if case["op"] in ("attention", "decode"):
        whole = case["mask"] == "blocks" or kernel in ("delta", "short_backward", "clear_tail")
        if record["ends_early"] != (case["packed"] and not whole):
            yield "a branch to the end" if record["ends_early"] else "no end before the work"
    asked_for = kernel == "backward_dbias"
    asked_for |= kernel == "hopper_dq" and case["bias"] == "own bf16"
    large = case["op"] == "attention" and record["largest"] >= case["length"] ** 2 > 2**20
    if large and not asked_for:
        yield f"an argument has {record['largest']} elements, Sq * Sk: neither mask nor bias"
    if not record["dots"]:
        return
    few = case["op"] == "decode" and record["blocks"]["rows"] < 64  # the rows of a wgmma
    few = few or case.get("d", 0) > 256  # whose sums of 64 rows would not fit the registers
    if case["arch"] == "sm_90" and not single and record["matrix"] != "wgmma" and not few:
        yield f"the matrix instruction is {record['matrix']}"
    if record["matrix"] == "-":
        yield "no matrix instruction"
    if record["stages"] > 1 and record["asynchronous"] == "-":
        yield "no asynchronous copies, with more than one stage"
    if single and record["precision"] != "tf32x3":
        yield f"float32 products by {record['precision']}"
    if single and record["parts"] < 3:
        yield f"{record['parts']} tf32 products for a float32 one"


# -------------------------------------------------------------------------------------- the table


class Kernel(NamedTuple):
    """A row of the table."""

    name: str
    blocks: str  # their sizes, warps and stages
    registers: int
    spill: int  # bytes a thread, stores and loads together
    serialised: str  # the wgmma that ptxas warns to run one by one
    shared: int  # bytes a block
    instructions: str
    translated: str  # the digest of its GPU IR


HEADER = """\
# What the compilers make of the kernels

Triton {version}. Spill: bytes a thread, stores and loads together. Shared: bytes a block.
Serialised: ptxas warns that it runs the wgmma one by one.
"""
COLUMNS = (
    "case", "kernel", "blocks, warps, stages", "registers", "spill", "serialised", "shared",
    "instructions",
)  # fmt: skip


def rows(answer: dict[str, Any]) -> list[Kernel]:
    """Return the kernels of a case, each once."""
    found = {}
    for r in answer["records"]:
        blocks = "x".join(map(str, r["blocks"].values())) + f" w{r['warps']}"
        blocks += f" s{r['stages']}" if r["stages"] else ""
        serialised = " ".join(r["serialised"]) or "-"
        instructions = [r[kind] for kind in ("matrix", "asynchronous") if r[kind] != "-"]
        row = (r["kernel"], blocks, r["registers"], r["spill"], serialised, r["shared"])
        found[r["hash"]] = Kernel(*row, ", ".join(instructions) or "-", r["translated"])
    return list(found.values())


def judged(name: str, kernels: list[Kernel], loops: list[cost.Entry]) -> list[str]:
    """Return what is wrong with a case by the figures that the data hold, in words."""
    return spills(name, kernels) + cost.waits(loops) + cost.misused_registers(loops)


def wrong(name: str, answer: dict[str, Any]) -> list[str]:
    """Return what is wrong with a compiled case, in words."""
    if "error" in answer:
        return [answer["error"]]
    return problems(name, answer) + judged(name, rows(answer), cost.ledger(name, answer))


def entry(name: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Return what the data hold of a compiled case."""
    costs = cost.rows(cost.ledger(name, answer))
    return {"translation": translation(answer), "kernels": rows(answer), "costs": costs}


def print_table(table: Table, names: list[str]) -> None:
    found = (
        [name, *row[:-1]] for name in names for row in table.cases.get(name, {}).get("kernels", ())
    )
    print(HEADER.format(version=table.triton), *markdown_table(COLUMNS, found), sep="\n")


def summary(table: Table) -> str:
    """Return how many kernels the cases have, and how many spill and are serialised, in words."""
    kernels = [kernel for own in table.spills().values() for kernel in own.values()]
    spills = [spill for spill, _ in kernels if spill]
    serialised = sum(names != "-" for _, names in kernels)
    most = max(spills, default=0)
    return (
        f"Triton {table.triton}, {len(table.cases)} cases without a problem: {len(kernels)} "
        f"kernels; {len(spills)} spill, at most {most} bytes a thread; {serialised} are serialised"
    )


def changes(name: str, answer: dict[str, Any], known: dict[str, Any]) -> list[str]:
    """Return how the loops of a compiled case differ from the data, in words."""
    return cost.grown(cost.ledger(name, answer), cost.read_case(name, known))


def mend(
    names: list[str],
    keys: dict[str, str],
    known: dict[str, dict[str, Any]],
    translates: bool,
    write: Callable[[], None],
) -> list[str]:
    """Compile the cases of these names, enter those without a problem in `known` with their keys,
    and call `write` after each. Return the problems, in words.

    With `translates` a case whose GPU IR is that of `known` gets its new key, and is not compiled.
    """
    found: list[str] = []
    started = time.time()
    translations = {name: case["translation"] for name, case in known.items() if translates}
    for name, answer in compile_all(names, translations):
        if answer is None:
            known[name]["key"] = keys[name]
            write()
            print(f"the same GPU IR  {name}", flush=True)
            continue
        seconds = f"{time.time() - started:5.0f} s  {answer.get('seconds', 0):5.1f} s of processor"
        remarks = wrong(name, answer)
        found.extend(f"{name}: {text}" for text in remarks)
        if not remarks:
            if name in known:
                remarks = changes(name, answer, known[name])
            known[name] = {"key": keys[name], **entry(name, answer)}
            write()
        print(f"{seconds}  {name}", *(f"    {text}" for text in remarks), sep="\n", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--check", action="store_true", help="fail if a case is stale")
    add("--mend", action="store_true", help=f"compile stale cases, write {DATA.relative_to(ROOT)}")
    add("--all", action="store_true", help="compile the cases that are known too")
    add("--only", default="", metavar="REGEX", help="only the cases whose name matches")
    options = parser.parse_args()
    try:
        named = [name for name in CASES if re.search(options.only, name)]
    except re.error as error:
        parser.error(f"--only {options.only!r} is not a regex: {error}")
    table, version = Table.read(), metadata.version("triton")
    if not (options.check or options.mend or options.all):
        print_table(table, named)
        return
    now = keys()
    of_the_data = table.stale(now) if table.triton == version else now
    stale = [name for name in of_the_data if name in named]
    gone = [name for name in table.cases if name not in now]
    print(f"{len(stale)} of {len(named)} cases are stale, {len(gone)} are no case any more")
    if options.check:
        print(*stale, *gone, sep="\n")
        if stale or gone:
            sys.exit(MEND)
        return
    if options.mend and options.only and table.triton != version:
        parser.error(f"the data are of Triton {table.triton}: --mend takes all cases, not --only")
    known = {} if table.triton != version else {n: table.cases[n] for n in now if n in table.cases}

    def write() -> None:
        if options.mend:
            Table(version, {name: known[name] for name in now if name in known}).write()

    asked = named if options.all else stale
    write()
    found = mend(asked, now, known, not options.all, write)
    print(*found, sep="\n")
    print(summary(Table(version, {name: known[name] for name in asked if name in known})))
    print(f"{len(asked)} of {len(CASES)} cases, {len(found)} problems")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
