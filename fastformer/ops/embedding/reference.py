"""The embedding in eager PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.eager import transformed
from fastformer.ops.dropout import dropout, dropout_scale
from fastformer.ops.norms.reference import masked


def embed(
    tokens: Tensor,
    weight: Tensor,
    positional: Tensor | None,
    dropout_p: float = 0.0,
    *,
    scale: float | None = None,
    padding_idx: int | None = None,
    dropout_seed: Tensor | None = None,
) -> Tensor:
    scale = weight.shape[1] ** 0.5 if scale is None else scale
    if transformed() and padding_idx is not None:  # vmap of torch's op takes another row for it
        out = F.embedding(tokens.long(), weight)
        out = torch.where((tokens == padding_idx).unsqueeze(-1), out.detach(), out) * scale
    else:
        out = F.embedding(tokens.long(), weight, padding_idx) * scale
    if positional is not None:
        out = out + positional[: tokens.shape[-1]].to(out.dtype)
    if dropout_seed is None:
        return dropout(out, dropout_p)
    kept = masked(out, [weight.shape[1]], dropout_p, dropout_seed)
    return kept * dropout_scale(dropout_p)
