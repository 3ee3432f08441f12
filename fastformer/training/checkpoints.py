"""Checkpoints of a training run, of one process or of several, by torch.distributed.checkpoint.

A folder step-N holds the model, the optimizer, the schedule, the losses of N steps and the state of
the generators. Any number of processes reads what another number of them has saved.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fastformer.checks import require_instance, require_size
from fastformer.distributed.parallelize import require_same_ranks

FORMAT = "fastformer checkpoint, version 2"
EVERY = 10  # steps
KEPT = 3  # checkpoints in a folder
_ALONE = "torch.distributed is disabled, unavailable or uninitialized"  # no reason to warn
_REPLACED = "Detected an existing checkpoint"  # nor is this: it could not be read


class Checkpoints:
    """The checkpoints of a training run: saved every `every` steps and after the last one.

        checkpoints = ff.Checkpoints(folder, {"steps": 1000, "d_model": 64}, every=100)
        done, losses = checkpoints.begin(model, optimizer, scheduler)    # 0, [] in a new folder
        for batch in batches[done:]:
            losses.append(train_step(batch).detach())
            checkpoints.end_step(losses)

    A checkpoint is a folder step-N of torch.distributed.checkpoint. It has the parameters, the
    optimizer, the schedule, the losses of N steps, the state of the generators of torch, NumPy and
    Python, the settings and the version of this form. Only the three newest checkpoints are kept;
    other files in the folder are not touched.
    A run of several processes saves one checkpoint, which any number of processes loads.

    Args:
        folder: where they are saved; it is made if it does not exist.
        settings: values of JSON by name. "steps" is the number of steps of the run; when a run
            resumes, it must be at least the steps already done. All others must equal those in the
            checkpoint.
        every: the number of steps between checkpoints.

    Attributes:
        resumed_from: the checkpoint from which the run has resumed, or None.

    Raises:
        ValueError: settings has no "steps" of 1 or more, every is less than 1.
        TypeError: folder is no path, settings holds what JSON does not, a number is no int.
    """

    def __init__(
        self, folder: str | os.PathLike[str], settings: Mapping[str, Any], every: int = EVERY
    ) -> None:
        require_instance("folder", folder, (str, os.PathLike), "a path")
        if not isinstance(settings, Mapping) or "steps" not in settings:
            raise ValueError(f"settings is {settings!r}; expected numbers by name, with 'steps'")
        steps, every = require_size(steps=settings["steps"], every=every)
        self.resumed_from: Path | None = None
        self._folder, self._every, self._steps = Path(folder), every, steps
        rest = {name: x for name, x in settings.items() if name != "steps"}
        try:
            self._settings = json.dumps({"format": FORMAT, "settings": rest})
        except TypeError as error:
            raise TypeError(f"settings holds {rest}; expected values of JSON: {error}") from None
        self._state: tuple[Any, ...] = ()
        self._saved = 0  # steps of the newest checkpoint of this run

    def begin(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
        more: Any = None,
    ) -> tuple[int, list[Tensor]]:
        """Load the newest checkpoint that can be read, if there is one, into the model, optimizer
        and scheduler of the run; return its number of steps and their losses.

        more: an object whose state_dict() is saved as well, and loaded by its load_state_dict.

        A warning names the checkpoints that cannot be read.

        Raises ValueError, on all ranks, if the settings of the checkpoint differ, it is of another
        version, has more steps than the run, the checkpoints differ between the ranks, or none in
        the folder can be read.
        """
        from torch.distributed.checkpoint import CheckpointException

        self._state = model, optimizer, scheduler, more
        steps = self._found()
        if dist.is_initialized():
            require_same_ranks(checkpoints=steps)
        for done in steps:
            path = self._folder / f"step-{done}"
            try:
                losses = self._load(path, done)
            except CheckpointException as error:  # raised on all ranks if one cannot read it
                reason = _reason(error)
                if is_first():
                    message = f"checkpoint {path} cannot be read and is passed over: {reason!r}"
                    warnings.warn(message, stacklevel=2)
            else:
                self.resumed_from, self._saved = path, done
                return done, losses
        if steps:
            raise ValueError(
                f"no checkpoint in {self._folder} can be read; expected one that can, or another "
                "folder"
            )
        return 0, []

    def end_step(self, losses: Sequence[Tensor], last: bool = False) -> None:
        """Save a checkpoint if one is due, or if this is the last step, unless the step has one.

        losses: the loss of every step so far, scalars.

        Raises OSError, on all ranks, if it cannot be written, as when the disk is full. The earlier
        checkpoints are then as they were.
        """
        if not self._state:
            raise RuntimeError("end_step was called before begin; expected begin first")
        due = last or len(losses) % self._every == 0 or len(losses) == self._steps
        if due and len(losses) > self._saved:
            self._save(losses)
            self._saved = len(losses)

    def _found(self) -> list[int]:
        """Return the steps of the complete checkpoints, the newest first."""
        complete = self._folder.glob("step-*/.metadata")  # .metadata is written last
        names = [re.fullmatch("step-([1-9][0-9]*)", path.parent.name) for path in complete]
        return sorted((int(name[1]) for name in names if name), reverse=True)

    def _save(self, losses: Sequence[Tensor]) -> None:
        import torch.distributed.checkpoint as dcp

        state = self._collected(torch.stack(list(losses)).cpu())
        path = self._folder / f"step-{len(losses)}"
        with warnings.catch_warnings():
            for expected in (_ALONE, _REPLACED):
                warnings.filterwarnings("ignore", expected)
            try:
                dcp.save(state, checkpoint_id=str(path))
            except dcp.CheckpointException as error:
                reason = _reason(error)
                if is_first():
                    shutil.rmtree(path, ignore_errors=True)
                if not isinstance(reason, (OSError, RuntimeError)):
                    raise
                message = f"checkpoint {path} cannot be written: {reason}"
                raise OSError(message) from None
        if is_first():
            for step in self._found()[KEPT:]:
                old = self._folder / f"step-{step}"
                (old / ".metadata").unlink(missing_ok=True)  # from now on it is not complete
                shutil.rmtree(old, ignore_errors=True)

    def _load(self, path: Path, done: int) -> list[Tensor]:
        """Load a checkpoint of `done` steps, and return their losses."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        saved = {"settings": ""}
        _read(saved, path)
        found = json.loads(saved["settings"])
        if found.get("format") != FORMAT:
            version = found.get("format")
            raise ValueError(f"checkpoint {path} has format {version!r}; expected {FORMAT!r}")
        for name, ours in json.loads(self._settings)["settings"].items():
            theirs = found["settings"].get(name)
            if theirs != ours:
                raise ValueError(
                    f"checkpoint {path} has {name} {theirs}; expected {ours}, or another folder"
                )
        if done > self._steps:
            raise ValueError(
                f"steps is {self._steps}; expected at least the {done} that checkpoint {path} has, "
                "or another folder"
            )
        model, optimizer, scheduler, more = self._state
        state = self._collected(torch.zeros(done))
        _read(state, path)
        parts = dict(model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        set_state_dict(model, optimizer, **parts)
        if scheduler is not None:
            scheduler.load_state_dict(state["scheduler"])
        set_random_state(state["random"])
        if more is not None:
            more.load_state_dict(state["more"])
        return list(state["losses"].to(next(model.parameters()).device))

    def _collected(self, losses: Tensor) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer, scheduler, more = self._state
        parameters, moments = get_state_dict(model, optimizer)
        moments["param_groups"] = _numbers(moments["param_groups"])
        return {
            "model": parameters,
            "optimizer": moments,
            "scheduler": {} if scheduler is None else _numbers(scheduler.state_dict()),
            "random": random_state(),
            "losses": losses,
            "settings": self._settings,
            "more": {} if more is None else more.state_dict(),
        }


def _numbers(x: Any) -> Any:
    """Return options of an optimizer with numbers where they are tensors, as CUDA graphs need."""
    if isinstance(x, dict):
        return {name: _numbers(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(map(_numbers, x))
    return x.item() if isinstance(x, Tensor) and x.dim() == 0 else x


def _reason(error: Any) -> BaseException:
    """Return the first failure that a CheckpointException reports; raise it if it is Ctrl-C."""
    reasons: list[BaseException] = [reason for reason, _ in error.failures.values()]
    if any(isinstance(reason, KeyboardInterrupt) for reason in reasons):
        raise KeyboardInterrupt from error
    return reasons[0]


def _read(state: dict[str, Any], path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _ALONE)
        dcp.load(state, checkpoint_id=str(path))


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def random_state() -> tuple[Any, ...]:
    """Return the state of the generators of torch, NumPy and Python."""
    of_torch = [module.get_rng_state() for module in _generators()]
    return of_torch, numpy.random.get_state(), random.getstate()


def set_random_state(state: tuple[Any, ...]) -> None:
    of_torch, of_numpy, of_python = state
    for module, x in zip(_generators(), of_torch):
        module.set_rng_state(x)
    numpy.random.set_state(of_numpy)
    random.setstate(of_python)


def _generators() -> list[Any]:
    """Return the modules of torch that have a generator in use."""
    return [torch, torch.cuda] if torch.cuda.is_initialized() else [torch]
