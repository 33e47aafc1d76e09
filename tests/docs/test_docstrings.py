"""The examples in docstrings run and show what the code returns."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import tidemill

ROOT = Path(tidemill.__file__).parent


def find_modules() -> list[str]:
    """Return the names of the modules with an example; the others are not imported."""
    paths = [path for path in sorted(ROOT.rglob("*.py")) if ">>>" in path.read_text(encoding="utf-8")]
    return [".".join(("tidemill", *path.relative_to(ROOT).with_suffix("").parts)) for path in paths]


@pytest.mark.parametrize("name", find_modules())
def test_the_examples_of_a_module_run(name: str) -> None:
    module = importlib.import_module(name)

    results = doctest.testmod(module)

    # Examples that need a cluster or another process are marked with +SKIP.
    assert results.attempted or "+SKIP" in Path(str(module.__file__)).read_text(encoding="utf-8")
    assert not results.failed
