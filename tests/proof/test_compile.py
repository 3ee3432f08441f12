"""Every shipped configuration compiles for its architecture, into what it should.

benchmarks/results holds what the compiler made of each case, with a digest of the sources. Without
--all, only the cases whose sources have changed are compiled.
"""

from importlib import metadata

import pytest

pytest.importorskip("triton")

from benchmarks.proof import compile_gate, cost

TABLE = compile_gate.Table.read(compile_gate.DATA)
LEDGER = compile_gate.Table.read(cost.DATA)
CHANGED = {*TABLE.stale(compile_gate.digests()), *LEDGER.stale(cost.digests())}
KNOWN, ENTRIES = compile_gate.known(), cost.read(LEDGER)
WRITE = (
    "if that is meant: python -m benchmarks.proof.compile_gate --write; "
    "python -m benchmarks.proof.cost --write"
)
CASES = [
    pytest.param(name, marks=[] if name in CHANGED else pytest.mark.with_all)
    for name in compile_gate.CASES
]


@pytest.mark.parametrize("name", CASES)
def test_case(compiled, name):
    """It compiles without a problem and into what the table says; no loop of 16-bit attention waits
    for all of its copies, and none has grown by 3%.
    """
    answer = compiled(name)
    found = compile_gate.problems(name, answer)
    entries = cost.ledger({name: answer}).get(name, [])
    found += cost.waits(entries)
    assert not found, "\n".join(found)
    if TABLE.triton != metadata.version("triton"):
        pytest.skip(f"the table is of Triton {TABLE.triton}")
    found = compile_gate.differences(name, compile_gate.rows({name: answer})[name], KNOWN)
    found += cost.grown(entries, ENTRIES.get(name, []))
    assert not found, "\n".join([*found, WRITE])


def test_the_data_are_of_these_sources():
    """Else each run compiles the changed cases again."""
    if TABLE.triton != metadata.version("triton"):
        pytest.skip(f"the table is of Triton {TABLE.triton}")
    assert not CHANGED, WRITE
    assert [*KNOWN] == [*compile_gate.CASES] and [*ENTRIES] == [*cost.digests()]


def test_what_makes_a_case_stale(monkeypatch):
    """A change of its own kernels or of those of all, and no comment, docstring or import."""
    norm = compile_gate.CASES["sm_90 layer_norm bf16 N=512"]
    loss = compile_gate.CASES["sm_90 cross_entropy bf16 V=512"]
    code, before = compile_gate._code, (compile_gate.digest(norm), compile_gate.digest(loss))

    def changed(*names):
        monkeypatch.setattr(
            compile_gate,
            "_code",
            lambda path: code(path) + "x = 1" * bool({path.name, path.parent.name} & {*names}),
        )
        return compile_gate.digest(norm) != before[0], compile_gate.digest(loss) != before[1]

    assert changed() == (False, False)
    assert changed("layer_norm") == (True, False)
    assert changed("common.py") == changed("compile_worker.py") == (True, True)
    assert changed("forward.py", "interpreter.py") == (False, False)


def test_what_is_code(tmp_path):
    texts = ["import a\nx = 1\n", '"""Of x."""\nfrom b import a  # a\nx = 1\n', "import a\nx = 2\n"]
    paths = [tmp_path / f"{n}.py" for n in range(3)]
    for path, text in zip(paths, texts):
        path.write_text(text)
    first, second, third = map(compile_gate._code, paths)
    assert first == second != third
