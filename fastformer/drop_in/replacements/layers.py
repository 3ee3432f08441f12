"""nn.TransformerEncoderLayer and nn.TransformerDecoderLayer on the ops.

A layer runs its sublayers on one residual stream, so that dropout, residual sum and norm are one
kernel. A stack of layers (stacks.py) passes its stream from layer to layer.

Shapes: N batch, L queries, S keys, E features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.drop_in.replacements import base
from fastformer.drop_in.replacements.attention import FusedMultiheadAttention, Visibility
from fastformer.nn.seeds import Seeds
from fastformer.nn.stream import ResidualStream, apply_feed_forward, is_unmodified


class OnStream(base.Accelerated):
    """A layer, or a stack of layers, that runs on one residual stream."""

    _unsupported_reason: Callable[[], str | None]  # why it cannot run on one stream, or None
    _context: Callable[..., Any]  # (arguments of `forward`): the `context`, checked
    _through: Callable[..., None]  # (stream, *context): run on the stream
    _stream_output: Callable[[ResidualStream], Tensor]  # the output after `_through` has run

    @property
    def _sites(self) -> int:
        """How many dropout seeds the module takes."""
        raise NotImplementedError

    def _forward_on_stream(
        self, tensors: tuple[Tensor | None, ...], hints: tuple[bool | None, ...]
    ) -> Tensor:
        """Run on a stream whose initial value is tensors[0], or fall back to the original forward.
        tensors and hints: the arguments of `forward`, in order.
        """
        if base.is_left_to_torch(self, *tensors):
            return self._run_whole(*tensors, *hints)
        reason = base.unsupported_tensor(*tensors) or self._unsupported_reason()
        if reason is not None:
            return self._run_original(reason, *tensors, *hints)
        try:
            context = self._context(*tensors, *hints)
        except (TypeError, ValueError) as refusal:
            return self._run_original_or(refusal, *tensors, *hints)
        assert tensors[0] is not None
        stream = ResidualStream(tensors[0], Seeds(self._sites), self._sites - 1)
        self._through(stream, *context)
        return self._stream_output(stream)


class Layer(OnStream):
    """What an encoder layer and a decoder layer share."""

    _attentions: ClassVar[tuple[str, ...]]  # the names of its attention modules
    linear1: nn.Linear
    linear2: nn.Linear
    norm_first: bool
    self_attn: Any
    multihead_attn: Any
    dropout: nn.Dropout
    activation: Callable[[Tensor], Tensor]

    @property
    def _sites(self) -> int:
        return 2 * len(self._attentions) + 2  # each sublayer's own, and its output's

    def _unsupported_reason(self) -> str | None:
        first = getattr(self, self._attentions[0])
        for name in self._attentions:
            attention = getattr(self, name)
            if not isinstance(attention, FusedMultiheadAttention):
                return f"{name} is a {type(attention).__name__} that was not replaced"
            if not is_unmodified(attention):
                return f"{name} has hooks"
            if attention.batch_first != first.batch_first:
                return "one attention has batch_first, another has not"
            reason = attention._unsupported_reason()
            if reason is not None:
                return f"{name}: {reason}"
        names = ("norm1", "norm2", "norm3")
        norms = (getattr(self, name) for name in names if name in self._modules)
        return base.unsupported_parameter(self.linear1, self.linear2, *norms)

    def _stream_output(self, stream: ResidualStream) -> Tensor:
        return stream.value().contiguous()

    def _through(
        self,
        stream: ResidualStream,
        own: Visibility,
        memory: Tensor | None = None,
        cross: Visibility | None = None,
    ) -> None:
        sublayers = [self._attention_sublayer(stream, 0, "self_attn", own)]
        if cross is not None:
            sublayers.append(self._attention_sublayer(stream, 2, "multihead_attn", cross, memory))
        parts = self.linear1, op_activation(self.activation), self.dropout, self.linear2
        seed = stream.seed(2 * len(sublayers), self.dropout)
        sublayers.append(lambda x: apply_feed_forward(x, *parts, seed, stream))
        with base.ops_of(self):
            for i, sublayer in enumerate(sublayers, 1):
                norm, dropout = getattr(self, f"norm{i}"), getattr(self, f"dropout{i}")
                stream.add_sublayer(sublayer, norm, dropout, self.norm_first, 2 * i - 1)

    def _attention_sublayer(
        self,
        stream: ResidualStream,
        site: int,
        name: str,
        visibility: Visibility,
        memory: Tensor | None = None,
    ) -> Callable[[Tensor], Tensor]:
        """Return the function x -> attention(x, memory, memory), or self-attention if no memory."""
        attention = getattr(self, name)
        drops = attention.training and attention.dropout
        seed = stream.seeds.of(site, stream.x.device) if drops else None

        def attend(x: Tensor) -> Tensor:
            keys = x if memory is None else memory
            with base.ops_of(attention):
                return attention._attend(x, keys, keys, visibility, seed, stream)

        return attend


_NAMES = {  # of activations in `feed_forward`
    "relu": (F.relu, torch.relu, nn.ReLU),
    "silu": (F.silu, nn.SiLU),
    "gelu": (F.gelu,),
}


def op_activation(function: Any) -> str | Callable[[Tensor], Tensor]:
    """Return the name of the activation in `feed_forward`, or the function if it has none there."""
    plain = isinstance(function, nn.Module) and is_unmodified(function)
    if plain and type(function) is nn.GELU:
        return "gelu" if function.approximate == "none" else "gelu_tanh"
    known = type(function) if plain else function
    return next((x for x, same in _NAMES.items() if known in same), function)


class FusedTransformerEncoderLayer(Layer, nn.TransformerEncoderLayer):
    _internal = ("forward", "_sa_block", "_ff_block")
    _attentions = ("self_attn",)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        masks = (src_mask, src_key_padding_mask)
        return self._forward_on_stream((src, *masks), (is_causal,))

    def _context(self, src: Tensor, *given: Any) -> tuple[Visibility]:
        names = ("src_mask", "src_key_padding_mask")
        return (self.self_attn._visibility(src, src, src, *given, names),)


class FusedTransformerDecoderLayer(Layer, nn.TransformerDecoderLayer):
    _internal = ("forward", "_sa_block", "_mha_block", "_ff_block")
    _attentions = ("self_attn", "multihead_attn")

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
        hints = (tgt_is_causal, memory_is_causal)
        return self._forward_on_stream((tgt, memory, *masks), hints)

    def _context(
        self, tgt: Tensor, memory: Tensor, *given: Any
    ) -> tuple[Visibility, Tensor, Visibility]:
        tgt_mask, memory_mask, tgt_padding, memory_padding, *hints = given
        names = ("tgt_mask", "tgt_key_padding_mask")
        own = self.self_attn._visibility(tgt, tgt, tgt, tgt_mask, tgt_padding, hints[0], names)
        names = ("memory_mask", "memory_key_padding_mask")
        keys = memory, memory, memory_mask, memory_padding
        return own, memory, self.multihead_attn._visibility(tgt, *keys, hints[1], names)
