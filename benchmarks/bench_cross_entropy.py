"""linear_cross_entropy beside torch's linear and cross_entropy, the same compiled, torch's own
fused op, and Liger; the same with the entropy of each row, which the objective of a policy has;
linear_kl_div; and cross_entropy of given logits beside torch, Liger, and QuACK, which does not
smooth labels.

FLOPs: 2 M N V forward, three times that with the gradients; with the entropy four times, as the
logits are computed again. Least bytes: the parameters and the input once, and with gradients these
once more. The column MiB shows which provider stores the logits.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

import fastformer as ff
from benchmarks.peers import GPU, available, with_torch

ROWS = 8192 if GPU else 256
WIDTH, SMOOTHING = 512, 0.1
CLASSES = [32768, 131072, 262144] if GPU else [1024, 8192]


def _ours(x, weight, target):
    return ff.linear_cross_entropy(x, weight, target, label_smoothing=SMOOTHING)


def _torch(x, weight, target):
    return F.cross_entropy(F.linear(x, weight), target, label_smoothing=SMOOTHING)


def _torch_fused(x, weight, target):
    return F.linear_cross_entropy(x, weight, target, label_smoothing=SMOOTHING)


def _liger(x, weight, target):
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    fused = LigerFusedLinearCrossEntropyFunction.apply
    return fused(x, weight, target, None, None, -100, 0.0, SMOOTHING)[0]


def _policy(x, weight, target):
    options = dict(reduction="none", temperature=0.7, return_entropy=True)
    loss, entropy = ff.linear_cross_entropy(x, weight, target, **options)
    return loss - 0.01 * entropy


def _torch_policy(x, weight, target):
    logp = (F.linear(x, weight).float() / 0.7).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return F.nll_loss(logp, target, reduction="none") - 0.01 * entropy


def _torch_divergence(x, weight, y, teacher):
    s, t = (F.linear(*given).float().log_softmax(-1) for given in ((x, weight), (y, teacher)))
    return F.kl_div(s, t, reduction="batchmean", log_target=True)


class Op(NamedTuple):
    """ours, peers; flops: forward, and with the gradients, over M N V."""

    ours: Callable
    peers: dict[str, Callable]
    flops: tuple[int, int]


LINEAR = with_torch(_torch, liger=_liger, **{"torch fused": _torch_fused})
OPS = {
    "linear_cross_entropy": Op(_ours, LINEAR, (2, 6)),
    "linear_cross_entropy and entropy": Op(_policy, with_torch(_torch_policy), (2, 8)),
    "linear_kl_div": Op(ff.linear_kl_div, with_torch(_torch_divergence), (4, 8)),
}
OURS = available("reference", "triton")
PROVIDERS = [(op, p) for op in OPS for p in available(*OPS[op].peers) + OURS]


@pytest.mark.parametrize("op, provider", PROVIDERS)
@pytest.mark.parametrize("classes", CLASSES)
def test_linear(compare, random, device, mode, classes, op):
    both, teaches = mode == "forward+backward", op == "linear_kl_div"
    if classes > CLASSES[0] and teaches:
        pytest.skip("compared with one number of classes")
    operands = [random(ROWS, WIDTH), random(classes, WIDTH, unit_sum=True)]
    given = [torch.randint(0, classes, (ROWS,), device=device)]
    if teaches:
        given = [random(ROWS, WIDTH).detach(), random(classes, WIDTH, unit_sum=True).detach()]
    passes = 2 if both or teaches else 1
    compare(
        f"{op} V={classes} rows={ROWS}", OPS[op].peers, OPS[op].ours, (*operands, *given),
        flops=OPS[op].flops[both] * ROWS * WIDTH * classes,
        nbytes=passes * sum(x.nbytes for x in operands), rows=ROWS, width=WIDTH, classes=classes,
    )  # fmt: skip


def _ours_given(logits, target):
    return ff.cross_entropy(logits, target, label_smoothing=SMOOTHING)


def _torch_given(logits, target):
    return F.cross_entropy(logits, target, label_smoothing=SMOOTHING)


def _liger_given(logits, target):
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy(logits, target, label_smoothing=SMOOTHING)


def _quack_given(logits, target):
    from quack.cross_entropy import cross_entropy

    return cross_entropy(logits, target)


GIVEN = with_torch(_torch_given, liger=_liger_given, quack=_quack_given)


@pytest.mark.parametrize("provider", available(*GIVEN) + OURS)
@pytest.mark.parametrize("classes", CLASSES)
def test_cross_entropy(compare, random, device, mode, classes):
    """The loss of given logits: each is read once and, with the gradient, written once."""
    logits = random(ROWS, classes)
    target = torch.randint(0, classes, (ROWS,), device=device)
    nbytes = logits.nbytes * (2 if mode == "forward+backward" else 1)
    group = f"cross_entropy V={classes} rows={ROWS}"
    compare(group, GIVEN, _ours_given, (logits, target), nbytes=nbytes, rows=ROWS, classes=classes)
