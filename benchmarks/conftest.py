"""What every benchmark shares: sizes, how a call is measured, and the closing table.

    pytest --benchmark-only                            all of it; on a CPU lengths to 1024
    pytest --benchmark-only --slow                     larger sizes on a CPU, slow peers on a GPU
    pytest --benchmark-only -k "attention and padding" some of it
    pytest --benchmark-only --benchmark-json=out.json  the figures with all that describes them
    pytest benchmarks --benchmark-disable              calls everything once and times nothing

Groups compare providers of the same work: `reference` and `triton` are this package's backends
(`auto` is what it picks by itself), every other provider is a peer: `torch` is torch's own op, on a
GPU the one that it picks by itself. The time is the median over rounds; on a GPU the table shows
the time on the device. Data are random, never constant: a GPU runs faster on zeros.
"""

import functools
import math
import os
import statistics
import subprocess
import time
from pathlib import Path

import pytest
import torch

from fastformer.environment import describe

HERE = Path(__file__).parent
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
LENGTHS = [2**n for n in range(7, 15)] if HAS_GPU else [128, 256, 512, 1024]
SLOW_LENGTHS = [] if HAS_GPU else [2048, 4096]
THREADS = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)  # the tests take one
OURS = ("auto", "reference", "triton", "packed")
TOKENS = 16384 if HAS_GPU else 1024  # in a batch, whatever the length: the batch size follows

SECONDS, SHORTEST = 0.2, 1e-3  # for a measurement, and of one of its rounds
ROUNDS, ROUNDS_IN_TURN, MOST_ROUNDS = 5, 11, 100  # at least; at least beside a peer; at most
L2_BYTES = 256 << 20  # more than any GPU's second-level cache

NOTES = [
    "x torch, x best: the time of torch's own op, and of the best peer, over this one's",
    "x torch of auto: the median over pairs of rounds, run in turn",
    "of roof: max(FLOPs / P, bytes / BW) over the time, with P and BW as measured in this run",
]
if HAS_GPU:
    NOTES += ["left out: flex_attention, which compiles for each shape, without --slow"]
else:
    NOTES += [
        "left out: triton, whose interpreted speed means nothing (auto is reference on a CPU)",
        "left out: d_model = 1024, lengths above 1024, and above 256 of attention with a bias or a "
        "window, all layers of BERT and GPT-2, without --slow; lengths above 4096 without a GPU",
    ]


# ----------------------------------------------------------------------------------------- pytest


def pytest_collect_file(file_path, parent):
    if file_path.match("bench_*.py") and not parent.session.isinitpath(file_path):
        return pytest.Module.from_parent(parent, path=file_path)
    return None


def pytest_generate_tests(metafunc):
    slow = metafunc.config.getoption("slow")
    marks = metafunc.definition.iter_markers("parametrize")
    if "length" in metafunc.fixturenames and not any("length" in mark.args[0] for mark in marks):
        metafunc.parametrize("length", LENGTHS + SLOW_LENGTHS * slow)


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.benchmark(timer=_clock))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A peer that does not fit the memory or refuses the call is skipped with its reason."""
    try:
        return (yield)
    except torch.OutOfMemoryError as error:
        reason = str(error)
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        reason = str(error)
    pytest.skip(reason.splitlines()[0])


# --------------------------------------------------------------------------------------- fixtures


@pytest.fixture(autouse=True)
def poisoned_empty():
    """In place of the tests' own: no memory is filled and no algorithm ruled out while timing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    if HAS_GPU:
        torch.cuda.empty_cache()  # the graphs' private pools among it


@pytest.fixture
def dtype():
    return DTYPE


@pytest.fixture
def batch(length):
    """Sequences of `length` that make up the constant number of tokens."""
    return max(1, TOKENS // length)


@pytest.fixture(params=["forward", "forward+backward"])
def mode(request):
    return request.param


@pytest.fixture
def differentiated(mode):
    """(function, inputs) -> what is timed: the function without gradients, or with those of all its
    outputs.
    """

    def make(function, inputs):
        if mode == "forward":
            return torch.no_grad()(function)
        with torch.no_grad():
            outputs = function()
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        grads = [torch.randn_like(x) for x in outputs]
        return lambda: torch.autograd.grad(function(), inputs, grads)

    return make


@pytest.fixture
def measure(benchmark, device):
    """Times a call and records the figures in `extra_info`.

    Args:
        call: the work, without arguments.
        group: what the providers of the same work share.
        provider: who does it; backend: what that turned out to run on, where it chooses.
        flops, nbytes: of one call; the formula stands in the benchmark. 0 leaves the figure out.
        dtype: of the call; the roof is measured in it.
        against: the peer's call, run before each round: the ratio of such pairs does not see that a
            machine's speed changes from minute to minute.
        shape: the sizes, as they shall be recorded.
    """

    def run(
        call, *, group, provider, dtype, backend=None, flops=0, nbytes=0, against=None, **shape
    ):
        benchmark.group = group
        info = benchmark.extra_info
        info.update(_facts(device), provider=provider, backend=backend or provider)
        info.update(dtype=str(dtype).removeprefix("torch."), **shape)
        if benchmark.disabled:
            benchmark(call)
            return
        info["peak_mib"] = _peak_bytes(call, device) / 2**20
        if against is not None:
            against()
        peer_times = []

        def before():
            if against is not None:
                peer_times.append(_seconds(against))

        estimate = _seconds(call)
        loops = 1 if against is not None else math.ceil(SHORTEST / estimate)
        least = ROUNDS if against is None else ROUNDS_IN_TURN
        rounds = min(max(int(SECONDS / (estimate * loops)), least), MOST_ROUNDS)
        setup = None if against is None else before
        benchmark.pedantic(call, setup=setup, rounds=rounds, iterations=loops)

        seconds = benchmark.stats.stats.median
        if device.type == "cuda":
            info["host_ms"] = seconds * 1e3
            seconds, info["device_timer"] = _device_seconds(call)
        info["ms"] = seconds * 1e3
        if peer_times:
            own_times = benchmark.stats.stats.data
            ratios = [peer / own for peer, own in zip(peer_times, own_times)]
            info["x_torch_in_turn"] = statistics.median(ratios)
        if flops:
            info["tflops"] = flops / seconds / 1e12
        if nbytes:
            info["gb_per_s"] = nbytes / seconds / 1e9
        if flops or nbytes:
            peak, bandwidth = _roof(device, dtype)
            info["of_roof"] = max(flops / peak, nbytes / bandwidth) / seconds
            info["roof_tflops"], info["roof_gb_per_s"] = peak / 1e12, bandwidth / 1e9

    return run


# -------------------------------------------------------------------------------------- measuring


def _clock():
    """Seconds, once the device has finished all that it was given."""
    if HAS_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def _seconds(call):
    started = _clock()
    call()
    return _clock() - started


def _device_seconds(call, repeats=30):
    """(median time on the device, how it was taken): of a CUDA graph's replays, which hold no host
    time, each after the L2 cache was overwritten. What cannot be captured is called as it is.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    replay, timer = call, "events around calls"
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
        replay, timer = graph.replay, "CUDA graph"
    except RuntimeError:
        torch.cuda.synchronize()

    flush = torch.empty(L2_BYTES, dtype=torch.int8, device="cuda")
    pairs = []
    for _ in range(repeats):
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        flush.zero_()  # while it runs, the host hands over the rest
        pair[0].record()
        replay()
        pair[1].record()
        pairs.append(pair)
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairs) / 1e3, timer


def _peak_bytes(call, device):
    """What a call holds at most beyond what was there before it: of torch's allocator alone."""
    if device.type == "cuda":
        call()  # what the first call alone takes, as workspaces, is not counted
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        call()
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()  # negative where memory is given back
        peak = max(peak, held)
    return peak


@functools.cache
def _roof(device, dtype):
    """(FLOP/s of a large matrix product, bytes/s of a copy, read and written), the best of some."""
    n, elements = (8192, 1 << 29) if device.type == "cuda" else (1024, 1 << 24)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    source = torch.randn(elements, device=device, dtype=dtype)
    target = torch.empty_like(source)

    def best(call):
        call()
        if device.type == "cuda":
            return _device_seconds(call)[0]
        return min(_seconds(call) for _ in range(7))

    product, copy = best(lambda: torch.mm(a, b)), best(lambda: target.copy_(source))
    return 2 * n**3 / product, 2 * source.nbytes / copy


@functools.cache
def _facts(device):
    """What a reader needs to know about the figures, the same for all of a run."""
    facts = describe(device)
    facts["commit"] = _output("git", "-C", str(HERE), "describe", "--always", "--dirty")
    if device.type == "cuda":
        query = "--query-gpu=clocks.sm,clocks.mem,power.limit"
        facts["clocks"] = _output("nvidia-smi", query, "--format=csv,noheader")
    return facts


def _output(*command):
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


# ----------------------------------------------------------------------------------- closing table


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    session = getattr(config, "_benchmarksession", None)
    groups = {}
    for result in session.benchmarks if session else []:
        if "ms" in result.extra_info:  # a measurement of these suites that came to its end
            groups.setdefault(result.group, []).append(result.extra_info)
    if not groups:
        return
    write = terminalreporter.write_line
    terminalreporter.section("fastformer beside its peers")
    header = ("ms", "TFLOP/s", "GB/s", "MiB", "x torch", "x best", "of roof")
    write(" " * 34 + "".join(f"{title:>10s}" for title in header))
    for group, rows in groups.items():
        write(group)
        for line in _lines(rows):
            write("    " + line)
    facts = rows[0]
    peak, bandwidth = _roof(DEVICE, DTYPE)
    write("")
    write(
        f"{facts['gpu'] or facts['platform']}, {facts['threads']} CPU threads, "
        f"torch {facts['torch']}, triton {facts['triton']}, commit {facts['commit']}"
    )
    write(f"roof in {DTYPE}: P = {peak / 1e12:.3f} TFLOP/s, BW = {bandwidth / 1e9:.1f} GB/s")
    for note in NOTES:
        write(note)


def _lines(rows):
    """One for each provider of a group; a ratio above 1 says how many times faster it is."""
    times = {row["provider"]: row["ms"] for row in rows}
    peers = [ms for name, ms in times.items() if name not in OURS]
    for row in rows:
        name, ms = row["provider"], row["ms"]
        if row["backend"] != name:
            name += f" ({row['backend']})"
        to_torch = times["torch"] / ms if "torch" in times else None
        cells = [
            ms,
            row.get("tflops"),
            row.get("gb_per_s"),
            row["peak_mib"],
            row.get("x_torch_in_turn", to_torch),
            min(peers) / ms if peers else None,
            row.get("of_roof"),
        ]
        yield f"{name:30s}" + "".join(f"{_cell(cell):>10s}" for cell in cells)


def _cell(value):
    if value is None:
        return "-"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
