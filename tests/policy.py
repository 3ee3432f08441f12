"""The numerics policy for a result that a test has computed; conftest.py has that of ops."""

from fastformer import numerics


def check_output(have, want, eager, dtype=None):
    """have: the output. want: the same in float64. eager: by eager PyTorch in the dtype of `have`.
    dtype: of the inputs, by default that of `have`; lse is wider.
    """
    assert have.shape == want.shape and have.dtype == eager.dtype
    assert have.isfinite().all()
    peer = float((eager.double() - want).abs().max()) if have.numel() else 0.0
    problem = numerics.disagreement(have, want, peer, dtype=dtype)
    assert problem is None, problem
