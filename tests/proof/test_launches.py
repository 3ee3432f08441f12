"""The kernels that a layer launches, counted over the stand-in for a GPU."""

import pytest

from benchmarks import ROOT, launches
from benchmarks.gpu import stand_in


def test_launches_of_a_layer():
    """As docs/benchmarks.md has them: no copy, one draw of seeds for a forward of all layers."""
    if reason := stand_in.obstacle():
        pytest.skip(reason)
    counts = launches.count()
    assert launches.table(counts) in (ROOT / "docs" / "benchmarks.md").read_text()
    for name, own in counts.items():
        if not name.endswith("torch"):
            assert own["copy"] == own["randint"] == own["other"] == 0
            assert own[launches.DRAWS] == 1
