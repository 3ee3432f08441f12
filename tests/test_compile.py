"""Every shipped configuration compiles for its architecture, into what it should."""

from importlib import metadata

import compile_gate
import pytest

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def answers(request):
    """Of the cases that this session asks about; the table is of all."""
    asking = [item for item in request.session.items if item.module is request.module]
    names = {item.callspec.params["name"] for item in asking if hasattr(item, "callspec")}
    every = any(not hasattr(item, "callspec") for item in asking)
    return compile_gate.compile_all(
        {n: c for n, c in compile_gate.CASES.items() if every or n in names}
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
        [*differences, "if that is meant: python tests/compile_gate.py --write"]
    )
