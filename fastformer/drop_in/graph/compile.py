"""The rewriter within torch.compile: a pass of inductor, and backends."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass

import fastformer
from fastformer.dispatch.backends import current_backend
from fastformer.drop_in.graph.rewriter import KINDS, rewrite

DEFAULT = ("attention", "loss")  # what inductor does not fuse by itself


class InductorPass(CustomGraphPass):
    """A pass of inductor that puts fastformer's ops into the graph of a model.

    kinds: what it replaces, of "attention", "norm", "feed_forward" and "loss".
    """

    def __init__(self, kinds: tuple[str, ...] = DEFAULT) -> None:
        self.kinds = kinds

    def __call__(self, graph: fx.Graph) -> None:
        rewrite(graph, self.kinds)

    def uuid(self) -> Any:
        """Return what the result depends on, besides the graph: inductor's caches ask for it."""
        return _version(), self.kinds, current_backend(), torch.is_autocast_enabled("cpu")


def _version() -> str:
    digest = hashlib.sha256()
    for folder in map(Path, fastformer.__path__):
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
