"""Runs the tests that depend on what has changed since a commit.

    python tests/affected.py                    since the last commit
    python tests/affected.py --since main -x    since main; what it does not know goes to pytest
    python tests/affected.py --list             prints the files of these tests

A file depends on the files whose names it imports, uses as `ff.name` or writes (of a worker that it
starts, of a page, of data), and on what these depend on. The dispatch imports no kernel: a file
depends on the kernels that it imports and on those of the ops that it names.
"""

from __future__ import annotations

import argparse
import ast
import functools
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("fastformer", "kernels", "benchmarks", "tests", "examples")
OF_ALL = ("conftest.py", "pyproject.toml", "setup.py", "constraints.txt")


def changed(since: str) -> set[str]:
    """Return the files that differ from those of a commit, and those that git does not know."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=ROOT, text=True, capture_output=True)
        if done.returncode:
            raise SystemExit(done.stderr.strip())
        return done.stdout.splitlines()

    different = git("diff", "--name-only", "--relative", since)
    return {*different, *git("ls-files", "--others", "--exclude-standard")}


@functools.cache
def modules() -> dict[str, str]:
    """Return the Python files by the names under which they are imported."""
    found = {"fastformer_command": "fastformer_command.py"}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
            if folder == "tests":
                parts = parts[-1:]
            elif folder == "kernels":
                parts = ("fastformer", *parts)
            found[".".join(parts)] = path.relative_to(ROOT).as_posix()
    return found


@functools.cache
def public() -> dict[str, str]:
    """Return the module of each name that the package exports."""
    tree = ast.parse((ROOT / "fastformer" / "__init__.py").read_text())
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    return {alias.name: node.module or "" for node in imports for alias in node.names}


@functools.cache
def kernels() -> dict[str, str]:
    """Return the module of the kernels of each op."""
    import fastformer.ops.records  # noqa: F401 - registers the ops
    from fastformer.dispatch.operation import OPERATIONS

    return {op: f"fastformer.kernels.{record.kernel}" for op, record in OPERATIONS.items()}


def _named(file: str) -> Iterator[str]:
    """Yield the names of the modules that a file may import or use."""
    module = next(name for name, of in modules().items() if of == file)
    package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name != "fastformer")
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: 1 - node.level or None]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            names = [alias.name for alias in node.names]
            if base == "fastformer":
                yield from (public().get(name, f"fastformer.{name}") for name in names)
            else:
                yield from (base, *(f"{base}.{name}" for name in names))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ff":
            yield public().get(node.attr, f"fastformer.{node.attr}")
        name = getattr(node, "attr", getattr(node, "id", ""))
        if file.startswith("tests/") and name in kernels():
            yield kernels()[name]


@functools.cache
def uses(file: str) -> frozenset[str]:
    """Return the files that a Python file names."""
    found = {modules()[name] for name in _named(file) if name in modules()}
    for path in [*found]:  # of a folder of kernels, all files
        folder = path.removesuffix("__init__.py")
        if folder.startswith("kernels/") and folder.endswith("/") and folder != "kernels/":
            found |= {f for f in modules().values() if f.startswith(folder)}
    if file.startswith("fastformer/"):  # where the dispatch alone asks for kernels
        return frozenset(f for f in found - {file} if not f.startswith("kernels/"))
    if not file.startswith(("tests/", "benchmarks/")):
        return frozenset(found - {file})
    text = (ROOT / file).read_text()
    workers = (f for f in modules().values() if f.endswith("_worker.py"))
    return frozenset((found | {f for f in workers if Path(f).name in text}) - {file})


def depends(file: str) -> set[str]:
    """Return the files that a Python file depends on, itself among them."""
    found, left = {file}, [file]
    while left:
        new = uses(left.pop()) - found
        found |= new
        left += new
    return found


def affected(files: Iterable[str]) -> list[str]:
    """Return the files of tests that depend on any of these files."""
    files = set(files)
    tests = sorted(f for f in modules().values() if Path(f).name.startswith("test_"))
    if any(Path(file).name in OF_ALL for file in files):
        return tests
    others = {file for file in files if not file.endswith(".py")}

    def is_affected(test: str) -> bool:
        on = depends(test)
        if on & files:
            return True
        own = [f for f in on if f.startswith(("tests/", "benchmarks/"))]
        text = "".join((ROOT / file).read_text() for file in own if (ROOT / file).exists())
        return any(word in text for file in others for word in _words(Path(file)))

    return [test for test in tests if is_affected(test)]


def _words(path: Path) -> list[str]:
    """Return what a test writes that reads a page or data."""
    return [path.name, f'"{path.stem}"', *(f'"{folder}"' for folder in path.parts[:1])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--since", default="HEAD", metavar="COMMIT", help="the last one by default")
    parser.add_argument("--list", action="store_true", help="print the files and run nothing")
    options, words = parser.parse_known_args()
    tests = affected(changed(options.since))
    if options.list or not tests:
        print(*tests, sep="\n")
        return 0
    return subprocess.run([sys.executable, "-m", "pytest", *tests, *words], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
