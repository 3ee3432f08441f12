"""benchmarks.gpu from end to end over a GPU that is not there (benchmarks/gpu/stand_in/device.py).

Kernels are compiled for an H100 and their launches accepted, and nothing computes: the figures mean
nothing, and say so. What breaks on the way costs the test that it broke in, and a run that is cut
goes on where it was.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch

from benchmarks import ROOT, report
from benchmarks.gpu import journal, stand_in
from benchmarks.gpu.stand_in import device

ATTENTION = "benchmarks/bench_attention.py::test_attention[forward-4096-padding+dropout-d64-{}]"
NORM = "benchmarks/bench_layer_norm.py::test_widths[forward-512-layer_norm-{}]"
HOST = "benchmarks/bench_host_cost.py::test_host_cost[forward+backward-attention-{}]"
EMBED = "tests/ops/test_embedding.py::test_by_its_parts[{}-{}]"
FAILS_IN_A_CAPTURE = NORM.format("torch")
LOSES_THE_GPU = EMBED.format("triton", 0.5)
HANGS = EMBED.format("reference", 0.5)
CUT = ATTENTION.format("triton")  # the run is, while this test runs
TESTS = [
    "tests/ops/test_sizes.py::test_attention[plain-32]",
    *(ATTENTION.format(name) for name in ("torch", "triton", "packed")),
    *(NORM.format(name) for name in ("torch", "triton")),
    *(HOST.format(name) for name in ("triton", "stock")),
    *(EMBED.format("reference", scale) for scale in (None, 0.5, 1.0)),
    *(EMBED.format("triton", scale) for scale in (None, 0.5)),
]

# A plugin of every pytest that the run starts.
TROUBLE = f"""
import os, time
from pathlib import Path

import pytest, torch
import torch.nn.functional as F
from benchmarks.gpu.stand_in import device

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    all_of_it = ("benchmarks/", "tests/ops/test_sizes.py") if os.environ.get("ALL_OF_IT") else ()
    items[:] = [i for i in items if i.nodeid in {TESTS!r} or i.nodeid.startswith(all_of_it)]

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    reached = Path(os.environ["REACHED"])
    if item.nodeid == {CUT!r} and not reached.exists():
        reached.touch()
        time.sleep(3600)
    if item.nodeid == {HANGS!r}:
        time.sleep(3600)
    if item.nodeid == {LOSES_THE_GPU!r}:
        device.state.lost = "CUDA error: an illegal memory access was encountered"
    if item.nodeid == {FAILS_IN_A_CAPTURE!r}:
        layer_norm = F.layer_norm
        def fails(*given):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("not to be captured")
            return layer_norm(*given)
        F.layer_norm = fails
"""
# benchmarks.gpu with less patience, in two processes where it takes eight.
RUN = """
import sys
from dataclasses import replace
from benchmarks.gpu import run as gpu
groups = gpu.on_gpu()
for parts in groups.values():
    for i, part in enumerate(parts):
        silence = 60.0 if part.name == "kernel-tests" else 600.0
        less = {
            "copy-task": ["--steps", "2"],
            "gluon": ["--only", "^scaled.* bfloat16 .*Sq=4096 .* Dv=64 causal .*forward$"],
            "tune": ["--only", "^layer_norm bfloat16 M=4096 N=512 .*forward$"],
        }
        command = [*part.command, *less.get(part.name, [])]
        if part.name == "kernel-tests":  # those of TESTS, which tests/gpu.txt does not list
            command = [*part.command[:-1], "--all", "tests/ops/test_embedding.py"]
        parts[i] = replace(
            part, command=command, seconds=3600, silence=silence,
            processes=min(part.processes, 2),
        )
gpu.on_gpu = lambda: groups
sys.exit(gpu.main([*sys.argv[1:], "--minutes", "240"]))
"""


@pytest.fixture
def environment(tmp_path):
    """Of a process that has the stand-in for a GPU."""
    if torch.cuda.is_available():
        pytest.skip("here is a GPU")
    if reason := stand_in.obstacle():
        pytest.skip(reason)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "trouble.py").write_text(TROUBLE)
    given = device.environment(tmp_path)
    paths = [str(tmp_path / "plugins"), given["PYTHONPATH"]]
    own = {
        "PYTHONPATH": os.pathsep.join(paths),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "REACHED": str(tmp_path / "reached"),
    }
    return {**inherited, **given, **own}


def until(found, process, seconds):
    deadline = time.monotonic() + seconds
    while not found():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


def statuses(data):
    return {one["part"]: one["status"] for one in data["parts"]}


def kernels(cache):
    return Counter(path.read_bytes() for path in cache.glob("*/*.cubin"))


@pytest.mark.with_all
def test_a_run_with_every_trouble(environment, tmp_path, request):
    """--slow: all that a GPU would see, in half an hour."""
    everything = request.config.getoption("slow")
    cache, out = tmp_path / "kernels", tmp_path / "out"
    words = ["--out", str(out), "--kernels", str(cache)]
    if everything:
        environment["ALL_OF_IT"] = "1"
    else:
        words += ["--only", "machine,small-heads,attention,norms,first-call,kernel-tests"]
    environment["PYTEST_ADDOPTS"] = "-p trouble"

    def start(*command):
        command = [sys.executable, *command]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)

    # The kernels of one part are there before the run, which compiles them no more.
    done = start("-m", "benchmarks.gpu", "--prepare", str(cache), "--only", "small-heads")
    assert done.wait() == 0, done.stderr.read()
    prepared = kernels(cache)
    assert len(prepared) > 2

    first = start("-c", RUN, *words)
    try:
        until((tmp_path / "reached").exists, first, 7200 if everything else 900)
        first.send_signal(signal.SIGTERM)
        assert first.wait(300) == 143
    finally:
        with contextlib.suppress(ProcessLookupError):
            first.kill()
    data = json.loads((out / "results.json").read_text())
    assert statuses(data)["attention"] == "cut" and data["failed"] == {}
    assert [row["provider"] for row in data["rows"]][-1] != "triton"

    done = start("-c", RUN, *words)
    assert done.wait() == 1, done.stderr.read()  # as tests have failed
    data = json.loads((out / "results.json").read_text())
    assert data["failed"].pop(HANGS) == "did not finish"
    assert "illegal memory access" in data["failed"].pop(LOSES_THE_GPU)
    assert data["failed"] == {}
    assert set(statuses(data).values()) == {"done"}, statuses(data)
    compiled = kernels(cache)
    assert set(compiled) > set(prepared) and all(compiled[code] == 1 for code in prepared)

    # Nothing lost, nothing run twice: but what was cut, and what hung was not waited for again.
    events = [event for path in out.glob("*.jsonl") for event in journal.read(path)]
    begun = Counter(event["begun"] for event in events if "begun" in event)
    ended = Counter(event["test"] for event in events if "test" in event)
    assert set(begun) >= set(TESTS) and (everything or set(begun) == set(TESTS))
    assert {test: n for test, n in begun.items() if n > 1} == {CUT: 2}
    assert set(begun) - set(ended) == {HANGS} and set(ended.values()) == {1}
    logs = [path.read_text() for path in out.glob("*.log")]
    assert sum("crashed, GPU lost: continues" in log for log in logs) == 2
    assert sum("silent for 60 s: continues" in log for log in logs) == 1

    # Every row is of no GPU, and says how its time was taken.
    assert all(row["gpu"] == device.STAND_IN for row in data["rows"])
    timers = {(row["group"], row["provider"]): row.get("device_timer") for row in data["rows"]}
    attention = "attention padding+dropout d=64 S=4096 forward"
    norm = "layer_norm N=512 rows=262144 forward"
    waits = "events around calls: called a synchronizing CUDA operation"
    assert timers[attention, "packed"] == waits
    assert timers[norm, "torch"].endswith("a CUDA graph failed: not to be captured")
    assert timers[norm, "triton"] == timers[attention, "torch"] == report.CAPTURED
    host = [row for row in data["rows"] if row["group"].startswith("host cost")]
    assert len(host) >= 2  # what the host takes has passed, whatever the device took
    assert all("device_timer" not in row and row["ms"] != device.MILLISECONDS for row in host)
    text = (out / "report.md").read_text()
    assert "its times mean nothing" in text and "| packed, by events |" in text
    results = report.load(out / "results.json")
    assert results.rows and report.speed_block(results) == report.UNMEASURED


# Steps that cannot be captured, and what the process does then.
FAILING_CAPTURES = """
import warnings, torch, fastformer as ff

def waits():
    torch.ones(2, device="cuda").sum().item()

def waits_in_the_capture():
    if torch.cuda.is_current_stream_capturing():
        waits()

def hides_its_error():
    try:
        waits_in_the_capture()
    except RuntimeError:
        pass

ff.use_backend("reference")
model = ff.make_decoder(11, 1, 16, 32, 2, max_len=32).cuda().eval()
prompt = torch.ones(2, 3, dtype=torch.int64, device="cuda")
stream, forward = torch.cuda.current_stream(), ff.Generator.forward
for fault in (waits, waits_in_the_capture, hides_its_error):
    ff.Generator.forward = lambda self, x: (fault(), forward(self, x))[1]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ff.greedy_decode(model, prompt, None, 9, None)
    ff.Generator.forward = forward
    assert any("without a CUDA graph" in str(w.message) for w in seen), fault
    assert torch.cuda.current_stream() is stream and torch.cuda.get_sync_debug_mode() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ff.sample(model, prompt, None, 9, None)  # in a graph
    model.train()(prompt).sum().backward()  # with dropout
    model.eval()
    print(fault.__name__)
"""


@pytest.mark.with_all
def test_after_a_capture_that_fails_sampling_and_training_work(environment):
    command = [sys.executable, "-c", FAILING_CAPTURES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["waits", "waits_in_the_capture", "hides_its_error"], done.stderr


# An epoch whose updates are captured, and one whose model waits for the device.
TRAINING = """
import warnings, torch, fastformer as ff
from fastformer.training import updates

captures, captured = [], updates.captured
def counted(function):
    captures.append(function)
    return captured(function)
updates.captured = counted

def waits(*_):
    if torch.cuda.is_current_stream_capturing():
        torch.ones(2, device="cuda").sum().item()

model = ff.make_model(11, 11, 1, 32, 64, 2).cuda().train()
optimizer = torch.optim.Adam(model.parameters())  # the fused one does not run over the stand-in
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
compute = ff.SimpleLossCompute(model.generator, ff.LabelSmoothing(11, 0))
x = torch.ones(2, 5, dtype=torch.int64, device="cuda")
for fault in (None, waits):
    handle = model.register_forward_hook(fault) if fault else None
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        batches = [ff.Batch(x, x), ff.Batch(x, x[:, :4])] * 4
        ff.run_epoch(batches, model, compute, optimizer, scheduler, cuda_graph=True)
    print(len(captures), scheduler.last_epoch, *[w.message for w in seen if "graph" in str(w)])
handle.remove()
torch.cuda.get_rng_state = torch.get_rng_state  # the stand-in has none
given = dict(optimizer=optimizer, scheduler=scheduler, progress=False)
ff.fit(model, batches, steps=12, cuda_graph=True, **given)
print(len(captures), scheduler.last_epoch)
"""


@pytest.mark.with_all
def test_an_epoch_in_cuda_graphs(environment):
    """Two shapes, each captured once; then a capture that fails; then both by `fit`."""
    command = [sys.executable, "-c", TRAINING]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("batch ")]
    assert lines[:1] == ["2 8"], done.stderr
    assert lines[1].startswith("3 16 the steps run without a CUDA graph: ")
    assert lines[2:] == ["5 28"], done.stderr


@pytest.mark.with_slow
def test_the_part_that_tunes(environment, tmp_path):
    """Every candidate of a class compiles, and all of them tie: every call takes as long."""
    words = ["--only", "tune", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-c", RUN, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "out" / "results.json").read_text())
    assert statuses(data) == {"gluon": "done", "tune": "done"}
    (machine,) = json.loads((tmp_path / "out" / "gluon.json").read_text())["machines"]
    ((_, found),) = machine["classes"]["attention forward"].items()
    assert len(found["us"]) > 1 and any("Gluon" in name for name in found["us"])
    (machine,) = json.loads((tmp_path / "out" / "tuning.json").read_text())["machines"]
    assert machine["gpu"] == device.STAND_IN
    ((name, found),) = machine["classes"]["layer_norm forward"].items()
    assert "bfloat16" in name and len(found["us"]) > 4
    assert all("ties" in reason for reason in found["dropped"].values())
