"""The kernels of other packages, where they are installed: flash-attn 4, QuACK and Liger.

`fastformer tune` measures them beside our kernels, and `auto` takes one where it was the fastest.
Nothing else imports them. A measurement names a package with its version, for example
"flash-attn-4 4.0.0b36, backward", where the last word says that its backward is taken too. Another
version is another candidate: it is measured again before it is taken.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Collection, Hashable
from typing import Any

import torch
from torch import Tensor

from fastformer.description import Attention
from fastformer.dispatch import autograd
from fastformer.dispatch.operation import OPERATIONS, Alternative, Arguments, Function, Peer

_log = logging.getLogger("fastformer")


@functools.cache
def version(package: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed. Imports nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def packages() -> dict[str, str | None]:
    """Return the version of each package whose kernels may be measured, or None."""
    names = {peer.package for record in OPERATIONS.values() for peer in record.peers}
    return {name: version(name) for name in sorted(names)}


def installed(op: str, gradient: bool = True) -> dict[str, Peer]:
    """Return the peers of an op that are installed, by their names in a measurement; without
    `gradient`, those without a backward.
    """
    return {
        f"{peer.package} {version(peer.package)}" + ", backward" * (peer.backward is not None): peer
        for peer in OPERATIONS[op].peers
        if version(peer.package) is not None and (gradient or peer.backward is None)
    }


def is_peer(op: str, name: str) -> bool:
    """Return whether a name in a measurement of an op is that of a peer, installed or not."""
    return name.partition(" ")[0] in {peer.package for peer in OPERATIONS[op].peers}


def outdated(op: str, names: Collection[str], choice: str | None, gradient: bool) -> bool:
    """Return whether a measurement of an op lacks a peer that is installed now, or chooses one that
    is not. names: what was measured or dropped. gradient: whether the backward was measured.
    """
    now = installed(op, gradient)
    gone = choice is not None and is_peer(op, choice) and choice not in now
    return gone or not now.keys() <= set(names)


def function(module: str, name: str, *parameters: str) -> Function:
    """Import a function of a peer. Raises RuntimeError if it is absent, or lacks a parameter."""
    return _function(module, name, parameters)


@functools.cache
def _function(module: str, name: str, parameters: tuple[str, ...]) -> Function:
    found = getattr(importlib.import_module(module), name, None)
    if found is None:
        raise RuntimeError(f"{module} has no function {name}")
    missing = [p for p in parameters if p not in inspect.signature(found).parameters]
    if missing:
        raise RuntimeError(f"{module}.{name} has no parameter {' and '.join(missing)}")
    return found


# ------------------------------------------------------------------------------- what calls take


def taken(op: str, name: str, arguments: Arguments) -> bool:
    """Return whether the peer of that name can run a call, and make `autograd` know it. A peer that
    is gone, or has another version, is logged once.
    """
    peer = installed(op).get(name)
    if peer is None:
        _log_absent(op, name, version(name.partition(" ")[0]))
        return False
    if peer.unsupported_reason(arguments) is not None:
        return False
    autograd.add(op, name, _guarded(op, name, peer))
    return True


@functools.cache
def _log_absent(op: str, name: str, found: str | None) -> None:
    now = "is not installed" if found is None else f"has version {found} now"
    package = name.partition(" ")[0]
    _log.warning(
        "%s was measured to be the fastest for %s, and %s %s: the kernel runs instead; "
        "`fastformer tune` measures again", name, op, package, now,
    )  # fmt: skip


_failed: set[str] = set()  # peers that raised an error in this process


@functools.cache
def _guarded(op: str, name: str, peer: Peer) -> Alternative:
    """Return the functions of a peer, replaced by the kernel if they raise: no measurement makes a
    call fail. The kernel's backward can follow the forward of a peer, and the other way round.
    """

    def guard(of_peer: Function, of_kernel: Function) -> Function:
        def run(*arguments: Any) -> Any:
            if name not in _failed:
                try:
                    return of_peer(*arguments)
                except Exception as error:
                    _failed.add(name)
                    line = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
                    _log.warning("%s fails, and the kernel of %s runs instead: %s", name, op, line)
            return of_kernel(*arguments)

        return run

    forward, backward = autograd.kernels(op)
    own = None if peer.backward is None else guard(peer.backward, backward)
    return Alternative(guard(peer.forward, forward), own)


def signature(arguments: Arguments) -> Hashable:
    """Return all that a peer's support of a call, and the class of the call, can depend on."""
    flat: list[Any] = []
    for x in arguments.values():
        flat += x if isinstance(x, Attention) else (x,)
    return tuple(map(_facts, flat))


def _facts(x: Any) -> Hashable:
    if not isinstance(x, Tensor):
        return tuple(x) if isinstance(x, (list, torch.Size)) else x
    return x.dtype, x.shape, x.stride(), x.data_ptr() & 15, x.requires_grad


def forget() -> None:
    """Forget which packages are installed, and which ones failed."""
    for cached in (version, _function, _log_absent, _guarded):
        cached.cache_clear()
    _failed.clear()


# ------------------------------------------------------------------- why a peer does not run a call


def gpu_generation(x: Tensor) -> int | None:
    """Return the major number of the compute capability of an NVIDIA GPU, 9 for Hopper; 0 for
    another GPU, None for a CPU.
    """
    if not x.is_cuda:
        return None
    return 0 if torch.version.hip else torch.cuda.get_device_capability(x.device)[0]


def unknown(arguments: Arguments, *known: str) -> str | None:
    """Return which arguments a peer does not take, or None. An argument that is None, False or 0 is
    as if it were not given.
    """
    given = [
        name
        for name, x in arguments.items()
        if name not in known and (isinstance(x, Tensor) or bool(x))
    ]
    return f"it does not take {' and '.join(given)}" if given else None


def unsupported_rows(*tensors: Tensor | None) -> str | None:
    """Return why a peer that reads contiguous rows cannot read these tensors, or None."""
    for x in tensors:
        if x is None:
            continue
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"it does not take {str(x.dtype).removeprefix('torch.')}"
        if not x.is_contiguous() or x.data_ptr() % 16:
            return "it takes contiguous tensors that begin at a multiple of 16 bytes"
    return None
