"""scaled_dot_product_attention on both backends, against the written-out formula in float64."""

import pytest
import torch

import fastformer as ff
from fastformer import functional, use_backend

B, H, SQ, SK, D = 2, 2, 65, 127, 40
LOW = [torch.float16, torch.bfloat16]


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


@pytest.mark.parametrize("case", list(masks("cpu")))
@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
def test_every_mask(backend, device, against_oracle, case, dtype):
    x = qkv(dtype=dtype, device=device)
    against_oracle(functional.scaled_dot_product_attention, x, **masks(device)[case])


@pytest.mark.parametrize("sq, sk", [(1, 64), (64, 64), (127, 65), (200, 300)])
def test_lengths(backend, device, against_oracle, sq, sk):
    x = qkv(b=1, h=1, sq=sq, sk=sk, d=16, device=device)
    against_oracle(functional.scaled_dot_product_attention, x, is_causal=sq > 1)


@pytest.mark.parametrize("sq", [1, 63])
def test_one_key(backend, device, sq):
    """Its weight is 1 whatever the score: the output is its value, and query and key have no
    gradient but rounding.
    """
    x = {n: t.requires_grad_() for n, t in qkv(b=1, h=1, sq=sq, sk=1, d=16, device=device).items()}
    out = functional.scaled_dot_product_attention(**x, is_causal=True)
    assert torch.equal(out, x["value"].expand(1, 1, sq, 16))
    weight = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, list(x.values()), weight)
    torch.testing.assert_close(dv, weight.sum(2, keepdim=True))
    assert max(dq.abs().max(), dk.abs().max()) < 1e-4 * x["query"].norm()


@pytest.mark.parametrize(
    "d, dv", [(8, 8), (16, 64), (64, 64), (72, 72), (96, 40), (128, 128), (256, 256)]
)
def test_head_dims(backend, device, against_oracle, d, dv):
    x = qkv(b=1, h=1, sq=33, sk=70, d=d, dv=dv, device=device)
    against_oracle(functional.scaled_dot_product_attention, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("g", [1, 2])
def test_grouped_heads(backend, device, against_oracle, g, dtype):
    x = qkv(h=4, g=g, sq=33, sk=70, d=16, dtype=dtype, device=device)
    mask = torch.rand(B, 4, 1, 70, device=device) > 0.3  # differs over the query heads of a group
    against_oracle(functional.scaled_dot_product_attention, x, enable_gqa=True, attn_mask=mask)


def test_long(backend, device, against_oracle):
    x = qkv(b=1, h=1, sq=1000, sk=1000, d=64, dtype=torch.bfloat16, device=device)
    against_oracle(functional.scaled_dot_product_attention, x, is_causal=True)


def test_large_logits(backend, device, against_oracle):
    x = qkv(sq=40, sk=70, d=16, device=device, logits=40.0)  # up to some 120, both ways
    against_oracle(functional.scaled_dot_product_attention, x, is_causal=True)


def test_scale(backend, device, against_oracle):
    x = qkv(b=1, h=1, sq=20, sk=30, d=16, device=device, logits=0.5)
    against_oracle(functional.scaled_dot_product_attention, x, scale=0.7)


@pytest.mark.parametrize("tiles", [(16, 32), (32, 16), (64, 64)], ids=str)
@pytest.mark.parametrize("case", ["causal", "lengths", "key_mask", "together"])
def test_tiles(device, against_oracle, monkeypatch, tiles, case):
    """Several tiles each way, whole ones and cut ones; dropout and masks do not depend on the
    tile.
    """
    attention = pytest.importorskip("fastformer.kernels.attention")
    chosen = attention.Tiles(*tiles, 4, 1)
    monkeypatch.setattr(attention, "configuration", lambda *_: chosen)
    x = qkv(b=2, h=1, sq=70, sk=83, d=16, device=device)
    with use_backend("triton"):
        against_oracle(
            functional.scaled_dot_product_attention, x, **masks(device, 2, 1, 70, 83)[case]
        )


def test_strided_views(backend, device, against_oracle):
    packed = torch.randn(B, SK, 3, H, D, device=device)  # one projection for q, k and v
    q, k, v = packed.unbind(2)
    x = {"query": q.transpose(1, 2), "key": k.transpose(1, 2), "value": v.transpose(1, 2)}
    against_oracle(functional.scaled_dot_product_attention, x)
    x["key"] = torch.randn(B, H, D, SK, device=device).transpose(2, 3)  # its last stride is not 1
    x["value"] = torch.randn(B, 1, SK, 2 * D, device=device)[..., ::2].expand(B, H, SK, D)
    against_oracle(functional.scaled_dot_product_attention, x, is_causal=True)


def test_a_row_that_sees_nothing_is_zero(backend, device, against_oracle):
    x = qkv(sq=20, sk=30, d=16, device=device)
    lengths = torch.tensor([0, 30], device=device)
    out = functional.scaled_dot_product_attention(**x, key_lengths=lengths)
    assert (out[0] == 0).all() and (out[1] != 0).all()
    against_oracle(functional.scaled_dot_product_attention, x, key_lengths=lengths)
    mask = torch.ones(20, 30, dtype=torch.bool, device=device)
    mask[3] = False
    out = functional.scaled_dot_product_attention(**x, attn_mask=mask)
    assert (out[:, :, 3] == 0).all() and (out[:, :, 4] != 0).any()
    against_oracle(functional.scaled_dot_product_attention, x, attn_mask=mask)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("by", ["lengths", "mask", "both"])
def test_hidden_keys_may_hold_anything(backend, device, by, poison, dropout_p):
    """pytorch#101967: 0 * NaN of a key that no query may see leaked into every output."""
    x = qkv(sq=20, sk=70, d=16, device=device)
    visible = torch.ones(B, 1, 1, 70, dtype=torch.bool, device=device)
    visible[0, ..., 50:] = False
    visible[1, ..., 66:] = False
    lengths = visible.sum((1, 2, 3))
    if by == "mask":
        visible[0, ..., 2] = False
    arguments = {"dropout_p": dropout_p, "dropout_seed": 3}
    arguments |= {"key_lengths": lengths} if by != "mask" else {}
    arguments |= {"attn_mask": visible} if by != "lengths" else {}
    results = []
    for fill in (0.0, poison):
        hidden = ~visible.transpose(2, 3)
        leaves = [
            x["query"].clone().requires_grad_(),
            x["key"].masked_fill(hidden, fill).requires_grad_(),
            x["value"].masked_fill(hidden, fill).requires_grad_(),
        ]
        out = functional.scaled_dot_product_attention(*leaves, **arguments)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for clean, poisoned in zip(*results):
        assert torch.equal(clean, poisoned)


@pytest.mark.parametrize("shape", ["batch", "heads", "queries", "keys"])
def test_empty(backend, device, shape):
    sizes = {"b": 0} if shape == "batch" else {"h": 0} if shape == "heads" else {}
    sizes |= {"sq": 0} if shape == "queries" else {"sk": 0} if shape == "keys" else {}
    x = {n: t.requires_grad_() for n, t in qkv(**sizes, device=device).items()}
    out = functional.scaled_dot_product_attention(**x)
    assert out.shape == (*x["query"].shape[:3], D) and (out == 0).all()
    for t, g in zip(x.values(), torch.autograd.grad(out.sum(), list(x.values()))):
        assert g.shape == t.shape and (g == 0).all()


def test_same_bits_every_time(backend, device):
    x = {n: t.requires_grad_() for n, t in qkv(h=4, g=2, sq=40, sk=50, device=device).items()}

    def run():
        out = functional.scaled_dot_product_attention(
            **x, enable_gqa=True, dropout_p=0.1, dropout_seed=1
        )
        return [out, *torch.autograd.grad(out.square().sum(), list(x.values()))]

    first = run()
    for _ in range(50 if device.type == "cuda" else 3):
        assert all(torch.equal(a, b) for a, b in zip(first, run()))


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
def test_gradients_for_some_inputs_only(backend, device, needed):
    x = list(qkv(b=1, h=1, sq=20, sk=30, d=16, device=device).values())
    every = [t.clone().requires_grad_() for t in x]
    some = [t.clone().requires_grad_(i in needed) for i, t in enumerate(x)]
    full, part = (
        functional.scaled_dot_product_attention(*y, is_causal=True) for y in (every, some)
    )
    full.square().sum().backward()
    part.square().sum().backward()
    for i, (a, b) in enumerate(zip(every, some)):
        assert (b.grad is None) if i not in needed else torch.equal(a.grad, b.grad)


# ------------------------------------------------------------------------------------------ bugs

BUGS = {
    "scale off by 5%": ("_forward", "qk_scale = scale * LOG2E", "qk_scale = scale * LOG2E * 1.05"),
    "backward scale": ("_backward_dq", "dq = dq * scale", "dq = dq"),
    "mask inverted": ("_visible", "mask=j < Sk, other=0) != 0)", "mask=j < Sk, other=0) == 0)"),
    "key mask inverted": ("_key_mask", "mask=j < Sk, other=0) != 0", "mask=j < Sk, other=0) == 0"),
    "causal off by one": ("_visible", "j <= i", "j < i"),
    "causal bound": ("_forward", "i0 + BM)", "i0)"),
    "head offset": ("_forward", "b * s_qb + h * s_qh", "b * s_qb"),
    "head offset in dq": ("_backward_dq", "K + b * s_kb + g * s_kg", "K + b * s_kb"),
    "batch offset": ("_backward_dkdv", "V + b * s_vb", "V"),
    "length ignored": ("_length", "length = tl.minimum", "length = Sk + 0 * tl.minimum"),
    "dropout not rescaled": ("_forward", "(inv_keep / sums)", "(1.0 / sums)"),
    "dropout in dp not rescaled": (
        "_backward_dkdv",
        "tl.where(keep, dp, 0.0) * inv_keep",
        "tl.where(keep, dp, 0.0)",
    ),
    "dropout of another plane": ("_backward_dq", "seed, plane,", "seed, plane + 1,"),
    "no rescaling of the sum": ("_forward_tiles", "l = l * rescale +", "l = l +"),
    "wrong delta": ("_backward_dkdv", "dp - delta[None, :]", "dp"),
    "lse in base 2": ("_forward", "tl.math.log2(sums)) * LN2", "tl.math.log2(sums))"),
    "a key lost at the edge": ("_forward_tiles", "inside = j < length", "inside = j < length - 1"),
}


@pytest.mark.parametrize("bug", list(BUGS))
def test_a_planted_bug_is_caught(device, against_oracle, monkeypatch, plant, bug):
    from fastformer.kernels import attention

    chosen = attention.Tiles(32, 32, 4, 1)
    monkeypatch.setattr(attention, "configuration", lambda *_: chosen)
    plant(attention, *BUGS[bug])
    cases = masks(device, sq=40, sk=45)

    def check():
        for case in ("plain", "key_mask", "together"):
            x = qkv(sq=40, sk=45, d=16, device=device)
            against_oracle(functional.scaled_dot_product_attention, x, **cases[case])

    with use_backend("triton"), pytest.raises(AssertionError):
        check()


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "change, error, words",
    [
        (
            {"query": torch.zeros(2, 3, 4)},
            ValueError,
            r"query has shape \[2, 3, 4\]; expected four",
        ),
        (
            {"key": torch.zeros(2, 2, 5, 9)},
            ValueError,
            r"key \[2, 2, 5, 9\]; expected the head dim",
        ),
        ({"key": torch.zeros(3, 2, 5, 8)}, ValueError, r"expected the batch of query"),
        (
            {"key": torch.zeros(2, 1, 5, 8), "value": torch.zeros(2, 1, 5, 8)},
            ValueError,
            "enable_gqa",
        ),
        ({"value": torch.zeros(2, 2, 6, 8)}, ValueError, r"value \[2, 2, 6, 8\]; expected"),
        (
            {"value": torch.zeros(2, 2, 5, 8).half()},
            TypeError,
            "value has dtype torch.float16; expected",
        ),
        ({"query": torch.zeros(2, 2, 4, 8).int()}, TypeError, "query has dtype torch.int32"),
        ({"value": "v"}, TypeError, "value is a str"),
        ({"attn_mask": torch.zeros(4, 5).int()}, TypeError, "attn_mask has dtype torch.int32"),
        ({"attn_mask": torch.zeros(4, 5)}, TypeError, "attn_mask has dtype torch.float32"),
        (
            {"attn_mask": torch.zeros(4, 6) > 0},
            ValueError,
            r"attn_mask has shape \[4, 6\]; expected one that",
        ),
        ({"attn_mask": torch.zeros(1, 2, 2, 4, 5) > 0}, ValueError, "broadcasts to"),
        (
            {"key_lengths": torch.tensor([1, 6])},
            ValueError,
            "key_lengths holds 6; expected lengths from 0 to Sk = 5",
        ),
        ({"key_lengths": torch.tensor([-1, 5])}, ValueError, "key_lengths holds -1"),
        (
            {"key_lengths": torch.tensor([1, 2, 3])},
            ValueError,
            r"key_lengths has shape \[3\]; expected \[B\]",
        ),
        (
            {"key_lengths": torch.tensor([1.0, 2.0])},
            TypeError,
            "key_lengths has dtype torch.float32",
        ),
        ({"key_lengths": [1, 2]}, TypeError, "key_lengths is a list"),
        ({"dropout_p": 1.5}, ValueError, r"dropout_p is 1.5; expected a number in \[0, 1\]"),
        ({"dropout_p": float("nan")}, ValueError, "dropout_p is nan"),
        ({"dropout_p": "0.1"}, TypeError, "dropout_p is a str"),
        ({"dropout_p": 0.1, "dropout_seed": 1.0}, TypeError, "dropout_seed is a float"),
        (
            {"dropout_p": 0.1, "dropout_seed": torch.zeros(2).long()},
            ValueError,
            "dropout_seed has shape",
        ),
        ({"scale": "1"}, TypeError, "scale is a str"),
        (
            {"query": torch.zeros(2, 2, 4, 300), "key": torch.zeros(2, 2, 5, 300)},
            ValueError,
            "at most 256",
        ),
        (
            {"query": torch.zeros(2, 2, 4, 8, device="meta")},
            ValueError,
            "key is on cpu; expected the device of query, meta",
        ),
    ],
)
def test_bad_input(backend, change, error, words):
    good = qkv(2, 2, 4, 5, 8)
    with pytest.raises(error, match=words):
        ff.scaled_dot_product_attention(**{**good, **change})


def test_gqa_needs_a_divisor():
    x = qkv(h=4, g=3)
    with pytest.raises(ValueError, match="divides 4"):
        ff.scaled_dot_product_attention(**x, enable_gqa=True)
