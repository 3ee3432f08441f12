"""scaled_dot_product_attention beside torch's own op and the tutorials' formula.

The headline is `padding+dropout`, which training a standard Transformer needs, and the same with a
learned bias, which no fused peer supports. FlexAttention has no dropout: its rows beside dropout
say so, and are no peer. `tgt_mask` is the mask of padding and causality that a decoder is trained
with, given as a tensor [B, 1, S, S]; compare it with `causal`, and with FlexAttention, which is
given the same as a function and builds its blocks in each call. `packed` runs without the padding,
and so do flash-attn and `varlen`, torch's own, where there is padding: the time includes removing
the padding and restoring it. In `causal grouped` four query heads share a head of the keys. In
`global and window` a query sees the first S/128 keys, and S/16 on each side of itself: fastformer
and FlexAttention are given a block mask that was built before.

FLOPs: 4 B H Sq Sk D forward (two products), 2.5 times that backward (five products); half of it
when causal, the pairs inside of a window or seen by a block mask; with padding only the valid keys,
whatever the provider computes. Least bytes: forward q and o, and the valid k and v, once; backward
q, o, do, dq, dk, dv and the valid k and v; a bias read twice and its gradient written once.
"""

import functools
from typing import NamedTuple

import pytest
import torch
from torch.nn.attention import varlen

import fastformer as ff
from benchmarks.peers import FORCED, GPU, available, flash_attn, sdpa, tutorial_attention

HEADS = 8


class Case(NamedTuple):
    name: str
    causal: bool = False
    padded: bool = False  # half of the keys are valid: lengths spread evenly around S/2
    dropout_p: float = 0.0
    bias: bool = False  # [H, S, S], with its gradient
    window: int = 0  # causal, with so many keys to the left
    tensor: bool = False  # whether the mask is one tensor with a row for each query
    holes: bool = False  # the first keys, and a window
    group: int = 1  # query heads that share a head of the keys
    dims: tuple[int, ...] = (64,)

    def __str__(self):
        return self.name


CASES = [
    Case("plain", dims=(64, 128) if GPU else (64,)),
    Case("causal", causal=True, dims=(64, 128) if GPU else (64,)),
    Case("padding", padded=True),
    Case("padding+dropout", padded=True, dropout_p=0.1),
    Case("bias", bias=True),
    Case("padding+dropout+bias", padded=True, dropout_p=0.1, bias=True),
    Case("window", causal=True, window=128),
    Case("tgt_mask", causal=True, padded=True, tensor=True),
    Case("global and window", holes=True),
]
if GPU:
    CASES.append(Case("causal grouped", causal=True, group=4, dims=(128,)))
    CASES.append(Case("causal as a tensor", causal=True, tensor=True))
    CASES.append(Case("global and window as a tensor", holes=True, tensor=True))
    CASES.append(Case("tgt_mask+dropout", causal=True, padded=True, dropout_p=0.1, tensor=True))
SHORT = 256  # on a CPU without --slow the cases after the headline end here
PROVIDERS = available("torch", *FORCED, "flash-attn", "flash-attn 3", "flex", "tutorial")
PROVIDERS += available("varlen", "reference", "triton", "packed")


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    "case, dim", [pytest.param(c, d, id=f"{c}-d{d}") for c in CASES for d in c.dims]
)
def test_attention(
    measure, differentiated, request, device, dtype, batch, length, case, dim, mode, provider
):
    slow = request.config.getoption("slow")
    more = case.bias or case.window or case.tensor or case.holes
    if not (GPU or slow) and more and length > SHORT:
        pytest.skip(f"{case} above {SHORT} on a CPU: needs --slow")
    if provider == "packed" and (case.bias or case.causal or not case.padded):
        pytest.skip("nothing to pack, or a bias of queries and keys, which cannot be packed")
    if provider == "varlen" and (not case.padded or case.dropout_p or case.causal):
        pytest.skip("varlen is torch's attention of padding, without dropout")
    if provider.startswith("flash-attn") and (case.bias or case.holes):
        pytest.skip("flash-attn takes no bias and no mask")
    if provider == "flash-attn 3" and case.dropout_p:
        pytest.skip("flash-attn 3 has no dropout")
    if provider == "flex" and not slow:
        pytest.skip("flex_attention compiles for each shape: needs --slow")
    if provider == "tutorial" and case.group > 1:
        pytest.skip("the tutorials' formula has no grouped heads")
    groups = HEADS // case.group
    # [B, S, H, D] in memory, as a projection leaves it.
    q, k, v = (
        torch.randn(batch, length, heads, dim, device=device, dtype=dtype)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (HEADS, groups, groups)
    )
    lengths = torch.linspace(0, length, batch + 2, device=device)[1:-1].int()
    inputs = [q, k, v]
    if case.bias:
        inputs.append(torch.randn(HEADS, length, length, device=device, dtype=dtype))
        inputs[-1].requires_grad_()
    forward = functools.partial(_forward(provider, case, lengths, length), *inputs)

    valid = int(lengths.sum()) if case.padded else batch * length
    flops = 4 * HEADS * dim * length * valid * _part(case, length)
    if case.causal and case.padded:  # the triangle of each sequence, and its valid keys below
        n = lengths.double()
        flops = 4 * HEADS * dim * float((n * length - n * n / 2).sum())
    queries = 2 * HEADS * dim * batch * length * dtype.itemsize
    keys = 2 * groups * dim * valid * dtype.itemsize
    nbytes = queries + keys
    if mode == "forward+backward":
        flops, nbytes = 3.5 * flops, nbytes + 3 * queries + keys
    nbytes += sum(x.nbytes for x in inputs[3:]) * (3 if mode == "forward+backward" else 1)
    measure(
        differentiated(forward, inputs),
        group=f"attention {case} d={dim} S={length} {mode}",
        flops=flops,
        nbytes=nbytes,
        heads=HEADS,
        head_dim=dim,
        valid_keys=valid,
        dropout_p=case.dropout_p,
        **({"lacks": "dropout"} if provider == "flex" and case.dropout_p else {}),
    )


def _part(case, length):
    """Return the share of the pairs of query and key that causality and the mask keep."""
    if case.holes:
        i = torch.arange(length)
        return float(_holes(length)(0, 0, i[:, None], i).double().mean())
    if case.window:
        seen = min(case.window + 1, length)
        return (seen * length - seen * (seen - 1) / 2) / length**2
    return 0.5 if case.causal else 1


def _forward(provider, case, lengths, length):
    """Return the provider's function of the case: (q, k, v, and a bias) -> output."""
    p, causal = case.dropout_p, case.causal
    if provider == "packed":
        return _packed(p, lengths)
    if provider == "varlen":
        return _unpadded(varlen.varlen_attn, lengths)
    if provider in ("reference", "triton"):
        options = {"key_lengths": lengths} if case.padded else {}
        options["enable_gqa"] = case.group > 1
        if case.window:
            options["window"] = (case.window, None)
        if case.tensor:
            options = {"attn_mask": _mask(case, lengths, length)}
        elif case.holes:
            blocks = ff.block_mask(_holes(length), Sq=length, Sk=length, device=lengths.device)
            options = {"attn_mask": blocks}

        def forward(q, k, v, bias=None):
            with ff.use_backend(provider):
                return ff.scaled_dot_product_attention(
                    q, k, v, dropout_p=p, is_causal=causal and not case.tensor, bias=bias, **options
                )

        return forward

    mask = None
    masked = case.padded or case.window or case.tensor or case.holes
    if masked or (causal and provider == "tutorial"):
        mask = _mask(case, lengths, length)
    if provider == "tutorial":
        return lambda q, k, v, bias=None: tutorial_attention(q, k, v, mask, p, bias)
    if provider == "flex":
        return _flex(case, lengths, length)
    if provider.startswith("flash-attn"):
        return _flash_attn(provider, case, lengths)

    def attend(q, k, v, bias=None):
        if bias is None:
            grouped = {"enable_gqa": True} if case.group > 1 else {}
            return sdpa(provider, q, k, v, mask, p, causal and mask is None, **grouped)
        added = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
        return sdpa(provider, q, k, v, added.expand(len(q), *bias.shape), p)

    return attend


def _mask(case, lengths, length):
    """Return the boolean mask of the case, [B or 1, 1, S or 1, S]."""
    positions = torch.arange(length, device=lengths.device)
    mask = torch.ones(1, 1, 1, length, dtype=torch.bool, device=lengths.device)
    if case.padded:
        mask = (positions < lengths[:, None])[:, None, None]
    if case.causal:
        mask = mask & (positions <= positions[:, None])
    if case.window:
        mask = mask & (positions >= positions[:, None] - case.window)
    if case.holes:
        mask = mask & _holes(length)(0, 0, positions[:, None], positions)
    return mask


def _holes(length):
    """Return the mask_mod of `global and window`."""
    return lambda b, h, i, j: ((i - j).abs() <= length // 16) | (j < length // 128)


def _packed(p, lengths):
    def attend(*inputs):
        with ff.use_backend("triton"):
            return ff.packed_attention(*inputs, dropout_p=p)

    return _unpadded(attend, lengths)


def _unpadded(attend, lengths):
    """Remove the padding and restore it, as an encoder does once for all its layers."""

    def forward(q, k, v):
        q, packing = ff.unpad(q.transpose(1, 2), lengths)
        k, v = (ff.unpad(x.transpose(1, 2), packing)[0] for x in (k, v))
        offsets, longest = packing.cu_seqlens, packing.longest
        out = attend(q, k, v, offsets, offsets, longest, longest)
        return ff.pad(out, packing).transpose(1, 2)

    return forward


def _flash_attn(provider, case, lengths):
    options = {"causal": case.causal, "window_size": (case.window or -1, -1)}
    library = flash_attn(provider)
    if provider == "flash-attn":
        options["dropout_p"] = case.dropout_p

    def output(x):  # some versions return the log-sum-exp beside it
        return x[0] if isinstance(x, tuple) else x

    if case.padded:
        attend = library.flash_attn_varlen_func
        return _unpadded(lambda *inputs: output(attend(*inputs, **options)), lengths)

    def forward(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return output(library.flash_attn_func(q, k, v, **options)).transpose(1, 2)

    return forward


def _flex(case, lengths, length):
    """Build the mask of FlexAttention in every call, since every batch has other lengths, or before
    if all have the same.
    """
    from torch.nn.attention import flex_attention as flex

    attend = torch.compile(flex.flex_attention, dynamic=False)
    build = torch.compile(flex.create_block_mask, dynamic=False)
    if case.holes:
        mask = flex.create_block_mask(
            _holes(length), None, None, length, length, device=lengths.device
        )
        return lambda q, k, v: attend(q, k, v, block_mask=mask)

    def visible(b, h, i, j):
        seen = j <= i if case.causal else j >= 0
        if case.window:
            seen = seen & (j >= i - case.window)
        return seen & (j < lengths[b]) if case.padded else seen

    def forward(q, k, v, bias=None):
        options = {"enable_gqa": True} if case.group > 1 else {}
        if bias is not None:
            options["score_mod"] = lambda s, b, h, i, j: s + bias[h, i, j]
        if case.padded or case.causal:  # for all heads
            mask = build(visible, len(lengths), 1, length, length, device=q.device)
            options["block_mask"] = mask
        return attend(q, k, v, **options)

    return forward
