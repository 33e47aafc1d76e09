"""Finds the secrets in the calls of tasks and triggers and in their answers, so that logs can mask them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tidemill.config.redaction import find_url_secrets, is_secret
from tidemill.store.calls.task_calls import ConnectionRecord, GetConnection, GetVariable, SetVariable

#: Smaller numbers in a secret value are ports, sizes or counts; masking them would spoil every other line.
_MIN_NUMBER = 100_000


def find_secrets(call: object, answer: object = None) -> set[str]:
    """Return the secrets in a connection or variable that a call reads or sets.

    Example:
        >>> find_secrets(GetVariable("api_key"), "abc123"), find_secrets(GetVariable("region"), "north")
        ({'abc123'}, set())
    """
    match call, answer:
        case (GetVariable(key), str(value)) | (SetVariable(key, value), _):
            own = {value} if is_secret(key) else set()
            return own | set(find_url_secrets(value)) | set(_find_in_json(value, key))
        case GetConnection(), ConnectionRecord():
            texts = (text for text in (answer.host, answer.extra) if text)
            found = {secret for text in texts for secret in (*find_url_secrets(text), *_find_in_json(text, ""))}
            return found | ({answer.password} if answer.password else set())
    return set()


def _find_in_json(text: str, key: str) -> Iterator[str]:
    try:
        value = json.loads(text)
        if isinstance(value, dict | list):
            yield from _find_in(value, is_secret(key))
    except (ValueError, RecursionError):
        return


def _find_in(value: Any, is_known: bool) -> Iterator[str]:
    """Yield the secrets in a value; `is_known`: an enclosing key marks the whole value as secret."""
    match value:
        case dict():
            for name, item in value.items():
                yield from _find_in(item, is_known or is_secret(str(name)))
        case list():
            for item in value:
                yield from _find_in(item, is_known)
        case bool() | None:
            return
        case str() if not is_known:
            yield from find_url_secrets(value)
            yield from _find_in_json(value, "")
        case str():
            yield value
        case int() if is_known and abs(value) >= _MIN_NUMBER:
            yield str(value)
