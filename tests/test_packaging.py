"""What setup.py installs, and a checkout that is not installed. `.ci/packages` builds the sdist and
the wheel, and runs the command from each.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ROOT


def installed_packages(monkeypatch, folder):
    setuptools = pytest.importorskip("setuptools")
    given = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    monkeypatch.chdir(folder)
    runpy.run_path(str(ROOT / "setup.py"))
    return given["packages"]


def test_every_folder_of_modules_is_a_package(monkeypatch):
    found = {*installed_packages(monkeypatch, ROOT)}
    folders = {
        path.parent for top in ("fastformer", "kernels") for path in ROOT.glob(f"{top}/**/*.py")
    }
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert found == {n if n.startswith("fastformer") else f"fastformer.{n}" for n in names}


def test_checkout_that_is_not_installed(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r});"
        "import fastformer, fastformer.kernels as k; print(fastformer.__file__); print(k.__file__)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    package, kernels = map(Path, done.stdout.splitlines())
    assert package.parent == ROOT / "fastformer" and kernels.parent == ROOT / "kernels"
