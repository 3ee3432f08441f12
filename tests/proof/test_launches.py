"""How many kernels a layer of a stack launches: benchmarks/launches.py, without a GPU."""

import shutil

import pytest
import torch

from benchmarks import ROOT, launches
from benchmarks.gpu import stand_in

MOST = {"encoder": 25, "decoder": 42, "bert": 40}  # forward and backward


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
            draws = (3, 9) if name.startswith("bert") else (0, 1)  # of a layer, and of three
            assert (own["randint"], own[launches.DRAWS]) == draws, f"{name}: {own}"


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_launches_of_a_compiled_layer():
    """As docs/benchmarks.md has them, of the torch that it names."""
    counts = launches.count_compiled()
    if torch.__version__.startswith("2.13."):
        *_, encoder, decoder = launches.table(counts).splitlines()
        assert f"{encoder}\n{decoder}\n" in (ROOT / "docs" / "benchmarks.md").read_text()
    for name, own in counts.items():
        assert own["Triton"] >= 20 and own["mm"] >= 9 and own["other"] >= 2, f"{name}: {own}"
