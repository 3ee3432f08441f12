"""Figures of losses and of attention weights. matplotlib is imported only when one is drawn.

Both functions return a matplotlib Figure without opening a window. Save it with
`figure.savefig(path)`, or make it the last line of a notebook cell.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DASHES = "-", "--", "-.", ":"  # so that lines also differ without colours


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


def attention_maps(
    maps: Mapping[str, Tensor],
    symbols: Sequence[object],
    *,
    decoded: Sequence[object] | None = None,
) -> Figure:
    """Draw attention weights [h, T, S], with one row of panels per name and one panel per head.

    In a panel, queries are rows and keys are columns. `symbols` are the tokens at the positions.
    decoded: of the copy task, what the model makes of the symbols; unless it is a copy, the title
    says that the model has not learnt the task.
    """
    heads = range(1, max(len(weights) for weights in maps.values()) + 1)
    side = 2.0 if len(maps) * len(heads) > 1 else 4.0  # of a panel, in inches
    figure = _figure(side * len(heads) + 1.5, (side + 0.2) * len(maps) + 0.8)
    title = "Attention weights of " if decoded is None else "Attention weights of a copy of "
    title += " ".join(map(str, symbols))
    if decoded is not None and [*decoded] != [*symbols]:
        title += f"\nThe model has not learnt it: it decodes {' '.join(map(str, decoded))}"
    figure.suptitle(title, fontsize=10)
    panels = figure.subplots(len(maps), len(heads), squeeze=False)
    for row, (name, weights) in zip(panels, maps.items()):
        for number, axes in zip(heads, row):
            if number > len(weights):
                axes.set_axis_off()
                continue
            weight = weights[number - 1].detach().cpu().float().numpy()
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
