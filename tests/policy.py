"""The numerics policy for an output that a test has computed; conftest.py has that of whole ops."""

import torch


def check_output(have, want, eager, dtype=None):
    """have: the output. want: the same in float64. eager: by eager PyTorch in the dtype of `have`.
    dtype: of the inputs, by default that of `have`; lse is wider.

    float32: relative Frobenius error below 1e-5 (float64, whose constants are float32 in the
    interpreter: 1e-6). float16 and bfloat16: the largest error at most twice that of eager, plus
    one rounding of the largest element.
    """
    assert have.shape == want.shape and have.dtype == eager.dtype
    dtype, have, eager = dtype or have.dtype, have.double(), eager.double()
    assert have.isfinite().all()
    if dtype in (torch.float32, torch.float64):
        bound = 1e-5 if dtype == torch.float32 else 1e-6
        assert (have - want).norm() <= bound * want.norm()
    elif have.numel():
        error, peer, size = (x.abs().max() for x in (have - want, eager - want, want))
        bound = 2 * peer + torch.finfo(dtype).eps / 2 * size
        assert error <= bound, f"{error:.1e}, eager {peer:.1e}, bound {bound:.1e}"
