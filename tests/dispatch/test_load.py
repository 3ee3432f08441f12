"""What many calls, threads, forks and a lack of memory do to a process."""

import ctypes
import gc
import os
import re
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from calls import (
    DRAWN,
    Draw,
    cross_entropy,
    drawn,
    dropout_add_layer_norm,
    embed,
    layer_norm,
    outputs_of,
    rms_norm,
    scaled_dot_product_attention,
)

import fastformer as ff
from fastformer import current_backend, plans, use_backend
from fastformer.dispatch import autograd, backends
from fastformer.ops import functional

HAS_GPU = torch.cuda.is_available()
MANY = 500
LEAK = 1 << 10  # bytes a call

# ------------------------------------------------------------------------- the cache of kernels

KEYS = """
import sys
import fastformer.kernels.attention.launchers, fastformer.kernels.layer_norm.launchers
from fastformer.kernels.launch import hash_callees_first
from triton.language import constexpr
from triton.runtime.jit import JITFunction

modules = [m for n, m in sorted(sys.modules.items()) if n.startswith("fastformer.kernels")]
found = {f"{x.module} {x.__name__}": x for m in modules for x in vars(m).values()
         if isinstance(x, JITFunction)}
for name in sorted(found, reverse=sys.argv[1] == "last first"):
    if found[name].hash is None:
        hash_callees_first(found[name])
for name in sorted(found):
    values = {}
    for (constant, _), (value, _) in found[name].used_global_vals.items():
        if isinstance(value, constexpr):
            values.setdefault(constant, set()).add(str(value))
    print(name, found[name].cache_key, *(x for x in values if len(values[x]) > 1))
"""


def test_keys_of_kernels_do_not_depend_on_the_order_of_calls(fresh):
    """A kernel that one process has compiled is found by another, whatever ran there before, and
    wherever its modules lie in memory: Triton sorts two constants of one name by their address.
    """
    pytest.importorskip("triton")
    first, last = (fresh(KEYS, x, TRITON_INTERPRET="0") for x in ("first first", "last first"))
    assert first == last and len(first.splitlines()) > 100
    assert [line for line in first.splitlines() if len(line.split()) > 3] == []


# -------------------------------------------------------------------------------------- many calls


def random_calls(device, count, ops=DRAWN, seed=0):
    """Yield calls of one op after the other, and their tensors with a gradient, from the seed."""
    for n in range(count):
        draw, case = Draw([seed, n], device, 40), ops[n % len(ops)]
        tensors, options, wanted = drawn(case, draw)
        if "dropout_seed" in options and draw.often():
            options["dropout_seed"] = torch.tensor([options["dropout_seed"]], device=device)
        yield case, tensors, options, [tensors[n].requires_grad_() for n in wanted]


def results(case, tensors, options, leaves):
    """Make a call and its backward: the outputs and the gradients."""
    outputs = outputs_of(case, tensors, options)
    moving = [x for x in outputs if x.requires_grad]
    incoming = [x.detach().nan_to_num(neginf=0.0) for x in moving]
    grads = torch.autograd.grad(moving, leaves, incoming) if leaves else ()
    return [x.detach() for x in (*outputs, *grads)]


def memory():
    """Bytes in use: anonymous memory of the process, or of the GPU's allocator."""
    gc.collect()
    if HAS_GPU:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    if sys.platform != "linux":
        pytest.skip("there is no /proc")
    ctypes.CDLL(None).malloc_trim(0)
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def caches():
    """Entries of all that a module keeps, but plans: containers, and what functools caches."""
    sizes = {}
    for module in [m for n, m in sys.modules.items() if n.split(".")[0] == "fastformer"]:
        for name, value in vars(module).items():
            if hasattr(value, "cache_info"):
                sizes[module.__name__, name] = value.cache_info().currsize
            elif isinstance(value, dict | list | set) and not isinstance(value, plans.Plans):
                sizes[module.__name__, name] = len(value)
    return sizes


def grown(device):
    """(bytes, Python objects) a call that five times `MANY` calls add to a process that has made
    the same calls twice. The caches are as large as before.

    Two passes fill what is kept by shape. oneDNN, for one, compiles a primitive for each of the
    last 1024 shapes, which is 0.2 MB for each on a CPU with bfloat16 instructions. A stretch that
    adds something is repeated, twice at most: a leak adds as much again.
    """

    def make(passes):
        for _ in range(passes):
            for call in random_calls(device, MANY):
                results(*call)

    make(2)
    for _ in range(3):
        entries, before, objects = caches(), memory(), len(gc.get_objects())
        make(5)
        gained = memory() - before, len(gc.get_objects()) - objects
        assert caches() == entries
        if gained[0] / (5 * MANY) < LEAK / 2:
            break
    return [n / (5 * MANY) for n in gained]


NOTHING = {  # calls without rows
    "attention": lambda x: ff.scaled_dot_product_attention(*[x.view(2, 1, 0, 8)] * 3),
    "layer_norm": lambda x: ff.layer_norm(x, 8),
    "feed_forward": lambda x: ff.feed_forward(x, *[torch.ones(8, 8), None] * 2, "gelu"),
    "geglu": lambda x: ff.geglu(x, torch.ones(16, 8), None, torch.ones(8, 8), None),
    "embed": lambda x: functional.embed(torch.zeros(0).long(), x.new_ones(3, 8) + x.sum(), None),
    "rotary_embedding": lambda x: ff.rotary_embedding(
        *[x.view(1, 1, 0, 8)] * 2, *[torch.zeros(0, 8)] * 2, query_norm=torch.ones(8)
    )[0],
    "cross_entropy": lambda x: ff.cross_entropy(x, torch.zeros(0).long(), reduction="sum"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_calls_without_rows_launch_nothing(case, work):
    def call():
        NOTHING[case](torch.zeros(0, 8, requires_grad=True)).sum().backward()

    with use_backend("triton"):
        assert work(call).launches == 0


@pytest.fixture
def idle(monkeypatch):
    """The interpreter computes nothing: a launch makes its shapes, its plan and its arguments."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if not HAS_GPU:
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda *args, **options: None)


@pytest.mark.with_all
def test_memory_of_many_calls(backend, device, idle, monkeypatch):
    """Neither memory nor what Python holds grows with the calls; plans, which may, are few."""
    monkeypatch.setattr(plans, "MOST_PLANS", 2)
    size, objects = grown(device)
    assert size < LEAK / 2 and objects < 1 / 20


@pytest.mark.skipif(HAS_GPU, reason="thousands of launches")
def test_many_plans(device, idle, monkeypatch):
    """They stop at a number, however many shapes there are, and take some 5 KB each: those of calls
    and those of launches.
    """
    monkeypatch.setattr(plans, "MOST_PLANS", plans.MOST_PLANS // 4)

    def call(queries, keys):
        q, k = (torch.empty(2, 2, n, 16, device=device) for n in (queries, keys))
        ff.scaled_dot_product_attention(q, k, k, is_causal=True)

    most, made = 0, set()
    with use_backend("triton"):
        call(100, 100)  # imports, and what torch keeps
        before = memory()
        for queries in range(1, 48):
            for keys in range(1, 49):
                call(queries, keys)
            most = max(most, len(plans.launches))
            made |= {hash(key) for key in plans.launches}
    assert len(made) > 2 * plans.MOST_PLANS > 0
    assert most <= plans.MOST_PLANS
    assert memory() - before < 2 * plans.MOST_PLANS * (8 << 10)


def test_reasons_of_many_calls_are_forgotten(monkeypatch):
    """Why calls did not take the kernels is told once each, and not remembered for ever."""

    def choose(op, arguments, backend):
        return backends.Choice(op, "reference", f"a row has {arguments['input'].numel()} features")

    monkeypatch.setattr(backends, "choose_backend", choose)
    backends._log_once.cache_clear()
    with use_backend("auto"):
        for n in range(1, 1000):
            ff.layer_norm(torch.empty(n, dtype=torch.double), n)  # float32 is not dispatched
    assert 0 < backends._log_once.cache_info().currsize <= 256


# ------------------------------------------------------------------------------ threads and streams

ROWS = [layer_norm, rms_norm, dropout_add_layer_norm, cross_entropy]
OWN = [scaled_dot_product_attention, embed, *ROWS]  # no library of torch has a part in them


def together(work, arguments):
    """The results of work(argument), each in a thread of its own, started at the same time."""
    barrier, former = threading.Barrier(len(arguments)), sys.getswitchinterval()

    def one(argument):
        barrier.wait()
        return work(argument)

    sys.setswitchinterval(1e-4)
    try:
        with ThreadPoolExecutor(len(arguments)) as pool:
            return list(pool.map(one, arguments))
    finally:
        sys.setswitchinterval(former)


def same(have, want):
    assert len(have) == len(want) > 0
    return all(torch.equal(x, y) for x, y in zip(have, want))


def test_threads(device):
    """Six threads on two backends: each has its own, and the results that it has alone."""
    ops = {"triton": OWN, "reference": ROWS} if HAS_GPU else {}

    def work(job):
        backend, seed = job
        ran, calls = set(), random_calls(device, 6, ops.get(backend, DRAWN[seed::3]), seed)
        with (
            use_backend(backend),
            backends.observe(on_choice=lambda choice: ran.add(choice.backend)),
        ):
            made = [x for call in calls for x in results(*call)]
        assert ran == {backend}
        return made

    jobs = [(backend, seed) for seed in range(3) for backend in ("triton", "reference")]
    before = current_backend()
    alone = [work(job) for job in jobs]
    for job, have, want in zip(jobs, together(work, jobs), alone):
        assert same(have, want), job
    assert current_backend() == before


def test_first_calls_of_many_threads(device, monkeypatch):
    """No thread sees the kernels of an op half imported."""
    pytest.importorskip("triton")
    monkeypatch.setattr(backends, "_kernels", {})
    monkeypatch.setattr(autograd, "_pairs", {})
    pair = autograd.pair
    monkeypatch.setattr(autograd, "pair", lambda *of: (time.sleep(0.2), pair(*of)))
    x = torch.randn(3, 8, device=device)

    def work(late):
        time.sleep(late)
        with use_backend("triton"):
            return ff.layer_norm(x, 8)

    results = together(work, [0, 0.1, 0.15])
    assert same(results[1:], results[:1] * 2)


@pytest.mark.skipif(HAS_GPU or not hasattr(os, "fork"), reason="of the interpreter's lock")
def test_a_fork_while_a_kernel_runs(fresh):
    """A data loader's worker, say: no thread of the child would give the lock back."""
    code = """
import os, signal, threading, time, torch, fastformer as ff
from fastformer.kernels import launch
x, begun = torch.ones(2, 8), threading.Event()
def work():
    with launch.on_device(x):
        begun.set()
        time.sleep(0.5)
threading.Thread(target=work).start()
begun.wait()
child = os.fork()
if not child:
    signal.alarm(300)
    with ff.use_backend("triton"):
        ff.layer_norm(x, 8)
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""
    assert fresh(code, TRITON_INTERPRET="1") == "0"


@pytest.mark.gpu
def test_streams(device):
    """Threads on streams of their own, that sleep until the calls are queued and what they read is
    free to be given away.
    """

    def work(seed):
        calls = random_calls(device, 20, OWN, seed)
        with use_backend("triton"):
            return [x for call in calls for x in results(*call)]

    def on_a_stream(seed):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(10**9)
            results = work(seed)
            busy = not torch.cuda.current_stream().query()
        return results, busy

    seeds = range(4)
    alone = [work(seed) for seed in seeds]  # which also compiles
    torch.cuda.synchronize()
    results = together(on_a_stream, seeds)
    torch.cuda.synchronize()
    assert any(busy for _, busy in results)
    for (have, _), want in zip(results, alone):
        assert same(have, want)


# --------------------------------------------------------------------------------- lack of memory

TOO_MANY = 2**48  # rows of some tensor, all in the place of one: more than an address can name


def step(device, batch=1, vocabulary=11):
    """Loss and gradients of a step through five ops. Attention makes [batch, 2, 5, 4] in the
    forward, and embed's backward [vocabulary, 8].
    """
    torch.manual_seed(1)
    row, weight, logits = (torch.randn(n, 8, device=device) for n in (1, 8, 11))
    leaves = [x.requires_grad_() for x in (row, weight, logits)]
    tokens = torch.arange(5, device=device).view(1, 5)
    x = ff.embed(tokens, ff.layer_norm(row, 8).expand(vocabulary, 8), None, 0.1)
    x = ff.feed_forward(ff.layer_norm(x, 8), weight, None, weight, None, "relu", 0.1)
    q = x.view(1, 5, 2, 4).transpose(1, 2).expand(batch, 2, 5, 4)
    x = ff.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    loss = ff.linear_cross_entropy(x.transpose(1, 2).reshape(5, 8), logits, tokens.view(5))
    loss.backward()
    return [loss.detach(), *(x.grad for x in leaves)]


def tensors():
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


@pytest.mark.parametrize("where", ["batch", "vocabulary"])
@pytest.mark.parametrize("name", ["reference", "triton", "auto"])
def test_out_of_memory_in_a_step(device, name, where):
    """The allocator's own error comes through, from the forward and from the backward. It leaves no
    tensor behind, and the next step computes what it did before, on the same backend.
    """
    with use_backend(name), warnings.catch_warnings():
        warnings.filterwarnings("error", message="Triton")
        want = step(device)
        x = torch.ones(2, 8, device=device)
        choice, state = ff.explain("layer_norm", x, 8), dict(vars(backends.state))
        with pytest.raises(RuntimeError) as native:
            torch.empty(TOO_MANY, 8, device=device)
        before = tensors()
        with pytest.raises(type(native.value), match=r"(?i)allocat") as raised:
            step(device, **{where: TOO_MANY})
        assert type(raised.value) is type(native.value)
        inside = "backward" if where == "vocabulary" else "scaled_dot_product_attention"
        assert any(inside in entry.name for entry in raised.traceback)
        del raised
        assert tensors() <= before  # another test's may be gone
        assert vars(backends.state) == state
        assert ff.explain("layer_norm", x, 8) == choice
        assert same(step(device), want)
