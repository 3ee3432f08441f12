"""Checkpoints of a training run: what resumes, what is refused, and a disk that is full."""

import os
import types
import warnings
from datetime import timedelta

import pytest
import torch

import fastformer as ff
from fastformer.training import checkpoints as module

SETTINGS = {"steps": 4, "d_model": 3}


def parts():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    return model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2)


def trained(folder, settings=SETTINGS, until=None, every=2):
    """The losses of a run of random batches, its parameters, and how many steps it was spared."""
    saved = ff.Checkpoints(folder, settings, every)
    model, optimizer, scheduler = parts()
    done, losses = saved.begin(model, optimizer, scheduler)
    for _ in range(done, until or settings["steps"]):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 3)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
        saved.end_step(losses)
    return torch.stack(losses), dict(model.named_parameters()), done


def steps(folder):
    return sorted(os.listdir(folder))


def test_a_run_goes_on_as_if_it_had_not_been_stopped(tmp_path):
    """With more steps than before, too: the checkpoint of its last step counts, due or not."""
    want = trained(tmp_path / "whole", {**SETTINGS, "steps": 11})
    folder = str(tmp_path / "new" / "parts")
    assert trained(folder, until=3)[2] == 0 and steps(folder) == ["step-2"]
    assert trained(folder, {**SETTINGS, "steps": 5})[2] == 2
    assert steps(folder) == ["step-2", "step-4", "step-5"]
    losses, parameters, done = trained(folder, {**SETTINGS, "steps": 11})
    assert done == 5 and steps(folder) == ["step-10", "step-11", "step-8"]
    assert torch.equal(losses, want[0])
    torch.testing.assert_close(parameters, want[1], rtol=0, atol=0)


def test_a_checkpoint_whose_deletion_was_cut_off_is_none(tmp_path, monkeypatch):
    """The file that makes it complete is deleted first: what is left is passed over in silence."""
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "rmtree", lambda path, **_: None)
        trained(tmp_path, {**SETTINGS, "steps": 5}, every=1)
    assert steps(tmp_path) == [f"step-{n}" for n in range(1, 6)]
    complete = sorted(path.parent.name for path in tmp_path.glob("*/.metadata"))
    assert complete == ["step-3", "step-4", "step-5"]


def test_what_is_refused_by_name(tmp_path, monkeypatch):
    trained(tmp_path)
    path = tmp_path / "step-4"
    for changed, words in (
        ({"d_model": 4}, "has d_model 3; expected 4, resume=False, or"),
        ({"steps": 3}, "has 4 steps; expected 3 or fewer, res"),
    ):
        with pytest.raises(ValueError, match=f"checkpoint {path} {words}"):
            trained(tmp_path, SETTINGS | changed)
    with monkeypatch.context() as patch:
        patch.setattr(module, "FORMAT", "fastformer checkpoint, version 4")
        trained(tmp_path / "later")
    words = "checkpoint .*step-4 has format 'fastformer checkpoint, version 4'; expected 'fastfor"
    with pytest.raises(ValueError, match=words):
        trained(tmp_path / "later")


def test_checkpoints_every_so_many_seconds(tmp_path, monkeypatch):
    """Of a clock on which each step takes 4 s; and after the last step."""
    clock = types.SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(module, "time", clock)
    saved = ff.Checkpoints(tmp_path, {**SETTINGS, "steps": 7}, timedelta(seconds=10))
    saved.begin(*parts())
    for step in range(1, 8):
        clock.monotonic = lambda now=4.0 * step: now
        assert not saved.end_step([torch.zeros(())] * step)
    assert steps(tmp_path) == ["step-3", "step-6", "step-7"]


def test_a_new_run_in_an_old_folder(tmp_path):
    """It deletes the checkpoints, but no other file."""
    trained(tmp_path)
    (tmp_path / "step-notes").mkdir()
    saved = ff.Checkpoints(tmp_path, {**SETTINGS, "d_model": 4}, 2)
    assert saved.begin(*parts(), resume=False) == (0, [])
    assert steps(tmp_path) == ["step-notes"] and saved.resumed_from is None
    for count in (2, 4):
        saved.end_step([torch.zeros(())] * count)
    assert saved.begin(*parts(), resume=False)[0] == 0 and steps(tmp_path) == ["step-notes"]
    saved.end_step([torch.zeros(())] * 2)
    assert steps(tmp_path) == ["step-2", "step-notes"]


@pytest.mark.parametrize("room", [0, 6000], ids=["of nothing", "of a part"])
def test_a_full_disk_leaves_the_earlier_checkpoints(tmp_path, room):
    resource = pytest.importorskip("resource")
    trained(tmp_path)
    saved = ff.Checkpoints(tmp_path, {**SETTINGS, "steps": 5}, 2)
    _, losses = saved.begin(*parts())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))  # of each file
    try:
        with pytest.raises(OSError, match=f"^checkpoint {tmp_path}/step-5 cannot be written: "):
            saved.end_step([*losses, losses[0]])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert steps(tmp_path) == ["step-2", "step-4"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trained(tmp_path, {**SETTINGS, "steps": 5})[2] == 4


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((3, SETTINGS), TypeError, "folder is a int; expected a path"),
        (("x", {}), ValueError, "settings is {}; expected .* with 'steps'"),
        (("x", {"steps": 0}), ValueError, "steps is 0; expected 1 or more"),
        (("x", {"steps": 1.5}), TypeError, "steps is a float"),
        (("x", {"steps": 1, "dtype": torch.half}), TypeError, "expected values of JSON: .*dtype"),
        (("x", SETTINGS, 0), ValueError, "every is 0; expected 1 or more"),
        (("x", SETTINGS, 1.5), TypeError, "every is a float"),
        (("x", SETTINGS, timedelta()), ValueError, "every is 0:00:00; expected a time above 0"),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        ff.Checkpoints(*arguments)


def test_the_end_of_a_step_before_the_beginning(tmp_path):
    with pytest.raises(RuntimeError, match="end_step was called before begin"):
        ff.Checkpoints(tmp_path, SETTINGS, 1).end_step([torch.zeros(())])
