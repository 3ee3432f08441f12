"""The mutation score: what share of bugs planted in the kernels the tests see.

    python -m benchmarks.mutation                        all mutants of tests/mutants.py, 2 workers
    python -m benchmarks.mutation --only '^attention.*int32'        these anew, the others stay
    python -m benchmarks.mutation --resume               keeps the good verdicts

A mutant is one change of text in one function of kernels/, in a copy of the checkout. There pytest
runs the tests that cover the file, the quick check first, and stops at the first failure. A mutant
is killed by a test that fails, or crashes the process, with the change and passes without it; else
it survives, or runs into the time limit. (The checks that plant bugs themselves are left out: a
change of the text that they replace is no test.) Writes benchmarks/results/mutation.json and .md
after each mutant. Exit status 1 where one is left that is not known to be equivalent.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import folder

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COPIED = ("fastformer", "kernels", "tests", "conftest.py", "pyproject.toml")
QUICK = "test_a_planted_bug_is_caught[None]"

sys.path.insert(0, str(ROOT / "tests"))
from mutants import COVERED_BY, EQUIVALENT, MORE, PLANTED


@dataclass(frozen=True)
class Mutant:
    kernel: str
    name: str
    function: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.name}"

    def file(self) -> str:
        """Its kernel's, or that of what all kernels share."""
        own = (ROOT / "kernels" / f"{self.kernel}.py").read_text()
        return f"{self.kernel}.py" if _lines(own, self.function) else "common.py"

    def planted(self) -> str:
        """The text of its file with the change in it."""
        source = (ROOT / "kernels" / self.file()).read_text()
        place = _lines(source, self.function)
        assert place is not None, f"{self}: there is no {self.function}"
        lines = source.splitlines(True)
        first, last = place
        body = "".join(lines[first:last])
        assert body.count(self.old) == 1, f"{self}: {body.count(self.old)} times in {self.function}"
        body = body.replace(self.old, self.new)
        return "".join(lines[:first]) + body + "".join(lines[last:])

    def digest(self) -> str:
        """Of the function with the change in it, or of a change outside of them."""
        source, body = self.planted(), self.new
        if self.function:
            first, last = _lines(source, self.function) or (0, 0)
            body = "".join(source.splitlines(True)[first:last])
        return hashlib.sha256(body.encode()).hexdigest()[:16]

    def tests(self) -> list[list[str]]:
        """What pytest is called with, the fastest first."""
        files = [[f"tests/{name}" for name in COVERED_BY[self.kernel]]]
        if self.kernel not in PLANTED:
            return files
        return [[f"tests/test_{self.kernel}.py::{QUICK}"], *files]


@functools.cache
def _lines(source: str, function: str) -> tuple[int, int] | None:
    """Where a function, or method after a dot, stands; the whole file for an empty name."""
    scope: Any = ast.parse(source)
    if not function:
        return 0, len(source.splitlines())
    for name in function.split("."):
        found = [node for node in scope.body if getattr(node, "name", None) == name]
        if not found:
            return None
        (scope,) = found
    return scope.lineno - 1, scope.end_lineno


MUTANTS = [
    Mutant(kernel, name, *change)
    for table in (MORE, PLANTED)
    for kernel, changes in table.items()
    for name, change in changes.items()
]


# -------------------------------------------------------------------------------------- the trials


@dataclass(frozen=True)
class Verdict:
    kernel: str
    name: str
    function: str
    verdict: str  # killed, survived, time out
    test: str  # that killed it
    seconds: float
    digest: str  # of the changed function

    def good(self) -> bool:
        expected = "survived" if (self.kernel, self.name) in EQUIVALENT else "killed"
        return self.verdict == expected


class Checkout:
    """A copy of the checkout, to change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            at = ROOT / name
            if at.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(at, folder / name, ignore=ignored)
            else:
                shutil.copy(at, folder / name)

    def pytest(self, tests: Sequence[str], limit: float) -> tuple[int | None, str]:
        """(exit status, None past the time limit; output)."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "--tb=line",
            "-p",
            "no:cacheprovider",
        ]
        command += [*tests, "-k", "not planted or None"]
        process = subprocess.Popen(
            command, cwd=self.folder, env=self.environment(), text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output = process.communicate(timeout=limit)[0]
            return process.returncode, output
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]

    def environment(self) -> dict[str, str]:
        threads = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        return {**os.environ, **threads, "PYTHONPATH": str(self.folder)}

    def imports_its_own(self) -> bool:
        code = "import fastformer.kernels; print(fastformer.kernels.__file__)"
        found = subprocess.run(
            [sys.executable, "-c", code], cwd=self.folder, env=self.environment(), text=True,
            capture_output=True, check=True,
        )  # fmt: skip
        return Path(found.stdout.strip()).resolve().is_relative_to(self.folder.resolve())


class Trials:
    """Mutants against the tests, in as many checkouts as there are workers."""

    def __init__(self, workers: int, limit: float) -> None:
        self.limit, self.workers = limit, workers
        self._free: queue.Queue[Checkout] = queue.Queue()
        self._passes: dict[str, bool] = {}  # by test: whether it passes without any mutant
        self._lock = threading.Lock()
        self._scratch = tempfile.TemporaryDirectory(prefix="mutation-")
        for n in range(workers):
            self._free.put(Checkout(Path(self._scratch.name) / str(n)))
        self._clean = Checkout(Path(self._scratch.name) / "clean")
        if not self._clean.imports_its_own():
            raise RuntimeError("the copy of the checkout does not import its own kernels")

    def __call__(self, mutant: Mutant) -> Verdict:
        checkout = self._free.get()
        planted, file = mutant.planted(), checkout.folder / "kernels" / mutant.file()
        original, started = file.read_text(), time.monotonic()
        try:
            file.write_text(planted)
            for tests in mutant.tests():
                status, output = checkout.pytest(tests, self.limit)
                if status != 0:
                    break
        finally:
            file.write_text(original)
            self._free.put(checkout)
        seconds = time.monotonic() - started
        verdict, test = self._read(mutant, status, output)
        return Verdict(
            mutant.kernel, mutant.name, mutant.function, verdict, test, round(seconds, 1),
            mutant.digest(),
        )  # fmt: skip

    def _read(self, mutant: Mutant, status: int | None, output: str) -> tuple[str, str]:
        if status is None:
            return "time out", ""
        if status == 0:
            return "survived", ""
        if status < 0:
            return "killed", f"crash, signal {-status}"
        failed = re.search(r"^(?:FAILED|ERROR) (\S+\.py(?:::.*?(?:\]|(?= - |$)))?)", output, re.M)
        if failed is None:
            raise RuntimeError(f"{mutant}: pytest ended with {status}:\n{output[-2000:]}")
        test = failed[1]
        if not self.passes(test):
            raise RuntimeError(f"{test} fails without any mutant")
        return "killed", test

    def passes(self, test: str) -> bool:
        """Whether the test passes on kernels that nobody changed."""
        with self._lock:
            if test not in self._passes:
                self._passes[test] = self._clean.pytest([test], self.limit)[0] == 0
            return self._passes[test]

    def close(self) -> None:
        self._scratch.cleanup()


# ------------------------------------------------------------------------------------- the report


def save(verdicts: Sequence[Verdict], stem: Path) -> None:
    stem.parent.mkdir(parents=True, exist_ok=True)
    order = {(m.kernel, m.name): n for n, m in enumerate(MUTANTS)}
    verdicts = sorted(verdicts, key=lambda v: order[v.kernel, v.name])
    stem.with_suffix(".json").write_text(json.dumps([asdict(v) for v in verdicts], indent=0) + "\n")
    stem.with_suffix(".md").write_text(markdown(verdicts))


def load(stem: Path) -> list[Verdict]:
    path = stem.with_suffix(".json")
    return [Verdict(**v) for v in json.loads(path.read_text())] if path.exists() else []


def still_holds(verdict: Verdict) -> bool:
    """As it should be, and the same text today."""
    for mutant in MUTANTS:
        if (mutant.kernel, mutant.name) == (verdict.kernel, verdict.name):
            return verdict.good() and verdict.digest == mutant.digest()
    return False


def markdown(verdicts: Sequence[Verdict]) -> str:
    lines = [
        "# Mutation score",
        "",
        "Bugs planted in the kernels and their launchers, one at a time, and the first test that "
        "fails for it: `python -m benchmarks.mutation` makes this file from tests/mutants.py.",
        "",
        "| kernel file | mutants | tried | killed | equivalent | survived | time out |",
        "|---|---|---|---|---|---|---|",
    ]
    for kernel in [*COVERED_BY, None]:
        mine = [v for v in verdicts if kernel in (None, v.kernel)]
        there = sum(kernel in (None, m.kernel) for m in MUTANTS)
        found = Counter("equivalent" if _same(v) else v.verdict for v in mine)
        counts = [found[n] for n in ("killed", "equivalent", "survived", "time out")]
        cells = [kernel or "all", there, len(mine), *counts]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    minutes = sum(v.seconds for v in verdicts) / 60
    lines += [
        "",
        f"{minutes:.0f} minutes in all, over the number of workers.",
        "",
        "Equivalent:",
        "",
    ]
    lines += [f"- {kernel}, {name}: {why}" for (kernel, name), why in EQUIVALENT.items()]
    lines += [
        "",
        "| kernel file | function | mutant | verdict | by | s |",
        "|---|---|---|---|---|---|",
    ]
    for v in verdicts:
        test = f"`{v.test.removeprefix('tests/').replace('|', ' ')}`" if v.test else "-"
        verdict = "equivalent" if _same(v) else v.verdict
        cells = [v.kernel, f"`{v.function}`" if v.function else "-", v.name, verdict, test]
        lines.append("| " + " | ".join(cells) + f" | {v.seconds:.0f} |")
    return "\n".join(lines) + "\n"


def _same(verdict: Verdict) -> bool:
    return verdict.verdict == "survived" and verdict.good()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="of 'kernel: name'")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=400, help="seconds for one mutant")
    parser.add_argument("--resume", action="store_true", help="keep the good verdicts")
    parser.add_argument("--out", type=folder, default=RESULTS, help="the folder of the report")
    arguments = parser.parse_args(argv)
    stem = arguments.out / "mutation"
    try:
        chosen = [m for m in MUTANTS if re.search(arguments.only, str(m))]
    except re.error as error:
        parser.error(f"--only {arguments.only!r} is no regex: {error}")
    if not chosen:
        parser.error(f"no mutant is like {arguments.only!r}")
    if arguments.workers < 1:
        parser.error(f"workers is {arguments.workers}; expected 1 or more")
    names = {(m.kernel, m.name): m in chosen for m in MUTANTS}
    known = [v for v in load(stem) if (v.kernel, v.name) in names]
    verdicts = [
        v for v in known if not names[v.kernel, v.name] or (arguments.resume and still_holds(v))
    ]
    done = {(v.kernel, v.name) for v in verdicts}
    trials, lock = Trials(arguments.workers, arguments.limit), threading.Lock()

    def attempt(mutant: Mutant) -> Verdict | None:
        if (mutant.kernel, mutant.name) in done:
            return None
        verdict = trials(mutant)
        with lock:
            verdicts.append(verdict)
            save(verdicts, stem)
            note = "" if verdict.good() else "  <--"
            print(f"{verdict.verdict:9}{verdict.seconds:6.1f} s  {mutant}  {verdict.test}{note}")
            sys.stdout.flush()
        return verdict

    try:
        with ThreadPoolExecutor(arguments.workers) as pool:
            list(pool.map(attempt, chosen))
    finally:
        trials.close()
    tried = [v for v in verdicts if any((m.kernel, m.name) == (v.kernel, v.name) for m in chosen)]
    left = [v for v in tried if not v.good()]
    killed = sum(v.verdict == "killed" for v in tried)
    print(f"{len(tried)} mutants: {killed} killed, {len(left)} left")
    for v in left:
        print(f"{v.verdict}: {v.kernel}: {v.name}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
