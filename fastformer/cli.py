"""The command `fastformer`.

    fastformer copy-task    train the copy task on both backends and compare them
    fastformer plot NAME    draw the tutorials' figures: masks, encodings, targets, attention
    fastformer tune         measure what is fastest on this GPU
    fastformer info         print versions, devices, and the backend of each op with its reason

The exit status is 0 on success, 1 if the copy task failed, 2 for a bad option or a request that
this machine cannot serve, and 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fastformer import environment, tuning
from fastformer._version import __version__
from fastformer.dispatch import backends, measurements
from fastformer.ops import examples
from fastformer.training import copy_task, parallel_copy_task, plots


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments. Return the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments, arguments.parser)
    except KeyboardInterrupt:
        print("\nInterrupted")
        return INTERRUPTED


INTERRUPTED = 130  # the exit status after Ctrl-C, as shells have it


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of every option that has one; the help of the others says what it is."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, argparse.SUPPRESS):
            return action.help
        return super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastformer", description="The standard Transformer on fused Triton kernels."
    )
    parser.add_argument("--version", action="version", version=f"fastformer {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_copy_task(commands)
    _add_plot(commands)
    _add_tune(commands)
    _add_info(commands)
    return parser


def _device(name: str) -> torch.device:
    """Return the device of that name, after a test allocation. `cuda` is the current device."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise argparse.ArgumentTypeError(
            f"{name!r} cannot be used on this machine: {reason}"
        ) from error
    return device


def _output_file(name: str) -> Path:
    """Return the path, after a check that it can be written: an error comes before the work."""
    path = Path(name)
    if os.path.isdir(path):  # pathlib raises an error for a name that is too long
        raise argparse.ArgumentTypeError(f"{name!r} is a folder; expected a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{name!r} is in a folder that does not exist")
    is_new = not os.path.exists(path)
    if is_new or path.is_file():
        try:
            path.open("ab").close()
        except OSError as error:
            told = f"{name!r} cannot be written: {error.strerror}"
            raise argparse.ArgumentTypeError(told) from error
    if is_new:
        path.unlink()
    return path


def _output_folder(name: str) -> Path:
    """Return the path of a folder, after a check that files can be written to it."""
    path = Path(name)
    there = next(p for p in (path, *path.absolute().parents) if os.path.exists(p))
    try:
        with tempfile.TemporaryFile(dir=there):
            return path
    except OSError as error:
        told = f"{name!r} cannot be written: {error.strerror}"
        raise argparse.ArgumentTypeError(told) from error


def _dpi(text: str) -> int:
    dpi = int(text) if text.isdecimal() else 0
    if not 20 <= dpi <= 1200:
        raise argparse.ArgumentTypeError(f"dpi is {text}; expected an int from 20 to 1200")
    return dpi


def _figure_file(name: str) -> Path:
    path = _output_file(name)
    try:
        plots.require_format(path)
    except (ImportError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


# ---------------------------------------------------------------------------------------- copy-task


def _add_copy_task(commands: Any) -> None:
    parser = commands.add_parser(
        "copy-task",
        help="train the copy task on both backends and compare them",
        description="Trains a small Transformer to copy random sequences. With one seed both "
        "backends start from the same weights, see the same batches and draw the same dropout "
        "masks. On a CPU the Triton kernels run in Triton's interpreter and train the first steps "
        "of the same run. The exit status is 1 if a run of the default number of steps or more "
        "does not copy, or if the first losses of the backends differ.",
        formatter_class=_Help,
    )
    default = copy_task.Settings()
    add = parser.add_argument
    add(
        "--backend",
        choices=("auto", "triton", "reference", "both"),
        default="both",
        help="which to train; with --parallel, both means auto",
    )
    add("--steps", type=int, default=default.steps, help="batches to train on")
    add("--seed", type=int, default=default.seed, help="the seed of weights, data and dropout")
    add(
        "--device",
        type=_device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda, or cuda:N",
    )
    # A second thread does not speed up such a small model, and if another program uses one of the
    # cores, the threads wait for each other: 29 tokens/s measured, against 914 with one thread.
    add("--threads", type=int, default=1, help="CPU threads; more help at larger sizes only")
    add(
        "--json",
        type=_output_file,
        metavar="FILE",
        help="write losses and environment here; by default nowhere",
    )
    add(
        "--plot",
        type=_figure_file,
        metavar="FILE",
        help="draw the loss curves here; by default nowhere",
    )
    _add_dpi(parser)
    add("--batch", type=int, default=default.batch, help="sequences in a batch")
    add("--length", type=int, default=default.length, help="symbols in a sequence")
    add("--vocab", type=int, default=default.vocab, help="symbols 1 .. VOCAB-1, 0 is padding")
    sizes: list[tuple[str, str, str, str]] = [
        ("--layers", "--N", "N", "layers of the encoder, and of the decoder"),
        ("--d-model", "--d_model", "d_model", "features of a token"),
        ("--d-ff", "--d_ff", "d_ff", "hidden features of the feed-forward"),
        ("--heads", "--h", "h", "attention heads"),
        ("--warmup", "--warm-up", "warmup", "steps in which the learning rate rises"),
    ]
    for option, other, name, help in sizes:
        value = getattr(default, name)
        add(option, other, type=int, default=value, dest=name, metavar=name.upper(), help=help)
    add("--dropout", type=float, default=default.dropout, metavar="P", help="of every dropout")
    add("--factor", type=float, default=default.factor, help="multiplies the learning rate")
    add(
        "--smoothing",
        type=float,
        default=default.smoothing,
        metavar="P",
        help="smoothing of the labels",
    )
    _add_processes(parser)
    parser.set_defaults(run=_copy_task, parser=parser)


def _add_processes(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run that goes on, or that several processes share."""
    add = parser.add_argument
    add(
        "--parallel",
        choices=parallel_copy_task.WAYS,
        help="train on the processes that torchrun has started, by this way, and compare the "
        "losses with those of one process; by default in one process",
    )
    add(
        "--checkpoint",
        type=_output_folder,
        metavar="FOLDER",
        help="save a checkpoint here every 10 steps, keep the last three, and begin with the last "
        "one; both backends have a folder each. By default nothing is saved",
    )
    add(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="of --parallel: how long a process waits for the others",
    )


def _add_dpi(parser: argparse.ArgumentParser) -> None:
    help = "dots per inch of a figure in pixels"
    parser.add_argument("--dpi", type=_dpi, default=200, metavar="DPI", help=help)


def _copy_task(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    names = copy_task.Settings.__dataclass_fields__
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
    if arguments.parallel is not None:
        return _parallel_copy_task(arguments, settings, parser)
    chosen = ["reference", "triton"] if arguments.backend == "both" else [arguments.backend]
    skipped = None
    try:
        copy_task.interpreted(chosen[-1], settings.device)
    except RuntimeError as error:
        if arguments.backend != "both":
            parser.error(str(error))
        chosen.remove("triton")
        skipped = str(error)

    with _threads(arguments.threads):
        try:
            runs = copy_task.compare(settings, chosen, arguments.checkpoint)
        except ValueError as error:  # of a checkpoint
            parser.error(str(error))
        where = environment.describe(settings.device)
    if skipped is not None:
        print(f"\nThe triton run is skipped: {skipped}")
    faults = [] if runs[-1].interrupted else copy_task.faults(settings, runs)
    _write(arguments, settings, runs, where)
    for fault in faults:
        print(f"FAILED: {fault}")
    return INTERRUPTED if runs[-1].interrupted else 1 if faults else 0


def _parallel_copy_task(
    arguments: argparse.Namespace, settings: copy_task.Settings, parser: argparse.ArgumentParser
) -> int:
    """Train on the processes of torchrun, and compare the losses with those of one process."""
    from torch.distributed.elastic.multiprocessing.errors import record

    backend = "auto" if arguments.backend == "both" else arguments.backend
    kind, seconds = settings.device.type, arguments.timeout
    try:
        with (
            _threads(arguments.threads),
            parallel_copy_task.process_group(kind, seconds) as device,
        ):
            settings = replace(settings, device=device)
            way = parallel_copy_task.Parallel(arguments.parallel, settings, arguments.checkpoint)
            # torchrun prints the error of the process that failed first.
            compared: Any = record(parallel_copy_task.compare)(settings, backend, way)
            runs, faults = compared
            if way.rank == 0:
                _write(arguments, settings, runs, environment.describe(device))
    except ValueError as error:
        parser.error(str(error))
    return INTERRUPTED if runs[-1].interrupted else 1 if faults else 0


def _write(
    arguments: argparse.Namespace,
    settings: copy_task.Settings,
    runs: Sequence[copy_task.Run],
    where: dict[str, Any],
) -> None:
    """Write the files of the options --json and --plot, of interrupted runs as well."""
    last = runs[-1]
    if last.interrupted:
        print(f"\nInterrupted: {last.title} trained {len(last.losses)} of {settings.steps} steps")
    if arguments.json is not None:
        result = copy_task.summary(runs, where | {"command": _command(arguments)})
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"Wrote {arguments.json}")
    if arguments.plot is not None:
        curves = {run.title: run.losses for run in runs}
        title = f"Copy task on {where['gpu'] or settings.device}, seed {settings.seed}"
        plots.loss_curves(curves, title).savefig(arguments.plot, dpi=arguments.dpi)
        print(f"Wrote {arguments.plot}")


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
    words = ["fastformer", "copy-task"]
    for name, value in vars(arguments).items():
        if value is not None and name not in ("run", "parser", "json", "plot", "dpi"):
            option = {"N": "layers", "h": "heads"}.get(name, name.replace("_", "-"))
            words += [f"--{option}", str(value)]
    return shlex.join(words)


# --------------------------------------------------------------------------------------------- plot

TRAINED = ("attention-maps", "loss-curves")


def _add_plot(commands: Any) -> None:
    parser = commands.add_parser(
        "plot",
        help="draw a figure of the tutorials",
        description="Draws a figure from values that the package computes. attention-maps trains "
        "the copy task first. loss-curves trains it on both backends, as copy-task --plot does, or "
        "reads a file of copy-task --json.",
        formatter_class=_Help,
    )
    default = copy_task.Settings()
    add = parser.add_argument
    add("name", choices=(*plots.PICTURES, *TRAINED), help="the figure")
    add(
        "--out",
        type=_figure_file,
        required=True,
        metavar="FILE",
        help="the file to write; its suffix chooses the format",
    )
    add(
        "--steps",
        type=int,
        default=default.steps,
        help="training steps, for a figure that needs them",
    )
    add("--seed", type=int, default=default.seed, help="the seed of that training")
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="for loss-curves: a file of copy-task --json; by default it trains",
    )
    _add_dpi(parser)
    parser.set_defaults(run=_plot, parser=parser)


def _plot(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    name, out = arguments.name, arguments.out
    if arguments.json is not None and name != "loss-curves":
        parser.error(f"{name} takes no --json")
    if name in plots.PICTURES:
        picture = plots.PICTURES[name]
        figure = picture.draw(picture.data())
    elif name == "attention-maps":
        try:
            settings = copy_task.Settings(steps=arguments.steps, seed=arguments.seed)
        except ValueError as error:
            parser.error(str(error))
        with _threads(1):
            maps = copy_task.attention_maps(settings)
        figure = plots.attention_maps(maps, settings.sentence)
    elif arguments.json is not None:
        figure = _loss_curves(arguments.json, parser)
    else:
        words = ["--steps", str(arguments.steps), "--seed", str(arguments.seed)]
        return main(["copy-task", *words, "--plot", str(out), "--dpi", str(arguments.dpi)])
    figure.savefig(out, dpi=arguments.dpi)
    print(f"Wrote {out}")
    return 0


def _title(run: dict[str, Any]) -> str:
    named = [run["backend"], run.get("parallel"), "interpreted" if run["interpreted"] else None]
    return ", ".join(word for word in named if word)


def _loss_curves(path: Path, parser: argparse.ArgumentParser) -> Any:
    """Draw the loss curves of a file that copy-task --json wrote."""
    try:
        result = json.loads(path.read_text())
        where, runs = result["environment"], result["runs"]
        curves = {
            _title(run): [math.nan if loss is None else loss for loss in run["losses"]]
            for run in runs
        }
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


def _add_tune(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help="measure what is fastest on this GPU",
        description="Times the tiles of each kernel, and torch's own ops where they compute the "
        "same, for common sizes of calls, and writes what is fastest to a file that the backend "
        "auto reads. A candidate that fails, crashes, hangs or disagrees with the reference is "
        "dropped. What the file already holds is not measured again, so an interrupted run goes "
        "on. fastformer.tune(model, *inputs) measures the calls of a model.",
        formatter_class=_Help,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, help="when to stop")
    add("--dry-run", action="store_true", help="print what would be measured; needs no GPU")
    add(
        "--only",
        type=_regex,
        metavar="REGEX",
        help="only the calls of --dry-run that it finds; by default all",
    )
    add(
        "--out",
        type=_output_file,
        metavar="FILE",
        help="write here; by default to the user's file",
    )
    add(
        "--candidates",
        type=_regex,
        metavar="REGEX",
        help="only the candidates whose name it finds, beside what is shipped; by default all",
    )
    add(
        "--consan",
        action="store_true",
        help="run under Triton's concurrency sanitizer, which is slow: print what it finds, and "
        "write nothing",
    )
    parser.set_defaults(run=_tune, parser=parser)


def _regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error


def _tune(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
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


def _add_info(commands: Any) -> None:
    what = "print versions, devices, and the backend of each op with its reason"
    parser = commands.add_parser("info", help=what, description=what)
    parser.set_defaults(run=_info, parser=parser)


def _info(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        backend = backends.current_backend()
    except ValueError as error:
        parser.error(str(error))
    devices = environment.devices()
    facts = environment.describe(devices[-1])
    for name in ("fastformer", "python", "torch", "triton", "platform", "threads", "driver"):
        if facts[name] is not None or name == "triton":
            print(f"{name:11} {facts[name] or 'not installed'}")
    if facts["triton"] is not None and not _has_gluon():
        print(f"{'gluon':11} not in this Triton: fastformer tune leaves out the kernels for Hopper")
    for device in devices:
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        print(f"\n{device} {gpu}".rstrip() + f", backend {backend}")
        small = examples.calls(device, torch.float32, False, B=1, S=16, H=2, D=16, V=16)
        for op, given in sorted(dict(small).items()):
            print(f"  {_explanation(op, given)}")
    return 0


def _has_gluon() -> bool:
    """Return whether Triton has the language of kernels/attention/hopper.py."""
    from fastformer.kernels.attention import plan

    return bool(plan.HOPPER)


def _explanation(op: str, given: dict[str, Any]) -> str:
    try:
        return str(backends.explain(op, **given))
    except RuntimeError as error:  # FASTFORMER_BACKEND=triton where it cannot run
        return str(error)
