"""Ops on shards of their arguments: together they are what the whole is, dropout included."""

import itertools

import pytest
import torch

import fastformer as ff
from fastformer import use_backend

BATCH, HEADS, GROUPS, QUERIES, KEYS = 3, 4, 2, 40, 56
CUTS = {"batch": [0, 2, 3], "head": [0, 2, 4], "query": [0, 16, 40], "key": [0, 32, 56]}
WHOLE = {"batch": [0, BATCH], "head": [0, HEADS], "query": [0, QUERIES], "key": [0, KEYS]}


def merged(parts):
    """(output, lse) of the whole, given those of parts of its keys."""
    outputs, sums = (torch.stack(x) for x in zip(*parts))
    lse = sums.logsumexp(0)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    weights = (sums - finite).exp().unsqueeze(-1).to(outputs.dtype)
    return (weights * outputs).sum(0), lse


def part(x, places):
    """The part of a tensor that broadcasts to [B, H, Sq, Sk]."""
    for dim, (first, last) in zip((-4, -3, -2, -1), places):
        if x is not None and x.dim() >= -dim and x.shape[dim] > 1:
            x = x.narrow(dim, first, last - first)
    return x


def of_one(
    query, key, value, attn_mask, bias, key_lengths, alibi_slopes, sinks, places, shard, **options
):
    (b0, b1), (h0, h1), (q0, q1), (k0, k1) = places
    g0, g1 = h0 * GROUPS // HEADS, h1 * GROUPS // HEADS
    if sinks is not None:  # of the first part of the keys alone
        sinks = sinks[h0:h1] if k0 == 0 else None
    return ff.scaled_dot_product_attention(
        query[b0:b1, h0:h1, q0:q1],
        key[b0:b1, g0:g1, k0:k1],
        value[b0:b1, g0:g1, k0:k1],
        part(attn_mask, places),
        bias=part(bias, places),
        key_lengths=None if key_lengths is None else key_lengths[b0:b1],
        alibi_slopes=None if alibi_slopes is None else alibi_slopes[h0:h1],
        sinks=sinks,
        enable_gqa=True,
        return_lse=True,
        shard=ff.Shard(b0, h0, q0, k0, HEADS, QUERIES, KEYS) if shard else None,
        **options,
    )


def sharded(
    query, key, value, attn_mask=None, bias=None, key_lengths=None, alibi_slopes=None,
    sinks=None, *, cut, shard=True, **options,
):  # fmt: skip
    """[B, H, Sq, Dv + 1]: the output and, as the last column, lse, computed in shards."""
    given = query, key, value, attn_mask, bias, key_lengths, alibi_slopes, sinks
    spans = [list(itertools.pairwise(cut[name])) for name in CUTS]

    def along(dim, places):
        if dim == 4:
            return of_one(*given, places, shard, **options)
        parts = [along(dim + 1, (*places, span)) for span in spans[dim]]
        if dim == 3:
            return merged(parts)
        return [torch.cat(x, dim) for x in zip(*parts)]

    output, lse = along(0, ())
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    return torch.cat([output, lse.unsqueeze(-1).to(output.dtype)], -1)


def whole(**given):
    return sharded(**given, shard=False)


OPTIONS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "bottom right": dict(is_causal=True, causal_alignment="bottom_right"),
    "lengths, causal": dict(key_lengths=True, is_causal=True),
    "lengths, bottom right, left": dict(
        key_lengths=True, causal_alignment="bottom_right", window=(20, None)
    ),
    "window, dropout": dict(window=(9, 11), dropout_p=0.3, dropout_seed=-9),
    "mask, alibi, sinks": dict(attn_mask=True, alibi_slopes=True, sinks=True),
    "key mask, alibi, bottom right": dict(
        key_mask=True, alibi_slopes=True, is_causal=True, causal_alignment="bottom_right"
    ),
    "bias, causal, dropout": dict(bias=True, is_causal=True, dropout_p=0.2, dropout_seed=5),
    "key bias, lengths, dropout": dict(
        key_bias=True, key_lengths=True, dropout_p=0.4, dropout_seed=2**62
    ),
    "softcap, window, sinks, dropout": dict(
        softcap=3.0, window=(30, 2), sinks=True, dropout_p=0.3, dropout_seed=1
    ),
}  # fmt: skip


def made(options, dtype=torch.float32, device="cpu", queries=QUERIES):
    """(tensors, constants) of a call."""
    torch.manual_seed(3)
    options = dict(options)

    def normal(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    tensors = dict(
        query=1.5 * normal(BATCH, HEADS, queries, 16),
        key=1.5 * normal(BATCH, GROUPS, KEYS, 16),
        value=normal(BATCH, GROUPS, KEYS, 16),
    )
    rows = (queries, KEYS)
    extras = dict(
        attn_mask=("attn_mask", lambda: normal(BATCH, 1, *rows) > -0.5),
        key_mask=("attn_mask", lambda: normal(BATCH, 1, 1, KEYS) > -0.5),
        bias=("bias", lambda: normal(HEADS, *rows)),
        key_bias=("bias", lambda: normal(BATCH, 1, 1, KEYS)),
        key_lengths=("key_lengths", lambda: torch.tensor([30, 0, 50], device=device)),
        sinks=("sinks", lambda: normal(HEADS)),
    )
    for option, (name, make) in extras.items():
        if options.pop(option, None):
            tensors[name] = make()
    if options.pop("alibi_slopes", None):
        options["alibi_slopes"] = 0.5 ** torch.arange(1.0, HEADS + 1, device=device)
    return tensors, options


@pytest.mark.parametrize("names", OPTIONS)
def test_shards_are_the_whole_in_float64(names):
    """Outputs and every gradient, of attention cut along each dimension and along all of them."""
    tensors, options = made(OPTIONS[names], torch.float64)
    inputs = {n: x.requires_grad_() for n, x in tensors.items() if x.is_floating_point()}
    cotangent = torch.randn(BATCH, HEADS, QUERIES, 17, dtype=torch.float64)
    want = whole(**tensors, cut=WHOLE, **options)
    grads = torch.autograd.grad(want, list(inputs.values()), cotangent)
    for cut in [*[WHOLE | {name: CUTS[name]} for name in CUTS], CUTS]:
        have = sharded(**tensors, cut=cut, **options)
        torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad(have, list(inputs.values()), cotangent)
        for name, x, y in zip(inputs, found, grads):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11, msg=name)


IN_TWO = {name: WHOLE | {"query": CUTS["query"], "key": CUTS["key"]} for name in OPTIONS}
IN_TWO["window, dropout"] = CUTS  # dropout, which depends on the head


@pytest.mark.parametrize("names", OPTIONS)
def test_kernels_of_shards(against_oracle, small_tiles, device, names):
    """The kernels, of shards of the queries and of the keys, against the same in float64."""
    tensors, options = made(OPTIONS[names], device=device)
    with small_tiles(16, 32), use_backend("triton"):
        against_oracle(sharded, tensors, cut=IN_TWO[names], **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_kernels_of_shards_in_16_bits(against_oracle, device, dtype):
    tensors, options = made(OPTIONS["bias, causal, dropout"], dtype, device)
    with use_backend("triton"):
        against_oracle(sharded, tensors, cut=IN_TWO["causal"], **options)


@pytest.mark.parametrize("names", ["bottom right", "lengths, bottom right, left", "key mask"])
def test_few_queries_of_shards(against_oracle, device, names):
    """The kernels that split the keys over programs, on shards of these."""
    tensors, options = made(OPTIONS.get(names, dict(key_mask=True, window=(20, 5))), device=device)
    tensors["query"] = tensors["query"][:, :, :3]
    splits = pytest.importorskip("fastformer.kernels.attention.launchers")
    with pytest.MonkeyPatch.context() as patch, use_backend("triton"):
        patch.setattr(splits, "splits_keys", lambda *_: True)
        cut = WHOLE | {"query": [0, 1, 3], "key": CUTS["key"]}
        against_oracle(sharded, tensors, cut=cut, **options)


def test_dropout_masks_of_shards(backend, device):
    """Bit for bit: the weights of uniform scores, which the identity as value shows."""
    query = torch.zeros(BATCH, HEADS, QUERIES, 8, device=device)
    key = torch.zeros(BATCH, HEADS, KEYS, 8, device=device)
    value = torch.eye(KEYS, device=device).expand(BATCH, HEADS, KEYS, KEYS)
    dropout = dict(dropout_p=0.3, dropout_seed=-77)
    with use_backend(backend):
        drop = ff.scaled_dot_product_attention(query, key, value, **dropout) == 0
        spans = [list(itertools.pairwise(x)) for x in CUTS.values()]
        for (b0, b1), (h0, h1), (q0, q1), (k0, k1) in itertools.product(*spans):
            out = ff.scaled_dot_product_attention(
                query[b0:b1, h0:h1, q0:q1], key[b0:b1, h0:h1, k0:k1], value[b0:b1, h0:h1, k0:k1],
                **dropout, shard=(b0, h0, q0, k0, HEADS, QUERIES, KEYS),
            )  # fmt: skip
            want = drop[b0:b1, h0:h1, q0:q1, k0:k1]
            assert torch.equal(out[..., k0:k1] == 0, want)
    assert 0.25 < drop.float().mean() < 0.35


def test_packed_batches_of_shards(backend, device):
    """Sharded over sequences and heads: outputs and gradients are those of the whole, bit for bit
    on the kernels."""
    torch.manual_seed(0)
    cu = torch.tensor([0, 20, 20, 37, 60], dtype=torch.int32, device=device)
    tensors = [torch.randn(60, HEADS, 16, device=device, requires_grad=True) for _ in range(3)]
    options = dict(dropout_p=0.4, dropout_seed=3, is_causal=True)
    bias, slopes = torch.randn(60, device=device), torch.rand(4, HEADS, device=device)
    with use_backend(backend):
        want = ff.packed_attention(
            *tensors, cu, cu, 23, 23, **options, bias=bias, alibi_slopes=slopes
        )
        parts = []
        for b0, b1 in ((0, 1), (1, 4)):
            of = slice(int(cu[b0]), int(cu[b1]))
            own = cu[b0 : b1 + 1] - cu[b0]
            heads = [
                ff.packed_attention(
                    *(x[of, h0 : h0 + 2] for x in tensors), own, own, 23, 23, **options,
                    bias=bias[of], alibi_slopes=slopes[b0:b1, h0 : h0 + 2],
                    shard=ff.Shard(batch=b0, head=h0, heads=HEADS),
                )
                for h0 in (0, 2)
            ]  # fmt: skip
            parts.append(torch.cat(heads, 1))
        have = torch.cat(parts)
        torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-6)
        cotangent = torch.randn_like(want)
        for x, y in zip(*(torch.autograd.grad(z, tensors, cotangent) for z in (have, want))):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_shards_in_small_tiles(against_oracle, small_tiles, device):
    pytest.importorskip("triton")
    with small_tiles(), use_backend("triton"):
        for names in ("lengths, causal", "bottom right", "bias, causal, dropout"):
            tensors, options = made(OPTIONS[names], device=device)
            cut = CUTS if "dropout" in names else IN_TWO[names]
            against_oracle(sharded, tensors, cut=cut, **options)


# -------------------------------------------------------------------------------------- rows

DROPOUT = dict(dropout_p=0.3, dropout_seed=-5)
BATCHES, LENGTH, WIDTH = 2, 48, 40  # two sequences; FEATURES below: a feed-forward's
ROWS = [  # (places in [batch, length], shard) that together are all rows, of a batch that is cut
    ((slice(0, 1), slice(0, 48)), (0, 0, 0)),
    ((slice(1, 2), slice(0, 48)), (48, 0, 0)),
]
RUNS = [  # and of sequences that are cut
    ((slice(0, 2), slice(0, 16)), (0, 0, 0, 16, 48)),
    ((slice(0, 2), slice(16, 48)), (16, 0, 0, 32, 48)),
]


def rows_in_parts(call, parts, x, *others):
    """The op on parts of the rows of x [2, 48, ..] and of tensors like it, put together."""
    out = None
    for place, shard in parts:
        y = call(*(t[place] for t in (x, *others)), shard=shard)
        out = y.new_zeros(BATCHES, LENGTH, y.shape[-1]) if out is None else out
        out = out.index_put(torch.meshgrid(*map(indices, place), indexing="ij"), y)
    return out


def indices(span):
    return torch.arange(span.start, span.stop)


def row_ops(device="cpu", dtype=torch.float32):
    """name: (function of tensors and parts, tensors)."""

    def normal(*shape, scale=1.0):
        return (scale * torch.randn(*shape, device=device)).to(dtype)

    def norm(op, *bias):
        def function(input, residual, weight, *, parts):
            def call(x, y, shard):
                given = DROPOUT | dict(dropout_seed=torch.tensor(-5, device=x.device))
                return torch.cat(op(x, y, weight, *bias, **given, shard=shard), -1)

            return rows_in_parts(call, parts, input, residual)

        return function

    def fed(op, **options):
        def function(input, w, b, w_2, *, parts):
            def call(x, shard):
                return op(x, w, b, w_2, None, **options, **DROPOUT, shard=shard)

            return rows_in_parts(call, parts, input)

        return function

    tokens = torch.randint(0, 7, (BATCHES, LENGTH), device=device)

    def embedded(weight, *, parts):
        def call(x, shard):
            return ff.embed(x, weight, None, **DROPOUT, shard=shard)

        return rows_in_parts(call, parts, tokens)

    x, y = normal(BATCHES, LENGTH, 20), normal(BATCHES, LENGTH, 20)
    summed = dict(input=x, residual=y, weight=normal(20))
    one = dict(input=x, w=normal(WIDTH, 20, scale=0.2), b=normal(WIDTH), w_2=normal(12, WIDTH))
    two = one | dict(w=normal(2 * WIDTH, 20, scale=0.2), b=normal(2 * WIDTH))
    return {
        "norm": (norm(ff.dropout_add_layer_norm, None), summed),
        "rms_norm": (norm(ff.dropout_add_rms_norm), summed),
        "relu": (fed(ff.feed_forward), one),
        "gelu": (fed(ff.feed_forward, activation="gelu"), one),
        "swiglu": (fed(ff.swiglu), two),
        "embed": (embedded, dict(weight=normal(7, 20))),
    }


ALL_ROWS = [((slice(0, BATCHES), slice(0, LENGTH)), None)]


@pytest.mark.parametrize("name", row_ops())
def test_shards_of_rows(against_oracle, small_tiles, device, name):
    """In float64 they are the whole, outputs and gradients; and the kernels are that."""
    torch.manual_seed(1)
    function, tensors = row_ops("cpu", torch.float64)[name]
    leaves = [x.requires_grad_() for x in tensors.values()]
    want = function(**tensors, parts=ALL_ROWS)
    cotangent = torch.randn_like(want)
    grads = torch.autograd.grad(want, leaves, cotangent)
    for parts in (ROWS, RUNS):
        have = function(**tensors, parts=parts)
        torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)
        for x, y in zip(torch.autograd.grad(have, leaves, cotangent), grads):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)
    function, tensors = row_ops(device)[name]
    have, want = (function(**tensors, parts=parts) for parts in (ROWS, ALL_ROWS))
    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
    with small_tiles(), use_backend("triton"):
        for parts in (ROWS, RUNS):
            against_oracle(function, tensors, parts=parts)


@pytest.mark.parametrize("op", ["feed_forward", "geglu", "embed"])
def test_shards_of_columns(backend, device, op):
    """Hidden units sum to the whole, and features stand beside each other, masks bit for bit."""
    torch.manual_seed(1)
    x = torch.randn(40, 8, device=device)
    w, w_2 = torch.randn(WIDTH, 8, device=device), torch.randn(4, WIDTH, device=device)
    tokens = torch.arange(40, device=device) % 7
    table = torch.rand(7, WIDTH, device=device) + 1
    with use_backend(backend):
        if op == "embed":
            want = ff.embed(tokens, table, None, **DROPOUT)
            parts = [
                ff.embed(tokens, table[:, a:b], None, **DROPOUT, shard=(0, a, WIDTH))
                for a, b in ((0, 20), (20, 40))
            ]
            assert torch.equal(torch.cat(parts, 1) == 0, want == 0)
            torch.testing.assert_close(torch.cat(parts, 1), want)
            return
        halves = 1 if op == "feed_forward" else 2
        w = torch.randn(halves, WIDTH, 8, device=device)
        call = getattr(ff, op)
        want = call(x, w.flatten(0, 1), None, w_2, None, **DROPOUT)
        have = sum(
            call(x, w[:, a:b].flatten(0, 1), None, w_2[:, a:b], None, **DROPOUT,
                 shard=ff.RowShard(0, a, WIDTH))
            for a, b in ((0, 16), (16, 32), (32, 40))
        )  # fmt: skip
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


def test_shards_of_rows_in_small_tiles(small_tiles, device):
    pytest.importorskip("triton")
    torch.manual_seed(2)
    with small_tiles(), use_backend("triton"):
        for name in ("norm", "swiglu"):
            function, tensors = row_ops(device)[name]
            want = function(**tensors, parts=ALL_ROWS)
            for parts in (ROWS, RUNS):
                torch.testing.assert_close(function(**tensors, parts=parts), want)
        for op in ("feed_forward", "embed"):
            test_shards_of_columns("triton", device, op)


# ------------------------------------------------------------------------------- elsewhere in torch


@pytest.mark.with_all
def test_shards_in_graphs(backend, device):
    """Under torch.compile, of any sizes: outputs and gradients are those of eager calls."""
    torch.manual_seed(4)
    query, key, value = (torch.randn(1, 2, 32, 8, device=device) for _ in range(3))
    w, w_2 = torch.randn(32, 8, device=device), torch.randn(8, 32, device=device)
    residual = torch.randn(1, 2, 32, 8, device=device)

    def model(q):
        out = ff.scaled_dot_product_attention(
            q, key, value, is_causal=True, **DROPOUT, shard=(1, 2, 32, 16, 8, 64, 64)
        )
        out = ff.feed_forward(out, w, None, w_2, None, **DROPOUT, shard=(32, 16, 64))
        return ff.dropout_add_layer_norm(
            out, residual, w[0, :8], None, **DROPOUT, shard=(5, 0, 8, 32, 64)
        )[0]

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    results = []
    for call in (model, compiled):
        q = query.clone().requires_grad_()
        out = call(q)
        results.append((out, *torch.autograd.grad(out.square().sum(), q)))
    for x, y in zip(*results):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_second_derivatives_of_shards(device):
    """They go through the reference, with the same shard."""
    results = []
    for backend in ("reference", "triton"):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(1, 2, 16, 8, generator=generator, dtype=torch.float64).to(device)
        x.requires_grad_()
        with use_backend(backend):
            out = ff.scaled_dot_product_attention(
                x, x, x, is_causal=True, **DROPOUT, shard=(0, 2, 16, 0, 4, 32, 32)
            )
            rows = dict(**DROPOUT, shard=(7, 0, 8))
            out, _ = ff.dropout_add_layer_norm(out, out, x[0, 0, 0], None, **rows)
            (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            results.append(torch.autograd.grad(grad.square().sum(), x)[0])
    error = (results[0] - results[1]).norm() / results[0].norm()
    assert error < 1e-6


@pytest.mark.parametrize(
    "shard, words",
    [
        ((0, 0, 0), "expected Shard"),
        ("0000000", "expected Shard"),
        ((0, 0, 0, 0, 0, 0, 1.0), "shard.keys is a float"),
        ((0, -1, 0, 0, 0, 0, 0), "shard.head is -1"),
        ((0, 1, 0, 0, 0, 0, 0), r"heads 1 .. 2; expected its 2 heads within the global 2"),
        ((0, 0, 0, 16, 0, 0, 20), r"keys 16 .. 31; expected its 16 keys within the global 20"),
        ((0, 0, 8, 0, 0, 64, 0), "query 8 and key 0; with dropout, expected multiples of 16"),
        ((0, 0, 0, 8, 0, 0, 64), "query 0 and key 8; with dropout, expected multiples of 16"),
    ],
)
def test_wrong_shards(shard, words):
    x = torch.zeros(1, 2, 16, 8)
    with pytest.raises((TypeError, ValueError), match=words):
        ff.scaled_dot_product_attention(x, x, x, **DROPOUT, shard=shard)


@pytest.mark.parametrize(
    "shard, words",
    [
        ((0, 0), "expected RowShard"),
        ((0, 0, 0, 0, 0, 0), "expected RowShard"),
        ((0, True, 0), "shard.column is a bool"),
        ((0, 16, 40), r"columns 16 .. 47; expected its 32 columns within the global 40"),
        ((0, 0, 0, 16, 8), "run 16 and sequence 8, for 32 rows"),
        ((0, 0, 0, 12, 24), "run 12 and sequence 24, for 32 rows"),
        ((0, 0, 0, 0, 24), "run 0 and sequence 24"),
        ((8, 0, 0), "row 8, .* expected multiples of 16 rows and 16 columns"),
        ((0, 8, 64), "column 8"),
    ],
)
def test_wrong_shards_of_rows(shard, words):
    x, w = torch.zeros(32, 8), torch.zeros(32, 8)
    with pytest.raises((TypeError, ValueError), match=words):
        ff.feed_forward(x, w, None, w.t(), None, **DROPOUT, shard=shard)
    with pytest.raises(ValueError, match="shard has rows of 16; expected all 8 features"):
        ff.dropout_add_layer_norm(x, x, w[0], None, **DROPOUT, shard=(0, 0, 16, 16, 32))
    with pytest.raises(ValueError, match="packed batch are complete"):
        cu = torch.tensor([0, 32], dtype=torch.int32)
        ff.packed_attention(*[x.view(32, 1, 8)] * 3, cu, cu, 32, 32, shard=(0, 0, 16, 0, 0, 64, 0))
