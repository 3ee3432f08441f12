"""Every op on calls that a generator draws, forward and gradients, against mathematics written
apart from the reference: independent.py. The draws are the same in each run; `--slow` makes new
ones, thousands.

Both backends pass through the same cases, which calls.py draws. No interpreted program reads
outside of its tensors.
"""

import contextlib
import inspect
import math
import zlib

import independent
import numpy as np
import pytest
import torch
from calls import (
    DRAWN,
    Draw,
    attention_weights,
    cross_entropy,
    drawn,
    embed,
    layer_norm,
    outputs_of,
    rms_norm,
    scaled_dot_product_attention,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import fastformer as ff
from fastformer.dispatch import autograd, backends
from fastformer.ops import functional

CASES, OF_ATTENTION = 30, 45  # of an op, in each run; of the one with the most options
SLOW = 2000  # with --slow; a fifth of it on the interpreted kernels
STEP = 1e-30  # of the derivative by a complex step


MATHEMATICS = {
    "scaled_dot_product_attention": lambda **x: independent.attention(**x)[: 1 + x["return_lse"]],
    "attention_weights": lambda **x: independent.attention(
        **x, value=np.zeros((*x["key"].shape[:3], 1))
    )[2:],
    "packed_attention": lambda **x: independent.packed_attention(**x)[: 1 + x["return_lse"]],
    "geglu": independent.gated("gelu"),
    "swiglu": independent.gated("silu"),
}


# ----------------------------------------------------------------------------------------- the test


def array(x):
    """A tensor in NumPy, float64 where it is floating; what nobody may read is a zero."""
    x = x.dense() if isinstance(x, ff.BlockMask) else x
    if not isinstance(x, torch.Tensor):
        return x
    x = x.detach().cpu()
    x = x.double().nan_to_num(0.0, neginf=-math.inf) if x.is_floating_point() else x
    return x.numpy()


def tolerance(case, draw, x, backend, tensors):
    """Of roundings in the dtype that the case computes in, relative to what they are in."""
    dtype = x.dtype if case is cross_entropy else max(draw.dtype, x.dtype, key=eps)
    if dtype == torch.float64:  # the interpreter's constants are float32, of a norm eps alone
        kernels = 1e-8 if case in (layer_norm, rms_norm) else 2e-7
        return 1e-12 if backend == "reference" else kernels
    roundings = 20 if dtype == torch.float32 else 4
    if case is embed and backend == "reference":  # torch sums a token's gradients in their dtype
        roundings = max(roundings, int(tensors["tokens"].flatten().bincount().max()) / 2)
    return roundings * eps(dtype)


def eps(dtype):
    return torch.finfo(dtype).eps


def check(case, draw, backend, tiles, alone=None):
    """Raises an AssertionError that names the first output or gradient that is wrong. `alone`: the
    number of the only input with a gradient.
    """
    tensors, options, floating = drawn(case, draw)
    mathematics = MATHEMATICS.get(case.__name__) or getattr(independent, case.__name__)
    if alone is not None and floating:
        floating = [floating[alone % len(floating)]]
    leaves = {name: tensors[name].requires_grad_() for name in floating}
    with tiles:
        outputs = outputs_of(case, tensors, options)
        cotangents = [draw.normal(*x.shape, dtype=x.dtype) for x in outputs]
        if draw.often(0.2):  # as a sum hands it back
            cotangents = [x.new_ones(()).expand(x.shape) for x in cotangents]
        moving = [x for x in outputs if x.requires_grad]  # with the leaves
        incoming = [c for x, c in zip(outputs, cotangents) if x.requires_grad]
        grads = torch.autograd.grad(moving, list(leaves.values()), incoming) if leaves else []

    p = options.get("dropout_p", 0.0)
    gain = 1 / (1 - p) if p < 1 else 1.0  # of what is kept, its rounding errors included

    def near(what, error, size, x):
        bound = tolerance(case, draw, x, backend, tensors) * size
        assert error <= bound, f"{what}: off by {error:.1e}, {bound:.1e} allowed"

    given = {name: array(x) for name, x in {**tensors, **options}.items()}
    for n, (x, want) in enumerate(zip(outputs, mathematics(**given), strict=True)):
        have = x.detach().double().cpu().numpy()
        assert have.shape == want.shape, f"output {n}: shape {have.shape}, expected {want.shape}"
        nothing = want == -np.inf  # the lse of a row that sees nothing
        assert (nothing == (have == -np.inf)).all(), f"output {n}: -inf elsewhere"
        have, want = (np.where(nothing, 0, y) for y in (have, want))
        near(f"output {n}", np.linalg.norm(have - want), gain + np.linalg.norm(want), x)
    cotangents = [array(x) for x in cotangents]
    size = math.sqrt(sum((x**2).sum() for x in cotangents))
    for (name, leaf), grad in zip(leaves.items(), grads):
        assert grad.shape == leaf.shape and grad.dtype == leaf.dtype, f"gradient of {name}"
        have, direction = array(grad), draw.random.standard_normal(leaf.shape)
        assert grad.isfinite().all(), f"gradient of {name}: not finite"
        moved = mathematics(**{**given, name: given[name] + 1j * STEP * direction})
        want = sum((c * np.where(y == -np.inf, 0, y)).sum() for c, y in zip(cotangents, moved))
        error = abs((have * direction).sum() - want.imag / STEP)
        near(f"gradient of {name}", error, gain * size + np.linalg.norm(have), grad)


def backward_of_short(n):
    """The backward of attention by separate kernels, or in one kernel of either form, by turns."""
    from fastformer.kernels import tuned
    from fastformer.kernels.attention import plan, short_backward

    kernels = short_backward.SEPARATE, "tiny", "scratch"
    return tuned.forced({plan.SHORT_KEY: kernels[n % 3]})


def test_every_op_is_drawn():
    assert {case.__name__ for case in DRAWN} == {
        name for name, x in vars(functional).items() if callable(x)
    }


def test_philox():
    """The known answers that Random123, the authors' own code, is shipped with."""
    zeros, ones = [0] * 4, [independent.M32] * 4
    words = "5f6fb709 0d893f64 4f121f81 4f730a48"
    assert " ".join(f"{x:08x}" for x in independent.philox(zeros, 0)) == words
    words = "6627e8d5 e169c58d bc57ac4c 9b00dbd8", "408f276d 41c83b0e a20bc7c6 6d5451fd"
    for counter, seed, answer in zip((zeros, ones), (0, -1), words):
        assert " ".join(f"{x:08x}" for x in independent.philox(counter, seed, 10)) == answer
    words = independent.philox_of_two(0x243F6A88, 0x85A308D3, 0x13198A2E)
    assert " ".join(f"{x:08x}" for x in words) == "bedbbe6b e4c770b3"


@pytest.mark.parametrize("case", DRAWN, ids=lambda case: case.__name__)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of -inf, in what is masked
def test_fuzz(case, backend, device, small_tiles, request):
    """A case that fails names its seed, from which `Draw` makes it again."""
    fresh = request.config.getoption("slow")
    start = np.random.SeedSequence().entropy if fresh else zlib.crc32(case.__name__.encode())
    in_tiles = backend == "triton" and device.type == "cpu"
    count = OF_ATTENTION if case is scaled_dot_product_attention else CASES
    for n in range((SLOW if backend == "reference" else SLOW // 5) if fresh else count):
        draw = Draw([start, n], device)
        tiles = small_tiles(*draw.tiles) if in_tiles and draw.tiles else contextlib.nullcontext()
        short = backward_of_short(n) if in_tiles else contextlib.nullcontext()
        try:
            with short:
                check(case, draw, backend, tiles)
        except Exception as error:
            raise AssertionError(f"Draw([{start}, {n}]), {draw.dtype}: {error}") from error


def results(case, seed, device, wanted=None):
    """Outputs and gradients by name, of a call in float32: of all inputs, or of one."""
    draw = Draw(seed, device)
    draw.dtype = torch.float32
    tensors, options = case(draw)
    floating = [n for n, x in tensors.items() if x is not None and x.is_floating_point()]
    floating = [wanted] if wanted else floating
    leaves = {n: tensors[n].requires_grad_() for n in floating}
    outputs = outputs_of(case, tensors, options)
    moving = [x for x in outputs if x.requires_grad]
    given = [x.detach().cos() for x in moving]
    grads = torch.autograd.grad(moving, list(leaves.values()), given) if leaves else []
    return {n: x.detach() for n, x in enumerate(outputs)} | dict(zip(leaves, grads))


@pytest.mark.parametrize("case", DRAWN, ids=lambda case: case.__name__)
def test_same_bits_every_time(case, backend, device, small_tiles):
    """A GPU runs its programs in any order. And a gradient alone is what it is among all."""
    in_tiles = backend == "triton" and device.type == "cpu"
    for n in range(2):
        with small_tiles() if in_tiles else contextlib.nullcontext():
            first = results(case, [31, n], device)
            for _ in range(12 if device.type == "cuda" else 1):
                for name, x in results(case, [31, n], device).items():
                    assert torch.equal(x, first[name]), (n, name)
            for name in (name for name in first if isinstance(name, str)):
                alone = results(case, [31, n], device, name)[name]
                torch.testing.assert_close(
                    alone, first[name], atol=1e-5, rtol=1e-5, msg=f"{n}: {name}"
                )


@pytest.mark.parametrize("case", DRAWN, ids=lambda case: case.__name__)
def test_fakes(case, device, monkeypatch):
    """What tracing takes an op's results for is what they are: shapes, strides and dtypes, in
    memory of their own; and the op leaves what it is given as it was.
    """
    pytest.importorskip("triton")
    if case is not attention_weights:  # no op of its own
        backends._load(case.__name__)
    compared = []

    def checked(op):
        def call(*given):
            inputs = [x for x in tree_leaves(given) if isinstance(x, torch.Tensor)]
            before = [x.detach().clone() for x in inputs]
            made = op(*given)
            for x, y in zip(inputs, before):
                assert torch.equal(x.nan_to_num(), y.nan_to_num()), f"{op} writes into its inputs"
            places = [x.untyped_storage().data_ptr() for x in tree_leaves(made) if x.numel()]
            places += {x.untyped_storage().data_ptr() for x in inputs if x.numel()}
            assert len(set(places)) == len(places), f"{op} returns memory that has another name"
            with FakeTensorMode(shape_env=None) as mode:
                fake = op(*tree_map_only(torch.Tensor, mode.from_tensor, given))
            for x, y in zip(*(tree_leaves(results) for results in (made, fake)), strict=True):
                assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device), op
                assert x.stride() == y.stride() or not x.numel(), op
                compared.append(op)
            return made

        return call

    for pair in autograd._pairs.values():
        for name in ("forward", "backward"):
            monkeypatch.setattr(pair, name, checked(getattr(pair, name)))
    # observed, so that no call is made by a plan, past the registered ops
    with ff.use_backend("triton"), backends.observe(lambda choice: None):
        for n in range(16):
            alone = n // 2 if n % 2 else None
            check(case, Draw([15, n], device), "triton", contextlib.nullcontext(), alone)
    assert compared or case is attention_weights


WITH_KERNELS = [case for case in DRAWN if case is not attention_weights]  # which calls others


@pytest.mark.sample
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", WITH_KERNELS, ids=lambda case: case.__name__)
def test_accumulators(case, dtype, device, monkeypatch):
    """A kernel computes in float32, of float64 in float64: on a GPU that takes 64 times as long."""
    if device.type == "cuda":
        pytest.skip("seen in the interpreter")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    triton_dtype = pytest.importorskip("fastformer.kernels.launch").triton_dtype
    seen = set()

    def launch(self, *given, former=interpreter.GridExecutor.__call__, **named):
        options = {name: x for name, x in named.items() if name in self.arg_names}
        kinds = inspect.getcallargs(self.fn, *given, **options)
        groups = [kinds, *(x._asdict() for x in kinds.values() if hasattr(x, "_asdict"))]
        named_so = [x[name] for x in groups for name in ("ACC", "acc") if name in x]
        if self.fn.__name__ == "add_up_kernel":  # in the dtype of the partial sums
            named_so = [triton_dtype(given[0].dtype)]
        if self.fn.__name__ not in ("bounds_kernel", "clear_tail_kernel"):  # which count, and clear
            seen.add(named_so[0])
        return former(self, *given, **named)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    draw = Draw([3, len(DRAWN)], device)
    draw.dtype = dtype
    with ff.use_backend("triton"):
        check(case, draw, "triton", contextlib.nullcontext())
    wide = interpreter.tl.float64 if dtype == torch.float64 else interpreter.tl.float32
    assert {getattr(kind, "value", kind) for kind in seen} == {wide}
