"""The path to a GPU, over a driver that starts nothing (benchmarks/stand_in)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import stand_in

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def driver(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("here is a GPU, with a driver of its own")
    reason = stand_in.obstacle()
    if reason is not None:
        pytest.skip(reason)
    return stand_in.build(tmp_path).parent


def test_a_launch_is_accepted(driver):
    """A process of its own: the interpreter, once chosen, holds for the whole process."""
    script = """
import pathlib, sys
import torch, fastformer
from benchmarks import stand_in
gpu = stand_in.install(pathlib.Path(sys.argv[1]))
fastformer.use_backend("triton")
x = torch.randn(8, 64, requires_grad=True)
fastformer.layer_norm(x, 64).sum().backward()
assert (gpu.launches, gpu.loaded, gpu.unloaded) == (2, 2, 0), (gpu.launches, gpu.loaded)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(driver / "cache")}
    command = [sys.executable, "-c", script, str(driver)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler" in stand_in.obstacle()
    with pytest.raises(RuntimeError, match="cannot be built: there is no C compiler"):
        stand_in.install(tmp_path)


def test_refused(driver):
    with pytest.raises(ValueError, match=r"capability is \(7, 0\); expected one of"):
        stand_in.install(driver, (7, 0))
    with pytest.raises(RuntimeError, match="Triton's interpreter is on"):
        stand_in.install(driver)
