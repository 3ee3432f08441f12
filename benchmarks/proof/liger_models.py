"""What Liger replaces in the model types of transformers that it knows, and whether fastformer's
attention agrees with eager attention there (benchmarks/results/hugging_face.json).

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
from typing import Any

from benchmarks import ROOT

DATA = ROOT / "benchmarks" / "results" / "liger_models.json"
ATTENTION = ROOT / "benchmarks" / "results" / "hugging_face.json"
PAGE = ROOT / "docs" / "existing_models.md"
START = "<!-- models of Liger: python -m benchmarks.proof.liger_models --docs -->"
END = "<!-- end of models -->"
WORDS = {
    "rope": "rotary positions", "rms_norm": "RMSNorm", "layer_norm": "LayerNorm",
    "swiglu": "SwiGLU", "geglu": "GEGLU", "relu_squared": "squared ReLU",
    "fused_linear_cross_entropy": "linear cross-entropy", "cross_entropy": "cross-entropy",
}  # fmt: skip


def installed() -> dict[str, Any]:
    """Return, for each model type of the installed Liger, the options that are on by default."""
    from liger_kernel.transformers import monkey_patch

    models = {}
    for name, function in sorted(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.items()):
        parameters = inspect.signature(function).parameters.values()
        models[name] = [p.name for p in parameters if p.default is True]
    return dict(liger=importlib.metadata.version("liger-kernel"), models=models)


def table(liger: dict[str, Any], attention: dict[str, Any]) -> str:
    """Return the table in Markdown: model types that Liger treats alike share a row."""
    status = {name: found for name, found, *_ in attention["rows"]}
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, options in liger["models"].items():
        unknown = set(options) - set(WORDS)
        if unknown:
            raise ValueError(f"{name} has the options {sorted(unknown)}, which WORDS lacks")
        groups.setdefault(tuple(w for w in WORDS if w in options), []).append(name)
    lines = [
        f"| model types | Liger {liger['liger']} replaces | fastformer's attention |",
        "|---|---|---|",
    ]
    for options, names in sorted(groups.items(), key=lambda group: (-len(group[1]), group[1])):
        by_status: dict[str, list[str]] = {}
        for name in names:
            by_status.setdefault(status.get(name, "no model type of its own"), []).append(name)
        said = (
            found if len(by_status) == 1 else f"{found}: {', '.join(of)}"
            for found, of in sorted(by_status.items())
        )  # fmt: skip
        replaced = ", ".join(WORDS[o] for o in options) or "-"
        lines.append(f"| {', '.join(names)} | {replaced} | {'; '.join(said)} |")
    agrees = {name for name, found in status.items() if found == "agrees"}
    both = len(agrees & set(liger["models"]))
    return "\n".join(lines) + (
        f"\n\nLiger knows {len(liger['models'])} model types, and replaces no attention. "
        f"fastformer's attention agrees with eager attention in {len(agrees)} model types of "
        f"transformers {attention['transformers']}; Liger knows {both} of these.\n"
    )


def with_table(page: str) -> str:
    """Return the text of docs/existing_models.md with the table of the committed data."""
    before, rest = page.split(START)
    made = table(json.loads(DATA.read_text()), json.loads(ATTENTION.read_text()))
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
        print(table(json.loads(DATA.read_text()), json.loads(ATTENTION.read_text())))


if __name__ == "__main__":
    main()
