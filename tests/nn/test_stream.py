"""Which biases the residual stream takes: those of the linear layers before a sum and its norm."""

import pytest
import torch
from torch import nn

import fastformer as ff
from fastformer import use_backend
from fastformer.dispatch import backends

D, HEADS = 16, 2


def ours(norm_first):
    """A stack, a call of it, and of each layer the modules that end its sublayers."""
    stack = ff.make_model(9, 9, 2, D, 2 * D, HEADS, norm_first=norm_first).decoder
    return stack, lambda x: stack(x, x, None, None)


def accelerated(norm_first):
    options = dict(dropout=0.1, batch_first=True, norm_first=norm_first)
    stack = nn.TransformerDecoder(
        nn.TransformerDecoderLayer(D, HEADS, 2 * D, **options), 2, nn.LayerNorm(D)
    )
    ff.accelerate(stack)
    return stack, lambda x: stack(x, x)


def run(stack, call, backend):
    """Whether each sum with a norm has a bias; the output and the gradients."""
    x = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(1)).requires_grad_()
    seen = []

    def note(op, arguments):
        if op == "dropout_add_layer_norm":
            seen.append(arguments["input_bias"] is not None)

    torch.manual_seed(2)  # of the dropout seeds
    with use_backend(backend), backends.observe(on_call=note):
        out = call(x)
    wanted = [x, *stack.parameters()]
    return seen, [out, *torch.autograd.grad(out.square().sum(), wanted)]


def check(stack, call, without=0):
    """All sums but `without` have a bias with the kernels, none with the reference; the results
    agree.
    """
    for p in stack.parameters():
        nn.init.normal_(p, std=0.3)
    seen, have = run(stack, call, "triton")
    assert seen.count(False) == without, seen
    none, want = run(stack, call, "reference")
    assert not any(none) and len(none) == len(seen)
    for x, y in zip(have, want, strict=True):
        torch.testing.assert_close(x, y, atol=2e-4, rtol=2e-4)
    return len(seen)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("made", [ours, accelerated])
def test_every_bias_of_a_stack(made, norm_first):
    assert check(*made(norm_first)) == 6


def test_a_layer_alone():
    """No norm follows its last sum, which has a bias by itself."""
    stack, _ = ours(True)
    layer = stack.layers[0]
    assert check(layer, lambda x: layer(x, x, None, None)) == 2


def test_hooks_see_the_whole_output():
    stack, call = ours(True)
    first, second = stack.layers
    first.self_attn.register_forward_hook(lambda module, given, out: out * 2)
    first.feed_forward.w_2.register_forward_hook(lambda module, given, out: out * 2)
    second.src_attn.linears[3].register_forward_hook(lambda module, given, out: out * 2)
    assert check(stack, call, without=3) == 6


def test_a_stack_without_a_norm():
    stack = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(D, HEADS, 2 * D, batch_first=True, norm_first=True), 2
    )
    ff.accelerate(stack)
    assert check(stack, stack) == 3
