"""Finds feed-forward layers, and the loss of a last projection."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fastformer.drop_in.graph.axes import fitting, is_permute, permutation
from fastformer.drop_in.graph.nodes import (
    ELEMENTWISE,
    Emitter,
    History,
    Stays,
    arg,
    dropped,
    is_cast,
    is_dropout,
    is_like,
    is_tensor,
    name,
    number,
    same,
    source,
    tensor,
)
from fastformer.drop_in.graph.norms import Match
from fastformer.drop_in.graph.regions import (
    Region,
    is_untouched,
    known_function,
    regions,
)
from fastformer.drop_in.graph.torch_functions import left_to_torch
from fastformer.ops import functional

_FAR = [s * 10.0**i for i in range(1, 7) for s in (1, -1, 2, -2, 5, -5)]
_POINTS = torch.tensor([*torch.linspace(-9, 9, 145).tolist(), *_FAR], dtype=torch.float64)
_ACTIVATIONS: dict[Any, Any] = {
    "relu": lambda: torch.relu(_POINTS),
    "gelu": lambda: F.gelu(_POINTS),
    "gelu_tanh": lambda: F.gelu(_POINTS, approximate="tanh"),
    "silu": lambda: F.silu(_POINTS),
    "relu2": lambda: torch.relu(_POINTS) ** 2,
    "sigmoid": lambda: torch.sigmoid(_POINTS),
}


def _activation(node: Any) -> tuple[str, Region] | None:
    """Return the activation that ends at a node, and the nodes that compute it."""
    for found in regions(node, ELEMENTWISE) if is_tensor(node) else ():
        known = known_function(found, {found.input: _POINTS}, _ACTIVATIONS)
        if known is not None:
            return known, found
    return None


def feed_forward(history: History, node: fx.Node) -> Match | None:
    """Match Linear, activation, dropout, Linear, or the product of a gate before a Linear."""
    if left_to_torch(node):
        return None
    if name(node) == "mul":
        return _gated(history, node)
    layer = name(node)
    if layer != "linear" and not _is_pointwise(node):
        return None
    hidden, p, dropouts = source(node), 0.0, []
    if is_dropout(hidden):
        p, dropouts = dropped(hidden), [hidden]
        hidden = source(hidden)
    if not is_tensor(hidden) or not _are_inside([*dropouts, hidden], node):
        return None
    found = _activation(hidden)
    if found is None or name(found[1].input) != layer:
        return None
    first = found[1].input
    if layer == "conv1d":
        if _is_pointwise(first):
            raise Stays("its linear layers are convolutions; the op takes those of nn.Linear")
        return None
    pattern = [*dropouts, *found[1].nodes, first]
    if not _are_inside(pattern, node):
        return None
    weights = [arg(x, i, key) for x in (first, node) for i, key in ((1, "weight"), (2, "bias"))]
    reads = [x for x in (source(first), *weights) if x is not None]
    if not is_untouched(history, pattern, reads, node):
        raise Stays("what it reads is changed in place, or a region of autocast begins within it")
    emit = Emitter(history, node)
    new = emit(functional.feed_forward, source(first), *weights, found[0], p)
    return "feed_forward", fitting(emit, new, node), pattern


def _is_pointwise(node: fx.Node) -> bool:
    """Return whether a node is a convolution of size 1, which is a linear layer."""
    return name(node) == "conv1d" and same(tensor(arg(node, 1, "weight")).shape[-1], 1)


def _are_inside(nodes: list[fx.Node], last: fx.Node) -> bool:
    """Return whether no other node than these and the last one reads them."""
    return all(user in nodes or user is last for x in nodes for user in x.users)


def _gated(history: History, node: fx.Node) -> Match | None:
    """Match activation(gate) value, where a Linear, perhaps after dropout, is its only reader."""
    if len(node.users) != 1 or node.kwargs:
        return None
    (reader,) = node.users
    if is_dropout(reader) and len(reader.users) == 1:
        (reader,) = reader.users
    if name(reader) != "linear":
        return None
    for gate, up in (node.args[:2], node.args[1::-1]):
        found = _activation(gate) if is_tensor(up) else None
        if found is None or not is_like(up, found[1].input) or found[1].input is up:
            continue
        nodes, reads = found[1].nodes, [found[1].input, up]
        if not _are_inside(nodes, node) or not is_untouched(history, nodes, reads, node):  # type: ignore[arg-type]
            return None
        emit = Emitter(history, node)
        new = emit(functional.gated_activation, *reads, found[0])
        return "gated_activation", fitting(emit, new, node), nodes
    return None


def loss(history: History, node: fx.Node) -> Match | None:
    """Match the cross entropy of logits that nobody else reads, with the projection before it."""
    if name(node) != "cross_entropy" or any(arg(node, i, k) is not None for i, k in _OLD):
        return None
    logits, target, pattern, index = source(node), arg(node, 1, "target"), [], []
    moved = is_permute(logits) and permutation(logits) == [0, 2, 1]
    if not moved and tensor(logits).dim() != 2:
        return None
    if moved:
        pattern.append(logits)
        logits = source(logits)
    while _keeps_classes(logits) or is_cast(logits):
        if name(logits) == "getitem":
            index.append(logits.args[1])
        elif index and not is_cast(logits):
            return None  # rows are selected after a view
        pattern.append(logits)
        logits = source(logits)
    if name(logits) != "linear" or not _are_inside([logits, *pattern], node):
        return None
    if not is_tensor(target) or tensor(target).dtype is not torch.int64:
        return None
    hidden, weight, bias = source(logits), arg(logits, 1, "weight"), arg(logits, 2, "bias")
    classes = arg(node, 2, "weight")
    reads = [x for x in (hidden, weight, bias) if x is not None]
    if not is_untouched(history, [logits, *pattern], reads, node):
        raise Stays("what it reads is changed in place, or a region of autocast begins within it")
    emit = Emitter(history, node)
    for rows in reversed(index):
        hidden = emit(operator.getitem, hidden, rows)
    if not moved:
        hidden = emit("reshape", hidden, -1, tensor(hidden).shape[-1])
    options: dict[str, Any] = dict(
        linear_bias=bias,
        weight=classes,
        ignore_index=arg(node, 4, "ignore_index", -100),
        reduction=arg(node, 6, "reduction", "mean"),
        label_smoothing=number(arg(node, 7, "label_smoothing", 0.0)),
    )
    new = emit(functional.linear_cross_entropy, hidden, weight, target, **options)
    return "linear_cross_entropy", fitting(emit, new, node), [*pattern, logits]


def _keeps_classes(node: fx.Node) -> bool:
    """Return whether a node views or selects rows of logits, whose last dimension stays."""
    called = name(node)
    if called in ("view", "reshape", "flatten"):
        return same(tensor(node).shape[-1], tensor(source(node)).shape[-1])
    if called != "getitem":
        return False
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    whole = not any(isinstance(i, fx.Node) or i is None for i in index)
    last = Ellipsis in index or len(index) == tensor(source(node)).dim()
    return whole and (not last or index[-1] in (slice(None), Ellipsis))


_OLD = ((3, "size_average"), (5, "reduce"))
