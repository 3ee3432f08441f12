"""The loss in eager PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from fastformer.dispatch.state import state
from fastformer.eager import batched, eager, gradients_through, transformed

_HELD = 1 << 24  # logits that `_ChunkedLoss` holds at a time


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing: str = "uniform",
    weight: Tensor | None = None,
    z_loss: float | Tensor = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    return_argmax: bool = False,
) -> Any:
    v = logits.shape[-1]
    flat = target.flatten()
    x = logits.reshape(flat.shape[0], v)
    x = formed(x if x.dtype == torch.float64 else x.float(), softcap, temperature)
    weight = None if weight is None else weight.to(x.dtype)
    by_torch = smoothing == "uniform" and label_smoothing <= 1
    if by_torch and not (transformed() and label_smoothing):  # vmap fails
        labels = ignore_index, None, reduction, label_smoothing
        loss = F.cross_entropy(x, flat, weight, None, *labels)
        loss = loss.view(target.shape) if reduction == "none" else loss
    else:
        kept = flat != ignore_index
        true = flat.where(kept, 0)
        rows = _smoothed(x, true, ignore_index, label_smoothing, smoothing, weight)
        count = kept if weight is None else weight[true] * kept
        loss = _reduced(torch.where(kept, rows, 0.0).view(target.shape), count, reduction)
    if isinstance(z_loss, Tensor) or z_loss:
        kept = flat != ignore_index
        squares = torch.where(kept, z_loss * x.logsumexp(-1).square(), 0.0)
        loss = loss + _reduced(squares.view(target.shape), kept, reduction)
    more = []
    if return_entropy:
        logp = x.log_softmax(-1).clamp(min=torch.finfo(x.dtype).min)  # 0 times -inf would be NaN
        entropy = torch.where(flat != ignore_index, -(logp.exp() * logp).sum(-1), 0.0)
        more.append(entropy.view(target.shape))
    if return_argmax:
        more.append(logits.argmax(-1))
    return (loss, *more) if more else loss


def direct_cross_entropy(
    logits: Tensor,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    smoothing: str,
    weight: Tensor | None,
    z_loss: float,
    softcap: float | None,
    temperature: float,
    return_entropy: bool,
    **_: Tensor,
) -> Callable[..., Tensor] | None:
    """Return torch's own op for logits [M, V] in float32 with uniform smoothing and no other term;
    else None.
    """
    plain = (z_loss, softcap, temperature, return_entropy) == (0.0, None, 1.0, False)
    uniform = weight is None and smoothing == "uniform" and label_smoothing <= 1
    if not (plain and uniform and logits.dtype == torch.float32 and logits.dim() == 2):
        return None
    labels = None, None, ignore_index, None, reduction, label_smoothing
    return lambda logits, target: F.cross_entropy(logits, target, *labels)


def formed(x: Tensor, softcap: float | None, temperature: float) -> Tensor:
    """Return softcap tanh(x / softcap) / temperature."""
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    return x if temperature == 1 else x / temperature


def _smoothed(
    x: Tensor, true: Tensor, pad: int, amount: float, smoothing: str, weight: Tensor | None
) -> Tensor:
    """Return sum_c w_c q_c (log q_c - log softmax(x)_c) of each row, and for "uniform" the same
    without log q_c.

    true: [M], the class of each row. pad: the padding class of "kl", which has q = 0.
    """
    v = x.shape[-1]
    # Written out, with no label in the classes: the others are all but the target and the padding.
    off, more = amount / v, 1 - amount
    if smoothing == "kl":
        off, more = amount / (v - 2), 1 - amount - amount / (v - 2)
    terms = x.log_softmax(-1) if weight is None else weight * x.log_softmax(-1)
    w = terms.new_ones(v) if weight is None else weight
    at = true.unsqueeze(1)
    rows, total = -more * terms.gather(1, at).squeeze(1), w.sum()
    if off > 0:
        others = terms.sum(1)
        if smoothing == "kl":
            others = terms[:, :pad].sum(1) + terms[:, pad + 1 :].sum(1)
            total = total - w[pad]
        rows = rows - off * others
    if smoothing == "kl":
        on = 1 - amount
        of_target, of_others = (q * math.log(q) if q > 0 else 0.0 for q in (on, off))
        rows = rows + w[true] * of_target + (total - w[true]) * of_others
    return rows


def _reduced(rows: Tensor, weights: Tensor, reduction: str) -> Tensor:
    """Return the sum of the losses, or their mean, over the sum of the rows' weights, or rows."""
    if reduction != "mean":
        return rows if reduction == "none" else rows.sum()
    total = weights.sum()
    # nan, and so are the gradients of the rows that are not ignored, as in torch.
    return rows.sum() / total.where(total != 0, float("nan"))


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing: str = "uniform",
    weight: Tensor | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    return_argmax: bool = False,
) -> Any:
    tensors = input, linear_weight, linear_bias
    labels = ignore_index, label_smoothing, smoothing
    form: tuple[Any, ...] = softcap, temperature, return_entropy, return_argmax
    usual = weight is None and not z_loss and form == (None, 1.0, False, False)
    if usual or not _in_eager_mode(*tensors):
        return cross_entropy(F.linear(*tensors), target, reduction, *labels, weight, z_loss, *form)
    kept = count = target != ignore_index
    z: float | Tensor = z_loss
    if weight is not None:
        weight = weight.to(torch.float64 if input.dtype == torch.float64 else torch.float32)
        count = weight[target.where(kept, 0)] * kept
        if z_loss and reduction == "mean":  # its mean is over the rows, that of the loss over w
            z = z_loss * count.sum() / kept.sum().clamp(min=1)

    def rows_of(logits: Tensor, target: Tensor) -> Any:
        return cross_entropy(logits, target, "none", *labels, weight, z, *form)

    rows, *more = _ChunkedLoss.apply(*tensors, rows_of, target)
    loss = _reduced(rows, count, reduction)
    return (loss, *more) if more else loss


def _in_eager_mode(*tensors: Tensor | None) -> bool:
    """Return whether a torch.autograd.Function may compute these: eager, differentiated once."""
    given = [x for x in tensors if x is not None]
    return (
        not state.by_formula
        and forward_ad._current_level < 0
        and all(eager(x.detach()) for x in given)
    )


class _ChunkedLoss(torch.autograd.Function):
    """Compute the function `rows_of` of the logits [n, V] of a linear layer and of as many rows of
    other tensors, chunk of rows by chunk; it returns a tensor of n numbers, or several.

    It never holds more logits than those of a chunk: the backward computes them again. The
    gradients of weight and bias are summed in float32, or in float64 for float64.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows_of: Callable[..., Any],
        *others: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(input, weight, bias, *others)
        ctx.rows_of = rows_of
        found = [
            _as_tuple(rows_of(F.linear(x, weight, bias), *more))
            for x, *more in _chunks(len(weight), input, *others)
        ]
        out = tuple(torch.cat(parts).view(input.shape[:-1]) for parts in zip(*found))
        ctx.mark_non_differentiable(*out[len(_floating(out)) :])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, *others = ctx.saved_tensors
        needs, unused = ctx.needs_input_grad[:3], [None] * (1 + len(others))
        grads = _floating(grads)
        again = torch.is_grad_enabled()
        if again or batched(*grads):
            with torch.enable_grad():
                x, w = input.view_as(input), weight.view_as(weight)
                b = None if bias is None else bias.view_as(bias)
                rows = _as_tuple(ctx.rows_of(F.linear(x, w, b), *others))
            return *gradients_through(rows, grads, (x, w, b), again), *unused
        # In float16 the gradients of a mean would underflow: the largest row has the factor 1.
        half, wide = grads[0].numel() and input.dtype == torch.float16, grads[0].dtype
        unit = torch.stack(grads).abs().amax().nan_to_num(1.0).clamp(min=1e-30) if half else None
        grads = grads if unit is None else tuple(x / unit for x in grads)
        dinput = torch.empty_like(input, memory_format=torch.contiguous_format)
        dw = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        db = torch.zeros_like(bias, dtype=wide) if needs[2] else None
        for x, dx, *more in _chunks(len(weight), input, dinput, *others, *grads):
            more, g = more[: len(others)], more[len(others) :]
            logits = F.linear(x, weight, bias).requires_grad_()
            with torch.enable_grad():
                rows = _floating(_as_tuple(ctx.rows_of(logits, *more)))
            [grad_logits] = torch.autograd.grad(rows, logits, g)
            if needs[0]:
                torch.mm(grad_logits, weight, out=dx)
            if dw is not None:
                dw += grad_logits.t().to(dw.dtype) @ x.to(dw.dtype)
            if db is not None:
                db += grad_logits.sum(0, dtype=db.dtype)
        sums = [dinput if needs[0] else None, dw, db]
        if unit is not None:
            sums = [None if x is None else x * unit for x in sums]
        return *(None if x is None else x.to(input.dtype) for x in sums), *unused


def linear_kl_div(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
    reverse: bool = False,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    def rows_of(logits: Tensor, teacher: Tensor) -> Tensor:
        """Return the divergence of each row."""
        both = logits, F.linear(teacher, teacher_weight, teacher_bias)
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        s, t = (formed(x.to(wide), softcap, temperature).log_softmax(-1) for x in both)
        a, b = (s, t) if reverse else (t, s)
        p = a.exp()
        apart = torch.where(p > 0, a - b, 0.0)  # 0 (log 0 - log q) is 0, and so is its gradient
        return (p * apart).sum(-1)

    tensors = input, linear_weight, linear_bias
    if _in_eager_mode(*tensors):
        [rows] = _ChunkedLoss.apply(*tensors, rows_of, teacher_input)
    else:
        rows = rows_of(F.linear(*tensors), teacher_input)
    count = torch.ones_like(rows) if mask is None else mask
    return _reduced(rows if mask is None else rows.where(mask, 0.0), count, reduction)


def _as_tuple(x: Any) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def _floating(given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Leave out the integers, which follow what is differentiable."""
    return tuple(x for x in given if x.is_floating_point())


def _chunks(classes: int, input: Tensor, *more: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield chunks of the rows of input [.., N], as [n, N], and of tensors of as many rows."""
    rows = input.shape[:-1].numel()
    flat = [x.reshape(rows, *x.shape[input.dim() - 1 :]) for x in (input, *more)]
    return zip(*(x.split(max(1, _HELD // classes)) for x in flat))
