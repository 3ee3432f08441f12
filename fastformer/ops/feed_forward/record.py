"""The records of the feed-forward layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastformer.dispatch import backends, operation, workloads
from fastformer.dispatch.operation import Arguments, Operation, Options, Sizes
from fastformer.dispatch.workloads import Maker
from fastformer.ops.feed_forward import contract, reference


def _dims(arguments: Arguments) -> dict[str, str]:
    w, b = ("w_1", "b_1") if "w_1" in arguments else ("w", "b")
    rows = operation.ROW_DIMS[: arguments["input"].dim() - 1]
    given = {"input": rows + "d", w: "fd", b: "f", "w_2": "of", "b_2": "o"}
    return given | {"dropout_seed": "."}


_SHARDING = operation.ShardingRule(
    _dims, lambda x: (x["input"][:-1] + "o",), "f" + operation.ROW_DIMS, {"f": ("input",)}
)


def _describe(
    input: Tensor, w_2: Tensor, b_2: Tensor | None, dropout_p: float, **more: Any
) -> tuple[Sizes, Options]:
    rows, b = (more["w"], more["b"]) if "w" in more else (more["w_1"], more["b_1"])
    d, (out, width) = rows.shape[1], w_2.shape
    options = dict(b_1=b is not None, b_2=b_2 is not None, dropout=dropout_p > 0)
    sizes = dict(M=input.numel() // d, d=d, F=width, out=out)
    return sizes, dict(activation=more.get("activation", False), **options)


def _arguments(make: Maker, sizes: Sizes, options: Options) -> Arguments:
    """Return the arguments of feed_forward, or of a gated layer if no activation is given."""
    M, d, F, out = sizes.values()
    gated = "activation" not in options
    w, b, rows = ("w", "b", 2 * F) if gated else ("w_1", "b_1", F)
    given: Arguments = {"input": make.normal(M, d), b: None, "b_2": None}
    given |= {w: make.normal(rows, d, scale=d**-0.5), "w_2": make.normal(out, F, scale=F**-0.5)}
    given |= {b: make.normal(rows)} if "b_1" in options else {}
    given |= {"b_2": make.normal(out)} if "b_2" in options else {}
    activation = {} if gated else dict(activation=options["activation"])
    return given | activation | workloads.dropout(options)


_LIMITS, _SIZES = dict(M=496), dict(M=1, d=16, F=16, out=16)

backends.register(
    Operation(
        kernel="feed_forward",
        contract=contract.feed_forward,
        reference=reference.feed_forward,
        sharding=_SHARDING,
        workloads=operation.WorkloadFamily(
            _describe, _arguments, _LIMITS, (_SIZES, dict(activation="relu"))
        ),
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
            workloads=operation.WorkloadFamily(_describe, _arguments, _LIMITS, (_SIZES, {})),
            tuned=("feed_forward gated", "feed_forward gated_backward"),
        )
    )


def _gate_dims(arguments: Arguments) -> dict[str, str]:
    dims = operation.ROW_DIMS[: arguments["gate"].dim() - 1] + "f"
    return {"gate": dims, "value": dims}


def _describe_gate(gate: Tensor, activation: str, **_: Any) -> tuple[Sizes, Options]:
    F = gate.shape[-1]
    return dict(M=gate.numel() // max(1, F), F=F), dict(activation=activation)


def _gate_arguments(make: Maker, sizes: Sizes, options: Options) -> Arguments:
    M, F = sizes.values()
    return dict(gate=make.normal(M, F), value=make.normal(M, F), **options)


backends.register(
    Operation(
        kernel="feed_forward",
        contract=contract.gated_activation,
        reference=reference.gated_activation,
        sharding=operation.ShardingRule(
            _gate_dims, lambda x: (x["gate"],), "f" + operation.ROW_DIMS
        ),
        workloads=operation.WorkloadFamily(
            _describe_gate, _gate_arguments, {}, (dict(M=1, F=16), dict(activation="silu"))
        ),
        tuned=("feed_forward gated", "feed_forward gated_backward"),
    )
)
