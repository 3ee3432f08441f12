"""run_epoch(cuda_graph=True): the same updates as without it, by replays of a graph for each shape.

`Recorder` stands in for a CUDA graph on a CPU. On a GPU, test_on_a_gpu captures real ones, and
tests/proof/test_rehearsal.py captures over a driver that launches nothing.
"""

import copy
import functools
import sys
from types import SimpleNamespace

import pytest
import torch
from recorder import Recorder, run_as_on_a_gpu
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from fastformer import Batch, LabelSmoothing, SimpleLossCompute, fit, make_model, run_epoch
from fastformer.training import updates


def data(device="cpu"):
    """Seven batches of two shapes, with padding."""
    generator = torch.Generator().manual_seed(3)
    for i in range(7):
        x = torch.randint(1, 7, (4, 6 + i % 2), generator=generator)
        x[: i % 4, 3:] = 0
        yield Batch(x, x).to(device)


def decay(optimizer):
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def made(device="cpu"):
    """A model and its optimizer, which the tests find in `trained`."""
    torch.manual_seed(5)
    trained.model = make_model(7, 7, 1, 16, 32, 2, 0.2).to(device)
    trained.optimizer = torch.optim.Adam(trained.model.parameters(), 0.01)
    return trained.model, trained.optimizer


def parameters():
    return [p for options in trained.optimizer.param_groups for p in options["params"]]


def trained(batches=None, schedule=decay, device="cpu", **options):
    """Return the loss, the reports, the parameters and the last rates of an epoch with graphs."""
    model, optimizer = made(device)
    scheduler = schedule(optimizer)
    compute, reports = SimpleLossCompute(model.generator, LabelSmoothing(7, 0, 0.1)), []
    batches = [*data(device)] * 2 if batches is None else batches
    loss = run_epoch(
        batches, model, compute, optimizer, scheduler, report=lambda *x: reports.append(x[:2]),
        report_every=1, cuda_graph=True, **options,
    )  # fmt: skip
    rates = [float(x) for x in scheduler.get_last_lr()]
    return loss, reports, {k: x.clone() for k, x in model.state_dict().items()}, rates


@pytest.fixture
def captures(monkeypatch):
    """Updates on a CPU are captured by a `Recorder`; the captured ones, in a list."""
    captures = []

    def captured(function):
        state = [x for p in parameters() for x in trained.optimizer.state[p].values()]
        saved = [(x, x.detach().clone()) for x in (*parameters(), *state)]
        generator = torch.get_rng_state()
        with Recorder() as recorder:
            out = function()
        torch.set_rng_state(generator)  # a capture computes nothing
        with torch.no_grad():
            for x, before in saved:
                x.copy_(before)
        captures.append(recorder)
        return recorder.replay, out

    supported = "_get_capturable_supported_devices"
    monkeypatch.setattr(
        sys.modules[torch.optim.Adam.__module__], supported, lambda *_, **__: ["cpu"]
    )
    monkeypatch.setattr(updates, "captured", captured)
    monkeypatch.setattr(updates, "_batch_obstacle", lambda group: None)
    run_as_on_a_gpu(monkeypatch)
    return captures


def eager(monkeypatch, *arguments, **options):
    """The same epoch without a graph, by the same optimizer."""
    with monkeypatch.context() as patch:
        patch.setattr(updates, "MOST_GRAPHS", 0)
        return trained(*arguments, **options)


@pytest.mark.parametrize(
    "options", [{}, {"max_grad_norm": 0.1}, {"accumulation_steps": 2}], ids=str
)
def test_replays_train_as_the_steps_do(captures, monkeypatch, options):
    """Bit for bit, with dropout, two shapes in turn, and a learning rate of each step."""
    want = eager(monkeypatch, **options)
    assert captures == []
    have = trained(**options)
    assert len(captures) == 2 and have[:2] == want[:2] and have[3] == want[3]
    assert all(torch.equal(x, want[2][name]) for name, x in have[2].items())


def test_fit_replays_in_all_of_its_epochs(captures, monkeypatch, tmp_path):
    """Bit for bit as by steps, and as a run that goes on from its checkpoint. Each run captures the
    two shapes once.
    """

    def fitted(name, epochs, graphs=16):
        monkeypatch.setattr(updates, "MOST_GRAPHS", graphs)
        model, optimizer = made()
        result = fit(
            model, [*data()], optimizer=optimizer, scheduler=decay(optimizer), epochs=epochs,
            checkpoints=tmp_path / name, cuda_graph=True, progress=False,
        )  # fmt: skip
        return result.losses, [x.tolist() for x in model.state_dict().values()]

    want = fitted("by steps", 2, graphs=0)
    assert captures == [] and fitted("graphs", 2) == want and len(captures) == 2
    fitted("parts", 1)
    assert fitted("parts", 2) == want and len(captures) == 6


def test_numbers_of_the_optimizer_that_change_are_not_replayed(captures, monkeypatch):
    """OneCycleLR changes Adam's betas, which a graph would keep."""

    schedule = functools.partial(OneCycleLR, max_lr=0.01, total_steps=20)
    want = eager(monkeypatch, schedule=schedule)
    have = trained(schedule=schedule)
    assert captures == [] and have[1] == want[1]


def test_a_learning_rate_that_is_assigned_is_not_replayed(captures, monkeypatch):
    """By a schedule that assigns numbers."""

    def numbers(optimizer):
        (options,) = optimizer.param_groups
        step = lambda: options.update(lr=float(options["lr"]) * 0.7)  # noqa: E731
        return SimpleNamespace(step=step, get_last_lr=lambda: [options["lr"]])

    want = eager(monkeypatch, schedule=lambda x: LambdaLR(x, lambda step: 0.7**step))
    have = trained(schedule=numbers)
    assert len(captures) == 2 and have[3] == pytest.approx(want[3])
    assert [x for _, x in have[1]] == pytest.approx([x for _, x in want[1]], rel=1e-3)


@pytest.mark.parametrize("change", ["state", "mode", "frozen"])
def test_what_changes_within_an_epoch_is_not_replayed(captures, monkeypatch, change):
    """By the data: after half of the batches."""

    def batches():
        yield from [*data()] * 2
        optimizer, model = trained.optimizer, trained.model
        if change == "state":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif change == "mode":
            model.encoder.eval()
        else:
            model.src_embed.requires_grad_(False)
        yield from [*data()] * 2

    want = eager(monkeypatch, batches())
    have = trained(batches())
    assert len(captures) == 4 and have[1] == want[1]
    assert all(torch.equal(x, want[2][name]) for name, x in have[2].items())


def test_gradients_are_those_of_the_last_update(captures, monkeypatch):
    a, b = list(data())[:2]
    eager(monkeypatch, [a, b, a, b, a])
    want = [p.grad for p in parameters()]
    trained([a, b, a, b, a])
    assert len(captures) == 2
    for p, grad in zip(parameters(), want):
        assert torch.equal(p.grad, grad)


def test_shapes_beyond_the_most_run_step_by_step(captures, monkeypatch):
    monkeypatch.setattr(updates, "MOST_GRAPHS", 1)
    want = eager(monkeypatch)
    assert trained()[:2] == want[:2] and len(captures) == 1


# ------------------------------------------------------------------------- what is not captured


def test_a_batch_on_a_cpu_runs_step_by_step():
    with pytest.warns(UserWarning, match="without a CUDA graph: a batch is on cpu"):
        loss, *_ = trained()
    assert "capturable" in trained.optimizer.param_groups[0]
    assert not trained.optimizer.param_groups[0]["capturable"] and loss > 0


def test_packed_batches_run_step_by_step():
    x = torch.tensor([[1, 2, 3, 4], [1, 5, 6, 0]])
    with pytest.warns(UserWarning, match="the host reads the lengths of packed batches") as seen:
        trained([Batch(x, x, packed=True)] * 3)
    assert len(seen) == 1


def test_a_failed_capture_runs_step_by_step(captures, monkeypatch):
    """With one warning, and the same results."""
    want = eager(monkeypatch)

    def captured(function):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(updates, "captured", captured)
    with pytest.warns(UserWarning, match="CUDA graph: operation not permitted") as seen:
        assert trained()[:2] == want[:2]
    assert len(seen) == 1


@pytest.mark.parametrize("kind", ["SGD", "several devices", "processes"])
def test_obstacles_are_named(kind, monkeypatch):
    p, q = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.SGD([p]) if kind == "SGD" else torch.optim.Adam([p])
    words = {
        "SGD": "SGD has no option `capturable`",
        "several devices": "the parameters are on several devices",
        "processes": "processes exchange gradients",
    }
    assert (updates._obstacle(optimizer) is None) == (kind != "SGD")
    if kind == "several devices":
        optimizer.add_param_group({"params": [q]})
    if kind == "processes":
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert updates._obstacle(optimizer) == words[kind]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA graphs")
@pytest.mark.gpu
def test_on_a_gpu(device, monkeypatch):
    want, have = eager(monkeypatch, device=device), trained(device=device)
    assert have[:2] == want[:2]
    assert all(torch.equal(x, want[2][name]) for name, x in have[2].items())
