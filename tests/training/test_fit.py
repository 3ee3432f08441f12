"""fit: it trains as run_epoch does, stops where it should, and goes on to the same bits after a
kill at any moment.
"""

import csv
import json
import math
import os
import random
import shutil
import signal
import sys
import time
import traceback
import types
from unittest import mock

import numpy
import pytest
import torch

import fastformer as ff
from fastformer.training import fit as module


def parts(seed=0):
    """A small model with dropout, its optimizer and its schedule."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    model = ff.make_model(9, 9, N=1, d_model=8, d_ff=16, h=2, dropout=0.3)
    return model, *ff.make_optimizer(model.parameters(), 8, warmup=20)


def pairs(count=30, seed=1):
    draw = random.Random(seed)
    rows = [[1, *(draw.randint(3, 8) for _ in range(draw.randint(2, 5))), 2] for _ in range(count)]
    return [(row, row) for row in rows]


def lists(count=7, seed=1, packed=False):
    return list(ff.token_batches(pairs(8 * count, seed), 48, packed=packed))[:count]


def trained(batches, valid=None, **options):
    model, optimizer, scheduler = parts()
    given = dict(optimizer=optimizer, scheduler=scheduler, progress=False) | options
    result = ff.fit(model, batches, valid, **given)
    return model, optimizer, scheduler, result


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


# ------------------------------------------------------------------------------------ the training


@pytest.mark.parametrize(
    "options", [{}, dict(accumulation_steps=2, max_grad_norm=0.2, autocast=torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("packed", [False, True])
def test_two_epochs_are_two_epochs_of_run_epoch(packed, options):
    """Bit for bit, with dropout; the losses are those of the updates. 8 batches, so that no update
    takes those of two epochs.
    """
    batches = lists(8, packed=packed)
    model, optimizer, scheduler = parts()
    criterion = ff.LabelSmoothing(9, 0, 0.1)
    compute, want = ff.SimpleLossCompute(model.generator, criterion), []
    for _ in range(2):
        ff.run_epoch(
            batches, model.train(), compute, optimizer, scheduler, progress=False,
            after_update=lambda loss: want.append(float(loss)), **options,
        )  # fmt: skip
    fitted, *_, result = trained(batches, epochs=2, **options)
    assert same(fitted, model) and result.losses == want and not fitted.training
    assert len(want) == 16 // options.get("accumulation_steps", 1)
    assert result.validations == [] and result.best is None


def test_the_loss_of_an_update_is_that_of_all_of_its_tokens():
    batches, losses = lists(4), []
    model, optimizer, _ = parts()
    model.eval()
    compute = ff.SimpleLossCompute(model.generator, ff.LabelSmoothing(9, 0, 0.1))
    want = ff.run_epoch(batches, model, compute, progress=False)
    optimizer.param_groups[0]["lr"] = 0.0
    with pytest.warns(UserWarning, match="eval"):
        ff.run_epoch(
            batches, model, compute, optimizer, progress=False, accumulation_steps=4,
            after_update=losses.append,
        )  # fmt: skip
    assert len({int(x.ntokens) for x in batches}) > 1 and len(losses) == 1
    assert abs(float(losses[0]) - want) < 1e-6


def test_steps_count_updates_over_the_ends_of_epochs():
    batches = lists(5)
    model, _, scheduler, result = trained(batches, steps=7, accumulation_steps=2)
    assert len(result.losses) == scheduler.last_epoch == 7  # 14 batches: almost three epochs
    twice, *_ = trained(batches * 3, steps=7, accumulation_steps=2)
    assert same(model, twice)


def test_the_default_loss_takes_the_padding_of_the_batches():
    batches = ff.token_batches([[0, 3, 0, 4], [3, 0]], padding_idx=9)
    model = ff.make_decoder(10, N=1, d_model=8, d_ff=16, h=2, dropout=0.0, padding_idx=9)
    compute = ff.SimpleLossCompute(model.generator, ff.LabelSmoothing(10, 9, 0.1))
    want = ff.run_epoch(batches, model, compute, progress=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    result = ff.fit(model, batches, optimizer=optimizer, steps=1, progress=False)
    assert abs(result.losses[0] - want) < 1e-6


# -------------------------------------------------------------------- validation, stopping, the log


def test_validations_stop_the_run_and_the_best_weights_return():
    """By a metric that rises, falls and stays: 1, 3, 2, 3."""
    values, seen = iter([1, 3, 2, 3, 9]), []

    def metric(model):
        assert not model.training and not torch.is_grad_enabled()
        seen.append({name: x.clone() for name, x in model.state_dict().items()})
        return next(values)

    model, *_, result = trained(lists(), lists(2, 5), epochs=9, metric=metric, patience=2)
    assert [x["metric"] for x in result.validations] == [1, 3, 2, 3]
    assert [(x["step"], x["epoch"]) for x in result.validations] == [
        (7, 1), (14, 2), (21, 3), (28, 4),
    ]  # fmt: skip
    assert result.best == result.validations[1] and len(result.losses) == 28
    assert all(torch.equal(x, seen[1][name]) for name, x in model.state_dict().items())
    assert not torch.equal(seen[1]["generator.proj.bias"], seen[3]["generator.proj.bias"])


@pytest.mark.parametrize("of", ["metric", "valid_loss"])
@pytest.mark.parametrize("best", [3, 4])
def test_nan_is_worse_than_any_validation(of, best):
    """As the first one, and after others: for the best one, its weights, and the patience."""
    values = [math.nan, 2.0, math.nan, *([3.0, 1.0] if best == 3 else [1.0, 3.0])]
    left, seen = iter(values), []

    def metric(model):
        seen.append(model.generator.proj.weight.clone())
        return next(left)

    def compute(x, y, ntokens):
        return x.square().mean() if torch.is_grad_enabled() else -torch.tensor(next(left))

    given = dict(metric=metric) if of == "metric" else dict(valid=lists(1, 5), loss_compute=compute)
    model, *_, result = trained(lists(2), epochs=5, patience=3, **given)
    assert len(result.validations) == 5 and result.best is result.validations[best]
    assert of == "valid_loss" or torch.equal(model.generator.proj.weight, seen[best])


def test_validations_every_few_updates_and_at_the_end():
    """Of the loss of run_epoch, of which the lowest is best."""
    valid = lists(2, 5)
    model, *_, result = trained(lists(), valid, steps=10, valid_every=4)
    assert [x["step"] for x in result.validations] == [4, 8, 10]
    plain, *_ = trained(lists(), steps=10)
    assert same(model, plain)  # a validation draws nothing and changes nothing
    model, *_, result = trained(lists(), valid, epochs=3, patience=9)
    compute = ff.SimpleLossCompute(model.generator, ff.LabelSmoothing(9, 0, 0.1))
    losses = [x["valid_loss"] for x in result.validations]
    assert len(losses) == 3 and result.best["valid_loss"] == min(losses)
    assert ff.run_epoch(valid, model, compute, progress=False) == min(losses)


def test_batches_go_to_the_device_of_the_model(monkeypatch):
    """Those of valid as well."""
    batches, valid, moved = lists(2), lists(2, 5), []

    def to(batch, device, non_blocking):
        moved.append((device.type, non_blocking, batch))
        return batch

    monkeypatch.setattr(ff.Batch, "to", to)
    trained(batches, valid, epochs=1)
    assert moved == [("cpu", True, batch) for batch in (*batches, *valid)]


def read_log(folder):
    with open(folder / "log.csv", newline="") as file:
        return [*csv.DictReader(file)]


@pytest.mark.parametrize("board", [True, False])
def test_the_log(board, tmp_path, monkeypatch):
    """Rows of training and of validations, as CSV, for TensorBoard and for `report`."""
    writer = mock.Mock()
    tensorboard = types.SimpleNamespace(SummaryWriter=writer) if board else None
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    rows, folder = [], tmp_path / "new" / "log"
    *_, result = trained(
        lists(), lists(2, 5), epochs=2, log=folder, report=rows.append, report_every=4
    )
    assert [x["step"] for x in rows] == [4, 7, 8, 12, 14, 14]
    assert [x["epoch"] for x in rows] == [1, 1, 2, 2, 2, 2]
    for row, (first, last) in zip([x for x in rows if "loss" in x], [(0, 4), (4, 8), (8, 12)]):
        assert math.isclose(row["loss"], sum(result.losses[first:last]) / 4, rel_tol=1e-6)
        assert row["learning_rate"] == pytest.approx(ff.rate(last + 1, 8, 1.0, 20))
        assert row["tokens_per_second"] > 0
    assert [x for x in rows if "valid_loss" in x] == result.validations
    written = read_log(folder)
    assert [{k: x for k, x in row.items() if x} for row in written] == [
        {k: str(x) for k, x in row.items()} for row in rows
    ]
    assert writer.call_count == board
    if board:
        assert writer.call_args.kwargs == {"purge_step": 1}
        assert {x.args for x in writer().add_scalar.call_args_list} == {
            (n, row[n], row["step"]) for row in rows for n in row if n not in ("step", "epoch")
        }


class Timed(list):
    """A list each of whose batches takes a second of a clock."""

    now = 0.0

    def __iter__(self):
        for batch in super().__iter__():
            Timed.now += 1.0
            yield batch


def test_the_speed_is_that_of_all_tokens_since_the_last_row(monkeypatch):
    """Over the end of an epoch, and without the time of validations."""
    monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: Timed.now))
    batches, rows = Timed(lists()), []
    trained(batches, Timed(lists(2, 5)), epochs=2, report=rows.append, report_every=4)
    tokens = [int(batch.ntokens) for batch in list(batches) * 2]
    assert len(set(tokens)) > 1
    speeds = [row["tokens_per_second"] for row in rows if "loss" in row]
    for speed, (first, last) in zip(speeds, [(0, 4), (4, 8), (8, 12), (12, 14)], strict=True):
        assert speed == pytest.approx(sum(tokens[first:last]) / (last - first))


def test_rows_are_printed(capsys):
    """All rows without a terminal, none without progress, and beside a bar the validations."""
    given = dict(epochs=1, report_every=5, metric=lambda model: 0.5)
    trained(lists(), **given)
    assert capsys.readouterr().out == ""
    trained(lists(), **given, progress=None)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in lines] == [
        ["step", "5", "epoch", "1", "loss"],
        ["step", "7", "epoch", "1", "metric"],
        ["step", "7", "epoch", "1", "loss"],
    ]
    assert lines[1] == "step      7  epoch   1  metric   0.5000"
    trained(lists(), **given, progress=True)
    printed = capsys.readouterr().out
    assert "metric   0.5000" in printed and "learning rate" not in printed
    assert "/7" in printed  # the bar knows the number of batches


# ------------------------------------------------------------------------------------- resumption


class Stopped(BaseException):
    """Stands in for the death of the process."""


class Drawn:
    """Batches that depend on the generators of torch, NumPy and Python, drawn one by one."""

    def __iter__(self):
        draw = random.Random(int(torch.randint(99, ())) + int(numpy.random.randint(99)))
        for _ in range(7):
            x = torch.randint(3, 9, (draw.randint(2, 4), 2 + random.randint(2, 4)))
            yield ff.Batch(x, x + int(numpy.random.randint(1)))


def loader(own=None):
    """A loader that shuffles by its own generator, or by torch's."""
    rows = torch.randint(3, 9, (28, 5), generator=torch.Generator().manual_seed(0))

    def collate(x):
        return ff.Batch(torch.stack(x), torch.stack(x))

    return torch.utils.data.DataLoader(rows, 4, shuffle=True, collate_fn=collate, generator=own)


DATA = {
    "token_batches": lambda: ff.token_batches(pairs(), 24, seed=2),
    "a list": lists,
    "a shuffled DataLoader": loader,
    "drawn from the generators": Drawn,
}


def run(folder, data, dies=None, every=2, **options):
    """All that a run has at its end: numbers and tensors. It dies at call `dies` of the model."""
    calls = []

    def metric(model):
        random.random()
        return float(model.generator.proj.bias.sum()) + float(torch.rand(()))

    model, optimizer, scheduler = parts()
    forward = model.forward

    def counted(*given):
        calls.append(1)
        if len(calls) == dies:
            raise Stopped
        return forward(*given)

    model.forward = counted
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    given = dict(
        optimizer=optimizer, scheduler=scheduler, scaler=scaler, epochs=3, metric=metric,
        patience=2, progress=False, report_every=3, log=folder, accumulation_steps=2,
        checkpoints=ff.Checkpoints(folder / "checkpoints", {"steps": 99}, every),
    )  # fmt: skip
    result = ff.fit(model, data(), ff.token_batches(pairs(9, 7), 30), **given | options)
    rows = [{k: x for k, x in row.items() if k != "tokens_per_second"} for row in read_log(folder)]
    numbers = [*result, rows, random.getstate(), numpy.random.get_state()[1].tolist()]
    numbers.append(scaler.get_scale())
    tensors = [*model.state_dict().values(), torch.get_rng_state()]
    tensors += [x for state in optimizer.state.values() for x in state.values()]
    return [*numbers, scheduler.state_dict()["last_epoch"], [x.tolist() for x in tensors]]


@pytest.mark.parametrize("data", DATA.values(), ids=DATA.keys())
def test_a_run_that_stopped_anywhere_goes_on_to_the_same_bits(data, tmp_path):
    """In updates and in validations, more than once, with other batches read than trained."""
    want = run(tmp_path / "whole", data)
    assert want[0] and want[1]
    for i, dies in enumerate([(2, 7, 1), (22, 3)]):
        folder = tmp_path / str(i)
        for call in dies:
            with pytest.raises(Stopped):
                run(folder, data, call)
        assert run(folder, data) == want, dies


def test_the_best_weights_and_the_patience_are_resumed(tmp_path):
    """The best validation is that of epoch 2; the run dies in the validation of epoch 4, and ends
    after it.
    """

    def validated(folder, *metrics):
        left = list(metrics)  # without one, pop raises
        return trained(
            lists(), epochs=5, metric=lambda model: left.pop(0), patience=2,
            checkpoints=ff.Checkpoints(folder, {"steps": 99}, 5),
        )  # fmt: skip

    want, *_, result = validated(tmp_path / "whole", 1, 3, 2, 1)
    assert result.best["step"] == 14 and len(result.losses) == 28
    with pytest.raises(IndexError):
        validated(tmp_path / "parts", 1, 3, 2)
    model, *_, again = validated(tmp_path / "parts", 1)
    assert same(model, want) and again == result


def test_a_finished_run_resumes_to_what_it_was(tmp_path):
    data = DATA["token_batches"]
    want, again = run(tmp_path, data, epochs=2), run(tmp_path, data, epochs=2)
    assert again[:4] == want[:4] and again[-1][:9] == want[-1][:9]
    assert run(tmp_path, data)[0] == run(tmp_path / "whole", data)[0]  # a longer one


def child(folder, seconds=None):
    """Run in another process, killed after some seconds; return what the run has at its end."""
    out = folder.with_name(folder.name + ".json")
    process = os.fork()
    if process == 0:
        torch.set_num_threads(1)
        try:
            out.write_text(json.dumps(run(folder, DATA["token_batches"], every=1)))
        except BaseException:
            out.write_text(traceback.format_exc())
        finally:
            os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None if seconds is not None else out.read_text()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.with_slow)])
def test_kill_9(kills, tmp_path):
    """At moments drawn from the clock; each run is killed again while it resumes. A checkpoint is
    saved after each update.
    """
    draw, started = random.Random(kills), time.perf_counter()
    want, saved = child(tmp_path / "whole"), []
    seconds = time.perf_counter() - started
    for i in range(kills):
        moment = draw.uniform(0, seconds)
        for until in (moment, draw.uniform(0, seconds - moment)):
            child(tmp_path / f"{i}", until)
        found = (tmp_path / f"{i}" / "checkpoints").glob("step-*/.metadata")
        saved.append(max((int(x.parent.name[5:]) for x in found), default=0))
        assert child(tmp_path / f"{i}") == want, saved
    print(f"{len(json.loads(want)[0])} updates; resumed after {saved}")


def test_checkpoints_of_another_loop_are_refused(tmp_path):
    """They have no position in the data: a run would train the first batches again."""
    saved = ff.Checkpoints(tmp_path, {"steps": 7}, 1)
    saved.begin(*parts())
    saved.end_step([torch.zeros(())])
    with pytest.raises(ValueError, match=r"step-1 has no position in the data; exp"):
        trained(lists(), epochs=1, checkpoints=tmp_path)


def same_run(folder, seed=0, model=None, optimizer=None, data=None, batches=None, **options):
    """A run of two epochs, in which a setting may be another one."""
    torch.manual_seed(seed)
    sizes = dict(N=1, d_model=8, d_ff=16, h=2, dropout=0.1) | (model or {})
    made = ff.make_decoder(9, **sizes)
    best, scheduler = ff.make_optimizer(made.parameters(), 8, **{"warmup": 9, **(optimizer or {})})
    if options.pop("plain", False):
        best, scheduler = torch.optim.SGD(made.parameters(), 0.1, weight_decay=0.1), None
    data = ROWS if data is None else data
    if isinstance(data[0], list):
        data = ff.token_batches(data, **{"tokens": 16, **(batches or {})})
    smoothing, weight = options.pop("smoothing", 0.1), options.pop("weight", None)
    criterion = ff.LabelSmoothing(9, 0, smoothing, weight=weight)
    given = dict(
        optimizer=best, scheduler=scheduler, checkpoints=folder, progress=False, epochs=2,
        loss_compute=ff.SimpleLossCompute(made.generator, criterion),
    ) | options  # fmt: skip
    return ff.fit(made, data, **given)


ROWS = [row for row, _ in pairs(6)]
TWO = [ff.Batch(None, torch.tensor([[1, 3, n, 2]])) for n in (4, 5)]
REFUSED = {  # what is changed, and the words of the refusal
    "a factor": (dict(optimizer=dict(factor=2.0)), "scheduler LambdaLR"),
    "a warmup": (dict(optimizer=dict(warmup=20)), "scheduler LambdaLR"),
    "an optimizer": (dict(plain=True), r"optimizer Adam\(lr=1.0, .*; expected SGD\(lr=0.1, "),
    "dropout": (dict(model=dict(dropout=0.2)), r"model\..* Dropout\(p=0.1, .*; expected .*p=0.2"),
    "a width": (dict(model=dict(d_ff=8)), r"w_1 Linear\(.*out_features=16, .*; expected .*=8, "),
    "a depth": (dict(model=dict(N=2)), r"layers.1 None; expected EncoderLayer\("),
    "a seed": (dict(seed=1), "seed 0; expected 1"),
    "a batch size": (dict(batches=dict(tokens=20)), "batches .*tokens=16, .*; expected .*=20, "),
    "the order": (dict(batches=dict(seed=1)), "batches .*seed=0, .*; expected .*seed=1, "),
    "one token": (dict(data=[*ROWS[:-1], [8, *ROWS[-1][1:]]]), "batches rows=6, checksum="),
    "fewer rows": (dict(data=ROWS[:-1]), "batches rows=6, .*; expected rows=5"),
    "fewer epochs": (dict(epochs=1), "epoch 3 begun; expected 1 epochs or fewer"),
    "fewer steps": (dict(epochs=None, steps=3), "steps; expected 3 or fewer"),
    "smoothing": (dict(smoothing=0.2), "criterion .*smoothing=0.1, .*; expected .*smoothing=0.2"),
    "class weights": (dict(weight=torch.ones(9)), "criterion .*weights 0; .*weights [1-9]"),
    "the same ids in other rows": (
        dict(data=[ROWS[0][:3], ROWS[0][3:] + ROWS[1], *ROWS[2:]]),
        "batches rows=6, checksum=",
    ),
    "accumulation": (dict(accumulation_steps=2), "accumulation_steps 1; expected 2"),
    "clipping": (dict(max_grad_norm=1.0), "max_grad_norm None; expected 1.0"),
    "a dtype": (dict(autocast=torch.bfloat16), "autocast None; expected torch.bfloat16"),
    "patience": (dict(patience=1, valid=TWO), "patience False; expected True"),
}
TAKEN = dict(
    epochs=dict(epochs=3),
    steps=dict(epochs=None, steps=9),
    validation=dict(valid=TWO, valid_every=1),
    reports=dict(report=print, report_every=1),
)


def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path):
    """Each setting, in a run whose checkpoint is that of its end; what changes no update is taken,
    and resume=False begins again.
    """
    want = same_run(tmp_path / "run")
    assert len(want.losses) > 4
    for name, (changed, words) in REFUSED.items():
        with pytest.raises(ValueError, match=words) as told:
            same_run(tmp_path / "run", **changed)
        assert str(told.value).endswith(", resume=False, or another folder"), name
    assert same_run(tmp_path / "run") == want
    for name, changed in TAKEN.items():
        folder = shutil.copytree(tmp_path / "run", tmp_path / name)
        losses = same_run(folder, **changed).losses
        assert losses[: len(want.losses)] == want.losses, name
    again = same_run(tmp_path / "run", optimizer=dict(factor=2.0), resume=False)
    assert again.losses[0] == want.losses[0] and again.losses[-1] != want.losses[-1]
    assert same_run(tmp_path / "run", optimizer=dict(factor=2.0)) == again


@pytest.mark.parametrize("steps", [1, 2], ids=["within an epoch", "at its end"])
def test_lists_are_compared_by_their_length_and_first_batch(steps, tmp_path):
    same_run(tmp_path, data=TWO, epochs=None, steps=steps)
    for data, words in (
        ([*reversed(TWO)], "another first batch of the epoch; expected the same data"),
        ([TWO[0]] * 3, "batches 2; expected 3"),
    ):
        with pytest.raises(ValueError, match=words):
            same_run(tmp_path, data=data, epochs=None, steps=4)
    assert len(same_run(tmp_path, data=TWO, epochs=None, steps=4).losses) == 4


def test_a_loader_with_its_own_generator_resumes_within_its_first_epoch(tmp_path):
    """To compare its first batch does not begin it twice. Later epochs cannot be found again."""

    def losses(name, until):
        data, saved = loader(torch.Generator().manual_seed(1)), tmp_path / name
        checkpoints = ff.Checkpoints(saved, {"steps": 99}, 2)
        return trained(data, steps=until, checkpoints=checkpoints)[-1].losses

    want = losses("whole", 9)
    assert losses("parts", 3) == want[:3] and losses("parts", 5) == want[:5]
    assert losses("parts", 9) == want
    with pytest.raises(ValueError, match="another first batch of the epoch"):
        losses("parts", 10)


def test_batches_of_one_token_to_predict(tmp_path):
    """Whose tensors are strided views of one column."""
    rows = [[1, n] for n in range(3, 9)]
    assert same_run(tmp_path, data=rows) == same_run(tmp_path, data=rows)
    column = torch.tensor([[1, 3], [4, 5], [6, 7]])[:, :1].t()
    same_run(tmp_path / "columns", data=[ff.Batch(None, column)])


def test_a_metric_that_is_added_counts_from_then_on(tmp_path):
    same_run(tmp_path, data=TWO, valid=TWO)
    result = same_run(tmp_path, data=TWO, valid=TWO, epochs=4, metric=lambda model: 1.0)
    assert result.best["epoch"] == 3 and "metric" not in result.validations[1]


def test_a_resumption_is_printed(tmp_path, capsys):
    same_run(tmp_path, progress=None)
    assert "resumed" not in capsys.readouterr().out
    steps = len(same_run(tmp_path, progress=None).losses)
    assert f"resumed from step {steps}, {tmp_path}/step-{steps}\n" in capsys.readouterr().out
    same_run(tmp_path)
    assert capsys.readouterr().out == ""


def interrupted(times, at, **options):
    """Send Ctrl-C so many times in update `at`; return the updates of the run."""
    seen = []

    def report(row):
        seen.append(row["step"])
        if row["step"] == at:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trained(lists(), steps=9, report=report, report_every=1, **options)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return seen


@pytest.fixture
def ctrl_c():
    """Python's own handler, which a shell may have switched off."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


def test_ctrl_c_saves_a_checkpoint_first(tmp_path, ctrl_c, capsys):
    """Once, after the update; twice, or without checkpoints, it ends the run at once. The run
    resumes to the same bits. After the last update nothing is lost either.
    """
    want = trained(lists(), steps=9)
    assert interrupted(1, 4, checkpoints=tmp_path / "a") == [1, 2, 3, 4]
    assert "the run ends after an update" in capsys.readouterr().err
    assert os.listdir(tmp_path / "a") == ["step-4"]
    model, *_, result = trained(lists(), steps=9, checkpoints=tmp_path / "a")
    assert result == want[-1] and same(model, want[0])
    interrupted(2, 4, checkpoints=tmp_path / "b")
    assert not (tmp_path / "b").exists()
    interrupted(1, 4)
    interrupted(1, 9, checkpoints=tmp_path / "c")
    assert os.listdir(tmp_path / "c") == ["step-9"]

    seen = []

    def drawn():  # workers of a loader, which are forked at the first batch, ignore it likewise
        seen.append(signal.getsignal(signal.SIGINT))
        yield from lists(1)

    trained(drawn(), steps=1, checkpoints=tmp_path / "e")
    assert seen[0] is not signal.default_int_handler

    def metric(model):
        signal.raise_signal(signal.SIGINT)
        return 1.0

    with pytest.raises(KeyboardInterrupt):  # in the validation after the last epoch
        trained(lists(), epochs=1, metric=metric, checkpoints=tmp_path / "d")
    assert os.listdir(tmp_path / "d") == ["step-7"]


def test_what_cuda_graphs_leave_in_an_optimizer_is_saved_as_numbers(tmp_path):
    """Learning rates that are tensors, as run_epoch(cuda_graph=True) makes them."""

    def run(steps, rate):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters(), rate, foreach=False)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        saved = ff.Checkpoints(tmp_path, {"steps": steps}, 1)
        done, losses = saved.begin(model, optimizer, scheduler)
        for _ in range(done, steps):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            scheduler.step()
            losses.append(torch.zeros(()))
            saved.end_step(losses)
        return done, float(optimizer.param_groups[0]["lr"])

    assert run(2, torch.tensor(0.01)) == (0, pytest.approx(0.0025))
    assert run(3, 0.01) == (2, pytest.approx(0.00125))
    assert run(4, torch.tensor(0.01)) == (3, pytest.approx(0.000625))


# -------------------------------------------------------------------------------------- the errors


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, ValueError, "epochs is None and steps is None; expected one of them"),
        ({"epochs": 1, "steps": 2}, ValueError, "epochs is 1 and steps is 2; expected one of"),
        ({"epochs": 0}, ValueError, "epochs is 0; expected 1 or more"),
        ({"steps": 1.5}, TypeError, "steps is a float"),
        ({"steps": 1, "report_every": 0}, ValueError, "report_every is 0; expected 1 or more"),
        ({"steps": 1, "patience": 0, "valid": []}, ValueError, "patience is 0; expected 1 or more"),
        ({"steps": 1, "patience": 2}, ValueError, "patience is 2, without valid and metric"),
        ({"steps": 1, "valid_every": 2}, ValueError, "valid_every is 2, without valid and metric"),
        ({"steps": 1, "metric": 3}, TypeError, "metric is a int; expected a function"),
        ({"steps": 1, "optimizer": 3}, TypeError, "optimizer is a int; expected one of torch.opt"),
        ({"steps": 1, "checkpoints": 3}, TypeError, "checkpoints is a int; expected Checkpo"),
        ({"steps": 1, "progress": 3}, TypeError, "progress is 3"),
        ({"steps": 1, "batches": []}, ValueError, "batches holds no batch in epoch 1; expected an"),
        ({"steps": 4, "batches": iter(lists(3))}, ValueError, "holds no batch in epoch 2; expecte"),
        ({"steps": 1, "batches": [3]}, TypeError, "batch 1 of data is a int; expected a Batch"),
        ({"steps": 1, "batches": 3}, TypeError, "batches is a int; expected an iterable"),
        ({"steps": 1, "autocast": torch.half, "scaler": 3}, TypeError, "scaler is a int; expected"),
        ({"steps": 1, "log": 3}, TypeError, "log is a int; expected a folder, or None"),
        ({"steps": 1, "report": 3}, TypeError, "report is a int; expected a function"),
    ],
)  # fmt: skip
def test_bad_arguments(options, error, words):
    options = {"batches": lists(2)} | options
    with pytest.raises(error, match=words):
        trained(options.pop("batches"), options.pop("valid", None), **options)


def test_a_model_without_a_generator():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    words = "loss_compute is None, and model is a Linear without a Generator; expected a loss_comp"
    with pytest.raises(ValueError, match=words):
        ff.fit(model, lists(1), optimizer=optimizer, steps=1)
