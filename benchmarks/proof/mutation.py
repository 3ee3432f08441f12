"""Measures the mutation score: the share of the bugs planted in the kernels that the tests see.

    python -m benchmarks.proof.mutation                  all mutants of tests/mutants.py, 2 workers
    python -m benchmarks.proof.mutation --only '^attention.*int32'      only these; keeps the others
    python -m benchmarks.proof.mutation --resume         keeps the good verdicts
    python -m benchmarks.proof.mutation --draw 300 --seed 7      draws 300; the same command resumes
    python -m benchmarks.proof.mutation --draw 200 --seed 7 --of api  from modules that users call
    python -m benchmarks.proof.mutation --draw 100 --seed 7 --of models  from today's models
    python -m benchmarks.proof.mutation --draw 60 --of models --add  60 more, by another seed

A mutant is one change of text in one function, in a copy of the checkout. There pytest runs the
tests that cover the file, quick ones first, and stops at the first failure. A test kills a mutant
if it fails, or crashes the process, with the change and passes without it. Otherwise the mutant
survives, or runs into the time limit. The checks that plant bugs themselves do not run, because a
change of the text that they replace tests nothing.

The mutants of tests/mutants.py are written by people: they are a list of regressions. `--draw`
draws mutants by a seed from all changes that the operators of mutation_operators.py make in the
kernels, their launchers, the autograd function, the dispatch and the packing. The quick tests try
all of them first, and the other tests try those that live. The same command resumes the draw, and
tries the survivors again; the score of a draw counts the first trial only. A larger draw by
the same seed keeps the verdicts of the smaller one. A draw by another seed, or after a change of
these files, takes the place of the one that is there; with `--add` it stands beside it.

`--of api` draws from the modules that users call instead, and `--of models` from rotary positions,
gated activations, packing, saved models and the drop-ins of Hugging Face's models: tests/mutants.py
lists the files. The share of a file is its share of the lines of code. A first run of the tests
without a mutant records which of them execute which lines. A mutant is tried by the tests that
execute its statement, the quickest of each test function first, without the slowest where all take
more than 150 seconds (`--enough`). One that no test executes survives at once.

Each mutant updates benchmarks/results/mutation.json (mutation_draw for a draw, mutation_draw_api or
mutation_draw_models for one by lines). The exit status is 1 if a mutant is left that is not
known to be equivalent.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import os
import queue
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import ROOT, folder
from benchmarks.proof.mutation_lines import ENOUGH, Executed, code_lines, statement_lines
from benchmarks.proof.mutation_operators import Change, changes, draw, draw_by_weight

RESULTS = ROOT / "benchmarks" / "results"
REPORTS = {
    "kernels": "mutation_draw",
    "api": "mutation_draw_api",
    "models": "mutation_draw_models",
}
COPIED = (
    "fastformer", "kernels", "tests", "benchmarks", "examples", "docs", "conftest.py",
    "pyproject.toml", "README.md",
)  # fmt: skip
QUICK = "test_a_planted_bug_is_caught[None]"
FREQUENT = 6  # tests that have killed most of a file: they come first

sys.path.insert(0, str(ROOT / "tests"))
from mutants import (
    COVERED_BY,
    DRAWN_EQUIVALENT,
    DRAWN_FROM,
    DRAWN_WITHIN,
    EQUIVALENT,
    EXECUTED_BY,
    FUZZED,
    MORE,
    NOT_DRAWN,
    PLANTED,
    SEEN_BY,
    SEEN_WITH_ALL,
)

SHARED = ("common", "launch")


def kernel_files(kernel: str) -> list[Path]:
    """Return the files of a kernel: one, or those of a folder."""
    path = ROOT / "kernels" / kernel
    return sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def kernel_of(file: str) -> str:
    """Return the kernel of a file: its stem, or the name of its folder in kernels/; for a module
    that is drawn for its lines, its path in fastformer/.
    """
    path = Path(file)
    if file not in DRAWN_FROM["kernels"]:
        return str(path.relative_to("fastformer").with_suffix(""))
    return path.parent.name if path.parent.parent.name == "kernels" else path.stem


@dataclass(frozen=True)
class Mutant:
    """A mutant of tests/mutants.py."""

    kernel: str
    name: str
    function: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.name}"

    def file(self) -> str:
        """Return the file that holds the function, of the kernel or shared by all kernels."""
        for kernel in (self.kernel, *SHARED):
            for path in kernel_files(kernel):
                source = path.read_text()
                if _lines(source, self.function) and (self.function or self.old in source):
                    return path.relative_to(ROOT).as_posix()
        raise AssertionError(f"{self}: there is no {self.function}")

    def planted(self) -> str:
        """Return the text of its file with the change."""
        return "".join(self._changed())

    def _changed(self) -> tuple[str, str, str]:
        """Return what stands before the function, the changed function, and what follows it."""
        source = (ROOT / self.file()).read_text()
        place = _lines(source, self.function)
        assert place is not None, f"{self}: there is no {self.function}"
        lines = source.splitlines(True)
        first, last = place
        body = "".join(lines[first:last])
        assert body.count(self.old) == 1, f"{self}: {body.count(self.old)} times in {self.function}"
        body = body.replace(self.old, self.new)
        return "".join(lines[:first]), body, "".join(lines[last:])

    def digest(self) -> str:
        """Return a digest of the changed function without comments and docstrings, or of a change
        outside of functions.
        """
        body = _code(self._changed()[1]) if self.function else self.new
        return hashlib.sha256(body.encode()).hexdigest()[:16]

    def quick(self) -> list[str]:
        """Return the tests that see most changes of the file; some files have none."""
        own = [f"tests/ops/test_{self.kernel}.py::{QUICK}"] if self.kernel in PLANTED else []
        fuzz = [
            f"tests/ops/test_fuzz.py::{test}{op}]"
            for test in ("test_fakes[", "test_fuzz[triton-")
            for op in FUZZED[self.kernel]
        ]
        return [*own, *fuzz]

    def others(self) -> list[list[str]]:
        """Return all tests that cover it, in several runs, the most successful tests first."""
        files = [[f"tests/{name}"] for name in COVERED_BY[self.kernel]]
        return [tests for tests in (_frequent(self.kernel, self.function), *files) if tests]


@dataclass(frozen=True)
class Drawn(Mutant):
    """A mutant that an operator makes."""

    change: Change
    of: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.function}: {self.change.operator}: {self.name}"

    def file(self) -> str:
        return self.change.file

    def planted(self) -> str:
        return self.change.apply((ROOT / self.file()).read_text())

    def quick(self) -> list[str]:
        """Return first the tests that are written for the operator."""
        return [
            *(f"tests/{test}" for test in SEEN_BY.get(self.change.operator, ())),
            *super().quick(),
        ]

    def digest(self) -> str:
        whole = f"{self.change} in {sources(self.of)}"
        return hashlib.sha256(whole.encode()).hexdigest()[:16]


@functools.cache
def _lines(source: str, function: str) -> tuple[int, int] | None:
    """Return the lines of a function, or of a method after a dot; without a name the file."""
    scope: Any = ast.parse(source)
    if not function:
        return 0, len(source.splitlines())
    for name in function.split("."):
        found = [node for node in scope.body if getattr(node, "name", None) == name]
        if not found:
            return None
        (scope,) = found
    return scope.lineno - 1, scope.end_lineno


def _code(function: str) -> str:
    """Return the source of a function in one form, without comments and docstrings."""
    tree = ast.parse(textwrap.dedent(function))
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.FunctionDef, ast.ClassDef))
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


@functools.cache
def _frequent(kernel: str, function: str) -> list[str]:
    """Return the tests that killed most of the function's mutants so far, then of the file's."""
    functions = {(m.kernel, m.name): m.function for m in MUTANTS}
    killed: Counter[str] = Counter()
    for v in load(RESULTS / "mutation"):
        if v.kernel == kernel:
            same = functions.get((v.kernel, v.name)) == function
            killed[v.test.partition("[")[0]] += 1000 if same else 1
    tests = [test.split("::") for test, _ in killed.most_common() if "::" in test]
    there = ["::".join(t) for t in tests if f"def {t[1]}(" in (ROOT / t[0]).read_text()]
    return [test for test in there if "planted" not in test][:FREQUENT]


MUTANTS = [
    Mutant(kernel, name, *change)
    for table in (MORE, PLANTED)
    for kernel, mutants in table.items()
    for name, change in mutants.items()
]


@functools.cache
def sources(of: str) -> str:
    """Return a digest of the files that mutants are drawn from."""
    return _digest(ROOT / file for file in DRAWN_FROM[of])


def commit(of: str) -> str:
    """Return the last commit of these files."""
    words = ["git", "log", "-1", "--format=%h", "--", *DRAWN_FROM[of]]
    return subprocess.run(words, cwd=ROOT, text=True, capture_output=True).stdout.strip()


def _digest(files: Iterable[Path]) -> str:
    texts = "".join(file.read_text() for file in sorted(files))
    return hashlib.sha256(texts.encode()).hexdigest()[:16]


@functools.cache
def candidates(of: str = "kernels") -> list[Change]:
    """Return all changes that can be drawn, in the order of the files, without duplicates."""
    found = [c for file in DRAWN_FROM[of] for c in changes(file, (ROOT / file).read_text())]
    once = {(c.file, c.start, c.end, c.new): c for c in reversed(found)}
    inside = {file: lines_within(of, file) for file in DRAWN_FROM[of]}
    return [
        c
        for c in reversed(once.values())
        if c.function not in NOT_DRAWN.get(c.file, ()) and c.line in inside[c.file]
    ]


def lines_within(of: str, file: str) -> set[int]:
    """Return the lines of code of a file that mutants are drawn from."""
    source = (ROOT / file).read_text()
    names = DRAWN_WITHIN.get(of, {}).get(file, ("",))
    places = [place for name in names if (place := _lines(source, name))]
    assert len(places) == len(names), f"{file} lacks one of {names}"
    return {n for n in code_lines(source) if any(first < n <= last for first, last in places)}


def drawn(n: int, seed: int, of: str = "kernels") -> list[Drawn]:
    """Draw n mutants: of the kernels each operator as often, of the modules each line."""
    texts = {file: (ROOT / file).read_text() for file in DRAWN_FROM[of]}
    if of == "kernels":
        chosen = draw(candidates(of), n, seed)
    else:
        weights = {file: len(lines_within(of, file)) for file in texts}
        chosen = draw_by_weight(candidates(of), weights, n, seed)
    return [
        Drawn(kernel_of(c.file), _place(c, texts[c.file]), c.function, c.old, c.new, c, of)
        for c in chosen
    ]


def _place(change: Change, source: str) -> str:
    """Describe a change: the file, if its kernel has several, line and column, the old and the new
    words, and a word on either side.
    """
    column = change.start - source.rfind("\n", 0, change.start)
    old, new = (_words(text) for text in (change.old, change.new))
    while len(old) > 1 and old[:2] == new[:2]:
        del old[0], new[0]
    while len(old) > 1 and old[-2:] == new[-2:]:
        del old[-1], new[-1]
    path = Path(change.file)
    file = f"{path.stem} " if path.stem != Path(kernel_of(change.file)).name else ""
    return f"{file}{change.line}:{column} `{' '.join(old)}` -> `{' '.join(new)}`"


def _line_and_column(place: str) -> tuple[int, int]:
    """Return the line and the column of what `_place` describes."""
    line, column = place.split(" `")[0].split(" ")[-1].split(":")
    return int(line), int(column)


def _words(text: str) -> list[str]:
    text = re.sub(r",?\s*\)", ")", re.sub(r"\(\s+", "(", text))
    return text.split()


# -------------------------------------------------------------------------------------- the trials


@dataclass(frozen=True)
class Verdict:
    kernel: str
    name: str
    function: str
    verdict: str  # killed, survived, time out; lives: the quick tests pass, others were not run
    test: str  # the test that killed it
    seconds: float
    digest: str  # of the changed function
    operator: str = ""
    first: str = ""  # the first verdict of a mutant that is tried again

    def good(self) -> bool:
        if (self.kernel, self.name) in (DRAWN_EQUIVALENT if self.operator else EQUIVALENT):
            return self.verdict in ("survived", "lives")
        return self.verdict == "killed" or (self.verdict == "time out" and self.operator != "")

    def killed_at_first(self) -> bool:
        return (self.first or self.verdict) in ("killed", "time out")


class Checkout:
    """A copy of the checkout that can be changed, and a process that runs its tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            at = ROOT / name
            if at.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(at, folder / name, ignore=ignored)
            else:
                shutil.copy(at, folder / name)
        self._worker: subprocess.Popen[str] | None = None

    def pytest(self, tests: Sequence[str], limit: float) -> tuple[int | None, str]:
        """Return the exit status, or None past the limit of CPU seconds, and the output."""
        if self._worker is None:
            self._worker = subprocess.Popen(
                [sys.executable, Path(__file__).with_name("mutation_worker.py")],
                cwd=self.folder, env=self.environment(), text=True, bufsize=1,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        assert self._worker.stdin is not None and self._worker.stdout is not None
        print(json.dumps(dict(tests=list(tests), limit=limit)), file=self._worker.stdin)
        answer = json.loads(self._worker.stdout.readline())
        return answer["status"], answer["output"]

    def environment(self) -> dict[str, str]:
        threads = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        return {**os.environ, **threads, "PYTHONPATH": str(self.folder)}

    def imports_its_own(self) -> bool:
        code = "import fastformer.kernels; print(fastformer.kernels.__file__)"
        found = subprocess.run(
            [sys.executable, "-c", code], cwd=self.folder, env=self.environment(), text=True,
            capture_output=True, check=True,
        )  # fmt: skip
        return Path(found.stdout.strip()).resolve().is_relative_to(self.folder.resolve())

    def close(self) -> None:
        if self._worker is not None:
            self._worker.terminate()
            self._worker.communicate()


class Trials:
    """Runs the tests on mutants, in a checkout for each worker."""

    def __init__(self, workers: int, limit: float) -> None:
        self.limit, self.workers = limit, workers
        self._free: queue.Queue[Checkout] = queue.Queue()
        self._passes: dict[tuple[str, ...], bool] = {}  # by tests: whether without any mutant
        self._lock = threading.Lock()
        self._scratch = tempfile.TemporaryDirectory(prefix="mutation-")
        self._clean = Checkout(Path(self._scratch.name) / "clean")
        self._all = [self._clean]
        for n in range(workers):
            self._all.append(Checkout(Path(self._scratch.name) / str(n)))
            self._free.put(self._all[-1])
        if not self._clean.imports_its_own():
            raise RuntimeError("the copy of the checkout does not import its own kernels")

    def __call__(self, mutant: Mutant, *stages: Sequence[str]) -> Verdict:
        """Run the tests of each stage in turn, until one kills the mutant."""
        checkout = self._free.get()
        planted, file = mutant.planted(), checkout.folder / mutant.file()
        original, started = file.read_text(), time.monotonic()
        status, output = 0, ""
        try:
            file.write_text(planted)
            for tests in stages:
                status, output = checkout.pytest(tests, self.limit)
                if status != 0:
                    break
        finally:
            file.write_text(original)
            self._free.put(checkout)
        seconds = time.monotonic() - started
        if status is None:
            self.ends(tests)
        verdict, test = self._read(mutant, status, output)
        return Verdict(
            mutant.kernel, mutant.name, mutant.function, verdict, test, round(seconds, 1),
            mutant.digest(), mutant.change.operator if isinstance(mutant, Drawn) else "",
        )  # fmt: skip

    def _read(self, mutant: Mutant, status: int | None, output: str) -> tuple[str, str]:
        if status is None:
            return "time out", ""
        if status == 0:
            return "survived", ""
        if status < 0:
            return "killed", f"crash, signal {-status}"
        failed = re.search(
            r"^(?:FAILED|ERROR) (\S+\.py(?:::[^\s\[]+(?:\[.*?\](?= - |$))?)?)", output, re.M
        )
        if failed is None and re.search(
            r"ImportError while loading conftest|^\S*Error", output, re.M
        ):
            return "killed", "cannot be imported"
        if failed is None:
            raise RuntimeError(f"{mutant}: pytest ended with {status}:\n{output[-2000:]}")
        test = failed[1]
        if not self.passes(test):
            raise RuntimeError(f"{test} fails without any mutant")
        return "killed", test

    def record(self, tests: Sequence[str], files: Sequence[str], folder: Path) -> None:
        """Record the lines of the files that the tests execute, unless the folder has them."""
        if folder.exists():
            return
        scratch = Path(self._scratch.name) / "lines"
        there = {"LINES_OF": ":".join(files), "LINES_IN": str(scratch)}
        words = ["-p", "benchmarks.proof.mutation_lines", "-q", "-n", str(self.workers)]
        kernels = any(file.startswith("kernels/") for file in files)
        chosen = "not planted" if kernels else "not triton and not planted"
        subprocess.run(
            [sys.executable, "-m", "pytest", *words, "-k", chosen, *tests],
            cwd=self._clean.folder, env={**self._clean.environment(), **there}, check=True,
        )  # fmt: skip
        shutil.copytree(scratch, folder)

    def passes(self, *tests: str) -> bool:
        """Whether the tests pass on the unchanged kernels, within the limit."""
        with self._lock:
            if tests not in self._passes:
                self._passes[tests] = self._clean.pytest(tests, self.limit)[0] == 0
            return self._passes[tests]

    def ends(self, tests: Sequence[str]) -> None:
        """Raise an error if the tests take longer than the limit without a mutant."""
        if not self.passes(*tests):
            raise RuntimeError(f"{' '.join(tests)} exceeds the limit without any mutant as well")

    def close(self) -> None:
        for checkout in self._all:
            checkout.close()
        self._scratch.cleanup()


# ------------------------------------------------------------------------------------- the report


def save(verdicts: Sequence[Verdict], stem: Path) -> None:
    stem.parent.mkdir(parents=True, exist_ok=True)
    order = {(m.kernel, m.name): n for n, m in enumerate(MUTANTS)}
    verdicts = sorted(verdicts, key=lambda v: order[v.kernel, v.name])
    new = stem.with_suffix(".new")  # another worker may be reading
    new.write_text(json.dumps([asdict(v) for v in verdicts], indent=0) + "\n")
    new.replace(stem.with_suffix(".json"))


def load(stem: Path) -> list[Verdict]:
    path = stem.with_suffix(".json")
    return [Verdict(**v) for v in json.loads(path.read_text())] if path.exists() else []


def still_holds(verdict: Verdict) -> bool:
    """Whether the verdict is good, and the text of the mutant has not changed since."""
    for mutant in MUTANTS:
        if (mutant.kernel, mutant.name) == (verdict.kernel, verdict.name):
            return verdict.good() and verdict.digest == mutant.digest()
    return False


def markdown(verdicts: Sequence[Verdict]) -> str:
    lines = [
        "# Mutation score",
        "",
        "Bugs planted in the kernels and their launchers, one at a time, and the first test that "
        "fails for it: `python -m benchmarks.proof.mutation` makes the data from tests/mutants.py.",
        "",
        "| kernel file | mutants | tried | killed | equivalent | survived | time out |",
        "|---|---|---|---|---|---|---|",
    ]
    for kernel in [*COVERED_BY, None]:
        mine = [v for v in verdicts if kernel in (None, v.kernel)]
        there = sum(kernel in (None, m.kernel) for m in MUTANTS)
        found = Counter("equivalent" if _same(v) else v.verdict for v in mine)
        counts = [found[n] for n in ("killed", "equivalent", "survived", "time out")]
        cells = [kernel or "all", there, len(mine), *counts]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    minutes = sum(v.seconds for v in verdicts) / 60
    lines += [
        "",
        f"{minutes:.0f} minutes in all, over the number of workers.",
        "",
        "Equivalent:",
        "",
    ]
    lines += [f"- {kernel}, {name}: {why}" for (kernel, name), why in EQUIVALENT.items()]
    lines += [
        "",
        "| kernel file | function | mutant | verdict | by | s |",
        "|---|---|---|---|---|---|",
    ]
    for v in verdicts:
        test = f"`{v.test.removeprefix('tests/').replace('|', ' ')}`" if v.test else "-"
        test += " (--all)" * (v.test in SEEN_WITH_ALL)
        verdict = "equivalent" if _same(v) else v.verdict
        cells = [v.kernel, f"`{v.function}`" if v.function else "-", v.name, verdict, test]
        lines.append("| " + " | ".join(cells) + f" | {v.seconds:.0f} |")
    return "\n".join(lines) + "\n"


def _same(verdict: Verdict) -> bool:
    return verdict.verdict == "survived" and verdict.good()


DRAWN = {
    "kernels": "kernels, launchers, autograd and dispatch",
    "api": "modules that users call, in proportion to their lines,",
    "models": "code for today's models (rotary positions, gated activations, packing, drop-ins), "
    "in proportion to its lines,",
}


@dataclass
class Draw:
    """A draw of mutants, and their verdicts."""

    size: int
    seed: int
    candidates: int
    sources: str  # a digest of the files
    tests: str  # a digest of the tests at the start
    verdicts: list[Verdict]
    commit: str = ""  # that holds these sources
    of: str = "kernels"
    earlier: list[Draw] = field(default_factory=list)  # that `--add` has kept

    def save(self, stem: Path) -> None:
        stem.parent.mkdir(parents=True, exist_ok=True)
        self.verdicts.sort(key=lambda v: (v.kernel, *_line_and_column(v.name)))
        stem.with_suffix(".json").write_text(json.dumps(asdict(self), indent=0) + "\n")

    @classmethod
    def load(cls, stem: Path) -> Draw | None:
        path = stem.with_suffix(".json")
        if not path.exists():
            return None
        return cls._of(json.loads(path.read_text()))

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> Draw:
        verdicts = [Verdict(**v) for v in fields["verdicts"]]
        earlier = [cls._of(draw) for draw in fields.get("earlier", ())]
        return cls(**{**fields, "verdicts": verdicts, "earlier": earlier})

    def all_verdicts(self) -> list[Verdict]:
        """Return the verdicts of the earlier draws, and of this one."""
        return [v for draw in (*self.earlier, self) for v in draw.verdicts]

    def counts(self, verdicts: Iterable[Verdict]) -> Counter[str]:
        """Count verdicts: killed at first, killed since by a newer test, equivalent, open."""
        return Counter(
            "killed"
            if v.killed_at_first()
            else "killed since"
            if v.verdict in ("killed", "time out")
            else "equivalent"
            if v.good()
            else "open"
            for v in verdicts
        )

    def line(self) -> str:
        """State the score in a sentence."""
        verdicts = self.all_verdicts()
        found, tried = self.counts(verdicts), len(verdicts)
        seen = found["killed"] + found["killed since"]
        before = "".join(
            f", after {draw.size} of an earlier state of the code (seed {draw.seed}),"
            for draw in self.earlier
        )
        return (
            f"Of {self.candidates:,} changes that operators over the syntax tree make in the "
            f"{DRAWN[self.of]} {self.size} were drawn (seed {self.seed}){before} "
            f"and {tried} tried: the tests saw {found['killed']} at first "
            f"({found['killed'] / max(1, tried):.1%}), and see {seen} with those written since "
            f"({seen / max(1, tried):.1%}); {found['equivalent']} change no result, "
            f"{found['open']} are open."
        )

    def markdown(self) -> str:
        kinds, verdicts = ("killed", "killed since", "equivalent", "open"), self.all_verdicts()
        lines = ["# Mutation score of a draw", "", self.line()]
        lines += [
            f"`python -m benchmarks.proof.mutation --draw {draw.size} --seed {draw.seed}"
            f"{f' --of {self.of}' * (self.of != 'kernels')}{' --add' * bool(draw.earlier)}` makes "
            f"the data of the sources of commit {draw.commit} (their digest: {draw.sources})."
            for draw in (*self.earlier, self)
        ]
        lines.append("")
        for title, of in (("file", "kernel"), ("operator", "operator")):
            lines += [f"| {title} | tried | " + " | ".join(kinds) + " |", "|---" * 6 + "|"]
            for name in [*sorted({getattr(v, of) for v in verdicts}), None]:
                mine = [v for v in verdicts if name in (None, getattr(v, of))]
                found = self.counts(mine)
                cells = [name or "all", len(mine), *(found[kind] for kind in kinds)]
                lines.append("| " + " | ".join(map(str, cells)) + " |")
            lines.append("")
        lines += ["Not killed at first:", ""]
        for v in verdicts:
            if not v.killed_at_first():
                why = DRAWN_EQUIVALENT.get((v.kernel, v.name), "open")
                why = f"now killed by `{v.test}`" if v.verdict == "killed" else why
                lines.append(f"- {v.kernel}, {v.function}, {v.operator}, {v.name}: {why}")
        lines += [
            "",
            "| file | function | operator | change | verdict | by | s |",
            "|---" * 7 + "|",
        ]
        for v in verdicts:
            name, test = v.name.replace("|", "\\|"), v.test.removeprefix("tests/").replace("|", " ")
            test = f"`{test or '-'}`" + " (--all)" * (v.test in SEEN_WITH_ALL)
            cells = [v.kernel, f"`{v.function}`", v.operator, name, v.verdict, test]
            lines.append("| " + " | ".join(cells) + f" | {v.seconds:.0f} |")
        return "\n".join(lines) + "\n"


def try_draw(arguments: argparse.Namespace) -> list[Verdict]:
    """Try all mutants of a draw with the quick tests, and those that live with the others.

    A survivor of an earlier run that is not known to be equivalent is tried again. A mutant that
    only tests newer than its verdict kill counts as killed since, and not as killed at first.
    """
    of, stem = arguments.of, arguments.out / REPORTS[arguments.of]
    seed = secrets.randbelow(2**32) if arguments.seed is None else arguments.seed
    chosen = drawn(arguments.draw, seed, of)
    mutants = [m for m in chosen if re.search(arguments.only, str(m))]
    explained = [m for m in mutants if (m.kernel, m.name) in DRAWN_EQUIVALENT]
    now = _digest((ROOT / "tests").rglob("*.py"))
    made = Draw(arguments.draw, seed, len(candidates(of)), sources(of), now, [], commit(of), of)
    known = Draw.load(stem)
    if known and (known.seed, known.sources) == (made.seed, made.sources):
        names = {(m.kernel, m.name) for m in chosen}
        kept = [v for v in known.verdicts if (v.kernel, v.name) in names]
        made = replace(known, size=made.size, verdicts=kept)
    elif known and arguments.add:
        made.earlier = [*known.earlier, replace(known, earlier=[])]
    fate = {(v.kernel, v.name): v for v in made.verdicts}
    print(f"seed {seed}, {len(mutants)} of {made.candidates} candidates")
    trials, lock = Trials(arguments.workers, arguments.limit), threading.Lock()
    if of in EXECUTED_BY:
        tests = [f"tests/{test}" for test in EXECUTED_BY[of]]
        trials.record(tests, DRAWN_FROM[of], arguments.lines)
        executed = Executed(arguments.lines)

    def verdict_of(mutant: Mutant) -> str:
        known = fate.get((mutant.kernel, mutant.name))
        return "" if known is None else known.verdict

    def attempt(mutant: Mutant, stages: list[list[str]], whole: bool) -> None:
        key, before = (mutant.kernel, mutant.name), verdict_of(mutant)
        try:
            verdict = trials(mutant, *stages)
        except RuntimeError as error:  # it gets no verdict, and the next run tries it again
            print(f"{mutant}: {error}", file=sys.stderr, flush=True)
            return
        if verdict.verdict == "survived" and not whole:
            verdict = replace(verdict, verdict=before or "lives")
        with lock:
            if before == "survived" or (before and made.tests != now):
                verdict = replace(verdict, first=before)
            fate[key] = verdict
            made.verdicts = list(fate.values())
            made.save(stem)
            print(
                f"{verdict.verdict:9}{verdict.seconds:6.1f} s  {mutant}  {verdict.test}", flush=True
            )

    def each(verdict: str, quick: bool, others: bool) -> None:
        """Try the mutants of this verdict, or without one, with the quick or the other tests."""

        def attempt_of(mutant: Drawn) -> None:
            if arguments.tests:
                attempt(mutant, [arguments.tests], False)
            elif of in EXECUTED_BY:
                lines = statement_lines((ROOT / mutant.file()).read_text(), mutant.change.line)
                tests = executed.tests(mutant.file(), lines, arguments.enough)
                stages = [tests[:FREQUENT], tests[FREQUENT:]]  # the first take the fewest imports
                attempt(mutant, [stage for stage in stages if stage], True)
            else:
                first = [mutant.quick()] if quick and mutant.quick() else []
                whole = others or (quick and not first)
                attempt(mutant, [*first, *mutant.others()] if whole else first, whole)

        chosen = [m for m in mutants if verdict_of(m) == verdict and m not in explained]
        with ThreadPoolExecutor(arguments.workers) as pool:
            list(pool.map(attempt_of, chosen))

    try:
        if arguments.tests:
            each("survived", False, False)
            each("lives", False, False)
        else:
            if not arguments.quick:
                each("survived", True, True)
            each("", True, False)
            if not arguments.quick:
                each("lives", False, True)
    finally:
        trials.close()
    print(made.line())
    return made.all_verdicts()


def is_there(test: str) -> bool:
    """Return whether the function of a test, named as pytest does, is still in its file."""
    file, _, function = test.partition("::")
    name = function.partition("[")[0]
    return bool(name) and (ROOT / file).is_file() and f"def {name}(" in (ROOT / file).read_text()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.proof.mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="only the mutants whose 'kernel: name' matches"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--limit", type=float, default=300, help="the limit of a run of tests, in CPU seconds"
    )
    parser.add_argument("--resume", action="store_true", help="keep the good verdicts")
    parser.add_argument("--draw", type=int, metavar="N", help="draw N mutants and try them")
    parser.add_argument("--of", choices=DRAWN_FROM, default="kernels", help="what to draw from")
    parser.add_argument("--seed", type=int, help="the seed of the draw; random by default")
    parser.add_argument(
        "--add", action="store_true", help="keep the draw that is there beside the new one"
    )
    parser.add_argument(
        "--tests", nargs="+", help="for a draw: only these tests for the mutants that live"
    )
    parser.add_argument("--quick", action="store_true", help="for a draw: only the quick tests")
    parser.add_argument(
        "--lines", type=Path, help="for a draw by lines: the folder of those that the tests execute"
    )
    parser.add_argument(
        "--enough", type=float, default=ENOUGH, metavar="SECONDS",
        help="for a draw by lines: of the tests for a mutant, in CPU seconds",
    )  # fmt: skip
    parser.add_argument("--out", type=folder, default=RESULTS, help="the folder of the data")
    parser.add_argument("--print", action="store_true", help="print the tables of the data there")
    arguments = parser.parse_args(argv)
    stem = arguments.out / "mutation"
    arguments.lines = arguments.lines or ROOT / ".cache" / f"lines-{sources(arguments.of)}"
    if arguments.print:
        print(markdown(load(stem)))
        for name in REPORTS.values():
            if known_draw := Draw.load(arguments.out / name):
                print(known_draw.markdown())
        return 0
    if arguments.workers < 1:
        parser.error(f"workers is {arguments.workers}; expected 1 or more")
    try:
        chosen = [m for m in MUTANTS if re.search(arguments.only, str(m))]
    except re.error as error:
        parser.error(f"--only {arguments.only!r} is not a regex: {error}")
    if arguments.draw is not None:
        return any(not v.good() for v in try_draw(arguments))
    if not chosen:
        parser.error(f"no mutant matches {arguments.only!r}")
    names = {(m.kernel, m.name): m in chosen for m in MUTANTS}
    known = [v for v in load(stem) if (v.kernel, v.name) in names]
    verdicts = [
        v for v in known if not names[v.kernel, v.name] or (arguments.resume and still_holds(v))
    ]
    done = {(v.kernel, v.name) for v in verdicts}
    # The tests that killed the mutants before come first, where they are still there.
    killers = {(v.kernel, v.name): v.test for v in known if is_there(v.test)}
    trials, lock = Trials(arguments.workers, arguments.limit), threading.Lock()

    def attempt(mutant: Mutant) -> Verdict | None:
        if (mutant.kernel, mutant.name) in done:
            return None
        before = killers.get((mutant.kernel, mutant.name))
        stages = [[before] if before else [], mutant.quick(), *mutant.others()]
        try:
            verdict = trials(mutant, *(stage for stage in stages if stage))
        except RuntimeError:  # the test has another name by now
            if not before:
                raise
            verdict = trials(mutant, *(stage for stage in stages[1:] if stage))
        with lock:
            verdicts.append(verdict)
            save(verdicts, stem)
            note = "" if verdict.good() else "  <--"
            print(f"{verdict.verdict:9}{verdict.seconds:6.1f} s  {mutant}  {verdict.test}{note}")
            sys.stdout.flush()
        return verdict

    try:
        with ThreadPoolExecutor(arguments.workers) as pool:
            list(pool.map(attempt, chosen))
    finally:
        trials.close()
    tried = [v for v in verdicts if any((m.kernel, m.name) == (v.kernel, v.name) for m in chosen)]
    left = [v for v in tried if not v.good()]
    killed = sum(v.verdict == "killed" for v in tried)
    print(f"{len(tried)} mutants: {killed} killed, {len(left)} left")
    for v in left:
        print(f"{v.verdict}: {v.kernel}: {v.name}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
