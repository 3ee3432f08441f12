"""One description of attention, from the public function to the launcher of the kernels.

`functional` makes an `Attention` of what it has checked; `reference` and the launcher read it. The
registered ops take its fields one by one, because torch.library knows tensors, numbers and strings
alone: `SCHEMA` and `PACKED_SCHEMA` spell them, `pack` takes a description apart and `unpack` makes
one again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Shard(NamedTuple):
    """Where the shard that a call of attention is given begins in the whole: the index there of its
    first sequence, head, query and key, and how many heads, queries and keys the whole has, 0 for
    as many as the shard.
    """

    batch: int = 0
    head: int = 0
    query: int = 0
    key: int = 0
    heads: int = 0
    queries: int = 0
    keys: int = 0


class RowShard(NamedTuple):
    """Where the shard that an op on rows [M, N] is given begins in the whole: the index there of
    its first row and column, and how many columns the whole has, 0 for as many. Where each sequence
    is cut, `run` of its rows are here of the `sequence` rows that it has; 0 where the rows follow
    each other. Row i here is row `row + i // run * sequence + i % run` of the whole.
    """

    row: int = 0
    column: int = 0
    columns: int = 0
    run: int = 0
    sequence: int = 0


_ENDLESS = 2**40  # rows of a run, where there are no runs


def row_shard(shard: Sequence[int] | None) -> RowShard | None:
    """Return a shard as the kernels take it, with a run that is no 0; it may serve as a key."""
    if shard is None:
        return None
    given = RowShard(*shard)
    return given if given.run else given._replace(run=_ENDLESS)


class Attention(NamedTuple):
    """What attention takes beside query [B, H, Sq, D], key [B, G, Sk, D] and value [B, G, Sk, Dv].

    The fields have the names and the meaning of the arguments of
    `functional.scaled_dot_product_attention`, after its checks: `scale` is a number, a `window` has
    two ints, -1 for a side without a bound, `dropout_seed` is a tensor of one int64 where
    `dropout_p` is not 0, and a `shard` has the sizes of the whole; it is None for the whole. A
    packed batch has the last four as well, the arguments of `functional.packed_attention`.

    A tuple with names, and not a frozen dataclass: it is as immutable, and made in a quarter of the
    time (0.3 us instead of 1.3 us), which every call pays.
    """

    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float
    bias: Tensor | None = None
    key_lengths: Tensor | None = None
    window: tuple[int, int] | None = None
    causal_alignment: str = "top_left"
    alibi_slopes: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_seed: Tensor | None = None
    shard: Shard | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_q: int = 0
    max_k: int = 0


SCHEMA = (
    "Tensor? attn_mask, float dropout_p, bool is_causal, float scale, Tensor? bias, "
    "Tensor? key_lengths, int[]? window, str causal_alignment, Tensor? alibi_slopes, "
    "float? softcap, Tensor? sinks, Tensor? dropout_seed, SymInt[]? shard"
)
PACKED_SCHEMA = SCHEMA + ", Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_q, SymInt max_k"
_PADDED = SCHEMA.count(",") + 1
_WINDOW, _SHARD = map(Attention._fields.index, ("window", "shard"))


def pack(arguments: Iterable[Any]) -> list[Any]:
    """Return the arguments of an op as its schema has them: the fields replace a description."""
    flat: list[Any] = []
    for x in arguments:
        if isinstance(x, Attention):
            flat += x[:_PADDED] if x.cu_seqlens_q is None else x
        else:
            flat.append(x)
    return flat


def unpack(fields: Sequence[Any]) -> Attention:
    """Return the description, given its fields in the order of the schema."""
    if fields[_WINDOW] is not None:  # the dispatcher makes a list of it, which is no key
        fields = [*fields[:_WINDOW], tuple(fields[_WINDOW]), *fields[_WINDOW + 1 :]]
    if fields[_SHARD] is not None:
        fields = [*fields[:_SHARD], Shard(*fields[_SHARD]), *fields[_SHARD + 1 :]]
    return Attention(*fields)
