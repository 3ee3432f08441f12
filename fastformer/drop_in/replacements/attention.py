"""nn.MultiheadAttention on the ops.

Shapes: N batch, L queries, S keys, E features, H heads, D = E / H.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.checks import shape_of, wrong_shape
from fastformer.description import MAX_HEAD_DIM
from fastformer.drop_in.replacements import base
from fastformer.mask_tiles import BlockMask
from fastformer.nn.padding import Packing
from fastformer.nn.stream import ResidualStream
from fastformer.ops import functional
from fastformer.ops.attention.joint import Projected, joint_attention

NEEDS_WEIGHTS = (
    "need_weights=True, the default, runs in plain PyTorch; if the weights are discarded, "
    "need_weights=False, or accelerate(model, need_weights=False), runs on the fused op"
)


class FusedMultiheadAttention(base.Accelerated, nn.MultiheadAttention):
    _internal = ("forward", "merge_masks")
    _returns_weights = True  # when asked; accelerate(need_weights=False) sets it to False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        need_weights = need_weights and self._returns_weights
        options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        if base.is_left_to_torch(self, query, attn_mask):
            return self._run_whole(query, key, value, *options)
        reason = base.unsupported_tensor(query, key, value, key_padding_mask, attn_mask)
        reason = reason or self._unsupported_reason()
        if reason is not None:
            return self._run_original(reason, query, key, value, *options)
        try:
            masks = attn_mask, key_padding_mask
            visibility = self._visibility(query, key, value, *masks, is_causal)
        except (TypeError, ValueError) as refusal:
            return self._run_original_or(refusal, query, key, value, *options)
        with base.ops_of(self):
            if not need_weights:
                return self._attend(query, key, value, visibility), None
            out, weights = self._attend_with_weights(query, key, value, visibility)
        weights = weights.mean(1) if average_attn_weights else weights
        return out, weights if query.dim() == 3 else weights.squeeze(0)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seen: Visibility,
        seed: Tensor | None = None,
        stream: ResidualStream | None = None,
    ) -> Tensor:
        """Return the output [N, L, E], [L, N, E] or [L, E], in the layout of the query. In a packed
        batch, query, key, value and output are [tokens, E]. seed: that of dropout; drawn, if None.
        stream: that of a layer, which may take the bias of the output.
        """
        p = self.dropout if self.training else 0.0
        projected = self._projected(query, key, value, seen.packing is not None)
        q, k, v = projected.parts()
        if seen.packing is not None:
            offsets, longest = seen.packing.cu_seqlens, seen.packing.longest
            packed = q, k, v, offsets, offsets, longest, longest
            options = dict(dropout_p=p, is_causal=seen.is_causal, dropout_seed=seed)
            out = joint_attention("packed_attention", projected, {}, *packed, **options)
            out = out.flatten(-2)
        else:
            given = q, k, v, seen.attn_mask, p, seen.is_causal
            op, options = "scaled_dot_product_attention", dict(bias=seen.bias, dropout_seed=seed)
            out = joint_attention(op, projected, {}, *given, **options)
            out = self._heads_last(out, query.dim() == 3)
        taken = stream is not None and stream.takes(self.out_proj.bias)
        return F.linear(out, self.out_proj.weight, None if taken else self.out_proj.bias)

    def _attend_with_weights(
        self, query: Tensor, key: Tensor, value: Tensor, seen: Visibility
    ) -> tuple[Tensor, Tensor]:
        """Return the output, and the weights [N, H, L, S] after dropout, as torch does."""
        base.record_fallback(self, "MultiheadAttention", NEEDS_WEIGHTS)
        q, k, v = self._projected(query, key, value).parts()
        weights = functional.attention_weights(q, k, seen.attn_mask, seen.is_causal, bias=seen.bias)
        weights = F.dropout(weights, self.dropout, self.training)
        out = self._heads_last(weights @ v.to(weights.dtype), query.dim() == 3)
        return F.linear(out, self.out_proj.weight, self.out_proj.bias), weights

    # --------------------------------------------------------------------- checks, reading of masks

    def _unsupported_reason(self) -> str | None:
        if self.head_dim > MAX_HEAD_DIM:
            return f"the head dim is {self.head_dim}; the kernels take up to {MAX_HEAD_DIM}"
        if self.bias_k is not None or self.add_zero_attn:
            return "it appends keys (add_bias_kv, add_zero_attn)"
        packed = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
        return base.unsupported_weight(
            (packed, self.in_proj_bias),
            (self.k_proj_weight, self.v_proj_weight),
            (self.out_proj.weight, self.out_proj.bias),
        )

    def _require_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.dim() not in (2, 3):
            batched = "[N, L, E]" if self.batch_first else "[L, N, E]"
            raise wrong_shape("query", query, f"{batched}, or [L, E]")
        features = (self.embed_dim, self.kdim, self.vdim)
        for name, x, n in zip(("query", "key", "value"), (query, key, value), features):
            if x.dim() != query.dim() or x.shape[-1] != n:
                expected = f"{query.dim()} dimensions, as query, the last of them {n}"
                raise wrong_shape(name, x, expected)
        batch = 0 if self.batch_first else 1
        same = key.shape[:-1] == value.shape[:-1]
        if not same or (query.dim() == 3 and query.shape[batch] != key.shape[batch]):
            q, k, v = (shape_of(x) for x in (query, key, value))
            raise ValueError(
                f"query {q}, key {k}, value {v}; expected one batch, and as many values as keys"
            )

    def _visibility(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        names: tuple[str, str] = ("attn_mask", "key_padding_mask"),
    ) -> Visibility:
        """Check the inputs and translate torch's two masks; raise ValueError or TypeError.

        query: [N, L, E], [L, N, E] or [L, E]. key, value: [N, S, E], [S, N, E] or [S, E].
        attn_mask: [L, S] or [N H, L, S], or a `BlockMask` of [N, H, L, S], in which True keeps a
        key. key_padding_mask: [N, S] or [S]. names: those of the masks, for error messages.
        """
        self._require_inputs(query, key, value)
        blocks = attn_mask if isinstance(attn_mask, BlockMask) else None
        if blocks is not None:
            attn_mask, is_causal = None, False
        elif is_causal and attn_mask is None:
            raise ValueError(
                f"is_causal is True and {names[0]} None; it is a hint that {names[0]} is causal: "
                "expected the mask as well (nn.Transformer.generate_square_subsequent_mask)"
            )
        for name, mask in zip(names, (attn_mask, key_padding_mask)):
            if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
                raise TypeError(
                    f"{name} has dtype {mask.dtype}; expected torch.bool, True where a key is "
                    "masked out, or a floating dtype, to be added to the scores"
                )
        batched = query.dim() == 3
        at = 1 if batched and self.batch_first else 0
        batch = query.shape[1 - at] if batched else 1
        scores = (batch, self.num_heads, query.shape[at], key.shape[at])  # [N, H, L, S]
        hidden_keys = _padding_of_scores(names[1], key_padding_mask, scores, batched)
        hidden = mask_of_scores(names[0], attn_mask, scores)
        visible, bias = joined_masks(None if is_causal else hidden, hidden_keys, query.dtype)
        if blocks is not None:
            if visible is not None:  # the padding
                bias = torch.zeros_like(visible, dtype=query.dtype).masked_fill(~visible, -math.inf)
            return Visibility(blocks, bias)
        return Visibility(visible, bias, is_causal)

    # ---------------------------------------------------------------------- queries, keys, values

    def _projected(
        self, query: Tensor, key: Tensor, value: Tensor, packed: bool = False
    ) -> Projected:
        """Project query, key and value. The parts are [N, H, L or S, D]; [tokens, H, D] if packed.

        If in_proj_weight holds all weights, key and value share one GEMM if they are the same
        tensor, and query shares it too if it is that tensor.
        """
        groups = [(query, 1), (key, 1), (value, 1)]
        if key is value and self.in_proj_weight is not None:
            groups = [(query, 3)] if query is key else [(query, 1), (key, 2)]
        weights, biases = self._projections([n for _, n in groups])
        found = [
            F.linear(x, w, b).unflatten(-1, (n * self.num_heads, self.head_dim))
            for (x, n), w, b in zip(groups, weights, biases)
        ]
        if packed:
            return Projected(found, self.num_heads, (0, 1, 2))
        if query.dim() == 2:
            return Projected([x.unsqueeze(0) for x in found], self.num_heads, (0, 2, 1, 3))
        order = (0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)
        return Projected(found, self.num_heads, order)

    def _projections(
        self, counts: Sequence[int]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Return the weights and the biases of the projections of query, key and value.

        counts: how many of the three projections each returned weight holds, (1, 1, 1) or (3,) or
        (1, 2).
        """
        sizes, bias = [n * self.embed_dim for n in counts], self.in_proj_bias
        weights: Sequence[Tensor]
        if self.in_proj_weight is None:
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        elif len(sizes) == 1:  # a split would concatenate its gradient
            return [self.in_proj_weight], [bias]
        else:
            weights = self.in_proj_weight.split(sizes)
        return weights, [None] * len(sizes) if bias is None else bias.split(sizes)

    def _heads_last(self, x: Tensor, batched: bool) -> Tensor:
        """Return [N, L, E], [L, N, E] or, if not batched, [L, E] from [N, H, L, D]."""
        if not batched:
            return x.squeeze(0).transpose(0, 1).flatten(1)
        return (x.transpose(1, 2) if self.batch_first else x.permute(2, 0, 1, 3)).flatten(2)


class Visibility(NamedTuple):
    """Which keys each query sees, as arguments of `scaled_dot_product_attention`.

    attn_mask: boolean, True for a visible key, or a `BlockMask`, and bias: added to the scores;
    both broadcast to [N, H, L, S]. packing: the `Packing` of a batch whose padding was dropped.
    """

    attn_mask: Any = None
    bias: Tensor | None = None
    is_causal: bool = False
    packing: Packing | None = None


def _padding_of_scores(
    name: str, key_padding_mask: Tensor | None, scores: tuple[int, ...], batched: bool
) -> Tensor | None:
    """Return key_padding_mask [N, S] or [S] as [N, 1, 1, S]; scores: the sizes (N, H, L, S)."""
    if key_padding_mask is None:
        return None
    batch, keys = scores[0], scores[3]
    expected = [batch, keys] if batched else [keys]
    if list(key_padding_mask.shape) != expected:
        raise wrong_shape(name, key_padding_mask, f"{'[N, S]' if batched else '[S]'} = {expected}")
    return key_padding_mask.view(batch, 1, 1, keys)


def mask_of_scores(name: str, attn_mask: Tensor | None, scores: tuple[int, ...]) -> Tensor | None:
    """Return attn_mask [L, S] or [N H, L, S] in a shape that broadcasts to scores (N, H, L, S)."""
    batch, heads, length, keys = scores
    if attn_mask is None or attn_mask.shape == (length, keys):
        return attn_mask
    if attn_mask.shape == (batch * heads, length, keys):
        return attn_mask.unflatten(0, (batch, heads))
    sizes = f"{length}, {keys}]"
    expected = f"[L, S] = [{sizes} or [N H, L, S] = [{batch * heads}, {sizes}"
    raise wrong_shape(name, attn_mask, expected)


def joined_masks(
    mask: Tensor | None, padding: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Return (visible, bias) from torch's two masks: a boolean mask, and a term of the scores.

    mask and padding: boolean, True for a key that is masked out, or floats that are added to the
    scores; both broadcast to [N, H, L, S]. dtype: the dtype of the query.
    """
    visible, bias = None, None
    for hidden in (mask, padding):
        if hidden is None:
            continue
        if hidden.dtype == torch.bool:
            visible = ~hidden if visible is None else visible & ~hidden
            continue
        if hidden.dtype != torch.float32:
            hidden = hidden.to(dtype)
        bias = hidden if bias is None else bias + hidden
    return visible, bias
