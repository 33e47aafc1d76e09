"""The key of a shared stream as text, by which the store assigns its triggers to triggerers.

Invariants: equal keys give equal texts in every process, even where the order in their `repr` differs between
processes; the text is short enough for an index, and any database can store it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Hashable

#: Longer texts are cut, and end with their hash.
_MAX_CHARS = 500
_DIGEST_BYTES = 16


def write_key(key: Hashable) -> str:
    """Return a key as text.

    Example:
        >>> write_key(("kafka", frozenset({"b", "a"}))), len(write_key("x" * 10_000))
        ("('kafka', {'a', 'b'})", 500)
    """
    text = _write(key).encode("ascii", "backslashreplace").decode().replace("\0", "\\0")
    if len(text) <= _MAX_CHARS:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()
    return text[: _MAX_CHARS - len(digest)] + digest


def _write(value: object) -> str:
    if type(value) is frozenset:
        return f"{{{', '.join(sorted(map(_write, value)))}}}"
    if type(value) is tuple:
        return f"({', '.join(map(_write, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        compared = (field.name for field in dataclasses.fields(value) if field.compare)
        fields = (f"{name}={_write(getattr(value, name))}" for name in compared)
        return f"{type(value).__qualname__}({', '.join(fields)})"
    return repr(value)
