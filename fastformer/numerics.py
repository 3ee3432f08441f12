"""The numerics policy of docs/numerics.md: how far a result may be from the float64 oracle.

The tests, `fastformer tune` and the accuracy ledger apply it.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def first_disagreement(
    have: Sequence[Tensor], want: Sequence[Tensor], eager: Sequence[Tensor], outputs: int
) -> str | None:
    """Return a message on the first result that breaks the policy, or None.

    have: the results. want: those of the reference in float64. eager: those of the reference in the
    dtype of the call. The first `outputs` tensors are outputs, the others are gradients.
    """
    for i, (x, exact, own) in enumerate(zip(have, want, eager, strict=True)):
        name = f"output {i}" if i < outputs else f"gradient {i - outputs}"
        if x.shape != exact.shape or x.dtype != own.dtype:
            wanted = f"{own.dtype} {list(exact.shape)}"
            return f"{name} is {x.dtype} {list(x.shape)}; expected {wanted}"
        other = (own.double() - exact).abs()
        error = float(other.max()) if other.numel() else 0.0
        if problem := disagreement(x, exact, error, i >= outputs):
            return f"{name} disagrees with the reference: it {problem}"
    return None
