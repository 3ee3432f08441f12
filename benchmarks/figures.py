"""Writes docs/figures, the outputs in docs/transformer.md, and examples/transformer.ipynb.

    python -m benchmarks.figures

docs/transformer.md is the source of the notebook: its Python blocks are the cells, and the text
between them is the text of the notebook. The notebook is run, and what a cell prints is put behind
its block, as a block of text. A picture goes to the file of the image that stands there.

The command below copy_task.png in README.md draws that picture.
"""

from __future__ import annotations

import base64
import os
import re
from typing import Any

from benchmarks import ROOT

DOCS = ROOT / "docs"
PAGE, NOTEBOOK = DOCS / "transformer.md", ROOT / "examples" / "transformer.ipynb"
BLOCK = re.compile(  # code, what it printed, and its picture
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<text>.*?)^```\n)?"
    r"(?:\n(?P<image>!\[[^\]]*\]\((?P<path>[^)]+)\)\n))?",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)]+)")  # the target, in this checkout


def cells(page: str) -> Any:
    """Return the notebook of a page, not yet run."""
    import jupytext

    code = BLOCK.sub(lambda block: f"```python\n{block['code']}```\n", page)
    folder = NOTEBOOK.parent
    moved = LINK.sub(lambda target: os.path.relpath(DOCS / target[1], folder), code)
    notebook = jupytext.reads(moved, fmt="md")
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
    }
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
    return notebook


def run(notebook: Any) -> None:
    """Run the cells of a notebook and store their outputs in it.

    tqdm's warning that there are no widgets, for a progress bar that is not drawn, is left out.
    """
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    kernels = AsyncKernelManager(transport="ipc")  # no port
    client = NotebookClient(notebook, km=kernels, timeout=600, record_timing=False)
    client.execute(cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    notebook.metadata.pop("language_info")  # the version of Python
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [x for x in cell.outputs if "TqdmWarning" not in x.get("text", "")]


def page_with_outputs(page: str, notebook: Any) -> tuple[str, dict[str, bytes]]:
    """Return the page with what its notebook printed, and the pictures by their path in docs/.

    Raises ValueError if a block has a picture and no image behind it, or the opposite.
    """
    outputs = iter([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])
    pictures: dict[str, bytes] = {}

    def written(block: re.Match[str]) -> str:
        text, drawn = "", []
        for output in next(outputs):
            data = output.get("data", {})
            if "image/png" in data:
                drawn.append(base64.b64decode(data["image/png"]))
            else:
                text += output.get("text") or data["text/plain"] + "\n"
        if len(drawn) != (block["image"] is not None):
            raise ValueError(f"{len(drawn)} pictures, and the image {block['image']}: {block[0]}")
        if drawn:
            pictures[block["path"]] = drawn[0]
        printed = f"\n```text\n{text}```\n" if text else ""
        image = f"\n{block['image']}" if drawn else ""
        return f"```python\n{block['code']}```\n{printed}{image}"

    return BLOCK.sub(written, page), pictures


def main() -> None:
    import nbformat

    page = PAGE.read_text()
    notebook = cells(page)
    run(notebook)
    page, pictures = page_with_outputs(page, notebook)
    for path, picture in pictures.items():
        (DOCS / path).write_bytes(picture)
    PAGE.write_text(page)
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
