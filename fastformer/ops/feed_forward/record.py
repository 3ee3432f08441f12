"""The records of the feed-forward layers."""

from __future__ import annotations

from fastformer.dispatch import backends, operation
from fastformer.dispatch.operation import Arguments, Operation
from fastformer.ops.feed_forward import contract, reference


def _dims(arguments: Arguments) -> dict[str, str]:
    w, b = ("w_1", "b_1") if "w_1" in arguments else ("w", "b")
    rows = operation.ROW_DIMS[: arguments["input"].dim() - 1]
    given = {"input": rows + "d", w: "fd", b: "f", "w_2": "of", "b_2": "o"}
    return given | {"dropout_seed": "."}


_SHARDING = operation.ShardingRule(
    _dims, lambda x: (x["input"][:-1] + "o",), "f" + operation.ROW_DIMS, {"f": ("input",)}
)


backends.register(
    Operation(
        kernel="feed_forward",
        contract=contract.feed_forward,
        reference=reference.feed_forward,
        sharding=_SHARDING,
        tuned=("feed_forward first", "feed_forward activated", "feed_forward hidden_backward"),
    )
)
for _contract, _reference in (
    (contract.geglu, reference.geglu),
    (contract.swiglu, reference.swiglu),
):
    backends.register(
        Operation(
            kernel="feed_forward",
            contract=_contract,
            reference=_reference,
            sharding=_SHARDING._replace(halves=("w", "b")),
            tuned=("feed_forward gated", "feed_forward gated_backward"),
        )
    )


def _gate_dims(arguments: Arguments) -> dict[str, str]:
    dims = operation.ROW_DIMS[: arguments["gate"].dim() - 1] + "f"
    return {"gate": dims, "value": dims}


backends.register(
    Operation(
        kernel="feed_forward",
        contract=contract.gated_activation,
        reference=reference.gated_activation,
        sharding=operation.ShardingRule(
            _gate_dims, lambda x: (x["gate"],), "f" + operation.ROW_DIMS
        ),
        tuned=("feed_forward gated", "feed_forward gated_backward"),
    )
)
