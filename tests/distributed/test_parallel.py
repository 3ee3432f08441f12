"""Several processes, over gloo: what is sharded computes what is whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def run(folder, world, *checks, fails=0):
    """Run checks of parallel_checks.py in a group of processes, each of which has to pass them."""
    if torch.cuda.is_available():
        pytest.skip("gloo processes on a CPU")
    command = [sys.executable, str(HERE / "parallel_worker.py"), str(world), str(folder), *checks]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment)
    found = [json.loads(line) for line in process.stdout.splitlines()]
    for one in found:
        assert not one["wrong"], f"rank {one['rank']}, {one['check']}:\n{one['wrong']}"
    assert len(found) == (world - fails) * len(checks), process.stderr[-4000:]


@pytest.mark.with_all
def test_death_and_resumption(tmp_path):
    """A rank that dies ends the job, and the run goes on from its last checkpoint: of FSDP2 on two
    processes, by FSDP2 on four, and on one. The newest checkpoint that can be read is taken.
    """
    run(tmp_path, 2, "damaged_checkpoints")
    run(tmp_path, 2, "dies", fails=1)
    for world in (4, 1):
        run(tmp_path, world, "resumes")


@pytest.mark.with_all
def test_models_in_two_processes(tmp_path):
    """DDP and FSDP2 of a model of torch, and with accumulated gradients."""
    run(tmp_path, 2, "accumulated", "torch_transformer")


def test_in_two_processes(tmp_path):
    """DDP and FSDP2 on halves of a batch; run_epoch and fit with uneven tokens, and runs that died
    or were interrupted. Tensor parallel: torch's styles on our layers, and the ops on rows with
    DTensors.
    """
    training = "uneven_tokens", "optimizer_of_shards", "resumed_fit", "interrupted_fit"
    tensors = "tensor_parallel", "rows_of_dtensors", "dropout_of_dtensors", "refusals"
    run(tmp_path, 2, "data_parallel", *training, *tensors)
