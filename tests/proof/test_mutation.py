"""The bugs of tests/bugs/ can be planted and have verdicts; the runner names tests that fail."""

import json
import subprocess
import sys

import pytest

from benchmarks import ROOT
from benchmarks.proof import mutation

CODE = """
def double(x):
    return 2 * x
"""
CASES = """
import os
import pytest
from code_under_test import double

CALLS = []

@pytest.mark.parametrize("x", [0, 1, 2])
def test_double(x):
    assert double(x) == x + x

def test_that_passes():
    CALLS.append(1)

def test_that_ends_the_process():
    if double(1) != 2:
        os._exit(0)

@pytest.mark.parametrize("x", [1, 0, 2])
def test_behind_others(x):
    assert double(x) == 2 * x or x == 1 and not CALLS
    CALLS.append(1)
"""


def test_the_runner_names_the_cases_that_fail(tmp_path):
    """Of each function the first; also behind one that ends its process, and in another file. One
    that fails behind others alone does not count, but the rest of its function does.
    """
    (tmp_path / "conftest.py").write_text("import code_under_test")
    (tmp_path / "code_under_test.py").write_text(CODE)
    files = "test_code.py", "test_other.py"
    groups = []
    for file in files:
        (tmp_path / file).write_text(CASES)
        groups += [[f"{file}::test_double[{x}]" for x in range(3)], [f"{file}::test_that_passes"]]
        groups += [[f"{file}::test_that_ends_the_process"]]
        groups += [[f"{file}::test_behind_others[{x}]" for x in (1, 0, 2)]]
    broken = "code_under_test.py", CODE.replace("2 * x", "3 * x")
    unreadable = "code_under_test.py", "def"
    changes = broken, unreadable, ("", "")
    questions = [json.dumps([*change, files, groups[:7]]) for change in changes]
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.proof.mutation", "--work"], input="\n".join(questions),
        cwd=tmp_path, env={"PYTHONPATH": f"{ROOT}:{tmp_path}"}, capture_output=True, text=True,
    )  # fmt: skip
    found = [json.loads(line)["failed"] for line in process.stdout.splitlines()]
    first = "test_double[1]", "test_that_ends_the_process", "test_behind_others[2]"
    expected = [f"test_code.py::{x}" for x in first] + [f"test_other.py::{x}" for x in first[:2]]
    assert found == [expected, ["conftest.py"], []], process.stderr
    assert (tmp_path / "code_under_test.py").read_text() == CODE


def test_statements():
    source = (
        "def f(x):\n    if (x\n        > 1):\n        return [x,\n                1]\n\n\nF = f(1)"
    )
    assert mutation._statements(source, 3, 3) == ({2, 3}, True)
    assert mutation._statements(source, 5, 5) == ({4, 5}, True)
    assert mutation._statements(source, 8, 8) == ({8}, False)


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
