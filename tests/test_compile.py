"""Every shipped configuration compiles for its architecture, into what it should."""

from importlib import metadata

import pytest

pytest.importorskip("triton")

from benchmarks import compile_gate, cost


def weighed(request):
    """The cases whose loops are compared with the cost ledger: with --slow all that it has."""
    archs = list(cost.CHIPS) if request.config.getoption("--slow") else ["sm_90"]
    return {n for n, c in compile_gate.CASES.items() if c["arch"] in archs}


@pytest.fixture(scope="module")
def answers(request):
    """Of the cases that this session asks about; the table is of all."""
    asking = [item for item in request.session.items if item.module is request.module]
    names = {item.callspec.params["name"] for item in asking if hasattr(item, "callspec")}
    every = any(not hasattr(item, "callspec") for item in asking)
    loops = weighed(request) if every else ()
    return compile_gate.compile_all(
        {
            n: {**c, "loops": n in loops}
            for n, c in compile_gate.CASES.items()
            if every or n in names
        }
    )


@pytest.mark.parametrize("name", compile_gate.CASES)
def test_case(answers, name):
    problems = compile_gate.problems(name, answers[name])
    assert not problems, "\n".join(problems)


def test_committed_table(answers):
    """compile_table.md is what the compiler says now: a changed kernel shows in a diff."""
    version, committed = compile_gate.committed()
    if version != metadata.version("triton"):
        pytest.skip(f"the table is of Triton {version}")
    differences = compile_gate.differences(compile_gate.rows(answers), committed)
    assert not differences, "\n".join(
        [*differences, "if that is meant: python -m benchmarks.compile_gate --write"]
    )


def test_cost_ledger(answers, request):
    """No loop of 16-bit attention waits for all of its copies, and none has grown by 3%."""
    found = cost.ledger({n: answers[n] for n in answers if n in weighed(request)})
    assert not cost.waits(found)
    version, committed = cost.committed()
    if version != metadata.version("triton"):
        pytest.skip(f"the ledger is of Triton {version}")
    grown = cost.grown(cost.issue_slots(found), committed)
    assert not grown, "\n".join([*grown, "if that is meant: python -m benchmarks.cost --write"])
