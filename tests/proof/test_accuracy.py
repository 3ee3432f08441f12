"""A sample of the accuracy ledger, computed anew: within the numerics policy, and no worse than the
committed one.
"""

import pytest
import torch

import fastformer as ff


@pytest.fixture(scope="module")
def accuracy():
    pytest.importorskip("triton")
    from benchmarks.proof import accuracy

    return accuracy


@pytest.mark.sample
@pytest.mark.parametrize("condition", ["benign", "ill"])
@pytest.mark.parametrize("op", sorted(ff.dispatch.backends.OPERATIONS))
def test_the_ledger_holds(accuracy, device, op, condition):
    path = accuracy.RESULTS / f"{accuracy.stem(device)}.csv"
    committed = accuracy.read(path) if path.exists() else {}
    assert committed or device.type == "cuda"
    # The reference calls ops of torch, and the interpreter's products of float32 are numpy's. Their
    # rounding differs from CPU to CPU, by up to four times where logits are large.
    by_numpy = {"float32"} if device.type == "cpu" and "attention" in op else set()
    cases = [case for case in accuracy.CASES if case.op == op and case.sampled]
    rows = accuracy.ledger(cases, accuracy.DTYPES, device, [condition])
    assert {row["provider"] for row in rows} == {"eager", "reference", "triton"}
    for row in rows:
        if row["provider"] not in accuracy.OURS:
            continue
        assert row["of limit"] <= 1, row
        if committed and row["provider"] == "triton" and row["dtype"] not in by_numpy:
            key = tuple(row[name] for name in accuracy.KEY)
            assert not accuracy.worse(row, committed[key]), row


def test_the_ledger_is_whole(accuracy):
    """Every op, dtype and condition, each gradient; nothing in it is past the policy."""
    committed = accuracy.read(accuracy.RESULTS / "accuracy.csv")
    calls = {key[:4] for key in committed}
    assert calls == {
        (case.op, case.name, condition, dtype)
        for case in accuracy.CASES
        for condition in accuracy.CONDITIONS
        for dtype in accuracy.DTYPES
    }
    for key, row in committed.items():
        assert row["provider"] not in accuracy.OURS or row["of limit"] <= 1, key
        for provider in ("eager", *accuracy.OURS):
            assert (*key[:5], provider) in committed


def test_what_counts_as_worse(accuracy):
    row = {"error": 1e-3, "ratio": 1.0, "rounding": 1e-4}
    assert not accuracy.worse(row, {"error": 0.9e-3, "ratio": 0.9})
    assert accuracy.worse(row, {"error": 0.6e-3, "ratio": 0.6})
    assert accuracy.worse({**row, "error": float("nan"), "ratio": float("nan")}, row)
    assert not accuracy.worse(row, {"error": 0.9e-3, "ratio": 0.6})  # eager became better
    assert not accuracy.worse({**row, "rounding": 1e-3}, {"error": 1e-6, "ratio": 1e-3})


def test_a_result_past_the_policy_is_an_error(accuracy, monkeypatch, capsys):
    """A scale that is off by 0.1%, in float32."""
    call = accuracy.call

    def off(op, **inputs):
        return call(op, **inputs) * (1.001 if inputs["weight"].dtype == torch.float32 else 1)

    monkeypatch.setattr(accuracy, "prepare", lambda: torch.device("cpu"))
    monkeypatch.setattr(accuracy, "OURS", ("reference",))
    monkeypatch.setattr(accuracy, "call", off)
    assert accuracy.main(["--op", "embed", "--dtype", "float32"]) == 1
    assert "PAST THE LIMIT: embed" in capsys.readouterr().out
