"""What is measured, and what is dropped: by timers that the tests supply, candidates that lie, tie,
crash and hang, and faults planted in a stand-in for a kernel in Gluon.
"""

import logging
import subprocess
import time
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
import tuning_worker
from tuning_worker import CANDIDATES, CPU, FORWARD, HERE, OP, by_itself, flash

import fastformer as ff
from fastformer import numerics, tuning
from fastformer.dispatch import autograd, backends, measurements
from fastformer.dispatch.measurements import Entry
from fastformer.dispatch.operation import OPERATIONS, Alternative
from fastformer.tuning import Candidate, Work, measure_job, supervise

pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning"
)
A, B = (FORWARD, "a"), (FORWARD, "b")


def measured(*names, **known):
    begun = []
    work = Work(by_itself, **known)
    return measure_job(work, A, [CANDIDATES[name] for name in names], begun.append), begun


# ---------------------------------------------------------------------------------- the candidates


def test_the_fastest_is_chosen_and_a_tie_keeps_what_is_shipped():
    entry, begun = measured("good", "slow", "better")
    assert entry == ("better", {"good": 50.0, "slow": 80.0, "better": 40.0}, {})
    assert begun == ["good", "slow", "better"] * (1 + tuning.ROUNDS)
    entry, _ = measured("good", "tie")
    assert entry.choice == "good"
    assert entry.dropped == {"tie": "it ties with good, which is kept"}


def test_candidates_that_lie_or_fail_are_dropped_with_the_reason():
    entry, _ = measured("good", "lies", "fails", "fails late", "baseline")
    assert entry.choice == "good" and list(entry.us) == ["good", "baseline"]
    assert entry.dropped == {
        "lies": "it disagrees with the reference",
        "fails": "it fails: RuntimeError: out of resources",
        "fails late": "it fails: RuntimeError: later",
    }
    assert measured("lies", "slow")[0].choice == "slow"
    assert measured("lies", "fails")[0].choice is None


def test_a_candidate_that_has_failed_is_not_tried_again():
    failed = {(A, "better"): "it crashes", (B, "slow"): "it hangs", (None, "tie"): "it hangs"}
    entry, begun = measured("good", "better", "slow", "tie", failed=failed)
    assert entry.choice == "good" and {*begun} == {"good", "slow"}
    assert entry.dropped == {"better": "it crashes", "tie": "it hangs"}


def test_candidates_are_timed_in_turn_and_by_their_median():
    times = iter([3.0, 9.0, 1.0, 9.0, 2.0, 2.0])
    pair = [Candidate(name, lambda: next(times)) for name in "ab"]
    assert measure_job(Work(by_itself), A, pair, str).us == {"a": 2e6, "b": 9e6}


def test_a_selection_of_candidates():
    """The first and what is only compared stay."""
    names = ["128 64 8 3", "128 64 8 2", "Gluon 128 128 @01234567", "torch (cuDNN)", "reference"]
    made = [Candidate(n, lambda: 1.0, baseline=n == "reference") for n in names]
    for pattern, kept in (("@|torch", "0234"), ("", "01234"), ("@", "024")):
        assert tuning._selected(made, Work(by_itself, pattern)) == [made[int(i)] for i in kept]


def test_the_time_of_a_gpu_is_between_two_events_with_a_cold_cache(monkeypatch):
    gpu = MagicMock()
    gpu.cuda.Event().elapsed_time.return_value = 2000.0
    monkeypatch.setattr(tuning, "torch", gpu)
    assert tuning.device_seconds(gpu.call) == 2.0
    names = ("empty().zero_", "cuda._sleep", "cuda.Event().record", "call", "cuda.synchronize")
    flush, sleep, event, call, wait = names
    done = [name for name, *_ in gpu.mock_calls if name in names]
    assert done[:4] == [call, wait, call, wait] and done[-1] == wait
    rounds = done[4:-1]
    assert rounds == [flush, sleep, event, call, event] * (len(rounds) // 5)
    assert tuning.LEAST <= len(rounds) // 5 <= tuning.MOST


# --------------------------------------------------------------------------------- the process


def supervised(names, seconds=600.0, keep=lambda *_: None, silence=60.0):
    work = Work(by_itself, silence=silence)
    why = supervise(work, A, names, time.monotonic() + seconds, keep, tuning_worker.jobs)
    return why, work


@pytest.mark.with_all
def test_a_candidate_that_crashes_is_dropped_and_the_others_measured():
    """A kernel in Gluon is tried in no other class: it would most likely cost as much time."""
    kept, crashes, gluon = [], "crashes", "crashes @01234567"
    given = f"good, {crashes}, {gluon}, better"
    why, work = supervised(given, keep=lambda *x: kept.append(x))
    reason = "it crashes: SIGABRT: the kernel is gone"
    assert why is None and kept == [(A, work.done[A])]
    dropped = {crashes: reason, gluon: reason}
    assert work.done[A] == ("better", {"good": 50.0, "better": 40.0}, dropped)
    elsewhere = {(None, gluon): f"in another class of calls {reason}"}
    assert work.failed == {(A, name): reason for name in dropped} | elsewhere


@pytest.mark.with_all
def test_a_candidate_that_hangs_is_dropped():
    _, work = supervised("good, hangs, better", silence=5.0)
    assert work.done[A].choice == "better"
    assert work.done[A].dropped == {"hangs": "it hangs: it takes more than 5 s"}


def test_a_call_that_cannot_be_measured():
    assert supervised("no inputs")[0] == "RuntimeError: out of memory"
    why = "it crashes: exit status 1: the GPU is lost to its process"
    assert supervised("dies")[0] == why


def test_the_time_is_limited():
    why, work = supervised("good, hangs", seconds=0.0)
    assert why is None and work.done == {}


def test_a_process_ends_where_its_result_cannot_be_kept(monkeypatch):
    started, former = [], subprocess.Popen

    def start(*arguments, **named):
        started.append(former(*arguments, **named))
        return started[-1]

    def keep(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(tuning.subprocess, "Popen", start)
    with pytest.raises(OSError, match="no space left"):
        supervised("good", keep=keep)
    assert [process.poll() for process in started] == [0]


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
    from fastformer.kernels.attention.configurations import Tiles

    monkeypatch.setattr(plan, "rows", lambda *_: [Tiles(16, 32, 4, 1)])


@pytest.fixture
def all_of(tmp_path):
    """all_of(arguments, timer, only): what is found for a call, by class."""

    def all_of(given, timer=by_itself, only=lambda candidate: True, op=OP, done=None):
        torch.save(given, tmp_path / "call")
        work, key = Work(timer, done=done or {}), (op, measurements.class_of(op, given))
        for job, candidates in tuning.jobs(work, key, str(tmp_path / "call")):
            chosen = [c for c in candidates if only(c)]
            work.done[job] = measure_job(work, job, chosen, str)
        return work.done

    return all_of


def flat(call):
    call()
    return 1.0


def test_the_jobs_of_a_call_are_its_kernels_and_then_the_op(one_row, all_of):
    done = all_of(attention(True, is_causal=True), tuning_worker.by_tiles)
    backward = ["attention dkdv", "attention dq", "attention short backward"]
    assert [kind for kind, _ in done] == [FORWARD, *backward, OP]
    forward = next(entry for (kind, _), entry in done.items() if kind == FORWARD)
    assert forward.us.keys() == {"32 32 4 1", "16 32 4 1"}
    last = next(entry for (kind, _), entry in done.items() if kind == OP)
    assert last.choice == "triton" and last.us.keys() == {"triton", "reference"}
    assert set(OPERATIONS[OP].alternatives) == set(last.dropped)  # they need a GPU
    assert all(reason.startswith("it fails: ") for reason in last.dropped.values())


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
def test_one_kernel_is_compared_to_the_best_separate_ones(one_row, all_of, monkeypatch, one_kernel):
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


def test_a_kernel_of_the_forward_is_timed_without_the_backward(one_row, all_of):
    counted = []

    def count(call):
        counted.append(launches(call))
        return 1.0

    all_of(attention(True), count, lambda c: "16" not in c.name and not c.baseline)
    # Each in three rounds. Delta is the fourth; or dq, dk and dv are one kernel of either form.
    assert counted == 3 * [1] + 6 * [4] + 3 * [4, 2, 2] + 3 * [4]


def few(**more):
    """The checked arguments of a call with one query."""
    query, key, value = (torch.randn(1, n, s, 16) for n, s in ((2, 1), (1, 300), (1, 300)))
    lengths = dict(key_lengths=torch.tensor([290]), enable_gqa=True)
    return dict(query=query, key=key, value=value, **lengths, **more)


def test_few_queries_take_the_faster_of_two_kernels(one_row, all_of, monkeypatch):
    """Here the one that is one launch, where the others are two."""
    from fastformer.kernels import launch, tuned

    given = few()
    done = all_of(backends.checked(OP, **given), launches, lambda c: not c.baseline)
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


def unsteady(*arguments):
    output, *rest = flash(*arguments)
    return output * (1 + torch.rand(()) * 1e-7), *rest


def without_nan(*arguments):
    output, *rest = flash(*arguments)
    return output.nan_to_num(), *rest


@pytest.fixture
def instead(one_row, monkeypatch):
    """instead(name=forward, ..): the alternatives of attention."""

    def instead(**forwards):
        backends._load(OP)
        others = {name: Alternative(one) for name, one in forwards.items()}
        record = OPERATIONS[OP]._replace(alternatives=others)
        monkeypatch.setitem(OPERATIONS, OP, record)
        monkeypatch.setattr(autograd, "_pairs", dict(autograd._pairs))
        autograd.pair(OP, record)

    return instead


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("options", [{"is_causal": True}, {"inside": True, "H": 2}], ids=str)
def test_torchs_own_op_is_a_candidate_with_our_backward(instead, all_of, gradient, options):
    instead(flash=flash, wrong=lambda *x: flash(*x, scale=1.01), unsteady=unsteady, nan=without_nan)
    done = all_of(attention(gradient, **options), flat, lambda c: "16" not in c.name)
    (last,) = (entry for (kind, _), entry in done.items() if kind == OP)
    assert last.us.keys() == {"triton", "flash", "reference"}
    assert "disagrees with the reference" in last.dropped["wrong"]
    assert last.dropped["unsteady"] == "the results of two runs differ"
    assert last.dropped["nan"] == "NaN reaches other elements of the output"


def test_a_run_writes_what_calls_then_take_and_goes_on_where_it_was(file, monkeypatch):
    """The process has all rows of tiles; the timer prefers programs of many queries."""
    from fastformer.kernels import tuned

    given, calls = attention(is_causal=True), {}
    tuning.add(calls, OP, given)
    result = tuning.measure(calls, file, 10.0, tuning_worker.by_tiles)
    assert result.done and result.file == file
    ((name, choice, us, _),) = result.rows
    assert name == " ".join(*calls) and choice == "triton" and us.keys() == {"triton", "reference"}
    assert "not torch (cuDNN): it fails: " in str(result)

    found = measurements.measurements(CPU)
    (entry,) = (e for (kind, _), e in found.items() if kind == FORWARD)
    assert entry.choice.startswith("64 32 ") and len(entry.us) > 3
    inputs, asked = {n: given[n] for n in ("query", "key", "value")}, []
    monkeypatch.setattr(tuned, "_ignore", asked.append)
    with backends.use_backend("triton"):
        said = ff.explain(OP, **inputs, is_causal=True)
        assert said.reason.startswith("measured: ") and said.reason.endswith(" x the reference")
        ff.scaled_dot_product_attention(**inputs, is_causal=True)
    assert asked == []

    monkeypatch.setattr(tuning, "supervise", lambda *_: pytest.fail("it is measured again"))
    before = file.read_text()
    assert tuning.measure(calls, file, 10.0) == result and file.read_text() == before


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

    def stand_in(work, key, path, deadline, keep):
        seen.append((key, torch.load(path, weights_only=False), work.timer))
        work.done[key] = Entry("triton", {"triton": 1.0}, {"x": "it lies"})
        keep(key, work.done[key])

    monkeypatch.setattr(tuning, "supervise", stand_in)
    monkeypatch.setattr(tuning, "NEEDED", "cpu")
    model, x = Model(), torch.randn(2, 5, 16)
    result = ff.tune(model, x, minutes=2)
    assert result.done and [row[1] for row in result.rows] == ["triton"] * 3
    assert len(measurements.measured(file, HERE)) == len(seen) == 3
    assert "    not x: it lies" in str(result)
    (op, _), given, timer = seen[0]
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


# ------------------------------------------------------------------------------- kernels in Gluon

ROW = "Gluon 16 32"


@pytest.fixture
def stand_in(monkeypatch):
    """A row of a kernel in Gluon, which is a row of the ordinary forward. Returns its label."""
    from fastformer.kernels import launch, tuned
    from fastformer.kernels.attention import plan
    from fastformer.kernels.attention.configurations import Tiles

    former = plan.Plan.tiles

    def tiles(self, name):
        found = former(self, name)
        return Tiles(16, 32, 4, 1) if isinstance(found, str) else found

    monkeypatch.setattr(plan, "rows", lambda *_: [])
    monkeypatch.setattr(plan, "HOPPER", {ROW: None})
    monkeypatch.setattr(plan, "obstacle", lambda *_: None)
    monkeypatch.setattr(plan, "ways", lambda rows, *_: dict(rows))
    monkeypatch.setattr(plan.Plan, "tiles", tiles)
    monkeypatch.setattr(tuning, "REPEATS", 5)
    monkeypatch.setattr(tuning, "ODD", ((71, 130),))
    launch.plans.clear()
    yield tuned.label(tuned.GluonOption(ROW))
    launch.plans.clear()


@pytest.fixture
def gluon(all_of):
    """gluon(): what is found for the forward; the row with fewer queries is faster."""
    x = torch.randn(1, 1, 136, 16)
    given = backends.checked(OP, query=x, key=x, value=x, key_lengths=torch.tensor([133]))

    def by_rows(call):
        return 1 / tuning_worker.by_tiles(call)

    def gluon():
        found = all_of(given, by_rows)
        return next(entry for (kind, _), entry in found.items() if kind == FORWARD)

    return gluon


@pytest.mark.parametrize(
    "rows, reason",
    [
        (71, None),
        (72, "it writes outside of a tensor (71 queries, 130 keys, NaN around all tensors)"),
        # The memory may be that of the call before, with the right result in it.
        (70, "output 0 disagrees with the reference"),
    ],
)
def test_a_kernel_that_writes_a_row_too_many_or_too_few(
    stand_in, gluon, interpreted, monkeypatch, rows, reason
):
    """The stand-in gets another number of rows at 71 queries."""
    from fastformer.kernels.launch import Launch

    former = Launch.__init__

    def faulty(self, kernel, grid, arguments, *rest):
        given = arguments.get("sizes")
        if arguments["tile"].rows.value == 16 and given.queries == 71:
            arguments = arguments | dict(sizes=given._replace(queries=rows))
        former(self, kernel, grid, arguments, *rest)

    monkeypatch.setattr(Launch, "__init__", faulty)
    found = gluon()
    assert found.choice is not None
    if reason is None:
        assert found.choice == stand_in and found.dropped == {} and len(found.us) == 2
    else:
        assert reason in found.dropped[stand_in] and stand_in not in found.us


def test_a_kernel_with_another_bit(stand_in, gluon, monkeypatch):
    """In one launch of many."""
    former, count = tuning.Call.forward, []

    def faulty(self):
        output = former(self)
        count.append(output)
        if len(count) == 5:  # after that of the keys, and three others
            output[0].view(torch.int32)[0, 0, 0, 0] ^= 1
        return output

    monkeypatch.setattr(tuning.Call, "forward", faulty)
    assert gluon().dropped[stand_in] == "5 runs give different bits"


class Memory(NamedTuple):
    X: Any
    Y: Any


class Sizes(NamedTuple):
    n: Any
    step: Any


@triton.jit
def doubled(memory, sizes):
    o = tl.arange(0, 32) * sizes.step
    inside = tl.arange(0, 32) < sizes.n
    tl.store(memory.Y + o, 2 * tl.load(memory.X + o, mask=inside), mask=inside)


def scaled(n, step, x, y):
    """Launch y[i step] = 2 x[i step] for i < n."""
    from fastformer.kernels.launch import Launch

    Launch(doubled, (1,), dict(sizes=Sizes(n, step)), 1, groups=dict(memory=Memory))((x, y))


@pytest.fixture
def interpreted():
    from fastformer.kernels.common import INTERPRETED

    if not INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    from benchmarks.proof import memory_check

    with memory_check.unchecked():  # the kernels read and write outside
        yield


@pytest.mark.parametrize(
    "n, step, right", [(20, 1, True), (21, 1, False), (7, 3, True), (10, 2, False)]
)
def test_fences(interpreted, n, step, right):
    """Of 20 numbers, or 7 of these, every third."""
    from fastformer.kernels import tuned

    x, y = torch.arange(64.0), torch.zeros(64)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    with tuned.fenced() as found:
        assert torch.empty(3).isnan().all()
        scaled(n, step, *(t[:20] if step == 1 else t[:20:3] for t in (x, y)))
    assert found == ([] if right else ["it writes outside of a tensor"])
    assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before, warn_only=True)
    if right:
        written = (x < 20) & (x % step == 0)
        assert torch.equal(y, torch.where(written, 2 * x, 0.0))


def test_what_is_read_outside_is_nan(interpreted):
    from fastformer.kernels import tuned

    x, y = torch.arange(64.0), torch.zeros(64)
    with tuned.fenced() as found:
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
    from fastformer.kernels import tuned
    from fastformer.kernels.launch import Launch

    given = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "__call__", lambda launch, *pointers: given.extend(pointers))
        with tuned.fenced() as found:
            Launch.__call__(None, x, (x, 3))
    assert found == []
    one, (two, number) = given
    assert one is two and number == 3 and one.dtype == x.dtype
    assert one.stride() == x.stride() or not x.numel()
    assert (one.data_ptr() - x.data_ptr()) % 16 == 0
    assert torch.equal(one.expand(x.shape), x)


def test_a_measurement_holds_for_the_sources_that_were_measured(file, stand_in, caplog):
    from fastformer.kernels import launch, tuned

    given, calls = attention(key_lengths=torch.tensor([20])), {}
    tuning.add(calls, OP, given)

    def rows_of_tile():
        launch.plans.clear()
        with ff.use_backend("triton"), torch.no_grad():
            backends.run(OP, **given)
        (made,) = launch.plans.values()
        return next(x.rows.value for x in made.forward._arguments if hasattr(x, "rows"))

    with tuned.forced({}) as asked:
        rows_of_tile()
    (case,) = (question.case for question in asked if question.kernel == FORWARD)
    old, shipped = stand_in[:-8] + "0" * 8, Entry("triton", {"triton": 2.0}, {})
    for name, rows in ((stand_in, 16), (old, 32)):
        found = {(FORWARD, case): Entry(name, {name: 1.0}, {}), ("rms_norm", "a"): shipped}
        found |= dict.fromkeys(calls, shipped)
        measurements.write(file, HERE, found)
        for _ in range(2):
            backends.measure_again()
            with caplog.at_level(logging.WARNING, logger="fastformer"):
                assert rows_of_tile() == rows
        left = [" ".join(*calls)] if name is old else []
        assert [row[0] for row in tuning.planned(calls, file, CPU).rows] == left
    (record,) = caplog.records  # once
    said = record.getMessage()
    assert repr(old) in said and FORWARD in said and "its kernel has changed since" in said


def test_what_is_measured_again(file, stand_in):
    """All that was measured with other sources, chosen or not, and the choices of these ops."""
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
    left = tuning.known(file, HERE)
    assert left.keys() == {(FORWARD, "c"), ("attention dq", "a"), ("layer_norm", "a")}


def test_a_kernel_that_is_dropped_is_logged(file, monkeypatch, caplog):
    name, calls = "Gluon 16 32 @01234567", {}
    tuning.add(calls, OP, attention())
    why = "it hangs: it takes more than 180 s"
    found = Entry("x", {"x": 1.0, "Gluon tie @01234567": 1.0}, {name: why, "tile": "it fails"})
    found.dropped["Gluon tie @01234567"] = "it ties with x, which is kept"
    monkeypatch.setattr(tuning, "supervise", lambda work, key, path, deadline, keep: keep(A, found))
    with caplog.at_level(logging.WARNING, logger="fastformer"):
        tuning.measure(calls, file, 1.0)
    line = f"{name} is not taken for {FORWARD}, a: {why}"
    assert [r.getMessage() for r in caplog.records] == [line]


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
