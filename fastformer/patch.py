"""Faster attention for existing PyTorch models.

    report = accelerate(model)     changes the classes of its modules, in place
    print(report)                  what was replaced, what was not, and why
    print(explain(model, x))       what each layer of it runs on
    restore(model)                 gives the modules their original classes

    with sdpa_override():          overrides F.scaled_dot_product_attention, for this thread
        model(x)

The forwards that replace torch's are in replacements/.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as _hooks
from torch.overrides import TorchFunctionMode

from fastformer import backends, functional
from fastformer.modules import LayerNorm, MultiHeadedAttention, PositionwiseFeedForward
from fastformer.replacements import ANNOTATED, KINDS
from fastformer.replacements.annotated import AnnotatedModule
from fastformer.replacements.attention import NEEDS_WEIGHTS, FusedMultiheadAttention
from fastformer.replacements.base import (
    Accelerated,
    class_for,
    record_torch,
    running,
    tensor_obstacle,
)
from fastformer.replacements.layers import Layer
from fastformer.replacements.stacks import FusedTransformerEncoder

__all__ = ["Explanation", "Report", "accelerate", "explain", "restore", "sdpa_override"]


# --------------------------------------------------------------------------- accelerate and restore


def accelerate(
    model: nn.Module, *, drop_padding: bool = False, need_weights: bool = True
) -> Report:
    """Let the modules of a PyTorch model run on the ops of fastformer, in place.

    It replaces nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
    nn.TransformerEncoder and nn.TransformerDecoder (thus nn.Transformer), nn.LayerNorm, nn.RMSNorm
    and classes derived from them that keep their forward. It also replaces the attention, norm and
    feed-forward of the Annotated Transformer: it recognizes them by their parts (linears.0 .. 3
    with h and d_k; a_2 and b_2; w_1 and w_2) and confirms them by a trial run of the original in
    float64. Only the class of each module changes: parameters, buffers, hooks, state dict,
    signature and defaults stay.

    The outputs are torch's at every position and in every mode, padding included: zeros where
    torch's encoder converts to nested tensors at inference, what its layers compute elsewhere.
    These things differ. A query that sees no key gives zeros (then the output projection's bias) in
    every mode, where torch gives NaN in some. Dropout draws its own mask. is_causal=True is
    believed. Arguments that torch refuses as well raise a ValueError or a TypeError. An output is
    contiguous where torch returns a transposed view. A layer whose parts have hooks calls them one
    by one. The tutorial's `attn`, the weights of the last call, is None afterwards.

    torch.jit.script does not take a replaced model: restore it first. A compiled model is compiled
    again; the report does not count what runs in a compiled model.

    Args:
        model: any module. Modules are replaced at every depth, the model itself included.
        drop_padding: if True, every nn.TransformerEncoder that is given a boolean
            src_key_padding_mask computes no padding, where that is at least a tenth of the batch.
            This changes what comes out: at the padding the layers give zeros in every mode, and the
            final norm its value of zeros. Whatever reads those positions sees them: a decoder
            without memory_key_padding_mask, a mean over all positions, a loss that does not mask
            them out. On a GPU each call waits for the device once. If False, padding is dropped
            where nothing can see it: where torch itself converts, and in an nn.Transformer whose
            memory_key_padding_mask hides it from the decoder.
        need_weights: if False, nn.MultiheadAttention returns (output, None) whatever its callers
            ask for, on the fused op: for a model that discards the weights, as
            `self.attn(x, x, x)[0]` does. If True, a call with need_weights=True, torch's default,
            runs in plain PyTorch: the report says so at once.

    Returns:
        A `Report` of what was replaced, what was skipped and why; later also of the calls that fell
        back.

    Raises:
        TypeError: model is not a module.
        ValueError: model is on the meta device.

    After an error nothing is replaced. Source: torch.nn.modules.transformer; Huang et al. 2018,
    "The Annotated Transformer" (harvardnlp).
    """
    _require_model(model)
    for name, option in (("drop_padding", drop_padding), ("need_weights", need_weights)):
        if not isinstance(option, bool):
            raise TypeError(f"{name} is {option!r}; expected True or False")
    report = Report()
    _change_classes(_plan(model, report))
    in_layers: set[nn.Module] = set()  # attentions of torch's layers, which ask for no weights
    for module in report._modules.values():
        if isinstance(module, FusedTransformerEncoder):
            module._drops_padding = drop_padding
        if isinstance(module, Layer):
            in_layers |= {getattr(module, name) for name in module._attentions}
    for name, module in report._modules.items():
        if isinstance(module, FusedMultiheadAttention):
            module._returns_weights = need_weights
            if need_weights and module not in in_layers:
                report.notes[name] = NEEDS_WEIGHTS
    return report


def restore(model: nn.Module) -> None:
    """Undo `accelerate`: give every module its original class and attributes.

    Raises:
        TypeError: model is not a module.
        ValueError: the class of a module was changed again since, for example by
            torch.nn.utils.parametrize. Then no module is restored.
    """
    _require_module(model)
    modules = []
    for name, module in model.named_modules():
        if isinstance(module, Accelerated):
            if type(module) is not class_for(module._kind, module._original):
                raise ValueError(
                    f"{name or 'model'} is now a {type(module).__name__}; expected the class that "
                    "accelerate gave it: undo what changed it (a parametrization) first"
                )
            modules.append(module)
    for module in modules:
        _restore_class(module)


@dataclass
class Report:
    """What `accelerate` did. `print` it.

    replaced: the class of each replaced module, by the module's name. skipped: why a module of a
    kind that can be replaced was not. already: the names of the modules that were replaced before.
    notes: what keeps a replaced module from the fused ops, known before any call.
    fallbacks: for each replaced module the calls that did not run on the fused ops, by reason,
    counted until now.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    already: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    _modules: dict[str, nn.Module] = field(default_factory=dict, repr=False)

    @property
    def fallbacks(self) -> dict[str, dict[str, int]]:
        counters = {name: m.__dict__.get("_fallbacks") for name, m in self._modules.items()}
        return {name: dict(counter) for name, counter in counters.items() if counter}

    def __str__(self) -> str:
        lines = [
            f"replaced: {len(self.replaced)} modules" if self.replaced else "replaced: nothing"
        ]
        groups = Counter((_pattern(name), cls) for name, cls in self.replaced.items())
        width = max((len(name) for name, _ in groups), default=0)
        for (name, cls), n in groups.items():
            lines.append(f"  {name:{width}}  {cls}" + (f" x {n}" if n > 1 else ""))
        if self.already:
            lines.append(f"replaced before: {len(self.already)} modules")
        for title, listed in (("skipped", self.skipped), ("noted", self.notes)):
            if listed:
                lines.append(f"{title}: {len(listed)} modules")
            same = Counter((_pattern(name), why) for name, why in listed.items())
            for (name, why), n in same.items():
                lines.append(f"  {name}: {why}" + (f" (x {n})" if n > 1 else ""))
        fallbacks: Counter[tuple[str, str]] = Counter()
        for name, reasons in self.fallbacks.items():
            for why, n in reasons.items():
                fallbacks[_pattern(name), why] += n
        if fallbacks:
            lines.append("calls that did not run on the fused ops:")
            lines += [f"  {name}: {why} (x {n})" for (name, why), n in fallbacks.items()]
        return "\n".join(lines)


def _pattern(name: str) -> str:
    """Return the name with * for each number, so that the layers of a stack share one line."""
    return ".".join("*" if part.isdigit() else part for part in name.split(".")) or "(the model)"


def _require_module(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected an nn.Module")


def _require_model(model: nn.Module) -> None:
    _require_module(model)
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.is_meta:
            raise ValueError(
                f"{name} is on the meta device; expected a model that holds its parameters "
                "(model.to_empty(device=...), then load them)"
            )


def _plan(model: nn.Module, report: Report) -> list[tuple[nn.Module, type[Accelerated]]]:
    """Return the new class of each module that can be replaced, and fill in the report."""
    plan: list[tuple[nn.Module, type[Accelerated]]] = []
    for name, module in model.named_modules():
        if isinstance(module, Accelerated):
            report.already.append(name)
            report._modules[name] = module
            continue
        kind = _kind(module)
        try:
            cls = kind if kind is None or isinstance(kind, str) else class_for(kind, type(module))
        except Exception as error:  # the original class restricts what derives from it
            cls = f"a class derived from it raises {type(error).__name__}: {error}"
        if isinstance(cls, str):
            report.skipped[name] = f"{type(module).__name__}: {cls}"
        elif cls is not None:
            plan.append((module, cls))
            report.replaced[name] = type(module).__name__
            report._modules[name] = module
    return plan


def _change_classes(plan: list[tuple[nn.Module, type[Accelerated]]]) -> None:
    """Give each module its new class; after an error all have their original classes again."""
    changed: list[Accelerated] = []
    try:
        for module, cls in plan:
            module.__class__ = cls
            assert isinstance(module, Accelerated)
            changed.append(module)
    except BaseException:
        for done in changed:
            _restore_class(done)
        raise


def _restore_class(module: Accelerated) -> None:
    module.__class__ = module._original  # type: ignore[assignment]
    for name in ("_fallbacks", "_drops_padding", "_returns_weights"):
        module.__dict__.pop(name, None)


# ------------------------------------------------------------------------- what replaces a module

_OWN = (MultiHeadedAttention, LayerNorm, PositionwiseFeedForward)  # they call the ops themselves


def _kind(module: nn.Module) -> type[Accelerated] | str | None:
    """Return what replaces the module, why nothing does for a known class, or None."""
    for base, kind in KINDS.items():
        if isinstance(module, base):
            for name in (*kind._internal, "__call__"):
                if name in module.__dict__:
                    return f"its {name} is replaced on the instance"
                if getattr(type(module), name) is not getattr(base, name):
                    return f"it has its own {name}"
            return _collision(module, kind) or kind
    if isinstance(module, _OWN):
        return None
    for annotated in ANNOTATED:
        if annotated._matches(module):
            if "forward" in module.__dict__:
                return "its forward is replaced on the instance"
            return _collision(module, annotated) or _disagreement(module, annotated) or annotated
    return None


def _collision(module: nn.Module, kind: type[Accelerated]) -> str | None:
    """Why the module cannot have the attributes of the kind, or None: it has one of that name."""
    ours = {"_fallbacks", "_drops_padding"}
    for cls in kind.__mro__:
        if issubclass(cls, Accelerated):
            ours |= {name for name in vars(cls) if name[:2] != "__"} - {"forward", "attn"}
    for name in sorted(ours):
        if name in module.__dict__ or hasattr(type(module), name):
            return f"it has an attribute {name}, which the replacement needs for itself"
    return None


def _disagreement(module: nn.Module, kind: type[AnnotatedModule]) -> str | None:
    """Why the kind's forward cannot replace the module's, or None.

    Both run in float64 with random parameters, in evaluation, and in training with a dropout
    probability of 1.
    """
    given = tuple(inspect.signature(type(module).forward).parameters)[1:]
    if given != kind._arguments:
        return f"its forward takes ({', '.join(given)}); expected ({', '.join(kind._arguments)})"
    generator = torch.Generator("cpu").manual_seed(0)
    device = next(module.parameters()).device

    def random(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
        return x.to(device)

    classes = (type(module), class_for(kind, type(module)))
    fork = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with fork, torch.no_grad(), _state_kept(module), backends.use_backend("reference"):
        try:
            weights = {name: random(*p.shape) * 0.5 for name, p in module.named_parameters()}
            for training in (False, True):
                for args in kind._probes(module, random):  # type: ignore[arg-type]
                    theirs, ours = (
                        _trial_run(module, cls, training, weights, args) for cls in classes
                    )
                    if not (isinstance(theirs, Tensor) and theirs.shape == ours.shape):
                        return "it does not return a tensor of the shape of its first argument"
                    if not torch.allclose(theirs, ours, rtol=1e-7, atol=1e-7):
                        mode = "training" if training else "evaluation"
                        return f"it computes something else, by a trial run in {mode}"
        except Exception as error:  # whatever the user's code raises is a reason
            return f"a trial run raised {type(error).__name__}: {error}"
    return None


def _trial_run(
    module: nn.Module,
    cls: type[nn.Module],
    training: bool,
    weights: Mapping[str, Tensor],
    args: tuple[Tensor | None, ...],
) -> Any:
    """Call the module as an instance of the class, with the weights and every dropout at 1."""
    original = type(module)
    for m in module.modules():  # before each run: a forward may change them
        m.training = training
        if isinstance(m, nn.Dropout):
            m.p = 1.0
    module.__class__ = cls
    try:
        return torch.func.functional_call(module, dict(weights), args)
    finally:
        module.__class__ = original


@contextmanager
def _state_kept(module: nn.Module) -> Iterator[None]:
    """A context in which the module may be changed and called, without its hooks; then all
    attributes are as before.
    """
    modules = list(module.modules())
    before = [dict(m.__dict__) for m in modules]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    try:
        for m in modules:
            m.__dict__.update({name: OrderedDict() for name in hooks})
        yield
    finally:
        for m, attributes in zip(modules, before):
            m.__dict__.clear()
            m.__dict__.update(attributes)


# -------------------------------------------------------------------------------------- explanation


def explain(target: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Return which backend a call takes, and why.

    explain(op, *args, **kwargs): for the op of that name, without running it; an object with
    `.backend` and `.reason`.

    explain(model, *inputs, **kwargs): runs the model once on the inputs, in the mode and on the
    backend that are set, and returns what each layer ran on: an `Explanation`, with rows of
    (module's name, op, backend, reason) in the order in which they ran. The backend is triton,
    reference or, if the module's own forward ran, torch. The rows name fastformer's ops, the torch
    modules that `accelerate` would replace, direct calls of F.scaled_dot_product_attention, and the
    attention layers of a Hugging Face model that ran without either, by their class. Of a compiled
    model, the original model runs.

    Raises:
        ValueError: target is the name of no op.
        TypeError: target is neither a name nor a module.

    Whatever the call raises is raised as well.
    """
    if not isinstance(target, nn.Module):
        if not isinstance(target, str):
            kind = type(target).__name__
            raise TypeError(f"target is a {kind}; expected the name of an op, or an nn.Module")
        return backends.explain(target, *args, **kwargs)
    model = getattr(target, "_orig_mod", target)
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
        counts = Counter((_pattern(name), *rest) for name, *rest in self.rows)
        table = [(*row, f"x {n}" if n > 1 else "") for row, n in counts.items()]
        widths = [max(len(str(row[i])) for row in table) for i in range(3)]
        return "\n".join(
            "  ".join(f"{cell:{w}}" for cell, w in zip(row, widths))
            + f"  {row[3]} {row[4]}".rstrip()
            for row in table
        )


class _Recorder:
    """Records what the layers of a model run on.

    rows: those of an `Explanation`. _running: the modules that run, the innermost last.
    _attended: for each of them how many attentions ran in it, on whatever backend.
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
        """A context in which the calls of this thread are recorded."""
        previous, running.modules = running.modules, self._running
        handles = [
            _hooks.register_module_forward_pre_hook(self._enter),
            _hooks.register_module_forward_hook(self._leave, always_call=True),  # after errors too
        ]
        try:
            with backends.telling(watch=self.record), _DirectAttention(self):
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

    def _enter(self, module: nn.Module, _: object) -> None:
        if running.modules is self._running:  # the hooks also see the modules of other threads
            self._running.append(module)
            self._attended.append(0)

    def _leave(self, module: nn.Module, *_: object) -> None:
        if running.modules is not self._running:
            return
        name, why = type(module).__name__, None
        if not isinstance(module, Accelerated) and isinstance(module, _BASES):
            why = "accelerate(model) has not replaced it"
        elif self._hugging_face and "attention" in name.lower() and not self._attended[-1]:
            why = _own_attention(module)
        if why is not None:
            self.record(backends.Choice(name, "torch", why))
        self._running.pop()
        self._attended.pop()


class _DirectAttention(TorchFunctionMode):
    """Records the calls of F.scaled_dot_product_attention in the model's own code."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        rows = self._recorder.rows
        before = len(rows)
        out = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention and len(rows) == before:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if not caller.startswith("fastformer"):
                why = "it is called directly; sdpa_override reaches it"
                if caller == "transformers.integrations.sdpa_attention":
                    why = _SUGGESTION.format("sdpa")
                self._recorder.record(backends.Choice("scaled_dot_product_attention", "torch", why))
        return out


_BASES = tuple(KINDS)
_SUGGESTION = (
    "attn_implementation is {!r}; after register_transformers() "
    "model.set_attn_implementation('fastformer') replaces it"
)


def _own_attention(module: nn.Module) -> str:
    """Return why an attention layer of a Hugging Face model ran its own attention."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    asks = hasattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS")
    if asks and name not in (None, "fastformer"):
        return _SUGGESTION.format(name)
    return "it computes its attention by itself, whatever attn_implementation is"


# ------------------------------------------------------------------------------------ sdpa_override


class sdpa_override(TorchFunctionMode):
    """A context in which F.scaled_dot_product_attention is fastformer's, for the calling thread.

        with fastformer.sdpa_override():
            model(x)

    It takes torch's arguments with torch's meaning: a boolean mask (True keeps a key) or a floating
    one, dropout, is_causal from the top left, scale, enable_gqa, three or four dimensions, a value
    of another width. Torch runs, call by call, what the op does not take (nested tensors, tensor
    subclasses, other numbers of dimensions, batches that broadcast, head dims of 0 or above 256,
    other dtypes, a scale that is a tensor) and what is wrong. A query that sees no key gives zeros,
    also if a floating mask hides the keys by finfo.min. Contexts nest, and work within and around
    torch.compile. A context does not see the calls inside of nn.MultiheadAttention: `accelerate`
    replaces that. backward() leaves every such mode, so under activation checkpointing the `with`
    has to be inside the checkpointed function: around the checkpoint it would leave the second
    forward to torch's attention.

    Every torch function that runs within it passes through Python once more: some microseconds.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _sdpa(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    reason = (
        _input_obstacle(query, key, value, attn_mask)
        or _heads_obstacle(query, key, value, enable_gqa)
        or _option_obstacle(query, key, attn_mask, dropout_p, is_causal, scale)
    )
    args = (query, key, value, attn_mask, dropout_p, is_causal)
    if reason is not None:
        record_torch("scaled_dot_product_attention", reason)
        return F.scaled_dot_product_attention(*args, scale=scale, enable_gqa=enable_gqa)
    enable_gqa = enable_gqa or (query.dim() == 4 and key.shape[1] == 1)  # a head for all
    with backends.telling(obstacle=_ignore):
        return functional.scaled_dot_product_attention(*args, scale, enable_gqa)


def _ignore(op: str, reason: str) -> None:
    """Count no fallback of a call outside of a module; `explain` records it."""


# Each of these returns why torch's own op has to run, or None. An argument that is wrong is a
# reason as well: torch refuses it in its own words. query: [B, H, Sq, D] or [B, Sq, D]; key and
# value likewise, with Sk; attn_mask broadcasts to the scores [B, H, Sq, Sk].


def _input_obstacle(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None
) -> str | None:
    tensors = (query, key, value)
    obstacle = tensor_obstacle(*tensors, attn_mask)
    if obstacle is not None:
        return obstacle
    if any(x.dim() != query.dim() for x in tensors) or query.dim() not in (3, 4):
        return "not three or four dimensions each"
    if any(x.dtype != query.dtype or x.device != query.device for x in tensors):
        return "several dtypes or devices"
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        return f"the dtype is {query.dtype}"
    low = query.dtype in (torch.float16, torch.bfloat16) and query.device.type == "cpu"
    if low and query.dim() == 3 and backends.current_backend() != "triton":
        return (
            "on a CPU torch has half precision without heads in another op, with better gradients"
        )
    return None


def _heads_obstacle(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> str | None:
    batch = query.shape[0]
    if key.shape[0] != batch or value.shape[0] != batch or key.shape[:-1] != value.shape[:-1]:
        return "the batch or the heads broadcast"
    if query.dim() == 4 and query.shape[1] != key.shape[1]:
        if not enable_gqa and key.shape[1] != 1:  # the op takes one head for all
            return "the heads broadcast"
        if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
            return "the heads of key do not divide those of query"
    dims = (query.shape[-1], value.shape[-1])
    if 0 in dims or max(dims) > functional.MAX_HEAD_DIM or key.shape[-1] != dims[0]:
        return f"a head dim is 0 or above {functional.MAX_HEAD_DIM}, or key has another than query"
    return None


def _option_obstacle(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> str | None:
    if type(dropout_p) not in (float, int) or not 0 <= dropout_p <= 1:
        return "dropout_p is no number from 0 to 1"
    if scale is not None and type(scale) not in (float, int):
        return "scale is no number"
    if attn_mask is None:
        return None
    if is_causal or attn_mask.dtype not in (torch.bool, query.dtype):
        return "a mask is given with is_causal, or has another dtype"
    scores = (*query.shape[:-1], key.shape[-2])
    sizes = zip(attn_mask.shape[::-1], scores[::-1])
    if not 2 <= attn_mask.dim() <= len(scores) or any(n not in (1, want) for n, want in sizes):
        return "the mask does not broadcast to the scores"
    return None
