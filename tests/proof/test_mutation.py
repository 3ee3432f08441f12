"""The bugs of tests/mutants.py can be planted, and each has a verdict."""

import json

from mutants import EQUIVALENT, MORE, PLANTED

from benchmarks import ROOT
from benchmarks.proof import mutation


def test_every_bug_can_be_planted():
    """Its text stands once in its function, and what it becomes is Python."""
    for mutant in mutation.written():
        assert mutant.planted != (ROOT / mutant.file).read_text(), mutant.name
        compile(mutant.planted, mutant.name, "exec")


def test_every_bug_is_seen():
    verdicts = json.loads(mutation.RESULT.read_text())["written"]
    assert all(verdict["verdict"] != "unseen" for verdict in verdicts)
    names = {
        f"{kernel}: {name}"
        for table in (PLANTED, MORE)
        for kernel, bugs in table.items()
        for name in bugs
        if (kernel, name) not in EQUIVALENT
    }
    assert {verdict["name"] for verdict in verdicts} == names
