"""Checks values against JSON schema, and says in a line what does not match.

Schemas are from users: nothing that a schema refers to is fetched, and a schema that cannot be used is an error of its
own, whatever goes wrong with it. `jsonschema` is imported only when there is a schema.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from tidemill.core.errors import TidemillError, describe_error

#: Longer messages are cut: they have the value in them.
_MAX_TEXT = 300
_KEPT = 256


class SchemaError(TidemillError, ValueError):
    """A schema is not JSON schema, or cannot be used."""


def check_schema(schema: Mapping[str, Any]) -> None:
    """Check a schema.

    Raises:
        SchemaError: It is not one.
    """
    import jsonschema

    try:
        text = json.dumps(schema, allow_nan=False)
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise SchemaError(_cut(error.message)) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(_cut(describe_error(error))) from None
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
    try:
        error = next(_build_validator(schema).iter_errors(value), None)
    except RecursionError:
        raise SchemaError("it refers to itself without end") from None
    except Exception as problem:  # what it refers to does not exist, a pattern is not one ...
        raise SchemaError(_cut(str(problem) or describe_error(problem))) from None
    if error is None:
        return ""
    place = "".join(f"[{part!r}]" for part in error.absolute_path)
    return f"{name}{place}: {_cut(error.message)}"


@functools.lru_cache(_KEPT)
def _build_validator(schema: str) -> Any:
    import jsonschema
    import referencing

    return jsonschema.Draft202012Validator(
        json.loads(schema), format_checker=jsonschema.FormatChecker(), registry=referencing.Registry()
    )


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_TEXT else f"{line[: _MAX_TEXT // 2]} ... {line[-_MAX_TEXT // 2 :]}"
