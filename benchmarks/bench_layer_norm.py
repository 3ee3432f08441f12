"""layer_norm, rms_norm and dropout_add_layer_norm beside torch's own ops, and LayerNorm beside the
tutorials' formula, which is another one: it divides by std + eps, with N - 1 in the std.

Least bytes: forward x and y once, and with a residual that and the sum once more; backward x, dy
and dx, and with a residual a second gradient in and out. FLOPs are nothing beside them.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

import fastformer as ff

GPU = torch.cuda.is_available()
PROVIDERS = ["reference", *(["triton"] if GPU else []), "torch", "tutorial"]
ROWS = 262144 if GPU else 1024  # of width 512; fewer of the wider ones
WIDTHS = [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536] if GPU else [512, 8192]
P = 0.1
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
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(compare, width):
    rows = max(256, ROWS * 512 // width)
    compare(rows, width, f"N={width} rows={rows}")


@pytest.mark.parametrize("provider", [p for p in PROVIDERS if p != "tutorial"])
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(measure, differentiated, device, dtype, mode, width, provider):
    rows = max(256, ROWS * 512 // width)
    x = torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(width, device=device, dtype=dtype, requires_grad=True)

    def forward():
        if provider == "torch":
            return F.rms_norm(x, (width,), weight)
        with ff.use_backend(provider):
            return ff.rms_norm(x, width, weight)

    measure(
        differentiated(forward, (x, weight)),
        group=f"rms_norm N={width} rows={rows} {mode}",
        provider=provider,
        dtype=dtype,
        nbytes=(2 if mode == "forward" else 5) * x.nbytes,
        rows=rows,
        width=width,
    )


@pytest.mark.parametrize("provider", [p for p in PROVIDERS if p != "tutorial"])
@pytest.mark.parametrize("width", WIDTHS)
def test_dropout_add_layer_norm(measure, differentiated, device, dtype, mode, width, provider):
    rows = max(256, ROWS * 512 // width)
    x, residual = (
        torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True) for _ in range(2)
    )
    weight, bias = (
        torch.randn(width, device=device, dtype=dtype, requires_grad=True) for _ in range(2)
    )

    def forward():
        if provider == "torch":
            total = residual + F.dropout(x, P)
            return F.layer_norm(total, (width,), weight, bias), total
        with ff.use_backend(provider):
            return ff.dropout_add_layer_norm(x, residual, weight, bias, P)

    measure(
        differentiated(forward, (x, residual, weight, bias)),
        group=f"dropout_add_layer_norm N={width} rows={rows} {mode}",
        provider=provider,
        dtype=dtype,
        nbytes=(4 if mode == "forward" else 9) * x.nbytes,
        rows=rows,
        width=width,
        dropout_p=P,
    )


def _ours(backend, x, weight, bias):
    with ff.use_backend(backend):
        return ff.layer_norm(x, x.shape[-1], weight, bias)


def _torch(_, x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def _tutorial(_, x, weight, bias):
    mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
    return weight * (x - mean) / (std + 1e-6) + bias


FORWARD = {"torch": _torch, "tutorial": _tutorial}
