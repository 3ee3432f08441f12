"""The walks of docs/kernels.md: two lists name the files that a change touches, and no change needs
others.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest
from rehearsal_option import CHANGE

from benchmarks import ROOT

PATH = re.compile(r"`((?:fastformer|kernels|docs|tests|benchmarks)/[\w./<>]+)`")


def walk(title):
    """Return the paths that the numbered list under a heading names."""
    page = (ROOT / "docs" / "kernels.md").read_text()
    section = re.search(rf"^## {title}\n(.*?)(?=^##|\Z)", page, re.DOTALL | re.MULTILINE)[1]
    assert re.search(r"^1\. ", section, re.MULTILINE)
    return set(PATH.findall(section))


def test_the_walk_of_an_option_names_the_files_of_the_rehearsal():
    product = {p for p in walk("Add an option of attention") if p.split("/")[0] != "tests"}
    assert product == set(CHANGE) and len(CHANGE) <= 6


def test_an_option_takes_these_files(tmp_path):
    """In a copy of the package: both backends, gradients, shards, schema, measurement, explain."""
    pytest.importorskip("triton")
    for folder in ("fastformer", "kernels"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    (tmp_path / "docs").mkdir()
    for name, changes in CHANGE.items():
        text = (ROOT / name).read_text()
        for old, new in changes:
            assert old in text, f"{name}: {old}"
            text = text.replace(old, new, 1)
        (tmp_path / name).write_text(text)
    program = ROOT / "tests" / "rehearsal_option.py"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_the_walk_of_an_op_names_every_file_that_names_one():
    """But for the layers and models that call it."""
    named = walk("Add an op")
    callers = {"fastformer/nn/norms.py", "fastformer/nn/stream.py", "fastformer/nn/stacks.py"}
    callers |= {"fastformer/nn/transformer.py", "fastformer/training/training.py"}
    callers |= {"fastformer/drop_in/replacements/hugging_face.py", "fastformer/drop_in/patch.py"}
    for op, stem in (("dropout_add_rms_norm", "norms"), ("linear_cross_entropy", "loss")):
        found = {
            str(path.relative_to(ROOT))
            for folder in ("fastformer", "kernels")
            for path in (ROOT / folder).rglob("*.py")
            if re.search(rf"\b{op}\b", path.read_text())
        }
        found = {path if folder_of(path) != "kernels" else "kernels/<stem>.py" for path in found}
        found = {path.replace(f"ops/{stem}/", "ops/<family>/") for path in found}
        assert "fastformer/ops/<family>/record.py" in found
        assert found <= named | callers, found - named - callers


def folder_of(path):
    return path.split("/")[0]
