"""Page cursors: the position in a list as an opaque text, which callers return unchanged to get the next page.

A cursor holds the sort key of the last row that was shown, and a digest of its query. It is neither secret nor signed:
errors in a cursor are reported, and its content is never executed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Sequence

#: The longest key has a topic's name (249 characters) and two of our names.
_MAX_CHARS = 4096


class WrongCursorError(ValueError):
    """The cursor was not issued for this query."""


Key = tuple[int | str, ...]


def digest_query(query: str) -> str:
    """Return the digest of a query that its cursors contain."""
    return hashlib.blake2b(query.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def encode_cursor(query: str, key: Sequence[int | str]) -> str:
    """Return the cursor after a row.

    Args:
        query: The query as a text, equal for equal queries.
        key: The row's sort key.
    """
    text = json.dumps([digest_query(query), *key], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode_cursor(cursor: str, query: str, kinds: Sequence[type[int] | type[str]]) -> Key:
    """Return the sort key in a cursor.

    Args:
        cursor: A result of `encode_cursor`.
        query: The query it is used with.
        kinds: The types of the key's values.

    Raises:
        WrongCursorError: It is damaged, or belongs to another query.

    Example:
        >>> decode_cursor(encode_cursor("all", (5, "a")), "all", (int, str))
        (5, 'a')
    """
    try:
        if len(cursor) > _MAX_CHARS or not cursor.isascii():
            raise ValueError("too long")  # noqa: TRY301 - what is wrong with it does not matter
        padded = cursor + "=" * (-len(cursor) % 4)
        found = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        raise WrongCursorError("the cursor is damaged; start again without one")
    if found[0] != digest_query(query):
        raise WrongCursorError("the cursor belongs to another query; start again without one")
    key = tuple(found[1:])
    if len(key) != len(kinds) or any(type(value) is not kind for value, kind in zip(key, kinds, strict=True)):
        raise WrongCursorError("the cursor is damaged; start again without one")
    if any(isinstance(value, int) and not -(2**63) <= value < 2**63 for value in key):
        raise WrongCursorError("the cursor is damaged; start again without one")
    return key
