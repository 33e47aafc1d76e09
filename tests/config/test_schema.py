"""The JSON schema: complete, stable, and it says the same as the models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tidemill.config.schema import build_schema, format_schema
from tidemill.config.settings import Settings


def properties(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from schema["properties"].items()
    for definition in schema["$defs"].values():
        for name, value in definition.get("properties", {}).items():
            yield f"{definition['title']}.{name}", value


def test_every_setting_and_section_has_a_description() -> None:
    schema = build_schema()

    missing = [name for name, value in properties(schema) if "description" not in value and "$ref" not in value]
    assert missing == []
    assert all("description" in definition for definition in schema["$defs"].values())


def test_the_text_is_stable_and_ends_with_a_newline() -> None:
    assert format_schema() == format_schema()
    assert format_schema().endswith("}\n")
    assert json.loads(format_schema())["title"] == "tidemill configuration"


def test_unknown_keys_are_refused_by_the_schema_too() -> None:
    schema = build_schema()

    assert schema["additionalProperties"] is False
    assert schema["$defs"]["KafkaSinkSettings"]["required"] == ["topic"]
    assert set(schema["properties"]) == set(Settings.model_fields)
