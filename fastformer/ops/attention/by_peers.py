"""Attention by the kernels of other packages: FlashAttention-4 (`flash_attn.cute`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastformer.description import Attention, beyond_torch, unpack
from fastformer.dispatch import peers
from fastformer.dispatch.operation import Arguments, Peer

_FLASH = "flash_attn.cute.interface"
_SHARED = (
    "softmax_scale", "causal", "softcap", "window_size_left", "window_size_right",
    "learnable_sink",
)  # fmt: skip


def heads_empty(like: Tensor, width: int) -> Tensor:
    """Make an uninitialised [B, H, S, width] in the memory layout that the kernels give it."""
    B, H, S, _ = like.shape
    if H > 1 and like.stride(1) < like.stride(2):
        return like.new_empty(B, S, H, width).transpose(1, 2)
    return like.new_empty(B, H, S, width)


def _options(attention: Attention) -> dict[str, Any]:
    """Return the arguments of FlashAttention-4 for a description that it computes.

    Its window is aligned to the last query and the last key, as "bottom_right" is.
    """
    left, right = attention.window or (-1, -1)
    return dict(
        softmax_scale=attention.scale,
        causal=attention.is_causal,
        softcap=attention.softcap or 0.0,
        window_size_left=None if left < 0 else left,
        window_size_right=None if right < 0 else right,
        learnable_sink=attention.sinks,
    )


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Heads [B, H, S, D] are [B, S, H, D] there; lse [B, H, Sq] is to base e, as ours is."""
    op = peers.function(_FLASH, "_flash_attn_fwd", *_SHARED, "return_lse", "out")
    output = heads_empty(query, value.shape[3])
    inputs = (x.transpose(1, 2) for x in (query, key, value))
    options = _options(unpack(rest[:-1]))
    with torch.cuda.device_of(query):
        lse = op(*inputs, **options, return_lse=True, out=output.transpose(1, 2))[1]
    return output, lse, query.new_empty(0)


def _flash_backward(
    grad_output: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    if grad_lse is not None:  # no measurement compares this gradient: the kernel computes it
        kernel = torch.ops.fastformer.scaled_dot_product_attention_backward
        return kernel(grad_output, grad_lse, query, key, value, *rest)
    *fields, output, lse, _, _ = rest
    op = peers.function(_FLASH, "_flash_attn_bwd", *_SHARED, "deterministic", "dq", "dk", "dv")
    options = _options(unpack(fields))
    grads = [heads_empty(x, x.shape[3]) for x in (query, key, value)]
    given = (x.transpose(1, 2) for x in (query, key, value, output, grad_output))
    written = {f"d{name}": x.transpose(1, 2) for name, x in zip("qkv", grads)}
    with torch.cuda.device_of(query):
        found = op(*given, lse, **options, deterministic=True, **written)
    empty = query.new_empty(0)
    return *grads, empty, empty if options["learnable_sink"] is None else found[3]


# The options that FlashAttention-4 computes as we do, beside those that torch's ops compute. Not
# key_lengths: it reads the values beyond a length, and a NaN among them would reach the output.
_COMPUTED = ("window", "softcap", "sinks")
_WIDE = {9: 256, 10: 128, 11: 128}  # the largest head dim, by the generation of the GPU
_PAIRS = {10: ((192, 128), (256, 256)), 11: ((192, 128), (256, 256))}  # other pairs (D, Dv)


def _unsupported_by_flash(arguments: Arguments) -> str | None:
    attention: Attention = arguments["attention"]
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    given = [name for name in beyond_torch(attention) if name not in _COMPUTED]
    given += [] if attention.shard is None else ["shard"]
    if given:
        return f"it does not take {' and '.join(given)}"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return "it takes float16 and bfloat16"
    if not attention.scale > 0:
        return "it takes a positive scale"
    generation = peers.gpu_generation(query)
    if generation is None or generation < 8:
        return "it runs on NVIDIA GPUs, sm_80 and newer"
    dims, largest = (query.shape[3], value.shape[3]), _WIDE.get(generation, 128)
    wide = max(dims) > largest and dims not in _PAIRS.get(generation, ())
    if any(n % 8 for n in dims) or wide:
        return f"it takes no head dims {dims[0]} and {dims[1]} on sm_{generation}0"
    if any(0 in x.shape for x in (query, key, value)):
        return "it is not measured for empty tensors"
    Sq, Sk = query.shape[2], key.shape[2]
    banded = attention.is_causal or attention.window is not None
    if banded and Sq != Sk and (attention.causal_alignment != "bottom_right" or Sq > Sk):
        return "its causal mask is aligned to the last key, and it takes no more queries than keys"
    return None


def _unsupported_backward_by_flash(arguments: Arguments) -> str | None:
    generation = peers.gpu_generation(arguments["query"])
    if generation and generation not in (9, 10, 11):
        return f"it has no deterministic backward on sm_{generation}0"
    return _unsupported_by_flash(arguments)


PEERS = (
    Peer("flash-attn-4", _flash_forward, None, _unsupported_by_flash),
    Peer("flash-attn-4", _flash_forward, _flash_backward, _unsupported_backward_by_flash),
)
