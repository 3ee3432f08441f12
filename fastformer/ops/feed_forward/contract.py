"""The public functions of the feed-forward layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastformer.checks import (
    require_choice,
    require_dropout,
    require_floating,
    require_number,
    require_positive,
    shape_of,
    wrong_shape,
)
from fastformer.dispatch import backends
from fastformer.dispatch.front import autocast, front_door
from fastformer.dispatch.operation import Operation
from fastformer.ops.feed_forward import reference
from fastformer.ops.feed_forward.reference import ACTIVATIONS


@front_door
def feed_forward(
    input: Tensor,
    w_1: Tensor,
    b_1: Tensor | None,
    w_2: Tensor,
    b_2: Tensor | None,
    activation: str = "relu",
    dropout_p: float = 0.0,
    *,
    dropout_seed: int | Tensor | None = None,
) -> Tensor:
    """Compute dropout(activation(input w_1^T + b_1)) w_2^T + b_2.

    Bias, activation and dropout are the epilogue of the first GEMM. The second GEMM is torch's own,
    because there is nothing left to fuse with it.

    Args:
        input: [..., d], float32, float16, bfloat16 or float64.
        w_1: [d_ff, d], b_1: [d_ff] or None, as nn.Linear stores them.
        w_2: [d_out, d_ff], b_2: [d_out] or None.
        activation: "relu", "gelu" (by erf), "gelu_tanh", "silu", "sigmoid" or "relu2", the square
            of relu.
        dropout_p: probability in [0, 1] that a hidden element is dropped, as in
            `scaled_dot_product_attention`.
        dropout_seed: as in `scaled_dot_product_attention`; the mask is a function of the seed and
            (token, hidden unit).

    Returns:
        [..., d_out] in the dtype of the input.

    Raises:
        ValueError: shapes that do not fit, an unknown activation, dropout_p outside [0, 1], tensors
            on several devices.
        TypeError: dtypes that differ or are not floating.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.3; GELU: Hendrycks and
    Gimpel 2016; SiLU: Elfwing et al. 2017; relu2: So et al. 2021, "Primer", section 4.
    """
    input, w_1, b_1, w_2, b_2 = autocast(input, w_1, b_1, w_2, b_2)
    _require_layers(1, input=input, w_1=w_1, b_1=b_1, w_2=w_2, b_2=b_2)
    require_choice("activation", activation, ACTIVATIONS)
    p = require_dropout("dropout_p", dropout_p)
    return backends.run(
        "feed_forward",
        input=input,
        w_1=w_1,
        b_1=b_1,
        w_2=w_2,
        b_2=b_2,
        activation=activation,
        dropout_p=p,
        dropout_seed=backends.seed_for(dropout_seed, p, input.device),
    )


@front_door
def geglu(
    input: Tensor,
    w: Tensor,
    b: Tensor | None,
    w_2: Tensor,
    b_2: Tensor | None,
    dropout_p: float = 0.0,
    *,
    dropout_seed: int | Tensor | None = None,
) -> Tensor:
    """Compute dropout(gelu(z) v) w_2^T + b_2, with [z, v] = input w^T + b.

    The GEMMs are torch's own; one kernel computes activation, product and dropout, and one kernel
    their backward.

    Args:
        input: [..., d], float32, float16, bfloat16 or float64.
        w: [2 d_ff, d]: the rows for z, then the rows for v. b: [2 d_ff] or None.
        w_2: [d_out, d_ff], b_2: [d_out] or None.
        dropout_p, dropout_seed: as in `feed_forward`.

    Returns:
        [..., d_out] in the dtype of the input.

    Raises:
        ValueError: shapes that do not fit, an odd number of rows of w, dropout_p outside [0, 1],
            tensors on several devices.
        TypeError: dtypes that differ or are not floating.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", section 2.
    """
    return _gated("geglu", (input, w, b, w_2, b_2), dropout_p, dropout_seed, {})


@front_door
def swiglu(
    input: Tensor,
    w: Tensor,
    b: Tensor | None,
    w_2: Tensor,
    b_2: Tensor | None,
    dropout_p: float = 0.0,
    *,
    dropout_seed: int | Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
) -> Tensor:
    """Compute dropout(silu(z) v) w_2^T + b_2, with [z, v] = input w^T + b: `geglu` with silu.

    Args:
        input, w, b, w_2, b_2: [..., d], [2 d_ff, d], [2 d_ff], [d_out, d_ff] and [d_out], as in
            `geglu`.
        dropout_p, dropout_seed: as in `feed_forward`.
        alpha, limit, offset: as in `gated_activation`.

    Returns:
        [..., d_out] in the dtype of the input.

    Raises:
        ValueError, TypeError: what `geglu` and `gated_activation` raise.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", section 2.
    """
    form = _form("silu", alpha, limit, offset)
    return _gated("swiglu", (input, w, b, w_2, b_2), dropout_p, dropout_seed, form)


@front_door
def gated_activation(
    gate: Tensor,
    value: Tensor,
    activation: str = "silu",
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
) -> Tensor:
    """Compute f(g) (v + offset), elementwise, with g = min(gate, limit) and
    v = min(max(value, -limit), limit); by default it is f(gate) * value.

    This is what lies between the GEMMs of a gated feed-forward layer, for layers whose projections
    are separate modules or have adapters or quantized weights. With "sigmoid" it is the gate of an
    attention output. With alpha = 1.702, limit = 7 and offset = 1 it is the clamped SwiGLU of
    gpt-oss.

    One kernel computes it and one kernel both gradients, from gate and value, which are saved.

    Args:
        gate, value: [..., d_ff], float32, float16, bfloat16 or float64, of one shape and dtype, any
            strides: the halves of a joined product are read where they lie.
        activation: "silu", "gelu", "gelu_tanh", "relu", "sigmoid" or "relu2", the square of relu.
        alpha: silu is g sigmoid(alpha g). 1 for the other activations.
        limit: a positive number, or None for no limit. Elements beyond it have gradient 0.
        offset: a number that is added to v.

    Returns:
        [..., d_ff] in the dtype of gate, computed in float32 (float64 for float64).

    Raises:
        ValueError: scalars, shapes that differ, an unknown activation, an alpha beside another
            activation than silu, a number out of its range, tensors on several devices.
        TypeError: dtypes that differ or are not floating, alpha, limit or offset that is no number.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", section 2; the limit: OpenAI 2025,
    "gpt-oss-120b & gpt-oss-20b Model Card"; sigmoid: Qiu et al. 2025, "Gated Attention for Large
    Language Models"; relu2: So et al. 2021, "Primer", section 4.
    """
    gate, value = autocast(gate, value)
    require_floating(gate=gate, value=value)
    if gate.dim() < 1 or gate.shape != value.shape:
        raise wrong_shape("value", value, f"[..., d_ff] as gate {shape_of(gate)}")
    require_choice("activation", activation, ACTIVATIONS)
    form = _form(activation, alpha, limit, offset)
    return backends.run("gated_activation", gate=gate, value=value, activation=activation, **form)


def _gated(
    op: str,
    given: tuple[Tensor | None, ...],
    dropout_p: float,
    dropout_seed: int | Tensor | None,
    form: dict[str, Any],
) -> Tensor:
    """Check the arguments of a gated feed-forward layer, and run it. form: what `_form` returns."""
    tensors: dict[str, Any] = dict(zip(("input", "w", "b", "w_2", "b_2"), autocast(*given)))
    _require_layers(2, **tensors)
    input, p = tensors["input"], require_dropout("dropout_p", dropout_p)
    seed = backends.seed_for(dropout_seed, p, input.device)
    return backends.run(op, **tensors, dropout_p=p, dropout_seed=seed, **form)


def _form(activation: str, alpha: float, limit: float | None, offset: float) -> dict[str, Any]:
    """Check the numbers of a gated form, and return them by name."""
    alpha, offset = require_positive("alpha", alpha), require_number("offset", offset)
    if not abs(offset) < float("inf"):
        raise ValueError(f"offset is {offset}; expected a finite number")
    if alpha != 1 and activation != "silu":
        raise ValueError(f"alpha is {alpha} beside activation {activation!r}; expected 'silu'")
    limit = None if limit is None else require_positive("limit", limit)
    return {"alpha": alpha, "limit": limit, "offset": offset}


def _require_layers(halves: int, **tensors: Any) -> None:
    """Check the input and two linear layers, with the names that the caller gave them; the output
    of the first is `halves` hidden vectors, concatenated.
    """
    _, w_name, b_name, *_ = tensors
    input, w, b, w_2, b_2 = tensors.values()
    rows = "d_ff" if halves == 1 else f"{halves} d_ff"
    require_floating((b_name, "b_2"), **tensors)
    if input.dim() < 1:
        raise ValueError("input is a scalar; expected [..., d]")
    if w.dim() != 2 or w.shape[1] != input.shape[-1] or w.shape[0] % halves:
        raise wrong_shape(
            w_name, w, f"[{rows}, d] with d = {input.shape[-1]}, as input {shape_of(input)}"
        )
    width = w.shape[0] // halves
    if w_2.dim() != 2 or w_2.shape[1] != width:
        raise wrong_shape("w_2", w_2, f"[d_out, d_ff] with d_ff = {width}")
    for name, bias, like, weight in ((b_name, b, w_name, w), ("b_2", b_2, "w_2", w_2)):
        if bias is not None and bias.shape != weight.shape[:1]:
            raise wrong_shape(name, bias, f"[{weight.shape[0]}], the rows of {like}")


# ----------------------------------------------------------------------- the record of the dispatch


for _contract in (feed_forward, geglu, swiglu, gated_activation):
    _rows = ("gate", "value") if _contract is gated_activation else ("input",)
    _reference = getattr(reference, _contract.__name__)
    _batched = dict.fromkeys((*_rows, "output", "saved"), 0)
    backends.register(Operation("feed_forward", _contract, _reference, _rows, _batched))
