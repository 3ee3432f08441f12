"""A call that finds a plan does what it does without one: the same bits, layouts, gradients and
errors. What watches or changes calls sees it, and plans neither grow without bound nor hold
tensors.
"""

import contextlib
import gc
import json
import logging
import os
import random
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fastformer as ff
from benchmarks import ROOT
from benchmarks.gpu import stand_in
from fastformer import plans
from fastformer.dispatch import backends
from fastformer.dispatch.front import front_door
from fastformer.eager import may_read
from fastformer.ops import functional

SDPA, SUM = ff.scaled_dot_product_attention, ff.dropout_add_layer_norm


@pytest.fixture(autouse=True)
def no_plans():
    plans.forget()
    yield
    plans.forget()


@pytest.fixture
def launches(monkeypatch):
    """Each `Launch` is called with pointers of the dtypes and alignments of its first call alone:
    a driver relies on it, and the interpreter does not see it.
    """
    launch = pytest.importorskip("fastformer.kernels.launch").Launch
    former, seen = launch.__call__, weakref.WeakKeyDictionary()

    def checked(self, *pointers):
        found = [(x.dtype, x.data_ptr() & 15) for x in tree_leaves(pointers) if torch.is_tensor(x)]
        assert seen.setdefault(self, found) == found
        return former(self, *pointers)

    monkeypatch.setattr(launch, "__call__", checked)


@contextlib.contextmanager
def without_plans():
    """Within it there are no plans; those of before are there again afterwards."""
    tables = plans.front, plans.launches, plans.recent
    before = [dict(table) for table in tables]
    plans.forget()
    yield
    for table, known in zip(tables, before):
        table.clear()
        table.update(known)


# ------------------------------------------------------------------------------------ random calls

PROBABILITIES, SEEDS = (0.0, 0.5, 0, 1, 1.0, True), (3, None, torch.tensor([3]))
NUMBERS = torch.arange(8) % 5
OPS = {  # the tensors that may have another layout, by their shapes; the other arguments
    "layer_norm": (
        ff.layer_norm, dict(input=(4, 8), weight=(8,), bias=(8,)),
        dict(normalized_shape=(8, (8,), [8], torch.Size([8]), [8.0], True, (True,)),
             eps=(1e-5, 1, 1.0, True), unbiased=(False, True, 0)),
    ),
    "dropout_add_layer_norm": (
        SUM, dict(input=(4, 8), residual=(4, 8), weight=(8,), bias=(8,)),
        dict(dropout_p=PROBABILITIES, dropout_seed=SEEDS, eps=(1e-5, 1, 1.0)),
    ),
    "attention": (
        SDPA, dict(query=(1, 2, 8, 8), key=(1, 2, 8, 8), value=(1, 2, 8, 8)),
        dict(attn_mask=(None, NUMBERS < 3, (NUMBERS - 2).view(1, 1, 1, 8) > 0, NUMBERS / 7),
             key_lengths=(None, *(torch.tensor([n]) for n in (8, 3, 0, 9))),
             dropout_p=PROBABILITIES, dropout_seed=SEEDS, is_causal=(False, True, 0, 1),
             window=(None, (2, 1), [2, 1], (2.0, 1), [True, 1]), scale=(None, 1, 1.0, True)),
    ),
    "feed_forward": (
        ff.feed_forward,
        dict(input=(4, 8), w_1=(16, 8), b_1=(16,), w_2=(8, 16), b_2=(8,)),
        dict(activation=("relu", "gelu", "none"), dropout_p=PROBABILITIES, dropout_seed=SEEDS),
    ),
    "cross_entropy": (
        ff.cross_entropy, dict(logits=(8, 5)),
        dict(target=(NUMBERS, NUMBERS.int(), NUMBERS + 1, NUMBERS[:4]),
             reduction=("mean", "none", "sum", 1), ignore_index=(-100, 3, 3.0, True),
             label_smoothing=(0.0, 0, 1, 1.0, True, 0.1)),
    ),
    "embed": (
        functional.embed, dict(weight=(5, 8), positional=(8, 8)),
        dict(tokens=(NUMBERS, NUMBERS.int(), NUMBERS + 1), dropout_p=PROBABILITIES,
             dropout_seed=SEEDS, scale=(None, 1, 1.0, True)),
    ),
    "rotary_embedding": (
        ff.rotary_embedding,
        dict(query=(2, 2, 4, 8), key=(2, 1, 4, 8), cos=(4, 8), sin=(4, 8), query_norm=(8,)),
        dict(interleaved=(False, True, 0), eps=(1e-5, 1, 1.0, True)),
    ),
}  # fmt: skip
DTYPES = torch.float32, torch.bfloat16, torch.float16
LAYOUTS = "plain", "plain", "transposed", "sliced", "shifted"
STATES = dict(
    backend=("auto", "reference", "triton"),
    mode=(torch.enable_grad, torch.enable_grad, torch.no_grad),
    autocast=(None, None, torch.bfloat16, torch.float16),
    thread=(False, True),
    dtype=DTYPES,
    same=(None, None, "last", "all"),
    cotangent=(*LAYOUTS, "expanded"),
)


def laid_out(x, layout):
    """The same numbers in other memory."""
    if layout == "expanded":
        return x[:1].expand(x.shape) if x.dim() else x
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(-2, -1).contiguous().transpose(-2, -1)
    if layout == "sliced" and x.dim():
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    if layout == "shifted":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    return x


def plain(op, backend="auto"):
    """A call of an op in the usual state."""
    _, shapes, options = OPS[op]
    call = {name: choices[0] for name, choices in STATES.items()} | dict(op=op, backend=backend)
    call |= dict(layout=dict.fromkeys(shapes, "plain"), needs=frozenset(shapes) - {"cos", "sin"})
    return call | dict(options={name: choices[0] for name, choices in options.items()})


def drawn(draw, known):
    """A call of `known`, or a plain one, with one thing changed, or none."""
    op = draw.choice(list(OPS))
    _, shapes, options = OPS[op]
    if not known[op] or draw.random() < 0.1:
        return plain(op, draw.choice(STATES["backend"]))
    call = dict(draw.choice(known[op]))
    aspect = draw.choice([*STATES, *["layout", "needs", "options", "options", "nothing"] * 2])
    if aspect == "layout":
        call[aspect] = call[aspect] | {draw.choice(list(shapes)): draw.choice(LAYOUTS)}
    elif aspect == "needs":
        call[aspect] = call[aspect] ^ {draw.choice(list(shapes))}
    elif aspect == "options":
        name = draw.choice(list(options))
        call[aspect] = call[aspect] | {name: draw.choice(options[name])}
    elif aspect in STATES:
        call[aspect] = draw.choice(STATES[aspect])
    return call


def arguments(call, seed):
    """The arguments of a call, and those of them that require a gradient."""
    torch.manual_seed(seed)
    _, shapes, _ = OPS[call["op"]]
    given = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, dtype=call["dtype"])
        given[name] = laid_out(x, call["layout"][name])
    first = next(iter(given))
    for name, x in given.items():  # attention(x, x, x)
        same = call["same"] == "all" or (call["same"] == "last" and name == "value")
        if same and x.shape == given[first].shape:
            given[name] = given[first]
    wanted = [given[name].requires_grad_() for name in shapes if name in call["needs"]]
    return given | call["options"], list({id(x): x for x in wanted}.values())


def bits(x):
    if not torch.is_tensor(x):
        return x
    return (
        x.detach().reshape(-1).contiguous().view(torch.uint8).tolist(),
        (x.dtype, x.shape, x.stride(), x.requires_grad, type(x)),
    )


def result(call, given, wanted):
    """Outputs and gradients of a call, in bits, or its error."""
    outputs = ()
    torch.manual_seed(1)  # of dropout
    autocast = call["autocast"]
    with call["mode"](), torch.autocast("cpu", autocast, enabled=autocast is not None):
        try:
            with ff.use_backend(call["backend"]):
                outputs = OPS[call["op"]][0](**given)
        except Exception as error:
            return type(error), str(error)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    moving = [x for x in outputs if x.requires_grad]
    if not moving:
        return [*map(bits, outputs)]
    cotangents = [laid_out(torch.randn_like(x), call["cotangent"]) for x in moving]
    grads = torch.autograd.grad(moving, wanted, cotangents, allow_unused=True)
    return [*map(bits, outputs), *map(bits, grads)]


@pytest.mark.parametrize("draws", [150, pytest.param(2000, marks=pytest.mark.with_all)])
def test_random_calls(draws, launches):
    """In an order in which most differ in one thing from a call before: as without plans, and as
    by the long way, which an observer takes. The second of equal calls makes the guards of a plan,
    which later ones ask.
    """
    draw, known, hits = random.Random(draws), {op: [] for op in OPS}, 0
    with ThreadPoolExecutor(1) as pool:
        for seed in range(draws):
            call, before = drawn(draw, known), len(plans.front)
            given = call, *arguments(call, seed)
            found = pool.submit(result, *given).result() if call["thread"] else result(*given)
            again, observed = contextlib.nullcontext(), backends.observe(lambda choice: None)
            for other in (*[again, again] * (seed % 3 == 0), without_plans(), observed):
                with other:
                    assert found == result(call, *arguments(call, seed)), call
            if isinstance(found, list):
                known[call["op"]].append(call)
                hits += len(plans.front) == before
    assert hits > draws / 10 and len(plans.front) > draws / 10


def test_values_are_checked_anew():
    """Plans know no values: of a target, of lengths and of tokens."""
    x, logits = torch.randn(2, 2, 8, 8), torch.randn(8, 5)
    for op, given, name, right, wrong in (
        (ff.cross_entropy, (logits,), "target", NUMBERS, NUMBERS + 1),
        (SDPA, (x, x, x), "key_lengths", torch.tensor([8, 3]), torch.tensor([8, 9])),
        (functional.embed, (), "tokens", NUMBERS, NUMBERS - 1),
    ):
        more = dict(weight=logits, positional=None) if op is functional.embed else {}
        for backend in ("auto", "triton"):
            with ff.use_backend(backend):
                for _ in range(2):
                    op(*given, **{name: right}, **more)
                    with pytest.raises(ValueError):
                        op(*given, **{name: wrong}, **more)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_equal_options(backend):
    """Of another type they are wrong, and a number may be that of a tensor, which may change."""
    x = torch.randn(2, 2, 8, 8)
    with ff.use_backend(backend):
        for options in (dict(window=(1, 1)), dict(window=[1, 1]), dict(scale=1), dict(scale=1.0)):
            SDPA(x, x, x, **options)
        for options in (dict(window=(1, 1.0)), dict(window=[True, 1]), dict(scale=True)):
            with pytest.raises(TypeError):
                SDPA(x, x, x, **options)
        for eps in (1.0, 2.0, 1.0):
            found = ff.layer_norm(x, 8, eps=torch.tensor(eps))
            assert torch.equal(found, ff.layer_norm(x, 8, eps=eps))


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_a_list_that_has_changed(backend):
    """It is the same object as in the calls before, with other numbers."""
    x, shape = torch.randn(4, 8), [8]
    with ff.use_backend(backend):
        for _ in range(3):
            ff.layer_norm(x, shape)
        shape.insert(0, 4)
        assert torch.equal(ff.layer_norm(x, shape), ff.layer_norm(x, (4, 8)))


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_names_tell_calls_apart(backend):
    """The same tensors for other parameters, and fewer or more of them."""
    x, w = torch.randn(4, 8), torch.randn(8)
    with ff.use_backend(backend):
        for given in ((x, 8), (x, 8, w), (x, 8, w, w), (x[:3], 8, w, w)) * 3:
            found = ff.layer_norm(*given)
            with backends.observe(lambda choice: None):
                assert torch.equal(found, ff.layer_norm(*given))
        for name in ("weight", "bias") * 2:
            found = ff.layer_norm(x, 8, **{name: w})
            with without_plans():
                assert torch.equal(found, ff.layer_norm(x, 8, **{name: w}))


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_outputs_require_a_gradient_in_the_grad_mode_alone(backend):
    x = torch.randn(4, 8)
    with ff.use_backend(backend):
        for grad, needed in ((False, True), (True, False), (True, True)) * 2:
            with torch.set_grad_enabled(grad):
                assert ff.layer_norm(x.requires_grad_(needed), 8).requires_grad == (grad and needed)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_one_tensor_and_several_share_a_plan(backend):
    """attention(x, x, x) and attention(q, k, v)."""
    given = torch.randn(3, 1, 2, 8, 8).unbind()
    with ff.use_backend(backend):
        SDPA(*given[:1] * 3)
        assert made_by(lambda: SDPA(*given)) == 0 and len(plans.front) == 1
        found = SDPA(*given)
        with without_plans():
            assert torch.equal(found, SDPA(*given))


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_each_call_draws_a_seed(backend):
    x = torch.randn(4, 8)
    with ff.use_backend(backend):
        torch.manual_seed(0)
        found = torch.stack([SUM(x, x, x[0], x[0], 0.5)[1] for _ in range(4)])
        assert len(found.unique(dim=0)) == 4
        torch.manual_seed(0)
        for y in found:
            with without_plans():
                assert torch.equal(SUM(x, x, x[0], x[0], 0.5)[1], y)


def normalized(x, eps=1.0):
    given = dict(normalized_shape=[8], weight=None, bias=None, eps=eps, unbiased=False)
    return backends.run("layer_norm", input=x, **given)


CONTRACTS = {
    "reads values": lambda x, y=None: normalized(x, float(x.max()) if may_read(x) else 1.0),
    "changes the result": lambda x, y=None: normalized(x) + 1,
    "changes a tensor": lambda x, y=None: normalized(x + 1),
    "leaves a tensor out": lambda x, y: normalized(x),
}


@pytest.mark.all_cases
@pytest.mark.parametrize("kind", list(CONTRACTS))
def test_what_leaves_no_plan(kind):
    call = front_door(CONTRACTS[kind])
    for x in torch.randn(3, 4, 8).unbind():
        given = (x, x * 2) if "out" in kind else (x,)
        assert torch.equal(call(*given), CONTRACTS[kind](*given)) and not plans.front


def test_what_a_mask_hides_may_be_nan():
    q, k, v = torch.randn(3, 2, 2, 20, 8)
    hidden = torch.arange(20) < 18
    for options in (dict(attn_mask=hidden), dict(key_lengths=torch.tensor([18, 18]))):
        want = SDPA(q, k, v, **options)  # leaves a plan
        k[:, :, -2:] = v[:, :, -2:] = torch.nan
        assert torch.isfinite(SDPA(q, k, v, **options)).all()
        k[:, :, -2:] = v[:, :, -2:] = 0.0
        assert torch.equal(SDPA(q, k, v, **options), want)


# ------------------------------------------------------------------------------------ what it costs

COUNT = """
import json, sys, tempfile
from pathlib import Path
import torch
import fastformer as ff
from benchmarks import ROOT
from benchmarks.gpu import stand_in

def own(call):
    seen = []
    def see(frame, event, _):
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        inside = {ROOT / "fastformer", ROOT / "kernels"} & {*path.parents}
        inside = inside or str(path).startswith("<fastformer.")  # made for a plan
        if event == "call" and inside and name not in ("<listcomp>", "<dictcomp>", "<setcomp>"):
            seen.append(name)
    sys.setprofile(see)
    call()
    sys.setprofile(None)
    return seen

found, mask = [], torch.ones(16, 16, dtype=torch.bool).tril()
with tempfile.TemporaryDirectory() as folder, ff.use_backend(sys.argv[1]):
    if sys.argv[1] == "triton":
        stand_in.install(Path(folder))
    for grad in (False, True):
        x = torch.randn(1, 2, 16, 16, dtype=torch.bfloat16).requires_grad_(grad)
        w = torch.randn(16, dtype=torch.bfloat16).requires_grad_(grad)
        for call in (
            lambda: ff.layer_norm(x, (16,), w, w),
            lambda: ff.scaled_dot_product_attention(x, x, x, mask, 0.1),
        ):
            call(), call()
            found.append(own(call))
            assert found[-1].count("hit") == 1, found
print(json.dumps(found))
"""


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_a_hit_makes_few_calls(fresh, backend):
    """At most 8 of functions of our own, with a gradient and without."""
    if backend == "triton" and stand_in.obstacle() is not None:
        pytest.skip(stand_in.obstacle())
    cache = os.environ.get("TRITON_CACHE_DIR", str(ROOT / ".cache" / "triton"))
    printed = fresh(COUNT, backend, TRITON_INTERPRET="0", TRITON_CACHE_DIR=cache)
    found = json.loads(printed.splitlines()[-1])
    assert len(found) == 4 and max(map(len, found)) <= 8, found


def call_of(n, grad=False):
    return ff.layer_norm(torch.ones(n, 2, requires_grad=grad), 2)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_tables_are_bounded(monkeypatch, backend):
    monkeypatch.setattr(plans, "MOST_PLANS", 8)
    with ff.use_backend(backend):
        for n in range(1, 30):
            for _ in range(2):
                call_of(n, grad=True).sum().backward()
            assert 0 < len(plans.front) <= 8 and len(plans.launches) <= 8
            assert [len(asked) for asked in plans.recent.values()] == [min(n, 4)]


@pytest.mark.with_all
def test_ten_thousand_shapes():
    most = 0
    for n in range(1, 10001):
        call_of(n)
        most = max(most, len(plans.front))
    assert plans.MOST_PLANS / 2 < most <= plans.MOST_PLANS


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("op", list(OPS))
def test_nothing_keeps_tensors_alive(op, backend):
    """Neither a first call nor a later one: their tensors go with the last name of them."""
    call, (_, shapes, _) = plain(op, backend), OPS[op]
    for _ in range(3):
        given, wanted = arguments(call, 0)
        refs = [weakref.ref(given[name]) for name in shapes]
        assert isinstance(result(call, given, wanted), list)
        del given, wanted
        assert all(ref() is None for ref in refs) or gc.collect() < 0


# ---------------------------------------------------------------------------------- special states

X, W = torch.randn(2, 2, 8, 8), torch.randn(8)
MASK = torch.ones(8, 8, dtype=torch.bool).tril()


def attend(x):
    return SDPA(x, x, x, MASK.to(x.device))


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


def by_mode(mode, call):
    with mode:
        call(X)
    return mode.seen


def by_flops(call):
    with FlopCounterMode(display=False) as mode:
        call(X)
    return mode.get_total_flops()


def by_profiler(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(X)
    return [event.name for event in profile.events() if "fastformer::" in event.name]


def by_dual_numbers(call):
    with forward_ad.dual_level():
        out = call(forward_ad.make_dual(X, torch.ones_like(X)))
        return bits(forward_ad.unpack_dual(out).tangent)


def by_autocast(call):
    with torch.autocast("cpu", torch.bfloat16):
        return bits(call(X))


def by_observer(call):
    seen = []
    with backends.observe(lambda choice: seen.append(choice), on_call=lambda *_: seen.append(_[0])):
        call(X)
    return seen


def by_log(call):
    seen, logger, before = (
        [],
        logging.getLogger("fastformer"),
        logging.getLogger("fastformer").level,
    )
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    backends._log_once.cache_clear()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with ff.use_backend("auto"):
            call(X)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return seen


WATCHERS = {
    "dispatch mode": lambda call: [op for op in by_mode(Ops(), call) if "fastformer" in op],
    "function mode": lambda call: by_mode(Functions(), call),
    "FLOPs": by_flops,
    "profiler": by_profiler,
    "func.grad": lambda call: bits(torch.func.grad(lambda x: call(x).square().sum())(X)),
    "vmap": lambda call: bits(torch.func.vmap(lambda x: call(x[None])[0])(X)),
    "dual numbers": by_dual_numbers,
    "jit.trace": lambda call: [
        line for line in str(torch.jit.trace(call, X, check_trace=False).graph).splitlines()
        if "fastformer::" in line
    ],
    "autocast": by_autocast,
    "observe": by_observer,
    "log": by_log,
    "explain": lambda call: ff.explain("scaled_dot_product_attention", X, X, X, MASK),
}  # fmt: skip


@pytest.mark.all_cases
@pytest.mark.parametrize("watcher", list(WATCHERS))
def test_what_watches_sees_calls_that_have_a_plan(watcher):
    pytest.importorskip("triton")
    watch = WATCHERS[watcher]
    with ff.use_backend("triton"):
        want = watch(attend)
        plans.forget()
        out = attend(X)
        with ff.use_backend("auto"):
            attend(X)
        assert plans.front and torch.equal(attend(X), out)
        assert watch(attend) == want and want
        assert torch.equal(attend(X), out)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_transforms_before_and_after_there_is_a_plan(backend):
    x = X.clone().requires_grad_()
    with ff.use_backend(backend):
        for _ in range(2):
            have = torch.func.grad(lambda x: attend(x).square().sum())(X)
            (want,) = grads(attend(x).square().sum(), [x])
            torch.testing.assert_close(have, want)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_tensors_that_a_transform_wraps(backend):
    """They have no memory: in place of an argument that was None, and as incoming gradients."""
    x, w, b = torch.randn(4, 8, requires_grad=True), torch.randn(8), torch.randn(2, 8)
    with ff.use_backend(backend):
        for _ in range(3):
            ff.layer_norm(x.detach(), (8,), w, None)
            y = ff.layer_norm(x, (8,), w, None)
        (found,) = [torch.func.grad(lambda b: ff.layer_norm(x, (8,), w, b).sum())(b[0])]
        assert torch.equal(found, torch.full((8,), 4.0))
        found = torch.func.vmap(lambda b: ff.layer_norm(x.detach(), (8,), w, b))(b)
        torch.testing.assert_close(found, y + b[:, None])
        many = torch.randn(2, 4, 8)
        (found,) = torch.autograd.grad(y, [x], many, retain_graph=True, is_grads_batched=True)
        for have, cotangent in zip(found, many):
            torch.testing.assert_close(have, *grads(y, [x], cotangent, retain_graph=True))


def test_batch_invariant_below_another_mode():
    """Where the mode of the context does not stand, as within an op that it sees."""
    with Ops():
        mode = torch.utils._python_dispatch._disable_current_modes
        with mode():
            for _ in range(3):
                ff.layer_norm(X, 8)
    with ff.batch_invariant(), mode(), pytest.raises(RuntimeError, match="batch_invariant"):
        ff.layer_norm(X, 8)


def test_the_memory_of_an_output_is_that_of_the_long_way():
    """Also where torch's own op would keep another order of the query."""
    for order in ((2, 0, 1, 3), (0, 1, 3, 2), (3, 0, 1, 2), (1, 0, 2, 3)):
        places = [order.index(i) for i in range(4)]
        q = torch.randn([(2, 3, 20, 8)[i] for i in order]).permute(places)
        for mask in (None, torch.ones(20, 20) > 0):
            found = SDPA(q, q, q, mask)
            with backends.observe(lambda choice: None):
                assert found.stride() == SDPA(q, q, q, mask).stride()


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_autocast_to_another_dtype(backend):
    """After calls within autocast to that of the tensors, which it leaves as they are."""
    q = X.half()
    with ff.use_backend(backend):
        for dtype in (torch.float16, torch.float16, torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype):
                assert SDPA(q, q, q).dtype is dtype
        assert SDPA(q, q, q).dtype is torch.float16


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_plans_run_outside_of_autocast(backend):
    """Their products of float32 are not to be cast: here those of the weight's gradient."""
    torch.manual_seed(0)
    x, w = (torch.randn(n, 16).half().requires_grad_() for n in (40, 50))
    target = torch.arange(40)

    def call():
        with torch.autocast("cpu", torch.float16):
            loss = ff.linear_cross_entropy(x, w, target)
        return grads(loss, (x, w))

    with ff.use_backend(backend):
        found = [call() for _ in range(3)]
        with backends.observe(lambda choice: None):
            want = call()
    assert plans.front and all(all(map(torch.equal, have, want)) for have in found)


CASTS = {
    "attention": lambda x, h, w: SDPA(x[:, None], x[:, None], h[:, None]),
    "bias": lambda x, h, w: SDPA(x[:, None], x[:, None], x[:, None], bias=h[:, None, :, :5]),
    "feed_forward": lambda x, h, w: ff.feed_forward(x, w, None, w.mT, None),
    "swiglu": lambda x, h, w: ff.swiglu(x, torch.cat([w, w]), None, w.mT, None),
    "sum and norm": lambda x, h, w: SUM(h, x, w[0], None)[0],
    "loss": lambda x, h, w: ff.linear_cross_entropy(x, w, torch.arange(10).view(2, 5)),
}


@pytest.mark.all_cases
@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("op", list(CASTS))
def test_plans_cast_as_autocast_does(op, backend):
    """Each call casts its own tensors: outputs and gradients have the bits of the long way."""
    torch.manual_seed(0)
    x, h, w = torch.randn(2, 5, 16), torch.randn(2, 5, 16).half(), torch.randn(12, 16)

    def call(factor):
        given = [(factor * t).requires_grad_() for t in (x, h, w)]
        with torch.autocast("cpu", torch.bfloat16):
            out = CASTS[op](*given)
        return out, *torch.autograd.grad(out.float().square().sum(), given, allow_unused=True)

    with ff.use_backend(backend):
        call(1), call(1)
        count = len(plans.front)
        found = [call(n) for n in (1, 2, 3)]
        assert len(plans.front) == count > 0
        with backends.observe(lambda choice: None):
            wanted = [call(n) for n in (1, 2, 3)]
    assert [[*map(bits, have)] for have in found] == [[*map(bits, want)] for want in wanted]


class Named(torch.Tensor):
    pass


def negated(x):
    """x with the bit that says that its numbers are to be negated."""
    made = torch._neg_view(-x)
    assert made.is_neg()
    return made


TENSORS = {
    "negative bit": negated,
    "zeros without memory": lambda x: torch._efficientzerotensor(x.shape),
    "Parameter": torch.nn.Parameter,
    "subclass": lambda x: x.as_subclass(Named),
    "meta": lambda x: x.to("meta"),
    "empty": lambda x: x[:0],
}


@pytest.mark.all_cases
@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("kind", list(TENSORS))
def test_unusual_tensors(kind, backend):
    """After a call of plain tensors of the same shape, as without plans; and the other way round,
    and with the unusual one in the second place.
    """
    backend = "auto" if kind == "meta" else backend
    calls = [lambda x: ff.layer_norm(x, 8), lambda x: SUM(torch.ones_like(x), x, W, W)[0], attend]
    if kind in ("meta", "subclass"):
        del calls[1]
    elif kind == "zeros without memory" and backend == "auto":
        del calls[2]  # torch's own op reads what is not there
    with ff.use_backend(backend):
        for call in calls:
            given = TENSORS[kind](X)
            plain = X[:0] if kind == "empty" else X * 0 if "zeros" in kind else X
            with without_plans():
                want = call(given)
            for _ in range(2):
                usual, found = call(plain), call(given)
                assert type(found) is type(want) and found.dtype is want.dtype
                assert found.shape == want.shape and found.stride() == want.stride()
                if kind != "meta":
                    assert torch.equal(found, want)
                    torch.testing.assert_close(found.as_subclass(torch.Tensor), usual)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_nested_tensors_are_refused_by_the_checks(backend, recwarn):
    """And not by torch's guards, which would end the process."""
    x, w = torch.randn(2, 4, 8), torch.randn(8)
    nested = torch.nested.nested_tensor([x[0], x[1]])
    with ff.use_backend(backend):
        for _ in range(3):
            ff.layer_norm(x, 8, w)
            SUM(x, x, w, w)
        for call in (lambda: ff.layer_norm(nested, 8, w), lambda: SUM(x, nested, w, w)):
            with pytest.raises(TypeError, match="nested"):
                call()


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_without_the_guards_of_torch(backend, monkeypatch):
    """They are not among the documented functions of torch: the table of plans does without."""
    monkeypatch.setattr(plans, "_Guards", None)
    x = torch.randn(4, 8, requires_grad=True)
    with ff.use_backend(backend):
        found = [grads(ff.layer_norm(x, 8).square().sum(), [x])[0] for _ in range(4)]
    assert all(torch.equal(found[0], y) for y in found) and len(plans.front) == 1


# ---------------------------------------------------------------------------------------- backward


def moved(x):
    """The same numbers, transposed in memory and aligned otherwise."""
    if not x.is_floating_point() or x.dim() < 2:
        return x.clone()
    return laid_out(laid_out(x, "shifted"), "transposed")


def grads(out, wanted, cotangent=None, **options):
    cotangent = torch.ones_like(out) if cotangent is None else cotangent
    return torch.autograd.grad(out, wanted, cotangent, **options)


def by_hooks(call, given):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, moved):
        return grads(call(*given), given)


def by_shifting_hooks(call, given):
    shift = lambda x: laid_out(x, "shifted")  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, shift):
        return grads(call(*given), given)


def by_retaining(call, given):
    out = call(*given)
    first = grads(out, given, retain_graph=True)
    return (*first, *grads(out, given))


def with_a_graph(call, given):
    first = grads(call(*given), given, create_graph=True)
    return (*first, *grads(first[0].square().sum(), given[:1]))


def of_a_sum(call, given):
    for x in given:
        x.grad = None
    call(*given).sum().backward()  # an expanded gradient
    return [x.grad.clone() for x in given]


def by_checkpoint(call, given):
    return of_a_sum(lambda *given: checkpoint(call, *given, use_reentrant=True), given)


BACKWARDS = {
    "hooks that move": by_hooks,
    "hooks that shift": by_shifting_hooks,
    "checkpoint": lambda call, given: grads(checkpoint(call, *given, use_reentrant=False), given),
    "reentrant checkpoint": by_checkpoint,
    "retain_graph": by_retaining,
    "create_graph": with_a_graph,
    "the first": lambda call, given: grads(call(*given), given[:1]),
    "the last": lambda call, given: grads(call(*given), given[-1:]),
    "a sum": of_a_sum,
    "another layout": lambda call, given: grads(
        call(*given), given, laid_out(torch.ones_like(given[0]), "transposed")),
    "another alignment": lambda call, given: grads(
        call(*given), given, laid_out(torch.ones_like(given[0]), "shifted")),
    "a negative bit": lambda call, given: grads(
        call(*given), given, negated(torch.ones_like(given[0]))),
}  # fmt: skip
SAME = {*BACKWARDS} - {"the last"}  # as plain gradients
DIFFERENTIATED = {
    "layer_norm": (lambda x, w, b: ff.layer_norm(x, 8, w, b), (X[0], W, W)),
    "attention": (
        lambda q, k, v: SDPA(q, k, v, MASK, 0.5, dropout_seed=3),
        (X[:1, :1], X[:1, 1:], X[1:, 1:]),
    ),
    "cross_entropy": (lambda x: ff.cross_entropy(x, NUMBERS) + 0 * x, (X[0, 0],)),
}


@pytest.mark.all_cases
@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("op", list(DIFFERENTIATED))
def test_backwards_after_each_other(op, backend, launches):
    """Each as it is without plans, whatever was differentiated before."""
    call, given = DIFFERENTIATED[op]
    given = [x.detach().clone().requires_grad_() for x in given]
    with ff.use_backend(backend):
        want = {}
        for name, backward in BACKWARDS.items():
            with without_plans():
                want[name] = [*map(bits, backward(call, given))]
        usual = grads(call(*given), given)
        for _ in range(2):
            for name, backward in BACKWARDS.items():
                found = backward(call, given)
                assert [*map(bits, found)] == want[name], name
                if name in SAME:
                    for x, y in zip(found, usual):
                        torch.testing.assert_close(x, y)


# ---------------------------------------------------------------------------------------- switches


def made_by(call):
    """How many keys of the front door a call makes."""
    before = {*plans.front}
    call()
    return len({*plans.front} - before)


def test_switches_make_plans_of_their_own():
    """Each once: tf32, which products of float32 follow, and the backend."""
    pytest.importorskip("triton")
    matmul, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    low = X.half()
    made = []
    with ff.use_backend("triton"):
        try:
            for matmul.fp32_precision in ("ieee", "tf32", "ieee", "tf32"):
                made.append((made_by(lambda: attend(X)), made_by(lambda: attend(low))))
        finally:
            matmul.fp32_precision = before
        mask_first = lambda: SDPA(attn_mask=MASK, query=X, key=X, value=X)  # noqa: E731
        assert made_by(mask_first) == 1
        mask_first(), mask_first()
        matmul.fp32_precision = "tf32"
        assert made_by(mask_first) == 1
        matmul.fp32_precision = before
    assert made == [(1, 1), (1, 0), (0, 0), (0, 0)]
    for backend, n in (("triton", 0), ("reference", 1), ("auto", 1), ("reference", 0)):
        with ff.use_backend(backend):
            assert made_by(lambda: attend(low)) == n


FORK = """
import os, torch, fastformer as ff
from fastformer import plans
x = torch.ones(4, 8, requires_grad=True)
with ff.use_backend("triton"):
    out = ff.layer_norm(x, 8)
    known = len(plans.front)
    child = os.fork()
    same = torch.equal(ff.layer_norm(x, 8), out) and len(plans.front) == known == 1
    ff.layer_norm(x, 8).sum().backward()
    if not child:
        os._exit(not same)
    print(same, os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_has_the_plans_of_its_parent(fresh):
    pytest.importorskip("triton")
    assert fresh(FORK, TRITON_INTERPRET="1").splitlines()[-1] == "True 0"
