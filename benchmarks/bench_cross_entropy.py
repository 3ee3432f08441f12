"""linear_cross_entropy beside torch's linear and cross_entropy, the same compiled, torch's own
fused op, and Liger; cross_entropy of given logits beside these and QuACK, which does not smooth
labels.

FLOPs: 2 M N V forward, three times that with the gradients. Least bytes: the parameters and the
input once, and with gradients these once more. The column MiB shows which provider stores the
logits.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

import fastformer as ff
from benchmarks.peers import GPU, available, compiled, implementation

ROWS = 8192 if GPU else 256
WIDTH = 512
CLASSES = [32768, 131072, 262144] if GPU else [1024, 8192]
PEERS, OURS = available("torch", "compile", "liger"), available("reference", "triton")


@pytest.mark.parametrize("provider", [*PEERS, *available("torch fused"), *OURS])
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("smoothing", [0.1])
def test_linear_cross_entropy(
    measure, differentiated, random, device, dtype, mode, classes, smoothing, provider
):
    x, weight = random(ROWS, WIDTH), random(classes, WIDTH, unit_sum=True)
    target = torch.randint(0, classes, (ROWS,), device=device)
    compute = implementation(provider, LINEAR, _ours)
    forward = functools.partial(compute, x, weight, target, smoothing)
    flops = 2 * ROWS * WIDTH * classes * (3 if mode == "forward+backward" else 1)
    nbytes = (x.nbytes + weight.nbytes) * (2 if mode == "forward+backward" else 1)
    measure(
        differentiated(forward, (x, weight)),
        group=f"linear_cross_entropy V={classes} rows={ROWS} {mode}",
        provider=provider,
        dtype=dtype,
        flops=flops,
        nbytes=nbytes,
        rows=ROWS,
        width=WIDTH,
        classes=classes,
    )


def _ours(x, weight, target, smoothing):
    return ff.linear_cross_entropy(x, weight, target, label_smoothing=smoothing)


def _torch(x, weight, target, smoothing):
    return F.cross_entropy(F.linear(x, weight), target, label_smoothing=smoothing)


def _torch_fused(x, weight, target, smoothing):
    return F.linear_cross_entropy(x, weight, target, label_smoothing=smoothing)


def _liger(x, weight, target, smoothing):
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    fused = LigerFusedLinearCrossEntropyFunction.apply
    return fused(x, weight, target, None, None, -100, 0.0, smoothing)[0]


LINEAR = {
    "torch": _torch,
    "torch fused": _torch_fused,
    "compile": compiled(_torch),
    "liger": _liger,
}


@pytest.mark.parametrize("provider", [*PEERS, *available("quack"), *OURS])
@pytest.mark.parametrize("classes", CLASSES)
def test_cross_entropy(measure, differentiated, random, device, dtype, mode, classes, provider):
    """The loss of given logits: each is read once and, with the gradient, written once."""
    logits = random(ROWS, classes)
    target = torch.randint(0, classes, (ROWS,), device=device)
    compute = implementation(provider, GIVEN, _ours_given)
    measure(
        differentiated(lambda: compute(logits, target), (logits,)),
        group=f"cross_entropy V={classes} rows={ROWS} {mode}",
        provider=provider,
        dtype=dtype,
        nbytes=logits.nbytes * (2 if mode == "forward+backward" else 1),
        rows=ROWS,
        classes=classes,
    )


def _ours_given(logits, target):
    return ff.cross_entropy(logits, target, label_smoothing=0.1)


def _torch_given(logits, target):
    return F.cross_entropy(logits, target, label_smoothing=0.1)


def _liger_given(logits, target):
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy(logits, target, label_smoothing=0.1)


def _quack_given(logits, target):
    from quack.cross_entropy import cross_entropy

    return cross_entropy(logits, target)


GIVEN = {
    "torch": _torch_given,
    "compile": compiled(_torch_given),
    "liger": _liger_given,
    "quack": _quack_given,
}
