"""The page that documents the REST API, rendered from its OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel


class Parameter(BaseModel):
    """A parameter of an operation, or a field of a request or response body."""

    name: str
    kind: str
    text: str = ""
    is_required: bool = False


class ApiOperation(BaseModel):
    """An operation of the API: one method of one path."""

    method: str
    path: str
    title: str
    text: str = ""
    parameters: list[Parameter] = []
    body: list[Parameter] = []
    answer: str = ""
    fields: list[Parameter] = []


def describe_api(document: Mapping[str, Any]) -> list[ApiOperation]:
    """Return the operations of an OpenAPI document, in the document's order."""
    schemas = document.get("components", {}).get("schemas", {})
    return [
        _describe_operation(method, path, operation, schemas)
        for path, methods in document.get("paths", {}).items()
        for method, operation in methods.items()
    ]


def _describe_operation(
    method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]
) -> ApiOperation:
    responses = operation.get("responses", {})
    answered: Mapping[str, Any] = responses.get("200") or responses.get("202") or {}
    content = answered.get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    kind = _name_kind(schema)
    fields = schemas.get(kind.removesuffix("[]"), {}).get("properties", {})
    return ApiOperation(
        method=method.upper(),
        path=path,
        title=operation.get("summary", ""),
        text=operation.get("description", ""),
        parameters=[
            Parameter(
                name=parameter["name"],
                kind=_name_kind(parameter["schema"]),
                text=parameter.get("description", ""),
                is_required=parameter.get("required", False),
            )
            for parameter in operation.get("parameters", [])
        ],
        body=_describe_body(operation, schemas),
        answer=kind if schema else ", ".join(content),
        fields=[
            Parameter(name=name, kind=_name_kind(field), text=field.get("description", ""))
            for name, field in fields.items()
        ],
    )


def _describe_body(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> list[Parameter]:
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    found = schemas.get(_name_kind(schema), {})
    required = found.get("required", ())
    return [
        Parameter(name=name, kind=_name_kind(field), text=field.get("description", ""), is_required=name in required)
        for name, field in found.get("properties", {}).items()
    ]


def _name_kind(schema: Mapping[str, Any]) -> str:
    """Return the name of a schema's type.

    Example:
        >>> _name_kind({"anyOf": [{"type": "integer"}, {"type": "null"}]}), _name_kind({"$ref": "#/x/Overview"})
        ('integer or null', 'Overview')
    """
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    if "anyOf" in schema:
        return " or ".join(_name_kind(part) for part in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(str(value) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"{_name_kind(schema.get('items', {}))}[]"
    return str(schema.get("format", schema.get("type", "any")))
