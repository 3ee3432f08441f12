"""The documentation names what exists: public names on the API page, parameters in docstrings."""

import inspect
import re

import nbformat
import pytest
from test_architecture import LAYERS

import fastformer as ff
from benchmarks import ROOT, figures

PUBLIC = [name for name in ff.__all__ if name != "__version__"]


def test_the_api_page_holds_every_public_name_once():
    named = re.findall(r"^::: fastformer\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert sorted(named) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_documented_arguments_are_parameters(name):
    """`Args:` names parameters alone, each once. Several may share a line: "weight, bias: ..."."""
    item = getattr(ff, name)
    item = item if inspect.isclass(item) or inspect.isroutine(item) else type(item)
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(item), re.DOTALL | re.M)
    lines = re.findall(r"^    (\S[^:]*):", section[1], re.M) if section else []
    documented = [word for line in lines for word in re.split(", *", line)]
    assert len(documented) == len(set(documented))
    assert set(documented) <= set(inspect.signature(item).parameters)


# -------------------------------------------------------------------------------------------- paths

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("benchmarks", "examples", "fastformer", "kernels", "tests")
WRITTEN = ("gpu.json", "headline.png", "test_a.py", "test_new.py")
PATH = re.compile(
    r"(?<![\w./-])((?:\.ci|\.github|benchmarks|docs|examples|fastformer|kernels|tests)/[\w./<>{*-]+)"
)
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def test_named_paths_exist():
    """In text, in comments and in strings; and what `python -m` runs. `kernels/<stem>.py`,
    `gpu-NAME.json` and `test_{name}.py` stand for several files; WRITTEN are made by what names
    them.
    """
    code = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    missing = {}
    for page in [*PAGES, *code, ROOT / "pyproject.toml", ROOT / "mkdocs.yml"]:
        text = page.read_text()
        named = [path.rstrip(".") for path in PATH.findall(text)]
        modules = re.findall(r"-[mp] (benchmarks\.[\w.]*\w)", text)
        named += [module.replace(".", "/") for module in modules]
        for path in named:
            other = re.search(r"[<>{*]|NAME|_$", path) or path.endswith(WRITTEN)
            if not other and not any((ROOT / f"{path}{end}").exists() for end in ("", ".py")):
                missing.setdefault(path, page.name)
    assert missing == {}


@pytest.mark.parametrize("folder", ["fastformer", "kernels"])
def test_the_tree_names_every_file(folder):
    """And no other: architecture.md draws each package in a block of its own."""
    drawn = re.search(rf"^{folder}/ .*\n((?:  .*\n)+)", ARCHITECTURE, re.M)[1]
    named = re.findall(r"(?:^| )(\w+(?:\.py|/))(?= |$)", drawn, re.M)
    files = [path.name for path in (ROOT / folder).rglob("*.py") if path.name[0] != "_"]
    folders = [f"{path.parent.name}/" for path in (ROOT / folder).rglob("*/__init__.py")]
    assert sorted(named) == sorted(files + folders)


def test_the_direction_of_imports_is_the_one_that_is_tested():
    drawn = re.search(r"## The direction of imports.*?```\n(.*?)```", ARCHITECTURE, re.DOTALL)[1]
    assert [sorted(layer) for layer in LAYERS] == [line.split() for line in drawn.splitlines()]


def test_the_path_of_an_argument_is_in_the_code():
    """At most six files and seven forms, each with a line of code that its file holds."""
    rows = re.findall(r"^\| \d \| `(\S+)` \| .* \| `(.*)` \|$", ARCHITECTURE, re.M)
    assert len(rows) <= 7 and len({path for path, _ in rows}) <= 6
    for path, code in rows:
        assert code.replace("\\|", "|") in (ROOT / path).read_text(), path


# ----------------------------------------------------------------------------------------- notebook


def test_the_notebook_is_the_page():
    """The cells are the page's, and the page and docs/figures show their outputs. test_examples.py
    runs them.
    """
    page, stored = figures.PAGE.read_text(), nbformat.read(figures.NOTEBOOK, as_version=4)
    made = figures.cells(page)
    assert [(x.cell_type, x.source) for x in made.cells] == [
        (x.cell_type, x.source) for x in stored.cells
    ]
    shown, pictures = figures.page_with_outputs(page, stored)
    assert shown == page
    for path, picture in pictures.items():
        assert (figures.DOCS / path).read_bytes() == picture, path
    errors = [out for x in stored.cells for out in x.get("outputs", []) if "ename" in out]
    assert errors == []
    drawn = {*pictures, "figures/copy_task.png"}
    files = {f"figures/{path.name}" for path in (figures.DOCS / "figures").iterdir()}
    assert drawn <= files <= drawn | {"figures/headline.png"}  # of benchmarks.report


# ------------------------------------------------------------------------------------------- habits


def test_the_site_lists_every_page():
    listed = re.findall(r"^  - (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_script_runs_the_commands_of_a_change():
    """Those of CONTRIBUTING.md; pytest is in the README's second command, which the script runs."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    block = re.search(r"## The four commands.*?```\n(.*?)```", text, re.DOTALL)[1]
    assert len(block.splitlines()) == 4
    script = (ROOT / ".ci" / "run").read_text() + (ROOT / "README.md").read_text()
    for command in re.split(r" && |\n", block.strip()):
        assert command in script, command
    assert "time pytest benchmarks --benchmark-disable\n" in script
    assert ".ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
