"""The memory check of Triton's interpreter finds what it is for, in small kernels with one fault
each. Nothing is found, by it or by the simulator, in calls of every kernel in several programs.
"""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from fastformer.kernels import common
from fastformer.kernels.attention import plan, short_backward
from triton.tools.tensor_descriptor import TensorDescriptor

import fastformer as ff
from benchmarks.proof import memory_check
from fastformer import use_backend

if not common.INTERPRETED:
    pytest.skip("in Triton's interpreter only", allow_module_level=True)


# ----------------------------------------------------------------------------------- small kernels


@triton.jit
def copy_kernel(X, Y, n, shift, step, B: tl.constexpr):
    """Each program copies B elements, to where the first stands at program * step + shift."""
    i = tl.arange(0, B)
    ok = tl.program_id(0) * B + i < n
    x = tl.load(X + tl.program_id(0) * B + i, mask=ok)
    tl.store(Y + tl.program_id(0) * step + shift + i, x, mask=ok)


@triton.jit
def update_kernel(X, kind: tl.constexpr):
    if kind == "an addition":
        tl.atomic_add(X, 1)
    else:
        tl.atomic_cas(X, 0, 1)


@triton.jit
def fold_kernel(Y, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(Y + i // 2, i.to(tl.float32), mask=i < n)


@triton.jit
def reread_kernel(X, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(X + i, i.to(tl.float32), mask=i < n)
    tl.store(X + n + i, tl.load(X + i, mask=i < n), mask=i < n)


@triton.jit
def scratch_kernel(X, scratch, rows, B: tl.constexpr, BARRIER: tl.constexpr):
    """Each program stores `rows` rows to memory of its own, and then reads two of them."""
    own = scratch.sums + tl.program_id(0) * 2 * B
    i = tl.arange(0, 2 * B)
    j = tl.arange(0, 4 * B)
    tl.store(own + j, j.to(tl.float32), mask=j < rows * B)
    if BARRIER:
        tl.debug_barrier()
    tl.store(X + tl.program_id(0) * 2 * B + i, tl.load(own + i))


@triton.jit
def last_kernel(X):
    """All programs read X[0], and the second one writes it."""
    tl.store(X, tl.load(X), mask=tl.program_id(0) == 1)


@triton.jit
def words_kernel(X, Y, n):
    tl.store(Y, tl.load(X.to(tl.pointer_type(tl.int32)) + n))


@triton.jit
def descriptor_kernel(X, target, rows, B: tl.constexpr):
    source = tl.make_tensor_descriptor(X, [rows, B], [B, 1], [8, B])
    i = tl.program_id(0) * 8
    target.store([i, 0], source.load([i, 0]))


def copy(x, y, n=20, shift=0, step=8):
    copy_kernel[(3,)](x, y, n, shift, step, 8)


def described(rows_read, rows_stored):
    x, y = torch.zeros(20, 16), torch.zeros(20, 16)
    target = TensorDescriptor(y, [rows_stored, 16], [16, 1], [8, 16])
    descriptor_kernel[(3,)](x, target, rows_read, 16)


def reread(rows=2, barrier=True):
    scratch = short_backward.Scratch(numbers(0), numbers(0), numbers(64))
    scratch_kernel[(3,)](numbers(48), scratch, rows, 8, barrier)


numbers = torch.zeros
ALLOWED = {
    "copy": lambda: copy(numbers(20), numbers(20)),
    "in place": lambda: copy(*[numbers(20)] * 2),
    "to the other half of a row": lambda: (lambda x: copy(x[0], x[1]))(numbers(2, 20)),
    "an expanded input": lambda: copy_kernel[(1,)](numbers(1).expand(8), numbers(1), 1, 0, 8, 8),
    "overlapping windows": lambda: copy(numbers(20).as_strided((16, 5), (1, 1)), numbers(20)),
    "words of bytes": lambda: words_kernel[(1,)](numbers(8).byte(), numbers(1).int(), 1),
    "descriptors": lambda: described(20, 20),
    "scratch memory": reread,
}
FAULTY = {
    "past the end": (
        lambda: copy(numbers(19), numbers(20)),
        r"copy_kernel, program \(2, 0, 0\), \S*test_memory_check.py:\d+ in copy_kernel: loads "
        r"X\[19\] \(shape \[19\], strides \[1\], torch.float32\), 1 past its last element",
    ),
    "before the first": (
        lambda: copy(numbers(20), numbers(20), shift=-3),
        r"stores Y\[-1\].*, 1 before its first element",
    ),
    "into padding": (
        lambda: copy(numbers(4, 8)[:, :5], numbers(20)),
        r"loads X\[0, 5\] \(shape \[4, 5\], strides \[8, 1\].*, between its elements",
    ),
    "into its other elements": (
        lambda: copy(numbers(20), numbers(40)[::2]),
        r"stores Y\[0\] \+ 1 .*, between its elements",
    ),
    "in a tensor without elements": (lambda: copy(numbers(20), numbers(0)), r"stores Y\["),
    "in another tensor": (
        lambda: (lambda x: copy(x[:8], x[20:]))(numbers(40)),
        r"program \(1, 0, 0\).* loads X\[8\]",
    ),
    "by two programs": (
        lambda: copy(numbers(20), numbers(20), step=7),
        r"program \(1, 0, 0\).* stores Y\[7\].*, which program \(0, 0, 0\) has stored",
    ),
    "twice by one program": (
        lambda: fold_kernel[(1,)](numbers(8), 8, 8),
        r"stores Y\[0\].*, which the same instruction stores twice",
    ),
    "a read of what another program has written": (
        lambda: (lambda x: copy(x[:20], x[8:]))(numbers(28)),
        r"program \(1, 0, 0\).* loads X\[8\].*, which program \(0, 0, 0\) has stored",
    ),
    "a write of what another program has read": (
        lambda: (lambda x: copy(x[8:], x[:20]))(numbers(28)),
        r"program \(1, 0, 0\).* stores Y\[8\].*, which another program has loaded",
    ),
    "a write of what it has read last": (
        lambda: last_kernel[(2,)](numbers(1)),
        r"program \(1, 0, 0\).* stores X\[0\].*, which another program has loaded",
    ),
    "a read of what it has written": (
        lambda: reread_kernel[(1,)](numbers(16), 8, 8),
        r"loads X\[0\].*, which the same program has stored",
    ),
    "scratch memory without a barrier": (
        lambda: reread(barrier=False),
        r"loads scratch.sums\[0\].*, which it has stored behind the last barrier",
    ),
    "scratch memory that is not stored": (
        lambda: reread(rows=1),
        r"loads scratch.sums\[8\].*, which nobody has stored",
    ),
    "scratch memory of another program": (
        lambda: reread(rows=3),
        r"program \(1, 0, 0\).* stores scratch.sums\[16\].*, which another program uses",
    ),
    "views of several dtypes": (
        lambda: (lambda x: copy(x[:20].view(torch.int16)[:20], x[4:24]))(numbers(24).int()),
        r"loads X\[8\].*, which program \(0, 0, 0\) has stored",
    ),
    "an addition": (lambda: update_kernel[(1,)](numbers(4), "an addition"), "has an atomic"),
    "an exchange": (lambda: update_kernel[(1,)](numbers(4).int(), "an exchange"), "has an atomic"),
    "words past the end": (
        lambda: words_kernel[(1,)](numbers(6).byte(), numbers(1).int(), 1),
        r"loads X\[6\].*, 1 past its last element",
    ),
    "a descriptor of more rows": (lambda: described(21, 20), r"loads X\[20, 0\]"),
    "a descriptor made on the host": (lambda: described(20, 21), r"stores target\[20, 0\]"),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_memory_check_allows(name):
    ALLOWED[name]()


@pytest.mark.parametrize("name", FAULTY)
def test_memory_check_finds(name):
    run, words = FAULTY[name]
    with pytest.raises(memory_check.AccessError, match=words):
        run()


def test_memory_check_of_loads_that_are_no_longer_kept(monkeypatch):
    monkeypatch.setattr(memory_check, "MOST_PENDING", 4)
    test_memory_check_finds("a write of what another program has read")
    for name in ALLOWED:
        test_memory_check_allows(name)


# ------------------------------------------------------------------------------------- all kernels


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def differentiated(function, *tensors):
    leaves = [x.requires_grad_() for x in tensors]
    output = function(*leaves)
    torch.autograd.grad(output.sum(), leaves)


def norm(n):
    x = drawn(7, n), drawn(n), drawn(n)
    differentiated(lambda x, w, b: ff.layer_norm(x, (n,), w, b), *x)


def loss(of=1.0, **options):
    target = torch.arange(5)
    differentiated(lambda x: of * ff.cross_entropy(x, target, **options), drawn(5, 11))


def embed():
    tokens = torch.tensor([[0, 4, 2, 1, 3, 2, 4]])
    differentiated(lambda w, p: ff.embed(tokens, w, p), drawn(5, 20), drawn(7, 20))


def rotate():
    table = ff.rotary_frequencies(4, 5)
    x = drawn(1, 3, 5, 7), drawn(1, 1, 5, 7), drawn(7), drawn(7)

    def rotated(q, k, q_norm, k_norm):
        both = ff.rotary_embedding(q, k, *table, query_norm=q_norm, key_norm=k_norm)
        return torch.cat(both, 1)

    differentiated(rotated, *x)


def feed():
    x = drawn(20, 20), drawn(40, 20), drawn(40), drawn(20, 40), drawn(20)
    differentiated(lambda *x: ff.feed_forward(*x, activation="gelu"), *x)


def attend(sq=20, sk=24, b=1, g=1, d=16, dtype=torch.float32, bias=None, **options):
    x = [drawn(b, 2, sq, d), drawn(b, g, sk, d), drawn(b, g, sk, d)]
    x = [t.to(dtype) for t in (x if bias is None else [*x, bias])]

    def attended(q, k, v, bias=None):
        call = ff.scaled_dot_product_attention
        return call(q, k, v, bias=bias, enable_gqa=True, **options)

    differentiated(attended, *x)


def packed():
    ends = torch.tensor([0, 18, 40]).int()
    options = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_q=22, max_k=22)
    x = drawn(40, 2, 16), drawn(40, 1, 16), drawn(40, 1, 16)
    differentiated(lambda q, k, v: ff.packed_attention(q, k, v, **options), *x)


def decode():
    x = drawn(1, 2, 1, 16), drawn(1, 1, 300, 16), drawn(1, 1, 300, 16)
    ff.scaled_dot_product_attention(*x, enable_gqa=True)


CALLS = {
    "norm": lambda: norm(13),
    "wide norm": lambda: norm(20),
    "loss": lambda: loss(label_smoothing=0.1),
    "loss of rows": lambda: loss(2.0, reduction="none"),
    "embed": embed,
    "rotate": rotate,
    "feed": feed,
    "gate": lambda: differentiated(ff.gated_activation, drawn(20, 40), drawn(20, 40)),
    "attend": attend,
    "mask": lambda: attend(attn_mask=torch.ones(1, 1, 20, 24) > 0),
    "mask of keys": lambda: attend(sk=25, attn_mask=torch.ones(1, 1, 1, 25) > 0),
    "blocks": lambda: attend(140, 150, attn_mask=ff.block_mask(drawn(1, 2, 140, 150) > 0)),
    "bias": lambda: attend(bias=drawn(1, 2, 20, 24)),
    "bias of keys": lambda: attend(bias=drawn(1, 2, 1, 24)),
    "packed": packed,
    "decode": decode,
}


@pytest.fixture
def of_several_programs(small_tiles, monkeypatch):
    """Calls that take several programs, with the bounds of their masks."""
    monkeypatch.setattr(plan, "bounds_pay", lambda *_: True)
    with use_backend("triton"), small_tiles():
        yield


@pytest.mark.all_cases
@pytest.mark.parametrize("call", CALLS)
def test_memory_check_of_calls(of_several_programs, call):
    CALLS[call]()


ON_HOPPER = {
    "plain": {},
    "mask of keys": dict(attn_mask=(torch.arange(72) != 63).expand(2, 1, 1, 72)),
    "bias": dict(bias=drawn(2, 2, 130, 72)),
    "bias of keys": dict(bias=drawn(2, 2, 1, 72)),
}


@pytest.mark.all_cases
@pytest.mark.parametrize("call", ON_HOPPER)
def test_calls_of_gluon_kernels(call):
    """The forward, then the backward with dQ, dK and dV."""
    pytest.importorskip("triton.experimental.gluon")
    from hopper_calls import simulated, simulated_backward

    for simulator in (simulated, simulated_backward):
        with simulator() as launched:
            attend(130, 72, 2, 2, 64, torch.float16, **ON_HOPPER[call])
        assert launched
