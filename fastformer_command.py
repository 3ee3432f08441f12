"""The command `fastformer`.

    fastformer copy-task    train the copy task on both backends and compare them
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
            message = f"{name!r} cannot be written: {error.strerror}"
            raise argparse.ArgumentTypeError(message) from error
    if is_new:
        path.unlink()
    return path


def _figure_file(name: str) -> Path:
    path = _output_file(name)
    from fastformer.training import plots

    try:
        plots.require_format(path)
    except (ImportError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


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


def _add_copy_task(add: Any) -> None:
    backends = ("auto", "triton", "reference", "both")
    add("--backend", choices=backends, default="both", help="which to train")
    add("--steps", type=int, default=400, help="batches to train on")
    full = "train all of the steps in Triton's interpreter; by default as many as fit into 60 s"
    add("--full", action="store_true", default=None, help=full)
    add("--seed", type=int, default=0, help="the seed of weights, data and dropout")
    device = "cpu, cuda, or cuda:N; by default cuda if there is a GPU, else cpu"
    add("--device", type=_device, help=device)
    json = "write losses and environment here; by default nowhere"
    add("--json", type=_output_file, metavar="FILE", help=json)
    plot = "draw the loss curves here; by default nowhere"
    add("--plot", type=_figure_file, metavar="FILE", help=plot)
    add("--batch", type=int, default=16, help="sequences in a batch")
    add("--length", type=int, default=10, help="symbols in a sequence")
    add("--vocab", type=int, default=11, help="symbols 1 .. VOCAB-1, 0 is padding")
    layers = "layers of the encoder, and of the decoder"
    add("--layers", type=int, default=2, dest="N", help=layers)
    add("--d-model", type=int, default=64, help="features of a token")
    add("--d-ff", type=int, default=256, help="hidden features of the feed-forward")
    add("--heads", type=int, default=4, dest="h", help="attention heads")
    add("--warmup", type=int, default=200, help="steps in which the learning rate rises")
    add("--dropout", type=float, default=0.1, metavar="P", help="of every dropout")


# ------------------------------------------------------------------------------------ tune and info

TUNE = """Times the tiles of each kernel, and torch's own op where it computes the same, for calls
of common sizes, and writes what is fastest to a file that the backend auto reads. A candidate that
fails or disagrees with the reference is dropped, and a call that crashes or takes too long. What
the file already holds is not measured again, so an interrupted run goes on.
fastformer.tune(model, *inputs) measures the calls of a model."""
INFO = "print versions, devices, and the backend of each op with its reason"


def _add_tune(add: Any) -> None:
    add("--minutes", type=float, default=30.0, help="when to stop")
    add("--dry-run", action="store_true", help="print what would be measured; needs no GPU")
    only = "only the calls of --dry-run that it finds; by default all"
    add("--only", type=_regex, metavar="REGEX", help=only)
    out = "write here; by default to the user's file"
    add("--out", type=_output_file, metavar="FILE", help=out)


if __name__ == "__main__":
    sys.exit(main())
