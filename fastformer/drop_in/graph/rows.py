"""Finds norms, residual sums before a norm, feed-forward layers, and the loss of a last projection."""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fastformer.drop_in.graph.nodes import (
    Emitter,
    History,
    Stays,
    arg,
    dropped,
    is_cast,
    is_dropout,
    is_tensor,
    name,
    number,
    same,
    source,
    tensor,
)
from fastformer.drop_in.graph.torch_functions import left_to_torch
from fastformer.ops import functional

Match = tuple[str, fx.Node, list[fx.Node]]  # the op, what replaces the node, and the pattern


class Norm(NamedTuple):
    """A LayerNorm or RMSNorm of `input` over its last `rank` dimensions, and the nodes that compute
    it, without the last one.
    """

    input: fx.Node
    eps: float | None
    is_rms: bool
    nodes: list[fx.Node]
    unbiased: bool = False
    weight: fx.Node | None = None
    bias: fx.Node | None = None
    rank: int = 1


def norm(history: History, node: fx.Node) -> Match | None:
    """Match a norm that ends at this node, with the residual sum before it, if there is one."""
    found = _norm_of_torch(node) or _norm_by_hand(node)
    if found is None or (left_to_torch(node) and name(node).endswith("_norm")):
        return None
    inside = [*found.nodes, node]
    if any(user not in inside for x in found.nodes for user in x.users):
        return None
    reads = [found.input, *(x for x in (found.weight, found.bias) if x is not None)]
    first = min(inside)
    for x in reads:
        if history.writers(x, first, node) or history.written_after(x, node):
            raise Stays("what it reads is changed in place")
    if not history.is_one_region(inside):
        raise Stays("a region of autocast or no_grad begins within it")
    emit = Emitter(history, node)
    try:
        return _sum_and_norm(history, node, found, emit) or _norm_alone(node, found, emit)
    except BaseException:
        emit.undo()
        raise


def _norm_alone(node: fx.Node, found: Norm, emit: Emitter) -> Match:
    x = found.input
    shape = [*tensor(x).shape[-found.rank :]]
    if found.is_rms:
        op = "rms_norm"
        new = emit(functional.rms_norm, x, shape, found.weight, found.eps)
    else:
        op = "layer_norm"
        options = {"unbiased": True} if found.unbiased else {}
        given = x, shape, found.weight, found.bias, found.eps
        new = emit(functional.layer_norm, *given, **options)
    return op, _of_same_type(emit, new, node), found.nodes


def _of_same_type(emit: Emitter, new: fx.Node, node: fx.Node) -> fx.Node:
    """Return a node with the dtype of another one. Raises Stays if the shape differs."""
    if tensor(new).shape != tensor(node).shape:
        raise Stays("its result would have another shape")
    dtype = tensor(node).dtype
    return new if tensor(new).dtype == dtype else emit("to", new, dtype)


def _sum_and_norm(history: History, node: fx.Node, found: Norm, emit: Emitter) -> Match | None:
    total = found.input
    if name(total) not in ("add", "add_") or total.kwargs or found.weight is None:
        return None
    a, b = total.args[:2]
    if not all(_is_like(x, total) for x in (a, b)) or a is b:
        return None
    if name(total) == "add_":
        total = _out_of_place(history, total)  # type: ignore[assignment]
        if total is None:
            return None
        found = found._replace(input=total)
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    outside = [user for user in total.users if user not in found.nodes and user is not node]
    if any(user < node for user in outside) or history.written_after(total, total):
        return None  # which reads the sum before the norm, or changes it
    residual, branch = (b, a) if _drops(a) and not _drops(b) else (a, b)
    p, pattern = 0.0, [*found.nodes, total]
    if _drops(branch) and len(branch.users) == 1:
        p = dropped(branch)
        pattern.append(branch)
        branch = source(branch)
    if _changed(history, [residual, branch], min(pattern), total):
        return None
    if _changed(history, [residual, branch], total, node) or not history.is_one_region([*pattern, node]):
        return None
    given = (branch, residual, found.weight)
    if found.is_rms:
        op = "dropout_add_rms_norm"
        both = emit(functional.dropout_add_rms_norm, *given, p, found.eps)
    else:
        op = "dropout_add_layer_norm"
        options = {"unbiased": True} if found.unbiased else {}
        call = functional.dropout_add_layer_norm
        both = emit(call, *given, found.bias, p, found.eps, **options)
    normed, summed = (emit(operator.getitem, both, i) for i in (0, 1))
    normed = _of_same_type(emit, normed, node)
    total.replace_all_uses_with(summed, {*outside}.__contains__)
    return op, normed, pattern


def _is_like(x: Any, total: fx.Node) -> bool:
    if not is_tensor(x):
        return False
    a, b = tensor(x), tensor(total)
    return a.shape == b.shape and a.dtype == b.dtype


def _out_of_place(history: History, node: fx.Node) -> fx.Node | None:
    """Replace a sum in place by one that is not, if its result is read under its own name alone."""
    first = source(node)
    for alias in history.aliases(node):
        if alias.op == "placeholder":
            return None
        if alias not in (node, first) and any(user > node for user in alias.users):
            return None
    new = Emitter(history, node)(torch.add, *node.args)
    node.replace_all_uses_with(new)
    first.replace_all_uses_with(new, lambda user: user > node)
    history.graph.erase_node(node)
    return new


def _drops(node: fx.Node) -> bool:
    return name(node) == "dropout" and dropped(node) > 0.0


def _is_last(node: fx.Node, dim: Any) -> bool:
    rank = tensor(source(node)).dim()
    dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    return dim in (-1, rank - 1)


def _norm_of_torch(node: fx.Node) -> Norm | None:
    if name(node) not in ("layer_norm", "rms_norm"):
        return None
    shape, is_rms = arg(node, 1, "normalized_shape"), name(node) == "rms_norm"
    rank = 1 if isinstance(shape, int) else len(shape)
    bias = None if is_rms else arg(node, 3, "bias")
    eps = arg(node, 3, "eps") if is_rms else arg(node, 4, "eps", 1e-5)
    eps = None if eps is None else number(eps)
    weight = arg(node, 2, "weight")
    return Norm(source(node), eps, is_rms, [], weight=weight, bias=bias, rank=rank)


def _norm_by_hand(node: fx.Node) -> Norm | None:
    """Return the norm that ends at this node: normalized values, times a weight, plus a bias."""
    if name(node) not in ("mul", "div", "add") or node.kwargs:
        return None
    factors = Factors()
    bias = None
    if name(node) == "add":
        given = [x for x in node.args[:2] if is_tensor(x)]
        rows = [x for x in given if tensor(x).dim() == 1 < tensor(node).dim()]
        if len(given) != 2 or len(rows) != 1:
            return None
        bias = rows[0]
        factors.add(next(x for x in given if x is not bias))
    else:
        factors.split(node)
    found = _normalized(factors)
    if found is None or (bias is not None and (found.is_rms or found.weight is None)):
        return None
    return found._replace(bias=bias)


class Factors:
    """The factors of a product: rows of parameters, numbers, other tensors, and divisors."""

    def __init__(self) -> None:
        self.rows: list[fx.Node] = []
        self.number = 1.0
        self.others: list[fx.Node] = []
        self.divisors: list[fx.Node] = []
        self.nodes: list[fx.Node] = []  # the products, and casts between them

    def add(self, x: Any) -> None:
        """Add a factor, or the factors of a product that has no other reader."""
        constant = number(x)
        if constant is not None:
            self.number *= constant
        elif len(x.users) == 1 and (is_cast(x) or name(x) in ("mul", "div")) and not _is_square(x):
            self.nodes.append(x)
            if is_cast(x):
                self.add(source(x))
            else:
                self.split(x)
        elif tensor(x).dim() == 1:
            self.rows.append(x)
        else:
            self.others.append(x)

    def split(self, node: fx.Node) -> None:
        a, b = source(node), arg(node, 1, "other")
        self.add(a)
        if name(node) == "mul":
            self.add(b)
        elif number(b):
            self.number /= number(b) or 1.0
        elif is_tensor(b):
            self.divisors.append(b)


def _is_square(node: fx.Node) -> bool:
    return name(node) == "mul" and source(node) is arg(node, 1, "other")


def _normalized(factors: Factors) -> Norm | None:
    """Return the norm, without bias, that a product computes."""
    rows, others, divisors = factors.rows, factors.others, factors.divisors
    if len(rows) > 1 or len(others) + len(divisors) > 2 or not others:
        return None
    found: Norm | None = None
    if len(others) == 1 and not divisors:
        found = _by_normalize(others[0], factors.number)
    elif factors.number != 1.0:
        return None
    elif divisors:
        found = _with_spread(others[0], _spread(divisors[0], True))
    else:
        a, b = others
        found = _with_spread(a, _spread(b, False)) or _with_spread(b, _spread(a, False))
    if found is None:
        return None
    weight = rows[0] if rows else None
    return found._replace(weight=weight, nodes=[*factors.nodes, *found.nodes])


def _by_normalize(node: Any, factor: float) -> Norm | None:
    """F.normalize(x) sqrt(D). Its eps is 1e-12 of the norm of x, not of the mean square."""
    if name(node) != "normalize" or not _is_last(node, arg(node, 2, "dim", 1)):
        return None
    p, width = number(arg(node, 1, "p", 2.0)), tensor(node).shape[-1]
    root = math.sqrt(width) if isinstance(width, int) else 0.0
    if p != 2.0 or not math.isclose(factor, root, rel_tol=1e-6):
        return None
    return Norm(source(node), 1e-24 / width, True, [node])


Spread = tuple[fx.Node, float, list[fx.Node]]  # (mean square, variance or deviation, eps, nodes)


def _spread(node: Any, divides: bool) -> Spread | None:
    """Return what rsqrt(.. + eps), or a divisor sqrt(.. + eps) or deviation + eps, is made of."""
    called = name(node)
    if called == ("sqrt" if divides else "rsqrt"):
        inner = source(node)
        if name(inner) in ("mean", "var") and is_tensor(inner):
            return inner, 0.0, [node, inner]
        found = _plus_number(inner)
        return None if found is None else (found[0], found[1], [node, inner, found[0]])
    if divides and called == "add":
        found = _plus_number(node)
        if found is not None and name(found[0]) == "std":
            return found[0], found[1], [node, found[0]]
    return None


def _plus_number(node: Any) -> tuple[fx.Node, float] | None:
    if name(node) != "add" or node.kwargs:
        return None
    a, b = node.args[:2]
    eps = number(b)
    if eps is None:
        a, eps = b, number(a)
    return None if eps is None or not isinstance(a, fx.Node) else (a, eps)


def _with_spread(x: fx.Node, spread: Spread | None) -> Norm | None:
    """Return the norm of values x divided by a spread; None if the spread is not that of x."""
    if spread is None or not _keeps_rows(spread[0]):
        return None
    of, eps, nodes = spread
    centred = _centred(x)
    if name(of) == "mean":
        squared = _squared(source(of))
        if squared is None:
            return None
        nodes = [*nodes, source(of)]
        if centred is None:
            below = _uncast(x)
            own = [x] if below is not x else []
            return Norm(below, eps, True, nodes + own) if squared is x else None
        if squared is not x and _centred(squared) != centred:
            return None
        return Norm(_uncast(centred[0]), eps, False, [*nodes, x, squared, centred[1]])
    if centred is None or centred[0] is not source(of):
        return None
    unbiased = _unbiased(of)
    if unbiased is None or unbiased != (name(of) == "std"):
        return None
    return Norm(_uncast(centred[0]), eps, False, [*nodes, x, centred[1]], unbiased)


def _keeps_rows(node: fx.Node) -> bool:
    keepdim = node.kwargs.get("keepdim", False) or any(x is True for x in node.args[2:])
    return bool(keepdim) and _is_last(node, arg(node, 1, "dim"))


def _unbiased(node: fx.Node) -> bool | None:
    """Return whether a variance or deviation divides by D - 1; None if that is not known."""
    correction = node.kwargs.get("correction", node.kwargs.get("unbiased", True))
    if len(node.args) > 3:  # (x, dim, unbiased, keepdim)
        correction = node.args[2]
    return None if isinstance(correction, fx.Node) or correction not in (0, 1) else bool(correction)


def _squared(node: Any) -> fx.Node | None:
    if name(node) in ("pow", "square"):
        power = 2.0 if name(node) == "square" else number(arg(node, 1, "exponent"))
        return source(node) if power == 2.0 else None
    if name(node) == "mul" and source(node) is arg(node, 1, "other"):
        return source(node)
    return None


def _centred(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return (x, mean) of x - mean(x)."""
    if name(node) != "sub" or node.kwargs:
        return None
    x, mean = node.args[:2]
    fits = name(mean) == "mean" and source(mean) is x and _keeps_rows(mean)  # type: ignore[arg-type]
    return (x, mean) if fits else None  # type: ignore[return-value]


def _uncast(node: fx.Node) -> fx.Node:
    """Return the tensor that a node casts to float32."""
    if is_cast(node) and tensor(node).dtype is torch.float32:
        return source(node)
    return node


_ELEMENTWISE = {
    *("relu", "gelu", "silu", "sigmoid", "tanh", "erf", "exp", "mul", "add", "sub", "div", "pow"),
    *("square", "neg", "reciprocal", "sqrt", "clamp", "clamp_min", "relu6", "hardtanh"),
}
_KNOWN: dict[str, Any] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: torch.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
}


def _activation(node: Any) -> tuple[str, fx.Node, list[fx.Node]] | None:
    """Return (activation, its argument, nodes) if a node computes an activation of the ops, however
    it is written: the elementwise functions before it are run on numbers, and compared.
    """
    nodes, argument = _elementwise(node)
    if argument is None or not nodes:
        return None
    x = torch.linspace(-7, 7, 113, dtype=torch.float64)
    values: dict[fx.Node, Any] = {argument: x.clone()}
    try:
        for n in sorted(nodes):
            args, kwargs = fx.map_arg((n.args, n.kwargs), values.__getitem__)
            call = getattr(Tensor, n.target) if isinstance(n.target, str) else n.target
            values[n] = call(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # a function that the numbers do not fit
        return None
    for known, function in _KNOWN.items():
        y = values[node]
        if y.shape == x.shape and torch.allclose(y, function(x), rtol=1e-5, atol=1e-6):
            return known, argument, nodes
    return None


def _elementwise(node: Any) -> tuple[list[fx.Node], fx.Node | None]:
    """Return the elementwise functions that lead to a node, and their one argument."""
    nodes: list[fx.Node] = []
    leaves: list[fx.Node] = []
    stack = [node]
    while stack and len(nodes) < 16:
        x = stack.pop()
        if x in nodes or x in leaves:
            continue
        if name(x).rstrip("_") in _ELEMENTWISE:
            nodes.append(x)
            stack += [y for y in x.all_input_nodes]
        else:
            leaves.append(x)
    one = len(leaves) == 1 and not stack and is_tensor(leaves[0])
    return nodes, leaves[0] if one else None


def _only_reader(node: fx.Node, reader: fx.Node) -> bool:
    return set(node.users) == {reader}


def feed_forward(history: History, node: fx.Node) -> Match | None:
    """Match Linear, activation, dropout, Linear, or the product of a gate before a Linear."""
    if left_to_torch(node):
        return None
    if name(node) == "mul":
        return _gated(history, node)
    if name(node) != "linear":
        return None
    hidden, p, dropouts = source(node), 0.0, []
    if is_dropout(hidden):
        p, dropouts = dropped(hidden), [hidden]
        hidden = source(hidden)
    if not is_tensor(hidden) or not _are_inside([*dropouts, hidden], node):
        return None
    found = _activation(hidden)
    if found is None or name(found[1]) != "linear":
        return None
    activation, first, nodes = found
    pattern = [*dropouts, *nodes, first]
    if not _are_inside(pattern, node):
        return None
    weights = [arg(x, i, key) for x in (first, node) for i, key in ((1, "weight"), (2, "bias"))]
    x = source(first)
    if _changed(history, [x, *(w for w in weights if w is not None)], first, node):
        raise Stays("what it reads is changed in place")
    if not history.is_one_region([*pattern, node]) or not _written_inside(history, pattern):
        raise Stays("a region begins within it, or its hidden layer is changed in place")
    emit = Emitter(history, node)
    new = emit(functional.feed_forward, x, *weights, activation, p)
    return "feed_forward", _of_same_type(emit, new, node), pattern


def _are_inside(nodes: list[fx.Node], last: fx.Node) -> bool:
    """Return whether no other node than these and the last one reads them."""
    inside = {*nodes, last}
    return all(user in inside for x in nodes for user in x.users)


def _written_inside(history: History, nodes: list[fx.Node]) -> bool:
    """Return whether only these nodes change what these nodes compute."""
    last = max(nodes)
    return all(w in nodes for x in nodes for w in history.writers(x, x, last))


def _gated(history: History, node: fx.Node) -> Match | None:
    """Match activation(gate) value, where a Linear, perhaps after dropout, is its only reader."""
    gate = _gate(node) if len(node.users) == 1 else None
    if gate is None:
        return None
    (reader,) = node.users
    if is_dropout(reader) and len(reader.users) == 1:
        (reader,) = reader.users
    (activation, argument, nodes), up = gate
    inside = _are_inside(nodes, node) and history.is_one_region([*nodes, node])
    if name(reader) != "linear" or not inside or any(name(x).endswith("_") for x in nodes):
        return None
    if _changed(history, [argument, up], min(nodes), node):
        return None
    emit = Emitter(history, node)
    new = emit(functional.gated_activation, argument, up, activation)
    return "gated_activation", _of_same_type(emit, new, node), nodes


def _gate(node: fx.Node) -> tuple[tuple[str, fx.Node, list[fx.Node]], fx.Node] | None:
    """Return the activated gate and the value of their product."""
    if name(node) != "mul" or node.kwargs:
        return None
    a, b = node.args[:2]
    for gate, up in ((a, b), (b, a)):
        found = _activation(gate) if is_tensor(up) else None
        if found is not None and _is_like(up, found[1]) and found[1] is not up:
            return found, up  # type: ignore[return-value]
    return None


def _changed(history: History, reads: list[fx.Node], start: fx.Node, end: fx.Node) -> bool:
    return any(history.writers(x, start, end) for x in reads)


def loss(history: History, node: fx.Node) -> Match | None:
    """Match the cross entropy of logits that nobody else reads, with the projection before it."""
    if name(node) != "cross_entropy" or any(arg(node, i, k) is not None for i, k in _OLD):
        return None
    logits, target, pattern, index = source(node), arg(node, 1, "target"), [], []
    moved = name(logits) == "transpose" and tensor(logits).dim() == 3
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
    if name(logits) != "linear" or not is_tensor(target) or not _are_inside([logits, *pattern], node):
        return None
    if tensor(target).dtype is not torch.int64:
        return None
    hidden, weight, bias = source(logits), arg(logits, 1, "weight"), arg(logits, 2, "bias")
    classes = arg(node, 2, "weight")
    reads = [x for x in (hidden, weight, bias) if x is not None]
    if _changed(history, reads, logits, node) or not history.is_one_region([logits, node]):
        raise Stays("what it reads is changed in place, or a region begins within it")
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
    return "linear_cross_entropy", _of_same_type(emit, new, node), [*pattern, logits]


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
