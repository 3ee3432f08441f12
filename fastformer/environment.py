"""Describes the environment of a measurement: versions, device, driver, platform."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from contextlib import suppress

import torch

from fastformer._version import __version__


def devices() -> list[torch.device]:
    """Return the CPU and every GPU."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in gpus)]


def describe(device: torch.device) -> dict[str, str | int | None]:
    """Return the environment of a measurement, None where a fact does not apply; without triton."""
    is_gpu = device.type == "cuda"
    return {
        "fastformer": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if is_gpu else None,
        "driver": _driver() if is_gpu else None,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
    }


def machine(device: torch.device) -> str | None:
    """Return the GPU and the versions that measurements depend on; None for a CPU."""
    if device.type != "cuda":
        return None
    facts = describe(device)
    versions = [f"{n} {facts[n]}" for n in ("driver", "torch", "triton", "fastformer")]
    return ", ".join([str(facts["gpu"]), *versions])


def _triton_version() -> str | None:
    for name in ("triton", "pytorch-triton", "triton-windows"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _driver() -> str | None:
    """Return the version of the NVIDIA driver, or None if nvidia-smi does not give it."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        return answer.stdout.split("\n")[0].strip() or None
    return None
