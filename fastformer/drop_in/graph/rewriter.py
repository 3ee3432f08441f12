"""Rewrites a graph of torch's functions: puts fastformer's ops in place of what they compute."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks

from fastformer.drop_in import capture
from fastformer.drop_in.capture import WEIGHTS
from fastformer.drop_in.graph.axes import product
from fastformer.drop_in.graph.fused_attention import fused_attention
from fastformer.drop_in.graph.layers import feed_forward, loss
from fastformer.drop_in.graph.nodes import History, Stays, name, value, written
from fastformer.drop_in.graph.norms import Match, norm
from fastformer.drop_in.graph.torch_functions import attention_of_torch

KINDS = ("attention", "norm", "feed_forward", "loss")
_OWN = str(Path(__file__).parents[2] / "ops")


class Place(NamedTuple):
    """What became of a part of a graph: its kind, the op that replaces it or "", the reason why it
    stays or "", the line of the model's code, and the node.
    """

    kind: str
    op: str
    reason: str
    line: str
    node: fx.Node


@dataclass
class Rewriting:
    """What the rewriter did to the graphs that it was given."""

    places: list[Place] = field(default_factory=list)

    def fused(self) -> Counter[str]:
        """Return how often each op was put into a graph."""
        return Counter(place.op for place in self.places if place.op)

    def stays(self) -> list[Place]:
        """Return what stays."""
        return [place for place in self.places if not place.op]


_recording: list[Rewriting] = []


@contextmanager
def recording() -> Iterator[Rewriting]:
    """A context that records what the rewriter does."""
    _recording.append(Rewriting())
    try:
        yield _recording[-1]
    finally:
        _recording.pop()


def _record(kind: str, op: str, reason: str, node: fx.Node) -> None:
    for rewriting in _recording:
        rewriting.places.append(Place(kind, op, reason, line_of(node), node))


def line_of(node: fx.Node) -> str:
    """Return the line of code that a node comes from, as file:line."""
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return next((":".join(x) for x in reversed(found) if x[0] != capture.__file__), "")


def module_of(node: fx.Node, names: set[str]) -> str:
    """Return the name of the module in whose forward a node stands."""
    stack = node.meta.get("nn_module_stack") or {}
    for path, _ in reversed([*stack.values()]):
        parts = path.replace("['", ".").replace("']", "").split(".")
        for i in range(len(parts)):
            if (found := ".".join(parts[i:])) in names:
                return found
    return ""


def _attention(history: History, node: fx.Node) -> Match | None:
    op = "scaled_dot_product_attention"
    new = attention_of_torch(history, node)
    if new is not None:
        return op, new, []
    found = product(node)
    result = None if found is None else fused_attention(history, node, found)
    if result is None:
        return None
    history.weights |= {*result[1].nodes}
    return op, result[0], result[1].nodes


_MATCHERS: tuple[tuple[str, Callable[[History, fx.Node], Match | None]], ...] = (
    ("attention", _attention),
    ("norm", norm),
    ("feed_forward", feed_forward),
    ("loss", loss),
)


@contextmanager
def _without_hooks() -> Iterator[None]:
    """A context in which hooks of saved tensors, as those of a checkpoint, see none."""
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        yield


@unset_fake_temporarily()  # parts of a graph run on numbers
@_without_hooks()
def rewrite(graph: fx.Graph, kinds: tuple[str, ...] = KINDS, keeps_weights: bool = True) -> None:
    """Replace parts of a graph of Dynamo, in place. kinds: which ones, of `KINDS`. keeps_weights:
    whether the graph still returns weights of attention that it returned, or None for them.
    """
    try:
        history = History(graph)
    except Stays as stays:
        _record("graph", "", str(stays), graph.output_node())
        return
    for node in reversed(list(graph.nodes)):  # a norm by hand: its last node first
        for kind, match in _MATCHERS:
            if kind not in kinds or node._erased or not isinstance(value(node), (Tensor, tuple)):
                continue
            if line_of(node).startswith(_OWN):  # an op that Dynamo has traced
                continue
            emitted = len(history.emitted)
            found, reason = None, ""
            try:
                found = match(history, node)
            except Stays as stays:
                reason = str(stays)
            except Exception as error:  # which the op raises for a call that it does not take
                reason = f"{type(error).__name__}: {error}"
            if reason:
                _record(kind, "", reason, node)
            if found is not None:
                op, new, pattern = found
                _record(kind, op, "", node)
                _replace(history, node, new, pattern)
            history.undo(emitted)
    for node in sorted({*graph.output_node().all_input_nodes} & history.weights):
        if keeps_weights:
            _record("attention", "", WEIGHTS, node)
        else:
            graph.output_node().replace_input_with(node, None)  # type: ignore[arg-type]
            _erase(history, node)
    graph.lint()


def rewrite_all(gm: fx.GraphModule, kinds: tuple[str, ...], keeps_weights: bool = True) -> None:
    """Rewrite a graph and the graphs of the regions in it, which inductor does by itself."""
    for node in gm.graph.find_nodes(op="get_attr"):
        inner = getattr(gm, node.target, None)
        if isinstance(inner, fx.GraphModule):
            rewrite_all(inner, kinds, keeps_weights)
    rewrite(gm.graph, kinds, keeps_weights)
    gm.recompile()


def _replace(history: History, node: fx.Node, new: fx.Node, pattern: list[fx.Node]) -> None:
    if new is not node:
        node.replace_all_uses_with(new)
    for old in sorted({node, *pattern}, reverse=True):
        _erase(history, old)


def _erase(history: History, node: fx.Node) -> None:
    """Remove a node that nobody reads, and what is then read by nobody."""
    if node._erased or node.users or not _may_go(history, node):
        return
    before = node.all_input_nodes
    history.graph.erase_node(node)
    for x in before:
        if name(x) and not x.users and not written(x):
            _erase(history, x)


def _may_go(history: History, node: fx.Node) -> bool:
    """Return whether nobody reads what a node writes."""
    if node.op == "placeholder" or node.op == "get_attr":
        return False
    for x in written(node):
        for alias in history.aliases(x):
            if any(user > node for user in alias.users) or alias.op == "placeholder":
                return False
    return True
