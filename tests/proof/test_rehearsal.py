"""benchmarks.gpu from end to end over a GPU that is not there (benchmarks/gpu/stand_in/device.py).

Launches for an H100 are accepted, and nothing computes: the figures mean nothing, and say so. What
breaks on the way costs the test that it broke in, and a run that is killed goes on where it was.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from benchmarks import ROOT, bench_host_cost, report
from benchmarks.gpu import journal, run, stand_in
from benchmarks.gpu.stand_in import device

NORM = "benchmarks/bench_layer_norm.py::test_widths[forward-512-layer_norm-{}]"
FAILS_IN_A_CAPTURE = NORM.format("torch")
LOSES_THE_GPU = "tests/ops/test_sizes.py::test_embed[float16]"
HANGS = "benchmarks/bench_gluon.py::test_kernel[dq-padding+dropout-4096-gluon]"  # the last one
ATTENTION = "benchmarks/bench_attention.py::test_attention"
CUT = f"{ATTENTION}[forward+backward-128-padding+dropout-d64-triton]"  # where the run is killed

# A plugin of every pytest that the run starts: each benchmark has as few rounds as there can be.
TROUBLE = f"""
import os, time
from pathlib import Path

import pytest, torch
import torch.nn.functional as F
from benchmarks.gpu.stand_in import device

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for module in [*config.pluginmanager.get_plugins(), *(item.module for item in items)]:
        for name in ("ROUNDS", "ROUNDS_IN_TURN", "LEAST_REPLAYS", "SECONDS", "REPLAY_SECONDS"):
            if hasattr(module, name):
                setattr(module, name, 0 if "SECONDS" in name else 1)

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if item.config.getoption("benchmark_disable"):
        return
    reached = Path(os.environ["REACHED"])
    if item.nodeid == {CUT!r} and not reached.exists():
        reached.write_text(str(os.getpid()))
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
# benchmarks.gpu with more time, as this machine has few cores, and less work where others test it.
RUN = """
import sys
from dataclasses import replace
from benchmarks.gpu import run as gpu
LESS = {
    "copy-task": ["--steps", "2"],
    "tune": ["--only", "^layer_norm bfloat16"],
}
small = gpu.FAMILIES.pop("small heads")
gpu.FAMILIES = {"small heads": small, "layers": "|".join(gpu.FAMILIES.values())}
def patient(part):
    command = [*part.command, *LESS.get(part.name, [])]
    silence = 45 if part.name.startswith("gluon") else 900
    parts = tuple(map(patient, part.parts))
    return replace(part, command=command, seconds=3600, silence=silence, parts=parts)
former = gpu.on_gpu
gpu.on_gpu = lambda: {k: [*map(patient, parts)] for k, parts in former().items()}
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


@pytest.mark.with_all
def test_the_headline_with_every_trouble(environment, tmp_path, request):
    """All of it is called, but its kernels are counted, not compiled. --slow: they are compiled,
    which takes several minutes.
    """
    out = tmp_path / "out"
    words = ["-c", RUN, "--headline", "--out", str(out)]
    environment["PYTEST_ADDOPTS"] = "-p trouble"
    if not request.config.getoption("slow"):
        environment[device.COUNTS] = "1"

    def start():
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, **pipes)

    def results():
        path = out / "results.json"
        return json.loads(path.read_text()) if path.exists() else {"rows": []}

    first, reached = start(), tmp_path / "reached"
    try:
        until(reached.exists, first, 1800)
        seen = len([event for event in journal.read(out / "parts" / "attention.jsonl")])
        until(lambda: seen > 3 and len(results()["rows"]) >= 1, first, 60)
        until((out / "report.md").exists, first, 60)  # which is written behind the results
    finally:
        first.kill()  # nothing can be written any more
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.killpg(int(reached.read_text()), signal.SIGKILL)
    (early, _), data = first.communicate(), results()
    text = (out / "report.md").read_text()
    statuses = {one["part"]: one["status"] for one in data["parts"]}
    assert statuses["attention"] == "running" and statuses["correctness"] == "done"
    assert [row["provider"] for row in data["rows"]][-1] != "triton"
    assert f"## {data['rows'][0]['group']}" in text and "- attention: running" in text

    done = start()
    printed, errors = done.communicate(timeout=3600)
    assert done.returncode == 1, errors  # as tests have failed
    data = results()
    failed = dict(data["failed"])
    assert failed.pop(HANGS) == "did not finish"
    assert "illegal memory access" in failed.pop(LOSES_THE_GPU)
    assert failed == {}
    statuses = {one["part"]: one["status"] for one in data["parts"]}
    assert statuses.pop("gluon dq") == statuses.pop("gluon") == "silent for 45 s"
    assert set(statuses.values()) == {"done"}, statuses

    # Nothing lost, nothing run twice: but what was cut, and what hung was not waited for again.
    parts = out / "parts"
    paths = [path for path in parts.glob("*.jsonl") if path.stem != "prepare"]
    events = [event for path in paths for event in journal.read(path)]
    begun = Counter(event["begun"] for event in events if "begun" in event)
    ended = Counter(event["test"] for event in events if "test" in event)
    assert {test: n for test, n in begun.items() if n > 1} == {CUT: 2}
    assert set(begun) - set(ended) == {HANGS} and set(ended.values()) == {1}
    outcomes = Counter(event["outcome"] for event in events if "outcome" in event)
    assert outcomes["passed"] > 250 and outcomes["skipped"] < 10, outcomes
    called = {x["begun"] for x in journal.read(parts / "prepare.jsonl") if "begun" in x}
    assert called == set(begun)
    # Every kernel was compiled before, under the same key.
    before, launched = ({x.name for x in f.glob("*.kernel")} for f in (parts / "driver", tmp_path))
    assert len(launched) > 250 and launched <= before, launched - before
    assert "crashed, GPU lost: continues" in (parts / "correctness layers.log").read_text()
    assert "crashed, GPU lost: continues" in (parts / "rows.log").read_text()
    assert "continues" not in (parts / "gluon dq.log").read_text()

    # At most 320 kernels, 60 lines of tables and failures, 1 MB and 200 kB.
    (kernels,) = (one["kernels"] for one in data["parts"] if "kernels" in one)
    assert 250 < kernels <= 320, f"{kernels} kernels"
    assert re.search(rf"^prepare +done +[\d.]+ s, {kernels} kernels$", early, re.MULTILINE), early
    lines = printed.splitlines()
    tables = lines[lines.index(f"Wrote {out / 'results.json'}") + 1 :]
    assert 40 < len(tables) <= report.SUMMARY_LINES
    for word in (
        device.STAND_IN,
        "ceilings in bfloat16",
        "BERT-base",
        "layer_norm",
        "Gluon dq: at",
    ):
        assert any(word in line for line in tables), word
    assert [line.partition(":")[0] for line in tables if line.startswith("FAILED")] == [
        f"FAILED {LOSES_THE_GPU.partition(':')[0]}", f"FAILED {HANGS.partition(':')[0]}",
    ]  # fmt: skip
    assert (out / "results.json").stat().st_size < 1e6
    assert (out / "report.md").stat().st_size < 2e5

    # Every row is of no GPU, and says how its time was taken.
    assert all(row["gpu"] == device.STAND_IN for row in data["rows"])
    timers = {(row["group"], row["provider"]): row.get("device_timer") for row in data["rows"]}
    norm = "layer_norm N=512 rows=262144 forward"
    assert timers[norm, "torch"].endswith("a CUDA graph failed: not to be captured")
    steps = "nn.TransformerEncoder S=128, padding 25%, training"
    assert timers[steps, "reduce-overhead"].endswith("it has CUDA graphs of its own")
    assert timers[norm, "triton"] == timers[steps, "auto"] == report.CAPTURED
    host = [row for row in data["rows"] if row["group"].startswith("public call")]
    # What the host takes has passed, whatever the device took.
    assert len(host) == 2 * len(bench_host_cost.OPS) * len(bench_host_cost.MODES)
    assert all("device_timer" not in row and row["ms"] != device.MILLISECONDS for row in host)
    assert "its times mean nothing" in (out / "report.md").read_text()
    found = report.load(out / "results.json")
    assert found.rows and report.speed_block(found) == report.UNMEASURED
    assert "**not measured** yet" in report.status_block(found)


@pytest.mark.with_slow
def test_the_other_parts(environment, tmp_path):
    """All that a GPU would see, in half an hour: the tests of the kernels, and the rest."""
    words = ["--only", "tests,rest", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", RUN, *words], cwd=ROOT, env=environment)
    data = json.loads((tmp_path / "results.json").read_text())
    assert {x["status"] for x in data["parts"]} <= {*run.ENDED} and done.returncode in (0, 1)


def test_one_of_several_processes_compiles_a_kernel(tmp_path, monkeypatch):
    """The others wait for it, and take it from the cache, which a list stands for here."""
    from triton import compiler

    cache, compiled = [], []

    def compile(source, target, options):
        if source not in cache:
            time.sleep(0.05)
            compiled.append((source.name, options["num_warps"]))
            cache.append(source)

    monkeypatch.setattr(compiler, "compile", compile)
    device._compile_once(tmp_path)
    source = SimpleNamespace(name="k", hash=lambda: "k")
    calls = [dict(args=(source, "sm_90", {"num_warps": 4})) for _ in range(4)]
    threads = [threading.Thread(target=compiler.compile, **call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == [("k", 4)] and device.kernels(tmp_path) == 1
    compiler.compile(source, "sm_90", {"num_warps": 8})
    assert device.kernels(tmp_path) == 2


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
    """Every candidate of a call compiles, and all of them tie: every call takes as long."""
    words = ["--only", "tune", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-c", RUN, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(one["part"], one["status"]) for one in data["parts"]] == [("tune", "done")]
    ((machine, found),) = json.loads((tmp_path / "out" / "tuning.json").read_text()).items()
    assert machine.startswith(device.STAND_IN)
    (one,) = (one for key, one in found.items() if key.startswith("layer_norm forward: bfloat16"))
    assert len(one["us"]) > 4 and one["choice"] == next(iter(one["us"]))
