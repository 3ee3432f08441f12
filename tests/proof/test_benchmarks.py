"""What the benchmarks make of their figures, and that a run for a GPU keeps what it has."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch

from benchmarks import ROOT, answer
from benchmarks.gpu import journal, stand_in
from fastformer.dispatch.backends import OPERATIONS


@pytest.fixture(scope="module")
def benchmarks():
    import benchmarks.gpu.run
    import benchmarks.report

    return benchmarks


def python(*words, **options):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=600, **options,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ report


def row(provider, length, ms, **more):
    """As a benchmark records one: 2 ms at a length of 512 make a TFLOP/s."""
    backend = {"auto": "triton"}.get(provider, provider)
    facts = dict(
        gpu="Imaginary 1", driver="1.0", torch="9.9", triton="9.9", commit="abc", threads=4
    )
    sizes = dict(dtype="bfloat16", batch=2, heads=8, length=length, head_dim=64)
    flops = 2e9 * length / 512
    return {
        "group": f"attention causal d=64 S={length} forward",
        **dict(provider=provider, backend=backend, ms=ms, ms_low=0.9 * ms, ms_high=1.1 * ms),
        **dict(tflops=flops / ms / 1e9, of_roof=flops / 10e12 / (ms / 1e3)),
        **dict(peak_mib=length / 8, roof_tflops=10.0, roof_gb_per_s=1000.0),
        **{**facts, **sizes, **more},
    }


@pytest.fixture
def results(benchmarks):
    times = {"torch": 4.0, "cudnn": 2.0, "triton": 1.0, "auto": 1.25}
    rows = [
        row(provider, length, ms * (length / 512) ** 2)
        for length in (512, 1024, 2048)
        for provider, ms in times.items()
    ]
    return benchmarks.report.Results(rows, {"liger": "it is not installed"}, {})


def test_the_table_compares_with_torch_and_with_the_best_peer(benchmarks, results):
    rows = results.groups()["attention causal d=64 S=512 forward"]
    cells = dict(benchmarks.report.table(rows))
    columns = benchmarks.report.COLUMNS
    assert list(cells) == ["torch", "cudnn", "triton", "auto (triton)"]
    assert dict(zip(columns, cells["triton"])) == {
        "ms": "1", "TFLOP/s": "2", "GB/s": "-", "tokens/s": "-", "MiB": "64", "x torch": "4",
        "x best": "2", "roofline": "0.2",
    }  # fmt: skip
    rows[2]["x_torch_in_turn"] = 3.5  # of pairs of rounds: what counts where it is known
    rows[2]["tokens_per_s"] = 12345.6
    assert dict(benchmarks.report.table(rows))["triton"][3:6] == ["12346", "64", "3.5"]


def test_report_writes_tables_and_pictures(benchmarks, results, tmp_path):
    pytest.importorskip("matplotlib")
    source = tmp_path / "results.json"
    benchmark = [{"group": r["group"], "extra_info": r} for r in results.rows]
    source.write_text(json.dumps({"benchmarks": benchmark, "absent": results.absent}))
    benchmarks.report.main([str(source), "--out", str(tmp_path / "out")])
    text = (tmp_path / "out" / "report.md").read_text()
    assert "- absent: liger (it is not installed)" in text
    assert "- Imaginary 1, driver 1.0, torch 9.9, triton 9.9, commit abc" in text
    assert "bfloat16, batch = 2, heads = 8, length = 512, head_dim = 64" in text
    assert "| triton | 1 (0.9 to 1.1) | 2 | - | - | 64 | 4 | 2 | 0.2 |" in text
    picture = tmp_path / "out" / re.search(r"!\[.*\]\((.*)\)", text)[1]
    assert picture.read_bytes().startswith(b"\x89PNG")

    figure = benchmarks.report.draw("family", results.rows)
    assert [len(axes.lines) for axes in figure.axes] == [4, 5, 4, 3]  # the roofline; the line at 1
    drawn = [axes.lines for axes in figure.axes]
    assert drawn[0][2].get_xydata().tolist() == [[512, 1.0], [1024, 4.0], [2048, 16.0]]
    assert drawn[1][4].get_ydata() == pytest.approx(10.0)
    assert [line.get_ydata()[0] for line in drawn[3]] == [2.0, 1.6, 1]
    caption = figure.get_supxlabel()
    for fact in ("Imaginary 1", "torch 9.9", "head_dim = 64", "P = 10 TFLOP/s, BW = 1000 GB/s"):
        assert fact in caption


def test_the_evidence_says_what_is_measured_and_what_is_not(benchmarks, results):
    report = benchmarks.report
    text = report.evidence_block(results)
    ratios = (
        "S=512 1 ms 2.00 x cudnn 20%, S=1024 4 ms 2.00 x cudnn 10%, S=2048 16 ms 2.00 x cudnn 5%"
    )
    assert f"| attention causal d=64 forward, triton | {ratios} |" in text
    assert "Measured on Imaginary 1, driver 1.0" in text and "P = 10 TFLOP/s" in text
    assert f"![attention causal d=64 forward]({report.PICTURE})" in text
    page = report.with_figures(f"before\n{report.START}\nold\n{report.END}\nafter\n", text)
    assert page == f"before\n{report.START}\n{text}\n{report.END}\nafter\n"

    status = report.status_block(results)  # which has steps and gradients alone
    assert "**not measured** yet" in status and "| causal" not in status
    for one in results.rows:
        one["group"] = one["group"].replace("forward", "forward+backward")
    status = report.status_block(results)
    assert "Measured on Imaginary 1, driver 1.0" in status
    assert f"| attention causal d=64 forward+backward, triton | {ratios} |" in status

    for one in results.rows:
        one["gpu"] = None
    assert "Speed on a GPU is **not measured** yet" in report.evidence_block(results)
    assert "| attention causal" not in report.evidence_block(results)
    assert "**not measured** yet" in report.status_block(results)
    with pytest.raises(ValueError, match="has no block"):
        report.with_figures("no marks", "block")


def test_the_evidence_is_up_to_date(benchmarks):
    """docs/evidence.md and README's status."""
    made = benchmarks.report.evidence(sorted(benchmarks.report.RESULTS.glob("gpu*.json")))
    assert len(made) == 2
    for path, text in made.items():
        assert path.read_text() == text, path


def test_the_summary_compares_with_the_best_peer_of_the_same_work(benchmarks):
    """A line for each work, a cell for each length, whole models in and without CUDA graphs, what
    the run decides about the kernels in Gluon, and failures by name; in at most 60 lines.
    """
    report, group = benchmarks.report, "attention padding+dropout d=64 S={} forward+backward"
    rows = [
        row(provider, length, ms, group=group.format(length), **more)
        for length in (128, 256)
        for provider, ms, more in (
            ("torch", 4.0, {}), ("efficient", 3.0, {}), ("flex", 1.0, {"lacks": "dropout"}),
            ("triton", 2.0 * length / 128, {}), ("reference", 0.1, {}),
        )
    ]  # fmt: skip
    step = "nn.TransformerEncoder S=128, padding 25%, training"
    for provider, ms, wall in (("torch", 3.0, 9.0), ("reduce-overhead", 2.0, 8.0), ("auto", 1, 2)):
        rows.append(row(provider, 128, ms, group=step, wall_ms=wall))
    for kernel, length, ms in (("dq", 1024, 1.2), ("dq", 4096, 1.0), ("forward", 1024, 1.1)):
        name = f"Gluon {kernel} plain d=64 S={length}"
        rows += [row("shipped", length, ms, group=name), row("gluon", length, 1.0, group=name)]
    rows[0]["roof_tflops"] = 11.0
    lines = report.summary(report.Results(rows, {}, {"test_it": "it failed\nbadly"}))
    work = re.sub(",? S={}", "", group)
    (found,) = (x for x in lines if x.startswith(work))
    assert "S=128 2 ms 1.50 x efficient" in found and "S=256 4 ms 0.75 x efficient" in found
    steps = [x for x in lines if x.startswith("nn.TransformerEncoder, padding 25%, training")]
    assert "in a CUDA graph" in steps[0] and "1 ms 2.00 x reduce-overhead" in steps[0]
    assert (
        "without one" in steps[1] and "2 ms 4.00 x reduce-overhead" in steps[1] and len(steps) == 2
    )
    assert "Gluon dq: at best 1.20 x shipped: it stays" in lines
    assert "Gluon forward: at best 1.10 x shipped: it goes" in lines
    assert lines[-1] == "FAILED test_it: it failed"
    assert "ceilings in bfloat16: P = 10 to 11 TFLOP/s, BW = 1000 GB/s" in lines
    assert dict(report.table(rows[:5]))["flex (no dropout)"][6] == "3"
    failed = {f"test_{i}": "it failed" for i in range(100)}
    lines = report.summary(report.Results(rows, {}, failed))
    assert len(lines) == 60 and re.fullmatch(r"and \d+ more, in results.json", lines[-1])
    assert lines[0].startswith("Imaginary 1") and lines[-2].startswith("FAILED test_")
    many = [row(who, 1, 1.0, group=f"work {i}") for i in range(99) for who in ("torch", "triton")]
    lines = report.summary(report.Results(many, {}, failed))
    assert len(lines) == 60 and sum(line.startswith("FAILED") for line in lines) == 4


def test_times_by_events_are_no_times_in_graphs(benchmarks):
    report, step = benchmarks.report, "BERT-base, 12 layers, S=128, a training step"
    by = dict(device_timer="events around calls: it waits")
    rows = [
        row("torch", 128, 1.0, group=step, wall_ms=9.0, **by),
        row("compile", 128, 3.0, group=step, wall_ms=8.0),
        row("auto", 128, 2.0, group=step, wall_ms=4.0),
        row("accelerate", 128, 1.0, group=step, wall_ms=2.0, **by),
        row("torch", 128, 1.0, group="attention S=128", **by),
        row("triton", 128, 1.0, group="attention S=128"),
    ]
    found = {k: [str(x) for x in v] for k, v in report.compared(report.Results(rows)).items()}
    work = step.replace(", S=128", "")
    assert found.pop(f"{work}, auto, in a CUDA graph") == ["S=128 2 ms 1.50 x compile 2%"]
    assert found.pop(f"{work}, auto, without one") == ["S=128 4 ms 2.00 x compile"]
    assert found.pop(f"{work}, accelerate, without one") == ["S=128 2 ms 4.00 x compile"]
    assert found == {"attention": ["S=128 1 ms 1.00 x torch, by events 5%"]}
    rows[1] = dict(rows[1], gpu="Imaginary 2")
    assert all("on Imaginary" in name for name in report.compared(report.Results(rows)))
    assert len(report.Results(rows).families()) == 3


def test_times_on_a_cpu_are_ratios_of_turns(tmp_path, monkeypatch, capsys):
    """The peer's time over ours; of the processor, and after a look whether both agree."""
    from benchmarks import cpu

    now = [0.0]
    monkeypatch.setattr(cpu.time, "process_time", lambda: now[0])

    def call(seconds, result):
        def run():
            now[0] += seconds
            return torch.tensor(result)

        return run

    made = cpu.Case("a", "b", lambda: (call(1e-3, 1.0), call(2e-3, 1.0)))
    other = cpu.Case("c", "d", lambda: (call(4e-3, 1.0), call(3e-3, 2.0)), agree=False)
    row = cpu.measure(made, 5)
    assert row["ratio"] == 2.0 and row["us"] == 1000.0 and row["peer_us"] == 2000.0
    with pytest.raises(AssertionError, match="not close"):
        cpu.measure(other._replace(agree=True), 1)
    monkeypatch.setattr(cpu, "CASES", [made, other])
    (cpu.ROOT / ".cache").mkdir(exist_ok=True)
    monkeypatch.setattr(cpu, "RESULT", cpu.ROOT / ".cache" / f"{tmp_path.name}.json")
    try:
        cpu.main(["-r", "3", "--write"])
        data = json.loads(cpu.RESULT.read_text())
    finally:
        cpu.RESULT.unlink(missing_ok=True)
    assert cpu.lines(data)[2:] == [
        "| a | b | 1 ms | 2 ms | 2.00 (2.00 to 2.00) |",
        "| c | d | 4 ms | 3 ms | 0.75 (0.75 to 0.75) |",
    ]
    with pytest.raises(SystemExit):
        cpu.main(["no such case"])
    assert "no case has this word" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------- gpu

TESTS = """
import os, time
def test_passes(): pass
def test_crashes(): os.abort()
def test_passes_after_the_crash(): pass
def test_hangs(): time.sleep(3600)
def test_fails(): assert 1 + 1 == 3
def test_is_last(): pass
"""


@pytest.fixture
def go(benchmarks, tmp_path):
    """go(parts, seconds): what results.json holds after one more run of them in tmp_path/out."""
    out = tmp_path / "out"
    out.mkdir()

    def go(parts, seconds=1800):
        benchmarks.gpu.run.Run(out).go(parts, seconds)
        return json.loads((out / "results.json").read_text())

    return go


def part(benchmarks, folder, source, name="tests", **more):
    """A part of benchmarks.gpu: the tests of the source."""
    (folder / f"test_{name}.py").write_text(source)
    code = "import os, sys; os.chdir(sys.argv[1]); os.environ['PYTHONPATH'] = sys.argv[2];"
    code += "os.execv(sys.argv[3], sys.argv[3:])"
    command = [sys.executable, "-c", code, folder, ROOT, sys.executable, "-m", "pytest"]
    command += ["-p", "benchmarks.gpu.journal", "--rootdir", folder, "-c", os.devnull]
    command = [*map(str, command), f"test_{name}.py"]
    options = {"seconds": 600, "journal": True, **more}
    return benchmarks.gpu.run.Part(name, command, **options)


def statuses(data):
    return [(one["part"], one["status"]) for one in data["parts"]]


def events(path):
    """Of a journal, by test: begun, and what it came to."""
    found = {}
    for event in journal.read(path):
        for kind in ("begun", "test", "cut"):
            if kind in event:
                test = event[kind].rpartition("::")[2]
                found.setdefault(test, []).append(event.get("outcome", kind))
    return found


@pytest.fixture
def patience(benchmarks, tmp_path):
    """Seconds in which a part has begun its tests, on this machine as it is now, with room."""
    started = time.monotonic()
    command = part(benchmarks, tmp_path, "def test_nothing(): pass", "nothing").command
    subprocess.run(command, check=True, capture_output=True)
    return math.ceil(2 + 4 * (time.monotonic() - started))


def test_a_part_that_crashes_hangs_or_fails_costs_that_alone(benchmarks, tmp_path, go, patience):
    Part = benchmarks.gpu.run.Part
    parts = [
        part(benchmarks, tmp_path, TESTS, silence=patience),
        Part("broken", [sys.executable, "-c", "raise SystemExit(7)"], 300),
        Part("endless", [sys.executable, "-c", "while True: print(end='.')"], 1),
        Part("after", [sys.executable, "-c", "print('FOLDER')"], 300),
    ]
    data, out = go(parts), tmp_path / "out"
    expected = [("tests", "failed (1)"), ("broken", "failed (7)"), ("endless", "out of time")]
    assert statuses(data) == [*expected, ("after", "done")]
    found = {name.partition("::test_")[2]: why for name, why in data["failed"].items()}
    assert found["crashes"] == found["hangs"] == "did not finish"
    assert set(found) == {"crashes", "hangs", "fails"} and "3" in found["fails"]
    log = (out / "parts" / "tests.log").read_text()
    assert "crashed (-6): continues" in log and f"silent for {patience} s: continues" in log
    assert (out / "parts" / "after.log").read_text().strip() == str(out)
    # Once more: what has come to its end is left, and nothing is lost.
    again = go(parts)
    assert statuses(again) == statuses(data) and again["failed"] == data["failed"]
    assert (out / "parts" / "tests.log").read_text() == log
    # No time for what was left: what it came to before stands.
    assert statuses(go(parts, 1)) == statuses(data)


def test_a_test_that_the_time_cuts_is_run_the_next_time(
    benchmarks, tmp_path, monkeypatch, go, patience
):
    monkeypatch.setattr(benchmarks.gpu.run, "LEAST_SECONDS", 0.1)
    source = (
        "import pathlib, time\n"
        "def test_slow(): pathlib.Path('now').exists() or time.sleep(3600)\n"
        "def test_last(): pass\n"
    )
    parts = [part(benchmarks, tmp_path, source)]
    data = go(parts, patience)
    assert (statuses(data), data["failed"]) == ([("tests", "no more time")], {})
    (tmp_path / "now").touch()
    data = go(parts)
    assert (statuses(data), data["failed"]) == ([("tests", "done")], {})
    assert events(tmp_path / "out" / "parts" / "tests.jsonl") == {
        "test_slow": ["begun", "cut", "begun", "passed"],
        "test_last": ["begun", "passed"],
    }


def test_a_part_that_was_killed_is_run_again(benchmarks, tmp_path, go):
    """The run left the status and the journal of that moment."""
    parts = [part(benchmarks, tmp_path, "def test_one(): pass\ndef test_two(): pass\n")]
    out, name = tmp_path / "out", "test_tests.py::test_"
    left = {"parts": [{"part": "tests", "status": "running", "seconds": 0}]}
    (out / "results.json").write_text(json.dumps(left))
    (out / "parts").mkdir()
    lines = [{"begun": name + "one"}, {"test": name + "one", "outcome": "passed"}]
    lines = [*map(json.dumps, [*lines, {"begun": name + "two"}]), '{"test']
    (out / "parts" / "tests.jsonl").write_text("\n".join(lines))
    data = go(parts)
    assert (statuses(data), data["failed"]) == ([("tests", "done")], {})
    assert events(out / "parts" / "tests.jsonl")["test_one"] == ["begun", "passed"]


def test_what_cannot_be_used_is_refused(benchmarks, tmp_path, capsys, monkeypatch):
    """In one line, before anything starts."""
    gpu, out, file = benchmarks.gpu.run, tmp_path / "out", tmp_path / "file"
    file.touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, message in {
        ("--out", out, "--only", "everything,x"): "no part everything, x; there are first, ",
        ("--out", out, "--headline", "--only", "rest"): "give one of them",
        ("--out", out, "--minutes", "0"): "minutes is 0; expected more than 0",
        ("--out", out): "there is no GPU",
        ("--out", file): "is no folder",
        (): "required: --out",
    }.items():
        with pytest.raises(SystemExit) as exit:
            gpu.main([str(word) for word in words])
        *_, line = capsys.readouterr().err.splitlines()
        assert exit.value.code == 2 and message in line


@pytest.mark.with_all
def test_a_suite_measures_on_a_cpu(benchmarks, tmp_path):
    file = tmp_path / "results.json"
    words = "benchmarks/bench_layer_norm.py", "-k", "test_lengths and 128 and (torch or reference)"
    done = python("-m", "pytest", "--benchmark-only", f"--benchmark-json={file}", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    results = benchmarks.report.load(file)
    assert {row["provider"] for row in results.rows} == {"torch", "reference"}
    assert {"triton", "liger"} <= set(results.absent)
    for row in results.rows:
        assert row["ms"] > 0 and row["ms_low"] <= row["ms"] <= row["ms_high"]
        assert row["provider"] == "torch" or row["x_torch_in_turn"] > 0


# ----------------------------------------------------------------------------------------- workers


@pytest.mark.with_slow
def test_every_first_call():
    pytest.importorskip("triton")
    seconds = answer("-m", "benchmarks.first_call_worker", "reference")
    assert {*OPERATIONS, "import torch", "import fastformer"} <= set(seconds)
    assert min(seconds.values()) > 0


@pytest.mark.with_all
@pytest.mark.skipif(stand_in.obstacle() is not None, reason=str(stand_in.obstacle()))
def test_every_host_cost():
    found = answer("-m", "benchmarks.bench_host_cost", 1, 2)
    assert len(found) == 14
    for row in found.values():
        kernels = row.pop("kernels")
        assert kernels > 0 and all(len(us) == 2 and min(us) > 0 for us in row.values())


# ------------------------------------------------------------------------------ the parts for a GPU


@pytest.mark.with_all
def test_every_part_for_a_gpu_finds_its_tests(benchmarks):
    """Collected as on a GPU: the sizes and so the ids are others there."""
    collect = "import sys, torch; torch.cuda.is_available = lambda: True; import pytest;"
    collect += "sys.exit(pytest.main(sys.argv[1:]))"
    options = "--gpu", "--all", "--collect-only", "-q"
    done = python("-c", collect, *options, "tests/ops/test_sizes.py", "benchmarks")
    ids = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(ids) > 500, done.stdout + done.stderr
    found = {}
    for part in leaves(benchmarks.gpu.run.chosen(benchmarks.gpu.run.on_gpu(), None)):
        timed = "--matching" in part.command and "--benchmark-disable" not in part.command
        if timed and not part.name.startswith("kernel-tests"):
            *_, matching = (y for x, y in itertools.pairwise(part.command) if x == "--matching")
            mine = [i for i in ids if i.split("::")[0] in part.command and re.search(matching, i)]
            assert 1 < len(mine) < 300, f"{part.name}: {len(mine)}"
            ours = ("triton", "auto", "sizes", "batch_invariant", "gluon")
            ours += ("-accelerate]", "flex", "compile")  # the last two: a part of peers alone
            assert any(name in i for i in mine for name in ours)
            found[part.name] = mine
    all_of_them = Counter(test for part in found.values() for test in part)
    assert {test: n for test, n in all_of_them.items() if n > 1} == {}, "they run twice"
    sizes = [test for test in ids if "test_sizes" in test and "past_int32" not in test]
    checked = [test for name, tests in found.items() if "correctness" in name for test in tests]
    assert sorted(checked) == sorted(sizes)
    small = found["correctness small heads"]
    assert small == [i for i in sizes if re.search(r"attention\[.*-(16|32)-", i)]
    for part, peers in {
        "attention": ("torch", "cudnn", "efficient", "tutorial"), "long": ("cudnn", "flash"),
        "encoder": ("torch",), "compiled": ("compile", "reduce-overhead", "flex"),
        "bert": ("torch",), "rows": ("torch", "compile"), "gluon dq": (),
        "more-attention": ("torch", "cudnn", "flash", "efficient"),
    }.items():  # fmt: skip
        assert all(any(re.search(rf"[\[-]{x}[\]-]", i) for i in found[part]) for x in peers), part
    first = headline(benchmarks)
    prepare, peers = (part.command for part in first[:2])
    measured = [i for part in leaves(first[2:]) for i in found[part.name]]
    matching = prepare[prepare.index("--matching") + 1]
    assert sorted(i for i in ids if re.search(matching, i)) == sorted(measured)
    matching = peers[peers.index("--matching") + 1]
    compiled = [i for i in measured if re.search(r"[\[-](flex|compile|reduce-overhead)[\]-]", i)]
    assert sorted(i for i in ids if re.search(matching, i)) == sorted(compiled)


def leaves(parts):
    for part in parts:
        yield from leaves(part.parts) if part.parts else [part]


def headline(benchmarks):
    """What compiles kernels and peers, and the parts that check and measure."""
    first, *measured = benchmarks.gpu.run.headline(16)
    checks, peers = first.parts
    prepare, correctness = checks.parts
    return [prepare, peers, correctness, *measured]


def test_the_headline_takes_six_minutes_at_most(benchmarks):
    """The limits of its parts together, and of parts within a part those of the part."""
    first, *measured = parts = benchmarks.gpu.run.headline(16)
    assert sum(part.seconds for part in parts) <= 60 * 5.95  # and some for the start
    checks, peers = first.parts
    assert sum(part.seconds for part in checks.parts) <= checks.seconds <= first.seconds
    assert peers.seconds <= first.seconds and checks.parts[1].seconds == 60
    *_, gluon = measured
    assert gluon.in_turn and [part.seconds for part in gluon.parts] == [40, 40, 40]
    prepare, *_ = headline(benchmarks)
    assert prepare.stand_in and prepare.command[prepare.command.index("-n") + 1] == "16"


def test_parts_of_a_part_run_at_once_or_in_turn(benchmarks, tmp_path, monkeypatch, go):
    """Each within its own limit, and all within that of the part; the worst status counts."""
    monkeypatch.setattr(benchmarks.gpu.run, "LEAST_SECONDS", 0.1)
    Part = benchmarks.gpu.run.Part

    def waits(name, seconds, limit=60, status=0):
        code = f"import time; print(time.monotonic()); time.sleep({seconds})"
        return Part(name, [sys.executable, "-c", f"{code}; raise SystemExit({status})"], limit)

    def started(name):
        return float((tmp_path / "out" / "parts" / f"{name}.log").read_text())

    at_once = waits("a", 3), waits("b", 3), waits("c", 60, 1, 0)
    in_turn = waits("d", 1), waits("e", 0, status=1), waits("f", 60), waits("g", 0)
    parts = [
        Part("at once", (), 60, parts=at_once),
        Part("in turn", (), 8, parts=in_turn, in_turn=True),
    ]
    found = dict(statuses(go(parts)))
    assert found["c"] == found["at once"] == found["in turn"] == found["f"] == "out of time"
    assert [found[name] for name in "abdeg"] == ["done", "done", "done", "failed (1)", "no time"]
    assert abs(started("a") - started("b")) < 3 and started("e") > started("d") + 1


def test_the_commands_of_the_documents_are_understood(benchmarks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where `--out` makes its folder
    gpu, commands = benchmarks.gpu.run, []
    for name in ("README.md", "docs/first_run.md", "docs/benchmarks.md"):
        text = (ROOT / name).read_text()
        commands += re.findall(r"python -m benchmarks\.gpu(\s[^`]*?)(?:\n\w|`|  )", text)
    for words in [*commands, *re.findall(r"benchmarks\.gpu( .*?)(?:   |\n)", gpu.__doc__)]:
        options = gpu._parser().parse_args(words.partition("   ")[0].split())
        assert gpu.chosen(gpu.on_gpu(), options.only)
    assert len(commands) >= 2
