"""Everything that a GPU has to show, in minutes: correctness first, then the figures that matter
most.

    python -m benchmarks.gpu --minutes 9 --out FOLDER
    python -m benchmarks.gpu --minutes 9 --out FOLDER --only correctness,attention

Each part is a process of its own with a time limit: one that crashes, hangs or loses the GPU costs
the test it was at, and the next parts nothing. FOLDER holds, from the first part on, for each part
a log and a journal (a JSON line for each test, written as it ends), and results.json and report.md,
written anew after each part: a run that is cut keeps what it has, and the same command goes on
behind it. Exit status 1 where a part or a test failed. Without a GPU a small run of the same kind
takes its place.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import folder, journal, report
from benchmarks.journal import DEVICE_LOST

ROOT = Path(__file__).resolve().parents[1]
LEAST_SECONDS = 5.0  # a part is not begun with less
POLL_SECONDS = 0.2
FINE = ("done", "no time", "no more time")  # the last two: for the whole of it


@dataclass(frozen=True)
class Part:
    """A command with its time limit, and how long it may go without a sign of life.

    FOLDER in a word of the command stands for the output folder. One with a journal is run again
    after a crash, and goes on behind the test that crashed.
    """

    name: str
    command: Sequence[str]
    seconds: float
    silence: float = 60.0
    journal: bool = False


def tests(name: str, seconds: float, paths: str, matching: str = "", *options: str) -> Part:
    command = [sys.executable, "-m", "pytest", "-v", "-p", "benchmarks.journal"]
    command += ["-p", "no:cacheprovider", "--matching", matching, *options, *paths.split()]
    return Part(name, command, seconds, journal=True)


def figures(name: str, seconds: float, stems: str, matching: str = "", *options: str) -> Part:
    paths = " ".join(f"benchmarks/bench_{stem}.py" for stem in stems.split())
    return tests(name, seconds, paths, matching, "--benchmark-only", *options)


def having(*parameters: str) -> str:
    """A regex of the test ids that have, in any order, each of these parameters."""
    return "".join(rf"(?=.*[\[-]({one})[-\]])" for one in parameters)


COMMAND = [sys.executable, "-m", "fastformer"]
PEERS = r"torch|cudnn|compile|liger|quack|flash-attn( 3)?|triton|packed|torch fused"
CASES = r"plain-d\d+|causal-d\d+|padding\+dropout-d64"
MORE_CASES = r"padding-d64|bias-d64|padding\+dropout\+bias-d64|window-d64"
KERNELS = "attention padding dropout layer_norm feed_forward embedding cross_entropy"


def on_gpu() -> list[Part]:
    """What matters most comes first."""
    workers = ["-n", "8"] if importlib.util.find_spec("xdist") else []
    kernel_tests = " ".join(f"tests/test_{name}.py" for name in KERNELS.split())
    widths, copy_task = "(add|widths).*", ["copy-task", "--json", "FOLDER/copy_task.json"]
    return [
        Part("machine", [*COMMAND, "info"], 40),
        tests("correctness", 130, "tests/test_sizes.py"),
        figures("attention", 120, "attention", having("1024|4096|16384", CASES, PEERS)),
        figures("norms", 90, "layer_norm", widths + having("512|4096", PEERS)),
        figures("loss", 60, "cross_entropy", "linear.*" + having("32768", PEERS)),
        figures(
            "feed-forward", 60, "feed_forward", having("256|8192", "512-2048|1024-4096", PEERS)
        ),
        figures("model", 60, "transformer", having("512|2048", r"torch|nn\..*|auto")),
        figures("drop-in", 60, "accelerate transformers", having("512", r"torch|auto")),
        Part("copy-task", [*COMMAND, *copy_task], 60),
        figures("first-call", 70, "first_call host_cost"),
        figures("sequence-layers", 45, "sequence_layers"),
        figures("more-attention", 90, "attention", having("512|4096", MORE_CASES, PEERS)),
        figures("compiled-model", 120, "transformer", having("512", "torch|compile|auto")),
        figures("embedding", 30, "embedding", having("512|4096")),
        tests("kernel-tests", 600, kernel_tests, "", *workers),
    ]


def on_cpu() -> list[Part]:
    return [
        Part("machine", [*COMMAND, "info"], 40),
        tests("correctness", 60, "tests/test_sizes.py", "norms|plain"),
        figures("norms", 60, "layer_norm", "lengths.*" + having("128", "torch|reference")),
        figures("sequence-layers", 60, "sequence_layers", having("forward", "128|256|512")),
    ]


# ------------------------------------------------------------------------------------ running them


def run(parts: Sequence[Part], folder: Path, seconds: float) -> dict[str, Any]:
    """Runs the parts in turn until the time is up; returns what results.json holds."""
    deadline = time.monotonic() + seconds
    folder.mkdir(parents=True, exist_ok=True)
    done: list[dict[str, Any]] = []
    results = save(folder, done)
    for part in parts:
        left = deadline - time.monotonic()
        started = time.monotonic()
        status = _run(part, folder, min(part.seconds, left)) if left > LEAST_SECONDS else "no time"
        if status == "out of time" and left < part.seconds:
            status = "no more time"
            _forget_the_last(folder / f"{part.name}.jsonl")
        took = time.monotonic() - started
        done.append({"part": part.name, "status": status, "seconds": round(took, 1)})
        print(f"{part.name:16} {status:24} {took:6.1f} s", flush=True)
        results = save(folder, done)
    return results


def _run(part: Part, folder: Path, seconds: float) -> str:
    """done, failed, or how it was cut short."""
    end = time.monotonic() + seconds
    written, log = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
    command = [word.replace("FOLDER", str(folder.resolve())) for word in part.command]
    if part.journal:
        command += ["--journal", str(written.resolve())]
    while True:
        size = _size(written)
        status = _run_once(command, log, written, end, part.silence)
        again = status.startswith(("crashed", "silent")) and part.journal
        if not (again and _size(written) > size and end - time.monotonic() > LEAST_SECONDS):
            return status
        with log.open("a") as file:
            print(f"\n=== {status}: again, behind that test\n", file=file)


def _run_once(command: list[str], log: Path, written: Path, end: float, silence: float) -> str:
    # Nothing measures in a process that xdist started, nor in what that starts.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={**environment, "PYTHONUNBUFFERED": "1"}, preexec_fn=os.setpgrp,
        )  # fmt: skip
    try:
        sizes, heard = (0, 0), time.monotonic()
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            now, new = time.monotonic(), (_size(log), _size(written))
            if new != sizes:
                sizes, heard = new, now
            if now > end:
                return "out of time"
            if now - heard > silence:
                return f"silent for {silence:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    code = process.returncode
    if code < 0 or code == DEVICE_LOST or code > 128:
        return "crashed, GPU lost" if code == DEVICE_LOST else f"crashed ({code})"
    return "done" if code in (0, 5) else f"failed ({code})"  # 5: every test was done before


def _forget_the_last(path: Path) -> None:
    """The test that was running when the time was up: the same command begins it again."""
    begun = [event["begun"] for event in journal.read(path) if "begun" in event]
    ended = {event["test"] for event in journal.read(path) if "test" in event}
    if begun and begun[-1] not in ended:
        with path.open("a") as file:
            print("\n" + json.dumps({"cut": begun[-1]}), file=file)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def save(folder: Path, done: list[dict[str, Any]]) -> dict[str, Any]:
    """results.json and report.md, of all journals that there are."""
    results = report.load(*sorted(folder.glob("*.jsonl")))
    data = {"parts": done, **asdict(results)}
    _write(folder / "results.json", json.dumps(data, indent=1) + "\n")
    if results.rows:
        cut = [f"- {p['part']}: {p['status']}\n" for p in done if p["status"] != "done"]
        text = report.markdown(results) + "\n## Parts that were not done\n\n" * bool(cut)
        _write(folder / "report.md", text + "".join(cut))
    return data


def _write(path: Path, text: str) -> None:
    """In one step: a run that is killed leaves the former file or the new one."""
    whole = path.with_name(path.name + ".tmp")
    whole.write_text(text)
    whole.replace(path)


def summary(data: dict[str, Any]) -> list[str]:
    results = report.Results(data["rows"], data["absent"], data["failed"])
    lines = [f"{'group':66}" + "".join(f"{name:>9}" for name in report.COLUMNS)]
    for group, rows in results.groups().items():
        for row, (_, cells) in zip(rows, report.table(rows)):
            if row["backend"] == "triton" or not row.get("gpu"):
                name = f"{group}, {row['provider']}"
                lines.append(f"{name[:66]:66}" + "".join(f"{cell:>9}" for cell in cells))
    lines += map(str, report.growth(results))
    lines += [f"roof in {roof}" for roof in report.roofs(results.rows)]
    lines += [f"absent: {', '.join(results.absent) or 'nothing'}"]
    lines += [f"FAILED {test}: {why.splitlines()[0]}" for test, why in results.failed.items()]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="for all of it")
    parser.add_argument("--out", type=folder, required=True, metavar="FOLDER")
    parser.add_argument("--only", help="names of parts, with commas between")
    parser.add_argument("--dry-run", action="store_true", help="the small run, also with a GPU")
    options = parser.parse_args(argv)
    if not options.minutes > 0:
        parser.error(f"minutes is {options.minutes:g}; expected more than 0")

    import torch

    parts = on_gpu()
    if options.dry_run or not torch.cuda.is_available():
        print("A dry run" if options.dry_run else "There is no GPU: a small run on the CPU instead")
        parts = on_cpu()
    if options.only:
        known = {part.name: part for part in parts}
        chosen = options.only.split(",")
        if unknown := set(chosen) - set(known):
            parser.error(f"no part {', '.join(unknown)}; there are {', '.join(known)}")
        parts = [known[name] for name in chosen]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the part that runs as well
    data = run(parts, options.out, 60 * options.minutes)
    print("\n".join(summary(data)))
    print(f"Wrote {options.out / 'results.json'}")
    failed = data["failed"] or any(p["status"] not in FINE for p in data["parts"])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
