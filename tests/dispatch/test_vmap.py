"""torch.vmap over every op and over models: outputs and gradients are those of a loop over the
examples.
"""

import copy
import math
import zlib

import pytest
import torch
from calls import DRAWN, Draw, drawn, outputs_of
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vmap

import fastformer as ff
from fastformer import use_backend
from fastformer.dispatch import backends

CALLS, ALL, SLOW = 1, 10, 63  # of each op on each backend: in each run, with --all, with --slow
BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-4}  # of roundings; 16 bits: 2e-2


def varied(draw, name, x, n):
    """n tensors like x [n, *x.shape], with other values where these are free."""
    if name == "dropout_seed":
        return torch.stack([x + i for i in range(n)])
    if x.is_floating_point():
        return torch.stack([x * (1 + i / 4) for i in range(n)])
    if name == "key_lengths":
        return torch.stack([(x - i).clamp(min=0) for i in range(n)])
    if name == "attn_mask":
        hidden = torch.as_tensor(draw.random.random((n, *x.shape)) < 0.2, device=x.device)
        return x & ~hidden
    if name.startswith("cu_seqlens"):
        return torch.stack([x] * n)
    return torch.stack([x.flatten().roll(i).view(x.shape) for i in range(n)])  # ids, labels, a mask


def mapped_call(case, draw, n):
    """A random call for n examples: a function of the tensors of one, in_dims, what vmap takes,
    the places of the wanted gradients, and the tensors of each example.
    """
    tensors, options, floating = drawn(case, draw)
    tensors = {**tensors, **{k: x for k, x in options.items() if isinstance(x, torch.Tensor)}}
    if options.get("dropout_p") and draw.often():
        tensors["dropout_seed"] = torch.tensor([options["dropout_seed"]], device=draw.device)
    given = {**tensors, **options}
    names = [name for name, x in tensors.items() if x is not None]
    some = draw.random.permutation(names)[: draw.random.integers(1, len(names) + 1)]
    mapped = draw.one({names[0]}, set(some.tolist()))
    inputs, in_dims, columns = [], [], []
    for name in names:
        x = tensors[name].detach()
        inputs.append(x)
        in_dims.append(None)
        columns.append([x] * n)
        if name in mapped:
            each = varied(draw, name, x, n)
            columns[-1] = each.unbind(0)
            dim = int(draw.random.integers(-x.dim() - 1, x.dim() + 1))
            in_dims[-1] = dim
            inputs[-1] = draw.view(
                each.movedim(0, dim), math.nan if x.is_floating_point() else True
            )

    def call(*tensors):
        return outputs_of(case, {**given, **dict(zip(names, tensors))}, {})

    places = [names.index(name) for name in floating if name in names]
    return call, tuple(in_dims), inputs, places, list(zip(*columns))


def close(what, have, want, dtype, exact):
    """have: by vmap. want: by a loop. exact: in 16 bits by a loop in float64, from which `have` may
    differ by the bound, or by twice what `want` does; else `want`.
    """
    assert (have.shape, have.dtype) == (want.shape, want.dtype), what
    tensors = have.double(), want.double(), exact.double()
    assert torch.equal(have.isfinite(), want.isfinite()), what
    have, want, exact = (x.nan_to_num(0.0, 0.0, 0.0) for x in tensors)
    bound = BOUNDS.get(dtype, 2e-2) * (want.norm() + 1e-3)
    error, allowed = (have - exact).norm(), max(bound, 2 * (want - exact).norm())
    assert error <= allowed, f"{what}: off by {error:.1e} of {allowed:.1e}"


def check(case, draw):
    """Outputs, the gradients of each example, and those of the sum over the examples."""
    call, in_dims, inputs, wanted, examples = mapped_call(case, draw, draw.one(1, 2, 3))
    outputs = [call(*example) for example in examples]

    def exactly(function):
        """The results of each example in float64, by the reference."""
        wide = [[x.double() if x.is_floating_point() else x for x in row] for row in examples]
        with use_backend("reference"):
            return [torch.stack(x) for x in zip(*map(function, wide), strict=True)]

    wants = [torch.stack(x) for x in zip(*outputs)]
    exacts = wants if draw.dtype in BOUNDS else exactly(lambda example: call(*example))
    mapped = vmap(call, in_dims)(*inputs)
    for k, (have, want, exact) in enumerate(zip(mapped, wants, exacts, strict=True)):
        close(f"output {k}", have, want, draw.dtype, exact)
    weights = [draw.normal(*x.shape, dtype=torch.float64) for x in outputs[0]]

    def loss(*given):
        return sum((x * w).sum() for x, w in zip(call(*given), weights) if x.is_floating_point())

    def leaves(tensors):
        return [x.clone().requires_grad_() if i in wanted else x for i, x in enumerate(tensors)]

    def gradients(function, tensors):
        given = leaves(tensors)
        return torch.autograd.grad(function(*given), [given[i] for i in wanted])

    def total(*given):
        return vmap(loss, in_dims)(*given).sum()

    if not wanted:
        return
    columns = [torch.stack(x) for x in zip(*[gradients(loss, example) for example in examples])]
    each = vmap(grad(loss, tuple(wanted)), in_dims)(*inputs)
    found = gradients(total, inputs), grad(total, tuple(wanted))(*inputs)
    exacts = columns if draw.dtype in BOUNDS else exactly(lambda x: gradients(loss, x))
    for i, want, exact, have, *others in zip(wanted, columns, exacts, each, *found, strict=True):
        close(f"gradient {i} of each example", have, want, draw.dtype, exact)
        dim = in_dims[i]
        want, exact = (
            x.double().sum(0).to(x.dtype) if dim is None else x.movedim(0, dim)
            for x in (want, exact)
        )
        for have in others:
            close(f"gradient {i}", have, want, draw.dtype, exact)


@pytest.mark.parametrize(
    "calls",
    [
        CALLS,
        pytest.param(ALL, marks=pytest.mark.with_all),
        pytest.param(SLOW, marks=pytest.mark.with_slow),
    ],
)
@pytest.mark.all_cases
@pytest.mark.parametrize("case", DRAWN, ids=lambda case: case.__name__)
@pytest.mark.filterwarnings("error:There is a performance drop.*fastformer")
@pytest.mark.filterwarnings("ignore:torch.searchsorted", "ignore:invalid value:RuntimeWarning")
def test_random_calls(case, calls, backend, device):
    """Any tensors mapped at any dimension, the others shared by all examples."""
    start = zlib.crc32(case.__name__.encode())
    for n in range(calls):
        draw = Draw([start, calls, n], device, most=20)
        if device.type == "cuda" and draw.dtype == torch.float64:
            draw.dtype = torch.float32
        try:
            check(case, draw)
        except Exception as error:
            raise AssertionError(f"Draw([{start}, {calls}, {n}]), {draw.dtype}: {error}") from error


def attend(x, **options):
    return ff.scaled_dot_product_attention(x, x, x, **options)


def test_examples_are_one_launch(work):
    """Where nothing is summed over them: rows, and sequences with their masks and lengths."""
    x, w = torch.randn(3, 2, 1, 5, 8), torch.randn(8)
    mask, lengths = torch.rand(3, 5, 5) < 0.7, torch.randint(1, 6, (3, 2))

    def masked(x, m, n):
        return attend(x, attn_mask=m, key_lengths=n)

    def norm(x, w):
        return ff.layer_norm(x, 8, w)

    with use_backend("triton"):
        assert work(lambda: vmap(masked)(x, mask, lengths)).launches == 1
        assert work(lambda: vmap(norm, (0, None))(x, w)).launches == 1
        assert work(lambda: vmap(norm)(x, w.expand(3, 8))).launches == 3
        of_one = work(lambda: grad(lambda x: attend(x).sum())(x[0])).launches
        assert work(lambda: vmap(grad(lambda x: attend(x).sum()))(x)).launches == of_one


@pytest.mark.all_cases
@pytest.mark.parametrize("name", ["attn_mask", "bias", "key_lengths", "alibi_slopes", "sinks"])
@pytest.mark.parametrize("mapped", [False, True])
def test_options_of_attention(backend, device, name, mapped):
    """Of one sequence and of two an example, mapped at the last dimension or shared by all."""
    for batch in (1, 2):
        shapes = {
            "attn_mask": [(5, 5), (batch, 1, 5, 5)],
            "bias": [(5, 5), (batch, 1, 5, 5)],
            "key_lengths": [(batch,)],
            "alibi_slopes": [(2,), (batch, 2)],
            "sinks": [(2,)],
        }
        x = torch.randn(2, batch, 2, 5, 8, device=device)
        for shape in shapes[name]:
            option = torch.rand(*shape, *[2] * mapped, device=device)
            if name == "key_lengths":
                option = (option * 5).long()
            elif name == "attn_mask":
                option = option < 0.8

            def loss(x, option):
                dropout = dict(dropout_p=0.5, dropout_seed=1) if name == "key_lengths" else {}
                out = attend(x, **{name: option}).sin() + attend(x, **{name: option}, **dropout)
                return out.sum()

            have = vmap(grad(loss), (0, -1 if mapped else None))(x, option)
            each = option.movedim(-1, 0) if mapped else [option] * 2
            want = torch.stack([grad(loss)(y, one) for y, one in zip(x, each)])
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5, msg=str(shape))


@pytest.mark.parametrize("op", ["attention", "feed_forward"])
def test_dropout(backend, device, op):
    """As torch's own: an error, a mask for each example, or one for all. A seed is that of each."""
    x, w = torch.randn(1, 2, 2, 17, 16, device=device), torch.eye(16, device=device)

    def call(x, seed=None):
        options = dict(dropout_p=0.5, dropout_seed=seed)
        if op == "attention":
            return attend(x, **options)
        return ff.feed_forward(x.flatten(0, 2), w, None, w, None, **options)

    x = x.expand(3, -1, -1, -1, -1)
    with pytest.raises(RuntimeError, match="randomness error mode"):
        vmap(call)(x)
    with pytest.raises(RuntimeError, match="randomness error mode"):
        vmap(nn.functional.dropout)(x)
    for randomness, equal in (("same", True), ("different", False)):
        first, *others = vmap(call, randomness=randomness)(x)
        assert [torch.equal(y, first) for y in others] == [equal] * 2
    seeds = torch.tensor([4, 5, 4], device=device)
    for have, seed in zip(vmap(call)(x, seeds), seeds):
        torch.testing.assert_close(have, call(x[0], seed))
    torch.testing.assert_close(vmap(call, (None, 0))(x[0], seeds), vmap(call)(x, seeds))
    torch.testing.assert_close(vmap(lambda x: call(x, 7))(x)[2], call(x[0], 7))
    gradient = grad(lambda x, seed: call(x, seed).sin().sum())
    for have, seed in zip(vmap(gradient)(x, seeds), seeds):
        torch.testing.assert_close(have, gradient(x[0], seed))


def test_nested_and_in_chunks(backend, device):
    x, w = torch.randn(3, 4, 5, 8, device=device), torch.randn(4, 8, device=device)

    def norm(x, w):
        return ff.layer_norm(x, 8, w)

    want = torch.stack([torch.stack([norm(y, v) for y, v in zip(rows, w)]) for rows in x])
    nested = vmap(vmap(norm, (1, 0), 1), (0, None), -1)
    torch.testing.assert_close(nested(x.movedim(1, 2), w), want.movedim(1, 2).movedim(0, -1))
    torch.testing.assert_close(vmap(vmap(norm), (0, None), chunk_size=2)(x, w), want)

    def loss(w, x):
        return norm(x, w).sin().sum()

    have = vmap(vmap(grad(loss)), (None, 0), chunk_size=2)(w, x)
    want = torch.stack([torch.stack([grad(loss)(v, y) for y, v in zip(rows, w)]) for rows in x])
    torch.testing.assert_close(have, want)


@pytest.mark.all_cases
@pytest.mark.parametrize("n", [0, 1])
def test_no_example_and_one(backend, device, n):
    x, w = torch.randn(n, 2, 2, 5, 8, device=device), torch.randn(8, device=device)

    def loss(w, x):
        x = ff.layer_norm(x, 8, w)
        return attend(x, dropout_p=0.5, dropout_seed=1).sin().sum() + attend(x).cos().sum()

    assert vmap(attend)(x).shape == x.shape
    rows, labels = x[:, 0, 0], x.new_zeros(n, 5).long()
    for weight in (None, w.exp()):
        have = vmap(lambda x, y: ff.cross_entropy(x, y, "none", weight=weight))(rows, labels)  # noqa: B023
        torch.testing.assert_close(have, ff.cross_entropy(rows, labels, "none", weight=weight))
    assert vmap(lambda w: ff.layer_norm(x, 8, w))(w.expand(n, 8)).shape == (n, *x.shape)
    want = torch.stack([grad(loss)(w, y) for y in x]) if n else x.new_empty(0, 8)
    torch.testing.assert_close(vmap(grad(loss), (None, 0))(w, x), want)
    summed = grad(lambda w: vmap(loss, (None, 0))(w, x).sum())(w)
    torch.testing.assert_close(summed, want.sum(0))


@pytest.mark.all_cases
def test_where_torch_has_no_right_rule(backend, device):
    """The gradient of a padding of mapped weights, and smoothed labels beside shared logits."""
    tokens, weights = (
        torch.tensor([[0, 1, 2]] * 2, device=device),
        torch.randn(2, 3, 8, device=device),
    )

    def padded(weight, tokens):
        return ff.embed(tokens, weight, None, padding_idx=0).sin().sum()

    have = grad(lambda weights: vmap(padded)(weights, tokens).sum())(weights)
    want = torch.stack([grad(padded)(w, row) for w, row in zip(weights, tokens)])
    torch.testing.assert_close(have, want)
    assert not have[:, 0].any() and have[:, 1:].all()
    logits, labels = torch.randn(3, 8, device=device), tokens

    def smoothed(labels):
        return ff.cross_entropy(logits, labels, label_smoothing=0.1)

    torch.testing.assert_close(vmap(smoothed)(labels), torch.stack([*map(smoothed, labels)]))


CALLS_OF_X = {
    "attention": lambda x: attend(x.view(1, 1, 3, 4), is_causal=True),
    "layer_norm": lambda x: ff.layer_norm(x, 4, x[0]),
    "linear_cross_entropy": lambda x: ff.linear_cross_entropy(
        x, x.sin(), torch.tensor([0, 2, 1], device=x.device)
    ),
    "swiglu": lambda x: ff.swiglu(x, torch.cat([x, x[:1]]), None, x[:, :2], None),
}


@pytest.mark.parametrize("name", CALLS_OF_X)
def test_jacobians_and_hessians(backend, device, name):
    x = torch.randn(3, 4, dtype=torch.float64)

    def loss(x):
        return CALLS_OF_X[name](x).sin().sum()

    with use_backend("reference"):
        jacobian = torch.autograd.functional.jacobian(CALLS_OF_X[name], x)
        second = torch.autograd.functional.hessian(loss, x)
    x, bounds = x.to(device, widest(device)), dict(rtol=1e-4, atol=1e-5)
    for transform in (jacrev, jacfwd, lambda f: jacrev(f, chunk_size=2)):
        have = transform(CALLS_OF_X[name])(x)
        torch.testing.assert_close(have.cpu().double(), jacobian, **bounds)
    for transform in (hessian, lambda f: jacrev(jacrev(f)), lambda f: jacrev(jacfwd(f))):
        torch.testing.assert_close(transform(loss)(x).cpu().double(), second, **bounds)
    pair = torch.stack([x, x.cos()])
    want = torch.stack([hessian(loss)(y) for y in pair])
    torch.testing.assert_close(vmap(hessian(loss))(pair), want, **bounds)


@pytest.mark.all_cases
def test_tangents(backend, device):
    """Of dual numbers and of jvp, outside of vmap and within it."""
    x, t = torch.randn(2, 3, 8, device=device)

    def norm(x):
        return ff.layer_norm(x, 8)

    want = jvp(norm, (x,), (t,))[1]
    with forward_ad.dual_level():
        mapped = vmap(norm)(forward_ad.make_dual(x, t))
        torch.testing.assert_close(forward_ad.unpack_dual(mapped).tangent, want)
    torch.testing.assert_close(jvp(vmap(norm), (x,), (t,))[1], want)
    torch.testing.assert_close(vmap(lambda x, t: jvp(norm, (x,), (t,))[1])(x, t), want)


@pytest.mark.all_cases
def test_no_grad_within_a_transform(backend, device):
    """What is computed there is a constant of all transforms, as of torch's own functions."""
    x, w = torch.randn(3, 4, 8, device=device), torch.randn(5, 8, device=device)
    labels = torch.tensor([0, 2, 1, 3], device=device)
    losses = lambda x, w: ff.linear_cross_entropy(x, w, labels), lambda x, w: (x @ w.t()).sum()

    for loss in losses:

        @torch.no_grad()
        def constant(x, w):
            return loss(x, w)  # noqa: B023

        mapped = grad(lambda w: (vmap(constant, (0, None))(x, w) * w.sum()).sum())(w)
        torch.testing.assert_close(mapped, sum(map(constant, x, [w] * 3)).expand_as(w))
        nested = grad(lambda w: grad(lambda y: y * constant(x[0], w))(w.sum()))(w)
        assert not nested.any()


@pytest.mark.all_cases
@pytest.mark.filterwarnings("error:There is a performance drop.*fastformer")
def test_several_backwards_at_once(backend, device):
    """Of one forward outside of vmap: by is_grads_batched, and by vmap. Its loss has made a
    gradient ahead, or its reference computes chunk by chunk.
    """
    x = torch.randn(3, 8, device=device, requires_grad=True)
    labels = torch.tensor([0, 2, 1], device=device)
    block = ff.block_mask(torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]], device=device) > 0)
    calls = (
        lambda: ff.cross_entropy(x, labels),
        lambda: ff.linear_cross_entropy(x, x.detach(), labels, return_entropy=True)[1],
        lambda: ff.linear_kl_div(x, x.detach(), x.detach().sin(), x.detach().cos()),
        lambda: attend(x.view(1, 1, 3, 8), attn_mask=block),
    )
    for call in calls:
        out = call()
        many = torch.randn(2, *out.shape, device=device)
        want = torch.stack([torch.autograd.grad(call(), x, one)[0] for one in many])
        [have] = torch.autograd.grad(out, x, many, is_grads_batched=True)
        torch.testing.assert_close(have, want)
        out = call()
        have = vmap(lambda one: torch.autograd.grad(out, x, one, retain_graph=True)[0])(many)  # noqa: B023
        torch.testing.assert_close(have, want)


def widest(device):
    """The widest dtype that the kernels compute in."""
    return torch.float32 if device.type == "cuda" else torch.float64


def models():
    options = dict(N=1, d_model=16, d_ff=32, h=4, dropout=0.0)
    more = dict(activation="swiglu", norm="rms", kv_heads=2, positions="rotary")
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return {
        "make_decoder": ff.make_decoder(11, **options),
        "make_decoder of Llama's kind": ff.make_decoder(11, **options, **more),
        "make_model": ff.make_model(11, 11, **options),
        "nn.TransformerEncoder": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
    }


def loss_of(name, device):
    """A function of (model, tokens) for one example [S]."""
    target = torch.tensor([[1, 4, 2, 3]], device=device)

    def loss(model, tokens):
        if name == "nn.TransformerEncoder":
            angles = torch.arange(16, device=device) * tokens[:, None]
            return model(angles[None].to(widest(device)).sin()).sin().sum()
        x = tokens[None]
        if name == "make_model":
            out = model(x, x, None, ff.subsequent_mask(x.shape[-1]).to(device))
        else:
            out = model(x)
        return ff.cross_entropy(out[..., :11], target, label_smoothing=0.1) + out.sin().mean()

    return loss


@pytest.mark.parametrize("name", list(models()))
def test_gradients_of_each_example(backend, device, name):
    model, loss = models()[name].to(device, widest(device)), loss_of(name, device)
    tokens = torch.randint(1, 11, (3, 4), device=device)
    if name.startswith("nn."):
        ff.accelerate(model)
    parameters = {k: x.detach() for k, x in model.named_parameters()}

    def of(parameters, tokens):
        return loss(lambda *x: functional_call(model, parameters, x), tokens)

    found = vmap(grad(of), (None, 0))(parameters, tokens)
    for i, row in enumerate(tokens):
        model.zero_grad()
        loss(model, row).backward()
        for k, x in model.named_parameters():
            want = torch.zeros_like(x) if x.grad is None else x.grad
            bounds = dict(rtol=1e-6, atol=1e-8) if want.dtype == torch.float64 else {}
            torch.testing.assert_close(found[k][i], want, **bounds, msg=k)


@pytest.mark.parametrize("name", ["make_decoder", "make_decoder of Llama's kind"])
def test_an_ensemble_learns_as_its_models(backend, device, name):
    """Three models, whose parameters stack_module_state stacks."""
    alone = [models()[name].to(device, widest(device)) for _ in range(3)]
    loss = loss_of(name, device)
    stacked, buffers = stack_module_state([copy.deepcopy(model) for model in alone])
    separate = [torch.optim.SGD(model.parameters(), 0.1) for model in alone]
    together = torch.optim.SGD(stacked.values(), 0.1)

    def of(parameters, buffers, tokens):
        return loss(lambda *x: functional_call(alone[0], (parameters, buffers), x), tokens)

    for tokens in torch.randint(1, 11, (3, 4), device=device):
        losses = vmap(of, (0, 0, None))(stacked, buffers, tokens)
        together.zero_grad()
        losses.sum().backward()
        together.step()
        for model, optimizer, want in zip(alone, separate, losses, strict=True):
            optimizer.zero_grad()
            have = loss(model, tokens)
            have.backward()
            optimizer.step()
            torch.testing.assert_close(have, want)
    for i, model in enumerate(alone):
        for k, x in model.named_parameters():
            torch.testing.assert_close(stacked[k][i], x, msg=k)


def test_what_cannot_be_mapped_is_refused(backend, device):
    """With a sentence: gradients that no op has, caches, decoding, block masks."""
    x, slopes = torch.randn(3, 2, 2, 5, 8, device=device), torch.rand(2, device=device)

    def sloped(slopes, x):
        return attend(x, alibi_slopes=slopes).sum()

    for call in (
        vmap(grad(sloped), (None, 0)),
        grad(lambda slopes, x: vmap(sloped)(slopes.expand(3, 2), x).sum()),
    ):
        with pytest.raises(RuntimeError, match="alibi_slopes requires a gradient"):
            call(slopes, x)

    def append(x):
        ff.KVCache(2, 2, 5, 8, device=device).append(x, x)

    with pytest.raises(RuntimeError, match="vmap cannot map the entries of a cache"):
        vmap(append)(x)
    model = ff.make_decoder(11, N=1, d_model=16, d_ff=32, h=2).eval().to(device)
    with pytest.raises(RuntimeError, match="vmap cannot map decoding"):
        vmap(lambda x: ff.greedy_decode(model, x, None, max_len=7))(x.new_ones(3, 1, 4).long())
    block = ff.block_mask(torch.rand(3, 1, 5, 5, device=device) < 0.7)
    block.bits = block.bits[:3]  # as many slots as sequences, which vmap takes for examples
    with pytest.raises(ValueError, match=r"BlockMask that torch\.vmap maps"):
        vmap(lambda x, mask: attend(x, attn_mask=mask))(x, block)


@pytest.mark.all_cases
def test_compiled(backend, device):
    """torch.compile traces transforms of torch.func with the reference, if it may; with the backend
    triton, it leaves the call to Python, or with fullgraph=True raises an error.
    """
    x, w = torch.randn(3, 2, 8, device=device), torch.randn(8, device=device)

    def loss(w, x):
        return ff.layer_norm(x, 8, w).sin().sum()

    def compiled(function, **options):
        torch._dynamo.reset()
        return torch.compile(function, backend="aot_eager", **options)(w, x)

    for _ in range(3):
        loss(w, x)  # its plan, which the compiled calls ask, too
    functions = (
        grad(lambda w, x: vmap(loss, (None, 0))(w, x).sum()),
        vmap(grad(loss), (None, 0)),
        grad(loss),
    )
    for function in functions:
        want = function(w, x)
        torch.testing.assert_close(compiled(function), want)
        with backends.observe(on_unsupported=lambda op, reason: None):
            torch.testing.assert_close(compiled(function, fullgraph=True), want)
        if backend == "triton":
            with pytest.raises(torch._dynamo.exc.Unsupported):
                compiled(function, fullgraph=True)
