"""The providers that a suite compares: which of them can run here, and why the others cannot."""

import importlib.util

import torch
import torch.nn.functional as F

GPU = torch.cuda.is_available()
ABSENT = {}  # provider: the reason; what `available` has left out


def available(*names):
    """Those of the providers that can run here. The reasons of the others are kept in ABSENT and
    stand below the closing table.
    """
    for name in names:
        reason = _obstacle(name)
        if reason is not None:
            ABSENT[name] = reason
    return [name for name in names if name not in ABSENT]


def _obstacle(name):
    if name == "torch fused" and not hasattr(F, "linear_cross_entropy"):
        return f"torch {torch.__version__} has no linear_cross_entropy"
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        return f"{PACKAGES[name]} is not installed"
    if name in ON_GPU and not GPU:
        return ON_GPU[name]
    return None


PACKAGES = {
    "liger": "liger_kernel",
    "quack": "quack",
    "flash-attn": "flash_attn",
    "flash-attn 3": "flash_attn_interface",
}
ON_GPU = dict.fromkeys(
    ["packed", "cudnn", "flash", "efficient", "addmm_activation", *PACKAGES], "needs a GPU"
) | {
    "triton": "needs a GPU: interpreted, its speed means nothing",
    "compile": "torch.compile of these takes a C++ compiler on a CPU",
    "flex": "flex_attention is compiled, and has no gradient on a CPU",
}


def compiled(function):
    """torch.compile of it, for each shape anew; on a CPU, where nothing calls it, as it is."""
    return torch.compile(function, dynamic=False) if GPU else function
