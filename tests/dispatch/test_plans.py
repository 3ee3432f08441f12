"""Plans are found by keys. Two calls that differ in a thing which a kernel is launched by share no
plan; those that do not differ share it, wherever their tensors lie. (Attention's:
test_attention.py.)
"""

from collections import namedtuple
from weakref import WeakKeyDictionary

import pytest
import torch
from torch.utils._pytree import tree_leaves

import fastformer as ff
from fastformer import plans, use_backend
from fastformer.ops import functional

FLAT = {dtype: torch.zeros(4096, dtype=dtype) for dtype in (
    torch.float32, torch.float16, torch.int64, torch.int32)}  # fmt: skip


def at(place, *shape, dtype=torch.float32, step=None):
    """Zeros whose first element is number `place` of a buffer, rows `step` elements apart."""
    strides = list(torch.empty(shape, device="meta").stride())
    if step is not None:
        strides[-2] = step
    return FLAT[dtype].as_strided(shape, strides, place)


@pytest.fixture
def made(monkeypatch):
    """made(function, gradient, wanted, **arguments): the plans that a call and its backward make:
    "front" and the names of ops. Nothing is launched; each pointer would be one, for a tensor that
    a call leaves out as well, with the dtype and the alignment that the launch had before.
    """
    launch, known = pytest.importorskip("fastformer.kernels.launch"), WeakKeyDictionary()

    def idle(self, *pointers):
        leaves = tree_leaves(pointers)
        assert all(isinstance(x, torch.Tensor) for x in leaves)
        found = [(x.dtype, x.data_ptr() & 15) for x in leaves]
        assert known.setdefault(self, found) == found

    monkeypatch.setattr(launch.Launch, "__call__", idle)
    plans.forget()

    def made(function, gradient=None, wanted=None, **arguments):
        before = {*plans.front}, {*plans.launches}
        floating = [n for n, x in arguments.items() if getattr(x, "is_floating_point", bool)()]
        leaves = {n: arguments[n].detach().requires_grad_() for n in wanted or floating}
        with use_backend("triton"):
            outputs = function(**{**arguments, **leaves})
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            given = gradient or tuple(torch.ones_like(x) for x in outputs)
            outputs = outputs[: len(given)]
            torch.autograd.grad(outputs, list(leaves.values()), given, allow_unused=True)
        found = {key[0] for key in {*plans.launches} - before[1]}
        return found | {"front"} if {*plans.front} - before[0] else found

    yield made
    plans.forget()


def moved(x):
    """The same tensor 64 bytes further on, aligned alike."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.as_strided(x.shape, x.stride(), x.storage_offset() + 64 // x.element_size())


def turned(cos, sin, query, key, **given):
    return ff.rotary_embedding(query, key, cos.detach(), sin.detach(), **given)


SEED = at(0, 1, dtype=torch.int64)
LAYERS = dict(input=at(0, 6, 8), w_1=at(0, 16, 8), b_1=at(0, 16), w_2=at(0, 8, 16), b_2=at(0, 8))
GATED = dict(input=at(0, 6, 8), w=at(0, 32, 8), b=None, w_2=at(0, 8, 16), b_2=None)
NORM = dict(input=at(0, 6, 8), weight=at(0, 8), bias=at(0, 8))
DROPOUT = dict(dropout_p=0.5, dropout_seed=SEED)
# The function, its arguments, and what else may change of them.
CALLS = {
    "embed": (
        functional.embed,
        dict(tokens=at(0, 5, 6, dtype=torch.int64), weight=at(0, 9, 8), positional=at(0, 6, 8))
        | DROPOUT,
        [dict(scale=2.0), dict(padding_idx=1), dict(tokens=at(0, 5, 6, dtype=torch.int32)),
         dict(tokens=at(0, 4, 6, dtype=torch.int64)), dict(positional=None)],
    ),
    "rotary_embedding": (
        turned,
        dict(query=at(0, 2, 3, 6, 8), key=at(0, 2, 2, 6, 8), cos=at(0, 6, 8), sin=at(0, 6, 8),
             query_norm=at(0, 8), key_norm=at(0, 8)),
        [dict(interleaved=True), dict(eps=0.1), dict(query=at(0, 2, 4, 6, 8)),
         dict(query=at(0, 2, 6, 3, 8).transpose(1, 2)), dict(key=at(0, 2, 1, 6, 8)),
         dict(cos=at(0, 2, 6, 8), sin=at(0, 2, 6, 8)), dict(cos=at(0, 6, 4), sin=at(0, 6, 4)),
         dict(query_norm=None), dict(key_norm=None)],
    ),
    "layer_norm": (
        ff.layer_norm, NORM | dict(normalized_shape=8),
        [dict(eps=0.1), dict(unbiased=True), dict(input=at(0, 7, 8)), dict(weight=None),
         dict(bias=None)],
    ),
    "dropout_add_layer_norm": (
        ff.dropout_add_layer_norm,
        NORM | dict(residual=at(0, 6, 8), input_bias=at(0, 8)) | DROPOUT,
        [dict(eps=0.1), dict(input_bias=None), dict(bias=None)],
    ),
    "feed_forward": (
        ff.feed_forward, LAYERS | DROPOUT | dict(activation="gelu"),
        [dict(activation="silu"), dict(input=at(0, 7, 8)), dict(b_1=None)],
    ),
    "geglu": (ff.geglu, GATED | DROPOUT, [dict(input=at(0, 7, 8))]),
    "cross_entropy": (
        ff.cross_entropy,
        dict(logits=at(0, 6, 8), target=at(0, 6, dtype=torch.int64), reduction="sum"),
        [dict(label_smoothing=0.1), dict(ignore_index=3), dict(smoothing="kl", ignore_index=3),
         dict(logits=at(0, 6, 9)), dict(reduction="mean"), dict(reduction="none")],
    ),
}  # fmt: skip


def changes(base, others):
    """The arguments of a call with one thing changed: each tensor moved by an element, its rows
    further apart; in float16; and the others.
    """
    if "dropout_p" in base:
        yield dict(dropout_p=0.6)
    for name, x in base.items():
        if isinstance(x, torch.Tensor):
            yield {name: at(1, *x.shape, dtype=x.dtype)}
            if x.is_floating_point() and x.dim() > 1:
                yield {name: at(0, *x.shape, step=x.shape[-1] + 4)}
    floating = {n for n, x in base.items() if torch.is_tensor(x) and x.is_floating_point()}
    yield {name: base[name].half() for name in floating}
    yield from others


@pytest.mark.parametrize("op", list(CALLS))
def test_every_field_of_a_key(op, made):
    function, base, others = CALLS[op]
    assert made(function, **base) >= {"front", op}
    backward = getattr(torch.ops.fastformer, op + "_backward").default._schema
    reads = {x.name for x in backward.arguments}
    assert made(function, **{name: moved(x) for name, x in base.items()}) == set()
    for change in changes(base, others):
        found = made(function, **{**base, **change})
        assert found >= {"front", op}, change
        assert any("backward" in x for x in found) or reads.isdisjoint(change), change
        assert made(function, **{**base, **change}) == set(), change


@pytest.mark.parametrize("op", ["layer_norm", "rotary_embedding", "embed"])
def test_every_field_of_a_backward(op, made):
    """The layout of the gradient, and which are wanted."""
    function, base, _ = CALLS[op]
    made(function, **base)
    shapes = (
        [base["query"], base["key"]] if "query" in base else [base.get("input", at(0, 5, 6, 8))]
    )
    first, *rest = shapes
    for gradient in (at(1, *first.shape), at(0, *first.shape, step=12)):
        given = gradient, *rest
        assert made(function, given, **base) == {op + "_backward"}
        assert made(function, tuple(map(moved, given)), **base) == set()
    wanted = [name for name in ("input", "query", "weight") if name in base][:1]
    assert made(function, wanted=wanted, **base) >= {"front", op + "_backward"}


def test_kinds_have_plans_of_their_own(made):
    made(ff.geglu, **CALLS["geglu"][1])
    assert made(ff.swiglu, **CALLS["geglu"][1]) >= {"front", "swiglu", "swiglu_backward"}
    given = dict(input=at(0, 6, 8), normalized_shape=8, weight=at(0, 8))
    made(ff.layer_norm, **given)
    assert made(ff.rms_norm, **given) >= {"front", "rms_norm", "rms_norm_backward"}


def test_products_in_tf32_have_plans_of_their_own(made):
    """Which a GPU's products follow."""
    function, base, _ = CALLS["feed_forward"]
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        for matmul.allow_tf32 in (False, True):
            assert made(function, **base) >= {"front", "feed_forward", "feed_forward_backward"}
        assert made(function, **base) == set()
    finally:
        matmul.allow_tf32 = before


def test_chunks_that_are_aligned_otherwise_have_launches_of_their_own(made, monkeypatch):
    """`made` looks at the alignment of each pointer."""
    kernels = pytest.importorskip("fastformer.kernels.cross_entropy.launchers")
    monkeypatch.setattr(kernels, "CHUNK", 2)  # losses of 8 bytes
    x = {"input": at(0, 6, 8), "linear_weight": at(0, 9, 8), "target": at(0, 6, dtype=torch.int64)}
    made(functional.linear_cross_entropy, **x)
    assert sum("loss_launch" in str(key[0]) for key in plans.launches) == 2


def test_shared_constants_keep_their_types():
    """1 equals True, and a kernel is compiled for either: launches share what is the same alone."""
    launch = pytest.importorskip("fastformer.kernels.launch")
    group = namedtuple("group", "first")
    for value in (1, True, 1.0):
        assert type(launch.constants(group(value)).first.value) is type(value)
    assert launch.constants(group(1)) is launch.constants(group(1))


def test_equal_values_of_other_types_have_plans_of_their_own():
    plan = plans.planned(lambda x, xs: (type(x), type(xs[0])), "types")
    for value in (1, True, 1.0):
        assert plan(value, [0]) == (type(value), int) and plan(0, [value]) == (int, type(value))


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
