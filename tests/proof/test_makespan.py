"""The model of how evenly the programs of causal attention fill a GPU."""

import json

import pytest

pytest.importorskip("triton")

from benchmarks.proof import makespan

ROWS = json.loads(makespan.DATA.read_text())


def test_the_table_is_that_of_the_model():
    """Else `python -m benchmarks.proof.makespan --write`."""
    assert makespan.table() == ROWS


def test_a_makespan():
    """Each program starts where a place is free first: three short ones and a long one."""
    assert makespan.makespan([3, 1, 1, 1], places=2) == 3
    assert makespan.makespan([1, 1, 1, 3], places=2) == 4
    assert makespan.makespan([2, 2], places=3) == 2


def test_the_tiles_of_a_block():
    """150 queries and keys in tiles of 32 queries and 64 keys."""
    assert makespan.tiles("forward", 150, 32, 64) == [1, 1, 2, 2, 3]
    assert makespan.tiles("dkdv", 150, 32, 64) == [5, 3, 1]


def test_sections_fill_a_gpu():
    """At most 5% of the time are lost at 64 heads, from 1024 tokens on; no call loses by them."""
    for kernel, _, length, heads, _, before, after in ROWS:
        assert 1 <= after <= before + 0.01
        if heads == 64 and length >= 1024:
            assert after <= 1.05
            assert kernel != "forward" or length > 1024 or before >= 1.2
