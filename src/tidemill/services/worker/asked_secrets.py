"""What of the answers of the store must not appear in the log of the attempt that asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tidemill.config.redaction import find_url_secrets, is_secret
from tidemill.store.task_calls import ConnectionRecord, GetConnection, GetVariable

#: Shorter ones would be found in every other line.
_MIN_CHARS = 4


def find_secrets(call: object, answer: object) -> set[str]:
    """Return the passwords of a connection, or the value of a variable whose name says that it is secret.

    Example:
        >>> find_secrets(GetVariable("api_key"), "abc123"), find_secrets(GetVariable("region"), "north")
        ({'abc123'}, set())
    """
    found: set[str] = set()
    match call, answer:
        case GetVariable(key), str():
            found = {answer} if is_secret(key) else set(find_url_secrets(answer))
        case GetConnection(), ConnectionRecord():
            found = {answer.password or "", *_find_in_json(answer.extra or "")}
    return {secret for secret in found if len(secret) >= _MIN_CHARS}


def _find_in_json(text: str) -> Iterator[str]:
    try:
        yield from _find_in(json.loads(text), "")
    except (ValueError, RecursionError):
        return


def _find_in(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _find_in(item, str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _find_in(item, key)
    elif isinstance(value, str) and is_secret(key):
        yield value
