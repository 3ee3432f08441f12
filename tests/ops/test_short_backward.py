"""The backward of short sequences in one kernel: its gradients against the oracle, that no bit
depends on the order of the programs, and which calls it takes.
"""

import contextlib
import itertools
import re

import pytest
import torch
import torch.nn.functional as F

import fastformer as ff
from fastformer import plans, use_backend
from fastformer.ops import functional

pytest.importorskip("triton")

from fastformer.kernels import launch, tuned
from fastformer.kernels.attention import plan, short_backward

KERNELS, ONE = ("tiny", "scratch"), "short_backward"
DROPOUT = dict(dropout_p=0.25, dropout_seed=5)


@pytest.fixture(autouse=True)
def memory_of_nan():
    """Let memory that nobody has written hold NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def by(kernel, narrow=True):
    """On the backend triton, compute the backward by a kernel, or by `separate kernels`, where it
    takes the call; by `scratch` with one tile of keys, too. narrow: tiles of 32 queries, and for
    `scratch` of 32 keys, so that the calls have several. Yield the list of the names of the kernels
    that are launched.
    """
    names, start, tiles = [], launch.Launch.__call__, short_backward.tiles
    forced = "scratch" if kernel == "one tile" else kernel

    def call(self, *pointers):
        names.append(self.kernel.fn.__name__.removesuffix("_kernel"))
        start(self, *pointers)

    def narrower(name, call):
        given = tiles(name, call)
        columns = 32 if name == "scratch" == kernel else 1024
        return given and given._replace(BM=min(32, given.BM), BN=min(columns, given.BN))

    with (
        use_backend("triton"),
        tuned.forced({plan.SHORT_KEY: forced}),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(launch.Launch, "__call__", call)
        if narrow and not torch.cuda.is_available():
            patch.setattr(short_backward, "tiles", narrower)
        yield names


def qkv(device, sq=70, sk=90, d=16, dv=None, h=2, g=None, b=2, dtype=torch.float32):
    """Scaled scores with a standard deviation of 3."""
    shapes = (h, sq, d), (g or h, sk, d), (g or h, sk, dv or d)
    q, k, v = (torch.randn(b, *shape, device=device) for shape in shapes)
    return {"query": (3 * q).to(dtype), "key": k.to(dtype), "value": v.to(dtype)}


def on(device, given):
    return {n: x.to(device) if torch.is_tensor(x) else x for n, x in given.items()}


def attend(**given):
    return functional.scaled_dot_product_attention(**given, enable_gqa=True)


def attend_and_lse(**given):
    out, lse = attend(**given, return_lse=True)
    lse = torch.where(lse == -torch.inf, 0.0, lse)  # of a row that sees no key
    return torch.cat([out, lse.unsqueeze(3).to(out.dtype)], 3)


def drawn(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def key_mask(*shape, seed=0):
    return (drawn(*shape, seed=seed) < 0.7).index_fill(-1, torch.tensor(0), True)


FULL = drawn(2, 2, 70, 90) < 0.5
FULL[1, :, 7] = False  # a query that sees no key
NO_KEYS = key_mask(2, 1, 1, 90)
NO_KEYS[1] = False  # a sequence that sees no key
LENGTHS = torch.tensor([0, 67])
BOTTOM_RIGHT = dict(is_causal=True, causal_alignment="bottom_right")
CALLS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "causal, more queries": dict(sk=40, is_causal=True),
    "bottom-right": BOTTOM_RIGHT,
    "bottom-right, queries without keys": dict(sq=90, sk=20, **BOTTOM_RIGHT),
    "a bound to the right": dict(window=(None, 20)),
    "lengths": dict(key_lengths=LENGTHS),
    "mask": dict(attn_mask=key_mask(2, 1, 1, 90)),
    "mask of heads, shared keys": dict(
        h=4, g=2, attn_mask=key_mask(2, 4, 1, 90), key_lengths=LENGTHS + 20
    ),
    "mask without keys, dropout": dict(attn_mask=NO_KEYS, **DROPOUT),
    "2-D mask, causal, lengths, dropout": dict(
        attn_mask=FULL, is_causal=True, key_lengths=LENGTHS + 20, **DROPOUT
    ),
    "dropout, causal": dict(is_causal=True, **DROPOUT),
    "shared keys, causal, dropout": dict(h=6, g=2, is_causal=True, **DROPOUT),
    "bias": dict(bias=drawn(2, 70, 90)),
    "bias of keys, mask": dict(
        bias=(4 * drawn(2, 1, 1, 90)).masked_fill(~NO_KEYS, -torch.inf), **DROPOUT
    ),
    "large bias, 2-D mask": dict(bias=1e9 * drawn(1, 90), attn_mask=FULL),
    "sinks": dict(sinks=torch.tensor([0.5, -torch.inf]), key_lengths=LENGTHS),
    "other dims, negative scale": dict(d=40, scale=-0.2),
    "128 wide, other dims of values": dict(d=128, dv=72, is_causal=True, **DROPOUT),
}


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "kernel, call",
    [
        (kernel, call)
        for kernel, call in itertools.product(KERNELS, CALLS)
        if kernel == "scratch" or not re.search("shared|2-D|bias|wide", call)
    ],
)
def test_gradients(device, against_oracle, kernel, call):
    """With the gradient of lse in every other call, and keys in one tile and in several."""
    options = on(device, CALLS[call])
    sizes = {n: options.pop(n) for n in ("sq", "sk", "d", "dv", "h", "g") if n in options}
    function = (attend, attend_and_lse)[list(CALLS).index(call) % 2]
    x = qkv(device, **sizes)
    with by(kernel) as names:
        against_oracle(lambda **given: function(**given, **options), x)
    assert names == ["forward", ONE] or x["query"].is_cuda  # float32


SIZES = [
    *itertools.product(("tiny", "scratch"), ((1, 1), (7, 7), (1, 64), (63, 65), (64, 100))),
    *itertools.product(("tiny", "scratch"), ((100, 63), (128, 128))),
    *itertools.product(("scratch",), ((65, 129), (200, 200), (129, 512), (512, 300))),
]
DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.float64


@pytest.mark.all_cases
@pytest.mark.parametrize("kernel, sizes", SIZES)
def test_odd_sizes(device, against_oracle, kernel, sizes):
    """In the dtypes by turns, views of one projection if the lengths are equal, by the tiles of the
    interpreter.
    """
    number = SIZES.index((kernel, sizes))
    dtype = DTYPES[number % (3 if torch.cuda.is_available() else 4)]
    sq, sk = sizes
    x = qkv(device, sq, sk, d=24 if number % 3 else 64, b=1, dtype=dtype)
    if sq == sk:  # [B, S, 3, H, D]
        x = dict(zip(x, torch.stack([*x.values()]).permute(1, 3, 0, 2, 4).contiguous()
                     .permute(2, 0, 3, 1, 4)))  # fmt: skip
    options = dict(is_causal=sq > 1, **DROPOUT) if number % 2 and sq > 1 else {}
    with by(kernel, narrow=False) as names:
        against_oracle(attend, x, small=max(sizes) < 64, **options)
    assert ONE in names or torch.cuda.is_available()


@pytest.mark.parametrize("causal", [False, True])
def test_packed(device, against_oracle, causal):
    """Shared keys, and sequences without queries, without keys, and of several tiles."""
    options = dict(BOTTOM_RIGHT if causal else {}, **DROPOUT, max_q=70, max_k=90)
    for name, lengths in (("q", (40, 0, 7, 70, 1)), ("k", (40, 3, 0, 90, 33))):
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        options[f"cu_seqlens_{name}"] = ends.to(device)
    x = qkv(device, 118, 166, h=4, g=2, b=1)
    x = {name: t.squeeze(0).transpose(0, 1) for name, t in x.items()}
    with by("scratch") as names:
        against_oracle(functional.packed_attention, x, **options)
    assert ONE in names or torch.cuda.is_available()


def gradients(x, kernel, function=attend_and_lse, wanted=("query", "key", "value"), **options):
    leaves = {name: t.detach().requires_grad_(name in wanted) for name, t in x.items()}
    with by(kernel) as names:
        out = function(**leaves, **options)
        grads = torch.autograd.grad(out.float().square().sum(), [leaves[n] for n in wanted])
    return dict(zip(wanted, grads)), names


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("hides", ["lengths", "mask"])
def test_hidden_keys_may_hold_nan(device, kernel, hides):
    options, hidden = dict(attn_mask=NO_KEYS), ~NO_KEYS[:, 0, 0]
    if hides == "lengths":
        options, hidden = dict(key_lengths=LENGTHS), torch.arange(90) >= LENGTHS[:, None]
    found = []
    for poison in (0.0, torch.nan, torch.inf):
        torch.manual_seed(1)
        x = qkv(device)
        for name in ("key", "value"):
            x[name][hidden[:, None].expand(-1, 2, -1).to(device)] = poison
        found.append(gradients(x, kernel, **on(device, options), **DROPOUT)[0])
    for name, grad in found[0].items():
        assert grad.any() and grad.isfinite().all()
        assert all(torch.equal(grad, other[name]) for other in found[1:])


# Of 20 queries and 40 keys. Queries past the end would see the last 20, whose scores are large.
LEFT = torch.arange(40) >= torch.tensor([20, 3]).view(2, 1, 1, 1)  # the first 20 are hidden
ROWS = (torch.arange(20) < 19)[:, None] & (drawn(20, 40, seed=4) < 0.7)  # but not the last query
PAST = {
    "mask, causal": dict(attn_mask=LEFT, is_causal=True),
    "mask, causal, dropout": dict(attn_mask=LEFT, is_causal=True, **DROPOUT),
    "mask, a bound to the right": dict(attn_mask=LEFT, window=(None, 0)),
    "causal": dict(is_causal=True),
    "lengths, causal": dict(key_lengths=torch.tensor([0, 30]), is_causal=True),
    "lengths, bottom-right": dict(key_lengths=torch.tensor([10, 20]), **BOTTOM_RIGHT),
    "2-D mask, causal": dict(attn_mask=ROWS, is_causal=True),
    "bias, causal": dict(bias=drawn(2, 20, 40, seed=5), is_causal=True),
    "bias, mask, causal": dict(bias=drawn(20, 40, seed=6), attn_mask=LEFT, is_causal=True),
    "bias of keys, causal": dict(bias=torch.zeros(LEFT.shape).masked_fill(~LEFT, -torch.inf))
    | dict(is_causal=True),
    "window, mask": dict(attn_mask=LEFT, window=(5, 0)),
    "ALiBi, mask, causal": dict(attn_mask=LEFT, alibi_slopes=torch.ones(2), is_causal=True),
    "block mask, causal": dict(attn_mask=ROWS.expand(1, 1, 20, 40), is_causal=True),
    "block mask, window": dict(attn_mask=LEFT.expand(2, 1, 20, 40), window=(5, 0)),
}
TAKE = {
    "tiny": "(mask|causal|lengths)",
    "scratch": "(mask|causal|lengths|2-D|bias, )",
    "one tile": "(mask|causal|lengths|2-D|bias, )",  # of keys, by `scratch`
    plan.SEPARATE: "",
    "Hopper": "",
}


@pytest.mark.parametrize(
    "kernel, call",
    [(kernel, call) for kernel in TAKE for call in PAST if re.match(TAKE[kernel], call)],
)
def test_queries_past_the_end_have_no_weights(device, against_oracle, kernel, call):
    """Whose tile the last query shares, that sees no key, or low scores alone. dK and dV were NaN:
    the weights 2^(s - lse) were infinite, times a gradient of zero. Memory behind all rows is NaN.
    """
    options = dict(PAST[call])
    if "block mask" in call:
        options["attn_mask"] = ff.block_mask(options["attn_mask"])
    hopper, keys = kernel == "Hopper", 64 if "block mask" in call else 128
    if hopper:
        hopper_calls = pytest.importorskip("hopper_calls")
    x = qkv("cpu", 20, 40, d=64 if hopper else 16, dtype=torch.half if hopper else torch.float32)
    x["key"][:, :, 20:] *= 100
    x = {n: F.pad(t, (0, 0, 0, 50), value=torch.nan)[:, :, : t.shape[2]] for n, t in x.items()}
    if "bias" in options:
        x["bias"] = options.pop("bias").to(x["query"].dtype)
    function = (attend, attend_and_lse)[list(PAST).index(call) % 2]
    with contextlib.ExitStack() as stack:
        if hopper:
            launched = stack.enter_context(hopper_calls.simulated_backward(keys=keys))
        else:
            launched = stack.enter_context(by(kernel))
        x, options = (on(device, tensors) for tensors in (x, options))
        against_oracle(lambda **given: function(**given, **options), x, small=True)
    one = kernel not in (plan.SEPARATE, "Hopper")
    assert launched and (hopper or (ONE in launched) == one or device.type == "cuda")


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_gradient_of_lse_where_no_key_is_seen(device, kernel):
    """Is not used: lse is -inf there, and what a caller makes of that may be NaN."""
    x = {name: t.requires_grad_() for name, t in qkv(device, sk=40).items()}
    with by(kernel):
        out, lse = attend(**x, return_lse=True, attn_mask=NO_KEYS[..., :40].to(device))
        given = torch.where(lse == -torch.inf, torch.nan, 1.0)
        grads = torch.autograd.grad((out, lse), list(x.values()), (torch.ones_like(out), given))
    assert given.isnan().any() and all(grad.isfinite().all() and grad.any() for grad in grads)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_gradients_that_are_asked_for(device, kernel):
    """All three come from one kernel, fewer from those that compute no more than these."""
    torch.manual_seed(2)
    x = qkv(device)
    full, names = gradients(x, kernel, is_causal=True, **DROPOUT)
    assert names == ["forward", ONE] or x["query"].is_cuda
    for count in (1, 2):
        for wanted in itertools.combinations(full, count):
            some, names = gradients(x, kernel, wanted=wanted, is_causal=True, **DROPOUT)
            assert ONE not in names
            for name, grad in some.items():
                torch.testing.assert_close(grad, full[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_run_gives_the_same_bits(device, kernel, monkeypatch):
    """Twenty times on a GPU; in whatever order the programs run, and of whatever number."""
    torch.manual_seed(3)
    x = qkv(device, sq=20, sk=40, h=4, g=4 if kernel == "tiny" else 2)
    options = dict(is_causal=True, key_lengths=torch.tensor([40, 30], device=device), **DROPOUT)
    first, _ = gradients(x, kernel, **options)
    for _ in range(20 if torch.cuda.is_available() else 1):
        again, _ = gradients(x, kernel, **options)
        assert all(torch.equal(first[name], grad) for name, grad in again.items())
    if torch.cuda.is_available():
        return
    from triton.runtime.interpreter import InterpreterBuilder

    start, ran = InterpreterBuilder.set_grid_idx, []
    for programs, order in ((1, (0,)), (3, (2, 0, 1)), (4, (3, 1, 2, 0))):

        def elsewhere(self, i, *rest, order=order):
            i = order[i] if self.grid_dim[0] == len(order) else i
            ran.append(i)
            start(self, i, *rest)

        monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", elsewhere)
        monkeypatch.setattr(short_backward, "processors", lambda device, n=programs: n)
        again, names = gradients(x, kernel, **options)
        assert names[-1] == ONE and ran[-programs:] == [*order]
        assert all(torch.equal(first[name], grad) for name, grad in again.items())


# --------------------------------------------------------------------------- what is launched, when


def launches(kernel, x, **options):
    """The kernels of the backward of a call."""
    wanted = [name for name in ("query", "key", "value", "bias") if name in x]
    names = gradients(x, kernel, attend, wanted, **options)[1]
    return names[names.index("forward") + 1 :]


def test_what_is_launched(device):
    """One kernel, without bounds; delta only where the gradient of a bias needs it."""
    if device.type == "cuda":
        pytest.skip("float32 is computed by separate kernels on a GPU")
    x, separate = qkv(device, sk=200), ["delta", "backward_dkdv", "backward_dq"]
    padded = dict(attn_mask=key_mask(2, 1, 1, 200))
    assert launches("scratch", x, **padded) == [ONE]
    bias = x | {"bias": drawn(2, 1, 70, 200)}
    assert launches("scratch", bias) == [ONE, "delta", "backward_dbias"]
    of_keys = x | {"bias": drawn(200)}
    refused = dict(softcap=3.0), dict(window=(30, 0)), dict(alibi_slopes=torch.rand(2))
    for given, options in ((of_keys, {}), *((x, options) for options in refused)):
        assert launches("scratch", given, **options) == separate
    long = qkv(device, sq=20, sk=513)
    assert launches("scratch", long) == separate


def test_explain_names_the_kernel(device):
    """And says why a call does not take it, where a GPU could have; of longer calls nothing."""
    from fastformer.kernels.attention import launchers

    from fastformer.description import Attention

    def explained(arch="sm_90", b=64, s=128, d=64, wanted=3, dtype=torch.float16, **options):
        shape = dict(dtype=dtype, device="meta")
        x = [torch.empty(b, 2, s, d, **shape).requires_grad_(n < wanted) for n in range(3)]
        given = dict(attn_mask=None, dropout_p=0.0, is_causal=False, scale=0.1) | options
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "architecture", lambda device: arch)
            patch.setattr(short_backward, "processors", lambda device: 128)
            plans.forget()
            return launchers.describe(*x, Attention(**given)) or ""

    one = "the backward is one kernel, "
    assert explained() == explained(s=100) == one + "tiny"
    assert explained(s=129) == explained(s=512) == explained(d=128) == one + "scratch"
    assert explained("sm_80") == explained("sm_86") == one + "scratch"
    refused = "not the backward in one kernel: "
    slower = refused + "separate kernels are expected or measured to be faster"
    assert explained("sm_80", s=129) == explained("sm_100") == slower
    assert slower in explained(s=512, b=16)
    assert explained(s=513) == explained(dtype=torch.float32, arch="sm_80") == ""
    assert explained(wanted=0) == ""
    assert refused + "it takes no call with a softcap" in explained(softcap=3.0)
    slopes = torch.empty(2, device="meta")
    assert refused + "it takes no call with ALiBi" in explained(alibi_slopes=slopes)
    assert "it computes the gradients of query, key and value, all three" in explained(wanted=1)


def test_every_feature_in_several_tiles(device, against_oracle):
    hidden = torch.arange(90) < torch.tensor([[67], [30]])
    for kernel, sizes, options in (
        ("tiny", dict(h=3), dict(attn_mask=NO_KEYS, is_causal=True, **DROPOUT)),
        ("scratch", dict(h=4, g=2), dict(key_lengths=LENGTHS, is_causal=True, **DROPOUT)),
        ("scratch", dict(dv=24), dict(bias=10 * drawn(70, 90), attn_mask=hidden[:, None, None])),
        ("scratch", dict(sq=90, sk=40), dict(is_causal=True)),
        ("scratch", dict(sq=90, sk=40), dict(**BOTTOM_RIGHT, key_lengths=LENGTHS // 2)),
    ):
        x, options = qkv(device, **sizes), dict(options)
        with by(kernel) as names:
            against_oracle(lambda x=x, options=options, **g: attend_and_lse(**g, **options), x)
        assert ONE in names
    test_packed(device, against_oracle, True)
    for kernel in KERNELS:
        test_hidden_keys_may_hold_nan(device, kernel, "mask")
        test_the_gradient_of_lse_where_no_key_is_seen(device, kernel)
