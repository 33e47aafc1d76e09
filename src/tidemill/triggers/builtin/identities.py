"""Identities of events: strings that are equal for one occurrence, however often it is seen, and differ for two.

An identity says where and when something occurred. If the trigger selects events, it ends in a digest of the selection,
so that a trigger with a changed selection under the same name fires its own events.

Invariants: an identity stays below the 1,024 bytes that a store accepts; the input of a digest cannot be recovered.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from tidemill.core.triggers.stable_files import Version

#: Longer locations are shortened, to leave room for the rest.
MAX_PLACE_BYTES: Final = 512
_DIGEST_CHARACTERS: Final = 32
_SHOWN_CHARACTERS: Final = 64


def compute_digest(*parts: Any) -> str:
    """Return 32 hexadecimal digits (128 bits) for JSON values or bytes; the order of keys does not matter.

    Example:
        >>> compute_digest("GET", {"a": 1, "b": 2}) == compute_digest("GET", {"b": 2, "a": 1})
        True
    """
    text = json.dumps(parts, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARACTERS]


def shorten_middle(text: str) -> str:
    """Return a location unchanged; if it is too long, return a digest of it and its end.

    Example:
        >>> shorten_middle("/data/in.csv"), len(shorten_middle("/data" * 1000)) < 200
        ('/data/in.csv', True)
    """
    if len(text.encode("utf-8", "surrogatepass")) <= MAX_PLACE_BYTES:
        return text
    return f"{compute_digest(text)}...{text[-_SHOWN_CHARACTERS:]}"


def build_suffix(selects: Mapping[str, Any]) -> str:
    """Return the suffix of identities for a selection; '' without one.

    Example:
        >>> build_suffix({}), len(build_suffix({"key": "a"}))
        ('', 17)
    """
    return f"#{compute_digest(selects)[:16]}" if selects else ""


def build_file_identity(path: str, version: Version) -> str:
    """Return the identity of one version of a file.

    Example:
        >>> build_file_identity("/data/in.csv", Version(modified_ns=7, size_bytes=3, inode=12))
        '/data/in.csv@7.3.12'
    """
    return f"{shorten_middle(path)}@{version.modified_ns}.{version.size_bytes}.{version.inode}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bytes):
        return {"sha256": hashlib.sha256(value).hexdigest()}
    return repr(value)
