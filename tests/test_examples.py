"""The examples run from a user's place, and fail where they do not do what they say."""

import os
import runpy
import subprocess
import sys
import warnings

import pytest

from benchmarks import ROOT, figures

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.stem)
def test_example(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        runpy.run_path(str(path), run_name="__main__")
    assert "difference" in capsys.readouterr().out


@pytest.mark.with_slow
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("parallel/*.py")), ids=lambda p: p.stem)
def test_parallel_example(path, tmp_path):
    """Two processes of torchrun."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(path)]
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", *words],
        cwd=tmp_path,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "difference" in done.stdout


def test_the_notebook_prints_what_the_page_shows():
    """But for the pictures, which hold times and depend on matplotlib's version."""
    page = figures.PAGE.read_text()
    notebook = figures.cells(page)
    figures.run(notebook)
    assert figures.page_with_outputs(page, notebook)[0] == page
