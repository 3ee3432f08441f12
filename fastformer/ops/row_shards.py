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

    Return None if dropout is off, or if the shard has offset 0 and `context_parallel` is off.

    steps: (rows, columns) of the blocks for which dropout draws random words; the offsets have to
        be multiples of them.
    """
    if not isinstance(shard, (tuple, list)) or not 3 <= len(shard) <= 5:
        fields = ", ".join(RowShard._fields)
        raise TypeError(f"shard is {shard!r}; expected RowShard({fields}), which has ints")
    named = RowShard(*shard)._asdict().items()
    given = RowShard(*require_size(0, **{f"shard.{name}": n for name, n in named}))
    row, column, full, run, sequence = given
    full = full or columns
    if column + columns > full:
        raise ValueError(
            f"shard has columns {column} .. {column + columns - 1}; "
            f"expected its {columns} columns within the global {full}"
        )
    if run > sequence or (rows % run if run else sequence):
        raise ValueError(
            f"shard has run {run} and sequence {sequence}, for {rows} rows; expected a run that is "
            "at most the sequence and divides the rows"
        )
    if p == 0 or (given[:2] == (0, 0) and not run and not backends.sequences_are_sharded()):
        return None
    if row % steps[0] or column % steps[1] or run % steps[0] or sequence % steps[0]:
        raise ValueError(
            f"shard has row {row}, column {column}, run {run} and sequence {sequence}; with "
            f"dropout, expected multiples of {steps[0]} rows and {steps[1]} columns"
        )
    return RowShard(row, column, full, run, sequence)
