"""The file of measurements, as a fixture."""

import pytest
from tuning_worker import HERE

from fastformer.dispatch import backends, measurements


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The path of the file that is read; the machine is HERE, and its GPU is the CPU."""
    path = tmp_path / "tuning.json"
    monkeypatch.setenv("FASTFORMER_TUNING", str(path))
    monkeypatch.setattr(measurements, "machine", lambda device: HERE)
    backends.measure_again()
    yield path
    monkeypatch.undo()
    backends.measure_again()
