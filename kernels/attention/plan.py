"""The plan of a call of attention: all that it launches but the pointers.

Shapes, strides, dtypes and options of the arguments determine it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer.batch_invariance import on
from fastformer.description import Attention

from ..common import LOG2E, dropout_arguments
from ..launch import (
    MOST_PROGRAMS,
    Launch,
    architecture,
    constants,
    dot_precision,
    l2_cache,
    next_power_of_2,
    processors,
)
from ..tuned import TuningKey, choose, flags, named
from .backward import (
    Over,
    backward_dbias_kernel,
    backward_dkdv_kernel,
    backward_dq_kernel,
    delta_kernel,
)
from .bounds import BoundedLaunch, Source, bounds_source
from .configurations import (
    DECODE_BOUNDS_PAY,
    AttentionTiles,
    bounds_pay,
    configuration,
    heads_of_section,
    in_block,
    narrowed,
    parts_of_keys,
    rows,
)
from .decode import Split, merge_kernel, split_kernel
from .forward import forward_kernel
from .gluon import GluonRows, gluon_for, is_row, launch_of
from .scores import (
    AttentionStrides,
    BackwardInputs,
    Band,
    Factors,
    Features,
    Inputs,
    OptionalInputs,
    RowStrides,
    Sizes,
    Tile,
)
from .short_backward import SEPARATE, RowLayouts, ShortLaunch, pays, short_kernels, short_obstacle
from .tail import tail_launch

# With a bias, Triton 3.6 serialises the products of dK and dV if unmasked tiles have a loop of
# their own; newer versions serialise them if these have none.
OLD = triton.__version__.startswith("3.6.")
SHORT_KEY = "attention short backward"  # of the measurement
UNBOUNDED = 2**30  # a side of the band that has no bound, and more than any length


def heads_like(x: Tensor, heads: int, width: int) -> Tensor:
    """Make an empty [B, heads, S, width] with the memory order of x [B, .., S, ..]: the gradient of
    a transposed [B, S, H, D] is one, too.
    """
    batch, _, length, _ = x.shape
    if x.shape[1] > 1 and x.stride(1) < x.stride(2):
        return x.new_empty(batch, length, heads, width).transpose(1, 2)
    return x.new_empty(batch, heads, length, width)


def _spans_int32(*tensors: Tensor) -> bool:
    """Return whether an offset inside one (batch, head) can exceed 2^31 elements."""
    return any(
        sum((n - 1) * abs(s) for n, s in zip(x.shape[-2:], x.stride()[-2:])) >= 2**31
        for x in tensors
    )


# -------------------------------------------------------------------------- the arguments of a call


def optional_inputs(query: Tensor, attention: Any) -> tuple[Any, ...]:
    """Return the fields of `OptionalInputs`, given the optional tensors of a call by name. The
    query stands in for one that the call leaves out, which no kernel reads.
    """
    mask, bias, slopes = attention.attn_mask, attention.bias, attention.alibi_slopes
    starts, seed = attention.cu_seqlens_q, attention.dropout_seed
    lengths = attention.key_lengths if starts is None else attention.cu_seqlens_k
    spans = attention.mask_spans
    offsets: Tensor | int = 1
    if spans is not None:
        offsets = 1 if starts is None else starts
        mask, starts = attention.mask_bits, attention.mask_lists
    return (
        query if mask is None else mask.view(torch.uint8) if spans is None else mask,
        query if bias is None else bias,
        query if slopes is None else slopes,
        query if lengths is None else lengths,
        query if starts is None else starts,
        query if seed is None else seed,
        query if spans is None else spans,  # or bounds, which `BoundedLaunch` puts in
        offsets,
    )


def _steps_of_lists(attention: Attention) -> tuple[int, ...]:
    """Return what `AttentionStrides` has of a block mask: steps of spans, entries of lists."""
    spans, lists = attention.mask_spans, attention.mask_lists
    if spans is None or lists is None:
        return 0, 0, 0
    batch, head = (step * (n > 1) for step, n in zip(spans.stride(), spans.shape[:2]))
    return batch, head, lists.shape[1]


# -------------------------------------------------------------------------------------------- plans


class Plan:
    """All that a call launches but the pointers.

    query [B, H, Sq, D], key [B, G, Sk, D], value [B, G, Sk, DV]. A packed batch has B = 1, Tq
    queries and Tk keys, and the description holds the offsets of its sequences. With a block mask
    it is computed as one sequence. `launch` holds the kernels by name, each with all its arguments
    but the pointers. If `separate_max`, the forward saves the maximum and the log-sum of the scores
    as two numbers.
    """

    inputs: Callable[..., Any] = Inputs  # how the kernels group the first pointers
    source: Source | None = None  # what bounds are read from
    gluon = GluonRows()  # those that can compute the call
    own_bias_grad = False  # whether a bias needs its gradient that no sequences and heads share

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> None:
        self.launch: dict[str, Launch | BoundedLaunch] = {}
        batch, self.heads, q_rows, dim = query.shape
        self.groups, k_rows, width = key.shape[1], key.shape[2], value.shape[3]
        self.batch, self.q_length, self.k_length = batch, q_rows, k_rows
        offsets = attention.cu_seqlens_q
        self.packed = offsets is not None and attention.mask_spans is None
        if offsets is not None and self.packed:
            self.batch = offsets.shape[0] - 1
            self.q_length, self.k_length = attention.max_q, attention.max_k
        self.device, self.dtype, self.arch = query.device, query.dtype, architecture(query.device)
        self.separate_max = attention.bias is not None or attention.alibi_slopes is not None
        self.head_block = max(16, next_power_of_2(max(dim, width)))
        half = query.element_size() == 2 or self.arch == "interpreter"
        narrow = half and self.head_block <= 128  # else a second loop takes too many registers
        full = (batch, self.heads, q_rows, k_rows)
        kinds, strides, wide = [], [], _spans_int32(query, key, value)
        for x in (attention.attn_mask, attention.bias):
            x = None if x is None else x.expand(full)
            kinds.append(0 if x is None else 1 if x.stride(2) == 0 or q_rows == 1 else 2)
            # The batch of a packed batch is 1, and that of its bias may have any stride.
            steps = (0, 0, 0, 0) if x is None else x.stride()
            strides.append((steps[0] * (batch > 1), *steps[1:]))
            wide = wide or (x is not None and _spans_int32(x))
        documents = 1 if offsets is None or self.packed else offsets.shape[0] - 1
        given = attention.alibi_slopes
        slopes = (0, 0) if given is None else (0, *given.stride())[-2:]
        sides = attention.window or (-1, -1)
        left, right = (UNBOUNDED if n < 0 else min(n, UNBOUNDED) for n in sides)
        if attention.is_causal:
            right = 0
        in_documents = offsets is not None and not self.packed
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
            recompute_masked=half and self.arch != "sm_100",
            precision=dot_precision(self.arch),
            acc=tl.float64 if query.dtype == torch.float64 else tl.float32,
        )
        self.has = Features(
            mask=kinds[0],
            bias=kinds[1],
            alibi=attention.alibi_slopes is not None,
            softcap=attention.softcap is not None,
            left=left < UNBOUNDED and not in_documents,
            right=right < UNBOUNDED and not in_documents,
            bottom_right=attention.causal_alignment == "bottom_right",
            lengths=attention.key_lengths is not None,
            packed=self.packed,
            dropout=attention.dropout_p > 0,
            fold_scale=attention.scale > 2.0**-100
            and attention.softcap is None
            and not self.separate_max,
            separate_max=self.separate_max,
            invariant=on(),
        )
        if attention.mask_spans is not None:
            cut = self.has.left, self.has.right, self.has.lengths
            self.has = self.has._replace(lists=3 if in_documents else 2 if any(cut) else 1)
        self.steps = rows = tuple(n for x in (query, key, value) for n in self.strides(x))
        group = self.heads // max(1, self.groups)
        of_lists = _steps_of_lists(attention)
        softcap = 1.0 if attention.softcap is None else attention.softcap
        lengths = self.q_length, self.k_length, q_rows, k_rows
        self.arguments: dict[str, Any] = dict(
            strides=AttentionStrides(*rows, *strides[0], *strides[1], *slopes, *of_lists),
            sizes=Sizes(self.heads, group, *lengths, documents),
            band=Band(left, right),
            factors=Factors(attention.scale, softcap, *dropout_arguments(attention.dropout_p)),
        )

    def choose_bounds(self, kernel: str, attention: Attention) -> None:
        """Read bounds of the mask if they were measured to pay, or are expected to."""
        scores = self.batch, self.heads, self.q_length, self.k_length
        source = None if self.has.lists or on() else bounds_source(attention, self.has, scores)
        if source is not None and self.may_read(source):
            ways = ["bounds", "all tiles"]
            shipped = ways[0 if self.bounds_pay(source) else 1]
            key = TuningKey(f"attention {kernel} bounds", self.case, shipped, lambda: ways)
            if choose(self.device, key) == ways[0]:
                self.source = source

    def may_read(self, source: Source) -> bool:
        """Return whether the kernels can read bounds of this source. The two loops of wider heads
        need more shared memory than there is.
        """
        widest = 64 if self.arch == "sm_86" else 128
        return self.head_block <= widest or self.arch == "interpreter"

    def bounds_pay(self, source: Source) -> bool:
        """Return whether the bounds are expected to pay."""
        scores = self.batch * self.heads * self.q_length * self.k_length
        return bounds_pay(self.arch, scores, math.prod(source.sizes), self.k_length)

    def add(
        self,
        name: str,
        kernel: Any,
        grid: Callable[[AttentionTiles, Features], tuple[int, ...]],
        has: Features,
        **own: Any,
    ) -> Any:
        """Add a launch, and return its kernel. `grid` gives the number of programs along one axis,
        or along the three of `locate_block`; `own` are arguments that no other kernel takes.
        """
        tiles, source = self.tiles(name), self.source
        launch: Any = Launch
        in_gluon = is_row(name, tiles)
        if in_gluon:
            kernel, tiles, launch, tile, given = launch_of(self, name, tiles)
            own, has = own | given, has._replace(lists=self.has.lists)
        else:
            widest = 256 if name == "forward" else 64 if self.arch == "sm_86" else 128
            recomputes = self.tile.recompute_masked and self.head_block <= widest
            sides = dict(rows=tiles.BM, columns=tiles.BN)
            tile = self.tile._replace(**sides, recompute_masked=recomputes)
        arguments, bounds = self.arguments, None
        reads_row = not in_gluon and name in ("forward", "dkdv", "dq")
        if source is not None and source.in_kernel and reads_row:
            has = has._replace(bounds=3)
        elif source is not None:
            bounds = BoundedLaunch(name, tiles, source, self.tile.wide)
            strides = arguments["strides"]._replace(**bounds.strides())
            arguments = arguments | dict(strides=strides)
            has = has._replace(bounds=1 if source.name == "mask" else 2)
        if name == "dkdv" and in_gluon:
            tiles = tiles._replace(BN=128)  # of a program
        programs = grid(tiles, has)
        has = has._replace(sections=len(programs) == 3)
        own |= arguments | dict(tile=constants(tile), has=constants(has))
        groups = dict(inputs=self.inputs, optional=OptionalInputs)
        made = launch(kernel, programs, own, tiles.warps, tiles.stages, groups)
        self.launch[name] = made if bounds is None else bounds.then(made)
        return kernel

    def strides(self, x: Tensor) -> RowStrides:
        """Return the strides of x [B, H, S, D]; the first one is 0 for a packed batch."""
        batch, head, row, _ = x.stride()
        return RowStrides(0 if self.packed else batch, head, row)

    def tiles(self, kernel: str) -> Any:
        """Return the tiles of a kernel: measured for calls like this, or those of the tables."""
        lengths = self.q_length, self.k_length
        full = 2 in (self.has.mask, self.has.bias)
        if on():  # of one query and of many, with any mask and without one
            lengths, full = (128, 128), True
        shipped = configuration(kernel, self.arch, self.dtype, self.head_block, *lengths, full)
        if kernel == "delta":
            return shipped

        def fitted(tiles: AttentionTiles) -> AttentionTiles:
            without_wgmma = self.arch != "sm_90" and not self.tile.split
            biased = self.has.bias == 2
            return in_block(tiles, kernel, biased, without_wgmma) if self.has.lists else tiles

        def options() -> list[Any]:
            found = dict.fromkeys(map(fitted, rows(kernel, self.dtype, self.head_block)))
            return [*found, *self.gluon.options.get(kernel, [])]

        shipped = fitted(shipped)
        return choose(self.device, TuningKey(f"attention {kernel}", self.case, shipped, options))

    @functools.cached_property
    def case(self) -> str:
        """Return the name of the class of calls that share a measurement."""
        sizes = dict(D=self.head_block, heads=self.batch * self.heads)
        sizes["kv_heads"] = self.batch * self.groups
        band = dict(zip(("left", "right"), self.arguments["band"]))
        sizes |= dict(queries=self.q_length, keys=self.k_length)
        sizes |= {side: n for side, n in band.items() if n < UNBOUNDED}
        has = flags(self.has, *band, "separate_max")
        words = [named(self.dtype, self.tile.precision, **sizes), has]
        return " ".join(words + ["TMA"] * (self.gluon.obstacle is None))

    def rows(self, tiles: AttentionTiles, has: Features) -> tuple[int, ...]:
        """Return the grid if each program owns BM queries of a head."""
        blocks = triton.cdiv(self.q_length, tiles.BM)
        return self.grid(blocks, self.arguments["sizes"].group, self.k_length, has)

    def columns(self, tiles: AttentionTiles, has: Features) -> tuple[int, ...]:
        """Return the grid if each program owns BN keys of a key-value head."""
        blocks = triton.cdiv(self.k_length, tiles.BN)
        return self.grid(blocks, 1, self.q_length * self.arguments["sizes"].group, has)

    def grid(self, blocks: int, share: int, rows: int, has: Features) -> tuple[int, ...]:
        """Return the grid of programs that own a block each, of which a head has `blocks`. For each
        key-value head there are `share` such heads, which read `rows` rows of two tensors.

        It has three axes, those of `locate_block`, if a band or a mask of queries and keys gives
        the blocks of a head different numbers of tiles.
        """
        groups = self.batch * self.groups
        cut = has.left or has.right or has.lists
        if cut or (has.bounds and 2 in (has.mask, has.bias)):
            size = rows * (self.tile.dim + self.tile.value_dim) * self.dtype.itemsize
            section = heads_of_section(groups, size, l2_cache(self.device))
            if section and max(blocks, groups // section) <= MOST_PROGRAMS:
                return section * share, blocks, groups // section
        return (blocks * groups * share,)


def empty_outputs(
    query: Tensor, value: Tensor, separate_max: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Make uninitialised output [B, H, Sq, DV], lse [B, H, Sq] and statistics [B, H, Sq, 2], or [0]
    if the backward computes P from lse alone.
    """
    output = heads_like(query, query.shape[1], value.shape[3])
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = query.shape[:3]
    statistics = query.new_empty((*rows, 2), dtype=dtype) if separate_max else query.new_empty(0)
    return output, query.new_empty(rows, dtype=dtype), statistics


def _layouts(query: Tensor, outputs: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    """Return (shape, stride, options of new_empty_strided) for each output."""
    other = [{} if x.dtype == query.dtype else {"dtype": x.dtype} for x in outputs]
    return [(x.shape, x.stride(), dtype) for x, dtype in zip(outputs, other)]


class ForwardPlan(Plan):
    """The forward, and the layout of its outputs."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> None:
        super().__init__(query, key, value, attention)
        outputs = empty_outputs(query, value, self.separate_max)
        self.outputs = _layouts(query, outputs)
        has = self.has._replace(sink=attention.sinks is not None)
        strides = self.strides(outputs[0])
        self.gluon = gluon_for(self, ["forward"], (query, key, value), attention)
        self.choose_bounds("forward", attention)
        self.add("forward", forward_kernel, self.rows, has, output_strides=strides)
        self.forward = self.launch["forward"]
        if attention.cu_seqlens_q is not None:
            self.tail = tail_launch(attention.cu_seqlens_q, outputs)


class DecodePlan(Plan):
    """The split-KV forward: a kernel over parts of the keys, and a kernel that merges the parts.

    The query heads of a key-value head share a tile, unless a mask or a bias of keys differs from
    head to head: a key that is masked for one head may hold anything, which must not reach it.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> None:
        super().__init__(query, key, value, attention)
        self.tile = self.tile._replace(recompute_masked=False)
        given = self.arguments["strides"]
        heads = self.arguments["sizes"].group
        if 1 in (self.has.mask * (given.mask_head != 0), self.has.bias * (given.bias_head != 0)):
            heads = 1
        self.batch_heads = self.batch * self.heads // max(1, heads)
        self.tile_rows = heads * self.q_length
        outputs = empty_outputs(query, value, self.separate_max)
        self.outputs = _layouts(query, outputs)
        tiles = self.tiles("decode")
        blocks = triton.cdiv(self.tile_rows, tiles.BM) * self.batch_heads
        # Where the band hides keys, those that are seen may lie in one tile more.
        count = triton.cdiv(self.keys(), tiles.BN) + (self.keys() < self.k_length)
        split = Split(heads, parts_of_keys(count, blocks, processors(self.device)))
        programs = blocks * split.parts
        self.read = (key.numel() + value.numel()) * key.element_size()
        self.choose_bounds("decode", attention)
        self.add("decode", split_kernel, lambda *_: (programs,), self.has, split=split)
        rows = self.batch * self.heads * self.q_length
        self.partial = (rows, split.parts, self.tile.value_dim), (rows, split.parts, 2)
        most = min(16, max(2, next_power_of_2(split.parts)))
        own = dict(
            output_strides=RowStrides(*outputs[0].stride()[:3]),
            sizes=self.arguments["sizes"],
            parts=split.parts,
            tile=constants(self.tile._replace(rows=most)),
            has=constants(self.has._replace(sink=attention.sinks is not None)),
        )
        self.launch["merge"] = Launch(merge_kernel, (rows,), own, warps=4)
        self.split, self.merge = self.launch["decode"], self.launch["merge"]

    def tiles(self, kernel: str) -> AttentionTiles:
        sizes = self.tile_rows, self.keys(), self.batch_heads
        return narrowed(super().tiles(kernel), *sizes, processors(self.device))

    def may_read(self, source: Source) -> bool:
        """Return whether the heads of a tile share the mask."""
        return source.sizes.heads == 1

    def bounds_pay(self, source: Source) -> bool:
        """Return whether the keys and values that the bounds may leave out are worth a launch."""
        return self.arch == "interpreter" or self.read >= DECODE_BOUNDS_PAY

    def is_slower(self) -> bool:
        """Return whether the forward kernel was measured to be faster for calls like this."""
        ways = ["split", "forward"]
        key = TuningKey("attention split-KV", self.case, ways[0], lambda: ways)
        return choose(self.device, key) != ways[0]

    def keys(self) -> int:
        """Return how many keys the queries of a head can see at most."""
        return min(self.k_length, sum(self.arguments["band"]) + self.q_length)

    def forward(self, inputs, output, lse, statistics, sinks, optional) -> None:
        """Launch both kernels."""
        sums, weights = map(lse.new_empty, self.partial)
        self.split(inputs, sums, weights, optional)
        self.merge(sums, weights, output, lse, statistics, sinks)


class BackwardPlan(Plan):
    """The backward kernels that a call needs.

    `bias_grad` says how the gradient of the bias is computed:
        "tile"  by a kernel of its own, or with dQ if no sequences and heads share the bias
        "key"   a bias that is the same for all queries: with dK and dV
        "row"   a bias that is the same for all keys: from dlse and the weight of the sink
        ""      it is not needed
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
        grads: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__(query, key, value, attention)
        wide = self.tile.wide or _spans_int32(grad_output, output, *(grads or ()))
        self.tile = self.tile._replace(wide=wide)
        self.bias_grad = bias_grad(needs[3], attention.bias, key.shape[2])
        like = grads or [heads_like(x, x.shape[1], x.shape[3]) for x in (query, key, value)]
        self.grads = [(x.shape, x.stride()) for x in like]
        dq, dk, dv = (self.strides(x) for x in like)
        do = self.strides(grad_output)
        self.steps += (*do, *dq, *dk, *dv)
        bias, scores = attention.bias, self.batch * self.heads * self.q_length * self.k_length
        unshared = bias is not None and bias.numel() == scores
        self.own_bias_grad = self.bias_grad == "tile" and unshared
        self.cut = any((self.has.left, self.has.right, self.has.lengths))
        self.key_rows = key.shape[2]
        tensors = query, key, value, grad_output
        self.gluon = gluon_for(self, ["dq", "dkdv"], tensors, attention)
        self.add_delta(grad_output, grad_lse, output)
        key_grad = self.bias_grad == "key"
        sink = attention.sinks is not None
        self.sink_grad, self.sink_weight = needs[4], sink and (needs[4] or self.bias_grad == "row")
        self.needs = (needs[0], *(needs[1] or needs[2] or key_grad,) * 2)
        if attention.cu_seqlens_q is not None:
            delta = torch.empty(query.shape[:3], device="meta")
            dbias = torch.empty(1, self.heads, self.key_rows, device="meta") if key_grad else None
            own_q, *own_k = (x if need else None for x, need in zip(like, self.needs))
            self.tail = tail_launch(attention.cu_seqlens_q, (own_q, delta), (*own_k, dbias))
        self.short: ShortLaunch | None = None
        self.short_obstacle = short_obstacle(self, needs, self.bias_grad, (query, key, value))
        self.one_kernel = self.choose_short()
        if self.one_kernel != SEPARATE:
            layouts = RowLayouts(self.strides(output), do, dq, dk, dv)
            self.short = ShortLaunch(self.one_kernel, self, layouts, grad_lse is not None)
        else:
            self.choose_bounds("backward", attention)
        self.cut |= self.source is not None or self.has.lists > 0
        if self.needs[1] and not self.short:
            strides = dict(dk_strides=dk, dv_strides=dv, do_strides=do)
            # One loop less, which spills.
            fewer = not self.tile.split or (self.has.dropout and self.head_block > 64)
            lists = max(2, self.has.lists) if self.has.lists and fewer else self.has.lists
            has = self.has._replace(key_grad=key_grad, lists=lists)
            self.add("dkdv", backward_dkdv_kernel, self.columns, has, **strides)
        self.dq_takes_bias = False  # whether its kernel takes the gradient of the bias, too
        if self.needs[0] and not self.short:
            strides = dict(dq_strides=dq, do_strides=do)
            kernel = self.add("dq", backward_dq_kernel, self.rows, self.has, **strides)
            self.dq_takes_bias = kernel is not backward_dq_kernel
        if self.bias_grad == "tile" and not (self.dq_takes_bias and self.own_bias_grad):
            assert attention.bias is not None
            self.add_dbias(attention.bias, query, do)

    def choose_short(self) -> str:
        """Return the kernel that computes dQ, dK and dV of a short call at once, or SEPARATE."""
        kernels = short_kernels(self)
        if not kernels or self.short_obstacle or on():
            return SEPARATE
        shipped = kernels[0] if pays(self) else SEPARATE
        key = TuningKey(SHORT_KEY, self.case, shipped, lambda: [*kernels, SEPARATE])
        chosen = choose(self.device, key)
        return chosen if chosen in kernels else SEPARATE

    def may_read(self, source: Source) -> bool:
        """Return whether the source is a mask: a bias that is learned hides nothing."""
        learned = source.name == "bias" and self.bias_grad
        return not learned and super().may_read(source)

    def add_delta(self, grad_output: Tensor, grad_lse: Tensor | None, output: Tensor) -> None:
        """Add the launch of delta, from tensors [B, H, Sq, DV] and [B, H, Sq]."""
        batch, heads, rows, _ = output.shape
        tiles = self.tiles("delta")
        own = dict(
            output_strides=RowStrides(*output.stride()[:3]),
            grad_strides=RowStrides(*grad_output.stride()[:3]),
            H=heads,
            Sq=rows,
            tile=constants(self.tile._replace(rows=tiles.BM)),
            HAS_DLSE=grad_lse is not None,
            SEPARATE_MAX=self.separate_max,
        )
        grid = (triton.cdiv(rows, tiles.BM) * batch * heads,)
        self.launch["delta"] = Launch(delta_kernel, grid, own, tiles.warps, tiles.stages)

    def add_dbias(self, bias: Tensor, query: Tensor, do_strides: RowStrides) -> None:
        """Add the launch that computes the gradient of a bias of queries and keys."""
        b, h, q, k = (1,) * (4 - bias.dim()) + tuple(bias.shape)
        strides = RowStrides(h * q * k * (b > 1), q * k * (h > 1), k)
        over = Over(query.shape[0] // max(1, b), query.shape[1] // max(1, h))

        def programs(tiles: AttentionTiles, has: Features) -> tuple[int, ...]:
            return (b * h * triton.cdiv(q, tiles.BM) * triton.cdiv(k, tiles.BN) * all(over),)

        own = dict(dbias_strides=strides, over=over, do_strides=do_strides)
        self.add("dbias", backward_dbias_kernel, programs, self.has, **own)

    def run(
        self, grad_output, grad_lse, output, lse, statistics, query, key, value, attention, grads
    ) -> tuple[Tensor, ...]:
        """Launch the kernels. Returns [dq, dk, dv, dbias, dsinks]; gradients that are not needed
        are empty. dq, dk and dv are `grads`, unless it is None.
        """
        bias, optional = attention.bias, optional_inputs(query, attention)
        dq, dk, dv = grads or (
            query.new_empty_strided(*grad) if needed else query.new_empty(0)
            for grad, needed in zip(self.grads, self.needs)
        )
        inputs, dlse = (query, key, value, grad_output), lse if grad_lse is None else grad_lse
        if self.short is not None:
            saved = output, lse, dlse, statistics if self.separate_max else lse
            self.short(inputs, saved, (dq, dk, dv), optional)
            packed = attention.cu_seqlens_q is not None
            if not (self.launch or self.sink_weight or self.bias_grad or packed):
                none = query.new_empty_strided((0,), (1,))
                return dq, dk, dv, none, none
        delta = torch.empty_like(lse)
        launch, given = self.launch, dict.fromkeys(self.launch, optional)
        if self.source is not None:
            # One after the other, so that the second may find the mask in the L2 cache.
            bounded = {n: x for n, x in launch.items() if isinstance(x, BoundedLaunch)}
            given |= {name: x.with_bounds(optional) for name, x in bounded.items()}
            launch = launch | {name: x.launch for name, x in bounded.items()}
        if len(launch) > 1 or self.sink_weight:
            if not self.separate_max:
                statistics = torch.empty_like(lse)
            launch["delta"](output, grad_output, dlse, lse, delta, statistics)
        dbias = self.room_for_dbias(query, lse, bias)
        none = query.new_empty(0) if dbias.numel() else dbias
        if "dkdv" in launch:
            of_keys = dbias if self.bias_grad == "key" else none
            launch["dkdv"](inputs, dk, dv, of_keys, statistics, delta, given["dkdv"])
        if "dq" in launch:
            outputs = (dq, dbias if self.own_bias_grad else none) if self.dq_takes_bias else (dq,)
            launch["dq"](inputs, *outputs, statistics, delta, given["dq"])
        if "dbias" in launch:
            launch["dbias"](inputs, dbias, statistics, delta, given["dbias"])
        if attention.cu_seqlens_q is not None:
            offsets = attention.cu_seqlens_q, attention.cu_seqlens_k
            self.tail((dq, delta, delta), (dk, dv, dbias), *offsets)
        others = self.shared_gradients(query, grad_lse, lse, statistics, delta, dbias, attention)
        return dq, dk, dv, *others

    def shared_gradients(
        self, query, grad_lse, lse, statistics, delta, dbias, attention
    ) -> tuple[Tensor, Tensor]:
        """Return (dbias, dsinks), given what the kernels wrote to dbias."""
        bias, dsinks, moved = attention.bias, query.new_empty(0), None
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
        return dbias, dsinks

    def room_for_dbias(self, query: Tensor, lse: Tensor, bias: Tensor | None) -> Tensor:
        """Return where kernels write the gradient of the bias. It is zero if none writes all."""
        if bias is None or self.bias_grad not in ("key", "tile"):
            return query.new_empty(0)
        if self.bias_grad == "key":
            return lse.new_empty(query.shape[0], self.heads, 1, self.key_rows)
        if query.numel() and ("dbias" in self.launch or not self.cut):
            return bias.new_empty(bias.shape)
        return bias.new_zeros(bias.shape)

    def moved(self, sinks: Tensor, lse: Tensor, statistics: Tensor, delta: Tensor) -> Tensor:
        """Return exp(sink - lse) delta of each row, [B, H, Sq]: minus its share of dsink."""
        sink = sinks.view(-1, 1).to(lse.dtype)
        if self.separate_max:
            peak, offset = statistics.unbind(-1)
            return torch.exp2(sink * LOG2E.value - peak + offset) * delta
        # A row whose lse is -inf has a sink of -inf, which has no weight.
        return torch.exp(sink - lse.clamp_min(torch.finfo(lse.dtype).min)) * delta


def bias_grad(needed: bool, bias: Tensor | None, k_length: int) -> str:
    """Return how the gradient of the bias is computed: see `BackwardPlan`."""
    if not needed or bias is None:
        return ""
    if (bias.dim() == 0 or bias.shape[-1] == 1) and k_length != 1:
        return "row"
    return "key" if bias.dim() < 2 or bias.shape[-2] == 1 else "tile"
