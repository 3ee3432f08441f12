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
from benchmarks.peers import GPU, available, compiled

OURS = available("reference", "triton")
PROVIDERS = available("torch", "compile", "liger", "quack", "tutorial") + OURS
ROWS = 262144 if GPU else 1024  # of width 512; fewer of the wider ones
WIDTHS = [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536] if GPU else [512, 8192]
P, EPS = 0.1, 1e-5
SEQUENCES = 8 if GPU else 2  # of the comparison of lengths


@pytest.fixture
def compare_rows(compare, random, mode):
    def run(op, peers, ours, width, rows=None, parameters=1, sums=False, label="", **shape):
        rows = rows or max(256, ROWS * 512 // width)
        inputs = [random(rows, width) for _ in range(1 + sums)]
        inputs += [random(width) for _ in range(parameters)]
        passes = (4, 9) if sums else (2, 5)
        nbytes = passes[mode != "forward"] * inputs[0].nbytes
        group = f"{op} N={width} {label or f'rows={rows}'}"
        compare(group, peers, ours, inputs, nbytes=nbytes, rows=rows, width=width, **shape)

    return run


@pytest.fixture
def compare_layer_norm(compare_rows, mode, provider):
    def run(width, **options):
        if provider == "quack" and mode != "forward":
            pytest.skip("QuACK's LayerNorm has no gradient of the bias")
        compare_rows("layer_norm", LAYER_NORM, _ours, width, parameters=2, **options)

    return run


@pytest.mark.parametrize("provider", PROVIDERS)
def test_lengths(compare_layer_norm, length):
    compare_layer_norm(512, rows=SEQUENCES * length, label=f"S={length}")


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(compare_layer_norm, width):
    compare_layer_norm(width)


@pytest.mark.parametrize("provider", [p for p in PROVIDERS if p != "tutorial"])
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(compare_rows, width):
    compare_rows("rms_norm", RMS, _ours_rms, width)


@pytest.mark.parametrize("provider", [*available("torch", "compile", "flash-attn"), *OURS])
@pytest.mark.parametrize("width", WIDTHS)
def test_dropout_add_layer_norm(compare_rows, width):
    op = "dropout_add_layer_norm"
    compare_rows(op, ADD, _ours_add, width, parameters=2, sums=True, dropout_p=P)


@pytest.mark.parametrize("provider", [*available("torch", "compile"), *OURS])
@pytest.mark.parametrize("width", WIDTHS)
def test_dropout_add_rms_norm(compare_rows, width):
    op = "dropout_add_rms_norm"
    compare_rows(op, ADD_RMS, _ours_add_rms, width, sums=True, dropout_p=P)


@pytest.mark.parametrize("provider", [*available("torch", "compile"), *OURS])
@pytest.mark.parametrize("width", WIDTHS)
def test_input_bias(compare_rows, width):
    """The bias of the linear layer before the sum, and its gradient."""
    op = "dropout_add_layer_norm input_bias"
    compare_rows(op, ADD_BIAS, _ours_add_bias, width, parameters=3, sums=True, dropout_p=P)


def _ours_add_bias(x, residual, weight, bias, input_bias):
    return ff.dropout_add_layer_norm(x, residual, weight, bias, P, input_bias=input_bias)


def _torch_add_bias(x, residual, weight, bias, input_bias):
    return _torch_add(x + input_bias, residual, weight, bias)


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
ADD_BIAS = {"torch": _torch_add_bias, "compile": compiled(_torch_add_bias)}
ADD_RMS = {"torch": _torch_add_rms, "compile": compiled(_torch_add_rms)}
ADD = {
    "torch": _torch_add,
    "compile": compiled(_torch_add),
    "flash-attn": _flash_attn_add,
}
