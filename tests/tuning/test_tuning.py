"""The file of measurements: what is written, what is read, what is ignored, and what calls take of
it.
"""

import itertools
import json
import logging
import math
import os
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from tuning_worker import CPU, FORWARD, HERE, OP
from tuning_worker import flash as torchs_flash

import fastformer as ff
from fastformer import tuning, use_backend
from fastformer.dispatch import autograd, backends, measurements
from fastformer.dispatch.measurements import Entry
from fastformer.dispatch.operation import OPERATIONS
from fastformer.mask_tiles import dense_mask
from fastformer.ops import examples

MACHINE = measurements.machine


def entry(choice="64 32 4 1", **us):
    return Entry(choice, {choice: 2.0, "128 64 8 2": 3.0} | us, {"32 32 4 1": "it crashed"})


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
    found = {case: e.choice for (_, case), e in measurements.measured(file, HERE).items()}
    assert found == dict(a="128 64 8 2", b="64 32 4 1", c="64 32 4 1")
    assert list(measurements.measured(file, other)) == [(FORWARD, "a")]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_processes_write_at_once(file):
    children = []
    for name in "ab":
        children.append(os.fork())
        if children[-1] == 0:
            for i in range(30):
                measurements.write(file, HERE, {(FORWARD, f"{name} {i}"): entry()})
            os._exit(0)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert len(measurements.measured(file, HERE)) == 60


def test_a_writer_that_fails_leaves_the_file(file, monkeypatch):
    measurements.write(file, HERE, {(FORWARD, "a"): entry()})
    before = file.read_text()
    with pytest.raises(TypeError):
        measurements.write(file, HERE, {(FORWARD, "b"): Entry("x", {"x": object()}, {})})
    assert file.read_text() == before
    assert {path.name for path in file.parent.iterdir()} <= {file.name, file.name + ".lock"}


# --------------------------------------------------------------------------------- what is ignored

GOOD = {"format": 2, "machines": [HERE | {"classes": {FORWARD: {"a": entry()._asdict()}}}]}


def changed(**fields):
    one = entry()._asdict() | fields
    return {"format": 2, "machines": [HERE | {"classes": {FORWARD: {"a": one}}}]}


BAD = {
    "empty": ("", "cannot be read"),
    "half-written": (json.dumps(GOOD)[:-40], "cannot be read"),
    "binary": (b"\xff\xfe\x00", "cannot be read"),
    "nested": ("[" * 100_000, "cannot be read"),
    "a list": ([], "not a file of fastformer tune"),
    "another file": ({"name": "x"}, "not a file of fastformer tune"),
    "a newer format": ({"format": 3, "machines": []}, "its format is 3; expected 2"),
    "an older format": (
        {"format": 1, "machines": [HERE | {"classes": {}}]},
        "its format is 1; expected 2: `fastformer tune` measures again",
    ),
    "no machines": ({"format": 2}, "no list of machines"),
    "a number for a machine": ({"format": 2, "machines": [3]}, "no list of machines"),
    "no classes": ({"format": 2, "machines": [HERE]}, "classes are broken"),
    "classes in a list": ({"format": 2, "machines": [HERE | {"classes": [1]}]}, "are broken"),
    "a choice that is no name": (changed(choice=["x"]), "classes are broken"),
    "a choice without a time": (changed(choice="x"), "was not timed"),
    "a time that is no number": (changed(us={"64 32 4 1": "fast"}), "classes are broken"),
    "a time of zero": (changed(us={"64 32 4 1": 0}), "is not positive"),
    "an infinite time": (changed(us={"64 32 4 1": math.inf}), "is not positive"),
    "no reasons": (changed(dropped=None), "classes are broken"),
    "nothing": ({"format": 2, "machines": []}, "measured on nothing"),
    **{
        f"another {name}": (
            {"format": 2, "machines": [HERE | {name: "other", "classes": {}}]},
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


def test_fastformer_tuning_names_the_file(file, logged, monkeypatch):
    """Or is off, or empty. One that is named and not there is logged, but not by a CPU, which has
    no measurements.
    """
    assert measurements.measurements(CPU) == {}
    (line,) = logged()
    assert str(file) in line
    monkeypatch.setattr(measurements, "machine", MACHINE)
    measurements.forget()
    assert measurements.measurements(CPU) == {} and len(logged()) == 1
    monkeypatch.setattr(measurements, "machine", lambda device: HERE)
    measurements.write(file, HERE, {(FORWARD, "a"): entry()})
    monkeypatch.setenv("FASTFORMER_TUNING", "off")
    measurements.forget()
    assert measurements.path() is None
    assert measurements.measurements(CPU) == {} and len(logged()) == 1


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


def test_the_default_file_is_in_the_cache_directory(monkeypatch):
    platformdirs = pytest.importorskip("platformdirs")
    monkeypatch.delenv("FASTFORMER_TUNING", raising=False)
    cache = platformdirs.user_cache_dir("fastformer", appauthor=False)
    assert measurements.path() == Path(cache) / "tuning.json"


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
    tiled = [x for x in questions(attention) if x.kernel != "attention short backward"]
    for question in tiled:
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


SMALL = dict(examples.calls(CPU, torch.float32, B=2, S=20, H=3, D=16, V=2000))
TILED = {"layer_norm", "dropout_add_rms_norm", "feed_forward", "swiglu", "cross_entropy", "embed"}


@pytest.mark.parametrize("op", sorted(TILED | {"rotary_embedding"}))
def test_every_measured_row_of_tiles_reaches_its_launch(file, op, monkeypatch):
    """And computes the same, to the policy."""
    launch, tuned = (pytest.importorskip(f"fastformer.kernels.{x}") for x in ("launch", "tuned"))
    call, taken = tuning.Call(op, backends.checked(op, **SMALL[op])), []
    former = launch.Launch.__init__

    def remember(self, kernel, grid, arguments, warps, *rest, **named):
        if "tile" in arguments:
            taken.append(tuple(x.value for x in arguments["tile"]))
        else:  # of cross-entropy
            taken.append((arguments["case"].columns.value, warps))
        former(self, kernel, grid, arguments, warps, *rest, **named)

    monkeypatch.setattr(launch.Launch, "__init__", remember)
    asked = questions(call)
    assert asked
    for question in asked:
        options = [o for o in question.options() if not isinstance(o, str)]
        assert len(options) > 3 and all(type(o) is type(question.shipped) for o in options)
        option = next(o for o in options if o[0] != question.shipped[0])
        case = question.kernel, question.case
        measurements.write(file, HERE, {case: entry(tuned.label(option))})
        backends.measure_again()
        taken.clear()
        call()
        assert option in taken
        assert call.drop_reason() is None


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


def plain(gradient=False, S=40):
    return [torch.randn(1, 2, S, 16, requires_grad=gradient) for _ in range(3)]


def class_of(op, **arguments):
    return op, measurements.class_of(op, backends.checked(op, **arguments))


def key(gradient=False):
    named = dict(zip(("query", "key", "value"), plain(gradient)))
    return class_of(OP, **named, is_causal=True)


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
        drops, mask = dict(is_causal=True, dropout_p=0.1), "; the dropout mask is from a seed"
        for other, more in ((dict(is_causal=False), ""), (drops, mask)):
            assert ff.explain(OP, *plain(), **other).reason == "it was chosen" + more
        assert ff.explain(OP, *plain(True), is_causal=True).reason == "it was chosen"
        assert ff.explain(OP, *plain(S=70), is_causal=True).reason == "it was chosen"
    with use_backend("reference"):
        assert ff.explain(OP, *plain(), is_causal=True).reason == "it was chosen"


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

    def forward(query, *rest):
        calls.append(query.shape)
        return torchs_flash(query, *rest)

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


def test_an_unknown_op_of_torch_is_no_choice(file, flash):
    measurements.write(file, HERE, {key(): Entry("torch (warp)", {"torch (warp)": 50.0}, {})})
    with use_backend("auto"):
        ff.scaled_dot_product_attention(*plain(), is_causal=True)
    assert flash == []


def rows(op, gradient=False):
    """The arguments of a norm of rows [6, 16]."""
    (weight, bias), (x, residual) = torch.randn(2, 16), torch.randn(2, 6, 16)
    given = dict(input=x, weight=weight) | ({} if "rms" in op else dict(bias=bias))
    given |= dict(residual=residual) if "add" in op else dict(normalized_shape=16)
    leaves = (x for x in given.values() if isinstance(x, torch.Tensor))
    return given if not gradient or [x.requires_grad_() for x in leaves] else {}


@pytest.mark.parametrize("op", [op for op, x in OPERATIONS.items() if x.alternatives and op != OP])
def test_torchs_norms_compute_the_same_as_ours(op):
    """Output by output, those that the backward reads included, and gradient by gradient."""
    backends._load(op)
    given = rows(op)
    found = [backends.checked(op, **given)]
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
    given = rows(op, True)
    name = f"torch ({op}, backward)"
    measurements.write(
        file, HERE, {class_of(op, **given): Entry(name, {name: 1.0, "triton": 2.0}, {})}
    )
    on_a_gpu(monkeypatch)
    backends._load(op)
    called = []
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


def test_a_committed_run_decides_where_this_machine_has_not_measured(file, monkeypatch):
    """By architecture, causality, grouped heads, head dim, and the nearest length in bfloat16."""
    from fastformer.ops.attention import record

    found = {(True, False, 64): {64: "torch (flash)", 512: "torch (cuDNN)"}}
    found[True, True, 64] = {64: "torch (cuDNN)"}
    found[True, False, 8] = {16: "torch (flash)", 32: "", 128: "torch (flash)", 512: ""}
    monkeypatch.setattr(record, "FASTER", {"sm_90": found})
    monkeypatch.setitem(OPERATIONS, OP, OPERATIONS[OP]._replace(faster=record._faster))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    on_a_gpu(monkeypatch)

    def chosen(length=64, heads=2, groups=2, dim=64, dtype=torch.bfloat16, queries=None, **options):
        q = torch.zeros(1, heads, queries or length, dim, dtype=dtype)
        k = torch.zeros(1, groups, length, dim, dtype=dtype)
        k = k.mT.contiguous().mT if options.pop("strided", False) else k
        options = {"is_causal": True, "enable_gqa": groups != heads, **options}
        return ff.explain(OP, q, k, k, **options).backend

    assert [chosen(n) for n in (31, 32, 128, 181, 256, 1024, 1025)] == [
        "triton", "torch (flash)", "torch (flash)", "triton", *["torch (cuDNN)"] * 2, "triton",
    ]  # fmt: skip
    assert [chosen(n, dim=8) for n in (16, 20, 23, 24, 32, 40, 64, 65, 128, 256)] == [
        *["torch (flash)"] * 2, *["triton"] * 5, *["torch (flash)"] * 2, "triton",
    ]  # fmt: skip
    assert chosen(groups=1) == "torch (cuDNN)" and chosen(512, groups=1) == "triton"
    for other in (
        dict(dtype=torch.float16), dict(is_causal=False), dict(dim=32), dict(queries=63),
        dict(dropout_p=0.1), dict(key_lengths=torch.tensor([9])), dict(strided=True),
    ):  # fmt: skip
        assert chosen(**other) == "triton", other
    causal = {n: torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16) for n in ("query", "key", "value")}
    case = class_of(OP, **causal, is_causal=True)
    measurements.write(file, HERE, {case: Entry("triton", {"triton": 1.0}, {})})
    backends.measure_again()
    assert chosen() == "triton"  # as this machine says
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    backends.measure_again()
    assert chosen(512) == "triton"


NOT_TORCHS = [
    ("layer_norm", dict(unbiased=True)),
    ("layer_norm", dict(input=torch.zeros(6, 16, dtype=torch.float16))),
    ("dropout_add_layer_norm", dict(dropout_p=0.1, dropout_seed=1)),
    ("dropout_add_rms_norm", dict(dropout_p=0.1, dropout_seed=1)),
]


@pytest.mark.parametrize("op, options", NOT_TORCHS)
def test_norms_that_torch_does_not_have(op, options):
    assert OPERATIONS[op].signature(backends.checked(op, **rows(op) | options)) is None


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
    wide = configurations.Tiles(128, 128, 8, 3)
    half = dtype == torch.bfloat16
    assert (wide in configurations.rows("forward", dtype, 128)) == half


def test_the_classes_of_a_kernel_round_sizes_up():
    from fastformer.kernels import tuned

    assert tuned.named(torch.float16, "tf32", q=1000, D=64, none=0) == "float16 q1024 D64 none1"
    assert tuned.named(torch.float32, "tf32", q=65) == "float32 tf32 q128"
    powers = [ff.description.next_power_of_2(n) for n in (0, 1, 2, 3, 64, 65)]
    assert powers == [1, 1, 2, 4, 64, 128]


# ------------------------------------------------------------------------------ classes of calls


def test_the_name_of_a_class():
    x = torch.randn(3, 5, 24, requires_grad=True)
    _, name = class_of("layer_norm", input=x, normalized_shape=24, weight=torch.ones(24))
    assert name == "float32 input=16x32 normalized_shape=32 weight=32 backward"
    heads = torch.randn(2, 40, 3, 16, dtype=torch.float16).transpose(1, 2)
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    _, name = class_of(OP, query=heads, key=heads, value=heads, attn_mask=mask, window=(8, 100))
    assert name == (
        "float16 query=2x4x64x16:0213 key=2x4x64x16:0213 value=2x4x64x16:0213 "
        "attn_mask=2x1x1x64 window=8x128 causal_alignment=top_left"
    )


def test_class_of_tells_calls_apart():
    base = dict(zip(("query", "key", "value"), plain()))
    same = [{}, dict(scale=0.5), dict(return_lse=True)]
    same += [dict(zip(base, plain(S=n))) for n in (33, 64)]
    assert len({class_of(OP, **base | options) for options in same}) == 1
    bias = torch.zeros(40, 40)
    different = [{}, dict(is_causal=True), dict(window=(8, None)), dict(softcap=3.0)]
    different += [dict(bias=bias), dict(bias=bias[:1]), dict(bias=bias[:, :1])]
    different += [dict(bias=bias.t()), dict(sinks=torch.zeros(2))]
    different += [dict(zip(base, plain(True))), dict(zip(base, plain(S=65)))]
    different += [{n: x.half() for n, x in base.items()}, dict(dropout_p=0.1, dropout_seed=1)]
    found = [class_of(OP, **base | options) for options in different]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("packed", [False, True])
def test_a_block_mask_is_cut(packed):
    """The part of a call has the mask of the tokens that it keeps."""
    dense = torch.rand(1 if packed else 3, 1, 300, 400) < 0.3
    given = dict(zip(("query", "key", "value"), (torch.randn(3, 1, n, 8) for n in (300, 400, 400))))
    op, q, k = "scaled_dot_product_attention", 150, 100
    if packed:
        op, q, k = "packed_attention", 140, 70
        given = {name: x[0].transpose(0, 1) for name, x in given.items()}
        sides = dict(q=[0, q, 300], k=[0, k, 400])
        given |= {f"cu_seqlens_{n}": torch.tensor(x).int() for n, x in sides.items()}
        given |= dict(max_q=160, max_k=330)
    call = backends.checked(op, **given, attn_mask=ff.block_mask(dense))
    part = measurements.cut(op, call, 150, 100)["attention"]
    have = dense_mask(part.mask_spans, part.mask_lists, part.mask_bits, q, k)
    assert torch.equal(have, dense[:2, :, :q, :k])


@pytest.mark.parametrize("op", sorted(SMALL))
def test_every_op_has_classes_and_a_part_that_float64_can_compute(op):
    given = backends.checked(op, **SMALL[op])
    part = measurements.cut(op, given, 8, 8)
    call = tuning.Call(op, given)
    results = call.results(part, "reference")
    wide = call.results(measurements.changed(part, tuning._double), "reference")
    assert measurements.class_of(op, given)
    assert len(results) == len(wide) > call.gradient and wide[0].dtype == torch.float64
    assert SMALL.keys() == OPERATIONS.keys()


def test_calls_that_are_not_measured():
    x = torch.zeros(0, 8)
    assert class_of("layer_norm", input=x, normalized_shape=8)[1] is None
    assert class_of("layer_norm", input=x.new_zeros(3, 8).double(), normalized_shape=8)[1] is None
