"""`pytest --benchmark-only` measures, benchmarks.report shows, benchmarks.gpu runs all on a GPU."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def folder(word: str) -> Path:
    """An argument of a command: a folder to write to, made where there is none."""
    path = Path(word)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{word} is no folder: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{word} cannot be written")
    return path
