"""Models with rotary positions and norms of queries and keys: layers against transformers' Qwen3,
positions in packed batches, and what is refused. test_language_model.py has them in a cache.
"""

import pytest
import torch
from test_transformer import moved

import fastformer as ff
from fastformer.dispatch import backends

B, T, V, D, H, G = 2, 7, 13, 16, 4, 2


def small_model(device="cpu", **options):
    options = dict(kv_heads=G, norm="rms", qk_norm=True, max_len=T + 1) | options
    model = ff.make_decoder(V, 2, D, 24, H, 0.0, positions="rotary", rope_theta=50.0, **options)
    return moved(model).to(device).eval()


def ids(device="cpu"):
    return torch.randint(1, V, (B, T), device=device)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_layer_is_that_of_qwen(backend, device, qk_norm):
    """`Qwen3Attention` with the same weights: projections, norms, rotation, causal attention."""
    qwen = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    from transformers import Qwen3Config

    config = Qwen3Config(
        hidden_size=D, num_attention_heads=H, num_key_value_heads=G, head_dim=D // H,
        attention_bias=True, rms_norm_eps=1e-6, attn_implementation="eager", num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": 50.0},
    )  # fmt: skip
    theirs = qwen.Qwen3Attention(config, 0).to(device)
    ours = ff.MultiHeadedAttention(H, D, 0.0, G, qk_norm=qk_norm).to(device)
    with torch.no_grad():
        for p in ours.parameters():
            p.copy_(torch.rand_like(p) - 0.3)
        projections = theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.o_proj
        for mine, other in zip(ours.linears, projections):
            other.load_state_dict(mine.state_dict())
        if qk_norm:
            theirs.q_norm.load_state_dict(ours.query_norm.state_dict())
            theirs.k_norm.load_state_dict(ours.key_norm.state_dict())
        else:
            theirs.q_norm = theirs.k_norm = torch.nn.Identity()
    x = torch.randn(B, T, D, device=device)
    angles = qwen.Qwen3RotaryEmbedding(config).to(device)(x, torch.arange(T, device=device)[None])
    causal = torch.full((T, T), -torch.inf, device=device).triu(1)
    want, _ = theirs(x, angles, causal[None, None])
    rotary = ff.RotaryEmbedding(D // H, T, 50.0).to(device)(x)
    have = ours(x, x, x, is_causal=True, rotary=rotary)
    torch.testing.assert_close(have, want, atol=2e-6, rtol=2e-5)


def test_positions_restart_with_each_packed_sequence(backend, device):
    model = small_model(device)
    x, lengths = model.embed(ids(device)), torch.tensor([4, T], device=device)
    tokens, packing = ff.unpad(x, lengths)
    have = model.decoder(tokens, packing)
    torch.testing.assert_close(have, ff.unpad(model.decoder(x, None), lengths)[0])
    cos, sin = model.decoder.rotary(tokens, packing)
    positions = torch.tensor([*range(4), *range(T)], device=device)
    table = ff.rotary_frequencies(D // H, T, 50.0, device=device)
    assert torch.equal(cos, table[0][positions]) and torch.equal(sin, table[1][positions])


def test_one_op_rotates_and_normalizes(device):
    """Each layer calls it once; with a hook on a norm, that module runs, with the same result."""
    model, tokens, normalizes, seen = small_model(device), ids(device), [], []

    def note(op, arguments):
        if op == "rotary_embedding":
            normalizes.append(arguments["query_norm"] is not None)

    with backends.observe(on_call=note):
        before = model(tokens)
        model.decoder.layers[0].self_attn.key_norm.register_forward_hook(lambda *_: seen.append(1))
        torch.testing.assert_close(model(tokens), before)
    assert normalizes == [True, True, False, True] and seen == [1]


def test_norms_without_a_rotation(backend, device):
    x = torch.randn(B, T, D, device=device)
    ours = ff.MultiHeadedAttention(H, D, 0.0, qk_norm=True).to(device)
    plain = ff.MultiHeadedAttention(H, D, 0.0).to(device)
    plain.load_state_dict(ours.state_dict(), strict=False)
    rows = ours.query_norm.weight.data, ours.key_norm.weight.data
    for weight in rows:
        weight.copy_(torch.rand_like(weight) + 0.5)
    q, k, v = (f(x).unflatten(-1, (H, -1)).transpose(1, 2) for f in list(ours.linears)[:3])
    q, k = ours.query_norm(q), ours.key_norm(k)
    want = ff.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(ours(x, x, x), ours.linears[3](want))
    assert not torch.allclose(ours(x, x, x), plain(x, x, x), atol=1e-3)
    cache, memory = ff.DecoderCache(4), torch.randn(B, 5, D, device=device)
    ours.requires_grad_(False)
    kept = cache.layer(0).memory
    first = ours(x, memory, memory, cache=kept)
    torch.testing.assert_close(first, ours(x, memory, memory))
    torch.testing.assert_close(ours(x, memory, memory, cache=kept), first)


def test_the_table_stays_in_float32(device):
    model = small_model(device)
    before = model.decoder.rotary.table
    assert model.bfloat16().decoder.rotary.table.dtype == torch.float32
    assert torch.equal(model.decoder.rotary.table, before)
    assert model(ids(device)).dtype == torch.bfloat16
    assert model.double().decoder.rotary.table.dtype == torch.float64
    assert not any("rotary" in name for name in model.state_dict())
    assert "dim=4, max_len=8, theta=50.0" in repr(model.decoder.rotary)
    empty = ff.RotaryEmbedding(4, 8, 50.0).to("meta").to_empty(device=device)
    assert torch.equal(empty.table, before)


def test_padding_and_hidden_layers_train(device):
    """Every parameter gets a gradient, the norms' weights too."""
    model, tokens = small_model(device).train(), ids(device)
    model(tokens, (tokens > 1).unsqueeze(1)).square().sum().backward()
    named = {n: p.grad for n, p in model.named_parameters() if not n.startswith("generator")}
    assert all(g is not None and g.isfinite().all() and g.any() for g in named.values())
    assert sum("query_norm" in name for name in named) == 2


def test_the_default_of_rope_theta():
    """make_decoder has the one of RotaryEmbedding, which is that of the paper."""
    want = torch.cat(ff.rotary_frequencies(8, 5000, 10000.0), -1)
    for given in ({}, {"rope_theta": None}, {"rope_theta": 10000.0}):
        model = ff.make_decoder(V, d_model=16, N=0, h=2, positions="rotary", **given)
        assert torch.equal(model.decoder.rotary.table, want), given


def test_layers_refuse(device):
    model, x = small_model(device), torch.randn(B, T + 2, D, device=device)
    with pytest.raises(ValueError, match=r"x has 9 positions; expected at most max_len = 8"):
        model.decoder(x, None)
    long = torch.tensor([T + 2, 1], device=device)
    with pytest.raises(ValueError, match="x has a sequence of 9 tokens; expected at most max_len"):
        model.decoder(*ff.unpad(x, long))
    attention = model.decoder.layers[0].self_attn
    with pytest.raises(TypeError, match=r"rotary is a Tensor; expected \(cos, sin\) or None"):
        attention(x, x, x, rotary=x)
    memory = ff.DecoderCache(4).layer(0).memory
    with pytest.raises(ValueError, match="rotary is given together with a MemoryCache; expected"):
        attention(x, x, x, cache=memory, rotary=model.decoder.rotary(x[:, :T]))
    with pytest.raises(ValueError, match="max_len is 10; expected at most 9, the positions of"):
        ff.greedy_decode(model, ids(device), None, T + 3)
