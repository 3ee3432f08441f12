"""The numerics policy of docs/numerics.md: how far a result may be from the float64 oracle.

The tests, `fastformer tune` and the accuracy ledger apply it.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The largest allowed |result - oracle| / |oracle|, in the Frobenius norm.
RELATIVE = {torch.float32: 1e-5, torch.float64: 1e-6}


def largest_error(dtype: torch.dtype, eager: float, largest: float, gradient: bool) -> float:
    """Return the largest allowed error of an element: twice the largest error of eager PyTorch in
    this dtype (three times for a gradient), and half an eps of the oracle's largest element.
    """
    return (3 if gradient else 2) * eager + torch.finfo(dtype).eps / 2 * largest


def disagreement(
    have: Tensor,
    want: Tensor,
    eager: float,
    gradient: bool = False,
    dtype: torch.dtype | None = None,
) -> str | None:
    """Return a message on how a result breaks the policy, or None if it does not.

    Args:
        have: the result.
        want: the oracle, in float64, of the same shape.
        eager: the largest error of an element of eager PyTorch in the dtype; used only in float16
            and bfloat16.
        gradient: whether the result is a gradient.
        dtype: the dtype of the call's inputs. Default: the dtype of `have`.
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
    if found <= bound:  # False if `found` is NaN
        return None
    return f"differs by {found:.1e}; at most {bound:.1e} is allowed"
