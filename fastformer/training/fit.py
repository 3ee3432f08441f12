"""fit: a training run with validation, early stopping, checkpoints and a log, on `run_epoch`."""

from __future__ import annotations

import csv
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm.auto import tqdm

from fastformer import checks
from fastformer.nn.transformer import Generator
from fastformer.training.batches import Batch
from fastformer.training.checkpoints import Checkpoints, is_first, random_state, set_random_state
from fastformer.training.settings import checksum, settings_of, unwrapped
from fastformer.training.training import LabelSmoothing, SimpleLossCompute, run_epoch
from fastformer.training.updates import tensors_of

Row = dict[str, Any]
COLUMNS = dict(  # of the log, and how they are printed
    step="6d", epoch="3d", loss="8.4f", learning_rate=".1e", tokens_per_second="9,.0f",
    valid_loss="8.4f", metric="8.4f",
)  # fmt: skip
EVERY = 100  # updates between checkpoints, if the folder alone is given


class Fitted(NamedTuple):
    """What `fit` has done.

    Attributes:
        losses: the loss per token of each update, of those before a checkpoint as well.
        validations: a dict for each validation, with its "step" and "epoch" and what there is of
            "valid_loss" and "metric".
        best: the validation with the highest metric, or without a metric the lowest valid_loss;
            NaN is worse than any number. None if there was none.
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
    resume: bool = True,
    log: str | os.PathLike[str] | None = None,
    report: Callable[[Row], None] | None = None,
    report_every: int = 20,
    progress: bool | None = None,
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

    Only the same run is resumed: a checkpoint has the seed of torch, the numbers of each module, of
    the optimizer, the schedule, the loss and the batches, the number of processes, and arguments of
    `fit`. What differs is refused by name, as is an epoch that begins with another batch.

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
            none. The run resumes from what is there. Ctrl-C saves one after the current update, and
            raises KeyboardInterrupt then; a second one ends the run at once.
        resume: False deletes the checkpoints that are there, and begins a new run.
        log: a folder for log.csv and, if tensorboard is installed, for its events. log.csv is
            written anew, with the rows that the checkpoint has, if there is one.
        report: called with each row of the log, a dict: "step", "epoch", "loss" (per token, the
            mean since the last row), "learning_rate" and "tokens_per_second" (here) every
            `report_every` updates, "step", "epoch", "valid_loss" and "metric" at a validation.
        report_every: the number of updates between rows.
        progress: as in `run_epoch`; the bar covers all epochs. Where it is not False and `report`
            is None, rows are printed: all if there is no bar, else the validations.
        accumulation_steps, max_grad_norm, autocast, scaler, cuda_graph: as in `run_epoch`.

    Several processes, as under DDP, have to see the same `valid` and metric, and as many batches an
    epoch; the first one writes the log. Each resumes from its own position and generators.

    Raises:
        ValueError: epochs and steps are both None or both given, a number is below 1, batches hold
            no batch in an epoch (as an iterator does in the second one), valid_every or patience is
            given without valid or metric, loss_compute is None and the model has no `Generator`, or
            the checkpoints are those of another run.
        TypeError: optimizer is not one of torch.optim, or checkpoints, log or metric is of a wrong
            type.

    `run_epoch` and `Checkpoints` raise their own errors as well.
    """
    loss_compute = loss_compute or _loss_compute(model, batches)
    bar = sys.stdout.isatty() if progress is None else checks.require_flag("progress", progress)
    if not is_first():
        bar = progress = False
    if report is None and progress is not False:
        report = partial(_print_row, bar)
    options: dict[str, Any] = dict(loss_compute=loss_compute, autocast=autocast)
    training = _Training(
        model, batches, valid, optimizer, scheduler, scaler, epochs, steps, valid_every, metric,
        patience, checkpoints, log, report, report_every, accumulation_steps,
        partial(run_epoch, model=model, progress=False, **options),
    )  # fmt: skip
    settings: dict[str, Any] = {} if checkpoints is None else dict(
        accumulation_steps=accumulation_steps, max_grad_norm=max_grad_norm, autocast=str(autocast),
        scaler=scaler is not None, patience=patience is not None,
        processes=dist.get_world_size() if dist.is_initialized() else 1,
        **settings_of(model, optimizer, scheduler, batches, loss_compute),
    )  # fmt: skip
    resume = checks.require_flag("resume", resume)
    with _interrupted_between_updates(training):
        if training.begin(resume, settings, progress is not False):
            run_epoch(
                training, model.train(), optimizer=optimizer, scheduler=scheduler, scaler=scaler,
                accumulation_steps=accumulation_steps, max_grad_norm=max_grad_norm, progress=bar,
                report_every=report_every * accumulation_steps, after_update=training.after_update,
                cuda_graph=cuda_graph, **options,
            )  # fmt: skip
    return training.finish()


@contextmanager
def _interrupted_between_updates(training: _Training) -> Iterator[None]:
    """Let the first Ctrl-C of a run with checkpoints wait for the end of an update."""
    usual, own = signal.getsignal(signal.SIGINT), os.getpid()
    in_main = threading.current_thread() is threading.main_thread()
    waits = usual is signal.default_int_handler and training.checkpoints is not None and in_main

    def handle(*_: Any) -> None:
        training.interrupted = True
        signal.signal(signal.SIGINT, usual)
        if os.getpid() == own:  # and not a worker of a DataLoader, which goes on as well
            print("Ctrl-C: the run ends after an update; again ends it at once", file=sys.stderr)

    if waits:
        signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        if waits:
            signal.signal(signal.SIGINT, usual)


@dataclass
class _Training:
    """A run of `fit`: its batches, what it has done, and what is due after an update."""

    model: nn.Module
    batches: Iterable[Batch]
    valid: Iterable[Batch] | None
    optimizer: Optimizer
    scheduler: LRScheduler | None
    scaler: torch.amp.GradScaler | None
    epochs: int | None
    steps: int | None
    valid_every: int | None
    metric: Callable[[nn.Module], float] | None
    patience: int | None
    checkpoints: Any
    log: str | os.PathLike[str] | None
    report: Callable[[Row], None] | None
    report_every: int
    accumulation_steps: int
    evaluate: Callable[[Iterable[Batch]], float]

    losses: list[Tensor] = field(default_factory=list)
    epoch: int = 0  # complete ones
    batch: int = 0  # those read in this epoch
    rows: list[Row] = field(default_factory=list)  # of the log
    validations: list[Row] = field(default_factory=list)
    random: Any = None  # the state of the generators at the start of the epoch
    first: int | None = None  # the checksum of the first batch of the epoch
    weights: dict[str, Any] = field(default_factory=dict)  # the best ones, with patience
    interrupted: bool = False

    def __post_init__(self) -> None:
        """Check the arguments of `fit` that `run_epoch` does not check."""
        checks.require_instance("batches", self.batches, Iterable, "an iterable of batches")
        checks.require_instance("optimizer", self.optimizer, Optimizer, "one of torch.optim")
        path = str, os.PathLike, NoneType
        checks.require_instance("log", self.log, path, "a folder, or None")
        if self.metric is not None:
            checks.require_callable("a function of the model", metric=self.metric)
        if self.report is not None:
            checks.require_callable("a function of a row", report=self.report)
        for name in ("epochs", "steps", "valid_every", "patience", "report_every"):
            if getattr(self, name) is not None:
                checks.require_size(**{name: getattr(self, name)})
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(
                f"epochs is {self.epochs} and steps is {self.steps}; expected one of them"
            )
        for name in ("valid_every", "patience"):
            if getattr(self, name) is not None and self.valid is None and self.metric is None:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, without valid and metric; expected one of "
                    "them"
                )
        if not hasattr(self.checkpoints, "end_step"):
            expected = "Checkpoints, a folder, or None"
            checks.require_instance("checkpoints", self.checkpoints, path, expected)
            if self.checkpoints is not None:
                settings = {"steps": self.steps or 2**31 - 1}
                self.checkpoints = Checkpoints(self.checkpoints, settings, EVERY)
        self._compared = isinstance(self.checkpoints, Checkpoints)
        self._again: Any = None  # the iterator of a resumed epoch, and the generators' state

    # ------------------------------------------------------------------------------ the batches

    def begin(self, resume: bool, settings: dict[str, Any], printed: bool) -> bool:
        """Resume from a checkpoint, if there is one; return whether an update is left."""
        self.random = random_state()
        self._keep_weights()
        if self.checkpoints is not None:
            state = self.model, self.optimizer, self.scheduler, self.weights, self
            compared = settings if self._compared else {}
            done, self.losses = self.checkpoints.begin(*state, settings=compared, resume=resume)
            if done and printed and self._compared:
                print(f"resumed from step {done}, {self.checkpoints.resumed_from}", flush=True)
        self._writers = [self.report] if self.report is not None else []
        if self.log is not None and is_first():
            self._writers.append(_log(self.log, self.rows))
        self._device = self.optimizer.param_groups[0]["params"][0].device
        self._started, self._tokens = time.perf_counter(), cast(Any, 0)
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
        while not self._is_over():
            rest = self._opened()
            while not self._is_over() and (batch := next(rest, None)) is not None:
                self.batch += 1
                if self.batch == 1 and self._compared:
                    self.first = checksum(tensors_of(batch))
                self._tokens += getattr(batch, "ntokens", None) or 0
                yield self._moved(batch)
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
            or (self.patience is not None and self._waited() >= self.patience)
        )

    def _opened(self) -> Iterator[Batch]:
        """Return an iterator of the batches that are left of the epoch."""
        now, again, self._again = random_state(), self._again, None
        if self.batch == 0:
            self.random = now
        if self.batch == 0 or _has_state(self.batches):
            return iter(self.batches)
        set_random_state(again[1] if again else self.random)
        rest = again[0] if again else iter(self.batches)
        deque(islice(rest, self.batch), 0)  # reads them
        set_random_state(now)
        return rest

    def _moved(self, batch: Batch) -> Batch:
        return batch.to(self._device, non_blocking=True) if isinstance(batch, Batch) else batch

    # ------------------------------------------------------------------ what is due, and the end

    def after_update(self, loss: Tensor) -> None:
        """Add the loss of an update, and do what is due."""
        self.losses.append(loss)
        step = len(self.losses)
        if step % self.report_every == 0:
            self._report()
        if self.valid_every is not None and step % self.valid_every == 0:
            self._validate()
        if self.checkpoints and self.checkpoints.end_step(self.losses, stop=self.interrupted):
            raise KeyboardInterrupt

    def finish(self) -> Fitted:
        """Report, save and validate what has not been; return what the run has done."""
        self._report()
        if self.checkpoints is not None:
            self.checkpoints.end_step(self.losses, last=True)
        self._validate()
        if self.patience is not None:
            from torch.distributed.checkpoint.state_dict import set_model_state_dict

            set_model_state_dict(self.model, self.weights)
        self.model.eval()
        if self.interrupted:  # after the last update
            raise KeyboardInterrupt
        losses = torch.stack(self.losses).tolist() if self.losses else []
        return Fitted(losses, self.validations, self._best())

    def _report(self) -> None:
        """Write a row of the updates since the last one."""
        last = next((row["step"] for row in reversed(self.rows) if "loss" in row), 0)
        if losses := self.losses[last:]:
            loss, rate = float(torch.stack(losses).mean()), self.optimizer.param_groups[0]["lr"]
            now = time.perf_counter()
            speed = float(self._tokens) / (now - self._started)
            self._write(loss=loss, learning_rate=float(rate), tokens_per_second=speed)
            self._started, self._tokens = now, 0

    def _write(self, **numbers: float) -> Row:
        row: Row = {"step": len(self.losses), "epoch": self.epoch + (self.batch > 0), **numbers}
        self.rows.append(row)
        for write in self._writers:
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
            numbers["valid_loss"] = self.evaluate(map(self._moved, self.valid))
        if self.metric is not None:
            with torch.no_grad():
                numbers["metric"] = float(self.metric(self.model))
        self.model.train()
        self.validations.append(self._write(**numbers))
        if self._waited() == 0:
            self._keep_weights()
        self._started += time.perf_counter() - started

    def _best(self) -> Row | None:
        """Return the first of the best validations."""
        name, sign = ("valid_loss", -1) if self.metric is None else ("metric", 1)
        rows = [row for row in self.validations if name in row]  # those of a run before, perhaps
        numbers = [row for row in rows if not math.isnan(row[name])]
        first = next(iter(self.validations), None)
        return max(numbers, key=lambda row: sign * row[name], default=first)

    def _waited(self) -> int:
        """Return the number of validations since the best one."""
        best = self._best()
        return self.validations[::-1].index(best) if best is not None else 0

    def _keep_weights(self) -> None:
        if self.patience is not None:
            from torch.distributed.checkpoint.state_dict import get_model_state_dict

            state = get_model_state_dict(self.model)
            self.weights |= {
                name: x.detach().clone() if isinstance(x, Tensor) else x
                for name, x in state.items()
            }

    # -------------------------------------------------------------------------- the checkpoint

    _SAVED = "epoch", "batch", "rows", "validations", "random", "first"

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has of this process, beside its losses and generators."""
        position = {name: getattr(self, name) for name in self._SAVED}
        parts: Any = self.batches, self.valid, self.scaler
        states = [x.state_dict() if _has_state(x) else None for x in parts]
        return dict(position=position, states=states, steps=len(self.losses))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint. Raise ValueError if it is not of this run."""
        vars(self).update(state["position"])
        if self.steps is not None and state["steps"] > self.steps:
            raise ValueError(f"{state['steps']} steps; expected {self.steps} or fewer")
        if self.epochs is not None and (self.epoch, self.batch) > (self.epochs, 0):
            raise ValueError(
                f"epoch {self.epoch + 1} begun; expected {self.epochs} epochs or fewer"
            )
        if self._compared and not self._begins_as_before():
            raise ValueError("another first batch of the epoch; expected the same data")
        for x, saved in zip((self.batches, self.valid, self.scaler), state["states"]):
            if saved is not None and _has_state(x):
                x.load_state_dict(saved)  # type: ignore[union-attr]

    def _begins_as_before(self) -> bool:
        """Return whether the first batch of the epoch is the one of the checkpoint."""
        if _has_state(self.batches):
            return True  # it is compared by its settings
        now = random_state()
        set_random_state(self.random)
        rest = iter(self.batches)
        head = [] if rest is self.batches else list(islice(rest, 1))  # it can be read once only
        self._again = (chain(head, rest), random_state()) if head else None  # for `_opened`
        set_random_state(now)
        found = checksum(tensors_of(head[0])) if head else self.first
        return found == self.first


def _has_state(x: Any) -> bool:
    return callable(getattr(x, "load_state_dict", None))


# ----------------------------------------------------------------------------------------- the log


def _log(folder: str | os.PathLike[str], rows: list[Row]) -> Callable[[Row], None]:
    """Write the rows to log.csv in the folder; return a function that adds a row to it, and to
    TensorBoard's events.
    """
    os.makedirs(folder, exist_ok=True)
    file = open(Path(folder) / "log.csv", "w", newline="", buffering=1)  # noqa: SIM115 - by line
    lines = csv.DictWriter(file, COLUMNS)
    lines.writeheader()
    lines.writerows(rows)
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return lines.writerow
    board = SummaryWriter(str(folder), purge_step=1 + (rows[-1]["step"] if rows else 0))

    def write(row: Row) -> None:
        lines.writerow(row)
        for name in row.keys() - {"step", "epoch"}:
            board.add_scalar(name, row[name], row["step"])
        board.flush()

    return write


def _print_row(bar: bool, row: Row) -> None:
    """Print a row of the log; beside a bar only validations, above it."""
    if not (bar and "loss" in row):
        words = [f"{name.replace('_', ' ')} {x:{COLUMNS[name]}}" for name, x in row.items()]
        tqdm.write("  ".join(words), file=sys.stdout)
        sys.stdout.flush()


def _loss_compute(model: nn.Module, batches: object) -> SimpleLossCompute:
    """Return the default loss, of the model's generator."""
    generator = getattr(unwrapped(model), "generator", None)
    if not isinstance(generator, Generator):
        raise ValueError(
            f"loss_compute is None, and model is a {type(model).__name__} without a Generator; "
            "expected a loss_compute, such as SimpleLossCompute"
        )
    size = generator.proj.out_features
    criterion = LabelSmoothing(size, getattr(batches, "padding_idx", 0), 0.1)
    return SimpleLossCompute(generator, criterion)
