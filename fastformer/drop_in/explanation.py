"""Explain which backend a call, or each layer of a model, runs on."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn, overrides
from torch.nn.modules import module as _hooks
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from fastformer.checks import require_instance
from fastformer.dispatch import backends
from fastformer.drop_in.capture import own_code
from fastformer.drop_in.replacements import KINDS
from fastformer.drop_in.replacements.base import Accelerated, explaining
from fastformer.drop_in.replacements.rewritten import Rewritten, parts_of
from fastformer.nn.attention import MultiHeadedAttention

OWN_ATTENTION = "attention of its own; accelerate(model) rewrites what the ops compute"
_NOT_REPLACED = "accelerate(model) has not replaced it"
_OUTSIDE = "the model calls it outside of the module whose code is rewritten"
DIRECT_CALL = "it calls F.scaled_dot_product_attention; accelerate and sdpa_override reach it"
SUGGESTION = (
    "attn_implementation is {!r}; after register_transformers() "
    "model.set_attn_implementation('fastformer') replaces it"
)
_PRODUCTS = "matmul", "__matmul__", "bmm", "baddbmm", "einsum"
_SOFTMAX = "softmax", "_softmax"


def explain(target: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Return which backend a call runs on, and why.

    explain(op, *args, **kwargs): returns, without running the op of this name, an object with
    `.backend` and `.reason`.

    explain(model, *inputs, **kwargs): runs the model once on the inputs, in its current mode and on
    the selected backend, and returns what each layer ran on: an `Explanation`, with rows of
    (module's name, op, backend, reason) in the order in which they ran. The backend is "triton",
    "reference", or "torch" if torch's own op ran, because `tune` has measured that it is the
    fastest, or if the module's own forward ran. The rows name fastformer's ops, the modules that
    torch runs as a whole, the torch modules that `accelerate` would replace, direct calls of
    F.scaled_dot_product_attention, the modules in which a softmax ran between two products, and the
    attention layers of a Hugging Face model in which none of these ran.

    For a model that torch.compile compiles with `inductor_pass`, `fusing` or one of the backends of
    fastformer, the rows are those of its graphs: the ops in them, each with the line of the model's
    code that it replaces; what stays, and why; and where Dynamo breaks the graph, which costs a
    return to Python. The graphs are rewritten anew and run without inductor. For another compiled
    model, the original model runs.

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
            names = {name for name, _ in model.named_modules()}
            rows = explain_compiled(model, names, kinds, args, kwargs)[1]
            return Explanation(tuple(rows))
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

    rows: the rows of an `Explanation`. running: the modules whose forward is running, the innermost
    last. whole: those of them that torch runs as a whole. _attended: for each of them, how many
    attention calls ran in it, on any backend. off: a context without the mode of this recorder.
    """

    def __init__(self, model: nn.Module) -> None:
        self.rows: list[tuple[str, str, str, str]] = []
        self._names = {id(module): name for name, module in model.named_modules()}
        self.running: list[nn.Module] = []
        self._attended: list[int] = []
        self.whole: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []
        rewritten = [x for x in model.modules() if isinstance(x, Rewritten)]
        self._inside = {x for unit in rewritten for x in unit.modules()}
        self._mode = _TorchAttention(self)
        self.off = self._mode.off
        config = getattr(model, "config", None)
        self._hugging_face = hasattr(config, "_attn_implementation")

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context that records the calls of this thread."""
        previous, explaining.recorder = explaining.recorder, self
        self._add_hooks()
        try:
            with backends.observe(on_choice=self.record), self._mode:
                yield
        finally:
            explaining.recorder = previous
            self._remove_hooks()

    def _add_hooks(self) -> None:
        self._handles = [
            _hooks.register_module_forward_pre_hook(self._enter),
            _hooks.register_module_forward_hook(self._leave, always_call=True),  # after errors too
        ]

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def explain(self, module: Rewritten, args: Any, kwargs: Any) -> Any:
        """Run a module whose graphs are rewritten, and record what ran in it."""
        from fastformer.drop_in.graph.explained import explain_compiled
        from fastformer.drop_in.graph.rewriter import KINDS, recording

        forward, names = own_code(module._original.forward), {n for n, _ in module.named_modules()}
        self._remove_hooks()  # else Dynamo would capture them, and the mode
        try:
            silent = backends.observe(on_choice=lambda choice: None)  # while a graph is rewritten
            with self.off(), silent, recording() as rewriting:
                given, keeps = (module, *args), module._returns_weights
                out, rows = explain_compiled(forward, names, KINDS, given, kwargs, keeps)
        finally:
            self._add_hooks()
        captures, parts = module._known(), parts_of(rewriting, names)
        captures.explained = [*dict.fromkeys([*captures.explained, *parts])]
        for name, *rest in rows:
            self.record(backends.Choice(*rest), name)
        return out

    def record(self, choice: backends.Choice, part: str = "") -> None:
        """Add a row. part: the name of a module within the running one."""
        if self.whole:
            return
        known = (self._names[id(m)] for m in reversed(self.running) if id(m) in self._names)
        name = ".".join(x for x in (next(known, ""), part) if x)
        self.rows.append((name, choice.op, choice.backend, choice.reason))
        if "attention" in choice.op.lower():
            self._attended[:] = [n + 1 for n in self._attended]

    def record_own_attention(self) -> None:
        """Record that the code of the running module has computed an attention."""
        module = self.running[-1] if self.running else None
        known = MultiHeadedAttention, nn.MultiheadAttention  # which have rows of their own
        if module is None or isinstance(module, known):
            return
        self.record(backends.Choice(type(module).__name__, "torch", own_attention(module)))
        self._attended[:] = [n + 1 for n in self._attended]

    def _enter(self, module: nn.Module, _: object) -> None:
        if explaining.recorder is self:  # the hooks also see the modules of other threads
            self.running.append(module)
            self._attended.append(0)

    def _leave(self, module: nn.Module, *_: object) -> None:
        if explaining.recorder is not self:
            return
        name, why = type(module).__name__, None
        if not isinstance(module, Accelerated) and isinstance(module, tuple(KINDS)):
            why = _OUTSIDE if module in self._inside else _NOT_REPLACED
        elif self._hugging_face and "attention" in name.lower() and not self._attended[-1]:
            why = own_attention(module)
        if why is not None:
            self.record(backends.Choice(name, "torch", why))
        if self.whole and self.whole[-1] is module:
            self.whole.pop()
        self.running.pop()
        self._attended.pop()


def own_attention(module: nn.Module) -> str:
    """Return what to do about a module whose attention is its own."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    asks = hasattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS")
    return SUGGESTION.format(name) if asks and name not in (None, "fastformer") else OWN_ATTENTION


class _TorchAttention(overrides.TorchFunctionMode):
    """Records the attention that the model's own code computes: the calls of
    F.scaled_dot_product_attention, and each softmax between two products.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        # Tensors that depend on a product, and whether on a softmax of it, and its heads.
        self._products = WeakIdKeyDictionary()

    @contextmanager
    def off(self) -> Iterator[None]:
        """A context without this mode; those that were entered within it stay."""
        if self not in overrides._get_current_function_mode_stack():
            yield
            return
        inner = []
        while (mode := overrides._pop_mode()) is not self:
            inner.append(mode)
        for mode in reversed(inner):
            overrides._push_mode(mode)
        try:
            yield
        finally:
            for _ in inner:
                overrides._pop_mode()
            for mode in (self, *reversed(inner)):
                overrides._push_mode(mode)

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
            why = SUGGESTION.format("sdpa") if theirs else DIRECT_CALL
            self._recorder.record(backends.Choice(op, "torch", why))
        elif func is F.multi_head_attention_forward:
            self._recorder.record_own_attention()
        elif name in _PRODUCTS:
            if any(softmax for softmax, _ in found):
                self._recorder.record_own_attention()
            found = [(False, out.shape[-3] if out.dim() > 3 else None)]
        elif name in _SOFTMAX and found:
            found = [(True, found[0][1])]
        if func is F.linear:  # which may mix the heads of scores
            found = [x for x in found if {y.shape[-1] for y in (out, *given)} == {x[1]}]
        if found and isinstance(out, Tensor):
            self._products[out] = max(found, key=lambda x: x[0])
        return out


def name_pattern(name: str) -> str:
    """Return the name with * for each number, so that the layers of a stack share one line."""
    return ".".join("*" if part.isdigit() else part for part in name.split(".")) or "(the model)"
