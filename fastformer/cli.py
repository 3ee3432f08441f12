"""What each command of `fastformer` does. Their options stand in fastformer_command.py."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fastformer_command
from fastformer import environment, tuning
from fastformer.dispatch import backends, measurements
from fastformer.ops import examples
from fastformer.training import copy_task, parallel_copy_task, plots

# ---------------------------------------------------------------------------------------- copy-task


def run_copy_task(arguments: argparse.Namespace) -> int:
    parser, names = arguments.parser, copy_task.Settings.__dataclass_fields__
    if arguments.device is None:
        arguments.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        settings = copy_task.Settings(**{name: getattr(arguments, name) for name in names})
    except ValueError as error:
        parser.error(str(error))
    if not 0 < arguments.timeout < math.inf:
        parser.error(f"timeout is {arguments.timeout}; expected a positive number of seconds")
    if arguments.threads < 1:
        parser.error(f"threads is {arguments.threads}; expected 1 or more")
    if settings.device.type == "cpu":  # triton reads this when it is imported: later
        os.environ["TRITON_INTERPRET"] = "1"
    train = _train if arguments.parallel is None else _train_in_parallel
    try:
        with _threads(arguments.threads):
            return train(arguments, settings)
    except ValueError as error:  # of a checkpoint, or of the processes
        return parser.error(str(error))


def _train(arguments: argparse.Namespace, settings: copy_task.Settings) -> int:
    """Train on one backend, or compare both."""
    chosen = ["reference", "triton"] if arguments.backend == "both" else [arguments.backend]
    skipped = None
    try:
        copy_task.interpreted(chosen[-1], settings.device)
    except RuntimeError as error:
        if arguments.backend != "both":
            arguments.parser.error(str(error))
        chosen.remove("triton")
        skipped = str(error)
    limit = math.inf if arguments.full else copy_task.INTERPRETED_SECONDS
    runs = copy_task.compare(settings, chosen, arguments.checkpoint, limit)
    if skipped is not None:
        print(f"\nThe triton run is skipped: {skipped}")
    return _report(arguments, settings, runs, copy_task.faults(settings, runs))


def _train_in_parallel(arguments: argparse.Namespace, settings: copy_task.Settings) -> int:
    """Train on the processes of torchrun, and compare the losses with those of one process."""
    from torch.distributed.elastic.multiprocessing.errors import record

    backend = "auto" if arguments.backend == "both" else arguments.backend
    kind, seconds = settings.device.type, arguments.timeout
    with parallel_copy_task.process_group(kind, seconds) as device:
        settings = replace(settings, device=device)
        trainer = parallel_copy_task.Parallel(arguments.parallel, settings, arguments.checkpoint)
        # torchrun prints the error of the process that failed first.
        compared: Any = record(parallel_copy_task.compare)(settings, backend, trainer)
        runs, faults = compared
        return _report(arguments, settings, runs, faults, trainer.rank == 0)


def _report(
    arguments: argparse.Namespace,
    settings: copy_task.Settings,
    runs: Sequence[copy_task.Run],
    faults: Sequence[str],
    is_first: bool = True,
) -> int:
    """Write the files of --json and --plot, and print the verdict, in the first process alone.
    Return the exit status.
    """
    if is_first:
        where = environment.describe(settings.device)
        if arguments.json is not None:
            result = copy_task.summary(runs, where | {"command": _command(arguments)})
            text = json.dumps(result, indent=1) + "\n"
            arguments.json.write_text(text)
            print(f"Wrote {arguments.json}")
        if arguments.plot is not None:
            curves = {run.title: run.losses for run in runs}
            title = f"Copy task on {where['gpu'] or settings.device}, seed {settings.seed}"
            _save_figure(plots.loss_curves(curves, title), arguments.plot, arguments.dpi)
        for fault in faults:
            print(f"FAILED: {fault}")
        if not faults:
            print(f"passed: {copy_task.verdict(settings, runs)}")
    return 1 if faults else 0


def _save_figure(figure: Any, file: Path, dpi: int) -> None:
    figure.savefig(file, dpi=dpi)
    print(f"Wrote {file}")


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _command(arguments: argparse.Namespace) -> str:
    """Return the command line that repeats these runs, with the value of every option."""
    command = ["fastformer", "copy-task"]
    for name, value in vars(arguments).items():
        if value is not None and name not in ("command", "parser", "json", "plot", "dpi"):
            option = {"N": "layers", "h": "heads"}.get(name, name.replace("_", "-"))
            command += [f"--{option}"] if value is True else [f"--{option}", str(value)]
    return shlex.join(command)


# --------------------------------------------------------------------------------------------- plot


def run_plot(arguments: argparse.Namespace) -> int:
    name, parser = arguments.name, arguments.parser
    owners = {"json": "loss-curves", "layer": "attention-maps", "head": "attention-maps"}
    for option, figure_name in owners.items():
        if getattr(arguments, option) is not None and name != figure_name:
            parser.error(f"{name} takes no --{option}")
    if name in plots.PICTURES:
        with _threads(1):
            figure = plots.picture(name)
    elif name == "attention-maps":
        figure = _attention_maps(arguments, parser)
    elif arguments.json is not None:
        figure = _loss_curves(arguments.json, parser)
    else:
        options = ["--steps", str(arguments.steps), "--seed", str(arguments.seed)]
        options += ["--plot", str(arguments.out), "--dpi", str(arguments.dpi)]
        return fastformer_command.main(["copy-task", *options])
    _save_figure(figure, arguments.out, arguments.dpi)
    return 0


def _attention_maps(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> Any:
    """Train the copy task, and draw the maps of --layer and --head, by default of all."""
    layer, head = arguments.layer, arguments.head
    try:
        settings = copy_task.Settings(steps=arguments.steps, seed=arguments.seed)
    except ValueError as error:
        parser.error(str(error))
    names = copy_task.attentions(settings.model())
    if layer is not None and layer not in names:
        parser.error(f"layer is {layer!r}; expected one of {', '.join(names)}")
    if head is not None and not 1 <= head <= settings.h:
        parser.error(f"head is {head}; expected an int from 1 to {settings.h}")
    with _threads(1):
        maps, decoded = copy_task.attention_maps(settings)
    maps = maps if layer is None else {layer: maps[layer]}
    return plots.attention_maps(maps, settings.sentence, head, decoded)


def _loss_curves(path: Path, parser: argparse.ArgumentParser) -> Any:
    """Draw the loss curves of a file that copy-task --json wrote."""
    try:
        result = json.loads(path.read_text())
        where, runs = result["environment"], result["runs"]
        curves = {}
        for run in runs:
            losses = [math.nan if loss is None else loss for loss in run["losses"]]
            given = run["backend"], run["interpreted"], losses, math.nan, None
            curves[copy_task.Run(*given, parallel=run.get("parallel")).title] = losses
        title = f"Copy task on {where.get('gpu') or where.get('device')}"
    except (OSError, ValueError) as error:
        parser.error(f"{path} is not a result of copy-task --json: {error}")
    except (AttributeError, KeyError, TypeError):
        parser.error(
            f"{path} is not a result of copy-task --json; expected an object with 'environment' "
            "and with 'runs', each with its 'backend', 'interpreted' and 'losses'"
        )
    return plots.loss_curves(curves, title)


# --------------------------------------------------------------------------------------------- tune


def run_tune(arguments: argparse.Namespace) -> int:
    parser = arguments.parser
    if not arguments.minutes > 0:
        parser.error(f"minutes is {arguments.minutes}; expected a positive number")
    only = arguments.only or re.compile("")
    wanted = _common_calls(torch.device("meta"), only)
    if not wanted:
        parser.error(f"--only {only.pattern!r} finds no call")
    if arguments.dry_run:
        *_, last = environment.devices()
        plan = tuning.planned(wanted, arguments.out or measurements.path(), last)
        print(plan)
        print(f"{len(plan.rows)} calls; the results go to {plan.file}")
        return 0
    try:
        calls = _common_calls(tuning.gpu(), only)
        file = None if arguments.consan else arguments.out or tuning.writable()
        pattern = "" if arguments.candidates is None else arguments.candidates.pattern
        given = calls, file, arguments.minutes
        result = tuning.measure(*given, candidates=pattern, consan=arguments.consan)
    except (OSError, RuntimeError) as error:
        parser.error(str(error))
    print(result)
    if not result.done:
        print(f"The time is up after {arguments.minutes:g} minutes; the next run goes on from here")
    print(f"Wrote {file}" if file is not None and file.exists() else "Nothing was written")
    return 0


def _common_calls(device: torch.device, only: re.Pattern[str]) -> tuning.Calls:
    """Return the common calls whose names the expression finds, with tensors on the device."""
    calls: tuning.Calls = {}
    for op, given in examples.calls(device):
        tuning.add(calls, op, backends.checked(op, **given))
    return {key: given for key, given in calls.items() if only.search(" ".join(key))}


# --------------------------------------------------------------------------------------------- info

_PLAN = "fastformer.kernels.attention.plan"  # HOPPER is empty if Triton has no Gluon


def run_info(arguments: argparse.Namespace) -> int:
    try:
        backend = backends.current_backend()
    except ValueError as error:
        arguments.parser.error(str(error))
    devices = environment.devices()
    facts = environment.describe(devices[-1])
    for name in ("fastformer", "python", "torch", "triton", "platform", "threads", "driver"):
        if facts[name] is not None or name == "triton":
            print(f"{name:11} {facts[name] or 'not installed'}")
    if facts["triton"] is not None and not importlib.import_module(_PLAN).HOPPER:
        print(f"{'gluon':11} not in this Triton: fastformer tune leaves out the kernels for Hopper")
    for device in devices:
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        print(f"\n{device} {gpu}".rstrip() + f", backend {backend}")
        small = examples.calls(device, torch.float32, False, B=1, S=16, H=2, D=16, V=16)
        for op, given in sorted(dict(small).items()):
            try:
                print(f"  {backends.explain(op, **given)}")
            except RuntimeError as error:  # FASTFORMER_BACKEND=triton where it cannot run
                print(f"  {error}")
    return 0
