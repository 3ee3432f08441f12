"""The file of `fastformer tune`, in JSON: what was measured on one machine.

A file that cannot be used raises nothing: it is ignored, and the reason is logged.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
from pathlib import Path
from typing import NamedTuple

import torch

from fastformer import environment

_log = logging.getLogger("fastformer")


class Entry(NamedTuple):
    """What was measured for a call or a kernel."""

    choice: str | None  # the candidate that is used, or None for what is shipped
    us: dict[str, float]  # the microseconds of each candidate that was timed
    dropped: dict[str, str]  # the reason for each candidate that was dropped


def path() -> Path | None:
    """Return the file: that of FASTFORMER_TUNING, None if it is "off", or by default one in this
    user's cache directory.
    """
    import platformdirs

    cache = platformdirs.user_cache_dir("fastformer", appauthor=False)
    chosen = os.environ.get("FASTFORMER_TUNING") or Path(cache) / "tuning.json"
    return None if chosen == "off" else Path(chosen)


def read(file: Path | None, here: str | None) -> dict[str, Entry]:
    """Return the measurements of a machine in a file, by the name of a call or of a `TuningKey`;
    empty if it cannot be used.
    """
    if file is None or here is None or not file.exists():
        return {}
    try:
        ((there, content),) = json.loads(file.read_text(encoding="utf-8")).items()
        if there != here:
            raise ValueError(f"they are of {there}; this is {here}")
        found = {name: Entry(**x) for name, x in content.items()}
        for choice, us, _ in found.values():
            if choice not in (None, *us) or not all(0 < x < math.inf for x in us.values()):
                raise ValueError(f"the choice is {choice} of {us}")
    except (AttributeError, OSError, RecursionError, TypeError, ValueError) as error:
        _log.warning("the measurements in %s are ignored: %s", file, error)
        return {}
    return found


def write(file: Path, here: str, found: dict[str, Entry]) -> None:
    """Add measurements of a machine to a file. A reader sees the old file or the new one. One that
    cannot be used, as that of another machine, is replaced. Raises OSError if that fails.
    """
    known = sorted((read(file, here) | found).items())
    text = json.dumps({here: {name: entry._asdict() for name, entry in known}}, indent=1)
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text(text + "\n", encoding="utf-8")
    os.replace(new, file)


@functools.cache
def measurements(device: torch.device) -> dict[str, Entry]:
    """Return the measurements of this machine. The first call reads the file."""
    return read(path(), environment.machine(device))
