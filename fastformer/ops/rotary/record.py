"""The record of rotary positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastformer.dispatch import backends, operation
from fastformer.dispatch.operation import Arguments, Operation, Options, Sizes
from fastformer.dispatch.workloads import Maker
from fastformer.ops.rotary import contract, reference


def _dims(arguments: Arguments) -> dict[str, str]:
    heads, table = ("qh.", "q.") if arguments["query"].dim() == 3 else ("bhq.", "bq.")
    table = table[-arguments["cos"].dim() :]
    given = {"query": heads, "key": heads, "cos": table, "sin": table}
    return given | {"query_norm": ".", "key_norm": "."}


_SHARDING = operation.ShardingRule(_dims, lambda x: (x["query"], x["key"]), "hbq")


def _describe(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> tuple[Sizes, Options]:
    if query.dim() == 3:
        query, key = (x.transpose(0, 1).unsqueeze(0) for x in (query, key))
    B, H, S, D = query.shape
    sizes = dict(B=B, H=H, G=key.shape[1], S=S, D=D, R=cos.shape[-1])
    return sizes, dict(
        interleaved=interleaved,
        norm=query_norm is not None or key_norm is not None,
        heads_inside=H > 1 and S > 1 and query.stride(1) < query.stride(2),
    )


def _arguments(make: Maker, sizes: Sizes, options: Options) -> Arguments:
    B, H, G, S, D, R = sizes.values()

    def heads(n: int) -> Tensor:
        if "heads_inside" in options:
            return make.normal(B, S, n, D).transpose(1, 2)
        return make.normal(B, n, S, D)

    angles = make.normal(S, R // 2, gradient=False).float().repeat(1, 2)
    given: Arguments = dict(query=heads(H), key=heads(G), cos=angles.cos(), sin=angles.sin())
    if "norm" in options:
        given |= dict(query_norm=make.normal(D), key_norm=make.normal(D))
    return given | dict(interleaved="interleaved" in options)


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
        workloads=operation.WorkloadFamily(
            _describe,
            _arguments,
            limits=dict(B=2, S=720),
            example=(dict(B=1, H=2, G=1, S=16, D=16, R=16), {}),
        ),
        tuned=("rotary forward", "rotary backward"),
        reference_backward=reference.rotary_embedding_backward,
        unsaved=_unsaved,
    )
)
