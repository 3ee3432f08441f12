"""Attention to parts of one projection: the gradients of query, key and value are one tensor."""

import collections
import dataclasses

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastformer as ff
from fastformer import use_backend
from fastformer.dispatch import backends
from fastformer.nn.attention import MultiHeadedAttention

B, S, D, H = 2, 9, 32, 4
# By name: how the module is made, what it attends to, and the options of its call.
CASES = {
    "self": ({}, "x", {}),
    "grouped, sinks, causal": (dict(kv_heads=2, sinks=True), "x", dict(is_causal=True)),
    "one group, dropout": (dict(kv_heads=1, dropout=0.3), "x", {}),
    "bias": ({}, "x", dict(bias=(H, S, S))),
    "memory": ({}, "y", {}),
    "grouped memory": (dict(kv_heads=2, dropout=0.3), "y", {}),
    "rotary": (dict(kv_heads=2), "x", dict(rotary=True)),
    "rotary and norms": (dict(qk_norm=True), "x", dict(rotary=True, is_causal=True)),
    "packed": (dict(kv_heads=2, sinks=True), "packed", dict(is_causal=True)),
    "packed, rotary and norms": (dict(qk_norm=True), "packed", dict(rotary=True)),
    "torch": ("torch", "x", {}),
    "torch, memory": ("torch", "y", {}),
    "torch, sequences first": ("torch first", "x", {}),
    "torch, no batch": ("torch", "one", {}),
}


def made(name, device, dtype=torch.float64):
    """(call, leaves): call() computes the output of a case."""
    torch.manual_seed(3)
    options, to, given = CASES[name]
    if isinstance(options, str):
        module = nn.MultiheadAttention(D, H, batch_first=options != "torch first")
        ff.accelerate(module)
    else:
        module = MultiHeadedAttention(H, D, **{"dropout": 0.0, **options})
    module = module.to(device, dtype)
    for p in module.parameters():
        p.data.add_(torch.randn_like(p) / 10)
    lengths = torch.tensor([5, 1, 0, S], device=device)
    shape = (18, D) if to == "packed" else (S, D) if to == "one" else (B, S, D)
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    leaves, given, y = [x, *module.parameters()], dict(given), x
    if to == "y":
        y = torch.randn(B, S + 3, D, device=device, dtype=dtype, requires_grad=True)
        leaves.append(y)
    if "bias" in given:
        given["bias"] = torch.randn(given["bias"], device=device, dtype=dtype, requires_grad=True)
        leaves.append(given["bias"])
    if to == "packed":  # with three rows past the last sequence
        packing = ff.unpad(torch.zeros(4, S, 1, device=device), lengths)[1]
        indices = torch.cat([packing.indices, packing.indices[:3]])
        given["mask"] = dataclasses.replace(packing, indices=indices)
    if "rotary" in given:
        tables = ff.rotary_frequencies(D // H, len(x) if to == "packed" else S, device=device)
        given["rotary"] = tuple(t.to(dtype) for t in tables)
    if isinstance(options, str):
        return lambda: module(x, y, y, need_weights=False)[0], leaves
    return lambda: module(x, y, y, **given), leaves


def results(call, leaves, seed=5):
    torch.manual_seed(seed)
    out = call()
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)]


def splits(out):
    """How many nodes of a graph split a tensor."""
    found, todo = set(), [out.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [x for x, _ in node.next_functions]
    return sum("Split" in type(x).__name__ for x in found)


def apart(monkeypatch):
    monkeypatch.setattr(backends, "may_join", lambda *_: False)


@pytest.mark.parametrize("name", CASES)
def test_gradients(name, device, monkeypatch):
    """They are those of the reference, and bit for bit those of calls that are not joined. These
    run first: their plans write gradients elsewhere, and the joined calls must not take them.
    """
    call, leaves = made(name, device)
    with use_backend("reference"):
        oracle = results(call, leaves)
    with use_backend("triton"):
        single, leaves_of_single = made(name, device, torch.float32)
        with monkeypatch.context() as patch:
            apart(patch)
            split, splits_apart = results(call, leaves), splits(call())
            rounded_split = results(single, leaves_of_single)
        have, splits_joined = results(call, leaves), splits(call())
        rounded = results(single, leaves_of_single)
    for want, got in zip(oracle, have, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert all(map(torch.equal, have, split)) and all(map(torch.equal, rounded, rounded_split))
    assert have[1].any() and splits_joined < splits_apart


@pytest.mark.parametrize("name", ["self", "rotary and norms", "memory", "packed"])
def test_second_derivatives(name, device):
    call, leaves = made(name, device)
    found = []
    for backend in ("reference", "triton"):
        with use_backend(backend), ff.dispatch.state.use_formula():
            grads = torch.autograd.grad(call().sin().sum(), leaves, create_graph=True)
            total = sum(g.square().sum() for g in grads)
            found.append(torch.autograd.grad(total, leaves))
    for want, have in zip(*found, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-6)


@pytest.mark.with_all
@pytest.mark.parametrize("name", ["grouped, sinks, causal", "rotary and norms", "memory", "packed"])
def test_compile(name, device):
    call, leaves = made(name, device)
    with use_backend("triton"):
        want = results(call, leaves)
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for a, b in zip(results(compiled, leaves), want, strict=True):
            torch.testing.assert_close(a, b)


def test_transforms_and_tangents(device):
    m = MultiHeadedAttention(H, D, 0.0).double().to(device)
    x, t = torch.randn(2, B, S, D, device=device, dtype=torch.float64)

    def loss(x):
        return m(x, x, x).sin().sum()

    found = []
    for backend in ("reference", "triton"):
        with use_backend(backend):
            found.append((torch.func.grad(loss)(x), torch.func.jvp(loss, (x,), (t,))[1]))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("frozen", ["x", "y", "queries", "keys"])
def test_parts_without_a_gradient(device, frozen, monkeypatch):
    """What is frozen gets none, and the others get theirs."""
    found = []
    for joined in (True, False):
        call, leaves = made("memory", device)
        if not joined:
            apart(monkeypatch)
        frozen_leaves = dict(x=[0], y=[-1], queries=[0, 1, 2], keys=[-1, 3, 4, 5, 6])[frozen]
        for i in frozen_leaves:
            leaves[i].requires_grad_(False)
        with use_backend("triton"):
            call().sin().sum().backward()
        found.append([x.grad for x in leaves])
        assert all((x.grad is None) == (not x.requires_grad) for x in leaves)
    for a, b in zip(*found):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("q, k", [(0, 0), (0, 3), (3, 0)])
def test_nothing(device, q, k):
    m = MultiHeadedAttention(H, D, 0.0).to(device)
    x, y = (torch.randn(B, n, D, device=device, requires_grad=True) for n in (q, k))
    y = x if q == k else y
    with use_backend("triton"):
        m(x, y, y).sum().backward()
    assert all(p.grad.isfinite().all() for p in m.parameters())
    assert x.grad.shape == x.shape and not x.grad.any() and (q == k or not y.grad.any())


def test_autocast_and_hooks(device):
    m = MultiHeadedAttention(H, D, 0.0).to(device)
    x = torch.randn(B, S, D, device=device, requires_grad=True)
    with use_backend("triton"):
        with torch.autocast(device.type, torch.bfloat16):
            out = m(x, x, x)
        out.float().sum().backward()
        assert out.dtype == torch.bfloat16 and x.grad.isfinite().all() and x.grad.any()
        seen = []
        m.linears[1].register_full_backward_hook(lambda *given: seen.append(given))
        m(x, x, x).sum().backward()
    assert len(seen) == 1


def test_reports(device):
    """Both ops of a call are reported."""
    seen = []
    call, _ = made("rotary", device)
    with use_backend("triton"), backends.observe(seen.append):
        call()
    assert [(x.op, x.backend) for x in seen] == [
        ("rotary_embedding", "triton"),
        ("scaled_dot_product_attention", "triton"),
    ]


@pytest.mark.parametrize("which", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize("name", ["grouped memory", "rotary and norms", "packed"])
def test_opcheck(device, name, which):
    call, _ = made(name, device)
    recorded = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "joint" in str(function):
                kept = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in args]
                recorded.append((function, tuple(kept)))
            return function(*args, **(kwargs or {}))

    with use_backend("triton"), Recorder():
        call().sum().backward()
    assert len(recorded) == 2
    torch.library.opcheck(*recorded[which])


# ------------------------------------------------------------------------------------------ a count


class Copies(TorchDispatchMode):
    """Counts copies and concatenations of activations, known by their first dimension."""

    def __init__(self):
        super().__init__()
        self.found = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        copied = name in ("clone", "copy_", "_to_copy", "contiguous") and out.numel() >= B * S * D
        if (name == "cat" or copied) and out.shape[0] in (B, S, B * S):
            self.found[name] += 1
        return out


def layers(name):
    x, y = (torch.randn(B, S, D, requires_grad=True) for _ in range(2))
    mask = torch.ones(B, 1, S, dtype=torch.bool)
    if name.startswith("torch"):
        of_torch = nn.TransformerEncoderLayer if "encoder" in name else nn.TransformerDecoderLayer
        layer = of_torch(D, H, 2 * D, batch_first=True)
        ff.accelerate(layer)
        return layer, (x,) if "encoder" in name else (x, y)
    if name == "rotary":
        model = ff.make_decoder(9, 1, D, 2 * D, H, positions="rotary", qk_norm=True)
        return model, (torch.randint(1, 9, (B, S)),)
    model = ff.make_model(9, 9, 1, D, 2 * D, H)
    if name == "encoder":
        return model.encoder, (x, mask)
    return model.decoder, (x, y, mask, mask)


@pytest.mark.parametrize("name", ["encoder", "decoder", "torch encoder", "torch decoder", "rotary"])
@pytest.mark.parametrize("joined", [True, False], ids=["joined", "apart"])
def test_nothing_is_concatenated(name, joined, monkeypatch):
    """No activation, forward or backward; apart, one for each attention, so the count sees it."""
    layer, inputs = layers(name)
    if not joined:
        apart(monkeypatch)
    with use_backend("triton"), Copies() as copies:
        out = layer(*inputs)
        out.float().sin().sum().backward()
    attentions = 2 if "decoder" in name else 1
    assert copies.found["cat"] == (0 if joined else attentions), copies.found
    assert sum(copies.found.values()) == copies.found["cat"], copies.found
