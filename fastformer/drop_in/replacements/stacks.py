"""nn.TransformerEncoder and nn.TransformerDecoder on the ops.

The layers run on one residual stream. An encoder also skips padding where nothing can see it: the
tokens are packed before its layers, and padded after them.

Shapes: N batch, L queries, S keys, E features.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastformer.drop_in.replacements import base, layers
from fastformer.drop_in.replacements.attention import Visibility
from fastformer.eager import may_decide
from fastformer.nn.padding import Packing, packing_of, pad, unpad
from fastformer.nn.seeds import Seeds
from fastformer.nn.stream import ResidualStream, is_unmodified

# An encoder drops its padding only if it is at least this share of the batch and this many tokens:
# for less, packing and unpacking cost more than they save.
_LEAST_SHARE, _LEAST_TOKENS = 0.1, 16


class Stack(layers.OnStream):
    """What an encoder and a decoder share."""

    _layer: ClassVar[type[layers.Layer]]
    layers: Any  # of `_layer`
    norm: nn.Module | None

    def _unsupported_reason(self) -> str | None:
        own = self.layers
        if len(own) == 0:
            return "it has no layers"
        for i, layer in enumerate(own):
            if not isinstance(layer, self._layer):
                return f"layers.{i} is a {type(layer).__name__} that was not replaced"
            if not is_unmodified(layer):
                return f"layers.{i} has hooks"
            reason = layer._unsupported_reason()
            if reason is not None:
                return f"layers.{i}: {reason}"
            for name in layer._attentions:
                if _mask_form(layer, name) != _mask_form(own[0], name):
                    return f"layers.{i} has another form of {name} than layers.0"
        return None if self.norm is None else base.unsupported_parameter(self.norm)

    @property
    def _sites(self) -> int:
        return sum(getattr(layer, "_sites", 0) for layer in self.layers)

    def _through(self, stream: ResidualStream, *context: object) -> None:
        for i, layer in enumerate(self.layers):
            followed = i + 1 < len(self.layers) or self.norm is not None
            stream.ends_at = None if followed else layer._sites - 1
            layer._through(stream, *context)
            stream.seeds = stream.seeds.after(layer._sites)

    def _stream_output(self, stream: ResidualStream) -> Tensor:
        with base.ops_of(self):
            out = stream.value() if self.norm is None else stream.normalize(self.norm)
        return out.contiguous()


def _mask_form(layer: layers.Layer, name: str) -> tuple[object, ...]:
    """Return what two layers must have in common to share the translated masks."""
    attention = getattr(layer, name)
    return attention.batch_first, attention.num_heads


class FusedTransformerEncoder(Stack, nn.TransformerEncoder):
    _layer = layers.FusedTransformerEncoderLayer
    _drops_padding = False  # accelerate(drop_padding=True) sets it to True

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        padding = src_key_padding_mask
        if not self._drops_padding and base.is_left_to_torch(self, src, mask):
            return self._run_whole(src, mask, padding, is_causal)
        reason = base.unsupported_tensor(src, mask, padding) or self._unsupported_reason()
        # [N, S], True at the padding, if the output there has to be zeros.
        hidden = padding if self._drops_padding and src.dim() == 3 else None
        hidden = None if hidden is None or hidden.dtype != torch.bool else hidden
        if reason is not None:
            out = self._run_original(reason, src, mask, padding, is_causal)
            return out if hidden is None or out.is_nested else self._blanked(out, hidden)
        first, names = self.layers[0].self_attn, ("mask", "src_key_padding_mask")
        try:
            causal = _is_causal(mask, is_causal)
            seen = first._visibility(src, src, src, mask, padding, causal, names)
        except (TypeError, ValueError) as refusal:
            return self._run_original_or(refusal, src, mask, padding, is_causal)
        if hidden is None and padding is not None:
            masked = padding if padding.dtype == torch.bool else padding != 0
            hidden = masked if self._converts_to_nested(src, mask, masked) else None
        if hidden is not None and (mask is None or seen.is_causal):
            packing = _packing_worth_it(hidden)
            if packing is not None:
                return self._forward_packed(src, packing, seen.is_causal)
        stream = ResidualStream(src, Seeds(self._sites))
        self._through(stream, seen)
        if hidden is not None:
            hidden = self._batch_as_given(hidden).unsqueeze(-1)
            stream.x = stream.value().masked_fill(hidden, 0.0)
        return self._stream_output(stream)

    def _forward_packed(self, src: Tensor, packing: Packing, is_causal: bool) -> Tensor:
        """Run the layers on the tokens of src [N, S, E] or [S, N, E] that are not padding."""
        tokens, _ = unpad(self._batch_as_given(src), packing)  # [tokens, E]
        stream = ResidualStream(tokens, Seeds(self._sites))
        self._through(stream, Visibility(is_causal=is_causal, packing=packing))
        x = pad(stream.value(), packing)  # [N, S, E], zeros at the padding
        stream.x = self._batch_as_given(x)
        return self._stream_output(stream)

    def _batch_as_given(self, x: Tensor) -> Tensor:
        """Convert between [N, S, ..] and the caller's order: transpose unless batch_first."""
        return x if self.layers[0].self_attn.batch_first else x.transpose(0, 1)

    def _blanked(self, out: Tensor, hidden: Tensor) -> Tensor:
        """Return out with norm(0), or 0 without a norm, where hidden [N, S] is True."""
        hidden = self._batch_as_given(hidden)
        blank = out.new_zeros(out.shape[-1])
        blank = blank if self.norm is None else self.norm(blank)
        return torch.where(hidden.unsqueeze(-1), blank.to(out.dtype), out)

    def _converts_to_nested(self, src: Tensor, mask: Tensor | None, hidden: Tensor) -> bool:
        """Return whether the original forward converts src to a nested tensor without padding. If
        so, its layers return zeros at the padding. hidden: [N, S], True at the padding.
        """
        first = self.layers[0]
        if first.training or src.dim() != 3 or mask is not None:
            return False
        if not getattr(self, "use_nested_tensor", False):  # an old pickle lacks the attribute
            return False
        if not torch.backends.mha.get_fastpath_enabled() or torch.is_autocast_enabled():
            return False
        if torch.is_grad_enabled() and any(x.requires_grad for x in (src, *first.parameters())):
            return False
        if not getattr(self, "mask_check", True):
            return True
        return may_decide(hidden) and torch._nested_tensor_from_mask_left_aligned(src, ~hidden)


def _is_causal(mask: Tensor | None, hint: bool | None) -> bool:
    """Return the hint, or without one whether the mask [L, L] is known to be causal."""
    if hint is not None or mask is None:
        return bool(hint)
    if mask.dim() != 2 or mask.shape[0] != mask.shape[1] or mask.requires_grad:
        return False
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return False  # an error that `_visibility` raises
    masked_out = True if mask.dtype == torch.bool else float("-inf")
    return may_decide(mask) and torch.equal(mask, torch.full_like(mask, masked_out).triu(1))


def _packing_worth_it(hidden: Tensor) -> Packing | None:
    """Return the packing without the tokens of hidden [N, S], or None if it saves no time."""
    if not may_decide(hidden) or len(hidden) == 0:
        return None
    valid = ~hidden
    counts = valid.sum(1)
    longest, kept = (int(n) for n in torch.stack([counts.max(), counts.sum()]))
    dropped = hidden.numel() - kept
    worth = kept > 0 and dropped >= max(_LEAST_TOKENS, _LEAST_SHARE * hidden.numel())
    return packing_of(valid, longest) if worth else None


class FusedTransformerDecoder(Stack, nn.TransformerDecoder):
    _layer = layers.FusedTransformerDecoderLayer

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
        hints = (tgt_is_causal, memory_is_causal)
        return self._forward_on_stream((tgt, memory, *masks), hints)

    def _context(self, *given: Any) -> tuple[Visibility, Tensor, Visibility]:
        *tensors, hint, of_memory = given
        return self.layers[0]._context(*tensors, _is_causal(tensors[2], hint), of_memory)
