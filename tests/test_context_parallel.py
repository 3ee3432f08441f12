"""Sequences that are sharded across processes: the ring, all-to-all, and the rows of models."""

import pytest
from test_parallel import run

import fastformer as ff


@pytest.mark.parametrize("world", [2, 4])
def test_it_is_the_whole(tmp_path, world):
    """Outputs, lse and gradients, in each case of context_checks.py."""
    run(tmp_path, world, "context")


@pytest.mark.parametrize("world", [2, 4])
def test_models_are_the_whole(tmp_path, world):
    """Losses and gradients of models whose sequences are sharded, and of the copy task."""
    run(tmp_path, world, "context_model", "context_copy_task")


def test_seeds_and_refusals(tmp_path):
    run(tmp_path, 2, "context_seed", "context_refusals", "context_order", "context_one_row")


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match=r"no process group; .*init_process_group"):
        ff.context_parallel(None)
