"""The records of the attention ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fastformer.description import Attention, beyond_torch
from fastformer.dispatch import backends
from fastformer.dispatch.operation import Arguments, Operation
from fastformer.ops.attention import by_torch, contract, reference
from fastformer.ops.attention.joint import joint_reference


def _by_torch(
    query: Tensor, key: Tensor, value: Tensor, attention: Attention, return_lse: bool
) -> Tensor:
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=attention.is_causal,
        scale=attention.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return by_torch.in_order_of(query, output)


def _direct(
    query: Tensor, key: Tensor, value: Tensor, attention: Attention, return_lse: bool
) -> Callable[..., Tensor] | None:
    if return_lse or key.shape[1] != query.shape[1]:
        return None
    without = attention._replace(attn_mask=None, bias=None, key_lengths=None)
    names = ("attn_mask", "bias", "key_lengths")
    given = [name for name in names if getattr(attention, name) is not None]

    def by_formula(query: Tensor, key: Tensor, value: Tensor, x: Any = None) -> Tensor:
        described = without._replace(**dict.fromkeys(given, x))
        return reference.scaled_dot_product_attention(query, key, value, described)

    run = by_torch.torch_op(query, key, value, attention, by_formula)
    if run is None or by_torch.keeps_order(query, value, attention):
        return run
    return lambda query, *others: by_torch.in_order_of(query, run(query, *others))


def _suits_torch(arguments: Arguments) -> bool:
    attention, query, key = (arguments[name] for name in ("attention", "query", "key"))
    if arguments["return_lse"] or beyond_torch(attention):
        return False
    if attention.is_causal and (  # torch masks before it scales
        query.shape[2] != key.shape[2] or not attention.scale > 0
    ):
        return False
    return all(arguments[name].numel() for name in ("query", "key", "value"))


_TENSORS = dict(query=4, key=4, value=4, mask_spans=4, output=4, lse=3, statistics=4)
_OPTIONS = dict(attn_mask=-4, bias=-4, key_lengths=1, alibi_slopes=-2)
backends.register(
    Operation(
        kernel="attention",
        contract=contract.scaled_dot_product_attention,
        reference=reference.scaled_dot_product_attention,
        batched=_TENSORS | _OPTIONS,
        by_torch=_by_torch,
        suits_torch=_suits_torch,
        direct=_direct,
        joint=joint_reference,
    ),
    Operation(
        "attention",
        contract.packed_attention,
        reference.packed_attention,
        joint=joint_reference,
    ),
)
