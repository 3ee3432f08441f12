"""The Kullback-Leibler divergence of a student from a teacher, each of them a linear layer's input,
whose logits are computed one chunk of tokens at a time.

Per row, with the distributions p of the logits a and q of b after softcap and temperature, p the
teacher's and q the student's, or the other way round if `reverse`:
    loss = sum_c p_c (log p_c - log q_c) = sum_c p_c (a_c - b_c) + lse(b) - lse(a)
Gradient by the student's logits y, from g, the gradient of the row's loss:
    dy_c = g (q_c - p_c)        reversed: dy_c = g p_c (log p_c - log q_c - loss)
The teacher has no gradient. A row that `mask` hides has loss 0 and g = 0.

One program owns a row: it reads both rows once for the loss, and once more, from the cache, for the
gradient, which overwrites the student's logits. For mean and sum that is in the forward, as in
`linear_cross_entropy`; for none the backward computes the logits again.
Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network"; reversed: Gu et al.
2024, "MiniLLM", section 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import LOG2E
from ..launch import (
    Launch,
    accumulator,
    architecture,
    constants,
    planned,
    triton_dtype,
)
from ..products import linear
from ..registration import gradients_like, register
from .kernels import Form, exist, load_formed, offsets_of, row_of, slope_of
from .launchers import (
    as_gradients,
    by_chunks,
    configuration,
    gradients_of,
    group_size,
    reduced,
    without_underflow,
)


class DivergenceCase(NamedTuple):
    """What the kernel is compiled for; the first two fields as in `LossCase`."""

    columns: Any
    group: Any
    reverse: Any
    masked: Any
    gradient: Any  # whether it writes the gradient of the student's logits
    scaled: Any  # whether each row has a gradient of its loss
    softcap: Any
    scale: Any
    acc: Any


@triton.jit
def _raised(m, x):
    """Return the maximum of m [groups] and the rows of x [groups, classes]; without a finite one so
    far, 0 takes its place in a difference.
    """
    top = tl.maximum(m, tl.max(x, 1))
    return top, tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _add(sums, pair, o, V, form, EDGE: tl.constexpr, case: tl.constexpr):
    """Add a block to the running sums, [groups] each: the maximum and the sum of exponentials of a
    and of b, and the sum of exp(a - m_a) ((a - m_a) - (b - m_b)).
    """
    m_a, l_a, m_b, l_b, moment = sums
    student, teacher = pair
    classes = offsets_of(student, o, EDGE, case) + tl.arange(0, case.group)[None, :]
    ok = exist(student, classes, V, case)
    s = load_formed(student, classes, ok, form, EDGE, case)
    t = load_formed(teacher, classes, ok, form, EDGE, case)
    a, b = (s, t) if case.reverse else (t, s)
    new_a, seen_a = _raised(m_a, a)
    new_b, seen_b = _raised(m_b, b)
    terms = tl.math.exp2((a - seen_a[:, None]) * LOG2E)
    factor = tl.math.exp2((m_a - seen_a) * LOG2E)
    moved = tl.where(l_a > 0.0, l_a * ((m_a - seen_a) - (m_b - seen_b)), 0.0)
    apart = (a - seen_a[:, None]) - (b - seen_b[:, None])
    moment = factor * (moment + moved)
    moment += tl.sum(tl.where(a == float("-inf"), 0.0, terms * apart), 1)
    l_a = l_a * factor + tl.sum(terms, 1)
    l_b = l_b * tl.math.exp2((m_b - seen_b) * LOG2E)
    l_b += tl.sum(tl.math.exp2((b - seen_b[:, None]) * LOG2E), 1)
    return new_a, l_a, new_b, l_b, moment


@triton.jit
def _store(pair, DS, o, V, row, form, EDGE: tl.constexpr, case: tl.constexpr):
    """Store the gradients of a block; row: lse of the student and of the teacher, loss and g."""
    student, teacher = pair
    lse_s, lse_t, loss, g = row
    classes = offsets_of(student, o, EDGE, case) + tl.arange(0, case.group)[None, :]
    ok = exist(student, classes, V, case)
    s = load_formed(student, classes, ok, form, EDGE, case)
    t = load_formed(teacher, classes, ok, form, EDGE, case)
    p = tl.math.exp2((s - lse_s) * LOG2E)
    if case.reverse:
        y = tl.where(s == float("-inf"), 0.0, p * ((s - lse_s) - (t - lse_t) - loss))
    else:
        y = p - tl.math.exp2((t - lse_t) * LOG2E)
    y = (y * g * slope_of(s, form, case)).to(DS.dtype.element_ty)
    tl.store(DS + (student.head + classes), y, mask=ok if EDGE else None)


@triton.jit
def divergence_kernel(
    S,  # [M, V], the student's logits
    T,  # [M, V], the teacher's
    MASK,  # [M], whether a row counts
    LOSS,  # out [M]
    G,  # [M], the gradients of the losses
    DS,  # out [M, V]; may be S
    V,
    form,
    case: tl.constexpr,
):
    """One program owns a row of logits, which are contiguous."""
    block: tl.constexpr = case.columns // case.group
    i = tl.program_id(0).to(tl.int64)
    kept = tl.load(MASK + i) != 0 if case.masked else i >= 0
    student, teacher = row_of(S, i * V, V, case), row_of(T, i * V, V, case)
    pair = student, teacher
    m_a = tl.full([block], float("-inf"), case.acc)
    m_b = tl.full([block], float("-inf"), case.acc)
    l_a, l_b = tl.zeros([block], case.acc), tl.zeros([block], case.acc)
    moment = tl.zeros([block], case.acc)
    for o in tl.range(0, student.full, block):
        sums = m_a, l_a, m_b, l_b, moment
        m_a, l_a, m_b, l_b, moment = _add(sums, pair, o, V, form, False, case)
    for o in tl.range(student.full, student.end, block):
        sums = m_a, l_a, m_b, l_b, moment
        m_a, l_a, m_b, l_b, moment = _add(sums, pair, o, V, form, True, case)
    top_a, top_b = tl.max(m_a, 0), tl.max(m_b, 0)
    top_a = tl.where(top_a == float("-inf"), 0.0, top_a)
    top_b = tl.where(top_b == float("-inf"), 0.0, top_b)
    parts = tl.math.exp2((m_a - top_a) * LOG2E)
    sum_a = tl.sum(l_a * parts, 0)
    sum_b = tl.sum(l_b * tl.math.exp2((m_b - top_b) * LOG2E), 0)
    log_a, log_b = tl.math.log(sum_a), tl.math.log(sum_b)
    moved = tl.where(l_a > 0.0, l_a * ((m_a - top_a) - (m_b - top_b)), 0.0)
    loss = tl.sum(parts * (moment + moved), 0) / sum_a + (log_b - log_a)
    tl.store(LOSS + i, tl.where(kept, loss, 0.0))
    if case.gradient:
        g = tl.load(G + i).to(case.acc) if case.scaled else 1.0
        g = tl.where(kept, g, 0.0)
        lse_a, lse_b = top_a + log_a, top_b + log_b
        lse_s, lse_t = (lse_a, lse_b) if case.reverse else (lse_b, lse_a)
        row = lse_s, lse_t, loss, g
        DS += i * V
        for o in tl.range(0, student.full, block):
            _store(pair, DS, o, V, row, form, False, case)
        for o in tl.range(student.full, student.end, block):
            _store(pair, DS, o, V, row, form, True, case)


# --------------------------------------------------------------------------------------- launchers


@planned
def _launch(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    loss: Tensor,
    g: Tensor | None,
    gradient: bool,
    options: tuple[bool, float | None, float],
) -> Launch:
    """Make a launch that fills loss [M], and overwrites the student's logits by their gradient if
    it is wanted.
    """
    (reverse, softcap, temperature), v = options, student.shape[1]
    block, warps = configuration(v, architecture(student.device), 2)
    group = group_size(max(student, teacher, key=Tensor.element_size), block)
    case = DivergenceCase(
        columns=block,
        group=group,
        reverse=reverse,
        masked=mask is not None,
        gradient=gradient,
        scaled=g is not None,
        softcap=softcap is not None,
        scale=temperature != 1,
        acc=triton_dtype(accumulator(student)),
    )
    form = Form(softcap or 0.0, 1.0 / temperature)
    arguments: dict[str, Any] = dict(V=v, form=form, case=constants(case))
    return Launch(divergence_kernel, (len(student),), arguments, warps)


_OPTIONS = (
    "Tensor input, Tensor linear_weight, Tensor teacher_input, Tensor teacher_weight, "
    "Tensor? linear_bias, Tensor? teacher_bias, Tensor? mask, str reduction, bool reverse, "
    "float? softcap, float temperature"
)


def _of_chunks(tensors: Any, options: Any, rows: Tensor, g: Any, wanted: Any) -> list[Tensor]:
    """Fill the losses of the rows, and return the wanted gradients, one chunk of tokens at a time.
    g: the gradients of the losses, or None for 1.
    """
    input, weight, teacher, teacher_weight, bias, teacher_bias, mask = tensors
    y = teacher.reshape(rows.numel(), teacher_weight.shape[1])
    mask = None if mask is None else mask.reshape(-1).contiguous()

    def use(student: Tensor, part: slice) -> None:
        logits = linear(y[part], teacher_weight, teacher_bias)
        own, loss, of_losses = (None if z is None else z[part] for z in (mask, rows, g))
        launch = _launch(student, logits, own, loss, of_losses, any(wanted), options)
        more = loss if own is None else own, loss, loss if of_losses is None else of_losses
        launch(student, logits, *more, student)

    return by_chunks(input, weight, bias, wanted, use)


def _count(mask: Tensor | None, input: Tensor, like: Tensor) -> Tensor:
    """Return the number of rows that count, in the dtype of `like`."""
    rows = input.shape[:-1].numel()
    return like.new_full((), rows) if mask is None else mask.sum().to(like.dtype)


def _fake(*arguments):
    input, weight, *_, needs = arguments
    bias, reduction = arguments[4], arguments[7]
    shape = input.shape[:-1] if reduction == "none" else ()
    saved = [want and reduction != "none" for want in needs]
    loss = input.new_empty(shape, dtype=accumulator(input))
    return loss, *gradients_of(input, weight, bias, saved)


@register(
    f"linear_kl_div({_OPTIONS}, bool[] needs) "
    "-> (Tensor loss, Tensor sum_input, Tensor sum_weight, Tensor sum_bias)",
    _fake,
)
def forward(*arguments):
    """Return the loss, and for mean and sum the wanted gradients of the sum."""
    reduction, *options, needs = arguments[7:]
    wanted = [want and reduction != "none" for want in needs]

    def run(*tensors):
        input, *_, mask = tensors
        losses = input.new_empty(input.shape[:-1], dtype=accumulator(input))
        sums = _of_chunks(tensors, options, losses.view(-1), None, wanted)
        return reduced(losses, _count(mask, input, losses), reduction), *sums

    return run


@register(
    f"linear_kl_div_backward(Tensor grad_loss, {_OPTIONS}, Tensor sum_input, Tensor sum_weight, "
    "Tensor sum_bias, bool[] needs) "
    "-> (Tensor grad_input, Tensor grad_linear_weight, Tensor grad_linear_bias)",
    lambda _, *given: gradients_like(given[-1], given[0], given[1], given[4]),
)
def backward(*arguments):
    """Scale the gradients of the forward; for none, compute them."""
    reduction, *options, _, _, _, needs = arguments[8:]

    def run(factor, *tensors):
        *tensors, dinput, dw, db = tensors
        input, weight, _, _, bias, _, mask = tensors
        sums = dinput, dw, db
        if reduction == "mean":  # finite if no row counts
            factor = factor / _count(mask, input, factor).clamp(min=1)
        elif reduction == "none":
            factor, g, _ = without_underflow(input, factor.reshape(-1).contiguous())
            sums = _of_chunks(tensors, options, torch.empty_like(g), g, needs)
        return as_gradients(sums, factor, (input, weight, bias), needs)

    return run
