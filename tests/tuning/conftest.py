"""The file of measurements, as a fixture."""

import pytest
from tuning_worker import HERE

from fastformer import environment, tuning
from fastformer.dispatch import backends


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The path of the file that is read; the machine is HERE, and its GPU is the CPU."""
    path = tmp_path / "tuning.json"
    monkeypatch.setenv("FASTFORMER_TUNING", str(path))
    monkeypatch.setattr(environment, "machine", lambda device: HERE)
    monkeypatch.setattr(tuning, "REPEATS", 2)
    backends.measure_again()
    yield path
    monkeypatch.undo()
    backends.measure_again()
