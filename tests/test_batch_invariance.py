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
from fastformer.plans import forget

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
def test_products(kernels, random, device, dtype, k):
    x, b = random(ROWS, k, dtype=dtype), random(3, k, 21, dtype=dtype)
    layer = torch.nn.Linear(k, 21).to(device, dtype)
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


def test_products_into_a_tensor(kernels, random):
    x, w = random(5, 7), random(7, 4)
    with ff.batch_invariant():
        assert torch.equal(torch.mm(x, w, out=x.new_empty(0)), x @ w)
        low = x.bfloat16(), w.bfloat16()
        wide = torch.mm(*low, out_dtype=torch.float32, out=x.new_empty(5, 4))
        torch.testing.assert_close(wide, low[0].float() @ low[1].float())
        double = x.double(), w.double()
        for given, wrong in ((low, torch.half), ((x, w), torch.double), (double, x.dtype)):
            with pytest.raises(RuntimeError, match=r"cannot compute aten.mm.dtype of torch.\w* in"):
                torch.mm(*given, out_dtype=wrong)
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
    "mm": (torch.mm, (19, 35), (35, 21)),
    "bmm": (torch.bmm, (2, 19, 35), (2, 35, 21)),
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
    """Matrices, rows or columns so far apart that 32 bits do not hold where they lie."""
    for n in (3, 17):  # in a tile, or in several
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
        forget()
        assert all(map(torch.equal, (torch.bmm(a, b), torch.baddbmm(b[0, 0], a, b)), want))
        monkeypatch.undo()
        grids = []

        def launch(kernel, grid, *_):
            grids.append(grid)
            return lambda *pointers: None

        monkeypatch.setattr(products, "Launch", launch)
        one = random(1, 1, 1).expand(65536, 1, 1)
        torch.bmm(one, one)
        forget()
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


N, HIDDEN, CLASSES = 24, 40, 37
LAYERS = (HIDDEN, N), (HIDDEN,), (N, HIDDEN), (N,)
GATED = (2 * HIDDEN, N), (2 * HIDDEN,), *LAYERS[2:]
PROJECTION = (CLASSES, N), (CLASSES,)  # to logits
NONE = dict(reduction="none")
FORMED = dict(z_loss=0.01, softcap=5.0, temperature=0.7, label_smoothing=0.1)


def _linear_loss(x, target, w, b, c, **options):
    return ff.linear_cross_entropy(x, w, target, linear_bias=b, weight=c, **NONE, **options)


def _rotated(x, angles):
    tables = angles.float().cos(), angles.float().sin()
    return ff.rotary_embedding(x[:, None, None], x[:, None, None], *tables)[0].flatten(1)


# Functions of rows x, of other rows r and the target t of each, and of parameters of these shapes.
ROW_OPS = {
    "layer_norm": (lambda x, r, t, *p: ff.layer_norm(x, N, *p), (N,), (N,)),
    "rms_norm": (lambda x, r, t, w: ff.rms_norm(x, N, w), (N,)),
    "dropout_add_layer_norm": (
        lambda x, r, t, w, b, c: ff.dropout_add_layer_norm(x, r, w, b, input_bias=c)[0],
        *[(N,)] * 3,
    ),
    "feed_forward": (lambda x, r, t, *p: ff.feed_forward(x, *p), *LAYERS),
    "gelu": (lambda x, r, t, *p: ff.feed_forward(x, *p, activation="gelu"), *LAYERS),
    "swiglu": (lambda x, r, t, *p: ff.swiglu(x, *p), *GATED),
    "geglu": (lambda x, r, t, *p: ff.geglu(x, *p), *GATED),
    "linear_cross_entropy": (
        lambda x, r, t, *p: _linear_loss(x, t, *p, **FORMED),
        *PROJECTION,
        (CLASSES,),
    ),
    "entropy": (
        lambda x, r, t, *p: _linear_loss(x, t, *p, return_entropy=True)[1],
        *PROJECTION,
        (CLASSES,),
    ),
    "linear_kl_div": (
        lambda x, r, t, w, b, u, c: ff.linear_kl_div(
            x, w, r, u, linear_bias=b, teacher_bias=c, **NONE
        ),
        *PROJECTION * 2,
    ),
    "cross_entropy": (lambda x, r, t, c: ff.cross_entropy(x, t % N, weight=c, **NONE), (N,)),
    "rotary_embedding": (lambda x, r, t, angles: _rotated(x, angles), (1, N)),
}


def _rows(random, n, dtype):
    """x, r and t of ROW_OPS."""
    x = random(n, N, dtype=dtype)
    return x, torch.randn_like(x), torch.randint(0, CLASSES, (n,), device=x.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows(kernels, random, dtype):
    """Outputs, and the gradients of the rows."""
    x, *others = _rows(random, ROWS, dtype)
    for name, (op, *shapes) in ROW_OPS.items():
        parameters = [random(*shape, dtype=dtype).abs() for shape in shapes]

        def run(part, g, op=op, parameters=parameters):
            given = [x[part] for x in others]
            return with_gradients(lambda x: op(x, *given, *parameters), [x[part]], g[part])

        with ff.batch_invariant():
            g = torch.randn_like(op(x, *others, *parameters))
            whole = run(slice(None), g)
            for part in PARTS[1:]:
                for a, b in zip(run(part, g), whole):
                    assert torch.equal(a, b[part]), name


@pytest.mark.with_all
@pytest.mark.parametrize("within", [True, False])
def test_parameters_in_any_memory(random, within):
    """The same bits as those of a contiguous copy; outside of the context torch's own products
    round as they do on this CPU.
    """
    pytest.importorskip("triton")
    rows = _rows(random, 3, torch.float32)
    with ff.use_backend("triton"), ff.batch_invariant() if within else nullcontext():
        for name, (op, *shapes) in ROW_OPS.items():
            parameters = [random(*shape).abs() for shape in shapes]
            for i, parameter in enumerate(parameters):
                for view, p in _views(parameter).items():
                    if view.startswith(("rows", "step")):  # views of other numbers
                        p.abs_()
                    given = [*parameters[:i], p, *parameters[i + 1 :]]
                    same = [*parameters[:i], p.contiguous(), *parameters[i + 1 :]]
                    found, want = op(*rows, *given), op(*rows, *same)
                    assert torch.equal(found, want) or not within, (name, i, view)
                    torch.testing.assert_close(found, want)


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


def _packed(tensors, lengths):
    """[tokens, H, D] of each [B, H, S, D], and where the sequences begin and end."""
    starts = F.pad(torch.tensor(lengths, device=tensors[0].device).cumsum(0), (1, 0)).int()
    cropped = ([x[i, :, :n].transpose(0, 1) for i, n in enumerate(lengths)] for x in tensors)
    return [torch.cat(parts) for parts in cropped], starts


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
    packed, starts = _packed(inputs, lengths)
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


def test_attention_with_masks(kernels, random, device):
    """A mask of padding, of queries and keys, and the lengths: the same bits. A bias, for one query
    and for many.
    """
    n, ends = 150, [150, 70]  # more keys than those of which no bounds of a mask are read
    inputs, _ = _attention(random, 2, 2, 2, n, 16, torch.float32)
    seen = torch.arange(n, device=device) < torch.tensor(ends, device=device)[:, None]
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
            one = slice(i, i + 1)
            row = attend(inputs[0][:, :, one], *inputs[1:], bias=bias[:, one])
            assert torch.equal(row, whole[:, :, one])
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
    packed, starts = _packed((*inputs, g), lengths)
    options = dict(max_q=n, max_k=n, is_causal=True)
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
    model = ff.make_model(11, 11, N=1, d_model=d, d_ff=24, h=2, dropout=0.0)
    if kind == "accelerate":
        model = torch.nn.Transformer(d, 2, 1, 1, 24, dropout=0.0, batch_first=True)
        ff.accelerate(model, drop_padding=True)
    model, lower = model.to(device), ff.subsequent_mask(7).to(device)

    def run(src, tgt, seen):
        if kind == "accelerate":
            hidden = dict(src_key_padding_mask=~seen, memory_key_padding_mask=~seen)
            return model(src, tgt, tgt_mask=~lower[0], **hidden)
        return model.decoder(tgt, model.encoder(src, seen[:, None]), seen[:, None], lower)

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
    (query, *cached), _ = _attention(random, 2, 2, 2, 300, 16, torch.float32)
    attend = ff.scaled_dot_product_attention
    with ff.use_backend("triton"):
        whole, last = attend(query, *cached), attend(query[:, :, -1:], *cached)
        assert not torch.equal(whole[:, :, -1:], last)
        with ff.batch_invariant():
            assert torch.equal(attend(query, *cached)[:, :, -1:], attend(query[:, :, -1:], *cached))
        assert torch.equal(last, attend(query[:, :, -1:], *cached))  # the plan of before


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


def test_the_context():
    """It nests, and ends with an error, too."""
    with ff.batch_invariant():
        with ff.batch_invariant():
            assert on()
        assert on()
    assert not on()
    with pytest.raises(KeyError), ff.batch_invariant():
        raise KeyError
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
        states, steps = [], sorted([*range(5), enters])
        for step in range(5):
            if step == enters:
                context.__enter__()
                with context:  # again, from within
                    states.append((on(), products()))
            if step == leaves:
                context.__exit__(None, None, None)
            turns.wait()
            states.append((on(), products()))
        seen.append(states == [(enters <= i < leaves,) * 2 for i in steps])

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


def test_compiled_functions_run_eagerly(kernels, random, device):
    layer = torch.nn.Linear(4, 5).to(device)
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
