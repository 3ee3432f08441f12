"""The kernels of other packages: which calls they are measured for, what they are given, and when
`auto` takes them. The packages are fake, with the signatures of the real ones.
"""

import importlib
import importlib.util
import inspect
import logging
import sys
import types

import fake_peers
import numpy
import pytest
import torch
from fake_peers import CALLS, MODULES, VERSIONS

import fastformer as ff
import fastformer_command
from fastformer import use_backend
from fastformer.dispatch import autograd, backends, measurements, peers
from fastformer.dispatch.measurements import Entry
from fastformer.dispatch.operation import OPERATIONS, Alternative
from fastformer.dispatch.workloads import workload
from fastformer.tuning import tuner
from fastformer.tuning.measuring import measure

OP, CPU = "scaled_dot_product_attention", torch.device("cpu")
HERE = dict(gpu="GPU A", driver="570.1", torch="2.13.0", triton="3.7.1", fastformer="0.1.0")
FLASH = "flash-attn-4 4.0.0b36"

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def rsqrt(x):
    return 1.0 / tl.sqrt(x)


@pytest.fixture
def packages(monkeypatch):
    """The fake packages are installed, and tensors of the CPU are those of a Hopper GPU. It gives
    the versions, which a test may change.
    """
    versions = dict(VERSIONS)
    for name, functions in MODULES.items():
        module = types.ModuleType(name)
        module._str_to_casting_mode = fake_peers._str_to_casting_mode
        for function in functions:
            setattr(module, function, getattr(fake_peers, function))
        parts = name.split(".")
        for i in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(parts[i - 1]))
        monkeypatch.setitem(sys.modules, name, module)
    backends._import_all()
    peers.forget()
    monkeypatch.setattr(peers.importlib.metadata, "version", of(versions))
    monkeypatch.setattr(peers, "gpu_generation", lambda x: 9)
    monkeypatch.setattr(autograd, "_pairs", dict(autograd._pairs))
    CALLS.clear()
    yield versions
    monkeypatch.undo()
    peers.forget()


def of(versions):
    former = importlib.metadata.version

    def version(package):
        if package not in VERSIONS:
            return former(package)
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    return version


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "tuning.json"
    monkeypatch.setenv("FASTFORMER_TUNING", str(path))
    monkeypatch.setattr(measurements, "machine", lambda device: HERE)
    monkeypatch.setattr(measurements, "SHIPPED", ())
    backends.measure_again()
    yield path
    monkeypatch.undo()
    backends.measure_again()


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.WARNING, logger="fastformer")
    return lambda: [record.getMessage() for record in caplog.records]


def rows(op, dtype="bfloat16", gradient=True, M=6, N=32, **options):
    options = options or dict(weight=True)
    return workload(op, dtype, dict(M=M, N=N), gradient, **options)


def attention(dtype="bfloat16", gradient=True, B=2, H=2, G=2, Sq=24, Sk=24, D=16, Dv=16, **options):
    sizes = dict(B=B, H=H, G=G, Sq=Sq, Sk=Sk, D=D, Dv=Dv)
    return workload(OP, dtype, sizes, gradient, **options)


def loss(dtype="float32", gradient=True, **options):
    return workload("cross_entropy", dtype, dict(M=6, V=24), gradient, **options)


# ------------------------------------------------------------------------------------ the packages


@pytest.mark.parametrize("name", [f"{m}.{f}" for m, names in MODULES.items() for f in names])
def test_the_fakes_have_the_signatures_of_what_is_installed(name):
    module, _, function = name.rpartition(".")
    package = next(
        p for p in VERSIONS if p.partition("-")[0] == module.partition(".")[0].partition("_")[0]
    )
    peers.forget()
    if peers.version(package) is None:
        pytest.skip(f"{package} is not installed")
    real = inspect.signature(getattr(importlib.import_module(module), function)).parameters
    fake = inspect.signature(getattr(fake_peers, function)).parameters
    assert [(p.name, p.default) for p in fake.values()] == [
        (p.name, p.default) for p in real.values()
    ]


def test_info_names_the_packages(packages, capsys):
    del packages["liger-kernel"]
    fastformer_command.main(["info"])
    told = f"peers       {FLASH}, liger-kernel not installed, quack-kernels 0.6.5\n"
    assert told in capsys.readouterr().out


def test_no_call_imports_a_package(monkeypatch, file):
    """Not even where it is installed: neither calls of any backend nor a plan of measurements."""

    class Refuse:
        @staticmethod
        def find_spec(name, *_):
            roots = {module.partition(".")[0] for module in MODULES}
            assert name.partition(".")[0] not in roots, f"{name} is imported"

    monkeypatch.setattr(sys, "meta_path", [Refuse, *sys.meta_path])
    monkeypatch.setattr(peers.importlib.metadata, "version", of(VERSIONS))
    peers.forget()
    for backend in ("auto", "triton"):
        with use_backend(backend):
            ff.rms_norm(torch.randn(3, 16), 16)
            ff.explain("rms_norm", torch.randn(3, 16), 16)
    assert tuner.planned([rows("rms_norm")], file, CPU).rows
    peers.forget()


@pytest.mark.parametrize(
    "function, parameters, message",
    [
        ("rmsnorm", (), "quack.rmsnorm has no function rmsnorm"),
        ("rmsnorm_fwd", ("x", "bits"), "quack.rmsnorm.rmsnorm_fwd has no parameter bits"),
    ],
)
def test_another_interface_is_refused_by_name(packages, function, parameters, message):
    with pytest.raises(RuntimeError, match=f"^{message}$"):
        peers.function("quack.rmsnorm", function, *parameters)


# ------------------------------------------------------------------------------------- measuring


def candidates(one):
    """The entry of the op with the candidates that are peers, and no other."""
    done = {}
    for job in tuner.jobs_on(CPU)(one, done):
        able = (
            [c for c in job.candidates if peers.is_peer(one.op, c.name)]
            if job.key[0] == one.op
            else []
        )
        able += [c for c in job.candidates if c.baseline]
        done[job.key] = measure(job._replace(candidates=able), lambda call: call() and 1.0, {}, str)
    return done[one.op, one.key]


TAKEN = [
    attention(causal=True),
    attention("float16", H=4, G=2, heads_inside=True, softcap=True, left=8),
    attention(Sq=16, Sk=40, causal=True, bottom_right=True, Dv=24, sinks=True),
    attention(left=8, right=4),
    attention(gradient=False),
    rows("rms_norm"),
    rows("rms_norm", "float32", unbiased=False),
    rows("rms_norm", gradient=False),
    rows("layer_norm", weight=True, bias=True, weight_dtype="float32"),
    rows("layer_norm", "float32", weight=True, bias=True),
    rows("dropout_add_rms_norm"),
    rows("dropout_add_rms_norm", "float32", gradient=False),
    loss(reduction="mean"),
    loss("bfloat16", reduction="sum"),
    loss(gradient=False, reduction="none"),
]


@pytest.mark.parametrize("one", TAKEN, ids=str)
def test_a_peer_is_a_candidate_and_agrees_with_the_reference(packages, one):
    entry = candidates(one)
    expected = set(peers.installed(one.op, one.gradient))
    assert entry.dropped.keys() == {n for n in entry.dropped if "ties with" in entry.dropped[n]}
    assert entry.us.keys() == {*expected, "reference"} and expected
    assert any(name.endswith(", backward") for name in expected) == one.gradient
    assert any("backward" in name for name, _ in CALLS) == one.gradient


@pytest.mark.parametrize(
    "one, reason",
    [
        (attention(dropout=True), "it does not take dropout_p"),
        (attention(mask="all"), "it does not take attn_mask"),
        (attention(bias="all", alibi=True), "it does not take bias and alibi_slopes"),
        (attention(lengths=True), "it does not take key_lengths"),
        (attention("float32"), "it takes float16 and bfloat16"),
        (attention(D=20), "it takes no head dims 20 and 16 on sm_90"),
        (attention(Sq=16, causal=True), "its causal mask is aligned to the last key, and"),
        (attention(Sk=16, left=4, bottom_right=True), "its causal mask is aligned to the last"),
        (rows("layer_norm", weight=True, unbiased=True), "it does not take unbiased"),
        (rows("dropout_add_rms_norm", weight=True, dropout=True), "it does not take dropout_p"),
        (loss(reduction="mean", smoothing="uniform"), "it does not take label_smoothing"),
    ],
    ids=str,
)  # fmt: skip
def test_other_calls_are_refused_by_name(packages, one, reason):
    entry = candidates(one)
    assert entry.us.keys() == {"reference"} and CALLS == []
    assert entry.dropped.keys() == peers.installed(one.op).keys() and entry.dropped
    assert all(told.startswith(reason) for told in entry.dropped.values()), entry.dropped


def test_an_argument_that_a_peer_does_not_know_is_refused():
    """So is one that an op gets later."""
    given = dict(input=torch.ones(2), bias=None, offset=1.0, eps=1e-5, unbiased=False)
    assert peers.unknown(given, "input", "eps") == "it does not take offset"
    assert peers.unknown(given | dict(offset=0.0), "input", "eps") is None
    assert peers.unknown(dict(mask=torch.zeros(2)), "input") == "it does not take mask"


def test_a_norm_that_one_package_lacks_is_left_to_the_other(packages):
    dropped = candidates(rows("layer_norm", weight=True, bias=True)).dropped
    assert {n: r for n, r in dropped.items() if "ties" not in r} == dict.fromkeys(
        ["quack-kernels 0.6.5", "quack-kernels 0.6.5, backward"],
        "it takes weight and bias in float32",
    )
    reasons = candidates(rows("layer_norm", "float32", weight=True)).dropped
    assert reasons["liger-kernel 0.8.5"] == "it needs a bias"


@pytest.mark.parametrize("generation, forward, backward", [
    (9, None, None),
    (12, None, "it has no deterministic backward on sm_120"),
    (8, None, "it has no deterministic backward on sm_80"),
    (7, "it runs on NVIDIA GPUs, sm_80 and newer", "it has no deterministic backward on sm_70"),
    (0, "it runs on NVIDIA GPUs, sm_80 and newer", "it runs on NVIDIA GPUs, sm_80 and newer"),
    (None, "it runs on NVIDIA GPUs, sm_80 and newer", "it runs on NVIDIA GPUs, sm_80 and newer"),
])  # fmt: skip
def test_the_gpu_decides(packages, monkeypatch, generation, forward, backward):
    monkeypatch.setattr(peers, "gpu_generation", lambda x: generation)
    arguments = description(attention())
    reasons = [peer.unsupported_reason(arguments) for peer in OPERATIONS[OP].peers]
    assert reasons == [forward, backward]


@pytest.mark.parametrize("generation", [0, 7, None])
def test_norms_and_losses_on_other_gpus(packages, monkeypatch, generation):
    """Liger's are Triton's, and run on any; QuACK's are for NVIDIA's alone."""
    monkeypatch.setattr(peers, "gpu_generation", lambda x: generation)
    for one in (rows("rms_norm"), loss(reduction="mean")):
        for name, peer in peers.installed(one.op).items():
            reason = peer.unsupported_reason(description(one))
            if "quack" in name:
                assert reason == "it runs on NVIDIA GPUs, sm_80 and newer"
            else:
                assert reason == ("it runs on GPUs" if generation is None else None)


@pytest.mark.parametrize("generation, dims, taken", [
    (9, (256, 256), True), (9, (192, 128), True), (10, (128, 64), True), (10, (192, 128), True),
    (10, (256, 256), True), (10, (192, 192), False), (11, (256, 128), False), (8, (128, 128), True),
    (12, (192, 128), False), (9, (128, 60), False), (9, (264, 64), False),
])  # fmt: skip
def test_head_dims(packages, monkeypatch, generation, dims, taken):
    monkeypatch.setattr(peers, "gpu_generation", lambda x: generation)
    arguments = description(attention(D=dims[0], Dv=dims[1]))
    assert (OPERATIONS[OP].peers[0].unsupported_reason(arguments) is None) == taken


def description(one):
    found = []
    with backends.observe(on_call=lambda op, arguments: found.append(arguments)):
        OPERATIONS[one.op].contract(**one.arguments(CPU))
    return found[0]


@pytest.mark.parametrize("options, reason", [
    (dict(scale=-1.0), "it takes a positive scale"),
    (dict(scale=0.0), "it takes a positive scale"),
    (dict(shard=ff.description.Shard(queries=48, keys=48)), "it does not take shard"),
])  # fmt: skip
def test_calls_that_no_measurement_makes(packages, options, reason):
    """They share the class of a call that is measured."""
    peer, found = OPERATIONS[OP].peers[0], []
    with backends.observe(on_call=lambda op, arguments: found.append(arguments)):
        ff.scaled_dot_product_attention(**attention().arguments(CPU), **options)
    assert peer.unsupported_reason(found[0]) == reason
    assert peer.unsupported_reason(description(attention())) is None


def test_rows_that_begin_anywhere_are_refused(packages):
    x = torch.zeros(65, dtype=torch.bfloat16)[1:].view(2, 32)
    for given in (x, torch.zeros(32, 4, dtype=torch.bfloat16).t()):
        assert peers.unsupported_rows(given).startswith("it takes contiguous tensors")
    assert peers.unsupported_rows(x.clone(), None) is None
    assert peers.unsupported_rows(x.clone(), x.double()) == "it does not take float64"


@pytest.mark.parametrize(
    "one",
    [
        rows("layer_norm", weight=True, bias=True, weight_dtype="float32", M=37, N=200),
        rows("rms_norm", "float32", M=37, N=200),
        rows("rms_norm", "float16", M=37, N=200, unbiased=False),
        rows("dropout_add_rms_norm", M=37, N=200),
    ],
    ids=str,
)
def test_ligers_kernels_agree_with_the_reference(monkeypatch, one):
    """The real ones, where Liger is installed, in Triton's interpreter. It lacks CUDA's rsqrt, and
    numbers that are tensors in a kernel.
    """
    pytest.importorskip("liger_kernel")
    from triton.runtime import interpreter

    former = interpreter._implicit_cvt

    def convert(x):
        if not isinstance(x, float):
            return former(x)
        handle = interpreter.TensorHandle(numpy.array([x], numpy.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", convert)
    for name in ("layer_norm", "rms_norm", "fused_add_rms_norm"):
        module = importlib.import_module(f"liger_kernel.ops.{name}")
        monkeypatch.setattr(module, "rsqrt", rsqrt)
    peers.forget()
    monkeypatch.setattr(peers, "gpu_generation", lambda x: 0)
    entry = candidates(one)
    found = {n for n in entry.us if n.startswith("liger")}
    assert found == {n for n in peers.installed(one.op) if n.startswith("liger")}, entry.dropped


# ----------------------------------------------------------------------------- what they are given


def test_flash_attention_gets_the_arguments_of_the_call(packages):
    one = attention(H=4, G=2, left=8, softcap=True, causal=True, sinks=True, heads_inside=True)
    given = one.arguments(CPU) | dict(scale=0.3)
    with use_backend("triton"):
        autograd.add(OP, FLASH, Alternative(*OPERATIONS[OP].peers[1][1:3]))
        with autograd.replaced(OP, FLASH):
            out = ff.scaled_dot_product_attention(**given)
            out.sum().backward()
    (forward, first), (backward, second) = CALLS
    assert (forward, backward) == ("flash forward", "flash backward")
    shared = dict(softmax_scale=0.3, causal=True, softcap=30.0, window_size_left=8)
    shared |= dict(window_size_right=None)
    assert {n: first[n] for n in shared} == shared and first["return_lse"] is True
    assert {n: second[n] for n in shared} == shared and second["deterministic"] is True
    assert first["learnable_sink"].shape == (4,) and second["lse"].shape == (2, 4, 24)
    for name, heads in dict(q=4, k=2, v=2, out=4).items():
        assert first[name].shape == (2, 24, heads, 16), name
    # Nothing is copied: the inputs and the output are views.
    assert first["q"].data_ptr() == given["query"].data_ptr()
    assert first["out"].data_ptr() == out.data_ptr()


@pytest.mark.parametrize("inside", [False, True])
def test_results_lie_in_memory_as_those_of_the_kernels_do(packages, inside):
    one = attention("float16", heads_inside=inside)
    results = []
    for name in ("", FLASH):
        given = one.arguments(CPU)
        leaves = [given[n] for n in ("query", "key", "value")]
        with use_backend("triton"):
            if name:
                autograd.add(OP, name, Alternative(*OPERATIONS[OP].peers[1][1:3]))
                with autograd.replaced(OP, name):
                    out, lse = ff.scaled_dot_product_attention(**given, return_lse=True)
            else:
                out, lse = ff.scaled_dot_product_attention(**given, return_lse=True)
            grads = torch.autograd.grad(out.sum(), leaves)
        results.append((out, lse, *grads))
    for ours, theirs in zip(*results):
        assert ours.stride() == theirs.stride() and ours.dtype == theirs.dtype
        torch.testing.assert_close(theirs, ours, atol=4e-3, rtol=4e-3)


def test_the_gradient_of_lse_is_the_kernels(packages):
    """It is no output of what is measured."""
    given = attention("float16", H=1, G=1).arguments(CPU)
    with use_backend("triton"):
        autograd.add(OP, FLASH, Alternative(*OPERATIONS[OP].peers[1][1:3]))
        with autograd.replaced(OP, FLASH):
            out, lse = ff.scaled_dot_product_attention(**given, return_lse=True)
            grad = torch.autograd.grad(out.sum() + lse.sum(), given["query"])[0]
    with use_backend("reference"):
        out, lse = ff.scaled_dot_product_attention(**given, return_lse=True)
        want = torch.autograd.grad(out.sum() + lse.sum(), given["query"])[0]
    assert [name for name, _ in CALLS] == ["flash forward"]
    torch.testing.assert_close(grad, want, atol=4e-3, rtol=4e-3)


def test_a_sum_whose_second_output_is_unused(packages):
    one = rows("dropout_add_rms_norm", "float32")
    for name, peer in peers.installed(one.op).items():
        given = one.arguments(CPU)
        with use_backend("triton"):
            autograd.add(one.op, name, Alternative(peer.forward, peer.backward))
            with autograd.replaced(one.op, name):
                y, _ = ff.dropout_add_rms_norm(**given)
                found = torch.autograd.grad(y.square().sum(), [given["input"], given["weight"]])
        with use_backend("reference"):
            y, _ = ff.dropout_add_rms_norm(**given)
            want = torch.autograd.grad(y.square().sum(), [given["input"], given["weight"]])
        for x, exact in zip(found, want):
            torch.testing.assert_close(x, exact)


def test_targets_that_are_ignored(packages):
    logits = torch.randn(4, 8, requires_grad=True)
    target = torch.tensor([1, 3, 3, 7])
    for reduction in ("mean", "sum", "none"):
        results = []
        for peer in (None, OPERATIONS["cross_entropy"].peers[1]):
            with use_backend("reference" if peer is None else "triton"):
                if peer is not None:
                    backends._load("cross_entropy")
                    autograd.add("cross_entropy", "q", Alternative(*peer[1:3]))
                with autograd.replaced("cross_entropy", "q") if peer else use_backend("reference"):
                    found = ff.cross_entropy(logits, target, reduction, ignore_index=3)
                    grad = torch.autograd.grad(found.square().sum(), logits)[0]
            results.append((found, grad))
        for x, want in zip(*results):
            torch.testing.assert_close(x, want)


# --------------------------------------------------------------------------------- stored choices


def stored(file, one, name, **us):
    entry = Entry(name, {name: 50.0, "triton": 100.0} | us, {})
    measurements.write(file, HERE, {(one.op, one.key): entry})


@pytest.fixture
def on_a_gpu(monkeypatch):
    """`auto` chooses for tensors of the CPU as it does for those of a GPU."""
    former = backends.choose_backend
    monkeypatch.setattr(backends, "runs_directly", lambda: False)

    def choose(op, arguments, backend):
        if backend != "auto":
            return former(op, arguments, backend)
        backends._load(op)
        name = backends._measured(op, arguments, next(iter(arguments.values()))) or "triton"
        return backends.Choice(op, name, "the tensors are on a GPU")

    monkeypatch.setattr(backends, "choose_backend", choose)


def norm(one, backend):
    """The output and the gradients of a workload of rms_norm."""
    given = one.arguments(CPU)
    with use_backend(backend):
        y = ff.rms_norm(**given)
        return y, *torch.autograd.grad(y.square().sum(), [given["input"], given["weight"]])


def same(one):
    for x, want in zip(norm(one, "auto"), norm(one, "reference")):
        torch.testing.assert_close(x, want)


def test_auto_takes_the_peer_that_was_the_fastest(packages, file, on_a_gpu, logged):
    one, name = rows("rms_norm", "float32"), "quack-kernels 0.6.5, backward"
    stored(file, one, name)
    same(one)
    assert [called for called, _ in CALLS] == ["quack rms_norm", "quack rms_norm backward"]
    with use_backend("auto"):
        said = ff.explain("rms_norm", **one.arguments(CPU))
    assert (said.backend, said.reason) == (name, "measured: 2.00 x the kernel")
    CALLS.clear()
    same(rows("rms_norm", "float16", N=64))  # not measured
    with use_backend("triton"):
        ff.rms_norm(**one.arguments(CPU))
    assert CALLS == [] and logged() == []


@pytest.mark.parametrize("found", ["0.7.0", None])
def test_a_peer_that_is_gone_or_another_one_is_not_taken(packages, file, on_a_gpu, logged, found):
    one, name = rows("rms_norm", "float32"), "quack-kernels 0.6.5"
    stored(file, one, name)
    packages.pop("quack-kernels")
    packages |= {} if found is None else {"quack-kernels": found}
    same(one)
    same(rows("rms_norm", "float32", M=7))
    (line,) = logged()
    what = "is not installed" if found is None else "has version 0.7.0 now"
    assert line.startswith(f"{name} was measured to be the fastest for rms_norm, and quack-kernels")
    assert what in line and CALLS == []


def test_a_peer_that_fails_is_replaced_by_the_kernel(packages, file, on_a_gpu, logged, monkeypatch):
    one, name = rows("rms_norm", "float32"), "quack-kernels 0.6.5, backward"
    stored(file, one, name)

    def fail(*_, **__):
        raise ValueError("no compiler\nand more")

    for function in ("rmsnorm_bwd", "rmsnorm_fwd"):
        signature = inspect.signature(getattr(fake_peers, function))
        fail.__signature__ = signature
        monkeypatch.setattr(sys.modules["quack.rmsnorm"], function, fail)
        backends.measure_again()
        same(one)
        same(one)
    told = f"{name} fails, and the kernel of rms_norm runs instead: ValueError: no compiler"
    assert logged() == [told, told]  # once after each `measure_again`


def test_a_call_of_the_class_that_a_peer_does_not_compute(packages, file, on_a_gpu):
    stored(file, rows("rms_norm", "float32"), "quack-kernels 0.6.5")
    x = torch.randn(32, 6, requires_grad=True).t()  # not contiguous
    with use_backend("auto"):
        ff.rms_norm(x, 32, torch.ones(32))
    assert CALLS == []


def test_a_choice_of_torch_beside_one_of_a_peer(packages, file, on_a_gpu, monkeypatch):
    """Both are found in one file, and torch's op is taken where it computes the call."""
    backends._load("rms_norm")
    torchs = "torch (rms_norm)"
    stored(file, rows("rms_norm", "float32"), "quack-kernels 0.6.5")
    stored(file, rows("rms_norm", "float32", N=64), torchs)
    called = []
    pair = autograd._pairs[f"rms_norm: {torchs}"]
    former = pair.forward
    monkeypatch.setattr(pair, "forward", lambda *x: called.append(1) or former(*x))
    same(rows("rms_norm", "float32", N=64))
    assert called == [1] and CALLS == []
    with use_backend("auto"):
        ff.rms_norm(torch.randn(64, 6, requires_grad=True).t(), 64, torch.ones(64))
    assert called == [1]
    same(rows("rms_norm", "float32"))
    assert [name for name, _ in CALLS] == ["quack rms_norm"]


# --------------------------------------------------------------------------- what is measured again


def test_another_peer_is_measured_though_the_class_is_known(packages, file):
    one, other = rows("rms_norm"), workload("embed", "float32", dict(M=4, S=2, N=8, V=9))
    known = dict.fromkeys([*peers.installed("rms_norm"), "triton"], 1.0)
    entry = Entry("triton", known, {})
    kernel = ("layer_norm forward", "a")
    measurements.write(file, HERE, {(w.op, w.key): entry for w in (one, other)} | {kernel: entry})
    wanted = [one, other]

    def planned():
        peers.forget()
        return [row[0] for row in tuner.planned(wanted, file, CPU).rows]

    assert planned() == []
    packages["quack-kernels"] = "0.7.0"
    assert planned() == [str(one)]
    assert kernel in tuner._known(file, HERE)
    del packages["quack-kernels"]
    assert planned() == []  # nothing is new, and the kernel was chosen
    stored(file, one, "quack-kernels 0.6.5", **known)
    assert planned() == [str(one)]  # its choice is gone


def test_a_class_without_gradients_needs_no_backward_of_a_peer(packages, file):
    one = rows("rms_norm", gradient=False)
    known = dict.fromkeys([*peers.installed("rms_norm", False), "triton"], 1.0)
    stored(file, one, "triton", **known)
    assert tuner.planned([one], file, CPU).rows == ()
