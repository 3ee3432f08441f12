"""layer_norm beside torch's own op and the tutorials' formula, which is another one: it divides by
std + eps, with N - 1 in the std.

Least bytes: forward x and y once; backward x, dy and dx. FLOPs are nothing beside them.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

import fastformer as ff

GPU = torch.cuda.is_available()
PROVIDERS = ["reference", *(["triton"] if GPU else []), "torch", "tutorial"]
ROWS = 16384 if GPU else 256  # of the comparison of widths
SEQUENCES = 8 if GPU else 2  # of the comparison of lengths


@pytest.fixture
def compare(measure, differentiated, device, dtype, mode, provider):
    def run(rows, width, group, **shape):
        x = torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)
        weight, bias = (
            torch.randn(width, device=device, dtype=dtype, requires_grad=True) for _ in range(2)
        )
        forward = functools.partial(FORWARD.get(provider, _ours), provider, x, weight, bias)
        measure(
            differentiated(forward, (x, weight, bias)),
            group=f"layer_norm {group} {mode}",
            provider=provider,
            dtype=dtype,
            nbytes=(2 if mode == "forward" else 5) * x.nbytes,
            rows=rows,
            width=width,
            **shape,
        )

    return run


@pytest.mark.parametrize("provider", PROVIDERS)
def test_lengths(compare, length):
    compare(SEQUENCES * length, 512, f"N=512 S={length}", length=length)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("width", [1024, 2048, 4096, 8192])
def test_widths(compare, width):
    compare(ROWS, width, f"N={width} rows={ROWS}")


def _ours(backend, x, weight, bias):
    with ff.use_backend(backend):
        return ff.layer_norm(x, x.shape[-1], weight, bias)


def _torch(_, x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def _tutorial(_, x, weight, bias):
    mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
    return weight * (x - mean) / (std + 1e-6) + bias


FORWARD = {"torch": _torch, "tutorial": _tutorial}
