"""The forwards that `accelerate` gives to modules.

`accelerate` replaces a module by changing its class: the new class derives from the original one
and from a class of this package, a kind, which overrides `forward` with the original signature. A
kind for a class of torch calls the ops of `fastformer.ops.functional`; `Rewritten`, for modules
that compute by their own code, rewrites that. A call that the ops cannot run falls back to the
original forward, and is counted on the module.
"""

from __future__ import annotations

from torch import nn

from fastformer.drop_in.replacements import attention, layers, norms, stacks
from fastformer.drop_in.replacements.base import Accelerated

KINDS: dict[type[nn.Module], type[Accelerated]] = {
    nn.MultiheadAttention: attention.FusedMultiheadAttention,
    nn.TransformerEncoderLayer: layers.FusedTransformerEncoderLayer,
    nn.TransformerDecoderLayer: layers.FusedTransformerDecoderLayer,
    nn.TransformerEncoder: stacks.FusedTransformerEncoder,
    nn.TransformerDecoder: stacks.FusedTransformerDecoder,
    nn.LayerNorm: norms.FusedLayerNorm,
    nn.RMSNorm: norms.FusedRMSNorm,
}  # by the class that a kind replaces, with its subclasses
