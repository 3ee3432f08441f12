"""Context parallelism: attention over sequences that are sharded over the processes of a mesh.

    all-to-all    Each process gets some heads of the full sequences, computes their attention, and
                  returns the rows to their processes (Jacobs et al. 2023, "DeepSpeed Ulysses"). The
                  rows of query, key, value and output are sent once.
    ring          Keys and values pass from process to process. Each process computes the attention
                  of its own queries to them, and merges the results (Liu et al. 2023, "Ring
                  Attention with Blockwise Transformers"). The next keys arrive during this.

Each block is a call of the op with a `Shard`, which has the block's global offsets: so causality,
windows, lengths, ALiBi and dropout are the same as in one process. Block s of the keys has the
output o_s, the largest score m_s and l_s = sum_j exp(score_j - m_s). m_s and log l_s are kept
separate, because their sum, the lse, is rounded: if m_s is large, l_s would be lost.
    m = max_s m_s      w_s = l_s exp(m_s - m)      l = sum_s w_s      o = sum_s w_s o_s / l
For the backward, the ring saves only the rows of its own process, with o, m and l. The backward
passes keys and values around again, followed by the sums of their gradients. The gradient of a
block is the backward of the op, given the o, m and l of all keys: no forward is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastformer import checks
from fastformer.description import OPTIONS, Attention, Shard, beyond_torch
from fastformer.dispatch import backends
from fastformer.distributed.parallelize import require_process_group

METHODS = ("auto", "all-to-all", "ring")


class Chunk(NamedTuple):
    """Consecutive rows of a sequence, from `local_start` in this process, `global_start` in all."""

    local_start: int
    global_start: int
    length: int

    @property
    def rows(self) -> slice:
        return slice(self.local_start, self.local_start + self.length)


class context_parallel:
    """A context in which the ops, and the models of this package, run on shards of sequences.

        with ff.context_parallel(mesh) as context:
            tokens = context.shard(tokens, 1)           # the tokens of this process
            y = model(tokens, mask)                     # and the model's output for them
            y = context.gather(y, 1)

    Attention sees the keys of all processes, embeddings use global positions, and dropout uses the
    mask of the full sequences. In a tensor [.., S, features], the second-to-last dimension is the
    sequence dimension. Ops on single tokens run unchanged. A summed loss is the sum over the tokens
    of the process.

    Each process calls attention with its rows of query, key and value, [B, H, Sq / n, D] and
    [B, G, Sk / n, D], and gets its rows of the output. `attn_mask` and `bias` have the rows of the
    process and the keys of the full sequences, in global order; `key_lengths` are the lengths of
    the full sequences; the other arguments are the same in each process. Attention uses the dropout
    seed of the first process. The other ops draw the seed in each process, and therefore all
    generators must have the same state. A call that already has a `shard` runs unchanged.

    For tensors that are the same in all processes, such as sinks or a bias over keys, each process
    gets one term of the gradient: sum the terms over the mesh, as for parameters. The ring has no
    second derivative. All processes must run the same calls, forward and backward: if one process
    leaves out a call, the others wait for it forever.

    The context applies to all threads of the process, because the threads of autograd need it. If
    activations are checkpointed, the backward runs the ops again: run it within the context, and
    within the same `of_length`.

    Args:
        mesh: a `DeviceMesh` of one dimension, with n processes.
        balanced: if True, cut sequences into 2 n chunks, and give process r the chunks r and
            2 n - 1 - r, so that all processes have the same work with causal attention; if False,
            cut them into n chunks, and give process r chunk r.
        method: "all-to-all", which requires that n divides the numbers of heads H and G, and that
            a mask or bias has no rows; "ring"; or "auto", which is all-to-all if possible.
        shard: the sequences and heads of this mesh, `Shard(batch, head, heads=H)`, if the batch or
            the heads are sharded over other dimensions of a larger mesh.

    Raises:
        ValueError: the mesh has several dimensions; a length does not divide into chunks; with
            dropout, chunks are not multiples of 16; method="all-to-all" and n does not divide the
            heads, or a mask or bias has rows; the method is unknown.
        RuntimeError: there is no process group.

    Source: Jacobs et al. 2023, "DeepSpeed Ulysses", section 3; Liu et al. 2023, "Ring Attention
    with Blockwise Transformers"; the balance: Brandon et al. 2023, "Striped Attention", after
    "zigzag" of zhuzilin/ring-flash-attention.
    """

    def __init__(
        self, mesh: Any, *, balanced: bool = True, method: str = "auto", shard: Shard | None = None
    ) -> None:
        require_process_group()
        if getattr(mesh, "ndim", None) != 1:
            raise ValueError(f"mesh is {mesh!r}; expected a DeviceMesh of one dimension")
        self.group = mesh.get_group()
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self.balanced = checks.require_flag("balanced", balanced)
        self.method = checks.require_choice("method", method, METHODS)
        self.within = shard or Shard()
        self._ranks = dist.get_process_group_ranks(self.group)
        self._before: list[Any] = []
        self._length: int | None = None

    def __enter__(self) -> context_parallel:
        self._before.append(backends.shard_sequences(self))
        return self

    def __exit__(self, *error: object) -> None:
        backends.shard_sequences(self._before.pop())

    # ------------------------------------------------------------------------------ the layout

    def chunks(self, length: int, rank: int | None = None) -> list[Chunk]:
        """Return the chunks of a process, by default this one, that has `length` rows."""
        r, n = self.rank if rank is None else rank, self.size
        if not self.balanced:
            return [Chunk(0, r * length, length)]
        half = length // 2
        return [Chunk(0, r * half, half), Chunk(half, (2 * n - 1 - r) * half, half)]

    def positions(self, length: int, device: Any = None, rank: int | None = None) -> Tensor:
        """Return the global indices of the `length` rows of a process, by default this one."""
        spans = [(c.global_start, c.global_start + c.length) for c in self.chunks(length, rank)]
        return torch.cat([torch.arange(*span, device=device) for span in spans])

    @contextmanager
    def of_length(self, length: int) -> Iterator[None]:
        """Return a context in which sequences have `length` tokens, and the rest is padding.

        Dropout then uses the mask of [B, length, features] instead of the padded tensor's mask.
        Raises ValueError and TypeError for an invalid length.
        """
        [length] = checks.require_size(length=length)
        before, self._length = self._length, length
        try:
            yield
        finally:
            self._length = before

    def unpadded_length(self, length: int) -> int:
        """Return the length of the full sequences, of which each process has `length` tokens.

        Within `of_length`, it is the length without the padding.
        """
        if self._length is None:
            return self.size * length
        if self._length > self.size * length:
            raise ValueError(
                f"{self.size} processes have {length} tokens each, {self.size * length} in all; "
                f"expected at least the {self._length} of of_length({self._length})"
            )
        return self._length

    def rows_of(self, name: str, table: Tensor, length: int) -> Tensor:
        """Return a table's rows for the `length` tokens of this process; for padding, any rows."""
        full_length = self.unpadded_length(length)
        if full_length > table.shape[0]:
            raise ValueError(
                f"{name} has {table.shape[0]} positions; expected at least {full_length}, one for "
                "each token of the full sequences"
            )
        positions = self.positions(length, table.device)
        return table.index_select(0, positions.clamp(max=full_length - 1))

    def pad(self, x: Tensor, dim: int, value: float) -> Tensor:
        """Return x padded at the end of dimension `dim`: chunks of multiples of 16, for dropout."""
        checks.require_tensor("x", x)
        more = -x.shape[dim] % (16 * self.size * (1 + self.balanced))
        shape = [more if i == dim % x.dim() else n for i, n in enumerate(x.shape)]
        return torch.cat([x, x.new_full(shape, value)], dim) if more else x

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """Return the rows of x for this process; dimension `dim` of x is the full sequence."""
        checks.require_tensor("x", x)
        chunks = self.size * (1 + self.balanced)
        if x.shape[dim] % chunks:
            raise ValueError(
                f"x has {x.shape[dim]} rows in dimension {dim}; expected a multiple of {chunks}, "
                f"the number of chunks for {self.size} processes"
            )
        return x.index_select(dim, self.positions(x.shape[dim] // self.size, x.device))

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the full sequence, given the shard x of each process, without gradient."""
        checks.require_tensor("x", x)
        shards = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in self._ranks]
        dist.all_gather(shards, x.detach().contiguous(), group=self.group)
        return self._in_order(torch.cat(shards, dim), dim)

    def _in_order(self, x: Tensor, dim: int, back: bool = False) -> Tensor:
        """Reorder rows from the order of the processes to the global order, or back."""
        if not self.balanced:
            return x
        length = x.shape[dim] // self.size
        order = torch.cat([self.positions(length, x.device, rank) for rank in range(self.size)])
        return x.index_select(dim, order if back else order.argsort())

    # ---------------------------------------------------------------------------- the attention

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention: Attention,
        return_lse: bool,
        first: int | None = None,
    ) -> Any:
        """Compute a checked `scaled_dot_product_attention` over the full sequences for the queries
        of this process. `first` is the argument of `sequences_from`.
        """
        self._require(query, key, value, attention.dropout_p)
        if attention.dropout_seed is not None:
            seed = attention.dropout_seed.clone()
            dist.broadcast(seed, self._ranks[0], group=self.group)
            attention = attention._replace(dropout_seed=seed)
        plan = _Plan(self, query, key, attention, first)
        if self.method == "all-to-all" and plan.unsupported is not None:
            raise ValueError(f"{plan.unsupported}; expected method='ring' or 'auto'")
        if self.size == 1 or not plan.keys:  # there is nothing to exchange
            out, lse = plan.op((query, key, value), attention._replace(shard=plan.shard))
        elif plan.unsupported is None and self.method != "ring":
            out, lse = plan.by_heads(query, key, value)
        else:
            tensors = query, key, value, plan.attention.bias, attention.sinks
            out, lse = _Ring.apply(plan, *tensors)
        return (out, lse) if return_lse else out

    def _require(self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> None:
        for name, x in (("query", query), ("key", key), ("value", value)):
            if backends.is_dtensor(x):
                raise ValueError(
                    f"{name} is a DTensor within context_parallel; expected a plain tensor"
                )
            step = (1 + self.balanced) * (16 if dropout_p else 1)
            if x.shape[2] % step:
                raise ValueError(
                    f"{name} has {x.shape[2]} rows in this process; "
                    f"expected a multiple of {step}{' with dropout' if dropout_p else ''}"
                )

    def pass_on(self, *tensors: Tensor) -> tuple[list[Tensor], list[Any]]:
        """Send tensors on; return those of the previous process, and the works to wait for."""
        received = [torch.empty_like(x) for x in tensors]
        after, before = (self._ranks[(self.rank + step) % self.size] for step in (1, -1))
        works = [dist.P2POp(dist.isend, x, after, self.group) for x in tensors]
        works += [dist.P2POp(dist.irecv, x, before, self.group) for x in received]
        return received, dist.batch_isend_irecv(works)


class _Plan:
    """What all blocks of a call of attention have in common."""

    def __init__(
        self,
        context: context_parallel,
        query: Tensor,
        key: Tensor,
        attention: Attention,
        first: int | None,
    ) -> None:
        self.context = context
        self.heads, self.groups = query.shape[1], key.shape[1]
        self.queries, self.keys = (x.shape[2] * context.size for x in (query, key))
        bias, within = attention.bias, context.within
        # The kernels compute the gradient of a bias that is the same for all keys from dlse, which
        # gives the full gradient in each block. With an expanded bias, each block gives the
        # gradient for its own keys.
        if bias is not None and bias.shape[-1:] in ((), (1,)):
            attention = attention._replace(bias=bias.expand(*bias.shape[:-1], self.keys))
        self.attention = attention
        if attention.dropout_p == 0:  # only dropout depends on sequence and head
            within, first = Shard(), 0
        batch, heads = within.batch if first is None else first, within.heads or self.heads
        self.shard = Shard(batch, within.head, 0, 0, heads, self.queries, self.keys)
        self.unsupported = self._unsupported_reason()

    def _unsupported_reason(self) -> str | None:
        """Return why all-to-all cannot compute the call, or None."""
        n = self.context.size
        if self.heads % n or self.groups % n:
            return f"{n} processes do not divide {self.heads} heads in {self.groups} groups"
        for name in ("attn_mask", "bias"):
            x = getattr(self.attention, name)
            if x is not None and x.dim() > 1 and (x.shape[-2] > 1 or self.queries == n):
                return f"{name} has shape {checks.shape_of(x)}, with a dimension for the queries"
        return None

    @staticmethod
    def op(inputs: Sequence[Tensor], attention: Attention) -> tuple[Tensor, Tensor]:
        """Call the op on some heads or rows of query, key and value. Return (output, lse)."""
        arguments = dict(zip(("query", "key", "value"), inputs))
        return backends.run(
            "scaled_dot_product_attention", **arguments, attention=attention, return_lse=True
        )

    def by_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the attention by all-to-all: each process has some heads of all rows."""
        context, heads = self.context, self.heads // self.context.size
        first = context.rank * heads
        own: dict[str, Any] = {}
        for option in OPTIONS:
            x, dim = getattr(self.attention, option.name), option.dims[::-1].find("h") + 1
            if dim and x is not None and x.dim() >= dim and x.shape[-dim] > 1:
                own[option.name] = x.narrow(-dim, first, heads)
        inputs = [
            context._in_order(_Exchange.apply(x, context, True), 2) for x in (query, key, value)
        ]
        own["shard"] = self.shard._replace(head=self.shard.head + first)
        if not self.attention.dropout_p:
            own["shard"] = Shard(0, 0, 0, 0, heads, self.queries, self.keys)
        out, lse = self.op(inputs, self.attention._replace(**own))
        out, lse = (
            _Exchange.apply(context._in_order(x, 2, back=True), context, False)
            for x in (out, lse.unsqueeze(3))
        )
        return out, lse.squeeze(3)

    def blocks(self, owner: int, query: Tensor, key: Tensor) -> list[tuple[Chunk, Chunk]]:
        """Return the blocks of scores: pairs of a local chunk of queries and a chunk of keys of
        process `owner` that the queries may see.

        If attention does not depend on positions, return one pair of all queries and all keys.
        """
        if not self.attention.is_causal and set(beyond_torch(self.attention)) <= {"softcap"}:
            return [(Chunk(0, 0, query.shape[2]), Chunk(0, 0, key.shape[2]))]
        return [
            (q, k)
            for q in self.context.chunks(query.shape[2])
            for k in self.context.chunks(key.shape[2], owner)
            if self._may_see(q, k)
        ]

    def _may_see(self, q: Chunk, k: Chunk) -> bool:
        a = self.attention
        if a.sinks is not None and k.global_start == 0:  # the first keys take the sinks
            return True
        shift = 0
        if a.causal_alignment == "bottom_right":
            if a.key_lengths is not None:
                return True
            shift = self.keys - self.queries
        left, right = (-1, -1) if a.window is None else a.window
        if a.is_causal:
            right = 0
        if right >= 0 and k.global_start > q.global_start + q.length - 1 + shift + right:
            return False
        return left < 0 or k.global_start + k.length - 1 >= q.global_start + shift - left

    def attention_of(self, q: Chunk, k: Chunk) -> Attention:
        """Return the `Attention` of a chunk of queries to a chunk of keys."""
        a = self.attention
        return a._replace(
            attn_mask=self.block_of(a.attn_mask, q, k),
            bias=self.block_of(a.bias, q, k),
            sinks=a.sinks if k.global_start == 0 else None,
            shard=self.shard._replace(query=q.global_start, key=k.global_start),
        )

    def block_of(self, x: Tensor | None, q: Chunk, k: Chunk) -> Tensor | None:
        """Return the block of a mask or bias, whose rows are local and whose keys are global."""
        if x is None:
            return None
        if x.dim() > 1 and x.shape[-2] > 1:
            x = x.narrow(-2, q.local_start, q.length)
        return x.narrow(-1, k.global_start, k.length) if x.dim() and x.shape[-1] > 1 else x


class _Exchange(torch.autograd.Function):
    """All-to-all from the local rows of all heads, [B, H, S / n, D], to all rows of the local
    heads, [B, H / n, S, D], in the order of the processes; or back, which is the gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: context_parallel, to_heads: bool) -> Tensor:
        ctx.context, ctx.to_heads = context, to_heads
        n, dim = context.size, 1 if to_heads else 2
        sent = torch.stack(x.chunk(n, dim))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=context.group)
        return torch.cat(received.unbind(), 3 - dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.apply(grad, ctx.context, not ctx.to_heads), None, None


class Merged:
    """Merge the attention of queries to blocks of keys, which are added one by one."""

    def __init__(self, query: Tensor, width: int) -> None:
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        rows, self.unit = query.shape[:3], 1.0
        self.sums = query.new_zeros(*rows, width, dtype=wide)  # sum_s w_s o_s
        self.total = query.new_zeros(rows, dtype=wide)
        self.peak = query.new_full(rows, torch.finfo(wide).min, dtype=wide)

    def add(self, rows: slice, output: Tensor, peak: Tensor, total: Tensor, unit: float) -> None:
        """Add the results of `backends.attention_block` for a block of keys to these rows."""
        self.unit = unit
        sums, totals, peaks = (x[:, :, rows] for x in (self.sums, self.total, self.peak))
        peak = peak.where(total != 0, -torch.inf)  # for no keys, it may be any number
        highest = torch.maximum(peaks, peak)
        kept, weight = ((peaks - highest) * unit).exp(), total * ((peak - highest) * unit).exp()
        sums.mul_(kept.unsqueeze(-1)).add_(output * weight.unsqueeze(-1))
        totals.mul_(kept).add_(weight)
        peaks.copy_(highest)

    def outputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the `outputs` of `backends.attention_gradients`, the first of them not rounded."""
        log_sum, empty = self.total.log(), self.total == 0
        output = self.sums / self.total.masked_fill(empty, 1.0).unsqueeze(-1)
        offset = (-log_sum / self.unit).masked_fill(empty, -torch.inf)
        statistics = torch.stack([self.peak, offset], -1)
        return output, self.peak * self.unit + log_sum, statistics


class _Ring(torch.autograd.Function):
    """Ring attention: (output [B, H, Sq / n, Dv], lse [B, H, Sq / n])."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: _Plan,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        context = plan.context
        merged = Merged(query, value.shape[3])
        now: list[Tensor] = [key.contiguous(), value.contiguous()]
        for step in range(context.size):
            owner = (context.rank - step) % context.size
            last = step + 1 == context.size
            coming, works = (now, []) if last else context.pass_on(*now)
            for q, k in plan.blocks(owner, query, key):
                rows, keys = q.rows, k.rows
                inputs = query[:, :, rows], *(x[:, :, keys] for x in now)
                merged.add(rows, *backends.attention_block(inputs, plan.attention_of(q, k)))
            for work in works:
                work.wait()
            now = coming
        ctx.plan, ctx.backend = plan, backends.current_backend()
        out, lse, statistics = merged.outputs()
        output = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, bias, sinks, output, lse, statistics)
        return output, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, sinks, *outputs = ctx.saved_tensors
        wide = outputs[1].dtype
        plan, context = ctx.plan, ctx.plan.context
        dq = torch.zeros_like(query, dtype=wide)
        dbias, dsinks = (
            None if x is None else torch.zeros_like(x, dtype=wide) for x in (bias, sinks)
        )
        now: list[Tensor] = [key.contiguous(), value.contiguous()]
        mine: list[Tensor] = []  # the gradients of the keys and values of this process
        arriving: list[Tensor] = []  # gradients of other keys, summed over previous processes
        back: list[Any] = []
        for step in range(context.size):
            owner = (context.rank - step) % context.size
            last = step + 1 == context.size
            coming, works = (now, []) if last else context.pass_on(*now)
            own = [torch.zeros_like(x, dtype=wide) for x in now]
            for q, k in plan.blocks(owner, query, key):
                rows, keys = q.rows, k.rows
                inputs = query[:, :, rows], *(x[:, :, keys] for x in now)
                of_rows = [[x[:, :, rows] for x in y] for y in (grads, outputs)]
                with backends.use_backend(ctx.backend):
                    found = backends.attention_gradients(
                        of_rows[0], inputs, plan.attention_of(q, k), of_rows[1]
                    )
                shared = plan.block_of(dbias, q, k), dsinks
                sums = dq[:, :, rows], *(x[:, :, keys] for x in own), *shared
                for total, gradient in zip(sums, found):
                    if total is not None and gradient is not None:
                        total += gradient
            for work in back:
                work.wait()
            own = [x + y for x, y in zip(own, arriving)] if arriving else own
            if step == 0:
                mine = own
            else:
                arriving, back = context.pass_on(*own)
            for work in works:
                work.wait()
            now = coming
        for work in back:
            work.wait()
        dk, dv = (x + y for x, y in zip(mine, arriving))
        results = zip((dq, dk, dv, dbias, dsinks), (query, key, value, bias, sinks))
        return None, *(None if g is None else g.to(x.dtype) for g, x in results)
