"""The loss in eager PyTorch."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from fastformer.eager import eager, formula, use_formula

_BLOCK = 1 << 19  # logits processed at a time: they stay in the cache


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing: str = "uniform",
    weight: Tensor | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    v = logits.shape[-1]
    x, flat = logits.reshape(-1, v), target.reshape(-1)
    x = x if x.dtype == torch.float64 else x.float()
    weight = None if weight is None else weight.to(x.dtype)
    if smoothing == "uniform" and label_smoothing <= 1:
        labels = ignore_index, None, reduction, label_smoothing
        loss = F.cross_entropy(x, flat, weight, None, *labels)
        loss = loss.view(target.shape) if reduction == "none" else loss
    else:
        kept = flat != ignore_index
        rows = _smoothed(x, flat.where(kept, 0), ignore_index, label_smoothing, smoothing, weight)
        count = kept if weight is None else weight[flat.where(kept, 0)] * kept
        loss = _reduced(torch.where(kept, rows, 0.0).view(target.shape), count, reduction)
    if z_loss:
        kept = flat != ignore_index
        squares = torch.where(kept, z_loss * x.logsumexp(-1).square(), 0.0)
        loss = loss + _reduced(squares.view(target.shape), kept, reduction)
    return loss


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
    terms = -x.log_softmax(-1) if weight is None else -weight * x.log_softmax(-1)
    w = terms.new_ones(v) if weight is None else weight
    at = true.unsqueeze(1)
    rows, total = more * terms.gather(1, at).squeeze(1), w.sum()
    if off > 0:
        others = terms.sum(1)
        if smoothing == "kl":
            others = terms[:, :pad].sum(1) + terms[:, pad + 1 :].sum(1)
            total = total - w[pad]
        rows = rows + off * others
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
    # If every target is ignored, the mean is nan, without a gradient, as in torch.
    return torch.where(total != 0, rows.sum() / total.where(total != 0, 1), float("nan"))


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
) -> Tensor:
    tensors = input, linear_weight, linear_bias
    labels = ignore_index, label_smoothing, smoothing
    if weight is None and not z_loss and _saves_passes(*tensors):
        rows = _LinearLoss.apply(*tensors, target, *labels)
        return _reduced(rows, target != ignore_index, reduction)
    return cross_entropy(F.linear(*tensors), target, reduction, *labels, weight, z_loss)


def _saves_passes(*tensors: Tensor | None) -> bool:
    """Return whether `_LinearLoss` takes these tensors: eager float32 on a CPU, with a gradient."""
    given = [x for x in tensors if x is not None]
    if not all(x.dtype == torch.float32 and x.is_cpu and eager(x.detach()) for x in given):
        return False
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    return wanted and not formula.always and forward_ad._current_level < 0


class _LinearLoss(torch.autograd.Function):
    """Compute linear_cross_entropy of each row, without a reduction.

    The forward overwrites the logits with their gradient, some rows at a time, so that these rows
    stay in the cache through all passes. With p the softmax of the logits and t the target,

        loss = constant - (on - off) log p_t - off sum_{c != pad} log p_c
        dx_c = p_c - (on - off) [c = t] - off [c != pad]
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        label_smoothing: float,
        smoothing: str,
    ) -> Tensor:
        v, pad = weight.shape[0], None
        off, on, constant = label_smoothing / v, 1 - label_smoothing + label_smoothing / v, 0.0
        if smoothing == "kl":
            pad, off, on = ignore_index, label_smoothing / (v - 2), 1 - label_smoothing
            constant = sum(n * q * math.log(q) for n, q in ((1, on), (v - 2, off)) if q > 0)
        logits = F.linear(input.reshape(target.numel(), input.shape[-1]), weight, bias)
        kept = target.reshape(-1, 1) != ignore_index
        true = target.reshape(-1, 1).where(kept, 0)
        loss = torch.empty_like(true, dtype=logits.dtype)
        step = max(1, _BLOCK // v)
        for x, t, k, rows in zip(*(y.split(step) for y in (logits, true, kept, loss))):
            logp = x.log_softmax(-1)
            torch.exp(logp, out=x)
            torch.mul(logp.gather(1, t), off - on, out=rows)
            x.scatter_add_(1, t, x.new_full((), off - on).expand(t.shape))
            if off > 0:
                if pad is not None:
                    logp[:, pad], x[:, pad] = 0.0, x[:, pad] + off
                rows.sub_(logp.sum(1, keepdim=True), alpha=off)
                x.sub_(off)
            rows.add_(constant).masked_fill_(~k, 0.0)
            x[~k.squeeze(1)] *= 0.0  # not zero_(): NaN stays NaN, as in torch
        ctx.save_for_backward(input, weight, bias, target, logits)
        ctx.labels = ignore_index, label_smoothing, smoothing
        return loss.view(target.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, target, grad_logits = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            x, w = input.view_as(input), weight.view_as(weight)
            b = None if bias is None else bias.view_as(bias)
            with use_formula():
                rows = linear_cross_entropy(x, w, target, b, "none", *ctx.labels)
            wanted = [x for x, need in zip((x, w, b), needs) if x is not None and need]
            results = iter(torch.autograd.grad(rows, wanted, grad, create_graph=True))
            return *(next(results) if need else None for need in needs), *[None] * 4
        g = grad.reshape(-1, 1)
        transposed = grad_logits.t()
        dx = (grad_logits @ weight * g).view(input.shape) if needs[0] else None
        x = input.reshape(target.numel(), input.shape[-1])
        dw = transposed @ (x * g) if needs[1] else None
        db = transposed @ g.squeeze(1) if needs[2] else None
        return dx, dw, db, None, None, None, None
