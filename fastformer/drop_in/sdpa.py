"""Run F.scaled_dot_product_attention on fastformer without changing the model that calls it.

Shapes: B batch, H heads, Sq queries, Sk keys, D head dim.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastformer.description import MAX_HEAD_DIM
from fastformer.dispatch import backends
from fastformer.dispatch.front import autocast, front_door
from fastformer.drop_in.replacements.base import record_torch, unsupported_tensor
from fastformer.mask_tiles import BlockMask
from fastformer.ops import functional


class sdpa_override(TorchFunctionMode):
    """A context in which F.scaled_dot_product_attention runs on fastformer, for this thread.

        with fastformer.sdpa_override():
            model(x)

    It accepts torch's arguments with torch's meaning: a boolean mask (True keeps a key) or a
    floating one, dropout, is_causal aligned to the top left, scale, enable_gqa, any number of
    leading dimensions, a head dim of value that differs from that of query, and the dtypes that
    torch.autocast casts. Torch's own function runs each call that the op does not support (nested
    tensors, tensor subclasses, batches that broadcast, head dims of 0 or above 256, other dtypes, a
    scale that is a tensor) and each call with invalid arguments. The output of a query that sees no
    key is zero, also if a mask in float32 or bfloat16 hides the keys by finfo.min; in float16 only
    -inf hides a key. Contexts nest, and work inside and around torch.compile. A context does not
    see the calls inside nn.MultiheadAttention: use `accelerate` for that module.

    backward() runs outside of every such mode, so under activation checkpointing the `with` has to
    be inside the checkpointed function. Around the checkpoint, the recomputed forward would use
    torch's attention.

    Every torch function called in the context costs one more Python call: some microseconds.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and not _is_of_an_op():
            return torch_sdpa(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@front_door
def torch_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)  # as torch's op does
    reason = (
        _unsupported_input(query, key, value, attn_mask)
        or _unsupported_heads(query, key, value, enable_gqa)
        or _unsupported_option(query, key, attn_mask, dropout_p, is_causal, scale)
    )
    args = (query, key, value, attn_mask, dropout_p, is_causal)
    if reason is not None:
        record_torch("scaled_dot_product_attention", reason)
        return F.scaled_dot_product_attention(*args, scale=scale, enable_gqa=enable_gqa)
    enable_gqa = enable_gqa or (query.dim() > 3 and key.shape[-3] == 1)  # one head for all
    # The fallback of a call outside of a module is not counted; `explain` still records it.
    with backends.observe(on_unsupported=lambda op, reason: None):
        return functional.scaled_dot_product_attention(*args, scale, enable_gqa)


def _is_of_an_op() -> bool:
    """Return whether an op of fastformer calls torch's attention, which it has chosen to do."""
    if torch.compiler.is_compiling():  # then torch's function is in the graph, or the op
        return False
    frame: Any = sys._getframe(2)
    while frame.f_globals.get("__name__") == f"{__package__}.explanation":  # it passes the call on
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").startswith("fastformer.ops.")


# Each of these functions returns why torch's own op has to run, or None. An invalid argument is a
# reason too: torch then raises its own error. query: [.., H, Sq, D], [B, Sq, D] or [Sq, D]; key
# and value: the same with Sk keys; attn_mask broadcasts to the scores [.., Sq, Sk].


def _unsupported_input(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | BlockMask | None
) -> str | None:
    tensors = (query, key, value)
    reason = unsupported_tensor(*tensors, attn_mask)
    if reason is not None:
        return reason
    if any(x.dim() != query.dim() for x in tensors) or query.dim() < 2:
        return "not two dimensions or more each"
    if any(x.dtype != query.dtype or x.device != query.device for x in tensors):
        return "several dtypes or devices"
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        return f"the dtype is {query.dtype}"
    low = query.dtype in (torch.float16, torch.bfloat16) and query.device.type == "cpu"
    if low and query.dim() < 4 and backends.current_backend() != "triton":
        return (
            "on a CPU torch has half precision without heads in another op, with better gradients"
        )
    return None


def _unsupported_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> str | None:
    batch = query.shape[: -3 if query.dim() > 3 else -2]
    if key.shape[: len(batch)] != batch or key.shape[:-1] != value.shape[:-1]:
        return "the batch or the heads broadcast"
    if enable_gqa and query.dim() < 3:
        return "enable_gqa without heads"
    if query.dim() > 3 and query.shape[-3] != key.shape[-3]:
        if not enable_gqa and key.shape[-3] != 1:  # one key head is allowed, see `torch_sdpa`
            return "the heads broadcast"
        if key.shape[-3] == 0 or query.shape[-3] % key.shape[-3]:
            return "the heads of key do not divide those of query"
    dims = (query.shape[-1], value.shape[-1])
    if 0 in dims or max(dims) > MAX_HEAD_DIM or key.shape[-1] != dims[0]:
        return f"a head dim is 0 or above {MAX_HEAD_DIM}, or key has another than query"
    return None


def _unsupported_option(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | BlockMask | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> str | None:
    if type(dropout_p) not in (float, int) or not 0 <= dropout_p <= 1:
        return "dropout_p is no number from 0 to 1"
    if scale is not None and type(scale) not in (float, int):
        return "scale is no number"
    if attn_mask is None or isinstance(attn_mask, BlockMask):
        return None
    if is_causal or attn_mask.dtype not in (torch.bool, query.dtype):
        return "a mask is given with is_causal, or has another dtype"
    scores = (*query.shape[:-1], key.shape[-2])
    sizes = zip(attn_mask.shape[::-1], scores[::-1])
    if not 2 <= attn_mask.dim() <= len(scores) or any(1 != n != want for n, want in sizes):
        return "the mask does not broadcast to the scores"
    return None
