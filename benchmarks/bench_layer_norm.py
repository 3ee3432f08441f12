"""layer_norm, rms_norm and the sums before either beside torch's own ops, the same compiled, Liger,
QuACK and flash-attn. LayerNorm is also compared to the tutorials' formula, which is another one: it
divides by std + eps, with N - 1 in the std. Liger and QuACK compute the residual sum without
dropout, so they are left out there. `input_bias` is the bias of the linear layer before the sum.

Least bytes: forward x and y once, and with a residual also the residual and the sum; backward x, dy
and dx, and with a residual a second gradient in and out. The FLOPs are negligible.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch.nn.functional as F

import fastformer as ff
from benchmarks.peers import GPU, available, tutorial_norm, with_torch

ROWS = 262144 if GPU else 1024  # of width 512; fewer of the wider ones
WIDTHS = [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536] if GPU else [512, 8192]
P, EPS = 0.1, 1e-5
SEQUENCES = 8 if GPU else 2  # of the comparison of lengths


def _torch(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def _torch_rms(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def _torch_add(x, residual, weight, bias, input_bias=None):
    total = residual + F.dropout(x if input_bias is None else x + input_bias, P)
    return _torch(total, weight, bias), total


def _torch_add_rms(x, residual, weight):
    total = residual + F.dropout(x, P)
    return _torch_rms(total, weight), total


def _liger(x, weight, bias):
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, EPS)


def _liger_rms(x, weight):
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)  # not in place


def _quack(x, weight, bias):
    from quack.rmsnorm import layernorm_fwd

    return layernorm_fwd(x, weight.float(), bias.float(), EPS)  # it takes float32 parameters


def _quack_rms(x, weight):
    from quack.rmsnorm import rmsnorm

    return rmsnorm(x, weight, eps=EPS)


def _flash_attn_add(x, residual, weight, bias):
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    return layer_norm_fn(x, weight, bias, residual, eps=EPS, dropout_p=P, prenorm=True)


def _ours(x, weight, bias):
    return ff.layer_norm(x, x.shape[-1], weight, bias)


def _ours_rms(x, weight):
    return ff.rms_norm(x, x.shape[-1], weight)


def _ours_add(x, residual, weight, bias, input_bias=None):
    return ff.dropout_add_layer_norm(x, residual, weight, bias, P, input_bias=input_bias)


def _ours_add_rms(x, residual, weight):
    return ff.dropout_add_rms_norm(x, residual, weight, P, EPS)


class Op(NamedTuple):
    """An op of fastformer and its peers: of x, or of x and a residual, and of parameters."""

    ours: Callable
    peers: dict[str, Callable]
    sums: bool
    parameters: int


ADD_PEERS = with_torch(_torch_add)
NORM_PEERS = with_torch(_torch, liger=_liger, quack=_quack, tutorial=tutorial_norm)
OPS = {
    "layer_norm": Op(_ours, NORM_PEERS, False, 2),
    "rms_norm": Op(_ours_rms, with_torch(_torch_rms, liger=_liger_rms, quack=_quack_rms), False, 1),
    "dropout_add_layer_norm": Op(_ours_add, {**ADD_PEERS, "flash-attn": _flash_attn_add}, True, 2),
    "dropout_add_layer_norm input_bias": Op(_ours_add, ADD_PEERS, True, 3),
    "dropout_add_rms_norm": Op(_ours_add_rms, with_torch(_torch_add_rms), True, 1),
}
OURS = available("reference", "triton")
PROVIDERS = {op: available(*OPS[op].peers) + OURS for op in OPS}


@pytest.fixture
def compare_rows(compare, random, mode, provider):
    def run(name, width, rows, label):
        if (name, provider) == ("layer_norm", "quack") and mode != "forward":
            pytest.skip("QuACK's LayerNorm has no gradient of the bias")
        op = OPS[name]
        inputs = [random(rows, width) for _ in range(1 + op.sums)]
        inputs += [random(width) for _ in range(op.parameters)]
        passes = (4, 9) if op.sums else (2, 5)
        compare(
            f"{name} N={width} {label}", op.peers, op.ours, inputs, rows=rows, width=width,
            nbytes=passes[mode != "forward"] * inputs[0].nbytes, dropout_p=P if op.sums else 0.0,
        )  # fmt: skip

    return run


@pytest.mark.parametrize("provider", PROVIDERS["layer_norm"])
def test_lengths(compare_rows, length):
    compare_rows("layer_norm", 512, SEQUENCES * length, f"S={length}")


@pytest.mark.parametrize("op, provider", [(op, name) for op in OPS for name in PROVIDERS[op]])
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(compare_rows, width, op):
    rows = max(256, ROWS * 512 // width)
    compare_rows(op, width, rows, f"rows={rows}")
