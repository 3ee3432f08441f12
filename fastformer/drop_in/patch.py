"""Change the classes of a model's modules, in place, to those in replacements/, and back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fastformer.checks import require_flag, require_instance
from fastformer.dispatch.state import current_backend, use_backend
from fastformer.drop_in.capture import WEIGHTS, at_line
from fastformer.drop_in.explanation import explain, name_pattern
from fastformer.drop_in.replacements import KINDS
from fastformer.drop_in.replacements.attention import NEEDS_WEIGHTS, FusedMultiheadAttention
from fastformer.drop_in.replacements.base import STATE, Accelerated, class_for, is_on_a_cpu
from fastformer.drop_in.replacements.layers import Layer
from fastformer.drop_in.replacements.rewritten import Part, Rewritten, share
from fastformer.drop_in.replacements.stacks import FusedTransformerEncoder
from fastformer.drop_in.replacements.transformers_loss import (
    FusedModelWithLoss,
    has_loss,
    needs_logits,
    unknown_loss,
)
from fastformer.drop_in.units import units

Plan = list[tuple[nn.Module, type[Accelerated]]]  # the class that each module gets


def accelerate(
    model: nn.Module,
    *inputs: Any,
    drop_padding: bool | None = None,
    need_weights: bool | None = None,
    skip_logits: bool | None = None,
    **named: Any,
) -> Report:
    """Run the modules of a PyTorch model on the ops of fastformer, in place.

    It replaces nn.MultiheadAttention, the layers and stacks of nn.Transformer, nn.LayerNorm,
    nn.RMSNorm and subclasses that keep their forward. A Hugging Face model whose loss is the
    cross-entropy of its logits computes it by `cross_entropy`. Every other module whose code
    computes attention, a norm or a feed-forward layer is rewritten, and so is the layer of a stack
    that holds them: torch.compile's Dynamo captures its forward at its first call, and again where
    a call differs (in training and evaluation, in another dtype), the rewriter of `InductorPass`
    puts the ops into the graph, and the graph runs as it is.

    On a CPU with the backend "auto", torch runs all but the loss by its own code, except for block
    masks and with drop_padding: each call decides that. Only the class of each module changes:
    parameters, buffers, hooks, state dict, signature and defaults stay.

    The outputs equal torch's at every position and in every mode, also at the padding: zeros where
    torch's encoder converts to nested tensors at inference, the output of its layers otherwise. On
    the ops, the differences are:

    - A query that sees no key has zero attention output (and the output projection then returns its
      bias) in every mode; torch gives NaN in some.
    - Dropout draws its own mask.
    - is_causal=True is trusted: the mask is not compared with a causal one.
    - Arguments that torch rejects raise a ValueError or a TypeError, where torch may raise others.
    - An output is contiguous; torch's may be a transposed view.
    - A layer whose submodules have hooks calls them one by one; a hook on all modules
      (torch.nn.modules.module.register_module_forward_hook) does not see those that an op runs. A
      rewritten module with a backward hook on a module within it runs its own code.
    - The norms, gates and losses of Hugging Face's models round once, where theirs may round twice.
      The backward of that loss reads the logits: torch raises an error if they were changed.
    - Weights of attention that a rewritten module returns or stores are computed beside the op, so
      that its output has no gradient for them.

    torch.jit.script does not accept a replaced model: restore it first. torch.jit.trace and
    torch.fx record the original forwards, and torch.func transforms them. An outer torch.compile
    captures the original forwards of rewritten modules: compile within `fusing`. The report does
    not count calls inside a compiled model.

    A second call replaces what was added since. An option that it is not given (None) stays as an
    earlier call set it; without one, need_weights is True and the others are False.

    Args:
        model: any module. Modules are replaced at every depth, the model itself included.
        inputs, named: arguments of the model, or none. With them the model runs once, without
            gradients, so that the report says what is in the rewritten modules; and it names the
            attention that torch has computed outside of them.
        drop_padding: if True, every nn.TransformerEncoder that is given a boolean
            src_key_padding_mask skips the padding, if that is at least a tenth of the batch. This
            changes the output: at the padding the layers return zeros in every mode, and the final
            norm returns norm(0). Code that reads those positions sees the change: a decoder without
            memory_key_padding_mask, a mean over all positions, a loss that does not mask them out.
            In an nn.Transformer, memory_key_padding_mask hides the padding from the decoder. On a
            GPU each call synchronizes once. If False, padding is dropped only where torch itself
            converts to nested tensors, at inference.
        need_weights: if False, nn.MultiheadAttention always runs on the fused op and returns
            (output, None), even if its caller asks for weights: for a model that discards the
            weights, as `self.attn(x, x, x)[0]` does. A rewritten module returns and stores None in
            their place. If True, a call with need_weights=True, torch's default, runs in plain
            PyTorch; the report notes this immediately.
        skip_logits: if True, a Hugging Face model that is given labels in training mode computes
            its loss from its hidden states, by `linear_cross_entropy`, which never holds all
            logits; the `logits` of its output are None. In evaluation mode and without labels it
            returns them. The report notes each model that returns its logits nevertheless, and
            why: it changes them before the loss (a scale, a softcap), or its output layer is no
            plain nn.Linear, has hooks or is sharded. A compiled model returns its logits, too.

    Returns:
        A `Report` of what was replaced, and what was skipped and why; it also counts the later
        calls that fell back.

    Raises:
        TypeError: model is not a module.
        ValueError: model is on the meta device.

    If an error is raised, nothing is replaced. Source: torch.nn.modules.transformer; Huang et al.
    2018, "The Annotated Transformer" (harvardnlp).
    """
    _require_model(model)
    options = dict(drop_padding=drop_padding, need_weights=need_weights, skip_logits=skip_logits)
    for name, flag in options.items():
        if flag is not None:
            require_flag(name, flag)
    report = Report()
    plan = _plan(model, report)
    try:
        for module, cls in plan:
            module.__class__ = cls
        share([module for module, _ in plan])
        _set_options(report, **options)
        if inputs or named:
            _name_attention(model, inputs, named, report)
    except BaseException:
        for module, _ in plan:
            if isinstance(module, Accelerated):
                _restore_class(module)
        raise
    return report


def _name_attention(model: nn.Module, inputs: Any, named: Any, report: Report) -> None:
    """Run the model, and note what attention torch has computed outside of rewritten modules; those
    that have returned no weights need no note. On a CPU, too, rewritten modules show what is fused.
    """
    backend = current_backend()
    if backend == "auto" and is_on_a_cpu(model):
        backend = "reference"
    with torch.no_grad(), torch.random.fork_rng(), use_backend(backend):
        rows = explain(model, *inputs, **named).rows
    ran = {name for name, *_ in rows}
    returned = {name for name, _, _, reason in rows if reason == NEEDS_WEIGHTS}
    for name in ran - returned:
        if report.notes.get(name) == NEEDS_WEIGHTS:
            del report.notes[name]
    rewritten = [x for x, module in report._modules.items() if isinstance(module, Rewritten)]
    for name, op, backend, reason in rows:
        inside = any(name == unit or name.startswith(f"{unit}.") or not unit for unit in rewritten)
        if backend == "torch" and "ttention" in f"{op} {reason}" and not inside:
            report.notes.setdefault(name, f"{op}: {reason}")


def _set_options(
    report: Report, drop_padding: bool | None, need_weights: bool | None, skip_logits: bool | None
) -> None:
    """Set the options of `accelerate`, but keep those of an earlier call where they are None, and
    note the attention that returns its weights and the losses that cannot skip their logits.
    """
    layers = [module for module in report._modules.values() if isinstance(module, Layer)]
    # Torch's layers call these with need_weights=False.
    in_layers = {getattr(layer, name) for layer in layers for name in layer._attentions}
    found = False
    for name, module in report._modules.items():
        if isinstance(module, FusedTransformerEncoder) and drop_padding is not None:
            module._drops_padding = drop_padding
        if isinstance(module, (Rewritten, FusedMultiheadAttention)) and need_weights is not None:
            if isinstance(module, Rewritten) and module._returns_weights != need_weights:
                module._known().explained.clear()
            module._returns_weights = need_weights
        alone = isinstance(module, FusedMultiheadAttention) and module not in in_layers
        if alone and module._returns_weights:
            report.notes[name] = NEEDS_WEIGHTS
        if isinstance(module, FusedModelWithLoss):
            found, wanted = True, module._skips_logits if skip_logits is None else skip_logits
            reason = needs_logits(module) if wanted else None
            module._skips_logits = wanted and reason is None
            if reason is not None:
                report.notes[name] = f"its logits are not skipped: {reason}"
    if skip_logits and not found:
        report.notes[""] = "no logits are skipped: no loss of logits was replaced"


def restore(model: nn.Module) -> None:
    """Undo `accelerate`: give every module its original class and attributes.

    Raises:
        TypeError: model is not a module.
        ValueError: the class of a module was changed again after `accelerate`, for example by
            torch.nn.utils.parametrize. Then no module is restored.
    """
    require_instance("model", model, nn.Module, "an nn.Module")
    replaced = {name: x for name, x in model.named_modules() if isinstance(x, Accelerated)}
    for name, module in replaced.items():
        if "_original" not in vars(type(module)):  # it derives from the class of `class_for`
            raise ValueError(
                f"{name or 'model'} is now a {type(module).__name__}; expected the class that "
                "accelerate gave it: undo what changed it (a parametrization) first"
            )
    for module in replaced.values():
        _restore_class(module)


@dataclass
class Report:
    """What `accelerate` did. `print` it.

    replaced: module name -> class name of each replaced module. skipped: module name -> why a
    module of a supported kind was not replaced. already: the names of the modules that an earlier
    call replaced. notes: module name -> what keeps a replaced module from the fused ops, as far as
    known before any call. fallbacks: module name -> {reason: number of calls so far that did not
    run on the fused ops}. rewritten: module name -> what its calls so far have shown: for each op
    or part that stays (module, kind, op or "", reason or "", line of its code); empty before.
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

    @property
    def rewritten(self) -> dict[str, list[Part]]:
        modules = {name: m for name, m in self._modules.items() if isinstance(m, Rewritten)}
        return {name: m._known().parts() for name, m in modules.items()}

    def _ops(self, name: str, parts: list[Part]) -> str:
        """Return what is known of a rewritten module: the ops that it calls."""
        ops = Counter(x.op for x in parts if x.op)
        named = ", ".join(op + (f" x {n}" if n > 1 else "") for op, n in ops.items())
        called = parts or self._modules[name]._known()  # type: ignore[operator]
        return named or ("nothing is fused" if called else "rewritten at the first call")

    def __str__(self) -> str:
        count = f"{len(self.replaced)} modules" if self.replaced else "nothing"
        lines = [f"replaced: {count}"]
        rewritten = self.rewritten
        of = {name: f": {self._ops(name, parts)}" for name, parts in rewritten.items()}
        groups = Counter((name_pattern(x), cls, of.get(x, "")) for x, cls in self.replaced.items())
        width = max((len(name) for name, *_ in groups), default=0)
        for (name, cls, ops), n in groups.items():
            lines.append(f"  {name:{width}}  {cls}" + (f" x {n}" if n > 1 else "") + ops)
        if self.already:
            lines.append(f"replaced before: {len(self.already)} modules")
        for title, listed in (("skipped", self.skipped), ("noted", self.notes)):
            if listed:
                lines.append(f"{title}: {len(listed)} modules")
            same = Counter((name_pattern(name), why) for name, why in listed.items())
            lines += [f"  {name}: {why}{_times(n)}" for (name, why), n in same.items()]
        stays = Counter(
            (name_pattern(f"{name}.{x.module}".strip(".")), at_line(f"{x.kind}: {_why(x)}", x.line))
            for name, parts in rewritten.items()
            for x in parts
            if not x.op
        )
        lines += ["stays in rewritten modules:"] if stays else []
        lines += [f"  {name}: {why}{_times(n)}" for (name, why), n in stays.items()]
        fallbacks: Counter[tuple[str, str]] = Counter()
        for name, reasons in self.fallbacks.items():
            for why, n in reasons.items():
                fallbacks[name_pattern(name), why] += n
        lines += ["calls that did not run on the fused ops:"] if fallbacks else []
        lines += [f"  {name}: {why} (x {n})" for (name, why), n in fallbacks.items()]
        modules = (x for x in self._modules.values() if not isinstance(x, FusedModelWithLoss))
        if any(parameter.is_cpu for x in modules for parameter in x.parameters()):
            lines.append('on a CPU: torch runs these modules with the backend "auto"')
        return "\n".join(lines)


def _why(part: Part) -> str:
    advice = "; accelerate(model, need_weights=False) leaves them out"
    return part.reason + advice * (part.reason == WEIGHTS)


def _times(n: int) -> str:
    return f" (x {n})" if n > 1 else ""


def _require_model(model: nn.Module) -> None:
    require_instance("model", model, nn.Module, "an nn.Module")
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.is_meta:
            raise ValueError(
                f"{name} is on the meta device; expected a model that holds its parameters "
                "(model.to_empty(device=...), then load them)"
            )


def _plan(model: nn.Module, report: Report) -> Plan:
    """Return the change of each module that can be replaced, and fill in the report."""
    plan: Plan = []
    found = units(model)
    rewritten = {*found.values()} | {x for x in model.modules() if isinstance(x, Rewritten)}
    inside = {x for unit in rewritten for x in unit.modules()} - rewritten
    for name, module in model.named_modules():
        if isinstance(module, Accelerated):
            report.already.append(name)
            report._modules[name] = module
        if isinstance(module, Accelerated) or module in inside:
            continue
        kind = _fit(module, Rewritten) if name in found else _kind(module)
        try:
            cls = kind if kind is None or isinstance(kind, str) else class_for(kind, type(module))
        except Exception as error:  # the original class may reject subclasses
            cls = f"a class derived from it raises {type(error).__name__}: {error}"
        if isinstance(cls, str):
            report.skipped[name] = f"{type(module).__name__}: {cls}"
        elif cls is not None:
            plan.append((module, cls))
            report.replaced[name] = type(module).__name__
            report._modules[name] = module
    return plan


def _restore_class(module: Accelerated) -> None:
    module.__class__ = module._original  # type: ignore[assignment]
    for name in STATE:
        module.__dict__.pop(name, None)


def _kind(module: nn.Module) -> type[Accelerated] | str | None:
    """Return the replacement of a module of torch, or of a model with a loss; why there is none for
    one of these; or None.
    """
    for base, kind in KINDS.items():
        if isinstance(module, base):
            for name in (*kind._internal, "__call__"):
                if name in module.__dict__:
                    return f"its {name} is replaced on the instance"
                if getattr(type(module), name) is not getattr(base, name):
                    return f"it has its own {name}"
            return _fit(module, kind)
    if "forward" not in module.__dict__ and has_loss(module):
        return unknown_loss(module) or _fit(module, FusedModelWithLoss)
    return None


def _fit(module: nn.Module, kind: type[Accelerated]) -> type[Accelerated] | str:
    return _collision(module, kind) or kind


def _collision(module: nn.Module, kind: type[Accelerated]) -> str | None:
    """Return which attribute of the module has a name that the kind needs for itself, or None."""
    ours, theirs = {*STATE}, {"forward", "loss_function"}
    for cls in kind.__mro__:
        if issubclass(cls, Accelerated):
            ours |= {name for name in vars(cls) if name[:2] != "__"} - theirs
    for name in sorted(ours):
        if name in module.__dict__ or hasattr(type(module), name):
            return f"it has an attribute {name}, which the replacement needs for itself"
    return None
