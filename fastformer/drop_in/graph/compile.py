"""The rewriter within torch.compile: a pass of inductor, and two backends of Dynamo."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import fx
from torch._inductor import config, list_mode_options
from torch._inductor.custom_graph_pass import CustomGraphPass

from fastformer.batch_invariance import on
from fastformer.checks import require_choice
from fastformer.dispatch.backends import current_backend
from fastformer.drop_in.graph.rewriter import KINDS, rewrite, rewrite_all

BESIDE_INDUCTOR = ("attention", "loss")  # inductor fuses the other kinds with their neighbours


class InductorPass(CustomGraphPass):
    """A pass of inductor that puts fastformer's ops into the graph of a model.

        torch.compile(model, options={"pre_grad_custom_pass": fastformer.inductor_pass})

    It finds what the graph computes, however the code is written: attention (products, views,
    einsum, masks, biases, scales, dropout, softmax), torch's own attention functions, norms by
    torch and by hand, the residual sum before a norm, feed-forward layers, and the cross entropy of
    a last projection whose logits nobody else reads. What it does not know stays as it is; results
    do not change, except that a query whose keys are all masked by -inf gives zeros, not NaN, and
    that dropout draws another mask. With the backend "auto" on a CPU, torch's own functions stay.
    The backend is that of the thread that compiles. `explain` of the compiled model says what was
    found, and why something stays.

    Args:
        kinds: what to replace, of "attention", "norm" (with the sum before it), "feed_forward" and
            "loss". `inductor_pass` replaces attention and the loss; inductor itself fuses the
            others with their neighbours.
        first: another pass, which runs before.

    Raises:
        ValueError: an unknown kind.
    """

    def __init__(self, kinds: tuple[str, ...] = BESIDE_INDUCTOR, first: Any = None) -> None:
        for kind in kinds:
            require_choice("kind", kind, KINDS)
        self.kinds, self.first = tuple(kinds), first

    def __call__(self, graph: fx.Graph) -> None:
        if self.first is not None:
            self.first(graph)
        rewrite(graph, self.kinds)

    def uuid(self) -> Any:
        """Return what the new graph depends on, beside the old one: inductor's caches have it in
        their keys. None, which keeps a graph out of them, if the other pass has no uuid.
        """
        first = getattr(self.first, "uuid", lambda: None)()
        if self.first is not None and first is None:
            return None
        return _digest(), self.kinds, current_backend(), on(), first


@functools.cache
def _digest() -> str:
    """Return a hash of the package's source."""
    found = hashlib.sha256()
    for file in sorted(Path(__file__).parents[2].rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()


inductor_pass = InductorPass()
"""The `InductorPass` that replaces attention and the loss."""


@contextmanager
def fusing(*kinds: str) -> Iterator[None]:
    """A context in which torch.compile uses an `InductorPass`, also where a library calls it.

        with fastformer.fusing():
            trainer.train()             # transformers, with TrainingArguments(torch_compile=True)

    What is compiled within it stays so; a graph that is compiled again later, outside, is plain. A
    pass that inductor has already runs first.

    Args:
        kinds: as in `InductorPass`; none: "attention" and "loss".

    Raises:
        ValueError: an unknown kind.
    """
    found = InductorPass(kinds or BESIDE_INDUCTOR, config.pre_grad_custom_pass)
    with config.patch(pre_grad_custom_pass=found):
        yield


def dynamo_backend(
    gm: fx.GraphModule,
    inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend "fastformer" of torch.compile: inductor with `inductor_pass`.

        torch.compile(model, backend="fastformer", mode="reduce-overhead")

    The name works if the package is installed; `backend=fastformer.dynamo_backend` works also in a
    checkout.

    Args:
        gm, inputs: what torch.compile passes.
        mode, options: those of torch.compile, for inductor. The option "pre_grad_custom_pass" takes
            another `InductorPass`.
    """
    from torch._inductor.compile_fx import compile_fx

    chosen = {**(list_mode_options(mode) if mode else {}), **(options or {})}
    patches = {"pre_grad_custom_pass": inductor_pass, **chosen}
    return cast("Callable[..., Any]", compile_fx(gm, inputs, config_patches=patches))


def dynamo_backend_eager(
    gm: fx.GraphModule,
    inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend "fastformer_eager" of torch.compile: the graph with all kinds of fastformer's
    ops, run as it is, without inductor. It is ready after a second or two.

    Args:
        gm, inputs: what torch.compile passes.
        mode, options: nothing reads them.
    """
    rewrite_all(gm, KINDS)
    return gm.forward
