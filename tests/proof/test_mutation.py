"""The mutation tool: its table, its verdicts, and a sample of mutants."""

import ast
import builtins
import json
import os
import subprocess
import symtable
import sys

import pytest

from benchmarks import ROOT

SAMPLE = "^(embedding: scaled twice|cross_entropy: one g for all rows)$"


@pytest.fixture(scope="module")
def mutation():
    from benchmarks.proof import mutation

    return mutation


@pytest.fixture
def untested(mutation, monkeypatch):
    """Checkouts hold what mutants are planted in, for runs that do not start pytest."""
    monkeypatch.setattr(mutation, "COPIED", ("fastformer", "kernels"))
    monkeypatch.setattr(mutation.Checkout, "imports_its_own", lambda self: True)


def syntax(source):
    return ast.dump(ast.parse(source))


def test_every_mutant_can_be_planted(mutation):
    """Its text stands once in its function, and what it becomes is Python."""
    names = [(m.kernel, m.name) for m in mutation.MUTANTS]
    assert len(set(names)) == len(names) >= 60
    assert set(mutation.EQUIVALENT) <= set(names)
    for mutant in mutation.MUTANTS:
        original = (ROOT / mutant.file()).read_text()
        planted = mutant.planted()
        assert planted != original, mutant
        assert all((ROOT / test.partition("::")[0]).exists() for test in mutant.quick())
        compile(planted, str(mutant), "exec")
        assert unknown_names(planted) == set(), mutant  # else any test that calls it fails
    covered = {m.kernel for m in mutation.MUTANTS}
    assert covered <= set(mutation.COVERED_BY)
    assert set(mutation.COVERED_BY) == set(mutation.FUZZED)
    assert set(mutation.COVERED_BY) == {
        mutation.kernel_of(f) for f in mutation.DRAWN_FROM["kernels"]
    }
    files = {p.relative_to(ROOT).as_posix() for p in (ROOT / "kernels").rglob("*.py")}
    files -= {"kernels/interpreter.py", *(f for f in files if f.endswith("__init__.py"))}
    kernels = mutation.DRAWN_FROM["kernels"]
    assert {f for f in kernels if f.startswith("kernels/")} == files
    assert covered >= {mutation.kernel_of(f) for f in files} - {"registration"}
    for names in mutation.COVERED_BY.values():
        assert all((ROOT / "tests" / name).exists() for name in names)
    for test in sum(mutation.SEEN_BY.values(), ()):
        file, _, function = test.partition("::")
        assert f"def {function}(" * bool(function) in (ROOT / "tests" / file).read_text()
    assert set(mutation.SEEN_BY) <= {c.operator for c in mutation.candidates()}
    for file, functions in mutation.NOT_DRAWN.items():
        source = (ROOT / file).read_text()
        assert all(mutation._lines(source, name) for name in functions)


def unknown_names(source):
    """Names that a file reads as global and nothing in it defines."""
    module = symtable.symtable(source, "", "exec")
    tables, read = [module], set()
    for table in tables:
        tables += table.get_children()
        read |= {x.get_name() for x in table.get_symbols() if x.is_global() and x.is_referenced()}
    return read - set(module.get_identifiers()) - set(dir(builtins)) - {"__file__"}


def test_a_draw_is_of_changes_that_are_python(mutation):
    """Over a thousand to draw from; the same ones for a seed, of every operator and every file."""
    assert len(mutation.candidates()) >= 1000
    chosen = mutation.drawn(60, seed=1)
    assert chosen == mutation.drawn(60, seed=1) != mutation.drawn(60, seed=2)
    assert len({(m.kernel, m.name) for m in mutation.drawn(10**6, seed=1)}) == len(
        mutation.candidates()
    )
    assert {m.change.operator for m in chosen} == {c.operator for c in mutation.candidates()}
    assert len({m.kernel for m in chosen}) > 6
    originals = {file: syntax((ROOT / file).read_text()) for file in {m.file() for m in chosen}}
    assert [m for m in chosen if syntax(m.planted()) == originals[m.file()]] == []


@pytest.mark.parametrize("of, n", [("api", 300), ("models", 60)])
def test_a_draw_of_the_modules_is_weighted_by_lines(mutation, of, n):
    """A file's share of the draw is its share of the lines of code, whatever it has of changes."""
    files = mutation.DRAWN_FROM[of]
    for name in mutation.EXECUTED_BY[of]:
        assert mutation.is_there(f"tests/{name}") or (ROOT / "tests" / name).exists(), name
    lines = {f: len(mutation.lines_within(of, f)) for f in files}
    chosen = mutation.drawn(n, seed=1, of=of)
    assert chosen == mutation.drawn(n, seed=1, of=of) != mutation.drawn(n, seed=2, of=of)
    assert len({(m.kernel, m.name) for m in chosen}) == n
    for file in files:
        share = n * lines[file] / sum(lines.values())
        assert abs(sum(m.file() == file for m in chosen) - share) <= 1
        parts = mutation.DRAWN_WITHIN.get(of, {}).get(file, ("",))
        assert all(m.function.startswith(parts) for m in chosen if m.file() == file)
    originals = {file: syntax((ROOT / file).read_text()) for file in {m.file() for m in chosen}}
    assert [m for m in chosen if syntax(m.planted()) == originals[m.file()]] == []


SOURCE = '''"""Text."""
import os

class A:
    x: int = (
        3
    )

    def f(self, y=1):
        """Text."""
        if y and (
            y > 2
        ):
            return g(
                y,
            )
        return 0
'''


@pytest.mark.parametrize(
    "line, first, last",
    [(6, 4, 17), (9, 9, 17), (11, 11, 13), (12, 11, 13), (15, 14, 16), (17, 17, 17)],
)
def test_lines_of_a_statement(mutation, line, first, last):
    assert list(mutation.statement_lines(SOURCE, line)) == [*range(first, last + 1)]
    assert mutation.code_lines(SOURCE) == {2, 4, 5, 6, 9, 11, 12, 14, 15, 17}


def test_lines_are_recorded(mutation, tmp_path):
    """Of each test those that it executes, in a process that it starts as well."""
    (tmp_path / "a.py").write_text("def f(x):\n    if x:\n        return 1\n    return 2\n")
    (tmp_path / "test_a.py").write_text(
        "import subprocess, sys, a\n"
        "def test_here():\n    a.f(0)\n"
        "def test_there():\n"
        "    subprocess.run([sys.executable, '-c', 'import a; a.f(1)'], check=True)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.proof.mutation_lines"]
    subprocess.run(
        [*command, "test_a.py"],
        cwd=tmp_path, check=True,
        env={
            **os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "LINES_OF": "a.py",
            "LINES_IN": str(tmp_path / "lines"),
        },
    )  # fmt: skip
    executed = mutation.Executed(tmp_path / "lines")
    assert executed.tests("a.py", range(4, 5)) == ["test_a.py::test_here"]
    assert executed.tests("a.py", range(3, 4)) == ["test_a.py::test_there"]
    assert {*executed.tests("a.py", range(2, 3))} == {
        "test_a.py::test_here",
        "test_a.py::test_there",
    }
    assert executed.tests("a.py", range(5, 6)) == []


def test_the_quickest_test_of_each_function_comes_first(mutation, tmp_path):
    costs = {"a[1]": 1.0, "a[2]": 2.0, "b[1]": 5.0, "b[2]": 50.0, "c": 3.0, "d": 0.5}
    texts = [
        json.dumps({"test": test, "seconds": cost, "lines": [["x.py", 2 if test == "d" else 1]]})
        for test, cost in costs.items()
    ]
    (tmp_path / "1").write_text("\n".join(texts))
    executed = mutation.Executed(tmp_path)
    assert executed.tests("x.py", range(1, 2), 12.0) == ["a[1]", "c", "b[1]", "a[2]"]


OPERATORS = [
    ("a comparison", "ok = i < n", "ok = i <= n"),
    ("int64 dropped", "p = i.to(tl.int64) * s", "p = (i) * s"),
    ("a mask removed", "x = load(p, mask=i < n, other=0.0)", "x = load(p)"),
    ("a guard dropped", "ok = a & b", "ok = (b)"),
    ("a term dropped", "x += y", "x = y"),
    ("a statement removed", "x = f(x)", "pass"),
    ("a stride swapped", "p = i * s_qm", "p = i * s_qh"),
    ("a stride swapped", "p, q = strides.q_m, strides.q_h", "p, q = strides.q_h, strides.q_h"),
    ("arguments swapped", "f(a, b, C)", "f(b, a, C)"),
    ("arguments swapped", "f(size.M, size.N)", "f(size.N, size.M)"),
    ("a condition dropped", "y = a if c else b", "y = (b)"),
    ("a number minus 1", "y = x + 2", "y = x + 1"),
    ("a field left out of a key", "key = (a, b)", "key = (a,)"),
    ("a flag flipped", "f(on=True)", "f(on=False)"),
    ("a refusal removed", "raise ValueError(f'{x + 1}')", "pass"),
]


@pytest.mark.parametrize("operator, old, new", OPERATORS)
def test_operators(mutation, operator, old, new):
    """Each makes the change that it is named for, in place."""
    source = f'def f(s_qm, s_qh, s_km, x):\n    """Not 1 < 2."""\n    {old}\n'
    made = [c for c in mutation.changes("a.py", source) if c.operator == operator]
    assert all(c.function == "f" and c.line == 3 for c in made)
    assert source.replace(old, new) in [c.apply(source) for c in made]


NOTHING = {  # by the change that would be made
    "a bitcast": ("y = x.to(tl.uint32, bitcast=True)", "bitcast=False"),
    "a narrow integer": ("y = x.to(tl.int32)", "y = (x)"),
    "strides of nothing": ("s = (0, 0, 0)", "(0, 1, 0)"),
    "a placeholder": ("slope = 0.0", "1.0"),
    "an assertion": ("raise AssertionError(x)", "pass"),
    "the wider factor of a group": ("y = x.to(case.acc) * z.to(case.acc)", "(x) * z.to"),
    "the wider factor": ("y = x.to(ACC) * z.to(ACC)", "(x) * z.to"),
    "the wider sum": ("y = zeros(ACC)\n    y += x.to(ACC)", "y += (x)"),
    "the type it has": ("y = tl.where(c, x, 0.0).to(x.dtype)", "0.0))\n"),
    "a hint": ("x = tl.multiple_of(x, 8)", "pass"),
    "tiles": ("y = 256 if INTERPRETED else 128", "257"),
    "a wider index": ("if WIDE:\n        x = x.to(tl.int64)", "if True"),
    "a guard more": ("if EDGE:\n        x = tl.where(a, x, 0.0)", "if True"),
    "elementwise": ("tl.store(p, load(p, mask=ok, other=0.0), mask=ok)", "other=1.0"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_changes_that_no_run_can_show_are_left_out(mutation, case):
    statement, change = NOTHING[case]
    source = f"@jit\ndef f(x):\n    {statement}\n"
    assert not [c for c in mutation.changes("a.py", source) if change in c.apply(source)]


REAL = {  # beside them
    "a wide integer": ("y = x.to(tl.int64)", "y = (x)"),
    "a stride of nothing and one": ("s = (0, 1)", "(1, 1)"),
    "the only wide factor": ("y = x.to(ACC) * z", "(x)"),
    "another type": ("y = tl.where(c, x, 0.0).to(z.dtype)", "0.0))\n"),
    "a guard less": ("if EDGE:\n        x = tl.where(a, x, 0.0)", "if False"),
    "always": ("if EDGE:\n        x = x + 1", "if True"),
    "elements that meet": ("tl.store(p, dot(load(p, mask=ok, other=0.0), x), mask=ok)", "nan"),
    "a number that is chosen": ("y = tl.where(c, x, 0.0)", 'where(c, x, float("nan"))'),
    "another mask": ("tl.store(p, load(p, mask=ok, other=0.0), mask=a)", "nan"),
    "a read out of bounds": ("tl.store(p, load(p, mask=ok, other=0.0), mask=ok)", "load(p)"),
}


@pytest.mark.parametrize("case", REAL)
def test_changes_beside_them_are_made(mutation, case):
    statement, change = REAL[case]
    source = f"@jit\ndef f(x):\n    {statement}\n"
    assert [c for c in mutation.changes("a.py", source) if change in c.apply(source)]


def test_a_draw(mutation, untested, monkeypatch, tmp_path, capsys):
    """It goes on where it stopped, and its score is that of the first time."""
    answers = {"quick": 1, "others": 0}

    def run(self, tests, limit):
        changed = any(
            (ROOT / file).read_text() != (self.folder / file).read_text()
            for file in mutation.DRAWN_FROM["kernels"]
        )
        status = answers["quick" if "quick" in tests else "others"] if changed else 0
        return status, "FAILED tests/test_a.py::test_b - E\n" if status else ""

    monkeypatch.setattr(mutation.Checkout, "pytest", run)
    monkeypatch.setattr(mutation.Mutant, "quick", lambda self: ["quick"])  # of whichever file
    monkeypatch.setattr(mutation.Mutant, "others", lambda self: [["others"], ["more"]])
    stem = tmp_path / "mutation_draw"
    words = ["--draw", "2", "--seed", "3", "--workers", "1", "--out", str(tmp_path)]
    assert mutation.main(words) == 0
    assert mutation.Draw.load(stem).counts(mutation.Draw.load(stem).verdicts) == {"killed": 2}

    answers["quick"] = 0
    words[3] = "4"
    assert mutation.main([*words, "--quick"]) == 1
    assert {v.verdict for v in mutation.Draw.load(stem).verdicts} == {"lives"}
    assert mutation.main(words) == 1
    assert {v.verdict for v in mutation.Draw.load(stem).verdicts} == {"survived"}
    assert mutation.Draw.load(stem).counts(mutation.Draw.load(stem).verdicts) == {"open": 2}
    answers["others"] = 1
    assert mutation.main([*words, "--tests", "tests/test_a.py"]) == 0
    found = mutation.Draw.load(stem)
    assert found.counts(found.verdicts) == {"killed since": 2}
    assert found.line() in found.markdown()
    assert "saw 0 at first (0.0%)" in capsys.readouterr().out

    answers["quick"], words[1] = 1, "3"
    assert mutation.main(words) == 0
    larger = mutation.Draw.load(stem)
    assert larger.size == 3 and {*found.verdicts} < {*larger.verdicts}
    assert larger.counts(larger.verdicts) == {"killed since": 2, "killed": 1}

    words[3] = "5"
    assert mutation.main([*words, "--add"]) == 0 == mutation.main(words)
    both = mutation.Draw.load(stem)
    assert (both.seed, both.earlier) == (5, [larger])
    assert both.counts(both.all_verdicts()) == {"killed since": 2, "killed": 4}
    drawn = "3 were drawn (seed 5), after 3 of an earlier state of the code (seed 4), and 6 tried"
    assert f"{drawn}: the tests saw 4 at first (66.7%)" in both.markdown()


def test_a_draw_of_the_modules(mutation, untested, monkeypatch, tmp_path, capsys):
    """The tests that execute a statement try it; where there are none, it survives at once."""
    files, ran = mutation.DRAWN_FROM["api"], []

    def run(self, tests, limit):
        if all((ROOT / f).read_text() == (self.folder / f).read_text() for f in files):
            return 0, ""
        ran.append(tests)
        return 1, f"FAILED {tests[0]} - E\n"

    monkeypatch.setattr(mutation.Checkout, "pytest", run)
    lines = [[f, n] for f in files if "/cache/" not in f for n in range(1, 3000)]
    (tmp_path / "lines").mkdir()
    found = {"test": "tests/test_a.py::test_b", "seconds": 1.0, "lines": lines}
    (tmp_path / "lines" / "1").write_text(json.dumps(found))
    words = ["--draw", "20", "--seed", "3", "--of", "api", "--out", str(tmp_path)]
    words += ["--lines", str(tmp_path / "lines"), "--workers", "1"]
    assert mutation.main(words) == 1
    draw = mutation.Draw.load(tmp_path / "mutation_draw_api")
    assert {v.verdict for v in draw.verdicts if v.kernel.startswith("cache/")} == {"survived"}
    assert {v.verdict for v in draw.verdicts if not v.kernel.startswith("cache/")} == {"killed"}
    assert ran == [["tests/test_a.py::test_b"]] * sum(
        not v.kernel.startswith("cache/") for v in draw.verdicts
    )
    assert mutation.main([*words, "--tests", "tests/test_new.py"]) == 0
    draw = mutation.Draw.load(tmp_path / "mutation_draw_api")
    assert {v.first for v in draw.verdicts if v.kernel.startswith("cache/")} == {"survived"}
    assert mutation.main(["--print", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert draw.line() in printed and "--draw 20 --seed 3 --of api` makes" in printed
    assert ran[-1] == ["tests/test_new.py"]


def test_every_verdict_is_there(mutation):
    """And of the kernels as they are: else `python -m benchmarks.proof.mutation --resume`."""
    verdicts = mutation.load(mutation.RESULTS / "mutation")
    known = {(v.kernel, v.name) for v in verdicts}
    assert known == {(m.kernel, m.name) for m in mutation.MUTANTS}
    assert [v for v in verdicts if not mutation.still_holds(v)] == []


def test_every_survivor_of_the_draw_is_explained(mutation):
    """It has become a test, or is named as equivalent with its reason."""
    draws = [mutation.Draw.load(mutation.RESULTS / name) for name in mutation.REPORTS.values()]
    verdicts = [v for drawn in draws for v in drawn.all_verdicts()]
    for drawn in [d for last in draws for d in (*last.earlier, last)]:
        assert len(drawn.verdicts) > drawn.size * 0.8 and drawn.candidates >= 1000
    assert [v for v in verdicts if not v.good()] == []
    named = {(v.kernel, v.name) for v in verdicts if v.verdict in ("survived", "lives")}
    assert named == set(mutation.DRAWN_EQUIVALENT)
    for test in {v.test for v in verdicts if "::" in v.test}:
        file, function = test.partition("[")[0].split("::")
        assert f"def {function}(" in (ROOT / file).read_text(), test


@pytest.mark.with_all
def test_few_mutants_are_seen_with_all_alone(mutation):
    """The tests that the verdicts name run without --all, but for those of 3% of the mutants."""
    verdicts = mutation.load(mutation.RESULTS / "mutation")
    for data in mutation.RESULTS.glob("mutation_draw*.json"):
        verdicts += mutation.Draw.load(data.with_suffix("")).all_verdicts()
    killed = [v for v in verdicts if v.verdict == "killed" and "::" in v.test]
    seen = {v.test for v in killed}
    files = sorted({test.partition("::")[0] for test in seen})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *files]
    listed = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    assert len(seen) > 100 and seen - {*listed.splitlines()} == mutation.SEEN_WITH_ALL
    assert sum(v.test in mutation.SEEN_WITH_ALL for v in killed) <= 0.03 * len(killed)


@pytest.mark.with_all
def test_a_sample_of_them_is_killed(mutation, device, tmp_path, capsys):
    pytest.importorskip("triton")
    if device.type == "cuda":
        pytest.skip("the sample is chosen for the interpreter")
    assert mutation.main(["--only", SAMPLE, "--workers", "1", "--out", str(tmp_path)]) == 0
    assert "2 mutants: 2 killed, 0 left" in capsys.readouterr().out
    verdicts = mutation.load(tmp_path / "mutation")
    assert [v.verdict for v in verdicts] == ["killed"] * 2
    assert all(v.test.startswith("tests/ops/test_") and mutation.still_holds(v) for v in verdicts)
    assert mutation.main(["--print", "--out", str(tmp_path)]) == 0
    assert "| all | " in capsys.readouterr().out


OUTCOMES = {
    "passes": (0, "", "survived", ""),
    "fails": (1, "FAILED tests/test_a.py::test_b[x, y] - assert\n", "killed", "test_b[x, y]"),
    "fails, brackets in its name": (
        1,
        "FAILED tests/test_a.py::test_b[\\[x]-y] - E\n",
        "killed",
        "y]",
    ),
    "fails, no parameters": (1, "FAILED tests/test_a.py::test_b - E\n", "killed", "test_b"),
    "cannot be imported": (2, "ERROR tests/test_a.py - NameError\n", "killed", "test_a.py"),
    "crashes": (-11, "", "killed", "crash, signal 11"),
    "hangs": (None, "", "time out", ""),
}


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_verdicts(mutation, untested, monkeypatch, tmp_path, outcome):
    status, output, verdict, test = OUTCOMES[outcome]
    clean = []

    def run(self, tests, limit):
        changed = {
            file
            for file in mutation.DRAWN_FROM["kernels"]
            if (ROOT / file).read_text() != (self.folder / file).read_text()
        }
        if not changed:
            clean.append(tests)
            return 0, ""
        assert changed == {"kernels/embedding.py"}
        return status, output

    monkeypatch.setattr(mutation.Checkout, "pytest", run)
    words = ["--only", "embedding: scaled twice", "--out", str(tmp_path), "--workers", "1"]
    assert mutation.main(words) == (0 if verdict == "killed" else 1)
    (found,) = mutation.load(tmp_path / "mutation")
    assert found.verdict == verdict and found.test.endswith(test)
    assert len(clean) == (status is None or "FAILED" in output or "ERROR" in output)
    assert mutation.main([*words, "--resume"]) == (0 if verdict == "killed" else 1)
    assert len(mutation.load(tmp_path / "mutation")) == 1
    mutation.main(["--only", "embedding: dropout of another tile", *words[2:]])
    assert len(mutation.load(tmp_path / "mutation")) == 2  # the other one stays


@pytest.mark.parametrize("words", [["--only", "("], ["--only", "none"], ["--workers", "0"]])
def test_bad_options(mutation, words):
    with pytest.raises(SystemExit) as ended:
        mutation.main(words)
    assert ended.value.code == 2


def test_a_test_that_fails_by_itself_kills_nothing(mutation, untested, monkeypatch, tmp_path):
    failed = 1, "FAILED tests/test_a.py::test_b - assert\n"
    monkeypatch.setattr(mutation.Checkout, "pytest", lambda *_: failed)
    with pytest.raises(RuntimeError, match="test_b fails without any mutant"):
        mutation.main(["--only", "embedding: scaled twice", "--out", str(tmp_path)])


def test_tests_that_never_end_by_themselves_kill_nothing(mutation, untested, monkeypatch, tmp_path):
    monkeypatch.setattr(mutation.Checkout, "pytest", lambda *_: (None, ""))
    with pytest.raises(RuntimeError, match="exceeds the limit without any mutant as well"):
        mutation.main(["--only", "embedding: scaled twice", "--out", str(tmp_path)])


def test_a_mutant_that_is_named_equivalent_has_to_survive(mutation):
    kernel, name = next(iter(mutation.EQUIVALENT))
    verdict = mutation.Verdict(kernel, name, "_forward", "survived", "", 1.0, "")
    assert verdict.good() and "1 | 0 | 1 | 0 | 0 |" in mutation.markdown([verdict])
    assert not mutation.Verdict(kernel, name, "_forward", "killed", "t", 1.0, "").good()
