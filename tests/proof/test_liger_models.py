"""The table of the model types that Liger knows: it is made of the committed data."""

import json

import pytest

from benchmarks.proof import liger_models

LIGER, ATTENTION = (json.loads(p.read_text()) for p in (liger_models.DATA, liger_models.ATTENTION))


def test_the_table_is_that_of_the_data():
    """Else `python -m benchmarks.proof.liger_models --docs`."""
    page = liger_models.PAGE.read_text()
    assert liger_models.with_table(page) == page


def test_every_model_type_is_in_one_row():
    rows = liger_models.table(LIGER, ATTENTION).splitlines()
    rows = [row.split(" | ") for row in rows if row.startswith("| ")][1:]
    names = [name for row in rows for name in row[0].strip("| ").split(", ")]
    assert sorted(names) == sorted(LIGER["models"]) and len({row[1] for row in rows}) == len(rows)


def test_a_row():
    liger = dict(liger="1.0", models=dict(a=["rope", "rms_norm"], b=["rms_norm", "rope"], c=[]))
    attention = dict(transformers="5.0", rows=[["a", "agrees", ""], ["b", "refused", ""]])
    assert liger_models.table(liger, attention).splitlines()[2:] == [
        "| a, b | rotary positions, RMSNorm | agrees: a; refused: b |",
        "| c | - | no model type of its own |",
        "",
        "Liger knows 3 model types, and replaces no attention. fastformer's attention agrees with "
        "eager attention in 1 model types of transformers 5.0; Liger knows 1 of these.",
    ]
    liger["models"]["c"] = ["rotor"]
    with pytest.raises(ValueError, match=r"c has the options \['rotor'\]"):
        liger_models.table(liger, attention)


def test_the_data_are_those_of_the_installed_liger():
    metadata = pytest.importorskip("liger_kernel.transformers") and liger_models.installed()
    if metadata["liger"] != LIGER["liger"]:
        pytest.skip(f"the data are of Liger {LIGER['liger']}")
    assert metadata == LIGER
