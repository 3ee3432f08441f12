"""linear_cross_entropy beside torch's linear and cross_entropy, the same compiled, torch's own
fused op, and Liger; cross_entropy of given logits beside these and QuACK, which smooths no labels.

FLOPs: 2 M N V forward, three times that with the gradients. Least bytes: the parameters and the
input once, and with gradients theirs once more; MiB shows who holds the logits.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

import fastformer as ff
from benchmarks.peers import available, compiled

GPU = torch.cuda.is_available()
ROWS = 8192 if GPU else 256
WIDTH = 512
CLASSES = [32768, 131072, 262144] if GPU else [1024, 8192]
PEERS, OURS = available("torch", "compile", "liger"), available("reference", "triton")


@pytest.mark.parametrize("provider", [*PEERS, *available("torch fused"), *OURS])
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("smoothing", [0.1])
def test_linear_cross_entropy(
    measure, differentiated, device, dtype, mode, classes, smoothing, provider
):
    x = torch.randn(ROWS, WIDTH, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(classes, WIDTH, device=device, dtype=dtype) / WIDTH**0.5
    weight.requires_grad_()
    target = torch.randint(0, classes, (ROWS,), device=device)
    forward = functools.partial(_forward(provider), x, weight, target, smoothing)
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


def _forward(provider):
    if provider in ("reference", "triton"):

        def ours(x, weight, target, smoothing):
            with ff.use_backend(provider):
                return ff.linear_cross_entropy(x, weight, target, label_smoothing=smoothing)

        return ours
    if provider == "torch":
        return _torch
    if provider == "torch fused":
        return lambda x, w, t, s: F.linear_cross_entropy(x, w, t, label_smoothing=s)
    if provider == "compile":
        return compiled(_torch)
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    fused = LigerFusedLinearCrossEntropyFunction.apply
    return lambda x, w, t, s: fused(x, w, t, None, None, -100, 0.0, s)[0]


def _torch(x, weight, target, smoothing):
    return F.cross_entropy(F.linear(x, weight), target, label_smoothing=smoothing)


@pytest.mark.parametrize("provider", [*PEERS, *available("quack"), *OURS])
@pytest.mark.parametrize("classes", CLASSES)
def test_cross_entropy(measure, differentiated, device, dtype, mode, classes, provider):
    """On given logits: each is read twice and, with the gradient, read and written once more."""
    logits = torch.randn(ROWS, classes, device=device, dtype=dtype, requires_grad=True)
    target = torch.randint(0, classes, (ROWS,), device=device)

    def forward():
        if provider in GIVEN:
            return GIVEN[provider](logits, target)
        with ff.use_backend(provider):
            return ff.cross_entropy(logits, target, label_smoothing=0.1)

    measure(
        differentiated(forward, (logits,)),
        group=f"cross_entropy V={classes} rows={ROWS} {mode}",
        provider=provider,
        dtype=dtype,
        nbytes=logits.nbytes * (3 if mode == "forward+backward" else 1),
        rows=ROWS,
        classes=classes,
    )


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
