"""The feed-forward layer."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from fastformer.checks import require_choice, require_size
from fastformer.nn.base import AliasedModule, make_dropout, require_linear_input
from fastformer.nn.stream import GATED, ResidualStream, apply_feed_forward
from fastformer.ops.feed_forward import reference

ACTIVATIONS = (*reference.ACTIVATIONS, *GATED)  # of the feed-forward layer


class PositionwiseFeedForward(AliasedModule):
    """w_2(dropout(activation(w_1(x)))); gated, w_2(dropout(activation(z) * v)), [z, v] = w_1(x).

    Args:
        d_model: features in and out.
        d_ff: hidden features. A gated form has 3 d_model d_ff weights instead of 2 d_model d_ff;
            with two thirds of the d_ff it has as many as the other forms.
        dropout: probability that a hidden element is dropped, in training.
        activation: "relu", "gelu" (by erf), "gelu_tanh", "silu", "sigmoid" or "relu2", the square
            of relu; or a gated form, "geglu" or "swiglu", where the first d_ff rows of w_1 compute
            z and the last d_ff rows v.

    forward(x, dropout_seed=None): x [..., d_model] -> [..., d_model]. dropout_seed: as in
    `feed_forward`.

    Raises:
        ValueError: an unknown activation; x has another width than d_model, or is on another device
            than the parameters.
        TypeError: x has another dtype than the parameters.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.3; the gated forms: Shazeer
    2020, "GLU Variants Improve Transformer", section 2.
    """

    spellings: ClassVar[dict[str, str]] = {"w1": "w_1", "w2": "w_2"}

    def __init__(
        self, d_model: int, d_ff: int, dropout: float = 0.1, activation: str = "relu"
    ) -> None:
        super().__init__()
        d_model, d_ff = require_size(d_model=d_model, d_ff=d_ff)
        self.activation = require_choice("activation", activation, ACTIVATIONS)
        self.w_1 = nn.Linear(d_model, 2 * d_ff if activation in GATED else d_ff)
        self.w_2 = nn.Linear(d_ff, d_model)
        self.dropout = make_dropout(dropout)

    def forward(
        self,
        x: Tensor,
        dropout_seed: Tensor | None = None,
        *,
        _stream: ResidualStream | None = None,
    ) -> Tensor:
        require_linear_input("x", x, self.w_1)
        layers = self.w_1, self.activation, self.dropout, self.w_2
        return apply_feed_forward(x, *layers, dropout_seed, _stream)

    def extra_repr(self) -> str:
        return "" if self.activation == "relu" else f"activation={self.activation}"
