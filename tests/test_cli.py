"""The command line: what it prints and writes, its exit status, what it says to a bad option."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastformer
import fastformer_command
from fastformer import environment, tuning
from fastformer.dispatch import backends
from fastformer.dispatch.state import default
from fastformer.training import copy_task
from fastformer_command import main

SIZES = ["--batch=2", "--length=3", "--vocab=6", "--layers=1", "--d-model=8", "--d-ff=16"]
SIZES += ["--heads=1", "--warmup=4"]


@pytest.fixture(autouse=True)
def environment_restored(monkeypatch):
    """The command sets TRITON_INTERPRET in its process; here it is set back after each test."""
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))


def run_python(*words, **options):
    """Another process, as a user's: nothing has chosen Triton's mode in it, and Python buffers."""
    mine = ("TRITON_", "FASTF", "PYTHONUNBUFFERED")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(mine)}
    paths = [*options.pop("paths", []), Path(fastformer.__file__).parents[1]]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    command = [sys.executable, *words]
    return subprocess.run(command, text=True, env=environment, timeout=600, **options)


def copied(*words):
    return main(["copy-task", *SIZES, *words])


@pytest.fixture
def refused(capsys, monkeypatch):
    """refused(words ..): the last line of what a command says that is refused before its work."""

    def refused(*words):
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
            patch.setattr(copy_task, "compare", lambda *_: pytest.fail("it trained"))
            main([*words])
        captured = capsys.readouterr()
        assert (stopped.value.code, captured.out) == (2, "")
        return captured.err.splitlines()[-1]

    return refused


# -------------------------------------------------------------------------------------- processes


@pytest.mark.with_all
def test_the_command_trains_both_backends_and_writes_what_it_found(tmp_path):
    written, drawn = tmp_path / "result.json", tmp_path / "curves.png"
    done = run_python(
        "-m", "fastformer", "copy-task", *SIZES, "--steps", "1", "--json", written, "--plot", drawn
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "untrained: 1 3 2 -> 1 " in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("passed: the losses of both runs agree within ") and "1..1; " in last
    assert drawn.read_bytes().startswith(b"\x89PNG")

    result = json.loads(written.read_text())
    assert [run["backend"] for run in result["runs"]] == ["reference", "triton"]
    ((a,), (b,)) = (run["losses"] for run in result["runs"])
    assert 0 < a < 10 and result["max_loss_difference"] == abs(a - b) < 1e-5
    assert all(len(run["decoded"]) == 3 for run in result["runs"])
    environment = result["environment"]
    assert environment["fastformer"] == fastformer.__version__
    assert environment["torch"] == torch.__version__
    assert environment["threads"] == 1
    assert (environment["gpu"] is None) == (environment["device"] == "cpu")
    assert "--steps 1 " in environment["command"] and "--d-model 8 " in environment["command"]


def test_commands_import_what_they_need_alone(tmp_path):
    """Some no torch: a module torch that cannot be imported comes first on the path; and the others
    neither Triton nor matplotlib nor transformers.
    """
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    code = """
import contextlib, sys
from fastformer_command import main
for words in (["--version"], ["--help"], ["copy-task", "--help"], ["coppy"],
              ["copy-task", "--speed", "3"], ["copy-task", "--steps", "many"], ["plot"], []):
    with contextlib.suppress(SystemExit):
        main(words)
    assert "torch" not in sys.modules and "fastformer" not in sys.modules, words
"""
    done = run_python("-c", code, paths=[tmp_path])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"fastformer {fastformer.__version__}\nusage: ")
    heavy = "triton", "matplotlib", "transformers", "fastformer.kernels"
    found = f"[m for m in {heavy} if m in sys.modules]"
    done = run_python("-c", f"import sys, fastformer.cli; print({found})")
    assert done.stdout.strip() == "[]", done.stderr


# -------------------------------------------------------------------------------------- copy-task


def test_a_single_backend(capsys, tmp_path):
    written = tmp_path / "result.json"
    assert copied("--backend", "reference", "--steps", "2", "--json", str(written)) == 0
    printed = capsys.readouterr().out
    assert "\nreference\n" in printed and "triton" not in printed
    assert "trained 2 of 2 steps" in printed and f"Wrote {written}" in printed
    result = json.loads(written.read_text())
    assert result["max_loss_difference"] is None
    assert [run["backend"] for run in result["runs"]] == ["reference"]


def test_without_triton_both_trains_the_reference_and_says_so(monkeypatch, capsys, refused):
    monkeypatch.setattr(backends, "_HAS_TRITON", False)
    assert copied("--steps", "1") == 0
    printed = capsys.readouterr().out
    assert "The triton run is skipped: " in printed and "triton is not installed" in printed
    assert "triton is not installed" in refused("copy-task", "--backend", "triton")


def test_a_failure_is_exit_status_1_and_still_written(monkeypatch, capsys, tmp_path):
    forgetful = copy_task.Run("reference", False, [0.5] * 400, 1.0, [1, 1, 1])
    monkeypatch.setattr(copy_task, "compare", lambda *_: [forgetful])
    written = tmp_path / "result.json"
    assert copied("--backend", "reference", "--json", str(written)) == 1
    assert "FAILED: reference: trained 400 steps and does not copy" in capsys.readouterr().out
    assert json.loads(written.read_text())["runs"][0]["decoded"] == [1, 1, 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("copy-task --steps -3", "steps is -3; expected 1 or more"),
        ("copy-task --steps many", "argument --steps: invalid int value: 'many'"),
        ("copy-task --d-model 10 --heads 4", "d_model is 10; expected a multiple of h = 4"),
        ("copy-task --dropout 1", r"dropout is 1.0; expected a number in [0, 1)"),
        ("copy-task --seed -1", "seed is -1"),
        ("copy-task --backend cudnn", "argument --backend: invalid choice: 'cudnn'"),
        ("copy-task --device abacus", "argument --device: 'abacus' cannot be used on this machine"),
        ("copy-task --device meta", "argument --device: 'meta' cannot be used on this machine"),
        ("copy-task --json /nowhere/x.json", "--json: '/nowhere/x.json' is in a folder that does"),
        ("copy-task --json /", "argument --json: '/' is a folder; expected a file"),
        ("copy-task --plot curves.xyz", "--plot: curves.xyz ends in 'xyz'; expected one of"),
        ("copy-task --speed 3", "unrecognized arguments: --speed 3"),
        ("tune --minutes 0", "minutes is 0.0; expected a positive number"),
        ("tune --minutes nan", "minutes is nan; expected a positive number"),
        ("tune --only (", "'(' is no regular expression"),
        ("tune --only warp", "--only 'warp' finds no call"),
        ("tune --out /nowhere/x.json", "is in a folder that does not exist"),
    ],
)
def test_a_bad_option_is_one_line_and_exit_status_2(words, message, refused):
    last = refused(*words.split())
    assert re.match(r"fastformer( copy-task| tune)?: error: ", last) and message in last


def test_what_is_missing_is_named(refused, monkeypatch):
    """A GPU, matplotlib, and a backend."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        assert "measures on a GPU, and there is none on this machine" in refused("tune")
        patch.setitem(sys.modules, "matplotlib.figure", None)
        assert 'pip install ".[plot]"' in refused("copy-task", "--plot", "curves.png")
        patch.setattr(default, "backend", "fastest")
        assert "FASTFORMER_BACKEND is 'fastest'" in refused("info")


def test_a_file_that_cannot_be_written_is_refused_before_the_work(refused, tmp_path):
    """Whoever runs the command, root as well: the file is opened."""
    (tmp_path / "file").write_text("kept")
    long = str(tmp_path / ("x" * 300))
    for words in (["--json", long], ["--plot", f"{long}.png"]):
        error = refused("copy-task", *words)
        assert f"argument {words[0]}: " in error and "cannot be written: " in error
    assert (tmp_path / "file").read_text() == "kept"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]
    assert fastformer_command._output_file(str(tmp_path / "new")) == tmp_path / "new"
    assert not (tmp_path / "new").exists()  # the check leaves nothing


def test_the_options_have_the_values_of_the_package():
    """The options are read before the package is imported, so they repeat what it knows."""
    given = vars(fastformer_command._parser().parse_args(["copy-task"]))
    defaults = vars(copy_task.Settings(device=None))
    assert {name: given[name] for name in defaults} == defaults


def test_help_says_what_each_option_is_by_default():
    (commands,) = (a for a in fastformer_command._parser()._actions if isinstance(a.choices, dict))
    shown = 0
    for parser in commands.choices.values():
        for action in parser._actions:
            if action.option_strings and not action.required and action.dest != "help":
                text = parser._get_formatter()._expand_help(action)
                assert re.search(r"\(default: [^N]|[Bb]y default", text), action.option_strings
                shown += 1
    assert shown >= 20


def test_ctrl_c_is_one_line_and_exit_status_130(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(copy_task, "compare", interrupted)
    threads = torch.get_num_threads()
    assert copied() == 130 and torch.get_num_threads() == threads
    assert capsys.readouterr().out == "\nInterrupted\n"


# --------------------------------------------------------------------------------------- the rest


def test_info_says_what_each_op_takes_and_why(capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"^fastformer +{re.escape(fastformer.__version__)}$", printed, re.MULTILINE)
    assert re.search(rf"^torch +{re.escape(torch.__version__)}$", printed, re.MULTILINE)
    cpu = printed[printed.index("\ncpu, backend auto") :]
    for op in backends.OPERATIONS:
        assert re.search(rf"^  {op}: reference \(the tensors are on the CPU[;)]", cpu, re.MULTILINE)
    for i in range(torch.cuda.device_count()):
        assert f"\ncuda:{i} {torch.cuda.get_device_name(i)}, backend auto" in printed


def test_info_says_what_is_missing(capsys, monkeypatch):
    """Gluon in Triton, or all of Triton."""
    gluon = pytest.importorskip("fastformer.kernels.attention.gluon")
    for kernels in ({"forward": None}, {}):
        monkeypatch.setattr(gluon, "KERNELS", kernels)
        assert main(["info"]) == 0
        assert ("\ngluon       not in this Triton" in capsys.readouterr().out) != bool(kernels)
    monkeypatch.setattr(backends, "_HAS_TRITON", False)
    with fastformer.use_backend("triton"):
        assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "triton backend cannot run layer_norm: triton is not installed" in printed


# --------------------------------------------------------------------------------------------- tune

ONE = ["tune", "--only", "^rms_norm bfloat16"]


def test_tune_lists_its_work_without_a_gpu(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("FASTFORMER_TUNING", str(tmp_path / "here.json"))
    assert main([*ONE, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rms_norm bfloat16 input=4x4096x1024 normalized_shape=1024 weight=1024 backward",
        f"1 calls; the results go to {tmp_path / 'here.json'}",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("done", [True, False])
def test_tune_prints_and_names_what_it_wrote(done, capsys, monkeypatch, tmp_path):
    """On a machine with a GPU, the measurement itself apart."""
    out = tmp_path / "gpu.json"

    def run(calls, file, minutes, dry_run):
        assert [op for op, _ in calls.values()] == ["rms_norm"]
        assert (file, minutes, dry_run) == (out, 3, False)
        rows = tuple((name, "triton", {"triton": 2.0}, {"a": "it lies"}) for name in calls)
        if done:
            file.touch()
        return tuning.Tuning(rows, file, done)

    monkeypatch.setattr(tuning, "measure", run)
    devices = [torch.device("cpu"), torch.device("meta")]
    monkeypatch.setattr(environment, "devices", lambda: devices)
    assert main([*ONE, "--minutes", "3", "--out", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith("backward: triton (triton 2.0 us)")
    assert printed[1] == "    not a: it lies"
    assert ("The time is up after 3 minutes; the next run goes on from here" in printed) != done
    assert printed[-1] == (f"Wrote {out}" if done else "Nothing was written")


def test_version_and_usage(capsys, refused):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"fastformer {fastformer.__version__}\n"
    assert "COMMAND" in refused()
