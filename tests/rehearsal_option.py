"""A made-up option of attention, as a change of six files, and a program that proves it.

`parity`: query i sees only the keys j for which i + shift - j is even. test_walks.py makes the
change in a copy of the checkout and runs this file there.
"""

import functools
import importlib
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
os.environ["FASTFORMER_TUNING"] = "off"

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

# By file: (what stands there, what takes its place). The first occurrence is replaced.
CHANGE = {
    "fastformer/description.py": [
        (
            "    shard: Shard | None = None\n",
            "    shard: Shard | None = None\n    parity: bool = False\n",
        ),
        (
            '    Option("shard", "SymInt[]?", _no_words, by_torch=True, packed=True),\n',
            '    Option("shard", "SymInt[]?", _no_words, by_torch=True, packed=True),\n'
            '    Option("parity", "bool", packed=True),\n',
        ),
    ],
    "fastformer/ops/attention/contract.py": [
        (
            "    return_lse: bool = False,\n    shard: Sequence[int] | None = None,\n",
            "    return_lse: bool = False,\n    shard: Sequence[int] | None = None,\n"
            "    parity: bool = False,\n",
        ),
        (
            "        and return_lse is False\n",
            "        and return_lse is False\n        and parity is False\n",
        ),
        (
            "        shard,\n    )\n",
            '        shard,\n        require_flag("parity", parity),\n    )\n',
        ),
        (
            "    shard: Sequence[int] | None = None,\n) -> Any:\n",
            "    shard: Sequence[int] | None = None,\n    parity: bool = False,\n) -> Any:\n",
        ),
        (
            "        cu_seqlens_q=cu_seqlens_q.contiguous(),\n",
            "        parity=parity,\n        cu_seqlens_q=cu_seqlens_q.contiguous(),\n",
        ),
    ],
    "fastformer/ops/attention/masks.py": [
        (
            "    if key_lengths is not None or left >= 0 or right >= 0:\n",
            "    if key_lengths is not None or left >= 0 or right >= 0 or attention.parity:\n",
        ),
        (
            "    return visible, keys\n",
            "    if attention.parity:\n"
            "        even = (i + shift - j) % 2 == 0\n"
            "        visible = even if visible is None else visible & even\n"
            "    return visible, keys\n",
        ),
        (
            "is None and attention.alibi_slopes is None:\n",
            "is None and attention.alibi_slopes is None and not attention.parity:\n",
        ),
        (
            "is_causal=False, window=None, bias=added",
            "is_causal=False, window=None, parity=False, bias=added",
        ),
    ],
    "kernels/attention/scores.py": [
        ("    key_grad: Any = False", "    parity: Any = False\n    key_grad: Any = False"),
        (
            "    if EDGE or has.mask > 0 or has.bias == 1:\n        ok = keys.ok\n",
            "    if EDGE or has.mask > 0 or has.bias == 1 or has.parity:\n        ok = keys.ok\n",
        ),
        (
            '        s = tl.where(ok, s, float("-inf"))\n',
            "        if has.parity:\n            ok = ok & ((i + shift - j) & 1 == 0)\n"
            '        s = tl.where(ok, s, float("-inf"))\n',
        ),
    ],
    "kernels/attention/plan.py": [
        ("sinks, seed, shard, starts, ends,", "sinks, seed, shard, parity, starts, ends,"),
        ("        shard,\n        max_q,\n", "        shard,\n        parity,\n        max_q,\n"),
        (
            "            shard=attention.shard is not None,\n",
            "            shard=attention.shard is not None,\n"
            "            parity=attention.parity,\n",
        ),
    ],
    "docs/attention.md": [
        (
            "All options compose",
            "`parity=True` keeps every second key. All options compose",
        ),
    ],
}


QUERIES, KEYS = 18, 131  # more than a tile of keys


def formula(query, key, value, mask):
    """softmax(q k^T / sqrt(D)) v over the keys that the mask keeps."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num() @ value


def keeps(queries=QUERIES, keys=KEYS, shift=0, is_causal=False):
    """Return the mask [queries, keys] of parity."""
    i, j = torch.arange(queries).view(-1, 1) + shift, torch.arange(keys)
    even = (i - j) % 2 == 0
    return even & (j <= i) if is_causal else even


def gradients(function, tensors):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)


def same(have, want, bound=1e-4):
    """Require float32 results that are those in float64."""
    for x, y in zip(have, want, strict=True):
        assert (x.double() - y).abs().max() <= bound * y.abs().max()


def made(queries, keys):
    """Return query, key and value of two heads."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, n, 16, generator=generator) for n in (queries, keys, keys)]


def both(ff):
    for backend in ("triton", "reference"):
        with ff.use_backend(backend):
            yield


def check_padded(ff):
    """Beside each option that takes another path, with gradients; and few queries."""
    op, inputs = ff.scaled_dot_product_attention, made(QUERIES, KEYS)
    mask = torch.arange(KEYS) % 3 > 0
    bias = torch.where(mask, 0.5, -torch.inf).view(1, KEYS)
    odd = mask & keeps(shift=1)
    calls = [
        ({}, keeps()),
        (dict(is_causal=True), keeps(is_causal=True)),
        (dict(key_lengths=torch.tensor([129])), keeps() & (torch.arange(KEYS) < 129)),
        (dict(attn_mask=mask.view(1, KEYS)), keeps() & mask),
        (dict(attn_mask=odd | (torch.arange(KEYS) < 9)), keeps() & (torch.arange(KEYS) < 9)),
        (dict(bias=bias), keeps() & mask),
        (
            dict(is_causal=True, causal_alignment="bottom_right"),
            keeps(shift=KEYS - QUERIES, is_causal=True),
        ),
    ]
    for options, kept in calls:
        exact = functools.partial(formula, mask=kept)
        want = gradients(exact, [x.double() for x in inputs])
        for _ in both(ff):
            op(*inputs, **options)  # which may not share a plan with the next
            same(gradients(functools.partial(op, parity=True, **options), inputs), want)
    few = made(1, 1024)
    assert "the keys are split" in explained(ff, few)
    for _ in both(ff):
        same([op(*few, parity=True)], [formula(*(x.double() for x in few), keeps(1, 1024))])


def explained(ff, inputs):
    with ff.use_backend("triton"):
        return ff.dispatch.backends.explain(
            "scaled_dot_product_attention", *inputs, parity=True
        ).reason


def check_shards(ff):
    """Of the queries, each of which knows where it begins; and of the heads, as DTensors."""
    op, (query, key, value) = ff.scaled_dot_product_attention, made(QUERIES, KEYS)
    want = formula(query.double(), key.double(), value.double(), keeps(is_causal=True))
    for _ in both(ff):
        parts = [
            op(
                query[:, :, first:last],
                key,
                value,
                is_causal=True,
                parity=True,
                shard=ff.Shard(query=first, heads=2, queries=QUERIES, keys=KEYS),
            )
            for first, last in ((0, 7), (7, QUERIES))
        ]
        same([torch.cat(parts, 2)], [want])
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = DeviceMesh("cpu", [0])
    shared = [distribute_tensor(x, mesh, [Shard(1)]) for x in (query, key, value)]
    same([op(*shared, is_causal=True, parity=True).full_tensor()], [want])
    torch.distributed.destroy_process_group()


def check_packed(ff):
    """Each sequence counts from its own corner."""
    lengths = (8, 8), (10, 27)
    query, key, value = made(18, 35)
    offsets = [torch.tensor([0, 8, n], dtype=torch.int32) for n in (18, 35)]
    tokens = [x[0].transpose(0, 1) for x in (query, key, value)]
    for alignment in ("top_left", "bottom_right"):
        rows, keys = (x.double().split(n, 2) for x, n in ((query, [8, 10]), (key, [8, 27])))
        values = value.double().split([8, 27], 2)
        shifts = [k - q if alignment == "bottom_right" else 0 for q, k in lengths]
        masks = [keeps(*n, shift) for n, shift in zip(lengths, shifts)]
        want = torch.cat(list(map(formula, rows, keys, values, masks)), 2)
        for _ in both(ff):
            have = ff.packed_attention(
                *tokens, *offsets, 11, 27, causal_alignment=alignment, parity=True
            )
            same([have.transpose(0, 1).unsqueeze(0)], [want])


def check_records(ff):
    """The registered ops, the measurements, torch's op and `explain` know it."""
    names = "scaled_dot_product_attention", "packed_attention", "paged_attention"
    for name in names:
        assert "bool parity" in str(getattr(torch.ops.fastformer, name).default._schema)
    inputs = made(QUERIES, KEYS)
    description, workloads, operation = (
        importlib.import_module(f"fastformer.{name}")
        for name in ("description", "dispatch.workloads", "dispatch.operation")
    )
    found, signatures = [], []
    for parity in (False, True):
        attention = description.Attention(None, 0.0, False, 0.25, parity=parity)
        call = dict(zip(("query", "key", "value"), inputs), attention=attention, return_lse=False)
        found.append(workloads.of(names[0], call))
        signatures.append(operation.OPERATIONS[names[0]].signature(call))
    assert found[1].key == found[0].key + " parity"
    assert signatures[0] is not None and signatures[1] is None
    packed = found[1]._replace(op=names[1])
    for with_parity in (found[1], packed):  # a measurement makes its call from these words
        cpu = torch.device("cpu")
        assert with_parity.arguments(cpu)["parity"] is True
        assert "parity" not in with_parity._replace(options=()).arguments(cpu)
    assert ff.dispatch.backends.explain(names[0], *inputs, parity=True).backend == "reference"


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    package = importlib.import_module("fastformer")
    for check in (check_padded, check_shards, check_packed, check_records):
        check(package)
