"""A made-up option of attention, as a change of six files, and a program that proves it.

`parity`: query i sees only the keys j for which i + shift - j is even. test_walks.py makes the
change in a copy of the checkout and runs this file there.
"""

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
    "fastformer/functional.py": [
        (
            "    return_lse: bool = False,\n    shard: Sequence[int] | None = None,\n",
            "    return_lse: bool = False,\n    shard: Sequence[int] | None = None,\n"
            "    parity: bool = False,\n",
        ),
        (
            "        shard,\n    )\n",
            '        shard,\n        require_flag("parity", parity),\n    )\n',
        ),
        (
            "    shard: Sequence[int] | None = None,\n) -> Tensor:\n",
            "    shard: Sequence[int] | None = None,\n    parity: bool = False,\n) -> Tensor:\n",
        ),
        (
            "        cu_seqlens_q=cu_seqlens_q.contiguous(),\n",
            "        parity=parity,\n        cu_seqlens_q=cu_seqlens_q.contiguous(),\n",
        ),
    ],
    "fastformer/reference.py": [
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
            "    if attention.is_causal or attention.window is not None:  # a diagonal",
            "    if attention.is_causal or attention.window or attention.parity:  # a diagonal",
        ),
        (
            "is_causal=False, window=None, key_lengths=keys)",
            "is_causal=False, window=None, parity=False, key_lengths=keys)",
        ),
    ],
    "kernels/attention/scores.py": [
        ("    key_grad: Any = False", "    parity: Any = False\n    key_grad: Any = False"),
        (
            "    if EDGE or has.mask > 0 or has.bias == 1:\n        ok = keys.ok\n",
            "    if EDGE or has.mask > 0 or has.bias == 1 or has.parity:\n        ok = keys.ok\n"
            "        if has.parity:\n            ok = ok & ((i + shift - j) & 1 == 0)\n",
        ),
        (
            "            ok = ok & seen if EDGE or has.bias == 1 or TRANSPOSED",
            "            ok = ok & seen if EDGE or has.bias == 1 or TRANSPOSED or has.parity",
        ),
    ],
    "kernels/attention/launchers.py": [
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


def formula(query, key, value, mask):
    """softmax(q k^T / sqrt(D)) v in float64, over the keys that the mask keeps."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num() @ value


def keeps(queries, keys, shift=0, is_causal=False):
    i, j = torch.arange(queries).view(-1, 1) + shift, torch.arange(keys)
    even = (i - j) % 2 == 0
    return even & (j <= i) if is_causal else even


def gradients(function, tensors):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)


def same(have, want, bound=1e-4):
    for x, y in zip(have, want, strict=True):
        assert (x.double() - y).abs().max() <= bound * y.abs().max()


def main():
    ff = importlib.import_module("fastformer")
    op, generator = ff.scaled_dot_product_attention, torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    inputs = normal(1, 2, 18, 16), normal(1, 2, 35, 16), normal(1, 2, 35, 16)
    wide = [x.double() for x in inputs]
    lengths, mask = torch.tensor([33]), torch.arange(35) % 3 > 0
    row = torch.where(mask, 0.5, -torch.inf).view(1, 35)
    calls = [
        ({}, keeps(18, 35)),
        (dict(is_causal=True), keeps(18, 35, 0, True)),
        (dict(key_lengths=lengths), keeps(18, 35) & (torch.arange(35) < 33)),
        (dict(attn_mask=mask.view(1, 35)), keeps(18, 35) & mask),
        (dict(bias=row), keeps(18, 35) & mask),
        (dict(attn_mask=(mask & keeps(18, 35, 1))), keeps(18, 35) & mask & keeps(18, 35, 1)),
        (dict(is_causal=True, causal_alignment="bottom_right"), keeps(18, 35, 17, True)),
    ]
    for options, kept in calls:
        want = gradients(lambda q, k, v: formula(q, k, v, kept), wide)  # noqa: B023
        for backend in ("triton", "reference"):
            with ff.use_backend(backend):
                op(*inputs, **options)  # which may not share a plan with the next
                have = gradients(lambda *x: op(*x, parity=True, **options), inputs)  # noqa: B023
            same(have, want)

    # Shards of the queries, a packed batch, and DTensors are calls of the same kind.
    want = formula(*wide, keeps(18, 35, 0, True))
    shards = [
        op(
            inputs[0][:, :, a:b],
            *inputs[1:],
            is_causal=True,
            parity=True,
            shard=(0, 0, a, 0, 2, 18, 35),
        )
        for a, b in ((0, 7), (7, 18))
    ]
    same([torch.cat(shards, 2)], [want])
    tokens = [x[0].transpose(0, 1) for x in inputs]
    offsets = [torch.tensor([0, 8, n], dtype=torch.int32) for n in (18, 35)]
    for alignment, shifts in (("top_left", (0, 0)), ("bottom_right", (0, 17))):
        want = [
            formula(*(x[:, :, s] for x, s in zip(wide, (rows, keys, keys))), keeps(n, m, shift))
            for rows, keys, n, m, shift in (
                (slice(0, 8), slice(0, 8), 8, 8, shifts[0]),
                (slice(8, 18), slice(8, 35), 10, 27, shifts[1]),
            )
        ]
        for backend in ("triton", "reference"):
            with ff.use_backend(backend):
                have = ff.packed_attention(
                    *tokens, *offsets, 10, 27, causal_alignment=alignment, parity=True
                )
            same([have.transpose(0, 1).unsqueeze(0)], [torch.cat(want, 2)])
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    mesh = DeviceMesh("cpu", [0])
    shared = [distribute_tensor(x, mesh, [Shard(1)]) for x in inputs]
    same([op(*shared, parity=True).full_tensor()], [formula(*wide, keeps(18, 35))])
    torch.distributed.destroy_process_group()

    # The registered ops, the measurements, torch's ops and `explain` know it.
    description, cases, operation = (
        importlib.import_module(f"fastformer.{name}")
        for name in ("description", "cases", "operation")
    )
    for name in (op.__name__, "packed_attention"):
        assert "bool parity" in str(getattr(torch.ops.fastformer, name).default._schema)
    plain, odd = (description.Attention(None, 0.0, False, 0.25, parity=x) for x in (False, True))
    keys = [
        cases.of(
            op.__name__, dict(zip(("query", "key", "value"), inputs), attention=x, return_lse=False)
        )
        for x in (plain, odd)
    ]
    assert keys[1].key == keys[0].key + " parity"
    record = operation.OPERATIONS[op.__name__]
    arguments = [dict(zip(("query", "key", "value"), inputs), attention=x) for x in (plain, odd)]
    assert record.signature(arguments[0]) is not None and record.signature(arguments[1]) is None
    assert ff.explain(op.__name__, *inputs, parity=True).backend == "reference"


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    main()
