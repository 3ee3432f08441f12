"""Runs everything that matters on a GPU, in minutes: correctness first, then the most important
figures.

    python -m benchmarks.gpu --out FOLDER --only first           nine minutes: what matters most
    python -m benchmarks.gpu --out FOLDER --only tune            what is fastest on this GPU
    python -m benchmarks.gpu --out FOLDER --only tests           the tests of the kernels
    python -m benchmarks.gpu --out FOLDER --only rest            everything else
    python -m benchmarks.gpu --prepare KERNELS                   compiles beforehand, without a GPU
    python -m benchmarks.gpu --out FOLDER --kernels KERNELS      uses these compiled kernels

Each part is a process of its own with a time limit. If one crashes, hangs or loses the GPU, only
the test that was running is lost, and the next parts run. FOLDER holds a log and a journal (a JSON
line for each test) of each part, and results.json and report.md, which are made of the journals
after each part. The same command resumes a run that was interrupted. The exit status is 1 if a part
or a test failed.

KERNELS is a folder with Triton's cache. --prepare runs the same parts over benchmarks/gpu/stand_in,
which launches nothing. The cache fits one version of Triton, one version of Python and one
architecture; Triton compiles anew what it does not find.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks import ROOT, folder, report
from benchmarks.gpu import journal, stand_in
from benchmarks.gpu.journal import DEVICE_LOST
from benchmarks.gpu.stand_in import device
from benchmarks.proof import versions

LEAST_SECONDS = 5.0  # a part is not started with less
POLL_SECONDS = 0.2
ENDED = ("done", "failed (1)")  # is not started again
FINE = ("done", "no time", "no more time")  # the last two: the time of the run was up
STATUS = "parts.json"

Variables = Mapping[str, str]  # environment variables
NONE: Variables = MappingProxyType({})


@dataclass(frozen=True)
class Part:
    """A command with its time limit, and how long it may go without a sign of life.

    FOLDER in a word of the command is replaced by the folder of the run. A part with a journal runs
    again after a crash, and continues after the test that crashed. `processes` share its tests.
    """

    name: str
    command: Sequence[str]
    seconds: float
    silence: float = 60.0
    journal: bool = False
    processes: int = 1

    def shards(self) -> list[Part]:
        """Return a part for each process, with its share of the tests, a journal and a log."""
        if self.processes == 1:
            return [self]
        return [
            replace(
                self,
                name=f"{self.name}-{i}",
                command=[*self.command, "--shard", f"{i}/{self.processes}"],
                processes=1,
            )
            for i in range(self.processes)
        ]


def tests(
    name: str, seconds: float, paths: str, matching: str = "", *options: str, **more: Any
) -> Part:
    command = [sys.executable, "-m", "pytest", "--gpu", "-v", "-p", "benchmarks.gpu.journal"]
    command += ["-p", "no:cacheprovider", "--matching", matching, *options, *paths.split()]
    return Part(name, command, seconds, journal=True, **more)


def figures(
    name: str, seconds: float, stems: str, matching: str = "", *options: str, **more: Any
) -> Part:
    paths = " ".join(f"benchmarks/bench_{stem}.py" for stem in stems.split())
    return tests(name, seconds, paths, matching, "--all", "--benchmark-only", *options, **more)


def having(*parameters: str) -> str:
    """Return a regex for the test ids that have all of these parameters, in any order."""
    return "".join(rf"(?=.*[\[-]({one})[-\]])" for one in parameters)


COMMAND = [sys.executable, "-m", "fastformer"]
PEERS = r"torch|cudnn|flash|efficient|compile|liger|quack|flash-attn( 3)?|triton|packed|torch fused"
CASES = r"plain-d\d+|causal-d\d+|padding\+dropout-d64"
EPOCH = "torch|auto|cuda_graph"
ON_CACHES = r"torch|cudnn|flash|efficient|flash-attn( 3)?|triton|paged|read"
MORE_CASES = r"padding-d64|bias-d64|padding\+dropout\+bias-d64|window-d64"
FLEX_CASES = "plain-d64|causal-d64|padding-d64"
SMALL = r"attention\[.*-(16|32)\]"  # dimensions of a head


def on_gpu() -> dict[str, list[Part]]:
    """Return the parts by group, the most important first. A group fits into ten minutes."""
    losses = having("32768", "linear_(cross_entropy|kl_div)", PEERS)
    norms = having("512|4096", "(dropout_add_)?layer_norm", PEERS)
    copy_task = ["copy-task", "--json", "FOLDER/copy_task.json"]
    compiles = dict(silence=150.0)
    first = [
        Part("machine", [*COMMAND, "info"], 40),
        tests("small-heads", 60, "tests/ops/test_sizes.py", SMALL, "--all"),
        tests("correctness", 130, "tests/ops/test_sizes.py", f"^(?!.*{SMALL})", "--all"),
        figures("attention", 90, "attention", having("4096", CASES, PEERS)),
        figures("epoch", 80, "transformer", "epoch.*" + having("128|256|512", EPOCH)),
        figures(
            "flex", 60, "attention", having("4096", "(plain|causal)-d128", "flex"), "--slow",
            **compiles,
        ),
        figures("lengths", 90, "attention", having("1024|16384", CASES, PEERS)),
        figures("decode", 60, "decode", having("256MB|4096MB", "B1|B64", "4heads", ON_CACHES)),
        figures("loss", 60, "cross_entropy", losses),
        figures("norms", 110, "layer_norm", "widths.*" + norms),
        figures(
            "model", 60, "transformer", "^(?!.*epoch)" + having("512|2048", "torch|auto")
        ),
    ]  # fmt: skip
    rest = [
        figures(
            "feed-forward", 80, "feed_forward", having("256|8192", "512-2048|1024-4096", PEERS)
        ),
        figures("drop-in", 60, "accelerate transformers", having("512", r"torch|auto")),
        Part("copy-task", [*COMMAND, *copy_task], 60),
        figures("first-call", 120, "first_call host_cost", **compiles),
        figures("more-attention", 90, "attention", having("512|4096", MORE_CASES, PEERS)),
        figures(
            "more-flex", 90, "attention", having("4096", FLEX_CASES, "flex"), "--slow", **compiles
        ),
        figures(
            "more-decode", 90, "decode", having("16MB|1024MB", "B1|B8", "(1|16)heads", ON_CACHES)
        ),
        figures(
            "flex-decode", 60, "decode", having("256MB|1024MB", "B1|B64", "4heads", "flex"),
            "--slow", **compiles,
        ),
        figures("generation", 120, "decode", "generation.*" + having("64|256|1024|4096")),
        figures("compiled-model", 150, "transformer", having("512", "compile"), **compiles),
        figures(
            "compiled-epoch", 150, "transformer", "epoch.*" + having("128|256", "compile"),
            **compiles,
        ),
        figures("embedding", 30, "embedding", having("512|4096")),
        figures("batch-invariance", 60, "batch_invariance"),
    ]  # fmt: skip
    attention = r"^scaled_dot_product_attention bfloat16 .* backward$"
    gluon = [*COMMAND, "tune", "--minutes", "4", "--out", "FOLDER/gluon.json"]
    gluon += ["--only", attention, "--candidates", "@|torch"]
    tune = [*COMMAND, "tune", "--minutes", "5", "--out", "FOLDER/tuning.json"]
    return {
        "first": first,
        "tune": [  # a candidate may be silent for 180 s
            Part("gluon", gluon, 260, silence=200.0),  # these may hang, and no GPU has run them
            Part("tune", tune, 330, silence=200.0),
        ],
        "tests": [tests("kernel-tests", 560, "tests", processes=8)],
        "rest": rest,
    }


def chosen(groups: dict[str, list[Part]], only: str | None) -> list[Part]:
    """Return all parts, or those of these names and groups; ValueError if one is unknown."""
    known = {part.name: [part] for parts in groups.values() for part in parts} | groups
    names = only.split(",") if only else list(groups)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no part {', '.join(unknown)}; there are {', '.join(known)}")
    return list({part.name: part for name in names for part in known[name]}.values())


# ------------------------------------------------------------------------------------ running them


class Run:
    """A run with its results in the folder `out`, which goes on with what it finds there. Its
    processes inherit the environment variables of this one, and `environment`.
    """

    def __init__(self, out: Path, environment: Variables = NONE) -> None:
        self.out = out
        # pytest-benchmark measures nothing in a process that inherits the variables of xdist.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
        self.environment = {**inherited, **environment, "PYTHONUNBUFFERED": "1"}
        # {part, status, seconds} by name.
        self.done: dict[str, dict[str, Any]] = {}
        if (out / STATUS).exists():
            self.done = {one["part"]: one for one in json.loads((out / STATUS).read_text())}
        for one in self.done.values():
            if one["status"] == "running":  # when the previous run was killed
                one["status"] = "cut"
                for path in out.glob(f"{one['part']}*.jsonl"):
                    _forget_the_last(path)

    def go(self, parts: Sequence[Part], seconds: float) -> None:
        """Run the unfinished parts in turn, until the time is up."""
        deadline = time.monotonic() + seconds
        for part in parts:
            left, started = deadline - time.monotonic(), time.monotonic()
            one = self.done.setdefault(part.name, dict(part=part.name, status="no time", seconds=0))
            if one["status"] in ENDED or left < LEAST_SECONDS:
                print(f"{part.name:16} {one['status']:24}", flush=True)
                continue
            before, one["status"], status = one["seconds"], "running", "cut"
            shards = part.shards()
            self.save()
            try:
                status = self.run(shards, min(part.seconds, left))
                if status == "out of time" and left < part.seconds:
                    status = "no more time"
            finally:
                if status in ("cut", "no more time"):
                    for shard in shards:
                        _forget_the_last(self.out / f"{shard.name}.jsonl")
                took = time.monotonic() - started
                one.update(status=status, seconds=round(before + took, 1))
                self.save()
            print(f"{part.name:16} {status:24} {took:6.1f} s", flush=True)

    def run(self, shards: Sequence[Part], seconds: float) -> str:
        """Return done, failed, or why the part was interrupted: the worst of its processes."""
        end, stop = time.monotonic() + seconds, threading.Event()
        with ThreadPoolExecutor(len(shards)) as pool:
            try:
                found = list(pool.map(lambda shard: self.follow(shard, end, stop), shards))
            finally:
                stop.set()
        return max(found, key=lambda status: (status not in ENDED, status != "done"))

    def follow(self, part: Part, end: float, stop: threading.Event) -> str:
        """Return done, failed, or why the process was interrupted."""
        written, log = (self.out / f"{part.name}.{kind}" for kind in ("jsonl", "log"))
        command = [word.replace("FOLDER", str(self.out.resolve())) for word in part.command]
        if part.journal:
            command += ["--journal", str(written.resolve())]
        while True:
            size = _size(written)
            status = self.follow_once(command, (log, written), end, part.silence, stop)
            again = status.startswith(("crashed", "silent")) and part.journal
            if not (again and _size(written) > size and end - time.monotonic() > LEAST_SECONDS):
                return status
            with log.open("a") as file:
                print(f"\n=== {status}: continues after that test\n", file=file)

    def follow_once(
        self, command: list[str], signs: tuple[Path, Path], end: float, silence: float,
        stop: threading.Event,
    ) -> str:  # fmt: skip
        with signs[0].open("ab") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=self.environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            sizes, heard = tuple(map(_size, signs)), time.monotonic()
            while process.poll() is None:
                if stop.wait(POLL_SECONDS):
                    return "cut"
                now, new = time.monotonic(), tuple(map(_size, signs))
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
        return "done" if code in (0, 5) else f"failed ({code})"  # 5: no test was left

    def save(self) -> dict[str, Any]:
        """Write results.json and report.md of the results so far."""
        results = report.load(*sorted(self.out.glob("*.jsonl")))
        parts = list(self.done.values())
        data = {"parts": parts, **asdict(results)}
        _write(self.out / STATUS, json.dumps(parts, indent=1) + "\n")
        _write(self.out / "results.json", json.dumps(data, indent=1) + "\n")
        if results.rows:
            cut = [
                f"- {one['part']}: {one['status']}\n" for one in parts if one["status"] != "done"
            ]
            text = report.markdown(results) + "\n## Parts that were not done\n\n" * bool(cut)
            _write(self.out / "report.md", text + "".join(cut))
        return data


def _forget_the_last(path: Path) -> None:
    """Let the test that was running when the time was up run again."""
    begun = [event["begun"] for event in journal.read(path) if "begun" in event]
    ended = {event["test"] for event in journal.read(path) if "test" in event}
    if begun and begun[-1] not in ended:
        with path.open("a") as file:
            print("\n" + json.dumps({"cut": begun[-1]}), file=file)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _write(path: Path, text: str) -> None:
    """Replace the file in one step: a killed run leaves the previous file or the new one."""
    whole = path.with_name(path.name + ".tmp")
    whole.write_text(text)
    whole.replace(path)


# -------------------------------------------------------------------------------- compiled kernels


def cache(folder: Path) -> dict[str, str]:
    """Return the variables of processes whose Triton keeps its kernels in the folder. Its groups of
    files name them by their paths, which are others where the folder was copied to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for group in folder.glob("*/__grp__*.json"):
        names = json.loads(group.read_text())["child_paths"]
        paths = {name: str(group.resolve().with_name(name)) for name in names}
        group.write_text(json.dumps({"child_paths": paths}))
    return {"TRITON_CACHE_DIR": str(folder.resolve())}


def prepare(folder: Path, parts: Sequence[Part], version: str | None) -> int:
    """Compile the kernels of the parts, without a GPU. Return 1 if a part does not finish."""
    if reason := stand_in.obstacle():
        raise ValueError(f"kernels cannot be prepared here without a GPU: {reason}")
    with tempfile.TemporaryDirectory(prefix="fastformer-") as base:
        environment = device.environment(Path(base), versions.install(version) if version else None)
        environment["TRITON_STORE_BINARY_ONLY"] = "1"  # a fifth of the bytes, and all that is read
        run = Run(Path(base), {**environment, **cache(folder)})
        run.go([_once(part) for part in parts if part.journal], 1e6)
        data = run.save()
    for test in data["failed"]:
        print(f"needs results, or fails: {test}")  # nothing is computed here
    print(f"{folder} holds {len(list(folder.glob('*/__grp__*.json')))} kernels")
    return 0 if all(one["status"] in ENDED for one in data["parts"]) else 1


def _once(part: Part) -> Part:
    """Return the part with each call made once and not timed."""
    command = [word.replace("--benchmark-only", "--benchmark-disable") for word in part.command]
    return replace(part, command=command, seconds=1e6, silence=600.0, processes=1)


def _status(data: dict[str, Any]) -> int:
    """Return 1 if a part or a test failed."""
    failed = data["failed"] or any(part["status"] not in FINE for part in data["parts"])
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=folder, metavar="FOLDER", help="the folder for the results")
    add("--minutes", type=float, default=9.0, help="the limit of the whole run")
    add("--only", metavar="NAMES", help="parts and groups of parts, separated by commas")
    add("--kernels", type=folder, metavar="FOLDER", help="Triton's cache, used and added to")
    add("--prepare", type=folder, metavar="FOLDER", help="only compile, into this cache")
    add("--triton", metavar="VERSION", help="with --prepare: compile with this Triton")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if not options.minutes > 0:
        parser.error(f"minutes is {options.minutes:g}; expected more than 0")
    if (options.out is None) == (options.prepare is None):
        parser.error("give --out FOLDER, or --prepare FOLDER")
    if options.triton and not options.prepare:
        parser.error("--triton is an option of --prepare")
    try:
        if options.prepare:
            return prepare(options.prepare, chosen(on_gpu(), options.only), options.triton)
        return _measure(options)
    except ValueError as error:
        parser.error(str(error))


def _measure(options: argparse.Namespace) -> int:
    import torch

    parts = chosen(on_gpu(), options.only)
    if not torch.cuda.is_available():
        raise ValueError("there is no GPU; `pytest --benchmark-only` measures on a CPU")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the running part
    run = Run(options.out, cache(options.kernels) if options.kernels else NONE)
    run.go(parts, 60 * options.minutes)
    data = run.save()
    results = report.Results(data["rows"], data["absent"], data["failed"])
    print("\n".join(report.text(results, ours=True)))
    print(f"Wrote {options.out / 'results.json'}")
    return _status(data)
