"""The decoder-only model against the tutorials' layers in float64, with a cache, and trained."""

import pytest
import torch
from test_transformer import check_against_tutorial, moved

import fastformer as ff

B, T, V = 2, 7, 13
OPTIONS = {
    "plain": {},
    "post-norm": {"norm_first": False, "activation": "gelu"},
    "all": {
        "norm": "rms", "activation": "swiglu", "kv_heads": 1, "learned_positions": True,
        "max_len": 9, "padding_idx": 0, "tie_generator": True,
    },
}  # fmt: skip
ROTARY = dict(positions="rotary", rope_theta=50.0, qk_norm=True, norm="rms", kv_heads=1, max_len=9)


def small_model(device="cpu", N=2, **options):
    return moved(ff.make_decoder(V, N, d_model=16, d_ff=24, h=2, dropout=0.0, **options)).to(device)


def padded(device, side="right"):
    tokens = torch.randint(1, V, (B, T), device=device)
    tokens[1, slice(4, None) if side == "right" else slice(0, 3)] = 0
    return tokens, (tokens != 0).unsqueeze(-2)


@pytest.mark.parametrize("case", OPTIONS)
def test_against_the_layers_of_the_tutorials(case, backend, device):
    """Log-probabilities and the gradient of every parameter, of an encoder with a causal mask."""
    model, (tokens, mask) = small_model(device, **OPTIONS[case]), padded(device)
    inputs = tokens, None, mask & ff.subsequent_mask(T).to(device), None
    renamed = ("decoder.", "encoder."), ("embed.", "src_embed.")
    actual = model.generator(model(tokens, mask))
    check_against_tutorial(model, actual, inputs, OPTIONS[case], renamed)


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("case", [*OPTIONS, "rotary"])
def test_a_cache_computes_what_the_whole_sequence_does(case, side, backend, device):
    """In pieces of several tokens and of one, and after a crop of rows that differ; with padding
    the mask counts what the cache holds.
    """
    options = OPTIONS.get(case, ROTARY)
    model = small_model(device, **options).eval().requires_grad_(False)
    tokens, mask = padded(device, side)
    mask = None if side is None else mask
    whole, cache = model(tokens, mask), ff.DecoderCache(T)
    for piece in (slice(0, 3), slice(3, 5), slice(5, 6), slice(6, 7)):
        seen = None if mask is None else mask[..., : piece.stop]
        out = model(tokens[:, piece], seen, cache)
        torch.testing.assert_close(out, whole[:, piece], atol=2e-5, rtol=1e-5)
    assert cache.longest == T
    if "kv_heads" in options:
        assert cache.layers[0].own.key.shape == (B, 1, T, 8)
    with pytest.raises(ValueError, match="the cache holds 7 of its capacity of 7"):
        model(tokens[:, :1], None, cache)
    if side is None:
        cache.crop(torch.tensor([4, 2], device=device))
        out = model(torch.stack([tokens[0, 4:6], tokens[1, 2:4]]), None, cache)
        want = torch.stack([whole[0, 4:6], whole[1, 2:4]])
        torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-5)


def test_language_model_is_causal(backend, device):
    model = small_model(device).eval()
    tokens, _ = padded(device)
    before = model(tokens)
    tokens[:, 3] = tokens[:, 3] % 12 + 1
    after = model(tokens)
    assert torch.equal(before[:, :3], after[:, :3])
    assert ((before - after)[:, 3:].abs().amax(-1) > 1e-4).all()


def test_packed(backend, device):
    """Without padding the layers are causal, too."""
    model = small_model(device).eval()
    x, lengths = model.embed(padded(device)[0]), torch.tensor([T, 4], device=device)
    tokens, packing = ff.unpad(x, lengths)
    have = model.decoder(tokens, packing)
    torch.testing.assert_close(have, ff.unpad(model.decoder(x, None), lengths)[0])
    assert ff.pad(have, packing).shape == x.shape


def test_make_decoder_and_its_state_dict():
    model = ff.make_decoder(V, 2, 16, 24, 2)
    assert type(model) is ff.LanguageModel and type(model.decoder.norm) is ff.LayerNorm
    encoder = ff.make_model(V, V, 2, 16, 24, 2).encoder
    names = {f"decoder.{name}" for name in encoder.state_dict()}
    others = {"embed.0.lut.weight", "embed.1.pe", "generator.proj.weight", "generator.proj.bias"}
    assert set(model.state_dict()) == names | others
    assert not list(ff.make_decoder(V, 0, 16, 24, 2, norm_first=False).decoder.parameters())
    tied = ff.make_decoder(V, 1, 16, 24, 2, tie_generator=True, padding_idx=0)
    assert tied.generator.proj.weight is tied.embed[0].lut.weight
    assert not tied.generator.proj.weight[0].any() and tied.generator.proj.weight[1:].all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_heads": 3}, "kv_heads is 3; expected a divisor of h = 8"),
        ({"positions": "alibi"}, "positions is 'alibi'; expected one of sinusoidal, rotary"),
        ({"positions": "rotary", "h": 16}, "d_model / h is 1 with positions 'rotary'; expected"),
        ({"positions": "rotary", "learned_positions": True}, "learned_positions is True with"),
        ({"positions": "rotary", "rope_theta": 0}, "^rope_theta is 0.0; expected a positive"),
        ({"rope_theta": 10000.0}, "rope_theta is 10000.0 with positions 'sinusoidal', which have"),
    ],
)
def test_make_decoder_refuses(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ff.make_decoder(**{"vocab": V, "d_model": 16, "N": 1} | arguments)


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary"])
def test_tokens_without_a_batch_are_refused_by_name(positions):
    model = ff.make_decoder(V, 1, 16, 24, 2, positions=positions)
    with pytest.raises(ValueError, match=r"tokens has shape \[9\]; expected \[B, S\], or a Pac"):
        model(torch.ones(9, dtype=torch.long))


def test_a_cache_wants_a_causal_layer():
    attention, fed = ff.MultiHeadedAttention(2, 16), ff.PositionwiseFeedForward(16, 24)
    layer = ff.EncoderLayer(16, attention, fed, 0.0).requires_grad_(False)
    with pytest.raises(ValueError, match="cache is given to a layer with is_causal=False"):
        layer(torch.randn(B, T, 16), None, ff.DecoderCache(T).layer(0))


# ---------------------------------------------------------------------------------------- training


def test_a_batch_without_a_source():
    tokens = torch.tensor([[3, 4, 5, 0], [0, 6, 7, 8]])
    batch = ff.Batch(None, tokens)
    assert batch.src is None and batch.src_mask is None
    assert torch.equal(batch.tgt, tokens[:, :-1]) and torch.equal(batch.tgt_y, tokens[:, 1:])
    assert batch.tgt_mask.tolist() == [[[True, True, True]], [[False, True, True]]]
    assert batch.ntokens == 5
    assert repr(batch.to("meta")) == "Batch(src=None, tgt=[2, 3], device=meta)"
    with pytest.raises(TypeError, match="src and tgt are None; expected token ids in one of them"):
        ff.Batch(None)
