"""The launchers of the attention kernels, and the ops that they are registered as.

What a call launches follows from the shapes, strides, dtypes and options of its arguments: a
`_Plan` holds it, under the key that `_signature` makes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer.description import PACKED_SCHEMA, SCHEMA, Attention, unpack

from ..common import LOG2E, dropout_arguments
from ..launch import (
    DescriptorLaunch,
    Launch,
    allow_tf32,
    architecture,
    constants,
    dot_precision,
    layout,
    next_power_of_2,
    on_device,
    plans,
    processors,
    remembered,
    unit_stride,
    unsupported_dtype,
)
from ..registration import register
from ..tuned import Question, choose, flags, named
from .backward import (
    Over,
    backward_dbias_kernel,
    backward_dkdv_kernel,
    backward_dq_kernel,
    delta_kernel,
)
from .configurations import (
    Tiles,
    configuration,
    narrowed,
    parts_of_keys,
    rows,
    splits_keys,
)
from .decode import Cut, PagedInputs, Paging, merge_kernel, split_kernel
from .forward import forward_kernel
from .scores import (
    BackwardInputs,
    Band,
    Extras,
    Factors,
    Has,
    Inputs,
    RowStrides,
    Sizes,
    Strides,
    Tile,
)
from .specialised import SPECIALISED, specialised_kernel

# Triton 3.6 serialises the products of dK and dV, where whole tiles have a loop of their own beside
# a bias; newer ones where they have not.
OLD = triton.__version__.startswith("3.6.")
UNBOUNDED = 2**30  # a side of the band that has no bound, and more than any length


def _heads_like(x: Tensor, heads: int, width: int) -> Tensor:
    """Make an empty [B, heads, S, width] with the memory order of x [B, .., S, ..], so that
    [B, S, H, D] behind a transpose stays one.
    """
    batch, _, length, _ = x.shape
    if x.shape[1] > 1 and x.stride(1) < x.stride(2):
        return x.new_empty(batch, length, heads, width).transpose(1, 2)
    return x.new_empty(batch, heads, length, width)


def _spans_int32(*tensors: Tensor) -> bool:
    """Tell whether an offset inside one (batch, head) can pass 2^31 elements."""
    return any(
        sum((n - 1) * abs(s) for n, s in zip(x.shape[-2:], x.stride()[-2:])) >= 2**31
        for x in tensors
    )


# ------------------------------------------------------------------------------------------- plans


class _Plan:
    """All that a call launches but the pointers: what its shapes, strides, dtypes and options fix.

    query [B, H, Sq, D], key [B, G, Sk, D], value [B, G, Sk, DV]. A packed batch is one batch of Tq
    queries and Tk keys, and the description has the offsets of both. `launch` holds the kernels of
    the call by name, each with all its arguments but the pointers. `apart` says that the maximum
    and the log-sum of the scores are saved apart.
    """

    inputs: Callable[..., Any] = Inputs  # how the kernels group the first pointers
    specialises = False  # whether `specialised_kernel` computes the call

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> None:
        self.launch: dict[str, Launch] = {}
        batch, self.heads, q_rows, dim = query.shape
        self.groups, k_rows, width = key.shape[1], key.shape[2], value.shape[3]
        self.batch, self.q_length, self.k_length = batch, q_rows, k_rows
        offsets = attention.cu_seqlens_q
        self.packed = offsets is not None
        if offsets is not None:
            self.batch = offsets.shape[0] - 1
            self.q_length, self.k_length = attention.max_q, attention.max_k
        self.device, self.arch = query.device, architecture(query.device)
        self.dtype = query.dtype
        self.apart = attention.bias is not None or attention.alibi_slopes is not None
        self.head_block = max(16, next_power_of_2(max(dim, width)))
        half = query.element_size() == 2 or self.arch == "interpreter"
        narrow = half and self.head_block <= 128  # else a second loop takes too many registers
        full = (batch, self.heads, q_rows, k_rows)
        kinds, strides, wide = [], [], _spans_int32(query, key, value)
        for x in (attention.attn_mask, attention.bias):
            x = None if x is None else x.expand(full)
            kinds.append(0 if x is None else 1 if x.stride(2) == 0 or q_rows == 1 else 2)
            strides.append((0, 0, 0, 0) if x is None else x.stride())
            wide = wide or (x is not None and _spans_int32(x))
        slopes: tuple[int, ...] = (0, 0)
        if attention.alibi_slopes is not None:
            slopes = attention.alibi_slopes.expand(batch, self.heads).stride()
        sides = attention.window or (-1, -1)
        left, right = (UNBOUNDED if n < 0 else min(n, UNBOUNDED) for n in sides)
        if attention.is_causal:
            right = 0
        splits_biased = attention.bias is None or self.arch != "sm_90" or not OLD
        self.tile = Tile(
            rows=0,  # each kernel has its own
            columns=0,
            dim=dim,
            dim_block=max(16, next_power_of_2(dim)),
            value_dim=width,
            value_block=max(16, next_power_of_2(width)),
            wide=wide,
            split=narrow and self.arch in ("sm_90", "sm_100", "interpreter") and splits_biased,
            again=half and self.arch in ("sm_80", "sm_86", "sm_90", "other", "interpreter"),
            precision=dot_precision(self.arch),
            acc=tl.float64 if query.dtype == torch.float64 else tl.float32,
        )
        self.has = Has(
            mask=kinds[0],
            bias=kinds[1],
            alibi=attention.alibi_slopes is not None,
            softcap=attention.softcap is not None,
            left=left < UNBOUNDED,
            right=right < UNBOUNDED,
            bottom_right=attention.causal_alignment == "bottom_right",
            lengths=attention.key_lengths is not None,
            packed=self.packed,
            dropout=attention.dropout_p > 0,
            shard=attention.shard is not None,
            fold=attention.scale > 2.0**-100 and attention.softcap is None and not self.apart,
        )
        rows = (*self.strides(query), *self.strides(key), *self.strides(value))
        group = self.heads // max(1, self.groups)
        softcap = 1.0 if attention.softcap is None else attention.softcap
        lengths = self.q_length, self.k_length, q_rows, k_rows
        self.arguments: dict[str, Any] = dict(
            strides=Strides(*rows, *strides[0], *strides[1], *slopes),
            sizes=Sizes(self.heads, group, *lengths, attention.shard or 1),
            band=Band(left, right),
            factors=Factors(attention.scale, softcap, *dropout_arguments(attention.dropout_p)[:2]),
        )

    def add(
        self, name: str, kernel: Any, blocks: Callable[[Tiles], int], has: Has, **own: Any
    ) -> None:
        """Add a launch. `blocks` gives the number of programs for its tiles; `own` are arguments
        that no other kernel takes.
        """
        tiles, launch = self.tiles(name), Launch
        if isinstance(tiles, str):
            kernel, tiles, launch = specialised_kernel, SPECIALISED[tiles], DescriptorLaunch
            own["MASK"] = has.right or has.lengths or self.k_length % tiles.BN != 0
        widest = 256 if name == "forward" else 64 if self.arch == "sm_86" else 128
        again = self.tile.again and self.head_block <= widest
        tile = self.tile._replace(rows=tiles.BM, columns=tiles.BN, again=again)
        self.launch[name] = launch(
            kernel,
            (blocks(tiles),),
            own | self.arguments | dict(tile=constants(tile), has=constants(has)),
            tiles.warps,
            tiles.stages,
            dict(inputs=self.inputs, extras=Extras),
        )

    def strides(self, x: Tensor) -> RowStrides:
        """Return the strides of x [B, H, S, D]; that of the batch is 0 in a packed batch."""
        batch, head, row, _ = x.stride()
        return RowStrides(0 if self.packed else batch, head, row)

    def tiles(self, kernel: str) -> Any:
        """Choose the tiles of a kernel: those measured for calls like this, or the tables'."""
        lengths = self.q_length, self.k_length
        full = 2 in (self.has.mask, self.has.bias)
        given = kernel, self.arch, self.dtype, self.head_block, *lengths, full
        shipped = configuration(*given)
        if kernel == "delta":
            return shipped

        def options() -> list[Any]:
            return rows(kernel, self.dtype, self.head_block) + list(SPECIALISED) * self.specialises

        return choose(self.device, Question(f"attention {kernel}", self.case, shipped, options))

    @functools.cached_property
    def case(self) -> str:
        """Name the class of calls that share a measurement."""
        sizes = dict(D=self.head_block, heads=self.batch * self.heads)
        sizes["kv_heads"] = self.batch * self.groups
        band = dict(zip(("left", "right"), self.arguments["band"]))
        sizes |= dict(queries=self.q_length, keys=self.k_length)
        sizes |= {side: n for side, n in band.items() if n < UNBOUNDED}
        words = [named(self.dtype, self.tile.precision, **sizes), flags(self.has, *band)]
        return " ".join(words + ["descriptors"] * self.specialises)

    def rows(self, tiles: Tiles) -> int:
        """Count the programs, if each owns BM queries of a head."""
        return triton.cdiv(self.q_length, tiles.BM) * self.batch * self.heads

    def columns(self, tiles: Tiles) -> int:
        """Count the programs, if each owns BN keys of a key-value head."""
        return triton.cdiv(self.k_length, tiles.BN) * self.batch * self.groups


def _outputs(query: Tensor, value: Tensor, apart: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Make output [B, H, Sq, DV], lse [B, H, Sq] and statistics [B, H, Sq, 2], uninitialised; the
    last is [0] where lse is all that P needs.
    """
    output = _heads_like(query, query.shape[1], value.shape[3])
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = query.shape[:3]
    statistics = query.new_empty((*rows, 2), dtype=dtype) if apart else query.new_empty(0)
    return output, query.new_empty(rows, dtype=dtype), statistics


def _layouts(query: Tensor, outputs: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    """Return shape, stride and, where it is not that of the query, the dtype of each."""
    other = [{} if x.dtype == query.dtype else {"dtype": x.dtype} for x in outputs]
    return [(x.shape, x.stride(), dtype) for x, dtype in zip(outputs, other)]


class _Forward(_Plan):
    """The forward, and the layout of its outputs."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> None:
        super().__init__(query, key, value, attention)
        outputs = _outputs(query, value, self.apart)
        self.outputs = _layouts(query, outputs)
        has = self.has._replace(sink=attention.sinks is not None)
        strides = self.strides(outputs[0])
        self.specialises = self.may_specialise(query, key, value)
        self.add("forward", forward_kernel, self.rows, has, output_strides=strides)
        self.forward = self.launch["forward"]

    def may_specialise(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Tell whether `specialised_kernel` computes this call."""
        has, tile = self.has, self.tile
        known = dict.fromkeys(("right", "bottom_right", "lengths", "fold", "shard"), False)
        others = has._replace(**known)
        tensors = query, key, value
        return (
            self.arch in ("sm_90", "interpreter")
            and (query.element_size() == 2 or self.arch == "interpreter")
            and has.fold
            and not (any(others) or tile.wide)
            and self.head_block <= 128
            and all(x.numel() and x.stride(2) > 0 and x.shape[3] % 8 == 0 for x in tensors)
            and all(n % 8 == 0 for x in tensors for n in x.stride()[:3])
            and not any(x.data_ptr() & 15 for x in tensors)
        )


class _Decode(_Plan):
    """The forward of few queries: a kernel over parts of the keys, and one that merges them.

    The query heads of a key-value head share their tiles, unless a mask or a bias of keys tells
    them apart: a key that it hides from one head may hold anything.
    """

    inputs = PagedInputs

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention: Attention,
        page: int = 0,
        paging: Paging = Paging(0, 0, 0, 0),  # noqa: B008 - a tuple
    ) -> None:
        super().__init__(query, key, value, attention)
        self.tile = self.tile._replace(again=False)
        given = self.arguments["strides"]
        heads = self.arguments["sizes"].group
        if 1 in (self.has.mask * (given.mask_head != 0), self.has.bias * (given.bias_head != 0)):
            heads = 1
        self.planes = self.batch * self.heads // max(1, heads)
        self.tile_rows = heads * self.q_length
        outputs = _outputs(query, value, self.apart)
        self.outputs = _layouts(query, outputs)
        self.has = has = self.has._replace(page=page)
        self.ahead = 2 if page else 0  # the copies of a tile wait for its entries of the table
        tiles = self.tiles("decode")
        cut = Cut(heads, self.parts(tiles))
        programs = self.blocks(tiles) * cut.parts
        self.add("decode", split_kernel, lambda _: programs, has, cut=cut, paging=paging)
        rows = self.batch * self.heads * self.q_length
        self.partial = (rows, cut.parts, self.tile.value_dim), (rows, cut.parts, 2)
        most = min(16, max(2, next_power_of_2(cut.parts)))
        self.launch["merge"] = Launch(
            merge_kernel,
            (rows,),
            dict(
                output_strides=RowStrides(*outputs[0].stride()[:3]),
                sizes=self.arguments["sizes"],
                parts=cut.parts,
                tile=constants(self.tile._replace(rows=most)),
                has=constants(has._replace(sink=attention.sinks is not None)),
            ),
            4,
        )
        self.split, self.merge = self.launch["decode"], self.launch["merge"]

    def tiles(self, kernel: str) -> Tiles:
        given = super().tiles(kernel)
        sizes = self.tile_rows, self.keys(), self.planes
        if given.stages > 1:
            given = given._replace(stages=given.stages + self.ahead)
        return narrowed(given, *sizes, processors(self.device))

    def is_slower(self) -> bool:
        """Tell whether the forward kernel was measured to be faster for calls like this."""
        ways = ["split", "forward"]
        question = Question("attention few queries", self.case, ways[0], lambda: ways)
        return choose(self.device, question) != ways[0]

    def keys(self) -> int:
        """Bound the keys that all queries of a head see."""
        left, right = self.arguments["band"]
        return min(self.k_length, left + right + self.q_length)

    def parts(self, tiles: Tiles) -> int:
        """Choose into how many parts the keys are cut."""
        count = triton.cdiv(self.keys(), tiles.BN) + (self.keys() < self.k_length)
        return parts_of_keys(count, self.blocks(tiles), processors(self.device))

    def blocks(self, tiles: Tiles) -> int:
        """Count the tiles of rows."""
        return triton.cdiv(self.tile_rows, tiles.BM) * self.planes

    def forward(self, inputs, output, lse, statistics, sinks, extras) -> None:
        """Launch both kernels."""
        sums, weights = map(lse.new_empty, self.partial)
        self.split(inputs if len(inputs) == 4 else (*inputs, inputs[0]), sums, weights, extras)
        self.merge(sums, weights, output, lse, statistics, sinks)


class _Backward(_Plan):
    """The kernels of the backward that are needed.

    `bias_grad` says how the gradient of the bias is computed: "tile" by a kernel of its own, "key",
    for a bias that is constant over the queries, together with dK and dV, "row", for one that is
    constant over the keys, from dlse and the weight of the sink, and "" where it is not needed. The
    gradient of the sinks also comes from their weight.
    """

    inputs = BackwardInputs

    def __init__(
        self,
        grad_output: Tensor,
        grad_lse: Tensor | None,
        output: Tensor,
        needs: tuple[bool, ...],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention: Attention,
    ) -> None:
        super().__init__(query, key, value, attention)
        wide = self.tile.wide or _spans_int32(grad_output, output)
        self.tile = self.tile._replace(wide=wide)
        self.bias_grad = _bias_grad(needs[3], attention.bias, self.k_length)
        like = [_heads_like(x, x.shape[1], x.shape[3]) for x in (query, key, value)]
        self.grads = [(x.shape, x.stride()) for x in like]
        dq, dk, dv = (self.strides(x) for x in like)
        do = self.strides(grad_output)
        self.add_delta(grad_output, grad_lse, output)
        key_grad = self.bias_grad == "key"
        sink = attention.sinks is not None
        self.sink_grad, self.sink_weight = needs[4], sink and (needs[4] or self.bias_grad == "row")
        self.needs = (needs[0], *(needs[1] or needs[2] or key_grad,) * 2)
        if self.needs[1]:
            strides = dict(dk_strides=dk, dv_strides=dv, do_strides=do)
            has = self.has._replace(key_grad=key_grad)
            self.add("dkdv", backward_dkdv_kernel, self.columns, has, **strides)
        if self.needs[0]:
            strides = dict(dq_strides=dq, do_strides=do)
            self.add("dq", backward_dq_kernel, self.rows, self.has, **strides)
        if self.bias_grad == "tile":
            assert attention.bias is not None
            self.add_dbias(attention.bias, query, do)

    def add_delta(self, grad_output: Tensor, grad_lse: Tensor | None, output: Tensor) -> None:
        """Add the launch of delta, from tensors [B, H, Sq, DV] and [B, H, Sq]."""
        batch, heads, rows, _ = output.shape
        tiles = self.tiles("delta")
        self.launch["delta"] = Launch(
            delta_kernel,
            (triton.cdiv(rows, tiles.BM) * batch * heads,),
            dict(
                output_strides=RowStrides(*output.stride()[:3]),
                grad_strides=RowStrides(*grad_output.stride()[:3]),
                H=heads,
                Sq=rows,
                tile=constants(self.tile._replace(rows=tiles.BM)),
                HAS_DLSE=grad_lse is not None,
                APART=self.apart,
            ),
            tiles.warps,
            tiles.stages,
        )

    def add_dbias(self, bias: Tensor, query: Tensor, do_strides: RowStrides) -> None:
        """Add the launch that computes the gradient of a bias of queries and keys."""
        b, h, q, k = (1,) * (4 - bias.dim()) + tuple(bias.shape)
        strides = RowStrides(h * q * k * (b > 1), q * k * (h > 1), k)
        over = Over(query.shape[0] // max(1, b), query.shape[1] // max(1, h))

        def blocks(tiles: Tiles) -> int:
            return b * h * triton.cdiv(q, tiles.BM) * triton.cdiv(k, tiles.BN) * all(over)

        own = dict(dbias_strides=strides, over=over, do_strides=do_strides)
        self.add("dbias", backward_dbias_kernel, blocks, self.has, **own)

    def run(
        self, grad_output, grad_lse, output, lse, statistics, query, key, value, attention
    ) -> list[Tensor]:
        """Launch what is needed. Returns [dq, dk, dv, dbias, dsinks]; one that is not needed is
        empty.
        """
        bias, extras = attention.bias, _extras(query, attention)
        dq, dk, dv = (
            query.new_empty_strided(*grad) if needed else query.new_empty(0)
            for grad, needed in zip(self.grads, self.needs)
        )
        delta = torch.empty_like(lse)
        inputs = query, key, value, grad_output
        launch = self.launch
        if len(launch) > 1 or self.sink_weight:
            dlse = lse if grad_lse is None else grad_lse.contiguous()
            if not self.apart:
                statistics = torch.empty_like(lse)
            launch["delta"](output, grad_output, dlse, lse, delta, statistics)
        dbias = query.new_empty(0)
        if self.bias_grad == "key":
            dbias = lse.new_empty(self.batch, self.heads, 1, self.k_length)
        if "dkdv" in launch:
            launch["dkdv"](inputs, dk, dv, dbias, statistics, delta, extras)
        if "dq" in launch:
            launch["dq"](inputs, dq, statistics, delta, extras)
        if "dbias" in launch:
            dbias = bias.new_empty(bias.shape) if query.numel() else bias.new_zeros(bias.shape)
            launch["dbias"](inputs, dbias, statistics, delta, extras)
        dsinks, moved = query.new_empty(0), None
        if self.sink_weight:
            moved = self.moved(attention.sinks, lse, statistics, delta)
            if self.sink_grad:
                dsinks = -moved.sum((0, 2)).to(attention.sinks.dtype)
        if self.bias_grad == "row":  # exactly dlse and what moved, where the row sees a key
            dbias = torch.zeros_like(lse) if grad_lse is None else grad_lse
            dbias = dbias if moved is None else dbias + moved
            dbias = dbias.masked_fill(lse == float("-inf"), 0.0).unsqueeze(3)
        if self.bias_grad in ("key", "row"):
            dbias = dbias.sum_to_size(bias.shape).to(bias.dtype)
        return [dq, dk, dv, dbias, dsinks]

    def moved(self, sinks: Tensor, lse: Tensor, statistics: Tensor, delta: Tensor) -> Tensor:
        """Compute what the gradient of each row moves to its sink, [B, H, Sq]."""
        sink = sinks.view(-1, 1).to(lse.dtype)
        if self.apart:
            peak, offset = statistics.unbind(-1)
            return torch.exp2(sink * LOG2E.value - peak + offset) * delta
        # A row whose lse is -inf has a sink of -inf, which has no weight.
        return torch.exp(sink - lse.clamp_min(torch.finfo(lse.dtype).min)) * delta


def _bias_grad(needed: bool, bias: Tensor | None, k_length: int) -> str:
    """Say how the gradient of the bias is computed, as `_Backward` has it."""
    if not needed or bias is None:
        return ""
    if (bias.dim() == 0 or bias.shape[-1] == 1) and k_length != 1:
        return "row"
    return "key" if bias.dim() < 2 or bias.shape[-2] == 1 else "tile"


# ---------------------------------------------------------------------------------------- launches


def _extras(query: Tensor, attention: Attention) -> tuple[Tensor, ...]:
    """Return the pointers of `Extras`; the query stands in for a tensor that the call leaves out,
    which no kernel reads.
    """
    mask, bias, slopes = attention.attn_mask, attention.bias, attention.alibi_slopes
    starts, seed = attention.cu_seqlens_q, attention.dropout_seed
    lengths = attention.key_lengths if starts is None else attention.cu_seqlens_k
    return (
        query if mask is None else mask.view(torch.uint8),
        query if bias is None else bias,
        query if slopes is None else slopes,
        query if lengths is None else lengths,
        query if starts is None else starts,
        query if seed is None else seed,
    )


def _signature(query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> tuple[Any, ...]:
    """Return all that a `_Plan` is made from, as a key: tensors by their layout. (It is written out
    because it is most of what a call costs on the host.)
    """
    mask, dropout_p, is_causal, scale, bias, lengths, window, alignment = attention[:8]
    slopes, softcap, sinks, seed, shard, starts, ends, max_q, max_k = attention[8:]
    dtype = query.dtype
    return (
        query.shape,
        query.stride(),
        key.shape,
        key.stride(),
        value.shape,
        value.stride(),
        query.data_ptr() & 15,
        key.data_ptr() & 15,
        value.data_ptr() & 15,
        dtype,
        query.device,
        dropout_p,
        is_causal,
        scale,
        window,
        alignment,
        softcap,
        shard,
        max_q,
        max_k,
        dtype is torch.float32 and allow_tf32(),
        None if mask is None else layout(mask),
        None if bias is None else layout(bias),
        None if slopes is None else layout(slopes),
        None if lengths is None else (lengths.dtype, lengths.data_ptr() & 15),
        None if starts is None else (starts.shape, starts.dtype, starts.data_ptr() & 15),
        None if ends is None else (ends.dtype, ends.data_ptr() & 15),
        None if seed is None else seed.data_ptr() & 15,
        None if sinks is None else (sinks.dtype, sinks.data_ptr() & 15),
    )


def _forward_plan(
    query: Tensor, key: Tensor, value: Tensor, attention: Attention
) -> _Forward | _Decode:
    """Plan a forward. Few queries take the kernels that split the keys, if no measurement says
    otherwise.
    """
    packed = attention.cu_seqlens_q is not None
    if splits_keys(query.shape[2], key.shape[2], attention.dropout_p, packed):
        plan = _Decode(query, key, value, attention)
        if not plan.is_slower():
            return plan
    return _Forward(query, key, value, attention)


def _run_forward(query, key, value, attention: Attention) -> Any:
    """Launch the forward. Returns (output, lse, statistics)."""
    signature = _signature(query, key, value, attention)
    plan = plans.get(signature)
    if plan is None:
        given = query, key, value
        query, key, value = map(unit_stride, given)
        if any(x is not y for x, y in zip(given, (query, key, value))):
            return _run_forward(query, key, value, attention)
        plan = remembered(signature, _forward_plan(query, key, value, attention))
    return _launch(plan, (query, key, value), attention)


def _launch(plan: Any, inputs: tuple[Tensor, ...], attention: Attention) -> Any:
    """Launch a plan of a forward. Returns (output, lse, statistics)."""
    query = inputs[0]
    outputs = [
        query.new_empty_strided(shape, stride, **dtype) for shape, stride, dtype in plan.outputs
    ]
    sinks = query if attention.sinks is None else attention.sinks
    with on_device(query):
        plan.forward(inputs, *outputs, sinks, _extras(query, attention))
    return tuple(outputs)


def _run_paged(query, key_pages, value_pages, block_table, attention: Attention) -> Any:
    """Launch the kernels that read pages. Returns (output, lse, statistics)."""
    table = block_table.shape, block_table.data_ptr() & 15
    signature = *_signature(query, key_pages, value_pages, attention), table
    plan = plans.get(signature)
    if plan is None:
        given = query, key_pages, value_pages
        query, key_pages, value_pages = map(unit_stride, given)
        if any(x is not y for x, y in zip(given, (query, key_pages, value_pages))):
            return _run_paged(query, key_pages, value_pages, block_table, attention)
        pages, page, groups, _ = key_pages.shape
        shape = query.shape[0], groups, block_table.shape[1] * page
        key, value = (  # as if they lay in one piece, which nothing reads
            torch.empty_strided(
                (*shape, x.shape[3]), (0, x.stride(2), x.stride(1), 1), dtype=x.dtype, device="meta"
            )
            for x in (key_pages, value_pages)
        )
        paging = Paging(pages, block_table.shape[1], key_pages.stride(0), value_pages.stride(0))
        made = _Decode(query, key, value, attention, page, paging)
        plan = remembered(signature, made)
    return _launch(plan, (query, key_pages, value_pages, block_table), attention)


def _run_backward(
    grad_output, grad_lse, output, lse, statistics, needs, query, key, value, attention: Attention
) -> list[Tensor]:
    """Launch the backward. Returns [dq, dk, dv, dbias, dsinks]; one that is not needed is empty."""
    tensors = grad_output, grad_lse, output, lse, statistics  # hooks may have moved what is saved
    signature = *_signature(query, key, value, attention), *map(layout, tensors), needs
    plan = plans.get(signature)
    if plan is None:
        given = grad_output, output, query, key, value, lse, statistics
        grad_output, output, query, key, value = map(unit_stride, given[:5])
        lse, statistics = lse.contiguous(), statistics.contiguous()
        now = grad_output, output, query, key, value, lse, statistics
        if any(x is not y for x, y in zip(given, now)):
            saved = output, lse, statistics
            return _run_backward(grad_output, grad_lse, *saved, needs, query, key, value, attention)
        made = _Backward(grad_output, grad_lse, output, needs, query, key, value, attention)
        plan = remembered(signature, made)
    with on_device(query):
        saved = output, lse, statistics
        return plan.run(grad_output, grad_lse, *saved, query, key, value, attention)


# --------------------------------------------------------------------------------------------- ops
# Their schemas have the fields of the description one by one: `unpack` makes it of them again.

_ARGUMENTS = "Tensor query, Tensor key, Tensor value"


def _fake(query, key, value, *rest):
    attention = unpack(rest[:-1])
    apart = attention.bias is not None or attention.alibi_slopes is not None
    return _outputs(unit_stride(query), value, apart)


@register(
    f"scaled_dot_product_attention({_ARGUMENTS}, {SCHEMA}, bool return_lse) "
    "-> (Tensor output, Tensor lse, Tensor statistics)",
    _fake,
)
def forward(query, key, value, *rest):
    """Launch the forward. Returns (output [B, H, Sq, DV], lse [B, H, Sq], statistics
    [B, H, Sq, 2] or [0]), whether lse is asked for or not.
    """
    return _run_forward(query, key, value, unpack(rest[:-1]))


def _fake_backward(grad_output, grad_lse, query, key, value, *rest):
    *fields, _, _, _, needs = rest
    attention = unpack(fields)
    key_grad = _bias_grad(needs[3], attention.bias, key.shape[2]) == "key"
    needs = (needs[0], *(needs[1] or needs[2] or key_grad,) * 2, *needs[3:])
    grads = [_heads_like(x, x.shape[1], x.shape[3]) for x in map(unit_stride, (query, key, value))]
    others = attention.bias, attention.sinks
    grads += [query if x is None else x.new_empty(x.shape) for x in others]
    return tuple(x if need else query.new_empty(0) for x, need in zip(grads, needs))


@register(
    "scaled_dot_product_attention_backward(Tensor grad_output, Tensor? grad_lse, "
    f"{_ARGUMENTS}, {SCHEMA}, Tensor output, Tensor lse, Tensor statistics, bool[] needs) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias, "
    "Tensor grad_sinks)",
    _fake_backward,
)
def backward(grad_output, grad_lse, query, key, value, *rest):
    """Launch delta, then dK and dV, dQ and dBias as far as they are needed."""
    *fields, output, lse, statistics, needs = rest
    saved = output, lse, statistics, tuple(needs)
    return tuple(_run_backward(grad_output, grad_lse, *saved, query, key, value, unpack(fields)))


# ------------------------------------------------------------------------------------------ packed


def _heads_first(x: Tensor) -> Tensor:
    """View [tokens, heads, width] as one batch, [1, heads, tokens, width]."""
    return unit_stride(x).transpose(0, 1).unsqueeze(0)


def _tokens_first(x: Tensor) -> Tensor:
    """View [1, heads, tokens, width] as [tokens, heads, width]."""
    return x.squeeze(0).transpose(0, 1)


def _fake_packed(query, key, value, *_):
    output, lse, _ = _outputs(_heads_first(query), _heads_first(value), False)
    return _tokens_first(output), lse.squeeze(0)


@register(
    f"packed_attention({_ARGUMENTS}, {PACKED_SCHEMA}) -> (Tensor output, Tensor lse)",
    _fake_packed,
)
def packed_forward(query, key, value, *fields):
    """Launch the forward over a packed batch. Returns (output [Tq, H, DV], lse [H, Tq])."""
    inputs = map(_heads_first, (query, key, value))
    output, lse, _ = _run_forward(*inputs, unpack(fields))
    return _tokens_first(output), lse.squeeze(0)


def _fake_packed_backward(grad_output, query, key, value, *rest):
    *fields, _, _, needs = rest
    needs = (needs[0], *(needs[1] or needs[2],) * 2, needs[3])
    grads = [
        _tokens_first(_heads_like(x, x.shape[1], x.shape[3]))
        for x in map(_heads_first, (query, key, value))
    ]
    sinks = unpack(fields).sinks
    grads.append(query if sinks is None else sinks.new_empty(sinks.shape))
    return tuple(x if need else query.new_empty(0) for x, need in zip(grads, needs))


@register(
    f"packed_attention_backward(Tensor grad_output, {_ARGUMENTS}, {PACKED_SCHEMA}, Tensor output, "
    "Tensor lse, bool[] needs) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_sinks)",
    _fake_packed_backward,
)
def packed_backward(grad_output, query, key, value, *rest):
    """Launch delta, then dK and dV, and dQ as far as they are needed, over a packed batch."""
    *fields, output, lse, needs = rest
    inputs = map(_heads_first, (query, key, value))
    grad_output, output, lse = _heads_first(grad_output), _heads_first(output), lse.unsqueeze(0)
    needs = (*needs[:3], False, needs[3])
    dq, dk, dv, _, dsinks = _run_backward(
        grad_output, None, output, lse, lse, needs, *inputs, unpack(fields)
    )
    return *(_tokens_first(x) if x.dim() == 4 else x for x in (dq, dk, dv)), dsinks


# ------------------------------------------------------------------------------------------- paged


def _fake_paged(query, key_pages, value_pages, *_):
    return _outputs(unit_stride(query), value_pages, False)[:2]


@register(
    f"paged_attention(Tensor query, Tensor key_pages, Tensor value_pages, Tensor block_table, "
    f"{SCHEMA}, bool return_lse) -> (Tensor output, Tensor lse)",
    _fake_paged,
)
def paged_forward(query, key_pages, value_pages, block_table, *rest):
    """Launch the forward over the keys of the pages. Returns (output [B, H, Sq, DV], lse
    [B, H, Sq]).
    """
    attention = unpack(rest[:-1])
    return _run_paged(query, key_pages, value_pages, block_table, attention)[:2]


def describe(
    query: Tensor,
    attention: Attention,
    key: Tensor | None = None,
    value: Tensor | None = None,
    **_: Any,
) -> str | None:
    """Say which kernels a call takes, where its shape or a measurement decides that."""
    if attention.cu_seqlens_q is not None:
        return None
    if key is not None and value is not None:  # else they lie in pages
        if isinstance(_forward_plan(query, key, value, attention), _Forward):
            return None
    return "the keys are split over programs"


def supports(query: Tensor, *_: Any, **__: Any) -> str | None:
    """Return why the kernels cannot run this call, or None."""
    return unsupported_dtype(query)
