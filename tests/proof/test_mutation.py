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

def half(x):
    return x / 2
"""
CASES = """
import os, pytest
from code_under_test import double, half

CALLS = []

@pytest.mark.parametrize("x", [0, 1, 2])
def test_double(x):
    assert double(x) == x + x

def test_half():
    assert half(2) == 1

def test_that_ends_the_process():
    if double(1) != 2:
        os._exit(0)

def test_that_another_makes_fail():
    CALLS.append(1)

def test_that_fails_behind_another():
    assert double(1) == 2 or not CALLS
"""


def test_the_runner_names_the_functions_that_fail(tmp_path):
    """Also behind one that ends its process; one that passes alone does not count."""
    (tmp_path / "code_under_test.py").write_text(CODE)
    (tmp_path / "test_code.py").write_text(CASES)
    groups = [[f"test_code.py::test_double[{x}]" for x in range(3)], ["test_code.py::test_half"]]
    others = "that_ends_the_process", "that_another_makes_fail", "that_fails_behind_another"
    groups += [[f"test_code.py::test_{name}"] for name in others]
    broken = "code_under_test.py", CODE.replace("2 * x", "3 * x")
    unreadable = "code_under_test.py", "def"
    changes = broken, unreadable, ("", "")
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.proof.mutation", "--work"],
        input="".join(json.dumps([*change, ["test_code.py"], groups]) + "\n" for change in changes),
        cwd=tmp_path, env={"PYTHONPATH": f"{ROOT}:{tmp_path}"}, capture_output=True, text=True,
    )  # fmt: skip
    found = [json.loads(line)["failed"] for line in process.stdout.splitlines()]
    double, ends = "test_code.py::test_double", "test_code.py::test_that_ends_the_process"
    assert found == [[double, ends], ["test_code.py"], []], process.stderr
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


def test_the_verdicts_are_of_these_bugs(bugs):
    """Each is seen, or its table says why it changes nothing."""
    verdicts = mutation.read()
    for table in {bug.table for bug in bugs}:
        of_table = {bug.name: bug for bug in bugs if bug.table == table}
        assert {name: v["text"] for name, v in verdicts[table].items()} == {
            name: bug.text for name, bug in of_table.items()
        }
        for name, verdict in verdicts[table].items():
            expected = ["equivalent"] if of_table[name].equivalent else ["seen", "seen with --all"]
            assert verdict["verdict"] in expected, name


def test_the_verdicts_name_tests_that_exist():
    for verdicts in mutation.read().values():
        for test in {test for verdict in verdicts.values() for test in verdict["tests"]}:
            file, _, function = test.partition("::")
            assert f"def {function}(" in (ROOT / file).read_text() or not function, test
