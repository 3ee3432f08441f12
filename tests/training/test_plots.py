"""What the figures show and say."""

import pytest
import torch

from fastformer.training import plots

pytest.importorskip("matplotlib")

FIGURES = {
    "loss-curves": lambda: plots.loss_curves({"a": [3, 2, 1], "b": [3, 2]}, "Losses"),
    "attention-maps": lambda: plots.attention_maps(
        {"encoder": torch.rand(2, 3, 3), "decoder": torch.rand(1, 2, 3)}, [1, 3, 2]
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_says_what_it_shows(name):
    """Titles, the names of both axes and of the colours, no legend over a curve; curves that
    coincide are all visible.
    """
    figure = FIGURES[name]()
    assert figure._repr_png_().startswith(b"\x89PNG")  # a notebook shows it
    panels = [axes for axes in figure.axes if axes.axison and axes.get_label() != "<colorbar>"]
    bars = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    assert len(bars) == any(axes.get_images() for axes in panels)
    assert all(bar.get_ylabel() for bar in bars)
    for i, axes in enumerate(panels):
        assert axes.get_title() and axes.get_xlabel()
        assert axes.get_ylabel() or (name == "attention-maps" and i % 2)
        legend = axes.get_legend()
        assert (legend is not None) == (len(axes.lines) > 1)
        if legend is None:
            continue
        inner, outer = legend.get_window_extent(), axes.get_window_extent()
        assert outer.containsx(inner.x0) and outer.containsx(inner.x1)
        assert outer.containsy(inner.y0) and outer.containsy(inner.y1)
        for line in axes.lines:
            assert not inner.count_contains(axes.transData.transform(line.get_xydata()))
        assert len({line.get_linestyle() for line in axes.lines}) == len(axes.lines)
        below, above = (line.get_linewidth() for line in axes.lines)
        assert below - above >= 1  # point


def test_attention_maps_and_a_model_that_has_not_learnt():
    maps = {"encoder": torch.rand(3, 3, 3), "decoder": torch.rand(3, 2, 3)}
    figure = plots.attention_maps(maps, [1, 3, 2], decoded=[1, 1, 3])
    assert "has not learnt it: it decodes 1 1 3" in figure.get_suptitle()
    panels = figure.axes[:6]
    assert [axes.get_title() for axes in panels] == [f"head {i}" for i in (1, 2, 3)] * 2
    for axes, weights in zip(panels, [*maps["encoder"], *maps["decoder"]], strict=True):
        assert torch.equal(torch.tensor(axes.get_images()[0].get_array()), weights)
    assert [label.get_text() for label in panels[0].get_xticklabels()] == ["1", "3", "2"]
    title = plots.attention_maps(maps, [1, 2, 3], decoded=[1, 2, 3]).get_suptitle()
    assert title == "Attention weights of a copy of 1 2 3"
    assert plots.attention_maps(maps, "abc").get_suptitle() == "Attention weights of a b c"


def test_the_gaps_between_attention_maps_are_even():
    """Also between those of the decoder, which have other shapes."""
    maps = {f"layer {i}": torch.rand(3, 3 + i % 2, 4) for i in range(4)}
    figure = plots.attention_maps(maps, [1, 2, 3, 4])
    figure.draw_without_rendering()
    boxes = [axes.get_position() for axes in figure.axes[:12]]
    below = {round(a.y0 - b.y1, 3) for a, b in zip(boxes, boxes[3:])}
    beside = {round(boxes[i + 1].x0 - boxes[i].x1, 3) for i in range(12) if i % 3 < 2}
    assert len(below) == len(beside) == 1
