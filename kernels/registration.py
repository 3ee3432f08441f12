"""Register launchers as ops of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .flops import register_flops

_library = torch.library.Library("fastformer", "DEF")
_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def register(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register a launcher as the op `fastformer::<schema>`. Its meta implementation is `fake`,
    which makes empty outputs of the same shapes, strides and dtypes.
    """
    name = schema[: schema.index("(")]

    def decorate(launcher: Callable[..., Any]) -> Callable[..., Any]:
        _library.define(schema, tags=_tags)
        _library.impl(name, launcher, "CompositeExplicitAutograd")
        torch.library.register_fake("fastformer::" + name, fake, lib=_library)
        register_flops(name)
        return launcher

    return decorate
