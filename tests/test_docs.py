"""The documentation names what exists: public names on the API page, parameters in docstrings."""

import inspect
import re
from pathlib import Path

import pytest

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
