"""What launches the attention kernels, and the ops that torch knows them by."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer.description import PACKED_SCHEMA, SCHEMA

from ..common import LOG2E, dropout_arguments
from ..launch import (
    Launch,
    allow_tf32,
    architecture,
    dot_precision,
    layout,
    next_power_of_2,
    on_device,
    plans,
    remembered,
    unit_stride,
    unsupported_dtype,
)
from ..registration import register
from .backward import (
    backward_dbias_kernel,
    backward_dkdv_kernel,
    backward_dq_kernel,
    delta_kernel,
)
from .configurations import Tiles, configuration
from .forward import forward_kernel

UNBOUNDED = 2**30  # a side of the band that has no bound, and more than any length


def _heads_like(x: Tensor, heads: int, width: int) -> Tensor:
    """An empty [B, heads, S, width] with the memory order of x, so that [B, S, H, D] behind a
    transpose stays one.
    """
    batch, _, length, _ = x.shape
    if x.shape[1] > 1 and x.stride(1) < x.stride(2):
        return x.new_empty(batch, length, heads, width).transpose(1, 2)
    return x.new_empty(batch, heads, length, width)


def _spans_int32(*tensors: Tensor) -> bool:
    """Whether an offset inside one (batch, head) can pass 2^31 elements."""
    return any(
        sum((n - 1) * abs(s) for n, s in zip(x.shape[-2:], x.stride()[-2:])) >= 2**31
        for x in tensors
    )


class _Plan:
    """What a call's shapes, strides, dtypes and options fix: everything but where its tensors lie.

    `tensors` are what else the kernels read, each or None: attn_mask, bias, alibi_slopes, lengths,
    starts, dropout_seed, sinks. `options`: dropout_p, is_causal, scale, window, causal_alignment,
    softcap, max_q, max_k. A packed batch comes as one batch of Tq queries and Tk keys, with the
    offsets of both, `starts` and `lengths`. `launch` holds the kernels of the call by name, each
    with all its arguments but the pointers. `apart`: the maximum and the log-sum of the scores are
    kept apart.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tensors: tuple[Tensor | None, ...],
        options: tuple[Any, ...],
    ) -> None:
        attn_mask, bias, alibi_slopes, lengths, starts, _, _ = tensors
        dropout_p, is_causal, scale, window, causal_alignment, softcap, max_q, max_k = options
        self.launch: dict[str, Launch] = {}
        batch, self.heads, q_rows, dim = query.shape
        self.groups, k_rows, width = key.shape[1], key.shape[2], value.shape[3]
        self.batch, self.q_length, self.k_length = batch, q_rows, k_rows
        if starts is not None:
            self.batch, self.q_length, self.k_length = starts.shape[0] - 1, max_q, max_k
        self.arch = architecture(query.device)
        self.dtype = query.dtype
        self.apart = bias is not None or alibi_slopes is not None
        self.head_block = max(16, next_power_of_2(max(dim, width)))
        full = (batch, self.heads, q_rows, k_rows)
        kinds, strides, wide = [], [], _spans_int32(query, key, value)
        for x in (attn_mask, bias):  # 0 none, 1 constant over the queries, 2 one of every pair
            x = None if x is None else x.expand(full)
            kinds.append(0 if x is None else 1 if x.stride(2) == 0 or q_rows == 1 else 2)
            strides.append((0, 0, 0, 0) if x is None else x.stride())
            wide = wide or (x is not None and _spans_int32(x))
        slopes: tuple[int, ...] = (0, 0)
        if alibi_slopes is not None:
            slopes = alibi_slopes.expand(batch, self.heads).stride()
        left, right = (UNBOUNDED if n < 0 else min(n, UNBOUNDED) for n in window or (-1, -1))
        if is_causal:
            right = 0
        threshold, inv_keep = dropout_arguments(dropout_p)
        self.constants = dict(
            D=dim,
            DV=width,
            BD=max(16, next_power_of_2(dim)),
            BDV=max(16, next_power_of_2(width)),
            MASK=kinds[0],
            BIAS=kinds[1],
            ALIBI=alibi_slopes is not None,
            SOFTCAP=softcap is not None,
            LEFT=left < UNBOUNDED,
            RIGHT=right < UNBOUNDED,
            BOTTOM=causal_alignment == "bottom_right",
            LENGTH=lengths is not None and starts is None,
            PACKED=starts is not None,
            DROPOUT=dropout_p > 0,
            WIDE=wide,
            PRECISION=dot_precision(self.arch),
            ACC=tl.float64 if query.dtype == torch.float64 else tl.float32,
        )
        self.scalars = (
            *self.strides(query), *self.strides(key), *self.strides(value), *strides[0],
            *strides[1], *slopes,
            self.heads, self.heads // max(1, self.groups), self.q_length, self.k_length,
            q_rows, k_rows, left, right, scale, 1.0 if softcap is None else softcap,
            threshold, inv_keep,
        )  # fmt: skip

    def add(
        self, name: str, kernel: Any, blocks: Any, strides: tuple[int, ...], **constants: Any
    ) -> None:
        """Adds a launch; `blocks` gives the number of programs for its tiles."""
        tiles = self.tiles(name)
        constants = self.constants | dict(BM=tiles.BM, BN=tiles.BN) | constants
        scalars = (*strides, *self.scalars)
        names = kernel.arg_names[-len(constants) - len(scalars) :]
        arguments = dict(zip(names, scalars)) | constants
        self.launch[name] = Launch(kernel, (blocks(tiles),), arguments, tiles.warps, tiles.stages)

    def strides(self, x: Tensor) -> tuple[int, int, int]:
        """Of batch, head and row; a packed tensor has rows only, for the kernels."""
        batch, head, row, _ = x.stride()
        return 0 if self.constants["PACKED"] else batch, head, row

    def tiles(self, kernel: str) -> Tiles:
        lengths = self.q_length, self.k_length
        full = 2 in (self.constants["MASK"], self.constants["BIAS"])
        return configuration(kernel, self.arch, self.dtype, self.head_block, *lengths, full)

    def rows(self, tiles: Tiles) -> int:
        """Programs that own the queries of a head."""
        return triton.cdiv(self.q_length, tiles.BM) * self.batch * self.heads

    def columns(self, tiles: Tiles) -> int:
        """Programs that own the keys of a key-value head."""
        return triton.cdiv(self.k_length, tiles.BN) * self.batch * self.groups


def _outputs(query: Tensor, value: Tensor, apart: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(output, lse, statistics), empty; the last without elements where lse is all that P needs."""
    output = _heads_like(query, query.shape[1], value.shape[3])
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = query.shape[:3]
    pairs = (*rows, 2) if apart else (0,)
    return output, query.new_empty(rows, dtype=dtype), query.new_empty(pairs, dtype=dtype)


class _Forward(_Plan):
    """The forward, and what its outputs look like."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tensors: tuple[Tensor | None, ...],
        options: tuple[Any, ...],
    ) -> None:
        super().__init__(query, key, value, tensors, options)
        outputs = _outputs(query, value, self.apart)
        self.outputs = [(x.shape, x.stride(), x.dtype) for x in outputs]
        sink = tensors[-1] is not None
        self.add("forward", forward_kernel, self.rows, self.strides(outputs[0]), SINK=sink)
        self.forward = self.launch["forward"]


class _Backward(_Plan):
    """The kernels of the backward that are needed.

    `bias_grad` is how the bias's gradient comes about: "tile" by a kernel of its own, "key", for a
    bias constant over the queries, beside dK and dV, "row", for one constant over the keys, from
    dlse and the weight of the sink; "" where it is not wanted. The sinks' gradient comes about
    likewise.
    """

    def __init__(
        self,
        grad_output: Tensor,
        grad_lse: Tensor | None,
        output: Tensor,
        needs: tuple[bool, ...],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tensors: tuple[Tensor | None, ...],
        options: tuple[Any, ...],
    ) -> None:
        super().__init__(query, key, value, tensors, options)
        bias = tensors[1]
        batch, heads, rows, _ = query.shape
        self.constants["WIDE"] = self.constants["WIDE"] or _spans_int32(grad_output, output)
        self.bias_grad = _bias_grad(needs[3], bias, self.k_length)
        like = [_heads_like(x, x.shape[1], x.shape[3]) for x in (query, key, value)]
        self.grads = [(x.shape, x.stride()) for x in like]
        dq, dk, dv = (self.strides(x) for x in like)
        do = self.strides(grad_output)
        tiles = self.tiles("delta")
        strides = *output.stride()[:3], *grad_output.stride()[:3]
        delta = {name: self.constants[name] for name in ("DV", "BDV", "WIDE", "ACC")}
        self.launch["delta"] = Launch(
            delta_kernel,
            (triton.cdiv(rows, tiles.BM) * batch * heads,),
            dict(zip(delta_kernel.arg_names[4:], (*strides, heads, rows)))
            | delta
            | dict(BM=tiles.BM, HAS_DLSE=grad_lse is not None),
            tiles.warps,
            tiles.stages,
        )
        key_grad = self.bias_grad == "key"
        sink = tensors[-1] is not None
        self.sink_grad, self.sink_weight = needs[4], sink and (needs[4] or self.bias_grad == "row")
        self.needs = (needs[0], *(needs[1] or needs[2] or key_grad,) * 2)
        if self.needs[1]:
            self.add("dkdv", backward_dkdv_kernel, self.columns, (*dk, *dv, *do), KEY_GRAD=key_grad)
        if self.needs[0]:
            self.add("dq", backward_dq_kernel, self.rows, (*dq, *do))
        if self.bias_grad == "tile":
            assert bias is not None
            b, h, q, k = self.bias_shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
            strides = (h * q * k * (b > 1), q * k * (h > 1), k)
            over = (batch // max(1, b), heads // max(1, h))

            def blocks(tiles: Tiles) -> int:
                return b * h * triton.cdiv(q, tiles.BM) * triton.cdiv(k, tiles.BN) * all(over)

            self.add("dbias", backward_dbias_kernel, blocks, (*strides, *over, *do))

    def run(
        self, grad_output, grad_lse, output, lse, statistics, query, key, value, tensors
    ) -> list[Tensor]:
        """Launches what is needed: [dq, dk, dv, dbias, dsinks], an unwanted one empty."""
        bias, sinks, pointers = tensors[1], tensors[-1], _pointers(query, tensors)
        dq, dk, dv = (
            query.new_empty_strided(*grad) if needed else query.new_empty(0)
            for grad, needed in zip(self.grads, self.needs)
        )
        delta = torch.empty_like(lse)
        inputs = query, key, value, grad_output
        launch = self.launch
        if len(launch) > 1 or self.sink_weight:
            dlse = lse if grad_lse is None else grad_lse.contiguous()
            launch["delta"](output, grad_output, dlse, delta)
        dbias = query.new_empty(0)
        if self.bias_grad == "key":
            dbias = lse.new_empty(self.batch, self.heads, 1, self.k_length)
        rows = (statistics if self.apart else lse), delta
        if "dkdv" in launch:
            launch["dkdv"](*inputs, dk, dv, dbias, *rows, *pointers)
        if "dq" in launch:
            launch["dq"](*inputs, dq, *rows, *pointers)
        if "dbias" in launch:
            dbias = bias.new_empty(bias.shape) if query.numel() else bias.new_zeros(bias.shape)
            launch["dbias"](*inputs, dbias, *rows, *pointers)
        dsinks, moved = query.new_empty(0), None
        if self.sink_weight:  # what a row's gradient moves to its sink
            sink = sinks.view(-1, 1).to(lse.dtype)
            if self.apart:
                peak, total = statistics.unbind(-1)
                moved = torch.exp2(sink * LOG2E.value - peak - total) * delta
            else:  # -inf for both: no weight
                moved = torch.exp(sink - lse.clamp_min(torch.finfo(lse.dtype).min)) * delta
            if self.sink_grad:
                dsinks = -moved.sum((0, 2)).to(sinks.dtype)
        if self.bias_grad == "row":  # exactly dlse and that, where the row sees a key
            dbias = torch.zeros_like(lse) if grad_lse is None else grad_lse
            dbias = dbias if moved is None else dbias + moved
            dbias = dbias.masked_fill(lse == float("-inf"), 0.0).unsqueeze(3)
        if self.bias_grad in ("key", "row"):
            dbias = dbias.sum_to_size(bias.shape).to(bias.dtype)
        return [dq, dk, dv, dbias, dsinks]


def _bias_grad(needed: bool, bias: Tensor | None, k_length: int) -> str:
    if not needed or bias is None:
        return ""
    if (bias.dim() == 0 or bias.shape[-1] == 1) and k_length != 1:
        return "row"
    return "key" if bias.dim() < 2 or bias.shape[-2] == 1 else "tile"


def _pointers(query: Tensor, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """What all kernels read, as `_Plan` names it; for one that is not there, the query."""
    attn_mask, bias, alibi_slopes, lengths, starts, seed, _ = tensors
    return (
        query if attn_mask is None else attn_mask.view(torch.uint8),
        query if bias is None else bias,
        query if alibi_slopes is None else alibi_slopes,
        query if lengths is None else lengths,
        query if starts is None else starts,
        query if seed is None else seed,
    )


def _signature(query, key, value, tensors, options) -> tuple[Any, ...]:
    """All that a `_Plan` is made from, as a key: its tensors by their layout. (Written out: it is
    most of what a call costs on the host.)
    """
    attn_mask, bias, alibi_slopes, lengths, starts, seed, sinks = tensors
    dtype = query.dtype
    return (
        query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride(),
        query.data_ptr() & 15, key.data_ptr() & 15, value.data_ptr() & 15, dtype, query.device,
        options,
        dtype is torch.float32 and allow_tf32(),
        None if attn_mask is None else layout(attn_mask), None if bias is None else layout(bias),
        None if alibi_slopes is None else layout(alibi_slopes),
        None if lengths is None else (lengths.dtype, lengths.data_ptr() & 15),
        None if starts is None else (starts.shape, starts.dtype, starts.data_ptr() & 15),
        None if seed is None else seed.data_ptr() & 15,
        None if sinks is None else (sinks.dtype, sinks.data_ptr() & 15),
    )  # fmt: skip


def _run_forward(query, key, value, tensors, options) -> tuple[Tensor, Tensor, Tensor]:
    """(output, lse, statistics); `tensors` and `options` as in `_Plan`."""
    signature = _signature(query, key, value, tensors, options)
    plan = plans.get(signature)
    if plan is None:
        given = query, key, value
        query, key, value = map(unit_stride, given)
        if any(x is not y for x, y in zip(given, (query, key, value))):
            return _run_forward(query, key, value, tensors, options)
        plan = remembered(signature, _Forward(query, key, value, tensors, options))
    outputs = [
        query.new_empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in plan.outputs
    ]
    sinks = query if tensors[-1] is None else tensors[-1]
    with on_device(query):
        plan.forward(query, key, value, *outputs, sinks, *_pointers(query, tensors))
    return tuple(outputs)


def _run_backward(
    grad_output, grad_lse, output, lse, statistics, needs, query, key, value, tensors, options
) -> list[Tensor]:
    """[dq, dk, dv, dbias, dsinks], an unwanted one empty."""
    signature = (
        *_signature(query, key, value, tensors, options), layout(grad_output), layout(grad_lse),
        layout(output), layout(lse), layout(statistics), needs,  # hooks may have moved them
    )  # fmt: skip
    plan = plans.get(signature)
    if plan is None:
        given = grad_output, output, query, key, value, lse, statistics
        grad_output, output, query, key, value = map(unit_stride, given[:5])
        lse, statistics = lse.contiguous(), statistics.contiguous()
        now = grad_output, output, query, key, value, lse, statistics
        if any(x is not y for x, y in zip(given, now)):
            return _run_backward(
                grad_output, grad_lse, output, lse, statistics, needs, query, key, value, tensors,
                options,
            )  # fmt: skip
        made = _Backward(grad_output, grad_lse, output, needs, query, key, value, tensors, options)
        plan = remembered(signature, made)
    with on_device(query):
        return plan.run(grad_output, grad_lse, output, lse, statistics, query, key, value, tensors)


_ARGUMENTS = "Tensor query, Tensor key, Tensor value"


def _fake(query, key, value, *rest):
    bias, alibi_slopes = rest[4], rest[8]
    apart = bias is not None or alibi_slopes is not None
    return _outputs(unit_stride(query), value, apart)


@register(
    f"scaled_dot_product_attention({_ARGUMENTS}, {SCHEMA}, bool return_lse) "
    "-> (Tensor output, Tensor lse, Tensor statistics)",
    _fake,
)
def forward(
    query, key, value, attn_mask, dropout_p, is_causal, scale, bias, key_lengths, window,
    causal_alignment, alibi_slopes, softcap, sinks, dropout_seed, return_lse,
):  # fmt: skip
    """Launches the forward: (output [B,H,Sq,DV], lse [B,H,Sq], statistics [B,H,Sq,2] or [0])."""
    return _run_forward(
        query, key, value,
        (attn_mask, bias, alibi_slopes, key_lengths, None, dropout_seed, sinks),
        (dropout_p, is_causal, scale, window and tuple(window), causal_alignment, softcap, 0, 0),
    )  # fmt: skip


def _fake_backward(grad_output, grad_lse, query, key, value, *rest):
    bias, sinks, needs = rest[4], rest[10], rest[-1]
    key_grad = _bias_grad(needs[3], bias, key.shape[2]) == "key"
    needs = (needs[0], *(needs[1] or needs[2] or key_grad,) * 2, *needs[3:])
    grads = [_heads_like(x, x.shape[1], x.shape[3]) for x in map(unit_stride, (query, key, value))]
    grads += [query if x is None else x.new_empty(x.shape) for x in (bias, sinks)]
    return tuple(x if need else query.new_empty(0) for x, need in zip(grads, needs))


@register(
    "scaled_dot_product_attention_backward(Tensor grad_output, Tensor? grad_lse, "
    f"{_ARGUMENTS}, {SCHEMA}, Tensor output, Tensor lse, Tensor statistics, bool[] needs) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias, "
    "Tensor grad_sinks)",
    _fake_backward,
)
def backward(
    grad_output, grad_lse, query, key, value, attn_mask, dropout_p, is_causal, scale, bias,
    key_lengths, window, causal_alignment, alibi_slopes, softcap, sinks, dropout_seed, output, lse,
    statistics, needs,
):  # fmt: skip
    """Launches delta, then dK/dV, dQ and dBias as far as they are needed."""
    grads = _run_backward(
        grad_output, grad_lse, output, lse, statistics, tuple(needs), query, key, value,
        (attn_mask, bias, alibi_slopes, key_lengths, None, dropout_seed, sinks),
        (dropout_p, is_causal, scale, window and tuple(window), causal_alignment, softcap, 0, 0),
    )  # fmt: skip
    return tuple(grads)


# ------------------------------------------------------------------------------------------ packed


def _heads_first(x: Tensor) -> Tensor:
    """[tokens, heads, width] as one batch, [1, heads, tokens, width]."""
    return unit_stride(x).transpose(0, 1).unsqueeze(0)


def _tokens_first(x: Tensor) -> Tensor:
    return x.squeeze(0).transpose(0, 1)


def _fake_packed(query, key, value, *_):
    output, lse, _ = _outputs(_heads_first(query), _heads_first(value), False)
    return _tokens_first(output), lse.squeeze(0)


@register(
    f"packed_attention({_ARGUMENTS}, {PACKED_SCHEMA}) -> (Tensor output, Tensor lse)",
    _fake_packed,
)
def packed_forward(
    query, key, value, attn_mask, dropout_p, is_causal, scale, bias, key_lengths, window,
    causal_alignment, alibi_slopes, softcap, sinks, dropout_seed, cu_seqlens_q, cu_seqlens_k,
    max_q, max_k,
):  # fmt: skip
    """Launches the forward over a packed batch: (output [Tq,H,DV], lse [H,Tq])."""
    query, key, value = _heads_first(query), _heads_first(key), _heads_first(value)
    output, lse, _ = _run_forward(
        query, key, value,
        (None, None, None, cu_seqlens_k, cu_seqlens_q, dropout_seed, sinks),
        (dropout_p, is_causal, scale, window and tuple(window), causal_alignment, None, max_q,
         max_k),
    )  # fmt: skip
    return _tokens_first(output), lse.squeeze(0)


def _fake_packed_backward(grad_output, query, key, value, *rest):
    sinks, needs = rest[10], rest[-1]
    needs = (needs[0], *(needs[1] or needs[2],) * 2, needs[3])
    grads = [
        _tokens_first(_heads_like(x, x.shape[1], x.shape[3]))
        for x in map(_heads_first, (query, key, value))
    ]
    grads.append(query if sinks is None else sinks.new_empty(sinks.shape))
    return tuple(x if need else query.new_empty(0) for x, need in zip(grads, needs))


@register(
    f"packed_attention_backward(Tensor grad_output, {_ARGUMENTS}, {PACKED_SCHEMA}, Tensor output, "
    "Tensor lse, bool[] needs) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_sinks)",
    _fake_packed_backward,
)
def packed_backward(
    grad_output, query, key, value, attn_mask, dropout_p, is_causal, scale, bias, key_lengths,
    window, causal_alignment, alibi_slopes, softcap, sinks, dropout_seed, cu_seqlens_q,
    cu_seqlens_k, max_q, max_k, output, lse, needs,
):  # fmt: skip
    """Launches delta, then dK/dV and dQ as far as they are needed, over a packed batch."""
    query, key, value = _heads_first(query), _heads_first(key), _heads_first(value)
    grad_output, output, lse = _heads_first(grad_output), _heads_first(output), lse.unsqueeze(0)
    grads = _run_backward(
        grad_output, None, output, lse, lse, (*needs[:3], False, needs[3]), query, key, value,
        (None, None, None, cu_seqlens_k, cu_seqlens_q, dropout_seed, sinks),
        (dropout_p, is_causal, scale, window and tuple(window), causal_alignment, None, max_q,
         max_k),
    )  # fmt: skip
    dq, dk, dv, _, dsinks = grads
    return *(_tokens_first(x) if x.dim() == 4 else x for x in (dq, dk, dv)), dsinks


def supports(query: Tensor, *_: Any, **__: Any) -> str | None:
    """Why the kernels cannot run this call, or None."""
    return unsupported_dtype(query)
