"""The public functions of the norms, and their records."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastformer.checks import (
    autocast_dtype,
    require_device,
    require_dropout,
    require_eps,
    require_flag,
    require_floating,
    require_int,
    require_tensor,
    shape_of,
    wrong_shape,
)
from fastformer.dispatch import backends
from fastformer.dispatch.front import cast_to, front_door
from fastformer.dispatch.operation import Arguments, Operation
from fastformer.ops.norms import reference


@front_door
def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    unbiased: bool = False,
) -> Tensor:
    """Compute weight * (x - mean) / sqrt(var + eps) + bias, over the trailing dimensions.

    var is the mean of (x - mean)^2. `unbiased=True` gives the formula of the Annotated Transformer,
    weight * (x - mean) / (std + eps) + bias, where the denominator of std is N - 1, and eps is
    outside the root.

    Args:
        input: [..., *normalized_shape], float32, float16, bfloat16 or float64, any strides.
        normalized_shape: an int or a sequence of ints, N elements in all.
        weight, bias: `normalized_shape`, of the input's dtype or float32; None omits the factor or
            the term.
        eps: added to the variance (to the standard deviation with `unbiased`).

    Returns:
        A tensor with the shape and the dtype of the input. Mean and variance are computed in
        float32 (float64 for float64).

    Raises:
        ValueError: shapes that do not fit, unbiased=True over a single feature, tensors on several
            devices.
        TypeError: a dtype that is not floating, or a weight of another dtype.

    Source: Ba, Kiros, Hinton 2016, "Layer Normalization", section 3; the unbiased form:
    harvardnlp/annotated-transformer.
    """
    require_floating(input=input)
    shape = _require_rows(input, normalized_shape, weight, bias)
    return backends.run(
        "layer_norm",
        input=input,
        normalized_shape=shape,
        weight=weight,
        bias=bias,
        eps=require_eps(eps),
        unbiased=_require_spread(unbiased, shape),
    )


@front_door
def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Compute weight * x / sqrt(mean(x^2) + eps), over the trailing dimensions.

    Args:
        input: [..., *normalized_shape], float32, float16, bfloat16 or float64, any strides.
        normalized_shape: an int or a sequence of ints.
        weight: `normalized_shape`, of the input's dtype or float32; None omits the factor.
        eps: added to the mean of the squares. The mean is computed in float32 (float64 for
            float64); None stands for the machine epsilon of that dtype, as in torch.

    Returns:
        A tensor with the shape and the dtype of the input.

    Raises:
        ValueError: shapes that do not fit, a negative eps, tensors on several devices.
        TypeError: a dtype that is not floating, or a weight of another dtype.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", section 3.
    """
    require_floating(input=input)
    shape = _require_rows(input, normalized_shape, weight, None)
    eps = _rms_eps(eps, input)
    return backends.run("rms_norm", input=input, normalized_shape=shape, weight=weight, eps=eps)


@front_door
def dropout_add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float = 0.0,
    eps: float = 1e-5,
    *,
    unbiased: bool = False,
    dropout_seed: int | Tensor | None = None,
    input_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute residual_out = residual + dropout(input + input_bias) and layer_norm(residual_out),
    in one pass.

    A Transformer computes this between two sublayers: the residual sum of the one and the norm of
    the next. input_bias is the bias of the linear layer that ends the sublayer, if that layer has
    not added it: its gradient is then summed beside those of weight and bias.

    Args:
        input: [..., *weight.shape], float32, float16, bfloat16 or float64: a sublayer's output.
        residual: a tensor with the shape and the dtype of input.
        weight: the weight of the norm, of the input's dtype or float32; its shape is
            normalized_shape. bias: a tensor of that shape and such a dtype, or None.
        dropout_p: probability in [0, 1] that an element of input is dropped, as in
            `scaled_dot_product_attention`.
        eps, unbiased: as in `layer_norm`.
        dropout_seed: as in `scaled_dot_product_attention`; the mask is a function of the seed and
            (row, column).
        input_bias: a tensor with the shape of weight, of the input's dtype or float32, or None.

    Returns:
        (normalized, residual_out), each contiguous, with the shape and the dtype of the input, and
        with its own gradient. The sum is rounded to that dtype before it is normalized.

    Raises:
        ValueError: shapes that do not fit, dropout_p outside [0, 1], unbiased=True over a single
            feature, tensors on several devices.
        TypeError: dtypes that differ or are not floating.

    Source: Vaswani et al. 2017, "Attention Is All You Need", sections 3.1 and 5.4.
    """
    input, residual, shape = _require_sum(input, residual, weight, bias, input_bias)
    p = require_dropout("dropout_p", dropout_p)
    return backends.run(
        "dropout_add_layer_norm",
        input=input,
        residual=residual,
        weight=weight,
        bias=bias,
        dropout_p=p,
        eps=require_eps(eps),
        unbiased=_require_spread(unbiased, shape),
        dropout_seed=backends.seed_for(dropout_seed, p, input.device),
        input_bias=input_bias,
    )


@front_door
def dropout_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    dropout_p: float = 0.0,
    eps: float | None = None,
    *,
    dropout_seed: int | Tensor | None = None,
    input_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute residual_out = residual + dropout(input + input_bias) and rms_norm(residual_out), in
    one pass.

    Args:
        input, residual, weight: as in `dropout_add_layer_norm`.
        dropout_p, dropout_seed, input_bias: as in `dropout_add_layer_norm`; the mask is the
            same.
        eps: as in `rms_norm`.

    Returns:
        (normalized, residual_out), as `dropout_add_layer_norm`.

    Raises:
        ValueError: shapes that do not fit, dropout_p outside [0, 1], a negative eps, tensors on
            several devices.
        TypeError: dtypes that differ or are not floating.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", section 3.
    """
    input, residual, _ = _require_sum(input, residual, weight, None, input_bias)
    p = require_dropout("dropout_p", dropout_p)
    return backends.run(
        "dropout_add_rms_norm",
        input=input,
        residual=residual,
        weight=weight,
        dropout_p=p,
        eps=_rms_eps(eps, input),
        dropout_seed=backends.seed_for(dropout_seed, p, input.device),
        input_bias=input_bias,
    )


def _rms_eps(eps: float | None, x: Tensor) -> float:
    """Return eps, by default the machine epsilon of the dtype in which the mean is computed."""
    if eps is None:
        return torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    return require_eps(eps)


def _require_sum(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_bias: Tensor | None,
) -> tuple[Tensor, Tensor, list[int]]:
    """Check the tensors of a residual sum and its norm. Return input, residual and the shape of a
    row; under autocast, input and residual are cast to their promoted dtype.
    """
    if isinstance(input, Tensor) and autocast_dtype(input) is not None:
        require_tensor("residual", residual)
        wide = torch.promote_types(input.dtype, residual.dtype)
        input, residual = cast_to(input, wide), cast_to(residual, wide)
    require_floating(input=input, residual=residual)
    require_tensor("weight", weight)
    shape = _require_rows(input, weight.shape, weight, bias, input_bias)
    if residual.shape != input.shape:
        raise wrong_shape("residual", residual, f"that of input, {shape_of(input)}")
    return input, residual, shape


def _require_rows(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    input_bias: Tensor | None = None,
) -> list[int]:
    """Check the other arguments of a norm against its input; return normalized_shape as a list."""
    if isinstance(normalized_shape, (tuple, list, Sequence)):
        shape = list(normalized_shape)
    else:
        shape = [require_int("normalized_shape", normalized_shape, "an int or a sequence of ints")]
    if not shape or list(input.shape[-len(shape) :]) != shape:
        raise wrong_shape("input", input, f"it to end with normalized_shape {shape}")
    for name, x in (("weight", weight), ("bias", bias), ("input_bias", input_bias)):
        if x is None:
            continue
        require_tensor(name, x)
        if x.dtype != input.dtype and x.dtype != torch.float32:
            raise TypeError(
                f"{name} has dtype {x.dtype}; expected the input's {input.dtype}, or float32"
            )
        if list(x.shape) != shape:
            raise wrong_shape(name, x, f"normalized_shape {shape}")
        require_device(name, x, "input", input)
    return list(input.shape[-len(shape) :])


def _require_spread(unbiased: bool, shape: list[int]) -> bool:
    if require_flag("unbiased", unbiased) and math.prod(shape) < 2:
        raise ValueError(f"normalized_shape is {shape}; unbiased=True needs two features or more")
    return bool(unbiased)


# ----------------------------------------------------------------------- the record of the dispatch


def _suits_torch(arguments: Arguments) -> bool:
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    dtype = tensors[0].dtype
    alike = all(x.dtype == dtype and x.numel() and x.is_contiguous() for x in tensors)
    return alike and not arguments.get("unbiased")


_OF_LAYER_NORM = Operation(
    kernel="layer_norm",
    contract=layer_norm,
    reference=reference.layer_norm,
    rows=("input",),
    batched=dict(input=0, output=0, mean=1, reciprocal=1),
    by_torch=reference.layer_norm,  # torch's own op for the calls that suit
    suits_torch=_suits_torch,
    direct=reference.direct_layer_norm,
)
_OF_SUM = _OF_LAYER_NORM._replace(
    contract=dropout_add_layer_norm,
    reference=reference.dropout_add_layer_norm,
    rows=("input", "residual"),
    batched=dict(input=0, residual=0, normalized=0, residual_out=0, mean=1, reciprocal=1),
    by_torch=None,
    suits_torch=lambda arguments: False,
    direct=None,
    reference_backward=functools.partial(reference.dropout_add_norm_backward, reference.layer_norm),
)
backends.register(
    _OF_LAYER_NORM,
    _OF_LAYER_NORM._replace(
        contract=rms_norm,
        reference=reference.rms_norm,
        by_torch=reference.rms_norm,
        direct=None,
    ),
    _OF_SUM,
    _OF_SUM._replace(
        contract=dropout_add_rms_norm,
        reference=reference.dropout_add_rms_norm,
        reference_backward=functools.partial(
            reference.dropout_add_norm_backward, reference.rms_norm
        ),
    ),
)
