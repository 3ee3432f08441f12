"""How many kernels a layer of a stack launches: benchmarks/launches.py and compiled_launches.py,
without a GPU.
"""

import pytest

from benchmarks import ROOT, compiled_launches, launches
from benchmarks.gpu import stand_in

MOST = {"encoder": 25, "decoder": 42}  # forward and backward


@pytest.mark.skipif(stand_in.obstacle() is not None, reason=str(stand_in.obstacle()))
def test_launches_of_a_layer():
    """As docs/benchmarks.md has them; one draw of seeds for all layers, but not in BERT."""
    counts = launches.count()
    assert launches.table(counts) in (ROOT / "docs" / "benchmarks.md").read_text()
    for name, own in counts.items():
        if not name.endswith("torch"):
            total = sum(own[kind] for kind in launches.KINDS)
            assert total <= MOST[name.split(",")[0]], f"{name}: {own}"
            assert own["Triton"] >= 8 and own["mm"] >= 8, f"{name}: {own}"  # a counter that sees
            draws = 0, 1  # of a layer, and of three
            assert (own["randint"], own[launches.DRAWS]) == draws, f"{name}: {own}"


@pytest.mark.with_slow
@pytest.mark.skipif(stand_in.obstacle() is not None, reason=str(stand_in.obstacle()))
def test_launches_under_torch_compile():
    """As docs/benchmarks.md has them; with fastformer's pass at most those of inductor alone."""
    pytest.importorskip("transformers")
    counts = compiled_launches.count()
    assert compiled_launches.table(counts) in (ROOT / "docs" / "benchmarks.md").read_text()
    for layer in compiled_launches.LAYERS:
        alone, ours = counts[f"{layer}, inductor"], counts[f"{layer}, fastformer"]
        assert alone["fastformer"] == 0 and alone["products"] >= 18, f"{layer}: {alone}"
        assert ours["fastformer"] >= 2, f"{layer}: {ours}"  # forward and backward
        assert ours["bytes"] <= alone["bytes"], f"{layer}: {ours}, {alone}"
        for own in (alone, ours):
            own["all"] = sum(own[kind] for kind in compiled_launches.LAUNCHES)
        assert ours["all"] <= alone["all"], f"{layer}: {ours}, {alone}"
