"""What is measured, and what is dropped, by times that the tests supply."""

import functools

import pytest
import torch

pytest.importorskip("triton")
import triton.testing
from tuning_worker import CPU, FORWARD, HERE, OP, flat, launches

import fastformer as ff
from fastformer import environment, numerics, tuning
from fastformer.dispatch import backends, measurements
from fastformer.dispatch.measurements import Entry
from fastformer.dispatch.operation import call_name

pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning"
)


# ------------------------------------------------------------------------------------ the choice


def fail(message):
    raise RuntimeError(message)


# By backend, in a GPU that is not there: the results of a call, and its milliseconds.
WAYS = {
    "good": (lambda x: x, 0.050),
    "better": (lambda x: x, 0.040),
    "tie": (lambda x: x, 0.0495),
    "reference": (lambda x: x, 0.001),
    "lies": (lambda x: 1.01 * x, 0.001),
    "unsteady": (lambda x: x * (1 + 1e-7 * torch.rand(())), 0.001),
    "fails": (lambda x: fail("out of resources\nand more"), 0.001),
}


@pytest.fixture
def compared(monkeypatch):
    """compared(names): the entry of these ways, and which of them ran, in their order."""

    def compared(*names):
        ran = []

        def results(op, arguments, backend):
            ran.append(backend)
            return [WAYS[backend][0](arguments["x"])]

        monkeypatch.setattr(tuning, "results", results)
        bench = lambda call, return_mode: call() and WAYS[call.args[-1]][1]  # noqa: E731
        monkeypatch.setattr(triton.testing, "do_bench", bench)
        given = dict(x=torch.linspace(-1, 1, 100))
        return tuning.compare(OP, given, {name: (name, {}) for name in names}), ran

    return compared


def test_the_fastest_is_chosen_and_a_tie_keeps_what_is_shipped(compared):
    assert compared("good", "better")[0] == ("better", {"good": 50.0, "better": 40.0}, {})
    assert compared("good", "tie")[0] == ("good", {"good": 50.0, "tie": 49.5}, {})
    assert compared("good", "reference")[0] == ("good", {"good": 50.0, "reference": 1.0}, {})


def test_candidates_that_lie_or_fail_are_dropped_with_the_reason(compared):
    entry, ran = compared("good", "lies", "unsteady", "fails", "reference")
    assert entry.choice == "good" and list(entry.us) == ["good", "reference"]
    lies = entry.dropped.pop("lies")
    assert lies.startswith("output 0 disagrees with the reference")
    assert entry.dropped == {
        "unsteady": f"{tuning.REPEATS} runs give different bits",
        "fails": "it fails: RuntimeError: out of resources",
    }
    assert ran.count("good") == 2 + tuning.REPEATS  # with a part of the call, and with the timer
    assert compared("lies", "good")[0].choice == "good"
    assert compared("lies", "fails")[0].choice is None


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
    given = {}
    for name, tokens in (("query", Sq), ("key", 24), ("value", 24)):
        x = torch.randn(1, tokens, H, 16).transpose(1, 2)
        given[name] = (x if inside else x.contiguous()).requires_grad_(gradient)
    return backends.checked(OP, **given, **options)


@pytest.fixture
def one_row(monkeypatch):
    """Of the other tiles of attention one alone is a candidate, and no other kernel."""
    plan = pytest.importorskip("fastformer.kernels.attention.plan")
    from fastformer.kernels.attention.configurations import AttentionTiles

    monkeypatch.setattr(plan, "rows", lambda *_: [AttentionTiles(16, 32, 4, 1)])


@pytest.fixture
def measured(monkeypatch, file):
    """measured(arguments): what is found for a call, by kernel and op."""

    def measured(given, timer=flat):
        monkeypatch.setattr(triton.testing, "do_bench", lambda call, return_mode: timer(call))
        name = call_name(OP, given)
        file.unlink(missing_ok=True)
        tuning.worker(name, OP, given, file, HERE)
        found = measurements.read(file, HERE)
        assert name in found
        return {OP if key == name else key.partition(": ")[0]: x for key, x in found.items()}

    return measured


@pytest.mark.parametrize("one_kernel", [False, True])
def test_the_jobs_of_a_call_are_its_kernels_and_then_the_op(one_row, measured, one_kernel):
    """dK/dV and dQ are measured if they are faster than one kernel."""
    sign = 1 if one_kernel else -1
    done = measured(attention(True, is_causal=True), lambda call: 20 + sign * launches(call))
    kernels = {FORWARD, "attention short backward", OP}
    assert done.keys() == kernels | (set() if one_kernel else {"attention dkdv", "attention dq"})
    short = done["attention short backward"]
    assert short.us.keys() == {"separate kernels", "tiny", "scratch"}
    assert (short.choice == "separate kernels") != one_kernel
    assert done[FORWARD].us.keys() == {"32 32 4 1", "16 32 4 1"}
    assert done[OP].choice == "triton" and done[OP].us.keys() == {"triton", "reference"}


def test_few_queries_take_the_faster_of_two_kernels(one_row, measured, file):
    """Here the one that is one launch, where the others are two."""
    query, key, value = (torch.randn(1, n, s, 16) for n, s in ((2, 1), (1, 300), (1, 300)))
    given = dict(query=query, key=key, value=value, enable_gqa=True)
    given |= dict(key_lengths=torch.tensor([290]))
    done = measured(backends.checked(OP, **given), launches)
    way = done["attention split-KV"]
    assert way.choice == "forward" and way.us == {"split": 2e3, "forward": 1e3}
    assert FORWARD in done and done[OP].us["triton"] == 1e3
    with backends.use_backend("triton"):
        call = functools.partial(ff.scaled_dot_product_attention, **given)
        backends.measure_again()
        assert ff.explain(OP, **given).reason == "measured: 9.00 x the reference"
        found = call()
        assert launches(call) == 1
        file.unlink()
        backends.measure_again()
        assert "split over programs" in ff.explain(OP, **given).reason
        assert launches(call) == 2
        torch.testing.assert_close(found, call())


@pytest.mark.parametrize("gradient", [False, True])
def test_torchs_op_is_a_candidate_of_a_call_without_gradients(one_row, measured, gradient):
    entry = measured(attention(gradient, inside=True, H=2))[OP]
    assert entry.us.keys() == {"triton", "reference"} | (set() if gradient else {"torch"})
    assert entry.choice == "triton" and not entry.dropped


# --------------------------------------------------------------------------------- the process


def calls_of(*given):
    calls = {}
    for arguments in given:
        tuning.add(calls, OP, arguments)
    return calls


@pytest.fixture
def process(monkeypatch):
    """process(code, limit): what a measuring process does, and for how many seconds at most."""

    def process(code, limit=tuning.LIMIT):
        monkeypatch.setattr(tuning, "WORKER", "import sys, time; " + code)
        monkeypatch.setattr(tuning, "LIMIT", limit)

    return process


ENDS = "sys.stdin.read(); print('a\\nthe kernel is gone', file=sys.stderr); sys.exit(3)"
LATE = "print('64 32 4 1', file=sys.stderr, flush=True); time.sleep(60)"


@pytest.mark.parametrize("late", [False, True])
def test_a_call_that_ends_its_process_or_is_late_is_dropped(file, process, late):
    """And not tried again."""
    process(*((LATE, 2.0) if late else (ENDS,)))
    calls = calls_of(attention())
    result = tuning.measure(calls, file, 100.0)
    ended = "it ends its process: exit status 3: the kernel is gone"
    reason = "it takes more than 2 s: 64 32 4 1" if late else ended
    assert result.done and result.rows[0][1:] == (None, {}, {"the call": reason})
    assert f": nothing ()\n    not the call: {reason}" in str(result)
    process("sys.exit(4)")
    assert tuning.measure(calls, file, 100.0).rows == result.rows
    assert tuning.measure(calls, file, 100.0, dry_run=True).rows == ()


def test_the_time_is_limited(file, process):
    """What was running is not to blame, and the next run measures it."""
    process(LATE)
    calls = calls_of(attention(), attention(is_causal=True))
    result = tuning.measure(calls, file, 1 / 60)
    assert not result.done and [row[1:] for row in result.rows] == 2 * [("", {}, {})]
    assert len(tuning.measure(calls, file, 1.0, dry_run=True).rows) == 2 and not file.exists()


WORKER = """
import pickle, sys, triton.testing
from fastformer import tuning
from tuning_worker import flat

triton.testing.do_bench = lambda call, return_mode: flat(call)
tuning.REPEATS = 2
tuning.worker(*pickle.load(sys.stdin.buffer))
"""


@pytest.mark.with_all
def test_a_process_writes_what_it_measures(file, monkeypatch):
    """A kernel is measured once for calls of the same class."""
    monkeypatch.setattr(tuning, "WORKER", WORKER)
    result = tuning.measure(calls_of(attention(Sq=23), attention()), file, 10.0)
    us = dict.fromkeys(("triton", "torch", "reference"), 1e3)
    assert result.done and [row[1:] for row in result.rows] == 2 * [("triton", us, {})]
    kernels = [name for name in measurements.measurements(CPU) if name.startswith(FORWARD)]
    assert len(kernels) == 1


def test_a_result_that_cannot_be_kept_is_an_error(file, process):
    process(ENDS)
    file.mkdir()
    with pytest.raises(OSError):
        tuning.measure(calls_of(attention()), file, 1.0)


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
    result = ff.tune(model, x, dry_run=True)
    assert not result.done and all(row[1:] == ("", {}, {}) for row in result.rows)
    names = [row[0] for row in result.rows]
    assert [name.split()[0] for name in names] == ["layer_norm", OP, "feed_forward"]
    assert all(name.endswith("backward") for name in names) and "dropout_p" in str(result)
    assert str(result) == "\n".join(names)
    measurements.write(file, HERE, {names[0]: Entry("triton", {"triton": 1.0}, {})})
    assert [row[0] for row in ff.tune(model, x, dry_run=True).rows] == names[1:]
    with torch.no_grad():
        result = ff.tune(model.eval(), x, dry_run=True)
    assert "backward" not in str(result) and "dropout" not in str(result)
    twice = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.LayerNorm(8))
    ff.accelerate(twice)
    assert len(ff.tune(twice, torch.randn(3, 8), dry_run=True).rows) == 1


def test_tune_measures_the_calls_that_the_model_made(file, monkeypatch):
    """All but the GPU, and the process that measures."""
    seen = []

    def stand_in(seconds, name, op, arguments, file, here):
        seen.append((op, arguments))
        entry = Entry("triton", {"triton": 1.0}, {"x": "it lies"})
        measurements.write(file, here, {name: entry})

    monkeypatch.setattr(tuning, "measure_apart", stand_in)
    model, x = Model(), torch.randn(2, 5, 16)
    result = ff.tune(model, x, minutes=2)
    assert result.done and [row[1] for row in result.rows] == ["triton"] * 3
    assert result.file == file and len(measurements.read(file, HERE)) == len(seen) == 3
    assert "    not x: it lies" in str(result)
    op, given = seen[0]
    assert op == "layer_norm" and torch.equal(given["input"], x)
    assert torch.equal(given["weight"], model.norm.weight)
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
    monkeypatch.setattr(environment, "machine", lambda device: HERE)
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
