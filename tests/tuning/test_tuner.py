"""What is measured, and what is dropped: by timers that the tests supply, and candidates that lie,
tie, crash and hang.
"""

import contextlib

import pytest
import torch
import tuning_worker
from tuning_worker import CANDIDATES, by_itself

import fastformer as ff
from fastformer.dispatch import autograd, backends, measurements, workloads
from fastformer.dispatch.operation import OPERATIONS, Alternative
from fastformer.dispatch.workloads import workload
from fastformer.tuning import measuring, tuner
from fastformer.tuning.measuring import Candidate, Job, Work, measure, supervise

CPU = torch.device("cpu")
HERE = dict(gpu="GPU A", driver="570.1", torch="2.13.0", triton="3.7.1", fastformer="0.1.0")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The file that is read; the machine is HERE, and its GPU is the CPU."""
    path = tmp_path / "tuning.json"
    monkeypatch.setenv("FASTFORMER_TUNING", str(path))
    monkeypatch.setattr(measurements, "machine", lambda device: HERE)
    backends.measure_again()
    yield path
    monkeypatch.undo()
    backends.measure_again()


def measured(*names, failed=()):
    begun = []
    job = Job(("attention forward", "a"), [CANDIDATES[name] for name in names])
    return measure(job, by_itself, dict(failed), begun.append), begun


# -------------------------------------------------------------------------------------- measuring


def test_the_fastest_is_chosen():
    entry, begun = measured("good", "slow", "better")
    assert entry == ("better", {"good": 50.0, "slow": 80.0, "better": 40.0}, {})
    assert begun == ["good", "slow", "better"] * (1 + measuring.ROUNDS)


def test_a_tie_keeps_what_is_shipped():
    entry, _ = measured("good", "tie")
    assert entry.choice == "good"
    assert entry.dropped == {"tie": "it ties with good, which is kept"}


def test_candidates_that_lie_or_fail_are_dropped_with_the_reason():
    entry, _ = measured("good", "lies", "fails", "fails late")
    assert entry.choice == "good" and list(entry.us) == ["good"]
    assert entry.dropped == {
        "lies": "it disagrees with the reference",
        "fails": "it fails: RuntimeError: out of resources",
        "fails late": "it fails: RuntimeError: later",
    }


def test_what_is_shipped_may_be_dropped_too():
    assert measured("lies", "slow")[0].choice == "slow"
    assert measured("lies", "fails")[0].choice is None


def test_a_baseline_is_never_chosen():
    entry, _ = measured("good", "baseline")
    assert entry.choice == "good" and entry.us["baseline"] == 1.0


def test_a_candidate_that_has_failed_is_not_tried_again():
    entry, begun = measured("good", "better", failed={"better": "it crashes"})
    assert entry.choice == "good" and "better" not in begun
    assert entry.dropped == {"better": "it crashes"}


def test_candidates_are_timed_in_turn_and_by_their_median():
    times = iter([3.0, 9.0, 1.0, 9.0, 2.0, 2.0])
    pair = [Candidate(name, lambda: next(times)) for name in "ab"]
    entry = measure(Job(("attention forward", "a"), pair), by_itself, {}, lambda name: None)
    assert entry.us == {"a": 2e6, "b": 9e6}


def test_a_candidate_runs_in_its_context():
    inside = []

    @contextlib.contextmanager
    def context():
        inside.append(True)
        yield
        inside.pop()

    candidate = Candidate(
        "a", lambda: float(len(inside)), lambda: str(not inside)[:0] or None, context
    )
    entry = measure(Job(("attention forward", "a"), [candidate]), by_itself, {}, lambda name: None)
    assert entry.us == {"a": 1e6} and not inside


class Clock:
    """What `device_seconds` asks of torch, on a GPU on which everything takes a second."""

    def __init__(self):
        self.done, self.now = [], 0.0
        self.cuda, self.int8 = self, torch.int8

    def run(self, what):
        self.done.append(what)
        self.now += 1.0
        return self.now

    def empty(self, size, dtype, device):
        assert (size, dtype, device) == (measuring.CACHE_BYTES, torch.int8, "cuda")
        return self

    def zero_(self):
        self.run("flush")

    def synchronize(self):
        self.run("wait")

    def _sleep(self, cycles):
        assert cycles > 0
        self.run("sleep")

    def Event(self, enable_timing):
        clock = self

        class Event:
            def record(self):
                self.at = clock.run("event")

            def elapsed_time(self, other):
                return 1000 * (other.at - self.at)

        return Event()


def test_the_time_of_a_gpu_is_between_two_events_with_a_cold_cache(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(measuring, "torch", clock)
    assert measuring.device_seconds(lambda: clock.run("call")) == 2.0  # a call, and an event
    assert clock.done[:4] == ["call", "wait", "call", "wait"] and clock.done[-1] == "wait"
    rounds = clock.done[4:-1]
    one = ["flush", "sleep", "event", "call", "event"]
    assert rounds == one * (len(rounds) // 5)
    assert measuring.LEAST <= len(rounds) // 5 <= measuring.MOST


@pytest.mark.gpu
def test_a_gpu_is_measured(file, monkeypatch):
    monkeypatch.undo()  # the machine is this one
    monkeypatch.setenv("FASTFORMER_TUNING", str(file))
    device = tuner.gpu()
    wanted = [
        workload("layer_norm", "bfloat16", dict(M=4096, N=1024), weight=True, bias=True),
        workload(OP, "bfloat16", dict(B=4, H=8, G=8, Sq=512, Sk=512, D=64, Dv=64), causal=True),
    ]
    result = tuner.measure(wanted, device, file, 8.0, progress=False)
    assert result.done and all(choice for _, choice, *_ in result.rows), str(result)
    assert any(name.startswith("torch") for _, _, us, _ in result.rows for name in us)
    for one in wanted:
        said = ff.explain(one.op, **one.arguments(device))
        assert said.reason.startswith("measured: "), said


# ------------------------------------------------------------------------------------- the worker


def supervised(groups, jobs=tuning_worker.jobs, silence=60.0, keep=lambda *_: None, **known):
    kept, steps = {}, []

    def keep_all(key, entry):
        kept[key[1]] = entry
        keep(key, entry)

    work = Work(groups, jobs, by_itself, **known)
    done = supervise(work, 600.0, keep_all, steps.append, silence)
    return done, kept, work, steps


def test_candidates_that_crash_or_hang_are_dropped_and_the_others_measured():
    groups = ["a, good, crashes, better", "b, good, hangs, better", "no inputs, good"]
    groups += ["dies, good", "c, good, better", "d, good, better"]
    known = {("attention forward", "c"): measurements.Entry("good", {"good": 1.0}, {})}
    done, kept, work, steps = supervised(groups, silence=10.0, done=known)
    assert done
    assert {case: entry.choice for case, entry in kept.items()} == dict.fromkeys("abd", "better")
    assert [kept[workload].dropped for workload in "abd"] == [
        {"crashes": "it crashes: SIGABRT: the kernel is gone"},
        {"hangs": "it hangs: nothing was heard for 10 s"},
        {},
    ]
    assert work.skipped == {
        2: "RuntimeError: out of memory",
        3: "it crashes: exit status 1: the GPU is lost to its process",
    }
    assert sorted(set(steps)) == list(range(6))


def test_the_time_is_limited(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(measuring.time, "monotonic", lambda: clock[0])

    def keep(*_):
        clock[0] += 250.0

    groups = [f"g{i}" for i in range(1000)]
    done, kept, _, _ = supervised(groups, tuning_worker.slow_jobs, keep=keep)
    assert not done and len(kept) == 3


def test_a_worker_ends_where_its_result_cannot_be_kept(monkeypatch):
    messages = [["ready"], ["group", 0], ["entry", "attention forward", "a", "x", {"x": 1.0}, {}]]
    ended = []

    class Worker:
        def __init__(self, work):
            pass

        def next(self, seconds):
            return messages.pop(0)

        def end(self):
            ended.append(True)

    def keep(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(measuring, "_Worker", Worker)
    with pytest.raises(OSError, match="no space left"):
        supervised(["a, good"], keep=keep)
    assert ended == [True]


def test_a_worker_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setattr(measuring.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="does not start: exit status 1"):
        supervised(["a, good"])


# ------------------------------------------------------------------------------------- comparing


def test_the_policy():
    exact = [torch.linspace(-1, 1, 100, dtype=torch.float64)]
    half = [exact[0].half()]
    assert tuner.disagreement(half, exact, half, 1) is None
    off = [half[0] + 0.01]
    assert "output 0 disagrees" in tuner.disagreement(off, exact, half, 1)
    assert "gradient 0 disagrees" in tuner.disagreement(off, exact, half, 0)
    error = (half[0].double() - exact[0]).abs().max()
    edge = [(exact[0] + 2.9 * error).half()]  # three times the error, in a gradient alone
    assert tuner.disagreement(edge, exact, half, 0) is None
    assert tuner.disagreement(edge, exact, half, 1) is not None
    single = [exact[0].float()]
    assert tuner.disagreement(single, exact, single, 1) is None
    assert "disagrees" in tuner.disagreement([single[0] * 1.0001], exact, single, 1)
    eager = [single[0] * 1.00002]  # whose own error is past the policy, and excuses none
    assert "disagrees" in tuner.disagreement(eager, exact, eager, 1)
    nan = [single[0] * float("nan")]
    assert "disagrees" in tuner.disagreement(nan, exact, single, 1)
    assert "is torch.float32 [100]; expected torch.float16" in tuner.disagreement(
        single, exact, half, 1
    )
    assert "expected torch.float32 [100]" in tuner.disagreement([single[0][:3]], exact, single, 1)


OP = "scaled_dot_product_attention"


FEW = dict(B=1, H=2, G=1, Sq=1, Sk=300, D=16, Dv=16)


def attention(gradient=False, H=1, G=None, **options):
    sizes = dict(B=1, H=H, G=G or H, Sq=24, Sk=24, D=16, Dv=16)
    return workload(OP, "float32", sizes, gradient, **options)


@pytest.fixture
def one_row(monkeypatch):
    """Of the other tiles of attention one alone is a candidate, and no other kernel."""
    plan = pytest.importorskip("fastformer.kernels.attention.plan")
    from fastformer.kernels.attention.configurations import Tiles

    monkeypatch.setattr(plan, "rows", lambda *_: [Tiles(16, 32, 4, 1)])


def all_of(workload, timer=by_itself, only=lambda candidate: True):
    done = {}
    for job in tuner.jobs_on(CPU)(workload, done):
        chosen = [c for c in job.candidates if only(c)]
        done[job.key] = measure(job._replace(candidates=chosen), timer, {}, lambda name: None)
    return done


def flat(call):
    call()
    return 1.0


def test_the_jobs_of_a_call_are_its_kernels_and_then_the_op(one_row):
    done = all_of(attention(True, causal=True), tuning_worker.by_tiles)
    assert [kind for kind, _ in done] == [
        "attention forward",
        "attention dkdv",
        "attention dq",
        "scaled_dot_product_attention",
    ]
    assert {entry.choice for (kind, _), entry in done.items() if "attention " in kind}
    forward = next(entry for (kind, _), entry in done.items() if kind == "attention forward")
    assert forward.us.keys() == {"32 32 4 1", "16 32 4 1"}
    (last,) = (entry for (kind, workload), entry in done.items() if kind == OP)
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


def test_a_kernel_of_the_forward_is_timed_without_the_backward(one_row):
    counted = []

    def count(call):
        counted.append(launches(call))
        return 1.0

    done = all_of(attention(True), count, lambda c: "16" not in c.name and not c.baseline)
    assert [kind for kind, _ in done] == [f"attention {x}" for x in ("forward", "dkdv", "dq")] + [
        OP
    ]
    assert counted == 3 * [1] + 9 * [4]  # each in three rounds; delta is the fourth


def test_few_queries_take_the_faster_of_two_kernels(one_row, monkeypatch):
    """Here the one that is one launch, where the others are two."""
    from fastformer.kernels import launch, tuned

    one = workload(OP, "float32", FEW, lengths=True)
    done = all_of(one, launches, lambda c: not c.baseline)
    assert [kind for kind, _ in done] == ["attention decode", "attention split-KV", OP]
    (key,) = (key for key in done if key[0] == "attention split-KV")
    assert done[key].choice == "forward" and done[key].us == {"split": 2e6, "forward": 1e6}

    given = one.arguments(CPU)
    with backends.use_backend("triton"):
        want = ff.scaled_dot_product_attention(**given)
        assert "split over programs" in ff.explain(OP, **given).reason
        monkeypatch.setattr(tuned, "source", lambda device: {key: "forward"})
        launch.plans.clear()
        assert launches(lambda: ff.scaled_dot_product_attention(**given)) == 1
        torch.testing.assert_close(ff.scaled_dot_product_attention(**given), want)
        assert "split over programs" not in ff.explain(OP, **given).reason


def test_keys_in_pages_have_a_class_of_their_own(one_row):
    one = workload("paged_attention", "float32", FEW | dict(Sk=256, page=32), lengths=True)
    done = all_of(one, flat)
    assert [kind for kind, _ in done] == ["attention decode", "paged_attention"]
    (tiles,) = (key for kind, key in done if kind == "attention decode")
    assert tiles.endswith("lengths fold_scale page=32")


def test_the_best_tiles_of_a_kernel_are_measured(one_row):
    one = attention()

    def narrow(call):
        return 1 / tuning_worker.by_tiles(call)

    done = all_of(one, narrow)
    (choice,) = (entry.choice for (kind, _), entry in done.items() if kind == "attention forward")
    assert choice == "16 32 4 1"
    assert list(tuner.jobs_on(CPU)(one, done)) == []


def flash(query, key, value, *rest, scale=1.0):
    """torch's own op on a CPU in the place of those of a GPU."""
    attention = ff.description.unpack(rest[:-1])
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = op(query, key, value, 0.0, attention.is_causal, scale=attention.scale)
    return output * scale, lse.contiguous(), query.new_empty(0)


def unsteady(*arguments):
    output, *rest = flash(*arguments)
    return output * (1 + torch.rand(()) * 1e-7), *rest


def without_nan(*arguments):
    output, *rest = flash(*arguments)
    return output.nan_to_num(), *rest


@pytest.fixture
def ways(one_row, monkeypatch):
    """ways(name=forward, ..): the alternatives of attention."""
    op = OP

    def ways(**forwards):
        backends._load(op)
        others = {name: Alternative(one) for name, one in forwards.items()}
        monkeypatch.setitem(OPERATIONS, op, OPERATIONS[op]._replace(alternatives=others))
        monkeypatch.setattr(autograd, "_pairs", dict(autograd._pairs))
        autograd.pair(op, others)

    return ways


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("options", [{"causal": True}, {"heads_inside": True, "H": 2}], ids=str)
def test_torchs_own_op_is_a_candidate_with_our_backward(ways, gradient, options):
    ways(flash=flash, wrong=lambda *x: flash(*x, scale=1.01), unsteady=unsteady, nan=without_nan)
    done = all_of(attention(gradient, **options), flat, lambda c: "16" not in c.name)
    last = done[OP, attention(gradient, **options).key]
    assert last.us.keys() == {"triton", "flash", "reference"}
    assert "disagrees with the reference" in last.dropped["wrong"]
    assert last.dropped["unsteady"] == "the results of two runs differ"
    assert last.dropped["nan"] == "NaN reaches other elements of the output"


@pytest.mark.parametrize(
    "options",
    [{"dropout": True}, {"mask": "keys"}, {"bias": "all"}, {"lengths": True}, {"alibi": True}],
    ids=str,
)
def test_torchs_own_op_is_none_where_it_computes_something_else(ways, options):
    ways(flash=flash)
    done = all_of(attention(**options), flat, lambda c: "16" not in c.name)
    assert done[OP, attention(**options).key].us.keys() == {"triton", "reference"}


# ------------------------------------------------------------------------------------ in a process


def test_a_run_writes_what_calls_then_take_and_goes_on_where_it_was(file, one_row, monkeypatch):
    """The worker has all rows of tiles; the timer prefers programs of many queries."""
    from fastformer.kernels import tuned

    monkeypatch.undo()  # of one_row
    monkeypatch.setenv("FASTFORMER_TUNING", str(file))
    monkeypatch.setattr(measurements, "machine", lambda device: HERE)
    one = attention(causal=True)
    result = tuner.measure([one], CPU, file, 10.0, tuning_worker.by_tiles, progress=False)
    assert result.done and result.file == file
    ((name, choice, us, _),) = result.rows
    assert name == str(one) and choice == "triton" and us.keys() == {"triton", "reference"}
    assert "not torch (cuDNN): it fails: " in str(result)

    found = measurements.measurements(CPU)
    (entry,) = (e for (kind, _), e in found.items() if kind == "attention forward")
    assert entry.choice.startswith("64 32 ") and len(entry.us) > 3
    with backends.observe(), backends.use_backend("triton"):
        said = ff.explain(OP, **one.arguments(CPU))
    assert said.reason.startswith("measured: ") and said.reason.endswith(" x the reference")
    asked = []
    monkeypatch.setattr(tuned, "_ignore", asked.append)
    with backends.use_backend("triton"):
        ff.scaled_dot_product_attention(**one.arguments(CPU))
    assert asked == []

    monkeypatch.setattr(measuring, "measure", lambda *_: pytest.fail("it is measured again"))
    before = file.read_text()
    again = tuner.measure([one], CPU, file, 10.0, by_itself, progress=False)
    assert again == result and file.read_text() == before


# ---------------------------------------------------------------------------------------- tune


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = ff.LayerNorm(16)
        self.attention = ff.MultiHeadedAttention(2, 16)
        self.layer = ff.PositionwiseFeedForward(16, 32)

    def forward(self, x):
        x = self.norm(x)
        return self.layer(self.attention(x, x, x))


def calls(result):
    names = (row[0] for row in result.rows)
    return {(name.split()[0], name.rpartition(", ")[2]) for name in names}


def test_tune_records_the_calls_of_a_step():
    model, x = Model(), torch.randn(2, 5, 16)
    ops = "layer_norm", OP, "feed_forward"
    result = ff.tune(model, x, dry_run=True)
    assert not result.done and all(row[1:] == ("", {}, {}) for row in result.rows)
    assert calls(result) == {(op, "forward + backward") for op in ops}
    assert str(result) == "\n".join(row[0] for row in result.rows)
    assert "dropout" in str(result)
    with torch.no_grad():
        result = ff.tune(model.eval(), x, dry_run=True)
    assert calls(result) == {(op, "forward") for op in ops}
    assert "dropout" not in str(result)


def test_tune_records_a_class_once():
    twice = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.LayerNorm(8))
    ff.accelerate(twice)
    assert len(ff.tune(twice, torch.randn(3, 8), dry_run=True).rows) == 1


def test_a_dry_run_leaves_out_what_is_measured(file):
    model, x = Model(), torch.randn(2, 5, 16)
    names = [row[0] for row in ff.tune(model, x, dry_run=True).rows]
    first = case_of("layer_norm", x.requires_grad_(), 16, model.norm.weight, model.norm.bias)
    assert names[0] == str(first)
    entry = measurements.Entry("triton", {"triton": 1.0}, {})
    measurements.write(file, HERE, {("layer_norm", first.key): entry})
    assert [row[0] for row in ff.tune(model, x, dry_run=True).rows] == names[1:]


def test_tune_measures_what_it_recorded(file, monkeypatch):
    """All but the GPU: the device, and the process that measures."""
    seen = []

    def supervise(work, seconds, keep, step):
        seen.append((work, seconds))
        for i, one in enumerate(work.groups):
            step(i)
            work.done[one.op, one.key] = measurements.Entry(
                "triton", {"triton": 1.0}, {"x": "it lies"}
            )
            keep((one.op, one.key), work.done[one.op, one.key])
        return True

    monkeypatch.setattr(tuner, "supervise", supervise)
    monkeypatch.setattr(tuner, "NEEDED", "cpu")
    result = ff.tune(Model(), torch.randn(2, 5, 16), minutes=2)
    ((work, seconds),) = seen
    assert seconds == 120 and work.timer is measuring.device_seconds
    assert result.done and [row[1] for row in result.rows] == ["triton"] * len(work.groups)
    assert len(measurements.measured(file, HERE)) == len(work.groups) == len(result.rows)
    assert "    not x: it lies" in str(result)


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
    monkeypatch.setattr(tuner, "NEEDED", "cpu")
    with pytest.raises(RuntimeError, match="FASTFORMER_TUNING is off"):
        ff.tune(Model(), x)


def test_no_call_measures_by_itself(file, monkeypatch):
    monkeypatch.setattr(measuring, "_Worker", lambda work: pytest.fail("a worker starts"))
    for backend in ("auto", "triton"):
        with backends.use_backend(backend):
            ff.layer_norm(torch.randn(3, 8), 8)
    assert not file.exists()


# ------------------------------------------------------------------------------------ workloads


def case_of(op, *args, **kwargs):
    found = []
    with backends.observe(on_call=lambda op, arguments: found.append(workloads.of(op, arguments))):
        OPERATIONS[op].contract(*args, **kwargs)
    return found[-1]


ROWS, HEADS = dict(M=5, N=24), dict(B=2, H=2, G=1, Sq=24, Sk=20, D=16, Dv=8)
PAGES = dict(B=1, H=2, G=1, Sq=3, Sk=96, D=16, Dv=8, page=32)
EVERY = [
    attention(True, 2, heads_inside=True, causal=True, bottom_right=True, left=8, right=4),
    attention(True, mask="keys", bias="all", bias_gradient=True, dropout=True),
    attention(mask="all", bias="keys", softcap=True, sinks=True),
    attention(True, lengths=True, alibi=True, bias="rows"),
    workload(OP, "float16", HEADS),
    workload("packed_attention", "float32", HEADS, True, causal=True, sinks=True),
    workload(
        "packed_attention", "float32", HEADS, True,
        bias="keys", bias_gradient=True, alibi=True, softcap=True,
    ),
    workload("paged_attention", "bfloat16", PAGES, lengths=True, causal=True, bottom_right=True),
    workload(
        "paged_attention", "float32", PAGES | dict(B=2),
        lengths=True, alibi=True, mask="keys", bias="all", right=4,
    ),
    workload("layer_norm", "bfloat16", ROWS, weight=True, bias=True),
    workload("layer_norm", "float32", ROWS, unbiased=True),
    workload("layer_norm", "float16", ROWS, True, weight=True, bias=True, weight_dtype="float32"),
    workload("rms_norm", "float32", ROWS, True, weight=True),
    workload("dropout_add_layer_norm", "float32", ROWS, True, weight=True, bias=True, dropout=True),
    workload("dropout_add_rms_norm", "float32", ROWS, True, weight=True, dropout=True),
    workload(
        "feed_forward", "float32", dict(M=5, d=8, F=12, out=6), True,
        activation="gelu", b_1=True, b_2=True, dropout=True,
    ),
    workload("geglu", "float32", dict(M=5, d=8, F=12, out=6), True, b_1=True, dropout=True),
    workload("swiglu", "float16", dict(M=5, d=8, F=12, out=6), b_2=True),
    workload("gated_activation", "float32", dict(M=5, F=12), True, activation="gelu"),
    workload("cross_entropy", "float32", dict(M=5, V=9), True, reduction="mean"),
    workload("cross_entropy", "float32", dict(M=5, V=9), True, smoothing="kl", reduction="sum"),
    workload("embed", "float32", dict(M=10, S=5, N=8, V=9), True, positional=True, dropout=True),
    workload("embed", "bfloat16", dict(M=10, S=5, N=8, V=9)),
    workload("rotary_embedding", "bfloat16", dict(B=2, H=3, G=2, S=5, D=8, R=4), True, norm=True),
    workload(
        "rotary_embedding", "float32", dict(B=2, H=3, G=3, S=5, D=8, R=8),
        interleaved=True, heads_inside=True,
    ),
    workload(
        "linear_cross_entropy", "float32", dict(M=5, N=8, V=9), True,
        reduction="mean", bias=True,
    ),
]  # fmt: skip


@pytest.mark.parametrize("one", EVERY, ids=str)
def test_a_case_makes_a_call_of_its_own_kind(one):
    assert case_of(one.op, **one.arguments(CPU)) == one
    assert case_of(one.op, **one.small().arguments(CPU, 1)) == one.small()
    assert one.op in measurements.kinds()


def test_every_op_of_a_case_is_there():
    assert {one.op for one in EVERY} == set(OPERATIONS)


def test_calls_that_are_not_measured():
    x = torch.zeros(0, 8)
    assert case_of("layer_norm", x, 8) is None
    assert case_of("layer_norm", x.new_zeros(3, 8).double(), 8) is None


@pytest.mark.parametrize("one", EVERY, ids=str)
def test_the_reference_of_a_case_meets_the_policy(one):
    call = tuner._Call(one, CPU)
    _, exact, eager, outputs = call.small(one)
    assert tuner.disagreement(eager, exact, eager, outputs) is None
    assert outputs == 1 + one.op.startswith(("dropout_add", "rotary"))
    assert all(x.dtype == torch.float64 for x in exact)
    assert len(exact) > outputs or not one.gradient


def test_the_standard_cases_are_calls():
    wanted = tuner.standard()
    assert len({(one.op, one.key) for one in wanted}) == len(wanted)
    for op in {one.op for one in wanted}:
        last = next(one for one in reversed(wanted) if one.op == op)
        few = {name: min(n, 16) for name, n in last.sizes}
        small = last._replace(sizes=tuple(few.items()))
        assert case_of(op, **small.arguments(CPU)) == small
