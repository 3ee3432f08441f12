"""What the rewriter does to a compiled model, for `explain`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from fastformer.dispatch import backends
from fastformer.drop_in.graph.compile import (
    BESIDE_INDUCTOR,
    InductorPass,
    dynamo_backend,
    dynamo_backend_eager,
    rewrite_all,
)
from fastformer.drop_in.graph.rewriter import KINDS, line_of, recording

_OPTION = "pre_grad_custom_pass"
Row = tuple[str, str, str, str]  # of an `Explanation`


def kinds_of(model: Any) -> tuple[str, ...] | None:
    """Return what the rewriter replaces when torch.compile compiles a model, None without it."""
    compiler = getattr(getattr(model, "dynamo_ctx", None), "callback", None)
    while compiler is not None:
        if compiler is dynamo_backend_eager:
            return KINDS
        own = getattr(compiler, "config", None), getattr(compiler, "kwargs", {}).get("options")
        found = next((x[_OPTION] for x in own if x and _OPTION in x), None)
        if isinstance(found, InductorPass):
            return found.kinds
        if compiler is dynamo_backend:
            return BESIDE_INDUCTOR
        names = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "compiler_fn")
        compiler = next((x for n in names if (x := getattr(compiler, n, None)) is not None), None)
    found = torch._inductor.config.pre_grad_custom_pass
    return found.kinds if isinstance(found, InductorPass) else None


def explain_compiled(
    model: nn.Module, kinds: tuple[str, ...], *args: Any, **kwargs: Any
) -> list[Row]:
    """Return what ran in a model whose graphs are rewritten, and not compiled further."""
    rows: list[Row] = []
    names = {name for name, _ in model.named_modules()}

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        reason = getattr(gm, "compile_subgraph_reason", None)
        if reason is not None and getattr(reason, "graph_break", False):
            frames = [f"{frame.filename}:{frame.lineno}" for frame in reason.user_stack[-1:]]
            why = f"{str(reason.reason).splitlines()[0]}: {' '.join(frames)}"
            rows.append(("", "graph break", "torch", why))
        with recording() as rewriting:
            rewrite_all(gm, kinds)
        for place in reversed(rewriting.stays()):
            why = f"{place.reason} ({place.line})"
            rows.append((_module(place.node, names), place.kind, "torch", why))
        return _Runner(gm, rows, names).run

    torch.compile(model, backend=backend)(*args, **kwargs)
    return rows


class _Runner(fx.Interpreter):
    """Runs a graph, and notes what the ops in it run on."""

    def __init__(self, gm: fx.GraphModule, rows: list[Row], names: set[str]) -> None:
        super().__init__(gm)
        self._rows, self._names = rows, names

    def run_node(self, n: fx.Node) -> Any:
        def note(choice: backends.Choice) -> None:
            why = f"{choice.reason} ({line_of(n)})"
            self._rows.append((_module(n, self._names), choice.op, choice.backend, why))

        with backends.observe(on_choice=note):
            return super().run_node(n)


def _module(node: fx.Node, names: set[str]) -> str:
    """Return the name of the module in whose forward a node stands."""
    stack = node.meta.get("nn_module_stack") or {}
    for path, _ in reversed([*stack.values()]):
        parts = path.replace("['", ".").replace("']", "").split(".")
        for i in range(len(parts)):
            if (name := ".".join(parts[i:])) in names:
                return name
    return ""
