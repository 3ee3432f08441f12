"""scaled_dot_product_attention beside torch's own op and the tutorials' formula.

The headline is `padding+dropout`: what training a standard Transformer asks for.

FLOPs: 4 B H Sq Sk D forward (two products), 2.5 times that backward (five products); half of it
when causal; only the valid keys when padded, whatever the provider computes.
Least bytes: forward q and o, and the valid k and v, once; backward q, o, do, dq, dk, dv and the
valid k and v.
"""

import functools
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

import fastformer as ff

HEADS = 8
GPU = torch.cuda.is_available()


class Case(NamedTuple):
    name: str
    causal: bool = False
    padded: bool = False  # half of the keys are valid: lengths spread evenly around S/2
    dropout_p: float = 0.0
    dims: tuple[int, ...] = (64,)

    def __str__(self):
        return self.name


CASES = [
    Case("plain", dims=(64, 128) if GPU else (64,)),
    Case("causal", causal=True, dims=(64, 128) if GPU else (64,)),
    Case("padding", padded=True),
    Case("padding+dropout", padded=True, dropout_p=0.1),
]
# torch's backends, forced one by one: by itself torch has not taken the fastest one on every GPU.
FORCED = {
    "cudnn": "CUDNN_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}
PROVIDERS = ["reference", "torch", "tutorial"]
if GPU:
    PROVIDERS = ["reference", "triton", "torch", *FORCED, "flex", "tutorial"]


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    "case, dim", [pytest.param(c, d, id=f"{c}-d{d}") for c in CASES for d in c.dims]
)
def test_attention(
    measure, differentiated, request, device, dtype, batch, length, case, dim, mode, provider
):
    if provider == "flex":
        if case.dropout_p:
            pytest.skip("flex_attention has no dropout")
        if not request.config.getoption("slow"):
            pytest.skip("flex_attention compiles for each shape: needs --slow")
    # [B, S, H, D] in memory, as a projection leaves it.
    q, k, v = (
        torch.randn(batch, length, HEADS, dim, device=device, dtype=dtype)
        .transpose(1, 2)
        .requires_grad_()
        for _ in range(3)
    )
    lengths = torch.linspace(0, length, batch + 2, device=device)[1:-1].int()
    forward = functools.partial(_forward(provider, case, lengths, length), q, k, v)

    valid = int(lengths.sum()) if case.padded else batch * length
    flops = 4 * HEADS * length * valid * dim / (2 if case.causal else 1)
    queries, keys = (2 * HEADS * dim * n * dtype.itemsize for n in (batch * length, valid))
    nbytes = queries + keys
    if mode == "forward+backward":
        flops, nbytes = 3.5 * flops, nbytes + 3 * queries + keys
    measure(
        differentiated(forward, (q, k, v)),
        group=f"attention {case} d={dim} S={length} {mode}",
        provider=provider,
        dtype=dtype,
        flops=flops,
        nbytes=nbytes,
        batch=batch,
        heads=HEADS,
        length=length,
        head_dim=dim,
        valid_keys=valid,
        dropout_p=case.dropout_p,
    )


def _forward(provider, case, lengths, length):
    """(q, k, v) -> the output, as the provider computes the case."""
    p, causal = case.dropout_p, case.causal
    if provider in ("reference", "triton"):
        key_lengths = lengths if case.padded else None

        def forward(q, k, v):
            with ff.use_backend(provider):
                return ff.scaled_dot_product_attention(
                    q, k, v, None, p, causal, key_lengths=key_lengths
                )

        return forward

    positions = torch.arange(length, device=lengths.device)
    mask = (positions < lengths[:, None])[:, None, None] if case.padded else None  # [B,1,1,S]
    if provider == "tutorial":
        if causal:
            mask = positions <= positions[:, None]
        return lambda q, k, v: _tutorial(q, k, v, mask, p)
    if provider == "flex":
        return _flex(case, lengths, length)

    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask, p, causal)

    if provider == "torch":
        return sdpa
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def forced(q, k, v):
        with sdpa_kernel(getattr(SDPBackend, FORCED[provider])):
            return sdpa(q, k, v)

    return forced


def _tutorial(q, k, v, mask, p):
    """The Annotated Transformer's `attention`."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return F.dropout(scores.softmax(-1), p) @ v


def _flex(case, lengths, length):
    """FlexAttention with its mask built in every call, as every batch has lengths of its own."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    attend, build = torch.compile(flex.flex_attention), torch.compile(flex.create_block_mask)

    def visible(b, h, i, j):
        return j < lengths[b] if case.padded else j <= i

    def forward(q, k, v):
        if not (case.padded or case.causal):
            return attend(q, k, v)
        mask = build(visible, len(lengths), 1, length, length, device=q.device)  # for all heads
        return attend(q, k, v, block_mask=mask)

    return forward
