"""Which tests execute which lines: recorded by a pytest plugin, and looked up.

    LINES_OF=a.py:b.py LINES_IN=folder pytest -p benchmarks.proof.mutation_lines

Each test adds a line {"test", "seconds", "lines": [[file, line], ...]} to a file in the folder.
The processes that a test starts count as part of it: a sitecustomize.py that the plugin writes, and
that Python runs on its own, calls `start` in them.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from benchmarks import ROOT

SITE = "from benchmarks.proof.mutation_lines import start\n\nstart()\n"
ENOUGH = 150.0  # CPU seconds of tests for a mutant, by default

# ---------------------------------------------------------------------------------------- to record

seen: set[tuple[str, int]] = set()


def start() -> None:
    """Trace this process, and write each line that it executes first at once: a process may end
    in any way. PYTEST_CURRENT_TEST, which it inherits, names the test.
    """
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if not test:  # a worker of pytest itself
        return
    log = os.open(_folder() / "children", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def record(file: str, line: int) -> None:
        os.write(log, (json.dumps({"test": test, "lines": [[file, line]]}) + "\n").encode())

    trace(record)


def trace(record: Callable[[str, int], None]) -> None:
    def of(file: str) -> Callable[..., Any]:
        def line(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
            place = (file, frame.f_lineno)
            if place not in seen:
                seen.add(place)
                record(*place)
            return line

        return line

    files = os.environ["LINES_OF"].split(":")
    tracers = {str(Path(file).resolve()): of(file) for file in files}

    def call(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        return tracers.get(frame.f_code.co_filename)

    threading.settrace(call)
    sys.settrace(call)


def pytest_configure(config: pytest.Config) -> None:
    site = _folder() / "site"
    site.mkdir(parents=True, exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE)
    path = site, ROOT, os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = ":".join(map(str, path))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    seen.clear()
    started = sum(os.times()[:4])  # CPU seconds, those of the processes that have ended too
    trace(lambda file, line: None)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        seconds = sum(os.times()[:4]) - started
        found = {"test": item.nodeid, "seconds": round(seconds, 3), "lines": sorted(seen)}
        with (_folder() / f"{os.getpid()}").open("a") as log:
            print(json.dumps(found), file=log)


def _folder() -> Path:
    return Path(os.environ["LINES_IN"])


# --------------------------------------------------------------------------------------- to look up


class Executed:
    """The tests that execute a line, of a folder that the plugin has filled."""

    def __init__(self, folder: Path) -> None:
        self._seconds: dict[str, float] = {}
        self._tests: dict[tuple[str, int], set[str]] = defaultdict(set)
        for path in folder.iterdir():
            for text in path.read_text().splitlines() if path.is_file() else ():
                found = json.loads(text)
                self._seconds.setdefault(found["test"], 0.0)
                self._seconds[found["test"]] += found.get("seconds", 0.0)
                for file, line in found["lines"]:
                    self._tests[file, line].add(found["test"])

    def tests(self, file: str, lines: range, enough: float = ENOUGH) -> list[str]:
        """Return the tests that execute one of the lines, without the slowest where all are more
        than `enough`: first the quickest of each test function, then the second of each.
        """
        found = set().union(*(self._tests.get((file, line), ()) for line in lines))
        turn: Counter[str] = Counter()
        order, seconds = [], 0.0
        for test in sorted(found, key=lambda test: (self._seconds[test], test)):
            seconds += self._seconds[test]
            if order and seconds > enough:
                break
            function = test.partition("[")[0]
            order.append((turn[function], self._seconds[test], test))
            turn[function] += 1
        return [test for *_, test in sorted(order)]


@functools.cache
def code_lines(source: str) -> set[int]:
    """Return the lines on which a statement or an expression begins, docstrings aside."""
    tree = ast.parse(source)
    texts = {
        node.value.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return {node.lineno for node in ast.walk(tree) if hasattr(node, "lineno")} - texts


def statement_lines(source: str, line: int) -> range:
    """Return the lines of the statement that holds a line; of a compound statement its header; of
    what runs at import, a default or the body of a class, the function or the class.
    """
    node: Any = ast.parse(source)
    scope = node
    while True:
        inner = [s for s in _statements(node) if s.lineno <= line <= s.end_lineno]
        if not inner:
            break
        (node,) = inner
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            scope = node
    if node is scope or isinstance(scope, ast.ClassDef):
        return range(scope.lineno, scope.end_lineno + 1)
    first: int = min((s.lineno for s in _statements(node)), default=node.end_lineno + 1)
    return range(node.lineno, max(first, node.lineno + 1))


def _statements(node: ast.AST) -> list[Any]:
    """Return the statements in a compound statement, in each of its branches."""
    found: list[Any] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            found.append(child)
        elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
            found += _statements(child)
    return found
