"""Block masks: their layout, what they are made of, and attention with them."""

import functools
import itertools
import pickle

import numpy as np
import pytest
import torch
from test_attention import Largest, clean_and_poisoned
from torch.nn.attention import flex_attention

import fastformer as ff
from fastformer import mask_tiles
from fastformer.dispatch.state import state

ROWS, COLUMNS = 128, 64


def masks(rows, keys):
    """Masks [rows, keys] by name: with holes, whole tiles, runs of them, empty rows and columns."""
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    near = (i - j).abs() <= 40
    return {
        "causal": j <= i,
        "global and window": near | (i < 70) | (j < 9),
        "both ends": (i >= 0) & ((j < 64) | (j >= keys - 100)),
        "every other tile": ((j // 64 % 2 == 0) & (i >= 0)) & (i != 3),
        "rows that see nothing": near & (i % 3 != 0) & (i // 128 != 1),
        "elements": torch.rand(rows, keys, generator=torch.Generator().manual_seed(0)) < 0.3,
        "all": (i >= 0) & (j >= 0),
        "none": (i < 0) & (j >= 0),
    }


def elements_of(mask, own):
    """The elements [B, H, Sq, Sk] read from the lists of rows or of columns, as the class says."""
    batch, heads, q_length, k_length = mask.shape
    rows, columns = -(-q_length // ROWS), -(-k_length // COLUMNS)
    out = torch.zeros(batch, heads, rows * ROWS, columns * COLUMNS, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for t in range(rows if own == "rows" else columns):
                entry = mask.spans[b, h, t + (0 if own == "rows" else rows)].tolist()
                run, run_tiles, begin, whole, part = entry
                tiles = [(n, 1) for n in range(run, run + run_tiles)]
                for n in range(begin, begin + whole + part):
                    index, low, high = mask.lists[:, n].tolist()
                    slot = (low & 0xFFFF) | (high << 16)
                    assert (slot == 1) == (n < begin + whole) and slot > 0
                    tiles.append((index, slot))
                for index, slot in tiles:
                    r, c = (t, index) if own == "rows" else (index, t)
                    assert not out[b, h, r * ROWS : (r + 1) * ROWS, c * COLUMNS :][:, :64].any()
                    words = mask.bits[slot].view(ROWS, 2, 1) >> torch.arange(32) & 1
                    place = slice(r * ROWS, (r + 1) * ROWS), slice(c * COLUMNS, (c + 1) * COLUMNS)
                    out[(b, h, *place)] = words.view(ROWS, COLUMNS) != 0
    if q_length:  # what the last query sees
        assert (out[:, :, q_length:] == out[:, :, q_length - 1 : q_length]).all()
    assert not out[..., k_length:].any()
    return out[:, :, :q_length, :k_length]


@pytest.mark.parametrize("shape", [(300, 420), (128, 64), (1, 70), (0, 5), (130, 0)])
@pytest.mark.parametrize("name", masks(1, 1))
def test_layout(name, shape):
    """Lists of rows and of columns hold the elements, equal tiles once."""
    dense = masks(*shape)[name]
    mask = ff.block_mask(dense)
    assert mask.shape == (1, 1, *shape)
    for own in ("rows", "columns"):
        assert torch.equal(elements_of(mask, own)[0, 0], dense)
    assert torch.equal(mask.dense()[0, 0], dense)
    assert mask.bits.unique(dim=0).shape == mask.bits.shape
    assert not mask.bits[0].any() and (mask.bits[1] == -1).all()
    assert (mask.lists.dtype, mask.spans.dtype) == (torch.int16, torch.int32)


@pytest.mark.parametrize(
    "begin, end", [(0, 1), (127, 129), (299, 300), (130, 130), (256, 9), (5, -5)]
)
def test_rows(begin, end):
    """A part of the dense mask, of which no other rows are made."""
    dense = masks(300, 420)["global and window"]
    mask = ff.block_mask(dense)
    assert torch.equal(mask.dense(slice(begin, end))[0, 0], dense[begin:end])
    with pytest.raises(ValueError, match="consecutive"):
        mask.dense(slice(0, 9, 2))


def test_the_run_is_the_longest():
    dense = torch.ones(128, 64 * 9, dtype=torch.bool)
    dense[0, 64 * 2] = dense[0, 64 * 6] = False  # whole tiles 0 1, 3 4 5, 7 8
    assert ff.block_mask(dense).spans[0, 0, 0].tolist() == [3, 3, 0, 4, 2]
    assert ff.block_mask(dense).lists[0, :6].tolist() == [0, 1, 7, 8, 2, 6]


def test_different_tiles_with_one_hash():
    """The hash of a word 3 in the first place is that of a word 1 in the second."""
    words = torch.zeros(3, mask_tiles.WORDS, dtype=torch.int32)
    words[0, 0] = words[2, 0] = 3
    words[1, 1] = 1
    slots, tiles = mask_tiles._shared(words)
    assert slots.tolist() == [2, 3, 2] and torch.equal(tiles[2:], words[:2])


def test_slots_have_32_bits():
    slots = torch.tensor([[70_000, 33_000, 0, 1, 5, 2**31 - 1]], dtype=torch.int32)[None, None]
    mask = mask_tiles._listed((1, 1, 128, 64 * 6), slots, torch.zeros(2, 256, dtype=torch.int32))
    assert torch.equal(mask.slots(), slots)


def test_attention_reads_all_bits_of_a_slot(backend, device):
    """The same tiles at the end of a long table, whose other tiles show no key: the same bits."""
    mask = ff.block_mask(masks(150, 200)["elements"].to(device))
    slots, far = mask.slots(), 1 << 16
    bits = torch.zeros(far + len(mask.bits), 256, dtype=torch.int32, device=device)
    bits[1], bits[far:] = -1, mask.bits
    moved = mask_tiles._listed(mask.shape, torch.where(slots > 1, slots + far, slots), bits)
    x, results = {name: y.requires_grad_() for name, y in inputs(device).items()}, []
    for given in (mask, moved):
        out = ff.scaled_dot_product_attention(**x, attn_mask=given)
        results.append((out, *torch.autograd.grad(out.square().sum(), [*x.values()])))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("name", masks(1, 1))
def test_mask_mods(name):
    """Evaluated in blocks, by sequence and head, they give what the tensor gives."""
    dense = masks(300, 420)[name]

    def mod(b, h, i, j):
        return dense[i, j] & ((h == 0) | (i > 50)) & (b < 2)

    mask = ff.block_mask(mod, B=3, H=2, Sq=300, Sk=420)
    expected = dense.repeat(3, 2, 1, 1)
    expected[:, 1, :51], expected[2] = False, False
    assert mask == ff.block_mask(expected)
    assert torch.equal(mask.dense(), expected)


def test_mask_mods_are_never_evaluated_whole():
    rows = []

    def mod(b, h, i, j):
        rows.append(i.shape[0])
        return (i - j).abs() < 10

    mask = ff.block_mask(mod, Sq=1024, Sk=1 << 15)
    assert set(rows) == {128}
    assert mask.nbytes < 20_000


def test_of_flex_attention():
    """Blocks of another size; full blocks are seen whatever mask_mod says, others are not."""
    window = lambda b, h, i, j: ((i - j).abs() < 50) & (j > 20 * h)  # noqa: E731
    given = flex_attention.create_block_mask(window, 1, 2, 300, 420, device="cpu", BLOCK_SIZE=32)
    assert ff.block_mask(given) == ff.block_mask(window, H=2, Sq=300, Sk=420)
    made = flex_attention.BlockMask.from_kv_blocks(
        torch.tensor([[[1, 2]]], dtype=torch.int32),
        torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32),
        torch.tensor([[[1, 0]]], dtype=torch.int32),
        torch.tensor([[[[0, 0], [0, 0]]]], dtype=torch.int32),
        BLOCK_SIZE=64,
        mask_mod=lambda b, h, i, j: j > 70,
    )
    dense = (torch.arange(128) > 70).repeat(128, 1)
    dense[:64, :64] = True
    assert torch.equal(ff.block_mask(made).dense()[0, 0], dense)


def test_algebra():
    a, b = torch.rand(2, 1, 300, 420) < 0.5, torch.rand(1, 3, 300, 420) < 0.5
    a[..., :128, :64], b[..., 256:, 64:128] = True, ~a[:1, :, 256:, 64:128]
    one, other = ff.block_mask(a), ff.block_mask(b)
    assert (one & other) == ff.block_mask(a & b) and (one | other) == ff.block_mask(a | b)
    assert torch.equal((one | other).dense(), a | b)
    assert one[1] == ff.block_mask(a[1:]) and other[:, 1:] == ff.block_mask(b[:, 1:])
    assert other[:, -1] == ff.block_mask(b[:, 2:]) and one[[1, 0]] == ff.block_mask(a.flip(0))
    assert one[np.int64(1)] == one[1]
    assert ff.BlockMask.window(np.int64(9), np.int64(2), None) == ff.BlockMask.window(9, 2, None)
    assert one != other and one[0] != one[1] and one[0] != 3
    changed = a.clone()
    changed[1, 0, 299, 419] ^= True
    assert one != ff.block_mask(changed)
    assert pickle.loads(pickle.dumps(one)) == one and one.to("cpu") == one
    leaves, spec = torch.utils._pytree.tree_flatten(one)
    assert torch.utils._pytree.tree_unflatten(leaves, spec) == one
    with pytest.raises(ValueError, match="expected one shape"):
        one & ff.block_mask(a[..., :9])
    with pytest.raises(IndexError, match="out of range"):
        one[2]


def test_the_summary():
    mask = ff.block_mask(masks(256, 256)["causal"])
    assert repr(mask) == (
        "BlockMask(B=1, H=1, Sq=256, Sk=256: 75.0% of 8 tiles seen, 2 whole and 4 partly, of 2 "
        "kinds, 4.2 KiB)"
    )


ONES, ONE = torch.ones(3, 3), torch.ones(1, 1) > 0
WRONG = {
    "an integer mask": (lambda: ff.block_mask(ONES), TypeError, "torch.bool"),
    "no sizes": (lambda: ff.block_mask(lambda *_: 0, Sq=3), ValueError, "Sq and Sk are None"),
    "another size": (lambda: ff.block_mask(ONES > 0, Sk=4), ValueError, "broadcasts to"),
    "a size that is none": (lambda: ff.block_mask(ONES[0] > 0, Sq=-1), ValueError, "Sq is"),
    "five dimensions": (lambda: ff.block_mask(ONES[None, None, None] > 0), ValueError, "at most 4"),
    "a list": (lambda: ff.block_mask([[True]]), TypeError, "source is a list"),
    "a mod of integers": (
        lambda: ff.block_mask(lambda b, h, i, j: i - j, Sq=3, Sk=3),
        TypeError,
        "mask_mod returned dtype",
    ),
    "a window of -1": (lambda: ff.BlockMask.window(9, -1, 0), ValueError, "left is -1"),
    "a length of 2.5": (lambda: ff.BlockMask.causal(2.5), ValueError, "S is 2.5"),
    "a child first": (lambda: ff.BlockMask.tree(torch.tensor([-1, 2, 0])), ValueError, "parents"),
    "ids of floats": (lambda: ff.BlockMask.documents(ONES[0]), ValueError, "ids has"),
    "too long": (lambda: ff.block_mask(ONE, Sq=1, Sk=(64 << 15) + 1), ValueError, "2\\^15 tiles"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_sources(case):
    build, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        build()


def patterns(n):
    """The named masks of n tokens, and the same as tensors."""
    named = ff.BlockMask
    i, j = torch.arange(n)[:, None], torch.arange(n)
    ids = torch.tensor([4, 4, 0, 7, 7, 7, 7]).repeat_interleave(n // 6)[:n]
    generator = torch.Generator().manual_seed(0)
    parents = [-1] + [int(torch.randint(-1, k, (), generator=generator)) for k in range(1, n)]
    above = torch.eye(n, dtype=torch.bool)
    for child, parent in enumerate(parents):
        if parent >= 0:
            above[child] |= above[parent]
    near, lengths = (i - j).abs() <= 30, torch.tensor([10, n // 2]).view(2, 1, 1, 1)
    return {
        "causal": (named.causal(n), j <= i),
        "window": (named.window(n, 20, 3), (i - 20 <= j) & (j <= i + 3)),
        "window to the right": (named.window(n, 0, None), j >= i),
        "prefix": (named.prefix(n, 77), (j <= i) | (j < 77)),
        "prefixes": (named.prefix(n, lengths.flatten()), (j <= i) | (j < lengths)),
        "documents": (named.documents(ids), ids[:, None] == ids),
        "longformer": (named.longformer(n, 30, 9), near | (i < 9) | (j < 9)),
        "sinks": (named.sinks(n, 4, 50), (j <= i) & ((i - j < 50) | (j < 4))),
        "tree": (named.tree(torch.tensor(parents)), above),
    }


@pytest.mark.all_cases
@pytest.mark.parametrize("n", [1, 300])
@pytest.mark.parametrize("name", patterns(6))
def test_named_masks(name, n):
    mask, dense = patterns(n)[name] if n > 1 else patterns(1)[name]
    assert torch.equal(mask.dense(), dense.expand(mask.shape))
    assert mask == ff.block_mask(dense)


def test_bigbird():
    near, mask = ff.BlockMask.longformer(512, 30, 9), ff.BlockMask.bigbird(512, 30, 9, 2, seed=3)
    assert (mask & near) == near and mask == ff.BlockMask.bigbird(512, 30, 9, 2, seed=3)
    assert mask != ff.BlockMask.bigbird(512, 30, 9, 2, seed=4)
    added = (mask.dense() & ~near.dense())[0, 0].view(8, 64, 8, 64).any(1).any(-1)
    assert (added.sum(1) <= 2).all() and added.sum() > 8


def test_bands_become_flags(device, monkeypatch):
    """A mask that is known to be causal or a window; not beside such flags."""
    from fastformer.dispatch import backends

    calls, run = [], backends.run
    monkeypatch.setattr(backends, "run", lambda op, **x: calls.append(x) or run(op, **x))
    x, plain = torch.randn(1, 2, 300, 8), ff.BlockMask.sinks(300, 4, 50)
    causal, window = ff.BlockMask.causal(300), ff.BlockMask.window(300, 20, 3)
    cases = [
        (causal, {}, (True, None, False)),
        (window, {}, (False, (20, 3), False)),
        (window, dict(is_causal=True), (True, None, True)),
        (causal, dict(window=(9, 9)), (False, (9, 9), True)),
        (plain, {}, (False, None, True)),
        (causal | plain, {}, (False, None, True)),
        (pickle.loads(pickle.dumps(window)), {}, (False, (20, 3), False)),
    ]
    for mask, more, (is_causal, sides, tiles) in cases:
        out = ff.scaled_dot_product_attention(x, x, x, mask, softcap=9.0, **more)
        found = calls[-1]["attention"]
        assert (found.is_causal, found.window) == (is_causal, sides)
        assert (found.mask_spans is not None) == tiles and found.attn_mask is None
        want = ff.scaled_dot_product_attention(x, x, x, mask.dense(), softcap=9.0, **more)
        torch.testing.assert_close(out, want)
    with pytest.raises(ValueError, match="BlockMask of shape"):
        ff.scaled_dot_product_attention(x, x, x, ff.BlockMask.causal(299))


# ----------------------------------------------------------------------------------- attention


def attend(dense, mask=None):
    """Attention with a block mask, and in the oracle with the tensor that it stands for."""
    mask = ff.block_mask(dense) if mask is None else mask

    def call(query, key, value, **options):
        given = dense if state.by_formula else mask
        return ff.scaled_dot_product_attention(query, key, value, given, **options)

    return call


def inputs(device, b=2, h=2, sq=150, sk=200, d=16, dtype=torch.float32):
    sizes = dict(query=(b, h, sq, d), key=(b, h, sk, d), value=(b, h, sk, d))
    return {name: torch.randn(size, device=device).to(dtype) for name, size in sizes.items()}


def options(device, h=2, sq=150, sk=200):
    seeded = dict(dropout_p=0.3, dropout_seed=5)
    lengths, sinks = torch.tensor([sk, sk - 50], device=device), torch.randn(h, device=device)
    return {
        "plain": {},
        "causal from below": dict(is_causal=True, causal_alignment="bottom_right"),
        "lengths and window": dict(key_lengths=lengths, window=(50, 20)),
        "dropout": seeded,
        "dropout, causal, softcap": seeded | dict(is_causal=True, softcap=2.0),
        "ALiBi": dict(alibi_slopes=torch.rand(h, device=device)),
        "bias": dict(bias=torch.randn(1, h, sq, sk, device=device)),
        "bias of keys, sinks": dict(bias=torch.randn(2, 1, 1, sk, device=device), sinks=sinks),
    }


@pytest.mark.sample
@pytest.mark.parametrize("case", options("cpu"))
@pytest.mark.parametrize("name", ["global and window", "rows that see nothing", "elements"])
def test_attention(backend, device, against_oracle, name, case):
    dense = masks(150, 200)[name].to(device)
    given = options(device)[case]
    tensors = {n: given.pop(n) for n in ("bias", "sinks") if n in given}
    against_oracle(attend(dense), inputs(device) | tensors, **given)


@pytest.mark.parametrize("sizes", [(1, 70), (300, 64), (130, 33), (5, 300)])
def test_lengths(backend, device, against_oracle, sizes):
    """Of queries and keys, with sinks and lse."""
    dense = masks(*sizes)["elements"].to(device) | (torch.arange(sizes[1], device=device) == 0)
    given = inputs(device, sq=sizes[0], sk=sizes[1]) | dict(sinks=torch.randn(2, device=device))

    def call(**given):
        out, lse = attend(dense)(**given, return_lse=True)
        return torch.cat([out, lse.unsqueeze(-1)], -1)

    against_oracle(call, given, dropout_p=0.2, dropout_seed=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_masks_of_sequences_and_heads(backend, device, against_oracle, dtype):
    dense = torch.rand(2, 4, 150, 200, device=device) < 0.3
    dense[0, :, :, 64:128], dense[:, 1, 128:] = False, False
    given = inputs(device, h=4, dtype=dtype)
    given |= {name: given[name][:, ::2] for name in ("key", "value")}
    against_oracle(attend(dense), given, enable_gqa=True)


def test_hidden_keys_may_hold_anything(backend, device):
    """Past the length, in a tile that is visited."""
    lengths = torch.tensor([200, 20], device=device)
    hidden = (torch.arange(200, device=device) >= lengths[:, None])[:, None, :, None]
    call = functools.partial(attend(masks(150, 200)["causal"].to(device)), key_lengths=lengths)
    for clean, poisoned in clean_and_poisoned(call, inputs(device), hidden):
        torch.testing.assert_close(poisoned, clean)


@pytest.mark.parametrize("used", ["output", "lse", "both"])
def test_gradients_of_some_inputs(backend, device, used):
    """Of each subset of the inputs, by the output, lse, or both, which need not depend on them: lse
    has no gradient for the values, and that of these alone was refused. Two rows of tiles, of which
    the second sees nothing in the first head.
    """
    dense = masks(140, 70)["elements"].expand(1, 2, 140, 70).clone().to(device)
    dense[:, 0, 128:] = False
    given = inputs(device, 1, 2, 140, 70, 8)
    given["bias"] = torch.randn(2, 140, 70, device=device)
    given["sinks"] = torch.randn(2, device=device)
    weights = torch.randn(1, 2, 140, 8, device=device), torch.randn(1, 2, 140, device=device)
    places = {"output": [0], "lse": [1], "both": [0, 1]}[used]

    def gradients(x, mask, names, create_graph=False):
        x = {n: t.detach().requires_grad_(n in names) for n, t in x.items()}
        found = ff.scaled_dot_product_attention(**x, attn_mask=mask, return_lse=True)
        pairs = [(found[n], weights[n].to(found[n].dtype)) for n in places]
        outputs, cotangents = zip(*[pair for pair in pairs if pair[0].requires_grad])
        leaves = [x[n] for n in names]
        return torch.autograd.grad(outputs, leaves, cotangents, create_graph=create_graph)

    with ff.use_backend("reference"):
        every = [n for n in given if n != "value" or used != "lse"]
        double = gradients({n: x.double() for n, x in given.items()}, dense, every)
    expected = dict(value=torch.zeros_like(given["value"])) | dict(zip(every, double, strict=True))
    block = ff.block_mask(dense)
    subsets = [names for count in range(1, 6) for names in itertools.combinations(given, count)]
    for names in subsets:
        for create_graph in (False, True) if len(names) == 1 else (False,):
            found = gradients(given, block, names, create_graph)
            for name, grad in zip(names, found, strict=True):
                want = expected[name].to(grad.dtype)
                torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-4)


def test_second_derivatives(device):
    dense = masks(20, 70)["elements"] | (torch.arange(70) == 0)
    given = [x.requires_grad_() for x in inputs(device, 1, 1, 20, 70, 3, torch.float64).values()]
    call = attend(dense)
    with ff.use_backend("reference"):
        for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
            assert check(lambda *x: call(*x), given, fast_mode=True)  # along random directions


def test_the_reference_holds_no_scores(device):
    """Of 4096 x 4096 scores (64 MB in float32), 3% are seen; forward and backward hold a part."""
    mask = ff.block_mask(lambda b, h, i, j: (i - j).abs() < 64, Sq=4096, Sk=4096)
    given = [x.requires_grad_() for x in inputs(device, 1, 1, 4096, 4096).values()]
    with ff.use_backend("reference"), Largest() as largest:
        out = ff.scaled_dot_product_attention(*given, mask, dropout_p=0.1, dropout_seed=1)
        torch.autograd.grad(out.sum(), given)
    assert 0 < largest.elements <= 4096 * 128


# --------------------------------------------------------------------------------- packed batches


def images(tokens):
    """A language model whose documents hold images, each of which sees all of itself."""
    image = torch.full((tokens,), -1)
    image[20:60], image[130:170], image[170:190] = 0, 1, 2

    def mod(b, h, i, j):
        return (j <= i) | ((image[i] == image[j]) & (image[i] >= 0))

    return ff.block_mask(mod, Sq=tokens, Sk=tokens)


PACKED = {
    "causal, window": dict(is_causal=True, window=(30, 5)),
    "from below, dropout": dict(
        is_causal=True, causal_alignment="bottom_right", dropout_p=0.3, dropout_seed=7
    ),
    "window from below": dict(window=(3, None), causal_alignment="bottom_right", softcap=3.0),
    "window": dict(window=(None, 10)),
    "plain": {},
}


RARE = [pytest.param(x, marks=pytest.mark.with_all) for x in list(PACKED)[2:]]


@pytest.mark.parametrize("case", [*list(PACKED)[:2], *RARE])
def test_packed(backend, device, against_oracle, case):
    """Documents of which one is empty, and one has no keys. The oracle has the mask, the documents
    and the band in one tensor of one sequence.
    """
    queries, keys = [0, 50, 50, 160, 200], [0, 30, 30, 200, 200]
    q, k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (queries, keys))
    more, mask = dict(PACKED[case]), images(200).to(device)
    names = "query", "key", "value"
    x = {n: torch.randn(200, 2 + 2 * (n == "query"), 16, device=device) for n in names}
    x |= dict(bias=torch.randn(200, device=device), sinks=torch.randn(4, device=device))
    seen = torch.zeros(200, 200, dtype=torch.bool, device=device)
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(queries), itertools.pairwise(keys)):
        i, j = torch.arange(q1 - q0, device=device)[:, None], torch.arange(k1 - k0, device=device)
        i = i + (k1 - k0 - q1 + q0 if "causal_alignment" in more else 0)
        left, right = more.get("window", (None, None))
        right = 0 if "is_causal" in more else right
        seen[q0:q1, k0:k1] = (j >= i - (left or 0)) | (left is None)
        seen[q0:q1, k0:k1] &= (j <= i + (right or 0)) | (right is None)

    def call(query, key, value, **given):
        if not state.by_formula:
            out, lse = ff.packed_attention(
                query, key, value, q, k, 120, 180, attn_mask=mask, return_lse=True, **given, **more
            )
        else:
            own = {n: more[n] for n in ("dropout_p", "dropout_seed", "softcap") if n in more}
            heads = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
            out, lse = ff.scaled_dot_product_attention(
                *heads, mask.dense() & seen, enable_gqa=True, return_lse=True, **given, **own
            )
            out, lse = out[0].transpose(0, 1), lse[0]
        return torch.cat([out, lse.t().unsqueeze(-1)], -1)

    against_oracle(call, x)


def test_packed_bands_are_those_of_documents(backend, device):
    """Of fewer queries than keys in all: the last document stands behind what a causal query of its
    index would see.
    """
    given = [torch.randn(n, 2, 8, device=device) for n in (30, 60, 60)]
    q, k = (torch.tensor(x, device=device).int() for x in ([0, 10, 30], [0, 50, 60]))
    weight, found = torch.randn(30, 2, 8, device=device), []
    for mask in (None, ff.block_mask(torch.ones(30, 60, dtype=torch.bool, device=device))):
        x = [t.detach().requires_grad_() for t in given]
        out = ff.packed_attention(*x, q, k, 20, 50, attn_mask=mask, is_causal=True)
        found.append([out, *torch.autograd.grad(out, x, weight)])
    for have, want in zip(*found):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("slopes", [(2,), (2, 2)])
def test_packed_slopes(backend, device, against_oracle, slopes):
    """ALiBi counts the tokens of a document, each of which may have slopes of its own."""
    queries, keys = torch.tensor([0, 80, 200]).int(), torch.tensor([0, 60, 200]).int()
    slopes, mask = torch.rand(slopes), images(200)

    def call(query, key, value):
        if not state.by_formula:
            more = dict(attn_mask=mask, alibi_slopes=slopes)
            return ff.packed_attention(query, key, value, queries, keys, 120, 140, **more)
        dense, outputs = mask.dense(), []
        for n, (q, k) in enumerate([(slice(80), slice(60)), (slice(80, None), slice(60, None))]):
            heads = [x.transpose(0, 1)[None] for x in (query[q], key[k], value[k])]
            given = dict(attn_mask=dense[..., q, k], alibi_slopes=slopes.expand(2, 2)[n])
            outputs.append(ff.scaled_dot_product_attention(*heads, **given)[0].transpose(0, 1))
        return torch.cat(outputs)

    against_oracle(call, {name: torch.randn(200, 2, 16) for name in ("query", "key", "value")})


def test_calls_that_do_not_fit():
    def mask(*shape):
        return ff.block_mask(torch.ones(shape, dtype=torch.bool))

    for wrong in (mask(150, 199), mask(3, 1, 150, 200)):
        with pytest.raises(ValueError, match="BlockMask of shape"):
            ff.scaled_dot_product_attention(**inputs("cpu"), attn_mask=wrong)
    x, starts = torch.zeros(200, 2, 16), torch.tensor([0, 80, 200], dtype=torch.int32)
    for wrong, error, words in (
        (mask(199, 199), ValueError, "BlockMask of shape"),
        (mask(200, 200).dense(), TypeError, "BlockMask"),
    ):
        with pytest.raises(error, match=words):
            ff.packed_attention(x, x, x, starts, starts, 120, 120, attn_mask=wrong)


# ------------------------------------------------------------------------------- layers and models


@torch.no_grad()
def test_layers(backend, device):
    """What takes a mask takes a block mask."""
    mask = images(200).to(device)
    dense, x = mask.dense(), torch.randn(2, 200, 16, device=device)
    attention = ff.MultiHeadedAttention(2, 16).to(device).eval()
    model = ff.make_decoder(11, N=2, d_model=16, d_ff=32, h=2).to(device).eval()
    tokens = torch.randint(0, 11, (2, 200), device=device)
    for call in (
        lambda m: attention(x, x, x, m),
        lambda m: attention(x, x, x, m, cache=ff.KVCache(2, 2, 200, 8, device=device)),
        lambda m: model(tokens, m),
        lambda m: ff.attention_weights(x.view(2, 1, 200, 16), x.view(2, 1, 200, 16), m),
    ):
        torch.testing.assert_close(call(mask), call(dense), rtol=1e-4, atol=1e-5)
    attention.keep_attention = True
    attention(x, x, x, mask)
    assert not attention.attn[..., ~dense[0, 0]].any()


@torch.no_grad()
@pytest.mark.with_all
def test_packed_sizes_that_dynamo_follows(backend, device):
    """dynamo takes symbols for the sizes, which the mask has, too."""
    starts = torch.tensor([0, 3, 3, 7], dtype=torch.int32, device=device)
    q, k = torch.randn(7, 2, 8, device=device), torch.randn(7, 1, 8, device=device)
    mask = ff.block_mask(torch.rand(1, 1, 7, 7, device=device) < 0.8)

    def call(q, k):
        return ff.packed_attention(q, k, k, starts, starts, 5, 4, attn_mask=mask)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(q, k), call(q, k))


def test_packed_layers(device):
    """A mask of the tokens goes with the `Packing` through all layers, not to a memory."""
    model = ff.make_decoder(11, N=2, d_model=16, d_ff=32, h=2).eval()
    x = torch.randint(0, 11, (2, 120))
    tokens, packing = ff.unpad(x, torch.tensor([80, 120]))
    window = lambda b, h, i, j: (i - j).abs() < 9  # noqa: E731
    packed = packing.with_mask(ff.block_mask(window, Sq=200, Sk=200))
    assert packed.to("cpu").mask == packed.mask
    with ff.use_backend("reference"):
        have = ff.pad(model(tokens, packed), packing)
        want = model(x, ff.block_mask(window, Sq=120, Sk=120))
        torch.testing.assert_close(have[0, :80], want[0, :80])
        torch.testing.assert_close(have[1], want[1])
    with pytest.raises(TypeError, match="BlockMask"):
        packing.with_mask(window)


@torch.no_grad()
def test_torch_modules(device):
    """accelerate and sdpa_override; torch itself names what to do."""
    mask = images(200)
    dense, x = mask.dense(), torch.randn(2, 200, 16)
    padding = torch.arange(200).repeat(2, 1) >= torch.tensor([[200], [150]])
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    stack = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    want = stack(x, ~dense[0, 0], src_key_padding_mask=padding)
    ff.accelerate(stack)
    have = stack(x, mask, src_key_padding_mask=padding)
    torch.testing.assert_close(have[~padding], want[~padding], rtol=1e-4, atol=1e-5)
    attend = torch.nn.functional.scaled_dot_product_attention
    x = x.unsqueeze(1)
    with ff.sdpa_override():
        torch.testing.assert_close(attend(x, x, x, attn_mask=mask), attend(x, x, x, dense))
    with pytest.raises(TypeError, match="does not take a BlockMask"):
        attend(x, x, x, attn_mask=mask)


@torch.no_grad()
def test_hugging_face(device):
    """A prefix and images that see all of themselves, as the mask of a model."""
    transformers = pytest.importorskip("transformers")
    ff.register_transformers()
    sizes = dict(hidden_size=16, intermediate_size=32, vocab_size=20, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    config = transformers.LlamaConfig(**sizes, **heads)
    model = transformers.LlamaForCausalLM(config).eval()
    mask, tokens = images(200), torch.randint(0, 20, (2, 200))
    model.set_attn_implementation("sdpa")
    want = model(tokens, attention_mask=mask.dense().expand(2, -1, -1, -1)).logits
    model.set_attn_implementation("fastformer")
    have = model(tokens, attention_mask=mask).logits
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(tokens).logits, want, atol=1e-3)


def test_compiled(backend, device):
    """One graph for masks of the same shape, without a break."""
    x = torch.randn(1, 2, 200, 16, requires_grad=True)
    call = lambda x, mask: ff.scaled_dot_product_attention(x, x, x, mask)  # noqa: E731
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for mask in (images(200), ff.block_mask(masks(200, 200)["causal"])):
        have, want = compiled(x, mask), call(x, mask)
        torch.testing.assert_close(have, want)
        grads = [torch.autograd.grad(out.sum(), x)[0] for out in (have, want)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_of_a_function_that_changes_its_arguments():
    """The number of the sequence and of the head: each call has its own."""
    changed = ff.block_mask(lambda b, h, i, j: i >= j + b.add_(1) + h.add_(1), 2, 2, 130, 130)
    want = ff.block_mask(lambda b, h, i, j: i >= j + b + h + 2, 2, 2, 130, 130)
    assert torch.equal(changed.dense(), want.dense())
