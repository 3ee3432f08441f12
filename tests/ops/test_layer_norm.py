"""layer_norm on both backends, in both variance forms, against the written-out formula in
float64.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from mutants import PLANTED
from torch.utils._python_dispatch import TorchDispatchMode

import fastformer as ff
from fastformer import use_backend
from fastformer.ops import dropout, functional

LOW = [torch.float16, torch.bfloat16]


def inputs(*shape, n=None, dtype=torch.float32, device="cpu", weight=True, bias=True):
    n = n or shape[-1:]
    x = torch.randn(shape, device=device) * 3 + 2
    w = torch.randn(n, device=device) if weight else None
    b = torch.randn(n, device=device) if bias else None
    return {
        "input": x.to(dtype),
        "weight": None if w is None else w.to(dtype),
        "bias": None if b is None else b.to(dtype),
    }


@pytest.mark.sample
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("rows, n", [(1, 5), (3, 63), (37, 64), (600, 100), (2, 1000)])
def test_shapes(backend, device, against_oracle, rows, n, dtype, unbiased):
    x = inputs(rows, n, dtype=dtype, device=device)
    rule = {"normalized_shape": n, "eps": 1e-3, "unbiased": unbiased}
    against_oracle(functional.layer_norm, x, **rule)


@pytest.mark.sample
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("n", [8193, 20000, 65536])
def test_wide_rows(backend, device, against_oracle, n, unbiased):
    x = inputs(3, n, device=device)
    against_oracle(functional.layer_norm, x, normalized_shape=n, unbiased=unbiased)


@pytest.mark.parametrize("n", [300, 8500])
def test_runs_of_rows(device, against_oracle, monkeypatch, n):
    """Weight gradients from two programs that walk several blocks of rows each, the last one
    cut.
    """
    layer_norm = pytest.importorskip("fastformer.kernels.layer_norm.launchers")
    monkeypatch.setattr(layer_norm, "PARTIAL_SUMS", 2)
    with use_backend("triton"):
        against_oracle(
            functional.layer_norm, inputs(2 * 70 - 3, n, device=device), normalized_shape=n
        )


@pytest.mark.parametrize("weight, bias", [(False, False), (True, False), (False, True)])
def test_without_weight_or_bias(backend, device, against_oracle, weight, bias):
    x = inputs(5, 40, device=device, weight=weight, bias=bias)
    against_oracle(functional.layer_norm, x, normalized_shape=40)


def test_several_dimensions_and_views(backend, device, against_oracle):
    x = inputs(2, 3, 4, 10, n=(4, 10), device=device)
    against_oracle(functional.layer_norm, x, normalized_shape=(4, 10))
    wide = torch.randn(6, 5, 80, device=device)
    views = {
        "rows apart": wide[..., :40],
        "transposed": wide.transpose(0, 1),
        "last stride 2": wide[..., ::2],
        "expanded": wide[:1].expand(4, 5, 80),
    }
    for view in views.values():
        x = {**inputs(1, view.shape[-1], device=device), "input": view}
        against_oracle(functional.layer_norm, x, normalized_shape=view.shape[-1])


@pytest.mark.parametrize("far", ["input", "gradient"])
def test_offsets_past_int32(backend, device, spread, far):
    """Rows so far apart that the last one stands past 2^31 elements."""
    x = inputs(40, 30, dtype=torch.bfloat16, device=device)
    x["gradient"] = torch.randn_like(x["input"])
    results = []
    for inputs_ in (x, {**x, far: spread(x[far])}):
        leaves = {name: t.detach() for name, t in inputs_.items()}
        gradient = leaves.pop("gradient")
        wanted = [t.requires_grad_() for t in leaves.values()]
        out = functional.layer_norm(**leaves, normalized_shape=30)
        results.append([out, *torch.autograd.grad(out, wanted, gradient)])
    for near, spread_out in zip(*results):
        assert torch.equal(near, spread_out)


@pytest.mark.parametrize("far", ["input", "residual", "gradient", "gradient of the sum"])
def test_offsets_past_int32_of_a_sum(device, spread, far):
    """The same of residual + dropout + norm, in the kernels: the reference's sum of such rows is
    torch's, which lays it out otherwise and rounds otherwise.
    """
    names = "input", "residual", "gradient", "gradient of the sum"
    x = {name: torch.randn(40, 30, device=device).bfloat16() for name in names}
    weight = torch.randn(30, device=device).bfloat16().requires_grad_()
    results = []
    for inputs_ in (x, {**x, far: spread(x[far])}):
        input_, residual, *gradients = (t.detach() for t in inputs_.values())
        wanted = [input_.requires_grad_(), residual.requires_grad_(), weight]
        options = {"dropout_p": 0.2, "dropout_seed": 3}
        with use_backend("triton"):
            out = functional.dropout_add_layer_norm(input_, residual, weight, None, **options)
        results.append([*out, *torch.autograd.grad(out, wanted, gradients)])
    for near, spread_out in zip(*results):
        assert torch.equal(near, spread_out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_are_contiguous(backend, device, dtype):
    """As torch's are, for models that call .view() on the output for a transposed input."""
    x = torch.randn(2, 4, 3, 8, device=device, dtype=dtype).transpose(1, 2)
    weight = torch.ones(8, device=device, dtype=dtype)
    assert ff.layer_norm(x, (8,), weight, weight).is_contiguous()
    assert ff.rms_norm(x, (8,), weight).is_contiguous()


def test_strided_weights(backend, device, against_oracle):
    wide = inputs(3, 80, device=device)
    x = {"input": wide["input"][:, :40], "weight": wide["weight"][::2], "bias": wide["bias"][::2]}
    against_oracle(functional.layer_norm, x, normalized_shape=40)


def test_float32_weights_with_a_bfloat16_input(backend, device):
    x, w, b = inputs(7, 40, device=device).values()
    low = x.bfloat16()
    out = functional.layer_norm(low, 40, w, b)
    assert out.dtype == torch.bfloat16
    want = F.layer_norm(low.double(), (40,), w.double(), b.double())
    assert (out.double() - want).abs().max() <= want.abs().max() * 2**-8


def test_float32_weight_gradients_of_a_bfloat16_input(backend, device):
    """Summed in float32 from the first row to the last."""
    x, w, b = inputs(300, 40, device=device).values()
    low, gradient = x.bfloat16(), torch.randn_like(x).bfloat16()
    leaves = [t.requires_grad_() for t in (w, b)]
    have = torch.autograd.grad(functional.layer_norm(low, 40, *leaves), leaves, gradient)
    leaves = [t.detach().double().requires_grad_() for t in (w, b)]
    out = F.layer_norm(low.double(), (40,), *leaves)
    for a, b in zip(have, torch.autograd.grad(out, leaves, gradient.double())):
        assert (a - b).norm() < 1e-5 * b.norm()


def test_ill_conditioned(backend, device, against_oracle):
    """A mean 1000 times the spread: sum(x^2) - mean^2 would have no digit left."""
    x = inputs(4, 64, device=device)
    x["input"] = x["input"] * 0.5 + 1000
    x["input"] = x["input"].double().float()
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
    assert all(
        g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), list(x.values()))
    )


def test_empty(backend, device):
    x = {n: t.requires_grad_() for n, t in inputs(0, 16, device=device).items()}
    out = functional.layer_norm(**x, normalized_shape=16)
    assert out.shape == (0, 16)
    grads = torch.autograd.grad(out.sum(), list(x.values()))
    assert all((g == 0).all() for g in grads) and grads[1].shape == (16,)


def test_same_bits_every_time(backend, device):
    x = {n: t.requires_grad_() for n, t in inputs(300, 70, device=device).items()}

    def run():
        out = functional.layer_norm(**x, normalized_shape=70)
        return [out, *torch.autograd.grad(out.square().sum(), list(x.values()))]

    first = run()
    for _ in range(50 if device.type == "cuda" else 2):
        assert all(torch.equal(a, b) for a, b in zip(first, run()))


# ---------------------------------------------------------------------------------------- RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("shape, n", [((1, 5), 5), ((37, 64), 64), ((2, 3, 100), (3, 100))])
@pytest.mark.parametrize("weight", [True, False])
def test_rms_norm(backend, device, against_oracle, dtype, shape, n, weight):
    x = inputs(*shape, n=n if isinstance(n, tuple) else (n,), dtype=dtype, device=device)
    x = {"input": x["input"], "weight": x["weight"] if weight else None}
    against_oracle(functional.rms_norm, x, normalized_shape=n, eps=1e-3)


@pytest.mark.parametrize("n", [8193, 20000])
def test_wide_rms_norm(backend, device, against_oracle, n):
    x = {k: t for k, t in inputs(3, n, device=device).items() if k != "bias"}
    against_oracle(functional.rms_norm, x, normalized_shape=n)


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
    return {
        "input": torch.randn(shape, device=device).to(dtype),
        "residual": x["input"],
        "weight": x["weight"],
        "bias": x["bias"],
    }


def joined_sum(**inputs):
    """Both outputs in one tensor, for one cotangent."""
    inputs.setdefault("dropout_seed", 2**40 + 5)
    return torch.cat(functional.dropout_add_layer_norm(**inputs))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("shape", [(1, 5), (3, 63), (37, 64), (600, 100), (2, 3, 40)], ids=str)
def test_dropout_add_layer_norm(backend, device, against_oracle, shape, dtype, dropout_p):
    x = added(*shape, dtype=dtype, device=device)
    against_oracle(joined_sum, x, dropout_p=dropout_p, eps=1e-3)


@pytest.mark.parametrize("n", [8193, 20000])
@pytest.mark.parametrize("unbiased", [False, True])
def test_wide_dropout_add_layer_norm(backend, device, against_oracle, n, unbiased):
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


def rms_sum(bias=None, **inputs):
    """The same of RMSNorm, which has no bias."""
    inputs.setdefault("dropout_seed", 2**40 + 5)
    return torch.cat(functional.dropout_add_rms_norm(**inputs))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("shape", [(3, 63), (37, 64), (2, 3, 8500)], ids=str)
def test_dropout_add_rms_norm(backend, device, against_oracle, shape, dtype, dropout_p):
    x = added(*shape, dtype=dtype, device=device)
    del x["bias"]
    x["input"] = x["input"].transpose(0, -1).contiguous().transpose(0, -1)  # of any strides
    against_oracle(rms_sum, x, dropout_p=dropout_p, eps=1e-3)


def test_the_sum_before_rms_norm(backend, device):
    """It is that before LayerNorm, and its norm the one of `rms_norm`, with the same default."""
    x = added(9, 40, dtype=torch.bfloat16, device=device)
    options = dict(dropout_p=0.3, dropout_seed=3)
    _, want = ff.dropout_add_layer_norm(**x, **options)
    del x["bias"]
    normalized, total = ff.dropout_add_rms_norm(**x, **options)
    assert torch.equal(total, want)
    assert torch.equal(normalized, ff.rms_norm(total, 40, x["weight"]))
    small = {n: t * 1e-4 if n != "weight" else t for n, t in x.items()}
    normalized, total = ff.dropout_add_rms_norm(**small)
    assert torch.equal(normalized, ff.rms_norm(total, 40, x["weight"]))


def test_a_second_derivative_of_the_sum_before_rms_norm(backend):
    x = [t.double().requires_grad_() for n, t in added(3, 5).items() if n != "bias"]

    def call(*given):
        return ff.dropout_add_rms_norm(*given, 0.3, 0.1, dropout_seed=1)

    assert torch.autograd.gradcheck(call, x, atol=1e-4)
    assert torch.autograd.gradgradcheck(call, x, atol=1e-4)


def test_sum_without_a_bias_and_strided(backend, device, against_oracle):
    x = added(6, 40, device=device, bias=False)
    x["input"] = torch.randn(6, 80, device=device)[:, ::2]
    x["residual"] = torch.randn(40, 6, device=device).t()
    against_oracle(joined_sum, x, dropout_p=0.1)
    x["residual"] = torch.randn(6, 60, device=device)[:, :40]
    against_oracle(joined_sum, x, dropout_p=0.1)


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


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_what_is_normalized_is_the_sum_as_returned(device, dtype):
    """Rounded to its dtype: the same bits as the norm of the second output."""
    x = added(9, 40, dtype=dtype, device=device)
    with use_backend("triton"):
        normalized, total = ff.dropout_add_layer_norm(**x, dropout_p=0.3, dropout_seed=3)
        assert torch.equal(normalized, ff.layer_norm(total, 40, x["weight"], x["bias"]))


@pytest.mark.parametrize("p", [0.2, 0.5, 0.7, 1.0])
def test_every_probability(device, p):
    """A threshold of 32 bits as well; at 1 nothing is kept."""
    x = added(9, 40, device=device)
    sums = []
    for backend in ("reference", "triton"):
        with use_backend(backend):
            sums.append(ff.dropout_add_layer_norm(**x, dropout_p=p, dropout_seed=3)[1])
    torch.testing.assert_close(*sums)
    assert p < 1 or torch.equal(sums[1], x["residual"])


def test_the_words_of_a_row():
    """Single elements against the rule worked out in Python integers."""
    seed = -0x123456789ABCDEF
    drop = dropout.dropped_rows(torch.tensor([seed]), 7, 50, 0.4)
    for i, j in [(0, 0), (0, 1), (3, 2), (6, 49), (5, 35)]:
        words = dropout.philox4x32(j // 4, i, 0, 1, seed % 2**64)
        assert drop[i, j] == (words[j % 4] >> 16 < round(0.4 * 2**16))


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (3,), (0, 3), (1, 2)], ids=str)
def test_gradients_of_the_sum_for_some(backend, device, needed):
    x = list(added(9, 40, device=device).values())
    every = [t.clone().requires_grad_() for t in x]
    some = [t.clone().requires_grad_(i in needed) for i, t in enumerate(x)]
    for y in (every, some):
        joined_sum(
            **dict(zip(("input", "residual", "weight", "bias"), y))
        ).square().sum().backward()
    for i, (a, b) in enumerate(zip(every, some)):
        assert torch.equal(a.grad, b.grad) if i in needed else b.grad is None


def test_empty_sum(backend, device):
    x = {n: t.requires_grad_() for n, t in added(0, 16, device=device).items()}
    normalized, total = ff.dropout_add_layer_norm(**x, dropout_p=0.1)
    assert normalized.shape == total.shape == (0, 16)
    grads = torch.autograd.grad(normalized.sum() + total.sum(), list(x.values()))
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


class Made(TorchDispatchMode):
    """The shapes of the tensors that are made inside of it."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.new_empty.default:
            self.shapes.append(tuple(result.shape))
        return result


@pytest.mark.parametrize("op, expected", [("", 1), ("rms_", 1), ("add_", 2), ("add_rms_", 2)])
def test_gradients_that_nobody_takes_are_not_made(device, monkeypatch, op, expected):
    """Nor written: beside a residual there are two of the size of the input, else one."""
    norm = pytest.importorskip("fastformer.kernels.layer_norm.launchers")
    monkeypatch.setattr(norm.Launch, "__call__", lambda *_: None)
    norm.plans.clear()
    x, row, ones = (torch.ones(n, device=device) for n in (24, 6, 4))
    x = x.view(4, 6)
    given = {
        "": (x, x, [6], row, row, 1e-5, False, ones, ones, [True] * 3),
        "rms_": (x, x, [6], row, 1e-5, ones, [True] * 2),
        "add_": (x, None, row, row, 0.0, 1e-5, False, None, None, x, ones, ones, [True] * 4),
        "add_rms_": (x, None, row, 0.0, 1e-5, None, None, x, ones, [True] * 3),
    }[op]
    with Made() as made:
        getattr(norm, op + "backward")(*given)
    assert made.shapes.count((4, 6)) == expected


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


# ------------------------------------------------------------------------------------------- bugs

BUGS = PLANTED["layer_norm"]


@pytest.mark.parametrize("bug", [None, *BUGS])
def test_a_planted_bug_is_caught(device, against_oracle, monkeypatch, plant_and_check, bug):
    from fastformer.kernels import layer_norm

    monkeypatch.setattr(layer_norm.launchers, "PARTIAL_SUMS", 2)

    def check():
        for shape, unbiased in (((300, 50), False), ((9, 50), True), ((30, 8500), False)):
            wide = torch.randn(shape[0], 2 * shape[1], device=device)
            x = {**inputs(*shape, device=device), "input": wide[:, : shape[1]]}
            rule = {"normalized_shape": shape[1], "eps": 1e-2, "unbiased": unbiased}
            against_oracle(functional.layer_norm, x, **rule)
            against_oracle(joined_sum, added(*shape, device=device), dropout_p=0.3, eps=1e-2)
            x.pop("bias")
            against_oracle(functional.rms_norm, x, normalized_shape=shape[1], eps=1e-2)

    plant_and_check(layer_norm, BUGS.get(bug), check)


@pytest.mark.parametrize(
    "change, error, words",
    [
        (
            {"input": torch.zeros(2, 7)},
            ValueError,
            r"input has shape \[2, 7\]; expected it to end with",
        ),
        ({"input": torch.zeros(2, 8).long()}, TypeError, "input has dtype torch.int64"),
        ({"input": None}, TypeError, "input is a NoneType"),
        (
            {"weight": torch.zeros(7)},
            ValueError,
            r"weight has shape \[7\]; expected normalized_shape \[8\]",
        ),
        ({"bias": torch.zeros(8).half()}, TypeError, "bias has dtype torch.float16"),
        ({"bias": torch.zeros(8, device="meta")}, ValueError, "bias is on meta"),
        ({"eps": -1.0}, ValueError, "eps is -1.0"),
        ({"eps": float("nan")}, ValueError, "eps is nan"),
        ({"normalized_shape": ()}, ValueError, "normalized_shape"),
        (
            {
                "normalized_shape": 1,
                "input": torch.zeros(2, 1),
                "weight": None,
                "bias": None,
                "unbiased": True,
            },
            ValueError,
            "two features",
        ),
    ],
)
def test_bad_input(backend, change, error, words):
    good = {**inputs(2, 8), "normalized_shape": 8}
    with pytest.raises(error, match=words):
        ff.layer_norm(**{**good, **change})


@pytest.mark.parametrize(
    "change, error, words",
    [
        (
            {"residual": torch.zeros(2, 7)},
            ValueError,
            r"residual has shape \[2, 7\]; expected that",
        ),
        ({"residual": torch.zeros(2, 8).half()}, TypeError, "residual has dtype torch.float16"),
        ({"weight": None}, TypeError, "weight is a NoneType"),
        ({"weight": torch.zeros(7)}, ValueError, "input has shape .*; expected it to end with"),
        ({"bias": torch.zeros(7)}, ValueError, r"bias has shape \[7\]"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p is -0.1"),
        ({"eps": "1"}, ValueError, "eps is '1'"),
    ],
)
def test_bad_input_of_the_sum(backend, change, error, words):
    given = {**added(2, 8), **change}
    with pytest.raises(error, match=words):
        ff.dropout_add_layer_norm(**given)
    if "bias" not in change:
        del given["bias"]
        with pytest.raises(error, match=words):
            ff.dropout_add_rms_norm(**given)


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"input": torch.zeros(2, 7)}, ValueError, "expected it to end with"),
        ({"input": torch.zeros(2, 8).int()}, TypeError, "input has dtype torch.int32"),
        ({"weight": torch.zeros(7)}, ValueError, r"weight has shape \[7\]"),
        ({"eps": -1.0}, ValueError, "eps is -1.0"),
    ],
)
def test_bad_input_of_rms_norm(backend, change, error, words):
    good = {"input": torch.zeros(2, 8), "normalized_shape": 8, "weight": torch.ones(8)}
    with pytest.raises(error, match=words):
        ff.rms_norm(**{**good, **change})


def test_too_wide_for_the_kernels(device):
    x = torch.randn(1, 65537, device=device)
    with use_backend("triton"), pytest.raises(RuntimeError, match="65537 features"):
        ff.layer_norm(x, 65537)


def in_blocks(monkeypatch):
    """Rows of 30 features wider than a block, in the kernels for such."""
    norm = pytest.importorskip("fastformer.kernels.layer_norm.launchers")
    monkeypatch.setattr(norm, "configuration", lambda *_: norm.Tiles(16, 16, 4))


def test_gradients_of_the_weights_of_wide_rows_alone(device, monkeypatch):
    in_blocks(monkeypatch)
    x = inputs(40, 30, device=device)
    results = []
    for wanted in (list(x), ["weight", "bias"]):
        leaves = {name: t.detach().requires_grad_(name in wanted) for name, t in x.items()}
        with use_backend("triton"):
            out = functional.layer_norm(**leaves, normalized_shape=30)
        given = [leaves["weight"], leaves["bias"]]
        results.append(torch.autograd.grad(out.square().sum(), given))
    assert all(torch.equal(*pair) for pair in zip(*results))


@pytest.mark.parametrize("far", ["input", "gradient"])
def test_offsets_of_wide_rows_past_int32(device, monkeypatch, spread, far):
    in_blocks(monkeypatch)
    x = inputs(40, 30, dtype=torch.bfloat16, device=device)
    x["gradient"] = torch.randn_like(x["input"])
    results = []
    for given in (x, {**x, far: spread(x[far])}):
        leaves = {name: t.detach() for name, t in given.items()}
        gradient = leaves.pop("gradient")
        wanted = [t.requires_grad_() for t in leaves.values()]
        with use_backend("triton"):
            out = functional.layer_norm(**leaves, normalized_shape=30)
        results.append([out, *torch.autograd.grad(out, wanted, gradient)])
    assert all(torch.equal(*pair) for pair in zip(*results))


@pytest.mark.parametrize("n, kernels", [(16, 1), (17, 2)])
@pytest.mark.parametrize("needed", ["input", "weight", "both"])
def test_kernels_that_are_launched(device, monkeypatch, work, n, kernels, needed):
    """A row that fits a block takes one in the backward; a wider one each of what is wanted. The
    rows of a program are as many as leave few partial sums.
    """
    norm = pytest.importorskip("fastformer.kernels.layer_norm.launchers")
    monkeypatch.setattr(norm, "configuration", lambda *_: norm.Tiles(2, 16, 4))
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
    assert found.launches == (kernels if needed == "both" else 1)
    assert found.programs == programs


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n", [16, 40])
def test_sums_that_nobody_wants(device, monkeypatch, n, bias):
    """Without a bias there are none for it: a norm without one, and RMSNorm."""
    norm = pytest.importorskip("fastformer.kernels.layer_norm.launchers")
    monkeypatch.setattr(norm, "configuration", lambda *_: norm.Tiles(2, 16, 4))
    run, seen = norm._run_backward, []

    def run_backward(*arguments):
        results = run(*arguments)
        seen.append(results[2].shape)
        return results

    monkeypatch.setattr(norm, "_run_backward", run_backward)
    x, weight = (torch.randn(s, device=device).requires_grad_() for s in ((9, n), (n,)))
    with use_backend("triton"):
        outputs = [ff.layer_norm(x, n, weight, torch.zeros_like(weight).requires_grad_(bias))]
        if not bias:
            outputs += [ff.layer_norm(x, n, weight), ff.rms_norm(x, n, weight)]
        torch.autograd.grad(outputs, [x, weight], [torch.ones_like(x)] * len(outputs))
    assert seen == [(1 + bias, n)] * len(outputs)


@pytest.mark.parametrize("n", [30, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_norm_is_of_the_sum_that_is_returned(backend, device, monkeypatch, dtype, n):
    """Rounded as the residual is, in one block and in several."""
    if backend == "triton":
        norm = pytest.importorskip("fastformer.kernels.layer_norm.launchers")
        monkeypatch.setattr(norm, "configuration", lambda *_: norm.Tiles(4, 32, 4))
    x, residual, weight, bias = (torch.randn(s, device=device) for s in [(40, n)] * 2 + [n] * 2)
    x, residual = x.to(dtype), 8 * residual.to(dtype)
    y, total = ff.dropout_add_layer_norm(x, residual, weight, bias)
    assert torch.equal(y, ff.layer_norm(total, n, weight, bias))


def test_the_default_eps_of_the_sum_is_torchs():
    """Seen in rows whose variance is far below it."""
    x, weight = torch.randn(4, 16) / 1e4, torch.ones(16)
    y, total = ff.dropout_add_layer_norm(x, x, weight, None)
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(total, [16]), atol=0, rtol=1e-4)
