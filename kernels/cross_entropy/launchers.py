"""The tiles of the loss, its launchers, and the ops that these are registered as."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer.batch_invariance import on

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
from ..products import linear, matmul
from ..registration import register
from ..tuned import TuningKey, choose, named
from .kernels import Form, Labels, LossCase, LossStrides, gradient_kernel, loss_kernel

CHUNK = 2048  # rows of logits that the linear form holds, unless a measurement says otherwise
CHUNKS = (256, 512, 1024, 2048, 4096)  # its choices: at most twice the memory


def configuration(v: int, arch: str, rows: int = 1) -> tuple[int, int]:
    """Choose how many classes of `rows` rows a program reads at a time, and its warps."""
    most = 65536 if arch == "interpreter" else 4096 // rows
    block = max(16, min(next_power_of_2(v), most))
    return block, max(1, min(8, block * rows // 512))


def blocks(v: int) -> list[tuple[int, int]]:
    """Return what a measurement may choose: blocks of 512 to 16384 classes, and warps."""
    most = max(16, next_power_of_2(v))
    sizes = dict.fromkeys(min(most, 512 << i) for i in range(6))
    return [(block, warps) for block in sizes for warps in (2, 4, 8, 16) if block >= 64 * warps]


def group_size(x: Tensor, block: int) -> int:
    """Choose the classes of a group: those of 16 bytes; in the slow interpreter, a full block."""
    if INTERPRETED:
        return block
    group = 16 // x.element_size()
    # Rows that begin elsewhere in a group are summed in another order.
    return 1 if on() and x.stride(0) % group else group


# --------------------------------------------------------------------------------------- launchers


class Loss(NamedTuple):
    """The loss of a call with V classes, and which statistics of the logits it takes."""

    v: int
    ignore_index: int
    amount: float
    kind: str
    z_loss: float = 0.0
    softcap: float | None = None
    temperature: float = 1.0
    entropy: bool = False

    def labels(self) -> Labels:
        """Return the target distribution."""
        if self.kind == "uniform":
            off = self.amount / self.v
            on = 1 - self.amount + off
            return Labels(self.v, self.ignore_index, -1, on, off, 0.0, 0.0, self.z_loss)
        on, off = 1 - self.amount, self.amount / (self.v - 2)
        on_log, off_log = (p * math.log(p) if p > 0 else 0.0 for p in (on, off))
        pad = self.ignore_index
        return Labels(self.v, pad, pad, on, off, on_log, off_log, self.z_loss)

    def statistics(self, like: Tensor) -> Tensor:
        """Return room for what the backward reads of the rows of `like` [M]."""
        return like.new_empty(like.numel(), 3 if self.entropy else 2)

    def block(self, kernel: str, x: Tensor, smooth: bool, ahead: bool, weighted: bool) -> Any:
        """Return the classes of a block and the warps, either measured or shipped."""
        name = named(x.dtype, rows=len(x), classes=self.v) + " smooth" * smooth + " ahead" * ahead
        name += " weighted" * weighted + " entropy" * self.entropy
        shipped = configuration(self.v, architecture(x.device), 1 + (weighted or self.entropy))
        tuning_key = TuningKey(
            f"cross_entropy {kernel}", name, shipped, functools.partial(blocks, self.v)
        )
        return choose(x.device, tuning_key)

    def launch(self, kernel: Any, x: Tensor, dx: Tensor | None, g: Any, **case: bool) -> Launch:
        """Make the launch of a kernel for logits x [M, V]. g: the stride of the grad_losses."""
        labels = self.labels()
        flags = labels.off > 0, case["ahead"], case["weighted"]
        block, warps = self.block(kernel.fn.__name__.removesuffix("_kernel"), x, *flags)
        group = group_size(x, block)
        strides = LossStrides(x.stride(0), g, 0 if dx is None else dx.stride(0))
        arguments: dict[str, Any] = dict(
            strides=strides,
            labels=labels,
            form=Form(self.softcap or 0.0, 1.0 / self.temperature),
            classes=float(self.v - (labels.pad >= 0)),
            case=constants(
                LossCase(
                    columns=block,
                    group=group,
                    smooth=labels.off > 0,
                    pad=labels.off > 0 and labels.pad >= 0,
                    together=group < block and (strides.x - strides.dx) % group == 0,
                    acc=triton_dtype(accumulator(x)),
                    z=self.z_loss > 0,
                    softcap=self.softcap is not None,
                    scale=self.temperature != 1,
                    entropy=self.entropy,
                    **case,
                )
            ),
        )
        return Launch(kernel, (len(x),), arguments, warps)

    def loss(
        self,
        x: Tensor,
        target: Tensor,
        loss: Tensor,
        lse: Tensor,
        totals: Tensor | None = None,
        dx: Tensor | None = None,
        weight: Tensor | None = None,
        entropy: Tensor | None = None,
        mean: bool = False,
    ) -> None:
        """Fill loss [M], lse and entropy [M] for the rows of logits x [M, V]. If dx [M, V] is
        given, fill it with the gradients of the sum of the losses, or of their mean. dx may be x.
        totals: what `_totals_of` returns, for a mean or with weights.
        """
        given = layouts(x, target, dx, weight)
        key = "loss", self, x.device, given, mean, *map(alignment, (loss, lse, totals, entropy))
        launch = plans.get(key)
        if launch is None:
            case = dict(mean=mean, ahead=dx is not None, weighted=weight is not None)
            launch = remembered(key, self.launch(loss_kernel, x, dx, 0, **case))
        optional = (lse, totals), (x, dx), (lse, weight), (lse, entropy)
        launch(x, target, loss, lse, *(a if b is None else b for a, b in optional))

    def gradient(
        self,
        x: Tensor,
        target: Tensor,
        lse: Tensor,
        g: Tensor,
        dx: Tensor,
        totals: Tensor | None = None,
        weight: Tensor | None = None,
        g_entropy: Tensor | None = None,
        mean: bool = False,
        ahead: bool = False,
    ) -> None:
        """Fill dx [M, V], which may be x, from g, [M] or one number for all rows: the gradients of
        the losses, or that of their mean; and from g_entropy [M]. ahead: dx already holds the
        gradients for g = 1.
        """
        given = layouts(x, target, g, dx, weight)
        key = "gradient", self, x.device, given, mean, ahead, *map(alignment, (lse, totals))
        launch = plans.get(key)
        if launch is None:
            stride = g.stride(0) if g.numel() > 1 else 0
            case = dict(mean=mean, ahead=ahead, weighted=weight is not None)
            launch = remembered(key, self.launch(gradient_kernel, x, dx, stride, **case))
        optional = (lse, totals), (dx, dx), (lse, weight), (lse, g_entropy)
        launch(x, target, lse, g, *(a if b is None else b for a, b in optional))


def _totals_of(
    target: Tensor, loss: Loss, reduction: str, weight: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the `Totals` of the rows of target [M]: [1], or [3] with weights [V]; without elements
    if no kernel reads them.
    """
    kept = target != loss.ignore_index
    if weight is None:
        if reduction == "mean":
            return kept.sum().to(dtype)
        return torch.empty(0, dtype=dtype, device=target.device)
    of_targets = (weight[target.where(kept, 0)] * kept).sum()
    rows, pad, one = kept.sum(), loss.labels().pad, torch.ones_like(of_targets)
    z_factor = of_targets / rows.clamp(min=1) if reduction == "mean" else one
    smoothed = weight.sum() - (weight[pad] if pad >= 0 else 0)
    if reduction == "mean":  # nan for weights of 0 alone, as in torch: smoothing may divide more
        of_targets = of_targets / ((of_targets != 0) | (rows == 0))
    return torch.stack([of_targets, z_factor, smoothed])


def reduced(loss: Tensor, totals: Tensor, shape: Any, reduction: str) -> Tensor:
    if reduction == "none":
        return loss.view(shape)
    total = loss.sum()
    # 0 / 0 if every target is ignored: nan, as in torch
    return total if reduction == "sum" else total / totals.view(-1)[0]


def supports(*tensors: Tensor, **named: Any) -> str | None:
    """Return why the kernels cannot run this call, or None."""
    return unsupported_dtype(named["logits"] if "logits" in named else named["input"])


# ------------------------------------------------------------------------------- on given logits

_OPTIONS = (
    "str reduction, int ignore_index, float label_smoothing, str smoothing, Tensor? weight, "
    "float z_loss, float? softcap, float temperature, bool return_entropy"
)


def _may_write_ahead(logits: Tensor, reduction: str, entropy: bool) -> bool:
    """Return whether the gradient is likely that for grad_loss = 1. It is for a mean, on which
    training calls backward; but the loss of float16 is usually scaled, a sum divided, and the
    gradient of an entropy not known.
    """
    return reduction == "mean" and not entropy and logits.dtype != torch.float16


def _loss_of(v: int, options: tuple[Any, ...]) -> tuple[Loss, str, Tensor | None]:
    """Return the loss that the options of an op ask for, its reduction, and the weights [V]."""
    reduction, ignore_index, amount, kind, weight, *more = options
    return Loss(v, ignore_index, amount, kind, *more), reduction, weight


def _as_read(target: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Any:
    """Return target as [M] and the weights in the dtype of the sums, both contiguous."""
    weight = None if weight is None else weight.to(dtype).contiguous()
    return target.reshape(-1).contiguous(), weight


def _fake_statistics(x, target, options) -> tuple[Tensor, ...]:
    """Return loss, entropy, lse and totals without their values."""
    reduction, weight, entropy, dtype = options[0], options[4], options[8], accumulator(x)
    shape = target.shape if reduction == "none" else ()
    totals = 3 if weight is not None else () if reduction == "mean" else 0
    shapes = shape, target.shape if entropy else 0, (target.numel(), 3 if entropy else 2), totals
    return tuple(x.new_empty(n, dtype=dtype) for n in shapes)


def _fake(logits, target, *options):
    ahead = options[-1] and _may_write_ahead(logits, options[0], options[-2])
    return *_fake_statistics(logits, target, options), logits.new_empty(
        logits.shape if ahead else 0
    )


@register(
    f"cross_entropy(Tensor logits, Tensor target, {_OPTIONS}, bool ahead) "
    "-> (Tensor loss, Tensor entropy, Tensor lse, Tensor totals, Tensor gradient)",
    _fake,
)
def forward(logits, target, *options):
    """Launch the forward: (loss, entropy, lse, totals, gradient). With `ahead`, the same launch
    writes the gradient of the logits for grad_loss = 1, if such a grad_loss is likely.
    """
    *options, ahead = options
    v, dtype = logits.shape[-1], accumulator(logits)
    loss, reduction, weight = _loss_of(v, options)
    x = unit_stride(logits.reshape(-1, v))
    flat, weight = _as_read(target, weight, dtype)
    rows = logits.new_empty(len(x), dtype=dtype)
    lse = loss.statistics(rows)
    entropy = rows.new_empty(target.shape if loss.entropy else 0)
    totals = _totals_of(flat, loss, reduction, weight, dtype)
    ahead = ahead and _may_write_ahead(logits, reduction, loss.entropy)
    gradient = logits.new_empty(logits.shape if ahead else 0)
    with on_device(logits):
        more = gradient.view(-1, v) if ahead else None, weight, entropy if loss.entropy else None
        loss.loss(x, flat, rows, lse, totals, *more, reduction == "mean")
    return reduced(rows, totals, target.shape, reduction), entropy, lse, totals, gradient


def _fake_backward(grad_loss, grad_entropy, logits, *_):
    return logits.new_empty(logits.shape)


_BACKWARD = (
    f"Tensor grad_loss, Tensor? grad_entropy, Tensor logits, Tensor target, {_OPTIONS}, "
    "Tensor lse, Tensor totals"
)


@register(
    f"cross_entropy_backward({_BACKWARD}, bool[] needs) -> (Tensor grad_logits)", _fake_backward
)
def backward(*arguments):
    """Launch the backward, which reads the logits once."""
    logits = arguments[2]
    dx = logits.new_empty(logits.shape)
    _run_backward(*arguments[:-1], dx, False)
    return dx


@register(f"cross_entropy_backward_({_BACKWARD}, Tensor(a!) gradient) -> ()", lambda *_: None)
def backward_in_place(*arguments):
    """Launch a pass over the logits that replaces the gradient for grad_loss = 1 by the one for
    `grad_loss`. If that is 1, the pass ends at once: the device decides, so that the host does not
    wait.
    """
    _run_backward(*arguments, True)


def _run_backward(grad_loss, grad_entropy, logits, target, *rest):
    *options, lse, totals, dx, ahead = rest
    v = logits.shape[-1]
    loss, reduction, weight = _loss_of(v, options)
    x = unit_stride(logits.reshape(-1, v))
    flat, weight = _as_read(target, weight, lse.dtype)
    g = grad_loss.reshape(-1).to(lse.dtype)
    with on_device(logits):
        more = totals, weight, _of_entropy(loss, grad_entropy, lse)
        loss.gradient(x, flat, lse, g, dx.view(-1, v), *more, reduction == "mean", ahead)


def _of_entropy(loss: Loss, grad_entropy: Tensor | None, lse: Tensor) -> Tensor | None:
    """Return the gradients of the entropies [M], zeros if nothing depends on them."""
    if not loss.entropy:
        return None
    return (
        lse.new_zeros(len(lse)) if grad_entropy is None else grad_entropy.reshape(-1).contiguous()
    )


# ---------------------------------------------------------------------------- of a linear layer


def chunk_of(x: Tensor, v: int) -> int:
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


def gradients_of(input, weight, bias, wanted) -> list[Tensor]:
    """Make zeros for dinput (in its dtype), dw and db (in the accumulator's), empty if unwanted."""
    wide = accumulator(input)
    like = ((input, input.dtype), (weight, wide), (bias, wide))
    return [
        x.new_zeros(x.shape, dtype=dtype) if want else input.new_zeros(0)
        for want, (x, dtype) in zip(wanted, like)
    ]


def accumulate(dx, x, weight, sums, wanted, part) -> None:
    """Write a chunk's rows of dinput, and add to dw and db what the chunk contributes."""
    dinput, dw, db = sums
    if wanted[0]:
        rows = dinput.view(dinput.shape[:-1].numel(), weight.shape[1])
        matmul(dx, weight, out=rows[part])
    if wanted[1]:
        dw += _wide_product(dx.t(), x, dw.dtype)
    if wanted[2]:
        db += dx.sum(0, dtype=db.dtype)


def _sums_ahead(reduction: str, entropy: bool) -> bool:
    """Return whether the forward computes the gradients: those of all rows have one factor."""
    return reduction != "none" and not entropy


def _fake_linear(input, linear_weight, target, linear_bias, *rest):
    *options, return_argmax, needs = rest
    loss, entropy, lse, totals = _fake_statistics(input, target, options)
    saved = [want and _sums_ahead(options[0], options[-1]) for want in needs]
    sums = gradients_of(input, linear_weight, linear_bias, saved)
    return loss, entropy, target.new_empty(target.shape if return_argmax else 0), lse, totals, *sums


_LINEAR = (
    f"Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, {_OPTIONS}, "
    "bool return_argmax"
)


@register(
    f"linear_cross_entropy({_LINEAR}, bool[] needs) -> (Tensor loss, Tensor entropy, "
    "Tensor argmax, Tensor lse, Tensor totals, Tensor sum_input, Tensor sum_weight, "
    "Tensor sum_bias)",
    _fake_linear,
)
def linear_forward(input, linear_weight, target, linear_bias, *rest):
    """Return loss, entropy, argmax, lse, totals, and for mean and sum the wanted gradients, chunk
    of tokens by chunk.
    """
    *options, return_argmax, needs = rest
    v, n = linear_weight.shape
    loss, reduction, weight = _loss_of(v, options)
    x, dtype = input.reshape(target.numel(), n), accumulator(input)
    flat, weight = _as_read(target, weight, dtype)
    rows = input.new_empty(len(x), dtype=dtype)
    lse, entropy = loss.statistics(rows), torch.empty_like(rows) if loss.entropy else None
    argmax = target.new_empty(target.shape if return_argmax else 0)
    wanted = [want and _sums_ahead(reduction, loss.entropy) for want in needs]
    sums = gradients_of(input, linear_weight, linear_bias, wanted)
    totals, chunk = _totals_of(flat, loss, reduction, weight, dtype), chunk_of(x, v)
    with on_device(input):
        for first in range(0, len(x), chunk):
            part = slice(first, first + chunk)
            logits = linear(x[part], linear_weight, linear_bias)
            if return_argmax:  # before the kernel overwrites the logits
                torch.argmax(logits, -1, out=argmax.view(-1)[part])
            # the gradients of the sum: those of the mean would underflow in float16
            more = totals, logits if any(wanted) else None, weight
            of_rows = None if entropy is None else entropy[part]
            loss.loss(logits, flat[part], rows[part], lse[part], *more, of_rows)
            if any(wanted):
                accumulate(logits, x[part], linear_weight, sums, wanted, part)
            del logits, more  # before the logits of the next chunk
    found = rows.new_empty(0) if entropy is None else entropy.view(target.shape)
    return reduced(rows, totals, target.shape, reduction), found, argmax, lse, totals, *sums


def fake_gradients(needs, *inputs):
    none = inputs[0].new_empty(0)
    return tuple(x.new_empty(x.shape) if need else none.clone() for need, x in zip(needs, inputs))


def without_underflow(input: Tensor, g: Tensor, more: Tensor | None = None) -> tuple[Any, ...]:
    """Return a unit and the gradients of the rows in it, such that the largest is 1 in float16,
    where those of a mean would underflow; in other dtypes the unit is None.
    """
    if input.dtype != torch.float16 or not g.numel():
        return None, g, more
    every = g if more is None else torch.stack([g, more])
    unit = every.abs().amax().clamp(min=1e-30)
    return unit, g / unit, None if more is None else more / unit


@register(
    f"linear_cross_entropy_backward(Tensor grad_loss, Tensor? grad_entropy, {_LINEAR}, Tensor lse, "
    "Tensor totals, Tensor sum_input, Tensor sum_weight, Tensor sum_bias, bool[] needs) "
    "-> (Tensor grad_input, Tensor grad_linear_weight, Tensor grad_linear_bias)",
    lambda _, __, input, linear_weight, target, linear_bias, *rest: fake_gradients(
        rest[-1], input, linear_weight, linear_bias
    ),
)
def linear_backward(grad_loss, grad_entropy, input, linear_weight, target, linear_bias, *rest):
    """Scale the gradients of the forward by grad_loss, and for mean by 1 / divisor. For none, and
    with entropies, compute them one chunk of tokens at a time.
    """
    *options, _, lse, totals, dinput, dw, db, needs = rest
    v, n = linear_weight.shape
    loss, reduction, weight = _loss_of(v, options)
    factor = grad_loss
    if reduction == "mean":  # finite if every target is ignored
        divisor = totals.view(-1)[0]
        factor = factor / divisor.where(divisor != 0, 1)
    if _sums_ahead(reduction, loss.entropy):
        sums = [x * factor if need else x for x, need in zip((dinput, dw, db), needs)]
    else:
        x = input.reshape(target.numel(), n)
        flat, weight = _as_read(target, weight, lse.dtype)
        g = factor.expand(target.shape).reshape(-1).contiguous()
        unit, g, g_entropy = without_underflow(input, g, _of_entropy(loss, grad_entropy, lse))
        sums, chunk = gradients_of(input, linear_weight, linear_bias, needs), chunk_of(x, v)
        with on_device(input):
            for first in range(0, len(x), chunk):
                part = slice(first, first + chunk)
                logits = linear(x[part], linear_weight, linear_bias)
                of_rows = None if g_entropy is None else g_entropy[part]
                more = logits, totals, weight, of_rows
                loss.gradient(logits, flat[part], lse[part], g[part], *more)
                accumulate(logits, x[part], linear_weight, sums, needs, part)
                del logits, more
        sums = sums if unit is None else [x * unit for x in sums]
    likes = zip(sums, (input, linear_weight, linear_bias), needs)
    return tuple(total.to(x.dtype) if need else input.new_empty(0) for total, x, need in likes)
