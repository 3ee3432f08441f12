"""kernels/partial_sums.py against sums in float64: parts that end within a tile, columns too."""

import pytest
import torch

DTYPES = [torch.bfloat16, torch.float32, torch.float16]  # of the results


def added_up(device, count, parts, n, dtype=torch.float32):
    """The partial sums, and what the kernel makes of them."""
    partial_sums = pytest.importorskip("fastformer.kernels.partial_sums")
    partial = torch.randn(count, parts, n, device=device, dtype=dtype)
    wide = dtype == torch.float64
    kinds = [dtype] * count if wide else DTYPES[:count]
    results = [torch.full((n,), torch.nan, device=device, dtype=kind) for kind in kinds]
    partial_sums.add_up(partial, results)
    return partial, results


def test_sums(device, monkeypatch):
    partial_sums = pytest.importorskip("fastformer.kernels.partial_sums")
    if device.type == "cpu":
        monkeypatch.setattr(partial_sums, "TILE", partial_sums.Tile(4, 16))
    for count, parts, n in ((1, 1, 1), (1, 9, 40), (2, 16, 17), (3, 5, 100)):
        for dtype in (torch.float32, torch.float64):
            if dtype == torch.float64 and device.type == "cuda":
                continue  # the kernels take it in the interpreter only
            partial, results = added_up(device, count, parts, n, dtype)
            for have, want in zip(results, partial.double().sum(1), strict=True):
                torch.testing.assert_close(have, want.to(have.dtype))


def test_the_same_bits(device):
    torch.manual_seed(1)
    first = added_up(device, 3, 300, 100)[1]
    for _ in range(5):
        torch.manual_seed(1)
        again = added_up(device, 3, 300, 100)[1]
        assert all(torch.equal(x, y) for x, y in zip(first, again))
