"""What the benchmarks share: sizes, the measurement of a call, and the closing table.

    pytest --benchmark-only                            all of it; on a CPU lengths up to 512
    pytest --benchmark-only --slow                     larger sizes on a CPU, slow peers on a GPU
    pytest --benchmark-only --brief                    fewer rounds, as in the headline on a GPU
    pytest --benchmark-only -k "attention and padding" some of it
    pytest --benchmark-only --benchmark-json=out.json  the figures with all that describes them
    pytest benchmarks --benchmark-disable              calls everything once and times nothing

A group compares providers of the same work: `reference` and `triton` are this package's backends
(`auto` is its own choice), and every other provider is a peer (peers.py). `torch` is torch's own
op with its default backend, and comes first in its group. Others are measured in turn with it: on a
GPU all of them, on a CPU those of this package. The time is the median over rounds; on a GPU the
table shows the time on the device. The data are random, because a GPU runs faster on zeros.
`python -m benchmarks.report out.json --out FOLDER` makes tables and plots of the figures.
"""

import functools
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import peers, report
from benchmarks.gpu import journal
from benchmarks.peers import implementation
from benchmarks.report import CAPTURED
from fastformer.environment import describe

HERE = Path(__file__).parent
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
LENGTHS = [2**n for n in range(7, 15)] if HAS_GPU else [128, 256, 512]
SLOW_LENGTHS = [] if HAS_GPU else [1024, 2048, 4096]
THREADS = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)  # the tests take one
TOKENS = 16384 if HAS_GPU else 512  # in a batch, whatever the length: the batch size follows

SECONDS, SHORTEST = 0.2 if HAS_GPU else 0.05, 1e-3  # for a measurement, and of one of its rounds
ROUNDS, ROUNDS_IN_TURN = (5, 7) if HAS_GPU else (3, 5)  # at least; at least beside a peer
MOST_ROUNDS = 100
REPLAYS, LEAST_REPLAYS, REPLAY_SECONDS = 30, 5, 0.5  # on a GPU: at most, at least, in all
L2_BYTES = 256 << 20  # more than the L2 cache of any GPU

REFUSALS = "No available kernel", "cuDNN Frontend error"  # of a backend of SDPA
NOTES = list(report.LEGEND)
if HAS_GPU:
    NOTES += ["left out: flex_attention, which compiles for each shape, without --slow"]
else:
    NOTES += [
        "left out: d_model = 1024, lengths above 512, and above 256 of attention with a bias or a "
        "window, all layers of BERT and GPT-2, batches without padding, and more than 2 processes, "
        "without --slow; lengths above 4096 without a GPU",
    ]


# ----------------------------------------------------------------------------------------- pytest


def pytest_configure(config):
    global SECONDS, REPLAY_SECONDS
    if config.getoption("brief"):
        SECONDS, REPLAY_SECONDS = SECONDS / 4, REPLAY_SECONDS / 4


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
    """Skip a peer that runs out of memory or refuses the call, with the reason."""
    try:
        return (yield)
    except torch.OutOfMemoryError as error:
        reason = str(error)
    except RuntimeError as error:
        if not any(words in str(error) for words in REFUSALS):
            raise
        reason = str(error)
    pytest.skip(reason.splitlines()[0])


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(output_json):
    output_json["absent"] = peers.ABSENT


# --------------------------------------------------------------------------------------- fixtures


@pytest.fixture(autouse=True)
def poisoned_empty():
    """Override the fixture of the tests: nothing fills memory, and no algorithm is forbidden."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    if "torch._dynamo" in sys.modules:  # it compiles at most 8 shapes of a function
        torch._dynamo.reset()
    if HAS_GPU and not _lost:
        torch.cuda.empty_cache()  # includes the private pools of the graphs


@pytest.fixture
def dtype():
    return DTYPE


@pytest.fixture
def batch(length):
    """The number of sequences of `length` that have TOKENS tokens together."""
    return max(1, TOKENS // length)


@pytest.fixture
def random(device, dtype):
    """random(*shape): normal numbers that require gradients. With `unit_sum` a sum over the last
    dimension has the variance 1.
    """

    def random(*shape, unit_sum=False):
        x = torch.randn(*shape, device=device, dtype=dtype)
        return (x / shape[-1] ** 0.5 if unit_sum else x).requires_grad_()

    return random


@pytest.fixture(params=["forward", "forward+backward"])
def mode(request):
    return request.param


@pytest.fixture
def differentiated(mode):
    """differentiated(function, inputs): the call to time, without gradients or with those of all
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
def compare(measure, differentiated, mode, provider):
    """compare(group, peers, ours, inputs, ...): measure the provider's function of the inputs: that
    of `peers`, or else `ours` on the backend of that name. It is differentiated by the inputs that
    require gradients.
    """

    def run(group, peers, ours, inputs, **figures):
        function = implementation(provider, peers, ours)
        leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        call = differentiated(lambda: function(*inputs), leaves)
        measure(call, group=f"{group} {mode}", **figures)

    return run


@pytest.fixture
def measure(benchmark, device, request):
    """Time a call and record the figures in `extra_info`.

    Args:
        call: the work, a function without arguments. In its place `samples` may hold the seconds
            that it took in another process.
        group: the name that the providers of the same work share; `torch`, if any, comes first.
        backend: the backend on which a provider ran that chooses one.
        uncaptured: why the call must not be captured in a CUDA graph, if it must not.
        flops, nbytes: those of one call, by the formula in the benchmark. 0 omits the figure.
        dtype: the dtype of the call and of the roofline.
        facts: the sizes to record. `batch` and `length` of the test are recorded as well, and its
            `provider` is the name of the provider.
    """

    def run(
        call=None, *, group, backend=None, flops=0, nbytes=0, dtype=DTYPE, samples=None,
        uncaptured=None, **facts,
    ):  # fmt: skip
        given = {**request.node.callspec.params, **request.node.funcargs, **facts}
        provider = given["provider"]
        shape = {name: given[name] for name in ("batch", "length") if name in given} | facts
        benchmark.group = group
        info = benchmark.extra_info
        info.update(_facts(device, torch.get_num_threads()))
        info["dtype"] = str(dtype).removeprefix("torch.")
        info.update({**shape, "provider": provider, "backend": backend or provider})
        if benchmark.disabled:
            benchmark(call or (lambda: None))
            return
        roofline = _roofline(device, dtype, torch.get_num_threads()) if flops or nbytes else None
        if samples is not None:
            samples = _replayed(benchmark, samples)
        else:
            against = _torch_of(group, provider, call)
            info["peak_mib"] = peak_bytes(call, device) / 2**20
            if device.type == "cuda":
                samples = _device_samples(benchmark, info, call, against, uncaptured)
            else:
                samples = _samples(benchmark, call, against if provider in report.OURS else None)
        own = [pair[0] for pair in samples]
        low, seconds, high = statistics.quantiles(own, n=4) if len(own) > 1 else own * 3
        info.update(ms=seconds * 1e3, ms_low=low * 1e3, ms_high=high * 1e3, rounds=len(own))
        if len(samples[0]) == 2:
            info["x_torch_in_turn"] = statistics.median(peer / own for own, peer in samples)
        if flops:
            info["tflops"] = flops / seconds / 1e12
        if nbytes:
            info["gb_per_s"] = nbytes / seconds / 1e9
        if roofline is not None:
            peak, bandwidth = roofline
            info["of_roof"] = max(flops / peak, nbytes / bandwidth) / seconds
            info["roof_tflops"], info["roof_gb_per_s"] = peak / 1e12, bandwidth / 1e9

    return run


# -------------------------------------------------------------------------------------- measuring

_torch = (None, None)  # group and call of the last provider `torch`


def _torch_of(group, provider, call):
    """Return torch's call of the same group, or None for torch itself and in a group without it.

    The ratio of rounds that are run in turn is not affected when the speed of a machine changes
    from minute to minute.
    """
    global _torch
    if provider == "torch":
        _torch = group, call
        return None
    if _torch[0] != group:
        _torch = None, None
    return _torch[1]


def peak_bytes(call, device):
    """Return the peak of torch's allocator during a call, above the memory held before it."""
    if device.type == "cuda":
        call()  # workspaces that only the first call allocates are not counted
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


_elsewhere = 0.0  # seconds


def _clock():
    """Return the time in seconds, after the device has finished its work."""
    if HAS_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() + _elsewhere


def _replayed(benchmark, samples):
    """Record the samples as rounds, by moving the clock."""
    remaining = iter(samples)

    def pass_by():
        global _elsewhere
        _elsewhere += next(remaining)

    benchmark.pedantic(pass_by, rounds=len(samples), iterations=1)
    return [(sample,) for sample in samples]


def _seconds(call):
    started = _clock()
    call()
    return _clock() - started


def _samples(benchmark, call, against):
    """Return the seconds of each round, as (call,) or (call, against)."""
    peer_times = []
    if against is not None:
        against()
    estimate = _seconds(call)
    loops = 1 if against is not None else math.ceil(SHORTEST / estimate)
    least = ROUNDS if against is None else ROUNDS_IN_TURN
    rounds = min(max(int(SECONDS / (estimate * loops)), least), MOST_ROUNDS)
    setup = None if against is None else lambda: peer_times.append(_seconds(against))
    benchmark.pedantic(call, setup=setup, rounds=rounds, iterations=loops)
    own = benchmark.stats.stats.data
    return list(zip(own, peer_times)) if peer_times else [(x,) for x in own]


def _device_samples(benchmark, info, call, against, uncaptured):
    """Return the same, measured on the device. `info` receives the time of the host: host_ms to
    hand over a call, and wall_ms until the device has finished it.
    """
    _samples(benchmark, call, None)
    info["wall_ms"] = benchmark.stats.stats.median * 1e3
    info["host_ms"] = statistics.median(_host_seconds(call) for _ in range(ROUNDS)) * 1e3
    calls = [call] if against is None else [call, against]
    samples, timers = _device_seconds(calls, uncaptured)
    info["device_timer"] = timers[0]
    return samples


def _host_seconds(call):
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _device_seconds(calls, uncaptured=None):
    """Return the seconds of each call on the device, by round, and how each was measured.

    The calls are run in turn, each after the L2 cache was overwritten. A call runs as the replay of
    a CUDA graph, which contains no time of the host, or unchanged if it cannot be captured. torch
    cannot be used again after a failed capture, so rounds without graphs come first: these are then
    the result, and the process ends with the test.
    """
    global _lost
    obstacles = [uncaptured or _obstacle(calls[0]), *map(_obstacle, calls[1:])]
    samples = _rounds(calls, LEAST_REPLAYS)
    replays, timers = [], []
    for call, obstacle in zip(calls, obstacles):
        if obstacle is None:
            try:
                call = _captured(call)
            except RuntimeError as error:
                _lost = f"the capture of a CUDA graph failed: {_first_line(error)}"
                return samples, [f"events around calls: {_lost}"] * len(calls)
        replays.append(call)
        timers.append(f"events around calls: {obstacle}" if obstacle else CAPTURED)
    estimate = sum(map(_seconds, replays))
    rounds = min(max(int(REPLAY_SECONDS / estimate), LEAST_REPLAYS), REPLAYS)
    return _rounds(replays, rounds), timers


_lost = None  # why this process cannot use the GPU any more


def pytest_runtest_logfinish(nodeid, location):
    if _lost:
        pytest.exit(_lost, journal.DEVICE_LOST)


def _rounds(calls, rounds):
    """Return the seconds of each call between two events, for each round."""
    flush = torch.empty(L2_BYTES, dtype=torch.int8, device="cuda")
    events = []
    for _ in range(rounds):
        events.append([])
        for call in calls:
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            flush.zero_()  # while it runs, the host hands over the rest
            pair[0].record()
            call()
            pair[1].record()
            events[-1].append(pair)
    torch.cuda.synchronize()
    return [tuple(a.elapsed_time(b) / 1e3 for a, b in pairs) for pairs in events]


def _obstacle(call):
    """Return why the call cannot be captured, or None. It is called once, on a stream of its own,
    and torch raises an error if it waits for the device.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(side):
            call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return _first_line(error)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.current_stream().wait_stream(side)
    return None


def _captured(call):
    """Return the replay of a CUDA graph of the call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _first_line(error):
    return str(error).partition("\n")[0]


@functools.cache
def _roofline(device, dtype, threads):
    """Measure the FLOP/s of a large matrix product and the bytes/s of a copy, read and written.

    The result is the median of rounds on a GPU, and the best round on a CPU, which other processes
    use as well.
    """
    n, elements = (8192, 1 << 29) if device.type == "cuda" else (1024, 1 << 24)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    source = torch.randn(elements, device=device, dtype=dtype)
    target = torch.empty_like(source)

    def best(call):
        call()
        if device.type == "cuda":
            return statistics.median(sample[0] for sample in _device_seconds([call])[0])
        return min(_seconds(call) for _ in range(7))

    product, copy = best(lambda: torch.mm(a, b)), best(lambda: target.copy_(source))
    return 2 * n**3 / product, 2 * source.nbytes / copy


@functools.cache
def _facts(device, threads):
    """Describe the machine and the versions; within a run only the threads differ."""
    facts = describe(device)
    facts["commit"] = _output("git", "-C", str(HERE), "describe", "--always", "--dirty")
    if device.type == "cuda":
        query = "--query-gpu=clocks.sm,clocks.mem,power.limit"
        facts["clocks"] = _output("nvidia-smi", query, "--format=csv,noheader")
        facts["architecture"] = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
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
    rows = [{"group": b.group, **b.extra_info} for b in session.benchmarks] if session else []
    # The rows of tests that measured something and finished.
    results = report.Results([row for row in rows if "ms" in row])
    if not results.rows:
        return
    results.absent = peers.ABSENT
    terminalreporter.section("fastformer beside its peers")
    for line in report.text(results) + NOTES:
        terminalreporter.write_line(line)
