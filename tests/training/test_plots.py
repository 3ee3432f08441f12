"""The data of each picture are what the tutorials draw, and `fastformer plot` writes each one."""

import json
import math

import pytest
import torch

from fastformer.training import copy_task, plots
from fastformer_command import main

pytest.importorskip("matplotlib")


def data(name):
    """What a picture shows: an image, or the images or lines by their names."""
    panels = [axes for axes in plots.picture(name).axes if axes.get_label() != "<colorbar>"]
    series = {line.get_label(): line.get_data() for axes in panels for line in axes.lines}
    images = {axes.get_title(): axes.images[0].get_array().data for axes in panels if axes.images}
    tensors = {title: torch.tensor(x) for title, x in images.items()}
    return next(iter(tensors.values())) if len(tensors) == 1 else tensors or series


def test_subsequent_mask():
    mask = data("subsequent-mask")
    assert mask.shape == (20, 20)
    assert torch.equal(mask.bool(), torch.ones(20, 20).tril().bool())


def test_block_masks():
    tiles = data("block-masks")
    assert tiles["causal"].tolist() == [
        [2] * (2 * t) + [1, 1] + [0] * (14 - 2 * t) for t in range(8)
    ]
    assert tiles["documents"][0].tolist() == [2, 2, 2, 1] + [0] * 12  # the first has 220 tokens
    assert all(x.shape == (8, 16) and {*x.unique().tolist()} <= {0, 1, 2} for x in tiles.values())


def test_positional_encoding_has_dimensions_4_to_7_over_100_positions():
    series = data("positional-encoding")
    assert list(series) == [f"dimension {i}" for i in (4, 5, 6, 7)]
    for i, (positions, values) in zip((4, 5, 6, 7), series.values()):
        assert [*positions] == list(range(100))
        wave = math.cos if i % 2 else math.sin
        wanted = [wave(p / 10000 ** ((i - i % 2) / 20)) for p in positions]
        assert values == pytest.approx(wanted, abs=1e-5)
    heat = data("positional-heat-map")
    assert heat.shape == (100, 128) and heat[0].tolist() == [0.0, 1.0] * 64


def test_smoothed_targets():
    sixth = 1 / 6
    assert data("smoothed-targets").tolist() == pytest.approx(
        [
            pytest.approx([0, sixth, 0.5, sixth, sixth]),
            pytest.approx([0, 0.5, sixth, sixth, sixth]),
            pytest.approx([0] * 5),
            pytest.approx([0, sixth, sixth, 0.5, sixth]),
            pytest.approx([0, sixth, sixth, 0.5, sixth]),
        ]
    )


def test_the_penalty_is_least_at_the_smoothed_target():
    """And falls to the end without smoothing, where confidence costs nothing."""
    for name, (certain, losses) in data("smoothing-penalty").items():
        smoothing = float(name.split()[1])
        assert certain[losses.argmin()] == pytest.approx(1 - smoothing, abs=0.011)
        assert (losses[-1] > losses[-2]) == (smoothing > 0)
        i = [*certain].index(pytest.approx(0.5))
        others = 3 * (smoothing / 3 * math.log(smoothing / 3 * 6)) if smoothing else 0
        kl = (1 - smoothing) * math.log((1 - smoothing) / 0.5) + others
        assert losses[i] == pytest.approx(kl, abs=1e-5)


def test_sequence_layers_are_measured_over_the_length():
    series = data("sequence-layers")
    assert [name.partition(":")[0] for name in series] == ["self-attention", "nn.GRU", "nn.Conv1d"]
    for name, (lengths, times) in series.items():
        assert [*lengths] == [128, 256, 512, 1024, 2048] and min(times) > 0
        assert name.endswith(f": x {(times[4] / times[2]) ** 0.5:.1f}")


def test_relu_and_the_learning_rate():
    ((x, y),) = data("relu").values()
    assert (x[0], x[-1]) == (-5, 5) and [*y] == [max(v, 0) for v in x]
    rates = data("learning-rate")
    steps, values = rates["d_model 512, warm-up 4000"]
    assert steps[0] == 1 and max(values) == values[4000 - 1]
    assert max(values) == pytest.approx(512**-0.5 * 4000**-0.5)
    assert len(rates) == 3


@pytest.mark.parametrize("name", plots.PICTURES)
def test_the_command_writes_each(name, tmp_path, capsys):
    out = tmp_path / "picture.png"
    assert main(["plot", name, "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG") and f"Wrote {out}" in capsys.readouterr().out


FIGURES = dict(plots.PICTURES)
FIGURES["loss-curves"] = lambda: plots.loss_curves({"a": [3, 2, 1], "b": [3, 2]}, "Losses")
FIGURES["attention-maps"] = lambda: plots.attention_maps(
    {"encoder": torch.rand(2, 3, 3), "decoder": torch.rand(1, 2, 3)}, [1, 3, 2]
)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_says_what_it_shows(name):
    """Titles, the names of both axes and of the colours, and no legend over a curve."""
    figure = FIGURES[name]()
    assert figure._repr_png_().startswith(b"\x89PNG")  # a notebook shows it
    panels = [axes for axes in figure.axes if axes.axison and axes.get_label() != "<colorbar>"]
    bars = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    images = any(axes.get_images() for axes in panels)
    swatches = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert swatches == (["kept", "masked out"] if name == "subsequent-mask" else [])
    assert len(bars) + len(figure.legends) == images and all(bar.get_ylabel() for bar in bars)
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


def test_the_colours_of_a_mask():
    """The swatch "kept" has the colour of the diagonal, the other that of the corner."""
    figure = FIGURES["subsequent-mask"]()
    (image,) = figure.axes[0].get_images()
    mask = image.get_array()
    (legend,) = figure.legends
    shown = {
        text.get_text(): patch.get_facecolor()
        for text, patch in zip(legend.get_texts(), legend.get_patches())
    }
    assert shown["kept"] == image.to_rgba(mask[0, 0]) and mask[0, 0] == 1
    assert shown["masked out"] == image.to_rgba(mask[0, -1]) and mask[0, -1] == 0


def test_attention_maps_of_one_head_and_of_a_model_that_has_not_learnt():
    maps = {"encoder": torch.rand(3, 3, 3), "decoder": torch.rand(3, 2, 3)}
    figure = plots.attention_maps(maps, [1, 3, 2], head=2, decoded=[1, 1, 3])
    assert "has not learnt it: it decodes 1 1 3" in figure.get_suptitle()
    panels = figure.axes[:2]
    assert [axes.get_title() for axes in panels] == ["head 2", "head 2"]
    for axes, weights in zip(panels, maps.values()):
        assert torch.equal(torch.tensor(axes.get_images()[0].get_array()), weights[1])
    title = plots.attention_maps(maps, [1, 2, 3], decoded=[1, 2, 3]).get_suptitle()
    assert title == "Attention weights of a copy of 1 2 3"
    assert plots.attention_maps(maps, "abc").get_suptitle() == "Attention weights of a b c"
    for head in (0, 4):
        with pytest.raises(ValueError, match=f"head is {head}; expected an int from 1 to 3"):
            plots.attention_maps(maps, [1, 2, 3], head)


def test_the_gaps_between_attention_maps_are_even():
    """Also between those of the decoder, which have other shapes."""
    maps = {f"layer {i}": torch.rand(3, 3 + i % 2, 4) for i in range(4)}
    figure = plots.attention_maps(maps, [1, 2, 3, 4])
    figure.draw_without_rendering()
    boxes = [axes.get_position() for axes in figure.axes[:12]]
    below = {round(a.y0 - b.y1, 3) for a, b in zip(boxes, boxes[3:])}
    beside = {round(boxes[i + 1].x0 - boxes[i].x1, 3) for i in range(12) if i % 3 < 2}
    assert len(below) == len(beside) == 1


def test_curves_that_coincide_are_all_visible():
    """The second one is drawn on top, and is thinner by a point."""
    first, second = FIGURES["loss-curves"]().axes[0].lines
    assert first.get_linewidth() - second.get_linewidth() >= 1


def test_the_tokens_of_a_figure_are_named():
    axes, *_ = FIGURES["smoothed-targets"]().axes
    shown = [
        [label.get_text() for label in axis.get_ticklabels()] for axis in (axes.xaxis, axes.yaxis)
    ]
    assert shown == [["0: padding", "1", "2", "3", "4"], ["2", "1", "0: padding", "3", "3"]]
    figure = FIGURES["attention-maps"]()
    assert "1 3 2" in figure.get_suptitle()
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["1", "3", "2"]


@pytest.mark.parametrize(("words", "dpi"), [([], 200), (["--dpi", "50"], 50)])
def test_dots_per_inch(words, dpi, tmp_path):
    out = tmp_path / "relu.png"
    assert main(["plot", "relu", "--out", str(out), *words]) == 0
    width = int.from_bytes(out.read_bytes()[16:20], "big")
    assert width == 7 * dpi


def test_attention_maps_are_the_weights_of_every_layer(monkeypatch, tmp_path):
    trained, shown = copy_task.attention_maps, {}

    def tiny(settings):
        assert settings.steps == 2 and settings.seed == 3
        small = copy_task.Settings(steps=2, length=4, vocab=6, N=1, d_model=8, d_ff=8, h=2)
        maps, decoded = trained(small)
        shown.update(maps)
        return maps, decoded

    monkeypatch.setattr(copy_task, "attention_maps", tiny)
    out = tmp_path / "maps.png"
    words = ["plot", "attention-maps", "--steps", "2", "--seed", "3", "--out", str(out)]
    assert main(words) == 0 and out.read_bytes().startswith(b"\x89PNG")
    shapes = {name: tuple(weights.shape) for name, weights in shown.items()}
    assert shapes == {
        "encoder.layers.0.self_attn": (2, 4, 4),
        "decoder.layers.0.self_attn": (2, 3, 3),
        "decoder.layers.0.src_attn": (2, 3, 4),
    }
    drawn = []
    draw = plots.attention_maps
    monkeypatch.setattr(plots, "attention_maps", lambda *a: drawn.append(a) or draw(*a))
    name = "decoder.layers.0.src_attn"
    assert main([*words, "--layer", name, "--head", "2"]) == 0
    ((maps, _, head, decoded),) = drawn
    assert list(maps) == [name] and head == 2 and len(decoded) == 4
    for weights in shown.values():
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]).to(weights))
    assert not shown["decoder.layers.0.self_attn"].triu(1).any()


def test_loss_curves_of_a_file_and_of_a_new_run(monkeypatch, tmp_path, capsys):
    runs = [
        dict(backend="reference", interpreted=False, losses=[2.0, 1.0, None]),
        dict(backend="triton", interpreted=True, losses=[2.0, 1.0]),
    ]
    source, out = tmp_path / "result.json", tmp_path / "curves.svg"
    source.write_text(json.dumps({"runs": runs, "environment": {"gpu": None, "device": "cpu"}}))
    drawn = {}
    draw = plots.loss_curves
    monkeypatch.setattr(plots, "loss_curves", lambda c, t: draw(drawn.update(c) or c, t))
    assert main(["plot", "loss-curves", "--json", str(source), "--out", str(out)]) == 0
    assert out.read_text().startswith("<?xml")
    assert drawn["triton, interpreted"] == [2.0, 1.0] and math.isnan(drawn["reference"][2])

    other = f"{source} is not a result of copy-task --json; expected an object with 'environment'"
    for text in ("no JSON", "[]", '{"environment": [], "runs": []}', "{}"):
        source.write_text(text)
        with pytest.raises(SystemExit) as stopped:
            main(["plot", "loss-curves", "--json", str(source), "--out", str(out)])
        complaint = other.partition(";")[0] if text == "no JSON" else other
        assert stopped.value.code == 2 and complaint in capsys.readouterr().err
    for words, complaint in (
        (["relu", "--json", str(source)], "relu takes no --json"),
        (["relu", "--head", "1"], "relu takes no --head"),
        (["attention-maps", "--steps", "0"], "steps is 0"),
        (["attention-maps", "--head", "5"], "head is 5; expected an int from 1 to 4"),
        (["attention-maps", "--layer", "a"], "layer is 'a'; expected one of encoder.layers.0"),
        (["a-portrait"], "invalid choice: 'a-portrait'"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["plot", *words, "--out", str(out)])
        assert stopped.value.code == 2 and complaint in capsys.readouterr().err

    monkeypatch.setattr(copy_task, "compare", lambda *given: asked.append(given) or [run])
    asked, run = [], copy_task.Run("reference", False, [1.0] * 7, 1.0, None)
    assert main(["plot", "loss-curves", "--steps", "7", "--out", str(out)]) == 0
    ((settings, backends, *_),) = asked
    assert settings.steps == 7 and "reference" in backends
