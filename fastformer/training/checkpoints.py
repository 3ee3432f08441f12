"""Checkpoints of a training run, of one process or of several, by torch.distributed.checkpoint.

A folder step-N holds the model, the optimizer and the schedule once, and for each process the
losses of N steps and the state of its generators. Any number of processes reads it.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map_only

from fastformer.checks import plain_number, require_instance, require_size

FORMAT = "fastformer checkpoint, version 3"
EVERY = 10  # steps
LOOKS = 10  # steps after which several processes tell each other whether one wants to save
KEPT = 3  # checkpoints in a folder
_ALONE = "torch.distributed is disabled, unavailable or uninitialized"  # no reason to warn
_REPLACED = "Detected an existing checkpoint"  # nor is this: it could not be read


class Checkpoints:
    """The checkpoints of a training run: saved every so many steps, or minutes, and at the end.

        checkpoints = ff.Checkpoints(folder, {"steps": 1000, "d_model": 64}, every=100)
        done, losses = checkpoints.begin(model, optimizer, scheduler)    # 0, [] in a new folder
        for batch in batches[done:]:
            losses.append(train_step(batch).detach())
            checkpoints.end_step(losses)

    A checkpoint is a folder step-N of torch.distributed.checkpoint. It has the parameters, the
    optimizer, the schedule, the losses of N steps, the state of the generators of torch, NumPy and
    Python, the settings and the version of this form. Only the three newest checkpoints are kept;
    other files in the folder are not touched.
    Several processes save one checkpoint, with the losses and the generators of each, which any
    number loads: a process that was not there takes the losses of the first one, and its generators
    if all have the same seed.

    Args:
        folder: where they are saved; it is made if it does not exist.
        settings: values of JSON by name. "steps" is the number of steps of the run; when a run
            resumes, it must be at least the steps already done. All others must equal those in the
            checkpoint.
        every: the number of steps between checkpoints; or the time, a datetime.timedelta. Several
            processes look at the clock every 10 steps.

    Attributes:
        resumed_from: the checkpoint from which the run has resumed, or None.

    Raises:
        ValueError: settings has no "steps" of 1 or more, every is less than 1, or no positive time.
        TypeError: folder is no path, settings holds what JSON does not, a number is no int.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        settings: Mapping[str, Any],
        every: int | timedelta = EVERY,
    ) -> None:
        require_instance("folder", folder, (str, os.PathLike), "a path")
        if not isinstance(settings, Mapping) or "steps" not in settings:
            raise ValueError(f"settings is {settings!r}; expected numbers by name, with 'steps'")
        [self._steps] = require_size(steps=settings["steps"])
        if not isinstance(every, timedelta):
            [every] = require_size(every=every)
        elif every <= timedelta():
            raise ValueError(f"every is {every}; expected a time above 0")
        self.resumed_from: Path | None = None
        self._folder, self._every = Path(folder), cast(Any, every)
        rest = {name: x for name, x in settings.items() if name != "steps"}
        try:
            self._settings = json.loads(json.dumps(rest))
        except TypeError as error:
            raise TypeError(f"settings holds {rest}; expected values of JSON: {error}") from None
        self._state: tuple[Any, ...] = ()
        self._saved = 0  # steps of the newest checkpoint of this run
        self._started = time.monotonic()  # when it was saved

    def begin(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
        more: dict[str, Any] | None = None,
        own: Any = None,
        *,
        settings: Mapping[str, Any] | None = None,
        resume: bool = True,
    ) -> tuple[int, list[Tensor]]:
        """Load the newest checkpoint that can be read, if there is one, into the model, optimizer
        and scheduler of the run; return its number of steps and their losses.

        more: a dict that is saved as well; its values are replaced by those of the checkpoint.
        own: an object whose state_dict() each process saves, to be loaded by its load_state_dict,
        which may raise ValueError, "what the checkpoint has; expected ..", for that of another run.
        settings: further ones, which each process saves and compares.
        resume: False deletes the checkpoints in the folder, and begins a new run.

        A warning names the checkpoints that cannot be read.

        Raises ValueError, on all ranks, if settings of the checkpoint differ, it is of another
        version, has more steps than the run, `own` refuses it, the checkpoints differ between the
        ranks, or none in the folder can be read.
        """
        from torch.distributed.checkpoint import CheckpointException

        self._state = model, optimizer, scheduler, more, own
        self._settings |= settings or {}
        self._saved, self._started, self.resumed_from = 0, time.monotonic(), None
        steps = self._found()
        seen = _gathered(steps)
        if any(theirs != steps for theirs in seen):
            raise ValueError(f"the ranks have checkpoints {seen}; expected the same on all")
        if not resume:
            self._delete(steps)
            return 0, []
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

    def end_step(self, losses: Sequence[Tensor], last: bool = False, stop: bool = False) -> bool:
        """Save a checkpoint if one is due, or if this is the last step, unless the step has one.

        losses: the loss of every step so far, scalars.
        stop: whether this process wants to save and stop, as after Ctrl-C. Returns True if one
        does, which several processes learn every 10 steps, after the step has been saved.

        Raises OSError, on all ranks, if it cannot be written, as when the disk is full. The earlier
        checkpoints are then as they were.
        """
        if not self._state:
            raise RuntimeError("end_step was called before begin; expected begin first")
        step, every = len(losses), self._every
        timed = isinstance(every, timedelta)
        waited = timed and time.monotonic() - self._started >= every.total_seconds()
        due = last or step == self._steps or (not timed and step % every == 0)
        if dist.is_initialized():
            wishes = _gathered((stop, waited)) if step % LOOKS == 0 else [(False, False)]
            stop, waited = (any(of_all) for of_all in zip(*wishes))
        if (due or stop or waited) and step > self._saved:
            self._save(losses)
            self._saved, self._started = step, time.monotonic()
        return stop

    def _found(self) -> list[int]:
        """Return the steps of the complete checkpoints, the newest first."""
        complete = self._folder.glob("step-*/.metadata")  # .metadata is written last
        names = [re.fullmatch("step-([1-9][0-9]*)", path.parent.name) for path in complete]
        return sorted((int(name[1]) for name in names if name), reverse=True)

    def _save(self, losses: Sequence[Tensor]) -> None:
        import torch.distributed.checkpoint as dcp

        own, (rank, world) = self._state[-1], _place()
        position = None if own is None else own.state_dict()
        alone = self._settings, torch.stack(list(losses)).cpu(), random_state(), position
        header = json.dumps({"format": FORMAT, "processes": world})
        state = self._shared() | {"settings": header, f"process-{rank}": alone}
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
                raise OSError(f"checkpoint {path} cannot be written: {reason}") from None
        self._delete(self._found()[KEPT:])

    def _delete(self, steps: list[int]) -> None:
        for step in steps if is_first() else ():
            old = self._folder / f"step-{step}"
            (old / ".metadata").unlink(missing_ok=True)  # from now on it is not complete
            shutil.rmtree(old, ignore_errors=True)

    def _load(self, path: Path, done: int) -> list[Tensor]:
        """Load a checkpoint of `done` steps, and return their losses."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        found = json.loads(_read({"settings": ""}, path)["settings"])
        if found.get("format") != FORMAT:
            version = found.get("format")
            raise ValueError(f"checkpoint {path} has format {version!r}; expected {FORMAT!r}")
        model, optimizer, scheduler, more, _ = self._state
        rank, processes = _place()[0], found["processes"]
        name = f"process-{rank if rank < processes else 0}"
        settings, losses, random, position = _read({name: ()}, path)[name]
        refusals = filter(None, _gathered(self._refusal(done, settings, position)))
        for refusal in refusals:  # raised on all ranks, so that none is left waiting
            raise ValueError(f"checkpoint {path} has {refusal}, resume=False, or another folder")
        state = _read(self._shared(), path)
        parts = dict(model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        set_state_dict(model, optimizer, **parts)
        if scheduler is not None:
            scheduler.load_state_dict(state["scheduler"][0])
        if len(set(_gathered(torch.initial_seed()))) == 1 or rank < processes:
            set_random_state(random)
        if more is not None:
            more |= state["more"]
        return list(losses.to(next(model.parameters()).device))

    def _refusal(self, done: int, settings: dict[str, Any], position: Any) -> str | None:
        """Return what a checkpoint has of another run; if it has nothing, load the position."""
        own = self._state[-1]
        if own is not None and position is None:
            return "no position in the data; expected one that the same loop has saved"
        if done > self._steps:
            return f"{done} steps; expected {self._steps} or fewer"
        for name in self._settings | settings:
            theirs, ours = settings.get(name), self._settings.get(name)
            if theirs != ours:
                return f"{name} {theirs}; expected {ours}"
        try:
            if own is not None:
                own.load_state_dict(position)
        except ValueError as error:
            return str(error)
        return None

    def _shared(self) -> dict[str, Any]:
        """Return what all processes save together."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer, scheduler, more, _ = self._state
        parameters, moments = get_state_dict(model, optimizer)
        # Numbers where CUDA graphs need tensors.
        groups, schedule = moments["param_groups"], scheduler and scheduler.state_dict()
        groups, schedule = tree_map_only(Tensor, plain_number, (groups, schedule))
        # A tuple is saved as one object, with keys that are no words.
        rest = {"scheduler": (schedule,), "more": more or {}}
        return {"model": parameters, "optimizer": moments | {"param_groups": groups}, **rest}


def _reason(error: Any) -> BaseException:
    """Return the first failure that a CheckpointException reports; raise it if it is Ctrl-C."""
    reasons: list[BaseException] = [reason for reason, _ in error.failures.values()]
    if any(isinstance(reason, KeyboardInterrupt) for reason in reasons):
        raise KeyboardInterrupt from error
    return reasons[0]


def _read(state: dict[str, Any], path: Path) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _ALONE)
        dcp.load(state, checkpoint_id=str(path))
    return state


def _gathered(x: Any) -> list[Any]:
    """Return the x of all processes."""
    found = [x] * _place()[1]
    if dist.is_initialized():
        dist.all_gather_object(found, x)
    return found


def _place() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def is_first() -> bool:
    return _place()[0] == 0


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
