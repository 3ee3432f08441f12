"""Several processes, over gloo: what is sharded computes what is whole, with the same dropout."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastformer as ff
from benchmarks import ROOT
from fastformer_command import main

HERE = Path(__file__).parent


def worker(folder, world, *words):
    """Return the lines that parallel_worker.py prints, and its errors."""
    if torch.cuda.is_available():
        pytest.skip("gloo processes on a CPU")
    process = subprocess.run(
        [sys.executable, str(HERE / "parallel_worker.py"), str(world), str(folder), *words],
        capture_output=True,
        text=True,
        timeout=1200,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    return [json.loads(line) for line in process.stdout.splitlines()], process.stderr[-4000:]


def run(folder, world, *checks, fails=0):
    """Run checks of parallel_checks.py in a group of processes, each of which has to pass them."""
    found, errors = worker(folder, world, *checks)
    for one in found:
        assert not one["wrong"], f"rank {one['rank']}, {one['check']}:\n{one['wrong']}"
    assert len(found) == (world - fails) * len(checks), errors


def test_attention_in_four_processes(tmp_path):
    """As DTensors, over each of its dimensions, on both backends: outputs, placements and
    gradients. By context_parallel: outputs, lse and gradients, in each case of context_checks.py.
    """
    run(tmp_path, 4, "attention", "other_attention", "context")


@pytest.mark.with_all
def test_ops_as_dtensors_and_models(tmp_path):
    """The other ops likewise, and the dropout masks of all; then parallelize, with FSDP2 and
    checkpointing, layouts of a checkpoint, and what is refused.
    """
    ops = "norms", "feed_forward", "gated_activation", "embedding", "rotary", "losses", "masks"
    models = "tensor_parallel", "torch_transformer", "composed", "layouts", "refusals"
    run(tmp_path, 4, *ops, *models)


@pytest.mark.with_all
def test_death_and_resumption(tmp_path):
    """A rank that dies ends the job, and the run goes on from its last checkpoint: of FSDP2 on two
    processes, by tensor parallelism on four, on shards of sequences on two, and on one. The newest
    checkpoint that can be read is taken.
    """
    run(tmp_path, 2, "damaged_checkpoints")
    run(tmp_path, 2, "dies", fails=1)
    for world in (4, 2, 1):
        run(tmp_path, world, "resumes")


def test_in_two_processes(tmp_path):
    """DDP and FSDP2 on halves of a batch, and of packed batches; run_epoch and fit with uneven
    tokens, and runs that died or were interrupted. A training step of each method
    sends what it has to, and no more. DTensors of few tokens, of any strides and on one device.
    The seeds, edges and refusals of context_parallel.
    """
    models = "data_parallel", "packed_batches", "bytes_sent"
    training = "uneven_tokens", "optimizer_of_shards", "resumed_fit", "interrupted_fit"
    tensors = "no_targets", "any_strides", "one_device", "gated_halves"
    context = "seed", "refusals", "order", "one_row", "no_keys", "within", "edges"
    run(tmp_path, 2, *models, *training, *tensors, *(f"context_{check}" for check in context))


def torchrun(*words):
    """Two processes over gloo."""
    if torch.cuda.is_available():
        pytest.skip("gloo processes on a CPU")
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *words],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )


@pytest.mark.with_slow
@pytest.mark.parametrize("way", ["ddp", "tensor", "context"])
def test_copy_task_under_torchrun(way):
    """The command, as docs/parallel.md has it: it compares itself with one process."""
    sizes = ["--steps=20", "--layers=1", "--d-model=32", "--d-ff=64", "--length=6", "--batch=4"]
    process = torchrun("-m", "fastformer", "copy-task", "--parallel", way, *sizes)
    assert process.returncode == 0, process.stderr[-4000:]
    assert process.stdout.count("Largest loss difference from one process over steps 1..20") == 1


@pytest.mark.parametrize(
    "options, message",
    [
        ([], "the environment has no RANK, .*expected torchrun"),
        (["--timeout", "-1"], "timeout is -1.0; expected a positive number of seconds"),
    ],
)
def test_the_command_without_torchrun(options, message, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["copy-task", "--parallel", "ddp", *options])
    assert ended.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_the_command_in_a_group_writes_its_files(tmp_path, monkeypatch, capsys):
    """In a group of one process, which torchrun would have started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    for name, value in (started | dict(MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))
    written, drawn = tmp_path / "result.json", tmp_path / "curves.png"
    sizes = ["--steps=2", "--layers=1", "--d-model=8", "--d-ff=16", "--length=3", "--batch=2"]
    files = ["--json", str(written), "--plot", str(drawn)]
    command = ["copy-task", "--parallel", "ddp", "--device", "cpu", "--heads=1", *sizes, *files]
    assert main([*command, "--backend", "reference"]) == 0
    assert f"Wrote {written}" in capsys.readouterr().out
    result = json.loads(written.read_text())
    alone, run = result["runs"]
    assert (alone["parallel"], run["parallel"]) == (None, "ddp on 1 processes")
    assert len(run["losses"]) == 2 and result["max_loss_difference"] <= 1e-5
    assert "--parallel ddp" in result["environment"]["command"]
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match=r"no process group; expected .*init_process_group"):
        ff.parallelize(ff.make_model(5, 5, 1, 8, 16, 2), None)
