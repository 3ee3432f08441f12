"""Plants bugs, one at a time, in a copy of the checkout, and reports which of them the tests see.

    python -m benchmarks.proof.mutation                        the bugs of tests/mutants.py
    python -m benchmarks.proof.mutation --only '^attention'    those whose name matches
    python -m benchmarks.proof.mutation --draw 60 --seed 7     60 small changes, drawn at random

Needs `python -m pip install cosmic-ray pytest-cov`. cosmic-ray makes the changes that are drawn:
other operators, numbers and conditions, at places drawn evenly from fastformer/ and kernels/. It is
called as a library: its own runner has one test command for all changes, and all tests take minutes
for each. mutmut does not work here: it changes imported modules, but @triton.jit reads files.

Coverage of the tests that `pytest` runs says which of them execute a changed line. It is measured
once: delete build/mutation-coverage when the code has changed. These tests are tried first; then
all cases of their functions, and of the functions of the same files that `pytest` leaves out. The
first failure that the bug alone causes ends the trial. A bug is "seen" by the default tests, "seen
with --all", or "unseen". Results are written after each trial, and `--resume` goes on with the
others.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks import ROOT

sys.path.append(str(ROOT / "tests"))
from mutants import EQUIVALENT, MORE, PLANTED

RESULT = ROOT / "benchmarks" / "results" / "mutation.json"
COVERAGE = ROOT / "build" / "mutation-coverage"
SHARED = "common", "launch", "products"  # files of kernels/ that hold functions of all kernels
# Changes that stop a module from being imported, or that nothing calls.
NO_OPERATORS = ("RemoveDecorator", "Exception", "NoOp", "Break", "Continue")


@dataclass(frozen=True)
class Mutant:
    """The text of a file with a bug in it; the bug is in the lines first to last."""

    name: str
    file: str
    first: int
    last: int
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
                    start = first + body[: body.index(old)].count("\n")
                    planted = "".join([*lines[:first], body.replace(old, new), *lines[last:]])
                    changed = start + 1, start + 1 + old.rstrip("\n").count("\n")
                    return Mutant(name, file.relative_to(ROOT).as_posix(), *changed, planted)
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


def drawn(n: int, seed: int, folders: Sequence[str]) -> list[Mutant]:
    """Draw changes at n places of the folders, in code that has an effect."""
    from cosmic_ray.commands.init import _all_work_items
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    places: dict[tuple[str, Any, Any], list[Any]] = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            file, ignored = path.relative_to(ROOT).as_posix(), _without_effect(path.read_text())
            for item in _all_work_items([path], {}):
                (change,) = item.mutations
                if change.start_pos[0] not in ignored and not any(
                    name in change.operator_name for name in NO_OPERATORS
                ):
                    places.setdefault((file, change.start_pos, change.end_pos), []).append(change)
    choose = random.Random(seed)
    mutants = []
    for file, start, end in choose.sample(sorted(places), n):
        change = choose.choice(places[file, start, end])
        operator = get_operator(change.operator_name)(**change.operator_args)
        source = (ROOT / file).read_text()
        planted = mutate_code(source, operator, change.occurrence)
        old, new = source.splitlines()[start[0] - 1], planted.splitlines()[start[0] - 1]
        name = f"{file}:{start[0]}: {old.strip()}  ->  {new.strip()}"
        mutants.append(Mutant(name, file, start[0], end[0], planted))
    return mutants


def _without_effect(source: str) -> set[int]:
    """Return the lines of annotations, docstrings, messages and imports."""
    whole = ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr
    lines: set[int] = set()
    node: Any
    for node in ast.walk(ast.parse(source)):
        parts = [getattr(node, "returns", None), getattr(node, "annotation", None)]
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for part in [node] if docstring or isinstance(node, whole) else filter(None, parts):
            lines |= {*range(part.lineno, part.end_lineno + 1)}
    return lines


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

    def pytest(self, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
            cwd=self.folder, env={**os.environ, "PYTHONPATH": str(self.folder)},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def first_failure(self, tests: Sequence[str], limit: float) -> str | None:
        """Return the first of the tests that fails, or why the process ended, or None. A test that
        takes longer than the limit ends the process.
        """
        listed = self.folder / "chosen.txt"
        listed.write_text("\n".join(tests))
        ends = ["-o", f"faulthandler_timeout={limit}", "-o", "faulthandler_exit_on_timeout=true"]
        temporary = f"--basetemp={self.folder / 'temporary'}"
        done = self.pytest("-x", temporary, *ends, f"@{listed}")
        if not done.returncode:
            return None
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.M)
        return failed[1] if failed else f"the process ended with {done.returncode}"


def record_coverage(scratch: Path) -> None:
    """Write which default test executes which line, and all tests."""
    checkout = Checkout(scratch / "coverage")
    done = checkout.pytest(
        "-n", "auto", "--dist", "worksteal", f"--basetemp={scratch / 'temporary'}",
        "--cov=fastformer", "--cov=kernels", "--cov-context=test", "--cov-report=",
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the tests fail without any bug:\n{done.stdout[-2000:]}")
    COVERAGE.mkdir(parents=True, exist_ok=True)
    for name, options in (("default.txt", []), ("all.txt", ["--all"])):
        listed = checkout.pytest("--collect-only", *options).stdout.splitlines()
        (COVERAGE / name).write_text("\n".join(line for line in listed if "::" in line))
    shutil.copy(checkout.folder / ".coverage", COVERAGE / "lines.sqlite")


def _lines_of_functions(source: str) -> set[int]:
    """Return the lines that do not run when the file is imported."""
    functions = [x for x in ast.walk(_parse(source)) if isinstance(x, ast.FunctionDef)]
    return {n for x in functions for n in range(x.body[0].lineno, (x.end_lineno or 0) + 1)}


class Tests:
    """The tests that execute a line: those that `pytest` runs, and those that --all adds."""

    def __init__(self) -> None:
        from coverage import CoverageData

        self._data = CoverageData(str(COVERAGE / "lines.sqlite"))
        self._data.read()
        self._all, self._default = (
            {*(COVERAGE / name).read_text().splitlines()} for name in ("all.txt", "default.txt")
        )
        known = {context.partition("|")[0] for context in self._data.measured_contexts()}
        self._elsewhere = self._default - known  # tests whose child processes run the code
        self._run = {test.partition("[")[0] for test in self._default}

    def of(self, mutant: Mutant) -> tuple[list[str], list[str]]:
        """Return the default tests and the other tests, one of each function first. All tests
        depend on a line that runs at import, and those whose child processes run the code on any.
        """
        body = _lines_of_functions((ROOT / mutant.file).read_text())
        default, of_file = set[str](), set[str]()
        for measured in self._data.measured_files():
            if measured.endswith("/" + mutant.file):
                for line, contexts in self._data.contexts_by_lineno(measured).items():
                    tests = {c.partition("|")[0] for c in contexts if "::" in c}
                    of_file |= tests
                    if mutant.first <= line <= mutant.last and line in body:
                        default |= tests
        own = default or of_file
        first = _one_of_each_first(own) + _one_of_each_first(self._elsewhere - own)
        if not default:
            default = self._default
            first += _one_of_each_first(default - own - self._elsewhere)
        functions = {test.partition("[")[0] for test in default}
        files = {test.partition("::")[0] for test in default}
        more = []
        for test in self._all - default:
            function, file = test.partition("[")[0], test.partition("::")[0]
            if function in functions or (file in files and function not in self._run):
                more.append(test)
        return first, _one_of_each_first(more)


def _one_of_each_first(tests: Iterable[str]) -> list[str]:
    # The first kind changes the text itself, the second needs all tests.
    tests = [test for test in tests if not re.search("planted|test_selection", test)]
    seen: dict[str, int] = {}
    order = {}
    for test in sorted(tests):
        function = test.partition("[")[0]
        order[test] = seen[function] = seen.get(function, -1) + 1
    return sorted(tests, key=lambda test: order[test])


@dataclass(frozen=True)
class Verdict:
    name: str
    verdict: str
    test: str = ""  # that fails


def attempt(mutant: Mutant, checkout: Checkout, tests: Tests, limit: float) -> Verdict:
    """Plant the bug, run the tests that execute its lines, and take it out again. A test that fails
    beside others counts if it also fails alone, and passes without the bug.
    """
    file = checkout.folder / mutant.file
    original = file.read_text()
    file.write_text(mutant.planted)
    try:
        for verdict, chosen in zip(("seen", "seen with --all"), tests.of(mutant)):
            while chosen:
                failed = checkout.first_failure(chosen, limit)
                if failed is None:
                    break
                if failed not in chosen:  # a module cannot be imported, or the process ended
                    return Verdict(mutant.name, verdict, failed)
                again = checkout.first_failure([failed], limit)
                file.write_text(original)
                if again and not checkout.first_failure([failed], limit):
                    return Verdict(mutant.name, verdict, failed)
                file.write_text(mutant.planted)
                chosen = chosen[chosen.index(failed) + 1 :]
        return Verdict(mutant.name, "unseen")
    finally:
        file.write_text(original)


def save(results: dict[str, list[dict[str, str]]]) -> None:
    """Write the verdicts, one on a line."""
    lists = (
        f"{json.dumps(key)}: [\n" + ",\n".join(map(json.dumps, verdicts)) + "\n]"
        for key, verdicts in results.items()
    )
    RESULT.write_text("{\n" + ",\n".join(lists) + "\n}\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX")
    parser.add_argument("--draw", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300, help="seconds for a test")
    parser.add_argument("--resume", action="store_true", help="keep the verdicts on record")
    arguments = parser.parse_args(argv)
    if arguments.draw:
        mutants = drawn(arguments.draw, arguments.seed, ("fastformer", "kernels"))
        key = f"drawn with seed {arguments.seed}"
    else:
        mutants, key = [*written()], "written"
    mutants = [mutant for mutant in mutants if arguments.only.search(mutant.name)]
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    known = {v["name"]: v for v in results.get(key, [])}
    verdicts = known if arguments.only.pattern or arguments.resume else {}
    if arguments.resume:
        mutants = [mutant for mutant in mutants if mutant.name not in verdicts]
    with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
        if not COVERAGE.exists():
            record_coverage(Path(scratch))
        tests, free = Tests(), SimpleQueue[Checkout]()
        for n in range(arguments.workers):
            free.put(Checkout(Path(scratch) / str(n)))

        def one(mutant: Mutant) -> Verdict:
            checkout = free.get()
            try:
                return attempt(mutant, checkout, tests, arguments.limit)
            finally:
                free.put(checkout)

        with ThreadPoolExecutor(arguments.workers) as pool:
            for n, verdict in enumerate(pool.map(one, mutants), 1):
                print(f"{n}/{len(mutants)}  {verdict.verdict:16} {verdict.name}  {verdict.test}")
                verdicts[verdict.name] = asdict(verdict)
                results[key] = [*verdicts.values()]
                save(results)
    return int(any(v["verdict"] == "unseen" for v in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
