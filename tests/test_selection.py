"""The selections of tests: tests/killers.txt and tests/gpu.txt name tests that exist."""

from benchmarks import ROOT


def test_every_case_is_there(request):
    """In the files that this run has collected; the other files are there."""
    collected = request.config.collected
    for name in ("killers.txt", "gpu.txt"):
        for test in (ROOT / "tests" / name).read_text().splitlines():
            file = test.partition("::")[0]
            assert test in collected.get(file, [test]) and (ROOT / file).exists(), test
