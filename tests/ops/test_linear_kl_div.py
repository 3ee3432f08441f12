"""linear_kl_div on both backends, against the written-out formula in float64 and against torch."""

import pytest
import torch
import torch.nn.functional as F

import fastformer as ff
from fastformer import use_backend
from fastformer.ops import functional

V = 37


def inputs(rows, dtype=torch.float32, device="cpu", n=24, k=16, bias=True):
    def random(*shape):
        return torch.randn(shape, device=device).to(dtype)

    return {
        "input": random(rows, n),
        "linear_weight": random(V, n) / n**0.5 * 3,
        "linear_bias": random(V) if bias else None,
    }, {
        "teacher_input": random(rows, k),
        "teacher_weight": random(V, k) / k**0.5 * 3,
        "teacher_bias": random(V) if bias else None,
    }


CASES = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none", "masked": True},
    "masked": {"masked": True},
    "reverse": {"reverse": True},
    "reverse, none": {"reverse": True, "reduction": "none", "softcap": 5.0, "temperature": 2.0},
    "softcap, temperature": {"softcap": 5.0, "temperature": 0.7, "masked": True},
}


def options_of(case, rows, device):
    options = dict(CASES[case])
    if options.pop("masked", False):
        options["mask"] = torch.arange(rows, device=device) % 4 != 1
    return options


@pytest.mark.sample
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_against_the_oracle(backend, device, against_oracle, case, dtype):
    student, teacher = inputs(23, dtype, device)
    against_oracle(functional.linear_kl_div, student, **teacher, **options_of(case, 23, device))


@pytest.mark.parametrize("case", ["masked", "reverse, none"])
@pytest.mark.parametrize("bias", [True, False])
def test_chunks_and_blocks(device, against_oracle, monkeypatch, case, bias):
    """Several chunks of tokens, the last one cut, and several blocks of classes."""
    kernels = pytest.importorskip("fastformer.kernels.cross_entropy")
    monkeypatch.setattr(kernels.launchers, "CHUNK", 8)
    monkeypatch.setattr(kernels.divergence, "configuration", lambda *_: (16, 4))
    for group in (16, 4):
        monkeypatch.setattr(kernels.divergence, "group_size", lambda *_, group=group: group)
        student, teacher = inputs(21, device=device, bias=bias)
        options = options_of(case, 21, device)
        with use_backend("triton"):
            against_oracle(functional.linear_kl_div, student, **teacher, **options)


@pytest.mark.parametrize("reverse", [False, True])
def test_torchs_kl_div(backend, device, reverse):
    student, teacher = inputs(9, device=device)
    s, t = (F.linear(*x.values()).log_softmax(-1) for x in (student, teacher))
    want = F.kl_div(*((t, s) if reverse else (s, t)), reduction="batchmean", log_target=True)
    have = ff.linear_kl_div(**student, **teacher, reverse=reverse)
    torch.testing.assert_close(have, want)
    itself = dict(zip(teacher, student.values()))
    assert abs(ff.linear_kl_div(**student, **itself, reverse=reverse)) < 1e-6


@pytest.mark.parametrize("reverse", [False, True])
def test_hidden_classes_and_offsets(backend, device, reverse):
    """A class that both hide adds nothing; an offset of all logits costs no digits; a class that
    the second distribution alone hides makes the divergence infinite.
    """
    eye, x, y = torch.eye(V, device=device), *torch.randn(2, 3, V, device=device)
    want = ff.linear_kl_div(x[:, 1:], eye[1:, 1:], y[:, 1:], eye[1:, 1:], reverse=reverse)
    bias = torch.zeros(V, device=device)
    bias[0] = -torch.inf
    given = dict(linear_bias=bias, teacher_bias=bias)
    x.requires_grad_()
    have = ff.linear_kl_div(x, eye, y, eye, reverse=reverse, **given)
    torch.testing.assert_close(have, want)
    assert torch.autograd.grad(have, x)[0].isfinite().all()
    x, y = x.detach(), y + 2.0**14  # exact in float32
    far = ff.linear_kl_div(x, eye, y, eye, reverse=reverse)
    near = ff.linear_kl_div(x.double(), eye.double(), y.double(), eye.double(), reverse=reverse)
    torch.testing.assert_close(far.double(), near, atol=1e-5, rtol=1e-5)
    one = dict(teacher_bias=bias) if reverse else dict(linear_bias=bias)
    assert ff.linear_kl_div(x, eye, y, eye, reverse=reverse, **one) == torch.inf


def test_no_row_and_no_tokens(backend, device):
    student, teacher = inputs(5, device=device)
    nothing = torch.zeros(5, dtype=torch.bool, device=device)
    x = student["input"].requires_grad_()
    loss = ff.linear_kl_div(**student, **teacher, mask=nothing)
    assert loss.isnan() and (torch.autograd.grad(loss, x)[0] == 0).all()
    for shape in ((0,), (2, 0)):
        none = {n: z.new_empty(*shape, z.shape[1]) for n, z in student.items() if n == "input"}
        other = dict(teacher, teacher_input=teacher["teacher_input"].new_empty(*shape, 16))
        assert ff.linear_kl_div(**{**student, **none}, **other, reduction="sum") == 0


def test_the_teacher_gets_no_gradient(backend, device):
    student, teacher = inputs(5, device=device)
    leaves = [x.requires_grad_() for x in (*student.values(), *teacher.values())]
    loss = ff.linear_kl_div(**student, **teacher)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    assert [g is None for g in grads] == [False] * 3 + [True] * 3


def test_blocks_of_one_chunk(device, against_oracle, monkeypatch):
    from fastformer.kernels.cross_entropy import divergence

    monkeypatch.setattr(divergence, "configuration", lambda *_: (16, 4))
    monkeypatch.setattr(divergence, "group_size", lambda *_: 4)
    for case in ("masked", "reverse, none", "softcap, temperature"):
        student, teacher = inputs(9, device=device)
        options = options_of(case, 9, device)
        with use_backend("triton"):
            against_oracle(functional.linear_kl_div, student, **teacher, **options)
