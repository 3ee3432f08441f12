"""The checks of the arguments of attention."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastformer.checks import (
    autocast_dtype,
    plain_number,
    refuse_gradients,
    require_device,
    require_int,
    require_integers,
    require_number,
    require_tensor,
    shape_of,
    without_gradient,
    wrong_shape,
)
from fastformer.dispatch.front import cast_to, check_values
from fastformer.eager import may_read
from fastformer.mask_tiles import BlockMask

ALIGNMENTS = ("top_left", "bottom_right")
Scores = tuple[int, int, int, int]  # the shape of the scores, [B, H, Sq, Sk]
Blocks = tuple[Tensor | None, Tensor | None, Tensor | None]  # the tensors of a BlockMask
Window = Sequence[int | None] | None
NO_BLOCKS: Blocks = (None, None, None)


def require_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    enable_gqa: bool,
    shape_of: Callable[[Tensor], str] = shape_of,
) -> tuple[float, Scores]:
    """Check the shapes [B, H, S, D]. Return the scale (or its default) and the scores' shape.

    shape_of: how an error writes a shape, where the caller was given tensors of another layout.
    """
    batch, heads, q_length, dim = query.shape
    key_batch, key_heads, k_length, key_dim = key.shape
    value_batch, value_heads, value_length, _ = value.shape
    if key_batch != batch or value_batch != batch:
        raise ValueError(
            f"key {shape_of(key)} and value {shape_of(value)}; "
            f"expected the batch of query {shape_of(query)}, {batch}"
        )
    if key_dim != dim:
        raise ValueError(
            f"key {shape_of(key)}; expected the head dim of query {shape_of(query)}, {dim}"
        )
    if value_heads != key_heads or value_length != k_length:
        raise ValueError(
            f"value {shape_of(value)}; expected the heads and the length of key {shape_of(key)}"
        )
    if not enable_gqa and key_heads != heads:
        raise ValueError(
            f"key {shape_of(key)}; "
            f"expected the {heads} heads of query {shape_of(query)} (or enable_gqa=True)"
        )
    if enable_gqa and (heads % key_heads if key_heads else heads):
        raise ValueError(f"key {shape_of(key)}; expected a number of heads that divides {heads}")
    if scale is None:
        scale = 1.0 / math.sqrt(max(1, dim))
    else:
        scale = require_number("scale", scale, "a number or None")
    return scale, (batch, heads, q_length, k_length)


def mask_and_bias(
    attn_mask: Tensor | BlockMask | None,
    bias: Tensor | None,
    query: Tensor,
    scores: Scores,
    lead: Sequence[int] | None = None,
) -> tuple[Tensor | None, Tensor | None, Blocks]:
    """Return the checked mask, bias, and tensors of a block mask. A floating mask is returned as
    the bias.

    lead: the dimensions before [Sq, D] that the query was given with, if they are not [B, H]. The
        mask or the bias broadcasts to [*lead, Sq, Sk].
    """
    bias_name, blocks = "bias", NO_BLOCKS
    if isinstance(attn_mask, BlockMask):
        blocks, attn_mask = checked_blocks(attn_mask, query, scores), None
    elif attn_mask is not None:
        require_tensor("attn_mask", attn_mask)
        if attn_mask.dtype is torch.bool:
            attn_mask = _broadcast("attn_mask", attn_mask, query, scores, lead)
        elif not attn_mask.is_floating_point():
            raise TypeError(
                f"attn_mask has dtype {attn_mask.dtype}; expected torch.bool, True where a key "
                "takes part, or a floating dtype, to be added to the scores"
            )
        elif bias is not None:
            raise ValueError(
                f"attn_mask has dtype {attn_mask.dtype} and is added as bias is; "
                "expected one of the two, or a boolean mask"
            )
        else:
            attn_mask, bias, bias_name = None, attn_mask, "attn_mask"
    if bias is not None:
        _require_bias(bias_name, bias, query)
        if bias.dtype is not torch.float32 and autocast_dtype(query) is not None:
            bias = cast_to(bias, query.dtype)
        bias = _broadcast(bias_name, bias, query, scores, lead)
    return attn_mask, bias, blocks


def checked_blocks(mask: BlockMask, query: Tensor, scores: Scores) -> Blocks:
    """Return the tensors of a block mask of the scores."""
    if mask.spans.dim() != 4:
        raise ValueError(
            "attn_mask is a BlockMask that torch.vmap maps; expected one that all examples share, "
            "or a boolean tensor"
        )
    if mask.device != query.device:
        raise ValueError(
            f"attn_mask is a BlockMask on {mask.device}; expected the device of query, "
            f"{query.device}"
        )
    shape = tuple(mask.shape)
    # Not as tuples, which dynamo calls different if the sizes are symbols.
    other = any(n != full and (n != 1 or i > 1) for i, (n, full) in enumerate(zip(shape, scores)))
    if other:
        raise ValueError(
            f"attn_mask is a BlockMask of shape {list(shape)}; expected one that broadcasts to "
            f"{list(scores)} over sequences and heads"
        )
    return mask.tensors


def as_flags(
    mask: BlockMask, is_causal: bool, window: Window, query: Tensor, scores: Scores
) -> tuple[BlockMask | None, bool, Window]:
    """Return (mask, is_causal, window), without a mask that is a band, which the flags compute."""
    if mask.band is None or is_causal or window is not None:
        return mask, is_causal, window
    checked_blocks(mask, query, scores)
    return (None, True, None) if mask.band == (None, 0) else (None, False, mask.band)


def _require_bias(name: str, bias: Tensor, query: Tensor) -> None:
    require_tensor(name, bias)
    if bias.dtype in (torch.float32, query.dtype):
        return
    if autocast_dtype(query) is None or not bias.is_floating_point():
        raise TypeError(
            f"{name} has dtype {bias.dtype}; expected the dtype of query, {query.dtype}, or float32"
        )


def checked_key_bias(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the bias [Tk] of the keys of a packed batch, in float32 or the dtype of query."""
    if bias is None:
        return None
    _require_bias("bias", bias, query)
    if bias.shape != key.shape[:1]:
        raise wrong_shape("bias", bias, f"[Tk] = [{key.shape[0]}]")
    require_device("bias", bias, "query", query)
    if bias.dtype not in (torch.float32, query.dtype):  # under autocast
        bias = cast_to(bias, query.dtype)
    return bias


def _broadcast(
    name: str, x: Tensor, query: Tensor, scores: Scores, lead: Sequence[int] | None
) -> Tensor:
    if x.device != query.device:
        require_device(name, x, "query", query)
    shape, full = x.shape, scores if lead is None else (*lead, *scores[2:])
    fits = len(shape) <= len(full)
    if shape != full[-len(shape) :]:
        for have, want in zip(reversed(shape), reversed(full)):
            fits = fits and (have == want or have == 1)
    if not fits:
        more, hint = ", None" * (len(full) - len(shape)), ""
        if more and len(shape) > 1 and (shape[0], shape[-1]) == (full[0], full[-1]):
            hint = f"; of a mask for each sequence, {name}[:{more}]"
        raise wrong_shape(name, x, f"one that broadcasts to {list(full)}{hint}")
    return x if lead is None else _folded(x, lead)


def _folded(x: Tensor, lead: Sequence[int]) -> Tensor:
    """Return a mask or a bias that broadcasts to [*lead, Sq, Sk] as one of [B, H, Sq, Sk]."""
    own = x.shape[:-2]
    if len(lead) < 2:  # no heads
        return x.unsqueeze(-3) if own else x
    if len(own) < 2:
        return x
    if max(own[:-1]) > 1:
        x = x.expand(*lead[:-1], *x.shape[-3:])
    return x.flatten(0, -4)


def require_lengths(key_lengths: Tensor, query: Tensor, k_length: int) -> None:
    require_integers("key_lengths", key_lengths)
    if key_lengths.shape != (query.shape[0],):
        raise wrong_shape("key_lengths", key_lengths, f"[B] = [{query.shape[0]}]")
    require_device("key_lengths", key_lengths, "query", query)
    check_values(_require_lengths, "key_lengths", key_lengths, k_length)


def _require_lengths(name: str, key_lengths: Tensor, k_length: int) -> None:
    if may_read(key_lengths) and key_lengths.numel():
        lengths = key_lengths.tolist()  # for a few numbers, min() of Python is faster
        low, high = min(lengths), max(lengths)
        if low < 0 or high > k_length:
            raise ValueError(
                f"{name} holds {low if low < 0 else high}; "
                f"expected lengths from 0 to Sk = {k_length}"
            )


def require_offsets(name: str, cu: Tensor, x_name: str, x: Tensor, longest: int) -> None:
    require_tensor(name, cu, "an int32 tensor")
    if cu.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {cu.dtype}; expected torch.int32")
    if cu.dim() != 1 or cu.shape[0] < (2 if x.shape[0] else 1):
        raise wrong_shape(name, cu, "[B + 1], with a sequence or more if there are tokens")
    require_device(name, cu, x_name, x)
    check_values(_require_offsets, name, cu, x_name, x.shape[0], longest)


def _require_offsets(name: str, cu: Tensor, x_name: str, tokens: int, longest: int) -> None:
    if not may_read(cu):
        return
    offsets = cu.tolist()
    steps = [after - before for before, after in itertools.pairwise(offsets)] or [0]
    if offsets[0] != 0 or offsets[-1] > tokens:
        raise ValueError(
            f"{name} goes from {offsets[0]} to {offsets[-1]}; "
            f"expected from 0 to at most the tokens of {x_name}, {tokens}"
        )
    if min(steps) < 0:
        raise ValueError(f"{name} decreases by {-min(steps)}; expected offsets in order")
    if max(steps) > longest:
        raise ValueError(
            f"max{name[-2:]} is {longest}; expected at least the longest sequence, {max(steps)}"
        )


def require_index(name: str, x: slice | Tensor | None, n: int, query: Tensor) -> None:
    if x is None:
        return
    if isinstance(x, slice):
        for bound in (x.start, x.stop):
            if bound is not None:
                require_int(name, bound)
                if not -n <= bound <= n:
                    raise ValueError(f"{name} is {x}; expected bounds from {-n} to {n}")
        if x.step is not None:
            require_int(name, x.step)
            if x.step < 1:
                raise ValueError(f"{name} is {x}; expected a step of 1 or more")
        return
    require_tensor(name, x, "a slice or a tensor of indices")
    if x.dtype != torch.int64 or x.dim() != 1:
        raise ValueError(
            f"{name} has shape {shape_of(x)} and dtype {x.dtype}; expected one dimension of int64"
        )
    require_device(name, x, "query", query)
    if may_read(x) and x.numel() and not (-n <= int(x.min()) and int(x.max()) < n):
        raise ValueError(
            f"{name} holds {int(x.min())} .. {int(x.max())}; expected indices from {-n} to {n - 1}"
        )


def checked_window(window: Sequence[int | None] | None) -> tuple[int, int] | None:
    """Return (left, right), -1 for a side without a bound, or None if neither side has one."""
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window is {window!r}; expected (left, right)")
    sides = [plain_number(side) for side in window]
    for side in sides:
        if side is None:
            continue
        if not isinstance(side, int) or isinstance(side, bool):
            raise TypeError(f"window is {window!r}; expected two ints, or None for no bound")
        if side < 0:
            hint = " (None for no bound, which is -1 in flash-attn)" if side == -1 else ""
            raise ValueError(f"window is {window!r}; expected sides that are not negative{hint}")
    left, right = (-1 if side is None else min(side, 2**30) for side in sides)
    return None if left == right == -1 else (left, right)


def checked_slopes(alibi_slopes: Tensor | None, query: Tensor, batch: int) -> Tensor | None:
    """Return the slopes of the heads of query [.., H, S, D] in a batch of `batch` sequences."""
    if alibi_slopes is None:
        return None
    require_tensor("alibi_slopes", alibi_slopes)
    if not alibi_slopes.is_floating_point():
        raise TypeError(f"alibi_slopes has dtype {alibi_slopes.dtype}; expected a floating dtype")
    heads = query.shape[1]
    if alibi_slopes.shape not in ((heads,), (batch, heads)):
        raise wrong_shape(
            "alibi_slopes", alibi_slopes, f"[H] = [{heads}] or [B, H] = [{batch}, {heads}]"
        )
    require_device("alibi_slopes", alibi_slopes, "query", query)
    refuse_gradients("attention", alibi_slopes=alibi_slopes)
    return without_gradient(alibi_slopes)


def checked_sinks(sinks: Tensor | None, query: Tensor) -> Tensor | None:
    if sinks is None:
        return None
    _require_bias("sinks", sinks, query)
    heads = query.shape[1]
    if sinks.shape != (heads,):
        raise wrong_shape("sinks", sinks, f"[H] = [{heads}]")
    require_device("sinks", sinks, "query", query)
    if sinks.dtype not in (torch.float32, query.dtype):  # under autocast
        sinks = cast_to(sinks, query.dtype)
    return sinks.contiguous()
