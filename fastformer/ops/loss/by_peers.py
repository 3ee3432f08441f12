"""Cross-entropy by the kernels of another package: QuACK.

Liger's is left out: it waits for the GPU in each call, overwrites the logits, and rounds the loss
of each row to the dtype of the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastformer.dispatch import peers
from fastformer.dispatch.operation import Arguments, Peer

_QUACK = "quack.cross_entropy"


def _rows(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return logits.reshape(-1, logits.shape[-1]), target.reshape(-1)


def _quack_forward(
    logits: Tensor, target: Tensor, reduction: str, ignore_index: int, label_smoothing: float,
    smoothing: str, ahead: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return (loss, lse [M, 2], count, no gradient), as the kernel does without `ahead`.

    The log-sum-exp of a row is the sum of the two numbers of lse.
    """
    op = peers.function(_QUACK, "cross_entropy_fwd", "ignore_index", "return_lse")
    rows = _rows(logits, target)
    with torch.cuda.device_of(logits):
        loss, lse = op(*rows, ignore_index=ignore_index, return_lse=True)
        count = loss.new_empty(0)
        if reduction == "mean":
            count = (rows[1] != ignore_index).sum().to(loss.dtype)
    total = loss.view(target.shape) if reduction == "none" else loss.sum()
    lse = torch.stack([lse, torch.zeros_like(lse)], 1)
    return total / count if reduction == "mean" else total, lse, count, logits.new_empty(0)


def _quack_backward(
    grad: Tensor, logits: Tensor, target: Tensor, reduction: str, ignore_index: int,
    label_smoothing: float, smoothing: str, lse: Tensor, count: Tensor, needs: list[bool],
) -> Tensor:  # fmt: skip
    op = peers.function(_QUACK, "cross_entropy_bwd", "ignore_index")
    rows = _rows(logits, target)
    grad = grad.to(lse.dtype) / count if reduction == "mean" else grad.to(lse.dtype)
    grads = grad.reshape(-1).expand(len(lse)).contiguous()
    with torch.cuda.device_of(logits):
        return op(*rows, grads, lse.sum(1), ignore_index=ignore_index).view(logits.shape)


_KNOWN = "logits", "target", "reduction", "ignore_index", "smoothing"


def _unsupported(arguments: Arguments) -> str | None:
    logits = arguments["logits"]
    if reason := peers.unknown(arguments, *_KNOWN):
        return reason
    if not logits.numel():
        return "it is not measured for empty tensors"
    if (peers.gpu_generation(logits) or 0) < 8:
        return "it runs on NVIDIA GPUs, sm_80 and newer"
    if not arguments["target"].is_contiguous():
        return "it takes a contiguous target"
    return peers.unsupported_rows(logits)


PEERS = (
    Peer("quack-kernels", _quack_forward, None, _unsupported),
    Peer("quack-kernels", _quack_forward, _quack_backward, _unsupported),
)
