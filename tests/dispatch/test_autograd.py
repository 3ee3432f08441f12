"""What torch asks of an op: opcheck, gradcheck, double backward, compile, checkpoint, autocast,
torch.func, FLOPs.
"""

import inspect
import itertools

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fastformer as ff
from fastformer import use_backend
from fastformer.dispatch.state import use_formula


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


def qkv(r):
    return r(2, 2, 5, 4), r(2, 2, 7, 4), r(2, 2, 7, 3)


def packed(r):
    offsets = (torch.tensor(n, dtype=torch.int32, device=r.device) for n in ((0, 2, 5), (0, 4, 7)))
    return r(5, 2, 4), r(7, 1, 4), r(7, 1, 3), *offsets, 3, 4


DROPOUT = dict(dropout_p=0.25, dropout_seed=1)
ARGUMENTS = {
    "scaled_dot_product_attention": lambda r: (
        (r(1, 4, 5, 4), r(1, 2, 7, 4), r(1, 2, 7, 3), r.rand(4, 1, 7) > 0.2),
        dict(is_causal=True, enable_gqa=True, key_lengths=torch.tensor([6], device=r.device))
        | DROPOUT,
    ),
    "scaled_dot_product_attention biased": lambda r: (
        (*qkv(r), r.rand(5, 7) > 0.2),
        dict(is_causal=True, causal_alignment="bottom_right", bias=r(2, 1, 5, 7), window=(4, None))
        | dict(alibi_slopes=r.rand(2), softcap=3.0, sinks=r(2))
        | DROPOUT,
    ),
    "scaled_dot_product_attention lse": lambda r: (
        (*qkv(r), r.rand(2, 1, 1, 7) > 0.2),
        dict(bias=r(2, 1, 7), return_lse=True) | DROPOUT,
    ),
    "packed_attention": lambda r: (packed(r), dict(is_causal=True, sinks=r(2)) | DROPOUT),
    "packed_attention lse": lambda r: (
        packed(r),
        dict(bias=r(7), window=(4, None), alibi_slopes=r.rand(2, 2), softcap=3.0, return_lse=True),
    ),
    "layer_norm": lambda r: ((r(3, 5), 5, r(5), r(5)), dict(eps=0.1, unbiased=True)),
    "layer_norm of width 20000": lambda r: ((r(1, 20000), 20000, r(20000), r(20000)), {}),
    "rms_norm": lambda r: ((r(3, 5), 5, r(5)), dict(eps=0.1)),
    "dropout_add_layer_norm": lambda r: (
        (r(3, 5), r(3, 5), r(5), r(5)),
        dict(eps=0.1, unbiased=True) | DROPOUT,
    ),
    "dropout_add_layer_norm biases": lambda r: (
        (r(3, 5), r(3, 5), r(5), None),
        dict(input_bias=r(5)) | DROPOUT,
    ),
    "dropout_add_rms_norm": lambda r: (
        (r(3, 5), r(3, 5), r(5)),
        dict(eps=0.1, input_bias=r(5)) | DROPOUT,
    ),
    "geglu": lambda r: ((r(3, 4), r(12, 4), r(12), r(5, 6), r(5)), DROPOUT),
    "swiglu": lambda r: ((r(3, 4), r(12, 4), None, r(5, 6), None), {}),
    "gated_activation": lambda r: ((r(3, 4), r(3, 4)), dict(activation="gelu")),
    "embed": lambda r: (
        (r.classes(4, 2, 0, 4).view(2, 2), r(6, 5), r(3, 5)),
        dict(padding_idx=5) | DROPOUT,
    ),
    "rotary_embedding": lambda r: (
        (r(1, 2, 3, 6), r(1, 1, 3, 6), *(r(3, 4).detach() for _ in range(2))),
        dict(query_norm=r(6), key_norm=r(6), eps=0.1),
    ),
    "rotary_embedding without norms": lambda r: (
        (r(3, 2, 4), r(3, 1, 4), *(r(3, 4).detach() for _ in range(2))),
        dict(interleaved=True),
    ),
    "cross_entropy": lambda r: ((r(3, 5), r.classes(4, 2, 0)), dict(label_smoothing=0.2)),
    "cross_entropy sum": lambda r: ((r(3, 5), r.classes(4, 2, 0)), dict(reduction="sum")),
    "linear_cross_entropy": lambda r: (
        (r(1, 3, 5), r(6, 5), r.classes(4, 2, 0).view(1, 3)),
        dict(linear_bias=r(6), weight=r.rand(6), ignore_index=2)
        | dict(label_smoothing=0.2, smoothing="kl", z_loss=0.1),
    ),
    "linear_cross_entropy none": lambda r: (
        (r(3, 5), r(6, 5), r.classes(4, 2, 0)),
        dict(reduction="none", label_smoothing=0.2),
    ),
    "linear_kl_div": lambda r: (
        (r(3, 5), r(6, 5), r(3, 4).detach(), r(6, 4).detach()),
        dict(linear_bias=r(6), temperature=0.5, softcap=4.0),
    ),
    "linear_kl_div reverse": lambda r: (
        (r(3, 5), r(6, 5), r(3, 4).detach(), r(6, 4).detach()),
        dict(reverse=True, softcap=4.0, reduction="none"),
    ),
    "feed_forward": lambda r: (
        (r(3, 4), r(6, 4), r(6), r(5, 6), r(5)),
        dict(activation="gelu") | DROPOUT,
    ),
    "feed_forward relu": lambda r: (
        (r(3, 4), r(6, 4), r(6), r(5, 6), r(5)),
        dict(dropout_p=0.5, dropout_seed=1),
    ),
}
SMALL = [name for name in ARGUMENTS if "20000" not in name]


class _Random:
    def __init__(self, device, dtype):
        self.device, self.options = device, {"device": device, "dtype": dtype}

    def __call__(self, *shape):
        return torch.randn(shape, **self.options).requires_grad_()

    def rand(self, *shape):
        return torch.rand(shape, device=self.device)

    def classes(self, *values):
        return torch.tensor(values, device=self.device)


def arguments(name, device, dtype=torch.float32):
    args, kwargs = ARGUMENTS[name](_Random(device, dtype))
    return getattr(ff, name.split()[0]), args, kwargs


def over_tensors(function, args, kwargs):
    """(function of the tensors that have a gradient alone, those tensors)."""
    given = dict(enumerate(args)) | kwargs
    places = [n for n, x in given.items() if isinstance(x, torch.Tensor) and x.requires_grad]

    def call(*tensors):
        full = given | dict(zip(places, tensors))
        positional = [full.pop(i) for i in range(len(args))]
        return function(*positional, **full)

    return call, [given[n] for n in places]


def joined(result):
    """One tensor of all that a call returned."""
    if isinstance(result, torch.Tensor):
        return result
    return torch.cat([x.flatten() for x in result])


@pytest.mark.parametrize("name", SMALL)
def test_gradcheck(backend, name):
    """In float64, through the interpreted kernels (along random directions, which takes a few calls
    instead of hundreds).

    Constants are float32 there: 1e-5 is what they leave.
    """
    if torch.cuda.is_available() and backend == "triton":
        pytest.skip("float64 kernels run in the interpreter only")
    call, tensors = over_tensors(*arguments(name, "cpu", torch.float64))
    fast = backend == "triton"
    assert torch.autograd.gradcheck(call, tensors, rtol=1e-5, atol=1e-6, fast_mode=fast)


@pytest.mark.parametrize("name", SMALL)
def test_forward_mode(device, backend, name):
    """A tangent sends the call through the reference: by dual numbers and by torch.func.jvp.

    In float32 where the kernels run on a GPU, which have no float64.
    """
    call, tensors = over_tensors(*arguments(name, device, torch.float64))
    tensors = [x.detach() for x in tensors]
    tangents = [torch.randn_like(x) for x in tensors]
    step = 1e-6

    def moved(sign):
        return joined(call(*(x + sign * step * t for x, t in zip(tensors, tangents))))

    with use_backend("reference"):
        want = (moved(1) - moved(-1)) / (2 * step)
    tolerance = 1e-6
    if device.type == "cuda" and backend == "triton":
        tensors, tangents = ([x.float() for x in some] for some in (tensors, tangents))
        want, tolerance = want.float(), 1e-5
    value, have = torch.func.jvp(lambda *x: joined(call(*x)), tuple(tensors), tuple(tangents))
    torch.testing.assert_close(have, want, rtol=1e-5, atol=tolerance)
    torch.testing.assert_close(value, joined(call(*tensors)), rtol=tolerance, atol=tolerance)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(tensors, tangents)]
        assert torch.allclose(forward_ad.unpack_dual(joined(call(*duals))).tangent, have)
        assert forward_ad.unpack_dual(joined(call(*tensors))).tangent is None


def test_without_a_tangent_the_kernels_run(work):
    """A dual level alone leaves the forward as it is, and create_graph the backward, until there is
    a second derivative.
    """
    q = torch.randn(1, 1, 5, 8, requires_grad=True)

    def forward():
        with forward_ad.dual_level():
            return ff.scaled_dot_product_attention(q, q, q)

    with use_backend("triton"):
        assert work(forward).launches == 1
        backward = lambda again: torch.autograd.grad(forward().sum(), q, create_graph=again)  # noqa: E731
        assert work(lambda: backward(True)).launches == work(lambda: backward(False)).launches


def test_an_output_that_is_not_used_has_no_gradient(device, monkeypatch):
    """None, where zeros would be a tensor and a pass over it."""
    backward = pytest.importorskip("fastformer.kernels.attention.launchers").backward
    plan, seen = backward.plan, []
    monkeypatch.setattr(backward, "plan", lambda *x: seen.append(x[:2]) or plan(*x))
    q = torch.randn(1, 1, 5, 8, device=device, requires_grad=True)
    with use_backend("triton"):
        out, _ = ff.scaled_dot_product_attention(q, q, q, return_lse=True)
        out.sum().backward()
    assert [x is None for x in seen[0]] == [False, True]


def test_without_a_gradient_no_graph_is_made(backend, device, monkeypatch):
    """Which costs a call on the host more than the rest of it."""
    autograd = pytest.importorskip("fastformer.dispatch.autograd")
    for function in (autograd._Kernel, autograd._Planned):
        monkeypatch.setattr(function, "forward", lambda *_: pytest.fail("a graph is made"))
    x = torch.randn(1, 1, 5, 8, device=device, requires_grad=True)
    for op in (lambda x: ff.scaled_dot_product_attention(x, x, x), lambda x: ff.layer_norm(x, 8)):
        assert not op(x.detach()).requires_grad
        with torch.no_grad():
            assert not op(x).requires_grad
        with torch.inference_mode():
            assert op(x).is_inference()


@pytest.mark.all_cases
@pytest.mark.parametrize("name", [n for n in SMALL if n != "feed_forward relu"])
def test_double_backward(device, name):
    """Under create_graph=True a kernel's gradient is that of the reference, which gradgradcheck
    holds: of all inputs, of one and of all but one (the others are frozen, and an output may depend
    on none), also by torch.func.grad, which always makes a graph.
    """
    with use_backend("reference"):
        call, tensors = over_tensors(*arguments(name, "cpu", torch.float64))
        assert torch.autograd.gradgradcheck(call, tensors, rtol=1e-4, atol=1e-6, fast_mode=True)
    call, tensors = over_tensors(*arguments(name, device))
    n = len(tensors)
    for some in (x for k in {1, n - 1, n} - {0} for x in itertools.combinations(range(n), k)):

        def loss(*inputs, some=some):
            given = [x.detach() for x in tensors]
            for n, x in zip(some, inputs):
                given[n] = x
            return joined(call(*given)).sin().sum()

        inputs, results = [tensors[n] for n in some], []
        for backend in ("reference", "triton"):
            with use_backend(backend), use_formula():
                grads = torch.autograd.grad(loss(*inputs), inputs, create_graph=True)
                total = sum(g.square().sum() for g in grads)
                twice = [torch.zeros_like(x) for x in inputs]
                if total.requires_grad:  # else the op is linear in these inputs
                    twice = torch.autograd.grad(total, inputs, materialize_grads=True)
                apart = torch.func.grad(loss, tuple(range(len(inputs))))(*inputs)
            results.append([*grads, *twice, *apart])
        for want, have in zip(*results, strict=True):
            small = 0.0 if len(some) == n else 1e-3
            assert (have - want).norm() <= 1e-5 * (want.norm() + small), some
            assert want.norm() > 0 or small, some


def test_third_derivative(device):
    q = torch.randn(1, 1, 3, 4, device=device, requires_grad=True)
    found = []
    for backend in ("reference", "triton"):
        with use_backend(backend), use_formula():
            x = ff.scaled_dot_product_attention(q, q, q) * ff.layer_norm(q, 4)
            for _ in range(3):
                [x] = torch.autograd.grad(x.sin().sum(), q, create_graph=True)
        found.append(x)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.all_cases
@pytest.mark.parametrize("name", SMALL)
def test_vjp(device, backend, name):
    """The function that torch.func.vjp returned, after its level has ended; batched by jacrev."""
    call, tensors = over_tensors(*arguments(name, device, torch.float64))
    with use_backend("reference"):
        out = joined(call(*tensors))
        cotangent = torch.randn_like(out)
        wants = torch.autograd.grad(out, tensors, cotangent)
    if device.type == "cuda":
        tensors, cotangent = [x.detach().float() for x in tensors], cotangent.float()
    inputs = [x.detach() for x in tensors]
    _, vjp = torch.func.vjp(lambda *x: joined(call(*x)), *inputs)
    rows = torch.func.jacrev(lambda *x: joined(call(*x)), tuple(range(len(inputs))))(*inputs)
    for want, one, jacobian in zip(wants, vjp(cotangent), rows, strict=True):
        for have in (one, torch.tensordot(cotangent, jacobian, cotangent.dim())):
            torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-5)
            assert not have.requires_grad


@pytest.mark.sample
@pytest.mark.parametrize("name", list(ARGUMENTS))
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_opcheck(device, name, which):
    """The registered ops themselves: schema, fake tensors with shapes and strides, dynamic shapes,
    no aliasing.
    """
    from fastformer.dispatch import autograd, backends

    function, args, kwargs = arguments(name, device)
    recorded = []

    def record(original):
        def call(*given):
            detached = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in given]
            recorded.append((original, tuple(detached)))
            return original(*given)

        return call

    with use_backend("triton"):
        function(*args, **kwargs)
    pair = autograd._pairs[name.split()[0]]
    with pytest.MonkeyPatch.context() as patch, use_backend("triton"):
        for kind in ("forward", "backward", "in_place"):
            if hasattr(pair, kind):
                patch.setattr(pair, kind, record(getattr(pair, kind)))
        with backends.observe(lambda choice: None):  # past the plans, by PyTorch's dispatcher
            joined(function(*args, **kwargs)).sum().backward()
    assert len(recorded) == 2
    torch.library.opcheck(*recorded[which == "backward"])


@pytest.mark.sample
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_compile_fullgraph(backend, device, name, dynamic):
    function, args, kwargs = arguments(name, device)
    call, tensors = over_tensors(function, args, kwargs)
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    want, have = joined(call(*tensors)), joined(compiled(*tensors))
    torch.testing.assert_close(have, want)
    for g, h in zip(*(torch.autograd.grad(y.square().sum(), tensors) for y in (want, have))):
        torch.testing.assert_close(h, g)


@pytest.mark.parametrize("name", ["attention", "layer_norm", "feed_forward"])
def test_a_new_length_does_not_recompile(backend, device, name):
    w = torch.randn(16, 8, device=device)
    call = {
        "attention": lambda x: ff.scaled_dot_product_attention(
            *(x.view(1, -1, 1, 8).transpose(1, 2),) * 3, is_causal=True, dropout_p=0.1
        ),
        "layer_norm": lambda x: ff.layer_norm(x, 8),
        "feed_forward": lambda x: ff.feed_forward(x, w, None, w.t(), None, dropout_p=0.1),
    }[name]
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(torch.randn(6, 8, device=device))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (7, 20, 33):
            assert compiled(torch.randn(length, 8, device=device)).isfinite().all()


def test_compiled_dropout_draws_anew_and_obeys_the_seed(backend, device):
    x = torch.randn(1, 1, 40, 8, device=device)

    def call(x):
        return ff.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(x), compiled(x))
    torch.manual_seed(3)
    first = compiled(x)
    torch.manual_seed(3)
    assert torch.equal(compiled(x), first)


@pytest.mark.with_all
@pytest.mark.parametrize("form", ["seed", "checkpoint"])
def test_dropout_that_is_computed_again(backend, device, form):
    """With a seed a compiled backward may compute the forward again, and inside of a checkpoint
    without one, too: the gradient is that of the mask of the forward.
    """
    seed, v = torch.tensor(5, device=device), torch.randn(1, 1, 40, 8, device=device)

    def attend(x, seed=None):
        h = x.tanh()
        return ff.scaled_dot_product_attention(h, h, v, dropout_p=0.5, dropout_seed=seed)

    def call(x):
        if form == "seed":
            return attend(x, seed).sum()
        return checkpoint(attend, x, use_reentrant=False).sum()

    budget = 0.0 if form == "seed" else 1.0
    x, d = torch.randn(2, 1, 1, 40, 8, dtype=torch.float64, device=device)
    v = v.double()
    with torch._functorch.config.patch(activation_memory_budget=budget), use_backend(backend):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager_decomp_partition")
        ends = []
        for step in (1e-5, -1e-5, 0.0):
            torch.manual_seed(3)
            at = (x + step * d).requires_grad_()
            ends.append(compiled(at))
        (gradient,) = torch.autograd.grad(ends.pop(), at)
    slope = (ends[0] - ends[1]) / 2e-5
    torch.testing.assert_close((gradient * d).sum(), slope.detach(), rtol=1e-6, atol=1e-8)


def test_a_compiled_function_follows_use_backend(work):
    compiled = torch.compile(lambda x: ff.layer_norm(x, 8), fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 8)
    for backend, launches in (("reference", 0), ("triton", 1)):
        with use_backend(backend):
            assert work(lambda: compiled(x)).launches == launches


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
def test_inductor(device, name):
    call, tensors = over_tensors(*arguments(name, device))
    compiled = torch.compile(call, fullgraph=True)
    torch.testing.assert_close(joined(compiled(*tensors)), joined(call(*tensors)))


@pytest.mark.gpu
def test_cuda_graph(device):
    """A captured step draws a new dropout mask at each replay, one for forward and backward; a
    seed that is given stays the same.
    """
    q, k, v = (torch.randn(2, 2, 70, 16, device=device, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, 70, 70, device=device, requires_grad=True)
    leaves = [q, k, v, bias]

    def step():
        out = ff.scaled_dot_product_attention(q, k, v, dropout_p=0.3, bias=bias)
        seeded = ff.dropout_add_layer_norm(q, q, q[0, 0, 0], None, 0.3, dropout_seed=2**63 + 7)
        return [out, *torch.autograd.grad(out.square().sum(), leaves), seeded[0]]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    torch.cuda.manual_seed(4)
    graph.replay()
    first = [x.clone() for x in results]
    graph.replay()
    assert not torch.equal(first[0], results[0]) and torch.equal(first[-1], results[-1])
    torch.cuda.manual_seed(4)
    graph.replay()
    for a, b in zip(first, results):
        assert torch.equal(a, b)
    torch.cuda.manual_seed(4)
    for a, b in zip(first, step()):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(backend, device, dtype):
    x = torch.randn(3, 8, device=device, requires_grad=True)
    w, b = torch.randn(12, 8, device=device, requires_grad=True), torch.randn(8, device=device)
    q = torch.randn(1, 1, 5, 8, device=device)
    with torch.autocast(device.type, dtype):
        hidden = ff.feed_forward(x, w, None, w.t(), None)
        assert hidden.dtype == dtype
        assert ff.scaled_dot_product_attention(q, q.to(dtype), q).dtype == dtype
        assert ff.layer_norm(x, 8, b, b).dtype == torch.float32
        assert ff.layer_norm(hidden, 8, b, b).dtype == dtype
    hidden.float().sum().backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32


# -------------------------------------------------------------------------------------------- FLOPs


def flops(call, *args, **kwargs):
    """The FLOPs that torch counts in a call, and what the call returns."""
    with FlopCounterMode(display=False) as counter:
        result = call(*args, **kwargs)
    return counter.get_total_flops(), result


FLOPS = {  # by the shapes of ARGUMENTS: of the forward and the backward, with which gradients
    "scaled_dot_product_attention": {None: (2 * 140 * (4 + 3), 2 * 140 * (3 * 4 + 2 * 3))},
    "packed_attention": {None: (2 * 34 * (4 + 3), 2 * 34 * (3 * 4 + 2 * 3))},  # 2 * 4 + 3 * 3 pairs
    "layer_norm": {None: (0, 0)},
    "cross_entropy": {None: (0, 0)},
    "feed_forward": {None: (324, 648), "input": (324, 324), "w_2": (324, 360)},
    "feed_forward relu": {None: (324, 648), "input": (324, 324), "w_2": (324, 180)},
    "geglu": {None: (468, 936), "input": (468, 468)},
    "swiglu": {None: (468, 936), "w_2": (468, 360)},
    "linear_cross_entropy": {None: (540, 0), "input": (360, 0)},  # gradients in the forward
    "linear_cross_entropy none": {None: (180, 540), "input": (180, 360)},
    "linear_kl_div": {None: (540 + 144, 0), "input": (360 + 144, 0)},
    "linear_kl_div reverse": {None: (180 + 144, 540 + 144), "input": (180 + 144, 360 + 144)},
}


def test_flops_of_the_kernels(device):
    """2 m k n for each product: all of them, or those that the gradient of one input takes."""
    for name, by_gradient in FLOPS.items():
        for wanted, expected in by_gradient.items():
            function, args, kwargs = arguments(name, device)
            given = inspect.signature(function).bind(*args, **kwargs).arguments
            if wanted is not None:
                given = {n: x.detach() if torch.is_tensor(x) else x for n, x in given.items()}
                given[wanted].requires_grad_()
            with use_backend("triton"):
                forward, out = flops(function, **given)
                backward, _ = flops(joined(out).sum().backward)
            assert (forward, backward) == expected, (name, wanted)


B, S, E, H, D_FF, V = 2, 20, 16, 2, 24, 11
LINEAR = 2 * B * S * E * (4 * E + 2 * D_FF)  # of a layer's projections and feed-forward layer
SCORES = 2 * B * S * S * E  # of one product with all pairs of a query and a key
LOGITS = 2 * B * S * E * V


def dtype_of(backend):
    """In float64 the reference has its own products; torch counts none in its op for a CPU."""
    return torch.float64 if backend == "reference" else torch.float32


@pytest.mark.parametrize("kind", ["own", "accelerated"])
def test_flops_of_a_layer(device, backend, kind):
    """The backward of attention has four products, and with the scores again five."""
    if kind == "own":
        model = ff.make_model(V, V, N=1, d_model=E, d_ff=D_FF, h=H, dropout=0.0)
        layer, masks = model.encoder.layers[0], (None,)
    else:
        layer, masks = torch.nn.TransformerEncoderLayer(E, H, D_FF, 0.0, batch_first=True), ()
        ff.accelerate(layer)
    layer.to(device, dtype_of(backend))
    x = torch.randn(B, S, E, device=device, dtype=dtype_of(backend), requires_grad=True)
    forward, out = flops(layer, x, *masks)
    assert forward == LINEAR + 2 * SCORES
    assert (
        flops(out.sum().backward)[0] == 2 * LINEAR + (4 if backend == "reference" else 5) * SCORES
    )


def test_flops_of_a_step_of_a_language_model(device, backend):
    """The kernels compute the gradients of the loss in its forward."""
    model = ff.make_decoder(V, N=1, d_model=E, d_ff=D_FF, h=H, dropout=0.0)
    model.to(device, dtype_of(backend))
    loss_compute = ff.SimpleLossCompute(model.generator, ff.LabelSmoothing(V, 0, 0.1))
    tokens = torch.randint(1, V, (B, S + 1), device=device)

    def loss():
        return loss_compute(model(tokens[:, :-1]), tokens[:, 1:], B * S)

    with torch.no_grad():
        assert flops(loss)[0] == LINEAR + 2 * SCORES + LOGITS
    forward, out = flops(loss)
    early, again = (0, 4) if backend == "reference" else (2 * LOGITS, 5)
    assert forward == LINEAR + 2 * SCORES + LOGITS + early
    assert flops(out.backward)[0] == 2 * LINEAR + again * SCORES + 2 * LOGITS - early


def test_flops_of_the_first_call(fresh):
    """The counter is older than the formulas, which are registered with the kernels; no module of
    the counter is imported before.
    """
    pytest.importorskip("triton")
    code = """
import sys, torch, fastformer as ff
print("torch.utils.flop_counter" in sys.modules, "triton" in sys.modules)
from torch.utils.flop_counter import FlopCounterMode
x, b = torch.randn(4, 4), torch.randn(4)
with FlopCounterMode(display=False) as counter, ff.use_backend("triton"):
    ff.feed_forward(x, x, b, x, b)
print(counter.get_total_flops())
"""
    assert fresh(code, TRITON_INTERPRET="1").split() == ["False", "False", str(2 * 2 * 4**3)]
