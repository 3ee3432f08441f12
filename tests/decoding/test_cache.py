"""Caches against lists of what was appended, and decoding with one against the whole sequence."""

import random

import pytest
import torch
from policy import check_output

import fastformer as ff
from fastformer import DecoderCache, KVCache
from fastformer.cache.decoder import LayerCache
from fastformer.cache.memory import MemoryCache

B, G, S, D, DV = 3, 2, 24, 16, 8
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def entries(n, dtype=torch.float32, device="cpu", batch=B):
    return [torch.randn(batch, G, n, dim, device=device).to(dtype) for dim in (D, DV)]


KINDS = ["sliced", "whole"]  # `whole` buffers are read on a GPU


def made(kind="sliced", dtype=torch.float32, device="cpu", capacity=S):
    cache = KVCache(B, G, capacity, D, DV, dtype=dtype, device=device)
    cache._fixed_shapes = cache._fixed_shapes or kind == "whole"
    return cache


class Listed:
    """The same as a cache, in lists: one of keys and one of values for each row."""

    def __init__(self):
        self.rows = [[torch.empty(G, 0, dim) for dim in (D, DV)] for _ in range(B)]

    def append(self, *new):
        for b, row in enumerate(self.rows):
            for i, x in enumerate(new):
                row[i] = torch.cat([row[i].to(x), x[b]], 1)

    def crop(self, lengths):
        self.rows = [[x[:, :n] for x in row] for row, n in zip(self.rows, lengths)]

    def reorder(self, index):
        self.rows = [list(self.rows[i]) for i in index]


def check(cache, listed):
    """The same contents, and the attention of two queries over them."""
    lengths = [row[0].shape[1] for row in listed.rows]
    assert cache.lengths.tolist() == lengths and cache.lengths.dtype == torch.int32
    exact = cache.lengths.is_cpu  # else it is a bound
    assert cache.longest == max(lengths) if exact else cache.longest >= max(lengths)
    start = torch.as_tensor(cache.start(), device=cache.lengths.device)
    assert start.expand(len(lengths)).tolist() == lengths
    for i, x in enumerate(cache.contents()):
        for b, row in enumerate(listed.rows):
            assert torch.equal(x[b, :, : lengths[b]], row[i])
    n = min(2, *lengths)
    if not n:
        return
    q = torch.randn(len(lengths), 2 * G, n, D).to(cache.lengths.device, listed.rows[0][0].dtype)
    out, weights = cache.attend(q), cache.weights(q)
    assert weights.shape[-1] == cache.longest
    options = dict(is_causal=True, causal_alignment="bottom_right", enable_gqa=True)
    for b, (key, value) in enumerate(listed.rows):
        alone = q[b : b + 1], key[None], value[None]
        wide = [x.double() for x in alone]
        with ff.use_backend("reference"), ff.dispatch.state.use_formula():
            outputs = [ff.scaled_dot_product_attention(*x, **options) for x in (wide, alone)]
            shares = [ff.attention_weights(*x[:2], **options) for x in (wide, alone)]
        check_output(out[b : b + 1], *outputs)
        check_output(weights[b : b + 1, :, :, : lengths[b]], *shares)
        assert not weights[b, :, :, lengths[b] :].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_appends_crops_and_reorders_are_those_of_lists(dtype, kind, device):
    """In an order drawn at random. The buffers stay while the batch has its size."""
    cache, listed, rng = made(kind, dtype, device), Listed(), random.Random(1)
    assert [tuple(x.shape) for x in cache.contents()] == [(B, G, 0, D), (B, G, 0, DV)]
    nothing = cache.attend(torch.randn(B, G, 1, D).to(device, dtype))
    assert nothing.shape == (B, G, 1, DV) and not nothing.any()
    buffers = cache.buffers()
    for call in ["rows", "reorder", "crop", "nothing"] * (6 if dtype == torch.float32 else 2):
        rows = len(listed.rows)
        longest = max(row[0].shape[1] for row in listed.rows)
        n = min(rng.choice([0, 1, 7, 7]), cache.capacity - longest)
        new = entries(n, dtype, device, batch=rows)
        if call == "nothing":  # of other strides
            new = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in new]
        cache.append(*new)
        listed.append(*new)
        check(cache, listed)
        if call == "reorder":
            index = [rng.randrange(rows) for _ in range(rng.choice([2, 3]))]
            cache.reorder(torch.tensor(index, dtype=torch.int32, device=device))
            listed.reorder(index)
        elif call != "nothing":
            lengths = [rng.randint(longest // 2, cache.capacity)] * rows
            if call == "rows":
                lengths = [rng.randint(0, longest) for _ in lengths]
            cache.crop(torch.tensor(lengths, device=device) if call == "rows" else lengths[0])
            listed.crop(lengths)
        check(cache, listed)
        if len(listed.rows) == rows:
            assert all(x is y for x, y in zip(buffers, cache.buffers(), strict=True))
        buffers = cache.buffers()
    cache.reset()
    assert cache.longest == 0 and not cache.lengths.any()


def test_the_host_knows_the_start_of_rows_of_one_length():
    cache = made()
    cache.append(*entries(4))
    assert cache.start() == 4
    cache.crop(3)
    assert cache.start() == 3
    cache.crop(torch.tensor([1] + [3] * (B - 1)))
    cache.crop(2)
    assert torch.equal(cache.start(), torch.tensor([1] + [2] * (B - 1)))
    cache.crop(torch.tensor([2, 1, 3]))
    assert cache.start() is cache.lengths
    cache.reorder(torch.tensor([1, 1, 1]))
    assert cache.start() == 1
    cache.crop(torch.tensor([1, 0, 0]))
    cache.reset()
    assert cache.start() == 0


def test_the_form_of_a_cache():
    """Its defaults, and what is refused."""
    with torch.device("meta"):
        cache = KVCache(1, 1, 4, 8)
    assert cache.capacity == 4
    key, value = cache.buffers()[:2]
    assert key.shape == value.shape == (1, 1, 4, 8)
    assert key.is_meta and key.dtype == torch.get_default_dtype()
    cache = DecoderCache(4)
    assert (cache.longest, cache.start(), cache.lengths, list(cache.buffers())) == (0, 0, None, [])
    with pytest.raises(ValueError, match=r"key has shape \[2, 2, 8\]; expected \[B, G, n, D\]"):
        cache.layer(0).append(*torch.randn(2, 2, 2, 8))
    for wrong, error, message in (
        (dict(batch=0), ValueError, "batch is 0; expected 1 or more"),
        (dict(dtype=torch.int8), TypeError, "dtype is torch.int8; expected float32"),
        (dict(device="gpu"), ValueError, "device is 'gpu'; expected a device of torch"),
    ):
        with pytest.raises(error, match=message):
            KVCache(**dict(batch=1, heads=1, capacity=4, head_dim=8) | wrong)


def test_a_memory_takes_new_buffers_only_for_another_form():
    cache, memory = MemoryCache(), torch.randn(2, 3, 8)
    pair = torch.randn(2, 2, 1, 3, 8)
    cache.fill(memory, *pair)
    for other, same in (
        (pair + 1, True),
        (pair[:, :1], False),
        (pair.half()[:, :1], False),
        (pair.half()[:, :, :, :2], False),
    ):
        kept = cache.key, cache.value
        cache.fill(memory, *other)
        have = cache.key, cache.value
        assert all((x is y) is same for x, y in zip(kept, have))
        assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(have, other))
    cache.reorder(torch.tensor([1, 0]))
    assert cache.key is have[0] and torch.equal(have[0], other[0].flip(0))
    assert cache.value is have[1] and torch.equal(have[1], other[1].flip(0))


@pytest.mark.parametrize("kind", KINDS)
def test_both_backends_attend_with_every_option(backend, kind, device):
    """Masks and biases are over the positions that the cache holds. No others are read."""
    torch.manual_seed(1)
    cache = made(kind, device=device)
    for buffer in cache.buffers()[:2]:
        buffer.fill_(float("nan"))
    cache.append(*entries(9, device=device))
    cache.crop(torch.tensor([9, 4, 7], device=device))
    q = torch.randn(B, 2 * G, 2, D, device=device)
    mask = torch.rand(B, 1, 2, 9, device=device) < 0.7
    more = dict(
        bias=torch.randn(2 * G, 2, 9, device=device), window=(5, 0), softcap=9.0, scale=0.3,
        alibi_slopes=torch.rand(2 * G, device=device), sinks=torch.randn(2 * G, device=device),
    )  # fmt: skip
    with torch.no_grad():
        out = cache.attend(q, mask, **more)
    key, value = (x.double() for x in cache.contents())
    wide = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in more.items()}
    with ff.use_backend("reference"):
        oracle = ff.scaled_dot_product_attention(
            q.double(), key, value, mask, is_causal=True, causal_alignment="bottom_right",
            enable_gqa=True, key_lengths=cache.lengths, **wide,
        )  # fmt: skip
    assert (out.double() - oracle).norm() / oracle.norm() < 1e-5


k, v = entries(2)
WRONG_ENTRIES = [
    (entries(5), ValueError, "key has 5 positions; expected at most 4: .* holds 20 of its .* 24"),
    ((k[:2], v[:2]), ValueError, r"key has shape \[2, 2, 2, 16\]; .* cache, \[3, 2, n, 16\]"),
    ((k[:, :1], v), ValueError, r"key has shape \[3, 1, 2, 16\]"),
    ((k[..., 1:], v), ValueError, r"key has shape \[3, 2, 2, 15\]"),
    ((k[0], v), ValueError, r"key has shape \[2, 2, 16\]"),
    ((k, v[:, :, :1]), ValueError, r"value has shape \[3, 2, 1, 8\]; .*, \[3, 2, 2, 8\]"),
    ((k, v[:, :1]), ValueError, r"value has shape \[3, 1, 2, 8\]"),
    ((k.half(), v), TypeError, "key has dtype torch.float16; expected that of the cache"),
    ((k.to("meta"), v), ValueError, "key is on meta; expected the device of the cache, cpu"),
    ((k.clone().requires_grad_(), v), ValueError, r"key requires a gradient.*torch.no_grad\(\)"),
]
WRONG = [
    *(("append", *case) for case in WRONG_ENTRIES),
    ("crop", [25], ValueError, "length is 25; expected 0 to the capacity of the cache, 24"),
    ("crop", [-1], ValueError, "length is -1"),
    ("crop", [1.0], TypeError, "length is a float"),
    ("crop", [torch.tensor([1, 2])], ValueError, r"length has shape \[2\]; expected \[B\]"),
    ("crop", [torch.tensor([1, 2, 33])], ValueError, "length holds 33"),
    ("crop", [torch.tensor([1, 2, -1])], ValueError, "length holds -1"),
    ("reorder", [torch.tensor([0, 3])], ValueError, "index holds 3; expected rows .* 0 to 2"),
    ("reorder", [torch.tensor([-1])], ValueError, "index holds -1"),
]


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize(("call", "arguments", "error", "message"), WRONG)
def test_a_failed_call_leaves_the_cache_as_it_was(call, arguments, error, message, even):
    cache = made()
    cache.append(*entries(20))
    if not even:
        cache.crop(torch.tensor([20, 3, 7]))
    before = [x.clone() for x in (cache.key, cache.value, cache.lengths)]
    with pytest.raises(error, match=message):
        getattr(cache, call)(*arguments)
    after = cache.key, cache.value, cache.lengths
    assert cache.longest == 20 and all(torch.equal(x, y) for x, y in zip(before, after))
    cache.append(*entries(4))  # there is room for these


def test_a_cache_of_inference_mode_serves_outside_of_it():
    with torch.inference_mode():
        cache = made()
        cache.append(*entries(2))
    cache.append(*entries(1))
    assert cache.lengths.tolist() == [3] * B


# ------------------------------------------------------------------------------------- the modules


def model(device="cpu", dtype=torch.float32, layers=2):
    torch.manual_seed(3)
    return ff.make_model(13, 13, layers, 16, 32, 2).to(device, dtype).eval()


@pytest.fixture
def sources(device):
    src = torch.tensor([[1, 4, 9, 2, 7], [1, 8, 3, 0, 0], [5, 0, 0, 0, 0]], device=device)
    tgt = torch.randint(1, 13, (3, 9), generator=torch.Generator().manual_seed(0)).to(device)
    return src, (src != 0).unsqueeze(-2), tgt


def steps(m, sources, sizes, cache):
    """The output of the decoder, computed a few tokens at a time."""
    src, mask, tgt = sources
    memory = m.encode(src, mask)
    outputs = [m.decode(memory, mask, part, None, cache) for part in tgt.split(sizes, 1)]
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_steps_are_what_the_whole_sequence_gives(dtype, backend, sources, device):
    """By the numerics policy: in half precision at most twice the error of eager PyTorch."""
    src, mask, tgt = sources = *sources[:2], sources[2][:, :5]
    m, exact = model(device, dtype, 1), model(device, layers=1).double()
    exact.load_state_dict(m.state_dict())
    causal = ff.subsequent_mask(5).to(device)
    with torch.no_grad():
        with ff.use_backend("reference"):
            oracle = exact(src, tgt, mask, causal)
            eager = m(src, tgt, mask, causal)
        for sizes, shapes in (([3, 1, 1], False), ([1, 1, 3], True)):
            cache = DecoderCache(6)
            if shapes:
                steps(m, (src, mask, tgt[:, :1]), [1], cache)
                for layer in cache.layers:
                    layer.own._fixed_shapes = True
                cache.reset()
            check_output(steps(m, sources, sizes, cache), oracle, eager)
            assert cache.longest == 5 and cache.lengths.tolist() == [5] * 3


def test_rows_of_their_own_length_have_positions_of_their_own(backend, sources, device):
    """A prompt with padding on the right: what follows it takes the place of the padding."""
    src, mask, tgt = sources
    m, lengths = model(device), torch.tensor([4, 1, 3], device=device)
    with torch.no_grad():
        memory, cache = m.encode(src, mask), DecoderCache(9)
        m.decode(memory, mask, tgt[:, :4], None, cache)
        cache.crop(lengths)
        out = m.decode(memory, mask, tgt[:, 5:7], None, cache)
        for b, n in enumerate(lengths.tolist()):
            alone = torch.cat([tgt[b : b + 1, :n], tgt[b : b + 1, 5:7]], 1)
            causal = ff.subsequent_mask(n + 2).to(device)
            with ff.use_backend("reference"):
                want = m(src[b : b + 1], alone, mask[b : b + 1], causal)
            torch.testing.assert_close(out[b], want[0, n:], atol=2e-5, rtol=0)


def test_under_autocast_the_cache_is_in_its_dtype(sources, device):
    src, mask, tgt = sources
    m, exact, cache = model(device), model(device).double(), DecoderCache(9)
    whole = src, tgt, mask, ff.subsequent_mask(9).to(device)
    with torch.no_grad():
        with ff.use_backend("reference"):
            oracle = exact(*whole)
            with torch.autocast(device.type, torch.bfloat16):
                eager = m(*whole)
        with torch.autocast(device.type, torch.bfloat16):
            got = steps(m, sources, [4, 1, 4], cache)
    check_output(got.to(torch.bfloat16), oracle, eager.to(torch.bfloat16))
    assert {x.dtype for x in cache.buffers()} == {torch.bfloat16, torch.int32}


def test_the_memory_is_projected_once(sources):
    src, mask, tgt = (x.cpu() for x in sources)
    m, cache, projected = model(), DecoderCache(9), []
    for layer in m.decoder.layers:
        layer.src_attn.linears[1].register_forward_hook(lambda *_: projected.append(1))
    with torch.no_grad():
        memory = m.encode(src, mask)
        want = [m.decode(memory, mask, tgt[:, i : i + 1], None, cache) for i in range(4)]
        assert len(projected) == 2
        with pytest.raises(ValueError, match=r"key is another tensor than at the first step"):
            m.decode(memory.clone(), mask, tgt[:, 4:5], None, cache)
        kept = cache.layers[0].memory.key
        cache.reset()
        got = [m.decode(memory.clone(), mask, tgt[:, :1], None, cache)]
        got += [m.decode(None, mask, tgt[:, i : i + 1], None, cache) for i in range(1, 4)]
    assert len(projected) == 4 and cache.layers[0].memory.key is kept
    assert all(torch.equal(x, y) for x, y in zip(got, want))


def test_a_reordered_cache_decodes_the_other_rows(sources, device):
    src, mask, tgt = sources
    m, index = model(device), torch.tensor([2, 0, 0, 1], device=device)
    with torch.no_grad():
        memory, cache = m.encode(src, mask), DecoderCache(9)
        m.decode(memory, mask, tgt[:, :3], None, cache)
        cache.reorder(index)
        out = m.decode(None, mask[index], tgt[index, 3:4], None, cache)
        with pytest.raises(ValueError, match="key is another tensor than at the first step"):
            m.decode(memory, mask[index], tgt[index, 4:5], None, cache)
        want = m.decode(memory, mask, tgt[:, :4], ff.subsequent_mask(4).to(device))[index, 3:]
    torch.testing.assert_close(out, want)


def test_a_mask_reaches_over_the_cache(sources):
    """[B, 1, S] over what the cache holds and what is new."""
    src, mask, tgt = (x.cpu() for x in sources)
    m, cache = model(), DecoderCache(9)
    keep = torch.ones(3, 1, 5, dtype=torch.bool)
    keep[1, 0, 2] = False
    with torch.no_grad():
        memory = m.encode(src, mask)
        want = m.decode(memory, mask, tgt[:, :5], ff.subsequent_mask(5) & keep)
        got = [m.decode(memory, mask, tgt[:, :4], keep[..., :4], cache)]
        for attention in (layer.self_attn for layer in m.decoder.layers):
            attention.keep_attention = True
        got.append(m.decode(memory, mask, tgt[:, 4:5], keep, cache))
        with pytest.raises(ValueError, match=r"mask has shape .*expected .*\[3, 1, 6\]"):
            m.decode(memory, mask, tgt[:, 5:6], keep, cache)
    torch.testing.assert_close(torch.cat(got, 1), want)
    weights = m.decoder.layers[0].self_attn.attn
    assert weights.shape == (3, 2, 1, 5) and (weights[1, ..., 2] == 0).all()
    assert cache.longest == 5


def test_layers_with_hooks_and_of_the_users_take_their_part(sources):
    src, mask, tgt = (x.cpu() for x in sources)
    m, seen = model(), []

    class Layer(ff.DecoderLayer):
        pass

    m.decoder.layers[0].__class__ = Layer
    m.decoder.layers[1].register_forward_hook(lambda *_: seen.append(1))
    m.tgt_embed[1].dropout.register_forward_hook(lambda *_: seen.append(2))
    with torch.no_grad():
        want = m(src, tgt, mask, ff.subsequent_mask(9))
        seen.clear()
        out = steps(m, (src, mask, tgt), [3] * 3, DecoderCache(9))
    torch.testing.assert_close(out, want)
    assert sorted(seen) == [1] * 3 + [2] * 3


def test_bad_calls_of_the_modules_are_named(sources):
    src, mask, tgt = (x.cpu() for x in sources)
    m, attend = model(), ff.MultiHeadedAttention(2, 16).eval()
    x = torch.randn(3, 2, 16)
    packing = ff.unpad(x, torch.tensor([2, 1, 2]))[1]
    for options, message in (
        (dict(mask=packing), "mask is a Packing together with a cache"),
        (dict(key_lengths=torch.tensor([1, 1, 1])), "key_lengths is given together with a cache"),
        (dict(cache=DecoderCache(4)), "cache is a DecoderCache; expected a KVCache"),
    ):
        with pytest.raises((ValueError, TypeError), match=message), torch.no_grad():
            attend(x, x, x, **{"cache": KVCache(3, 2, 4, 8), **options})
    with pytest.raises(ValueError, match="key requires a gradient, and a cache keeps none"):
        attend(x, x, x, cache=KVCache(3, 2, 4, 8))
    words = "memory requires a gradient, or its projection does, and a cache keeps none"
    with pytest.raises(ValueError, match=words):
        attend(x, x, x, cache=MemoryCache())
    with torch.no_grad():
        memory = m.encode(src, mask)
        with pytest.raises(TypeError, match="key is a NoneType"):
            m.decode(None, mask, tgt, None, DecoderCache(9))
        with pytest.raises(TypeError, match="cache is a KVCache; expected a DecoderCache"):
            m.decode(memory, mask, tgt, None, KVCache(3, 2, 4, 8))
        m.tgt_embed[1] = ff.PositionalEncoding(16, 0.0, max_len=4)
        cache = DecoderCache(9)
        m.decode(memory, mask, tgt[:, :3], None, cache)
        with pytest.raises(ValueError, match="x has 2 positions after the first 3;"):
            m.decode(memory, mask, tgt[:, 3:5], None, cache)
        m.tgt_embed = torch.nn.Embedding(13, 16)
        with pytest.raises(TypeError, match="the embedding is a Embedding; expected"):
            m.decode(memory, mask, tgt[:, :3], None, cache)
    with pytest.raises(ValueError, match="capacity is 0"):
        DecoderCache(0)


def test_positions_can_start_anywhere():
    m = ff.PositionalEncoding(16, 0.0, max_len=9)
    x = torch.randn(3, 2, 16)
    assert torch.equal(m(x, 7), x + m.pe[:, 7:9])
    start = torch.tensor([0, 5, 7])
    assert torch.equal(m(x, start), x + torch.stack([m.pe[0, i : i + 2] for i in (0, 5, 7)]))
    for start, error, message in (
        (8, ValueError, "x has 2 positions after the first 8; expected at most max_len = 9"),
        (torch.tensor([0, 1, 8]), ValueError, "start holds 8, and x has 2 positions"),
        (torch.tensor([0, 1, -2]), ValueError, "start holds -2"),
        (torch.tensor([0, 1]), ValueError, r"start has shape \[2\]; expected \[B\] = \[3\]"),
    ):
        with pytest.raises(error, match=message):
            m(x, start)
    with pytest.raises(ValueError, match=r"x has shape .*expected \[B, S, d_model = 16\]"):
        m(x[..., :1])


def test_the_cache_of_a_layer_attends_without_dropout_by_default():
    key, value = entries(3)
    layer = LayerCache(S)
    layer.append(key, value)
    query = torch.randn(B, G, 1, D)
    want = ff.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(layer.attend(query), want)


@pytest.mark.with_all
@torch.no_grad()
def test_a_compiled_step():
    """One graph, from the first step on and after others."""
    torch._dynamo.reset()
    model = ff.make_decoder(11, N=1, d_model=8, d_ff=12, h=2).eval()
    tokens, cache = torch.randint(1, 11, (2, 5)), DecoderCache(8)
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    steps = [step(part, None, cache) for part in tokens.split([3, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), model(tokens), atol=1e-5, rtol=1e-4)
