"""scaled_dot_product_attention on both backends, against the written-out formula in float64."""

import functools
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fastformer as ff
from fastformer import plans, use_backend
from fastformer.description import Attention, pack
from fastformer.ops import functional

attend = functional.scaled_dot_product_attention

B, H, SQ, SK, D = 2, 2, 65, 127, 40
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def qkv(
    b=B, h=H, sq=SQ, sk=SK, d=D, dv=None, g=None, dtype=torch.float32, device="cpu", logits=3.0
):
    """Random tensors whose scaled logits have a standard deviation of `logits`: a softmax that is
    not flat.
    """
    dv, g = d if dv is None else dv, h if g is None else g
    shapes = (b, h, sq, d), (b, g, sk, d), (b, g, sk, dv)
    q, k, v = (torch.randn(s, dtype=torch.float32, device=device) for s in shapes)
    return {"query": (q * logits).to(dtype), "key": k.to(dtype), "value": v.to(dtype)}


def masks(device, b=B, h=H, sq=SQ, sk=SK):
    def random(*shape):
        return torch.rand(shape, device=device) > 0.3

    return {
        "plain": {},
        "causal": {"is_causal": True},
        "lengths": {"key_lengths": torch.tensor([sk, sk // 2], device=device)[:b]},
        "key_mask": {"attn_mask": random(b, 1, 1, sk)},
        "tile_mask": {"attn_mask": random(b, h, sq, sk)},
        "mask_2d": {"attn_mask": random(sq, sk)},
        "mask_query": {"attn_mask": random(1, h, sq, 1)},
        "mask_transposed": {"attn_mask": random(b, 1, sk, sq).transpose(2, 3)},
        "together": {
            "attn_mask": random(b, 1, sq, sk),
            "is_causal": True,
            "key_lengths": torch.tensor([sk - 3, 5], device=device)[:b],
            "dropout_p": 0.2,
            "dropout_seed": -7,
        },
    }


def biases(device, dtype=torch.float32, b=B, h=H, sq=SQ, sk=SK):
    """(bias, options) by name: each way to broadcast, in float32 and in the input's dtype."""

    def random(*shape, hidden=0.0, kind=dtype):
        bias = torch.randn(shape, device=device)
        return bias.masked_fill(torch.rand(shape, device=device) < hidden, float("-inf")).to(kind)

    every = masks(device, b, h, sq, sk)
    return {
        "full": (random(b, h, sq, sk), {}),
        "of heads": (random(h, sq, sk, kind=torch.float32), {"is_causal": True}),
        "of batches": (random(b, 1, sq, sk, hidden=0.2), {}),
        "shared": (random(sq, sk), every["key_mask"]),
        "of keys": (random(b, 1, 1, sk, hidden=0.2), {}),
        "of keys and heads": (random(h, 1, sk, kind=torch.float32), every["tile_mask"]),
        "of keys alone": (random(sk), every["lengths"]),
        "transposed": (random(b, 1, sk, sq).transpose(2, 3), {}),
        "together": (random(1, h, sq, sk, hidden=0.1), every["together"]),
        "keys together": (random(b, h, 1, sk, hidden=0.1), every["together"]),
    }


def bands(device, b=B, h=H, sk=SK):
    """Windows, alignments, ALiBi and softcap, alone and together."""
    lengths = torch.tensor([sk, sk // 3], device=device)[:b]
    slopes = torch.rand(b, h, device=device) / 4
    bottom = {"causal_alignment": "bottom_right"}
    return {
        "window": {"window": (9, 20)},
        "window to the left": {"window": (9, None)},
        "window to the right": {"window": (None, 20)},
        "narrow window": {"window": (1, 0)},
        "causal window": {"window": (9, 20), "is_causal": True},
        "wide window": {"window": (2**40, 2**40)},
        "bottom-right": {**bottom, "is_causal": True},
        "bottom-right window": {**bottom, "window": (30, 2)},
        "bottom-right of lengths": {**bottom, "is_causal": True, "key_lengths": lengths},
        "bottom-right window of lengths": {**bottom, "window": (3, 30), "key_lengths": lengths},
        "alibi": {"alibi_slopes": slopes[0]},
        "alibi bottom-right": {**bottom, "alibi_slopes": slopes, "key_lengths": lengths},
        "softcap": {"softcap": 2.0},
        "large softcap": {"softcap": 50.0},
        "together": {
            **bottom,
            "window": (20, 4),
            "alibi_slopes": slopes,
            "softcap": 5.0,
            "key_lengths": lengths,
            "attn_mask": torch.rand(b, 1, 1, sk, device=device) > 0.2,
            "dropout_p": 0.2,
            "dropout_seed": 5,
        },
    }


def sunk(device, b=B, h=H, sq=SQ, sk=SK):
    """(bias, options) by name, for a call with sinks."""
    lengths = torch.tensor([0, sk - 5], device=device)[:b]
    every, band = masks(device, b, h, sq, sk), bands(device, b, h, sk)
    return {
        "plain": (None, {}),
        "causal window": (None, {"is_causal": True, "window": (9, None)}),
        "lengths": (None, {"key_lengths": lengths}),
        "mask": (None, every["tile_mask"]),
        "bias": (torch.randn(h, sq, sk, device=device), every["key_mask"]),
        "bias of keys": (torch.randn(b, 1, 1, sk, device=device), {}),
        "bias of rows": (torch.randn(h, sq, 1, device=device), {"key_lengths": lengths}),
        "together": (torch.randn(1, h, sq, sk, device=device), band["together"]),
    }


def every_option(device, dtype=torch.float32, b=B, h=H, sq=SQ, sk=SK):
    """(tensors, options) of a call by name: of masks, windows and the like, biases and sinks."""
    found = {name: ({}, x) for name, x in masks(device, b, h, sq, sk).items()}
    found |= {f"band, {name}": ({}, x) for name, x in bands(device, b, h, sk).items()}
    for name, (bias, options) in biases(device, dtype, b, h, sq, sk).items():
        found[f"bias, {name}"] = {"bias": bias}, options
    for name, (bias, options) in sunk(device, b, h, sq, sk).items():
        kind = dtype if name in ("mask", "together") else torch.float32
        sinks = (torch.randn(h, device=device) * 3 + 2).to(kind)
        found[f"sinks, {name}"] = {"bias": bias, "sinks": sinks}, options
    return found


def with_lse(**inputs):
    """One tensor of both."""
    out, lse = attend(**inputs, enable_gqa=True, return_lse=True)
    return torch.cat([out.flatten(), lse.flatten().to(out.dtype)])


@pytest.mark.sample
@pytest.mark.parametrize("case", every_option("cpu"))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_option(backend, device, against_oracle, case, dtype):
    """The gradient of sinks has an element a head: so few that eager's may be right by luck."""
    more, options = every_option(device, dtype)[case]
    x = qkv(dtype=dtype, device=device) | more
    few = "sinks" in x
    against_oracle(attend, x, small=few, **options)
    if few and dtype == torch.float32:
        against_oracle(with_lse, x, **options)


@pytest.mark.sample
@pytest.mark.parametrize("blocks", [(16, 32), (32, 16), (64, 64)], ids=str)
@pytest.mark.parametrize("case", every_option("cpu"))
def test_every_option_in_tiles(device, against_oracle, tiles, blocks, case):
    """Skipped, whole and cut tiles; more queries than keys, and fewer. Dropout does not depend on
    the tile.
    """
    tiles(*blocks)
    for sq, sk in ((70, 83), (83, 50)):
        sizes = {"b": 2, "h": 2, "sq": sq, "sk": sk}
        more, options = every_option(device, **sizes)[case]
        x = qkv(**sizes, g=1, d=16, device=device) | more
        function = with_lse if "sinks" in x else functools.partial(attend, enable_gqa=True)
        with use_backend("triton"):
            against_oracle(function, x, **options)


@pytest.mark.parametrize("of", ["keys", "queries and keys"])
def test_strided_masks_and_biases_in_whole_tiles(device, against_oracle, tiles, of):
    """Every second one of a row, in tiles that no edge cuts."""
    tiles(16, 16)
    x = qkv(b=2, h=1, sq=16, sk=48, d=8, device=device)
    rows = 1 if of == "keys" else 16
    x["bias"] = torch.randn(2, 1, rows, 96, device=device)[..., ::2]
    mask = (torch.rand(2, 1, rows, 96, device=device) > 0.4)[..., ::2]
    with use_backend("triton"):
        against_oracle(attend, x, attn_mask=mask)


@pytest.mark.parametrize("shape", [(20, 48), (48,)], ids=str)
def test_a_bias_that_hides_a_whole_tile(device, against_oracle, tiles, shape):
    """The first keys of all rows, which have then seen nothing yet."""
    tiles(16, 16)
    x = qkv(sq=20, sk=48, d=16, device=device)
    x["bias"] = torch.randn(shape, device=device)
    x["bias"][..., :16] = float("-inf")
    with use_backend("triton"):
        against_oracle(attend, x)


def test_a_band_drawn(backend, device):
    """The masks of the docstring."""
    q, k = torch.zeros(1, 1, 4, 8, device=device), torch.zeros(1, 1, 6, 8, device=device)
    v = torch.eye(6, device=device).expand(1, 1, 6, 6)

    def drawn(**options):
        out = attend(q, k, v, **options)[0, 0]
        return ["".join("x" if w > 0 else "." for w in row) for row in out]

    bottom = {"causal_alignment": "bottom_right"}
    assert drawn(is_causal=True) == ["x.....", "xx....", "xxx...", "xxxx.."]
    assert drawn(is_causal=True, **bottom) == ["xxx...", "xxxx..", "xxxxx.", "xxxxxx"]
    assert drawn(window=(1, 1)) == ["xx....", "xxx...", ".xxx..", "..xxx."]
    assert drawn(window=(1, 0), **bottom) == [".xx...", "..xx..", "...xx.", "....xx"]
    lengths = torch.tensor([5], device=device)
    short = drawn(is_causal=True, key_lengths=lengths, **bottom)
    assert short == ["xx....", "xxx...", "xxxx..", "xxxxx."]


def test_alibi_by_hand(backend, device):
    q, k = torch.zeros(1, 1, 3, 8, device=device), torch.zeros(1, 1, 5, 8, device=device)
    v = torch.eye(5, device=device).expand(1, 1, 5, 5)
    slopes = torch.tensor([0.5], device=device)
    options = {"alibi_slopes": slopes, "causal_alignment": "bottom_right"}
    out = attend(q, k, v, **options)
    i, j = torch.arange(3, device=device).view(-1, 1), torch.arange(5, device=device)
    torch.testing.assert_close(out[0, 0], (-0.5 * (i + 2 - j).abs()).softmax(-1))


def test_a_floating_mask_is_a_bias(backend, device, against_oracle):
    x = qkv(sq=20, sk=30, d=16, device=device)
    mask = torch.zeros(B, 1, 1, 30, device=device)
    mask[0, ..., 20:] = float("-inf")
    mask[1, ..., 3] = torch.finfo(torch.float32).min
    out = attend(**x, attn_mask=mask)
    kept = attend(**x, attn_mask=mask == 0)
    torch.testing.assert_close(out, kept)
    everything = torch.full((20, 30), torch.finfo(torch.float32).min, device=device)
    assert (attend(**x, attn_mask=everything) == 0).all()


@pytest.mark.parametrize("shape", [(), (1,), (30,)], ids=str)
def test_a_bias_without_rows(backend, device, shape):
    """torch's op, which the CPU's reference takes where nothing has a gradient, refuses it."""
    x, bias = qkv(sq=20, sk=30, d=16, device=device), torch.randn(shape, device=device)
    out = attend(**x, bias=bias)
    same = attend(**x, bias=bias.expand(20, 30).contiguous())
    assert torch.allclose(out, same, atol=1e-6)


def test_a_bias_constant_over_the_keys(backend, device):
    """It shifts whole rows: the softmax stays, and its gradient is that of lse, exactly."""
    x = qkv(sq=20, sk=30, d=16, device=device)
    bias = torch.randn(H, 20, 1, device=device)
    bias[1, 4] = float("-inf")
    bias.requires_grad_()
    out, lse = attend(**x, bias=bias, return_lse=True)
    plain, plain_lse = attend(**x, return_lse=True)
    seen = bias.isfinite().squeeze(-1).expand(B, H, 20)
    torch.testing.assert_close(out[seen], plain[seen])
    torch.testing.assert_close(lse[seen], (plain_lse + bias.squeeze(-1))[seen])
    assert (out[~seen] == 0).all() and (lse[~seen] == float("-inf")).all()
    weight = torch.randn_like(lse)
    (grad,) = torch.autograd.grad(lse[seen] @ weight[seen] + 0 * out.sum(), bias)
    want = (weight * seen).sum(0).unsqueeze(-1)
    torch.testing.assert_close(grad, want, atol=1e-5, rtol=1e-5)
    (grad,) = torch.autograd.grad(attend(**x, bias=bias).square().sum(), bias)
    assert grad.abs().max() < 1e-4
    _, lse = attend(**x, bias=bias, return_lse=True)
    (grad,) = torch.autograd.grad(lse, bias, torch.ones_like(lse))
    torch.testing.assert_close(grad, B * seen[0].unsqueeze(-1).float())
    assert (grad[1, 4] == 0).all(), "of a row that sees nothing"


def test_partial_sums_of_a_bias_gradient(backend, device):
    """Those of each batch and head are wider than a float16 bias: here they cancel past 65504."""
    x = qkv(b=1, h=2, sq=20, sk=8, d=16, device=device)
    x = {n: t[:, :1].expand(1, 2, *t.shape[2:]).half() for n, t in x.items()}
    x["value"] = x["value"] * 100
    bias = torch.zeros(8, dtype=torch.float16, device=device, requires_grad=True)
    out = attend(**x, bias=bias)
    gradient = torch.full_like(out, 400)
    gradient[:, 1] *= -1
    (one,) = torch.autograd.grad(out[:, 0].float().sum() * 400, bias, retain_graph=True)
    assert one.isinf().any(), "else this shows nothing"
    (grad,) = torch.autograd.grad(out, bias, gradient)
    assert (grad.abs() < 1).all()


def test_large_float16_outputs(backend, device):
    """The products of output and gradient, of which the backward takes sums, pass 65504."""
    x = qkv(sq=20, sk=30, d=16, dtype=torch.float16, device=device, logits=0.3)
    x["value"] = (300 + x["value"] / 100).half()
    leaves = [t.requires_grad_() for t in x.values()]
    out = attend(*leaves)
    grads = torch.autograd.grad(out, leaves, torch.full_like(out, 300))
    assert all(grad.isfinite().all() for grad in grads)


def test_an_expanded_bias(backend, device, against_oracle):
    """Its gradient has the shape of what was passed, whatever its strides."""

    def expanded(bias, **inputs):
        return attend(bias=bias.expand(B, H, 20, 30), **inputs)

    bias = torch.randn(1, 1, 1, 30, device=device)
    against_oracle(expanded, {**qkv(sq=20, sk=30, d=16, device=device), "bias": bias})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_sum_exp(backend, device, against_oracle, dtype):
    """Its value and its gradient, alone and beside the output's; a hidden row's is -inf, without
    gradient.
    """
    lengths = torch.tensor([0, 30], device=device)
    x = qkv(sq=20, sk=37, d=16, dtype=dtype, device=device)
    x["bias"] = torch.randn(H, 1, 37, device=device)

    def both(**inputs):
        out, lse = attend(**inputs, dropout_p=0.2, dropout_seed=1, return_lse=True)
        assert lse.dtype == (torch.float64 if out.dtype == torch.float64 else torch.float32)
        assert (lse[0] == float("-inf")).all()
        return torch.cat([out[1].flatten(), 3 * lse[1].flatten()])

    def alone(query, key, bias):
        return attend(query, key, key.detach(), bias=bias, is_causal=True, return_lse=True)[1]

    against_oracle(both, x, key_lengths=lengths)
    against_oracle(alone, {n: t for n, t in x.items() if n != "value"})


@pytest.mark.parametrize("layout", ["expanded", "transposed"])
def test_a_strided_gradient_of_lse(backend, device, layout):
    x = [t.requires_grad_() for t in qkv(sq=20, sk=30, d=16, device=device).values()]
    lse = attend(*x, return_lse=True)[1]
    gradient = torch.ones(1, 1, 1, device=device).expand(lse.shape)
    if layout == "transposed":
        gradient = torch.randn(20, H, B, device=device).permute(2, 1, 0)
    got = torch.autograd.grad(lse, x[:2], gradient, retain_graph=True)
    assert all(map(torch.equal, got, torch.autograd.grad(lse, x[:2], gradient.contiguous())))


def test_three_dimensions(backend, device, against_oracle):
    """[B, S, D]: one head; a mask of three dimensions is [B, Sq, Sk], as in torch."""
    x = {n: t.squeeze(1) for n, t in qkv(h=1, sq=20, sk=30, d=16, dv=24, device=device).items()}
    x["bias"] = torch.randn(B, 1, 30, device=device)
    mask = torch.rand(B, 20, 30, device=device) > 0.3
    against_oracle(attend, x, attn_mask=mask)
    out, lse = attend(**x, attn_mask=mask, return_lse=True)
    assert out.shape == (B, 20, 24) and lse.shape == (B, 20)


@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "bias"])
def test_leading_dimensions(backend, device, lead, kind):
    """Windows of an image: torch folds all dimensions before [H, S, D]. A mask or a bias broadcasts
    in each of them.
    """

    def biased(q, k, v, bias):
        return attend(q, k, v, bias=bias)

    x = [torch.randn(*lead, *size, device=device) for size in ((20, 16), (30, 16), (30, 24))]
    weights = [torch.randn(*lead, 20, 24, device=device)]
    for n in range(len(lead) + 1):
        for shape in itertools.product(*((1, full) for full in lead[n:])):
            given = torch.randn(*shape, 20, 30, device=device)
            ours, theirs, leaves = biased, F.scaled_dot_product_attention, [*x, given]
            if kind == "bool":
                ours, theirs = (
                    functools.partial(f, attn_mask=given > -1) for f in (attend, theirs)
                )
                leaves = x
            want = results(theirs, [t.double() for t in leaves], weights)
            for a, b in zip(results(ours, leaves, weights), want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_leading_dimensions_with_grouped_heads(backend, device):
    q, k = torch.randn(2, 3, 4, 5, 8, device=device), torch.randn(2, 3, 2, 7, 8, device=device)
    given = dict(enable_gqa=True, dropout_p=0.3, dropout_seed=1, is_causal=True)
    out = attend(q, k, k, **given)
    same = attend(*(x.flatten(0, 1) for x in (q, k, k)), **given)
    assert torch.equal(out.flatten(0, 1), same)
    assert attend(q, k, k, **given, return_lse=True)[1].shape == (2, 3, 4, 5)
    for x in (q, q[0, :, 0], q[0, 0, 0]):
        choice = ff.explain("scaled_dot_product_attention", x, x, x, return_lse=True)
        assert choice.backend == backend


@pytest.mark.parametrize("sq", [1, 63])
def test_one_key(backend, device, sq):
    """Its weight is 1 whatever the score: the output is its value, and query and key have no
    gradient but rounding. (An fma, which Triton's interpreter rounds once since 3.9, leaves the
    rounding of the maximum in the weight, and the division takes it out: a few roundings.)
    """
    x = {n: t.requires_grad_() for n, t in qkv(b=1, h=1, sq=sq, sk=1, d=16, device=device).items()}
    out = attend(**x, is_causal=True)
    torch.testing.assert_close(out, x["value"].expand(1, 1, sq, 16), rtol=1e-6, atol=0.0)
    weight = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, list(x.values()), weight)
    torch.testing.assert_close(dv, weight.sum(2, keepdim=True))
    assert max(dq.abs().max(), dk.abs().max()) < 1e-4 * x["query"].norm()


@pytest.mark.parametrize(
    "d, dv",
    [(8, 8), (16, 64), (40, 40), (64, 64), (72, 72), (96, 40), (128, 128), (160, 160), (256, 256)],
)
def test_head_dims(backend, device, against_oracle, d, dv):
    x = qkv(b=1, h=1, sq=33, sk=70, d=d, dv=dv, device=device)
    against_oracle(attend, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("g", [1, 2])
def test_grouped_heads(backend, device, against_oracle, g, dtype):
    x = qkv(h=4, g=g, sq=33, sk=70, d=16, dtype=dtype, device=device)
    mask = torch.rand(B, 4, 1, 70, device=device) > 0.3  # differs over the query heads of a group
    against_oracle(attend, x, enable_gqa=True, attn_mask=mask)


@pytest.mark.parametrize("s", [128, 129, 191, 192, 193, 255])
def test_every_remainder_of_128(backend, device, against_oracle, s):
    """pytorch#139298, #196678: NaN in dQ with a mask where S % 128 is 64."""
    mask = torch.rand(s, s, device=device) > 0.5
    mask[3] = False
    x = qkv(b=1, h=1, sq=s, sk=s, d=16, dtype=torch.bfloat16, device=device)
    against_oracle(attend, x, attn_mask=mask, is_causal=True)


def test_a_very_negative_log_sum_exp(backend, device, against_oracle):
    """All of a row's scores near -120: exp of them is 0 in float32 without the row's maximum."""
    x = qkv(b=1, h=1, sq=40, sk=70, d=16, device=device)
    bias = torch.zeros(40, 70, device=device)
    bias[1::2] = -120.0
    _, lse = attend(**x, bias=bias, return_lse=True)
    assert (lse[..., 1::2] < -104).all() and (lse[..., ::2] > -20).all()
    against_oracle(attend, x, bias=bias)


FLOATING = "query", "key", "value", "gradient", "bias"
FAR = [(name, dim) for name in (*FLOATING, "attn_mask") for dim in (0, 1, 2)]
FAR += [("bias", 3), ("attn_mask", 3), ("bias of keys", 3), ("attn_mask of keys", 3)]
FAR += [("alibi_slopes", 0), ("alibi_slopes", 1), ("key_lengths", 0)]
FAR += [(f"{name} of tiles", 2) for name in (*FLOATING, "attn_mask")]
FAR += [("bias of tiles", 3), ("attn_mask of tiles", 3)]


@pytest.mark.parametrize("far, dim", FAR)
def test_offsets_past_int32(backend, device, request, same_when_far, far, dim):
    """Rows, heads, batches, columns so far apart that the last one stands past 2^31 elements; in
    tiles already the first of a tile.
    """
    far, _, of = far.partition(" of ")
    n, b, h = (40, 1, 1) if dim >= 2 else (20, 3, 1) if dim == 0 else (20, 1, 3)
    if of == "tiles":
        request.getfixturevalue("tiles")(16, 16)
        n = 33
    x = qkv(b, h, sq=n, sk=n, d=16, dtype=torch.bfloat16, device=device)
    x["gradient"] = torch.randn_like(x["query"])
    rows = 1 if of == "keys" else n
    x["bias"] = torch.randn(b, h, rows, n, device=device).bfloat16()
    x["attn_mask"] = torch.rand(b, h, rows, n, device=device) > 0.3
    if far in ("alibi_slopes", "key_lengths"):
        x["alibi_slopes"] = torch.rand(b, h, device=device).half()
        x["key_lengths"] = torch.tensor([n, 3, 9], device=device, dtype=torch.int16)[:b]
    same_when_far(attend, x, far, dim, fixed=("alibi_slopes",))


def test_a_length_past_the_keys(device):
    """It is not checked on a GPU: clamped, it never reads out of bounds."""
    attention = pytest.importorskip("fastformer.kernels.attention.launchers")
    x = qkv(b=1, h=1, sq=20, sk=20, d=16, device=device)
    for name in ("key", "value"):
        buffer = torch.full((1, 1, 40, 16), float("nan"), device=device)
        x[name] = buffer[:, :, :20].copy_(x[name])
    outs = []
    for length in (20, 30):
        lengths = torch.tensor([length], device=device)
        described = Attention(None, 0.0, False, 0.25, key_lengths=lengths)
        outs.append(attention.forward(*pack([*x.values(), described, False]))[0])
    assert torch.equal(*outs)


def test_large_logits(backend, device, against_oracle):
    x = qkv(sq=40, sk=70, d=16, device=device, logits=40.0)  # up to some 120, both ways
    against_oracle(attend, x, is_causal=True)


@pytest.mark.parametrize("scale", [0.7, -0.7, 0.0, 1e-32])
def test_scale(backend, device, against_oracle, scale):
    x = qkv(b=1, h=1, sq=20, sk=30, d=16, device=device, logits=0.5)
    against_oracle(attend, x, scale=scale, is_causal=True)


@pytest.mark.parametrize("shape", [(1, H, 1, SK), (B, 1, 1, SK), (1, 1, SQ, 1), (1, H, SQ, SK)])
def test_the_gradient_of_a_bias_is_like_it(device, shape):
    """In shape and dtype, as dynamo is told beforehand."""
    launchers = pytest.importorskip("fastformer.kernels.attention.launchers")
    x = qkv(dtype=torch.bfloat16, device=device)
    bias = torch.randn(shape, device=device).bfloat16()
    given = pack([*x.values(), Attention(None, 0.0, False, 0.25, bias)])
    saved = launchers.forward(*given, False)
    backward = torch.ones_like(saved[0]), None, *given, *saved, [False, False, False, True, False]
    real, fake = launchers.backward(*backward), launchers._fake_backward(*backward)
    assert [(g.shape, g.dtype) for g in real] == [(g.shape, g.dtype) for g in fake]
    assert real[3].shape == shape and real[3].isfinite().all()


def test_strided_views(backend, device, against_oracle):
    packed = torch.randn(B, SK, 3, H, D, device=device)  # one projection for q, k and v
    q, k, v = packed.unbind(2)
    x = {"query": q.transpose(1, 2), "key": k.transpose(1, 2), "value": v.transpose(1, 2)}
    against_oracle(attend, x)
    x["key"] = torch.randn(B, H, D, SK, device=device).transpose(2, 3)  # its last stride is not 1
    x["value"] = torch.randn(B, 1, SK, 2 * D, device=device)[..., ::2].expand(B, H, SK, D)
    against_oracle(attend, x, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_narrow_lengths(backend, device, dtype):
    x = qkv(b=1, h=1, sq=50, sk=40, d=8, device=device)
    band = {"causal_alignment": "bottom_right", "window": (2**70, 0)}
    lengths = torch.tensor([33], device=device)
    out = attend(**x, key_lengths=lengths.to(dtype), **band)
    assert torch.equal(out, attend(**x, key_lengths=lengths, **band))
    assert (out[:, :, :17] == 0).all()


def test_strided_lengths_and_slopes(backend, device):
    x = qkv(sq=20, sk=30, d=16, device=device)
    lengths = torch.tensor([[7, 0], [25, 0]], device=device)[:, 0]
    slopes = torch.rand(B, 2 * H, device=device)[:, ::2]
    options = {"key_lengths": lengths, "alibi_slopes": slopes}
    out = attend(**x, **options)
    options = {name: t.clone(memory_format=torch.contiguous_format) for name, t in options.items()}
    assert torch.equal(out, attend(**x, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_slopes_are_multiplied_in_the_dtype_of_sums(device, dtype):
    """Not in their own: float16 keeps four digits of the distance times log2(e), float32 seven."""
    of_sums, of_slopes = torch.float32, torch.float16
    if dtype == torch.float64:
        of_sums, of_slopes = torch.float64, torch.float32
    x = qkv(b=1, h=2, sq=4, sk=300, d=8, dtype=of_sums, device=device, logits=0.1)
    slopes = torch.tensor([0.3, 0.7], dtype=of_slopes, device=device)
    with use_backend("triton"):
        results = [attend(**x, alibi_slopes=given) for given in (slopes, slopes.to(of_sums))]
    assert torch.equal(*results)


def test_plans_are_told_apart(device, monkeypatch):
    """A launch that is remembered serves a second call alike, and no other."""
    attention = pytest.importorskip("fastformer.kernels.attention.launchers")
    made, plan = [], attention.ForwardPlan
    monkeypatch.setattr(attention, "ForwardPlan", lambda *a: made.append(a) or plan(*a))
    x = qkv(b=1, h=2, sq=20, sk=32, d=16, device=device)
    bias = torch.zeros(20, 32, device=device)
    calls = [
        {},
        {name: t.half() for name, t in x.items()},
        {"is_causal": True},
        {"dropout_p": 0.5, "dropout_seed": 1},
        {"dropout_p": 0.6, "dropout_seed": 1},
        {"key_lengths": torch.tensor([9], device=device)},
        {"key_lengths": torch.tensor([9], dtype=torch.int32, device=device)},
        {"attn_mask": bias == 0},
        {"bias": bias},
        {"bias": elsewhere(bias)},
        {"bias": bias.expand(2, 20, 32).contiguous()},
        {"query": x["query"].transpose(1, 2).contiguous().transpose(1, 2)},
    ]
    with use_backend("triton"):
        for n, call in enumerate(calls):
            for _ in range(2):
                attend(**{**x, **call})
            assert len(made) == n + 1, call


def test_every_field_of_a_key(monkeypatch):
    """Each alone tells calls apart that cannot share a launch: the calls differ in one."""
    launchers = pytest.importorskip("fastformer.kernels.attention.launchers")
    monkeypatch.setattr(launchers, "_forward_plan", lambda *_: None)
    integers = torch.uint8, torch.bool, torch.int64, torch.int32, torch.int16
    memory = {dtype: torch.zeros(4096, dtype=dtype) for dtype in (*FLOATS, *integers)}

    def at(place, *shape, step=None, dtype=torch.float32):
        """Zeros whose first element is number `place` of a buffer, rows `step` elements apart."""
        strides = list(torch.empty(shape, device="meta").stride())
        if step is not None:
            strides = [step * n // shape[-1] for n in strides[:-1]] + [1]
        return memory[dtype].as_strided(shape, strides, place)

    def plan(**call):
        inputs = [call.pop(name) for name in ("query", "key", "value")]
        forward = launchers.packed_forward if "max_q" in call else launchers.forward
        return forward.plan(*pack([*inputs, Attention(**call)]), False)

    names = "query", "key", "value"
    base = {name: at(0, 1, 2, 16, 8) for name in names}
    base |= {"attn_mask": None, "dropout_p": 0.5, "is_causal": False, "scale": 1.0, "softcap": 2.0}
    base |= {"dropout_seed": at(0, 1, dtype=torch.int64), "sinks": at(0, 2)}
    kinds = {"attn_mask": torch.bool, "bias": torch.float32}
    padded = base | {name: at(0, 16, 16, dtype=dtype) for name, dtype in kinds.items()}
    padded |= {"key_lengths": at(0, 1, dtype=torch.int32), "window": (3, 3)}
    padded["alibi_slopes"] = at(0, 2)
    tiles = {"mask_spans": at(0, 1, 1, 2, 5, dtype=torch.int32)}
    tiles |= {"mask_lists": at(0, 3, 4, dtype=torch.int16)}
    bits = {"mask_bits": at(0, 2, 256, dtype=torch.int32)}
    offsets = {name: at(0, 3, dtype=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    packed = base | offsets | {"max_q": 16, "max_k": 16}
    terms = {"bias": at(0, 16), "alibi_slopes": at(0, 2, 2)}
    changes = [
        *((padded, {name: at(4, 1, 2, 16, 8)}, False) for name in names),  # aligned alike
        *((padded, {name: at(1, 1, 2, 16, 8)}, True) for name in names),
        *((padded, {name: at(0, 1, 2, 16, 8, step=12)}, True) for name in names),
        (padded, {"query": at(0, 1, 2, 16, 8)[:, :, :15]}, True),
        (padded, {"value": at(0, 1, 2, 16, 8)[..., :7]}, True),
        (padded, {"query": at(0, 1, 2, 16, 8).to("meta")}, True),
        (padded, {name: at(0, 1, 2, 16, 8, dtype=torch.float16) for name in names}, True),
        *((padded, {n: at(1, 16, 16, dtype=dtype)}, True) for n, dtype in kinds.items()),
        *((padded, {n: at(0, 16, 16, step=17, dtype=dtype)}, True) for n, dtype in kinds.items()),
        (padded, {"attn_mask": at(0, 16, 16, dtype=torch.uint8)}, True),
        (padded, {"bias": at(0, 16, 16, dtype=torch.float16)}, True),
        (padded, {"alibi_slopes": at(1, 2)}, True),
        (padded, {"alibi_slopes": at(0, 2, 2)[:, 0]}, True),
        (padded, {"key_lengths": at(4, 1, dtype=torch.int32)}, False),
        (padded, {"key_lengths": at(1, 1, dtype=torch.int32)}, True),
        (padded, {"key_lengths": at(0, 1, dtype=torch.int16)}, True),
        (padded, {"window": (3, 4)}, True),
        (padded, {"causal_alignment": "bottom_right"}, True),
        (packed, {"dropout_p": 0.6}, True),
        (packed, {"is_causal": True}, True),
        (packed, {"scale": 2.0}, True),
        (packed, {"softcap": 3.0}, True),
        (packed | terms, {"bias": at(1, 16)}, True),
        (packed | terms, {"bias": at(0, 16, 2)[:, 0]}, True),
        (packed | terms, {"alibi_slopes": at(0, 2)}, True),
        (packed, {"max_q": 15}, True),
        (packed, {"max_k": 15}, True),
        (packed, {"sinks": at(4, 2)}, False),
        (packed, {"sinks": at(1, 2)}, True),
        (packed, {"sinks": at(0, 2, dtype=torch.float16)}, True),
        (packed, {"dropout_seed": at(2, 1, dtype=torch.int64)}, False),
        (packed, {"dropout_seed": at(1, 1, dtype=torch.int64)}, True),
        *((packed, {name: at(4, 3, dtype=torch.int32)}, False) for name in offsets),
        *((packed, {name: at(1, 3, dtype=torch.int32)}, True) for name in offsets),
        *((packed, {name: at(0, 3, dtype=torch.int64)}, True) for name in offsets),
        (packed, {name: at(0, 4, dtype=torch.int32) for name in offsets}, True),
        *((padded, {name: x}, True) for name, x in tiles.items()),
        (padded | tiles | bits, {"mask_bits": at(0, 3, 256, dtype=torch.int32)}, False),
    ]
    for call, change, other in changes:
        assert (plan(**call) is not plan(**call | change)) == other, change
    before = plan(**packed)
    monkeypatch.setattr(plans, "allow_tf32", lambda: True)  # which a GPU's products follow
    assert plan(**packed) is not before


@pytest.mark.parametrize("d, dv", [(8, 40), (40, 8)])
def test_tiles_are_those_of_the_wider_head(device, monkeypatch, d, dv):
    """Of queries and keys, or of values: the others may not fit a GPU's shared memory."""
    plan = pytest.importorskip("fastformer.kernels.attention.plan")
    asked, former = [], plan.configuration
    monkeypatch.setattr(plan, "configuration", lambda *a: asked.append(a) or former(*a))
    x = qkv(b=1, h=1, sq=4, sk=4, d=d, dv=dv, device=device)
    with use_backend("triton"):
        attend(**{n: t.requires_grad_() for n, t in x.items()}).sum().backward()
    assert {block for _, _, _, block, *_ in asked} == {64} and len(asked) == 4


def test_every_field_of_a_key_of_the_backward(device):
    """Gradients of other strides, of lse or not, and of other inputs, one after the other."""
    pytest.importorskip("triton")
    x = qkv(b=1, h=2, sq=16, sk=16, d=8, device=device)
    gradients = torch.randn(2, 1, 16, 2, 12, device=device)
    given = [gradients[0, ..., n : n + 8].transpose(1, 2) for n in (0, 1)]
    given += [gradients[0, :, :, :1, :8].transpose(1, 2).expand(1, 2, 16, 8)]
    lse = [lambda g: None, lambda g: g[..., 0], lambda g: g[..., :1, 0].expand(1, 2, 16)]
    found = {False: [], True: []}  # by whether each call has a fresh plan
    with use_backend("triton"):
        for fresh in found:
            plans.forget()
            for g, of_lse, wanted in itertools.product(given, lse, (["query"], ["key", "value"])):
                if fresh:
                    plans.forget()
                leaves = {n: t.detach().requires_grad_(n in wanted) for n, t in x.items()}
                both, cotangents = attend(**leaves, return_lse=True), (g, of_lse(g))
                count = 1 if cotangents[1] is None else 2
                wanting = [leaves[n] for n in wanted]
                found[fresh] += torch.autograd.grad(both[:count], wanting, cotangents[:count])
    assert len(plans.launches) == 3  # of the last call, whose gradient of lse is copied first
    assert all(map(torch.equal, *found.values()))


def elsewhere(x):
    """The same, four bytes past a multiple of 16."""
    return torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)


def turned(x):
    """The same, with its dimensions in the opposite order in memory."""
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def test_saved_tensors_that_have_moved(backend, device, monkeypatch):
    """Hooks may hand back the output and its statistics from another place, in another layout: the
    gradients are the same, and each is a launch of its own, but another time at the same place is
    not.
    """
    attention = pytest.importorskip("fastformer.kernels.attention.launchers")
    made, plan = [], attention.BackwardPlan
    monkeypatch.setattr(attention, "BackwardPlan", lambda *a: made.append(a) or plan(*a))
    x = qkv(b=1, h=2, sq=20, sk=32, d=16, dv=8, device=device)
    x = {name: t.requires_grad_() for name, t in x.items()}
    bias = torch.randn(20, 32, device=device)  # beside which the maximum of a row is kept as well
    shapes = {"output": (1, 2, 20, 8), "lse": (1, 2, 20), "statistics": (1, 2, 20, 2)}

    def gradients(which=(), move=None):
        moved = [shapes[name] for name in which]

        def unpack(t):
            return move(t) if t.shape in moved else t

        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            out, lse = attend(**x, bias=bias, return_lse=True)
        return torch.autograd.grad(out.square().sum() + lse.sum(), list(x.values()))

    want = gradients()
    calls = [([name], move) for move in (elsewhere, turned) for name in shapes]
    for n, call in enumerate(calls):
        for _ in range(2):
            assert all(map(torch.equal, gradients(*call), want)), call
        if backend == "triton":  # a copy lies where the first did
            assert len(made) == 1 + min(n + 1, 3), call


def test_a_row_that_sees_nothing_is_zero(backend, device, against_oracle):
    x = qkv(sq=20, sk=30, d=16, device=device)
    out = attend(**x, key_lengths=torch.tensor([0, 30], device=device))
    assert (out[0] == 0).all() and (out[1] != 0).all()
    mask = torch.ones(20, 30, dtype=torch.bool, device=device)
    mask[3] = False
    against_oracle(attend, x, attn_mask=mask)
    x["query"][:, :, 3] = float("nan")  # which is not seen either
    out = attend(**x, attn_mask=mask)
    assert (out[:, :, 3] == 0).all() and out.isfinite().all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_gradients_of_a_row_that_sees_nothing(device, poison):
    """Its lse is -inf, of which a caller's formula may well have the gradient NaN."""
    x = qkv(b=1, h=1, sq=20, sk=30, d=8, device=device)
    x["bias"] = torch.randn(20, 30, device=device)
    mask = torch.ones(20, 30, dtype=torch.bool, device=device)
    mask[3] = False
    cotangents = torch.ones_like(x["query"]), torch.ones(1, 1, 20, device=device)

    def ours(*leaves):
        return attend(**dict(zip(x, leaves)), attn_mask=mask, return_lse=True)

    found = []
    with use_backend("triton"):
        for gradient in (0.0, poison):
            cotangents[1][..., 3] = gradient
            found.append(results(ours, x.values(), cotangents))
    for clean, poisoned in zip(*found):
        assert torch.equal(clean, poisoned)


def test_gradients_beside_a_key_whose_scores_are_infinite(backend, device):
    """A key that no query may see, and whose scores are -inf with no mask: the output is finite."""
    x = qkv(sq=20, sk=20, d=16, device=device)
    x["query"].abs_()
    hidden = torch.arange(20, device=device) == 3
    call = functools.partial(attend, attn_mask=~hidden.expand(B, 1, 1, 20))
    for clean, poisoned in clean_and_poisoned(call, x, hidden[:, None], -torch.inf, ("key",)):
        torch.testing.assert_close(poisoned, clean)


def test_values_beside_a_key_whose_scores_are_infinite(device):
    """A key that queries may see, and whose scores are -inf: no query weighs its value. The last
    tile of queries is a part of one.
    """
    x = qkv(b=1, h=1, sq=20, sk=20, d=16, device=device)
    x["query"].abs_()
    x["key"][:, :, 3] = -torch.inf
    value = x["value"].requires_grad_()
    found = []
    for backend in ("reference", "triton"):
        with use_backend(backend):
            out = attend(**x)
            found.append([out, *torch.autograd.grad(out.square().sum(), value)])
    for want, have in zip(*found):
        assert want.isfinite().all()
        torch.testing.assert_close(have, want)


def test_short_rows_after_a_fake_call(against_oracle):
    """The masks that the reference keeps for short rows are none of a FakeTensorMode."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = qkv(sq=6, sk=9, d=16)
    for is_causal in (False, True):
        with FakeTensorMode(allow_non_fake_inputs=True), use_backend("reference"):
            attend(**x, is_causal=is_causal)
        with use_backend("reference"):
            against_oracle(attend, x, is_causal=is_causal)


FORMS = {  # sq, sk, d, options
    "plain": (20, 70, 16, {}),
    "dropout": (20, 70, 16, {"dropout_p": 0.3, "dropout_seed": 3}),
    "one query": (1, 70, 16, {}),
    "wide heads": (20, 70, 144, {}),
    "softcap": (20, 70, 8, {"softcap": 30.0}),
    "whole tiles": (32, 80, 8, {}),
}


def clean_and_poisoned(call, tensors, hidden, poison=float("nan"), names=("key", "value")):
    """Pairs of outputs and gradients of a call whose hidden keys hold zeros, and `poison`; the last
    are the outputs of the call without gradients.
    """
    found = []
    for fill in (0.0, poison):
        filled = {name: tensors[name].masked_fill(hidden, fill) for name in names}
        leaves = {name: t.clone().requires_grad_() for name, t in (tensors | filled).items()}
        out = call(**leaves)
        found.append([out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))])
        with torch.no_grad():
            found[-1].append(call(**leaves))
    return zip(*found)


@pytest.mark.sample
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("by", ["lengths", "mask", "both", "bias"])
def test_hidden_keys_may_hold_anything(backend, device, request, by, poison, form):
    """pytorch#101967: 0 * NaN of a key that no query may see leaked into every output. In whole
    tiles beside a mask and a bias of every pair.
    """
    sq, sk, d, options = FORMS[form]
    x = qkv(sq=sq, sk=sk, d=d, device=device)
    visible = torch.ones(B, 1, 1, sk, dtype=torch.bool, device=device)
    visible[0, ..., 50:] = visible[1, ..., 66:] = False
    options = dict(options)
    if by in ("lengths", "both"):
        options["key_lengths"] = visible.sum((1, 2, 3))
    if by in ("mask", "bias"):
        visible[0, ..., 2] = False
    if by in ("mask", "both"):
        options["attn_mask"] = visible
    elif form == "whole tiles":
        options["attn_mask"] = torch.rand(B, 1, sq, sk, device=device) > 0.3
    if by == "bias":
        options["bias"] = torch.where(visible, 0.5, -torch.inf)
    if form == "whole tiles":
        pairs = torch.randn(1, 1, sq, sk, device=device)
        x["bias"] = options.pop("bias", pairs)  # with a gradient of its own
        request.getfixturevalue("tiles")(16, 16)
    call = functools.partial(attend, **options)
    for clean, poisoned in clean_and_poisoned(call, x, ~visible.mT, poison):
        assert torch.equal(clean, poisoned)


EMPTY = dict(b=2, h=2, sq=7, sk=130, d=8, dv=8)  # sizes, one of which is 0
BESIDE = {  # options by name, of all sizes
    "plain": lambda b, h, sq, sk: {},
    "mask": lambda b, h, sq, sk: dict(attn_mask=torch.rand(b, 1, sq, sk) > 0.3),
    "mask of keys": lambda b, h, sq, sk: dict(attn_mask=torch.rand(b, 1, 1, sk) > 0.3),
    "block mask": lambda b, h, sq, sk: dict(attn_mask=ff.block_mask(torch.ones(1, 1, sq, sk) > 0)),
    "mask of numbers": lambda b, h, sq, sk: dict(attn_mask=torch.zeros(sq, sk)),
    "bias": lambda b, h, sq, sk: dict(bias=torch.randn(h, sq, sk)),
    "bias of keys": lambda b, h, sq, sk: dict(bias=torch.randn(1, 1, sk)),
    "bias of all": lambda b, h, sq, sk: dict(bias=torch.randn(1, 1, 1)),
    "bias of queries": lambda b, h, sq, sk: dict(bias=torch.randn(sq, 1)),
    "lengths": lambda b, h, sq, sk: dict(key_lengths=torch.full((b,), sk // 2)),
    "causal, window": lambda b, h, sq, sk: dict(is_causal=True, window=(9, 9)),
    "dropout": lambda b, h, sq, sk: dict(dropout_p=0.3, dropout_seed=5),
    "sinks": lambda b, h, sq, sk: dict(sinks=torch.randn(h)),
    "ALiBi, softcap": lambda b, h, sq, sk: dict(alibi_slopes=torch.ones(h), softcap=3.0),
}


@pytest.mark.all_cases
@pytest.mark.parametrize("option", BESIDE)
def test_empty_beside_an_option(backend, device, against_oracle, option):
    """No sequence, no head, no query, no key, or head dims of 0; with lse by turns. Bounds of a
    mask of 130 keys and no queries divided by zero.
    """

    def attend_and_lse(**given):
        out, lse = attend(**given, return_lse=True)
        assert lse.shape == out.shape[:3]
        if empty == "sk" and "sinks" not in given:
            assert (lse == float("-inf")).all() and (out == 0).all()
        return torch.cat([out, torch.where(lse.isinf(), 0.0, lse).unsqueeze(3)], 3)

    for number, empty in enumerate(EMPTY, list(BESIDE).index(option)):
        sizes = EMPTY | {empty: 0}
        options = BESIDE[option](*(sizes[n] for n in ("b", "h", "sq", "sk")))
        options = {n: t.to(device) if hasattr(t, "to") else t for n, t in options.items()}
        x = qkv(**sizes, device=device)
        x |= {n: options.pop(n) for n in ("bias", "sinks") if n in options}
        function = (attend, attend_and_lse)[number % 2]
        against_oracle(function, x, small=True, **options)


ORDERED = ["lse", "unseeded dropout", *BESIDE]
COMPILED = ["lse", "bias", "lengths", "causal, window"]


@pytest.mark.parametrize(
    "option, mode", [(x, "eager") for x in ORDERED] + [(x, "compiled") for x in COMPILED]
)
def test_the_output_has_the_memory_order_of_the_query(backend, device, option, mode):
    """So that `out.transpose(1, 2).view(B, Sq, H * D)` needs no copy, as of torch's op. On the
    reference it failed for some options, and in a compiled call for most. The kernels' gradients
    have that of the inputs.
    """
    options = {"lse": dict(return_lse=True), "unseeded dropout": dict(dropout_p=0.3)}
    options = options.get(option) or BESIDE[option](b=2, h=3, sq=7, sk=9)
    options = {n: t.to(device) if hasattr(t, "to") else t for n, t in options.items()}
    q, k, v = (torch.randn(2, s, 3, 8, device=device, requires_grad=True) for s in (7, 9, 9))

    def output(*given):
        out = attend(*given, **options)
        return out[0] if option == "lse" else out

    def call(*given):
        return output(*(x.transpose(1, 2) for x in given)).transpose(1, 2).view(2, 7, 24)

    if mode == "compiled":
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    for gradient in torch.autograd.grad(call(q, k, v).sum(), (q, k, v)):
        assert gradient.isfinite().all()
        assert gradient.is_contiguous() or backend == "reference"
    with torch.no_grad():
        assert call(q, k, v).is_contiguous()
        assert output(*(x.transpose(1, 2).contiguous() for x in (q, k, v))).is_contiguous()


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an op inside of it makes, views of `given` apart."""

    def __init__(self, *given):
        super().__init__()
        self.elements, self.given = 0, {x.data_ptr() for x in given}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor) and x.data_ptr() not in self.given:
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return result


@pytest.mark.parametrize("bias_shape", [None, (1, 300), (300, 1), (300, 300)], ids=str)
def test_nothing_of_size_sq_sk(device, monkeypatch, bias_shape):
    """What the launchers allocate, every feature on; a bias gradient of that size alone. Nothing is
    launched: the interpreter copies what it is given.
    """
    attention = pytest.importorskip("fastformer.kernels.attention.launchers")
    from fastformer.kernels.launch import Launch

    monkeypatch.setattr(Launch, "__call__", lambda self, *pointers: None)
    s, seed = 300, torch.zeros(1, dtype=torch.int64, device=device)
    q, k, v = qkv(b=1, h=1, sq=s, sk=s, d=16, device=device).values()
    mask = torch.ones(s, s, dtype=torch.bool, device=device)
    bias = None if bias_shape is None else torch.zeros(bias_shape, device=device)
    lengths, of_heads = torch.tensor([s - 3], device=device), torch.ones(1, device=device)
    rest = bias, lengths, (50, 50), "bottom_right", of_heads, 3.0, of_heads, seed
    arguments = pack([q, k, v, Attention(mask, 0.1, True, 0.2, *rest)])
    with Largest(mask) as largest:
        saved = attention.forward(*arguments, True)
        needs = [True] * 3 + [bias is not None, True]
        attention.backward(torch.ones_like(saved[0]), saved[1], *arguments, *saved, needs)
    asked_for = bias_shape == (300, 300)
    assert largest.elements == s * s if asked_for else largest.elements <= s * 16


# ------------------------------------------------------------------------------------------- sinks


def test_a_sink_is_a_key_without_a_value(backend, device):
    """As gpt-oss writes it: one more column of scores, and its weights thrown away. A row that sees
    no key is zero; its lse is the sink, whose gradient it has.
    """
    x = qkv(sq=20, sk=30, d=16, device=device)
    mask, sinks = torch.rand(B, 1, 20, 30, device=device) > 0.4, torch.randn(H, device=device)
    mask[0] = False

    def ours(q, k, v, sinks):
        return attend(q, k, v, mask, sinks=sinks, return_lse=True)

    def theirs(q, k, v, sinks):
        scores = (q @ k.transpose(2, 3) * 0.25).masked_fill(~mask, float("-inf"))
        scores = torch.cat([scores, sinks.view(1, H, 1, 1).expand(B, H, 20, 1)], -1)
        return scores.softmax(-1)[..., :-1] @ v, scores.logsumexp(-1)

    weights = torch.randn(B, H, 20, 16, device=device), torch.randn(B, H, 20, device=device)
    have, want = (results(call, [*x.values(), sinks], weights) for call in (ours, theirs))
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)
    assert (have[0][0] == 0).all() and (have[2][0] == 0).all() and (have[3][0] == 0).all()


@pytest.mark.parametrize("biased", [False, True])
def test_sinks_of_minus_infinity(backend, device, biased):
    """Are none, for a row that sees nothing too, whose lse is -inf: its gradient, which may well be
    NaN, is not used. The gradient of such a sink is zero.
    """
    x = list(qkv(sq=20, sk=30, d=16, device=device).values())
    lengths = torch.tensor([0, 17], device=device)
    bias = torch.randn(20, 1, device=device) if biased else None

    def run(q, k, v, sinks=None):
        return attend(q, k, v, key_lengths=lengths, sinks=sinks, bias=bias, return_lse=True)

    weights = torch.randn(B, H, 20, 16, device=device), torch.randn(B, H, 20, device=device)
    weights[1][0] = torch.nan
    nowhere = torch.full((H,), float("-inf"), device=device)
    *have, grad = results(run, [*x, nowhere], weights)
    for a, b in zip(have, results(run, x, weights), strict=True):
        torch.testing.assert_close(a, b)
    assert (grad == 0).all()


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5}], ids=["plain", "dropout"])
def test_a_sink_of_minus_infinity_without_keys(backend, device, options):
    """The output is 0, the logarithm the sink, and no gradient is NaN."""
    x = [t.requires_grad_() for t in qkv(sq=5, sk=0, d=16, device=device).values()]
    sinks = torch.tensor([float("-inf"), *range(H - 1)], device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(attend(*x, sinks=sinks, **options).sum(), sinks)
    assert (grad == 0).all()
    out, lse = attend(*x, sinks=sinks, **options, return_lse=True)
    weight = torch.where(lse.isinf(), torch.nan, 1.0)
    (grad,) = torch.autograd.grad(lse, sinks, weight, retain_graph=True)
    torch.testing.assert_close(grad, (B * 5.0) * ~sinks.isinf())
    assert (out == 0).all() and torch.equal(lse, sinks.view(H, 1).expand(B, H, 5))
    grads = torch.autograd.grad(out.sum() + lse.exp().sum(), (*x, sinks))
    assert all((grad == 0).all() for grad in grads[:3])
    torch.testing.assert_close(grads[3], B * 5 * sinks.exp())


def test_a_sink_beside_a_large_bias(backend, device):
    """Where both are -1e9 the sink weighs as much as any key."""
    x = qkv(sq=20, sk=7, d=16, device=device)
    sinks = torch.full((H,), -1e9, device=device, requires_grad=True)
    bias = torch.full((20, 7), -1e9, device=device)
    out = attend(**x, bias=bias, sinks=sinks)
    torch.testing.assert_close(out, x["value"].sum(2, keepdim=True).expand(out.shape) / 8)
    weight = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, sinks, weight)
    torch.testing.assert_close(grad, -(out.detach() * weight).sum((0, 2, 3)) / 8)


def test_a_bias_of_rows_beside_fixed_sinks(backend, device):
    """Its gradient is the same whether or not the sinks require one."""
    x, bias = qkv(device=device), torch.randn(H, SQ, 1, device=device, requires_grad=True)
    sinks, weight = torch.randn(H, device=device), torch.randn(B, H, SQ, D, device=device)
    found = []
    for leaves in ([bias], [bias, sinks.clone().requires_grad_()]):
        out = attend(**x, bias=bias, sinks=leaves[1] if len(leaves) == 2 else sinks)
        found.append(torch.autograd.grad(out, leaves, weight)[0])
    assert found[0].any() and torch.equal(*found)


# ---------------------------------------------------- a large bias, the lowest ones, and undefined


def by_formula(query, key, value, bias=None, sinks=None, mask=None, scale=None):
    """(output, lse) as torch's math path computes them, in float32 at least."""
    wide = torch.promote_types(query.dtype, torch.float32)
    query, key, value = (x.to(wide) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1) + (0.0 if bias is None else bias)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        sinks = sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    peak = scores.detach().amax(-1, keepdim=True)
    return weights @ value, (scores - peak).logsumexp(-1) + peak.squeeze(-1)


def results(function, leaves, weights):
    """Outputs and gradients of a function of tensors; no weight for an output that is not used."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    used = [(x, w.to(x.dtype)) for x, w in zip(outputs, weights) if w is not None]
    used, weights = zip(*used)
    grads = torch.autograd.grad(used, leaves, weights)
    return [x.detach().float() for x in (*outputs, *grads)]


@pytest.mark.sample
@pytest.mark.parametrize("with_lse", [False, True], ids=["output", "and lse"])
@pytest.mark.parametrize(
    "case", ["rows", "rows, constant", "keys", "hidden zeros", "alibi", "two tiles"]
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_large_bias_of_all_keys(backend, device, tiles, dtype, case, with_lse):
    """-1e9, the usual mask: nothing of a score is left beside it, the weights are those of equal
    scores, and so are their gradients. In float32 lse has no digit left for their number.
    """
    if case == "two tiles":
        tiles(16, 16)
    x = qkv(sq=20, sk=30, d=16, dtype=dtype, device=device)
    bias, mask, slopes = torch.zeros(20, 30, device=device), None, None
    if case in ("rows", "rows, constant", "two tiles"):
        bias[::3], bias[1], bias[2] = -1e9, -1e9, 1e9
        bias[1, 7] = 0.0
    elif case == "keys":
        bias = torch.full((30,), -1e9, device=device)
    elif case == "hidden zeros":
        bias[:, 10:] = -1e9
        mask = torch.ones(20, 30, dtype=torch.bool, device=device)
        mask[4:, :10] = False
    else:  # of each query the two neighbours, at the same distance
        mask = ~torch.eye(20, 30, dtype=torch.bool, device=device)
        i, j = (torch.arange(n, device=device) for n in (20, 30))
        bias = -1e9 * (i.view(-1, 1) - j).abs()
        slopes = torch.full((H,), 1e9, device=device)
    constant = case in ("rows, constant", "alibi")  # it needs no gradient
    leaves = list(x.values()) + ([] if constant else [bias])

    def ours(q, k, v, given=None if case == "alibi" else bias):
        return attend(q, k, v, mask, bias=given, alibi_slopes=slopes, return_lse=with_lse)

    def wanted(q, k, v, given=bias):
        both = by_formula(q, k, v, given, mask=mask)
        return both if with_lse else both[0]

    weights = torch.randn(B, H, 20, 16, device=device), torch.randn(B, H, 20, device=device)
    have, want = results(ours, leaves, weights), results(wanted, leaves, weights)
    for a, b in zip(have, want, strict=True):
        error = (a - b).norm() / b.norm()
        assert error < (1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps), error


@pytest.mark.parametrize("value", [-65504.0, -1e4])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_bias_that_leaves_few_digits(backend, device, against_oracle, dtype, value):
    """Of a score, beside it; eager PyTorch's are as few."""
    x = qkv(b=1, sq=20, sk=30, d=16, dtype=dtype, device=device)
    x["bias"] = torch.full((20, 30), value, device=device).to(dtype)
    x["bias"][::2] = 0.0
    against_oracle(attend, x, small=True)


LOWEST = -2.3586574359122396e38  # of float32, times log 2


@pytest.mark.parametrize("shape", [(20, 30), (30,), (20, 1)], ids=str)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_lowest_bias(backend, device, kind, shape):
    """A finite one is added down to a documented value; whatever lies below it hides the key."""
    if kind == torch.float64 and device.type != "cpu":
        pytest.skip("no kernel computes in float64 on a GPU")
    assert "-2.3586e38" in attend.__doc__
    x = qkv(b=1, sq=20, sk=30, d=16, dtype=kind, device=device)
    values = [-2.3e38, -2.33e38, LOWEST, LOWEST * (1 + 1e-7), -2.36e38]
    values += [torch.finfo(kind).min, torch.finfo(torch.bfloat16).min, float("-inf")]
    for value in values:
        bias = torch.full(shape, value, dtype=kind, device=device)
        out, lse = attend(**x, bias=bias, return_lse=True)
        if bias.flatten()[0].double() >= LOWEST * (1 + 1e-9):
            torch.testing.assert_close(lse.double(), bias.double().expand(1, H, 20, 30)[..., 0])
            assert (out != 0).all(), value
        else:
            assert (lse == float("-inf")).all() and (out == 0).all(), value


UNDEFINED = {
    "query": lambda x: x["query"][:, :, 3].fill_(float("nan")),
    "query element": lambda x: x["query"][0, 0, 2, 1].fill_(float("nan")),
    "key": lambda x: x["key"][:, :, 1].fill_(float("nan")),
    "key element": lambda x: x["key"][0, 1, 4, 1].fill_(float("nan")),
    "every key": lambda x: x["key"].fill_(float("nan")),
    "value": lambda x: x["value"][0, 0, 4, 1].fill_(float("nan")),
    "bias": lambda x: x["bias"][2, 3].fill_(float("nan")),
    "bias of a row": lambda x: x["bias"][2].fill_(float("nan")),
    "scale": lambda x: x.update(scale=float("nan")),
    "sink": lambda x: x["sinks"][0].fill_(float("nan")),
}


WAYS = [(way, s, dtype) for way in ("reference", "triton") for s, dtype in enumerate(FLOATS, 5)]
WAYS += [("reference", 40, torch.float32), ("dropped", 5, torch.float32)]
WAYS += [("dropped", 40, torch.float32)]


@pytest.mark.sample
@pytest.mark.parametrize("what", list(UNDEFINED))
@pytest.mark.parametrize("way, s, dtype", WAYS, ids=str)
def test_nan_that_a_query_sees(device, monkeypatch, tiles, dtype, what, s, way):
    """It reaches the output, lse and the gradients, as in torch's math path. A GPU's maximum drops
    NaN, the interpreter's does not: the kernel gives NaN by either.
    """
    if way == "dropped":
        if device.type == "cuda":
            pytest.skip("the maximum of the interpreter")
        builder = pytest.importorskip("triton.runtime.interpreter").InterpreterBuilder
        maximum = "create_maxnumf"
        monkeypatch.setattr(builder, maximum, lambda self, x, y: self.binary_op(x, y, np.fmax))
        tiles(16, 16)
    x = {**qkv(sq=s, sk=s, d=16, dtype=dtype, device=device), "scale": 0.25}
    if what.startswith("bias"):
        x["bias"] = torch.randn(s, s, device=device)
    if what == "sink":
        x["sinks"] = torch.randn(H, device=device)
    UNDEFINED[what](x)
    scale, leaves = x.pop("scale"), list(x.values())
    weights = torch.randn(B, H, s, 16, device=device), torch.randn(B, H, s, device=device)

    def ours(*leaves):
        return attend(**dict(zip(x, leaves)), scale=scale, return_lse=True)

    want = results(lambda *y: by_formula(**dict(zip(x, y)), scale=scale), leaves, weights)
    with use_backend("reference" if way == "reference" else "triton"):
        have = results(ours, leaves, weights)
        alone = results(lambda *x: ours(*x)[0], leaves, weights[:1])
        plain = attend(**x, scale=scale)
    assert want[0].isnan().any()
    for name, a, b in zip(("output", "lse", *x), have, want, strict=True):
        assert torch.equal(a.isnan(), b.isnan()), name
    for name, a, b in zip(("output", *x), alone, [want[0], *have[2:]], strict=True):
        assert torch.equal(a.isnan(), b.isnan()), f"{name}, without lse"
    assert torch.equal(plain.isnan(), want[0].isnan()), "without a gradient"


@pytest.mark.sample
@pytest.mark.parametrize("s", [5, 40])
@pytest.mark.parametrize(
    "case", ["causal", "lengths", "key_mask", "tile_mask", "window", "softcap"]
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_beside_hidden_keys(backend, device, dtype, case, s):
    """Of a query it reaches that query's output alone; of a key, that of all who see it."""
    options = {**masks(device, sq=s, sk=s), **bands(device, sk=s)}[case]
    if "attn_mask" in options:
        options["attn_mask"][..., 0] = True
    x = qkv(sq=s, sk=s, d=16, dtype=dtype, device=device)
    clean = attend(**x, **options)
    assert clean.isfinite().all()
    number = torch.arange(s, device=device).view(s, 1)
    query = x["query"].masked_fill(number == 3, float("nan"))
    out = attend(**{**x, "query": query}, **options)
    assert out[:, :, 3].isnan().all()
    out[:, :, 3] = clean[:, :, 3]
    bounds = {"atol": 4 * torch.finfo(dtype).eps, "rtol": 2 * torch.finfo(dtype).eps}
    torch.testing.assert_close(out, clean, **bounds)
    x["key"][:, :, 0, 1] = float("nan")
    last = 9 if case == "window" else s  # that sees it
    assert attend(**x, **options)[:, :, : last + 1].isnan().all()


@pytest.mark.parametrize("s", [5, 40])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_that_no_query_sees(backend, device, dtype, s):
    """In the bias of a hidden pair it reaches nothing; in a key, no query that does not see it."""
    x = qkv(sq=s, sk=s, d=16, dtype=dtype, device=device)
    bias, mask = torch.zeros(s, s, device=device), torch.ones(s, s, device=device).bool()
    mask[2, 3] = mask[1] = False

    def ours(*x):
        return attend(*x[:3], mask, bias=x[3], return_lse=True)

    weights = torch.randn(B, H, s, 16, device=device), None
    clean = results(ours, [*x.values(), bias], weights)
    bias[2, 3] = bias[1] = float("nan")
    for a, b in zip(clean, results(ours, [*x.values(), bias], weights), strict=True):
        assert torch.equal(a, b)
    x["key"][:, :, 3] = float("nan")
    out = attend(**x, is_causal=True)
    assert not out[:, :, :3].isnan().any() and out[:, :, 3:].isnan().all()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", ["plain", "causal", "lengths", "mask"])
@pytest.mark.parametrize("d, dv", [(0, 8), (8, 0), (0, 0)])
def test_no_features(backend, device, d, dv, case, grad):
    """What torch's own op does: without head dim all scores are 0."""
    x = [t.requires_grad_(grad) for t in qkv(sq=5, sk=7, d=d, dv=dv, device=device).values()]
    lengths, mask = torch.tensor([3, 6], device=device), torch.rand(5, 7, device=device) > 0.3
    mask[:, 0] = True
    ours = {"causal": {"is_causal": True}, "mask": {"attn_mask": mask}}.get(case, {})
    theirs = ours
    if case == "lengths":
        ours = {"key_lengths": lengths}
        theirs = {"attn_mask": torch.arange(7, device=device) < lengths.view(2, 1, 1, 1)}
    have, want = attend(*x, **ours), F.scaled_dot_product_attention(*x, **theirs)
    torch.testing.assert_close(have, want)
    _, lse = attend(*x, **ours, return_lse=True)
    assert lse.shape == (B, H, 5) and lse.isfinite().all()
    if grad:
        weight = torch.randn_like(have)
        for a, b in zip(*(torch.autograd.grad(y, x, weight) for y in (have, want))):
            torch.testing.assert_close(a, b)


# --------------------------------------------------------------------------------------- weights


CHOICES = [
    (None, None),
    (slice(3, 60, 7), slice(1, None)),
    (torch.tensor([64, 0, -2]), torch.tensor([1, 0, 1])),
]


@pytest.mark.sample
@pytest.mark.parametrize("rows, heads", CHOICES, ids=["all", "slices", "tensors"])
@pytest.mark.parametrize("case", ["plain", "key mask", "mask", "bias", "lengths", "alibi", "sinks"])
def test_weights(backend, device, case, rows, heads):
    """What the fused op weighs the values by: its output with the identity as values."""
    mask = torch.rand(1, H, SQ, SK, device=device) > 0.3
    mask[..., 0, :] = False
    lengths, of_heads = torch.tensor([SK, 0], device=device), torch.rand(H, device=device)
    band = {"window": (30, 8), "causal_alignment": "bottom_right"}
    options = {
        "plain": {},
        "key mask": {"attn_mask": torch.rand(B, 1, 1, SK, device=device) > 0.3},
        "mask": {"attn_mask": mask, "is_causal": True},
        "bias": {"bias": torch.rand(H, SQ, SK, device=device), **band},
        "lengths": {"key_lengths": lengths, "scale": 0.1, "softcap": 3.0},
        "alibi": {"alibi_slopes": of_heads, "is_causal": True},
        "sinks": {"sinks": of_heads, "key_lengths": lengths},
    }[case] | {"enable_gqa": True}
    rows, heads = (x.to(device) if isinstance(x, torch.Tensor) else x for x in (rows, heads))
    q, k, _ = qkv(g=1, device=device).values()
    want = attend(q, k, torch.eye(SK, device=device).expand(B, 1, SK, SK), **options)
    have = ff.attention_weights(q, k, rows=rows, heads=heads, **options)
    want = want if heads is None else want[:, heads]
    want = want if rows is None else want[:, :, rows]
    torch.testing.assert_close(have, want, atol=2e-5, rtol=2e-5)


def test_gradient_of_the_weights(backend, device, against_oracle):
    x = {n: t for n, t in qkv(device=device).items() if n != "value"}
    against_oracle(ff.attention_weights, x, rows=slice(0, 9), is_causal=True)


def test_weights_of_a_hidden_key(backend, device):
    x = qkv(sq=5, sk=7, device=device)
    x["key"][:, :, 5:] = float("nan")
    weights = ff.attention_weights(
        x["query"], x["key"], key_lengths=torch.tensor([5, 5], device=device)
    )
    assert (weights[..., 5:] == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, 5, device=device))


# --------------------------------------------------------------------- head dims, tiles, launches


@pytest.mark.parametrize(
    ("dims", "dtype"), [((512, 16), torch.bfloat16), ((257, 512), torch.float32)], ids=str
)
def test_wide_heads(dims, dtype, backend, device, against_oracle, tiles):
    """Head dims from 257 to 512, with all terms, and with few queries."""
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("no GPU has tiles for these in float32")
    tiles(16, 32)
    x = qkv(1, 2, 20, 50, dims[0], g=1, device=device)
    x["value"] = torch.randn(1, 1, 50, dims[1], device=device)
    x["bias"] = torch.randn(2, 20, 50, device=device)
    x = {name: t.to(dtype) for name, t in x.items()}
    given = dict(is_causal=True, causal_alignment="bottom_right", softcap=5.0)
    against_oracle(with_lse, x, **given, dropout_p=0.2, dropout_seed=1)
    few = {name: t.to(dtype) for name, t in qkv(1, 2, 2, 300, dims[0], device=device).items()}
    against_oracle(attend, few, is_causal=True)
    packed = {name: t[0].transpose(0, 1) for name, t in x.items() if name != "bias"}
    offsets = {name: torch.tensor(n, dtype=torch.int32, device=device) for name, n in (
        ("cu_seqlens_q", (0, 17, 20)), ("cu_seqlens_k", (0, 30, 50)))}  # fmt: skip
    against_oracle(functional.packed_attention, packed, **offsets, max_q=17, max_k=30)


def test_which_heads_a_gpu_takes():
    """All kernels of an architecture have tiles for the widest head that it is said to take."""
    table = pytest.importorskip("fastformer.kernels.attention.configurations")
    archs = {arch for _, _, arch in table.CONFIGURATIONS}
    found = {(arch, dtype): table.widest_head(arch, dtype) for arch in archs for dtype in FLOATS}
    wide = {key for key, dim in found.items() if dim == 512}
    of_wide = "sm_80", "sm_86", "sm_90", "sm_100"
    assert wide == {(a, d) for a in of_wide for d in (torch.float16, torch.bfloat16)}
    assert {dim for key, dim in found.items() if key not in wide} == {256}
    for (arch, dtype), dim in found.items():
        for kernel in table.KERNELS:
            for full in (False, True):
                tiles = table.configuration(kernel, arch, dtype, dim, 4096, 4096, full)
                assert tiles.BM >= 16 and tiles.BN >= 16
                assert tiles in table.rows(kernel, dtype, dim)


@pytest.mark.parametrize("dims", [(520, 16), (16, 600)], ids=str)
def test_head_dims_beyond_the_kernels(dims, backend, against_oracle):
    """The reference computes them; the kernels, asked by name, say what they take."""
    tensors = dict(
        query=torch.randn(2, 4, 5, dims[0]),
        key=torch.randn(2, 2, 6, dims[0]),
        value=torch.randn(2, 2, 6, dims[1]),
        attn_mask=torch.rand(2, 1, 5, 6) < 0.7,
    )
    if backend == "reference":
        return against_oracle(ff.scaled_dot_product_attention, tensors, enable_gqa=True)
    with pytest.raises(RuntimeError, match=rf"the head dim is {max(dims)}; the kernels take up to"):
        ff.scaled_dot_product_attention(**tensors, enable_gqa=True)


def test_tiles_that_are_kept_away_from():
    """At head dims up to 32. Triton 3.6 reads out of bounds in a backward of 64 queries and 128
    keys in two stages (triton#10573), and 3.7 where 4 warps multiply several times by wgmma
    (triton#11366).
    """
    attention = pytest.importorskip("fastformer.kernels.attention.configurations")
    for dtype, head_block, full, arch, kernel in itertools.product(
        (torch.float32, torch.bfloat16), (16, 32), (False, True),
        {arch for _, _, arch in attention.CONFIGURATIONS}, ("forward", "dkdv", "dq", "dbias"),
    ):  # fmt: skip
        tiles = attention.configuration(kernel, arch, dtype, head_block, 4096, 4096, full)
        where = kernel, arch, dtype, full, tiles
        assert (tiles.BM, tiles.BN) != (64, 128) or tiles.stages == 1, where
        assert arch != "sm_90" or tiles.warps > 4, where


WALKED = [  # window, causal_alignment, key_lengths
    (None, "top_left", None),
    ((None, 0), "top_left", None),
    ((16, 0), "top_left", None),
    ((15, 0), "bottom_right", None),
    ((17, 15), "bottom_right", [33, 70]),
    ((0, 16), "top_left", [0, 32]),
    ((None, 17), "bottom_right", [16, 49]),
    ((1, None), "bottom_right", [64, 17]),
]


@pytest.mark.parametrize("blocks", [(16, 16), (32, 16), (16, 32)], ids=str)
@pytest.mark.parametrize("window, alignment, lengths", WALKED, ids=str)
def test_tiles_that_are_walked(device, tiles, work, window, alignment, lengths, blocks):
    """Those that a query may see by length and band, and no other: what a window saves. In the
    forward those of which every query sees every key need no mask.
    """
    tiles(*blocks)
    (bm, bn), batch, sq, sk = blocks, 2, 50, 70
    x = [t.requires_grad_() for t in qkv(b=batch, h=1, sq=sq, sk=sk, d=16, device=device).values()]
    options = {"window": window, "causal_alignment": alignment}
    if lengths is not None:
        options["key_lengths"] = torch.tensor(lengths, device=device)
    left, right = (1000 if n is None else n for n in window or (None, None))
    of_rows = of_columns = whole = 0
    for length in lengths or [sk] * batch:
        shift = length - sq if alignment == "bottom_right" else 0
        i = torch.arange(-(-sq // bm) * bm)[:, None] + shift  # the last block as a whole
        j = torch.arange(-(-sk // bn) * bn)
        band = (j <= i + right) & (j >= i - left)
        for keys, rows in ((length, len(i)), (len(j), sq)):
            seen = band & (j < keys) & (i < rows + shift)
            seen = seen.view(-1, bm, len(j) // bn, bn).transpose(1, 2).flatten(2)
            if keys == length:
                of_rows += int(seen.any(2).sum())
                whole += int(seen.all(2).sum())
            else:
                of_columns += int(seen[:, : -(-length // bn)].any(2).sum())
    with use_backend("triton"):
        out = []
        run = attend
        found = work(lambda: out.append(run(*x, **options)))
        assert (found.launches, found.products) == (1, 2 * of_rows)
        of_programs = found.programs * (1 if lengths is None else 2)  # the queries; the length
        assert found.unmasked == of_programs + 2 * whole
        found = work(out[0].sum().backward)
        assert (found.launches, found.products) == (3, 3 * of_rows + 4 * of_columns)


def test_tiles_of_a_packed_batch_that_are_walked(device, tiles, work):
    """No program past the end of its sequence."""
    processors = pytest.importorskip("fastformer.kernels.launch").processors
    tiles(16, 16)
    queries, keys = (20, 50, 0), (30, 17, 16)
    x = torch.randn(70, 1, 8, device=device), *torch.randn(2, 63, 1, 8, device=device)
    x = [t.requires_grad_() for t in x]
    starts = (torch.tensor([0, *n], device=device).cumsum(0).int() for n in (queries, keys))
    walked = sum(-(-q // 16) * -(-k // 16) for q, k in zip(queries, keys))
    out = []
    with use_backend("triton"):
        found = work(lambda: out.append(functional.packed_attention(*x, *starts, 50, 30)))
    clearing = processors(device)  # programs, of the rows past the last sequence
    assert (found.programs, found.products) == (3 * 4 + clearing, 2 * walked)
    assert work(out[0].sum().backward).products == (3 + 4) * walked


LAUNCHED = {  # by what has a gradient; the forward, and the kernels of the backward
    "query": (["query"], None, 1 + 2),
    "key": (["key"], None, 1 + 2),
    "all": (["query", "key", "value"], None, 1 + 3),
    "bias": (["bias"], (2, 2, 20, 30), 1 + 2),
    "bias of keys": (["bias"], (1, 30), 1 + 2),
    "bias of rows": (["bias"], (20, 1), 1 + 0),
    "bias of rows, sinks": (["bias", "sinks"], (20, 1), 1 + 1),
    "sinks": (["sinks"], None, 1 + 1),
    "query, fixed sinks": (["query"], None, 1 + 2),
    "bias of rows, fixed sinks": (["bias"], (20, 1), 1 + 1),
}


@pytest.mark.parametrize("case", LAUNCHED)
def test_kernels_that_are_launched(device, work, monkeypatch, case):
    """Those whose results somebody wants; nor does torch compute a weight of sinks for nothing."""
    wanted, shape, expected = LAUNCHED[case]
    plan = pytest.importorskip("fastformer.kernels.attention.plan")
    weights, moved = [], plan.BackwardPlan.moved
    monkeypatch.setattr(plan.BackwardPlan, "moved", lambda *x: weights.append(x) or moved(*x))
    x = qkv(b=2, h=2, sq=20, sk=30, d=8, device=device)
    if shape is not None:
        x["bias"] = torch.randn(shape, device=device)
    if "sinks" in case:
        x["sinks"] = torch.randn(2, device=device)
    leaves = {name: t.requires_grad_(name in wanted) for name, t in x.items()}
    with use_backend("triton"):
        found = work(lambda: attend(**leaves).sum().backward())
    assert found.launches == expected
    assert bool(weights) == (case in ("sinks", "bias of rows, sinks", "bias of rows, fixed sinks"))


@pytest.mark.parametrize("window", [None, (16, 0), (None, 15)], ids=str)
def test_tiles_of_a_bias_gradient_that_are_walked(device, tiles, work, window):
    """Those of the band, for each batch and head that shares the bias."""
    tiles(16, 16)
    x = qkv(b=2, h=2, sq=50, sk=70, d=8, device=device)
    bias = torch.randn(50, 70, device=device, requires_grad=True)
    left, right = (1000 if n is None else n for n in window or (None, None))
    i, j = torch.arange(64)[:, None], torch.arange(80)
    seen = ((j <= i + right) & (j >= i - left)).view(4, 16, 5, 16).any(3).any(1)
    with use_backend("triton"):
        out = attend(**x, bias=bias, window=window)
        found = work(out.sum().backward)
    assert (found.launches, found.products) == (2, 2 * 2 * 2 * int(seen.sum()))


WIDE_HEADS = [(torch.float32, 40, 70, 2 + 4), (torch.bfloat16, 136, 150, 2 + 2)]


@pytest.mark.parametrize("dtype, d, dv, parts", WIDE_HEADS)
def test_a_bias_gradient_of_wide_heads(device, against_oracle, work, dtype, d, dv, parts):
    """Its products take as many of a head's features at a time as the registers hold."""
    x = qkv(b=1, h=2, sq=20, sk=30, d=d, dtype=dtype, device=device)
    x["value"] = torch.randn(1, 2, 30, dv, device=device).to(dtype)
    x["bias"] = torch.randn(20, 30, device=device)
    with use_backend("triton"):
        against_oracle(attend, x)
        bias = x["bias"].requires_grad_()
        out = attend(**x)
        found = work(lambda: torch.autograd.grad(out.sum(), bias))
    assert (found.launches, found.products) == (2, 2 * parts)
