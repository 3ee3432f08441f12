"""The figures of the tutorials. matplotlib is imported only when a figure is drawn.

PICTURES maps a name to a function that computes the data with this package and draws them.
`picture(name)` draws one, `fastformer plot NAME --out FILE` saves it.

Every function returns a matplotlib Figure without opening a window. Save it with
`figure.savefig(path)`, or make it the last line of a notebook cell.
"""

from __future__ import annotations

import io
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastformer.mask_tiles import WHOLE, BlockMask
from fastformer.nn.attention import MultiHeadedAttention
from fastformer.nn.embeddings import PositionalEncoding
from fastformer.nn.transformer import subsequent_mask
from fastformer.training.training import LabelSmoothing, rate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DASHES = "-", "--", "-.", ":"  # so that lines also differ without colours
SWATCHES = "0.85", "C0"  # of False and of True
Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def _figure(width: float = 7.0, height: float = 4.0) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib, which is not installed: "
            'pip install ".[plot]" in the checkout installs it'
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    figure._repr_png_ = partial(_png, figure)  # type: ignore[attr-defined]  # for notebooks
    return figure


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


def require_format(path: str | Path) -> None:
    """Raise ValueError if matplotlib cannot write the path's format, ImportError without it."""
    formats = _figure().canvas.get_supported_filetypes()
    suffix = Path(path).suffix.removeprefix(".").lower()
    if suffix not in formats:
        raise ValueError(f"{path} ends in {suffix!r}; expected one of {', '.join(sorted(formats))}")


# -------------------------------------------------------------------------------- kinds of figures


def lines(series: Series, title: str, x: str, y: str, logarithmic: bool = False) -> Figure:
    """Draw one curve per name. series: name -> (x values, y values)."""
    figure = _figure()
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


def _array(values: Tensor) -> Any:
    return values.detach().cpu().float().numpy()


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
    figure = _figure(6.0, 5.0)
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots()
    options: dict[str, Any] = {}
    if not isinstance(scale, str):
        options = dict(cmap=ListedColormap(SWATCHES), vmin=0, vmax=1)
        swatches = [Patch(color=c, label=name) for c, name in zip(SWATCHES, scale)]
        figure.legend(handles=swatches[::-1], loc="outside right upper")
    image = axes.imshow(_array(values), aspect="auto", interpolation="nearest", **options)
    axes.set(title=title, xlabel=x, ylabel=y)
    for i, axis in enumerate((axes.xaxis, axes.yaxis)):
        axis.set_major_locator(MaxNLocator(integer=True))
        if labels is not None:
            axis.set_ticks(range(len(labels[i])), labels[i])
    if isinstance(scale, str):
        figure.colorbar(image, label=scale)
    return figure


def attention_maps(
    maps: Mapping[str, Tensor],
    symbols: Sequence[object],
    head: int | None = None,
    decoded: Sequence[object] | None = None,
) -> Figure:
    """Draw attention weights [h, T, S], with one row of panels per name and one panel per head.

    In a panel, queries are rows and keys are columns. `symbols` are the tokens at the positions.
    head: the only one to draw, from 1 on. decoded: of the copy task, what the model makes of the
    symbols; unless it is a copy, the title says that the model has not learnt the task. Raises
    ValueError for a head that no map has.
    """
    heads = range(1, max(len(weights) for weights in maps.values()) + 1)
    if head is not None and head not in heads:
        raise ValueError(f"head is {head}; expected an int from 1 to {len(heads)}")
    shown = heads if head is None else [head]
    side = 2.0 if len(maps) * len(shown) > 1 else 4.0  # of a panel, in inches
    figure = _figure(side * len(shown) + 1.5, (side + 0.2) * len(maps) + 0.8)
    title = "Attention weights of " if decoded is None else "Attention weights of a copy of "
    title += " ".join(map(str, symbols))
    if decoded is not None and [*decoded] != [*symbols]:
        title += f"\nThe model has not learnt it: it decodes {' '.join(map(str, decoded))}"
    figure.suptitle(title, fontsize=10)
    panels = figure.subplots(len(maps), len(shown), squeeze=False)
    for row, (name, weights) in zip(panels, maps.items()):
        for number, axes in zip(shown, row):
            if number > len(weights):
                axes.set_axis_off()
                continue
            weight = _array(weights[number - 1])
            image = axes.imshow(weight, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
            for set_ticks, size in zip((axes.set_yticks, axes.set_xticks), weight.shape):
                set_ticks(range(size), [str(s) for s in symbols[:size]], fontsize=6)
            axes.set_title(f"head {number}", fontsize=8)
            axes.set_xlabel("token of the key", fontsize=7)
        row[0].set_ylabel(f"{name}\ntoken of the query", fontsize=7)
    figure.colorbar(image, ax=panels, label="attention weight", shrink=0.6)
    return figure


def loss_curves(losses: Mapping[str, Sequence[float]], title: str | None = None) -> Figure:
    """Draw the loss per token against the step, one curve per name.

    Later curves are thinner, dashed and drawn on top, so that curves which coincide are all
    visible.
    """
    figure = _figure()
    axes = figure.subplots()
    for i, (name, values) in enumerate(losses.items()):
        axes.plot(
            range(1, len(values) + 1),
            values,
            DASHES[i % len(DASHES)],
            label=f"{name}, {len(values)} steps",
            linewidth=max(2.6 - 1.2 * i, 1.0),
            marker="o" if len(values) <= 30 else None,
            markersize=4,
        )
    axes.set(xlabel="step", ylabel="loss per token", ylim=(0, None), title=title or "")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    return figure


# ------------------------------------------------------------------------ what the tutorials draw


def _positions(d_model: int, length: int = 100) -> Tensor:
    """Return the tensor [length, d_model] that PositionalEncoding adds."""
    encode = PositionalEncoding(d_model, dropout=0.0, max_len=length)
    return encode(torch.zeros(1, length, d_model))[0].detach()


def _positional_encoding() -> Figure:
    waves = {f"dimension {i}": (range(100), _positions(20)[:, i].tolist()) for i in range(4, 8)}
    return lines(waves, "PositionalEncoding(20, 0)", "position", "added to the embedding")


def _positional_heat_map() -> Figure:
    title, colour = "PositionalEncoding(128, 0)", "added to the embedding"
    return heat_map(_positions(128), title, "dimension", "position", colour)


def _subsequent_mask() -> Figure:
    axes, colours = ("position of the key", "position of the query"), ("masked out", "kept")
    return heat_map(subsequent_mask(20)[0], "subsequent_mask(20)", *axes, colours)


def _smoothed_targets() -> Figure:
    """Class 0 and target 0 are padding."""
    targets, classes = [2, 1, 0, 3, 3], ["0: padding", "1", "2", "3", "4"]
    criterion = LabelSmoothing(size=5, padding_idx=0, smoothing=0.5)
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
        criterion = LabelSmoothing(size=5, padding_idx=0, smoothing=smoothing)
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
        f"d_model {d}, warm-up {warmup}": (steps, [rate(step, d, 1.0, warmup) for step in steps])
        for d, warmup in ((512, 4000), (512, 8000), (256, 4000))
    }
    return lines(rates, "rate(step, d_model, 1, warmup)", "step", "learning rate")


LENGTHS = 128, 256, 512, 1024, 2048


def _sequence_layers() -> Figure:
    """Measure the forward of three layers on a CPU, in milliseconds of the processor by length.

    The names hold the growth from one length to the next, twice as long, over the last three.
    """
    d = 64
    attend, recur, convolve = MultiHeadedAttention(4, d), nn.GRU(d, d), nn.Conv1d(d, d, 3)
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


def _block_masks() -> Figure:
    """The tiles of the masks that `BlockMask` constructs, of 1,024 tokens: 0 is not seen, 1 partly
    and 2 wholly. One panel per mask, four in a row.
    """
    n = 1024
    i = torch.arange(n)
    masks = {
        "causal": BlockMask.causal(n),
        "window": BlockMask.window(n, 200, 100),
        "prefix": BlockMask.prefix(n, 300),
        "documents": BlockMask.documents((i >= 220).int() + (i >= 600).int()),
        "longformer": BlockMask.longformer(n, 100, 40),
        "bigbird": BlockMask.bigbird(n, 100, 40, 1),
        "sinks": BlockMask.sinks(n, 4, 200),
        "tree": BlockMask.tree((i - 1) // 2),
    }
    figure = _figure(9.0, 4.8)
    panels = figure.subplots(2, 4)
    for axes, (name, mask) in zip(panels.flat, masks.items()):
        slots = mask.slots()[0, 0]
        tiles = _array((slots > 0).int() + (slots == WHOLE).int())
        colors: dict[str, Any] = dict(vmin=0, vmax=2, cmap="Blues", interpolation="nearest")
        image = axes.imshow(tiles, aspect=2, **colors)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("tile of 64 keys", fontsize=7)
        axes.set_ylabel("tile of 128 queries", fontsize=7)
    figure.colorbar(image, ax=panels, label="2: wholly seen, 1: partly", ticks=(0, 1, 2))
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "block-masks": _block_masks,
    "subsequent-mask": _subsequent_mask,
    "positional-encoding": _positional_encoding,
    "positional-heat-map": _positional_heat_map,
    "smoothed-targets": _smoothed_targets,
    "smoothing-penalty": _smoothing_penalty,
    "relu": _relu,
    "learning-rate": _learning_rate,
    "sequence-layers": _sequence_layers,
}


def picture(name: str) -> Figure:
    """Draw the picture of this name, one of `PICTURES`."""
    return PICTURES[name]()
