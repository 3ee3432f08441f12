"""The choice of a backend: by argument, thread, environment and device, and what explain() says of
it.
"""

import functools
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fastformer as ff
from fastformer import current_backend, explain, use_backend
from fastformer.dispatch import autograd, backends
from fastformer.ops import examples


def test_use_backend_takes_effect_at_once_and_restores():
    before = current_backend()
    with use_backend("reference"):
        assert current_backend() == "reference"
        with use_backend("triton"):
            assert current_backend() == "triton"
        assert current_backend() == "reference"
        use_backend("auto")
        assert current_backend() == "auto"
    assert current_backend() == before
    with pytest.raises(KeyError), use_backend("triton"):
        raise KeyError
    assert current_backend() == before
    chosen = use_backend("reference")
    for _ in range(2):  # one object, twice
        with chosen:
            assert current_backend() == "reference"
        assert current_backend() == before


def test_backend_of_autograds_own_threads(fresh):
    """Those that a GPU's backward runs in, and on a CPU a deep enough one: of who called it."""
    code = """
import threading, torch, fastformer as ff
main, seen = threading.current_thread(), set()
class Deep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        with ff.use_backend('triton'):
            assert ff.current_backend() == 'triton'
        seen.add((threading.current_thread() is main, ff.current_backend()))
        if ctx.depth:
            with torch.enable_grad():
                Deep.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).backward()
        return grad, None
def run():
    Deep.apply(torch.ones(1, requires_grad=True), 100).backward()
    print(sorted(seen))
    seen.clear()
run()
with ff.use_backend('reference'):
    run()
run()
"""
    default, chosen = (f"[(False, '{name}'), (True, '{name}')]" for name in ("auto", "reference"))
    assert fresh(code).splitlines() == [default, chosen, default]


def test_unknown_backend(fresh):
    with pytest.raises(
        ValueError, match="backend is 'cuda'; expected one of auto, triton, reference"
    ):
        use_backend("cuda")
    code = "import torch, fastformer as ff; ff.layer_norm(torch.ones(2), 2)"
    assert "FASTFORMER_BACKEND is 'fast'; expected one of" in fresh(code, FASTFORMER_BACKEND="fast")


def test_import_touches_neither_triton_nor_a_driver(fresh):
    """And the environment chooses the backend, which is `auto` without it."""
    code = (
        "import sys, torch, fastformer as ff; torch.cuda.is_initialized() and print('cuda');"
        "print(ff.current_backend(), [m for m in sys.modules if m.split('.')[0] == 'triton'])"
    )
    assert fresh(code) == "auto []"
    assert fresh(code, FASTFORMER_BACKEND="reference") == "reference []"


def test_works_without_triton(fresh):
    """As on macOS and Windows: everything runs on the reference, and an explicit `triton` says what
    is missing.
    """
    code = """
import sys
class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] == 'triton':
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoTriton())
import importlib.util, torch
find = importlib.util.find_spec
importlib.util.find_spec = lambda n, *a: None if n == 'triton' else find(n, *a)
import fastformer as ff
print(ff.layer_norm(torch.tensor([1., 3.]), 2, eps=0.).tolist())
with ff.use_backend('triton'):
    try:
        ff.layer_norm(torch.ones(2), 2)
    except RuntimeError as error:
        print(error)
"""
    assert fresh(code).splitlines() == [
        "[-1.0, 1.0]",
        "the triton backend cannot run layer_norm: triton is not installed",
    ]


CALL = "import torch, fastformer as ff; ff.use_backend('triton'); {}"  # in a process of its own


def test_triton_on_a_cpu_needs_the_interpreter(fresh):
    printed = fresh(CALL.format("ff.layer_norm(torch.ones(2), 2)"))
    assert "RuntimeError: the triton backend cannot run layer_norm: on a CPU" in printed
    assert "TRITON_INTERPRET=1" in printed
    module = "m = torch.nn.Sequential(torch.nn.LayerNorm(2)); ff.accelerate(m); m(torch.ones(2))"
    assert "RuntimeError: the triton backend cannot run" in fresh(CALL.format(module))


@pytest.mark.with_all
def test_the_first_call_of_a_process_may_be_compiled(fresh):
    """Dynamo refused to trace the import of the kernel file; every test had called it before."""
    compiled = "torch.compile(lambda x: ff.layer_norm(x, 8), fullgraph=True, backend='aot_eager')"
    code = CALL.format(f"print({compiled}(torch.ones(2, 8, requires_grad=True)).shape)")
    assert fresh(code, TRITON_INTERPRET="1") == "torch.Size([2, 8])"


def test_bfloat16_in_the_unrepaired_interpreter_is_refused(fresh):
    code = CALL.format("{}; print(ff.layer_norm(torch.ones(2).bfloat16(), 2))")
    refused = fresh(code.format("pass"), TRITON_INTERPRET="1")
    assert "computes bfloat16 on bit patterns" in refused and "interpreter.repair()" in refused
    repaired = "from fastformer.kernels import interpreter; interpreter.repair()"
    printed = fresh(code.format(repaired), TRITON_INTERPRET="1")
    assert "tensor([0., 0.], dtype=torch.bfloat16)" in printed


def test_explain(device):
    x = torch.ones(1, 1, 4, 8)
    with use_backend("auto"):
        choice = explain("scaled_dot_product_attention", x, x, x, is_causal=True)
    assert choice == ("scaled_dot_product_attention", "reference", "the tensors are on the CPU")
    assert str(choice) == "scaled_dot_product_attention: reference (the tensors are on the CPU)"
    with use_backend("triton"):
        assert explain("layer_norm", torch.ones(2, device=device), 2).backend == "triton"
    with use_backend("reference"):
        choice = explain("layer_norm", torch.ones(2), 2)
    assert choice.backend == "reference" and "chosen" in choice.reason
    with pytest.raises(
        ValueError, match="op is 'softmax'; expected one of cross_entropy, dropout_add_layer_norm"
    ):
        explain("softmax")
    with pytest.raises(ValueError, match="normalized_shape"):  # bad arguments raise as in the call
        explain("layer_norm", torch.ones(2), 3)
    ff.layer_norm(torch.ones(2), 2)  # explaining is over, whatever was raised


@pytest.mark.gpu
def test_explain_on_a_gpu(device):
    choice = explain("layer_norm", torch.ones(2, device=device), 2)
    assert choice.backend == "triton"
    name = torch.cuda.get_device_name()
    assert (name in backends.VERIFIED_GPUS) != (
        f"no run of the kernels on a {name}" in choice.reason
    )


def test_a_graph_of_ops_that_have_not_run(device, monkeypatch):
    """Two in one graph, neither of which is loaded yet."""
    pytest.importorskip("triton")
    monkeypatch.setattr(backends, "_kernels", {})
    monkeypatch.setattr(autograd, "_pairs", {})

    def step(x):
        return ff.layer_norm(ff.rms_norm(x, 8), 8)

    x = torch.randn(3, 8, device=device)
    with use_backend("triton"):
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), step(x))


@pytest.mark.parametrize("op", sorted(backends.OPERATIONS))
def test_seven_frames_lead_to_a_launch(device, monkeypatch, op):
    """Ours, from the public function to the one that launches, those two included: on a hit."""
    launch = pytest.importorskip("fastformer.kernels.launch")
    package = Path(ff.__file__).resolve().parent
    original, paths = launch.Launch.__call__, []

    def record(self, *pointers):
        frames = [Path(f.filename).resolve() for f in inspect.stack(context=0)]
        ours = (package, package.parent / "kernels")
        paths.append([f for f in frames if any(folder in f.parents for folder in ours)])
        return original(self, *pointers)

    small = examples.calls(device, torch.float32, B=1, S=16, H=1, D=16, V=16)
    given = dict(small)[op]
    if "dropout_seed" in given:  # as a number it leaves no plan
        given = given | dict(dropout_seed=torch.tensor([given["dropout_seed"]], device=device))
    for name in [n for n in given if n.startswith("teacher")]:
        given |= {name: given[name].detach()}
    with use_backend("triton"):
        getattr(ff, op)(**given)  # leaves the plan
        monkeypatch.setattr(launch.Launch, "__call__", record)
        getattr(ff, op)(**given)
    assert paths and all(1 < len(frames) <= 7 for frames in paths)
    assert all(frames[-1] == package / "dispatch" / "front.py" for frames in paths)


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_the_autocast_of_another_device(where):
    """There is nothing to turn off for the op; of meta tensors torch knows no autocast."""
    x = torch.randn(3, 4, device=where)
    torch.set_autocast_enabled("cuda", True)  # without a GPU torch.autocast turns itself off
    try:
        have = ff.layer_norm(x, 4)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert (have.device.type, have.dtype, have.shape) == (where, torch.float32, (3, 4))
    if where == "cpu":
        torch.testing.assert_close(have, torch.nn.functional.layer_norm(x, [4]))


def test_a_forward_decides_the_backend_of_its_backward(work):
    x = torch.randn(3, 8, requires_grad=True)
    with use_backend("triton"):
        y = ff.layer_norm(x, 8)
    with use_backend("reference"):
        assert work(lambda: y.sum().backward()).launches > 0


def test_a_gpu_is_asked_once(monkeypatch):
    """For its capability and its name; and dynamo traces no cache, of which it would warn."""
    launch = pytest.importorskip("fastformer.kernels.launch")
    asked = []
    monkeypatch.setattr(launch, "INTERPRETED", False)
    for name, answer in (("capability", (9, 0)), ("name", "a GPU")):
        monkeypatch.setattr(
            torch.cuda, f"get_device_{name}", lambda _, n=name, a=answer: asked.append(n) or a
        )
    for owner, name in ((launch, "_capability"), (launch, "architecture"), (backends, "_gpu_name")):
        monkeypatch.setattr(owner, name, functools.cache(getattr(owner, name).__wrapped__))
    x = torch.empty(2, device="meta")
    for _ in range(2):
        assert launch.unsupported_dtype(x) is None
        assert launch.architecture(x.device) == "sm_90"
        assert "kernels on a a GPU is on record" in backends._caveat(x.device)
    supported = lambda x: x + 1 if launch.unsupported_dtype(x) is None else x  # noqa: E731
    torch.compile(supported, backend="eager", fullgraph=True)(x)
    assert sorted(asked) == ["capability", "name"]


@pytest.fixture
def matmul():
    """torch's settings for float32 products, as they were afterwards. None is made before: one that
    somebody has made for `matmul` goes before the one for everything.
    """
    matmul = torch.backends.cuda.matmul
    former = matmul.fp32_precision, torch.backends.fp32_precision
    matmul.fp32_precision = torch.backends.fp32_precision = "none"
    yield matmul
    torch.set_float32_matmul_precision("highest")
    matmul.fp32_precision, torch.backends.fp32_precision = former


SETTINGS = {
    "nothing": lambda matmul: False,
    "allow_tf32": lambda matmul: setattr(matmul, "allow_tf32", True) or True,
    "no allow_tf32": lambda matmul: setattr(matmul, "allow_tf32", False) or False,
    "high": lambda matmul: torch.set_float32_matmul_precision("high") or True,
    "highest": lambda matmul: torch.set_float32_matmul_precision("highest") or False,
    "tf32": lambda matmul: setattr(matmul, "fp32_precision", "tf32") or True,
    "ieee": lambda matmul: setattr(matmul, "fp32_precision", "ieee") or False,
    "everywhere": lambda matmul: setattr(torch.backends, "fp32_precision", "tf32") or True,
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_tf32_as_torch_was_told(device, matmul, setting):
    """By the flag of old or by `fp32_precision`, which makes the flag raise when it is read."""
    launch = pytest.importorskip("fastformer.kernels.launch")
    allowed = SETTINGS[setting](matmul)
    assert launch.allow_tf32() == allowed
    assert launch.dot_precision("sm_90") == ("tf32" if allowed else "tf32x3")
    x = torch.randn(1, 1, 4, 16, device=device)
    with use_backend("triton"):
        ff.scaled_dot_product_attention(x, x, x)
        ff.feed_forward(x, x[0, 0], None, x[0, 0].t(), None)


def test_reason_is_logged_once(caplog):
    backends._log_once.cache_clear()
    with use_backend("auto"), caplog.at_level("INFO", logger="fastformer"):
        for _ in range(3):
            ff.layer_norm(torch.ones(2), 2)
    assert [r.getMessage() for r in caplog.records] == [
        "layer_norm: reference (the tensors are on the CPU)"
    ]


def test_compute_capabilities(monkeypatch):
    """B300 has compute capability 10.3, Jetson Thor 11.0: they have what 10.0 has."""
    launch = pytest.importorskip("fastformer.kernels.launch")
    monkeypatch.setattr(launch, "INTERPRETED", False)
    rows = {"sm_80": [(8, 0)], "sm_86": [(8, 6), (8, 9), (12, 0), (12, 1)], "sm_90": [(9, 0)]}
    rows |= {"sm_100": [(10, 0), (10, 1), (10, 3), (11, 0)], "other": [(7, 5), (8, 7), (13, 0)]}
    for name, capabilities in rows.items():
        for capability in capabilities:
            monkeypatch.setattr(launch, "compute_capability", lambda _, c=capability: c)
            assert launch.architecture.__wrapped__(torch.device("cuda")) == name, capability
            reason = launch.unsupported_dtype(torch.zeros(1)) or "none"
            told = "none" if capability >= (8, 0) else "need compute capability 8.0"
            assert told in reason, capability
    assert "interpreter only" in launch.unsupported_dtype(torch.zeros(1, dtype=torch.float64))


def test_amd_gpus_run_the_reference(monkeypatch):
    """Every op, on a HIP build of torch, whose GPUs are "cuda" devices; its CPU is as any other."""
    products = pytest.importorskip("fastformer.kernels.products")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    why = "AMD GPUs (HIP) run the PyTorch reference"
    with FakeTensorMode():
        x = torch.empty(2, 8, device="cuda")
        for op in backends.OPERATIONS:
            assert backends.choose_backend(op, {"x": x}, "auto") == (op, "reference", why)
            with pytest.raises(RuntimeError, match=rf"cannot run {op}: {re.escape(why)}"):
                backends.choose_backend(op, {"x": x}, "triton")
        with use_backend("auto"):
            assert explain("layer_norm", x, 8).reason == why and ff.layer_norm(x, 8).is_cuda
        with use_backend("triton"), pytest.raises(RuntimeError, match=re.escape(why)):
            ff.layer_norm(x, 8)
        assert products.unsupported(x) == "the kernels do not run on AMD GPUs (HIP)"
    with use_backend("triton"):
        assert explain("layer_norm", torch.ones(2), 2).reason == "it was chosen"


def test_where_the_kernels_are_preferred():
    here, elsewhere = torch.empty(2), torch.empty(2, device="meta")
    preferred = {}
    for backend in ("auto", "triton", "reference"):
        with use_backend(backend):
            preferred[backend] = [backends.prefers_kernels(x) for x in (here, elsewhere)]
    assert preferred == dict(auto=[False, True], triton=[True, True], reference=[False, False])
