"""Every kernel, forward and backward, against the oracle at the sizes that training has: thousands
of tokens, in float32, float16 and bfloat16, head dimensions from 16 to 256. Without a GPU the same
calls are small.
"""

import numpy as np
import pytest
import torch

import fastformer as ff
from fastformer.description import Attention, pack

pytest.importorskip("triton")
import triton
import triton.language as tl
from fastformer.kernels.attention.scores import Features, Sequence, Sizes, first_row
from fastformer.kernels.launch import constants
from fastformer.kernels.rotary import _span

GPU = torch.cuda.is_available()
S, ROWS, WIDTH, CLASSES = (2048, 4096, 512, 32768) if GPU else (48, 6, 16, 33)
SHORT, MANY_HEADS = (128, 132) if GPU else (16, 6)
SEED = 20170612
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=NAMES, indirect=True)

# Options, and sizes where they are not 4 heads of S tokens. One kernel computes the backward of
# `short` sequences: in registers, or with many heads by way of memory. Three compute the others'.
EVERYTHING = "mask, bias and dropout"
ATTENTION = {
    EVERYTHING: dict(mask=True, bias=True, dropout_p=0.1),
    "plain": {},
    "causal": dict(is_causal=True),
    "lengths and dropout": dict(lengths=True, dropout_p=0.1),
    "window": dict(window=(S // 4, 0)),
    "grouped heads": dict(groups=2, is_causal=True),
    "block mask": dict(blocks=True, dropout_p=0.1),
    "short": dict(length=SHORT, lengths=True, dropout_p=0.1),
    "short, many heads": dict(length=2 * SHORT, heads=MANY_HEADS, lengths=True, dropout_p=0.1),
}
CALLS = [(EVERYTHING, d, x) for d in ((16, 32, 64, 128, 256) if GPU else (16, 32)) for x in DTYPES]
OTHERS = [case for case in ATTENTION if case != EVERYTHING]
CALLS += [(case, d, torch.bfloat16) for case in OTHERS for d in ((64, 128) if GPU else (16,))]
if GPU:
    CALLS += [(case, 32, torch.bfloat16) for case in ("plain", "lengths and dropout")]
IDS = [f"{case}-{d}-{str(dtype).removeprefix('torch.')}" for case, d, dtype in CALLS]


@pytest.fixture
def dtype(request):
    return getattr(request, "param", torch.bfloat16)


@pytest.fixture
def random(device, dtype):
    def random(*shape, scale=1.0):
        return torch.randn(*shape, device=device, dtype=dtype) * scale

    return random


@pytest.fixture(autouse=True)
def kernels():
    with ff.use_backend("triton"):
        yield
    if GPU:  # other processes need the memory
        torch.cuda.empty_cache()


@pytest.mark.parametrize("case, d, dtype", CALLS, ids=IDS, indirect=["dtype"])
def test_attention(against_oracle, random, device, case, d):
    options = dict(ATTENTION[case])
    length, heads = options.pop("length", S), options.pop("heads", 4)
    groups = options.pop("groups", heads)
    tensors = {"query": random(2, heads, length, d, scale=1.5)}
    tensors |= {name: random(2, groups, length, d, scale=1.5) for name in ("key", "value")}
    if options.pop("mask", False):
        options["attn_mask"] = torch.rand(2, 1, length, length, device=device) < 0.8
    if options.pop("blocks", False):
        blocks = ff.BlockMask.longformer(length, length // 16, length // 64 + 1, device="cpu")
        options["attn_mask"] = blocks.to(device)
    if options.pop("bias", False):
        tensors["bias"] = random(heads, length, length)
    if options.pop("lengths", False):
        options["key_lengths"] = torch.tensor([length // 2 + 1, length], device=device)
    if "dropout_p" in options:
        options["dropout_seed"] = SEED
    options["enable_gqa"] = groups != heads
    against_oracle(ff.scaled_dot_product_attention, tensors, **options)


def test_packed(against_oracle, random, device):
    offsets = torch.tensor([0, S // 4 + 1, 2 * S], device=device, dtype=torch.int32)
    shape, longest = (2 * S, 4, 64 if GPU else 16), 2 * S - S // 4 - 1
    tensors = {name: random(*shape, scale=1.5) for name in ("query", "key", "value")}
    options = dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_q=longest, max_k=longest)
    options |= dict(dropout_p=0.1, dropout_seed=SEED, is_causal=True)
    against_oracle(ff.packed_attention, tensors, **options)


@pytest.mark.parametrize("d", (64, 128) if GPU else (16, 32))
def test_decoding(against_oracle, random, device, d):
    """Few queries over a cache of keys, a head of it for four of the query."""
    length = 8192 if GPU else 320
    options = dict(is_causal=True, causal_alignment="bottom_right")
    tensors = {"query": random(2, 8, 3, d, scale=1.5)}
    tensors["key_lengths"] = torch.tensor([length - 7, length // 3], device=device)
    tensors |= {name: random(2, 2, length, d, scale=1.5) for name in ("key", "value")}
    options |= dict(enable_gqa=True, gradients=False)
    against_oracle(ff.scaled_dot_product_attention, tensors, **options)


def joined(op, dim=0):
    """The op, with both of its outputs in one tensor."""
    return lambda **given: torch.cat(op(**given), dim)


@EVERY_DTYPE
def test_norms(against_oracle, random):
    check_norms(against_oracle, random, WIDTH)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8 * WIDTH, 32 * WIDTH])
def test_wide_norms(against_oracle, random, width):
    check_norms(against_oracle, random, width)


def check_norms(against_oracle, random, width):
    rows, dropout = ROWS * WIDTH // width, dict(dropout_p=0.1, dropout_seed=SEED)
    tensors = {"input": random(rows, width), "weight": random(width)}
    against_oracle(ff.rms_norm, tensors, normalized_shape=width)
    tensors["residual"] = random(rows, width)
    against_oracle(joined(ff.dropout_add_rms_norm), tensors, **dropout)
    tensors["bias"] = random(width)
    against_oracle(joined(ff.dropout_add_layer_norm), tensors, **dropout)
    del tensors["residual"]
    against_oracle(ff.layer_norm, tensors, normalized_shape=width)


@EVERY_DTYPE
@pytest.mark.parametrize("norm", [False, True])
def test_rotary(against_oracle, random, norm):
    heads, length, dim = (32, 4096, 128) if GPU else (4, 300, 64)
    tensors = {"query": random(2, length, heads, dim).transpose(1, 2)}
    tensors["key"] = random(2, length, heads // 4, dim).transpose(1, 2)
    if norm:
        tensors |= {"query_norm": random(dim), "key_norm": random(dim)}
    cos, sin = ff.rotary_frequencies(dim, length, device=tensors["key"].device)
    against_oracle(joined(ff.rotary_embedding, 1), tensors, cos=cos, sin=sin)


@EVERY_DTYPE
def test_feed_forward(against_oracle, random):
    tensors = {"input": random(ROWS, WIDTH), "b_1": random(4 * WIDTH), "b_2": random(WIDTH)}
    tensors["w_1"] = random(4 * WIDTH, WIDTH, scale=WIDTH**-0.5)
    tensors["w_2"] = random(WIDTH, 4 * WIDTH, scale=WIDTH**-0.5)
    against_oracle(ff.feed_forward, tensors, dropout_p=0.1, dropout_seed=SEED)


@EVERY_DTYPE
@pytest.mark.parametrize("op", [ff.geglu, ff.swiglu])
def test_gated(against_oracle, random, op):
    tensors = {"x": random(ROWS, WIDTH), "w": random(6 * WIDTH, WIDTH, scale=WIDTH**-0.5)}
    tensors["w_2"] = random(WIDTH, 3 * WIDTH, scale=WIDTH**-0.5)

    def gated(x, w, w_2, **options):
        return op(x, w, None, w_2, None, **options)

    against_oracle(gated, tensors, dropout_p=0.1, dropout_seed=SEED)


@EVERY_DTYPE
def test_gated_activation(against_oracle, random):
    tensors = {"gate": random(ROWS, 3 * WIDTH), "value": random(ROWS, 3 * WIDTH)}
    against_oracle(ff.gated_activation, tensors, activation="gelu")


@EVERY_DTYPE
def test_embed(against_oracle, random, device):
    tensors = {"tokens": torch.randint(0, CLASSES, (2, ROWS), device=device)}
    tensors |= {"weight": random(CLASSES, WIDTH), "positional": random(ROWS, WIDTH)}
    against_oracle(ff.embed, tensors, dropout_p=0.1, dropout_seed=SEED)


@EVERY_DTYPE
@pytest.mark.parametrize("smoothing", ["uniform", "kl"])
def test_losses(against_oracle, random, device, smoothing):
    options = dict(reduction="none", label_smoothing=0.1, smoothing=smoothing, ignore_index=0)
    target = torch.randint(1, CLASSES, (ROWS,), device=device)
    logits = {"logits": random(ROWS, CLASSES), "target": target}
    against_oracle(ff.cross_entropy, logits, **options)
    projected = {"input": random(ROWS, WIDTH), "target": target}
    projected["linear_weight"] = random(CLASSES, WIDTH, scale=WIDTH**-0.5)
    against_oracle(ff.linear_cross_entropy, projected, **options)


# ------------------------------------------------------------- results of more than 2^31 elements

FEATURES = 2048
MANY = 2**31 // FEATURES + 64  # rows


@pytest.fixture
def last_program(monkeypatch):
    """Of each launch the last program runs alone, and what it does not write is no memory: large
    results cost nothing (interpreter only).
    """
    if GPU:
        pytest.skip("a GPU's memory is there in full")
    from triton.runtime import interpreter

    def run(self, *arguments, former=interpreter.GridExecutor.__call__, **named):
        grid = (*self.grid, 1, 1)[:3]
        self.grid = (1,)
        with pytest.MonkeyPatch.context() as patch:
            builder = interpreter.interpreter_builder
            patch.setattr(builder, "set_grid_dim", lambda *_: setattr(builder, "grid_dim", grid))
            last = tuple(n - 1 for n in grid)
            patch.setattr(builder, "set_grid_idx", lambda *_: setattr(builder, "grid_idx", last))
            former(self, *arguments, **named)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)


def same_in_the_end(run):
    """run(rows), of rows that are all alike, gives the same last elements for 128 and for MANY."""
    few, many = ([x[-1, -16:] for x in run(rows)] for rows in (128, MANY))
    assert all(x.isfinite().all() and torch.equal(x, y) for x, y in zip(few, many, strict=True))


@pytest.mark.parametrize("wide", [False, True], ids=["one block", "wide"])
def test_norms_past_int32(last_program, random, monkeypatch, wide):
    from fastformer.kernels.layer_norm import launchers as norm

    if wide:
        monkeypatch.setattr(norm, "configuration", lambda *_: norm.NormTiles(16, 512, 4))
    monkeypatch.setattr(norm, "PARTIAL_SUMS", MANY)
    x, residual, dy, ds, w, b = (random(FEATURES) for _ in range(6))
    options = w, b, 0.0, 1e-5, False, None, None

    def run(rows):
        given, residuals, *grads = (t.expand(rows, FEATURES) for t in (x, residual, dy, ds))
        y, *saved = norm.add_forward(given, residuals, *options)
        grads = norm.add_backward(*grads, *options, *saved, [True, True, False, False, False])
        return y, saved[0], *grads[:2]

    same_in_the_end(run)


def test_embed_past_int32(last_program, random, monkeypatch):
    from fastformer.kernels import embedding

    w, dy, position = random(3, FEATURES), random(FEATURES), random(FEATURES)
    found = []
    monkeypatch.setattr(
        torch.ops.aten, "embedding_dense_backward", lambda g, *_: found.append(g) or w.clone()
    )

    def run(rows):
        options = torch.ones(rows, dtype=torch.int64), w, position.expand(rows, FEATURES)
        options = *options, 0.0, 2.0, None, None
        embedding.backward(dy.expand(rows, FEATURES), *options, [True, False])
        return embedding.forward(*options), found.pop()

    same_in_the_end(run)


def test_losses_past_int32(last_program, random):
    from fastformer.kernels.cross_entropy import launchers as cross_entropy

    x, lse = random(FEATURES), torch.tensor([1.0, 2.0])

    def run(rows):
        logits, target = x.expand(rows, FEATURES), torch.ones(rows, dtype=torch.int64)
        options = "sum", -100, 0.1, "uniform", None, 0.0, None, 1.0, False
        saved = lse.expand(rows, 2).contiguous(), torch.empty(0)
        given = torch.tensor(1.0), None, logits, target, *options, *saved
        return [cross_entropy.backward(*given, [True])]

    same_in_the_end(run)


def test_feed_forward_past_int32(last_program, random):
    from fastformer.kernels import feed_forward as fed

    x, w, b = random(4), random(FEATURES, 4), random(FEATURES)
    nothing = random(0, FEATURES)  # for torch to multiply by
    last = random(2, 2 * FEATURES)

    def in_the_end(rows, width=FEATURES):
        y = torch.empty(rows, width, dtype=last.dtype)
        y[-2:] = last[:, :width]
        return y

    def run(rows):
        hidden = fed.forward(x.expand(rows, 4), w, b, nothing, None, "relu", 0.0, None)[1]
        results, size = [hidden], fed.Size(rows, FEATURES)

        def launch(kernel, tensors, strides=None):
            fed._elementwise(kernel, size, x, "silu", 0.0, strides)(*tensors, x)

        dh, saved = in_the_end(rows), in_the_end(rows)
        dz, h = torch.empty_like(saved), torch.empty_like(dh)
        launch(fed._hidden_backward, (dh, saved, dz, h))
        results += [dz, h]
        saved, strides = in_the_end(rows, 2 * FEATURES), fed.GateStrides(*[2 * FEATURES] * 3)
        dz, h = torch.empty_like(saved), torch.empty_like(dh)
        tensors = dh, *saved.chunk(2, 1), *dz.chunk(2, 1), h
        launch(fed._gated_backward, tensors, strides)
        results += [dz, h]
        z, h = in_the_end(rows, 2 * FEATURES), torch.empty_like(hidden)
        launch(fed._gated, (*z.chunk(2, 1), h), strides)
        return *results, h

    same_in_the_end(run)


def test_a_bias_gradient_past_int32(last_program, random):
    from fastformer.kernels.attention import launchers as attention

    q, do, k, v, bias = random(8), random(8), random(1, 1, FEATURES, 8), random(8), random(1)

    def call(rows):
        described = Attention(None, 0.0, False, 0.3, bias.expand(rows, FEATURES))
        return pack([q.expand(1, 1, rows, 8), k, v.expand(k.shape), described])

    saved = attention.forward(*call(32), False)  # of more queries than those that split the keys
    saved = [x[:, :, :1] for x in saved]  # of each row

    def run(rows):
        output, *statistics = (x.expand(1, 1, rows, *x.shape[3:]) for x in saved)
        whole = output, *(x.contiguous() for x in statistics)
        needs = [False, False, False, True, False]
        grads = do.expand(1, 1, rows, 8), None
        return [attention.backward(*grads, *call(rows), *whole, needs)[3]]

    same_in_the_end(run)


@triton.jit
def _places(OUT, batch_head, h, sequence, sizes, has: tl.constexpr, has_packed: tl.constexpr):
    tl.store(OUT, first_row(batch_head, h, sequence, sizes, has))
    tl.store(OUT + 1, first_row(batch_head, h, sequence, sizes, has_packed))


def test_statistics_past_int32(device):
    """Where the rows of a head begin in the log-sum-exps, by batch or among the packed tokens."""
    places = torch.zeros(2, dtype=torch.int64, device=device)
    sequence, sizes = Sequence(7, 0, 2**20, 0, 0), Sizes(1, 1, 2**20, 0, 2**20, 0)
    has = Features(*[False] * len(Features._fields))
    packings = constants(has), constants(has._replace(packed=True))
    _places[(1,)](places, 2**20 + 1, 2**13 + 1, sequence, sizes, *packings)
    expected = torch.tensor([(2**20 + 1) * 2**20, (2**13 + 1) * 2**20 + 7], device=device)
    assert torch.equal(places, expected)


@triton.jit
def _numbers(OUT, heads):
    tl.store(OUT + tl.program_id(0), _span(heads - 1, heads, 1).program)


def test_programs_past_int32(device):
    """Their numbers, by which a norm's partial sums of rotary positions stand in memory."""
    numbers = torch.zeros(3, dtype=torch.int64, device=device)
    _numbers[(3,)](numbers, 2**30)
    assert numbers.tolist() == [n * 2**30 - 1 for n in (1, 2, 3)]


@pytest.fixture
def places(last_program, monkeypatch):
    """Where each launch reads, zeros, and where it writes, nothing: tensors of any size need no
    memory.
    """
    from triton.runtime import interpreter

    builder, found = interpreter.InterpreterBuilder, []

    def touch(which, pointers, mask):
        chosen = np.broadcast_to(mask.data, pointers.data.shape)
        found[-1][which].extend(pointers.data[chosen].astype(np.int64).tolist())

    def load(self, pointers, mask, *rest, former=builder.create_masked_load):
        touch(0, pointers, mask)
        nowhere = interpreter.TensorHandle(np.zeros(pointers.data.shape, bool), tl.int1)
        return former(self, pointers, nowhere, None, *rest[1:])

    def launch(self, *given, former=interpreter.GridExecutor.__call__, **named):
        found.append(([], []))
        former(self, *given, **named)

    def store(self, pointers, value, mask, *rest):
        touch(1, pointers, mask)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    monkeypatch.setattr(builder, "create_masked_load", load)
    monkeypatch.setattr(builder, "create_masked_store", store)
    return found


def test_batch_heads_past_int32(places, monkeypatch):
    """Each kernel of attention finds the statistics of the last head, and the gradient of its bias,
    past 2^31 elements.
    """
    from fastformer.kernels.attention import plan

    batch_heads, length = 2**12 + 1, 2**19
    memory = torch.zeros(8)
    x = memory.expand(batch_heads, 1, length, 8)
    monkeypatch.setattr(plan, "heads_like", lambda like, *_: like)
    monkeypatch.setattr(plan, "empty_outputs", lambda *_: (x, x[..., 0], x[..., :2]))
    tensors, saved = (x, x, x, x), (memory, memory)
    for of_keys in (False, True):
        k = x if of_keys else x[:, :, :16]
        bias = memory[0].expand((1, 1, 1, length) if of_keys else (batch_heads, 1, length, 16))
        described = Attention(None, 0.0, True, 1.0, bias)  # causal: a query sees few keys
        call, optional = (x, k, k, described), plan.optional_inputs(x, described)
        plan.ForwardPlan(*call).forward(tensors[:3], *[memory] * 4, optional)
        launch = plan.BackwardPlan(x, x, x, (True, False, False, True, False), *call).launch
        launch["delta"](x, x, *[memory] * 4)
        launch["dq"](tensors, memory, *saved, optional)
        if of_keys:
            launch["dkdv"](tensors, *[memory] * 3, *saved, optional)
        else:
            launch["dbias"](tensors, memory, *saved, optional)
    assert len(places) == 8
    base, head = memory.data_ptr(), (batch_heads - 1) * length
    for reads, writes in places:
        assert min(reads + writes) >= base and max(reads + writes) >= base + 4 * head
    of_pairs, of_keys = (max(places[n][1]) for n in (3, 7))
    assert of_pairs == base + 4 * (16 * batch_heads * length - 1)
    assert of_keys == base + 4 * (batch_heads * length - 1)


def test_rows_of_a_bias_past_int32(places):
    """The rows of one tile of its gradient stand more than 2^31 elements apart."""
    from fastformer.kernels.attention.plan import BackwardPlan, optional_inputs

    rows, keys = 64, 2**26
    memory = torch.zeros(8)
    q, k = memory.expand(1, 1, rows, 8), memory.expand(1, 1, keys, 8)
    described = Attention(None, 0.0, False, 1.0, memory[0].expand(1, 1, rows, keys))
    plan = BackwardPlan(q, None, q, (False,) * 3 + (True, False), q, k, k, described)
    plan.launch["dbias"]((q, k, k, q), memory, memory, memory, optional_inputs(q, described))
    ((_, writes),) = places
    ends = memory.data_ptr() + 4 * torch.tensor([keys - len(writes) // rows, rows * keys - 1])
    assert [min(writes), max(writes)] == ends.tolist()


@pytest.mark.parametrize("wide", [False, True], ids=["one block", "wide"])
def test_partial_sums_past_int32(places, random, monkeypatch, wide):
    """Those of the weights' gradients, a row of each program."""
    from fastformer.kernels.layer_norm import launchers as norm

    if wide:
        monkeypatch.setattr(norm, "WIDE_WEIGHTS", norm.NormTiles(1, 512, 4))
    tiles = norm.NormTiles(1, 512 if wide else FEATURES, 4)
    monkeypatch.setattr(norm, "configuration", lambda *_: tiles)
    monkeypatch.setattr(norm, "PARTIAL_SUMS", MANY)
    kernel, place = ("weights_kernel", 3) if wide else ("rows_kernel", 4)
    former, given = norm.Backward, []

    def made(*arguments):
        plan = former(*arguments)
        assert plan.partial[0] == (2, MANY, FEATURES)
        plan.partial = norm.dense((2, 1, FEATURES))  # the kernel is not told
        plan.add_up = norm.sums_launch(2, 1, FEATURES)
        launch = getattr(plan, kernel)
        setattr(plan, kernel, lambda *x: given.append(x) or launch(*x))
        return plan

    monkeypatch.setattr(norm, "Backward", made)
    x, statistic, w = random(FEATURES).expand(MANY, FEATURES), torch.ones(MANY), random(FEATURES)
    options = [FEATURES], w, w, 1e-5, False, statistic, statistic, [not wide, True, True]
    norm.backward(x, x, *options)
    ((sums, *_),) = [pointers[place] for pointers in given]
    (_, writes), _ = places[-2:]  # the last one adds them up
    assert sums.data_ptr() + 4 * (MANY * FEATURES - 1) in writes


def test_sums_of_partial_sums_past_int32(places):
    from fastformer.kernels.partial_sums import sums_launch

    n, x = 2**30, torch.zeros(1)
    partial, results = x.expand(2, 3, n), [x.expand(n)] * 3
    sums_launch(*partial.shape)(partial, tuple(results))
    ((reads, writes),) = places
    assert max(reads) == x.data_ptr() + 4 * (6 * n - 1)
    assert max(writes) == x.data_ptr() + 4 * (n - 1)
