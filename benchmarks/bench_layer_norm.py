"""layer_norm, rms_norm and the sums before either beside torch's own ops, the same compiled, Liger,
QuACK and flash-attn. LayerNorm is also compared to the tutorials' formula, which is another one: it
divides by std + eps, with N - 1 in the std. Liger and QuACK compute the residual sum without
dropout, so they are left out there.

Least bytes: forward x and y once, and with a residual also the residual and the sum; backward x, dy
and dx, and with a residual a second gradient in and out. The FLOPs are negligible.
"""

import pytest
import torch.nn.functional as F

import fastformer as ff
from benchmarks.peers import GPU, available, compiled, implementation

OURS = available("reference", "triton")
PROVIDERS = available("torch", "compile", "liger", "quack", "tutorial") + OURS
ROWS = 262144 if GPU else 1024  # of width 512; fewer of the wider ones
WIDTHS = [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536] if GPU else [512, 8192]
P, EPS = 0.1, 1e-5
SEQUENCES = 8 if GPU else 2  # of the comparison of lengths


@pytest.fixture
def compare(measure, differentiated, random, dtype, mode, provider):
    def run(rows, width, group, **shape):
        if provider == "quack" and mode != "forward":
            pytest.skip("QuACK's LayerNorm has no gradient of the bias")
        x, weight, bias = inputs = random(rows, width), random(width), random(width)
        compute = implementation(provider, LAYER_NORM, _ours)
        measure(
            differentiated(lambda: compute(x, weight, bias), inputs),
            group=f"layer_norm {group} {mode}",
            provider=provider,
            dtype=dtype,
            nbytes=(2 if mode == "forward" else 5) * x.nbytes,
            rows=rows,
            width=width,
            **shape,
        )

    return run


@pytest.fixture
def compare_sums(measure, differentiated, random, dtype, mode, provider):
    def run(op, peers, ours, parameters, width):
        rows = max(256, ROWS * 512 // width)
        x, residual = random(rows, width), random(rows, width)
        inputs = x, residual, *(random(width) for _ in range(parameters))
        compute = implementation(provider, peers, ours)
        measure(
            differentiated(lambda: compute(*inputs), inputs),
            group=f"{op} N={width} rows={rows} {mode}",
            provider=provider,
            dtype=dtype,
            nbytes=(4 if mode == "forward" else 9) * x.nbytes,
            rows=rows,
            width=width,
            dropout_p=P,
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
def test_rms_norm(measure, differentiated, random, dtype, mode, width, provider):
    rows = max(256, ROWS * 512 // width)
    x, weight = random(rows, width), random(width)
    compute = implementation(provider, RMS, _ours_rms)
    measure(
        differentiated(lambda: compute(x, weight), (x, weight)),
        group=f"rms_norm N={width} rows={rows} {mode}",
        provider=provider,
        dtype=dtype,
        nbytes=(2 if mode == "forward" else 5) * x.nbytes,
        rows=rows,
        width=width,
    )


@pytest.mark.parametrize("provider", [*available("torch", "compile", "flash-attn"), *OURS])
@pytest.mark.parametrize("width", WIDTHS)
def test_dropout_add_layer_norm(compare_sums, width):
    compare_sums("dropout_add_layer_norm", ADD, _ours_add, 2, width)


@pytest.mark.parametrize("provider", [*available("torch", "compile"), *OURS])
@pytest.mark.parametrize("width", WIDTHS)
def test_dropout_add_rms_norm(compare_sums, width):
    compare_sums("dropout_add_rms_norm", ADD_RMS, _ours_add_rms, 1, width)


def _ours_add_rms(x, residual, weight):
    return ff.dropout_add_rms_norm(x, residual, weight, P, EPS)


def _torch_add_rms(x, residual, weight):
    total = residual + F.dropout(x, P)
    return F.rms_norm(total, x.shape[-1:], weight, EPS), total


def _ours(x, weight, bias):
    return ff.layer_norm(x, x.shape[-1], weight, bias)


def _torch(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def _tutorial(x, weight, bias):
    mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
    return weight * (x - mean) / (std + 1e-6) + bias


def _liger(x, weight, bias):
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, EPS)


def _quack(x, weight, bias):
    from quack.rmsnorm import layernorm_fwd

    return layernorm_fwd(x, weight.float(), bias.float(), EPS)  # it takes float32 parameters


def _ours_rms(x, weight):
    return ff.rms_norm(x, x.shape[-1], weight)


def _torch_rms(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def _liger_rms(x, weight):
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)  # not in place


def _quack_rms(x, weight):
    from quack.rmsnorm import rmsnorm

    return rmsnorm(x, weight, eps=EPS)


def _ours_add(x, residual, weight, bias):
    return ff.dropout_add_layer_norm(x, residual, weight, bias, P)


def _torch_add(x, residual, weight, bias):
    total = residual + F.dropout(x, P)
    return F.layer_norm(total, x.shape[-1:], weight, bias), total


def _flash_attn_add(x, residual, weight, bias):
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    return layer_norm_fn(x, weight, bias, residual, eps=EPS, dropout_p=P, prenorm=True)


LAYER_NORM = {
    "torch": _torch,
    "compile": compiled(_torch),
    "tutorial": _tutorial,
    "liger": _liger,
    "quack": _quack,
}
RMS = {
    "torch": _torch_rms,
    "compile": compiled(_torch_rms),
    "liger": _liger_rms,
    "quack": _quack_rms,
}
ADD_RMS = {"torch": _torch_add_rms, "compile": compiled(_torch_add_rms)}
ADD = {
    "torch": _torch_add,
    "compile": compiled(_torch_add),
    "flash-attn": _flash_attn_add,
}
