"""The examples run from a user's place, and fail where they do not do what they say."""

import ast
import os
import random
import re
import runpy
import subprocess
import sys
import warnings

import pytest

from benchmarks import ROOT, figures

EXAMPLES = ROOT / "examples"


TRANSLATION = EXAMPLES / "translation.py"


@pytest.mark.parametrize(
    "path", sorted({*EXAMPLES.glob("*.py")} - {TRANSLATION}), ids=lambda p: p.stem
)
def test_example(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        runpy.run_path(str(path), run_name="__main__")
    assert "difference" in capsys.readouterr().out


SMALL = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
"""
ONES, TENS = SMALL.split()[:20], SMALL.split()[20:]


def in_words(n):
    """1234 -> "one thousand two hundred and thirty four"."""
    if n < 20:
        return ONES[n]
    for unit, word, joint in ((1000, "thousand", " "), (100, "hundred", " and ")):
        if n >= unit:
            rest = joint + in_words(n % unit) if n % unit else ""
            return f"{in_words(n // unit)} {word}{rest}"
    return TENS[n // 10 - 2] + (" " + ONES[n % 10] if n % 10 else "")


def test_translation(tmp_path, monkeypatch, capsys):
    """Digits become the words of a number: at least 90% of numbers that were not trained."""
    numbers = random.Random(0).sample(range(10_000), 3000)
    files = {"digits": [" ".join(str(n)) for n in numbers], "words": [*map(in_words, numbers)]}
    for name, lines in files.items():
        (tmp_path / name).write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(TRANSLATION), *files])
    runpy.run_path(str(TRANSLATION), run_name="__main__")
    printed = capsys.readouterr().out
    assert f"{files['digits'][0]} -> " in printed and "BLEU = " in printed
    assert float(re.search(r"exact: ([\d.]+)%", printed)[1]) >= 90, printed


def test_the_translation_has_at_most_25_lines_of_its_own():
    """Without its docstring, its imports and blank lines; docs/training.md says how many."""
    text, own = TRANSLATION.read_text(), set()
    for node in ast.parse(text).body[1:]:
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            own |= set(range(node.lineno, node.end_lineno + 1))
    count = sum(bool(line.strip()) for i, line in enumerate(text.splitlines(), 1) if i in own)
    assert count <= 25
    assert f"in {count} lines" in (ROOT / "docs" / "training.md").read_text()


@pytest.mark.with_slow
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("parallel/*.py")), ids=lambda p: p.stem)
def test_parallel_example(path, tmp_path):
    """Two processes of torchrun."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    options = dict(env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(path)]
    command = [sys.executable, "-W", "error::UserWarning", *words]
    done = subprocess.run(command, cwd=tmp_path, timeout=600, **options)
    assert done.returncode == 0, done.stderr
    assert "difference" in done.stdout


def test_the_notebook_prints_what_the_page_shows():
    """But for the pictures, which hold times and depend on matplotlib's version."""
    page = figures.PAGE.read_text()
    notebook = figures.cells(page)
    figures.run(notebook)
    assert figures.page_with_outputs(page, notebook)[0] == page
