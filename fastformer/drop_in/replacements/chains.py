"""Feed-forward layers and norms of residual sums, in the forwards of any module, on the ops.

The new methods come from rewriting.py. They call the methods of `FusedChains` with the submodules
of a chain: `feed_forward` runs a linear layer, an activation, dropout, and a linear layer;
`dropout_add_layer_norm` and `dropout_add_rms_norm` run dropout, a residual sum, and its norm.

Source: Vaswani et al. 2017, "Attention Is All You Need", sections 3.1 and 3.3.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.checks import autocast_dtype
from fastformer.drop_in.replacements.base import (
    AnySignature,
    ops_of,
    record_fallback,
    unsupported_tensor,
    unsupported_weight,
)
from fastformer.drop_in.replacements.layers import op_activation
from fastformer.drop_in.replacements.rewriting import methods_of, rewritten
from fastformer.nn.stream import is_unmodified
from fastformer.ops import functional
from fastformer.ops.feed_forward.reference import ACTIVATIONS

# A sum, with its norm if one kernel has computed both, and the version of the sum.
Sum = tuple[Tensor | None, Any, int | None]


# Whose modules are rewritten, and whose activations are recognized by a trial run. A forward may be
# rewritten only if what it calls between the links changes nothing that they read. The types of
# transformers have been compared with their originals, one by one.
PACKAGES = ("transformers",)


def is_known(module: nn.Module) -> bool:
    """Return whether the class of a module is one of `PACKAGES`."""
    return type(module).__module__.partition(".")[0] in PACKAGES


class FusedChains(AnySignature):
    """A module whose methods are rewritten: what they compute stays, by other calls.

    A link is a submodule, a function, a number (the probability of a dropout) or, for a cast, a
    tuple of a function.
    """

    # By class, the activations that trial runs have recognized; `accelerate` sets it.
    _activations: ClassVar[dict[type, str]] = {}
    _after: ClassVar[Callable[..., Any] | None] = None
    _links: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def _members_for(cls, original: type[nn.Module]) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for name, method in methods_of(original).items():
            if method is nn.Sequential.forward:
                members[name] = lambda self, input: self._run_chain(input, *self)
            elif (found := rewritten(method)) is not None:
                if found.function is not None:
                    members[name] = found.function
                if name == "forward":
                    members |= {"_after": found.after, "_links": found.links}
        return members

    def _run_chain(self, x: Any, *links: Any) -> Any:
        """Apply the links to x, the first one first."""
        found = _feed_forward(links, self._name)
        if not isinstance(found, _FeedForward):
            return _each(x, links)
        x = _each(x, links[: found.first])
        w_1, w_2 = links[found.first], links[found.last]
        parameters = _parameters(w_1), _parameters(w_2)
        reason = unsupported_weight(*parameters) or unsupported_tensor(x)
        if reason is None and autocast_dtype(x) is None:
            for weight, _ in parameters:
                if weight.dtype != x.dtype:
                    reason = f"the input is {x.dtype}, a weight {weight.dtype}"
        if reason is not None:
            record_fallback(self, type(self).__name__, reason)
            return _each(x, links[found.first :])
        (a, b), (c, d) = parameters
        with ops_of(self):
            x = functional.feed_forward(x, a, b, c, d, found.activation, found.dropout)
        return _each(x, links[found.last + 1 :])

    def _name(self, activation: Any) -> str | None:
        """Return the name in `feed_forward` of an activation, or None."""
        name = op_activation(activation)
        if isinstance(name, str):
            return name
        known = isinstance(activation, nn.Module) and is_unmodified(activation)
        return self._activations.get(type(activation)) or None if known else None

    def _add_chain(
        self, norm: Any, residual: Any, x: Any, *links: Any, reverse: bool = False
    ) -> Sum:
        """Add links(x) to the residual; and normalize the sum, if one kernel can do both. reverse:
        the residual is the second operand.
        """
        p = _dropped(links[-1]) if links else None
        if p is not None:
            links = links[:-1]
        x, p = self._run_chain(x, *links), p or 0.0
        if not _can_fuse(norm, residual, x):
            x = F.dropout(x, p) if p else x
            return None, x + residual if reverse else residual + x, None
        with ops_of(self):
            normalized, total = vars(type(norm))["after_sum"](norm, x, residual, p, None, None)
        counted = not (torch.compiler.is_compiling() or total.is_inference())
        return normalized, total, total._version if counted else None

    def _norm_of(self, norm: Any, x: Any, found: Sum | None) -> Any:
        """Return norm(x), which exists already if x is the sum of `found`."""
        if found is None or found[0] is None or found[1] is not x:
            return norm(x)
        return found[0] if found[2] is None or found[2] == x._version else norm(x)

    def _norm_of_sum(self, norm: Any, *given: Any, **named: Any) -> Any:
        found = self._add_chain(norm, *given, **named)
        return self._norm_of(norm, found[1], found)

    def _run_pair(self, outer: Any, inner: Any, x: Any, *given: Any) -> Any:
        """Return outer(inner(x), *given), where a feed-forward may begin in inner, and end in
        outer.
        """
        known = isinstance(outer, FusedChains) and isinstance(inner, FusedChains)
        if not known or not is_unmodified(outer, inner) or not (outer._after and inner._links):
            return outer(inner(x), *given)
        return outer._after([_submodule(inner, path) for path in inner._links], x, *given)


class _FeedForward(NamedTuple):
    """A feed-forward layer within links: the indices of its linear layers, and what is between."""

    first: int
    activation: str
    dropout: float
    last: int


def _feed_forward(
    links: Sequence[Any], name: Callable[[Any], str | None]
) -> _FeedForward | str | None:
    """Find the feed-forward layer in links that hold two linear layers and no more. Return why a
    chain of that form is none, or None for another form.
    """
    linears = [i for i, link in enumerate(links) if isinstance(link, nn.Linear) or _is_conv(link)]
    if len(linears) != 2 or linears[1] < linears[0] + 2:
        return None
    first, last = linears
    # A cast is none where all parameters have one dtype.
    between = [link for link in links[first + 2 : last] if type(link) is not tuple]
    p = _dropped(between[0]) if between else 0.0
    if p is None or len(between) > 1:
        return f"it computes {type(between[-1]).__name__} between its two linear layers"
    activation = name(links[first + 1])
    if activation is None:
        kind = getattr(links[first + 1], "__name__", type(links[first + 1]).__name__)
        return f"its activation {kind} is none of {', '.join(ACTIVATIONS)}, by a trial run"
    for link in (links[first], links[last]):
        if not (type(link) is nn.Linear or _is_conv(link)) or not is_unmodified(link):
            return f"a {type(link).__name__} is no plain linear layer"
    return _FeedForward(first, activation, p, last)


def _each(x: Any, links: Sequence[Any]) -> Any:
    """Apply the links to x one by one."""
    for link in links:
        if isinstance(link, (int, float)):
            x = F.dropout(x, link)
        else:
            x = link[0](x) if type(link) is tuple else link(x)
    return x


def _dropped(link: Any) -> float | None:
    """Return the probability with which a dropout drops now, or None if the link is no dropout."""
    if isinstance(link, (int, float)):
        return float(link)
    if type(link) is not nn.Dropout or link.inplace or not is_unmodified(link):
        return None
    return link.p if link.training else 0.0


def _is_conv(link: Any) -> bool:
    """Return whether a link is transformers' Conv1D: a linear layer, its weight transposed."""
    cls = type(link)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def _parameters(linear: Any) -> tuple[Tensor, Tensor | None]:
    return linear.weight.t() if _is_conv(linear) else linear.weight, linear.bias


def _can_fuse(norm: Any, residual: Any, x: Any) -> bool:
    """Return whether the norm can add x to the residual in its kernel."""
    if not (isinstance(x, Tensor) and isinstance(residual, Tensor)) or x.shape != residual.shape:
        return False
    if "after_sum" not in vars(type(norm)) or not is_unmodified(norm):
        return False
    if x.dtype != residual.dtype and autocast_dtype(x) is None:
        return False
    return x.is_floating_point() and unsupported_tensor(x, residual) is None


def _submodule(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


# ------------------------------------------------------------------------- what accelerate asks


class Fitting(NamedTuple):
    """What `accelerate` replaces so that the chains of a module run on the ops: the module, and the
    submodules that hold a part of its feed-forward; and the activations that they hold, by class.
    """

    modules: list[nn.Module]
    activations: dict[type, str]


def chains_of(module: nn.Module, fuses_sum: Callable[[Any], bool]) -> Fitting | str | None:
    """Return what to replace, or why a chain does not fit, or None if the module has none.

    fuses_sum: whether a submodule is a norm that will run its sum in the same kernel.
    """
    activations: dict[type, str] = {}
    parts: list[nn.Module] = []
    fits, reason = False, None

    def check(links: list[Any]) -> bool:
        nonlocal fits, reason
        found = _feed_forward(links, lambda f: _recognized(f, activations))
        fits |= isinstance(found, _FeedForward)
        reason = found if isinstance(found, str) else reason
        return isinstance(found, _FeedForward)

    def links_of(owner: nn.Module, whats: Sequence[Any]) -> list[Any]:
        special: dict[Any, Any] = {F.dropout: 0.0, None: (None,)}
        return [_submodule(owner, x) if isinstance(x, str) else special.get(x, x) for x in whats]

    for method in methods_of(type(module)).values():
        if method is nn.Sequential.forward:
            check(list(module.children()))
            continue
        found = rewritten(method)
        if found is None:
            continue
        for whats in found.chains:
            check(links_of(module, whats))
        for path, whats in found.norms:
            embeds = any(isinstance(x, nn.Embedding) for x in links_of(module, whats))
            fits |= fuses_sum(_submodule(module, path)) and not embeds  # often of other shapes
        for paths in found.pairs:
            pair = [_submodule(module, path) for path in paths]
            forwards = [methods_of(type(x)).get("forward") for x in pair]
            outer, inner = (rewritten(f) if f is not None else None for f in forwards)
            if outer is None or inner is None or outer.after is None or not inner.links:
                continue
            if check(links_of(pair[1], inner.links) + links_of(pair[0], (outer.first,))):
                parts += pair
    return Fitting([module, *parts], activations) if fits else reason


def _recognized(activation: Any, known: dict[type, str]) -> str | None:
    """Return the name in `feed_forward` of an activation, by a trial run if its class does not say
    it; then `known` has its class.
    """
    name = op_activation(activation)
    if isinstance(name, str) or not isinstance(activation, nn.Module):
        return name if isinstance(name, str) else None
    tensors = [*activation.parameters(), *activation.buffers()]
    if tensors or not is_unmodified(activation) or not is_known(activation):
        return None
    with torch.random.fork_rng([]):
        names = [name for name, function in ACTIVATIONS.items() if _agree(activation, function)]
    found = "".join(names[:1])
    if known.setdefault(type(activation), found) != found:  # two of a class, with other settings
        known[type(activation)] = ""
    return known[type(activation)] or None


def _agree(activation: nn.Module, function: Callable[[Tensor], Tensor]) -> bool:
    """Return whether values and gradients agree, in float64, in evaluation and in training."""
    large = [10.0**i for i in range(2, 7)]
    grid = [*torch.linspace(-60, 60, 1201).tolist(), *large, *(-x for x in large)]
    x = torch.tensor(grid, dtype=torch.float64, device="cpu").view(7, -1)
    found = []
    try:
        both = [copy.deepcopy(activation).train(mode) for mode in (False, True)]
        functions: list[Callable[[Tensor], Tensor]] = [*both, function]
        for f in functions:
            given = x.clone().requires_grad_()
            y = f(given)
            found.append((y, torch.autograd.grad(y.sin().sum(), given)[0]))
        ours = found.pop()
        same = (
            a.shape == b.shape and torch.allclose(a, b, 1e-7, 1e-7)
            for theirs in found
            for a, b in zip(theirs, ours)
        )
        return all(same)
    except Exception:  # whatever the activation raises, it is no such function
        return False
