"""A pytest plugin that records the outcome of each test as soon as it ends, so that an interrupted
run keeps its outcomes, and the next run continues there.

    python -m pytest -p benchmarks.gpu.journal --journal FILE [--matching REGEX] [--shard 0/8] ...

It writes one JSON line for each event: the start of a test, then its outcome and the figures of a
benchmark. A test that has already started in FILE is deselected: if the same command runs again
after a crash, it continues with the test after the one that crashed. Processes that share the tests
take a shard each, or are those of pytest-xdist. Without a FILE the tests are chosen, and nothing is
written.
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

DEVICE_LOST = 75  # the exit status of a process that cannot use its GPU any more


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a journal, whose last line may be incomplete."""
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def begun(events: Iterable[dict[str, Any]]) -> set[str]:
    """Return the tests that started, without those that were interrupted when the time was up."""
    tests = set()
    for event in events:
        if "begun" in event:
            tests.add(event["begun"])
        tests.discard(event.get("cut", ""))
    return tests


class Journal:
    def __init__(self, path: Path | None, matching: str, shard: tuple[int, int]) -> None:
        self.done = begun(read(path)) if path else set()
        self.matching, self.shard = re.compile(matching), shard
        self.file = path.open("a") if path else None

    def wants(self, test: str) -> bool:
        part, parts = self.shard
        mine = zlib.crc32(test.encode()) % parts == part
        return mine and test not in self.done and self.matching.search(test) is not None

    def write(self, **event: Any) -> None:
        if self.file:
            print(json.dumps(event), file=self.file, flush=True)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        wanted = [item for item in items if self.wants(item.nodeid)]
        config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
        items[:] = wanted
        if "benchmarks.peers" in sys.modules:
            self.write(absent=sys.modules["benchmarks.peers"].ABSENT)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(begun=nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = yield
        if report.failed:
            reason = str(call.excinfo.value).strip() or call.excinfo.typename
            self.write(test=item.nodeid, outcome="failed", reason=reason[-500:])
        elif report.skipped:
            self.write(test=item.nodeid, outcome="skipped", reason=str(call.excinfo.value)[-500:])
        elif report.when == "call":
            benchmark = item.funcargs.get("benchmark")
            figures = {}
            if benchmark is not None and "ms" in benchmark.extra_info:
                figures = {"row": {"group": benchmark.group, **benchmark.extra_info}}
            self.write(test=item.nodeid, outcome="passed", **figures)
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        torch = sys.modules.get("torch")
        if not report.failed or torch is None or not torch.cuda.is_initialized():
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            pytest.exit(f"the GPU is lost to this process: {error}", DEVICE_LOST)


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--journal", type=Path, help="append the outcome of each test, as JSON lines")
    parser.addoption("--matching", default="", help="only the tests whose id matches this regex")
    parser.addoption("--shard", default="0/1", help="I/N: part I of N of the tests, counted from 0")


def pytest_configure(config: Any) -> None:
    path, matching = config.getoption("journal"), config.getoption("matching")
    starts_others = getattr(config.option, "numprocesses", None)
    if (path or matching) and not starts_others:
        part, parts = map(int, config.getoption("shard").split("/"))
        journal = Journal(path, matching, (part, parts))
        config.pluginmanager.register(journal, "the-journal")
