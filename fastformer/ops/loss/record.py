"""The records of the losses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastformer.dispatch import backends, operation, workloads
from fastformer.ops.loss import contract, reference


def _dims(arguments: operation.Arguments) -> dict[str, str]:
    rows = operation.ROW_DIMS[: arguments["target"].dim()]
    if "logits" in arguments:
        return {"logits": rows + "v", "target": rows}
    return {"input": rows + "n", "linear_weight": "vn", "target": rows, "linear_bias": "v"}


_SHARDING = operation.ShardingRule(
    _dims, lambda x: (x["target"],), "v" + operation.ROW_DIMS, {"v": ("target",)}
)


def _describe(
    target: Tensor, label_smoothing: float, smoothing: str, reduction: str, **more: Any
) -> tuple[operation.Sizes, operation.Options]:
    options: operation.Options = dict(
        smoothing=label_smoothing > 0 and smoothing, reduction=reduction
    )
    if "logits" in more:
        return dict(M=target.numel(), V=more["logits"].shape[-1]), options
    classes, n = more["linear_weight"].shape
    options["bias"] = more["linear_bias"] is not None
    return dict(M=target.numel(), N=n, V=classes), options


def _arguments(
    make: workloads.Maker, sizes: operation.Sizes, options: operation.Options
) -> operation.Arguments:
    M, V = sizes["M"], sizes["V"]
    given: operation.Arguments = dict(target=make.integers(0, V, M), reduction=options["reduction"])
    if "smoothing" in options:
        given |= dict(label_smoothing=0.1, smoothing=options["smoothing"], ignore_index=0)
    if "N" not in sizes:
        return given | dict(logits=make.normal(M, V, scale=2.0))
    n = sizes["N"]
    given |= dict(input=make.normal(M, n), linear_weight=make.normal(V, n, scale=2 * n**-0.5))
    return given | (dict(linear_bias=make.normal(V)) if "bias" in options else {})


_LIMITS = dict(M=112)

backends.register(
    operation.Operation(
        kernel="cross_entropy",
        contract=contract.cross_entropy,
        reference=reference.cross_entropy,
        sharding=_SHARDING,
        workloads=operation.WorkloadFamily(
            _describe, _arguments, _LIMITS, (dict(M=1, V=16), dict(reduction="mean"))
        ),
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
        workloads=operation.WorkloadFamily(
            _describe, _arguments, _LIMITS, (dict(M=1, N=16, V=16), dict(reduction="mean"))
        ),
        without_kernel=("weight", "z_loss"),
        tuned=("linear_cross_entropy chunk", "cross_entropy loss", "cross_entropy gradient"),
    )
)
