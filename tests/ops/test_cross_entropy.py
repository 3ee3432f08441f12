"""Both losses on both backends, against the formula in float64, torch's and the tutorials' loss."""

import contextlib
import functools
import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fastformer as ff
from fastformer import use_backend
from fastformer.dispatch import backends
from fastformer.ops import functional
from fastformer.ops.loss import reference

LOW = [torch.float16, torch.bfloat16]
REDUCTIONS = "mean", "sum", "none"


@pytest.fixture
def kernels():
    return pytest.importorskip("fastformer.kernels.cross_entropy.launchers")


def targets(*shape, classes, device="cpu", ignored=(), every=5):
    """Random classes; each `every`-th is an ignored one."""
    target = torch.randint(0, classes, shape, device=device)
    for i, index in enumerate(ignored):
        target.view(-1)[i::every] = index
    return target


def logits(*shape, dtype=torch.float32, device="cpu"):
    return {"logits": (torch.randn(shape, device=device) * 4).to(dtype)}


def linear(m, n, v, dtype=torch.float32, device="cpu", bias=True):
    return {
        "input": torch.randn(m, n, device=device).to(dtype),
        "linear_weight": (torch.randn(v, n, device=device) / n**0.5 * 3).to(dtype),
        "linear_bias": torch.randn(v, device=device).to(dtype) if bias else None,
    }


KL = {"smoothing": "kl", "ignore_index": 3, "label_smoothing": 0.2}
CASES = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignored": {"ignore_index": -1},
    "a class ignored": {"ignore_index": 2, "reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "smoothed, ignored": {"label_smoothing": 0.3, "ignore_index": 2, "reduction": "sum"},
    "all smoothing": {"label_smoothing": 1.0},
    "kl": {"smoothing": "kl", "ignore_index": 0, "label_smoothing": 0.1, "reduction": "sum"},
    "kl of the last class": {"smoothing": "kl", "ignore_index": 36, "label_smoothing": 0.4},
    "kl, none": KL | {"reduction": "none"},
    "kl without smoothing": {"smoothing": "kl", "ignore_index": 3},
    "kl without a padding class": {"smoothing": "kl", "ignore_index": -7, "label_smoothing": 0.2},
    "weights": {"weight": torch.linspace(0.2, 3, 37), "ignore_index": -1},
    "weights, smoothed, z-loss": {
        "weight": torch.linspace(3, 0.2, 37), "label_smoothing": 0.2, "z_loss": 0.1,
        "ignore_index": 2,
    },
    "weights, kl, sum": {
        **KL, "weight": torch.linspace(0.2, 3, 37), "reduction": "sum", "z_loss": 0.01,
    },
    "softcap, temperature": {"softcap": 5.0, "temperature": 0.7, "label_smoothing": 0.1},
    "entropy": {"return_entropy": True, "ignore_index": -1},
    "every option, none": {
        **KL, "weight": torch.linspace(0.2, 3, 37), "reduction": "none", "z_loss": 0.1,
        "softcap": 5.0, "temperature": 1.5, "return_entropy": True,
    },
}  # fmt: skip


def joined(op):
    """The op with one output: the losses, then the entropies."""

    def run(*, weight=None, **given):
        x = next(iter(given.values()))
        weight = None if weight is None else weight.to(x.device)
        found = op(weight=weight, **given)
        if not given.get("return_entropy"):
            return found
        return torch.cat([y.flatten() for y in found])

    return run


def target_of(case, *shape, classes, device):
    index = CASES[case].get("ignore_index")
    ignored = () if index is None else (index,)
    return targets(*shape, classes=classes, device=device, ignored=ignored)


@pytest.mark.sample
@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("case", list(CASES))
def test_against_the_oracle(backend, device, against_oracle, case, dtype):
    """Of logits, and of a linear layer."""
    target = target_of(case, 23, classes=37, device=device)
    x = logits(23, 37, dtype=dtype, device=device)
    against_oracle(joined(functional.cross_entropy), x, target=target, **CASES[case])
    x = linear(23, 24, 37, dtype=dtype, device=device)
    against_oracle(joined(functional.linear_cross_entropy), x, target=target, **CASES[case])


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "case",
    ["kl", "kl, none", "smoothed, ignored", "weights, smoothed, z-loss", "weights, kl, sum",
     "entropy", "every option, none"],
)  # fmt: skip
def test_chunks_and_blocks(device, against_oracle, monkeypatch, kernels, case):
    """Several blocks of classes, and chunks of four tokens: the last one has three, or one, or is
    the first.
    """
    monkeypatch.setattr(kernels, "CHUNK", 4)
    monkeypatch.setattr(kernels, "configuration", lambda *_: (16, 4))
    monkeypatch.setattr(kernels, "group_size", lambda *_: 4)
    op = joined(functional.linear_cross_entropy)
    for rows, bias in ((11, True), (5, True), (1, True), (11, False)):
        target = target_of(case, rows, classes=37, device=device)
        if rows == 1:  # the only row is not ignored
            target.fill_(4)
        x = linear(rows, 8, 37, device=device, bias=bias)
        with use_backend("triton"):
            against_oracle(op, x, target=target, **CASES[case])


def test_weight_gradients_are_summed_in_float32(backend, device, monkeypatch, kernels):
    """Over the chunks: with 16-bit logits and gradients, what is left is rounding their terms."""
    product, seen = kernels._wide_product, []

    def wide_product(a, b, dtype):
        have, want = product(a, b, dtype), a.double() @ b.double()
        assert have.dtype == torch.float32 and (have - want).norm() < 1e-5 * want.norm()
        seen.append(1)
        return have

    monkeypatch.setattr(kernels, "_wide_product", wide_product)
    x = linear(50, 24, 37, dtype=torch.bfloat16, device=device)
    leaves = [t.requires_grad_() for t in x.values()]
    target = targets(50, classes=37, device=device)
    torch.autograd.grad(ff.linear_cross_entropy(**x, target=target), leaves)
    assert len(seen) == (backend == "triton")


def check_against_torch(x, target, **options):
    """Losses and gradients are those of torch's cross_entropy, with each reduction, the gradient
    of an expanded tensor too.
    """
    x = x.detach().requires_grad_()
    for reduction in REDUCTIONS:
        results = []
        for op in (ff.cross_entropy, F.cross_entropy):
            loss = op(x, target, reduction=reduction, **options)
            cotangent = torch.linspace(1, 2, loss.numel(), device=x.device).view(loss.shape)
            grads = torch.autograd.grad(loss, x, cotangent, retain_graph=True)
            results.append([loss, *grads, *torch.autograd.grad(0.7 * loss.sum(), x)])
        message = functools.partial("with {}: {}".format, reduction)
        torch.testing.assert_close(*results, equal_nan=True, msg=message)


@pytest.mark.parametrize("m, v", [(1, 1), (3, 2), (2, 5000), (0, 7)])
def test_shapes(backend, device, m, v):
    x = logits(m, v, device=device)["logits"]
    check_against_torch(x, targets(m, classes=v, device=device))


def test_views_and_more_dimensions(backend, device, against_oracle):
    wide = torch.randn(2, 3, 40, device=device)
    pairs = targets(2, 3, 2, classes=20, device=device)
    strided, expanded = pairs[..., 1], pairs[:1, :1, 0].expand(2, 3)
    for view, target in (
        (wide[..., ::2], strided),
        (wide[..., :20], expanded),
        (wide.transpose(0, 1)[..., 3:23], strided.t()),
    ):
        options = {"target": target, "reduction": "none", "label_smoothing": 0.1}
        against_oracle(functional.cross_entropy, {"logits": view}, **options)
    x = linear(6, 8, 20, device=device)
    x["input"] = torch.randn(3, 2, 8, device=device).transpose(0, 1)
    for reduction, target in (("mean", strided), ("none", strided), ("mean", expanded)):
        against_oracle(functional.linear_cross_entropy, x, target=target, reduction=reduction)

    def summed(**given):
        """Its gradient is one number, which an expanded tensor repeats."""
        return functional.linear_cross_entropy(**given, reduction="none").sum()

    against_oracle(summed, x, target=strided)


@pytest.mark.all_cases
@pytest.mark.parametrize("shape", [(3, 7, 5), (2, 4, 3, 5), (2, 6, 6, 1), (0, 7, 5)], ids=str)
def test_classes_in_the_second_dimension(backend, device, shape):
    """As torch's op takes them, with its losses and gradients, which have the layout of the logits.
    The options of torch are ours, smoothing and weights too.
    """
    x = logits(*shape, device=device)["logits"]
    target = targets(shape[0], *shape[2:], classes=shape[1], ignored=(2,), device=device)
    weight = torch.rand(shape[1], device=device) + 0.2
    check_against_torch(x, target, ignore_index=2, label_smoothing=0.2, weight=weight)


def test_offsets_past_int32(backend, device, same_when_far):
    """Rows of logits so far apart that the last one stands past 2^31 elements."""
    x = logits(40, 37, dtype=torch.bfloat16, device=device)
    target = targets(40, classes=37, device=device)
    loss = functools.partial(functional.cross_entropy, target=target, reduction="none")
    same_when_far(loss, x, "logits")


@pytest.mark.parametrize("case", ["every option, none", "plain", "kl without a padding class"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_class_of_the_largest_logit(
    backend, device, against_oracle, monkeypatch, kernels, case, dtype
):
    """Of every row, an ignored one too, and the first of equal ones, in several chunks; beside the
    loss, the entropy and their gradients.
    """
    monkeypatch.setattr(kernels, "CHUNK", 8)
    monkeypatch.setattr(reference, "_HELD", 8 * 37)
    x = {n: t.round().to(dtype) for n, t in linear(21, 24, 37, device=device).items()}  # exact
    x["input"] = x["input"].view(3, 7, 24)
    want = F.linear(*(t.double() for t in x.values())).argmax(-1)

    def op(**given):
        *found, argmax = functional.linear_cross_entropy(**given, return_argmax=True)
        assert argmax.dtype == torch.int64 and torch.equal(argmax, want)
        return torch.cat([y.flatten() for y in found])

    options = {n: y.to(device) if n == "weight" else y for n, y in CASES[case].items()}
    target = target_of(case, 3, 7, classes=37, device=device)
    against_oracle(op, x, target=target, **options)
    x["input"], want = x["input"][:, :0], want[:, :0]
    op(**x, target=target[:, :0])


def test_derivatives_beside_the_largest_logit(backend, device):
    """The second ones are those of the loss alone; in a graph, too, the class has none."""
    x = linear(5, 8, 7, device=device)
    leaves, target = [t.requires_grad_() for t in x.values()], targets(5, classes=7, device=device)

    def call(x, **options):
        return ff.linear_cross_entropy(**x, target=target, return_entropy=True, **options)

    graph = torch.compile(call, fullgraph=True, backend="aot_eager")
    classes, found = F.linear(*leaves).argmax(-1), []
    for op, return_argmax in ((call, False), (call, True), (graph, True)):
        loss, entropy, *argmax = op(x, return_argmax=return_argmax)
        assert all(torch.equal(y, classes) and not y.requires_grad for y in argmax)
        total = loss + entropy.square().sum()
        grads = torch.autograd.grad(total, leaves, create_graph=op is call)
        if op is call:
            grads += torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)
        found.append(grads)
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0][:3], found[2])


def test_a_target_past_the_classes(device, kernels):
    """It is not checked on a GPU, and never reads out of bounds."""
    x = torch.full((3, 7), float("nan"), device=device)[1:2].normal_()
    for bad in (-1, 7):
        target = torch.tensor([bad], device=device)
        options = target, "none", -100, 0.0, "uniform", None, 0.0, None, 1.0, False
        assert kernels.forward(x, *options, False)[0].isfinite().all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of -inf less -inf
def test_the_statistics_of_a_row(device, kernels):
    """A finite shift and what remains of the log-sum-exp: -inf, not NaN, of a row of -inf alone."""
    x = torch.randn(4, 7, device=device) * 5
    x[1, :3] = x[2] = -torch.inf
    x[3] += 100.0
    target = torch.zeros(4, dtype=torch.int64, device=device)
    options = target, "none", -100, 0.0, "uniform", None, 0.0, None, 1.0, False
    statistics = kernels.forward(x, *options, False)[2]
    assert statistics[:, 0].isfinite().all()
    torch.testing.assert_close(statistics.sum(1), x.logsumexp(1))


def by_classes(logits, target, reduction, ignore_index, e, smoothing, weight, z_loss):
    """The docstring of cross_entropy in float64, with the targets q as a table of all classes."""
    x, v = logits.double(), logits.shape[1]
    pad = ignore_index if ignore_index is not None and 0 <= ignore_index < v else None
    kept = torch.ones_like(target).bool() if ignore_index is None else target != ignore_index
    true = target.where(kept, 0)
    q = F.one_hot(true, v).double()
    if smoothing == "uniform":
        q = (1 - e) * q + e / v
    else:
        q = torch.where(q > 0, 1 - e, e / (v - 1 - (pad is not None)))
        if pad is not None:
            q[:, pad] = 0.0
    w = x.new_ones(v) if weight is None else weight
    terms = -q * x.log_softmax(-1) + (torch.special.xlogy(q, q) if smoothing == "kl" else 0.0)
    rows = (w.double() * terms).sum(1) * kept
    squares = z_loss * x.logsumexp(1) ** 2 * kept
    if reduction == "mean":
        return rows.sum() / (w[true].double() * kept).sum() + squares.sum() / kept.sum()
    return rows + squares if reduction == "none" else (rows + squares).sum()


WEIGHTED = [
    (None, 0.0, "kl", 0.0), (-100, 0.3, "kl", 0.0), (None, 0.95, "kl", 0.5), (2, 0.2, "kl", 0.5),
    (None, 0.0, "uniform", 0.5), (-100, 0.3, "uniform", 0.0), (2, 1.0, "uniform", 0.5),
]  # fmt: skip


@pytest.mark.sample
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignore_index, e, smoothing, z_loss", WEIGHTED)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_class_weights_z_loss_and_no_padding(
    backend, device, reduction, ignore_index, e, smoothing, z_loss, weighted
):
    """Of logits and of a linear layer, with their gradients."""
    x, bias = (torch.randn(n, device=device).requires_grad_() for n in ((9, 6), 6))
    weight = torch.rand(6, device=device) + 0.2 if weighted else None
    ignored = () if ignore_index is None else (ignore_index,)
    target = targets(9, classes=6, ignored=ignored, device=device)
    options = reduction, ignore_index, e, smoothing, weight, z_loss
    want = by_classes(x + bias, target, *options)
    names = "reduction", "ignore_index", "label_smoothing", "smoothing", "weight", "z_loss"
    named = dict(zip(names, options))
    wide = {"linear_weight": torch.eye(6, device=device), "linear_bias": bias}
    cotangent = torch.randn(want.shape, dtype=torch.float64, device=device)
    grads = torch.autograd.grad(want, (x, bias), cotangent)
    for have in (
        ff.cross_entropy(x + bias, target, **named),
        ff.linear_cross_entropy(x, target=target, **wide, **named),
    ):
        torch.testing.assert_close(have.double(), want, atol=1e-5, rtol=1e-5)
        for a, b in zip(torch.autograd.grad(have, (x, bias), cotangent.float()), grads):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
def test_weights_and_z_loss_hold_the_logits_of_a_few_rows(
    against_oracle, monkeypatch, reduction, dtype
):
    """The result is that of all logits at once, which the oracle computes, with all gradients."""
    monkeypatch.setattr(reference, "_HELD", 8 * 37)
    x = linear(21, 16, 37, dtype=dtype)
    x["input"] = x["input"].view(3, 7, 16)
    options = dict(target=targets(3, 7, classes=37), weight=torch.rand(37), z_loss=1e-2)
    options |= dict(reduction=reduction, label_smoothing=0.1)
    product, held = F.linear, []
    with use_backend("reference"):
        against_oracle(functional.linear_cross_entropy, x, **options)
        monkeypatch.setattr(F, "linear", lambda x, *w: held.append(len(x)) or product(x, *w))
        leaves = {n: t.requires_grad_() for n, t in x.items()}
        loss = functional.linear_cross_entropy(**leaves, **options)
        torch.autograd.grad(loss.sum(), [*leaves.values()])
    assert held == [8, 8, 5] * 2


def test_gradients_of_a_mean_over_many_rows_do_not_underflow_in_float16():
    x, w = (torch.randn(n, 8).half().requires_grad_() for n in (4096, 64))
    target, z = torch.randint(0, 64, (4096,)), 1e-4
    loss = ff.linear_cross_entropy(x, w, target, z_loss=z)
    [have] = torch.autograd.grad(loss * 2**-10, w)
    x, w = (t.detach().double().requires_grad_() for t in (x, w))
    want = by_classes(x @ w.t(), target, "mean", -100, 0.0, "uniform", None, z)
    [want] = torch.autograd.grad(want, w)
    assert (have.double() * 2**10 - want).norm() < 0.02 * want.norm()


@pytest.mark.all_cases
@pytest.mark.parametrize("e", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [(), (1, 3), (0, 1, 2, 3)], ids=["none", "some", "all"])
def test_a_mean_whose_weights_add_up_to_zero_is_that_of_torch(backend, device, ignored, e):
    """nan, though smoothing adds the other classes; so are the gradients of rows that count."""
    target, kept = torch.tensor([0, 1, 0, 1], device=device), torch.ones(4, dtype=torch.bool)
    target[[*ignored]], kept[[*ignored]] = -100, False
    weight = torch.tensor([0.0, 0.0, 1.0, 2.0, 0.5, 1.0], device=device)
    x = torch.randn(4, 6, device=device).requires_grad_()
    eye = torch.eye(6, device=device).requires_grad_()
    for reduction, w in itertools.product(("mean", "sum"), (weight, None)):
        wide = x.detach().double().requires_grad_()
        given = dict(reduction=reduction, label_smoothing=e)
        want = F.cross_entropy(wide, target, None if w is None else w.double(), **given)
        [grad] = torch.autograd.grad(want, wide)
        exact = dict(equal_nan=True, atol=1e-6, rtol=1e-5)
        have = ff.cross_entropy(x, target, weight=w, **given)
        torch.testing.assert_close(have, want.float(), **exact)
        torch.testing.assert_close(*torch.autograd.grad(have, x), grad.float(), **exact)
        have = ff.linear_cross_entropy(x, eye, target, weight=w, **given)
        torch.testing.assert_close(have, want.float(), **exact)
        of_x, of_weight = torch.autograd.grad(have, (x, eye))
        torch.testing.assert_close(of_x[kept], grad[kept].float(), **exact)
        want = (grad.t()[:, kept] @ wide[kept]).detach().float()
        torch.testing.assert_close(of_weight, want, **exact)
    half = x.detach().half().requires_grad_()
    for more in (dict(smoothing="kl"), dict(z_loss=0.1), dict(return_entropy=True)):
        more |= dict(label_smoothing=e, weight=weight)
        for leaf, have in (
            (x, ff.cross_entropy(x, target, **more)),
            (x, ff.linear_cross_entropy(x, eye, target, **more)),
            (half, ff.linear_cross_entropy(half, eye.half(), target, **more)),
        ):
            loss = have[0] if isinstance(have, tuple) else have
            [of_x] = torch.autograd.grad(loss, leaf)
            assert loss.isnan() and of_x[kept].isnan().all()
            assert len(ignored) < 4 or not of_x.any()


@pytest.mark.parametrize("reduction, factor", [("mean", 1 / 7), ("sum", 1.0)])
def test_the_z_loss_is_that_of_the_rows(backend, device, reduction, factor):
    """Not of the weights of their classes, in a mean too; of logits and of a linear layer."""
    x, weight = torch.randn(9, 6, device=device), torch.rand(6, device=device) + 0.2
    x.requires_grad_()
    target = targets(9, classes=6, ignored=(-100,), device=device)
    kept = target != -100
    want = 0.3 * x.double().logsumexp(-1).square()[kept].sum() * factor
    [grad] = torch.autograd.grad(want, x)
    given = dict(target=target, reduction=reduction, weight=weight)
    for call in (
        functools.partial(ff.cross_entropy, x, **given),
        functools.partial(ff.linear_cross_entropy, x, torch.eye(6, device=device), **given),
    ):
        have = call(z_loss=0.3) - call()
        torch.testing.assert_close(have.double(), want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(*torch.autograd.grad(have, x), grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_kl_is_the_loss_of_the_tutorials(backend, device, smoothing):
    """Through Generator and LabelSmoothing, and from the parameters at once: one loss. A hook of
    the generator is called.
    """
    generator = ff.Generator(24, 11).to(device)
    criterion = ff.LabelSmoothing(11, 0, smoothing)
    x = torch.randn(2, 7, 24, device=device, requires_grad=True)
    y = targets(2, 7, classes=11, device=device, ignored=(0,))
    want = criterion(generator(x).view(14, 11), y.view(14))
    have = ff.SimpleLossCompute(generator, criterion)(x, y, 1)
    torch.testing.assert_close(have, want)
    torch.testing.assert_close(ff.SimpleLossCompute(generator, criterion)(x, y.view(14), 1), want)
    leaves = [x, *generator.parameters()]
    for a, b in zip(*(torch.autograd.grad(loss, leaves) for loss in (have, want))):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert criterion.true_dist.shape == (14, 11)
    called = []
    generator.register_forward_hook(lambda *_: called.append(1))
    torch.testing.assert_close(ff.SimpleLossCompute(generator, criterion)(x, y, 1), want)
    assert called == [1]


@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("m, n", [(4, 8), (0, 8), (4, 0), (0, 0)])
def test_every_target_ignored(backend, device, m, n, reduction, dtype):
    """nan for the mean, as in torch; gradients of zero. Without tokens or features, too, loss and
    gradients are those of torch's linear and cross_entropy.
    """
    x = linear(m, n, 5, dtype, device)
    leaves = [t.requires_grad_() for t in x.values()]
    target = targets(m, classes=5, device=device)
    if n:
        target.fill_(-100)
    want = F.cross_entropy(F.linear(*leaves), target, reduction=reduction)
    have = ff.linear_cross_entropy(**x, target=target, reduction=reduction)
    assert have.dtype == torch.float32
    torch.testing.assert_close(have.to(dtype), want, equal_nan=True)
    close = {"atol": 1e-2, "rtol": 1e-2} if dtype in LOW else {}
    for a, b in zip(*(torch.autograd.grad(loss.sum(), leaves) for loss in (have, want))):
        torch.testing.assert_close(a, b, **close)
        assert not n or (a == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, *LOW, torch.float64], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_dtype_is_torchs(backend, device, reduction, dtype):
    """That of the logits; float32 under autocast."""
    if device.type == "cuda" and dtype == torch.float64 and backend == "triton":
        pytest.skip("float64 kernels run in the interpreter only")
    x = logits(4, 7, dtype=dtype, device=device)["logits"].requires_grad_()
    target = targets(4, classes=7, device=device)
    for enabled in (False, True):
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
            have = ff.cross_entropy(x, target, reduction)
            want = F.cross_entropy(x, target, reduction=reduction)
        assert have.dtype == want.dtype
        assert torch.autograd.grad(have.sum(), x)[0].dtype == dtype
    assert ff.cross_entropy(x[:0], target[:0], reduction).dtype == dtype


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e5])
@pytest.mark.parametrize("smoothing", ["uniform", "kl"])
@pytest.mark.parametrize("as_linear", [False, True])
def test_an_offset_of_all_logits(backend, device, as_linear, smoothing, offset):
    """It costs a smoothed loss no digit but those that the logits themselves lose."""
    x = (torch.randn(8, 300, device=device) * 2 + offset).requires_grad_()
    target = targets(8, classes=299, device=device)
    options = {"ignore_index": 299, "label_smoothing": 0.1, "smoothing": smoothing}

    def loss(x):
        if not as_linear:
            return ff.cross_entropy(x, target, "none", **options)
        eye = torch.eye(8, dtype=x.dtype, device=device)
        return ff.linear_cross_entropy(eye, x.t(), target, reduction="none", **options)

    have = loss(x)
    with use_backend("reference"):
        want = loss(x.detach().double())
    assert (have.double() - want).abs().max() < 5e-7 * want.abs().max()


def test_a_small_loss(backend, device):
    """Of large logits: the difference of lse and the target's would leave half the digits."""
    x = torch.randn(64, 50, device=device) * 0.1 + 8
    target = targets(64, classes=50, device=device)
    x[torch.arange(64), target] += torch.linspace(6, 11, 64, device=device)
    want = F.cross_entropy(x.double(), target, reduction="none")
    assert want.min() < 1e-3 < want[32] < 2e-2
    error = (ff.cross_entropy(x, target, "none").double() - want).abs()
    assert (error < 2 * torch.finfo(torch.float32).eps + 1e-6 * want).all()


def test_a_strided_gradient_past_int32(backend, device, tmp_path):
    """Of which the last element stands past 2^31 elements; the rest is a hole in a file."""
    x = logits(5, 7, device=device)["logits"].requires_grad_()
    loss = functional.cross_entropy(x, targets(5, classes=7, device=device), "none")
    gradient = torch.randn(5, device=device)
    size, step = 2**31 + 1, 2**29
    if device.type == "cpu":
        far = torch.from_file(str(tmp_path / "far"), shared=True, size=size)
    else:
        far = torch.empty(size, device=device)
    far = far.as_strided((5,), (step,)).copy_(gradient)
    have, want = (torch.autograd.grad(loss, x, g, retain_graph=True)[0] for g in (far, gradient))
    assert torch.equal(have, want)


def test_a_mean_in_float16_does_not_underflow(backend, device):
    """A row's share of the mean times a probability is no float16; the loss scale saves it."""
    x = linear(600, 4, 3000, dtype=torch.float16, device=device, bias=False)
    x = {n: t * 0.1 for n, t in x.items() if t is not None}
    target, scale = targets(600, classes=1500, device=device), 65536.0
    errors = []
    for dtype, kind in ((torch.float16, backend), (torch.float64, "reference")):
        leaves = {n: t.to(dtype).requires_grad_() for n, t in x.items()}
        with use_backend(kind):
            loss = ff.linear_cross_entropy(**leaves, target=target) * scale
        grads = torch.autograd.grad(loss, list(leaves.values()))
        errors.append([g.double() for g in (grads[0], grads[1][1500:])])
    for have, want in zip(*errors):
        assert (have - want).norm() < 2e-3 * want.norm()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_kl_of_a_padding_column_at_minus_infinity(backend, device, smoothing):
    x = torch.randn(3, 6, device=device)
    x[:, 0] = float("-inf")
    target = torch.tensor([1, 0, 5], device=device)
    options = {"smoothing": "kl", "ignore_index": 0, "label_smoothing": smoothing}
    loss = ff.cross_entropy(x, target, "sum", **options)
    x[:, 0] = -200.0
    torch.testing.assert_close(loss, ff.cross_entropy(x, target, "sum", **options))


def test_large_and_hidden_logits(backend, device):
    """Large ones do not overflow; a class at -inf has no probability."""
    x = torch.tensor([[1e4, 0.0, -1e4], [-1e4, -1e4, float("-inf")]], device=device)
    check_against_torch(x, torch.tensor([1, 0], device=device))


def test_groups_of_hidden_logits(device, monkeypatch, kernels):
    """Whole blocks and groups at -inf, before and behind others."""
    monkeypatch.setattr(kernels, "configuration", lambda *_: (16, 4))
    monkeypatch.setattr(kernels, "group_size", lambda *_: 4)
    x, target = torch.randn(5, 40, device=device), torch.tensor([16, 17, 25, 26, 39], device=device)
    x[:, :16] = x[:, 20:24] = x[:, 28:36] = float("-inf")
    with use_backend("triton"):
        check_against_torch(x, target)


@pytest.mark.parametrize(
    "op, products", [("mean", 7), ("none", 14), ("entropy", 14), ("linear_kl_div", 28)]
)
def test_one_chunk_at_a_time(device, monkeypatch, kernels, op, products):
    """The logits of a chunk are freed before those of the next one are computed. The forward of
    a mean computes its gradient, and the backward no logits.
    """
    monkeypatch.setattr(kernels, "CHUNK", 8)
    product, made, held = F.linear, [], []

    def counted(*given):
        held.append(sum(x() is not None for x in made))
        out = product(*given)
        assert len(out) <= 8
        made.append(weakref.ref(out))
        return out

    monkeypatch.setattr(F, "linear", counted)
    x = {n: t.requires_grad_() for n, t in linear(50, 8, 40, device=device).items()}
    target = targets(50, classes=40, device=device)
    with use_backend("triton"):
        if op == "linear_kl_div":
            teacher = torch.randn(50, 6, device=device), torch.randn(40, 6, device=device)
            loss = ff.linear_kl_div(x["input"], x["linear_weight"], *teacher, reduction="none")
        else:
            options = dict(reduction="none" if op == "none" else "mean")
            options["return_entropy"] = op == "entropy"
            loss = ff.linear_cross_entropy(**x, target=target, **options)
        sum(y.sum() for y in (loss if isinstance(loss, tuple) else [loss])).backward()
    assert len(held) == products  # in 7 chunks, of student and teacher, again in the backward
    assert max(held) == (op == "linear_kl_div")  # of the student beside the teacher


def test_kernels_that_are_launched(device, monkeypatch, kernels, work):
    """Of a chunk one, for its loss and for a gradient that somebody wants."""
    monkeypatch.setattr(kernels, "CHUNK", 20)
    x = linear(50, 8, 40, device=device)
    target = targets(50, classes=40, device=device)
    losses = []

    def forward():
        losses.append(ff.linear_cross_entropy(**x, target=target))

    with use_backend("triton"):
        assert work(forward).launches == 3
        x["linear_bias"].requires_grad_()
        assert work(forward).launches == 3
        assert work(losses[1].backward).launches == 0


@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("v", [1, 3, 8, 37, 64, 65])
def test_rows_that_start_anywhere(device, against_oracle, monkeypatch, kernels, v, dtype):
    """At every place among 16 aligned bytes: rows are read in whole groups of them, and the rest of
    a row, at both ends, class by class. What stands between the rows is NaN.
    """
    monkeypatch.setattr(kernels, "configuration", lambda *_: (16, 4))
    monkeypatch.setattr(kernels, "group_size", lambda x, _: 16 // x.element_size())
    for place, step in ((0, v), (0, v + 1), (1, v + 3), (5, 8 * v), (8, v + 4)):
        flat = torch.full((place + 7 * step + v,), float("nan"), device=device).to(dtype)
        x = flat.as_strided((7, v), (step, 1), place).copy_(logits(7, v, device=device)["logits"])
        target = targets(7, classes=v, device=device)
        options = {"label_smoothing": 0.1, "reduction": "sum" if place else "mean"}
        options["only_zeros"] = v == 1  # the one class has a probability of 1
        if v > 2:
            options |= {"smoothing": "kl", "ignore_index": v // 2}
        with use_backend("triton"):
            against_oracle(functional.cross_entropy, {"logits": x}, target=target, **options)


# --------------------------------------------------------------- gradients that the forward writes


def written_ahead(loss):
    """What the forward has written, the last of what it saves; empty where there is none."""
    node = loss.grad_fn
    node = node if hasattr(node, "saved_tensors") else node.next_functions[0][0]  # a cast
    return node.saved_tensors[-1]


@pytest.mark.parametrize("group", [64, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("smoothing", ["uniform", "kl"])
def test_a_gradient_of_one_is_written_ahead(
    device, work, monkeypatch, kernels, dtype, smoothing, group
):
    """One launch computes it with the loss; the backward returns that memory, and its launch reads
    no logits. It has the bits of a gradient that the backward computes.
    """
    monkeypatch.setattr(kernels, "group_size", lambda *_: group)
    x = logits(9, 37, dtype=dtype, device=device)["logits"].requires_grad_()
    target = targets(9, classes=37, device=device, ignored=(2,))
    options = {"ignore_index": 2, "label_smoothing": 0.1, "smoothing": smoothing}
    losses, grads = [], []

    def forward():
        losses.append(functional.cross_entropy(x, target, **options))

    with use_backend("triton"):
        assert work(forward).launches == 1
        place = written_ahead(losses[0]).data_ptr()
        found = work(lambda: grads.extend(torch.autograd.grad(losses[0], x)))
        assert (found.launches, found.programs) == (1, 9) and found.unmasked == 9  # of grad_loss
        assert grads[0].data_ptr() == place
        forward()
        anew = torch.autograd.grad(losses[1], x, retain_graph=True)
    assert torch.equal(*grads, *anew)


@pytest.mark.parametrize("scale", [1.0, 0.5, -3.0, 0.0, float("nan")])
def test_a_retained_graph_gives_every_gradient(device, scale):
    """Though the caller changes those that it got in place, and the last one is that memory; with a
    plan, and the long way, which an observer takes.
    """
    x = logits(5, 37, device=device)["logits"].requires_grad_()
    target = targets(5, classes=37, device=device)
    (want,) = torch.autograd.grad(F.cross_entropy(x.double(), target), x)
    for way in (contextlib.nullcontext(), backends.observe(lambda choice: None)):
        x.grad = None
        with use_backend("triton"), way:
            torch.autograd.grad(ff.cross_entropy(x, target), x)  # whose graph is not retained
            loss = ff.cross_entropy(x, target)
            for factor, retain in ((1.0, True), (scale, True), (1.0, True), (scale, False)):
                g = torch.tensor(factor, device=device)
                (have,) = torch.autograd.grad(loss, x, g, retain_graph=retain)
                torch.testing.assert_close(have, want * factor, equal_nan=True)
                have.fill_(7.0)
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                torch.autograd.grad(loss, x)
            twice = ff.cross_entropy(x, target)
            (twice + scale * twice).backward()
        torch.testing.assert_close(x.grad, want * (1 + scale), equal_nan=True)


def test_changed_logits_are_refused(device):
    """As in torch, though their gradient is there already."""
    x = logits(5, 37, device=device)["logits"].requires_grad_()
    target, y = targets(5, classes=37, device=device), x * 1
    with use_backend("triton"):
        loss = ff.cross_entropy(y, target)
        y.detach().zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_gradients_that_are_not_written_ahead(device, kernels):
    """Where nobody wants them, or the one of their loss is hardly 1."""
    target = targets(5, classes=37, device=device)
    with use_backend("triton"):
        for dtype, reduction in itertools.product((torch.float32, torch.float16), REDUCTIONS):
            x = logits(5, 37, dtype=dtype, device=device)["logits"].requires_grad_()
            loss = functional.cross_entropy(x, target, reduction)
            there = dtype == torch.float32 and reduction == "mean"
            assert (written_ahead(loss).numel() > 0) == there, (dtype, reduction)
        with torch.no_grad():
            options = "mean", -100, 0.0, "uniform", None, 0.0, None, 1.0, False
            found = kernels.forward(x.float(), target, *options, False)
        assert found[-1].numel() == 0


def test_a_checkpoint_keeps_no_gradient(device):
    """It recomputes what the forward has written ahead, as all that is saved."""
    x = logits(5, 37, device=device)["logits"].requires_grad_()
    target = targets(5, classes=37, device=device)
    want = torch.autograd.grad(F.cross_entropy(x, target), x)[0]
    packed = []
    with use_backend("triton"):
        loss = checkpoint(lambda x: ff.cross_entropy(x, target), x, use_reentrant=False)
        torch.testing.assert_close(torch.autograd.grad(loss, x)[0], want)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: packed.append(t.shape) or t.clone(), lambda t: t
        ):
            loss = ff.cross_entropy(x, target)
        assert packed.count(x.shape) == 2  # the logits and their gradient
        torch.testing.assert_close(torch.autograd.grad(loss, x)[0], want)
