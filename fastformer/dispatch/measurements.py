"""The measurements of this machine: the classes of calls, and the file of `fastformer tune`.

    {"format": 2, "machines": [{
        "gpu": "NVIDIA H200", "driver": ..., "torch": ..., "triton": ..., "fastformer": ...,
        "classes": {"attention forward": {"bfloat16 D64 heads64 ...": {
            "choice": "128 64 8 3",
            "us": {"128 64 8 2": 105.2, "128 64 8 3": 97.0},
            "dropped": {"128 128 8 2": "it disagrees with the reference: ..."}}}}}]}

A file may hold several machines; measurements of another GPU or of other versions are not used. A
file that cannot be used raises nothing: it is ignored, and the reason is logged once. The
environment variable FASTFORMER_TUNING names a file to use instead of `default_path()`; with "off",
no measurements are read.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer import environment
from fastformer.description import Attention, next_power_of_2
from fastformer.dispatch.operation import Arguments
from fastformer.mask_tiles import COLUMNS, ROWS, block_mask, tile_elements, tile_slots

FORMAT = 2
BLOCKS = "mask_spans", "mask_lists", "mask_bits"
MACHINE = ("gpu", "driver", "torch", "triton", "fastformer")

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


Class = tuple[str, str]  # (an op, `class_of`), or (a kernel, `TuningKey.case`)
Entries = Mapping[Class, Entry]


# ------------------------------------------------------------------------------- classes of calls

# Arguments that do not change which candidate is the fastest.
ROW_DIMS = "0123456789"
_LEFT_OUT = ("dropout_seed", "shard", "return_lse", "eps", "scale")


def is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def flat(arguments: Arguments) -> Arguments:
    """Return the arguments of a checked call with the fields of `Attention` beside the others."""
    fields = dict(arguments)
    attention = fields.pop("attention", None)
    return fields if attention is None else fields | attention._asdict()


def class_of(op: str, arguments: Arguments) -> str | None:
    """Return the name of the class of a checked call: its dtype, and of each argument its value, or
    its shape with sizes rounded up to powers of two. None if it is float64 or has an empty tensor.
    """
    fields = flat(arguments)
    tensors = [x for x in fields.values() if isinstance(x, Tensor)]
    dtype = next(x.dtype for x in tensors if is_floating(x))
    if dtype == torch.float64 or not all(x.numel() for x in tensors):
        return None
    dims = {}
    parts = [str(dtype).removeprefix("torch.")]
    for name, x in fields.items():
        if name in _LEFT_OUT:
            continue
        if isinstance(x, Tensor):
            parts.append(f"{name}={_layout(x, dims.get(name, ''), dtype)}")
        elif x:
            parts.append(name if isinstance(x, (bool, float)) else f"{name}={_rounded(x)}")
    return " ".join(parts + ["backward"] * differentiated(arguments))


def _rounded(x: Any) -> str:
    if isinstance(x, (tuple, list)):
        return "x".join(map(_rounded, x))
    return str(next_power_of_2(x) if isinstance(x, int) and x > 0 else x)


def _layout(x: Tensor, dims: str, dtype: torch.dtype) -> str:
    """Return a shape, whose leading dimensions are one if they are rows, the order of the
    dimensions in memory if it is another one, and the dtype if it is another floating one.
    """
    rows = sum(letter in ROW_DIMS for letter in dims)
    shape = [math.prod(x.shape[:rows])] * (rows > 0) + list(x.shape[rows:])
    order = "".join(map(str, sorted(range(x.dim()), key=lambda i: -x.stride()[i])))
    is_other = x.is_floating_point() and x.dtype != dtype
    parts = ["" if x.is_contiguous() else order, str(x.dtype)[6:] if is_other else ""]
    return ":".join([_rounded(shape), *filter(None, parts)])


def differentiated(arguments: Arguments) -> bool:
    """Return whether a call will have a backward."""
    tensors = (x for x in arguments.values() if isinstance(x, Tensor))
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def changed(arguments: Arguments, change: Callable[[str, Any], Any]) -> Arguments:
    """Return the arguments with each one, and each field of `Attention`, replaced."""
    return {
        name: Attention(*map(change, x._fields, x)) if isinstance(x, Attention) else change(name, x)
        for name, x in arguments.items()
    }


def leaf(name: str, x: Any) -> Any:
    """Return a tensor without its graph, which requires a gradient if x will get one."""
    if not isinstance(x, Tensor):
        return x
    return x.detach().requires_grad_(x.requires_grad and torch.is_grad_enabled())


def cut(op: str, arguments: Arguments, queries: int, keys: int) -> Arguments:
    """Return a part of a call for which the float64 reference fits in memory: its first two
    sequences, with at most these lengths, its first 496 rows, or the first sequence of a packed
    batch. The sharding rule of the op names the dimensions.
    """
    fields = flat(arguments)
    dims = {}
    tensors = [(name, x) for name, x in fields.items() if isinstance(x, Tensor)]
    sizes = {d: n for name, x in tensors for d, n in zip(dims.get(name, ""), x.shape)}
    most, rows = dict(b=2, q=queries, k=keys), 496
    for digit in sorted(sizes.keys() & {*ROW_DIMS}, reverse=True):
        most[digit] = max(1, rows)
        rows //= min(most[digit], sizes[digit])
    first = {}  # the tokens of the first sequence of a packed batch
    if fields.get("cu_seqlens_q") is not None:
        first = {side: int(fields[f"cu_seqlens_{side}"][1]) for side in "qk"}
    blocks: dict[str, Tensor] = {}
    if fields.get("mask_spans") is not None:
        spans, lists, bits = (fields[name] for name in BLOCKS)
        full = [fields[name].shape[0 if first else 2] for name in ("query", "key")]
        q, k = first.values() if first else (min(queries, full[0]), min(keys, full[1]))
        slots = tile_slots(spans, lists, *full)[:2, :, : -(-q // ROWS), : -(-k // COLUMNS)]
        blocks = dict(zip(BLOCKS, block_mask(tile_elements(bits, slots)[..., :q, :k]).tensors))

    def smaller(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if name in blocks:
            return blocks[name]
        if first and name.startswith("cu_seqlens"):
            return x[:2]
        if first and name in ("query", "key", "value", "bias"):
            return leaf(name, x[: first["q" if name == "query" else "k"]])
        if first and name == "alibi_slopes":
            return x[:1] if x.dim() == 2 else x
        for i, d in enumerate(dims.get(name, "")):
            x = x.narrow(i, 0, min(x.shape[i], most.get(d, x.shape[i])))
        return x.clamp(max=keys) if name == "key_lengths" else leaf(name, x)

    return changed(arguments, smaller)


def is_gluon(name: str) -> bool:
    """Return whether this name of a candidate holds the digest of a kernel in Gluon."""
    return " @" in name


# ---------------------------------------------------------------------------------------- the file


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


class Unusable(Exception):
    """Why a file cannot be read."""


def _machines(file: Path) -> list[dict[str, Any]]:
    """Return the machines of a file. Raises Unusable if `write` has not made it."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Unusable(f"it cannot be read: {error}") from error
    if not isinstance(content, dict) or "format" not in content:
        raise Unusable("it is not a file of fastformer tune")
    if content["format"] != FORMAT:
        found = f"its format is {content['format']!r}; expected {FORMAT}"
        raise Unusable(f"{found}: `fastformer tune` measures again")
    machines = content.get("machines")
    if not isinstance(machines, list) or not all(isinstance(one, dict) for one in machines):
        raise Unusable("it has no list of machines")
    return machines


def read(file: Path, here: Mapping[str, Any]) -> dict[Class, Entry]:
    """Return the measurements of a machine in a file. Raises Unusable if there are none."""
    machines = _machines(file)
    mine = [one for one in machines if all(one.get(n) == here[n] for n in MACHINE)]
    if not mine:
        held = {", ".join(f"{n} {one.get(n)}" for n in MACHINE) for one in machines}
        this = ", ".join(f"{n} {here[n]}" for n in MACHINE)
        measured_on = " and on ".join(sorted(held)) or "nothing"
        raise Unusable(f"it was measured on {measured_on}; this is {this}")
    found = {}
    try:
        for kind, cases in mine[-1]["classes"].items():
            for case, entry in cases.items():
                us = {str(name): float(x) for name, x in entry["us"].items()}
                dropped = {str(name): str(reason) for name, reason in entry["dropped"].items()}
                choice = entry["choice"]
                if not all(0 < x < math.inf for x in us.values()):
                    raise ValueError(f"a time of {kind}, {case}, is not positive")
                if choice is not None and choice not in us:
                    raise ValueError(f"the choice of {kind}, {case}, was not timed")
                found[kind, case] = Entry(choice, us, dropped)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Unusable(f"its classes are broken: {error!r}") from error
    return found


def measured(file: Path, here: Mapping[str, Any]) -> dict[Class, Entry]:
    """Return the measurements of a machine in a file; empty if the file cannot be used."""
    try:
        return read(file, here)
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
            machines = _machines(file)
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


# ------------------------------------------------------------------------------- what calls look up

_known: dict[torch.device, dict[Class, Entry]] = {}
_chosen: dict[torch.device, dict[Class, str]] = {}
_one_reader = threading.Lock()


def measurements(device: torch.device) -> Entries:
    """Return the measurements of this machine, by class. The first call reads the file."""
    known = _known.get(device)
    if known is None:
        with _one_reader:
            known = _known.get(device)
            if known is None:
                known = _known[device] = _usable(device)
    return known


def _usable(device: torch.device) -> dict[Class, Entry]:
    """Return the measurements of this machine; log why there are none."""
    file = path()
    if file is None or not (os.environ.get("FASTFORMER_TUNING") or os.path.isfile(file)):
        return {}
    here = machine(device)
    if here is None:
        return {}
    try:
        return read(file, here)
    except Unusable as error:
        _log.warning("the measurements in %s are ignored: %s", file, error)
        return {}


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
