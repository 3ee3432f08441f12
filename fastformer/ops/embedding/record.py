"""The record of the embedding."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastformer.dispatch import backends, operation, workloads
from fastformer.dispatch.operation import Arguments, Operation, Options, Sizes
from fastformer.dispatch.workloads import Maker
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


def _describe(
    tokens: Tensor, weight: Tensor, positional: Tensor | None, dropout_p: float, **_: Any
) -> tuple[Sizes, Options]:
    V, N = weight.shape
    sizes = dict(M=tokens.numel(), S=tokens.shape[-1], N=N, V=V)
    return sizes, dict(positional=positional is not None, dropout=dropout_p > 0)


def _arguments(make: Maker, sizes: Sizes, options: Options) -> Arguments:
    M, S, N, V = sizes.values()
    given: Arguments = dict(tokens=make.integers(0, V, M // S, S), weight=make.normal(V, N))
    positional = make.normal(S, N) if "positional" in options else None
    return given | dict(positional=positional) | workloads.dropout(options)


backends.register(
    Operation(
        kernel="embedding",
        contract=contract.embed,
        reference=reference.embed,
        sharding=_SHARDING,
        workloads=operation.WorkloadFamily(
            _describe,
            _arguments,
            limits=dict(M=720, S=240, V=1024),
            example=(dict(M=16, S=16, N=16, V=16), {}),
        ),
        tuned=("embed forward", "embed backward"),
    )
)
