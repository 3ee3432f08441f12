"""Cross-entropy over V classes with smoothed labels, from logits, or from the input of a linear
layer that computes the logits of one chunk of tokens at a time.

Forward, per row of logits x with target t:
    lse = max + log sum_c exp(x_c - max), stored as two numbers, whose sum would lose digits
    loss = constant + lse - (on - off) x_t - off sum_{c != pad} x_c
Backward, from g, the gradient of the row's loss:
    dx_c = g (exp(x_c - lse) - (on - off) [c = t] - off [c != pad])
    linear: x = input w^T + b      dinput = dx w      dw = dx^T input      db = sum dx
The target distribution has `on` at t and `off` at every other class but pad; its sum is 1:
    uniform (torch): off = e / V, on = 1 - e + off, no pad, constant 0
    kl (the tutorials): off = e / (V - 2), on = 1 - e, pad = ignore_index, and the constant is its
        negative entropy, on log on + (V - 2) off log off
A row whose target is ignore_index has loss 0 and g = 0; mean divides by the number of the others.

Shapes: logits [M, V], target [M] int64, loss [M], lse [M, 2]; input [M, N], w [V, N], b [V]. Any
dtype in; lse, loss and the sums of dw and db in float32 (float64 for float64).

One program owns a row, and reads it in aligned groups of 16 bytes, whatever the alignment of the
row's start. If a gradient is wanted, the program reads the row once more, from the cache, and
writes dx. From logits it does so for the mean, as if grad_loss were 1; the backward computes dx
again from the saved logits if grad_loss is not 1, or if dx may be asked for again.

The linear form holds CHUNK rows of logits at a time and never all of them. For mean and sum it
computes the gradients in the forward (three GEMMs, torch's own); for none it saves lse, and the
backward computes the logits again.
FLOPs: 2 M N V for each GEMM. Least bytes outside of the GEMMs: each logit read once and its
gradient written once.
Deterministic: each gradient has one owner, and the chunks are summed in order.
Source: Szegedy et al. 2016, "Rethinking the Inception Architecture", section 7, for the smoothing.
"""

from __future__ import annotations

import functools
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
from .registration import register
from .tuned import TuningKey, choose, named

__all__ = ["INTERPRETED", "supports"]

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
    """Choose how many classes make a group: as many as 16 bytes hold. In the interpreter it is a
    full block, because each operation has a fixed cost.
    """
    return block if INTERPRETED else 16 // x.element_size()


# ----------------------------------------------------------------------------------------- kernels


class Labels(NamedTuple):
    """The target distribution over V classes: `on` at the target, `off` at every other class but
    `pad`. A row whose target is ignore_index has none.
    """

    V: Any
    ignore_index: Any
    pad: Any
    on: Any
    off: Any


class Strides(NamedTuple):
    """The row strides of the logits, of the losses' gradients and of the logits' gradients."""

    x: Any
    g: Any
    dx: Any


class Case(NamedTuple):
    """What a kernel is compiled for."""

    columns: Any  # classes in a block
    group: Any  # classes in a group
    smooth: Any
    pad: Any  # whether smoothing leaves out a class
    mean: Any
    ahead: Any  # whether the forward writes the gradients for grad_loss = 1
    together: Any  # a row of dx starts at the same offset within a group as its logits
    acc: Any


class Row(NamedTuple):
    """A row cut into groups of classes, each in 16 aligned bytes if the logits are aligned.

    `x` points to the first of the complete groups, which begins with class `head`, and `groups` is
    their number. If classes are left at an end, two incomplete groups are added: number `groups`,
    after the complete ones, and number `groups` + 1, before them. `end` counts all groups. The
    groups below `full` fill blocks. If a group is as large as a block, the first one starts with
    the row.
    """

    x: Any
    head: Any
    groups: Any
    full: Any
    end: Any


class Target(NamedTuple):
    """What the gradients of a row need: its target t, -1 or V for none; `shift` and `part`, with
    softmax = part * exp(x - shift); and g, the gradient of its loss.
    """

    t: Any
    shift: Any
    part: Any
    g: Any


@triton.jit
def _aligned(offset, case: tl.constexpr):
    """Round an offset up to a multiple of a group's size."""
    return (offset + case.group - 1) // case.group * case.group


@triton.jit
def _row(X, offset, V, case: tl.constexpr):
    """Return the row of V classes that starts at an offset."""
    block: tl.constexpr = case.columns // case.group
    if block == 1:
        return Row(X + offset, 0, 0, 0, (V + case.group - 1) // case.group)
    start = _aligned(offset, case)
    head = (start - offset).to(tl.int32)
    groups = tl.maximum(V - head, 0) // case.group
    whole = (head == 0) & (groups * case.group == V)
    end = tl.where(whole, groups, groups + 2)
    return Row(X + start, head, groups, groups // block * block, end)


@triton.jit
def _offsets(row, o, EDGE: tl.constexpr, case: tl.constexpr):
    """Return the offsets from row.x of the groups in the block that begins with group o, [groups,
    1]; a number if a block is one group.
    """
    if case.columns == case.group:
        return o * case.group
    j = o + tl.arange(0, case.columns // case.group)
    offsets = j * case.group
    if EDGE:  # the last group is before the first complete one
        offsets = tl.where(j == row.groups + 1, -case.group, offsets)
    return offsets[:, None]


@triton.jit
def _exist(row, classes, V, case: tl.constexpr):
    """Return which classes, numbered from row.head on, exist."""
    if case.columns == case.group:
        return classes < V
    else:
        return (classes >= -row.head) & (classes < V - row.head)


@triton.jit
def _add(sums, row, o, labels, origin, EDGE: tl.constexpr, case: tl.constexpr):
    """Add a block of a row to the running sums, [groups] each: m, the maximum; l, the sum of exp(x
    - m); and the sum of x - origin, for smoothing.
    """
    m, l, total = sums
    offsets = _offsets(row, o, EDGE, case)
    k = tl.arange(0, case.group)[None, :]
    classes = offsets + k  # from row.head on
    if EDGE:
        ok = _exist(row, classes, labels.V, case)
        x = tl.load(row.x + classes, mask=ok, other=float("-inf")).to(case.acc)
    else:
        x = tl.load(row.x + classes).to(case.acc)
    m_new = tl.maximum(m, tl.max(x, 1))
    # Without a finite logit so far, -inf - -inf would be NaN.
    seen = tl.where(m_new == float("-inf"), 0.0, m_new)
    l = l * tl.math.exp2((m - seen) * LOG2E)
    l += tl.sum(tl.math.exp2((x - seen[:, None]) * LOG2E), 1)
    if case.smooth:
        part = x - origin
        if EDGE:
            part = tl.where(ok, part, 0.0)
        if case.pad:
            part = tl.where(k == labels.pad - (row.head + offsets), 0.0, part)
        total += tl.sum(part, 1)
    return m_new, l, total


@triton.jit
def _store_block(row, dx, o, target, labels, EDGE: tl.constexpr, case: tl.constexpr):
    """Store the gradients of a block of a row; dx points to the gradient of class row.head."""
    offsets = _offsets(row, o, EDGE, case)
    k = tl.arange(0, case.group)[None, :]
    classes = offsets + k  # from row.head on
    if EDGE:
        ok = _exist(row, classes, labels.V, case)
        x = tl.load(row.x + classes, mask=ok, other=0.0).to(case.acc)
    else:
        x = tl.load(row.x + classes).to(case.acc)
    # dx = g (softmax - (on - off) [c = t] - off [c != pad])
    y = tl.math.exp2((x - target.shift) * LOG2E) * target.part
    first = row.head + offsets  # classes
    if case.pad:
        y -= tl.where(k == labels.pad - first, 0.0, labels.off)
    elif case.smooth:
        y -= labels.off
    y -= tl.where(k == target.t - first, labels.on - labels.off, 0.0)
    y = (y * target.g).to(dx.dtype.element_ty)
    if EDGE:
        tl.store(dx + classes, y, mask=ok)
    else:
        tl.store(dx + classes, y)


@triton.jit
def _store_row(row, DX, offset, target, labels, case: tl.constexpr):
    """Store the gradients of a row into DX, starting at an offset."""
    block: tl.constexpr = case.columns // case.group
    # `_aligned` shows the compiler that the stores are aligned.
    dx = DX + _aligned(offset, case) if case.together else DX + (offset + row.head)
    for o in tl.range(0, row.full, block):
        _store_block(row, dx, o, target, labels, False, case)
    for o in tl.range(row.full, row.end, block):
        _store_block(row, dx, o, target, labels, True, case)


@triton.jit
def _known(t, labels):
    """Return whether the target is a class and not ignored, and may be read."""
    return (t != labels.ignore_index) & (t >= 0) & (t < labels.V)


@triton.jit
def _target(t, shift, log_sum, g, labels):
    """Return the `Target` of a row. g is the gradient of its loss unless the target is ignored."""
    near = tl.minimum(tl.maximum(t, -1), labels.V).to(tl.int32)  # a bad target is no class
    g = tl.where(t != labels.ignore_index, g, 0.0)
    return Target(near, shift, tl.math.exp2(log_sum * -LOG2E), g)


@triton.jit
def _part_of_mean(COUNT, case: tl.constexpr):
    """Return the weight of a row in the reduced loss, if its target is not ignored."""
    if case.mean:
        return 1.0 / tl.load(COUNT)
    else:
        return 1.0


@triton.jit
def _loss(
    X,  # [M, V]
    T,  # [M]
    LOSS,  # out [M]
    LSE,  # out [M, 2]
    COUNT,  # [1], the number of targets that are not ignored, for the mean
    DX,  # out [M, V]; may be X
    strides,
    labels,
    constant,
    classes,
    case: tl.constexpr,
):
    """One program owns a row: it computes the log-sum-exp online, and the loss. If `ahead`, it
    reads the row again, from the cache, and writes its gradients. `classes` is the number of
    classes that smoothing gives a probability.
    """
    block: tl.constexpr = case.columns // case.group
    i = tl.program_id(0).to(tl.int64)
    t = tl.load(T + i)
    x_t = tl.load(X + i * strides.x + t, mask=_known(t, labels), other=0.0).to(case.acc)
    origin = tl.where(x_t == float("-inf"), 0.0, x_t)  # keeps a common offset out of the sum
    row = _row(X, i * strides.x, labels.V, case)
    m = tl.full([block], float("-inf"), case.acc)
    l = tl.zeros([block], case.acc)
    total = tl.zeros([block], case.acc)
    for o in tl.range(0, row.full, block):
        m, l, total = _add((m, l, total), row, o, labels, origin, False, case)
    for o in tl.range(row.full, row.end, block):
        m, l, total = _add((m, l, total), row, o, labels, origin, True, case)
    top = tl.max(m, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    log_sum = tl.math.log(tl.sum(l * tl.math.exp2((m - shift) * LOG2E), 0))
    # The target distribution sums to 1, so that the shift of lse and the shifts below cancel.
    loss = constant + log_sum - (labels.on - labels.off) * (x_t - shift)
    if case.smooth:
        loss -= labels.off * (tl.sum(total, 0) + classes * (origin - shift))
    tl.store(LOSS + i, tl.where(t != labels.ignore_index, loss, 0.0))
    tl.store(LSE + 2 * i, shift)
    tl.store(LSE + 2 * i + 1, log_sum)
    if case.ahead:
        target = _target(t, shift, log_sum, _part_of_mean(COUNT, case), labels)
        _store_row(row, DX, i * strides.dx, target, labels, case)


@triton.jit
def _gradient(
    X,  # [M, V]
    T,  # [M]
    LSE,  # [M, 2]
    G,  # [M], or one number for all rows
    COUNT,  # [1], the number of targets that are not ignored, for the mean
    DX,  # out [M, V]; may be X
    strides,
    labels,
    case: tl.constexpr,
):
    """One program owns a row, and writes its gradients. If `ahead`, DX already holds the gradients
    for g = 1.
    """
    i = tl.program_id(0).to(tl.int64)
    g = tl.load(G + i * strides.g).to(case.acc)
    if case.ahead:
        if g == 1.0:
            return
    g = g * _part_of_mean(COUNT, case)
    shift, log_sum = tl.load(LSE + 2 * i), tl.load(LSE + 2 * i + 1)
    target = _target(tl.load(T + i), shift, log_sum, g, labels)
    row = _row(X, i * strides.x, labels.V, case)
    _store_row(row, DX, i * strides.dx, target, labels, case)


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
        """Make the launch of a kernel for the rows of logits x [M, V]. g: the stride of the losses'
        gradients.
        """
        labels = self.labels()
        block, warps = self.block(kernel.fn.__name__.strip("_"), x, labels.off > 0, case["ahead"])
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
        if kernel is _loss:
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
            launch = remembered(key, self.launch(_loss, x, dx, 0, **case))
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
            launch = remembered(key, self.launch(_gradient, x, dx, stride, **case))
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
    grad_loss,
    logits,
    target,
    reduction,
    ignore_index,
    label_smoothing,
    smoothing,
    lse,
    count,
    dx,
    ahead,
):
    v = logits.shape[-1]
    x, flat = unit_stride(logits.reshape(-1, v)), target.reshape(-1).contiguous()
    g = grad_loss.reshape(-1).to(lse.dtype)
    with on_device(logits):
        Smoothing(v, ignore_index, label_smoothing, smoothing).gradient(
            x, flat, lse, g, dx.view(-1, v), count if reduction == "mean" else None, ahead
        )


# ---------------------------------------------------------------------------- of a linear layer


def _logits(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, w, b)


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
    """Make zeros for the sums: dinput in its dtype, dw and db in the accumulator's. A sum that is
    not wanted has no elements.
    """
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
    """Return loss, lse, and for mean and sum the wanted gradients, computed one chunk of tokens at
    a time.
    """
    v, n = linear_weight.shape
    labels = Smoothing(v, ignore_index, label_smoothing, smoothing)
    x, flat = input.reshape(target.numel(), n), target.reshape(-1).contiguous()
    rows = input.new_empty(len(x), dtype=accumulator(input))
    lse = rows.new_empty(len(x), 2)
    wanted = [want and reduction != "none" for want in needs]
    sums = _gradients(input, linear_weight, linear_bias, wanted)
    count, chunk = _count(flat, ignore_index, reduction, rows.dtype), _chunk(x, v)
    with on_device(input):
        for first in range(0, len(x), chunk):
            part = slice(first, first + chunk)
            logits = _logits(x[part], linear_weight, linear_bias)
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
    """Scale the gradients of the forward by grad_loss, and for mean by 1 / count. For none, compute
    them one chunk of tokens at a time.
    """
    sums = [sum_input, sum_weight, sum_bias]
    if reduction != "none":
        factor = grad_loss
        if reduction == "mean":  # finite if every target is ignored
            factor = factor / _count(target, ignore_index, reduction, lse.dtype).clamp_min_(1)
        sums = [x * factor if need else x for x, need in zip(sums, needs)]
    else:
        v, n = linear_weight.shape
        labels = Smoothing(v, ignore_index, label_smoothing, smoothing)
        x, flat = input.reshape(target.numel(), n), target.reshape(-1).contiguous()
        g = grad_loss.reshape(-1).contiguous()
        sums, chunk = _gradients(input, linear_weight, linear_bias, needs), _chunk(x, v)
        with on_device(input):
            for first in range(0, len(x), chunk):
                part = slice(first, first + chunk)
                logits = _logits(x[part], linear_weight, linear_bias)
                labels.gradient(logits, flat[part], lse[part], g[part], logits)
                _accumulate(logits, x[part], linear_weight, sums, needs, part)
    likes = zip(sums, (input, linear_weight, linear_bias), needs)
    return tuple(total.to(x.dtype) if need else input.new_empty(0) for total, x, need in likes)
