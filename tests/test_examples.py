"""The examples run from a user's place, and fail where they do not do what they say."""

import os
import subprocess
import sys

import pytest

from benchmarks import ROOT

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda p: p.stem)
def test_example(path, tmp_path, request):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "error::UserWarning", str(path)]
    if path.parent.name == "parallel":
        if not request.config.getoption("--slow"):
            pytest.skip("two processes of torchrun, which --slow runs")
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            str(path),
        ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "difference" in done.stdout
