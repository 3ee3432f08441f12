"""Runs what matters on a GPU, in minutes: correctness first, then the most important figures.

    python -m benchmarks.gpu --out FOLDER --headline             six minutes: what matters most
    python -m benchmarks.gpu --out FOLDER --only tune            what is fastest on this GPU
    python -m benchmarks.gpu --out FOLDER --only tests           the tests of the kernels
    python -m benchmarks.gpu --out FOLDER --only rest            everything else

Each part has a time limit, and consists of one process or several. If one crashes, hangs or loses
the GPU, only the test that was running is lost, and the others go on; a kernel in Gluon that hangs
is not tried again. FOLDER holds results.json and
report.md, which are written every few seconds, and in `parts` a log and a journal of each process
(a JSON line for each event of a test). The same command resumes a run that was interrupted. The
exit status is 1 if a part or a test failed.

The headline compiles its kernels first, in one process for each core, with a stand-in for the CUDA
driver (benchmarks/gpu/stand_in), so that nothing runs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import ROOT, folder, report
from benchmarks.gpu import journal
from benchmarks.gpu.journal import DEVICE_LOST
from benchmarks.gpu.stand_in import device

LEAST_SECONDS = 5.0  # a part is not started with less
POLL_SECONDS, SAVE_SECONDS = 0.2, 5.0
ENDED = ("done", "failed (1)")  # is not started again
FINE = "done", "left out", "no time", "no more time"  # the last two: of the run
RESULTS = "results.json"
CORES = os.cpu_count() or 1

PYTEST = [sys.executable, "-m", "pytest", "--gpu", "-v", "-p", "no:cacheprovider"]
PYTEST += ["-p", "benchmarks.gpu.journal"]


@dataclass(frozen=True)
class Part:
    """A command with its time limit, and how long it may go without a sign of life.

    FOLDER in a word of the command is replaced by the folder of the run. After a crash or a hang, a
    part with a journal runs again from the next test on, unless `again` is False. A part may
    consist of other `parts`, which run side by side or, `in_turn`, one after another; each has its
    own time limit, and the whole part has one, too. A part with `stand_in` compiles kernels: its
    processes have the stand-in driver in place of CUDA's.
    """

    name: str
    command: Sequence[str]
    seconds: float
    silence: float = 60.0
    journal: bool = False
    parts: tuple[Part, ...] = ()
    in_turn: bool = False
    stand_in: bool = False
    again: bool = True

    def split(self, options: Mapping[str, Sequence[str]], **more: Any) -> Part:
        """Return a part of parts that have this command with further options, by name."""
        parts = [
            replace(self, name=f"{self.name} {name}", command=[*self.command, *words])
            for name, words in options.items()
        ]
        return replace(self, parts=tuple(parts), **more)


def tests(
    name: str, seconds: float, paths: str, matching: str = "", *options: str, **more: Any
) -> Part:
    command = [*PYTEST, "--matching", matching, *options, *paths.split()]
    return Part(name, command, seconds, journal=True, **more)


def figures(
    name: str, seconds: float, stems: str, matching: str = "", *options: str, **more: Any
) -> Part:
    paths = " ".join(f"benchmarks/bench_{stem}.py" for stem in stems.split())
    return tests(name, seconds, paths, matching, "--all", "--benchmark-only", *options, **more)


def having(*parameters: str) -> str:
    """Return a regex for the test ids that have all of these parameters, in any order."""
    return "".join(rf"(?=.*[\[-]({one})[-\]])" for one in parameters)


def compiling(
    parts: Iterable[Part], processes: int, *options: str, only: str = "", **more: Any
) -> Part:
    """Return a part that runs each test of the parts once, without timing it, to compile kernels.
    Parts without a journal are left out; the others all have the option --all, or none has it.

    only: a regex of a parameter, in brackets in the ids of the tests; by default all tests.
    """
    tested = list(_tested(parts))
    command = [*PYTEST, "--benchmark-disable", "-n", str(processes), "--dist", "worksteal"]
    command += [*options, *["--all"] * ("--all" in tested[0].command)]
    found = (f"(?=^({'|'.join(_paths(x))}))(?=.*({_last(x, '--matching')}))" for x in tested)
    command += ["--matching", (having(only) if only else "") + f"({'|'.join(found)})"]
    command += dict.fromkeys(path for part in tested for path in _paths(part))
    return Part("prepare", command, **more)


def _tested(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield the processes of parts that have a journal, but what compiles."""
    for part in parts:
        if part.parts:
            yield from _tested(part.parts)
        elif part.journal and not part.stand_in:
            yield part


def _paths(part: Part) -> list[str]:
    return [word for word in part.command if word.startswith(("tests", "benchmarks/"))]


def _last(part: Part, option: str) -> str:
    *_, value = (y for x, y in zip(part.command, part.command[1:]) if x == option)
    return value


COMMAND = [sys.executable, "-m", "fastformer"]
PEERS = r"torch|cudnn|flash|efficient|varlen|compile|liger|quack|flash-attn( 3)?|triton|packed"
PEERS += "|torch fused"
EPOCH = "torch|auto|cuda_graph"
ON_CACHES = r"torch|cudnn|flash|efficient|flash-attn( 3)?|triton|read"
MORE_CASES = r"padding-d64|bias-d64|window-d64"
FLEX_CASES = "plain-d64|causal-d64|padding-d64"
COMPILED = "flex|compile|reduce-overhead"  # providers that torch.compile makes

# Of tests/ops/test_sizes.py: each of them is a process, and an illegal access ends only that one.
# Small heads are a family because of triton#10573.
ALL_OPTIONS = r"attention\[mask.*-(64|128|256)-"
FAMILIES = {
    "small heads": r"attention\[.*-(16|32)-",
    **{dtype: f"{ALL_OPTIONS}{dtype}" for dtype in ("float32", "float16", "bfloat16")},
    "options": r"attention\[(?!mask).*-(64|128|256)-",
    "caches": "packed|decoding",
    "norms": r"norms\[|rotary",
    "layers": r"feed_forward\[|gated|embed\[",
    "losses": r"losses\[",
}


def headline(processes: int = CORES) -> list[Part]:
    """Return the parts of six minutes, in the order of their importance. processes: how many
    compile.
    """
    trained = r"padding\+dropout(\+bias)?-d64"
    lengths = "128|256|512|1024|4096"
    rivals = "torch|cudnn|efficient|tutorial|triton"
    grouped = r"(plain|causal)-d\d+|causal grouped-d128"
    steps = having("training", "128|256|512", r"0\.25")
    sizes = tests("correctness", 60, "tests/ops/test_sizes.py", "", "--all", silence=25.0)
    correctness = sizes.split({name: ["--matching", one] for name, one in FAMILIES.items()})
    attention = having(r"forward\+backward", trained, lengths)
    bert, compiled = having("BERT-base", "128|512"), having("compile|reduce-overhead")
    rows = "widths.*" + having("512", "(dropout_add_)?layer_norm", PEERS)
    losses = "linear.*" + having("32768", "linear_cross_entropy", PEERS)
    gluon = figures("gluon", 40, "gluon", "", "--brief", silence=12.0, again=False)
    kernels = {name: ["--matching", having(name)] for name in ("forward", "dkdv", "dq")}
    brief = functools.partial(figures, silence=25.0)
    measured = [
        brief("attention", 40, "attention", attention + having(rivals), "--brief"),
        brief(
            "long", 45, "attention",
            having("1024|4096|16384", grouped, "cudnn|flash|triton"), "--brief",
        ),
        brief(
            "encoder", 30, "accelerate host_cost",
            f"public_call|{steps}{having('torch|auto|fastformer')}", "--brief",
        ),
        brief("bert", 20, "transformers", bert + having("torch|accelerate"), "--brief"),
        figures(
            "compiled", 45, "accelerate attention transformers",
            f"{steps}{compiled}|{attention}{having('flex')}|{bert}{compiled}", "--brief", "--slow",
        ),
        brief("rows", 25, "layer_norm cross_entropy", f"{rows}|{losses}", "--brief"),
        gluon.split(kernels, in_turn=True, seconds=50),
    ]  # fmt: skip
    every = [correctness, *measured]
    prepare = compiling(every, processes, seconds=40, journal=True, stand_in=True)
    checks = Part("checks", (), 100, parts=(prepare, correctness), in_turn=True)
    # torch.compile takes up to a minute for a model, and finds it in its caches the next time.
    peers = compiling(
        measured, min(6, processes), "--slow", only=COMPILED, seconds=95, silence=95.0
    )
    first = Part("first", (), 100, parts=(checks, replace(peers, name="peers")))
    return [first, *measured]


def on_gpu() -> dict[str, list[Part]]:
    """Return the parts by group, the most important first. A group fits into ten minutes, and
    `headline` into six.
    """
    rest = [
        ("epoch", 80, "transformer", "epoch.*" + having("128|256|512", EPOCH)),
        ("decode", 60, "decode", having("256MB|4096MB", "B1|B64", "4heads", ON_CACHES)),
        ("model", 60, "transformer", "^(?!.*epoch)" + having("512|2048", "torch|auto")),
        ("feed-forward", 80, "feed_forward", having("256|8192", "512-2048|1024-4096", PEERS)),
        ("wide-norms", 60, "layer_norm", "widths.*" + having("4096", ".*layer_norm", PEERS)),
        ("divergence", 30, "cross_entropy", having("32768", "linear_kl_div", PEERS)),
        ("drop-in", 60, "transformers", having("GPT-2", "512", "torch|auto")),
        ("any-model", 60, "accelerate", "any_model.*" + having("torch|accelerate")),
        ("any-model-compiled", 120, "accelerate", "any_model.*" + having("compile|fusing")),
        ("first-call", 120, "first_call"),
        ("more-attention", 90, "attention", having("512|4096", MORE_CASES, PEERS)),
        ("more-flex", 90, "attention", having("4096", FLEX_CASES, "flex"), "--slow"),
        ("more-decode", 90, "decode", having("16MB|1024MB", "B1|B8", "(1|16)heads", ON_CACHES)),
        ("flex-decode", 60, "decode", having("256MB", "B1|B64", "4heads", "flex"), "--slow"),
        ("generation", 120, "decode", "generation.*" + having("64|256|1024|4096")),
        ("compiled-model", 150, "transformer", having("512", "compile")),
        ("compiled-epoch", 150, "transformer", "epoch.*" + having("128|256", "compile")),
        ("embedding", 30, "embedding", having("512|4096")),
        ("batch-invariance", 60, "batch_invariance"),
    ]
    copy_task = [*COMMAND, "copy-task", "--json", "FOLDER/copy_task.json"]
    tune = [*COMMAND, "tune", "--minutes", "9", "--out", "FOLDER/tuning.json"]
    shards = {str(i): ["--shard", f"{i}/8"] for i in range(8)}
    return {
        "headline": headline(),
        "tune": [Part("tune", tune, 580, silence=580.0)],  # silent until a call is measured
        "tests": [tests("kernel-tests", 560, "tests").split(shards)],
        "rest": [
            *(figures(*row, silence=150.0) for row in rest),
            Part("copy-task", copy_task, 60),
        ],
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
    """A run with its results in the folder `out`, which goes on with what it finds there."""

    def __init__(self, out: Path) -> None:
        self.out, self.journals = out, out / "parts"
        self.journals.mkdir(exist_ok=True)
        # pytest-benchmark measures nothing in a process that inherits the variables of xdist.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
        self.environment = {**inherited, "PYTHONUNBUFFERED": "1"}
        # {part, status, seconds} by name.
        self.done: dict[str, dict[str, Any]] = {}
        self.saved, self.one_writer = time.monotonic(), threading.Lock()
        self.obstacle: str | None = None  # to kernels of the stand-in
        if (out / RESULTS).exists():
            parts = json.loads((out / RESULTS).read_text())["parts"]
            self.done = {one["part"]: one for one in parts}
        for one in self.done.values():
            if one["status"] == "running":  # when the previous run was killed
                one["status"] = "cut"
                self.forget_the_last(one)

    def go(self, parts: Sequence[Part], seconds: float) -> None:
        """Run the unfinished parts in turn, until the time is up."""
        self.deadline = time.monotonic() + seconds
        for part in parts:
            self.run(part, self.deadline, threading.Event())

    def run(self, part: Part, deadline: float, stop: threading.Event) -> str:
        """Run a part that is not finished, and return its status."""
        left, started = deadline - time.monotonic(), time.monotonic()
        one = self.done.setdefault(part.name, dict(part=part.name, status="no time", seconds=0))
        if one["status"] in ENDED or left < LEAST_SECONDS or stop.is_set():
            return _told(one)
        if part.stand_in:
            one["kernels"] = 0
            if reason := self.obstacle or self.no_stand_in():
                one["status"] = f"left out: {reason}"
                return _told(one)
        before, one["status"], status = one["seconds"], "running", "cut"
        self.save()
        end = started + min(part.seconds, left)
        try:
            status = self.run_all(part, end, stop) if part.parts else self.follow(part, end, stop)
            if status == "out of time" and time.monotonic() > self.deadline:
                status = "no more time"
        finally:
            took = before + time.monotonic() - started
            one.update(status=status, seconds=round(took, 1))
            if part.stand_in:
                one["kernels"] = device.kernels(self.driver)
            if status in ("cut", "no more time") or part.stand_in:
                self.forget_the_last(one)
            self.save()
        return _told(one)

    def run_all(self, part: Part, end: float, stop: threading.Event) -> str:
        """Run the parts of a part. Return the worst of their statuses."""
        with ThreadPoolExecutor(1 if part.in_turn else len(part.parts)) as pool:
            found = [pool.submit(self.run, one, end, stop) for one in part.parts]
            try:
                statuses = [one.result() for one in found]
            except BaseException:
                stop.set()
                raise
        return max(statuses, key=lambda status: (status not in ENDED, status != "done"))

    def follow(self, part: Part, end: float, stop: threading.Event) -> str:
        """Return done, failed, or why the process was interrupted."""
        written, log = (self.journals / f"{part.name}.{kind}" for kind in ("jsonl", "log"))
        command = [word.replace("FOLDER", str(self.out.resolve())) for word in part.command]
        if part.journal:
            command += ["--journal", str(written.resolve())]
        while True:
            size = _size(written)
            status = self.follow_once(part, command, (log, written), end, stop)
            again = status.startswith(("crashed", "silent")) and part.journal and part.again
            if not (again and _size(written) > size and end - time.monotonic() > LEAST_SECONDS):
                return status
            with log.open("a") as file:
                print(f"\n=== {status}: continues after that test\n", file=file)

    def follow_once(
        self, part: Part, command: list[str], signs: tuple[Path, Path], end: float,
        stop: threading.Event,
    ) -> str:  # fmt: skip
        environment = self.environment | (self.over_the_stand_in if part.stand_in else {})
        with signs[0].open("ab") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, start_new_session=True,
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
                if now - self.saved > SAVE_SECONDS:  # whatever kills this process, results stay
                    with contextlib.suppress(OSError):
                        self.save()
                if now > end:
                    return "out of time"
                if now - heard > part.silence:
                    return f"silent for {part.silence:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        code = process.returncode
        if code < 0 or code == DEVICE_LOST or code > 128:
            return "crashed, GPU lost" if code == DEVICE_LOST else f"crashed ({code})"
        return "done" if code in (0, 5) else f"failed ({code})"  # 5: no test was left

    def forget_the_last(self, one: Mapping[str, Any]) -> None:
        """Let the test that was running when the time was up run again. Of a part that compiles,
        and is not finished, all tests run again: several may have been running.
        """
        path = self.journals / f"{one['part']}.jsonl"
        if "kernels" in one:
            if one["status"] not in ENDED:
                path.unlink(missing_ok=True)
            return
        begun = [event["begun"] for event in journal.read(path) if "begun" in event]
        ended = {event["test"] for event in journal.read(path) if "test" in event}
        if begun and begun[-1] not in ended:
            with path.open("a") as file:
                print("\n" + json.dumps({"cut": begun[-1]}), file=file)

    @property
    def driver(self) -> Path:
        return self.journals / "driver"

    @functools.cached_property
    def over_the_stand_in(self) -> dict[str, str]:
        """The variables of processes that compile kernels and launch none."""
        self.driver.mkdir(exist_ok=True)
        return device.environment(self.driver)

    def no_stand_in(self) -> str | None:
        """Return why the stand-in cannot be built here, or None."""
        try:
            self.over_the_stand_in  # noqa: B018
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            return str(error)
        return None

    def save(self) -> dict[str, Any]:
        """Write results.json and report.md of the results so far, in the order of the parts."""
        with self.one_writer:
            self.saved = time.monotonic()
            parts = [dict(one) for one in list(self.done.values())]
            paths = (self.journals / f"{x['part']}.jsonl" for x in parts if "kernels" not in x)
            results = report.load(*filter(Path.exists, paths))
            rest = {"parts": parts, "absent": results.absent, "failed": results.failed}
            lines = ",\n".join(map(json.dumps, results.rows))  # a row on a line: below 1 MB
            text = f'{json.dumps(rest, indent=1)[:-2]},\n "rows": [\n{lines}\n]}}\n'
            _write(self.out / RESULTS, text)
            if results.rows:
                cut = [x for x in parts if x["status"] != "done"]
                text = "\n## Parts that were not done\n\n" * bool(cut)
                text += "".join(f"- {one['part']}: {one['status']}\n" for one in cut)
                _write(self.out / "report.md", report.markdown(results) + text)
        return {**rest, "rows": results.rows}


def _told(one: Mapping[str, Any]) -> str:
    """Print what became of a part, and return its status."""
    count = f", {one['kernels']} kernels" if "kernels" in one else ""
    print(f"{one['part']:24} {one['status']:24} {one['seconds']:6.1f} s{count}", flush=True)
    return str(one["status"])


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _write(path: Path, text: str) -> None:
    """Replace the file in one step: a killed run leaves the previous file or the new one."""
    whole = path.with_name(path.name + ".tmp")
    whole.write_text(text)
    whole.replace(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=folder, required=True, metavar="FOLDER", help="the folder for the results")
    add("--headline", action="store_true", help="--only headline, in six minutes")
    add("--minutes", type=float, help="the limit of the whole run; 9, or 5.9 for the headline")
    add("--only", metavar="NAMES", help="parts and groups of parts, separated by commas")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.headline:
        if options.only:
            parser.error("--headline and --only: give one of them")
        options.only = "headline"
    if options.minutes is None:
        options.minutes = 5.9 if options.headline else 9.0
    if not options.minutes > 0:
        parser.error(f"minutes is {options.minutes:g}; expected more than 0")
    try:
        parts = chosen(on_gpu(), options.only)
    except ValueError as error:
        parser.error(str(error))
    import torch

    if not torch.cuda.is_available():
        parser.error("there is no GPU; `pytest --benchmark-only` measures on a CPU")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the running part
    run = Run(options.out)
    if torch.cuda.get_device_capability() != (9, 0):
        run.obstacle = "the stand-in is an H100"
    run.go(parts, 60 * options.minutes)
    data = run.save()
    results = report.Results(data["rows"], data["absent"], data["failed"])
    print(f"Wrote {options.out / RESULTS}")
    print("\n".join(report.summary(results)))
    cut = [x["part"] for x in data["parts"] if not x["status"].startswith(FINE)]
    return 1 if data["failed"] or cut else 0
