"""What the benchmarks make of their figures, and that a run for a GPU keeps what it has."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def benchmarks():
    """The package, which is no part of an installation."""
    sys.path.insert(0, str(ROOT))
    try:
        import benchmarks.gpu
        import benchmarks.report

        yield benchmarks
    finally:
        sys.path.remove(str(ROOT))


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
        row(provider, length, ms * (length / 512) ** 2, work="O(n^2 d)")
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
        "ms": "1", "TFLOP/s": "2", "GB/s": "-", "MiB": "64", "x torch": "4", "x best": "2",
        "of roof": "0.2",
    }  # fmt: skip
    rows[2]["x_torch_in_turn"] = 3.5  # of pairs of rounds: what counts where it is known
    assert dict(benchmarks.report.table(rows))["triton"][4] == "3.5"


def test_curves_hold_what_was_measured_and_the_roof(benchmarks, results):
    (family, rows), *others = results.families().items()
    assert family == "attention causal d=64 forward" and not others
    curves = benchmarks.report.curves
    assert curves(rows, "ms")["triton"] == [(512, 1.0), (1024, 4.0), (2048, 16.0)]
    assert curves(rows, "x best") == {
        "triton": [(n, 2.0) for n in (512, 1024, 2048)],
        "auto": [(n, 1.6) for n in (512, 1024, 2048)],
    }
    (name, roof), *others = curves(rows, "roof").items()
    assert name == "roof" and not others
    assert roof == [(n, pytest.approx(10.0)) for n in (512, 1024, 2048)]


def test_growth_is_fitted_where_the_work_is_told(benchmarks, results):
    exponent = benchmarks.report.exponent
    assert exponent([(n, 3 * n**1.7) for n in (64, 128, 1024)]) == pytest.approx(1.7)
    found = {g.provider: g for g in benchmarks.report.growth(results)}
    assert found["triton"].exponent == pytest.approx(2) == found["triton"].late
    assert "time ~ n^2.00 over n = 512..2048" in str(found["triton"])
    for one in results.rows:
        del one["work"]
    assert benchmarks.report.growth(results) == []


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
    assert "| triton | 1 (0.9 to 1.1) | 2 | - | 64 | 4 | 2 | 0.2 |" in text
    picture = tmp_path / "out" / re.search(r"!\[.*\]\((.*)\)", text)[1]
    assert picture.read_bytes().startswith(b"\x89PNG")

    figure = benchmarks.report.draw("family", results.rows)
    assert [len(axes.lines) for axes in figure.axes] == [4, 5, 4, 3]  # the roof; the line at 1
    caption = figure.get_supxlabel()
    for fact in ("Imaginary 1", "torch 9.9", "head_dim = 64", "P = 10 TFLOP/s, BW = 1000 GB/s"):
        assert fact in caption


def test_the_readme_says_what_is_measured_and_what_is_not(benchmarks, results, tmp_path):
    report = benchmarks.report
    source, readme = tmp_path / "results.json", tmp_path / "README.md"
    readme.write_text(f"before\n{report.START}\nold\n{report.END}\nafter\n")
    source.write_text(json.dumps({"rows": results.rows}))
    report.main([str(source), "--readme", str(readme)])
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| attention causal d=64 S=2048 forward, triton | 16 | 0.5 |" in text
    assert "S=512" not in text and "Measured on Imaginary 1, driver 1.0" in text
    assert f"![attention causal d=64 forward]({report.PICTURE})" in text
    assert (tmp_path / report.PICTURE).read_bytes().startswith(b"\x89PNG")

    for one in results.rows:
        one["gpu"] = None
    source.write_text(json.dumps({"rows": results.rows}))
    report.main([str(source), "--readme", str(readme)])
    assert "Speed on a GPU is **not measured** yet" in readme.read_text()
    assert "| attention" not in readme.read_text()
    with pytest.raises(ValueError, match="has no block"):
        report.with_figures("no marks", "block")


def test_the_readme_is_up_to_date(benchmarks):
    text = (ROOT / "README.md").read_text()
    results = benchmarks.report.load(*sorted(benchmarks.report.RESULTS.glob("gpu*.json")))
    assert benchmarks.report.with_figures(text, benchmarks.report.readme_block(results)) == text


# --------------------------------------------------------------------------------------------- gpu

TESTS = """
import os, time
def test_passes(): pass
def test_crashes(): os.abort()
def test_passes_after_the_crash(): pass
def test_hangs(): time.sleep(60)
def test_fails(): assert 1 + 1 == 3
def test_is_last(): pass
"""


def test_a_part_that_crashes_hangs_or_fails_costs_that_alone(benchmarks, tmp_path):
    gpu = benchmarks.gpu
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.journal", "--rootdir", tmp_path]
    command += ["-c", os.devnull, tmp_path / "test_it.py"]
    parts = [
        gpu.Part("tests", [*map(str, command)], 300, silence=8, journal=True),
        gpu.Part("broken", [sys.executable, "-c", "raise SystemExit(7)"], 300),
        gpu.Part("endless", [sys.executable, "-c", "while True: print(end='.')"], 1),
        gpu.Part("after", [sys.executable, "-c", "print('FOLDER')"], 300),
    ]
    out = tmp_path / "out"
    data = gpu.run(parts, out, 900)
    assert [(p["part"], p["status"]) for p in data["parts"]] == [
        ("tests", "failed (1)"),
        ("broken", "failed (7)"),
        ("endless", "out of time"),
        ("after", "done"),
    ]
    assert json.loads((out / "results.json").read_text()) == data
    found = {name.partition("::test_")[2]: why for name, why in data["failed"].items()}
    assert found["crashes"] == found["hangs"] == "did not come to its end"
    assert set(found) == {"crashes", "hangs", "fails"} and "3" in found["fails"]
    log = (out / "tests.log").read_text()
    assert "crashed (-6): again" in log and "silent for 8 s: again" in log
    assert (out / "after.log").read_text().strip() == str(out)
    # Once more: nothing is left to do, and nothing is lost.
    again = gpu.run(parts[:1], out, 300)
    assert again["parts"][0]["status"] == "done" and again["failed"] == data["failed"]
    assert gpu.run(parts[-1:], out, 1)["parts"][0]["status"] == "no time"


def test_a_test_that_the_time_cuts_is_run_the_next_time(benchmarks, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmarks.gpu, "LEAST_SECONDS", 0.1)
    (tmp_path / "test_it.py").write_text(
        "import pathlib, time\n"
        "def test_slow(): pathlib.Path('now').exists() or time.sleep(60)\n"
        "def test_last(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.journal", "--rootdir", tmp_path]
    code = "import os, sys; os.chdir(sys.argv[1]); os.environ['PYTHONPATH'] = sys.argv[2];"
    code += "os.execv(sys.argv[3], sys.argv[3:])"
    command = [sys.executable, "-c", code, tmp_path, ROOT, *command, "-c", os.devnull]
    part = benchmarks.gpu.Part("it", [*map(str, command), "test_it.py"], 60, journal=True)
    data = benchmarks.gpu.run([part], tmp_path, 10)
    assert (data["parts"][0]["status"], data["failed"]) == ("no more time", {})
    (tmp_path / "now").touch()
    data = benchmarks.gpu.run([part], tmp_path, 300)
    assert (data["parts"][0]["status"], data["failed"]) == ("done", {})
    ended = [
        json.loads(line).get("test") for line in (tmp_path / "it.jsonl").open() if line != "\n"
    ]
    assert [test.partition("::")[2] for test in ended if test] == ["test_slow", "test_last"]


def test_a_run_that_is_killed_keeps_what_it_has(tmp_path):
    (tmp_path / "row.jsonl").write_text('{"begun": "a"}\n{"test": "a", "outcome": "passed"}\n{"beg')
    parts = """
import sys
from benchmarks import gpu
quick = gpu.Part("quick", [sys.executable, "-c", "pass"], 300)
slow = gpu.Part("slow", [sys.executable, "-c", "import time; time.sleep(300)"], 400, 400)
gpu.on_cpu = gpu.on_gpu = lambda: [quick, slow]
sys.exit(gpu.main(sys.argv[1:]))
"""
    words = [sys.executable, "-c", parts, "--out", str(tmp_path), "--minutes", "5"]
    process = subprocess.Popen(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "slow.log").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 143
    finally:
        process.kill()
    data = json.loads((tmp_path / "results.json").read_text())
    assert [(p["part"], p["status"]) for p in data["parts"]] == [("quick", "done")]
    assert data["failed"] == {}


def test_the_small_run_measures(benchmarks, tmp_path, capsys):
    done = python("-m", "benchmarks.gpu", "--out", tmp_path, "--only", "norms", "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "results.json").read_text())
    providers = {row["provider"] for row in data["rows"]}
    assert {"torch", "reference"} <= providers and data["absent"]
    assert all(
        row["ms"] > 0 and row["ms_low"] <= row["ms"] <= row["ms_high"] for row in data["rows"]
    )
    ours = [row for row in data["rows"] if row["provider"] == "reference"]
    assert ours and all(row["x_torch_in_turn"] > 0 for row in ours)
    assert "## layer_norm N=512 S=128 forward" in (tmp_path / "report.md").read_text()
    with pytest.raises(SystemExit):
        benchmarks.gpu.main(["--out", str(tmp_path), "--only", "everything"])
    assert "no part everything; there are machine, " in capsys.readouterr().err


def test_every_part_for_a_gpu_finds_its_tests(benchmarks):
    """Collected as on a GPU: the sizes and so the ids are others there."""
    collect = "import sys, torch; torch.cuda.is_available = lambda: True; import pytest;"
    collect += "sys.exit(pytest.main(sys.argv[1:]))"
    done = python("-c", collect, "--collect-only", "-q", "--benchmark-only")
    ids = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(ids) > 500, done.stdout + done.stderr
    for part in benchmarks.gpu.on_gpu():
        if "--benchmark-only" in part.command:
            matching = part.command[part.command.index("--matching") + 1]
            files = [word for word in part.command if word.startswith("benchmarks/")]
            mine = [i for i in ids if i.split("::")[0] in files and re.search(matching, i)]
            assert 5 < len(mine) < 300, f"{part.name}: {len(mine)}"
            assert any("triton" in i or "auto" in i or "self-attention" in i for i in mine)
