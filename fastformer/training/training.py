"""Training as in the tutorials: label smoothing, the schedule, an epoch.

Shapes: B batch, T target length, V vocabulary.

Source: Vaswani et al. 2017, "Attention Is All You Need", section 5;
harvardnlp/annotated-transformer, "Model Training".
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from tqdm.auto import tqdm

from fastformer import checks
from fastformer.dispatch import backends
from fastformer.eager import may_read
from fastformer.nn.stream import is_unmodified
from fastformer.nn.transformer import EncoderDecoder, Generator, LanguageModel
from fastformer.ops import functional
from fastformer.training.batches import Batch
from fastformer.training.updates import GraphedUpdates, Processes, Updates, shares


class LabelSmoothing(nn.Module):
    """The summed Kullback-Leibler divergence of log-probabilities x from smoothed targets t.

        KL(t || exp(x)) = sum over rows and classes of t * (log t - x)

    t is 1 - smoothing at the true class, 0 at `padding_idx` and smoothing / (size - 2) at the
    other classes; if no class is padding, smoothing / (size - 1). A row whose target is padding
    contributes 0. t is not materialized: with c = 1 - smoothing and e the other classes' t, the
    loss of a row is

        c log c + smoothing log e - (c - e) x[target] - e sum_v x[v]

    where v runs over all classes except the padding.

    LabelSmoothing(size=5, padding_idx=0, smoothing=0.5) turns target 2 into 0, 1/6, 1/2, 1/6, 1/6.

    Args:
        size: the number of classes, at least 3, or 2 if none of them is padding.
        padding_idx: the class that stands for padding; or a negative label of rows to ignore, which
            is no class, such as -100; or None, which ignores no row.
        smoothing: in [0, 1).
        weight: [size], the weights of the classes: every term of the sum is multiplied by that of
            its class. None for 1. It is a buffer, and gets no gradient.

    forward(x, target): x [..., size] log-probabilities, target [...] integers -> a scalar, in
    float32 if x is float16 or bfloat16. `true_dist` is t of the last call, as in the tutorials; it
    is computed when it is read.

    Raises:
        ValueError: size, padding_idx or smoothing is out of range; the shapes do not match; the
            devices differ; a target is neither in [0, size) nor padding_idx, or x has a value above
            0, which logits can have and log-probabilities cannot (values are checked on a CPU, and
            on a GPU with FASTFORMER_CHECK=1).
        TypeError: x or weight is not floating, or target is not an integer tensor.
        RuntimeError: weight requires a gradient, outside of torch.no_grad().

    Source: Szegedy et al. 2016, "Rethinking the Inception Architecture", section 7; Vaswani et al.
    2017, section 5.4; the form is the Annotated Transformer's.
    """

    weight: Tensor | None

    def __init__(
        self,
        size: int,
        padding_idx: int | None,
        smoothing: float = 0.0,
        *,
        weight: Tensor | None = None,
    ) -> None:
        super().__init__()
        if padding_idx is not None:
            padding_idx = checks.require_int("padding_idx", padding_idx)
        pads = padding_idx is not None and padding_idx >= 0
        [size] = checks.require_size(2 + pads, size=size)  # the true class, one other, and padding
        if padding_idx is not None and padding_idx >= size:
            raise ValueError(
                f"padding_idx is {padding_idx}; expected a class from 0 to {size - 1}, a negative "
                "label, or None"
            )
        smoothing = checks.require_number("smoothing", smoothing, "a number in [0, 1)")
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing is {smoothing}; expected a number in [0, 1)")
        self.size = size
        self.padding_idx = padding_idx
        self.smoothing = smoothing
        self.confidence = 1.0 - smoothing
        if weight is not None:
            checks.require_floating(weight=weight)
            checks.refuse_gradients("LabelSmoothing", weight=weight)
            if weight.shape != (size,):
                raise checks.wrong_shape("weight", weight, f"[size] = [{size}]")
            weight = weight.detach().clone()
        self.register_buffer("weight", weight)
        self._pad = padding_idx if pads else None  # the class that is padding
        self._target: Tensor | None = None

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        checks.require_floating(x=x)
        checks.require_integers("target", target)
        if x.dim() < 1 or x.shape[-1] != self.size:
            raise checks.wrong_shape("x", x, f"[..., size] with {self.size}")
        if target.shape != x.shape[:-1]:
            raise checks.wrong_shape(
                "target", target, f"{list(x.shape[:-1])}, as x {list(x.shape)}"
            )
        checks.require_device("target", target, "x", x)
        if self.weight is not None:
            checks.require_device("weight", self.weight, "x", x)
        kept = self._kept(target)
        if may_read(target):
            expected = f"0 to size - 1 = {self.size - 1}"
            checks.require_values("target", target[kept], self.size - 1, expected)
        if may_read(x.detach()) and x.numel():
            highest = float(x.detach().max())
            if highest > 1e-3:  # more than rounding
                raise ValueError(
                    f"x holds {highest:.4g}; "
                    "expected log-probabilities, none above 0: the log_softmax of logits"
                )
        self._target = target.long()
        target = self._target.where(kept, 0)
        accumulated = torch.promote_types(x.dtype, torch.float32)
        c, e = self.confidence, self._off
        w = None if self.weight is None else self.weight.to(accumulated)
        of_target: Tensor | float = 1.0 if w is None else w[target]
        rows = x.gather(-1, target.unsqueeze(-1)).squeeze(-1).to(accumulated) * (e - c) * of_target
        if e > 0:
            total: Tensor | float = self.size - (self._pad is not None)
            for part in self._classes():
                term = x[..., part] if w is None else x[..., part] * w[part]
                rows = rows - e * term.sum(-1, dtype=accumulated)
            if w is not None:
                total = sum((w[part].sum() for part in self._classes()), w.new_zeros(()))
            rows = rows + of_target * c * math.log(c) + (total - of_target) * e * math.log(e)
        return rows.masked_fill(~kept, 0.0).sum()

    @property
    def _off(self) -> float:
        """The smoothed target of a class that is neither true nor padding."""
        return self.smoothing / (self.size - 1 - (self._pad is not None))

    def _classes(self) -> list[slice]:
        """Return slices of the classes that are not padding."""
        pad = self._pad
        return [slice(None)] if pad is None else [slice(pad), slice(pad + 1, None)]

    def _kept(self, target: Tensor) -> Tensor:
        """Return the mask of the rows that are not ignored."""
        if self.padding_idx is None:
            return torch.ones_like(target, dtype=torch.bool)
        return target != self.padding_idx

    @property
    def true_dist(self) -> Tensor | None:
        """The smoothed targets of the last call, [..., size]; None before the first call."""
        if self._target is None:
            return None
        kept = self._kept(self._target).unsqueeze(-1)
        target = self._target.unsqueeze(-1).where(kept, 0)
        t = torch.full((*self._target.shape, self.size), self._off, device=target.device)
        t.scatter_(-1, target, self.confidence)
        if self._pad is not None:
            t[..., self._pad] = 0.0
        return t.masked_fill(~kept, 0.0)

    def extra_repr(self) -> str:
        return f"{self.size}, padding_idx={self.padding_idx}, smoothing={self.smoothing}"


def rate(step: int, model_size: int, factor: float, warmup: int) -> float:
    """Return the learning rate of a step.

        factor * model_size^-0.5 * min(step^-0.5, step * warmup^-1.5)

    Steps count from 1; step 0 is treated as 1. The rate rises linearly over `warmup` steps and then
    falls with the inverse square root of the step.

    Raises ValueError if step or factor is negative, factor is not finite, or model_size or warmup
    is less than 1; TypeError if factor is not a number, or another argument not an int.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 5.3, equation 3.
    """
    [step] = checks.require_size(0, step=step)
    model_size, warmup = checks.require_size(model_size=model_size, warmup=warmup)
    factor = checks.require_not_negative("factor", factor)
    step = max(step, 1)
    return factor * model_size**-0.5 * min(step**-0.5, step * warmup**-1.5)


@checks.refuse(lr="factor, which scales the rate of the schedule, or torch.optim.Adam(.., lr)")
def make_optimizer(
    parameters: Iterable[nn.Parameter], model_size: int, factor: float = 1.0, warmup: int = 4000
) -> tuple[Adam, LambdaLR]:
    """Return Adam(betas=(0.9, 0.98), eps=1e-9) and a scheduler that gives update n rate(n, ...).

    Adam is torch's fused form where all parameters are plain tensors on a CPU or a CUDA device.

    Call `scheduler.step()` after each `optimizer.step()`, as `run_epoch` does. Raises ValueError
    and TypeError as `rate` does, ValueError if parameters is empty, and TypeError if parameters is
    not an iterable of parameters or parameter groups, or for lr: the schedule gives the rate.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 5.3.
    """
    rate(1, model_size, factor, warmup)  # raises for invalid numbers, before the scheduler is built
    if isinstance(parameters, (Tensor, str)) or not isinstance(parameters, Iterable):
        kind = type(parameters).__name__
        raise TypeError(f"parameters is a {kind}; expected those of a module, or groups of them")
    parameters = list(parameters)
    if not parameters:
        raise ValueError("parameters is empty; expected those of a module")
    options: dict[str, Any] = dict(lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    optimizer = Adam(parameters, **options)
    groups = optimizer.param_groups
    if all(_fuses(p) for group in groups for p in group["params"]):
        optimizer = Adam([dict(group, fused=True) for group in groups], fused=True, **options)
    schedule = LambdaLR(optimizer, lambda updates: rate(updates + 1, model_size, factor, warmup))
    return optimizer, schedule


def _fuses(p: Tensor) -> bool:
    """Return whether torch's fused Adam takes a parameter; a DTensor is left to the other forms."""
    return type(p.data) is Tensor and p.is_floating_point() and p.device.type in ("cpu", "cuda")


class SimpleLossCompute:
    """The loss per token of the decoder's output: criterion(generator(x), y) / norm.

    Args:
        generator: [B, T, d_model] -> log-probabilities [B, T, V].
        criterion: (log-probabilities [B * T, V], targets [B * T]) -> the summed loss, such as
            `LabelSmoothing`.
        z_loss: as in `cross_entropy`; it needs a `Generator`, a `LabelSmoothing` without hooks, and
            targets of int64, because log-probabilities no longer hold it.

    Called with x [B, T, d_model], y [B, T] and norm, the number of tokens (0 counts as 1), it
    returns a differentiable scalar. A `Generator` and a `LabelSmoothing` without hooks are not
    called: `linear_cross_entropy` computes the same loss from their parameters, and does not
    materialize the log-probabilities of all tokens.

    Raises TypeError if generator or criterion is not callable, x or y is not a tensor, or norm or
    z_loss is not a number; ValueError if y is not [B, T], the reduction of criterion is not
    "sum", or z_loss is negative, not finite or impossible. Errors of the two callables propagate.
    """

    def __init__(
        self,
        generator: Callable[[Tensor], Tensor],
        criterion: Callable[[Tensor, Tensor], Tensor],
        *,
        z_loss: float = 0.0,
    ) -> None:
        checks.require_callable("a module, or a function", generator=generator, criterion=criterion)
        reduction = getattr(criterion, "reduction", "sum")
        if isinstance(reduction, str) and reduction != "sum":
            raise ValueError(
                f"criterion is a {type(criterion).__name__} with reduction {reduction!r}; "
                "expected 'sum', because the loss is divided by norm"
            )
        self.z_loss = checks.require_not_negative("z_loss", z_loss)
        self.generator = generator
        self.criterion = criterion

    def __call__(self, x: Tensor, y: Tensor, norm: Tensor | float) -> Tensor:
        checks.require_tensor("x", x)
        checks.require_tensor("y", y)
        if x.dim() < 1 or y.numel() != math.prod(x.shape[:-1]):
            raise checks.wrong_shape("y", y, f"the [B, T] of x {list(x.shape)}")
        if isinstance(norm, Tensor):
            checks.require_tensor("norm", norm)
            if norm.is_meta and not x.is_meta:
                raise ValueError(f"norm is on meta; expected the device of x, {x.device}")
            if norm.numel() != 1:
                raise checks.wrong_shape("norm", norm, "one number")
        else:
            norm = checks.require_number("norm", norm, "a number, or a tensor of one")
        loss = self._fused(x, y)
        if loss is None:
            if self.z_loss:
                raise ValueError(
                    f"z_loss is {self.z_loss}; expected 0, or a Generator and a LabelSmoothing "
                    "without hooks and targets of int64, which give the logits"
                )
            x = self.generator(x)
            loss = self.criterion(x.reshape(-1, x.shape[-1]), y.reshape(-1))
        if backends.is_dtensor(loss):
            loss = loss.full_tensor()  # type: ignore[attr-defined]
        return loss / (norm.clamp(min=1) if isinstance(norm, Tensor) else max(norm, 1))

    def _fused(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Return the summed loss without materializing all logits.

        Return None if generator or criterion is not an unmodified fastformer class.
        """
        generator, criterion = self.generator, self.criterion
        if not (type(generator) is Generator and type(criterion) is LabelSmoothing):
            return None
        proj = generator.proj
        plain = type(proj) is nn.Linear and is_unmodified(generator, proj, criterion)
        if not plain or proj.out_features != criterion.size or y.dtype != torch.int64:
            return None
        criterion._target = y.reshape(-1)
        return functional.linear_cross_entropy(
            x,
            proj.weight,
            y.reshape(x.shape[:-1]),
            linear_bias=proj.bias,
            reduction="sum",
            ignore_index=criterion.padding_idx,
            label_smoothing=criterion.smoothing,
            smoothing="kl",
            weight=criterion.weight,
            z_loss=self.z_loss,
        )


def run_epoch(
    data: Iterable[Batch],
    model: nn.Module,
    loss_compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
    *,
    report: Callable[[int, float, float], None] | None = None,
    report_every: int = 20,
    after_update: Callable[[Tensor], None] | None = None,
    progress: bool | None = None,
    description: str | None = None,
    accumulation_steps: int = 1,
    max_grad_norm: float | None = None,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    cuda_graph: bool = False,
) -> float:
    """Run the model on every batch and return the loss per token; with an optimizer, train it.

    A progress bar shows loss per token and tokens per second. The loop synchronizes
    with the device only at reports and, with a `scaler`, at each step of the optimizer.

    A model in DistributedDataParallel or FSDP, each process with as many batches of its own, takes
    the update of one process with the batches of all: every token has the same weight. Losses and
    speeds are then those of all processes, but in an evaluation.

    Args:
        data: batches with targets; if it has a length, the bar shows the remaining batches.
        model: called as model(src, tgt, src_mask, tgt_mask), or as model(tgt, tgt_mask) if the
            batches have no source. The caller sets its mode: model.train() before training,
            model.eval() before evaluation. A model in eval mode with an optimizer is trained so,
            with a warning.
        loss_compute: (output, tgt_y, ntokens) -> loss per token, such as `SimpleLossCompute`.
        optimizer: steps once per `accumulation_steps` batches. None evaluates without gradients.
        scheduler: steps after the optimizer.
        report: called as report(batches so far, loss per token, tokens per second) every
            `report_every` batches and at the end; the last two cover the time since the previous
            report.
        report_every: the number of batches between reports.
        after_update: called after each update with its loss per token, a scalar on the device.
        progress: whether to draw the bar; False prints nothing. None draws it if standard output is
            a terminal; if standard output is not a terminal and `report` is None, it prints a line
            for each report. (A notebook is not a terminal: pass True.)
        description: the text in front of the bar.
        accumulation_steps: the number of batches whose gradients make one update. It is that of all
            their tokens in one batch: each batch counts by its share of them. The last update takes
            the batches that are left. The batches of an update are read before it.
        max_grad_norm: scales the gradients of an update down to this norm, over all parameters of
            the optimizer; None leaves them as they are.
        autocast: torch.float16 or torch.bfloat16, in which model and loss_compute run, as under
            torch.autocast on the device of the batch; None for the dtype of the parameters.
        scaler: scales the loss and unscales the gradients, which float16 needs. An update whose
            gradients are not finite is left out, and the scheduler does not step either.
        cuda_graph: True captures the forward, the backward and the step of the optimizer in a CUDA
            graph for each shape of batch, up to 16, in its second update, and replays it for the
            later ones, with new dropout seeds: the host then launches one graph an update. The
            optimizer needs torch's option `capturable`, as Adam has it; run_epoch sets it, and
            turns the learning rate into a tensor on the device. Python code of the model runs in
            the first two updates of a shape alone. What cannot be captured runs step by step, with
            one warning that says why: batches on a CPU or packed, a model that reads a value on the
            host, another optimizer, several processes, FASTFORMER_CHECK=1.

    Raises:
        ValueError: data has no batch, a batch has no target, a batch for a `LanguageModel` has a
            source or one for an `EncoderDecoder` has none, report_every or accumulation_steps is
            below 1, max_grad_norm is not positive and finite, autocast is another dtype, or
            scheduler, max_grad_norm, scaler, cuda_graph, after_update or more than one of
            accumulation_steps is given without an optimizer, or cuda_graph beside a scaler, which
            reads values.
        TypeError: data is not an iterable of batches; model, loss_compute, report or after_update
            is not callable; optimizer or scheduler has no step(), or the optimizer no param_groups
            beside a max_grad_norm; progress is not True, False or None; another argument has a
            wrong type.
    """
    updates = Updates(model, loss_compute, optimizer, scheduler, max_grad_norm, autocast, scaler)
    _require_epoch(data, updates)
    _require_update(updates, accumulation_steps, cuda_graph, after_update)
    report, progress = _reports(report, report_every, progress)
    losses = GraphedUpdates(updates).losses if cuda_graph else updates.losses
    processes = None if optimizer is None else Processes.of(model)
    meter, step = _Meter(), 0
    bar = tqdm(data, description, disable=not progress, file=sys.stdout, leave=False, unit="batch")

    def look() -> None:
        per_token, per_second = meter.read()
        bar.set_postfix_str(f"loss {per_token:.4f}, {per_second:,.0f} tokens/s")
        if report is not None:
            report(step, per_token, per_second)

    with torch.set_grad_enabled(optimizer is not None), bar:
        batches = iter(bar)
        while group := list(islice(batches, accumulation_steps)):
            for i, batch in enumerate(group, step + 1):
                _require_batch(i, batch, updates)
            of_update, weights = [], shares(group, processes)
            for (batch, loss), share in zip(losses(group, weights), weights):
                step += 1
                tokens, part = batch.ntokens, loss if share is None else loss * share
                assert tokens is not None
                if processes is not None:
                    loss, tokens, part = processes.sums(loss, tokens, part)
                meter.add(loss, tokens)
                of_update.append(part)
                if step % report_every == 0:
                    look()
            if after_update is not None:
                after_update(torch.stack(of_update).sum())
        if step % report_every:
            look()
    if step == 0:
        raise ValueError("data holds no batch")
    return meter.loss / max(meter.tokens, 1)


class _Meter:
    """The loss and the number of tokens of an epoch.

    The sums since the last read stay on the device, so that `add` does not synchronize.
    """

    def __init__(self) -> None:
        self.loss, self.tokens = 0.0, 0  # up to the last read
        self._loss = self._tokens = torch.zeros(())
        self._started = time.perf_counter()

    def add(self, per_token: Tensor, tokens: Tensor) -> None:
        """Add a batch without synchronizing."""
        device = per_token.device
        self._loss = self._loss.to(device) + per_token.float() * tokens
        self._tokens = self._tokens.to(device) + tokens

    def read(self) -> tuple[float, float]:
        """Synchronize; return loss per token and tokens per second since the last read."""
        loss, tokens, now = float(self._loss), int(self._tokens), time.perf_counter()
        seconds = now - self._started
        self.loss, self.tokens, self._started = self.loss + loss, self.tokens + tokens, now
        self._loss, self._tokens = torch.zeros_like(self._loss), torch.zeros_like(self._tokens)
        return loss / max(tokens, 1), tokens / seconds


def _reports(report: Any, report_every: int, progress: bool | None) -> tuple[Any, bool]:
    """Check and return how `run_epoch` reports, and whether it draws a bar."""
    if report is not None:
        checks.require_callable("a function of batches, loss and tokens per second", report=report)
    checks.require_size(report_every=report_every)
    if progress is None:
        progress = sys.stdout.isatty()
        if report is None and not progress:
            report = _print_line
    return report, checks.require_flag("progress", progress)


def _require_epoch(data: object, updates: Updates) -> None:
    """Check the arguments of `run_epoch`; warn of training in eval mode."""
    model, loss_compute, optimizer, scheduler, *_ = updates
    if scheduler is not None and optimizer is None:
        raise ValueError("scheduler is given without an optimizer; expected both or neither")
    if isinstance(data, (Tensor, str)) or not isinstance(data, Iterable):
        raise TypeError(f"data is a {type(data).__name__}; expected an iterable of batches")
    checks.require_callable("a module", model=model)
    checks.require_callable("a function of output, tgt_y and ntokens", loss_compute=loss_compute)
    for name, x in (("optimizer", optimizer), ("scheduler", scheduler)):
        if x is not None and not callable(getattr(x, "step", None)):
            raise TypeError(f"{name} is a {type(x).__name__}; expected one of torch.optim, or None")
    if optimizer is not None and not getattr(model, "training", True):
        warnings.warn(
            "optimizer is given and model is in eval() mode: run_epoch trains it without dropout; "
            "call model.train() first, or leave the optimizer out to evaluate",
            stacklevel=3,
        )
    if isinstance(optimizer, Optimizer) and isinstance(model, nn.Module):
        head = getattr(loss_compute, "generator", None)  # which may be no part of the model
        parts = [x for x in (model, head) if isinstance(x, nn.Module)]
        own = {id(p) for x in parts for p in x.parameters()}
        held = [p for group in optimizer.param_groups for p in group["params"]]
        # The shards that FSDP gives an optimizer are no parameters of an unsharded model.
        if own and not any(id(p) in own or backends.is_dtensor(p) for p in held):
            message = "optimizer holds no parameter of model; make it from model.parameters()"
            warnings.warn(message, stacklevel=3)


def _require_update(
    updates: Updates, accumulation_steps: int, cuda_graph: bool, after_update: Any
) -> None:
    """Check the arguments of `run_epoch` that say how an update is made."""
    *_, optimizer, _, max_grad_norm, autocast, scaler = updates
    checks.require_size(accumulation_steps=accumulation_steps)
    if max_grad_norm is not None:
        norm = checks.require_number("max_grad_norm", max_grad_norm, "a number, or None")
        if not 0 < norm < math.inf:
            raise ValueError(f"max_grad_norm is {norm}; expected a positive, finite number")
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"max_grad_norm is {norm}, and optimizer is a {type(optimizer).__name__} without "
                "param_groups; expected one of torch.optim"
            )
    if autocast is not None:
        checks.require_instance("autocast", autocast, torch.dtype, "a dtype, or None")
        if autocast not in (torch.float16, torch.bfloat16):
            raise ValueError(f"autocast is {autocast}; expected torch.float16 or torch.bfloat16")
    if scaler is not None:
        expected = "a torch.amp.GradScaler, or None"
        checks.require_instance("scaler", scaler, torch.amp.GradScaler, expected)
    graph = checks.require_flag("cuda_graph", cuda_graph) or None
    if graph and scaler is not None:
        raise ValueError(
            "cuda_graph is True beside a scaler, which reads values on the host; expected one"
        )
    if after_update is not None:
        checks.require_callable("a function of a loss", after_update=after_update)
    given: dict[str, Any] = dict(
        accumulation_steps=accumulation_steps if accumulation_steps > 1 else None,
        max_grad_norm=max_grad_norm,
        scaler=scaler,
        cuda_graph=graph,
        after_update=after_update,
    )
    for name, x in given.items():
        if x is not None and optimizer is None:
            raise ValueError(f"{name} is given without an optimizer; expected both or neither")


def _require_batch(step: int, batch: Any, updates: Updates) -> None:
    """Check that batch number `step` is a `Batch` with a target, and with a source if the model
    takes one; warn if the first one has other padding than the loss.
    """
    model, loss_compute, *_ = updates
    if not hasattr(batch, "tgt_mask"):
        kind = type(batch).__name__
        raise TypeError(f"batch {step} of data is a {kind}; expected a Batch")
    if any(getattr(batch, name, None) is None for name in ("tgt", "tgt_y", "ntokens")):
        raise ValueError(f"batch {step} of data has no target")
    has_source = getattr(batch, "src", None) is not None
    forward = getattr(type(model), "forward", None)
    if has_source and forward is LanguageModel.forward:
        raise ValueError(
            f"batch {step} of data has a source, which a LanguageModel does not take; "
            "expected Batch(None, tgt)"
        )
    if not has_source and forward is EncoderDecoder.forward:
        raise ValueError(
            f"batch {step} of data has no source, which an EncoderDecoder takes; "
            "expected Batch(src, tgt)"
        )
    if step == 1 and isinstance(loss_compute, SimpleLossCompute) and may_read(batch.tgt_y):
        pad = getattr(batch, "pad", None)
        ignored = getattr(loss_compute.criterion, "padding_idx", pad)
        if pad not in (None, ignored) and bool((batch.tgt_y == pad).any()):
            message = f"batch 1 is padded with {pad}, and padding_idx of the criterion is {ignored}"
            warnings.warn(f"{message}; give both the same token id", stacklevel=3)


def _print_line(step: int, loss: float, tokens_per_second: float) -> None:
    print(f"batch {step:6d}  loss {loss:8.4f}  {tokens_per_second:10,.0f} tokens/s", flush=True)
