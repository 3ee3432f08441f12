"""The kernels with block masks: which tiles they visit, and results in tiles of other sizes."""

import pytest
import torch
from test_block_mask import attend, inputs

import fastformer as ff
from fastformer import eager, use_backend

pytest.importorskip("fastformer.kernels.attention.plan")

N = 450


def often(names, *chosen):
    """The chosen cases; the others are marked with_all."""
    marks = {name: [] if name in chosen else [pytest.mark.with_all] for name in names}
    return [pytest.param(name, marks=marks[name], id=name) for name in names]


def patterns():
    """Masks [N, N] by name, with and without holes."""
    i, j = torch.arange(N)[:, None], torch.arange(N)
    causal, distance, row, column = j <= i, (i - j).abs(), i // 64, j // 64
    generator = torch.Generator().manual_seed(3)

    def documents(*starts):
        document = torch.bucketize(torch.arange(N), torch.tensor(starts), right=True)
        return document[:, None] == document

    def tree(parents):
        above = torch.eye(len(parents) + 1, dtype=torch.bool)
        for node, parent in enumerate(parents, 1):
            above[node] |= above[parent]
        return causal & above[i // 16, j // 16]

    def blocks(share):
        return (torch.rand(8, 8, generator=generator) < share)[row, column]

    drawn = [int(torch.randint(max(0, n - 6), n, (), generator=generator)) for n in range(1, 29)]
    found = {
        "causal": causal,
        "documents": causal & documents(90, 100, 300),
        "documents, both ways": documents(90, 100, 300),
        "documents of a tile": documents(128, 256, 384),
        "documents of 64, causal": causal & documents(*range(64, N, 64)),
        "one long document": documents(1, N - 1),
        "short documents": documents(*range(7, N, 7)),
        "prefix": causal | (j < 200),
        "short prefix": causal | (j < 1),
        "prefix of whole tiles": causal | (j < 256),
        "documents and prefix": documents(90, 300) & (causal | (j < 200)),
        "padding": j < 300,
        "padding at a tile": j < 320,
        "padding on the left": j >= 200,
        "much padding on the left": j >= N - 5,
        "window": causal & (i - j < 70),
        "wide window": causal & (i - j < 200),
        "narrow window": causal & (i - j < 2),
        "window, both ways": distance <= 30,
        "wide window, both ways": distance <= 150,
        "dilated window": (distance <= 100) & (distance % 3 == 0),
        "window to the right": (j >= i) & (j - i <= 90),
        "Longformer": (distance <= 30) | (i < 3) | (j < 3),
        "Longformer, a token in the middle": (distance <= 30) | (i == 222) | (j == 222),
        "Longformer, causal": causal & ((distance <= 64) | (i < 64) | (j < 64)),
        "BigBird": (distance <= 30) | (i < 64) | (j < 64) | blocks(0.3),
        "BigBird, few blocks": (distance <= 64) | (i < 2) | (j < 2) | blocks(0.1),
        "BigBird, causal": causal & ((distance <= 30) | (j < 64) | blocks(0.3)),
        "sinks and window": causal & ((i - j < 40) | (j < 4)),
        "a sink and window": causal & ((i - j < 130) | (j < 1)),
        "sinks of a tile and window": causal & ((i - j < 64) | (j < 64)),
        "tree": tree(drawn),
        "binary tree": tree([(n - 1) // 2 for n in range(1, 29)]),
        "star": tree([0] * 28),
        "blocks": blocks(0.3),
        "few blocks": blocks(0.05),
        "blocks, causal": causal & blocks(0.3),
        "both ends": (j < 64) | (j >= 400),
        "both ends of all": ((j < 30) | (j >= N - 30)) & ((i < 200) | (i >= 260)),
        "every other 64 keys": column % 2 == 0,
        "elements": torch.rand(N, N, generator=generator) < 0.3,
        "none": j < 0,
    }
    return {name: mask.expand(N, N) for name, mask in found.items()}


PATTERNS = patterns()


@pytest.mark.all_cases
@pytest.mark.parametrize("name", often(PATTERNS, "documents", "sinks and window", "few blocks"))
def test_masks(work, against_oracle, name):
    """The tiles that are visited are those of which an element is seen, forward and backward, and
    only of those that are partly seen the bits are read. Results and gradients are those of the
    tensor in float64, with the same dropout.
    """
    mask = PATTERNS[name]
    tiles = torch.zeros(512, 512, dtype=torch.bool)
    tiles[:N, :N] = mask
    seen = int(tiles.view(4, 128, 8, 64).any(3).any(1).sum())
    block, counts = ff.block_mask(mask), []
    slots = block.slots()
    whole, part = int((slots == 1).sum()), int((slots > 1).sum())
    assert seen == whole + part

    def call(**x):
        if eager.formula.always:
            return ff.scaled_dot_product_attention(**x, attn_mask=mask, **OPTIONS["dropout"])
        out, options = [], OPTIONS["dropout"] | dict(attn_mask=block)
        found = work(lambda: out.append(ff.scaled_dot_product_attention(**x, **options)))
        counts.append((found, found.products, found.launches, found.unmasked))
        return out[0]

    with use_backend("triton"):
        tensors = inputs("cpu", b=1, h=1, sq=N, sk=N)
        against_oracle(call, tensors, only_zeros=not mask.any())
    found, products, launches, unmasked = counts[-1]
    assert (products, launches) == (2 * seen, 1)
    listed = int(block.spans[0, 0, :4, 3].sum())
    # Of each program five numbers of its spans, the queries and the seed. Of a whole tile keys and
    # values, and its place if it is in a list; of a part also its slot, and two words a query.
    assert unmasked == 4 * 7 + 2 * whole + listed + 3 * part
    assert found.products - products == 3 * seen + 4 * seen


def given_as(kind, mask):
    """The mask as an option of attention."""
    if kind == "blocks":
        return dict(attn_mask=ff.block_mask(mask))
    if kind == "numbers":
        return dict(bias=torch.zeros(N, N).masked_fill(~mask, -float("inf")))
    return dict(attn_mask=mask.contiguous() if kind == "tensor" else mask)  # one row may be all


ALSO = "padding at a tile", "BigBird", "both ends"


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=marks)
        for n, name in enumerate(PATTERNS)
        for k, kind in enumerate(("tensor", "expanded tensor", "numbers"))
        for marks in [
            [] if name in ALSO else pytest.mark.with_slow if (n + k) % 3 else pytest.mark.with_all
        ]
    ],
)
def test_tensors(work, tiles, against_oracle, kind, name):
    """A tensor in place of a block mask: the tiles that are visited are the same. With --all each
    mask is given in one way, with --slow in every.
    """
    tiles(128, 64)
    mask, counts = PATTERNS[name], []
    seen = int(ff.block_mask(mask).slots().gt(0).sum())
    options = OPTIONS["dropout"] | given_as(kind, mask)

    def call(**x):
        if eager.formula.always:
            return ff.scaled_dot_product_attention(**x, attn_mask=mask, **OPTIONS["dropout"])
        out = []
        found = work(lambda: out.append(ff.scaled_dot_product_attention(**x, **options)))
        counts.append((found, found.products))
        return out[0]

    with use_backend("triton"):
        tensors = inputs("cpu", b=1, h=2, sq=N, sk=N)
        against_oracle(call, tensors, only_zeros=not mask.any())
    found, products = counts[-1]
    assert (products, found.products - products) == (2 * 2 * seen, 2 * 7 * seen)


@pytest.mark.parametrize("kind", ["blocks", "tensor", "numbers"])
@pytest.mark.parametrize("left, right, length", [(170, 0, 390), (None, 0, N), (None, None, 390)])
@pytest.mark.parametrize("name", ["documents", "Longformer", "BigBird", "both ends", "none"])
def test_tiles_that_a_band_and_lengths_leave(work, tiles, name, left, right, length, kind):
    """Of those that the mask shows, the ones within them."""
    tiles(128, 64)
    mask, i, j = PATTERNS[name], torch.arange(N)[:, None], torch.arange(N)
    band = (j <= i + (N if right is None else right)) & (j >= i - (left or N)) & (j < length)
    reached = torch.zeros(2, 512, 512, dtype=torch.bool)
    reached[0, :N, :N], reached[1, :N, :N] = mask, band
    seen, within = reached.view(2, 4, 128, 8, 64).any(4).any(2)
    options = {} if length == N else dict(key_lengths=torch.tensor([length]))
    options |= {} if right is None else dict(window=(left, right))
    x, out = [torch.randn(1, 2, N, 16, requires_grad=True) for _ in range(3)], []
    options |= given_as(kind, mask)
    visited = 2 * int((seen & within).sum())
    with use_backend("triton"):
        found = work(lambda: out.append(ff.scaled_dot_product_attention(*x, **options)))
        assert found.products == 2 * visited
        assert work(out[0].sum().backward).products == 7 * visited


@pytest.mark.parametrize("name", ["documents", "Longformer", "BigBird", "blocks", "both ends"])
def test_tiles_that_documents_leave(work, name):
    """Of those that the mask of a packed batch shows, the ones within its documents."""
    starts, mask = torch.tensor([0, 90, 90, 100, 300, N]), PATTERNS[name]
    document = torch.bucketize(torch.arange(N), starts[1:-1], right=True)
    reached = torch.zeros(2, 512, 512, dtype=torch.bool)
    reached[0, :N, :N], reached[1, :N, :N] = mask, document[:, None] == document
    shown, within = reached.view(2, 4, 128, 8, 64).any(4).any(2)
    x, out = [torch.randn(N, 1, 16, requires_grad=True) for _ in range(3)], []
    options = dict(attn_mask=ff.block_mask(mask), dropout_p=0.3, dropout_seed=5)
    given, visited = [starts.int()] * 2 + [210] * 2, int((shown & within).sum())
    with use_backend("triton"):
        found = work(lambda: out.append(ff.packed_attention(*x, *given, **options)))
        assert found.products == 2 * visited
        assert work(out[0].sum().backward).products == 7 * visited


OPTIONS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "window from below": dict(window=(150, 10), causal_alignment="bottom_right"),
    "lengths": dict(key_lengths=torch.tensor([420, 131])),
    "lengths, causal, dropout": dict(
        key_lengths=torch.tensor([420, 131]), is_causal=True, dropout_p=0.3, dropout_seed=5
    ),
    "window to the left": dict(window=(90, None), softcap=3.0),
    "dropout": dict(dropout_p=0.3, dropout_seed=5),
}


@pytest.mark.sample
@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("name", ["BigBird", "both ends", "prefix", "sinks and window"])
@pytest.mark.parametrize("blocks", [(128, 64), (64, 32), (32, 64), (128, 16)], ids=str)
def test_tiles_of_other_sizes(against_oracle, tiles, blocks, name, case):
    """A tile of a kernel is a part of a tile of the mask; a band and lengths cut both."""
    tiles(*blocks)
    mask = PATTERNS[name][:333, :420]
    with use_backend("triton"):
        against_oracle(attend(mask), inputs("cpu", sq=333, sk=420, h=1), **OPTIONS[case])


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
def test_views_of_heads_that_share_keys(against_oracle, kind):
    """Queries, keys and values that lie side by side, with a mask of each head."""
    names = "BigBird", "documents", "none", "every other 64 keys"
    mask = torch.stack([PATTERNS[name][:200, :200] for name in names])
    projected = torch.randn(2, 200, 8, 24).to(kind).transpose(1, 2)
    tensors = dict(zip(("query", "key", "value"), projected.split([4, 2, 2], 1)))
    tensors |= dict(bias=torch.randn(1, 4, 200, 200).to(kind), sinks=torch.randn(4))
    options = dict(enable_gqa=True, dropout_p=0.2, dropout_seed=7)
    with use_backend("triton"):
        against_oracle(attend(mask), tensors, **options)


@pytest.mark.parametrize("case", ["plain", "causal", "dropout"])
def test_wide_heads(against_oracle, case):
    """Those of more than 128 have one loop over the queries of a tile of keys. Beside dropout they
    have the tensor.
    """
    given, mask = inputs("cpu", b=1, h=1, sq=300, sk=333, d=136), PATTERNS["window"][:300, :333]
    with use_backend("triton"):
        against_oracle(attend(mask), given, **OPTIONS[case])
        block = dict(attn_mask=ff.block_mask(mask))
        said = ff.explain("scaled_dot_product_attention", **given, **block, **OPTIONS[case]).reason
    assert ("only tiles that the mask shows are visited" in said) == (case != "dropout")


def test_results_repeat():
    """A second call has the same bits, and dropout has those of the dense mask."""
    x = [torch.randn(1, 2, N, 16, requires_grad=True) for _ in range(3)]
    mask, results = PATTERNS["BigBird"], []
    options = dict(dropout_p=0.4, dropout_seed=3)
    with use_backend("triton"):
        for given in (ff.block_mask(mask), ff.block_mask(mask), mask):
            out = ff.scaled_dot_product_attention(*x, given, **options)
            results.append([out, *torch.autograd.grad(out.square().sum(), x)])
    assert all(map(torch.equal, *results[:2]))
    for listed, dense in zip(results[0], results[2]):
        torch.testing.assert_close(listed, dense, atol=1e-5, rtol=1e-5)


def test_a_bias_that_heads_share(against_oracle):
    """Its gradient adds up those heads and sequences whose mask shows the tile."""
    names = "none", "window", "blocks", "padding on the left", "none", "prefix"
    mask = torch.stack([PATTERNS[name][:200, :300] for name in names]).view(3, 2, 200, 300)
    tensors = inputs("cpu", b=3, sq=200, sk=300, d=8) | dict(bias=torch.randn(200, 300))
    with use_backend("triton"):
        against_oracle(attend(mask), tensors)
        against_oracle(attend(mask[1, 1]), tensors)


def test_hidden_values(device):
    """A bias of keys hides a value that is NaN, within the tiles that the mask shows."""
    x, bias = torch.randn(3, 1, 1, N, 16), torch.zeros(N)
    bias[::7] = -float("inf")
    results = []
    for hidden in (0.0, float("nan")):
        query, key, value = (t.clone() for t in x)
        key[:, :, ::7] = value[:, :, ::7] = hidden
        leaves = [t.requires_grad_() for t in (query, key, value)]
        with use_backend("triton"):
            block = ff.block_mask(PATTERNS["BigBird"])
            out = ff.scaled_dot_product_attention(*leaves, block, bias=bias)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for clean, poisoned in zip(*results):
        torch.testing.assert_close(poisoned, clean, atol=1e-5, rtol=1e-5)


def test_similar_masks_share_a_plan():
    """The lists have few lengths."""
    from fastformer.kernels import launch

    x = torch.randn(1, 1, N, 16)
    masks = [ff.block_mask(PATTERNS[name]) for name in ("Longformer", "a sink and window")]
    with use_backend("triton"):
        for mask in masks:
            ff.scaled_dot_product_attention(x, x, x, mask)
    slots = [mask.slots().gt(0).sum() for mask in masks]
    assert slots[0] != slots[1] and masks[0].lists.shape == masks[1].lists.shape
    assert len(launch.plans) == 1


def test_few_queries(against_oracle, work, tiles):
    """A step of decoding takes rows of the mask, and visits the tiles of keys that they show."""
    tiles(16, 64)
    mask = ff.block_mask(PATTERNS["sinks and window"])
    rows = dict(attn_mask=ff.block_mask(mask.dense(slice(440, 444))))
    given = inputs("cpu", b=1, h=2, sq=4, sk=N)
    with use_backend("triton"):
        against_oracle(ff.scaled_dot_product_attention, given, gradients=False, **rows)
        found = work(lambda: ff.scaled_dot_product_attention(**given, **rows))
        assert found.products == 2 * 2 * 2  # the first tile, and the window's


def test_what_explain_says():
    x = [torch.randn(1, 1, 28, 16), *torch.randn(2, 1, 1, N, 16)]
    mask = ff.block_mask(PATTERNS["prefix"][:28])
    with use_backend("triton"):
        said = ff.explain("scaled_dot_product_attention", *x, mask).reason
    assert "only tiles that the mask shows are visited" in said


def attend_documents(dense):
    """Packed attention, causal from below, with a block mask, and in the oracle with a tensor."""
    queries, keys = (torch.tensor(x, dtype=torch.int32) for x in ([0, 64, 200], [0, 90, 200]))
    i, j = torch.arange(200)[:, None], torch.arange(200)
    seen = dense & (((i < 64) & (j <= i + 26)) | ((i >= 64) & (j >= 90) & (j <= i)))
    seen &= (i >= 64) | (j < 90)
    options = dict(attn_mask=ff.block_mask(dense), is_causal=True, causal_alignment="bottom_right")

    def call(query, key, value):
        if not eager.formula.always:
            return ff.packed_attention(query, key, value, queries, keys, 136, 110, **options)
        heads = (x.transpose(0, 1) for x in (query, key, value))
        return ff.scaled_dot_product_attention(*heads, seen).transpose(0, 1)

    return call


@pytest.mark.skipif(torch.cuda.is_available(), reason="its masks are on a CPU")
def test_masks_in_tiles_of_several_sizes(against_oracle, small_tiles):
    names = "BigBird", "blocks", "both ends", "prefix"
    mask = torch.stack([PATTERNS[name][:270, 30:450] for name in names]).view(2, 2, 270, 420)
    tensors = inputs("cpu", sq=270, sk=420, d=4) | dict(bias=torch.randn(270, 420))
    packed = {name: torch.randn(200, 2, 4) for name in ("query", "key", "value")}
    with use_backend("triton"):
        against_oracle(attend(mask), tensors, window=(300, 5))
        with small_tiles(128, 64):
            against_oracle(attend(mask), tensors)
        with small_tiles(64, 16):
            against_oracle(attend_documents(PATTERNS["blocks"][:200, :200]), packed)
