"""Norms by the kernels of other packages: QuACK and Liger.

Their statistics are ours: the mean and the reciprocal r of a row, in float32. So our backward can
follow their forward. Their backwards add the rows in a fixed order: they are deterministic.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from fastformer.dispatch import peers
from fastformer.dispatch.operation import Arguments, Function, Peer

_QUACK = "quack.rmsnorm"
_LIGER = "liger_kernel.ops.{}".format
_GEMMA = "gemma"  # Liger's rounding: all in float32, rounded once; its "llama" rounds twice


def _on_its_device(function: Function) -> Function:
    """Make the device of the first argument the current one: some of the packages do not."""

    @functools.wraps(function)
    def run(x: Tensor, *rest: Any) -> Any:
        with torch.cuda.device_of(x):
            return function(x, *rest)

    return run


def _rows(x: Tensor, weight: Tensor | None, shape: Any = None) -> Tensor:
    """View x [..., *shape] as rows [M, N]."""
    n = torch.Size(shape).numel() if weight is None else weight.numel()
    return x.reshape(-1, n)


def _flat(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.view(-1)


def _like(x: Tensor | None, parameter: Tensor | None, of: Tensor) -> Tensor:
    """Return a parameter's gradient in its shape; without elements if there is none."""
    return of.new_empty(0) if x is None or parameter is None else x.view(parameter.shape)


# ------------------------------------------------------------------------------------------- QuACK


@_on_its_device
def _quack_layer_norm(
    x: Tensor, shape: Any, weight: Tensor, bias: Tensor | None, eps: float, unbiased: bool
) -> tuple[Tensor, ...]:
    op = peers.function(_QUACK, "layernorm_fwd", "bias", "eps", "return_rstd", "return_mean")
    given = _rows(x, weight), _flat(weight), _flat(bias)
    y, r, mean = op(*given, eps=eps, return_rstd=True, return_mean=True)
    return y.view(x.shape), mean, r


@_on_its_device
def _quack_layer_norm_backward(
    grad: Tensor, x: Tensor, shape: Any, weight: Tensor, bias: Tensor | None, eps: float,
    unbiased: bool, mean: Tensor, r: Tensor, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    op = peers.function(_QUACK, "layernorm_bwd", "mean", "has_bias")
    rows = _rows(x, weight), _flat(weight), _rows(grad.contiguous(), weight)
    dx, dw, db = op(*rows, r, mean, has_bias=bias is not None)
    return dx.view(x.shape), _like(dw, weight, x), _like(db, bias, x)


@_on_its_device
def _quack_rms_norm(x: Tensor, shape: Any, weight: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    op = peers.function(_QUACK, "rmsnorm_fwd", "eps", "store_rstd")
    y, _, r = op(_rows(x, weight, shape), _flat(weight), eps=eps, store_rstd=True)
    return y.view(x.shape), r


@_on_its_device
def _quack_rms_norm_backward(
    grad: Tensor, x: Tensor, shape: Any, weight: Tensor | None, eps: float, r: Tensor,
    needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    op = peers.function(_QUACK, "rmsnorm_bwd", "x", "weight", "dout", "rstd")
    dx, dw, *_ = op(
        _rows(x, weight, shape), _flat(weight), _rows(grad.contiguous(), weight, shape), r
    )
    return dx.view(x.shape), _like(dw, weight, x)


@_on_its_device
def _quack_sum(
    x: Tensor, residual: Tensor, weight: Tensor, p: float, eps: float, seed: Any, shard: Any
) -> tuple[Tensor, ...]:
    op = peers.function(_QUACK, "rmsnorm_fwd", "residual", "eps", "store_rstd")
    rows = _rows(x, weight), _flat(weight)
    y, total, r = op(*rows, residual=_rows(residual, weight), eps=eps, store_rstd=True)
    return y.view(x.shape), total.view(x.shape), r


@_on_its_device
def _quack_sum_backward(
    grad: Tensor, grad_total: Tensor | None, weight: Tensor, p: float, eps: float, seed: Any,
    shard: Any, total: Tensor, r: Tensor, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    op = peers.function(_QUACK, "rmsnorm_bwd", "dresidual_out", "has_residual")
    rows = _rows(total, weight), _flat(weight), _rows(grad.contiguous(), weight)
    added = None if grad_total is None else _rows(grad_total.contiguous(), weight)
    dx, dw, *_ = op(*rows, r, dresidual_out=added, has_residual=True)
    dx = dx.view(total.shape)
    return dx, dx, _like(dw, weight, total)


# ------------------------------------------------------------------------------------------- Liger


@_on_its_device
def _liger_layer_norm(
    x: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float, unbiased: bool
) -> tuple[Tensor, ...]:
    op = peers.function(_LIGER("layer_norm"), "layer_norm_forward", "X", "W", "B", "eps")
    y, _, mean, r, *_ = op(_rows(x, weight), _flat(weight), _flat(bias), eps)
    return y.view(x.shape), mean, r


@_on_its_device
def _liger_layer_norm_backward(
    grad: Tensor, x: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float, unbiased: bool,
    mean: Tensor, r: Tensor, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    op = peers.function(_LIGER("layer_norm"), "layer_norm_backward", "needs_dw", "needs_db")
    rows = _rows(grad.contiguous(), weight), _rows(x, weight)
    of = _flat(weight), _flat(bias), mean, r
    dx, dw, db = op(*rows, *of, needs_dw=needs[1], needs_db=needs[2])
    return dx.view(x.shape), _like(dw, weight, x), _like(db, bias, x)


def _settings(n: int) -> tuple[int, int]:
    """Return the block and the warps with which Liger's forward runs, and its backward has to."""
    return peers.function(_LIGER("utils"), "calculate_settings", "n")(n)


@_on_its_device
def _liger_rms_norm(x: Tensor, shape: Any, weight: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    op = peers.function(_LIGER("rms_norm"), "rms_norm_forward", "offset", "casting_mode")
    y, _, r, *_ = op(_rows(x, weight, shape), _flat(weight), eps, 0.0, _GEMMA, None)
    return y.view(x.shape), r


@_on_its_device
def _liger_rms_norm_backward(
    grad: Tensor, x: Tensor, shape: Any, weight: Tensor | None, eps: float, r: Tensor,
    needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    op = peers.function(_LIGER("rms_norm"), "rms_norm_backward", "in_place", "row_mode", "needs_dw")
    rows = [_rows(t, weight, shape) for t in (grad.contiguous(), x)]
    mode = _casting_mode("rms_norm")
    options = dict(in_place=False, row_mode=None, needs_dw=needs[1])
    dx, dw = op(*rows, _flat(weight), r, 0.0, mode, *_settings(rows[0].shape[1]), **options)
    return dx.view(x.shape), _like(dw, weight, x)


def _casting_mode(module: str) -> int:
    """Return the number by which the backward of a module of Liger knows the rounding."""
    return importlib.import_module(_LIGER(module))._str_to_casting_mode[_GEMMA]


@_on_its_device
def _liger_sum(
    x: Tensor, residual: Tensor, weight: Tensor, p: float, eps: float, seed: Any, shard: Any
) -> tuple[Tensor, ...]:
    op = peers.function(
        _LIGER("fused_add_rms_norm"), "fused_add_rms_norm_forward", "offset", "casting_mode"
    )
    rows = _rows(x, weight), _rows(residual, weight)
    y, total, r, *_ = op(*rows, _flat(weight), eps, 0.0, _GEMMA)
    return y.view(x.shape), total.view(x.shape), r


@_on_its_device
def _liger_sum_backward(
    grad: Tensor, grad_total: Tensor | None, weight: Tensor, p: float, eps: float, seed: Any,
    shard: Any, total: Tensor, r: Tensor, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    module = "fused_add_rms_norm"
    op = peers.function(_LIGER(module), f"{module}_backward", "num_stages", "in_place", "needs_dw")
    added = torch.zeros_like(total) if grad_total is None else grad_total.contiguous()
    rows = [_rows(t, weight) for t in (grad.contiguous(), added, total)]
    settings = _settings(rows[0].shape[1])
    options = dict(num_stages=2, in_place=False, needs_dw=needs[2])
    dx, _, dw = op(*rows, _flat(weight), r, 0.0, _casting_mode(module), *settings, **options)
    dx = dx.view(total.shape)
    return dx, dx, _like(dw, weight, total)


# ------------------------------------------------------------------------------- what they compute


_KNOWN = (  # the last two are arguments of dropout, which none has
    "input", "residual", "normalized_shape", "weight", "bias", "eps", "dropout_seed", "shard",
)  # fmt: skip


def _unsupported(
    arguments: Arguments,
    weight: bool = False,
    bias: bool = False,
    single: bool = False,
    nvidia: bool = False,
) -> str | None:
    """Return why a peer does not compute a call. weight, bias: it needs them. single: it needs them
    in float32. nvidia: it needs a GPU of NVIDIA.
    """
    if reason := peers.unknown(arguments, *_KNOWN):
        return reason
    parameters = [arguments.get(name) for name in ("weight", "bias")]
    for name, needed, x in zip(("weight", "bias"), (weight, bias), parameters):
        if needed and x is None:
            return f"it needs a {name}"
    if single and any(x is not None and x.dtype != torch.float32 for x in parameters):
        return "it takes weight and bias in float32"
    rows = arguments["input"], arguments.get("residual")
    if not arguments["input"].numel():
        return "it is not measured for empty tensors"
    generation = peers.gpu_generation(arguments["input"])
    if generation is None or (nvidia and generation < 8):
        return "it runs on NVIDIA GPUs, sm_80 and newer" if nvidia else "it runs on GPUs"
    return peers.unsupported_rows(*rows, *parameters)


def _two(package: str, forward: Function, backward: Function, **needed: bool) -> tuple[Peer, Peer]:
    """Return a peer with our backward, and with its own."""

    def reason(arguments: Arguments) -> str | None:
        return _unsupported(arguments, **needed)

    return Peer(package, forward, None, reason), Peer(package, forward, backward, reason)


_quack = functools.partial(_two, "quack-kernels", nvidia=True)
_liger = functools.partial(_two, "liger-kernel")
LAYER_NORM = (
    *_quack(_quack_layer_norm, _quack_layer_norm_backward, weight=True, single=True),
    *_liger(_liger_layer_norm, _liger_layer_norm_backward, weight=True, bias=True),
)
RMS_NORM = (
    *_quack(_quack_rms_norm, _quack_rms_norm_backward),
    *_liger(_liger_rms_norm, _liger_rms_norm_backward),
)
SUM_AND_RMS_NORM = (
    *_quack(_quack_sum, _quack_sum_backward),
    *_liger(_liger_sum, _liger_sum_backward),
)
