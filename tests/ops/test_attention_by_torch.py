"""Attention by torch's own op on a CPU: its derivatives, and the rows that it gets wrong."""

import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fastformer as ff
from fastformer import numerics
from fastformer.dispatch import backends
from fastformer.dispatch.state import use_formula

B, H, Q, K, D = 2, 3, 17, 20, 8
SDPA = ff.scaled_dot_product_attention
MASK = torch.ones(Q, K, dtype=torch.bool).tril()


def heads(rows, **like):
    return torch.randn(B, H, rows, D, **like)


def qkv(rows=Q, columns=K, **like):
    return heads(rows, **like), heads(columns, **like), heads(columns, **like)


CALLS = {
    "attention": lambda like: (qkv(**like), {}),
    "causal": lambda like: (qkv(20, 20, **like), dict(is_causal=True)),
    "short causal": lambda like: (qkv(5, 5, **like), dict(is_causal=True)),
    "short": lambda like: (qkv(5, 5, **like), {}),
    "mask": lambda like: ((*qkv(**like), MASK), {}),
    "mask of keys": lambda like: ((*qkv(**like), MASK[-1:].expand(B, 1, 1, K)), {}),
    "causal with a mask": lambda like: (
        (*qkv(**like), torch.arange(K) % 3 < 2), dict(is_causal=True)),
    "nothing visible": lambda like: ((*qkv(**like), MASK & (MASK.sum(1) > 3)[:, None]), {}),
    "bias": lambda like: ((*qkv(**like), torch.randn(Q, K, **like)), {}),
    "bias of -inf": lambda like: (
        (*qkv(**like), torch.zeros(Q, K, **like).masked_fill(~MASK, -torch.inf)), {}),
    "one length": lambda like: (qkv(**like), dict(key_lengths=torch.tensor([18, 18]))),
    "full lengths": lambda like: (
        qkv(1, **like), dict(key_lengths=torch.tensor([K, K]).int(), enable_gqa=True,
        causal_alignment="bottom_right")),
    "lengths": lambda like: (qkv(**like), dict(key_lengths=torch.tensor([18, 3]))),
    "an empty length": lambda like: (qkv(**like), dict(key_lengths=torch.tensor([0, 0]))),
    "attention, dropout": lambda like: ((*qkv(**like), MASK, 0.3), {}),
    "causal, dropout": lambda like: ((*qkv(5, 5, **like), None, 0.3, True), {}),
    "nothing visible, dropout": lambda like: (
        (*qkv(**like), MASK & (MASK.sum(1) > 3)[:, None], 0.3), {}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", list(CALLS))
def test_bits_of_a_plan_are_those_of_the_long_way(case, dtype):
    """Which an observer takes, past the plans."""

    def differentiated():
        torch.manual_seed(1)  # of dropout
        out = SDPA(*given, **options)
        return out.detach(), *torch.autograd.grad(out.float().square().sum(), given[:3])

    given, options = CALLS[case](dict(dtype=dtype))
    for x in given[:3]:
        x.requires_grad_()
    with backends.observe(lambda choice: None):
        want = differentiated()
    for _ in range(2):
        assert all(map(torch.equal, differentiated(), want))


@pytest.mark.all_cases
@pytest.mark.parametrize("case", list(CALLS))
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

    given, options = CALLS[case](dict(dtype=torch.float64))
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
