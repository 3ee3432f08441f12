"""The snippets of the README and of docs/ run and print what they promise, the examples run, the
README's commands are two, links lead somewhere.
"""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [
    pytest.param(snippet, id=f"{page.stem}-{i}")
    for page in PAGES
    for i, snippet in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


def test_two_commands():
    lines = re.search(r"```\n(.*?)```", PAGES[0].read_text(), re.DOTALL)[1].strip().splitlines()
    assert len(lines) == 2
    assert "fastformer copy-task" in lines[0] and lines[1].endswith("pytest")


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_run(snippet, capsys):
    exec(compile(snippet, "snippet", "exec"), {})
    printed = capsys.readouterr().out
    for promised in re.findall(r"print\(.*\) +# (.*)", snippet):
        assert promised in printed


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_run(path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [str(path), "2"])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target
