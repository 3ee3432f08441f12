"""The README's snippets run, its commands are two, its links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.S)


def test_two_commands():
    lines = re.search(r"```\n(.*?)```", TEXT, re.S)[1].strip().splitlines()
    assert len(lines) == 2
    assert "fastformer copy-task" in lines[0] and lines[1].endswith("pytest")


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippets_run(snippet, capsys):
    exec(compile(snippet, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    for promised in re.findall(r"print\(.*\) +# (.*)", snippet):
        assert promised in printed


def test_the_report_is_what_accelerate_prints():
    (snippet,) = (s for s in SNIPPETS if "ff.accelerate" in s)
    names = {}
    exec(snippet.split("src, tgt")[0], names)
    assert f"```\n{names['report']}\n```" in TEXT


def test_links():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert "://" in target or (ROOT / target).exists(), target
