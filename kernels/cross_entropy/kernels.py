"""The kernels of the loss, and the groups that their arguments come in."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common import LOG2E, load_where

# ----------------------------------------------------------------------------------------- kernels


class Labels(NamedTuple):
    """The target distribution over V classes: `on` at the target, `off` at every other class but
    `pad`. A row whose target is ignore_index has none. on_log and off_log: on log on and off log
    off for a divergence, else 0. The loss has z_loss lse^2 more.
    """

    V: Any
    ignore_index: Any
    pad: Any
    on: Any
    off: Any
    on_log: Any
    off_log: Any
    z_loss: Any


class Form(NamedTuple):
    """Of which logits y the softmax is: y = softcap tanh(x / softcap) scale, and scale is the
    reciprocal of the temperature.
    """

    softcap: Any
    scale: Any


class Terms(NamedTuple):
    """What the loss and the gradients of a row are made of. W: [V], the weights of the classes."""

    labels: Any
    W: Any
    form: Any


class LossStrides(NamedTuple):
    """The row strides of the logits, of the losses' gradients and of the logits' gradients."""

    x: Any
    g: Any
    dx: Any


class LossCase(NamedTuple):
    """What a kernel is compiled for."""

    columns: Any  # classes in a block
    group: Any  # classes in a group
    smooth: Any
    pad: Any  # whether smoothing leaves out a class
    mean: Any
    ahead: Any  # whether the forward writes the gradients for grad_loss = 1
    weighted: Any  # whether the classes have weights
    z: Any  # whether there is a z-loss
    softcap: Any
    scale: Any
    entropy: Any
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
    softmax = part * exp(y - shift); g, the gradient of its loss; `share`, the derivative of the
    loss by lse; g_entropy, the gradient of its entropy, and `mean`, the expectation of y - shift.
    """

    t: Any
    shift: Any
    part: Any
    g: Any
    share: Any
    g_entropy: Any
    mean: Any


class Totals(NamedTuple):
    """What all rows share: the divisor of the mean; the factor of the z-loss, whose mean is over
    the rows; and the sum of the weights of the classes that smoothing gives a probability.
    """

    divisor: Any
    z_factor: Any
    weights: Any


@triton.jit
def _aligned(offset, case: tl.constexpr):
    """Round an offset up to a multiple of a group's size."""
    return (offset + case.group - 1) // case.group * case.group


@triton.jit
def row_of(X, offset, V, case: tl.constexpr):
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
def offsets_of(row, o, EDGE: tl.constexpr, case: tl.constexpr):
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
def exist(row, classes, V, case: tl.constexpr):
    """Return which classes, numbered from row.head on, exist."""
    if case.columns == case.group:
        return classes < V
    else:
        return (classes >= -row.head) & (classes < V - row.head)


@triton.jit
def formed(x, form, case: tl.constexpr):
    """Return y, the logits after softcap and temperature, from x."""
    if case.softcap:
        x = form.softcap * (1.0 - 2.0 / (tl.math.exp2(x / form.softcap * (2 * LOG2E)) + 1.0))
    return x * form.scale if case.scale else x


@triton.jit
def load_formed(row, classes, ok, form, EDGE: tl.constexpr, case: tl.constexpr):
    """Load the logits of a block and return y; with EDGE -inf where `ok` is False."""
    if EDGE:
        x = tl.load(row.x + classes, mask=ok, other=float("-inf")).to(case.acc)
        x = formed(x, form, case)
        return tl.where(ok, x, float("-inf")) if case.softcap else x
    else:
        return formed(tl.load(row.x + classes).to(case.acc), form, case)


@triton.jit
def slope_of(y, form, case: tl.constexpr):
    """Return the derivative dy / dx."""
    slope = form.scale
    if case.softcap:
        tanh = y / (form.softcap * form.scale)
        slope = (1.0 - tanh * tanh) * form.scale
    return slope


@triton.jit
def _add(sums, row, o, terms, origin, EDGE: tl.constexpr, case: tl.constexpr):
    """Add a block of a row to the running sums, [groups] each: m, the maximum; l, the sum of exp(y
    - m); the sum of w (y - origin), for smoothing; and the sum of exp(y - m) (y - m).
    """
    m, l, total, moment = sums
    labels, W, form = terms
    offsets = offsets_of(row, o, EDGE, case)
    k = tl.arange(0, case.group)[None, :]
    classes = offsets + k  # from row.head on
    ok = exist(row, classes, labels.V, case)
    x = load_formed(row, classes, ok, form, EDGE, case)
    m_new = tl.maximum(m, tl.max(x, 1))
    # Without a finite logit so far, -inf - -inf would be NaN.
    seen = tl.where(m_new == float("-inf"), 0.0, m_new)
    factor = tl.math.exp2((m - seen) * LOG2E)
    exps = tl.math.exp2((x - seen[:, None]) * LOG2E)
    if case.entropy:  # 0 times -inf would be NaN
        moment = factor * (moment + tl.where(l > 0.0, l * (m - seen), 0.0))
        moment += tl.sum(tl.where(x == float("-inf"), 0.0, exps * (x - seen[:, None])), 1)
    l = l * factor
    l += tl.sum(exps, 1)
    if case.smooth:
        part = x - origin
        if case.weighted:
            part *= load_where(W + row.head + classes, ok, EDGE).to(case.acc)
        if EDGE:
            part = tl.where(ok, part, 0.0)
        if case.pad:
            part = tl.where(k == labels.pad - (row.head + offsets), 0.0, part)
        total += tl.sum(part, 1)
    return m_new, l, total, moment


@triton.jit
def _store_block(row, dx, o, target, terms, EDGE: tl.constexpr, case: tl.constexpr):
    """Store the gradients of a block of a row; dx points to the gradient of class row.head."""
    labels, W, form = terms
    offsets = offsets_of(row, o, EDGE, case)
    k = tl.arange(0, case.group)[None, :]
    classes = offsets + k  # from row.head on
    ok = exist(row, classes, labels.V, case)
    x = formed(load_where(row.x + classes, ok, EDGE).to(case.acc), form, case)
    # dy = g (share softmax - w ((on - off) [c = t] + off [c != pad])), dx = dy slope
    softmax = tl.math.exp2((x - target.shift) * LOG2E) * target.part
    y = softmax
    if case.weighted or case.z:
        y = softmax * target.share
    first = row.head + offsets  # classes
    off, at_target = labels.off, labels.on - labels.off
    if case.weighted:
        w = load_where(W + row.head + classes, ok, EDGE).to(case.acc)
        off, at_target = w * off, w * at_target
    if case.pad:
        y -= tl.where(k == labels.pad - first, 0.0, off)
    elif case.smooth:
        y -= off
    y -= tl.where(k == target.t - first, at_target, 0.0)
    y = y * target.g
    if case.entropy:  # dy = -softmax (y - mean)
        moment = tl.where(softmax > 0.0, softmax * (x - target.shift - target.mean), 0.0)
        y -= target.g_entropy * moment
    if case.softcap or case.scale:
        y = y * slope_of(x, form, case)
    y = y.to(dx.dtype.element_ty)
    tl.store(dx + classes, y, mask=ok if EDGE else None)


@triton.jit
def _store_row(row, DX, offset, target, terms, case: tl.constexpr):
    """Store the gradients of a row into DX, starting at an offset."""
    block: tl.constexpr = case.columns // case.group
    # `_aligned` shows the compiler that the stores are aligned.
    dx = DX + _aligned(offset, case) if case.together else DX + (offset + row.head)
    for o in tl.range(0, row.full, block):
        _store_block(row, dx, o, target, terms, False, case)
    for o in tl.range(row.full, row.end, block):
        _store_block(row, dx, o, target, terms, True, case)


@triton.jit
def _known(t, labels):
    """Return whether the target is a class and not ignored, and may be read."""
    return (t != labels.ignore_index) & (t >= 0) & (t < labels.V)


@triton.jit
def _weight(W, t, labels, case: tl.constexpr):
    """Return the weight of the target t, 0 if that is no class."""
    if case.weighted:
        return tl.load(W + t, mask=_known(t, labels), other=0.0).to(case.acc)
    else:
        return 1.0


@triton.jit
def _share(w_t, labels, totals, case: tl.constexpr):
    """Return sum_c w_c q_c of a row whose target has the weight w_t: what its loss has of lse."""
    if case.weighted:
        return (labels.on - labels.off) * w_t + labels.off * totals.weights
    else:
        return 1.0


@triton.jit
def _target(t, shift, log_sum, g, terms, totals, case: tl.constexpr):
    """Return the `Target` of a row. g is the gradient of its loss unless the target is ignored."""
    labels = terms.labels
    near = tl.minimum(tl.maximum(t, -1), labels.V).to(tl.int32)  # a bad target is no class
    g = tl.where(t != labels.ignore_index, g, 0.0)
    share = _share(_weight(terms.W, t, labels, case), labels, totals, case)
    if case.z:
        share += 2.0 * labels.z_loss * totals.z_factor * (shift + log_sum)
    return Target(near, shift, tl.math.exp2(log_sum * -LOG2E), g, share, 0.0, 0.0)


@triton.jit
def _totals(TOTALS, classes, case: tl.constexpr):
    """Return the `Totals` of a call whose smoothing gives `classes` classes a probability. Without
    weights TOTALS has the divisor alone, or nothing.
    """
    if case.weighted:
        return Totals(tl.load(TOTALS), tl.load(TOTALS + 1), tl.load(TOTALS + 2))
    elif case.mean:
        return Totals(tl.load(TOTALS), 1.0, classes)
    else:
        return Totals(1.0, 1.0, classes)


@triton.jit
def _part_of_mean(totals, case: tl.constexpr):
    """Return the weight of a row in the reduced loss, if its target is not ignored."""
    if case.mean:  # without a row there is no gradient
        return 1.0 / tl.where(totals.divisor == 0.0, 1.0, totals.divisor)
    else:
        return 1.0


@triton.jit
def loss_kernel(
    X,  # [M, V]
    T,  # [M]
    LOSS,  # out [M]
    LSE,  # out [M, 2]; with entropy [M, 3]
    TOTALS,  # `Totals`
    DX,  # out [M, V]; may be X
    W,  # [V], the weights of the classes
    ENTROPY,  # out [M]
    strides,
    labels,
    form,
    classes,
    case: tl.constexpr,
):
    """One program owns a row: it computes the log-sum-exp online, and the loss. If `ahead`, it
    reads the row again, from the cache, and writes its gradients. `classes` is the number of
    classes that smoothing gives a probability.
    """
    block: tl.constexpr = case.columns // case.group
    terms = Terms(labels, W, form)
    i = tl.program_id(0).to(tl.int64)
    t = tl.load(T + i)
    x_t = tl.load(X + i * strides.x + t, mask=_known(t, labels), other=0.0).to(case.acc)
    x_t = formed(x_t, form, case)
    origin = tl.where(x_t == float("-inf"), 0.0, x_t)  # keeps a common offset out of the sum
    row = row_of(X, i * strides.x, labels.V, case)
    m = tl.full([block], float("-inf"), case.acc)
    l = tl.zeros([block], case.acc)
    total = tl.zeros([block], case.acc)
    moment = tl.zeros([block], case.acc)
    for o in tl.range(0, row.full, block):
        sums = m, l, total, moment
        m, l, total, moment = _add(sums, row, o, terms, origin, False, case)
    for o in tl.range(row.full, row.end, block):
        sums = m, l, total, moment
        m, l, total, moment = _add(sums, row, o, terms, origin, True, case)
    top = tl.max(m, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    parts = tl.math.exp2((m - shift) * LOG2E)
    sum_exp = tl.sum(l * parts, 0)
    log_sum = tl.math.log(sum_exp)
    totals = _totals(TOTALS, classes, case)
    w_t = _weight(W, t, labels, case)
    # The loss has as much of lse as of the logits, so that the shifts of both cancel.
    loss = w_t * labels.on_log + (totals.weights - w_t) * labels.off_log
    loss += log_sum * _share(w_t, labels, totals, case)
    loss -= (labels.on - labels.off) * w_t * (x_t - shift)
    if case.smooth:
        loss -= labels.off * (tl.sum(total, 0) + totals.weights * (origin - shift))
    if case.z:
        loss += labels.z_loss * totals.z_factor * (log_sum + shift) * (log_sum + shift)
    tl.store(LOSS + i, tl.where(t != labels.ignore_index, loss, 0.0))
    statistics = LSE + i * (3 if case.entropy else 2)
    tl.store(statistics, shift)
    tl.store(statistics + 1, log_sum)
    if case.entropy:
        moment = tl.sum(parts * (moment + tl.where(l > 0.0, l * (m - shift), 0.0)), 0) / sum_exp
        tl.store(statistics + 2, moment)
        tl.store(ENTROPY + i, tl.where(t != labels.ignore_index, log_sum - moment, 0.0))
    if case.ahead:
        part = _part_of_mean(totals, case)
        target = _target(t, shift, log_sum, part, terms, totals, case)
        _store_row(row, DX, i * strides.dx, target, terms, case)


@triton.jit
def gradient_kernel(
    X,  # [M, V]
    T,  # [M]
    LSE,  # [M, 2]; with entropy [M, 3]
    G,  # [M], or one number for all rows
    TOTALS,  # `Totals`
    DX,  # out [M, V]; may be X
    W,  # [V], the weights of the classes
    G_ENTROPY,  # [M]
    strides,
    labels,
    form,
    classes,
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
    terms, totals = Terms(labels, W, form), _totals(TOTALS, classes, case)
    g = g * _part_of_mean(totals, case)
    statistics = LSE + i * (3 if case.entropy else 2)
    shift, log_sum = tl.load(statistics), tl.load(statistics + 1)
    t = tl.load(T + i)
    target = _target(t, shift, log_sum, g, terms, totals, case)
    if case.entropy:
        g_entropy = tl.where(t != labels.ignore_index, tl.load(G_ENTROPY + i).to(case.acc), 0.0)
        mean = tl.load(statistics + 2)
        target = Target(target.t, shift, target.part, target.g, target.share, g_entropy, mean)
    row = row_of(X, i * strides.x, labels.V, case)
    _store_row(row, DX, i * strides.dx, target, terms, case)
