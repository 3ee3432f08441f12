"""Faster attention for PyTorch models that exist.

    report = accelerate(model)     the classes of its modules are swapped, in place
    print(report)                  what was replaced, what was not, and why
    print(explain(model, x))       what each layer of it runs on
    restore(model)                 the former classes

    with sdpa_override():          F.scaled_dot_product_attention itself, for this thread
        model(x)

The forwards that stand for torch's are in replacements.py.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
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
from fastformer.replacements import (
    KINDS,
    NEEDS_WEIGHTS,
    TUTORIAL,
    _Accelerated,
    _class,
    _explaining,
    _foreign,
)

__all__ = ["Explanation", "Report", "accelerate", "explain", "restore", "sdpa_override"]


# --------------------------------------------------------------------------- accelerate and restore


@contextmanager
def _borrowed(module: nn.Module) -> Iterator[None]:
    """Within it the module may be changed and called: its hooks are off, all is as it was after."""
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


def _disagreement(module: Any, kind: Any) -> str | None:
    """Why the kind's forward may not stand for the module's, or None.

    Both are run in float64 with parameters drawn at random: in evaluation, and in training with
    everything dropped.
    """
    given = tuple(inspect.signature(type(module).forward).parameters)[1:]
    if given != kind._arguments:
        return f"its forward takes ({', '.join(given)}); expected ({', '.join(kind._arguments)})"
    generator = torch.Generator("cpu").manual_seed(0)
    device = next(module.parameters()).device
    original = type(module)

    def random(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
        return x.to(device)

    def outputs(training: bool, weights: dict[str, Tensor], args: tuple[Any, ...]) -> list[Any]:
        outs = []
        for cls in (original, _class(kind, original)):
            for m in module.modules():  # before each: a forward may change them
                m.training = training
                if isinstance(m, nn.Dropout):
                    m.p = 1.0
            module.__class__ = cls
            try:
                outs.append(torch.func.functional_call(module, weights, args))
            finally:
                module.__class__ = original
        return outs

    fork = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with fork, torch.no_grad(), _borrowed(module), backends.use_backend("reference"):
        try:
            weights = {name: random(*p.shape) * 0.5 for name, p in module.named_parameters()}
            for training in (False, True):
                for args in kind._probes(module, random):
                    theirs, ours = outputs(training, weights, args)
                    if not (isinstance(theirs, Tensor) and theirs.shape == ours.shape):
                        return "it does not return a tensor of the shape of its first argument"
                    if not torch.allclose(theirs, ours, rtol=1e-7, atol=1e-7):
                        mode = "training" if training else "evaluation"
                        return f"it computes something else, by a trial run in {mode}"
        except Exception as error:  # whatever the user's code raises is a reason
            return f"a trial run raised {type(error).__name__}: {error}"
    return None


_OWN = (MultiHeadedAttention, LayerNorm, PositionwiseFeedForward)  # they call the ops by themselves


def _kind(module: nn.Module) -> Any:
    """What can stand for the module; a reason if it is of a known kind and nothing can; or None."""
    cls = type(module)
    for kind in KINDS:
        base: Any = kind._base
        if isinstance(module, base):
            for name in (*kind._internal, "__call__"):
                if name in module.__dict__:
                    return f"its {name} is replaced on the instance"
                if getattr(cls, name) is not getattr(base, name):
                    return f"it has its own {name}"
            return _collision(module, kind) or kind
    if isinstance(module, _OWN):
        return None
    for kind in TUTORIAL:
        if kind._matches(module):
            if "forward" in module.__dict__:
                return "its forward is replaced on the instance"
            return _collision(module, kind) or _disagreement(module, kind) or kind
    return None


def _collision(module: nn.Module, kind: Any) -> str | None:
    """An attribute of the module that has the name of one of ours."""
    ours = {"_fallbacks", "_drops_padding"}
    for cls in kind.__mro__:
        if issubclass(cls, _Accelerated):
            ours |= {name for name in vars(cls) if name[:2] != "__"} - {"forward", "attn"}
    for name in sorted(ours):
        if name in module.__dict__ or hasattr(type(module), name):
            return f"its attribute {name} stands in the way"
    return None


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split(".")) or "(the model)"


@dataclass
class Report:
    """What `accelerate` did. `print` it.

    replaced: the class of each replaced module, by the module's name. skipped: why a module of a
    kind that can be replaced was not. already: the names of those that had been replaced before.
    notes: what keeps a replaced module from the fused ops, known before any call.
    fallbacks: for each replaced module the calls that did not run on the fused ops, by reason,
    counted until now.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    already: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    _modules: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def fallbacks(self) -> dict[str, dict[str, int]]:
        noted = {name: m.__dict__.get("_fallbacks") for name, m in self._modules.items()}
        return {name: dict(counter) for name, counter in noted.items() if counter}

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


def accelerate(
    model: nn.Module, *, drop_padding: bool = False, need_weights: bool = True
) -> Report:
    """Lets the modules of a PyTorch model run on the ops of fastformer, in place.

    Replaced are nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
    nn.TransformerEncoder and nn.TransformerDecoder (thus nn.Transformer), nn.LayerNorm, nn.RMSNorm
    and classes derived from them that keep their forward; and the attention, norm and feed-forward
    of the Annotated Transformer, known by their parts (linears.0 .. 3 with h and d_k; a_2 and b_2;
    w_1 and w_2) and confirmed by a trial run of the original in float64. It is the class of each
    module that is swapped: parameters, buffers, hooks, state dict, signature and defaults stay.

    The outputs are torch's at every position and in every mode, padding included: zeros where
    torch's encoder converts to nested tensors at inference, what its layers compute elsewhere.
    What differs: a query that sees no key gives zeros (then the output projection's bias) in every
    mode, where torch gives NaN in some; dropout draws its own mask; is_causal=True is believed;
    arguments that torch refuses as well are a ValueError or a TypeError; an output is contiguous
    where torch returns a transposed view. A layer whose parts have hooks calls them one by one. The
    tutorial's `attn`, the weights of the last call, is None afterwards.

    Not for torch.jit.script: restore the model before it. A model that was compiled is compiled
    again; what runs in a compiled model is not counted in the report.

    Args:
        model: any module; replaced modules are found at every depth, and the model may be one.
        drop_padding: True lets every nn.TransformerEncoder that is given a boolean
            src_key_padding_mask compute no padding, where that is at least a tenth of the batch.
            This changes what comes out: at the padding the layers give zeros in every mode, and the
            final norm its value of zeros. Whatever reads those positions sees them: a decoder
            without memory_key_padding_mask, a mean over all positions, a loss that does not leave
            them out. On a GPU it waits for the device once a call. Without it padding is dropped
            where nothing can see it: where torch itself converts, and in an nn.Transformer whose
            memory_key_padding_mask hides it from the decoder.
        need_weights: False lets nn.MultiheadAttention return (output, None) whatever its callers
            ask for, on the fused op: for a model that throws the weights away, as
            `self.attn(x, x, x)[0]` does. With True a call with need_weights=True, torch's default,
            takes plain PyTorch: the report says so at once.

    Returns:
        A `Report` of what was replaced, skipped and why; later also of the calls that fell back.

    Raises:
        TypeError: a model that is no module.
        ValueError: a model on the meta device.

    After an error nothing is replaced. Source: torch.nn.modules.transformer; Huang et al. 2018,
    "The Annotated Transformer" (harvardnlp).
    """
    _require_model(model)
    for name, option in (("drop_padding", drop_padding), ("need_weights", need_weights)):
        if not isinstance(option, bool):
            raise TypeError(f"{name} is {option!r}; expected True or False")
    report, plan = Report(), []
    modules: Iterable[tuple[str, Any]] = model.named_modules()
    for name, module in modules:
        if isinstance(module, _Accelerated):
            report.already.append(name)
            report._modules[name] = module
            continue
        kind = _kind(module)
        try:
            cls = kind if kind is None or isinstance(kind, str) else _class(kind, type(module))
        except Exception as error:  # of a class that restricts what derives from it
            cls = f"a class derived from it raises {type(error).__name__}: {error}"
        if isinstance(cls, str):
            report.skipped[name] = f"{type(module).__name__}: {cls}"
        elif cls is not None:
            plan.append((module, cls))
            report.replaced[name] = type(module).__name__
            report._modules[name] = module
    done: list[Any] = []
    try:
        for module, cls in plan:
            module.__class__ = cls
            done.append(module)
    except BaseException:
        for module in done:
            _give_back(module)
        raise
    own: set[Any] = set()  # the attentions of torch's layers, which ask for no weights
    for module in report._modules.values():
        if issubclass(type(module), nn.TransformerEncoder):
            module._drops_padding = drop_padding
        own |= {getattr(module, name) for name in getattr(type(module), "_attentions", ())}
    for name, module in report._modules.items():
        if issubclass(type(module), nn.MultiheadAttention):
            module._returns_weights = need_weights
            if need_weights and module not in own:
                report.notes[name] = NEEDS_WEIGHTS
    return report


def _require_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected an nn.Module")
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.is_meta:
            raise ValueError(
                f"{name} is on the meta device; expected a model that holds its parameters "
                "(model.to_empty(device=...), then load them)"
            )


def _give_back(module: Any) -> None:
    module.__class__ = module._original
    for name in ("_fallbacks", "_drops_padding", "_returns_weights"):
        module.__dict__.pop(name, None)


def restore(model: nn.Module) -> None:
    """Undoes `accelerate`: every module has its former class and attributes.

    Raises:
        TypeError: a model that is no module.
        ValueError: a class that was changed since, by torch.nn.utils.parametrize say; then nothing
            is given back.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected an nn.Module")
    modules: list[Any] = []
    for name, module in model.named_modules():
        if isinstance(module, _Accelerated):
            if type(module) is not _class(module._kind, module._original):
                raise ValueError(
                    f"{name or 'model'} is now a {type(module).__name__}; expected the class that "
                    "accelerate gave it: undo what changed it (a parametrization) first"
                )
            modules.append(module)
    for module in modules:
        _give_back(module)


# -------------------------------------------------------------------------------------- explanation


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


class _DirectAttention(TorchFunctionMode):
    """Tells of the calls of F.scaled_dot_product_attention in the model's own code."""

    def __init__(self, told: Callable[[], int], tell: Callable[[backends.Choice], None]) -> None:
        super().__init__()
        self._told, self._tell = told, tell

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        before = self._told()
        out = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention and self._told() == before:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if not caller.startswith("fastformer"):
                why = "it is called directly; sdpa_override reaches it"
                if caller == "transformers.integrations.sdpa_attention":
                    why = _SUGGESTION.format("sdpa")
                self._tell(backends.Choice("scaled_dot_product_attention", "torch", why))
        return out


def explain(target: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Which backend a call takes, and why.

    explain(op, *args, **kwargs): of the op of that name, without running it; an object with
    `.backend` and `.reason`.

    explain(model, *inputs, **kwargs): runs the model once on the inputs, in the mode and on the
    backend that are set, and tells for each layer what it ran on: an `Explanation`, with rows of
    (module's name, op, backend, reason) in the order in which they ran. The backend is triton,
    reference or, where the module's own forward ran, torch. Named are fastformer's ops, the torch
    modules that `accelerate` would replace, direct calls of F.scaled_dot_product_attention, and the
    attention layers of a Hugging Face model that ran without either, by their class. Of a compiled
    model the model that was compiled is run.

    Raises:
        ValueError: an unknown op. TypeError: neither a name nor a module. Otherwise what the call
            raises.
    """
    if not isinstance(target, nn.Module):
        if not isinstance(target, str):
            kind = type(target).__name__
            raise TypeError(f"target is a {kind}; expected the name of an op, or an nn.Module")
        return backends.explain(target, *args, **kwargs)
    model = getattr(target, "_orig_mod", target)
    names = {id(module): name for name, module in model.named_modules()}
    rows: list[tuple[str, str, str, str]] = []
    running: list[Any] = []

    attended: list[int] = []  # by module that runs: the attention in it, of whichever kind
    hugging_face = hasattr(getattr(model, "config", None), "_attn_implementation")

    def tell(choice: backends.Choice) -> None:
        name = next((names[id(m)] for m in reversed(running) if id(m) in names), "")
        rows.append((name, choice.op, choice.backend, choice.reason))
        if "attention" in choice.op.lower():
            attended[:] = [n + 1 for n in attended]

    def enter(module: nn.Module, _: Any) -> None:
        if _explaining.modules is running:  # and not of another thread: the hooks are of all
            running.append(module)
            attended.append(0)

    def leave(module: nn.Module, *_: Any) -> None:
        if _explaining.modules is not running:
            return
        kind, why = type(module).__name__, None
        if not isinstance(module, _Accelerated) and isinstance(module, _BASES):
            why = "accelerate(model) has not replaced it"
        elif hugging_face and "attention" in kind.lower() and not attended[-1]:
            why = _own_attention(module)
        if why is not None:
            tell(backends.Choice(kind, "torch", why))
        running.pop()
        attended.pop()

    former, _explaining.modules = _explaining.modules, running
    handles = [
        _hooks.register_module_forward_pre_hook(enter),
        _hooks.register_module_forward_hook(leave, always_call=True),  # after an error too
    ]
    try:
        with backends.telling(watch=tell), _DirectAttention(lambda: len(rows), tell):
            model(*args, **kwargs)
    finally:
        _explaining.modules = former
        for handle in handles:
            handle.remove()
    return Explanation(tuple(rows))


_BASES = tuple(kind._base for kind in KINDS)
_SUGGESTION = (
    "attn_implementation is {!r}; after register_transformers() "
    "model.set_attn_implementation('fastformer') replaces it"
)


def _own_attention(module: nn.Module) -> str:
    """Why an attention layer of a Hugging Face model ran on its own."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    asks = hasattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS")
    if asks and name not in (None, "fastformer"):
        return _SUGGESTION.format(name)
    return "it computes its attention by itself, whatever attn_implementation is"


# ------------------------------------------------------------------------------------ sdpa_override


class sdpa_override(TorchFunctionMode):
    """Within it F.scaled_dot_product_attention is fastformer's, for the calling thread.

        with fastformer.sdpa_override():
            model(x)

    Its arguments and their meaning are torch's: a boolean mask (True takes part) or a floating one,
    dropout, is_causal from the top left, scale, enable_gqa, three or four dimensions, a value of
    another width. What the op does not take (nested tensors, tensor subclasses, other numbers of
    dimensions, batches that broadcast, head dims of 0 or above 256, other dtypes, a scale that is a
    tensor), and what is wrong, runs in torch, call by call. A row that sees no key, be it by a
    floating mask of finfo.min, gives zeros. It nests, and works within and around torch.compile.
    Calls inside of nn.MultiheadAttention are not seen by it: `accelerate` replaces that. backward()
    leaves every such mode, so under activation checkpointing the `with` has to stand inside of what
    is checkpointed: around it, torch's attention would run in the second forward.

    Every torch function that runs within it passes through Python once more: some microseconds.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
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
    args = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    reason = _sdpa_obstacle(*args)
    if reason is not None:
        if backends._state.watch is not None:
            choice = backends.Choice("scaled_dot_product_attention", "torch", reason)
            backends._state.watch(choice)
        return F.scaled_dot_product_attention(*args[:6], scale=scale, enable_gqa=enable_gqa)
    enable_gqa = enable_gqa or (query.dim() == 4 and key.shape[1] == 1)  # a head for all
    with backends.telling(obstacle=_nobody):
        return functional.scaled_dot_product_attention(*args[:7], enable_gqa)


def _nobody(op: str, reason: str) -> None:
    """Nobody counts the fallbacks of calls outside of a module; `explain` tells them."""


def _sdpa_obstacle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> str | None:
    """Why torch's own op has to run, or None; an argument that is wrong is torch's to refuse."""
    tensors = (query, key, value)
    foreign = _foreign(*tensors, attn_mask)
    if foreign is not None:
        return foreign
    if any(x is None or x.dim() != query.dim() for x in tensors) or query.dim() not in (3, 4):
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
    if any(x.shape[0] != query.shape[0] for x in tensors) or key.shape[:-1] != value.shape[:-1]:
        return "the batch or the heads broadcast"
    if query.dim() == 4 and query.shape[1] != key.shape[1]:
        if not enable_gqa and key.shape[1] != 1:  # one head for all is what the op takes
            return "the heads broadcast"
        if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
            return "the heads of key do not divide those of query"
    dims = (query.shape[-1], value.shape[-1])
    if 0 in dims or max(dims) > functional.MAX_HEAD_DIM or key.shape[-1] != dims[0]:
        return f"a head dim is 0 or above {functional.MAX_HEAD_DIM}, or key has another than query"
    if type(dropout_p) not in (float, int) or not 0 <= dropout_p <= 1:
        return "dropout_p is no number from 0 to 1"
    if type(is_causal) is not bool or not (scale is None or type(scale) in (float, int)):
        return "is_causal is no bool, or scale no number"
    if attn_mask is None:
        return None
    if is_causal or attn_mask.dtype not in (torch.bool, query.dtype):
        return "a mask beside is_causal, or of another dtype"
    scores = (*query.shape[:-1], key.shape[-2])
    sizes = zip(attn_mask.shape[::-1], scores[::-1])
    if not 2 <= attn_mask.dim() <= len(scores) or any(n not in (1, want) for n, want in sizes):
        return "the mask does not broadcast to the scores"
    return None
