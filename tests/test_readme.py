"""The snippets of the README and of docs/ run and print what their comments say, the README begins
with two commands, and every link has a target. docs/transformer.md is a notebook, which
tests/test_examples.py runs.
"""

import re

import pytest

from benchmarks import ROOT

PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG"))]
PAGES += sorted((ROOT / "docs").glob("*.md"))
SNIPPETS = [
    pytest.param(snippet, id=f"{page.stem}-{i}")
    for page in PAGES
    if page.name != "transformer.md"
    for i, snippet in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


def test_two_commands():
    lines = re.search(r"```\n(.*?)```", PAGES[0].read_text(), re.DOTALL)[1].strip().splitlines()
    assert len(lines) == 2
    assert "fastformer copy-task" in lines[0] and " pytest" in lines[1]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_run(snippet, capsys):
    exec(compile(snippet, "snippet", "exec"), {})
    printed = capsys.readouterr().out
    for promised in re.findall(r"print\(.*\) +# (.*)", snippet):
        assert promised in printed


def test_the_report_is_what_accelerate_prints():
    text = (ROOT / "docs" / "existing_models.md").read_text()
    snippet = re.search(r"```python\n(.*?ff\.accelerate.*?)```", text, re.DOTALL)[1]
    names = {}
    exec(snippet, names)
    assert f"```\n{names['report']}\n```" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target
