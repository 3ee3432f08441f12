"""Usual calls on a CPU go past the dispatch: with the same bits, the same errors, and only where
nothing observes, traces or changes the call.
"""

import logging
import weakref
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fastformer as ff
from fastformer import numerics
from fastformer.dispatch import backends
from fastformer.eager import use_formula

B, H, Q, K, D = 2, 3, 17, 20, 8


def heads(rows, **like):
    return torch.randn(B, H, rows, D, **like)


def qkv(rows=Q, columns=K, **like):
    return heads(rows, **like), heads(columns, **like), heads(columns, **like)


MASK = torch.ones(Q, K, dtype=torch.bool).tril()
SDPA, SUM, LINEAR = ff.scaled_dot_product_attention, ff.dropout_add_layer_norm, ff.feed_forward


def layers(**like):
    shapes = (16, D), (16,), (D, 16), (D,)
    return heads(5, **like), *(torch.randn(n, **like) for n in shapes)


TARGET = torch.arange(9) % 5
DTYPES = torch.float32, torch.bfloat16, torch.float16
CALLS = {
    "attention": lambda like: (SDPA, qkv(**like), {}),
    "causal": lambda like: (SDPA, qkv(20, 20, **like), dict(is_causal=True)),
    "short causal": lambda like: (SDPA, qkv(5, 5, **like), dict(is_causal=True)),
    "short": lambda like: (SDPA, qkv(5, 5, **like), {}),
    "mask": lambda like: (SDPA, (*qkv(**like), MASK), {}),
    "mask of keys": lambda like: (SDPA, (*qkv(**like), MASK[-1:].expand(B, 1, 1, K)), {}),
    "causal with a mask": lambda like: (
        SDPA, (*qkv(**like), torch.arange(K) % 3 < 2), dict(is_causal=True)),
    "nothing visible": lambda like: (SDPA, (*qkv(**like), MASK & (MASK.sum(1) > 3)[:, None]), {}),
    "bias": lambda like: (SDPA, (*qkv(**like), torch.randn(Q, K, **like)), {}),
    "bias of -inf": lambda like: (
        SDPA, (*qkv(**like), torch.zeros(Q, K, **like).masked_fill(~MASK, -torch.inf)), {}),
    "one length": lambda like: (SDPA, qkv(**like), dict(key_lengths=torch.tensor([18, 18]))),
    "full lengths": lambda like: (
        SDPA, qkv(1, **like), dict(key_lengths=torch.tensor([K, K]).int(), enable_gqa=True,
        causal_alignment="bottom_right")),
    "lengths": lambda like: (SDPA, qkv(**like), dict(key_lengths=torch.tensor([18, 3]))),
    "an empty length": lambda like: (SDPA, qkv(**like), dict(key_lengths=torch.tensor([0, 0]))),
    "layer_norm": lambda like: (ff.layer_norm, (heads(5, **like), D), {}),
    "affine": lambda like: (
        ff.layer_norm, (heads(5, **like), (D,), *torch.randn(2, D, **like), 1e-6), {}),
    "sum": lambda like: (SUM, (heads(5, **like), heads(5, **like), *torch.randn(2, D, **like)), {}),
    "feed_forward": lambda like: (LINEAR, (*layers(**like), "gelu_tanh"), {}),
    "attention, dropout": lambda like: (SDPA, (*qkv(**like), MASK, 0.3), {}),
    "causal, dropout": lambda like: (SDPA, (*qkv(5, 5, **like), None, 0.3, True), {}),
    "nothing visible, dropout": lambda like: (
        SDPA, (*qkv(**like), MASK & (MASK.sum(1) > 3)[:, None], 0.3), {}),
    "sum, dropout": lambda like: (
        SUM, (heads(5, **like), heads(5, **like), *torch.randn(2, D, **like), 0.3), {}),
    "feed_forward, dropout": lambda like: (LINEAR, (*layers(**like), "relu", 0.3), {}),
    "cross_entropy": lambda like: (ff.cross_entropy, (torch.randn(9, 5, **like), TARGET), {}),
    "smoothed": lambda like: (
        ff.cross_entropy, (torch.randn(9, 5, **like), TARGET, "none", 3, 0.2), {}),
    "ignored": lambda like: (
        ff.cross_entropy, (torch.randn(9, 5, **like), TARGET.where(TARGET > 2, -1), "sum", -1), {}),
}  # fmt: skip


def dispatched():
    """Calls go through the dispatch."""
    return mock.patch.object(backends, "runs_directly", lambda: False)


def differentiated(call, tensors):
    """Return the outputs of a call, and the gradients of their sum."""
    out = call()
    outputs = out if isinstance(out, tuple) else (out,)
    total = sum(x.float().square().sum() for x in outputs)
    grads = torch.autograd.grad(total, tensors, allow_unused=True)
    return [*(x.detach() for x in outputs), *grads]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", list(CALLS))
def test_bits_are_those_of_the_dispatch(case, dtype):
    op, given, options = CALLS[case](dict(dtype=dtype))
    wanted = [x for x in given if isinstance(x, torch.Tensor) and x.is_floating_point()]
    wanted = wanted[:3] if op is SDPA else wanted
    for x in wanted:
        x.requires_grad_()
    torch.manual_seed(1)  # of dropout
    found = differentiated(lambda: op(*given, **options), wanted)
    torch.manual_seed(1)
    with dispatched():
        want = differentiated(lambda: op(*given, **options), wanted)
    for a, b in zip(found, want):
        assert (a is None and b is None) or torch.equal(a, b)


UNUSUAL = "causal with a mask", "lengths", "an empty length", "ignored"


@pytest.mark.parametrize("case", [case for case in CALLS if case not in UNUSUAL])
def test_usual_calls_go_past_the_dispatch(monkeypatch, caplog, case):
    """And what does not: whatever has to see, to change or to refuse the call."""
    ran = []
    monkeypatch.setattr(backends, "choose_backend", lambda op, *_: ran.append(op) or CHOICE)
    op, given, options = CALLS[case]({})
    record = backends.OPERATIONS[op.__name__]
    torch.manual_seed(1)  # of dropout
    want = op(*given, **options)
    assert not ran
    contexts = [
        ff.use_backend("triton"),
        backends.observe(on_choice=lambda choice: None),
        torch.autocast("cpu", torch.bfloat16),
        caplog.at_level(logging.INFO, "fastformer"),
    ]
    for n, context in enumerate(contexts, 1):
        with context:
            op(*given, **options)
        assert len(ran) == n and ran[-1] == record.contract.__name__
    found = ff.explain(op.__name__, *given, **options)  # which also says who draws a dropout mask
    assert found._replace(reason=found.reason.split("; the dropout mask")[0]) == CHOICE
    torch.manual_seed(1)
    again = op(*given, **options)
    assert len(ran) == 5
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (again, want))):
        assert torch.equal(a, b)


CHOICE = backends.Choice("op", "reference", "a test chose it")
X, W = torch.randn(B, H, K, D), torch.randn(D)
WRONG = {
    "heads": (SDPA, (X, X[:, :1], X[:, :1]), {}),
    "batch": (SDPA, (X, X[:1], X[:1]), {}),
    "dim": (SDPA, (X, X[..., :4], X), {}),
    "length": (SDPA, (X, X, X[:, :, :3]), {}),
    "mask": (SDPA, (X, X, X, MASK), {}),
    "mask of integers": (SDPA, (X, X, X, torch.ones(K, K, dtype=torch.int64)), {}),
    "lengths": (SDPA, (X, X, X), dict(key_lengths=torch.tensor([K + 1, K + 1]))),
    "negative lengths": (SDPA, (X, X, X), dict(key_lengths=torch.tensor([-1, -1]))),
    "one of the lengths": (SDPA, (X, X, X), dict(key_lengths=torch.tensor([K]))),
    "alignment": (SDPA, (X, X, X), dict(causal_alignment="left")),
    "flag": (SDPA, (X, X, X), dict(return_lse="no")),
    "sparse": (SDPA, (X.to_sparse(), X, X), {}),
    "nested": (SDPA, (torch.nested.nested_tensor([X[0], X[1]]), X, X), {}),
    "features": (ff.layer_norm, (X, D + 1), {}),
    "weight": (ff.layer_norm, (X, D, torch.ones(1)), {}),
    "eps": (ff.layer_norm, (X, D, None, None, -1.0), {}),
    "no number": (ff.layer_norm, (X, D, None, None, float("nan")), {}),
    "residual": (SUM, (X, X[:1], W, W), {}),
    "no weight": (SUM, (X, X, None, None), {}),
    "width": (LINEAR, (X, torch.ones(4, D + 1), torch.ones(4), torch.ones(D, 4), W), {}),
    "bias": (LINEAR, (X, torch.ones(4, D), torch.ones(1), torch.ones(D, 4), W), {}),
    "activation": (
        LINEAR, (X, torch.ones(4, D), torch.ones(4), torch.ones(D, 4), W, ["relu"]), {}),
    "target": (ff.cross_entropy, (torch.randn(9, 5), TARGET + 1), {}),
    "negative target": (ff.cross_entropy, (torch.randn(9, 5), TARGET - 1), {}),
    "rows": (ff.cross_entropy, (torch.randn(8, 5), TARGET), {}),
    "reduction": (ff.cross_entropy, (torch.randn(9, 5), TARGET, "all"), {}),
    "smoothing": (ff.cross_entropy, (torch.randn(9, 5), TARGET, "sum", -100, 1.5), {}),
    "hidden": (LINEAR, (X, torch.ones(4, D), torch.ones(4), torch.ones(D, 5), W), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", list(WRONG))
def test_errors_are_those_of_the_dispatch(case):
    op, given, options = WRONG[case]
    with pytest.raises((ValueError, TypeError)) as found:
        op(*given, **options)
    with dispatched(), pytest.raises((ValueError, TypeError)) as want:
        op(*given, **options)
    assert str(found.value) == str(want.value) and type(found.value) is type(want.value)


def test_what_a_mask_hides_may_be_nan():
    q, k, v = qkv()
    hidden = torch.arange(K) < K - 2
    k[:, :, -2:] = v[:, :, -2:] = torch.nan
    for options in (dict(attn_mask=hidden), dict(key_lengths=torch.tensor([K - 2] * B))):
        out = SDPA(q, k, v, **options)
        assert torch.isfinite(out).all()
        with dispatched():
            assert torch.equal(SDPA(q, k, v, **options), out)


def test_transforms_and_forward_mode_take_the_whole_path():
    q, k, v = qkv(K, K)
    mask = torch.ones(K, K, dtype=torch.bool).tril()
    want = SDPA(q, k, v, mask)
    found = torch.func.vmap(lambda q, k, v: SDPA(q[None], k[None], v[None], mask)[0])(q, k, v)
    torch.testing.assert_close(found, want)
    _, tangent = torch.func.jvp(lambda q: SDPA(q, k, v), (q,), (torch.ones_like(q),))
    assert tangent.shape == q.shape


@pytest.mark.all_cases
@pytest.mark.parametrize("case", [case for case, make in CALLS.items() if make({})[0] is SDPA])
def test_derivatives_of_attention_by_the_math_of_torch(case):
    """Its fused op on a CPU has no second ones. Against the formula in float64; with dropout the
    first ones have a backward of their own.
    """

    def derivatives(given, options):
        wanted = given[:3]
        loss = SDPA(*given, **options, dropout_seed=1).sin().sum()
        plain = torch.autograd.grad(loss, wanted, retain_graph=True)
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), wanted)
        return [x.detach().double() for x in (*plain, *first, *second)]

    _, given, options = CALLS[case](dict(dtype=torch.float64))
    with use_formula():
        want = derivatives([*(x.requires_grad_() for x in given[:3]), *given[3:]], options)
    given = [x.float() if torch.is_tensor(x) and x.is_floating_point() else x for x in given]
    given[:3] = [x.detach().requires_grad_() for x in given[:3]]
    for a, b in zip(derivatives(given, options), want):
        assert (a - b).norm() <= numerics.RELATIVE[torch.float32] * b.norm()


def test_second_derivatives_of_attention_with_one_tensor_as_query_key_and_value():
    """Of it as all three, and as the key alone; and nothing keeps the graph alive."""

    def derivatives(x, other):
        out = SDPA(other, x, other)
        out.grad_fn.metadata["alive"] = alive = torch.empty(0)
        first = torch.autograd.grad(out.sin().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), x)[0], weakref.ref(alive)

    x = heads(Q).requires_grad_()
    for other in (False, True):
        found, alive = derivatives(x, x.detach().requires_grad_() if other else x)
        assert alive() is None
        with use_formula():
            x64 = x.detach().double().requires_grad_()
            want, _ = derivatives(x64, x64.detach() if other else x64)
        assert (found - want).norm() <= numerics.RELATIVE[torch.float32] * want.norm()


def test_gradients_with_a_graph_within_an_activation_checkpoint():
    """It hands out each tensor once, so there is no second derivative; the first stays right. So it
    does with other hooks that hand it out once, and by compiled autograd, which has no node.
    """
    given = [x.requires_grad_() for x in qkv()]
    want = torch.autograd.grad(SDPA(*given).sin().sum(), given)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: [x], lambda held: held.pop()):
        once = SDPA(*given)
    for out in (checkpoint(SDPA, *given, use_reentrant=False), once):
        grads = torch.autograd.grad(out.sin().sum(), given, create_graph=True)
        assert all(map(torch.equal, grads, want))
    loss = SDPA(*given).sin().sum()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda x: x.backward(create_graph=True), backend="eager")(loss)
    for x, grad in zip(given, want):
        torch.testing.assert_close(x.grad, grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_a_bias_hides_are_zeros_without_a_gradient(dtype):
    """By -inf and by finfo.min, which torch's op takes for a number; the other rows stay exact."""
    q, k, v = qkv(dtype=dtype)
    bias = torch.randn(Q, K, dtype=dtype)
    bias[3], bias[4], bias[5, :10] = torch.finfo(dtype).min, -torch.inf, torch.finfo(dtype).min
    out = SDPA(q, k, v, bias)
    assert (out[:, :, 3:5] == 0).all()
    bias64 = bias.double().masked_fill(bias < -1e38, -torch.inf)
    with use_formula():
        want = SDPA(*(x.double() for x in (q, k, v)), bias64)
    tolerance = 1e-6 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)
