"""What `fastformer tune` asks of kernels in Gluon, beside what it asks of all: by faults planted in
a stand-in, which is the ordinary forward under such a name.
"""

import importlib.util
import logging
import os
import pickle
import subprocess
import sys
import textwrap

import gpu_path_cases as cases
import pytest
import torch
import tuning_worker

pytest.importorskip("triton")

from fastformer.kernels import launch, tuned
from fastformer.kernels.attention import plan
from fastformer.kernels.attention.configurations import Tiles
from fastformer.kernels.launch import Launch, constants

import fastformer as ff
from fastformer.dispatch import backends, measurements, workloads
from fastformer.dispatch.measurements import Entry
from fastformer.tuning import measuring, safety, tuner

pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning"
)
CPU = torch.device("cpu")
FORWARD, OP = "attention forward", "scaled_dot_product_attention"
HERE = dict(gpu="GPU A", driver="570.1", torch="2.13.0", triton="3.7.1", fastformer="0.1.0")
SIZES = dict(B=1, H=1, G=1, Sq=24, Sk=24, D=16, Dv=16)
ROW = "Gluon 16 32"
CALL = workloads.workload(OP, "float32", SIZES, lengths=True)


@pytest.fixture
def stand_in(monkeypatch):
    """A row of a kernel in Gluon, which is a row of the ordinary forward. Returns its label."""
    former, kernel = plan.Plan.tiles, plan.forward_kernel

    def tiles(self, name):
        found = former(self, name)
        return Tiles(16, 32, 4, 1) if isinstance(found, str) else found

    monkeypatch.setattr(plan, "rows", lambda *_: [])
    monkeypatch.setattr(plan, "HOPPER", {ROW: None})
    monkeypatch.setattr(plan, "hopper_forward_kernel", kernel)
    monkeypatch.setattr(tuned, "gluon_kernels", [kernel])
    monkeypatch.setattr(plan, "obstacle", lambda *_: None)
    monkeypatch.setattr(plan, "ways", lambda rows, *_: dict(rows))
    monkeypatch.setattr(plan.Plan, "tiles", tiles)
    monkeypatch.setattr(safety, "REPEATS", 5)
    launch.plans.clear()
    (option,) = tuned.gluon_options([ROW], kernel)
    yield tuned.label(option)
    launch.plans.clear()


def measured():
    """What is found for the kernels of a call, by class; the row with fewer queries is faster."""
    done = {}
    for job in tuner.jobs_on(CPU)(CALL, done):
        if job.key[0] == FORWARD:
            done[job.key] = measuring.measure(job, rows, {}, lambda name: None)
        else:
            done[job.key] = Entry("triton", {"triton": 1.0}, {})
    (found,) = (entry for (kind, _), entry in done.items() if kind == FORWARD)
    return found


def rows(call):
    """A timer."""
    taken = []
    former = Launch.__init__
    with pytest.MonkeyPatch.context() as patch:

        def remember(self, kernel, grid, arguments, *rest):
            taken.append(arguments["tile"].rows.value)
            former(self, kernel, grid, arguments, *rest)

        patch.setattr(Launch, "__init__", remember)
        launch.plans.clear()
        call()
    return float(taken[0])


def test_a_kernel_without_fault_is_timed(stand_in):
    found = measured()
    assert found.choice == stand_in and found.us.keys() == {"32 32 4 1", stand_in}


def test_a_kernel_that_writes_outside(stand_in, monkeypatch):
    """One row behind the last query, at odd lengths."""
    former = Launch.__init__

    def faulty(self, kernel, grid, arguments, *rest):
        sizes = arguments.get("sizes")
        if arguments["tile"].rows.value == 16 and sizes.queries == 71:
            arguments = arguments | dict(sizes=sizes._replace(queries=72))
        former(self, kernel, grid, arguments, *rest)

    monkeypatch.setattr(Launch, "__init__", faulty)
    found = measured()
    assert found.choice == "32 32 4 1" and stand_in not in found.us
    assert found.dropped[stand_in].startswith("it writes outside of a tensor (scaled_dot")
    assert "Sq=71 Sk=130" in found.dropped[stand_in]


def test_a_kernel_that_leaves_out_a_row(stand_in, monkeypatch):
    """The memory may be that of the call before, with the right result in it."""
    former = Launch.__init__

    def faulty(self, kernel, grid, arguments, *rest):
        sizes = arguments.get("sizes")
        if arguments["tile"].rows.value == 16 and sizes.queries == 71:
            arguments = arguments | dict(sizes=sizes._replace(queries=70))
        former(self, kernel, grid, arguments, *rest)

    monkeypatch.setattr(Launch, "__init__", faulty)
    assert "output 0 disagrees with the reference" in measured().dropped[stand_in]


@pytest.mark.parametrize("nth, beside", [(3, ""), (8, " beside a kernel that copies")])
def test_a_kernel_with_another_bit(stand_in, monkeypatch, nth, beside):
    """In one launch of many."""
    former, count = tuner._Call.forward, []

    def faulty(self):
        output = former(self)
        plans = [p.launch["forward"]._arguments for p in launch.plans.values()]
        if any(x.rows.value == 16 for given in plans for x in given if hasattr(x, "rows")):
            count.append(output)
            if len(count) == nth:
                output.view(torch.int32)[0, 0, 0, 0] ^= 1
        return output

    monkeypatch.setattr(tuner._Call, "forward", faulty)
    found = measured()
    assert found.dropped[stand_in] == f"5 runs{beside} give different bits"
    assert len(count) == (6 if nth == 3 else 11)


# ------------------------------------------------------------------------------------- the checks


def scaled(n, step, x, y):
    """Launch y[i step] = 2 x[i step] for i < n."""
    given = dict(sizes=cases.Sizes(n, step), factor=2.0, tile=constants(cases.Tile(32)))
    Launch(cases.scaled, (1,), given, 1, groups=dict(memory=cases.Memory))((x, y))


@pytest.fixture
def kernel():
    from fastformer.kernels.common import INTERPRETED

    if not INTERPRETED:
        pytest.skip("needs Triton's interpreter")


@pytest.mark.parametrize(
    "n, step, right", [(20, 1, True), (21, 1, False), (7, 3, True), (10, 2, False)]
)
def test_fences(kernel, n, step, right):
    """Of 20 numbers, or 7 of these, every third."""
    x, y = torch.arange(64.0), torch.zeros(64)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    with safety.fenced() as found:
        assert torch.empty(3).isnan().all()
        scaled(n, step, *(t[:20] if step == 1 else t[:20:3] for t in (x, y)))
    assert found == ([] if right else ["it writes outside of a tensor"])
    assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before, warn_only=True)
    if right:
        written = (x < 20) & (x % step == 0)
        assert torch.equal(y, torch.where(written, 2 * x, 0.0))


def test_what_is_read_outside_is_nan(kernel):
    x, y = torch.arange(64.0), torch.zeros(64)
    with safety.fenced() as found:
        scaled(32, 1, x[:20], y[:32])
    assert found == [] and y[:20].isfinite().all() and y[20:32].isnan().all()


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(3).expand(5, 3),
        torch.arange(40).bfloat16()[1:30:2],
        torch.tensor([True, False, True]),
        torch.tensor(7),
        torch.empty(0, 4),
    ],
    ids=lambda x: f"{x.dtype} {tuple(x.stride())}",
)
def test_a_fence_keeps_what_is_inside(x):
    given = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "__call__", lambda launch, *pointers: given.extend(pointers))
        with safety.fenced() as found:
            Launch.__call__(None, x, (x, 3))
    assert found == []
    one, (two, number) = given
    assert one is two and number == 3 and one.dtype == x.dtype
    assert one.stride() == x.stride() or not x.numel()
    assert (one.data_ptr() - x.data_ptr()) % 16 == 0
    assert torch.equal(one.expand(x.shape), x)


def test_bits():
    """Zeros of another sign differ; NaN of the same bits does not."""
    nan = torch.tensor([float("nan"), 1.0])
    assert safety.differing_runs(lambda: nan, CPU) is None
    runs = iter([torch.zeros(2)] * 7 + [-torch.zeros(2)] * 1000)
    said = safety.differing_runs(lambda: (next(runs), nan), CPU)
    assert said == f"{safety.REPEATS} runs give different bits"


def test_odd_lengths():
    full = workloads.workload(OP, "bfloat16", SIZES | dict(B=16, Sq=4096, Sk=4096), causal=True)
    for one, lengths in zip(safety.odd(full), safety.LENGTHS, strict=True):
        sizes = dict(one.sizes)
        assert (sizes["Sq"], sizes["Sk"]) == lengths and sizes["B"] == 2
        assert one.options == full.options and all(n % 16 for n in lengths)
    assert safety.odd(workloads.workload("rms_norm", "bfloat16", dict(M=4, N=8))) == []


# -------------------------------------------------------------------------------------- the digest


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The path of the file of measurements; the machine is HERE, and its GPU is the CPU."""
    path = tmp_path / "tuning.json"
    monkeypatch.setenv("FASTFORMER_TUNING", str(path))
    monkeypatch.setattr(measurements, "machine", lambda device: HERE)
    backends.measure_again()
    yield path
    monkeypatch.undo()
    backends.measure_again()


def tile_of(call):
    """The queries of a program in the forward that a call launches."""
    launch.plans.clear()
    with ff.use_backend("triton"), torch.no_grad():
        ff.scaled_dot_product_attention(**call.arguments(CPU))
    (made,) = launch.plans.values()
    return next(x.rows.value for x in made.forward._arguments if hasattr(x, "rows"))


def test_a_measurement_holds_for_the_source_that_was_measured(file, stand_in, caplog):
    with tuned.forced({}) as asked:
        tile_of(CALL)
    (case,) = (question.case for question in asked if question.kernel == FORWARD)
    old = stand_in[:-8] + "0" * 8
    shipped = Entry("triton", {"triton": 2.0}, {})
    for name, rows in ((stand_in, 16), (old, 32)):
        found = {
            (FORWARD, case): Entry(name, {name: 1.0}, {}),
            (OP, CALL.key): shipped,
            ("rms_norm", "a"): shipped,
        }
        measurements.write(file, HERE, found)
        for _ in range(2):
            backends.measure_again()
            with caplog.at_level(logging.WARNING, logger="fastformer"):
                assert tile_of(CALL) == rows
        left = [str(CALL)] if name is old else []
        assert [row[0] for row in tuner.planned([CALL], file, CPU).rows] == left
    (record,) = caplog.records  # once
    said = record.getMessage()
    assert repr(old) in said and FORWARD in said and "its kernel has changed since" in said


def test_what_is_measured_again(file, stand_in):
    """All that was measured with another source, chosen or not, and the choices of these ops."""
    old, kept = stand_in[:-8] + "0" * 8, Entry("x", {"x": 1.0}, {})
    found = {
        (FORWARD, "a"): Entry("x", {"x": 1.0, old: 2.0}, {}),
        (FORWARD, "b"): Entry("x", {"x": 1.0}, {old: "it hangs"}),
        (FORWARD, "c"): Entry(stand_in, {stand_in: 1.0}, {}),
        ("attention dq", "a"): kept,
        (OP, "a"): kept,
        ("layer_norm", "a"): kept,
    }
    measurements.write(file, HERE, found)
    left = tuner._known(file, HERE)
    assert left.keys() == {(FORWARD, "c"), ("attention dq", "a"), ("layer_norm", "a")}


SOURCE = """
    FACTOR, OTHER = 2, 3

    def helper(x):
        return x * FACTOR

    def kernel(x):
        '''Twice.'''
        return [helper(y) for y in x]

    def unused(x):
        return OTHER
"""


@pytest.mark.parametrize(
    "old, new, changes",
    [
        ("", "", False),
        ("FACTOR, OTHER = 2", "FACTOR, OTHER = 4", True),
        ("x * FACTOR", "FACTOR * x", True),
        ("[helper(y) for", "[-helper(y) for", True),
        ("return OTHER", "return 0", False),
        ("OTHER = 2, 3", "OTHER = 2, 5", False),
    ],
)
def test_the_digest_of_a_source(tmp_path, old, new, changes):
    """Of the function and what it names, wherever in the file they stand."""
    digests = []
    for stem, text in (("a", SOURCE), ("b", "\n" + SOURCE.replace(old, new))):
        path = tmp_path / f"{stem}.py"
        path.write_text(textwrap.dedent(text))
        spec = importlib.util.spec_from_file_location("kernel_of_this_test", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        digests.append(tuned.digest(module.kernel))
    assert (digests[0] != digests[1]) == changes


def test_every_kernel_in_gluon_has_a_digest():
    """That covers what it shares with the others."""
    if not plan.HOPPER:
        pytest.skip("needs Gluon")
    assert plan.hopper_forward_kernel in tuned.gluon_kernels
    for kernel in tuned.gluon_kernels:
        found = {}
        tuned._read_source(kernel.fn, found)
        names = {name.rpartition(".")[2] for name in found}
        assert {"dropout_words", "LOG2E", "rows_of"} <= names
        assert not any(" at 0x" in text or "<module" in text for text in found.values())


# ------------------------------------------------------------------------- what is not tried again


def test_a_kernel_that_is_dropped_is_logged(file, monkeypatch, caplog):
    name, key = "Gluon 16 32 @01234567", (FORWARD, "a")
    why = "it hangs: nothing was heard for 180 s"
    found = Entry("x", {"x": 1.0, "Gluon tie @01234567": 1.0}, {name: why, "tile": "it fails"})
    found.dropped["Gluon tie @01234567"] = "it ties with x, which is kept"

    def supervise(work, seconds, keep, step):
        keep(key, found)
        return True

    monkeypatch.setattr(tuner, "supervise", supervise)
    with caplog.at_level(logging.WARNING, logger="fastformer"):
        tuner.measure([CALL], CPU, file, 1.0, progress=False)
    assert [r.getMessage() for r in caplog.records] == [
        f"{name} is not taken for {FORWARD}, a: {why}"
    ]


def test_a_kernel_that_ends_the_process_is_tried_in_no_other_class():
    """A hang costs three minutes of the time of a run, and would so in each class."""
    groups = ["a, good, crashes @01234567", "b, good, crashes @01234567"]
    work, kept = measuring.Work(groups, tuning_worker.jobs, tuning_worker.by_itself), {}
    assert measuring.supervise(work, 600.0, lambda key, entry: kept.update({key[1]: entry}))
    why = "it crashes: SIGABRT: the kernel is gone"
    assert kept["a"].dropped == {"crashes @01234567": why}
    assert kept["b"].dropped == {"crashes @01234567": f"in another class of calls {why}"}


# ---------------------------------------------------------------------------------- without Gluon

WITHOUT = """
import sys
if sys.argv[1] == "absent":
    sys.modules["triton.experimental.gluon.language.nvidia.hopper"] = None
else:
    from triton.experimental import gluon
    def jit(function):
        raise TypeError("another API")
    gluon.jit = jit

import torch, fastformer as ff
import fastformer_command
from fastformer.kernels import tuned
x = torch.randn(1, 2, 20, 16)
with ff.use_backend("triton"):
    y = ff.scaled_dot_product_attention(x, x, x, is_causal=True)
with ff.use_backend("reference"):
    torch.testing.assert_close(y, ff.scaled_dot_product_attention(x, x, x, is_causal=True))
assert tuned.gluon_kernels == [] and not tuned.has_changed("128 64 8 3")
assert tuned.has_changed("Gluon 128 128 @01234567")
sys.exit(fastformer_command.main(["info"]))
"""


@pytest.mark.parametrize("gluon", ["absent", "other"])
def test_a_triton_without_gluon_or_with_another(gluon):
    pytest.importorskip("triton.experimental.gluon")
    command = [sys.executable, "-c", WITHOUT, gluon]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    (line,) = (line for line in ran.stdout.splitlines() if "gluon" in line)
    assert "not in this Triton: fastformer tune leaves out the kernels for Hopper" in line


def test_a_selection_of_candidates():
    """The first and what is only compared stay."""
    names = ["128 64 8 3", "128 64 8 2", "Gluon 128 128 @01234567", "torch (cuDNN)", "reference"]
    made = [measuring.Candidate(n, lambda: 1.0, baseline=n == "reference") for n in names]
    job = measuring.Job((FORWARD, "a"), made)
    for pattern, kept in (("@|torch", "0234"), ("", "01234"), ("@", "024")):
        left = tuner.Selection(pattern).of(job)
        assert left.key == job.key
        assert left.candidates == [made[int(i)] for i in kept]


# ----------------------------------------------------------------------------------------- ConSan

SAID = {
    "nothing": ('[ "$TRITON_INSTRUMENTATION_MODE" = consan ]', None),
    "a race": (
        "echo Assertion failed: Buffer being accessed has outstanding writes; echo end; false",
        "under ConSan it fails: Assertion failed: Buffer being accessed has outstanding writes",
    ),
    "an error": ("echo out of memory >&2; false", "under ConSan it fails: out of memory"),
    "a hang": ("sleep 600", "under ConSan it takes more than 1 s"),
}


@pytest.mark.parametrize("name", list(SAID))
def test_what_consan_says(name, tmp_path, monkeypatch):
    """Of a process that tells what ConSan would. A candidate is tried once."""
    script, expected = SAID[name]
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat > {tmp_path}/given\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(safety.sys, "executable", str(python))
    monkeypatch.setattr(safety, "CONSAN_SECONDS", 1.0)
    monkeypatch.setattr(safety, "_ran", set())
    option = tuned.GluonOption(ROW)
    option.kernel = lambda: None  # which cannot be pickled
    check = safety.Consan(CALL, {FORWARD: option, "attention dq": Tiles(1, 2, 3, 4)}, "a")
    assert check.exists()
    assert check() == expected
    with (tmp_path / "given").open("rb") as file:
        assert pickle.load(file) == (CALL, {FORWARD: ROW, "attention dq": (1, 2, 3, 4)})
    (tmp_path / "given").unlink()
    assert check() is None and not (tmp_path / "given").exists()
