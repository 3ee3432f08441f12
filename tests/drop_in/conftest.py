"""Fixtures that the tests of drop_in share."""

import gc
import inspect

import pytest
import torch

from fastformer.dispatch import front
from fastformer.ops import functional


@pytest.fixture
def attention_calls(monkeypatch):
    """The arguments by name of each call of the op scaled_dot_product_attention."""
    calls, op = [], functional.scaled_dot_product_attention
    signature = inspect.signature(op)

    def record(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        calls.append(bound.arguments)
        return op(*args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", record)
    monkeypatch.setattr(
        front, "unwatched_backend", lambda: None
    )  # no plan, which leaves the op out
    return calls


@pytest.fixture
def process_group(tmp_path):
    """A process group of this process."""
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", store, rank=0, world_size=1)
    yield
    # A model that outlives its process group ends it with the GIL held, and may wait for ever for a
    # thread of gloo that needs the GIL.
    gc.collect()
    torch.distributed.destroy_process_group()
