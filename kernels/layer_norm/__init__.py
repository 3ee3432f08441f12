"""LayerNorm over rows of N features (Ba, Kiros, Hinton 2016), with the biased variance or in the
Annotated Transformer's form (unbiased); RMSNorm (Zhang and Sennrich 2019); and residual + dropout +
either norm.

Forward, per row:
    s = x, or residual + Z (x + b_x) with Z = keep / (1 - p), rounded to the dtype of the residual
    mean = sum(s) / N                       rms: 0
    r = 1 / sqrt(sum((s - mean)^2) / N + eps)
        unbiased: r = 1 / (std + eps), std = sqrt(sum((s - mean)^2) / (N - 1))
    y = weight * xhat + bias, xhat = (s - mean) * r
Backward, with g = weight * dy, and ds the gradient of s, if s is an output too:
    dresidual = ds + r * (g - sum(g) / N - xhat * c)    rms: without sum(g) / N
    c = sum(g * xhat) / N
        unbiased: c = sum(g * xhat) / ((N - 1) * std * r), std * r = 1 - eps * r
    dx = Z * dresidual                                  without a residual: dresidual itself
    dweight = sum over rows of dy * xhat, dbias = sum over rows of dy
    db_x = sum over rows of dx

Shapes: x and residual [..., N], weight, bias and b_x [N], mean and r [M] for M rows. Any dtype in
and out, statistics and sums in float32 (float64 for float64). Saved: s, weight, mean, r.
Recomputed: xhat and the dropout mask, a function of (seed, row, column). Least bytes: x and y once
forward; s, dy and dx once backward; with a residual s and ds once more. Rows up to 8192 features
stay in registers; wider ones, up to 65536, are read in blocks. Deterministic: for the gradients of
the parameters, each program sums a fixed range of rows, and these partial sums are added without
atomics.
"""

from __future__ import annotations

from ..common import INTERPRETED as INTERPRETED
from .launchers import supports as supports
