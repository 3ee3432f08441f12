"""The choice of the tests that depend on a change."""

from pathlib import Path

import affected
import pytest

CHANGES = {  # a file: tests that depend on it, and tests that do not
    "kernels/embedding.py": ("embedding fuzz", "attention layer_norm docs"),
    "kernels/attention/decode.py": ("attention decode_attention", "embedding layer_norm"),
    "fastformer/training/plots.py": ("plots cli", "attention decoding"),
    "fastformer/decoding/search.py": ("decoding language_model", "layer_norm padding"),
    "fastformer/ops/functional.py": ("attention patch decoding", "mutation packaging"),
    "tests/policy.py": ("cache decode_attention", "embedding"),
    "tests/distributed/parallel_worker.py": ("parallel context_parallel", "modules"),
    "tests/training/test_plots.py": ("plots", "cli"),
    "docs/numerics.md": ("docs readme", "attention"),
    "benchmarks/results/compile.json": ("compile cost benchmarks", "embedding"),
}


@pytest.mark.parametrize("file", CHANGES)
def test_affected(file):
    found = [Path(test).name for test in affected.affected([file])]
    for names, wanted in zip(CHANGES[file], (True, False)):
        for name in names.split():
            assert (f"test_{name}.py" in found) == wanted, name


def test_what_all_tests_depend_on():
    assert affected.affected(["conftest.py"]) == affected.affected(["tests/conftest.py"])
    assert len(affected.affected(["pyproject.toml"])) > 40
