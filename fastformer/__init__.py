"""The standard Transformer on fused Triton kernels, with a PyTorch reference for every op."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastformer._version import __version__

_here = Path(__file__).resolve().parent
if not (_here / "kernels").is_dir():  # a checkout: kernels/ stands beside this folder
    __path__.append(str(_here.parent))

from fastformer.batch_invariance import batch_invariant
from fastformer.cache.contiguous import KVCache
from fastformer.cache.decoder import DecoderCache
from fastformer.decoding.search import (
    Hypotheses,
    beam_search,
    greedy_decode,
    sample,
    stream_tokens,
    strip,
)
from fastformer.dispatch.backends import current_backend, use_backend
from fastformer.drop_in.explanation import Explanation, explain
from fastformer.drop_in.patch import Report, accelerate, restore
from fastformer.drop_in.sdpa import sdpa_override
from fastformer.drop_in.transformers_attention import register_transformers
from fastformer.mask_tiles import BlockMask, block_mask
from fastformer.nn.attention import MultiHeadedAttention, attention
from fastformer.nn.base import clones
from fastformer.nn.embeddings import Embeddings, PositionalEncoding, RotaryEmbedding
from fastformer.nn.feed_forward import PositionwiseFeedForward
from fastformer.nn.norms import LayerNorm, RMSNorm, SublayerConnection
from fastformer.nn.padding import Packing, pad, unpad
from fastformer.nn.saving import load_model, save_model
from fastformer.nn.stacks import Decoder, DecoderLayer, Encoder, EncoderLayer
from fastformer.nn.transformer import (
    EncoderDecoder,
    Generator,
    LanguageModel,
    make_decoder,
    make_model,
    subsequent_mask,
)
from fastformer.ops import records as records  # which register the ops
from fastformer.ops.functional import (
    attention_weights,
    cross_entropy,
    dropout_add_layer_norm,
    dropout_add_rms_norm,
    embed,
    feed_forward,
    gated_activation,
    geglu,
    layer_norm,
    linear_cross_entropy,
    linear_kl_div,
    packed_attention,
    rms_norm,
    rotary_embedding,
    scaled_dot_product_attention,
    swiglu,
)
from fastformer.ops.rotary.frequencies import rotary_frequencies
from fastformer.training.batches import Batch, token_batches
from fastformer.training.checkpoints import Checkpoints
from fastformer.training.fit import Fitted, fit
from fastformer.training.training import (
    LabelSmoothing,
    SimpleLossCompute,
    make_optimizer,
    rate,
    run_epoch,
)
from fastformer.tuning import Tuning, tune
from fastformer.warming import warm_up

if TYPE_CHECKING:
    from fastformer.drop_in.graph.compile import (
        InductorPass,
        dynamo_backend,
        dynamo_backend_eager,
        fusing,
        inductor_pass,
    )

_OF_COMPILE = {"InductorPass", "dynamo_backend", "dynamo_backend_eager", "fusing", "inductor_pass"}


def __getattr__(name: str) -> Any:
    if name not in _OF_COMPILE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fastformer.drop_in.graph import compile  # imports a part of dynamo

    return getattr(compile, name)


__all__ = [
    "Batch",
    "BlockMask",
    "Checkpoints",
    "Decoder",
    "DecoderCache",
    "DecoderLayer",
    "Embeddings",
    "Encoder",
    "EncoderDecoder",
    "EncoderLayer",
    "Explanation",
    "Fitted",
    "Generator",
    "Hypotheses",
    "InductorPass",
    "KVCache",
    "LabelSmoothing",
    "LanguageModel",
    "LayerNorm",
    "MultiHeadedAttention",
    "Packing",
    "PositionalEncoding",
    "PositionwiseFeedForward",
    "RMSNorm",
    "Report",
    "RotaryEmbedding",
    "SimpleLossCompute",
    "SublayerConnection",
    "Tuning",
    "__version__",
    "accelerate",
    "attention",
    "attention_weights",
    "batch_invariant",
    "beam_search",
    "block_mask",
    "clones",
    "cross_entropy",
    "current_backend",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "dynamo_backend",
    "dynamo_backend_eager",
    "embed",
    "explain",
    "feed_forward",
    "fit",
    "fusing",
    "gated_activation",
    "geglu",
    "greedy_decode",
    "inductor_pass",
    "layer_norm",
    "linear_cross_entropy",
    "linear_kl_div",
    "load_model",
    "make_decoder",
    "make_model",
    "make_optimizer",
    "packed_attention",
    "pad",
    "rate",
    "register_transformers",
    "restore",
    "rms_norm",
    "rotary_embedding",
    "rotary_frequencies",
    "run_epoch",
    "sample",
    "save_model",
    "scaled_dot_product_attention",
    "sdpa_override",
    "stream_tokens",
    "strip",
    "subsequent_mask",
    "swiglu",
    "token_batches",
    "tune",
    "unpad",
    "use_backend",
    "warm_up",
]
