"""The documentation names what exists: public names on the API page, parameters in docstrings."""

import inspect
import re
from pathlib import Path

import pytest
from test_architecture import LAYERS

import fastformer as ff

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = [name for name in ff.__all__ if name != "__version__"]


def test_the_api_page_holds_every_public_name_once():
    named = re.findall(r"^::: fastformer\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert sorted(named) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_documented_arguments_are_parameters(name):
    """`Args:` names parameters alone, each once. Several may share a line: "weight, bias: ..."."""
    item = getattr(ff, name)
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(item), re.DOTALL | re.M)
    lines = re.findall(r"^    (\S[^:]*):", section[1], re.M) if section else []
    documented = [word for line in lines for word in re.split(", *", line)]
    assert len(documented) == len(set(documented))
    assert set(documented) <= set(inspect.signature(item).parameters)


# -------------------------------------------------------------------------------------------- paths

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PATH = re.compile(
    r"(?<![\w./-])((?:\.ci|\.github|benchmarks|docs|examples|fastformer|kernels|tests)/[\w./<>-]+)"
)
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_named_paths_exist(page):
    """`kernels/<stem>.py` and `gpu-NAME.json` stand for several files."""
    for path in PATH.findall(page.read_text()):
        if not re.search("[<>]|NAME", path):
            assert (ROOT / path.rstrip(".")).exists(), path


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
    assert "\ntime pytest --benchmark-only\n" in script
    assert ".ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
