"""The file of measurements, and what calls take of it."""

import itertools
import json
import logging
import math
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from tuning_worker import CPU, FORWARD, HERE, OP

import fastformer as ff
from fastformer import environment, tuning, use_backend
from fastformer.dispatch import backends, front, measurements
from fastformer.dispatch.measurements import Entry
from fastformer.dispatch.operation import OPERATIONS, call_name
from fastformer.ops import examples

MACHINE = environment.machine


def entry(choice="64 32 4 1", **us):
    return Entry(choice, {choice: 2.0, "128 64 8 2": 3.0} | us, {"32 32 4 1": "it crashed"})


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.WARNING, logger="fastformer")
    return lambda: [record.getMessage() for record in caplog.records]


# --------------------------------------------------------------------------------------- the file


def test_what_is_written_is_read(file, logged):
    """A second run adds to the first. The results of another machine are replaced."""
    measurements.write(file, HERE.replace("GPU A", "GPU B"), {"c": entry()})
    measurements.write(file, HERE, {"a": entry(), "b": entry()})
    (line,) = logged()
    assert "they are of GPU B, driver" in line and "; this is GPU A, driver" in line
    found = {"a": entry("128 64 8 2"), "d": entry(None)._replace(us={})}
    measurements.write(file, HERE, found)
    assert measurements.measurements(CPU) == {"b": entry()} | found and len(logged()) == 1
    assert backends._choices(CPU) == {"a": "128 64 8 2", "b": "64 32 4 1"}
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_writer_that_fails_leaves_the_file(file):
    measurements.write(file, HERE, {"a": entry()})
    before = file.read_text()
    with pytest.raises(TypeError):
        measurements.write(file, HERE, {"b": Entry("x", {"x": object()}, {})})
    assert file.read_text() == before


def changed(**fields):
    return {HERE: {f"{FORWARD}: a": entry()._asdict() | fields}}


BAD = {
    "half-written": (json.dumps(changed())[:-40], "Unterminated string"),
    "binary": (b"\xff\xfe\x00", "can't decode"),
    "nested": ("[" * 100_000, "recursion"),
    "a list": ([], "no attribute 'items'"),
    "an older format": ({"format": 2, "machines": []}, "too many values to unpack"),
    "another machine": ({HERE.replace("570.1", "571"): {}}, "they are of GPU A, driver 571, torch"),
    "a list of results": ({HERE: {f"{FORWARD}: a": [1]}}, "must be a mapping"),
    "no entry": ({HERE: {f"{FORWARD}: a": {"choice": "x"}}}, "missing 2 required"),
    "a choice without a time": (changed(choice="x"), "the choice is x"),
    "a time that is no number": (changed(us={"64 32 4 1": "fast"}), "'<' not supported"),
    "a time of zero": (changed(us={"64 32 4 1": 0}), "the choice is 64 32 4 1 of"),
    "an infinite time": (changed(us={"64 32 4 1": math.inf}), "the choice is 64 32 4 1 of"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_used_is_ignored_with_one_line(name, file, logged):
    content, reason = BAD[name]
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    for _ in range(2):
        assert measurements.measurements(CPU) == {} and backends._choices(CPU) == {}
    (line,) = logged()
    assert str(file) in line and reason in line


def test_fastformer_tuning_names_the_file(file, logged, monkeypatch):
    """Or is off. By default it is in the cache directory. A CPU has no measurements."""
    measurements.write(file, HERE, {"a": entry()})
    monkeypatch.setattr(environment, "machine", MACHINE)
    assert measurements.measurements(CPU) == {}
    monkeypatch.setattr(environment, "machine", lambda device: HERE)
    backends.measure_again()
    assert measurements.measurements(CPU) == {"a": entry()}
    monkeypatch.setenv("FASTFORMER_TUNING", "off")
    backends.measure_again()
    assert measurements.path() is None and measurements.measurements(CPU) == {}
    platformdirs = pytest.importorskip("platformdirs")
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda *_, **__: str(file.parent))
    monkeypatch.setenv("FASTFORMER_TUNING", "")
    assert measurements.path() == Path(file)
    monkeypatch.delenv("FASTFORMER_TUNING")
    assert measurements.path() == Path(file)
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
    assert tuned.named(torch.bfloat16, "tf32", rows=1, none=0) == "bfloat16 rows1 none1"
    powers = [ff.description.next_power_of_2(n) for n in (0, 1, 2, 3, 64, 65)]
    assert powers == [1, 1, 2, 4, 64, 128]


def test_measured_tiles_reach_the_launches(file, attention):
    from fastformer.kernels import tuned

    before, chosen = attention()[0], {}
    tiled = [x for x in questions(attention) if x.kernel != "attention short backward"]
    for question in tiled:
        option = next(o for o in question.options() if o[:2] != question.shipped[:2])
        chosen[question.name] = option
    measurements.write(file, HERE, {n: entry(tuned.label(option)) for n, option in chosen.items()})
    backends.measure_again()
    after, out, x = attention()
    assert len(chosen) == 3
    for question, (BM, BN, warps, _) in chosen.items():
        kernel = question.partition(":")[0].removeprefix("attention ")
        name = "forward_kernel" if kernel == "forward" else f"backward_{kernel}_kernel"
        assert after[name] == (BM, BN, warps) != before[name]
    with use_backend("reference"):
        y = x.detach()
        expected = ff.scaled_dot_product_attention(y, y, y, is_causal=True)
    torch.testing.assert_close(out, expected)


SMALL = dict(examples.calls(CPU, torch.float32, B=2, S=20, H=3, D=16, V=2000))
TILED = {"layer_norm", "dropout_add_rms_norm", "feed_forward", "swiglu", "cross_entropy", "embed"}


@pytest.mark.parametrize("op", sorted(TILED | {"rotary_embedding"}))
def test_every_measured_row_of_tiles_reaches_its_launch(file, op, monkeypatch):
    """And computes the same, to the policy."""
    launch, tuned = (pytest.importorskip(f"fastformer.kernels.{x}") for x in ("launch", "tuned"))
    given, taken = backends.checked(op, **SMALL[op]), []
    former = launch.Launch.__init__

    def remember(self, kernel, grid, arguments, warps, *rest, **named):
        if "tile" in arguments:
            taken.append(tuple(x.value for x in arguments["tile"]))
        else:  # of cross-entropy
            taken.append((arguments["case"].columns.value, warps))
        former(self, kernel, grid, arguments, warps, *rest, **named)

    monkeypatch.setattr(launch.Launch, "__init__", remember)
    testing = pytest.importorskip("triton.testing")
    monkeypatch.setattr(testing, "do_bench", lambda call, return_mode: 1.0)
    asked = questions(lambda: tuning.results(op, given, "triton"))
    assert asked
    for question in asked:
        options = [o for o in question.options() if not isinstance(o, str)]
        assert len(options) > 3 and all(type(o) is type(question.shipped) for o in options)
        option = next(o for o in options if o[0] != question.shipped[0])
        measurements.write(file, HERE, {question.name: entry(tuned.label(option))})
        backends.measure_again()
        taken.clear()
        tuning.results(op, given, "triton")
        assert option in taken
        assert not tuning.compare(op, given, {"it": ("triton", {question.kernel: option})}).dropped


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
    measurements.write(file, HERE, {question.name: entry("100 3 5 9")})
    backends.measure_again()
    taken = attention()[0]
    assert taken["forward_kernel"] == question.shipped[:3]
    (line,) = logged()
    assert FORWARD in line and "'100 3 5 9'" in line


# -------------------------------------------------------------------------- what runs, and explain


def plain(gradient=False, S=40):
    return [torch.randn(1, 2, S, 16, requires_grad=gradient) for _ in range(3)]


def named(op, **arguments):
    return call_name(op, backends.checked(op, **arguments))


QKV = dict(zip(("query", "key", "value"), plain()))


@pytest.mark.parametrize(
    "us, reason",
    [
        ({"triton": 100.0, "torch": 131.0, "reference": 900.0}, "measured: 1.31 x torch"),
        ({"triton": 100.0, "reference": 310.0}, "measured: 3.10 x the reference"),
        ({"triton": 100.0}, "it was chosen"),
    ],
)
def test_explain_says_what_was_measured(file, us, reason):
    pytest.importorskip("triton")
    measurements.write(file, HERE, {named(OP, **QKV, is_causal=True): Entry("triton", us, {})})
    with use_backend("triton"):
        said = ff.explain(OP, *plain(), is_causal=True)
        assert (said.backend, said.reason) == ("triton", reason)
        drops, mask = dict(is_causal=True, dropout_p=0.1), "; the dropout mask is from a seed"
        for other, more in ((dict(is_causal=False), ""), (drops, mask)):
            assert ff.explain(OP, *plain(), **other).reason == "it was chosen" + more
        assert ff.explain(OP, *plain(True), is_causal=True).reason == "it was chosen"
        assert ff.explain(OP, *plain(S=36), is_causal=True).reason == "it was chosen"
    with use_backend("reference"):
        assert ff.explain(OP, *plain(), is_causal=True).reason == "it was chosen"


@pytest.fixture
def on_a_gpu(monkeypatch):
    """`auto` chooses for tensors of the CPU as it does for those of a GPU."""
    pytest.importorskip("triton")
    former = backends.choose_backend

    def choose(op, arguments, backend):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cpu", False)
            patch.setattr(backends, "_caveat", lambda device: "")
            return former(op, arguments, backend)

    monkeypatch.setattr(front, "unwatched_backend", lambda: None)
    monkeypatch.setattr(backends, "choose_backend", choose)


ROW = torch.randn(6, 16)
NORM = dict(input=ROW, normalized_shape=16, weight=torch.randn(16))
GROUPED = QKV | dict(query=torch.randn(1, 4, 40, 16), enable_gqa=True)
STRIDED = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in QKV.items()}
BY_TORCH = [
    (OP, QKV), (OP, QKV | dict(is_causal=True)), (OP, QKV | dict(scale=-0.5)),
    (OP, GROUPED | dict(is_causal=True, scale=0.3)), (OP, STRIDED),
    ("layer_norm", NORM | dict(bias=torch.randn(16), eps=1e-3)), ("rms_norm", NORM | dict(eps=0.1)),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(BY_TORCH)))
def test_torchs_op_runs_where_it_was_the_fastest(file, on_a_gpu, monkeypatch, i):
    """And computes the same as the reference, in the same layout. With gradients, and on another
    backend, it does not run.
    """
    (op, given), calls = BY_TORCH[i], []
    former = OPERATIONS[op].by_torch

    def by_torch(**arguments):
        calls.append(op)
        return former(**arguments)

    monkeypatch.setitem(OPERATIONS, op, OPERATIONS[op]._replace(by_torch=by_torch))
    contract, us = OPERATIONS[op].contract, {"triton": 100.0, "torch": 50.0}
    leaf = {name: x.clone().requires_grad_() for name, x in given.items() if name in ("query",)}
    leaf = given | (leaf or {"input": ROW.clone().requires_grad_()})
    found = {named(op, **one): Entry("torch", us, {}) for one in (given, leaf)}
    with use_backend("auto"):
        assert ff.explain(op, **given).backend == "triton"
        measurements.write(file, HERE, found)
        backends.measure_again()
        said = ff.explain(op, **given)
        assert (said.backend, said.reason) == ("torch", "measured: 2.00 x the kernel")
        have = contract(**given)
        assert calls == [op] and ff.explain(op, **leaf).backend == "triton"
    with use_backend("reference"):
        want = contract(**given)
    assert calls == [op] and have.stride() == want.stride()
    torch.testing.assert_close(have, want)


NOT_TORCHS = [
    ("layer_norm", NORM | dict(unbiased=True)),
    ("layer_norm", NORM | dict(input=ROW.half())),
    ("rms_norm", NORM | dict(input=torch.randn(16, 6).t())),
    ("dropout_add_rms_norm", dict(input=ROW, residual=ROW, weight=NORM["weight"])),
    (OP, QKV | dict(return_lse=True)),
    (OP, QKV | dict(is_causal=True, query=torch.randn(1, 2, 30, 16))),
    (OP, QKV | dict(is_causal=True, scale=-0.5)),
    (OP, QKV | dict(dropout_p=0.1)),
    (OP, QKV | dict(softcap=2.0)),
    (OP, QKV | dict(key_lengths=torch.tensor([9]))),
]


@pytest.mark.parametrize("op, given", NOT_TORCHS)
def test_calls_that_torch_does_not_have(op, given):
    assert not backends.computed_by_torch(op, backends.checked(op, **given))


def test_without_a_call_for_torch_no_call_has_a_name(file, on_a_gpu, monkeypatch):
    found = Entry("triton", {"triton": 1.0, "torch": 2.0}, {})
    measurements.write(file, HERE, {named(OP, **QKV, is_causal=True): found})
    monkeypatch.setattr(backends, "call_name", lambda *_: pytest.fail("it costs time"))
    with use_backend("auto"):
        ff.scaled_dot_product_attention(**QKV, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_rows_of_all_architectures_are_candidates_on_each(dtype):
    from fastformer.kernels.attention import configurations

    for kernel, full, D in itertools.product(("forward", "dkdv", "dq"), (0, 1), (32, 64, 128, 256)):
        options = configurations.rows(kernel, dtype, D)
        assert len(set(options)) == len(options) <= 24
        for arch in ("sm_80", "sm_86", "sm_90", "sm_100", "other"):
            shipped = configurations.configuration(kernel, arch, dtype, D, 512, 512, bool(full))
            for stages in (shipped.stages, 2, 3):
                assert shipped._replace(stages=stages) in options
    wide = configurations.AttentionTiles(128, 128, 8, 3)
    half = dtype == torch.bfloat16
    assert (wide in configurations.rows("forward", dtype, 128)) == half


# ------------------------------------------------------------------------------- names of calls


def test_the_name_of_a_call():
    x = torch.randn(3, 5, 24, requires_grad=True)
    name = named("layer_norm", input=x, normalized_shape=24, weight=torch.ones(24))
    assert name == "layer_norm float32 input=3x5x24 normalized_shape=24 weight=24 backward"
    heads = torch.randn(2, 40, 3, 16, dtype=torch.float16).transpose(1, 2)
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    name = named(OP, query=heads, key=heads, value=heads, attn_mask=mask, window=(8, 100))
    tensor = "2x3x40x16:1920x16x48x1"
    assert name == (
        f"{OP} float16 query={tensor} key={tensor} value={tensor} "
        "attn_mask=2x1x1x40:bool window=8x100 causal_alignment=top_left"
    )


def test_names_tell_calls_apart():
    same = [{}, dict(scale=0.5), dict(return_lse=True)]
    assert len({named(OP, **QKV | options) for options in same}) == 1
    bias = torch.zeros(40, 40)
    different = [{}, dict(is_causal=True), dict(window=(8, None)), dict(softcap=3.0)]
    different += [dict(bias=bias), dict(bias=bias[:1]), dict(bias=bias[:, :1])]
    different += [dict(bias=bias.t()), dict(sinks=torch.zeros(2))]
    different += [dict(zip(QKV, plain(True))), dict(zip(QKV, plain(S=41)))]
    different += [{n: x.half() for n, x in QKV.items()}, dict(dropout_p=0.1, dropout_seed=1)]
    found = [named(OP, **QKV | options) for options in different]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("op", sorted(SMALL))
def test_every_op_has_a_part_that_float64_can_compute(op):
    given = examples.copied(examples.part(backends.checked(op, **SMALL[op])))
    results = tuning.results(op, given, "reference")
    double = examples.copied(given, lambda x: x.double() if x.is_floating_point() else x)
    wide = tuning.results(op, double, "reference")
    assert [x.shape for x in results] == [x.shape for x in wide]
    assert wide[0].dtype == torch.float64 and SMALL.keys() == OPERATIONS.keys()


def test_the_part_of_a_call():
    """It has what the whole call has for these heads."""
    x, lengths = torch.randn(3, 2, 40, 16), torch.tensor([40, 20, 10])
    query = torch.randn(3, 4, 35, 16)
    given = dict(query=query, key=x, value=x, enable_gqa=True, key_lengths=lengths)
    given |= dict(bias=torch.randn(4, 35, 40), alibi_slopes=torch.rand(3, 4), sinks=torch.randn(4))
    given |= dict(attn_mask=torch.rand(3, 1, 1, 40) > 0.1, dropout_p=0.2, dropout_seed=3)
    whole = backends.checked(OP, **given)
    part = examples.part(whole)
    assert [part[n].shape[:2] for n in ("query", "key", "value")] == [(1, 2), (1, 1), (1, 1)]
    have, want = (tuning.results(OP, one, "reference")[0] for one in (part, whole))
    torch.testing.assert_close(have, want[:1, :2])
