"""The table of the model types that Liger knows: it is made of the committed data."""

import json

import pytest

from benchmarks.proof import liger_models

LIGER, SWEEP = (json.loads(p.read_text()) for p in (liger_models.DATA, liger_models.SWEEP))


def test_the_table_is_that_of_the_data():
    """Else `python -m benchmarks.proof.liger_models --docs`."""
    page = liger_models.PAGE.read_text()
    assert liger_models.with_table(page) == page


def test_every_model_type_is_in_one_row():
    rows = liger_models.table(LIGER, SWEEP).splitlines()
    rows = [row.split(" | ") for row in rows if row.startswith("| ")][1:]
    names = [name for row in rows for name in row[0].strip("| ").split(", ")]
    assert sorted(names) == sorted({row[0] for row in SWEEP["rows"]} & set(LIGER["models"]))
    assert len({tuple(row[1:4]) for row in rows}) == len(rows)


def test_a_row():
    """What is missing, what is more, what stays; a text model without a loss; a refused type."""
    stays = "; stays: AMLP: why (x; y: z); BAttention: its apply_rotary computes something else"
    options = ["rope", "rms_norm", "fused_linear_cross_entropy"]
    liger = dict(liger="1.0", models=dict(a=options, b=options, c=["swiglu"], d=["geglu"], e=[]))
    rows = [
        ["a", "agrees", "none, loss", "gated 2, loss, norms 5" + stays],
        ["b", "agrees", "none", "gated 2, norms 5"],
        ["c", "refused", "why", "gated 1, norms 2; falls back: x"],
        ["d", "not built", "why", ""],
        ["f", "agrees", "none", "norms 1, rotary 2"],
        ["g", "not built", "why", ""],
    ]
    sweep = dict(transformers="5.0", rows=rows)
    all_three = "rotary positions, RMSNorm, linear cross-entropy"
    assert liger_models.table(liger, sweep).splitlines()[2:] == [
        f"| a, b | {all_three} | rotary positions | attention, gated feed-forward | "
        "AMLP, rotary positions of BAttention |",
        "| c | SwiGLU | - | norms | - |",
        "| d | GEGLU | GEGLU | - | - |",
        "",
        "Liger knows 5 model types, and replaces no attention. No model type of transformers 5.0: "
        "e. Of the 1 other types that can be built, fastformer replaces the attention in 1, the "
        "norms in 1, the gated feed-forward in 0, the rotary positions in 1 and the loss in 0.",
    ]
    liger["models"]["c"] = ["rotor"]
    with pytest.raises(ValueError, match=r"c has the options \['rotor'\]"):
        liger_models.table(liger, sweep)


def test_the_data_are_those_of_the_installed_liger():
    metadata = pytest.importorskip("liger_kernel.transformers") and liger_models.installed()
    if metadata["liger"] != LIGER["liger"]:
        pytest.skip(f"the data are of Liger {LIGER['liger']}")
    assert metadata == LIGER
