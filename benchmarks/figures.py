"""Writes docs/figures, the outputs in docs/transformer.md, and examples/transformer.ipynb.

    python -m benchmarks.figures                  everything (most of the time goes to copy_task)
    python -m benchmarks.figures transformer      the page, its notebook and its pictures
    python -m benchmarks.figures pictures         the pictures that no cell of it draws
    python -m benchmarks.figures copy_task        that picture

docs/transformer.md is the source of the notebook: its Python blocks are the cells, and the text
between them is the text of the notebook. The notebook is run, and what a cell prints is put behind
its block, as a block of text. A picture goes to the file of the image that stands there.

copy_task.png is drawn by the command below it in README.md.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import shlex
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

import fastformer as ff
from benchmarks import ROOT

DOCS = ROOT / "docs"
PAGE, NOTEBOOK = DOCS / "transformer.md", ROOT / "examples" / "transformer.ipynb"
BLOCK = re.compile(  # code, what it printed, and its picture
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<text>.*?)^```\n)?"
    r"(?:\n(?P<image>!\[[^\]]*\]\((?P<path>[^)]+)\)\n))?",
    re.DOTALL | re.MULTILINE,
)
DASHES = "-", "--", "-.", ":"  # so that lines also differ without colours
SWATCHES = "0.85", "C0"  # of False and of True
LENGTHS = 128, 256, 512, 1024, 2048
Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)]+)")  # the target, in this checkout


def cells(page: str) -> Any:
    """Return the notebook of a page, not yet run."""
    import jupytext

    code = BLOCK.sub(lambda block: f"```python\n{block['code']}```\n", page)
    folder = NOTEBOOK.parent
    moved = LINK.sub(lambda target: os.path.relpath(DOCS / target[1], folder), code)
    notebook = jupytext.reads(moved, fmt="md")
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
    }
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
    return notebook


def run(notebook: Any) -> None:
    """Run the cells of a notebook and store their outputs in it.

    tqdm's warning that there are no widgets, for a progress bar that is not drawn, is left out.
    """
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    kernels = AsyncKernelManager(transport="ipc")  # no port
    client = NotebookClient(notebook, km=kernels, timeout=600, record_timing=False)
    client.execute(cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    notebook.metadata.pop("language_info")  # the version of Python
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [x for x in cell.outputs if "TqdmWarning" not in x.get("text", "")]


def page_with_outputs(page: str, notebook: Any) -> tuple[str, dict[str, bytes]]:
    """Return the page with what its notebook printed, and the pictures by their path in docs/.

    Raises ValueError if a block has a picture and no image behind it, or the opposite.
    """
    outputs = iter([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])
    pictures: dict[str, bytes] = {}

    def written(block: re.Match[str]) -> str:
        text, drawn = "", []
        for output in next(outputs):
            data = output.get("data", {})
            if "image/png" in data:
                drawn.append(base64.b64decode(data["image/png"]))
            else:
                text += output.get("text") or data["text/plain"] + "\n"
        if len(drawn) != (block["image"] is not None):
            raise ValueError(f"{len(drawn)} pictures, and the image {block['image']}: {block[0]}")
        if drawn:
            pictures[block["path"]] = drawn[0]
        printed = f"\n```text\n{text}```\n" if text else ""
        image = f"\n{block['image']}" if drawn else ""
        return f"```python\n{block['code']}```\n{printed}{image}"

    return BLOCK.sub(written, page), pictures


def _transformer() -> None:
    import nbformat

    page = PAGE.read_text()
    notebook = cells(page)
    run(notebook)
    page, pictures = page_with_outputs(page, notebook)
    for path, picture in pictures.items():
        (DOCS / path).write_bytes(picture)
    PAGE.write_text(page)
    nbformat.write(notebook, NOTEBOOK)


def _copy_task() -> None:
    from fastformer_command import main

    command = re.search(r"^fastformer (copy-task .*docs/figures/copy_task.png)$", _readme(), re.M)
    assert command is not None
    if main(shlex.split(command[1])):
        raise SystemExit(1)


def _readme() -> str:
    return (ROOT / "README.md").read_text()


def lines(series: Series, title: str, x: str, y: str, logarithmic: bool = False) -> Figure:
    """Draw one curve per name. series: name -> (x values, y values)."""
    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.subplots()
    for i, (name, (abscissae, ordinates)) in enumerate(series.items()):
        axes.plot(abscissae, ordinates, DASHES[i % len(DASHES)], label=name)
    axes.set(title=title, xlabel=x, ylabel=y)
    if logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    if len(series) > 1:
        bottom, top = axes.get_ylim()
        axes.set_ylim(bottom, top + 0.25 * (top - bottom))  # room for the legend
        axes.legend(loc="best", ncols=2)
    return figure


def heat_map(
    values: Tensor,
    title: str,
    x: str,
    y: str,
    scale: str | tuple[str, str],
    labels: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Figure:
    """Draw values [rows, columns] as a heat map, with the first row on top.

    scale: what the colours stand for; for booleans the names of False and of True. labels: the
    names of the columns and of the rows; None for their numbers.
    """
    figure = Figure(figsize=(6.0, 5.0), layout="constrained")
    axes = figure.subplots()
    options: dict[str, Any] = {}
    if not isinstance(scale, str):
        options = dict(cmap=ListedColormap(SWATCHES), vmin=0, vmax=1)
        swatches = [Patch(color=c, label=name) for c, name in zip(SWATCHES, scale)]
        figure.legend(handles=swatches[::-1], loc="outside right upper")
    image = axes.imshow(
        values.detach().float().numpy(), aspect="auto", interpolation="nearest", **options
    )
    axes.set(title=title, xlabel=x, ylabel=y)
    for i, axis in enumerate((axes.xaxis, axes.yaxis)):
        axis.set_major_locator(MaxNLocator(integer=True))
        if labels is not None:
            axis.set_ticks(range(len(labels[i])), labels[i])
    if isinstance(scale, str):
        figure.colorbar(image, label=scale)
    return figure


def _positions(d_model: int, length: int = 100) -> Tensor:
    """Return the tensor [length, d_model] that PositionalEncoding adds."""
    encode = ff.PositionalEncoding(d_model, dropout=0.0, max_len=length)
    return encode(torch.zeros(1, length, d_model))[0].detach()


def _positional_encoding() -> Figure:
    waves = {f"dimension {i}": (range(100), _positions(20)[:, i].tolist()) for i in range(4, 8)}
    return lines(waves, "PositionalEncoding(20, 0)", "position", "added to the embedding")


def _positional_heat_map() -> Figure:
    title, colour = "PositionalEncoding(128, 0)", "added to the embedding"
    return heat_map(_positions(128), title, "dimension", "position", colour)


def _subsequent_mask() -> Figure:
    axes, colours = ("position of the key", "position of the query"), ("masked out", "kept")
    return heat_map(ff.subsequent_mask(20)[0], "subsequent_mask(20)", *axes, colours)


def _smoothed_targets() -> Figure:
    """Class 0 and target 0 are padding."""
    targets, classes = [2, 1, 0, 3, 3], ["0: padding", "1", "2", "3", "4"]
    criterion = ff.LabelSmoothing(size=5, padding_idx=0, smoothing=0.5)
    criterion(torch.full((5, 5), 0.2).log(), torch.tensor(targets))
    assert criterion.true_dist is not None
    axes = "token that is predicted", "token that is right", "target probability"
    labels = classes, [classes[i] for i in targets]
    return heat_map(criterion.true_dist, "LabelSmoothing(5, 0, smoothing=0.5)", *axes, labels)


def _smoothing_penalty() -> Figure:
    """The loss of one token, by how sure the model is of it; three others share the rest."""
    certain = torch.linspace(0.05, 0.99, 95)
    other = (1 - certain) / 3
    predicted = torch.stack([torch.zeros(95), certain, other, other, other], 1).log()
    losses = {}
    for smoothing in (0.0, 0.1, 0.4):
        criterion = ff.LabelSmoothing(size=5, padding_idx=0, smoothing=smoothing)
        loss = [float(criterion(row.unsqueeze(0), torch.tensor([1]))) for row in predicted]
        losses[f"smoothing {smoothing:g}"] = certain.tolist(), loss
    return lines(
        losses, "LabelSmoothing(5, 0, smoothing)", "probability of the right token", "loss"
    )


def _relu() -> Figure:
    x = torch.linspace(-5, 5, 201)
    return lines({"relu": (x.tolist(), x.relu().tolist())}, "relu(x) = max(x, 0)", "x", "relu(x)")


def _learning_rate() -> Figure:
    steps = range(1, 20001)
    rates = {
        f"d_model {d}, warm-up {warmup}": (steps, [ff.rate(step, d, 1.0, warmup) for step in steps])
        for d, warmup in ((512, 4000), (512, 8000), (256, 4000))
    }
    return lines(rates, "rate(step, d_model, 1, warmup)", "step", "learning rate")


def _sequence_layers() -> Figure:
    """Measure the forward of three layers on a CPU, in milliseconds of the processor by length.

    The names hold the growth from one length to the next, twice as long, over the last three.
    """
    d = 64
    attend, recur, convolve = ff.MultiHeadedAttention(4, d), nn.GRU(d, d), nn.Conv1d(d, d, 3)
    calls: dict[str, Callable[[Tensor], Any]] = {
        "self-attention": lambda x: attend.eval()(x, x, x),
        "nn.GRU": lambda x: recur(x[0]),
        "nn.Conv1d": lambda x: convolve(x.mT),
    }
    series = {}
    with torch.no_grad():
        for name, call in calls.items():
            given = [partial(call, torch.randn(1, n, d)) for n in LENGTHS]
            times = [1000 * min(timeit.repeat(f, f, time.process_time, 7, 1)) for f in given]
            growth = (times[-1] / times[-3]) ** 0.5
            series[f"{name}: x {growth:.1f}"] = LENGTHS, times
    title = "One layer, d = 64, on a CPU; x: time at twice the length"
    return lines(series, title, "length n", "milliseconds", logarithmic=True)


PICTURES: dict[str, Callable[[], Figure]] = {
    "subsequent-mask": _subsequent_mask,
    "positional-encoding": _positional_encoding,
    "positional-heat-map": _positional_heat_map,
    "smoothed-targets": _smoothed_targets,
    "smoothing-penalty": _smoothing_penalty,
    "relu": _relu,
    "learning-rate": _learning_rate,
    "sequence-layers": _sequence_layers,
}


def _pictures() -> None:
    torch.set_num_threads(1)
    for name, draw in PICTURES.items():
        draw().savefig(DOCS / "figures" / f"{name}.png", dpi=100)


KINDS = {"transformer": _transformer, "pictures": _pictures, "copy_task": _copy_task}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    kinds = parser.parse_args(argv).kinds or KINDS
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"{unknown[0]!r} is no kind of figure; expected some of {', '.join(KINDS)}")
    for kind in kinds:
        KINDS[kind]()


if __name__ == "__main__":
    main()
