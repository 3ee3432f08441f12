"""Regions of a graph that compute one function of one tensor, however it is written.

What a region computes is found by running it on numbers: it is then compared to known functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fastformer.drop_in.graph.nodes import History, is_cast, is_tensor, name, source, tensor

REDUCTIONS = {"mean", "var", "std", "norm", "normalize"}
_MOST = 20  # nodes


class Region(NamedTuple):
    """Nodes that compute the last of them from `input` and rows of parameters."""

    input: fx.Node
    rows: list[fx.Node]
    nodes: list[fx.Node]

    def values(self, given: dict[fx.Node, Tensor]) -> Tensor:
        """Run the nodes on these values of the input and of the rows; casts do nothing."""
        known: dict[fx.Node, Any] = {node: x.clone() for node, x in given.items()}
        for node in self.nodes:
            if is_cast(node):
                known[node] = known[source(node)]
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            call: Any = node.target
            call = getattr(Tensor, call) if isinstance(call, str) else call
            known[node] = call(*args, **kwargs)
        return known[self.nodes[-1]]


def regions(node: fx.Node, functions: set[str], reduced: int | None = None) -> Iterator[Region]:
    """Yield the regions of such functions that end at a node, the smallest first. Nobody outside
    reads the nodes before the last one. reduced: a dimension that one of them reduces; then they
    may read tensors of that dimension alone, the rows.
    """
    nodes: set[fx.Node] = set()
    rows: set[fx.Node] = set()
    front = {node}
    while front and len(nodes) < _MOST:
        last = max(front)
        passes = name(last).rstrip("_") in functions or is_cast(last)
        if not passes or (last is not node and any(user not in nodes for user in last.users)):
            return
        front.remove(last)
        nodes.add(last)
        for x in last.all_input_nodes:
            if not is_tensor(x):
                return
            is_row = reduced is not None and _is_row(tensor(x), tensor(node).shape, reduced)
            (rows if is_row else front).add(x)
        whole = reduced is None or any(name(x) in REDUCTIONS for x in nodes)
        if len(front) == 1 and whole and tensor(*front).shape == tensor(node).shape:
            yield Region(next(iter(front)), sorted(rows), sorted(nodes))


def _is_row(x: Tensor, shape: torch.Size, place: int) -> bool:
    """Return whether a tensor has a number for each place in this dimension, or one for all."""
    if not (x.dim() == 1 < len(shape) or isinstance(x, torch.nn.Parameter)):
        return False
    wide = x.dim() >= len(shape) - place and x.shape[place - len(shape)] == shape[place]
    return x.numel() == 1 or (wide and x.numel() == shape[place])


def known_function(
    found: Region,
    given: dict[fx.Node, Tensor],
    functions: dict[Any, Callable[[], Tensor]],
    place: int = -1,
) -> Any:
    """Return the key of the function that a region computes on these values, None if none does. The
    functions return the dimension `place` of the region as the last one.
    """
    try:
        y = found.values(given).movedim(place, -1)
    except Exception:  # a function that does not take such numbers
        return None
    for key, function in functions.items():
        if y.shape == (z := function()).shape and torch.allclose(y.double(), z, 1e-5, 1e-6):
            return key
    return None


def is_untouched(
    history: History, nodes: list[fx.Node], reads: list[fx.Node], end: fx.Node
) -> bool:
    """Return whether nodes compute in one region of autocast, and what they read stays the same
    until `end`, where it is read instead; a backward may read it later.
    """
    start = min(nodes)
    if not history.is_one_region([*nodes, end]):
        return False
    if any(w not in nodes for x in nodes for w in history.writers(x, x, end)):
        return False
    return not any(history.writers(x, start, end) or history.written_from(x, start) for x in reads)
