"""The classes of calls that a measurement serves, and a call to measure for each.

A `Case` says of a call its op, dtype, sizes and options. `of` makes it from the arguments of a call
and keeps no tensor; `arguments` makes random arguments for it again. Calls share a measurement
where their keys agree, in which each size is rounded up to a power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer.description import Attention, power_of_2, words

Sizes = dict[str, int]
Arguments = dict[str, Any]  # of an op, by name
Options = dict[str, Any]  # those that differ from the default: True, a word or a number


class Case(NamedTuple):
    """An op, and the dtype, sizes and options of its calls. `gradient`: with the backward."""

    op: str
    dtype: str
    sizes: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, Any], ...]
    gradient: bool = False

    @property
    def key(self) -> str:
        """Return the name of the class of calls that share a measurement."""
        words = [self.dtype, *(f"{name}{power_of_2(n)}" for name, n in self.sizes)]
        return " ".join([*words, *_words(self.options), *["backward"] * self.gradient])

    def __str__(self) -> str:
        sizes = (f"{name}={n}" for name, n in self.sizes)
        direction = "forward + backward" if self.gradient else "forward"
        return " ".join([self.op, self.dtype, *sizes, *_words(self.options)]) + f", {direction}"

    def small(self) -> Case:
        """Return the same with sizes that the reference in float64 has the memory for."""
        limits = _FAMILIES[self.op].limits
        sizes = ((name, min(n, limits.get(name, n))) for name, n in self.sizes)
        return self._replace(sizes=tuple(sizes))

    def arguments(self, device: torch.device, seed: int = 0) -> Arguments:
        """Return random arguments of the public function; with `gradient` the floating tensors, but
        those that have none, require gradients.
        """
        make = Maker(device, getattr(torch, self.dtype), seed, self.gradient)
        return _FAMILIES[self.op].build(make, dict(self.sizes), dict(self.options))


def _words(options: Iterable[tuple[str, Any]]) -> list[str]:
    return [name if value is True else f"{name}={value}" for name, value in options]


def of(op: str, arguments: Arguments) -> Case | None:
    """Return the case of a checked call, as `backends.run` has its arguments; None for a call that
    is not measured.
    """
    if op not in _FAMILIES:
        return None
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    floating = next(x for x in tensors if x.is_floating_point())
    if any(0 in x.shape for x in tensors) or floating.dtype == torch.float64:
        return None
    sizes, options = _FAMILIES[op].describe(**arguments)
    dtype = str(floating.dtype).removeprefix("torch.")
    return case(op, dtype, sizes, differentiated(arguments), **options)


def case(op: str, dtype: str, sizes: Sizes, gradient: bool = False, **options: Any) -> Case:
    """Make a case. An option that is False is left out."""
    given = tuple(sorted((name, value) for name, value in options.items() if value))
    return Case(op, dtype, tuple(sizes.items()), given, gradient)


def differentiated(arguments: Arguments) -> bool:
    """Say whether a call will have a backward."""
    tensors = (x for x in arguments.values() if isinstance(x, Tensor))
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


class Maker:
    """Makes random tensors on a device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int, gradient: bool) -> None:
        self.device, self.dtype, self.gradient = device, dtype, gradient
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, gradient: bool = True) -> Tensor:
        """Return normal numbers; with `gradient` they require gradients where the case has them."""
        x = torch.randn(*shape, device=self.device, generator=self.generator) * scale
        return x.to(self.dtype).requires_grad_(gradient and self.gradient)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Return integers from low to high - 1."""
        return torch.randint(low, high, shape, device=self.device, generator=self.generator)


class _Family(NamedTuple):
    describe: Callable[..., tuple[Sizes, Options]]
    build: Callable[[Maker, Sizes, Options], Arguments]
    limits: Sizes


# -------------------------------------------------------------------------------------- attention

DROPOUT, SEED = 0.1, 7


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attention: Attention, return_lse: bool
) -> tuple[Sizes, Options]:
    B, H, Sq, D = query.shape
    sizes = dict(B=B, H=H, G=key.shape[1], Sq=Sq, Sk=key.shape[2], D=D, Dv=value.shape[3])
    inside = H > 1 and Sq > 1 and query.stride(1) < query.stride(2)
    return sizes, dict(heads_inside=inside, **words(attention))


def _attention_arguments(make: Maker, sizes: Sizes, options: Options) -> Arguments:
    B, H, G, Sq, Sk, D, Dv = sizes.values()

    def heads(n: int, length: int, width: int, scale: float = 1.0) -> Tensor:
        if not options.get("heads_inside"):
            return make.normal(B, n, length, width, scale=scale)
        return make.normal(B, length, n, width, scale=scale).transpose(1, 2)

    given: Arguments = dict(query=heads(H, Sq, D, 1.5), enable_gqa=G != H)
    given |= dict(key=heads(G, Sk, D, 1.5), value=heads(G, Sk, Dv))
    return given | _band(options) | _scored(make, (B, H, Sq, Sk), options)


def _scored(make: Maker, scores: tuple[int, int, int, int], options: Options) -> Arguments:
    """Return what padded and paged attention do to the scores [B, H, Sq, Sk]."""
    B, H, Sq, Sk = scores
    shapes = {"keys": (1, Sk), "rows": (Sq, 1), "all": (Sq, Sk)}
    given: Arguments = {}
    if "mask" in options:
        mask = make.integers(0, 4, B, 1, *shapes[options["mask"]]) > 0
        mask[..., 0] = True
        given["attn_mask"] = mask
    if "bias" in options:
        wanted = "bias_gradient" in options
        given["bias"] = make.normal(1, H, *shapes[options["bias"]], gradient=wanted)
    if "lengths" in options:
        given["key_lengths"] = make.integers(-(-Sk // 2), Sk + 1, B)
    if "alibi" in options:
        given["alibi_slopes"] = 0.5 ** torch.arange(1.0, H + 1, device=make.device)
    if "softcap" in options:
        given["softcap"] = 30.0
    if "sinks" in options:
        given["sinks"] = make.normal(H)
    return given


def _band(options: Options) -> Arguments:
    """Return the arguments that all forms of attention share."""
    given: Arguments = dict(is_causal="causal" in options)
    if "bottom_right" in options:
        given["causal_alignment"] = "bottom_right"
    if "left" in options or "right" in options:
        given["window"] = options.get("left"), options.get("right")
    return given | _dropout(options)


def _dropout(options: Options) -> Arguments:
    return dict(dropout_p=DROPOUT, dropout_seed=SEED) if "dropout" in options else {}


def _packed(
    query: Tensor, key: Tensor, value: Tensor, attention: Attention
) -> tuple[Sizes, Options]:
    assert attention.cu_seqlens_q is not None
    sizes = dict(B=attention.cu_seqlens_q.shape[0] - 1, H=query.shape[1], G=key.shape[1])
    sizes |= dict(Sq=attention.max_q, Sk=attention.max_k, D=query.shape[2], Dv=value.shape[2])
    return sizes, words(attention)


def _packed_arguments(make: Maker, sizes: Sizes, options: Options) -> Arguments:
    B, H, G, Sq, Sk, D, Dv = sizes.values()
    given = dict(query=make.normal(B * Sq, H, D, scale=1.5), max_q=Sq, max_k=Sk)
    given |= dict(key=make.normal(B * Sk, G, D, scale=1.5), value=make.normal(B * Sk, G, Dv))
    for name, n in (("cu_seqlens_q", Sq), ("cu_seqlens_k", Sk)):
        given[name] = n * torch.arange(B + 1, dtype=torch.int32, device=make.device)
    if "sinks" in options:
        given["sinks"] = make.normal(H)
    return given | _band(options)


def _paged(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    attention: Attention,
    return_lse: bool,
) -> tuple[Sizes, Options]:
    B, H, Sq, D = query.shape
    _, page, G, Dv = value_pages.shape
    sizes = dict(B=B, H=H, G=G, Sq=Sq, Sk=block_table.shape[1] * page, D=D, Dv=Dv, page=page)
    return sizes, words(attention)


def _paged_arguments(make: Maker, sizes: Sizes, options: Options) -> Arguments:
    """Return arguments whose pages lie in any order. Sk is a multiple of the page."""
    B, H, G, Sq, Sk, D, Dv, page = sizes.values()
    blocks = Sk // page
    order = torch.randperm(B * blocks, generator=make.generator, device=make.device)
    given: Arguments = dict(query=make.normal(B, H, Sq, D, scale=1.5))
    given["key_pages"] = make.normal(B * blocks, page, G, D, scale=1.5)
    given["value_pages"] = make.normal(B * blocks, page, G, Dv)
    given["block_table"] = order.view(B, blocks).int()
    return given | _band(options) | _scored(make, (B, H, Sq, Sk), options)


# ------------------------------------------------------------------------------------------ norms


def _norm(
    input: Tensor,
    normalized_shape: Any = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    unbiased: bool = False,
    dropout_p: float = 0.0,
    residual: Tensor | None = None,
    **_: Any,
) -> tuple[Sizes, Options]:
    n = torch.Size(normalized_shape or weight.shape).numel()  # type: ignore[union-attr]
    options: Options = dict(weight=weight is not None, bias=bias is not None, unbiased=unbiased)
    if weight is not None and weight.dtype != input.dtype:
        options["weight_dtype"] = str(weight.dtype).removeprefix("torch.")
    return dict(M=input.numel() // n, N=n), dict(**options, dropout=dropout_p > 0)


def _norm_arguments(make: Maker, sizes: Sizes, options: Options) -> Arguments:
    n = sizes["N"]
    given: Arguments = dict(input=make.normal(sizes["M"], n), normalized_shape=n)
    for name in ("weight", "bias"):
        if name in options:
            x = make.normal(n)
            dtype = getattr(torch, options.get("weight_dtype", str(x.dtype).split(".")[1]))
            given[name] = x.detach().to(dtype).requires_grad_(x.requires_grad)
    return given | (dict(unbiased=True) if "unbiased" in options else {})


def _sum_arguments(make: Maker, sizes: Sizes, options: Options) -> Arguments:
    return dict(bias=None) | _rms_sum_arguments(make, sizes, options)


def _rms_sum_arguments(make: Maker, sizes: Sizes, options: Options) -> Arguments:
    given = _norm_arguments(make, sizes, options) | _dropout(options)
    del given["normalized_shape"]
    return given | dict(residual=make.normal(sizes["M"], sizes["N"]))


# ------------------------------------------------------------------------------------ feed-forward


def _layers(
    input: Tensor, w_2: Tensor, b_2: Tensor | None, dropout_p: float, **more: Any
) -> tuple[Sizes, Options]:
    rows, b = (more["w"], more["b"]) if "w" in more else (more["w_1"], more["b_1"])
    d, (out, width) = rows.shape[1], w_2.shape
    options = dict(b_1=b is not None, b_2=b_2 is not None, dropout=dropout_p > 0)
    sizes = dict(M=input.numel() // d, d=d, F=width, out=out)
    return sizes, dict(activation=more.get("activation", False), **options)


def _layers_arguments(make: Maker, sizes: Sizes, options: Options) -> Arguments:
    """Of feed_forward, which has an activation, or of a gated layer, which has two halves."""
    M, d, F, out = sizes.values()
    gated = "activation" not in options
    w, b, rows = ("w", "b", 2 * F) if gated else ("w_1", "b_1", F)
    given: Arguments = {"input": make.normal(M, d), b: None, "b_2": None}
    given |= {w: make.normal(rows, d, scale=d**-0.5), "w_2": make.normal(out, F, scale=F**-0.5)}
    given |= {b: make.normal(rows)} if "b_1" in options else {}
    given |= {"b_2": make.normal(out)} if "b_2" in options else {}
    activation = {} if gated else dict(activation=options["activation"])
    return given | activation | _dropout(options)


# -------------------------------------------------------------------------------------- embedding


def _embed(
    tokens: Tensor, weight: Tensor, positional: Tensor | None, dropout_p: float, **_: Any
) -> tuple[Sizes, Options]:
    V, N = weight.shape
    sizes = dict(M=tokens.numel(), S=tokens.shape[-1], N=N, V=V)
    return sizes, dict(positional=positional is not None, dropout=dropout_p > 0)


def _embed_arguments(make: Maker, sizes: Sizes, options: Options) -> Arguments:
    M, S, N, V = sizes.values()
    given: Arguments = dict(tokens=make.integers(0, V, M // S, S), weight=make.normal(V, N))
    positional = make.normal(S, N) if "positional" in options else None
    return given | dict(positional=positional) | _dropout(options)


# ------------------------------------------------------------------------------------------- losses


def _loss(
    target: Tensor, label_smoothing: float, smoothing: str, reduction: str, **more: Any
) -> tuple[Sizes, Options]:
    options: Options = dict(smoothing=label_smoothing > 0 and smoothing, reduction=reduction)
    if "logits" in more:
        return dict(M=target.numel(), V=more["logits"].shape[-1]), options
    classes, n = more["linear_weight"].shape
    options["bias"] = more["linear_bias"] is not None
    return dict(M=target.numel(), N=n, V=classes), options


def _loss_arguments(make: Maker, sizes: Sizes, options: Options) -> Arguments:
    M, V = sizes["M"], sizes["V"]
    given: Arguments = dict(target=make.integers(0, V, M), reduction=options["reduction"])
    if "smoothing" in options:
        given |= dict(label_smoothing=0.1, smoothing=options["smoothing"], ignore_index=0)
    if "N" not in sizes:
        return given | dict(logits=make.normal(M, V, scale=2.0))
    n = sizes["N"]
    given |= dict(input=make.normal(M, n), linear_weight=make.normal(V, n, scale=2 * n**-0.5))
    return given | (dict(linear_bias=make.normal(V)) if "bias" in options else {})


# No multiples of a tile, so that its edge is compared; and multiples of 16, for which Triton
# compiles the same kernel as for the full size.
_ATTENTION_LIMITS = dict(B=2, Sq=720, Sk=720)
_PAGED_LIMITS = dict(B=2, Sq=16, Sk=768)  # whole pages of any size
_FAMILIES = {
    "scaled_dot_product_attention": _Family(_attention, _attention_arguments, _ATTENTION_LIMITS),
    "packed_attention": _Family(_packed, _packed_arguments, _ATTENTION_LIMITS),
    "paged_attention": _Family(_paged, _paged_arguments, _PAGED_LIMITS),
    "layer_norm": _Family(_norm, _norm_arguments, dict(M=496)),
    "rms_norm": _Family(_norm, _norm_arguments, dict(M=496)),
    "dropout_add_layer_norm": _Family(_norm, _sum_arguments, dict(M=496)),
    "dropout_add_rms_norm": _Family(_norm, _rms_sum_arguments, dict(M=496)),
    **dict.fromkeys(
        ("feed_forward", "geglu", "swiglu"), _Family(_layers, _layers_arguments, dict(M=496))
    ),
    "embed": _Family(_embed, _embed_arguments, dict(M=720, S=240, V=1024)),
    "cross_entropy": _Family(_loss, _loss_arguments, dict(M=112)),
    "linear_cross_entropy": _Family(_loss, _loss_arguments, dict(M=112)),
}
OPS = tuple(_FAMILIES)
