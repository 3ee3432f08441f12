"""Explain which backend a call, or each layer of a model, runs on."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as _hooks
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from fastformer.checks import require_instance
from fastformer.dispatch import backends
from fastformer.drop_in import remaining
from fastformer.drop_in.replacements import KINDS
from fastformer.drop_in.replacements.base import Accelerated, running
from fastformer.nn.attention import MultiHeadedAttention


def explain(target: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Return which backend a call runs on, and why.

    explain(op, *args, **kwargs): returns, without running the op of this name, an object with
    `.backend` and `.reason`.

    explain(model, *inputs, **kwargs): runs the model once on the inputs, in its current mode and on
    the selected backend, and returns what each layer ran on: an `Explanation`, with rows of
    (module's name, op, backend, reason) in the order in which they ran. The backend is "triton",
    "reference", or "torch" if torch's own op ran, because `tune` has measured that it is the
    fastest, or if the module's own forward ran. The rows name fastformer's ops,
    the torch modules that `accelerate` would replace, direct calls of
    F.scaled_dot_product_attention, and, by their class, the modules in which a softmax ran between
    two products, and the attention layers of a Hugging Face model in which none of these ran.

    For a model that torch.compile compiles with `inductor_pass`, `fusing` or one of the backends of
    fastformer, the rows are those of its graphs: the ops in them, each with the line of the model's
    code that it replaces; what stays, why, and its line; and where Dynamo breaks the graph, which
    costs a return to Python. The graphs are rewritten anew and run without inductor. For another
    compiled model, the original model runs.

    Raises:
        ValueError: target is a string that names no op.
        TypeError: target is neither a string nor a module.

    Errors of the call itself propagate.
    """
    if not isinstance(target, nn.Module):
        require_instance("target", target, str, "the name of an op, or an nn.Module")
        return backends.explain(target, *args, **kwargs)
    model = getattr(target, "_orig_mod", target)
    if model is not target:
        from fastformer.drop_in.graph.explained import explain_compiled, kinds_of  # imports dynamo

        kinds = kinds_of(target)
        if kinds is not None:
            return Explanation(tuple(explain_compiled(model, kinds, *args, **kwargs)))
    recorder = _Recorder(model)
    with recorder.recording():
        model(*args, **kwargs)
    return Explanation(tuple(recorder.rows))


@dataclass(frozen=True)
class Explanation:
    """What ran, in order: (module's name, op, backend, reason) in `rows`. `print` it."""

    rows: tuple[tuple[str, str, str, str], ...]

    def __str__(self) -> str:
        if not self.rows:
            return "no layer of a known kind ran"
        counts = Counter((name_pattern(name), *rest) for name, *rest in self.rows)
        table = [(*row, f"x {n}" if n > 1 else "") for row, n in counts.items()]
        widths = [max(len(str(row[i])) for row in table) for i in range(3)]
        return "\n".join(
            "  ".join(f"{cell:{w}}" for cell, w in zip(row, widths))
            + f"  {row[3]} {row[4]}".rstrip()
            for row in table
        )


class _Recorder:
    """Records what the layers of a model run on.

    rows: the rows of an `Explanation`. _running: the modules whose forward is running, the
    innermost last. _attended: for each of these modules, how many attention calls ran in it, on any
    backend.
    """

    def __init__(self, model: nn.Module) -> None:
        self.rows: list[tuple[str, str, str, str]] = []
        self._names = {id(module): name for name, module in model.named_modules()}
        self._running: list[nn.Module] = []
        self._attended: list[int] = []
        config = getattr(model, "config", None)
        self._hugging_face = hasattr(config, "_attn_implementation")

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context that records the calls of this thread."""
        previous, running.modules = running.modules, self._running
        handles = [
            _hooks.register_module_forward_pre_hook(self._enter),
            _hooks.register_module_forward_hook(self._leave, always_call=True),  # after errors too
        ]
        try:
            with backends.observe(on_choice=self.record), _TorchAttention(self):
                yield
        finally:
            running.modules = previous
            for handle in handles:
                handle.remove()

    def record(self, choice: backends.Choice) -> None:
        known = (self._names[id(m)] for m in reversed(self._running) if id(m) in self._names)
        self.rows.append((next(known, ""), choice.op, choice.backend, choice.reason))
        if "attention" in choice.op.lower():
            self._attended[:] = [n + 1 for n in self._attended]

    def record_own_attention(self) -> None:
        """Record that the code of the running module has computed an attention."""
        module = self._running[-1] if self._running else None
        if module is None or isinstance(module, MultiHeadedAttention):  # which records its fallback
            return
        why = remaining.own_attention(module)
        self.record(backends.Choice(type(module).__name__, "torch", why))
        self._attended[:] = [n + 1 for n in self._attended]

    def _enter(self, module: nn.Module, _: object) -> None:
        if running.modules is self._running:  # the hooks also see the modules of other threads
            self._running.append(module)
            self._attended.append(0)

    def _leave(self, module: nn.Module, *_: object) -> None:
        if running.modules is not self._running:
            return
        name, why = type(module).__name__, None
        if not isinstance(module, Accelerated) and isinstance(module, tuple(KINDS)):
            why = "accelerate(model) has not replaced it"
        elif self._hugging_face and "attention" in name.lower() and not self._attended[-1]:
            why = remaining.own_attention(module)
        if why is not None:
            self.record(backends.Choice(name, "torch", why))
        self._running.pop()
        self._attended.pop()


class _TorchAttention(TorchFunctionMode):
    """Records the attention that the model's own code computes: the calls of
    F.scaled_dot_product_attention, and each softmax between two products.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        # Tensors that depend on a product, and whether on a softmax of it.
        self._products = WeakIdKeyDictionary()

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        before = len(self._recorder.rows)
        out = func(*args, **(kwargs or {}))
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("fastformer") or len(self._recorder.rows) > before:
            return out
        name, op = getattr(func, "__name__", ""), "scaled_dot_product_attention"
        given = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)]
        found = [self._products[x] for x in given if x in self._products]
        if func is F.scaled_dot_product_attention:
            theirs = caller == "transformers.integrations.sdpa_attention"
            why = remaining.SUGGESTION.format("sdpa") if theirs else remaining.DIRECT_CALL
            self._recorder.record(backends.Choice(op, "torch", why))
        elif name in remaining.PRODUCTS:
            if any(found):
                self._recorder.record_own_attention()
            found = [False]
        elif name in remaining.SOFTMAX and found:
            found = [True]
        if found and isinstance(out, Tensor) and func is not F.linear:
            self._products[out] = any(found)
        return out


def name_pattern(name: str) -> str:
    """Return the name with * for each number, so that the layers of a stack share one line."""
    return ".".join("*" if part.isdigit() else part for part in name.split(".")) or "(the model)"
