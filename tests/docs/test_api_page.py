"""The page about the Python API has every public name, and names only what exists."""

from __future__ import annotations

import importlib
import re

import pytest
from tests.docs.snippets import ROOT

PAGE = (ROOT / "docs/reference/api.md").read_text()
SHOWN = re.findall(r"^::: (\S+)$", PAGE, re.MULTILINE)
#: On pages of their own.
ELSEWHERE = {"tidemill.Settings"}


def load(path: str) -> object:
    """Return a module, or what is in one."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("path", SHOWN)
def test_what_the_page_shows_exists_and_has_a_docstring(path: str) -> None:
    assert load(path).__doc__


@pytest.mark.parametrize("package", ["tidemill", "tidemill.spark", "tidemill.testing"])
def test_every_public_name_is_on_the_page(package: str) -> None:
    shown = {id(value) for path in SHOWN for value in (load(path), *vars(load(path)).values())}
    public = {f"{package}.{name}": getattr(load(package), name) for name in load(package).__all__}
    assert {path for path, value in public.items() if id(value) not in shown} - ELSEWHERE == set()
