"""The standard Transformer on fused Triton kernels, with a PyTorch reference for every op."""

from pathlib import Path

from fastformer._version import __version__

_here = Path(__file__).resolve().parent
if not (_here / "kernels").is_dir():  # a checkout: kernels/ stands beside this folder
    __path__.append(str(_here.parent))

from fastformer.backends import current_backend, explain, use_backend  # noqa: E402
from fastformer.decoding import greedy_decode  # noqa: E402
from fastformer.functional import (  # noqa: E402
    feed_forward,
    layer_norm,
    scaled_dot_product_attention,
)
from fastformer.modules import (  # noqa: E402
    Embeddings,
    LayerNorm,
    MultiHeadedAttention,
    PositionalEncoding,
    PositionwiseFeedForward,
    SublayerConnection,
    attention,
    clones,
)
from fastformer.training import (  # noqa: E402
    Batch,
    LabelSmoothing,
    SimpleLossCompute,
    make_optimizer,
    rate,
    run_epoch,
)
from fastformer.transformer import (  # noqa: E402
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderDecoder,
    EncoderLayer,
    Generator,
    make_model,
    subsequent_mask,
)

__all__ = [
    "Batch",
    "Decoder",
    "DecoderLayer",
    "Embeddings",
    "Encoder",
    "EncoderDecoder",
    "EncoderLayer",
    "Generator",
    "LabelSmoothing",
    "LayerNorm",
    "MultiHeadedAttention",
    "PositionalEncoding",
    "PositionwiseFeedForward",
    "SimpleLossCompute",
    "SublayerConnection",
    "__version__",
    "attention",
    "clones",
    "current_backend",
    "explain",
    "feed_forward",
    "greedy_decode",
    "layer_norm",
    "make_model",
    "make_optimizer",
    "rate",
    "run_epoch",
    "scaled_dot_product_attention",
    "subsequent_mask",
    "use_backend",
]
