"""Every list of triggers that the documentation shows can be hosted."""

from __future__ import annotations

import importlib
import json

import pytest
import yaml
from tests.docs.snippets import PAGES, ROOT, Block, blocks

from tidemill.triggers.base import BaseTrigger

LISTS = [block for page in PAGES for block in blocks(page) if block.info == "yaml triggers"]


@pytest.mark.parametrize("block", LISTS, ids=lambda block: f"{block.page.relative_to(ROOT)}:{block.line}")
def test_a_list_holds_triggers_that_can_be_made_and_written_down(block: Block) -> None:
    entries = yaml.safe_load(block.code)
    assert entries
    for entry in entries:
        assert set(entry) <= {"name", "classpath", "kwargs", "restart"}
        module, _, name = entry["classpath"].rpartition(".")
        made = getattr(importlib.import_module(module), name)(**entry.get("kwargs", {}))
        assert isinstance(made, BaseTrigger)
        json.dumps(made.serialize())


def test_there_are_such_lists() -> None:
    assert LISTS
