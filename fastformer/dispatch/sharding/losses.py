"""Losses whose rows or whose vocabulary are sharded over several devices."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fastformer.dispatch.operation import OPERATIONS
from fastformer.dispatch.sharding.call import Call, Run


def sharded_loss(inner: Run, call: Call) -> Any:
    """Return the loss of each local row, or their sum. For the reduction "mean", the sum is divided
    by the number of rows on all devices, so that the sums of the devices add up to the mean.
    """
    own, reduction = dict(call.arguments), call.arguments["reduction"]
    options = OPERATIONS[call.op].unsharded
    given = [name for name, default in options.items() if _differs(own[name], default)]
    if given and call.mesh is not None:
        raise ValueError(f"{' and '.join(given)} is given with DTensors; expected plain tensors")
    if given:
        return inner(call.op, **own)
    if "v" in call.sharded_dims:
        losses = _over_the_vocabulary(call)
        loss = losses if reduction == "none" else losses.sum()
    else:
        own["reduction"] = "none" if reduction == "none" else "sum"
        loss = inner(call.op, **own)
    if reduction != "mean":
        return loss
    count = (own["target"] != own["ignore_index"]).sum()
    for dim in dict.fromkeys(call.sharded_dims):
        for group in call.groups(dim) if dim and dim != "v" else ():
            dist.all_reduce(count, group=group)
    return torch.where(count > 0, loss / count.clamp(min=1), float("nan"))


def _differs(x: Any, default: Any) -> bool:
    return isinstance(x, Tensor) or x != default


def _over_the_vocabulary(call: Call) -> Tensor:
    own = call.arguments
    labels = own["ignore_index"], own["label_smoothing"], own["smoothing"]
    if call.op == "cross_entropy":
        x, weight, bias = own["logits"], None, None
    else:
        x, weight, bias = own["input"], own["linear_weight"], own["linear_bias"]
    shard = call.offsets["v"], call.sizes["v"], call.groups("v")
    return _VocabularyLoss.apply(x, weight, bias, own["target"], labels, shard)


class _VocabularyLoss(torch.autograd.Function):
    """The loss of each row, of logits whose classes are sharded over several devices:

        loss = constant + lse - sum_c q_c x_c
        dx_c = exp(x_c - lse) - q_c

    Each device computes the lse and the sum over its own classes. Two all-reduces merge the lse,
    and one the sum. The backward recomputes the logits, one chunk of rows at a time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        target: Tensor,
        labels: tuple[int, float, str],
        shard: tuple[int, int, list[dist.ProcessGroup]],
    ) -> Tensor:
        ctx.labels = smoothed = _Labels(*labels, *shard[:2])
        x, flat = input.reshape(-1, input.shape[-1]), target.reshape(-1)
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        lse, dot = (x.new_empty(len(x), dtype=wide) for _ in range(2))
        for rows in smoothed.chunks(x, weight):
            logits = _logits(x[rows], weight, bias, wide)
            lse[rows], dot[rows] = logits.logsumexp(1), smoothed.dot(logits, flat[rows])
        for group in shard[2]:
            top = lse.clone()
            dist.all_reduce(top, dist.ReduceOp.MAX, group)
            top.clamp_(min=torch.finfo(wide).min)
            lse = (lse - top).exp_()
            dist.all_reduce(lse, group=group)
            lse = lse.log_() + top
            dist.all_reduce(dot, group=group)
        ctx.save_for_backward(input, weight, bias, target, lse)
        loss = (lse - dot + smoothed.constant()).masked_fill_(flat == labels[0], 0.0)
        return loss.view(target.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, target, lse = ctx.saved_tensors
        smoothed: _Labels = ctx.labels
        x, flat = input.reshape(-1, input.shape[-1]), target.reshape(-1)
        g = grad.reshape(-1, 1).masked_fill(flat.view(-1, 1) == smoothed.ignore_index, 0.0)
        dx = torch.empty_like(x)
        dw = None if weight is None else torch.zeros_like(weight, dtype=lse.dtype)
        db = None if bias is None else torch.zeros_like(bias, dtype=lse.dtype)
        for rows in smoothed.chunks(x, weight):
            logits = _logits(x[rows], weight, bias, lse.dtype)
            d = smoothed.gradient(logits, flat[rows], lse[rows]) * g[rows]
            if weight is None:
                dx[rows] = d
                continue
            dx[rows] = d.to(weight.dtype) @ weight
            dw += d.t() @ x[rows].to(d.dtype)
            if db is not None:
                db += d.sum(0)
        dw = None if weight is None or dw is None else dw.to(weight.dtype)
        db = None if bias is None or db is None else db.to(bias.dtype)
        return dx.view(input.shape), dw, db, None, None, None


def _logits(x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (x if weight is None else F.linear(x, weight, bias)).to(dtype)


class _Labels(NamedTuple):
    """The smoothed targets q of the local classes.

    first: the global index of the first local class.
    classes: the global number of classes.
    """

    ignore_index: int
    label_smoothing: float
    smoothing: str
    first: int
    classes: int

    def chunks(self, x: Tensor, weight: Tensor | None) -> list[slice]:
        """Return slices of rows whose float32 logits take about 64 MB."""
        step = max(1, 2**24 // max(1, (x if weight is None else weight.t()).shape[1]))
        return [slice(first, first + step) for first in range(0, len(x), step)]

    def probabilities(self) -> tuple[float, float]:
        """Return q of a class that is not the target, and by how much q of the target is larger."""
        e = self.label_smoothing
        if self.smoothing == "uniform":
            return e / self.classes, 1 - e
        return e / (self.classes - 2), 1 - e - e / (self.classes - 2)

    def constant(self) -> float:
        """Return what "kl" adds to the cross entropy: -entropy(q). It is 0 for "uniform"."""
        if self.smoothing == "uniform":
            return 0.0
        off, more = self.probabilities()
        terms = ((1, off + more), (self.classes - 2, off))
        return sum(n * p * math.log(p) for n, p in terms if p > 0)

    def _of_target(self, target: Tensor, here: int) -> tuple[Tensor, Tensor]:
        """Return the local column of each target, [M, 1], and whether the target is local."""
        at = (target - self.first).view(-1, 1)
        inside = (at >= 0) & (at < here)
        return at.where(inside, 0), inside

    def _padding(self, here: int) -> int | None:
        """Return the local column of the padding class, whose q is 0 for "kl"; else None."""
        at = self.ignore_index - self.first
        return at if self.smoothing == "kl" and 0 <= at < here else None

    def dot(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return sum_c q_c x_c over the local classes, [M]."""
        off, more = self.probabilities()
        here = logits.shape[1]
        if here == 0:
            return logits.new_zeros(len(logits))
        at, inside = self._of_target(target, here)
        total = (logits.gather(1, at).where(inside, 0.0) * more).squeeze(1)
        if off > 0:
            padding = self._padding(here)
            total = total + off * logits.sum(1)
            if padding is not None:
                total = total - off * logits[:, padding]
        return total

    def gradient(self, logits: Tensor, target: Tensor, lse: Tensor) -> Tensor:
        """Return exp(x_c - lse) - q_c, [M, local classes]."""
        off, more = self.probabilities()
        d = (logits - lse.view(-1, 1)).exp_()
        if off > 0:
            d.sub_(off)
            padding = self._padding(logits.shape[1])
            if padding is not None:
                d[:, padding] += off
        if logits.shape[1]:
            at, inside = self._of_target(target, logits.shape[1])
            d.scatter_add_(1, at, -more * inside.to(d.dtype))
        return d
