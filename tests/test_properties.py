"""Every op on random shapes, strides, masks, options and dtypes, on both backends, held to the
float64 reference by the numerics policy. The draws are the same in each run; `--slow` makes new
ones, and more. The interpreted kernels take the whole of a call for a tile, or tiles so small that
there are several.
"""

import contextlib

import pytest
import torch

import fastformer as ff
from fastformer import functional

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

QUICK, SLOW = 5, 30  # runs of TEN examples for each op and backend
TEN = 10  # after so many hypothesis changes a little of an example for the next six
FIXED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
DTYPES = st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16])


def size(least=1, most=9):
    return st.integers(least, most)


@st.composite
def tensors(draw, shape, dtype, device, scale=1.0):
    """Random numbers of the shape, or bits, most of them set: a view of something larger, its
    dimensions in any order, with or without a step between neighbours.
    """
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    order = draw(st.permutations(range(len(shape))))  # in memory
    steps = [1] * len(shape)
    if draw(st.integers(0, 2)) == 2:
        steps[order[-1]] = 2
    stored = [shape[i] * steps[i] + draw(st.sampled_from([0, 0, 3])) for i in order]
    x = torch.randn(stored, generator=generator) * scale
    x = (x > -0.5 if dtype == torch.bool else x).to(device, dtype)
    x = x.permute([order.index(i) for i in range(len(shape))])
    return x[tuple(slice(0, n * step, step) for n, step in zip(shape, steps))]


@st.composite
def broadcast(draw, full, whole=0):
    """A shape that broadcasts to the full one, the last `whole` sizes as they are."""
    kept = len(full) - whole
    shape = [draw(st.sampled_from([1, n])) for n in full[:kept]] + full[kept:]
    return shape[draw(st.integers(0, len(full) - 1)) :]


def dropout(draw):
    p = draw(st.sampled_from([0.0, 0.3]))
    return {"dropout_p": p, "dropout_seed": draw(st.integers(-(2**63), 2**63 - 1))} if p else {}


# --------------------------------------------------------------------- (function, tensors, options)


def scaled_dot_product_attention(draw, dtype, device):
    batch, groups, share = draw(size(1, 2)), draw(size(1, 2)), draw(size(1, 2))
    heads, q_length, k_length = groups * share, draw(size(1, 40)), draw(size(1, 40))
    dim, value_dim = draw(st.sampled_from([3, 8, 16, 20])), draw(st.sampled_from([5, 8, 16]))
    given = {
        "query": draw(tensors([batch, heads, q_length, dim], dtype, device, 1.5)),
        "key": draw(tensors([batch, groups, k_length, dim], dtype, device)),
        "value": draw(tensors([batch, groups, k_length, value_dim], dtype, device)),
    }
    options = scored(draw, given, [batch, heads, q_length, k_length], dtype, device)
    return ff.scaled_dot_product_attention, given, {"enable_gqa": True, **options}


def scored(draw, given, full, dtype, device, paged=False):
    """The options of a call with scores of the full shape, some of them tensors among the given."""
    batch, heads, _, k_length = full
    if draw(st.booleans()):
        given["attn_mask"] = draw(tensors(draw(broadcast(full)), torch.bool, device))
    if draw(st.booleans()):
        # a number for all keys of a row changes nothing, and its gradient is a sum of roundings
        given["bias"] = draw(tensors(draw(broadcast(full, whole=1)), dtype, device))
    options = {"is_causal": draw(st.booleans()), **({} if paged else dropout(draw))}
    sides = st.sampled_from([None, 0, 3, 20])
    options["window"] = draw(st.none() | st.tuples(sides, sides))
    options["causal_alignment"] = draw(st.sampled_from(["top_left", "bottom_right"]))
    options["softcap"] = draw(st.sampled_from([None, None, 5.0]))
    if paged or draw(st.booleans()):
        lengths = st.lists(st.integers(0, k_length), min_size=batch, max_size=batch)
        given["key_lengths"] = torch.tensor(draw(lengths), device=device)
    if draw(st.booleans()):
        slopes = torch.linspace(0.1, 1, heads, device=device)
        options["alibi_slopes"] = slopes
    return options


def paged_attention(draw, dtype, device):
    """Pages in any order, some of them in the tables of several sequences."""
    batch, groups, share = draw(size(1, 2)), draw(size(1, 2)), draw(size(1, 2))
    pages, page, blocks = draw(size(1, 4)), draw(st.sampled_from([16, 32])), draw(size(1, 3))
    q_length, dim, value_dim = draw(size(1, 9)), draw(st.sampled_from([3, 16])), draw(size(5, 8))
    table = st.lists(st.integers(0, pages - 1), min_size=batch * blocks, max_size=batch * blocks)
    given = {
        "query": draw(tensors([batch, groups * share, q_length, dim], dtype, device, 1.5)),
        "key_pages": draw(tensors([pages, page, groups, dim], dtype, device)),
        "value_pages": draw(tensors([pages, page, groups, value_dim], dtype, device)),
        "block_table": torch.tensor(draw(table), device=device).view(batch, blocks).int(),
    }
    full = [batch, groups * share, q_length, blocks * page]
    options = scored(draw, given, full, dtype, device, paged=True)
    return ff.paged_attention, given, options


def attention_weights(*how):
    _, given, options = scaled_dot_product_attention(*how)
    for name in ("dropout_p", "dropout_seed"):
        options.pop(name, None)
    return ff.attention_weights, {n: x for n, x in given.items() if n != "value"}, options


def packed_attention(draw, dtype, device):
    groups, share, dim = draw(size(1, 2)), draw(size(1, 2)), draw(st.sampled_from([3, 8, 16]))
    lengths = draw(st.lists(st.tuples(size(0, 20), size(0, 20)), min_size=1, max_size=3))
    ends = torch.tensor([(0, 0), *lengths], dtype=torch.int32, device=device).cumsum(0)
    ends = ends.to(torch.int32)
    q_tokens, k_tokens = (int(n) for n in ends[-1])
    given = {
        "query": draw(tensors([q_tokens, groups * share, dim], dtype, device, 1.5)),
        "key": draw(tensors([k_tokens, groups, dim], dtype, device)),
        "value": draw(tensors([k_tokens, groups, dim], dtype, device)),
        "cu_seqlens_q": ends[:, 0].contiguous(),
        "cu_seqlens_k": ends[:, 1].contiguous(),
    }
    options = {"max_q": max(q for q, _ in lengths), "max_k": max(k for _, k in lengths)}
    options |= {"is_causal": draw(st.booleans()), **dropout(draw)}
    return ff.packed_attention, given, options


def layer_norm(draw, dtype, device):
    rows, n = draw(st.lists(size(1, 5), min_size=0, max_size=2)), draw(size(4, 40))
    given = {"input": draw(tensors([*rows, n], dtype, device))}
    for name in ("weight", "bias"):
        if draw(st.booleans()):
            given[name] = draw(tensors([n], dtype, device))
    return ff.layer_norm, given, {"normalized_shape": n, "unbiased": draw(st.booleans())}


def rms_norm(draw, dtype, device):
    rows, n = draw(st.lists(size(1, 5), min_size=0, max_size=2)), draw(size(4, 40))
    given = {"input": draw(tensors([*rows, n], dtype, device))}
    if draw(st.booleans()):
        given["weight"] = draw(tensors([n], dtype, device))
    return ff.rms_norm, given, {"normalized_shape": n, "eps": 1e-5}


def dropout_add_layer_norm(draw, dtype, device):
    rows, n = draw(st.lists(size(1, 5), min_size=0, max_size=2)), draw(size(4, 40))
    given = {name: draw(tensors([*rows, n], dtype, device)) for name in ("input", "residual")}
    given["weight"] = draw(tensors([n], dtype, device))
    given["bias"] = draw(tensors([n], dtype, device)) if draw(st.booleans()) else None

    def both(**arguments):  # the norm and the sum
        return torch.stack(ff.dropout_add_layer_norm(**arguments))

    return both, given, dropout(draw)


def dropout_add_rms_norm(draw, dtype, device):
    _, given, options = dropout_add_layer_norm(draw, dtype, device)
    del given["bias"]

    def both(**arguments):
        return torch.stack(ff.dropout_add_rms_norm(**arguments))

    return both, given, {"eps": 1e-5, **options}


def fed(draw, dtype, device, function):
    rows = draw(st.lists(size(1, 5), min_size=1, max_size=2))
    d, hidden, out = draw(size(1, 20)), draw(size(1, 40)), draw(size(1, 20))
    gated = function is not ff.feed_forward
    names = ("w", "b") if gated else ("w_1", "b_1")
    given = {"input": draw(tensors([*rows, d], dtype, device))}
    wide = hidden * (2 if gated else 1)
    given[names[0]] = draw(tensors([wide, d], dtype, device, d**-0.5))
    given[names[1]] = draw(tensors([wide], dtype, device)) if draw(st.booleans()) else None
    given["w_2"] = draw(tensors([out, hidden], dtype, device, hidden**-0.5))
    given["b_2"] = draw(tensors([out], dtype, device)) if draw(st.booleans()) else None
    options = dropout(draw)
    if not gated:
        options["activation"] = draw(st.sampled_from(["relu", "gelu", "gelu_tanh", "silu"]))
    return function, given, options


def feed_forward(*how):
    return fed(*how, ff.feed_forward)


def geglu(*how):
    return fed(*how, ff.geglu)


def swiglu(*how):
    return fed(*how, ff.swiglu)


def embed(draw, dtype, device):
    batch, length, vocab, d = (draw(size(1, most)) for most in (3, 12, 9, 40))
    tokens = st.lists(st.integers(0, vocab - 1), min_size=batch * length, max_size=batch * length)
    given = {"weight": draw(tensors([vocab, d], dtype, device))}
    given["tokens"] = torch.tensor(draw(tokens), device=device).view(batch, length)
    given["positional"] = (
        draw(tensors([length + 2, d], dtype, device)) if draw(st.booleans()) else None
    )
    options = {"padding_idx": draw(st.none() | st.integers(0, vocab - 1)), **dropout(draw)}
    return ff.embed, given, options


def loss(draw, device, rows, classes):
    targets = st.lists(st.integers(0, classes - 1), min_size=rows, max_size=rows)
    options = {
        "reduction": draw(st.sampled_from(["sum", "none"])),  # a mean of nothing is NaN
        "label_smoothing": draw(st.sampled_from([0.0, 0.1, 1.0])),
        "smoothing": draw(st.sampled_from(["uniform", "kl"])),
        "ignore_index": draw(st.integers(0, classes - 1)),
    }
    return {"target": torch.tensor(draw(targets), device=device)}, options


def cross_entropy(draw, dtype, device):
    rows, classes = draw(size(1, 12)), draw(size(5, 40))
    given = {"logits": draw(tensors([rows, classes], dtype, device))}
    target, options = loss(draw, device, rows, classes)
    return ff.cross_entropy, {**given, **target}, options


def linear_cross_entropy(draw, dtype, device):
    rows, classes, d = draw(size(1, 12)), draw(size(5, 40)), draw(size(1, 12))
    given = {
        "input": draw(tensors([rows, d], dtype, device)),
        "linear_weight": draw(tensors([classes, d], dtype, device)),
        "linear_bias": draw(tensors([classes], dtype, device)) if draw(st.booleans()) else None,
    }
    target, options = loss(draw, device, rows, classes)
    return ff.linear_cross_entropy, {**given, **target}, options


CASES = [
    scaled_dot_product_attention,
    attention_weights,
    packed_attention,
    paged_attention,
    layer_norm,
    rms_norm,
    dropout_add_layer_norm,
    dropout_add_rms_norm,
    feed_forward,
    geglu,
    swiglu,
    embed,
    cross_entropy,
    linear_cross_entropy,
]


def test_every_op_has_a_case():
    assert {case.__name__ for case in CASES} == set(functional.__all__)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_property(case, backend, device, against_oracle, small_tiles, request):
    slow = request.config.getoption("slow")
    interpreted = backend == "triton" and device.type == "cpu"

    @settings(
        max_examples=TEN,
        database=None,
        deadline=None,
        suppress_health_check=FIXED,
        phases=list(Phase) if slow else [Phase.generate],  # a smaller example takes minutes
    )
    @given(st.data())
    def holds(data):
        function, given, options = case(data.draw, data.draw(DTYPES), device)
        torch.manual_seed(data.draw(st.integers(2**30 + 1, 2**31)))  # no input again
        small = interpreted and data.draw(st.booleans())
        with small_tiles() if small else contextlib.nullcontext():
            differs = case is not paged_attention  # which has no gradient
            against_oracle(function, given, small=True, gradients=differs, **options)

    for run in range(SLOW if slow else QUICK):
        (holds if slow else seed(run)(holds))()
