"""The kernels of the loss, and the groups that their arguments come in."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common import LOG2E

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
def loss_kernel(
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
def gradient_kernel(
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
