"""The ops: one function each, whose docstring is the contract."""

# ruff: noqa: F401  the public names, for other modules

from fastformer.ops.attention.contract import (
    attention_weights,
    packed_attention,
    scaled_dot_product_attention,
)
from fastformer.ops.embedding.contract import embed
from fastformer.ops.feed_forward.contract import (
    feed_forward,
    gated_activation,
    geglu,
    swiglu,
)
from fastformer.ops.loss.contract import cross_entropy, linear_cross_entropy, linear_kl_div
from fastformer.ops.norms.contract import (
    dropout_add_layer_norm,
    dropout_add_rms_norm,
    layer_norm,
    rms_norm,
)
from fastformer.ops.rotary.contract import rotary_embedding
