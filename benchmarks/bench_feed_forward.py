"""feed_forward with relu and dropout 0.1 beside linear, relu, dropout and linear, which is what the
tutorials write, eager and compiled, and beside torch._addmm_activation, which is cuBLAS with bias
and relu in its epilogue. The gated forms are compared to Liger's kernels as well.

FLOPs: 4 M d d_ff forward for M tokens (two products), twice that backward.
Least bytes: forward x, y and both weights once; backward x, dy, dx, both weights and their
gradients.
"""

import pytest
import torch
import torch.nn.functional as F

import fastformer as ff
from benchmarks.peers import GPU, available, with_torch

PROVIDERS = available("torch", "compile", "addmm_activation", "reference", "triton")
SEQUENCES = 8 if GPU else 1
SIZES = [(512, 2048), (1024, 4096), *([(2048, 8192), (4096, 16384)] if GPU else [])]
P = 0.1


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("d, d_ff", SIZES, ids=lambda n: str(n))
def test_feed_forward(compare, random, request, length, d, d_ff, mode, provider):
    if d > 512 and not GPU and not request.config.getoption("slow"):
        pytest.skip("d = 1024 takes long on a CPU: needs --slow")

    if provider == "addmm_activation" and mode != "forward":
        pytest.skip("torch._addmm_activation has no gradient")

    rows = SEQUENCES * length
    x = random(rows, d)
    w_1, b_1, w_2, b_2 = (
        random(*shape, unit_sum=True) for shape in ((d_ff, d), (d_ff,), (d, d_ff), (d,))
    )
    figures = dict(flops=4 * rows * d * d_ff, nbytes=2 * (x.nbytes + w_1.nbytes))
    if mode == "forward+backward":
        figures["flops"] *= 3
        figures["nbytes"] += 3 * x.nbytes + 4 * w_1.nbytes
    sizes = dict(rows=rows, d=d, d_ff=d_ff, dropout_p=P)
    group = f"feed_forward {d}->{d_ff} S={length}"
    compare(group, PEERS, _ours, (x, w_1, b_1, w_2, b_2), **figures, **sizes)


def _ours(x, w_1, b_1, w_2, b_2):
    return ff.feed_forward(x, w_1, b_1, w_2, b_2, "relu", P)


def _plain(x, w_1, b_1, w_2, b_2):
    return F.linear(F.dropout(F.relu(F.linear(x, w_1, b_1)), P), w_2, b_2)


def _addmm_activation(x, w_1, b_1, w_2, b_2):
    return F.linear(F.dropout(torch._addmm_activation(b_1, x, w_1.t()), P), w_2, b_2)


PEERS = with_torch(_plain, addmm_activation=_addmm_activation)


@pytest.mark.parametrize("provider", available("torch", "compile", "liger", "reference", "triton"))
@pytest.mark.parametrize("op", ["geglu", "swiglu"])
def test_gated(compare, random, mode, op):
    """The gated forms beside torch's linear, activation, product and dropout. (Liger's geglu is the
    approximation by tanh.)
    """
    rows, d, d_ff = (16384, 1024, 2816) if GPU else (256, 512, 1408)
    w, w_2 = (random(*shape, unit_sum=True) for shape in ((2 * d_ff, d), (d, d_ff)))
    flops = 6 * rows * d * d_ff * (3 if mode == "forward+backward" else 1)
    sizes = dict(rows=rows, d=d, d_ff=d_ff, dropout_p=P)
    group = f"{op} {d}->{d_ff} rows={rows}"
    compare(group, GATED, _ours_gated, (op, random(rows, d), w, w_2), flops=flops, **sizes)


@pytest.mark.parametrize("provider", available("torch", "compile", "liger", "reference", "triton"))
def test_gated_activation(compare, random, mode):
    """silu(gate) * value between GEMMs that are not part of the op."""
    rows, d_ff = (16384, 11008) if GPU else (256, 1408)
    inputs = random(rows, d_ff), random(rows, d_ff)
    figures = dict(nbytes=(3 if mode == "forward" else 8) * inputs[0].nbytes, rows=rows, d_ff=d_ff)
    group = f"gated_activation {d_ff} rows={rows}"
    compare(group, ACTIVATION, ff.gated_activation, inputs, **figures)


def _activation(gate, value):
    return F.silu(gate) * value


def _liger_activation(gate, value):
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, value)


ACTIVATION = with_torch(_activation, liger=_liger_activation)


def _ours_gated(op, x, w, w_2):
    return getattr(ff, op)(x, w, None, w_2, None, P)


def _gated(op, x, w, w_2):
    z, v = F.linear(x, w).chunk(2, -1)
    return F.linear(F.dropout((F.gelu(z) if op == "geglu" else F.silu(z)) * v, P), w_2)


def _liger(op, x, w, w_2):
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    gate = LigerGELUMulFunction if op == "geglu" else LigerSiLUMulFunction
    return F.linear(F.dropout(gate.apply(*F.linear(x, w).chunk(2, -1)), P), w_2)


GATED = with_torch(_gated, liger=_liger)
