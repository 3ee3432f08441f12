"""The command `fastformer`.

    fastformer copy-task    train the copy task on both backends and compare them
    fastformer plot NAME    draw the tutorials' figures: masks, encodings, targets, attention
    fastformer tune         measure what is fastest on this GPU
    fastformer info         print versions, devices, and the backend of each op with its reason

The exit status is 0 on success, 1 if the copy task failed, 2 for a bad option or a request that
this machine cannot serve, and 130 after Ctrl-C.

This file holds the options, fastformer/cli.py what the commands do. It stands outside of the
package, whose import loads torch: --version, --help and a mistyped option need none of it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments. Return the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        from fastformer import cli  # after the options have been read: it takes seconds

        return getattr(cli, f"run_{arguments.command}")(arguments)
    except KeyboardInterrupt:
        print("\nInterrupted")
        return 130  # as in shells


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
    parser.add_argument("--version", action="version", version=f"fastformer {_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, add, help, description in (
        ("copy-task", _add_copy_task, "train the copy task on both backends, compare them", COPY),
        ("plot", _add_plot, "draw a figure of the tutorials", PLOT),
        ("tune", _add_tune, "measure what is fastest on this GPU", TUNE),
        ("info", None, INFO, INFO),
    ):
        command = commands.add_parser(
            name, help=help, description=description, formatter_class=_Help
        )
        command.set_defaults(command=name.replace("-", "_"), parser=command)
        if add is not None:
            add(command.add_argument)
    return parser


def _version() -> str:
    """Return the version, without an import of the package."""
    package = importlib.util.find_spec("fastformer")
    assert package is not None and package.origin is not None
    return runpy.run_path(str(Path(package.origin).with_name("_version.py")))["__version__"]


# --------------------------------------------------------------------------------- types of options


def _device(name: str) -> torch.device:
    """Return the device of that name, after a test allocation. `cuda` is the current device."""
    import torch

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
            raise _cannot_be_written(name, error) from error
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
        raise _cannot_be_written(name, error) from error


def _cannot_be_written(name: str, error: OSError) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{name!r} cannot be written: {error.strerror}")


def _figure_file(name: str) -> Path:
    path = _output_file(name)
    from fastformer.training import plots

    try:
        plots.require_format(path)
    except (ImportError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def _dpi(text: str) -> int:
    dpi = int(text) if text.isdecimal() else 0
    if not 20 <= dpi <= 1200:
        raise argparse.ArgumentTypeError(f"dpi is {text}; expected an int from 20 to 1200")
    return dpi


def _regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error


# ---------------------------------------------------------------------------------------- copy-task

COPY = """Trains a small Transformer to copy random sequences. With one seed both backends start
from the same weights, see the same batches and draw the same dropout masks. On a CPU the Triton
kernels run in Triton's interpreter and train the first steps of the same run, or all with --full.
The exit status is 1 if a run of the default number of steps or more does not copy, or if the first
losses of the backends differ."""
PARALLEL = ("ddp", "fsdp", "tensor", "context")


def _add_copy_task(add: Any) -> None:
    add(
        "--backend",
        choices=("auto", "triton", "reference", "both"),
        default="both",
        help="which to train; with --parallel, both means auto",
    )
    add("--steps", type=int, default=400, help="batches to train on")
    full = "train all of the steps in Triton's interpreter; by default as many as fit into 60 s"
    add("--full", action="store_true", default=None, help=full)
    add("--seed", type=int, default=0, help="the seed of weights, data and dropout")
    device = "cpu, cuda, or cuda:N; by default cuda if there is a GPU, else cpu"
    add("--device", type=_device, help=device)
    # A second thread does not speed up such a small model, and if another program uses one of the
    # cores, the threads wait for each other: 29 tokens/s measured, against 914 with one thread.
    add("--threads", type=int, default=1, help="CPU threads; more help at larger sizes only")
    json = "write losses and environment here; by default nowhere"
    add("--json", type=_output_file, metavar="FILE", help=json)
    plot = "draw the loss curves here; by default nowhere"
    add("--plot", type=_figure_file, metavar="FILE", help=plot)
    _add_dpi(add)
    add("--batch", type=int, default=16, help="sequences in a batch")
    add("--length", type=int, default=10, help="symbols in a sequence")
    add("--vocab", type=int, default=11, help="symbols 1 .. VOCAB-1, 0 is padding")
    for option, other, name, value, help in (
        ("--layers", "--N", "N", 2, "layers of the encoder, and of the decoder"),
        ("--d-model", "--d_model", "d_model", 64, "features of a token"),
        ("--d-ff", "--d_ff", "d_ff", 256, "hidden features of the feed-forward"),
        ("--heads", "--h", "h", 4, "attention heads"),
        ("--warmup", "--warm-up", "warmup", 200, "steps in which the learning rate rises"),
    ):
        add(option, other, type=int, default=value, dest=name, metavar=name.upper(), help=help)
    add("--dropout", type=float, default=0.1, metavar="P", help="of every dropout")
    add("--factor", type=float, default=1.0, help="multiplies the learning rate")
    add("--smoothing", type=float, default=0.1, metavar="P", help="smoothing of the labels")
    add(
        "--parallel",
        choices=PARALLEL,
        help="train so on the processes that torchrun has started, and compare the "
        "losses with those of one process; by default in one process",
    )
    add(
        "--checkpoint",
        type=_output_folder,
        metavar="FOLDER",
        help="save a checkpoint here every 10 steps, keep the last three, and begin with the last "
        "one; both backends have a folder each. By default nothing is saved",
    )
    timeout = "of --parallel: how long a process waits for the others"
    add("--timeout", type=float, default=60.0, metavar="SECONDS", help=timeout)


def _add_dpi(add: Any) -> None:
    add("--dpi", type=_dpi, default=200, metavar="DPI", help="dots per inch of a figure in pixels")


# --------------------------------------------------------------------------------------------- plot

PLOT = """Draws a figure from values that the package computes. attention-maps trains the copy task
first. loss-curves trains it on both backends, as copy-task --plot does, or reads a file of
copy-task --json."""
FIGURES = (
    *("block-masks", "subsequent-mask", "positional-encoding", "positional-heat-map"),
    *("smoothed-targets", "smoothing-penalty", "relu", "learning-rate", "sequence-layers"),
    *("attention-maps", "loss-curves"),
)


def _add_plot(add: Any) -> None:
    add("name", choices=FIGURES, help="the figure")
    out = "the file to write; its suffix chooses the format"
    add("--out", type=_figure_file, required=True, metavar="FILE", help=out)
    add("--steps", type=int, default=400, help="training steps, for a figure that needs them")
    add("--seed", type=int, default=0, help="the seed of that training")
    json = "for loss-curves: a file of copy-task --json; by default it trains"
    add("--json", type=Path, metavar="FILE", help=json)
    layer = "for attention-maps: one layer, as decoder.layers.1.src_attn; by default all"
    add("--layer", metavar="NAME", help=layer)
    add("--head", type=int, help="for attention-maps: one head, from 1 on; by default all")
    _add_dpi(add)


# ------------------------------------------------------------------------------------ tune and info

TUNE = """Times the tiles of each kernel, and torch's own ops where they compute the same, for
common sizes of calls, and writes what is fastest to a file that the backend auto reads. A candidate
that fails, crashes, hangs or disagrees with the reference is dropped. What the file already holds
is not measured again, so an interrupted run goes on. fastformer.tune(model, *inputs) measures the
calls of a model."""
INFO = "print versions, devices, and the backend of each op with its reason"


def _add_tune(add: Any) -> None:
    add("--minutes", type=float, default=30.0, help="when to stop")
    add("--dry-run", action="store_true", help="print what would be measured; needs no GPU")
    only = "only the calls of --dry-run that it finds; by default all"
    add("--only", type=_regex, metavar="REGEX", help=only)
    out = "write here; by default to the user's file"
    add("--out", type=_output_file, metavar="FILE", help=out)
    candidates = "only the candidates whose name it finds, beside what is shipped; by default all"
    add("--candidates", type=_regex, metavar="REGEX", help=candidates)
    consan = "run under Triton's concurrency sanitizer (slow): print what it finds, write nothing"
    add("--consan", action="store_true", help=consan)


if __name__ == "__main__":
    sys.exit(main())
