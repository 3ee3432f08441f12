"""The residual stream, which the layers of `nn` and the replacements share.

A layer adds the output of each sublayer to its input, then the next norm reads the sum. The stream
holds back each output until that norm runs, so that dropout, sum and norm are one kernel:

    stream = ResidualStream(x)
    stream.add_sublayer(attend, norm1, dropout1, norm_first)
    stream.add_sublayer(feed_forward, norm2, dropout2, norm_first)
    x = stream.value()

One kernel replaces several modules only if those modules compute what their classes say, which
`is_unmodified` checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fastformer.checks import autocast_dtype
from fastformer.dispatch import backends
from fastformer.nn.seeds import Seeds
from fastformer.ops import functional
from fastformer.ops.feed_forward import reference

Pair = tuple[Tensor, Tensor]
GATED = {"geglu": "gelu", "swiglu": "silu"}  # gated op -> its activation


class ResidualStream:
    """The sum that a stack of sublayers reads and adds to, and an output not yet added to it.

    x: [..., features], the sum without the pending output. pending: the sublayer output that is not
    added yet, of the shape of x, its dropout, which is applied first, the seed of that, and the
    bias that the output lacks; None if x is complete. seeds: those from the layer that runs on.
    ends_at: the site of the last sublayer, if no norm follows it.
    """

    def __init__(self, x: Tensor, seeds: Seeds, ends_at: int | None = None) -> None:
        self.x = x
        self.seeds = seeds
        self.ends_at = ends_at
        self.pending: tuple[Tensor, nn.Dropout, Tensor | None, Tensor | None] | None = None
        self._takes_bias = False
        self._bias: Tensor | None = None

    def seed(self, site: int, dropout: nn.Module) -> Tensor | None:
        """Return the seed of a site of the layer that runs, or None if it drops nothing."""
        if type(dropout) is not nn.Dropout or not dropout_probability(dropout):
            return None
        return self.seeds.of(site, self.x.device)

    def takes(self, bias: Tensor | None) -> bool:
        """Return whether the running sublayer has to leave out the bias of its last linear layer,
        which the kernel of the next norm then adds, and whose gradient it computes.
        """
        if bias is None or not self._takes_bias:
            return False
        self._bias = bias
        return True

    def add_sublayer(
        self,
        sublayer: Callable[[Tensor], Tensor],
        norm: nn.Module,
        dropout: nn.Module,
        norm_first: bool,
        site: int,
    ) -> None:
        """Set x to x + dropout(sublayer(norm(x))); post-norm, norm(x + dropout(sublayer(x))). site:
        that of the dropout in the layer.
        """
        x = self.normalize(norm) if norm_first else self.value()
        plain = dropout if type(dropout) is nn.Dropout and is_unmodified(dropout) else None
        followed = not norm_first or site != self.ends_at
        kernels = backends.prefers_kernels(x) and not backends.is_dtensor(x)
        self._takes_bias = plain is not None and followed and kernels and fuses_sum(norm)
        self._bias = None
        out = sublayer(x)
        self._takes_bias = False
        if plain is not None:
            self.pending = out, plain, self.seed(site, plain), self._bias
        else:
            self.x = self.x + dropout(out)
        if not norm_first:
            self.x = self.normalize(norm)

    def normalize(self, norm: nn.Module) -> Tensor:
        """Return norm(x), and add the pending output to x first.

        Both happen in one kernel if `fuses_sum(norm)`.
        """
        if self.pending is None or not fuses_sum(norm):
            return norm(self.value())
        out, dropout, seed, bias = self.pending
        if out.dtype != self.x.dtype and autocast_dtype(out) is None:
            return norm(self.value())
        added = dict(dropout_p=dropout_probability(dropout), dropout_seed=seed, input_bias=bias)
        normalized, self.x = type(norm).__dict__["after_sum"](norm, out, self.x, added)
        self.pending = None
        return normalized

    def value(self) -> Tensor:
        """Add the pending output to x and return the sum."""
        if self.pending is not None:
            self.x = add_dropped(self.x, *self.pending)
            self.pending = None
        return self.x


def fuses_sum(norm: nn.Module) -> bool:
    """Return whether a sum and this norm of it are one kernel: the class of the norm itself defines
    `after_sum`. An inherited one does not count, because a subclass may compute something else.
    """
    return "after_sum" in type(norm).__dict__ and is_unmodified(norm)


def add_dropped(
    x: Tensor,
    out: Tensor,
    dropout: nn.Module,
    seed: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return x + dropout(out + bias), [..., features]. The module draws its mask, without seed."""
    if bias is not None:
        out = (out + bias).to(out.dtype)
    return x + dropout(out)


def apply_feed_forward(
    x: Tensor,
    w_1: nn.Module,
    activation: str | Callable[[Tensor], Tensor],
    dropout: nn.Module,
    w_2: nn.Module,
    dropout_seed: Tensor | None = None,
    stream: ResidualStream | None = None,
) -> Tensor:
    """Compute w_2(dropout(activation(w_1(x)))) for x [..., features], without the bias of w_2 if
    the stream takes it.

    The op `feed_forward`, or the op of a gated form, computes it if w_1, dropout and w_2 are
    unmodified modules of torch and the activation is a name. Otherwise they are called one by one.
    """
    if (
        type(w_1) is nn.Linear
        and type(dropout) is nn.Dropout
        and type(w_2) is nn.Linear
        and isinstance(activation, str)
        and is_unmodified(w_1, dropout, w_2)
    ):
        p = dropout_probability(dropout)
        taken = stream is not None and stream.takes(w_2.bias)
        parameters = (w_1.weight, w_1.bias, w_2.weight, None if taken else w_2.bias)
        if activation in GATED:
            gated = getattr(functional, activation)
            return gated(x, *parameters, p, dropout_seed=dropout_seed)
        return functional.feed_forward(x, *parameters, activation, p, dropout_seed=dropout_seed)
    hidden = w_1(x)
    weight: Any = getattr(w_1, "weight", None)
    if backends.is_dtensor(weight) and activation in GATED and hidden.shape[-1] != len(weight):
        raise ValueError(
            f"activation is {activation!r} and w_1 returns {hidden.shape[-1]} of {len(weight)} "
            "features; expected all of them: a part holds other hidden units for z than for v"
        )
    if isinstance(activation, str) and activation in GATED:
        z, v = hidden.chunk(2, -1)
        hidden = reference.ACTIVATIONS[GATED[activation]](z) * v
    else:
        apply = activation if callable(activation) else reference.ACTIVATIONS[activation]
        hidden = apply(hidden)
    return w_2(dropout(hidden))


def dropout_probability(dropout: nn.Dropout) -> float:
    """Return the probability with which the module drops an element now: 0 in evaluation."""
    return dropout.p if dropout.training else 0.0


def is_unmodified(*modules: nn.Module) -> bool:
    """Return whether a call of each module runs the forward of its class and nothing else. It is
    False after a hook is added, `forward` is set on the instance, or `module.compile()`.
    """
    for m in modules:  # a hot path: a generator would take twice the time
        if (
            m._compiled_call_impl is not None
            or m._forward_hooks
            or m._forward_pre_hooks
            or m._backward_hooks
            or m._backward_pre_hooks
            or "forward" in m.__dict__
        ):
            return False
    return True
