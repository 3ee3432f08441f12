"""feed_forward on both backends, against the written-out formula in float64."""

import contextlib
import shutil

import pytest
import torch
import torch.nn.functional as F

from fastformer import use_backend
from fastformer.ops import functional
from fastformer.ops.feed_forward import reference

LOW = [torch.float16, torch.bfloat16]


GATED = {"geglu": functional.geglu, "swiglu": functional.swiglu}


def inputs(*lead, d=24, width=70, out=20, dtype=torch.float32, device="cpu", bias=True):
    def random(*shape, scale=1.0):
        return (torch.randn(shape, device=device) * scale).to(dtype)

    return {
        "input": random(*lead, d),
        "w_1": random(width, d, scale=d**-0.5),
        "b_1": random(width) if bias else None,
        "w_2": random(out, width, scale=width**-0.5),
        "b_2": random(out) if bias else None,
    }


def gated(*lead, **options):
    """The same with a gate and a value."""
    x, y = inputs(*lead, **options), inputs(*lead, **options)
    w_1, b_1 = ((x.pop(name), y[name]) for name in ("w_1", "b_1"))
    return x | {"w": torch.cat(w_1), "b": None if b_1[0] is None else torch.cat(b_1)}


def call_of(activation):
    """The op of an activation, what makes its inputs, and its options."""
    if activation in GATED:
        return GATED[activation], gated, {}
    return functional.feed_forward, inputs, {"activation": activation}


@pytest.mark.sample
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("activation", [*reference.ACTIVATIONS, *GATED])
def test_activations(backend, device, against_oracle, activation, dtype, dropout_p):
    op, make, rule = call_of(activation)
    x = make(3, 11, dtype=dtype, device=device)
    against_oracle(op, x, **rule, dropout_p=dropout_p, dropout_seed=5)


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "lead, d, width, out",
    [((1,), 1, 1, 1), ((300,), 257, 300, 16), ((63,), 64, 128, 64), ((), 8, 40, 8)],
)
@pytest.mark.parametrize("activation", ["relu", *GATED])
def test_shapes(backend, device, against_oracle, activation, lead, d, width, out):
    op, make, rule = call_of(activation)
    x = make(*lead, d=d, width=width, out=out, device=device)
    against_oracle(op, x, **rule, dropout_p=0.1, dropout_seed=2)


@pytest.mark.all_cases
@pytest.mark.parametrize("activation", ["relu", "silu", *GATED])
def test_without_biases_on_views(backend, device, against_oracle, activation):
    op, make, rule = call_of(activation)
    x = make(2, 5, device=device, bias=False)
    x["input"] = torch.randn(5, 2, 48, device=device).transpose(0, 1)[..., ::2]
    w, b = ("w", "b") if activation in GATED else ("w_1", "b_1")
    x |= {name: x[name].t().contiguous().t() for name in (w, "w_2")}
    against_oracle(op, x, **rule)
    x["input"] = torch.randn(9, 48, device=device)[:, ::2]  # as rows a view still
    x[b] = torch.randn(2 * len(x[w]), device=device)[::2]
    against_oracle(op, x, **rule)


# ------------------------------------------------------------------------------- ways to compute h


@pytest.fixture
def taken(monkeypatch):
    """taken(way): a context in which h is computed that way; it gives what was launched."""
    fed = pytest.importorskip("fastformer.kernels.feed_forward")
    from fastformer.kernels import launch, tuned

    launched = []
    former = launch.Launch.__call__

    def call(self, *pointers):
        launched.append(self.kernel.fn.__name__)
        former(self, *pointers)

    monkeypatch.setattr(launch.Launch, "__call__", call)

    @contextlib.contextmanager
    def taken(way):
        way = {"GEMM": fed.GEMM, "GEMM_RELU": fed.GEMM_RELU}.get(way, way)
        with tuned.forced({"feed_forward first": way}) as asked, use_backend("triton"):
            yield launched
        assert way in list(asked[0].options())

    return taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "way, activation, dropout_p",
    [("GEMM", of, p) for of in reference.ACTIVATIONS for p in (0.0, 0.3)]
    + [("GEMM_RELU", "relu", 0.0)],
)
def test_torchs_first_gemm(taken, device, against_oracle, way, activation, dropout_p, dtype):
    x = inputs(3, 11, dtype=dtype, device=device)
    rule = {"activation": activation, "dropout_p": dropout_p, "dropout_seed": 5}
    with taken(way) as launched:
        against_oracle(functional.feed_forward, x, **rule)
    assert launched == ["_activated"] * (way == "GEMM") + ["_hidden_backward"]


@pytest.mark.parametrize("way", ["GEMM", "GEMM_RELU"])
def test_other_ways_on_views_and_on_nothing(taken, device, against_oracle, way):
    x = inputs(2, 5, device=device)
    x["input"] = torch.randn(5, 2, 48, device=device).transpose(0, 1)[..., ::2]
    x["w_1"] = torch.randn(24, 70, device=device).t() * 0.2
    with taken(way):
        against_oracle(functional.feed_forward, x)
        assert functional.feed_forward(**inputs(2, 0, device=device)).shape == (2, 0, 20)


def test_relu_in_torchs_gemm_is_for_relu_alone():
    fed = pytest.importorskip("fastformer.kernels.feed_forward")
    from fastformer.kernels import tuned

    for change in ({}, {"dropout_p": 0.1}, {"b_1": None}, {"activation": "gelu"}):
        with tuned.forced({}) as asked, use_backend("triton"):
            functional.feed_forward(**{**inputs(2), **change})
        options = list(asked[0].options())
        assert fed.GEMM in options and (fed.GEMM_RELU in options) == (not change), change
        assert asked[0].shipped == fed.configuration("interpreter", torch.float32)


def test_every_way_drops_the_same_elements(taken, device):
    x = inputs(40, d=16, width=48, device=device)
    x["w_2"], x["b_2"] = torch.eye(48, device=device), None
    outputs = []
    for way in (None, "GEMM"):
        with taken(way) if way else use_backend("triton"):
            rule = {"activation": "silu", "dropout_p": 0.5, "dropout_seed": 3}
            outputs.append(functional.feed_forward(**x, **rule))
    assert torch.equal(*(out == 0 for out in outputs))
    assert 0.4 < float((outputs[0] == 0).float().mean()) < 0.6


@pytest.mark.with_all
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
def test_compiled_by_inductor_with_dropout():
    """It fuses the bias and the product of a [rows, d_model] input, and keeps the factor."""
    x, w, b = (torch.randn(n, 16).requires_grad_() for n in (40, 16, 1))

    def call(x, w, b):
        return functional.feed_forward(x, w, b[0], w, b[0], dropout_p=0.5, dropout_seed=3)

    results = []
    for run in (call, torch.compile(call, fullgraph=True)):
        with use_backend("reference"):
            out = run(x, w, b)
        results.append((out, *torch.autograd.grad(out.square().sum(), (x, w, b))))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("kind", ["relu", "gelu", "silu", "sigmoid", "relu2", "geglu", "swiglu"])
def test_rounded_once(device, rounded_once, kind, dtype):
    """With identities for its weights the op is its activation."""
    op, _, rule = call_of(kind)
    n = 32 if kind in GATED else 16

    def activated(input):
        w, w_2 = (torch.eye(n, dtype=input.dtype, device=device) for n in (input.shape[1], 16))
        return op(input, w, None, w_2, None, **rule, dropout_p=0.3, dropout_seed=5)

    rounded_once(activated, {"input": torch.randn(60, n, device=device).to(dtype)})


@pytest.mark.parametrize("rows", [40, 257])  # of one tile; with the last in a tile of its own
@pytest.mark.parametrize("far", ["input", "w_1"])
def test_offsets_past_int32(backend, device, spread, far, rows):
    """Rows so far apart that the last one stands past 2^31 elements."""
    x = inputs(*(rows,) * (far == "input"), d=8, width=rows, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        near = functional.feed_forward(**x)
        assert torch.equal(near, functional.feed_forward(**{**x, far: spread(x[far])}))


@pytest.mark.parametrize("width, wide", [(2**15, False), (2**23, True), (2**25, True)])
def test_wide_hidden_rows(device, monkeypatch, width, wide):
    """Whose offsets inside a tile pass 2^31: such a call has kernels of its own."""
    kernels = pytest.importorskip("fastformer.kernels.feed_forward")
    flags = []

    def launch(kernel, grid, arguments, *_, **__):
        flags.append(arguments["case"].wide.value)
        return lambda *pointers: None

    monkeypatch.setattr(kernels, "Launch", launch)
    monkeypatch.setattr(kernels, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(kernels, "ELEMENTWISE", kernels.Tile(256, 256))
    for name, halves in (("", 1), ("geglu_", 2)):
        shapes = (300, 8), (halves * width, 8), (8, width)
        x, w, w_2 = (torch.empty(n, device="meta") for n in shapes)
        arguments = (x, w, None, w_2, None, *("gelu",) * (halves == 1))
        out, saved = getattr(kernels, name + "forward")(*arguments, 0.0, None)
        needs = [True, True, False, True, False]
        getattr(kernels, name + "backward")(out, *arguments, 0.0, None, saved, needs)
    rows = kernels.configuration("sm_90", torch.float32).rows
    assert flags == [width * rows >= 2**31, wide, wide, wide]


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_saves_one_hidden_tensor(device, activation):
    """relu saves h alone, the others z alone: one [tokens, d_ff] tensor a layer."""
    x = {n: t.requires_grad_() for n, t in inputs(9, device=device).items()}
    saved = []
    with (
        use_backend("triton"),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        functional.feed_forward(**x, activation=activation, dropout_p=0.1)
    assert [tuple(t.shape) for t in saved].count((9, 70)) == 1


# ------------------------------------------------------------------------------------------ gated


@pytest.mark.parametrize("op", GATED)
def test_gated_by_its_parts(backend, device, op):
    """The first half of w is what is activated."""
    x = gated(6, device=device)
    z, v = F.linear(x["input"], x["w"], x["b"]).chunk(2, -1)
    hidden = (F.gelu(z) if op == "geglu" else F.silu(z)) * v
    torch.testing.assert_close(GATED[op](**x), F.linear(hidden, x["w_2"], x["b_2"]))


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
def test_gated_activation(backend, device, against_oracle, dtype, activation):
    """The halves of a product, and a transposed value, are read where they lie or copied."""
    halves = torch.randn(3, 17, 140, device=device).to(dtype)
    value = torch.randn(17, 3, 70, device=device).to(dtype).transpose(0, 1)
    for gate, v in (halves.chunk(2, -1), (halves[..., 70:], value), (halves[0, 0], halves[0, 1])):
        against_oracle(functional.gated_activation, dict(gate=gate, value=v), activation=activation)


FORMS = {
    "gpt-oss": {"alpha": 1.702, "limit": 0.5, "offset": 1.0},
    "limit": {"limit": 0.5},
    "alpha": {"alpha": 2.0},
    "offset": {"offset": -0.5},
}


@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_gated_forms(backend, device, against_oracle, form, dtype):
    x = gated(40, dtype=dtype, device=device)
    against_oracle(functional.swiglu, x, dropout_p=0.3, dropout_seed=5, **FORMS[form])
    gate, value = torch.randn(2, 3, 17, 70, device=device).to(dtype)
    against_oracle(functional.gated_activation, dict(gate=gate, value=value), **FORMS[form])


def test_clamped_swiglu_of_gpt_oss(backend, device):
    """As its model card has it, of halves that alternate; the gradient of what is clamped is 0."""
    both = (4 * torch.randn(9, 80, device=device)).requires_grad_()
    gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
    want = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    form = {"alpha": 1.702, "limit": 7.0, "offset": 1.0}
    have = functional.gated_activation(both[..., ::2], both[..., 1::2], **form)
    torch.testing.assert_close(have, want)
    grad = torch.randn(9, 40, device=device)
    first, second = (torch.autograd.grad(x, both, grad)[0] for x in (have, want))
    torch.testing.assert_close(first, second)
    assert (both.abs() > 7).any() and (first == 0).any()


def test_gated_activation_at_zero(backend, device):
    """The derivative of relu is 0 at 0, and 1 at NaN, as in torch."""
    gate = torch.tensor([0.0, -1.0, 2.0, float("nan")], device=device).requires_grad_()
    value = torch.ones(4, device=device).requires_grad_()
    out = functional.gated_activation(gate, value, "relu")
    grads = torch.autograd.grad(out.sum(), (gate, value))
    wants = [0, 0, 2, float("nan")], [0, 0, 1, 1], [0, 0, 2, float("nan")]
    for x, want in zip((out, *grads), wants):
        torch.testing.assert_close(x.cpu(), torch.tensor(want, dtype=x.dtype), equal_nan=True)
    none = torch.zeros(2, 0, device=device)
    assert functional.gated_activation(none, none).shape == (2, 0)


@pytest.mark.parametrize("activation", ["relu", *GATED])
def test_an_output_may_be_changed_in_place(backend, device, activation):
    """As that of nn.Linear, also if it has more than two dimensions."""
    op, make, rule = call_of(activation)
    given = make(2, 5, out=24, device=device)
    x = given["input"].requires_grad_()
    out = op(**given, **rule)
    out += x
    [grad] = torch.autograd.grad(out.sum(), x)
    [want] = torch.autograd.grad(op(**given, **rule).sum(), x)
    torch.testing.assert_close(grad, want + 1)


@pytest.mark.parametrize("activation", ["relu", *GATED])
def test_empty(backend, device, activation):
    op, make, rule = call_of(activation)
    x = {n: t.requires_grad_() for n, t in make(0, 3, device=device).items()}
    out = op(**x, **rule, dropout_p=0.1)
    assert out.shape == (0, 3, 20)
    for t, g in zip(x.values(), torch.autograd.grad(out.sum(), list(x.values()))):
        assert g.shape == t.shape and (g == 0).all()


def test_every_activation_with_dropout(device, against_oracle):
    from fastformer.kernels import feed_forward, tuned

    dropout = dict(dropout_p=0.3, dropout_seed=5)
    with use_backend("triton"):
        for activation in reference.ACTIVATIONS:
            x = inputs(40, d=257, device=device)
            against_oracle(functional.feed_forward, x, activation=activation, **dropout)
        with tuned.forced({"feed_forward first": feed_forward.GEMM}):
            against_oracle(functional.feed_forward, x, activation=activation, **dropout)
        for op in GATED.values():
            against_oracle(op, gated(40, device=device), **dropout)
        against_oracle(functional.swiglu, gated(40, device=device), **FORMS["gpt-oss"])
