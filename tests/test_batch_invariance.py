"""Each sentence of docs/batch_invariance.md: the same bits in any batch."""

import copy
import itertools
import pickle
import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import fastformer as ff
from fastformer.batch_invariance import on

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.with_all)]
ROWS = 19  # with the small tiles two blocks of rows, the second one cut
PARTS = slice(0, 1), slice(18, 19), slice(5, 17)


@pytest.fixture
def kernels(device, small_tiles):
    """Kernels in small tiles: rows and keys of one call are several tiles. Classes of logits are
    read in groups of 16 bytes, as on a GPU.
    """
    pytest.importorskip("triton")
    from fastformer.kernels.cross_entropy import launchers

    group_size = launchers.group_size
    with small_tiles(), ff.use_backend("triton"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launchers, "group_size", group_size)
        patch.setattr(launchers, "INTERPRETED", False)
        yield


@pytest.fixture
def random(device):
    return lambda *shape, dtype=torch.float32: torch.randn(shape, device=device).to(dtype)


def with_gradients(function, inputs, cotangent):
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, cotangent)]


# ----------------------------------------------------------------------------------- the products


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [16, pytest.param(40, marks=pytest.mark.with_all)])
def test_products(kernels, random, dtype, k):
    x, layer = random(ROWS, k, dtype=dtype), torch.nn.Linear(k, 21).to(x_device(random), dtype)
    a, b = random(3, ROWS, k, dtype=dtype), random(3, k, 21, dtype=dtype)
    calls = {
        "linear": (layer, x),
        "no bias": (lambda x: F.linear(x, layer.weight), x),
        "transposed": (lambda x: x @ b[0].mT.contiguous().mT, x),
        "einsum": (lambda x: torch.einsum("mk,kn->mn", x, b[0]), x),
        "addmm": (lambda x: torch.addmm(b[1, :1], x, b[0], beta=0.5, alpha=2), x),
        "bmm": (lambda x: torch.bmm(x.expand(3, *x.shape), b), x),
        "baddbmm": (lambda x: torch.baddbmm(b[:, :1], x.expand(3, *x.shape), b), x),
        "mv": (lambda x: torch.mv(x, b[0, :, 0]), x),
        "addmv": (lambda x: torch.addmv(b[0, 0, :1], x, b[0, :, 0], beta=0.5, alpha=2), x),
        "addmm_": (lambda x: b.new_ones(len(x), 21).addmm_(x, b[0], beta=3), x),
    }
    assert len(a) == len(b)
    for name, (function, x) in calls.items():
        want = function(x).detach()
        rows = -2 if want.dim() > 1 else 0
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), ff.batch_invariant():
                have = function(x)
                torch.testing.assert_close(have, want, msg=name)
                for part in PARTS:
                    whole = have.narrow(rows, part.start, part.stop - part.start)
                    assert torch.equal(function(x[part]), whole), name


def x_device(random):
    return random(1).device


def test_products_against_float64(kernels, random):
    x, w, b = random(2, 35, 18), random(2, 18, 21), random(21)
    want = x.double() @ w.double()
    with ff.batch_invariant():
        torch.testing.assert_close((x @ w).double(), want, rtol=1e-4, atol=1e-4)
        have = torch.addmm(b, x[0], w[0])
    torch.testing.assert_close(have.double(), want[0] + b, rtol=1e-4, atol=1e-4)


def test_products_into_a_tensor(kernels, random):
    x, w = random(5, 7), random(7, 4)
    with ff.batch_invariant():
        out = torch.empty(4, 5, device=x.device).t()
        assert torch.mm(x, w, out=out) is out and torch.equal(out, x @ w)
        assert torch.equal(torch.mm(x, w, out=x.new_empty(0)), x @ w)
        low = x.bfloat16(), w.bfloat16()
        wide = torch.mm(*low, out_dtype=torch.float32, out=x.new_empty(5, 4))
        torch.testing.assert_close(wide, low[0].float() @ low[1].float())
        for wrong in (
            (low, torch.float16),
            ((x, w), torch.float64),
            ((x.double(), w.double()), x.dtype),
        ):
            with pytest.raises(RuntimeError, match=r"cannot compute aten.mm.dtype of torch.\w* in"):
                torch.mm(*wrong[0], out_dtype=wrong[1])
        whole = torch.arange(6).view(2, 3)
        assert torch.equal(whole @ whole.t(), torch.tensor([[5, 14], [14, 50]]))
        assert (x[:, :0] @ w[:0]).eq(0).all() and (x[:0] @ w).shape == (0, 4)
        with pytest.raises(RuntimeError, match=r"dtype torch.complex64"):
            x.to(torch.complex64) @ w.to(torch.complex64)


def _views(x):
    """Tensors of the shape of x, by how they lie in memory."""
    n = x.shape[-1]
    wide = torch.randn(*x.shape[:-1], 2 * n + 1, device=x.device).to(x.dtype)
    order = torch.arange(x.dim() - 1, -1, -1).tolist()
    return {
        "contiguous": x,
        "transposed": x.permute(order).contiguous().permute(order),
        "columns transposed": x.unsqueeze(-1).mT.contiguous().mT.squeeze(-1),
        "rows apart, and not aligned": wide[..., 1 : n + 1],
        "step": wide[..., : 2 * n : 2],
        "one column": x[..., :1].expand_as(x),
        "one row": x[:1].expand_as(x),
        "one element": x.flatten()[0].expand_as(x),
    }


def _check_product(have, function, operands):
    """Against the product in float64: sums in float32, then one rounding to the dtype."""
    dtype = operands[0].dtype
    assert have.dtype == dtype
    wide = [x.double() for x in operands]
    sums = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    bound = (
        8 * sums * function(*map(torch.abs, wide)) + torch.finfo(dtype).eps * have.double().abs()
    )
    error = (have.double() - function(*wide)).abs()
    assert (error <= bound).all(), float((error / bound).max())


OPERANDS = {  # functions of a bias, x and w
    "linear": (lambda b, x, w: F.linear(x, w.mT, b), (21,), (5, 7), (7, 21)),
    "addmm of a row": (torch.addmm, (21,), (5, 7), (7, 21)),
    "addmm": (torch.addmm, (5, 21), (5, 7), (7, 21)),
    "scaled addmm": (partial(torch.addmm, beta=0.5, alpha=2), (21,), (5, 7), (7, 21)),
    "baddbmm of a row": (torch.baddbmm, (21,), (2, 5, 7), (2, 7, 21)),
    "baddbmm": (torch.baddbmm, (2, 5, 21), (2, 5, 7), (2, 7, 21)),
    "addmv": (torch.addmv, (21,), (21, 7), (7,)),
    "mm": (torch.mm, (5, 7), (7, 21)),
    "bmm": (torch.bmm, (2, 5, 7), (2, 7, 21)),
    "mv": (torch.mv, (21, 7), (7,)),
    "matmul": (torch.matmul, (2, 1, 5, 7), (3, 7, 21)),
}
WIDTHS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_in_any_memory(kernels, random, name):
    function, *shapes = OPERANDS[name]
    with ff.batch_invariant():
        for dtype in (torch.float32, torch.bfloat16):
            operands = [random(*shape, dtype=dtype) for shape in shapes]
            for i, operand in enumerate(operands):
                for x in _views(operand).values():
                    given = [*operands[:i], x, *operands[i + 1 :]]
                    _check_product(function(*given), function, given)
            if name == "linear":  # has no out=
                continue
            for view, out in _views(torch.empty_like(function(*operands))).items():
                if not view.startswith("one "):
                    assert function(*operands, out=out) is out
                    _check_product(out, function, operands)
                elif "element" in view:
                    with pytest.raises(RuntimeError, match="single memory location"):
                        function(*operands, out=out)


@pytest.mark.parametrize("name", [x for x in OPERANDS if x != "matmul"])
@pytest.mark.all_cases
def test_operands_of_any_dtypes(kernels, random, name):
    """Torch refuses dtypes that differ, of the operands and of `out`; so does the context."""
    function, *shapes = OPERANDS[name]
    for dtypes in itertools.product([*WIDTHS, torch.int64], repeat=len(shapes)):
        given = [random(*shape).to(dtype) for shape, dtype in zip(shapes, dtypes)]
        for dtype in [None] if name == "linear" else [None, *WIDTHS]:
            same = len({*dtypes, dtype or dtypes[0]}) == 1
            if same and dtypes[0] is torch.int64:
                continue  # is torch's
            out = {} if dtype is None else {"out": random(0).to(dtype)}
            for context in (nullcontext(), ff.batch_invariant()):
                with nullcontext() if same else pytest.raises(RuntimeError), context:
                    have = function(*given, **out)
                    assert same, (dtypes, dtype, context)
            if same:
                _check_product(have, function, given)


@pytest.mark.parametrize("name, dim", [(n, i) for n in ("x", "w") for i in (0, 1, 2)])
@pytest.mark.all_cases
def test_offsets_past_int32(kernels, random, spread, name, dim):
    """Matrices, rows or columns so far apart that 32 bits do not hold where they lie, in a tile or
    in several.
    """
    for n in (3, 17):
        given = dict(x=random(3, n, 18).bfloat16(), w=random(3, 18, n).bfloat16())
        if dim:
            given = {operand: x[0] for operand, x in given.items()}
        far = given | {name: spread(given[name], max(0, dim - 1))}
        with ff.batch_invariant():
            assert torch.equal(torch.matmul(*far.values()), torch.matmul(*given.values()))


def test_more_matrices_than_an_axis_of_a_grid_has(kernels, random, monkeypatch):
    from fastformer.kernels import products

    a, b = random(5, 3, 4), random(5, 4, 6)
    with ff.batch_invariant():
        want = torch.bmm(a, b), torch.baddbmm(b[0, 0], a, b)
        monkeypatch.setattr(products, "MOST_PROGRAMS", 2)
        products.plans.clear()
        assert all(map(torch.equal, (torch.bmm(a, b), torch.baddbmm(b[0, 0], a, b)), want))
        monkeypatch.undo()
        grids = []
        monkeypatch.setattr(products, "Launch", lambda _, grid, *__: grids.append(grid) or id)
        monkeypatch.setattr(products, "remembered", lambda key, _: lambda *pointers: None)
        one = random(1, 1, 1).expand(65536, 1, 1)
        torch.bmm(one, one)
    assert grids == [(1, 65535), (1, 1)]


@pytest.mark.parametrize("alpha, beta", [(0, 1), (0, 0), (0, 0.5), (2, 0), (1, 1)])
def test_factors_of_zero(kernels, random, alpha, beta):
    """As in torch, a NaN of what has the factor 0 does not count."""
    nan = float("nan")
    x, w = random(5, 7).fill_(nan if alpha == 0 else 1), random(7, 4)
    input = random(4).fill_(nan) if beta == 0 else random(4)
    given = dict(alpha=alpha, beta=beta)
    calls = {
        "addmm": lambda: torch.addmm(input, x, w, **given),
        "addmv": lambda: torch.addmv(input[:1], x, w[:, 0], **given),
        "addmm_": lambda: input.expand(5, 4).contiguous().addmm_(x, w, **given),
    }
    for name, call in calls.items():
        want = call()
        assert want.isfinite().all()
        with ff.batch_invariant():
            torch.testing.assert_close(call(), want, msg=name)


def test_wrong_products_raise(kernels, random):
    """As in torch; the kernel itself would read past the end."""
    x, w, b = random(5, 7), random(7, 4), random(3, 7, 4)
    wide = torch.empty(5, 4, dtype=torch.float64, device=x.device)
    wrong = {
        "K": lambda: x @ w[:6],
        "vector": lambda: torch.mv(x, w[:6, 0]),
        "batch": lambda: torch.bmm(x.expand(2, 5, 7), b),
        "dtype": lambda: torch.mm(x, w.double()),
        "mm of batches": lambda: torch.mm(b.mT, b),
        "bmm of matrices": lambda: torch.bmm(x, w),
        "bmm of four dimensions": lambda: torch.bmm(b[None].mT, b[None]),
        "baddbmm of four dimensions": lambda: torch.baddbmm(w[0], b[None].mT, b[None]),
        "mv of a matrix": lambda: torch.mv(x, w),
        "mv of a number": lambda: torch.mv(x, w[0, 0]),
        "bias": lambda: torch.addmm(b[0, :3], x, w),
        "bias of factor 0": lambda: torch.addmm(b[0, :3], x, w, beta=0),
        "dimensions": lambda: torch.addmm(random(2, 5, 4), x, w),
        "dtype of out": lambda: torch.mm(x, w, out=wide),
        "device of out": lambda: torch.mm(x, w, out=torch.empty(5, 4, device="meta")),
        "dtype in place": lambda: wide.addmm_(x, w),
        "shape in place": lambda: random(4).addmm_(x, w),
    }
    for name, call in wrong.items():
        for context in (nullcontext(), ff.batch_invariant()):
            with context, pytest.raises(RuntimeError):
                call()
                pytest.fail(name)
    with ff.batch_invariant(), pytest.raises(RuntimeError, match=r"cannot add .* on meta to"):
        torch.addmm(b[0, 0].to("meta"), x, w)


# ---------------------------------------------------------------------------------- ops on rows


def _row_ops(random, dtype):
    n, h, v = 24, 40, 37
    x = random(ROWS, n, dtype=dtype)
    w, b, r = (random(*shape, dtype=dtype) for shape in ((n,), (n,), (ROWS, n)))
    layers = [random(*shape, dtype=dtype) for shape in ((h, n), (h,), (n, h), (n,))]
    gated = [random(2 * h, n, dtype=dtype), random(2 * h, dtype=dtype), *layers[2:]]
    classes, teacher = random(v, n, dtype=dtype), random(v, n, dtype=dtype)
    target = torch.randint(0, v, (ROWS,), device=x.device)
    none = dict(reduction="none")
    formed = dict(z_loss=0.01, softcap=5.0, temperature=0.7, label_smoothing=0.1, **none)

    def entropy(x, s):
        return ff.linear_cross_entropy(x, classes, target[s], return_entropy=True, **none)[1]

    return x, {
        "layer_norm": lambda x, s: ff.layer_norm(x, n, w, b),
        "rms_norm": lambda x, s: ff.rms_norm(x, n, w),
        "dropout_add_layer_norm": lambda x, s: ff.dropout_add_layer_norm(x, r[s], w, b)[0],
        "feed_forward": lambda x, s: ff.feed_forward(x, *layers),
        "gelu": lambda x, s: ff.feed_forward(x, *layers, activation="gelu"),
        "swiglu": lambda x, s: ff.swiglu(x, *gated),
        "linear_cross_entropy": lambda x, s: ff.linear_cross_entropy(
            x, classes, target[s], **formed
        ),
        "entropy": entropy,
        "linear_kl_div": lambda x, s: ff.linear_kl_div(x, classes, r[s], teacher, **none),
        "cross_entropy": lambda x, s: ff.cross_entropy(x, target[s] % n, **none),
        "rotary_embedding": lambda x, s: ff.rotary_embedding(
            x[:, None, None], x[:, None, None], w[None].float().cos(), w[None].float().sin()
        )[0].flatten(1),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows(kernels, random, dtype):
    """Outputs, and the gradients of the rows."""
    x, ops = _row_ops(random, dtype)
    for name, op in ops.items():
        with ff.batch_invariant():
            g = torch.randn_like(op(x, slice(None)))
            whole = with_gradients(lambda x, op=op: op(x, slice(None)), [x], g)
            for part in PARTS[1:]:
                alone = with_gradients(lambda x, op=op, s=part: op(x, s), [x[part]], g[part])
                for a, b in zip(alone, whole):
                    assert torch.equal(a, b[part]), name


@pytest.mark.with_all
@pytest.mark.parametrize("within", [True, False])
def test_parameters_in_any_memory(random, within):
    """The same bits as those of a contiguous copy, within the context and outside of it."""
    pytest.importorskip("triton")
    n, h, v = 24, 40, 37
    x, target = random(3, n), torch.tensor([0, 5, 36], device=x_device(random))
    both = random(3, n)
    layers = (h, n), (h,), (n, h), (n,)
    gated = (2 * h, n), (2 * h,), (n, h), (n,)
    ops = {
        "layer_norm": (lambda *p: ff.layer_norm(x, n, *p), (n,), (n,)),
        "rms_norm": (lambda w: ff.rms_norm(x, n, w), (n,)),
        "dropout_add_layer_norm": (
            lambda w, b, c: ff.dropout_add_layer_norm(x, both, w, b, input_bias=c)[0],
            *[(n,)] * 3,
        ),
        "feed_forward": (lambda *p: ff.feed_forward(x, *p, activation="gelu"), *layers),
        "swiglu": (lambda *p: ff.swiglu(x, *p), *gated),
        "geglu": (lambda *p: ff.geglu(x, *p), *gated),
        "linear_cross_entropy": (
            lambda w, b, c: ff.linear_cross_entropy(x, w, target, linear_bias=b, weight=c),
            *((v, n), (v,), (v,)),
        ),
        "linear_kl_div": (
            lambda w, b, u, c: ff.linear_kl_div(x, w, both, u, linear_bias=b, teacher_bias=c),
            *((v, n), (v,)) * 2,
        ),
        "cross_entropy": (lambda c: ff.cross_entropy(x, target % n, weight=c), (n,)),
    }
    with ff.use_backend("triton"), ff.batch_invariant() if within else nullcontext():
        for name, (function, *shapes) in ops.items():
            parameters = [random(*shape).abs() for shape in shapes]
            for i, parameter in enumerate(parameters):
                for view, p in _views(parameter).items():
                    if view.startswith(("rows", "step")):  # views of other numbers
                        p.abs_()
                    given = [*parameters[:i], p, *parameters[i + 1 :]]
                    same = [*parameters[:i], p.contiguous(), *parameters[i + 1 :]]
                    assert torch.equal(function(*given), function(*same)), (name, i, view)


# -------------------------------------------------------------------------------------- attention

OPTIONS = {
    "causal": {},
    "window": dict(window=(9, 0)),
    "alibi, softcap": dict(softcap=5.0, alibi=True),
    "sinks": dict(sinks=True),
}


def _attention(random, b, h, g, s, d, dtype, sinks=False, alibi=False, **options):
    query = random(b, h, s, d, dtype=dtype)
    key, value = random(b, g, s, d, dtype=dtype), random(b, g, s, d, dtype=dtype)
    if sinks:
        options["sinks"] = random(h)
    if alibi:
        options["alibi_slopes"] = random(h).abs()
    return [query, key, value], options


def _check_attention(random, lengths, h, g, d, cuts, dtype, **options):
    """A batch with lengths against each sequence alone, packed, in chunks, and decoded,
    where what stands behind the lengths is NaN.
    """
    b, s = len(lengths), max(lengths)
    inputs, options = _attention(random, b, h, g, s, d, dtype, **options)
    device = inputs[0].device
    ends = torch.tensor(lengths, device=device)
    causal = dict(is_causal=True, **options)
    late = dict(causal, causal_alignment="bottom_right")
    attend = partial(ff.scaled_dot_product_attention, enable_gqa=True)
    batch = attend(*inputs, key_lengths=ends, **causal)
    alone = []
    for i, n in enumerate(lengths):
        given = [x[i : i + 1, :, :n] for x in inputs]
        alone.append(attend(*given, **causal)[0])
        assert torch.equal(alone[i], batch[i, :, :n])
        query, key, value = given
        edges = [0, *(c for c in cuts if c < n), n]
        for a, z in itertools.pairwise(edges):
            chunk = attend(query[:, :, a:z], key[:, :, :z], value[:, :, :z], **late)
            assert torch.equal(chunk[0], alone[i][:, a:z]), (a, z)
    packed = [
        torch.cat([x[i, :, :n].transpose(0, 1) for i, n in enumerate(lengths)]) for x in inputs
    ]
    starts = F.pad(ends.cumsum(0), (1, 0)).int()
    together = ff.packed_attention(*packed, starts, starts, max_q=s, max_k=s, **causal)
    assert torch.equal(together, torch.cat([x.transpose(0, 1) for x in alone]))

    last = torch.stack([x[:, -1:] for x in alone])
    query = torch.stack([inputs[0][i, :, n - 1 : n] for i, n in enumerate(lengths)])
    caches = [x.clone() for x in inputs[1:]]
    for x in caches:
        for i, n in enumerate(lengths):
            x[i, :, n:] = float("nan")
    assert torch.equal(attend(query, *caches, key_lengths=ends, **late), last)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OPTIONS)
def test_attention(kernels, random, case, dtype):
    with ff.batch_invariant():
        given = (37, 1, 20), 4, 2, 16, (1, 2, 17, 30), dtype
        _check_attention(random, *given, **OPTIONS[case])


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(i, marks=pytest.mark.with_all) for i in range(1, 8))]
)
def test_attention_of_any_sizes(device, random, seed):
    """Drawn sizes, in the tiles that ship."""
    pytest.importorskip("triton")

    def draw(low, high):
        return int(torch.randint(low, high + 1, ()))

    torch.manual_seed(seed)
    lengths = [draw(256, 300), *(draw(1, 300) for _ in range(draw(1, 3)))]
    cuts = sorted({draw(1, 300) for _ in range(5)})
    g, d = draw(1, 2), 8 * draw(1, 6)
    dtype = [torch.float32, torch.float16, torch.bfloat16][seed % 3]
    with ff.use_backend("triton"), ff.batch_invariant():
        _check_attention(random, lengths, g * draw(1, 2), g, d, cuts, dtype)


def test_attention_with_masks(kernels, random):
    """A mask of padding, of queries and keys, and the lengths: the same bits. A bias, for one query
    and for many.
    """
    n, ends = 150, [150, 70]  # more keys than those of which no bounds of a mask are read
    inputs, _ = _attention(random, 2, 2, 2, n, 16, torch.float32)
    seen = (
        torch.arange(n, device=inputs[0].device)
        < torch.tensor(ends, device=inputs[0].device)[:, None]
    )
    keys, lower = seen.view(2, 1, 1, n), torch.ones_like(seen[:1]).expand(n, n).tril()
    attend = ff.scaled_dot_product_attention
    with ff.batch_invariant():
        for mask, causal in ((keys, True), (keys & lower, False)):
            batch = attend(*inputs, attn_mask=mask, is_causal=causal)
            for i, end in enumerate(ends):
                alone = attend(*(x[i : i + 1, :, :end] for x in inputs), is_causal=True)
                assert torch.equal(batch[i, :, :end], alone[0])
        bias = random(2, n, n)
        whole = attend(*inputs, bias=bias)
        for i in (0, 20, 149):
            query = inputs[0][:, :, i : i + 1]
            assert torch.equal(
                attend(query, *inputs[1:], bias=bias[:, i : i + 1]), whole[:, :, i : i + 1]
            )
        blocks = ff.block_mask(lower & lower.mT.roll(9, 1), Sq=n, Sk=n)
        whole = attend(*inputs, attn_mask=blocks)
        assert torch.equal(attend(*(x[1:] for x in inputs), attn_mask=blocks), whole[1:])


def test_tiles_do_not_depend_on_the_mask(kernels, random, monkeypatch):
    """Those of a GPU could, and the interpreter's do not: so this compares what they depend on."""
    from fastformer.kernels.attention import plan

    chosen = {}

    def configuration(kernel, *given):
        chosen.setdefault(kernel, set()).add(given)
        return plan.AttentionTiles(16, 16, 4, 1)

    monkeypatch.setattr(plan, "configuration", configuration)
    inputs, _ = _attention(random, 2, 2, 2, 40, 16, torch.float32)
    seen = torch.ones(2, 1, 40, 40, dtype=torch.bool, device=inputs[0].device)
    with ff.batch_invariant():
        for rows in (slice(None), slice(1)):
            added = random(2, 1, 40, 40)[:, :, rows]
            for options in (
                {},
                {"key_lengths": torch.tensor([40, 9], device=added.device)},
                {"attn_mask": seen[:, :, :1]},
                {"attn_mask": seen[:, :, rows]},
                {"bias": added[:, :, :1]},
                {"bias": added},
            ):
                attend = partial(ff.scaled_dot_product_attention, **options)
                given = inputs[0][:, :, rows], *inputs[1:]
                with_gradients(attend, given, torch.ones_like(given[0]))
    assert chosen.keys() == {"forward", "delta", "dq", "dkdv"}
    assert all(len(given) == 1 for given in chosen.values()), chosen


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_attention(kernels, random, dtype):
    """Of a sequence alone, in a batch and packed."""
    lengths, n = [37, 1, 20], 37
    inputs, _ = _attention(random, 3, 4, 2, n, 16, dtype)
    g = torch.randn_like(inputs[0])
    attend = partial(ff.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    starts = F.pad(torch.tensor(lengths, device=g.device).cumsum(0), (1, 0)).int()
    options = dict(max_q=n, max_k=n, is_causal=True)
    packed = [
        torch.cat([x[i, :, :end].transpose(0, 1) for i, end in enumerate(lengths)])
        for x in (*inputs, g)
    ]
    with ff.batch_invariant():
        batch = with_gradients(attend, inputs, g)
        together = with_gradients(
            lambda *x: ff.packed_attention(*x, starts, starts, **options), packed[:3], packed[3]
        )
        for i, end in enumerate(lengths):
            alone = with_gradients(attend, [x[i : i + 1] for x in inputs], g[i : i + 1])
            assert all(torch.equal(a[0], b[i]) for a, b in zip(alone, batch))
            cropped = [x[i : i + 1, :, :end] for x in inputs]
            alone = with_gradients(attend, cropped, g[i : i + 1, :, :end])
            rows = slice(int(starts[i]), int(starts[i + 1]))
            assert all(torch.equal(a[0].transpose(0, 1), b[rows]) for a, b in zip(alone, together))


# ----------------------------------------------------------------------------------------- models


def test_a_language_model(device):
    """Alone, in a batch, packed, prefilled in chunks, and token by token."""
    pytest.importorskip("triton")
    model = ff.make_decoder(vocab=50, N=1, d_model=32, d_ff=48, h=4).to(device).eval()
    tokens = torch.randint(3, 50, (3, 21), device=device)
    with ff.use_backend("triton"), ff.batch_invariant(), torch.no_grad():
        whole = model(tokens)
        assert torch.equal(model(tokens[1:2]), whole[1:2])
        lengths = torch.tensor([21, 9, 1], device=device)
        tokens_of_all, packing = ff.unpad(model.embed(tokens), lengths)
        packed = ff.pad(model.decoder(tokens_of_all, packing), packing)
        for i, n in enumerate(lengths):
            assert torch.equal(packed[i, :n], whole[i, :n])
        cache = ff.DecoderCache(32)
        edges = itertools.pairwise([0, 5, *range(16, 22)])
        parts = [model(tokens[:, a:b], cache=cache) for a, b in edges]
        assert torch.equal(torch.cat(parts, 1), whole)
        alone = [ff.greedy_decode(model, x, None, 23) for x in tokens.split(1)]
        assert torch.equal(ff.greedy_decode(model, tokens, None, 23), torch.cat(alone))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_models_with_a_cache(device, dtype):
    """A chunk is rounded where the whole is."""
    pytest.importorskip("triton")
    tokens, src = (torch.randint(1, 23, (2, n), device=device) for n in (9, 7))
    seen, sizes = (src != 0)[:, None], dict(N=1, d_model=16, d_ff=24, h=2)
    models = [
        ff.make_decoder(23, **sizes, positions="rotary", qk_norm=True, kv_heads=1),
        ff.make_decoder(23, **sizes, norm_first=False, norm="rms", activation="swiglu"),
        ff.make_model(23, 23, **sizes),
    ]
    for model in models:
        for bias in (p for name, p in model.named_parameters() if name.endswith("bias")):
            torch.nn.init.normal_(bias)
        model.to(device, dtype).eval()
        with ff.use_backend("triton"), ff.batch_invariant(), torch.no_grad():
            if hasattr(model, "encode"):
                memory, lower = model.encode(src, seen), ff.subsequent_mask(9).to(device)
                whole = model.decode(memory, seen, tokens, lower)
                run = partial(model.decode, memory, seen, tgt_mask=None)
            else:
                whole, run = model(tokens), model
            cache = ff.DecoderCache(12)
            parts = [run(tgt, cache=cache) for tgt in tokens.split([4, 4, 1], 1)]
            assert torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.parametrize(
    "kind", ["make_model", pytest.param("accelerate", marks=pytest.mark.with_all)]
)
def test_a_model_of_encoder_and_decoder(device, kind):
    """Ours and an accelerated one of torch, without dropout: the gradient of the source, too."""
    pytest.importorskip("triton")
    n, d = torch.tensor([9, 5], device=device), 16
    seen = torch.arange(9, device=device) < n[:, None]
    if kind == "make_model":
        model = ff.make_model(11, 11, N=1, d_model=d, d_ff=24, h=2, dropout=0.0).to(device)

        def run(src, tgt, seen):
            memory = model.encoder(src, seen[:, None])
            return model.decoder(tgt, memory, seen[:, None], ff.subsequent_mask(7).to(device))
    else:
        model = torch.nn.Transformer(d, 2, 1, 1, 24, dropout=0.0, batch_first=True).to(device)
        ff.accelerate(model)
        lower = torch.ones(7, 7, dtype=torch.bool, device=device).triu(1)

        def run(src, tgt, seen):
            hidden = dict(src_key_padding_mask=~seen, memory_key_padding_mask=~seen)
            return model(src, tgt, tgt_mask=lower, **hidden)

    src, tgt = torch.randn(2, 9, d, device=device), torch.randn(2, 7, d, device=device)
    with ff.use_backend("triton"), ff.batch_invariant():
        g = torch.randn_like(tgt)
        batch = with_gradients(lambda *x: run(*x, seen), [src, tgt], g)
        for i, end in enumerate(n):
            given = [src[i : i + 1, :end], tgt[i : i + 1]]
            shown = seen[i : i + 1, :end]
            alone = with_gradients(lambda *x, shown=shown: run(*x, shown), given, g[i : i + 1])
            for a, b in zip(alone, batch):
                assert torch.equal(a[0], b[i, : a.shape[1]])


def test_without_the_context_they_differ(device, random):
    """What the tests above would not see is not there to be seen: decoding splits the keys."""
    pytest.importorskip("triton")
    inputs, _ = _attention(random, 2, 2, 2, 300, 16, torch.float32)
    attend = ff.scaled_dot_product_attention
    with ff.use_backend("triton"):
        whole, last = attend(*inputs), attend(inputs[0][:, :, -1:], *inputs[1:])
        assert not torch.equal(whole[:, :, -1:], last)
        with ff.batch_invariant():
            assert torch.equal(
                attend(*inputs)[:, :, -1:], attend(inputs[0][:, :, -1:], *inputs[1:])
            )
        assert torch.equal(last, attend(inputs[0][:, :, -1:], *inputs[1:]))  # the plan of before


# ------------------------------------------------------------------------------------ the context


def test_calls_on_the_reference_raise(random):
    x = random(3, 4)
    with ff.batch_invariant(), ff.use_backend("reference"):
        for call in (
            lambda: ff.layer_norm(x, 4),
            lambda: ff.feed_forward(x, x, None, x.t(), None),
            lambda: ff.cross_entropy(x, torch.zeros(3, dtype=torch.int64, device=x.device)),
            lambda: ff.scaled_dot_product_attention(*[x.view(1, 1, 3, 4)] * 3),
        ):
            with pytest.raises(RuntimeError, match=r"takes kernels alone, and .* on the reference"):
                call()


def test_products_without_the_kernels_raise(kernels, random, monkeypatch):
    from fastformer.kernels import products

    x = random(3, 4).cpu()
    monkeypatch.setattr(products, "INTERPRETED", False)
    with ff.batch_invariant(), pytest.raises(RuntimeError, match="cpu device, and there is no"):
        x @ x.t()


def test_products_of_subclasses_raise(kernels, random):
    """Such as DTensor, whose own products would be torch's."""
    from torch.testing._internal.two_tensor import TwoTensor

    x = random(3, 4)
    both = TwoTensor(x, x)
    with ff.batch_invariant(), pytest.raises(RuntimeError, match=r"mm\.default of a TwoTensor"):
        both @ x.t()


def test_the_context(kernels, random):
    """It nests, belongs to its thread, and ends with an error, too."""
    seen = []
    with ff.batch_invariant():
        with ff.batch_invariant():
            assert on()
        assert on()
        thread = threading.Thread(target=lambda: seen.append(on()))
        thread.start()
        thread.join()
    assert not on() and seen == [False]
    with pytest.raises(KeyError), ff.batch_invariant():
        raise KeyError
    assert not on()
    context = ff.batch_invariant()
    with context, context:
        assert on()
    assert not on()


def test_threads_that_share_a_context(kernels, random):
    """Each thread, entering and leaving in turn with the other, has its own state."""
    context, turns, seen = ff.batch_invariant(), threading.Barrier(2, timeout=60), []
    x = random(3, 4)

    def products():
        """Whether the products are those of the kernels, which refuse complex numbers."""
        try:
            x.to(torch.complex64) @ x.to(torch.complex64).t()
        except RuntimeError:
            return True
        return False

    def run(enters, leaves):
        states = []
        for step in range(5):
            if step == enters:
                context.__enter__()
                with context:  # again, from within
                    states.append((on(), products()))
            if step == leaves:
                context.__exit__(None, None, None)
            turns.wait()
            states.append((on(), products()))
        seen.append(states == [(i >= enters and i < leaves,) * 2 for i in _with(enters)])

    def _with(enters):
        return sorted([*range(5), enters])

    for others in ((1, 3), (0, 4), (1, 4)):  # beside one that is within from step 0 to 2
        threads = [threading.Thread(target=run, args=given) for given in ((0, 2), others)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == [True] * 6 and not on()
    with copy.deepcopy(context), pickle.loads(pickle.dumps(context)):
        assert on()
    assert not on()


def test_the_backward_in_another_thread(kernels, random):
    """As on a GPU, autograd's thread has the state of the thread that calls backward()."""
    seen = []
    x = random(2, 3).requires_grad_()
    x.register_hook(lambda g: seen.append(on()))
    with ff.batch_invariant():
        (x @ x.t()).sum().backward()
    (x @ x.t()).sum().backward()
    assert seen == [True, False]


def test_compiled_functions_run_eagerly(kernels, random):
    layer = torch.nn.Linear(4, 5).to(x_device(random))
    runs = []
    function = torch.compile(layer, backend=lambda graph, _: lambda *x: runs.append(1) or graph(*x))
    x = random(ROWS, 4)
    function(x)
    with ff.batch_invariant():
        assert torch.equal(function(x)[5:6], layer(x[5:6]))
    assert runs == [1]  # outside of the context alone


def test_measurements_are_not_read(kernels, device, monkeypatch):
    from fastformer.kernels import tuned

    key = tuned.TuningKey("kernel", "case", (1,), lambda: [(2,)])
    monkeypatch.setattr(tuned, "source", lambda device: {"kernel: case": "2"})
    assert tuned.choose(device, key) == (2,)
    with ff.batch_invariant():
        assert tuned.choose(device, key) == (1,)


def test_classes_that_do_not_fill_groups(kernels, random):
    """Rows of logits that do not begin at a multiple of 16 bytes are read one class at a time."""
    from fastformer.kernels.cross_entropy import launchers

    odd, even = random(3, 37), random(3, 40)
    assert launchers.group_size(odd, 64) == launchers.group_size(even, 64) == 4
    with ff.batch_invariant():
        assert (launchers.group_size(odd, 64), launchers.group_size(even, 64)) == (1, 4)
