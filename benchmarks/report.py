"""Makes tables and plots of measured figures.

    python -m benchmarks.report results.json --out FOLDER    tables (Markdown) and plots
    python -m benchmarks.report --evidence                   what is made of benchmarks/results: the
                                                             figures of docs/evidence.md, README's
                                                             status

It reads the files of `pytest --benchmark-only --benchmark-json=results.json` and of
`python -m benchmarks.gpu`, and its journals (.jsonl). It measures nothing.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import ROOT, folder
from benchmarks import table as markdown_table
from benchmarks.gpu import journal

RESULTS = ROOT / "benchmarks" / "results"

# This package, and what is no peer. `usual` is the peer of `batch_invariant`, and `shipped` that of
# `gluon`.
OURS = ("auto", "reference", "triton", "packed", "read", "batch_invariant", "gluon")
OURS += ("fastformer", "accelerate", "accelerated and compiled", "fusing")
CAPTURED = "CUDA graph"  # how a time on a GPU is taken, where it can be
COLUMNS = ("ms", "TFLOP/s", "GB/s", "tokens/s", "MiB", "x torch", "x best", "roofline")
LEGEND = [
    "x torch, x best: the time of torch's own op, and of the best peer, divided by the time of the "
    "provider; x torch is the median over pairs of rounds that are run in turn, if there are any",
    "roofline: max(FLOPs / P, bytes / BW) divided by the time, with P and BW as measured in this "
    "run; it exceeds 1 if the data fit a cache that the copy for BW does not fit",
    "by events: no CUDA graph could be captured, and the time includes that of the host",
]
START, END = "<!-- figures: python -m benchmarks.report --evidence -->", "<!-- end of figures -->"
PICTURE = "figures/headline.png"  # beside the page
UNMEASURED = (
    "Speed on a GPU is **not measured** yet: `benchmarks/results` holds no run on one. If you have "
    "an H100 or H200 and six minutes, "
    "[First run](first_run.md) says how to measure it."
)
STAND_IN = "no GPU but a stand-in"  # the name of benchmarks.gpu.stand_in's: its times mean nothing

Row = dict[str, Any]


@dataclass
class Results:
    """The results of a run: a row for each measurement, the absent providers, and the failures.

    A row has group, provider, backend, ms and its quartiles ms_low and ms_high; tflops, gb_per_s,
    tokens_per_s, peak_mib, of_roof and x_torch_in_turn if they are known; the sizes; and the
    description of the machine.
    """

    rows: list[Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def groups(self) -> dict[str, list[Row]]:
        """Group the rows by the work, and by the GPU if there are several."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row["group"] + self.place(row), []).append(row)
        return groups

    def place(self, row: Row) -> str:
        """Return the words that tell a row from those of other GPUs, if there are any."""
        several = any(x.get("gpu") != row.get("gpu") for x in self.rows)
        return f" on {row.get('gpu') or 'a CPU'}" if several else ""

    def families(self) -> dict[str, list[Row]]:
        """Group the rows that differ only in length and provider."""
        families: dict[str, list[Row]] = {}
        for group, rows in self.groups().items():
            if "length" in rows[0]:
                families.setdefault(re.sub(r" S=\d+", "", group), []).extend(rows)
        return families


def load(*paths: Path) -> Results:
    """Read results from JSON files of pytest-benchmark or benchmarks.gpu, or from its journals."""
    results = Results()
    for path in paths:
        data = _journal(path) if path.suffix == ".jsonl" else json.loads(path.read_text())
        for key in ("absent", "failed"):
            getattr(results, key).update(data.get(key, {}))
        rows = data.get("rows", [])
        rows += [{"group": b["group"], **b["extra_info"]} for b in data.get("benchmarks", [])]
        results.rows += [row for row in rows if "ms" in row]
    return results


def _journal(path: Path) -> Row:
    data: Row = {"rows": [], "absent": {}, "failed": {}}
    events = list(journal.read(path))
    ended = {event["test"] for event in events if "test" in event}
    for event in events:
        data["absent"].update(event.get("absent", {}))
        data["rows"] += [event["row"]] if "row" in event else []
        if event.get("outcome") == "failed":
            data["failed"][event["test"]] = event["reason"]
    lost = sorted(journal.begun(events) - ended)
    data["failed"].update(dict.fromkeys(lost, "did not finish"))
    return data


# ----------------------------------------------------------------------------------------- tables


def table(rows: Sequence[Row]) -> Iterator[tuple[str, list[str]]]:
    """Yield (provider, cells of COLUMNS) of each row; a ratio of 2 is twice as fast."""
    times = {row["provider"]: row["ms"] for row in rows}
    peers = [row["ms"] for row in rivals(rows)]
    for row in rows:
        name, ms = row["provider"], row["ms"]
        if row["backend"] != name:
            name += f" ({row['backend']})"
        if row.get("lacks"):
            name += f" (no {row['lacks']})"
        if row.get("device_timer", CAPTURED) != CAPTURED:
            name += ", by events"
        to_torch = times["torch"] / ms if "torch" in times else None
        cells = [
            ms,
            row.get("tflops"),
            row.get("gb_per_s"),
            row.get("tokens_per_s"),
            row.get("peak_mib"),
            row.get("x_torch_in_turn", to_torch),
            min(peers) / ms if peers else None,
            row.get("of_roof"),
        ]
        yield name, [_cell(cell) for cell in cells]


def rivals(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of peers that do the same work; none if no row is of this package."""
    found = [row for row in rows if row["provider"] not in OURS and not row.get("lacks")]
    return found if any(row["provider"] in OURS for row in rows) else []


def text(results: Results) -> list[str]:
    """Return the table for a terminal, and what is to be said about it."""
    lines = [" " * 34 + "".join(f"{title:>10s}" for title in COLUMNS)]
    for group, rows in results.groups().items():
        lines.append(group)
        for name, cells in table(rows):
            lines.append(f"    {name:30s}" + "".join(f"{cell:>10s}" for cell in cells))
    lines += ["", *dict.fromkeys(map(machine, results.rows))]
    lines += [f"roofline in {roofline}" for roofline in rooflines(results.rows)]
    lines += [f"absent: {name} ({why})" for name, why in sorted(results.absent.items())]
    return lines + [f"FAILED {test}: {why.splitlines()[0]}" for test, why in results.failed.items()]


class Compared(NamedTuple):
    """Our time at a length, how many times as fast as the best peer that is, and which peer, and
    the share of the ceiling.
    """

    length: str
    ms: float
    ratio: float
    peer: str
    of_roof: float | None

    def __str__(self) -> str:
        roof = "" if self.of_roof is None else f" {self.of_roof:.0%}"
        return f"{self.length}{_cell(self.ms)} ms {self.ratio:.2f} x {self.peer}{roof}"


STEPS = r"nn.TransformerEncoder|BERT|GPT"  # whole models, which also run without CUDA graphs
OWN_GRAPHS = "reduce-overhead"  # its CUDA graphs are torch.compile's
SUMMARY_LINES = 60
LEGEND_OF_RATIOS = (
    "our time, how often that fits into the best peer's, and our share of the ceiling"
)


def compared(results: Results) -> dict[str, list[Compared]]:
    """Return for each piece of work of ours the comparisons with the best peer, by length."""
    found: dict[str, list[Compared]] = {}
    works = {group: re.sub(r",? S=\d+", "", group) for group in results.groups()}
    ours: dict[str, set[str]] = {}
    for group, rows in results.groups().items():
        own = {x["provider"] for x in rows if x["provider"] in OURS} - {"reference"}
        ours.setdefault(works[group], set()).update(own)
    for group, rows in results.groups().items():
        length, work = re.search(r"S=\d+", group), works[group]
        for row in (x for x in rows if x["provider"] in ours[work]):
            name = work + f", {row['provider']}" * (len(ours[work]) > 1)
            clocks = {"": "ms"}
            if re.match(STEPS, group):
                clocks = {", in a CUDA graph": "ms", ", without one": "wall_ms"}
            for clock, figure in clocks.items():
                able = [x for x in [row, *rivals(rows)] if figure in x]
                if "graph" in clock:
                    able = [x for x in able if _is_captured(x) or x["provider"] == OWN_GRAPHS]
                if row not in able or len(able) == 1:
                    continue
                best = min(able[1:], key=lambda x: x[figure])
                events = figure == "ms" and not (_is_captured(row) and _is_captured(best))
                one = Compared(
                    length[0] + " " if length else "", row[figure], best[figure] / row[figure],
                    best["provider"] + ", by events" * (events and clock == ""),
                    row.get("of_roof") if figure == "ms" else None,
                )  # fmt: skip
                found.setdefault(name + clock, []).append(one)
    return found


def _is_captured(row: Row) -> bool:
    return row.get("device_timer", CAPTURED) == CAPTURED


def summary(results: Results) -> list[str]:
    """Return at most SUMMARY_LINES lines: ours beside the best peer, the ceilings, the failures."""
    head = [*dict.fromkeys(map(machine, results.rows))]
    head += [f"ceilings in {roofline}" for roofline in rooflines(results.rows)]
    head += [f"{LEGEND_OF_RATIOS}:"]
    lines = [f"{name:58s} " + "   ".join(map(str, x)) for name, x in compared(results).items()]
    failed = [f"FAILED {test}: {why.splitlines()[0]}" for test, why in results.failed.items()]
    verdicts = gluon_verdicts(results)
    failed = _cut(failed, max(5, SUMMARY_LINES - len(head) - len(lines) - len(verdicts)))
    lines = _cut(lines, SUMMARY_LINES - len(head) - len(verdicts) - len(failed))
    return head + lines + verdicts + failed


def _cut(lines: list[str], most: int) -> list[str]:
    """Return at most so many lines; the last one says how many are left out."""
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], f"and {len(lines) - most + 1} more, in results.json"]


LEAST_GAIN = 1.15  # of a kernel in Gluon over the shipped one, at 1024 or 4096 tokens: else it goes


def gluon_verdicts(results: Results) -> list[str]:
    """Return what a run decides about each kernel in Gluon, by the rule of docs/first_run.md."""
    best: dict[str, float] = {}
    for name, found in compared(results).items():
        if name.startswith("Gluon "):
            kernel = " ".join(name.split()[:2])
            best[kernel] = max(best.get(kernel, 0.0), *(one.ratio for one in found))
    return [
        f"{kernel}: at best {ratio:.2f} x shipped: it {'stays' if ratio >= LEAST_GAIN else 'goes'}"
        for kernel, ratio in best.items()
    ]


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def machine(row: Row) -> str:
    """Describe the machine and the versions of a row."""
    words = [row.get("gpu") or row.get("platform") or "unknown machine"]
    words += ["**its times mean nothing**"] if row.get("gpu") == STAND_IN else []
    for name in ("driver", "torch", "triton", "commit"):
        words += [f"{name} {row[name]}"] if row.get(name) else []
    return ", ".join(words)


def rooflines(rows: Iterable[Row]) -> list[str]:
    """Describe P and BW of each dtype: from the least to the most, if several processes have
    measured them.
    """
    found: dict[str, list[Row]] = {}
    for row in rows:
        if "roof_tflops" in row:
            found.setdefault(f"{row['dtype']}{_threads(row)}", []).append(row)
    return [
        f"{name}: P = {_span(mine, 'roof_tflops')} TFLOP/s, "
        f"BW = {_span(mine, 'roof_gb_per_s')} GB/s"
        for name, mine in found.items()
    ]


def _span(rows: Sequence[Row], name: str) -> str:
    ends = (_cell(end(row[name] for row in rows)) for end in (min, max))
    return " to ".join(dict.fromkeys(ends))


def _threads(row: Row) -> str:
    return "" if row.get("gpu") else f" on {row['threads']} CPU threads"


def markdown(results: Results, pictures: Sequence[Path] = ()) -> str:
    """Write all results as Markdown."""
    lines = ["# Measured figures", ""]
    lines += [f"- {place}" for place in dict.fromkeys(map(machine, results.rows))]
    lines += [f"- roofline in {text}" for text in rooflines(results.rows)]
    lines += [f"- {note}" for note in LEGEND]
    lines += ["- the lower and the upper quartile of the rounds stand behind each time"]
    lines += [f"- absent: {name} ({why})" for name, why in sorted(results.absent.items())]
    lines += [f"- FAILED: {name}: {why}" for name, why in results.failed.items()]
    for path in pictures:
        lines += ["", f"![{path.stem}]({path.name})"]
    for group, rows in results.groups().items():
        tabulated = [[name, *cells] for name, cells in table(rows)]
        for row, cells in zip(rows, tabulated):
            if "ms_low" in row:
                cells[1] += f" ({_cell(row['ms_low'])} to {_cell(row['ms_high'])})"
        lines += ["", f"## {group}", "", _shape(rows), ""]
        lines += markdown_table(["", *COLUMNS], tabulated)
    return "\n".join(lines) + "\n"


SHAPES = ("batch", "heads", "length", "head_dim", "valid_keys", "rows", "width", "d", "d_ff")
SHAPES += ("d_model", "layers", "vocab", "classes", "dropout_p")


def _shape(rows: Sequence[Row]) -> str:
    """Describe the sizes that all rows share."""
    first = {k: rows[0][k] for k in SHAPES if k in rows[0]}
    shared = {k: v for k, v in first.items() if all(row.get(k) == v for row in rows)}
    return ", ".join([str(rows[0]["dtype"]), *(f"{k} = {v}" for k, v in shared.items())])


# ------------------------------------------------------------------------------------------ plots


def draw(family: str, rows: Sequence[Row]) -> Any:
    """Draw time, rate and roofline, peak memory, and the ratio to the best peer against the
    length, as a matplotlib Figure. The rate is that of FLOPs if they are counted, else of bytes.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    unit = "tflops" if any("tflops" in row for row in rows) else "gb_per_s"
    roofline = {r["length"]: r[unit] / r["of_roof"] for r in rows if "of_roof" in r and unit in r}
    lengths = sorted({row["length"] for row in rows})
    peers = [(row["length"], row["ms"]) for row in rows if row["provider"] not in OURS]
    best = {n: min(ms for length, ms in peers if length == n) for n, _ in peers}

    def x_best(row: Row) -> float | None:
        compared = row["provider"] in OURS and row["length"] in best
        return best[row["length"]] / row["ms"] if compared else None

    panels: dict[str, Callable[[Row], float | None]] = {
        "time, ms (band: quartiles)": lambda row: row["ms"],
        {"tflops": "TFLOP/s", "gb_per_s": "GB/s"}[unit]: lambda row: row.get(unit),
        "peak memory of a call, MiB": lambda row: row.get("peak_mib"),
        "best peer's time over ours": x_best,
    }
    for i, (axes, (label, value)) in enumerate(zip(figure.subplots(2, 2).flat, panels.items())):
        for n, name in enumerate(dict.fromkeys(row["provider"] for row in rows)):
            own = sorted((r for r in rows if r["provider"] == name), key=lambda r: r["length"])
            points = [(row["length"], value(row)) for row in own if value(row) is not None]
            if not points:
                continue
            style = dict(color=f"C{n % 10}", linewidth=2.2 if name in OURS else 1.2)
            axes.plot(*zip(*points), marker="o", markersize=4, label=name, **style)
            if i == 0:
                band = zip(*((r["length"], r["ms_low"], r["ms_high"]) for r in own))
                axes.fill_between(*band, color=style["color"], alpha=0.2, linewidth=0)
        if not axes.lines:  # there is no peer, or no memory was measured
            axes.set_axis_off()
            continue
        if i == 1 and roofline:
            style = dict(color="black", linestyle="--", label="roofline, measured")
            axes.plot(*zip(*sorted(roofline.items())), **style)
        if i == 3:
            axes.axhline(1, color="black", linewidth=0.8)
        elif all((value(row) or 1) > 0 for row in rows):
            axes.set_yscale("log")
        axes.legend(fontsize=8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(n) for n in lengths], fontsize=8)
        axes.set(xlabel="sequence length", title=label)
        axes.grid(alpha=0.3)
    figure.suptitle(family)
    caption = [_shape(rows), *rooflines(rows), *dict.fromkeys(map(machine, rows))]
    figure.supxlabel("\n".join(caption), fontsize=8)
    return figure


def write(results: Results, folder: Path) -> list[Path]:
    """Write report.md and, with matplotlib, a plot of each family of two lengths or more. Return
    the paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    families = results.families() if importlib.util.find_spec("matplotlib") else {}
    for family, rows in families.items():
        if len({row["length"] for row in rows}) > 1:
            path = folder / (re.sub(r"\W+", "_", family).strip("_") + ".png")
            draw(family, rows).savefig(path, dpi=100)
            pictures.append(path)
    report = folder / "report.md"
    report.write_text(markdown(results, pictures))
    return [report, *pictures]


# ---------------------------------------------------------------------------------------- evidence


def evidence_block(results: Results) -> str:
    """The figures of docs/evidence.md: the speed on a GPU, or that it was not measured; and what
    is known without a GPU, from the committed accuracy ledger, mutation report and compile table.
    """
    return "\n".join(
        [
            *(speed_block(results), "", *host_table(), "", *cpu_table(), "", *accuracy_table(), ""),
            *(*compile_table(), "", *mutation_table()),
        ]
    )


def host_table() -> list[str]:
    """Tabulate what public calls cost the host, beside their launches and torch's own ops."""
    from benchmarks import bench_host_cost

    data = json.loads(bench_host_cost.RESULT.read_text())
    machine = data["machine"]
    return [
        "## What a call costs the host",
        "",
        f"({machine['processor']}, Python {machine['python']}, torch {machine['torch']}, Triton "
        f"{machine['triton']}, commit {data['commit']}.) Public calls on small operands, over a "
        "driver that launches nothing: their checks, allocations and launches, but no time of a "
        "GPU. Beside them stand the launches alone, with their number, and torch's own op on a "
        "CPU, which also computes, in float32. Products within fastformer's calls are torch's "
        "own, and are computed, in bfloat16. Each time is the least of "
        f"{data['rounds']} rounds that are run in turn; in brackets, it is divided by the time of "
        f"`torch.empty_like`. `{data['command']}` measures it.",
        "",
        *bench_host_cost.lines(data),
    ]


def cpu_table() -> list[str]:
    """Tabulate the times on a CPU beside those of the peers."""
    from benchmarks import cpu

    data = json.loads(cpu.RESULT.read_text())
    machine = data["machine"]
    return [
        "## One CPU thread",
        "",
        f"({machine['processor']}, torch {machine['torch']}). Each row is the "
        f"median of {data['rounds']} rounds, in which fastformer and its peer take turns in one "
        "process; the ratio is the peer's time divided by fastformer's: above 1, fastformer is "
        "faster. `python -m benchmarks.cpu --write` measures it.",
        "",
        *cpu.lines(data),
    ]


def accuracy_table() -> list[str]:
    """Tabulate the largest relative error of the kernels and of eager PyTorch for each op."""
    with (RESULTS / "accuracy.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["condition"] == "benign"]
    dtypes = ("float32", "float16", "bfloat16")
    lines = [
        "## Accuracy",
        "",
        "Each cell holds the largest relative error against float64, over the output "
        "and every gradient: of the kernels / of the formula in eager PyTorch, in the same dtype. "
        "benchmarks/results/accuracy.csv lists every case.",
        "",
    ]
    found = []
    for op in dict.fromkeys(row["op"] for row in rows):
        cells = []
        for dtype in dtypes:
            mine = [row for row in rows if (row["op"], row["dtype"]) == (op, dtype)]
            worst = (
                max(float(row["error"]) for row in mine if row["provider"] == provider)
                for provider in ("triton", "eager")
            )
            cells.append(" / ".join(f"{error:.1e}" for error in worst))
        found.append([f"`{op}`", *cells])
    return lines + markdown_table(["op", *dtypes], found)


def compile_table() -> list[str]:
    """Tabulate what the compiler makes of the shipped configurations for each architecture."""
    from benchmarks.proof.cases import Table

    lines = [
        "## Compiled code",
        "",
        "The shipped configurations are compiled ahead of time: all of them for "
        "sm_90, and a selection for the other architectures. A kernel spills when its values do "
        "not fit the registers and the compiler moves some of them to slow local memory; the "
        "fourth column is the largest spill of a kernel, in bytes per thread, loads and stores "
        "together. The tensor-core instructions of Hopper (wgmma) do not overlap where the "
        "compiler serialises them. `other` stands for GPUs without a configuration of their own. "
        "`python -m benchmarks.proof.compile_gate` lists every kernel.",
        "",
    ]
    header = ["architecture", "kernels", "kernels that spill", "largest spill"]
    found = []
    for name, mine in Table.read().spills().items():
        spills = [spill for spill, _ in mine.values() if spill]
        serialised = sum(names != "-" for _, names in mine.values())
        found.append([name, len(mine), len(spills), max(spills, default=0), serialised])
    return lines + markdown_table([*header, "kernels with serialised wgmma"], found)


def mutation_table() -> list[str]:
    """Tabulate how many of the planted bugs the tests see."""
    from benchmarks.proof import mutation

    results, rows, slow, commits = mutation.read(), [], [], set()
    for table, verdicts in results.items():
        counts = Counter(v["verdict"] for v in verdicts.values())
        alone = sum(len(v["tests"]) == 1 for v in verdicts.values())
        rows.append([table, len(verdicts), *(counts[x] for x in mutation.VERDICTS), alone])
        names = [name for name, v in verdicts.items() if v["verdict"] == "seen with --all"]
        slow += [f"- {table}: {'; '.join(names)}"] if names else []
        commits |= {v["commit"] for v in verdicts.values()}
    return [
        "## Planted bugs",
        "",
        "`python -m benchmarks.proof.mutation` plants them, one at a time. A bug is seen if a",
        "test fails that `pytest` runs, or one that `pytest --all` adds. The last column counts",
        "those that one function sees, as far as it looked for others. It ran at these commits:",
        f"{', '.join(sorted(commits))}.",
        "",
        *markdown_table(["table", "bugs", *mutation.VERDICTS, "by one function"], rows),
        *(["", "Seen with --all, by no default test that was tried:", "", *slow] if slow else []),
    ]


def speed_block(results: Results) -> str:
    """Tabulate the speed of the kernels on a GPU, or say that it was not measured."""
    results = replace(results, rows=[row for row in results.rows if measured(row)])
    lines = _ratios(results, ".")
    if not lines:
        return UNMEASURED
    lines += [f"Measured on {place}." for place in dict.fromkeys(map(machine, results.rows))]
    lines += [f"Ceilings in {text}." for text in rooflines(results.rows)]
    lines += [f"**Failed in this run**: `{test}`." for test in results.failed]
    family = headline_family(results)
    return "\n".join([f"![{family[0]}]({PICTURE})", "", *lines] if family else lines)


def _ratios(results: Results, matching: str) -> list[str]:
    """Tabulate our work, if its name matches, beside the best peer."""
    rows = [
        (name, ", ".join(map(str, found)))
        for name, found in compared(results).items()
        if re.search(matching, name)
    ]
    return [*markdown_table(["work", LEGEND_OF_RATIOS], rows), ""] if rows else []


def status_block(results: Results) -> str:
    """README's status: the steps and the forwards with gradients beside the best peer, or that
    nothing was measured.
    """
    results = replace(results, rows=[row for row in results.rows if measured(row)])
    rows = _ratios(results, "^(?!public|Gluon).*(backward|training)")
    if not rows:
        return (
            "**Status.** Speed on a GPU is **not measured** yet; with an H100 or H200, "
            "[one command](docs/first_run.md) measures it in six minutes. Until then, use\n"
            "fastformer for its features, not for its speed."
        )
    places = "; ".join(dict.fromkeys(map(machine, results.rows)))
    lines = [
        f"**Status.** Measured on {places} ([all figures](docs/evidence.md)).",
        "",
    ]
    return "\n".join([*lines, *rows]).rstrip()


def measured(row: Row) -> bool:
    """Whether the row was measured on a real GPU."""
    return row.get("gpu") not in (None, STAND_IN)


def headline_family(results: Results) -> tuple[str, list[Row]] | None:
    """Return the family that docs/evidence.md draws: the first one measured at several lengths."""
    for family, rows in results.families().items():
        lengths = {row["length"] for row in rows if measured(row)}
        if len(lengths) > 1 and any(row["backend"] == "triton" for row in rows):
            return family, rows
    return None


def with_figures(text: str, block: str) -> str:
    """Return the page with the block between its marks. Raises ValueError if it has none."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"the page has no block {START} ... {END}")
    return f"{before}{START}\n{block}\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "results", nargs="*", type=Path, help=f"JSON files; the default is {RESULTS.name}/gpu*.json"
    )
    add("--out", type=folder, help="the folder for report.md and the plots")
    add("--evidence", action="store_true", help="write what is made of benchmarks/results")
    options = parser.parse_args(argv)
    if not (options.out or options.evidence):
        parser.error("nothing to do: give --out FOLDER or --evidence")
    paths = options.results or sorted(RESULTS.glob("gpu*.json"))
    if missing := [str(path) for path in paths if not path.is_file()]:
        parser.error(f"no such file: {', '.join(missing)}")
    try:
        results = load(*paths)
    except (ValueError, AttributeError, KeyError) as error:
        parser.error(f"no results of a benchmark in {', '.join(map(str, paths))}: {error}")
    if options.out:
        if not results.rows:
            parser.error("there are no figures in " + (", ".join(map(str, paths)) or str(RESULTS)))
        for path in write(results, options.out):
            print(f"Wrote {path}")
        if not importlib.util.find_spec("matplotlib"):
            print("Without plots: matplotlib is not installed")
    if options.evidence:
        for path, text in evidence(paths).items():
            path.write_text(text)
            print(f"Wrote {path}")
        if family := headline_family(results):
            path = ROOT / "docs" / PICTURE
            path.parent.mkdir(parents=True, exist_ok=True)
            draw(*family).savefig(path, dpi=100)


def evidence(paths: Sequence[Path]) -> dict[Path, str]:
    """Return the files that are made of these results, with their texts."""
    page, readme, results = ROOT / "docs" / "evidence.md", ROOT / "README.md", load(*paths)
    return {
        page: with_figures(page.read_text(), evidence_block(results)),
        readme: with_figures(readme.read_text(), status_block(results)),
    }


if __name__ == "__main__":
    main()
