"""torch's own attention functions on the ops, for graphs."""

from __future__ import annotations

import operator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx

from fastformer.dispatch.backends import current_backend
from fastformer.drop_in.graph.axes import fitting
from fastformer.drop_in.graph.nodes import Emitter, History, Stays, name, tensor, value
from fastformer.drop_in.replacements.attention import joined_masks, mask_of_scores
from fastformer.drop_in.sdpa import torch_sdpa
from fastformer.ops.functional import scaled_dot_product_attention


def left_to_torch(node: fx.Node) -> bool:
    """Return whether the backend is "auto" and the tensors are on a CPU: there torch's own
    functions stay, which the ops would call.
    """
    x = value(node)
    x = x[0] if isinstance(x, tuple) else x
    return isinstance(x, Tensor) and x.device.type == "cpu" and current_backend() == "auto"


def attention_of_torch(history: History, node: fx.Node) -> fx.Node | None:
    """Return the op in place of a call of torch's attention functions, None for other nodes."""
    called = name(node)
    if called == "scaled_dot_product_attention" and node.target is F.scaled_dot_product_attention:
        if left_to_torch(node):
            return None
        emit = Emitter(history, node)
        return fitting(emit, emit(torch_sdpa, *node.args, **node.kwargs), node)
    if called != "multi_head_attention_forward" or left_to_torch(node):
        return None
    given = dict(zip(_ARGUMENTS, node.args)) | dict(node.kwargs)
    if given.get("need_weights", True) and any(
        user.target is not operator.getitem or user.args[1] != 0 for user in node.users
    ):
        raise Stays("its weights are read; need_weights=False computes none")
    refused = ("bias_k", "bias_v", "add_zero_attn", "static_k", "static_v")
    if any(given.get(key) not in (None, False) for key in refused):
        raise Stays("it appends keys")
    heads = given["num_heads"]
    tensors = {key: given.get(key) for key in _TENSORS}
    p = given["dropout_p"] if given.get("training", True) else 0.0
    causal = bool(given.get("is_causal")) and given.get("attn_mask") is not None
    if tensor(given["query"]).dim() != 3:
        raise Stays("it has no batch")
    new = Emitter(history, node)(multi_head_attention, heads, p, causal, **tensors)
    have, want = value(new)[0], value(node)[0]
    if (have.shape, have.dtype) != (want.shape, want.dtype):
        raise Stays("its result would have another shape or dtype")
    return new


_ARGUMENTS = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight"),
    *("in_proj_bias", "bias_k", "bias_v", "add_zero_attn", "dropout_p", "out_proj_weight"),
    *("out_proj_bias", "training", "key_padding_mask", "need_weights", "attn_mask"),
    *("use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k"),
    *("static_v", "average_attn_weights", "is_causal"),
)
_TENSORS = (
    *("query", "key", "value", "in_proj_weight", "in_proj_bias", "out_proj_weight"),
    *("out_proj_bias", "key_padding_mask", "attn_mask", "q_proj_weight", "k_proj_weight"),
    "v_proj_weight",
)


def multi_head_attention(
    num_heads: int, dropout_p: float, is_causal: bool, **given: Any
) -> tuple[Tensor, None]:
    """Compute F.multi_head_attention_forward without weights; the arguments are its own."""
    weights = [given[f"{x}_proj_weight"] for x in "qkv"]
    if given["in_proj_weight"] is not None:
        weights = [*given["in_proj_weight"].chunk(3)]
    bias = given["in_proj_bias"]
    biases = [None] * 3 if bias is None else bias.chunk(3)
    inputs = given["query"], given["key"], given["value"]  # [L or S, N, E]
    q, k, v = (
        F.linear(x, w, b).unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)
        for x, w, b in zip(inputs, weights, biases)
    )
    padding, mask = given["key_padding_mask"], given["attn_mask"]
    scores = (*q.shape[:3], k.shape[2])
    padding = None if padding is None else padding[:, None, None]
    mask = None if is_causal else mask_of_scores("attn_mask", mask, scores)
    visible, term = joined_masks(mask, padding, q.dtype)
    out = scaled_dot_product_attention(q, k, v, visible, dropout_p, is_causal, bias=term)
    out = out.permute(2, 0, 1, 3).flatten(2)
    return F.linear(out, given["out_proj_weight"], given["out_proj_bias"]), None
