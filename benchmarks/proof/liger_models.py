"""What Liger replaces in the model types of transformers that it knows, and what fastformer's
attention and `accelerate` replace there (benchmarks/results/hugging_face.json).

    python -m benchmarks.proof.liger_models            prints the table of docs/existing_models.md
    python -m benchmarks.proof.liger_models --docs     writes it there
    python -m benchmarks.proof.liger_models --write    reads the installed Liger again, first

It runs no model: the options of Liger's `apply_liger_kernel_to_*`, with their defaults, say what
each replaces.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import json
import re
from typing import Any

from benchmarks import ROOT

DATA = ROOT / "benchmarks" / "results" / "liger_models.json"
SWEEP = ROOT / "benchmarks" / "results" / "hugging_face.json"
PAGE = ROOT / "docs" / "existing_models.md"
START = "<!-- models of Liger: python -m benchmarks.proof.liger_models --docs -->"
END = "<!-- end of models -->"
WORDS = {
    "rope": "rotary positions", "rms_norm": "RMSNorm", "layer_norm": "LayerNorm",
    "swiglu": "SwiGLU", "geglu": "GEGLU", "relu_squared": "squared ReLU",
    "fused_linear_cross_entropy": "linear cross-entropy", "cross_entropy": "cross-entropy",
}  # fmt: skip
# By option of Liger, the same part in the data of the sweep, where squared ReLU has no name.
PARTS = {
    "rope": "rotary", "rms_norm": "norms", "layer_norm": "norms", "swiglu": "gated",
    "geglu": "gated", "relu_squared": "plain", "fused_linear_cross_entropy": "loss",
    "cross_entropy": "loss",
}  # fmt: skip
OURS = {
    "attention": "attention", "rotary": "rotary positions", "norms": "norms",
    "gated": "gated feed-forward", "loss": "linear cross-entropy",
}  # fmt: skip


def installed() -> dict[str, Any]:
    """Return, for each model type of the installed Liger, the options that are on by default."""
    from liger_kernel.transformers import monkey_patch

    models = {}
    for name, function in sorted(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.items()):
        parameters = inspect.signature(function).parameters.values()
        models[name] = [p.name for p in parameters if p.default is True]
    return dict(liger=importlib.metadata.version("liger-kernel"), models=models)


def replaced(row: list[str]) -> set[str]:
    """Return which of PARTS fastformer computes in a model type, given its row of the sweep."""
    _, status, _, whole = row
    counted = {part.split()[0] for part in whole.split(";")[0].split(", ") if part}
    return {part for part in PARTS.values() if part in counted} | (
        {"attention"} if status == "agrees" else set()
    )


def left(row: list[str]) -> set[str]:
    """Return the classes that `accelerate` leaves in a model type."""
    stays = row[3].partition("; stays: ")[2]
    return {
        f"rotary positions of {name}" if why.startswith("its apply_") else name
        for name, why in re.findall(r"(?:^|; )([A-Z]\w*): (.*?)(?=; [A-Z]\w*: |$)", stays)
    }


def table(liger: dict[str, Any], sweep: dict[str, Any]) -> str:
    """Return the table in Markdown: model types that both treat alike share a row."""
    rows = {row[0]: row for row in sweep["rows"]}
    known = {name: options for name, options in liger["models"].items() if name in rows}
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, options in known.items():
        unknown = set(options) - set(WORDS)
        if unknown:
            raise ValueError(f"{name} has the options {sorted(unknown)}, which WORDS lacks")
        ours = replaced(rows[name])
        has_loss = "loss" in ours or "loss" in rows[name][2]  # a text model alone has none
        theirs = [o for o in WORDS if o in options]
        missing = [o for o in theirs if PARTS[o] not in ours and (has_loss or PARTS[o] != "loss")]
        more = [word for part, word in OURS.items() if part in ours - {PARTS[o] for o in theirs}]
        key = tuple(", ".join(words) or "-" for words in (
            [WORDS[o] for o in theirs], [WORDS[o] for o in missing], more))  # fmt: skip
        groups.setdefault(key, []).append(name)  # type: ignore[arg-type]
    lines = [
        f"| model types | Liger {liger['liger']} replaces | of these, fastformer does not | "
        "beside these, fastformer replaces | `accelerate` leaves |",
        "|---|---|---|---|---|",
    ]
    for key, names in sorted(groups.items(), key=lambda group: (-len(group[1]), group[1])):
        stays = ", ".join(sorted(set().union(*(left(rows[name]) for name in names)))) or "-"
        lines.append(f"| {', '.join(names)} | {' | '.join(key)} | {stays} |")
    others = [row for name, row in rows.items() if name not in known]
    counts = {part: sum(part in replaced(row) for row in others) for part in OURS}
    absent = ", ".join(sorted(set(liger["models"]) - set(known))) or "none"
    return "\n".join(lines) + (
        f"\n\nLiger knows {len(liger['models'])} model types, and replaces no attention. No model "
        f"type of transformers {sweep['transformers']}: {absent}. Of the "
        f"{sum(row[1] != 'not built' for row in others)} other types that can be built, "
        f"fastformer replaces the attention in {counts['attention']}, the norms in "
        f"{counts['norms']}, the gated feed-forward in {counts['gated']}, the rotary positions in "
        f"{counts['rotary']} and the loss in {counts['loss']}.\n"
    )


def with_table(page: str) -> str:
    """Return the text of docs/existing_models.md with the table of the committed data."""
    before, rest = page.split(START)
    made = table(json.loads(DATA.read_text()), json.loads(SWEEP.read_text()))
    return f"{before}{START}\n{made}{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--docs", action="store_true", help=f"write it to {PAGE.name}")
    parser.add_argument("--write", action="store_true", help="read the installed Liger first")
    options = parser.parse_args()
    if options.write:
        found = installed()
        lines = (f"{json.dumps(n)}: {json.dumps(o)}" for n, o in found["models"].items())
        head = f'{{"liger": "{found["liger"]}", "models": {{\n'
        DATA.write_text(head + ",\n".join(lines) + "\n}}\n")
    if options.docs:
        PAGE.write_text(with_table(PAGE.read_text()))
    else:
        print(table(json.loads(DATA.read_text()), json.loads(SWEEP.read_text())))


if __name__ == "__main__":
    main()
