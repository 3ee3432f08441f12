"""Plants the bugs of tests/mutants.py, one at a time, in a copy of the checkout, and reports which
of them the tests see.

    python -m benchmarks.proof.mutation                        all of them
    python -m benchmarks.proof.mutation --only '^attention'    those whose name matches

The test that is on record as the first to fail is tried first, then tests/killers.txt, then all
that `pytest` runs, then `pytest --all`; the first failure ends the trial. A bug is "seen" by the
default tests, "seen with --all", or "unseen". Results are written after each trial, and `--resume`
goes on with the others.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks import ROOT

sys.path.append(str(ROOT / "tests"))
from mutants import EQUIVALENT, MORE, PLANTED

RESULT = ROOT / "benchmarks" / "results" / "mutation.json"
SHARED = "common", "launch"  # files of kernels/ that hold functions of all kernels
NOTHING_RAN = 4, 5  # exit statuses of pytest


@dataclass(frozen=True)
class Mutant:
    """The text of a file with a bug in it."""

    name: str
    file: str
    planted: str


def written() -> Iterator[Mutant]:
    """Yield the bugs of tests/mutants.py."""
    for table in (PLANTED, MORE):
        for kernel, bugs in table.items():
            for name, (function, old, new) in bugs.items():
                if (kernel, name) not in EQUIVALENT:
                    yield _written(f"{kernel}: {name}", kernel, function, old, new)


def _written(name: str, kernel: str, function: str, old: str, new: str) -> Mutant:
    for stem in (kernel, *SHARED):
        path = ROOT / "kernels" / stem
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]:
            source = file.read_text()
            for first, last in _functions(source, function):
                lines = source.splitlines(True)
                body = "".join(lines[first:last])
                if body.count(old) == 1:
                    planted = "".join([*lines[:first], body.replace(old, new), *lines[last:]])
                    return Mutant(name, file.relative_to(ROOT).as_posix(), planted)
    raise ValueError(f"{name}: no function {function} holds {old!r} once")


_parse = functools.cache(ast.parse)


def _functions(source: str, name: str) -> Iterator[tuple[int, int]]:
    """Yield the lines of a function, or of a method after a dot; without a name, of the file."""
    scope: Any = _parse(source)
    if not name:
        yield 0, len(source.splitlines())
        return
    for part in name.split("."):
        found = [node for node in scope.body if getattr(node, "name", None) == part]
        if not found:
            return
        scope = found[0]
    yield scope.lineno - 1, scope.end_lineno


class Checkout:
    """A copy of the files of the checkout that git does not ignore."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE)
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).exists():  # it may have been deleted and not committed
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)

    def pytest(self, *options: str, limit: float | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
            cwd=self.folder, env={**os.environ, "PYTHONPATH": str(self.folder)},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit,
        )  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    name: str
    verdict: str
    test: str = ""  # that fails


def attempt(mutant: Mutant, checkout: Checkout, known: str, limit: float) -> Verdict:
    """Plant the bug, run tests until one fails, the `known` one first, and take it out again."""
    file = checkout.folder / mutant.file
    original = file.read_text()
    file.write_text(mutant.planted)
    listed = checkout.folder / "known.txt"
    listed.write_text(known)
    # Tests that change the text themselves are left out, and tests of tools.
    options = "-x", "-k", "not planted", f"--basetemp={checkout.folder / 'temporary'}"
    trials: list[tuple[str, ...]] = [("@tests/killers.txt",), (), ("--all", "-m", "not tools")]
    trials = [(f"@{listed}",)] * ("::" in known) + trials
    try:
        for trial in trials:
            verdict = "seen with --all" if "--all" in trial else "seen"
            try:
                done = checkout.pytest(*options, *trial, limit=limit)
            except subprocess.TimeoutExpired:
                return Verdict(mutant.name, verdict, f"no end within {limit:.0f} s")
            failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.M)
            if done.returncode not in (0, *NOTHING_RAN):
                return Verdict(mutant.name, verdict, failed[1] if failed else "the process ended")
        return Verdict(mutant.name, "unseen")
    finally:
        file.write_text(original)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=3600, help="seconds for all tests")
    parser.add_argument("--resume", action="store_true", help="keep the verdicts on record")
    arguments = parser.parse_args(argv)
    mutants = [mutant for mutant in written() if arguments.only.search(mutant.name)]
    known = {v["name"]: v for v in json.loads(RESULT.read_text())["written"]}
    verdicts = dict(known) if arguments.only.pattern or arguments.resume else {}
    if arguments.resume:
        mutants = [mutant for mutant in mutants if mutant.name not in verdicts]
    with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
        free = SimpleQueue[Checkout]()
        for n in range(arguments.workers):
            free.put(Checkout(Path(scratch) / str(n)))

        def one(mutant: Mutant) -> Verdict:
            checkout = free.get()
            try:
                test = known.get(mutant.name, {}).get("test", "")
                return attempt(mutant, checkout, test, arguments.limit)
            finally:
                free.put(checkout)

        with ThreadPoolExecutor(arguments.workers) as pool:
            for n, verdict in enumerate(pool.map(one, mutants), 1):
                print(f"{n}/{len(mutants)}  {verdict.verdict:16} {verdict.name}  {verdict.test}")
                verdicts[verdict.name] = asdict(verdict)
                lines = ",\n".join(map(json.dumps, verdicts.values()))
                RESULT.write_text(f'{{\n"written": [\n{lines}\n]\n}}\n')
    return int(any(v["verdict"] == "unseen" for v in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
