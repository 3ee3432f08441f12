"""Rotary positions of queries and keys, each head after an RMSNorm of its own or without a norm.

Forward, per head x of D features, of a token whose position has cos and sin of R <= D columns:
    z = w x r, r = 1 / sqrt(mean(x^2) + eps)        without a norm: z = x
    y_a = z_a cos_a - z_b sin_a,  y_b = z_b cos_b + z_a sin_b      for each pair (a, b), and
    y_j = z_j for j >= R
The pairs are (i, i + R / 2), or (2 i, 2 i + 1) if interleaved, for i < R / 2.
Backward:
    dz_a = dy_a cos_a + dy_b sin_b,  dz_b = dy_b cos_b - dy_a sin_a,  dz_j = dy_j
    dx = r (g - xhat mean(g xhat)), g = w dz, xhat = x r           without a norm: dx = dz
    dw = sum over heads and tokens of dz xhat

Shapes: x and y [B, H, S, D] or [T, H, D], cos and sin [S, R], [B, S, R] or [T, R], w [D]. Any dtype
in and out, arithmetic in float32 (float64 for float64). Saved: cos, sin, and with a norm x and w.
Recomputed: r. Least bytes: x and y once forward; dy, dx, and with a norm x, once backward; cos and
sin once for each program's heads. Deterministic: each program adds up its own part of dw, and these
partial sums are added without atomics.
Source: Su et al. 2021, section 3.2.2; Zhang and Sennrich 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import INTERPRETED as INTERPRETED
from .launch import (
    Launch,
    accumulator,
    architecture,
    constants,
    next_power_of_2,
    on_device,
    processors,
    triton_dtype,
    unit_stride,
    unsupported_dtype,
)
from .partial_sums import sums_launch
from .registration import register
from .tuned import TuningKey, choose, flags, named

MAX_HEAD_DIM = 4096
PROGRAMS = 4  # for each multiprocessor, before a program takes a second head


class RotaryTiles(NamedTuple):
    """The rows of a program, which are tokens, the columns that hold the first and the second
    elements of pairs, those of the features that are not rotated (0: there are none), warps, and
    stages of the loop over heads.
    """

    rows: int
    half: int
    rest: int
    warps: int = 4
    stages: int = 1


def configuration(dim: int, rotary: int, arch: str) -> RotaryTiles:
    """Choose the tiles for D features, R of which are rotated."""
    half, rest = next_power_of_2(rotary // 2), next_power_of_2(dim - rotary) if dim > rotary else 0
    width = 2 * half + rest
    if arch == "interpreter":  # few programs: each interpreted operation has a fixed cost
        return RotaryTiles(64, half, rest)
    # Two copies run ahead of the head that is computed: on sm_90, a multiprocessor then has 41 KB
    # of loads or more under way, and with one stage 16 to 37.
    rows = max(1, 2048 // next_power_of_2(width))
    return RotaryTiles(rows, half, rest, stages=3 if arch.startswith("sm_") else 1)


def others(tiles: RotaryTiles) -> list[RotaryTiles]:
    """Return the tiles that a measurement may choose: 1024 to 8192 elements each."""
    width = 2 * tiles.half + tiles.rest
    tokens = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if 1024 <= n * width <= 8192]
    return [
        tiles._replace(rows=n, warps=warps, stages=stages)
        for n in tokens or [1]
        for warps in (2, 4, 8)
        for stages in (1, 3)
    ]


# ----------------------------------------------------------------- groups of the kernels' arguments


class Rotated(NamedTuple):
    """The query or the key, what it becomes, and the weight [D] of its norm."""

    x: Any
    y: Any
    weight: Any


class Gradients(NamedTuple):
    """The gradient of the rotated query or key, the query or key, its gradient, the weight [D], and
    partial sums of the weight's gradient, [programs, D].
    """

    dy: Any
    x: Any
    dx: Any
    weight: Any
    partial: Any


class Steps(NamedTuple):
    """The strides of [B, H, S, D]; the last one is 1."""

    batch: Any
    head: Any
    token: Any


class RotaryStrides(NamedTuple):
    """Of the query or the key: `Steps` of each tensor [B, H, S, D] of its group, in order."""

    first: Any
    second: Any
    third: Any


class Table(NamedTuple):
    """The strides of cos and of sin, [B, S, R]; the last one is 1."""

    cos_batch: Any
    cos_token: Any
    sin_batch: Any
    sin_token: Any


class Size(NamedTuple):
    """All tokens, those of a sequence, the heads of query and key, and the heads of a program."""

    tokens: Any
    length: Any
    query_heads: Any
    key_heads: Any
    heads: Any


class RotaryCase(NamedTuple):
    """What a kernel is compiled for. A norm is 0 if there is none, 1, or 2 if its weight gets a
    gradient.
    """

    dim: Any
    rotary: Any
    interleaved: Any
    query_norm: Any
    key_norm: Any
    acc: Any


class Place(NamedTuple):
    """The tokens of a program: batch and token [BT], and which of them exist, [BT, 1]; and their
    cos and sin for both elements of each pair, [BT, HALF].
    """

    batch: Any
    token: Any
    ok: Any
    cos_a: Any
    cos_b: Any
    sin_a: Any
    sin_b: Any


class HeadSpan(NamedTuple):
    """The heads `first` to `end - 1` of a program, and its number among those of the tensor."""

    first: Any
    end: Any
    program: Any


# ----------------------------------------------------------------------------------------- kernels


@triton.jit
def _load_pairs(base, ok, tile: tl.constexpr, case: tl.constexpr):
    """Load the rotated features at the pointers base [BT, 1]: both elements of each pair, [BT,
    HALF].
    """
    if case.interleaved:
        c = tl.arange(0, 2 * tile.half)[None, :]
        x = tl.load(base + c, mask=ok & (c < case.rotary), other=0.0).to(case.acc)
        return tl.split(x.reshape(x.shape[0], tile.half, 2))
    else:
        c = tl.arange(0, tile.half)[None, :]
        inside = ok & (c < case.rotary // 2)
        a = tl.load(base + c, mask=inside, other=0.0)
        b = tl.load(base + case.rotary // 2 + c, mask=inside, other=0.0)
        return a.to(case.acc), b.to(case.acc)


@triton.jit
def _store_pairs(base, ok, a, b, tile: tl.constexpr, case: tl.constexpr):
    """Store both elements of each pair at the pointers base [BT, 1]."""
    if case.interleaved:
        c = tl.arange(0, 2 * tile.half)[None, :]
        x = tl.join(a, b).reshape(a.shape[0], 2 * tile.half)
        tl.store(base + c, x.to(base.dtype.element_ty), mask=ok & (c < case.rotary))
    else:
        c = tl.arange(0, tile.half)[None, :]
        inside = ok & (c < case.rotary // 2)
        tl.store(base + c, a.to(base.dtype.element_ty), mask=inside)
        tl.store(base + case.rotary // 2 + c, b.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _load_rest(base, ok, tile: tl.constexpr, case: tl.constexpr):
    """Load the features that are not rotated, [BT, REST]; 0 if there are none."""
    if tile.rest:
        c = case.rotary + tl.arange(0, tile.rest)[None, :]
        return tl.load(base + c, mask=ok & (c < case.dim), other=0.0).to(case.acc)
    else:
        return 0.0


@triton.jit
def _store_rest(base, ok, x, tile: tl.constexpr, case: tl.constexpr):
    """Store the features that are not rotated, if there are any."""
    if tile.rest:
        c = case.rotary + tl.arange(0, tile.rest)[None, :]
        tl.store(base + c, x.to(base.dtype.element_ty), mask=ok & (c < case.dim))


@triton.jit
def _sum_over_features(a, b, rest, tile: tl.constexpr):
    """Return the sums of a head's features, [BT, 1]."""
    total = tl.sum(a + b, 1)
    if tile.rest:
        total += tl.sum(rest, 1)
    return total[:, None]


@triton.jit
def _place(COS, SIN, strides, size, tile: tl.constexpr, case: tl.constexpr):
    """Return the tokens of this program, with their cos and sin."""
    i = tl.program_id(0) * tile.rows + tl.arange(0, tile.rows)
    batch, token = (i // size.length).to(tl.int64), (i % size.length).to(tl.int64)
    ok = (i < size.tokens)[:, None]
    cos = COS + (batch * strides.cos_batch + token * strides.cos_token)[:, None]
    sin = SIN + (batch * strides.sin_batch + token * strides.sin_token)[:, None]
    cos_a, cos_b = _load_pairs(cos, ok, tile, case)
    sin_a, sin_b = _load_pairs(sin, ok, tile, case)
    return Place(batch, token, ok, cos_a, cos_b, sin_a, sin_b)


@triton.jit
def _span(chunk, heads, per_program):
    """Return the heads of chunk number `chunk` of the query's or the key's."""
    first = chunk * per_program
    chunks = tl.cdiv(heads, per_program)
    end = tl.minimum(heads, first + per_program)
    return HeadSpan(first, end, tl.program_id(0).to(tl.int64) * chunks + chunk)


@triton.jit
def _rows(base, strides, place, h):
    """Return pointers [BT, 1] to head h of the tokens."""
    tokens = place.batch * strides.batch + place.token * strides.token
    return base + (tokens + tl.full([1], h, tl.int64) * strides.head)[:, None]


@triton.jit
def _forward_heads(
    tensors,
    strides,
    span,
    place,
    eps,
    tile: tl.constexpr,
    case: tl.constexpr,
    NORM: tl.constexpr,
):
    """Rotate the heads of a span."""
    weight = tensors.weight + tl.zeros([1, 1], tl.int32)
    if NORM:
        w_a, w_b = _load_pairs(weight, True, tile, case)
        w_rest = _load_rest(weight, True, tile, case)
    for h in tl.range(span.first, span.end, num_stages=tile.stages):
        x = _rows(tensors.x, strides.first, place, h)
        a, b = _load_pairs(x, place.ok, tile, case)
        rest = _load_rest(x, place.ok, tile, case)
        if NORM:
            squares = _sum_over_features(a * a, b * b, rest * rest, tile)
            r = 1.0 / tl.sqrt(squares / case.dim + eps)
            a, b, rest = a * r * w_a, b * r * w_b, rest * r * w_rest
        y = _rows(tensors.y, strides.second, place, h)
        y_a = a * place.cos_a - b * place.sin_a
        y_b = b * place.cos_b + a * place.sin_b
        _store_pairs(y, place.ok, y_a, y_b, tile, case)
        _store_rest(y, place.ok, rest, tile, case)


@triton.jit
def forward_kernel(
    query,  # Rotated
    key,  # Rotated
    COS,  # [B, S, R]
    SIN,  # [B, S, R]
    query_strides,
    key_strides,
    table,
    size,
    eps,
    tile: tl.constexpr,
    case: tl.constexpr,
):
    """One program owns BT tokens and some heads, of the query or of the key. It reads the angles of
    its tokens once.
    """
    place = _place(COS, SIN, table, size, tile, case)
    chunk = tl.program_id(1)
    chunks = tl.cdiv(size.query_heads, size.heads)
    if chunk < chunks:
        span = _span(chunk, size.query_heads, size.heads)
        _forward_heads(query, query_strides, span, place, eps, tile, case, case.query_norm)
    else:
        span = _span(chunk - chunks, size.key_heads, size.heads)
        _forward_heads(key, key_strides, span, place, eps, tile, case, case.key_norm)


@triton.jit
def _backward_heads(
    tensors,
    strides,
    span,
    place,
    eps,
    tile: tl.constexpr,
    case: tl.constexpr,
    NORM: tl.constexpr,
):
    """Compute dx of the heads of a span, and their part of dw."""
    weight = tensors.weight + tl.zeros([1, 1], tl.int32)
    if NORM:
        w_a, w_b = _load_pairs(weight, True, tile, case)
        w_rest = _load_rest(weight, True, tile, case)
    dw_a = tl.zeros([tile.rows, tile.half], case.acc)
    dw_b = tl.zeros([tile.rows, tile.half], case.acc)
    if tile.rest:
        dw_rest = tl.zeros([tile.rows, tile.rest], case.acc)
    for h in tl.range(span.first, span.end, num_stages=tile.stages):
        dy = _rows(tensors.dy, strides.first, place, h)
        dy_a, dy_b = _load_pairs(dy, place.ok, tile, case)
        rest = _load_rest(dy, place.ok, tile, case)
        a = dy_a * place.cos_a + dy_b * place.sin_b
        b = dy_b * place.cos_b - dy_a * place.sin_a
        if NORM:
            x = _rows(tensors.x, strides.second, place, h)
            x_a, x_b = _load_pairs(x, place.ok, tile, case)
            x_rest = _load_rest(x, place.ok, tile, case)
            squares = _sum_over_features(x_a * x_a, x_b * x_b, x_rest * x_rest, tile)
            # Past the last token squares is 0: with eps = 0, r would be inf and dw NaN.
            r = tl.where(place.ok, 1.0 / tl.sqrt(squares / case.dim + eps), 0.0)
            x_a, x_b, x_rest = x_a * r, x_b * r, x_rest * r
            if NORM == 2:  # dw = sum dz xhat
                dw_a += a * x_a
                dw_b += b * x_b
                if tile.rest:
                    dw_rest += rest * x_rest
            a, b, rest = a * w_a, b * w_b, rest * w_rest
            mean = _sum_over_features(a * x_a, b * x_b, rest * x_rest, tile) / case.dim
            # dx = r (g - xhat mean(g xhat))
            a, b, rest = (a - x_a * mean) * r, (b - x_b * mean) * r, (rest - x_rest * mean) * r
        dx = _rows(tensors.dx, strides.third, place, h)
        _store_pairs(dx, place.ok, a, b, tile, case)
        _store_rest(dx, place.ok, rest, tile, case)
    if NORM == 2:
        partial = tensors.partial + span.program * case.dim + tl.zeros([1, 1], tl.int32)
        dw_a, dw_b = tl.sum(dw_a, 0)[None, :], tl.sum(dw_b, 0)[None, :]
        _store_pairs(partial, True, dw_a, dw_b, tile, case)
        if tile.rest:
            _store_rest(partial, True, tl.sum(dw_rest, 0)[None, :], tile, case)


@triton.jit
def backward_kernel(
    query,  # Gradients
    key,  # Gradients
    COS,  # [B, S, R]
    SIN,  # [B, S, R]
    query_strides,
    key_strides,
    table,
    size,
    eps,
    tile: tl.constexpr,
    case: tl.constexpr,
):
    """One program owns BT tokens and some heads, as in the forward."""
    place = _place(COS, SIN, table, size, tile, case)
    chunk = tl.program_id(1)
    chunks = tl.cdiv(size.query_heads, size.heads)
    if chunk < chunks:
        span = _span(chunk, size.query_heads, size.heads)
        _backward_heads(query, query_strides, span, place, eps, tile, case, case.query_norm)
    else:
        span = _span(chunk - chunks, size.key_heads, size.heads)
        _backward_heads(key, key_strides, span, place, eps, tile, case, case.key_norm)


# --------------------------------------------------------------------------------------- launchers


def _steps(x: Tensor) -> Steps:
    """Return the strides of [B, H, S, D], or of [T, H, D] as a batch of one sequence."""
    if x.dim() == 4:
        return Steps(*x.stride()[:3])
    return Steps(0, x.stride(1), x.stride(0))


def heads_of_a_program(blocks: int, heads: int, device: torch.device) -> int:
    """Return how many heads a program takes, given the blocks of tokens and all heads: as many as
    leave `PROGRAMS` programs to each multiprocessor, since each of them reads the place.
    """
    return max(1, blocks * heads // (PROGRAMS * processors(device)))


def _launch(
    kernel: Any,
    group: Any,
    query: tuple[Tensor, ...],
    key: tuple[Tensor, ...],
    options: tuple[Tensor, Tensor, bool, float],
    norms: Sequence[int],
    needs: Sequence[bool] = (True, True),
) -> tuple[Launch, list[int]]:
    """Make the launch of the forward or of the backward, and return how many programs it has for
    the query and for the key. options: cos, sin, interleaved and eps.
    """
    (x, *_), (cos, sin, interleaved, eps) = query, options
    length = x.shape[2] if x.dim() == 4 else x.shape[0]
    tokens = x.shape[0] * length if x.dim() == 4 else length
    heads, groups = (z[0].shape[1] if need else 0 for z, need in zip((query, key), needs))
    case = RotaryCase(
        x.shape[-1], cos.shape[-1], interleaved, norms[0], norms[1], triton_dtype(accumulator(x))
    )
    shipped = configuration(case.dim, case.rotary, architecture(x.device))
    name = named(x.dtype, tokens=tokens, heads=heads, groups=groups)
    name = f"{name} {flags(case, 'acc')}"
    tuned = f"rotary {kernel.fn.__name__.removesuffix('_kernel')}"
    tiles = choose(x.device, TuningKey(tuned, name, shipped, lambda: others(shipped)))
    blocks = triton.cdiv(tokens, tiles.rows)
    each = heads_of_a_program(blocks, heads + groups, x.device)
    chunks = [triton.cdiv(n, each) for n in (heads, groups)]
    table = [n for t in (cos, sin) for n in (t.stride(0) if t.dim() == 3 else 0, t.stride(-2))]
    arguments = dict(
        query_strides=RotaryStrides(*map(_steps, query)),
        key_strides=RotaryStrides(*map(_steps, key)),
        table=Table(*table),
        size=Size(tokens, length, heads, groups, each),
        eps=eps,
        tile=constants(tiles),
        case=constants(case),
    )
    grid, own = (blocks, sum(chunks)), dict(query=group, key=group)
    launch = Launch(kernel, grid, arguments, tiles.warps, groups=own)
    return launch, [blocks * n for n in chunks]


def _empty(x: Tensor) -> Tensor:
    """Return an uninitialised tensor like x, in its order of heads and tokens, without gaps."""
    if x.dim() == 4 and x.shape[1] > 1 and x.stride(1) < x.stride(2):
        batch, heads, length, dim = x.shape
        return x.new_empty(batch, length, heads, dim).transpose(1, 2)
    return x.new_empty(x.shape)


def fake(query, key, *_):
    return _empty(query), _empty(key)


_ARGUMENTS = "bool interleaved, Tensor? query_norm, Tensor? key_norm, float eps"


def _prepare(*arguments):
    """Return the arguments with tensors whose features lie side by side, in the same order of heads
    and tokens.
    """
    return [
        _empty(x).copy_(x) if isinstance(x, Tensor) and unit_stride(x) is not x else x
        for x in arguments
    ]


@register(
    f"rotary_embedding(Tensor query, Tensor key, Tensor cos, Tensor sin, {_ARGUMENTS}) "
    "-> (Tensor rotated_query, Tensor rotated_key)",
    fake,
    _prepare,
)
def forward(query, key, cos, sin, interleaved, query_norm, key_norm, eps):
    """Launch the forward: the rotated query and key, in the memory order of the given ones."""
    if query.numel() == 0 and key.numel() == 0:
        return lambda query, key, *_: fake(query, key)
    pairs = [(x, out, x) for x, out in zip((query, key), fake(query, key))]
    norms = [int(x is not None) for x in (query_norm, key_norm)]
    launch, _ = _launch(forward_kernel, Rotated, *pairs, (cos, sin, interleaved, eps), norms)

    def run(query, key, cos, sin, query_norm, key_norm):
        y = fake(query, key)
        # A tensor stands in for each absent weight: a kernel compiled without it never reads it.
        query_norm, key_norm = (query if x is None else x for x in (query_norm, key_norm))
        with on_device(query):
            launch((query, y[0], query_norm), (key, y[1], key_norm), cos, sin)
        return y

    return run


def _results(needs, *like):
    """Make uninitialised gradients as `_empty` does, without elements where they are not needed."""
    return tuple(
        _empty(x) if need and x is not None else like[0].new_empty(0)
        for x, need in zip(like, needs)
    )


@register(
    "rotary_embedding_backward(Tensor grad_rotated_query, Tensor grad_rotated_key, Tensor? query, "
    f"Tensor? key, Tensor cos, Tensor sin, {_ARGUMENTS}, bool[] needs) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_query_norm, Tensor grad_key_norm)",
    lambda *given: _results(given[-1], *given[:2], *given[7:9]),
    _prepare,
)
def backward(*arguments):
    """Launch the kernel of all gradients, and add up the partial sums of those of the weights."""
    return gradients(None, *arguments)


def gradients(
    own, grad_query, grad_key, query, key, cos, sin, interleaved, query_norm, key_norm, eps, needs
):
    """Return the plan of a backward, which returns the gradients; those that are not needed are
    empty. If `own` is not None, they are written into tensors like these, which the plan takes as
    `own`.
    """
    grads, saved, weights = (grad_query, grad_key), (query, key), (query_norm, key_norm)
    sums = [need and w is not None for need, w in zip(needs[2:], weights)]

    def results_of(grads, weights, own):
        """Return the gradients and dx: the kernel computes that beside a weight's, wanted or not"""
        results = _results(needs, *grads, *weights) if own is None else own
        return results, [
            _empty(dy) if total and not need else out
            for dy, out, need, total in zip(grads, results, needs, sums)
        ]

    wide, dim, launch = accumulator(grad_query), grad_query.shape[-1], None
    if grad_query.numel() or grad_key.numel():
        norms = [(w is not None) + total for w, total in zip(weights, sums)]
        wanted = [need or total for need, total in zip(needs, sums)]
        pairs = [
            (dy, dy if x is None else x, out if want else dy)
            for dy, x, out, want in zip(grads, saved, results_of(grads, weights, own)[1], wanted)
        ]
        options = cos, sin, interleaved, eps
        launch, programs = _launch(backward_kernel, Gradients, *pairs, options, norms, wanted)
        add_up = [sums_launch(1, n, dim) for n in programs]

    def run(grad_query, grad_key, query, key, cos, sin, query_norm, key_norm, own=None):
        grads, saved, weights = (grad_query, grad_key), (query, key), (query_norm, key_norm)
        results, dx = results_of(grads, weights, own)
        if launch is None:
            return *results[:2], *(x.zero_() for x in results[2:])
        partial = [
            grad_query.new_empty((1, n if total else 0, dim), dtype=wide)
            for n, total in zip(programs, sums)
        ]
        groups = [
            (dy, dy if x is None else x, out, dy if w is None else w, parts)
            for dy, x, out, w, parts in zip(grads, saved, dx, weights, partial)
        ]
        with on_device(grad_query):
            launch(*groups, cos, sin)
            for i, (out, parts) in enumerate(zip(results[2:], partial)):
                if sums[i]:
                    add_up[i](parts, (out, out, out))
        return results

    return run


def supports(query, *_, **__) -> str | None:
    """Return why the kernels cannot run this call, or None."""
    if query.shape[-1] > MAX_HEAD_DIM:
        return f"the kernels take head dims up to {MAX_HEAD_DIM}; this one is {query.shape[-1]}"
    return unsupported_dtype(query)
