"""Chooses Triton's mode before anything imports triton, keeps benchmarks/ out of plain `pytest`,
and holds the shared fixtures.
"""

import itertools
import os
from collections import Counter, defaultdict
from pathlib import Path

# Read when NumPy is loaded. A second thread would take the core of the other test process, and sum
# in another order: the interpreter's products are NumPy's.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch

ROOT = Path(__file__).parent
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:  # read by `import triton` and by each @triton.jit
    os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)  # a second one spins while the interpreter computes in the first

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run what takes long")
    parser.addoption("--all", action="store_true", help="also run what is marked with_all")


def pytest_ignore_collect(collection_path, config):
    """`pytest` runs tests/, `pytest --benchmark-only` runs benchmarks/. A path given by hand is
    never ignored.

    (pytest asks only about what lies below the starting points, so `testpaths` must not list the
    two.)
    """
    only = config.getoption("benchmark_only", False)
    return True if collection_path == ROOT / ("tests" if only else "benchmarks") else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Skip what needs a GPU. Without --all, leave out the tests marked with_all, and without --slow
    those marked with_slow; a test that is named on the command line always runs.
    """
    sampled = defaultdict(list)
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if item.get_closest_marker("sample"):
            sampled[item.nodeid.partition("[")[0]].append(item)
    for group in sampled.values():
        _leave_out_combinations(group)
    if not any("::" in argument for argument in config.args):
        marks = [f"with_{name}" for name in ("all", "slow") if not config.getoption(name)]
        left_out = {item for item in items if any(map(item.get_closest_marker, marks))}
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]


def _leave_out_combinations(items):
    """Give the mark with_all to the items of a test that are not needed for each value of each
    parameter to occur, and with_slow to two thirds of them. The values that have occurred least
    come first.
    """
    values = {item: [(name, id(x)) for name, x in item.callspec.params.items()] for item in items}
    counts = Counter()
    while any(not counts[value] for item in items for value in values[item]):
        best = max(
            items,
            key=lambda item: (
                sum(not counts[value] for value in values[item]),
                -sum(counts[value] for value in values[item]),
            ),
        )
        counts.update(values.pop(best))
        items = [item for item in items if item is not best]
    for n, item in enumerate(items):
        item.add_marker(pytest.mark.with_all)
        if n % 3:
            item.add_marker(pytest.mark.with_slow)


# The processor time of each test, its child processes included, is part of its report, which
# pytest-xdist passes on.


def _processor_seconds():
    return sum(os.times()[:4])


def pytest_runtest_logstart():
    global _measured
    _measured = _processor_seconds()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    global _measured
    outcome = yield
    now = _processor_seconds()
    outcome.get_result().cpu_seconds, _measured = now - _measured, now


def pytest_terminal_summary(terminalreporter):
    """Print the ten slowest files."""
    files = Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if hasattr(report, "cpu_seconds"):
            files[report.nodeid.partition("::")[0]] += report.cpu_seconds
    if len(files) > 1:
        terminalreporter.section("slowest files")
        for name, seconds in files.most_common(10):
            terminalreporter.write_line(f"{seconds:7.1f} s of processor  {name}")
        terminalreporter.write_line(f"{files.total():7.1f} s of processor  all files")


@pytest.fixture(scope="session", autouse=True)
def repaired_interpreter():
    """Repair Triton's interpreter, and check every access of every kernel that runs in it."""
    if HAS_GPU:
        yield
        return
    from fastformer.kernels import interpreter, memory_check

    interpreter.repair()
    with memory_check.checked():
        yield


@pytest.fixture(autouse=True)
def poisoned_empty():
    """Uninitialised memory is NaN (ones for integers): an output that a kernel forgets to write is
    seen.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def device():
    return DEVICE


@pytest.fixture(params=["reference", "triton"])
def backend(request):
    """Runs the test under each backend; on a CPU `triton` is the interpreter."""
    from fastformer import use_backend

    with use_backend(request.param):
        yield request.param
