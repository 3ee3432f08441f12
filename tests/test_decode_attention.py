"""Attention of few queries to many keys, and of keys in pages, against the formula in float64."""

import pytest
import torch

import fastformer as ff
from fastformer import use_backend

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def near(have, call, tensors, options, dtype):
    """The numerics policy for the results of a call without gradients, which `have` holds: against
    float64, in 16 bits with at most twice the error of eager PyTorch.
    """

    def eager(kind):
        moved = {n: x.to(kind) if x.is_floating_point() else x for n, x in tensors.items()}
        with use_backend("reference"), ff.reference.written_out():
            results = call(**moved, **options)
        return results if isinstance(results, tuple) else (results,)

    for x, want, peer in zip(have, eager(torch.float64), eager(dtype), strict=True):
        assert x.shape == want.shape
        nothing = want == -torch.inf
        assert ((x == -torch.inf) == nothing).all()
        x, want, peer = (y.double().masked_fill(nothing, 0.0) for y in (x, want, peer))
        assert x.isfinite().all()
        if dtype in (torch.float32, torch.float64):
            bound = 1e-5 if dtype == torch.float32 else 1e-6
            assert (x - want).norm() <= bound * want.norm()
        elif x.numel():
            error, rounding = (x - want).abs().max(), torch.finfo(dtype).eps / 2 * want.abs().max()
            assert error <= 2 * (peer - want).abs().max() + rounding


# --------------------------------------------------------------------------- few queries, many keys


@pytest.fixture
def split(monkeypatch):
    """The calls that the kernels of decode.py have computed, as their plans."""
    launchers = pytest.importorskip("fastformer.kernels.attention.launchers")
    plans, forward = [], launchers._Decode.forward

    def seen(self, *pointers):
        plans.append(self)
        return forward(self, *pointers)

    monkeypatch.setattr(launchers._Decode, "forward", seen)
    with use_backend("triton"):
        yield plans


def qkv(batch, heads, groups, queries, keys, dim=16, dv=None, device="cpu", dtype=torch.float32):
    shapes = (heads, queries, dim), (groups, keys, dim), (groups, keys, dv or dim)
    tensors = [torch.randn(batch, *shape, device=device) for shape in shapes]
    return {name: (x * 1.5).to(dtype) for name, x in zip(("query", "key", "value"), tensors)}


def options_of(names, tensors):
    """Options of a call, by name."""
    query, keys = tensors["query"], tensors["key"].shape[2]
    batch, heads, queries, _ = query.shape
    device, dtype = query.device, query.dtype

    def normal(*shape, kind=torch.float32):
        return torch.randn(shape, device=device).to(kind)

    made = {
        "causal": lambda: dict(is_causal=True),
        "bottom right": lambda: dict(is_causal=True, causal_alignment="bottom_right"),
        "lengths": lambda: dict(
            key_lengths=torch.tensor([keys - 9, 0, 1, keys, 5][:batch], device=device)
        ),
        "window": lambda: dict(window=(70, 20), causal_alignment="bottom_right"),
        "left": lambda: dict(window=(100, None), causal_alignment="bottom_right"),
        "key mask": lambda: dict(attn_mask=normal(batch, 1, 1, keys) > 0),
        "mask": lambda: dict(attn_mask=normal(1, heads, queries, keys) > 0),
        "key bias": lambda: dict(bias=normal(batch, 1, 1, keys)),
        "head bias": lambda: dict(bias=normal(heads, 1, keys, kind=dtype)),
        "bias": lambda: dict(bias=normal(batch, 1, queries, keys, kind=dtype)),
        "alibi": lambda: dict(alibi_slopes=0.5 ** torch.arange(1.0, heads + 1, device=device)),
        "softcap": lambda: dict(softcap=3.0),
        "sinks": lambda: dict(sinks=normal(heads)),
        "lse": lambda: dict(return_lse=True),
        "scale": lambda: dict(scale=-0.4),
    }
    given = dict(enable_gqa=True)
    for name in names.split(", ") if names else ():
        given |= made[name]()
    return given


def check(tensors, options):
    dtype = tensors["query"].dtype
    have = ff.scaled_dot_product_attention(**tensors, **options)
    given = tensors | {n: x for n, x in options.items() if n == "bias"}
    rest = {n: x for n, x in options.items() if n != "bias"}
    have = have if isinstance(have, tuple) else (have,)
    near(have, ff.scaled_dot_product_attention, given, rest, dtype)


# (B, H, G, Sq, Sk, D, Dv)
SHAPES = [
    (1, 1, 1, 1, 256, 16, 16),
    (3, 4, 2, 1, 300, 64, 64),
    (2, 4, 1, 5, 333, 32, 24),
    (5, 2, 2, 16, 257, 40, 80),
    (1, 16, 1, 3, 400, 128, 128),
    (1, 3, 3, 2, 290, 256, 256),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(split, device, shape, dtype):
    tensors = qkv(*shape, device=device, dtype=dtype)
    check(tensors, options_of("lse", tensors))
    assert len(split) == 1


OPTIONS = [
    "causal",
    "bottom right, lse",
    "lengths, lse",
    "bottom right, lengths, sinks, lse",
    "window, lse",
    "left, lengths",
    "key mask, lse",
    "mask, causal, lse",
    "key bias, lse, sinks",
    "head bias, lengths",
    "bias, key mask, bottom right, lse",
    "alibi, bottom right, lse",
    "softcap, key mask",
    "scale, lse",
    "mask, bias, lengths, alibi, softcap, sinks, window, lse",
]


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("names", OPTIONS)
def test_options(split, device, names, queries):
    tensors = qkv(4, 4, 2, queries, 270, device=device)
    check(tensors, options_of(names, tensors))
    assert len(split) == 1


# --------------------------------------------------------------------------------------- in pages


def paged(batch, heads, groups, queries, lengths, page=16, dim=16, dtype=torch.float32, **more):
    """The arguments of a call with the given lengths, whose pages lie in any order; what no query
    may read is NaN, and the table is out of range where it holds no keys.
    """
    blocks = max(1, -(-max(lengths, default=1) // page)) + more.get("spare", 0)
    count = batch * blocks + 2
    order = torch.randperm(count)[: batch * blocks].view(batch, blocks)
    pages = [torch.full((count, page, groups, d), torch.nan) for d in (dim, more.get("dv", dim))]
    table = torch.full((batch, blocks), -7)
    for b, n in enumerate(lengths):
        for block in range(-(-n // page)):
            table[b, block] = order[b, block]
            for x in pages:
                x[order[b, block], : n - block * page] = torch.randn_like(x[0, : n - block * page])
    return dict(
        query=torch.randn(batch, heads, queries, dim).to(dtype) * 1.5,
        key_pages=pages[0].to(dtype),
        value_pages=pages[1].to(dtype),
        block_table=table.int(),
        key_lengths=torch.tensor(lengths, dtype=torch.int32),
    )


def unpaged(tensors):
    """The same keys and values without pages, cut to the capacity of the table."""
    query, keys, values, table, lengths = (x for _, x in zip(range(5), tensors.values()))
    places = table.clamp(0, len(keys) - 1).long()
    key, value = (x[places].flatten(1, 2).transpose(1, 2) for x in (keys, values))
    return dict(query=query, key=key, value=value, key_lengths=lengths)


@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages(backend, device, dtype, page):
    tensors = paged(3, 4, 2, 3, [70, 0, 5], page, dtype=dtype)
    tensors = {name: x.to(device) for name, x in tensors.items()}
    options = dict(is_causal=True, causal_alignment="bottom_right", return_lse=True)
    near(ff.paged_attention(**tensors, **options), ff.paged_attention, tensors, options, dtype)


PAGED_OPTIONS = [
    {},
    dict(scale=0.3, softcap=5.0, window=(20, 3)),
    dict(attn_mask=(2, 1, 3, 320), alibi_slopes=(4,)),
    dict(bias=(4, 1, 320), sinks=(4,), return_lse=True),
]


@pytest.mark.parametrize("options", PAGED_OPTIONS, ids=lambda x: "-".join(x) or "plain")
def test_pages_are_the_keys_in_order(backend, device, options):
    """Bit for bit what the op without pages gives."""
    tensors = {n: x.to(device) for n, x in paged(2, 4, 2, 3, [300, 33], 32).items()}
    options = {n: torch.randn(x, device=device) if isinstance(x, tuple) and n != "window" else x
               for n, x in options.items()}  # fmt: skip
    if "attn_mask" in options:
        options["attn_mask"] = options["attn_mask"] > -0.7
    have = ff.paged_attention(**tensors, **options)
    want = ff.scaled_dot_product_attention(**unpaged(tensors), enable_gqa=True, **options)
    assert len(have) == len(want) and all(map(torch.equal, have, want))


def test_pages_have_no_gradient(backend, device):
    tensors = {n: x.to(device) for n, x in paged(1, 2, 2, 1, [20]).items()}
    for name in ("query", "key_pages", "value_pages"):
        moving = tensors | {name: tensors[name].clone().requires_grad_()}
        with pytest.raises(RuntimeError, match=f"{name} requires a gradient"):
            ff.paged_attention(**moving)
        with torch.no_grad():
            assert not ff.paged_attention(**moving).requires_grad


BAD = [
    ({"block_table": torch.tensor([[0, 4]])}, TypeError, "block_table has dtype torch.int64"),
    ({"block_table": torch.tensor([[0, 9]]).int()}, ValueError, "block_table holds page 9"),
    ({"block_table": torch.tensor([[-1, 1]]).int()}, ValueError, "block_table holds page -1"),
    ({"block_table": torch.tensor([0, 1]).int()}, ValueError, "block_table has shape"),
    ({"key_lengths": torch.tensor([33])}, ValueError, "key_lengths holds 33"),
    ({"key_lengths": torch.tensor([-1])}, ValueError, "key_lengths holds -1"),
    ({"key_pages": torch.zeros(4, 24, 2, 16)}, ValueError, "expected pages of 16, 32"),
    ({"key_pages": torch.zeros(0, 16, 2, 16)}, ValueError, "expected one page or more"),
    ({"key_pages": torch.zeros(4, 16, 2, 8)}, ValueError, "the head dim of query"),
    ({"key_pages": torch.zeros(4, 16, 16)}, ValueError, r"expected \[P, page, G, D\]"),
    ({"value_pages": torch.zeros(4, 16, 1, 16)}, ValueError, "value_pages has shape"),
    ({"query": torch.zeros(1, 3, 1, 16)}, ValueError, "a number of heads that divides 3"),
    ({"query": torch.zeros(2, 1, 16)}, ValueError, "query has shape"),
    ({"value_pages": torch.zeros(4, 16, 2, 257)}, ValueError, "head dims of at most 256"),
    ({"attn_mask": torch.ones(1, 33, dtype=torch.bool)}, ValueError, "attn_mask has shape"),
]


@pytest.mark.parametrize("wrong, error, words", BAD, ids=lambda x: "" if callable(x) else None)
def test_bad_pages(wrong, error, words):
    right = dict(
        query=torch.zeros(1, 2, 1, 16),
        key_pages=torch.zeros(4, 16, 2, 16),
        value_pages=torch.zeros(4, 16, 2, 16),
        block_table=torch.tensor([[0, 3]]).int(),
        key_lengths=torch.tensor([20]),
    )
    ff.paged_attention(**right)
    with pytest.raises(error, match=words):
        ff.paged_attention(**right | wrong)


@pytest.mark.parametrize("shape", [(0, 2, 2, 1), (2, 0, 0, 1), (2, 2, 2, 0)], ids=str)
def test_no_queries_in_pages(backend, device, shape):
    batch, heads, _, queries = shape
    tensors = {n: x.to(device) for n, x in paged(*shape, [3] * batch).items()}
    out, lse = ff.paged_attention(**tensors, return_lse=True)
    assert out.shape == (batch, heads, queries, 16) and lse.shape == out.shape[:3]
