"""Turns any value of a log entry into text; logging must not fail because of a value.

Invariants: nothing here raises. If one part of a value cannot be searched for secrets, secrets in its other parts are
still masked.
"""

from __future__ import annotations

from typing import Any

from tidemill.config.redaction import MASK, is_secret, redact, redact_text


def describe_value(value: object) -> str:
    """Return the `repr` of a value, or a text that names its type if `repr` fails.

    Example:
        >>> describe_value({("t", 0): 3})
        "{('t', 0): 3}"
    """
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__} that cannot be shown>"


def mask_value(name: str, value: Any) -> Any:
    """Return a value with its secrets masked, also inside texts.

    Args:
        name: The field of the value.
        value: Any value; one that cannot be searched for secrets is not shown.

    Example:
        >>> mask_value("error", "password=hunter2"), mask_value("password", "hunter2")
        ('password=***', '***')
    """
    try:
        if isinstance(value, str):
            return MASK if is_secret(name) and value else redact_text(value)
        if isinstance(value, dict | list | tuple):
            return redact({name: value})[name]
    except Exception:
        return f"<{type(value).__name__} that cannot be shown>"
    return value
