"""torch.vmap over every op and over models: outputs and gradients are those of a loop over the examples."""

import contextlib
import zlib

import numpy as np
import pytest
import torch
from calls import DRAWN, Draw, drawn, outputs_of
from torch.func import grad, vmap

import fastformer as ff
from fastformer import use_backend

CASES = 12  # of an op, in each run; with --all
ALL = 63  # 16 ops on two backends: 2,016 calls


def varied(draw, name, x, n, options):
    """n tensors like x, which are different where values may differ."""
    if x.is_floating_point():
        return torch.stack([x * (1 + i / 4) for i in range(n)])
    if name == "key_lengths":
        return torch.stack([(x - i).clamp(min=0) for i in range(n)])
    if name == "attn_mask":
        hidden = torch.as_tensor(draw.random.random((n, *x.shape)) < 0.2, device=x.device)
        return x & ~hidden
    if name.startswith("cu_seqlens"):
        return torch.stack([x] * n)
    flat = x.flatten()  # of ids and labels; a mask
    return torch.stack([flat.roll(i).view(x.shape) for i in range(n)])


def vmapped(draw, case, n):
    """A random call for n examples: (f, in_dims, inputs, names, examples). f takes the tensors of one example by
    position; examples: those of each, as a loop takes them.
    """
    tensors, options, floating = drawn(case, draw)
    options |= {name: x for name, x in tensors.items() if x is None}
    tensors = {name: x for name, x in tensors.items() if x is not None}
    for name, x in options.items():  # teacher_input, mask, slopes and tables may be mapped, too
        if isinstance(x, torch.Tensor) and name != "weight":
            tensors[name] = x
    options = {name: x for name, x in options.items() if name not in tensors}
    if options.get("dropout_p") and draw.often(0.3):
        tensors["dropout_seed"] = torch.tensor([options.pop("dropout_seed")], device=draw.device)
    names = list(tensors)
    count = draw.random.integers(1, len(names) + 1)
    mapped = set(draw.random.permutation(names)[:count].tolist()) if draw.often(0.7) else {names[0]}
    inputs, in_dims, columns = [], [], []
    for name in names:
        x = tensors[name].detach()
        if name not in mapped:
            inputs.append(x), in_dims.append(None), columns.append([x] * n)
            continue
        if name == "dropout_seed":
            each = torch.stack([x + i for i in range(n)])
        else:
            each = varied(draw, name, x, n, options)
        dim = int(draw.random.integers(x.dim() + 1))
        columns.append(list(each.unbind(0)))
        in_dims.append(dim if draw.often() else dim - x.dim() - 1)
        inputs.append(draw.view(each.movedim(0, dim), -1 if not x.is_floating_point() else float("nan")) if x.dtype != torch.bool else each.movedim(0, dim))
    def f(*given):
        return outputs_of(case, dict(zip(names, given)), options)
    return f, tuple(in_dims), inputs, [names.index(k) for k in floating if k in names], list(zip(*columns))


def total(outputs, weights):
    return sum((x.double() * w).sum() for x, w in zip(outputs, weights) if x.is_floating_point())


def close(what, have, want, dtype):
    assert have.shape == want.shape and have.dtype == want.dtype, (what, have.shape, want.shape, have.dtype, want.dtype)
    if not have.is_floating_point():
        assert torch.equal(have, want), what
        return
    have, want = have.double(), want.double()
    assert torch.equal(have.isfinite(), want.isfinite()), what
    have, want = have.nan_to_num(0, 0, 0), want.nan_to_num(0, 0, 0)
    bound = {torch.float64: 1e-6, torch.float32: 1e-4}.get(dtype, 2e-2)
    assert (have - want).norm() <= bound * (want.norm() + 1e-3), (what, float((have - want).norm()), float(want.norm()))


def check(case, draw):
    n = draw.one(1, 2, 3)
    f, in_dims, inputs, wanted, examples = vmapped(draw, case, n)
    want = [f(*example) for example in examples]
    weights = [draw.normal(*x.shape, dtype=torch.float64).contiguous() for x in want[0]]
    have = vmap(f, in_dims)(*inputs)
    for k, column in enumerate(zip(*want)):
        close(f"output {k}", have[k], torch.stack(column), draw.dtype)
    if not wanted:
        return
    loss = lambda *given: total(f(*given), weights)
    each = []  # gradients of each example
    for example in examples:
        leaves = [x.clone().requires_grad_() if i in wanted else x for i, x in enumerate(example)]
        each.append(torch.autograd.grad(loss(*leaves), [leaves[i] for i in wanted]))
    columns = [torch.stack(column) for column in zip(*each)]
    found = vmap(grad(loss, tuple(wanted)), in_dims)(*inputs)
    for i, have, want in zip(wanted, found, columns, strict=True):
        close(f"gradient {i} of each example", have, want, draw.dtype)
    # The gradient of the sum over examples, by backward() through vmap and by torch.func.
    leaves = [x.clone().requires_grad_() if i in wanted else x for i, x in enumerate(inputs)]
    summed = lambda *given: vmap(loss, in_dims)(*given).sum()
    outer = torch.autograd.grad(summed(*leaves), [leaves[i] for i in wanted])
    other = grad(summed, tuple(wanted))(*inputs)
    for i, *two, want in zip(wanted, outer, other, columns, strict=True):
        dim = in_dims[i]
        want = want.double().sum(0).to(want.dtype) if dim is None else want.movedim(0, dim)
        for have in two:
            close(f"gradient {i}", have, want, draw.dtype)


@pytest.mark.parametrize("case", DRAWN, ids=lambda case: case.__name__)
@pytest.mark.filterwarnings("error:There is a performance drop.*fastformer")
def test_random_calls(case, backend, device, request):
    start = zlib.crc32(b"vmap" + case.__name__.encode())
    bad = []
    for n in range(int(__import__("os").environ.get("N", CASES))):
        try:
            check(case, Draw([start, n], device, most=20))
        except Exception as error:
            if __import__("os").environ.get("RAISE"): raise
            bad.append((n, type(error).__name__, str(error)[:300]))
    assert not bad, f"{len(bad)} {bad[:4]}"
