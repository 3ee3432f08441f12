"""Launches are remembered by keys: every field of one is needed, and each is there. (Attention's:
test_attention.py.)
"""

from collections import namedtuple

import pytest
import torch
from torch.utils._pytree import tree_leaves

import fastformer as ff
from fastformer import use_backend
from fastformer.ops import functional

FLAT = {  # memory to take views of
    torch.float32: torch.zeros(4096),
    torch.float16: torch.zeros(4096, dtype=torch.float16),
    torch.int64: torch.zeros(256, dtype=torch.int64),
    torch.int32: torch.zeros(256, dtype=torch.int32),
}


def at(place, *shape, dtype=torch.float32, step=None):
    """Zeros whose first element is number `place` of a buffer, rows `step` elements apart."""
    strides = list(torch.empty(shape, device="meta").stride())
    if step is not None:
        strides[-2] = step
    return FLAT[dtype].as_strided(shape, strides, place)


@pytest.fixture
def keys(monkeypatch):
    """keys(function, gradient, **arguments): those of a call and its backward, by kernel. Nothing
    is launched; each pointer would be one, for a tensor that a call leaves out as well.
    """
    launch = pytest.importorskip("fastformer.kernels.launch")

    def idle(self, *pointers):
        assert all(isinstance(x, torch.Tensor) for x in tree_leaves(pointers))

    monkeypatch.setattr(launch.Launch, "__call__", idle)

    def keys(function, gradient=None, wanted=None, **arguments):
        launch.plans.clear()
        floating = [n for n, x in arguments.items() if getattr(x, "is_floating_point", bool)()]
        leaves = {n: arguments[n].detach().requires_grad_() for n in wanted or floating}
        with use_backend("triton"):
            outputs = function(**{**arguments, **leaves})
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            given = gradient or tuple(torch.ones_like(x) for x in outputs)
            outputs = outputs[: len(given)]
            torch.autograd.grad(outputs, list(leaves.values()), given, allow_unused=True)
        return {key[0]: key for key in launch.plans}

    return keys


def moved(**x):
    """The same tensors 64 bytes further on, aligned alike."""
    return {
        n: t.as_strided(t.shape, t.stride(), t.storage_offset() + 64 // t.element_size())
        if isinstance(t, torch.Tensor)
        else t
        for n, t in x.items()
    }


def half(base):
    return {n: t.half() for n, t in base.items() if torch.is_tensor(t) and t.is_floating_point()}


def embed():
    base = {"tokens": at(0, 5, 6, dtype=torch.int64), "weight": at(0, 9, 8)}
    base |= {"positional": at(0, 6, 8), "dropout_p": 0.5}
    base["dropout_seed"] = at(0, 1, dtype=torch.int64)
    first, last = ["embed"], ["embed backward"]
    low = half(base)
    return functional.embed, base, [
        (first + last, {"dropout_p": 0.6}),
        (first, {"scale": 2.0}),
        (last, {"scale": 2.0, "wanted": ["weight"]}),
        (first + last, {"dropout_seed": at(1, 1, dtype=torch.int64)}),
        (first, {"tokens": at(1, 5, 6, dtype=torch.int64)}),
        (first, {"tokens": at(0, 5, 6, dtype=torch.int32)}),
        (first + last, {"tokens": at(0, 4, 6, dtype=torch.int64)}),
        (first, {"weight": at(1, 9, 8)}),
        (first, {"weight": at(0, 9, 8, step=12)}),
        (first, {"weight": at(0, 10, 8)}),
        (first, {"positional": None}),
        (first, {"positional": at(1, 6, 8)}),
        (first, {"positional": at(0, 6, 8, step=12)}),
        (first, {"positional": at(0, 6, 8)}, low),
        (last, {"gradient": (at(1, 5, 6, 8),)}),
        (first + last, low),
    ]  # fmt: skip


def rotary_embedding():
    """Of the backward where all of it is wanted, without the weights, and without the key."""
    base = {"query": at(0, 2, 3, 6, 8), "key": at(0, 2, 2, 6, 8)}
    base |= {"query_norm": at(0, 8), "key_norm": at(0, 8)}
    both = ["rotary", "rotary backward"]
    low = half(base)

    def turned(cos=None, sin=None, **given):
        tables = [at(0, given["query"].shape[2], 8) if x is None else x() for x in (cos, sin)]
        return ff.rotary_embedding(given.pop("query"), given.pop("key"), *tables, **given)

    return turned, base, [
        (both, {"interleaved": True}),
        (both, {"eps": 0.1}),
        (both, {"query": at(1, 2, 3, 6, 8)}),
        (both, {"query": at(0, 2, 6, 3, 8).transpose(1, 2)}),
        (both, {"query": at(0, 2, 4, 6, 8)}),
        (both, {"key": at(1, 2, 2, 6, 8)}),
        (both, {"key": at(0, 2, 1, 6, 8)}),
        (both, {"cos": lambda: at(1, 6, 8)}),
        (both, {"cos": lambda: at(0, 6, 8, step=12)}),
        (both, {"cos": lambda: at(0, 2, 6, 8), "sin": lambda: at(0, 2, 6, 8)}),
        (both, {"cos": lambda: at(0, 6, 4), "sin": lambda: at(0, 6, 4)}),
        (both, {"sin": lambda: at(1, 6, 8)}),
        (both, {"query_norm": None}),
        (both, {"key_norm": at(1, 8)}),
        (both, {"key_norm": at(0, 8)}, low),
        (both, low),
        (["rotary backward"], {"wanted": ["query"]}),
        (["rotary backward"], {"wanted": ["query", "key"]}),
        (["rotary backward"], {"gradient": (at(1, 2, 3, 6, 8), at(0, 2, 2, 6, 8))}),
    ]  # fmt: skip


def layer_norm():
    base = {"input": at(0, 6, 8), "normalized_shape": 8, "weight": at(0, 8), "bias": at(0, 8)}
    first, last, sums = ["layer_norm"], ["layer_norm backward"], ["partial sums"]
    low = half(base)
    return ff.layer_norm, base, [
        (first + last, {"eps": 0.1}),
        (first + last, {"unbiased": True}),
        (first + last, {"input": at(1, 6, 8)}),
        (first + last, {"input": at(0, 6, 8, step=12)}),
        (first + last, {"input": at(0, 7, 8)}),
        (first + last, low),
        (first + last, {"weight": at(1, 8)}),
        (first + last + sums, {"weight": at(0, 8)}, low),
        (first + last + sums, {"weight": None}),
        (first, {"bias": at(1, 8)}),
        (first + sums, {"bias": at(0, 8)}, low),
        (first + sums, {"bias": None}),
        (last, {"gradient": (at(1, 6, 8),)}),
        (last, {"gradient": (at(0, 6, 8, step=12),)}),
        (last, {"wanted": ["input"]}),
        (last, {"wanted": ["weight"]}),
    ]  # fmt: skip


def dropout_add_layer_norm():
    base = {"input": at(0, 6, 8), "residual": at(0, 6, 8), "weight": at(0, 8), "bias": at(0, 8)}
    base |= {"dropout_p": 0.5, "dropout_seed": at(0, 1, dtype=torch.int64)}
    base["input_bias"] = at(0, 8)
    first, last, sums = ["layer_norm"], ["layer_norm backward"], ["partial sums"]
    ones = at(0, 6, 8)
    return ff.dropout_add_layer_norm, base, [
        (first + last, {"dropout_p": 0.6}),
        (first + last, {"dropout_seed": at(1, 1, dtype=torch.int64)}),
        (first, {"input": at(1, 6, 8)}),
        (first, {"residual": at(1, 6, 8)}),
        (first, {"residual": at(0, 6, 8, step=12)}),
        (first, {"input_bias": at(1, 8)}),
        (first + last + sums, {"input_bias": None}),
        (last, {"gradient": (ones,)}),
        (last, {"gradient": (ones, at(1, 6, 8))}),
        (last, {"gradient": (ones, at(0, 6, 8, step=12))}),
    ]  # fmt: skip


def feed_forward():
    base = {"input": at(0, 6, 8), "w_1": at(0, 16, 8), "b_1": at(0, 16)}
    base |= {"w_2": at(0, 8, 16), "b_2": at(0, 8), "activation": "gelu", "dropout_p": 0.5}
    base["dropout_seed"] = at(0, 1, dtype=torch.int64)
    first, last = ["feed_forward"], ["_hidden_backward"]
    return ff.feed_forward, base, [
        (first + last, {"activation": "silu"}),
        (first + last, {"dropout_p": 0.6}),
        (first + last, {"dropout_seed": at(1, 1, dtype=torch.int64)}),
        (first + last, {"input": at(0, 7, 8)}),
        (first, {"input": at(1, 6, 8)}),
        (first, {"input": at(0, 6, 8, step=12)}),
        (first, {"w_1": at(1, 16, 8)}),
        (first, {"w_1": at(0, 16, 8, step=12)}),
        (first + last, {"w_1": at(0, 12, 8), "b_1": at(0, 12), "w_2": at(0, 8, 12)}),
        (first, {"b_1": at(1, 16)}),
        (first, {"b_1": None}),
        (first + last, half(base)),
    ]  # fmt: skip


def geglu():
    base = {"input": at(0, 6, 8), "w": at(0, 32, 8), "b": None, "w_2": at(0, 8, 16), "b_2": None}
    base |= {"dropout_p": 0.5, "dropout_seed": at(0, 1, dtype=torch.int64)}
    both = ["_gated", "_gated_backward"]
    return ff.geglu, base, [
        (both, {"dropout_p": 0.6}),
        (both, {"dropout_seed": at(1, 1, dtype=torch.int64)}),
        (both, {"input": at(0, 7, 8)}),
        (both, half(base)),
    ]  # fmt: skip


def cross_entropy():
    base = {"logits": at(0, 6, 8), "target": at(0, 6, dtype=torch.int64), "reduction": "sum"}
    first, last = ["loss"], ["gradient"]
    return ff.cross_entropy, base, [
        (first + last, {"label_smoothing": 0.1}),
        (first + last, {"ignore_index": 3}),
        (first + last, {"smoothing": "kl", "ignore_index": 3}),
        (first + last, {"logits": at(1, 6, 8)}),
        (first + last, {"logits": at(0, 6, 8, step=12)}),
        (first + last, {"logits": at(0, 6, 9)}),
        (first + last, {"logits": at(0, 6, 8, dtype=torch.float16)}),
        (first + last, {"target": at(1, 6, dtype=torch.int64)}),
        (first + last, {"reduction": "mean"}),
        (last, {"reduction": "none"}),
    ]  # fmt: skip


@pytest.mark.parametrize("op", [embed, rotary_embedding, layer_norm, dropout_add_layer_norm,
                                feed_forward, geglu, cross_entropy])  # fmt: skip
def test_every_field_of_a_key(op, keys):
    """Two calls that differ in one thing that a kernel is launched by have two keys; two that do
    not have one, wherever their tensors lie.
    """
    function, base, changes = op()
    for key in keys(function, **base).values():
        assert torch.device("cpu") in key
    assert keys(function, **base) == keys(function, **moved(**base))
    for kernels, change, *beside in changes:
        alike = base | (beside[0] if beside else {})
        before = keys(function, **alike)
        assert before == keys(function, **alike)
        after = keys(function, **{**alike, **change})
        assert set(after) >= set(kernels), change
        assert [k for k in kernels if before[k] == after[k]] == [], change


def test_kinds_have_keys_of_their_own(keys):
    _, base, _ = geglu()
    one, two = keys(ff.geglu, **base), keys(ff.swiglu, **base)
    assert one.keys() == two.keys() and not set(one.values()) & set(two.values())
    _, base, _ = layer_norm()
    del base["bias"]
    one, two = (keys(op, **base) for op in (ff.layer_norm, ff.rms_norm))
    assert one.pop("partial sums") == two.pop("partial sums")  # which know nothing of the norm
    assert one.keys() == two.keys() and not set(one.values()) & set(two.values())


def test_products_in_tf32_have_keys_of_their_own(keys):
    _, base, _ = feed_forward()
    matmul, found = torch.backends.cuda.matmul, []
    before = matmul.allow_tf32
    try:
        for matmul.allow_tf32 in (False, True):  # which a GPU's products follow
            found.append(keys(ff.feed_forward, **base)["feed_forward"])
    finally:
        matmul.allow_tf32 = before
    assert found[0] != found[1]


def test_chunks_that_are_aligned_otherwise_have_keys_of_their_own(keys, monkeypatch):
    kernels = pytest.importorskip("fastformer.kernels.cross_entropy.launchers")
    monkeypatch.setattr(kernels, "CHUNK", 2)  # losses of 8 bytes
    x = {"input": at(0, 6, 8), "linear_weight": at(0, 9, 8), "target": at(0, 6, dtype=torch.int64)}
    keys(functional.linear_cross_entropy, **x)
    assert [key[0] for key in kernels.plans].count("loss") == 2


def test_shared_constants_keep_their_types():
    """1 equals True, and a kernel is compiled for either: launches share what is the same alone."""
    launch = pytest.importorskip("fastformer.kernels.launch")
    group = namedtuple("group", "first")
    for value in (1, True, 1.0):
        assert type(launch.constants(group(value)).first.value) is type(value)
    assert launch.constants(group(1)) is launch.constants(group(1))


def test_rows_are_copied_only_where_their_features_are_strided():
    launch = pytest.importorskip("fastformer.kernels.launch")
    wide = torch.randn(3, 3, 48)
    for x in (wide[..., :24], wide[..., :1], wide.transpose(0, 1)):
        assert launch.unit_stride(x) is x
    for x in (wide[..., :24], wide[..., :1]):
        assert launch.as_rows(x, x.shape[-1]) is x
    steps = wide[..., ::2]
    for x in (steps, wide.transpose(1, 2)):
        assert launch.unit_stride(x).is_contiguous()
    assert torch.equal(launch.as_rows(steps, 24), steps)


def test_powers_of_2():
    launch = pytest.importorskip("fastformer.kernels.launch")
    assert [launch.next_power_of_2(n) for n in (0, 1, 2, 3, 4, 5, 512)] == [1, 1, 2, 4, 4, 8, 512]


def test_the_tiles_of_attention_are_powers_of_2():
    """Triton compiles no other blocks and no other number of warps."""
    tables = pytest.importorskip("fastformer.kernels.attention.configurations")
    shipped = *tables.CONFIGURATIONS.values(), *tables.SHORT.values(), *tables.OTHERS.values()
    for tile in (tile for row in shipped for tile in row):
        for n in tile[:3]:
            assert n == 1 << (n.bit_length() - 1), tile
        assert min(tile[:2]) >= 16 and 1 <= tile.warps <= 16 and 1 <= tile.stages <= 5, tile
