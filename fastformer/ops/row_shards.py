"""The check of `shard` for the ops on rows."""

from __future__ import annotations

from collections.abc import Sequence

from fastformer.checks import require_size
from fastformer.description import RowShard
from fastformer.dispatch import backends


def row_shard(
    shard: Sequence[int], rows: int, columns: int, p: float, steps: tuple[int, int]
) -> RowShard | None:
    """Check the shard of [rows, columns], and return it with its global columns filled in.

    Return None if dropout is off, or if local indices are global indices (but not within
    `context_parallel`, which shards sequences).
    steps: (rows, columns): dropout draws its words for blocks of this size, so the offsets have to
        be multiples of it.
    """
    if not isinstance(shard, (tuple, list)) or not 3 <= len(shard) <= 5:
        fields = ", ".join(RowShard._fields)
        raise TypeError(f"shard is {shard!r}; expected RowShard({fields}), which has ints")
    given = RowShard(*shard)
    require_size(0, **{f"shard.{name}": n for name, n in given._asdict().items()})
    row, column, whole, run, sequence = given
    whole = whole or columns
    if column + columns > whole:
        raise ValueError(
            f"shard has columns {column} .. {column + columns - 1} of {whole}; "
            f"expected all of its {columns} columns in the whole"
        )
    if run > sequence or (rows % run if run else sequence):
        raise ValueError(
            f"shard has runs of {run} rows in sequences of {sequence}; expected runs that are no "
            f"longer than a sequence, and that divide its {rows} rows"
        )
    if p == 0 or (given[:2] == (0, 0) and not run and not backends.sequences_are_sharded()):
        return None
    if row % steps[0] or column % steps[1] or run % steps[0] or sequence % steps[0]:
        raise ValueError(
            f"shard begins at row {row} and column {column}, with runs of {run} rows in sequences "
            f"of {sequence}; expected multiples of {steps[0]} rows and {steps[1]} columns, of "
            "which dropout draws its words"
        )
    return RowShard(row, column, whole, run, sequence)
