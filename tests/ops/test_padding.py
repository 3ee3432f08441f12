"""Packed batches: unpad, pad, packed_attention, and an encoder that computes no padding. Padding
masks, whose padding the kernels skip.
"""

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastformer as ff
from fastformer import use_backend
from fastformer.description import Attention, pack
from fastformer.ops import functional


def packed(device, lengths_q=(5, 0, 33, 17), lengths_k=(9, 4, 40, 0), h=2, g=1, d=16, **options):
    """(inputs, constants) of packed_attention: a sequence without queries, one without keys."""
    q, k = (torch.tensor(n, device=device) for n in (lengths_q, lengths_k))
    tokens_q, tokens_k = int(q.sum()), int(k.sum())
    x = {
        "query": torch.randn(tokens_q, h, d, device=device) * 3,
        "key": torch.randn(tokens_k, g, d, device=device),
        "value": torch.randn(tokens_k, g, d + 8, device=device),
    }
    for name, n, lengths in (("q", q, lengths_q), ("k", k, lengths_k)):
        options[f"cu_seqlens_{name}"] = torch.cat([n.new_zeros(1), n.cumsum(0)]).int()
        options[f"max_{name}"] = max(lengths, default=0)
    return x, options


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom-right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window": {"window": (3, 7)},
    "bottom-right window": {"window": (3, None), "causal_alignment": "bottom_right"},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 7, "is_causal": True, "scale": 0.2},
}
OPTIONS |= {f"sinks, {name}": options for name, options in OPTIONS.items()} | {
    "softcap": {"softcap": 5.0},
    "softcap, dropout": {"softcap": 5.0, **OPTIONS["dropout"]},
    "alibi": {"is_causal": True},
    "alibi of each sequence": OPTIONS["bottom-right window"],
    "key bias": {},
    "key bias, causal, dropout": OPTIONS["dropout"],
    "everything": {"softcap": 5.0, **OPTIONS["bottom-right"]},
}


def with_lse(**inputs):
    out, lse = functional.packed_attention(**inputs, return_lse=True)
    return torch.cat([out.flatten(), lse.transpose(0, 1)[lse[0] > -1e30].flatten()])


def call(device, case, *lengths, dtype=torch.float32):
    """(inputs, constants) of a case of OPTIONS, with a hidden key that holds NaN."""
    x, constants = packed(device, *lengths, **OPTIONS[case])
    heads, sequences = x["query"].shape[1], constants["cu_seqlens_q"].shape[0] - 1
    x = {n: t.to(dtype) for n, t in x.items()}
    slopes = torch.rand(sequences, heads, device=device)
    if case in ("alibi", "everything"):
        constants["alibi_slopes"] = slopes[0]
    elif "alibi" in case:
        constants["alibi_slopes"] = slopes.T.contiguous().T
    if "key bias" in case or case == "everything":
        x["bias"] = torch.randn(x["key"].shape[0], device=device) * 3
        for hidden in (3, 20, 52):
            x["bias"][hidden] = -torch.inf
            x["key"][hidden] = x["value"][hidden] = torch.nan
    if "sinks" in case or case == "everything":
        x["sinks"] = torch.randn(heads, device=device) + 2
    return x, constants


@pytest.mark.sample
@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_packed_attention(backend, device, against_oracle, case, dtype):
    """With lse and its gradient."""
    x, constants = call(device, case, dtype=dtype)
    against_oracle(with_lse, x, **constants)


@pytest.mark.parametrize("case", OPTIONS)
def test_packed_in_tiles(device, against_oracle, tiles, case):
    tiles(16, 32 if case in ("softcap", "alibi", "everything") else 16)
    x, constants = call(device, case)
    with use_backend("triton"):
        against_oracle(with_lse, x, **constants)


@pytest.mark.parametrize("case", OPTIONS)
def test_packed_equals_padded(backend, device, case):
    """Sequence by sequence, the dropout mask included, forward and backward."""
    lengths = (5, 1, 33, 17)
    x, constants = call(device, case, lengths, lengths)
    packing = ff.unpad(torch.zeros(4, 40, device=device), torch.tensor(lengths, device=device))[1]
    leaves = {n: t.requires_grad_() for n, t in x.items()}
    out = functional.packed_attention(**leaves, **constants)
    heads = {n: ff.pad(leaves[n], packing).transpose(1, 2) for n in ("query", "key", "value")}
    options = {n: t for n, t in constants.items() if not n.startswith(("cu_seqlens", "max_"))}
    options.pop("causal_alignment", None)  # lengths on both sides are equal: the diagonal is one
    if "bias" in leaves:
        options["bias"] = ff.pad(leaves["bias"], packing)[:, None, None]
    padded = functional.scaled_dot_product_attention(
        **heads, **options, enable_gqa=True, key_lengths=packing.lengths, sinks=leaves.get("sinks")
    )
    again, _ = ff.unpad(padded.transpose(1, 2), packing)
    torch.testing.assert_close(out, again)
    weight = torch.randn_like(out)
    for a, b in zip(*(torch.autograd.grad(y, list(leaves.values()), weight) for y in (out, again))):
        torch.testing.assert_close(a, b)


def test_the_bias_of_a_single_key(backend, device, against_oracle):
    """Its gradient is dlse, beside a max_k that says that there may be more keys."""
    x, constants = packed(device, (3,), (1,))
    x["bias"] = torch.randn(1, device=device)
    against_oracle(with_lse, x, **{**constants, "max_k": 5})


def test_one_query_in_a_later_sequence(backend, device, against_oracle):
    """With one head: the bias has a single row, of which every sequence reads its part."""
    x, constants = packed(device, (0, 0, 1, 0), (3, 4, 5, 2), h=1)
    x["bias"] = torch.randn(14, device=device)
    against_oracle(with_lse, x, **constants)


@pytest.mark.parametrize("masked", [False, True])
def test_rows_of_no_sequence(backend, device, masked):
    """All rows of the buffer are past the end: the sequences have no tokens."""
    x = torch.full((5, 2, 16), torch.nan, device=device, requires_grad=True)
    mask = ff.block_mask(torch.ones(1, 1, 5, 5, dtype=torch.bool, device=device))
    none = torch.zeros(3, dtype=torch.int32, device=device)
    given = dict(attn_mask=mask) if masked else {}
    found = ff.packed_attention(x, x, x, none, none, 3, 3, **given, return_lse=True)
    assert not any(t.any() for t in (*found, *torch.autograd.grad(found[0].sum(), x)))


@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_packed_empty(backend, device, lengths):
    x, constants = packed(device, lengths, lengths)
    leaves = [t.requires_grad_() for t in x.values()]
    out = functional.packed_attention(*leaves, **constants)
    assert out.shape == (0, 2, 24)
    assert all(g.numel() == 0 for g in torch.autograd.grad(out.sum(), leaves))


MASKED = "plain", "bottom-right window", "dropout", "alibi", "key bias", "sinks, causal"
TAILS = [(case, False, True) for case in OPTIONS]
TAILS += [(case, True, return_lse) for case in MASKED for return_lse in (False, True)]


@pytest.mark.parametrize("case, masked, return_lse", TAILS)
def test_rows_past_the_last_sequence(backend, device, case, masked, return_lse):
    """A buffer of fixed size: output, lse and gradients are zeros there, and the other rows are
    those of the call without them, whatever these rows and their incoming gradients hold.
    """
    x, constants = call(device, case)
    if masked:
        q, k = x["query"].shape[0], x["key"].shape[0]
        dense = torch.rand(q + 7, k + 70, device=device) < 0.7
    n, results, weights = x["query"].shape[0], [], None
    for tail_q, tail_k in ((0, 0), (7, 70)):  # fewer and more rows than a block has
        longer = dict(query=tail_q, key=tail_k, value=tail_k, bias=tail_k, sinks=0)
        leaves = {
            n: torch.cat([t, t.new_full((longer[n], *t.shape[1:]), torch.nan)]).requires_grad_()
            for n, t in x.items()
        }
        if masked:
            shown = dense[: q + tail_q, : k + tail_k]
            constants["attn_mask"] = ff.block_mask(shown.expand(1, 1, -1, -1))
        found = functional.packed_attention(**leaves, **constants, return_lse=return_lse)
        found = [found[0], found[1].t()] if return_lse else [found]  # tokens first
        assert not any(t[n:].any() for t in found)
        weights = weights or [torch.randn_like(t) for t in found]
        incoming = [torch.cat([w, w.new_full((tail_q, *w.shape[1:]), torch.nan)]) for w in weights]
        grads = torch.autograd.grad(found, list(leaves.values()), incoming)
        for (name, t), grad in zip(x.items(), grads):
            assert not grad[len(t) :].any(), name
        kept = [grad[: len(t)] for t, grad in zip(x.values(), grads)]
        results.append([*(t[:n] for t in found), *kept])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("far, dim", [(n, d) for n in ("query", "key", "value") for d in (0, 1)])
def test_packed_offsets_past_int32(backend, device, same_when_far, far, dim):
    """Tokens or heads so far apart that the last one stands past 2^31 elements, which is the only
    token of its sequence.
    """
    x, constants = packed(device, (5, 33, 1), (9, 20, 1), g=2)
    x = {n: t.bfloat16() for n, t in x.items()}
    same_when_far(functools.partial(functional.packed_attention, **constants), x, far, dim)


def test_bad_offsets_stay_inside(device):
    """What a GPU call does not look at is clamped: it may give nonsense, never reads elsewhere."""
    attention = pytest.importorskip("fastformer.kernels.attention.launchers")
    x, constants = packed(device, (5, 20), (5, 20), g=2)
    bad = torch.tensor([-3, 40, 10_000_000], dtype=torch.int32, device=device)
    offsets = {**constants, "cu_seqlens_q": bad, "cu_seqlens_k": bad}
    bias = torch.zeros(25, device=device)
    arguments = pack([*x.values(), Attention(None, 0.0, False, 1.0, bias, **offsets)])
    out, lse, statistics = attention.packed_forward(*arguments, True)
    assert out.shape == (25, 2, 24) and lse.shape == (2, 25) and statistics.shape == (2, 25, 2)
    grads, needs = (torch.ones_like(out), torch.ones_like(lse)), [True] * 4 + [False]
    attention.packed_backward(*grads, *arguments, out, lse, statistics, needs)


# ------------------------------------------------------------------------------------ unpad and pad


def test_unpad_and_pad(device):
    x = torch.randn(3, 4, 5, device=device, requires_grad=True)
    lengths = torch.tensor([2, 0, 4], device=device)
    tokens, packing = ff.unpad(x, lengths)
    assert torch.equal(tokens, torch.cat([x[0, :2], x[2]]))
    assert packing.cu_seqlens.tolist() == [0, 2, 2, 6] and packing.cu_seqlens.dtype == torch.int32
    assert (packing.batch, packing.length, packing.longest) == (3, 4, 4)
    assert torch.equal(packing.lengths, lengths.int())
    back = ff.pad(tokens, packing, value=-1.0)
    assert torch.equal(back[0, :2], x[0, :2]) and (back[0, 2:] == -1).all()
    assert (back[1] == -1).all()
    (grad,) = torch.autograd.grad((back * 3).sum(), x)
    want = torch.zeros_like(x)
    want[0, :2], want[2] = 3, 3
    assert torch.equal(grad, want)
    ids = torch.arange(12, device=device).view(3, 4)
    assert ff.unpad(ids, packing)[0].tolist() == [0, 1, 8, 9, 10, 11]


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_without_its_padding(backend, device, norm_first):
    """The same at every token that is not padding, dropout included, and the same gradients."""
    torch.manual_seed(1)
    model = ff.make_model(11, 11, N=2, d_model=16, d_ff=32, h=2, dropout=0.0).to(device)
    for layer in model.encoder.layers:
        layer.self_attn.dropout.p = 0.3  # whose mask alone does not depend on the padding
        for sublayer in layer.sublayer:
            sublayer.norm_first = norm_first
    x = torch.randn(3, 9, 16, device=device)
    lengths = torch.tensor([9, 4, 6], device=device)
    mask = (torch.arange(9, device=device) < lengths.view(-1, 1)).unsqueeze(1)
    results = []
    for packed in (False, True):
        torch.manual_seed(2)
        leaf = x.clone().requires_grad_()
        if packed:
            tokens, packing = ff.unpad(leaf, lengths)
            out = ff.pad(model.encoder(tokens, packing), packing)
        else:
            out = model.encoder(leaf, mask) * mask.transpose(1, 2)
        parameters = [leaf, *model.encoder.parameters()]
        results.append([out, *torch.autograd.grad(out.square().sum(), parameters)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kv_heads, terms", [(1, False), (2, False), (2, True)])
def test_keep_attention_of_a_packed_batch(kv_heads, terms, backend, device):
    """With terms of the scores as well, which the module hands on."""
    m = ff.MultiHeadedAttention(2, 16, 0.0, kv_heads).to(device)
    m.keep_attention = True
    x, lengths = torch.randn(2, 5, 16, device=device), torch.tensor([5, 3], device=device)
    tokens, packing = ff.unpad(x, lengths)
    given, of_keys, of_tokens = {}, {}, {}
    if terms:
        given = dict(is_causal=True, alibi_slopes=torch.rand(2, 2, device=device), softcap=2.0)
        bias = torch.randn(2, 5, device=device)
        of_keys = dict(bias=bias[:, None, None])
        of_tokens = dict(bias=ff.unpad(bias, packing)[0], causal_alignment="bottom_right")
    out, padded = m(x, x, x, key_lengths=lengths, **given, **of_keys), m.attn
    packed = m(tokens, tokens, tokens, packing, **given, **of_tokens)
    torch.testing.assert_close(packed, ff.unpad(out, lengths)[0])
    torch.testing.assert_close(m.attn[0], padded[0])
    torch.testing.assert_close(m.attn[1, :, :3], padded[1, :, :3])
    assert (m.attn[1, :, 3:] == 0).all()
    want = m.attn  # from here on there are two rows past the last sequence
    packing = dataclasses.replace(packing, indices=F.pad(packing.indices, (0, 2)))
    longer = F.pad(tokens, (0, 0, 0, 2), value=torch.nan)
    if terms:
        of_tokens["bias"] = F.pad(of_tokens["bias"], (0, 2), value=torch.nan)
    m(longer, longer, longer, packing, **given, **of_tokens)
    torch.testing.assert_close(m.attn, want)


# ------------------------------------------------------------------------------------ padding masks


def padded_model(device):
    """A model as a list of calls: (module, arguments, keyword arguments)."""
    src, tgt = torch.randint(1, 9, (2, 140)), torch.randint(1, 9, (2, 131))
    src[0, :134] = src[1, 5:] = tgt[1, 50:] = 0
    batch = ff.Batch(src.to(device), tgt.to(device))
    model = ff.make_model(9, 9, 1, 16, 32, 2, 0.0).to(device)
    return [(model, (batch.src, batch.tgt, batch.src_mask, batch.tgt_mask), {})]


def padded_stacks_of_torch(device):
    model = nn.Transformer(16, 2, 1, 1, 32, 0.0, batch_first=True).to(device)  # in training
    src, tgt = torch.randn(2, 140, 16, device=device), torch.randn(2, 130, 16, device=device)
    hidden = torch.ones(2, 140, dtype=torch.bool, device=device)
    hidden[0, 134:] = hidden[1, :5] = False
    causal = torch.ones(130, 130, dtype=torch.bool, device=device).triu(1)
    masks = dict(tgt_mask=causal, memory_key_padding_mask=hidden)
    masks["tgt_key_padding_mask"] = hidden[:, 10:]
    ff.accelerate(model)
    return [(model.encoder, (src, None, hidden), {}), (model.decoder, (tgt, src), masks)]


@pytest.mark.parametrize("make", [padded_model, padded_stacks_of_torch])
def test_padding_is_skipped(make, device):
    """On the left as well: each attention of a stack computes the bounds of its mask."""
    torch.manual_seed(0)
    ran = []
    for module, given, masks in make(device):
        with use_backend("reference"):
            want = module(*given, **masks)
        with use_backend("triton"):
            torch.testing.assert_close(module(*given, **masks), want, rtol=1e-4, atol=1e-5)
            ran += ff.explain(module, *given, **masks).rows
    ran = [reason for _, op, _, reason in ran if op == "scaled_dot_product_attention"]
    assert len(ran) == 3 and all("the mask is bounded" in reason for reason in ran)


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda x, n, p: ff.unpad(x[0, 0], n), ValueError, r"expected \[B, S, ...\]"),
        (lambda x, n, p: ff.unpad(x, n.float()), TypeError, "lengths has dtype torch.float32"),
        (lambda x, n, p: ff.unpad(x, n[:1]), ValueError, r"lengths has shape \[1\]; expected"),
        (lambda x, n, p: ff.unpad(x, x[..., 0] == 0), ValueError, r"\[2\], as mask.sum\(1\)"),
        (lambda x, n, p: ff.unpad(x, n > 3), TypeError, "has dtype torch.bool; expected int"),
        (lambda x, n, p: ff.unpad(x, n + 3), ValueError, "lengths holds 7; expected"),
        (lambda x, n, p: ff.unpad(x, n - 3), ValueError, "lengths holds -1; expected"),
        (lambda x, n, p: ff.unpad(x[:, :3], p), ValueError, "as it was packed"),
        (lambda x, n, p: ff.pad(x[0], p), ValueError, "expected the 6 tokens"),
        (lambda x, n, p: ff.pad(x[0, 0, 0], p), ValueError, r"shape \[\]; expected the 6 tokens"),
        (lambda x, n, p: ff.unpad(x.to("meta"), n.to("meta")), ValueError, "lengths is on meta"),
        (lambda x, n, p: ff.pad(x[:, 0].to("meta"), p), ValueError, "x is on meta"),
        (lambda x, n, p: ff.pad(x, n), TypeError, "packing is a Tensor; expected what unpad"),
        (lambda x, n, p: ff.pad(ff.unpad(x.long(), p)[0], p, 0.5), ValueError, "value is 0.5"),
        (lambda x, n, p: ff.pad(ff.unpad(x.bool(), p)[0], p, 2), ValueError, "value is 2; .*bool"),
        (lambda x, n, p: ff.pad(ff.unpad(x.byte(), p)[0], p, -1), ValueError, "value is -1"),
        (lambda x, n, p: ff.pad(ff.unpad(x, p)[0], p, None), TypeError, "value is a NoneType"),
        (lambda x, n, p: ff.pad(ff.unpad(x, p)[0], p, 1j), TypeError, "value is a complex"),
        (lambda x, n, p: ff.pad(ff.unpad(x + 0j, p)[0], p, "1"), TypeError, "value is a str"),
    ],
)
def test_bad_padding(call, error, words):
    x, lengths = torch.zeros(2, 4, 3), torch.tensor([2, 4])
    with pytest.raises(error, match=words):
        call(x, lengths, ff.unpad(x, lengths)[1])


def test_bad_packed_modules():
    m = ff.MultiHeadedAttention(2, 16)
    tokens, packing = ff.unpad(torch.zeros(2, 4, 16), torch.tensor([2, 4]))
    with pytest.raises(ValueError, match="key_lengths is given together with a Packing"):
        m(tokens, tokens, tokens, packing, key_lengths=packing.lengths)
    with pytest.raises(ValueError, match=r"bias has shape \[4, 4\]; expected \[Tk\] = \[6\]"):
        m(tokens, tokens, tokens, packing, bias=torch.zeros(4, 4))
    with pytest.raises(ValueError, match="expected the 6 tokens of the packing"):
        m(tokens, tokens[1:], tokens, packing)
    with pytest.raises(ValueError, match=r"expected \[tokens, d_model = 16\]"):
        m(tokens, tokens[:, :8], tokens, packing)
    with pytest.raises(ValueError, match=r"query has shape \[6, 16, 1\]; expected \[tokens, d_mod"):
        m(tokens.unsqueeze(2), tokens, tokens, packing)


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"batch": 3}, ValueError, r"cu_seqlens has shape \[3\]; expected \[batch \+ 1\]"),
        ({"batch": 2.0}, TypeError, "batch is a float"),
        ({"length": -1}, ValueError, "length is -1; expected 0 or more"),
        ({"longest": True}, TypeError, "longest is a bool"),
        ({"cu_seqlens": [0, 2, 6]}, TypeError, "cu_seqlens is a list"),
        ({"cu_seqlens": torch.tensor([0, 2, 6])}, TypeError, "cu_seqlens has dtype torch.int64"),
        ({"indices": None}, TypeError, "indices is a NoneType"),
        ({"indices": torch.zeros(6)}, TypeError, "indices has dtype torch.float32"),
        ({"indices": torch.zeros(1, 6).long()}, ValueError, r"shape \[1, 6\]; expected \[tokens\]"),
    ],
)
def test_bad_packing(change, error, words):
    fields = {"cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32), "indices": torch.arange(6)}
    fields |= {"batch": 2, "length": 4, "longest": 4}
    assert ff.Packing(**fields).lengths.tolist() == [2, 4]
    with pytest.raises(error, match=words):
        ff.Packing(**{**fields, **change})


@pytest.mark.parametrize("batch, length", [(0, 4), (2, 0), (2, 4)])
def test_packing_of_nothing(batch, length):
    """No sequence, no places, or no token of any."""
    x, lengths = torch.randn(batch, length, 3), torch.zeros(batch, dtype=torch.int64)
    tokens, packing = ff.unpad(x, lengths)
    assert tokens.shape == (0, 3) and packing.longest == 0
    assert torch.equal(ff.pad(tokens, packing), torch.zeros_like(x))


def test_padding_of_bits():
    """With either of the two values there are."""
    bits, packing = ff.unpad(torch.tensor([[True, False, True]]), torch.tensor([2]))
    for value in (False, True):
        assert ff.pad(bits, packing, value).tolist() == [[True, False, value]]


def test_offsets_of_any_stride(backend, device):
    x = torch.randn(6, 2, 16, device=device)
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    want = ff.packed_attention(x, x, x, offsets, offsets, 4, 4)
    spread = torch.stack([offsets, offsets + 1], 1)[:, 0]
    assert not spread.is_contiguous()
    assert torch.equal(ff.packed_attention(x, x, x, spread, spread, 4, 4), want)
