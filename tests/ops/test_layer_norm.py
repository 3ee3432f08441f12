"""The norms on both backends, in both variance forms, against the formula in float64."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fastformer as ff
from fastformer import use_backend
from fastformer.ops import dropout, functional

LOW = [torch.float16, torch.bfloat16]


@pytest.fixture
def norm():
    return pytest.importorskip("fastformer.kernels.layer_norm.launchers")


def inputs(*shape, n=None, dtype=torch.float32, device="cpu", weight=True, bias=True):
    x, w, b = (torch.randn(s, device=device).to(dtype) for s in (shape, *[n or shape[-1:]] * 2))
    return {"input": x * 3 + 2, "weight": w if weight else None, "bias": b if bias else None}


@pytest.mark.sample
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("rows, n", [(1, 5), (3, 63), (37, 64), (600, 100), (2, 1000)])
def test_shapes(backend, device, against_oracle, rows, n, dtype, unbiased):
    x = inputs(rows, n, dtype=dtype, device=device)
    rule = {"normalized_shape": n, "eps": 1e-3}
    against_oracle(functional.layer_norm, x, **rule, unbiased=unbiased)
    del x["bias"]
    against_oracle(functional.rms_norm, x, **rule)


@pytest.mark.parametrize("weight, bias", [(False, False), (True, False), (False, True)])
def test_without_weight_or_bias(backend, device, against_oracle, weight, bias):
    x = inputs(5, 40, device=device, weight=weight, bias=bias)
    against_oracle(functional.layer_norm, x, normalized_shape=40)
    del x["bias"]
    against_oracle(functional.rms_norm, x, normalized_shape=40)


def test_several_dimensions_and_views(backend, device, against_oracle):
    """Of the input, and of the weights."""
    x = inputs(2, 3, 4, 10, n=(4, 10), device=device)
    against_oracle(functional.layer_norm, x, normalized_shape=(4, 10))
    del x["bias"]
    against_oracle(functional.rms_norm, x, normalized_shape=(4, 10))
    wide = torch.randn(6, 5, 80, device=device)
    views = wide[..., :40], wide.transpose(0, 1), wide[..., ::2], wide[:1].expand(4, 5, 80)
    for view in views:
        n = view.shape[-1]
        x = {name: t[::2] for name, t in inputs(2 * n, device=device).items()}
        against_oracle(functional.layer_norm, x | {"input": view}, normalized_shape=n)


@pytest.mark.parametrize("wide", [False, True], ids=["one block", "wide"])
@pytest.mark.parametrize("far", ["input", "residual", "gradient", "gradient of the sum"])
def test_offsets_past_int32(backend, device, same_when_far, monkeypatch, norm, far, wide):
    """Rows so far apart that the last one stands past 2^31 elements."""
    if wide:
        monkeypatch.setattr(norm, "configuration", lambda *_: norm.NormTiles(16, 16, 4))
    names = "input", "residual", "gradient", "gradient of the sum"
    x = {name: torch.randn(40, 30, device=device).bfloat16() for name in names}
    x |= {name: torch.randn(30, device=device).bfloat16() for name in ("weight", "bias")}
    if backend == "triton":  # the reference's sum of such rows is torch's, which rounds otherwise
        same_when_far(partial(functional.dropout_add_layer_norm, **DROPOUT), x, far)
    if far in ("input", "gradient"):
        del x["residual"], x["gradient of the sum"]
        same_when_far(partial(functional.layer_norm, normalized_shape=30), x, far)


DROPOUT = {"dropout_p": 0.3, "dropout_seed": 3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_are_contiguous(backend, device, dtype):
    """As torch's are, for models that call .view() on the output for a transposed input."""
    x = torch.randn(2, 4, 3, 8, device=device, dtype=dtype).transpose(1, 2)
    weight = torch.ones(8, device=device, dtype=dtype)
    assert ff.layer_norm(x, (8,), weight, weight).is_contiguous()
    assert ff.rms_norm(x, (8,), weight).is_contiguous()


def test_float32_weight_gradients_of_a_bfloat16_input(backend, device):
    """Summed in float32 from the first row to the last; the output is rounded once."""
    x, w, b = inputs(300, 40, device=device).values()
    low, gradient = x.bfloat16(), torch.randn_like(x).bfloat16()
    leaves = [t.requires_grad_() for t in (w, b)]
    have = functional.layer_norm(low, 40, *leaves)
    assert have.dtype == torch.bfloat16
    wide = [t.detach().double().requires_grad_() for t in (w, b)]
    want = F.layer_norm(low.double(), (40,), *wide)
    assert (have.double() - want).abs().max() <= want.abs().max() * 2**-8
    grads = torch.autograd.grad(have, leaves, gradient)
    for a, b in zip(grads, torch.autograd.grad(want, wide, gradient.double())):
        assert (a - b).norm() < 1e-5 * b.norm()


def test_ill_conditioned(backend, device):
    """A mean 1000 times the spread: sum(x^2) - mean^2 would have no digit left."""
    x = inputs(4, 64, device=device)
    x["input"] = x["input"] * 0.5 + 1000
    with torch.no_grad():
        out = functional.layer_norm(**x, normalized_shape=64)
        want = F.layer_norm(x["input"].double(), (64,), x["weight"].double(), x["bias"].double())
    assert (out.double() - want).norm() / want.norm() < 1e-4


@pytest.mark.parametrize("unbiased", [False, True])
def test_constant_rows(backend, device, unbiased):
    """No spread: the output is the bias, the gradient finite."""
    x = {n: t.requires_grad_() for n, t in inputs(3, 16, device=device).items()}
    x["input"] = torch.ones(3, 16, device=device, requires_grad=True)
    out = functional.layer_norm(**x, normalized_shape=16, eps=1e-6, unbiased=unbiased)
    assert torch.allclose(out, x["bias"].expand(3, 16))
    grads = torch.autograd.grad(out.square().sum(), list(x.values()))
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.all_cases
@pytest.mark.parametrize("form", ["weights", "float32 weights", "none", "sum"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_constant_rows_of_16_bits(backend, device, dtype, form):
    """With eps = 1e-12, BERT's: 1 / sqrt(var + eps) is 10^6, which float16 does not hold, and the
    gradient was NaN on a CPU.
    """
    x = torch.full((3, 16), 0.5, dtype=dtype, device=device, requires_grad=True)
    wide = torch.float32 if form == "float32 weights" else dtype
    w, b = (torch.linspace(*ends, 16, device=device).to(wide) for ends in ((1, 2), (-1, 1)))
    w, b = (None, None) if form == "none" else (w, b)
    given = torch.linspace(-1e-3, 2e-3, 16, device=device).to(dtype).expand(3, 16)
    if form == "sum":
        out, _ = functional.dropout_add_layer_norm(x, torch.zeros_like(x), w, b, eps=1e-12)
    else:
        out = functional.layer_norm(x, 16, w, b, 1e-12)
    (grad,) = torch.autograd.grad(out, x, given)
    double = x.detach().double().requires_grad_()
    weights = [t if t is None else t.double() for t in (w, b)]
    expected = F.layer_norm(double, (16,), *weights, 1e-12)
    (want,) = torch.autograd.grad(expected, double, given.double())
    assert out.dtype == dtype and torch.equal(out, expected.to(dtype))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(grad.double(), want, rtol=eps, atol=eps * float(want.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, *LOW, torch.float64], ids=str)
def test_rms_norm_is_that_of_torch(backend, device, dtype):
    """Its default eps included: rows so small that it decides."""
    if dtype == torch.float64 and device.type == "cuda" and backend == "triton":
        pytest.skip("float64 kernels run in the interpreter only")
    x = (torch.randn(4, 40, device=device) * 3e-4).to(dtype)
    torch.testing.assert_close(functional.rms_norm(x, 40), F.rms_norm(x, (40,)))


# ------------------------------------------------------------------------ residual, dropout, norm


def added(*shape, dtype=torch.float32, device="cpu", **options):
    x = inputs(*shape, dtype=dtype, device=device, **options)
    return x | {"residual": x["input"], "input": torch.randn(shape, device=device).to(dtype)}


def joined_sum(**inputs):
    """Both outputs in one tensor, for one cotangent."""
    inputs.setdefault("dropout_seed", 2**40 + 5)
    return torch.cat(functional.dropout_add_layer_norm(**inputs))


def rms_sum(**inputs):
    """The same of RMSNorm, which has no bias."""
    inputs.setdefault("dropout_seed", 2**40 + 5)
    return torch.cat(functional.dropout_add_rms_norm(**inputs))


@pytest.mark.sample
@pytest.mark.parametrize("input_bias", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 5), (3, 63), (37, 64), (600, 100), (2, 3, 40), (9, 4500), (2, 3, 8500)],
    ids=str,
)
def test_dropout_add_norms(backend, device, against_oracle, shape, dtype, dropout_p, input_bias):
    """LayerNorm and RMSNorm, with the gradient of the input's bias; of strided tensors too."""
    x = added(*shape, dtype=dtype, device=device)
    if input_bias:
        x["input_bias"] = torch.randn(2 * shape[-1], device=device).to(dtype)[::2]
    against_oracle(joined_sum, x, dropout_p=dropout_p, eps=1e-3)
    del x["bias"]
    x["input"] = x["input"].transpose(0, -1).contiguous().transpose(0, -1)
    against_oracle(rms_sum, x, dropout_p=dropout_p, eps=1e-3)


@pytest.mark.sample
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("n", [8193, 20000, 65536])
def test_wide_rows(backend, device, against_oracle, n, unbiased):
    """Of several blocks."""
    x = inputs(3, n, device=device)
    against_oracle(functional.layer_norm, x, normalized_shape=n, unbiased=unbiased)
    x.pop("bias")
    against_oracle(functional.rms_norm, x, normalized_shape=n)
    against_oracle(joined_sum, added(3, n, device=device), dropout_p=0.3, unbiased=unbiased)


@pytest.mark.parametrize("which", [0, 1])
def test_one_of_its_outputs(backend, device, against_oracle, which):
    def one(op, **inputs):
        out = op(**inputs, dropout_p=0.4, dropout_seed=1)[which]
        return out if which == 0 else out + 0 * (inputs["weight"] + inputs.get("bias", 0))

    x = added(40, 70, device=device, bias=True)
    against_oracle(partial(one, functional.dropout_add_layer_norm), x)
    del x["bias"]
    against_oracle(partial(one, functional.dropout_add_rms_norm), x)


@pytest.mark.parametrize("n", [30, 70])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_the_norm_is_of_the_sum_that_is_returned(backend, device, monkeypatch, norm, dtype, n):
    """Rounded as the residual is, in one block and in several; before RMSNorm it is the same, with
    the default eps of `rms_norm`.
    """
    monkeypatch.setattr(norm, "configuration", lambda *_: norm.NormTiles(4, 32, 4))
    x = added(40, n, dtype=dtype, device=device)
    for _ in range(2):
        y, total = ff.dropout_add_layer_norm(**x, **DROPOUT)
        assert torch.equal(y, ff.layer_norm(total, n, x["weight"], x["bias"]))
        without = {name: t for name, t in x.items() if name != "bias"}
        y, same = ff.dropout_add_rms_norm(**without, **DROPOUT)
        assert torch.equal(same, total) and torch.equal(y, ff.rms_norm(total, n, x["weight"]))
        x |= {name: x[name] * 1e-4 for name in ("input", "residual")}


def test_sum_without_a_bias_and_strided(backend, device, against_oracle):
    x = added(6, 40, device=device, bias=False)
    x["input"] = torch.randn(6, 80, device=device)[:, ::2]
    x["residual"] = torch.randn(40, 6, device=device).t()
    against_oracle(joined_sum, x, dropout_p=0.1)
    x["residual"] = torch.randn(6, 60, device=device)[:, :40]
    against_oracle(joined_sum, x, dropout_p=0.1)


def test_bias_of_the_input_by_its_parts(backend, device):
    """It is dropped with the input, by the same mask; in float32 beside an input in 16 bits; its
    gradient has the same bits in each run.
    """
    x = added(60, 40, dtype=torch.bfloat16, device=device)
    own = (torch.rand(40, device=device) + 0.5).requires_grad_()
    zeros = {**x, "input": x["input"] * 0, "residual": x["residual"] * 0}
    _, kept = ff.dropout_add_layer_norm(**zeros, **DROPOUT, input_bias=own)
    drop = dropout.dropped_rows(torch.tensor([3], device=device), 60, 40, 0.3).view(60, 40)
    assert torch.equal(kept == 0, drop)
    grads = [
        torch.autograd.grad(ff.dropout_add_layer_norm(**x, **DROPOUT, input_bias=own)[1], own, kept)
        for _ in range(3)
    ]
    assert all(torch.equal(grads[0][0], grad) for (grad,) in grads)
    scale = 1 / (1 - ff.checks.require_dropout("p", 0.3))
    terms = kept.double() * ~drop * scale
    if backend == "reference":  # which rounds each to the dtype of the input; the kernel does not
        terms = terms.bfloat16().double()
    rounding = 60 * 2**-24  # of 60 positive terms added in float32
    torch.testing.assert_close(grads[0][0].double(), terms.sum(0), rtol=rounding, atol=0)


@pytest.mark.parametrize("n", [64, 4500, 8500])
def test_one_gradient_of_the_input_or_its_bias(backend, device, n):
    """It is the same as beside the others."""
    x = added(37, n, device=device) | {"input_bias": torch.randn(n, device=device)}
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    every = torch.autograd.grad(joined_sum(**leaves, dropout_p=0.3).sum(), [*leaves.values()])
    for name, want in zip(leaves, every):
        given = {key: t if key == name else t.detach() for key, t in leaves.items()}
        (have,) = torch.autograd.grad(joined_sum(**given, dropout_p=0.3).sum(), leaves[name])
        torch.testing.assert_close(have, want)


def test_the_sum_by_its_parts(backend, device):
    x = added(2, 5, 16, device=device)
    normalized, total = ff.dropout_add_layer_norm(**x, dropout_p=0.5, dropout_seed=3)
    drop = dropout.dropped_rows(torch.tensor([3], device=device), 10, 16, 0.5).view(2, 5, 16)
    torch.testing.assert_close(total, x["residual"] + torch.where(drop, 0.0, x["input"]) * 2)
    want = F.layer_norm(total, (16,), x["weight"], x["bias"])
    torch.testing.assert_close(normalized, want)
    ones = {**x, "input": torch.ones(2, 5, 16, device=device), "residual": torch.zeros_like(total)}
    _, kept = ff.dropout_add_layer_norm(**ones, dropout_p=1.0)
    assert (kept == 0).all()


def test_empty(backend, device):
    x = {n: t.requires_grad_() for n, t in added(0, 16, device=device).items()}
    outputs = [*ff.dropout_add_layer_norm(**x, dropout_p=0.1)]
    outputs.append(ff.layer_norm(x["residual"], 16, x["weight"], x["bias"]))
    assert all(y.shape == (0, 16) for y in outputs)
    grads = torch.autograd.grad(sum(y.sum() for y in outputs), list(x.values()))
    assert all((g == 0).all() for g in grads) and grads[2].shape == (16,)


def test_what_the_sum_saves(device):
    """Not its inputs: the sum itself, the statistics and the parameters."""
    x = {n: t.requires_grad_() for n, t in added(9, 40, device=device).items()}
    saved = []
    with (
        use_backend("triton"),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t),
    ):
        ff.dropout_add_layer_norm(**x, dropout_p=0.1)
    assert sorted(saved) == sorted([(9, 40), (9,), (9,), (40,), (40,), (1,)])


@pytest.mark.parametrize("op, expected", [("", 1), ("rms_", 1), ("add_", 2), ("add_rms_", 2)])
def test_gradients_that_nobody_takes_are_not_made(device, monkeypatch, norm, op, expected):
    """Nor written: beside a residual there are two of the size of the input, else one."""
    monkeypatch.setattr(norm.Launch, "__call__", lambda *_: None)
    x, row, ones = (torch.ones(n, device=device) for n in (24, 6, 4))
    x = x.view(4, 6)
    given = {
        "": (x, x, [6], row, row, 1e-5, False, ones, ones, [True] * 3),
        "rms_": (x, x, [6], row, 1e-5, ones, [True] * 2),
        "add_": (x, None, row, row, 0.0, 1e-5, False, None, row, x, ones, ones, [True] * 5),
        "add_rms_": (x, None, row, 0.0, 1e-5, None, row, x, ones, [True] * 4),
    }[op]
    made = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if "empty" in function.name() and not result.is_meta:
                made.append(result.shape)
            return result

    with Made():
        getattr(norm, op + "backward")(*given)
    assert made.count((4, 6)) == expected


@pytest.mark.parametrize("rows, n", [(1, 1), (3, 1), (1, 4)])
def test_few_elements(device, rows, n):
    """In the kernels as in the reference."""
    x = {name: t.requires_grad_() for name, t in inputs(rows, n, device=device).items()}
    results = []
    for backend in ("triton", "reference"):
        with use_backend(backend):
            norm = functional.layer_norm(**x, normalized_shape=n, eps=0.1)
            root = functional.rms_norm(x["input"], n, x["weight"], eps=0.1)
        wanted = list(x.values())
        results.append([norm, root, *torch.autograd.grad((norm + root).square().sum(), wanted)])
    for have, want in zip(*results):
        torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-4)


@pytest.mark.all_cases
@pytest.mark.parametrize("rows, n, unbiased", [(300, 50, False), (9, 50, True), (30, 8500, False)])
def test_many_rows_and_wide_rows(device, against_oracle, monkeypatch, norm, rows, n, unbiased):
    """Two programs sum up the weight gradients of several blocks of rows, the last one cut."""
    monkeypatch.setattr(norm, "PARTIAL_SUMS", 2)
    x = inputs(rows, n, device=device)
    x["input"] = torch.randn(rows, 2 * n, device=device)[:, :n]
    rule = {"normalized_shape": n, "eps": 1e-2}
    summed = added(rows, n, device=device) | dict(input_bias=x["bias"].flip(0))
    with use_backend("triton"):
        against_oracle(functional.layer_norm, x, **rule, unbiased=unbiased)
        against_oracle(joined_sum, summed, dropout_p=0.3, eps=1e-2)
        x.pop("bias")
        against_oracle(functional.rms_norm, x, **rule)


def test_too_wide_for_the_kernels(device):
    x = torch.randn(1, 65537, device=device)
    with use_backend("triton"), pytest.raises(RuntimeError, match="65537 features"):
        ff.layer_norm(x, 65537)


@pytest.mark.parametrize("n, kernels", [(16, 1), (17, 2)])
@pytest.mark.parametrize("needed", ["input", "weight", "both"])
def test_kernels_that_are_launched(device, monkeypatch, norm, work, n, kernels, needed):
    """A row that fits a block takes one in the backward; a wider one each of what is wanted. The
    rows of a program are as many as leave few partial sums, which one more adds up.
    """
    monkeypatch.setattr(norm, "configuration", lambda *_: norm.NormTiles(2, 16, 4))
    monkeypatch.setattr(norm, "PARTIAL_SUMS", 3)
    x, weight = torch.randn(40, n, device=device), torch.randn(n, device=device)
    x.requires_grad_(needed != "weight")
    weight.requires_grad_(needed != "input")
    with use_backend("triton"):
        outputs = []
        found = work(lambda: outputs.append(ff.layer_norm(x, n, weight)))
        assert (found.launches, found.programs) == (1, 20)
        found = work(outputs[0].sum().backward)
    programs = 3 if kernels == 1 else {"input": 20, "weight": 3, "both": 23}[needed]
    adds = needed != "input"
    assert found.launches == (kernels if needed == "both" else 1) + adds
    assert found.programs == programs + adds


@pytest.mark.all_cases
@pytest.mark.parametrize("n, kernels", [(15, 1), (16, 2), (17, 2)])
def test_kernels_for_the_bias_of_the_input(device, monkeypatch, norm, work, n, kernels):
    """Where a row takes most registers, a kernel of its own sums up the gradient of the bias."""
    monkeypatch.setattr(norm, "configuration", lambda *_: norm.NormTiles(2, 16, 4))
    monkeypatch.setattr(norm, "THREE_SUMS", 15)
    x = added(40, n, device=device) | {"input_bias": torch.randn(n, device=device)}
    with use_backend("triton"):
        out = joined_sum(**{name: t.requires_grad_() for name, t in x.items()}, dropout_p=0.3)
        assert work(out.sum().backward).launches == kernels + 1  # one adds up the partial sums
    torch.testing.assert_close(x["input_bias"].grad, x["input"].grad.sum(0))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n", [16, 40])
def test_sums_that_nobody_wants(device, monkeypatch, norm, n, bias):
    """Without a bias there are none for it: a norm without one, and RMSNorm."""
    monkeypatch.setattr(norm, "configuration", lambda *_: norm.NormTiles(2, 16, 4))
    launch, seen = norm.sums_launch, []
    monkeypatch.setattr(norm, "sums_launch", lambda *x: seen.append(x) or launch(*x))
    x, weight = (torch.randn(s, device=device).requires_grad_() for s in ((9, n), (n,)))
    with use_backend("triton"):
        outputs = [ff.layer_norm(x, n, weight, torch.zeros_like(weight).requires_grad_(bias))]
        if not bias:
            outputs += [ff.layer_norm(x, n, weight), ff.rms_norm(x, n, weight)]
        torch.autograd.grad(outputs, [x, weight], [torch.ones_like(x)] * len(outputs))
    assert seen == [(1 + bias, 5, n)] * len(outputs)


def test_the_default_eps_of_the_sum_is_torchs():
    """Seen in rows whose variance is far below it."""
    x, weight = torch.randn(4, 16) / 1e4, torch.ones(16)
    y, total = ff.dropout_add_layer_norm(x, x, weight, None)
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(total, [16]), atol=0, rtol=1e-4)
