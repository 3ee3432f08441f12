"""The selections of tests: tests/killers.txt and tests/gpu.txt name tests that exist, and those for
a GPU launch at most 400 kernels.
"""

import re
import subprocess
import sys

import pytest

from benchmarks import ROOT

LISTS = [ROOT / "tests" / name for name in ("killers.txt", "gpu.txt")]


def pytest_prints(*options):
    command = [sys.executable, "-P", "-m", "pytest", "-q", *options]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_function_is_there(path):
    for test in path.read_text().splitlines():
        file, function = test.partition("[")[0].split("::")
        assert f"def {function}(" in (ROOT / file).read_text(), test


@pytest.mark.with_all
def test_every_case_is_there():
    collected = {*pytest_prints("--all", "--slow", "--collect-only").splitlines()}
    for path in LISTS:
        assert {*path.read_text().splitlines()} <= collected


@pytest.mark.with_all
def test_the_tests_of_a_gpu_launch_few_kernels():
    printed = pytest_prints("--gpu")
    assert 0 < int(re.search(r"(\d+) kernels were launched", printed)[1]) <= 400
