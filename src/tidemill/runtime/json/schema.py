"""Checks values against a JSON schema, and describes a mismatch in one line.

Schemas come from users. Nothing that a schema refers to is fetched, and an unusable schema is an error of its own,
whatever is wrong with it. Values come from anyone who may start a run, and the store's only writer checks them;
`validator` therefore limits the work for each. `jsonschema` is imported only if there is a schema.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from tidemill.core.errors import TidemillError, describe_error
from tidemill.runtime.json.patterns import PatternError, check_pattern

#: Larger and deeper schemas and values are refused.
MAX_SCHEMA_BYTES: Final = 64 * 1024
MAX_VALUE_BYTES: Final = 64 * 1024
MAX_VALUE_DEPTH: Final = 64
#: Schemas that measure larger are not even encoded; measuring overestimates up to threefold.
_MOST_MEASURED: Final = 8 * MAX_SCHEMA_BYTES
#: Longer messages are cut, because they contain the value.
_MAX_TEXT = 300
_KEPT = 256
#: Keywords that contain schemas by name, and keywords that contain values instead of schemas.
_NAMED: Final = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_VALUES: Final = frozenset({"const", "default", "enum", "examples"})
#: Keywords that name schemas which others refer to, and all keywords of a list that can be checked value by value.
_DEFINITIONS: Final = frozenset({"$defs", "definitions"})
_OF_LISTS: Final = _DEFINITIONS | {
    *("type", "items", "minItems", "maxItems"),
    *("$schema", "$comment", "title", "description", "default", "examples"),
}


class SchemaError(TidemillError, ValueError):
    """A schema is not a JSON schema, or cannot be used."""


def check_schema(schema: Mapping[str, Any]) -> None:
    """Check a schema.

    Raises:
        SchemaError: The schema is invalid, or values could not be checked against it in bounded time.
    """
    import jsonschema

    from tidemill.runtime.json.validator import measure

    if measure(schema)[0] > _MOST_MEASURED:
        # Checked before encoding, because shared parts are written each time.
        raise SchemaError(f"it is far too large, or contains itself; up to {MAX_SCHEMA_BYTES:,} characters are allowed")
    try:
        text = json.dumps(schema, allow_nan=False)
        _check_length(text)
        # The form that is used, in which a dict's numeric keys are text.
        schema = json.loads(text)
        # Without formats: the format of patterns is checked by Python's `re`, but patterns use another engine here.
        jsonschema.Draft202012Validator.check_schema(schema, format_checker=jsonschema.FormatChecker(formats=()))
        for pattern in _find_patterns(schema):
            check_pattern(pattern)
    except jsonschema.SchemaError as error:
        raise SchemaError(_cut(error.message)) from None
    except SchemaError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(_cut(str(error) if isinstance(error, PatternError) else describe_error(error))) from None
    find_mismatch(text, None, "")


def find_mismatch(schema: str, value: Any, name: str) -> str:
    """Return the mismatch of a value; empty if it matches.

    Args:
        schema: The schema, as JSON.
        value: The value.
        name: The value's name in the message.

    Raises:
        SchemaError: The schema cannot be used.

    Example:
        >>> find_mismatch('{"items": {"type": "integer"}}', [1, "b"], "sizes")
        "sizes[1]: 'b' is not of type 'integer'"
    """
    from tidemill.runtime.json.validator import TooMuchWorkError, measure, run_bounded

    size_bytes, depth = measure(value)
    if size_bytes > MAX_VALUE_BYTES:
        return f"{name}: the value is too large; values with a schema may have up to {MAX_VALUE_BYTES // 1024} KiB"
    if depth > MAX_VALUE_DEPTH:
        return f"{name}: the value is nested too deeply; values with a schema may have {MAX_VALUE_DEPTH} levels"
    try:
        with run_bounded(size_bytes + len(schema)):
            error = next(_build_validator(schema).iter_errors(value), None)
    except RecursionError:
        raise SchemaError("it refers to itself endlessly") from None
    except TooMuchWorkError:
        return f"{name}: checking it against its schema takes too long; give a smaller value, or simplify the schema"
    except Exception as problem:  # a missing reference, an invalid pattern ...
        raise SchemaError(_cut(str(problem) or describe_error(problem))) from None
    if error is None:
        return ""
    path = "".join(f"[{part!r}]" for part in error.absolute_path)
    return f"{name}{path}: {_cut(error.message)}"


def measures_large(value: Any) -> bool:
    """Return whether a value is too large to be checked as a whole."""
    from tidemill.runtime.json.validator import measure

    return measure(value)[0] > MAX_VALUE_BYTES


def find_length_mismatch(schema: str, length: int, name: str) -> str:
    """Return the mismatch of the length of a list that is checked value by value; empty if it matches.

    Raises:
        SchemaError: The schema cannot be used, or can only be checked against a whole list.
    """
    whole, _ = _split_list_schema(schema)
    if (mismatch := find_mismatch(whole, [], name)) != "":
        return mismatch
    least, most = (json.loads(schema).get(keyword) for keyword in ("minItems", "maxItems"))
    if least is not None and length < least:
        return f"{name}: the list has {length:,} values; at least {least:,} are required"
    if most is not None and length > most:
        return f"{name}: the list has {length:,} values; at most {most:,} are allowed"
    return ""


def find_item_mismatch(schema: str, items: Iterable[Any], name: str, first: int = 0) -> str:
    """Return the mismatch of values of a list that is checked value by value; empty if they match.

    Args:
        schema: The schema of the list, as JSON.
        items: Some of its values.
        name: The list's name in the message.
        first: The number of the first of these values.

    Raises:
        SchemaError: The schema cannot be used, or can only be checked against a whole list.

    Example:
        >>> find_item_mismatch('{"items": {"type": "integer"}}', [1, "b"], "sizes", 1000)
        "sizes[1001]: 'b' is not of type 'integer'"
    """
    _, of_item = _split_list_schema(schema)
    if of_item == "{}":
        return ""
    found = (find_mismatch(of_item, item, f"{name}[{number}]") for number, item in enumerate(items, first))
    return next(filter(None, found), "")


@functools.lru_cache(_KEPT)
def _split_list_schema(text: str) -> tuple[str, str]:
    """Return what the schema of a list says about its type, and the schema of its values."""
    schema = json.loads(text)
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise SchemaError("it allows no value")
    unknown = sorted(schema.keys() - _OF_LISTS)
    if unknown or '"#"' in text:
        raise SchemaError(
            f"{unknown[0] if unknown else '$ref to the whole schema'} can only be checked against a whole list, and "
            f"the list has more than {MAX_VALUE_BYTES // 1024} KiB; describe its values by `items`, or pass fewer"
        )
    items = schema.get("items", {})
    if isinstance(items, dict) and items:
        items = {**items, **{name: schema[name] for name in sorted(_DEFINITIONS & schema.keys())}}
    return json.dumps({name: schema[name] for name in ("type",) if name in schema}), json.dumps(items)


@functools.lru_cache(_KEPT)
def _build_validator(schema: str) -> Any:
    from tidemill.runtime.json.validator import build_validator

    _check_length(schema)
    if '"unevaluatedProperties"' in schema and '"patternProperties"' in schema:
        # `jsonschema` itself searches for these patterns, with an engine that backtracks.
        raise SchemaError(
            "unevaluatedProperties cannot be used together with patternProperties; use additionalProperties"
        )
    return build_validator(json.loads(schema))


def _check_length(schema: str) -> None:
    if len(schema) > MAX_SCHEMA_BYTES:
        raise SchemaError(f"it has {len(schema):,} characters; up to {MAX_SCHEMA_BYTES:,} are allowed")


def _find_patterns(schema: Any) -> Iterator[str]:
    """Find the regular expressions of a schema; a text in a default or an example is not one."""
    if isinstance(schema, list):
        for part in schema:
            yield from _find_patterns(part)
    elif isinstance(schema, Mapping):
        if isinstance(pattern := schema.get("pattern"), str):
            yield pattern
        yield from schema.get("patternProperties", {})
        for key, part in schema.items():
            if key in _NAMED:
                yield from _find_patterns(list(part.values()))
            elif key not in _VALUES:
                yield from _find_patterns(part)


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_TEXT else f"{line[: _MAX_TEXT // 2]} ... {line[-_MAX_TEXT // 2 :]}"
