"""Builds form fields from a DAG's parameters and their JSON schemas. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tidemill.core.tasks.structure import ParamStructure

_KINDS = {"integer": "integer", "number": "number", "boolean": "boolean", "string": "string"}


@dataclass(frozen=True, slots=True)
class Field:
    """A form field.

    Attributes:
        name: The name of the parameter.
        kind: integer, number, boolean, string, choice, or json for any JSON value.
        value: The initial value.
        required: Whether a value is required.
        description: The description of the parameter.
        choices: The values to choose from, as JSON.
        least: The smallest allowed value; None: no limit.
        most: The largest allowed value; None: no limit.
        pattern: The pattern that a string must match; None: any string.
        max_length: The maximum number of characters of a string; None: no limit.
    """

    name: str
    kind: str
    value: str
    required: bool
    description: str
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    pattern: str | None = None
    max_length: int | None = None


def build_field(param: ParamStructure) -> Field:
    """Return the field of a parameter.

    Example:
        >>> field = build_field(ParamStructure("size", "3", '{"type": "integer", "minimum": 1}'))
        >>> field.kind, field.value, field.least
        ('integer', '3', 1)
    """
    schema = _read_schema(param.schema)
    kind = _choose_kind(schema)
    value = _write_default(param.default, kind)
    if kind == "string" and param.default is not None and value is None:
        kind = "json"  # a default that is not a plain string stays as written
    return Field(
        param.name,
        kind,
        (param.default or "") if value is None else value,
        param.default is None,
        param.description or _find_text(schema, "description") or "",
        tuple(json.dumps(one) for one in schema["enum"]) if kind == "choice" else (),
        _find_number(schema, "minimum"),
        _find_number(schema, "maximum"),
        _find_text(schema, "pattern"),
        int(length) if (length := _find_number(schema, "maxLength")) is not None and length >= 0 else None,
    )


def _read_schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except ValueError:
        return {}
    return schema if isinstance(schema, dict) else {}


def _choose_kind(schema: dict[str, Any]) -> str:
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return "choice"
    kind = schema.get("type")
    return _KINDS.get(kind, "json") if isinstance(kind, str) else "json"


def _write_default(default: str | None, kind: str) -> str | None:
    if default is None:
        return ""
    try:
        value = json.loads(default)
    except ValueError:
        return None
    if kind == "string":
        return value if isinstance(value, str) else None
    return json.dumps(value)


def _find_number(schema: dict[str, Any], name: str) -> float | None:
    value = schema.get(name)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _find_text(schema: dict[str, Any], name: str) -> str | None:
    value = schema.get(name)
    return value if isinstance(value, str) else None
