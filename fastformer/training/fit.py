"""fit: a training run with validation, early stopping, checkpoints and a log, on `run_epoch`."""

from __future__ import annotations

import csv
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm.auto import tqdm

from fastformer import checks
from fastformer.nn.transformer import Generator
from fastformer.training.batches import Batch
from fastformer.training.checkpoints import Checkpoints, generators, is_first
from fastformer.training.training import LabelSmoothing, SimpleLossCompute, run_epoch

Row = dict[str, Any]
COLUMNS = "step", "epoch", "loss", "learning_rate", "tokens_per_second", "valid_loss", "metric"
EVERY = 100  # updates between checkpoints, if the folder alone is given


class Fitted(NamedTuple):
    """What `fit` has done.

    Attributes:
        losses: the loss per token of each update, of those before a checkpoint as well.
        validations: a dict for each validation, with its "step" and "epoch" and what there is of
            "valid_loss" and "metric".
        best: the validation with the highest metric, or without a metric the lowest valid_loss;
            None if there was none.
    """

    losses: list[float]
    validations: list[Row]
    best: Row | None


def fit(
    model: nn.Module,
    batches: Iterable[Batch],
    valid: Iterable[Batch] | None = None,
    *,
    optimizer: Optimizer,
    scheduler: LRScheduler | None = None,
    loss_compute: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    valid_every: int | None = None,
    metric: Callable[[nn.Module], float] | None = None,
    patience: int | None = None,
    checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
    log: str | os.PathLike[str] | None = None,
    report: Callable[[Row], None] | None = None,
    report_every: int = 20,
    progress: bool | None = None,
    description: str | None = None,
    accumulation_steps: int = 1,
    max_grad_norm: float | None = None,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    cuda_graph: bool = False,
) -> Fitted:
    """Train the model by `run_epoch` for a number of epochs or of updates; leave it in eval mode.

    A run that was killed at any moment goes on from its newest checkpoint, in the middle of an
    epoch as well, to the same bits: a checkpoint has the weights, the optimizer, the schedule, the
    scaler, the generators of torch, NumPy and Python, the validations, the best weights, and the
    position in the data. Batches that have state_dict and load_state_dict, as `token_batches` and
    torchdata's loaders, are put to this position. Others are read again from the state that the
    generators had at the start of the epoch, and the batches that were trained are left out: a
    list, a DataLoader, or whatever depends on these generators alone.

    Args:
        model: as in `run_epoch`; it is put into training mode, and batches go to its device.
        batches: read once an epoch, such as `token_batches`. An update may take batches of two
            epochs if accumulation_steps does not divide their number.
        valid: batches for the loss in evaluation mode, computed after each epoch, or every
            `valid_every` updates, and at the end.
        optimizer, scheduler: as in `run_epoch`.
        loss_compute: as in `run_epoch`. None is SimpleLossCompute(model.generator,
            LabelSmoothing(V, padding_idx, 0.1)), with the padding_idx of batches, or else 0.
        epochs, steps: the number of epochs or of updates. One of them is given, and the end of the
            batches begins an epoch in both cases.
        valid_every: the number of updates between validations; None for one after each epoch.
        metric: called as metric(model) at each validation, in evaluation mode and without
            gradients. It returns a number, higher for a better model, such as a BLEU score.
        patience: ends the run after so many validations in a row that are no better than the best
            one; the model then gets the best weights, as it does at the last step. None leaves it
            the last weights.
        checkpoints: a `Checkpoints`, or the folder of one that saves every 100 updates; None for
            none. The run resumes from what is there.
        log: a folder for log.csv and, if tensorboard is installed, for its events. The rows after
            the checkpoint from which a run resumes are written again, and without one all.
        report: called with each row of the log, a dict: "step", "epoch", "loss" (per token, the
            mean since the last row), "learning_rate" and "tokens_per_second" every `report_every`
            updates, "step", "epoch", "valid_loss" and "metric" at a validation.
        report_every: the number of updates between rows.
        progress, description: as in `run_epoch`; the bar covers all epochs. Where progress is not
            False and `report` is None, rows are printed: all if there is no bar, else the
            validations.
        accumulation_steps, max_grad_norm, autocast, scaler, cuda_graph: as in `run_epoch`.

    Several processes, as under DDP, have to see the same `valid` and metric; the first one writes
    the log, and the generators are resumed from its states.

    Raises:
        ValueError: epochs and steps are both None or both given, a number is below 1, batches hold
            no batch in an epoch (as an iterator does in the second one), valid_every or patience is
            given without valid or metric, or loss_compute is None and the model has no `Generator`.
        TypeError: optimizer is not one of torch.optim, or checkpoints, log or metric is of a wrong
            type.

    `run_epoch` and `Checkpoints` raise their own errors as well.
    """
    numbers = dict(epochs=epochs, steps=steps, valid_every=valid_every, patience=patience)
    _require(batches, valid, optimizer, metric, log, report_every=report_every, **numbers)
    loss_compute = loss_compute or _loss_compute(model, batches)
    if isinstance(checkpoints, (str, os.PathLike)):
        checkpoints = Checkpoints(checkpoints, {"steps": steps or 2**31 - 1}, EVERY)
    if checkpoints is not None and not callable(getattr(checkpoints, "end_step", None)):
        kind = type(checkpoints).__name__
        raise TypeError(f"checkpoints is a {kind}; expected Checkpoints, a folder, or None")
    bar = sys.stdout.isatty() if progress is None else checks.require_flag("progress", progress)
    if report is not None:
        checks.require_callable("a function of a row", report=report)
    elif progress is not False:
        report = partial(_print_row, bar)
    quiet: dict[str, Any] = dict(report=_ignore, progress=False, autocast=autocast)
    training = _Training(
        model, batches, valid, optimizer, scaler, epochs, steps, valid_every, metric, patience,
        report_every, checkpoints, [report or _ignore], accumulation_steps,
        partial(run_epoch, model=model, loss_compute=loss_compute, **quiet),
    )  # fmt: skip
    more = training.begin(scheduler, log)
    if more:
        options = dict(max_grad_norm=max_grad_norm, scaler=scaler, cuda_graph=cuda_graph)
        run_epoch(
            training, model.train(), loss_compute, optimizer, scheduler,
            **quiet | dict(progress=bar, description=description, **options),
            accumulation_steps=accumulation_steps, after_update=training.after_update,
            report_every=report_every * accumulation_steps,
        )  # fmt: skip
    return training.finish()


@dataclass
class _Training:
    """A run of `fit`: its batches, what it has done, and what is due after an update."""

    model: nn.Module
    batches: Iterable[Batch]
    valid: Iterable[Batch] | None
    optimizer: Optimizer
    scaler: torch.amp.GradScaler | None
    epochs: int | None
    steps: int | None
    valid_every: int | None
    metric: Callable[[nn.Module], float] | None
    patience: int | None
    report_every: int
    checkpoints: Checkpoints | None
    writers: list[Callable[[Row], None]]
    accumulation_steps: int
    evaluate: Callable[[Iterable[Batch]], float]

    losses: list[Tensor] = field(default_factory=list)
    epoch: int = 0  # complete ones
    batch: int = 0  # those read in this epoch
    validations: list[Row] = field(default_factory=list)
    best: Row | None = None
    waited: int = 0  # validations since the best one
    reported: int = 0  # updates in the rows so far
    first_random: Any = None  # the state of the generators at the start of the epoch
    weights: dict[str, Any] = field(default_factory=dict)  # the best ones, with patience
    loaded: bool = False  # the batches have been put to their position

    # ------------------------------------------------------------------------------ the batches

    def begin(self, scheduler: LRScheduler | None, log: str | os.PathLike[str] | None) -> bool:
        """Resume from a checkpoint, if there is one; return whether an update is left."""
        self.first_random = _random_state()
        self._keep_weights()
        if self.checkpoints is not None:
            self.losses = self.checkpoints.begin(self.model, self.optimizer, scheduler, self)[1]
            if self.losses and not self.epoch + self.batch:  # of training without `fit`
                self.batch = len(self.losses) * self.accumulation_steps
                self.reported = len(self.losses)
                self._keep_weights()
        if log is not None and is_first():
            self.writers.append(_log(log, len(self.losses), self.reported, self.validations))
        self._started = time.perf_counter()
        self._rest = self._batches()
        self._next = list(islice(self._rest, 1))
        return bool(self._next)

    def __iter__(self) -> Iterator[Batch]:
        return chain(self._next, self._rest)

    def __len__(self) -> int:
        """The number of batches that are left; TypeError, as tqdm knows it, if that is unknown."""
        if self.steps is not None:
            return (self.steps - len(self.losses)) * self.accumulation_steps
        assert self.epochs is not None
        return (self.epochs - self.epoch) * len(self.batches) - self.batch + 1  # type: ignore[arg-type]

    def _batches(self) -> Iterator[Batch]:
        """Yield the batches that are left. After an epoch, validate."""
        device = self.optimizer.param_groups[0]["params"][0].device
        self._tokens: Any = 0
        while not self._is_over():
            rest = self._opened()
            while not self._is_over() and (batch := next(rest, None)) is not None:
                self.batch += 1
                self._tokens += getattr(batch, "ntokens", None) or 0
                yield batch.to(device, non_blocking=True) if isinstance(batch, Batch) else batch
            if self._is_over():
                return
            if self.batch == 0:
                raise ValueError(
                    f"batches holds no batch in epoch {self.epoch + 1}; expected an iterable that "
                    "begins again, such as a list or token_batches"
                )
            if self.valid_every is None:
                self._validate()
            self.epoch, self.batch = self.epoch + 1, 0

    def _is_over(self) -> bool:
        """Return whether no further batch is to be read. Within an update nothing changes it."""
        return (
            (self.steps is not None and len(self.losses) >= self.steps)
            or (self.epochs is not None and self.epoch >= self.epochs)
            or (self.patience is not None and self.waited >= self.patience)
        )

    def _opened(self) -> Iterator[Batch]:
        """Return an iterator of the batches that are left of the epoch."""
        now = _random_state()
        if self.batch == 0:
            self.first_random = now
        if self.batch == 0 or self.loaded:
            return iter(self.batches)
        _set_random_state(self.first_random)
        rest = iter(self.batches)
        for _ in range(self.batch):
            next(rest, None)
        _set_random_state(now)
        return rest

    # ------------------------------------------------------------------ what is due, and the end

    def after_update(self, loss: Tensor) -> None:
        """Add the loss of an update, and do what is due."""
        self.losses.append(loss)
        step = len(self.losses)
        if step % self.report_every == 0:
            self._report()
        if self.valid_every is not None and step % self.valid_every == 0:
            self._validate()
        if self.checkpoints is not None:
            self.checkpoints.end_step(self.losses)

    def finish(self) -> Fitted:
        """Report, save and validate what has not been; return what the run has done."""
        if len(self.losses) > self.reported:
            self._report()
        if self.checkpoints is not None:
            self.checkpoints.end_step(self.losses, last=True)
        self._validate()
        if self.patience is not None:
            from torch.distributed.checkpoint.state_dict import set_model_state_dict

            set_model_state_dict(self.model, self.weights)
        self.model.eval()
        losses = torch.stack(self.losses).tolist() if self.losses else []
        return Fitted(losses, self.validations, self.best)

    def _report(self) -> None:
        loss = float(torch.stack(self.losses[self.reported :]).mean())
        now, rate = time.perf_counter(), float(self.optimizer.param_groups[0]["lr"])
        speed = float(self._tokens) / (now - self._started)
        self._write(loss=loss, learning_rate=rate, tokens_per_second=speed)
        self.reported, self._started, self._tokens = len(self.losses), now, 0

    def _write(self, **numbers: float) -> Row:
        row: Row = {"step": len(self.losses), "epoch": self.epoch + (self.batch > 0), **numbers}
        for write in self.writers:
            write(row)
        return row

    def _validate(self) -> None:
        """Evaluate the model, unless that is done or there is nothing to evaluate it by."""
        done = bool(self.validations) and self.validations[-1]["step"] == len(self.losses)
        if done or (self.valid is None and self.metric is None):
            return
        started, numbers = time.perf_counter(), {}
        self.model.eval()
        if self.valid is not None:
            numbers["valid_loss"] = self.evaluate(self.valid)
        if self.metric is not None:
            with torch.no_grad():
                numbers["metric"] = float(self.metric(self.model))
        self.model.train()
        row = self._write(**numbers)
        self.validations.append(row)
        if self.best is None or self._is_better(row):
            self.best, self.waited = row, 0
            self._keep_weights()
        else:
            self.waited += 1
        self._started += time.perf_counter() - started

    def _is_better(self, row: Row) -> bool:
        assert self.best is not None
        better: bool = (
            row["valid_loss"] < self.best["valid_loss"]
            if self.metric is None
            else row["metric"] > self.best["metric"]
        )
        return better

    def _keep_weights(self) -> None:
        if self.patience is not None:
            from torch.distributed.checkpoint.state_dict import get_model_state_dict

            state = get_model_state_dict(self.model)
            self.weights = {
                name: x.detach().clone() if isinstance(x, Tensor) else x
                for name, x in state.items()
            }

    # -------------------------------------------------------------------------- the checkpoint

    _SAVED = "epoch", "batch", "validations", "best", "waited", "reported", "first_random"

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has beside the model, the optimizer and the schedule."""
        position = {name: getattr(self, name) for name in self._SAVED}
        position["random"] = _random_state()
        parts: Any = self.batches, self.valid, self.scaler
        position["parts"] = [x.state_dict() if _has_state(x) else None for x in parts]
        state: dict[str, Any] = {"position": (position,)}  # a tuple is saved as one object
        return state | ({} if self.patience is None else {"weights": self.weights})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, which has filled the weights; one of another form of training
        has no position.
        """
        for position in state.get("position", ()):
            for name in self._SAVED:
                setattr(self, name, position[name])
            for x, saved in zip((self.batches, self.valid, self.scaler), position["parts"]):
                if saved is not None and _has_state(x):
                    x.load_state_dict(saved)  # type: ignore[union-attr]
                    self.loaded = self.loaded or x is self.batches
            _set_random_state(position["random"])
        if "weights" not in state:
            self._keep_weights()


def _has_state(x: Any) -> bool:
    return callable(getattr(x, "state_dict", None)) and callable(
        getattr(x, "load_state_dict", None)
    )


def _random_state() -> Any:
    of_torch = [module.get_rng_state() for module in generators()]
    return of_torch, numpy.random.get_state(), random.getstate()


def _set_random_state(state: Any) -> None:
    of_torch, of_numpy, of_python = state
    for module, x in zip(generators(), of_torch):
        module.set_rng_state(x)
    numpy.random.set_state(of_numpy)
    random.setstate(of_python)


# ----------------------------------------------------------------------------------------- the log


def _log(
    folder: str | os.PathLike[str], done: int, reported: int, validations: list[Row]
) -> Callable[[Row], None]:
    """Return a function that adds a row to log.csv and to TensorBoard's events in the folder.

    Only the rows from before the checkpoint, which has `done` updates, are kept.
    """
    path = Path(folder) / "log.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept: list[Row] = []
    if done and path.exists():
        steps = {str(row["step"]) for row in validations}
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if None not in row.values()]
        kept = [
            r for r in rows if (int(r["step"]) <= reported if r["loss"] else r["step"] in steps)
        ]
    whole = path.with_name("log.csv.new")
    with whole.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(kept)
    whole.replace(path)
    lines = csv.DictWriter(path.open("a", newline="", buffering=1), COLUMNS)  # by line: kill -9
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        board = None
    else:
        board = SummaryWriter(str(folder), purge_step=done + 1)

    def write(row: Row) -> None:
        lines.writerow(row)
        if board is not None:
            for name in set(COLUMNS[2:]) & set(row):
                board.add_scalar(name, row[name], row["step"])
            board.flush()

    return write


def _print_row(bar: bool, row: Row) -> None:
    """Print a row of the log; beside a bar only validations, above it."""
    if bar and "loss" in row:
        return
    words = [f"step {row['step']:6d}  epoch {row['epoch']:3d}"]
    for name, text in (
        ("loss", "loss {:8.4f}"),
        ("learning_rate", "lr {:.1e}"),
        ("tokens_per_second", "{:10,.0f} tokens/s"),
        ("valid_loss", "valid loss {:8.4f}"),
        ("metric", "metric {:8.4f}"),
    ):
        words += [text.format(row[name])] if name in row else []
    tqdm.write("  ".join(words), file=sys.stdout)
    sys.stdout.flush()


def _ignore(*_: Any) -> None:
    pass


# ------------------------------------------------------------------------------------ the arguments


def _loss_compute(model: nn.Module, batches: object) -> SimpleLossCompute:
    """Return the default loss, of the model's generator."""
    generator = getattr(model, "generator", None)
    if not isinstance(generator, Generator):
        raise ValueError(
            f"loss_compute is None, and model is a {type(model).__name__} without a Generator; "
            "expected a loss_compute, such as SimpleLossCompute"
        )
    size = generator.proj.out_features
    criterion = LabelSmoothing(size, getattr(batches, "padding_idx", 0), 0.1)
    return SimpleLossCompute(generator, criterion)


def _require(
    batches: object, valid: Any, optimizer: Any, metric: Any, log: Any, **numbers: int | None
) -> None:
    """Check the arguments of `fit` that `run_epoch` does not check."""
    checks.require_instance("batches", batches, Iterable, "an iterable of batches")
    checks.require_instance("optimizer", optimizer, Optimizer, "one of torch.optim")
    if log is not None:
        checks.require_instance("log", log, (str, os.PathLike), "a folder, or None")
    if metric is not None:
        checks.require_callable("a function of the model", metric=metric)
    checks.require_size(**{name: x for name, x in numbers.items() if x is not None})
    if (numbers["epochs"] is None) == (numbers["steps"] is None):
        raise ValueError(
            f"epochs is {numbers['epochs']} and steps is {numbers['steps']}; expected one of them"
        )
    for name in ("valid_every", "patience"):
        if numbers[name] is not None and valid is None and metric is None:
            raise ValueError(
                f"{name} is {numbers[name]}, without valid and metric; expected one of them"
            )
