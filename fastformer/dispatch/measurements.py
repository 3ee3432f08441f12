"""The measurements of this machine: read and write the file of `fastformer tune`.

    {"format": 1, "machines": [{
        "gpu": "NVIDIA H200", "driver": ..., "torch": ..., "triton": ..., "fastformer": ...,
        "classes": {"attention forward": {"bfloat16 D64 heads64 ...": {
            "choice": "128 64 8 3",
            "us": {"128 64 8 2": 105.2, "128 64 8 3": 97.0},
            "dropped": {"128 128 8 2": "it disagrees with the reference: ..."}}}}}]}

A file may hold several machines; measurements of another GPU or of other versions are not used.
The measurements in `SHIPPED` are the defaults for their GPUs. A file that cannot be used raises
nothing: it is ignored, and the reason is logged once.

The environment variable FASTFORMER_TUNING names a file to use instead of `default_path()`; with
"off", no measurements are read.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastformer import environment
from fastformer.dispatch.operation import OPERATIONS

FORMAT = 1
MACHINE = ("gpu", "driver", "torch", "triton", "fastformer")
_here = Path(__file__).resolve().parents[1]  # the package
# The folders of shipped measurements: in a wheel, and in a checkout.
SHIPPED = (_here / "measurements", _here.parent / "benchmarks" / "results" / "tuning")

_log = logging.getLogger("fastformer")


class Entry(NamedTuple):
    """The measurement of a class of calls.

    choice: the candidate that is used, or None if all of them were dropped.
    us: the microseconds of each candidate that was timed.
    dropped: the reason for each candidate that was dropped.
    """

    choice: str | None
    us: Mapping[str, float]
    dropped: Mapping[str, str]


Class = tuple[str, str]  # one of `kinds()`, and the calls: `Workload.key` or `TuningKey.case`
Entries = Mapping[Class, Entry]


def kinds() -> set[str]:
    """Return the names of all decisions by measurement: those in `tuned`, and which op runs."""
    return {*OPERATIONS}.union(*(operation.tuned for operation in OPERATIONS.values()))


def is_gluon(name: str) -> bool:
    """Return whether this name of a candidate holds the digest of a kernel in Gluon."""
    return " @" in name


def default_path() -> Path:
    """Return the file in this user's cache directory."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("fastformer", appauthor=False)) / "tuning.json"


def path() -> Path | None:
    """Return the file that measurements are read from and written to, or None for "off"."""
    chosen = os.environ.get("FASTFORMER_TUNING")
    if chosen == "off":
        return None
    return Path(chosen) if chosen else default_path()


def machine(device: torch.device) -> dict[str, Any] | None:
    """Return the facts that measurements depend on, by the names in MACHINE; None for a CPU."""
    if device.type != "cuda":
        return None
    facts = environment.describe(device)
    return {name: facts[name] for name in MACHINE}


# ----------------------------------------------------------------------------------------- reading


class Unusable(Exception):
    """Why a file cannot be read."""


def read(file: Path) -> list[dict[str, Any]]:
    """Return the machines of a file. Raises Unusable if `write` has not made it."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise Unusable(f"it cannot be read: {error}") from error
    if not isinstance(content, dict) or "format" not in content:
        raise Unusable("it is not a file of fastformer tune")
    if content["format"] != FORMAT:
        raise Unusable(f"its format is {content['format']!r}; expected {FORMAT}")
    machines = content.get("machines")
    if not isinstance(machines, list) or not all(isinstance(one, dict) for one in machines):
        raise Unusable("it has no list of machines")
    return machines


def entries(one: Mapping[str, Any]) -> dict[Class, Entry]:
    """Return the measurements of a machine. Raises Unusable if they are malformed."""
    found = {}
    try:
        for kind, cases in one["classes"].items():
            for case, entry in cases.items():
                us = {str(name): float(x) for name, x in entry["us"].items()}
                if not all(0 < x < math.inf for x in us.values()):
                    raise Unusable(f"a time of {kind}, {case}, is not positive")
                dropped = {str(name): str(reason) for name, reason in entry["dropped"].items()}
                choice = entry["choice"]
                if choice is not None and choice not in us:
                    raise Unusable(f"the choice of {kind}, {case}, was not timed")
                found[kind, case] = Entry(choice, us, dropped)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Unusable(f"its classes are broken: {error!r}") from error
    return found


def _difference(wanted: Mapping[str, Any], machines: list[dict[str, Any]], names: Any) -> str:
    """Return a message that compares the machines of a file with the wanted one."""
    held = {", ".join(f"{n} {one.get(n)}" for n in names) for one in machines}
    here = ", ".join(f"{n} {wanted[n]}" for n in names)
    return f"it was measured on {' and on '.join(sorted(held)) or 'nothing'}; this is {here}"


def _of_file(file: Path, here: Mapping[str, Any], shipped: bool) -> dict[Class, Entry]:
    """Return the measurements of a machine in a file; log the reason if there are none to use."""
    names = tuple(name for name in MACHINE if not (shipped and name == "driver"))
    try:
        machines = read(file)
        mine = [one for one in machines if all(one.get(n) == here[n] for n in names)]
        if not mine:
            if not shipped:  # most shipped files are for other GPUs
                raise Unusable(_difference(here, machines, names))
            return {}
        found = entries(mine[-1])
    except Unusable as error:
        _log.warning("the measurements in %s are ignored: %s", file, error)
        return {}
    unknown = sorted({kind for kind, _ in found} - kinds())
    if unknown:
        _log.warning("in %s the unknown %s are ignored", file, ", ".join(map(repr, unknown)))
    return {key: entry for key, entry in found.items() if key[0] not in unknown}


_known: dict[torch.device, dict[Class, Entry]] = {}
_chosen: dict[torch.device, dict[Class, str]] = {}
_one_reader = threading.Lock()


def measurements(device: torch.device) -> Entries:
    """Return the measurements of this machine, by class. The first call reads the files."""
    known = _known.get(device)
    if known is None:
        with _one_reader:
            known = _known.get(device)
            if known is None:
                known = _known[device] = _all(device)
    return known


def _all(device: torch.device) -> dict[Class, Entry]:
    file, found = path(), {}
    if file is None:
        return {}
    shipped = [f for folder in SHIPPED if folder.is_dir() for f in sorted(folder.glob("*.json"))]
    named = bool(os.environ.get("FASTFORMER_TUNING"))
    own = [file] if named or os.path.isfile(file) else []
    here = machine(device) if shipped or own else None
    if here is not None:
        for one in shipped:
            found.update(_of_file(one, here, True))
        for one in own:
            found.update(_of_file(one, here, False))
    return found


def choices(device: torch.device) -> Mapping[Class, str]:
    """Return the choice for each class that was measured on this machine."""
    chosen = _chosen.get(device)
    if chosen is None:
        known = measurements(device)
        chosen = {key: entry.choice for key, entry in known.items() if entry.choice is not None}
        _chosen[device] = chosen
    return chosen


def forget() -> None:
    """Forget what was read: the next use reads the files again."""
    with _one_reader:
        _known.clear()
        _chosen.clear()


# ----------------------------------------------------------------------------------------- writing


def measured(file: Path, here: Mapping[str, Any]) -> dict[Class, Entry]:
    """Return the measurements of a machine in a file; empty if the file cannot be used."""
    if not file.is_file():
        return {}
    try:
        mine = [one for one in read(file) if all(one.get(n) == here[n] for n in MACHINE)]
        return entries(mine[-1]) if mine else {}
    except Unusable:
        return {}


def write(file: Path, here: Mapping[str, Any], found: Entries) -> None:
    """Add measurements of a machine to a file. Other processes may do so at the same time.

    The measurements of other machines are kept; a file that cannot be used is replaced. The update
    is atomic: a reader sees the old file or the new one. Raises OSError if it cannot be written.
    """
    from filelock import FileLock

    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_name(file.name + ".lock")):
        try:
            machines = read(file)
        except Unusable:
            machines = []
        others = [one for one in machines if any(one.get(n) != here[n] for n in MACHINE)]
        classes: dict[str, dict[str, Any]] = {}
        for (kind, case), entry in sorted((measured(file, here) | dict(found)).items()):
            classes.setdefault(kind, {})[case] = entry._asdict()
        content = {"format": FORMAT, "machines": [*others, {**here, "classes": classes}]}
        descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as out:
                json.dump(content, out, indent=1)
                out.write("\n")
            os.replace(temporary, file)
        except BaseException:
            os.unlink(temporary)
            raise
