"""What the nodes of a graph of torch's functions compute, read and write.

Dynamo gives each node the fake tensor that it returns, in `meta["example_value"]`. Fake tensors
share storage as the real ones will, so aliases are known exactly.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map


class Stays(Exception):
    """A part of the graph stays as it is, for this reason."""


_NAMES = {
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "iadd": "add_",
    "isub": "sub_",
    "imul": "mul_",
    "itruediv": "div_",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "special_softmax": "softmax",
    **{f"i{x}": "bitwise_" + x + "_" for x in ("and", "or", "xor")},
    **dict.fromkeys(("ipow", "imod", "ifloordiv", "ilshift", "irshift", "imatmul"), "changes_"),
}
_OPERATORS = {"and_", "or_", "not_", "is_"}  # of the module operator, which write nothing
CASTS = {  # and copies
    *("to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous", "clone"),
    *("alias", "view_as", "identity", "positive"),
}
ELEMENTWISE = {
    *("relu", "gelu", "silu", "sigmoid", "tanh", "erf", "exp", "mul", "add", "sub", "div"),
    *("pow", "square", "neg", "reciprocal", "sqrt", "rsqrt", "clamp", "clamp_min", "abs"),
    *("softplus",),
}
_WRITTEN = "fastformer: writers"  # in the meta of a node: those that write its memory
# What begins or ends a region in which torch's functions compute in another way.
_REGIONS = ("enter_autocast", "exit_autocast", "set_grad_enabled", "enter_inference_mode")


@functools.cache
def _name_of(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1] if target.namespace == "aten" else ""
    module = getattr(target, "__module__", None) or "torch"
    if module == "_operator" and target.__name__ in _OPERATORS:
        return target.__name__[:-1]
    if module.split(".")[0] not in ("torch", "_operator", "builtins", "math"):
        return ""
    return getattr(target, "__name__", "")


def name(node: Any) -> str:
    """Return the name of torch's function, the same for a method, an operator and a function; that
    of an operation in place ends with _. The name of anything else is empty.
    """
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return ""
    found = _name_of(node.target)
    if found == "getattr":
        return str(node.args[1])
    if found.startswith("__") and found.endswith("__"):
        found = found[2:-2]
    return _NAMES.get(found, found)


def value(x: Any) -> Any:
    """Return the fake value of a node, or what is no node as it is."""
    return x.meta.get("example_value") if isinstance(x, fx.Node) else x


def tensor(x: Any) -> Tensor:
    """Return the fake tensor of a node. Raises Stays if it has none."""
    found = value(x)
    if type(found) not in (FakeTensor, Tensor, torch.nn.Parameter):
        raise Stays("a value in it is no plain tensor")
    return found


def is_tensor(x: Any) -> bool:
    return isinstance(x, fx.Node) and isinstance(value(x), Tensor)


def is_like(x: Any, node: fx.Node) -> bool:
    """Return whether x is a tensor of the same shape and dtype."""
    if not is_tensor(x):
        return False
    a, b = tensor(x), tensor(node)
    return a.shape == b.shape and a.dtype == b.dtype


def arg(node: fx.Node, place: int, key: str, default: Any = None) -> Any:
    """Return the argument of a node at this place or of this name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(key, default)


def source(node: fx.Node) -> Any:
    """Return the first argument."""
    found = arg(node, 0, "input")
    return node.kwargs.get("self") if found is None else found


def static(n: Any) -> Any:
    """Return a size as an int, if it is a symbolic one that is known."""
    known = n.node.maybe_as_int() if isinstance(n, torch.SymInt) else None
    return n if known is None else known


def same(a: Any, b: Any) -> bool:
    """Return whether two sizes are known to be equal."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return a == b if type(a) is type(b) is int else statically_known_true(a == b)


def number(x: Any) -> float | None:
    """Return the value of a number, or of a tensor of one element that is a constant."""
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return float(x)
    if isinstance(x, fx.Node) and isinstance(value(x), torch.SymFloat):
        symbol = value(x).node.expr
        return float(value(x)) if symbol.is_Symbol or symbol.is_number else None
    return uniform(x) if is_tensor(x) else None


_FILLS = {
    **dict.fromkeys(("tensor", "as_tensor", "scalar_tensor"), 0),
    **dict.fromkeys(("full", "full_like", "new_full"), 1),
}
RANDOM = (  # parts of names
    *("rand", "bernoulli", "dropout", "normal", "multinomial", "empty", "rrelu", "poisson"),
    *("gumbel", "exponential", "cauchy", "geometric", "binomial", "gamma", "dirichlet"),
    "fractional",
)


def evaluated(node: fx.Node, most: int, known: dict[fx.Node, Any] | None = None) -> Any:
    """Return the tensor that the graph makes of numbers alone, on the CPU. None if it reads inputs,
    is written or random, or takes tensors of more than `most` elements. known: values of nodes; new
    ones are added.
    """
    needed: set[fx.Node] = set()
    known = {} if known is None else known
    stack = [node]
    while stack:
        x = stack.pop()
        if x in known or x in needed:
            continue
        sizes = [t.numel() for t in tensors(x)]
        if not name(x) or is_written(x) or any(part in name(x) for part in RANDOM):
            return None
        if any(not isinstance(n, int) or n > most for n in sizes):
            return None
        stack += x.all_input_nodes
        needed.add(x)
    try:
        with torch.device("cpu"):
            for x in sorted(needed):
                given = fx.map_arg((x.args, x.kwargs), known.__getitem__)
                args, kwargs = tree_map(_on_cpu, given)
                call: Any = getattr(args[0], x.target) if isinstance(x.target, str) else x.target
                known[x] = call(*args[isinstance(x.target, str) :], **kwargs)
    except Exception:  # a call that does not take such arguments
        return None
    found = known[node]
    for x in needed:
        if len(x.users) < 2:  # what several layers read, as their mask, is kept
            del known[x]
    return found


def _on_cpu(x: Any) -> Any:
    return torch.device("cpu") if isinstance(x, torch.device) else x


def uniform(node: fx.Node) -> float | None:
    """Return the number in all elements of a tensor, if the graph makes it of a constant and writes
    none of them.
    """
    found = None if is_written(node) else _uniform(node)
    if found is None or not tensor(node).is_floating_point():
        return None
    return float(torch.tensor(found, dtype=tensor(node).dtype))


def is_written(node: fx.Node) -> bool:
    """Return whether a node writes the memory of this one."""
    return bool(writers_of(node))


def writers_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that write the memory of this one."""
    return node.meta.get(_WRITTEN, [])


def _uniform(node: fx.Node) -> float | None:
    called = name(node)
    if called in _FILLS:
        place = 2 if called == "new_full" else _FILLS[called]
        given = arg(node, place, "fill_value", node.kwargs.get("data"))
        return None if isinstance(given, (fx.Node, list, tuple)) else number(given)
    for prefix, constant in (("zeros", 0.0), ("ones", 1.0), ("new_zeros", 0.0), ("new_ones", 1.0)):
        if called in (prefix, prefix + "_like"):
            return constant
    if called in CASTS or called in ("expand", "reshape", "view"):
        return number(source(node))
    found = evaluated(node, 1)
    return float(found) if isinstance(found, Tensor) and found.numel() == 1 else None


def is_cast(node: fx.Node) -> bool:
    """Return whether a node only changes the dtype or the memory order of its first argument."""
    if name(node) not in CASTS:
        return False
    given = source(node)
    return is_tensor(given) and all(tensor(x).is_floating_point() for x in (given, node))


def is_dropout(node: fx.Node) -> bool:
    return name(node) in ("dropout", "dropout_")


def dropped(node: fx.Node) -> float:
    """Return the probability of a dropout, 0 if it is off."""
    p = number(arg(node, 1, "p", 0.5))
    if p is None:
        raise Stays("the probability of the dropout is no number")
    training = arg(node, 2, "training", node.kwargs.get("train", True))
    if isinstance(training, fx.Node):
        raise Stays("whether the dropout is on is not known")
    return p if training else 0.0


@functools.cache
def _inplace_argument(target: Any) -> int | None:
    if isinstance(target, str) or not inspect.isfunction(target):
        return None
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


def written(node: fx.Node) -> list[Any]:
    """Return the arguments whose elements a node may change."""
    if node.op not in ("call_function", "call_method", "call_module"):
        return []
    called, target = name(node), node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return [*node.all_input_nodes] if any(map(_writes_inputs, _regions_of(node))) else []
    if isinstance(target, torch._ops.OpOverload):
        given = target._schema.arguments
        places = [i for i, a in enumerate(given) if a.alias_info and a.alias_info.is_write]
        return [arg(node, i, given[i].name) for i in places]
    packet = isinstance(target, torch._ops.OpOverloadPacket)
    foreign = not called or (packet and not _is_aten(target))
    if foreign or node.op == "call_module":  # what is not torch's may write anything
        return [] if reads_only(target) else [*node.all_input_nodes]
    found = [node.kwargs["out"]] if "out" in node.kwargs else []
    if called.endswith("_") or called in ("setitem", "delitem"):
        found.append(source(node))
    if called in ("batch_norm", "instance_norm"):  # which keep running means
        found += node.all_input_nodes[1:]
    if called == "embedding" and arg(node, 3, "max_norm") is not None:
        found.append(arg(node, 1, "weight"))
    place = _inplace_argument(target)
    if place is not None and arg(node, place, "inplace", False):
        found.append(source(node))
    return found


def _regions_of(node: fx.Node) -> list[fx.Graph]:
    """Return the graphs that a higher-order op runs: of a checkpoint, of a branch."""
    owner, graphs = node.graph.owning_module, []
    for x in node.all_input_nodes:
        inner = getattr(owner, str(x.target), None) if x.op == "get_attr" else None
        if isinstance(inner, fx.GraphModule):
            graphs.append(inner.graph)
    return graphs


def _writes_inputs(graph: fx.Graph) -> bool:
    inputs = {m for x in graph.nodes if x.op == "placeholder" for m in _memory(x)}
    return any(_memory(x) & inputs for node in graph.nodes for x in written(node))


def _is_aten(target: Any) -> bool:
    return target._qualified_op_name.startswith("aten::")


def reads_only(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace == "fastformer" and not target._schema.is_mutable
    return getattr(target, "__module__", "").split(".")[0] in ("einops", "einx", "fastformer")


class History:
    """Which tensors of a graph share memory, and when it is written."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._writers: dict[int, list[fx.Node]] = {}
        self._members: dict[int, list[fx.Node]] = {}
        self._inputs: set[int] = set()
        self._regions: list[fx.Node] = []
        self.emitted: list[fx.Node] = []
        self.weights: set[fx.Node] = set()  # of attention that is fused, and what they pass
        self.values: dict[fx.Node, Any] = {}  # of nodes that read no inputs
        for node in graph.nodes:
            if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors(node))):
                raise Stays("a transform of torch.func is in the graph")
            self.add(node)

    def add(self, node: fx.Node) -> None:
        node.meta[_WRITTEN] = [w for m in _memory(node) for w in self._writers.get(m, ())]
        for memory in _memory(node):
            self._members.setdefault(memory, []).append(node)
        if node.op == "placeholder" and not isinstance(value(node), torch.nn.Parameter):
            self._inputs |= _memory(node)
        if name(node).strip("_") in _REGIONS:
            self._regions.append(node)
        for x in written(node):
            for memory in _memory(x):
                self._writers.setdefault(memory, []).append(node)
                for alias in self._members.get(memory, ()):
                    alias.meta[_WRITTEN].append(node)

    def writers(self, node: Any, start: fx.Node, end: fx.Node) -> list[fx.Node]:
        """Return the nodes between these two that may write the memory of a node, in order."""
        memory = _memory(node)
        if memory & self._inputs:  # two inputs of a model may share memory
            memory = memory | (self._inputs & self._writers.keys())
        found = {w for m in memory for w in self._writers.get(m, ()) if not w._erased}
        return sorted(w for w in found if start < w < end)

    def written_from(self, node: Any, start: fx.Node) -> bool:
        """Return whether this node or a later one writes the memory of a tensor. The backward may
        read what a fused op has read.
        """
        found = (w for m in _memory(node) for w in self._writers.get(m, ()))
        return any((w > start or w is start) and not w._erased for w in found)

    def last(self) -> fx.Node:
        """Return the output of the graph."""
        return self.graph.output_node()

    def undo(self, count: int) -> None:
        """Remove the emitted nodes after this many, unless somebody reads them."""
        while len(self.emitted) > count:
            node = self.emitted.pop()
            if not node.users and not node._erased:
                self.graph.erase_node(node)

    def aliases(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that share memory with a node."""
        found = [x for memory in _memory(node) for x in self._members[memory]]
        return [x for x in found if not x._erased]

    def is_one_region(self, nodes: list[fx.Node]) -> bool:
        """Return whether torch's functions compute in the same way in all of these nodes."""
        return not any(min(nodes) < region < max(nodes) for region in self._regions)

    def region(self, anchor: fx.Node) -> ExitStack:
        """Return a context in which torch's functions compute as at this node."""
        entered: list[fx.Node] = []
        for node in self._regions:
            if name(node) == "_enter_autocast" and node < anchor:
                entered.append(node)
            elif name(node) == "_exit_autocast" and node < anchor and node.args[0] in entered:
                entered.remove(node.args[0])  # type: ignore[arg-type]
        context = ExitStack()
        for node in entered:
            kind, dtype, enabled, cache = node.args
            context.enter_context(torch.autocast(kind, dtype, enabled, cache))  # type: ignore[arg-type]
        return context


def tensors(x: Any) -> list[Tensor]:
    """Return the tensors in a value, or in that of a node."""
    leaves = (t for y in tree_leaves(x) for t in tree_leaves(value(y)))
    return [t for t in leaves if isinstance(t, Tensor)]


def _memory(x: Any) -> set[int]:
    plain = (t for t in tensors(x) if t.layout is torch.strided and not t.is_nested)
    return {t.untyped_storage()._cdata for t in plain}


class Emitter:
    """Adds nodes in front of a node, with the fake tensors that they return."""

    def __init__(self, history: History, anchor: fx.Node) -> None:
        self.history, self.anchor = history, anchor
        fakes = (value(n) for n in (anchor, *anchor.all_input_nodes))
        self._mode = next(x.fake_mode for x in fakes if isinstance(x, FakeTensor))

    def __call__(self, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> fx.Node:
        graph = self.history.graph
        op = "call_method" if isinstance(target, str) else "call_function"
        with graph.inserting_before(self.anchor):
            node = graph.create_node(op, target, args, kwargs)
        self.history.emitted.append(node)
        for key in ("stack_trace", "nn_module_stack"):
            if key in self.anchor.meta:
                node.meta[key] = self.anchor.meta[key]
        given, options = fx.map_arg((args, kwargs), value)
        node.meta["example_value"] = self.run(self.anchor, target, given, options)
        self.history.add(node)
        return node

    def run(self, place: fx.Node, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function or a method with fake tensors, as at this node."""
        with self._mode, self.history.region(place):
            call = getattr(args[0], target) if isinstance(target, str) else target
            return call(*args[isinstance(target, str) :], **kwargs)
