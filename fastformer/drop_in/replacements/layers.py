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

from fastformer.checks import autocast_dtype
from fastformer.dispatch import backends
from fastformer.drop_in.replacements.attention import FusedMultiheadAttention, Visibility
from fastformer.drop_in.replacements.base import (
    Accelerated,
    ops_of,
    record_torch,
    unsupported_parameter,
    unsupported_tensor,
)
from fastformer.drop_in.replacements.norms import FusedLayerNorm
from fastformer.eager import eager
from fastformer.nn.seeds import Seeds
from fastformer.nn.stream import (
    ResidualStream,
    apply_feed_forward,
    is_unmodified,
)


class OnStream(Accelerated):
    """A layer, or a stack of layers, that runs on one residual stream."""

    _through: Callable[..., None]  # (stream, *context): run on the stream

    def _unsupported_reason(self) -> str | None:
        """Return why the module cannot run on one stream, or None."""
        raise NotImplementedError

    @property
    def _sites(self) -> int:
        """How many dropout seeds the module takes."""
        raise NotImplementedError

    def _stream_output(self, stream: ResidualStream) -> Tensor:
        """Return the module's output after `_through` has run."""
        raise NotImplementedError

    def _forward_on_stream(
        self,
        tensors: tuple[Tensor | None, ...],
        hints: tuple[bool | None, ...],
        read_masks: Callable[[], tuple[object, ...]],
        seeds: Seeds | None = None,
    ) -> Tensor:
        """Run on a stream whose initial value is tensors[0], or fall back to the original forward.

        tensors and hints: the arguments of `forward`, in order. read_masks: returns the `context`
        arguments of `_through`, or raises TypeError or ValueError. seeds: those of the model,
        from this module's on.
        """
        reason = unsupported_tensor(*tensors) or self._unsupported_reason()
        if reason is not None:
            return self._run_original(reason, *tensors, *hints)
        try:
            context = read_masks()
        except (TypeError, ValueError) as refusal:
            return self._run_original_or(refusal, *tensors, *hints)
        assert tensors[0] is not None
        stream = ResidualStream(tensors[0], seeds or Seeds(self._sites), self._sites - 1)
        self._through(stream, *context)
        return self._stream_output(stream)


class Layer(OnStream):
    """What an encoder layer and a decoder layer share."""

    _attentions: ClassVar[tuple[str, ...]]  # the names of its attention modules
    linear1: nn.Linear
    linear2: nn.Linear
    norm_first: bool
    dropout: nn.Dropout
    activation: Callable[[Tensor], Tensor]

    @property
    def _sites(self) -> int:
        return 2 * len(self._attentions) + 2  # each sublayer's own, and its output's

    def _unsupported_reason(self) -> str | None:
        first = attention_of(self, self._attentions[0])
        for name in self._attentions:
            attention = attention_of(self, name)
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
        return unsupported_parameter(self.linear1, self.linear2, *norms)

    def _stream_output(self, stream: ResidualStream) -> Tensor:
        return stream.value().contiguous()

    def _attention_sublayer(
        self,
        stream: ResidualStream,
        site: int,
        name: str,
        visibility: Visibility,
        memory: Tensor | None = None,
    ) -> Callable[[Tensor], Tensor]:
        """Return the function x -> attention(x, memory, memory), or self-attention if no memory."""
        attention = attention_of(self, name)
        drops = attention.training and attention.dropout
        seed = stream.seeds.of(site, stream.x.device) if drops else None

        def attend(x: Tensor) -> Tensor:
            keys = x if memory is None else memory
            with ops_of(attention):
                return attention._attend(x, keys, keys, visibility, seed, stream)

        return attend

    def _feed_forward_sublayer(
        self, stream: ResidualStream, site: int
    ) -> Callable[[Tensor], Tensor]:
        """Return the function x -> linear2(dropout(activation(linear1(x))))."""
        parts = self.linear1, op_activation(self.activation), self.dropout, self.linear2
        seed = stream.seed(site, self.dropout)
        return lambda x: apply_feed_forward(x, *parts, seed, stream)


def attention_of(layer: Layer, name: str) -> FusedMultiheadAttention:
    """Return a layer's attention, as the class that `Layer._unsupported_reason` requires."""
    return getattr(layer, name)


def op_activation(function: Any) -> str | Callable[[Tensor], Tensor]:
    """Return the name of the activation in `feed_forward`, or the function if it has none there."""
    if isinstance(function, nn.Module) and not is_unmodified(function):
        return function
    if function in (F.relu, torch.relu) or type(function) is nn.ReLU:
        return "relu"
    if function is F.silu or type(function) is nn.SiLU:
        return "silu"
    if type(function) is nn.GELU:
        return "gelu" if function.approximate == "none" else "gelu_tanh"
    return "gelu" if function is F.gelu else function


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
        names = ("src_mask", "src_key_padding_mask")
        return self._forward_on_stream(
            (src, *masks),
            (is_causal,),
            lambda: (encoder_visibility(self, src, masks, is_causal, names),),
        )

    def _through(self, stream: ResidualStream, visibility: Visibility) -> None:
        if not self.training and _is_left_to_torch(stream.x, visibility) and self._is_plain():
            why = "without gradients, on a CPU, torch has the layer as one op"
            record_torch(type(self).__name__, why)
            with torch._C.DisableTorchFunction():  # else torch runs no such op within `explain`
                stream.x = self._original.forward(self, stream.value(), None, visibility.padding)
            return
        attend = self._attention_sublayer(stream, 0, "self_attn", visibility)
        feed_forward = self._feed_forward_sublayer(stream, 2)
        with ops_of(self):
            first = self.norm_first
            stream.add_sublayer(attend, self.norm1, self.dropout1, first, 1)
            stream.add_sublayer(feed_forward, self.norm2, self.dropout2, first, 3)

    def _is_plain(self) -> bool:
        """Return whether torch's op for a full layer, which reads nothing but parameters, computes
        what the submodules do.
        """
        attention, norms = attention_of(self, "self_attn"), (self.norm1, self.norm2)
        dropouts = (self.dropout, self.dropout1, self.dropout2)
        linears = (self.linear1, self.linear2)
        return (
            attention.batch_first
            and not attention._appends_keys()
            and all(isinstance(norm, FusedLayerNorm) for norm in norms)
            and all(type(linear) is nn.Linear for linear in linears)
            and all(x.bias is not None for x in (*norms, *linears))  # torch raises an error
            and all(type(x) is nn.Dropout and not x.training for x in dropouts)
            and is_unmodified(*norms, *linears, *dropouts)
            and op_activation(self.activation) in ("relu", "gelu")
        )


def _is_left_to_torch(x: Tensor, visibility: Visibility) -> bool:
    """Return whether torch's own layer runs such a call, as one op: without gradients, on a CPU,
    and with no mask but padding that leaves each query a key.
    """
    mask, bias, is_causal, packing, padding = visibility
    return not (
        x.device.type != "cpu"
        or torch.is_grad_enabled()
        or backends.current_backend() == "triton"
        or not eager(x)
        or x.dim() != 3
        or autocast_dtype(x) is not None
        or not torch.backends.mha.get_fastpath_enabled()
        or is_causal
        or bias is not None
        or packing is not None
        or (padding is None and mask is not None)
        or (padding is not None and padding.all(1).any())
    )


def encoder_visibility(
    layer: Layer,
    src: Tensor,
    masks: tuple[Tensor | None, Tensor | None],
    is_causal: bool,
    names: tuple[str, str],
) -> Visibility:
    """Check src [N, L, E], [L, N, E] or [L, E], and translate the two masks of self-attention."""
    attention = attention_of(layer, "self_attn")
    attention._require_inputs(src, src, src)
    return attention._visibility(src, src, *masks, is_causal, names)


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
        return self._forward_on_stream(
            (tgt, memory, *masks), hints, lambda: decoder_context(self, tgt, memory, masks, hints)
        )

    def _through(
        self,
        stream: ResidualStream,
        visibility: Visibility,
        memory: Tensor,
        memory_visibility: Visibility,
    ) -> None:
        attend = self._attention_sublayer(stream, 0, "self_attn", visibility)
        seen = memory_visibility, memory
        attend_to_memory = self._attention_sublayer(stream, 2, "multihead_attn", *seen)
        feed_forward = self._feed_forward_sublayer(stream, 4)
        with ops_of(self):
            first = self.norm_first
            stream.add_sublayer(attend, self.norm1, self.dropout1, first, 1)
            stream.add_sublayer(attend_to_memory, self.norm2, self.dropout2, first, 3)
            stream.add_sublayer(feed_forward, self.norm3, self.dropout3, first, 5)


def decoder_context(
    layer: Layer,
    tgt: Tensor,
    memory: Tensor,
    masks: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    hints: tuple[bool, bool],
) -> tuple[Visibility, Tensor, Visibility]:
    """Check tgt and memory, and translate torch's four masks.

    masks: tgt_mask, memory_mask, and the key padding masks of tgt and memory. hints: tgt_is_causal
    and memory_is_causal. Return the `context` arguments of a decoder layer's `_through`.
    """
    tgt_mask, memory_mask, tgt_padding, memory_padding = masks
    own, cross = attention_of(layer, "self_attn"), attention_of(layer, "multihead_attn")
    own._require_inputs(tgt, tgt, tgt)
    cross._require_inputs(tgt, memory, memory)
    names = ("tgt_mask", "tgt_key_padding_mask")
    visibility = own._visibility(tgt, tgt, tgt_mask, tgt_padding, hints[0], names)
    names = ("memory_mask", "memory_key_padding_mask")
    return (
        visibility,
        memory,
        cross._visibility(tgt, memory, memory_mask, memory_padding, hints[1], names),
    )
