"""The forwards that `accelerate` gives to the modules of torch and of the Annotated Transformer.

`accelerate` replaces a module by changing its class: the new class derives from the original one
and from a class of this package, a kind, which overrides `forward` with the original signature and
calls the ops of `fastformer.ops.functional`. A call that the ops cannot run falls back to the
original forward, and is counted on the module.

    KINDS        torch's class -> the kind that replaces it and its subclasses
    ANNOTATED    the kinds that replace classes that look like those of the Annotated Transformer

    base.py      the class of a replaced module, fallbacks, and what `explain` records
    attention.py nn.MultiheadAttention
    layers.py    nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
    stacks.py    nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer; drop padding
    norms.py     nn.LayerNorm, nn.RMSNorm
    annotated.py the attention, norm and feed-forward of the Annotated Transformer
"""

from __future__ import annotations

from torch import nn

from fastformer.drop_in.replacements.annotated import (
    AnnotatedModule,
    FusedAnnotatedAttention,
    FusedAnnotatedFeedForward,
    FusedAnnotatedNorm,
)
from fastformer.drop_in.replacements.attention import FusedMultiheadAttention
from fastformer.drop_in.replacements.base import Accelerated
from fastformer.drop_in.replacements.layers import (
    FusedTransformerDecoderLayer,
    FusedTransformerEncoderLayer,
)
from fastformer.drop_in.replacements.norms import FusedLayerNorm, FusedRMSNorm
from fastformer.drop_in.replacements.stacks import (
    FusedTransformer,
    FusedTransformerDecoder,
    FusedTransformerEncoder,
)

__all__ = ["ANNOTATED", "KINDS"]

KINDS: dict[type[nn.Module], type[Accelerated]] = {
    nn.MultiheadAttention: FusedMultiheadAttention,
    nn.TransformerEncoderLayer: FusedTransformerEncoderLayer,
    nn.TransformerDecoderLayer: FusedTransformerDecoderLayer,
    nn.TransformerEncoder: FusedTransformerEncoder,
    nn.TransformerDecoder: FusedTransformerDecoder,
    nn.Transformer: FusedTransformer,
    nn.LayerNorm: FusedLayerNorm,
    nn.RMSNorm: FusedRMSNorm,
}
ANNOTATED: tuple[type[AnnotatedModule], ...] = (
    FusedAnnotatedAttention,
    FusedAnnotatedNorm,
    FusedAnnotatedFeedForward,
)
