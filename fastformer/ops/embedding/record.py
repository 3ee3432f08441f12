"""The record of the embedding."""

from __future__ import annotations

from fastformer.dispatch import backends, operation
from fastformer.dispatch.operation import Arguments, Operation
from fastformer.ops.embedding import contract, reference


def _dims(arguments: Arguments) -> dict[str, str]:
    tokens = operation.ROW_DIMS[: arguments["tokens"].dim()]
    return {"tokens": tokens, "weight": "vn", "positional": ".n", "dropout_seed": "."}


_SHARDING = operation.ShardingRule(
    _dims,
    lambda x: (x["tokens"] + "n",),
    "vn" + operation.ROW_DIMS,
    {"v": ("tokens",), "n": ("tokens",)},
)


backends.register(
    Operation(
        kernel="embedding",
        contract=contract.embed,
        reference=reference.embed,
        sharding=_SHARDING,
        tuned=("embed forward", "embed backward"),
    )
)
