"""The records of the attention ops."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from fastformer.description import OPTIONS, Attention, beyond_torch, dims, unpack, words
from fastformer.dispatch import backends, operation, workloads
from fastformer.dispatch.operation import Alternative, Arguments, Operation, Options, Sizes
from fastformer.dispatch.workloads import Maker
from fastformer.ops.attention import contract, reference

_aten = torch.ops.aten


def _dims(arguments: Arguments) -> dict[str, str]:
    if "block_table" in arguments:
        given = {"query": "bhqd", "key_pages": "..hd", "value_pages": "..he", "block_table": "b."}
    elif arguments["cu_seqlens_q"] is not None:
        given = {"query": ".hd", "key": ".hd", "value": ".he"}
        given |= {"cu_seqlens_q": ".", "cu_seqlens_k": "."}
        own = dims(arguments).items()  # sequences, queries and keys are complete
        return given | {n: "".join(x if x == "h" else "." for x in letters) for n, letters in own}
    else:
        given = {"query": "bhqd", "key": "bhkd", "value": "bhke"}
    return given | dims(arguments)


def _output_dims(dims: dict[str, str]) -> tuple[str, str]:
    """Return the dimensions of output and lse, which is [H, Tq] in a packed batch."""
    rows = dims["query"][:-1]
    return rows + "e", "h." if "cu_seqlens_q" in dims else rows


_SHARDING = operation.ShardingRule(_dims, _output_dims, "hbq")


def _describe(
    query: Tensor, key: Tensor, value: Tensor, attention: Attention, return_lse: bool
) -> tuple[Sizes, Options]:
    B, H, Sq, D = query.shape
    sizes = dict(B=B, H=H, G=key.shape[1], Sq=Sq, Sk=key.shape[2], D=D, Dv=value.shape[3])
    inside = H > 1 and Sq > 1 and query.stride(1) < query.stride(2)
    return sizes, dict(heads_inside=inside, **words(attention))


def _arguments(make: Maker, sizes: Sizes, options: Options) -> Arguments:
    B, H, G, Sq, Sk, D, Dv = sizes.values()

    def heads(n: int, length: int, width: int, scale: float = 1.0) -> Tensor:
        if not options.get("heads_inside"):
            return make.normal(B, n, length, width, scale=scale)
        return make.normal(B, length, n, width, scale=scale).transpose(1, 2)

    given: Arguments = dict(query=heads(H, Sq, D, 1.5), enable_gqa=G != H)
    given |= dict(key=heads(G, Sk, D, 1.5), value=heads(G, Sk, Dv))
    return given | _band(options) | _scored(make, (B, H, Sq, Sk), options)


def _scored(make: Maker, scores: tuple[int, int, int, int], options: Options) -> Arguments:
    """Return the arguments that change the scores [B, H, Sq, Sk] in padded and paged attention."""
    B, H, Sq, Sk = scores
    shapes = {"keys": (1, Sk), "rows": (Sq, 1), "all": (Sq, Sk)}
    given: Arguments = {}
    if "mask" in options:
        # Padding on the right and, if each query has a row of its own, causality.
        lengths = make.integers(-(-Sk // 2), Sk + 1, B).view(B, 1, 1, 1)
        seen = torch.ones(shapes[options["mask"]], dtype=torch.bool, device=make.device)
        if options["mask"] == "all":
            seen = seen.tril(max(Sk - Sq, 0))
        given["attn_mask"] = seen & (torch.arange(seen.shape[1], device=make.device) < lengths)
    if "bias" in options:
        wanted = "bias_gradient" in options
        given["bias"] = make.normal(1, H, *shapes[options["bias"]], gradient=wanted)
    if "lengths" in options:
        given["key_lengths"] = make.integers(-(-Sk // 2), Sk + 1, B)
    return given | _of_heads(make, H, options)


def _of_heads(make: Maker, H: int, options: Options) -> Arguments:
    """Return ALiBi's slopes, the softcap and the sinks, which depend on no length."""
    given: Arguments = {}
    if "alibi" in options:
        given["alibi_slopes"] = 0.5 ** torch.arange(1.0, H + 1, device=make.device)
    if "softcap" in options:
        given["softcap"] = 30.0
    if "sinks" in options:
        given["sinks"] = make.normal(H)
    return given


def _band(options: Options) -> Arguments:
    """Return the arguments that all attention ops share: the band, dropout, and every option that
    is a boolean whose only word is its name.
    """
    given: Arguments = {
        o.name: True
        for o in OPTIONS
        if o.schema == "bool" and o.words is None and o.name in options
    }
    given["is_causal"] = "causal" in options
    if "bottom_right" in options:
        given["causal_alignment"] = "bottom_right"
    if "left" in options or "right" in options:
        given["window"] = options.get("left"), options.get("right")
    return given | workloads.dropout(options)


def _describe_packed(
    query: Tensor, key: Tensor, value: Tensor, attention: Attention, return_lse: bool
) -> tuple[Sizes, Options]:
    assert attention.cu_seqlens_q is not None
    sizes = dict(B=attention.cu_seqlens_q.shape[0] - 1, H=query.shape[1], G=key.shape[1])
    sizes |= dict(Sq=attention.max_q, Sk=attention.max_k, D=query.shape[2], Dv=value.shape[2])
    return sizes, words(attention)


def _packed_arguments(make: Maker, sizes: Sizes, options: Options) -> Arguments:
    B, H, G, Sq, Sk, D, Dv = sizes.values()
    given = dict(query=make.normal(B * Sq, H, D, scale=1.5), max_q=Sq, max_k=Sk)
    given |= dict(key=make.normal(B * Sk, G, D, scale=1.5), value=make.normal(B * Sk, G, Dv))
    for name, n in (("cu_seqlens_q", Sq), ("cu_seqlens_k", Sk)):
        given[name] = n * torch.arange(B + 1, dtype=torch.int32, device=make.device)
    if "bias" in options:
        given["bias"] = make.normal(B * Sk, gradient="bias_gradient" in options)
    return given | _band(options) | _of_heads(make, H, options)


def _describe_paged(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    attention: Attention,
    return_lse: bool,
) -> tuple[Sizes, Options]:
    B, H, Sq, D = query.shape
    _, page, G, Dv = value_pages.shape
    sizes = dict(B=B, H=H, G=G, Sq=Sq, Sk=block_table.shape[1] * page, D=D, Dv=Dv, page=page)
    return sizes, words(attention)


def _paged_arguments(make: Maker, sizes: Sizes, options: Options) -> Arguments:
    """Return arguments with the pages in random order. Sk is a multiple of the page size."""
    B, H, G, Sq, Sk, D, Dv, page = sizes.values()
    blocks = Sk // page
    order = torch.randperm(B * blocks, generator=make.generator, device=make.device)
    given: Arguments = dict(query=make.normal(B, H, Sq, D, scale=1.5))
    given["key_pages"] = make.normal(B * blocks, page, G, D, scale=1.5)
    given["value_pages"] = make.normal(B * blocks, page, G, Dv)
    given["block_table"] = order.view(B, blocks).int()
    return given | _band(options) | _scored(make, (B, H, Sq, Sk), options)


# ------------------------------------------------------------------------------------ alternatives
# There are none for the backward: torch's own backwards add in an order that changes from run to
# run, so their gradients are not reproducible.


def _ordered(x: Tensor, like: Tensor) -> Tensor:
    """Return x [B, H, S, D] in the memory layout that the kernel gives its output for `like`."""
    if like.shape[1] > 1 and like.stride(1) < like.stride(2):
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x.contiguous()


def _forward_by(op: operation.Function) -> operation.Function:
    def forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        attention = unpack(rest[:-1])
        output, lse, *_ = op(query, key, value, attention.is_causal, attention.scale)
        rows = lse.reshape(*query.shape[:2], -1)[..., : query.shape[2]]  # some ops pad the queries
        return _ordered(output, query), rows.contiguous(), query.new_empty(0)

    return forward


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
    return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
    op = _aten._scaled_dot_product_cudnn_attention
    return op(q, k, v, None, True, 0.0, causal, False, scale=scale)


def _efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
    op = _aten._scaled_dot_product_efficient_attention
    return op(q, k, v, None, True, 0.0, causal, scale=scale)


def _signature(arguments: Arguments) -> Hashable | None:
    attention: Attention = arguments["attention"]
    if beyond_torch(attention):
        return None
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    causal, sizes = attention.is_causal, (query.shape, key.shape, value.shape)
    if causal and (attention.shard is not None or query.shape[2] != key.shape[2]):
        return None
    if any(0 in size for size in sizes):
        return None
    return causal, query.dtype, query.stride(), *sizes


# Not multiples of a tile, so that the masked edge of a tile is compared too; but multiples of 16,
# for which Triton compiles the same kernel as for the full size.
_LIMITS = dict(B=2, Sq=720, Sk=720)
_PAGED_LIMITS = dict(B=2, Sq=16, Sk=768)  # a multiple of every page size
_EXAMPLE = dict(B=1, H=1, G=1, Sq=16, Sk=16, D=16, Dv=16)
_TUNED = (
    "attention forward",
    "attention forward bounds",
    "attention decode",
    "attention decode bounds",
    "attention split-KV",
    "attention backward bounds",
    "attention dkdv",
    "attention dq",
    "attention dbias",
)

backends.register(
    Operation(
        kernel="attention",
        contract=contract.scaled_dot_product_attention,
        reference=reference.scaled_dot_product_attention,
        sharding=_SHARDING,
        workloads=operation.WorkloadFamily(_describe, _arguments, _LIMITS, (_EXAMPLE, {})),
        tuned=_TUNED,
        alternatives={
            "torch (cuDNN)": Alternative(_forward_by(_cudnn)),
            "torch (flash)": Alternative(_forward_by(_flash)),
            "torch (efficient)": Alternative(_forward_by(_efficient)),
        },
        signature=_signature,
        block=reference.attention_block,
        block_gradients=reference.attention_gradients,
    ),
    Operation(
        kernel="attention",
        contract=contract.packed_attention,
        reference=reference.packed_attention,
        sharding=_SHARDING,
        workloads=operation.WorkloadFamily(
            _describe_packed, _packed_arguments, _LIMITS, (_EXAMPLE, {})
        ),
        tuned=_TUNED,
    ),
    Operation(
        kernel="attention",
        contract=contract.paged_attention,
        reference=reference.paged_attention,
        sharding=_SHARDING,
        workloads=operation.WorkloadFamily(
            _describe_paged,
            _paged_arguments,
            _PAGED_LIMITS,
            (_EXAMPLE | dict(Sq=1, page=16), dict(lengths=True)),
        ),
        tuned=_TUNED,
    ),
)
