"""The selections of tests: tests/killers.txt and tests/gpu.txt name tests that exist, and those for
a GPU launch at most 400 kernels.
"""

import re
import subprocess
import sys

import pytest

from benchmarks import ROOT

LISTS = [ROOT / "tests" / name for name in ("killers.txt", "gpu.txt")]


def test_every_case_is_there(request):
    """In the files that this run has collected; the other files are there."""
    collected = request.config.collected
    for test in "".join(path.read_text() for path in LISTS).splitlines():
        file = test.partition("::")[0]
        assert test in collected.get(file, [test]) and (ROOT / file).exists(), test


@pytest.mark.with_all
def test_the_tests_of_a_gpu_launch_few_kernels():
    command = [sys.executable, "-P", "-m", "pytest", "-q", "--gpu"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 0 < int(re.search(r"(\d+) kernels were launched", done.stdout)[1]) <= 400
