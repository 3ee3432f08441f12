"""The records of the norms, alone and after a residual sum."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from fastformer.dispatch import backends, operation
from fastformer.dispatch.operation import Alternative, Arguments, Operation
from fastformer.ops.norms import contract, reference

_aten = torch.ops.aten


def _dims(arguments: Arguments) -> dict[str, str]:
    x, shape = arguments["input"], arguments.get("normalized_shape")
    n = len(arguments["weight"].shape if shape is None else shape)
    rows, features = operation.ROW_DIMS[: x.dim() - n], "." * n
    given = dict.fromkeys(("input", "residual"), rows + features)
    return given | {"weight": features, "bias": features, "dropout_seed": "."}


_SHARDING = operation.ShardingRule(_dims, lambda x: (x["input"],), operation.ROW_DIMS)


# ------------------------------------------------------------------------------------ alternatives


def _layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float, *_: Any
) -> tuple[Tensor, ...]:
    y, mean, r = torch.native_layer_norm(x, shape, weight, bias, eps)
    return y, mean.view(-1), r.view(-1)


def _rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    y, r = _aten._fused_rms_norm(input, normalized_shape, weight, eps)
    return y, r.view(-1)


def _layer_norm_backward(
    grad: Tensor,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    unbiased: bool,
    mean: Tensor,
    r: Tensor,
    needs: list[bool],
) -> tuple[Any, ...]:
    n = len(normalized_shape)
    shape = [*input.shape[: input.dim() - n], *[1] * n]  # the shape of torch's statistics
    statistics = mean.view(shape), r.view(shape)
    op = _aten.native_layer_norm_backward
    return op(grad, input, normalized_shape, *statistics, weight, bias, needs)


def _sum_and_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, p: float, eps: float, *_: Any
) -> tuple[Tensor, ...]:
    total = residual + x
    y, mean, r = torch.native_layer_norm(total, weight.shape, weight, bias, eps)
    return y, total, mean.view(-1), r.view(-1)


def _sum_and_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, p: float, eps: float, *_: Any
) -> tuple[Tensor, ...]:
    total = residual + x
    y, r = _aten._fused_rms_norm(total, weight.shape, weight, eps)
    return y, total, r.view(-1)


def _signature(arguments: Arguments) -> Hashable | None:
    if arguments.get("dropout_p") or arguments.get("unbiased"):
        return None
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    dtype = tensors[0].dtype
    if any(x.dtype != dtype or not x.numel() or not x.is_contiguous() for x in tensors):
        return None
    return dtype, tensors[0].shape, tuple(arguments.get("normalized_shape", ())), len(tensors)


_OF_LAYER_NORM = Operation(
    kernel="layer_norm",
    contract=contract.layer_norm,
    reference=reference.layer_norm,
    sharding=_SHARDING,
    tuned=("layer_norm forward", "layer_norm backward"),
    alternatives={
        "torch (layer_norm)": Alternative(_layer_norm),
        "torch (layer_norm, backward)": Alternative(_layer_norm, _layer_norm_backward),
    },
    signature=_signature,
)
_OF_SUM = _OF_LAYER_NORM._replace(
    contract=contract.dropout_add_layer_norm,
    reference=reference.dropout_add_layer_norm,
    sharding=_SHARDING._replace(outputs=lambda x: (x["input"],) * 2),
    alternatives={"torch (add, layer_norm)": Alternative(_sum_and_norm)},
    reference_backward=functools.partial(reference.dropout_add_norm_backward, reference.layer_norm),
)
backends.register(
    _OF_LAYER_NORM,
    _OF_LAYER_NORM._replace(
        contract=contract.rms_norm,
        reference=reference.rms_norm,
        alternatives={"torch (rms_norm)": Alternative(_rms_norm)},
    ),
    _OF_SUM,
    _OF_SUM._replace(
        contract=contract.dropout_add_rms_norm,
        reference=reference.dropout_add_rms_norm,
        alternatives={"torch (add, rms_norm)": Alternative(_sum_and_rms_norm)},
        reference_backward=functools.partial(
            reference.dropout_add_norm_backward, reference.rms_norm
        ),
    ),
)
