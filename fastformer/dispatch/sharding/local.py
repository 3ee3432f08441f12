"""Run an op on the shard of this device, or on some rows of a larger call."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fastformer.description import Attention, RowShard
from fastformer.description import Shard as AttentionShard
from fastformer.dispatch.operation import ROW_DIMS, Arguments
from fastformer.dispatch.sharding.call import Call, Run, holds_dtensor, require_group
from fastformer.dispatch.sharding.losses import sharded_loss

_PLANE_GROUP = 16  # attention and feed-forward: so many rows share random words of dropout


def run_local(inner: Run, call: Call, arguments: Arguments, first: int) -> Any:
    """Run the op on the shard of this device."""
    if call.op in ("cross_entropy", "linear_cross_entropy"):
        return sharded_loss(inner, call)
    if "block_table" in call.arguments or "is_causal" in call.arguments:
        return _attention(inner, call, arguments, first)
    if call.op == "embed" and "v" in call.ways:
        return _vocabulary(inner, call, first)
    own = dict(call.arguments)
    if call.op == "embed":
        own = _positions(call)
    if "f" in call.ways and own["b_2"] is not None:  # a partial sum: only one device adds it
        own["b_2"] = own["b_2"] * float(_is_first(call, "f"))
    return _by_rows(inner, call, own, first)


def _is_first(call: Call, letter: str) -> bool:
    return all(dist.get_rank(group) == 0 for group in call.groups(letter))


def _attention(inner: Run, call: Call, arguments: Arguments, first: int) -> Any:
    given, at = call.arguments, call.offsets
    fields = {name: given[name] for name in Attention._fields if name in given}
    attention = Attention(**fields)
    if first and call.op != "scaled_dot_product_attention":
        raise ValueError(
            f"{call.op} of a part of a batch; "
            "expected scaled_dot_product_attention, whose sequences are padded"
        )
    if attention.shard is None and (attention.dropout_p > 0 or "q" in at):
        whole, batch = call.sizes, at.get("b", 0) + first
        sizes = whole["h"], whole.get("q", 0), whole.get("k", 0)  # 0 if the batch is packed
        shard = AttentionShard(batch, at.get("h", 0), at.get("q", 0), 0, *sizes)
        if attention.dropout_p > 0:
            require_group(call, "q", _PLANE_GROUP, "queries")
        attention = attention._replace(shard=shard)
    own = {name: given.get(name, attention) for name in arguments}  # in the op's order
    return inner(call.op, **own)


def _positions(call: Call) -> Arguments:
    """Return the arguments of an embedding, with `positional` from the first local token on."""
    own, last = dict(call.arguments), ROW_DIMS[call.arguments["tokens"].dim() - 1]
    if own["positional"] is not None and last in call.offsets:
        own["positional"] = own["positional"][call.offsets[last] :]
    return own


def _vocabulary(inner: Run, call: Call, first: int) -> Tensor:
    """Return the embeddings of the tokens whose weight rows are local, and zeros for the others."""
    own, begin = _positions(call), call.offsets["v"]
    tokens, here = own["tokens"] - begin, own["weight"].shape[0]
    inside = (tokens >= 0) & (tokens < here)
    own["tokens"] = tokens.where(inside, 0)
    if own["padding_idx"] is not None:
        padding = own["padding_idx"] - begin
        own["padding_idx"] = padding if 0 <= padding < here else None
    return _by_rows(inner, call, own, first).masked_fill(~inside.unsqueeze(-1), 0.0)


def _by_rows(inner: Run, call: Call, own: Arguments, first: int) -> Any:
    """Run an op on rows, with the dropout mask that they have in the full tensor."""
    if not own.get("dropout_p") or (first == 0 and not call.offsets):
        return inner(call.op, **own)
    x = own["tokens" if call.op == "embed" else "input"]
    rows = [letter for letter in next(iter(call.letters.values())) if letter in ROW_DIMS]
    if first and len(rows) < 2:
        raise ValueError(
            f"{call.op} of [tokens, features] of a part of a batch; expected [B, S, features]"
        )
    require_group(call, "f" if "w_2" in own else "n", 16 if "w_2" in own else 4, "columns")
    column = call.offsets.get("f", call.offsets.get("n", 0))
    sizes = [call.sizes[letter] for letter in rows]
    begins = [call.offsets.get(letter, 0) for letter in rows]
    begins[:1] = [b + first for b in begins[:1]]
    begin = sum(b * math.prod(sizes[i + 1 :]) for i, b in enumerate(begins))
    cut = max((i for i, letter in enumerate(rows) if letter in call.ways), default=0)
    if any(letter in call.ways for letter in rows[1:cut]):
        raise ValueError(
            f"{call.op} with dropout of rows split over dimensions {', '.join(call.ways)}; "
            "expected the first one, and one other"
        )
    if not math.prod(x.shape[: len(rows)]):  # there are no local rows
        return inner(call.op, **own)
    if cut == 0 or math.prod(x.shape[:cut]) == 1:
        return _aligned(inner, call.op, own, RowShard(begin, column))
    run, sequence = math.prod(x.shape[cut : len(rows)]), math.prod(sizes[cut:])
    return _in_runs(inner, call.op, own, RowShard(begin, column, 0, run, sequence), cut)


def _in_runs(inner: Run, op: str, own: Arguments, shard: RowShard, cut: int) -> Any:
    """Run an op on a run of rows of each sequence.

    cut: the number of leading dimensions that count sequences; the rows of a run follow them.
    """
    begin, column, _, run, sequence = shard
    # In the feed-forward, groups of 16 rows share random words. Runs that are not aligned with the
    # groups run one sequence at a time.
    if "w_2" not in own or not (begin % 16 or run % 16 or sequence % 16):
        return inner(op, **{**own, "shard": shard})
    x = own["input"]
    parts = [
        _aligned(inner, op, own | {"input": part}, RowShard(at, column))
        for part, at in zip(x.flatten(0, cut - 1), itertools.count(begin, sequence))
    ]
    return torch.stack(parts).unflatten(0, x.shape[:cut])


def run_chunks(inner: Run, op: str, own: Arguments, first: int, context: Any) -> Any:
    """Run an op with dropout on sharded sequences, one chunk of `context_parallel` at a time. The
    first local sequence is sequence `first` of the full batch.
    """
    tokens = op == "embed"
    x = own["tokens" if tokens else "input"]
    cut = x.dim() - 1 if tokens else x.dim() - (1 if "w_2" in own else own["weight"].dim()) - 1
    if cut < 0:
        raise ValueError(f"{op} of one row within context_parallel; expected [.., S, features]")
    if holds_dtensor(own.values()):
        raise ValueError(f"{op} of DTensors within context_parallel; expected plain tensors")
    places = {"tokens": cut, "input": cut, "residual": cut, "positional": 0}
    places = {name: dim for name, dim in places.items() if own.get(name) is not None}
    sequence, several = context.whole(x.shape[cut]), math.prod(x.shape[:cut]) != 1
    outputs = []
    if not math.prod(x.shape[: cut + 1]):  # there are no local rows
        return inner(op, **{**own, "shard": RowShard()})
    for here, whole, length in context.chunks(x.shape[cut]):
        part = {name: own[name].narrow(dim, here, length) for name, dim in places.items()}
        shard = RowShard(first * sequence + whole, 0, 0, length, sequence)
        if several:
            outputs.append(_in_runs(inner, op, own | part, shard, cut))
        else:
            outputs.append(_aligned(inner, op, own | part, shard._replace(run=0, sequence=0)))
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs, cut)
    return tuple(torch.cat(parts, cut) for parts in zip(*outputs))


def _aligned(inner: Run, op: str, own: Arguments, shard: RowShard) -> Any:
    """Run an op on rows that are consecutive in the full tensor.

    In the feed-forward, groups of 16 rows share random words: if the first row is not the first of
    its group, rows of zeros go before it.
    """
    before = shard.row % _PLANE_GROUP if "w_2" in own else 0
    if not before:
        return inner(op, **{**own, "shard": shard})
    x = own["input"]
    padded = F.pad(x.reshape(-1, x.shape[-1]), (0, 0, before, 0))
    shard = shard._replace(row=shard.row - before)
    out = inner(op, **{**own, "input": padded, "shard": shard})
    return out[before:].view(*x.shape[:-1], -1)
