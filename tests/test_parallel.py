"""Several processes, over gloo: what is sharded computes what is whole, with the same dropout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastformer as ff

HERE = Path(__file__).parent


def run(folder, world, *checks, fails=0):
    """Run checks of parallel_checks.py in a group of processes, each of which has to pass them."""
    if torch.cuda.is_available():
        pytest.skip("gloo processes on a CPU")
    process = subprocess.run(
        [sys.executable, str(HERE / "parallel_worker.py"), str(world), str(folder), *checks],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    found = [json.loads(line) for line in process.stdout.splitlines()]
    for one in found:
        assert not one["wrong"], f"rank {one['rank']}, {one['check']}:\n{one['wrong']}"
    assert len(found) == (world - fails) * len(checks), process.stderr[-4000:]


def test_ops_as_dtensors(tmp_path):
    """Each op over each of its dimensions, on both backends: outputs, placements and gradients."""
    run(tmp_path, 4, "attention", "norms", "feed_forward", "embedding", "losses")


def test_models(tmp_path):
    """parallelize, with FSDP2 and checkpointing; layouts of a checkpoint; what is refused."""
    run(tmp_path, 4, "tensor_parallel", "composed", "layouts", "refusals")


def test_copy_task(tmp_path):
    """The losses of each way are those of one process."""
    run(tmp_path, 2, "copy_task")


def test_death_and_resumption(tmp_path):
    """A rank that dies ends the job, and the run goes on from its last checkpoint."""
    run(tmp_path, 2, "dies", fails=1)
    run(tmp_path, 2, "resumes")


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match=r"no process group; expected .*init_process_group"):
        ff.parallelize(ff.make_model(5, 5, 1, 8, 16, 2), None)


@pytest.mark.parametrize("first", [-1, True, "0"])
def test_sequences_from_refuses(first):
    with pytest.raises((TypeError, ValueError), match="first is"):
        ff.sequences_from(first)
