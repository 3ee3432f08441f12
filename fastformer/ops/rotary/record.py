"""The record of rotary positions."""

from __future__ import annotations

from typing import Any

from fastformer.dispatch import backends, operation
from fastformer.dispatch.operation import Arguments, Operation
from fastformer.ops.rotary import contract, reference


def _dims(arguments: Arguments) -> dict[str, str]:
    heads, table = ("qh.", "q.") if arguments["query"].dim() == 3 else ("bhq.", "bq.")
    table = table[-arguments["cos"].dim() :]
    given = {"query": heads, "key": heads, "cos": table, "sin": table}
    return given | {"query_norm": ".", "key_norm": "."}


_SHARDING = operation.ShardingRule(_dims, lambda x: (x["query"], x["key"]), "hbq")


def _unsaved(arguments: dict[str, Any]) -> tuple[str, ...]:
    """Return what the backward does not read: without a norm, the rotation is linear."""
    pairs = (("query", "query_norm"), ("key", "key_norm"))
    return tuple(x for x, norm in pairs if arguments[norm] is None)


backends.register(
    Operation(
        kernel="rotary",
        contract=contract.rotary_embedding,
        reference=reference.rotary_embedding,
        sharding=_SHARDING,
        tuned=("rotary forward", "rotary backward"),
        reference_backward=reference.rotary_embedding_backward,
        unsaved=_unsaved,
    )
)
