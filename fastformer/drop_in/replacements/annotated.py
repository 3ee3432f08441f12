"""The attention, norm and feed-forward of the Annotated Transformer on the ops.

These classes have no package to import from: each project has its own copy. `accelerate`
recognizes a class by its attributes, and compares trial runs of both forwards before it replaces
the class.

Source: Huang et al. 2018, "The Annotated Transformer" (harvardnlp).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.description import MAX_HEAD_DIM
from fastformer.drop_in.replacements.base import Recognized, has_only, ops_of, unsupported_tensor
from fastformer.nn.attention import MultiHeadedAttention
from fastformer.nn.feed_forward import PositionwiseFeedForward
from fastformer.nn.stream import is_unmodified
from fastformer.ops import functional


class FusedAnnotatedAttention(Recognized, MultiHeadedAttention):
    keep_attention = False
    sinks = None
    attn = None  # for an original class that does not set it
    query_norm = key_norm = gate = None

    @property
    def kv_heads(self) -> int:  # type: ignore[override]
        return self.h

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        reason = unsupported_tensor(query, key, value, mask)
        if reason is None and self.d_k > MAX_HEAD_DIM:
            reason = f"the head dim is {self.d_k}; the kernels take up to {MAX_HEAD_DIM}"
        if type(self.dropout) is not nn.Dropout or not is_unmodified(self.dropout):
            reason = "its dropout has hooks or was replaced"
        if reason is None and mask is not None and mask.dim() != 3:
            reason = f"the mask has {mask.dim()} dimensions, not three"
        if reason is not None:
            return self._run_original(reason, query, key, value, mask)
        if mask is not None and mask.is_floating_point():
            mask = mask != 0  # the original masks out exactly the zeros
        with ops_of(self):
            return MultiHeadedAttention.forward(self, query, key, value, mask)

    @staticmethod
    def _matches(module: Any) -> bool:
        if not has_only(module, linears=nn.ModuleList, dropout=nn.Dropout):
            return False
        linears, h, d_k = module.linears, getattr(module, "h", None), getattr(module, "d_k", None)
        if len(linears) != 4 or not (isinstance(h, int) and isinstance(d_k, int)):
            return False
        sizes = {(x.in_features, x.out_features) for x in linears if isinstance(x, nn.Linear)}
        return sizes == {(h * d_k, h * d_k)}

    def _probes(self, random: Callable[..., Tensor]) -> Iterator[tuple[Tensor | None, ...]]:
        query, memory = random(2, 130, self.h * self.d_k), random(2, 150, self.h * self.d_k)
        lengths = torch.tensor([[[150]], [[70]]], device=query.device)
        padding = torch.arange(150, device=query.device) < lengths
        causal = torch.ones(1, 130, 130, dtype=torch.bool, device=query.device).tril()
        yield query, memory, memory, None
        yield query, memory, memory, padding
        yield query, query, query, causal


class FusedAnnotatedNorm(Recognized):
    a_2: nn.Parameter
    b_2: nn.Parameter
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        reason = unsupported_tensor(x, self.a_2, self.b_2)
        if x.dtype != self.a_2.dtype:  # the original returns the promoted dtype
            reason = f"the input is {x.dtype}, the weight {self.a_2.dtype}"
        if reason is not None:
            return self._run_original(reason, x)
        with ops_of(self):
            shape = self.a_2.shape
            return functional.layer_norm(x, shape, self.a_2, self.b_2, self.eps, unbiased=True)

    @staticmethod
    def _matches(module: Any) -> bool:
        if not has_only(module, a_2=nn.Parameter, b_2=nn.Parameter):
            return False
        a, b, eps = module.a_2, module.b_2, getattr(module, "eps", None)
        return a.dim() == 1 and a.shape == b.shape and len(a) > 1 and isinstance(eps, float)

    def _probes(self, random: Callable[..., Tensor]) -> Iterator[tuple[Tensor | None, ...]]:
        x = random(2, 3, len(self.a_2))
        yield (x * 0.01 + 1,)  # a small variance shows where eps is added
        yield (x,)


class FusedAnnotatedFeedForward(Recognized, PositionwiseFeedForward):
    activation = "relu"  # for an original class that does not set it

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        reason = unsupported_tensor(x)
        if reason is not None:
            return self._run_original(reason, x)
        with ops_of(self):
            return PositionwiseFeedForward.forward(self, x)

    @staticmethod
    def _matches(module: Any) -> bool:
        kinds = has_only(module, w_1=nn.Linear, w_2=nn.Linear, dropout=nn.Dropout)
        return kinds and module.w_1.out_features == module.w_2.in_features

    def _probes(self, random: Callable[..., Tensor]) -> Iterator[tuple[Tensor | None, ...]]:
        yield (random(2, 3, self.w_1.in_features),)
