"""Compare a module of a known structure with its replacement, by trial runs of both forwards."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.dispatch import backends
from fastformer.drop_in.replacements import transformers_layers
from fastformer.drop_in.replacements.base import AnySignature, Recognized, class_for


def disagreement(module: nn.Module, kind: type[Recognized]) -> str | None:
    """Return why the kind's forward cannot replace the module's, or None.

    Both forwards run in float64 with random parameters, in evaluation mode and in training mode. In
    training, a dropout probability of 1 makes them comparable. Large submodules that a forward only
    calls are replaced by small ones meanwhile (`Recognized._trial_parts`).
    """
    forwards = type(module).forward, kind.forward
    given, expected = (list(inspect.signature(f).parameters)[1:] for f in forwards)
    if issubclass(kind, AnySignature):
        expected = given if len(given) == 1 else ["one argument"]
    if given != expected:
        return f"its forward takes ({', '.join(given)}); expected ({', '.join(expected)})"
    generator = torch.Generator("cpu").manual_seed(0)
    device = next(module.parameters()).device

    def random(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
        return x.to(device)

    fork = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with fork, torch.no_grad(), _state_kept(module), backends.use_backend("reference"):
        try:
            module.__dict__["_modules"] = {**module._modules, **kind._trial_parts(module)}  # type: ignore[arg-type]
            classes = (type(module), class_for(kind, type(module)))
            weights = {name: random(*p.shape) * 0.5 for name, p in module.named_parameters()}
            for training in (False, True):
                for args in kind._probes(module, random):  # type: ignore[arg-type]
                    theirs, ours = (
                        _trial_run(module, cls, training, weights, args) for cls in classes
                    )
                    if not (isinstance(theirs, Tensor) and theirs.shape == ours.shape):
                        return "it does not return a tensor of the shape of its first argument"
                    if not torch.allclose(theirs, ours, rtol=kind._tolerance, atol=kind._tolerance):
                        mode = "training" if training else "evaluation"
                        return f"it computes something else, by a trial run in {mode}"
        except Exception as error:  # whatever the user's code raises is a reason
            return f"a trial run raised {type(error).__name__}: {error}"
    return None


def needs_logits(model: transformers_layers.FusedModelWithLoss) -> str | None:
    """Return why a model cannot compute its loss without logits, or None.

    The model's forward runs once, in training mode, with two tokens and labels; in place of its
    base model, which computes the hidden states, a function returns zeros.
    """
    head, base = transformers_layers.output_layer(model), getattr(model, "base_model", model)
    if isinstance(head, str):
        return head
    if base is model:
        return "it has no base model that computes the hidden states"
    weight = head.weight
    outputs = _Outputs([weight.new_zeros(1, 2, head.in_features)])
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=weight.device)
    named: dict[str, Any] = {"input_ids": tokens} if model.main_input_name == "input_ids" else {}
    if "output_router_logits" in inspect.signature(model._original.forward).parameters:
        named["output_router_logits"] = False  # the function returns none
    with torch.no_grad(), _state_kept(model), backends.use_backend("reference"):
        base.__dict__["forward"] = lambda *_, **__: outputs
        model.training = model._skips_logits = True
        try:
            output = model.forward(**named, labels=tokens, return_dict=True)
            read = any(not x.isfinite().all() for x in output.values() if type(x) is Tensor)
        except transformers_layers.ChangedLogitsError:
            return "it changes them before it computes its loss"
        except Exception as error:
            return f"a trial run raised {type(error).__name__}: {error}"
    return "by a trial run, it uses them for more than its loss" if read else None


class _Outputs(tuple[Tensor]):
    """What stands for the outputs of a base model: its hidden states, and None for all others."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


def _trial_run(
    module: nn.Module,
    cls: type[nn.Module],
    training: bool,
    weights: Mapping[str, Tensor],
    args: tuple[Tensor | None, ...],
) -> Any:
    """Call the module as an instance of `cls`, with these weights and dropout probability 1."""
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
    """A context that disables the module's hooks and restores all its attributes at the end."""
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
