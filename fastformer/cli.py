"""What each command of `fastformer` does. Their options stand in fastformer_command.py."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import shlex

import torch

from fastformer import environment, tuning
from fastformer.dispatch import backends, measurements
from fastformer.ops import examples
from fastformer.training import copy_task, plots

# ---------------------------------------------------------------------------------------- copy-task


def run_copy_task(arguments: argparse.Namespace) -> int:
    parser, names = arguments.parser, copy_task.Settings.__dataclass_fields__
    if arguments.device is None:
        arguments.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        settings = copy_task.Settings(**{name: getattr(arguments, name) for name in names})
    except ValueError as error:
        parser.error(str(error))
    if settings.device.type == "cpu":  # triton reads this when it is imported: later
        os.environ["TRITON_INTERPRET"] = "1"
    # A second thread does not speed up such a small model, and if another program uses one of the
    # cores, the threads wait for each other: 29 tokens/s measured, against 914 with one thread.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _train(arguments, settings)
    finally:
        torch.set_num_threads(threads)


def _train(arguments: argparse.Namespace, settings: copy_task.Settings) -> int:
    """Train, write the files of --json and --plot, print the verdict, return the exit status."""
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
    runs = copy_task.compare(settings, chosen, limit)
    if skipped is not None:
        print(f"\nThe triton run is skipped: {skipped}")
    where = environment.describe(settings.device)
    if arguments.json is not None:
        result = copy_task.summary(runs, where | {"command": _command(arguments)})
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"Wrote {arguments.json}")
    if arguments.plot is not None:
        title = f"Copy task on {where['gpu'] or settings.device}, seed {settings.seed}"
        figure = plots.loss_curves({run.title: run.losses for run in runs}, title)
        figure.savefig(arguments.plot, dpi=200)
        print(f"Wrote {arguments.plot}")
    faults = copy_task.faults(settings, runs)
    for fault in faults:
        print(f"FAILED: {fault}")
    if not faults:
        print(f"passed: {copy_task.verdict(settings, runs)}")
    return 1 if faults else 0


def _command(arguments: argparse.Namespace) -> str:
    """Return the command line that repeats these runs, with the value of every option."""
    command = ["fastformer", "copy-task"]
    for name, value in vars(arguments).items():
        if value is not None and name not in ("command", "parser", "json", "plot"):
            option = {"N": "layers", "h": "heads"}.get(name, name.replace("_", "-"))
            command += [f"--{option}"] if value is True else [f"--{option}", str(value)]
    return shlex.join(command)


# --------------------------------------------------------------------------------------------- tune


def run_tune(arguments: argparse.Namespace) -> int:
    parser, only = arguments.parser, arguments.only or re.compile("")
    if not arguments.minutes > 0:
        parser.error(f"minutes is {arguments.minutes}; expected a positive number")
    device = environment.devices()[:2][-1]  # the CPU, or the first GPU
    has_gpu = device.type != "cpu"
    calls: tuning.Calls = {}
    for op, given in examples.calls(device if has_gpu else torch.device("meta")):
        tuning.add(calls, op, backends.checked(op, **given))
    calls = {name: call for name, call in calls.items() if only.search(name)}
    if not calls:
        parser.error(f"--only {only.pattern!r} finds no call")
    if not (has_gpu or arguments.dry_run):
        parser.error("tuning measures on a GPU, and there is none on this machine")
    file = arguments.out or measurements.path()
    try:
        result = tuning.measure(calls, file, arguments.minutes, arguments.dry_run)
    except (OSError, RuntimeError) as error:
        parser.error(str(error))
    print(result)
    if arguments.dry_run:
        print(f"{len(result.rows)} calls; the results go to {file}")
        return 0
    if not result.done:
        print(f"The time is up after {arguments.minutes:g} minutes; the next run goes on from here")
    print(f"Wrote {file}" if file and file.exists() else "Nothing was written")
    return 0


# --------------------------------------------------------------------------------------------- info

_GLUON = "fastformer.kernels.attention.gluon"  # KERNELS is empty if Triton has no Gluon


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
    if facts["triton"] is not None and not importlib.import_module(_GLUON).KERNELS:
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
