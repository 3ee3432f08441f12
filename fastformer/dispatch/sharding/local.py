"""Run an op on the shard of this device, or on some sequences of a larger batch."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastformer.description import Attention, RowShard
from fastformer.description import Shard as AttentionShard
from fastformer.dispatch.operation import ROW_DIMS, Arguments
from fastformer.dispatch.sharding.call import Call, Run, require_group
from fastformer.dispatch.sharding.losses import sharded_loss

_TILE_ROWS = 16  # attention and feed-forward draw random words for so many rows at a time


def run_local(inner: Run, call: Call, arguments: Arguments, first: int) -> Any:
    """Run the op on the shard of this device."""
    if call.op in ("cross_entropy", "linear_cross_entropy"):
        return sharded_loss(inner, call)
    if "block_table" in call.arguments or "is_causal" in call.arguments:
        return _run_attention(inner, call, arguments, first)
    if call.op == "embed" and "v" in call.sharded_dims:
        return _embed_local_vocabulary(inner, call, first)
    own = _with_local_positions(call) if call.op == "embed" else dict(call.arguments)
    if "f" in call.sharded_dims and own.get("b_2") is not None:  # a partial sum
        # One device adds the bias.
        is_first = all(dist.get_rank(group) == 0 for group in call.groups("f"))
        own["b_2"] = own["b_2"] * float(is_first)
    return _run_rows(inner, call, own, first)


def _run_attention(inner: Run, call: Call, arguments: Arguments, first: int) -> Any:
    given, offsets = call.arguments, call.offsets
    fields = {name: given[name] for name in Attention._fields if name in given}
    attention = Attention(**fields)
    if first and call.op != "scaled_dot_product_attention":
        raise ValueError(
            f"{call.op} within sequences_from({first}); expected scaled_dot_product_attention, "
            "which takes padded sequences"
        )
    if "q" in offsets and attention.mask_spans is not None:
        raise ValueError(
            f"{call.op} is sharded over the queries, and attn_mask is a BlockMask; "
            "expected a tensor"
        )
    if attention.shard is None and (attention.dropout_p > 0 or "q" in offsets):
        batch, sizes = offsets.get("b", 0) + first, call.sizes
        full = sizes["h"], sizes.get("q", 0), sizes.get("k", 0)  # 0 if the batch is packed
        shard = AttentionShard(batch, offsets.get("h", 0), offsets.get("q", 0), 0, *full)
        if attention.dropout_p > 0:
            require_group(call, "q", _TILE_ROWS, "queries")
        attention = attention._replace(shard=shard)
    own = {name: given.get(name, attention) for name in arguments}  # in the op's order
    return inner(call.op, **own)


def _with_local_positions(call: Call) -> Arguments:
    """Return the arguments of an embedding, with `positional` from the first local token on."""
    own, last = dict(call.arguments), ROW_DIMS[call.arguments["tokens"].dim() - 1]
    if own["positional"] is not None and last in call.offsets:
        own["positional"] = own["positional"][call.offsets[last] :]
    return own


def _embed_local_vocabulary(inner: Run, call: Call, first: int) -> Tensor:
    """Return the embeddings of the tokens whose weight rows are local, and zeros for the others."""
    own, begin = _with_local_positions(call), call.offsets["v"]
    tokens, here = own["tokens"] - begin, own["weight"].shape[0]
    inside = (tokens >= 0) & (tokens < here)
    own["tokens"] = tokens.where(inside, 0)
    if own["padding_idx"] is not None:
        padding = own["padding_idx"] - begin
        own["padding_idx"] = padding if 0 <= padding < here else None
    return _run_rows(inner, call, own, first).masked_fill(~inside.unsqueeze(-1), 0.0)


def _run_rows(inner: Run, call: Call, own: Arguments, first: int) -> Any:
    """Run an op on rows, with the dropout mask that they have in the full tensor."""
    if not own.get("dropout_p") or (first == 0 and not call.offsets):
        return inner(call.op, **own)
    x = own["tokens" if call.op == "embed" else "input"]
    rows = [dim for dim in next(iter(call.dims.values())) if dim in ROW_DIMS]
    if first and len(rows) < 2:
        raise ValueError(
            f"{call.op} of [tokens, features] within sequences_from({first}); "
            "expected [B, S, features]"
        )
    if "w_2" in own:
        require_group(call, "f", 16, "hidden units")
    else:
        require_group(call, "n", 4, "features")
    column = call.offsets.get("f", call.offsets.get("n", 0))
    sizes = [call.sizes[dim] for dim in rows]
    begins = [call.offsets.get(dim, 0) for dim in rows]
    begins[:1] = [b + first for b in begins[:1]]
    begin = sum(b * math.prod(sizes[i + 1 :]) for i, b in enumerate(begins))
    last = max((i for i, dim in enumerate(rows) if dim in call.sharded_dims), default=0)
    if any(dim in call.sharded_dims for dim in rows[1:last]):
        raise ValueError(
            f"{call.op} with dropout is sharded over the dimensions "
            f"{', '.join(call.sharded_dims)} of its input; expected the first and at most one more"
        )
    if not math.prod(x.shape[: len(rows)]):  # there are no local rows
        return inner(call.op, **own)
    if last == 0 or math.prod(x.shape[:last]) == 1:
        return _run_consecutive(inner, call.op, own, RowShard(begin, column))
    run, sequence = math.prod(x.shape[last : len(rows)]), math.prod(sizes[last:])
    return _run_sequences(inner, call.op, own, RowShard(begin, column, 0, run, sequence), last)


def _run_sequences(inner: Run, op: str, own: Arguments, shard: RowShard, leading: int) -> Any:
    """Run an op on consecutive rows of each sequence; `leading` dimensions count the sequences."""
    begin, column, _, run, sequence = shard
    # If a sequence does not begin at a multiple of `_TILE_ROWS`, they run one at a time.
    if "w_2" not in own or not (begin % 16 or run % 16 or sequence % 16):
        return inner(op, **{**own, "shard": shard})
    x = own["input"]
    outputs = [
        _run_consecutive(inner, op, own | {"input": rows}, RowShard(row, column))
        for rows, row in zip(x.flatten(0, leading - 1), itertools.count(begin, sequence))
    ]
    return torch.stack(outputs).unflatten(0, x.shape[:leading])


def run_chunks(inner: Run, op: str, own: Arguments, first: int, context: Any) -> Any:
    """Run an op with dropout on the chunks of sharded sequences; the first is number `first`."""
    tokens = op == "embed"
    x = own["tokens" if tokens else "input"]
    dim = x.dim() - 1 if tokens else x.dim() - (1 if "w_2" in own else own["weight"].dim()) - 1
    if dim < 0:
        raise ValueError(f"{op} of one row within context_parallel; expected [.., S, features]")
    if any(isinstance(x, DTensor) for x in own.values()):
        raise ValueError(f"{op} of DTensors within context_parallel; expected plain tensors")
    row_dims = {"tokens": dim, "input": dim, "residual": dim, "positional": 0}
    row_dims = {name: i for name, i in row_dims.items() if own.get(name) is not None}
    sequence = context.unpadded_length(x.shape[dim])
    outputs = []
    if not math.prod(x.shape[: dim + 1]):  # there are no local rows
        return inner(op, **{**own, "shard": RowShard()})
    for chunk in context.chunks(x.shape[dim]):
        local = {n: own[n].narrow(i, chunk.local_start, chunk.length) for n, i in row_dims.items()}
        row = first * sequence + chunk.global_start
        if math.prod(x.shape[:dim]) != 1:
            shard = RowShard(row, 0, 0, chunk.length, sequence)
            outputs.append(_run_sequences(inner, op, own | local, shard, dim))
        else:
            outputs.append(_run_consecutive(inner, op, own | local, RowShard(row)))
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs, dim)
    return tuple(torch.cat(chunks, dim) for chunks in zip(*outputs))


def _run_consecutive(inner: Run, op: str, own: Arguments, shard: RowShard) -> Any:
    """Run an op on rows that are consecutive in the full tensor. In the feed-forward rows of zeros
    go before a first row that is not at a multiple of `_TILE_ROWS`.
    """
    before = shard.row % _TILE_ROWS if "w_2" in own else 0
    if not before:
        return inner(op, **{**own, "shard": shard})
    x = own["input"]
    padded = F.pad(x.reshape(-1, x.shape[-1]), (0, 0, before, 0))
    shard = shard._replace(row=shard.row - before)
    out = inner(op, **{**own, "input": padded, "shard": shard})
    return out[before:].view(*x.shape[:-1], -1)
