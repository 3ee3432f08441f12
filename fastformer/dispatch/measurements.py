"""The file of `fastformer tune`: what was measured on this machine.

    {"NVIDIA H200, driver 570.1, torch 2.13.0, triton 3.7.1, fastformer 0.1.0": {
        "attention forward: bfloat16 D64 heads64 ...": {
            "choice": "128 64 8 3",
            "us": {"128 64 8 2": 105.2, "128 64 8 3": 97.0},
            "dropped": {"128 128 8 2": "it disagrees with the reference: ..."}}}}

A file that cannot be used raises nothing: it is ignored, and the reason is logged once. The
environment variable FASTFORMER_TUNING names a file to use instead of `default_path()`; with "off",
none is read.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer import environment
from fastformer.dispatch.operation import Arguments

_log = logging.getLogger("fastformer")


class Entry(NamedTuple):
    """What was measured for a call, or for a kernel.

    choice: the candidate that is used, or None for what is shipped.
    us: the microseconds of each candidate that was timed.
    dropped: the reason for each candidate that was dropped.
    """

    choice: str | None
    us: Mapping[str, float]
    dropped: Mapping[str, str]


Key = tuple[str, str]  # (an op, `call_name`), or (a kernel, `TuningKey.case`)
Entries = dict[Key, Entry]

# Arguments that do not change which candidate is the fastest.
_LEFT_OUT = ("dropout_seed", "return_lse", "eps", "scale")


def flat(arguments: Arguments) -> Arguments:
    """Return the arguments of a checked call with the fields of `Attention` beside the others."""
    fields = dict(arguments)
    attention = fields.pop("attention", None)
    return fields if attention is None else fields | attention._asdict()


def is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def call_name(arguments: Arguments) -> str:
    """Return the name of a checked call: its dtype, and the value of each argument, or its shape,
    its strides unless it is contiguous, and its dtype if it is another one.
    """
    fields = {name: x for name, x in flat(arguments).items() if name not in _LEFT_OUT}
    dtype = next(x.dtype for x in fields.values() if is_floating(x))
    parts = [_short(dtype)]
    for name, x in fields.items():
        if isinstance(x, Tensor):
            more = "" if x.is_contiguous() else ":" + _short(x.stride())
            more += "" if x.dtype == dtype else ":" + _short(x.dtype)
            parts.append(f"{name}={_short(x.shape)}{more}")
        elif x:
            parts.append(name if isinstance(x, (bool, float)) else f"{name}={_short(x)}")
    return " ".join(parts + ["backward"] * differentiated(arguments))


def _short(x: Any) -> str:
    return "x".join(map(str, x)) if isinstance(x, (tuple, list)) else str(x).removeprefix("torch.")


def differentiated(arguments: Arguments) -> bool:
    """Return whether a call will have a backward."""
    tensors = (x for x in flat(arguments).values() if isinstance(x, Tensor))
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def path() -> Path | None:
    """Return the file that measurements are read from and written to, or None for "off"."""
    chosen = os.environ.get("FASTFORMER_TUNING")
    if chosen == "off":
        return None
    return Path(chosen) if chosen else default_path()


def default_path() -> Path:
    """Return the file in this user's cache directory."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("fastformer", appauthor=False)) / "tuning.json"


def machine(device: torch.device) -> str | None:
    """Return the GPU and the versions that measurements depend on; None for a CPU."""
    if device.type != "cuda":
        return None
    facts = environment.describe(device)
    versions = [f"{n} {facts[n]}" for n in ("driver", "torch", "triton", "fastformer")]
    return ", ".join([str(facts["gpu"]), *versions])


def read(file: Path | None, here: str | None, tell: bool = False) -> Entries:
    """Return the measurements of a machine in a file; empty, and with `tell` one line in the log,
    if the file cannot be used.
    """
    if file is None or here is None:
        return {}
    try:
        machines = _machines(file)
        if here not in machines:
            raise ValueError(f"it holds {' and '.join(machines) or 'nothing'}; this is {here}")
        found = {_key(key): Entry(**x) for key, x in machines[here].items()}
        for entry in found.values():
            is_timed = entry.choice in (None, *entry.us) and isinstance(entry.dropped, dict)
            if not is_timed or not all(0 < us < math.inf for us in entry.us.values()):
                raise ValueError("its results are broken")
        return found
    except (AttributeError, OSError, RecursionError, TypeError, ValueError) as error:
        if tell:
            _log.warning("the measurements in %s are ignored: %s", file, error)
        return {}


def _machines(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text(encoding="utf-8"))
    return {name: x for name, x in content.items() if isinstance(x, dict)}


def _key(text: str) -> Key:
    kind, name = text.split(": ", 1)
    return kind, name


def write(file: Path, here: str, found: Entries) -> None:
    """Add measurements of a machine to a file. Other processes may do so at the same time.

    The measurements of other machines are kept; a file that cannot be used is replaced. A reader
    sees the old file or the new one. Raises OSError if it cannot be written.
    """
    from filelock import FileLock

    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_name(file.name + ".lock")):
        new = read(file, here) | found
        try:
            content = _machines(file)
        except (AttributeError, OSError, RecursionError, ValueError):
            content = {}
        content[here] = {": ".join(key): x._asdict() for key, x in sorted(new.items())}
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            text = json.dumps(content, indent=1) + "\n"
            (Path(folder) / file.name).write_text(text, encoding="utf-8")
            os.replace(Path(folder) / file.name, file)


_known: dict[torch.device, Entries] = {}
_torchs: dict[torch.device, frozenset[Key]] = {}


def measurements(device: torch.device) -> Entries:
    """Return the measurements of this machine. The first call reads the file, and logs why it
    cannot be used.
    """
    if device not in _known:
        file = path()
        exists = file is not None and (os.environ.get("FASTFORMER_TUNING") or file.is_file())
        _known[device] = read(file, machine(device), tell=True) if exists else {}
    return _known[device]


def choices(device: torch.device) -> dict[Key, str]:
    """Return what was chosen on this machine."""
    known = measurements(device).items()
    return {key: entry.choice for key, entry in known if entry.choice is not None}


def left_to_torch(device: torch.device) -> frozenset[Key]:
    """Return the calls for which torch's op was measured to be the fastest on this machine."""
    found = _torchs.get(device)
    if found is None:
        chosen = choices(device).items()
        found = _torchs[device] = frozenset(key for key, choice in chosen if choice == "torch")
    return found


def forget() -> None:
    """Forget what was read: the next use reads the file again."""
    _known.clear()
    _torchs.clear()
