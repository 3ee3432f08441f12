"""The axes of scores and weights: which dimension of a tensor is which, through views and products.

A dimension is a list of axes: of none if its size is 1, of several if a view has merged them. A
view that splits a dimension splits its axis, wherever it occurs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fastformer.drop_in.graph.nodes import (
    CASTS,
    ELEMENTWISE,
    Emitter,
    Stays,
    arg,
    is_written,
    name,
    number,
    reads_only,
    same,
    source,
    static,
    tensor,
    tensors,
    value,
)


class Axis:
    """An axis of this size. parts: the axes into which a view has split it."""

    def __init__(self, size: Any) -> None:
        self.size = static(size)
        self.parts: list[Axis] = []


Dims = list[list[Axis]]


def flat(axes: list[Axis]) -> list[Axis]:
    """Return the axes, with the parts of those that have been split."""
    return [x for axis in axes for x in (flat(axis.parts) if axis.parts else [axis])]


def regrouped(dims: Dims, shape: Any) -> Dims:
    """Return the axes of a tensor of this shape whose elements have the same order."""
    rest = flat([axis for dim in dims for axis in dim])
    return [_taken(rest, n) for n in shape]


def _taken(rest: list[Axis], size: Any) -> list[Axis]:
    """Take the axes of one dimension of this size off the front of a list."""
    taken: list[Axis] = []
    while not same(size, 1):
        if not rest:
            raise Stays("a view of the scores changes their number")
        axis = rest.pop(0)
        if same(size % axis.size, 0):
            size = size // axis.size
        elif same(axis.size % size, 0):
            axis.parts = [Axis(size), Axis(axis.size // size)]
            rest.insert(0, axis.parts[1])
            axis, size = axis.parts[0], 1
        else:
            raise Stays("a view of the scores mixes their dimensions")
        taken.append(axis)
    return taken


CONTIGUOUS = {  # functions whose result is contiguous, whatever the strides before
    *("linear", "matmul", "bmm", "mm", "baddbmm", "addmm", "einsum", "softmax", "layer_norm"),
    *("embedding",),
}
_RESHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel"}
_PERMUTES = {"transpose", "permute", "movedim", "moveaxis", "t", "T", "mT"}
_MOVED = "fastformer: moved"  # in the meta of a node whose strides a new node changes: its value
_EXPANDS = ("expand", "expand_as", "broadcast_to")
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


def _keeps_all(node: fx.Node) -> bool:
    """Return whether an index has only None, ... and : in it."""
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(i is None or i is Ellipsis or i == slice(None) for i in index)


def is_reshape(node: fx.Node) -> bool:
    called = name(node)
    return called in _RESHAPES or (called == "getitem" and _keeps_all(node))


def is_permute(node: fx.Node) -> bool:
    return name(node) in _PERMUTES


def is_view(node: fx.Node) -> bool:
    """Return whether a node has all elements of its first argument, perhaps repeated."""
    return is_reshape(node) or is_permute(node) or name(node) in _EXPANDS


def permutation(node: fx.Node) -> list[int]:
    """Return which dimension of its first argument each dimension of a node is."""
    x = torch.empty(_PRIMES[: tensor(source(node)).dim()], device="meta")
    if name(node) in ("T", "mT"):
        y = getattr(x, name(node))
    elif node.op == "call_method":
        y = getattr(x, str(node.target))(*node.args[1:], **node.kwargs)
    else:
        kwargs = {key: x if key in ("input", "self") else v for key, v in node.kwargs.items()}
        y = node.target(*[x, *node.args[1:]][: len(node.args)], **kwargs)  # type: ignore[operator]
    return [_PRIMES.index(n) for n in y.shape]


def before_view(node: fx.Node, dims: Dims) -> Dims | None:
    """Return the axes of the first argument of a view, given those of the view; None if the node is
    no view of all elements.
    """
    if is_reshape(node):
        return regrouped(dims, tensor(source(node)).shape)
    if is_permute(node):
        result: Dims = [[] for _ in dims]
        for i, place in enumerate(permutation(node)):
            result[place] = dims[i]
        return result
    if name(node) == "repeat_interleave":
        return _before_repeat(node, dims)
    if name(node) in _EXPANDS:
        return broadcast(dims, tensor(source(node)).shape)
    return None


def _before_repeat(node: fx.Node, dims: Dims) -> Dims | None:
    """Return the axes before each element of a dimension is repeated this many times."""
    n, place = arg(node, 1, "repeats"), arg(node, 2, "dim")
    if not isinstance(n, int) or not isinstance(place, int):
        return None
    result, place = [*dims], place % len(dims)
    size = tensor(source(node)).shape[place]
    result[place] = regrouped([dims[place]], [size, n])[0]
    return result


def strides(node: fx.Node) -> Any:
    x = value(node)
    return x.stride() if isinstance(x, torch.Tensor) else None


def fitting(emit: Emitter, new: fx.Node, node: fx.Node) -> fx.Node:
    """Return a node, with the dtype of another one, which it may replace; a copy of it if code that
    follows needs the same strides. Raises Stays if it may not.
    """
    if tensor(new).shape != tensor(node).shape:
        raise Stays("its result would have another shape")
    dtype = tensor(node).dtype
    new = new if tensor(new).dtype == dtype else emit("to", new, dtype)
    if strides(new) != strides(node) and not _takes_strides(emit, new, node):
        new = emit("contiguous", new)
        if strides(new) != strides(node):
            raise Stays("its result would have other strides")
    return new


def _takes_strides(emit: Emitter, new: fx.Node, node: fx.Node) -> bool:
    """Return whether what follows a node may have the strides of a new one: it ends soon in copies
    and products, and nothing of it is written or leaves the graph. Views that would have to copy
    become reshapes.
    """
    history = emit.history
    moved, reached, waiting = {node: value(new)}, {node}, {*node.users}
    views: list[fx.Node] = []
    while waiting:
        user = min(waiting)
        waiting.remove(user)
        if user in reached or name(user) in CONTIGUOUS:
            continue
        if len(moved) > 32 or is_written(user) or not _follows(user):
            return False
        reached.add(user)
        given = fx.map_arg(
            (user.args, user.kwargs), lambda x: moved.get(x, x.meta.get(_MOVED, value(x)))
        )
        is_method = user.op == "call_method" and name(user) == "view"
        views += [user] * is_method
        try:
            fake = emit.run(user, "reshape" if is_method else user.target, *given)
        except Exception:  # a view that these strides do not allow
            return False
        before = tensors(user.meta.get(_MOVED, value(user)))
        if [x.stride() for x in tensors(fake)] != [x.stride() for x in before]:
            moved[user] = fake
            waiting |= {*user.users}
    leaving = {*history.last().all_input_nodes}
    if any(x in leaving for y in reached for x in history.aliases(y)):
        return False
    for user in views:
        user.target = "reshape"
    for user, fake in moved.items():
        user.meta[_MOVED] = fake
    return True


def _follows(node: fx.Node) -> bool:
    """Return whether a node computes elementwise, views, copies or joins, as fake tensors tell."""
    called = name(node)
    if called == "getitem":
        return not any(isinstance(x, fx.Node) for x in tree_leaves(node.args[1]))
    known = called in ELEMENTWISE or called in CASTS or called in ("cat", "chunk", "split")
    return known or is_view(node) or reads_only(node.target)


def broadcast(dims: Dims, shape: Any) -> Dims:
    """Return the axes of a tensor of this shape that broadcasts to a tensor with these axes."""
    if len(shape) > len(dims):
        raise Stays("a term of the scores has more dimensions than they have")
    last = dims[len(dims) - len(shape) :]
    return [[] if same(n, 1) else dim for n, dim in zip(shape, last)]


class Product(NamedTuple):
    """left @ right, with a label for each dimension. The product is `factor` times that, plus
    `plus` times `term` if there is a term.
    """

    left: fx.Node
    right: fx.Node
    labels: tuple[list[Any], list[Any], list[Any]]  # of left, of right, and of the result
    term: fx.Node | None = None
    plus: float = 1.0
    factor: float = 1.0


def product(node: fx.Node) -> Product | None:
    """Return what a node multiplies, None if it is no product of two tensors."""
    called = name(node)
    if called == "einsum":
        return _einsum(node)
    if called in ("matmul", "bmm", "mm"):
        left, right = source(node), _second(node)
        return Product(left, right, _labels(left, right)) if right is not None else None
    if called == "baddbmm":
        left, right = arg(node, 1, "batch1"), arg(node, 2, "batch2")
        plus, factor = number(arg(node, 3, "beta", 1)), number(arg(node, 4, "alpha", 1))
        if plus is None or factor is None:
            return None
        return Product(left, right, _labels(left, right), source(node), plus, factor)
    return None


def _second(node: fx.Node) -> Any:
    found = [arg(node, 1, key) for key in ("other", "mat2")]
    return next((x for x in found if isinstance(x, fx.Node)), None)


def _labels(left: Any, right: Any) -> tuple[list[Any], list[Any], list[Any]]:
    ranks = tensor(left).dim(), tensor(right).dim()
    batch = [[*range(-rank + 2, 0)] for rank in ranks]
    most = max(batch, key=len)
    a = [*batch[0], "i", "c"] if ranks[0] > 1 else ["c"]
    b = [*batch[1], "c", "j"] if ranks[1] > 1 else ["c"]
    return a, b, [*most, *["i"] * (ranks[0] > 1), *["j"] * (ranks[1] > 1)]


def _einsum(node: fx.Node) -> Product | None:
    equation, *given = node.args
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = [*given[0]]
    if not isinstance(equation, str) or len(given) != 2 or "->" not in equation:
        return None
    inputs, result = equation.replace(" ", "").split("->")
    ranks = [tensor(x).dim() for x in given]
    labels = [_spread(text, rank) for text, rank in zip(inputs.split(","), ranks)]
    if any(len(set(x)) < len(x) for x in labels):
        return None
    dots = max((-i for x in labels for i in x if isinstance(i, int)), default=0)
    out = _spread(result, len(result.replace("...", "")) + dots)
    return Product(given[0], given[1], (labels[0], labels[1], out))  # type: ignore[arg-type]


def _spread(labels: str, rank: int) -> list[Any]:
    """Return a label for each dimension, negative numbers for those of the ellipsis."""
    if "..." not in labels:
        return [*labels]
    before, after = labels.split("...")
    return [*before, *range(-(rank - len(before) - len(after)), 0), *after]


def operand_dims(found: Product, known: dict[Any, list[Axis]]) -> tuple[Dims, Dims]:
    """Return the axes of both operands, given those of labels. Other labels get new axes, added to
    `known`.
    """
    sizes: dict[Any, Any] = {}
    for x, labels in zip(found[:2], found.labels):
        for label, size in zip(labels, tensor(x).shape):
            if not same(size, 1):
                sizes[label] = size
    a, b, result = map(set, found.labels)
    if (a ^ b) - result:
        raise Stays("an einsum sums one of its operands")
    for label in (a | b) - known.keys():
        known[label] = [Axis(sizes[label])] if label in sizes else []
    left, right = (
        [[] if same(n, 1) else known[label] for label, n in zip(labels, tensor(x).shape)]
        for x, labels in zip(found[:2], found.labels)
    )
    return left, right


class Arranger:
    """Emits views that bring tensors into the order of some axes."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit

    def arrange(self, node: fx.Node, dims: Dims, groups: Dims) -> fx.Node:
        """Return a node with one dimension for each group of axes: it has all of them, or none,
        and then the size 1.
        """
        if self.emit.history.is_one_region([node, self.emit.anchor]):
            node, dims = _unpermuted(node, dims, groups)
        here = flat([axis for dim in dims for axis in dim])
        wanted = [axis for group in groups for axis in flat(group) if axis in here]
        if len(wanted) < len(here):
            raise Stays("an operand has an axis that the attention has not")
        if here != wanted:
            if any(len(flat(dim)) != 1 for dim in dims):
                node = self._reshaped(node, [[axis] for axis in here])
            node = self.emit("permute", node, *[here.index(axis) for axis in wanted])
        present = [[axis for axis in flat(group) if axis in here] for group in groups]
        shape = [_size(group) for group in present]
        given = tensor(node).shape
        if len(given) == len(shape) and all(map(same, given, shape)):
            return node
        return self._reshaped(node, present)

    def _reshaped(self, node: fx.Node, groups: Dims) -> fx.Node:
        return self.emit("reshape", node, *self.sizes([_size(group) for group in groups]))

    def expanded(self, node: fx.Node, groups: Dims) -> fx.Node:
        """Expand the dimensions of size 1 to the sizes of these groups, which may be empty."""
        shape = [_size(flat(group)) for group in groups]
        given = tensor(node).shape
        if all(map(same, given, shape)):
            return node
        wanted = [-1 if same(a, b) else b for a, b in zip(given, shape)]
        return self.emit("expand", node, *[x if x == -1 else self.size(x) for x in wanted])

    def sizes(self, shape: list[Any]) -> list[Any]:
        """Return a shape as arguments of a node; one unknown size may be -1."""
        shape = [static(n) for n in shape]
        unknown = [n for n in shape if not isinstance(n, int)]
        known = (n if isinstance(n, int) or len(unknown) > 1 else -1 for n in shape)
        return [self.size(n) for n in known]

    def size(self, n: Any) -> Any:
        """Return a number, or a node that has a symbolic size."""
        n = static(n)
        if isinstance(n, int):
            return n
        early = [node for node in self.emit.history.graph.nodes if node < self.emit.anchor]
        for node in early:
            if isinstance(value(node), torch.SymInt) and same(value(node), n):
                return node
        for node in early:
            x = value(node)
            if node.op == "placeholder" and isinstance(x, torch.Tensor):
                for i, m in enumerate(x.shape):
                    if same(m, n):
                        return self.emit("size", node, i)
        raise Stays("a size of a view is not known")


def _size(axes: list[Axis]) -> Any:
    size: Any = 1
    for axis in axes:
        size = size * axis.size
    return size


def _unpermuted(node: fx.Node, dims: Dims, groups: Dims) -> tuple[fx.Node, Dims]:
    """Return the tensor of which a node is a permutation, if that has the order of these axes."""
    wanted = flat([axis for group in groups for axis in group])
    if not is_permute(node) or _is_ordered(dims, wanted):
        return node, dims
    below = before_view(node, dims)
    if below is None or not _is_ordered(below, wanted):
        return node, dims
    return source(node), below


def _is_ordered(dims: Dims, wanted: list[Axis]) -> bool:
    here = flat([axis for dim in dims for axis in dim])
    return here == [axis for axis in wanted if axis in here]
