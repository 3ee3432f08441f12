"""linear_cross_entropy beside torch's linear and cross_entropy, the same compiled, torch's own
fused op, and Liger; cross_entropy of given logits beside these and QuACK, which does not smooth
labels.

FLOPs: 2 M N V forward, three times that with the gradients; with the entropy four times, as the
logits are computed again. Least bytes: the parameters and the input once, and with gradients these
once more. The column MiB shows which provider stores the logits.
"""

import pytest
import torch
import torch.nn.functional as F

import fastformer as ff
from benchmarks.peers import GPU, available, compiled

ROWS = 8192 if GPU else 256
WIDTH, SMOOTHING = 512, 0.1
CLASSES = [32768, 131072, 262144] if GPU else [1024, 8192]
PEERS, OURS = available("torch", "compile", "liger"), available("reference", "triton")


@pytest.mark.parametrize("provider", [*PEERS, *available("torch fused"), *OURS])
@pytest.mark.parametrize("classes", CLASSES)
def test_linear_cross_entropy(compare, random, device, mode, classes):
    x, weight = random(ROWS, WIDTH), random(classes, WIDTH, unit_sum=True)
    target = torch.randint(0, classes, (ROWS,), device=device)
    both = mode == "forward+backward"
    compare(
        f"linear_cross_entropy V={classes} rows={ROWS}", LINEAR, _ours, (x, weight, target),
        flops=2 * ROWS * WIDTH * classes * (3 if both else 1),
        nbytes=(x.nbytes + weight.nbytes) * (2 if both else 1),
        rows=ROWS, width=WIDTH, classes=classes,
    )  # fmt: skip


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


LINEAR = {
    "torch": _torch,
    "torch fused": _torch_fused,
    "compile": compiled(_torch),
    "liger": _liger,
}


@pytest.mark.parametrize("provider", [*available("torch", "compile"), *OURS])
@pytest.mark.parametrize("classes", CLASSES[:2])
def test_entropy(compare, random, device, mode, classes):
    """The objective of a policy: log-probabilities of tokens, and the entropy of each."""
    x, weight = random(ROWS, WIDTH), random(classes, WIDTH, unit_sum=True)
    target = torch.randint(0, classes, (ROWS,), device=device)
    both = mode == "forward+backward"
    compare(
        f"linear_cross_entropy and entropy V={classes} rows={ROWS}", POLICY, _policy,
        (x, weight, target), flops=2 * ROWS * WIDTH * classes * (4 if both else 1),
        nbytes=(x.nbytes + weight.nbytes) * (2 if both else 1),
        rows=ROWS, width=WIDTH, classes=classes,
    )  # fmt: skip


def _policy(x, weight, target):
    options = dict(reduction="none", temperature=0.7, return_entropy=True)
    loss, entropy = ff.linear_cross_entropy(x, weight, target, **options)
    return loss - 0.01 * entropy


def _torch_policy(x, weight, target):
    logp = (F.linear(x, weight).float() / 0.7).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return F.nll_loss(logp, target, reduction="none") - 0.01 * entropy


POLICY = {"torch": _torch_policy, "compile": compiled(_torch_policy)}


@pytest.mark.parametrize("provider", [*available("torch", "compile"), *OURS])
def test_linear_kl_div(compare, random, device, mode):
    classes = CLASSES[0]
    x, weight = random(ROWS, WIDTH), random(classes, WIDTH, unit_sum=True)
    teacher = random(ROWS, WIDTH), random(classes, WIDTH, unit_sum=True)
    both = mode == "forward+backward"
    compare(
        f"linear_kl_div V={classes} rows={ROWS}", DIVERGENCE, ff.linear_kl_div,
        (x, weight, *(y.detach() for y in teacher)),
        flops=2 * ROWS * WIDTH * classes * (4 if both else 2),
        nbytes=2 * (x.nbytes + weight.nbytes), rows=ROWS, width=WIDTH, classes=classes,
    )  # fmt: skip


def _torch_divergence(x, weight, y, teacher):
    s, t = (F.linear(*given).float().log_softmax(-1) for given in ((x, weight), (y, teacher)))
    return F.kl_div(s, t, reduction="batchmean", log_target=True)


DIVERGENCE = {"torch": _torch_divergence, "compile": compiled(_torch_divergence)}


@pytest.mark.parametrize("provider", [*PEERS, *available("quack"), *OURS])
@pytest.mark.parametrize("classes", CLASSES)
def test_cross_entropy(compare, random, device, mode, classes):
    """The loss of given logits: each is read once and, with the gradient, written once."""
    logits = random(ROWS, classes)
    target = torch.randint(0, classes, (ROWS,), device=device)
    nbytes = logits.nbytes * (2 if mode == "forward+backward" else 1)
    group = f"cross_entropy V={classes} rows={ROWS}"
    compare(group, GIVEN, _ours_given, (logits, target), nbytes=nbytes, rows=ROWS, classes=classes)


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


GIVEN = {
    "torch": _torch_given,
    "compile": compiled(_torch_given),
    "liger": _liger_given,
    "quack": _quack_given,
}
