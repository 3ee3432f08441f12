"""The kernels with block masks: which tiles they visit, and results in tiles of other sizes."""

from functools import partial

import pytest
import torch
from test_attention import clean_and_poisoned
from test_block_mask import attend, inputs

import fastformer as ff
from fastformer import plans, use_backend
from fastformer.dispatch.state import state

pytest.importorskip("fastformer.kernels.attention.plan")

N = 450


def patterns():
    """Masks [N, N] by name, with and without holes."""
    i, j = torch.arange(N)[:, None], torch.arange(N)
    causal, distance, row, column = j <= i, (i - j).abs(), i // 64, j // 64
    generator = torch.Generator().manual_seed(3)

    def documents(*starts):
        document = torch.bucketize(torch.arange(N), torch.tensor(starts), right=True)
        return document[:, None] == document

    def blocks(share):
        return (torch.rand(8, 8, generator=generator) < share)[row, column]

    tree = torch.eye(29, dtype=torch.bool)
    for n in range(1, 29):
        tree[n] |= tree[int(torch.randint(max(0, n - 6), n, (), generator=generator))]
    found = {
        "causal": causal,
        "documents": causal & documents(90, 100, 300),
        "documents, both ways": documents(90, 100, 300),
        "short documents": documents(*range(7, N, 7)),
        "prefix": causal | (j < 200),
        "padding": j < 300,
        "padding on the left": j >= 200,
        "window": causal & (i - j < 70),
        "window, both ways": distance <= 30,
        "Longformer": (distance <= 30) | (i < 3) | (j < 3),
        "Longformer, causal": causal & ((distance <= 64) | (i < 64) | (j < 64)),
        "BigBird": (distance <= 30) | (i < 64) | (j < 64) | blocks(0.3),
        "sinks and window": causal & ((i - j < 40) | (j < 4)),
        "a sink and window": causal & ((i - j < 130) | (j < 1)),
        "tree": causal & tree[i // 16, j // 16],
        "blocks": blocks(0.3),
        "few blocks": blocks(0.05),
        "both ends": (j < 64) | (j >= 400),
        "every other 64 keys": column % 2 == 0,
        "elements": torch.rand(N, N, generator=generator) < 0.3,
        "none": j < 0,
    }
    return {name: mask.expand(N, N) for name, mask in found.items()}


PATTERNS = patterns()


def tiles_of(mask):
    """Which tiles of 128 queries and 64 keys hold an element of a mask [N, N]."""
    larger = torch.zeros(512, 512, dtype=torch.bool)
    larger[:N, :N] = mask
    return larger.view(4, 128, 8, 64).any(3).any(1)


ALWAYS = "documents", "sinks and window", "BigBird"
NAMES = [pytest.param(n, marks=[] if n in ALWAYS else pytest.mark.with_all) for n in PATTERNS]


@pytest.mark.all_cases
@pytest.mark.parametrize("name", NAMES)
def test_masks(work, against_oracle, name):
    """The tiles that are visited are those of which an element is seen, forward and backward, and
    only of those that are partly seen the bits are read. Results and gradients are those of the
    tensor in float64, with the same dropout.
    """
    mask, block, counts = PATTERNS[name], ff.block_mask(PATTERNS[name]), []

    def call(**x):
        if state.by_formula:
            return ff.scaled_dot_product_attention(**x, attn_mask=mask, **OPTIONS["dropout"])
        out, options = [], OPTIONS["dropout"] | dict(attn_mask=block)
        found = work(lambda: out.append(ff.scaled_dot_product_attention(**x, **options)))
        counts.append((found, found.products, found.launches, found.unmasked))
        return out[0]

    with use_backend("triton"):
        tensors = inputs("cpu", b=1, h=1, sq=N, sk=N)
        against_oracle(call, tensors, only_zeros=not mask.any())
    found, products, launches, unmasked = counts[-1]
    seen, slots = int(tiles_of(mask).sum()), block.slots()
    whole, part = int((slots == 1).sum()), int((slots > 1).sum())
    assert seen == whole + part
    assert (launches, products, found.products - products) == (1, 2 * seen, 7 * seen)
    listed = int(block.spans[0, 0, :4, 3].sum())
    # Of each program five numbers of its spans, the queries and the seed. Of a whole tile keys and
    # values, and its place if it is in a list; of a part also its slot, and two words a query.
    assert unmasked == 4 * 7 + 2 * whole + listed + 3 * part


@pytest.mark.parametrize("kind", ["blocks", "tensor", "numbers"])
@pytest.mark.parametrize("left, right, length", [(170, 0, 390), (None, 0, N), (None, None, 390)])
@pytest.mark.parametrize("name", ["documents", "Longformer", "BigBird", "both ends", "none"])
def test_tiles_that_a_band_and_lengths_leave(work, tiles, name, left, right, length, kind):
    """Of those that the mask shows, the ones within them."""
    tiles(128, 64)
    mask, i, j = PATTERNS[name], torch.arange(N)[:, None], torch.arange(N)
    band = (j <= i + (N if right is None else right)) & (j >= i - (left or N)) & (j < length)
    options = {} if length == N else dict(key_lengths=torch.tensor([length]))
    options |= {} if right is None else dict(window=(left, right))
    x, out = [torch.randn(1, 2, N, 16, requires_grad=True) for _ in range(3)], []
    if kind == "numbers":
        options["bias"] = torch.zeros(N, N).masked_fill(~mask, -float("inf"))
    else:
        options["attn_mask"] = ff.block_mask(mask) if kind == "blocks" else mask.contiguous()
    visited = 2 * int((tiles_of(mask) & tiles_of(band)).sum())
    with use_backend("triton"):
        found = work(lambda: out.append(ff.scaled_dot_product_attention(*x, **options)))
        assert found.products == 2 * visited
        assert work(out[0].sum().backward).products == 7 * visited


@pytest.mark.parametrize("name", ["documents", "Longformer", "BigBird", "blocks", "both ends"])
def test_tiles_that_documents_leave(work, name):
    """Of those that the mask of a packed batch shows, the ones within its documents."""
    starts, mask = torch.tensor([0, 90, 90, 100, 300, N]), PATTERNS[name]
    document = torch.bucketize(torch.arange(N), starts[1:-1], right=True)
    visited = int((tiles_of(mask) & tiles_of(document[:, None] == document)).sum())
    x, out = [torch.randn(N, 1, 16, requires_grad=True) for _ in range(3)], []
    options = dict(attn_mask=ff.block_mask(mask), dropout_p=0.3, dropout_seed=5)
    given = [starts.int()] * 2 + [210] * 2
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
    bias = torch.zeros(N)
    bias[::7] = -float("inf")
    call = attend(PATTERNS["BigBird"])
    with use_backend("triton"):
        given, hidden = inputs("cpu", 1, 1, N, N), bias.isinf()[:, None]
        for clean, poisoned in clean_and_poisoned(partial(call, bias=bias), given, hidden):
            torch.testing.assert_close(poisoned, clean, atol=1e-5, rtol=1e-5)


def test_similar_masks_share_a_plan():
    """The lists have few lengths."""
    x = torch.randn(1, 1, N, 16)
    masks = [ff.block_mask(PATTERNS[name]) for name in ("Longformer", "a sink and window")]
    with use_backend("triton"):
        for mask in masks:
            ff.scaled_dot_product_attention(x, x, x, mask)
    assert masks[0].slots().gt(0).sum() != masks[1].slots().gt(0).sum()
    assert masks[0].lists.shape == masks[1].lists.shape and len(plans.launches) == 1


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


def attend_documents(dense):
    """Packed attention, causal from below, with a block mask, and in the oracle with a tensor."""
    queries, keys = (torch.tensor(x, dtype=torch.int32) for x in ([0, 64, 200], [0, 90, 200]))
    i, j = torch.arange(200)[:, None], torch.arange(200)
    seen = dense & (((i < 64) & (j <= i + 26)) | ((i >= 64) & (j >= 90) & (j <= i)))
    seen &= (i >= 64) | (j < 90)
    options = dict(attn_mask=ff.block_mask(dense), is_causal=True, causal_alignment="bottom_right")

    def call(query, key, value):
        if not state.by_formula:
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
