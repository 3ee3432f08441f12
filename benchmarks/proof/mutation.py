"""Plants bugs, one at a time, and records which test functions see them.

    python -m benchmarks.proof.mutation                      the tables in tests/bugs/
    python -m benchmarks.proof.mutation --only '^memory'     those whose table or name matches
    python -m benchmarks.proof.mutation --resume             those without a verdict, or unseen
    python -m benchmarks.proof.mutation --alone              which bugs one function alone sees

A line of a table has a file, the name of the bug, a function or `Class.method` (without one, the
whole file), a text that stands once in it, and the text that takes its place; tabs part them, and
\\n stands for a new line. A sixth column says why the bug changes no result.

Each worker has a clone of the checkout. For a bug it writes the file, and runs

1. the functions that saw the bug before;
2. the other tests that `pytest` runs in the folder of tests of the file: first the files of tests
   that saw most other bugs of it. "Seen" if one fails;
3. where none does, all others that `pytest` runs;
4. then those of the folder that --all adds: "seen with --all", or "unseen".

A step ends when five functions have failed, or ten seconds after its first test if one has, or
after ten minutes. A test that ends its process, or takes two minutes, has failed; another process
goes on with the next one. In the end all cases that have failed run without a bug, and must pass.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import itertools
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.gpu import journal

TABLES = ROOT / "tests" / "bugs"
RESULT = ROOT / "benchmarks" / "results" / "mutation.json"
LIMIT = 600  # seconds of a step
SILENCE = 120  # seconds of a test
MOST = 5  # functions that fail, after which a step ends
SOON = 10  # seconds after which a step ends if a function has failed
VERDICTS = "seen", "seen with --all", "equivalent", "unseen"
Verdicts = dict[str, dict[str, dict[str, Any]]]  # by table and name of the bug


@dataclass(frozen=True)
class Bug:
    """The text of a file with a bug in it."""

    table: str
    name: str
    file: str
    planted: str
    text: str  # a digest of its line in the table
    equivalent: str = ""  # why it changes no result

    @property
    def folder(self) -> str:
        """The folder with the tests of the file."""
        if self.file.startswith("kernels/"):
            return "tests/gluon" if "/gluon/" in self.file else "tests/ops"
        named = "distributed" if self.table == "sharding" else self.file.split("/")[1]
        return f"tests/{named}" if (ROOT / "tests" / named).exists() else "tests"


def written() -> Iterator[Bug]:
    """Yield the bugs of the tables."""
    for path in sorted(TABLES.glob("*.tsv")):
        for line in path.read_text().splitlines():
            if not line.startswith("#"):
                columns = [column.replace("\\n", "\n") for column in line.split("\t")]
                digest = hashlib.sha256(line.encode()).hexdigest()[:12]
                yield _written(path.stem, digest, *columns)


def _written(
    table: str, text: str, file: str, name: str, function: str, old: str, new: str, why: str = ""
) -> Bug:
    source = (ROOT / file).read_text()
    first, last = _lines_of(source, function)
    lines = source.splitlines(True)
    body = "".join(lines[first:last])
    if body.count(old) != 1:
        raise ValueError(f"{name}: {function} holds {old!r} {body.count(old)} times")
    planted = "".join([*lines[:first], body.replace(old, new), *lines[last:]])
    return Bug(table, f"{file}: {name}", file, planted, text, why)


_parse = functools.cache(ast.parse)


def _lines_of(source: str, name: str) -> tuple[int, int]:
    """Return the lines of a function or `Class.method`; without a name, those of the file."""
    scope: Any = _parse(source)
    for part in filter(None, name.split(".")):
        scope = next(x for x in scope.body if getattr(x, "name", None) == part)
    return (scope.lineno - 1, scope.end_lineno) if name else (0, len(source.splitlines()))


# ------------------------------------------------------------------------------------- the checkout


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE
    ).stdout


def function_of(case: str) -> str:
    return case.partition("[")[0]


class Checkout:
    """Runs tests in a clone, whose files it may change."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.events = folder, folder.with_name(f"{folder.name}.jsonl")
        self.times = itertools.count(1)

    def write(self, file: str, text: str) -> None:
        """Write a file of which no test has run yet."""
        self.events.unlink(missing_ok=True)
        (self.folder / file).write_text(text)
        now = next(self.times)
        os.utime(self.folder / file, (now, now))  # so that its bytecode is that of another time

    def failed(self, *words: str, limit: float = LIMIT) -> list[str]:
        """Run pytest with these words, but no test that has begun, until enough have failed. Return
        the first case of each function that has.
        """
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-p", "benchmarks.gpu.journal", "--journal", str(self.events), *words]
        path = f"{self.folder}{os.pathsep}{ROOT}"
        end = time.monotonic() + limit
        while True:
            process = subprocess.Popen(
                command, cwd=self.folder, env={**os.environ, "PYTHONPATH": path},
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            try:
                enough = self._follow(process, end)
            finally:  # the group also holds what the tests have started
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            events = [*journal.read(self.events)]
            if process.returncode in (2, 3, 4):  # what the tests import cannot be imported
                return ["conftest.py"]
            ended = {x["test"] for x in events if "test" in x}
            lost = [x for x in journal.begun(events) if x not in ended]
            bad = [x["test"] for x in events if x.get("outcome") == "failed"]
            if not enough:
                bad += lost
                for case in lost:
                    with self.events.open("a") as file:
                        print(json.dumps({"test": case, "outcome": "failed"}), file=file)
            if enough or not lost:
                return [*{function_of(case): case for case in reversed(bad)}.values()]

    def _follow(self, process: subprocess.Popen[bytes], end: float) -> bool:
        """Wait until the process ends, or a test takes too long; True if the step is over."""
        started, heard, size = None, time.monotonic(), 0
        while process.poll() is None:
            time.sleep(0.1)
            now, length = time.monotonic(), len(events := [*journal.read(self.events)])
            if length > size:
                heard, size, started = now, length, started or now
            functions = {function_of(x["test"]) for x in events if x.get("outcome") == "failed"}
            soon = started is not None and functions and now > started + SOON
            if len(functions) >= MOST or soon or now > end:
                return True
            if now > heard + SILENCE:
                return False
        return False


def attempt(bug: Bug, before: Verdicts, checkout: Checkout) -> tuple[str, list[str]]:
    """Plant a bug. Return its verdict and the first case of each function that fails."""
    functions = before.get(bug.table, {}).get(bug.name, {}).get("tests", [])
    known = Counter(
        test.partition("::")[0]
        for verdicts in before.values()
        for name, verdict in verdicts.items()
        for test in verdict["tests"]
        if name.startswith(f"{bug.file}:")
    )
    near = [f for f, _ in known.most_common() if f.startswith(bug.folder) and (ROOT / f).exists()]
    files = {f for f in (test.partition("::")[0] for test in functions) if (ROOT / f).exists()}
    again = [*sorted(files), "--matching", "|".join(f"{re.escape(x)}($|\\[)" for x in functions)]
    steps = [("seen", again)] * bool(files) + [("seen", [*near, bug.folder])]
    if not bug.equivalent:
        steps += [("seen", ["tests"]), ("seen with --all", ["--all", *near, bug.folder])]
    checkout.write(bug.file, bug.planted)
    try:
        for verdict, words in steps:
            if cases := checkout.failed(*words):
                return verdict, cases
        return "equivalent" if bug.equivalent else "unseen", []
    finally:
        checkout.write(bug.file, (ROOT / bug.file).read_text())


# ------------------------------------------------------------------------------------- the verdicts


def read() -> Verdicts:
    return json.loads(RESULT.read_text()) if RESULT.exists() else {}


def save(results: Verdicts) -> None:
    lines = (f"{json.dumps(table)}: {json.dumps(results[table])}" for table in sorted(results))
    RESULT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def try_all(bugs: Sequence[Bug], results: Verdicts, workers: int) -> list[str]:
    """Enter the verdict of each bug in the results. Return the cases that fail without a bug."""
    before, commit = read(), _git("rev-parse", "--short", "HEAD").strip()
    free, cases = queue.SimpleQueue[Checkout](), set[str]()

    def one(bug: Bug) -> tuple[str, list[str], float]:
        checkout, start = free.get(), time.monotonic()
        try:
            return *attempt(bug, before, checkout), time.monotonic() - start
        finally:
            free.put(checkout)

    with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
        for n in range(workers):
            _git("clone", "--quiet", ".", f"{scratch}/{n}")
            free.put(Checkout(Path(scratch) / str(n)))
        with ThreadPoolExecutor(workers) as pool:
            done = {pool.submit(one, bug): bug for bug in bugs}
            try:
                for n, future in enumerate(as_completed(done), 1):
                    bug, (verdict, failed, seconds) = done[future], future.result()
                    print(n, len(bugs), bug.table, bug.name, verdict, *failed, flush=True)
                    results[bug.table][bug.name] = dict(
                        text=bug.text, verdict=verdict, tests=sorted(map(function_of, failed)),
                        seconds=round(seconds, 1), commit=commit,
                    )  # fmt: skip
                    save(results)
                    cases.update(failed)
            finally:
                pool.shutdown(cancel_futures=True)
        checkout = free.get()
        checkout.events.unlink(missing_ok=True)
        cases.discard("conftest.py")
        return checkout.failed(*sorted(cases), limit=math.inf) if cases else []


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--only", type=re.compile, default=re.compile(""), metavar="REGEX")
    add("--workers", type=int, default=2)
    add("--resume", action="store_true", help="try what has no verdict, or is unseen")
    add("--alone", action="store_true", help="list what one function alone sees")
    options = parser.parse_args(argv)
    results = read()
    if options.alone:
        every = ((v["tests"], name) for table in results.values() for name, v in table.items())
        print(*sorted(f"{tests[0]}  {name}" for tests, name in every if len(tests) == 1), sep="\n")
        return 0
    every = [*written()]
    for table in {*results, *(bug.table for bug in every)}:
        texts = {bug.name: bug.text for bug in every if bug.table == table}
        known = results.get(table, {}).items()
        results[table] = {name: v for name, v in known if texts.get(name) == v["text"]}
    bugs = [bug for bug in every if options.only.search(f"{bug.table}: {bug.name}")]
    if options.resume:
        unseen = {"verdict": "unseen"}
        bugs = [x for x in bugs if results[x.table].get(x.name, unseen)["verdict"] == "unseen"]
    if _git("status", "--porcelain", "--", ".", f":!{RESULT.relative_to(ROOT)}"):
        parser.error("there are changes that are not committed: the tests run in clones")
    wrong = try_all(bugs, results, options.workers)
    print(*(f"fails without a bug: {case}" for case in wrong), sep="\n")
    return int(bool(wrong) or any(results[x.table][x.name]["verdict"] == "unseen" for x in bugs))


if __name__ == "__main__":
    sys.exit(main())
