"""Every shipped configuration compiles for its architecture, into what it should.

benchmarks/results/compile.json holds what the compiler made of each case, with a key of what it
launches and of the code that is compiled, and a digest of the GPU IR. A case whose key has changed
is stale: a warning here, an error of `python -m benchmarks.proof.compile_gate --check`. With --all
every twelfth case is translated to GPU IR, and with --slow all of them; those whose GPU IR differs
from the data are compiled.
"""

import functools
import shutil
import warnings

import pytest

pytest.importorskip("triton")

from benchmarks import ROOT
from benchmarks.proof import cases, compile_gate, cost

TABLE = cases.Table.read()
SAME_TRITON = TABLE.triton == compile_gate.metadata.version("triton")
CASES = [pytest.param("sm_90 rms_norm bf16 N=512")]  # in the default suite
for number, name in enumerate(cases.CASES):
    if [name] != [*CASES[0].values]:
        marks = [pytest.mark.with_all, *[pytest.mark.with_slow] * (number % 12 > 0)]
        CASES.append(pytest.param(name, marks=marks))


@pytest.mark.parametrize("name", CASES)
def test_case(compiled, name):
    """It is translated as when the data were written, which hold no problem; or it compiles without
    one and into what the data say: no loop of 16-bit attention waits for all of its copies, and
    none has grown by 3%.
    """
    known = TABLE.cases.get(name) if SAME_TRITON else None
    if known:
        answer = compiled(name, translate=True)
        if "error" not in answer and cases.translation(answer) == known["translation"]:
            return
    answer = compiled(name)
    found = compile_gate.wrong(name, answer)
    if not found and known:
        found = compile_gate.changes(name, answer, known)
    assert not found, "\n".join([*found, compile_gate.MEND])


@functools.cache
def keys():
    return cases.keys()


def test_stale_cases_are_a_warning():
    if not SAME_TRITON:
        pytest.skip(f"the data are of Triton {TABLE.triton}")
    stale = TABLE.stale(keys())
    if stale:
        names = "\n  ".join(stale)
        warnings.warn(
            f"{len(stale)} compiled cases are stale; {compile_gate.MEND}\n  {names}", stacklevel=1
        )


def test_nothing_is_wrong_in_the_data():
    """By the lists of what is known, as they are now."""
    if not SAME_TRITON:
        pytest.skip(f"the data are of Triton {TABLE.triton}")
    for name in cases.CASES.keys() & TABLE.cases.keys():
        kernels = [compile_gate.Kernel(*row) for row in TABLE.cases[name]["kernels"]]
        found = compile_gate.judged(name, kernels, cost.read_case(name, TABLE.cases[name]))
        assert not found, (name, found)


def test_the_summary_counts_a_kernel_once_for_each_architecture():
    def kernel(spill, serialised, digest):
        return ["forward", "128x64 w8 s3", 255, spill, serialised, 0, "-", digest]

    first, second = kernel(8, "-", "a"), kernel(404, "C7515", "b")
    table = cases.Table("3.9.0", {
        "sm_90 one": {"kernels": [first, second]},
        "sm_90 two": {"kernels": [second, kernel(0, "-", "c")]},
        "sm_80 three": {"kernels": [first]},
    })  # fmt: skip
    assert compile_gate.summary(table) == (
        "Triton 3.9.0, 3 cases without a problem: 4 kernels; 3 spill, at most 404 bytes a thread; "
        "1 are serialised"
    )


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


# Changes of a copy of the package: a file, old and new text. The last ones also name the cases that
# they make stale.
HARMLESS = (
    ("kernels/attention/launchers.py", "\n\n\n", "\n\n\ndef unused(x):\n    return x + 1\n\n\n"),
    ("kernels/attention/scores.py", "\nfrom ", "\n# A comment.\nfrom "),
    ("kernels/attention/forward.py", '"""One program computes', '"""Each program computes'),
    (
        "kernels/launch.py",
        "rows = unit_stride(x.reshape(-1, n))",
        "kept = rows = unit_stride(x.reshape(-1, n))",
    ),
    ("fastformer/ops/attention/arguments.py", 'raise ValueError(f"', 'raise ValueError(f"Sorry: '),
)
CHANGES = {
    "a constant in a function that kernels call": (
        "kernels/feed_forward.py", "0.5 * z * (1.0 + tl", "0.25 * z * (1.0 + tl",
        lambda case: case["op"] in ("feed_forward", "geglu", "swiglu", "gated_activation"),
    ),
    "a layout of the kernels in Gluon": (
        "kernels/attention/gluon/parts.py", "[16, columns, 16])", "[16, columns, 32])",
        lambda case: any("Gluon" in row for row in case.get("choices", {}).values()),
    ),
    "a tile": (
        "kernels/embedding.py", "2048 // block", "4096 // block",
        lambda case: case["op"] == "embed",
    ),
    "num_stages": (
        "kernels/rotary.py", "stages=3 if", "stages=4 if",
        lambda case: case["op"] == "rotary_embedding" and case["arch"].startswith("sm_"),
    ),
}  # fmt: skip


def test_what_makes_a_case_stale(tmp_path, monkeypatch):
    """Neither comments, docstrings, error messages nor code of the host that launches the same; a
    constant, a layout, a tile and a number of stages exactly the cases that use them.
    """
    before = keys()
    shutil.copytree(ROOT / "fastformer", tmp_path / "fastformer")
    shutil.copytree(ROOT / "kernels", tmp_path / "fastformer" / "kernels")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for file, old, new, *_ in (*HARMLESS, *CHANGES.values()):
        path = tmp_path / "fastformer" / file.removeprefix("fastformer/")
        text = path.read_text()
        assert old in text, (file, old)
        path.write_text(text.replace(old, new, 1))
    after = cases.keys()
    stale = {name for name in after if after[name] != before[name]}
    expected = {
        name: [change for change, (*_, uses) in CHANGES.items() if uses(case)]
        for name, case in cases.CASES.items()
    }
    assert {change for found in expected.values() for change in found} == {*CHANGES}
    assert stale == {name for name, found in expected.items() if found}
