"""The forwards that `accelerate` gives to the modules of torch, of the Annotated Transformer and of
Hugging Face.

`accelerate` replaces a module by changing its class: the new class derives from the original one
and from a class of this package, a kind, which overrides `forward` with the original signature and
calls the ops of `fastformer.ops.functional`. A call that the ops cannot run falls back to the
original forward, and is counted on the module.
"""

from __future__ import annotations

from torch import nn

from fastformer.drop_in.replacements import (
    annotated,
    attention,
    layers,
    norms,
    stacks,
    transformers_layers,
)
from fastformer.drop_in.replacements.base import Accelerated, Recognized

KINDS: dict[type[nn.Module], type[Accelerated]] = {
    nn.MultiheadAttention: attention.FusedMultiheadAttention,
    nn.TransformerEncoderLayer: layers.FusedTransformerEncoderLayer,
    nn.TransformerDecoderLayer: layers.FusedTransformerDecoderLayer,
    nn.TransformerEncoder: stacks.FusedTransformerEncoder,
    nn.TransformerDecoder: stacks.FusedTransformerDecoder,
    nn.Transformer: stacks.FusedTransformer,
    nn.LayerNorm: norms.FusedLayerNorm,
    nn.RMSNorm: norms.FusedRMSNorm,
}  # by the class that a kind replaces, with its subclasses
RECOGNIZED: tuple[type[Recognized], ...] = (
    annotated.FusedAnnotatedAttention,
    annotated.FusedAnnotatedNorm,
    annotated.FusedAnnotatedFeedForward,
    transformers_layers.FusedRootMeanSquareNorm,
    transformers_layers.FusedCenteredRootMeanSquareNorm,
    transformers_layers.FusedGatedFeedForward,
)  # by their structure, and a trial run
