"""Every op on calls that a generator draws, forward and gradients, against mathematics written
apart from the reference: tests/independent.py. The draws are the same in each run; `--slow` makes
new ones, thousands.

Both backends pass through the same cases. Tensors are views of larger memory that holds NaN, in any
order of dimensions, with steps; sizes stand on and beside the edges of tiles; hidden keys hold NaN;
and no interpreted program reads outside of its tensors.
"""

import contextlib
import inspect
import math
import zlib

import independent
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import fastformer as ff
from fastformer.dispatch import autograd, backends
from fastformer.ops import functional

CASES = 50  # of an op, in each run
SLOW = 2000  # with --slow; a fifth of it on the interpreted kernels
STEP = 1e-30  # of the derivative by a complex step


class Draw:
    """One case: random numbers, and tensors made of them."""

    def __init__(self, seed, device):
        self.random, self.device = np.random.default_rng(seed), device
        kinds = [torch.float32] * 3 + [torch.float64, torch.bfloat16, torch.float16]
        self.dtype = self.one(*kinds)
        # Interpreted programs have a cost each: half of the cases are one tile, however large.
        self.tiles = self.one(None, None, None, (16, 16), (16, 32), (32, 16))

    def one(self, *choices):
        return choices[self.random.integers(len(choices))]

    def often(self, p=0.5):
        return self.random.random() < p

    def size(self, *, most):
        """Small sizes, and in tiles those around their edges."""
        edges = [n for n in (1, 15, 16, 17, 31, 32, 33) if n <= most]
        return self.one(*edges) if self.often() else int(self.random.integers(1, most + 1))

    def view(self, x, around):
        """x, inside of something larger: its dimensions in any order, a step between neighbours."""
        x = torch.as_tensor(x, device=self.device)
        if self.often(0.3) or not x.ndim:
            return x
        order = self.random.permutation(x.ndim)
        steps = np.ones(x.ndim, int)
        steps[order[-1]] = self.one(1, 1, 2)
        stored = [x.shape[n] * steps[n] + self.one(0, 0, 3) for n in order]
        view = x.new_full(stored, around).permute(*np.argsort(order).tolist())
        view = view[tuple(slice(0, n * step, step) for n, step in zip(x.shape, steps))]
        return view.copy_(x)

    def normal(self, *shape, scale=1.0, dtype=None):
        x = torch.as_tensor(self.random.standard_normal(shape) * scale)
        return self.view(x.to(dtype or self.dtype), math.nan)

    def parameter(self, *shape, scale=1.0):
        """In the dtype of the input, or in float32."""
        return self.normal(*shape, scale=scale, dtype=self.one(self.dtype, torch.float32))

    def integers(self, low, high, *shape, dtype=np.int64):
        return self.view(self.random.integers(low, high, shape).astype(dtype), -1)

    def dropout(self):
        p = self.one(0.0, 0.0, 0.3, 0.9, 1.0)
        return {"dropout_p": p, "dropout_seed": self.seed()} if p else {}

    def seed(self):
        return int(self.random.integers(-(2**63), 2**63, dtype=np.int64))

    def lead(self):
        """The leading dimensions of rows."""
        return self.one((), (self.size(most=33),), (2, self.size(most=9)), (2, 1, 3))

    def broadcast(self, full, *, whole=0):
        """A shape that broadcasts to the full one, the last `whole` sizes as they are."""
        kept = len(full) - whole
        shape = [self.one(1, n) for n in full[:kept]] + list(full[kept:])
        return shape[self.one(0, 0, *range(len(full))) :]


# ------------------------------------------------------ the cases: (function, tensors, options)


def band(draw):
    sides = (None, 0, 3, 15, 16, 20)
    return {
        "is_causal": draw.often(),
        "window": draw.one(None, (draw.one(*sides), draw.one(*sides))),
        "causal_alignment": draw.one("top_left", "bottom_right"),
    }


def scores(draw):
    """What attention and its weights take alike."""
    batch, groups, share = draw.one(1, 2), draw.one(1, 2), draw.one(1, 1, 2)
    heads, rows, columns = groups * share, draw.size(most=40), draw.size(most=40)
    dim, full = draw.one(3, 8, 16, 20), (batch, heads, rows, columns)
    tensors = {
        "query": draw.normal(batch, heads, rows, dim, scale=draw.one(0.5, 2.0)),
        "key": draw.normal(batch, groups, columns, dim),
    }
    options = {"enable_gqa": True, "softcap": draw.one(None, None, 5.0), **band(draw)}
    if draw.often(0.3):
        options["scale"] = 0.5
    if draw.often(0.4):
        shape = draw.broadcast(full)
        tensors["attn_mask"] = draw.view(draw.random.random(shape) < 0.7, True)
    if draw.often(0.4):  # one that is constant over the keys changes nothing but lse
        bias = draw.normal(
            *draw.broadcast(full, whole=1), dtype=draw.one(draw.dtype, torch.float32)
        )
        hidden = torch.tensor(draw.random.random(bias.shape) < draw.one(0.0, 0.2))
        tensors["bias"] = bias.masked_fill_(hidden.to(bias.device), -math.inf)
    if draw.often(0.4):
        kind = draw.one(np.int64, np.int32)
        lengths = draw.integers(0, columns + 1, batch, dtype=kind)
        tensors["key_lengths"] = lengths
        for b, n in enumerate(lengths.tolist()):  # beyond the keys anything may stand
            tensors["key"][b, :, n:] = math.nan
    if draw.often(0.3):
        slopes = draw.random.random(draw.one((heads,), (batch, heads)))
        options["alibi_slopes"] = draw.view(slopes.astype(np.float32), np.nan)
    if draw.often(0.3):
        tensors["sinks"] = draw.parameter(heads)
    return tensors, options


def scaled_dot_product_attention(draw, whole=False):
    tensors, options = scores(draw)
    batch, groups, columns, _ = tensors["key"].shape
    value = draw.normal(batch, groups, columns, draw.one(5, 8, 16))
    for b, n in enumerate(tensors.get("key_lengths", torch.tensor([])).tolist()):
        value[b, :, n:] = math.nan
    options |= {"return_lse": draw.often(), **draw.dropout()}
    if not whole and draw.often(0.25):
        options["shard"] = shard(draw, tensors)
    return {**tensors, "value": value}, options


def shard(draw, tensors):
    """Where the tensors lie in a whole, to which their lengths are raised."""
    (_, heads, rows, _), columns = tensors["query"].shape, tensors["key"].shape[2]
    batch, head, i, j = (step * int(draw.random.integers(4)) for step in (1, 1, 16, 16))
    if "key_lengths" in tensors:
        tensors["key_lengths"] += j
    more = draw.random.integers(0, 20, 3).tolist()
    ends = zip((head, i, j), (heads, rows, columns), more)
    return (batch, head, i, j, *map(sum, ends))


def attention_weights(draw):
    return scores(draw)


def packed_attention(draw):
    groups, share, dim = draw.one(1, 2), draw.one(1, 2), draw.one(3, 8, 16)
    batch = draw.one(1, 2, 3)
    ends = np.cumsum([(0, 0)] + [draw.random.integers(0, 21, 2) for _ in range(batch)], 0)
    (queries, keys), longest = ends[-1], np.diff(ends, axis=0).max(0)
    tensors = {
        "query": draw.normal(queries, groups * share, dim, scale=2.0),
        "key": draw.normal(keys, groups, dim),
        "value": draw.normal(keys, groups, draw.one(dim, 5)),
        "cu_seqlens_q": draw.view(ends[:, 0].astype(np.int32), -1),
        "cu_seqlens_k": draw.view(ends[:, 1].astype(np.int32), -1),
    }
    if draw.often(0.3):
        tensors["sinks"] = draw.parameter(groups * share)
    more = draw.one(0, 5)
    lengths = {"max_q": int(longest[0]) + more, "max_k": int(longest[1]) + more}
    return tensors, {**lengths, **band(draw), **draw.dropout()}


def paged_attention(draw):
    """The keys and values of a call without pages, cut into pages that lie in any order."""
    tensors, options = scaled_dot_product_attention(draw, whole=True)
    for name in ("dropout_p", "dropout_seed", "enable_gqa"):
        options.pop(name, None)
    batch, _, columns, _ = tensors["key"].shape
    blocks, page = -(-columns // 16), 16
    for name in ("attn_mask", "bias"):  # of the keys that fill the blocks
        if name in tensors and tensors[name].shape[-1:] not in ((), (1,)):
            x = tensors[name]
            fill = x.new_ones if x.dtype == torch.bool else x.new_zeros
            more = fill(*x.shape[:-1], blocks * page - columns)
            tensors[name] = torch.cat([x, more], -1)
    lengths = tensors.pop("key_lengths", None)
    if lengths is None:
        lengths = draw.integers(columns, columns + 1, batch)
    order = draw.random.permutation(batch * blocks)
    for name in ("key", "value"):
        x = tensors.pop(name)
        pages = x.new_full((batch, blocks * page, *x.shape[1::2]), math.nan)
        pages[:, :columns] = x.transpose(1, 2)
        pages = pages.view(-1, page, *x.shape[1::2])
        tensors[f"{name}_pages"] = torch.empty_like(pages).index_copy_(
            0, torch.tensor(order, device=x.device), pages
        )
    table = torch.tensor(order, dtype=torch.int32, device=lengths.device).view(batch, blocks)
    return {**tensors, "block_table": table, "key_lengths": lengths}, options


def row_shard(draw, lead, columns, steps):
    """Where rows of these leading dimensions lie in a whole: the last one may be cut."""
    if draw.often(0.75):
        return {}
    row, column = (step * int(draw.random.integers(5)) for step in steps)
    whole = column + columns + (int(draw.random.integers(9)) if steps[1] else 0)
    given, run = (row, column, whole), lead[-1] if lead else 1
    if run % steps[0] == 0 and draw.often():
        given = *given, run, run + steps[0] * int(draw.random.integers(4))
    return {"shard": given}


def norm(draw, *names):
    n = draw.size(most=40) + 3
    tensors = {"input": draw.normal(*draw.lead(), n, scale=draw.one(0.1, 3.0))}
    for name in names:
        if draw.often(0.7):
            tensors[name] = draw.parameter(n)
    return tensors, {"normalized_shape": n, "eps": draw.one(1e-5, 0.1)}


def layer_norm(draw):
    tensors, options = norm(draw, "weight", "bias")
    return tensors, {**options, "unbiased": draw.often()}


def rms_norm(draw):
    return norm(draw, "weight")


def dropout_add_layer_norm(draw):
    tensors, options = norm(draw, "bias")
    x = tensors["input"]
    tensors["residual"] = draw.normal(*x.shape)
    tensors["weight"] = draw.parameter(x.shape[-1])
    tensors.setdefault("bias")
    options = {"eps": options["eps"], "unbiased": draw.often(), **draw.dropout()}
    return tensors, options | row_shard(draw, x.shape[:-1], x.shape[-1], (1, 0))


def dropout_add_rms_norm(draw):
    tensors, options = dropout_add_layer_norm(draw)
    del tensors["bias"], options["unbiased"]
    return tensors, options


def fed(draw, halves, names):
    d, hidden, out = (draw.size(most=most) for most in (20, 40, 20))
    w, b = names
    tensors = {
        "input": draw.normal(*draw.lead(), d),
        w: draw.normal(halves * hidden, d, scale=d**-0.5),
        b: draw.normal(halves * hidden) if draw.often(0.7) else None,
        "w_2": draw.normal(out, hidden, scale=hidden**-0.5),
        "b_2": draw.normal(out) if draw.often(0.7) else None,
    }
    lead = tensors["input"].shape[:-1]
    return tensors, draw.dropout() | row_shard(draw, lead, hidden, (16, 16))


def feed_forward(draw):
    tensors, options = fed(draw, 1, ("w_1", "b_1"))
    return tensors, {"activation": draw.one("relu", "gelu", "gelu_tanh", "silu"), **options}


def geglu(draw):
    return fed(draw, 2, ("w", "b"))


def swiglu(draw):
    return fed(draw, 2, ("w", "b"))


def embed(draw):
    lead, length = draw.one((), (1,), (3,)), draw.size(most=17)
    vocabulary, d = draw.size(most=9), draw.size(most=40)
    kind = draw.one(np.int64, np.int32, np.uint8)
    tensors = {
        "tokens": draw.view(draw.random.integers(0, vocabulary, (*lead, length)).astype(kind), 200),
        "weight": draw.normal(vocabulary, d),
        "positional": draw.parameter(length + draw.one(0, 2), d) if draw.often(0.7) else None,
    }
    options = {"padding_idx": draw.one(None, draw.random.integers(vocabulary).item())}
    if draw.often(0.3):
        options["scale"] = 0.7
    options |= draw.dropout()
    return tensors, options | row_shard(draw, tensors["tokens"].shape, d, (1, 4))


def losses(draw, lead, classes):
    target = draw.random.integers(0, classes, lead)
    options = {
        "reduction": draw.one("mean", "sum", "none"),
        "label_smoothing": draw.one(0.0, 0.1, 1.0),
        "smoothing": draw.one("uniform", "kl"),
        "ignore_index": draw.one(int(draw.random.integers(classes)), -100),
    }
    if options["smoothing"] == "kl":
        options["ignore_index"] %= classes
    if options["reduction"] == "mean" and (target == options["ignore_index"]).all():
        options["reduction"] = "sum"
    return draw.view(target, -1), options


def cross_entropy(draw):
    lead, classes = draw.lead(), draw.size(most=40) + 2
    classes += len(lead) == 2 and lead[1] == classes  # could be torch's [N, C, L]: refused
    target, options = losses(draw, lead, classes)
    return {"logits": draw.normal(*lead, classes, scale=3.0), "target": target}, options


def linear_cross_entropy(draw):
    lead, classes, d = draw.lead(), draw.size(most=40) + 2, draw.size(most=12)
    target, options = losses(draw, lead, classes)
    tensors = {
        "input": draw.normal(*lead, d),
        "linear_weight": draw.normal(classes, d),
        "target": target,
        "linear_bias": draw.normal(classes) if draw.often() else None,
    }
    return tensors, options


DRAWN = [
    scaled_dot_product_attention,
    attention_weights,
    packed_attention,
    paged_attention,
    layer_norm,
    rms_norm,
    dropout_add_layer_norm,
    dropout_add_rms_norm,
    feed_forward,
    geglu,
    swiglu,
    embed,
    cross_entropy,
    linear_cross_entropy,
]
MATHEMATICS = {
    "scaled_dot_product_attention": lambda **x: independent.attention(**x)[: 1 + x["return_lse"]],
    "attention_weights": lambda **x: independent.attention(
        **x, value=np.zeros((*x["key"].shape[:3], 1))
    )[2:],
    "paged_attention": lambda **x: independent.paged_attention(**x)[: 1 + x["return_lse"]],
    "geglu": independent.gated("gelu"),
    "swiglu": independent.gated("silu"),
}


# ----------------------------------------------------------------------------------------- the test


def array(x):
    """A tensor in NumPy, float64 where it is floating; what nobody may read is a zero."""
    if not isinstance(x, torch.Tensor):
        return x
    x = x.detach().cpu()
    return (
        x.double().nan_to_num(0.0, neginf=-math.inf).numpy() if x.is_floating_point() else x.numpy()
    )


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
    tensors, options = case(draw)
    function = getattr(ff, case.__name__)
    mathematics = MATHEMATICS.get(case.__name__) or getattr(independent, case.__name__)
    floating = [n for n, x in tensors.items() if x is not None and x.is_floating_point()]
    if case is paged_attention:  # it has no gradient
        floating = []
    elif draw.often(0.3):  # gradients of some of them, in their order
        some = 1 + draw.random.integers(len(floating))
        floating = [floating[n] for n in sorted(draw.random.permutation(len(floating))[:some])]
    if alone is not None and floating:
        floating = [floating[alone % len(floating)]]
    leaves = {name: tensors[name].requires_grad_() for name in floating}
    with tiles:
        outputs = function(**tensors, **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
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


def test_every_op_is_drawn():
    assert {case.__name__ for case in DRAWN} == set(functional.__all__)


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
def test_fuzz(case, backend, device, small_tiles, in_bounds, request):
    """A case that fails names its seed, from which `Draw` makes it again."""
    fresh = request.config.getoption("slow")
    start = np.random.SeedSequence().entropy if fresh else zlib.crc32(case.__name__.encode())
    in_tiles = backend == "triton" and device.type == "cpu"
    for n in range((SLOW if backend == "reference" else SLOW // 5) if fresh else CASES):
        draw = Draw([start, n], device)
        tiles = small_tiles(*draw.tiles) if in_tiles and draw.tiles else contextlib.nullcontext()
        try:
            check(case, draw, backend, tiles)
        except Exception as error:
            raise AssertionError(f"Draw([{start}, {n}]), {draw.dtype}: {error}") from error


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
    with ff.use_backend("triton"):
        for n in range(16):
            alone = n // 2 if n % 2 else None
            check(case, Draw([15, n], device), "triton", contextlib.nullcontext(), alone)
    assert compared or case is attention_weights


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", DRAWN, ids=lambda case: case.__name__)
def test_accumulators(case, dtype, device, monkeypatch):
    """A kernel computes in float32, of float64 in float64: on a GPU that takes 64 times as long."""
    if device.type == "cuda":
        pytest.skip("seen in the interpreter")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    seen = set()

    def launch(self, *given, former=interpreter.GridExecutor.__call__, **named):
        options = {name: x for name, x in named.items() if name in self.arg_names}
        kinds = inspect.getcallargs(self.fn, *given, **options)
        groups = [kinds, *(x._asdict() for x in kinds.values() if hasattr(x, "_asdict"))]
        seen.add(next(x[name] for x in groups for name in ("ACC", "acc") if name in x))
        return former(self, *given, **named)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    draw = Draw([3, len(DRAWN)], device)
    draw.dtype = dtype
    if case is attention_weights:  # it has no kernel of its own
        return
    with ff.use_backend("triton"):
        check(case, draw, "triton", contextlib.nullcontext())
    wide = interpreter.tl.float64 if dtype == torch.float64 else interpreter.tl.float32
    assert {getattr(kind, "value", kind) for kind in seen} == {wide}
