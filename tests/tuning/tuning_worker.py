"""Timers that stand in for the one of a GPU; they return milliseconds."""

import pytest
import torch

HERE = "GPU A, driver 570.1, torch 2.13.0, triton 3.7.1, fastformer 0.1.0"
CPU = torch.device("cpu")
FORWARD, OP = "attention forward", "scaled_dot_product_attention"


def flat(call):
    call()
    return 1.0


def launches(call):
    """How many kernels a call launches."""
    from fastformer.kernels import launch

    found, former = [], launch.Launch.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.Launch, "__call__", lambda *x: found.append(x[0]) or former(*x))
        call()
    return float(len(found)) or 9.0
