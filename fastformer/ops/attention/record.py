"""The records of the attention ops."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from fastformer.description import Attention, beyond_torch, unpack
from fastformer.dispatch import backends, operation
from fastformer.dispatch.operation import Alternative, Arguments, Operation
from fastformer.ops.attention import contract, reference
from fastformer.ops.attention.faster import FASTER
from fastformer.ops.attention.joint import joint_reference

_aten = torch.ops.aten


# ------------------------------------------------------------------------------------ alternatives
# There are none for the backward: torch's own backwards add in an order that changes from run to
# run, so their gradients are not reproducible.


def _forward_by(op: operation.Function) -> operation.Function:
    def forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        attention = unpack(rest[:-1])
        output, lse, *_ = op(query, key, value, attention.is_causal, attention.scale)
        rows = lse.reshape(*query.shape[:2], -1)[..., : query.shape[2]]  # some ops pad the queries
        return reference.in_order_of(query, output), rows.contiguous(), query.new_empty(0)

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
    if causal and query.shape[2] != key.shape[2]:
        return None
    if any(0 in size for size in sizes):
        return None
    return causal, query.dtype, query.stride(), key.stride(), value.stride(), *sizes


def _faster(arguments: Arguments) -> str | None:
    """Return the alternative that was faster in a committed run on this architecture, or None: at
    the measured length that is the nearest, at most a factor of 2 away. Two as near must agree.
    """
    inputs = query, key, _ = tuple(arguments[name] for name in ("query", "key", "value"))
    alike = query.dtype == torch.bfloat16 and len({x.shape[2:] for x in inputs}) == 1
    if not alike or any(x.stride(-1) != 1 for x in inputs):
        return None
    found = FASTER.get("sm_{}{}".format(*torch.cuda.get_device_capability(query.device)), {})
    grouped, length = query.shape[1] != key.shape[1], query.shape[2]
    by_length = found.get((arguments["attention"].is_causal, grouped, query.shape[3]), {})
    distances = {n: max(n / length, length / n) for n in by_length}
    least = min(distances.values(), default=math.inf)
    names = {by_length[n] for n, distance in distances.items() if distance == least}
    return names.pop() or None if len(names) == 1 and least <= 2 else None


backends.register(
    Operation(
        kernel="attention",
        contract=contract.scaled_dot_product_attention,
        reference=reference.scaled_dot_product_attention,
        alternatives={
            "torch (cuDNN)": Alternative(_forward_by(_cudnn)),
            "torch (flash)": Alternative(_forward_by(_flash)),
            "torch (efficient)": Alternative(_forward_by(_efficient)),
        },
        signature=_signature,
        faster=_faster if FASTER else None,
        joint=joint_reference,
    ),
    Operation(
        "attention",
        contract.packed_attention,
        reference.packed_attention,
        joint=joint_reference,
    ),
)
