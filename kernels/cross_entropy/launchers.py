"""The tiles of the loss, its launchers, and the ops that these are registered as."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer.batch_invariance import on

from ..common import INTERPRETED
from ..launch import (
    Launch,
    accumulator,
    architecture,
    as_rows,
    constants,
    dense,
    next_power_of_2,
    on_device,
    planned,
    row_stride,
    triton_dtype,
    unsupported_dtype,
)
from ..products import linear, matmul
from ..registration import gradients_like, register
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
    """The loss of a call with V classes: the options of an op, and what it returns beside."""

    v: int
    reduction: str
    ignore_index: int
    amount: float
    kind: str
    weighted: bool
    z_loss: float
    softcap: float | None
    temperature: float
    entropy: bool

    @property
    def sums_ahead(self) -> bool:
        """Whether a linear forward computes the gradients: those of all rows have one factor."""
        return self.reduction != "none" and not self.entropy

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

    def launch(self, kernel: Any, x: Tensor, dx: int, g: int, ahead: bool, mean: bool) -> Launch:
        """Make the launch of a kernel for logits x [M, V]. dx, g: the strides of the gradients of
        the logits and of the losses, 0 without them.
        """
        labels = self.labels()
        smooth, weighted, entropy = labels.off > 0, self.weighted, self.entropy
        flags = dict(smooth=smooth, ahead=ahead, weighted=weighted, entropy=entropy)
        words = [word for word, there in flags.items() if there]
        key = TuningKey(
            f"cross_entropy {kernel.fn.__name__.removesuffix('_kernel')}",
            " ".join((named(x.dtype, rows=len(x), classes=self.v), *words)),
            configuration(self.v, architecture(x.device), 1 + (weighted or entropy)),
            functools.partial(blocks, self.v),
        )
        block, warps = choose(x.device, key)
        group = group_size(x, block)
        strides = LossStrides(x.stride(0), g, dx)
        arguments: dict[str, Any] = dict(
            strides=strides,
            labels=labels,
            form=Form(self.softcap or 0.0, 1.0 / self.temperature),
            classes=float(self.v - (labels.pad >= 0)),
            case=constants(
                LossCase(
                    columns=block,
                    group=group,
                    pad=smooth and labels.pad >= 0,
                    together=group < block and (strides.x - strides.dx) % group == 0,
                    acc=triton_dtype(accumulator(x)),
                    z=self.z_loss > 0,
                    softcap=self.softcap is not None,
                    scale=self.temperature != 1,
                    mean=mean,
                    **flags,
                )
            ),
        )
        return Launch(kernel, (len(x),), arguments, warps)


@planned
def _loss_launch(loss: Loss, backward: bool, tensors: tuple[Any, ...]) -> Launch:
    """Make the launch of a chunk, for the tensors that `_run` takes."""
    x, _, _, g, _, dx, *_ = tensors
    kernel, stride = (gradient_kernel, _stride_of(g)) if backward else (loss_kernel, 0)
    ahead = not backward and dx is not None
    return loss.launch(kernel, x, 0 if dx is None else dx.stride(0), stride, ahead, mean=False)


def _run(loss: Loss, backward: bool, *tensors: Any) -> None:
    """Launch a kernel on a chunk. The tensors are those of its pointers, of which the gradient of
    the logits, the weights and what is of entropies may be None.
    """
    launch = _loss_launch(loss, backward, tensors)
    *given, dx, weight, entropy = tensors
    x, lse = tensors[0], tensors[2 if backward else 3]
    optional = (x, dx), (lse, weight), (lse, entropy)
    launch(*given, *(a if b is None else b for a, b in optional))


def _stride_of(g: Tensor) -> int:
    """Return the stride of the gradients of the losses, 0 for one number."""
    return row_stride(g, 1) if g.numel() > 1 else 0


def _totals_of(target: Tensor, loss: Loss, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the `Totals` of the rows of a target: [1], or [3] with weights [V]; without elements
    if no kernel reads them.
    """
    kept, mean = target != loss.ignore_index, loss.reduction == "mean"
    if weight is None:
        if mean:
            return kept.sum().to(dtype)
        return target.new_empty_strided((0,), (1,), dtype=dtype)
    of_targets = (weight[target.where(kept, 0)] * kept).sum()
    rows, pad, one = kept.sum(), loss.labels().pad, torch.ones_like(of_targets)
    z_factor = of_targets / rows.clamp(min=1) if mean else one
    smoothed = weight.sum() - (weight[pad] if pad >= 0 else 0)
    if mean:  # nan for weights of 0 alone, as in torch: smoothing may divide more
        of_targets = of_targets / ((of_targets != 0) | (rows == 0))
    return torch.stack([of_targets, z_factor, smoothed])


def reduced(losses: Tensor, totals: Tensor, reduction: str) -> Tensor:
    """Return the losses, or their sum, or their mean."""
    if reduction == "none":
        return losses
    total = losses.sum()
    # 0 / 0 if every target is ignored: nan, as in torch
    return total if reduction == "sum" else total / (totals[0] if totals.dim() else totals)


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


def _loss_of(v: int, options: Sequence[Any]) -> Loss:
    """Return the loss that the options of an op ask for."""
    fields = *options[:4], options[4] is not None, *options[5:]
    return Loss(v, *fields)


def _as_read(dtype: torch.dtype, target: Tensor, *rest: Any) -> list[Any]:
    """Return the target, the options and the tensors behind them: contiguous, and the weights in
    the dtype of the sums.
    """
    weight = None if rest[4] is None else rest[4].to(dtype)
    given = target, *rest[:4], weight, *rest[5:]
    return [x.contiguous() if isinstance(x, Tensor) else x for x in given]


def _fake_statistics(x, target, options) -> tuple[Tensor, ...]:
    """Return loss, entropy, lse and totals without their values."""
    reduction, weight, entropy, dtype = options[0], options[4], options[8], accumulator(x)
    shape = target.shape if reduction == "none" else ()
    totals = 3 if weight is not None else () if reduction == "mean" else 0
    shapes = shape, target.shape if entropy else 0, (target.numel(), 3 if entropy else 2), totals
    return tuple(x.new_empty(n, dtype=dtype) for n in shapes)


def _fake(logits, target, *options):
    ahead = options[-1] and _may_write_ahead(logits, options[0], options[-2])
    gradient = logits.new_empty(logits.shape if ahead else 0)
    return *_fake_statistics(logits, target, options), gradient


def _prepare(logits, target, *options):
    given = _as_read(accumulator(logits), target, *options)
    return as_rows(logits, logits.shape[-1]), *given


@register(
    f"cross_entropy(Tensor logits, Tensor target, {_OPTIONS}, bool ahead) "
    "-> (Tensor loss, Tensor entropy, Tensor lse, Tensor totals, Tensor gradient)",
    _fake,
    _prepare,
)
def forward(logits, target, *options):
    """Launch the forward: (loss, entropy, lse, totals, gradient). With `ahead`, the same launch
    writes the gradient of the logits for grad_loss = 1, if such a grad_loss is likely.
    """
    *options, ahead = options
    v, dtype = logits.shape[-1], accumulator(logits)
    loss = _loss_of(v, options)
    ahead = ahead and _may_write_ahead(logits, loss.reduction, loss.entropy)
    x, mean = logits.view(-1, v), loss.reduction == "mean"
    launch = loss.launch(loss_kernel, x, v if ahead else 0, 0, ahead, mean)
    rows, statistics = dense(target.shape), dense((target.numel(), 3 if loss.entropy else 2))
    entropies = rows if loss.entropy else dense((0,))
    of_logits = dense(logits.shape if ahead else (0,))

    def run(logits, target, weight):
        losses = logits.new_empty_strided(*rows, dtype=dtype)
        lse = logits.new_empty_strided(*statistics, dtype=dtype)
        entropy = logits.new_empty_strided(*entropies, dtype=dtype)
        gradient = logits.new_empty_strided(*of_logits)
        totals = _totals_of(target, loss, weight, dtype)
        more = gradient if ahead else logits, lse if weight is None else weight
        with on_device(logits):
            launch(logits, target, losses, lse, totals, *more, entropy if loss.entropy else lse)
        return reduced(losses, totals, loss.reduction), entropy, lse, totals, gradient

    return run


_BACKWARD = (
    f"Tensor grad_loss, Tensor? grad_entropy, Tensor logits, Tensor target, {_OPTIONS}, "
    "Tensor lse, Tensor totals"
)


def _prepare_backward(grad_loss, grad_entropy, logits, *rest):
    dtype = accumulator(logits)
    grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
    x, (*rest, last) = as_rows(logits, logits.shape[-1]), rest  # last: it may be written into
    return as_rows(grad_loss.to(dtype), 1), grad_entropy, x, *_as_read(dtype, *rest), last


@register(
    f"cross_entropy_backward({_BACKWARD}, bool[] needs) -> (Tensor grad_logits)",
    lambda grad_loss, grad_entropy, logits, *_: logits.new_empty(logits.shape),
    _prepare_backward,
)
def backward(*arguments):
    """Launch the backward, which reads the logits once."""
    shape = arguments[2].shape
    like, fill = dense(shape), _fill(arguments, shape[-1], False)

    def run(*tensors):
        dx = tensors[2].new_empty_strided(*like)
        fill(*tensors, dx)
        return dx

    return run


@register(
    f"cross_entropy_backward_({_BACKWARD}, Tensor(a!) gradient) -> ()",
    lambda *_: None,
    _prepare_backward,
)
def backward_in_place(*arguments):
    """Launch a pass over the logits that replaces the gradient for grad_loss = 1 by the one for
    `grad_loss`. If that is 1, the pass ends at once: the device decides, so that the host does not
    wait.
    """
    return _fill(arguments, row_stride(arguments[-1], arguments[2].shape[-1]), True)


def _fill(arguments, stride, ahead):
    """Return a function that fills the gradient of the logits, whose rows are `stride` apart."""
    grad_loss, _, logits, _, *options, _, _, _ = arguments
    v, g = logits.shape[-1], _stride_of(grad_loss)
    loss, x = _loss_of(v, options), logits.view(-1, v)
    launch = loss.launch(gradient_kernel, x, stride, g, ahead, loss.reduction == "mean")

    def run(g, g_entropy, logits, target, weight, lse, totals, dx):
        g_entropy = _of_entropy(loss, g_entropy, lse)
        more = lse if weight is None else weight, lse if g_entropy is None else g_entropy
        with on_device(logits):
            launch(logits, target, lse, g, totals, dx, *more)

    return run


def _of_entropy(loss: Loss, grad_entropy: Tensor | None, lse: Tensor) -> Tensor | None:
    """Return the gradients of the entropies [M], zeros if nothing depends on them."""
    if not loss.entropy:
        return None
    if grad_entropy is None:
        return lse.new_zeros(len(lse))
    return grad_entropy.reshape(-1).contiguous()


# ---------------------------------------------------------------------------- of a linear layer


@planned
def _chunk_of(x: Tensor, v: int, shipped: int) -> int:
    """Return how many rows of logits are held at a time, for x [M, N] and V classes."""
    name = named(x.dtype, rows=len(x), features=x.shape[1], classes=v)
    options = [(rows,) for rows in CHUNKS]
    key = TuningKey("linear_cross_entropy chunk", name, (shipped,), lambda: options)
    return choose(x.device, key)[0]


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


def by_chunks(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wanted: Sequence[bool],
    use: Callable[[Tensor, slice], None],
) -> list[Tensor]:
    """Compute the logits of a chunk of tokens at a time, and return the wanted gradients of input,
    weight and bias. use(logits, part) takes the logits of a slice of the tokens, and overwrites
    them by their gradients if any are wanted.
    """
    x = input.reshape(input.shape[:-1].numel(), weight.shape[1])
    sums, chunk = gradients_of(input, weight, bias, wanted), _chunk_of(x, len(weight), CHUNK)
    dinput, dw, db = sums
    with on_device(input):
        for first in range(0, len(x), chunk):
            part = slice(first, first + chunk)
            logits = linear(x[part], weight, bias)
            use(logits, part)
            if wanted[0]:
                matmul(logits, weight, out=dinput.view(x.shape)[part])
            if wanted[1]:
                dw += _wide_product(logits.t(), x[part], dw.dtype)
            if wanted[2]:
                db += logits.sum(0, dtype=db.dtype)
            del logits  # before those of the next chunk
    return sums


def _fake_linear(input, linear_weight, target, linear_bias, *rest):
    *options, return_argmax, needs = rest
    loss, entropy, lse, totals = _fake_statistics(input, target, options)
    ahead = _loss_of(len(linear_weight), options).sums_ahead
    saved = [want and ahead for want in needs]
    sums = gradients_of(input, linear_weight, linear_bias, saved)
    return loss, entropy, target.new_empty(target.shape if return_argmax else 0), lse, totals, *sums


_LINEAR = (
    f"Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, {_OPTIONS}, "
    "bool return_argmax"
)


def _prepare_linear(input, linear_weight, target, linear_bias, *options):
    target, *options = _as_read(accumulator(input), target, *options)
    return input, linear_weight, target, linear_bias, *options


@register(
    f"linear_cross_entropy({_LINEAR}, bool[] needs) -> (Tensor loss, Tensor entropy, "
    "Tensor argmax, Tensor lse, Tensor totals, Tensor sum_input, Tensor sum_weight, "
    "Tensor sum_bias)",
    _fake_linear,
    _prepare_linear,
)
def linear_forward(input, linear_weight, target, linear_bias, *rest):
    """Return loss, entropy, argmax, lse, totals, and for mean and sum the wanted gradients, chunk
    of tokens by chunk.
    """
    *options, return_argmax, needs = rest
    loss, dtype = _loss_of(len(linear_weight), options), accumulator(input)
    wanted = [want and loss.sums_ahead for want in needs]
    m, shape = target.numel(), target.shape

    def run(input, linear_weight, target, linear_bias, weight):
        flat = target.view(-1)
        losses = input.new_empty(shape, dtype=dtype)
        lse = losses.new_empty(m, 3 if loss.entropy else 2)
        entropy = losses.new_empty(shape if loss.entropy else 0)
        argmax = target.new_empty(shape if return_argmax else 0)
        totals = _totals_of(flat, loss, weight, dtype)
        rows, entropies = losses.view(-1), entropy.view(-1) if loss.entropy else None

        def use(logits, part):
            if return_argmax:  # before the kernel overwrites the logits
                torch.argmax(logits, -1, out=argmax.view(-1)[part])
            # the gradients of the sum: those of the mean would underflow in float16
            more = totals, logits if any(wanted) else None, weight
            of_rows = None if entropies is None else entropies[part]
            _run(loss, False, logits, flat[part], rows[part], lse[part], *more, of_rows)

        sums = by_chunks(input, linear_weight, linear_bias, wanted, use)
        return reduced(losses, totals, loss.reduction), entropy, argmax, lse, totals, *sums

    return run


def as_gradients(sums, factor, likes, needs):
    """Return the sums times a factor, if there is one, in the dtypes of the inputs; without
    elements where they are not needed.
    """
    return tuple(
        (x if factor is None else x * factor).to(y.dtype) if need else likes[0].new_empty(0)
        for x, y, need in zip(sums, likes, needs)
    )


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
    lambda _, __, input, linear_weight, ___, linear_bias, *rest: gradients_like(
        rest[-1], input, linear_weight, linear_bias
    ),
    lambda grad_loss, grad_entropy, *rest: (grad_loss, grad_entropy, *_prepare_linear(*rest)),
)
def linear_backward(grad_loss, grad_entropy, input, linear_weight, target, linear_bias, *rest):
    """Scale the gradients of the forward by grad_loss, and for mean by 1 / divisor. For none, and
    with entropies, compute them one chunk of tokens at a time.
    """
    *options, _, _, _, _, _, _, needs = rest
    loss, shape = _loss_of(len(linear_weight), options), target.shape

    def run(grad_loss, grad_entropy, input, linear_weight, target, linear_bias, *rest):
        weight, lse, totals, *sums = rest
        factor = grad_loss
        if loss.reduction == "mean":  # finite if every target is ignored
            divisor = totals.view(-1)[0]
            factor = factor / divisor.where(divisor != 0, 1)
        if not loss.sums_ahead:
            flat, g = target.view(-1), factor.expand(shape).reshape(-1).contiguous()
            g_entropy = _of_entropy(loss, grad_entropy, lse)
            factor, g, g_entropy = without_underflow(input, g, g_entropy)

            def use(logits, part):
                more = totals, logits, weight, None if g_entropy is None else g_entropy[part]
                _run(loss, True, logits, flat[part], lse[part], g[part], *more)

            sums = by_chunks(input, linear_weight, linear_bias, needs, use)
        return as_gradients(sums, factor, (input, linear_weight, linear_bias), needs)

    return run
