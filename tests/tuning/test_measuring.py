"""What is measured, and what is dropped, by timers that the tests supply."""

import subprocess

import pytest
import torch

pytest.importorskip("triton")
import tuning_worker
from tuning_worker import CPU, FORWARD, HERE, OP, by_rows, flat

import fastformer as ff
from fastformer import numerics, tuning
from fastformer.dispatch import backends, measurements
from fastformer.dispatch.measurements import Entry
from fastformer.dispatch.operation import OPERATIONS
from fastformer.tuning import Candidate, measure_job

pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning"
)


# ---------------------------------------------------------------------------------- the candidates


def by_itself(call):
    """A timer: the call says how long it takes."""
    return call()


def seconds(n):
    return lambda: n * 1e-6


def fail(message):
    raise RuntimeError(message)


CANDIDATES = {
    "good": Candidate("good", seconds(50)),
    "better": Candidate("better", seconds(40)),
    "tie": Candidate("tie", seconds(49.5)),
    "slow": Candidate("slow", seconds(80)),
    "reference": Candidate("reference", seconds(1)),
    "lies": Candidate("lies", seconds(1), lambda: "it disagrees with the reference"),
    "fails": Candidate("fails", seconds(1), lambda: fail("out of resources\nand more")),
    "fails late": Candidate("fails late", lambda: fail("later")),
}


def measured(*names, **dropped):
    begun = []
    given = [CANDIDATES[name] for name in names]
    return measure_job(given, by_itself, dropped, begun.append), begun


def test_the_fastest_is_chosen_and_a_tie_keeps_what_is_shipped():
    entry, begun = measured("good", "slow", "better")
    assert entry == ("better", {"good": 50.0, "slow": 80.0, "better": 40.0}, {})
    assert begun == ["good", "slow", "better"] * (1 + tuning.ROUNDS)
    assert measured("good", "tie")[0] == ("good", {"good": 50.0, "tie": 49.5}, {})


def test_candidates_that_lie_or_fail_are_dropped_with_the_reason():
    entry, _ = measured("good", "lies", "fails", "fails late", "reference")
    assert entry.choice == "good" and list(entry.us) == ["good", "reference"]
    assert entry.dropped == {
        "lies": "it disagrees with the reference",
        "fails": "it fails: RuntimeError: out of resources",
        "fails late": "it fails: RuntimeError: later",
    }
    assert measured("lies", "slow")[0].choice == "slow"
    assert measured("lies", "fails")[0].choice is None


def test_a_candidate_that_was_dropped_is_not_tried_again():
    entry, begun = measured("good", "better", "slow", better="it crashes")
    assert entry.choice == "good" and {*begun} == {"good", "slow"}
    assert entry.dropped == {"better": "it crashes"}


def test_candidates_are_timed_in_turn_and_by_their_median():
    times = iter([3.0, 9.0, 1.0, 9.0, 2.0, 2.0])
    pair = [Candidate(name, lambda: next(times)) for name in "ab"]
    assert measure_job(pair, by_itself, {}).us == {"a": 2e6, "b": 9e6}


# ------------------------------------------------------------------------------------- comparing


def test_first_disagreement():
    disagreement = numerics.first_disagreement
    exact = [torch.linspace(-1, 1, 100, dtype=torch.float64)]
    half = [exact[0].half()]
    assert disagreement(half, exact, half, 1) is None
    off = [half[0] + 0.01]
    assert "output 0 disagrees" in disagreement(off, exact, half, 1)
    assert "gradient 0 disagrees" in disagreement(off, exact, half, 0)
    error = (half[0].double() - exact[0]).abs().max()
    edge = [(exact[0] + 2.9 * error).half()]  # three times the error, in a gradient alone
    assert disagreement(edge, exact, half, 0) is None
    assert disagreement(edge, exact, half, 1) is not None
    single = [exact[0].float()]
    assert disagreement(single, exact, single, 1) is None
    assert "disagrees" in disagreement([single[0] * 1.0001], exact, single, 1)
    eager = [single[0] * 1.00002]  # whose own error is past the policy, and excuses none
    assert "disagrees" in disagreement(eager, exact, eager, 1)
    assert "disagrees" in disagreement([single[0] * float("nan")], exact, single, 1)
    assert "is torch.float32 [100]; expected torch.float16" in disagreement(single, exact, half, 1)
    assert "expected torch.float32 [100]" in disagreement([single[0][:3]], exact, single, 1)


# ----------------------------------------------------------------------------- the jobs of a call


def attention(gradient=False, H=1, inside=False, Sq=24, **options):
    """The checked arguments of a call."""
    backends._load(OP)
    given = {n: torch.randn(1, 24, H, 16) for n in ("query", "key", "value")}
    given["query"] = given["query"][:, :Sq]
    given = {n: x.transpose(1, 2) for n, x in given.items()}
    if not inside:
        given = {n: x.contiguous() for n, x in given.items()}
    given = {n: x.requires_grad_(gradient) for n, x in given.items()}
    return backends.checked(OP, **given, **options)


@pytest.fixture
def one_row(monkeypatch):
    """Of the other tiles of attention one alone is a candidate, and no other kernel."""
    plan = pytest.importorskip("fastformer.kernels.attention.plan")
    from fastformer.kernels.attention.configurations import AttentionTiles

    monkeypatch.setattr(plan, "rows", lambda *_: [AttentionTiles(16, 32, 4, 1)])


def all_of(given, timer=flat, only=lambda candidate: True, op=OP):
    """What is found for a call, by (kind, name)."""
    found = {}
    for key, candidates in tuning.jobs(op, given, found):
        found[key] = measure_job([c for c in candidates if only(c)], timer, {})
    return found


def test_the_jobs_of_a_call_are_its_kernels_and_then_the_op(one_row):
    done = all_of(attention(True, is_causal=True), by_rows)
    backward = ["attention dkdv", "attention dq", "attention short backward"]
    assert [kind for kind, _ in done] == [FORWARD, *backward, OP]
    forward = next(entry for (kind, _), entry in done.items() if kind == FORWARD)
    assert forward.us.keys() == {"32 32 4 1", "16 32 4 1"}
    last = next(entry for (kind, _), entry in done.items() if kind == OP)
    assert last.choice == "triton" and last.us.keys() == {"triton", "reference"}


def launches(call):
    """A timer: how many kernels a call launches."""
    from fastformer.kernels import launch

    launched, former = [], launch.Launch.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.Launch, "__call__", lambda *x: launched.append(x[0]) or former(*x))
        call()
    return float(len(launched))


@pytest.mark.all_cases
@pytest.mark.parametrize("one_kernel", [False, True])
def test_one_kernel_is_compared_to_the_best_separate_ones(one_row, monkeypatch, one_kernel):
    """Whichever is shipped, dK/dV and dQ are measured first, and by what they launch."""
    plan = pytest.importorskip("fastformer.kernels.attention.plan")
    monkeypatch.setattr(plan, "pays", lambda _: one_kernel)
    done = all_of(attention(True), launches)
    found = {kind: entry for (kind, _), entry in done.items()}
    assert list(found)[1:4] == ["attention dkdv", "attention dq", "attention short backward"]
    for name in ("attention dkdv", "attention dq"):
        assert found[name].us == {"32 32 4 1": 4e6, "16 32 4 1": 4e6}
    short = found["attention short backward"]
    assert short.us == {"tiny": 2e6, "scratch": 2e6, "separate kernels": 4e6}
    assert next(iter(short.us)) == ("tiny" if one_kernel else "separate kernels")
    assert short.choice == "tiny" and found[OP].us["triton"] == 2e6


def test_a_kernel_of_the_forward_is_timed_without_the_backward(one_row):
    counted = []

    def count(call):
        counted.append(launches(call))
        return 1.0

    all_of(attention(True), count, lambda c: "16" not in c.name and c.name != "reference")
    # Each in three rounds. Delta is the fourth; or dq, dk and dv are one kernel of either form.
    assert counted == 3 * [1] + 6 * [4] + 3 * [4, 2, 2] + 3 * [4]


def few(**more):
    """The checked arguments of a call with one query."""
    query, key, value = (torch.randn(1, n, s, 16) for n, s in ((2, 1), (1, 300), (1, 300)))
    lengths = dict(key_lengths=torch.tensor([290]), enable_gqa=True)
    return dict(query=query, key=key, value=value, **lengths, **more)


def test_few_queries_take_the_faster_of_two_kernels(one_row, monkeypatch):
    """Here the one that is one launch, where the others are two."""
    from fastformer.kernels import launch, tuned

    given = few()
    done = all_of(backends.checked(OP, **given), launches, lambda c: c.name != "reference")
    assert [kind for kind, _ in done] == ["attention decode", "attention split-KV", OP]
    (key,) = (key for key in done if key[0] == "attention split-KV")
    assert done[key].choice == "forward" and done[key].us == {"split": 2e6, "forward": 1e6}
    with backends.use_backend("triton"):
        want = ff.scaled_dot_product_attention(**given)
        assert "split over programs" in ff.explain(OP, **given).reason
        monkeypatch.setattr(tuned, "source", lambda device: {key: "forward"})
        launch.plans.clear()
        assert launches(lambda: ff.scaled_dot_product_attention(**given)) == 1
        torch.testing.assert_close(ff.scaled_dot_product_attention(**given), want)
        assert "split over programs" not in ff.explain(OP, **given).reason


FAULTS = {
    "right": (lambda x: x, None),
    "wrong": (lambda x: 1.01 * x, "disagrees with the reference"),
    "unsteady": (lambda x: x * (1 + torch.rand(()) * 1e-7), "2 runs give different bits"),
    "fails": (lambda x: fail("no such op"), "it fails: RuntimeError: no such op"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_torchs_op_is_a_candidate_of_a_call_without_gradients(one_row, monkeypatch, name):
    (fault, why), former = FAULTS[name], OPERATIONS[OP].by_torch
    record = OPERATIONS[OP]._replace(by_torch=lambda **given: fault(former(**given)))
    monkeypatch.setitem(OPERATIONS, OP, record)
    for gradient in (False, True):
        found = all_of(attention(gradient, inside=True, H=2), flat, lambda c: "16" not in c.name)
        (last,) = (entry for (kind, _), entry in found.items() if kind == OP)
        is_candidate = not gradient and why is None
        assert last.us.keys() == {"triton", "reference"} | ({"torch"} if is_candidate else set())
        assert last.choice == "triton" and last.dropped.keys() == (
            {"torch"} if not gradient and why else set()
        )
        assert gradient or why is None or why in last.dropped["torch"]


def test_a_kernel_in_gluon_is_repeated_more_often(monkeypatch):
    """A bit differs in one run of many."""
    from fastformer.kernels import tuned

    call, count, former = tuning.Call(OP, attention()), [], tuning.Call.outputs

    def faulty(self, arguments, backend):
        output = former(self, arguments, backend)
        count.append(output)
        if len(count) == 7:
            output[0].view(torch.int32)[0, 0, 0, 0] ^= 1
        return output

    monkeypatch.setattr(tuning.Call, "outputs", faulty)
    assert call.drop_reason("triton", 5) == "5 runs give different bits"
    monkeypatch.setattr(tuning.Call, "drop_reason", lambda self, backend, repeats: f"{repeats}")
    monkeypatch.setattr(tuned, "GluonOption", tuple)  # all tiles
    _, candidates = next(tuning.jobs(OP, attention(), {}))
    assert {c.drop_reason() for c in candidates} == {str(tuning.OF_GLUON)}


# --------------------------------------------------------------------------------- the process


def calls_of(*given):
    calls = {}
    for arguments in given:
        tuning.add(calls, OP, arguments)
    return calls


def choice_of(kind, found):
    return next(entry for (name, _), entry in found.items() if name == kind)


@pytest.mark.with_all
def test_a_run_writes_what_calls_then_take_and_the_next_goes_on_without_what_crashed(file):
    given = attention(is_causal=True)
    calls = calls_of(given)
    result = tuning.measure(calls, file, 10.0, tuning_worker.crash_at_64)
    assert not result.rows[0][2] and result.done and result.file == file
    why = "it ends its process: exit status 3: the kernel is gone"
    assert f"not the call: {why} ({FORWARD}, 64 32 8 " in str(result)
    dropped = choice_of(FORWARD, measurements.measurements(CPU)).dropped
    assert len(dropped) == 1 and {*dropped.values()} == {why}

    result = tuning.measure(calls, file, 10.0, tuning_worker.by_rows, candidates="^(16|64) 32 ")
    ((name, _, us, _),) = result.rows
    assert result.done and name == " ".join(*calls) and us.keys() >= {"triton", "reference"}
    entry = choice_of(FORWARD, measurements.measurements(CPU))
    assert entry.choice not in dropped and entry.dropped == dropped
    with backends.use_backend("triton"):
        said = ff.explain(OP, *(given[n] for n in ("query", "key", "value")), is_causal=True)
    assert said.reason.startswith("measured: ")


class Ends(BaseException):
    """It ends the process."""


def ends(call):
    raise Ends


@pytest.fixture
def process(monkeypatch):
    """The process is this one; `ends` ends it, or lasts until the deadline with process.late."""

    def run(command, env, timeout, **_):
        run.timeouts.append(timeout)
        try:
            tuning.worker(command[-1])
        except Ends:
            if run.late:
                raise subprocess.TimeoutExpired(command, timeout) from None
            return subprocess.CompletedProcess(command, -6, stderr=b"a\nthe kernel is gone\n")
        return subprocess.CompletedProcess(command, 0, stderr=b"")

    run.late, run.timeouts = False, []
    monkeypatch.setattr(tuning.subprocess, "run", run)
    return run


@pytest.mark.parametrize("late", [False, True])
def test_a_candidate_that_ends_its_process_or_is_late_is_dropped(file, process, one_row, late):
    process.late, calls = late, calls_of(attention())
    result = tuning.measure(calls, file, 100.0, ends)
    why = "it takes more than 600 s" if late else "it ends its process: exit status -6: the kernel"
    ((_, choice, us, dropped),) = result.rows
    assert result.done and process.timeouts == [tuning.LIMIT] and not choice and not us
    assert dropped["the call"].startswith(why) and f"({FORWARD}, 32 32 4 1)" in dropped["the call"]
    found = choice_of(FORWARD, measurements.measurements(CPU))
    assert found[:2] == (None, {}) and found.dropped["32 32 4 1"].startswith(why)
    result = tuning.measure(calls, file, 100.0, flat)
    assert result.done and result.rows[0][2].keys() == {"triton", "torch", "reference"}
    found = choice_of(FORWARD, measurements.measurements(CPU))
    assert found.choice == "16 32 4 1" and found.us.keys() == {"16 32 4 1"}
    assert [row[0] for row in tuning.planned(calls, file, CPU).rows] == []
    assert tuning.measure(calls, file, 100.0, ends).rows == result.rows  # nothing is measured again


def test_the_time_is_limited(file, process, one_row):
    """What was running is not to blame, and the next run measures it."""
    process.late, calls = True, calls_of(attention(), attention(is_causal=True))
    result = tuning.measure(calls, file, 1.0, ends)
    assert not result.done and [row[1:] for row in result.rows] == 2 * [("", {}, {})]
    assert all(timeout <= 60 for timeout in process.timeouts)
    assert len(tuning.planned(calls, file, CPU).rows) == 2


def test_candidates_are_selected_and_a_kernel_is_measured_once(file, process, one_row):
    """What is shipped, and the reference, stay."""
    calls = calls_of(attention(), attention(Sq=23))
    result = tuning.measure(calls, file, 100.0, flat, candidates="torch")
    us = [row[2].keys() for row in result.rows]
    assert us == 2 * [{"triton", "torch", "reference"}]
    found = measurements.measurements(CPU)
    assert choice_of(FORWARD, found).us.keys() == {"32 32 4 1"}
    assert len([kind for kind, _ in found if kind == FORWARD]) == 1


def test_a_result_that_cannot_be_kept_is_an_error(file, process, one_row, monkeypatch):
    def write(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(measurements, "write", write)
    with pytest.raises(OSError, match="no space left"):
        tuning.measure(calls_of(attention()), file, 1.0, flat)


# -------------------------------------------------------------------------------------------- tune


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = ff.LayerNorm(16)
        self.attention = ff.MultiHeadedAttention(2, 16)
        self.layer = ff.PositionwiseFeedForward(16, 32)

    def forward(self, x):
        x = self.norm(x)
        return self.layer(self.attention(x, x, x))


def test_tune_records_the_calls_of_a_step(file):
    model, x = Model(), torch.randn(2, 5, 16)
    ops = ["layer_norm", OP, "feed_forward"]
    result = ff.tune(model, x, dry_run=True)
    assert not result.done and all(row[1:] == ("", {}, {}) for row in result.rows)
    names = [row[0] for row in result.rows]
    assert [name.split()[0] for name in names] == ops
    assert all(name.endswith("backward") for name in names) and "dropout_p" in str(result)
    assert str(result) == "\n".join(names)
    entry = Entry("triton", {"triton": 1.0}, {})
    measurements.write(file, HERE, {tuple(names[0].split(" ", 1)): entry})
    assert [row[0] for row in ff.tune(model, x, dry_run=True).rows] == names[1:]
    with torch.no_grad():
        result = ff.tune(model.eval(), x, dry_run=True)
    assert "backward" not in str(result) and "dropout" not in str(result)
    twice = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.LayerNorm(8))
    ff.accelerate(twice)
    assert len(ff.tune(twice, torch.randn(3, 8), dry_run=True).rows) == 1


def test_tune_measures_the_calls_that_the_model_made(file, monkeypatch):
    """All but the GPU: the device, and the process that measures."""
    seen = []

    def stand_in(seconds, op, arguments, timer, *_):
        seen.append((op, arguments, timer))
        entry = Entry("triton", {"triton": 1.0}, {"x": "it lies"})
        return {(op, measurements.call_name(arguments)): entry}, None

    monkeypatch.setattr(tuning, "measure_apart", stand_in)
    monkeypatch.setattr(tuning, "NEEDED", "cpu")
    model, x = Model(), torch.randn(2, 5, 16)
    result = ff.tune(model, x, minutes=2)
    assert result.done and [row[1] for row in result.rows] == ["triton"] * 3
    assert len(measurements.read(file, HERE)) == len(seen) == 3
    assert "    not x: it lies" in str(result)
    op, given, timer = seen[0]
    assert op == "layer_norm" and timer is tuning.device_seconds
    assert torch.equal(given["input"], x) and torch.equal(given["weight"], model.norm.weight)
    assert given["weight"].requires_grad and not given["input"].requires_grad


def test_bad_calls_of_tune(monkeypatch):
    x = torch.randn(2, 5, 16)
    with pytest.raises(TypeError, match=r"model is a str; expected an nn\.Module"):
        ff.tune("layer_norm", x)
    for minutes in (0, -1, float("nan")):
        with pytest.raises(ValueError, match=f"minutes is {minutes}; expected a positive number"):
            ff.tune(Model(), x, minutes=minutes)
    with pytest.raises(ValueError, match="the model calls no op of fastformer"):
        ff.tune(torch.nn.Linear(16, 16), x)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="measures on a GPU, and the model is not on one"):
            ff.tune(Model(), x)
    monkeypatch.setenv("FASTFORMER_TUNING", "off")
    monkeypatch.setattr(tuning, "NEEDED", "cpu")
    with pytest.raises(RuntimeError, match="FASTFORMER_TUNING is off"):
        ff.tune(Model(), x)


# -------------------------------------------------------------------------------- without Gluon

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
from fastformer_command import main
x = torch.randn(1, 2, 20, 16)
with ff.use_backend("triton"):
    y = ff.scaled_dot_product_attention(x, x, x, is_causal=True)
with ff.use_backend("reference"):
    torch.testing.assert_close(y, ff.scaled_dot_product_attention(x, x, x, is_causal=True))
print(main(["info"]))
"""


@pytest.mark.parametrize("gluon", ["absent", "other"])
def test_a_triton_without_gluon_or_with_another(gluon, fresh):
    pytest.importorskip("triton.experimental.gluon")
    printed = fresh(WITHOUT, gluon, TRITON_INTERPRET="1").splitlines()
    assert printed.pop() == "0"
    (line,) = (line for line in printed if "gluon" in line)
    assert "not in this Triton: fastformer tune leaves out the kernels for Hopper" in line
