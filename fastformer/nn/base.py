"""The base class and the helpers that the layers share."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from torch import Tensor, nn

from fastformer import checks
from fastformer.nn.stream import is_unmodified


class AliasedModule(nn.Module):
    """A module that loads state dicts with other names: `spellings` maps each to its own name."""

    spellings: ClassVar[dict[str, str]] = {}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # torch passes a copy of the caller's dict, from which it loads the children afterwards: the
        # new names hold for them, too.
        for key in list(state_dict):
            for other, ours in self.spellings.items():
                if (key + ".").startswith(prefix + other + "."):
                    name = prefix + ours + key[len(prefix + other) :]
                    if name not in state_dict:  # else the other name stays, and torch reports it
                        state_dict[name] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


def make_dropout(p: float) -> nn.Dropout:
    return nn.Dropout(checks.require_probability("dropout", p))


def clones(module: nn.Module, N: int) -> nn.ModuleList:
    """Return a ModuleList of N independent deep copies.

    Raises ValueError if N is negative, TypeError if `module` is not a module.
    """
    checks.require_size(0, N=N)
    checks.require_instance("module", module, nn.Module, "an nn.Module")
    return nn.ModuleList(copy.deepcopy(module) for _ in range(N))


def require_linear_input(name: str, x: Tensor, layer: nn.Module) -> None:
    """If `layer` is an unmodified nn.Linear, require the width, device and dtype it takes."""
    checks.require_tensor(name, x)
    if type(layer) is not nn.Linear or not is_unmodified(layer):
        return
    if x.shape[-1:] != layer.weight.shape[1:]:
        raise checks.wrong_shape(name, x, f"[..., {layer.in_features}]")
    checks.require_device(name, x, "the parameters", layer.weight)
    if x.dtype != layer.weight.dtype and checks.autocast_dtype(x) is None:
        raise TypeError(
            f"{name} has dtype {x.dtype}; expected that of the parameters, {layer.weight.dtype}, "
            "or torch.autocast"
        )
