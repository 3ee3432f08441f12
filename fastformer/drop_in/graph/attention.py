"""Finds attention that a model computes by products and a softmax.

It starts at a product of weights and values, and goes back: dropout, softmax, then masks, terms and
scales up to the product of queries and keys. Dimensions are followed by their axes, so that the
order of dimensions, views in between and the way to write a product do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from fastformer.drop_in.graph.axes import (
    CONTIGUOUS,
    Axis,
    Dims,
    Product,
    before_view,
    broadcast,
    flat,
    is_view,
    operand_dims,
    product,
)
from fastformer.drop_in.graph.nodes import (
    CASTS,
    History,
    Stays,
    arg,
    dropped,
    evaluated,
    is_cast,
    is_dropout,
    is_tensor,
    is_written,
    name,
    number,
    reads_only,
    same,
    source,
    tensor,
    value,
    writers_of,
)

_ALL_BUT_ONE = (slice(1, None), slice(None, -1))  # the keys after a sink, or before it


class Read(NamedTuple):
    """A tensor that the fused op reads, and the node that reads it in the model."""

    node: fx.Node
    dims: Dims
    reader: fx.Node


@dataclass
class Fill:
    """A mask: where it is true (`keeps`: false), the scores or weights become `value`."""

    mask: Read
    keeps: bool
    value: float


@dataclass
class Form:
    """What softmax(scores) values consists of.

    The scores are scale q k^T, or amplitude tanh(scale q k^T) if `capped`; then terms are added,
    each with its factor, and fills replace some of them.
    """

    operands: tuple[Read, Read]  # of the product of queries and keys
    features: list[Axis]  # over which that product sums
    keys: list[Axis]  # the axes of the softmax
    nodes: list[fx.Node]  # of the pattern, from the weights on
    scale: float = 1.0
    capped: bool = False
    amplitude: float = 1.0
    tensor_scales: list[tuple[Read, bool]] = field(default_factory=list)  # and whether they divide
    terms: list[tuple[Read, float]] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    shifted: bool = False  # by a constant
    sink: Read | None = None  # the scores of a column that only the denominator has
    zeros: list[Fill] = field(default_factory=list)  # after the softmax
    dropout: Read | None = None  # what is dropped
    dropout_p: float = 0.0
    out_scale: float = 1.0  # a factor of the weights after the softmax

    def scale_by(self, factor: float) -> None:
        if self.fills and not factor > 0.0:
            raise Stays("its filled scores change their sign")
        for fill in self.fills:
            fill.value *= factor
        self.terms = [(term, f * factor) for term, f in self.terms]
        if self.capped:
            self.amplitude *= factor
        else:
            self.scale *= factor

    def is_scaled_product(self) -> bool:
        """Return whether the scores are products of queries and keys with scales alone."""
        return not (self.capped or self.terms or self.fills or self.shifted)

    def fill(self, fill: Fill) -> None:
        most = abs(fill.value) / 100
        if most < math.inf and not all(is_small(read.node, most) for read, _ in self.terms):
            raise Stays("scores are filled with a finite number after a term, which may hide keys")
        if most < math.inf and self.shifted and self.fills:
            raise Stays("a mask fills with a finite number after filled scores have been shifted")
        self.fills.append(fill)

    def add(self, read: Read, factor: float) -> None:
        of_keys = {axis for dim in read.dims for axis in flat(dim)} & {*flat(self.keys)}
        if _largest_of(read.node) in self.nodes and not of_keys:
            self.shifted = True  # the scores of a row by the same number: no weight changes
        elif any(fill.value > -math.inf for fill in self.fills):
            raise Stays("a term is added to scores that are filled with a finite number")
        else:
            self.terms.append((read, factor))


class Finder:
    """Follows the weights of a product back to the product of queries and keys.

    Its methods take a node, the axes of its dimensions and perhaps the node that reads it, and
    return the form up to that node.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self.nodes: list[fx.Node] = []
        self.keys: list[Axis] = []
        self._column: tuple[int, list[Axis]] | None = None  # of a sink: its place, the keys
        self._failed: dict[tuple[fx.Node, fx.Node], Stays] = {}  # ways that lead to no product

    def find(self, weights: fx.Node, dims: Dims, reader: fx.Node) -> Form | None:
        """Return the form of the weights that `reader` multiplies with values; None if they come
        from no softmax. dims: the axes of the weights.
        """
        self.dtype = tensor(reader).dtype
        return self._weights(weights, dims, reader) if _follows_softmax(weights) else None

    def _weights(self, node: Any, dims: Dims, reader: fx.Node) -> Form:
        node = self._version(node, reader)
        self.nodes.append(node)
        if _softmax(node) is not None:
            return self._softmax(node, dims)
        below = before_view(node, dims) or self._before_selection(node, dims)
        form = self._weights(_chain(node), dims if below is None else below, node)
        if below is None and not self._passes_weights(form, node, dims):
            raise Stays(f"its weights pass {name(node) or node.target} after the softmax")
        return form

    def _passes_weights(self, form: Form, node: fx.Node, dims: Dims) -> bool:
        """Note what a node does to the weights; return whether it is known."""
        called = name(node).rstrip("_")
        if is_dropout(node):
            p = dropped(node)
            if p and form.dropout is not None:
                raise Stays("its weights are dropped twice")
            if p:
                form.dropout, form.dropout_p = Read(source(node), dims, node), p
        elif called in ("masked_fill", "where"):
            fill = self._fill(node, dims)
            if fill.value != 0.0:
                return False
            form.zeros.append(fill)
        elif called == "mul" and (mask := _of_boolean(node.args[1], dims, node)) is not None:
            form.zeros.append(Fill(mask, True, 0.0))
        elif called in ("mul", "div") and not node.kwargs and len(node.args) == 2:
            factor = number(node.args[1])
            if not factor:
                return False
            form.out_scale *= 1 / factor if called == "div" else factor
        else:
            return self._casts(node) or (called == "nan_to_num" and not arg(node, 1, "nan"))
        return True

    def _before_selection(self, node: fx.Node, dims: Dims) -> Dims | None:
        """Return the axes of weights of which the first or the last key is left out."""
        if name(node) != "getitem" or self._column is not None:
            return None
        *rest, last = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        whole = all(i is Ellipsis or i == slice(None) for i in rest)
        whole = whole and (Ellipsis in rest or len(rest) == len(dims) - 1)
        if not whole or last not in _ALL_BUT_ONE:
            return None
        self._column = _ALL_BUT_ONE.index(last), dims[-1]
        return [*dims[:-1], [Axis(tensor(source(node)).shape[-1])]]

    def _softmax(self, node: fx.Node, dims: Dims) -> Form:
        scores, place, inside = _softmax(node) or (None, None, [])
        if not isinstance(place, int):
            raise Stays("its softmax has no dimension")
        if any(self.history.writers(x, x, node) for x in inside):
            raise Stays("its softmax is changed in place")
        if not self._is_wide(node):
            raise Stays("its weights are rounded")
        self.nodes += inside
        reader, self.keys = inside[-1] if inside else node, dims[place]
        return (self._scores if self._column is None else self._sink)(scores, dims, reader)

    def _sink(self, node: Any, dims: Dims, reader: fx.Node) -> Form:
        """Follow scores to which a sink is appended."""
        node = self._version(node, reader)
        self.nodes.append(node)
        if self._casts(node) or _is_without_largest(node):
            return self._sink(source(node), dims, node)
        given, last = source(node), arg(node, 1, "dim", 0) in (-1, len(dims) - 1)
        if name(node) != "cat" or not last or len(given) != 2 or self.keys is not dims[-1]:
            raise Stays("a part of its weights is selected")
        assert self._column is not None
        place, self.keys = self._column
        form = self._scores(given[1 - place], [*dims[:-1], self.keys], node)
        if form.shifted:
            raise Stays("its scores are shifted against their sink")
        form.sink = self._read(given[place], dims, node)
        return form

    def _version(self, node: Any, reader: fx.Node) -> fx.Node:
        """Return the node that last wrote all of a tensor before it is read."""
        if not is_tensor(node):
            raise Stays("its scores are no tensor")
        writers = self.history.writers(node, node, reader)
        if not writers:
            return node
        if _identity(source(writers[-1])) is not _identity(node):
            raise Stays("its scores or weights are written through a view")
        return writers[-1]

    def _casts(self, node: fx.Node) -> bool:
        """Return whether a node is a cast that rounds no more than the products."""
        return is_cast(node) and self._is_wide(node)

    def _is_wide(self, node: fx.Node) -> bool:
        dtype = tensor(node).dtype
        return torch.promote_types(dtype, self.dtype) == dtype

    def _fill(self, node: fx.Node, dims: Dims) -> Fill:
        if name(node) == "where":
            mask, kept, filled = _where(node)
            keeps = number(filled) is not None
            constant = number(filled) if keeps else number(kept)
        else:
            mask, keeps, constant = arg(node, 1, "mask"), False, number(arg(node, 2, "value"))
        if constant is None:
            raise Stays("its scores or weights are replaced by those of a tensor")
        return Fill(self._read(mask, dims, node), keeps, constant)

    def _read(self, node: Any, dims: Dims, reader: fx.Node) -> Read:
        if not is_tensor(node):
            raise Stays("a mask is no tensor")
        return Read(node, broadcast(dims, tensor(node).shape), reader)

    def _scores(self, node: Any, dims: Dims, reader: fx.Node) -> Form:
        node = self._version(node, reader)
        self.nodes.append(node)
        found = product(node)
        if found is not None:
            return self._product(node, found, dims)
        below = before_view(node, dims)
        if below is None and (self._casts(node) or (is_dropout(node) and dropped(node) == 0.0)):
            below = dims
        if below is not None:
            return self._scores(source(node), below, node)
        called = name(node)
        passes = _PASSES.get(called.rstrip("_"))
        if passes is None:
            raise Stays(f"its scores pass {called or node.target}")
        return passes(self, node, dims)

    def _product(self, node: fx.Node, found: Product, dims: Dims) -> Form:
        known = dict(zip(found.labels[2], dims))
        left, right = operand_dims(found, known)
        operands = Read(found.left, left, node), Read(found.right, right, node)
        summed = [label for label in found.labels[0] if label not in found.labels[2]]
        features = [axis for label in summed for axis in known[label]]
        form = Form(operands, features, self.keys, self.nodes, found.factor)
        if found.term is not None and found.plus:
            form.add(self._read(found.term, dims, node), found.plus)
        return form

    def _either(self, node: fx.Node, dims: Dims) -> tuple[int, Form]:
        """Return which of two arguments leads to a product, and its form."""
        reasons = [(0, Stays("its scores are no product"))]
        before = len(self.nodes)
        for i, x in enumerate((source(node), arg(node, 1, "other"))):
            if not is_tensor(x) or not tensor(x).dim():
                continue
            try:
                if (x, node) in self._failed:
                    raise self._failed[x, node]
                return i, self._scores(x, broadcast(dims, tensor(x).shape), node)
            except Stays as stays:
                self._failed[x, node] = stays
                reasons.append((len(self.nodes), stays))
                del self.nodes[before:]
        raise max(reasons, key=lambda reason: reason[0])[1]  # of the longer way

    def sum(self, node: fx.Node, dims: Dims) -> Form:
        given = source(node), arg(node, 1, "other")
        alpha = number(node.kwargs.get("alpha", 1))
        if alpha is None or len(node.args) > 2:
            raise Stays("a sum of its scores has an unknown alpha")
        factors = [1.0, -alpha if name(node).startswith("sub") else alpha]
        if name(node) == "rsub":
            factors = [-alpha, 1.0]
        for i in (0, 1):
            constant = number(given[i])
            if constant is not None:  # which changes no weight, unless it is large
                if abs(constant) > 1e3:
                    raise Stays("a large number is added to its scores")
                form = self._scores(given[1 - i], dims, node)
                form.scale_by(factors[1 - i])
                form.shifted = True
                return form
        i, form = self._either(node, dims)
        form.scale_by(factors[i])
        form.add(self._read(given[1 - i], dims, node), factors[1 - i])
        return form

    def factor(self, node: fx.Node, dims: Dims) -> Form:
        given, divides = (source(node), arg(node, 1, "other")), name(node).startswith("div")
        if node.kwargs.get("rounding_mode") is not None or (divides and not is_tensor(given[0])):
            raise Stays("its scores are rounded, or divide a number")
        for i in (0, 1):
            factor = number(given[i])
            if factor is not None and not (divides and (i == 0 or factor == 0.0)):
                form = self._scores(given[1 - i], dims, node)
                form.scale_by(1 / factor if divides else factor)
                return form
        i, form = self._either(node, dims)
        if divides and i == 1:
            raise Stays("its scores divide a tensor")
        if not form.is_scaled_product():
            raise Stays("its scores are multiplied by a tensor after a mask or a term")
        form.tensor_scales.append((self._read(given[1 - i], dims, node), divides))
        return form

    def filled(self, node: fx.Node, dims: Dims) -> Form:
        form = self._scores(_chain(node), dims, node)
        form.fill(self._fill(node, dims))
        return form

    def assigned(self, node: fx.Node, dims: Dims) -> Form:
        mask, constant = arg(node, 1, "indices"), number(arg(node, 2, "value"))
        if not is_tensor(mask) or constant is None or tensor(mask).dim() != len(dims):
            raise Stays("a part of its scores is assigned")
        form = self._scores(source(node), dims, node)
        form.fill(Fill(self._read(mask, dims, node), False, constant))
        return form

    def tanh(self, node: fx.Node, dims: Dims) -> Form:
        form = self._scores(source(node), dims, node)
        if not form.is_scaled_product():
            raise Stays("a tanh of its scores follows a mask or a term")
        form.capped = True
        return form

    def negative(self, node: fx.Node, dims: Dims) -> Form:
        form = self._scores(source(node), dims, node)
        form.scale_by(-1.0)
        return form


_PASSES: dict[str, Callable[[Finder, fx.Node, Dims], Form]] = {
    **dict.fromkeys(("add", "sub", "rsub"), Finder.sum),
    **dict.fromkeys(("mul", "div"), Finder.factor),
    **dict.fromkeys(("masked_fill", "where"), Finder.filled),
    "setitem": Finder.assigned,
    "tanh": Finder.tanh,
    "neg": Finder.negative,
}


def _identity(node: Any) -> Any:
    """Return the node that made a tensor which operations in place have returned."""
    while name(node).endswith("_") and value(source(node)) is value(node):
        node = source(node)
    return node


def _of_boolean(node: Any, dims: Dims, reader: fx.Node) -> Read | None:
    """Return the boolean tensor of which a node holds ones and zeros, None if there is none."""
    while name(node) in CASTS and tensor(node).dtype is not torch.bool and not is_written(node):
        node, reader = source(node), node
    if not is_tensor(node) or tensor(node).dtype is not torch.bool:
        return None
    return Read(node, broadcast(dims, tensor(node).shape), reader)


def _where(node: fx.Node) -> tuple[Any, Any, Any]:
    """Return (condition, tensor where it is true, tensor where it is false)."""
    given = [arg(node, i, key) for i, key in enumerate(("condition", "input", "other"))]
    if node.op == "call_method":
        given[0], given[1] = arg(node, 1, "condition"), node.args[0]
    return given[0], given[1], given[2]


def _largest_of(node: Any) -> Any:
    """Return the tensor of which a node is the largest element of each row: a softmax by hand
    subtracts that of the scores. Return None for other nodes.
    """
    while name(node) in ("detach", "getitem", "values"):
        node = source(node)
    one = len(node.all_input_nodes) == 1
    return source(node) if name(node) in ("amax", "max") and one else None


def _is_without_largest(node: fx.Node) -> bool:
    """Return whether a node is x - max(x), the same number for all keys of a row."""
    if name(node) != "sub" or node.kwargs or _largest_of(node.args[1]) is not source(node):
        return False
    largest = tensor(node.args[1])
    return largest.dim() == 0 or same(largest.shape[-1], 1)


def _follows_softmax(node: Any) -> bool:
    """Return whether a softmax is among the nodes before a node and after the product before it."""
    for _ in range(16):
        if not is_tensor(node) or _softmax(node) is not None:
            break
        if product(node) is not None:
            return False
        node = _chain(node)
    return is_tensor(node) and _softmax(node) is not None


def _softmax(node: fx.Node) -> tuple[Any, Any, list[fx.Node]] | None:
    """Return (scores, dimension, nodes before the last one) of a softmax, also of exp(x) / sum."""
    if name(node) in ("softmax", "_softmax"):
        return source(node), arg(node, 1, "dim"), []
    if name(node) != "div" or node.kwargs:
        return None
    powers, total = node.args[:2]
    if name(powers) != "exp" or name(total) != "sum" or source(total) is not powers:  # type: ignore[arg-type]
        return None
    place = arg(total, 1, "dim")  # type: ignore[arg-type]
    place = place[0] if isinstance(place, (list, tuple)) and len(place) == 1 else place
    rank = tensor(powers).dim()
    if not isinstance(place, int) or tensor(total).dim() != rank:
        return None
    return source(powers), place, [total, powers]


def _chain(node: fx.Node) -> Any:
    """Return the argument of a node that the scores or the weights pass through."""
    if name(node) == "where":
        _, kept, filled = _where(node)
        return kept if number(filled) is not None else filled
    return source(node)


_ARITHMETIC = {
    *("add", "sub", "rsub", "mul", "neg", "abs", "sigmoid", "tanh", "relu", "log_sigmoid"),
    *("clamp", "minimum", "maximum", "cumsum", "pad", "arange", "sqrt", "square"),
}
_SELECTS = CASTS | {"getitem", "index_select", "gather", "repeat", "cat", "stack", "roll"}
_BOUNDED = {
    *("softmax", "layer_norm", "rms_norm", "group_norm", "batch_norm", "sigmoid", "tanh"),
    *("scaled_dot_product_attention", "multi_head_attention_forward"),
}


def is_small(term: fx.Node, most: float) -> bool:
    """Return whether a term is made of learned parameters, activations, positions and numbers
    whose product is at most `most`, so that it is no mask.
    """
    seen: set[Any] = set()
    stack: list[Any] = [term]
    total = 1.0
    while stack:
        node = stack.pop()
        if not isinstance(node, fx.Node):
            total *= max(1.0, abs(node)) if isinstance(node, (int, float)) else 1.0
            if total > most:
                return False
            continue
        if node in seen:
            continue
        seen.add(node)
        parts = _parts(node, most)
        if parts is None:
            return False
        stack += [*parts, *writers_of(node)]
    return True


def _parts(node: fx.Node, most: float) -> list[Any] | None:
    """Return the tensors and numbers that bound a tensor, None if it may be a mask."""
    x, called = value(node), name(node).rstrip("_")
    if isinstance(x, (torch.SymInt, torch.SymFloat, int, float)):
        return [1e6]  # a size
    if isinstance(x, (tuple, list)):
        return [source(node)]
    if not isinstance(x, Tensor):
        return None
    constant = evaluated(node, 1 << 22)
    if constant is not None:
        return [float(constant.double().abs().max()) if constant.numel() else 0.0]
    if isinstance(x, torch.nn.Parameter):
        return [] if x.requires_grad else None
    if called in _SELECTS or is_view(node):
        return tree_leaves(source(node))
    if called == "embedding":
        return [arg(node, 1, "weight")]
    if called == "div":
        divisor = number(node.args[1])
        return [node.args[0], 1 / divisor] if divisor else None
    if called in _ARITHMETIC or reads_only(node.target):
        return [*node.args, *node.kwargs.values()]
    if called in CONTIGUOUS and called != "baddbmm":
        return [] if _is_activation(node, most) else None
    return [] if _are_slopes(node, x) else None


def _are_slopes(node: fx.Node, x: Tensor) -> bool:
    """Return whether a tensor is a buffer with a number for each head, [H, 1, 1]."""
    is_buffer = node.op == "placeholder" and "_buffers_" in str(node.target)
    return is_buffer and x.dim() > 2 and same(x.numel(), max(x.shape[:-1]))


def _is_activation(product: fx.Node, most: float) -> bool:
    """Return whether a product is made of something learned or normed, and of no number above
    `most`, back to norms.
    """
    seen: set[fx.Node] = set()
    stack, learned = [product], False
    while stack:
        node = stack.pop()
        seen.add(node)
        given = tree_leaves((node.args, node.kwargs))
        if any(isinstance(x, (int, float)) and abs(x) > most for x in given):
            return False
        is_parameter = isinstance(value(node), torch.nn.Parameter) and value(node).requires_grad
        learned = learned or is_parameter or name(node) in _BOUNDED
        if name(node) not in _BOUNDED:
            stack += [x for x in (*node.all_input_nodes, *writers_of(node)) if x not in seen]
    return learned
