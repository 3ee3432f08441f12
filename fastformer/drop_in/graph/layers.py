"""Finds feed-forward layers, and the loss of a last projection."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx

from fastformer.drop_in.graph.axes import fitting, is_permute, is_reshape, permutation
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
_OTHERS = {
    *("tanh", "elu", "celu", "selu", "leaky_relu", "mish", "softplus", "hardswish", "hardtanh"),
    *("relu6", "hardsigmoid", "logsigmoid", "prelu"),
}


def _activation(node: Any) -> tuple[str, Region] | None:
    """Return the activation that ends at a node, and the nodes that compute it."""
    for found in regions(node, ELEMENTWISE) if is_tensor(node) else ():
        known = known_function(found, {found.input: _POINTS}, _ACTIVATIONS)
        if known is not None:
            return known, found
    return None


class _Linear(NamedTuple):
    """A linear layer: its input, weight and bias. transposed: the weight is [in, out]."""

    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool


def _linear(node: Any) -> _Linear | None:
    """Return the linear layer that a node computes: F.linear, or a product with a matrix, to which
    addmm adds a row.
    """
    called = name(node)
    if called == "linear" or _is_pointwise(node):
        return _Linear(source(node), arg(node, 1, "weight"), arg(node, 2, "bias"), False)
    given: Any = node.args if called in ("addmm", "matmul") and not node.kwargs else ()
    if len(given) == 3 and tensor(given[0]).dim() == 1:
        return _Linear(given[1], given[2], given[0], True)
    if len(given) == 2 and tensor(given[0]).dim() > 2 and tensor(given[1]).dim() == 2:
        return _Linear(given[0], given[1], None, True)
    return None


def feed_forward(history: History, node: fx.Node) -> Match | None:
    """Match Linear, activation, dropout, Linear, or the product of a gate before a Linear."""
    if left_to_torch(node):
        return None
    if name(node) == "mul":
        return _gated(history, node)
    second = _linear(node)
    if second is None:
        return None
    hidden, p, between = _before_dropout(second.input)
    found = _activation(hidden) if is_tensor(hidden) else None
    if found is None and _is_unknown(hidden, node):
        raise Stays(f"feed_forward has no activation {name(hidden)}")
    start: Any = None if found is None else found[1].input
    while _keeps_last(start) or (is_dropout(start) and not dropped(start)):
        between.append(start)
        start = source(start)
    first = _linear(start)
    if found is None or first is None or name(start) != name(node):
        return None
    pattern = [*between, *found[1].nodes, start]
    if not _are_inside(pattern, node):
        return None
    if name(node) == "conv1d":
        raise Stays("its linear layers are convolutions; the op takes those of nn.Linear")
    reads = [x for x in (*first[:3], *second[1:3]) if x is not None]
    if not is_untouched(history, pattern, reads, node):
        raise Stays("what it reads is changed in place, or a region of autocast begins within it")
    emit = Emitter(history, node)
    weights = [
        x for y in (first, second)
        for x in (emit("t", y.weight) if y.transposed else y.weight, y.bias)
    ]  # fmt: skip
    new = emit(functional.feed_forward, first.input, *weights, found[0], p)
    return "feed_forward", fitting(emit, new, node), pattern


def _before_dropout(node: Any) -> tuple[Any, float, list[fx.Node]]:
    """Return what a node is before dropout and views, the probability, and the nodes of these."""
    p, nodes = 0.0, []
    while _keeps_last(node) or (is_dropout(node) and not p):
        p = dropped(node) if is_dropout(node) else p
        nodes.append(node)
        node = source(node)
    return node, p, nodes


def _is_unknown(node: Any, last: fx.Node) -> bool:
    """Return whether a node is an activation that the op has not, after a linear layer."""
    if name(node).rstrip("_") not in _OTHERS or _linear(source(node)) is None:
        return False
    return _are_inside([node, source(node)], last)


def _keeps_last(node: Any) -> bool:
    """Return whether a node is a view that keeps the last dimension."""
    if not is_reshape(node):
        return False
    return same(tensor(node).shape[-1], tensor(source(node)).shape[-1])


def _is_pointwise(node: fx.Node) -> bool:
    """Return whether a node is a convolution of size 1, which is a linear layer."""
    if name(node) != "conv1d" or not same(tensor(arg(node, 1, "weight")).shape[-1], 1):
        return False
    given = (arg(node, i, key, n) for i, key, n in ((3, "stride", 1), (4, "padding", 0)))
    stride, padding = (x[0] if isinstance(x, (tuple, list)) else x for x in given)
    return stride == 1 and padding in (0, "valid", "same") and arg(node, 6, "groups", 1) == 1


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
