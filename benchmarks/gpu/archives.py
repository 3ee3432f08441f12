"""Packs folders into one file: a run, to resume it, and Triton's cache of compiled kernels, to copy
it from one machine to another.

A cache fits one kind of machine: Triton's keys contain the hash of its own library, which differs
by version and by Python version, and kernels are compiled for one architecture. The archive stores
the kind, and other kinds are refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

from benchmarks import ROOT

ABOUT = "about.json"  # the member that says what the archive is


class Refused(ValueError):
    """An archive that cannot be used, and why, in one line."""


def pack(folder: Path, file: Path, about: dict[str, Any]) -> int:
    """Write all files of the folder into one, in one step. Return their number."""
    whole = file.with_name(file.name + ".tmp")
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr(ABOUT, json.dumps(about))
        for path in paths:
            archive.write(path, path.relative_to(folder))
    whole.replace(file)
    return len(paths)


def check(file: Path, about: dict[str, Any]) -> None:
    """Raise Refused unless the file is a complete archive that was packed with `about`."""
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
            found = json.loads(archive.read(ABOUT))
    except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, EOFError) as error:
        raise Refused(f"{file} is not a complete archive of benchmarks.gpu: {error}") from None
    except OSError as error:
        raise Refused(f"{file} cannot be read: {error.strerror}") from None
    if damaged:
        raise Refused(f"{file} is damaged at {damaged}")
    for name, expected in about.items():
        if found.get(name) != expected:
            given = found.get(name, "another")
            raise Refused(f"{file} is of {name} {given}; expected {expected}")


def unpack(file: Path, folder: Path) -> None:
    """Extract the archive. The groups of a Triton cache receive the paths of this machine."""
    with zipfile.ZipFile(file) as archive:
        members = [name for name in archive.namelist() if name != ABOUT]
        archive.extractall(folder, members)
    for group in folder.rglob("__grp__*.json"):
        names = json.loads(group.read_text())["child_paths"]
        paths = {name: str(group.resolve().with_name(name)) for name in names}
        group.write_text(json.dumps({"child_paths": paths}))


RUN = {"what": "run of benchmarks.gpu"}


def kernels() -> dict[str, Any]:
    """Describe the cache that this process can use, by its Triton and its GPU."""
    import torch
    import triton
    from triton.runtime.cache import triton_key

    major, minor = torch.cuda.get_device_capability()
    return {
        "what": "cache of compiled kernels",
        "architecture": f"sm_{major}{minor}",
        "triton": triton.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "triton key": hashlib.sha256(triton_key().encode()).hexdigest()[:16],
    }


def kind(environment: dict[str, str]) -> dict[str, Any]:
    """Describe the cache that processes with this environment can use. Raises Refused if there is
    none.
    """
    script = (
        "import json; from benchmarks.gpu import archives; print(json.dumps(archives.kernels()))"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Refused(f"there is no GPU to compile kernels for: {reason}")
    return json.loads(done.stdout.splitlines()[-1])


def writable(file: Path) -> None:
    """Raise Refused if the file cannot be written."""
    if file.is_dir():
        raise Refused(f"{file} is a folder; expected a file")
    if not file.parent.is_dir():
        raise Refused(f"{file} is in a folder that does not exist")
    if not os.access(file.parent, os.W_OK):
        raise Refused(f"{file} cannot be written")
