"""Hugging Face transformers on fastformer's attention.

    fastformer.register_transformers()
    model = AutoModel.from_pretrained(..., attn_implementation="fastformer")

transformers asks an attention implementation for two functions: one makes the mask, once in a
forward for all layers of a kind; the other is the attention of a layer, and gets that mask. What
the first returns here is the least that says who sees whom:

    None                          every query sees every key
    bool [B, 1, 1 or Sq, Sk]      True takes part; complete: nothing is added to it
    int8 [B or 1, l, r, Sk or 1]  a band: 1 at the keys that are no padding, and of those only the
                                  ones from i - left to i + right, the queries i being counted so
                                  that the last stands at the last key

A band holds its two sides in its shape, as l = left + 2 and r = right + 2, 1 for a side without a
bound, by strides of 0: it takes B Sk bytes, or one. Causal with padding is [B, 1, 2, Sk], a causal
window of 4096 tokens without padding [1, 4097, 2, 1]. In that form a mask survives what models do
with it on its way (slices, devices, checkpoints, graphs), and none can take it for a complete one:
its integers do not go where booleans do. Nothing is left to the layer's own `is_causal`, which some
models set wrong, nor to the `sliding_window` that not every model with a window passes on.

Shapes: B batch, H heads, G key-value heads, Sq queries, Sk keys, D and Dv head dims.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastformer import functional, reference

NAME = "fastformer"
_Sides = tuple[int | None, int | None]  # of a band: left and right

# Arguments of transformers' attention functions that change the result and are not supported.
REFUSED = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "head_mask": "a factor for each head",
    "block_indices": "attention to chosen blocks of keys",
    "cache": "a paged cache, of continuous batching",
}


def register_transformers() -> None:
    """Makes attn_implementation="fastformer" known to transformers, for every model of the process.

    Registers `attention` in transformers' AttentionInterface and `mask` in its
    AttentionMaskInterface. It serves models that take their attention from there - padding,
    causality, sliding windows, grouped heads, cross-attention, position bias, softcap, dropout and
    any cache of `generate`. Which backend runs is chosen as everywhere: `use_backend`. A second
    call changes nothing.

    Raises:
        ImportError: there is no transformers, or one that is too old.

    Source: the interface is that of huggingface/transformers.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "register_transformers needs transformers: python -m pip install 'fastformer[hf]'"
        ) from error
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


# -------------------------------------------------------------------------------------- attention


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    output_attentions: bool | None = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`scaled_dot_product_attention` as a layer of transformers calls it.

    Args:
        module: the layer; its `is_causal` counts where there is neither a mask nor an `is_causal`
            here: in models that make no masks.
        query: [B, H, Sq, D]; with B = 1 for all sequences of the keys.
        key, value: [B, G, Sk, D] and [B, G, Sk, Dv]; the heads are not repeated.
        attention_mask: what `mask` returned, or a mask of the user's, which is complete: boolean,
            or floating and added to the scores, [B or 1, H or 1, Sq or 1, Sk].
        dropout: probability that a weight is dropped: 0 in evaluation.
        scaling: the factor on query key^T; 1/sqrt(D) by default.
        position_bias: added to the scores, any shape that broadcasts to [B, H, Sq, Sk]. It has a
            gradient.
        softcap: as in `scaled_dot_product_attention`.
        output_attentions: also gives the weights, before dropout, at the cost of making them.
        kwargs: what else transformers hands to every implementation. `sliding_window` is among it,
            and not read: the mask has it.

    Returns:
        ([B, Sq, H, Dv], the weights [B, H, Sq, Sk] or None). A query that sees no key gives zeros.

    Raises:
        ValueError: an argument that changes the result and is not supported, named: sinks, a head
            mask, blocks of keys, a paged cache; or what `scaled_dot_product_attention` refuses.
        TypeError: a mask of another kind, as flex attention's.
        RuntimeError: `mask` is not registered under the implementation's name. transformers would
            then make no masks, without a word.
    """
    _require_registered(module)
    for name, what in REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} ({what}) is not supported by attn_implementation={NAME!r} and was given "
                f"to {type(module).__name__}; take 'eager' for this model"
            )
    if query.shape[0] != key.shape[0]:
        query = query.expand(key.shape[0], -1, -1, -1)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", False)
    visible, bias, (left, right) = _read(attention_mask, is_causal)
    if bias is not None and position_bias is not None:
        bias = bias + position_bias
    q_length, k_length = query.shape[2], key.shape[2]
    if right == 0 and q_length == 1:  # the last query may see every key
        right = None
    causal = left is None and right == 0
    arguments: dict[str, Any] = dict(
        attn_mask=visible,
        is_causal=causal,
        scale=scaling,
        enable_gqa=True,
        bias=position_bias if bias is None else bias,
        window=None if causal else (left, right),
        causal_alignment="top_left" if q_length == k_length else "bottom_right",
        softcap=softcap,
    )
    out = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, **arguments)
    weights = functional.attention_weights(query, key, **arguments) if output_attentions else None
    return out.transpose(1, 2).contiguous(), weights


def _require_registered(module: nn.Module) -> None:
    from transformers.masking_utils import AttentionMaskInterface

    name = getattr(getattr(module, "config", None), "_attn_implementation", NAME)
    if AttentionMaskInterface._global_mapping.get(name) is not mask:
        raise RuntimeError(
            f"fastformer's mask function is not registered for attn_implementation={name!r}: the "
            "masks of the model would be missing; call fastformer.register_transformers()"
        )


def _read(
    attention_mask: Tensor | None, is_causal: bool
) -> tuple[Tensor | None, Tensor | None, _Sides]:
    """(boolean mask, bias, sides of the band) of what a layer was given."""
    if attention_mask is None:
        return None, None, (None, 0 if is_causal else None)
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 4:
        kind = type(attention_mask).__name__
        if isinstance(attention_mask, Tensor):
            kind += f" of {attention_mask.dim()} dimensions"
        raise TypeError(f"attention_mask is a {kind}; expected a tensor [B, 1, Sq, Sk]")
    if attention_mask.is_floating_point():
        return None, attention_mask, (None, None)
    if attention_mask.dtype != torch.int8:
        return attention_mask, None, (None, None)
    left, right = (None if n == 1 else n - 2 for n in attention_mask.shape[1:3])
    padding = attention_mask[:, :1, :1].view(torch.bool)
    none = padding.shape[0] == 1 and padding.shape[3] == 1
    return None if none else padding, None, (left, right)


# ------------------------------------------------------------------------------------------ masks


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = False,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """Who sees whom in a forward, in the form that the head of this file describes.

    None, a mask of the padding or a band where the pattern is transformers' own causal,
    bidirectional or sliding one and the last query stands at the last key; the complete mask
    [B, 1, Sq, Sk] of transformers' sdpa for any other: packed sequences, chunks, patterns joined by
    `and` and `or`, a static cache that is longer than what it holds; in a graph, windows too. Only
    on a CPU does it look whether there is padding at all: on a GPU that would wait for the device,
    and in a graph it cannot be.

    Args:
        batch_size, q_length, kv_length: B, Sq, Sk.
        q_offset, kv_offset: the positions of the first query and of the first key.
        mask_function: (b, h, i, j) -> whether position i sees position j; causal by default.
        attention_mask: boolean [B, kv_offset + Sk], more or fewer, False at padding; None: none.
        allow_is_causal_skip, allow_is_bidirectional_skip: False asks for the complete mask; one of
            them is False always, according to the pattern.
        config: of the model.
        kwargs: what else `sdpa_mask` takes.

    Raises:
        ValueError: the model is of a kind that computes its attention by itself, and would take the
            mask for another.
    """
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        sdpa_mask,
    )

    if config is not None:
        _require_interface(type(config).__module__)
    if mask_function is None:
        mask_function = causal_mask_function
    sides = _sides(mask_function, causal_mask_function, bidirectional_mask_function)
    free = sides == (None, None)
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    known = attention_mask is None or (
        attention_mask.dtype == torch.bool
        and attention_mask.dim() == 2
        and attention_mask.shape[1] >= kv_offset + kv_length
    )
    skip = allow_is_causal_skip or allow_is_bidirectional_skip
    if sides is None or not (skip and known and (free or aligned)):
        kwargs.update(q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function)
        kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        return sdpa_mask(batch_size, q_length, kv_length, attention_mask=attention_mask, **kwargs)

    padding = None
    if attention_mask is not None:
        padding = attention_mask[:, None, None, kv_offset : kv_offset + kv_length]
        if reference.readable(padding) and padding.all():
            padding = None
    left, right = sides
    if left is not None and left >= kv_length - 1:  # a bound that no key is beyond
        left = None
    if right is not None and right >= q_length - 1:
        right = None
    if left is None and right is None:
        return padding
    if padding is None:
        padding = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=kwargs.get("device"))
    shape = [1 if side is None else side + 2 for side in (left, right)]
    return padding.view(torch.int8).expand(-1, *shape, -1)


def _sides(mask_function: Callable[..., Any], causal: Any, bidirectional: Any) -> _Sides | None:
    """How far a query sees to the left and to the right, in one of transformers' own patterns."""
    if mask_function is causal:
        return None, 0
    if mask_function is bidirectional:
        return None, None
    if torch.compiler.is_compiling():  # which does not look into functions
        return None
    overlay, base = (*_captured(mask_function, "mask_functions", ()), None, None)[:2]
    window = _captured(overlay, "sliding_window", None)
    kind = getattr(overlay, "__qualname__", "").partition(".")[0]
    if kind == "sliding_window_overlay" and base is causal:
        return window - 1, 0
    if kind == "sliding_window_bidirectional_overlay" and base is bidirectional:
        return window, window
    return None


def _captured(function: Any, name: str, default: Any) -> Any:
    """What an inner function holds of the function around it."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return function.__closure__[names.index(name)].cell_contents if name in names else default


def _require_interface(config_module: str) -> bool:
    """Raises for a model that has attention layers of its own and no way to another attention."""
    models = sys.modules.get(config_module.replace(".configuration_", ".modeling_"))
    if models is None or hasattr(models, "ALL_ATTENTION_FUNCTIONS"):
        return True
    for name, x in vars(models).items():
        own = isinstance(x, type) and x.__module__ == models.__name__
        if own and "Attention" in name and issubclass(x, nn.Module):
            raise ValueError(
                f"{name} of {models.__name__} computes its attention by itself, whatever "
                f"attn_implementation is: {NAME!r} is not supported there; take 'eager'"
            )
    return True


# What torch.compiler.assume_constant_result sets, without the import of dynamo.
_require_interface.__dict__["_dynamo_marked_constant"] = True
