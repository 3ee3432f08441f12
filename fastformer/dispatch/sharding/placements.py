"""How the ops run on DTensors: each device computes its shard by the same op, and draws there the
dropout masks of the whole.

`backends.run` calls `run` where an argument is a DTensor. The rule in the record of an op names the
dimensions of each tensor by letters, as in an einsum, and the letters over which the op may be
split:

    scaled_dot_product_attention    query bhqd, key bhkd, value bhke -> bhqe    over b, h and q
    layer_norm                      input 012.., weight .. -> 012..             over the rows 0 1 2
    feed_forward                    input 012d, w_1 fd, w_2 of -> 012o          over f and the rows

For each dimension of the mesh the arguments' placements choose one letter. A tensor that has the
letter is then sharded there, and the others are replicated; what is split over a letter that the
output lacks is a partial sum. DTensor redistributes the arguments to these placements: it reduces
partial sums, and exchanges one sharded dimension for another. It gathers an argument in full only
where the rule says so - the tokens that enter a layer whose weights are sharded - and every other
such argument is refused by name. The gradients are those of DTensor: that of a sharded argument is
sharded, and that of a replicated one is summed over the devices.

The rules stand in front of both backends. torch's `register_sharding` would know the registered ops
of the kernels alone, and gives an op no way to learn where its shard begins.

Source: the placements: Shoeybi et al. 2019, "Megatron-LM", section 3; the split of the tokens:
Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section
4.2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fastformer.description import Attention, RowShard
from fastformer.description import Shard as AttentionShard
from fastformer.dispatch.operation import OPERATIONS, ROW_DIMS, Arguments, ShardingRule

Run = Callable[..., Any]  # `backends.run`
Placement = Any  # torch's, of which only some kinds have a `dim`
_PLANE_GROUP = 16  # rows, and columns, that share the words of dropout in the feed-forward


def holds_dtensor(values: Iterable[Any]) -> bool:
    """Say whether one of the arguments of an op is a DTensor."""
    return any(isinstance(x, DTensor) for x in flat(values))


def flat(values: Iterable[Any]) -> Iterable[Any]:
    """Yield the arguments of an op, and the fields of a description of attention among them."""
    for x in values:
        if isinstance(x, Attention):
            yield from x
        else:
            yield x


class Call(NamedTuple):
    """A call of an op, and how it is split.

    arguments: by name, the fields of a description of attention among them.
    ways: for each dimension of the mesh the letter that it splits, or "".
    sizes, offsets: of each letter the size of the whole, and the first index of this shard.
    """

    op: str
    arguments: Arguments
    letters: dict[str, str]
    mesh: DeviceMesh | None
    ways: tuple[str, ...]
    sizes: dict[str, int]
    offsets: dict[str, int]

    def groups(self, letter: str) -> list[dist.ProcessGroup]:
        """Return the groups of processes over which a letter is split."""
        assert self.mesh is not None
        return [self.mesh.get_group(i) for i, way in enumerate(self.ways) if way == letter]


def run(inner: Run, op: str, arguments: Arguments, first: int = 0) -> Any:
    """Run an op of which an argument is a DTensor, or whose first sequence is sequence `first` of a
    larger batch: `inner` runs the shard.

    Raises ValueError for an argument on another mesh, or sharded as the op cannot take it.
    """
    flattened = dict(arguments)
    described = flattened.pop("attention", None)
    if described is not None:
        flattened |= described._asdict()
    rule = OPERATIONS[op].sharding
    given = rule.dims(flattened)
    letters = {name: x for name, x in given.items() if flattened.get(name) is not None}
    mesh = _mesh_of(op, flattened)
    if flattened.get("shard") is not None and (mesh is not None or first):
        raise ValueError(
            f"{op}: shard is {flattened['shard']} beside "
            f"{'DTensors' if mesh is not None else f'sequences_from({first})'}, which says where "
            "the shard lies; expected None"
        )
    if mesh is None:
        call = Call(op, flattened, letters, None, (), _sizes(flattened, letters), {})
        return _local(inner, call, arguments, first)
    ways = tuple(_way(op, rule, flattened, letters, i, mesh) for i in range(mesh.ndim))
    local: Arguments = dict(flattened)
    offsets: dict[str, int] = {}
    for name, which in letters.items():
        x = flattened[name]
        placements = _wanted(which, ways)
        if not isinstance(x, DTensor):
            if not x.requires_grad and not any(way in which for way in ways if way):
                continue  # the same everywhere
            x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        _require(op, rule, name, x, placements, ways)
        _, start = compute_local_shape_and_global_offset(x.shape, mesh, placements)
        for letter, at in zip(which, start):
            if letter in ways and name not in rule.halves:
                offsets.setdefault(letter, at)  # of heads, those of the query
        gradients = [
            Partial() if way and placed == Replicate() else placed
            for way, placed in zip(ways, placements)
        ]
        x = x.redistribute(mesh, placements)
        local[name] = x.to_local(grad_placements=gradients)
        if name in rule.halves:
            if "f" in ways and x.shape[0] % (2 * mesh.size(ways.index("f"))):
                raise ValueError(
                    f"{op}: {name} has {x.shape[0]} rows; expected a multiple of twice the "
                    f"{mesh.size(ways.index('f'))} devices that share them"
                )
            local[name] = _shards_of_halves(local[name], mesh, ways)
    call = Call(op, local, letters, mesh, ways, _sizes(flattened, letters), offsets)
    outputs = _local(inner, call, arguments, first)
    if not isinstance(outputs, tuple):
        return _whole(outputs, call, rule.outputs(letters)[0])
    return tuple(_whole(x, call, which) for x, which in zip(outputs, rule.outputs(letters)))


def _mesh_of(op: str, arguments: Arguments) -> DeviceMesh | None:
    """Return the one mesh of the DTensors, beside which there is no parameter that is none."""
    mesh, first = None, ""
    for name, x in arguments.items():
        if isinstance(x, DTensor):
            if mesh is None:
                mesh, first = x.device_mesh, name
            elif x.device_mesh != mesh:
                raise ValueError(
                    f"{op}: {name} is on the mesh {x.device_mesh}; expected that of {first}, {mesh}"
                )
    for name, x in arguments.items():
        if mesh is not None and type(x) is torch.nn.Parameter:
            raise ValueError(
                f"{op}: {name} is a parameter that is no DTensor beside {first}, which is one; "
                "expected all parameters distributed over one mesh (fastformer.parallelize)"
            )
    return mesh


def _sizes(arguments: Arguments, letters: dict[str, str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, which in letters.items():
        for letter, size in zip(which, arguments[name].shape):
            sizes[letter] = max(size, sizes.get(letter, 0))  # of heads, those of the query
    return sizes


def _way(
    op: str,
    rule: ShardingRule,
    arguments: Arguments,
    letters: dict[str, str],
    i: int,
    mesh: DeviceMesh,
) -> str:
    """Return the letter that dimension i of the mesh splits, "" for none."""
    split: dict[str, str] = {}  # the letters that are split there, and an argument for each
    for name, which in letters.items():
        x = arguments[name]
        placement: Placement = x.placements[i] if isinstance(x, DTensor) else Replicate()
        if not isinstance(placement, (Replicate, Partial)):
            split.setdefault(which[placement.dim], name)
    if not split:
        return ""
    known = "".join(letters.values())
    for letter in rule.sharded:
        if letter in split:
            return letter
    for letter in rule.sharded:  # another dimension takes its place
        sizes = [
            size
            for name, which in letters.items()
            for way, size in zip(which, arguments[name].shape)
            if way == letter
        ]
        if letter in known and sizes and not any(size % mesh.size(i) for size in sizes):
            return letter
    name = next(iter(split.values()))
    raise ValueError(
        f"{op}: {name} has placements {arguments[name].placements}, and no other dimension divides "
        f"by the {mesh.size(i)} devices of dimension {i} of the mesh; redistribute it first"
    )


def _wanted(which: str, ways: tuple[str, ...]) -> list[Placement]:
    """Return the placements of an argument, given the way of each dimension of the mesh."""
    return [Shard(which.index(way)) if way and way in which else Replicate() for way in ways]


def _shards_of_halves(x: Tensor, mesh: DeviceMesh, ways: tuple[str, ...]) -> Tensor:
    """Return the rows of z and of v that belong to the hidden units of this device, from its shard
    of [2 d_ff, ..].
    """
    over = [i for i, way in enumerate(ways) if way == "f"]
    if len(over) > 1:
        raise ValueError("d_ff is split over several dimensions of the mesh; expected one")
    return exchanged(x, mesh.get_group(over[0]), 2) if over else x


def _require_group(call: Call, letter: str, group: int, what: str) -> None:
    """Require, on each device alike, that the shards of a letter begin at multiples of what shares
    the words of dropout.
    """
    size, mesh = call.sizes.get(letter, 0), call.mesh
    if letter == "f" and OPERATIONS[call.op].sharding.halves:
        size //= 2
    for i, way in enumerate(call.ways):
        if way == letter and mesh is not None:
            shard = -(-size // mesh.size(i))
            if mesh.size(i) > 1 and shard % group:
                raise ValueError(
                    f"{call.op}: {size} {what} on {mesh.size(i)} devices; "
                    f"expected shards of a multiple of {group}, of which dropout draws its words"
                )
            size = shard


def exchanged(x: Tensor, group: dist.ProcessGroup, parts: int) -> Tensor:
    """Return this device's share of each of the equal parts of a tensor, given its shard of the
    first dimension, which holds the parts one after the other: z and v, or q, k and v.

        two devices, of z and v    z0 z1 | v0 v1  ->  z0 v0 | z1 v1

    Each device sends its shard once, and once more in the backward.
    """
    size = dist.get_world_size(group)
    return x if size == 1 else _Exchange.apply(x, group, parts, False)


class _Exchange(torch.autograd.Function):
    """Chunk c of the parts * n chunks of the whole is with device c // parts, and goes to c % n."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, parts: int, back: bool) -> Tensor:
        ctx.options = group, parts, back
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        held = range(rank * parts, (rank + 1) * parts)
        wanted = range(rank, parts * size, size)
        order = sorted(held, key=lambda c: (c % size, c))  # as it is sent
        sent = [sum(c % size == other for c in held) for other in range(size)]
        taken = [sum(c // parts == other for c in wanted) for other in range(size)]
        chunks = x.contiguous().unflatten(0, (parts, -1))
        places = torch.tensor([c - held[0] for c in order], device=x.device)
        out = torch.empty_like(chunks)
        if not back:
            dist.all_to_all_single(out, chunks[places], taken, sent, group=group)
        else:
            received = torch.empty_like(chunks)
            dist.all_to_all_single(received, chunks, sent, taken, group=group)
            out[places] = received
        return out.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, parts, back = ctx.options
        return _Exchange.apply(grad, group, parts, not back), None, None, None


def _require(
    op: str,
    rule: ShardingRule,
    name: str,
    x: DTensor,
    wanted: list[Placement],
    ways: tuple[str, ...],
) -> None:
    """Require that x can be redistributed without being gathered, and that heads divide."""
    for i, (have, want, way) in enumerate(zip(x.placements, wanted, ways)):
        split = not isinstance(have, (Replicate, Partial))
        if split and want == Replicate() and name not in rule.gathers.get(way, ()):
            raise ValueError(
                f"{op}: {name} has placement {have!r} on dimension {i} of the mesh, where the op "
                f"is split over {_spelled(way)}; expected {want!r}"
            )
        devices = x.device_mesh.size(i)
        if way == "h" and want != Replicate() and x.shape[want.dim] % devices:
            raise ValueError(
                f"{op}: {name} has {x.shape[want.dim]} heads; "
                f"expected a multiple of the {devices} devices that share them"
            )


def _spelled(way: str) -> str:
    known = dict(b="the batch", h="the heads", q="the queries", f="d_ff", v="the vocabulary")
    return known.get(
        way, "the features" if way == "n" else f"dimension {way}" if way else "nothing"
    )


def _whole(x: Tensor, call: Call, which: str) -> DTensor:
    """Return the DTensor of which x, a tensor with these letters, is the shard of this device."""
    mesh = call.mesh
    assert mesh is not None
    placements: list[Placement] = []
    for way in call.ways:
        if way in which and way:
            placements.append(Shard(which.index(way)))
        elif way == "v" and call.op != "embed":
            placements.append(Replicate())  # the logarithm of the sum is merged
        else:
            placements.append(Partial() if way else Replicate())
    if x.dim() == 0:  # a loss
        placements = [Partial() if isinstance(p, Shard) else p for p in placements]
        whole = DTensor.from_local(x, mesh, placements, run_check=False)
        return whole.redistribute(mesh, [Replicate()] * mesh.ndim)
    shape = [call.sizes[w] if w in call.ways else n for w, n in zip(which, x.shape)]
    stride, count = [0] * x.dim(), 1
    order = sorted(range(x.dim()), key=lambda i: (-x.stride()[i], i))
    for i in reversed(order):
        stride[i], count = count, count * max(shape[i], 1)
    return DTensor.from_local(
        x, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )


def _local(inner: Run, call: Call, arguments: Arguments, first: int) -> Any:
    """Run the shard of this device."""
    if call.op in ("cross_entropy", "linear_cross_entropy"):
        return _loss(inner, call)
    if "block_table" in call.arguments or "is_causal" in call.arguments:
        return _attention(inner, call, arguments, first)
    if call.op == "embed" and "v" in call.ways:
        return _vocabulary(inner, call, first)
    own = dict(call.arguments)
    if call.op == "embed":
        own = _positions(call)
    if "f" in call.ways and own["b_2"] is not None:  # one device adds it
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
        sizes = whole["h"], whole.get("q", 0), whole.get("k", 0)  # 0 where tokens are packed
        shard = AttentionShard(batch, at.get("h", 0), at.get("q", 0), 0, *sizes)
        if attention.dropout_p > 0:
            _require_group(call, "q", _PLANE_GROUP, "queries")
        attention = attention._replace(shard=shard)
    own = {name: given.get(name, attention) for name in arguments}  # in the order of the op
    return inner(call.op, **own)


def _positions(call: Call) -> Arguments:
    """Return the arguments of an embedding with the positions of its tokens first."""
    own, last = dict(call.arguments), ROW_DIMS[call.arguments["tokens"].dim() - 1]
    if own["positional"] is not None and last in call.offsets:
        own["positional"] = own["positional"][call.offsets[last] :]
    return own


def _vocabulary(inner: Run, call: Call, first: int) -> Tensor:
    """Return the embedding of the tokens whose rows are here, and zeros for the others."""
    own, begin = _positions(call), call.offsets["v"]
    tokens, here = own["tokens"] - begin, own["weight"].shape[0]
    inside = (tokens >= 0) & (tokens < here)
    own["tokens"] = tokens.where(inside, 0)
    if own["padding_idx"] is not None:
        padding = own["padding_idx"] - begin
        own["padding_idx"] = padding if 0 <= padding < here else None
    return _by_rows(inner, call, own, first).masked_fill(~inside.unsqueeze(-1), 0.0)


def _by_rows(inner: Run, call: Call, own: Arguments, first: int) -> Any:
    """Run an op on rows, with the dropout of the rows and columns of the whole."""
    if not own.get("dropout_p") or (first == 0 and not call.offsets):
        return inner(call.op, **own)
    x = own["tokens" if call.op == "embed" else "input"]
    rows = [letter for letter in next(iter(call.letters.values())) if letter in ROW_DIMS]
    if first and len(rows) < 2:
        raise ValueError(
            f"{call.op} of [tokens, features] of a part of a batch; expected [B, S, features]"
        )
    _require_group(call, "f" if "w_2" in own else "n", 16 if "w_2" in own else 4, "columns")
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
    if not math.prod(x.shape[: len(rows)]):  # no row is here
        return inner(call.op, **own)
    if cut == 0 or math.prod(x.shape[:cut]) == 1:
        return _aligned(inner, call.op, own, RowShard(begin, column))
    run, sequence = math.prod(x.shape[cut : len(rows)]), math.prod(sizes[cut:])
    return _in_runs(inner, call.op, own, RowShard(begin, column, 0, run, sequence), cut)


def _in_runs(inner: Run, op: str, own: Arguments, shard: RowShard, cut: int) -> Any:
    """Run an op on some rows of each sequence; cut: the first of the dimensions of a run."""
    begin, column, _, run, sequence = shard
    # Words of dropout serve groups of rows in the feed-forward: else sequence after sequence.
    if "w_2" not in own or not (begin % 16 or run % 16 or sequence % 16):
        return inner(op, **{**own, "shard": shard})
    x = own["input"]
    parts = [
        _aligned(inner, op, own | {"input": part}, RowShard(at, column))
        for part, at in zip(x.flatten(0, cut - 1), itertools.count(begin, sequence))
    ]
    return torch.stack(parts).unflatten(0, x.shape[:cut])


def run_chunks(inner: Run, op: str, own: Arguments, first: int, context: Any) -> Any:
    """Run an op with dropout on rows of sequences that are sharded, chunk after chunk, as
    `context_parallel` has them. Sequence 0 here is sequence `first` of the whole.
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
    if not math.prod(x.shape[: cut + 1]):  # no row is here
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
    """Run an op on rows that follow each other in the whole.

    Words of dropout serve groups of rows in the feed-forward: rows of zeros fill the first group.
    """
    before = shard.row % _PLANE_GROUP if "w_2" in own else 0
    if not before:
        return inner(op, **{**own, "shard": shard})
    x = own["input"]
    padded = F.pad(x.reshape(-1, x.shape[-1]), (0, 0, before, 0))
    shard = shard._replace(row=shard.row - before)
    out = inner(op, **{**own, "input": padded, "shard": shard})
    return out[before:].view(*x.shape[:-1], -1)


def projected(
    inputs: tuple[Tensor, Tensor, Tensor],
    weights: Sequence[Any],
    bias: Any,
    dim: int,
) -> list[Tensor]:
    """Return the heads [.., H, dim] of query, key and value [.., d], split over the mesh as the
    DTensors of the weights are: one with the rows of all three, or three. The bias has those of all
    three, or is None. The projections of one input are one GEMM.
    """
    mesh = weights[0].device_mesh
    rows = [_share(w, 3 // len(weights)) for w in weights]
    if len(rows) == 1:
        rows = list(rows[0].chunk(3))
    shifts = None if bias is None else _share(bias, 3).chunk(3)
    local: dict[int, Tensor] = {}  # of each input, once
    for x in inputs:
        if id(x) not in local:
            local[id(x)] = as_replicated(x, mesh).to_local(grad_placements=[Partial()])
    out: list[Tensor] = []
    for _, group in itertools.groupby(range(3), key=lambda i: id(inputs[i])):
        of = list(group)
        weight = torch.cat([rows[i] for i in of])
        shift = None if shifts is None else torch.cat([shifts[i] for i in of])
        heads = F.linear(local[id(inputs[of[0]])], weight, shift)
        heads = heads.unflatten(-1, (len(of), -1, dim))
        placement = [Shard(heads.dim() - 2 - 1)]
        out += [DTensor.from_local(x, mesh, placement, run_check=False) for x in heads.unbind(-3)]
    return out


def as_replicated(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return x whole on each device, as a plain tensor is already."""
    whole = [Replicate()] * mesh.ndim
    if isinstance(x, DTensor):
        return x.redistribute(mesh, whole)
    return DTensor.from_local(x, mesh, whole, run_check=False)


def _share(x: DTensor, parts: int) -> Tensor:
    """Return this device's share of each of the parts of a parameter whose first dimension is
    sharded.
    """
    mesh = x.device_mesh
    local = x.redistribute(mesh, [Shard(0)]).to_local(grad_placements=[Shard(0)])
    return exchanged(local, mesh.get_group(), parts) if parts > 1 else local


def _loss(inner: Run, call: Call) -> Tensor:
    """Return the loss: of rows [...], or their sum; for a mean its share of it."""
    own, reduction = dict(call.arguments), call.arguments["reduction"]
    if "v" in call.ways:
        rows = _over_the_vocabulary(call)
        loss = rows if reduction == "none" else rows.sum()
    else:
        own["reduction"] = "none" if reduction == "none" else "sum"
        loss = inner(call.op, **own)
    if reduction != "mean":
        return loss
    count = (own["target"] != own["ignore_index"]).sum()
    for way in dict.fromkeys(call.ways):
        for group in call.groups(way) if way and way != "v" else ():
            dist.all_reduce(count, group=group)
    return torch.where(count > 0, loss / count.clamp(min=1), float("nan"))


def _over_the_vocabulary(call: Call) -> Tensor:
    own = call.arguments
    labels = own["ignore_index"], own["label_smoothing"], own["smoothing"]
    if call.op == "cross_entropy":
        x, weight, bias = own["logits"], None, None
    else:
        x, weight, bias = own["input"], own["linear_weight"], own["linear_bias"]
    place = call.offsets["v"], call.sizes["v"], call.groups("v")
    return _VocabularyLoss.apply(x, weight, bias, own["target"], labels, place)


class _VocabularyLoss(torch.autograd.Function):
    """The loss of each row, of logits whose classes are shared by several devices:

        loss = constant + lse - sum_c q_c x_c
        dx_c = exp(x_c - lse) - q_c

    Each device has the lse and the sum over its own classes; two reductions merge the first, and
    one the second. The logits of a chunk of rows are computed again in the backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        target: Tensor,
        labels: tuple[int, float, str],
        place: tuple[int, int, list[dist.ProcessGroup]],
    ) -> Tensor:
        ctx.labels = smoothed = _Labels(*labels, *place[:2])
        x, flat = input.reshape(-1, input.shape[-1]), target.reshape(-1)
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        lse, dot = (x.new_empty(len(x), dtype=wide) for _ in range(2))
        for part in smoothed.chunks(x, weight):
            logits = _logits(x[part], weight, bias, wide)
            lse[part], dot[part] = logits.logsumexp(1), smoothed.dot(logits, flat[part])
        for group in place[2]:
            top = lse.clone()
            dist.all_reduce(top, dist.ReduceOp.MAX, group)
            top.clamp_(min=torch.finfo(wide).min)
            lse = (lse - top).exp_()
            dist.all_reduce(lse, group=group)
            lse = lse.log_() + top
            dist.all_reduce(dot, group=group)
        ctx.save_for_backward(input, weight, bias, target, lse)
        loss = (lse - dot + smoothed.constant()).masked_fill_(flat == labels[0], 0.0)
        return loss.view(target.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, target, lse = ctx.saved_tensors
        smoothed: _Labels = ctx.labels
        x, flat = input.reshape(-1, input.shape[-1]), target.reshape(-1)
        g = grad.reshape(-1, 1).masked_fill(flat.view(-1, 1) == smoothed.ignore_index, 0.0)
        dx = torch.empty_like(x)
        dw = None if weight is None else torch.zeros_like(weight, dtype=lse.dtype)
        db = None if bias is None else torch.zeros_like(bias, dtype=lse.dtype)
        for part in smoothed.chunks(x, weight):
            logits = _logits(x[part], weight, bias, lse.dtype)
            d = smoothed.gradient(logits, flat[part], lse[part]) * g[part]
            if weight is None:
                dx[part] = d
                continue
            dx[part] = d.to(weight.dtype) @ weight
            dw += d.t() @ x[part].to(d.dtype)
            if db is not None:
                db += d.sum(0)
        dw = None if weight is None or dw is None else dw.to(weight.dtype)
        db = None if bias is None or db is None else db.to(bias.dtype)
        return dx.view(input.shape), dw, db, None, None, None


def _logits(x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (x if weight is None else F.linear(x, weight, bias)).to(dtype)


class _Labels(NamedTuple):
    """The smoothed targets q of the classes first .. of `classes` that are here."""

    ignore_index: int
    label_smoothing: float
    smoothing: str
    first: int
    classes: int

    def chunks(self, x: Tensor, weight: Tensor | None) -> list[slice]:
        """Return slices of rows whose logits take some 64 MB."""
        step = max(1, 2**24 // max(1, (x if weight is None else weight.t()).shape[1]))
        return [slice(first, first + step) for first in range(0, len(x), step)]

    def probabilities(self) -> tuple[float, float]:
        """Return q at most classes, and what q has more at the target."""
        e = self.label_smoothing
        if self.smoothing == "uniform":
            return e / self.classes, 1 - e
        return e / (self.classes - 2), 1 - e - e / (self.classes - 2)

    def constant(self) -> float:
        """Return what the loss has beside the cross entropy: of "kl" less the entropy of q."""
        if self.smoothing == "uniform":
            return 0.0
        off, more = self.probabilities()
        terms = ((1, off + more), (self.classes - 2, off))
        return sum(n * p * math.log(p) for n, p in terms if p > 0)

    def _of_target(self, target: Tensor, here: int) -> tuple[Tensor, Tensor]:
        """Return the column of each target [M, 1], and whether it is here."""
        at = (target - self.first).view(-1, 1)
        inside = (at >= 0) & (at < here)
        return at.where(inside, 0), inside

    def _padding(self, here: int) -> int | None:
        """Return the column of the padding class, to which "kl" gives nothing; None elsewhere."""
        at = self.ignore_index - self.first
        return at if self.smoothing == "kl" and 0 <= at < here else None

    def dot(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return sum_c q_c x_c over the classes here, [M]."""
        off, more = self.probabilities()
        here = logits.shape[1]
        if here == 0:
            return logits.new_zeros(len(logits))
        at, inside = self._of_target(target, here)
        total = (logits.gather(1, at).where(inside, 0.0) * more).squeeze(1)
        if off > 0:
            padding = self._padding(here)
            total = total + off * logits.sum(1)
            if padding is not None:
                total = total - off * logits[:, padding]
        return total

    def gradient(self, logits: Tensor, target: Tensor, lse: Tensor) -> Tensor:
        """Return exp(x_c - lse) - q_c, [M, classes here]."""
        off, more = self.probabilities()
        d = (logits - lse.view(-1, 1)).exp_()
        if off > 0:
            d.sub_(off)
            padding = self._padding(logits.shape[1])
            if padding is not None:
                d[:, padding] += off
        if logits.shape[1]:
            at, inside = self._of_target(target, logits.shape[1])
            d.scatter_add_(1, at, -more * inside.to(d.dtype))
        return d
