"""Random small modules of attention, norms and feed-forward layers, as a rewriter of graphs meets
them: it must not change a result, and has to fuse those without a trap.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fastformer import use_backend
from fastformer.drop_in.graph.rewriter import recording, rewrite

B, H, S, D = 2, 4, 6, 5
WIDTH, HIDDEN = H * D, 8
LEAST = torch.finfo(torch.float32).min

Live = dict[str, Tensor]  # the tensors that forward has made, by name
Compute = Callable[["Steps", Live], Tensor]


class Steps(nn.Module):
    """Runs steps, each of which makes or replaces one tensor, and returns some of the tensors."""

    def __init__(self, seed: int, trapped: bool) -> None:
        super().__init__()
        self.q, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)  # softmax would cancel a bias
        self.up, self.gate = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.table = nn.Parameter(torch.randn(1, H, S, S))
        self.temperature = nn.Parameter(torch.rand(1, H, 1, 1) + 0.5)
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.steps: list[tuple[str, Compute]] = []
        self.returned = ["y"]
        self.kinds: list[str] = []  # what has to be fused in it
        Pieces(self, random.Random(seed)).module(trapped)

    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        live = {"x": x, "keep": keep}
        for name, compute in self.steps:
            live[name] = compute(self, live)
        return tuple(live[name] for name in self.returned)


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    """Tokens, and a mask that is True for visible keys, [B, 1, S, S]; a query may see no key."""
    torch.manual_seed(seed)
    keep = (torch.rand(B, 1, S, S) > 0.4) | torch.eye(S, dtype=torch.bool)
    if seed % 3 == 0:
        keep[:, :, 1] = False
    return torch.randn(B, S, WIDTH), keep


def changed(compute: Callable[[Tensor], Any], name: str) -> Compute:
    """Return a step that calls a function with a tensor, which it writes, and keeps the tensor."""

    def step(m: Steps, live: Live) -> Tensor:
        compute(live[name])
        return live[name]

    return step


# What a trap does to a tensor in place: to all of it, through views, or by functions of lists.
WRITES: list[Callable[[Tensor], Any]] = [
    lambda x: x.copy_(torch.ones_like(x)),
    lambda x: x.zero_(),
    lambda x: x[0].zero_(),
    lambda x: x[..., 1:].fill_(0),
    lambda x: x.flatten()[:3].fill_(1),
    lambda x: x.view(-1)[2:].zero_(),
    lambda x: x.transpose(0, -1).select(0, 0).fill_(1),
    lambda x: x.__setitem__((..., 0), 0),
    lambda x: x.index_fill_(-1, torch.tensor([0, 2]), 0),
    lambda x: x.index_put_((torch.tensor([0, 1]),), torch.ones((), dtype=x.dtype)),
    lambda x: x.__iand__(x.roll(1, -1)) if x.dtype is torch.bool else x.__ipow__(2),
    lambda x: x.logical_not_() if x.dtype is torch.bool else x.mul_(2.0),
    lambda x: x.logical_not_() if x.dtype is torch.bool else torch._foreach_mul_([x], 3.0),
    lambda x: x.logical_not_() if x.dtype is torch.bool else F.relu(x, inplace=True),
    lambda x: torch.logical_not(x, out=x) if x.dtype is torch.bool else torch.mul(x, 3, out=x),
]


class Pieces:
    """Chooses the steps of a module."""

    def __init__(self, module_: Steps, rng: random.Random) -> None:
        self.m, self.rng = module_, rng
        self.order = "bhqk"  # of the scores' dimensions

    def add(self, name: str, *alternatives: Compute) -> Compute:
        """Add one of the steps; return it."""
        self.m.steps.append((name, self.rng.choice(alternatives)))
        return self.m.steps[-1][1]

    def module(self, trapped: bool) -> None:
        """Add attention, and perhaps norms, a residual sum and a feed-forward layer around it."""
        with_norm, with_feed_forward = self.rng.random() < 0.5, self.rng.random() < 0.5
        self.add("h", lambda m, live: live["x"] * 1.0)
        if with_norm and self.rng.random() < 0.5:
            self.norm("h", "h")
        self.attention(shuffled=trapped and self.rng.random() < 0.3)
        self.add("y", lambda m, live: live["joined"])
        if with_norm:
            self.add(
                "sum", lambda m, t: t["x"] + t["joined"], lambda m, t: t["joined"].add_(t["x"])
            )
            self.norm("y", "sum")
        if with_feed_forward:
            self.feed_forward()
        if trapped:
            for x in self.m.parameters():  # autograd refuses most writes into what it has saved
                x.requires_grad_(self.rng.random() < 0.5)
            self.trap()

    def attention(self, shuffled: bool) -> None:
        """Add attention in a random layout. shuffled: scale, terms and masks in any order."""
        self.m.kinds.append("attention")
        rng, layout = self.rng, self.rng.choice(("4-D", "3-D", "5-D", "einsum"))
        for x in "qkv":
            self.add(x, lambda m, t, x=x: getattr(m, x)(t["h"]).view(B, S, H, D))
        scaled = rng.choice(("q", "k", "scores", ""))
        if scaled in ("q", "k"):
            self.scale(scaled)
        self.product(layout)
        parts = [lambda: self.scale("scores")] if scaled == "scores" else []
        if rng.random() < 0.3:
            parts.append(
                lambda: self.add("scores", lambda m, t: t["scores"] * self.fit(m.temperature))
            )
        parts += [self.term] * rng.choice((0, 1, 1, 2))
        finite = rng.choice((-1e9, LEAST))
        fills = rng.choice(([], [finite], [-math.inf], [finite, -math.inf], [-math.inf] * 2))
        masks = rng.sample(("keep", "causal"), len(fills))
        parts += [lambda f=f, x=x: self.fill(f, x) for f, x in zip(fills, masks)]
        if shuffled:
            rng.shuffle(parts)
        for part in parts:
            part()
        self.softmax()
        self.after_softmax()
        self.values(layout)

    def fit(self, x: Tensor) -> Tensor:
        """Return a tensor [B, H, Sq, Sk] in the order of the scores."""
        return x if self.order == "bhqk" else x.permute(*map("bhqk".index, self.order))

    def scale(self, name: str) -> None:
        self.add(
            name,
            lambda m, t: t[name] * D**-0.5,
            lambda m, t: t[name] / math.sqrt(t["v"].shape[-1]),
            lambda m, t: t[name] / torch.tensor(5.0).sqrt(),
            lambda m, t: t[name].mul(torch.full((1,), 0.5)),
            lambda m, t: torch.div(t[name], 2.0),
        )

    def product(self, layout: str) -> None:
        rng = self.rng
        if layout == "einsum":
            self.order = "".join(rng.sample("bhqk", 4))
            equation = f"bqhd,bkhd->{self.order}"
            self.add("scores", lambda m, t: torch.einsum(equation, t["q"], t["k"]))
            return
        for x in "qkv":
            self.add(
                x,
                lambda m, t, x=x: t[x].transpose(1, 2),
                lambda m, t, x=x: t[x].permute(0, 2, 1, 3),
            )
        if rng.random() < 0.3:
            for x in rng.choice(("kv", "kv", "k", "v")):
                self.repeat(x)
        if layout == "3-D":
            for x in "qkv":
                self.add(
                    x,
                    lambda m, t, x=x: t[x].reshape(B * H, S, D),
                    lambda m, t, x=x: t[x].flatten(0, 1),
                )
        if layout == "5-D":
            for x in "qkv":
                self.add(x, lambda m, t, x=x: t[x].unsqueeze(1), lambda m, t, x=x: t[x][:, None])
        keys: Compute = lambda m, t: t["k"].transpose(-2, -1)  # noqa: E731
        self.add("kt", keys, lambda m, t: t["k"].mT)
        products: list[Compute] = [lambda m, t: t["q"] @ t["kt"]]
        if layout == "3-D":
            empty = torch.zeros(())
            products.append(lambda m, t: torch.baddbmm(empty, t["q"], t["kt"], beta=0, alpha=0.7))
            products.append(lambda m, t: torch.bmm(t["q"], t["kt"]))
        self.add("scores", *products)
        if layout != "4-D":
            self.add("scores", lambda m, t: t["scores"].view(B, H, S, S))

    def repeat(self, x: str) -> None:
        """Take half of the heads of keys or values, and repeat them."""
        half, shape = H // 2, (B, H, S, D)
        self.add(
            x,
            lambda m, t: t[x][:, ::2].repeat_interleave(2, dim=1),
            lambda m, t: t[x][:, :half, None].expand(B, half, 2, S, D).reshape(shape),
            lambda m, t: t[x][:, None, :half].expand(B, 2, half, S, D).reshape(shape),
            lambda m, t: t[x][:, ::2].repeat(1, 2, 1, 1),
            lambda m, t: t[x][:, :1].expand(shape),
        )

    def term(self) -> None:
        """Add a bias or an additive mask to the scores."""

        def made_in_place(m: Steps, t: Live) -> Tensor:
            term = torch.zeros(B, 1, S, S)
            term.masked_fill_(~t["keep"], -1e9)
            return term

        def onto_the_term(m: Steps, t: Live) -> Tensor:
            t["term"] = self.fit(t["term"]).expand_as(t["scores"]).contiguous() * 1.0
            return t["term"].add_(t["scores"])

        made = self.rng.random() < 0.5
        if made:
            self.add(
                "term",
                lambda m, t: torch.zeros(B, 1, S, S).masked_fill(~t["keep"], -1e9),
                lambda m, t: (1.0 - t["keep"].float()) * LEAST,
                made_in_place,
                lambda m, t: (torch.arange(S) - torch.arange(S)[:, None])[None, None].abs() * -0.5,
            )
        else:
            self.add("term", lambda m, t: m.table * 1.0, lambda m, t: m.table + t["keep"].float())
        chosen = self.add(
            "scores",
            lambda m, t: t["scores"] + self.fit(t["term"]),
            lambda m, t: self.fit(t["term"]) + t["scores"],
            lambda m, t: torch.add(t["scores"], self.fit(t["term"]), alpha=0.5),
            lambda m, t: t["scores"].add_(self.fit(t["term"])),
            onto_the_term,
        )
        if chosen is onto_the_term and "attention" in self.m.kinds:  # it may stay
            self.m.kinds.remove("attention")

    def fill(self, fill: float, mask: str) -> None:
        """Fill the scores where a mask is False."""
        if mask == "causal":
            self.add(
                mask,
                lambda m, t: torch.ones(S, S, dtype=torch.bool).tril()[None, None],
                lambda m, t: (torch.arange(S) <= torch.arange(S)[:, None]).expand(B, 1, S, S),
                lambda m, t: torch.tril(torch.ones(1, 1, S, S)) > 0,
                lambda m, t: t["keep"] & torch.ones(S, S, dtype=torch.bool).tril(),
            )

        def assign(m: Steps, t: Live) -> Tensor:
            t["scores"][~self.fit(t[mask].expand(B, H, S, S))] = fill
            return t["scores"]

        self.add(
            "scores",
            lambda m, t: t["scores"].masked_fill(~self.fit(t[mask]), fill),
            lambda m, t: t["scores"].masked_fill(self.fit(t[mask]) == 0, fill),
            lambda m, t: t["scores"].masked_fill_(self.fit(t[mask].logical_not()), fill),
            lambda m, t: torch.where(self.fit(t[mask]), t["scores"], fill),
            lambda m, t: torch.where(~self.fit(t[mask]), torch.tensor(fill), t["scores"]),
            assign,
        )

    def softmax(self) -> None:
        """Add softmax over the keys, or an exponential and its sum."""
        dim = self.order.index("k")
        if self.order.endswith("k") and self.rng.random() < 0.2:
            column: Compute = lambda m, t: self.fit(m.temperature.expand(B, H, S, 1))  # noqa: E731
            self.add("column", column)
            self.add(
                "w",
                lambda m, t: torch.cat([t["scores"], t["column"]], -1).softmax(-1)[..., :-1],
                lambda m, t: torch.cat((t["column"], t["scores"]), dim=3).softmax(3)[..., 1:],
            )
            return
        if self.rng.random() < 0.3:
            self.add("powers", lambda m, t: (t["scores"] - t["scores"].amax(dim, True)).exp())
            self.add("total", lambda m, t: t["powers"].sum(dim, keepdim=True))
            self.add("w", lambda m, t: t["powers"] / t["total"])
            return
        self.add(
            "w",
            lambda m, t: t["scores"].softmax(dim),
            lambda m, t: F.softmax(t["scores"], dim=dim - 4, dtype=torch.float32),
            lambda m, t: torch.softmax(t["scores"], dim),
        )

    def after_softmax(self) -> None:
        if self.rng.random() < 0.5:
            self.add(
                "w",
                lambda m, t: F.dropout(t["w"], 0.1, m.training),
                lambda m, t: t["w"].to(t["v"].dtype),
                lambda m, t: torch.nan_to_num(t["w"], nan=0.0),
                lambda m, t: t["w"] * 0.5,
            )

    def values(self, layout: str) -> None:
        if layout == "einsum":
            equation = f"{self.order},bkhd->bqhd"
            self.add("o", lambda m, t: torch.einsum(equation, t["w"], t["v"]))
        else:
            shape = {"3-D": (B * H, S, S), "5-D": (B, 1, H, S, S)}.get(layout, (B, H, S, S))
            self.add("o", lambda m, t: t["w"].reshape(shape) @ t["v"])
            self.add("o", lambda m, t: t["o"].view(B, H, S, D).transpose(1, 2))
        self.add(
            "joined",
            lambda m, t: m.out(t["o"].reshape(B, S, -1)),
            lambda m, t: m.out(t["o"].flatten(2)),
        )

    def norm(self, name: str, given: str) -> None:
        """Add a norm of torch, or LayerNorm or RMSNorm by hand."""
        self.m.kinds.append("norm")
        kind = self.rng.choice(("torch", "layer", "rms"))
        if kind == "torch":
            self.add(
                name,
                lambda m, t: F.layer_norm(t[given], (WIDTH,), m.weight, m.bias),
                lambda m, t: F.rms_norm(t[given], (WIDTH,), m.weight, 1e-6),
            )
            return
        centred = given
        if kind == "layer":
            centred = "centred"
            self.add("mean", lambda m, t: t[given].mean(-1, keepdim=True))
            self.add(centred, lambda m, t: t[given] - t["mean"])
        self.add(
            "square",
            lambda m, t: t[centred].pow(2).mean(-1, keepdim=True),
            lambda m, t: (t[centred] * t[centred]).mean(dim=-1, keepdim=True),
        )
        self.add(
            "normed",
            lambda m, t: t[centred] * torch.rsqrt(t["square"] + 1e-6),
            lambda m, t: t[centred] / (t["square"] + 1e-6).sqrt(),
        )
        self.add(name, lambda m, t: t["normed"] * m.weight, lambda m, t: m.weight * t["normed"])
        if kind == "layer":
            self.add(name, lambda m, t: t[name] + m.bias)

    def feed_forward(self) -> None:
        """Add a feed-forward layer, perhaps gated, and perhaps a residual sum."""
        self.m.kinds.append("feed_forward")
        self.add("up", lambda m, t: m.up(t["y"]))
        if self.rng.random() < 0.5:
            self.add("gate", lambda m, t: m.gate(t["y"]))
            in_place: Compute = lambda m, t: F.silu(t["gate"], inplace=True)  # noqa: E731
            if self.add("gated", lambda m, t: F.silu(t["gate"]), in_place) is in_place:
                self.m.kinds.remove("feed_forward")  # it may stay
            self.add("hidden", lambda m, t: t["gated"] * t["up"])
        else:
            self.add(
                "hidden",
                lambda m, t: F.relu(t["up"], inplace=True),
                lambda m, t: F.gelu(t["up"]),
                lambda m, t: t["up"] * torch.sigmoid(t["up"]),
            )
        self.add("y", lambda m, t: m.down(t["hidden"]), lambda m, t: m.down(t["hidden"]) + t["y"])

    def trap(self) -> None:
        """Change a tensor, or read it once more, at a random place."""
        place = self.rng.randrange(1, len(self.m.steps) + 1)
        name = self.rng.choice(["x", "keep", *{x: 0 for x, _ in self.m.steps[:place]}])
        write = self.rng.choice(WRITES)
        kind = self.rng.choice(("write", "write", "write", "read", "return", "replace"))
        if kind == "return":
            self.m.returned.append(name)
        elif kind == "read":
            self.m.steps.insert(place, ("copy", lambda m, t: t[name] * 2))
            self.m.returned.append("copy")
        elif kind == "write":
            self.m.steps.insert(place, (name, changed(write, name)))
        else:
            replacements: list[Callable[[Tensor], Tensor]] = [
                lambda x: x.detach(),
                lambda x: torch.div(x, 0.5, rounding_mode="floor").to(x.dtype),
                lambda x: x.masked_fill(x > 0.5, -5.0).to(x.dtype),
                lambda x: x.roll(1, -1),
                lambda x: x.clamp(max=0.5) if x.is_floating_point() else ~x,
            ]
            replace = self.rng.choice(replacements)
            self.m.steps.insert(place, (name, lambda m, t: replace(t[name])))


def rewriting(gm: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
    """A backend of torch.compile that rewrites the graph and runs it."""
    rewrite(gm.graph)
    gm.recompile()
    return gm.forward


def results(
    module: Steps, forward: Callable[..., Any], seed: int
) -> tuple[list[Tensor], list[Any]]:
    """Return outputs and inputs after a call, and the gradients of inputs and parameters."""
    x, keep = inputs(seed)
    x.requires_grad_(seed % 4 < 3)
    out = forward(x, keep)
    scales = [torch.linspace(-1.0, 1.3, y.numel()).view(y.shape) for y in out]
    losses = [(y * z).sum() for y, z in zip(out, scales) if y.requires_grad]
    leaves = [y for y in (x, *module.parameters()) if y.requires_grad]
    grads = torch.autograd.grad(sum(losses), leaves, allow_unused=True) if losses else ()
    return [y.detach() for y in (*out, x, keep)], [*grads]


def check(have: Tensor | None, want: Tensor | None, scale: float = 0.0) -> None:
    """Require nearly equal numbers, and finite ones where a query without keys is NaN."""
    if have is None or want is None:  # a gradient of 0 may be missing
        given = want if have is None else have
        assert given is None or given.abs().max() <= 1e-5 * max(scale, 1e-2)
        return
    assert (have.shape, have.dtype) == (want.shape, want.dtype)
    have, want = have.double(), want.double()
    valid = ~want.isnan()
    have, want = have[valid], want[valid]
    if want.numel():
        same = have == want  # infinite ones
        error = (have - want)[~same].abs()
        largest = max(
            want[want.isfinite()].abs().max().item() if want.isfinite().any() else 0, scale
        )
        assert not error.numel() or error.max() <= 1e-5 * max(largest, 1e-2)


def compare(seed: int, trapped: bool) -> tuple[list[str], list[str]]:
    """Compare a module with its rewritten form; return what has to be fused, and what was."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    module = Steps(seed, trapped).eval()
    with use_backend("reference"):
        try:
            want, want_grads = results(module, module, seed)
        except (RuntimeError, IndexError):  # a trap does not fit, or autograd refuses it
            return [], []
        with recording() as record:
            have, have_grads = results(module, torch.compile(module, backend=rewriting), seed)
    for a, b in zip(have, want, strict=True):
        check(a, b)
    if not any(x.isnan().any() for x in want if x.is_floating_point()):
        sizes = [float(g.abs().max()) for g in want_grads if g is not None]
        for a, b in zip(have_grads, want_grads, strict=True):
            check(a, b, 0.1 * max(sizes, default=0.0))
    return module.kinds, [place.kind for place in record.places if place.op]


MORE = [pytest.param(seed, marks=pytest.mark.with_all) for seed in range(4, 48)]
MOST = [pytest.param(seed, marks=pytest.mark.with_slow) for seed in range(48, 400)]


@pytest.mark.all_cases
@pytest.mark.parametrize("seed", [*range(4), *MORE, *MOST])
def test_rewriting_changes_no_result(seed: int) -> None:
    compare(seed, trapped=seed % 2 == 1)


@pytest.mark.with_all
def test_most_modules_without_a_trap_are_fused() -> None:
    wanted = fused = 0
    for seed in range(1000, 1024):
        kinds, found = compare(seed, trapped=False)
        wanted += len(kinds)
        fused += (Counter(kinds) & Counter(found)).total()
    assert fused >= 0.9 * wanted
