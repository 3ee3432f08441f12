"""fastformer: the standard Transformer on fused Triton kernels, with a PyTorch reference for every op."""

from pathlib import Path

from fastformer._version import __version__

_here = Path(__file__).resolve().parent
if not (_here / "kernels").is_dir():  # a checkout: kernels/ stands beside this folder
    __path__.append(str(_here.parent))

from fastformer.backends import current_backend, explain, use_backend  # noqa: E402
from fastformer.functional import (  # noqa: E402
    feed_forward,
    layer_norm,
    scaled_dot_product_attention,
)

__all__ = [
    "__version__",
    "current_backend",
    "explain",
    "feed_forward",
    "layer_norm",
    "scaled_dot_product_attention",
    "use_backend",
]
