"""The whole model against the tutorials' computation in float64, its masks, names and modes."""

import copy
import functools
import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from test_modules import FORMS
from test_whole_model import Ops
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

import fastformer as ff
from fastformer import make_model, subsequent_mask
from fastformer.dispatch import backends

H = 2


def moved(model):
    """The model, with no parameter that is zero or one."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


def small_model(device="cpu", N=1, dropout=0.0, src_vocab=11, **options):
    model = make_model(src_vocab, 13, N, d_model=16, d_ff=24, h=H, dropout=dropout, **options)
    return moved(model).to(device)


def batch(device="cpu", B=2, S=7, T=5):
    """src, tgt, src_mask and tgt_mask as the tutorials' Batch makes them; one source ends early."""
    src, tgt = torch.randint(1, 11, (B, S)), torch.randint(1, 13, (B, T))
    src[-1, S - 2 :] = 0
    tensors = src, tgt, (src != 0).unsqueeze(-2), subsequent_mask(T)
    return tuple(t.to(device) for t in tensors)


def tutorial(
    state, src, tgt, src_mask, tgt_mask, norm_first=True, activation="relu", padding_idx=None
):
    """The model from its state dict, in float64, with nothing of fastformer; without tgt what the
    generator makes of the encoder's output.
    """
    state = {key: tensor.double() for key, tensor in state.items()}
    d = state["generator.proj.weight"].shape[1]

    def linear(x, name):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(x, name):
        if f"{name}.weight" not in state:  # none follows the last layer of post-norm
            return x
        if f"{name}.bias" in state:  # else RMSNorm
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return x * state[f"{name}.weight"] + state.get(f"{name}.bias", 0)

    def add(x, name, function, *args):
        name = f"{name}.norm"
        if norm_first:
            return x + function(norm(x, name), *args)
        return norm(x + function(x, *args), name)

    def heads(x, name, mask, memory=None):
        memory = x if memory is None else memory
        q, k, v = (
            linear(y, f"{name}.linears.{i}").unflatten(-1, (-1, d // H)).transpose(1, 2)
            for i, y in enumerate((x, memory, memory))
        )
        k, v = (y.repeat_interleave(H // y.shape[1], 1) for y in (k, v))
        scores = (q @ k.mT / (d // H) ** 0.5).masked_fill(mask.unsqueeze(1) == 0, -1e9)
        joined = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return linear(joined, f"{name}.linears.3")

    def embed(ids, name):
        tokens = F.embedding(ids, state[f"{name}.0.lut.weight"], padding_idx)
        return tokens * d**0.5 + state[f"{name}.1.pe"][:, : ids.shape[1]]

    def feed_forward(x, name):
        return linear(FORMS[activation](linear(x, f"{name}.w_1")), f"{name}.w_2")

    def layers(side):
        return sorted({".".join(key.split(".")[:3]) for key in state if f"{side}.layers" in key})

    memory = embed(src, "src_embed")
    for layer in layers("encoder"):
        memory = add(memory, f"{layer}.sublayer.0", heads, f"{layer}.self_attn", src_mask)
        memory = add(memory, f"{layer}.sublayer.1", feed_forward, f"{layer}.feed_forward")
    memory = norm(memory, "encoder.norm")
    if tgt is None:
        return linear(memory, "generator.proj").log_softmax(-1)
    x = embed(tgt, "tgt_embed")
    for layer in layers("decoder"):
        x = add(x, f"{layer}.sublayer.0", heads, f"{layer}.self_attn", tgt_mask)
        x = add(x, f"{layer}.sublayer.1", heads, f"{layer}.src_attn", src_mask, memory)
        x = add(x, f"{layer}.sublayer.2", feed_forward, f"{layer}.feed_forward")
    return linear(norm(x, "decoder.norm"), "generator.proj").log_softmax(-1)


def check_against_tutorial(model, actual, inputs, options, renamed=()):
    """Log-probabilities and the gradient of every parameter. inputs: the tutorial's, after the
    state dict, in which the names are `renamed`, (ours, theirs).
    """
    told = {k: x for k, x in options.items() if k in inspect.signature(tutorial).parameters}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    leaves = {id(p): p.detach().double().requires_grad_() for p in parameters.values()}
    oracle = {name: leaves[id(p)] for name, p in parameters.items()}
    state = {**model.state_dict(), **oracle}
    for ours, theirs in renamed:
        state = {name.replace(ours, theirs): x for name, x in state.items()}
    expected = tutorial(state, *inputs, **told)
    torch.testing.assert_close(actual.double(), expected, atol=3e-5, rtol=1e-5)
    upstream = torch.randn_like(expected)
    (expected * upstream).sum().backward()
    (actual * upstream.float()).sum().backward()
    for name, p in model.named_parameters():
        error = (p.grad - oracle[name].grad).norm()
        # The bias of the keys has the gradient zero.
        assert error < 1e-4 * oracle[name].grad.norm() + 1e-4, name


# ---------------------------------------------------------------------------------------- options

OPTIONS = {
    "default": {"N": 2},
    "post-norm": {"norm_first": False, "activation": "gelu"},
    "post-norm, rms": {"norm_first": False, "norm": "rms", "activation": "silu"},
    "rms": {"norm": "rms", "activation": "gelu_tanh"},
    "one kv head": {"kv_heads": 1, "activation": "geglu"},
    "positions": {"learned_positions": True, "max_len": 7},
    "padding": {"padding_idx": 0, "activation": "swiglu"},
    "tied": {"src_vocab": 13, "tie_source": True, "tie_generator": True},
    "all": {
        "src_vocab": 13, "norm_first": False, "norm": "rms", "activation": "swiglu", "kv_heads": 1,
        "learned_positions": True, "max_len": 7, "padding_idx": 0, "tie_source": True,
        "tie_generator": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS)
def test_make_model_computes_what_the_tutorials_compute(case, backend, device):
    """With a mask of integers that hides a token of the target from all."""
    model = small_model(device, **OPTIONS[case])
    src, tgt, src_mask, tgt_mask = batch(device)
    tgt_mask = tgt_mask & (torch.arange(5, device=device) < 4)
    actual = model.generator(model(src, tgt, src_mask, tgt_mask.long()))
    check_against_tutorial(model, actual, (src, tgt, src_mask, tgt_mask), OPTIONS[case])


# ------------------------------------------------------------------------------------------ masks


def test_subsequent_mask():
    mask = subsequent_mask(4)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[[j <= i for j in range(4)] for i in range(4)]]
    assert subsequent_mask(0).shape == (1, 0, 0)


def test_what_is_masked_out_is_not_seen(backend, device):
    """A token of the target reaches the outputs at its own place and after, and none before;
    padding of the source reaches none.
    """
    model = small_model(device).eval()
    src, tgt, src_mask, tgt_mask = batch(device)
    before = model(src, tgt, src_mask, tgt_mask)
    other = tgt.clone()
    other[:, 3] = tgt[:, 3] % 12 + 1
    change = (model(src, other, src_mask, tgt_mask) - before).abs()
    assert not change[:, :3].any() and change[:, 3].max() > 1e-3 and change[:, 4].max() > 1e-4
    src[-1, -2:] = 5  # under the mask
    assert torch.equal(model(src, tgt, src_mask, tgt_mask), before)
    src[-1, -3] = src[-1, -3] % 10 + 1
    assert (model(src, tgt, src_mask, tgt_mask)[-1] - before[-1]).abs().max() > 1e-3


def test_encode_and_decode_are_the_forward():
    model = small_model().eval()
    src, tgt, src_mask, tgt_mask = batch()
    memory = model.encode(src, src_mask)
    assert memory.shape == (2, 7, 16)
    want = model(src, tgt, src_mask, tgt_mask)
    assert torch.equal(model.decode(memory, src_mask, tgt, tgt_mask), want)
    assert model(src, tgt, None, None).shape == (2, 5, 16)  # without masks all is seen


# ----------------------------------------------------------------------------- building and saving


def test_names_of_the_state_dict():
    """Every name, as documented."""
    names = {f"{s}_embed.{x}" for s in ("src", "tgt") for x in ("0.lut.weight", "1.pe")}
    modules = ["encoder.norm", "decoder.norm", "generator.proj"]
    for side, attentions in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "src_attn"])):
        for layer in (f"{side}.layers.0", f"{side}.layers.1"):
            modules += [f"{layer}.{x}.linears.{i}" for x in attentions for i in range(4)]
            modules += [f"{layer}.feed_forward.w_{i}" for i in (1, 2)]
            modules += [f"{layer}.sublayer.{i}.norm" for i in range(len(attentions) + 1)]
    names |= {f"{module}.{leaf}" for module in modules for leaf in ("weight", "bias")}
    assert set(make_model(11, 11, 2, 16, 24, 2).state_dict()) == names


def test_printed_structure():
    with torch.device("meta"):
        lines = [line.strip() for line in str(make_model(11, 11, 2)).splitlines()]
    for line in (
        "(0-1): 2 x DecoderLayer(",
        "(0-3): 4 x Linear(in_features=512, out_features=512, bias=True)",
        "(w_1): Linear(in_features=512, out_features=2048, bias=True)",
        "(0-2): 3 x SublayerConnection(",
        "(norm): LayerNorm(512, eps=1e-06, unbiased=False)",
        "(lut): Embedding(11, 512)",
    ):
        assert line in lines, line


def test_initialisation():
    """Nothing is shared, and no matrix is like another."""
    model = make_model(11, 11, 2, 16, 24, 2)
    for name, p in model.named_parameters():
        if p.dim() > 1:
            bound = (6 / sum(p.shape)) ** 0.5
            assert bound * 0.8 < p.abs().max() <= bound, name
    weights = [p for p in model.parameters() if p.dim() > 1]
    assert not any(map(torch.equal, *zip(*itertools.combinations(weights, 2))))
    own = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    assert len(own) == len(set(own))
    assert torch.equal(model.src_embed[1].pe, make_model(5, 5, 1, 16, 8, 2).tgt_embed[1].pe)


def test_a_layer_gives_its_attention_no_option_of_its_own():
    """A module that takes a query, a key, a value and a mask is enough."""

    class Mean(torch.nn.Module):
        def forward(self, query, key, value, mask):
            return value.mean(1, keepdim=True).expand_as(query)

    fed, x = ff.PositionwiseFeedForward(16, 24, 0.0), torch.randn(2, 5, 16)
    encoder = ff.Encoder(ff.EncoderLayer(16, Mean(), fed, 0.0), 1)
    decoder = ff.Decoder(ff.DecoderLayer(16, Mean(), Mean(), fed, 0.0), 1)
    assert encoder(x, None).shape == decoder(x, x, None, None).shape == x.shape


def test_layers_are_built_by_hand():
    """The constructors of the tutorials, and the paper's order of residual and norm."""
    attn, fed = ff.MultiHeadedAttention(H, 16, 0.0), ff.PositionwiseFeedForward(16, 24, 0.0)
    encoder = ff.Encoder(ff.EncoderLayer(16, attn, fed, 0.0), 2)
    decoder = ff.Decoder(ff.DecoderLayer(16, attn, copy.deepcopy(attn), fed, 0.0), 3)
    assert (len(encoder.layers), len(decoder.layers)) == (2, 3)
    assert all(m.norm_first for m in encoder.modules() if isinstance(m, ff.SublayerConnection))
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    empty = ff.Encoder(ff.EncoderLayer(16, attn, fed, 0.0), 0)
    assert torch.equal(empty(x, None), ff.LayerNorm(16)(x))
    layer = decoder.layers[0]
    for sublayer in layer.sublayer:
        sublayer.norm_first = False
    y = layer.sublayer[0].norm(x + layer.self_attn(x, x, x, None))
    y = layer.sublayer[1].norm(y + layer.src_attn(y, memory, memory, None))
    y = layer.sublayer[2].norm(y + layer.feed_forward(y))
    assert torch.equal(layer(x, memory, None, None), y)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"h": 3}, "d_model is 16; expected a multiple of h = 3"),
        ({"src_vocab": 0}, "vocab is 0; expected 1 or more"),
        ({"d_ff": 0}, "d_ff is 0; expected 1 or more"),
        ({"activation": "tanh"}, "activation is 'tanh'; expected one of relu, .*swiglu"),
        ({"norm": "batch"}, "norm is 'batch'; expected one of layer, rms"),
        ({"kv_heads": 3}, "kv_heads is 3; expected a divisor of h = 8"),
        ({"kv_heads": 16}, "kv_heads is 16; expected a divisor of h = 8"),
        ({"padding_idx": 5}, "padding_idx is 5; expected a token of the 5"),
        ({"max_len": 0}, "max_len is 0; expected 1 or more"),
        ({"tgt_vocab": 6, "tie_source": True}, "tie_source .* src_vocab 5 and tgt_vocab 6"),
    ],
)
def test_make_model_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_model(**{"src_vocab": 5, "tgt_vocab": 5, "d_model": 16, "N": 1} | arguments)


def test_a_model_says_what_forward_takes():
    """A mask that is left out is not None, which would show the whole target."""
    model, ids = make_model(5, 5, 1, 8, 8, 2), torch.ones(2, 3, dtype=torch.long)
    given = dict(tgt=ids, src_mask=None, tgt_mask=None)
    words = "left out; expected src, tgt, src_mask and tgt_mask; to generate .* greedy_decode"
    for others in ({}, *({k: x for k, x in given.items() if k != name} for name in given)):
        with pytest.raises(TypeError, match=words):
            model(ids, **others)
    assert model(ids, **given).shape == (2, 3, 8)


def test_initialisation_with_options():
    """Weights are shared as asked, positions stay the sinusoid, and the row of padding is zero."""
    model = make_model(
        **{**OPTIONS["all"], "max_len": 40}, tgt_vocab=13, N=1, d_model=16, d_ff=24, h=2
    )
    shared = model.tgt_embed[0].lut.weight
    assert model.src_embed[0].lut.weight is shared is model.generator.proj.weight
    assert not shared[0].any() and 0.8 < shared.abs().max() * (29 / 6) ** 0.5 <= 1
    pe = make_model(5, 5, 1, 16, 8, 2).tgt_embed[1].pe[:, :40]
    for embed in (model.src_embed, model.tgt_embed):
        assert torch.equal(embed[1].pe, pe) and embed[1].pe.requires_grad
    assert model.src_embed[1].pe is not model.tgt_embed[1].pe
    names = {name for name, _ in model.named_parameters() if name.endswith("norm.bias")}
    assert not names and model.encoder.layers[0].self_attn.linears[1].weight.shape == (8, 16)
    assert model.decoder.layers[0].feed_forward.w_1.weight.shape == (48, 16)
    assert "kv_heads=1" in str(model) and "activation=swiglu" in str(model)


# ------------------------------------------------------------------------------------------ modes


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_selective_checkpoint(dropout, backend, device):
    """The policy sees attention by its name: it runs once, and the rest of the layer twice. With
    dropout the reference composes it of products and a softmax, which have other names.
    """

    def policy(context, op, *args, **kwargs):
        kept = "attention" in str(op)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    composed = backend == "reference" and (dropout > 0 or device.type == "cuda")
    attention = "softmax" if composed else "attention"
    linear = "feed_forward" if backend == "triton" else "relu"
    layer = small_model(device, dropout=dropout).encoder.layers[0]
    x = torch.randn(2, 17, 16, device=device, requires_grad=True)
    keep_attention = functools.partial(create_selective_checkpoint_contexts, policy)
    results, runs = [], []
    for context in (None, noop_context_fn, keep_attention):
        torch.manual_seed(1)
        with Ops() as ran:
            options = dict(use_reentrant=False, context_fn=context)
            out = checkpoint(layer, x, None, **options) if context else layer(x, None)
            grads = torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])
        results.append((out, *grads))
        runs.append((ran.forwards(attention), ran.forwards(linear)))
    assert runs == [(1, 1), (2, 2), (2 if composed else 1, 2)]
    for plain, *others in zip(*results, strict=True):
        assert all(torch.equal(plain, other) for other in others)


@pytest.mark.with_all
def test_compiled_model_takes_new_lengths_without_recompiling():
    """One graph, forward and backward, for all batch sizes and lengths."""
    model = small_model()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for i, (B, S, T) in enumerate([(3, 7, 5), (2, 9, 4), (5, 6, 8)]):
        inputs = batch(B=B, S=S, T=T)
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            out = compiled(*inputs)
        torch.testing.assert_close(out, model(*inputs))
        out.sin().sum().backward()
        assert model.src_embed[0].lut.weight.grad.isfinite().all()
    torch.compiler.reset()


# ------------------------------------------------------------------------------- the fused stack


def stack(device, norm_first, N=2, dropout=0.0, norm="layer"):
    """An encoder in which no parameter is zero or one, its input and its mask."""
    encoder = small_model(device, N, dropout, norm=norm).encoder
    for layer in encoder.layers:
        for connection in layer.sublayer:
            connection.norm_first = norm_first
    mask = torch.ones(2, 1, 7, device=device)
    mask[1, 0, 5:] = 0
    return encoder, torch.randn(2, 7, 16, device=device, requires_grad=True), mask


def results(encoder, x, mask):
    out = encoder(x, mask)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *encoder.parameters()])]


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_fused_stack_computes_the_plain_one(backend, device, norm_first):
    """A hook on a part of a connection sends it through the plain path."""
    encoder, x, mask = stack(device, norm_first)
    fused = results(encoder, x, mask)
    called = []
    for layer in encoder.layers:
        for connection in layer.sublayer:
            connection.dropout.register_forward_hook(lambda *_: called.append(1))
    for a, b in zip(fused, results(encoder, x, mask)):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert len(called) == 4


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_each_sum_is_taken_with_a_norm(device, norm_first, norm):
    """2 N sums with the norms after them; alone is the first norm, or after post-norm the last."""
    encoder, x, mask = stack(device, norm_first, norm=norm)
    calls = []
    with backends.observe(on_call=lambda op, _: calls.append(op)):
        encoder(x, mask)
    calls = [op for op in calls if op.endswith("norm")]
    after_sums = [f"dropout_add_{norm}_norm"] * 4
    assert calls == ([f"{norm}_norm", *after_sums] if norm_first else [*after_sums, f"{norm}_norm"])


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize(
    "where",
    ["norm", "layers.1", *(f"layers.1.sublayer.1{part}" for part in ("", ".norm", ".dropout"))],
)
def test_hooks_of_the_stack_are_called(device, where, norm_first):
    encoder, x, mask = stack(device, norm_first)
    want, called = encoder(x, mask), []
    encoder.get_submodule(where).register_forward_hook(lambda *_: called.append(1))
    torch.testing.assert_close(encoder(x, mask), want)
    assert called == [1]


def test_a_layer_of_another_class_is_called(device):
    class Doubled(ff.EncoderLayer):
        def forward(self, x, mask):
            return 2 * super().forward(x, mask)

    encoder, x, mask = stack(device, True)
    layers = list(encoder.layers)
    layers[1].__class__ = Doubled
    want = layers[0](x, mask)
    want = encoder.norm(2 * ff.EncoderLayer.forward(layers[1], want, mask))
    torch.testing.assert_close(encoder(x, mask), want)


def test_dropout_of_the_stack(backend, device):
    """Every sublayer's output is dropped in training: at p = 1 the stream passes unchanged."""
    encoder, x, mask = stack(device, True, dropout=1.0)
    torch.testing.assert_close(encoder(x, mask), encoder.norm(x))
    for layer in encoder.layers:
        torch.testing.assert_close(layer(x, mask), x)
    encoder.eval()
    assert not torch.allclose(encoder(x, mask), encoder.norm(x), atol=1e-2)


def test_defaults_of_the_models():
    """Those of the Annotated Transformer: 5000 positions, dropout of 0.1. It reaches all parts."""
    for options, p in (({}, 0.1), ({"dropout": 0.37}, 0.37)):
        # 2 x (1 attention, 1 feed-forward, 2 residuals), 2 x (2, 1, 3), 2 embeddings
        for model, count in (
            (make_model(11, 11, 2, 8, 8, 2, **options), 2 * 4 + 2 * 6 + 2),
            (ff.make_decoder(11, 2, 8, 8, 2, **options), 2 * 4 + 1),
        ):
            parts = list(model.modules())
            positions = [x.pe.shape[1] for x in parts if isinstance(x, ff.PositionalEncoding)]
            assert set(positions) == {5000}
            assert [x.p for x in parts if isinstance(x, nn.Dropout)] == [p] * count, model


def test_positions_of_another_dtype_than_the_embeddings():
    model, (src, _, mask, _) = small_model(), batch()
    want = model.encode(src, mask)
    model.src_embed[1].double()
    assert torch.equal(model.encode(src, mask), want)
