"""The bugs of tests/bugs/ can be planted and have verdicts; the runner names tests that fail."""

import pytest

from benchmarks import ROOT
from benchmarks.proof import mutation

CODE = """
def double(x):
    return 2 * x
"""
CASES = """
import os
import time
import pytest
from code_under_test import double

@pytest.mark.parametrize("x", [0, 1, 2])
def test_double(x):
    assert double(x) == x + x

def test_that_passes():
    pass

def test_that_ends_the_process():
    if double(1) != 2:
        os._exit(0)

def test_that_hangs():
    if double(1) != 2:
        time.sleep(600)
"""


def test_the_runner_names_the_cases_that_fail(tmp_path, monkeypatch):
    """Of each function the first; also one that ends its process, or hangs, and those behind it."""
    monkeypatch.setattr(mutation, "SILENCE", 5)
    (folder := tmp_path / "checkout").mkdir()
    (folder / "pytest.ini").write_text("[pytest]")
    (folder / "conftest.py").write_text("import code_under_test")
    for name in ("one", "two"):
        (folder / f"test_{name}.py").write_text(CASES)
    checkout, found = mutation.Checkout(folder), []
    for code in (CODE.replace("2 * x", "3 * x"), "def", CODE):
        checkout.write("code_under_test.py", code)
        found.append(
            checkout.failed("test_one.py") + checkout.failed("test_two.py", "-k", "double")
        )
    names = "test_double[1]", "test_that_ends_the_process", "test_that_hangs"
    seen = {*(f"test_one.py::{x}" for x in names), "test_two.py::test_double[1]"}
    assert [{*found[0]}, *found[1:]] == [seen, ["conftest.py"] * 2, []]


@pytest.fixture(scope="module")
def bugs():
    return [*mutation.written()]


def test_every_bug_can_be_planted(bugs):
    assert len({bug.name for bug in bugs}) == len(bugs)
    for bug in bugs:
        assert bug.planted != (ROOT / bug.file).read_text(), bug.name
        compile(bug.planted, bug.name, "exec")


def test_each_bug_was_tried_and_is_seen(bugs):
    """With its present text; or its table says why it changes nothing."""
    results = mutation.read()
    tables = [table for table in results if not table.startswith("drawn")]
    assert {(bug.table, bug.name) for bug in bugs} == {(x, y) for x in tables for y in results[x]}
    for bug in bugs:
        verdict = results[bug.table][bug.name]
        assert verdict["text"] == bug.text, bug.name
        right = ["equivalent"] if bug.equivalent else ["seen", "seen with --all"]
        assert verdict["verdict"] in right, bug.name


def test_the_verdicts_name_tests_that_exist():
    for verdict in (v for verdicts in mutation.read().values() for v in verdicts.values()):
        assert bool(verdict["tests"]) == verdict["verdict"].startswith("seen"), verdict
        for test in verdict["tests"]:
            file, _, function = test.partition("::")
            assert f"def {function}" in (ROOT / file).read_text(), test
