"""Every shipped configuration compiles for its architecture, into what it should.

benchmarks/results/compile.json holds what the compiler made of each case, with a digest of the
sources and one of the GPU IR. Without --all, only the cases whose sources have changed are asked.
With it every twelfth of the others is translated too, and with --slow all of them; those whose GPU
IR differs from the data are compiled.
"""

import pytest

pytest.importorskip("triton")

from benchmarks.proof import cases, compile_gate, cost, sass

TABLE = cases.Table.read()
COMPARABLE = TABLE.of(compile_gate.checks())
CHANGED = TABLE.stale(cases.digests())
ENTRIES = cost.read(TABLE)
WRITE = "if that is meant: python -m benchmarks.proof.compile_gate --write"

KNOWN = [name for name in cases.CASES if name not in CHANGED]
SOME = [pytest.param(name, marks=pytest.mark.with_all) for name in KNOWN[::12]]
OTHERS = [
    pytest.param(name, marks=[pytest.mark.with_all, pytest.mark.with_slow])
    for n, name in enumerate(KNOWN)
    if n % 12
]


@pytest.mark.parametrize("name", [*CHANGED, *SOME, *OTHERS])
def test_case(compiled, name):
    """It is translated as when the data were written, which hold no problem; or it compiles without
    one and into what the data say: no loop of 16-bit attention waits for all of its copies, and
    none has grown by 3%.
    """
    known = TABLE.cases.get(name)
    if COMPARABLE and known:
        answer = compiled(name, translate=True)
        if "error" not in answer and cases.translation(answer) == known["translation"]:
            return
    answer = compiled(name)
    found = compile_gate.wrong(name, answer)
    assert not found, "\n".join(found)
    if not COMPARABLE:
        return
    assert known, WRITE
    kernels = [compile_gate.Kernel(*row) for row in known["kernels"]]
    found = compile_gate.differences(compile_gate.rows(answer), kernels)
    found += cost.grown(cost.ledger({name: answer}).get(name, []), ENTRIES[name])
    assert not found, "\n".join([*found, WRITE])


def test_the_data_are_of_these_sources():
    """Else each run compiles the changed cases again."""
    if TABLE.triton != cases.metadata.version("triton"):
        pytest.skip(f"the table is of Triton {TABLE.triton}")
    assert COMPARABLE and not CHANGED, WRITE
    assert [*TABLE.cases] == [*cases.CASES]


@pytest.mark.parametrize("version", cost.GLUON)
def test_what_is_known_of_gluon_on_other_versions(version, monkeypatch):
    """Nothing is wrong with it beside what the lists allow, and they allow nothing that is not
    there.
    """
    short, table = version[:3], cases.Table.read(cost.of_gluon(version))
    assert table.triton == version
    spills = compile_gate.SPILLS + compile_gate.SPILLS_OF[short]
    monkeypatch.setattr(cost, "KNOWN_LOCAL", cost.LOCAL + cost.LOCAL_OF[short])
    monkeypatch.setattr(cost, "KNOWN_APART", cost.APART_OF.get(short, ()))
    entries = [e for found in cost.read(table).values() for e in found]
    assert not cost.misused_registers(entries) + cost.waits(entries)
    kernels = [(n, compile_gate.Kernel(*k)) for n, c in table.cases.items() for k in c["kernels"]]
    own = [(name, kernel) for name, kernel in kernels if kernel.name in cost.OVERLAPPED]
    for name, kernel in own:
        known = [n for part, of, n in spills if part in name and of in kernel.name]
        assert kernel.spill <= max(known, default=0) and kernel.serialised == "-", (name, kernel)
    for part, of, n in compile_gate.SPILLS_OF[short]:
        found = [kernel.spill for name, kernel in own if part in name and of in kernel.name]
        assert n in found or "Gluon" not in part, (part, of)
    for part, of, n in cost.LOCAL_OF[short]:
        found = [e.local for e in entries if part in e.case and of == e.kernel]
        assert any(n - 1 < local <= n for local in found) or "Gluon" not in part, (part, of)
    for part, of in cost.APART_OF.get(short, ()):
        assert any(e.overlap != 1 for e in entries if part in e.case and of == e.kernel)


def test_a_translation_is_of_what_is_launched(compiled):
    """It is the same where the case is compiled to the end, and another one for another kernel,
    tile or grid.
    """
    name = "sm_90 layer_norm bf16 N=512"
    whole, part = compiled(name), compiled(name, translate=True)
    first = cases.translation(whole)
    assert cases.translation(part) == first and "registers" not in part["records"][0]
    assert cases.translation(compiled(f"{name} unbiased", translate=True)) != first
    for fact, value in (("options", {}), ("blocks", dict(columns=1)), ("programs", 1)):
        other = {**part, "records": [{**part["records"][0], fact: value}, *part["records"][1:]]}
        assert cases.translation(other) != first


def test_the_digest_of_gpu_ir():
    """Of what it computes, whatever lines of whatever file it is from."""
    ir = '#loc = loc("a.py":3:1)\n%0 = tt.load %1 : tensor<8xf32> loc(#loc12)\n'
    moved = ir.replace("a.py", "b.py").replace("#loc12", "#loc7")
    assert sass.digest(ir) == sass.digest(moved)
    assert sass.digest(ir) != sass.digest(ir.replace("8x", "4x"))


def test_what_makes_a_case_stale(monkeypatch):
    """A change of its own kernels or of those of all, and no comment, docstring or import."""
    norm = cases.CASES["sm_90 layer_norm bf16 N=512"]
    loss = cases.CASES["sm_90 cross_entropy bf16 V=512"]
    code, before = cases._code, (cases.digest(norm), cases.digest(loss))

    def changed(*names):
        monkeypatch.setattr(
            cases,
            "_code",
            lambda path: code(path) + "x = 1" * bool({path.name, path.parent.name} & {*names}),
        )
        return cases.digest(norm) != before[0], cases.digest(loss) != before[1]

    assert changed() == (False, False)
    assert changed("layer_norm") == (True, False)
    assert changed("common.py") == changed("compile_worker.py") == (True, True)
    assert changed("forward.py", "interpreter.py") == (False, False)


def test_what_is_code(tmp_path):
    texts = ["import a\nx = 1\n", '"""Of x."""\nfrom b import a  # a\nx = 1\n', "import a\nx = 2\n"]
    paths = [tmp_path / f"{n}.py" for n in range(3)]
    for path, text in zip(paths, texts):
        path.write_text(text)
    first, second, third = map(cases._code, paths)
    assert first == second != third
