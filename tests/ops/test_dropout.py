"""One dropout rule on every backend, in whatever tile: a function of (seed, batch_head, i, j)."""

import inspect

import independent
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fastformer as ff
from fastformer import checks, use_backend
from fastformer.dispatch.operation import OPERATIONS
from fastformer.ops import dropout
from fastformer.ops.dropout import dropped_rows

try:
    import triton
    import triton.language as tl
    from fastformer.kernels.common import row_dropout_keep
except ImportError:
    triton = None

M32 = 0xFFFFFFFF


def word_by_hand(seed, batch_head, i, j):
    return int(independent.tile_words(i, j, batch_head, seed)[0, 0])


def weights_of(seed, p, device, heads=(1, 1)):
    """The attention weights [40, 56] of uniform scores: kept ones are 1 / (56 (1 - p)). The
    identity as value shows them.
    """
    q, k = (torch.zeros(*heads, n, 8, device=device) for n in (40, 56))
    v = torch.eye(56, device=device).expand(*heads, 56, 56)
    return ff.scaled_dot_product_attention(q, k, v, dropout_p=p, dropout_seed=seed)


def rows_of(seed, p, device):
    """Four rows of eight ones in an op that draws the words of rows."""
    tokens = torch.zeros(4, dtype=torch.long, device=device)
    return ff.embed(tokens, torch.ones(1, 8, device=device), None, p, dropout_seed=seed)


if triton is not None:

    @triton.jit
    def _rows_kept(OUT, SEED, first, threshold, BM: tl.constexpr, BLOCK: tl.constexpr):
        i, j = tl.arange(0, BM), tl.arange(0, BLOCK)
        keep = row_dropout_keep(tl.load(SEED), first + i, 0, threshold, BM, BLOCK)
        tl.store(OUT + (i[:, None] * BLOCK + j[None, :]), keep.to(tl.int8))


def rows_kept(first, threshold, device):
    """What a kernel keeps of 16 elements of four rows, with seed 77."""
    out, seed = torch.zeros(4, 16, dtype=torch.int8, device=device), torch.tensor([77])
    _rows_kept[(1,)](out, seed.to(device), first, threshold, BM=4, BLOCK=16)
    return out


@pytest.mark.skipif(triton is None, reason="needs triton")
@pytest.mark.parametrize("first", [2**31, 2**32 - 1, 2**40])
def test_rows_past_int32(device, first):
    """Single elements of a kernel's rows against the words worked out in Python integers."""
    out = rows_kept(first, 2**30, device)
    for i, j in [(0, 0), (1, 5), (2, 14), (3, 3)]:
        low, high = (first + i) & M32, first + i >> 32
        words = dropout.philox4x32(j // 4, low, high, 1, 77)
        assert out[i, j] == (words[j % 4] >= 2**30)


def test_a_word_on_the_threshold_is_kept(backend, device):
    """Of attention and of rows; with p one step larger it is dropped."""
    of_attention = word_by_hand(9, 0, 19, 37)
    of_row = int(dropout.philox4x32(5 // 4, 3, 0, 1, 9)[5 % 4]) >> 16
    for more in (0, 1):
        weights = weights_of(9, (of_attention + more) / 2**16, device)
        assert (weights[0, 0, 19, 37] == 0) == bool(more)
        assert (rows_of(9, (of_row + more) / 2**16, device)[3, 5] == 0) == bool(more)


def tile_ops(p, seed, device):
    """What ops that draw the words of tiles make of ones: [40, 56]."""
    given = dict(dropout_p=p, dropout_seed=seed)
    x, w, both = (torch.ones(n, 1, device=device) for n in (40, 56, 112))
    eye = torch.eye(56, device=device)
    q, k = torch.zeros(40, 1, 8, device=device), torch.zeros(56, 1, 8, device=device)
    ends = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (40, 56)]
    yield weights_of(seed, p, device)[0, 0]
    yield ff.packed_attention(q, k, eye[:, None], *ends, 40, 56, **given)[:, 0]
    yield ff.feed_forward(x, w, None, eye, None, **given)
    yield ff.geglu(x, both, None, eye, None, **given)
    yield ff.swiglu(x, both, None, eye, None, **given)


def row_ops(p, seed, device):
    """And those that draw the words of rows."""
    given = dict(dropout_p=p, dropout_seed=seed)
    x, one = torch.ones(40, 56, device=device), torch.ones(56, device=device)
    tokens = torch.zeros(40, dtype=torch.long, device=device)
    yield ff.embed(tokens, x[:1], None, **given)
    yield ff.dropout_add_layer_norm(x, 0 * x, one, one, **given)[1]
    yield ff.dropout_add_rms_norm(x, 0 * x, one, **given)[1]


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "ops, p, seed",
    [
        (tile_ops, 2**-16, 893),
        (row_ops, 2**-16, 429),
        (tile_ops, 1 - 2**-16, 241),
        (row_ops, 1 - 2**-16, 533),
    ],
)
def test_the_least_and_the_largest_rate(ops, p, seed, backend, device):
    """Each op drops the elements whose word is below p 2^16; these seeds have both words beside."""
    factors = independent.row_factors
    if ops is tile_ops:
        factors = lambda shape, p, seed: independent.tile_factors(shape, 0, p, seed)  # noqa: E731
    below, want, above = (factors((40, 56), p + n / 2**16, seed) == 0 for n in (-1, 0, 1))
    assert (want != above).any() and (want != below).any()
    for out in ops(p, seed, device):
        assert ((out == 0).cpu().numpy() == want).all()


@pytest.mark.skipif(triton is None, reason="needs triton")
def test_a_word_of_a_row_on_the_threshold_is_kept(device):
    """All 32 bits of it; with a threshold larger by one it is dropped."""
    word = dropout.philox4x32(5 // 4, 3, 0, 1, 77)[5 % 4]
    for more in (0, 1):
        threshold = word + more - (2**32 if word >= 2**31 else 0)
        assert rows_kept(0, threshold, device)[3, 5] == 1 - more


def test_at_one_the_largest_word_is_dropped_too(backend, device):
    """Which no threshold of 32 bits drops: such words come once in 2^32, here for these seeds."""
    assert word_by_hand(6219259928, 0, 1, 9) == 0xFFFF
    assert dropout.philox4x32(4 // 4, 1, 0, 1, 78149343)[4 % 4] == M32
    assert (weights_of(6219259928, 1.0, device) == 0).all()
    assert (rows_of(78149343, 1.0, device) == 0).all()


def test_numpy_and_torch_draw_the_same():
    """The reference's two ways, one for a CPU and one for a GPU."""
    tensor = torch.tensor([-(2**62) - 5])
    for size in ((3, 30, 80), (20, 5, 7), (2, 100, 1100), (0, 3, 3), (2, 0, 3), (2, 3, 0)):
        a = dropout._dropped_by_numpy(tensor.numpy(), *size, 2**15)
        assert torch.equal(a, dropout._dropped_by_torch(tensor, *size, 2**15))
        assert a.shape == size
    [a] = dropout._dropped_rows_by_numpy(tensor.numpy(), 70, 9, 2**31)
    assert torch.equal(a, dropout._dropped_rows_by_torch(tensor, 70, 9, 2**31))
    assert 0.4 < a.float().mean() < 0.6


def test_published_splitmix():
    """The first outputs of SplitMix64 that starts at 1234567, as its users publish them."""
    low, high = dropout.splitmix(torch.arange(1, 4), 1234567)
    outputs = [int(a) + (int(b) << 32) for a, b in zip(low, high)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("blocks", [(16, 16), (32, 64), (64, 32)], ids=str)
def test_every_tile_and_backend_draws_the_same(device, tiles, blocks):
    tiles(*blocks)
    seed = 2**40 + 12345
    drop = dropout.dropped(torch.tensor([seed], device=device), 4, 40, 56, 0.3).view(2, 2, 40, 56)
    for backend in ("reference", "triton"):
        with use_backend(backend):
            weights = weights_of(seed, 0.3, device, heads=(2, 2))
        assert torch.equal(weights == 0, drop), backend
        kept = torch.full_like(weights, 1 / (56 * 0.7))
        assert torch.allclose(weights[~drop], kept[~drop], rtol=1e-5)


@pytest.mark.skipif(triton is None, reason="needs triton")
def test_philox_of_the_kernels(monkeypatch, device):
    """As a GPU computes it, not as the repaired interpreter does."""
    from fastformer.kernels import common, interpreter

    monkeypatch.setattr(common, "philox", interpreter.replaced.get("philox", common.philox))
    with use_backend("triton"):
        weights = weights_of(-7, 0.5, device)
    drop = dropout.dropped(torch.tensor([-7], device=device), 1, 40, 56, 0.5)
    assert torch.equal(weights[0] == 0, drop)


def test_a_dropped_element_is_zero_whatever_it_was(backend, device):
    """NaN and inf that dropout removes reach nothing; others stay."""
    x, residual = torch.full((2, 64), torch.nan, device=device), torch.zeros(2, 64, device=device)
    x[1] = torch.inf
    norm = torch.ones(64, device=device), torch.zeros(64, device=device)
    _, out = ff.dropout_add_layer_norm(x, residual, *norm, dropout_p=0.5, dropout_seed=1)
    drop = dropped_rows(torch.tensor([1]), 2, 64, 0.5)
    assert torch.equal((out == 0).cpu(), drop) and 20 < drop.sum() < 108
    one = torch.ones(1, 1, device=device)
    for activation in ("relu", "gelu"):
        options = dict(activation=activation, dropout_p=0.5, dropout_seed=1)
        out = ff.feed_forward(one.expand(64, 1), one, one[0] * torch.nan, one, None, **options)
        assert torch.equal((out == 0).cpu(), dropout.dropped(torch.tensor([1]), 1, 64, 1, 0.5)[0])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_fraction_and_independence(p):
    """2 million elements: fraction and variance within five standard deviations; neighbours,
    heads and seeds uncorrelated.
    """
    seeds = torch.tensor([11]), torch.tensor([12])
    a, b = (dropout.dropped(s, 8, 512, 512, p).float() for s in seeds)
    n = a.numel()
    assert abs(a.mean() - p) < 5 * (p * (1 - p) / n) ** 0.5

    for dim in (1, 2):  # counts over rows and columns are binomial: 8 * 512 of them
        counts = a.sum(dim)
        assert abs(counts.var() / (512 * p * (1 - p)) - 1) < 5 * (2 / counts.numel()) ** 0.5

    def correlation(x, y):
        return ((x - p) * (y - p)).mean() / (p * (1 - p))

    bound = 5 / n**0.5 * 1.1
    assert abs(correlation(a, b)) < bound
    for shift in (1, 8, 16):
        assert abs(correlation(a[:, shift:], a[:, :-shift])) < bound
        assert abs(correlation(a[:, :, shift:], a[:, :, :-shift])) < bound
    assert abs(correlation(a[1:], a[:-1])) < bound


def test_a_seed_is_drawn_for_each_call(backend, device):
    torch.manual_seed(5)
    first, second = (weights_of(None, 0.5, device) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(weights_of(None, 0.5, device), first)


X = torch.randn(2, 2, 5, 16, generator=torch.Generator().manual_seed(0))
ROWS, LENGTHS = X[0].transpose(0, 1), torch.tensor([0, 2, 5], dtype=torch.int32)
SUM = dict(input=X, residual=X, weight=X[0, 0, 0])
GATED = dict(input=X, w=X[0, :, 1:].reshape(8, 16), b=X[0, 0, 0, :8], w_2=X[0, 0, :, :4], b_2=None)
# Of both kinds of attention: arguments with the values to try.
OF_SCORES = dict(scale=[0.5], softcap=[3.0], sinks=[torch.tensor([0.5, -1.0])], return_lse=[True])
OF_SCORES |= dict(is_causal=[True], window=[(1, None)], causal_alignment=["bottom_right"])
OF_SCORES |= dict(alibi_slopes=[torch.tensor([0.5, 0.25])])
MASKS = X[0, 0, :, :5] > 0, X[:, :, :, :5], X[:, :1, :1, :5] > -1
# By op that drops elements: a call, and each other argument with the values to try. An argument
# that is listed nowhere fails the test.
CALLS_WITH_DROPOUT = {
    ff.scaled_dot_product_attention: (
        dict(query=X, key=X, value=X),
        OF_SCORES
        | dict(attn_mask=[*MASKS, ff.block_mask(X[:, :, :, :5] > -0.5)], enable_gqa=[True])
        | dict(bias=[X[:, :, :, :5]], key_lengths=[torch.tensor([5, 3]), torch.tensor([3, 3])]),
    ),
    ff.packed_attention: (
        dict(query=ROWS, key=ROWS, value=ROWS)
        | dict(cu_seqlens_q=LENGTHS, cu_seqlens_k=LENGTHS, max_q=3, max_k=3),
        OF_SCORES | dict(attn_mask=[ff.block_mask(X[:1, :1, :, :5] > -0.5)], bias=[X[0, 0, 0, :5]]),
    ),
    ff.dropout_add_layer_norm: (
        SUM | dict(bias=None),
        dict(bias=[X[0, 0, 0]], eps=[1e-3], unbiased=[True], input_bias=[X[0, 0, 0]]),
    ),
    ff.dropout_add_rms_norm: (SUM, dict(eps=[1e-3], input_bias=[X[0, 0, 0]])),
    ff.feed_forward: (
        dict(input=X, w_1=X[0, 0], b_1=None, w_2=X[0, 0].T, b_2=None),
        dict(b_1=[X[0, 0, 0, :5]], b_2=[X[0, 0, 0]], activation=["gelu"]),
    ),
    ff.geglu: (GATED, {}),
    ff.swiglu: (GATED, dict(alpha=[1.5], limit=[2.0], offset=[1.0])),
    ff.embed: (
        dict(tokens=torch.arange(4).view(2, 2), weight=X[0, 0], positional=None),
        dict(positional=[X[0, 0, :2]], padding_idx=[1], scale=[1.0]),
    ),
}


def calls_with_dropout(op):
    usual, others = CALLS_WITH_DROPOUT[op]
    yield usual
    for name, values in others.items():
        for value in values:
            call = usual | {name: value}
            if name == "enable_gqa":
                call |= {name: x[:, :1] for name, x in call.items() if name in ("key", "value")}
            yield call


@pytest.mark.all_cases
@pytest.mark.parametrize("op", CALLS_WITH_DROPOUT, ids=lambda op: op.__name__)
def test_each_call_draws_one_seed_on_every_backend(op, device):
    """Whatever its other arguments are: the same mask, and the same state of the generator."""
    usual, others = CALLS_WITH_DROPOUT[op]
    known = {*usual, *others, "dropout_p", "dropout_seed"}
    assert known == set(inspect.signature(op).parameters) - {"unknown"}
    for call in calls_with_dropout(op):
        given = {n: x.to(device) if hasattr(x, "to") else x for n, x in call.items()}
        torch.manual_seed(3)
        checks.draw_seeds(1, device)
        expected = state_of_generator(device)
        results = []
        for backend in ("reference", "triton"):
            torch.manual_seed(3)
            with use_backend(backend):
                found = op(**given, dropout_p=0.3)
            assert torch.equal(state_of_generator(device), expected), call
            results.append(found if isinstance(found, tuple) else (found,))
        for one, other in zip(*results):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def state_of_generator(device):
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def test_every_op_with_dropout_is_tried():
    ops = {op.contract: inspect.signature(op.contract).parameters for op in OPERATIONS.values()}
    assert {op for op in ops if "dropout_seed" in ops[op]} == set(CALLS_WITH_DROPOUT)


def test_an_integer_is_no_copy_from_the_host():
    """Which the capture of a CUDA graph refuses: it is filled in on the device."""
    nodes = make_fx(lambda: checks.seed_tensor(-5, 0.1, torch.device("cpu")))().graph.nodes
    assert [x.target for x in nodes if x.op != "output"] == [torch.ops.aten.full.default]


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**64 - 1, -(2**63)])
def test_seeds(backend, device, seed):
    signed = torch.tensor([(seed + 2**63) % 2**64 - 2**63], device=device)
    assert torch.equal(weights_of(seed, 0.5, device), weights_of(signed, 0.5, device))


@pytest.mark.parametrize("p", [0.0, 1.0, 2**-17, 2**-32, 1 - 2**-33])
def test_extreme_probabilities(backend, device, p):
    """They are rounded to 0 and 1."""
    weights = weights_of(3, p, device)
    assert torch.equal(weights, torch.full_like(weights, 0 if round(p) else 1 / 56))


def test_probabilities_are_multiples(device):
    """Of 2^-16. The least drops one element of 65536, and the factor is that of the multiple."""
    weight, token = torch.ones(1, 2**20, device=device), torch.tensor([0], device=device)
    few = ff.embed(token, weight, None, 2**-16 * 1.4, scale=1.0, dropout_seed=1)
    assert abs((few == 0).sum() - 16) < 5 * 4
    assert few.max() == torch.tensor(1 / (1 - 2**-16))


# ------------------------------------------------- without a seed, on a CPU: torch draws the masks


def masks_drawn(monkeypatch, run):
    """How many masks of the kernels a call draws."""
    drawn = []
    with monkeypatch.context() as patch:
        for name in ("_dropped", "_dropped_rows"):
            draw = getattr(dropout, name)
            patch.setattr(dropout, name, lambda *x, draw=draw: (drawn.append(x), draw(*x))[1])
        run()
    return len(drawn)


def ops_with_dropout(seed):
    """Calls of every op that drops, small and large ones."""
    for rows in (12, 200):
        x, w, b = torch.randn(1, 2, rows, 8), torch.randn(16, 8), torch.randn(16)
        given, one, tokens = dict(dropout_p=0.5, dropout_seed=seed), torch.ones(8), torch.arange(16)
        offsets = torch.tensor([0, rows], dtype=torch.int32)
        packed = (*(x[0].transpose(0, 1),) * 3, offsets, offsets, rows, rows)
        yield ff.scaled_dot_product_attention(x, x, x, **given)
        yield ff.scaled_dot_product_attention(x, x[:, :1], x[:, :1], enable_gqa=True, **given)
        yield ff.packed_attention(*packed, **given)
        yield ff.feed_forward(x, w, b, w.T.contiguous(), one, **given)
        yield ff.geglu(x, w, b, torch.randn(8, 8), one, **given)
        yield ff.dropout_add_layer_norm(x, x, one, one, **given)[1]
        yield ff.dropout_add_rms_norm(x, x, one, **given)[1]
        yield ff.embed(tokens, w, None, **given)


def test_without_a_seed_torch_draws_on_a_cpu(monkeypatch):
    """With one, or on the reference, all masks are those of the kernels: a seed has one mask."""
    results = []

    def run(backend, seed):
        torch.manual_seed(0)
        with use_backend(backend):
            return masks_drawn(monkeypatch, lambda: results.append([*ops_with_dropout(seed)]))

    assert [run("auto", None), run("reference", None)] == [0, len(results[0])]
    assert [run("auto", 7), run("reference", 7)] == [len(results[0])] * 2
    assert all(map(torch.equal, *results[2:]))


@pytest.mark.parametrize("op", CALLS_WITH_DROPOUT, ids=lambda op: op.__name__)
def test_explain_says_where_the_mask_is_from(op, monkeypatch):
    """And so does docs/numerics.md: whether a seed has to draw it, whatever the other arguments."""
    told = [f"; the dropout mask is from {source}" for source in ("torch's generator", "a seed")]
    with use_backend("auto"):
        for call in calls_with_dropout(op):
            asked = isinstance(call.get("attn_mask"), ff.BlockMask)
            for dropout_seed, by_seed in ((None, asked), (7, True)):
                given = call | dict(dropout_p=0.3, dropout_seed=dropout_seed)
                said = ff.explain(op.__name__, **given).reason
                assert told[by_seed] in said and "dropout" not in said.replace(told[by_seed], "")
                assert (masks_drawn(monkeypatch, lambda x=given: op(**x)) > 0) == by_seed
        usual = CALLS_WITH_DROPOUT[op][0]
        assert "dropout" not in ff.explain(op.__name__, **usual).reason
    for backend in ("reference", "triton"):
        with use_backend(backend):
            assert told[1] in ff.explain(op.__name__, **usual, dropout_p=0.3).reason


def test_a_block_mask_that_is_causality_leaves_the_mask_to_torch():
    given, blocks = dict(query=X, key=X, value=X, dropout_p=0.3), ff.BlockMask.causal(5)
    found = []
    with use_backend("auto"):
        for more in (dict(attn_mask=blocks), dict(is_causal=True)):
            said = ff.explain("scaled_dot_product_attention", **given, **more).reason
            assert said.endswith("from torch's generator")
            torch.manual_seed(2)
            found.append(ff.scaled_dot_product_attention(**given, **more))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["auto", "reference", "triton"])
def test_modules_that_are_not_fused_drop_as_torch(name):
    """An nn.Dropout of a module that is called alone is torch's own on every backend."""
    position, sublayer = ff.PositionalEncoding(16, 0.5), ff.SublayerConnection(16, 0.5)
    with use_backend(name):
        for call, x in (
            (lambda: position(X[0]), X[0] + position.pe[:, :5]),
            (lambda: sublayer(X[0], torch.ones_like) - X[0], torch.ones_like(X[0])),
        ):
            torch.manual_seed(4)
            found = call()
            torch.manual_seed(4)
            torch.testing.assert_close(found, torch.nn.functional.dropout(x, 0.5))


@pytest.mark.parametrize("make", [ff.make_model, ff.make_decoder], ids=lambda f: f.__name__)
def test_a_model_without_a_seed(monkeypatch, make):
    """It trains without a mask of the kernels, and torch's generator decides on the output."""
    ids, vocab = torch.arange(1, 11).view(2, 5), (11, 11) if make is ff.make_model else (11,)
    model = make(*vocab, N=1, d_model=16, d_ff=32, h=2, dropout=0.3)
    given = (ids, ids, None, None) if make is ff.make_model else (ids,)
    outputs = []
    with use_backend("auto"):
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            assert masks_drawn(monkeypatch, lambda: outputs.append(model(*given))) == 0
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("rows", [12, 200], ids=["small", "large"])
@pytest.mark.parametrize("form", ["plain", "causal", "mask", "bias"])
def test_attention_without_a_seed_is_that_of_the_formula(form, rows):
    """Output and gradients, for the mask that the identity as value shows; a row sees nothing."""
    p, generator = 0.25, torch.Generator().manual_seed(0)
    shape = 2, 3, rows, 8
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(3))
    visible, added, given = torch.ones(rows, rows, dtype=torch.bool), torch.zeros(rows, rows), {}
    if form == "causal":
        visible, given = visible.tril(), dict(is_causal=True)
    if form == "mask":
        visible = torch.rand(rows, rows, generator=generator) < 0.7
        visible[3] = False
        given = dict(attn_mask=visible)
    if form == "bias":
        added = torch.randn(rows, rows, generator=generator).requires_grad_()
        given = dict(attn_mask=added)

    def attend(value):
        torch.manual_seed(1)
        with use_backend("auto"):
            return ff.scaled_dot_product_attention(q, k, value, dropout_p=p, **given)

    keep = attend(torch.eye(rows).expand(2, 3, rows, rows)) != 0
    seen = keep[..., visible]
    assert abs(seen.float().mean() - (1 - p)) < 5 * (p / seen.numel()) ** 0.5
    out = attend(v)
    weights = (q.double() @ k.double().mT / 8**0.5 + added.double()).exp() * visible
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
    want = (weights * keep / (1 - p)) @ v.double()
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    wanted = [x for x in (q, k, v, added) if x.requires_grad]
    grad = torch.randn(shape, generator=generator)
    found = torch.autograd.grad(out, wanted, grad)
    for have, exact in zip(found, torch.autograd.grad(want, wanted, grad.double())):
        torch.testing.assert_close(have, exact.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("differentiated", [(0,), (1, 2)], ids=str)
def test_second_derivatives_of_some_inputs(differentiated):
    """Those of attention where not all of query, key and value have a gradient."""
    inputs, found = torch.randn(3, 2, 3, 20, 8), []
    for needed in (differentiated, (0, 1, 2)):
        leaves = [x.clone().requires_grad_(n in needed) for n, x in enumerate(inputs)]
        xs = [leaves[n] for n in differentiated]
        with use_backend("reference"):
            out = ff.scaled_dot_product_attention(*leaves, dropout_p=0.25, dropout_seed=5)
        grads = torch.autograd.grad(out.square().sum(), xs, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in grads), xs))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("p", [0.1, 0.5, 1 - 2**-16, 1.0])
@pytest.mark.parametrize("n", [1000, 100_003], ids=["small", "large"])
def test_the_rate_of_torchs_masks(n, p):
    x = torch.randn(n).requires_grad_()
    torch.manual_seed(0)
    y = dropout.dropout(x, p)
    (grad,) = torch.autograd.grad(y.sum(), x)
    kept = grad != 0
    assert abs(kept.sum() - n * (1 - p)) <= 5 * (n * p * (1 - p)) ** 0.5
    torch.testing.assert_close(grad[kept], torch.full_like(grad[kept], 1 / (1 - p or 1)))
    torch.testing.assert_close(y, x * grad)
    torch.manual_seed(0)
    assert torch.equal(y, dropout.dropout(x, p))
    if n > dropout._FEW and p == 0.5:  # words, rows of words and neighbours are independent
        for step in (1, 2, 3, 4, 5, 8, 64):
            same = (kept[step:] == kept[:-step]).float().mean()
            assert abs(same - 0.5) < 5 * (0.25 / n) ** 0.5


@pytest.mark.parametrize("p", [2**-16, 0.5, 1 - 2**-16, 1.0])
def test_the_elements_that_torchs_masks_drop(p):
    """Those whose 16 bits, as a number from 0 on, are below p 2^16."""
    x = torch.ones(1 << 20)
    torch.manual_seed(0)
    words = torch.empty(1 << 18, dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    words = words.int() + 2**15
    for word in (0, 1, 2**16 - 2, 2**16 - 1):
        assert (words == word).any()
    torch.manual_seed(0)
    assert torch.equal(dropout.dropout(x, p) == 0, words < p * 2**16)


def test_torchs_masks_within_another_default_device():
    x = torch.ones(1 << 15)
    with torch.device("meta"):
        out = dropout.dropout(x, 0.5)
    assert out.is_cpu and set(out.tolist()) == {0.0, 2.0}
