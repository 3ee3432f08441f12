"""`pytest --benchmark-only` measures, benchmarks.report tabulates, benchmarks.gpu runs on a GPU,
and benchmarks.proof checks without one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]  # of the checkout


def table(header: Sequence[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = ["| " + " | ".join(map(str, cells)) + " |" for cells in (header, *rows)]
    return [lines[0], "|" + "---|" * len(header), *lines[1:]]


def answer(*words: object, **environment: str) -> Any:
    """Run Python with these words, and return the JSON of the last line that it prints."""
    command, variables = [sys.executable, *map(str, words)], {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def folder(word: str) -> Path:
    """Read an argument of a command: a folder to write to, which is created if it is missing."""
    path = Path(word)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{word} is no folder: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{word} cannot be written")
    return path
