"""The page on payloads names every field, default and operation that the classes have."""

from __future__ import annotations

import json
import re
import typing

import msgspec
import pytest
from tests.docs.snippets import ROOT

from tidemill.config.sink_types import SINK_TYPES, load_class
from tidemill.sinks.payloads import CollectResult, CustomPayload

PAGE = (ROOT / "docs/reference/payloads.md").read_text()
CLASSES: list[type[msgspec.Struct]] = [*(load_class(kind.payload) for kind in SINK_TYPES.values()), CustomPayload]


def shown(default: object) -> str:
    return str(default) if default is None or default == () else json.dumps(default)


def table(made: type[msgspec.Struct]) -> str:
    """Return the rows of the page's table of a class."""
    found = re.search(rf"^\| `{made.__name__}` \|.*\n(?:\|.*\n)+", PAGE, re.MULTILINE)
    assert found is not None
    return found[0]


@pytest.mark.parametrize("made", CLASSES, ids=lambda made: made.__name__)
def test_the_page_has_every_field_of_a_payload_with_its_default(made: type[msgspec.Struct]) -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", table(made), re.MULTILINE))
    fields = {field.name: shown(field.default) for field in msgspec.structs.fields(made)}
    assert {**listed, "sink": '""', "data": "None"} == fields


@pytest.mark.parametrize("made", CLASSES, ids=lambda made: made.__name__)
def test_the_page_has_every_operation(made: type[msgspec.Struct]) -> None:
    row = re.search(r"^\| `op` \| `.*?` \|(.*)$", table(made), re.MULTILINE)
    known = typing.get_args(typing.get_type_hints(made).get("op"))
    assert set(re.findall(r"`(\w+)`", row[1] if row else "")) == set(known)


def test_the_page_has_every_list_of_a_result() -> None:
    for field in msgspec.structs.fields(CollectResult):
        assert f"| `{field.name}` |" in PAGE
        assert f"{field.name}=[...]" in PAGE
