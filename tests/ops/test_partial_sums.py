"""kernels/partial_sums.py against sums in float64: parts that end within a tile, columns too."""

from itertools import product

import pytest
import torch

partial_sums = pytest.importorskip("fastformer.kernels.partial_sums")
SIZES = [(1, 1, 1), (1, 9, 40), (2, 16, 17), (3, 5, 100)]  # results, parts, columns


def test_sums(device, monkeypatch):
    dtypes = [torch.float32]
    if device.type == "cpu":
        monkeypatch.setattr(partial_sums, "TILE", partial_sums.Tile(4, 16))
        dtypes += [torch.float64]  # which the kernels take in the interpreter only
    for (count, parts, n), dtype in product(SIZES, dtypes):
        partial = torch.randn(count, parts, n, device=device, dtype=dtype)
        kinds = [dtype] * 3 if dtype == torch.float64 else [torch.bfloat16, dtype, torch.float16]
        results = [torch.full((n,), torch.nan, device=device, dtype=x) for x in kinds[:count]]
        launch = partial_sums.sums_launch(*partial.shape)
        launch(partial, (*results, *results[:1] * 2)[:3])
        for have, want in zip(results, partial.double().sum(1), strict=True):
            torch.testing.assert_close(have, want.to(have.dtype))
