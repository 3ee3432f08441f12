"""nn.LayerNorm and nn.RMSNorm on the ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastformer.checks import autocast_dtype
from fastformer.dispatch.front import cast_to, front_door
from fastformer.drop_in.replacements import base
from fastformer.nn.stream import Pair
from fastformer.ops import functional


class _FusedNorm(base.Accelerated):
    def after_sum(self, x: Tensor, residual: Tensor, added: dict[str, Any]) -> Pair:
        """Return (self(sum), sum) as `LayerNorm.after_sum` of nn/ does."""
        norm: Any = self
        bias = norm.bias if isinstance(self, nn.LayerNorm) else None
        reason = _unsupported_norm(residual, norm.weight, bias, norm.eps)
        if reason is not None or norm.weight is None:
            return base.sum_then_norm(self, x, residual, added)
        given = _autocast_input(x), _autocast_input(residual), norm.weight
        if isinstance(self, nn.LayerNorm):
            found = functional.dropout_add_layer_norm(*given, bias, eps=norm.eps, **added)
        else:
            found = functional.dropout_add_rms_norm(*given, eps=norm.eps, **added)
        normalized, total = found
        return normalized, total.to(torch.promote_types(x.dtype, residual.dtype))

    def _normalized(self, op: Any, *given: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            result = op.hit(*given)
            if result is not NotImplemented:
                return result
        x, _, weight, *biases, eps = given
        reason = _unsupported_norm(x, weight, biases[0] if biases else None, eps)
        if reason is not None:
            return self._run_original(reason, x)
        with base.ops_of(self):
            return op(*given)


class FusedLayerNorm(_FusedNorm, nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        if input.is_cpu and base.is_left_to_torch(self, input):
            return self._original.forward(self, input)
        parameters = self.weight, self.bias
        return self._normalized(_layer_norm, input, self.normalized_shape, *parameters, self.eps)


class FusedRMSNorm(_FusedNorm, nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        if x.is_cpu and base.is_left_to_torch(self, x):
            return self._original.forward(self, x)
        return self._normalized(_rms_norm, x, self.normalized_shape, self.weight, self.eps)


# With plans of their own: those of calls that passed `_unsupported_norm`.
@front_door
def _layer_norm(x: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> Tensor:
    return functional.layer_norm(_autocast_input(x), shape, weight, bias, eps)


@front_door
def _rms_norm(x: Tensor, shape: Any, weight: Any, eps: float | None) -> Tensor:
    return functional.rms_norm(_autocast_input(x), shape, weight, eps)


def _autocast_input(x: Tensor) -> Tensor:
    """Return x [...] in float32 on a GPU under torch.autocast, as torch's norms receive it."""
    low = x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)
    return cast_to(x, torch.float32) if low and autocast_dtype(x) is not None else x


def _unsupported_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None
) -> str | None:
    if weight is not None and weight.dtype not in (x.dtype, torch.float32):
        return f"the input is {x.dtype}, the weight {weight.dtype}"
    if eps is not None and eps < 0:
        return f"eps is {eps}"
    return base.unsupported_weight((weight, bias), (x, None))
