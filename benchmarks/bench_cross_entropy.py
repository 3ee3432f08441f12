"""linear_cross_entropy beside torch's own fused op, torch's linear and cross_entropy, and Liger.

FLOPs: 2 M N V forward, three times that with the gradients. Least bytes: the parameters and the
input once, and with gradients theirs once more; MiB shows who holds the logits.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

import fastformer as ff

GPU = torch.cuda.is_available()
ROWS = 8192 if GPU else 256
WIDTH = 512
CLASSES = [32768, 131072, 262144] if GPU else [1024, 8192]
GIVEN = ["reference", *(["triton"] if GPU else []), "torch"]  # those that take logits
PROVIDERS = [*GIVEN, "torch fused", "compile", "liger"]


@pytest.mark.parametrize("provider", PROVIDERS)
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
        if not hasattr(F, "linear_cross_entropy"):
            pytest.skip(f"torch {torch.__version__} has no linear_cross_entropy")
        return lambda x, w, t, s: F.linear_cross_entropy(x, w, t, label_smoothing=s)
    if provider == "compile":
        if not GPU:
            pytest.skip("torch.compile needs a C++ compiler on a CPU")
        return torch.compile(_torch)
    liger = pytest.importorskip("liger_kernel.ops.fused_linear_cross_entropy")
    fused = liger.LigerFusedLinearCrossEntropyFunction.apply
    return lambda x, w, t, s: fused(x, w, t, None, None, -100, 0.0, s)[0]


def _torch(x, weight, target, smoothing):
    return F.cross_entropy(F.linear(x, weight), target, label_smoothing=smoothing)


@pytest.mark.parametrize(
    "provider", [p for p in PROVIDERS if p in ("reference", "triton", "torch")]
)
@pytest.mark.parametrize("classes", CLASSES)
def test_cross_entropy(measure, differentiated, device, dtype, mode, classes, provider):
    """On given logits: each is read twice and, with the gradient, read and written once more."""
    logits = torch.randn(ROWS, classes, device=device, dtype=dtype, requires_grad=True)
    target = torch.randint(0, classes, (ROWS,), device=device)

    def forward():
        if provider == "torch":
            return F.cross_entropy(logits, target, label_smoothing=0.1)
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
