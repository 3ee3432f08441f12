"""Cross-entropy over V classes with smoothed labels, on logits that are given, or on those of a
linear layer, a part of the tokens at a time.

Forward, per row of logits x with target t:
    lse = max + log sum_c exp(x_c - max), kept as two numbers: their sum would lose digits
    loss = constant + lse - (on - off) x_t - off sum_{c != pad} x_c
Backward, from g, the gradient of the row's loss:
    dx_c = g (exp(x_c - lse) - (on - off) [c = t] - off [c != pad])
    linear: x = input w^T + b      dinput = dx w      dw = dx^T input      db = sum dx
The target distribution has `on` at t and `off` at every other class but pad; its sum is 1:
    uniform (torch): off = e / V, on = 1 - e + off, no pad, constant 0
    kl (the tutorials): off = e / (V - 2), on = 1 - e, pad = ignore_index, and the constant is its
        negative entropy, on log on + (V - 2) off log off
A row whose target is ignore_index has loss 0 and g = 0; mean divides by the others.

Shapes: logits [M, V], target [M] int64, loss [M], lse [M, 2]; input [M, N], w [V, N], b [V]. Any
dtype in; lse, loss and the sums of dw and db in float32 (float64 for float64). The linear form
holds CHUNK rows of logits at a time and never all of them; for mean and sum it takes the gradients
in the forward (three GEMMs, torch's own), for none it saves lse and computes the logits again.
FLOPs: 2 M N V each GEMM; least bytes beside them: each logit read twice and written once.
Deterministic: each gradient has one owner, and the chunks are summed in order.
Source: Szegedy et al. 2016, "Rethinking the Inception Architecture", section 7, for the smoothing.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import INTERPRETED, LOG2E
from .launch import (
    Launch,
    accumulator,
    alignment,
    architecture,
    layouts,
    next_power_of_2,
    on_device,
    plans,
    remembered,
    triton_dtype,
    unit_stride,
    unsupported_dtype,
)
from .registration import register

__all__ = ["INTERPRETED", "supports"]

CHUNK = 2048  # rows of logits that the linear form holds


def configuration(v: int, arch: str) -> tuple[int, int]:
    """Choose how many classes a program takes at a time, and its warps."""
    most = 65536 if arch == "interpreter" else 4096
    block = max(16, min(next_power_of_2(v), most))
    return block, max(1, min(8, block // 512))


# ----------------------------------------------------------------------------------------- kernels


class Labels(NamedTuple):
    """The target distribution over V classes: `on` at the target, `off` at every other class but
    `pad`. A target that is ignore_index has none.
    """

    V: Any
    ignore_index: Any
    pad: Any
    on: Any
    off: Any


@triton.jit
def _loss(
    X,  # [M, V]
    T,  # [M]
    LOSS,  # out [M]
    LSE,  # out [M, 2]
    stride,
    labels,
    constant,
    classes,
    BLOCK: tl.constexpr,
    SMOOTH: tl.constexpr,
    ACC: tl.constexpr,
):
    """One program owns a row: it computes the log-sum-exp online, and the loss. `classes` counts
    those that smoothing gives a part to.
    """
    i = tl.program_id(0).to(tl.int64)
    t = tl.load(T + i)
    base = X + i * stride
    kept = t != labels.ignore_index
    known = kept & (t >= 0) & (t < labels.V)  # a bad target never reads out of bounds
    x_t = tl.load(base + t, mask=known, other=0.0).to(ACC)
    origin = tl.where(x_t == float("-inf"), 0.0, x_t)  # an offset of all logits leaves the sum
    c = tl.arange(0, BLOCK)
    m = tl.full([BLOCK], float("-inf"), ACC)
    l = tl.zeros([BLOCK], ACC)
    total = tl.zeros([BLOCK], ACC)
    for o in tl.range(0, labels.V, BLOCK):
        inside = o + c < labels.V
        x = tl.load(base + o + c, mask=inside, other=float("-inf")).to(ACC)
        m_new = tl.maximum(m, x)
        seen = tl.where(m_new == float("-inf"), 0.0, m_new)
        l = l * tl.math.exp2((m - seen) * LOG2E) + tl.math.exp2((x - seen) * LOG2E)
        m = m_new
        if SMOOTH:
            total += tl.where(inside & (o + c != labels.pad), x - origin, 0.0)
    top = tl.max(m, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    log_sum = tl.math.log(tl.sum(l * tl.math.exp2((m - shift) * LOG2E), 0))
    loss = constant + log_sum - (labels.on - labels.off) * (x_t - shift)
    if SMOOTH:
        loss -= labels.off * (tl.sum(total, 0) + classes * (origin - shift))
    tl.store(LOSS + i, tl.where(kept, loss, 0.0))
    tl.store(LSE + 2 * i, shift)
    tl.store(LSE + 2 * i + 1, log_sum)


class Strides(NamedTuple):
    """The row strides of the logits, of the losses' gradients and of the logits' gradients."""

    x: Any
    g: Any
    dx: Any


@triton.jit
def _gradient(
    X, T, LSE, G, DX, strides, labels, BLOCK: tl.constexpr, SMOOTH: tl.constexpr, ACC: tl.constexpr
):
    """One program owns BLOCK classes of a row; DX may be X.

    Reads the logits X [M, V], the targets T [M], LSE [M, 2] and G, [M] or one number for all rows;
    writes DX [M, V].
    """
    i = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = tl.load(T + i)
    g = tl.where(t != labels.ignore_index, tl.load(G + i * strides.g).to(ACC), 0.0)
    shift = tl.load(LSE + 2 * i)
    log_sum = tl.load(LSE + 2 * i + 1)
    x = tl.load(X + i * strides.x + c, mask=c < labels.V, other=0.0).to(ACC)
    dx = tl.math.exp2((x - shift - log_sum) * LOG2E)
    dx -= tl.where(c == t, labels.on - labels.off, 0.0)
    if SMOOTH:
        dx -= tl.where(c != labels.pad, labels.off, 0.0)
    tl.store(DX + i * strides.dx + c, (dx * g).to(DX.dtype.element_ty), mask=c < labels.V)


# --------------------------------------------------------------------------------------- launchers


class Smoothing(NamedTuple):
    """How a call smooths the labels of V classes."""

    v: int
    ignore_index: int
    amount: float
    kind: str

    def labels(self) -> Labels:
        """Return the target distribution."""
        if self.kind == "uniform":
            off = self.amount / self.v
            return Labels(self.v, self.ignore_index, -1, 1 - self.amount + off, off)
        off = self.amount / (self.v - 2)
        return Labels(self.v, self.ignore_index, self.ignore_index, 1 - self.amount, off)

    def constant(self) -> float:
        """Return what the loss adds to the cross-entropy: for kl the negative entropy."""
        if self.kind == "uniform":
            return 0.0
        _, _, _, on, off = self.labels()
        return sum(n * p * math.log(p) for n, p in ((1, on), (self.v - 2, off)) if p > 0)

    def launch(self, kernel: Any, x: Tensor, **more: Any) -> Launch:
        """Make the launch of a kernel for the rows of logits x [M, V]."""
        block, warps = configuration(self.v, architecture(x.device))
        labels = self.labels()
        arguments = dict(
            labels=labels,
            BLOCK=block,
            SMOOTH=labels.off > 0,
            ACC=triton_dtype(accumulator(x)),
            **more,
        )
        grid = (len(x),) if kernel is _loss else (len(x), triton.cdiv(self.v, block))
        return Launch(kernel, grid, arguments, warps)

    def loss(self, x: Tensor, target: Tensor, loss: Tensor, lse: Tensor) -> None:
        """Fill loss [M] and lse [M, 2] of the rows of logits x [M, V]."""
        key = "loss", self, x.device, layouts(x, target), alignment(loss), alignment(lse)
        launch = plans.get(key)
        if launch is None:
            classes = float(self.v - (self.labels().pad >= 0))
            more = dict(stride=x.stride(0), constant=self.constant(), classes=classes)
            launch = remembered(key, self.launch(_loss, x, **more))
        launch(x, target, loss, lse)

    def gradient(self, x: Tensor, target: Tensor, lse: Tensor, g: Tensor, dx: Tensor) -> None:
        """Fill dx [M, V], which may be x. g is [M], or one number for all rows."""
        key = "gradient", self, x.device, layouts(x, target, g, dx), alignment(lse)
        launch = plans.get(key)
        if launch is None:
            strides = Strides(x.stride(0), g.stride(0) if g.numel() > 1 else 0, dx.stride(0))
            launch = remembered(key, self.launch(_gradient, x, strides=strides))
        launch(x, target, lse, g, dx)


def _count(target: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:
    return (target != ignore_index).sum().to(dtype)


def _share(target: Tensor, ignore_index: int, reduction: str, dtype: torch.dtype) -> Tensor:
    """Return the weight [1] of a row's loss in the whole, finite if every target is ignored."""
    if reduction == "mean":
        return _count(target, ignore_index, dtype).clamp_min_(1).reciprocal_().view(1)
    return torch.ones(1, dtype=dtype, device=target.device)


def _reduced(loss: Tensor, target: Tensor, ignore_index: int, shape: Any, reduction: str) -> Tensor:
    if reduction == "none":
        return loss.view(shape)
    total = loss.sum()
    # 0 / 0 where every target is ignored: nan, as in torch
    return total if reduction == "sum" else total / _count(target, ignore_index, loss.dtype)


def supports(*tensors: Tensor, **named: Any) -> str | None:
    """Return why the kernels cannot run this call, or None."""
    return unsupported_dtype(named["logits"] if "logits" in named else named["input"])


# ------------------------------------------------------------------------------- on given logits

_OPTIONS = "str reduction, int ignore_index, float label_smoothing, str smoothing"


def _fake(logits, target, reduction, *_):
    dtype = accumulator(logits)
    shape = target.shape if reduction == "none" else ()
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(target.numel(), 2, dtype=dtype)


@register(
    f"cross_entropy(Tensor logits, Tensor target, {_OPTIONS}) -> (Tensor loss, Tensor lse)", _fake
)
def forward(logits, target, reduction, ignore_index, label_smoothing, smoothing):
    """Launch the forward: (loss, lse [M, 2])."""
    v = logits.shape[-1]
    x, flat = unit_stride(logits.reshape(-1, v)), target.reshape(-1).contiguous()
    rows = logits.new_empty(len(x), dtype=accumulator(logits))
    lse = rows.new_empty(len(x), 2)
    with on_device(logits):
        Smoothing(v, ignore_index, label_smoothing, smoothing).loss(x, flat, rows, lse)
    return _reduced(rows, flat, ignore_index, target.shape, reduction), lse


def _fake_backward(grad_loss, logits, *_):
    return logits.new_empty(logits.shape)


@register(
    f"cross_entropy_backward(Tensor grad_loss, Tensor logits, Tensor target, {_OPTIONS}, "
    "Tensor lse, bool[] needs) -> (Tensor grad_logits)",
    _fake_backward,
)
def backward(
    grad_loss, logits, target, reduction, ignore_index, label_smoothing, smoothing, lse, needs
):
    """Launch the backward, one pass over the logits."""
    v = logits.shape[-1]
    x, flat = unit_stride(logits.reshape(-1, v)), target.reshape(-1).contiguous()
    dx = logits.new_empty(logits.shape)
    g = grad_loss.reshape(-1).to(lse.dtype)
    if reduction != "none":
        g = g * _share(flat, ignore_index, reduction, lse.dtype)
    with on_device(logits):
        Smoothing(v, ignore_index, label_smoothing, smoothing).gradient(
            x, flat, lse, g, dx.view(-1, v)
        )
    return dx


# ---------------------------------------------------------------------------- of a linear layer


def _logits(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, w, b)


def _wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product a b, summed in `dtype`."""
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _gradients(input, weight, bias, wanted) -> list[Tensor]:
    """Make zeros for the sums: dinput in its dtype, dw and db in the accumulator's. An unwanted one
    has no elements.
    """
    wide = accumulator(input)
    like = ((input, input.dtype), (weight, wide), (bias, wide))
    return [
        x.new_zeros(x.shape, dtype=dtype) if want and x is not None else input.new_zeros(0)
        for want, (x, dtype) in zip(wanted, like)
    ]


def _accumulate(dx, x, weight, sums, wanted, part) -> None:
    """Add what a chunk's dx contributes to the three sums."""
    dinput, dw, db = sums
    if wanted[0]:
        rows = dinput.view(dinput.shape[:-1].numel(), weight.shape[1])
        torch.mm(dx, weight, out=rows[part])
    if wanted[1]:
        dw += _wide_product(dx.t(), x, dw.dtype)
    if wanted[2]:
        db += dx.sum(0, dtype=db.dtype)


def _fake_linear(
    input,
    linear_weight,
    target,
    linear_bias,
    reduction,
    ignore_index,
    label_smoothing,
    smoothing,
    needs,
):
    dtype = accumulator(input)
    shape = target.shape if reduction == "none" else ()
    saved = [want and reduction != "none" for want in needs]
    sums = _gradients(input, linear_weight, linear_bias, saved)
    lse = input.new_empty(target.numel(), 2, dtype=dtype)
    return input.new_empty(shape, dtype=dtype), lse, *sums


_LINEAR = f"Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, {_OPTIONS}"


@register(
    f"linear_cross_entropy({_LINEAR}, bool[] needs) "
    "-> (Tensor loss, Tensor lse, Tensor sum_input, Tensor sum_weight, Tensor sum_bias)",
    _fake_linear,
)
def linear_forward(
    input,
    linear_weight,
    target,
    linear_bias,
    reduction,
    ignore_index,
    label_smoothing,
    smoothing,
    needs,
):
    """Return loss, lse, and for mean and sum the wanted gradients, from one chunk of tokens after
    the other.
    """
    v, n = linear_weight.shape
    labels = Smoothing(v, ignore_index, label_smoothing, smoothing)
    x, flat = input.reshape(target.numel(), n), target.reshape(-1).contiguous()
    rows = input.new_empty(len(x), dtype=accumulator(input))
    lse = rows.new_empty(len(x), 2)
    wanted = [want and reduction != "none" for want in needs]
    sums = _gradients(input, linear_weight, linear_bias, wanted)
    one = rows.new_ones(1)  # a row's share of the mean would underflow in float16
    with on_device(input):
        for first in range(0, len(x), CHUNK):
            part = slice(first, first + CHUNK)
            logits = _logits(x[part], linear_weight, linear_bias)
            labels.loss(logits, flat[part], rows[part], lse[part])
            if any(wanted):
                labels.gradient(logits, flat[part], lse[part], one, logits)
                _accumulate(logits, x[part], linear_weight, sums, wanted, part)
    return _reduced(rows, flat, ignore_index, target.shape, reduction), lse, *sums


def _fake_linear_backward(grad_loss, input, linear_weight, target, linear_bias, *rest):
    likes = zip(rest[-1], (input, linear_weight, linear_bias))
    return tuple(x.new_empty(x.shape) if need else input.new_empty(0) for need, x in likes)


@register(
    f"linear_cross_entropy_backward(Tensor grad_loss, {_LINEAR}, Tensor lse, Tensor sum_input, "
    "Tensor sum_weight, Tensor sum_bias, bool[] needs) "
    "-> (Tensor grad_input, Tensor grad_linear_weight, Tensor grad_linear_bias)",
    _fake_linear_backward,
)
def linear_backward(
    grad_loss,
    input,
    linear_weight,
    target,
    linear_bias,
    reduction,
    ignore_index,
    label_smoothing,
    smoothing,
    lse,
    sum_input,
    sum_weight,
    sum_bias,
    needs,
):
    """Scale the gradients of the forward by grad_loss and a row's share. For none, compute them
    from one chunk of tokens after the other.
    """
    sums = [sum_input, sum_weight, sum_bias]
    if reduction != "none":
        factor = grad_loss.to(lse.dtype) * _share(target, ignore_index, reduction, lse.dtype)
        sums = [x.to(lse.dtype) * factor if need else x for x, need in zip(sums, needs)]
    else:
        v, n = linear_weight.shape
        labels = Smoothing(v, ignore_index, label_smoothing, smoothing)
        x, flat = input.reshape(target.numel(), n), target.reshape(-1).contiguous()
        g = grad_loss.reshape(-1).to(lse.dtype).contiguous()
        sums = _gradients(input, linear_weight, linear_bias, needs)
        with on_device(input):
            for first in range(0, len(x), CHUNK):
                part = slice(first, first + CHUNK)
                logits = _logits(x[part], linear_weight, linear_bias)
                labels.gradient(logits, flat[part], lse[part], g[part], logits)
                _accumulate(logits, x[part], linear_weight, sums, needs, part)
    likes = zip(sums, (input, linear_weight, linear_bias), needs)
    return tuple(total.to(x.dtype) if need else input.new_empty(0) for total, x, need in likes)
