"""The tiles of the loss, its launchers, and the ops that these are registered as."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common import INTERPRETED
from ..launch import (
    Launch,
    accumulator,
    alignment,
    architecture,
    constants,
    layouts,
    next_power_of_2,
    on_device,
    plans,
    remembered,
    triton_dtype,
    unit_stride,
    unsupported_dtype,
)
from ..registration import register
from ..tuned import TuningKey, choose, named
from .kernels import Case, Labels, Strides, gradient_kernel, loss_kernel

CHUNK = 2048  # rows of logits that the linear form holds, unless a measurement says otherwise
CHUNKS = (256, 512, 1024, 2048, 4096)  # its choices: at most twice the memory


def configuration(v: int, arch: str) -> tuple[int, int]:
    """Choose how many classes a program reads at a time, and its warps."""
    most = 65536 if arch == "interpreter" else 4096
    block = max(16, min(next_power_of_2(v), most))
    return block, max(1, min(8, block // 512))


def blocks(v: int) -> list[tuple[int, int]]:
    """Return what a measurement may choose: blocks of 512 to 16384 classes, and warps."""
    most = max(16, next_power_of_2(v))
    sizes = dict.fromkeys(min(most, 512 << i) for i in range(6))
    return [(block, warps) for block in sizes for warps in (2, 4, 8, 16) if block >= 64 * warps]


def group_size(x: Tensor, block: int) -> int:
    """Choose the classes of a group: those of 16 bytes; in the slow interpreter, a full block."""
    return block if INTERPRETED else 16 // x.element_size()


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
        """Return the constant of the loss: for kl the target's negative entropy, for uniform 0."""
        if self.kind == "uniform":
            return 0.0
        _, _, _, on, off = self.labels()
        return sum(n * p * math.log(p) for n, p in ((1, on), (self.v - 2, off)) if p > 0)

    def block(self, kernel: str, x: Tensor, smooth: bool, ahead: bool) -> Any:
        """Return the classes of a block and the warps, either measured or shipped."""
        name = named(x.dtype, rows=len(x), classes=self.v) + " smooth" * smooth + " ahead" * ahead
        shipped = configuration(self.v, architecture(x.device))
        tuning_key = TuningKey(
            f"cross_entropy {kernel}", name, shipped, functools.partial(blocks, self.v)
        )
        return choose(x.device, tuning_key)

    def launch(self, kernel: Any, x: Tensor, dx: Tensor | None, g: Any, **case: bool) -> Launch:
        """Make the launch of a kernel for logits x [M, V]. g: the stride of the grad_losses."""
        labels = self.labels()
        block, warps = self.block(
            kernel.fn.__name__.removesuffix("_kernel"), x, labels.off > 0, case["ahead"]
        )
        group = group_size(x, block)
        strides = Strides(x.stride(0), g, 0 if dx is None else dx.stride(0))
        arguments: dict[str, Any] = dict(
            strides=strides,
            labels=labels,
            case=constants(
                Case(
                    columns=block,
                    group=group,
                    smooth=labels.off > 0,
                    pad=labels.off > 0 and labels.pad >= 0,
                    together=group < block and (strides.x - strides.dx) % group == 0,
                    acc=triton_dtype(accumulator(x)),
                    **case,
                )
            ),
        )
        if kernel is loss_kernel:
            classes = float(self.v - (labels.pad >= 0))
            arguments |= dict(constant=self.constant(), classes=classes)
        return Launch(kernel, (len(x),), arguments, warps)

    def loss(
        self,
        x: Tensor,
        target: Tensor,
        loss: Tensor,
        lse: Tensor,
        count: Tensor | None = None,
        dx: Tensor | None = None,
    ) -> None:
        """Fill loss [M] and lse [M, 2] for the rows of logits x [M, V]. If dx [M, V] is given, fill
        it with the gradients of the sum of the losses, or of their mean if there is a count. dx may
        be x.
        """
        given = layouts(x, target, dx)
        key = "loss", self, x.device, given, *map(alignment, (loss, lse, count))
        launch = plans.get(key)
        if launch is None:
            case = dict(mean=count is not None, ahead=dx is not None)
            launch = remembered(key, self.launch(loss_kernel, x, dx, 0, **case))
        launch(x, target, loss, lse, lse if count is None else count, x if dx is None else dx)

    def gradient(
        self,
        x: Tensor,
        target: Tensor,
        lse: Tensor,
        g: Tensor,
        dx: Tensor,
        count: Tensor | None = None,
        ahead: bool = False,
    ) -> None:
        """Fill dx [M, V], which may be x, from g, [M] or one number for all rows. With a count, g
        is the gradient of the mean. ahead: dx already holds the gradients for g = 1.
        """
        given = layouts(x, target, g, dx)
        key = "gradient", self, x.device, given, ahead, *map(alignment, (lse, count))
        launch = plans.get(key)
        if launch is None:
            stride = g.stride(0) if g.numel() > 1 else 0
            case = dict(mean=count is not None, ahead=ahead)
            launch = remembered(key, self.launch(gradient_kernel, x, dx, stride, **case))
        launch(x, target, lse, g, lse if count is None else count, dx)


def _count(target: Tensor, ignore_index: int, reduction: str, dtype: torch.dtype) -> Tensor:
    """Return the number of losses in the mean; for other reductions a tensor without elements."""
    if reduction == "mean":
        return (target != ignore_index).sum().to(dtype)
    return torch.empty(0, dtype=dtype, device=target.device)


def _reduced(loss: Tensor, count: Tensor, shape: Any, reduction: str) -> Tensor:
    if reduction == "none":
        return loss.view(shape)
    total = loss.sum()
    # 0 / 0 if every target is ignored: nan, as in torch
    return total if reduction == "sum" else total / count


def supports(*tensors: Tensor, **named: Any) -> str | None:
    """Return why the kernels cannot run this call, or None."""
    return unsupported_dtype(named["logits"] if "logits" in named else named["input"])


# ------------------------------------------------------------------------------- on given logits

_OPTIONS = "str reduction, int ignore_index, float label_smoothing, str smoothing"


def _may_write_ahead(logits: Tensor, reduction: str) -> bool:
    """Return whether grad_loss = 1 is likely. It is for a mean, on which training calls backward;
    but the loss of float16 is usually scaled, and a sum divided.
    """
    return reduction == "mean" and logits.dtype != torch.float16


def _fake(logits, target, reduction, *rest):
    dtype = accumulator(logits)
    shape = target.shape if reduction == "none" else ()
    ahead = rest[-1] and _may_write_ahead(logits, reduction)
    return (
        logits.new_empty(shape, dtype=dtype),
        logits.new_empty(target.numel(), 2, dtype=dtype),
        logits.new_empty(() if reduction == "mean" else 0, dtype=dtype),
        logits.new_empty(logits.shape if ahead else 0),
    )


@register(
    f"cross_entropy(Tensor logits, Tensor target, {_OPTIONS}, bool ahead) "
    "-> (Tensor loss, Tensor lse, Tensor count, Tensor gradient)",
    _fake,
)
def forward(logits, target, reduction, ignore_index, label_smoothing, smoothing, ahead):
    """Launch the forward: (loss, lse [M, 2], count, gradient). With `ahead`, the same launch writes
    the gradient of the logits for grad_loss = 1, if such a grad_loss is likely.
    """
    v = logits.shape[-1]
    x, flat = unit_stride(logits.reshape(-1, v)), target.reshape(-1).contiguous()
    rows = logits.new_empty(len(x), dtype=accumulator(logits))
    lse = rows.new_empty(len(x), 2)
    count = _count(flat, ignore_index, reduction, rows.dtype)
    ahead = ahead and _may_write_ahead(logits, reduction)
    gradient = logits.new_empty(logits.shape if ahead else 0)
    with on_device(logits):
        Smoothing(v, ignore_index, label_smoothing, smoothing).loss(
            x, flat, rows, lse, *((count, gradient.view(-1, v)) if ahead else ())
        )
    return _reduced(rows, count, target.shape, reduction), lse, count, gradient


def _fake_backward(grad_loss, logits, *_):
    return logits.new_empty(logits.shape)


_BACKWARD = f"Tensor grad_loss, Tensor logits, Tensor target, {_OPTIONS}, Tensor lse, Tensor count"


@register(
    f"cross_entropy_backward({_BACKWARD}, bool[] needs) -> (Tensor grad_logits)", _fake_backward
)
def backward(grad_loss, logits, *rest):
    """Launch the backward, which reads the logits once."""
    dx = logits.new_empty(logits.shape)
    _run_backward(grad_loss, logits, *rest[:-1], dx, False)
    return dx


@register(f"cross_entropy_backward_({_BACKWARD}, Tensor(a!) gradient) -> ()", lambda *_: None)
def backward_in_place(*arguments):
    """Launch a pass over the logits that replaces the gradient for grad_loss = 1 by the one for
    `grad_loss`. If that is 1, the pass ends at once: the device decides, so that the host does not
    wait.
    """
    _run_backward(*arguments, True)


def _run_backward(
    grad_loss, logits, target, reduction, ignore_index, amount, kind, lse, count, dx, ahead
):
    v = logits.shape[-1]
    x, flat = unit_stride(logits.reshape(-1, v)), target.reshape(-1).contiguous()
    g = grad_loss.reshape(-1).to(lse.dtype)
    with on_device(logits):
        Smoothing(v, ignore_index, amount, kind).gradient(
            x, flat, lse, g, dx.view(-1, v), count if reduction == "mean" else None, ahead
        )


# ---------------------------------------------------------------------------- of a linear layer


def _chunk(x: Tensor, v: int) -> int:
    """Return how many rows of logits are held at a time, for x [M, N] and V classes."""
    key = "linear_cross_entropy chunk", x.device, x.dtype, x.shape, v, CHUNK
    chunk = plans.get(key)
    if chunk is None:
        name = named(x.dtype, rows=len(x), features=x.shape[1], classes=v)
        tuning_key = TuningKey(key[0], name, (CHUNK,), lambda: [(rows,) for rows in CHUNKS])
        [chunk] = choose(x.device, tuning_key)
        remembered(key, chunk)
    return chunk


def _wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product a b, summed in `dtype`."""
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _gradients(input, weight, bias, wanted) -> list[Tensor]:
    """Make zeros for dinput (in its dtype), dw and db (in the accumulator's), empty if unwanted."""
    wide = accumulator(input)
    like = ((input, input.dtype), (weight, wide), (bias, wide))
    return [
        x.new_zeros(x.shape, dtype=dtype) if want else input.new_zeros(0)
        for want, (x, dtype) in zip(wanted, like)
    ]


def _accumulate(dx, x, weight, sums, wanted, part) -> None:
    """Write a chunk's rows of dinput, and add to dw and db what the chunk contributes."""
    dinput, dw, db = sums
    if wanted[0]:
        rows = dinput.view(dinput.shape[:-1].numel(), weight.shape[1])
        torch.mm(dx, weight, out=rows[part])
    if wanted[1]:
        dw += _wide_product(dx.t(), x, dw.dtype)
    if wanted[2]:
        db += dx.sum(0, dtype=db.dtype)


def _fake_linear(input, linear_weight, target, linear_bias, reduction, *rest):
    dtype = accumulator(input)
    shape = target.shape if reduction == "none" else ()
    saved = [want and reduction != "none" for want in rest[-1]]
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
    input, linear_weight, target, linear_bias, reduction, ignore_index, amount, kind, needs
):
    """Return loss, lse, and for mean and sum the wanted gradients, chunk of tokens by chunk."""
    v, n = linear_weight.shape
    labels = Smoothing(v, ignore_index, amount, kind)
    x, flat = input.reshape(target.numel(), n), target.reshape(-1).contiguous()
    rows = input.new_empty(len(x), dtype=accumulator(input))
    lse = rows.new_empty(len(x), 2)
    wanted = [want and reduction != "none" for want in needs]
    sums = _gradients(input, linear_weight, linear_bias, wanted)
    count, chunk = _count(flat, ignore_index, reduction, rows.dtype), _chunk(x, v)
    with on_device(input):
        for first in range(0, len(x), chunk):
            part = slice(first, first + chunk)
            logits = F.linear(x[part], linear_weight, linear_bias)
            # the gradients of the sum: those of the mean would underflow in float16
            dx = logits if any(wanted) else None
            labels.loss(logits, flat[part], rows[part], lse[part], None, dx)
            if any(wanted):
                _accumulate(logits, x[part], linear_weight, sums, wanted, part)
    return _reduced(rows, count, target.shape, reduction), lse, *sums


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
    grad_loss, input, linear_weight, target, linear_bias, reduction, ignore_index, *rest
):
    """Scale the gradients of the forward by grad_loss, and for mean by 1 / count. For none, compute
    them one chunk of tokens at a time.
    """
    amount, kind, lse, *sums, needs = rest
    if reduction != "none":
        factor = grad_loss
        if reduction == "mean":  # finite if every target is ignored
            factor = factor / _count(target, ignore_index, reduction, lse.dtype).clamp_min_(1)
        sums = [x * factor if need else x for x, need in zip(sums, needs)]
    else:
        v, n = linear_weight.shape
        labels = Smoothing(v, ignore_index, amount, kind)
        x, flat = input.reshape(target.numel(), n), target.reshape(-1).contiguous()
        g = grad_loss.reshape(-1).contiguous()
        sums, chunk = _gradients(input, linear_weight, linear_bias, needs), _chunk(x, v)
        with on_device(input):
            for first in range(0, len(x), chunk):
                part = slice(first, first + chunk)
                logits = F.linear(x[part], linear_weight, linear_bias)
                labels.gradient(logits, flat[part], lse[part], g[part], logits)
                _accumulate(logits, x[part], linear_weight, sums, needs, part)
    likes = zip(sums, (input, linear_weight, linear_bias), needs)
    return tuple(total.to(x.dtype) if need else input.new_empty(0) for total, x, need in likes)
