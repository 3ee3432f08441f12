"""Modules that compute attention, norms or feed-forward layers by their own code.

Dynamo captures the forward of such a module at its first call; the rewriter puts fastformer's ops
into the graph, which then runs as it is, without inductor.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx, nn
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace
from torch.nn.modules import module as _torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from fastformer.dispatch.state import current_backend, is_transformed
from fastformer.drop_in.capture import captured, own_code
from fastformer.drop_in.replacements import base

if TYPE_CHECKING:
    from fastformer.drop_in.graph.rewriter import Rewriting

_GLOBAL_HOOKS = (
    *(_torch._global_forward_pre_hooks, _torch._global_forward_hooks),
    *(_torch._global_backward_pre_hooks, _torch._global_backward_hooks),
)
_MOST = 2  # modules that need different graphs, as the first one of a model may, and share them
_HOOKED = "a module within it has a backward hook, or all modules have hooks"
_TRANSFORMED = "what traces or transforms the call gets the code of the module"
_COMPILED = (
    "torch.compile takes the original code of modules that fastformer.accelerate has rewritten: "
    "compile within fastformer.fusing(), which puts the ops into all graphs"
)
_MISSED = "Dynamo has not captured the call, or its limit of recompilations is reached"
_FAILURES = 8  # calls that Dynamo cannot capture, one after another, after which it is not asked
_autocasts = torch._C._is_any_autocast_enabled


class Part(NamedTuple):
    """What became of a part of a module: the submodule in which it stands, its kind, the op that
    replaces it or "", the reason why it stays or "", and the line of the code.
    """

    module: str
    kind: str
    op: str
    reason: str
    line: str


class Rewritten(base.Accelerated):
    """A module that runs its captured forward: one for each state of training, gradients and
    autocast, so that each has a limit of recompilations of its own.
    """

    _made_of = ("forward",)
    _returns_weights = True  # accelerate(need_weights=False) sets it to False
    _captures: Captures  # set on the instance by `share`, or at the first call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # in this thread
            _warn_of_compile()
            return self._original.forward(self, *args, **kwargs)
        if base.is_left_to_torch(self, *args, *kwargs.values()):
            return self._run_whole(*args, **kwargs)
        if _is_transformed():
            base.record_whole(self, _TRANSFORMED)
            return self._run_whole(*args, **kwargs)
        recorder = base.explaining.recorder
        if _has_backward_hooks(self) or (any(_GLOBAL_HOOKS) and recorder is None):
            return self._run_original(_HOOKED, *args, **kwargs)
        if recorder is not None:
            return recorder.explain(self, args, kwargs)
        dtypes = _autocast_dtypes() if _autocasts() else ()
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        code = self._original.forward  # which may have been patched
        state = code, self.training, modes, self._returns_weights, dtypes
        captures = self._known()
        capture = captures.get(state)
        if capture is None:
            return self._run_first(state, args, kwargs)
        return self._run(capture, state, args, kwargs)

    def _run_original(self, reason: str, *args: Any, **kwargs: Any) -> Any:
        base.record_whole(self, reason)
        base.count_fallback(self, reason)
        return self._run_whole(*args, **kwargs)

    def _known(self) -> Captures:
        if "_captures" not in self.__dict__:
            share([self])
        return self._captures

    def _run_first(self, state: Any, args: Any, kwargs: Any) -> Any:
        """Run a call, the first one in this state. Modules of one class share what is captured, as
        long as it is the same for all.
        """
        shared = self._captures.shared
        if state not in shared:
            shared[state] = Capture(self)
        capture = shared[state] if shared[state].differ <= _MOST else Capture(self)
        self._captures[state], graphs = capture, capture.graphs
        out = self._run(capture, state, args, kwargs)
        capture.differ += capture.graphs > graphs
        return out

    def _run(self, capture: Capture, state: Any, args: Any, kwargs: Any) -> Any:
        if capture.failures >= _FAILURES:
            return self._run_original(_MISSED, *args, **kwargs)
        missed, attempts = capture.missed, capture.attempts
        out = capture.forward(self, *args, **kwargs)
        if capture.missed == missed:
            capture.failures = 0
            return out
        base.record_fallback(self, type(self).__name__, _MISSED)
        capture.failures += capture.attempts > attempts
        at_limit = capture.graphs >= torch._dynamo.config.recompile_limit
        if at_limit and capture is self._captures.shared.get(state):
            self._captures[state] = Capture(self)
        return out


class Captures(dict[Any, "Capture"]):
    """What a module has captured, by state. shared: what modules like it share. explained: what the
    rewriter did within `explain`. Copies of a module begin anew.
    """

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared
        self.explained: list[Part] = []

    def parts(self) -> list[Part]:
        """Return what the rewriter did."""
        found = [x for parts in (self.explained, *(c.parts for c in self.values())) for x in parts]
        return [*dict.fromkeys(found)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Captures:
        return Captures(copy.deepcopy(self.shared, memo))

    def __reduce__(self) -> Any:
        return Captures, (self.shared,)


class Shared(dict[Any, "Capture"]):
    """What modules of one class share, by state."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        return memo.setdefault(id(self), Shared())

    def __reduce__(self) -> Any:
        return Shared, ()


def share(modules: list[nn.Module]) -> None:
    """Let those of these modules that are rewritten, and are built alike, share what they capture:
    modules of one class with submodules and parameters of the same classes and sizes.
    """
    shared: dict[Any, Shared] = {}
    for module in modules:
        if isinstance(module, Rewritten):
            classes = tuple((name, type(x)) for name, x in module.named_modules())
            sizes = tuple(x.shape for x in module.parameters() if not is_lazy(x))
            own = shared.setdefault((classes, sizes), Shared())
            module.__dict__["_captures"] = Captures(own)


class Capture:
    """A captured forward.

    parts: what the rewriter did to its graphs. graphs: how many were captured. differ: how many
    modules needed new graphs at their first call. attempts: how often Dynamo was asked for one.
    missed: how many calls ran the original code. failures: after how many such attempts, in a row.
    """

    def __init__(self, module: Rewritten) -> None:
        self.parts: list[Part] = []
        self.graphs = self.differ = self.attempts = self.missed = self.failures = 0
        self._names = {name for name, _ in module.named_modules()}
        self._returns_weights = module._returns_weights
        forward = own_code(module._original.forward)

        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_dynamo_compiling():
                capture.missed += 1
            return forward(self, *args, **kwargs)

        capture = self
        self.forward = captured(own_code(call), self._rewritten, self._attempt)

    def _attempt(self) -> None:
        self.attempts += 1

    def _rewritten(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """The backend of Dynamo: rewrite a graph, and return what runs it."""
        from fastformer.drop_in.graph.rewriter import KINDS, recording, rewrite_all

        with recording() as rewriting:
            rewrite_all(gm, KINDS, self._returns_weights)
        self.parts += parts_of(rewriting, self._names)
        self.graphs += 1
        return gm.forward


def parts_of(rewriting: Rewriting, names: set[str]) -> list[Part]:
    """Return what the rewriter did. names: those of the modules within a rewritten one."""
    from fastformer.drop_in.graph.rewriter import module_of

    places = rewriting.places
    return [Part(module_of(x.node, names), x.kind, x.op, x.reason, x.line) for x in places]


def _is_transformed() -> bool:
    """Return whether something traces or transforms the call, and is to find the original code."""
    return (
        forward_ad._current_level >= 0
        or is_transformed(by_autocast=False, by_modes=False)
        or _symbolic_trace.is_fx_symbolic_tracing()
        or any(_sees_inside(mode) for mode in _get_current_dispatch_mode_stack())
    )


def _sees_inside(mode: TorchDispatchMode) -> bool:
    """Return whether a dispatch mode is to see the ops of the original code: Dynamo captures
    nothing in such a mode, and what traces has to find the plain ops.
    """
    return mode.is_infra_mode() or not mode.ignore_compile_internals()


def _warn_of_compile() -> bool:
    """Warn that torch.compile captures the original forward, unless it puts the ops into it. Dynamo
    calls this function instead of tracing it.
    """
    from fastformer.drop_in.graph.explained import kinds_of_tracing  # imports dynamo

    if torch.compiler.is_exporting() or kinds_of_tracing() is not None:
        return False
    if current_backend() != "auto" or torch.cuda.is_available():
        warnings.warn(_COMPILED, stacklevel=1)
    return True


# torch.compiler.assume_constant_result sets the same, but imports dynamo.
_warn_of_compile.__dict__["_dynamo_marked_constant"] = True


def _has_backward_hooks(module: nn.Module) -> bool:
    """Return whether a module within this one has a backward hook: Dynamo captures none."""
    return any(
        x._backward_pre_hooks or x._backward_hooks or (x._modules and _has_backward_hooks(x))
        for x in module._modules.values()
        if x is not None
    )


def _autocast_dtypes() -> tuple[torch.dtype | None, ...]:
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in ("cpu", "cuda")
    )
