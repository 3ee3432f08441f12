"""Chooses Triton's mode before anything imports triton, selects the tests of a run, and holds the
shared fixtures.
"""

import gc
import itertools
import os
import sys
import zlib
from collections import Counter, defaultdict
from pathlib import Path

# Without one of these a GPU is hidden, from child processes as well: the tests run in the
# interpreter everywhere, because compiling every kernel that they launch would take an hour.
# Processes of pytest-xdist have the same arguments.
if not {"--gpu", "--benchmark-only"} & {*sys.argv}:
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""

# Read when NumPy is loaded. A second thread would take the core of the other test process, and sum
# in another order: the interpreter's products are NumPy's.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch

ROOT = Path(__file__).parent
KILLERS, ON_GPU = (
    {*(ROOT / "tests" / name).read_text().splitlines()} for name in ("killers.txt", "gpu.txt")
)
TOOLS = "tests/proof/", "tests/test_packaging.py", "tests/test_examples.py"
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:  # read by `import triton` and by each @triton.jit
    os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)  # a second one spins while the interpreter computes in the first

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run what takes long")
    parser.addoption("--all", action="store_true", help="also run what is marked with_all")
    parser.addoption("--brief", action="store_true", help="benchmarks with fewer rounds")
    parser.addoption("--gpu", action="store_true", help="run the tests of tests/gpu.txt on a GPU")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """`-n auto`: a process for each processor, where pytest-xdist with psutil counts cores."""
    return os.cpu_count()


def pytest_ignore_collect(collection_path, config):
    """`pytest` runs tests/ without the tools, `pytest --benchmark-only` runs benchmarks/. A path
    given by hand is never ignored.

    (pytest asks only about what lies below the starting points, so `testpaths` must not list the
    two.)
    """
    only = config.getoption("benchmark_only", False)
    path = collection_path.relative_to(ROOT).as_posix()
    if path == ("tests" if only else "benchmarks"):
        return True
    return True if not config.getoption("all") and path.endswith(".py") and _is_tool(path) else None


def _is_tool(path):
    return path.startswith(TOOLS) and "test_gpu_path" not in path


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Skip what needs a GPU. Without --all, leave out the tests marked with_all, and without --slow
    those marked with_slow; a test that is named on the command line always runs.
    """
    functions, config.collected = defaultdict(list), defaultdict(set)
    for item in items:
        config.collected[item.nodeid.partition("::")[0]].add(item.nodeid)
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if _is_tool(item.nodeid):
            item.add_marker(pytest.mark.tools)
            item.add_marker(pytest.mark.with_all)
        if item.nodeid.startswith("benchmarks/"):
            continue
        if not item.get_closest_marker("with_all") and not item.get_closest_marker("with_slow"):
            values = item.callspec.params.values() if hasattr(item, "callspec") else ()
            backends = [x for x in values if isinstance(x, str) and x in ("reference", "triton")]
            functions[(item.nodeid.partition("[")[0], *backends)].append(item)
    for cases in functions.values():
        if not cases[0].get_closest_marker("all_cases"):
            _leave_out_cases(cases)
    if any("::" in argument for argument in config.args):
        return
    if config.getoption("gpu") and not config.getoption("all"):
        left_out = {item for item in items if item.nodeid not in ON_GPU}
    else:
        marks = [f"with_{name}" for name in ("all", "slow") if not config.getoption(name)]
        left_out = {item for item in items if any(map(item.get_closest_marker, marks))}
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(hookwrapper=True)
def pytest_collection():
    """Collect no garbage while all is imported, and leave it out from then on: it is looked through
    each time, and copied in each forked process.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def _leave_out_cases(cases):
    """Mark cases of a test under one backend with_all. Those that KILLERS lists stay (each was the
    first to fail for a planted bug), and those of ON_GPU; if there are none, the case whose name
    has the lowest checksum stays. Where the test is marked `sample`, about two thirds of the others
    are also with_slow.
    """
    checksums = {item: zlib.crc32(item.nodeid.encode()) for item in cases}
    chosen = {item for item in cases if item.nodeid in KILLERS | ON_GPU}
    chosen = chosen or {min(cases, key=checksums.__getitem__)}
    for item in checksums.keys() - chosen:
        item.add_marker(pytest.mark.with_all)
        if item.get_closest_marker("sample") and checksums[item] % 3:
            item.add_marker(pytest.mark.with_slow)


# How many kernels the tests of --gpu launch, in the interpreter or on a GPU, which compiles each:
# they differ in the function, in compile-time constants and options, or in dtypes and alignments.

MOST_KERNELS = 400
_kernels, _running = set(), ""


@pytest.fixture(scope="session", autouse=True)
def counted_kernels(request):
    if request.config.getoption("benchmark_only", False):
        return
    from fastformer.kernels import launch

    start = launch.Launch.through_triton

    def count(self, *pointers, **options):
        if _running in ON_GPU:
            name = self.kernel.fn.__module__, self.kernel.fn.__name__
            _kernels.add(str((name, self._options, _kinds((pointers, self._arguments)))))
        return start(self, *pointers, **options)

    launch.Launch.through_triton = count


def _kinds(x):
    """What Triton compiles for an argument or a group of arguments."""
    if isinstance(x, tuple):
        return tuple(map(_kinds, x))
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if type(x) is int:
        return x == 1 or (x % 16 == 0, abs(x) < 2**31)
    return type(x) if isinstance(x, float) else str(x)


@pytest.hookimpl(trylast=True)  # after the processes of pytest-xdist
def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["kernels"] = [*_kernels]
    elif len(_kernels) > MOST_KERNELS:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    _kernels.update(getattr(node, "workeroutput", {}).get("kernels", []))


# The processor time of each test, its child processes included, is part of its report, which
# pytest-xdist passes on.


def _processor_seconds():
    return sum(os.times()[:4])


def pytest_runtest_logstart(nodeid):
    global _measured, _running
    _measured, _running = _processor_seconds(), nodeid


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    global _measured
    outcome = yield
    now = _processor_seconds()
    outcome.get_result().cpu_seconds, _measured = now - _measured, now


def pytest_terminal_summary(terminalreporter):
    """Print the ten slowest files, and how many kernels the tests of --gpu have launched."""
    if _kernels:
        found = f"{len(_kernels)} kernels were launched by the tests of --gpu"
        terminalreporter.write_line(f"{found}; at most {MOST_KERNELS} are allowed")
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
    from fastformer.kernels import interpreter

    from benchmarks.proof import memory_check

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


@pytest.fixture
def on_the_ops():
    """Accelerated modules call the ops on a CPU, too, where "auto" leaves them to torch."""
    from fastformer import use_backend

    with use_backend("auto" if HAS_GPU else "reference"):
        yield


@pytest.fixture(params=["reference", "triton"])
def backend(request):
    """Runs the test under each backend; on a CPU `triton` is the interpreter."""
    from fastformer import use_backend

    with use_backend(request.param):
        yield request.param
