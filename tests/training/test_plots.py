"""The data of each picture are what the tutorials draw, and `fastformer plot` writes each one."""

import io
import json
import math

import pytest
import torch

from fastformer.training import copy_task, plots
from fastformer_command import main

pytest.importorskip("matplotlib")


def data(name):
    return plots.PICTURES[name].data()


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
        assert positions == list(range(100))
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


def test_relu_and_the_learning_rate():
    ((x, y),) = data("relu").values()
    assert (x[0], x[-1]) == (-5, 5) and y == [max(v, 0) for v in x]
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


FIGURES = {name: lambda p=p: p.draw(p.data()) for name, p in plots.PICTURES.items()}
FIGURES["loss-curves"] = lambda: plots.loss_curves({"a": [3, 2, 1], "b": [3, 2]}, "Losses")
FIGURES["attention-maps"] = lambda: plots.attention_maps(
    {"encoder": torch.rand(2, 3, 3), "decoder": torch.rand(1, 2, 3)}, [1, 3, 2]
)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_says_what_it_shows(name):
    """Titles, the names of both axes and of the colours, and no legend over the curves."""
    figure = FIGURES[name]()
    figure.savefig(io.BytesIO(), format="png")
    panels = [axes for axes in figure.axes if axes.axison and axes.get_label() != "<colorbar>"]
    bars = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    images = any(axes.get_images() for axes in panels)
    assert len(bars) == images and all(bar.get_ylabel() for bar in bars)
    for i, axes in enumerate(panels):
        assert axes.get_title() and axes.get_xlabel()
        assert axes.get_ylabel() or (name == "attention-maps" and i % 2)
        assert axes.get_legend() is None
        for legend in figure.legends:
            assert not legend.get_window_extent().overlaps(axes.get_window_extent())
    several = any(len(axes.lines) > 1 for axes in panels)
    assert len(figure.legends) == several


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
        shown.update(
            trained(copy_task.Settings(steps=2, length=4, vocab=6, N=1, d_model=8, d_ff=8, h=2))
        )
        return shown

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
        (["attention-maps", "--steps", "0"], "steps is 0"),
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
