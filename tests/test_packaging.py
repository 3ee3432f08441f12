"""kernels/ is imported as fastformer.kernels from a wheel, an editable install and a bare
checkout.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from benchmarks import ROOT

SHOW = (
    "import fastformer, fastformer.kernels as k; print(fastformer.__version__);"
    "print(fastformer.__file__); print(k.__file__);"
    "import importlib.util as u; print(u.find_spec('kernels'))"
)


def run(python, code, cwd, **environment):
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(
        [python, "-c", code], cwd=cwd, env=clean | environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def install(tmp_path, *how):
    """A fresh environment that sees this one's packages, with fastformer installed as told."""
    source = tmp_path / "source"
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    for name in files:
        roots = ("fastformer", "kernels", "setup.py", "pyproject.toml", "README.md")
        if name.split("/")[0] in roots:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    import torch

    here = Path(torch.__file__).parents[1]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps",
         "--no-index", "--no-build-isolation", *how, str(source)],
        check=True, env={**os.environ, "PYTHONPATH": str(here)},
    )  # fmt: skip
    # After the install, and after it on the path: only the dependencies come from here.
    (Path(site) / "zz_dependencies.pth").write_text(str(here))
    return python, source


def check_types(python, folder):
    """mypy finds the installed package by its environment, with the types of what it exports."""
    program = folder / "program.py"
    program.write_text(
        "import fastformer as ff\nreveal_type(ff.rate(1, 2, 3.0, 4))\nff.rate('a')\n"
    )
    words = ["--python-executable", str(python), "--cache-dir", str(folder / "mypy")]
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}
    skipped = ["--follow-imports=silent", "--config-file=", str(program)]
    result = subprocess.run(
        [sys.executable, "-m", "mypy", *words, *skipped],
        cwd=folder, env=clean, capture_output=True, text=True,
    )  # fmt: skip
    assert 'Revealed type is "float"' in result.stdout.replace("builtins.", ""), result.stdout
    assert "Missing positional arguments" in result.stdout, result.stdout
    assert "import-untyped" not in result.stdout and "import-not-found" not in result.stdout


@pytest.mark.parametrize("how", [pytest.param("wheel", marks=pytest.mark.with_all), "editable"])
def test_installed(tmp_path, how):
    pytest.importorskip("setuptools")
    python, source = install(tmp_path, *(["-e"] if how == "editable" else []))
    version, package, kernels, top_level = run(python, SHOW, tmp_path)
    import fastformer

    assert version == fastformer.__version__
    inside = source if how == "editable" else tmp_path / "venv"
    assert Path(package).is_relative_to(inside) and Path(kernels).is_relative_to(inside)
    assert top_level == "None"  # a top-level package `kernels` would be Hugging Face's
    if how == "wheel":
        assert (Path(package).parent / "py.typed").is_file()
        assert not (Path(package).parent / "tests").exists()
    else:
        check_types(python, tmp_path)


def test_checkout_that_is_not_installed(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); " + SHOW
    _, package, kernels, _ = run(sys.executable, code, tmp_path)
    assert Path(package).parent == ROOT / "fastformer" and Path(kernels).parent == ROOT / "kernels"
