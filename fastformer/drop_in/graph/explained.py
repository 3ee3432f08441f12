"""What the rewriter does to a compiled model, for `explain`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fastformer.dispatch import backends
from fastformer.drop_in.capture import at_line, captured
from fastformer.drop_in.graph.compile import (
    BESIDE_INDUCTOR,
    InductorPass,
    dynamo_backend,
    dynamo_backend_eager,
)
from fastformer.drop_in.graph.rewriter import KINDS, line_of, module_of, recording, rewrite_all

_OPTION = "pre_grad_custom_pass"
Row = tuple[str, str, str, str]  # of an `Explanation`


def kinds_of(model: Any) -> tuple[str, ...] | None:
    """Return what the rewriter replaces when torch.compile compiles a model, None without it."""
    return _kinds_of(getattr(getattr(model, "dynamo_ctx", None), "callback", None))


def kinds_of_tracing() -> tuple[str, ...] | None:
    """Return what the rewriter replaces in the graph that Dynamo captures now, None without it."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return _kinds_of(InstructionTranslator.current_tx().output.compiler_fn)


def _kinds_of(compiler: Any) -> tuple[str, ...] | None:
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
    forward: Callable[..., Any],
    names: set[str],
    kinds: tuple[str, ...],
    args: Any,
    kwargs: Any,
    keeps_weights: bool = True,
) -> tuple[Any, list[Row]]:
    """Return the result of a call whose graphs are rewritten, and not compiled further, and what
    ran in it. names: those of the modules in it.
    """
    rows: list[Row] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        reason = getattr(gm, "compile_subgraph_reason", None)
        if reason is not None and getattr(reason, "graph_break", False):
            frames = [f"{frame.filename}:{frame.lineno}" for frame in reason.user_stack[-1:]]
            why = f"{str(reason.reason).splitlines()[0]}: {' '.join(frames)}"
            rows.append(("", "graph break", "torch", why))
        with recording() as rewriting:
            rewrite_all(gm, kinds, keeps_weights)
        for place in reversed(rewriting.stays()):
            why = at_line(place.reason, place.line)
            rows.append((module_of(place.node, names), place.kind, "torch", why))
        return _Runner(gm, rows, names).run

    return captured(forward, backend)(*args, **kwargs), rows


class _Runner(fx.Interpreter):
    """Runs a graph, and notes what the ops in it run on."""

    def __init__(self, gm: fx.GraphModule, rows: list[Row], names: set[str]) -> None:
        super().__init__(gm)
        self._rows, self._names = rows, names

    def run_node(self, n: fx.Node) -> Any:
        def note(choice: backends.Choice) -> None:
            why = at_line(choice.reason, line_of(n))
            self._rows.append((module_of(n, self._names), choice.op, choice.backend, why))

        with backends.observe(on_choice=note):
            return super().run_node(n)
