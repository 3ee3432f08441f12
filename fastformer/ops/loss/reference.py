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
) -> Tensor:
    v = logits.shape[-1]
    x, flat = logits.reshape(-1, v), target.reshape(-1)
    x = x if x.dtype == torch.float64 else x.float()
    if smoothing == "uniform":
        loss = F.cross_entropy(x, flat, None, None, ignore_index, None, reduction, label_smoothing)
        return loss.view(target.shape) if reduction == "none" else loss
    logp = x.log_softmax(-1)
    off, on = label_smoothing / (v - 2), 1 - label_smoothing
    kept = flat != ignore_index
    constant = sum(n * p * math.log(p) for n, p in ((1, on), (v - 2, off)) if p > 0)
    true = logp.gather(1, flat.unsqueeze(1)).squeeze(1)
    rows = constant - on * true
    if off > 0:
        others = logp[:, :ignore_index].sum(1) + logp[:, ignore_index + 1 :].sum(1) - true
        rows = rows - off * others
    return _reduced(
        torch.where(kept, rows, 0.0).view(target.shape), target, reduction, ignore_index
    )


def _reduced(rows: Tensor, target: Tensor, reduction: str, ignore_index: int) -> Tensor:
    if reduction != "mean":
        return rows if reduction == "none" else rows.sum()
    count = (target != ignore_index).sum()
    # If every target is ignored, the mean is nan, without a gradient, as in torch.
    return torch.where(count > 0, rows.sum() / count.clamp(min=1), float("nan"))


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing: str = "uniform",
) -> Tensor:
    tensors = input, linear_weight, linear_bias
    labels = ignore_index, label_smoothing, smoothing
    if _saves_passes(*tensors):
        rows = _LinearLoss.apply(*tensors, target, *labels)
        return _reduced(rows, target, reduction, ignore_index)
    return cross_entropy(F.linear(*tensors), target, reduction, *labels)


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
