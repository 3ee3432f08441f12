"""Finds LayerNorm and RMSNorm, by torch and by hand, and the residual sum before them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fastformer.drop_in.graph.axes import fitting
from fastformer.drop_in.graph.nodes import (
    ELEMENTWISE,
    Emitter,
    History,
    Stays,
    arg,
    dropped,
    is_cast,
    is_like,
    name,
    number,
    source,
    tensor,
)
from fastformer.drop_in.graph.regions import (
    REDUCTIONS,
    Region,
    is_untouched,
    known_function,
    regions,
)
from fastformer.drop_in.graph.torch_functions import left_to_torch
from fastformer.ops import functional

Match = tuple[str, fx.Node, list[fx.Node]]  # the op, what replaces the node, and the pattern


class Norm(NamedTuple):
    """A norm of `input` over its last `rank` dimensions, or over the one at `place`, and the nodes
    that compute it.
    """

    input: fx.Node
    nodes: list[fx.Node]
    is_rms: bool
    eps: float | None
    weight: fx.Node | None = None
    bias: fx.Node | None = None
    unbiased: bool = False
    rank: int = 1
    place: int = -1


def norm(history: History, node: fx.Node) -> Match | None:
    """Match a norm that ends at this node, with the residual sum before it if there is one."""
    found = _norm_of_torch(node) or _norm_by_hand(node)
    if found is None:
        return None
    reads = [x for x in (found.input, found.weight, found.bias) if x is not None]
    if not is_untouched(history, found.nodes, reads, node):
        raise Stays("what it reads is changed in place, or a region of autocast begins within it")
    emit = Emitter(history, node)
    found = found._replace(
        weight=_row(emit, found, found.weight), bias=_row(emit, found, found.bias)
    )
    match = _sum_and_norm(history, node, found, emit)
    if match is not None:
        return match
    options = {"unbiased": True} if found.unbiased else {}
    order = _order(node, found)
    x = _permuted(emit, found.input, order)
    op = functional.rms_norm if found.is_rms else functional.layer_norm
    given = (found.weight,) if found.is_rms else (found.weight, found.bias)
    new = emit(op, x, [*tensor(x).shape[-found.rank :]], *given, found.eps, **options)
    return op.__name__, fitting(emit, _permuted(emit, new, _inverse(order)), node), found.nodes


def _order(node: fx.Node, found: Norm) -> list[int]:
    """Return the dimensions as the op takes them: those of the norm last, and the others as they
    lie in the memory of its result, which then needs no copy.
    """
    n, stride = tensor(node).dim(), tensor(node).stride()
    last = [*range(n - found.rank, n)] if found.place == -1 else [n + found.place]
    others = [i for i in range(n) if i not in last]
    if not tensor(node).is_contiguous():
        others.sort(key=lambda i: stride[i], reverse=True)
    return [*others, *last]


def _inverse(order: list[int]) -> list[int]:
    return [order.index(i) for i in range(len(order))]


def _permuted(emit: Emitter, x: fx.Node, order: list[int]) -> fx.Node:
    return x if order == sorted(order) else emit(torch.permute, x, order)


def _row(emit: Emitter, found: Norm, row: fx.Node | None) -> fx.Node | None:
    """Return the weight or the bias, with an element for each place of the norm."""
    if row is None or found.rank > 1:
        return row
    width, row = tensor(found.input).shape[found.place], _flat(emit, row)
    return row if tensor(row).shape[0] == width else emit("expand", row, width)


def _flat(emit: Emitter, row: fx.Node) -> fx.Node:
    return row if tensor(row).dim() == 1 else emit("flatten", row)


def _norm_of_torch(node: fx.Node) -> Norm | None:
    if name(node) not in ("layer_norm", "rms_norm") or left_to_torch(node):
        return None
    shape, is_rms = arg(node, 1, "normalized_shape"), name(node) == "rms_norm"
    eps = arg(node, 3, "eps") if is_rms else arg(node, 4, "eps", 1e-5)
    eps = None if eps is None else number(eps)
    weight, bias = arg(node, 2, "weight"), None if is_rms else arg(node, 3, "bias")
    rank = 1 if isinstance(shape, int) else len(shape)
    return Norm(source(node), [node], is_rms, eps, weight, bias, rank=rank)


def _norm_by_hand(node: fx.Node) -> Norm | None:
    """Return the norm that a region of means, roots and products computes."""
    if name(node) not in ("mul", "div", "add"):
        return None
    last = tensor(node).dim() - 1
    for place in (last, 1) if last > 1 else (last,):  # the channels of images are the second one
        found = next(regions(node, ELEMENTWISE | REDUCTIONS, place), None)
        width = tensor(node).shape[place] if found is not None else 0
        if found is None or len(found.rows) > 2 or not isinstance(width, int) or width < 2:
            continue
        known = _known_norm(found, place, last, width)
        if known is not None:
            return known
    return None


def _known_norm(found: Region, place: int, last: int, width: int) -> Norm | None:
    """Return the norm over the dimension `place` that a region computes on random numbers."""
    random = torch.Generator().manual_seed(0)
    shapes = [[16, *[2, 3, 2, 3, 2][: last - 1], width], *(tensor(row).shape for row in found.rows)]
    x, *rows = (torch.randn(shape, dtype=torch.float64, generator=random) for shape in shapes)
    sizes = 10.0 ** torch.arange(6.0, -10.0, -1.0, dtype=torch.float64)  # eps counts in small rows
    x[4:8, ..., 0] *= 1e4  # rows in which one number stands out
    x = (x + 1) * sizes.view(-1, *[1] * last)
    constants = [number(y) for n in found.nodes for y in (*n.args, *n.kwargs.values())]
    functions: dict[Any, Callable[[], Tensor]] = {}
    for eps in {1e-24 / width, *(c for c in constants if c is not None and 0 <= c <= 1)}:
        for order in ([*range(len(rows))], [*range(len(rows))][::-1]):
            by_place = [rows[i].flatten().expand(width) for i in order]
            functions |= _candidates(x, eps, order, by_place)
    given = {found.input: x.movedim(-1, place), **dict(zip(found.rows, rows))}
    key = known_function(found, given, functions, place)
    if key is None:
        return None
    kind, eps, *places = key
    weight, bias = (*[found.rows[i] for i in places], None, None)[:2]
    x_of, nodes = found.input, found.nodes
    if is_cast(x_of):
        x_of, nodes = source(x_of), [x_of, *nodes]
    from_last = place - last - 1
    return Norm(x_of, nodes, kind == "rms", eps, weight, bias, kind == "std", place=from_last)


def _candidates(
    x: Tensor, eps: float, order: list[int], rows: list[Tensor]
) -> dict[Any, Callable[[], Tensor]]:
    """Return the norms of the last dimension with this eps and these rows, weight and bias."""
    shape, (weight, bias) = [x.shape[-1]], (*rows, None, None)[:2]
    centred, deviation = x - x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
    by, plus = 1 if weight is None else weight, 0 if bias is None else bias
    functions: dict[Any, Callable[[], Tensor]] = {
        "var": lambda: F.layer_norm(x, shape, weight, bias, eps),
        "std": lambda: centred / (deviation + eps) * by + plus,
    }
    if bias is None:
        functions["rms"] = lambda: F.rms_norm(x, shape, weight, eps)
    return {(kind, eps, *order): function for kind, function in functions.items()}


def _sum_and_norm(history: History, node: fx.Node, found: Norm, emit: Emitter) -> Match | None:
    total = found.input
    if (
        name(total) not in ("add", "add_")
        or total.kwargs
        or found.weight is None
        or found.rank > 1
        or found.place != -1
    ):
        return None
    a, b = total.args[:2]
    if not (is_like(a, total) and is_like(b, total)) or a is b or len(total.args) > 2:
        return None
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    readers = {*total.users} | {user for user in a.users if name(total) == "add_" and user > total}
    outside = readers - {*found.nodes, total}
    if any(user < node for user in outside):
        return None  # which reads the sum before the norm
    if name(total) == "add_" and not _is_its_own(history, total, a):
        return None
    residual, branch = (b, a) if _drops(a) and not _drops(b) else (a, b)
    p, pattern = 0.0, [*found.nodes, total]
    if _drops(branch) and len(branch.users) == 1:
        p = dropped(branch)
        pattern.append(branch)
        branch = source(branch)
    reads = [x for x in (residual, branch) if name(total) != "add_" or x is not a]
    if not is_untouched(history, pattern, reads, node):
        return None
    if name(total) == "add_":
        total = _out_of_place(history, total)
        pattern = [*found.nodes, total, *pattern[len(found.nodes) + 1 :]]
    order = _order(node, found)
    given = (*(_permuted(emit, x, order) for x in (branch, residual)), found.weight)
    if found.is_rms:
        both = emit(functional.dropout_add_rms_norm, *given, p, found.eps)
    else:
        options = {"unbiased": True} if found.unbiased else {}
        op = functional.dropout_add_layer_norm
        both = emit(op, *given, found.bias, p, found.eps, **options)
    parts = (emit(operator.getitem, both, i) for i in (0, 1))
    normed, summed = (_permuted(emit, x, _inverse(order)) for x in parts)
    try:
        summed = fitting(emit, summed, total) if outside else summed
    except Stays:  # the norm is contiguous, and the sum is not
        if total is not found.input:
            raise
        return None
    normed = fitting(emit, normed, node)
    total.replace_all_uses_with(summed, outside.__contains__)
    return f"dropout_add_{'rms' if found.is_rms else 'layer'}_norm", normed, pattern


def _is_its_own(history: History, total: fx.Node, first: fx.Node) -> bool:
    """Return whether the result of a sum in place is read under its own name alone, and nobody else
    writes it.
    """
    if any(w is not total for w in history.writers(total, first, history.last())):
        return False
    others = [x for x in history.aliases(total) if x not in (total, first)]
    late = any(user > total for x in others for user in x.users)
    return not late and all(x.op != "placeholder" for x in (*others, first))


def _out_of_place(history: History, node: fx.Node) -> fx.Node:
    """Replace a sum in place by one that is not."""
    new, first = Emitter(history, node)(torch.add, *node.args), source(node)
    node.replace_all_uses_with(new)
    first.replace_all_uses_with(new, lambda user: user > node)
    history.graph.erase_node(node)
    return new


def _drops(node: Any) -> bool:
    return name(node) == "dropout" and dropped(node) > 0.0
