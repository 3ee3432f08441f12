"""The numerics policy of docs/numerics.md: how far a result may be from the oracle in float64.

The tests, `fastformer tune` and the accuracy ledger hold results to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The largest |result - oracle| / |oracle|, by Frobenius norms.
RELATIVE = {torch.float32: 1e-5, torch.float64: 1e-6}


def largest_error(dtype: torch.dtype, eager: float, largest: float, gradient: bool) -> float:
    """Return the largest error that an element may have where eager PyTorch is the measure.

    Args:
        dtype: of the call.
        eager: the largest error of an element of eager PyTorch in this dtype.
        largest: the largest element of the oracle.
        gradient: whether it is one of a gradient, which may have three times the error of eager
            PyTorch, where an output may have twice.
    """
    return (3 if gradient else 2) * eager + torch.finfo(dtype).eps / 2 * largest


def disagreement(
    have: Tensor,
    want: Tensor,
    eager: float,
    gradient: bool = False,
    dtype: torch.dtype | None = None,
) -> str | None:
    """Return how a result breaks the policy, in words, or None.

    Args:
        have: the result.
        want: the oracle, in float64, of the same shape.
        eager: the largest error of an element of eager PyTorch in the dtype, which counts in
            float16 and bfloat16 alone.
        gradient: whether it is a gradient.
        dtype: of the inputs of the call. Default: that of `have`.
    """
    dtype = dtype or have.dtype
    error = (have.double() - want).abs()
    if not error.numel():
        return None
    if dtype in RELATIVE:
        found, bound = float(error.norm() / want.norm().clamp_min(1e-30)), RELATIVE[dtype]
    else:
        found = float(error.max())
        bound = largest_error(dtype, eager, float(want.abs().max()), gradient)
    if found <= bound:  # NaN is not
        return None
    return f"differs by {found:.1e}; at most {bound:.1e} is allowed"
