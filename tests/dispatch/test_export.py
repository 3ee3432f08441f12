"""torch.export, strict and not, of each op and of the models: every size stays open."""

import pytest
import torch
from torch import nn
from torch.export import Dim

import fastformer as ff

H, D, F, V, POSITIONS = 2, 8, 12, 11, 64

attend = ff.scaled_dot_product_attention


def floats(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def ids(*shape):
    return torch.arange(torch.Size(shape).numel()).view(shape) % (V - 1) + 1


# Arguments for a batch b, t queries or tokens, and s keys.


def heads(b, t, s):
    return floats(b, H, t, D), floats(b, H, s, D), floats(b, H, s, D)


def packed(b, t, s):
    offsets = torch.arange(b + 1, dtype=torch.int32)
    return *(floats(b * n, H, D) for n in (t, s, s)), offsets * t, offsets * s


def rows(b, t, s):
    return (floats(b, t, D),)


def sums(b, t, s):
    return floats(b, t, D), floats(b, t, D) + 1


def tokens(b, t, s):
    return (ids(b, t),)


def model_inputs(b, t, s):
    return ids(b, s), ids(b, t), None, None


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = ff.MultiHeadedAttention(H, D).eval()

    def forward(self, x, mask):
        return self.attention(x, x, x, mask)


def models(**options):
    torch.manual_seed(0)
    sizes = dict(d_model=D, d_ff=F, h=H, max_len=POSITIONS)
    model = ff.make_model(V, V, N=1, **sizes, **options).eval()
    return model, ff.make_decoder(V, N=2, **sizes, **options).eval()


def rotary_decoder():
    options = dict(positions="rotary", qk_norm=True, kv_heads=1, max_len=POSITIONS)
    return ff.make_decoder(V, N=2, d_model=D * H, d_ff=F, h=H, **options).eval()


def accelerated_encoder():
    layer = nn.TransformerEncoderLayer(D, H, F, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    ff.accelerate(encoder)
    return encoder


model, decoder = models()
other_model, other_decoder = models(
    norm_first=False, norm="rms", activation="swiglu", kv_heads=1, learned_positions=True
)
attention = SelfAttention()
w, pe, norm, drawn = floats(V, D), floats(POSITIONS, D), floats(D), dict(dropout_seed=3)
layers = floats(F, D), floats(F), floats(D, F), floats(D)
gated = floats(2 * F, D), floats(2 * F), floats(D, F), floats(D)

CASES = {
    "attention": (attend, heads),
    "self-attention": (lambda x: attend(x, x, x), lambda b, t, s: heads(b, t, s)[:1]),
    "causal": (lambda q, k, v: attend(q, k, v, is_causal=True), heads),
    "without heads": (attend, lambda b, t, s: [x[:, 0] for x in heads(b, t, s)]),
    "float64": (attend, lambda b, t, s: [x.double() for x in heads(b, t, s)]),
    "window": (lambda q, k, v: attend(q, k, v, window=(2, 3)), heads),
    "return_lse": (lambda q, k, v: attend(q, k, v, return_lse=True), heads),
    "dropout": (lambda q, k, v: attend(q, k, v, None, 0.5, dropout_seed=3), heads),
    "packed": (lambda *args: ff.packed_attention(*args, 64, 64), packed),
    "packed causal": (lambda *args: ff.packed_attention(*args, 64, 64, is_causal=True), packed),
    "packed slopes": (
        lambda *x: ff.packed_attention(*x[:5], 64, 64, alibi_slopes=x[5], return_lse=True),
        lambda b, t, s: (*packed(b, t, s), floats(b, H)),
    ),
    "packed in a buffer": (
        lambda *args: ff.packed_attention(*args, 64, 64, softcap=3.0, return_lse=True),
        lambda b, t, s: [torch.cat([x, x[:3]]) if x.dim() == 3 else x for x in packed(b, t, s)],
    ),
    "weights": (ff.attention_weights, lambda b, t, s: heads(b, t, s)[:2]),
    "layer_norm": (lambda x: ff.layer_norm(x, D, norm, norm), rows),
    "rms_norm": (lambda x: ff.rms_norm(x, D, norm), rows),
    "sum": (lambda x, y: ff.dropout_add_layer_norm(x, y, norm, norm, 0.5, **drawn), sums),
    "rms sum": (lambda x, y: ff.dropout_add_rms_norm(x, y, norm, 0.5, **drawn), sums),
    "feed_forward": (lambda x: ff.feed_forward(x, *layers), rows),
    "dropped feed_forward": (lambda x: ff.feed_forward(x, *layers, "relu", 0.5, **drawn), rows),
    "geglu": (lambda x: ff.geglu(x, *gated), rows),
    "swiglu": (lambda x: ff.swiglu(x, *gated, 0.5, **drawn), rows),
    "gated_activation": (lambda x: ff.gated_activation(x, x + 1.0), rows),
    "embed": (lambda x: ff.embed(x, w, None), tokens),
    "embed with positions": (lambda x: ff.embed(x, w, pe, 0.5, **drawn), tokens),
    "rotary": (
        lambda q, k, x: ff.rotary_embedding(q, k, x.cos(), x.sin(), query_norm=norm),
        lambda b, t, s: (floats(b, H, t, D), floats(b, 1, t, D), floats(t, D)),
    ),
    "cross_entropy": (ff.cross_entropy, lambda b, t, s: (floats(b, t, V), ids(b, t))),
    "linear_cross_entropy": (
        lambda x, y: ff.linear_cross_entropy(x, w, y),
        lambda b, t, s: (floats(b, t, D), ids(b, t)),
    ),
    "linear_kl_div": (
        lambda x, y: ff.linear_kl_div(x, w, y, w),
        lambda b, t, s: (floats(b, t, D), floats(b, t, D)),
    ),
    "padding": (attention, lambda b, t, s: (floats(b, t, D), torch.ones(b, 1, t))),
    "one mask for all": (attention, lambda b, t, s: (floats(b, t, D), torch.ones(t, t))),
    "accelerate": (accelerated_encoder(), rows),
    "make_model": (model, model_inputs),
    "make_model with masks": (
        model,
        lambda b, t, s: (ids(b, s), ids(b, t), torch.ones(b, 1, s) > 0, ff.subsequent_mask(t)),
    ),
    "make_model, other parts": (other_model, model_inputs),
    "make_decoder": (decoder, tokens),
    "make_decoder, rotary": (rotary_decoder(), tokens),
    "make_decoder with a mask": (decoder, lambda b, t, s: (ids(b, t), torch.ones(b, 1, t) > 0)),
    "make_decoder, other parts": (other_decoder, tokens),
}
TRACED, OTHER = (3, 7, 9), (4, 8, 10)
RUN = (1, 20, 33), (5, 40, 2), (2, 16, 16), (4, 2, 17)
POSITIONED = {"embed with positions", *(name for name in CASES if name.startswith("make_"))}


@pytest.mark.sample
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_sizes_of_an_export_stay_open(name, strict):
    """Only the number of positions bounds them; at other sizes the program computes what eager
    does.
    """
    torch._dynamo.reset()
    call, make = CASES[name]
    module = call if isinstance(call, nn.Module) else Call(call)
    open_sizes = tuple(
        x if x is None else [Dim.AUTO if n != m else None for n, m in zip(x.shape, y.shape)]
        for x, y in zip(make(*TRACED), make(*OTHER))
    )
    sizes = open_sizes if module is call else (open_sizes,)
    given = tuple(make(*TRACED))
    program = torch.export.export(module, given, dynamic_shapes=sizes, strict=strict)
    most = POSITIONS if name in POSITIONED else 2**31 - 1
    for bounds in program.range_constraints.values():
        assert bounds.lower <= 2 and bounds.upper >= most, program.range_constraints
    exported = program.module()
    for run in RUN:
        args = tuple(make(*run))
        torch.testing.assert_close(exported(*args), module(*args), atol=1e-5, rtol=1e-4)


def test_an_exported_program_spreads_nan_as_eager_does():
    """In rows shorter than a vector of the CPU, and longer."""
    for is_causal in (False, True):
        call = Call(lambda x, causal=is_causal: attend(x, x, x, is_causal=causal))
        given, sizes = (floats(2, H, 7, D),), (([Dim.AUTO, None, Dim.AUTO, None],),)
        exported = torch.export.export(call, given, dynamic_shapes=sizes).module()
        for length in (5, 20):
            x = floats(3, H, length, D)
            x[1, 0, length - 1] = torch.nan
            assert torch.equal(exported(x).isnan().any(-1), call(x).isnan().any(-1))
