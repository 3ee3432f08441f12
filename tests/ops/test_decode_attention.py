"""Attention of few queries to many keys, against the formula in float64."""

import itertools

import pytest
import torch
from policy import check_output

import fastformer as ff
from fastformer import use_backend

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def split(monkeypatch):
    """The calls that the kernels of decode.py have computed, as their plans."""
    launchers = pytest.importorskip("fastformer.kernels.attention.launchers")
    plans, forward = [], launchers.DecodePlan.forward

    def seen(self, *pointers):
        plans.append(self)
        return forward(self, *pointers)

    monkeypatch.setattr(launchers.DecodePlan, "forward", seen)
    with use_backend("triton"):
        yield plans


def qkv(batch, heads, groups, queries, keys, dim=16, dv=None, device="cpu", dtype=torch.float32):
    shapes = (heads, queries, dim), (groups, keys, dim), (groups, keys, dv or dim)
    tensors = [torch.randn(batch, *shape, device=device) for shape in shapes]
    return {name: (x * 1.5).to(dtype) for name, x in zip(("query", "key", "value"), tensors)}


def options_of(names, tensors):
    """Options of a call, by name."""
    query, keys = tensors["query"], tensors["key"].shape[2]
    batch, heads, queries, _ = query.shape
    device, dtype = query.device, query.dtype

    def normal(*shape, kind=torch.float32):
        return torch.randn(shape, device=device).to(kind)

    lengths = torch.tensor([keys - 9, 0, 1, keys, 5][:batch], device=device)
    late = dict(causal_alignment="bottom_right")
    made = {
        "causal": dict(is_causal=True),
        "bottom right": dict(is_causal=True, **late),
        "lengths": dict(key_lengths=lengths),
        "window": dict(window=(70, 20), **late),
        "left": dict(window=(100, None), **late),
        "key mask": dict(attn_mask=normal(batch, 1, 1, keys) > 0),
        "mask": dict(attn_mask=normal(1, heads, queries, keys) > 0),
        "key bias": dict(bias=normal(batch, 1, 1, keys)),
        "head bias": dict(bias=normal(heads, 1, keys, kind=dtype)),
        "bias": dict(bias=normal(heads, queries, keys, kind=dtype)),
        "alibi": dict(alibi_slopes=0.5 ** torch.arange(1.0, heads + 1, device=device)),
        "softcap": dict(softcap=3.0),
        "sinks": dict(sinks=normal(heads)),
        "lse": dict(return_lse=True),
        "scale": dict(scale=-0.4),
    }
    given = dict(enable_gqa=True)
    for name in names.split(", "):
        given |= made[name]
    return given


def check(tensors, options):
    """The numerics policy for a call without gradients: against float64, in 16 bits with at most
    twice the error of eager PyTorch.
    """

    def results(kind):
        moved = {n: x.to(kind) if n in (*tensors, "bias") else x for n, x in given.items()}
        found = ff.scaled_dot_product_attention(**moved)
        return found if isinstance(found, tuple) else (found,)

    given, dtype = tensors | options, tensors["query"].dtype
    have = results(dtype)
    with use_backend("reference"), ff.dispatch.state.use_formula():
        eager = results(dtype)
        wide = results(torch.float64)
    for x, want, peer in zip(have, wide, eager, strict=True):
        nothing = want == -torch.inf
        assert ((x == -torch.inf) == nothing).all()
        check_output(*(y.masked_fill(nothing, 0.0) for y in (x, want, peer)), dtype)


# (B, H, G, Sq, Sk, D, Dv)
SHAPES = [
    (1, 1, 1, 1, 256, 16, 16),
    (3, 4, 2, 1, 300, 64, 64),
    (2, 4, 1, 5, 333, 32, 24),
    (5, 2, 2, 16, 257, 40, 80),
    (1, 16, 1, 3, 400, 128, 128),
    (1, 3, 3, 2, 290, 256, 256),
]


@pytest.mark.sample
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(split, device, shape, dtype):
    tensors = qkv(*shape, device=device, dtype=dtype)
    check(tensors, options_of("lse", tensors))
    assert len(split) == 1


OPTIONS = [
    "causal",
    "bottom right, lse",
    "lengths, lse",
    "bottom right, lengths, sinks, lse",
    "window, lse",
    "left, lengths",
    "key mask, lse",
    "mask, causal, lse",
    "key bias, lse, sinks",
    "head bias, lengths",
    "bias, key mask, bottom right, lse",
    "alibi, bottom right, lse",
    "softcap, key mask",
    "scale, lse",
    "mask, bias, lengths, alibi, softcap, sinks, window, lse",
]


@pytest.mark.sample
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("names", OPTIONS)
def test_options(split, device, names, queries):
    tensors = qkv(4, 4, 2, queries, 270, device=device)
    check(tensors, options_of(names, tensors))
    assert len(split) == 1


def test_which_calls_split_their_keys(split, device):
    """By their shape alone, whether gradients are wanted or not; `explain` says so."""
    for queries, keys, p, taken in (
        (16, 256, 0.0, True),
        (1, 4096, 0.0, True),
        (17, 256, 0.0, False),
        (16, 255, 0.0, False),
        (16, 256, 0.1, False),
    ):
        call = qkv(1, 1, 1, queries, keys, device=device) | dict(dropout_p=p, dropout_seed=1)
        split.clear()
        ff.scaled_dot_product_attention(**call)
        why = ff.explain("scaled_dot_product_attention", **call).reason
        assert bool(split) == ("split over programs" in why) == taken, (queries, keys, p)
    split.clear()
    tokens = torch.zeros(16, 1, 16, device=device), *[torch.zeros(256, 1, 16, device=device)] * 2
    ends = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (16, 256)]
    assert "split" not in ff.explain("packed_attention", *tokens, *ends, 16, 256).reason
    ff.packed_attention(*tokens, *ends, 16, 256)
    assert not split


@pytest.mark.parametrize("processors", [1, 8, 132])
def test_parts(processors):
    """Two programs for each multiprocessor wherever there are keys for them; a part is never
    empty, and the parts take no more time than the fewest that fill the GPU.
    """
    configurations = pytest.importorskip("fastformer.kernels.attention.configurations")
    shipped = configurations.AttentionTiles(64, 64, 4, 3)
    sizes = itertools.product((1, 2, 8, 32, 500), (1, 16, 70), (256, 4096, 100_000))
    for heads, rows, keys in sizes:
        tiles = configurations.narrowed(shipped, rows, keys, heads, processors)
        assert 16 <= tiles.BM <= 64 and 16 <= tiles.BN <= 64
        assert min(rows, 64) <= tiles.BM and tiles[2:] == shipped[2:]
        programs, count = heads * -(-rows // tiles.BM), -(-keys // tiles.BN)
        parts = configurations.parts_of_keys(count, programs, processors)
        assert 1 <= parts <= count
        full = programs * parts >= 2 * processors
        assert full or (parts == count and tiles.BN == 16)
        least = min(count, -(-2 * processors // programs))
        time, of_least = (
            -(-programs * n // (2 * processors)) * -(-count // n) for n in (parts, least)
        )
        assert time <= of_least and least <= parts <= 2 * least
        wider = tiles._replace(BN=min(64, tiles.BN * 2))
        assert wider == tiles or programs * -(-keys // wider.BN) < 2 * processors
    assert configurations.parts_of_keys(0, 0, processors) == 1


GRADIENTS = ["bottom right, lengths", "key bias, sinks, key mask", "bias, alibi, softcap"]


@pytest.mark.parametrize("names", GRADIENTS)
def test_gradients(split, device, against_oracle, names):
    """The backward takes the output, lse and statistics of the merge."""
    tensors = qkv(2, 4, 2, 3, 260, device=device)
    options = options_of(names, tensors)
    for name in ("bias", "sinks"):
        if name in options:
            tensors[name] = options.pop(name)
    against_oracle(ff.scaled_dot_product_attention, tensors, **options)
    assert len(split) == 1


@pytest.mark.parametrize("large", [-1e9, 1e9])
def test_large_scores(split, device, against_oracle, large):
    """lse has no digits left for the sum: the backward reads the maximum and the log-sum apart."""
    tensors = qkv(1, 2, 2, 3, 300, device=device)
    tensors["query"] *= 0  # a score beside the bias would lose its digits
    bias = torch.zeros(1, 1, 1, 300, device=device) + large
    against_oracle(ff.scaled_dot_product_attention, tensors, bias=bias)
    assert len(split) == 1


def test_hidden_keys_may_hold_anything(split, device):
    """Past the length, or masked out for all queries: NaN there reaches nothing."""
    clean = qkv(2, 4, 2, 2, 300, device=device)
    lengths = torch.tensor([270, 33], device=device)
    inside = torch.arange(300, device=device) < lengths.view(-1, 1, 1, 1)
    heads = torch.rand(1, 4, 1, 300, device=device) > 0.5  # of one head of a group, not the other
    bias = torch.zeros(heads.shape, device=device).masked_fill(~heads, -torch.inf)
    minus = torch.zeros(inside.shape, device=device).masked_fill(~inside, -torch.inf)

    def results(hidden, **options):
        """Of clean keys and values, and of those that hold NaN where they are hidden."""
        dirty = {n: x if n == "query" else x.masked_fill(hidden.mT, torch.nan)
                 for n, x in clean.items()}  # fmt: skip
        attend = ff.scaled_dot_product_attention
        return [attend(**x, enable_gqa=True, **options) for x in (clean, dirty)]

    for options in dict(key_lengths=lengths), dict(attn_mask=inside), dict(bias=minus):
        assert torch.equal(*results(~inside, **options)), options.keys()
    hidden = ~heads[:, 0::2] | ~heads[:, 1::2]  # from a head of the group
    one = hidden & (heads[:, 0::2] | heads[:, 1::2])  # and seen by the other
    for options in (dict(attn_mask=heads), dict(bias=bias)):
        want, have = results(hidden, **options)
        sees = (heads & one.repeat_interleave(2, 1)).any(-1, keepdim=True).expand_as(have)
        assert sees.any() and have.isnan()[sees].all()
        assert torch.equal(have[~sees], want[~sees])


@pytest.mark.parametrize("place", ["query", "key", "value", "bias", "sinks"])
def test_nan_arrives(split, device, place):
    """In the rows that see it, and nowhere else."""
    tensors = qkv(2, 4, 2, 3, 300, device=device)
    tensors |= dict(bias=torch.zeros(1, 1, 3, 300, device=device), sinks=torch.zeros(4).to(device))
    where = dict(query=(1, 2, 1), key=(1, 1, 299), value=(1, 1, 0), bias=(0, 0, 1, 7), sinks=2)
    tensors[place][where[place]] = torch.nan
    options = dict(enable_gqa=True, return_lse=True)
    out, lse = ff.scaled_dot_product_attention(**tensors, **options)
    seen = dict(
        query=(1, 2, 1), key=(1, slice(2, 4)), value=(1, slice(2, 4)), bias=(..., 1),
        sinks=(slice(None), 2),
    )[place]  # fmt: skip
    want = torch.zeros(lse.shape, dtype=torch.bool, device=device)
    want[seen] = True
    assert torch.equal(out.isnan().all(-1), want) and torch.equal(out.isnan().any(-1), want)
    assert torch.equal(lse.isnan(), want if place != "value" else want & False)


def test_rows_of_a_batch_are_independent(split, device):
    """Bit for bit; and each call gives the same."""
    tensors = qkv(3, 4, 2, 2, 300, device=device, dtype=torch.bfloat16)
    lengths = torch.tensor([300, 130, 0], device=device)
    options = dict(enable_gqa=True, return_lse=True, is_causal=True)
    options["causal_alignment"] = "bottom_right"
    out, lse = ff.scaled_dot_product_attention(**tensors, key_lengths=lengths, **options)
    again = ff.scaled_dot_product_attention(**tensors, key_lengths=lengths, **options)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    assert out[2].eq(0).all() and lse[2].eq(-torch.inf).all()
    other = {n: torch.cat([x[:1], torch.randn_like(x[1:])]) for n, x in tensors.items()}
    moved = ff.scaled_dot_product_attention(**other, key_lengths=lengths * 0 + 300, **options)
    assert torch.equal(out[0], moved[0][0]) and torch.equal(lse[0], moved[1][0])


def test_strided_inputs(split, device):
    """As a projection leaves them, and with steps between the features."""
    tensors = qkv(2, 4, 2, 3, 290, 24, device=device)
    want, lse = ff.scaled_dot_product_attention(**tensors, enable_gqa=True, return_lse=True)
    swapped = {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in tensors.items()}
    have = ff.scaled_dot_product_attention(**swapped, enable_gqa=True, return_lse=True)
    assert torch.equal(have[0], want) and torch.equal(have[1], lse)
    assert have[0].stride(1) < have[0].stride(2)
    stepped = {n: x.repeat_interleave(2, -1)[..., ::2] for n, x in tensors.items()}
    assert torch.equal(ff.scaled_dot_product_attention(**stepped, enable_gqa=True), want)


FAR = itertools.product(("query", "key", "value"), (0, 1, 2))


@pytest.mark.parametrize("name, dim", [*FAR, ("attn_mask", 2), ("bias", 2)])
def test_strides_past_int32(split, device, spread, name, dim):
    """The last sequence, head, query or key begins past 2^31 elements, where none has as many. For
    the rows of a tensor, 32 bits then do not hold where they lie.
    """
    tensors = qkv(3, 6, 3, 3, 256, 16, device=device, dtype=torch.bfloat16)
    added = torch.randn(1, 1, 3, 256, device=device)
    tensors |= {"attn_mask": added > 0, "bias": added.bfloat16()}
    near, far = (
        ff.scaled_dot_product_attention(**x, enable_gqa=True)
        for x in (tensors, tensors | {name: spread(tensors[name], dim)})
    )
    assert torch.equal(near, far)
    assert [plan.tile.wide for plan in split] == [False, dim == 2]


@pytest.mark.parametrize("window, keys", [((700, 0), 702), ((30, 5), 37), ((None, 0), 2048)])
def test_a_window_bounds_the_keys_that_are_cut(split, device, window, keys):
    tensors = qkv(1, 1, 1, 2, 2048, device=device)
    check(tensors, dict(causal_alignment="bottom_right", window=window))
    assert split[0].keys() == keys


@pytest.mark.parametrize(
    "heads, window, alignment",
    [(1, (5, 0), "bottom_right"), (1, (5, 9), "top_left"), (16, (40, None), "bottom_right")],
)
def test_a_window_of_each_query(split, device, heads, window, alignment):
    """A tile begins where its first query sees a key; heads of a group are rows of a query."""
    tensors = qkv(1, heads, 1, 16, 256 if heads == 1 else 700, device=device)
    check(tensors, dict(window=window, causal_alignment=alignment, enable_gqa=True))
    assert split


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_numbers_of_16_bits_are_not_rounded_again(split, device, name, queries):
    """They are what the same numbers in float32 are."""
    tensors = qkv(2, 4, 2, queries, 256, device=device, dtype=torch.bfloat16)
    given = torch.tensor([1.3, -2.7, 4.1, 6.9], device=device).bfloat16()
    tensors |= dict(enable_gqa=True, return_lse=True)
    numbers = {name: given}, {name: given.float()}
    assert all(
        map(torch.equal, *(ff.scaled_dot_product_attention(**tensors, **x) for x in numbers))
    )


def test_parts_beyond_the_band_are_skipped(split, device, work):
    """A window and lengths bound the tiles that are multiplied, two products for each."""
    tensors = qkv(1, 1, 1, 1, 2048, device=device)
    options = dict(causal_alignment="bottom_right", window=(31, 0))
    lengths = torch.tensor([1500], device=device)

    def products(**options):
        return work(lambda: ff.scaled_dot_product_attention(**tensors, **options)).products

    for given, first, last in (
        ({}, 0, 2048),
        (dict(key_lengths=lengths), 0, 1500),
        (dict(key_lengths=lengths, **options), 1500 - 32, 1500),
    ):
        found, columns = products(**given), split[-1].tiles("decode").BN
        assert found == 2 * (-(-last // columns) - first // columns)


@pytest.mark.parametrize("first", [0, 1000])
def test_many_parts(split, device, monkeypatch, first):
    """More than the merge reads at a time, the largest score in the first or in the last."""
    plan = pytest.importorskip("fastformer.kernels.attention.plan")
    monkeypatch.setattr(plan, "processors", lambda device: 20)
    tensors = qkv(1, 2, 1, 1, 1024, device=device)
    tensors["key"][0, 0, first] = 200 * tensors["query"][0, 1, 0]
    check(tensors, dict(enable_gqa=True, return_lse=True))
    assert split[0].partial[0][1] > 32


def test_heads_share_their_tiles(split, device):
    """Unless a mask or a bias of the keys is another one for each head."""
    tensors = qkv(2, 4, 2, 3, 300, device=device)
    of_all, of_heads = (torch.rand(2, n, 1, 300, device=device) > 0.1 for n in (1, 4))
    rows = []
    for options in (
        {},
        dict(attn_mask=of_all),
        dict(attn_mask=of_heads),
        dict(bias=of_all.float()),
        dict(bias=of_heads.float()),
        dict(bias=of_heads.float().expand(2, 4, 3, 300).contiguous()),
    ):
        ff.scaled_dot_product_attention(**tensors, **options, enable_gqa=True)
        rows.append((split[-1].tile_rows, split[-1].batch_heads))
    assert rows == [(6, 4), (6, 4), (3, 8), (6, 4), (3, 8), (6, 4)]


def test_parts_without_keys_write_nothing(split, device):
    """What they leave in memory is not read: here NaN, with which torch fills it on request."""
    tensors = qkv(2, 2, 1, 2, 2000, device=device)
    options = dict(enable_gqa=True, key_lengths=torch.tensor([40, 0], device=device))
    want = ff.scaled_dot_product_attention(**tensors, **options)
    torch.use_deterministic_algorithms(True)
    try:
        have = ff.scaled_dot_product_attention(**tensors, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert split[0].partial[0][1] > 1 and torch.equal(have, want) and have.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 2, 2, 1), (2, 0, 0, 1), (2, 2, 2, 0)], ids=str)
def test_no_queries(backend, device, shape):
    batch, heads, _, queries = shape
    tensors = qkv(*shape, 300, device=device)
    out, lse = ff.scaled_dot_product_attention(**tensors, return_lse=True)
    assert out.shape == (batch, heads, queries, 16) and lse.shape == out.shape[:3]


def test_copies_ahead(split, device):
    """A loop that may have to run again would copy nothing ahead."""
    tensors = qkv(1, 2, 1, 2, 700, device=device)
    mask = torch.rand(1, 1, 1, 700, device=device) > 0.5
    ff.scaled_dot_product_attention(**tensors, enable_gqa=True, attn_mask=mask)
    assert not split[0].tile.recompute_masked


@pytest.mark.gpu
def test_in_a_graph(device):
    """The launches follow from the shapes: a captured call takes the lengths of its replay."""
    tensors = qkv(2, 8, 2, 1, 900, device=device)
    tensors["key_lengths"] = torch.tensor([900, 300], device=device)
    ff.scaled_dot_product_attention(**tensors, enable_gqa=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ff.scaled_dot_product_attention(**tensors, enable_gqa=True)
    for lengths in ([900, 300], [1, 0], [64, 299]):
        tensors["key_lengths"].copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, ff.scaled_dot_product_attention(**tensors, enable_gqa=True))
