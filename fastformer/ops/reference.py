"""Every op in eager PyTorch, under the names of `functional`."""

from fastformer.ops.attention.reference import (
    attention_weights,
    packed_attention,
    paged_attention,
    scaled_dot_product_attention,
)
from fastformer.ops.embedding.reference import embed
from fastformer.ops.feed_forward.reference import feed_forward, geglu, swiglu
from fastformer.ops.loss.reference import cross_entropy, linear_cross_entropy
from fastformer.ops.norms.reference import (
    dropout_add_layer_norm,
    dropout_add_rms_norm,
    layer_norm,
    rms_norm,
)

__all__ = [
    "attention_weights",
    "cross_entropy",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "embed",
    "feed_forward",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "packed_attention",
    "paged_attention",
    "rms_norm",
    "scaled_dot_product_attention",
    "swiglu",
]
