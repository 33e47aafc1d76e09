"""Explains validation errors in the user's terms: the location, the expected value and the actual value."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tidemill.config.document import ConfigProblem, Document, Path, format_path
from tidemill.config.introspection import find_nearest, list_keys
from tidemill.config.redaction import is_secret, redact_text

_MAX_SHOWN = 60
_KEYS = re.compile(r"[A-Za-z][A-Za-z0-9_.]*")
_EXPECTED: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a section (a mapping of keys to values)",
    "literal_error": "{expected}",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than_equal": "a number of at most {le}",
    "string_too_short": "a non-empty string",
}


def explain(error: ValidationError, document: Document, source: str) -> list[ConfigProblem]:
    """Return one problem per error of the models.

    Args:
        error: The validation error.
        document: The source of the values; problems that it already lists are not repeated.
        source: The name to use if the location is unknown.
    """
    known = {problem.path for problem in document.problems if problem.path}
    problems = []
    for details in error.errors(include_url=False):
        path: Path = tuple(part for part in details["loc"] if part != "[key]")
        if format_path(path) not in known:
            text = _describe(details, path)
            problems.append(
                ConfigProblem(_find_location(path, text, document.locations, source), format_path(path), text)
            )
    return problems


def _find_location(path: Path, text: str, locations: Mapping[Path, str], source: str) -> str:
    # An error of a whole section is about the keys that it names.
    for key in _KEYS.findall(text):
        if (*path, key) in locations:
            return locations[(*path, key)]
    for length in range(len(path), 0, -1):
        if path[:length] in locations:
            return locations[path[:length]]
    return source


def _describe(details: ErrorDetails, path: Path) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return _describe_unknown(path)
    if kind == "missing":
        return "is required"
    if kind == "value_error":
        return str(context["error"])
    expected = _EXPECTED.get(kind)
    if expected is None:
        return details["msg"]
    value = details["input"]
    return f"expected {expected.format(**context)}, got {_show_value(value, path, kind)}{_find_hint(kind, value, path)}"


def _find_hint(kind: str, value: Any, path: Path) -> str:
    if kind == "string_type" and _is_scalar(value):
        return "; write it in quotes"
    if kind == "list_type":
        return '; for example ["a", "b"]'
    if kind == "model_type" and len(path) > 1 and path[-1] in list_keys(path):
        return f"; every sink needs a name, as in {format_path((*path[:-1], 'my-name', path[-1]))}"
    if kind in {"model_type", "dict_type"} and isinstance(value, str) and ":" in value:
        return "; each key needs a colon and a space after it"
    return ""


def _describe_unknown(path: Path) -> str:
    near = find_nearest(path)
    if near is None and "." in str(path[-1]) and "client_config" in list_keys(path[:-1]):
        return "unknown key; properties of librdkafka belong in client_config"
    if near is None:
        return f"unknown key; known keys: {', '.join(list_keys(path[:-1]))}"
    beside = format_path(path[:-1])
    return f"unknown key; did you mean {near.removeprefix(beside + '.') if beside else near}?"


def _is_scalar(value: Any) -> bool:
    return isinstance(value, bool | int | float | datetime.date)


def _show_value(value: Any, path: Path, kind: str) -> str:
    """Describe a value; its text is shown only if it cannot be a misplaced secret."""
    what, text = _name_value(value)
    if kind in {"model_type", "dict_type"} or any(is_secret(str(part)) for part in path):
        return what.replace("the ", "a ", 1)
    return f"{what} {text}" if text else what


def _name_value(value: Any) -> tuple[str, str]:
    match value:
        case None:
            return "nothing", ""
        case bool():
            return "the truth value", str(value).lower()
        case int() | float():
            return "the number", str(value)
        case str():
            shown = redact_text(value)
            return "the string", repr(shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "...")
        case datetime.date():
            return "the date", str(value)
        case list():
            return "a list", ""
        case Mapping():
            return "a mapping", ""
        case _:
            return f"a value of type {type(value).__name__}", ""
