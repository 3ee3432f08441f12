"""The records of the losses."""

from __future__ import annotations

from fastformer.dispatch import backends, operation
from fastformer.ops.loss import contract, reference


def _dims(arguments: operation.Arguments) -> dict[str, str]:
    rows = operation.ROW_DIMS[: arguments["target"].dim()]
    if "logits" in arguments:
        return {"logits": rows + "v", "target": rows}
    return {"input": rows + "n", "linear_weight": "vn", "target": rows, "linear_bias": "v"}


_SHARDING = operation.ShardingRule(
    _dims, lambda x: (x["target"],), "v" + operation.ROW_DIMS, {"v": ("target",)}
)


backends.register(
    operation.Operation(
        kernel="cross_entropy",
        contract=contract.cross_entropy,
        reference=reference.cross_entropy,
        sharding=_SHARDING,
        without_kernel=("weight", "z_loss"),
        tuned=("cross_entropy loss", "cross_entropy gradient"),
    )
)
backends.register(
    operation.Operation(
        kernel="cross_entropy",
        contract=contract.linear_cross_entropy,
        reference=reference.linear_cross_entropy,
        sharding=_SHARDING._replace(gathers={"v": ("input", "target")}),
        without_kernel=("weight", "z_loss"),
        tuned=("linear_cross_entropy chunk", "cross_entropy loss", "cross_entropy gradient"),
    )
)
