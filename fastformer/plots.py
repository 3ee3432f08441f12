"""Figures. matplotlib is imported when one is drawn: `pip install fastformer[plot]`.

Every function returns a matplotlib Figure that no window holds: save it with
`figure.savefig(path)`, or leave it as the last line of a notebook's cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["loss_curves", "require_format"]


def _figure(width: float = 7.0, height: float = 4.0) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib, which is not installed: pip install fastformer[plot]"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def require_format(path: str | Path) -> None:
    """Raises ValueError where a figure cannot have this name, ImportError without matplotlib."""
    formats = _figure().canvas.get_supported_filetypes()
    suffix = Path(path).suffix.removeprefix(".").lower()
    if suffix not in formats:
        raise ValueError(f"{path} ends in {suffix!r}; expected one of {', '.join(sorted(formats))}")


def loss_curves(losses: Mapping[str, Sequence[float]], title: str | None = None) -> Figure:
    """Loss per token against the step, a curve for each name.

    A later curve lies on top and is thinner, so that both are seen where they coincide.
    """
    figure = _figure()
    axes = figure.subplots()
    for i, (name, values) in enumerate(losses.items()):
        axes.plot(
            range(1, len(values) + 1),
            values,
            label=f"{name}, {len(values)} steps",
            linewidth=max(2.2 - 1.2 * i, 1.0),
            marker="o" if len(values) <= 30 else None,
            markersize=4,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss per token")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    if title is not None:
        axes.set_title(title)
    return figure
