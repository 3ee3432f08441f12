"""The copy task: its data, that it is learned, and that both backends run the same training."""

import json
import math
from dataclasses import replace

import pytest
import torch

from fastformer.training import copy_task
from fastformer.training.copy_task import Run, Settings, copy_batches

TINY = Settings(steps=5, batch=2, length=4, vocab=6, N=1, d_model=8, d_ff=16, h=2, dropout=0.3)


@pytest.fixture(autouse=True)
def one_thread():
    """As the command does: beside another program two threads are 30 times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --------------------------------------------------------------------------------------- the data


def test_data_is_a_copy_that_begins_with_the_start_symbol():
    batches = list(copy_batches(Settings(steps=7)))
    assert len(batches) == 7
    src = torch.cat([b.src for b in batches])
    assert src.shape == (7 * 16, 10)
    assert (src[:, 0] == 1).all()
    assert src[:, 1:].unique().tolist() == list(range(1, 11))
    for batch in batches:
        assert torch.equal(batch.src[:, :-1], batch.tgt)
        assert torch.equal(batch.src[:, 1:], batch.tgt_y)
        assert int(batch.ntokens) == 16 * 9


def test_data_is_the_seeds_alone():
    """Every pass sees the same batches, whatever torch's generator did, and leaves it alone."""
    before = torch.get_rng_state()
    first = [b.src for b in copy_batches(TINY)]
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert all(torch.equal(a, b.src) for a, b in zip(first, copy_batches(TINY), strict=True))
    other = [b.src for b in copy_batches(replace(TINY, seed=1))]
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_sentence():
    assert Settings().sentence == [1, 3, 2, 5, 4, 6, 7, 8, 9, 10]
    assert Settings(length=4).sentence == [1, 3, 2, 5]
    assert Settings(vocab=5, length=6).sentence == [1, 3, 2, 4, 1, 3]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"steps": 0}, "steps is 0; expected 1 or more"),
        ({"batch": 0}, "batch is 0"),
        ({"seed": -1}, "seed is -1; expected 0 or more"),
        ({"length": 1}, "length is 1; expected 2 or more"),
        ({"length": 5001}, "length is 5001; expected at most 5000"),
        ({"vocab": 2}, "vocab is 2; expected 3 or more"),
        ({"N": 0}, "N is 0"),
        ({"h": 0}, "h is 0"),
        ({"d_ff": 0}, "d_ff is 0"),
        ({"warmup": 0}, "warmup is 0"),
        ({"d_model": 10, "h": 4}, "d_model is 10; expected a multiple of h = 4"),
        ({"dropout": 1.0}, r"dropout is 1.0; expected a number in \[0, 1\)"),
    ],
)
def test_settings_name_a_bad_number(numbers, message):
    with pytest.raises(ValueError, match=message):
        Settings(**numbers)


# ------------------------------------------------------------------------------------- the training


def test_copy_task_is_learned():
    """The reference at a reduced size, in seconds. The defaults run in .ci/run."""
    settings = Settings(length=5, vocab=6, N=1, d_model=32, d_ff=64, h=2)
    run = copy_task.train(settings, "reference")
    assert len(run.losses) == 400
    assert run.decoded == [1, 3, 2, 5, 4]
    assert sum(run.losses[-20:]) < 0.3 * sum(run.losses[:20])
    assert run.tokens_per_second > 0 and not run.interpreted
    assert copy_task.faults(settings, [run]) == []


def test_both_backends_train_the_same(device, capsys):
    """The same losses; interpreted kernels stop at the limit, after three steps."""
    settings = replace(TINY, device=device)
    reference = copy_task.train(settings, "reference")
    triton = copy_task.train(settings, "triton", limit=0.0)
    assert copy_task.loss_difference([reference, triton]) <= 1e-5
    assert not reference.interpreted and len(reference.losses) == 5
    assert len(reference.decoded) == 4 and reference.decoded[0] == 1
    assert triton.interpreted == (device.type == "cpu")
    if triton.interpreted:
        assert len(triton.losses) == 3 and triton.decoded is None
    else:
        assert len(triton.losses) == 5 and triton.decoded == reference.decoded
    printed = capsys.readouterr().out
    assert printed.count("untrained: 1 3 2 5 -> 1 ") == 2
    untrained = [line for line in printed.splitlines() if "untrained" in line]
    assert untrained[0] == untrained[1]
    if triton.interpreted:
        assert "trained 3 of 5 steps" in printed and "Triton's interpreter" in printed


def test_the_comparison_sees_other_dropout_masks_and_other_weights():
    """With another seed, or with masks that differ a little, the losses do not agree."""
    run = copy_task.train(TINY, "reference")
    assert copy_task.train(TINY, "reference").losses == run.losses
    assert copy_task.train(TINY, "auto").losses == run.losses
    for other in (replace(TINY, seed=1), replace(TINY, dropout=0.29)):
        difference = copy_task.loss_difference([run, copy_task.train(other, "reference")])
        assert difference > 1e-3


def test_as_many_items_as_fit(monkeypatch):
    """A clock that each item moves on by its own cost."""
    now = [100.0]
    monkeypatch.setattr(copy_task.time, "perf_counter", lambda: now[0])

    def taken(costs, seconds, least):
        n = 0
        for cost in copy_task._items_within(costs, seconds, least):
            now[0] += cost
            n += 1
        return n

    assert taken([1.0] * 100, 10.0, 3) == 10
    assert taken([9.0] * 100, 10.0, 3) == 3  # at least
    assert taken([1.0, 4.0, 1.0, 1.0, 1.0, 1.0], 10.0, 3) == 4  # 7 s gone, 4 s may be needed: 11
    assert taken([1.0] * 5, 10.0, 3) == 5  # all there are
    assert taken([1.0] * 2, 0.0, 3) == 2


# ------------------------------------------------------------------------------------- the verdict

GOOD = Run("reference", False, [0.5] * 400, 100.0, Settings().sentence)
BAD = [1] * 10


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({}, []),
        ({"losses": [0.50009] * 3, "decoded": None}, []),
        ({"losses": [0.5, 0.5002, 0.5], "decoded": None}, ["differ by 2.0e-04 in the first 20"]),
        ({"losses": [0.5, math.nan], "decoded": None}, ["differ by nan"]),
        ({"losses": [0.5] * 20 + [0.55] * 380}, []),  # later steps may drift apart
        ({"losses": [0.5] * 20 + [0.7] * 380}, ["final losses of the backends differ by 0.2"]),
        ({"decoded": BAD}, ["triton: trained 400 steps and does not copy"]),
        ({"losses": [0.5] * 399, "decoded": BAD}, []),  # fewer than the default steps
    ],
)
def test_faults_of_copy_task_runs(second, words):
    runs = [GOOD, replace(GOOD, **{"backend": "triton", **second})]
    found = copy_task.faults(Settings(), runs)
    assert len(found) == len(words)
    assert all(word in fault for word, fault in zip(words, found, strict=True))


def test_the_verdict_names_what_agrees_and_what_copies():
    few = Run("triton", True, [0.50001] * 24, 1.0, None)
    assert copy_task.verdict(Settings(), [GOOD, few]) == (
        "the losses of both runs agree within 1.0e-05 over steps 1..20; reference: copies the "
        "sequence; triton, interpreted: trained 24 of 400 steps (--full trains all)"
    )
    early = replace(GOOD, losses=[2.0] * 7, decoded=BAD)
    alone = "nothing was compared; reference: does not copy yet (400 steps are enough)"
    assert copy_task.verdict(Settings(steps=7), [early]) == alone


def test_summary_is_plain_json():
    other = Run("triton", True, [0.25, math.inf], 2.5, None)
    written = copy_task.summary([GOOD, other], {"device": "cpu"})
    read = json.loads(json.dumps(written, allow_nan=False))
    assert list(read) == ["runs", "max_loss_difference", "environment"]
    assert read["runs"][1] == {
        "backend": "triton",
        "interpreted": True,
        "losses": [0.25, None],
        "tokens_per_second": 2.5,
        "decoded": None,
    }
    assert read["max_loss_difference"] is None  # infinite
    assert copy_task.summary([GOOD], {})["max_loss_difference"] is None
    assert copy_task.summary([GOOD, GOOD], {})["max_loss_difference"] == 0
