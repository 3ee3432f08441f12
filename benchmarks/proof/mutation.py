"""Plants bugs, one at a time, and records which test functions see them.

    python -m benchmarks.proof.mutation                        the tables in tests/bugs/
    python -m benchmarks.proof.mutation --only '^memory'       those whose table or name matches
    python -m benchmarks.proof.mutation --tests /test_hopper   with the tests whose names match
    python -m benchmarks.proof.mutation --draw 100 --seed 7    100 small changes, drawn at random
    python -m benchmarks.proof.mutation --alone                which bugs one function alone sees

A line of a table has a file, the name of the bug, a function or `Class.method` (without one, the
whole file), a text that stands once in it, and the text that takes its place; tabs part them, and
\\n stands for a new line. A sixth column says why the bug changes no result. Of a draw, cosmic-ray
(`python -m pip install cosmic-ray`) makes the changes: other operators, numbers and conditions, at
places drawn evenly from fastformer/ and kernels/. It is called as a library: its own runner has one
test command for all changes.

Each worker has a copy of the checkout, and imports the other packages once. For a bug it writes the
file, and forks: the fork imports the package, collects tests, and forks again to run one test
function after the other. When a case fails, that process ends, and another one goes on with the
next function. Without a bug each case has run in a process of its own, which has recorded the lines
that it executes (`python -m pip install coverage`; build/mutation keeps this until the code
changes). So a bug costs the cases that execute its lines:

1. those that `pytest` runs, in the folder of tests of the file. "Seen" if one fails.
2. Where none does, all others that `pytest` runs, also those that run code in other processes.
3. Then those that --all adds, in the files of the cases that execute the bug's lines: "seen with
   --all", or "unseen".

A step ends when five functions have failed, or ten seconds after its start if one has, or after two
minutes. A failure counts if the case fails again alone, where it has passed without the bug.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import hashlib
import importlib
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ROOT

TABLES = ROOT / "tests" / "bugs"
RESULT = ROOT / "benchmarks" / "results" / "mutation.json"
RECORD = ROOT / "build" / "mutation"
LIMIT = 120  # seconds of a step, and of a case
MOST = 5  # functions that fail, after which a step ends
SOON = 10  # seconds after which a step ends if a function has failed
VERDICTS = "seen", "seen with --all", "equivalent", "unseen"
Verdicts = dict[str, dict[str, dict[str, Any]]]  # by table and name of the bug
IMPORTED = "torch._dynamo", "torch.distributed", "triton.runtime.interpreter", "transformers"
# Changes that stop a module from being imported, or that nothing calls.
NO_OPERATORS = ("RemoveDecorator", "Exception", "NoOp", "Break", "Continue")


@dataclass(frozen=True)
class Bug:
    """The text of a file with a bug in it; the bug is in the lines first to last."""

    table: str
    name: str
    file: str
    first: int
    last: int
    planted: str
    text: str  # a digest of its line in the table
    equivalent: str = ""  # why it changes no result


def written() -> Iterator[Bug]:
    """Yield the bugs of the tables."""
    for path in sorted(TABLES.glob("*.tsv")):
        for line in path.read_text().splitlines():
            if not line.startswith("#"):
                columns = [column.replace("\\n", "\n") for column in line.split("\t")]
                yield _written(path.stem, _digest(line), *columns)


def _written(
    table: str, text: str, file: str, name: str, function: str, old: str, new: str, why: str = ""
) -> Bug:
    source = (ROOT / file).read_text()
    first, last = _lines_of(source, function)
    lines = source.splitlines(True)
    body = "".join(lines[first:last])
    if body.count(old) != 1:
        raise ValueError(f"{name}: {function} holds {old!r} {body.count(old)} times")
    start = first + body[: body.index(old)].count("\n") + 1
    end = start + old.rstrip("\n").count("\n")
    planted = "".join([*lines[:first], body.replace(old, new), *lines[last:]])
    return Bug(table, f"{file}: {name}", file, start, end, planted, text, why)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


_parse = functools.cache(ast.parse)


def _lines_of(source: str, name: str) -> tuple[int, int]:
    """Return the lines of a function or `Class.method`; without a name, those of the file."""
    scope: Any = _parse(source)
    for part in filter(None, name.split(".")):
        scope = next(x for x in scope.body if getattr(x, "name", None) == part)
    return (scope.lineno - 1, scope.end_lineno) if name else (0, len(source.splitlines()))


def drawn(n: int, seed: int) -> Iterator[Bug]:
    """Draw changes at n places of the product, in code that has an effect."""
    from cosmic_ray.commands.init import _all_work_items
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    places: dict[tuple[str, Any, Any], list[Any]] = {}
    for path in (
        path for x in ("fastformer", "kernels") for path in sorted((ROOT / x).rglob("*.py"))
    ):
        file, ignored = path.relative_to(ROOT).as_posix(), _without_effect(path.read_text())
        for item in _all_work_items([path], {}):
            (change,) = item.mutations
            if change.start_pos[0] not in ignored and not any(
                name in change.operator_name for name in NO_OPERATORS
            ):
                places.setdefault((file, change.start_pos, change.end_pos), []).append(change)
    choose = random.Random(seed)
    for file, start, end in choose.sample(sorted(places), n):
        change = choose.choice(places[file, start, end])
        operator = get_operator(change.operator_name)(**change.operator_args)
        source = (ROOT / file).read_text()
        planted = mutate_code(source, operator, change.occurrence)
        old, new = (text.splitlines()[start[0] - 1].strip() for text in (source, planted))
        name = f"{file}:{start[0]}: {old}  ->  {new}"
        yield Bug(f"drawn with seed {seed}", name, file, start[0], end[0], planted, _digest(name))


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


# ------------------------------------------------------------------------------ which tests to run


def function_of(case: str) -> str:
    return case.partition("[")[0]


class Tests:
    """The cases that `pytest` runs with the lines that they execute, and those that --all adds."""

    def __init__(
        self, recorded: Iterable[dict[str, Any]], chosen: re.Pattern[str], verdicts: Verdicts
    ) -> None:
        self.all: list[str] = []
        self.default: dict[str, dict[str, Any]] = {}  # case: seconds, elsewhere, lines by file
        for of_file in recorded:
            self.all += filter(chosen.search, of_file["all"])
            self.default |= {x: y for x, y in of_file["default"].items() if chosen.search(x)}
        self.before = {name: v["tests"] for table in verdicts.values() for name, v in table.items()}
        self.seen = defaultdict[str, Counter[str]](Counter)  # bugs, by file and function
        for name, functions in self.before.items():
            self.seen[name.partition(":")[0]].update(functions)
        self.executing: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for case, of_case in self.default.items():
            for file, lines in of_case["lines"].items():
                for line in lines:
                    self.executing[file][line].append(case)

    def of(self, bug: Bug) -> list[list[str]]:
        """Return the cases of each of the three steps. On a line that runs when a module is
        imported all tests depend.
        """
        if bug.table == "sharding":  # whose tests run the code in several processes
            found = {x for x in self.all if x.startswith("tests/distributed/")}
            return [sorted(found & {*self.default}), [], sorted(found - {*self.default})]
        lines, in_functions = _statements((ROOT / bug.file).read_text(), bug.first, bug.last)
        found = {case for line in lines for case in self.executing[bug.file][line]}
        if not in_functions or not found:
            found = {*self.default}
        of_kernels = "gluon" if "/gluon/" in bug.file else "ops"
        named = of_kernels if bug.file.startswith("kernels/") else bug.file.split("/")[1]
        folder = f"tests/{named}/"
        folder = folder if (ROOT / folder).exists() else "tests/"
        near = {case for case in found if case.startswith(folder)}
        far = {case for case, x in self.default.items() if x["elsewhere"]} | found - near
        files = {case.partition("::")[0] for case in found}
        more = {case for case in self.all if case.partition("::")[0] in files} - {*self.default}
        return [sorted(near), sorted(far), sorted(more)]

    def groups(self, cases: Iterable[str], bug: Bug) -> list[list[str]]:
        """Return the cases of each function: first those that saw the bug before, then those that
        saw most other bugs of the file, and of two the one that takes less time.
        """
        groups, seconds = defaultdict[str, list[str]](list), defaultdict[str, float](float)
        for case in cases:
            groups[function_of(case)].append(case)
            seconds[function_of(case)] += self.default.get(case, {"seconds": 1})["seconds"]
        before, others = self.before.get(bug.name, ()), self.seen[bug.file]
        order = sorted(groups, key=lambda x: (x not in before, -others[x], seconds[x]))
        return [groups[function] for function in order]


def _statements(source: str, first: int, last: int) -> tuple[set[int], bool]:
    """Return the lines of the statements that hold lines, of a compound one those of its head, and
    whether they stand in a function.
    """
    lines, bodies = {*range(first, last + 1)}, set[int]()
    node: Any
    for node in ast.walk(_parse(source)):
        end = getattr(node, "end_lineno", 0) + 1
        if isinstance(node, ast.FunctionDef):
            bodies |= {*range(node.body[0].lineno, end)}
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            of_node = range(node.lineno, body[0].lineno if body else end)
            if of_node.start <= last and first < of_node.stop:
                lines |= {*of_node}
    return lines, {*range(first, last + 1)} <= bodies


# ----------------------------------------------------------------------- the process of a checkout


def in_fork(work: Callable[[], Iterable[Any]], limit: int = LIMIT) -> Iterator[Any]:
    """Yield what `work` yields in a forked process, until that ends, or takes more than `limit`
    seconds for one.
    """
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.setpgid(0, 0)
        try:
            with open(writer, "w") as answers:
                for found in work():
                    print(json.dumps(found), file=answers, flush=True)
        finally:
            os._exit(0)
    os.close(writer)

    def ended(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, ended)
    try:
        with open(reader) as answers:
            signal.alarm(limit)
            for line in iter(answers.readline, ""):
                signal.alarm(0)
                yield json.loads(line)
                signal.alarm(limit)
    except TimeoutError:
        pass
    finally:
        signal.alarm(0)
        for kill in (os.killpg, os.kill):  # the group also holds what the tests have started
            with contextlib.suppress(ProcessLookupError):
                kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


class Chosen:
    """A plugin of pytest that runs groups of cases, each until one fails. Without groups, each case
    that pytest has selected runs in a process of its own, which records what it executes.
    """

    def __init__(self, groups: Sequence[list[str]] | None) -> None:
        self.groups = groups
        self.failing = False
        self.answer: dict[str, Any] = {"failed": []}

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.answer["failed"].append(report.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failing |= report.failed

    @pytest.hookimpl(tryfirst=True, hookwrapper=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> Iterator[None]:
        self.items = {item.nodeid: item for item in items}
        yield

    def pytest_runtestloop(self, session: Any) -> bool:
        if self.groups is None:
            items = self.items.items()
            every = [case for case, item in items if not item.get_closest_marker("with_slow")]
            recorded = (functools.partial(self.recorded, x.nodeid) for x in session.items)
            default = {
                x.nodeid: next(in_fork(call), None) for x, call in zip(session.items, recorded)
            }
            self.answer |= {"all": every, "default": default}
            return True
        start, failed = time.monotonic(), self.answer["failed"]
        todo = [*filter(None, ([x for x in group if x in self.items] for group in self.groups))]
        while todo and len(failed) < MOST:
            for case, failing in in_fork(functools.partial(self.run, todo)):
                if failing:
                    break
                todo[0].remove(case)
                todo = [*filter(None, todo)]
                if time.monotonic() > start + (SOON if failed else LIMIT):
                    return True
            if todo:  # its first case has failed, crashed or taken too long
                case = todo[0].pop(0)
                if [*in_fork(functools.partial(self.run, [[case]]))] != [[case, False]]:
                    failed.append(case)
                    todo.pop(0)
                todo = [*filter(None, todo)]
        return True

    def run(self, groups: Iterable[Iterable[str]]) -> Iterator[tuple[str, bool]]:
        """Yield each case that was run, and whether it has failed, as the last one."""
        items = [self.items[case] for group in groups for case in group]
        for item, following in zip(items, [*items[1:], None]):
            self.failing = False
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            yield item.nodeid, self.failing
            if self.failing:
                break

    def recorded(self, case: str) -> Iterator[dict[str, Any]]:
        """Run a case, and yield its seconds, the lines that it executes, and whether it also runs
        other processes.
        """
        from coverage import Coverage

        start = time.monotonic()
        files = [f"{os.getcwd()}/{folder}/*" for folder in ("fastformer", "kernels")]
        coverage = Coverage(data_file=None, include=files)
        coverage.start()
        [(_, failing)] = self.run([[case]])
        coverage.stop()
        seconds, elsewhere = time.monotonic() - start, sum(os.times()[2:4]) > 0.1
        elsewhere |= case.startswith("tests/distributed/")
        data = coverage.get_data()
        lines = {os.path.relpath(file): data.lines(file) for file in data.measured_files()}
        yield dict(seconds=seconds, failing=failing, elsewhere=elsewhere, lines=lines)


def run_pytest(files: Sequence[str], groups: Any) -> Iterator[dict[str, Any]]:
    """Yield the answer of the plugin."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    plugin = Chosen(groups)
    status = pytest.main(["-p", "no:cacheprovider", "--tb=no", *files], plugins=[plugin])
    if status == pytest.ExitCode.USAGE_ERROR:  # a conftest.py cannot be imported
        plugin.answer["failed"].append("conftest.py")
    yield plugin.answer


def work() -> None:
    """Answer a `Worker`."""
    for name in IMPORTED:
        importlib.import_module(name)
    for n, line in enumerate(sys.stdin):
        file, planted, *given = json.loads(line)
        if file:
            path, before = Path(file), os.stat(file)
            original = path.read_text()
            path.write_text(planted)
            os.utime(file, (n, n))  # its bytecode is that of another time
        answer = in_fork(functools.partial(run_pytest, *given), 10 * LIMIT)
        print(json.dumps(next(answer, None)), flush=True)
        if file:
            path.write_text(original)
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


# ------------------------------------------------------------------------------------- the checkout


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE
    ).stdout


class Worker:
    """A copy of the files of the checkout that git does not ignore, and a process there."""

    def __init__(self, folder: Path) -> None:
        listed = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).exists():  # it may have been deleted and not committed
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        chosen = dict(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1", OPENBLAS_NUM_THREADS="1")
        environment = {
            **os.environ,
            **chosen,
            "PYTHONPATH": str(folder),
            "TMPDIR": str(folder.parent),
        }
        every = [sys.executable, "-P", "-m", "pytest", "-q", "--collect-only", "--all"]
        pipes: Any = dict(cwd=folder, env=environment, text=True, stdout=subprocess.PIPE)
        subprocess.run(every, **pipes)  # writes the bytecode
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        own = [sys.executable, "-P", "-m", "benchmarks.proof.mutation", "--work"]
        self.process = subprocess.Popen(own, stdin=subprocess.PIPE, **pipes)

    def ask(self, *question: Any) -> Any:
        """Return the answer to a file, its text with a bug, files of tests, what is `Chosen`."""
        assert self.process.stdin and self.process.stdout
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


def shared_files() -> Iterator[Path]:
    """Yield the files that tests depend on, other than their own."""
    yield ROOT / "conftest.py"
    for folder in ("benchmarks/proof", "fastformer", "kernels", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            if not path.name.startswith("test_") and path != Path(__file__):
                yield path


def record(file: Path, code: str, worker: Worker) -> dict[str, Any]:
    """Return the cases of a file of tests, and the lines that those that `pytest` runs execute."""
    name = file.relative_to(ROOT).as_posix()
    chosen = "".join((ROOT / "tests" / x).read_text() for x in ("killers.txt", "gpu.txt"))
    own = re.findall(rf"^{name}.*", chosen, re.M)
    known = RECORD / f"{file.stem}-{_digest(f'{code}{own}{file.read_text()}')}.json"
    if not known.exists():
        found = worker.ask("", "", [name], None)
        if found["failed"]:
            raise SystemExit(f"{name} cannot be imported")
        for case, of_case in found["default"].items():
            if of_case is None or of_case["failing"]:
                raise SystemExit(f"{case} fails without any bug")
        RECORD.mkdir(parents=True, exist_ok=True)
        known.write_text(json.dumps(found))
    return json.loads(known.read_text())


def attempt(bug: Bug, tests: Tests, commit: str, worker: Worker) -> dict[str, Any]:
    """Plant a bug, and return its verdict, with the test functions that fail."""
    start, verdict = time.monotonic(), "equivalent" if bug.equivalent else "unseen"
    failed = set[str]()
    steps = ("seen",) if bug.equivalent else ("seen", "seen", "seen with --all")
    for step, cases in zip(steps, tests.of(bug)):
        if cases and not failed:
            files = sorted({case.partition("::")[0] for case in cases})
            found = worker.ask(bug.file, bug.planted, files, tests.groups(cases, bug))
            failing = {*(found or {"failed": ["conftest.py"]})["failed"]}
            if failing and step != "seen":  # these cases have not run without the bug
                failing -= {*worker.ask("", "", files, [[case] for case in failing])["failed"]}
            failed = {*map(function_of, failing)}
            verdict = step if failed else verdict
    tests.seen[bug.file].update(failed)
    seconds = round(time.monotonic() - start, 1)
    return dict(
        text=bug.text, verdict=verdict, tests=sorted(failed), seconds=seconds, commit=commit
    )


def read() -> Verdicts:
    return json.loads(RESULT.read_text()) if RESULT.exists() else {}


def save(results: Verdicts) -> None:
    lines = (f"{json.dumps(table)}: {json.dumps(results[table])}" for table in sorted(results))
    RESULT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name in ("--only", "--tests"):
        parser.add_argument(name, type=re.compile, default=re.compile(""), metavar="REGEX")
    parser.add_argument("--draw", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--resume", action="store_true", help="try what has no verdict, or is unseen"
    )
    parser.add_argument("--alone", action="store_true", help="list what one function alone sees")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.work:
        work()
        return 0
    if arguments.alone:
        every = ((v["tests"], name) for table in read().values() for name, v in table.items())
        print(*sorted(f"{tests[0]}  {name}" for tests, name in every if len(tests) == 1), sep="\n")
        return 0
    bugs = [*(drawn(arguments.draw, arguments.seed) if arguments.draw else written())]
    results, before = read(), read()
    for table in {bug.table for bug in bugs}:
        texts = {bug.name: bug.text for bug in bugs if bug.table == table}
        known = results.get(table, {}).items()
        results[table] = {name: v for name, v in known if texts.get(name) == v["text"]}
    bugs = [bug for bug in bugs if arguments.only.search(f"{bug.table}: {bug.name}")]
    if arguments.resume:
        unseen = {"verdict": "unseen"}
        bugs = [x for x in bugs if results[x.table].get(x.name, unseen)["verdict"] == "unseen"]
    commit = _git("rev-parse", "--short", "HEAD").strip()
    if _git("status", "--porcelain", "--", ".", f":!{RESULT.relative_to(ROOT)}"):
        commit += "-dirty"
    code = "".join(path.read_text() for path in sorted(shared_files()))
    with (
        tempfile.TemporaryDirectory(prefix="mutation-") as scratch,
        ThreadPoolExecutor(arguments.workers) as pool,
    ):
        free = queue.SimpleQueue[Worker]()
        for worker in pool.map(Worker, (Path(scratch) / str(n) for n in range(arguments.workers))):
            free.put(worker)

        def one(call: Callable[..., Any], *given: Any) -> Any:
            worker = free.get()
            try:
                return call(*given, worker)
            finally:
                free.put(worker)

        files = sorted(ROOT.glob("tests/**/test_*.py"))
        recorded = pool.map(lambda file: one(record, file, code), files)
        tests = Tests(recorded, arguments.tests, before)
        done = {pool.submit(one, attempt, bug, tests, commit): bug for bug in bugs}
        try:
            for n, future in enumerate(as_completed(done), 1):
                bug, verdict = done[future], future.result()
                print(n, len(bugs), bug.table, bug.name, *verdict.values(), flush=True)
                results[bug.table][bug.name] = verdict
                save(results)
        finally:
            pool.shutdown(cancel_futures=True)
        for _ in range(arguments.workers):
            free.get().process.communicate()
    return int(any(results[bug.table][bug.name]["verdict"] == "unseen" for bug in bugs))


if __name__ == "__main__":
    sys.exit(main())
