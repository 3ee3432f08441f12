"""Chooses Triton's mode before anything imports triton, keeps benchmarks/ out of plain `pytest`,
and holds the shared fixtures.
"""

import os
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


def pytest_ignore_collect(collection_path, config):
    """`pytest` runs tests/, `pytest --benchmark-only` runs benchmarks/. A path given by hand is
    never ignored.

    (pytest asks only about what lies below the starting points, so `testpaths` must not list the
    two.)
    """
    only = config.getoption("benchmark_only", False)
    return True if collection_path == ROOT / ("tests" if only else "benchmarks") else None


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session", autouse=True)
def repaired_interpreter():
    if not HAS_GPU:
        from fastformer.kernels import interpreter

        interpreter.repair()


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
