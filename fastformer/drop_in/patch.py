"""Change the classes of a model's modules, in place, to those in replacements/, and back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fastformer.checks import require_flag, require_instance
from fastformer.drop_in.explanation import explain, name_pattern
from fastformer.drop_in.remaining import ATTENTION_WORDS, remaining, remaining_attention
from fastformer.drop_in.replacements import KINDS, RECOGNIZED, known_methods, rotary
from fastformer.drop_in.replacements.attention import NEEDS_WEIGHTS, FusedMultiheadAttention
from fastformer.drop_in.replacements.base import Accelerated, AnySignature, class_for
from fastformer.drop_in.replacements.layers import Layer
from fastformer.drop_in.replacements.stacks import FusedTransformerEncoder
from fastformer.drop_in.replacements.sublayers import FusedSequential, sequence, unfit
from fastformer.drop_in.replacements.transformers_layers import (
    FusedModelWithLoss,
    has_loss,
    unknown_loss,
    unknown_structure,
)
from fastformer.drop_in.trial import disagreement, needs_logits
from fastformer.nn.attention import MultiHeadedAttention
from fastformer.nn.feed_forward import PositionwiseFeedForward
from fastformer.nn.norms import LayerNorm

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

    It replaces nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
    nn.TransformerEncoder and nn.TransformerDecoder (thus nn.Transformer), nn.LayerNorm, nn.RMSNorm
    and subclasses that keep their forward. It also replaces the attention, norm and feed-forward of
    the Annotated Transformer: it recognizes them by their attributes (linears.0 .. 3 with h and
    d_k; a_2 and b_2; w_1 and w_2) and confirms them by comparing with a trial run of the original
    in float64. In the same way it replaces the RMSNorms, rotary positions and gated feed-forwards
    of Hugging Face's models; and a model whose loss is the cross-entropy of its logits computes it
    by `cross_entropy`. The layers of transformers whose source it knows, and an nn.Sequential
    that holds Linear, activation, dropout, Linear, run on `feed_forward`, `dropout_add_layer_norm`
    and `dropout_add_rms_norm`. Only the class of each module changes: parameters, buffers, hooks,
    state dict, signature and defaults stay.

    The outputs equal torch's at every position and in every mode, also at the padding: zeros where
    torch's encoder converts to nested tensors at inference, the output of its layers otherwise.
    The differences are:

    - A query that sees no key has zero attention output (and the output projection then returns its
      bias) in every mode; torch gives NaN in some.
    - Dropout draws its own mask.
    - is_causal=True is trusted: the mask is not compared with a causal one.
    - Arguments that torch rejects raise a ValueError or a TypeError, where torch may raise others.
    - An output is contiguous; torch's may be a transposed view.
    - A layer whose submodules have hooks calls them one by one; a hook on all modules
      (torch.nn.modules.module.register_module_forward_hook) does not see those that an op runs.
    - A loss of Hugging Face's models, their norms and gates round once, where theirs may round
      twice.
      The backward of that loss reads the logits: torch raises an error if they were changed.
    - The tutorial's attribute `attn`, the weights of the last call, is None afterwards.

    torch.jit.script does not accept a replaced model: restore it first. torch.jit.trace records the
    original forwards, so that the trace equals that of the original model. A compiled model is
    compiled again; the report does not count calls inside a compiled model.

    A second call replaces what was added since. An option that it is not given (None) stays as an
    earlier call set it; without one, need_weights is True and the others are False.

    Args:
        model: any module. Modules are replaced at every depth, the model itself included.
        inputs, named: arguments of the model, or none. With them the model runs once, without
            gradients, and the report also names the attention that this run computed outside of
            fastformer. Without them it names what the code of the modules shows.
        drop_padding: if True, every nn.TransformerEncoder that is given a boolean
            src_key_padding_mask skips the padding, if that is at least a tenth of the batch. This
            changes the output: at the padding the layers return zeros in every mode, and the final
            norm returns norm(0). Code that reads those positions sees the change: a decoder without
            memory_key_padding_mask, a mean over all positions, a loss that does not mask them out.
            On a GPU each call synchronizes once. If False, padding is dropped only where nothing
            can see it: where torch itself converts to nested tensors, and in an nn.Transformer
            whose memory_key_padding_mask hides it from the decoder.
        need_weights: if False, nn.MultiheadAttention always runs on the fused op and returns
            (output, None), even if its caller asks for weights: for a model that discards the
            weights, as `self.attn(x, x, x)[0]` does. If True, a call with need_weights=True,
            torch's default, runs in plain PyTorch; the report notes this immediately.
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
        if inputs or named:
            _name_attention(model, inputs, named, report)
    except BaseException:
        for module, _ in plan:
            if isinstance(module, Accelerated):
                _restore_class(module)
        raise
    _set_options(report, **options)
    return report


def _name_attention(model: nn.Module, inputs: Any, named: Any, report: Report) -> None:
    """Run the model, and note what attention torch has computed."""
    with torch.no_grad(), torch.random.fork_rng():
        rows = explain(model, *inputs, **named).rows
    for name, op, backend, reason in rows:
        known = report.skipped.get(name, "").endswith(reason)
        if backend == "torch" and reason.startswith(ATTENTION_WORDS) and not known:
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
        if isinstance(module, FusedMultiheadAttention):
            if need_weights is not None:
                module._returns_weights = need_weights
            if module._returns_weights and module not in in_layers:
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
    run on the fused ops}.
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
        count = f"{len(self.replaced)} modules" if self.replaced else "nothing"
        lines = [f"replaced: {count}"]
        groups = Counter((name_pattern(name), cls) for name, cls in self.replaced.items())
        width = max((len(name) for name, _ in groups), default=0)
        for (name, cls), n in groups.items():
            lines.append(f"  {name:{width}}  {cls}" + (f" x {n}" if n > 1 else ""))
        if self.already:
            lines.append(f"replaced before: {len(self.already)} modules")
        for title, listed in (("skipped", self.skipped), ("noted", self.notes)):
            if listed:
                lines.append(f"{title}: {len(listed)} modules")
            same = Counter((name_pattern(name), why) for name, why in listed.items())
            for (name, why), n in same.items():
                lines.append(f"  {name}: {why}" + (f" (x {n})" if n > 1 else ""))
        fallbacks: Counter[tuple[str, str]] = Counter()
        for name, reasons in self.fallbacks.items():
            for why, n in reasons.items():
                fallbacks[name_pattern(name), why] += n
        if fallbacks:
            lines.append("calls that did not run on the fused ops:")
            lines += [f"  {name}: {why} (x {n})" for (name, why), n in fallbacks.items()]
        return "\n".join(lines)


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
    for name, module in model.named_modules():
        if isinstance(module, Accelerated):
            report.already.append(name)
            report._modules[name] = module
            continue
        kind = _kind(module) or unknown_structure(module) or remaining(module)
        kind = kind or known_methods.unknown_layer(module)
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
            if issubclass(cls, AnySignature) and (own := remaining_attention(module)):
                report.notes[name] = f"{type(module).__name__}: {own}"
    return plan


def _restore_class(module: Accelerated) -> None:
    module.__class__ = module._original  # type: ignore[assignment]
    for name in ("_fallbacks", "_drops_padding", "_returns_weights", "_skips_logits"):
        module.__dict__.pop(name, None)


# ------------------------------------------------------------------------- what replaces a module

_OWN = (MultiHeadedAttention, LayerNorm, PositionwiseFeedForward)  # they call the ops themselves


def _kind(module: nn.Module) -> type[Accelerated] | str | None:
    """Return the replacement of the module, or why there is none for a known class, or None."""
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
    if "forward" in module.__dict__:
        return _recognized(module)
    return _of_transformers(module) or _recognized(module)


def _of_transformers(module: nn.Module) -> type[Accelerated] | str | None:
    """Return what replaces a model, an attention or a layer of transformers, or an nn.Sequential,
    why nothing does, or None for another module.
    """
    reason: str | None = None
    kind: type[Accelerated] | None = None
    if has_loss(module):
        reason, kind = unknown_loss(module), FusedModelWithLoss
    elif functions := rotary.rotations(type(module)):
        return rotary.disagreement_of(functions) or rotary.FusedRotaryAttention
    elif reason := rotary.unknown_rotation(type(module)):
        return reason
    elif known_methods.known_methods(type(module)):
        reason, kind = known_methods.unfit_parts(module), known_methods.FusedMethods
    elif type(module) is nn.Sequential and (found := sequence(list(module))):
        reason, kind = unfit(*found[1]), FusedSequential
    return kind and (reason or _collision(module, kind) or kind)


def _recognized(module: nn.Module) -> type[Accelerated] | str | None:
    """Return the kind whose structure the module has and which computes the same, why none does, or
    None if none has its structure.
    """
    reason = None
    for kind in RECOGNIZED:
        if kind._matches(module):
            if "forward" in module.__dict__:
                return "its forward is replaced on the instance"
            found = _collision(module, kind) or disagreement(module, kind)
            if found is None:
                return kind
            reason = reason or found
    return reason


def _collision(module: nn.Module, kind: type[Accelerated]) -> str | None:
    """Return which attribute of the module has a name that the kind needs for itself, or None."""
    ours, theirs = {"_fallbacks"}, {"forward", "attn", "loss_function"}
    for cls in kind.__mro__:
        if issubclass(cls, Accelerated):
            ours |= {name for name in vars(cls) if name[:2] != "__"} - theirs
    for name in sorted(ours):
        if name in module.__dict__ or hasattr(type(module), name):
            return f"it has an attribute {name}, which the replacement needs for itself"
    return None
