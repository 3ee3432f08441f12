"""The file of measurements: what is written, what is read, what is ignored, and what calls take of
it.
"""

import itertools
import json
import logging
import math
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch

import fastformer as ff
from fastformer import use_backend
from fastformer.dispatch import autograd, backends, measurements, workloads
from fastformer.dispatch.measurements import Entry
from fastformer.dispatch.operation import OPERATIONS

HERE = dict(gpu="GPU A", driver="570.1", torch="2.13.0", triton="3.7.1", fastformer="0.1.0")
FORWARD = "attention forward"
CPU = torch.device("cpu")


def entry(choice="64 32 4 1", **us):
    return Entry(choice, {choice: 2.0, "128 64 8 2": 3.0} | us, {"32 32 4 1": "it crashed"})


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The path of the file of measurements; the machine is HERE, and its GPU is the CPU."""
    path = tmp_path / "tuning.json"
    monkeypatch.setenv("FASTFORMER_TUNING", str(path))
    monkeypatch.setattr(measurements, "machine", lambda device: HERE)
    monkeypatch.setattr(measurements, "SHIPPED", (tmp_path / "shipped",))
    backends.measure_again()
    yield path
    backends.measure_again()


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.WARNING, logger="fastformer")
    return lambda: [record.getMessage() for record in caplog.records]


# --------------------------------------------------------------------------------------- the file


def test_what_is_written_is_read(file, logged):
    found = {(FORWARD, "a"): entry(), ("layer_norm", "b"): entry(None)._replace(us={})}
    measurements.write(file, HERE, found)
    assert measurements.measurements(CPU) == found
    assert measurements.choices(CPU) == {(FORWARD, "a"): "64 32 4 1"}
    assert measurements.measured(file, HERE) == found
    assert logged() == []
    assert {path.name for path in file.parent.iterdir()} <= {file.name, file.name + ".lock"}


def test_a_second_run_adds_to_the_first_and_keeps_other_machines(file):
    other = HERE | {"gpu": "GPU B"}
    measurements.write(file, HERE, {(FORWARD, "a"): entry(), (FORWARD, "b"): entry()})
    measurements.write(file, other, {(FORWARD, "a"): entry("128 64 8 2")})
    measurements.write(file, HERE, {(FORWARD, "a"): entry("128 64 8 2"), (FORWARD, "c"): entry()})
    assert {case: e.choice for (_, case), e in measurements.measured(file, HERE).items()} == {
        "a": "128 64 8 2",
        "b": "64 32 4 1",
        "c": "64 32 4 1",
    }
    assert list(measurements.measured(file, other)) == [(FORWARD, "a")]


WRITER = """
import sys
from pathlib import Path
from fastformer.dispatch import measurements as tuning
file, name, here = Path(sys.argv[1]), sys.argv[2], eval(sys.argv[3])
sys.stdin.readline()
entry = tuning.Entry("x", {"x": 1.0}, {})
for i in range(30):
    tuning.write(file, here, {("attention forward", f"{name} {i}"): entry})
"""


def test_two_processes_write_at_once(file):
    environment = os.environ | {"PYTHONPATH": str(Path(ff.__file__).parents[1])}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(file), name, repr(HERE)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )
        for name in "ab"
    ]  # fmt: skip
    for writer in writers:  # both are waiting to start
        writer.stdin.write("go\n")
        writer.stdin.flush()
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    assert len(measurements.measured(file, HERE)) == 60


def test_a_writer_that_fails_leaves_the_file(file, monkeypatch):
    measurements.write(file, HERE, {(FORWARD, "a"): entry()})
    before = file.read_text()
    with pytest.raises(TypeError):
        measurements.write(file, HERE, {(FORWARD, "b"): Entry("x", {"x": object()}, {})})
    assert file.read_text() == before
    assert {path.name for path in file.parent.iterdir()} <= {file.name, file.name + ".lock"}


# --------------------------------------------------------------------------------- what is ignored

GOOD = {"format": 1, "machines": [HERE | {"classes": {FORWARD: {"a": entry()._asdict()}}}]}


def changed(**fields):
    one = entry()._asdict() | fields
    return {"format": 1, "machines": [HERE | {"classes": {FORWARD: {"a": one}}}]}


BAD = {
    "empty": ("", "cannot be read"),
    "half-written": (json.dumps(GOOD)[:-40], "cannot be read"),
    "binary": (b"\xff\xfe\x00", "cannot be read"),
    "nested": ("[" * 100_000, "cannot be read"),
    "a list": ([], "not a file of fastformer tune"),
    "another file": ({"name": "x"}, "not a file of fastformer tune"),
    "a newer format": ({"format": 2, "machines": []}, "its format is 2; expected 1"),
    "no machines": ({"format": 1}, "no list of machines"),
    "a number for a machine": ({"format": 1, "machines": [3]}, "no list of machines"),
    "no classes": ({"format": 1, "machines": [HERE]}, "classes are broken"),
    "classes in a list": ({"format": 1, "machines": [HERE | {"classes": [1]}]}, "are broken"),
    "a choice that is no name": (changed(choice=["x"]), "classes are broken"),
    "a choice without a time": (changed(choice="x"), "was not timed"),
    "a time that is no number": (changed(us={"64 32 4 1": "fast"}), "classes are broken"),
    "a time of zero": (changed(us={"64 32 4 1": 0}), "is not positive"),
    "an infinite time": (changed(us={"64 32 4 1": math.inf}), "is not positive"),
    "no reasons": (changed(dropped=None), "classes are broken"),
    "nothing": ({"format": 1, "machines": []}, "measured on nothing"),
    **{
        f"another {name}": (
            {"format": 1, "machines": [HERE | {name: "other", "classes": {}}]},
            f"{name} other",
        )
        for name in HERE
    },
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_used_is_ignored_with_one_line(name, file, logged):
    content, reason = BAD[name]
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    for _ in range(2):
        assert measurements.measurements(CPU) == {} and measurements.choices(CPU) == {}
    (line,) = logged()
    assert str(file) in line and reason in line


def test_a_file_that_is_named_and_not_there_is_logged(file, logged):
    assert measurements.measurements(CPU) == {}
    (line,) = logged()
    assert str(file) in line


def test_without_a_file_nothing_is_logged(file, logged, monkeypatch):
    monkeypatch.setattr(measurements, "default_path", lambda: file)
    for empty in (True, False):
        if empty:
            monkeypatch.setenv("FASTFORMER_TUNING", "")
        else:
            monkeypatch.delenv("FASTFORMER_TUNING")
        measurements.forget()
        assert measurements.path() == file
        assert measurements.measurements(CPU) == {} and logged() == []


def test_unknown_ops_are_ignored_with_one_line(file, logged):
    measurements.write(file, HERE, {("warp drive", "a"): entry(), (FORWARD, "a"): entry()})
    assert list(measurements.measurements(CPU)) == [(FORWARD, "a")]
    (line,) = logged()
    assert str(file) in line and "'warp drive'" in line


def test_off_reads_nothing(file, monkeypatch, logged):
    measurements.write(file, HERE, {(FORWARD, "a"): entry()})
    monkeypatch.setenv("FASTFORMER_TUNING", "off")
    assert measurements.path() is None
    assert measurements.measurements(CPU) == {} and logged() == []


def test_the_default_file_is_in_the_cache_directory(monkeypatch):
    platformdirs = pytest.importorskip("platformdirs")
    monkeypatch.delenv("FASTFORMER_TUNING", raising=False)
    cache = platformdirs.user_cache_dir("fastformer", appauthor=False)
    assert measurements.path() == Path(cache) / "tuning.json"


def test_a_cpu_has_no_measurements(tmp_path, monkeypatch, logged):
    monkeypatch.setenv("FASTFORMER_TUNING", str(tmp_path / "none"))
    backends.measure_again()
    assert measurements.measurements(CPU) == {} and logged() == []
    backends.measure_again()


def test_shipped_measurements_are_the_defaults_of_their_gpu(file, logged):
    """They count under every driver, and what the user has measured comes before them."""
    shipped = measurements.SHIPPED[0]
    there = {(FORWARD, "a"): entry("128 64 8 2"), (FORWARD, "b"): entry("128 64 8 2")}
    measurements.write(shipped / "gpu_a.json", HERE | {"driver": "older"}, there)
    measurements.write(shipped / "gpu_b.json", HERE | {"gpu": "GPU B"}, {(FORWARD, "c"): entry()})
    measurements.write(file, HERE, {(FORWARD, "a"): entry()})
    assert measurements.choices(CPU) == {(FORWARD, "a"): "64 32 4 1", (FORWARD, "b"): "128 64 8 2"}
    assert logged() == []


# ------------------------------------------------------------------------------- what calls take


@pytest.fixture
def attention():
    """attention(): a call and its backward on the kernels; returns the tiles of its launches."""
    plan = pytest.importorskip("fastformer.kernels.attention.plan")

    def attention():
        x = torch.randn(1, 2, 40, 16, requires_grad=True)
        taken = {}

        def launch(kernel, grid, arguments, warps, *rest, former=plan.Launch):
            tile = arguments["tile"]
            taken[kernel.fn.__name__] = tile.rows.value, tile.columns.value, warps
            return former(kernel, grid, arguments, warps, *rest)

        with pytest.MonkeyPatch.context() as patch, use_backend("triton"):
            patch.setattr(plan, "Launch", launch)
            out = ff.scaled_dot_product_attention(x, x, x, is_causal=True)
            out.sum().backward()
        return taken, out, x

    return attention


def questions(call):
    from fastformer.kernels import tuned

    with tuned.forced({}) as asked:
        call()
    return asked


def test_names_of_cases():
    """Files of measurements hold them, so that they stay what they are."""
    tuned = pytest.importorskip("fastformer.kernels.tuned")
    case = namedtuple("Case", "left, right, mask, kind")(True, False, 2, 0)
    assert tuned.flags(case) == "left mask=2" and tuned.flags(case, "left") == "mask=2"
    assert tuned.named(torch.float32, "tf32", rows=5, columns=64) == "float32 tf32 rows8 columns64"
    assert tuned.named(torch.bfloat16, "tf32", rows=1) == "bfloat16 rows1"


def test_measured_tiles_reach_the_launches(file, attention):
    from fastformer.kernels import tuned

    before, chosen = attention()[0], {}
    for question in questions(attention):
        option = next(o for o in question.options() if o[:2] != question.shipped[:2])
        chosen[question.kernel, question.case] = option
    measurements.write(file, HERE, {k: entry(tuned.label(option)) for k, option in chosen.items()})
    backends.measure_again()
    after, out, x = attention()
    assert len(chosen) == 3
    for (kernel, _), (BM, BN, warps, _) in chosen.items():
        name = {FORWARD: "forward_kernel"}.get(kernel, f"backward_{kernel.split()[-1]}_kernel")
        assert after[name] == (BM, BN, warps) != before[name]
    with use_backend("reference"):
        y = x.detach()
        expected = ff.scaled_dot_product_attention(y, y, y, is_causal=True)
    torch.testing.assert_close(out, expected)


ROWS = dict(M=40, N=48)
OTHERS = [
    workloads.workload("layer_norm", "float32", ROWS, True, weight=True, bias=True),
    workloads.workload("rms_norm", "float32", ROWS, True, weight=True),
    workloads.workload("dropout_add_layer_norm", "float32", ROWS, True, weight=True, dropout=True),
    workloads.workload(
        "feed_forward",
        "float32",
        dict(M=40, d=24, F=48, out=16),
        True,
        activation="gelu",
        b_1=True,
        dropout=True,
    ),
    workloads.workload("swiglu", "float32", dict(M=40, d=24, F=48, out=16), True, dropout=True),
    workloads.workload("cross_entropy", "float32", dict(M=5, V=2000), True, reduction="mean"),
    workloads.workload(
        "rotary_embedding", "float32", dict(B=1, H=2, G=2, S=40, D=16, R=16), True, norm=True
    ),
    workloads.workload(
        "embed", "float32", dict(M=40, S=20, N=48, V=9), True, positional=True, dropout=True
    ),
]


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.op)
def test_every_measured_row_of_tiles_reaches_its_launch(file, case, monkeypatch):
    """And computes the same, to the policy."""
    from fastformer.kernels import launch, tuned

    from fastformer.tuning import tuner

    call, taken = tuner._Call(case, CPU), []
    former = launch.Launch.__init__

    def remember(self, kernel, grid, arguments, warps, *rest, **named):
        if "tile" in arguments:
            taken.append(tuple(x.value for x in arguments["tile"]))
        else:  # of cross-entropy
            taken.append((arguments["case"].columns.value, warps))
        former(self, kernel, grid, arguments, warps, *rest, **named)

    monkeypatch.setattr(launch.Launch, "__init__", remember)
    asked = questions(call)
    assert {question.kernel for question in asked} <= measurements.kinds()
    for question in asked:
        options = [o for o in question.options() if not isinstance(o, str)]
        assert len(options) > 3 and all(type(o) is type(question.shipped) for o in options)
        option = next(o for o in options if o[0] != question.shipped[0])
        measurements.write(
            file, HERE, {(question.kernel, question.case): entry(tuned.label(option))}
        )
        backends.measure_again()
        taken.clear()
        call()
        assert option in taken
        assert call.drop_reason() is None


def test_a_file_may_hold_the_answer_to_every_question_of_attention():
    """Others are not read: see `test_unknown_ops_are_ignored_with_one_line`."""
    pytest.importorskip("triton")
    backends._load(OP)

    def ask():
        for queries, given in ((40, dict(bias=torch.zeros(40, 40, requires_grad=True))), (1, {})):
            x, y = torch.randn(1, 2, queries, 16, requires_grad=True), torch.randn(1, 2, 40, 16)
            y = y if queries > 1 else torch.randn(1, 2, 300, 16)
            mask = torch.ones(queries, y.shape[2], dtype=torch.bool)
            with use_backend("triton"), torch.set_grad_enabled(queries > 1):
                out = ff.scaled_dot_product_attention(x, y, y, attn_mask=mask, **given)
            if queries > 1:
                out.sum().backward()

    assert {question.kernel for question in questions(ask)} == set(OPERATIONS[OP].tuned) - {
        "attention dkdv"  # no gradient of the keys is needed
    }


def test_a_forced_choice_ends_with_its_context(file, attention):
    from fastformer.kernels import tuned

    (question, *_) = questions(attention)
    option = next(o for o in question.options() if o[:2] != question.shipped[:2])
    attention()
    with tuned.forced({FORWARD: option}) as asked:
        assert attention()[0]["forward_kernel"] == option[:3]
    assert asked[0].case == question.case
    assert attention()[0]["forward_kernel"] == question.shipped[:3]


def test_tiles_that_no_kernel_has_are_ignored_with_one_line(file, attention, logged):
    (question, *_) = questions(attention)
    measurements.write(file, HERE, {(question.kernel, question.case): entry("100 3 5 9")})
    for _ in range(2):
        backends.measure_again()
        taken = attention()[0]
    assert taken["forward_kernel"] == question.shipped[:3]
    (line,) = logged()
    assert FORWARD in line and "'100 3 5 9'" in line


# -------------------------------------------------------------------------- what runs, and explain

OP = "scaled_dot_product_attention"


def plain(gradient=False, S=40):
    return [torch.randn(1, 2, S, 16, requires_grad=gradient) for _ in range(3)]


def key(gradient=False):
    sizes = dict(B=1, H=2, G=2, Sq=40, Sk=40, D=16, Dv=16)
    return OP, workloads.workload(OP, "float32", sizes, gradient, causal=True).key


MEASURED = {"triton": 100.0, "torch (cuDNN)": 131.0, "torch (flash)": 200.0, "reference": 900.0}


@pytest.mark.parametrize(
    "us, reason",
    [
        (MEASURED, "measured: 1.31 x torch (cuDNN)"),
        ({"triton": 100.0, "reference": 310.0}, "measured: 3.10 x the reference"),
        ({"triton": 100.0}, "it was chosen"),
    ],
)
def test_explain_says_what_was_measured(file, us, reason):
    pytest.importorskip("triton")
    measurements.write(file, HERE, {key(): Entry("triton", us, {})})
    with use_backend("triton"):
        said = ff.explain(OP, *plain(), is_causal=True)
        assert (said.backend, said.reason) == ("triton", reason)
        assert ff.explain(OP, *plain(S=36), is_causal=True).reason == reason  # it rounds up alike
        for other in (dict(is_causal=False), dict(is_causal=True, dropout_p=0.1)):
            assert ff.explain(OP, *plain(), **other).reason == "it was chosen"
        assert ff.explain(OP, *plain(True), is_causal=True).reason == "it was chosen"
        assert ff.explain(OP, *plain(S=70), is_causal=True).reason == "it was chosen"
    with use_backend("reference"):
        assert ff.explain(OP, *plain(), is_causal=True).reason == "it was chosen"


def test_explain_of_a_model_says_it_too(file):
    pytest.importorskip("triton")
    sizes = dict(M=4, N=8)
    case = workloads.workload("layer_norm", "float32", sizes, weight=True, bias=True)
    us = {"triton": 10.0, "torch (layer_norm)": 15.0}
    measurements.write(file, HERE, {("layer_norm", case.key): Entry("triton", us, {})})
    model = torch.nn.Sequential(torch.nn.LayerNorm(8))
    ff.accelerate(model)
    with use_backend("triton"), torch.no_grad():
        said = ff.explain(model, torch.randn(4, 8))
    assert [row[3] for row in said.rows] == ["measured: 1.50 x torch (layer_norm)"]


def on_a_gpu(monkeypatch):
    """`auto` chooses for tensors of the CPU as it does for those of a GPU."""
    former = backends.choose_backend
    monkeypatch.setattr(backends, "runs_directly", lambda: False)

    def choose(op, arguments, backend):
        if backend == "auto":
            first = next(iter(arguments.values()))
            name = backends._measured(op, arguments, first) or "triton"
            return backends.Choice(op, name, "the tensors are on a GPU")
        return former(op, arguments, backend)

    monkeypatch.setattr(backends, "choose_backend", choose)


@pytest.fixture
def flash(monkeypatch):
    """The op "torch (flash)" is the one that torch has on a CPU. It gives a list of its calls."""
    backends._load(OP)
    calls = []

    def forward(query, key, value, *rest):
        calls.append(query.shape)
        attention = ff.description.unpack(rest[:-1])
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, lse = op(query, key, value, 0.0, attention.is_causal, scale=attention.scale)
        return output, lse.contiguous(), query.new_empty(0)

    monkeypatch.setattr(autograd._pairs[f"{OP}: torch (flash)"], "forward", forward)
    on_a_gpu(monkeypatch)
    return calls


@pytest.mark.parametrize("gradient", [False, True])
def test_torchs_op_runs_where_it_was_the_fastest_with_our_backward(file, flash, gradient):
    us = {"triton": 100.0, "torch (flash)": 50.0}
    measurements.write(file, HERE, {key(gradient): Entry("torch (flash)", us, {})})
    inputs = plain(gradient)
    results = []
    for backend in ("auto", "triton", "reference"):
        with use_backend(backend):
            out = ff.scaled_dot_product_attention(*inputs, is_causal=True)
            grads = torch.autograd.grad(out.square().sum(), inputs) if gradient else ()
        results.append((out, *grads))
        assert len(flash) == 1
    for name, *same in zip(["out", "dq", "dk", "dv"], *results):
        torch.testing.assert_close(same[0], same[1], msg=name)
        torch.testing.assert_close(same[0], same[2], msg=name)
    assert (ff.explain(OP, *inputs, is_causal=True).reason == "measured: 2.00 x the kernel") == (
        backends.current_backend() == "auto"
    )


@pytest.mark.parametrize(
    "options",
    [
        dict(is_causal=False),
        dict(is_causal=True, dropout_p=0.5, dropout_seed=1),
        dict(is_causal=True, key_lengths=torch.tensor([7])),
        dict(is_causal=True, window=(3, 0)),
        dict(is_causal=True, bias=torch.zeros(40)),
        dict(is_causal=True, attn_mask=torch.ones(40, dtype=torch.bool)),
        dict(is_causal=True, softcap=30.0),
        dict(is_causal=True, sinks=torch.zeros(2)),
        dict(is_causal=True, alibi_slopes=torch.ones(2)),
    ],
    ids=lambda options: " ".join(options),
)
def test_other_calls_run_on_the_kernels(file, flash, options):
    us = {"triton": 100.0, "torch (flash)": 50.0}
    measurements.write(file, HERE, {key(): Entry("torch (flash)", us, {})})
    with use_backend("auto"):
        ff.scaled_dot_product_attention(*plain(), **options)
    assert flash == []


def test_an_unknown_op_of_torch_is_no_choice(file, flash):
    measurements.write(file, HERE, {key(): Entry("torch (warp)", {"torch (warp)": 50.0}, {})})
    with use_backend("auto"):
        ff.scaled_dot_product_attention(*plain(), is_causal=True)
    assert flash == []


@pytest.mark.parametrize("op", [op for op, x in OPERATIONS.items() if x.alternatives and op != OP])
def test_torchs_norms_compute_the_same_as_ours(op):
    """Output by output, those that the backward reads included, and gradient by gradient."""
    backends._load(op)
    sizes = dict(M=6, N=16)
    options = dict(weight=True, bias="rms" not in op)
    given = workloads.workload(op, "float32", sizes, **options).arguments(CPU)
    found = []
    with backends.observe(on_call=lambda op, arguments: found.append(arguments)):
        OPERATIONS[op].contract(**given)
    assert OPERATIONS[op].signature(found[0]) is not None
    values, pair = list(found[0].values()), autograd._pairs[op]
    grad, needs = torch.randn(6, 16), [True] * len(pair.grads)
    for other in OPERATIONS[op].alternatives.values():
        results = []
        for one in (pair, other):
            outputs = one.forward(*values)
            if other.backward is not None:
                saved = [values[i] for i in pair.from_arguments]
                saved += [outputs[i] for i in pair.from_outputs]
                outputs = *outputs, *one.backward(grad, *saved, needs)
            results.append(outputs)
        for x, y in zip(*results, strict=True):
            assert x.shape == y.shape and x.dtype == y.dtype and x.stride() == y.stride()
            torch.testing.assert_close(x, y)


def test_a_choice_of_torchs_norm_takes_its_backward_too(file, monkeypatch):
    op = "layer_norm"
    case = workloads.workload(op, "float32", dict(M=6, N=16), True, weight=True)
    name = f"torch ({op}, backward)"
    measurements.write(file, HERE, {(op, case.key): Entry(name, {name: 1.0, "triton": 2.0}, {})})
    on_a_gpu(monkeypatch)
    backends._load(op)
    given, called = case.arguments(CPU), []
    pair = autograd._pairs[f"{op}: {name}"]

    def backward(*arguments, former=pair.backward):
        called.append(op)
        return former(*arguments)

    monkeypatch.setattr(pair, "backward", backward)
    results = []
    for backend in ("auto", "triton"):
        with use_backend(backend):
            out = OPERATIONS[op].contract(**given)
            leaves = given["input"], given["weight"]
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    assert called == [op]
    for x, y in zip(*results):
        torch.testing.assert_close(x, y)


NOT_TORCHS = [
    ("layer_norm", dict(unbiased=True), {}),
    ("layer_norm", dict(weight_dtype="float64"), {}),
    ("dropout_add_layer_norm", dict(dropout=True, bias=True), {}),
    ("dropout_add_rms_norm", dict(dropout=True), {}),
]


@pytest.mark.parametrize("op, options, more", NOT_TORCHS)
def test_norms_that_torch_does_not_have(op, options, more):
    given = workloads.workload(op, "float32", dict(M=6, N=16), weight=True, **options).arguments(
        CPU
    )
    if "weight" in given and "weight_dtype" in options:
        given["weight"] = given["weight"].float()
        given["input"] = given["input"].half()
    found = []
    with backends.observe(on_call=lambda op, arguments: found.append(arguments)):
        OPERATIONS[op].contract(**given)
    assert OPERATIONS[op].signature(found[0]) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_rows_of_all_architectures_are_candidates_on_each(dtype):
    from fastformer.kernels.attention import configurations

    for kernel, full, D in itertools.product(("forward", "dkdv", "dq"), (0, 1), (32, 64, 128, 256)):
        options = configurations.rows(kernel, dtype, D)
        assert len(set(options)) == len(options) <= 24
        for arch in ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942", "other"):
            shipped = configurations.configuration(kernel, arch, dtype, D, 512, 512, bool(full))
            for stages in (shipped.stages, 2, 3):
                assert shipped._replace(stages=stages) in options
    wide = configurations.Tiles(128, 128, 8, 3)
    half = dtype == torch.bfloat16
    assert (wide in configurations.rows("forward", dtype, 128)) == half


def test_the_classes_of_a_kernel_round_sizes_up():
    from fastformer.kernels import tuned

    assert tuned.named(torch.float16, "tf32", q=1000, D=64, none=0) == "float16 q1024 D64 none1"
    assert tuned.named(torch.float32, "tf32", q=65) == "float32 tf32 q128"
    assert [workloads.next_power_of_2(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]


def test_of_several_drivers_in_a_shipped_file_the_last_counts(file):
    shipped = measurements.SHIPPED[0] / "gpu_a.json"
    for driver, choice in (("one", "64 32 4 1"), ("other", "128 64 8 2")):
        measurements.write(shipped, HERE | {"driver": driver}, {(FORWARD, "a"): entry(choice)})
    assert measurements.choices(CPU) == {(FORWARD, "a"): "128 64 8 2"}
