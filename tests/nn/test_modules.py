"""Each module against its formula in float64, as the tutorials write it, on both backends."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastformer as ff
from fastformer import Embeddings, LayerNorm, MultiHeadedAttention, attention, subsequent_mask

B, T, S, H, D = 2, 5, 7, 2, 16  # 8 features a head


def assert_close(actual, expected, tolerance=1e-5):
    """Relative Frobenius error; the oracle is float64."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected).norm() / expected.norm().clamp_min(1e-6)
    assert error < tolerance, f"relative error {error:.1e}"


def randomised(module, device):
    """Weights with which a softmax is far from flat, and no LayerNorm is the identity."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p) * 0.5 + (p == 1))
    return module.to(device)


def check(module, oracle, inputs, *rest):
    """Output and every gradient of `module(*inputs, *rest)` against `oracle`, in float64."""
    double = copy.deepcopy(module).double()
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = oracle(double, *wide, *rest)
    inputs = [x.detach().requires_grad_() for x in inputs]
    actual = module(*inputs, *rest)
    assert_close(actual, expected)
    upstream = torch.randn_like(actual)
    names = [name for name, _ in module.named_parameters()]
    ours = torch.autograd.grad(actual, [*inputs, *module.parameters()], upstream)
    theirs = torch.autograd.grad(expected, [*wide, *double.parameters()], upstream.double())
    for name, a, e in zip([*map(str, range(len(inputs))), *names], ours, theirs, strict=True):
        if name == "linears.1.bias" and getattr(module, "sinks", None) is None:
            # softmax ignores what is added to all scores: zero but for rounding
            assert a.abs().max() < 1e-4
        else:
            assert_close(a, e, 2e-5)


# ------------------------------------------------------------------------------ clones, embeddings


def test_clones_are_independent():
    layer = nn.Linear(3, 3)
    first, second = ff.clones(layer, 2)
    assert torch.equal(first.weight, layer.weight)
    with torch.no_grad():
        first.weight.zero_()
    assert second.weight.any() and layer.weight.any()
    assert len(ff.clones(layer, 0)) == 0


def test_clones_refuse_other_numbers():
    with pytest.raises(ValueError, match="N is -1; expected 0 or more"):
        ff.clones(nn.Linear(3, 3), -1)
    with pytest.raises(TypeError, match="N is a float"):
        ff.clones(nn.Linear(3, 3), 2.0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_embeddings_scale_by_the_root(dtype):
    """The row of padding is zero, and stays so."""
    e = Embeddings(D, 11, padding_idx=0)
    x = torch.tensor([[0, 10, 3], [7, 7, 1]], dtype=dtype)
    expected = torch.stack([e.lut.weight[i] * 4.0 for i in x.flatten().tolist()]).view(2, 3, D)
    out = e(x)
    assert torch.equal(out, expected) and not out[0, 0].any()
    out.sum().backward()
    assert e.lut.weight.grad.any(1).tolist() == [i in (10, 3, 7, 1) for i in range(11)]


def test_embeddings_refuse_ids_past_the_vocabulary():
    with pytest.raises(ValueError, match="token id 11; expected ids from 0 to 10"):
        Embeddings(D, 11)(torch.tensor([[1, 11]]))
    with pytest.raises(TypeError, match=r"x has dtype torch\.bool; expected integers"):
        Embeddings(D, 11)(torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="padding_idx is 11"):
        Embeddings(D, 11, padding_idx=11)
    for module in (Embeddings, ff.Generator):
        with pytest.raises(ValueError, match="vocab is 0; expected 1 or more"):
            module(D, 0)


# ---------------------------------------------------------------------------- positional encoding


@pytest.mark.parametrize("d", [1, 7, 16, 512])
def test_positional_encoding_formula(d):
    pe = ff.PositionalEncoding(d, 0.0).pe
    assert pe.shape == (1, 5000, d)
    assert pe.dtype == torch.float32
    for p in (0, 1, 77, 4999):
        for i in {0, 1, d // 2, d - 2, d - 1} & set(range(d)):
            angle = p / 10000 ** (2 * (i // 2) / d)
            expected = math.cos(angle) if i % 2 else math.sin(angle)
            assert pe[0, p, i].item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_positional_encoding_adds_the_first_positions(dtype):
    """And drops as torch does."""
    m, x = ff.PositionalEncoding(D, 0.3, max_len=9), torch.randn(B, S, D, dtype=dtype)
    want = x + m.pe[:, :S].to(dtype)
    assert torch.equal(m.eval()(x), want)
    torch.manual_seed(1)
    dropped = m.train()(x)
    torch.manual_seed(1)
    assert torch.equal(dropped, F.dropout(want, 0.3))


def test_positional_encoding_is_stored():
    fixed, learned = (ff.PositionalEncoding(D, 0.0, 9, learned) for learned in (False, True))
    assert not list(fixed.parameters())
    assert [name for name, _ in learned.named_parameters()] == ["pe"]
    assert torch.equal(fixed.pe, learned.pe)  # a learned one starts from the sinusoid
    for m in (fixed, learned):
        assert {n: tuple(t.shape) for n, t in m.state_dict().items()} == {"pe": (1, 9, D)}
    learned(torch.randn(B, S, D)).sum().backward()
    assert torch.equal(learned.pe.grad[0, :, 0], torch.tensor([2.0] * S + [0.0] * 2))


# -------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_of_a_query_that_sees_no_key_is_uniform(dtype):
    """Half precision does not overflow."""
    query, key, value = torch.randn(3, 2, 4, 8).to(dtype)
    mask = torch.ones(4, 4).tril() * torch.tensor([[1], [1], [0], [1]])
    output, weights = attention(query, key, value, mask)
    assert weights.isfinite().all() and (weights[:, 0, 1:] == 0).all()
    assert (weights[:, 2] == 0.25).all() and weights.dtype == dtype
    torch.testing.assert_close(output[:, 2], value.mean(1))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 2, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_attention_formula(lead, dtype):
    query = torch.randn(*lead, T, 8, dtype=torch.float64) * 3
    key = torch.randn(*lead, S, 8, dtype=torch.float64)
    value = torch.randn(*lead, S, 4, dtype=torch.float64)
    mask = torch.ones(T, S).tril(1)
    given = mask if dtype.is_floating_point else 2 * mask
    output, weights = attention(query, key, value, given.to(dtype))
    e = torch.einsum("...td,...sd->...ts", query, key).div(8**0.5).exp() * mask
    expected = e / e.sum(-1, keepdim=True)
    assert_close(weights, expected, 1e-12)
    assert_close(output, torch.einsum("...ts,...sd->...td", expected, value), 1e-12)
    assert (weights.masked_select(mask == 0) == 0).all()


def test_attention_dropout_is_applied_to_the_weights():
    query, key, value = torch.randn(3, 2, 4, 8)
    plain = attention(query, key, value)[1]
    output, weights = attention(query, key, value, dropout=lambda w: 2 * w)
    assert torch.equal(weights, 2 * plain)
    torch.testing.assert_close(output, 2 * plain @ value)


def test_attention_refuses_a_mask_that_does_not_fit():
    query, key, value = torch.randn(3, 2, 4, 8)
    for shape in ((2, 4, 5), (3, 4, 4), (1, 2, 4, 4)):
        with pytest.raises(ValueError, match=r"mask has shape .*broadcasts to \[2, 4, 4\]"):
            attention(query, key, value, torch.ones(shape))


# --------------------------------------------------------------------------- multi-head attention


def tutorial_heads(m, query, key, value, mask=None):
    """Head by head, as section 3.2.2 of the paper has it; a query that sees no key gives zeros."""
    q, k, v = (linear(x) for linear, x in zip(m.linears, (query, key, value), strict=False))
    heads, width = [], D // m.h
    for i in range(m.h):
        j = i // (m.h // m.kv_heads)  # the head of keys and values
        own, part = (slice(width * n, width * n + width) for n in (i, j))
        scores = torch.einsum("btd,bsd->bts", q[..., own], k[..., part]) / math.sqrt(width)
        visible = torch.ones_like(scores) if mask is None else (mask != 0) + 0 * scores
        weights = scores.exp() * visible
        total = weights.sum(-1, keepdim=True) + (0.0 if m.sinks is None else m.sinks[i].exp())
        weights = weights / total.clamp_min(1e-300)
        heads.append(torch.einsum("bts,bsd->btd", weights, v[..., part]))
    gates = 1.0 if m.gate is None else 1 / (1 + (-m.gate(query)).exp())
    return m.linears[3](gates * torch.cat(heads, -1))


def padding(b=B, s=S):
    return torch.arange(s).view(1, 1, s) < torch.tensor([s, s - 3]).view(b, 1, 1)


MASKS = {
    "none": None,
    "padding": padding().long(),
    "full": padding() & (torch.arange(T * S).view(1, T, S) % 3 > 0),
    "shared padding": padding()[1:],
    "shared": subsequent_mask(S)[:, :T].to(torch.uint8),
    "two": -subsequent_mask(S)[0, :T].long(),
    "floats": subsequent_mask(S)[:, :T].bfloat16(),
}


@pytest.mark.parametrize("mask", MASKS)
def test_multi_headed_attention(mask, backend, device):
    m = randomised(MultiHeadedAttention(H, D, dropout=0.0), device)
    query, key, value = (torch.randn(B, n, D, device=device) for n in (T, S, S))
    mask = MASKS[mask] if MASKS[mask] is None else MASKS[mask].to(device)
    check(m, tutorial_heads, [query, key, value], mask)


@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"gate": True}], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_sinks_and_a_gate(kv_heads, options, backend, device):
    """Head i reads head i // (h / kv_heads) of keys and values; the weights of the keys leave a
    share to the sinks; sigmoid(gate(query)) multiplies the heads. With padding, without, and with a
    cache.
    """
    m = randomised(MultiHeadedAttention(4, D, 0.0, kv_heads, **options), device)
    assert [x.out_features for x in m.linears] == [D, kv_heads * 4, kv_heads * 4, D]
    query, key, value = (torch.randn(B, n, D, device=device) for n in (T, S, S))
    check(m, tutorial_heads, [query, key, value], padding().to(device))
    m.keep_attention = True
    out = m(query, key, value)
    assert (m.attn.sum(-1) < 0.99).any() == ("sinks" in options)
    v = m.linears[2](value).view(B, S, kv_heads, 4).repeat_interleave(4 // kv_heads, 2)
    joined = torch.einsum("bhts,bshd->bthd", m.attn, v).reshape(B, T, D)
    gates = 1.0 if m.gate is None else m.gate(query).sigmoid()
    torch.testing.assert_close(out, m.linears[3](gates * joined))
    m.keep_attention = False

    x, lengths = torch.randn(B, S, D, device=device), torch.tensor([S, 3], device=device)
    want = m(x, x, x, key_lengths=lengths, is_causal=True)
    tokens, packing = ff.unpad(x, lengths)
    out = m(tokens, tokens, tokens, packing, is_causal=True)
    torch.testing.assert_close(out, ff.unpad(want, packing)[0])
    with torch.no_grad():
        cache = ff.KVCache(B, kv_heads, S, 4)
        steps = [m(part, part, part, cache=cache) for part in x.split(1, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), m(x, x, x, is_causal=True))


def test_sinks_are_a_part_of_the_state():
    m, plain = (MultiHeadedAttention(4, D, sinks=sinks) for sinks in (True, False))
    assert m.sinks.eq(0).all() and plain.sinks is None
    with pytest.raises(RuntimeError, match=r"Unexpected.*sinks"):
        plain.load_state_dict(m.state_dict())


def test_multi_headed_attention_masks_by_head(device):
    """A mask of four dimensions reaches the heads that it names."""
    m = randomised(MultiHeadedAttention(H, D, dropout=0.0), device)
    x = torch.randn(B, S, D, device=device)
    mask = torch.ones(1, H, 1, S, device=device)
    mask[:, 1, :, 2] = 0
    m.keep_attention = True
    m(x, x, x, mask)
    hidden = m.attn[..., 2] == 0
    assert not hidden[:, 0].any() and hidden[:, 1].all()


def test_query_that_sees_no_key_gives_the_bias(backend, device):
    m = randomised(MultiHeadedAttention(H, D, dropout=0.0), device)
    m.keep_attention = True
    x = torch.randn(B, T, D, device=device, requires_grad=True)
    mask = torch.ones(B, T, T, dtype=torch.int32, device=device)
    mask[0, 2] = 0
    mask[1] = 0
    out = m(x, x, x, mask)
    assert torch.equal(out[0, 2], m.linears[3].bias)
    assert torch.equal(out[1], m.linears[3].bias.expand(T, D))
    assert not torch.allclose(out[0, 0], m.linears[3].bias, atol=1e-2)
    assert not m.attn[1].any() and not m.attn[0, :, 2].any()
    out.sum().backward()
    assert x.grad.isfinite().all() and not x.grad[1].any()


@pytest.mark.parametrize("inputs, gemms", [("xxx", 2), ("xyy", 3), ("xyz", 4), ("hooked", 4)])
@pytest.mark.parametrize("kv_heads", [H, 1])
def test_one_gemm_for_what_one_input_is_projected_to(device, monkeypatch, inputs, gemms, kv_heads):
    """q, k and v of self-attention, k and v of cross-attention, and the output's; not beside a
    hook. The result and every gradient are those of the layers one by one.
    """
    m = randomised(MultiHeadedAttention(H, D, 0.0, kv_heads).double(), device)
    x = torch.randn(B, S, D, device=device, dtype=torch.float64, requires_grad=True)
    y = x if inputs in ("xxx", "hooked") else torch.randn_like(x)
    z = torch.randn_like(x) if inputs == "xyz" else y
    called = []
    if inputs == "hooked":
        m.linears[1].register_forward_hook(lambda *_: called.append("hook"))
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *a: called.append("gemm") or linear(*a))
    leaves = [x, *m.parameters()]
    have = m(x, y, z)
    have = [have, *torch.autograd.grad(have.square().sum(), leaves)]
    assert called.count("gemm") == gemms and ("hook" in called) == (inputs == "hooked")
    want = m(x, y.clone(), z.clone())
    want = [want, *torch.autograd.grad(want.square().sum(), leaves)]
    for a, b in zip(have, want):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


OPTIONS = {
    "causal": {"is_causal": True},
    "bias": {"bias": torch.arange(H * T * S).view(H, T, S).sin()},
    "lengths": {"key_lengths": torch.tensor([S, 3])},
    "window": {"window": (2, 1), "causal_alignment": "bottom_right"},
    "alibi": {"alibi_slopes": torch.tensor([0.3, 0.7]), "softcap": 4.0},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_of_attention(case, backend, device):
    """They reach the fused op, and the weights that are kept beside it."""
    options = {n: x.to(device) if torch.is_tensor(x) else x for n, x in OPTIONS[case].items()}
    m = randomised(MultiHeadedAttention(H, D, dropout=0.0), device)
    m.keep_attention = True
    query, key, value = (torch.randn(B, n, D, device=device) for n in (T, S, S))
    mask = padding().to(device)
    out = m(query, key, value, mask, **options)
    q, k, v = (
        linear(x).view(B, -1, H, 8).transpose(1, 2)
        for linear, x in zip(m.linears, (query, key, value))
    )
    heads = ff.scaled_dot_product_attention(q, k, v, mask.unsqueeze(1) != 0, **options)
    torch.testing.assert_close(out, m.linears[3](heads.transpose(1, 2).flatten(2)))
    torch.testing.assert_close(m.attn @ v, heads)
    plain = m(query, key, value, mask)
    assert not torch.allclose(plain, out, atol=1e-3)


def test_keep_attention(backend, device):
    m = randomised(MultiHeadedAttention(H, D, dropout=0.9), device)
    query, key, value = (torch.randn(B, n, D, device=device) for n in (T, S, S))
    m(query, key, value)
    assert m.attn is None
    m.keep_attention = True
    m(query, key, value, padding().to(device))
    assert m.attn.shape == (B, H, T, S) and not m.attn.requires_grad
    assert (m.attn[1, :, :, S - 3 :] == 0).all()
    torch.testing.assert_close(m.attn.sum(-1), torch.ones(B, H, T, device=device))  # no dropout
    copy.deepcopy(m)
    m.keep_attention = False
    m(query, key, value)
    assert m.attn is None


def test_dropout_of_the_attention_weights(backend, device):
    x = torch.randn(B, T, D, device=device)
    m = randomised(MultiHeadedAttention(H, D, dropout=1.0), device)
    assert torch.equal(m(x, x, x), m.linears[3].bias.expand(B, T, D))  # all weights dropped
    kept = randomised(MultiHeadedAttention(H, D, dropout=0.0), device)
    kept.load_state_dict(m.state_dict())
    assert torch.equal(m.eval()(x, x, x), kept(x, x, x))


def test_multi_headed_attention_refuses_bad_input():
    for name, ours in (("head", "h"), ("embedding_dim", "d_model")):
        with pytest.raises(TypeError, match=f"{name} is no argument here; expected {ours}$"):
            MultiHeadedAttention(**{"h": 4, "d_model": 8, name: 4})
    for options, error, message in (
        (dict(d_model=10), ValueError, "d_model is 10; expected a multiple of h = 4"),
        (dict(h=0), ValueError, "h is 0; expected 1 or more"),
        (dict(dropout=1.5), ValueError, r"dropout is 1\.5"),
    ):
        with pytest.raises(error, match=message):
            MultiHeadedAttention(**{"h": 4, "d_model": 8} | options)
    m, q, k = MultiHeadedAttention(H, D), torch.randn(B, T, D), torch.randn(B, S, D)
    for given, error, message in (
        ((q[0], k, k), ValueError, r"query has shape \[5, 16\]; .* \[B, S, d_model = 16\]"),
        ((q, k, k[..., :8]), ValueError, r"value has shape \[2, 7, 8\]"),
        ((q, k[:1], k[:1]), ValueError, r"key .*expected the batch of query"),
        ((q.long(), k, k), TypeError, r"query has dtype torch\.int64"),
        ((q.half(), k.half(), k.half()), TypeError, r"query has .*float16; .*of the parameters"),
    ):
        with pytest.raises(error, match=message):
            m(*given)
    for shape in ((S,), (1, B, 1, T, S)):
        with pytest.raises(ValueError, match=r"mask has shape .*expected \[B, 1, S\], \[B, T, S\]"):
            m(q, k, k, torch.ones(shape))
    for shape in ((B, T, T), (3, 1, S), (B, H, T, T), (S, T)):
        with pytest.raises(ValueError, match=r"mask has shape .*broadcasts to"):
            m(q, k, k, torch.ones(shape))
    with pytest.raises(ValueError, match=r"broadcasts to .*for each head, mask\[None\]"):
        MultiHeadedAttention(4, D)(q, k, k, torch.ones(4, T, S))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_additive_mask_is_refused(dtype):
    """Of 0 and -inf, torch's: what is not zero would take part, and the target leak."""
    m, x = MultiHeadedAttention(H, D), torch.randn(B, T, D)
    added = nn.Transformer.generate_square_subsequent_mask(T, dtype=dtype)
    model = ff.make_model(7, 7, 1, D, 24, H)
    ids = torch.ones(B, T, dtype=torch.long)
    for call in (
        lambda mask: m(x, x, x, mask),
        lambda mask: attention(x, x, x, mask),
        lambda mask: model(ids, ids, None, mask),
    ):
        with pytest.raises(ValueError, match=r"mask holds -inf; expected 0 and 1 .*bias="):
            call(added[None])
        for other in (0.5, -1.0, math.nan, 2.0):
            with pytest.raises(ValueError, match=r"mask holds .*bias="):
                call(torch.full_like(added[None], other))
        call(added[None] == 0)
    m.eval()
    want = m(x, x, x, subsequent_mask(T))
    for mask in (subsequent_mask(T).to(dtype), 3 * subsequent_mask(T).int()):
        assert torch.equal(m(x, x, x, mask), want)
    torch.testing.assert_close(m(x, x, x, bias=added.float()), want)


def test_an_additive_mask_in_a_graph():
    """There an assertion stands in the graph, which breaks nowhere."""
    m, x = MultiHeadedAttention(H, D).eval(), torch.randn(B, T, D)
    added = nn.Transformer.generate_square_subsequent_mask(T)[None]
    ones = subsequent_mask(T).float()
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(m, (x, x, x, ones)).module()
    for graph in (compiled, exported):
        torch.testing.assert_close(graph(x, x, x, ones), m(x, x, x, ones))
        with pytest.raises(RuntimeError, match=r"mask: expected 0 and 1 .*bias="):
            graph(x, x, x, added)
    outs = torch.func.vmap(lambda x: attention(x, x, x, ones[0])[0])(x)
    assert torch.equal(outs, attention(x, x, x, ones[0])[0])


def test_a_mask_of_two_dimensions():
    """[T, S] where it cannot be [B, S]."""
    m = MultiHeadedAttention(H, D).eval()
    x = torch.randn(T, T, D)  # B = T
    mask = subsequent_mask(T)[0]
    words = r"\[B, S\] or \[T, S\]\? mask\[:, None\] is \[B, 1, S\].*mask\[None\] \[1, T, S\]"
    with pytest.raises(ValueError, match=words):
        m(x, x, x, mask)
    assert torch.equal(m(x[:B], x[:B], x[:B], mask), m(x[:B], x[:B], x[:B], mask[None]))
    assert torch.equal(
        m(x[:1, :1], x[:1], x[:1], mask[:1]), m(x[:1, :1], x[:1], x[:1], mask[None, :1])
    )
    with pytest.raises(ValueError, match=r"broadcasts to \[5, 5\]; mask\[:, None\] is"):
        m(x[:B], x[:B], x[:B], mask[:B])


# ---------------------------------------------------------------- feed-forward, LayerNorm, residual


FORMS = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "geglu": lambda x: F.gelu(x[..., :24]) * x[..., 24:],
    "swiglu": lambda x: F.silu(x[..., :24]) * x[..., 24:],
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_feed_forward(form, backend, device):
    """The op and, beside a hook, the layers one by one."""
    m = randomised(ff.PositionwiseFeedForward(D, 24, 0.0, form), device)
    x = torch.randn(B, T, D, device=device)

    def plain(m, x):
        return m.w_2(FORMS[form](m.w_1(x)))

    check(m, plain, [x])
    check(m, plain, [x[0, :3]])
    called = []
    m.w_2.register_forward_hook(lambda *_: called.append("hook"))
    torch.testing.assert_close(m(x), plain(m, x))
    assert len(called) == 2


@pytest.mark.parametrize("form", ["relu", "swiglu"])
def test_dropout_of_the_hidden_features(form, backend, device):
    x = torch.randn(B, T, D, device=device)
    m = randomised(ff.PositionwiseFeedForward(D, 24, 1.0, form), device)
    assert torch.equal(m(x), m.w_2.bias.expand(B, T, D))
    torch.testing.assert_close(m.eval()(x), m.w_2(FORMS[form](m.w_1(x))))


def tutorial_norm(m, x):
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).sum(-1, keepdim=True)
    if m.unbiased:
        y = (x - mean) / ((variance / (x.shape[-1] - 1)).sqrt() + m.eps)
    else:
        y = (x - mean) / (variance / x.shape[-1] + m.eps).sqrt()
    return m.weight * y + m.bias


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("eps", [1e-6, 0.1])  # with 0.1 its place in the formula is seen
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layer_norm(dtype, unbiased, eps, backend, device):
    m = randomised(LayerNorm(9, eps, unbiased).to(dtype), device)
    check(m, tutorial_norm, [torch.randn(B, T, 9, device=device, dtype=dtype) * 2 + 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rms_norm(dtype, backend, device):
    def plain(m, x):
        return m.weight * x / (x.square().mean(-1, keepdim=True) + m.eps).sqrt()

    m = randomised(ff.RMSNorm(9, 0.1).to(dtype), device)
    check(m, plain, [torch.randn(B, T, 9, device=device, dtype=dtype) * 2 + 3])
    assert ff.RMSNorm(9).eps == 1e-6 and torch.equal(ff.RMSNorm(9).weight, torch.ones(9))


def test_layer_norm_default_and_bounds():
    m = LayerNorm(9)
    assert (m.eps, m.unbiased) == (1e-6, False)
    assert torch.equal(m.weight, torch.ones(9)) and torch.equal(m.bias, torch.zeros(9))
    with pytest.raises(ValueError, match="features is 1; expected 2 or more"):
        LayerNorm(1, unbiased=True)


def test_sublayer_connection(backend, device):
    x = torch.randn(B, T, D, device=device)
    first = randomised(ff.SublayerConnection(D, 0.0), device)
    torch.testing.assert_close(first(x, torch.sin), x + tutorial_norm(first.norm, x).sin())
    last = randomised(ff.SublayerConnection(D, 0.0, norm_first=False), device)
    torch.testing.assert_close(last(x, torch.sin), tutorial_norm(last.norm, x + x.sin()))
    rms = randomised(ff.SublayerConnection(D, 0.0, norm="rms"), device)
    want = F.rms_norm(x, (D,), rms.norm.weight, 1e-6)
    torch.testing.assert_close(rms(x, torch.sin), x + want.sin())


def test_sublayer_connection_drops_the_sublayer_alone(device):
    x = torch.randn(B, T, D, device=device)
    m = ff.SublayerConnection(D, 1.0).to(device)
    assert torch.equal(m(x, torch.exp), x)
    m = ff.SublayerConnection(D, 1.0, norm_first=False).to(device)
    assert torch.equal(m(x, torch.exp), m.norm(x))


# ------------------------------------------------------------------------------- saving and modes

MODULES = {
    "embeddings": lambda: Embeddings(D, 11),
    "positional": lambda: ff.PositionalEncoding(D, 0.1, 9),
    "learned": lambda: ff.PositionalEncoding(D, 0.1, 9, learned=True),
    "attention": lambda: MultiHeadedAttention(H, D),
    "sinks and gate": lambda: MultiHeadedAttention(H, D, sinks=True, gate=True),
    "feed_forward": lambda: ff.PositionwiseFeedForward(D, 24),
    "layer_norm": lambda: LayerNorm(D, 1e-5, unbiased=True),
    "rms_norm": lambda: ff.RMSNorm(D, 1e-5),
    "sublayer": lambda: ff.SublayerConnection(D, 0.1, norm_first=False),
    "generator": lambda: ff.Generator(D, 11),
}


def call(m):
    if isinstance(m, Embeddings):
        return m(torch.arange(10).view(2, 5))
    x = torch.linspace(-2, 3, B * T * D).view(B, T, D).sin()
    if isinstance(m, MultiHeadedAttention):
        return m(x, x, x, subsequent_mask(T))
    return m(x, torch.sin) if isinstance(m, ff.SublayerConnection) else m(x)


@pytest.mark.parametrize("name", MODULES)
def test_copies_compute_the_same(name):
    m = randomised(MODULES[name](), "cpu").eval()
    other = MODULES[name]().eval()
    other.load_state_dict(m.state_dict())
    for same in (copy.deepcopy(m), pickle.loads(pickle.dumps(m)), other):
        assert torch.equal(call(same), call(m))


SPELLINGS = {
    "a_2": ("layer_norm", {"weight": "a_2", "bias": "b_2"}),
    "a2": ("layer_norm", {"weight": "a2", "bias": "b2"}),
    "gamma": ("layer_norm", {"weight": "gamma", "bias": "beta"}),
    "w1": ("feed_forward", {"w_1": "w1", "w_2": "w2"}),
    "project": ("generator", {"proj": "project"}),
    "projection": ("generator", {"proj": "projection"}),
    "linear_layers": (
        "attention",
        {f"linears.{i}": f"linear_layers.{i}" for i in range(3)} | {"linears.3": "output_linear"},
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings_load(spelling):
    name, names = SPELLINGS[spelling]
    m = randomised(MODULES[name](), "cpu").eval()
    state = m.state_dict()
    for ours, theirs in names.items():
        state = {key.replace(ours, theirs): tensor for key, tensor in state.items()}
    assert len(state) == len(m.state_dict())
    assert not set(state) & set(m.state_dict())
    given = dict(state)
    other, inner = MODULES[name]().eval(), MODULES[name]().eval()
    other.load_state_dict(state, strict=True)
    nested = {f"layers.0.{key}": tensor for key, tensor in state.items()}
    nn.ModuleDict({"layers": nn.ModuleList([inner])}).load_state_dict(nested, strict=True)
    assert torch.equal(call(other), call(m)) and torch.equal(call(inner), call(m))
    assert list(state) == list(given)  # the caller's dict is as it was
    assert set(other.state_dict()) == set(m.state_dict())  # and ours are the names that are saved


def test_wrong_names_are_listed():
    m = nn.ModuleDict({"norm": LayerNorm(D), "ff": ff.PositionwiseFeedForward(D, 24)})
    state = m.state_dict()
    state["norm.a_2"] = torch.ones(D)  # beside norm.weight
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "norm.a_2"'):
        m.load_state_dict(state)
    state = m.state_dict()
    state["ff.w1_.weight"] = state.pop("ff.w_1.weight")
    with pytest.raises(
        RuntimeError, match=r'Missing.*"ff.w_1.weight"(.|\n)*Unexpected.*"ff.w1_.weight"'
    ):
        m.load_state_dict(state)


def test_autocast(backend, device):
    """Under bf16 autocast the products are bf16; the residual stream and its norms stay float32."""
    x = torch.randn(B, T, D, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        heads = randomised(MultiHeadedAttention(H, D, 0.0), device)
        fed = randomised(ff.PositionwiseFeedForward(D, 24, 0.0), device)
        norm = LayerNorm(D).to(device)
        low = fed(x)
        assert heads(x, x.bfloat16(), x, subsequent_mask(T).to(device)).dtype == torch.bfloat16
        assert low.dtype == torch.bfloat16 and norm(x).dtype == torch.float32
    assert_close(low, fed(x).double(), 0.02)
