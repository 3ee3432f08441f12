"""The ops. Each docstring is the contract: formula, shapes, dtypes, errors, source.

Every function checks its arguments before any kernel starts and hands them to `backends.run`, which
picks the Triton kernel or the PyTorch reference. Shapes, dtypes, devices and numbers are always
checked; what a tensor holds (lengths) on CPU tensors only, and on a GPU where FASTFORMER_CHECK=1 is
set, because looking at it waits for the device.

Shapes: B batch, H heads, G key-value heads, Sq queries, Sk keys, D and Dv head dims, N features.

Under torch.autocast the floating arguments of attention and of feed_forward are cast to its dtype,
as those of torch's own attention and linear ops are; layer_norm keeps the dtype of its input, with
statistics in float32.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastformer import backends, reference
from fastformer.reference import ACTIVATIONS

_CHECK_ON_GPU = os.environ.get("FASTFORMER_CHECK", "0") == "1"
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
MAX_HEAD_DIM = 256

__all__ = ["feed_forward", "layer_norm", "scaled_dot_product_attention"]


# ----------------------------------------------------------------------------------------- checks


def _shape(x: Tensor) -> str:
    return "[" + ", ".join(str(n) for n in x.shape) + "]"


def _require_floating(**tensors: Tensor | None) -> None:
    """All of one floating dtype and on one device, those of the first; None is allowed past it."""
    first: tuple[str, Tensor] | None = None
    for name, x in tensors.items():
        if x is None and first is not None:  # an optional one
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; expected a tensor")
        if first is None:
            if x.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
                raise TypeError(
                    f"{name} has dtype {x.dtype}; expected float32, float16, bfloat16 or float64"
                )
            first = (name, x)
            continue
        if x.dtype != first[1].dtype:
            raise TypeError(
                f"{name} has dtype {x.dtype}; expected that of {first[0]}, {first[1].dtype}"
            )
        _require_device(name, x, *first)


def _require_device(name: str, x: Tensor, like_name: str, like: Tensor) -> None:
    if x.device != like.device:
        raise ValueError(
            f"{name} is on {x.device}; expected the device of {like_name}, {like.device}"
        )


def _require_probability(name: str, p: float) -> float:
    if not isinstance(p, (int, float)) or isinstance(p, bool):
        raise TypeError(f"{name} is a {type(p).__name__}; expected a number in [0, 1]")
    if not 0 <= p <= 1:
        raise ValueError(f"{name} is {p}; expected a number in [0, 1]")
    return float(p)


def _readable(x: Tensor) -> bool:
    """Whether the contents of x are checked: on a CPU, and on a GPU with FASTFORMER_CHECK=1."""
    return (x.device.type == "cpu" or _CHECK_ON_GPU) and reference.eager(x)


def _seed(
    dropout_seed: int | Tensor | None, dropout_p: float, device: torch.device
) -> Tensor | None:
    """The seed as a tensor of one int64, drawn from torch's generator where none is given."""
    if dropout_p == 0:
        return None
    if dropout_seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
    if isinstance(dropout_seed, bool) or not isinstance(dropout_seed, (int, Tensor)):
        raise TypeError(
            f"dropout_seed is a {type(dropout_seed).__name__}; "
            "expected an int, a tensor of one int64, or None"
        )
    if isinstance(dropout_seed, int):
        wrapped = (dropout_seed + 2**63) % 2**64 - 2**63  # the 64 bits as a signed number
        return torch.tensor([wrapped], dtype=torch.int64, device=device)
    if dropout_seed.numel() != 1 or dropout_seed.dtype != torch.int64:
        raise ValueError(
            f"dropout_seed has shape {_shape(dropout_seed)} and dtype {dropout_seed.dtype}; "
            "expected one element of int64"
        )
    if dropout_seed.device != device:
        raise ValueError(f"dropout_seed is on {dropout_seed.device}; expected the inputs' {device}")
    return dropout_seed.reshape(1)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of the surrounding torch.autocast on the tensor's device, or None."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """Tensors in the dtype of the surrounding torch.autocast, if there is one; float64 stays."""
    first = next((x for x in tensors if isinstance(x, Tensor)), None)
    dtype = None if first is None else _autocast_dtype(first)
    if dtype is None:
        return tensors
    low = (torch.float32, torch.float16, torch.bfloat16)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype in low else x for x in tensors)


def _run(op: str, first: Tensor, **arguments: Any) -> Any:
    """`backends.run` with torch.autocast off: it was applied above, alike for both backends."""
    if _autocast_dtype(first) is None:
        return backends.run(op, **arguments)
    with torch.autocast(first.device.type, enabled=False):
        return backends.run(op, **arguments)


# -------------------------------------------------------------------------------------- attention


@backends.operation(kernel="attention")
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_lengths: Tensor | None = None,
    dropout_seed: int | Tensor | None = None,
) -> Tensor:
    """softmax(scale * query key^T, over the keys that the query may see) value.

    Args:
        query: [B, H, Sq, D], float32, float16, bfloat16 or float64. D is at most 256. Any strides.
        key: [B, G, Sk, D], of the same dtype. G is H; with `enable_gqa` H is a multiple of G, and
            query head h reads key-value head h // (H / G).
        value: [B, G, Sk, Dv].
        attn_mask: boolean, anything that broadcasts to [B, H, Sq, Sk]; True takes part. It is read
            through its strides, never expanded. None: all take part.
        dropout_p: probability in [0, 1] that a weight is dropped; the others are scaled by
            1/(1 - dropout_p). It always applies: pass 0 in evaluation.
        is_causal: query i sees keys j <= i, counted from the top left where Sq != Sk, as in torch.
        scale: the factor on query key^T; 1/sqrt(D) by default.
        key_lengths: [B] integers: sequence b has the keys 0 .. key_lengths[b] - 1. Whole blocks
            past it are skipped.
        dropout_seed: the key of the dropout mask, an int or a tensor of one int64: the mask is a
            function of it and of (b, h, i, j) alone, the same on every backend. None draws one from
            torch's generator.

    Mask, causality and lengths are combined: a key takes part where all allow it.

    Returns:
        [B, H, Sq, Dv] in the dtype of the query. A query that sees no key gives zeros, and finite
        gradients.

    A key that no query may see - past its length, or masked out for all queries by a mask of shape
    [.., 1, Sk] - may hold anything, NaN included. Under any other mask, causality included, every
    value has to be finite, as in torch.

    Raises:
        ValueError: shapes that do not fit, dropout_p outside [0, 1], a length outside [0, Sk],
            several devices.
        TypeError: dtypes that differ or are not floating, a mask that is not boolean.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1; the tiled form is Dao
    2023, "FlashAttention-2", section 3.1.
    """
    query, key, value = _autocast(query, key, value)
    _require_floating(query=query, key=key, value=value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {_shape(x)}; expected four dimensions [B, H, S, D]")
    batch, heads, _, dim = query.shape
    k_length = key.shape[2]
    if key.shape[0] != batch or value.shape[0] != batch:
        raise ValueError(
            f"key {_shape(key)} and value {_shape(value)}; "
            f"expected the batch of query {_shape(query)}, {batch}"
        )
    if key.shape[3] != dim:
        raise ValueError(
            f"key {_shape(key)}; expected the head dim of query {_shape(query)}, {dim}"
        )
    if value.shape[1:3] != key.shape[1:3]:
        raise ValueError(
            f"value {_shape(value)}; expected the heads and the length of key {_shape(key)}"
        )
    if not enable_gqa and key.shape[1] != heads:
        raise ValueError(
            f"key {_shape(key)}; "
            f"expected the {heads} heads of query {_shape(query)} (or enable_gqa=True)"
        )
    if enable_gqa and (heads % key.shape[1] if key.shape[1] else heads):
        raise ValueError(f"key {_shape(key)}; expected a number of heads that divides {heads}")
    if not (1 <= dim <= MAX_HEAD_DIM and 1 <= value.shape[3] <= MAX_HEAD_DIM):
        raise ValueError(
            f"query {_shape(query)}, value {_shape(value)}; "
            f"expected head dims from 1 to at most {MAX_HEAD_DIM}"
        )
    if attn_mask is not None:
        _require_mask(attn_mask, query, k_length)
    if key_lengths is not None:
        _require_lengths(key_lengths, query, k_length)
    p = _require_probability("dropout_p", dropout_p)
    if scale is None:
        scale = 1.0 / math.sqrt(dim)
    elif not isinstance(scale, (int, float)) or isinstance(scale, bool):
        raise TypeError(f"scale is a {type(scale).__name__}; expected a number or None")
    return _run(
        "scaled_dot_product_attention",
        query,
        query=query,
        key=key,
        value=value,
        attn_mask=attn_mask,
        dropout_p=p,
        is_causal=bool(is_causal),
        scale=float(scale),
        enable_gqa=bool(enable_gqa),
        key_lengths=key_lengths,
        dropout_seed=_seed(dropout_seed, p, query.device),
    )


def _require_mask(attn_mask: Tensor, query: Tensor, k_length: int) -> None:
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask is a {type(attn_mask).__name__}; expected a boolean tensor")
    if attn_mask.dtype != torch.bool:
        raise TypeError(
            f"attn_mask has dtype {attn_mask.dtype}; "
            "expected torch.bool, True where a key takes part"
        )
    _require_device("attn_mask", attn_mask, "query", query)
    full = (*query.shape[:3], k_length)
    aligned = full[4 - attn_mask.dim() :] if attn_mask.dim() <= 4 else None
    if aligned is None or any(
        have != want and have != 1 for have, want in zip(attn_mask.shape, aligned, strict=True)
    ):
        raise ValueError(
            f"attn_mask has shape {_shape(attn_mask)}; expected one that broadcasts to {list(full)}"
        )


def _require_lengths(key_lengths: Tensor, query: Tensor, k_length: int) -> None:
    if not isinstance(key_lengths, Tensor):
        raise TypeError(
            f"key_lengths is a {type(key_lengths).__name__}; expected an integer tensor"
        )
    if key_lengths.dtype not in _INTEGERS:
        raise TypeError(f"key_lengths has dtype {key_lengths.dtype}; expected integers")
    if key_lengths.shape != (query.shape[0],):
        raise ValueError(
            f"key_lengths has shape {_shape(key_lengths)}; expected [B] = [{query.shape[0]}]"
        )
    _require_device("key_lengths", key_lengths, "query", query)
    if _readable(key_lengths) and key_lengths.numel():
        low, high = int(key_lengths.min()), int(key_lengths.max())
        if low < 0 or high > k_length:
            raise ValueError(
                f"key_lengths holds {low if low < 0 else high}; "
                f"expected lengths from 0 to Sk = {k_length}"
            )


# -------------------------------------------------------------------------------------- LayerNorm


@backends.operation(kernel="layer_norm")
def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    unbiased: bool = False,
) -> Tensor:
    """weight * (x - mean) / sqrt(var + eps) + bias, over the trailing dimensions.

    var is the mean of (x - mean)^2. With `unbiased=True` the formula is the one that the Annotated
    Transformer computes, weight * (x - mean) / (std + eps) + bias, std with N - 1 in its
    denominator and eps outside of the root.

    Args:
        input: [..., *normalized_shape], float32, float16, bfloat16 or float64, any strides.
        normalized_shape: an int or a sequence of ints, N elements in all.
        weight, bias: `normalized_shape`, of the input's dtype or float32; None leaves the factor or
            the term out.
        eps: added to the variance (to the standard deviation with `unbiased`).

    Returns:
        The shape and the dtype of the input. Mean and variance are taken in float32 (float64 for
        float64).

    Raises:
        ValueError: shapes that do not fit, unbiased=True over a single feature, several devices.
        TypeError: a dtype that is not floating, or a weight of another dtype.

    Source: Ba, Kiros, Hinton 2016, "Layer Normalization", section 3; the unbiased form:
    harvardnlp/annotated-transformer.
    """
    _require_floating(input=input)
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if not shape or list(input.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"input has shape {_shape(input)}; expected it to end with normalized_shape {shape}"
        )
    if unbiased and math.prod(shape) < 2:
        raise ValueError(f"normalized_shape is {shape}; unbiased=True needs two features or more")
    for name, x in (("weight", weight), ("bias", bias)):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; expected a tensor")
        if x.dtype != input.dtype and x.dtype != torch.float32:
            raise TypeError(
                f"{name} has dtype {x.dtype}; expected the input's {input.dtype}, or float32"
            )
        if list(x.shape) != shape:
            raise ValueError(f"{name} has shape {_shape(x)}; expected normalized_shape {shape}")
        _require_device(name, x, "input", input)
    if not isinstance(eps, (int, float)) or isinstance(eps, bool) or eps < 0:
        raise ValueError(f"eps is {eps!r}; expected a number that is not negative")
    return _run(
        "layer_norm",
        input,
        input=input,
        normalized_shape=shape,
        weight=weight,
        bias=bias,
        eps=float(eps),
        unbiased=bool(unbiased),
    )


# ----------------------------------------------------------------------------------- feed-forward


@backends.operation(kernel="feed_forward")
def feed_forward(
    input: Tensor,
    w_1: Tensor,
    b_1: Tensor | None,
    w_2: Tensor,
    b_2: Tensor | None,
    activation: str = "relu",
    dropout_p: float = 0.0,
    *,
    dropout_seed: int | Tensor | None = None,
) -> Tensor:
    """dropout(activation(input w_1^T + b_1)) w_2^T + b_2.

    Bias, activation and dropout are the epilogue of the first GEMM; the second is torch's own,
    where nothing is left to fuse.

    Args:
        input: [..., d], float32, float16, bfloat16 or float64.
        w_1: [d_ff, d], b_1: [d_ff] or None, as nn.Linear stores them.
        w_2: [d_out, d_ff], b_2: [d_out] or None.
        activation: "relu", "gelu" (by erf), "gelu_tanh" or "silu".
        dropout_p: probability in [0, 1] that a hidden element is dropped; the others are scaled by
            1/(1 - dropout_p).
        dropout_seed: as in `scaled_dot_product_attention`; the mask is a function of it and of
            (token, hidden unit).

    Returns:
        [..., d_out] in the dtype of the input.

    Raises:
        ValueError: shapes that do not fit, an unknown activation, dropout_p outside [0, 1], several
            devices.
        TypeError: dtypes that differ or are not floating.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.3; GELU: Hendrycks and
    Gimpel 2016; SiLU: Elfwing et al. 2017.
    """
    input, w_1, b_1, w_2, b_2 = _autocast(input, w_1, b_1, w_2, b_2)
    _require_floating(input=input, w_1=w_1, b_1=b_1, w_2=w_2, b_2=b_2)
    if input.dim() < 1:
        raise ValueError("input is a scalar; expected [..., d]")
    if w_1.dim() != 2 or w_1.shape[1] != input.shape[-1]:
        raise ValueError(
            f"w_1 has shape {_shape(w_1)}; expected [d_ff, d] with d = {input.shape[-1]}"
        )
    if w_2.dim() != 2 or w_2.shape[1] != w_1.shape[0]:
        raise ValueError(
            f"w_2 has shape {_shape(w_2)}; expected [d_out, d_ff] with d_ff = {w_1.shape[0]}"
        )
    for name, bias, like, weight in (("b_1", b_1, "w_1", w_1), ("b_2", b_2, "w_2", w_2)):
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(
                f"{name} has shape {_shape(bias)}; expected [{weight.shape[0]}], the rows of {like}"
            )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; expected one of {', '.join(ACTIVATIONS)}")
    p = _require_probability("dropout_p", dropout_p)
    return _run(
        "feed_forward",
        input,
        input=input,
        w_1=w_1,
        b_1=b_1,
        w_2=w_2,
        b_2=b_2,
        activation=activation,
        dropout_p=p,
        dropout_seed=_seed(dropout_seed, p, input.device),
    )
