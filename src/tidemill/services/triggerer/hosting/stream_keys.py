"""Formats the keys of shared streams for display."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Hashable

from tidemill.config.redaction import redact_text
from tidemill.core.errors import escape_surrogates

_MAX_KEYS = 20_000
_MAX_CHARS = 1_000


def describe_key(key: Hashable) -> str:
    """Return a key without Python's punctuation: its non-empty parts, separated by spaces.

    Fields of a dataclass without a default are shown by value; the others are shown as `name=value` if they differ from
    their default.

    Example:
        >>> describe_key(("kafka", "localhost:9092", "orders", None)), describe_key(3)
        ('kafka localhost:9092 orders', '3')
    """
    if key is None:
        return ""
    if isinstance(key, (tuple, frozenset)):
        return " ".join(text for part in key if (text := describe_key(part)))
    if dataclasses.is_dataclass(key) and not isinstance(key, type):
        return " ".join(text for field in dataclasses.fields(key) if (text := _describe_field(key, field)))
    return str(key)


class StreamNames:
    """Caches the display names of streams, with secrets masked."""

    def __init__(self) -> None:
        self._names: dict[Hashable, str] = {}
        self._ids: dict[Hashable, str] = {}

    def find_id(self, key: Hashable) -> str:
        """Return the id of a stream in URLs; it is valid while this process runs."""
        found = self._ids.get(key)
        if found is None:
            if len(self._ids) >= _MAX_KEYS:
                self._ids.clear()
            what = repr((type(key).__name__, hash(key))).encode("utf-8", "replace")
            found = self._ids[key] = hashlib.blake2b(what, digest_size=8).hexdigest()
        return found

    def find(self, key: Hashable) -> str:
        """Return the display name of a stream."""
        name = self._names.get(key)
        if name is None:
            if len(self._names) >= _MAX_KEYS:
                self._names.clear()
            try:
                name = redact_text(escape_surrogates(describe_key(key)[:_MAX_CHARS]))
            except Exception:  # a user's class may raise any exception
                name = type(key).__name__
            self._names[key] = name
        return name


def _describe_field(key: object, field: dataclasses.Field[object]) -> str:
    value = getattr(key, field.name)
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return describe_key(value)
    return "" if value == field.default else f"{field.name}={describe_key(value)}"
