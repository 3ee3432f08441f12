"""The dropout seeds of one forward of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastformer.checks import draw_seeds
from fastformer.dispatch import backends


class Seeds:
    """The seeds of all sites of a model that drop elements: one draw, when the first site needs it.

    A site has a fixed number, so that its mask does not depend on which other sites drop, nor on
    when a layer runs: activation checkpointing runs it again.

    sites: how many the model has. first: the number of the site that is 0 for `of`.
    """

    def __init__(self, sites: int, first: int = 0, drawn: list[Tensor] | None = None) -> None:
        self.sites, self.first = sites, first
        self._drawn: list[Tensor] = [] if drawn is None else drawn  # [sites], then one each

    def after(self, sites: int) -> Seeds:
        """Return the seeds without those of the next sites."""
        return Seeds(self.sites, self.first + sites, self._drawn)

    def of(self, site: int, device: torch.device) -> Tensor | None:
        """Return the seed [1] of a site, on the device of its input; None where torch draws."""
        drawn = self._drawn
        if backends.draws_by_torch(device):
            return None
        if not drawn or drawn[0].device != device:  # a model may lie on several devices
            seeds = draw_seeds(self.sites, device)
            drawn[:] = [seeds, *seeds.split(1)]
        return drawn[1 + self.first + site]


def runs_forward_of(module: object, *owners: type[nn.Module]) -> bool:
    """Return whether a call of the module runs the forward of one of these classes."""
    forward = getattr(type(module), "forward", None)
    return forward in [owner.forward for owner in owners] and "forward" not in vars(module)
