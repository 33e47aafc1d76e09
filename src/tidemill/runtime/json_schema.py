"""Checks values against JSON schema, and says in a line what does not match.

Schemas are from users: nothing that a schema refers to is fetched, and a schema that cannot be used is an error of its
own, whatever goes wrong with it. Values are from anybody who may start a run, and are checked by the one writer of the
store: the work for one is bounded (`schema_validator`). `jsonschema` is imported only when there is a schema.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tidemill.core.errors import TidemillError, describe_error
from tidemill.runtime.patterns import PatternError, check_pattern

#: Larger and deeper ones are refused.
MAX_SCHEMA_BYTES: Final = 64 * 1024
MAX_VALUE_BYTES: Final = 64 * 1024
MAX_VALUE_DEPTH: Final = 64
#: Schemas that are measured as larger are not even written: measuring counts up to three times as much as there is.
_MOST_MEASURED: Final = 8 * MAX_SCHEMA_BYTES
#: Longer messages are cut: they have the value in them.
_MAX_TEXT = 300
_KEPT = 256
#: Keywords that hold schemas by name, and those that hold values, not schemas.
_NAMED: Final = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_VALUES: Final = frozenset({"const", "default", "enum", "examples"})


class SchemaError(TidemillError, ValueError):
    """A schema is not JSON schema, or cannot be used."""


def check_schema(schema: Mapping[str, Any]) -> None:
    """Check a schema.

    Raises:
        SchemaError: It is not one, or one whose values could not be checked in bounded time.
    """
    import jsonschema

    from tidemill.runtime.schema_validator import measure

    if measure(schema)[0] > _MOST_MEASURED:
        # Not written first: parts that are shared are written each time.
        raise SchemaError(f"it is far too large, or contains itself; up to {MAX_SCHEMA_BYTES:,} characters are allowed")
    try:
        text = json.dumps(schema, allow_nan=False)
        _check_length(text)
        # As it is used: with text where a dict of Python has numbers as keys.
        schema = json.loads(text)
        # Without formats: those of patterns are Python's, and we use another engine.
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
    """Return what does not match; empty: everything does.

    Args:
        schema: The schema, as JSON.
        value: The value.
        name: What to call the value.

    Raises:
        SchemaError: The schema cannot be used.

    Example:
        >>> find_mismatch('{"items": {"type": "integer"}}', [1, "b"], "sizes")
        "sizes[1]: 'b' is not of type 'integer'"
    """
    from tidemill.runtime.schema_validator import TooMuchWorkError, measure, run_bounded

    size_bytes, depth = measure(value)
    if size_bytes > MAX_VALUE_BYTES:
        return f"{name}: it is too large; values that have a schema may have up to {MAX_VALUE_BYTES // 1024} KiB"
    if depth > MAX_VALUE_DEPTH:
        return f"{name}: it is nested too deeply; values that have a schema may be {MAX_VALUE_DEPTH} levels deep"
    try:
        with run_bounded(size_bytes + len(schema)):
            error = next(_build_validator(schema).iter_errors(value), None)
    except RecursionError:
        raise SchemaError("it refers to itself without end") from None
    except TooMuchWorkError:
        return f"{name}: checking it against its schema takes too long; give a smaller value, or simplify the schema"
    except Exception as problem:  # what it refers to does not exist, a pattern is not one ...
        raise SchemaError(_cut(str(problem) or describe_error(problem))) from None
    if error is None:
        return ""
    place = "".join(f"[{part!r}]" for part in error.absolute_path)
    return f"{name}{place}: {_cut(error.message)}"


@functools.lru_cache(_KEPT)
def _build_validator(schema: str) -> Any:
    from tidemill.runtime.schema_validator import build_validator

    _check_length(schema)
    if '"unevaluatedProperties"' in schema and '"patternProperties"' in schema:
        # Searched for by `jsonschema` itself, with an engine that backtracks.
        raise SchemaError(
            "unevaluatedProperties cannot be used together with patternProperties; use additionalProperties"
        )
    return build_validator(json.loads(schema))


def _check_length(schema: str) -> None:
    if len(schema) > MAX_SCHEMA_BYTES:
        raise SchemaError(f"it has {len(schema):,} characters; up to {MAX_SCHEMA_BYTES:,} are allowed")


def _find_patterns(schema: Any) -> Iterator[str]:
    """Find the regular expressions of a schema; what only looks like one, such as a part of a default, is not."""
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
